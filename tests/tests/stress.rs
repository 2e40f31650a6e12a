//! Rules under load and under attack: endpoints that come and go while clients hammer, changes by others, kills, many services.
//!
//! The long form of the flip test (10,000 flips, about three minutes): `TANDEM_FLIPS=10000 cargo test -p proxy-tests --test stress flips`.

mod node;

use anyhow::{Context, Result, bail, ensure};
use node::{
    PATIENCE, PORT, Source, Tandem, Watch, ask, backend, check_flows, client, open_flows, service, skipped, sticky,
    timed, world,
};
use proxy::agent::engine::Engine;
use proxy::model::{
    Delta, Endpoint, EndpointSlice, Hints, IpFamily, ObjectName, Protocol, Service, ServicePort, ServiceTable,
    ServiceType, Settings, SlicePort, TrafficPolicy,
};
use proxy::nft::netlink::Connection;
use proxy::nft::object::{Ruleset, TableId};
use proxy_tests::netns::Netns;
use proxy_tests::probe::Flow;
use proxy_tests::world::World;
use socket2::{Domain, Protocol as SockProtocol, SockAddr, Socket, Type};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

const VIP: &str = "172.30.0.10";
/// The hammered UDP port of the Service, and where its endpoints listen: not a port of the world's own servers.
const HAMMERED: u16 = 53;
const TARGET: u16 = 5353;
/// Datagrams a second between bursts of flips; in a burst as many as can be sent. Each one is a new flow, and flows live a second.
const RATE: u32 = 1000;

/// Held by the tests that need the processors for themselves.
static BUSY: Mutex<()> = Mutex::new(());

/// When which endpoints were in force, as nanoseconds since the start.
struct Timeline {
    start: Instant,
    /// Beginning of the commit, end of the commit (0 = not yet), endpoints.
    sets: RwLock<Vec<(u64, u64, BTreeSet<u8>)>>,
    /// Whether a burst of flips is on.
    burst: AtomicBool,
}

impl Timeline {
    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn begin(&self, endpoints: &BTreeSet<u8>) {
        let now = self.now();
        self.sets.write().unwrap().push((now, 0, endpoints.clone()));
    }

    fn end(&self) {
        let now = self.now();
        self.sets.write().unwrap().last_mut().expect("begun before").1 = now;
    }

    /// Whether `endpoint` was in force at some time between `sent` and now: a packet on its way may see any of those states.
    fn allows(&self, endpoint: u8, sent: u64) -> bool {
        for (_, end, endpoints) in self.sets.read().unwrap().iter().rev() {
            if endpoints.contains(&endpoint) {
                return true;
            }
            if *end != 0 && *end < sent {
                return false;
            }
        }
        false
    }
}

#[derive(Default)]
struct Counts {
    sent: AtomicU64,
    arrived: AtomicU64,
    wrong: AtomicU64,
    rejected: AtomicU64,
    /// Not translated and not refused.
    missed: AtomicU64,
    connections: AtomicU64,
    failures: Mutex<Vec<String>>,
}

impl Counts {
    fn failed(&self, text: String) {
        let mut failures = self.failures.lock().unwrap();
        if failures.len() < 10 {
            failures.push(text);
        }
    }
}

fn add(count: &AtomicU64) {
    count.fetch_add(1, Ordering::Relaxed);
}

/// Sends datagrams of ever new source ports from the client's addresses. Payload: when it was sent.
fn hammer(ns: &Netns, timeline: &Timeline, counts: &Counts, stop: &AtomicBool) -> Result<()> {
    ns.enter();
    let raw = Socket::new(Domain::IPV4, Type::RAW, Some(SockProtocol::from(nix::libc::IPPROTO_RAW)))?;
    let vip: Ipv4Addr = VIP.parse()?;
    let target = SockAddr::from(SocketAddr::from((vip, 0)));
    let mut number: u32 = 0;
    while !stop.load(Ordering::Relaxed) {
        let IpAddr::V4(source) = client(1 + u8::try_from(number % 8)?) else { bail!("an IPv4 address") };
        let port = 1024 + u16::try_from((number / 8) % 64_000)?;
        let mut packet = vec![0x45, 0, 0, 36, 0, 0, 0, 0, 64, 17, 0, 0];
        packet.extend(source.octets());
        packet.extend(vip.octets());
        packet.extend(port.to_be_bytes());
        packet.extend(HAMMERED.to_be_bytes());
        packet.extend([0, 16, 0, 0]);
        packet.extend(timeline.now().to_be_bytes());
        raw.send_to(&packet, &target).context("send")?;
        add(&counts.sent);
        number += 1;
        if !timeline.burst.load(Ordering::Relaxed) {
            std::thread::sleep(Duration::from_secs(1) / RATE);
        }
    }
    Ok(())
}

