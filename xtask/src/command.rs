//! Running other programs: every command is printed before it runs, and named in its error.

use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The workspace's top directory.
///
/// # Errors
/// If neither cargo's environment nor the current directory leads to it.
pub fn workspace_root() -> Result<PathBuf> {
    if let Some(manifest) = std::env::var_os("CARGO_MANIFEST_DIR") {
        let path = PathBuf::from(manifest);
        if let Some(parent) = path.parent().filter(|p| p.join("Cargo.lock").exists()) {
            return Ok(parent.to_path_buf());
        }
    }
    let here = std::env::current_dir().context("the current directory cannot be read")?;
    here.ancestors()
        .find(|p| p.join("Cargo.lock").exists() && p.join("xtask").is_dir())
        .map(Path::to_path_buf)
        .context("not inside Tandem's source tree: run `cargo xtask` there")
}

/// The cargo that runs this command, so that a chosen toolchain is kept.
#[must_use]
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // `cargo run` describes this package to this process. Build scripts of some crates (ring's) watch these variables, so that
    // the inner cargo would build half of the workspace anew, and the next plain cargo once more.
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let about_xtask = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"];
        if about_xtask.iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(&name);
        }
    }
    command
}

/// A program with arguments.
pub fn program<S: AsRef<OsStr>>(name: &str, arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(name);
    command.args(arguments);
    command
}

/// How a command is shown: words separated by spaces, quoted where a shell would need it.
#[must_use]
pub fn shown(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let name = program.file_name().map_or_else(|| program.to_string_lossy(), |n| n.to_string_lossy());
    let mut words = vec![name.into_owned()];
    for argument in command.get_args() {
        let text = argument.to_string_lossy();
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_./=:,@+%[]{}".contains(c);
        if !text.is_empty() && text.chars().all(plain) {
            words.push(text.into_owned());
        } else {
            words.push(format!("'{}'", text.replace('\'', r"'\''")));
        }
    }
    words.join(" ")
}

/// Prints the command and runs it with this terminal's output and no input.
///
/// # Errors
/// If it cannot be started or does not succeed.
pub fn run(command: &mut Command) -> Result<()> {
    println!("$ {}", shown(command));
    run_quietly(command)
}

/// As [`run`], without printing the command.
///
/// # Errors
/// If it cannot be started or does not succeed.
pub fn run_quietly(command: &mut Command) -> Result<()> {
    let status = command.stdin(Stdio::null()).status().with_context(|| format!("cannot run `{}`", shown(command)))?;
    if !status.success() {
        bail!("`{}` failed ({status})", shown(command));
    }
    Ok(())
}

/// Runs a command without showing it and returns its standard output; its errors are part of the error.
///
/// # Errors
/// If it cannot be started or does not succeed.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run `{}`", shown(command)))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed ({}): {}", shown(command), output.status, errors.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether a program of this name is in `PATH`, or in the directories of system programs that an ordinary user's `PATH` may lack.
#[must_use]
pub fn exists(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/local/go/bin"].map(PathBuf::from))
        .any(|directory| directory.join(name).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_as_a_shell_would_take_it() {
        let command = program("/usr/bin/echo", ["a b", "--x=1", "it's", ""]);
        assert_eq!(shown(&command), r"echo 'a b' --x=1 'it'\''s' ''");
    }

    #[test]
    fn a_failing_command_is_named_with_its_errors() {
        let error = output(&mut program("sh", ["-c", "echo broken >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.contains("broken") && error.contains("sh -c"), "{error}");
    }

    #[test]
    fn the_inner_cargo_does_not_see_this_package() {
        // Cargo sets it for this test too, so that there is something to remove.
        assert!(std::env::var_os("CARGO_PKG_VERSION_MAJOR").is_some());
        let removed = |name: &str| cargo().get_envs().any(|(key, value)| key == name && value.is_none());
        assert!(removed("CARGO_PKG_VERSION_MAJOR") && removed("CARGO_MANIFEST_DIR"));
    }

    #[test]
    fn an_unknown_program_does_not_exist() {
        assert!(exists("sh"));
        assert!(!exists("no-such-program-of-tandem"));
    }
}
