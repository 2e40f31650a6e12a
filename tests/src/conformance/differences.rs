//! Differences from kube-proxy that are meant: each a named predicate that matches its own case and nothing else.

#![forbid(unsafe_code)]

use super::claims::{Claim, claims};
use super::{Fate, Observation, Probe, Round, State};
use std::collections::BTreeSet;
use std::net::SocketAddr;

/// What a predicate looks at.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// The world and the flags.
    pub round: &'a Round,
    /// The objects.
    pub state: &'a State,
    /// What was sent.
    pub probe: &'a Probe,
    /// What kube-proxy made of it.
    pub kube_proxy: &'a Observation,
    /// What Tandem made of it.
    pub tandem: &'a Observation,
}

/// A difference that is meant.
#[derive(Clone, Copy, Debug)]
pub struct Deliberate {
    /// Its name in reports.
    pub name: &'static str,
    /// Whether a case that differs is this one.
    pub matches: fn(&Case<'_>) -> bool,
}

/// All of them.
pub const DELIBERATE: [Deliberate; 2] = [
    Deliberate { name: "D1 a ClusterIP outranks other claims", matches: cluster_ip_outranks_claims },
    Deliberate { name: "D2 of equal claims the smallest name's stands", matches: smallest_name_stands },
];

/// D1. kube-proxy v1.37: when an external IP or load balancer address of one Service equals the ClusterIP and port of another, the one
/// that it happens to write last gets the traffic. With Tandem nobody takes another's ClusterIP.
///
/// Matches if Tandem reached only endpoints of the Service that has the ClusterIP, and kube-proxy only endpoints of one that
/// claims it.
#[must_use]
pub fn cluster_ip_outranks_claims(case: &Case<'_>) -> bool {
    let claims = claims(&case.state.objects, case.probe.proto, case.probe.to, &BTreeSet::new());
    let (own, others): (Vec<_>, Vec<_>) = claims.iter().partition(|c| c.cluster_ip);
    let [own] = own[..] else { return false };
    took_anothers(case, &own.endpoints, &others)
}

/// D2. kube-proxy v1.37: when two Services claim the same external IP or load balancer address and port, the one that it happens to
/// write last gets the traffic. With Tandem it is the one with the smaller namespace and name, always.
///
/// Matches if Tandem reached only endpoints of the smallest name's Service, kube-proxy only endpoints of another that claims the
/// same, and the address is nobody's ClusterIP.
#[must_use]
pub fn smallest_name_stands(case: &Case<'_>) -> bool {
    let claims = claims(&case.state.objects, case.probe.proto, case.probe.to, &BTreeSet::new());
    let Some(first) = claims.iter().min_by(|a, b| a.service.cmp(&b.service)) else { return false };
    let others: Vec<_> = claims.iter().filter(|c| c.service != first.service).collect();
    claims.iter().all(|c| !c.cluster_ip) && took_anothers(case, &first.endpoints, &others)
}

/// Tandem went to `own` endpoints alone, kube-proxy to those of exactly one of `others` that are not among them.
fn took_anothers(case: &Case<'_>, own: &BTreeSet<SocketAddr>, others: &[&Claim]) -> bool {
    let Some(tandem) = endpoints(case.tandem) else { return false };
    let Some(kube_proxy) = endpoints(case.kube_proxy) else { return false };
    tandem.is_subset(own)
        && kube_proxy.is_disjoint(own)
        && others.iter().any(|other| kube_proxy.is_subset(&other.endpoints))
}

/// The endpoints that were reached; `None` if anything else was seen, too, or nothing.
fn endpoints(seen: &Observation) -> Option<BTreeSet<SocketAddr>> {
    let endpoint = |fate: &Fate| match fate {
        Fate::Served { endpoint, answered: true, .. } => Some(*endpoint),
        _ => None,
    };
    seen.fates().map(endpoint).collect::<Option<BTreeSet<_>>>().filter(|all| !all.is_empty())
}

#[cfg(test)]
mod tests {
    use super::super::{Expected, Judgement, Position, Source, judge, places};
    use super::*;
    use crate::engine::Objects;
    use crate::probe::Proto;
    use serde_json::json;

