//! Traffic policies, terminating endpoints, masquerade.

use crate::model::fixtures::{NODE, World, ips, node, port, service, slice};
use crate::model::{Delta, LocalDetector, ObjectName, Service, ServiceType, TrafficPolicy};
use TrafficPolicy::{Cluster, Local};

fn load_balancer(external: TrafficPolicy, internal: TrafficPolicy) -> Service {
    Service {
        service_type: ServiceType::LoadBalancer,
        external_ips: ips(&["192.168.99.11"]),
        load_balancer_ips: ips(&["1.2.3.4"]),
        external_traffic_policy: external,
        internal_traffic_policy: internal,
        health_check_node_port: 30_000,
        ports: vec![port("", 80, 3001)],
        ..service("svc1", &["172.30.0.41"])
    }
}

fn of(service: Service, endpoints: &[&str]) -> World {
    World::with([service], [slice("s1", "svc1", &[("", 80)], endpoints)])
}

const ALL: &str = "10.180.0.1:80, 10.180.2.1:80";
const ALL_M: &str = "10.180.0.1:80 M, 10.180.2.1:80 M";

#[test]
fn e_external_policy_local_keeps_outside_clients_here_and_lets_the_cluster_reach_all() {
    of(load_balancer(Local, Cluster), &["10.180.0.1", "10.180.2.1 L"]).check(&[
        ("E1", "pod -> 172.30.0.41:80", ALL),
        ("E2", "pod -> 192.168.99.11:80", ALL),
        ("E3", "ext -> 192.168.99.11:80", "10.180.2.1:80"),
        ("E4", "pod -> 1.2.3.4:80", ALL),
        ("E5", "ext -> 1.2.3.4:80", "10.180.2.1:80"),
        ("E6", "ext -> 192.168.0.2:3001", "10.180.2.1:80"),
        ("E7", "node -> 1.2.3.4:80", ALL_M),
        ("E8", "10.180.2.1 -> 1.2.3.4:80", "10.180.0.1:80, 10.180.2.1:80 M"),
    ]);
}

#[test]
fn f_external_policy_cluster_reaches_all_and_masquerades() {
    of(load_balancer(Cluster, Cluster), &["10.180.0.1", "10.180.2.1 L"]).check(&[
        ("F1", "pod -> 172.30.0.41:80", ALL),
        ("F2", "pod -> 192.168.99.11:80", ALL_M),
        ("F3", "ext -> 192.168.99.11:80", ALL_M),
        ("F4", "pod -> 1.2.3.4:80", ALL_M),
        ("F5", "ext -> 1.2.3.4:80", ALL_M),
        ("F6", "ext -> 192.168.0.2:3001", ALL_M),
        ("F7", "node -> 1.2.3.4:80", ALL_M),
        ("F8", "10.180.2.1 -> 1.2.3.4:80", ALL_M),
    ]);
}

#[test]
fn g_internal_policy() {
    let with = |policy| Service {
        internal_traffic_policy: policy,
        ports: vec![port("", 80, 0)],
        ..service("svc1", &["172.30.1.1"])
    };
    let rows = [
        ("G1", Cluster, [".1 L", ".2", ".3"], "10.0.1.1:80, 10.0.1.2:80, 10.0.1.3:80"),
        ("G2", Local, [".1 L", ".2", ".3"], "10.0.1.1:80"),
        ("G3", Local, [".1 L", ".2 L", ".3"], "10.0.1.1:80, 10.0.1.2:80"),
        ("G4", Local, [".1", ".2", ".3"], "DROP"),
    ];
    for (row, policy, endpoints, expected) in rows {
        let mut world = of(with(policy), &endpoints);
        world.check(&[(row, "pod -> 172.30.1.1:80", expected)]);
        world.table.apply(Delta::SliceGone(ObjectName::new("ns1", "s1")));
        world.check(&[(row, "pod -> 172.30.1.1:80", "REJECT")]);
    }
}

