//! What a benchmark ran on: numbers mean nothing without it.

use anyhow::{Context, Result};
use serde::Serialize;
use std::fmt;

/// The machine, and the day.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// CPUs that this process may use.
    pub cpus: usize,
    /// What the kernel calls them.
    pub cpu: String,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Release of the kernel.
    pub kernel: String,
    /// Day in UTC, as 2026-01-31.
    pub date: String,
}

impl Machine {
    /// This one, today.
    ///
    /// # Errors
    /// /proc cannot be read.
    pub fn this() -> Result<Self> {
        let field = |file: &str, name: &str| -> Result<String> {
            let text = std::fs::read_to_string(file).context(file.to_string())?;
            let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap_or_default();
            Ok(line.trim_start_matches([':', ' ', '\t']).trim().to_string())
        };
        let memory = field("/proc/meminfo", "MemTotal")?;
        let kib: u64 = memory.trim_end_matches(" kB").parse().with_context(|| format!("MemTotal {memory}"))?;
        Ok(Self {
            cpus: std::thread::available_parallelism()?.get(),
            cpu: field("/proc/cpuinfo", "model name")?,
            memory_mib: kib / 1024,
            kernel: std::fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_string(),
            date: jiff::Timestamp::now().strftime("%Y-%m-%d").to_string(),
        })
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} CPUs", self.cpus)?;
        if !self.cpu.is_empty() {
            write!(f, " ({})", self.cpu)?;
        }
        write!(f, ", {:.1} GiB, Linux {}, {}", self.memory_mib as f64 / 1024.0, self.kernel, self.date)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_described() {
        let machine = Machine::this().unwrap();
        assert!(machine.cpus > 0 && machine.memory_mib > 100, "{machine:?}");
        let text = machine.to_string();
        assert!(text.contains(" GiB, Linux ") && text.contains(", 20"), "{text}");
    }
}
