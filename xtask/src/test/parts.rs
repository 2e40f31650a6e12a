//! The parts of a test run, in the order of cheapness.

use super::Options;
use super::libtest::{Count, Reader};
use crate::command::{self, cargo};
use crate::lint;
use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressDrawTarget};
use std::io::{BufRead, BufReader, IsTerminal};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

/// A check that either passes or fails, given as arguments of this very program or of cargo.
type Check = (&'static str, fn(&Path) -> Result<()>);

const CHECKS: [Check; 3] = [
    ("format", |_| command::run(&mut lint::format()?)),
    ("tidy", |_| {
        let itself = std::env::current_exe().context("this program's own path is unknown")?;
        println!("$ cargo xtask tidy");
        command::run_quietly(Command::new(itself).arg("tidy"))
    }),
    ("clippy", |_| command::run(&mut lint::clippy()?)),
];

/// One part of the run.
pub enum Part {
    /// Format, tidy, clippy: each counts as one.
    Checks,
    /// Tests beside the code of all crates.
    Unit,
    /// The `tandem` program, which the integration tests start; counts nothing.
    Program,
    /// The programs of the real Kubernetes: built if missing; counts nothing.
    Envtest,
    /// One file of `tests/tests`.
    Integration(String),
}

impl Part {
    /// As printed, and as `--tier` takes it.
    pub fn name(&self) -> &str {
        match self {
            Part::Checks => "checks",
            Part::Unit => "unit",
            Part::Program => "program",
            Part::Envtest => "envtest",
            Part::Integration(name) => name,
        }
    }

    /// Runs it.
    ///
    /// # Errors
    /// If it cannot be run or built at all.
    pub fn run(&self, root: &Path, filter: Option<&str>) -> Result<Count> {
        match self {
            Part::Checks => Ok(run_checks(root)),
            Part::Unit => cargo_test(root, &["--workspace", "--lib", "--bins"], filter),
            Part::Program => {
                command::run(
                    cargo().args(["build", "--locked", "--package", "proxy", "--bin", "tandem"]).current_dir(root),
                )?;
                Ok(Count::default())
            }
            Part::Envtest => {
                if std::env::var_os("KUBEBUILDER_ASSETS").is_none() && !command::exists("go") {
                    // Each test that needs them says SKIP, which is counted there.
                    println!("no Go toolchain to build the real Kubernetes with: its tests will be skipped");
                    return Ok(Count::default());
                }
                let arguments = ["run", "--quiet", "--locked", "--package", "proxy-tests", "--bin", ENVTEST_PROGRAM];
                command::run(cargo().args(arguments).current_dir(root))?;
                Ok(Count::default())
            }
            Part::Integration(name) => cargo_test(root, &["--package", "proxy-tests", "--test", name], filter),
        }
    }

    /// Whether `count` shows that tests that must be there did not run. A filter may leave nothing in a part.
    pub fn is_empty_failure(&self, count: &Count, filter: Option<&str>) -> bool {
        let has_tests = !matches!(self, Part::Program | Part::Envtest);
        has_tests && filter.is_none() && *count == Count::default()
    }
}

const ENVTEST_PROGRAM: &str = "envtest-build";

/// The parts that the options ask for.
///
/// # Errors
/// If `tests/tests` cannot be read.
pub fn select(root: &Path, options: &Options) -> Result<Vec<Part>> {
    let integration = integration_tests(root)?;
    let mut parts = Vec::new();
    // Checks have no names that a filter could mean.
    if options.filter.is_none() {
        parts.push(Part::Checks);
    }
    parts.push(Part::Unit);
    if !integration.is_empty() {
        parts.push(Part::Program);
    }
    if !integration.is_empty() && root.join(format!("tests/src/bin/{ENVTEST_PROGRAM}.rs")).exists() {
        parts.push(Part::Envtest);
    }
    parts.extend(integration.into_iter().map(Part::Integration));
    if options.tiers.is_empty() {
        return Ok(parts);
    }
    let asked = |part: &Part| {
        options.tiers.iter().any(|tier| match part {
            Part::Integration(name) => tier == "integration" || tier == name,
            // Wanted by whatever comes after it.
            Part::Program | Part::Envtest => tier != "checks" && tier != "unit",
            _ => tier == part.name(),
        })
    };
    let mut asked: Vec<Part> = parts.into_iter().filter(asked).collect();
    // Envtest alone means that the name was wrong.
    if !options.tiers.iter().any(|tier| tier == "envtest")
        && asked.iter().all(|part| matches!(part, Part::Program | Part::Envtest))
    {
        asked.clear();
    }
    Ok(asked)
}

/// The names of the integration tests, for a message.
///
/// # Errors
/// If `tests/tests` cannot be read.
pub fn names(root: &Path) -> Result<String> {
    Ok(integration_tests(root)?.iter().map(|name| format!(", {name}")).collect())
}

/// The files and directories with a `main.rs` in `tests/tests`, by name.
fn integration_tests(root: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    let Ok(entries) = std::fs::read_dir(root.join("tests/tests")) else { return Ok(names) };
    for entry in entries {
        let path = entry?.path();
        let name = if path.extension().is_some_and(|e| e == "rs") { path.file_stem() } else { path.file_name() };
        if (path.is_file() && path.extension().is_some_and(|e| e == "rs")) || path.join("main.rs").exists() {
            names.extend(name.map(|n| n.to_string_lossy().into_owned()));
        }
    }
    names.sort();
    Ok(names)
}

fn run_checks(root: &Path) -> Count {
    let mut count = Count::default();
    for (name, check) in CHECKS {
        match check(root) {
            Ok(()) => count.passed += 1,
            Err(error) => {
                println!("{name}: {error:#}");
                count.failed += 1;
            }
        }
    }
    count
}

/// Builds with cargo's own progress shown, then runs and reads what the tests print.
fn cargo_test(root: &Path, arguments: &[&str], filter: Option<&str>) -> Result<Count> {
    command::run(cargo().args(["test", "--locked", "--no-run"]).args(arguments).current_dir(root))?;
    let mut command = cargo();
    command.args(["test", "--quiet", "--locked", "--no-fail-fast"]).args(arguments).args(["--"]).args(filter);
    // The libtest of stable Rust shows the output of passed tests only so, and SKIP lines are in it.
    command.args(["--show-output", "--format=pretty"]).current_dir(root);
    println!("$ {}", command::shown(&command));
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn()?;
    let stdout = child.stdout.take().context("the output of the tests is a pipe")?;
    let bar = ProgressBar::new_spinner();
    if std::io::stdout().is_terminal() {
        bar.enable_steady_tick(Duration::from_millis(200));
    } else {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let mut reader = Reader::default();
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.context("the output of the tests cannot be read")?;
        let line = String::from_utf8_lossy(&line);
        if let Some(shown) = reader.line(&line) {
            bar.suspend(|| println!("{shown}"));
        }
        bar.set_message(reader.progress());
    }
    bar.finish_and_clear();
    let status = child.wait()?;
    let count = reader.finish(status.success());
    if !status.success() && count.failed == 0 {
        anyhow::bail!("`{}` failed ({status}) without a failed test", command::shown(&command));
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(directory.path().join("tests/tests/e2e")).unwrap();
        std::fs::create_dir_all(directory.path().join("tests/src/bin")).unwrap();
        for file in [
            "tests/tests/scale.rs",
            "tests/tests/e2e/main.rs",
            "tests/tests/notes.md",
            "tests/src/bin/envtest-build.rs",
        ] {
            std::fs::write(directory.path().join(file), "").unwrap();
        }
        directory
    }

    fn selected(filter: Option<&str>, tiers: &[&str]) -> Vec<String> {
        let options =
            Options { filter: filter.map(Into::into), tiers: tiers.iter().map(ToString::to_string).collect() };
        select(tree().path(), &options).unwrap().iter().map(|p| p.name().to_owned()).collect()
    }

    #[test]
    fn all_parts_run_cheapest_first() {
        assert_eq!(selected(None, &[]), ["checks", "unit", "program", "envtest", "e2e", "scale"]);
    }

    #[test]
    fn tiers_and_filters_choose() {
        assert_eq!(selected(None, &["unit"]), ["unit"]);
        assert_eq!(selected(None, &["integration"]), ["program", "envtest", "e2e", "scale"]);
        assert_eq!(selected(None, &["scale"]), ["program", "envtest", "scale"]);
        assert_eq!(selected(Some("x"), &[]), ["unit", "program", "envtest", "e2e", "scale"]);
        assert_eq!(selected(None, &["no-such"]), [""; 0]);
    }

    #[test]
    fn a_part_without_tests_fails_unless_a_filter_was_given() {
        let nothing = Count::default();
        assert!(Part::Unit.is_empty_failure(&nothing, None));
        assert!(Part::Integration("e2e".into()).is_empty_failure(&nothing, None));
        assert!(!Part::Unit.is_empty_failure(&nothing, Some("x")));
        assert!(!Part::Envtest.is_empty_failure(&nothing, None));
        assert!(!Part::Unit.is_empty_failure(&Count { passed: 1, ..nothing }, None));
    }
}
