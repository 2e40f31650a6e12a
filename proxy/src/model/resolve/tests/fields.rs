//! Fields that follow from the Service alone.

use crate::model::fixtures::{NODE, ips, nets, node, port, port_of, service, settings};
use crate::model::{IpFamily, Protocol, Service, ServicePortView, ServiceType, Settings, TrafficPolicy, resolve};
use ipnet::IpNet;

fn views_with(service: &Service, settings: &Settings) -> Vec<ServicePortView> {
    resolve(service, &[], &node(NODE, ""), settings)
}

fn views(service: &Service, family: IpFamily) -> Vec<ServicePortView> {
    views_with(service, &settings(family))
}

fn view(service: &Service, family: IpFamily) -> ServicePortView {
    views(service, family).pop().expect("one port")
}

#[test]
fn m3_a_service_without_a_cluster_ip_of_the_family_does_not_exist_there() {
    let only_six = Service { ports: vec![port("", 80, 3001)], ..service("svc1", &["fd00::1"]) };
    assert!(views(&only_six, IpFamily::V4).is_empty());
    assert_eq!(views(&only_six, IpFamily::V6).len(), 1);
}

#[test]
fn m4_addresses_and_ranges_are_split_by_family() {
    let both = Service {
        external_ips: ips(&["8.8.8.8", "2001:db8:85a3::7335"]),
        load_balancer_ips: ips(&["8.8.8.8", "2001:db8:85a3::7335"]),
        source_ranges: nets(&["0.0.0.0/1", "2001:db8::/32"]),
        ports: vec![port("", 80, 0)],
        ..service("svc1", &["172.30.0.1", "fd00::1"])
    };
    let no_node_ip = |family| views_with(&both, &Settings { node_ip: None, ..settings(family) }).remove(0);
    let four = no_node_ip(IpFamily::V4);
    assert_eq!((four.external_ips, four.load_balancer_ips), (ips(&["8.8.8.8"]), ips(&["8.8.8.8"])));
    assert_eq!(four.source_ranges, Some(nets(&["0.0.0.0/1"])));
    let six = no_node_ip(IpFamily::V6);
    let expected = ips(&["2001:db8:85a3::7335"]);
    assert_eq!((&six.external_ips, &six.load_balancer_ips), (&expected, &expected));
    assert_eq!(six.source_ranges, Some(nets(&["2001:db8::/32"])));
}

/// Effective IPv4 ranges with VIPs 1.2.3.4 and 5.6.7.8 on the node 192.168.0.2.
fn ranges(ranges: &[&str]) -> Option<Vec<IpNet>> {
    let filtered = Service {
        load_balancer_ips: ips(&["1.2.3.4", "5.6.7.8"]),
        source_ranges: nets(ranges),
        ports: vec![port("", 80, 0)],
        ..service("svc1", &["172.30.0.1"])
    };
    view(&filtered, IpFamily::V4).source_ranges
}

#[test]
fn m5_source_ranges_as_they_take_effect() {
    assert_eq!(ranges(&["10.1.2.0/28"]), Some(nets(&["10.1.2.0/28"])));
    assert_eq!(ranges(&[]), None);
    assert_eq!(ranges(&["2001:db8::/32"]), None, "a range of the other family does not filter this one");
    assert_eq!(ranges(&["10.1.2.0/28", "0.0.0.0/0"]), None, "a /0 cancels the others of its family");
    assert_eq!(ranges(&["10.1.2.0/28", "::/0"]), Some(nets(&["10.1.2.0/28"])), "and only those");
    assert_eq!(ranges(&["0.0.0.0/1", "128.0.0.0/1"]), None, "everybody may connect");
}

#[test]
fn source_ranges_are_disjoint() {
    let nested = ["10.0.0.0/8", "10.1.0.0/16", "10.1.2.3/32", "203.0.113.0/25", "203.0.113.128/25", "10.0.0.0/8"];
    assert_eq!(ranges(&nested), Some(nets(&["10.0.0.0/8", "203.0.113.0/24"])));
}

#[test]
fn vips_may_connect_to_themselves_if_the_node_may() {
    assert_eq!(
        ranges(&["192.168.0.0/24", "203.0.113.0/25"]),
        Some(nets(&["1.2.3.4/32", "5.6.7.8/32", "192.168.0.0/24", "203.0.113.0/25"]))
    );
    assert_eq!(ranges(&["203.0.113.0/25"]), Some(nets(&["203.0.113.0/25"])));
}