#[test]
fn h_i_terminating_endpoints_serve_only_when_nothing_else_does() {
    let with = |policy| Service {
        external_ips: vec![],
        cluster_ips: ips(&["172.30.1.1"]),
        ports: vec![port("", 80, 0)],
        ..load_balancer(policy, Cluster)
    };
    let three = "10.0.1.1:80, 10.0.1.2:80, 10.0.1.5:80";
    let three_m = "10.0.1.1:80 M, 10.0.1.2:80 M, 10.0.1.5:80 M";
    #[rustfmt::skip]
    let rows: [(&str, TrafficPolicy, &[&str], &str, &str); 8] = [
        ("H1", Local, &[".1 L", ".2 L", ".3 L ST", ".4 L T", ".5"], three, "10.0.1.1:80, 10.0.1.2:80"),
        ("H2", Local, &[".2 L ST", ".3 L ST", ".4 L T", ".5"], "10.0.1.5:80", "10.0.1.2:80, 10.0.1.3:80"),
        ("H3", Local, &[".5 L T", ".5 T"], "REJECT", "REJECT"),
        ("H4", Local, &[], "REJECT", "REJECT"),
        ("I1", Cluster, &[".1 L", ".2 L", ".3 ST", ".4 T", ".5"], three, three_m),
        ("I2", Cluster, &[".5 ST"], "10.0.1.5:80", "10.0.1.5:80 M"),
        ("I3", Cluster, &[".5 L T", ".5 T"], "REJECT", "REJECT"),
        ("I4", Cluster, &[], "REJECT", "REJECT"),
    ];
    for (row, policy, endpoints, pod, ext) in rows {
        let world = of(with(policy), endpoints);
        world.check(&[(row, "pod -> 172.30.1.1:80", pod), (row, "ext -> 1.2.3.4:80", ext)]);
    }
}

/// Three services that differ in their policies only: svc1 Cluster, svc2 external Local, svc3 internal Local.
fn matrix() -> World {
    let policies =
        [(1, "1.2.3.4", Cluster, Cluster), (2, "5.6.7.8", Local, Cluster), (3, "9.10.11.12", Cluster, Local)];
    let mut world = World::with([], []);
    for (n, vip, external, internal) in policies {
        let name = format!("svc{n}");
        world.table.apply(Delta::Service(Service {
            name: ObjectName::new("ns1", &name),
            cluster_ips: ips(&[&format!("172.30.0.4{n}")]),
            external_ips: vec![],
            load_balancer_ips: ips(&[vip]),
            ports: vec![port("", 80, 3000 + n)],
            ..load_balancer(external, internal)
        }));
        let endpoints = [format!("10.180.0.{n} L"), format!("10.180.1.{n}")];
        world.table.apply(Delta::Slice(slice(&name, &name, &[("", 80)], &[&endpoints[0], &endpoints[1]])));
    }
    world
}

/// One row: packet, then what is expected with a detector, without, with masqueradeAll, with masqueradeAll and no detector.
/// `b` = both endpoints, `l` = the local one, a capital letter = masqueraded.
#[rustfmt::skip]
const MATRIX: [(&str, &str, [char; 4]); 25] = [
    ("J1", "pod -> 172.30.0.41:80", ['b', 'b', 'B', 'B']),
    ("J2", "pod -> 192.168.0.2:3001", ['B', 'B', 'B', 'B']),
    ("J3", "pod -> 1.2.3.4:80", ['B', 'B', 'B', 'B']),
    ("J4", "node -> 172.30.0.41:80", ['B', 'b', 'B', 'B']),
    ("J5", "node -> 192.168.0.2:3001", ['B', 'B', 'B', 'B']),
    ("J6", "node -> 1.2.3.4:80", ['B', 'B', 'B', 'B']),
    ("J7", "ext -> 172.30.0.41:80", ['B', 'b', 'B', 'B']),
    ("J8", "ext -> 192.168.0.2:3001", ['B', 'B', 'B', 'B']),
    ("J9", "ext -> 1.2.3.4:80", ['B', 'B', 'B', 'B']),
    ("J10", "pod -> 172.30.0.42:80", ['b', 'b', 'B', 'B']),
    ("J11", "pod -> 192.168.0.2:3002", ['b', 'l', 'b', 'l']),
    ("J12", "node -> 172.30.0.42:80", ['B', 'b', 'B', 'B']),
    ("J13", "node -> 192.168.0.2:3002", ['B', 'B', 'B', 'B']),
    ("J14", "node -> 5.6.7.8:80", ['B', 'B', 'B', 'B']),
    ("J15", "ext -> 172.30.0.42:80", ['B', 'b', 'B', 'B']),
    ("J16", "ext -> 192.168.0.2:3002", ['l', 'l', 'l', 'l']),
    ("J17", "ext -> 5.6.7.8:80", ['l', 'l', 'l', 'l']),
    ("J18", "pod -> 172.30.0.43:80", ['l', 'l', 'L', 'L']),
    ("J19", "pod -> 192.168.0.2:3003", ['B', 'B', 'B', 'B']),
    ("J20", "pod -> 9.10.11.12:80", ['B', 'B', 'B', 'B']),
    ("J21", "node -> 192.168.0.2:3003", ['B', 'B', 'B', 'B']),
    ("J22", "node -> 9.10.11.12:80", ['B', 'B', 'B', 'B']),
    ("J23", "ext -> 172.30.0.43:80", ['L', 'l', 'L', 'L']),
    ("J24", "ext -> 192.168.0.2:3003", ['B', 'B', 'B', 'B']),
    ("J25", "ext -> 9.10.11.12:80", ['B', 'B', 'B', 'B']),
];

