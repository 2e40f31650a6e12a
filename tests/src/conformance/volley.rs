//! Many probes at once, from every client of both nodes: so that the silence of a drop is waited for together.

use crate::conformance::pair::Side;
use crate::netns;
use crate::probe::{Proto, Seen, once};
use crate::world::World;
use std::net::{IpAddr, SocketAddr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Threads that send. Most of them wait for silence.
const SENDERS: usize = 48;

/// One client's attempts to reach one address, one after the other.
#[derive(Clone, Debug)]
pub struct Shot {
    /// The node around which it is sent.
    pub side: Side,
    /// The party that sends.
    pub party: String,
    /// From which of its addresses.
    pub source: IpAddr,
    /// What is sent.
    pub proto: Proto,
    /// Where to.
    pub to: SocketAddr,
    /// How often.
    pub tries: usize,
    /// How long an answer may take.
    pub timeout: Duration,
    /// Tries without an answer after which more say nothing new.
    pub silences: usize,
}

impl Shot {
    fn send(&self, world: &World) -> Vec<Seen> {
        let Some(ns) = world.netns(&self.party) else {
            return vec![Seen::Other(format!("nobody is called {}", self.party))];
        };
        netns::enter(&ns.path());
        let mut all = Vec::with_capacity(self.tries);
        let mut silent = 0;
        while all.len() < self.tries && silent < self.silences {
            let seen = once(self.proto, self.source, self.to, self.timeout, &world.arrivals);
            silent += usize::from(seen == Seen::Nothing);
            all.push(seen);
        }
        all
    }
}

/// Sends all of `series` at once and what is in one of them in its order. Returns what came of each shot, in the same shape.
#[must_use]
pub fn fire(worlds: &[World; 2], series: &[Vec<Shot>]) -> Vec<Vec<Vec<Seen>>> {
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Vec<Vec<Seen>>>> = series.iter().map(|_| Mutex::default()).collect();
    std::thread::scope(|scope| {
        for _ in 0..SENDERS.min(series.len()) {
            scope.spawn(|| {
                while let Some((index, shots)) = {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    series.get(index).map(|shots| (index, shots))
                } {
                    let seen = shots.iter().map(|shot| shot.send(&worlds[shot.side.index()])).collect();
                    *results[index].lock().expect("no thread panics with the lock") = seen;
                }
            });
        }
    });
    results.into_iter().map(|seen| seen.into_inner().expect("no thread panics with the lock")).collect()
}
