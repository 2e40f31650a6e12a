use super::*;
use crate::model::fixtures::{self, port, slice};
use crate::model::strategies::{self, deltas};
use crate::model::{ServicePortView, Settings, resolve};
use proptest::prelude::*;

fn service(name: &str, ports: &[(&str, u16)]) -> Service {
    let ports = ports.iter().map(|&(name, number)| port(name, number, 0)).collect();
    Service { ports, ..fixtures::service(name, &["172.30.0.41"]) }
}

fn names(names: &[&str]) -> BTreeSet<ObjectName> {
    names.iter().map(|name| ObjectName::new("ns1", name)).collect()
}

fn views(table: &ServiceTable, service: &str) -> Vec<ServicePortView> {
    let name = ObjectName::new("ns1", service);
    let service = table.service(&name).expect("the service is in the table");
    resolve(service, &table.slices(&name), table.node(), &Settings::new(IpFamily::V4))
}

/// `ip:port` of the cluster list of the port named `port`.
fn cluster(table: &ServiceTable, service: &str, port: &str) -> Vec<String> {
    let views = views(table, service);
    let view = views.iter().find(|view| &*view.name.port == port).expect("the port exists");
    view.cluster.iter().map(|backend| backend.socket_address().to_string()).collect()
}

fn settled(deltas: impl IntoIterator<Item = Delta>) -> ServiceTable {
    let mut table = ServiceTable::new();
    deltas.into_iter().for_each(|delta| table.apply(delta));
    table.take_changes();
    table
}

#[test]
fn m9_the_same_service_again_is_no_change() {
    let mut table = settled([Delta::Service(service("a", &[("p", 80)]))]);
    table.apply(Delta::Service(service("a", &[("p", 80)])));
    assert!(!table.has_changes());
    assert!(table.take_changes().is_empty());
}

#[test]
fn m10_add_then_delete_before_a_sync_leaves_nothing_pending() {
    let mut table = ServiceTable::new();
    table.apply(Delta::Service(service("a", &[("p", 80)])));
    assert!(table.has_changes());
    table.apply(Delta::ServiceGone(ObjectName::new("ns1", "a")));
    assert!(!table.has_changes());
    assert!(table.take_changes().is_empty());
}

#[test]
fn change_and_back_is_no_change() {
    let mut table = settled([
        Delta::Service(service("a", &[("p", 80)])),
        Delta::Slice(slice("s", "a", &[("p", 80)], &["10.0.0.1"])),
        Delta::ServiceCidr("kubernetes".into(), vec!["172.30.0.0/16".parse().unwrap()]),
    ]);
    table.apply(Delta::Service(service("a", &[("p", 81)])));
    table.apply(Delta::Slice(slice("s", "b", &[("p", 80)], &["10.0.0.1"])));
    table.apply(Delta::ServiceCidrGone("kubernetes".into()));
    table.apply(Delta::Node(Node { name: "n".into(), ..Node::default() }));
    table.apply(Delta::Service(service("a", &[("p", 80)])));
    table.apply(Delta::Slice(slice("s", "a", &[("p", 80)], &["10.0.0.1"])));
    table.apply(Delta::ServiceCidr("other".into(), vec!["172.30.0.0/16".parse().unwrap()]));
    table.apply(Delta::Node(Node::default()));
    assert!(!table.has_changes());
    assert!(table.take_changes().is_empty());
}

#[test]
fn m11_four_services_of_which_one_shrinks_and_three_go() {
    let numbered: Vec<String> = (0..10).map(|n| format!("p{n}")).collect();
    let ports: Vec<(&str, u16)> = numbered.iter().zip(1..).map(|(name, port)| (name.as_str(), port)).collect();
    let mut table = settled(["a", "b", "c", "d"].map(|name| Delta::Service(service(name, &ports))));
    table.apply(Delta::Service(service("a", &ports[..1])));
    for name in ["b", "c", "d"] {
        table.apply(Delta::ServiceGone(ObjectName::new("ns1", name)));
    }
    let changes = table.take_changes();
    assert_eq!(changes.services, names(&["a", "b", "c", "d"]));
    assert!(changes.endpoints.is_empty());
    let left: usize = table.services().map(|service| service.ports.len()).sum();
    assert_eq!(left, 1);
}

