//! `cargo xtask lint`: format and clippy, with warnings as errors.

use crate::command::{self, cargo, workspace_root};
use anyhow::Result;
use std::process::Command;

/// Checks the format and runs clippy over the workspace with warnings as errors.
#[derive(clap::Args)]
pub struct Options {
    /// Repair the format instead of checking it.
    #[arg(long)]
    fix: bool,
}

/// Runs the command.
///
/// # Errors
/// If a check fails.
pub fn run(options: &Options) -> Result<()> {
    if options.fix {
        command::run(cargo().args(["fmt", "--all"]).current_dir(workspace_root()?))?;
    } else {
        command::run(&mut format()?)?;
    }
    crate::setup::ensure()?;
    command::run(&mut clippy()?)
}

/// The format check.
///
/// # Errors
/// If the workspace is not found.
pub fn format() -> Result<Command> {
    let mut command = cargo();
    command.args(["fmt", "--all", "--check"]).current_dir(workspace_root()?);
    Ok(command)
}

/// Clippy over everything.
///
/// # Errors
/// If the workspace is not found.
pub fn clippy() -> Result<Command> {
    let mut command = cargo();
    command
        .args(["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"])
        .current_dir(workspace_root()?);
    Ok(command)
}
