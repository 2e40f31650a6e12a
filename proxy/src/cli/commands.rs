//! The commands beside `lookup`.

use super::output::{self, Format, start_logging, table};
use crate::agent::{self, status};
use crate::config::{Config, Flags};
use crate::model::IpFamily;
use crate::nft::netlink::Connection;
use crate::nft::object::TableId;
use crate::nft::transaction::{Op, Transaction};
use crate::source::manifest;
use anyhow::Context;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;

fn load(flags: &Flags) -> anyhow::Result<Config> {
    start_logging(flags.v);
    Ok(Config::load(flags, &agent::host_name())?)
}

/// Runs the proxy until SIGTERM or SIGINT; the rules stay.
pub fn run(flags: &Flags) -> anyhow::Result<ExitCode> {
    let config = load(flags)?;
    agent::run(config)?;
    Ok(ExitCode::SUCCESS)
}

/// `tandem sync --once`: applies and exits. Fails if something could not be served, after the rest was applied.
pub fn sync(flags: &Flags, dry_run: bool) -> anyhow::Result<ExitCode> {
    let config = load(flags)?;
    let picture = agent::first_picture(&config)?;
    let errors = if dry_run {
        for family in agent::families() {
            output::write(&agent::plan_text(&config, &picture, family))?;
        }
        picture.errors()
    } else {
        agent::sync_once(&config, &picture)?
    };
    if errors == 0 {
        return Ok(ExitCode::SUCCESS);
    }
    output::note(format_args!(
        "error: {errors} objects or parts of objects are not served (see above); all others are"
    ));
    Ok(ExitCode::FAILURE)
}

#[derive(serde::Serialize)]
#[serde(rename_all = "camelCase")]
struct CheckAnswer {
    files: usize,
    objects: BTreeMap<&'static str, usize>,
    errors: usize,
    problems: Vec<String>,
}

fn check_text(answer: &CheckAnswer) -> String {
    let mut out = String::new();
    for problem in &answer.problems {
        let _ = writeln!(out, "{problem}");
    }
    let objects: Vec<String> = answer.objects.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
    let objects = if objects.is_empty() { "no objects".to_string() } else { objects.join(", ") };
    let _ = writeln!(
        out,
        "{} files: {objects} are valid; {} errors, {} warnings",
        answer.files,
        answer.errors,
        answer.problems.len() - answer.errors
    );
    out
}

/// `tandem check DIR`
pub fn check(dir: &Path, output: Format) -> anyhow::Result<ExitCode> {
    let report = manifest::check(dir)?;
    let answer = CheckAnswer {
        files: report.files,
        objects: report.counts.iter().map(|(kind, count)| (kind.name(), *count)).collect(),
        errors: report.errors(),
        problems: report.problems.iter().map(ToString::to_string).collect(),
    };
    output.print(&answer, check_text)?;
    Ok(if report.errors() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// `tandem status`
pub fn status(run_dir: &Path, output: Format) -> anyhow::Result<ExitCode> {
    let path = status::path(run_dir);
    let status = status::read(run_dir)
        .with_context(|| format!("no status at {}: is tandem running, with this --run-dir?", path.display()))?;
    output.print(&status, status_text)?;
    // A process that ended leaves its last status behind.
    let alive = Path::new("/proc").join(status.pid.to_string()).exists();
    if !alive {
        output::note(format_args!(
            "error: process {} does not run any more; its rules stay in force. Start tandem again, or remove them with: tandem cleanup",
            status.pid
        ));
    }
    let healthy =
        alive && status.synced && status.families.values().all(|f| f.error.is_none()) && status.kube_proxy.is_empty();
    Ok(if healthy { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn status_text(status: &status::Status) -> String {
    let mut out = String::new();
    let ago = |t: u64| format!("{} s ago", status::unix_time().saturating_sub(t));
    let _ = writeln!(out, "tandem {}, process {}, node {}", status.version, status.pid, status.node);
    let _ = writeln!(out, "source     {}", status.source);
    let _ = writeln!(out, "started    {}", ago(status.started));
    let _ = writeln!(
        out,
        "services   {}{}",
        status.services,
        if status.synced { "" } else { " (the first complete list has not arrived; nothing is programmed before)" }
    );
    let rows: Vec<Vec<String>> = status
        .families
        .iter()
        .map(|(family, f)| {
            vec![
                family.clone(),
                f.last_sync.map_or("never".into(), ago),
                f.syncs.to_string(),
                f.failures.to_string(),
                f.repairs.to_string(),
                f.error.clone().unwrap_or_else(|| "-".into()),
            ]
        })
        .collect();
    let _ = write!(out, "\n{}", table(&["FAMILY", "LAST SYNC", "SYNCS", "FAILED", "REPAIRED", "ERROR"], &rows));
    for line in &status.kube_proxy {
        let _ = writeln!(out, "\nkube-proxy: {line}");
    }
    if !status.refused.is_empty() {
        let _ = writeln!(out, "\nnot served as asked:");
        for line in &status.refused {
            let _ = writeln!(out, "  {line}");
        }
    }
    if !status.recent_problems.is_empty() {
        let _ = writeln!(out, "\nrecent problems (they may be mended since):");
        for problem in &status.recent_problems {
            let _ = writeln!(out, "  {}: {}", ago(problem.at), problem.message);
        }
    }
    out
}

/// `tandem cleanup`: removes both tables. Connections that were translated go on: connection tracking keeps them.
pub fn cleanup(flags: &Flags) -> anyhow::Result<ExitCode> {
    start_logging(flags.v);
    let mut connection = Connection::open()?;
    let mut done = String::new();
    for family in IpFamily::ALL {
        let id = TableId { family, name: flags.table.as_str().into() };
        if connection.list_tables(family)?.contains(&id.name) {
            let mut transaction = Transaction::new(id.clone());
            transaction.push(Op::DeleteTable(id.clone()), None);
            connection.commit(&transaction)?;
            let _ = writeln!(done, "removed table {id}");
        } else {
            let _ = writeln!(done, "table {id} is not there");
        }
    }
    match std::fs::remove_file(status::path(&flags.run_dir)) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            output::note(format_args!("warning: {}: {error}", status::path(&flags.run_dir).display()));
        }
        _ => {}
    }
    // Last, so that an answer that cannot be written leaves nothing behind on the node.
    output::write(&done)?;
    Ok(ExitCode::SUCCESS)
}
