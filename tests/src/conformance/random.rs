//! Clusters made at random: a cast that every round needs, and others.

#![forbid(unsafe_code)]

use super::chance::Chance;
use super::objects::{Cluster, Endpoint, Ingress, Kind, Port, Service, Slice, SlicePorts};
use super::places::{self, LOCAL_PODS, Place, REMOTE_HOSTS, REMOTE_PODS};
use proxy::model::{IpFamily, Protocol};
use std::collections::BTreeMap;

/// Zones of the cluster; the node is in the first, where it has one.
pub(super) const ZONES: [&str; 3] = ["zone-a", "zone-b", "zone-c"];
const NAMESPACES: [&str; 4] = ["alpha", "beta", "gamma", "omega"];
/// Target ports. What is named twice in slices is 1000 higher the second time.
const TARGETS: [u16; 4] = [8080, 8443, 9053, 9090];
/// Service ports.
const PORTS: [u16; 5] = [53, 80, 443, 5353, 8080];
/// A port that no Service has.
pub(super) const UNSERVED: u16 = 81;
/// First NodePort. Below the health check ports, above all target ports.
const FIRST_NODE_PORT: u16 = 30_001;

/// Where the endpoints of a Service are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Nobody,
    Local,
    Remote,
    Mixed,
    HostNetwork,
    Many,
}

/// In which conditions endpoints are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mood {
    /// No condition is written.
    Unset,
    Ready,
    /// Each as chance has it.
    Mixed,
    /// All terminating.
    Draining,
    /// None is usable.
    NotReady,
}

/// What topology hints say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hints {
    None,
    Zones,
    Nodes,
    /// Both, or some without any.
    Mixed,
}

impl Shape {
    fn any(chance: &mut Chance) -> Self {
        use Shape::{HostNetwork, Local, Many, Mixed, Nobody, Remote};
        *chance.pick(&[Nobody, Local, Local, Remote, Remote, Mixed, Mixed, Mixed, Mixed, HostNetwork, Many])
    }

    fn places(self, chance: &mut Chance) -> Vec<Place> {
        let local: Vec<Place> = (0..LOCAL_PODS).map(Place::Pod).collect();
        let remote: Vec<Place> = (0..REMOTE_PODS).map(Place::RemotePod).collect();
        let hosts: Vec<Place> = std::iter::once(Place::Host).chain((0..REMOTE_HOSTS).map(Place::RemoteHost)).collect();
        let (few, more) = (chance.between(1, 3), chance.between(1, 4));
        let mut all = match self {
            Self::Nobody => Vec::new(),
            Self::Local => chance.some(&local, few),
            Self::Remote => chance.some(&remote, more),
            Self::Mixed => [chance.some(&local, few.min(2)), chance.some(&remote, more)].concat(),
            Self::HostNetwork => chance.some(&hosts, few),
            Self::Many => {
                let many = chance.between(9, 17);
                [chance.some(&local, few), chance.some(&remote, many)].concat()
            }
        };
        chance.shuffle(&mut all);
        all
    }
}

impl Mood {
    fn any(chance: &mut Chance) -> Self {
        use Mood::{Draining, Mixed, NotReady, Ready, Unset};
        *chance.pick(&[Unset, Ready, Ready, Ready, Mixed, Mixed, Draining, NotReady])
    }

    /// ready, serving, terminating
    pub(super) fn conditions(self, chance: &mut Chance) -> [Option<bool>; 3] {
        const DRAINING: [Option<bool>; 3] = [Some(false), Some(true), Some(true)];
        const GONE: [Option<bool>; 3] = [Some(false), Some(false), Some(true)];
        const STARTING: [Option<bool>; 3] = [Some(false), Some(false), Some(false)];
        // Serving, but not ready and not terminating: never used.
        const ODD: [Option<bool>; 3] = [Some(false), Some(true), Some(false)];
        const READY: [Option<bool>; 3] = [Some(true), Some(true), Some(false)];
        match self {
            Self::Unset => [None; 3],
            Self::Ready => READY,
            Self::Draining => *chance.pick(&[DRAINING, DRAINING, GONE]),
            Self::NotReady => *chance.pick(&[GONE, STARTING, ODD]),
            Self::Mixed => *chance.pick(&[READY, READY, DRAINING, DRAINING, GONE, STARTING, ODD]),
        }
    }
}

