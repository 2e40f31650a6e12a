//! Endpoints that change all the time: how long each change takes to reach packets, and what that costs a proxy.
//!
//! Writers replace one endpoint of one Service after the other in the API server at a fixed rate. Beside them, probed Services
//! with a single endpoint have it moved from time to time; the sync latency is from the API server's answer to that write until a
//! new connection through the node arrives at the new endpoint. A change that packets see before the writer has its answer counts as 0.

use super::cluster::{Cluster, SERVICE_PORT};
use super::knock::{self, Knocker};
use super::lane::Lane;
use super::numbers::quantile;
use super::running::{Running, metric};
use crate::apiserver::Access;
use crate::cluster::Program;
use anyhow::{Context, Result};
use serde::Serialize;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};

/// Services whose endpoint is moved to see when packets follow.
const PROBED: usize = 64;
/// Pause between two such moves.
const PROBE_PAUSE: Duration = Duration::from_millis(150);
const WRITERS: usize = 2;
const REQUESTS_PER_WRITER: usize = 16;
/// The API server only notes the owner's UID; no garbage collector runs that would look for it.
pub(super) const OWNER: &str = "00000000-0000-4000-8000-000000000000";
/// First spare address for the writers; those before are of the probed Services.
const FIRST_MOVED: usize = 2 * PROBED;

/// How much changes.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Endpoint changes a second, if the API server takes so many.
    pub rate: usize,
    /// For how long.
    pub time: Duration,
    /// How long after that the last changes may take.
    pub limit: Duration,
}

/// What came of it.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Changes that the API server took, of a second.
    pub rate: f64,
    /// Moves of probed Services whose effect was waited for.
    pub probes: usize,
    /// Those that packets did not follow before the limit.
    pub lost: usize,
    /// Moves left out because all probed Services still waited for an earlier one.
    pub skipped: usize,
    /// Sync latency in ms: median; `None` = that share of the moves did not arrive.
    pub p50: Option<f64>,
    /// Its 99th percentile.
    pub p99: Option<f64>,
    /// The longest.
    pub max: Option<f64>,
    /// CPU seconds of the proxy and of the programs that it ran, while changes were written.
    pub cpu_seconds: f64,
    /// Seconds that this was.
    pub seconds: f64,
    /// Seconds from the last write until packets followed every move; `None` = not before the limit.
    pub caught_up: Option<f64>,
    /// Syncs in that time.
    pub syncs: Option<f64>,
    /// Mean duration of a sync in ms.
    pub sync: Option<f64>,
    /// Mean time in the kernel's transaction of a sync in ms; kube-proxy does not say.
    pub kernel: Option<f64>,
    /// Resident memory afterwards, in MiB, and at its highest.
    pub memory_mib: (f64, f64),
}

/// The Services that are probed, behind those of the cluster. Call once for a cluster.
///
/// # Errors
/// The API server refuses one.
pub fn prepare(access: &Access, cluster: Cluster) -> Result<()> {
    access.run(|client| async move {
        for probe in 0..PROBED {
            cluster.create_service(&client, cluster.services() + probe, &[cluster.spare_ip(2 * probe)]).await?;
        }
        Ok(())
    })
}

/// A move whose effect has not been seen.
struct Move {
    probe: usize,
    to: Ipv4Addr,
    written: Instant,
}

/// Sum and number of a histogram.
fn histogram(lane: &Lane, name: &str) -> Result<Option<(f64, f64)>> {
    Ok(metric(lane, &format!("{name}_sum"))?.zip(metric(lane, &format!("{name}_count"))?))
}

/// Puts the probed Services back as [`prepare`] made them, before a proxy starts.
///
/// # Errors
/// The API server refuses.
pub fn reset(access: &Access, cluster: Cluster) -> Result<()> {
    access.run(|client| async move {
        for probe in 0..PROBED {
            let to = [cluster.spare_ip(2 * probe)];
            cluster.replace_endpoints(&client, cluster.services() + probe, OWNER, &to).await?;
        }
        Ok(())
    })
}

