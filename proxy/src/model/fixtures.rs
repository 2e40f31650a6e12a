//! Short ways to write objects and packets in tests.

use super::{
    Choice, Delta, Endpoint, EndpointSlice, Hints, IpFamily, LocalDetector, Node, NodePortAddresses, ObjectName,
    Oracle, Outcome, Packet, Protocol, Service, ServicePort, ServiceTable, ServiceType, Settings, SlicePort,
    TrafficPolicy,
};
use ipnet::IpNet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

/// The node on which the tests run.
pub const NODE: &str = "node-1";

pub fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

pub fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| ip(text)).collect()
}

pub fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().expect("a network")).collect()
}

/// `ns1/NAME` of type ClusterIP with these ClusterIPs, policies Cluster, no port.
pub fn service(name: &str, cluster_ips: &[&str]) -> Service {
    Service {
        name: ObjectName::new("ns1", name),
        service_type: ServiceType::ClusterIp,
        cluster_ips: ips(cluster_ips),
        external_ips: vec![],
        load_balancer_ips: vec![],
        source_ranges: vec![],
        external_traffic_policy: TrafficPolicy::Cluster,
        internal_traffic_policy: TrafficPolicy::Cluster,
        affinity_timeout_s: None,
        health_check_node_port: 0,
        publish_not_ready_addresses: false,
        traffic_distribution: None,
        has_selector: true,
        ports: vec![],
    }
}

/// A TCP port.
pub fn port(name: &str, port: u16, node_port: u16) -> ServicePort {
    port_of(name, Protocol::Tcp, port, node_port)
}

pub fn port_of(name: &str, protocol: Protocol, port: u16, node_port: u16) -> ServicePort {
    ServicePort { name: name.into(), protocol, port, node_port }
}

/// An endpoint from words: its address (`.3` is 10.0.1.3), then any of `L` (on this node), `ST` (serving, terminating), `T`
/// (terminating), `NR` (not ready), `zone=A,B`, `node=N,M` (hints).
pub fn endpoint(text: &str) -> Endpoint {
    let mut words = text.split(' ');
    let address = words.next().expect("an address");
    let address = if address.starts_with('.') { format!("10.0.1{address}") } else { address.to_owned() };
    let mut endpoint = Endpoint {
        address: ip(&address),
        node_name: Some("another-node".into()),
        ready: true,
        serving: true,
        terminating: false,
        zone_hints: Hints::default(),
        node_hints: Hints::default(),
    };
    for word in words {
        let list = |hints: &str| hints.split(',').map(Arc::from).collect::<Hints>();
        match word.split_once('=') {
            Some(("zone", hints)) => endpoint.zone_hints = list(hints),
            Some(("node", hints)) => endpoint.node_hints = list(hints),
            None if word == "L" => endpoint.node_name = Some(NODE.into()),
            None if word == "ST" => (endpoint.ready, endpoint.terminating) = (false, true),
            None if word == "T" => (endpoint.ready, endpoint.serving, endpoint.terminating) = (false, false, true),
            None if word == "NR" => (endpoint.ready, endpoint.serving) = (false, false),
            _ => panic!("unknown word {word:?}"),
        }
    }
    endpoint
}

pub fn slice_port(name: &str, protocol: Protocol, port: u16) -> SlicePort {
    SlicePort { name: name.into(), protocol, port }
}

/// `ns1/NAME` for `ns1/SERVICE`, with TCP ports. Its family is that of the first endpoint.
pub fn slice(name: &str, service: &str, ports: &[(&str, u16)], endpoints: &[&str]) -> EndpointSlice {
    let endpoints: Vec<Endpoint> = endpoints.iter().map(|text| endpoint(text)).collect();
    EndpointSlice {
        name: ObjectName::new("ns1", name),
        service: ObjectName::new("ns1", service),
        family: endpoints.first().map_or(IpFamily::V4, |first| IpFamily::of(first.address)),
        ports: ports.iter().map(|&(name, port)| slice_port(name, Protocol::Tcp, port)).collect(),
        endpoints,
    }
}

/// This node, in `zone` (empty = no label).
pub fn node(name: &str, zone: &str) -> Node {
    Node { name: name.into(), zone: Some(zone.into()), addresses: vec![], pod_cidrs: vec![] }
}