impl Hints {
    pub(super) fn any(chance: &mut Chance) -> Self {
        use Hints::{Mixed, Nodes, None, Zones};
        *chance.pick(&[None, None, None, None, Zones, Zones, Nodes, Mixed])
    }

    /// Zones and nodes of one endpoint.
    pub(super) fn of(self, place: Place, chance: &mut Chance) -> (Vec<&'static str>, Vec<&'static str>) {
        let zones = |chance: &mut Chance| {
            let n = chance.between(1, 2);
            chance.some(&ZONES, n)
        };
        let nodes = |_: &mut Chance| {
            vec![if place.is_local() { crate::world::NODE_NAME } else { crate::world::REMOTE_NODE_NAME }]
        };
        match self {
            Self::None => (Vec::new(), Vec::new()),
            Self::Zones => (zones(chance), Vec::new()),
            Self::Nodes => (Vec::new(), nodes(chance)),
            Self::Mixed => {
                let zones = if chance.one_in(4) { Vec::new() } else { zones(chance) };
                (zones, if chance.one_in(2) { Vec::new() } else { nodes(chance) })
            }
        }
    }
}

/// An endpoint at a place.
pub(super) fn endpoint(place: Place, mood: Mood, hints: Hints, chance: &mut Chance) -> Endpoint {
    let [ready, serving, terminating] = mood.conditions(chance);
    let (zones, nodes) = hints.of(place, chance);
    // A local pod without nodeName is not told from a remote one; only remote ones lack it here, as seen from outside.
    let nowhere = !place.is_local() && chance.one_in(8);
    Endpoint { place, nowhere, ready, serving, terminating, zones, nodes, second: chance.one_in(15) }
}

/// What a Service of the cast must be; the rest is left to chance.
#[derive(Clone, Debug)]
struct Wish {
    kind: Kind,
    shape: Shape,
    mood: Mood,
    hints: Hints,
    /// Plain: nothing that narrows or adds, and both families.
    plain: bool,
}

impl Wish {
    fn any(chance: &mut Chance) -> Self {
        use Kind::{ClusterIp, ExternalName, Headless, LoadBalancer, NodePort};
        let kinds = [
            ClusterIp,
            ClusterIp,
            ClusterIp,
            ClusterIp,
            ClusterIp,
            NodePort,
            NodePort,
            NodePort,
            LoadBalancer,
            LoadBalancer,
            LoadBalancer,
            LoadBalancer,
            LoadBalancer,
            Headless,
            ExternalName,
        ];
        Self {
            kind: *chance.pick(&kinds),
            shape: Shape::any(chance),
            mood: Mood::any(chance),
            hints: Hints::any(chance),
            plain: false,
        }
    }

    fn plain(kind: Kind, shape: Shape) -> Self {
        Self { kind, shape, mood: Mood::Ready, hints: Hints::None, plain: true }
    }
}

/// The first state of a cluster.
pub(super) fn cluster(chance: &mut Chance) -> Cluster {
    let mut cluster = Cluster {
        // kube-proxy v1.37 may miss the zone that its Node has when it starts: its handler is registered after the informer
        // began to deliver (`NewNodeTopologyConfig`, then `RegisterEventHandler`). It does not miss a change.
        zone: None,
        services: Vec::new(),
        next_number: 2,
        next_node_port: FIRST_NODE_PORT,
    };
    cast(&mut cluster, chance);
    for _ in 0..chance.between(6, 18) {
        add(&mut cluster, chance);
    }
    if chance.one_in(4) {
        rivals(&mut cluster, chance);
    }
    cluster.untangle();
    cluster
}

