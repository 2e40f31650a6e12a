//! One program on one node, from its cold start to its restart.

use super::changes::{self, NOBODY, Plan};
use super::{Measure, Options};
use crate::apiserver::{ApiServer, SERVICE_CIDRS, User};
use crate::bench::cluster::{Cluster, ENDPOINT_PORT};
use crate::bench::knock::{self, Knocker};
use crate::bench::lane::Lane;
use crate::bench::running::{Running, metric};
use crate::cluster::Program;
use crate::envtest::Binaries;
use crate::server::{Arrivals, Server};
use anyhow::{Context, Result};
use std::net::SocketAddrV4;
use std::time::Duration;

/// Every so many Services are waited for at a cold start, besides the last one.
const STRIDE: usize = 1000;
/// What was seen, by measure.
pub type Samples = Vec<(Measure, Vec<f64>)>;

struct Visit<'a> {
    program: Program,
    binaries: &'a Binaries,
    api: &'a ApiServer,
    plan: Plan,
    idle: Duration,
    lane: Lane,
    knocker: Knocker,
    dir: tempfile::TempDir,
    samples: Samples,
}

/// Measures `program` on a node that is made for it. The API server holds the same objects before and after.
///
/// # Errors
/// The program ends, or something takes longer than the limit.
pub fn visit(
    program: Program,
    binaries: &Binaries,
    api: &ApiServer,
    cluster: Cluster,
    options: &Options,
) -> Result<Samples> {
    let lane = Lane::new(program.name())?;
    let services = SERVICE_CIDRS.split(',').next().expect("there is an IPv4 network");
    // What no rule translates is refused at once; a default route would swallow it and cost each attempt its patience.
    lane.node.ip(&format!("route add unreachable {services}"))?;
    lane.node.sysctl(&[("net/ipv4/icmp_ratemask", "0")])?;
    api.link(&lane.node)?;
    let _pods = Server::start(&lane.pods().path(), "pods", &[ENDPOINT_PORT].into(), &Arrivals::default())?;
    let knocker = Knocker::new(&lane);
    let (dir, samples) = (tempfile::tempdir()?, Samples::new());
    let plan = Plan { cluster, changes: options.changes, limit: options.limit };
    let mut visit = Visit { program, binaries, api, plan, idle: options.idle, lane, knocker, dir, samples };
    let mut running = visit.start()?;
    let changed = visit.cold(&mut running).and_then(|()| visit.changes(&mut running)).and_then(|()| running.alive());
    changed.with_context(|| running.log_tail())?;
    visit.restart(running)?;
    let plan = visit.plan;
    api.access()?.run(async |client| plan.restore(&client).await)?;
    Ok(visit.samples)
}

impl Visit<'_> {
    fn start(&self) -> Result<Running> {
        let kubeconfig = self.api.linked_kubeconfig(User::Proxy)?;
        Running::start(self.program, self.binaries, &self.lane, &kubeconfig, self.dir.path())
    }

    fn add(&mut self, measure: Measure, values: Vec<f64>) {
        self.samples.push((measure, values));
    }

    fn cold(&mut self, running: &mut Running) -> Result<()> {
        let last = self.plan.last();
        let others: Vec<SocketAddrV4> = (0..last).step_by(STRIDE).map(|index| self.plan.address(index)).collect();
        let (last, deadline, mut alive) = (self.plan.address(last), self.plan.deadline(), running.exists());
        let answered = self.knocker.spawn(move || {
            let mut all = vec![knock::until(last, deadline, &mut alive, |_| true)?.at];
            for other in others {
                all.push(knock::until(other, deadline, &mut alive, |_| true)?.at);
            }
            all.into_iter().max()
        });
        let answered = answered.join().expect("knocking does not panic");
        let Some(answered) = answered else {
            running.alive()?;
            anyhow::bail!("not every service answers within {:?}", self.plan.limit);
        };
        self.add(Measure::Cold, vec![(answered - running.started).as_secs_f64()]);
        running.rest(self.plan.limit)?;
        let read = |name: &str| metric(&self.lane, name);
        let sync = read("kubeproxy_sync_proxy_rules_duration_seconds_sum")?;
        let (list, kernel) = (read("tandem_first_list_seconds")?, read("tandem_sync_kernel_seconds_sum")?);
        let compile = sync.zip(kernel).map(|(sync, kernel)| sync - kernel);
        let split =
            [(Measure::List, list), (Measure::Sync, sync), (Measure::Compile, compile), (Measure::Kernel, kernel)];
        for (measure, seconds) in split {
            self.samples.extend(seconds.map(|seconds| (measure, vec![seconds])));
        }
        self.add(Measure::ColdCpu, vec![running.cpu_time()?.as_secs_f64()]);
        self.memory(running, Measure::Memory)?;
        if !self.idle.is_zero() {
            std::thread::sleep(self.idle);
            self.add(Measure::IdleMemory, vec![mib(running.memory()?.0)]);
        }
        Ok(())
    }

    fn memory(&mut self, running: &Running, now: Measure) -> Result<()> {
        let (resident, peak) = running.memory()?;
        self.add(now, vec![mib(resident)]);
        self.add(Measure::PeakMemory, vec![mib(peak)]);
        if running.child_memory() > 0 {
            self.add(Measure::ChildMemory, vec![mib(running.child_memory())]);
        }
        Ok(())
    }

    fn changes(&mut self, running: &mut Running) -> Result<()> {
        let (plan, knocker) = (self.plan, &self.knocker);
        self.api.access()?.run(async |client| changes::prepare(plan, &client).await)?;
        running.rest(plan.limit)?;
        let changes = self.api.access()?.run(async |client| changes::make(plan, &client, knocker).await)?;
        self.add(Measure::Added, changes.added);
        self.add(Measure::AddedAfterReturn, changes.added_after_return);
        self.add(Measure::Removed, changes.removed);
        Ok(())
    }

    fn restart(&mut self, running: Running) -> Result<()> {
        running.end()?;
        let last = self.plan.last();
        let (plan, new) = (self.plan, self.plan.moved());
        self.api.access()?.run(async |client| plan.cluster.replace_endpoints(&client, last, NOBODY, &new).await)?;
        let mut running = self.start()?;
        let (to, deadline, alive) = (self.plan.address(last), self.plan.deadline(), running.exists());
        // Of a Service that does not change, connections go on being answered; if this is also the last one, the rest is as good.
        let other = self.plan.address(0);
        let knocked = self.knocker.spawn(move || {
            let mut lost = 0u32;
            let served = knock::until(to, deadline, alive, |answered| {
                lost += u32::from(knock::once(other).is_none());
                new.contains(&answered.by)
            });
            served.map(|served| (served, lost))
        });
        let knocked = knocked.join().expect("knocking does not panic");
        let Some((served, lost)) = knocked else {
            running.alive()?;
            anyhow::bail!("the change is not served within {:?}\n{}", self.plan.limit, running.log_tail());
        };
        self.add(Measure::Restart, vec![(served.at - running.started).as_secs_f64()]);
        self.add(Measure::Lost, vec![lost.into()]);
        running.rest(self.plan.limit)?;
        self.add(Measure::RestartPeakMemory, vec![mib(running.memory()?.1)]);
        running.end()
    }
}

#[allow(clippy::cast_precision_loss, reason = "sizes of processes are far below 2^52")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
