//! Bad objects, each with the field and a fragment of the message that must be told.

use super::*;
use crate::source::Problem;
use crate::source::manifest::defaults;
use serde_json::{Value, json};

fn merge(base: &mut Value, change: &Value) {
    match (base, change) {
        (Value::Object(base), Value::Object(change)) => {
            for (key, value) in change {
                if value.is_null() {
                    base.remove(key);
                } else {
                    merge(base.entry(key).or_insert(Value::Null), value);
                }
            }
        }
        (base, change) => *base = change.clone(),
    }
}

fn check_service(change: &Value) -> Vec<Problem> {
    let mut object = json!({"metadata": {"name": "web"}, "spec": {"clusterIP": "10.96.0.10", "ports": [{"port": 80}]}});
    merge(&mut object, change);
    let mut object: core::Service = serde_json::from_value(object).unwrap();
    defaults::service(&mut object);
    let name = object.metadata.name.clone().unwrap_or_default();
    let mut report = Report::new("Service", Some("default"), &name);
    service(&object, &mut report);
    report.into_problems()
}

fn check_slice(change: &Value) -> Vec<Problem> {
    let mut object = json!({
        "metadata": {"name": "web-1", "labels": {"kubernetes.io/service-name": "web"}}, "addressType": "IPv4", "ports": [{"port": 80}],
        "endpoints": [{"addresses": ["10.244.0.5"], "nodeName": "node-1"}]
    });
    merge(&mut object, change);
    let mut object: k8s_openapi::api::discovery::v1::EndpointSlice = serde_json::from_value(object).unwrap();
    defaults::endpoint_slice(&mut object);
    let mut report = Report::new("EndpointSlice", Some("default"), "web-1");
    endpoint_slice(&object, &mut report);
    report.into_problems()
}

/// Exactly the `expected` errors (field, fragment) are told.
fn assert_errors(case: &Value, problems: &[Problem], expected: &[(&str, &str)]) {
    let errors: Vec<&Problem> = problems.iter().filter(|problem| problem.error).collect();
    assert_eq!(errors.len(), expected.len(), "{case}\ntold: {errors:#?}");
    for (field, fragment) in expected {
        let found = errors.iter().any(|problem| problem.field == *field && problem.message.contains(fragment));
        assert!(found, "{case}\nexpected {field}: …{fragment}…\ntold: {errors:#?}");
    }
}

#[test]
fn good_services_pass_without_a_word() {
    for case in [
        json!({}),
        json!({"spec": {"clusterIP": "None"}}),
        json!({"spec": {"clusterIP": "None", "ports": null}}),
        json!({"spec": {"type": "ExternalName", "clusterIP": null, "externalName": "db.example", "ports": null}}),
        json!({"spec": {"type": "NodePort", "ports": [{"port": 80, "nodePort": 30080}]}}),
        json!({"spec": {"type": "NodePort", "ports": [
            {"name": "t", "port": 53, "nodePort": 30053}, {"name": "u", "protocol": "UDP", "port": 53, "nodePort": 30053}]}}),
        json!({"spec": {"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false, "loadBalancerSourceRanges": ["10.0.0.0/8", " 2001:db8::/32"]},
               "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.80"}, {"ip": "192.0.2.81", "ipMode": "Proxy"}]}}}),
        json!({"spec": {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 30999, "ports": [{"port": 80, "nodePort": 30080}]},
               "status": {"loadBalancer": {"ingress": [{"hostname": "lb.example"}]}}}),
        json!({"spec": {"clusterIP": null, "clusterIPs": ["10.96.0.10", "fd00::10"]}}),
        json!({"spec": {"ipFamilyPolicy": "PreferDualStack"}}),
        json!({"spec": {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86400}}}}),
        json!({"spec": {"externalIPs": ["192.0.2.1"], "externalTrafficPolicy": "Local", "trafficDistribution": "PreferSameNode"}}),
        json!({"spec": {"ports": [{"name": "http", "port": 80, "targetPort": "http"}, {"name": "h3", "port": 80, "protocol": "UDP"}]}}),
    ] {
        assert_eq!(check_service(&case), [], "{case}");
    }
}

