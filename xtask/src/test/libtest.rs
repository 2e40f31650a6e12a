//! Reading what Rust's test programs print.
//!
//! The text form is used because the JSON form of libtest is not stable. What is read: the `test result:` line of each
//! program, the sections `---- name stdout ----`, and lines `SKIP why` inside or outside them.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::AddAssign;

/// How many tests ended how.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Good.
    pub passed: usize,
    /// Not good.
    pub failed: usize,
    /// Ignored, or printed `SKIP`.
    pub skipped: usize,
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

/// `N passed, N failed, N skipped`
impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Where in a test program's output the next line is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Place {
    /// Lines `test name ... ok`.
    #[default]
    Running,
    /// In the output of tests that passed.
    Successes,
    /// In the output of tests that failed, or their list.
    Failures,
}

/// Takes the lines one by one and says which to show.
#[derive(Debug, Default)]
pub struct Reader {
    count: Count,
    place: Place,
    /// The test whose output is being read.
    test: String,
    /// Tests of this program that said SKIP.
    skipped: BTreeSet<String>,
    /// Whether a program's tests have begun and not come to a result.
    open: bool,
    finished: usize,
    last: String,
}

impl Reader {
    /// Takes a line; returns what should be shown of it.
    pub fn line(&mut self, line: &str) -> Option<String> {
        if let Some(why) = line.trim_start().strip_prefix("SKIP ")
            && self.place != Place::Failures
        {
            // Outside a section the test is not known; each such line is one.
            let test = if self.place == Place::Successes {
                self.test.clone()
            } else {
                format!("{}:{why}", self.skipped.len())
            };
            let name = if self.place == Place::Successes { format!("{}: ", self.test) } else { String::new() };
            self.skipped.insert(test);
            return Some(format!("SKIP {name}{why}"));
        }
        if line.starts_with("running ") && (line.ends_with(" tests") || line.ends_with(" test")) {
            self.open = true;
            self.place = Place::Running;
            return None;
        }
        if let Some(result) = line.strip_prefix("test result: ") {
            return Some(self.result(result));
        }
        match line {
            "successes:" => self.place = Place::Successes,
            "failures:" => {
                self.place = Place::Failures;
                return Some(line.to_owned());
            }
            _ => {}
        }
        if let Some(name) = line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----")) {
            name.clone_into(&mut self.test);
        }
        if self.place == Place::Running
            && let Some(rest) = line.strip_prefix("test ")
        {
            if let Some((name, outcome)) = rest.rsplit_once(" ... ") {
                self.finished += 1;
                name.clone_into(&mut self.last);
                return (outcome.starts_with("FAILED")).then(|| line.to_owned());
            }
            // A test that runs long: libtest says so, and a watcher wants to know.
            return rest.contains("has been running for over").then(|| line.to_owned());
        }
        match self.place {
            Place::Failures => Some(line.to_owned()),
            Place::Running if !line.trim().is_empty() => Some(line.to_owned()),
            _ => None,
        }
    }

    fn result(&mut self, result: &str) -> String {
        let number = |word: &str| -> usize {
            let before = result.split(word).next().unwrap_or_default();
            before.trim_end().rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0)
        };
        let skipped = self.skipped.len().min(number(" passed"));
        let count = Count {
            passed: number(" passed") - skipped,
            failed: number(" failed"),
            skipped: number(" ignored") + skipped,
        };
        self.count += count;
        self.skipped.clear();
        self.place = Place::Running;
        self.open = false;
        format!("  {count}")
    }

    /// What a watcher sees while tests run.
    pub fn progress(&self) -> String {
        format!("{} tests finished, last: {}", self.finished, self.last)
    }

    /// The count of all programs. One that ended without a result (it was killed, say) is one failure.
    pub fn finish(mut self, success: bool) -> Count {
        if self.open && !success {
            println!("a test program ended without a result; its last test: {}", self.last);
            self.count.failed += 1;
        }
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, success: bool) -> (Count, Vec<String>) {
        let mut reader = Reader::default();
        let shown = text.lines().filter_map(|line| reader.line(line)).collect();
        (reader.finish(success), shown)
    }

    const GOOD: &str = "
running 4 tests
test a ... ok
test b ... ok
test c ... ignored
test d ... ok

successes:

---- b stdout ----
SKIP this kernel has no SCTP sockets
SKIP and no IPVS

---- d stdout ----
some words

successes:
    a
    b
    d

test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    #[test]
    fn a_test_that_says_skip_is_skipped_and_not_passed() {
        let (count, shown) = read(GOOD, true);
        assert_eq!(count, Count { passed: 2, failed: 0, skipped: 2 });
        assert_eq!(
            shown,
            ["SKIP b: this kernel has no SCTP sockets", "SKIP b: and no IPVS", "  2 passed, 0 failed, 2 skipped"]
        );
    }

    const BAD: &str = "
running 2 tests
test a ... ok
test b ... FAILED

failures:

---- b stdout ----
SKIP is only a word here
assertion failed

failures:
    b

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";

    #[test]
    fn a_failure_is_counted_and_its_output_is_shown() {
        let (count, shown) = read(BAD, false);
        assert_eq!(count, Count { passed: 1, failed: 1, skipped: 0 });
        assert!(shown.contains(&"assertion failed".to_owned()), "{shown:?}");
        assert!(shown.contains(&"test b ... FAILED".to_owned()), "{shown:?}");
    }

    #[test]
    fn several_programs_are_added() {
        let (count, _) = read(&format!("{GOOD}{GOOD}{BAD}"), false);
        assert_eq!(count.to_string(), "5 passed, 1 failed, 4 skipped");
    }

    #[test]
    fn a_program_that_dies_is_a_failure() {
        let (count, _) = read("running 2 tests\ntest a ... ok\n", false);
        assert_eq!(count.failed, 1);
    }

    /// Runs a real test program of this toolchain, so that a change of libtest's text is noticed.
    #[test]
    fn the_text_of_this_toolchains_libtest_is_understood() {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("t.rs");
        let text = "#[test] fn good() {}\n#[test] fn bad() { panic!(\"broken on purpose\") }\n#[test] #[ignore] fn later() {}\n\
                    #[test] fn cannot() { println!(\"SKIP no such thing here\") }";
        std::fs::write(&source, text).unwrap();
        let program = directory.path().join("t");
        let rustc = |arguments: &[&str]| {
            let mut command = crate::command::program("rustc", arguments);
            crate::command::output(command.arg(&source).arg("-o").arg(&program)).unwrap();
        };
        rustc(&["--test"]);
        let mut command = std::process::Command::new(&program);
        let output = command.args(["--show-output", "--format=pretty"]).output().unwrap();
        let (count, shown) = read(&String::from_utf8_lossy(&output.stdout), output.status.success());
        assert_eq!(count, Count { passed: 1, failed: 1, skipped: 2 }, "{shown:?}");
        assert!(shown.iter().any(|line| line.contains("broken on purpose")), "{shown:?}");
    }
}
