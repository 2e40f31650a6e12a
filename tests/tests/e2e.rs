//! End to end: the real API server, `tandem --kubeconfig` in the node's namespace, real clients; and what a node lives
//! through: outages, restarts, a takeover from kube-proxy.

use nix::sys::signal::Signal;
use proxy_tests::apiserver::ApiServer;
use proxy_tests::engine::{AtApiServer, Engine, Objects, Program, TandemAgent, tandem_binary};
use proxy_tests::envtest::{self, Binaries};
use proxy_tests::probe::{Flow, Proto, Seen, once};
use proxy_tests::process::eventually;
use proxy_tests::scenario::{self, Scenario};
use proxy_tests::traffic::{Report, Traffic};
use proxy_tests::world::World;
use proxy_tests::{netns, runner};
use serde_json::{Value, json};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(5);

/// `None` (and a SKIP line) where these tests cannot run.
fn binaries() -> Option<Binaries> {
    if let Some(why) = netns::missing().or_else(envtest::missing) {
        println!("SKIP {why}");
        return None;
    }
    tandem_binary().unwrap();
    Some(envtest::binaries().unwrap())
}

/// What one scenario file applies first, as a ready-made cluster.
fn cluster(name: &str) -> (Scenario, Objects) {
    let scenario = scenario::load(&scenario::directory().join(format!("{name}.txtar"))).unwrap();
    let mut objects = Objects::default();
    scenario.common_objects().into_iter().for_each(|o| objects.put(o));
    for step in &scenario.steps {
        let scenario::Step::Apply(new) = step else { break };
        new.iter().for_each(|o| objects.put(o.clone()));
    }
    (scenario, objects)
}

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn probe(world: &World, party: &str, proto: Proto, source: &str, to: &str) -> Seen {
    world.netns(party).unwrap().run(|| once(proto, ip(source), address(to), PATIENCE, &world.arrivals))
}

fn answered(world: &World, party: &str, source: &str, to: &str) -> SocketAddr {
    match probe(world, party, Proto::Tcp, source, to) {
        Seen::Answer(answer) => answer.local,
        seen => panic!("{party} -> {to}: {seen}"),
    }
}

/// Clients of every kind at once, TCP and UDP, both families.
fn traffic(world: &World) -> Vec<(String, Traffic)> {
    let clients = [
        ("pod", Proto::Tcp, "10.0.0.2", "172.30.0.41:80"),
        ("ext", Proto::Tcp, "203.0.113.2", "192.168.0.2:3001"),
        ("node", Proto::Tcp, "192.168.0.2", "172.30.0.41:80"),
        ("pod", Proto::Tcp, "fd00:10::2", "[fd00:10:96::41]:80"),
        ("pod", Proto::Udp, "10.0.0.2", "172.30.0.42:53"),
    ];
    let start = |(party, proto, source, to): (&str, Proto, &str, &str)| {
        let ns = world.netns(party).unwrap();
        (format!("{party} {proto} {to}"), Traffic::start(&ns.path(), proto, ip(source), address(to), &world.arrivals))
    };
    clients.into_iter().map(start).collect()
}

fn no_failures(clients: Vec<(String, Traffic)>, at_least: usize) -> Vec<Report> {
    clients
        .into_iter()
        .map(|(name, client)| {
            let report = client.stop();
            assert!(
                report.failures.is_empty(),
                "{name}: {} of {}: {:?}",
                report.failures.len(),
                report.answered(),
                report.failures[0]
            );
            assert!(report.answered() >= at_least, "{name}: only {} tries", report.answered());
            report
        })
        .collect()
}

