//! Single changes in the API server, and when packets notice.

use crate::bench::cluster::{Cluster, Manager, SERVICE_PORT, create};
use crate::bench::knock::{self, Answered, Knocker};
use anyhow::{Context, Result};
use kube::Client;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Pause before a single change: longer than `minSyncPeriod` (1 s) after the end of the sync before.
const QUIET: Duration = Duration::from_millis(1500);
/// So many connections in a row must go to the endpoint that stays: by chance it happens once in 30 million times.
const IN_A_ROW: u32 = 25;

/// Pause between two connections that look for a removed endpoint.
const BREATH: Duration = Duration::from_micros(300);
/// UID in owner references of slices that are written before their Service, or again: no garbage collector looks at them here.
pub(super) const NOBODY: &str = "00000000-0000-0000-0000-000000000000";

/// Which objects a visit changes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) cluster: Cluster,
    /// Services that are added, each with two endpoints of which one is removed.
    pub(super) changes: usize,
    /// How long anything may take.
    pub(super) limit: Duration,
}

impl Plan {
    /// Where Service `index` is served.
    pub(super) fn address(&self, index: usize) -> SocketAddrV4 {
        SocketAddrV4::new(self.cluster.service_ip(index), SERVICE_PORT)
    }

    /// The last Service of the cluster.
    pub(super) fn last(&self) -> usize {
        self.cluster.services() - 1
    }

    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.limit
    }

    /// The Service that change `change` adds.
    fn added(&self, change: usize) -> usize {
        self.cluster.services() + change
    }

    /// Its two endpoints.
    fn pair(&self, change: usize) -> [Ipv4Addr; 2] {
        [2 * change, 2 * change + 1].map(|number| self.cluster.spare_ip(number))
    }

    /// Where the endpoints of the last Service move to while the program does not run.
    pub(super) fn moved(&self) -> Vec<Ipv4Addr> {
        let first = 2 * self.changes;
        (first..first + self.cluster.endpoints()).map(|number| self.cluster.spare_ip(number)).collect()
    }

    /// Undoes what a visit changed in the API server.
    pub(super) async fn restore(self, client: &Client) -> Result<()> {
        for change in 0..self.changes {
            self.cluster.delete_service(client, self.added(change), 1).await?;
        }
        let last = self.last();
        self.cluster.replace_endpoints(client, last, NOBODY, &self.cluster.addresses(last)).await
    }
}

/// Milliseconds of each change.
#[derive(Debug, Default)]
pub(super) struct Changes {
    pub(super) added: Vec<f64>,
    pub(super) added_after_return: Vec<f64>,
    pub(super) removed: Vec<f64>,
}

/// Writes the slices of the Services that will be added: proxies keep them, and have nothing to program.
pub(super) async fn prepare(plan: Plan, client: &Client) -> Result<()> {
    for change in 0..plan.changes {
        for slice in plan.cluster.slices(plan.added(change), NOBODY, &plan.pair(change)) {
            create(client, Manager::Controller, &slice).await?;
        }
    }
    // The first of these slices causes a sync, the others one more, a second later.
    tokio::time::sleep(QUIET).await;
    Ok(())
}

/// Adds Services and removes endpoints, over one connection to the API server that is open already.
pub(super) async fn make(plan: Plan, client: &Client, knocker: &Knocker) -> Result<Changes> {
    let (cluster, mut changes) = (plan.cluster, Changes::default());
    for change in 0..plan.changes {
        tokio::time::sleep(QUIET).await;
        let index = plan.added(change);
        let (to, deadline) = (plan.address(index), plan.deadline());
        let answered = knocker.spawn(move || knock::until(to, deadline, || true, |_| true));
        let start = Instant::now();
        create(client, Manager::Kubectl, &cluster.service(index)).await?;
        let end = Instant::now();
        let answered =
            answered.join().expect("knocking does not panic").context("the added Service does not answer")?;
        changes.added.push(milliseconds(start, answered.at));
        changes.added_after_return.push(milliseconds(end, answered.at));
    }
    for change in 0..plan.changes {
        tokio::time::sleep(QUIET).await;
        let (index, [stays, goes]) = (plan.added(change), plan.pair(change));
        let (to, deadline, written) = (plan.address(index), plan.deadline(), Arc::new(AtomicBool::new(false)));
        let flag = written.clone();
        let last_wrong = knocker.spawn(move || last_answer_of(goes, to, &flag, deadline));
        let start = Instant::now();
        cluster.replace_endpoints(client, index, NOBODY, &[stays]).await?;
        written.store(true, Ordering::Relaxed);
        let last_wrong = last_wrong.join().expect("knocking does not panic").context("the removed endpoint answers")?;
        changes.removed.push(milliseconds(start, last_wrong).max(0.0));
    }
    Ok(changes)
}

/// Connects until only others than `goes` have answered for long enough after `written`; when `goes` answered last.
fn last_answer_of(goes: Ipv4Addr, to: SocketAddrV4, written: &AtomicBool, deadline: Instant) -> Option<Instant> {
    let (mut last, mut others) = (Instant::now(), 0);
    while others < IN_A_ROW || !written.load(Ordering::Relaxed) {
        match knock::once(to) {
            Some(Answered { at, by }) if by == goes => (last, others) = (at, 0),
            Some(_) => others += 1,
            // Refused or lost: as wrong as an answer of the endpoint that is gone.
            None => (last, others) = (Instant::now(), 0),
        }
        if Instant::now() > deadline {
            return None;
        }
        // The processors are for the program that is measured.
        std::thread::sleep(BREATH);
    }
    Some(last)
}

/// From `start` to `end`; negative if `end` is earlier.
fn milliseconds(start: Instant, end: Instant) -> f64 {
    let (there, back) = (end.saturating_duration_since(start), start.saturating_duration_since(end));
    (there.as_secs_f64() - back.as_secs_f64()) * 1e3
}
