//! Which endpoints a service port uses: policies, readiness, topology, merge.

use crate::model::fixtures::{NODE, endpoint, ips, node, port, service, settings, slice};
use crate::model::{
    Backend, EndpointSlice, IpFamily, Node, Service, ServicePortView, ServiceType, TrafficPolicy, resolve,
};
use std::sync::Arc;

/// `10.0.1.` is left out of the results, and the port, which is always 80.
fn show(list: &[Backend]) -> String {
    let short = |backend: &Backend| {
        assert_eq!(backend.port, 80);
        backend.address.to_string().replace("10.0.1", "")
    };
    list.iter().map(short).collect::<Vec<_>>().join(" ")
}

fn view(service: &Service, slices: &[EndpointSlice], node: &Node) -> ServicePortView {
    let slices: Vec<Arc<EndpointSlice>> = slices.iter().cloned().map(Arc::new).collect();
    let mut views = resolve(service, &slices, node, &settings(IpFamily::V4));
    assert_eq!(views.len(), 1);
    views.remove(0)
}

fn plain() -> Service {
    Service { ports: vec![port("", 80, 0)], ..service("svc1", &["172.30.0.1"]) }
}

/// A Service of type NodePort (if it has one) with these policies.
fn with_policies(external: TrafficPolicy, internal: TrafficPolicy, node_port: u16) -> Service {
    Service {
        service_type: if node_port == 0 { ServiceType::ClusterIp } else { ServiceType::NodePort },
        external_traffic_policy: external,
        internal_traffic_policy: internal,
        ports: vec![port("", 80, node_port)],
        ..plain()
    }
}

use TrafficPolicy::{Cluster, Local};

/// Cluster list, local list, reachable list, hasEP.
fn lists(service: &Service, endpoints: &[&str], node: &Node) -> (String, String, String, bool) {
    let view = view(service, &[slice("s1", "svc1", &[("", 80)], endpoints)], node);
    (show(&view.cluster), show(&view.local), show(&view.reachable()), view.has_endpoints)
}

fn expect(row: &str, found: (String, String, String, bool), cluster: &str, local: &str, reachable: &str, any: bool) {
    assert_eq!(
        (found.0.as_str(), found.1.as_str(), found.2.as_str(), found.3),
        (cluster, local, reachable, any),
        "{row}"
    );
}

const ZONED: [&str; 4] = [".3 zone=zone-a", ".4 zone=zone-b", ".5 zone=zone-c", ".6 zone=zone-a"];
const ZONED_TWO_HERE: [&str; 4] = [".3 L zone=zone-a", ".4 L zone=zone-b", ".5 zone=zone-c", ".6 zone=zone-a"];

#[test]
fn t1_to_t8_zone_hints() {
    let here = node(NODE, "zone-a");
    expect("T1", lists(&plain(), &ZONED, &here), ".3 .6", "", ".3 .6", true);
    let external_local = with_policies(Local, Cluster, 3001);
    expect("T2", lists(&external_local, &ZONED_TWO_HERE, &here), ".3 .6", ".3 .4", ".3 .4 .6", true);
    let internal_local = with_policies(Cluster, Local, 3001);
    expect("T3", lists(&internal_local, &ZONED_TWO_HERE, &here), ".3 .6", ".3 .4", ".3 .4 .6", true);
    expect("T4", lists(&plain(), &[".3 zone=zone-a"], &node(NODE, "")), ".3", "", ".3", true);
    expect("T4", lists(&plain(), &[".3 zone=zone-a"], &Node { zone: None, ..node(NODE, "") }), ".3", "", ".3", true);
    expect("T5", lists(&plain(), &[".3 zone=zone-a"], &node(NODE, "zone-b")), ".3", "", ".3", true);
    let one_not_ready = [".3 zone=zone-a", ".4 zone=zone-b", ".5 zone=zone-c", ".6 NR zone=zone-a"];
    expect("T6", lists(&plain(), &one_not_ready, &here), ".3", "", ".3", true);
    let one_without = [".3 zone=zone-a", ".4 zone=zone-b", ".5", ".6 zone=zone-a"];
    expect("T7", lists(&plain(), &one_without, &here), ".3 .4 .5 .6", "", ".3 .4 .5 .6", true);
    let several = [".3 zone=zone-a,zone-b,zone-c", ".4 zone=zone-b,zone-c", ".5 zone=zone-b,zone-d", ".6 zone=zone-c"];
    expect("T8", lists(&plain(), &several, &node(NODE, "zone-c")), ".3 .4 .6", "", ".3 .4 .6", true);
    let unready_unhinted = [".3 zone=zone-a", ".4 zone=zone-b", ".5 NR"];
    expect("hints of endpoints that are not ready", lists(&plain(), &unready_unhinted, &here), ".3", "", ".3", true);
}

