//! API objects in Kubernetes' protobuf encoding: only the fields that a proxy reads, all others are skipped.
//!
//! kube-apiserver writes protobuf several times faster than JSON and in half the space, and kube-proxy asks for it too
//! (`clientConnection.contentType`). Field numbers: `k8s.io/api` v0.37 `{core,discovery,networking}/v1/generated.proto` and
//! `k8s.io/apimachinery` `pkg/apis/meta/v1/generated.proto`; they never change. A message turns into the same `k8s-openapi`
//! object that JSON is decoded into, so that everything after it is common to both.

use ::kube::core::response::StatusDetails;
use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery, networking::v1 as networking};
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
use std::collections::BTreeMap;

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ListMeta {
    #[prost(string, tag = "2")]
    pub resource_version: String,
    #[prost(string, tag = "3")]
    pub continue_: String,
}

/// What every object begins with, for one of which the rest cannot be decoded.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Named {
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<ObjectMeta>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ObjectMeta {
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    #[prost(string, optional, tag = "3")]
    pub namespace: Option<String>,
    #[prost(btree_map = "string, string", tag = "11")]
    pub labels: BTreeMap<String, String>,
}

/// `runtime.Unknown`, the envelope of every answer.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Unknown {
    #[prost(bytes = "vec", tag = "2")]
    pub raw: Vec<u8>,
}

