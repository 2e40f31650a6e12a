//! Service objects.

use super::{
    DEFAULT_AFFINITY_TIMEOUT_S, LABEL_SERVICE_PROXY_NAME, Names, has_label, object_name, port_number, protocol,
};
use crate::model::{IpFamily, ObjectName, Service, ServicePort, ServiceType, TrafficPolicy};
use crate::source::address::{parse_cidr, parse_ip};
use crate::source::{Problem, Report};
use k8s_openapi::api::core::v1 as core;
use std::net::IpAddr;

/// Converts a Service. `None`: headless, ExternalName, without a usable ClusterIP, or another proxy's (label
/// `service.kubernetes.io/service-proxy-name`).
#[must_use]
pub fn service(object: &core::Service, names: &mut Names) -> (Option<Service>, Vec<Problem>) {
    let meta = &object.metadata;
    let mut report =
        Report::new("Service", Some(meta.namespace.as_deref().unwrap_or("")), meta.name.as_deref().unwrap_or(""));
    let Some(name) = object_name(meta, names) else {
        report.error("metadata.name", "namespace or name is missing; the object is ignored");
        return (None, report.into_problems());
    };
    let Some(spec) = &object.spec else { return (None, Vec::new()) };
    if has_label(meta, LABEL_SERVICE_PROXY_NAME) {
        return (None, Vec::new());
    }
    let service_type = match spec.type_.as_deref() {
        None | Some("" | "ClusterIP") => ServiceType::ClusterIp,
        Some("NodePort") => ServiceType::NodePort,
        Some("LoadBalancer") => ServiceType::LoadBalancer,
        Some("ExternalName") => return (None, Vec::new()),
        Some(other) => {
            report.warn("spec.type", format!("unknown type {other:?} is treated as ClusterIP"));
            ServiceType::ClusterIp
        }
    };
    // kube-proxy v1.37 `ShouldSkipService`: clusterIP decides, even if clusterIPs has more.
    if matches!(spec.cluster_ip.as_deref(), None | Some("" | "None")) {
        return (None, Vec::new());
    }
    let service = build(name, service_type, object, names, &mut report);
    (service, report.into_problems())
}

fn build(
    name: ObjectName,
    service_type: ServiceType,
    object: &core::Service,
    names: &mut Names,
    report: &mut Report<'_>,
) -> Option<Service> {
    let spec = object.spec.as_ref()?;
    let cluster_ips = cluster_ips(spec, report);
    if cluster_ips.is_empty() {
        report.error("spec.clusterIP", "no usable ClusterIP; the Service is not served");
        return None;
    }
    let external_traffic_policy =
        traffic_policy(spec.external_traffic_policy.as_deref(), "spec.externalTrafficPolicy", report);
    let health_check_node_port = optional_port(spec.health_check_node_port, "spec.healthCheckNodePort", report);
    if service_type == ServiceType::LoadBalancer
        && external_traffic_policy == TrafficPolicy::Local
        && health_check_node_port == 0
    {
        report.warn(
            "spec.healthCheckNodePort",
            "no health check port, so load balancers cannot tell which nodes have endpoints",
        );
    }
    Some(Service {
        name,
        service_type,
        cluster_ips,
        external_ips: external_ips(spec, report),
        load_balancer_ips: load_balancer_ips(object, report),
        source_ranges: source_ranges(spec, report),
        external_traffic_policy,
        internal_traffic_policy: traffic_policy(
            spec.internal_traffic_policy.as_deref(),
            "spec.internalTrafficPolicy",
            report,
        ),
        affinity_timeout_s: affinity_timeout_s(spec, report),
        health_check_node_port,
        publish_not_ready_addresses: spec.publish_not_ready_addresses.unwrap_or(false),
        traffic_distribution: traffic_distribution(spec, names, report),
        has_selector: spec.selector.as_ref().is_some_and(|selector| !selector.is_empty()),
        ports: ports(spec, names, report),
    })
}

/// kube-proxy v1.37 `GetClusterIPByFamily`, for both families at once.
fn cluster_ips(spec: &core::ServiceSpec, report: &mut Report<'_>) -> Vec<IpAddr> {
    let families = spec.ip_families.as_deref().unwrap_or_default();
    let mut found: Vec<IpAddr> = Vec::with_capacity(families.len().clamp(1, 2));
    if families.is_empty() {
        let text = spec.cluster_ip.as_deref().unwrap_or("");
        match parse_ip(text) {
            Some(ip) => found.push(ip),
            None => report.warn("spec.clusterIP", format!("{text:?} is not an IP address")),
        }
        return found;
    }
    let texts = spec.cluster_ips.as_deref().unwrap_or_default();
    for (index, family) in families.iter().enumerate() {
        let family = match family.as_str() {
            "IPv4" => IpFamily::V4,
            "IPv6" => IpFamily::V6,
            other => {
                report.warn(format!("spec.ipFamilies[{index}]"), format!("unknown family {other:?} is left out"));
                continue;
            }
        };
        // A family without an address does not exist for the proxy; this is how PreferDualStack looks on one stack.
        let Some(text) = texts.get(index) else { continue };
        let field = format!("spec.clusterIPs[{index}]");
        match parse_ip(text) {
            Some(ip) if IpFamily::of(ip) != family => {
                report.warn(
                    field,
                    format!("{ip} is not an {family} address as spec.ipFamilies[{index}] says; it is left out"),
                );
            }
            Some(ip) if found.iter().any(|other| IpFamily::of(*other) == family) => {
                report.warn(field, format!("{ip} is the second {family} address; it is left out"));
            }
            Some(ip) => found.push(ip),
            None => report.warn(field, format!("{text:?} is not an IP address; it is left out")),
        }
    }
    found
}