/// Adds any Service.
pub(super) fn add(cluster: &mut Cluster, chance: &mut Chance) {
    let wish = Wish::any(chance);
    let service = service(cluster, wish, chance);
    cluster.services.push(service);
}

/// One Service of each kind without which a class of outcomes could be missing.
fn cast(cluster: &mut Cluster, chance: &mut Chance) {
    let tcp = |name: &str, port, target| (name.to_string(), Protocol::Tcp, port, target);
    let udp = |name: &str, port, target| (name.to_string(), Protocol::Udp, port, target);
    let mut put = |wish: Wish, ports: &[(String, Protocol, u16, u16)], change: &dyn Fn(&mut Service)| {
        let mut service = service(cluster, wish, chance);
        if !ports.is_empty() {
            service.ports = ports
                .iter()
                .map(|(name, protocol, port, target)| {
                    let node_port = cluster.next_node_port;
                    cluster.next_node_port += 1;
                    Port { name: name.clone(), protocol: *protocol, port: *port, node_port, target: *target }
                })
                .collect();
        }
        change(&mut service);
        cluster.services.push(service);
    };
    let web = [tcp("http", 80, 8080), udp("dns", 53, 9053)];
    put(Wish::plain(Kind::ClusterIp, Shape::Mixed), &web, &|_| {});
    put(Wish::plain(Kind::ClusterIp, Shape::Nobody), &[tcp("", 80, 8080)], &|_| {});
    put(Wish::plain(Kind::ClusterIp, Shape::Local), &web, &|s| hairpin(s));
    put(Wish::plain(Kind::NodePort, Shape::Mixed), &web, &|_| {});
    put(Wish::plain(Kind::LoadBalancer, Shape::Mixed), &web, &|s| {
        s.ranges = vec!["203.0.113.0/25", "2600:5200::/48"];
    });
    put(Wish::plain(Kind::LoadBalancer, Shape::Remote), &[tcp("", 443, 8443)], &|s| s.external_local = true);
    put(Wish::plain(Kind::LoadBalancer, Shape::Mixed), &[tcp("", 443, 8443)], &|s| {
        s.ingress = IpFamily::ALL.map(|f| Ingress { ip: places::local_vip(f), proxy: false }).to_vec();
        s.ranges = vec!["192.168.0.0/24", "2001:db8::/64"];
    });
    put(Wish::plain(Kind::ClusterIp, Shape::Mixed), &[("".into(), Protocol::Sctp, 80, 9090)], &|_| {});
    put(Wish::plain(Kind::ClusterIp, Shape::Mixed), &web, &|s| s.affinity = Some(600));
    put(Wish::plain(Kind::ClusterIp, Shape::Remote), &[tcp("", 80, 8080)], &|s| s.internal_local = true);
    put(Wish::plain(Kind::ClusterIp, Shape::Mixed), &[tcp("", 8080, 8080)], &|s| {
        s.external_ips = IpFamily::ALL.map(|f| places::external_ip(f, s.number)).to_vec();
    });
    put(Wish::plain(Kind::Headless, Shape::Mixed), &web, &|_| {});
    put(Wish::plain(Kind::ExternalName, Shape::Nobody), &[], &|_| {});
    put(Wish::plain(Kind::ClusterIp, Shape::Mixed), &web, &|s| s.other_proxy = true);
    put(Wish::plain(Kind::LoadBalancer, Shape::Mixed), &[tcp("", 8080, 8443)], &|s| s.external_local = true);
}

/// The pod from which endpoints send is an endpoint of it.
fn hairpin(service: &mut Service) {
    for slice in &mut service.slices {
        if let Some(first) = slice.endpoints.first_mut() {
            first.place = Place::Pod(0);
        }
        // It may have been there already.
        let mut seen = std::collections::BTreeSet::new();
        slice.endpoints.retain(|e| seen.insert(e.place));
    }
}

