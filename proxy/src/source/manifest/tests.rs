//! Whole files: what is served, what is refused, what stays.

use super::picture::Picture;
use super::*;
use crate::model::{ObjectName, Protocol, Service};

pub(super) fn files(texts: &[(&str, &str)]) -> Vec<FileText> {
    let mut files: Vec<_> =
        texts.iter().map(|(name, text)| FileText { name: (*name).to_owned(), text: Ok((*text).to_owned()) }).collect();
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files
}

fn loaded(texts: &[(&str, &str)]) -> Loaded {
    load(files(texts), "node-1", Node { addresses: vec!["192.0.2.10".parse().unwrap()], ..Node::default() })
}

fn services(deltas: &[Delta]) -> Vec<&Service> {
    deltas.iter().filter_map(|delta| if let Delta::Service(service) = delta { Some(service) } else { None }).collect()
}

/// One line for each delta.
pub(super) fn names(deltas: &[Delta]) -> Vec<String> {
    let mut names: Vec<String> = deltas
        .iter()
        .map(|delta| match delta {
            Delta::Service(s) => format!("+{} {}", s.name, s.cluster_ips[0]),
            Delta::ServiceGone(name) => format!("-{name}"),
            Delta::Slice(s) => format!("+slice {}", s.name),
            Delta::SliceGone(name) => format!("-slice {name}"),
            Delta::Node(node) => format!("+node {}", node.name),
            Delta::NodeGone => "-node".to_owned(),
            Delta::ServiceCidr(name, _) => format!("+cidr {name}"),
            Delta::ServiceCidrGone(name) => format!("-cidr {name}"),
        })
        .collect();
    names.sort();
    names
}

fn messages(problems: &[Problem]) -> Vec<String> {
    problems.iter().map(ToString::to_string).collect()
}

pub(super) fn service(name: &str, ip: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec:\n  clusterIP: {ip}\n  ports: [{{port: 80}}]\n"
    )
}

const WEB: &str = "\
apiVersion: v1
kind: Service
metadata:
  name: web
spec:
  clusterIP: 10.96.0.10
  selector: {app: web}
  ports:
  - port: 80
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: web-1
  labels: {kubernetes.io/service-name: web}
addressType: IPv4
ports:
- port: 8080
endpoints:
- addresses: [10.244.0.5]
  nodeName: node-1
";

#[test]
fn a_service_and_its_slice_are_loaded_with_defaults() {
    let loaded = loaded(&[("web.yaml", WEB)]);
    assert_eq!(messages(&loaded.problems), Vec::<String>::new());
    assert_eq!(names(&loaded.deltas), ["+default/web 10.96.0.10", "+node node-1", "+slice default/web-1"]);
    let web = services(&loaded.deltas)[0];
    assert_eq!((web.ports[0].port, web.ports[0].protocol), (80, Protocol::Tcp));
    let Some(Delta::Slice(slice)) = loaded.deltas.iter().find(|d| matches!(d, Delta::Slice(_))) else {
        panic!("no slice")
    };
    assert_eq!(slice.service, ObjectName::new("default", "web"));
    assert!(slice.endpoints[0].ready && slice.endpoints[0].serving && !slice.endpoints[0].terminating);
    assert_eq!(loaded.counts, BTreeMap::from([(Kind::Service, 1), (Kind::EndpointSlice, 1)]));
}

#[test]
fn lists_and_json_are_read() {
    let list = r#"{"apiVersion": "v1", "kind": "List", "items": [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a", "namespace": "x"}, "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 1}]}},
        {"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": {"name": "kubernetes"}, "spec": {"cidrs": ["10.96.0.0/12"]}}
    ]}"#;
    let typed = "apiVersion: v1\nkind: ServiceList\nitems:\n- metadata: {name: b}\n  spec: {clusterIP: 10.96.0.2, ports: [{port: 1}]}\n";
    let loaded = loaded(&[("list.json", list), ("typed.yml", typed)]);
    assert_eq!(messages(&loaded.problems), Vec::<String>::new());
    assert_eq!(names(&loaded.deltas), ["+cidr kubernetes", "+default/b 10.96.0.2", "+node node-1", "+x/a 10.96.0.1"]);
}

