//! Refusals, ClusterIPs, source ranges, NodePorts.

use crate::model::fixtures::{World, ip, ips, nets, port, port_of, service, slice, slice_port};
use crate::model::{
    Delta, EndpointSlice, IpFamily, NodePortAddresses, ObjectName, Outcome, Packet, Protocol, Service, ServiceType,
    TrafficPolicy, lookup,
};

const BOTH: &str = "10.180.0.1:80, 10.180.2.1:80";
const BOTH_M: &str = "10.180.0.1:80 M, 10.180.2.1:80 M";
const ONE: &str = "10.180.0.1:80";
const ONE_M: &str = "10.180.0.1:80 M";

#[test]
fn a_no_endpoints_is_rejected_at_every_frontend() {
    let svc1 = Service {
        service_type: ServiceType::LoadBalancer,
        external_ips: ips(&["192.168.99.11"]),
        load_balancer_ips: ips(&["1.2.3.4"]),
        ports: vec![port("http", 80, 3001)],
        ..service("svc1", &["172.30.0.41"])
    };
    World::with([svc1], []).check(&[
        ("A1", "pod -> 172.30.0.41:80", "REJECT"),
        ("A2", "ext -> 192.168.99.11:80", "REJECT"),
        ("A3", "pod -> 192.168.0.2:3001", "REJECT"),
        ("A4", "ext -> 192.168.0.2:3001", "REJECT"),
        ("A5", "pod -> 1.2.3.4:80", "REJECT"),
        ("A6", "ext -> 1.2.3.4:80", "REJECT"),
        ("A7", "pod -> 192.168.1.2:3001", "untouched"),
        ("A8", "node -> 172.30.0.41:80", "REJECT"),
        ("node to its own NodePort", "node -> 192.168.0.2:3001", "REJECT"),
    ]);
}

fn two_cluster_ip_services() -> World {
    let svc1 = Service { ports: vec![port("http", 80, 0)], ..service("svc1", &["172.30.0.41"]) };
    let svc2 = Service {
        ports: vec![
            port("http", 80, 0),
            port("https", 443, 0),
            port_of("dns-udp", Protocol::Udp, 53, 0),
            port("dns-tcp", 53, 0),
            port_of("dns-sctp", Protocol::Sctp, 53, 0),
        ],
        ..service("svc2", &["172.30.0.42"])
    };
    let mut slice2 =
        slice("s2", "svc2", &[("http", 80), ("https", 8443), ("dns-tcp", 5353)], &["10.180.0.1 L", "10.180.2.1"]);
    slice2.ports.push(slice_port("dns-udp", Protocol::Udp, 53));
    slice2.ports.push(slice_port("dns-sctp", Protocol::Sctp, 53));
    World::with([svc1, svc2], [slice("s1", "svc1", &[("http", 80)], &["10.180.0.1 L"]), slice2])
}

#[test]
fn b_cluster_ips_and_the_guards_around_them() {
    two_cluster_ip_services().check(&[
        ("B1", "10.180.0.2 -> 172.30.0.41:80", ONE),
        ("B2", "10.180.0.1 -> 172.30.0.41:80", ONE_M),
        ("B3", "10.180.0.2 -> 172.30.0.42:80", BOTH),
        ("B4", "10.180.0.2 -> 172.30.0.42:443", "10.180.0.1:8443, 10.180.2.1:8443"),
        ("B5", "10.180.0.2 -> 172.30.0.42:53", "10.180.0.1:5353, 10.180.2.1:5353"),
        ("B6", "10.180.0.2 -> 172.30.0.42:53/udp", "10.180.0.1:53, 10.180.2.1:53"),
        ("B6 sctp", "10.180.0.2 -> 172.30.0.42:53/sctp", "10.180.0.1:53, 10.180.2.1:53"),
        ("B7", "10.180.0.2 -> 172.30.0.42:80/udp", "REJECT"),
        ("B8", "10.180.0.2 -> 172.30.0.41:443", "REJECT"),
        ("B9", "10.180.0.2 -> 172.30.0.50:80", "DROP"),
        ("B10", "10.180.0.2 -> 172.30.0.41", "REJECT"),
        ("B11", "10.180.0.2 -> 172.30.0.50", "DROP"),
        ("B13", "10.180.0.1 -> 172.30.0.42:443", "10.180.0.1:8443 M, 10.180.2.1:8443"),
        ("X5", "10.180.2.1 -> 172.30.0.42:80", BOTH),
        ("guards in output", "node -> 172.30.0.41:443", "REJECT"),
        ("guards in output", "node -> 172.30.0.50:80", "DROP"),
        ("not a service address", "pod -> 198.51.100.1:80", "untouched"),
        ("an endpoint is reached directly", "pod -> 10.180.0.1:80", "untouched"),
    ]);
}

