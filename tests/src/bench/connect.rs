//! What a Service costs the first packets of a connection: through Tandem's rules, through the real kube-proxy's, and through
//! a node without either.
//!
//! For each size of the cluster, each proxy programs the rules of a node of its own from the same API server and is then ended, as
//! is the API server: the rules stay, and nothing else runs while they are measured. Every round takes one sample of each case,
//! in an order that changes from round to round, so that a slow moment of the machine does not fall to one of them alone.

use super::cluster::{Cluster, ENDPOINT_PORT, SERVICE_PORT};
use super::lane::{Lane, NODE};
use super::machine::Machine;
use super::numbers::{Spread, quantile};
use super::running::Running;
use super::table::{Format, Table};
use crate::apiserver::{ApiServer, User};
use crate::cluster::Program;
use crate::envtest::{self, Binaries};
use crate::world::NODE_NAME;
use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::{Value, json};
use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::time::Duration;

/// How long a proxy that serves may go on working before its rules are measured.
const REST: Duration = Duration::from_secs(120);

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// Sizes of the cluster, in Services.
    pub services: Vec<usize>,
    /// Endpoints of each Service.
    pub endpoints: usize,
    /// Samples of each case.
    pub rounds: usize,
    /// Connections of each sample.
    pub connections: usize,
    /// How long a proxy may take to program its rules.
    pub limit: Duration,
}

/// The rules that a connection passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Through {
    /// A node without rules and without conntrack, to the pod's own address.
    NoProxy,
    /// A node with kube-proxy's rules.
    KubeProxy,
    /// A node with Tandem's rules.
    Tandem,
}

impl fmt::Display for Through {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Through::NoProxy => "no proxy",
            Through::KubeProxy => "kube-proxy",
            Through::Tandem => "Tandem",
        })
    }
}

/// What a connection is made to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// The pod's own address.
    Pod,
    /// The ClusterIP of the Service in the middle of the alphabet.
    Middle,
    /// The ClusterIP of the last Service of the alphabet.
    Last,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Target::Pod => "pod address",
            Target::Middle => "middle Service",
            Target::Last => "last Service",
        })
    }
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Proto {
    /// `connect` of TCP: SYN, and its answer back.
    Tcp,
    /// One UDP request and its answer.
    Udp,
}

/// The times of one case, in microseconds, and how they compare.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Size of the cluster.
    pub services: usize,
    /// What is timed.
    pub proto: Proto,
    /// The rules that were passed.
    pub through: Through,
    /// What was connected to.
    pub target: Target,
    /// Medians of the samples.
    pub p50: Spread,
    /// 99th percentiles of the samples.
    pub p99: Spread,
    /// p50 divided by that of a node without a proxy, of the same round.
    pub to_no_proxy: Spread,
    /// p50 divided by that of kube-proxy's same target, of the same round.
    pub to_kube_proxy: Option<Spread>,
    /// p99 divided by that of kube-proxy's same target, of the same round.
    pub p99_to_kube_proxy: Option<Spread>,
}

/// How a proxy got there.
#[derive(Clone, Debug, Serialize)]
pub struct Programmed {
    /// Size of the cluster.
    pub services: usize,
    /// Which proxy.
    pub through: Through,
    /// Seconds from its start until every probed Service was served; `None` = not within the limit, so that it was not measured.
    pub seconds: Option<f64>,
}

/// All that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Endpoints of each Service.
    pub endpoints: usize,
    /// Samples of each case.
    pub rounds: usize,
    /// Connections of each sample.
    pub connections: usize,
    /// Seconds that each may take to program its rules.
    pub limit: f64,
    /// What it ran on.
    pub machine: Machine,
    /// How each proxy got there.
    pub programmed: Vec<Programmed>,
    /// The cases.
    pub rows: Vec<Row>,
}

impl Report {
    /// The row of a case.
    #[must_use]
    pub fn row(&self, services: usize, proto: Proto, through: Through, target: Target) -> Option<&Row> {
        self.rows.iter().find(|r| (r.services, r.proto, r.through, r.target) == (services, proto, through, target))
    }

