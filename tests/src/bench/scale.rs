//! Far larger clusters, and endpoints that change all the time: reported, not asserted. kube-proxy stands beside Tandem as far
//! as it gets within the limit.

use super::churn::{self, Outcome};
use super::cluster::{Cluster, ENDPOINT_PORT, Manager, SERVICE_PORT, create};
use super::knock::{self, Knocker};
use super::lane::{Lane, NODE};
use super::machine::Machine;
use super::numbers::Spread;
use super::running::Running;
use super::table::{Format, Table};
use crate::apiserver::{Access, ApiServer, User};
use crate::cluster::Program;
use crate::envtest::{self, Binaries};
use crate::server::{Arrivals, Server};
use crate::world::NODE_NAME;
use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::json;
use std::fmt::Write;
use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

/// How much may change, in one cluster.
#[derive(Clone, Copy, Debug)]
pub struct Churn {
    /// Services and endpoints of each.
    pub size: (usize, usize),
    /// What changes.
    pub changes: churn::Options,
}

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Sizes that are started: Services, and endpoints of each.
    pub sizes: Vec<(usize, usize)>,
    /// Services added one after the other at each size.
    pub added: usize,
    /// Changes without end.
    pub churn: Option<Churn>,
    /// How long a proxy may take until it serves.
    pub limit: Duration,
}

/// One proxy at one size.
#[derive(Clone, Debug, Serialize)]
pub struct Start {
    /// Number of Services.
    pub services: usize,
    /// Endpoints of each.
    pub endpoints: usize,
    /// `tandem` or `kube-proxy`.
    pub program: &'static str,
    /// Seconds from the start to the first answer of the last Service; `None` = not within the limit.
    pub seconds: Option<f64>,
    /// CPU seconds until it came to rest after that, of the programs that it ran, too.
    pub cpu_seconds: f64,
    /// Resident memory in MiB: at rest, and at its highest.
    pub memory_mib: (f64, f64),
    /// The most of any program that it ran; 0 = it ran none.
    pub child_memory_mib: f64,
    /// Milliseconds from the write of a Service whose slice is there already until it answers; `None` = not measured.
    pub added: Option<Spread>,
}

/// One proxy under changes.
#[derive(Clone, Debug, Serialize)]
pub struct Churned {
    /// `tandem` or `kube-proxy`.
    pub program: &'static str,
    /// `None` = it did not serve within the limit.
    pub outcome: Option<Outcome>,
}

/// All that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What it ran on.
    pub machine: Machine,
    /// Seconds that a proxy may take until it serves.
    pub limit: f64,
    /// The sizes.
    pub starts: Vec<Start>,
    /// Services and endpoints of each, changes a second that were asked for.
    pub churn: Option<(usize, usize, usize)>,
    /// What came of them.
    pub churned: Vec<Churned>,
}

/// Pause before a single change: longer than kube-proxy's `minSyncPeriod` (1 s) after the end of the sync before.
const QUIET: Duration = Duration::from_millis(1500);

const PROGRAMS: [Program; 2] = [Program::Tandem, Program::KubeProxy];

/// Measures. Progress goes to standard error.
///
/// # Errors
/// A program or tool is missing, or a proxy ends.
pub fn run(options: &Options) -> Result<Report> {
    let binaries = envtest::binaries()?;
    let mut starts = Vec::new();
    for &(services, endpoints) in &options.sizes {
        let world = Setting::new(&binaries, services, endpoints)?;
        for (turn, program) in PROGRAMS.into_iter().enumerate() {
            starts.push(world.start(program, options, turn * options.added)?);
            eprintln!("{:?}", starts.last());
        }
    }
    let mut churned = Vec::new();
    if let Some(churn) = options.churn {
        let world = Setting::new(&binaries, churn.size.0, churn.size.1)?;
        churn::prepare(&world.access, world.cluster)?;
        let mut next = 0;
        for program in PROGRAMS {
            let mut outcome = None;
            churn::reset(&world.access, world.cluster)?;
            let (lane, _server, mut proxy, _dir) = world.launch(program)?;
            if world.served(&lane, &mut proxy, options.limit)?.is_some() {
                proxy.rest(options.limit)?;
                let (result, after) =
                    churn::run(churn.changes, next, &world.access, world.cluster, &lane, program, &mut proxy)
                        .with_context(|| proxy.log_tail())?;
                (outcome, next) = (Some(result), after);
            }
            churned.push(Churned { program: program.name(), outcome });
            eprintln!("{:?}", churned.last());
        }
    }
    Ok(Report {
        machine: Machine::this()?,
        limit: options.limit.as_secs_f64(),
        starts,
        churn: options.churn.map(|c| (c.size.0, c.size.1, c.changes.rate)),
        churned,
    })
}