/// Takes datagrams at an endpoint (`Some`) or at the place where all that is not translated ends.
fn receive(ns: &Netns, endpoint: Option<u8>, timeline: &Timeline, counts: &Counts, stop: &AtomicBool) -> Result<()> {
    ns.enter();
    let socket = UdpSocket::bind(("0.0.0.0", if endpoint.is_some() { TARGET } else { HAMMERED }))?;
    nix::sys::socket::setsockopt(&socket, nix::sys::socket::sockopt::RcvBufForce, &(16 << 20))?;
    socket.set_read_timeout(Some(Duration::from_millis(50)))?;
    let mut buffer = [0u8; 64];
    while !stop.load(Ordering::Relaxed) {
        let Ok(8) = socket.recv(&mut buffer) else { continue };
        let sent = u64::from_be_bytes(buffer[..8].try_into()?);
        match endpoint {
            None => add(&counts.missed),
            Some(endpoint) if timeline.allows(endpoint, sent) => add(&counts.arrived),
            Some(endpoint) => {
                add(&counts.wrong);
                counts.failed(format!(
                    "a datagram sent at {sent} ns arrived at endpoint {endpoint} at {} ns",
                    timeline.now()
                ));
            }
        }
    }
    Ok(())
}

/// Counts ICMP errors (destination unreachable) that come back to the client.
fn count_rejects(ns: &Netns, timeline: &Timeline, counts: &Counts, stop: &AtomicBool) -> Result<()> {
    ns.enter();
    let icmp = Socket::new(Domain::IPV4, Type::RAW, Some(SockProtocol::ICMPV4))?;
    icmp.set_read_timeout(Some(Duration::from_millis(50)))?;
    let mut buffer = [0u8; 256];
    while !stop.load(Ordering::Relaxed) {
        let Ok(n) = std::io::Read::read(&mut (&icmp), &mut buffer) else { continue };
        if n > 21 && buffer[20] == 3 {
            add(&counts.rejected);
            counts.failed(format!("ICMP code {} at {} ns", buffer[21], timeline.now()));
        }
    }
    Ok(())
}

/// Makes TCP connections one after the other.
fn connect(world: &World, timeline: &Timeline, counts: &Counts, stop: &AtomicBool) -> Result<()> {
    world.netns("client").context("client")?.enter();
    // In turn from all addresses: a port that was used is not free again for a minute.
    for n in (1..=8).cycle() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let sent = timeline.now();
        match Flow::tcp(client(n), format!("{VIP}:80").parse()?, PATIENCE) {
            Ok((_, answer)) => {
                let n = answer.server.strip_prefix("web").and_then(|n| n.parse().ok()).unwrap_or(0);
                add(&counts.connections);
                if !timeline.allows(n, sent) {
                    add(&counts.wrong);
                    counts.failed(format!("a connection made at {sent} ns was answered by {answer}"));
                }
            }
            Err(seen) => counts.failed(format!("connection at {sent} ns: {seen}")),
        }
    }
    Ok(())
}

/// The same numbers each time.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

fn flipped(affinity: bool) -> Service {
    let port = |name: &str, protocol, port| ServicePort { name: name.into(), protocol, port, node_port: 0 };
    Service {
        name: ObjectName::new("test", "flipped"),
        service_type: ServiceType::ClusterIp,
        cluster_ips: vec![VIP.parse().unwrap()],
        external_ips: Vec::new(),
        load_balancer_ips: Vec::new(),
        source_ranges: Vec::new(),
        external_traffic_policy: TrafficPolicy::Cluster,
        internal_traffic_policy: TrafficPolicy::Cluster,
        affinity_timeout_s: affinity.then_some(10_800),
        health_check_node_port: 0,
        publish_not_ready_addresses: false,
        traffic_distribution: None,
        has_selector: false,
        ports: vec![port("udp", Protocol::Udp, HAMMERED), port("tcp", Protocol::Tcp, 80)],
    }
}

