//! From API objects to model objects, by data.

use super::*;
use crate::model::{IpFamily, Service, ServiceType, TrafficPolicy};
use crate::source::Problem;
use serde_json::{Value, json};
use std::net::IpAddr;

fn convert_service(spec: Value, status: Value) -> (Option<Service>, Vec<Problem>) {
    let object = json!({"metadata": {"namespace": "ns", "name": "web"}, "spec": spec, "status": status});
    service(&serde_json::from_value(object).unwrap(), &mut Names::default())
}

fn good_service(spec: Value, status: Value) -> Service {
    let (service, problems) = convert_service(spec, status);
    assert_eq!(problems, []);
    service.expect("a service")
}

fn convert_slice(slice: Value) -> (Option<crate::model::EndpointSlice>, Vec<Problem>) {
    let mut object = json!({
        "metadata": {"namespace": "ns", "name": "web-1", "labels": {"kubernetes.io/service-name": "web"}},
        "addressType": "IPv4", "endpoints": [], "ports": [{"name": "", "port": 80, "protocol": "TCP"}]
    });
    for (key, value) in slice.as_object().unwrap() {
        object[key] = value.clone();
    }
    endpoint_slice(&serde_json::from_value(object).unwrap(), &mut Names::default())
}

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn fields(problems: &[Problem]) -> Vec<&str> {
    problems.iter().map(|problem| problem.field.as_str()).collect()
}

#[test]
fn m1_m2_services_without_a_cluster_ip_are_not_ours() {
    for spec in [
        json!({"clusterIP": "None"}),
        json!({"clusterIP": "None", "clusterIPs": ["None"], "ports": [{"port": 80}, {"name": "u", "port": 53, "protocol": "UDP"}]}),
        json!({"clusterIP": "None", "externalIPs": ["192.0.2.1"], "ports": [{"port": 80, "protocol": "SCTP"}]}),
        json!({"clusterIP": "", "ports": [{"port": 80}]}),
        json!({"ports": [{"port": 80}]}),
        json!({"type": "ExternalName", "clusterIP": "172.30.55.4", "externalName": "x.example", "ports": [{"port": 80}]}),
    ] {
        assert_eq!(convert_service(spec.clone(), Value::Null), (None, vec![]), "{spec}");
    }
}

#[test]
fn a_service_of_another_proxy_is_not_ours_whatever_the_value() {
    for value in ["", "other"] {
        let object = json!({
            "metadata": {"namespace": "ns", "name": "web", "labels": {"service.kubernetes.io/service-proxy-name": value}},
            "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}
        });
        assert_eq!(service(&serde_json::from_value(object).unwrap(), &mut Names::default()), (None, vec![]));
    }
}

#[test]
fn m3_cluster_ips_are_paired_with_families() {
    for (spec, expected, problem_fields) in [
        (json!({"clusterIP": "fd00::1"}), vec!["fd00::1"], vec![]),
        (json!({"clusterIP": "172.30.0.041"}), vec!["172.30.0.41"], vec![]),
        (
            json!({"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1", "fd00::1"], "ipFamilies": ["IPv4", "IPv6"]}),
            vec!["10.0.0.1", "fd00::1"],
            vec![],
        ),
        (
            json!({"clusterIP": "fd00::1", "clusterIPs": ["fd00::1", "10.0.0.1"], "ipFamilies": ["IPv6", "IPv4"]}),
            vec!["fd00::1", "10.0.0.1"],
            vec![],
        ),
        // Family listed but no address: does not exist in it.
        (
            json!({"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1"], "ipFamilies": ["IPv4", "IPv6"]}),
            vec!["10.0.0.1"],
            vec![],
        ),
        // Address whose family is not listed: not served.
        (
            json!({"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1", "fd00::1"], "ipFamilies": ["IPv4"]}),
            vec!["10.0.0.1"],
            vec![],
        ),
        // Without ipFamilies only clusterIP counts.
        (json!({"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1", "fd00::1"]}), vec!["10.0.0.1"], vec![]),
        (
            json!({"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1", "10.0.0.2"], "ipFamilies": ["IPv4", "IPv6"]}),
            vec!["10.0.0.1"],
            vec!["spec.clusterIPs[1]"],
        ),
        (
            json!({"clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1"], "ipFamilies": ["IPv4", "IPv7"]}),
            vec!["10.0.0.1"],
            vec!["spec.ipFamilies[1]"],
        ),
    ] {
        let (service, problems) = convert_service(spec.clone(), Value::Null);
        assert_eq!(service.map(|s| s.cluster_ips), Some(ips(&expected)), "{spec}");
        assert_eq!(fields(&problems), problem_fields, "{spec}");
    }
    let (service, problems) = convert_service(json!({"clusterIP": "10.244.1.300"}), Value::Null);
    assert_eq!(service, None);
    assert!(problems.iter().any(|p| p.error && p.location == "Service ns/web"));
}

