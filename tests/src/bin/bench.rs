//! Benchmarks of Tandem beside the real kube-proxy; `cargo xtask bench` builds and starts it.

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use proxy_tests::bench::table::Format;
use proxy_tests::bench::{churn, connect, scale, sync};
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
    Scale(Scale),
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

/// Far larger clusters, and endpoints that change all the time.
#[derive(Args)]
struct Scale {
    /// Sizes that are started, as SERVICESxENDPOINTS.
    #[arg(long, value_delimiter = ',', default_value = "30000x4,2000x100", value_parser = size)]
    sizes: Vec<(usize, usize)>,
    /// Services added one after the other at each size.
    #[arg(long, default_value_t = 11)]
    added: usize,
    /// Size of the cluster whose endpoints change.
    #[arg(long, default_value = "10000x10", value_parser = size)]
    churn: (usize, usize),
    /// Endpoint changes a second.
    #[arg(long, default_value_t = 1000)]
    rate: usize,
    /// Seconds of changes.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Seconds that a proxy may take until it serves, and until it has caught up.
    #[arg(long, default_value_t = 600)]
    limit: u64,
    /// `start` or `churn` alone.
    #[arg(long, value_parser = ["start", "churn"])]
    only: Option<String>,
    #[command(flatten)]
    output: Output,
}

fn size(text: &str) -> Result<(usize, usize), String> {
    let numbers =
        text.split_once('x').and_then(|(services, endpoints)| Some((services.parse().ok()?, endpoints.parse().ok()?)));
    numbers.ok_or_else(|| "give Services and endpoints of each, for instance 30000x4".to_string())
}

impl Scale {
    fn run(self) -> Result<()> {
        let limit = Duration::from_secs(self.limit);
        let changes = churn::Options { rate: self.rate, time: Duration::from_secs(self.seconds), limit };
        let only = self.only.as_deref();
        let report = scale::run(&scale::Options {
            sizes: if only == Some("churn") { Vec::new() } else { self.sizes },
            added: self.added,
            churn: (only != Some("start")).then_some(scale::Churn { size: self.churn, changes }),
            limit,
        })?;
        self.output.print(&report, |format| report.render(format))
    }
}

fn main() -> Result<()> {
    proxy_tests::clean_up_when_interrupted()?;
    match Options::parse().command {
        Command::Sync(options) => options.run(),
        Command::Connect(options) => options.run(),
        Command::Scale(options) => options.run(),
    }
}
