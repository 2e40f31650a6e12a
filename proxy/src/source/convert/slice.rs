//! EndpointSlice objects.

use super::{LABEL_HEADLESS, LABEL_SERVICE_NAME, Names, has_label, object_name, port_number, protocol};
use crate::model::{Endpoint, EndpointSlice, IpFamily, ObjectName, SlicePort};
use crate::source::address::{parse_ip, unusable};
use crate::source::{Problem, Report};
use k8s_openapi::api::discovery::v1 as discovery;
use std::sync::Arc;

/// Converts an EndpointSlice. `None`: of a headless Service, of no Service, or with addresses that are not IP addresses (FQDN).
#[must_use]
pub fn endpoint_slice(object: &discovery::EndpointSlice, names: &mut Names) -> (Option<EndpointSlice>, Vec<Problem>) {
    let meta = &object.metadata;
    let (namespace, name) = (meta.namespace.as_deref().unwrap_or(""), meta.name.as_deref().unwrap_or(""));
    let mut report = Report::new("EndpointSlice", Some(namespace), name);
    let slice = convert(object, names, &mut report);
    (slice, report.into_problems())
}

fn convert(object: &discovery::EndpointSlice, names: &mut Names, report: &mut Report<'_>) -> Option<EndpointSlice> {
    let meta = &object.metadata;
    let Some(name) = object_name(meta, names) else {
        report.error("metadata.name", "namespace or name is missing; the object is ignored");
        return None;
    };
    if has_label(meta, LABEL_HEADLESS) {
        return None;
    }
    let family = match object.address_type.as_str() {
        "IPv4" => IpFamily::V4,
        "IPv6" => IpFamily::V6,
        other => {
            report
                .warn("addressType", format!("{other:?} is not served, only IPv4 and IPv6 are; the slice is ignored"));
            return None;
        }
    };
    let Some(service) = meta.labels.as_ref().and_then(|l| l.get(LABEL_SERVICE_NAME)).filter(|name| !name.is_empty())
    else {
        report.warn(
            "metadata.labels",
            format!("label {LABEL_SERVICE_NAME} is missing, so the slice belongs to no Service"),
        );
        return None;
    };
    Some(EndpointSlice {
        service: ObjectName { namespace: Arc::clone(&name.namespace), name: service.as_str().into() },
        name,
        family,
        ports: ports(object, names, report),
        endpoints: endpoints(object, family, names, report),
    })
}

fn ports(object: &discovery::EndpointSlice, names: &mut Names, report: &mut Report<'_>) -> Vec<SlicePort> {
    let mut found = Vec::with_capacity(object.ports.as_ref().map_or(0, Vec::len));
    for (index, entry) in object.ports.iter().flatten().enumerate() {
        let field = |name: &str| format!("ports[{index}].{name}");
        let Some(name) = entry.name.as_deref() else {
            report.warn(field("name"), "no name; the port is left out");
            continue;
        };
        let Some(protocol) = protocol(entry.protocol.as_deref()) else {
            let text = entry.protocol.as_deref().unwrap_or("");
            report.warn(field("protocol"), format!("unknown protocol {text:?}; the port is left out"));
            continue;
        };
        let Some(port) = entry.port.and_then(port_number) else {
            let message = match entry.port {
                None => "no number, which means all ports: not supported; the port is left out".to_owned(),
                Some(number) => format!("{number} is not a port number; the port is left out"),
            };
            report.warn(field("port"), message);
            continue;
        };
        found.push(SlicePort { name: names.share(name), protocol, port });
    }
    found
}

fn endpoints(
    object: &discovery::EndpointSlice,
    family: IpFamily,
    names: &mut Names,
    report: &mut Report<'_>,
) -> Vec<Endpoint> {
    let mut found = Vec::with_capacity(object.endpoints.len());
    for (index, entry) in object.endpoints.iter().enumerate() {
        // kube-proxy v1.37 reads the first address only: all addresses of one endpoint are the same to its consumers.
        let Some(text) = entry.addresses.first() else {
            report.warn(format!("endpoints[{index}].addresses"), "no address; the endpoint is left out");
            continue;
        };
        let complaint = match parse_ip(text) {
            Some(address) if IpFamily::of(address) != family => Some(format!("{address} is not an {family} address")),
            Some(address) => unusable(address).map(|why| format!("{address}: {why}")),
            None => Some(format!("{text:?} is not an IP address")),
        };
        let (None, Some(address)) = (&complaint, parse_ip(text)) else {
            let complaint = complaint.unwrap_or_default();
            report.warn(format!("endpoints[{index}].addresses[0]"), format!("{complaint}; the endpoint is left out"));
            continue;
        };
        let conditions = entry.conditions.as_ref();
        let hints = entry.hints.as_ref();
        found.push(Endpoint {
            address,
            node_name: entry.node_name.as_deref().filter(|name| !name.is_empty()).map(|name| names.share(name)),
            ready: conditions.and_then(|c| c.ready).unwrap_or(true),
            serving: conditions.and_then(|c| c.serving).unwrap_or(true),
            terminating: conditions.and_then(|c| c.terminating).unwrap_or(false),
            zone_hints: hints
                .and_then(|h| h.for_zones.as_ref())
                .into_iter()
                .flatten()
                .map(|z| names.share(&z.name))
                .collect(),
            node_hints: hints
                .and_then(|h| h.for_nodes.as_ref())
                .into_iter()
                .flatten()
                .map(|n| names.share(&n.name))
                .collect(),
        });
    }
    found
}
