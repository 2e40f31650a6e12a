//! Facts about this node, and the settings that change what packets meet.

use ipnet::IpNet;
use proxy_common::IpFamily;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

/// What the Node object says.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Node {
    /// `metadata.name`
    pub name: Arc<str>,
    /// Label `topology.kubernetes.io/zone`; an empty label counts as none.
    pub zone: Option<Arc<str>>,
    /// All InternalIP entries, then all ExternalIP entries, in object order.
    pub addresses: Vec<IpAddr>,
    /// `spec.podCIDRs`
    pub pod_cidrs: Vec<IpNet>,
}

impl Node {
    /// The zone that topology hints are compared with: the label, unless it is empty.
    #[must_use]
    pub fn effective_zone(&self) -> Option<&Arc<str>> {
        self.zone.as_ref().filter(|zone| !zone.is_empty())
    }

    /// The first address of `family`.
    #[must_use]
    pub fn address(&self, family: IpFamily) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|ip| IpFamily::of(*ip) == family)
    }
}

/// The rule that tells pod traffic from other traffic, already chosen for one family.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum LocalDetector {
    /// No detector for this family.
    #[default]
    None,
    /// Source address inside this network (modes ClusterCIDR and NodeCIDR).
    Cidr(IpNet),
    /// Input interface has exactly this name (mode BridgeInterface).
    Interface(Arc<str>),
    /// Input interface name begins with this prefix (mode InterfaceNamePrefix).
    InterfacePrefix(Arc<str>),
}

/// Which destination addresses accept NodePort traffic, in one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// Every local address that is not a loopback one.
    All,
    /// These local addresses, loopback ones already left out.
    Only(BTreeSet<IpAddr>),
}

/// All that `resolve`, `lookup` and `compile` need beside the objects, for one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The family.
    pub family: IpFamily,
    /// Local traffic detector.
    pub detector: LocalDetector,
    /// NodePort addresses.
    pub node_port_addresses: NodePortAddresses,
    /// `masqueradeAll`
    pub masquerade_all: bool,
    /// 1 << masqueradeBit
    pub masquerade_mark: u32,
    /// This node's address of the family, for the self-permission of source ranges.
    pub node_ip: Option<IpAddr>,
    /// Addresses of this host's interfaces, of the family (what `fib daddr type local` means). Only `lookup` reads it: the
    /// kernel asks its own routing tables.
    pub local_addresses: BTreeSet<IpAddr>,
    /// Whether `spec.externalIPs` is served (kube-proxy's feature gate `AllowServiceExternalIPs`).
    pub external_ips_enabled: bool,
    /// Size of each affinity set: how many clients one endpoint remembers.
    pub affinity_clients_max: u32,
}

impl Settings {
    /// The settings of a node about which nothing is known yet, with kube-proxy's defaults for the rest: no detector,
    /// NodePorts on every address, mark bit 14, external IPs served, 65,535 clients per affinity set.
    #[must_use]
    pub fn new(family: IpFamily) -> Self {
        Self {
            family,
            detector: LocalDetector::None,
            node_port_addresses: NodePortAddresses::All,
            masquerade_all: false,
            masquerade_mark: 1 << 14,
            node_ip: None,
            local_addresses: BTreeSet::new(),
            external_ips_enabled: true,
            affinity_clients_max: 65_535,
        }
    }
}