#[test]
fn t9_to_t11_node_hints_come_before_zone_hints() {
    let hinted = [
        ".3 zone=zone-a node=node-1",
        ".4 zone=zone-b node=node-2",
        ".5 zone=zone-c node=node-3",
        ".6 zone=zone-a node=node-4",
    ];
    expect("T9", lists(&plain(), &hinted, &node("node-1", "zone-a")), ".3", "", ".3", true);
    let mut one_without = hinted;
    one_without[1] = ".4";
    expect("T10", lists(&plain(), &one_without, &node("node-1", "zone-a")), ".3 .4 .5 .6", "", ".3 .4 .5 .6", true);
    expect("T11", lists(&plain(), &hinted, &node("node-0", "zone-a")), ".3 .6", "", ".3 .6", true);
    let node_only = [".3 node=node-1", ".4 node=node-2"];
    expect("without zones", lists(&plain(), &node_only, &node("node-2", "")), ".4", "", ".4", true);
    let zone_left = [".3 zone=zone-a node=node-1", ".4 zone=zone-a"];
    expect("one lacks a node hint", lists(&plain(), &zone_left, &node("node-1", "zone-a")), ".3 .4", "", ".3 .4", true);
}

#[test]
fn t12_to_t16_internal_policy_and_readiness() {
    let here = node(NODE, "zone-a");
    let local_only = with_policies(Cluster, Local, 0);
    expect("T12", lists(&local_only, &[], &here), "", "", "", false);
    expect("T13", lists(&local_only, &[".0", ".1"], &here), "", "", "", true);
    expect("T14", lists(&local_only, &[".0 L", ".1"], &here), "", ".0", ".0", true);
    expect("T15", lists(&plain(), &[".0 NR", ".1 NR"], &here), "", "", "", false);
    expect("T16", lists(&plain(), &[".0 NR", ".1"], &here), ".1", "", ".1", true);
}

#[test]
fn t17_to_t23_terminating_endpoints_and_both_lists() {
    let here = node(NODE, "zone-a");
    expect("T17", lists(&plain(), &[".0 L ST", ".1 ST"], &here), ".0 .1", "", ".0 .1", true);
    let internal_local = with_policies(Cluster, Local, 3001);
    expect("T18", lists(&internal_local, &[".0 L", ".1"], &here), ".0 .1", ".0", ".0 .1", true);
    let both_local = with_policies(Local, Local, 3001);
    expect("T19", lists(&both_local, &[".0", ".1"], &here), ".0 .1", "", ".0 .1", true);
    expect("T20", lists(&both_local, &[".0 ST", ".1 ST"], &here), ".0 .1", "", ".0 .1", true);
    let external_local = with_policies(Local, Cluster, 3001);
    let mixed = [".0", ".1 L NR", ".2 L ST", ".3 ST"];
    expect("T21", lists(&external_local, &mixed, &here), ".0", ".2", ".0 .2", true);
    let not_external = Service { service_type: ServiceType::LoadBalancer, ..with_policies(Local, Cluster, 0) };
    expect("T22", lists(&not_external, &[".0", ".1 L"], &here), ".0 .1", "", ".0 .1", true);
    expect("T23", lists(&plain(), &[".0 NR"], &here), "", "", "", false);
}

#[test]
fn serving_but_neither_ready_nor_terminating_is_never_used() {
    let mut only = slice("s1", "svc1", &[("", 80)], &[".1 L"]);
    only.endpoints[0].ready = false;
    for service in [plain(), with_policies(Local, Local, 3001)] {
        let view = view(&service, &[only.clone()], &node(NODE, ""));
        assert!(view.cluster.is_empty() && view.local.is_empty() && !view.has_endpoints);
        assert_eq!(show(&view.serving), ".1", "conntrack clean-up still knows it");
    }
}

#[test]
fn terminating_endpoints_obey_no_topology() {
    let ends = [".1 ST zone=zone-a", ".2 ST zone=zone-b"];
    expect("draining", lists(&plain(), &ends, &node(NODE, "zone-a")), ".1 .2", "", ".1 .2", true);
}

#[test]
fn a_node_without_a_name_has_no_local_endpoint() {
    let mut slice = slice("s1", "svc1", &[("", 80)], &[".1", ".2"]);
    slice.endpoints[0].node_name = Some("".into());
    slice.endpoints[1].node_name = None;
    let view = view(&with_policies(Local, Local, 3001), &[slice], &Node::default());
    assert!(view.local.is_empty());
    assert_eq!(show(&view.cluster), ".1 .2");
}