/// Services that claim what another has: the one its ClusterIP, the other its external IP. Which of them kube-proxy serves is
/// chance, so they are plain, have endpoints that tell them apart, and stay as they are.
fn rivals(cluster: &mut Cluster, chance: &mut Chance) {
    let mut make = |cluster: &mut Cluster, namespace, remote: std::ops::Range<u16>, external: Option<u16>| {
        let mut service = service(cluster, Wish::plain(Kind::ClusterIp, Shape::Nobody), chance);
        service.namespace = namespace;
        service.pinned = true;
        service.ports =
            vec![Port { name: String::new(), protocol: Protocol::Tcp, port: 5000, node_port: 0, target: 8080 }];
        service.slices = IpFamily::ALL
            .into_iter()
            .zip(1..)
            .map(|(family, number)| Slice {
                number,
                family: Some(family),
                ports: SlicePorts::Plus(0),
                endpoints: remote
                    .clone()
                    .map(|n| endpoint(Place::RemotePod(n), Mood::Ready, Hints::None, chance))
                    .map(|e| Endpoint { nowhere: false, ..e })
                    .collect(),
                headless_label: false,
            })
            .collect();
        service.next_slice = 3;
        service.external_ips = external
            .map(|of| {
                IpFamily::ALL.map(|f| if of == 0 { places::rivalled(f) } else { places::cluster_ip(f, of) }).to_vec()
            })
            .unwrap_or_default();
        cluster.services.push(service);
        cluster.services.last().expect("pushed above").number
    };
    let owner = make(cluster, "omega", 0..2, None);
    make(cluster, "alpha", 2..4, Some(owner));
    make(cluster, "beta", 4..6, Some(0));
    make(cluster, "gamma", 6..8, Some(0));
}

fn service(cluster: &mut Cluster, wish: Wish, chance: &mut Chance) -> Service {
    let number = cluster.next_number;
    cluster.next_number += 1;
    let families = match chance.below(if wish.plain { 2 } else { 6 }) {
        0 | 2 => vec![IpFamily::V4, IpFamily::V6],
        1 => vec![IpFamily::V6, IpFamily::V4],
        3 => vec![IpFamily::V6],
        _ => vec![IpFamily::V4],
    };
    let mut service = Service {
        namespace: NAMESPACES[chance.below(NAMESPACES.len())],
        name: format!("svc-{number}"),
        kind: wish.kind,
        families,
        number,
        ports: Vec::new(),
        internal_local: false,
        external_local: false,
        affinity: None,
        external_ips: Vec::new(),
        ingress: IpFamily::ALL.map(|f| Ingress { ip: places::vip(f, number), proxy: false }).to_vec(),
        ranges: Vec::new(),
        allocate_node_ports: true,
        other_proxy: false,
        headless_label: false,
        publish_not_ready: false,
        distribution: None,
        slices: Vec::new(),
        next_slice: 1,
        pinned: false,
    };
    for _ in 0..if wish.plain { 1 } else { chance.between(1, 3) } {
        add_port(&mut service, &mut cluster.next_node_port, chance);
    }
    if !wish.plain {
        service.internal_local = chance.one_in(5);
        service.external_local = chance.one_in(3);
        service.affinity = chance.one_in(5).then(|| timeout(chance));
        service.external_ips = external_ips(number, chance);
        service.ingress = ingress(number, chance);
        service.ranges = if chance.one_in(2) { ranges(chance) } else { Vec::new() };
        service.allocate_node_ports = !chance.one_in(4);
        service.other_proxy = chance.one_in(16);
        service.headless_label = chance.one_in(12);
        service.publish_not_ready = chance.one_in(8);
        service.distribution =
            chance.one_in(6).then(|| *chance.pick(&["PreferClose", "PreferSameZone", "PreferSameNode"]));
    }
    if service.kind != Kind::ExternalName {
        slices(&mut service, &wish, chance);
    }
    service
}

/// An affinity timeout that does not end within a round.
pub(super) fn timeout(chance: &mut Chance) -> u32 {
    *chance.pick(&[600, 1800, 10_800, 86_400])
}