#[test]
fn other_kinds_are_named_once_and_skipped() {
    let deployment = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}\n---\n";
    let text = format!(
        "{deployment}{deployment}apiVersion: v1\nkind: Endpoints\nmetadata: {{name: x}}\n---\n{}",
        service("a", "10.96.0.1")
    );
    let loaded = loaded(&[("all.yaml", &text)]);
    assert_eq!(
        messages(&loaded.problems),
        [
            "warning: all.yaml:1, document 1: kind: objects of kind apps/v1 Deployment are not read (2 skipped)",
            "warning: all.yaml:9, document 3: kind: objects of kind v1 Endpoints are not read (1 skipped); write EndpointSlices instead",
        ]
    );
    assert_eq!(services(&loaded.deltas).len(), 1);
}

#[test]
fn a_broken_document_is_named_and_the_others_are_served() {
    let text = format!("{}---\nkind: [Service\n---\n{}", service("a", "10.96.0.1"), service("b", "10.96.0.2"));
    let loaded = loaded(&[("x.yaml", &text), ("y.yaml", &service("c", "10.96.0.3"))]);
    assert_eq!(services(&loaded.deltas).len(), 3);
    assert_eq!(loaded.problems.len(), 1);
    let problem = &loaded.problems[0];
    assert!(
        problem.error && problem.location.starts_with("x.yaml:") && problem.location.ends_with("document 2"),
        "{problem}"
    );
}

#[test]
fn a_wrong_type_and_an_unknown_field_are_told_with_line_and_path() {
    let text = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec:\n  clusterIP: 10.96.0.1\n  ports:\n  - port: http\n---\n\
                apiVersion: v1\nkind: Service\nmetadata: {name: b}\nspec:\n  clusterIP: 10.96.0.2\n  ports:\n  - port: 80\n    nodeprot: 1\n";
    let loaded = loaded(&[("x.yaml", text)]);
    assert_eq!(names(&loaded.deltas), ["+default/b 10.96.0.2", "+node node-1"]);
    assert_eq!(
        messages(&loaded.problems),
        [
            "error: x.yaml:7, document 1, Service default/a: spec.ports[0].port: invalid type: string \"http\", expected i32; the object is not served",
            "warning: x.yaml:16, document 2, Service default/b: spec.ports[0].nodeprot: unknown field is ignored; did you mean nodePort?",
        ]
    );
}

#[test]
fn objects_without_kind_version_or_name_are_errors() {
    for (text, field, fragment) in [
        ("metadata: {name: a}\n", "kind", "is missing"),
        ("apiVersion: v1\nkind: Service\nspec: {}\n", "metadata.name", "is missing"),
        ("kind: Service\nmetadata: {name: a}\n", "apiVersion", "write v1"),
        (
            "apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\nmetadata: {name: a}\n",
            "apiVersion",
            "write discovery.k8s.io/v1",
        ),
        ("- a\n- b\n", "", "not an object"),
        ("apiVersion: v1\nkind: List\nitems: {a: b}\n", "items", "not a list"),
    ] {
        let loaded = loaded(&[("x.yaml", text)]);
        assert_eq!(loaded.problems.len(), 1, "{text}: {:?}", loaded.problems);
        let problem = &loaded.problems[0];
        assert!(problem.error && problem.field == field && problem.message.contains(fragment), "{text}: {problem}");
    }
    // A Service of another group is not ours.
    let other = loaded(&[("x.yaml", "apiVersion: serving.knative.dev/v1\nkind: Service\nmetadata: {name: a}\n")]);
    assert!(!other.problems[0].error && other.problems[0].message.contains("not read"));
}

