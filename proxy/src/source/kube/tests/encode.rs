//! What kube-apiserver makes of JSON objects when it writes protobuf: fields that are no pointers in Go are always written.

use super::super::split::tests as answer;
use super::super::wire;
use super::server::{CIDRS, NODES, SERVICES, SLICES};
use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery, networking::v1 as networking};
use k8s_openapi::apimachinery::pkg::apis::meta::v1 as meta;
use prost::Message;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// A list of JSON objects. One that cannot be decoded becomes a message that cannot be decoded either.
pub fn list(kind: &str, version: u64, token: &str, items: &[&Value]) -> Vec<u8> {
    let metadata = wire::ListMeta { resource_version: version.to_string(), continue_: token.to_owned() };
    let items: Vec<Vec<u8>> = items.iter().map(|item| object(kind, item)).collect();
    answer::list(&metadata.encode_to_vec(), &items)
}

/// An error status.
pub fn status(message: &str, retry_after_seconds: u32) -> Vec<u8> {
    let details = Some(wire::Details { retry_after_seconds });
    let status = wire::Status { message: message.to_owned(), reason: "Scripted".to_owned(), details };
    answer::envelope(&status.encode_to_vec())
}

/// An object.
pub fn object(kind: &str, item: &Value) -> Vec<u8> {
    fn read<K: DeserializeOwned>(item: &Value) -> Option<K> {
        serde_json::from_value(item.clone()).ok()
    }
    let encoded = match kind {
        SERVICES => read(item).map(|o| service(o).encode_to_vec()),
        SLICES => read(item).map(|o| slice(o).encode_to_vec()),
        NODES => read(item).map(|o| node(o).encode_to_vec()),
        CIDRS => read(item).map(|o| cidr(o).encode_to_vec()),
        _ => panic!("{kind} is not watched"),
    };
    encoded.unwrap_or_else(|| {
        let text = |key: &str| Some(item["metadata"][key].as_str()?.to_owned());
        let metadata = wire::ObjectMeta { name: text("name"), namespace: text("namespace"), ..Default::default() };
        let mut broken = wire::Named { metadata: Some(metadata) }.encode_to_vec();
        // Field 2, the only byte of which is the beginning of a number.
        broken.extend([0x12, 1, 0xff]);
        broken
    })
}

fn metadata(m: meta::ObjectMeta) -> Option<wire::ObjectMeta> {
    Some(wire::ObjectMeta {
        name: Some(m.name.unwrap_or_default()),
        namespace: Some(m.namespace.unwrap_or_default()),
        labels: m.labels.unwrap_or_default(),
    })
}

fn text(text: Option<String>) -> Option<String> {
    Some(text.unwrap_or_default())
}

fn service(o: core::Service) -> wire::Service {
    let port = |p: core::ServicePort| wire::ServicePort {
        name: text(p.name),
        protocol: text(p.protocol),
        port: p.port,
        node_port: Some(p.node_port.unwrap_or(0)),
    };
    let spec = o.spec.unwrap_or_default();
    let ingress = o.status.and_then(|s| s.load_balancer).and_then(|l| l.ingress).unwrap_or_default();
    let ingress = ingress.into_iter().map(|i| wire::LoadBalancerIngress { ip: text(i.ip), ip_mode: i.ip_mode });
    wire::Service {
        metadata: metadata(o.metadata),
        spec: Some(wire::ServiceSpec {
            ports: spec.ports.into_iter().flatten().map(port).collect(),
            selector: spec.selector.unwrap_or_default(),
            cluster_ip: text(spec.cluster_ip),
            type_: text(spec.type_),
            external_ips: spec.external_ips.unwrap_or_default(),
            session_affinity: text(spec.session_affinity),
            load_balancer_source_ranges: spec.load_balancer_source_ranges.unwrap_or_default(),
            external_traffic_policy: text(spec.external_traffic_policy),
            health_check_node_port: Some(spec.health_check_node_port.unwrap_or(0)),
            publish_not_ready_addresses: Some(spec.publish_not_ready_addresses.unwrap_or(false)),
            session_affinity_config: spec.session_affinity_config.map(|c| wire::SessionAffinityConfig {
                client_ip: c.client_ip.map(|c| wire::ClientIpConfig { timeout_seconds: c.timeout_seconds }),
            }),
            cluster_ips: spec.cluster_ips.unwrap_or_default(),
            ip_families: spec.ip_families.unwrap_or_default(),
            internal_traffic_policy: spec.internal_traffic_policy,
            traffic_distribution: spec.traffic_distribution,
        }),
        status: Some(wire::ServiceStatus {
            load_balancer: Some(wire::LoadBalancerStatus { ingress: ingress.collect() }),
        }),
    }
}

fn slice(o: discovery::EndpointSlice) -> wire::EndpointSlice {
    let hints = |h: discovery::EndpointHints| wire::EndpointHints {
        for_zones: h.for_zones.into_iter().flatten().map(|z| wire::Hint { name: z.name }).collect(),
        for_nodes: h.for_nodes.into_iter().flatten().map(|n| wire::Hint { name: n.name }).collect(),
    };
    let endpoint = |e: discovery::Endpoint| {
        let conditions = e.conditions.unwrap_or_default();
        wire::Endpoint {
            addresses: e.addresses,
            conditions: Some(wire::EndpointConditions {
                ready: conditions.ready,
                serving: conditions.serving,
                terminating: conditions.terminating,
            }),
            node_name: e.node_name,
            hints: e.hints.map(hints),
        }
    };
    let port = |p: discovery::EndpointPort| wire::EndpointPort { name: p.name, protocol: p.protocol, port: p.port };
    wire::EndpointSlice {
        metadata: metadata(o.metadata),
        endpoints: o.endpoints.into_iter().map(endpoint).collect(),
        ports: o.ports.into_iter().flatten().map(port).collect(),
        address_type: o.address_type,
    }
}

fn node(o: core::Node) -> wire::Node {
    let spec = o.spec.unwrap_or_default();
    let addresses = o.status.and_then(|s| s.addresses).unwrap_or_default();
    let address = |a: core::NodeAddress| wire::NodeAddress { type_: a.type_, address: a.address };
    wire::Node {
        metadata: metadata(o.metadata),
        spec: Some(wire::NodeSpec { pod_cidr: text(spec.pod_cidr), pod_cidrs: spec.pod_cidrs.unwrap_or_default() }),
        status: Some(wire::NodeStatus { addresses: addresses.into_iter().map(address).collect() }),
    }
}

fn cidr(o: networking::ServiceCIDR) -> wire::ServiceCidr {
    let cidrs = o.spec.and_then(|spec| spec.cidrs).unwrap_or_default();
    wire::ServiceCidr { metadata: metadata(o.metadata), spec: Some(wire::ServiceCidrSpec { cidrs }) }
}
