//! Loads a directory of manifests at start and after every change.
//!
//! inotify tells at once that something happened in the directory; it cannot tell about the targets of symbolic links, about
//! a directory that is replaced, or about network file systems, so that a slow comparison of what `stat` says goes along. What
//! is told is never trusted for *what* changed: every look reads all files, and the picture finds the difference.

use super::picture::{Picture, Update};
use super::{ReadError, is_manifest, read_dir};
use crate::model::Node;
use crate::source::{Problem, SourceEvent};
use notify::event::{AccessKind, AccessMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::mpsc;

/// How often `stat` is asked, in case inotify could not tell.
const POLL: Duration = Duration::from_secs(2);
/// Files must be left alone for so long before they are read: many programs write in several steps.
const SETTLE: Duration = Duration::from_millis(100);
/// After so many rounds of `SETTLE` files that change all the time are read as they are.
const SETTLE_ROUNDS: usize = 10;

/// A directory of manifests that is watched.
#[derive(Debug)]
pub struct ManifestSource {
    dir: PathBuf,
    node_name: String,
    machine: Node,
    poll: Duration,
    inotify: bool,
}

impl ManifestSource {
    /// Watches `dir`. `node_name` names the Node object that is ours; `machine` gives the facts of the machine for what no
    /// Node object says.
    #[must_use]
    pub fn new(dir: impl Into<PathBuf>, node_name: &str, machine: Node) -> Self {
        Self { dir: dir.into(), node_name: node_name.to_owned(), machine, poll: POLL, inotify: true }
    }

    /// Delivers the first picture, `Synced`, and then the differences, until the receiver of `events` is dropped.
    ///
    /// While the directory is missing or cannot be read, the last picture stays in force (at start: nothing is delivered).
    pub async fn run(self, events: mpsc::Sender<SourceEvent>) {
        let (wake, mut woken) = mpsc::channel(1);
        let poll = self.poll;
        let mut look = Look::new(self, wake);
        let mut synced = false;
        let mut reason = Reason::Start;
        loop {
            let outcome;
            (look, outcome) = match tokio::task::spawn_blocking(move || look.look(reason)).await {
                Ok(result) => result,
                // The task panicked, or the runtime is shutting down: nothing can be delivered any more.
                Err(error) => {
                    tracing::error!(%error, "the manifest source ended");
                    return;
                }
            };
            if deliver(outcome, &mut synced, &events).await.is_err() {
                return;
            }
            reason = tokio::select! {
                () = events.closed() => return,
                _ = woken.recv() => Reason::Told,
                () = tokio::time::sleep(poll) => Reason::Poll,
            };
        }
    }
}

async fn deliver(
    outcome: Outcome,
    synced: &mut bool,
    events: &mpsc::Sender<SourceEvent>,
) -> Result<(), mpsc::error::SendError<SourceEvent>> {
    for problem in outcome.problems {
        events.send(SourceEvent::Problem(problem)).await?;
    }
    let Some(update) = outcome.update else { return Ok(()) };
    if !update.deltas.is_empty() {
        events.send(SourceEvent::Deltas(update.deltas)).await?;
    }
    if !*synced {
        *synced = true;
        events.send(SourceEvent::Synced).await?;
    }
    Ok(())
}

/// Why the directory is looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reason {
    Start,
    /// inotify told that something happened.
    Told,
    /// Time has passed.
    Poll,
}

struct Outcome {
    /// Problems that were not told before.
    problems: Vec<Problem>,
    /// `None`: nothing was read.
    update: Option<Update>,
}

/// The blocking half.
struct Look {
    dir: PathBuf,
    picture: Picture,
    told: BTreeSet<Problem>,
    /// What `stat` said when the files were last read.
    seen: Option<Fingerprint>,
    inotify: Option<Inotify>,
}

impl Look {
    fn new(source: ManifestSource, wake: mpsc::Sender<()>) -> Self {
        let inotify = source.inotify.then(|| Inotify { wake, watched: None, failed: false });
        let picture = Picture::new(&source.node_name, source.machine);
        Self { dir: source.dir, picture, told: BTreeSet::new(), seen: None, inotify }
    }

