//! What the kernel says of a running process.

use anyhow::{Context, Result};
use std::time::Duration;

/// CPU time that the process has used, user and system, in the resolution of the clock tick (10 ms).
///
/// # Errors
/// There is no such process.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).with_context(|| format!("process {pid}"))?;
    let ticks = ticks(&text, OWN).with_context(|| format!("/proc/{pid}/stat: {text}"))?;
    // USER_HZ is 100 on every architecture that Kubernetes runs on (linux/include/asm-generic/param.h).
    Ok(Duration::from_millis(ticks * 10))
}

/// Where utime and stime are, fields 14 and 15 of proc_pid_stat(5), counted behind the name.
const OWN: usize = 11;
/// Where cutime and cstime are, fields 16 and 17.
const CHILDREN: usize = 13;

/// The sum of two fields. The name, field 2, may hold anything but ends with the last bracket.
fn ticks(stat: &str, first: usize) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(first);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// As [`cpu_time`], with that of its children that have ended and were waited for.
///
/// # Errors
/// There is no such process.
pub fn cpu_time_with_children(pid: u32) -> Result<Duration> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).with_context(|| format!("process {pid}"))?;
    let own = ticks(&text, OWN).with_context(|| format!("/proc/{pid}/stat: {text}"))?;
    let children = ticks(&text, CHILDREN).with_context(|| format!("/proc/{pid}/stat: {text}"))?;
    Ok(Duration::from_millis((own + children) * 10))
}

/// The processes that this one has started and that have not ended (those of each of its threads).
#[must_use]
pub fn children(pid: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists = threads.flatten().filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect()
}

/// Resident memory of the process in bytes: now, and at its highest.
///
/// # Errors
/// There is no such process.
pub fn memory(pid: u32) -> Result<(u64, u64)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).with_context(|| format!("process {pid}"))?;
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|l| l.strip_prefix(name))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok().map(|kib| kib * 1024)
    };
    field("VmRSS:").zip(field("VmHWM:")).with_context(|| format!("/proc/{pid}/status has no memory: {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_found_behind_any_name() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194304 1 2 3 4 150 25 8 9 20 0 1 0 100";
        assert_eq!(ticks(stat, OWN), Some(175));
        assert_eq!(ticks(stat, CHILDREN), Some(17));
    }

    #[test]
    fn a_running_child_is_found_and_its_time_is_counted_once_it_has_ended() {
        let own = std::process::id();
        let mut child =
            std::process::Command::new("sh").args(["-c", "i=0; while :; do i=$((i+1)); done"]).spawn().unwrap();
        let begun = std::time::Instant::now();
        while cpu_time(child.id()).unwrap() < Duration::from_millis(50) {
            assert!(begun.elapsed() < Duration::from_secs(20), "no CPU time is counted");
        }
        assert!(children(own).contains(&child.id()));
        let before = cpu_time_with_children(own).unwrap() - cpu_time(own).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let after = cpu_time_with_children(own).unwrap() - cpu_time(own).unwrap();
        assert!(after >= before + Duration::from_millis(30), "{before:?} {after:?}");
    }

    #[test]
    fn this_process_uses_time_and_memory() {
        let start = cpu_time(std::process::id()).unwrap();
        let begun = std::time::Instant::now();
        while cpu_time(std::process::id()).unwrap() == start {
            assert!(begun.elapsed() < Duration::from_secs(20), "no CPU time is counted");
        }
        let (now, highest) = memory(std::process::id()).unwrap();
        assert!(now > 1 << 20 && highest >= now, "{now} {highest}");
    }
}