fn flipped_slice(endpoints: &BTreeSet<u8>) -> EndpointSlice {
    let port = |name: &str, protocol, port| SlicePort { name: name.into(), protocol, port };
    let endpoint = |n: &u8| Endpoint {
        address: backend(*n).into(),
        node_name: None,
        ready: true,
        serving: true,
        terminating: false,
        zone_hints: Hints::default(),
        node_hints: Hints::default(),
    };
    EndpointSlice {
        name: ObjectName::new("test", "flipped-1"),
        service: ObjectName::new("test", "flipped"),
        family: IpFamily::V4,
        ports: vec![port("udp", Protocol::Udp, TARGET), port("tcp", Protocol::Tcp, PORT)],
        endpoints: endpoints.iter().map(endpoint).collect(),
    }
}

/// Flips endpoints until `enough(flips)`, in bursts, with a settled pause after each. Returns how many there were.
fn flip(engine: &mut Engine, timeline: &Timeline, enough: &dyn Fn(u64) -> bool) -> Result<u64> {
    let mut table = ServiceTable::new();
    let settings = engine.settings().clone();
    let mut random = Random(7);
    let mut set_to = |engine: &mut Engine, affinity: bool, endpoints: &BTreeSet<u8>| -> Result<()> {
        table.apply(Delta::Service(flipped(affinity)));
        table.apply(Delta::Slice(flipped_slice(endpoints)));
        let changes = table.take_changes();
        timeline.begin(endpoints);
        engine.sync(&table, &changes, &settings, Instant::now())?;
        timeline.end();
        ensure!(engine.problems().is_empty(), "{:?}", engine.problems());
        Ok(())
    };
    let mut affinity = false;
    set_to(engine, affinity, &[1, 2, 3].into())?;
    let mut flips = 0;
    while !enough(flips) {
        timeline.burst.store(true, Ordering::Relaxed);
        for _ in 0..1 + random.below(120) {
            // 1 to 4 of the four endpoints; the next set may have none of the last one.
            let bits = 1 + random.below(15);
            let endpoints: BTreeSet<u8> = (1..=4).filter(|n| bits & (1 << (n - 1)) != 0).collect();
            if random.below(20) == 0 {
                affinity = !affinity;
            }
            set_to(engine, affinity, &endpoints)?;
            flips += 1;
            std::thread::sleep(Duration::from_millis(random.below(4)));
        }
        timeline.burst.store(false, Ordering::Relaxed);
        if let Some(at) = engine.settle_at() {
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            engine.settle(Instant::now())?;
        }
    }
    Ok(flips)
}

