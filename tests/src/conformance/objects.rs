//! The cluster of a round as it can be changed, and the Kubernetes objects that it is written as.
//!
//! A [`Service`] keeps what its present type does not allow (a NodePort, source ranges, …) and writes only what the API server
//! accepts for the type, so that a type can change and change back.

#![forbid(unsafe_code)]

use super::places::{self, Place};
use crate::engine::Objects;
use crate::world::{NODE_NAME, REMOTE_NODE_NAME};
use proxy::model::{IpFamily, ObjectName, Protocol};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::net::IpAddr;

/// All that exists.
#[derive(Clone, Debug, Default)]
pub(super) struct Cluster {
    /// Zone label of the node.
    pub(super) zone: Option<&'static str>,
    /// In the order in which they were made.
    pub(super) services: Vec<Service>,
    /// Number for the next Service.
    pub(super) next_number: u16,
    /// Next free NodePort.
    pub(super) next_node_port: u16,
}

/// `spec.type`, with headless Services as one of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    ClusterIp,
    NodePort,
    LoadBalancer,
    Headless,
    ExternalName,
}

#[derive(Clone, Debug)]
pub(super) struct Service {
    pub(super) namespace: &'static str,
    pub(super) name: String,
    pub(super) kind: Kind,
    /// The first is the primary one and never changes.
    pub(super) families: Vec<IpFamily>,
    /// Its ClusterIPs, health check port and own addresses follow from it.
    pub(super) number: u16,
    pub(super) ports: Vec<Port>,
    pub(super) internal_local: bool,
    pub(super) external_local: bool,
    /// ClientIP affinity and its timeout in seconds.
    pub(super) affinity: Option<u32>,
    pub(super) external_ips: Vec<IpAddr>,
    pub(super) ingress: Vec<Ingress>,
    pub(super) ranges: Vec<&'static str>,
    /// `allocateLoadBalancerNodePorts`
    pub(super) allocate_node_ports: bool,
    /// Label `service.kubernetes.io/service-proxy-name`
    pub(super) other_proxy: bool,
    /// Label `service.kubernetes.io/headless`, which means nothing on a Service.
    pub(super) headless_label: bool,
    pub(super) publish_not_ready: bool,
    pub(super) distribution: Option<&'static str>,
    pub(super) slices: Vec<Slice>,
    pub(super) next_slice: u32,
    /// Never changed or removed: a deliberate difference depends on it.
    pub(super) pinned: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Port {
    pub(super) name: String,
    pub(super) protocol: Protocol,
    pub(super) port: u16,
    pub(super) node_port: u16,
    pub(super) target: u16,
}

/// An entry of `status.loadBalancer.ingress`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ingress {
    pub(super) ip: IpAddr,
    /// ipMode Proxy
    pub(super) proxy: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Slice {
    pub(super) number: u32,
    /// `None`: of the type FQDN.
    pub(super) family: Option<IpFamily>,
    pub(super) ports: SlicePorts,
    pub(super) endpoints: Vec<Endpoint>,
    /// Label `service.kubernetes.io/headless`: not for proxies.
    pub(super) headless_label: bool,
}

/// Ports of a slice, made from those of its Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlicePorts {
    /// Target ports, each plus this (a named target port may differ between pods).
    Plus(u16),
    /// Ports that the Service does not have.
    Foreign,
    /// A port without a number, which would mean all.
    All,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Endpoint {
    pub(super) place: Place,
    /// Without `nodeName`.
    pub(super) nowhere: bool,
    pub(super) ready: Option<bool>,
    pub(super) serving: Option<bool>,
    pub(super) terminating: Option<bool>,
    pub(super) zones: Vec<&'static str>,
    pub(super) nodes: Vec<&'static str>,
    /// A second address, which nobody reads.
    pub(super) second: bool,
}

impl Endpoint {
    /// Conditions as the API defaults them: ready, serving, terminating.
    pub(super) fn conditions(&self) -> (bool, bool, bool) {
        (self.ready.unwrap_or(true), self.serving.unwrap_or(true), self.terminating.unwrap_or(false))
    }
}

impl Service {
    pub(super) fn object_name(&self) -> ObjectName {
        ObjectName { namespace: self.namespace.into(), name: self.name.as_str().into() }
    }

