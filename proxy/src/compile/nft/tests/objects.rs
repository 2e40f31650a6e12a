//! Plans of single services.

use super::*;
use crate::model::fixtures::{self, ip};
use crate::model::{Endpoint, EndpointSlice, Hints, LocalDetector, ServiceType, SlicePort, TrafficPolicy};
use crate::nft::object::{Data, Verdict};
use crate::nft::text;
use std::io::Write;
use std::process::{Command, Stdio};

fn service(name: &str, cluster_ip: &str, node_port: u16) -> Service {
    let (namespace, name) = name.split_once('/').unwrap();
    Service {
        name: ObjectName::new(namespace, name),
        ports: vec![fixtures::port("p80", 80, node_port)],
        ..fixtures::service(name, &[cluster_ip])
    }
}

/// `+ADDRESS`: on this node.
fn slice(service: &Service, endpoints: &[&str]) -> EndpointSlice {
    let endpoint = |text: &&str| Endpoint {
        address: ip(text.trim_start_matches('+')),
        node_name: Some(if text.starts_with('+') { "test-node" } else { "other" }.into()),
        ready: true,
        serving: true,
        terminating: false,
        zone_hints: Hints::default(),
        node_hints: Hints::default(),
    };
    EndpointSlice {
        name: service.name.clone(),
        service: service.name.clone(),
        family: IpFamily::V4,
        ports: vec![SlicePort { name: "p80".into(), protocol: Protocol::Tcp, port: 80 }],
        endpoints: endpoints.iter().map(endpoint).collect(),
    }
}

fn test_settings() -> Settings {
    Settings {
        detector: LocalDetector::Cidr("10.0.0.0/8".parse().unwrap()),
        node_port_addresses: NodePortAddresses::Only([ip("192.168.0.2")].into()),
        node_ip: Some(ip("192.168.0.2")),
        ..Settings::new(IpFamily::V4)
    }
}

fn table_of(services: Vec<(Service, &[&str])>) -> ServiceTable {
    let mut table = ServiceTable::new();
    table.apply(Delta::Node(Node { name: "test-node".into(), ..Node::default() }));
    table.apply(Delta::ServiceCidr("kubernetes".into(), vec!["172.30.0.0/16".parse().unwrap()]));
    for (service, endpoints) in services {
        table.apply(Delta::Slice(slice(&service, endpoints)));
        table.apply(Delta::Service(service));
    }
    table.take_changes();
    table
}

/// The elements of a set, one a line: `KEY[-END][ > DATA][ (COMMENT)]`.
fn show(ruleset: &Ruleset, set: &str) -> Vec<String> {
    let fields = &ruleset.sets[set].key;
    let part = |(field, part): (&Field, &[u8])| match field {
        Field::Address => IpAddr::from(<[u8; 4]>::try_from(part).unwrap()).to_string(),
        Field::Protocol => Protocol::from_number(part[0]).unwrap().name().to_owned(),
        Field::Port => u16::from_be_bytes([part[0], part[1]]).to_string(),
        Field::Random => u32::from_ne_bytes(part.try_into().unwrap()).to_string(),
    };
    let key = |bytes: &[u8]| fields.iter().zip(bytes.chunks(4)).map(part).collect::<Vec<_>>().join(" . ");
    let mut lines = Vec::new();
    for (start, value) in ruleset.elements.get(set).into_iter().flatten() {
        let mut line = key(&start.start);
        line += &start.end.as_ref().map(|end| format!(" - {}", key(end))).unwrap_or_default();
        line += &match &value.data {
            Some(Data::Verdict(Verdict::Goto(chain))) => format!(" > goto {chain}"),
            Some(Data::Verdict(verdict)) => format!(" > {verdict:?}"),
            Some(Data::Value(data)) => {
                format!(" > {}:{}", part((&Field::Address, &data[..4])), part((&Field::Port, &data[4..])))
            }
            None => String::new(),
        };
        line += &value.comment.as_ref().map(|comment| format!(" ({comment})")).unwrap_or_default();
        lines.push(line);
    }
    lines
}

