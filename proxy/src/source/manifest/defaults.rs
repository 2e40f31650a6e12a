//! The defaults that the API server would fill in (Kubernetes v1.33 `SetDefaults_Service`, `SetObjectDefaults_EndpointSlice`,
//! and the family fields of the Service registry's `defaultOnReadService`).
//!
//! Conditions of endpoints stay nil as in the API; what nil means is decided where they are read.

use crate::source::address::parse_ip;
use crate::source::convert::DEFAULT_AFFINITY_TIMEOUT_S;
use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

/// Namespace `default` for an object that names none.
pub(crate) fn namespace(meta: &mut ObjectMeta) {
    if meta.namespace.as_deref().is_none_or(str::is_empty) {
        meta.namespace = Some("default".to_owned());
    }
}

/// Fills in a Service.
pub(crate) fn service(object: &mut core::Service) {
    namespace(&mut object.metadata);
    let spec = object.spec.get_or_insert_default();
    default_text(&mut spec.type_, "ClusterIP");
    let type_ = spec.type_.clone().unwrap_or_default();
    if type_ != "ExternalName" {
        default_text(&mut spec.session_affinity, "None");
        default_text(&mut spec.internal_traffic_policy, "Cluster");
        cluster_ips(spec);
        families(spec);
    }
    if spec.session_affinity.as_deref() == Some("ClientIP") {
        let config = spec.session_affinity_config.get_or_insert_default().client_ip.get_or_insert_default();
        config.timeout_seconds.get_or_insert(DEFAULT_AFFINITY_TIMEOUT_S.cast_signed());
    }
    for port in spec.ports.iter_mut().flatten() {
        default_text(&mut port.protocol, "TCP");
        match &port.target_port {
            None | Some(IntOrString::Int(0)) => port.target_port = Some(IntOrString::Int(port.port)),
            Some(IntOrString::String(text)) if text.is_empty() => port.target_port = Some(IntOrString::Int(port.port)),
            Some(_) => {}
        }
    }
    let external_ips = spec.external_ips.as_ref().is_some_and(|ips| !ips.is_empty());
    if type_ == "NodePort" || type_ == "LoadBalancer" || (type_ == "ClusterIP" && external_ips) {
        default_text(&mut spec.external_traffic_policy, "Cluster");
    }
    if type_ == "LoadBalancer" {
        spec.allocate_load_balancer_node_ports.get_or_insert(true);
        let ingress = object.status.as_mut().and_then(|s| s.load_balancer.as_mut()).and_then(|l| l.ingress.as_mut());
        for entry in ingress.into_iter().flatten() {
            if entry.ip.as_deref().is_some_and(|ip| !ip.is_empty()) {
                default_text(&mut entry.ip_mode, "VIP");
            }
        }
    }
}

/// Fills in an EndpointSlice.
pub(crate) fn endpoint_slice(object: &mut discovery::EndpointSlice) {
    namespace(&mut object.metadata);
    for port in object.ports.iter_mut().flatten() {
        port.name.get_or_insert_default();
        default_text(&mut port.protocol, "TCP");
    }
}

/// `clusterIP` and the first of `clusterIPs` are the same; whichever is written fills the other.
fn cluster_ips(spec: &mut core::ServiceSpec) {
    let first = spec.cluster_ips.as_ref().and_then(|ips| ips.first()).filter(|ip| !ip.is_empty()).cloned();
    match (spec.cluster_ip.as_deref().filter(|ip| !ip.is_empty()), first) {
        (Some(ip), None) => spec.cluster_ips = Some(vec![ip.to_owned()]),
        (None, Some(ip)) => spec.cluster_ip = Some(ip),
        _ => {}
    }
}

/// `ipFamilies` and `ipFamilyPolicy` from the addresses.
fn families(spec: &mut core::ServiceSpec) {
    let texts = spec.cluster_ips.as_deref().unwrap_or_default();
    let headless = spec.cluster_ip.as_deref() == Some("None");
    if spec.ip_families.as_ref().is_none_or(Vec::is_empty) && !headless {
        let families: Vec<String> =
            texts.iter().filter_map(|ip| parse_ip(ip)).map(|ip| crate::model::IpFamily::of(ip).to_string()).collect();
        // With an address that cannot be read the pairing would shift; validation reports it.
        if families.len() == texts.len() && !families.is_empty() {
            spec.ip_families = Some(families);
        }
    }
    let count = spec.ip_families.as_ref().map_or(0, Vec::len).max(spec.cluster_ips.as_ref().map_or(0, Vec::len));
    default_text(&mut spec.ip_family_policy, if count > 1 { "RequireDualStack" } else { "SingleStack" });
}

