//! Named network namespaces that go away with their guard, and the `ip` tool to furnish them.
//!
//! A namespace is called `td-<pid>-<n>-<role>`. Those of a test process that was killed are found by their dead pid and
//! removed by the next one.

use anyhow::{Context, Result, bail};
use nix::sched::{CloneFlags, setns};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

static NEXT: AtomicU32 = AtomicU32::new(0);
static SWEEP: Once = Once::new();

/// A network namespace of its own, removed on drop together with the processes that still run in it.
#[derive(Debug)]
pub struct Netns {
    name: String,
}

impl Netns {
    /// Makes a namespace with its loopback device up. `role` is only for the eye.
    ///
    /// # Errors
    /// The `ip` tool is missing or refuses (not root).
    pub fn new(role: &str) -> Result<Self> {
        SWEEP.call_once(remove_leftovers);
        let name = format!("td-{}-{}-{role}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        run(Command::new("ip").args(["netns", "add", &name]))?;
        let ns = Self { name };
        ns.sysctl(&[
            // No duplicate address detection: addresses are usable at once.
            ("net/ipv6/conf/all/accept_dad", "0"),
            ("net/ipv6/conf/default/accept_dad", "0"),
            ("net/ipv6/conf/default/dad_transmits", "0"),
            ("net/ipv6/conf/default/accept_ra", "0"),
            ("net/ipv6/conf/default/router_solicitations", "0"),
            // No ICMP error is limited, neither for one client nor for all of them (`icmp_global_allow`): refusals are counted.
            ("net/ipv4/icmp_ratemask", "0"),
            ("net/ipv6/icmp/ratemask", "\n"),
        ])?;
        ns.ip("link set lo up")?;
        Ok(ns)
    }

    /// Name as `ip netns` knows it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that holds the namespace.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        PathBuf::from("/run/netns").join(&self.name)
    }

    /// Runs `f` on a thread of its own inside the namespace. Sockets that it makes stay in the namespace wherever they go.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let handle = scope.spawn(|| {
                self.enter();
                f()
            });
            match handle.join() {
                Ok(value) => value,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Moves the calling thread into the namespace for good: for threads that a test starts for that purpose.
    ///
    /// # Panics
    /// If the namespace is gone or the process is not root.
    pub fn enter(&self) {
        enter(&self.path());
    }

    /// `program` as a child inside the namespace.
    #[must_use]
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name]).arg(program);
        command
    }

    /// Runs `ip` commands, one a line, without the word `ip`.
    ///
    /// # Errors
    /// One of them fails; the message has its text.
    pub fn ip(&self, script: &str) -> Result<()> {
        self.ip_batch(&[], script)
    }

    /// Like [`Netns::ip`], for the commands that need to be told the family (`ip -6 rule`).
    ///
    /// # Errors
    /// One of them fails; the message has its text.
    pub fn ip6(&self, script: &str) -> Result<()> {
        self.ip_batch(&["-6"], script)
    }

    fn ip_batch(&self, options: &[&str], script: &str) -> Result<()> {
        let mut child = Command::new("ip")
            .args(options)
            .args(["-n", &self.name, "-batch", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .context("ip (package iproute2)")?;
        child.stdin.take().expect("stdin is piped above").write_all(format!("{script}\n").as_bytes())?;
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("ip in {}: {}\nscript:\n{script}", self.name, String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }

    /// Writes sysctls, given as paths below /proc/sys.
    ///
    /// # Errors
    /// One of them does not exist here or refuses the value.
    pub fn sysctl(&self, settings: &[(&str, &str)]) -> Result<()> {
        self.run(|| {
            for (key, value) in settings {
                std::fs::write(format!("/proc/sys/{key}"), value).with_context(|| format!("sysctl {key}={value}"))?;
            }
            Ok(())
        })
    }

    /// Standard output of a command inside the namespace.
    ///
    /// # Errors
    /// The command cannot be started or fails.
    pub fn output(&self, argv: &[&str]) -> Result<String> {
        let mut command = self.command(argv[0]);
        command.args(&argv[1..]);
        run(&mut command)
    }

    /// Fails if `nft` still lists a table called `table` of either family.
    ///
    /// # Errors
    /// The table is there.
    pub fn assert_no_table(&self, table: &str) -> Result<()> {
        let tables = self.output(&["nft", "list", "tables"])?;
        for line in tables.lines() {
            if line.split_whitespace().next_back() == Some(table) {
                bail!("left behind in {}: {line}", self.name);
            }
        }
        Ok(())
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        remove(&self.name);
    }
}

/// Moves the calling thread into the namespace that `path` holds.
///
/// # Panics
/// If the namespace is gone or the process is not root.
pub fn enter(path: &std::path::Path) {
    let file = File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    setns(&file, CloneFlags::CLONE_NEWNET).unwrap_or_else(|e| panic!("setns {}: {e}", path.display()));
}

/// Why tests that need namespaces cannot run here; `None` = they can.
#[must_use]
pub fn missing() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("network namespaces need root".into());
    }
    for tool in ["ip", "nft", "conntrack"] {
        if !find_tool(tool) {
            return Some(format!("the tool {tool} is not installed"));
        }
    }
    None
}

fn find_tool(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]).any(|dir| dir.join(name).is_file())
}

/// Runs a command to its end and returns its standard output.
///
/// # Errors
/// It cannot be started or exits with an error; the message has the command and its standard error.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        bail!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn remove(name: &str) {
    // Only processes inside this very namespace, which nobody but this test uses.
    if let Ok(pids) = run(Command::new("ip").args(["netns", "pids", name])) {
        for pid in pids.split_whitespace().filter_map(|p| p.parse::<i32>().ok()) {
            if pid != i32::try_from(std::process::id()).unwrap_or(0) {
                let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
            }
        }
    }
    let _ = Command::new("ip").args(["netns", "del", name]).stderr(Stdio::null()).status();
}

/// Removes what this process made, for one that is told to end: destructors do not run then.
pub fn remove_own() {
    remove_where(|pid| pid == std::process::id());
}

fn remove_leftovers() {
    remove_where(|pid| !std::path::Path::new("/proc").join(pid.to_string()).exists());
}

fn remove_where(of: impl Fn(u32) -> bool) {
    let Ok(entries) = std::fs::read_dir("/run/netns") else {
        return;
    };
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(pid) = name.strip_prefix("td-").and_then(|rest| rest.split('-').next()) else {
            continue;
        };
        if pid.parse().is_ok_and(&of) {
            remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_goes_with_its_guard() {
        if let Some(why) = missing() {
            println!("SKIP {why}");
            return;
        }
        let ns = Netns::new("guard").unwrap();
        let path = ns.path();
        assert!(path.exists());
        let inside = ns.run(|| std::fs::read_link("/proc/thread-self/ns/net").unwrap());
        assert_ne!(inside, std::fs::read_link("/proc/self/ns/net").unwrap());
        drop(ns);
        assert!(!path.exists());
    }
}
