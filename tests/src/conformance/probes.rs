//! The packets to try in a state: some that every first state needs, others by chance.

#![forbid(unsafe_code)]

use super::chance::Chance;
use super::objects::{Cluster, Kind, Service};
use super::places::{self, Place};
use super::random::UNSERVED;
use super::{Expected, Position, Probe};
use crate::probe::Proto;
use crate::world::{WorldSpec, link};
use proxy::model::{IpFamily, Protocol};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// NodePorts that are tried in a state at most: each needs servers everywhere.
const NODE_PORTS: usize = 10;

/// What a packet is sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Target {
    proto: Proto,
    to: SocketAddr,
}

/// Draws `count` probes for `cluster`. `first`: the ones that a round needs are among them.
pub(super) fn probes(
    cluster: &Cluster,
    world: &WorldSpec,
    count: usize,
    first: bool,
    chance: &mut Chance,
) -> Vec<Probe> {
    let mut draw = Draw { cluster, local: world.local_addresses(), all: Vec::new(), seen: BTreeSet::new() };
    if first {
        draw.cast(chance);
    }
    let targets = Targets::of(cluster, chance);
    // Every Service once, as far as there is room: a change of each is then seen.
    let mut frontends = targets.frontends.clone();
    chance.shuffle(&mut frontends);
    for target in frontends.into_iter().take(count / 2) {
        let from = position(chance);
        draw.add(from, target, chance);
    }
    for _ in 0..50 * count {
        if draw.all.len() >= count {
            break;
        }
        let target = targets.any(chance);
        let from = position(chance);
        draw.add(from, target, chance);
    }
    draw.all
}

fn position(chance: &mut Chance) -> Position {
    *chance.pick(&Position::ALL)
}

struct Draw<'a> {
    cluster: &'a Cluster,
    local: BTreeSet<IpAddr>,
    all: Vec<Probe>,
    seen: BTreeSet<(Position, Target)>,
}

impl Draw<'_> {
    /// Adds a probe, if it is possible and new.
    fn add(&mut self, position: Position, target: Target, chance: &mut Chance) {
        let Target { proto, to } = target;
        if !self.seen.insert((position, target)) {
            return;
        }
        let family = IpFamily::of(to.ip());
        let mut source = places::client(position, family);
        let mut party = places::party_name(position).to_string();
        match position {
            Position::Endpoint => {
                let place = Place::Pod(u16::try_from(chance.below(usize::from(places::LOCAL_PODS))).expect("small"));
                (source, party) = (place.address(family), place.name());
            }
            // The node talks to loopback addresses from one.
            Position::Node if to.ip().is_loopback() => source = to.ip(),
            // Nobody else can reach them.
            _ if to.ip().is_loopback() => return,
            _ => {}
        }
        // A client that talks to its own address does not send a packet.
        if source == to.ip() && !source.is_loopback() && proto != Proto::Icmp && party != "node" {
            return;
        }
        let owners =
            self.cluster.owners(to.ip(), super::oracle::protocol(proto), to.port(), self.local.contains(&to.ip()));
        self.all.push(Probe {
            id: String::new(),
            position,
            party,
            source,
            proto,
            to,
            expected: Expected::Untouched,
            services: owners.iter().map(|s| s.object_name()).collect(),
            sticky: owners.iter().any(|s| s.affinity.is_some()),
        });
    }

    /// What every round must contain.
    fn cast(&mut self, chance: &mut Chance) {
        let families = IpFamily::ALL;
        // Each position asks a Service that has endpoints here and there, and a port that nobody serves.
        let services: Vec<Service> = self.cluster.services.clone();
        let (web, nobody, local, node_port, balanced) =
            (&services[0], &services[1], &services[2], &services[3], &services[4]);
        for position in Position::ALL {
            for family in families {
                let ip = places::cluster_ip(family, web.number);
                let proto = if family == IpFamily::V4 { Proto::Tcp } else { Proto::Udp };
                let port = if family == IpFamily::V4 { 80 } else { 53 };
                self.add(position, Target { proto, to: SocketAddr::new(ip, port) }, chance);
            }
        }
        let tcp = |ip, port| Target { proto: Proto::Tcp, to: SocketAddr::new(ip, port) };
        let udp = |ip, port| Target { proto: Proto::Udp, to: SocketAddr::new(ip, port) };
        let echo = |ip| Target { proto: Proto::Icmp, to: SocketAddr::new(ip, 0) };
        for family in families {
            let ip = places::cluster_ip(family, nobody.number);
            self.add(Position::Pod, tcp(ip, 80), chance);
            self.add(Position::Pod, tcp(places::cluster_ip(family, web.number), UNSERVED), chance);
            self.add(Position::RemotePod, udp(places::cluster_ip(family, web.number), UNSERVED), chance);
            self.add(Position::Endpoint, tcp(places::cluster_ip(family, local.number), 80), chance);
            let vip = places::vip(family, balanced.number);
            for position in [Position::Outside, Position::OutsideBlocked, Position::Node, Position::Pod] {
                self.add(position, tcp(vip, 80), chance);
            }
            self.add(Position::Outside, tcp(vip, UNSERVED), chance);
            for position in [Position::Outside, Position::RemoteNode, Position::Pod] {
                self.add(position, tcp(places::node(family), node_port.ports[0].node_port), chance);
            }
            self.add(Position::NodeVip, tcp(places::local_vip(family), 443), chance);
            self.add(Position::Pod, udp(places::unallocated(family, 9), 53), chance);
            self.add(Position::Outside, tcp(places::unrelated(family), 80), chance);
            self.add(Position::Pod, echo(places::cluster_ip(family, web.number)), chance);
            self.add(Position::Pod, echo(places::node(family)), chance);
            let sctp =
                Target { proto: Proto::Sctp, to: SocketAddr::new(places::cluster_ip(family, services[7].number), 80) };
            self.add(Position::Pod, sctp, chance);
            self.add(Position::Pod, tcp(places::cluster_ip(family, services[8].number), 80), chance);
            for position in [Position::Outside, Position::Pod] {
                self.add(position, tcp(places::vip(family, services[14].number), 8080), chance);
            }
            for rival in services.iter().filter(|s| s.pinned) {
                for ip in rival.external_ips.iter().filter(|ip| IpFamily::of(**ip) == family) {
                    self.add(Position::RemoteNode, tcp(*ip, rival.ports[0].port), chance);
                }
            }
        }
    }
}

