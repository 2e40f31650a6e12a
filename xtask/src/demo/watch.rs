//! Watching while an endpoint goes: a steady stream of connections, and who answers them second by second.

use super::client::{Outcome, Report, now_ms};
use super::topology::inside;
use crate::command;
use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

/// Length of the stream, and when in it the endpoint is removed; milliseconds.
const LENGTH_MS: u64 = 7000;
const REMOVE_AT_MS: u64 = 3000;

/// Within this time after the change no connection may reach the removed endpoint any more; milliseconds.
const MOVED_WITHIN_MS: u64 = 2000;

/// What the stream showed.
#[derive(Debug, Default)]
pub struct Seen {
    connections: usize,
    failures: Vec<String>,
    /// When the endpoint was removed.
    removed_ms: Option<u64>,
    /// When it last answered.
    last_answer_ms: Option<u64>,
    /// Answers of each endpoint from [`MOVED_WITHIN_MS`] after the removal on.
    after: BTreeMap<String, usize>,
}

/// Streams connections from `from` to `to` and calls `remove` in between.
///
/// # Errors
/// If the client cannot be run, or if traffic did not move without a failure.
pub fn run(
    program: &Path,
    from: &str,
    to: &str,
    endpoints: &[&str],
    gone: &str,
    remove: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let mut command = inside(from, program);
    command.args(["demo-client", "--to", to, "--for-ms", &LENGTH_MS.to_string()]);
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot run `{}`", command::shown(&command)))?;
    let stdout = child.stdout.take().context("the client's output is a pipe")?;
    let mut remove = Some(remove);
    let mut seen = Seen::default();
    let mut second = BTreeMap::new();
    let mut begun = None;
    let mut shown = 0;
    println!(
        "  {:>6}  {}  failed",
        "second",
        endpoints.iter().map(|e| format!("{e:>6}")).collect::<Vec<_>>().join("  ")
    );
    let show = |number: u64, second: &BTreeMap<String, usize>, failed: usize| {
        let counts: Vec<String> = endpoints.iter().map(|e| format!("{:>6}", second.get(*e).unwrap_or(&0))).collect();
        println!("  {number:>6}  {}  {failed:>6}", counts.join("  "));
    };
    let mut failed_before = 0;
    for line in BufReader::new(stdout).lines() {
        let report: Report = serde_json::from_str(&line.context("the client's output cannot be read")?)?;
        let start = *begun.get_or_insert(report.at_ms);
        let elapsed = report.at_ms.saturating_sub(start);
        while elapsed / 1000 > shown {
            shown += 1;
            show(shown, &second, seen.failures.len() - failed_before);
            failed_before = seen.failures.len();
            second.clear();
        }
        if elapsed >= REMOVE_AT_MS
            && let Some(remove) = remove.take()
        {
            println!("          -- {gone} is removed from the Service --");
            seen.removed_ms = Some(now_ms());
            remove()?;
        }
        if let Outcome::Answered(name, _) = &report.outcome {
            *second.entry(name.clone()).or_default() += 1;
        }
        seen.take(report, gone);
    }
    child.wait().context("the client cannot be waited for")?;
    show(shown + 1, &second, seen.failures.len() - failed_before);
    let others: Vec<&str> = endpoints.iter().copied().filter(|e| *e != gone).collect();
    match seen.judge(&others, gone) {
        Ok(words) => {
            println!("  {words}");
            Ok(())
        }
        Err(why) => bail!("{why}"),
    }
}

impl Seen {
    fn take(&mut self, report: Report, gone: &str) {
        self.connections += 1;
        match report.outcome {
            Outcome::Answered(name, _) => {
                if name == gone {
                    self.last_answer_ms = Some(report.at_ms);
                }
                if self.removed_ms.is_some_and(|removed| report.at_ms > removed + MOVED_WITHIN_MS) {
                    *self.after.entry(name).or_default() += 1;
                }
            }
            other => self.failures.push(format!("{other:?}")),
        }
    }

    /// In words what the stream showed.
    fn judge(&self, others: &[&str], gone: &str) -> Result<String, String> {
        if let Some(first) = self.failures.first() {
            return Err(format!(
                "{} of {} connections failed, the first: {first}",
                self.failures.len(),
                self.connections
            ));
        }
        let removed = self.removed_ms.ok_or("the stream ended before the endpoint was removed")?;
        let last = self.last_answer_ms.ok_or(format!("{gone} never answered, so its removal shows nothing"))?;
        if let Some(times) = self.after.get(gone) {
            return Err(format!("{gone} still answered {times} connections {MOVED_WITHIN_MS} ms after its removal"));
        }
        for other in others {
            if !self.after.contains_key(*other) {
                return Err(format!("{other} did not answer after the removal"));
            }
        }
        // The last answer may be from just before the change: then the change was served at once.
        let lag = last.saturating_sub(removed);
        Ok(format!(
            "{} connections, none failed; {gone} answered for the last time {lag} ms after its removal",
            self.connections
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(reports: &[(u64, &str)]) -> Result<String, String> {
        let mut seen = Seen { removed_ms: Some(1000), ..Seen::default() };
        for (at_ms, name) in reports {
            let outcome = match *name {
                "-" => Outcome::Silent,
                name => Outcome::Answered(name.into(), String::new()),
            };
            seen.take(Report { at_ms: *at_ms, outcome }, "b");
        }
        seen.judge(&["a"], "b")
    }

    #[test]
    fn traffic_that_moves_without_a_failure_is_good() {
        let words = seen(&[(10, "b"), (1040, "b"), (1500, "a"), (3500, "a")]).unwrap();
        assert!(words.contains("none failed") && words.contains("40 ms after"), "{words}");
    }

    #[test]
    fn each_way_to_fail_is_told() {
        assert!(seen(&[(10, "b"), (1500, "-"), (3500, "a")]).unwrap_err().contains("connections failed"));
        assert!(seen(&[(10, "b"), (3500, "b"), (3501, "a")]).unwrap_err().contains("still answered"));
        assert!(seen(&[(10, "b"), (1500, "a")]).unwrap_err().contains("a did not answer"));
        assert!(seen(&[(10, "a"), (3500, "a")]).unwrap_err().contains("never answered"));
    }
}