/// A dual-stack service with four endpoints, and one for UDP.
fn web() -> (Scenario, Objects) {
    let text = "x
-- world --
pod e1 10.180.0.1 fd00:10::180:1
pod e2 10.180.0.2 fd00:10::180:2
remote far 10.180.1.1 fd00:10:1::1
outside far-pod 10.180.9.9 fd00:10:9::9
-- probes --
P1 | pod -> tcp 172.30.0.41:80 | 10.180.0.1:80
P2 | pod -> udp 172.30.0.42:53 | 10.180.0.1:53
";
    let scenario = scenario::parse("web", text).unwrap();
    let mut objects = Objects::default();
    scenario.common_objects().into_iter().for_each(|o| objects.put(o));
    objects.put(json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "namespace": "ns1", "name": "web" },
        "spec": { "type": "NodePort", "clusterIP": "172.30.0.41", "clusterIPs": ["172.30.0.41", "fd00:10:96::41"],
            "ipFamilies": ["IPv4", "IPv6"], "ipFamilyPolicy": "RequireDualStack",
            "ports": [{ "name": "http", "port": 80, "nodePort": 3001, "protocol": "TCP" }] },
    }));
    objects.put(slice("web", "IPv4", "TCP", 80, &["10.180.0.1", "10.180.0.2", "10.180.1.1"]));
    objects.put(slice("web", "IPv6", "TCP", 80, &["fd00:10::180:1", "fd00:10::180:2", "fd00:10:1::1"]));
    objects.put(json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "namespace": "ns1", "name": "dns" },
        "spec": { "type": "NodePort", "clusterIP": "172.30.0.42", "clusterIPs": ["172.30.0.42", "fd00:10:96::42"],
            "ipFamilies": ["IPv4", "IPv6"], "ipFamilyPolicy": "RequireDualStack",
            "ports": [{ "name": "http", "port": 53, "nodePort": 3053, "protocol": "UDP" }] },
    }));
    objects.put(slice("dns", "IPv4", "UDP", 53, &["10.180.0.1", "10.180.1.1"]));
    objects.put(slice("dns", "IPv6", "UDP", 53, &["fd00:10::180:1", "fd00:10:1::1"]));
    (scenario, objects)
}

fn slice(service: &str, family: &str, protocol: &str, port: u16, addresses: &[&str]) -> Value {
    let endpoints: Vec<Value> = addresses
        .iter()
        .map(|a| json!({ "addresses": [a], "nodeName": if a.contains("180.1.") || a.contains("10:1::") { "remote-node" } else { "test-node" } }))
        .collect();
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": { "namespace": "ns1", "name": format!("{service}-{}", family.to_lowercase()), "labels": { "kubernetes.io/service-name": service } },
        "addressType": family, "ports": [{ "name": "http", "port": port, "protocol": protocol }], "endpoints": endpoints,
    })
}

