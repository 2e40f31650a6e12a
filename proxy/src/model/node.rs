//! Facts about this node, and the settings that change what packets meet.

use super::detector::LocalDetector;
use super::node_ports::NodePortAddresses;
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

    /// The node's IP of `family`: the first address of it.
    #[must_use]
    pub fn address(&self, family: IpFamily) -> Option<IpAddr> {
        self.addresses.iter().copied().find(|ip| IpFamily::of(*ip) == family)
    }

    /// The family of the node's first address; IPv4 while none is known.
    #[must_use]
    pub fn primary_family(&self) -> IpFamily {
        self.addresses.first().map_or(IpFamily::V4, |&ip| IpFamily::of(ip))
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixtures::{ip, ips};

    fn node(addresses: &[&str]) -> Node {
        Node { addresses: ips(addresses), ..Node::default() }
    }

    #[test]
    fn p1_p2_one_address_has_one_family_and_that_is_the_primary_one() {
        let v4 = node(&["192.168.1.1"]);
        assert_eq!((v4.primary_family(), v4.address(IpFamily::V4)), (IpFamily::V4, Some(ip("192.168.1.1"))));
        assert_eq!(v4.address(IpFamily::V6), None);
        let v6 = node(&["fd00:1234::1"]);
        assert_eq!((v6.primary_family(), v6.address(IpFamily::V6)), (IpFamily::V6, Some(ip("fd00:1234::1"))));
        assert_eq!(v6.address(IpFamily::V4), None);
    }

    #[test]
    fn p3_p5_the_first_address_decides_the_primary_family_and_the_first_of_each_family_counts() {
        let v6_first = node(&["2001:db8::2", "90.90.90.90", "2001:db8::3", "91.91.91.91"]);
        assert_eq!(v6_first.primary_family(), IpFamily::V6);
        assert_eq!(v6_first.address(IpFamily::V6), Some(ip("2001:db8::2")));
        assert_eq!(v6_first.address(IpFamily::V4), Some(ip("90.90.90.90")));
        assert_eq!(node(&["90.90.90.90", "2001:db8::2"]).primary_family(), IpFamily::V4);
    }

    #[test]
    fn p4_without_a_node_ipv4_is_primary_and_no_address_is_known() {
        assert_eq!(node(&[]).primary_family(), IpFamily::V4);
        assert!(IpFamily::ALL.into_iter().all(|family| node(&[]).address(family).is_none()));
    }
}