/// Adds a port that the Service does not have yet; often the same number for TCP and UDP, also as NodePort.
pub(super) fn add_port(service: &mut Service, next_node_port: &mut u16, chance: &mut Chance) {
    let mut protocol =
        *chance.pick(&[Protocol::Tcp, Protocol::Tcp, Protocol::Tcp, Protocol::Udp, Protocol::Udp, Protocol::Sctp]);
    let mut port = *chance.pick(&PORTS);
    let mut node_port = None;
    if let Some(twin) = service.ports.first()
        && chance.one_in(3)
        && twin.protocol != Protocol::Sctp
    {
        protocol = if twin.protocol == Protocol::Tcp { Protocol::Udp } else { Protocol::Tcp };
        port = twin.port;
        node_port = Some(twin.node_port);
    }
    let taken = |all: &[Port], node_port: u16| {
        all.iter().any(|p| p.protocol == protocol && (p.port == port || p.node_port == node_port))
    };
    let node_port = node_port.unwrap_or(*next_node_port);
    if taken(&service.ports, node_port) {
        return;
    }
    if node_port == *next_node_port {
        *next_node_port += 1;
    }
    // Only a single port may go without a name, and it takes that name for as long as there are others.
    let name = if service.ports.is_empty() && chance.one_in(2) { String::new() } else { free_name(service) };
    service.ports.push(Port { name, protocol, port, node_port, target: *chance.pick(&TARGETS) });
    if service.ports.len() > 1 && service.ports[0].name.is_empty() {
        service.ports[0].name = free_name(service);
    }
}

fn free_name(service: &Service) -> String {
    let mut names = (0..).map(|n| format!("p{n}"));
    names.find(|name| service.ports.iter().all(|p| p.name != *name)).expect("there are more names than ports")
}

/// External IPs of both families, whatever the Service has: those of the other do nothing.
pub(super) fn external_ips(number: u16, chance: &mut Chance) -> Vec<std::net::IpAddr> {
    match chance.below(8) {
        0 | 1 => IpFamily::ALL.map(|f| places::external_ip(f, number)).to_vec(),
        2 => vec![places::external_ip(IpFamily::V6, number)],
        // An address of the node itself.
        3 => IpFamily::ALL.map(places::second_node).to_vec(),
        // The load balancer's address once more.
        4 if chance.one_in(2) => IpFamily::ALL.map(|f| places::vip(f, number)).to_vec(),
        _ => Vec::new(),
    }
}

/// Load balancer addresses.
pub(super) fn ingress(number: u16, chance: &mut Chance) -> Vec<Ingress> {
    let vips = |proxy| IpFamily::ALL.map(|f| Ingress { ip: places::vip(f, number), proxy }).to_vec();
    match chance.below(10) {
        0 => Vec::new(),
        1 => vips(true),
        2 => IpFamily::ALL.map(|f| Ingress { ip: places::local_vip(f), proxy: false }).to_vec(),
        3 => [vips(false), IpFamily::ALL.map(|f| Ingress { ip: places::vip(f, number + 100), proxy: true }).to_vec()]
            .concat(),
        4 => [vips(false), IpFamily::ALL.map(|f| Ingress { ip: places::vip(f, number + 100), proxy: false }).to_vec()]
            .concat(),
        _ => vips(false),
    }
}

/// Source ranges of all sorts.
pub(super) fn ranges(chance: &mut Chance) -> Vec<&'static str> {
    chance
        .pick(&[
            vec!["203.0.113.0/25", "2600:5200::/48"],
            vec!["203.0.113.0/25"],
            vec!["2600:5200::/48"],
            // Overlapping, and one inside of another.
            vec!["203.0.113.0/24", "203.0.113.0/25", "203.0.113.2/32", "10.0.0.0/8", "10.0.0.0/16", "fd00:10::/64"],
            // Neighbours.
            vec!["203.0.113.0/26", "203.0.113.64/26", "2600:5200::/49", "2600:5200:0:8000::/49"],
            // Everybody in one family.
            vec!["0.0.0.0/0", "2600:5200::/48"],
            vec!["::/0", "203.0.113.128/25"],
            // With the node's own address.
            vec!["192.168.0.0/24", "203.0.113.0/25", "2001:db8::/64"],
            // Halves that make a whole.
            vec!["0.0.0.0/1", "128.0.0.0/1", "::/1"],
        ])
        .clone()
}

