//! The command line: what a person types and reads.

mod commands;
mod lookup;
mod output;

use crate::config::Flags;
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Tandem: the service proxy of a Kubernetes node.
///
/// Without a command it runs the proxy, with kube-proxy's flags and configuration file.
#[derive(Parser)]
#[command(name = "tandem", version, args_conflicts_with_subcommands = true, max_term_width = 120)]
struct Cli {
    #[command(flatten)]
    flags: Flags,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Validate a directory of manifests and exit; nothing is programmed
    Check {
        /// Directory of YAML or JSON files
        dir: PathBuf,
        #[command(flatten)]
        output: output::Format,
    },
    /// Program the rules once and exit
    Sync {
        /// Required: say that one pass is wanted
        #[arg(long, required = true)]
        once: bool,
        /// Print the plan as nft text instead of programming it
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        flags: Flags,
    },
    /// Ask what happens to a new connection
    #[command(after_help = lookup::EXAMPLES)]
    Lookup {
        #[command(flatten)]
        query: lookup::Query,
        #[command(flatten)]
        output: output::Format,
        #[command(flatten)]
        flags: Flags,
    },
    /// Show what the running agent says about itself
    Status {
        #[command(flatten)]
        output: output::Format,
        /// Directory of the agent's status file
        #[arg(long, value_name = "DIR", default_value = "/run/tandem")]
        run_dir: PathBuf,
    },
    /// Remove everything that Tandem has programmed on this node
    Cleanup {
        #[command(flatten)]
        flags: Flags,
    },
}

/// Runs the command line `args` (the first is the program's name).
pub fn main(args: impl IntoIterator<Item = std::ffi::OsString>) -> ExitCode {
    let cli = match Cli::try_parse_from(crate::config::flags::normalise(args)) {
        Ok(cli) => cli,
        Err(error) => {
            // kube-proxy answers 1 to every mistake in its flags.
            let code = u8::from(error.use_stderr());
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    let result = match cli.command {
        None => commands::run(&cli.flags),
        Some(Command::Check { dir, output }) => commands::check(&dir, output),
        Some(Command::Sync { once: _, dry_run, flags }) => commands::sync(&flags, dry_run),
        Some(Command::Lookup { query, output, flags }) => lookup::run(&query, output, &flags),
        Some(Command::Status { output, run_dir }) => commands::status(&run_dir, output),
        Some(Command::Cleanup { flags }) => commands::cleanup(&flags),
    };
    result.unwrap_or_else(|error| {
        output::note(format_args!("error: {}", output::error_text(&error)));
        ExitCode::FAILURE
    })
}
