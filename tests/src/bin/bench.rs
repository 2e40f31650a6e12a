//! Benchmarks of Tandem beside the real kube-proxy; `cargo xtask bench` builds and starts it.

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use proxy_tests::bench::table::Format;
use proxy_tests::bench::{connect, sync};
use serde::Serialize;
use std::time::Duration;

/// Benchmarks of Tandem beside the real kube-proxy.
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Sync(Sync),
    Connect(Connect),
}

/// How results are printed.
#[derive(Args)]
struct Output {
    /// `json` instead of a table.
    #[arg(short, long, value_parser = ["json"])]
    output: Option<String>,
    /// Markdown, for the README.
    #[arg(long, conflicts_with = "output")]
    readme: bool,
}

impl Output {
    fn print(&self, report: &impl Serialize, render: impl FnOnce(Format) -> String) -> Result<()> {
        if self.output.is_some() {
            println!("{}", serde_json::to_string_pretty(report)?);
        } else {
            print!("{}", render(if self.readme { Format::Markdown } else { Format::Text }));
        }
        Ok(())
    }
}

/// From the API server to packets: cold start, restart, single changes, memory.
#[derive(Args)]
struct Sync {
    /// Sizes of the cluster, in Services.
    #[arg(long, value_delimiter = ',', default_value = "1000,10000")]
    services: Vec<usize>,
    /// Endpoints of each Service.
    #[arg(long, default_value_t = 10)]
    endpoints: usize,
    /// Visits of each program to each size.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Single changes of each kind in each visit.
    #[arg(long, default_value_t = 20)]
    changes: usize,
    /// Seconds without any change before memory is looked at once more; 0 = it is not.
    #[arg(long, default_value_t = 0)]
    idle: u64,
    /// Seconds that anything may take.
    #[arg(long, default_value_t = 600)]
    limit: u64,
    /// A short form: 200 Services with 5 endpoints, 1 round of 1 change of each kind.
    #[arg(long, conflicts_with_all = ["services", "endpoints", "rounds", "changes"])]
    quick: bool,
    /// Fail if Tandem needs more than this many times what kube-proxy needs, in any of the main measures.
    #[arg(long, value_name = "TIMES")]
    assert: Option<f64>,
    #[command(flatten)]
    output: Output,
}

impl Sync {
    fn run(self) -> Result<()> {
        let mut options = sync::Options {
            services: self.services,
            endpoints: self.endpoints,
            rounds: self.rounds,
            changes: self.changes,
            idle: Duration::from_secs(self.idle),
            limit: Duration::from_secs(self.limit),
        };
        if self.quick {
            options = sync::Options { idle: options.idle, limit: options.limit, ..sync::Options::quick() };
        }
        let report = sync::run(&options)?;
        self.output.print(&report, |format| report.render(format))?;
        let above = self.assert.map(|times| report.above(times)).unwrap_or_default();
        anyhow::ensure!(above.is_empty(), "Tandem needs more than allowed:\n{}", above.join("\n"));
        Ok(())
    }
}

/// First packets of connections: through Tandem's rules, kube-proxy's, and without a proxy.
#[derive(Args)]
struct Connect {
    /// Sizes of the cluster, in Services.
    #[arg(long, value_delimiter = ',', default_value = "10,30000")]
    services: Vec<usize>,
    /// Endpoints of each Service.
    #[arg(long, default_value_t = 4)]
    endpoints: usize,
    /// Samples of each case.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Connections of each sample.
    #[arg(long, default_value_t = 5000)]
    connections: usize,
    /// Seconds that a proxy may take to program its rules.
    #[arg(long, default_value_t = 900)]
    limit: u64,
    #[command(flatten)]
    output: Output,
}

impl Connect {
    fn run(self) -> Result<()> {
        let report = connect::run(&connect::Options {
            services: self.services,
            endpoints: self.endpoints,
            rounds: self.rounds,
            connections: self.connections,
            limit: Duration::from_secs(self.limit),
        })?;
        self.output.print(&report, |format| report.render(format))
    }
}

fn main() -> Result<()> {
    match Options::parse().command {
        Command::Sync(options) => options.run(),
        Command::Connect(options) => options.run(),
    }
}