#[test]
fn bad_services_are_refused_with_field_and_reason() {
    let ports = |ports: Value| json!({"spec": {"ports": ports}});
    let long = "a".repeat(64);
    for (case, expected) in [
        (json!({"metadata": {"name": "Web"}}), vec![("metadata.name", "not a DNS label")]),
        (json!({"metadata": {"name": long}}), vec![("metadata.name", "not a DNS label")]),
        (json!({"metadata": {"namespace": "a.b"}}), vec![("metadata.namespace", "not a DNS label")]),
        (json!({"spec": {"type": "Moon"}}), vec![("spec.type", "NodePort")]),
        // What the API server would allocate.
        (json!({"spec": {"clusterIP": null}}), vec![("spec.clusterIP", "write a free address")]),
        (json!({"spec": {"type": "NodePort"}}), vec![("spec.ports[0].nodePort", "write a free port")]),
        (json!({"spec": {"type": "LoadBalancer"}}), vec![("spec.ports[0].nodePort", "allocateLoadBalancerNodePorts")]),
        (
            json!({"spec": {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ports": [{"port": 80, "nodePort": 30080}]}}),
            vec![("spec.healthCheckNodePort", "write a free port")],
        ),
        (
            json!({"spec": {"ipFamilies": ["IPv4", "IPv6"], "ipFamilyPolicy": "PreferDualStack"}}),
            vec![("spec.clusterIPs[1]", "IPv6")],
        ),
        (json!({"spec": {"ipFamilyPolicy": "RequireDualStack"}}), vec![("spec.clusterIPs", "each family")]),
        // Addresses.
        (json!({"spec": {"clusterIP": "10.96.0.300"}}), vec![("spec.clusterIPs[0]", "not an IP address")]),
        (json!({"spec": {"clusterIP": "127.0.0.1"}}), vec![("spec.clusterIPs[0]", "loopback")]),
        (json!({"spec": {"clusterIPs": ["10.96.0.11"]}}), vec![("spec.clusterIPs[0]", "10.96.0.10")]),
        (
            json!({"spec": {"clusterIPs": ["10.96.0.10", "10.96.0.11"]}}),
            vec![("spec.clusterIPs[1]", "second IPv4 address")],
        ),
        (
            json!({"spec": {"clusterIPs": ["10.96.0.10", "fd00::1", "fd00::2"]}}),
            vec![("spec.clusterIPs", "more than two")],
        ),
        (json!({"spec": {"ipFamilies": ["IPv6"]}}), vec![("spec.clusterIPs[0]", "not an IPv6 address")]),
        (json!({"spec": {"ipFamilies": ["IPv7"]}}), vec![("spec.ipFamilies[0]", "IPv4, IPv6")]),
        (
            json!({"spec": {"clusterIPs": ["10.96.0.10", "fd00::1"], "ipFamilyPolicy": "SingleStack"}}),
            vec![("spec.ipFamilyPolicy", "two ClusterIPs")],
        ),
        (
            json!({"spec": {"clusterIPs": ["10.96.0.10", "fd00::1"], "ipFamilies": ["IPv4"]}}),
            vec![("spec.ipFamilies", "fewer")],
        ),
        (json!({"spec": {"externalIPs": ["192.0.2.1", "x"]}}), vec![("spec.externalIPs[1]", "not an IP address")]),
        (json!({"spec": {"externalIPs": ["127.0.0.2"]}}), vec![("spec.externalIPs[0]", "loopback")]),
        (json!({"spec": {"externalIPs": ["fe80::1"]}}), vec![("spec.externalIPs[0]", "link-local")]),
        (json!({"spec": {"externalIPs": ["0.0.0.0"]}}), vec![("spec.externalIPs[0]", "unspecified")]),
        // Ports.
        (json!({"spec": {"ports": null}}), vec![("spec.ports", "at least one")]),
        (ports(json!([{"port": 0, "targetPort": 80}])), vec![("spec.ports[0].port", "1 to 65535")]),
        (ports(json!([{"port": 65536, "targetPort": 80}])), vec![("spec.ports[0].port", "1 to 65535")]),
        (ports(json!([{"port": 80, "targetPort": 70000}])), vec![("spec.ports[0].targetPort", "1 to 65535")]),
        (ports(json!([{"port": 80, "targetPort": "a_b"}])), vec![("spec.ports[0].targetPort", "port name")]),
        (ports(json!([{"port": 80, "protocol": "QUIC"}])), vec![("spec.ports[0].protocol", "TCP, UDP, SCTP")]),
        (ports(json!([{"port": 80, "protocol": "tcp"}])), vec![("spec.ports[0].protocol", "TCP, UDP, SCTP")]),
        (ports(json!([{"name": "a", "port": 80}, {"port": 81}])), vec![("spec.ports[1].name", "is missing")]),
        (
            ports(json!([{"name": "a", "port": 80}, {"name": "a", "port": 81}])),
            vec![("spec.ports[1].name", "spec.ports[0]")],
        ),
        (
            ports(json!([{"name": "a", "port": 80}, {"name": "b", "port": 80}])),
            vec![("spec.ports[1].port", "TCP 80 is also spec.ports[0]")],
        ),
        (ports(json!([{"name": "A!", "port": 80}])), vec![("spec.ports[0].name", "not a DNS label")]),
        (ports(json!([{"port": 80, "nodePort": 30080}])), vec![("spec.ports[0].nodePort", "type ClusterIP")]),
        (
            json!({"spec": {"type": "NodePort", "ports": [{"port": 80, "nodePort": 70000}]}}),
            vec![("spec.ports[0].nodePort", "1 to 65535")],
        ),
        (
            json!({"spec": {"type": "NodePort", "ports": [{"name": "a", "port": 80, "nodePort": 30080}, {"name": "b", "port": 81, "nodePort": 30080}]}}),
            vec![("spec.ports[1].nodePort", "spec.ports[0]")],
        ),
        // Policies and affinity.
        (json!({"spec": {"internalTrafficPolicy": "Zone"}}), vec![("spec.internalTrafficPolicy", "Cluster, Local")]),
        (json!({"spec": {"externalTrafficPolicy": "Local"}}), vec![("spec.externalTrafficPolicy", "externalIPs")]),
        (
            json!({"spec": {"externalTrafficPolicy": "Zone", "externalIPs": ["192.0.2.1"]}}),
            vec![("spec.externalTrafficPolicy", "Cluster, Local")],
        ),
        (json!({"spec": {"trafficDistribution": "PreferMoon"}}), vec![("spec.trafficDistribution", "PreferClose")]),
        (json!({"spec": {"sessionAffinity": "Cookie"}}), vec![("spec.sessionAffinity", "None, ClientIP")]),
        (
            json!({"spec": {"sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 5}}}}),
            vec![("spec.sessionAffinityConfig", "must not be set")],
        ),
        (
            json!({"spec": {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 0}}}}),
            vec![("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "1 to 86400")],
        ),
        (
            json!({"spec": {"sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 86401}}}}),
            vec![("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "1 to 86400")],
        ),
        // Load balancers.
        (
            json!({"spec": {"loadBalancerSourceRanges": ["10.0.0.0/8"]}}),
            vec![("spec.loadBalancerSourceRanges", "type LoadBalancer")],
        ),
        (
            json!({"spec": {"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false, "loadBalancerSourceRanges": ["10.0.0.0"]}}),
            vec![("spec.loadBalancerSourceRanges[0]", "not a network")],
        ),
        (
            json!({"spec": {"allocateLoadBalancerNodePorts": false}}),
            vec![("spec.allocateLoadBalancerNodePorts", "type LoadBalancer")],
        ),
        (
            json!({"status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.1"}]}}}),
            vec![("status.loadBalancer.ingress", "type LoadBalancer")],
        ),
        (
            json!({"spec": {"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false},
                   "status": {"loadBalancer": {"ingress": [{"ip": "x"}, {"hostname": "a", "ipMode": "VIP"}, {"ip": "192.0.2.1", "ipMode": "Moon"}]}}}),
            vec![
                ("status.loadBalancer.ingress[0].ip", "not an IP address"),
                ("status.loadBalancer.ingress[1].ipMode", "without an ip"),
                ("status.loadBalancer.ingress[2].ipMode", "VIP, Proxy"),
            ],
        ),
        (
            json!({"spec": {"healthCheckNodePort": 30999}}),
            vec![("spec.healthCheckNodePort", "externalTrafficPolicy Local")],
        ),
        (
            json!({"spec": {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "healthCheckNodePort": 30080, "ports": [{"port": 80, "nodePort": 30080}]}}),
            vec![("spec.healthCheckNodePort", "spec.ports[0]")],
        ),
        // Headless and ExternalName.
        (
            json!({"spec": {"type": "NodePort", "clusterIP": "None", "ports": [{"port": 80, "nodePort": 30080}]}}),
            vec![("spec.clusterIP", "type NodePort")],
        ),
        (json!({"spec": {"type": "ExternalName", "clusterIP": null}}), vec![("spec.externalName", "is missing")]),
        (
            json!({"spec": {"type": "ExternalName", "externalName": "a.example"}}),
            vec![("spec.clusterIP", "ExternalName")],
        ),
    ] {
        assert_errors(&case, &check_service(&case), &expected.to_vec());
    }
}

#[test]
fn doubtful_services_are_served_with_a_warning() {
    for (case, field, fragment) in [
        (json!({"spec": {"clusterIP": "10.96.0.010"}}), "spec.clusterIPs[0]", "leading zeros"),
        (
            json!({"spec": {"type": "LoadBalancer", "allocateLoadBalancerNodePorts": false}}),
            "status.loadBalancer.ingress",
            "no load balancer address",
        ),
    ] {
        let problems = check_service(&case);
        assert_eq!(problems.len(), 1, "{case}: {problems:?}");
        assert!(
            !problems[0].error && problems[0].field == field && problems[0].message.contains(fragment),
            "{:?}",
            problems[0]
        );
    }
}

#[test]
fn slices_are_validated() {
    let endpoint = |addresses: Value| json!({"endpoints": [{"addresses": addresses}]});
    let many = |count: usize| {
        Value::Array((0..count).map(|i| json!({"addresses": [format!("10.1.{}.{}", i / 250, i % 250 + 1)]})).collect())
    };
    let hints = |zones: Value| json!({"endpoints": [{"addresses": ["10.244.0.5"], "hints": {"forZones": zones}}]});
    for (case, expected) in [
        (json!({}), vec![]),
        (
            json!({"addressType": "IPv6", "endpoints": [{"addresses": ["fd00::5"], "hints": {"forNodes": [{"name": "node-1"}]}}]}),
            vec![],
        ),
        (json!({"addressType": "FQDN", "endpoints": [{"addresses": ["a.example"]}]}), vec![]),
        (json!({"endpoints": [], "ports": null}), vec![]),
        (json!({"endpoints": many(1000)}), vec![]),
        (json!({"ports": [{"name": "a"}]}), vec![]),
        (json!({"metadata": {"name": "Web_1"}}), vec![("metadata.name", "not a DNS name")]),
        (
            json!({"metadata": {"labels": {"kubernetes.io/service-name": "W"}}}),
            vec![("metadata.labels[kubernetes.io/service-name]", "not a DNS label")],
        ),
        (json!({"addressType": null}), vec![("addressType", "is missing")]),
        (json!({"addressType": "Carrier"}), vec![("addressType", "IPv4, IPv6, FQDN")]),
        (json!({"addressType": "IPv6"}), vec![("endpoints[0].addresses[0]", "not an IPv6 address")]),
        (json!({"endpoints": many(1001)}), vec![("endpoints", "more than 1000")]),
        (endpoint(json!([])), vec![("endpoints[0].addresses", "is empty")]),
        (endpoint(json!([""])), vec![("endpoints[0].addresses[0]", "not an IP address")]),
        (endpoint(json!(["10.244.1.300"])), vec![("endpoints[0].addresses[0]", "not an IP address")]),
        (endpoint(json!(["127.0.0.1"])), vec![("endpoints[0].addresses[0]", "loopback")]),
        (endpoint(json!(["169.254.1.1"])), vec![("endpoints[0].addresses[0]", "link-local")]),
        (endpoint(json!(["0.0.0.0"])), vec![("endpoints[0].addresses[0]", "unspecified")]),
        (json!({"ports": [{"port": 80}, {"port": 81}]}), vec![("ports[1].name", "ports[0]")]),
        (json!({"ports": [{"port": 0}]}), vec![("ports[0].port", "1 to 65535")]),
        (json!({"ports": [{"port": 65536}]}), vec![("ports[0].port", "1 to 65535")]),
        (json!({"ports": [{"port": 80, "protocol": "QUIC"}]}), vec![("ports[0].protocol", "TCP, UDP, SCTP")]),
        (json!({"ports": [{"port": 80, "name": "A"}]}), vec![("ports[0].name", "not a DNS label")]),
        (
            json!({"endpoints": [{"addresses": ["10.244.0.5"], "nodeName": "Node 1"}]}),
            vec![("endpoints[0].nodeName", "not a DNS name")],
        ),
        (hints(json!([{"name": "a"}, {"name": "a"}])), vec![("endpoints[0].hints.forZones[1].name", "twice")]),
        (hints(json!([{"name": ""}])), vec![("endpoints[0].hints.forZones[0].name", "is missing")]),
        (
            hints(json!((0..9).map(|i| json!({"name": format!("z{i}")})).collect::<Vec<_>>())),
            vec![("endpoints[0].hints.forZones", "more than 8")],
        ),
    ] {
        assert_errors(&case, &check_slice(&case), &expected);
    }
    let warned = check_slice(&endpoint(json!(["10.244.0.5", "10.244.0.6"])));
    assert!(warned.len() == 1 && !warned[0].error && warned[0].message.contains("only the first"), "{warned:?}");
}

#[test]
fn nodes_and_service_cidrs_are_validated() {
    for (cidrs, expected) in [
        (json!(["10.96.0.0/12"]), vec![]),
        (json!(["10.96.0.0/12", "fd00::/108"]), vec![]),
        (json!([]), vec![("spec.cidrs", "is missing")]),
        (json!(["10.96.0.0"]), vec![("spec.cidrs[0]", "not a network")]),
        (json!(["10.96.0.0/12", "10.97.0.0/16"]), vec![("spec.cidrs[1]", "second network")]),
    ] {
        let object =
            serde_json::from_value(json!({"metadata": {"name": "kubernetes"}, "spec": {"cidrs": cidrs}})).unwrap();
        let mut report = Report::new("ServiceCIDR", None, "kubernetes");
        service_cidr(&object, &mut report);
        assert_errors(&cidrs, &report.into_problems(), &expected);
    }
    let case = json!({
        "metadata": {"name": "Node_1"}, "spec": {"podCIDRs": ["10.244.0.0/24", "x"]},
        "status": {"addresses": [{"type": "InternalIP", "address": "x"}, {"type": "Hostname", "address": "any"}]}
    });
    let mut report = Report::new("Node", None, "Node_1");
    node(&serde_json::from_value(case.clone()).unwrap(), &mut report);
    let expected = [
        ("metadata.name", "DNS name"),
        ("spec.podCIDRs[1]", "not a network"),
        ("status.addresses[0].address", "not an IP address"),
    ];
    assert_errors(&case, &report.into_problems(), &expected);
}
