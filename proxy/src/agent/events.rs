//! The event loop of the running agent.

use super::engine::{Engine, SETTLE_AFTER};
use super::metrics::{self, Metrics};
use super::pacer::{Pacer, Pause};
use super::rivals::Lookout;
use super::settings::{settings, warnings};
use super::status::{self, RecentProblem, Status, unix_time};
use crate::config::{Config, MIN_SYNC_PERIOD};
use crate::conntrack::{Frontends, Reconciler};
use crate::model::table::Changes;
use crate::model::{ObjectName, Protocol, ServiceTable, resolve};
use crate::nft::foreign::ForeignTables;
use crate::nft::netlink::monitor::{self, Monitor};
use crate::nft::netlink::{Class, Connection};
use crate::nft::transaction::{Op, Transaction};
use crate::source::{Problem, SourceEvent};
use crate::sys::address::Addresses;
use crate::sys::{Root, host, memory, sysctl};
use crate::takeover::rival::{Action, Rival, Sign};
use crate::takeover::{iptables, legacy, tables};
use std::collections::{BTreeSet, VecDeque};
use std::future::pending;
use std::net::IpAddr;
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::block_in_place;

/// Without any change, the kernel is compared with the plan this often (kube-proxy v1.37 does one full sync an hour).
const FULL_INTERVAL: Duration = Duration::from_secs(3600);
/// Changes taken in one go before the loop looks at its timers again.
const BATCH_MAX: usize = 1000;
/// Shortest time between two writes of the status file.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// Someone who changes our table may not be done yet; and a fight over it must not cost the node its processors.
const VERIFY_PAUSE: Duration = Duration::from_millis(500);
/// Differences that a log line shows.
const DRIFT_SHOWN: usize = 5;
/// Problems of the source that the status shows.
const PROBLEMS_MAX: usize = 100;

/// Logs a problem of the source at its level.
pub(super) fn log_problem(problem: &Problem) {
    if problem.error {
        tracing::error!("{}", problem.text());
    } else {
        tracing::warn!("{}", problem.text());
    }
}

pub(super) async fn run(config: Config) -> anyhow::Result<()> {
    let mut stop = [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?];
    let [terminate, interrupt] = &mut stop;
    let started = Instant::now();
    let mut source = super::picture::open(&config).await?;
    let mut agent = Agent::start(config, started).await?;
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
            event = agent.monitor.next() => agent.foreign_change(event).await,
            sign = agent.lookout.next() => agent.sign(&sign),
            alive = agent.addresses.changed() => agent.addresses_changed(alive).await,
            () = async { match due { Some(at) => tokio::time::sleep_until(at).await, None => pending().await } } => {
                agent.work(Instant::now())?;
            }
        }
    }
    tracing::info!("stopping; the rules stay in force");
    agent.write_status();
    Ok(())
}

/// The running agent's state.
struct Agent {
    config: Config,
    metrics: Metrics,
    table: ServiceTable,
    host: Vec<IpAddr>,
    addresses: Addresses,
    engines: Vec<Engine>,
    monitor: Monitor,
    lookout: Lookout,
    rival: Rival,
    legacy: Vec<String>,
    /// When to compare the kernel with the plan, since someone else changed our table.
    verify_at: Option<Instant>,
    pacer: Pacer,
    synced: bool,
    frontends: Frontends,
    problems: VecDeque<RecentProblem>,
    warnings: Vec<String>,
    status: Status,
    status_dirty: bool,
    status_written: Instant,
    started: Instant,
}

