//! Services.

use super::{cidr, ip, label, one_of, port};
use crate::model::IpFamily;
use crate::source::Report;
use crate::source::address::unusable;
use k8s_openapi::api::core::v1 as core;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use std::collections::{BTreeMap, BTreeSet};

const POLICIES: &[&str] = &["Cluster", "Local"];
const PROTOCOLS: &[&str] = &["TCP", "UDP", "SCTP"];

/// Validates a Service.
pub(crate) fn service(object: &core::Service, report: &mut Report<'_>) {
    label(object.metadata.name.as_deref().unwrap_or(""), "metadata.name", report);
    label(object.metadata.namespace.as_deref().unwrap_or(""), "metadata.namespace", report);
    let Some(spec) = &object.spec else { return };
    let type_ = spec.type_.as_deref().unwrap_or("");
    if !one_of(type_, &["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"], "spec.type", report) {
        return;
    }
    if type_ == "ExternalName" {
        external_name(spec, report);
        return;
    }
    let headless = spec.cluster_ip.as_deref() == Some("None");
    if headless && type_ != "ClusterIP" {
        report.error("spec.clusterIP", format!("must not be None for type {type_}"));
    }
    if !headless {
        cluster_ips(spec, report);
    }
    ports(spec, type_, headless, report);
    policies(spec, type_, report);
    affinity(spec, report);
    external_ips(spec, report);
    load_balancer(object, spec, type_, report);
    health_check_node_port(spec, type_, report);
}

fn external_name(spec: &core::ServiceSpec, report: &mut Report<'_>) {
    if spec.external_name.as_deref().is_none_or(str::is_empty) {
        report.error("spec.externalName", "is missing for type ExternalName");
    }
    if spec.cluster_ip.as_deref().is_some_and(|ip| !ip.is_empty())
        || spec.cluster_ips.as_ref().is_some_and(|ips| !ips.is_empty())
    {
        report.error("spec.clusterIP", "must not be set for type ExternalName");
    }
}

fn cluster_ips(spec: &core::ServiceSpec, report: &mut Report<'_>) {
    let first = spec.cluster_ip.as_deref().unwrap_or("");
    let texts = spec.cluster_ips.as_deref().unwrap_or_default();
    let families = spec.ip_families.as_deref().unwrap_or_default();
    if first.is_empty() {
        report.error(
            "spec.clusterIP",
            "is missing: without an API server nothing allocates one; write a free address, or None for a headless Service",
        );
        return;
    }
    if texts.first().map(String::as_str) != Some(first) {
        report.error("spec.clusterIPs[0]", format!("must be the same as spec.clusterIP ({first})"));
    }
    if texts.len() > 2 {
        report.error("spec.clusterIPs", "has more than two addresses; write one, or one of each family");
        return;
    }
    let mut seen = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        let field = || format!("spec.clusterIPs[{index}]");
        let Some(address) = ip(text, field, report) else { continue };
        if let Some(why) = unusable(address) {
            report.error(field(), format!("{address}: {why}"));
        }
        let family = IpFamily::of(address);
        if seen.contains(&family) {
            report.error(
                field(),
                format!("{address} is the second {family} address; a Service has one of each family at most"),
            );
        }
        seen.push(family);
        if let Some(declared) = families.get(index)
            && *declared != family.to_string()
            && matches!(declared.as_str(), "IPv4" | "IPv6")
        {
            report.error(field(), format!("{address} is not an {declared} address as spec.ipFamilies[{index}] says"));
        }
    }
    for (index, family) in families.iter().enumerate() {
        let field = format!("spec.ipFamilies[{index}]");
        if !one_of(family, &["IPv4", "IPv6"], &field, report) {
            continue;
        }
        // An address of that family is told above.
        if families[..index].contains(family) && texts.len() <= index {
            report.error(field, format!("{family} is written twice"));
        } else if index >= texts.len() {
            let message = format!(
                "is missing: without an API server nothing allocates the {family} address of spec.ipFamilies[{index}]"
            );
            report.error(format!("spec.clusterIPs[{index}]"), message);
        }
    }
    if families.len() < texts.len() && !families.is_empty() {
        report.error(
            "spec.ipFamilies",
            "has fewer entries than spec.clusterIPs; write the family of each address, or leave it out",
        );
    }
    let policy = spec.ip_family_policy.as_deref().unwrap_or("");
    if one_of(policy, &["SingleStack", "PreferDualStack", "RequireDualStack"], "spec.ipFamilyPolicy", report) {
        match policy {
            "SingleStack" if texts.len() > 1 => {
                report.error("spec.ipFamilyPolicy", "must not be SingleStack with two ClusterIPs")
            }
            "RequireDualStack" if texts.len() < 2 => {
                report.error(
                    "spec.clusterIPs",
                    "needs an address of each family, since spec.ipFamilyPolicy is RequireDualStack",
                );
            }
            _ => {}
        }
    }
}

