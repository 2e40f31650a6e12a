//! The part of the table that does not depend on Services: base chains, the chains behind them, sets and maps.
//!
//! What each rule does to a packet is kube-proxy v1.37's `setupNFTables` (`pkg/proxy/nftables`); the base chains have the hooks and
//! priorities of kube-proxy up to v1.33, so that firewalls that operators wrote around it go on working.

use super::elements::{self, SetId};
use super::service::{Front, List, Lookup};
use crate::model::{IpFamily, LocalDetector, NodePortAddresses, Protocol, Settings};
use crate::nft::expr::{Direction, Expr, Load};
use crate::nft::object::{
    BaseChain, Chain, ChainType, Field, Hook, MapData, Name, Rule, Ruleset, Set, TableId, Value, Verdict,
};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Name of the table of either family.
pub const TABLE: &str = "tandem";
/// Comment of the table.
pub const TABLE_COMMENT: &str = "rules of the Tandem service proxy";

/// Chain of addresses with external traffic policy Local.
pub const EXTERNAL_LOCAL: &str = "external-local";
/// Chain of NodePorts with external traffic policy Local.
pub const NODEPORT_EXTERNAL_LOCAL: &str = "nodeport-external-local";
/// Chain that rejects; a map holds no reject.
pub const REJECT_CHAIN: &str = "reject-chain";
/// Chain of filtered addresses.
pub const FIREWALL: &str = "firewall";

const SERVICES: &str = "services";
const FIREWALL_CHECK: &str = "firewall-check";
const SERVICE_ENDPOINTS_CHECK: &str = "service-endpoints-check";
const NODEPORT_ENDPOINTS_CHECK: &str = "nodeport-endpoints-check";
const CLUSTER_IPS_CHECK: &str = "cluster-ips-check";
const MASQUERADING: &str = "masquerading";
/// Not `masquerade`: nft(8) does not take back a chain with the name of a statement.
const MASQUERADE: &str = "masquerade-source";

/// Ports that masquerade takes first: above the default NodePort range (30000–32767), so that a connection of this node never
/// has the source port of a NodePort.
const MASQUERADE_PORTS: (u16, u16) = (32_768, 65_535);

/// `NF_IP_PRI_NAT_DST`
const DSTNAT: i32 = -100;
/// `NF_IP_PRI_NAT_SRC`
const SRCNAT: i32 = 100;

/// Longest interface name (Linux: `IFNAMSIZ` less the final zero).
const LONGEST_INTERFACE: usize = 15;

/// The table of a family.
#[must_use]
pub fn table(family: IpFamily) -> TableId {
    TableId { family, name: TABLE.into() }
}

fn rule(exprs: impl IntoIterator<Item = Expr>) -> Rule {
    Rule { exprs: exprs.into_iter().collect(), comment: None }
}

fn commented(exprs: impl IntoIterator<Item = Expr>, comment: &str) -> Rule {
    Rule { comment: Some(comment.to_owned()), ..rule(exprs) }
}

/// `jump CHAIN`
fn jump(chain: &str) -> Expr {
    Expr::Verdict(Verdict::Jump(chain.into()))
}

/// `goto CHAIN`
#[must_use]
pub fn goto(chain: impl Into<Name>) -> Expr {
    Expr::Verdict(Verdict::Goto(chain.into()))
}

fn in_set(loads: &[Load], set: SetId) -> Expr {
    Expr::InSet { loads: loads.into(), set: set.name().into(), negate: false }
}

fn vmap(loads: &[Load], map: SetId) -> Expr {
    Expr::VerdictMap { loads: loads.into(), map: map.name().into() }
}

/// `daddr . l4proto . dport`
const BY_ADDRESS: [Load; 3] = [Load::DestinationAddress, Load::L4Protocol, Load::DestinationPort];
/// `l4proto . dport`
const BY_PORT: [Load; 2] = [Load::L4Protocol, Load::DestinationPort];

/// The networks that are never NodePort addresses.
fn loopback(family: IpFamily) -> IpNet {
    match family {
        IpFamily::V4 => IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8)),
        IpFamily::V6 => IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::LOCALHOST, 128)),
    }
}

