use super::*;
use crate::conntrack::Frontend;
use crate::conntrack::stale::tests::{name, settings, view};
use crate::model::{NodePortAddresses, ServicePortView};
use crate::sys::netns::NetNs;
use crate::sys::netns::tests::{for_test, sh};
use std::net::UdpSocket;
use std::time::Duration;

/// A namespace that tracks connections and translates UDP as the rules of a proxy would. Every address of 10.0.0.0/8 is
/// reached by loopback; 10.0.0.1 and 10.0.0.2 (and fd00::1) are local.
fn node(rules: &str) -> Option<NetNs> {
    let netns = for_test()?;
    sh(&netns, "ip addr add 10.0.0.1/8 dev lo; ip addr add 10.0.0.2/8 dev lo; ip addr add fd00::1/16 dev lo nodad");
    sh(&netns, "nft 'table inet track { chain c { type filter hook output priority 0; ct state new counter; }; }'");
    translate(&netns, rules);
    Some(netns)
}

/// Replaces the translations.
fn translate(netns: &NetNs, rules: &str) {
    let table = "table inet services { }; delete table inet services; table inet services { chain out { type nat hook output priority -100; RULES; }; }";
    sh(netns, &format!("nft '{}'", table.replace("RULES", if rules.is_empty() { "counter" } else { rules })));
}

/// Destinations and expected answerers of the UDP flows that the conntrack tool sees.
fn flows(netns: &NetNs) -> Vec<String> {
    let mut lines: Vec<_> = ["ipv4", "ipv6"]
        .iter()
        .flat_map(|family| {
            let list = sh(netns, &format!("conntrack -L -f {family} 2>/dev/null"));
            list.lines().map(str::to_owned).collect::<Vec<_>>()
        })
        .map(|line| {
            let values =
                |key| line.split_whitespace().filter_map(move |word| word.strip_prefix(key)).map(str::to_owned);
            let (dst, dport) = (values("dst=").next().unwrap(), values("dport=").next().unwrap());
            let (src, sport) = (values("src=").nth(1).unwrap(), values("sport=").nth(1).unwrap());
            format!("{} {dst} {dport} > {src} {sport}", line.split_whitespace().next().unwrap())
        })
        .collect();
    lines.sort();
    lines
}

fn reconcile(netns: &NetNs, frontends: &Frontends) -> Report {
    netns.run(|| Reconciler::open().unwrap().reconcile(frontends).unwrap()).unwrap()
}

/// A socket inside `netns`.
fn socket(netns: &NetNs, address: &str) -> UdpSocket {
    let socket = netns.run(|| UdpSocket::bind(address)).unwrap().unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    socket
}

/// Whether a datagram arrived.
fn received(socket: &UdpSocket) -> bool {
    socket.recv(&mut [0; 16]).is_ok()
}

fn frontends(serving: &[&str]) -> Frontends {
    let mut frontends = Frontends::new();
    frontends.set_node_addresses(&settings(
        IpFamily::V4,
        NodePortAddresses::All,
        &["127.0.0.1", "10.0.0.1", "10.0.0.2"],
    ));
    frontends.set_service(
        &name("dns"),
        IpFamily::V4,
        &[ServicePortView { node_port: 30_053, ..view("dns", "10.96.0.10", 53, serving) }],
    );
    frontends
}

#[test]
fn exactly_the_stale_entries_are_deleted() {
    let Some(netns) = node("") else { return };
    let insert = |protocol: &str,
                  client: &str,
                  destination: &str,
                  port: u16,
                  reply: &str,
                  reply_port: u16,
                  more: &str| {
        let tcp = if protocol == "tcp" { "--state ESTABLISHED" } else { "" };
        sh(
            &netns,
            &format!(
                "conntrack -I -p {protocol} -t 300 -s {client} -d {destination} --sport 4000 --dport {port} -r {reply} -q {client} \
             --reply-port-src {reply_port} --reply-port-dst 4000 {tcp} {more} >/dev/null 2>&1"
            ),
        );
    };
    // Right ones.
    insert("udp", "10.244.0.1", "10.96.0.10", 53, "10.244.0.5", 5353, "");
    insert("udp", "10.244.0.6", "10.0.0.2", 30053, "10.244.0.5", 5353, "");
    insert("tcp", "10.244.0.1", "10.96.0.10", 53, "10.244.0.9", 5353, "");
    insert("udp", "10.244.0.1", "10.0.0.9", 30053, "10.0.0.9", 30053, "");
    insert("udp", "fd00:244::1", "fd00:96::10", 53, "fd00:244::5", 5353, "");
    let right = flows(&netns);
    assert_eq!(right.len(), 5, "{right:?}");
    // Stale ones.
    insert("udp", "10.244.0.2", "10.96.0.10", 53, "10.244.0.9", 5353, "");
    insert("udp", "10.244.0.3", "10.96.0.10", 53, "10.96.0.10", 53, "");
    insert("udp", "10.244.0.7", "10.0.0.2", 30053, "10.244.0.9", 5353, "");
    insert("udp", "fd00:244::2", "fd00:96::10", 53, "fd00:244::9", 5353, "");
    insert("udp", "10.244.0.4", "10.96.0.10", 53, "10.244.0.9", 5353, "--zone 7");

    let mut frontends = frontends(&["10.244.0.5:5353"]);
    frontends.set_service(&name("dns"), IpFamily::V6, &[view("dns", "fd00:96::10", 53, &["[fd00:244::5]:5353"])]);
    assert_eq!(reconcile(&netns, &frontends), Report { examined: 9, deleted: 5, offloaded: 0 });
    assert_eq!(flows(&netns), right);
    // A restart with unchanged state finds nothing to delete.
    assert_eq!(reconcile(&netns, &frontends), Report { examined: 4, deleted: 0, offloaded: 0 });
    assert_eq!(flows(&netns), right);
}

