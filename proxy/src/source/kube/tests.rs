//! The watchers against a scripted API server: the faults that a real one cannot be made to show.

mod encode;
mod server;

use super::*;
use crate::model::ObjectName;
use serde_json::{Value, json};
use server::{CIDRS, Fault, NODES, SERVICES, SLICES, Server};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(10);

fn service(name: &str, ip: &str) -> Value {
    json!({"metadata": {"namespace": "default", "name": name}, "spec": {"clusterIP": ip, "ports": [{"port": 80}]}})
}

fn slice(name: &str, address: &str) -> Value {
    json!({
        "metadata": {"namespace": "default", "name": name, "labels": {"kubernetes.io/service-name": "web"}}, "addressType": "IPv4",
        "ports": [{"name": "", "port": 80}], "endpoints": [{"addresses": [address]}]
    })
}

fn node(zone: &str, heartbeat: u32) -> Value {
    json!({
        "metadata": {"name": "node-1", "labels": {"topology.kubernetes.io/zone": zone}, "annotations": {"beat": heartbeat.to_string()}},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}
    })
}

fn line(delta: &Delta) -> String {
    match delta {
        Delta::Service(s) => format!("+{} {}", s.name.name, s.cluster_ips[0]),
        Delta::ServiceGone(name) => format!("-{}", name.name),
        Delta::Slice(s) => format!("+{} {}", s.name.name, s.endpoints[0].address),
        Delta::SliceGone(name) => format!("-{}", name.name),
        Delta::Node(node) => format!("+node {}", node.zone.as_deref().unwrap_or("none")),
        Delta::NodeGone => "-node".to_owned(),
        Delta::ServiceCidr(name, cidrs) => format!("+{name} {}", cidrs[0]),
        Delta::ServiceCidrGone(name) => format!("-{name}"),
    }
}

struct World {
    server: Server,
    events: mpsc::Receiver<SourceEvent>,
    /// Lines of deltas, `synced`, `error …`, `warning …` that arrived but were not asked for yet.
    pending: Vec<String>,
}

impl World {
    fn start(server: Server) -> Self {
        let (sender, events) = mpsc::channel(64);
        let mut source = KubeSource::new(server.client(), "node-1");
        source.pace =
            Pace { max_delay: Duration::from_millis(20), absent_delay: Duration::from_millis(200), ..Pace::default() };
        tokio::spawn(source.run(sender));
        Self { server, events, pending: Vec::new() }
    }

    /// With service `web`, slice `web-1`, the node and a ServiceCIDR, after `Synced`.
    async fn synced() -> Self {
        Self::synced_with(Server::new()).await
    }

    async fn synced_with(server: Server) -> Self {
        server.put(SERVICES, service("web", "10.96.0.1"));
        server.put(SLICES, slice("web-1", "10.244.0.1"));
        server.put(NODES, node("zone-a", 1));
        server.put(CIDRS, json!({"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/12"]}}));
        let mut world = Self::start(server);
        world
            .expect(&["+kubernetes 10.96.0.0/12", "+node zone-a", "+web 10.96.0.1", "+web-1 10.244.0.1", "synced"])
            .await;
        // Every watch is open, so that what a test does next is told by it.
        for kind in [SERVICES, SLICES, NODES, CIDRS] {
            world.server.wait(|state| state.open(kind) == 1).await;
        }
        world
    }

    async fn next(&mut self) {
        let event = tokio::time::timeout(PATIENCE, self.events.recv())
            .await
            .expect("an event in time")
            .expect("the source runs");
        self.keep(event);
    }

    fn keep(&mut self, event: SourceEvent) {
        match event {
            SourceEvent::Deltas(deltas) => self.pending.extend(deltas.iter().map(line)),
            SourceEvent::Synced => self.pending.push("synced".to_owned()),
            SourceEvent::Problem(problem) => self.pending.push(problem.to_string()),
        }
    }

    /// Exactly these lines, in any order; a line that ends with `…` is a beginning.
    async fn expect(&mut self, expected: &[&str]) {
        while self.pending.len() < expected.len() {
            self.next().await;
        }
        let matches = |line: &String, expected: &str| match expected.strip_suffix('…') {
            Some(beginning) => line.starts_with(beginning),
            None => line == expected,
        };
        for expected in expected {
            let Some(index) = self.pending.iter().position(|line| matches(line, expected)) else {
                panic!("expected {expected:?}, got {:#?}", self.pending);
            };
            self.pending.remove(index);
        }
        assert_eq!(self.pending, Vec::<String>::new(), "more than expected");
    }

    async fn quiet(&mut self) {
        while let Ok(event) = tokio::time::timeout(Duration::from_millis(300), self.events.recv()).await {
            self.keep(event.expect("the source runs"));
        }
        assert_eq!(self.pending, Vec::<String>::new(), "nothing expected");
    }
}

