//! Which of this host's addresses accept NodePort traffic.

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use proxy_common::IpFamily;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Which destination addresses accept NodePort traffic, in one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodePortAddresses {
    /// Every local address that is not a loopback one.
    All,
    /// These local addresses, loopback ones already left out.
    Only(BTreeSet<IpAddr>),
}

impl NodePortAddresses {
    /// Applies `nodePortAddresses` (CIDRs and the keywords `primary`, `localhost`, `all`) to this host, for one family.
    ///
    /// `node_addresses` are the Node's ([`super::Node::addresses`]), `host_addresses` those of the interfaces; both may hold
    /// both families. As in kube-proxy v1.37, a family that the list says nothing about is open on every address, and so is
    /// one with a CIDR of length 0. That an unset list means `primary` is decided by the configuration; here empty is empty.
    /// Entries that are neither keyword nor CIDR, which configuration refuses, are passed over.
    #[must_use]
    pub fn select<S: AsRef<str>>(
        list: &[S],
        node_addresses: &[IpAddr],
        host_addresses: &[IpAddr],
        family: IpFamily,
    ) -> Self {
        let nets: Vec<IpNet> =
            expand(list, node_addresses).into_iter().filter(|net| IpFamily::of(net.addr()) == family).collect();
        if nets.is_empty() || nets.iter().any(|net| net.prefix_len() == 0) {
            return Self::All;
        }
        let selected = |ip: &IpAddr| !ip.is_loopback() && nets.iter().any(|net| net.contains(ip));
        Self::Only(host_addresses.iter().copied().filter(selected).collect())
    }
}

/// Replaces the keywords by their CIDRs, in place.
fn expand<S: AsRef<str>>(list: &[S], node_addresses: &[IpAddr]) -> Vec<IpNet> {
    let mut nets = Vec::new();
    for entry in list {
        match entry.as_ref() {
            "primary" => nets.extend(primary(node_addresses)),
            "localhost" => nets.extend(localhost()),
            "all" => nets.extend([IpNet::from(Ipv4Net::default()), IpNet::from(Ipv6Net::default())]),
            cidr => nets.extend(cidr.parse::<IpNet>().map(|net| net.trunc())),
        }
    }
    nets
}

/// The node's first address of each family. A loopback address stands for "not known".
fn primary(node_addresses: &[IpAddr]) -> impl Iterator<Item = IpNet> {
    IpFamily::ALL
        .into_iter()
        .filter_map(|family| node_addresses.iter().find(|ip| IpFamily::of(**ip) == family))
        .filter(|ip| !ip.is_loopback())
        .map(|ip| IpNet::from(*ip))
}

fn localhost() -> [IpNet; 2] {
    let four = Ipv4Net::new_assert(Ipv4Addr::new(127, 0, 0, 0), 8);
    [IpNet::from(four), IpNet::from(IpAddr::from(Ipv6Addr::LOCALHOST))]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::fixtures::{ips, nets};

    const ALL: NodePortAddresses = NodePortAddresses::All;

    fn only(addresses: &[&str]) -> NodePortAddresses {
        NodePortAddresses::Only(ips(addresses).into_iter().collect())
    }

    /// IPv4, then IPv6.
    fn select(list: &[&str], node: &[&str], host: &[&str]) -> [NodePortAddresses; 2] {
        IpFamily::ALL.map(|family| NodePortAddresses::select(list, &ips(node), &ips(host), family))
    }

    #[test]
    fn n1_addresses_of_this_host_inside_a_cidr_and_the_other_family_stays_open() {
        assert_eq!(select(&["10.20.30.0/24"], &[], &["10.20.30.51", "100.200.201.1"]), [only(&["10.20.30.51"]), ALL]);
    }

    #[test]
    fn n2_a_loopback_cidr_alone_selects_nothing() {
        assert_eq!(select(&["127.0.0.1/32"], &[], &["10.20.30.51", "127.0.0.1"]), [only(&[]), ALL]);
    }

    #[test]
    fn n3_loopback_addresses_are_never_selected() {
        let found = select(&["2001:db8::/64", "::1/128"], &[], &["2001:db8::1", "::1"]);
        assert_eq!(found, [ALL, only(&["2001:db8::1"])]);
    }

    #[test]
    fn n4_cidrs_that_match_nothing_close_the_family() {
        assert_eq!(select(&["1.2.3.0/24", "4.5.6.0/24"], &[], &["10.20.30.51"])[0], only(&[]));
    }

    #[test]
    fn n5_an_empty_list_is_match_all() {
        assert_eq!(select(&[], &["10.0.0.1"], &["10.0.0.1", "fd00::1"]), [ALL, ALL]);
    }

    #[test]
    fn n6_a_zero_cidr_anywhere_is_match_all() {
        assert_eq!(select(&["1.2.3.0/24", "0.0.0.0/0"], &[], &["1.2.3.4"])[0], ALL);
        assert_eq!(select(&["0.0.0.0/0", "1.2.3.0/24"], &[], &["1.2.3.4"])[0], ALL);
        assert_eq!(select(&["fd00::/64", "::/0"], &[], &["fd00::1"])[1], ALL);
        assert_eq!(select(&["all"], &[], &["1.2.3.4"]), [ALL, ALL]);
    }

    #[test]
    fn n7_primary_is_the_node_ip_of_each_family() {
        let node = ["192.168.1.1", "fd00::1", "192.168.1.9"];
        assert_eq!(expand(&["primary"], &ips(&node)), nets(&["192.168.1.1/32", "fd00::1/128"]));
        let host = ["192.168.1.1", "192.168.1.9", "fd00::1", "fd00::9"];
        assert_eq!(select(&["primary"], &node, &host), [only(&["192.168.1.1"]), only(&["fd00::1"])]);
    }

    #[test]
    fn n8_primary_of_a_one_family_node_leaves_the_other_family_open() {
        assert_eq!(expand(&["primary"], &ips(&["192.168.1.1"])), nets(&["192.168.1.1/32"]));
        assert_eq!(select(&["primary"], &["192.168.1.1"], &["192.168.1.1"]), [only(&["192.168.1.1"]), ALL]);
        assert_eq!(select(&["primary"], &[], &["192.168.1.1"]), [ALL, ALL]);
        assert_eq!(select(&["primary"], &["127.0.0.1", "::1"], &["192.168.1.1"]), [ALL, ALL]);
    }

    #[test]
    fn n9_localhost_is_both_loopback_networks() {
        assert_eq!(expand(&["localhost"], &ips(&["fd00::1"])), nets(&["127.0.0.0/8", "::1/128"]));
        assert_eq!(select(&["localhost"], &["fd00::1"], &["fd00::1", "::1"]), [only(&[]), only(&[])]);
    }

    #[test]
    fn n10_keywords_and_cidrs_mix_in_order() {
        let found = expand(&["primary", "localhost", "10.0.0.0/8"], &ips(&["192.168.1.1", "fd00::1"]));
        assert_eq!(found, nets(&["192.168.1.1/32", "fd00::1/128", "127.0.0.0/8", "::1/128", "10.0.0.0/8"]));
    }

    #[test]
    fn a_cidr_with_host_bits_is_reduced_to_its_network() {
        assert_eq!(select(&["10.20.30.7/24"], &[], &["10.20.30.51"])[0], only(&["10.20.30.51"]));
    }
}