#[test]
fn sl2_sl10_two_slices_are_one_list_until_one_goes() {
    let mut table = settled([
        Delta::Service(service("a", &[("p", 80)])),
        Delta::Slice(slice("s1", "a", &[("p", 8080)], &["10.0.0.1", "10.0.0.2"])),
        Delta::Slice(slice("s2", "a", &[("p", 8080)], &["10.0.0.3"])),
    ]);
    assert_eq!(cluster(&table, "a", "p"), ["10.0.0.1:8080", "10.0.0.2:8080", "10.0.0.3:8080"]);
    table.apply(Delta::SliceGone(ObjectName::new("ns1", "s1")));
    assert_eq!(cluster(&table, "a", "p"), ["10.0.0.3:8080"]);
    let changes = table.take_changes();
    assert_eq!((changes.services, changes.endpoints), (names(&["a"]), names(&["a"])));
}

#[test]
fn sl4_a_slice_that_arrives_again_replaces_its_former_self() {
    let mut old = slice("s1", "a", &[("p", 8080)], &["10.0.0.1", "10.0.0.2"]);
    let mut table = settled([Delta::Service(service("a", &[("p", 80)])), Delta::Slice(old.clone())]);
    old.endpoints[0].ready = false;
    table.apply(Delta::Slice(old));
    assert_eq!(cluster(&table, "a", "p"), ["10.0.0.2:8080"]);
}

#[test]
fn sl6_a_slice_of_another_service_or_namespace_has_no_influence() {
    let mut foreign = slice("s2", "a", &[("p", 8080)], &["10.0.0.8"]);
    foreign.name = ObjectName::new("ns2", "s1");
    foreign.service = ObjectName::new("ns2", "a");
    let table = settled([
        Delta::Service(service("a", &[("p", 80)])),
        Delta::Slice(slice("s1", "a", &[("p", 8080)], &["10.0.0.1"])),
        Delta::Slice(slice("s3", "b", &[("p", 8080)], &["10.0.0.9"])),
        Delta::Slice(foreign),
    ]);
    assert_eq!(cluster(&table, "a", "p"), ["10.0.0.1:8080"]);
}

#[test]
fn sl7_an_equal_slice_is_no_change_but_another_order_is() {
    let first = slice("s1", "a", &[("p", 80), ("q", 81)], &["10.0.0.1", "10.0.0.2"]);
    let mut table = settled([Delta::Slice(first.clone())]);
    table.apply(Delta::Slice(first.clone()));
    assert!(!table.has_changes());

    let mut ports = first.clone();
    ports.ports.reverse();
    table.apply(Delta::Slice(ports.clone()));
    assert_eq!(table.take_changes().endpoints, names(&["a"]));

    ports.endpoints.reverse();
    table.apply(Delta::Slice(ports));
    assert_eq!(table.take_changes().endpoints, names(&["a"]));
}

#[test]
fn sl9_deleting_what_was_never_seen_is_no_change() {
    let mut table = ServiceTable::new();
    table.apply(Delta::SliceGone(ObjectName::new("ns1", "s1")));
    table.apply(Delta::ServiceGone(ObjectName::new("ns1", "a")));
    table.apply(Delta::ServiceCidrGone("kubernetes".into()));
    table.apply(Delta::NodeGone);
    assert!(!table.has_changes());
}

#[test]
fn sl11_all_endpoints_not_ready_is_a_change_and_none_is_usable() {
    let mut all = slice("s1", "a", &[("p", 80)], &["10.0.0.1", "10.0.0.2"]);
    let mut table = settled([Delta::Service(service("a", &[("p", 80)])), Delta::Slice(all.clone())]);
    all.endpoints.iter_mut().for_each(|endpoint| endpoint.ready = false);
    table.apply(Delta::Slice(all));
    assert_eq!(table.take_changes().services, names(&["a"]));
    let view = &views(&table, "a")[0];
    assert!(view.cluster.is_empty() && !view.has_endpoints);
    assert_eq!(view.serving.len(), 2, "they are still listed");
}

