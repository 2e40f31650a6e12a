//! What a Service means on this node: derived fields and usable endpoints (parity 3.2, 3.5, 3.6).

use super::endpoint::EndpointSlice;
use super::name::ServicePortName;
use super::node::{Node, Settings};
use super::service::Service;
use ipnet::IpNet;
use std::net::IpAddr;
use std::sync::Arc;

/// An endpoint address and port that traffic may be sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Backend {
    /// Address of the endpoint.
    pub address: IpAddr,
    /// Port of the endpoint.
    pub port: u16,
    /// Whether it runs on this node.
    pub local: bool,
}

/// One service port in one family, resolved for this node. Lists are sorted by the text `ip:port`, without duplicates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServicePortView {
    /// Namespace, name, port name, protocol.
    pub name: ServicePortName,
    /// ClusterIP of the family.
    pub cluster_ip: IpAddr,
    /// Service port number.
    pub port: u16,
    /// NodePort, 0 = none.
    pub node_port: u16,
    /// External IPs of the family, without duplicates and without the ClusterIP.
    pub external_ips: Vec<IpAddr>,
    /// Load balancer addresses of the family (VIPs), without duplicates and without the ClusterIP.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Effective source ranges of the family, aggregated (disjoint), the VIPs' self-permission of parity 1.12 included;
    /// `None` = not filtered.
    pub source_ranges: Option<Vec<IpNet>>,
    /// Internal traffic policy is Local.
    pub internal_local: bool,
    /// External traffic policy is Local (parity 3.2 "external policy Local").
    pub external_local: bool,
    /// ClientIP affinity timeout in seconds.
    pub affinity_timeout_s: Option<u32>,
    /// Health check node port of the Service (type LoadBalancer with external policy Local only), 0 = none.
    pub health_check_node_port: u16,
    /// Cluster list of parity 3.6; empty if Cluster endpoints are not used.
    pub cluster: Vec<Backend>,
    /// Local list of parity 3.6; empty if Local endpoints are not used.
    pub local: Vec<Backend>,
    /// `hasEP` of parity 3.6.
    pub has_endpoints: bool,
    /// Every endpoint with serving=true, for conntrack clean-up (parity 2.9); policies and topology play no part.
    pub serving: Vec<Backend>,
}

impl ServicePortView {
    /// NodePort, VIP or external IP exists.
    #[must_use]
    pub fn externally_accessible(&self) -> bool {
        self.node_port != 0 || !self.load_balancer_ips.is_empty() || !self.external_ips.is_empty()
    }
}

/// Resolves every port of `service` for the family of `settings`; empty if the Service does not exist in that family.
#[must_use]
pub fn resolve(
    service: &Service,
    slices: &[Arc<EndpointSlice>],
    node: &Node,
    settings: &Settings,
) -> Vec<ServicePortView> {
    let _ = (service, slices, node, settings);
    Vec::new()
}
