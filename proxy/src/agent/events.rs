//! The event loop of the running agent.

use super::engine::Engine;
use super::metrics::{self, Metrics};
use super::pacer::Pacer;
use super::settings::{settings, warnings};
use super::status::{self, FamilyStatus, Status, unix_time};
use crate::config::Config;
use crate::conntrack::{Frontends, Reconciler};
use crate::model::table::Changes;
use crate::model::{IpFamily, ServiceTable, resolve};
use crate::nft::netlink::{Class, Error};
use crate::source::{Problem, SourceEvent};
use crate::sys::address::Addresses;
use std::collections::{BTreeSet, VecDeque};
use std::future::pending;
use std::net::IpAddr;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::block_in_place;

/// Without any change, the kernel is compared with the plan this often (kube-proxy v1.37 does one full sync an hour).
const FULL_INTERVAL: Duration = Duration::from_secs(3600);
/// Changes taken in one go before the loop looks at its timers again.
const BATCH_MAX: usize = 1000;
/// Problems of the source that the status shows.
const PROBLEMS_MAX: usize = 100;

/// Logs a problem of the source at its level.
pub(super) fn log_problem(problem: &Problem) {
    if problem.error {
        tracing::error!("{problem}");
    } else {
        tracing::warn!("{problem}");
    }
}

pub(super) async fn run(config: Config) -> anyhow::Result<()> {
    let mut stop = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
    let [terminate, interrupt] = &mut stop;
    let mut agent = Agent::start(config).await?;
    let mut source = super::picture::open(&agent.config).await?;
    loop {
        let due = agent.due().map(tokio::time::Instant::from_std);
        tokio::select! {
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
            event = source.recv() => match event {
                Some(event) => {
                    agent.take(event);
                    for _ in 0..BATCH_MAX {
                        let Ok(event) = source.try_recv() else { break };
                        agent.take(event);
                    }
                }
                None => anyhow::bail!("the source of objects ended"),
            },
            () = agent.watch.changed() => agent.foreign_change(),
            alive = agent.addresses.changed() => agent.addresses_changed(alive).await,
            sign = agent.rivals.recv() => if let Some(sign) = sign { agent.rival(sign) },
            () = async { match due { Some(at) => tokio::time::sleep_until(at).await, None => pending().await } } => {
                agent.work(Instant::now())?;
            }
        }
    }
    tracing::info!("stopping; the rules stay in force");
    agent.write_status();
    Ok(())
}
