//! What the API server would refuse, as far as it matters to a node, and what it would allocate and a manifest must therefore
//! write itself. Objects arrive here defaulted.
//!
//! Follows the validation of Kubernetes v1.33 (`ValidateService`, `ValidateEndpointSlice`). Clashes *between* objects are found
//! where all of them are known (`picture`).

mod service;
mod slice;

#[cfg(test)]
mod tests;

pub(crate) use service::service;
pub(crate) use slice::endpoint_slice;

use crate::source::Report;
use crate::source::address::{is_sloppy_ip, parse_cidr, parse_ip};
use k8s_openapi::api::{core::v1 as core, networking::v1 as networking};
use std::net::IpAddr;

/// Validates a Node.
pub(crate) fn node(object: &core::Node, report: &mut Report<'_>) {
    subdomain(object.metadata.name.as_deref().unwrap_or(""), "metadata.name", report);
    if let Some(spec) = &object.spec {
        for (index, text) in spec.pod_cidrs.iter().flatten().enumerate() {
            cidr(text, || format!("spec.podCIDRs[{index}]"), report);
        }
    }
    for (index, entry) in object.status.iter().flat_map(|s| s.addresses.iter().flatten()).enumerate() {
        if matches!(entry.type_.as_str(), "InternalIP" | "ExternalIP") {
            ip(&entry.address, || format!("status.addresses[{index}].address"), report);
        }
    }
}

/// Validates a ServiceCIDR.
pub(crate) fn service_cidr(object: &networking::ServiceCIDR, report: &mut Report<'_>) {
    subdomain(object.metadata.name.as_deref().unwrap_or(""), "metadata.name", report);
    let cidrs = object.spec.as_ref().and_then(|spec| spec.cidrs.as_deref()).unwrap_or_default();
    if cidrs.is_empty() {
        report.error("spec.cidrs", "is missing; write one network, or one of each family");
    }
    if cidrs.len() > 2 {
        report.error("spec.cidrs", "has more than two networks; write one, or one of each family");
    }
    let mut families = Vec::new();
    for (index, text) in cidrs.iter().enumerate() {
        let Some(net) = cidr(text, || format!("spec.cidrs[{index}]"), report) else { continue };
        let v4 = net.addr().is_ipv4();
        if families.contains(&v4) {
            report.error(format!("spec.cidrs[{index}]"), "is the second network of its family");
        }
        families.push(v4);
    }
}

/// An address; leading zeros are accepted with a warning.
fn ip(text: &str, field: impl Fn() -> String, report: &mut Report<'_>) -> Option<IpAddr> {
    let parsed = parse_ip(text);
    if parsed.is_none() {
        report.error(field(), format!("{text:?} is not an IP address"));
    } else if is_sloppy_ip(text) {
        report.warn(field(), format!("{text:?} has leading zeros, which are read as decimal; write it without them"));
    }
    parsed
}

fn cidr(text: &str, field: impl Fn() -> String, report: &mut Report<'_>) -> Option<ipnet::IpNet> {
    let parsed = parse_cidr(text);
    if parsed.is_none() {
        report.error(field(), format!("{text:?} is not a network such as 10.0.0.0/8 or 2001:db8::/32"));
    }
    parsed
}

/// A DNS label: at most 63 of `a-z`, `0-9`, `-`, not `-` at an end.
fn is_label(text: &str) -> bool {
    let bytes = text.as_bytes();
    (1..=63).contains(&bytes.len())
        && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
        && bytes.first() != Some(&b'-')
        && bytes.last() != Some(&b'-')
}

fn label(text: &str, field: impl Into<String>, report: &mut Report<'_>) {
    if !is_label(text) {
        report.error(
            field,
            format!("{text:?} is not a DNS label (at most 63 of a-z, 0-9 and '-', '-' not first or last)"),
        );
    }
}

fn subdomain(text: &str, field: &str, report: &mut Report<'_>) {
    let valid = text.len() <= 253 && !text.is_empty() && text.split('.').all(|part| part.len() <= 253 && is_part(part));
    if !valid {
        report.error(field, format!("{text:?} is not a DNS name (at most 253 of a-z, 0-9, '-' and '.')"));
    }
}

/// A part of a DNS-1123 subdomain: like a label, but of any length.
fn is_part(part: &str) -> bool {
    let bytes = part.as_bytes();
    !bytes.is_empty()
        && bytes.iter().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || *b == b'-')
        && bytes.first() != Some(&b'-')
        && bytes.last() != Some(&b'-')
}

/// One of `allowed`.
fn one_of(text: &str, allowed: &[&str], field: impl Into<String>, report: &mut Report<'_>) -> bool {
    let known = allowed.contains(&text);
    if !known {
        report.error(field, format!("{text:?} is not known; write one of {}", allowed.join(", ")));
    }
    known
}

/// A port number from 1 to 65535.
fn port(number: i32, field: impl Into<String>, report: &mut Report<'_>) -> bool {
    let valid = (1..=65_535).contains(&number);
    if !valid {
        report.error(field, format!("{number} is not a port number from 1 to 65535"));
    }
    valid
}