#[test]
fn j_masquerade_by_destination_source_detector_and_masquerade_all() {
    let mut world = matrix();
    let detector = world.settings.detector.clone();
    for (row, packet, expected) in MATRIX {
        // The last digit of the ClusterIP or NodePort; the VIPs are told apart by their first.
        let n = match packet {
            p if p.ends_with("1.2.3.4:80") => '1',
            p if p.ends_with("5.6.7.8:80") => '2',
            p if p.ends_with("9.10.11.12:80") => '3',
            p => p.trim_end_matches(":80").chars().last().unwrap(),
        };
        for (variant, expected) in expected.into_iter().enumerate() {
            world.settings.detector = if variant % 2 == 1 { LocalDetector::None } else { detector.clone() };
            world.settings.masquerade_all = variant >= 2;
            let m = if expected.is_uppercase() { " M" } else { "" };
            let local = format!("10.180.0.{n}:80{m}");
            let both = format!("{local}, 10.180.1.{n}:80{m}");
            let expected = if expected.eq_ignore_ascii_case(&'b') { both } else { local };
            assert_eq!(world.ask(packet), expected, "{row} variant {variant}: {packet}");
        }
    }
}

#[test]
fn x1_x2_external_policy_local_with_remote_endpoints_only() {
    let mut world = of(load_balancer(Local, Cluster), &["10.180.0.1", "10.180.2.1"]);
    world.check(&[
        ("X1", "node -> 1.2.3.4:80", ALL_M),
        ("X1 NodePort", "node -> 192.168.0.2:3001", ALL_M),
        ("X2", "ext -> 1.2.3.4:80", "DROP"),
        ("X2", "ext -> 192.168.99.11:80", "DROP"),
        ("X2", "ext -> 192.168.0.2:3001", "DROP"),
        ("short-circuit", "pod -> 1.2.3.4:80", ALL),
        ("all of 127.0.0.0/8 is local", "127.0.0.5@ -> 1.2.3.4:80", ALL_M),
    ]);
    world.settings.detector = LocalDetector::None;
    world.check(&[("no detector: the pod is a client like others", "pod -> 1.2.3.4:80", "DROP")]);
}

#[test]
fn x3_internal_policy_local_does_not_touch_external_destinations() {
    of(load_balancer(Cluster, Local), &["10.180.0.1", "10.180.2.1"])
        .check(&[("X3", "ext -> 1.2.3.4:80", ALL_M), ("X3", "pod -> 172.30.0.41:80", "DROP")]);
}

#[test]
fn x4_hairpin_through_node_port_and_vip() {
    of(load_balancer(Local, Cluster), &["10.180.0.1 L"]).check(&[
        ("X4", "10.180.0.1 -> 192.168.0.2:3001", "10.180.0.1:80 M"),
        ("X4", "10.180.0.1 -> 1.2.3.4:80", "10.180.0.1:80 M"),
        ("another pod", "10.180.0.2 -> 1.2.3.4:80", "10.180.0.1:80"),
    ]);
}