/// The match that tells whether a packet comes from a pod of this node. `None`: there is no detector.
/// An empty list of expressions matches everything.
struct LocalSource {
    is: Option<Expr>,
    is_not: Vec<Expr>,
}

fn local_source(detector: &LocalDetector) -> Option<LocalSource> {
    let both = |is: &dyn Fn(bool) -> Expr| Some(LocalSource { is: Some(is(false)), is_not: vec![is(true)] });
    let interface = |name: &Name, prefix: bool| {
        if name.len() > LONGEST_INTERFACE {
            // No interface has such a name: nothing is local. The kernel would refuse the rule.
            return Some(LocalSource { is: None, is_not: Vec::new() });
        }
        both(&|negate| Expr::InputInterface { name: name.clone(), prefix, negate })
    };
    match detector {
        LocalDetector::None => None,
        LocalDetector::Cidr(network) => {
            both(&|negate| Expr::InNetwork { direction: Direction::Source, network: *network, negate })
        }
        LocalDetector::Interface(name) => interface(name, false),
        LocalDetector::InterfacePrefix(name) => interface(name, true),
    }
}

/// Conditions for a packet to be addressed to a NodePort address.
fn to_nodeport_address(settings: &Settings, need_fib: bool) -> Vec<Expr> {
    match settings.node_port_addresses {
        NodePortAddresses::All => {
            let not_loopback =
                Expr::InNetwork { direction: Direction::Destination, network: loopback(settings.family), negate: true };
            let fib = need_fib.then_some(Expr::FibLocal(Direction::Destination));
            fib.into_iter().chain([not_loopback]).collect()
        }
        NodePortAddresses::Only(_) => vec![in_set(&[Load::DestinationAddress], SetId::NodeportIps)],
    }
}

fn base_chain(chain_type: ChainType, hook: Hook, priority: i32, rules: Vec<Rule>) -> Chain {
    Chain { base: Some(BaseChain { chain_type, hook, priority }), comment: None, rules }
}

/// A filter chain that jumps for new connections.
fn filter(hook: Hook, priority: i32, checks: &[&str]) -> Chain {
    let rules = checks.iter().map(|check| rule([Expr::CtStateNew, jump(check)])).collect();
    base_chain(ChainType::Filter, hook, priority, rules)
}

/// A connection that was translated is not asked for endpoints again: its destination is an endpoint now. If that is on an
/// address of this node, it may have the number of a NodePort that has none. (kube-proxy v1.37 rejects it there.)
fn translated() -> Rule {
    commented([Expr::CtStatusDnat, Expr::Verdict(Verdict::Return)], "already sent to an endpoint")
}

fn services_rules(settings: &Settings) -> Vec<Rule> {
    let mut rules = Vec::new();
    let mark = Expr::MarkSet(settings.masquerade_mark);
    let to_cluster_ip = in_set(&[Load::DestinationAddress], SetId::ClusterIps);
    if settings.masquerade_all {
        rules.push(commented([to_cluster_ip, mark], "masquerade all clusterIP traffic"));
    } else if let Some(source) = local_source(&settings.detector) {
        rules.push(commented(
            [to_cluster_ip].into_iter().chain(source.is_not).chain([mark]),
            "masquerade clusterIP traffic from outside cluster",
        ));
    }
    rules.push(rule([vmap(&BY_ADDRESS, SetId::Ips(Lookup::Service))]));
    rules.push(rule(
        to_nodeport_address(settings, true).into_iter().chain([vmap(&BY_PORT, SetId::Nodeports(Lookup::Service))]),
    ));
    rules
}

fn external_local_rules(settings: &Settings, loads: &[Load], id: fn(Lookup) -> SetId) -> Vec<Rule> {
    let short_circuit = || vmap(loads, id(Lookup::ShortCircuit));
    let mut rules = Vec::new();
    if let Some(is_local) = local_source(&settings.detector).and_then(|source| source.is) {
        rules.push(commented([is_local, short_circuit()], "short-circuit pod traffic"));
    }
    let from_node = Expr::FibLocal(Direction::Source);
    rules.push(commented([from_node.clone(), Expr::MarkSet(settings.masquerade_mark)], "masquerade local traffic"));
    rules.push(commented([from_node, short_circuit()], "short-circuit local traffic"));
    rules.push(rule([vmap(loads, id(Lookup::Local))]));
    rules
}