#[test]
fn clashing_addresses_and_ports_are_errors_that_name_the_other() {
    let node_port = |name: &str, ip: &str, port: u16, protocol: &str| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec:\n  type: NodePort\n  clusterIP: {ip}\n  \
             ports: [{{port: 80, nodePort: {port}, protocol: {protocol}}}]\n"
        )
    };
    let health = |name: &str, ip: &str, node_port: u16, port: u16| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec:\n  type: LoadBalancer\n  clusterIP: {ip}\n  \
             externalTrafficPolicy: Local\n  healthCheckNodePort: {port}\n  ports: [{{port: 80, nodePort: {node_port}}}]\n\
             status: {{loadBalancer: {{ingress: [{{ip: 192.0.2.80}}]}}}}\n"
        )
    };
    let loaded = loaded(&[
        ("a.yaml", &service("a", "10.96.0.1")),
        ("b.yaml", &service("b", "10.96.0.1")),
        ("c.yaml", &node_port("c", "10.96.0.3", 30001, "TCP")),
        ("d.yaml", &node_port("d", "10.96.0.4", 30001, "TCP")),
        ("e.yaml", &node_port("e", "10.96.0.5", 30001, "UDP")),
        ("f.yaml", &health("f", "10.96.0.6", 30002, 30003)),
        ("g.yaml", &health("g", "10.96.0.7", 30004, 30003)),
        ("h.yaml", &health("h", "10.96.0.8", 30005, 30001)),
        ("i.yaml", &node_port("i", "10.96.0.9", 30003, "TCP")),
    ]);
    assert_eq!(
        names(&loaded.deltas),
        [
            "+default/a 10.96.0.1",
            "+default/c 10.96.0.3",
            "+default/e 10.96.0.5",
            "+default/f 10.96.0.6",
            "+node node-1"
        ]
    );
    assert_eq!(
        messages(&loaded.problems),
        [
            "error: b.yaml:1, document 1, Service default/b: spec.clusterIPs[0]: 10.96.0.1 is already the ClusterIP of Service default/a (a.yaml:1, document 1)",
            "error: d.yaml:1, document 1, Service default/d: spec.ports[0].nodePort: TCP 30001 is already the nodePort of Service default/c (c.yaml:1, document 1)",
            "error: g.yaml:1, document 1, Service default/g: spec.healthCheckNodePort: 30003 is already the healthCheckNodePort of Service default/f (f.yaml:1, document 1)",
            "error: h.yaml:1, document 1, Service default/h: spec.healthCheckNodePort: 30001 is already the nodePort of Service default/c (c.yaml:1, document 1)",
            "error: i.yaml:1, document 1, Service default/i: spec.ports[0].nodePort: 30003 is already the healthCheckNodePort of Service default/f (f.yaml:1, document 1)",
        ]
    );
}

#[test]
fn an_object_defined_twice_counts_once() {
    let loaded = loaded(&[("a.yaml", &service("a", "10.96.0.1")), ("b.yaml", &service("a", "10.96.0.2"))]);
    assert_eq!(names(&loaded.deltas), ["+default/a 10.96.0.1", "+node node-1"]);
    assert_eq!(
        messages(&loaded.problems),
        [
            "error: b.yaml:1, document 1, Service default/a: metadata.name: is also defined at a.yaml:1, document 1; this second definition is not used"
        ]
    );
}

#[test]
fn objects_that_do_not_fit_together_get_warnings() {
    let selector = WEB.split("---").next().unwrap();
    let renamed = WEB.replace("- port: 8080", "- {name: http, port: 8080}");
    let orphan = WEB.split("---\n").nth(1).unwrap();
    for (text, field, fragment) in [
        (selector, "spec.selector", "write the EndpointSlices"),
        (renamed.as_str(), "spec.ports[0].name", "no EndpointSlice of the Service has a TCP port with the name \"\""),
        (orphan, "metadata.labels", "Service default/web is not in the manifests"),
    ] {
        let loaded = loaded(&[("x.yaml", text)]);
        assert_eq!(loaded.problems.len(), 1, "{:?}", loaded.problems);
        let problem = &loaded.problems[0];
        assert!(!problem.error && problem.field == field && problem.message.contains(fragment), "{problem}");
    }
}

#[test]
fn the_own_node_comes_from_its_object_else_from_the_machine() {
    let node = |name: &str| {
        format!(
            "apiVersion: v1\nkind: Node\nmetadata: {{name: {name}, labels: {{topology.kubernetes.io/zone: zone-a}}}}\n\
             spec: {{podCIDRs: [10.244.1.0/24]}}\nstatus: {{addresses: [{{type: InternalIP, address: 192.0.2.1}}]}}\n"
        )
    };
    let ours = loaded(&[("n.yaml", &format!("{}---\n{}", node("node-1"), node("node-2")))]);
    let Delta::Node(facts) = &ours.deltas[0] else { panic!("no node") };
    assert_eq!((&*facts.name, facts.zone.as_deref()), ("node-1", Some("zone-a")));
    assert_eq!(facts.addresses, ["192.0.2.1".parse::<std::net::IpAddr>().unwrap()]);
    assert_eq!(facts.pod_cidrs, ["10.244.1.0/24".parse().unwrap()]);
    assert_eq!(ours.deltas.len(), 1);

    let machine = loaded(&[("n.yaml", &node("node-2"))]);
    let Delta::Node(facts) = &machine.deltas[0] else { panic!("no node") };
    assert_eq!((&*facts.name, facts.zone.as_deref()), ("node-1", None));
    assert_eq!(facts.addresses, ["192.0.2.10".parse::<std::net::IpAddr>().unwrap()]);
    assert!(machine.problems[0].message.contains("--hostname-override"));

    let labels_only = loaded(&[(
        "n.yaml",
        "apiVersion: v1\nkind: Node\nmetadata: {name: node-1, labels: {topology.kubernetes.io/zone: z}}\n",
    )]);
    let Delta::Node(facts) = &labels_only.deltas[0] else { panic!("no node") };
    assert_eq!((facts.zone.as_deref(), facts.addresses.len()), (Some("z"), 1));
}

