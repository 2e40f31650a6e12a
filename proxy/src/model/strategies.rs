//! proptest strategies for everything in the model: for its own property tests and those of its users.
//!
//! All values come from small pools that overlap on purpose (an external IP that is a VIP of another Service, a NodePort
//! number that is also a service port, an endpoint in two slices), so that random objects meet each other and random packets
//! hit them. Strategies shrink towards fewer and plainer objects.

mod packets;

pub use packets::{OwnedPacket, Situation, packet, packet_to, situation};

use super::{
    Delta, Endpoint, EndpointSlice, IpFamily, LocalDetector, Node, NodePortAddresses, ObjectName, Protocol, Service,
    ServicePort, ServiceTable, ServiceType, Settings, SlicePort, TrafficPolicy,
};
use ipnet::IpNet;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

/// Names of nodes; the first is the one that [`node`] mostly has.
pub const NODES: [&str; 3] = ["node-1", "node-2", "node-3"];
/// Zones.
pub const ZONES: [&str; 3] = ["zone-a", "zone-b", "zone-c"];
/// Numbers of service ports and NodePorts alike.
pub const PORTS: [u16; 6] = [80, 443, 53, 30080, 30443, 30053];

const NAMESPACES: [&str; 2] = ["ns-a", "ns-b"];
const SERVICES: [&str; 4] = ["svc-1", "svc-2", "svc-3", "svc-4"];
const SLICES: usize = 9;
/// Port names with the protocol and the numbers (service port, NodePort) that they mostly have, so that slices, Services and
/// packets agree often enough.
const USUAL_PORTS: [(&str, Protocol, u16, u16); 5] = [
    ("", Protocol::Tcp, 80, 30080),
    ("https", Protocol::Tcp, 443, 30443),
    ("dns", Protocol::Udp, 53, 30053),
    ("dns", Protocol::Tcp, 53, 30053),
    ("stream", Protocol::Sctp, 80, 30080),
];

fn ip(text: &str) -> IpAddr {
    text.parse().expect("a literal address")
}

fn net(text: &str) -> IpNet {
    text.parse().expect("a literal network")
}

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| ip(text)).collect()
}

/// Addresses inside [`service_network`], most of which some Service has.
#[must_use]
pub fn cluster_ips(family: IpFamily) -> Vec<IpAddr> {
    (1..=8).map(|n| numbered(family, "172.30.0.", "fd00:10:96::", n)).collect()
}

/// The network of all ClusterIPs.
#[must_use]
pub fn service_network(family: IpFamily) -> IpNet {
    net(by_family(family, "172.30.0.0/16", "fd00:10:96::/112"))
}

/// Load balancer and external addresses; one is an address of the node, one the usual ClusterIP of the Service
/// with the largest name, so that whoever else claims it would win by name.
#[must_use]
pub fn external_addresses(family: IpFamily) -> Vec<IpAddr> {
    match family {
        IpFamily::V4 => ips(&["1.2.3.4", "5.6.7.8", "192.168.99.11", "192.168.0.2", "172.30.0.8"]),
        IpFamily::V6 => ips(&["2001:db8:5::4", "2001:db8:5::8", "2001:db8:99::11", "2001:db8::1", "fd00:10:96::8"]),
    }
}

/// Addresses of the node's interfaces, loopback included.
#[must_use]
pub fn local_addresses(family: IpFamily) -> Vec<IpAddr> {
    match family {
        IpFamily::V4 => ips(&["192.168.0.2", "192.168.1.2", "192.168.99.11", "127.0.0.1"]),
        IpFamily::V6 => ips(&["2001:db8::1", "2001:db8:1::2", "2001:db8:99::11", "::1"]),
    }
}

/// Endpoint addresses; the last is the node's own (a host-network pod).
#[must_use]
pub fn endpoint_addresses(family: IpFamily) -> Vec<IpAddr> {
    let mut all: Vec<IpAddr> = (1..=6).map(|n| numbered(family, "10.180.0.", "fd00:10:180::", n)).collect();
    all.push(local_addresses(family)[0]);
    all
}