    /// The report for people.
    #[must_use]
    pub fn render(&self, format: Format) -> String {
        let mut text = format!(
            "First packets: µs of {} samples of {} connections each, median (smallest–largest); {} endpoints per Service.\n{}\n",
            self.rounds, self.connections, self.endpoints, self.machine
        );
        for (proto, what) in [(Proto::Tcp, "TCP connect"), (Proto::Udp, "UDP request and answer")] {
            let mut table = Table::new(&[
                "services",
                "rules of",
                "connected to",
                "p50",
                "p99",
                "p50 : no proxy",
                "p50 : kube-proxy",
                "p99 : kube-proxy",
            ]);
            for row in self.rows.iter().filter(|r| r.proto == proto) {
                let ratio = |spread: Option<Spread>| spread.map_or("–".to_string(), |s| format!("{s:.2}"));
                table.row(vec![
                    row.services.to_string(),
                    row.through.to_string(),
                    row.target.to_string(),
                    format!("{:.1}", row.p50),
                    format!("{:.1}", row.p99),
                    ratio((row.through != Through::NoProxy).then_some(row.to_no_proxy)),
                    ratio(row.to_kube_proxy),
                    ratio(row.p99_to_kube_proxy),
                ]);
            }
            text.push_str(&format!("\n{what}:\n\n{}", table.render(format)));
        }
        text.push('\n');
        for p in &self.programmed {
            text.push_str(&match p.seconds {
                Some(seconds) => {
                    format!("{} served {} Services {seconds:.1} s after its start.\n", p.through, p.services)
                }
                None => format!("{} did not serve {} Services within {} s.\n", p.through, p.services, self.limit),
            });
        }
        text
    }
}

/// Measures. Progress goes to standard error.
///
/// # Errors
/// A program or tool is missing, or a connection fails that had been served.
pub fn run(options: &Options) -> Result<Report> {
    anyhow::ensure!(options.rounds > 0 && options.connections > 0, "no rounds or no connections");
    let binaries = envtest::binaries()?;
    let mut report = Report {
        endpoints: options.endpoints,
        rounds: options.rounds,
        connections: options.connections,
        limit: options.limit.as_secs_f64(),
        machine: Machine::this()?,
        programmed: Vec::new(),
        rows: Vec::new(),
    };
    for &services in &options.services {
        measure_size(options, &binaries, services, &mut report)?;
    }
    Ok(report)
}

/// A Service that is connected to.
#[derive(Clone, Copy, Debug)]
struct Probed {
    target: Target,
    tcp: SocketAddrV4,
    udp: SocketAddrV4,
    endpoint: Ipv4Addr,
}

/// The Services in the middle and at the end of the order by namespace and name.
fn probed(cluster: &Cluster) -> [(Target, usize); 2] {
    let mut order: Vec<usize> = (0..cluster.services()).collect();
    order.sort_by_key(|index| (cluster.namespace(*index), cluster.name(*index)));
    [(Target::Middle, order[order.len() / 2]), (Target::Last, order[order.len() - 1])]
}

/// A UDP Service beside Service `index` in the alphabet, with ClusterIP `ip` and one of its endpoints.
fn udp_service(cluster: &Cluster, index: usize, ip: Ipv4Addr) -> [Value; 2] {
    let (namespace, name) = (cluster.namespace(index), format!("{}-udp", cluster.name(index)));
    [
        json!({
            "apiVersion": "v1", "kind": "Service", "metadata": { "namespace": namespace, "name": name },
            "spec": { "clusterIP": ip, "ports": [{ "name": "echo", "port": SERVICE_PORT, "protocol": "UDP" }] },
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": { "namespace": namespace, "name": format!("{name}-1"), "labels": { "kubernetes.io/service-name": name } },
            "addressType": "IPv4", "ports": [{ "name": "echo", "port": ENDPOINT_PORT, "protocol": "UDP" }],
            "endpoints": [{ "addresses": [cluster.endpoint_ip(index, 0)], "conditions": { "ready": true } }],
        }),
    ]
}

fn measure_size(options: &Options, binaries: &Binaries, services: usize, report: &mut Report) -> Result<()> {
    let cluster = Cluster::new(services, options.endpoints)?;
    let api = ApiServer::start(binaries)?;
    api.apply(&[json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": NODE_NAME },
        "status": { "addresses": [{ "type": "InternalIP", "address": NODE }] },
    })])?;
    let loaded = cluster.load(&api)?;
    eprintln!(
        "{services} Services × {} endpoints are in the API server after {:.1} s",
        options.endpoints,
        loaded.as_secs_f64()
    );
    let mut targets = Vec::new();
    for (number, (target, index)) in probed(&cluster).into_iter().enumerate() {
        let udp = cluster.service_ip(services + number);
        api.apply(&udp_service(&cluster, index, udp))?;
        let tcp = cluster.service_ip(index);
        targets.push(Probed {
            target,
            tcp: SocketAddrV4::new(tcp, SERVICE_PORT),
            udp: SocketAddrV4::new(udp, SERVICE_PORT),
            endpoint: cluster.endpoint_ip(index, 0),
        });
    }
    let mut lanes = vec![(Through::NoProxy, Lane::new("plain")?)];
    for (through, program) in [(Through::Tandem, Program::Tandem), (Through::KubeProxy, Program::KubeProxy)] {
        let lane = Lane::new(&through.to_string().to_lowercase())?;
        let taken = program_rules(&api, binaries, program, &lane, &targets, options.limit)
            .with_context(|| format!("{through} at {services} Services"))?;
        report.programmed.push(Programmed { services, through, seconds: taken.map(|t| t.as_secs_f64()) });
        match taken {
            Some(taken) => {
                eprintln!("{through} serves {services} Services after {:.1} s", taken.as_secs_f64());
                lanes.push((through, lane));
            }
            None => eprintln!("{through} does not serve {services} Services within {:?}", options.limit),
        }
    }
    drop(api);
    let samples = sample(options, services, &lanes, &targets)?;
    report.rows.extend(summarize(services, &samples));
    Ok(())
}