#[test]
fn a_steady_sender_is_freed_from_an_untranslated_and_from_a_dead_flow() {
    let Some(netns) = node("") else { return };
    let (first, second) = (socket(&netns, "10.0.0.1:5301"), socket(&netns, "10.0.0.1:5302"));
    let client = socket(&netns, "10.0.0.1:4000");
    let send = || drop(client.send_to(b"x", "10.96.0.10:53"));
    send(); // before there is a service: an untranslated entry

    translate(&netns, "ip daddr 10.96.0.10 udp dport 53 dnat ip to 10.0.0.1:5301");
    send();
    assert!(!received(&first), "the old entry holds the flow");
    let mut frontends = frontends(&["10.0.0.1:5301"]);
    assert_eq!(reconcile(&netns, &frontends).deleted, 1);
    send();
    assert!(received(&first));

    // The endpoint is replaced.
    translate(&netns, "ip daddr 10.96.0.10 udp dport 53 dnat ip to 10.0.0.1:5302");
    send();
    assert!(received(&first), "the old entry holds the flow");
    frontends.set_service(&name("dns"), IpFamily::V4, &[view("dns", "10.96.0.10", 53, &["10.0.0.1:5302"])]);
    assert_eq!(reconcile(&netns, &frontends).deleted, 1);
    send();
    assert!(received(&second) && !received(&first));

    // The service is deleted: its translated flow ends; what is sent there later is left alone.
    translate(&netns, "");
    frontends.set_service(&name("dns"), IpFamily::V4, &[]);
    assert_eq!(reconcile(&netns, &frontends).deleted, 1);
    send();
    assert!(!received(&second));
    assert_eq!(reconcile(&netns, &frontends).deleted, 0);
}

#[test]
fn thousands_of_stale_flows_go_in_one_pass_and_others_stay() {
    let Some(netns) = node("ip daddr 10.96.0.10 udp dport 53 dnat ip to 10.0.0.1:5301") else { return };
    let _endpoint = socket(&netns, "10.0.0.1:5301");
    netns
        .run(|| {
            for _ in 0..3000 {
                let socket = UdpSocket::bind("10.0.0.1:0").unwrap();
                socket.send_to(b"x", "10.96.0.10:53").unwrap();
                socket.send_to(b"x", "10.96.0.11:53").unwrap();
            }
        })
        .unwrap();
    let report = reconcile(&netns, &frontends(&["10.0.0.1:5301"]));
    let services = flows(&netns).iter().filter(|flow| flow.contains("> 10.0.0.1 5301")).count() as u64;
    assert!(services >= 2000 && report.deleted == 0, "{services} {report:?}"); // ports may repeat: fewer than 3000 flows
    let report = reconcile(&netns, &frontends(&[]));
    assert_eq!(report.deleted, services, "{report:?}");
    let left = flows(&netns);
    assert!(left.len() >= 2000 && left.iter().all(|flow| flow.starts_with("udp 10.96.0.11 53")), "{} left", left.len());
}

#[test]
fn the_kernel_filters_by_protocol_and_a_refused_filter_is_dropped() {
    let Some(netns) = node("") else { return };
    let listener = netns.run(|| std::net::TcpListener::bind("10.0.0.1:80")).unwrap().unwrap();
    let _stream = netns.run(|| std::net::TcpStream::connect("10.0.0.1:80")).unwrap().unwrap();
    let _accepted = listener.accept().unwrap();
    socket(&netns, "10.0.0.1:4000").send_to(b"x", "10.96.0.10:53").unwrap();
    let protocols = |filter: bool| {
        let mut protocols = Vec::new();
        let dump = || {
            Connection::open()
                .unwrap()
                .dump(&request(IpFamily::V4, filter), |_, m| protocols.push(parse(m).unwrap().protocol))
        };
        netns.run(dump).unwrap().unwrap();
        protocols.sort_unstable();
        protocols
    };
    assert_eq!(protocols(true), [17]);
    assert_eq!(protocols(false), [6, 17]);
    let mut old_kernel = netns.run(|| Reconciler::open().unwrap()).unwrap();
    old_kernel.kernel_filter = false;
    assert_eq!(old_kernel.reconcile(&frontends(&[])).unwrap(), Report { examined: 1, deleted: 1, offloaded: 0 });
}

#[test]
fn without_frontends_nothing_is_read() {
    let Some(netns) = node("") else { return };
    socket(&netns, "10.0.0.1:4000").send_to(b"x", "10.96.0.10:53").unwrap();
    assert_eq!(reconcile(&netns, &Frontends::new()), Report::default());
    let mut gone = Frontends::new();
    gone.add_gone(Frontend::Address("10.96.0.10".parse().unwrap(), 53));
    assert_eq!(reconcile(&netns, &gone), Report { examined: 1, deleted: 0, offloaded: 0 });
}