fn masquerading_rules(settings: &Settings) -> Vec<Rule> {
    let mark = settings.masquerade_mark;
    let hairpin = [Load::SourceAddress, Load::DestinationAddress, Load::L4Protocol, Load::DestinationPort];
    vec![
        rule([Expr::MarkHas(mark), Expr::MarkToggle(mark), goto(MASQUERADE)]),
        rule([Expr::CtStatusDnat, in_set(&hairpin, SetId::HairpinConnections), goto(MASQUERADE)]),
    ]
}

fn masquerade_rules() -> Vec<Rule> {
    let high_port = |protocol| rule([Expr::L4Proto(protocol), Expr::Masquerade { ports: Some(MASQUERADE_PORTS) }]);
    let mut rules: Vec<Rule> = Protocol::ALL.into_iter().map(high_port).collect();
    rules.push(rule([Expr::Masquerade { ports: None }]));
    rules
}

fn chains(settings: &Settings) -> BTreeMap<Name, Chain> {
    use {
        ChainType::Filter, ChainType::Nat, Hook::Forward, Hook::Input, Hook::Output, Hook::Postrouting,
        Hook::Prerouting,
    };
    let mark = settings.masquerade_mark;
    let plain = |rules| Chain { rules, ..Chain::default() };
    let nodeport_check = vmap(&BY_PORT, SetId::Nodeports(Lookup::NoEndpoint));
    let sources = Expr::InSet {
        loads: BY_ADDRESS.into_iter().chain([Load::SourceAddress]).collect(),
        set: SetId::FirewallSources.name().into(),
        negate: true,
    };
    let to = [Load::DestinationAddress];
    [
        ("filter-prerouting", filter(Prerouting, DSTNAT - 10, &[FIREWALL_CHECK])),
        ("filter-input", filter(Input, DSTNAT - 10, &[NODEPORT_ENDPOINTS_CHECK, SERVICE_ENDPOINTS_CHECK])),
        ("filter-forward", filter(Forward, DSTNAT - 10, &[SERVICE_ENDPOINTS_CHECK, CLUSTER_IPS_CHECK])),
        ("filter-output", filter(Output, DSTNAT - 10, &[FIREWALL_CHECK])),
        // The endpoints check comes after DNAT here: a process of the node that is short-circuited to a remote endpoint
        // (external policy Local) is translated by then, and is not dropped.
        ("filter-output-post-dnat", filter(Output, DSTNAT + 10, &[SERVICE_ENDPOINTS_CHECK, CLUSTER_IPS_CHECK])),
        ("nat-prerouting", base_chain(Nat, Prerouting, DSTNAT, vec![rule([jump(SERVICES)])])),
        ("nat-output", base_chain(Nat, Output, DSTNAT, vec![rule([jump(SERVICES)])])),
        ("nat-postrouting", base_chain(Nat, Postrouting, SRCNAT, vec![rule([jump(MASQUERADING)])])),
        // NAT chains see the first packet of a connection only; a mark that is set elsewhere on every packet is cleared here.
        (
            "filter-postrouting-mark",
            base_chain(Filter, Postrouting, SRCNAT + 1, vec![rule([Expr::MarkHas(mark), Expr::MarkToggle(mark)])]),
        ),
        (SERVICES, plain(services_rules(settings))),
        (FIREWALL_CHECK, plain(vec![rule([vmap(&BY_ADDRESS, SetId::FirewallIps)])])),
        (
            FIREWALL,
            plain(vec![commented(
                [sources, Expr::Verdict(Verdict::Drop)],
                "drop what loadBalancerSourceRanges do not permit",
            )]),
        ),
        (SERVICE_ENDPOINTS_CHECK, plain(vec![translated(), rule([vmap(&BY_ADDRESS, SetId::Ips(Lookup::NoEndpoint))])])),
        // No fib test: in the input hook the destination is local.
        (
            NODEPORT_ENDPOINTS_CHECK,
            plain(vec![translated(), rule(to_nodeport_address(settings, false).into_iter().chain([nodeport_check]))]),
        ),
        (
            CLUSTER_IPS_CHECK,
            plain(vec![
                commented(
                    [in_set(&to, SetId::ClusterIps), Expr::Reject],
                    "Reject traffic to invalid ports of ClusterIPs",
                ),
                commented(
                    [in_set(&to, SetId::ServiceCidrs), Expr::Verdict(Verdict::Drop)],
                    "Drop traffic to unallocated ClusterIPs",
                ),
            ]),
        ),
        (
            REJECT_CHAIN,
            Chain {
                comment: Some("helper for @no-endpoint-services / @no-endpoint-nodeports".to_owned()),
                ..plain(vec![rule([Expr::Reject])])
            },
        ),
        (MASQUERADING, plain(masquerading_rules(settings))),
        (MASQUERADE, plain(masquerade_rules())),
        (EXTERNAL_LOCAL, plain(external_local_rules(settings, &BY_ADDRESS, SetId::Ips))),
        (NODEPORT_EXTERNAL_LOCAL, plain(external_local_rules(settings, &BY_PORT, SetId::Nodeports))),
    ]
    .into_iter()
    .map(|(name, chain)| (name.into(), chain))
    .collect()
}