#[test]
fn six_services_have_the_elements_that_their_fields_ask_for() {
    let svc2 = Service {
        service_type: ServiceType::LoadBalancer,
        external_ips: vec![ip("192.168.99.22")],
        load_balancer_ips: vec![ip("1.2.3.4")],
        external_traffic_policy: TrafficPolicy::Local,
        ..service("ns2/svc2", "172.30.0.42", 3001)
    };
    let svc4 = Service { external_ips: vec![ip("192.168.99.33")], ..service("ns4/svc4", "172.30.0.44", 0) };
    let svc5 = Service {
        service_type: ServiceType::LoadBalancer,
        load_balancer_ips: vec![ip("5.6.7.8")],
        source_ranges: vec!["203.0.113.0/25".parse().unwrap()],
        affinity_timeout_s: Some(10_800),
        ..service("ns5/svc5", "172.30.0.45", 3002)
    };
    let table = table_of(vec![
        (service("ns1/svc1", "172.30.0.41", 0), &["+10.180.0.1"][..]),
        (svc2, &["10.180.0.2"]),
        (service("ns3/svc3", "172.30.0.43", 3003), &["+10.180.0.3"]),
        (svc4, &["10.180.0.4", "+10.180.0.5"]),
        (svc5, &["+10.180.0.3"]),
        (service("ns6/svc6", "172.30.0.46", 0), &[]),
    ]);
    let mut compiler = Compiler::new(test_settings());
    let update = compiler.update(&table, []);
    assert_eq!(update.problems, vec![]);
    let ruleset = compiler.ruleset();
    insta::assert_snapshot!("six_services", text::ruleset(&ruleset));
    nft_takes(&text::ruleset(&ruleset));

    let own: Vec<&str> = ruleset.chains.keys().map(|name| &**name).filter(|name| name.contains('/')).collect();
    let expected = [
        "endpoint-GTK6MW7G-ns5/svc5/tcp/p80__10.180.0.3/80",
        "external-HVFWP5L3-ns5/svc5/tcp/p80",
        "service-HVFWP5L3-ns5/svc5/tcp/p80",
    ];
    assert_eq!(own, expected, "only a service with affinity has chains of its own");
    assert_eq!(ruleset.sets["affinity-GTK6MW7G-ns5/svc5/tcp/p80__10.180.0.3/80"].dynamic_timeout_ms, Some(10_800_000));
}

