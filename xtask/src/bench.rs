//! `cargo xtask bench`: Tandem beside the real kube-proxy, in numbers.
//!
//! The benchmarks are a program of the package `proxy-tests`, which needs `proxy`; this builds both for release and starts it.

use crate::command::{self, cargo, workspace_root};
use anyhow::Result;
use std::process::Command;

/// Benchmarks of Tandem beside the real kube-proxy; `cargo xtask bench --help` lists them.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
pub struct Options {
    /// Name of the benchmark and its options.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
}

/// Runs the command.
///
/// # Errors
/// If something does not build, or the benchmark fails.
pub fn run(options: &Options) -> Result<()> {
    crate::setup::ensure()?;
    let root = workspace_root()?;
    // Quietly: standard output is for the results, which may be JSON.
    let build = ["build", "--release", "--locked", "--package", "proxy", "--package", "proxy-tests", "--bin", "tandem"];
    command::run_quietly(cargo().args(build).args(["--bin", "bench"]).current_dir(&root))?;
    command::run_quietly(Command::new(root.join("target/release/bench")).args(&options.arguments).current_dir(&root))
}