#[test]
fn sl1_each_slice_port_feeds_the_service_port_of_its_name() {
    let service = Service { ports: vec![port("http", 80, 0), port("https", 443, 0)], ..plain() };
    let slice = slice("s1", "svc1", &[("http", 8080), ("https", 8443)], &[".1 L", ".2", ".3 L"]);
    let views = resolve(&service, &[Arc::new(slice)], &node(NODE, ""), &settings(IpFamily::V4));
    let text = |view: &ServicePortView| {
        view.cluster
            .iter()
            .map(|b| format!("{}{}", b.socket_address(), if b.local { " L" } else { "" }))
            .collect::<Vec<_>>()
    };
    assert_eq!(text(&views[0]), ["10.0.1.1:8080 L", "10.0.1.2:8080", "10.0.1.3:8080 L"]);
    assert_eq!(text(&views[1]), ["10.0.1.1:8443 L", "10.0.1.2:8443", "10.0.1.3:8443 L"]);
}

#[test]
fn sl3_overlapping_slices_list_each_endpoint_once() {
    let one = slice("s1", "svc1", &[("", 80)], &[".1", ".2"]);
    let two = slice("s2", "svc1", &[("", 80)], &[".2", ".3"]);
    assert_eq!(show(&view(&plain(), &[one, two], &node(NODE, "")).cluster), ".1 .2 .3");
}

#[test]
fn the_same_address_with_another_port_is_another_endpoint() {
    let one = slice("s1", "svc1", &[("", 80)], &[".1"]);
    let two = slice("s2", "svc1", &[("", 81)], &[".1"]);
    let slices = [Arc::new(one), Arc::new(two)];
    let views = resolve(&plain(), &slices, &node(NODE, ""), &settings(IpFamily::V4));
    let ports: Vec<u16> = views[0].cluster.iter().map(|backend| backend.port).collect();
    assert_eq!(ports, [80, 81]);
}

#[test]
fn of_two_entries_the_later_stands_unless_it_is_terminating() {
    // Slices are taken by name: "s1", then "s2".
    let rows = [
        (".1 ST", ".1 L", ".1", "not terminating replaces"),
        (".1 L", ".1 ST", ".1", "terminating does not replace"),
        (".1 NR", ".1 L", ".1", "the later of two that are not terminating"),
        (".1 L", ".1 NR", "", "even if it is not ready"),
        (".1 ST L", ".1 ST", ".1", "the first of two that are terminating"),
        (".1 ST", ".1 ST L", "", "the first is not local"),
    ];
    for (first, second, local, why) in rows {
        let slices = [("s1", first), ("s2", second)].map(|(name, e)| slice(name, "svc1", &[("", 80)], &[e]));
        let view = view(&with_policies(Cluster, Local, 0), &slices, &node(NODE, ""));
        assert_eq!(show(&view.local), local, "{why}");
    }
    let mut within_one = slice("s1", "svc1", &[("", 80)], &[".1 ST", ".1 L"]);
    assert_eq!(show(&view(&with_policies(Cluster, Local, 0), &[within_one.clone()], &node(NODE, "")).local), ".1");
    within_one.endpoints.push(endpoint(".1 NR"));
    assert_eq!(
        show(&view(&plain(), &[within_one], &node(NODE, "")).cluster),
        "",
        "endpoints of one slice in their order"
    );
}

#[test]
fn endpoints_are_ordered_by_their_text() {
    let one = slice("s1", "svc1", &[("", 22)], &["10.2.2.2", "10.2.2.22", "10.2.2.10"]);
    let view = &resolve(&plain(), &[Arc::new(one)], &node(NODE, ""), &settings(IpFamily::V4))[0];
    let text: Vec<String> = view.cluster.iter().map(|backend| backend.socket_address().to_string()).collect();
    assert_eq!(text, ["10.2.2.10:22", "10.2.2.22:22", "10.2.2.2:22"]);
    assert_eq!(view.cluster, view.serving);
}

#[test]
fn slices_of_the_other_family_another_service_or_protocol_do_not_count() {
    let mut service = plain();
    service.cluster_ips = ips(&["172.30.0.1", "fd00::1"]);
    let mut udp = slice("s3", "svc1", &[("", 80)], &[".3"]);
    udp.ports[0].protocol = crate::model::Protocol::Udp;
    let slices: Vec<Arc<EndpointSlice>> = [
        slice("s1", "svc1", &[("", 80)], &["fd00:10::1"]),
        slice("s2", "svc2", &[("", 80)], &[".2"]),
        udp,
        slice("s4", "svc1", &[("other-name", 80)], &[".4"]),
        slice("s5", "svc1", &[("", 80)], &[".5"]),
    ]
    .map(Arc::new)
    .to_vec();
    let cluster = |family| {
        let views = resolve(&service, &slices, &node(NODE, ""), &settings(family));
        views[0].cluster.iter().map(|backend| backend.address).collect::<Vec<_>>()
    };
    assert_eq!(cluster(IpFamily::V4), ips(&["10.0.1.5"]));
    assert_eq!(cluster(IpFamily::V6), ips(&["fd00:10::1"]));
}