#[test]
fn flips_of_endpoints_never_reject_miss_or_misdeliver_a_new_flow() {
    if skipped() {
        return;
    }
    let _alone = BUSY.lock().unwrap_or_else(PoisonError::into_inner);
    let long: Option<u64> = std::env::var("TANDEM_FLIPS").ok().map(|n| n.parse().expect("TANDEM_FLIPS is a number"));
    let world = world().unwrap();
    world.node.sysctl(&[("net/netfilter/nf_conntrack_udp_timeout", "1")]).unwrap();
    let connection = world.node.run(Connection::open).unwrap();
    let mut engine = Engine::new("tandem", Settings::new(IpFamily::V4), connection);
    let timeline = Timeline { start: Instant::now(), sets: RwLock::default(), burst: AtomicBool::new(false) };
    let (counts, ready, stop) = (Counts::default(), AtomicBool::new(false), AtomicBool::new(false));
    let begin = Instant::now();
    let (timeline, counts, ready, stop, world) = (&timeline, &counts, &ready, &stop, &world);
    let flips = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for n in 1..=4u8 {
            let ns = world.netns(&format!("web{n}")).unwrap();
            threads.push(scope.spawn(move || receive(ns, Some(n), timeline, counts, stop)));
        }
        threads.push(scope.spawn(move || receive(world.netns("sink").unwrap(), None, timeline, counts, stop)));
        threads.push(scope.spawn(move || count_rejects(world.netns("client").unwrap(), timeline, counts, stop)));
        // The clients start when the Service is there.
        let wait = move || {
            while !ready.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        threads.push(scope.spawn(move || {
            wait();
            hammer(world.netns("client").unwrap(), timeline, counts, stop)
        }));
        threads.push(scope.spawn(move || {
            wait();
            connect(world, timeline, counts, stop)
        }));
        let result = flip(&mut engine, timeline, &|flips| {
            ready.store(true, Ordering::Relaxed);
            long.map_or_else(|| begin.elapsed() > Duration::from_secs(22), |long| flips >= long)
        });
        std::thread::sleep(Duration::from_millis(200));
        stop.store(true, Ordering::Relaxed);
        ready.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().unwrap().unwrap();
        }
        result.unwrap()
    });
    let n = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let (sent, arrived) = (n(&counts.sent), n(&counts.arrived));
    println!(
        "{flips} flips in {:.0?}: {sent} datagrams sent, {arrived} arrived right, {} wrong, {} rejected, {} missed; {} connections",
        begin.elapsed(),
        n(&counts.wrong),
        n(&counts.rejected),
        n(&counts.missed),
        n(&counts.connections)
    );
    assert_eq!(*counts.failures.lock().unwrap(), Vec::<String>::new());
    assert_eq!(n(&counts.missed), 0);
    assert!(arrived * 100 >= sent * 95, "{sent} sent, {arrived} arrived");
    assert!(flips >= long.unwrap_or(300), "{flips} flips");
    assert!(sent > 10_000 && n(&counts.connections) > 100, "{sent} datagrams, {} connections", n(&counts.connections));
}

/// Repair within this time; a kernel is compared half a second after the change.
const REPAIR: Duration = Duration::from_secs(5);

fn nft(world: &World, command: &str) -> Result<()> {
    world.node.output(&["nft", command]).map(drop).with_context(|| command.to_string())
}

/// Our table as the kernel holds it, without the clients that affinity remembers.
fn table(world: &World) -> Option<Ruleset> {
    let id = TableId { family: IpFamily::V4, name: "tandem".into() };
    world.node.run(|| Connection::open().and_then(|mut connection| connection.read(&id, false)).unwrap())
}