#[test]
fn m4_m5_addresses_of_both_families_and_ranges_are_kept_in_canonical_form() {
    let service = good_service(
        json!({
            "type": "LoadBalancer", "clusterIP": "10.0.0.1",
            "externalIPs": ["8.8.8.8", "2001:db8:85a3::7335", "", " 8.8.4.04 "],
            "loadBalancerSourceRanges": ["0.0.0.0/1", "2001:db8::/32", " 10.1.2.0/28", "10.1.2.77/24"],
        }),
        json!({"loadBalancer": {"ingress": [{"ip": "8.8.8.8"}, {"ip": "2001:db8:85a3::7335"}, {"hostname": "lb.example"}]}}),
    );
    assert_eq!(service.external_ips, ips(&["8.8.8.8", "2001:db8:85a3::7335", "8.8.4.4"]));
    assert_eq!(service.load_balancer_ips, ips(&["8.8.8.8", "2001:db8:85a3::7335"]));
    let ranges: Vec<String> = service.source_ranges.iter().map(ToString::to_string).collect();
    assert_eq!(ranges, ["0.0.0.0/1", "2001:db8::/32", "10.1.2.0/28", "10.1.2.0/24"]);
}

#[test]
fn m6_m7_only_vips_are_load_balancer_addresses() {
    let spec = json!({"type": "LoadBalancer", "clusterIP": "10.0.0.1", "ports": [{"port": 80, "nodePort": 30080}]});
    for (mode, expected) in
        [(Value::Null, vec!["10.1.2.4"]), (json!("VIP"), vec!["10.1.2.4"]), (json!("Proxy"), vec![])]
    {
        let service =
            good_service(spec.clone(), json!({"loadBalancer": {"ingress": [{"ip": "10.1.2.4", "ipMode": mode}]}}));
        assert_eq!(service.load_balancer_ips, ips(&expected));
        assert_eq!(service.ports[0].node_port, 30080);
    }
    let (service, problems) = convert_service(
        spec,
        json!({"loadBalancer": {"ingress": [{"ip": "10.1.2.4", "ipMode": "Moon"}, {"ip": "10.1.2.5"}]}}),
    );
    assert_eq!(service.unwrap().load_balancer_ips, ips(&["10.1.2.5"]));
    assert_eq!(fields(&problems), ["status.loadBalancer.ingress[0].ipMode"]);
}

#[test]
fn m8_the_health_check_port_is_kept() {
    let service = good_service(
        json!({"type": "LoadBalancer", "clusterIP": "1.2.3.4", "externalTrafficPolicy": "Local", "healthCheckNodePort": 345,
               "ports": [{"name": "a", "port": 80}, {"name": "b", "port": 81}]}),
        Value::Null,
    );
    assert_eq!((service.health_check_node_port, service.ports.len()), (345, 2));
    assert_eq!(
        (service.service_type, service.external_traffic_policy),
        (ServiceType::LoadBalancer, TrafficPolicy::Local)
    );
    let (_, problems) = convert_service(
        json!({"type": "LoadBalancer", "clusterIP": "1.2.3.4", "externalTrafficPolicy": "Local"}),
        Value::Null,
    );
    assert_eq!(fields(&problems), ["spec.healthCheckNodePort"]);
}

#[test]
fn affinity_has_a_timeout_even_if_none_is_written() {
    for (affinity, config, expected, problem_fields) in [
        (Value::Null, Value::Null, None, vec![]),
        (json!("None"), json!({"clientIP": {"timeoutSeconds": 5}}), None, vec![]),
        (json!("ClientIP"), Value::Null, Some(10_800), vec![]),
        (json!("ClientIP"), json!({"clientIP": {"timeoutSeconds": 5}}), Some(5), vec![]),
        (
            json!("ClientIP"),
            json!({"clientIP": {"timeoutSeconds": 0}}),
            Some(10_800),
            vec!["spec.sessionAffinityConfig.clientIP.timeoutSeconds"],
        ),
        (
            json!("ClientIP"),
            json!({"clientIP": {"timeoutSeconds": -1}}),
            Some(10_800),
            vec!["spec.sessionAffinityConfig.clientIP.timeoutSeconds"],
        ),
        (json!("Cookie"), Value::Null, None, vec!["spec.sessionAffinity"]),
    ] {
        let (service, problems) = convert_service(
            json!({"clusterIP": "10.0.0.1", "sessionAffinity": affinity, "sessionAffinityConfig": config}),
            Value::Null,
        );
        assert_eq!(service.unwrap().affinity_timeout_s, expected, "{affinity} {config}");
        assert_eq!(fields(&problems), problem_fields);
    }
}

