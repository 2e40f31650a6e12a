//! That a built program does not hold paths of the machine that built it.

use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::path::Path;

/// Fails if `file` contains the workspace's path or a home directory.
///
/// # Errors
/// If the file cannot be read or holds such a path.
pub fn check(file: &Path, workspace: &Path) -> Result<()> {
    let bytes = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let mut needles = vec![format!("{}/", workspace.display()), format!("/{}/", "root"), format!("/{}/", "home")];
    if let Some(home) = std::env::var_os("HOME") {
        needles.push(format!("{}/", Path::new(&home).display()));
    }
    let found = find(&bytes, &needles);
    if found.is_empty() {
        println!("tidy: {} holds no path of this machine", file.display());
        return Ok(());
    }
    for text in found.iter().take(20) {
        println!("  {text}");
    }
    bail!("{} holds {} different paths of this machine; build it with `cargo xtask dist`", file.display(), found.len());
}

/// The readable surroundings of each place where one of `needles` is.
fn find(bytes: &[u8], needles: &[String]) -> BTreeSet<String> {
    let readable = |b: &u8| b.is_ascii_graphic();
    let mut found = BTreeSet::new();
    for needle in needles {
        for (at, _) in bytes.windows(needle.len()).enumerate().filter(|(_, window)| *window == needle.as_bytes()) {
            let end = bytes[at..].iter().take(120).position(|b| !readable(b)).unwrap_or(120);
            found.insert(String::from_utf8_lossy(&bytes[at..(at + end).min(bytes.len())]).into_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_found_with_what_follows() {
        let needle = format!("/{}/", "home");
        let path = format!("{needle}someone/src/lib.rs");
        let found = find(format!("\0\x01{path}\0tail").as_bytes(), std::slice::from_ref(&needle));
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [path]);
        assert!(find(b"/cargo/registry/x.rs", &[needle]).is_empty());
    }

    #[test]
    fn the_check_fails_on_such_a_file_and_passes_on_another() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("program");
        std::fs::write(&file, b"panicked at /build/tree/src/main.rs").unwrap();
        assert!(check(&file, Path::new("/build/tree")).is_err());
        assert!(check(&file, Path::new("/build/other")).is_ok());
    }
}