/// An answer with an error status.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Status {
    #[prost(string, tag = "3")]
    pub message: String,
    #[prost(string, tag = "4")]
    pub reason: String,
    #[prost(message, optional, tag = "5")]
    pub details: Option<Details>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Details {
    #[prost(uint32, tag = "5")]
    pub retry_after_seconds: u32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Service {
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<ObjectMeta>,
    #[prost(message, optional, tag = "2")]
    pub spec: Option<ServiceSpec>,
    #[prost(message, optional, tag = "3")]
    pub status: Option<ServiceStatus>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ServiceSpec {
    #[prost(message, repeated, tag = "1")]
    pub ports: Vec<ServicePort>,
    #[prost(btree_map = "string, string", tag = "2")]
    pub selector: BTreeMap<String, String>,
    #[prost(string, optional, tag = "3")]
    pub cluster_ip: Option<String>,
    #[prost(string, optional, tag = "4")]
    pub type_: Option<String>,
    #[prost(string, repeated, tag = "5")]
    pub external_ips: Vec<String>,
    #[prost(string, optional, tag = "7")]
    pub session_affinity: Option<String>,
    #[prost(string, repeated, tag = "9")]
    pub load_balancer_source_ranges: Vec<String>,
    #[prost(string, optional, tag = "11")]
    pub external_traffic_policy: Option<String>,
    #[prost(int32, optional, tag = "12")]
    pub health_check_node_port: Option<i32>,
    #[prost(bool, optional, tag = "13")]
    pub publish_not_ready_addresses: Option<bool>,
    #[prost(message, optional, tag = "14")]
    pub session_affinity_config: Option<SessionAffinityConfig>,
    #[prost(string, repeated, tag = "18")]
    pub cluster_ips: Vec<String>,
    #[prost(string, repeated, tag = "19")]
    pub ip_families: Vec<String>,
    #[prost(string, optional, tag = "22")]
    pub internal_traffic_policy: Option<String>,
    #[prost(string, optional, tag = "23")]
    pub traffic_distribution: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ServicePort {
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    #[prost(string, optional, tag = "2")]
    pub protocol: Option<String>,
    #[prost(int32, tag = "3")]
    pub port: i32,
    #[prost(int32, optional, tag = "5")]
    pub node_port: Option<i32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct SessionAffinityConfig {
    #[prost(message, optional, tag = "1")]
    pub client_ip: Option<ClientIpConfig>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ClientIpConfig {
    #[prost(int32, optional, tag = "1")]
    pub timeout_seconds: Option<i32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ServiceStatus {
    #[prost(message, optional, tag = "1")]
    pub load_balancer: Option<LoadBalancerStatus>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct LoadBalancerStatus {
    #[prost(message, repeated, tag = "1")]
    pub ingress: Vec<LoadBalancerIngress>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct LoadBalancerIngress {
    #[prost(string, optional, tag = "1")]
    pub ip: Option<String>,
    #[prost(string, optional, tag = "3")]
    pub ip_mode: Option<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct EndpointSlice {
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<ObjectMeta>,
    #[prost(message, repeated, tag = "2")]
    pub endpoints: Vec<Endpoint>,
    #[prost(message, repeated, tag = "3")]
    pub ports: Vec<EndpointPort>,
    #[prost(string, tag = "4")]
    pub address_type: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Endpoint {
    #[prost(string, repeated, tag = "1")]
    pub addresses: Vec<String>,
    #[prost(message, optional, tag = "2")]
    pub conditions: Option<EndpointConditions>,
    #[prost(string, optional, tag = "6")]
    pub node_name: Option<String>,
    #[prost(message, optional, tag = "8")]
    pub hints: Option<EndpointHints>,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
pub(crate) struct EndpointConditions {
    #[prost(bool, optional, tag = "1")]
    pub ready: Option<bool>,
    #[prost(bool, optional, tag = "2")]
    pub serving: Option<bool>,
    #[prost(bool, optional, tag = "3")]
    pub terminating: Option<bool>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct EndpointHints {
    #[prost(message, repeated, tag = "1")]
    pub for_zones: Vec<Hint>,
    #[prost(message, repeated, tag = "2")]
    pub for_nodes: Vec<Hint>,
}

/// `ForZone` and `ForNode`
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Hint {
    #[prost(string, tag = "1")]
    pub name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct EndpointPort {
    #[prost(string, optional, tag = "1")]
    pub name: Option<String>,
    #[prost(string, optional, tag = "2")]
    pub protocol: Option<String>,
    #[prost(int32, optional, tag = "3")]
    pub port: Option<i32>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Node {
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<ObjectMeta>,
    #[prost(message, optional, tag = "2")]
    pub spec: Option<NodeSpec>,
    #[prost(message, optional, tag = "3")]
    pub status: Option<NodeStatus>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NodeSpec {
    #[prost(string, optional, tag = "1")]
    pub pod_cidr: Option<String>,
    #[prost(string, repeated, tag = "7")]
    pub pod_cidrs: Vec<String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NodeStatus {
    #[prost(message, repeated, tag = "5")]
    pub addresses: Vec<NodeAddress>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NodeAddress {
    #[prost(string, tag = "1")]
    pub type_: String,
    #[prost(string, tag = "2")]
    pub address: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ServiceCidr {
    #[prost(message, optional, tag = "1")]
    pub metadata: Option<ObjectMeta>,
    #[prost(message, optional, tag = "2")]
    pub spec: Option<ServiceCidrSpec>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ServiceCidrSpec {
    #[prost(string, repeated, tag = "1")]
    pub cidrs: Vec<String>,
}

impl From<ObjectMeta> for meta::ObjectMeta {
    fn from(m: ObjectMeta) -> Self {
        Self { name: m.name, namespace: m.namespace, labels: Some(m.labels), ..Self::default() }
    }
}

impl Status {
    pub(super) fn with_code(self, code: u16) -> ::kube::core::Status {
        let mut status = ::kube::core::Status::failure(&self.message, &self.reason).with_code(code);
        status.details = self.details.map(|details| StatusDetails {
            retry_after_seconds: details.retry_after_seconds,
            name: String::new(),
            group: String::new(),
            kind: String::new(),
            uid: String::new(),
            causes: Vec::new(),
        });
        status
    }
}

impl From<Service> for core::Service {
    fn from(s: Service) -> Self {
        let load_balancer = s.status.and_then(|status| status.load_balancer);
        let ingress = load_balancer.map(|l| l.ingress.into_iter().map(Into::into).collect());
        Self {
            metadata: s.metadata.unwrap_or_default().into(),
            spec: s.spec.map(Into::into),
            status: Some(core::ServiceStatus {
                load_balancer: Some(core::LoadBalancerStatus { ingress }),
                ..Default::default()
            }),
        }
    }
}

impl From<ServiceSpec> for core::ServiceSpec {
    fn from(s: ServiceSpec) -> Self {
        Self {
            ports: Some(s.ports.into_iter().map(Into::into).collect()),
            selector: Some(s.selector),
            cluster_ip: s.cluster_ip,
            type_: s.type_,
            external_ips: Some(s.external_ips),
            session_affinity: s.session_affinity,
            load_balancer_source_ranges: Some(s.load_balancer_source_ranges),
            external_traffic_policy: s.external_traffic_policy,
            health_check_node_port: s.health_check_node_port,
            publish_not_ready_addresses: s.publish_not_ready_addresses,
            session_affinity_config: s.session_affinity_config.map(|config| core::SessionAffinityConfig {
                client_ip: config.client_ip.map(|c| core::ClientIPConfig { timeout_seconds: c.timeout_seconds }),
            }),
            cluster_ips: Some(s.cluster_ips),
            ip_families: Some(s.ip_families),
            internal_traffic_policy: s.internal_traffic_policy,
            traffic_distribution: s.traffic_distribution,
            ..Self::default()
        }
    }
}

impl From<ServicePort> for core::ServicePort {
    fn from(p: ServicePort) -> Self {
        Self { name: p.name, protocol: p.protocol, port: p.port, node_port: p.node_port, ..Self::default() }
    }
}

impl From<LoadBalancerIngress> for core::LoadBalancerIngress {
    fn from(i: LoadBalancerIngress) -> Self {
        Self { ip: i.ip, ip_mode: i.ip_mode, ..Self::default() }
    }
}

impl From<EndpointSlice> for discovery::EndpointSlice {
    fn from(s: EndpointSlice) -> Self {
        Self {
            metadata: s.metadata.unwrap_or_default().into(),
            address_type: s.address_type,
            endpoints: s.endpoints.into_iter().map(Into::into).collect(),
            ports: Some(s.ports.into_iter().map(Into::into).collect()),
        }
    }
}

impl From<Endpoint> for discovery::Endpoint {
    fn from(e: Endpoint) -> Self {
        Self {
            addresses: e.addresses,
            conditions: e.conditions.map(|c| discovery::EndpointConditions {
                ready: c.ready,
                serving: c.serving,
                terminating: c.terminating,
            }),
            node_name: e.node_name,
            hints: e.hints.map(|h| discovery::EndpointHints {
                for_zones: Some(h.for_zones.into_iter().map(|z| discovery::ForZone { name: z.name }).collect()),
                for_nodes: Some(h.for_nodes.into_iter().map(|n| discovery::ForNode { name: n.name }).collect()),
            }),
            ..Self::default()
        }
    }
}

impl From<EndpointPort> for discovery::EndpointPort {
    fn from(p: EndpointPort) -> Self {
        Self { name: p.name, protocol: p.protocol, port: p.port, ..Self::default() }
    }
}

impl From<Node> for core::Node {
    fn from(n: Node) -> Self {
        let address = |a: NodeAddress| core::NodeAddress { type_: a.type_, address: a.address };
        Self {
            metadata: n.metadata.unwrap_or_default().into(),
            spec: n.spec.map(|spec| core::NodeSpec {
                pod_cidr: spec.pod_cidr,
                pod_cidrs: Some(spec.pod_cidrs),
                ..Default::default()
            }),
            status: n.status.map(|status| core::NodeStatus {
                addresses: Some(status.addresses.into_iter().map(address).collect()),
                ..Default::default()
            }),
        }
    }
}

impl From<ServiceCidr> for networking::ServiceCIDR {
    fn from(c: ServiceCidr) -> Self {
        Self {
            metadata: c.metadata.unwrap_or_default().into(),
            spec: c.spec.map(|spec| networking::ServiceCIDRSpec { cidrs: Some(spec.cidrs) }),
            status: None,
        }
    }
}
