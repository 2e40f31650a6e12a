use super::*;
use crate::model::{Backend, LocalDetector};

const CLIENT: &str = "10.244.7.7:40000";

fn side(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn flow(protocol: u8, destination: &str, reply: &str) -> Flow {
    let status = if destination == reply { 0 } else { DST_NAT };
    let client = if side(destination).is_ipv6() { side("[fd00::7]:40000") } else { side(CLIENT) };
    Flow {
        protocol,
        original_source: client,
        original_destination: side(destination),
        reply_source: side(reply),
        reply_destination: client,
        status,
    }
}

fn udp(destination: &str, reply: &str) -> Flow {
    flow(17, destination, reply)
}

pub(crate) fn name(service: &str) -> ObjectName {
    ObjectName::new("default", service)
}

/// A UDP port of a service; serving endpoints as given.
pub(crate) fn view(service: &str, cluster_ip: &str, port: u16, serving: &[&str]) -> ServicePortView {
    let serving = serving
        .iter()
        .map(|text| Backend { address: side(text).ip(), port: side(text).port(), local: false })
        .collect();
    ServicePortView {
        name: ServicePortName { service: name(service), port: "dns".into(), protocol: Protocol::Udp },
        cluster_ip: cluster_ip.parse().unwrap(),
        port,
        node_port: 0,
        external_ips: vec![],
        load_balancer_ips: vec![],
        source_ranges: None,
        internal_local: false,
        external_local: false,
        affinity_timeout_s: None,
        health_check_node_port: 0,
        cluster: vec![],
        local: vec![],
        has_endpoints: true,
        serving,
    }
}

pub(crate) fn settings(family: IpFamily, addresses: NodePortAddresses, local: &[&str]) -> Settings {
    Settings {
        family,
        detector: LocalDetector::None,
        node_port_addresses: addresses,
        masquerade_all: false,
        masquerade_mark: 0x4000,
        node_ip: None,
        local_addresses: local.iter().map(|ip| ip.parse().unwrap()).collect(),
        affinity_clients_max: 65_535,
        external_ips_enabled: true,
    }
}

/// The service of rows U1 to U6. Only 10.240.0.4:9090 is serving.
fn u_view(serving: &[&str]) -> ServicePortView {
    ServicePortView {
        node_port: 32_000,
        external_ips: vec!["192.168.99.100".parse().unwrap()],
        load_balancer_ips: vec!["1.2.3.4".parse().unwrap()],
        ..view("u", "172.30.1.1", 8000, serving)
    }
}

fn u_frontends(serving: &[&str]) -> Frontends {
    let mut frontends = Frontends::new();
    frontends.set_node_addresses(&settings(
        IpFamily::V4,
        NodePortAddresses::All,
        &["127.0.0.1", "10.9.0.11", "10.9.1.11"],
    ));
    frontends.set_service(&name("u"), IpFamily::V4, &[u_view(serving)]);
    frontends
}

/// Each way to reach the service, both local addresses for the NodePort.
const DESTINATIONS: [&str; 5] =
    ["172.30.1.1:8000", "1.2.3.4:8000", "192.168.99.100:8000", "10.9.0.11:32000", "10.9.1.11:32000"];
const SERVING: &[&str] = &["10.240.0.4:9090"];

#[test]
fn u1_flows_to_a_serving_endpoint_stay() {
    let frontends = u_frontends(SERVING);
    for destination in DESTINATIONS {
        assert!(!frontends.stale(&udp(destination, "10.240.0.4:9090")), "{destination}");
    }
}

#[test]
fn u2_u3_flows_to_other_endpoints_and_other_ports_go() {
    let frontends = u_frontends(SERVING);
    for destination in DESTINATIONS {
        for reply in ["10.240.1.5:9090", "10.240.2.6:9090", "10.240.0.4:8080"] {
            assert!(frontends.stale(&udp(destination, reply)), "{destination} {reply}");
        }
    }
}

#[test]
fn u4_u5_other_ports_and_protocols_stay() {
    let frontends = u_frontends(SERVING);
    for destination in DESTINATIONS {
        let other = SocketAddr::new(side(destination).ip(), 3000).to_string();
        assert!(!frontends.stale(&udp(&other, "10.240.1.5:9090")), "{other}");
        for protocol in [6, 132] {
            assert!(!frontends.stale(&flow(protocol, destination, "10.240.1.5:9090")), "{destination} {protocol}");
        }
    }
}

#[test]
fn u6_flows_that_were_never_translated_go() {
    let frontends = u_frontends(SERVING);
    for destination in DESTINATIONS {
        assert!(frontends.stale(&udp(destination, destination)), "{destination}");
    }
}

#[test]
fn a_service_without_serving_endpoints_loses_all_its_flows_node_port_included() {
    let frontends = u_frontends(&[]);
    for destination in DESTINATIONS {
        assert!(frontends.stale(&udp(destination, "10.240.0.4:9090")), "{destination}");
        assert!(frontends.stale(&udp(destination, destination)), "{destination}");
    }
}

#[test]
fn a_node_port_number_at_an_address_that_is_not_ours_is_no_service() {
    for serving in [SERVING, &[]] {
        let frontends = u_frontends(serving);
        // A tunnel between other hosts, ours to another host, loopback, and the same number as a source port.
        for destination in ["10.9.0.12:32000", "203.0.113.9:32000", "127.0.0.1:32000"] {
            assert!(!frontends.stale(&udp(destination, destination)), "{destination}");
            assert!(
                !frontends.stale(&udp(destination, "10.240.1.5:9090")),
                "{destination}: someone else's translation"
            );
        }
        let mut reverse = udp("10.9.0.12:8472", "10.9.0.12:8472");
        reverse.original_source = side("10.9.0.11:32000");
        assert!(!frontends.stale(&reverse));
    }
}

#[test]
fn a_tunnel_to_a_host_network_endpoint_of_a_service_stays() {
    let mut frontends = Frontends::new();
    frontends.set_node_addresses(&settings(IpFamily::V4, NodePortAddresses::All, &["10.9.0.11"]));
    let names: [&[&str]; 3] = [&["10.9.0.12:8472"], &[], &["10.9.0.11:8472"]];
    for serving in names {
        let view = ServicePortView { node_port: 30_472, ..view("vxlan", "10.96.0.9", 8472, serving) };
        frontends.set_service(&name("vxlan"), IpFamily::V4, &[view]);
        for destination in ["10.9.0.12:8472", "10.9.0.11:8472", "10.9.0.12:51820"] {
            assert!(!frontends.stale(&udp(destination, destination)), "{destination}");
        }
    }
}

#[test]
fn node_ports_count_only_on_the_addresses_that_accept_them() {
    let mut frontends = u_frontends(&[]);
    let only = NodePortAddresses::Only(["10.9.0.11".parse().unwrap()].into());
    frontends.set_node_addresses(&settings(IpFamily::V4, only, &["10.9.0.11", "10.9.1.11"]));
    assert!(frontends.stale(&udp("10.9.0.11:32000", "10.9.0.11:32000")));
    assert!(!frontends.stale(&udp("10.9.1.11:32000", "10.9.1.11:32000")));
    // The other family's addresses are another list.
    frontends.set_node_addresses(&settings(IpFamily::V6, NodePortAddresses::All, &["fd00:9::11", "::1"]));
    assert!(frontends.stale(&udp("10.9.0.11:32000", "10.9.0.11:32000")));
    assert!(!frontends.stale(&udp("[fd00:9::11]:32000", "[fd00:9::11]:32000")), "the service has no IPv6");
    let six = ServicePortView { node_port: 32_000, ..view("u", "fd00:96::1", 8000, &["[fd00:244::4]:9090"]) };
    frontends.set_service(&name("u"), IpFamily::V6, &[six]);
    assert!(frontends.stale(&udp("[fd00:9::11]:32000", "[fd00:9::11]:32000")));
    assert!(!frontends.stale(&udp("[fd00:9::11]:32000", "[fd00:244::4]:9090")));
    assert!(!frontends.stale(&udp("[::1]:32000", "[::1]:32000")));
    assert_eq!(frontends.families(), IpFamily::ALL);
}

#[test]
fn a_deleted_service_takes_its_translated_flows_and_only_those() {
    let mut frontends = u_frontends(SERVING);
    frontends.reconciled(frontends.revision());
    frontends.set_service(&name("u"), IpFamily::V4, &[]);
    assert!(frontends.due());
    for destination in DESTINATIONS {
        assert!(frontends.stale(&udp(destination, "10.240.0.4:9090")), "{destination}");
        assert!(!frontends.stale(&udp(destination, destination)), "{destination}: not ours any more");
    }
    frontends.reconciled(frontends.revision());
    assert!(!frontends.stale(&udp(DESTINATIONS[0], "10.240.0.4:9090")), "looked at once, then forgotten");
    assert!(frontends.is_empty() && !frontends.due());
}

#[test]
fn what_was_found_in_the_kernel_at_start_counts_as_gone_unless_it_is_served() {
    let mut frontends = u_frontends(SERVING);
    for text in ["172.30.1.1:8000", "172.30.1.9:53"] {
        frontends.add_gone(Frontend::Address(side(text).ip(), side(text).port()));
    }
    frontends.add_gone(Frontend::NodePort(IpFamily::V4, 31_000));
    assert!(!frontends.stale(&udp("172.30.1.1:8000", "10.240.0.4:9090")));
    assert!(frontends.stale(&udp("172.30.1.9:53", "10.240.0.4:53")));
    assert!(frontends.stale(&udp("10.9.0.11:31000", "10.240.0.4:53")));
    assert!(!frontends.stale(&udp("10.9.0.12:31000", "10.240.0.4:53")));
}

#[test]
fn a_frontend_that_moves_to_another_service_is_never_gone() {
    let mut frontends = u_frontends(SERVING);
    // Both claim the address for a moment, in either order; then the first one lets go.
    let heir = ServicePortView {
        name: ServicePortName { service: name("v"), ..u_view(&[]).name },
        ..u_view(&["10.240.5.5:9090"])
    };
    frontends.set_service(&name("v"), IpFamily::V4, &[heir]);
    assert!(!frontends.stale(&udp(DESTINATIONS[0], "10.240.0.4:9090")), "the smaller name serves");
    assert!(frontends.stale(&udp(DESTINATIONS[0], "10.240.5.5:9090")));
    frontends.set_service(&name("u"), IpFamily::V4, &[]);
    assert!(frontends.stale(&udp(DESTINATIONS[0], "10.240.0.4:9090")));
    assert!(!frontends.stale(&udp(DESTINATIONS[0], "10.240.5.5:9090")));
    assert!(frontends.stale(&udp(DESTINATIONS[0], DESTINATIONS[0])));
}

#[test]
fn a_cluster_ip_is_not_served_by_an_external_address_of_a_smaller_name() {
    let mut frontends = Frontends::new();
    let own = view("b", "172.30.9.9", 8000, &["10.240.0.4:9090"]);
    let thief = ServicePortView {
        external_ips: vec!["172.30.9.9".parse().unwrap()],
        ..view("a", "172.30.1.1", 8000, &["10.240.5.5:9090"])
    };
    for (name, view) in [("b", own), ("a", thief)] {
        frontends.set_service(&ObjectName::new("ns1", name), IpFamily::V4, &[view]);
    }
    assert!(!frontends.stale(&udp("172.30.9.9:8000", "10.240.0.4:9090")));
    assert!(frontends.stale(&udp("172.30.9.9:8000", "10.240.5.5:9090")));
    frontends.set_service(&ObjectName::new("ns1", "b"), IpFamily::V4, &[]);
    assert!(!frontends.stale(&udp("172.30.9.9:8000", "10.240.5.5:9090")));
}

/// Row U8, and what kube-proxy misses: new frontends.
#[test]
fn u8_changes_that_can_make_a_flow_stale_are_due() {
    type Change = fn(&mut ServicePortView);
    let changes: [(&str, Change); 7] = [
        ("endpoint added", |v| {
            v.serving.push(Backend { address: "10.240.9.9".parse().unwrap(), port: 9090, local: true })
        }),
        ("endpoint removed or not serving", |v| v.serving.clear()),
        ("target port renumbered", |v| v.serving[0].port = 9091),
        ("service port renumbered", |v| v.port = 8001),
        ("new load balancer address", |v| v.load_balancer_ips.push("1.2.3.5".parse().unwrap())),
        ("new external address", |v| v.external_ips.push("1.2.3.6".parse().unwrap())),
        ("node port changed", |v| v.node_port = 32_001),
    ];
    for (what, change) in changes {
        let mut frontends = u_frontends(SERVING);
        frontends.reconciled(frontends.revision());
        let mut view = u_view(SERVING);
        change(&mut view);
        frontends.set_service(&name("u"), IpFamily::V4, &[view]);
        assert!(frontends.due(), "{what}");
    }
}

/// Row U9. Changes that no flow can contradict (a policy, a rename, TCP ports, the same again) need no dump.
#[test]
fn u9_changes_that_cannot_make_a_flow_stale_are_not_due() {
    let mut frontends = u_frontends(SERVING);
    frontends.reconciled(frontends.revision());
    let tcp = |serving: &[&str]| {
        let mut view = view("u", "172.30.1.1", 8000, serving);
        view.name.protocol = Protocol::Tcp;
        view
    };
    let policy = ServicePortView { external_local: true, affinity_timeout_s: Some(5), ..u_view(SERVING) };
    for views in
        [vec![u_view(SERVING)], vec![policy], vec![u_view(SERVING), tcp(SERVING)], vec![tcp(&[]), u_view(SERVING)]]
    {
        frontends.set_service(&name("u"), IpFamily::V4, &views);
        assert!(!frontends.due());
    }
    frontends.set_service(&name("other"), IpFamily::V4, &[tcp(SERVING)]);
    frontends.set_service(&name("never-seen"), IpFamily::V6, &[]);
    frontends.set_node_addresses(&settings(
        IpFamily::V4,
        NodePortAddresses::All,
        &["127.0.0.1", "10.9.0.11", "10.9.1.11"],
    ));
    assert!(!frontends.due());
}

#[test]
fn a_failed_reconcile_stays_due_and_a_change_during_one_is_not_lost() {
    let mut frontends = u_frontends(SERVING);
    assert!(frontends.due());
    let started = frontends.revision();
    // While it runs, the service goes.
    frontends.set_service(&name("u"), IpFamily::V4, &[]);
    frontends.reconciled(started);
    assert!(frontends.due());
    assert!(frontends.stale(&udp(DESTINATIONS[0], "10.240.0.4:9090")), "still remembered as gone");
}

mod any_order {
    use super::*;
    use proptest::prelude::*;

    /// One statement about a service: which of two, NodePort or none, which endpoints; `None` = it is gone.
    fn statement() -> impl Strategy<Value = (usize, Option<(bool, Vec<u8>)>)> {
        (0..2usize, proptest::option::of((any::<bool>(), proptest::collection::vec(1..4u8, 0..3))))
    }

    fn views(service: usize, state: &Option<(bool, Vec<u8>)>) -> Vec<ServicePortView> {
        let Some((node_port, endpoints)) = state else { return vec![] };
        let endpoints: Vec<_> = endpoints.iter().map(|n| format!("10.240.0.{n}:9090")).collect();
        let endpoints: Vec<_> = endpoints.iter().map(String::as_str).collect();
        // Both services claim 1.2.3.4:8000.
        let view = view(["a", "b"][service], ["172.30.1.1", "172.30.1.2"][service], 8000, &endpoints);
        vec![ServicePortView {
            node_port: if *node_port { 32_000 } else { 0 },
            load_balancer_ips: vec!["1.2.3.4".parse().unwrap()],
            ..view
        }]
    }

    proptest! {
        #[test]
        fn what_was_stated_last_decides(statements in proptest::collection::vec(statement(), 0..12)) {
            let address = settings(IpFamily::V4, NodePortAddresses::All, &["10.9.0.11"]);
            let (mut grown, mut fresh) = (Frontends::new(), Frontends::new());
            let mut last = [None, None];
            grown.set_node_addresses(&address);
            for (service, state) in statements {
                grown.set_service(&name(["a", "b"][service]), IpFamily::V4, &views(service, &state));
                last[service] = state;
            }
            for service in [1, 0] {
                fresh.set_service(&name(["a", "b"][service]), IpFamily::V4, &views(service, &last[service]));
            }
            fresh.set_node_addresses(&address);
            let flows = ["172.30.1.1:8000", "172.30.1.2:8000", "1.2.3.4:8000", "10.9.0.11:32000"].into_iter().flat_map(|to| {
                [to, "10.240.0.1:9090", "10.240.0.2:9090", "10.240.0.3:9090"].map(|reply| udp(to, reply))
            });
            let flows: Vec<_> = flows.collect();
            // A frontend that was served meanwhile is remembered until a reconcile, and only for translated flows.
            for flow in &flows {
                prop_assert!(grown.stale(flow) >= fresh.stale(flow), "{flow:?}");
                prop_assert!(flow.translated() || grown.stale(flow) == fresh.stale(flow), "{flow:?}");
            }
            grown.reconciled(grown.revision());
            for flow in &flows {
                prop_assert_eq!(grown.stale(flow), fresh.stale(flow), "{:?}", flow);
            }
        }
    }
}
