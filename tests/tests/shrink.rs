//! Endpoints come and go under load: no packet may meet a gap between two lookups of one rule set.
//!
//! A commit is atomic for each lookup, not for each packet: a packet that read the number of endpoints before a shrink may
//! look up its slot after it. If the slot were gone, the packet would not be translated and the ClusterIP check would reject
//! it. So the test counts the port unreachables that the node makes: there must be none.
//!
//! `TANDEM_TEST_FLIPS` is the number of changes (10,000 for the long run).

use nix::sys::socket::{MsgFlags, sendto};
use proxy_tests::engine::{Engine, Objects, TandemAgent, tandem_binary};
use proxy_tests::netns::{self, Netns};
use proxy_tests::process::eventually;
use proxy_tests::scenario;
use proxy_tests::world::World;
use serde_json::{Value, json};
use socket2::{Domain, SockAddr, Socket, Type};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const WATCH: &str = "table ip watch {
    chain made { type filter hook output priority 0; icmp type destination-unreachable counter comment \"unreachable\"; }
    chain served { type filter hook postrouting priority 0; udp dport 5353 counter comment \"served\"; udp dport 53 ip daddr 172.30.0.0/16 counter comment \"missed\"; }
}";

fn objects(endpoints: usize) -> Vec<Value> {
    let endpoints: Vec<Value> =
        (1..=endpoints).map(|n| json!({ "addresses": [format!("10.180.0.{n}")], "nodeName": "test-node" })).collect();
    vec![
        json!({
            "apiVersion": "v1", "kind": "Service", "metadata": { "namespace": "ns1", "name": "flip" },
            "spec": { "clusterIP": "172.30.0.41", "ports": [{ "name": "dns", "port": 53, "protocol": "UDP" }] },
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": { "namespace": "ns1", "name": "flip-a", "labels": { "kubernetes.io/service-name": "flip" } },
            "addressType": "IPv4", "ports": [{ "name": "dns", "port": 5353, "protocol": "UDP" }], "endpoints": endpoints,
        }),
    ]
}

/// Sends datagrams, each from another source port, so that each is a new connection.
fn load(
    path: PathBuf,
    source: IpAddr,
    to: SocketAddr,
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU64>,
) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        netns::enter(&path);
        let to = nix::sys::socket::SockaddrStorage::from(to);
        while !stop.load(Ordering::Relaxed) {
            for _ in 0..100 {
                let socket = Socket::new(Domain::IPV4, Type::DGRAM, None).unwrap();
                socket.bind(&SockAddr::from(SocketAddr::new(source, 0))).unwrap();
                if sendto(socket.as_raw_fd(), b"x", &to, MsgFlags::empty()).is_ok() {
                    sent.fetch_add(1, Ordering::Relaxed);
                }
            }
            // The kernel here shares two cores with everything else; flows of the last second must fit its table.
            std::thread::sleep(Duration::from_millis(1));
        }
    })
}

/// Packets that the rule with this comment counted.
fn counter(node: &Netns, comment: &str) -> u64 {
    let text = node.output(&["nft", "list", "table", "ip", "watch"]).unwrap();
    let line = text
        .lines()
        .find(|l| l.contains(&format!("\"{comment}\"")))
        .unwrap_or_else(|| panic!("no rule {comment}: {text}"));
    line.split("packets ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap().parse().unwrap()
}

#[test]
fn no_packet_misses_while_endpoints_come_and_go_under_load() {
    if let Some(why) = netns::missing() {
        println!("SKIP {why}");
        return;
    }
    tandem_binary().unwrap();
    let flips: usize = std::env::var("TANDEM_TEST_FLIPS").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
    let pod = (1..=8).map(|n| format!("10.180.0.{n}")).collect::<Vec<_>>().join(" ");
    let text =
        format!("x\n-- world --\npod ep {pod}\n-- probes --\nP1 | pod -> udp 172.30.0.41:53 | 10.180.0.1:5353\n");
    let scenario = scenario::parse("shrink", &text).unwrap();
    let world = World::new(scenario.world.clone(), &[1].into()).unwrap();
    // Endpoints swallow what they get: only the node's own errors count.
    let swallow = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(
        swallow.path(),
        "table ip t { chain i { type filter hook input priority 0; udp dport 5353 drop; }; }",
    )
    .unwrap();
    world.netns("ep").unwrap().output(&["nft", "-f", swallow.path().to_str().unwrap()]).unwrap();
    world.node.sysctl(&[("net/netfilter/nf_conntrack_udp_timeout", "1")]).unwrap();
    let watch = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(watch.path(), WATCH).unwrap();
    world.node.output(&["nft", "-f", watch.path().to_str().unwrap()]).unwrap();

    let mut flags = scenario.configs[0].1.clone();
    flags.push("--min-sync-period=1ms".into());
    let mut tandem = TandemAgent::new(&flags).unwrap();
    let mut all = Objects::default();
    scenario.common_objects().into_iter().for_each(|o| all.put(o));
    objects(8).into_iter().for_each(|o| all.put(o));
    tandem.sync(&world.node, &all).unwrap();

    let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let client = world.netns("pod").unwrap();
    let threads: Vec<_> = (0..2)
        .map(|_| {
            load(
                client.path(),
                "10.0.0.2".parse().unwrap(),
                "172.30.0.41:53".parse().unwrap(),
                stop.clone(),
                sent.clone(),
            )
        })
        .collect();
    let start = Instant::now();
    for flip in 0..flips {
        let n = [1, 8, 3, 5, 2, 7][flip % 6];
        objects(n).into_iter().for_each(|o| all.put(o));
        tandem.write(&all).unwrap();
        eventually(&format!("flip {flip}: {n} endpoints"), Duration::from_secs(10), || {
            let map = world.node.output(&["nft", "list", "map", "ip", "tandem", "service-ips"]).ok()?;
            map.contains(&format!("goto endpoints-{n} "))
                .then_some(())
                .or_else(|| map.contains(&format!("goto endpoints-{n},")).then_some(()))
        })
        .unwrap_or_else(|e| panic!("{e:#}\n{}", tandem.log_tail()));
    }
    let elapsed = start.elapsed();
    stop.store(true, Ordering::Relaxed);
    threads.into_iter().for_each(|t| t.join().unwrap());
    let (unreachable, missed, served) =
        (counter(&world.node, "unreachable"), counter(&world.node, "missed"), counter(&world.node, "served"));
    let sent = sent.load(Ordering::Relaxed);
    println!("{flips} flips in {elapsed:.1?}, {sent} packets sent, {served} served");
    assert_eq!((unreachable, missed), (0, 0), "of {sent} packets, {served} served");
    assert!(served > sent / 2 && served > 1000, "{served} of {sent} packets arrived: the load was no load");
    tandem.finish(&world.node).unwrap();
}
