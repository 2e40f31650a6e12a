//! From plans to elements of sets and maps.

use super::affinity;
use super::base::{self, Balancer};
use super::names;
use super::service::{Front, List, Lookup, PortPlan, Route};
use crate::model::{Backend, IpFamily, Protocol};
use crate::nft::object::{BytesBuilder, Data, Key, Name, Ruleset, Value, Verdict};
use ipnet::IpNet;
use std::collections::BTreeMap;
use std::net::IpAddr;

/// The sets and maps that every Service shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SetId {
    /// ClusterIPs.
    ClusterIps,
    /// Addresses that accept NodePort traffic.
    NodeportIps,
    /// Networks of which unallocated ClusterIPs are dropped.
    ServiceCidrs,
    /// Endpoints of this node that may reach themselves.
    HairpinConnections,
    /// Addresses that are filtered by source.
    FirewallIps,
    /// Sources that they permit.
    FirewallSources,
    /// A verdict map for addresses.
    Ips(Lookup),
    /// A verdict map for NodePorts.
    Nodeports(Lookup),
    /// Endpoints of an address, by list.
    Slots(List),
    /// Endpoints of a NodePort, by list.
    NodeportSlots(List),
}

impl SetId {
    /// All of them.
    pub const ALL: [SetId; 18] = [
        SetId::ClusterIps,
        SetId::NodeportIps,
        SetId::ServiceCidrs,
        SetId::HairpinConnections,
        SetId::FirewallIps,
        SetId::FirewallSources,
        SetId::Ips(Lookup::Service),
        SetId::Ips(Lookup::NoEndpoint),
        SetId::Ips(Lookup::ShortCircuit),
        SetId::Ips(Lookup::Local),
        SetId::Nodeports(Lookup::Service),
        SetId::Nodeports(Lookup::NoEndpoint),
        SetId::Nodeports(Lookup::ShortCircuit),
        SetId::Nodeports(Lookup::Local),
        SetId::Slots(List::Cluster),
        SetId::Slots(List::Local),
        SetId::NodeportSlots(List::Cluster),
        SetId::NodeportSlots(List::Local),
    ];

    /// Name in the table.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            SetId::ClusterIps => "cluster-ips",
            SetId::NodeportIps => "nodeport-ips",
            SetId::ServiceCidrs => "service-cidrs",
            SetId::HairpinConnections => "hairpin-connections",
            SetId::FirewallIps => "firewall-ips",
            SetId::FirewallSources => "firewall-sources",
            SetId::Ips(Lookup::Service) => "service-ips",
            SetId::Ips(Lookup::NoEndpoint) => "no-endpoint-services",
            SetId::Ips(Lookup::ShortCircuit) => "short-circuit-ips",
            SetId::Ips(Lookup::Local) => "local-ips",
            SetId::Nodeports(Lookup::Service) => "service-nodeports",
            SetId::Nodeports(Lookup::NoEndpoint) => "no-endpoint-nodeports",
            SetId::Nodeports(Lookup::ShortCircuit) => "short-circuit-nodeports",
            SetId::Nodeports(Lookup::Local) => "local-nodeports",
            SetId::Slots(List::Cluster) => "slots",
            SetId::Slots(List::Local) => "local-slots",
            SetId::NodeportSlots(List::Cluster) => "nodeport-slots",
            SetId::NodeportSlots(List::Local) => "nodeport-local-slots",
        }
    }

    /// Whether a packet looks it up after another map led it to a chain that does so: both look-ups must fit together.
    #[must_use]
    pub fn is_second_lookup(self) -> bool {
        match self {
            SetId::FirewallSources => true,
            SetId::Ips(lookup) | SetId::Nodeports(lookup) => matches!(lookup, Lookup::ShortCircuit | Lookup::Local),
            _ => false,
        }
    }

    /// The verdict map in which `front` is found by `lookup`.
    #[must_use]
    pub fn verdicts(front: Front, lookup: Lookup) -> Self {
        match front {
            Front::Address(..) => SetId::Ips(lookup),
            Front::NodePort(..) => SetId::Nodeports(lookup),
        }
    }

    /// The map with the endpoints of `front`.
    #[must_use]
    pub fn slots(front: Front, list: List) -> Self {
        match front {
            Front::Address(..) => SetId::Slots(list),
            Front::NodePort(..) => SetId::NodeportSlots(list),
        }
    }
}

