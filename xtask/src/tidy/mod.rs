//! `cargo xtask tidy`: rules of the tree that neither rustc nor clippy holds.
//!
//! Each rule is a function from the files to findings, in a file of its own, with a test that shows it failing.

pub mod binary;
mod edges;
mod licence;
mod sizes;
mod source;
mod text;
mod unsafe_code;

pub use licence::LINKED as LINKED_LICENCE;

use crate::command::{self, program, workspace_root};
use anyhow::{Context, Result, bail};
use source::SourceFile;
use std::fmt;
use std::path::{Path, PathBuf};

/// Checks module edges, the places of `unsafe`, forbidden text, licences and third-party notices.
#[derive(clap::Args)]
pub struct Options {
    /// Check this built program for paths of the machine that built it, and nothing else.
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Also list the sizes of the source files.
    #[arg(long)]
    sizes: bool,
}

/// A broken rule at a place.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Finding {
    path: String,
    line: usize,
    message: String,
}

impl Finding {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, message: message.into() }
    }
}

/// `file:line: message`, or `file: message` if no line is meant (line 0).
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line == 0 {
            write!(f, "{}: {}", self.path, self.message)
        } else {
            write!(f, "{}:{}: {}", self.path, self.line, self.message)
        }
    }
}

/// A file of the tree that is text.
pub struct TextFile {
    /// Path from the top of the workspace, with `/`.
    pub path: String,
    /// Its content.
    pub text: String,
}

/// Runs the command.
///
/// # Errors
/// If a rule is broken; each place is printed.
pub fn run(options: &Options) -> Result<()> {
    let root = workspace_root()?;
    if let Some(file) = &options.binary {
        return binary::check(file, &root);
    }
    let files = text_files(&root)?;
    let sources = parse(&files)?;
    let mut total = 0;
    let rules: [(&str, Vec<Finding>); 4] = [
        ("module edges", edges::check(&sources)),
        ("unsafe places", unsafe_code::check(&sources)),
        ("forbidden text", text::check(&files, &sources)),
        ("licences", licence::check(&files)),
    ];
    for (name, mut findings) in rules {
        findings.sort();
        println!(
            "tidy: {name}: {}",
            if findings.is_empty() { "good".into() } else { format!("{} findings", findings.len()) }
        );
        for finding in &findings {
            println!("  {finding}");
        }
        total += findings.len();
    }
    println!("tidy: {}", sizes::summary(&sources));
    if options.sizes {
        print!("{}", sizes::list(&sources));
    }
    if total > 0 {
        bail!("tidy: {total} findings");
    }
    crate::notices::check(&root)
}

/// The text files that git knows or would add.
fn text_files(root: &Path) -> Result<Vec<TextFile>> {
    let listed = command::output(
        program("git", ["ls-files", "-z", "--cached", "--others", "--exclude-standard"]).current_dir(root),
    )?;
    let mut files = Vec::new();
    for path in listed.split('\0').filter(|path| !path.is_empty()) {
        // A file that was removed but not yet committed is still listed; a link's target is listed by itself.
        let Ok(metadata) = std::fs::symlink_metadata(root.join(path)) else { continue };
        if !metadata.is_file() {
            continue;
        }
        let bytes = std::fs::read(root.join(path)).with_context(|| format!("cannot read {path}"))?;
        if let Ok(text) = String::from_utf8(bytes) {
            files.push(TextFile { path: path.to_owned(), text });
        }
    }
    if files.is_empty() {
        bail!("git lists no files in the workspace");
    }
    Ok(files)
}

fn parse(files: &[TextFile]) -> Result<Vec<SourceFile>> {
    files.iter().filter(|f| f.path.ends_with(".rs")).map(|f| SourceFile::parse(&f.path, &f.text)).collect()
}