/// The scenario files through the API server: everything that a manifest directory was tested with, from real watches.
#[test]
fn scenarios_agree_from_the_real_api_server() {
    let Some(binaries) = binaries() else { return };
    let api = ApiServer::start(&binaries).unwrap();
    let mut failures = Vec::new();
    for (name, config) in [
        ("packets-b-cluster-ips", 0),
        ("packets-c-source-ranges", 0),
        ("packets-d-node-ports", 0),
        ("packets-ef-external-policy", 0),
        ("packets-j-masquerade", 0),
        ("packets-x-affinity", 0),
        ("packets-x-further", 0),
        ("endpoints-t-topology", 0),
        ("flows-x-endpoint-changes", 0),
        ("flows-u-conntrack", 0),
        ("detectors", 3),
    ] {
        let scenario = scenario::load(&scenario::directory().join(format!("{name}.txtar"))).unwrap();
        let mut engine = AtApiServer::new(Program::Tandem, &api, &binaries, &scenario.configs[config].1).unwrap();
        match runner::run(&scenario, config, &mut engine) {
            Ok(summary) => println!("{name}: {} rows agree", summary.rows),
            Err(e) => failures.push(format!("{e:#}")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}

#[test]
fn every_client_reaches_a_service_and_sees_the_right_source() {
    let Some(binaries) = binaries() else { return };
    let api = ApiServer::start(&binaries).unwrap();
    let (scenario, objects) = web();
    let world = World::new(scenario.world.clone(), &scenario.ports()).unwrap();
    let mut tandem = AtApiServer::new(Program::Tandem, &api, &binaries, &scenario.configs[0].1).unwrap();
    tandem.sync(&world.node, &objects).unwrap();
    // (client, source, destination, masqueraded): TCP, and the same by UDP
    let clients = [
        ("pod", "10.0.0.2", "172.30.0.41:80", false),
        ("far-pod", "10.180.9.9", "172.30.0.41:80", false),
        ("node", "192.168.0.2", "172.30.0.41:80", true),
        ("ext", "203.0.113.2", "192.168.0.2:3001", true),
        ("pod", "fd00:10::2", "[fd00:10:96::41]:80", false),
        ("far-pod", "fd00:10:9::9", "[fd00:10:96::41]:80", true),
        ("node", "2001:db8::1", "[fd00:10:96::41]:80", true),
        ("ext", "2600:5200::1", "[2001:db8::1]:3001", true),
    ]
    .into_iter()
    .flat_map(|(party, source, to, masqueraded)| {
        let udp = to.replace(".41:80", ".42:53").replace("::41]:80", "::42]:53").replace(":3001", ":3053");
        [(party, Proto::Tcp, source, to.to_owned(), 3, masqueraded), (party, Proto::Udp, source, udp, 2, masqueraded)]
    });
    for (party, proto, source, to, endpoints, masqueraded) in clients {
        let to = to.as_str();
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..60 {
            let Seen::Answer(answer) = probe(&world, party, proto, source, to) else {
                panic!("{party} -> {proto} {to}")
            };
            let peer = answer.peer.ip();
            let expected = world.spec.masquerade_addresses(answer.local.ip()).unwrap();
            assert!(
                if masqueraded { expected.contains(&peer) } else { peer == ip(source) },
                "{party} -> {to}: {answer}"
            );
            seen.insert(answer.local.ip());
        }
        assert_eq!(seen.len(), endpoints, "{party} -> {to}: {seen:?}");
    }
    tandem.finish(&world.node).unwrap();
}

#[test]
fn an_api_outage_leaves_services_up_and_later_changes_arrive() {
    let Some(binaries) = binaries() else { return };
    let (scenario, mut objects) = web();
    let world = World::new(scenario.world.clone(), &scenario.ports()).unwrap();
    let mut api = ApiServer::start(&binaries).unwrap();
    // Twice: the network between them is cut, then the server itself is down.
    {
        let mut tandem = AtApiServer::new(Program::Tandem, &api, &binaries, &scenario.configs[0].1).unwrap();
        tandem.sync(&world.node, &objects).unwrap();
        let clients = traffic(&world);
        tandem.disconnect();
        clients[0].1.wait_for(100);
        objects.put(slice("web", "IPv4", "TCP", 80, &["10.180.0.2"]));
        tandem.apply(&objects).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        tandem.connect(&world.node).unwrap();
        tandem.settled(&world.node).unwrap();
        no_failures(clients, 50);
        for _ in 0..10 {
            assert_eq!(answered(&world, "pod", "10.0.0.2", "172.30.0.41:80"), address("10.180.0.2:80"));
        }
        // The process is killed without a word; its rules must outlive it.
        tandem.process().unwrap().kill();
    }
    let relay = api.reach_from(&world.node).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut agent = proxy_tests::process::Process::start(
        "tandem",
        {
            let mut command = world.node.command(tandem_binary().unwrap());
            let kubeconfig = api.kubeconfig(proxy_tests::apiserver::User::Proxy).unwrap();
            command
                .arg(format!("--kubeconfig={}", kubeconfig.display()))
                .arg("--hostname-override=test-node")
                .args(&scenario.configs[0].1);
            command.arg(format!("--run-dir={}", dir.path().join("run").display())).arg("--min-sync-period=10ms");
            command
        },
        &dir.path().join("log"),
    )
    .unwrap();
    let clients = traffic(&world);
    clients[0].1.wait_for(50);
    api.stop_apiserver();
    clients[0].1.wait_for(200);
    api.start_apiserver().unwrap();
    api.apply(&[slice("web", "IPv4", "TCP", 80, &["10.180.1.1"])]).unwrap();
    eventually("the change arrives", Duration::from_secs(60), || {
        matches!(probe(&world, "pod", Proto::Tcp, "10.0.0.2", "172.30.0.41:80"), Seen::Answer(a) if a.local == address("10.180.1.1:80")).then_some(())
    })
    .unwrap_or_else(|e| panic!("{e:#}\n{}", agent.log_tail()));
    no_failures(clients, 50);
    agent.stop();
    drop(relay);
}

#[test]
fn nothing_is_programmed_before_the_first_full_list() {
    let Some(binaries) = binaries() else { return };
    let api = ApiServer::start(&binaries).unwrap();
    let (scenario, objects) = web();
    let world = World::new(scenario.world.clone(), &scenario.ports()).unwrap();
    let mut tandem = AtApiServer::new(Program::Tandem, &api, &binaries, &scenario.configs[0].1).unwrap();
    tandem.apply(&objects).unwrap();
    tandem.start(&world.node).unwrap();
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(100));
        world.node.assert_no_table("tandem").unwrap();
    }
    assert!(tandem.process().unwrap().running(), "it waits for the API server: {}", tandem.log_tail());
    tandem.connect(&world.node).unwrap();
    tandem.settled(&world.node).unwrap();
    answered(&world, "pod", "10.0.0.2", "172.30.0.41:80");
    // A restart while the API server is away: the rules of before stay in force.
    tandem.process().unwrap().stop();
    tandem.disconnect();
    let clients = traffic(&world);
    tandem.start(&world.node).unwrap();
    clients[0].1.wait_for(200);
    tandem.connect(&world.node).unwrap();
    tandem.settled(&world.node).unwrap();
    no_failures(clients, 50);
    tandem.finish(&world.node).unwrap();
}

#[test]
fn restarts_and_kills_lose_no_connection_no_flow_and_no_affinity() {
    if let Some(why) = netns::missing() {
        println!("SKIP {why}");
        return;
    }
    let (scenario, mut objects) = web();
    let (_, sticky) = cluster("packets-x-affinity");
    for object in sticky.values().filter(|o| o["metadata"]["name"].as_str().is_some_and(|n| n.starts_with("sticky"))) {
        let mut object: Value = serde_json::from_str(
            &object.to_string().replace("172.30.0.41", "172.30.0.45").replace("fd00:10:96::41", "fd00:10:96::45"),
        )
        .unwrap();
        if object["kind"] == "Service" {
            object["spec"]["ports"][0]["nodePort"] = json!(3101);
            object["spec"]["ports"][1]["nodePort"] = json!(3102);
        }
        objects.put(object);
    }
    let mut spec = scenario.world.clone();
    spec.remote[0].addresses.push(ip("10.180.1.2"));
    let world = World::new(spec, &scenario.ports()).unwrap();
    let mut tandem = TandemAgent::new(&scenario.configs[0].1).unwrap();
    tandem.sync(&world.node, &objects).unwrap();
    let pod = world.netns("pod").unwrap();
    let opened = pod.run(|| {
        let tcp = Flow::tcp(ip("10.0.0.2"), address("172.30.0.41:80"), PATIENCE).unwrap();
        let udp = Flow::udp(ip("10.0.0.2"), address("172.30.0.42:53"), PATIENCE, &world.arrivals).unwrap();
        [tcp, udp]
    });
    let stuck = answered(&world, "pod", "10.0.0.2", "172.30.0.45:80");
    let clients = traffic(&world);
    for round in 0..4 {
        clients[0].1.wait_for(40);
        match round % 2 {
            0 => tandem.process().unwrap().stop(),
            _ => tandem.process().unwrap().signal(Signal::SIGKILL),
        }
        let _ = tandem.process().unwrap().wait(PATIENCE);
        clients[0].1.wait_for(20);
        tandem.start(&world.node).unwrap();
        // A change after the restart proves that it works again, not only that its rules are there.
        tandem.sync(&world.node, &objects).unwrap();
        for (flow, answer) in &opened {
            assert_eq!(flow.again(PATIENCE, &world.arrivals), Seen::Answer(answer.clone()), "round {round}");
        }
        assert_eq!(answered(&world, "pod", "10.0.0.2", "172.30.0.45:80"), stuck, "affinity, round {round}");
    }
    no_failures(clients, 100);
    tandem.finish(&world.node).unwrap();
}

#[test]
fn a_takeover_from_the_real_kube_proxy_loses_nothing() {
    let Some(binaries) = binaries() else { return };
    let api = ApiServer::start(&binaries).unwrap();
    let (scenario, objects) = web();
    let world = World::new(scenario.world.clone(), &scenario.ports()).unwrap();
    let flags = &scenario.configs[0].1;
    let mut kube_proxy = AtApiServer::new(Program::KubeProxy, &api, &binaries, flags).unwrap();
    kube_proxy.sync(&world.node, &objects).unwrap();
    let pod = world.netns("pod").unwrap();
    let (flow, answer) = pod.run(|| Flow::tcp(ip("10.0.0.2"), address("172.30.0.41:80"), PATIENCE).unwrap());
    let clients = traffic(&world);
    clients[0].1.wait_for(50);
    kube_proxy.process().unwrap().kill();
    let mut tandem = AtApiServer::new(Program::Tandem, &api, &binaries, flags).unwrap();
    kube_proxy.disconnect();
    tandem.sync(&world.node, &objects).unwrap();
    clients[0].1.wait_for(100);
    no_failures(clients, 50);
    eventually("kube-proxy's tables are gone", PATIENCE, || {
        world.node.assert_no_table("kube-proxy").is_ok().then_some(())
    })
    .unwrap_or_else(|e| panic!("{e:#}\n{}", tandem.log_tail()));
    assert_eq!(flow.again(PATIENCE, &world.arrivals), Seen::Answer(answer), "an established connection goes on");
    tandem.finish(&world.node).unwrap();
}
