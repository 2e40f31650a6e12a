//! The watchers of `proxy::source::kube` against the real kube-apiserver, with the rights of kube-proxy.

use anyhow::{Context, Result};
use proxy::model::Delta;
use proxy::source::SourceEvent;
use proxy::source::kube::{ApiServer as Access, KubeSource, connect};
use proxy_tests::apiserver::{ApiServer, User};
use proxy_tests::envtest;
use proxy_tests::netns::{self, Netns};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);

/// Runs the source in `ns`; lines of what it tells.
fn watch(ns: &Netns, kubeconfig: PathBuf) -> Receiver<String> {
    let (lines, received) = channel();
    let mut known = BTreeSet::new();
    follow(ns, kubeconfig, move |event| {
        for line in describe(event) {
            // A list after a restart of the server repeats what is known; the service map takes that as no change.
            if let Some(gone) = line.strip_prefix('-') {
                known.retain(|line: &String| !line.starts_with(&format!("+{gone} ")));
            } else if line.starts_with('+') && !known.insert(line.clone()) {
                continue;
            }
            if lines.send(line).is_err() {
                return false;
            }
        }
        true
    });
    received
}

/// Runs the source in `ns`, while `take` wants more events.
fn follow(ns: &Netns, kubeconfig: PathBuf, mut take: impl FnMut(SourceEvent) -> bool + Send + 'static) {
    let path = ns.path();
    std::thread::spawn(move || {
        netns::enter(&path);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let access = Access { kubeconfig: Some(kubeconfig), master: None };
            let client = connect(&access).await.expect("a client");
            let (sender, mut events) = tokio::sync::mpsc::channel(64);
            let source = KubeSource::new(client, "node-1").run(sender);
            let forward = async { while events.recv().await.is_some_and(&mut take) {} };
            tokio::select! { () = source => {}, () = forward => {} }
        });
    });
}

fn describe(event: SourceEvent) -> Vec<String> {
    match event {
        SourceEvent::Synced => vec!["synced".into()],
        SourceEvent::Problem(problem) => vec![problem.to_string()],
        SourceEvent::Deltas(deltas) => deltas.iter().filter_map(line).collect(),
    }
}

/// The API server brings a Service and slice `default/kubernetes` of its own, and its time of arrival is its own affair.
fn line(delta: &Delta) -> Option<String> {
    let line = match delta {
        Delta::Service(s) => format!("+{} {}", s.name, s.cluster_ips[0]),
        Delta::ServiceGone(name) => format!("-{name}"),
        Delta::Slice(s) => format!("+slice {} {}", s.name, s.endpoints[0].address),
        Delta::SliceGone(name) => format!("-slice {name}"),
        Delta::Node(node) => format!("+node {} {:?}", node.name, node.addresses),
        Delta::NodeGone => "-node".into(),
        Delta::ServiceCidr(name, cidrs) => format!("+cidr {name} {cidrs:?}"),
        Delta::ServiceCidrGone(name) => format!("-cidr {name}"),
    };
    (!line.contains("default/kubernetes")).then_some(line)
}

/// Exactly these lines in any order; `…` stands for any ending.
fn expect(lines: &Receiver<String>, expected: &[&str]) -> Result<()> {
    let mut open: Vec<&str> = expected.to_vec();
    let deadline = Instant::now() + PATIENCE;
    while !open.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        let line = lines.recv_timeout(left).with_context(|| format!("still waiting for {open:?}"))?;
        let index = open.iter().position(|open| match open.strip_suffix('…') {
            Some(beginning) => line.starts_with(beginning),
            None => line == *open,
        });
        open.remove(index.with_context(|| format!("{line:?} came, expected was one of {open:?}"))?);
    }
    Ok(())
}

fn quiet(lines: &Receiver<String>, time: Duration) {
    if let Ok(line) = lines.recv_timeout(time) {
        panic!("expected nothing, got {line:?}");
    }
}

fn service(name: &str, ip: &str, labels: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {"clusterIP": ip, "ports": [{"port": 80, "protocol": "TCP"}]}
    })
}