/// The definition of a shared set.
#[must_use]
pub fn set(id: SetId) -> Set {
    use Field::{Address, Port, Protocol, Random};
    let set = |key: &[Field], comment: &str| Set {
        key: key.into(),
        data: None,
        interval: false,
        dynamic_timeout_ms: None,
        size: None,
        comment: Some(comment.to_owned()),
        delete_late: false,
    };
    let interval = |set: Set| Set { interval: true, ..set };
    let verdicts = |set: Set| Set { data: Some(MapData::Verdict), ..set };
    let slots = |set: Set| Set { data: Some(MapData::Value(vec![Address, Port])), delete_late: true, ..set };
    let ips = [Address, Protocol, Port];
    let nodeports = [Protocol, Port];
    match id {
        SetId::ClusterIps => set(&[Address], "Active ClusterIPs"),
        SetId::NodeportIps => set(&[Address], "IPs that accept NodePort traffic"),
        SetId::ServiceCidrs => interval(set(&[Address], "Networks of ClusterIPs")),
        SetId::HairpinConnections => set(&[Address, Address, Protocol, Port], "service hairpin connections"),
        SetId::FirewallIps => verdicts(set(&ips, "destinations that are subject to LoadBalancerSourceRanges")),
        SetId::FirewallSources => {
            interval(set(&[Address, Protocol, Port, Address], "sources that LoadBalancerSourceRanges permit"))
        }
        SetId::Ips(Lookup::Service) => verdicts(set(&ips, "ClusterIP, ExternalIP and LoadBalancer IP traffic")),
        SetId::Ips(Lookup::NoEndpoint) => {
            verdicts(set(&ips, "vmap to drop or reject packets to services with no endpoints"))
        }
        SetId::Ips(Lookup::ShortCircuit) => {
            verdicts(set(&ips, "external policy Local: traffic from this node and its pods"))
        }
        SetId::Ips(Lookup::Local) => verdicts(set(&ips, "external policy Local: other traffic")),
        SetId::Nodeports(Lookup::Service) => verdicts(set(&nodeports, "NodePort traffic")),
        SetId::Nodeports(Lookup::NoEndpoint) => {
            verdicts(set(&nodeports, "vmap to drop or reject packets to service nodeports with no endpoints"))
        }
        SetId::Nodeports(Lookup::ShortCircuit) => {
            verdicts(set(&nodeports, "external policy Local: traffic from this node and its pods"))
        }
        SetId::Nodeports(Lookup::Local) => verdicts(set(&nodeports, "external policy Local: other traffic")),
        SetId::Slots(List::Cluster) => slots(set(&[Address, Protocol, Port, Random], "endpoints of services")),
        SetId::Slots(List::Local) => {
            slots(set(&[Address, Protocol, Port, Random], "endpoints of services on this node"))
        }
        SetId::NodeportSlots(List::Cluster) => slots(set(&[Protocol, Port, Random], "endpoints of NodePorts")),
        SetId::NodeportSlots(List::Local) => {
            slots(set(&[Protocol, Port, Random], "endpoints of NodePorts on this node"))
        }
    }
}

