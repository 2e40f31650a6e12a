//! Tandem's developer commands: `cargo xtask <command>`.
//!
//! Each command is a file of its own with its own options. A command prints the programs that it runs, needs no input and
//! does the same in CI and by hand. This crate must not depend on `proxy`, because `setup` installs what `proxy` needs to build.
#![forbid(unsafe_code)]

mod bench;
mod command;
mod conformance;
mod demo;
mod dist;
mod lint;
mod notices;
mod setup;
mod test;
mod tidy;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Tandem's developer commands.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Options {
    #[command(subcommand)]
    command: Commands,
}

#[derive(Subcommand)]
enum Commands {
    Setup(setup::Options),
    Test(test::Options),
    Bench(bench::Options),
    Demo(demo::Options),
    Conformance(conformance::Options),
    Lint(lint::Options),
    Tidy(tidy::Options),
    Notices(notices::Options),
    Dist(dist::Options),
    #[command(hide = true)]
    DemoServer(demo::server::Options),
    #[command(hide = true)]
    DemoClient(demo::client::Options),
}

fn main() -> ExitCode {
    let result = match Options::parse().command {
        Commands::Setup(options) => setup::run(&options),
        Commands::Test(options) => test::run(&options),
        Commands::Bench(options) => bench::run(&options),
        Commands::Demo(options) => demo::run(&options),
        Commands::Conformance(options) => conformance::run(&options),
        Commands::Lint(options) => lint::run(&options),
        Commands::Tidy(options) => tidy::run(&options),
        Commands::Notices(options) => notices::run(&options),
        Commands::Dist(options) => dist::run(&options),
        Commands::DemoServer(options) => demo::server::run(&options),
        Commands::DemoClient(options) => demo::client::run(&options),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