#[test]
fn b12_nothing_is_dropped_while_no_service_cidr_is_known() {
    let mut world = two_cluster_ip_services();
    world.table.apply(Delta::ServiceCidrGone("kubernetes".into()));
    world.check(&[
        ("B12", "10.180.0.2 -> 172.30.0.50:80", "untouched"),
        ("B8", "10.180.0.2 -> 172.30.0.41:443", "REJECT"),
    ]);
}

#[test]
fn a_guarded_address_that_is_this_nodes_own_is_not_guarded_in_input() {
    let mut world = two_cluster_ip_services();
    world.settings.local_addresses.insert(ip("172.30.0.50"));
    world.check(&[
        ("input", "pod -> 172.30.0.50:80", "untouched"),
        ("output comes first", "node -> 172.30.0.50:80", "DROP"),
    ]);
}

fn filtered(ranges: &[&str]) -> World {
    let svc1 = Service {
        service_type: ServiceType::LoadBalancer,
        load_balancer_ips: ips(&["1.2.3.4", "5.6.7.8"]),
        source_ranges: nets(ranges),
        ports: vec![port("", 80, 3001)],
        ..service("svc1", &["172.30.0.41"])
    };
    World::with([svc1], [slice("s1", "svc1", &[("", 80)], &["10.180.0.1 L"])])
}

#[test]
fn c_source_ranges_filter_the_vips_only() {
    let mut world = filtered(&["192.168.0.0/24", "203.0.113.0/25"]);
    world.check(&[
        ("C1", "pod -> 172.30.0.41:80", ONE),
        ("C2", "ext -> 192.168.0.2:3001", ONE_M),
        ("C3", "blk -> 192.168.0.2:3001", ONE_M),
        ("C4", "ext -> 1.2.3.4:80", ONE_M),
        ("C5", "ext -> 5.6.7.8:80", ONE_M),
        ("C6", "blk -> 1.2.3.4:80", "DROP"),
        ("C7", "pod -> 1.2.3.4:80", "DROP"),
        ("C8", "node -> 1.2.3.4:80", ONE_M),
        ("C9", "1.2.3.4 -> 1.2.3.4:80", ONE_M),
        ("C9 crosswise", "5.6.7.8 -> 1.2.3.4:80", ONE_M),
        ("C10", "blk -> 1.2.3.4:443", "untouched"),
        ("other protocol", "blk -> 1.2.3.4:80/udp", "untouched"),
    ]);
    let mut with_external_ip = (**world.table.services().next().unwrap()).clone();
    with_external_ip.external_ips = ips(&["192.168.99.11"]);
    world.table.apply(Delta::Service(with_external_ip));
    world.check(&[("C11", "blk -> 192.168.99.11:80", ONE_M), ("C6", "blk -> 1.2.3.4:80", "DROP")]);
}

#[test]
fn c12_to_c14_ranges_that_do_not_filter_and_those_without_the_node() {
    filtered(&["2001:db8::/32"]).check(&[("C12", "blk -> 1.2.3.4:80", ONE_M)]);
    filtered(&["203.0.113.0/25", "0.0.0.0/0"]).check(&[("C13", "blk -> 1.2.3.4:80", ONE_M)]);
    filtered(&["203.0.113.0/25"]).check(&[("C14", "1.2.3.4 -> 1.2.3.4:80", "DROP")]);
}

#[test]
fn the_firewall_comes_before_the_reject_of_a_service_without_endpoints() {
    let mut world = filtered(&["203.0.113.0/25"]);
    world.table.apply(Delta::SliceGone(ObjectName::new("ns1", "s1")));
    world.check(&[("blocked", "blk -> 1.2.3.4:80", "DROP"), ("allowed", "ext -> 1.2.3.4:80", "REJECT")]);
}

fn node_port_world(family: IpFamily) -> World {
    let svc1 = Service {
        service_type: ServiceType::NodePort,
        ports: vec![port("", 80, 3001), port("no-node-port", 81, 0)],
        ..service("svc1", &["172.30.0.41", "fd00:172:30::41"])
    };
    let mut world = World::new(family);
    world.table.apply(Delta::Service(svc1));
    world.table.apply(Delta::Slice(slice("s4", "svc1", &[("", 80)], &["10.180.0.1", "10.180.2.1 L"])));
    let six = ["fd00:10:180::1", "fd00:10:180::2:1 L"];
    world.table.apply(Delta::Slice(slice("s6", "svc1", &[("", 80)], &six)));
    world
}