#[tokio::test]
async fn synced_waits_for_both_services_and_slices() {
    let server = Server::new();
    server.put(SERVICES, service("web", "10.96.0.1"));
    server.put(NODES, node("zone-a", 1));
    server.fault(SLICES, Some(Fault::Hang));
    let mut world = World::start(server);
    world.expect(&["+web 10.96.0.1", "+node zone-a"]).await;
    world.quiet().await;
    world.server.fault(SLICES, None);
    world.expect(&["synced"]).await;
}

#[tokio::test]
async fn changes_arrive_one_by_one_and_heartbeats_do_not() {
    let mut world = World::synced().await;
    world.server.put(SERVICES, service("db", "10.96.0.2"));
    world.expect(&["+db 10.96.0.2"]).await;
    world.server.put(SLICES, slice("web-1", "10.244.0.9"));
    world.expect(&["+web-1 10.244.0.9"]).await;
    // Turned headless by a server that does not filter: gone all the same.
    world.server.put(SERVICES, service("db", "None"));
    world.expect(&["-db"]).await;
    world.server.delete(SERVICES, "web");
    world.expect(&["-web"]).await;
    world.server.put(NODES, node("zone-a", 2));
    world.quiet().await;
    world.server.put(NODES, node("zone-b", 3));
    world.expect(&["+node zone-b"]).await;
    world.server.delete(NODES, "node-1");
    world.expect(&["-node"]).await;
    world.server.delete(CIDRS, "kubernetes");
    world.expect(&["-kubernetes"]).await;
}

#[tokio::test]
async fn the_server_is_asked_to_filter() {
    let world = World::synced().await;
    let queries = |kind| world.server.queries(kind);
    for query in queries(SERVICES) {
        assert_eq!(query.get("labelSelector").map(String::as_str), Some("!service.kubernetes.io/service-proxy-name"));
        assert_eq!(query.get("fieldSelector").map(String::as_str), Some("spec.clusterIP!=None"));
    }
    assert!(
        queries(SLICES)
            .iter()
            .all(|q| q.get("labelSelector").map(String::as_str) == Some("!service.kubernetes.io/headless"))
    );
    assert!(queries(NODES).iter().all(|q| q.get("fieldSelector").map(String::as_str) == Some("metadata.name=node-1")));
    let watch = queries(SERVICES).into_iter().find(|q| q.get("watch").is_some_and(|w| w == "true")).expect("a watch");
    assert_eq!(watch.get("allowWatchBookmarks").map(String::as_str), Some("true"));
}

#[tokio::test]
async fn a_dropped_stream_is_resumed_without_a_list() {
    let mut world = World::synced().await;
    let lists = world.server.lists(SERVICES);
    world.server.hold(|state| {
        state.cut(SERVICES);
        state.put(SERVICES, service("db", "10.96.0.2"));
        state.delete(SERVICES, "web");
    });
    world.expect(&["+db 10.96.0.2", "-web"]).await;
    assert_eq!(world.server.lists(SERVICES), lists);
    world.quiet().await;
}

#[tokio::test]
async fn bookmarks_move_the_position() {
    let mut world = World::synced().await;
    world.server.bookmark(SERVICES, 5000);
    world.server.cut(SERVICES);
    world.server.wait(|state| state.watched_from(SERVICES).last() == Some(&5000)).await;
    world.quiet().await;
}