#[test]
fn hairpin_counts_what_another_service_port_says_is_local() {
    let other = Service { ports: vec![port("", 80, 0)], ..service("svc2", &["172.30.0.42"]) };
    let remote = slice("s1", "svc1", &[("", 80)], &["10.180.0.1"]);
    let mut world = World::with([load_balancer(Local, Cluster)], [remote]);
    world.check(&[("remote", "10.180.0.1 -> 172.30.0.41:80", "10.180.0.1:80")]);
    world.table.apply(Delta::Service(other));
    world.table.apply(Delta::Slice(slice("s2", "svc2", &[("", 80)], &["10.180.0.1 L"])));
    world.check(&[("local elsewhere", "10.180.0.1 -> 172.30.0.41:80", "10.180.0.1:80 M")]);
}

#[test]
fn x6_x7_hints_bind_cluster_traffic_and_short_circuits_but_not_local_lists() {
    let endpoints = ["10.180.0.1 zone=zone-a", "10.180.2.1 L zone=zone-b"];
    let mut world = of(load_balancer(Cluster, Cluster), &endpoints);
    world.table.apply(Delta::Node(node(NODE, "zone-a")));
    world.check(&[("X6", "pod -> 172.30.0.41:80", "10.180.0.1:80"), ("X6", "ext -> 1.2.3.4:80", "10.180.0.1:80 M")]);
    world.table.apply(Delta::Service(load_balancer(Local, Cluster)));
    world.check(&[("X7", "ext -> 1.2.3.4:80", "10.180.2.1:80"), ("X7", "pod -> 1.2.3.4:80", "10.180.0.1:80")]);
}

#[test]
fn x14_external_ips_can_be_switched_off() {
    let mut world = of(load_balancer(Cluster, Cluster), &["10.180.0.1"]);
    world.settings.external_ips_enabled = false;
    world.check(&[("X14", "ext -> 192.168.99.11:80", "untouched"), ("VIP", "ext -> 1.2.3.4:80", "10.180.0.1:80 M")]);
}

#[test]
fn x15_a_packet_delivered_to_this_node_keeps_its_source() {
    of(load_balancer(Cluster, Cluster), &["192.168.0.2 L", "10.180.2.1"]).check(&[
        ("X15", "ext -> 192.168.0.2:3001", "10.180.2.1:80 M, 192.168.0.2:80"),
        ("the node itself passes postrouting", "node -> 1.2.3.4:80", "10.180.2.1:80 M, 192.168.0.2:80 M"),
    ]);
}

#[test]
fn x16_interface_detectors_look_at_the_interface_and_never_at_the_address() {
    let mut world = of(load_balancer(Local, Cluster), &["10.180.0.1"]);
    let detectors = [LocalDetector::Interface("cbr0".into()), LocalDetector::InterfacePrefix("cbr".into())];
    for detector in detectors {
        world.settings.detector = detector;
        world.check(&[
            ("X16", "203.0.113.9@cbr0 -> 172.30.0.41:80", "10.180.0.1:80"),
            ("X16", "203.0.113.9@eth0 -> 172.30.0.41:80", "10.180.0.1:80 M"),
            ("X16", "node -> 172.30.0.41:80", "10.180.0.1:80 M"),
            ("an address in the pod network is no sign", "10.0.0.2@eth0 -> 172.30.0.41:80", "10.180.0.1:80 M"),
            ("short-circuit", "203.0.113.9@cbr0 -> 1.2.3.4:80", "10.180.0.1:80"),
            ("no short-circuit", "203.0.113.9@eth0 -> 1.2.3.4:80", "DROP"),
        ]);
    }
    world.settings.detector = LocalDetector::Interface("cbr0".into());
    world.check(&[("the name, not a prefix", "203.0.113.9@cbr01 -> 172.30.0.41:80", "10.180.0.1:80 M")]);
    world.settings.detector = LocalDetector::InterfacePrefix("cbr".into());
    world.check(&[("a prefix", "203.0.113.9@cbr01 -> 172.30.0.41:80", "10.180.0.1:80")]);
}