#[test]
fn what_others_do_to_our_table_is_repaired_and_our_own_updates_are_not_taken_for_it() {
    if skipped() {
        return;
    }
    let world = world().unwrap();
    let mut tandem = Tandem::new(&["--min-sync-period=0s", "--cluster-cidr=10.0.0.0/8"]).unwrap();
    tandem.write("web.yaml", &service("web", VIP, &[1, 2])).unwrap();
    tandem.write("sticky.yaml", &sticky("sticky", "172.30.0.11", &[1, 2])).unwrap();
    tandem.start(&world.node, &Source::Manifests).unwrap();
    tandem.await_synced().unwrap();
    ask(&world, 1, VIP).unwrap();
    let first = ask(&world, 1, "172.30.0.11").unwrap();

    // Own updates.
    for round in 0..10u8 {
        tandem.write("more.yaml", &service("more", "172.30.0.12", &[1 + round % 4, 1 + (round + 1) % 4])).unwrap();
        std::thread::sleep(Duration::from_millis(150));
    }
    std::thread::sleep(Duration::from_secs(3));
    ask(&world, 1, "172.30.0.12").unwrap();
    assert_eq!(tandem.repairs(), 0, "{}", tandem.log());
    assert!(!tandem.log().contains("someone else"), "{}", tandem.log());

    let attacks = [
        ("an element goes", "delete element ip tandem service-ips { 172.30.0.10 . tcp . 80 }"),
        (
            "an element is changed",
            "delete element ip tandem slots { 172.30.0.10 . tcp . 80 . 0 }; add element ip tandem slots { 172.30.0.10 . tcp . 80 . 0 : 10.0.9.9 . 1 }",
        ),
        ("an element is added", "add element ip tandem cluster-ips { 10.0.2.1 }"),
        ("the rules of a chain go", "flush chain ip tandem services"),
        ("a rule is added", "insert rule ip tandem services ip daddr 172.30.0.10 return"),
        ("a base chain goes", "flush chain ip tandem nat-prerouting; delete chain ip tandem nat-prerouting"),
        ("a chain is added", "add chain ip tandem foreign { type filter hook forward priority 0; policy drop; }"),
        ("a set is added", "add set ip tandem foreign { type ipv4_addr; }"),
        ("the table goes", "delete table ip tandem"),
        ("everything goes", "flush ruleset"),
    ];
    let whole = table(&world);
    for (what, command) in attacks {
        let before = tandem.repairs();
        nft(&world, command).unwrap();
        let same = || table(&world) == whole;
        assert!(!same(), "{what}: the change is seen");
        let took = timed(what, REPAIR, same).unwrap_or_else(|e| panic!("{what}: {e}\n{}", tandem.log()));
        ask(&world, 1, VIP).unwrap();
        let counted = timed("the repair is counted", REPAIR, || tandem.repairs() > before).is_ok();
        println!("{what}: repaired after {took:.1?}");
        assert!(counted, "{what}: {}", tandem.log());
        // A second look must find nothing.
        if what == "the table goes" {
            std::thread::sleep(Duration::from_secs(2));
        }
    }
    assert_eq!(ask(&world, 2, "172.30.0.11").unwrap().local.port(), first.local.port());
    let total = tandem.repairs();
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(tandem.repairs(), total, "a repair is not taken for a change by others: {}", tandem.log());
    assert!(tandem.log().contains("someone else changed our nftables table"), "{}", tandem.log());
}

/// Rules and chains with their handles: what is flushed and made anew has other ones.
fn handles(world: &World) -> Vec<String> {
    let text = world.node.output(&["nft", "-a", "list", "table", "ip", "tandem"]).unwrap();
    text.lines().filter(|l| l.contains("# handle") && !l.contains("expires")).map(String::from).collect()
}

#[test]
fn restart_and_kill_flush_nothing_and_keep_flows_and_affinity() {
    if skipped() {
        return;
    }
    let world = world().unwrap();
    let mut tandem = Tandem::new(&["--cluster-cidr=10.0.0.0/8"]).unwrap();
    tandem.write("web.yaml", &service("web", VIP, &[1, 2, 3])).unwrap();
    tandem.write("sticky.yaml", &sticky("sticky", "172.30.0.11", &[1, 2, 3, 4])).unwrap();
    tandem.start(&world.node, &Source::Manifests).unwrap();
    tandem.await_synced().unwrap();
    let flows = open_flows(&world, VIP, 10).unwrap();
    let chosen: Vec<String> = (1..=8).map(|n| ask(&world, n, "172.30.0.11").unwrap().server).collect();
    std::thread::sleep(Duration::from_millis(1500));
    let before = handles(&world);
    let watch = Watch::start(&world.node).unwrap();
    for way in ["SIGTERM", "SIGKILL"] {
        match way {
            "SIGTERM" => tandem.process().stop(),
            _ => tandem.process().kill(),
        }
        // Without an agent, the rules serve.
        check_flows(&world, &flows).unwrap();
        ask(&world, 1, VIP).unwrap();
        tandem.start(&world.node, &Source::Manifests).unwrap();
        tandem.await_synced().unwrap();
        std::thread::sleep(Duration::from_millis(2500));
        check_flows(&world, &flows).unwrap();
        let again: Vec<String> = (1..=8).map(|n| ask(&world, n, "172.30.0.11").unwrap().server).collect();
        assert_eq!(again, chosen, "after {way}");
        assert_eq!(handles(&world), before, "after {way}");
    }
    let (changes, transactions) = watch.seen();
    assert_eq!(transactions, 0, "nothing to change, no transaction: {changes:?}");
    assert!(!changes.iter().any(|line| line.starts_with("delete")), "{changes:?}");

    // A change that was made while no agent ran is all that the next one does.
    tandem.process().kill();
    tandem.write("web.yaml", &service("web", VIP, &[1, 2])).unwrap();
    tandem.start(&world.node, &Source::Manifests).unwrap();
    tandem.await_synced().unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    let (changes, _) = watch.seen();
    println!("one endpoint less over a restart:\n{}", changes.join("\n"));
    assert!(!changes.is_empty() && changes.len() <= 40, "{changes:?}");
    let again: Vec<String> = (1..=8).map(|n| ask(&world, n, "172.30.0.11").unwrap().server).collect();
    assert_eq!(again, chosen);
    assert!((0..20).all(|_| ask(&world, 1, VIP).unwrap().server != "web3"));
}

