//! A Service as a proxy sees it: parsed, defaulted, without what the proxy never reads.

use super::name::ObjectName;
use ipnet::IpNet;
use proxy_common::{IpFamily, Protocol};
use std::net::IpAddr;
use std::sync::Arc;

/// `spec.type`. ExternalName Services never reach the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ServiceType {
    /// ClusterIP
    ClusterIp,
    /// NodePort
    NodePort,
    /// LoadBalancer
    LoadBalancer,
}

/// `spec.internalTrafficPolicy` or `spec.externalTrafficPolicy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum TrafficPolicy {
    /// Any usable endpoint.
    #[default]
    Cluster,
    /// Endpoints on this node only.
    Local,
}

/// One entry of `spec.ports`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServicePort {
    /// Name; empty for an unnamed port.
    pub name: Arc<str>,
    /// Transport protocol.
    pub protocol: Protocol,
    /// Port of the ClusterIP, external and load balancer addresses.
    pub port: u16,
    /// NodePort; 0 = none. Served whatever the type, if set.
    pub node_port: u16,
}

/// A Service that has a ClusterIP. Headless and ExternalName Services and those with the label
/// `service.kubernetes.io/service-proxy-name` are left out by the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Namespace and name.
    pub name: ObjectName,
    /// `spec.type`
    pub service_type: ServiceType,
    /// The ClusterIP of each family that the Service has, at most one per family: with `spec.ipFamilies` the entry of
    /// `spec.clusterIPs` at the same index, else `spec.clusterIP` (as kube-proxy v1.37 pairs them).
    pub cluster_ips: Vec<IpAddr>,
    /// `spec.externalIPs`, both families, in order.
    pub external_ips: Vec<IpAddr>,
    /// Addresses of `status.loadBalancer.ingress` with ipMode unset or VIP, both families.
    pub load_balancer_ips: Vec<IpAddr>,
    /// Parsable entries of `spec.loadBalancerSourceRanges`, both families, each reduced to its network. A /0 entry is kept
    /// here; that it cancels the others of its family is decided in `resolve`.
    pub source_ranges: Vec<IpNet>,
    /// `spec.externalTrafficPolicy`
    pub external_traffic_policy: TrafficPolicy,
    /// `spec.internalTrafficPolicy`
    pub internal_traffic_policy: TrafficPolicy,
    /// ClientIP affinity timeout in seconds; `None` = no affinity.
    pub affinity_timeout_s: Option<u32>,
    /// `spec.healthCheckNodePort`, 0 = none. Kept for the health check server.
    pub health_check_node_port: u16,
    /// `spec.publishNotReadyAddresses`; the slice controller turns it into conditions, the proxy only shows it.
    pub publish_not_ready_addresses: bool,
    /// `spec.trafficDistribution`; acts through the hints of slices, the proxy only shows it.
    pub traffic_distribution: Option<Arc<str>>,
    /// Whether `spec.selector` is set (a controller then owns the slices).
    pub has_selector: bool,
    /// `spec.ports`
    pub ports: Vec<ServicePort>,
}

impl Service {
    /// The ClusterIP of `family`, if the Service exists in that family.
    #[must_use]
    pub fn cluster_ip(&self, family: IpFamily) -> Option<IpAddr> {
        self.cluster_ips.iter().copied().find(|ip| IpFamily::of(*ip) == family)
    }
}