/// Writes changes, from number `first` on, and watches the proxy on `lane`, which serves the cluster. Returns with the outcome
/// the number of the next change.
///
/// # Errors
/// The API server refuses a change, or the proxy ends.
pub fn run(
    options: Options,
    first: usize,
    access: &Access,
    cluster: Cluster,
    lane: &Lane,
    program: Program,
    proxy: &mut Running,
) -> Result<(Outcome, usize)> {
    let syncs = "kubeproxy_sync_proxy_rules_duration_seconds";
    let kernel = "tandem_sync_kernel_seconds";
    let before = (proxy.cpu_time()?, histogram(lane, syncs)?, histogram(lane, kernel)?);
    let start = Instant::now();
    let end = start + options.time;
    let (written, skipped) = (Arc::new(AtomicUsize::new(first)), AtomicUsize::new(0));
    let (free, take) = channel();
    let (moved, watch) = channel();
    for probe in 0..PROBED {
        // The receiver lives as long as this function.
        let _ = free.send((probe, 0));
    }
    let deadline = end + options.limit;
    let (latencies, lost, after, seconds, caught_up) = std::thread::scope(|scope| -> Result<_> {
        let writers: Vec<_> = (0..WRITERS)
            .map(|_| {
                let next = written.clone();
                scope.spawn(move || write(options.rate, first, start, end, access, cluster, next))
            })
            .collect();
        let (take, skipped) = (take, &skipped);
        let mover = scope.spawn(move || move_probes(end, access, cluster, take, moved, skipped));
        let knocker = {
            let alive = proxy.exists();
            let free = free.clone();
            let client = Knocker::new(lane);
            client.spawn(move || follow(cluster, &watch, &free, deadline, alive))
        };
        let mut result = Ok(());
        for writer in writers {
            result = result.and(writer.join().expect("writers do not panic"));
        }
        result = result.and(mover.join().expect("the mover does not panic"));
        let (seconds, last) = (start.elapsed().as_secs_f64(), Instant::now());
        let after = (proxy.cpu_time()?, histogram(lane, syncs), histogram(lane, kernel));
        let (latencies, lost) = knocker.join().expect("the knocker does not panic");
        result?;
        Ok((latencies, lost, after, seconds, last.elapsed().as_secs_f64()))
    })?;
    proxy.alive()?;
    let (now, highest) = proxy.memory()?;
    let difference = |before: Option<(f64, f64)>, after: Result<Option<(f64, f64)>>| -> Result<Option<(f64, f64)>> {
        Ok(after?.map(|(sum, count)| (sum - before.unwrap_or_default().0, count - before.unwrap_or_default().1)))
    };
    let mean = |(sum, count): (f64, f64)| (count > 0.0).then(|| 1e3 * sum / count);
    let synced = difference(before.1, after.1)?;
    let in_kernel = if program == Program::Tandem { difference(before.2, after.2)? } else { None };
    let mut sorted = latencies;
    sorted.sort_unstable();
    let probes = sorted.len() + lost;
    // What never arrived is longer than all that did.
    sorted.resize(probes, u64::MAX);
    let share = |q: f64| -> Option<f64> {
        let value = (!sorted.is_empty()).then(|| quantile(&sorted, q))?;
        (value < 1e15).then_some(value / 1e6)
    };
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let next = written.load(Ordering::Relaxed);
    let outcome = Outcome {
        rate: (next - first) as f64 / seconds,
        probes,
        lost,
        skipped: skipped.load(Ordering::Relaxed),
        p50: share(0.5),
        p99: share(0.99),
        max: share(1.0),
        cpu_seconds: (after.0.saturating_sub(before.0)).as_secs_f64(),
        seconds,
        caught_up: (lost == 0).then_some(caught_up),
        syncs: synced.map(|(_, count)| count),
        sync: synced.and_then(mean),
        kernel: in_kernel.and_then(mean),
        memory_mib: (mib(now), mib(highest)),
    };
    Ok((outcome, next))
}