/// Networks for source ranges, detectors and pod CIDRs; the last holds everything.
#[must_use]
pub fn networks(family: IpFamily) -> Vec<IpNet> {
    let texts = match family {
        IpFamily::V4 => {
            ["203.0.113.0/25", "203.0.113.128/25", "10.180.0.0/16", "192.168.0.0/24", "203.0.113.2/32", "0.0.0.0/0"]
        }
        IpFamily::V6 => [
            "2001:db8:203::/65",
            "2001:db8:203:0:8000::/65",
            "fd00:10:180::/64",
            "2001:db8::/64",
            "2001:db8:203::2/128",
            "::/0",
        ],
    };
    texts.into_iter().map(net).collect()
}

/// Addresses of clients outside of the cluster.
#[must_use]
pub fn outside_clients(family: IpFamily) -> Vec<IpAddr> {
    match family {
        IpFamily::V4 => ips(&["203.0.113.2", "203.0.113.130"]),
        IpFamily::V6 => ips(&["2001:db8:203::2", "2001:db8:203:0:8000::2"]),
    }
}

fn by_family<T>(family: IpFamily, v4: T, v6: T) -> T {
    match family {
        IpFamily::V4 => v4,
        IpFamily::V6 => v6,
    }
}

fn numbered(family: IpFamily, v4: &str, v6: &str, n: usize) -> IpAddr {
    ip(&format!("{}{n}", by_family(family, v4, v6)))
}

/// IPv4 or IPv6.
pub fn family() -> impl Strategy<Value = IpFamily> {
    select(IpFamily::ALL.to_vec())
}

/// TCP, UDP or SCTP, mostly TCP.
pub fn protocol() -> impl Strategy<Value = Protocol> {
    prop_oneof![4 => Just(Protocol::Tcp), 2 => Just(Protocol::Udp), 1 => Just(Protocol::Sctp)]
}

fn policy() -> impl Strategy<Value = TrafficPolicy> {
    prop_oneof![2 => Just(TrafficPolicy::Cluster), 1 => Just(TrafficPolicy::Local)]
}

fn one_of(pool: &[&'static str]) -> impl Strategy<Value = Arc<str>> + use<> {
    select(pool.to_vec()).prop_map(Arc::from)
}

/// A few elements of a pool, in any order, perhaps none.
fn some_of<T: Clone + std::fmt::Debug + 'static>(pool: Vec<T>, at_most: usize) -> impl Strategy<Value = Vec<T>> {
    vec(select(pool), 0..=at_most)
}

/// Both families' elements of a pool.
fn both<T>(pool: impl Fn(IpFamily) -> Vec<T>) -> Vec<T> {
    IpFamily::ALL.into_iter().flat_map(pool).collect()
}

/// The name of one of the eight Services that may exist.
pub fn service_name() -> impl Strategy<Value = ObjectName> {
    (select(NAMESPACES.to_vec()), select(SERVICES.to_vec()))
        .prop_map(|(namespace, name)| ObjectName::new(namespace, name))
}

/// The ClusterIP that a Service of this name mostly has, so that clashes stay rare.
fn usual_cluster_ip(name: &ObjectName, family: IpFamily) -> IpAddr {
    let place = |pool: &[&str], text: &str| pool.iter().position(|item| *item == text).unwrap_or_default();
    cluster_ips(family)[place(&NAMESPACES, &name.namespace) * SERVICES.len() + place(&SERVICES, &name.name)]
}

fn cluster_ip(name: ObjectName, family: IpFamily) -> impl Strategy<Value = Option<IpAddr>> {
    let usual = usual_cluster_ip(&name, family);
    prop_oneof![12 => Just(Some(usual)), 3 => Just(None), 1 => select(cluster_ips(family)).prop_map(Some)]
}

fn service_port() -> impl Strategy<Value = ServicePort> {
    let number = |usual: u16| prop_oneof![8 => Just(usual), 1 => select(PORTS.to_vec())];
    select(USUAL_PORTS.to_vec()).prop_flat_map(move |(name, protocol, port, node_port)| {
        (number(port), option::of(number(node_port))).prop_map(move |(port, node_port)| ServicePort {
            name: name.into(),
            protocol,
            port,
            node_port: node_port.unwrap_or(0),
        })
    })
}

/// Ports as the API server would accept them in one Service: no name, port or NodePort twice within a protocol.
fn service_ports() -> impl Strategy<Value = Vec<ServicePort>> {
    vec(service_port(), 0..5).prop_map(|ports| {
        let mut valid: Vec<ServicePort> = Vec::new();
        for port in ports {
            let clash = |other: &ServicePort| {
                other.protocol == port.protocol
                    && (other.name == port.name
                        || other.port == port.port
                        || (port.node_port != 0 && other.node_port == port.node_port))
            };
            if !valid.iter().any(clash) {
                valid.push(port);
            }
        }
        valid
    })
}