/// A key that is no range.
#[must_use]
pub fn key(bytes: BytesBuilder) -> Key {
    Key { start: bytes.build(), end: None }
}

fn front_bytes(front: Front) -> BytesBuilder {
    match front {
        Front::Address(address, protocol, port) => BytesBuilder::new().address(address).protocol(protocol).port(port),
        Front::NodePort(protocol, port) => BytesBuilder::new().protocol(protocol).port(port),
    }
}

/// An element of a set of networks, behind the key parts in `prefix`.
fn network(prefix: impl Fn() -> BytesBuilder, network: &IpNet) -> Key {
    Key { start: prefix().address(network.network()).build(), end: Some(prefix().address(network.broadcast()).build()) }
}

/// `address . protocol . port`, `protocol . port`
#[must_use]
pub fn front_key(front: Front) -> Key {
    key(front_bytes(front))
}

/// A network of `service-cidrs`.
#[must_use]
pub fn cidr(cidr: &IpNet) -> Key {
    network(BytesBuilder::new, cidr)
}

/// An address of `cluster-ips` or `nodeport-ips`.
#[must_use]
pub fn address(address: IpAddr) -> Key {
    key(BytesBuilder::new().address(address))
}

/// A slot of a frontend.
#[must_use]
pub fn slot_key(front: Front, number: usize) -> Key {
    // Lists have at most 65,535 endpoints.
    key(front_bytes(front).random(number as u32))
}

/// What a slot maps to.
#[must_use]
pub fn slot_value(address: IpAddr, port: u16) -> Value {
    Value { data: Some(Data::Value(BytesBuilder::new().address(address).port(port).build())), ..Value::default() }
}

/// An element that other Services may need too; counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Shared {
    /// In `cluster-ips`.
    ClusterIp(IpAddr),
    /// In `hairpin-connections`: address, protocol number, port.
    Hairpin(IpAddr, Protocol, u16),
}

impl Shared {
    /// The element.
    #[must_use]
    pub fn element(self) -> (SetId, Key) {
        match self {
            Shared::ClusterIp(ip) => (SetId::ClusterIps, address(ip)),
            Shared::Hairpin(ip, protocol, port) => (
                SetId::HairpinConnections,
                key(BytesBuilder::new().address(ip).address(ip).protocol(protocol).port(port)),
            ),
        }
    }

    /// What a port needs.
    pub fn of(port: &PortPlan) -> impl Iterator<Item = Shared> {
        let hairpin = |backend: &Backend| Shared::Hairpin(backend.address, port.name.protocol, backend.port);
        std::iter::once(Shared::ClusterIp(port.cluster_ip))
            .chain(port.reachable().filter(|backend| backend.local).map(hairpin))
    }
}

/// Where a route leads: the chain, and the balancer if the chain is one.
fn verdict(port: &PortPlan, front: Front, route: Route) -> Verdict {
    match route {
        Route::Balance { list, masquerade } => Verdict::Goto(if port.affinity_timeout_s.is_some() {
            affinity::chain(port, list, masquerade)
        } else {
            Balancer::new(front, list, masquerade).chain(port.list(list).count())
        }),
        Route::ExternalLocal => Verdict::Goto(match front {
            Front::Address(..) => Name::from(base::EXTERNAL_LOCAL),
            Front::NodePort(..) => Name::from(base::NODEPORT_EXTERNAL_LOCAL),
        }),
        Route::Reject => Verdict::Goto(Name::from(base::REJECT_CHAIN)),
        Route::Drop => Verdict::Drop,
    }
}

/// The balancing chains that a port uses, once for every element that leads there.
pub fn balancers(port: &PortPlan) -> impl Iterator<Item = (Balancer, u32)> {
    let routes = if port.affinity_timeout_s.is_some() { Vec::new() } else { port.routes() };
    routes.into_iter().filter_map(|(front, _, route)| match route {
        Route::Balance { list, masquerade } => Some((Balancer::new(front, list, masquerade), port.list(list).count())),
        _ => None,
    })
}