fn ports(spec: &core::ServiceSpec, type_: &str, headless: bool, report: &mut Report<'_>) {
    let entries = spec.ports.as_deref().unwrap_or_default();
    if entries.is_empty() && !headless {
        report.error("spec.ports", "is missing; write at least one port");
    }
    let allocate =
        type_ == "NodePort" || (type_ == "LoadBalancer" && spec.allocate_load_balancer_node_ports != Some(false));
    let (mut names, mut numbers, mut node_ports) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for (index, entry) in entries.iter().enumerate() {
        let field = |name: &str| format!("spec.ports[{index}].{name}");
        let name = entry.name.as_deref().unwrap_or("");
        if !name.is_empty() {
            label(name, field("name"), report);
            if let Some(first) = names.insert(name, index) {
                report.error(field("name"), format!("{name:?} is also the name of spec.ports[{first}]"));
            }
        } else if entries.len() > 1 {
            report.error(field("name"), "is missing; with several ports each needs a name");
        }
        let protocol = entry.protocol.as_deref().unwrap_or("");
        one_of(protocol, PROTOCOLS, field("protocol"), report);
        if port(entry.port, field("port"), report)
            && let Some(first) = numbers.insert((protocol, entry.port), index)
        {
            report.error(field("port"), format!("{protocol} {} is also spec.ports[{first}]", entry.port));
        }
        match &entry.target_port {
            Some(IntOrString::Int(number)) => {
                port(*number, field("targetPort"), report);
            }
            Some(IntOrString::String(text)) if !is_port_name(text) => {
                report.error(
                    field("targetPort"),
                    format!("{text:?} is neither a port number nor a port name (at most 15 of a-z, 0-9 and '-', at least one letter)"),
                );
            }
            _ => {}
        }
        match entry.node_port.unwrap_or(0) {
            0 if allocate => {
                let hint = if type_ == "LoadBalancer" { ", or set allocateLoadBalancerNodePorts to false" } else { "" };
                report.error(
                    field("nodePort"),
                    format!("is missing for type {type_}: without an API server nothing allocates one; write a free port (usually 30000 to 32767){hint}"),
                );
            }
            0 => {}
            number if !matches!(type_, "NodePort" | "LoadBalancer") => {
                report.error(field("nodePort"), format!("{number}: must not be set for type {type_}"));
            }
            number => {
                if port(number, field("nodePort"), report)
                    && let Some(first) = node_ports.insert((protocol, number), index)
                {
                    report.error(
                        field("nodePort"),
                        format!("{protocol} {number} is also the nodePort of spec.ports[{first}]"),
                    );
                }
            }
        }
    }
}

/// An IANA service name (RFC 6335), as `targetPort` takes one.
fn is_port_name(text: &str) -> bool {
    (1..=15).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && text.bytes().any(|b| b.is_ascii_lowercase())
        && !text.starts_with('-')
        && !text.ends_with('-')
        && !text.contains("--")
}

fn policies(spec: &core::ServiceSpec, type_: &str, report: &mut Report<'_>) {
    if let Some(policy) = spec.internal_traffic_policy.as_deref().filter(|p| !p.is_empty()) {
        one_of(policy, POLICIES, "spec.internalTrafficPolicy", report);
    }
    if let Some(policy) = spec.external_traffic_policy.as_deref().filter(|p| !p.is_empty()) {
        one_of(policy, POLICIES, "spec.externalTrafficPolicy", report);
        let external = type_ != "ClusterIP" || spec.external_ips.as_ref().is_some_and(|ips| !ips.is_empty());
        if !external {
            report.error(
                "spec.externalTrafficPolicy",
                "may only be set for types NodePort and LoadBalancer, or with externalIPs",
            );
        }
    }
    if let Some(value) = spec.traffic_distribution.as_deref().filter(|v| !v.is_empty()) {
        one_of(value, &["PreferClose", "PreferSameZone", "PreferSameNode"], "spec.trafficDistribution", report);
    }
}