fn only(addresses: &[&str]) -> NodePortAddresses {
    NodePortAddresses::Only(ips(addresses).into_iter().collect())
}

#[test]
fn d_node_ports_answer_on_the_selected_addresses() {
    let mut world = node_port_world(IpFamily::V4);
    world.check(&[
        ("D1", "pod -> 172.30.0.41:80", BOTH),
        ("D2", "ext -> 192.168.0.2:3001", BOTH_M),
        ("D3", "node -> 192.168.0.2:3001", BOTH_M),
        ("D4", "ext -> 192.168.1.2:3001", "untouched"),
        ("D8", "127.0.0.1@lo -> 127.0.0.1:3001", "untouched"),
        ("other protocol", "ext -> 192.168.0.2:3001/udp", "untouched"),
        ("the service port is no NodePort", "ext -> 192.168.0.2:80", "untouched"),
        ("no service has NodePort 0", "ext -> 192.168.0.2:0", "untouched"),
    ]);
    world.settings.node_port_addresses = only(&["192.168.0.2", "192.168.1.2"]);
    world.check(&[("D5", "ext -> 192.168.1.2:3001", BOTH_M)]);
    world.settings.node_port_addresses = only(&[]);
    world.check(&[("D11", "ext -> 192.168.0.2:3001", "untouched")]);
    world.settings.node_port_addresses = NodePortAddresses::All;
    world.check(&[
        ("D9", "ext -> 192.168.0.2:3001", BOTH_M),
        ("D9", "ext -> 192.168.1.2:3001", BOTH_M),
        ("D9", "ext -> 192.168.99.11:3001", BOTH_M),
        ("D8", "node -> 127.0.0.1:3001", "untouched"),
        ("D8", "node -> 127.9.9.9:3001", "untouched"),
        ("not local", "ext -> 198.51.100.1:3001", "untouched"),
    ]);
}

#[test]
fn d_node_ports_in_ipv6() {
    let mut world = node_port_world(IpFamily::V6);
    let both_m = "[fd00:10:180::1]:80 M, [fd00:10:180::2:1]:80 M";
    world.check(&[
        ("D6", "2600:5200::1 -> [2001:db8::1]:3001", both_m),
        ("D7", "2600:5200::1 -> [2001:db8:1::2]:3001", "untouched"),
        ("other family", "ext -> 192.168.0.2:3001", "untouched"),
    ]);
    world.settings.node_port_addresses = NodePortAddresses::All;
    world
        .check(&[("D10", "2600:5200::1 -> [2001:db8:1::2]:3001", both_m), ("D8", "::1@lo -> [::1]:3001", "untouched")]);
}

#[test]
fn d12_a_vip_that_is_a_local_address_accepts_node_ports_too() {
    let mut world = node_port_world(IpFamily::V4);
    world.settings.node_port_addresses = NodePortAddresses::All;
    world.table.apply(Delta::Service(Service {
        service_type: ServiceType::LoadBalancer,
        load_balancer_ips: ips(&["192.168.99.11"]),
        ports: vec![port("", 80, 0), port("clash", 3001, 0)],
        ..service("svc2", &["172.30.0.42"])
    }));
    // svc2's own port 3001 has no endpoints: it is not in the service map, and the NodePort of that number answers.
    world.check(&[("D12", "ext -> 192.168.99.11:3001", BOTH_M), ("no endpoints", "ext -> 192.168.99.11:80", "REJECT")]);
    world.table.apply(Delta::Slice(slice("s2", "svc2", &[("clash", 81)], &["10.180.0.9"])));
    world.check(&[("a served VIP is never looked up as NodePort", "ext -> 192.168.99.11:3001", "10.180.0.9:81 M")]);
}

#[test]
fn a_cluster_ip_that_no_local_endpoint_serves_is_not_in_the_service_map() {
    let internal = Service {
        internal_traffic_policy: TrafficPolicy::Local,
        ports: vec![port("", 3001, 0)],
        ..service("internal", &["192.168.0.2"])
    };
    let mut world = node_port_world(IpFamily::V4);
    world.table.apply(Delta::Service(internal));
    world.table.apply(Delta::Slice(slice("s1", "internal", &[("", 80)], &["10.180.0.9"])));
    world.check(&[("the NodePort of that number answers", "ext -> 192.168.0.2:3001", BOTH_M)]);
    world.table.apply(Delta::Slice(slice("s1", "internal", &[("", 80)], &["10.180.0.9 L"])));
    world.check(&[("now the ClusterIP does", "pod -> 192.168.0.2:3001", "10.180.0.9:80")]);
}