/// Everything that can be tried, by kind.
struct Targets {
    /// What Services of this proxy have, served or not.
    frontends: Vec<Target>,
    /// Guards and what lies beside Services.
    beside: Vec<Target>,
    /// Addresses that no proxy should touch.
    elsewhere: Vec<Target>,
}

impl Targets {
    fn of(cluster: &Cluster, chance: &mut Chance) -> Self {
        let mut all = Self { frontends: Vec::new(), beside: Vec::new(), elsewhere: Vec::new() };
        // A few Services with NodePorts, because each port needs servers.
        let with_node_ports: Vec<u16> = cluster
            .services
            .iter()
            .filter(|s| matches!(s.kind, Kind::NodePort | Kind::LoadBalancer))
            .map(|s| s.number)
            .collect();
        let chosen: BTreeSet<u16> = chance.some(&with_node_ports, NODE_PORTS).into_iter().collect();
        for service in cluster.services.iter().filter(|s| s.has_cluster_ip()) {
            all.service(service, chosen.contains(&service.number));
        }
        for family in IpFamily::ALL {
            for proto in [Proto::Tcp, Proto::Udp] {
                for ip in [places::unallocated(family, 1), places::unallocated(family, 250)] {
                    all.beside.push(Target { proto, to: SocketAddr::new(ip, 80) });
                }
                all.elsewhere.push(Target { proto, to: SocketAddr::new(places::unrelated(family), 80) });
                // Endpoints themselves.
                for place in [Place::Pod(1), Place::RemotePod(3), Place::RemoteHost(0), Place::Host] {
                    for port in [8080, 9053] {
                        all.elsewhere.push(Target { proto, to: SocketAddr::new(place.address(family), port) });
                    }
                }
            }
            for ip in [places::unallocated(family, 3), places::unrelated(family), Place::RemotePod(0).address(family)] {
                all.elsewhere.push(Target { proto: Proto::Icmp, to: SocketAddr::new(ip, 0) });
            }
        }
        all
    }

    fn service(&mut self, service: &Service, with_node_ports: bool) {
        for port in &service.ports {
            let proto = match port.protocol {
                Protocol::Tcp => Proto::Tcp,
                Protocol::Udp => Proto::Udp,
                Protocol::Sctp => Proto::Sctp,
            };
            let target = |ip, port| Target { proto, to: SocketAddr::new(ip, port) };
            for family in IpFamily::ALL {
                if let Some(ip) = service.cluster_ip(family) {
                    self.frontends.push(target(ip, port.port));
                    self.beside.push(target(ip, UNSERVED));
                    self.beside.push(Target { proto: Proto::Icmp, to: SocketAddr::new(ip, 0) });
                    // The same port of another protocol.
                    let other = if proto == Proto::Tcp { Proto::Udp } else { Proto::Tcp };
                    self.beside.push(Target { proto: other, to: SocketAddr::new(ip, port.port) });
                }
                for ip in service.external_ips().iter().chain(service.ingress().iter().map(|i| &i.ip)) {
                    if IpFamily::of(*ip) == family {
                        self.frontends.push(target(*ip, port.port));
                        self.beside.push(target(*ip, UNSERVED));
                    }
                }
                let node_port = service.node_port(port);
                if node_port != 0 && with_node_ports {
                    self.frontends.push(target(places::node(family), node_port));
                    for ip in other_node_addresses(family) {
                        self.beside.push(target(ip, node_port));
                    }
                }
            }
        }
    }

    fn any(&self, chance: &mut Chance) -> Target {
        let list = match chance.below(10) {
            0..=5 => &self.frontends,
            6..=8 => &self.beside,
            _ => &self.elsewhere,
        };
        *chance.pick(list)
    }
}

/// Local addresses of the node that may or may not accept NodePorts.
fn other_node_addresses(family: IpFamily) -> [IpAddr; 5] {
    let pick = |(v4, v6): (Ipv4Addr, Ipv6Addr)| if family == IpFamily::V4 { IpAddr::V4(v4) } else { IpAddr::V6(v6) };
    [
        places::second_node(family),
        places::local_vip(family),
        pick(link::UPLINK),
        pick(link::POD),
        pick((Ipv4Addr::LOCALHOST, Ipv6Addr::LOCALHOST)),
    ]
}
