//! From the real kube-proxy to Tandem on one node: rules, flows and affinity at the change-over, and a kube-proxy that runs on.

mod node;

use anyhow::{Context, Result};
use node::{
    METRICS, PATIENCE, Source, Tandem, Watch, ask, check_flows, client, open_flows, service, skipped, slice, sticky,
    world,
};
use proxy_tests::apiserver::{ApiServer, User};
use proxy_tests::envtest::{self, Binaries};
use proxy_tests::netns::Netns;
use proxy_tests::process::{Process, eventually};
use proxy_tests::relay::Relay;
use proxy_tests::world::{NODE_NAME, World};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

const WEB: &str = "172.30.0.10";
const STICKY: &str = "172.30.0.11";
/// Seconds that a client of the sticky Service is remembered.
const AFFINITY: u64 = 600;
/// kube-proxy's start takes a few seconds on a loaded machine.
const START: Duration = Duration::from_secs(40);

/// The Kubernetes binaries, or the words why not.
fn binaries() -> Option<Binaries> {
    if skipped() {
        return None;
    }
    if let Some(why) = envtest::missing() {
        println!("SKIP {why}");
        return None;
    }
    Some(envtest::binaries().unwrap())
}

/// A real API server with two Services, reached from the node of a world.
struct Cluster {
    binaries: Binaries,
    world: World,
    kubeconfig: PathBuf,
    dir: tempfile::TempDir,
    relays: Vec<Relay>,
    api: ApiServer,
}

impl Cluster {
    fn new(binaries: Binaries) -> Result<Self> {
        let (api, world) = (ApiServer::start(&binaries)?, world()?);
        let mut objects = vec![node_object(NODE_NAME, "192.168.0.2")];
        objects.extend(service("web", WEB, &[1, 2, 3]));
        let [mut service, slice] = sticky("sticky", STICKY, &[1, 2, 3, 4]);
        service["spec"]["sessionAffinityConfig"] = json!({ "clientIP": { "timeoutSeconds": AFFINITY } });
        objects.extend([service, slice]);
        api.apply(&objects)?;
        let relays = vec![api.reach_from(&world.node)?];
        Ok(Self { binaries, world, kubeconfig: api.kubeconfig(User::Proxy)?, dir: tempfile::tempdir()?, relays, api })
    }

    /// Starts the real kube-proxy as the proxy of the node `name`.
    fn kube_proxy(&self, ns: &Netns, name: &str, mode: &str) -> Result<Process> {
        let mut command = ns.command(&self.binaries.kube_proxy);
        command.arg(format!("--kubeconfig={}", self.kubeconfig.display())).args([
            &format!("--proxy-mode={mode}"),
            &format!("--hostname-override={name}"),
            "--cluster-cidr=10.0.0.0/8",
            // Only the initial network namespace may set these.
            "--conntrack-max-per-core=0",
            "--conntrack-min=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
            "--iptables-min-sync-period=100ms",
            "-v=2",
        ]);
        Process::start("kube-proxy", command, &self.dir.path().join(format!("kube-proxy-{name}.log")))
    }

    /// Starts it on the world's node and waits until it serves.
    fn serving_kube_proxy(&self, mode: &str) -> Result<Process> {
        let process = self.kube_proxy(&self.world.node, NODE_NAME, mode)?;
        let listed = || match mode {
            "nftables" => self.world.node.output(&["nft", "list", "table", "ip", "kube-proxy"]),
            _ => self.world.node.output(&["iptables-save", "-t", "nat"]),
        };
        let serves = |text: String| [WEB, STICKY].iter().all(|ip| text.contains(*ip));
        eventually("kube-proxy has programmed its rules", START, || serves(listed().unwrap_or_default()).then_some(()))
            .with_context(|| process.log_tail())?;
        ask(&self.world, 1, WEB).with_context(|| process.log_tail())?;
        Ok(process)
    }

    fn tandem(&self) -> Result<Tandem> {
        let mut tandem = Tandem::new(&["--cluster-cidr=10.0.0.0/8", "--min-sync-period=100ms"])?;
        tandem.start(&self.world.node, &Source::Kubeconfig(&self.kubeconfig))?;
        tandem.await_synced()?;
        Ok(tandem)
    }
}

fn node_object(name: &str, address: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": name },
        "status": { "addresses": [{ "type": "InternalIP", "address": address }] },
    })
}

/// Clients in the affinity sets of `table`: address and seconds that are left.
fn records(world: &World, table: &str) -> Vec<(String, u64)> {
    let text = world.node.output(&["nft", "-j", "list", "table", "ip", table]).unwrap();
    let json: Value = serde_json::from_str(&text).unwrap();
    let mut found = Vec::new();
    for object in json["nftables"].as_array().unwrap() {
        let set = &object["set"];
        if set["name"].as_str().is_some_and(|name| name.starts_with("affinity-")) {
            for element in set["elem"].as_array().into_iter().flatten() {
                let element = &element["elem"];
                found.push((element["val"].as_str().unwrap().to_string(), element["expires"].as_u64().unwrap()));
            }
        }
    }
    found.sort();
    found
}