/// A Service of this name.
pub fn service_named(name: ObjectName) -> impl Strategy<Value = Service> {
    let addresses = (
        cluster_ip(name.clone(), IpFamily::V4),
        cluster_ip(name.clone(), IpFamily::V6),
        some_of(both(external_addresses), 2),
        some_of(both(external_addresses), 3),
        some_of(both(networks), 3),
    );
    let service_type = select(vec![ServiceType::ClusterIp, ServiceType::NodePort, ServiceType::LoadBalancer]);
    let rest = (service_type, policy(), policy(), option::weighted(0.2, select(vec![10_u32, 10_800])), service_ports());
    (addresses, rest).prop_map(move |((v4, v6, external_ips, load_balancer_ips, source_ranges), rest)| {
        let (service_type, external_traffic_policy, internal_traffic_policy, affinity_timeout_s, ports) = rest;
        Service {
            name: name.clone(),
            service_type,
            cluster_ips: v4.into_iter().chain(v6).collect(),
            external_ips,
            load_balancer_ips,
            source_ranges,
            external_traffic_policy,
            internal_traffic_policy,
            affinity_timeout_s,
            health_check_node_port: if service_type == ServiceType::LoadBalancer { 30_000 } else { 0 },
            publish_not_ready_addresses: false,
            traffic_distribution: None,
            has_selector: true,
            ports,
        }
    })
}

/// Any Service.
pub fn service() -> impl Strategy<Value = Service> {
    service_name().prop_flat_map(service_named)
}

/// An endpoint of `family`.
pub fn endpoint(family: IpFamily) -> impl Strategy<Value = Endpoint> {
    // ready, serving, terminating: mostly a combination that the slice controller writes, now and then any other.
    let conditions = prop_oneof![
        6 => Just((true, true, false)),
        2 => Just((false, true, true)),
        1 => Just((false, false, true)),
        1 => Just((false, false, false)),
        1 => any::<(bool, bool, bool)>(),
    ];
    let hints = (some_of(ZONES.map(Arc::from).to_vec(), 2), some_of(NODES.map(Arc::from).to_vec(), 1));
    (select(endpoint_addresses(family)), option::weighted(0.9, one_of(&NODES)), conditions, option::of(hints)).prop_map(
        |(address, node_name, (ready, serving, terminating), hints)| {
            let (zone_hints, node_hints) = hints.unwrap_or_default();
            let (zone_hints, node_hints) = (Vec::into(zone_hints), Vec::into(node_hints));
            Endpoint { address, node_name, ready, serving, terminating, zone_hints, node_hints }
        },
    )
}

/// Most of the usual ports, and sometimes one of them with a second number. None of the numbers is one of [`PORTS`]: an endpoint
/// on the node's own address that is a frontend as well would be refused after its translation, which `lookup` leaves out.
fn slice_ports() -> impl Strategy<Value = Vec<SlicePort>> {
    let number = || select(vec![8080_u16, 9090, 5353]);
    let each = USUAL_PORTS.map(|usual| option::weighted(0.8, number().prop_map(move |port| slice_port(usual, port))));
    let second = (select(USUAL_PORTS.to_vec()), number()).prop_map(|(usual, port)| slice_port(usual, port));
    (each, vec(second, 0..=1)).prop_map(|(each, second)| each.into_iter().flatten().chain(second).collect())
}

fn slice_port((name, protocol, ..): (&str, Protocol, u16, u16), port: u16) -> SlicePort {
    SlicePort { name: name.into(), protocol, port }
}

/// Slices `slice-0` to `slice-8` of a namespace.
fn slice_name() -> impl Strategy<Value = (ObjectName, usize)> {
    (select(NAMESPACES.to_vec()), 0..SLICES)
        .prop_map(|(namespace, n)| (ObjectName::new(namespace, &format!("slice-{n}")), n))
}

