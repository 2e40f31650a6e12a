//! A directory of manifests in place of an API server (`--manifests DIR`).
//!
//! Files ending in `.yaml`, `.yml` or `.json` directly in the directory are read, hidden ones (a leading dot) are not; each may
//! hold several documents and Lists of kinds Service, EndpointSlice, Node and ServiceCIDR. The way of an object: text →
//! `yaml` (tree with lines) → `document` (API object) → `defaults` → `validate` → `convert` → `picture` (all files together,
//! differences). [`ManifestSource`] repeats it on every change.

mod defaults;
mod document;
mod fields;
mod object;
mod picture;
mod validate;
mod watch;
mod yaml;

#[cfg(test)]
mod tests;

pub use document::Kind;
pub use watch::ManifestSource;

use super::Problem;
use crate::model::{Delta, Node};
use picture::Picture;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Larger files are refused: they are a mistake (a log, a core dump), and would be read at every change.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// The text of one file, or why it cannot be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileText {
    /// Name without directory.
    pub name: String,
    /// The text, or a message for an operator.
    pub text: Result<String, String>,
}

/// A directory cannot be read at all.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the manifest directory {}: {source}", path.display())]
pub struct ReadError {
    /// The directory.
    pub path: PathBuf,
    /// What the system says.
    pub source: io::Error,
}

/// Everything in a directory of manifests, once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loaded {
    /// The whole picture: the node first, then all other objects.
    pub deltas: Vec<Delta>,
    /// What is wrong; the objects with errors are not in `deltas`.
    pub problems: Vec<Problem>,
    /// Valid objects by kind.
    pub counts: BTreeMap<Kind, usize>,
}

/// The answer of `tandem check DIR`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckReport {
    /// Number of files read.
    pub files: usize,
    /// What is wrong, errors first.
    pub problems: Vec<Problem>,
    /// Valid objects by kind; kinds without any are left out.
    pub counts: BTreeMap<Kind, usize>,
}

impl CheckReport {
    /// Number of errors; `tandem check` fails if there is any.
    #[must_use]
    pub fn errors(&self) -> usize {
        self.problems.iter().filter(|problem| problem.error).count()
    }
}

/// Reads the manifests of `dir`.
///
/// # Errors
/// If the directory itself cannot be read; a file that cannot be read is a problem in the list.
pub fn read_dir(dir: &Path) -> Result<Vec<FileText>, ReadError> {
    let error = |source| ReadError { path: dir.to_owned(), source };
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(error)? {
        let Ok(name) = entry.map_err(error)?.file_name().into_string() else { continue };
        if is_manifest(&name)
            && let Some(text) = read_file(&dir.join(&name))
        {
            files.push(FileText { name, text });
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

/// Makes the whole picture from the texts of the files: no IO. `node_name` names the Node object that is ours, `machine` gives
/// the facts of the machine for what no Node object says.
#[must_use]
pub fn load(files: Vec<FileText>, node_name: &str, machine: Node) -> Loaded {
    let mut picture = Picture::new(node_name, machine);
    let update = picture.update(files);
    let mut counts = BTreeMap::new();
    for key in picture.keys() {
        *counts.entry(key.kind()).or_insert(0) += 1;
    }
    Loaded { deltas: update.deltas, problems: update.problems, counts }
}

/// [`read_dir`] and [`load`].
///
/// # Errors
/// If the directory cannot be read.
pub fn load_dir(dir: &Path, node_name: &str, machine: Node) -> Result<Loaded, ReadError> {
    Ok(load(read_dir(dir)?, node_name, machine))
}

/// Checks the manifests of `dir` without a node: what `tandem check DIR` prints.
///
/// # Errors
/// If the directory cannot be read.
pub fn check(dir: &Path) -> Result<CheckReport, ReadError> {
    let files = read_dir(dir)?;
    let count = files.len();
    let Loaded { problems, counts, .. } = load(files, "", Node::default());
    Ok(CheckReport { files: count, problems, counts })
}

/// Whether a file of this name is read.
fn is_manifest(name: &str) -> bool {
    !name.starts_with('.') && [".yaml", ".yml", ".json"].iter().any(|ending| name.ends_with(ending))
}

/// `None`: not a regular file, or gone since the directory was listed.
fn read_file(path: &Path) -> Option<Result<String, String>> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        // A link whose target is missing is worth a word; a file that was there and is not any more is not.
        Err(error) if error.kind() == io::ErrorKind::NotFound && path.symlink_metadata().is_err() => return None,
        Err(error) => return Some(Err(format!("cannot be read: {error}"))),
    };
    if !metadata.is_file() {
        return None;
    }
    if metadata.len() > MAX_FILE_BYTES {
        return Some(Err(format!(
            "has {} MiB, more than {} MiB; it is not read",
            metadata.len() >> 20,
            MAX_FILE_BYTES >> 20
        )));
    }
    match fs::read(path) {
        Ok(bytes) => Some(String::from_utf8(bytes).map_err(|_| "is not UTF-8 text; it is not read".to_owned())),
        Err(error) => Some(Err(format!("cannot be read: {error}"))),
    }
}
