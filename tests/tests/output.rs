//! Where the program writes may be full or gone: it goes on, and its exit code still tells the result.

use proxy_tests::engine::tandem_binary;
use std::fs::File;
use std::path::Path;
use std::process::{Command, Stdio};

const GOOD: &str = r#"{"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": "default"},
    "spec": {"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}}"#;

fn manifests(text: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("web.json"), text).unwrap();
    dir
}

/// A device that refuses every write as a full disk does.
fn full() -> Stdio {
    File::options().write(true).open("/dev/full").unwrap().into()
}

/// A pipe that nobody reads any more.
fn closed() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

/// The exit code of `tandem ARGS DIR`.
fn code(args: &[&str], dir: &Path, out: Stdio, err: Stdio) -> i32 {
    let mut command = Command::new(tandem_binary().unwrap());
    command.args(args).arg(dir).stdout(out).stderr(err).status().unwrap().code().unwrap()
}

/// Logs at least that no manifest has the Node.
const DRY_RUN: &[&str] = &["sync", "--once", "--dry-run", "--hostname-override=node", "--manifests"];

#[test]
fn a_log_that_cannot_be_written_stops_nothing() {
    let (good, bad) = (manifests(GOOD), manifests("["));
    for log in [full, closed] {
        assert_eq!(code(DRY_RUN, good.path(), Stdio::null(), log()), 0);
        assert_eq!(code(DRY_RUN, bad.path(), Stdio::null(), log()), 1);
    }
}

#[test]
fn a_reader_that_has_seen_enough_does_not_change_the_exit_code() {
    let (good, bad) = (manifests(GOOD), manifests("["));
    for args in [&["check"][..], DRY_RUN] {
        assert_eq!(code(args, good.path(), closed(), Stdio::null()), 0, "{args:?}");
        assert_eq!(code(args, bad.path(), closed(), Stdio::null()), 1, "{args:?}");
    }
}

#[test]
fn an_answer_that_cannot_be_written_is_an_error() {
    let good = manifests(GOOD);
    for args in [&["check"][..], DRY_RUN] {
        assert_eq!(code(args, good.path(), full(), Stdio::null()), 1, "{args:?}");
    }
}
