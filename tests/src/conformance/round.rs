//! A whole round from its seed.

#![forbid(unsafe_code)]

use super::chance::Chance;
use super::oracle::View;
use super::{Probe, Round, State, evolve, places, probes, random};
use std::collections::BTreeSet;

/// Probes of all states of a round together.
const PROBES: usize = 160;
/// Probes of the first state at least: what every round needs is among them.
const FIRST: usize = 90;
/// Probes of each further state at least.
const FURTHER: usize = 35;

/// Makes round `number` of the run with `seed`: the same for the same two numbers, on any machine.
#[must_use]
pub fn round(seed: u64, number: u32) -> Round {
    let mut chance = Chance::new(seed, number);
    let flags = flags(&mut chance);
    let world = places::world();
    let count = chance.between(2, 4);
    let mut cluster = random::cluster(&mut chance);
    let mut states: Vec<State> = Vec::new();
    for index in 0..count {
        let what = if index == 0 { Vec::new() } else { evolve::evolve(&mut cluster, &mut chance) };
        let objects = cluster.objects();
        let wanted = if index == 0 { FIRST } else { FURTHER.max((PROBES - FIRST) / (count - 1)) };
        let mut probes = probes::probes(&cluster, &world, wanted, index == 0, &mut chance);
        View::new(&objects, &flags, &world).expect(&mut probes, &world);
        for (n, probe) in probes.iter_mut().enumerate() {
            probe.id = format!("{number}.{}.{}", index + 1, n + 1);
        }
        states.push(State { what, objects, probes });
    }
    let ports = ports(&states);
    Round { seed, number, flags, world, ports, states }
}

/// Ports of all probes and all endpoints.
fn ports(states: &[State]) -> BTreeSet<u16> {
    let probed = states.iter().flat_map(|s| &s.probes).map(|p: &Probe| p.to.port());
    let slices = states.iter().flat_map(|s| s.objects.values()).filter(|o| o["kind"] == "EndpointSlice");
    let served = slices
        .filter_map(|o| o["ports"].as_array())
        .flatten()
        .filter_map(|p| p["port"].as_u64())
        .filter_map(|p| u16::try_from(p).ok());
    probed.chain(served).filter(|port| *port != 0).collect()
}