#[test]
fn sl12_a_renamed_slice_port_moves_the_endpoint_to_the_port_of_that_name() {
    let mut table = settled([
        Delta::Service(service("a", &[("p11", 11), ("p11-2", 12)])),
        Delta::Slice(slice("s1", "a", &[("p11", 11)], &["10.1.1.1"])),
    ]);
    assert_eq!(cluster(&table, "a", "p11"), ["10.1.1.1:11"]);
    table.apply(Delta::Slice(slice("s1", "a", &[("p11-2", 11)], &["10.1.1.1"])));
    assert!(cluster(&table, "a", "p11").is_empty());
    assert_eq!(cluster(&table, "a", "p11-2"), ["10.1.1.1:11"]);
}

#[test]
fn a_slice_whose_owner_changes_leaves_the_old_one_and_both_changed() {
    let mut table = settled([
        Delta::Service(service("a", &[("p", 80)])),
        Delta::Service(service("b", &[("p", 80)])),
        Delta::Slice(slice("s1", "a", &[("p", 80)], &["10.0.0.1"])),
    ]);
    table.apply(Delta::Slice(slice("s1", "b", &[("p", 80)], &["10.0.0.1"])));
    assert!(cluster(&table, "a", "p").is_empty());
    assert_eq!(cluster(&table, "b", "p"), ["10.0.0.1:80"]);
    assert_eq!(table.take_changes().endpoints, names(&["a", "b"]));
}

#[test]
fn slices_that_come_before_their_service_wait_for_it() {
    let mut table = settled([Delta::Slice(slice("s1", "a", &[("p", 80)], &["10.0.0.1"]))]);
    table.apply(Delta::Service(service("a", &[("p", 80)])));
    assert_eq!(cluster(&table, "a", "p"), ["10.0.0.1:80"]);
    assert!(table.take_changes().endpoints.is_empty(), "no slice changed since");
}

#[test]
fn a_cidr_that_two_objects_name_goes_with_the_last_one() {
    let net = |text: &str| text.parse::<IpNet>().unwrap();
    let mut table = settled([Delta::ServiceCidr("one".into(), vec![net("172.30.0.0/16"), net("fd00::/112")])]);
    table.apply(Delta::ServiceCidr("two".into(), vec![net("172.30.0.0/16"), net("10.96.0.0/12")]));
    assert!(table.take_changes().service_cidrs);
    assert_eq!(table.service_cidrs(IpFamily::V4), [net("10.96.0.0/12"), net("172.30.0.0/16")]);
    assert_eq!(table.service_cidrs(IpFamily::V6), [net("fd00::/112")]);

    table.apply(Delta::ServiceCidrGone("one".into()));
    assert!(table.take_changes().service_cidrs);
    assert_eq!(table.service_cidrs(IpFamily::V4), [net("10.96.0.0/12"), net("172.30.0.0/16")]);
    table.apply(Delta::ServiceCidr("three".into(), vec![net("172.30.0.0/16")]));
    assert!(!table.has_changes(), "the union is the same");
}

#[test]
fn only_name_and_zone_of_the_node_affect_every_service() {
    let node = Node { name: "n".into(), zone: None, addresses: vec![], pod_cidrs: vec![] };
    let mut table = settled([Delta::Node(node.clone())]);
    let mut change = |node: &Node| {
        table.apply(Delta::Node(node.clone()));
        let changes = table.take_changes();
        (changes.node, changes.node_addresses)
    };
    assert_eq!(change(&Node { zone: Some("".into()), ..node.clone() }), (false, false), "an empty label is none");
    assert_eq!(change(&Node { zone: Some("zone-a".into()), ..node.clone() }), (true, false));
    assert_eq!(change(&Node { name: "m".into(), zone: Some("zone-a".into()), ..node.clone() }), (true, false));
    assert_eq!(change(&node), (true, false));
    assert_eq!(change(&Node { addresses: vec!["10.0.0.1".parse().unwrap()], ..node.clone() }), (false, true));
    assert_eq!(change(&Node { pod_cidrs: vec!["10.0.0.0/24".parse().unwrap()], ..node.clone() }), (false, true));
}

#[test]
fn the_last_facts_of_a_deleted_node_stay() {
    let node = Node { name: "n".into(), zone: Some("zone-a".into()), addresses: vec![], pod_cidrs: vec![] };
    let mut table = settled([Delta::Node(node.clone())]);
    table.apply(Delta::NodeGone);
    assert!(!table.has_changes());
    assert_eq!(*table.node(), node);
}