fn servers(world: &World, to: &str) -> Vec<String> {
    (1..=8).map(|n| ask(world, n, to).unwrap().server).collect()
}

/// What is said of a node on which no kube-proxy runs.
fn assert_alone(tandem: &Tandem, node: &Netns) {
    let (text, healthy) = tandem.status_command(node).unwrap();
    assert!(healthy && !text.contains("kube-proxy:"), "{text}");
    assert_eq!(tandem.metric(node, "tandem_kube_proxy_running").unwrap(), 0.0);
    assert!(!tandem.log().contains("a kube-proxy is running"), "{}", tandem.log());
}

#[test]
fn nftables_rules_go_in_the_transaction_that_brings_ours_up_and_flows_and_affinity_stay() {
    let Some(binaries) = binaries() else { return };
    let cluster = Cluster::new(binaries).unwrap();
    let world = &cluster.world;
    let mut kube_proxy = cluster.serving_kube_proxy("nftables").unwrap();
    let flows = open_flows(world, WEB, 20).unwrap();
    let chosen = servers(world, STICKY);
    kube_proxy.stop();
    std::thread::sleep(Duration::from_secs(3));
    let remembered = records(world, "kube-proxy");
    assert_eq!(remembered.len(), 8, "{remembered:?}");
    let watch = Watch::start(&world.node).unwrap();

    let tandem = cluster.tandem().unwrap();
    world.node.assert_no_table("kube-proxy").unwrap();
    let imported = records(world, "tandem");
    let clients: Vec<String> = imported.iter().map(|(client, _)| client.clone()).collect();
    assert_eq!(clients, (1..=8).map(|n| client(n).to_string()).collect::<Vec<_>>());
    // Not begun anew: no more than what was left.
    for ((client, left), (_, before)) in imported.iter().zip(&remembered) {
        assert!(left <= before && left + 20 > *before && *before < AFFINITY - 2, "{client}: {before} s, then {left} s");
    }
    check_flows(world, &flows).unwrap();
    assert_eq!(servers(world, STICKY), chosen, "each client keeps its endpoint");
    ask(world, 1, WEB).unwrap();
    // The end of a transaction is the line with its generation.
    std::thread::sleep(Duration::from_millis(500));
    let text = watch.text();
    let transactions: Vec<&str> = text.split("# new generation").collect();
    let with = |what: &str| transactions.iter().position(|t| t.lines().any(|l| l == what));
    let (came, went) = (with("add table ip tandem"), with("delete table ip kube-proxy"));
    assert!(came.is_some() && came == went, "{came:?} {went:?}\n{text}");
    // Long enough for a look at the ports that a kube-proxy would answer on.
    std::thread::sleep(Duration::from_secs(12));
    check_flows(world, &flows).unwrap();
    assert_alone(&tandem, &world.node);
    assert!(tandem.log().contains("removed kube-proxy's nftables table in the transaction"), "{}", tandem.log());
}

#[test]
fn chains_of_iptables_nft_go_and_those_of_others_stay() {
    let Some(binaries) = binaries() else { return };
    let version = std::process::Command::new("iptables").arg("--version").output();
    if !version.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("nf_tables")) {
        println!("SKIP iptables-nft is not installed");
        return;
    }
    let cluster = Cluster::new(binaries).unwrap();
    let world = &cluster.world;
    let others: [&[&str]; 6] = [
        &["-t", "filter", "-N", "FOREIGN"],
        &["-t", "filter", "-A", "FOREIGN", "-s", "198.51.100.0/24", "-j", "DROP"],
        &["-t", "filter", "-A", "FORWARD", "-j", "FOREIGN"],
        &["-t", "nat", "-A", "POSTROUTING", "-s", "198.51.100.0/24", "-j", "MASQUERADE"],
        &["-t", "mangle", "-N", "KUBE-KUBELET-CANARY"],
        &["-t", "filter", "-N", "KUBE-FIREWALL"],
    ];
    for rule in others {
        let argv: Vec<&str> = std::iter::once("iptables").chain(rule.iter().copied()).collect();
        world.node.output(&argv).unwrap();
    }
    // kube-proxy adds a rule to the kubelet's KUBE-FIREWALL; its own clean-up leaves that, too.
    let saved = || {
        let text = world.node.output(&["iptables-save"]).unwrap();
        let lines = text.lines().filter(|l| l.starts_with('-') || l.starts_with(":KUBE") || l.starts_with(":FOREIGN"));
        let lines = lines.filter(|l| l.starts_with(':') || !l.contains("KUBE-FIREWALL"));
        lines.map(|l| l.split(" [").next().unwrap_or(l).to_string()).collect::<BTreeSet<_>>()
    };
    let foreign = saved();
    let mut kube_proxy = cluster.serving_kube_proxy("iptables").unwrap();
    assert!(saved().iter().any(|line| line.starts_with(":KUBE-SVC-")));
    let flows = open_flows(world, WEB, 20).unwrap();
    kube_proxy.stop();

    let tandem = cluster.tandem().unwrap();
    eventually("kube-proxy's chains are gone", PATIENCE, || (saved() == foreign).then_some(()))
        .unwrap_or_else(|e| panic!("{e}: {:#?}\n{}", saved(), tandem.log()));
    check_flows(world, &flows).unwrap();
    ask(world, 1, WEB).unwrap();
    ask(world, 1, STICKY).unwrap();
    std::thread::sleep(Duration::from_secs(12));
    check_flows(world, &flows).unwrap();
    assert_alone(&tandem, &world.node);
}

