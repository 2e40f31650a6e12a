//! Compares Tandem with the real kube-proxy; `cargo xtask conformance` builds what it needs and starts it.

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use proxy_tests::conformance::mutation::{self, Mutation};
use proxy_tests::conformance::report::RoundReport;
use proxy_tests::conformance::round;
use proxy_tests::conformance::run::Lab;
use proxy_tests::engine::Program;
use serde_json::json;
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// The options of `cargo xtask conformance`, which describes them.
#[derive(Parser)]
struct Options {
    #[arg(long, default_value_t = 3)]
    rounds: u32,
    #[arg(long)]
    seed: Option<u64>,
    #[arg(long)]
    round: Option<u32>,
    #[arg(long, conflicts_with = "mutate")]
    against_itself: bool,
    #[arg(long)]
    mutate: Vec<String>,
    #[arg(long)]
    time_limit: Option<u64>,
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Text,
    Json,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// What is being done, on one line of a terminal that the next one replaces.
struct Progress {
    terminal: bool,
}

impl Progress {
    fn say(&self, what: &str) {
        if self.terminal {
            let short: String = what.chars().take(150).collect();
            eprint!("\r\x1b[K{short}");
            let _ = std::io::stderr().flush();
        }
    }
}

fn run(options: &Options) -> Result<bool> {
    if options.mutate.iter().any(|m| m == "list") {
        mutation::ALL.iter().for_each(|m| println!("{:28} {}", m.name, m.what));
        return Ok(true);
    }
    let mutations = mutations(&options.mutate)?;
    if let Some(why) = proxy_tests::netns::missing() {
        bail!("{why}");
    }
    proxy_tests::clean_up_when_interrupted()?;
    let seed = match options.seed {
        Some(seed) => seed,
        // Small enough to be typed again.
        None => u64::from(std::time::UNIX_EPOCH.elapsed().context("the clock")?.subsec_nanos()),
    };
    let rounds = match options.round {
        Some(0) => bail!("rounds are counted from 1"),
        Some(number) => number..=number,
        None => 1..=options.rounds,
    };
    let progress = Progress { terminal: std::io::stderr().is_terminal() };
    progress.say("starting etcd and kube-apiserver");
    let begun = Instant::now();
    let lab = Lab::start()?;
    progress.say("");
    if options.output == Output::Text {
        println!("seed {seed}");
    }
    let limit = options.time_limit.map(Duration::from_secs);
    let rounds = rounds.take_while(|_| limit.is_none_or(|limit| begun.elapsed() < limit));
    if mutations.is_empty() {
        compare(options, &lab, seed, rounds, &progress)
    } else {
        controls(options, &lab, seed, rounds, &mutations, &progress)
    }
}

fn mutations(names: &[String]) -> Result<Vec<&'static Mutation>> {
    if names.iter().any(|name| name == "all") {
        return Ok(mutation::ALL.iter().collect());
    }
    let find = |name: &String| {
        mutation::find(name).with_context(|| format!("nothing is called {name}; `--mutate list` shows the kinds"))
    };
    names.iter().map(find).collect()
}

/// Tandem, or kube-proxy, against kube-proxy: nothing may differ.
fn compare(
    options: &Options,
    lab: &Lab,
    seed: u64,
    rounds: impl Iterator<Item = u32>,
    progress: &Progress,
) -> Result<bool> {
    let subject = if options.against_itself { Program::KubeProxy } else { Program::Tandem };
    let (mut sum, mut count) = (RoundReport::default(), 0);
    for number in rounds {
        let report = lab
            .round(subject, &round(seed, number), &|what| progress.say(&format!("round {number}, {what}")))
            .with_context(|| format!("round {number} of seed {seed}"));
        progress.say("");
        let report = report?;
        match options.output {
            Output::Json => println!("{}", serde_json::to_string(&report)?),
            Output::Text => {
                println!("round {number}: {report}");
                report.passing.iter().for_each(|how| println!("  gone at a second look: {how}"));
                report.differences.iter().for_each(|difference| println!("{difference}"));
            }
        }
        count += 1;
        sum.add(&report);
    }
    match options.output {
        Output::Json => println!("{}", json!({ "rounds": count, "seed": seed, "sum": sum })),
        Output::Text => println!("{count} rounds of seed {seed}: {sum}"),
    }
    Ok(count > 0 && sum.is_good())
}

/// Tandem with rules broken: each must be found out.
fn controls(
    options: &Options,
    lab: &Lab,
    seed: u64,
    rounds: impl Iterator<Item = u32>,
    mutations: &[&'static Mutation],
    progress: &Progress,
) -> Result<bool> {
    let mut found = BTreeMap::new();
    for number in rounds {
        let left: Vec<&Mutation> = mutations.iter().copied().filter(|m| !found.contains_key(m.name)).collect();
        if left.is_empty() {
            break;
        }
        let some = lab
            .mutated(&round(seed, number), &left, &|what| progress.say(&format!("round {number}, {what}")))
            .with_context(|| format!("round {number} of seed {seed}"));
        progress.say("");
        found.extend(some?);
    }
    for mutation in mutations {
        let difference = found.get(mutation.name);
        match options.output {
            Output::Json => {
                println!("{}", json!({ "mutation": mutation.name, "what": mutation.what, "found": difference }));
            }
            Output::Text => match difference {
                Some(d) => println!(
                    "{:28} found by {}: {} instead of {}",
                    mutation.name,
                    d.probe,
                    d.subject.join(", "),
                    d.reference.join(", ")
                ),
                None => println!("{:28} NOT FOUND: {}", mutation.name, mutation.what),
            },
        }
    }
    if options.output == Output::Text {
        println!("{} of {} broken rules found out", found.len(), mutations.len());
    }
    Ok(found.len() == mutations.len())
}
