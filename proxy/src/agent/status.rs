//! What the agent knows about itself, written to `RUN_DIR/status.json` after each change, for `tandem status`.
#![forbid(unsafe_code)]

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The agent's status. Times are seconds since 1970 (UTC).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Status {
    /// Version of the agent.
    pub version: String,
    /// Process id of the agent.
    pub pid: u32,
    /// Node name.
    pub node: String,
    /// Where objects come from, in words.
    pub source: String,
    /// When the agent started.
    pub started: u64,
    /// Whether the first complete picture of Services and slices has arrived.
    pub synced: bool,
    /// Services in the map.
    pub services: usize,
    /// Per family, `IPv4` and `IPv6`.
    pub families: BTreeMap<String, FamilyStatus>,
    /// Services that are not served as asked, with the reason.
    pub refused: Vec<String>,
    /// The last problems that the source reported: objects, files, the connection to the API server.
    pub recent_problems: Vec<RecentProblem>,
    /// Set while a kube-proxy acts in this network namespace, or left something that we cannot remove.
    pub kube_proxy: Vec<String>,
}

/// Something that was wrong at some time. It may be right again.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RecentProblem {
    /// When.
    pub at: u64,
    /// What, where, and what to do.
    pub message: String,
}

/// One family's part of [`Status`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FamilyStatus {
    /// When the last successful sync ended.
    pub last_sync: Option<u64>,
    /// Error of the last sync, if it failed.
    pub error: Option<String>,
    /// Syncs that changed something.
    pub syncs: u64,
    /// Failed syncs.
    pub failures: u64,
    /// Repairs after someone else changed our table.
    pub repairs: u64,
}

/// Seconds since 1970.
#[must_use]
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Path of the status file.
#[must_use]
pub fn path(run_dir: &Path) -> PathBuf {
    run_dir.join("status.json")
}

/// Writes the status so that a reader sees the old or the new file, never a part.
///
/// # Errors
/// The directory or file cannot be written.
pub fn write(run_dir: &Path, status: &Status) -> std::io::Result<()> {
    std::fs::create_dir_all(run_dir)?;
    let new = run_dir.join(format!(".status.json.{}", std::process::id()));
    std::fs::write(&new, serde_json::to_vec_pretty(status)?)?;
    std::fs::rename(new, path(run_dir))
}

/// Reads the status file.
///
/// # Errors
/// The file is absent or no status.
pub fn read(run_dir: &Path) -> std::io::Result<Status> {
    Ok(serde_json::from_slice(&std::fs::read(path(run_dir))?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_status_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("new");
        assert!(read(&dir).is_err());
        let mut status = Status { node: "n".into(), synced: true, ..Status::default() };
        status.families.insert("IPv4".into(), FamilyStatus { error: Some("x".into()), ..FamilyStatus::default() });
        write(&dir, &status).unwrap();
        assert_eq!(read(&dir).unwrap(), status);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1, "no temporary file stays");
    }
}