#[test]
fn a_kube_proxy_that_runs_on_is_named_and_its_rules_go_once_a_minute() {
    let Some(binaries) = binaries() else { return };
    let cluster = Cluster::new(binaries).unwrap();
    let world = &cluster.world;
    let mut kube_proxy = cluster.serving_kube_proxy("nftables").unwrap();
    let flows = open_flows(world, STICKY, 10).unwrap();
    let tandem = cluster.tandem().unwrap();
    let taken_over = Instant::now();
    let its_table = || world.node.assert_no_table("kube-proxy").is_err();
    let removals = || {
        tandem.log().lines().filter(|l| l.contains("removed kube-proxy's nftables table table=ip kube-proxy")).count()
    };
    assert!(!its_table(), "{}", tandem.log());

    eventually("it is reported", Duration::from_secs(20), || {
        tandem.log().contains("a kube-proxy is running").then_some(())
    })
    .unwrap_or_else(|e| panic!("{e}\n{}", tandem.log()));
    // Each change makes it write rules, at last the whole table again, while we serve the change.
    let mut came_back = false;
    for round in 0..8u8 {
        let backends: Vec<_> = [1 + round % 4, 1 + (round + 1) % 4].map(node::backend).into();
        cluster.api.apply(&[slice("web", &backends)]).unwrap();
        std::thread::sleep(Duration::from_millis(1500));
        came_back |= its_table();
        for n in 1..=8 {
            ask(world, n, WEB).unwrap();
        }
    }
    assert!(came_back, "kube-proxy writes its rules again: {}", kube_proxy.log_tail());
    if taken_over.elapsed() < Duration::from_secs(55) {
        assert_eq!(removals(), 0, "not before a minute is over: {}", tandem.log());
    }
    let error = tandem.log().lines().find(|l| l.contains("a kube-proxy is running")).map(str::to_owned).unwrap();
    assert!(error.contains("ERROR"), "{error}");
    assert_eq!(tandem.metric(&world.node, "tandem_kube_proxy_running").unwrap(), 1.0, "at {METRICS}");
    let (text, healthy) = tandem.status_command(&world.node).unwrap();
    assert!(!healthy && text.contains("kube-proxy: a kube-proxy is running"), "{text}");

    eventually("its rules are removed when the minute is over", Duration::from_secs(75), || {
        (removals() > 0).then_some(())
    })
    .unwrap_or_else(|e| panic!("{e}\n{}", tandem.log()));
    println!("its rules were removed {:.0?} after the take-over", taken_over.elapsed());
    assert!(taken_over.elapsed() > Duration::from_secs(55));
    cluster.api.apply(&[slice("web", &[node::backend(1), node::backend(2)])]).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(removals(), 1, "{}", tandem.log());
    check_flows(world, &flows).unwrap();
    ask(world, 1, WEB).unwrap();
    assert!(kube_proxy.running());
}

#[test]
fn a_kube_proxy_of_another_namespace_is_not_ours() {
    let Some(binaries) = binaries() else { return };
    let mut cluster = Cluster::new(binaries).unwrap();
    cluster.api.apply(&[node_object("elsewhere", "10.0.2.4")]).unwrap();
    let relay = cluster.api.reach_from(cluster.world.netns("web4").unwrap()).unwrap();
    cluster.relays.push(relay);
    let elsewhere = cluster.world.netns("web4").unwrap();
    let mut kube_proxy = cluster.kube_proxy(elsewhere, "elsewhere", "nftables").unwrap();
    let its_table = || elsewhere.output(&["nft", "list", "table", "ip", "kube-proxy"]).unwrap_or_default();
    eventually("it serves there", START, || its_table().contains(WEB).then_some(())).unwrap();
    let before = its_table();
    let tandem = cluster.tandem().unwrap();
    // Two looks, ten seconds apart.
    std::thread::sleep(Duration::from_secs(23));
    assert_alone(&tandem, &cluster.world.node);
    assert!(kube_proxy.running());
    assert_eq!(its_table(), before, "its rules are left alone");
    ask(&cluster.world, 1, WEB).unwrap();
}