/// A node with three addresses per family, pods in 10.0.0.0/8 and NodePorts on its node IP only.
pub fn settings(family: IpFamily) -> Settings {
    let (pods, local) = match family {
        IpFamily::V4 => ("10.0.0.0/8", ips(&["192.168.0.2", "192.168.1.2", "192.168.99.11"])),
        IpFamily::V6 => ("fd00:10::/64", ips(&["2001:db8::1", "2001:db8:1::2"])),
    };
    Settings {
        detector: LocalDetector::Cidr(pods.parse().expect("a network")),
        node_port_addresses: NodePortAddresses::Only([local[0]].into()),
        node_ip: Some(local[0]),
        local_addresses: local.into_iter().collect(),
        ..Settings::new(family)
    }
}

/// What the oracle is asked about: a table with this node and both ServiceCIDRs, and its settings.
pub struct World {
    pub table: ServiceTable,
    pub settings: Settings,
}

impl World {
    pub fn new(family: IpFamily) -> Self {
        let mut table = ServiceTable::new();
        table.apply(Delta::Node(node(NODE, "")));
        table.apply(Delta::ServiceCidr("kubernetes".into(), nets(&["172.30.0.0/16", "fd00:10:96::/112"])));
        Self { table, settings: settings(family) }
    }

    pub fn with(services: impl IntoIterator<Item = Service>, slices: impl IntoIterator<Item = EndpointSlice>) -> Self {
        let mut world = Self::new(IpFamily::V4);
        services.into_iter().for_each(|service| world.table.apply(Delta::Service(service)));
        slices.into_iter().for_each(|slice| world.table.apply(Delta::Slice(slice)));
        world
    }

    /// What happens to a packet `FROM -> ADDRESS:PORT[/udp|sctp]` or `FROM -> ADDRESS` (ICMP). FROM is `pod`, `ext`, `blk`, `node`,
    /// or an address, to which `@interface` may be added, or `@` alone for the node itself (else a pod interface for 10.0.0.0/8, and the
    /// uplink for others).
    ///
    /// The answer is `REJECT`, `DROP`, `untouched`, or the endpoints, each with ` M` if the source is rewritten.
    pub fn ask(&self, packet: &str) -> String {
        let (from, to) = packet.split_once(" -> ").expect("FROM -> TO");
        let (interface, source) = match from.split_once('@') {
            Some((source, interface)) => (Some(interface).filter(|name| !name.is_empty()), ip(source)),
            None => match from {
                "pod" => (Some("veth0"), ip("10.0.0.2")),
                "ext" => (Some("eth0"), ip("203.0.113.2")),
                "blk" => (Some("eth0"), ip("203.0.113.130")),
                "node" => (None, ip("192.168.0.2")),
                source if source.starts_with("10.") => (Some("veth0"), ip(source)),
                source => (Some("eth0"), ip(source)),
            },
        };
        let (to, protocol) = match to.split_once('/') {
            None => (to, Protocol::Tcp),
            Some((to, name)) => {
                (to, Protocol::ALL.into_iter().find(|p| p.name() == name).expect("the name of a protocol"))
            }
        };
        let (destination, protocol, port) = match to.parse::<SocketAddr>() {
            Ok(to) => (to.ip(), Some(protocol), to.port()),
            Err(_) => (ip(to), None, 0),
        };
        let packet = Packet { interface, source, destination, protocol, port };
        show(&Oracle::new(&self.table, &self.settings).lookup(&packet))
    }

    /// Asks about each packet, and names the row that is not as expected.
    pub fn check(&self, rows: &[(&str, &str, &str)]) {
        for (row, packet, expected) in rows {
            assert_eq!(self.ask(packet), *expected, "{row}: {packet}");
        }
    }
}

fn show(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Reject => "REJECT".into(),
        Outcome::Drop => "DROP".into(),
        Outcome::NotOurs => "untouched".into(),
        Outcome::Forward { choices, .. } => {
            let choice = |choice: &Choice| {
                format!("{}{}", choice.backend.socket_address(), if choice.masquerade { " M" } else { "" })
            };
            choices.iter().map(choice).collect::<Vec<_>>().join(", ")
        }
    }
}