    /// A Service with one endpoint, `10.0.1.N:8080`.
    fn put(objects: &mut Objects, namespace: &str, n: u8, external: &[&str]) {
        let name = format!("s{n}");
        objects.put(json!({
            "kind": "Service", "metadata": { "namespace": namespace, "name": name },
            "spec": { "clusterIPs": [format!("172.30.0.{n}")], "externalIPs": external, "ports": [{ "port": 80, "protocol": "TCP" }] },
        }));
        objects.put(json!({
            "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": { "namespace": namespace, "name": name, "labels": { "kubernetes.io/service-name": name } },
            "ports": [{ "name": "", "port": 8080, "protocol": "TCP" }],
            "endpoints": [{ "addresses": [format!("10.0.1.{n}")] }],
        }));
    }

    /// What the judge says if kube-proxy went to endpoint `kube_proxy` and Tandem to `tandem`, 0 = dropped.
    fn verdict(objects: &Objects, to: &str, kube_proxy: u8, tandem: u8) -> Option<&'static str> {
        let seen = |n: u8| {
            let mut all = Observation::default();
            let endpoint = SocketAddr::from(([10, 0, 1, n], 8080));
            let fate = Fate::Served { endpoint, source: Source::Kept, answered: true };
            (0..60).for_each(|_| all.count(if n == 0 { Fate::Dropped } else { fate.clone() }));
            all
        };
        let state = State { what: Vec::new(), objects: objects.clone(), probes: Vec::new() };
        let (world, ports, flags) = (places::world(), BTreeSet::new(), Vec::new());
        let round = Round { seed: 0, number: 0, flags, world, ports, states: Vec::new() };
        let probe = Probe {
            id: "p".into(),
            position: Position::Pod,
            party: "pod".into(),
            source: "10.0.0.2".parse().unwrap(),
            proto: Proto::Tcp,
            to: to.parse().unwrap(),
            expected: Expected::Untouched,
            services: Vec::new(),
            sticky: false,
        };
        match judge(&round, &state, &probe, &seen(kube_proxy), &seen(tandem)) {
            Judgement::Deliberate(name) => Some(&name[..2]),
            Judgement::Different(_) => None,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn d1_is_about_anothers_cluster_ip_and_only_in_tandems_favour() {
        let mut objects = Objects::default();
        put(&mut objects, "b", 1, &[]);
        put(&mut objects, "a", 2, &["172.30.0.1"]);
        put(&mut objects, "a", 3, &[]);
        let address = "172.30.0.1:80";
        assert_eq!(verdict(&objects, address, 2, 1), Some("D1"));
        assert_eq!(verdict(&objects, address, 1, 2), None, "Tandem lets another take it");
        assert_eq!(verdict(&objects, address, 3, 1), None, "kube-proxy serves a Service that claims nothing");
        assert_eq!(verdict(&objects, address, 0, 1), None, "kube-proxy drops");
        assert_eq!(verdict(&objects, address, 2, 0), None, "Tandem drops");
        assert_eq!(verdict(&objects, "172.30.0.1:81", 2, 1), None, "another port");
        assert_eq!(verdict(&objects, "172.30.0.3:80", 2, 3), None, "nobody else claims that");
    }

    #[test]
    fn d2_is_about_equal_claims_and_the_smallest_name() {
        let mut objects = Objects::default();
        put(&mut objects, "b", 1, &["198.51.100.1"]);
        put(&mut objects, "a", 2, &["198.51.100.1"]);
        put(&mut objects, "c", 3, &["198.51.100.2"]);
        let address = "198.51.100.1:80";
        assert_eq!(verdict(&objects, address, 1, 2), Some("D2"));
        assert_eq!(verdict(&objects, address, 2, 1), None, "Tandem serves the greater name");
        assert_eq!(verdict(&objects, address, 3, 2), None, "kube-proxy serves a Service that claims nothing");
        assert_eq!(verdict(&objects, address, 0, 2), None, "kube-proxy drops");
        assert_eq!(verdict(&objects, "198.51.100.2:80", 1, 3), None, "only one claims that");
        // Once it is somebody's ClusterIP it is the other case.
        put(&mut objects, "a", 4, &["172.30.0.5"]);
        put(&mut objects, "b", 5, &[]);
        assert_eq!(verdict(&objects, "172.30.0.5:80", 4, 5), Some("D1"));
        assert_eq!(verdict(&objects, "172.30.0.5:80", 5, 4), None);
    }
}