/// The fixed part: chains with rules, sets, and the elements that follow from settings and ServiceCIDRs.
#[must_use]
pub fn ruleset(settings: &Settings, service_cidrs: &[IpNet]) -> Ruleset {
    let mut sets = BTreeMap::new();
    let mut elements: BTreeMap<Name, BTreeMap<_, Value>> = BTreeMap::new();
    for id in SetId::ALL {
        let content: Vec<_> = match (id, &settings.node_port_addresses) {
            (SetId::NodeportIps, NodePortAddresses::All) => continue,
            (SetId::NodeportIps, NodePortAddresses::Only(addresses)) => {
                let usable = |ip: &&IpAddr| IpFamily::of(**ip) == settings.family;
                addresses.iter().filter(usable).map(|ip| elements::address(*ip)).collect()
            }
            (SetId::ServiceCidrs, _) => {
                let mine: Vec<IpNet> =
                    service_cidrs.iter().filter(|cidr| IpFamily::of(cidr.addr()) == settings.family).copied().collect();
                IpNet::aggregate(&mine).iter().map(elements::cidr).collect()
            }
            _ => Vec::new(),
        };
        sets.insert(id.name().into(), set(id));
        if !content.is_empty() {
            elements.insert(id.name().into(), content.into_iter().map(|key| (key, Value::default())).collect());
        }
    }
    Ruleset {
        table: table(settings.family),
        comment: Some(TABLE_COMMENT.to_owned()),
        chains: chains(settings),
        sets,
        elements,
    }
}

/// A kind of balancing chain; there is one for each number of endpoints in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Balancer {
    nodeport: bool,
    list: List,
    masquerade: bool,
}

impl Balancer {
    /// The balancer to which a frontend goes.
    #[must_use]
    pub fn new(front: Front, list: List, masquerade: bool) -> Self {
        Self { nodeport: matches!(front, Front::NodePort(..)), list, masquerade }
    }

    /// All kinds with their names, less `-N`.
    const KINDS: [(&'static str, Balancer); 6] = [
        ("endpoints", Balancer { nodeport: false, list: List::Cluster, masquerade: false }),
        ("masquerade-endpoints", Balancer { nodeport: false, list: List::Cluster, masquerade: true }),
        ("local-endpoints", Balancer { nodeport: false, list: List::Local, masquerade: false }),
        ("nodeport-endpoints", Balancer { nodeport: true, list: List::Cluster, masquerade: false }),
        ("nodeport-masquerade-endpoints", Balancer { nodeport: true, list: List::Cluster, masquerade: true }),
        ("nodeport-local-endpoints", Balancer { nodeport: true, list: List::Local, masquerade: false }),
    ];

    /// The name of its chain for `n` endpoints.
    #[must_use]
    pub fn chain(self, n: u32) -> Name {
        let kind = Self::KINDS.iter().find(|(_, kind)| *kind == self).map(|(name, _)| name);
        format!("{}-{n}", kind.expect("routes to the local list never masquerade")).into()
    }

    /// The balancer and number of endpoints of the chain called `name`, if it is one.
    #[must_use]
    pub fn parse(name: &str) -> Option<(Self, u32)> {
        let (kind, n) = name.rsplit_once('-')?;
        let (_, balancer) = Self::KINDS.iter().find(|(name, _)| *name == kind)?;
        let n: u32 = n.parse().ok()?;
        (n > 0 && *name == *balancer.chain(n)).then_some((*balancer, n))
    }

    /// Its rules for `n` endpoints.
    #[must_use]
    pub fn rules(self, n: u32, settings: &Settings) -> Vec<Rule> {
        let (key, map) = if self.nodeport {
            (&BY_PORT[..], SetId::NodeportSlots(self.list))
        } else {
            (&BY_ADDRESS[..], SetId::Slots(self.list))
        };
        let loads = key.iter().copied().chain([Load::Random(n)]).collect();
        let mark = self.masquerade.then(|| rule([Expr::MarkSet(settings.masquerade_mark)]));
        mark.into_iter().chain([rule([Expr::DnatMap { loads, map: map.name().into() }])]).collect()
    }
}