#[tokio::test]
async fn an_outage_keeps_the_state_is_told_once_and_a_list_finds_what_was_missed() {
    for server in servers() {
        survive_outage(server).await;
    }
}

async fn survive_outage(server: Server) {
    let mut world = World::synced_with(server).await;
    world.server.hold(|state| {
        for kind in [SERVICES, SLICES, NODES, CIDRS] {
            state.fault(kind, Some(Fault::Unreachable));
            state.cut(kind);
        }
        state.delete(SERVICES, "web");
        state.put(SERVICES, service("db", "10.96.0.2"));
        state.delete(SLICES, "web-1");
        // The server forgets its history, so that the deletions can only be seen by what the new list lacks.
        state.compact();
    });
    world.expect(&["error: API server: cannot be reached (connection refused, says the script)…"]).await;
    world.quiet().await;
    world.server.hold(|state| [SERVICES, SLICES, NODES, CIDRS].into_iter().for_each(|kind| state.fault(kind, None)));
    world
        .expect(&[
            "-web",
            "+db 10.96.0.2",
            "-web-1",
            "+kubernetes 10.96.0.0/12",
            "warning: API server: can be reached again",
        ])
        .await;
    world.quiet().await;
}

#[tokio::test]
async fn an_expired_position_leads_to_a_list_whichever_way_it_is_told() {
    for at_open in [false, true] {
        let mut world = World::synced().await;
        world.server.hold(|state| {
            state.expire_at_open = at_open;
            state.cut(SERVICES);
            state.delete(SERVICES, "web");
            state.put(SERVICES, service("db", "10.96.0.2"));
            state.compact();
        });
        world.expect(&["-web", "+db 10.96.0.2"]).await;
        world.server.put(SERVICES, service("new", "10.96.0.3"));
        world.expect(&["+new 10.96.0.3"]).await;
        world.quiet().await;
    }
}

#[tokio::test]
async fn a_watch_that_is_refused_again_and_again_is_begun_anew() {
    let mut world = World::synced().await;
    world.server.hold(|state| {
        state.refuse_watches_from = Some(state.version);
        state.cut(SERVICES);
        state.put(SERVICES, service("db", "10.96.0.2"));
    });
    world
        .expect(&[
            "error: API server: refuses Services with status 504…",
            "warning: API server: answers for Services again",
            "+db 10.96.0.2",
            "+web 10.96.0.1",
        ])
        .await;
    world.quiet().await;
}

#[tokio::test]
async fn retry_after_is_honoured() {
    for server in servers() {
        honour_retry_after(server).await;
    }
}

async fn honour_retry_after(server: Server) {
    server.fault(SERVICES, Some(Fault::Status(429, 1)));
    let begin = Instant::now();
    let mut world = World::start(server);
    world
        .expect(&[
            "error: API server: refuses Services with status 429…",
            "warning: Node node-1: metadata.name: there is no such Node yet…",
        ])
        .await;
    world.server.fault(SERVICES, None);
    world.expect(&["synced", "warning: API server: answers for Services again"]).await;
    assert!(begin.elapsed() >= Duration::from_secs(2), "{:?}", begin.elapsed());
}

#[tokio::test]
async fn missing_service_cidrs_are_told_once_and_taken_when_they_appear() {
    let server = Server::new();
    server.put(NODES, node("zone-a", 1));
    server.fault(CIDRS, Some(Fault::Status(404, 0)));
    let mut world = World::start(server);
    world.expect(&["synced", "+node zone-a", "warning: API server: has no networking.k8s.io/v1 ServiceCIDRs…"]).await;
    world.server.wait(|state| state.lists(CIDRS) >= 5).await;
    world.quiet().await;
    world.server.put(CIDRS, json!({"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/12"]}}));
    world.server.fault(CIDRS, None);
    world.expect(&["+kubernetes 10.96.0.0/12", "warning: API server: answers for ServiceCIDRs again"]).await;
}

