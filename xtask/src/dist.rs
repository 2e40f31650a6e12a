//! `cargo xtask dist`: the release build of `tandem`, without paths of this machine in it.

use crate::command::{self, cargo, program, workspace_root};
use crate::tidy::binary;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

/// Builds the release program and checks that it holds no paths of this machine.
#[derive(clap::Args)]
pub struct Options {}

/// Runs the command.
///
/// # Errors
/// If the build fails or the program holds such a path.
pub fn run(_: &Options) -> Result<()> {
    crate::setup::ensure()?;
    let root = workspace_root()?;
    let built = build(&root)?;
    binary::check(&built, &root)?;
    println!("built {}", built.strip_prefix(&root).unwrap_or(&built).display());
    Ok(())
}

/// Builds into `target/dist`, apart from everyday builds, since other flags would build all crates anew each time.
fn build(root: &Path) -> Result<PathBuf> {
    let target = root.join("target/dist");
    let flags = remap(root, &cargo_home()?, &sysroot()?);
    println!(
        "$ cargo build --release --locked --package proxy --bin tandem --target-dir target/dist  (with paths remapped)"
    );
    command::run_quietly(
        cargo()
            .args(["build", "--release", "--locked", "--package", "proxy", "--bin", "tandem", "--target-dir"])
            .arg(&target)
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"))
            .current_dir(root),
    )?;
    Ok(target.join("release/tandem"))
}

/// `--remap-path-prefix` for the places that a build puts into its messages: later ones win, so the most special comes last.
fn remap(root: &Path, cargo_home: &Path, sysroot: &Path) -> Vec<String> {
    [(cargo_home, "/cargo"), (sysroot, "/rust"), (root, "/tandem")]
        .iter()
        .map(|(from, to)| format!("--remap-path-prefix={}={to}", from.display()))
        .collect()
}

fn cargo_home() -> Result<PathBuf> {
    if let Some(home) = std::env::var_os("CARGO_HOME") {
        return Ok(home.into());
    }
    let home = std::env::var_os("HOME").context("neither CARGO_HOME nor HOME is set")?;
    Ok(Path::new(&home).join(".cargo"))
}

fn sysroot() -> Result<PathBuf> {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    Ok(command::output(&mut program(&rustc, ["--print", "sysroot"]))?.trim().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_three_places_are_remapped() {
        let flags = remap(Path::new("/a/tree"), Path::new("/a/.cargo"), Path::new("/a/rust"));
        assert_eq!(
            flags,
            [
                "--remap-path-prefix=/a/.cargo=/cargo",
                "--remap-path-prefix=/a/rust=/rust",
                "--remap-path-prefix=/a/tree=/tandem"
            ]
        );
    }

    /// Builds a small program twice: only the remapped one is free of the place where it was built.
    #[test]
    fn a_remapped_program_does_not_say_where_it_was_built() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let source = root.join("place.rs");
        std::fs::write(&source, "fn main() { let n = std::env::args().count(); assert!(n > 9, \"{n}\"); }").unwrap();
        let compile = |out: &str, flags: &[String]| {
            let mut rustc = program("rustc", ["-Cstrip=symbols", "-Copt-level=1", "-o"]);
            command::output(rustc.arg(root.join(out)).args(flags).arg(&source)).unwrap();
            std::fs::read(root.join(out)).unwrap()
        };
        let needle = format!("{}/place.rs", root.display());
        let holds = |bytes: &[u8]| bytes.windows(needle.len()).any(|w| w == needle.as_bytes());
        assert!(holds(&compile("plain", &[])), "without flags the path is there, else this test shows nothing");
        let flags = remap(root, Path::new("/nowhere"), Path::new("/nowhere-else"));
        assert!(!holds(&compile("remapped", &flags)));
    }
}
