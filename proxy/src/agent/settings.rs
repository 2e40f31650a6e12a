//! From the configuration, the Node and this host's addresses to what the compiler and the oracle need. Pure.
#![forbid(unsafe_code)]

use crate::config::Config;
use crate::model::{IpFamily, LocalDetector, Node, NodePortAddresses, Settings};
use std::net::IpAddr;

/// Settings of one family. `host` are the addresses of this host's interfaces, both families.
#[must_use]
pub fn settings(config: &Config, node: &Node, host: &[IpAddr], family: IpFamily) -> Settings {
    let local_addresses = host.iter().copied().filter(|ip| IpFamily::of(*ip) == family).collect();
    Settings {
        family,
        detector: LocalDetector::select(
            config.detect_local_mode,
            &config.cluster_cidrs,
            &node.pod_cidrs,
            &config.bridge_interface,
            &config.interface_name_prefix,
            family,
        ),
        node_port_addresses: NodePortAddresses::select(&config.node_port_addresses, &node.addresses, host, family),
        masquerade_all: config.masquerade_all,
        masquerade_mark: config.masquerade_mark,
        node_ip: node.address(family),
        local_addresses,
        affinity_clients_max: config.affinity_clients_max,
        external_ips_enabled: config.external_ips_enabled,
    }
}

/// What an operator should know about the settings, in words (kube-proxy v1.37 logs the same conditions).
#[must_use]
pub fn warnings(config: &Config, node: &Node, host: &[IpAddr]) -> Vec<String> {
    let mut warnings = Vec::new();
    for family in IpFamily::ALL {
        let settings = settings(config, node, host, family);
        if settings.detector == LocalDetector::None && node.address(family).is_some() {
            warnings.push(format!(
                "{family}: local pod traffic cannot be told from other traffic (no CIDR of this family for {:?}), so traffic from outside to ClusterIPs keeps its source address; set --cluster-cidr or another --detect-local-mode",
                config.detect_local_mode
            ));
        }
        match &settings.node_port_addresses {
            NodePortAddresses::Only(addresses) if addresses.is_empty() => warnings.push(format!(
                "{family}: no address of this node matches --nodeport-addresses {}, so NodePorts answer nowhere in this family",
                config.node_port_addresses.join(",")
            )),
            NodePortAddresses::All if !config.node_port_addresses.iter().any(|a| a == "all") && node.address(family).is_some() => {
                warnings.push(format!(
                    "{family}: --nodeport-addresses {} names nothing of this family, so NodePorts are open on all its addresses",
                    config.node_port_addresses.join(",")
                ));
            }
            _ => {}
        }
    }
    warnings
}