/// Which object a change is about: kind and name.
fn object(delta: &Delta) -> (u8, String) {
    match delta {
        Delta::Service(service) => (0, service.name.to_string()),
        Delta::ServiceGone(name) => (0, name.to_string()),
        Delta::Slice(slice) => (1, slice.name.to_string()),
        Delta::SliceGone(name) => (1, name.to_string()),
        Delta::Node(_) | Delta::NodeGone => (2, String::new()),
        Delta::ServiceCidr(name, _) | Delta::ServiceCidrGone(name) => (3, name.to_string()),
    }
}

/// Another interleaving of the same per-object sequences, chosen by `picks`.
fn interleave(deltas: &[Delta], picks: &[usize]) -> Vec<Delta> {
    let mut queues: BTreeMap<(u8, String), std::collections::VecDeque<Delta>> = BTreeMap::new();
    for delta in deltas {
        queues.entry(object(delta)).or_default().push_back(delta.clone());
    }
    let mut mixed = Vec::new();
    let mut picks = picks.iter().cycle();
    while !queues.is_empty() {
        let pick = picks.next().map_or(0, |pick| pick % queues.len());
        let key = queues.keys().nth(pick).cloned().expect("pick is below the number of queues");
        let queue = queues.get_mut(&key).expect("the key was just read");
        mixed.extend(queue.pop_front());
        if queue.is_empty() {
            queues.remove(&key);
        }
    }
    mixed
}

/// Everything that users of a table can see of it.
fn facts(table: &ServiceTable) -> impl PartialEq + std::fmt::Debug + use<> {
    let slices: Vec<Vec<Arc<EndpointSlice>>> = all_names(table).iter().map(|name| table.slices(name)).collect();
    let cidrs: Vec<IpNet> = IpFamily::ALL.into_iter().flat_map(|family| table.service_cidrs(family)).collect();
    (table.services().cloned().collect::<Vec<_>>(), slices, table.node().clone(), cidrs)
}

fn all_names(table: &ServiceTable) -> BTreeSet<ObjectName> {
    table.services.keys().chain(table.slices.keys()).cloned().collect()
}

fn resolved(table: &ServiceTable) -> BTreeMap<ObjectName, Vec<ServicePortView>> {
    let views = |service: &Arc<Service>| {
        let slices = table.slices(&service.name);
        let of = |family| resolve(service, &slices, table.node(), &Settings::new(family));
        (service.name.clone(), IpFamily::ALL.into_iter().flat_map(of).collect())
    };
    table.services().map(views).collect()
}

proptest! {
    #[test]
    fn the_order_of_changes_of_different_objects_does_not_matter(
        deltas in deltas(40),
        picks in proptest::collection::vec(any::<usize>(), 1..40),
    ) {
        let mut one = ServiceTable::new();
        let mut two = ServiceTable::new();
        for delta in interleave(&deltas, &picks) {
            two.apply(delta);
        }
        for delta in deltas {
            one.apply(delta);
        }
        prop_assert_eq!(facts(&one), facts(&two));
        prop_assert_eq!(resolved(&one), resolved(&two));
        prop_assert_eq!(one.take_changes(), two.take_changes());
    }

    #[test]
    fn what_is_not_named_in_the_changes_resolves_as_before(start in strategies::table(25), deltas in deltas(8)) {
        let mut table = start.clone();
        for delta in deltas {
            table.apply(delta);
        }
        let pending = table.has_changes();
        let changes = table.take_changes();
        prop_assert_eq!(pending, !changes.is_empty());
        prop_assert!(!table.has_changes());
        prop_assert!(changes.endpoints.is_subset(&changes.services));
        if !changes.node {
            let (before, after) = (resolved(&start), resolved(&table));
            for name in before.keys().chain(after.keys()).filter(|name| !changes.services.contains(*name)) {
                prop_assert_eq!(before.get(name), after.get(name));
            }
        }
        for name in all_names(&start).union(&all_names(&table)).filter(|name| !changes.endpoints.contains(*name)) {
            prop_assert_eq!(start.slices(name), table.slices(name));
        }
        if !changes.node_addresses {
            prop_assert_eq!(&start.node().addresses, &table.node().addresses);
            prop_assert_eq!(&start.node().pod_cidrs, &table.node().pod_cidrs);
        }
        if !changes.service_cidrs {
            for family in IpFamily::ALL {
                prop_assert_eq!(start.service_cidrs(family), table.service_cidrs(family));
            }
        }
    }
}
