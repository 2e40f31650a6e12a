//! Child processes of a test: log to a file, stopped by pid, never left behind.

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A child process; killed on drop.
#[derive(Debug)]
pub struct Process {
    child: Child,
    log: PathBuf,
    name: String,
}

impl Process {
    /// Starts `command` with both outputs appended to `log`.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(name: &str, mut command: Command, log: &Path) -> Result<Self> {
        let file = File::options().create(true).append(true).open(log).with_context(|| log.display().to_string())?;
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let child = command.spawn().with_context(|| format!("{name}: {command:?}"))?;
        Ok(Self { child, log: log.to_path_buf(), name: name.to_string() })
    }

    /// Process id. `ip netns exec` replaces itself, so this is the program's own.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        let _ = kill(Pid::from_raw(self.child.id().cast_signed()), signal);
    }

    /// Whether it still runs.
    pub fn running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It does not end within `timeout`.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                bail!("{} (pid {}) still runs after {timeout:?}", self.name, self.pid());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Asks it to end (SIGTERM), kills it after five seconds.
    pub fn stop(&mut self) {
        self.signal(Signal::SIGTERM);
        if self.wait(Duration::from_secs(5)).is_err() {
            self.kill();
        }
    }

    /// Kills it (SIGKILL).
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// All that it has written so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read(&self.log).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
    }

    /// The last lines of its output, for a failure message.
    #[must_use]
    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        format!(
            "--- {} ({}), last lines:\n{}",
            self.name,
            self.log.display(),
            lines[lines.len().saturating_sub(25)..].join("\n")
        )
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Calls `check` until it gives a value.
///
/// # Errors
/// Nothing within `timeout`; the message names `what`.
pub fn eventually<T>(what: &str, timeout: Duration, mut check: impl FnMut() -> Option<T>) -> Result<T> {
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(value) = check() {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            bail!("not within {timeout:?}: {what}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}