/// A cluster in an API server.
struct Setting<'a> {
    binaries: &'a Binaries,
    cluster: Cluster,
    access: Access,
    api: ApiServer,
}

impl<'a> Setting<'a> {
    fn new(binaries: &'a Binaries, services: usize, endpoints: usize) -> Result<Self> {
        let (cluster, api) = (Cluster::new(services, endpoints)?, ApiServer::start(binaries)?);
        api.apply(&[json!({
            "apiVersion": "v1", "kind": "Node", "metadata": { "name": NODE_NAME },
            "status": { "addresses": [{ "type": "InternalIP", "address": NODE }] },
        })])?;
        let loaded = cluster.load(&api)?;
        eprintln!(
            "{services} Services × {endpoints} endpoints are in the API server after {:.1} s",
            loaded.as_secs_f64()
        );
        Ok(Self { binaries, cluster, access: api.access()?, api })
    }

    /// Starts the program on a node of its own, with pods that say which endpoint they are.
    fn launch(&self, program: Program) -> Result<(Lane, Server, Running, tempfile::TempDir)> {
        let (lane, dir) = (Lane::new(program.name())?, tempfile::tempdir()?);
        let server = Server::start(&lane.pods().path(), "pods", &[ENDPOINT_PORT].into(), &Arrivals::default())?;
        self.api.link(&lane.node)?;
        let kubeconfig = self.api.linked_kubeconfig(User::Proxy)?;
        let proxy = Running::start(program, self.binaries, &lane, &kubeconfig, dir.path())?;
        Ok((lane, server, proxy, dir))
    }

    /// Seconds from the start until the last Service answers; `None` = not within `limit`.
    fn served(&self, lane: &Lane, proxy: &mut Running, limit: Duration) -> Result<Option<f64>> {
        let last = SocketAddrV4::new(self.cluster.service_ip(self.cluster.services() - 1), SERVICE_PORT);
        let (deadline, alive) = (proxy.started + limit, proxy.exists());
        let knocking = Knocker::new(lane).spawn(move || knock::until(last, deadline, alive, |_| true));
        let answered = knocking.join().expect("the knocker does not panic");
        proxy.alive()?;
        Ok(answered.map(|a| a.at.saturating_duration_since(proxy.started).as_secs_f64()))
    }

    fn start(&self, program: Program, options: &Options, first: usize) -> Result<Start> {
        let (lane, _server, mut proxy, _dir) = self.launch(program)?;
        let seconds = self.served(&lane, &mut proxy, options.limit)?;
        let (mut cpu_seconds, mut added) = (proxy.cpu_time()?.as_secs_f64(), None);
        if seconds.is_some() {
            proxy.rest(options.limit)?;
            cpu_seconds = proxy.cpu_time()?.as_secs_f64();
        }
        let (now, highest) = proxy.memory()?;
        if seconds.is_some() && options.added > 0 {
            let indexes = (first..first + options.added).map(|n| self.cluster.services() + n);
            let times = indexes.map(|index| self.add(&lane, &mut proxy, index, options.limit));
            let times: Option<Vec<f64>> = times.collect::<Result<Vec<_>>>()?.into_iter().collect();
            added = times.map(|times| Spread::of(&times));
        }
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        Ok(Start {
            services: self.cluster.services(),
            endpoints: self.cluster.endpoints(),
            program: program.name(),
            seconds,
            cpu_seconds,
            memory_mib: (mib(now), mib(highest)),
            child_memory_mib: mib(proxy.child_memory()),
            added,
        })
    }

