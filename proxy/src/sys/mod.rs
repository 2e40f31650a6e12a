//! The node as an operating system: network namespaces, addresses, kernel settings, host facts, raw nfnetlink.
//!
//! Everything that reads `/proc` or `/sys` takes a [`Root`], so that tests can show it another machine.
#![deny(unsafe_code)] // only `memory` allows it

pub mod address;
pub mod host;
pub mod memory;
pub mod netns;
pub mod nfnetlink;
pub mod sysctl;

use std::io;
use std::path::{Path, PathBuf};

/// The directory under which `proc` and `sys` are found: `/` on a real machine.
#[derive(Clone, Debug)]
pub struct Root(PathBuf);

impl Default for Root {
    fn default() -> Self {
        Self(PathBuf::from("/"))
    }
}

impl Root {
    /// Another root, for tests and for a host's file system that is mounted elsewhere.
    #[must_use]
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The real path of `path`, which is absolute (`/proc/…`).
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        self.0.join(Path::new(path).strip_prefix("/").unwrap_or(Path::new(path)))
    }

    /// The trimmed content of a file.
    pub fn read(&self, path: &str) -> io::Result<String> {
        std::fs::read_to_string(self.path(path)).map(|text| text.trim().to_owned())
    }

    /// Writes a file that exists; never creates one.
    pub fn write(&self, path: &str, value: &str) -> io::Result<()> {
        use std::io::Write;
        std::fs::OpenOptions::new().write(true).truncate(true).open(self.path(path))?.write_all(value.as_bytes())
    }

    /// Whether the file or directory exists.
    #[must_use]
    pub fn exists(&self, path: &str) -> bool {
        self.path(path).exists()
    }
}
