//! Which Services claim a probe's destination, read from the objects alone, and which endpoints they have.

#![forbid(unsafe_code)]

use crate::engine::Objects;
use crate::probe::Proto;
use proxy::model::ObjectName;
use serde_json::Value;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

/// A Service that has the destination's address, protocol and port.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    pub(super) service: ObjectName,
    /// As ClusterIP; else as external IP, load balancer address or NodePort.
    pub(super) cluster_ip: bool,
    /// Its endpoints for that port that are ready, or serve while they terminate. Policies and topology play no part.
    pub(super) endpoints: BTreeSet<SocketAddr>,
    /// Its endpoints for that port that are serving, whether or not they are ready.
    pub(super) serving: BTreeSet<SocketAddr>,
}

/// All claims to the destination, NodePorts included if it is one of the node's addresses.
pub(super) fn claims(objects: &Objects, proto: Proto, to: SocketAddr, node_addresses: &BTreeSet<IpAddr>) -> Vec<Claim> {
    objects
        .values()
        .filter(|o| o["kind"] == "Service")
        .flat_map(|o| claim(objects, proto, to, o, node_addresses))
        .collect()
}

fn claim(
    objects: &Objects,
    proto: Proto,
    to: SocketAddr,
    service: &Value,
    node_addresses: &BTreeSet<IpAddr>,
) -> Vec<Claim> {
    let labels = &service["metadata"]["labels"];
    if !labels["service.kubernetes.io/service-proxy-name"].is_null() {
        return Vec::new();
    }
    let ip = to.ip();
    let is_ip = |value: &Value| value.as_str().and_then(|text| text.parse::<IpAddr>().ok()) == Some(ip);
    let cluster_ip = list(&service["spec"]["clusterIPs"]).iter().any(is_ip);
    let external = list(&service["spec"]["externalIPs"]).iter().any(is_ip)
        || list(&service["status"]["loadBalancer"]["ingress"])
            .iter()
            .any(|i| i["ipMode"] != "Proxy" && is_ip(&i["ip"]));
    let protocol = match proto {
        Proto::Tcp => "TCP",
        Proto::Udp => "UDP",
        Proto::Sctp => "SCTP",
        Proto::Icmp => return Vec::new(),
    };
    let name = name_of(service, "/metadata/name");
    let owns = |port: &&Value| {
        port["protocol"] == protocol
            && ((cluster_ip || external) && port["port"] == to.port()
                || node_addresses.contains(&ip) && port["nodePort"] == to.port())
    };
    list(&service["spec"]["ports"])
        .iter()
        .filter(owns)
        .map(|port| {
            let family = if ip.is_ipv4() { "IPv4" } else { "IPv6" };
            // API: without `serving`, `ready` counts; without both, it serves.
            let serving = |is: &dyn Fn(&str) -> Option<bool>| is("serving").or(is("ready")).unwrap_or(true);
            let usable = |is: &dyn Fn(&str) -> Option<bool>| {
                is("ready").unwrap_or(true) || (serving(is) && is("terminating").unwrap_or(false))
            };
            Claim {
                service: name.clone(),
                cluster_ip,
                endpoints: endpoints(objects, &name, port, family, usable),
                serving: endpoints(objects, &name, port, family, serving),
            }
        })
        .collect()
}

/// Endpoints of a service port whose conditions, given by name, are as wanted.
fn endpoints(
    objects: &Objects,
    service: &ObjectName,
    port: &Value,
    family: &str,
    wanted: impl Fn(&dyn Fn(&str) -> Option<bool>) -> bool,
) -> BTreeSet<SocketAddr> {
    let slices = objects.values().filter(|o| {
        o["kind"] == "EndpointSlice"
            && o["addressType"] == family
            && o["metadata"]["labels"]["service.kubernetes.io/headless"].is_null()
            && name_of(o, "/metadata/labels/kubernetes.io~1service-name") == *service
    });
    let mut found = BTreeSet::new();
    for slice in slices {
        let same = |p: &&Value| {
            p["name"].as_str() == Some(port["name"].as_str().unwrap_or_default()) && p["protocol"] == port["protocol"]
        };
        let numbers: Vec<u16> = list(&slice["ports"])
            .iter()
            .filter(same)
            .filter_map(|p| p["port"].as_u64().and_then(|n| u16::try_from(n).ok()))
            .collect();
        for endpoint in list(&slice["endpoints"]) {
            let usable = wanted(&|name| endpoint["conditions"][name].as_bool());
            let address = endpoint["addresses"][0].as_str().and_then(|text| text.parse::<IpAddr>().ok());
            if let (true, Some(address)) = (usable, address) {
                found.extend(numbers.iter().map(|number| SocketAddr::new(address, *number)));
            }
        }
    }
    found
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn name_of(object: &Value, pointer: &str) -> ObjectName {
    let namespace = object["metadata"]["namespace"].as_str().unwrap_or("default");
    let name = object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    ObjectName { namespace: namespace.into(), name: name.into() }
}