    fn look(mut self, reason: Reason) -> (Self, Outcome) {
        // Watch first, read then: a change in between is told.
        let watch_problem = self.inotify.as_mut().and_then(|inotify| inotify.follow(&self.dir));
        let mut now = Fingerprint::take(&self.dir);
        if reason == Reason::Poll && self.seen.as_ref() == Some(&now) {
            return (self, Outcome { problems: watch_problem.into_iter().collect(), update: None });
        }
        if reason != Reason::Start {
            for _ in 0..SETTLE_ROUNDS {
                std::thread::sleep(SETTLE);
                let next = Fingerprint::take(&self.dir);
                let settled = next == now;
                now = next;
                if settled {
                    break;
                }
            }
        }
        let mut files = read_dir(&self.dir);
        // A swap of the directory while it was read would mix old and new files.
        for _ in 0..SETTLE_ROUNDS {
            let after = Fingerprint::take(&self.dir);
            if after == now {
                break;
            }
            now = after;
            files = read_dir(&self.dir);
        }
        self.seen = Some(now);
        let (mut all, update) = match files {
            Ok(files) => {
                let mut update = self.picture.update(files);
                (std::mem::take(&mut update.problems), Some(update))
            }
            Err(error) => (vec![self.unreadable(&error)], None),
        };
        all.extend(watch_problem);
        let told = std::mem::replace(&mut self.told, all.iter().cloned().collect());
        let problems = all.into_iter().filter(|problem| !told.contains(problem)).collect();
        (self, Outcome { problems, update })
    }

    fn unreadable(&self, error: &ReadError) -> Problem {
        let message = if self.picture.is_empty() {
            format!("{}; waiting until it can be read, nothing is programmed until then", error.source)
        } else {
            format!("{}; the last known objects stay in force", error.source)
        };
        Problem { error: true, location: self.dir.display().to_string(), field: String::new(), message }
    }
}

/// inotify on the directory itself, which is watched anew when another directory takes its place.
struct Inotify {
    wake: mpsc::Sender<()>,
    watched: Option<((u64, u64), RecommendedWatcher)>,
    failed: bool,
}

impl Inotify {
    /// Makes sure that the directory that `dir` is now is watched.
    fn follow(&mut self, dir: &Path) -> Option<Problem> {
        let identity = fs::metadata(dir).ok().map(|metadata| (metadata.dev(), metadata.ino()));
        if identity.is_some() && identity == self.watched.as_ref().map(|(identity, _)| *identity) {
            return None;
        }
        self.watched = None;
        let identity = identity?;
        match self.watch(dir) {
            Ok(watcher) => {
                self.watched = Some((identity, watcher));
                self.failed = false;
                None
            }
            Err(error) if !self.failed => {
                self.failed = true;
                let message = format!(
                    "changes cannot be watched ({error}); they are noticed within {} s instead",
                    POLL.as_secs()
                );
                Some(Problem { error: false, location: dir.display().to_string(), field: String::new(), message })
            }
            Err(_) => None,
        }
    }

    fn watch(&self, dir: &Path) -> notify::Result<RecommendedWatcher> {
        let wake = self.wake.clone();
        let mut watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
            // Errors and overflows wake too: then anything may have happened.
            if event.is_ok_and(|event| is_reading(event.kind)) {
                return;
            }
            // A full channel means that a wake is on its way.
            let _ = wake.try_send(());
        })?;
        watcher.watch(dir, RecursiveMode::NonRecursive)?;
        Ok(watcher)
    }
}

/// Whether somebody, most of the time we, only read.
fn is_reading(kind: EventKind) -> bool {
    matches!(kind, EventKind::Access(access) if access != AccessKind::Close(AccessMode::Write))
}

/// What `stat` says about the directory and, through symbolic links, about each manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Fingerprint {
    dir: Option<(u64, u64)>,
    files: BTreeMap<String, Option<Stat>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Stat {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Fingerprint {
    fn take(dir: &Path) -> Self {
        let identity = fs::metadata(dir).ok().map(|metadata| (metadata.dev(), metadata.ino()));
        let names =
            fs::read_dir(dir).into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let files = names.filter(|name| is_manifest(name)).map(|name| {
            let stat = fs::metadata(dir.join(&name)).ok().map(|m| Stat {
                device: m.dev(),
                inode: m.ino(),
                size: m.size(),
                modified: (m.mtime(), m.mtime_nsec()),
                changed: (m.ctime(), m.ctime_nsec()),
            });
            (name, stat)
        });
        Self { dir: identity, files: files.collect() }
    }
}

#[cfg(test)]
mod tests;