/// nft(8) of this machine parses the text and the kernel takes it, in a network namespace that goes with the command.
fn nft_takes(text: &str) {
    let nft = Command::new("unshare")
        .args(["--net", "nft", "--file", "-"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut nft) = nft else { return println!("SKIP no unshare here") };
    nft.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let output = nft.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    if said.contains("failed to execute nft") || said.contains("unshare failed") {
        return println!("SKIP {}", said.trim());
    }
    assert!(output.status.success(), "{said}");
}

#[test]
fn the_number_of_chains_depends_on_the_numbers_of_endpoints_alone() {
    let endpoints: [&[&str]; 3] = [&["10.180.0.1"], &["10.180.0.1", "10.180.0.2"], &[]];
    let count = |services: u32| {
        let all = (0..services)
            .map(|n| (service(&format!("ns/s{n}"), &format!("172.30.1.{n}"), 0), endpoints[n as usize % 3]));
        let mut compiler = Compiler::new(test_settings());
        compiler.update(&table_of(all.collect()), []);
        let ruleset = compiler.ruleset();
        (
            ruleset.chains.len(),
            ruleset.chains.values().map(|chain| chain.rules.len()).sum::<usize>(),
            ruleset.sets.len(),
        )
    };
    assert_eq!(count(3), count(200));
}

#[test]
fn a_contested_frontend_goes_to_the_smallest_name_and_comes_back_when_that_goes() {
    let (a, b) = (service("ns/a", "172.30.0.1", 3001), service("ns/b", "172.30.0.2", 3001));
    let mut world = World::new(table_of(vec![(b.clone(), &["10.180.0.2"])]), test_settings());
    assert_eq!(show(&world.compiler.ruleset(), "nodeport-slots"), ["tcp . 3001 . 0 > 10.180.0.2:80"]);

    world.table.apply(Delta::Slice(slice(&a, &["10.180.0.1", "10.180.0.3"])));
    world.table.apply(Delta::Service(a.clone()));
    world.changes();
    let slots = show(&world.compiler.ruleset(), "nodeport-slots");
    assert_eq!(slots, ["tcp . 3001 . 0 > 10.180.0.1:80", "tcp . 3001 . 1 > 10.180.0.3:80"]);
    let told = &world.problems[&b.name];
    assert_eq!(told.len(), 1);
    assert!(told[0].contains("NodePort 3001/TCP is served for Service ns/a"), "{}", told[0]);
    assert_eq!(show(&world.compiler.ruleset(), "service-ips").len(), 2, "the rest of the loser is served");

    world.table.apply(Delta::ServiceGone(a.name.clone()));
    world.changes();
    assert!(world.problems.is_empty());
    world.settle();
    assert_eq!(show(&world.compiler.ruleset(), "nodeport-slots"), ["tcp . 3001 . 0 > 10.180.0.2:80"]);
}

#[test]
fn a_cluster_ip_comes_before_an_external_or_load_balancer_ip_of_a_smaller_name() {
    let (a, b) = (service("ns/a", "172.30.0.1", 0), service("ns/b", "172.30.0.2", 0));
    let claims = [
        Service { external_ips: vec![ip("172.30.0.2")], ..a.clone() },
        Service { service_type: ServiceType::LoadBalancer, load_balancer_ips: vec![ip("172.30.0.2")], ..a },
    ];
    let slots = |world: &World| show(&world.compiler.ruleset(), "slots");
    let own = "172.30.0.1 . tcp . 80 . 0 > 10.180.0.1:80";
    let taken = [own, "172.30.0.2 . tcp . 80 . 0 > 10.180.0.1:80"];
    let kept = [own, "172.30.0.2 . tcp . 80 . 0 > 10.180.0.2:80"];
    for a in claims {
        let mut world = World::new(table_of(vec![(a.clone(), &["10.180.0.1"])]), test_settings());
        assert_eq!(slots(&world), taken, "nobody has it as ClusterIP");
        assert!(world.problems.is_empty());

        world.table.apply(Delta::Slice(slice(&b, &["10.180.0.2"])));
        world.table.apply(Delta::Service(b.clone()));
        world.changes();
        world.settle();
        assert_eq!(slots(&world), kept);
        assert_eq!(world.problems.keys().collect::<Vec<_>>(), [&a.name], "the loser is told, though it did not change");
        let told = &world.problems[&a.name];
        assert_eq!(told.len(), 1);
        assert!(told[0].contains("172.30.0.2:80/TCP is served for Service ns/b"), "{}", told[0]);

        world.table.apply(Delta::ServiceGone(b.name.clone()));
        world.changes();
        world.settle();
        assert!(world.problems.is_empty());
        assert_eq!(slots(&world), taken, "the loser gets it back");
    }
}

#[test]
fn what_a_quarantined_service_claims_goes_to_nobody_else() {
    let (a, b) = (service("ns/a", "172.30.0.1", 0), service("ns/b", "172.30.0.2", 0));
    let a = Service { external_ips: vec![ip("172.30.0.2")], ..a };
    let mut world =
        World::new(table_of(vec![(a.clone(), &["10.180.0.1"]), (b.clone(), &["10.180.0.2"])]), test_settings());
    world.apply(Event::Quarantine(b.name.clone()));
    world.settle();
    assert_eq!(show(&world.compiler.ruleset(), "slots"), ["172.30.0.1 . tcp . 80 . 0 > 10.180.0.1:80"]);
    assert!(world.problems[&a.name][0].contains("ns/b"));
}

#[test]
fn a_quarantined_service_leaves_until_it_changes() {
    let (a, b) = (service("ns/a", "172.30.0.1", 0), service("ns/b", "172.30.0.2", 0));
    let mut world = World::new(table_of(vec![(a.clone(), &["10.180.0.1"]), (b, &["10.180.0.2"])]), test_settings());
    let update = world.compiler.quarantine(&world.table, &a.name);
    world.commit(update);
    world.settle();
    assert_eq!(show(&world.compiler.ruleset(), "cluster-ips"), ["172.30.0.2"]);
    // All services are compiled anew, but the kernel would refuse it again.
    let update = world.compiler.set_settings(&world.table, test_settings());
    assert_eq!(world.commit(update), 0);
    world.table.apply(Delta::Service(Service { affinity_timeout_s: Some(10), ..a }));
    world.changes();
    assert_eq!(show(&world.compiler.ruleset(), "cluster-ips"), ["172.30.0.1", "172.30.0.2"]);
}

#[test]
fn other_nodeport_addresses_are_elements_and_all_addresses_are_rules() {
    let mut world = World::new(table_of(vec![(service("ns/a", "172.30.0.1", 3001), &["10.180.0.1"])]), test_settings());
    let mut set = |node_port_addresses| {
        let update = world.compiler.set_settings(&world.table, Settings { node_port_addresses, ..test_settings() });
        (world.commit(update), world.compiler.ruleset())
    };
    let (steps, ruleset) = set(NodePortAddresses::Only([ip("192.168.0.2"), ip("192.168.1.2")].into()));
    assert_eq!((steps, show(&ruleset, "nodeport-ips").len()), (1, 2), "one step with one element");
    let (_, ruleset) = set(NodePortAddresses::All);
    assert!(!ruleset.sets.contains_key("nodeport-ips"));
    let (_, ruleset) = set(test_settings().node_port_addresses);
    assert_eq!(show(&ruleset, "nodeport-ips"), ["192.168.0.2"]);
}

#[test]
fn policies_and_filters_change_without_a_gap_for_packets_in_flight() {
    let base = Service {
        service_type: ServiceType::LoadBalancer,
        load_balancer_ips: vec![ip("1.2.3.4")],
        ..service("ns/a", "172.30.0.1", 3001)
    };
    let local = Service { external_traffic_policy: TrafficPolicy::Local, ..base.clone() };
    let filtered = Service { source_ranges: vec!["203.0.113.0/25".parse().unwrap()], ..base.clone() };
    let wider = Service { source_ranges: vec!["203.0.113.0/24".parse().unwrap()], ..base.clone() };
    let sticky = Service { affinity_timeout_s: Some(10), ..base.clone() };
    let all = [base, local, filtered, wider, sticky];
    let endpoints: &[&str] = &["+10.180.0.1", "10.180.0.2"];
    let settings = Settings { local_addresses: [ip("192.168.0.2")].into(), ..test_settings() };
    for (from, to) in all.iter().flat_map(|from| all.iter().map(move |to| (from, to))) {
        let mut world = World::new(table_of(vec![(from.clone(), endpoints)]), settings.clone());
        world.table.apply(Delta::Service(to.clone()));
        let update = world.compiler.update(&world.table, [&to.name]);
        let (first, rest) = update.steps.split_at(update.prepare);
        world.kernel.commit(first).unwrap();
        let before = world.kernel.ruleset().cloned().unwrap();
        world.kernel.commit(rest).unwrap();
        let after = world.kernel.ruleset().unwrap();
        for (destination, port) in [("1.2.3.4", 80), ("192.168.0.2", 3001), ("172.30.0.1", 80)] {
            let packet = crate::model::Packet {
                interface: Some("eth0"),
                source: ip("203.0.113.2"),
                destination: ip(destination),
                protocol: Some(Protocol::Tcp),
                port,
            };
            for at in 0..12 {
                let fates = trace_across(&before, after, at, &settings.local_addresses, &packet);
                let served = !fates.is_empty() && fates.iter().all(|fate| matches!(fate, Fate::Forward { .. }));
                assert!(served, "{from:?} to {to:?}, {packet:?} at {at}: {fates:?}");
            }
        }
        // And back before it settled, then settled.
        world.table.apply(Delta::Service(from.clone()));
        let update = world.compiler.update(&world.table, [&to.name]);
        world.commit(update);
        world.settle();
        let fresh = World::new(world.table.clone(), settings.clone());
        assert_same(&without_order(world.compiler.ruleset()), &without_order(fresh.compiler.ruleset()));
    }
}

#[test]
fn affinity_sets_stay_when_another_endpoint_goes_or_the_timeout_changes() {
    let a = Service { affinity_timeout_s: Some(10), ..service("ns/a", "172.30.0.1", 0) };
    let mut world = World::new(table_of(vec![(a.clone(), &["10.180.0.1", "10.180.0.2"])]), test_settings());
    world.table.apply(Delta::Slice(slice(&a, &["10.180.0.2"])));
    let update = world.compiler.update(&world.table, [&a.name]);
    let mut gone = Vec::new();
    for step in &update.steps {
        assert!(!matches!(step.op, Op::AddSet { .. }));
        if let Op::DeleteSet(name) = &step.op {
            gone.push(name.to_string());
        }
    }
    assert!(matches!(&gone[..], [name] if name.ends_with("__10.180.0.1/80")), "{gone:?}");
    world.commit(update);
    world.settle();

    world.table.apply(Delta::Service(Service { affinity_timeout_s: Some(20), ..a.clone() }));
    let update = world.compiler.update(&world.table, [&a.name]);
    assert!(
        matches!(&update.steps[..], [Step { op: Op::AddSet { set, .. }, .. }] if set.dynamic_timeout_ms == Some(20_000)),
        "{update:?}"
    );
    world.commit(update);
}

#[test]
fn what_is_adopted_keeps_its_slot_order() {
    let a = service("ns/a", "172.30.0.1", 0);
    let mut world =
        World::new(table_of(vec![(a.clone(), &["10.180.0.1", "10.180.0.2", "10.180.0.3"])]), test_settings());
    world.table.apply(Delta::Slice(slice(&a, &["10.180.0.2", "10.180.0.3"])));
    world.changes();
    world.settle();
    let order = ["172.30.0.1 . tcp . 80 . 0 > 10.180.0.3:80", "172.30.0.1 . tcp . 80 . 1 > 10.180.0.2:80"];
    assert_eq!(show(&world.compiler.ruleset(), "slots"), order);
    // While Tandem is down, one endpoint goes and another comes.
    world.table.apply(Delta::Slice(slice(&a, &["10.180.0.2", "10.180.0.4"])));
    let mut restarted = Compiler::new(test_settings());
    restarted.adopt(world.kernel.ruleset().unwrap());
    restarted.update(&world.table, []);
    assert_eq!(show(&restarted.ruleset(), "slots"), ["172.30.0.1 . tcp . 80 . 0 > 10.180.0.4:80", order[1]]);
}
