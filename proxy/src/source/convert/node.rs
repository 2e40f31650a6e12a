//! Node and ServiceCIDR objects.

use super::LABEL_ZONE;
use crate::model::Node;
use crate::source::address::{parse_cidr, parse_ip};
use crate::source::{Problem, Report};
use ipnet::IpNet;
use k8s_openapi::api::{core::v1 as core, networking::v1 as networking};
use std::net::IpAddr;
use std::sync::Arc;

/// Converts a Node. Addresses: all of type InternalIP, then all of type ExternalIP, as kube-proxy v1.37 orders them
/// (`GetNodeHostIPs`).
#[must_use]
pub fn node(object: &core::Node) -> (Option<Node>, Vec<Problem>) {
    let name = object.metadata.name.as_deref().unwrap_or("");
    let mut report = Report::new("Node", None, name);
    if name.is_empty() {
        report.error("metadata.name", "name is missing; the object is ignored");
        return (None, report.into_problems());
    }
    let zone = object.metadata.labels.as_ref().and_then(|l| l.get(LABEL_ZONE)).filter(|zone| !zone.is_empty());
    let node = Node {
        name: name.into(),
        zone: zone.map(|zone| zone.as_str().into()),
        addresses: addresses(object, &mut report),
        pod_cidrs: pod_cidrs(object, &mut report),
    };
    (Some(node), report.into_problems())
}

/// Name and networks of a ServiceCIDR.
pub type ServiceCidr = (Arc<str>, Vec<IpNet>);

/// Converts a ServiceCIDR.
#[must_use]
pub fn service_cidr(object: &networking::ServiceCIDR) -> (Option<ServiceCidr>, Vec<Problem>) {
    let name = object.metadata.name.as_deref().unwrap_or("");
    let mut report = Report::new("ServiceCIDR", None, name);
    if name.is_empty() {
        report.error("metadata.name", "name is missing; the object is ignored");
        return (None, report.into_problems());
    }
    let texts = object.spec.as_ref().and_then(|spec| spec.cidrs.as_deref()).unwrap_or_default();
    let cidrs = cidrs(texts, "spec.cidrs", &mut report);
    (Some((name.into(), cidrs)), report.into_problems())
}

fn addresses(object: &core::Node, report: &mut Report<'_>) -> Vec<IpAddr> {
    let entries = object.status.as_ref().and_then(|status| status.addresses.as_deref()).unwrap_or_default();
    let mut found = Vec::new();
    for wanted in ["InternalIP", "ExternalIP"] {
        for (index, entry) in entries.iter().enumerate().filter(|(_, entry)| entry.type_ == wanted) {
            match parse_ip(&entry.address) {
                Some(ip) => found.push(ip),
                None => {
                    let field = format!("status.addresses[{index}].address");
                    report.warn(field, format!("{:?} is not an IP address; it is left out", entry.address));
                }
            }
        }
    }
    found
}

fn pod_cidrs(object: &core::Node, report: &mut Report<'_>) -> Vec<IpNet> {
    let Some(spec) = &object.spec else { return Vec::new() };
    match (spec.pod_cidrs.as_deref(), spec.pod_cidr.as_deref()) {
        (Some(texts), _) if !texts.is_empty() => cidrs(texts, "spec.podCIDRs", report),
        (_, Some(text)) if !text.is_empty() => cidrs(&[text.to_owned()], "spec.podCIDR", report),
        _ => Vec::new(),
    }
}

fn cidrs(texts: &[String], field: &str, report: &mut Report<'_>) -> Vec<IpNet> {
    let mut found = Vec::new();
    for (index, text) in texts.iter().enumerate() {
        match parse_cidr(text) {
            Some(net) => found.push(net),
            None => report.warn(format!("{field}[{index}]"), format!("{text:?} is not a network; it is left out")),
        }
    }
    found
}