fn external_ips(spec: &core::ServiceSpec, report: &mut Report<'_>) -> Vec<IpAddr> {
    let mut found = Vec::new();
    for (index, text) in spec.external_ips.iter().flatten().enumerate() {
        match parse_ip(text) {
            Some(ip) => found.push(ip),
            None if text.trim().is_empty() => {}
            None => report
                .warn(format!("spec.externalIPs[{index}]"), format!("{text:?} is not an IP address; it is left out")),
        }
    }
    found
}

fn load_balancer_ips(object: &core::Service, report: &mut Report<'_>) -> Vec<IpAddr> {
    let ingress = object.status.as_ref().and_then(|s| s.load_balancer.as_ref()).and_then(|l| l.ingress.as_deref());
    let mut found = Vec::new();
    for (index, entry) in ingress.unwrap_or_default().iter().enumerate() {
        let Some(text) = entry.ip.as_deref().filter(|ip| !ip.is_empty()) else { continue };
        let field = || format!("status.loadBalancer.ingress[{index}]");
        match entry.ip_mode.as_deref() {
            None | Some("VIP") => {}
            // The load balancer delivers to the node itself: the address is not ours.
            Some("Proxy") => continue,
            Some(other) => {
                report.warn(format!("{}.ipMode", field()), format!("unknown mode {other:?}; {text} is left out"));
                continue;
            }
        }
        match parse_ip(text) {
            Some(ip) => found.push(ip),
            None => report.warn(format!("{}.ip", field()), format!("{text:?} is not an IP address; it is left out")),
        }
    }
    found
}

/// As kube-proxy v1.37, a range that cannot be read is left out; the API server does not let one in.
fn source_ranges(spec: &core::ServiceSpec, report: &mut Report<'_>) -> Vec<ipnet::IpNet> {
    let mut found = Vec::new();
    for (index, text) in spec.load_balancer_source_ranges.iter().flatten().enumerate() {
        match parse_cidr(text) {
            Some(net) => found.push(net),
            None if text.trim().is_empty() => {}
            None => {
                report.warn(
                    format!("spec.loadBalancerSourceRanges[{index}]"),
                    format!("{text:?} is not a network such as 10.0.0.0/8; it is left out"),
                );
            }
        }
    }
    found
}

fn traffic_policy(text: Option<&str>, field: &str, report: &mut Report<'_>) -> TrafficPolicy {
    match text {
        None | Some("" | "Cluster") => TrafficPolicy::Cluster,
        Some("Local") => TrafficPolicy::Local,
        Some(other) => {
            report.warn(field, format!("unknown policy {other:?} is treated as Cluster"));
            TrafficPolicy::Cluster
        }
    }
}

fn affinity_timeout_s(spec: &core::ServiceSpec, report: &mut Report<'_>) -> Option<u32> {
    match spec.session_affinity.as_deref() {
        None | Some("" | "None") => return None,
        Some("ClientIP") => {}
        Some(other) => {
            report.warn("spec.sessionAffinity", format!("unknown affinity {other:?} is treated as None"));
            return None;
        }
    }
    let seconds =
        spec.session_affinity_config.as_ref().and_then(|c| c.client_ip.as_ref()).and_then(|c| c.timeout_seconds);
    match seconds {
        None => Some(DEFAULT_AFFINITY_TIMEOUT_S),
        Some(seconds) => match u32::try_from(seconds) {
            Ok(seconds @ 1..=86_400) => Some(seconds),
            _ => {
                report.warn(
                    "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
                    format!("{seconds} is not from 1 to 86400; {DEFAULT_AFFINITY_TIMEOUT_S} is used"),
                );
                Some(DEFAULT_AFFINITY_TIMEOUT_S)
            }
        },
    }
}

fn traffic_distribution(
    spec: &core::ServiceSpec,
    names: &mut Names,
    report: &mut Report<'_>,
) -> Option<std::sync::Arc<str>> {
    match spec.traffic_distribution.as_deref()? {
        "" => None,
        known @ ("PreferClose" | "PreferSameZone" | "PreferSameNode") => Some(names.share(known)),
        other => {
            report.warn("spec.trafficDistribution", format!("unknown value {other:?} is ignored"));
            None
        }
    }
}

/// A port number or 0 for none.
fn optional_port(number: Option<i32>, field: &str, report: &mut Report<'_>) -> u16 {
    match number {
        None | Some(0) => 0,
        Some(number) => port_number(number).unwrap_or_else(|| {
            report.warn(field, format!("{number} is not a port number; it is left out"));
            0
        }),
    }
}

fn ports(spec: &core::ServiceSpec, names: &mut Names, report: &mut Report<'_>) -> Vec<ServicePort> {
    let mut found: Vec<ServicePort> = Vec::with_capacity(spec.ports.as_ref().map_or(0, Vec::len));
    for (index, entry) in spec.ports.iter().flatten().enumerate() {
        let field = |name: &str| format!("spec.ports[{index}].{name}");
        let Some(protocol) = protocol(entry.protocol.as_deref()) else {
            let text = entry.protocol.as_deref().unwrap_or("");
            report.warn(field("protocol"), format!("unknown protocol {text:?}; the port is left out"));
            continue;
        };
        let Some(port) = port_number(entry.port) else {
            report.warn(field("port"), format!("{} is not a port number; the port is left out", entry.port));
            continue;
        };
        let name = entry.name.as_deref().unwrap_or("");
        if found.iter().any(|other| &*other.name == name && other.protocol == protocol) {
            report.warn(field("name"), format!("a second {protocol} port named {name:?}; it is left out"));
            continue;
        }
        let node_port = optional_port(entry.node_port, &field("nodePort"), report);
        found.push(ServicePort { name: names.share(name), protocol, port, node_port });
    }
    found
}