/// Change `number`: in turn over the Services, one endpoint goes to a spare address and comes back in the next turn.
fn change(cluster: Cluster, number: usize) -> (usize, Vec<Ipv4Addr>) {
    let (turn, index) = (number / cluster.services(), number % cluster.services());
    let mut addresses = cluster.addresses(index);
    if turn % 2 == 0 {
        let which = (turn / 2) % addresses.len();
        addresses[which] = cluster.spare_ip(FIRST_MOVED + index);
    }
    (index, addresses)
}

/// Writes the changes from number `first` on, each when its time has come.
fn write(
    rate: usize,
    first: usize,
    start: Instant,
    end: Instant,
    access: &Access,
    cluster: Cluster,
    next: Arc<AtomicUsize>,
) -> Result<()> {
    access.run(|client| async move {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..REQUESTS_PER_WRITER {
            let (client, next) = (client.clone(), next.clone());
            tasks.spawn(async move {
                while Instant::now() < end {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let due = start + Duration::from_secs_f64((number - first) as f64 / rate as f64);
                    if due >= end {
                        next.fetch_sub(1, Ordering::Relaxed);
                        return Ok(());
                    }
                    tokio::time::sleep_until(due.into()).await;
                    let (index, addresses) = change(cluster, number);
                    cluster.replace_endpoints(&client, index, OWNER, &addresses).await?;
                }
                anyhow::Ok(())
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.expect("a task neither panics nor is cancelled")?;
        }
        Ok(())
    })
}

/// Moves the endpoint of one probed Service after the other to its other address.
fn move_probes(
    end: Instant,
    access: &Access,
    cluster: Cluster,
    take: Receiver<(usize, usize)>,
    moved: Sender<Move>,
    skipped: &AtomicUsize,
) -> Result<()> {
    access.run(|client| async move {
        while Instant::now() + PROBE_PAUSE < end {
            tokio::time::sleep(PROBE_PAUSE).await;
            let Ok((probe, turn)) = take.try_recv() else {
                skipped.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            let to = cluster.spare_ip(2 * probe + (turn + 1) % 2);
            cluster.replace_endpoints(&client, cluster.services() + probe, OWNER, &[to]).await?;
            moved.send(Move { probe, to, written: Instant::now() }).context("the knocker ended")?;
        }
        Ok(())
    })
}

/// Knocks at the Services whose endpoint moved until the new one answers; returns the latencies in ns and how many moves were
/// never seen. Each Service is then free for its next move.
fn follow(
    cluster: Cluster,
    moved: &Receiver<Move>,
    free: &Sender<(usize, usize)>,
    deadline: Instant,
    mut alive: impl FnMut() -> bool,
) -> (Vec<u64>, usize) {
    let (mut waiting, mut latencies, mut more): (Vec<Move>, Vec<u64>, bool) = (Vec::new(), Vec::new(), true);
    while (more || !waiting.is_empty()) && Instant::now() < deadline && alive() {
        loop {
            match moved.try_recv() {
                Ok(one) => waiting.push(one),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => {
                    more = false;
                    break;
                }
            }
        }
        waiting.retain(|one| {
            let to = SocketAddrV4::new(cluster.service_ip(cluster.services() + one.probe), SERVICE_PORT);
            let Some(answered) = knock::once(to).filter(|a| a.by == one.to) else { return true };
            let latency = answered.at.saturating_duration_since(one.written).as_nanos();
            latencies.push(u64::try_from(latency).expect("less than 584 years"));
            // No receiver: the mover is done.
            let turn = usize::from(one.to != cluster.spare_ip(2 * one.probe));
            let _ = free.send((one.probe, turn));
            false
        });
        std::thread::sleep(Duration::from_millis(1));
    }
    (latencies, waiting.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_moves_exactly_one_endpoint() {
        let cluster = Cluster::new(5, 3).unwrap();
        let mut now: Vec<Vec<Ipv4Addr>> = (0..5).map(|index| cluster.addresses(index)).collect();
        for number in 0..100 {
            let (index, addresses) = change(cluster, number);
            let differ = now[index].iter().zip(&addresses).filter(|(a, b)| a != b).count();
            assert_eq!(differ, 1, "change {number}");
            now[index] = addresses;
        }
    }
}