fn default_text(field: &mut Option<String>, value: &str) {
    if field.as_deref().is_none_or(str::is_empty) {
        *field = Some(value.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn defaulted(json: serde_json::Value) -> serde_json::Value {
        let mut object: core::Service = serde_json::from_value(json).unwrap();
        service(&mut object);
        serde_json::to_value(&object).unwrap()
    }

    #[test]
    fn a_minimal_service_gets_what_the_api_server_would_fill_in() {
        let object = defaulted(
            json!({"metadata": {"name": "web"}, "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}}),
        );
        assert_eq!(object["metadata"]["namespace"], "default");
        assert_eq!(
            object["spec"],
            json!({
                "type": "ClusterIP", "clusterIP": "10.96.0.1", "clusterIPs": ["10.96.0.1"], "ipFamilies": ["IPv4"],
                "ipFamilyPolicy": "SingleStack", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster",
                "ports": [{"port": 80, "protocol": "TCP", "targetPort": 80}]
            })
        );
    }

    #[test]
    fn families_come_from_the_addresses_in_their_order() {
        let object = defaulted(json!({"metadata": {"name": "web"}, "spec": {"clusterIPs": ["fd00::1", "10.96.0.1"]}}));
        assert_eq!(object["spec"]["clusterIP"], "fd00::1");
        assert_eq!(object["spec"]["ipFamilies"], json!(["IPv6", "IPv4"]));
        assert_eq!(object["spec"]["ipFamilyPolicy"], "RequireDualStack");
    }

    #[test]
    fn affinity_gets_its_timeout_and_load_balancers_their_mode() {
        let object = defaulted(json!({
            "metadata": {"name": "web", "namespace": "x"},
            "spec": {"type": "LoadBalancer", "clusterIP": "10.96.0.1", "sessionAffinity": "ClientIP", "ports": [{"port": 80, "targetPort": "http"}]},
            "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}, {"hostname": "lb.example"}]}}
        }));
        assert_eq!(object["metadata"]["namespace"], "x");
        assert_eq!(object["spec"]["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"], 10800);
        assert_eq!(object["spec"]["externalTrafficPolicy"], "Cluster");
        assert_eq!(object["spec"]["allocateLoadBalancerNodePorts"], true);
        assert_eq!(object["spec"]["ports"][0]["targetPort"], "http");
        assert_eq!(
            object["status"]["loadBalancer"]["ingress"],
            json!([{"ip": "192.0.2.1", "ipMode": "VIP"}, {"hostname": "lb.example"}])
        );
    }

    #[test]
    fn external_ips_give_a_cluster_ip_service_an_external_policy() {
        let object = defaulted(
            json!({"metadata": {"name": "a"}, "spec": {"clusterIP": "10.96.0.1", "externalIPs": ["192.0.2.1"]}}),
        );
        assert_eq!(object["spec"]["externalTrafficPolicy"], "Cluster");
        let object = defaulted(json!({"metadata": {"name": "a"}, "spec": {"clusterIP": "10.96.0.1"}}));
        assert!(object["spec"].get("externalTrafficPolicy").is_none());
    }

    #[test]
    fn slice_ports_get_protocol_and_name_and_conditions_stay_nil() {
        let mut object: discovery::EndpointSlice = serde_json::from_value(json!({
            "metadata": {"name": "web-1"}, "addressType": "IPv4", "endpoints": [{"addresses": ["10.0.0.1"]}], "ports": [{"port": 80}]
        }))
        .unwrap();
        endpoint_slice(&mut object);
        let port = &object.ports.as_ref().unwrap()[0];
        assert_eq!((port.name.as_deref(), port.protocol.as_deref()), (Some(""), Some("TCP")));
        assert_eq!(object.endpoints[0].conditions, None);
        assert_eq!(object.metadata.namespace.as_deref(), Some("default"));
    }
}