fn vip(n: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::from(Ipv4Addr::new(172, 30, 1, 0)) + n)
}

#[test]
fn two_thousand_services_start_soon_and_a_change_is_small() {
    if skipped() {
        return;
    }
    let _alone = BUSY.lock().unwrap_or_else(PoisonError::into_inner);
    const SERVICES: u32 = 2000;
    let world = world().unwrap();
    let mut tandem = Tandem::new(&["--cluster-cidr=10.0.0.0/8", "--min-sync-period=0s"]).unwrap();
    let objects = |n: u32| {
        let name = format!("s{n}");
        let [service, _] = service(&name, &vip(n).to_string(), &[]);
        // Ten endpoints, of which the four backends answer in the first and the last service.
        let addresses: Vec<Ipv4Addr> = match n {
            0 => (1..=4).map(backend).collect(),
            _ if n + 1 == SERVICES => (1..=4).map(backend).collect(),
            _ => (0..10).map(|i| Ipv4Addr::from(u32::from(Ipv4Addr::new(10, 64, 0, 0)) + n * 16 + i)).collect(),
        };
        [service, node::slice(&name, &addresses)]
    };
    for file in 0..20 {
        let all: Vec<_> = (0..SERVICES).filter(|n| n % 20 == file).flat_map(objects).collect();
        tandem.write(&format!("{file}.yaml"), &all).unwrap();
    }
    let start = Instant::now();
    tandem.start(&world.node, &Source::Manifests).unwrap();
    tandem.await_synced().unwrap();
    let synced = start.elapsed();
    ask(&world, 1, &vip(SERVICES - 1).to_string()).unwrap();
    println!(
        "{SERVICES} services: first synced after {synced:.1?}, last service answered after {:.1?}",
        start.elapsed()
    );
    assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    std::thread::sleep(Duration::from_secs(4));
    let status = std::fs::read_to_string(format!("/proc/{}/status", tandem.process().pid())).unwrap();
    status.lines().filter(|l| l.starts_with("VmRSS") || l.starts_with("VmHWM")).for_each(|l| println!("memory: {l}"));

    let watch = Watch::start(&world.node).unwrap();
    // No change: the same objects in a file that was written again.
    let mut all: Vec<_> = (0..SERVICES).filter(|n| n % 20 == 1).flat_map(objects).collect();
    tandem.write("1.yaml", &all).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let (changes, transactions) = watch.seen();
    assert!(changes.is_empty() && transactions == 0, "no change, no transaction: {changes:?}");

    // One endpoint of one service changes.
    all[1]["endpoints"][3]["addresses"][0] = "10.99.0.1".into();
    tandem.write("1.yaml", &all).unwrap();
    let took = timed("the change is in force", Duration::from_secs(10), || {
        world.node.output(&["nft", "list", "map", "ip", "tandem", "slots"]).unwrap_or_default().contains("10.99.0.1")
    });
    took.unwrap_or_else(|e| panic!("{e}: {}", tandem.log()));
    std::thread::sleep(Duration::from_secs(2));
    let (changes, transactions) = watch.seen();
    println!("one endpoint of one service with two ports: {transactions} transactions\n{}", changes.join("\n"));
    // Its slot and its entry in the hairpin set, of two ports, each with a deletion and an addition.
    assert!(
        transactions <= 2 && !changes.is_empty() && changes.len() <= 10,
        "{transactions} transactions: {changes:?}"
    );
    assert_eq!(tandem.repairs(), 0);
    ask(&world, 1, &vip(0).to_string()).unwrap();
}