#[test]
fn m6_m7_without_a_vip_the_node_ports_stay() {
    let proxied_elsewhere = Service {
        service_type: ServiceType::LoadBalancer,
        ports: vec![port("", 80, 3001)],
        ..service("svc1", &["172.30.0.1"])
    };
    let view = view(&proxied_elsewhere, IpFamily::V4);
    assert!(view.load_balancer_ips.is_empty());
    assert_eq!(view.node_port, 3001);
    assert!(view.externally_accessible());
}

#[test]
fn m8_the_health_check_port_belongs_to_load_balancers_with_policy_local() {
    let balanced = Service {
        service_type: ServiceType::LoadBalancer,
        external_traffic_policy: TrafficPolicy::Local,
        health_check_node_port: 345,
        ports: vec![port("p", 80, 0), port("q", 81, 0)],
        ..service("svc1", &["172.30.0.1"])
    };
    let health_ports = |service: &Service| {
        views(service, IpFamily::V4).iter().map(|view| view.health_check_node_port).collect::<Vec<_>>()
    };
    assert_eq!(health_ports(&balanced), [345, 345]);
    assert_eq!(health_ports(&Service { service_type: ServiceType::ClusterIp, ..balanced.clone() }), [0, 0]);
    assert_eq!(health_ports(&Service { service_type: ServiceType::NodePort, ..balanced.clone() }), [0, 0]);
    assert_eq!(health_ports(&Service { external_traffic_policy: TrafficPolicy::Cluster, ..balanced }), [0, 0]);
}

#[test]
fn external_policy_local_needs_a_type_or_an_external_ip() {
    let local = Service {
        external_traffic_policy: TrafficPolicy::Local,
        ports: vec![port("", 80, 0)],
        ..service("svc1", &["172.30.0.1"])
    };
    assert!(!view(&local, IpFamily::V4).external_local, "type ClusterIP");
    let rows = [ServiceType::NodePort, ServiceType::LoadBalancer];
    assert!(rows.into_iter().all(|t| view(&Service { service_type: t, ..local.clone() }, IpFamily::V4).external_local));
    let with_external_ip = Service { external_ips: ips(&["192.168.99.11"]), ..local };
    assert!(view(&with_external_ip, IpFamily::V4).external_local);
}

#[test]
fn addresses_are_listed_once_and_never_the_cluster_ip() {
    let repeated = Service {
        external_ips: ips(&["192.168.99.11", "172.30.0.1", "192.168.99.11"]),
        load_balancer_ips: ips(&["172.30.0.1", "1.2.3.4", "1.2.3.4", "192.168.99.11"]),
        ports: vec![port("", 80, 0)],
        ..service("svc1", &["172.30.0.1"])
    };
    let view = view(&repeated, IpFamily::V4);
    assert_eq!(view.external_ips, ips(&["192.168.99.11"]));
    assert_eq!(view.load_balancer_ips, ips(&["1.2.3.4", "192.168.99.11"]));
}

#[test]
fn switched_off_external_ips_have_no_frontend_but_still_bring_the_external_policy_into_force() {
    let external = Service {
        external_ips: ips(&["192.168.99.11"]),
        external_traffic_policy: TrafficPolicy::Local,
        ports: vec![port("", 80, 0)],
        ..service("svc1", &["172.30.0.1"])
    };
    let view = views_with(&external, &Settings { external_ips_enabled: false, ..settings(IpFamily::V4) }).remove(0);
    assert!(view.external_ips.is_empty() && view.external_local);
}

#[test]
fn of_two_ports_with_one_name_the_last_stands_and_other_protocols_are_no_clash() {
    let twice = Service {
        ports: vec![port("p", 80, 0), port_of("p", Protocol::Udp, 82, 0), port("p", 81, 0)],
        ..service("svc1", &["172.30.0.1"])
    };
    let found: Vec<(Protocol, u16)> =
        views(&twice, IpFamily::V4).iter().map(|view| (view.name.protocol, view.port)).collect();
    assert_eq!(found, [(Protocol::Udp, 82), (Protocol::Tcp, 81)]);
}