#[tokio::test]
async fn a_missing_right_is_told_for_its_kind_and_ends_nothing() {
    let server = Server::new();
    server.put(SERVICES, service("web", "10.96.0.1"));
    server.put(NODES, node("zone-a", 1));
    server.fault(SLICES, Some(Fault::Status(403, 0)));
    let mut world = World::start(server);
    world
        .expect(&[
            "+web 10.96.0.1",
            "+node zone-a",
            "error: API server: does not let Tandem list and watch EndpointSlices…",
        ])
        .await;
    world.quiet().await;
    world.server.fault(SLICES, None);
    world.expect(&["synced", "warning: API server: answers for EndpointSlices again"]).await;
}

/// In both encodings of lists: a server that writes protobuf, and one that knows JSON only.
fn servers() -> [Server; 2] {
    [false, true].map(|json_only| {
        let server = Server::new();
        server.hold(|state| state.json_only = json_only);
        server
    })
}

#[tokio::test]
async fn one_undecodable_object_does_not_hide_the_others() {
    for server in servers() {
        hide_nothing(server).await;
    }
}

async fn hide_nothing(server: Server) {
    server.put(NODES, node("zone-a", 1));
    server.put(SERVICES, service("web", "10.96.0.1"));
    server.put(SERVICES, json!({"metadata": {"namespace": "default", "name": "bad"}, "spec": {"clusterIP": "10.96.0.9", "ports": "many"}}));
    let mut world = World::start(server);
    world.expect(&["synced", "+node zone-a", "+web 10.96.0.1", "error: Service default/bad: cannot be decoded…"]).await;
    // In a watch too.
    world.server.put(
        SERVICES,
        json!({"metadata": {"namespace": "default", "name": "worse", "labels": 7}, "spec": {"clusterIP": 7}}),
    );
    world.server.put(SERVICES, service("good", "10.96.0.2"));
    world.expect(&["+good 10.96.0.2", "error: Service default/worse: cannot be decoded…"]).await;
    // Mended.
    world.server.put(SERVICES, service("bad", "10.96.0.9"));
    world.expect(&["+bad 10.96.0.9"]).await;
}

#[tokio::test]
async fn an_undecodable_object_in_a_watch_is_survived_by_a_list() {
    let mut world = World::synced().await;
    world.server.put(SERVICES, json!({"metadata": {"namespace": "default", "name": "bad"}, "spec": {"clusterIP": 7}}));
    world.expect(&["error: Service default/bad: cannot be decoded…", "+web 10.96.0.1"]).await;
    world.server.put(SERVICES, service("good", "10.96.0.2"));
    world.expect(&["+good 10.96.0.2"]).await;
}

#[tokio::test]
async fn problems_of_an_object_are_told_once() {
    let mut world = World::synced().await;
    let mut bad = service("db", "10.96.0.2");
    bad["spec"]["externalIPs"] = json!(["nonsense"]);
    world.server.put(SERVICES, bad.clone());
    world.expect(&["+db 10.96.0.2", "warning: Service default/db: spec.externalIPs[0]…"]).await;
    bad["metadata"]["annotations"] = json!({"a": "b"});
    world.server.put(SERVICES, bad);
    world.expect(&["+db 10.96.0.2"]).await;
    world.quiet().await;
}

#[tokio::test]
async fn a_list_comes_in_pages() {
    for server in servers() {
        read_pages(server).await;
    }
}

async fn read_pages(server: Server) {
    server.put(NODES, node("zone-a", 1));
    for index in 0..1200_u32 {
        server.put(SERVICES, service(&format!("s{index}"), &format!("10.97.{}.{}", index / 250, index % 250 + 1)));
    }
    let (sender, mut events) = mpsc::channel(64);
    let mut source = KubeSource::new(server.client(), "node-1");
    source.pace.page = 500;
    tokio::spawn(source.run(sender));
    let mut names = std::collections::BTreeSet::new();
    loop {
        match tokio::time::timeout(PATIENCE, events.recv()).await.unwrap().unwrap() {
            SourceEvent::Deltas(deltas) => names.extend(deltas.into_iter().filter_map(|delta| match delta {
                Delta::Service(service) => Some(service.name),
                _ => None,
            })),
            SourceEvent::Synced => break,
            SourceEvent::Problem(problem) => panic!("{problem}"),
        }
    }
    assert_eq!(names.len(), 1200);
    assert!(names.contains(&ObjectName::new("default", "s1199")));
    assert_eq!(server.lists(SERVICES), 3);
}

