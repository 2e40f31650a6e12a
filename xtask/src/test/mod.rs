//! `cargo xtask test`: everything that can be checked, cheapest first, with a count at the end.

mod libtest;
mod parts;

use crate::command::workspace_root;
use anyhow::{Context, Result, bail};
use libtest::Count;
use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

/// Runs all checks and tests, cheapest first; ends with `N passed, N failed, N skipped`.
#[derive(clap::Args)]
pub struct Options {
    /// Only tests whose names contain this.
    filter: Option<String>,
    /// Only this part: `checks`, `unit`, `integration`, or the name of a file in tests/tests. May be given several times.
    #[arg(long = "tier", value_name = "TIER")]
    tiers: Vec<String>,
}

/// Runs the command.
///
/// # Errors
/// If a check or test fails, or a part that should have tests ran none.
pub fn run(options: &Options) -> Result<()> {
    let root = workspace_root()?;
    let _lock = lock(&root)?;
    let started = Instant::now();
    let parts = parts::select(&root, options)?;
    if parts.is_empty() {
        bail!(
            "no part is called {}; there are: checks, unit, integration{}",
            options.tiers.join(", "),
            parts::names(&root)?
        );
    }
    crate::setup::ensure()?;
    let mut total = Count::default();
    let mut rows = Vec::new();
    for part in &parts {
        println!("==> {}", part.name());
        let begun = Instant::now();
        // A part that cannot run at all (it does not compile, say) is one failure, and the others go on.
        let mut count = part.run(&root, options.filter.as_deref()).unwrap_or_else(|error| {
            println!("{}: {error:#}", part.name());
            Count { failed: 1, ..Count::default() }
        });
        if part.is_empty_failure(&count, options.filter.as_deref()) {
            println!("{}: ran no test", part.name());
            count.failed += 1;
        }
        rows.push((part.name(), begun.elapsed(), count));
        total += count;
    }
    println!();
    for (name, time, count) in rows {
        println!("{name:28} {:>9}   {count}", seconds(time));
    }
    println!("{:28} {:>9}", "all", seconds(started.elapsed()));
    let nothing = total == Count::default();
    if nothing {
        println!("no test ran");
    }
    println!("{total}");
    if total.failed > 0 || nothing {
        std::process::exit(1);
    }
    Ok(())
}

fn seconds(time: Duration) -> String {
    format!("{:.1} s", time.as_secs_f64())
}

/// Two runs at once would disturb each other's network namespaces and builds; the second says so.
fn lock(root: &Path) -> Result<File> {
    std::fs::create_dir_all(root.join("target"))?;
    let file = File::create(root.join("target/xtask-test.lock")).context("cannot create target/xtask-test.lock")?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => {
            bail!("another `cargo xtask test` is running in this tree; wait for its end")
        }
        Err(std::fs::TryLockError::Error(error)) => Err(error).context("cannot lock target/xtask-test.lock"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_run_in_a_tree_is_refused_until_the_first_ends() {
        let directory = tempfile::tempdir().unwrap();
        let first = lock(directory.path()).unwrap();
        assert!(lock(directory.path()).unwrap_err().to_string().contains("another `cargo xtask test` is running"));
        drop(first);
        assert!(lock(directory.path()).is_ok());
    }
}
