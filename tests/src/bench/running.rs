//! A proxy under measurement: started as an operator would, and watched for what it costs.

use super::lane::{CLUSTER_CIDR, Lane};
use super::proc;
use crate::cluster::Program;
use crate::envtest::Binaries;
use crate::process::Process;
use anyhow::{Context, Result, bail};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Where both serve /metrics by default.
const METRICS: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 10249);

/// A running proxy; ends with its value.
pub struct Running {
    process: Process,
    /// When it was started.
    pub started: Instant,
    children: Children,
}

impl Running {
    /// Starts the program on the node of `lane` with its default settings. `dir` takes its log and its state.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(program: Program, binaries: &Binaries, lane: &Lane, kubeconfig: &Path, dir: &Path) -> Result<Self> {
        let mut command = program.command(binaries, &lane.node, kubeconfig, &dir.join("run"))?;
        command.arg(format!("--cluster-cidr={CLUSTER_CIDR}"));
        let started = Instant::now();
        let process = Process::start(program.name(), command, &dir.join("log"))?;
        let children = Children::watch(process.pid());
        Ok(Self { process, started, children })
    }

    /// Fails if it does not run any more.
    ///
    /// # Errors
    /// With its last log lines.
    pub fn alive(&mut self) -> Result<()> {
        if !self.process.running() {
            bail!("it ended\n{}", self.process.log_tail());
        }
        Ok(())
    }

    /// A flag that turns false when the process ends, for threads that wait for its effects.
    pub fn exists(&self) -> impl FnMut() -> bool + Send + 'static {
        let stat = format!("/proc/{}/stat", self.process.pid());
        // A process that ended and was not waited for is a zombie, state Z.
        move || std::fs::read_to_string(&stat).is_ok_and(|text| !text.contains(") Z "))
    }

    /// Resident memory in bytes: now, and at its highest.
    ///
    /// # Errors
    /// It ended.
    pub fn memory(&self) -> Result<(u64, u64)> {
        proc::memory(self.process.pid())
    }

    /// The highest resident memory of any process that it started, in bytes; 0 = it started none. Looked at every 20 ms.
    #[must_use]
    pub fn child_memory(&self) -> u64 {
        self.children.highest.load(Ordering::Relaxed)
    }

    /// CPU time that it and the processes that it started have used, those that still run included.
    ///
    /// # Errors
    /// It ended.
    pub fn cpu_time(&self) -> Result<Duration> {
        let running = proc::children(self.process.pid()).into_iter().filter_map(|child| proc::cpu_time(child).ok());
        let running: Duration = running.sum();
        Ok(proc::cpu_time_with_children(self.process.pid())? + running)
    }

    /// Waits until it rests, without a child process and without using its CPUs: its first rules may be followed by others.
    ///
    /// # Errors
    /// It ends, or does not rest within `limit`.
    pub fn rest(&mut self, limit: Duration) -> Result<()> {
        let deadline = Instant::now() + limit;
        let mut last = self.cpu_time()?;
        loop {
            std::thread::sleep(Duration::from_secs(1));
            self.alive()?;
            let now = self.cpu_time()?;
            let alone = proc::children(self.process.pid()).is_empty();
            if alone && now.saturating_sub(last) <= Duration::from_millis(50) {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("it does not rest within {limit:?}\n{}", self.process.log_tail());
            }
            last = now;
        }
    }

    /// Asks it to end, and waits for that.
    ///
    /// # Errors
    /// It does not end within half a minute.
    pub fn end(mut self) -> Result<()> {
        self.process.signal(nix::sys::signal::Signal::SIGTERM);
        self.process.wait(Duration::from_secs(30)).map(drop)
    }

    /// Last lines of its log.
    #[must_use]
    pub fn log_tail(&self) -> String {
        self.process.log_tail()
    }
}

/// The sum of a metric of the program on `lane`'s node over all its labels; `None` = it has no such metric.
///
/// # Errors
/// It does not answer.
pub fn metric(lane: &Lane, name: &str) -> Result<Option<f64>> {
    let text = lane.node.run(|| -> Result<String> {
        let mut stream = TcpStream::connect_timeout(&SocketAddr::from(METRICS), Duration::from_secs(2))?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.write_all(b"GET /metrics HTTP/1.0\r\nhost: localhost\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    });
    Ok(sum(&text.context("metrics")?, name))
}

fn sum(text: &str, name: &str) -> Option<f64> {
    let values = text.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let value = if rest.starts_with('{') { rest.split_once("} ")?.1 } else { rest.strip_prefix(' ')? };
        value.split_whitespace().next()?.parse::<f64>().ok()
    });
    values.fold(None, |sum, value| Some(sum.unwrap_or(0.0) + value))
}

/// The program that a process runs, if it can be told.
fn program(pid: u32) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{pid}/exe")).ok()
}

/// Looks at the memory of a process's children until dropped.
struct Children {
    highest: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Children {
    fn watch(pid: u32) -> Self {
        let (highest, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let thread = {
            let (highest, stop) = (highest.clone(), stop.clone());
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    for child in proc::children(pid) {
                        // Between fork and exec, a child shows the memory of its parent.
                        if program(child) == program(pid) {
                            continue;
                        }
                        if let Ok((_, peak)) = proc::memory(child) {
                            highest.fetch_max(peak, Ordering::Relaxed);
                        }
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
            })
        };
        Self { highest, stop, thread: Some(thread) }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_summed_over_their_labels_only() {
        let text =
            "# HELP a b\na_sum{ip_family=\"IPv4\"} 1.5\na_sum{ip_family=\"IPv6\"} 2\na_sum_more 7\nb 3 1700000000\n";
        assert_eq!(sum(text, "a_sum"), Some(3.5));
        assert_eq!(sum(text, "b"), Some(3.0));
        assert_eq!(sum(text, "a"), None);
    }
}