#[test]
fn a_cluster_ip_cannot_be_taken_by_an_external_address_of_a_smaller_name() {
    let of = |namespace: &str, cluster_ip: &str, external_ips: &[&str]| Service {
        name: ObjectName::new(namespace, "x"),
        external_ips: ips(external_ips),
        ports: vec![port("", 80, 0)],
        ..service("any", &[cluster_ip])
    };
    let endpoints = |namespace: &str, address: &str| EndpointSlice {
        name: ObjectName::new(namespace, "x-s"),
        service: ObjectName::new(namespace, "x"),
        ..slice("any", "any", &[("", 80)], &[address])
    };
    let mut world = World::with(
        [of("a", "172.30.0.1", &["172.30.0.2"]), of("b", "172.30.0.2", &[])],
        [endpoints("a", "10.180.0.1"), endpoints("b", "10.180.0.2")],
    );
    world.check(&[("its own", "pod -> 172.30.0.2:80", "10.180.0.2:80")]);
    world.table.apply(Delta::ServiceGone(ObjectName::new("b", "x")));
    world.check(&[("nobody else's any more", "pod -> 172.30.0.2:80", "10.180.0.1:80 M")]);
}

#[test]
fn a_contested_frontend_belongs_to_the_smallest_name() {
    let claim = |name: ObjectName, cluster_ip: &str| Service {
        name,
        service_type: ServiceType::LoadBalancer,
        load_balancer_ips: ips(&["1.2.3.4"]),
        ports: vec![port("", 80, 3001)],
        ..service("any", &[cluster_ip])
    };
    let endpoints = |owner: &ObjectName, address: &str| EndpointSlice {
        name: ObjectName::new(&owner.namespace, &format!("{}-s", owner.name)),
        service: owner.clone(),
        ..slice("any", "any", &[("", 80)], &[address])
    };
    // Namespaces are compared first: "a" before "a-b", though '-' sorts before the '/' of "a/z".
    let (first, second) = (ObjectName::new("a", "z"), ObjectName::new("a-b", "a"));
    let mut world = World::with(
        [claim(second.clone(), "172.30.0.1"), claim(first.clone(), "172.30.0.2")],
        [endpoints(&second, "10.180.0.2"), endpoints(&first, "10.180.0.1")],
    );
    world.check(&[
        ("vip", "ext -> 1.2.3.4:80", ONE_M),
        ("NodePort", "ext -> 192.168.0.2:3001", ONE_M),
        ("the rest of the loser stays", "pod -> 172.30.0.1:80", "10.180.0.2:80"),
    ]);
    let packet = Packet {
        interface: Some("eth0"),
        source: ip("203.0.113.2"),
        destination: ip("1.2.3.4"),
        protocol: Some(Protocol::Tcp),
        port: 80,
    };
    let Outcome::Forward { service_port, .. } = lookup(&world.table, &world.settings, &packet) else {
        panic!("the VIP is served")
    };
    assert_eq!(service_port.service, first);

    world.table.apply(Delta::SliceGone(ObjectName::new("a", "z-s")));
    world.check(&[("the owner has no endpoints", "ext -> 1.2.3.4:80", "REJECT")]);
    world.table.apply(Delta::ServiceGone(first));
    world.check(&[("the owner is gone", "ext -> 1.2.3.4:80", "10.180.0.2:80 M")]);
}

#[test]
fn x17_x18_x19_ports_protocols_and_deleted_services() {
    let tcp = Service { ports: vec![port("", 80, 3001), port("q", 81, 0)], ..service("tcp", &["172.30.0.41"]) };
    let udp = Service { ports: vec![port_of("", Protocol::Udp, 80, 3001)], ..service("udp", &["172.30.0.42"]) };
    let mut of_udp = slice("s2", "udp", &[], &["10.180.0.2"]);
    of_udp.ports.push(slice_port("", Protocol::Udp, 80));
    let of_tcp = slice("s1", "tcp", &[("", 80), ("q", 81)], &["10.180.0.1"]);
    let mut world = World::with([tcp.clone(), udp], [of_tcp, of_udp]);
    world.check(&[
        ("X17", "ext -> 192.168.0.2:3001", ONE_M),
        ("X17", "ext -> 192.168.0.2:3001/udp", "10.180.0.2:80 M"),
        ("before X18", "pod -> 172.30.0.41:81", "10.180.0.1:81"),
    ]);
    world.table.apply(Delta::Service(Service { ports: vec![port("", 80, 3001)], ..tcp }));
    world.check(&[("X18", "pod -> 172.30.0.41:81", "REJECT"), ("X18", "pod -> 172.30.0.41:80", ONE)]);
    world.table.apply(Delta::ServiceGone(ObjectName::new("ns1", "tcp")));
    world.check(&[("X19", "pod -> 172.30.0.41:80", "DROP")]);
}