    /// Adds Service `index`, whose slice is there already, with one write: milliseconds from before that until it answers;
    /// `None` = not within `limit`.
    fn add(&self, lane: &Lane, proxy: &mut Running, index: usize, limit: Duration) -> Result<Option<f64>> {
        let cluster = self.cluster;
        let to = SocketAddrV4::new(cluster.service_ip(index), SERVICE_PORT);
        let (knocker, alive) = (Knocker::new(lane), proxy.exists());
        let times = self.access.run(|client| async move {
            for slice in cluster.slices(index, churn::OWNER, &[cluster.spare_ip(index)]) {
                create(&client, Manager::Controller, &slice).await?;
            }
            tokio::time::sleep(QUIET).await;
            let start = Instant::now();
            let knocking = knocker.spawn(move || knock::until(to, start + limit, alive, |_| true));
            create(&client, Manager::Kubectl, &cluster.service(index)).await?;
            Ok((start, knocking.join().expect("the knocker does not panic")))
        });
        proxy.alive()?;
        let (start, answered) = times?;
        Ok(answered.map(|a| a.at.saturating_duration_since(start).as_secs_f64() * 1e3))
    }
}

impl Report {
    /// The report for people.
    #[must_use]
    pub fn render(&self, format: Format) -> String {
        let mut text = format!("{}\n", self.machine);
        let missed = || format!("not within {} s", self.limit);
        if !self.starts.is_empty() {
            let mut table = Table::new(&[
                "services",
                "endpoints each",
                "proxy",
                "cold start s",
                "CPU s",
                "memory MiB (highest)",
                "its children MiB",
                "one more Service ms",
            ]);
            for s in &self.starts {
                table.row(vec![
                    s.services.to_string(),
                    s.endpoints.to_string(),
                    s.program.into(),
                    s.seconds.map_or_else(missed, |s| format!("{s:.2}")),
                    format!("{:.1}", s.cpu_seconds),
                    format!("{:.0} ({:.0})", s.memory_mib.0, s.memory_mib.1),
                    format!("{:.0}", s.child_memory_mib),
                    s.added.map_or("–".into(), |a| format!("{a:.1}")),
                ]);
            }
            let _ =
                write!(text, "\nStart, and one more Service (median, smallest–largest):\n\n{}", table.render(format));
        }
        if let Some((services, endpoints, rate)) = self.churn {
            let mut table = Table::new(&["", "tandem", "kube-proxy"]);
            let mut row = |name: &str, value: &dyn Fn(&Outcome) -> String| {
                let mut cells = vec![name.to_string()];
                for program in PROGRAMS {
                    let outcome = self.churned.iter().find(|c| c.program == program.name());
                    cells.push(outcome.and_then(|c| c.outcome.as_ref()).map_or_else(missed, value));
                }
                table.row(cells);
            };
            let ms = |value: Option<f64>| value.map_or("never for some".to_string(), |v| format!("{v:.1}"));
            let or_dash = |value: Option<f64>| value.map_or("–".to_string(), |v| format!("{v:.1}"));
            row("changes a second, reached", &|o| format!("{:.0}", o.rate));
            row("sync latency p50, ms", &|o| ms(o.p50));
            row("sync latency p99, ms", &|o| ms(o.p99));
            row("sync latency longest, ms", &|o| ms(o.max));
            row("probes (never served, left out)", &|o| format!("{} ({}, {})", o.probes, o.lost, o.skipped));
            row("CPU seconds", &|o| format!("{:.1} of {:.0}", o.cpu_seconds, o.seconds));
            row("syncs", &|o| o.syncs.map_or("–".into(), |n| format!("{n:.0}")));
            row("mean sync, ms", &|o| or_dash(o.sync));
            row("of that in the kernel, ms", &|o| or_dash(o.kernel));
            row("caught up after the last write, s", &|o| o.caught_up.map_or("never".into(), |s| format!("{s:.2}")));
            row("memory MiB (highest)", &|o| format!("{:.0} ({:.0})", o.memory_mib.0, o.memory_mib.1));
            let _ = write!(
                text,
                "\nEndpoint changes, {rate} a second asked for, at {services} Services × {endpoints} endpoints:\n\n{}",
                table.render(format)
            );
        }
        text
    }
}