fn affinity(spec: &core::ServiceSpec, report: &mut Report<'_>) {
    let affinity = spec.session_affinity.as_deref().unwrap_or("");
    one_of(affinity, &["None", "ClientIP"], "spec.sessionAffinity", report);
    if affinity == "None" && spec.session_affinity_config.is_some() {
        report.error("spec.sessionAffinityConfig", "must not be set when spec.sessionAffinity is None");
    }
    if affinity == "ClientIP" {
        let config = spec.session_affinity_config.as_ref().and_then(|c| c.client_ip.as_ref());
        let seconds = config.and_then(|c| c.timeout_seconds).unwrap_or(0);
        if !(1..=86_400).contains(&seconds) {
            report.error(
                "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
                format!("{seconds} is not from 1 to 86400"),
            );
        }
    }
}

fn external_ips(spec: &core::ServiceSpec, report: &mut Report<'_>) {
    for (index, text) in spec.external_ips.iter().flatten().enumerate() {
        let field = || format!("spec.externalIPs[{index}]");
        if let Some(why) = ip(text, field, report).and_then(unusable) {
            report.error(field(), format!("{text}: {why}"));
        }
    }
}

fn load_balancer(object: &core::Service, spec: &core::ServiceSpec, type_: &str, report: &mut Report<'_>) {
    let is_load_balancer = type_ == "LoadBalancer";
    let ranges = spec.load_balancer_source_ranges.as_deref().unwrap_or_default();
    if !ranges.is_empty() && !is_load_balancer {
        report.error("spec.loadBalancerSourceRanges", "may only be set for type LoadBalancer");
    }
    for (index, text) in ranges.iter().enumerate() {
        cidr(text, || format!("spec.loadBalancerSourceRanges[{index}]"), report);
    }
    if spec.allocate_load_balancer_node_ports.is_some() && !is_load_balancer {
        report.error("spec.allocateLoadBalancerNodePorts", "may only be set for type LoadBalancer");
    }
    let ingress = object
        .status
        .as_ref()
        .and_then(|s| s.load_balancer.as_ref())
        .and_then(|l| l.ingress.as_deref())
        .unwrap_or_default();
    if !ingress.is_empty() && !is_load_balancer {
        report.error("status.loadBalancer.ingress", "may only be set for type LoadBalancer");
    }
    let mut seen = BTreeSet::new();
    for (index, entry) in ingress.iter().enumerate() {
        let field = |name: &str| format!("status.loadBalancer.ingress[{index}].{name}");
        let text = entry.ip.as_deref().unwrap_or("");
        if !text.is_empty()
            && let Some(address) = ip(text, || field("ip"), report)
            && !seen.insert(address)
        {
            report.warn(field("ip"), format!("{address} is written twice"));
        }
        if let Some(mode) = entry.ip_mode.as_deref() {
            one_of(mode, &["VIP", "Proxy"], field("ipMode"), report);
            if text.is_empty() {
                report.error(field("ipMode"), "must not be set without an ip");
            }
        }
    }
    if is_load_balancer && ingress.is_empty() {
        report.warn(
            "status.loadBalancer.ingress",
            "is missing, so the Service has no load balancer address on this node; write the address there if it has one",
        );
    }
}

fn health_check_node_port(spec: &core::ServiceSpec, type_: &str, report: &mut Report<'_>) {
    let field = "spec.healthCheckNodePort";
    let number = spec.health_check_node_port.unwrap_or(0);
    let needed = type_ == "LoadBalancer" && spec.external_traffic_policy.as_deref() == Some("Local");
    match (needed, number) {
        (true, 0) => report.error(
            field,
            "is missing for type LoadBalancer with externalTrafficPolicy Local: without an API server nothing allocates one; write a free port",
        ),
        (false, 0) => {}
        (false, _) => report.error(field, "may only be set for type LoadBalancer with externalTrafficPolicy Local"),
        (true, number) => {
            if port(number, field, report)
                && let Some(index) = spec.ports.iter().flatten().position(|entry| entry.node_port == Some(number))
            {
                report.error(field, format!("{number} is also the nodePort of spec.ports[{index}]"));
            }
        }
    }
}