impl Agent {
    async fn start(config: Config, started: Instant) -> anyhow::Result<Self> {
        let addresses = Addresses::open()?;
        let host: Vec<IpAddr> = addresses.list().await?.into_iter().collect();
        let table = ServiceTable::new();
        let engines = super::families()
            .into_iter()
            .map(|family| {
                let settings = settings(&config, table.node(), &host, family);
                Connection::open().map(|kernel| Engine::new(&config.table, settings, kernel))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let mut monitor = Monitor::open()?;
        for engine in &engines {
            monitor.ignore(engine.kernel().port_id());
        }
        let metrics = Metrics::default();
        if let Some(address) = config.metrics_bind_address {
            tokio::spawn(metrics::serve(address, metrics.clone()));
        }
        let status = Status {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: std::process::id(),
            node: config.node_name.clone(),
            source: config.source.to_string(),
            started: unix_time(),
            ..Status::default()
        };
        tracing::info!(node = %config.node_name, source = %config.source, "tandem {} starts", status.version);
        let pause = config.min_sync_period.map_or(Pause::ByCost(MIN_SYNC_PERIOD), Pause::Fixed);
        let agent = Self {
            monitor,
            lookout: Lookout::start(),
            rival: Rival::new(),
            legacy: legacy::warnings(&Root::default()),
            verify_at: None,
            pacer: Pacer::new(pause, config.sync_period, FULL_INTERVAL),
            config,
            metrics,
            table,
            host,
            addresses,
            engines,
            synced: false,
            frontends: Frontends::new(),
            problems: VecDeque::new(),
            warnings: Vec::new(),
            status,
            status_dirty: true,
            status_written: Instant::now(),
            started,
        };
        agent.prepare_host();
        for warning in &agent.legacy {
            tracing::warn!("{warning}");
        }
        Ok(agent)
    }

    /// kube-proxy's connection tracking settings. What cannot be set is reported; none is needed for correctness.
    fn prepare_host(&self) {
        let root = Root::default();
        let wanted = sysctl::ConntrackSettings {
            max_per_core: self.config.conntrack.max_per_core.into(),
            min: self.config.conntrack.min.into(),
            tcp_established_timeout: self.config.conntrack.tcp_established_timeout,
            tcp_close_wait_timeout: self.config.conntrack.tcp_close_wait_timeout,
            ..sysctl::ConntrackSettings::default()
        };
        let (written, errors) = sysctl::apply(&root, &wanted, host::cpu_count(&root));
        for write in written {
            tracing::info!("set {} to {}", write.path, write.value);
        }
        for error in errors {
            tracing::warn!("{error}; connection tracking keeps its present setting");
        }
        for warning in sysctl::forwarding_warnings(&root, &super::families()) {
            tracing::warn!("{warning}");
        }
    }

    /// When there is something to do without a new event.
    fn due(&self) -> Option<Instant> {
        let now = Instant::now();
        let sync = self.sync_due(now);
        let settle = self.engines.iter().filter_map(Engine::settle_at).min();
        let verify = self.verify_at;
        let status = self.status_dirty.then_some(self.status_written + STATUS_INTERVAL);
        [sync, settle, verify, status].into_iter().flatten().min()
    }

    /// When the next sync is due: never before the first complete list.
    fn sync_due(&self, now: Instant) -> Option<Instant> {
        self.pacer.due(now).filter(|_| self.synced)
    }

    fn take(&mut self, event: SourceEvent) {
        match event {
            SourceEvent::Deltas(deltas) => {
                for delta in deltas {
                    self.table.apply(delta);
                }
                self.pacer.request();
            }
            SourceEvent::Synced => {
                let seconds = self.started.elapsed().as_secs_f64();
                let services = self.table.services().count();
                tracing::info!(services, "the first complete list has arrived after {seconds:.3} s");
                self.metrics.first_list.set(seconds);
                self.synced = true;
                self.pacer.request();
            }
            SourceEvent::Problem(problem) => {
                log_problem(&problem);
                if self.problems.len() == PROBLEMS_MAX {
                    self.problems.pop_front();
                }
                self.metrics.source_problems.inc();
                self.problems.push_back(RecentProblem { at: unix_time(), message: problem.to_string() });
            }
        }
        self.status_dirty = true;
    }

    async fn addresses_changed(&mut self, alive: bool) {
        if !alive {
            match Addresses::open() {
                Ok(addresses) => self.addresses = addresses,
                Err(error) => {
                    tracing::error!("{error}; address changes are not seen until this works");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
            }
        }
        match self.addresses.list().await {
            Ok(list) => {
                let list: Vec<IpAddr> = list.into_iter().collect();
                if list != self.host {
                    self.host = list;
                    self.pacer.request();
                }
            }
            Err(error) => tracing::error!("{error}; NodePort addresses stay as they are"),
        }
    }

    /// Someone else committed a transaction: our table is compared with the plan if it may be touched, and kube-proxy's rules are looked for.
    async fn foreign_change(&mut self, event: std::io::Result<monitor::Event>) {
        let ours = match &event {
            Ok(monitor::Event::Changed(change)) => {
                self.lookout.hint();
                let ours = change.tables.iter().any(|table| *table.name == *self.config.table);
                if ours {
                    tracing::warn!(program = %change.program, process = change.process, "someone else changed our nftables table");
                }
                ours
            }
            Ok(monitor::Event::Verify) => true,
            Err(error) => {
                tracing::error!("cannot listen for changes of nftables: {error}; listening anew");
                tokio::time::sleep(Duration::from_secs(1)).await;
                match Monitor::open() {
                    Ok(monitor) => self.monitor = monitor,
                    Err(error) => tracing::error!("{error}"),
                }
                for engine in &self.engines {
                    self.monitor.ignore(engine.kernel().port_id());
                }
                true
            }
        };
        if ours && self.verify_at.is_none() {
            self.verify_at = Some(Instant::now() + VERIFY_PAUSE);
        }
    }

    /// Compares the kernel with the plan and repairs what differs.
    fn verify(&mut self) {
        for engine in &mut self.engines {
            let family = engine.family();
            match engine.verify() {
                Ok(drift) if drift.is_empty() => {}
                Ok(drift) => {
                    let shown = drift.iter().take(DRIFT_SHOWN).map(String::as_str).collect::<Vec<_>>().join("; ");
                    tracing::warn!(%family, differences = drift.len(), "our table was changed, repairing it: {shown}");
                    engine.mark_dirty();
                    self.status.families.entry(family.to_string()).or_default().repairs += 1;
                    self.metrics.repairs.get_or_create(&family.into()).inc();
                    self.pacer.request();
                }
                Err(error) => {
                    tracing::error!(%family, "cannot compare our table with the plan: {error}; it is read back at the next sync");
                    engine.mark_dirty();
                    self.pacer.request();
                }
            }
        }
        memory::give_back();
        self.status_dirty = true;
    }

    /// Takes in a sign of a kube-proxy in this network namespace. We keep serving whatever it does.
    fn sign(&mut self, sign: &Sign) {
        let now = Instant::now();
        let remove = match self.rival.observe(sign, now) {
            Action::Nothing => false,
            Action::Remove => true,
            Action::Report(message) => {
                self.metrics.kube_proxy_signs.inc();
                tracing::error!("{message}");
                false
            }
            Action::ReportAndRemove(message) => {
                self.metrics.kube_proxy_signs.inc();
                tracing::error!("{message}");
                true
            }
        };
        // Before our own rules are there, kube-proxy's are the only ones.
        if remove && self.programmed() {
            block_in_place(|| self.remove_kube_proxy());
        }
        self.status_dirty = true;
    }

    /// Whether every family has been programmed since start.
    fn programmed(&self) -> bool {
        self.engines.iter().all(|engine| {
            self.status.families.get(&engine.family().to_string()).is_some_and(|family| family.last_sync.is_some())
        })
    }

    /// Removes kube-proxy's nftables tables and its chains in the tables of iptables-nft.
    fn remove_kube_proxy(&mut self) {
        let result = ForeignTables::open().and_then(|mut tables| {
            let found = tables::find(&mut tables)?;
            Ok((found, iptables::remove(&mut tables)?))
        });
        match result {
            Ok((found, report)) => {
                for table in found {
                    let mut transaction = Transaction::new(table.clone());
                    transaction.push(Op::DeleteTable(table.clone()), None);
                    match Connection::open().and_then(|mut connection| connection.commit(&transaction)) {
                        Ok(()) => tracing::info!(%table, "removed kube-proxy's nftables table"),
                        Err(error) => tracing::error!(%table, "kube-proxy's nftables table: {error}"),
                    }
                }
                if report.chains > 0 {
                    tracing::info!(
                        chains = report.chains,
                        rules = report.rules,
                        "removed kube-proxy's iptables-nft chains"
                    );
                }
                for kept in report.kept {
                    tracing::warn!("left in place: {kept}");
                }
            }
            Err(error) => tracing::error!("kube-proxy's rules: {error}; they are removed later"),
        }
        self.rival.removed(Instant::now());
    }

    /// Does what is due at `now`.
    fn work(&mut self, now: Instant) -> anyhow::Result<()> {
        for engine in &mut self.engines {
            if let Err(error) = block_in_place(|| engine.settle(now)) {
                tracing::warn!(family = %engine.family(), "clean-up of replaced rules: {error}; it is tried again");
                self.pacer.request();
            }
        }
        if self.sync_due(now).is_some_and(|at| at <= now) {
            block_in_place(|| self.sync())?;
        }
        if self.verify_at.is_some_and(|at| at <= now) {
            self.verify_at = None;
            block_in_place(|| self.verify());
        }
        if self.status_dirty && self.status_written + STATUS_INTERVAL <= now {
            self.write_status();
        }
        Ok(())
    }

    fn sync(&mut self) -> anyhow::Result<()> {
        self.pacer.started(Instant::now());
        let first = self.status.families.values().all(|f| f.last_sync.is_none());
        let changes = self.table.take_changes();
        self.warn();
        let (mut success, mut large) = (true, false);
        if first {
            // While someone listens, the kernel makes a message of each element of a commit: too much for a whole table.
            self.monitor.leave().unwrap_or_else(|error| tracing::warn!("{error}"));
        }
        for engine in &mut self.engines {
            let family = engine.family();
            let settings = settings(&self.config, self.table.node(), &self.host, family);
            let started = Instant::now();
            let result = engine.sync(&self.table, &changes, &settings, started);
            let status = self.status.families.entry(family.to_string()).or_default();
            match result {
                Ok(report) => {
                    let took = started.elapsed();
                    if first {
                        tracing::info!(%family, steps = report.steps, kernel = ?report.kernel, "the rules are in force after {took:?}");
                    } else if report.full || report.steps > 0 {
                        tracing::debug!(%family, steps = report.steps, full = report.full, kernel = ?report.kernel, "synced in {took:?}");
                    }
                    large |= report.full;
                    self.metrics.sync_seconds.get_or_create(&family.into()).observe(took.as_secs_f64());
                    self.metrics.kernel_seconds.get_or_create(&family.into()).observe(report.kernel.as_secs_f64());
                    if report.took_over {
                        tracing::info!(%family, "removed kube-proxy's nftables table in the transaction that brought ours up");
                    }
                    status.error = None;
                    status.last_sync = Some(unix_time());
                    status.syncs += 1;
                    self.metrics.syncs.get_or_create(&family.into()).inc();
                    self.metrics
                        .last_sync
                        .get_or_create(&family.into())
                        .set(unix_time().try_into().unwrap_or(i64::MAX));
                }
                Err(error) => {
                    success = false;
                    status.failures += 1;
                    status.error = Some(error.to_string());
                    self.metrics.sync_failures.get_or_create(&family.into()).inc();
                    if first && error.class == Class::Fatal {
                        return Err(error.into());
                    }
                    tracing::error!(%family, "sync failed, the old rules stay in force and it is tried again: {error}");
                }
            }
        }
        if first {
            self.monitor.join().unwrap_or_else(|error| tracing::error!("{error}; changes by others are not noticed"));
            // Nobody listened meanwhile.
            self.verify_at = Some(Instant::now() + 2 * SETTLE_AFTER);
        }
        if first && success {
            self.remove_kube_proxy();
        }
        self.reconcile_conntrack(first, &changes, success);
        drop(changes);
        if large {
            memory::give_back();
        }
        self.pacer.ended(Instant::now(), success);
        self.status_dirty = true;
        Ok(())
    }

    /// Deletes UDP flows that contradict the map: after a good sync only, and again until it worked.
    fn reconcile_conntrack(&mut self, first: bool, changes: &Changes, success: bool) {
        for engine in &mut self.engines {
            for frontend in engine.take_inherited() {
                self.frontends.add_gone(frontend);
            }
            let settings = engine.settings();
            self.frontends.set_node_addresses(settings);
            let state = |name: &ObjectName, frontends: &mut Frontends| {
                let udp = self.table.service(name).filter(|s| s.ports.iter().any(|p| p.protocol == Protocol::Udp));
                let views = udp.map_or_else(Vec::new, |service| {
                    resolve(service, &self.table.slices(name), self.table.node(), settings)
                });
                frontends.set_service(name, settings.family, &views);
            };
            if first || changes.node {
                let names: Vec<ObjectName> = self.table.services().map(|s| s.name.clone()).collect();
                names.iter().for_each(|name| state(name, &mut self.frontends));
            }
            changes.services.iter().for_each(|name| state(name, &mut self.frontends));
        }
        if !success || !self.frontends.due() {
            return;
        }
        let revision = self.frontends.revision();
        match Reconciler::open().and_then(|mut r| r.reconcile(&self.frontends)) {
            Ok(report) => {
                self.frontends.reconciled(revision);
                if report.deleted > 0 {
                    tracing::info!(deleted = report.deleted, "deleted UDP flows that contradicted the service map");
                }
                self.metrics.conntrack_deleted.inc_by(report.deleted);
            }
            Err(error) => {
                tracing::error!("connection tracking clean-up: {error}; it is tried again at the next sync");
                self.pacer.request();
            }
        }
    }

    /// Reports what is odd about the settings, once each.
    fn warn(&mut self) {
        let now = warnings(&self.config, self.table.node(), &self.host);
        for warning in now.iter().filter(|w| !self.warnings.contains(w)) {
            tracing::warn!("{warning}");
        }
        self.warnings = now;
    }

    fn write_status(&mut self) {
        // A service that is refused in both families is one.
        let refused: BTreeSet<_> = self.engines.iter().flat_map(|e| e.problems().keys()).collect();
        self.metrics.refused_services.set(i64::try_from(refused.len()).unwrap_or(i64::MAX));
        self.status.refused = self.engines.iter().flat_map(|e| e.problems().values().flatten()).cloned().collect();
        self.status.synced = self.synced;
        self.status.services = self.table.services().count();
        self.status.recent_problems = self.problems.iter().cloned().collect();
        let rival = self.rival.status(Instant::now());
        self.metrics.kube_proxy_running.set(i64::from(rival.is_some()));
        self.status.kube_proxy = rival.into_iter().chain(self.legacy.iter().cloned()).collect();
        if let Err(error) = status::write(&self.config.run_dir, &self.status) {
            tracing::warn!(
                "{}: {error}; `tandem status` shows nothing until this works",
                self.config.run_dir.display()
            );
        }
        self.status_dirty = false;
        self.status_written = Instant::now();
    }
}
