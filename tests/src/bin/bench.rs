//! Benchmarks of Tandem beside the real kube-proxy; `cargo xtask bench` builds and starts it.

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use proxy_tests::bench::connect;
use proxy_tests::bench::table::Format;
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
        Command::Connect(options) => options.run(),
    }
}
