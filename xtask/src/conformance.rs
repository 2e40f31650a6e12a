//! `cargo xtask conformance`: random cluster states, the real kube-proxy and Tandem side by side, every difference shown.
//!
//! The work is done by the program `conformance` of the crate `proxy-tests`; this builds what it needs.

use crate::command::{self, cargo, workspace_root};
use anyhow::{Context, Result, bail};
use std::process::Stdio;

/// Compares Tandem with the real kube-proxy in random states of a cluster. Needs root, and Go the first time.
///
/// Ends with status 1 if a difference was found that is no deliberate one, if a kind of probe was missing, or if a control failed.
#[derive(clap::Args)]
pub struct Options {
    /// How many rounds; each is a world of its own with several states.
    #[arg(long, default_value_t = 3, value_name = "N")]
    rounds: u32,
    /// Number from which all of a run follows. Without it, one is chosen and printed.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
    /// Only the round of this number (the first is 1): to repeat one.
    #[arg(long, value_name = "K")]
    round: Option<u32>,
    /// Control: kube-proxy on both nodes, which must show no difference.
    #[arg(long)]
    against_itself: bool,
    /// Control: Tandem with one kind of rule broken must be found out. May be given several times; `list` shows the kinds, `all` takes each.
    #[arg(long, value_name = "KIND")]
    mutate: Vec<String>,
    /// Begin no round after this many seconds.
    #[arg(long, value_name = "SECONDS")]
    time_limit: Option<u64>,
    /// `text`, or `json`: one object a line on standard output.
    #[arg(short, long, default_value = "text", value_name = "FORMAT", value_parser = ["text", "json"])]
    output: String,
}

impl Options {
    fn arguments(&self) -> Vec<String> {
        let mut all = vec![format!("--rounds={}", self.rounds), format!("--output={}", self.output)];
        all.extend(self.seed.map(|seed| format!("--seed={seed}")));
        all.extend(self.round.map(|round| format!("--round={round}")));
        all.extend(self.against_itself.then(|| "--against-itself".to_owned()));
        all.extend(self.mutate.iter().map(|kind| format!("--mutate={kind}")));
        all.extend(self.time_limit.map(|seconds| format!("--time-limit={seconds}")));
        all
    }
}

/// Runs the command.
///
/// # Errors
/// If something cannot be built, or the comparison does not end well.
pub fn run(options: &Options) -> Result<()> {
    let root = workspace_root()?;
    let json = options.output == "json";
    crate::setup::ensure()?;
    let builds: [&[&str]; 3] = [
        &["build", "--locked", "--package", "proxy", "--bin", "tandem"],
        &["build", "--locked", "--package", "proxy-tests", "--bin", "conformance", "--bin", "envtest-build"],
        &["run", "--quiet", "--locked", "--package", "proxy-tests", "--bin", "envtest-build"],
    ];
    for arguments in builds {
        let mut command = cargo();
        // Standard output is for what the comparison says; progress of the builds goes to standard error.
        command.args(arguments).current_dir(&root).stdout(Stdio::null());
        if !json {
            println!("$ {}", command::shown(&command));
        }
        command::run_quietly(&mut command)?;
    }
    let mut command = cargo();
    command
        .args(["run", "--quiet", "--locked", "--package", "proxy-tests", "--bin", "conformance", "--"])
        .args(options.arguments())
        .current_dir(&root);
    let status = command.stdin(Stdio::null()).status().context("cargo cannot be run")?;
    if !status.success() {
        bail!("the comparison did not end well ({status})");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn every_option_reaches_the_program() {
        let line = "x --rounds 5 --seed 7 --round 2 --against-itself --mutate a --mutate b --time-limit 60 -o json";
        let options = Line::parse_from(line.split(' ')).options;
        assert_eq!(
            options.arguments().join(" "),
            "--rounds=5 --output=json --seed=7 --round=2 --against-itself --mutate=a --mutate=b --time-limit=60"
        );
    }
}