#[test]
fn the_real_api_server_is_followed_through_changes_and_a_restart() -> Result<()> {
    if let Some(why) = netns::missing().or_else(envtest::missing) {
        println!("SKIP {why}");
        return Ok(());
    }
    let mut server = ApiServer::start(&envtest::binaries()?)?;
    let ns = Netns::new("source")?;
    let _relay = server.reach_from(&ns)?;
    server.apply(&[
        service("web", "172.30.0.10", json!({})),
        service("headless", "None", json!({})),
        service("other", "172.30.0.12", json!({"service.kubernetes.io/service-proxy-name": "other"})),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": "web-1", "namespace": "default", "labels": {"kubernetes.io/service-name": "web"}},
            "addressType": "IPv4", "ports": [{"port": 8080}], "endpoints": [{"addresses": ["10.244.0.5"]}]
        }),
        json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-1"}, "spec": {"podCIDR": "10.244.0.0/24"},
            "status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.10"}]}
        }),
    ])?;
    let lines = watch(&ns, server.kubeconfig(User::Proxy)?);
    expect(
        &lines,
        &[
            "synced",
            "+default/web 172.30.0.10",
            "+slice default/web-1 10.244.0.5",
            "+node node-1 [192.0.2.10]",
            "+cidr kubernetes [172.30.0.0/16, fd00:10:96::/112]",
        ],
    )?;

    server.apply(&[service("db", "172.30.0.11", json!({}))])?;
    expect(&lines, &["+default/db 172.30.0.11"])?;
    // A label hands the Service to another proxy and back: for the filtered watch a deletion and a new object.
    server.apply(&[service("db", "172.30.0.11", json!({"service.kubernetes.io/service-proxy-name": "other"}))])?;
    expect(&lines, &["-default/db"])?;
    server.apply(&[service("db", "172.30.0.11", json!({}))])?;
    expect(&lines, &["+default/db 172.30.0.11"])?;

    server.stop_apiserver();
    expect(&lines, &["error: API server: cannot be reached…"])?;
    quiet(&lines, Duration::from_secs(3));
    server.start_apiserver()?;
    server.delete("Service", Some("default"), "db")?;
    expect(&lines, &["-default/db", "warning: API server: can be reached again"])?;
    server.apply(&[service("new", "172.30.0.13", json!({}))])?;
    expect(&lines, &["+default/new 172.30.0.13"])?;
    quiet(&lines, Duration::from_secs(1));
    Ok(())
}

/// The source reads lists in protobuf and changes in JSON: of the same object both must make the same.
#[test]
fn lists_and_changes_of_the_real_api_server_are_read_as_the_same() -> Result<()> {
    if let Some(why) = netns::missing().or_else(envtest::missing) {
        println!("SKIP {why}");
        return Ok(());
    }
    let server = ApiServer::start(&envtest::binaries()?)?;
    let ns = Netns::new("source-same")?;
    let _relay = server.reach_from(&ns)?;
    let mut objects = [
        service("plain", "172.30.0.10", json!({})),
        json!({
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": "full", "namespace": "default", "labels": {"a": "b"}},
            "spec": {
                "type": "LoadBalancer", "clusterIP": "172.30.0.11", "clusterIPs": ["172.30.0.11", "fd00:10:96::11"],
                "ipFamilies": ["IPv4", "IPv6"], "ipFamilyPolicy": "RequireDualStack", "selector": {"app": "full"},
                "externalIPs": ["192.0.2.1"], "loadBalancerSourceRanges": ["10.0.0.0/8"], "externalTrafficPolicy": "Local",
                "internalTrafficPolicy": "Local", "healthCheckNodePort": 31000, "sessionAffinity": "ClientIP",
                "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 77}}, "publishNotReadyAddresses": true,
                "trafficDistribution": "PreferSameZone",
                "ports": [{"name": "a", "port": 80, "targetPort": "http", "nodePort": 30080}, {"name": "b", "port": 53, "protocol": "UDP"}]
            },
            "status": {"loadBalancer": {"ingress": [{"ip": "198.51.100.1"}, {"ip": "198.51.100.2", "ipMode": "Proxy"}, {"hostname": "lb.example"}]}}
        }),
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": {"name": "full-1", "namespace": "default", "labels": {"kubernetes.io/service-name": "full"}}, "addressType": "IPv4",
            "ports": [{"name": "a", "port": 8080}, {"name": "b", "port": 53, "protocol": "UDP"}, {"name": "all"}],
            "endpoints": [
                {"addresses": ["10.244.0.1"], "nodeName": "node-1", "zone": "zone-a", "conditions": {"ready": false, "serving": true, "terminating": true},
                 "hints": {"forZones": [{"name": "zone-a"}]}, "targetRef": {"kind": "Pod", "namespace": "default", "name": "full-x"}},
                {"addresses": ["10.244.0.2", "10.244.0.3"]}
            ]
        }),
    ];
    server.apply(&objects)?;
    let (events, received) = channel();
    follow(&ns, server.kubeconfig(User::Proxy)?, move |event| events.send(event).is_ok());
    let next = |known: &mut BTreeSet<String>, done: &dyn Fn(&BTreeSet<String>, bool) -> bool| -> Result<()> {
        let mut synced = false;
        while !done(known, synced) {
            match received.recv_timeout(PATIENCE)? {
                SourceEvent::Deltas(deltas) => known.extend(
                    deltas
                        .iter()
                        .filter(|delta| line(delta).is_some_and(|line| line.contains("default/")))
                        .map(|d| format!("{d:#?}")),
                ),
                SourceEvent::Synced => synced = true,
                // The port without a number.
                SourceEvent::Problem(_) => {}
            }
        }
        Ok(())
    };
    let (mut listed, mut changed) = (BTreeSet::new(), BTreeSet::new());
    next(&mut listed, &|_, synced| synced)?;
    assert_eq!(listed.len(), objects.len(), "{listed:#?}");
    for object in &mut objects {
        object["metadata"]["annotations"] = json!({"touched": "yes"});
    }
    server.apply(&objects)?;
    next(&mut changed, &|changed, _| changed.len() == objects.len())?;
    assert_eq!(listed, changed);
    Ok(())
}