    /// Has ClusterIPs, which are proxied unless another proxy is named.
    pub(super) fn has_cluster_ip(&self) -> bool {
        !matches!(self.kind, Kind::Headless | Kind::ExternalName)
    }

    pub(super) fn cluster_ip(&self, family: IpFamily) -> Option<IpAddr> {
        (self.has_cluster_ip() && self.families.contains(&family)).then(|| places::cluster_ip(family, self.number))
    }

    /// The NodePort of a port, if the type gives it one; else 0.
    pub(super) fn node_port(&self, port: &Port) -> u16 {
        match self.kind {
            Kind::NodePort => port.node_port,
            Kind::LoadBalancer if self.allocate_node_ports => port.node_port,
            _ => 0,
        }
    }

    /// External IPs that the type allows.
    pub(super) fn external_ips(&self) -> &[IpAddr] {
        if self.has_cluster_ip() { &self.external_ips } else { &[] }
    }

    /// Load balancer entries that the type allows.
    pub(super) fn ingress(&self) -> &[Ingress] {
        if self.kind == Kind::LoadBalancer { &self.ingress } else { &[] }
    }

    fn may_have_external_policy(&self) -> bool {
        matches!(self.kind, Kind::NodePort | Kind::LoadBalancer) || !self.external_ips().is_empty()
    }