/// Flags that both proxies take.
fn flags(chance: &mut Chance) -> Vec<String> {
    let mut flags: Vec<&str> = match chance.below(9) {
        // No detector at all.
        0 => vec![],
        1 => vec!["--cluster-cidr=10.0.0.0/16"],
        2 => vec!["--cluster-cidr=fd00:10::/64,10.0.0.0/24"],
        3 => vec!["--detect-local-mode=NodeCIDR"],
        4 => vec!["--detect-local-mode=InterfaceNamePrefix", "--pod-interface-name-prefix=veth"],
        5 => vec!["--detect-local-mode=BridgeInterface", "--pod-bridge-interface=veth1"],
        6 => vec!["--detect-local-mode=ClusterCIDR", "--cluster-cidr=10.0.0.0/8"],
        _ => vec!["--cluster-cidr=10.0.0.0/8,fd00:10::/64"],
    };
    let node_ports = match chance.below(12) {
        0 => "primary",
        1 => "192.168.0.2/32,2001:db8::2/128",
        2 => "192.168.0.0/16,2001:db8::/32",
        // IPv6 is open then.
        3 => "192.168.1.0/24",
        4 => "0.0.0.0/0,::/0",
        // NodePorts answer nowhere.
        5 => "127.0.0.0/8,::1/128",
        6 => "localhost,192.168.1.0/24",
        7 => "primary,192.168.1.2/32",
        8 => "all",
        _ => "",
    };
    let node_ports = format!("--nodeport-addresses={node_ports}");
    if !node_ports.ends_with('=') {
        flags.push(&node_ports);
    }
    if chance.one_in(5) {
        flags.push("--masquerade-all");
    }
    // kube-proxy has no flag for the bit of its nftables mode, and takes this one without using it.
    let bit = format!("--iptables-masquerade-bit={}", chance.pick(&[0, 7, 31]));
    if chance.one_in(3) {
        flags.push(&bit);
    }
    if chance.one_in(10) {
        flags.push("--feature-gates=AllowServiceExternalIPs=false");
    }
    flags.into_iter().map(String::from).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{Class, Coverage, Expected, Fate, Observation, Source};
    use super::*;
    use crate::apiserver::ApiServer;
    use crate::cluster::Cluster;
    use serde_json::Value;
    use std::collections::BTreeMap;

    /// What a proxy that does as the oracle says would show.
    fn as_expected(probe: &Probe) -> Observation {
        let mut seen = Observation::default();
        seen.count(match probe.expected {
            Expected::Served { masqueraded, .. } => Fate::Served {
                endpoint: probe.to,
                source: if masqueraded { Source::Masqueraded } else { Source::Kept },
                answered: true,
            },
            Expected::Rejected => Fate::Rejected,
            Expected::Dropped => Fate::Dropped,
            Expected::Untouched => Fate::Untouched,
        });
        seen
    }

    #[test]
    fn a_round_is_the_same_each_time_and_others_are_not() {
        let text = |seed, number| {
            let round = round(seed, number);
            let manifests: Vec<String> = round.states.iter().map(|s| s.objects.manifests().unwrap()).collect();
            format!("{round:?}{manifests:?}")
        };
        let first = text(42, 3);
        assert_eq!(first, text(42, 3));
        assert_ne!(first, text(42, 4));
        assert_ne!(first, text(43, 3));
    }

    #[test]
    fn every_round_has_enough_probes_of_every_class_by_the_oracle() {
        let mut all = Coverage::default();
        for seed in 0..200 {
            let round = round(seed, 0);
            let mut coverage = Coverage::default();
            let mut ids = BTreeSet::new();
            for probe in round.states.iter().flat_map(|s| &s.probes) {
                coverage.count(probe, &as_expected(probe));
                assert!(ids.insert(&probe.id), "{probe} twice");
                assert!(probe.to.port() == 0 || round.ports.contains(&probe.to.port()));
                assert!(probe.party == "node" || round.world.party(&probe.party).is_some(), "{probe}");
            }
            assert_eq!(coverage.missing(), [], "seed {seed}: {coverage}");
            assert!((100..=260).contains(&coverage.probes()), "seed {seed}: {coverage}");
            assert!((2..=4).contains(&round.states.len()));
            assert!(round.ports.len() < 80, "seed {seed}: {} ports", round.ports.len());
            all.add(&coverage);
        }
        // No class hangs by a thread.
        for class in Class::all() {
            assert!(all.of(class) >= 200 * 2, "{class}: {all}");
        }
    }

    #[test]
    fn everything_that_is_wanted_appears() {
        let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
        for seed in 0..60 {
            let round = round(seed, 7);
            for state in &round.states {
                let services = state.objects.values().filter(|o| o["kind"] == "Service").count();
                assert!((15..=44).contains(&services), "seed {seed}: {services} services");
                for object in state.objects.values() {
                    features(object).for_each(|f| *seen.entry(f).or_default() += 1);
                }
            }
            for word in round.states.iter().flat_map(|s| &s.what) {
                let known = [
                    "is new",
                    "is gone",
                    "turns",
                    "one more port",
                    "one port less",
                    "serves at",
                    "internal policy",
                    "external policy",
                    "source ranges",
                    "affinity",
                    "external IPs",
                    "load balancer addresses",
                    "another proxy",
                    "more endpoints",
                    "loses",
                    "that end",
                    "are ready",
                    "hints",
                    "split",
                    "merged",
                    "the node",
                ];
                let found = known.into_iter().find(|k| word.contains(k)).unwrap_or_else(|| panic!("{word}"));
                *seen.entry(found).or_default() += 1;
            }
        }
        // 34 features and 21 changes, of which two have the same word.
        assert_eq!(seen.len(), 53, "{seen:?}");
    }

    #[test]
    fn the_real_api_server_takes_every_state() {
        if let Some(why) = crate::netns::missing().or_else(crate::envtest::missing) {
            println!("SKIP {why}");
            return;
        }
        let api = ApiServer::start(&crate::envtest::binaries().unwrap()).unwrap();
        for number in 0..4 {
            let mut cluster = Cluster::new(&api);
            for (index, state) in round(2026, number).states.iter().enumerate() {
                if let Err(e) = cluster.apply(&state.objects, false) {
                    panic!("round {number}, state {}, after {:?}: {e:#}", index + 1, state.what);
                }
            }
            cluster.clear().unwrap();
        }
    }

    fn features(object: &Value) -> impl Iterator<Item = &'static str> {
        let has = |pointer: &str| object.pointer(pointer).is_some();
        let is = |pointer: &str, value: &str| object.pointer(pointer).and_then(Value::as_str) == Some(value);
        let any = |pointer: &str, test: &dyn Fn(&Value) -> bool| {
            object.pointer(pointer).and_then(Value::as_array).is_some_and(|all| all.iter().any(test))
        };
        let endpoint = |test: &dyn Fn(&Value) -> bool| any("/endpoints", test);
        let ingress = "/status/loadBalancer/ingress";
        let families = |n: usize, first: &str| {
            object.pointer("/spec/ipFamilies").and_then(Value::as_array).is_some_and(|f| f.len() == n && f[0] == first)
        };
        [
            ("ClusterIP", is("/spec/type", "ClusterIP")),
            ("NodePort", is("/spec/type", "NodePort")),
            ("LoadBalancer", is("/spec/type", "LoadBalancer")),
            ("ExternalName", is("/spec/type", "ExternalName")),
            ("headless", is("/spec/clusterIP", "None")),
            ("VIP", any(ingress, &|i| i["ipMode"] == "VIP")),
            ("Proxy", any(ingress, &|i| i["ipMode"] == "Proxy")),
            ("external IPs", has("/spec/externalIPs")),
            ("single IPv4", families(1, "IPv4")),
            ("single IPv6", families(1, "IPv6")),
            ("IPv4 first", families(2, "IPv4")),
            ("IPv6 first", families(2, "IPv6")),
            ("SCTP", any("/spec/ports", &|p| p["protocol"] == "SCTP")),
            ("internal Local", is("/spec/internalTrafficPolicy", "Local")),
            ("external Local", is("/spec/externalTrafficPolicy", "Local")),
            ("ranges", has("/spec/loadBalancerSourceRanges")),
            ("affinity", has("/spec/sessionAffinityConfig")),
            ("no node ports", object.pointer("/spec/allocateLoadBalancerNodePorts") == Some(&Value::Bool(false))),
            ("health check", has("/spec/healthCheckNodePort")),
            ("other proxy", has("/metadata/labels/service.kubernetes.io~1service-proxy-name")),
            ("headless label", has("/metadata/labels/service.kubernetes.io~1headless")),
            ("not ready addresses", has("/spec/publishNotReadyAddresses")),
            ("distribution", has("/spec/trafficDistribution")),
            ("FQDN", is("/addressType", "FQDN")),
            ("all ports", any("/ports", &|p| p.get("port").is_none())),
            ("no nodeName", endpoint(&|e| e.get("nodeName").is_none())),
            ("no conditions", endpoint(&|e| e.get("conditions").is_none())),
            ("draining", endpoint(&|e| e["conditions"]["terminating"] == true && e["conditions"]["serving"] == true)),
            ("zone hints", endpoint(&|e| e["hints"].get("forZones").is_some())),
            ("node hints", endpoint(&|e| e["hints"].get("forNodes").is_some())),
            ("host network", endpoint(&|e| e["addresses"][0] == "192.168.0.2")),
            ("second address", endpoint(&|e| e["addresses"][1].is_string())),
            ("many", object["endpoints"].as_array().is_some_and(|e| e.len() > 9)),
            ("zone label", is("/metadata/labels/topology.kubernetes.io~1zone", "zone-a")),
        ]
        .into_iter()
        .filter_map(|(name, is)| is.then_some(name))
    }
}
