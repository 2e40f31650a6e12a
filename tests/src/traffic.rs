//! Clients that do not stop: new connections one after the other while a test does something to the proxy.

use crate::netns;
use crate::probe::{Proto, Seen, once};
use crate::server::Arrivals;
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// What a client saw.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Answered tries, by the endpoint that answered.
    pub answers: BTreeMap<SocketAddr, usize>,
    /// What the others saw.
    pub failures: Vec<Seen>,
}

impl Report {
    /// Number of answered tries.
    #[must_use]
    pub fn answered(&self) -> usize {
        self.answers.values().sum()
    }
}

/// A client that opens one connection after the other.
#[derive(Debug)]
pub struct Traffic {
    stop: Arc<AtomicBool>,
    tries: Arc<AtomicUsize>,
    thread: JoinHandle<Report>,
}

impl Traffic {
    /// Starts a client in the namespace at `path`.
    #[must_use]
    pub fn start(path: &Path, proto: Proto, source: IpAddr, to: SocketAddr, arrivals: &Arrivals) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let tries = Arc::new(AtomicUsize::new(0));
        let (path, arrivals) = (path.to_path_buf(), arrivals.clone());
        let thread = {
            let (stop, tries) = (stop.clone(), tries.clone());
            std::thread::spawn(move || {
                netns::enter(&path);
                let mut report = Report::default();
                while !stop.load(Ordering::Relaxed) {
                    match once(proto, source, to, Duration::from_secs(5), &arrivals) {
                        Seen::Answer(answer) => *report.answers.entry(answer.local).or_default() += 1,
                        seen => report.failures.push(seen),
                    }
                    tries.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_millis(2));
                }
                report
            })
        };
        Self { stop, tries, thread }
    }

    /// Waits until `more` further tries have ended.
    pub fn wait_for(&self, more: usize) {
        let goal = self.tries.load(Ordering::Relaxed) + more;
        while self.tries.load(Ordering::Relaxed) < goal && !self.thread.is_finished() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it and says what it saw.
    ///
    /// # Panics
    /// If the client's thread panicked.
    #[must_use]
    pub fn stop(self) -> Report {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the client does not panic")
    }
}