fn slices(service: &mut Service, wish: &Wish, chance: &mut Chance) {
    let places = wish.shape.places(chance);
    // Dual-stack pods: the same endpoints in both families.
    let endpoints: Vec<Endpoint> = places.iter().map(|place| endpoint(*place, wish.mood, wish.hints, chance)).collect();
    let add = |service: &mut Service, family, ports, endpoints, headless_label| {
        let number = service.next_slice;
        service.next_slice += 1;
        service.slices.push(Slice { number, family, ports, endpoints, headless_label });
    };
    for family in service.families.clone() {
        let parts = if wish.plain { 1 } else { chance.between(1, 3) };
        let mut split: Vec<Vec<Endpoint>> = vec![Vec::new(); parts];
        for endpoint in &endpoints {
            let part = chance.below(parts);
            split[part].push(endpoint.clone());
        }
        for part in split {
            let more = if !wish.plain && chance.one_in(8) { 1000 } else { 0 };
            add(service, Some(family), SlicePorts::Plus(more), part, false);
        }
    }
    if wish.plain || endpoints.is_empty() {
        return;
    }
    let family = service.families[0];
    let again = |chance: &mut Chance| {
        let n = chance.between(1, 2);
        chance.some(&endpoints, n)
    };
    if chance.one_in(4) {
        // The same endpoints again, alike.
        let copies = again(chance);
        add(service, Some(family), SlicePorts::Plus(0), copies, false);
    } else if chance.one_in(4) {
        // Once more as terminating, where the first is not: the first stands.
        let first = again(chance).into_iter().filter(|e| !e.conditions().2);
        let copies =
            first.map(|e| Endpoint { ready: Some(false), serving: Some(true), terminating: Some(true), ..e }).collect();
        add(service, Some(family), SlicePorts::Plus(0), copies, false);
    }
    let mut strangers = |odds: usize, family, ports, headless_label, chance: &mut Chance| {
        if chance.one_in(odds) {
            let place = *chance.pick(&[Place::RemotePod(20), Place::RemotePod(21), Place::Pod(3)]);
            let stranger = endpoint(place, Mood::Ready, wish.hints, chance);
            add(service, family, ports, vec![stranger], headless_label);
        }
    };
    strangers(8, Some(family), SlicePorts::Foreign, false, chance);
    strangers(10, Some(family), SlicePorts::All, false, chance);
    strangers(10, None, SlicePorts::Plus(0), false, chance);
    strangers(10, Some(family), SlicePorts::Plus(0), true, chance);
    let other = if family == IpFamily::V4 { IpFamily::V6 } else { IpFamily::V4 };
    strangers(10, Some(other), SlicePorts::Plus(0), false, chance);
    align(service, wish.hints, chance);
}

/// Makes endpoints with the same place alike, but for a terminating copy of one that is not: of two that differ in another way
/// kube-proxy takes one by chance.
pub(super) fn align(service: &mut Service, hints: Hints, chance: &mut Chance) {
    let mut first: BTreeMap<Place, Endpoint> = BTreeMap::new();
    for endpoint in service.slices.iter_mut().flat_map(|s| &mut s.endpoints) {
        let model = first.entry(endpoint.place).or_insert_with(|| {
            let (zones, nodes) = hints.of(endpoint.place, chance);
            Endpoint { zones, nodes, ..endpoint.clone() }
        });
        let is_copy_that_ends = endpoint.conditions().2 && !model.conditions().2;
        let conditions = if is_copy_that_ends { endpoint.clone() } else { model.clone() };
        let Endpoint { ready, serving, terminating, .. } = conditions;
        *endpoint = Endpoint { ready, serving, terminating, ..model.clone() };
    }
}