#[tokio::test]
async fn a_server_whose_protobuf_is_garbled_is_asked_for_json() {
    let server = Server::new();
    server.hold(|state| state.garbled = true);
    World::synced_with(server).await;
}

/// Lists come in protobuf, changes in JSON: both must be read as the same.
#[tokio::test]
async fn both_encodings_are_read_as_the_same() {
    let services = [
        service("plain", "10.96.0.1"),
        json!({
            "metadata": {"namespace": "default", "name": "full", "labels": {"a": "b"}},
            "spec": {
                "type": "LoadBalancer", "clusterIP": "10.96.0.2", "clusterIPs": ["10.96.0.2", "fd00::2"], "ipFamilies": ["IPv4", "IPv6"],
                "externalIPs": ["192.0.2.1", "nonsense"], "loadBalancerSourceRanges": ["10.0.0.0/8", "x"],
                "externalTrafficPolicy": "Local", "internalTrafficPolicy": "Local", "healthCheckNodePort": 31000,
                "sessionAffinity": "ClientIP", "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 77}},
                "publishNotReadyAddresses": true, "trafficDistribution": "PreferSameZone", "selector": {"app": "full"},
                "ports": [
                    {"name": "a", "port": 80, "targetPort": "http", "nodePort": 30080},
                    {"name": "b", "port": 53, "protocol": "UDP", "targetPort": 5353},
                    {"name": "c", "port": 99999}
                ]
            },
            "status": {"loadBalancer": {"ingress": [
                {"ip": "198.51.100.1"}, {"ip": "198.51.100.2", "ipMode": "Proxy"}, {"hostname": "lb.example"}, {"ip": "x", "ipMode": "VIP"}
            ]}}
        }),
    ];
    let slices = [
        slice("plain-1", "10.244.0.1"),
        json!({
            "metadata": {"namespace": "default", "name": "full-1", "labels": {"kubernetes.io/service-name": "full", "a": "b"}},
            "addressType": "IPv6", "ports": [{"name": "a", "port": 8080}, {"name": "b", "port": 53, "protocol": "UDP"}, {"port": 1}, {"name": "c"}],
            "endpoints": [
                {"addresses": ["fd00:1::1", "fd00:1::2"], "nodeName": "node-1", "zone": "zone-a", "conditions": {"ready": false, "serving": true, "terminating": true},
                 "hints": {"forZones": [{"name": "zone-a"}, {"name": "zone-b"}], "forNodes": [{"name": "node-1"}]}, "targetRef": {"kind": "Pod", "name": "x"}},
                {"addresses": ["fd00:1::3"], "conditions": {}}, {"addresses": []}, {"addresses": ["10.0.0.1"], "nodeName": ""}
            ]
        }),
    ];
    fn read<K: watch::Watchable>(kind: &str, object: &Value) {
        let mut names = crate::source::convert::Names::default();
        let json = serde_json::from_value::<K>(object.clone()).unwrap().convert(&mut names);
        let bytes = encode::object(kind, object);
        let message = <K::Wire as prost::Message>::decode(&*bytes).unwrap();
        assert_eq!(Into::<K>::into(message).convert(&mut names), json, "{object}");
        assert!(json.0.is_some());
    }
    services.iter().for_each(|object| read::<core::Service>(SERVICES, object));
    slices.iter().for_each(|object| read::<discovery::EndpointSlice>(SLICES, object));
    let mut whole = node("zone-a", 1);
    whole["spec"] = json!({"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24", "fd00:9::/64"], "providerID": "x"});
    [whole, node("", 1)].iter().for_each(|object| read::<core::Node>(NODES, object));
    let cidr = json!({"metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/12", "x"]}});
    read::<networking::ServiceCIDR>(CIDRS, &cidr);
}

#[tokio::test]
async fn the_source_ends_with_its_receiver() {
    let server = Server::new();
    let (sender, events) = mpsc::channel(64);
    let running = tokio::spawn(KubeSource::new(server.client(), "node-1").run(sender));
    drop(events);
    tokio::time::timeout(PATIENCE, running).await.expect("ends in time").unwrap();
}