    fn write(&self) -> Value {
        let mut labels = json!({ "app": self.name });
        if self.other_proxy {
            labels["service.kubernetes.io/service-proxy-name"] = json!("another");
        }
        if self.headless_label {
            labels["service.kubernetes.io/headless"] = json!("");
        }
        let mut object = json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": { "namespace": self.namespace, "name": self.name, "labels": labels },
        });
        if self.kind == Kind::ExternalName {
            object["spec"] = json!({ "type": "ExternalName", "externalName": "elsewhere.example.com" });
            return object;
        }
        let ports: Vec<Value> = self.ports.iter().map(|port| self.write_port(port)).collect();
        let mut spec = json!({
            "type": match self.kind {
                Kind::NodePort => "NodePort",
                Kind::LoadBalancer => "LoadBalancer",
                _ => "ClusterIP",
            },
            "ipFamilies": self.families.iter().map(|f| family_name(*f)).collect::<Vec<_>>(),
            "ipFamilyPolicy": if self.families.len() == 1 { "SingleStack" } else { "RequireDualStack" },
            "internalTrafficPolicy": if self.internal_local { "Local" } else { "Cluster" },
            "sessionAffinity": if self.affinity.is_some() { "ClientIP" } else { "None" },
            "ports": ports,
        });
        let ips: Vec<String> = match self.kind {
            Kind::Headless => vec!["None".into()],
            _ => self.families.iter().filter_map(|f| self.cluster_ip(*f)).map(|ip| ip.to_string()).collect(),
        };
        spec["clusterIP"] = json!(ips[0]);
        spec["clusterIPs"] = json!(ips);
        if let Some(seconds) = self.affinity {
            spec["sessionAffinityConfig"] = json!({ "clientIP": { "timeoutSeconds": seconds } });
        }
        if !self.external_ips().is_empty() {
            spec["externalIPs"] = json!(self.external_ips());
        }
        if self.may_have_external_policy() {
            spec["externalTrafficPolicy"] = json!(if self.external_local { "Local" } else { "Cluster" });
        }
        if self.kind == Kind::LoadBalancer {
            spec["allocateLoadBalancerNodePorts"] = json!(self.allocate_node_ports);
            if self.external_local {
                spec["healthCheckNodePort"] = json!(places::health_check_port(self.number));
            }
            if !self.ranges.is_empty() {
                spec["loadBalancerSourceRanges"] = json!(self.ranges);
            }
        }
        if self.publish_not_ready {
            spec["publishNotReadyAddresses"] = json!(true);
        }
        if let Some(distribution) = self.distribution {
            spec["trafficDistribution"] = json!(distribution);
        }
        object["spec"] = spec;
        let ingress: Vec<Value> = self
            .ingress()
            .iter()
            .map(|i| json!({ "ip": i.ip, "ipMode": if i.proxy { "Proxy" } else { "VIP" } }))
            .collect();
        // Always written: who merges it into the object that exists takes old entries away with it.
        object["status"] = json!({ "loadBalancer": { "ingress": ingress } });
        object
    }

    fn write_port(&self, port: &Port) -> Value {
        let mut value =
            json!({ "port": port.port, "protocol": protocol_name(port.protocol), "targetPort": port.target });
        if !port.name.is_empty() {
            value["name"] = json!(port.name);
        }
        if self.node_port(port) != 0 {
            value["nodePort"] = json!(port.node_port);
        }
        value
    }

    fn write_slice(&self, slice: &Slice) -> Value {
        let ports: Vec<Value> = self
            .ports
            .iter()
            .enumerate()
            .map(|(index, port)| {
                let protocol = protocol_name(port.protocol);
                match slice.ports {
                    SlicePorts::Plus(more) => {
                        json!({ "name": port.name, "protocol": protocol, "port": port.target + more })
                    }
                    SlicePorts::Foreign => {
                        json!({ "name": format!("foreign-{index}"), "protocol": protocol, "port": port.target })
                    }
                    SlicePorts::All => json!({ "name": port.name, "protocol": protocol }),
                }
            })
            .collect();
        let mut labels = json!({
            "kubernetes.io/service-name": self.name, "endpointslice.kubernetes.io/managed-by": "conformance.example.com",
        });
        if slice.headless_label {
            labels["service.kubernetes.io/headless"] = json!("");
        }
        let endpoints: Vec<Value> = slice.endpoints.iter().map(|e| write_endpoint(e, slice.family)).collect();
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": { "namespace": self.namespace, "name": format!("{}-{}", self.name, slice.number), "labels": labels },
            "addressType": slice.family.map_or("FQDN", family_name),
            "ports": ports,
            "endpoints": endpoints,
        })
    }
}

fn write_endpoint(endpoint: &Endpoint, family: Option<IpFamily>) -> Value {
    let mut addresses = vec![family.map_or_else(
        || format!("{}.example.com", endpoint.place.name()),
        |family| endpoint.place.address(family).to_string(),
    )];
    if let (true, Some(family)) = (endpoint.second, family) {
        addresses.push(places::unrelated(family).to_string());
    }
    let mut value = json!({ "addresses": addresses });
    let conditions = [("ready", endpoint.ready), ("serving", endpoint.serving), ("terminating", endpoint.terminating)];
    let conditions: serde_json::Map<String, Value> =
        conditions.into_iter().filter_map(|(name, is)| Some((name.to_string(), json!(is?)))).collect();
    if !conditions.is_empty() {
        value["conditions"] = Value::Object(conditions);
    }
    if !endpoint.nowhere {
        value["nodeName"] = json!(if endpoint.place.is_local() { NODE_NAME } else { REMOTE_NODE_NAME });
    }
    let named = |names: &[&str]| names.iter().map(|name| json!({ "name": name })).collect::<Vec<_>>();
    let mut hints = serde_json::Map::new();
    if !endpoint.zones.is_empty() {
        hints.insert("forZones".into(), json!(named(&endpoint.zones)));
    }
    if !endpoint.nodes.is_empty() {
        hints.insert("forNodes".into(), json!(named(&endpoint.nodes)));
    }
    if !hints.is_empty() {
        value["hints"] = Value::Object(hints);
    }
    value
}