#[test]
fn broken_parts_are_left_out_and_the_rest_is_kept() {
    let (service, problems) = convert_service(
        json!({
            "clusterIP": "10.0.0.1", "type": "Moon", "internalTrafficPolicy": "Zone", "externalTrafficPolicy": "Zone",
            "trafficDistribution": "PreferMoon", "externalIPs": ["nonsense", "192.0.2.1"], "loadBalancerSourceRanges": ["10.0.0.0", "10.0.0.0/8"],
            "healthCheckNodePort": 70000,
            "ports": [
                {"name": "quic", "port": 443, "protocol": "QUIC"}, {"name": "zero", "port": 0}, {"name": "big", "port": 65536},
                {"name": "web", "port": 80, "nodePort": 99999}, {"name": "web", "port": 81}, {"name": "web", "port": 80, "protocol": "UDP"}
            ]
        }),
        Value::Null,
    );
    let service = service.unwrap();
    assert_eq!(service.service_type, ServiceType::ClusterIp);
    assert_eq!(
        (service.internal_traffic_policy, service.external_traffic_policy),
        (TrafficPolicy::Cluster, TrafficPolicy::Cluster)
    );
    assert_eq!(service.external_ips, ips(&["192.0.2.1"]));
    assert_eq!(service.source_ranges, ["10.0.0.0/8".parse().unwrap()]);
    let ports: Vec<(u16, u16, String)> =
        service.ports.iter().map(|p| (p.port, p.node_port, p.protocol.to_string())).collect();
    assert_eq!(ports, [(80, 0, "TCP".to_owned()), (80, 0, "UDP".to_owned())]);
    assert_eq!(
        fields(&problems),
        [
            "spec.type",
            "spec.externalTrafficPolicy",
            "spec.healthCheckNodePort",
            "spec.externalIPs[0]",
            "spec.loadBalancerSourceRanges[0]",
            "spec.internalTrafficPolicy",
            "spec.trafficDistribution",
            "spec.ports[0].protocol",
            "spec.ports[1].port",
            "spec.ports[2].port",
            "spec.ports[3].nodePort",
            "spec.ports[4].name",
        ]
    );
    assert!(problems.iter().all(|problem| !problem.error));
}

#[test]
fn sl1_endpoints_get_nodes_ports_and_defaulted_conditions() {
    let (slice, problems) = convert_slice(json!({
        "ports": [{"name": "p80", "port": 80, "protocol": "TCP"}, {"name": "p443", "port": 443, "protocol": "UDP"}],
        "endpoints": [
            {"addresses": ["10.0.1.01"], "nodeName": "host1"},
            {"addresses": ["10.0.1.2", "10.0.1.9"], "nodeName": "host2", "conditions": {"ready": false}},
            {"addresses": ["10.0.1.3"], "nodeName": "host1", "conditions": {"ready": false, "serving": false, "terminating": true},
             "hints": {"forZones": [{"name": "zone-a"}, {"name": "zone-b"}], "forNodes": [{"name": "host1"}]}},
            {"addresses": ["10.0.1.4"], "conditions": {"ready": null, "serving": null, "terminating": null}},
        ]
    }));
    assert_eq!(problems, []);
    let slice = slice.unwrap();
    assert_eq!(
        (slice.service.to_string(), slice.name.to_string(), slice.family),
        ("ns/web".to_owned(), "ns/web-1".to_owned(), IpFamily::V4)
    );
    let ports: Vec<String> = slice.ports.iter().map(|p| format!("{} {} {}", p.name, p.protocol, p.port)).collect();
    assert_eq!(ports, ["p80 TCP 80", "p443 UDP 443"]);
    let endpoints: Vec<String> = slice
        .endpoints
        .iter()
        .map(|e| {
            format!(
                "{} {:?} {} {} {} {:?} {:?}",
                e.address, e.node_name, e.ready, e.serving, e.terminating, e.zone_hints, e.node_hints
            )
        })
        .collect();
    assert_eq!(
        endpoints,
        [
            r#"10.0.1.1 Some("host1") true true false [] []"#,
            r#"10.0.1.2 Some("host2") false true false [] []"#,
            r#"10.0.1.3 Some("host1") false false true ["zone-a", "zone-b"] ["host1"]"#,
            r"10.0.1.4 None true true false [] []",
        ]
    );
}

