//! EndpointSlices.

use super::{ip, label, one_of, port, subdomain};
use crate::model::IpFamily;
use crate::source::Report;
use crate::source::address::unusable;
use crate::source::convert::LABEL_SERVICE_NAME;
use k8s_openapi::api::discovery::v1 as discovery;
use std::collections::BTreeMap;

/// Limits of the API (Kubernetes v1.33 `pkg/apis/discovery/validation`).
const MAX_ENDPOINTS: usize = 1000;
const MAX_ADDRESSES: usize = 100;
const MAX_PORTS: usize = 20_000;
const MAX_HINTS: usize = 8;

/// Validates an EndpointSlice.
pub(crate) fn endpoint_slice(object: &discovery::EndpointSlice, report: &mut Report<'_>) {
    subdomain(object.metadata.name.as_deref().unwrap_or(""), "metadata.name", report);
    label(object.metadata.namespace.as_deref().unwrap_or(""), "metadata.namespace", report);
    if let Some(service) = object.metadata.labels.as_ref().and_then(|l| l.get(LABEL_SERVICE_NAME))
        && !service.is_empty()
    {
        label(service, format!("metadata.labels[{LABEL_SERVICE_NAME}]"), report);
    }
    let family = match object.address_type.as_str() {
        "IPv4" => Some(IpFamily::V4),
        "IPv6" => Some(IpFamily::V6),
        "FQDN" => None,
        "" => {
            report.error("addressType", "is missing; write IPv4 or IPv6");
            return;
        }
        other => {
            one_of(other, &["IPv4", "IPv6", "FQDN"], "addressType", report);
            return;
        }
    };
    ports(object, report);
    if object.endpoints.len() > MAX_ENDPOINTS {
        let message =
            format!("has {} entries, more than {MAX_ENDPOINTS}; write several slices", object.endpoints.len());
        report.error("endpoints", message);
    }
    for (index, endpoint) in object.endpoints.iter().enumerate() {
        addresses(endpoint, index, family, report);
        hints(endpoint, index, report);
        if let Some(node) = &endpoint.node_name {
            subdomain(node, &format!("endpoints[{index}].nodeName"), report);
        }
    }
}

fn ports(object: &discovery::EndpointSlice, report: &mut Report<'_>) {
    let entries = object.ports.as_deref().unwrap_or_default();
    if entries.len() > MAX_PORTS {
        report.error("ports", format!("has {} entries, more than {MAX_PORTS}", entries.len()));
        return;
    }
    let mut names = BTreeMap::new();
    for (index, entry) in entries.iter().enumerate() {
        let field = |name: &str| format!("ports[{index}].{name}");
        let name = entry.name.as_deref().unwrap_or("");
        if !name.is_empty() {
            label(name, field("name"), report);
        }
        if let Some(first) = names.insert(name, index) {
            report.error(field("name"), format!("{name:?} is also the name of ports[{first}]"));
        }
        one_of(entry.protocol.as_deref().unwrap_or(""), &["TCP", "UDP", "SCTP"], field("protocol"), report);
        if let Some(number) = entry.port {
            port(number, field("port"), report);
        }
    }
}

fn addresses(endpoint: &discovery::Endpoint, index: usize, family: Option<IpFamily>, report: &mut Report<'_>) {
    let field = format!("endpoints[{index}].addresses");
    match endpoint.addresses.len() {
        0 => report.error(&field, "is empty; write one address"),
        1 => {}
        2..=MAX_ADDRESSES => report.warn(&field, "only the first address is used; write an endpoint for each"),
        count => report.error(&field, format!("has {count} entries, more than {MAX_ADDRESSES}")),
    }
    let Some(family) = family else { return };
    for (position, text) in endpoint.addresses.iter().enumerate() {
        let field = || format!("{field}[{position}]");
        let Some(address) = ip(text, field, report) else { continue };
        if IpFamily::of(address) != family {
            report.error(field(), format!("{address} is not an {family} address as addressType says"));
        } else if let Some(why) = unusable(address) {
            report.error(field(), format!("{address}: {why}"));
        }
    }
}

fn hints(endpoint: &discovery::Endpoint, index: usize, report: &mut Report<'_>) {
    let Some(hints) = &endpoint.hints else { return };
    let zones: Vec<&str> = hints.for_zones.iter().flatten().map(|zone| zone.name.as_str()).collect();
    let nodes: Vec<&str> = hints.for_nodes.iter().flatten().map(|node| node.name.as_str()).collect();
    for (name, list) in [("forZones", zones), ("forNodes", nodes)] {
        let field = format!("endpoints[{index}].hints.{name}");
        if list.len() > MAX_HINTS {
            report.error(&field, format!("has {} entries, more than {MAX_HINTS}", list.len()));
        }
        for (position, value) in list.iter().enumerate() {
            if value.is_empty() {
                report.error(format!("{field}[{position}].name"), "is missing");
            } else if list[..position].contains(value) {
                report.error(format!("{field}[{position}].name"), format!("{value:?} is written twice"));
            }
        }
    }
}