impl Cluster {
    /// Removes addresses with which a Service would take a frontend of an earlier one: kube-proxy leaves it to chance who wins.
    pub(super) fn untangle(&mut self) {
        let mut taken: BTreeSet<(IpAddr, Protocol, u16)> = BTreeSet::new();
        for service in self.services.iter().filter(|s| s.pinned) {
            taken.extend(claims(service, &service.external_ips));
            taken.extend(claims(service, &service.ingress.iter().map(|i| i.ip).collect::<Vec<_>>()));
        }
        for service in self.services.iter_mut().filter(|s| !s.pinned) {
            let ports = service.clone();
            let free = |ip: &IpAddr| claims(&ports, std::slice::from_ref(ip)).all(|claim| !taken.contains(&claim));
            service.external_ips.retain(free);
            service.ingress.retain(|i| free(&i.ip));
            taken.extend(claims(service, &service.external_ips));
            taken.extend(claims(service, &service.ingress.iter().map(|i| i.ip).collect::<Vec<_>>()));
        }
    }

    /// The Services that have this address, protocol and port as a frontend, or the address as ClusterIP.
    pub(super) fn owners(&self, ip: IpAddr, protocol: Option<Protocol>, port: u16, local: bool) -> Vec<&Service> {
        let owns = |service: &&Service| {
            let here = |p: &&Port| Some(p.protocol) == protocol;
            let address = service.external_ips().contains(&ip) || service.ingress().iter().any(|i| i.ip == ip);
            service.cluster_ip(IpFamily::of(ip)) == Some(ip)
                || (address && service.ports.iter().filter(here).any(|p| p.port == port))
                || (local && port != 0 && service.ports.iter().filter(here).any(|p| service.node_port(p) == port))
        };
        self.services.iter().filter(owns).collect()
    }

    /// Everything as objects.
    pub(super) fn objects(&self) -> Objects {
        let mut objects = Objects::default();
        for (name, zone, addresses, cidrs) in [
            (NODE_NAME, self.zone, IpFamily::ALL.map(places::node), ["10.0.0.0/24", "fd00:10::/112"]),
            (
                REMOTE_NODE_NAME,
                Some("zone-b"),
                IpFamily::ALL.map(|f| Place::RemoteHost(0).address(f)),
                ["10.0.1.0/24", "fd00:10::1:0/112"],
            ),
        ] {
            let mut labels = json!({ "kubernetes.io/hostname": name });
            if let Some(zone) = zone {
                labels["topology.kubernetes.io/zone"] = json!(zone);
            }
            let addresses: Vec<Value> =
                addresses.iter().map(|ip| json!({ "type": "InternalIP", "address": ip })).collect();
            objects.put(json!({
                "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "labels": labels },
                "spec": { "podCIDR": cidrs[0], "podCIDRs": cidrs }, "status": { "addresses": addresses },
            }));
        }
        objects.put(json!({
            "apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": { "name": "kubernetes" },
            "spec": { "cidrs": crate::apiserver::SERVICE_CIDRS.split(',').collect::<Vec<_>>() },
        }));
        for service in &self.services {
            service.slices.iter().for_each(|slice| objects.put(service.write_slice(slice)));
            objects.put(service.write());
        }
        objects
    }
}

fn claims<'a>(service: &'a Service, ips: &'a [IpAddr]) -> impl Iterator<Item = (IpAddr, Protocol, u16)> + 'a {
    ips.iter().flat_map(|ip| service.ports.iter().map(|port| (*ip, port.protocol, port.port)))
}

pub(super) fn family_name(family: IpFamily) -> &'static str {
    match family {
        IpFamily::V4 => "IPv4",
        IpFamily::V6 => "IPv6",
    }
}

fn protocol_name(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Tcp => "TCP",
        Protocol::Udp => "UDP",
        Protocol::Sctp => "SCTP",
    }
}