fn step(picture: &mut Picture, texts: &[(&str, &str)]) -> (Vec<String>, usize) {
    let update = picture.update(files(texts));
    (names(&update.deltas), update.problems.iter().filter(|problem| problem.error).count())
}

#[test]
fn updates_bring_only_the_difference() {
    let mut picture = Picture::new("n", Node::default());
    let (a, b) = (service("a", "10.96.0.1"), service("b", "10.96.0.2"));
    assert_eq!(step(&mut picture, &[("a.yaml", &a)]), (vec!["+default/a 10.96.0.1".into(), "+node n".into()], 0));
    assert_eq!(step(&mut picture, &[("a.yaml", &a)]), (vec![], 0));
    assert_eq!(step(&mut picture, &[("a.yaml", &a), ("b.yaml", &b)]), (vec!["+default/b 10.96.0.2".into()], 0));
    // Comments and another file name change nothing that is served.
    assert_eq!(step(&mut picture, &[("a.yaml", &format!("# note\n{a}")), ("c.yaml", &b)]), (vec![], 0));
    assert_eq!(step(&mut picture, &[("c.yaml", &b)]), (vec!["-default/a".into()], 0));
    // Headless: gone for the proxy.
    assert_eq!(step(&mut picture, &[("c.yaml", &service("b", "None"))]), (vec!["-default/b".into()], 0));
    assert_eq!(step(&mut picture, &[]), (vec![], 0));
}

#[test]
fn a_file_that_breaks_keeps_its_last_good_objects() {
    let mut picture = Picture::new("n", Node::default());
    let (a, b, c) = (service("a", "10.96.0.1"), service("b", "10.96.0.2"), service("c", "10.96.0.3"));
    step(&mut picture, &[("x.yaml", &format!("{a}---\n{b}"))]);
    // Document 2 breaks, document 1 changes, document 3 is new.
    let broken = format!("{}---\nkind: {{\n---\n{c}", service("a", "10.96.0.11"));
    let (deltas, errors) = step(&mut picture, &[("x.yaml", &broken)]);
    assert_eq!((deltas, errors), (vec!["+default/a 10.96.0.11".into(), "+default/c 10.96.0.3".into()], 1));
    // Parses again, without b: now it is gone.
    let (deltas, errors) = step(&mut picture, &[("x.yaml", &format!("{a}---\n{c}"))]);
    assert_eq!((deltas, errors), (vec!["+default/a 10.96.0.1".into(), "-default/b".into()], 0));
    // A file that is not readable at all keeps everything.
    let unreadable = vec![FileText { name: "x.yaml".into(), text: Err("cannot be read: permission denied".into()) }];
    let update = picture.update(unreadable);
    assert_eq!((names(&update.deltas), update.problems.len()), (vec![], 1));
}

#[test]
fn an_object_that_turns_invalid_or_clashing_keeps_its_last_good_version() {
    let mut picture = Picture::new("n", Node::default());
    let (a, b) = (service("a", "10.96.0.1"), service("b", "10.96.0.2"));
    step(&mut picture, &[("a.yaml", &a), ("b.yaml", &b)]);
    assert_eq!(step(&mut picture, &[("a.yaml", &a), ("b.yaml", &service("b", "nonsense"))]), (vec![], 1));
    // b wants a's address: refused, and b keeps what it had.
    assert_eq!(step(&mut picture, &[("a.yaml", &a), ("b.yaml", &service("b", "10.96.0.1"))]), (vec![], 1));
    // a wants b's address: b is served and unchanged, so a keeps its old version.
    assert_eq!(step(&mut picture, &[("a.yaml", &service("a", "10.96.0.2")), ("b.yaml", &b)]), (vec![], 1));
    // Swapped in one step: fine.
    let swapped = step(&mut picture, &[("a.yaml", &service("a", "10.96.0.2")), ("b.yaml", &service("b", "10.96.0.1"))]);
    assert_eq!(swapped, (vec!["+default/a 10.96.0.2".into(), "+default/b 10.96.0.1".into()], 0));
    // A refused object whose old address was given away in the meantime cannot stay.
    let taken = step(&mut picture, &[("a.yaml", &service("a", "nonsense")), ("b.yaml", &service("b", "10.96.0.2"))]);
    assert_eq!(taken, (vec!["+default/b 10.96.0.2".into(), "-default/a".into()], 1));
}