/// Lets the program make the rules of a node, and ends it. `None` = not within `limit`.
fn program_rules(
    api: &ApiServer,
    binaries: &Binaries,
    program: Program,
    lane: &Lane,
    targets: &[Probed],
    limit: Duration,
) -> Result<Option<Duration>> {
    api.link(&lane.node)?;
    let dir = tempfile::tempdir()?;
    let mut proxy = Running::start(program, binaries, lane, &api.linked_kubeconfig(User::Proxy)?, dir.path())?;
    let served = || targets.iter().all(|t| lane.reaches_tcp(t.tcp) && lane.reaches_udp(t.udp, t.endpoint));
    while !served() {
        proxy.alive()?;
        if proxy.started.elapsed() > limit {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let taken = proxy.started.elapsed();
    proxy.rest(limit.max(REST))?;
    Ok(Some(taken))
}

/// One case, with the quantiles of each round's sample in microseconds.
struct Samples {
    proto: Proto,
    through: Through,
    target: Target,
    p50: Vec<f64>,
    p99: Vec<f64>,
}

fn sample(options: &Options, services: usize, lanes: &[(Through, Lane)], targets: &[Probed]) -> Result<Vec<Samples>> {
    let pod = *targets.last().context("no targets")?;
    let mut cases = Vec::new();
    for proto in [Proto::Tcp, Proto::Udp] {
        for (through, lane) in lanes {
            let direct = SocketAddrV4::new(pod.endpoint, ENDPOINT_PORT);
            cases.push((proto, *through, lane, Probed { target: Target::Pod, tcp: direct, udp: direct, ..pod }));
            if *through != Through::NoProxy {
                cases.extend(targets.iter().map(|t| (proto, *through, lane, *t)));
            }
        }
    }
    let mut samples: Vec<Samples> = cases
        .iter()
        .map(|(proto, through, _, to)| Samples {
            proto: *proto,
            through: *through,
            target: to.target,
            p50: Vec::new(),
            p99: Vec::new(),
        })
        .collect();
    for round in 0..options.rounds {
        // Forwards, then backwards, each time from another beginning.
        let mut order: Vec<usize> = (0..cases.len()).collect();
        order.rotate_left(round * 3 % cases.len());
        if round % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let (proto, through, lane, to) = &cases[index];
            let times = match proto {
                Proto::Tcp => lane.tcp(to.tcp, options.connections),
                Proto::Udp => lane.udp(to.udp, to.endpoint, options.connections),
            };
            let mut times = times.with_context(|| format!("{through}, {}, {services} Services", to.target))?;
            times.sort_unstable();
            samples[index].p50.push(quantile(&times, 0.5) / 1e3);
            samples[index].p99.push(quantile(&times, 0.99) / 1e3);
        }
        eprintln!("{services} Services: round {} of {}", round + 1, options.rounds);
    }
    Ok(samples)
}

fn summarize(services: usize, samples: &[Samples]) -> Vec<Row> {
    let find =
        |proto, through, target| samples.iter().find(|s| (s.proto, s.through, s.target) == (proto, through, target));
    let ratio = |of: &[f64], to: &[f64]| Spread::of(&of.iter().zip(to).map(|(a, b)| a / b).collect::<Vec<_>>());
    let row = |s: &Samples| {
        let plain = find(s.proto, Through::NoProxy, Target::Pod).expect("a node without proxy is always measured");
        let kube_proxy = (s.through == Through::Tandem).then(|| find(s.proto, Through::KubeProxy, s.target)).flatten();
        Row {
            services,
            proto: s.proto,
            through: s.through,
            target: s.target,
            p50: Spread::of(&s.p50),
            p99: Spread::of(&s.p99),
            to_no_proxy: ratio(&s.p50, &plain.p50),
            to_kube_proxy: kube_proxy.map(|k| ratio(&s.p50, &k.p50)),
            p99_to_kube_proxy: kube_proxy.map(|k| ratio(&s.p99, &k.p99)),
        }
    };
    samples.iter().map(row).collect()
}