/// A slice of a Service in its namespace. Its number decides its owner and family most of the time, so that most Services have
/// endpoints in both families.
pub fn slice() -> impl Strategy<Value = EndpointSlice> {
    slice_name().prop_flat_map(|(name, n)| {
        let owner = prop_oneof![8 => Just(SERVICES[n % SERVICES.len()]), 1 => select(SERVICES.to_vec())];
        let family = prop_oneof![8 => Just(IpFamily::ALL[n / SERVICES.len() % 2]), 1 => family()];
        let body = family.prop_flat_map(|family| (Just(family), slice_ports(), vec(endpoint(family), 0..6)));
        (owner, body).prop_map(move |(owner, (family, ports, endpoints))| EndpointSlice {
            service: ObjectName::new(&name.namespace, owner),
            name: name.clone(),
            family,
            ports,
            endpoints,
        })
    })
}

/// The Node object.
pub fn node() -> impl Strategy<Value = Node> {
    let zone = prop_oneof![4 => one_of(&ZONES).prop_map(Some), 1 => Just(None), 1 => Just(Some(Arc::from("")))];
    let name = prop_oneof![5 => Just(NODES[0]), 1 => Just(NODES[1])];
    (name, zone, some_of(both(local_addresses), 3), some_of(both(networks), 2))
        .prop_map(|(name, zone, addresses, pod_cidrs)| Node { name: name.into(), zone, addresses, pod_cidrs })
}

/// CIDRs of one ServiceCIDR object.
pub fn service_cidrs() -> impl Strategy<Value = Vec<IpNet>> {
    let mut pool: Vec<IpNet> = IpFamily::ALL.map(service_network).to_vec();
    pool.extend([net("172.30.0.0/29"), net("10.96.0.0/12"), net("fd00:10:96::/125")]);
    some_of(pool, 2)
}

/// Any change. Services and slices come most often.
pub fn delta() -> impl Strategy<Value = Delta> {
    let cidr = || one_of(&["kubernetes", "extra"]);
    prop_oneof![
        8 => service().prop_map(Delta::Service),
        1 => service_name().prop_map(Delta::ServiceGone),
        16 => slice().prop_map(Delta::Slice),
        1 => slice_name().prop_map(|(name, _)| Delta::SliceGone(name)),
        1 => node().prop_map(Delta::Node),
        1 => Just(Delta::NodeGone),
        1 => (cidr(), service_cidrs()).prop_map(|(name, cidrs)| Delta::ServiceCidr(name, cidrs)),
        1 => cidr().prop_map(Delta::ServiceCidrGone),
    ]
}

/// Up to `at_most` changes in order.
pub fn deltas(at_most: usize) -> impl Strategy<Value = Vec<Delta>> {
    vec(delta(), 0..=at_most)
}

/// A table after up to `at_most` changes, with a Node, with no pending change.
pub fn table(at_most: usize) -> impl Strategy<Value = ServiceTable> {
    (node(), deltas(at_most)).prop_map(|(node, deltas)| {
        let mut table = ServiceTable::new();
        table.apply(Delta::Node(node));
        for delta in deltas {
            table.apply(delta);
        }
        table.take_changes();
        table
    })
}

/// A local traffic detector of `family`.
pub fn detector(family: IpFamily) -> impl Strategy<Value = LocalDetector> {
    prop_oneof![
        1 => Just(LocalDetector::None),
        3 => Just(LocalDetector::Cidr(networks(family)[2])),
        1 => Just(LocalDetector::Interface("pod0".into())),
        1 => Just(LocalDetector::InterfacePrefix("pod".into())),
    ]
}

/// Settings of `family` that fit the pools.
pub fn settings(family: IpFamily) -> impl Strategy<Value = Settings> {
    let not_loopback: Vec<IpAddr> = local_addresses(family).into_iter().filter(|ip| !ip.is_loopback()).collect();
    let node_ip = not_loopback[0];
    let node_port_addresses = prop_oneof![
        Just(NodePortAddresses::All),
        some_of(not_loopback, 4).prop_map(|some| NodePortAddresses::Only(some.into_iter().collect())),
    ];
    let switches = (prop::bool::weighted(0.2), prop::bool::weighted(0.9), option::weighted(0.9, Just(node_ip)));
    (detector(family), node_port_addresses, switches).prop_map(
        move |(detector, node_port_addresses, (masquerade_all, external_ips_enabled, node_ip))| Settings {
            detector,
            node_port_addresses,
            masquerade_all,
            node_ip,
            local_addresses: local_addresses(family).into_iter().collect::<BTreeSet<_>>(),
            external_ips_enabled,
            affinity_clients_max: 64,
            ..Settings::new(family)
        },
    )
}

#[cfg(test)]
mod tests;