#[test]
fn sl5_ports_that_cannot_be_served_are_left_out() {
    let (slice, problems) = convert_slice(json!({"ports": [
        {"name": "a", "port": null}, {"name": "b", "port": 0}, {"name": "c", "port": 65536}, {"port": 80}, {"name": "d", "port": 80, "protocol": "QUIC"},
        {"name": "e", "port": 80, "protocol": null}, {"name": "", "port": 81},
    ]}));
    let names: Vec<String> = slice.unwrap().ports.iter().map(|p| p.name.to_string()).collect();
    assert_eq!(names, ["e", ""]);
    assert_eq!(
        fields(&problems),
        ["ports[0].port", "ports[1].port", "ports[2].port", "ports[3].name", "ports[4].protocol"]
    );
    // No list of ports at all, and a null list of endpoints, as the API server writes an empty one.
    let (slice, problems) = convert_slice(json!({"ports": null, "endpoints": null}));
    assert_eq!(problems, []);
    assert!(slice.unwrap().ports.is_empty());
}

#[test]
fn sl8_slices_that_belong_to_no_served_service_are_ignored() {
    for (change, problem_fields) in [
        (json!({"addressType": "FQDN", "endpoints": [{"addresses": ["a.example"]}]}), vec!["addressType"]),
        (json!({"addressType": "Carrier"}), vec!["addressType"]),
        (json!({"metadata": {"namespace": "ns", "name": "x"}}), vec!["metadata.labels"]),
        (
            json!({"metadata": {"namespace": "ns", "name": "x", "labels": {"kubernetes.io/service-name": ""}}}),
            vec!["metadata.labels"],
        ),
        (json!({"metadata": {"name": "x", "labels": {"kubernetes.io/service-name": "web"}}}), vec!["metadata.name"]),
        (
            json!({"metadata": {"namespace": "ns", "name": "x", "labels": {"kubernetes.io/service-name": "web", "service.kubernetes.io/headless": ""}}}),
            vec![],
        ),
    ] {
        let (slice, problems) = convert_slice(change.clone());
        assert_eq!(slice, None, "{change}");
        assert_eq!(fields(&problems), problem_fields, "{change}");
    }
}

#[test]
fn endpoints_that_cannot_be_reached_are_left_out_one_by_one() {
    let addresses = [
        json!([]),
        json!([""]),
        json!(["10.244.1.300"]),
        json!(["fd00::1"]),
        json!(["0.0.0.0"]),
        json!(["127.0.0.1"]),
        json!(["169.254.1.1"]),
        json!(["224.0.0.1"]),
        json!(["10.244.1.3"]),
    ];
    let endpoints: Vec<Value> = addresses.iter().map(|a| json!({"addresses": a})).collect();
    let (slice, problems) = convert_slice(json!({"endpoints": endpoints}));
    let found: Vec<IpAddr> = slice.unwrap().endpoints.iter().map(|e| e.address).collect();
    assert_eq!(found, ips(&["10.244.1.3"]));
    assert_eq!(problems.len(), 8);
    assert!(
        problems.iter().enumerate().all(|(i, p)| p.field.starts_with(&format!("endpoints[{i}].addresses"))),
        "{problems:?}"
    );
}

#[test]
fn node_addresses_are_internal_ones_first() {
    let (found, problems) = node(&serde_json::from_value(json!({
        "metadata": {"name": "n1", "labels": {"topology.kubernetes.io/zone": "zone-a"}},
        "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.7/24", "fd00:1::/64"]},
        "status": {"addresses": [
            {"type": "Hostname", "address": "n1"}, {"type": "ExternalIP", "address": "198.51.100.1"}, {"type": "InternalIP", "address": "192.0.2.1"},
            {"type": "InternalIP", "address": "x"}, {"type": "InternalIP", "address": "fd00::1"}
        ]}
    })).unwrap());
    let found = found.unwrap();
    assert_eq!(found.addresses, ips(&["192.0.2.1", "fd00::1", "198.51.100.1"]));
    assert_eq!(found.zone.as_deref(), Some("zone-a"));
    assert_eq!(found.pod_cidrs, ["10.244.1.0/24".parse().unwrap(), "fd00:1::/64".parse().unwrap()]);
    assert_eq!(fields(&problems), ["status.addresses[3].address"]);
    let (bare, _) = node(&serde_json::from_value(json!({
        "metadata": {"name": "n1", "labels": {"topology.kubernetes.io/zone": ""}}, "spec": {"podCIDR": "10.244.1.0/24"}
    })).unwrap());
    let bare = bare.unwrap();
    assert_eq!((bare.zone, bare.pod_cidrs.len()), (None, 1));
}

#[test]
fn service_cidrs_are_parsed_one_by_one() {
    let (found, problems) = service_cidr(
        &serde_json::from_value(json!({
            "metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.1/12", "x", "fd00::/108"]}
        }))
        .unwrap(),
    );
    let (name, cidrs) = found.unwrap();
    assert_eq!((&*name, cidrs), ("kubernetes", vec!["10.96.0.0/12".parse().unwrap(), "fd00::/108".parse().unwrap()]));
    assert_eq!(fields(&problems), ["spec.cidrs[1]"]);
}