/// The balancing chain to which an element leads.
#[must_use]
pub fn balancer(value: &Value) -> Option<(Balancer, u32)> {
    let Some(Data::Verdict(Verdict::Goto(chain))) = &value.data else { return None };
    Balancer::parse(chain)
}

/// The elements of a port that are its own: verdicts and the firewall. Slots and [`Shared`] ones are not among them.
#[must_use]
pub fn own(port: &PortPlan) -> Vec<(SetId, Key, Value)> {
    let comment = Some(names::comment(&port.name));
    let goto =
        |verdict: Verdict| Value { data: Some(Data::Verdict(verdict)), comment: comment.clone(), expires_ms: None };
    let mut elements = Vec::new();
    for (front, lookup, route) in port.routes() {
        elements.push((SetId::verdicts(front, lookup), front_key(front), goto(verdict(port, front, route))));
    }
    for front in port.filtered() {
        elements.push((SetId::FirewallIps, front_key(front), goto(Verdict::Goto(Name::from(base::FIREWALL)))));
        for source in port.source_ranges.iter().flatten() {
            elements.push((SetId::FirewallSources, network(|| front_bytes(front), source), Value::default()));
        }
    }
    elements
}

/// Whether a service map's element leads to the chains of external policy Local, which look the frontend up once more.
#[must_use]
pub fn leads_to_second_lookup(value: &Value) -> bool {
    matches!(&value.data, Some(Data::Verdict(Verdict::Goto(chain)))
        if [base::EXTERNAL_LOCAL, base::NODEPORT_EXTERNAL_LOCAL].contains(&&**chain))
}

/// The frontends that the service maps of a ruleset know, those without endpoints included; addresses first.
pub fn fronts(ruleset: &Ruleset) -> impl Iterator<Item = Front> {
    let lookups = [Lookup::Service, Lookup::NoEndpoint];
    let maps = lookups.map(SetId::Ips).into_iter().chain(lookups.map(SetId::Nodeports));
    maps.flat_map(move |map| {
        let keys = ruleset.elements.get(map.name()).into_iter().flat_map(BTreeMap::keys);
        keys.filter_map(move |key| Some(parse_front(ruleset.table.family, map, &key.start)?.0))
    })
}

/// The frontend, number and target of an element of a slots map; `None` if it is not one.
#[must_use]
pub fn parse_slot(family: IpFamily, map: SetId, key: &Key, value: &Value) -> Option<(Front, u32, (IpAddr, u16))> {
    let (front, number) = parse_front(family, map, &key.start)?;
    let number = u32::from_ne_bytes(number.try_into().ok()?);
    let Some(Data::Value(data)) = &value.data else { return None };
    let (ip, port) = parse_address(family, data)?;
    Some((front, number, (ip, parse_port(port)?)))
}

/// The frontend with which a key of `map` begins, and the rest of the key.
fn parse_front(family: IpFamily, map: SetId, key: &[u8]) -> Option<(Front, &[u8])> {
    let (ip, rest) = match map {
        SetId::Slots(_) | SetId::Ips(_) => {
            let (ip, rest) = parse_address(family, key)?;
            (Some(ip), rest)
        }
        _ => (None, key),
    };
    let (protocol, rest) = rest.split_at_checked(4)?;
    let protocol = Protocol::from_number(protocol[0])?;
    let (port, rest) = rest.split_at_checked(4)?;
    let port = parse_port(port)?;
    let front = ip.map_or(Front::NodePort(protocol, port), |ip| Front::Address(ip, protocol, port));
    Some((front, rest))
}

fn parse_address(family: IpFamily, bytes: &[u8]) -> Option<(IpAddr, &[u8])> {
    match family {
        IpFamily::V4 => bytes.split_first_chunk::<4>().map(|(ip, rest)| (IpAddr::from(*ip), rest)),
        IpFamily::V6 => bytes.split_first_chunk::<16>().map(|(ip, rest)| (IpAddr::from(*ip), rest)),
    }
}

fn parse_port(bytes: &[u8]) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.first_chunk()?))
}
