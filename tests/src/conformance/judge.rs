//! Whether two observations of one probe show the same behaviour.
//!
//! An endpoint is chosen by chance for each connection, so an observation is a sample. That one side saw what the other did
//! not is a difference only when enough tries make it incredible that chance did it.
//!
//! Where a Service remembers its clients, the two sides may have chosen differently, once. There each side must stay with what
//! it chose, and must have chosen an endpoint that the Service has.

#![forbid(unsafe_code)]

use super::claims::claims;
use super::differences::{Case, DELIBERATE};
use super::{Fate, Observation, Probe, Round, Source, State};
use std::collections::BTreeSet;

/// A false alarm must be rarer than this.
const FALSE_ALARM: f64 = 1e-6;
/// Tries that confirm a difference between two outcomes of which one at least is not left to chance, and that a client stays with its
/// endpoint.
const CONFIRMATION: usize = 3;

/// What the judge says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// No difference.
    Same,
    /// Not yet known: both sides need this many tries in all.
    NeedMore {
        /// Tries of each side, the ones made already included.
        tries: usize,
    },
    /// They differ, and this named difference is meant.
    Deliberate(&'static str),
    /// They differ; the text says how.
    Different(String),
}

/// Number of tries after which `n` equally likely endpoints were all seen, but for a probability of `error`.
///
/// A certain endpoint is missed in t tries with (1 − 1/n)^t ≤ e^(−t/n); some endpoint with at most n times that (the union
/// bound of the coupon collector's problem). So t = n · ln(n / error).
#[must_use]
pub fn tries_for(n: usize, error: f64) -> usize {
    if n <= 1 {
        return 1;
    }
    let n = u32::try_from(n).map_or(f64::from(u32::MAX), f64::from);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive, and small")]
    let tries = (n * (n / error).ln()).ceil() as usize;
    tries
}

/// Compares what two proxies made of `probe` in `state`.
#[must_use]
pub fn judge(round: &Round, state: &State, probe: &Probe, kube_proxy: &Observation, tandem: &Observation) -> Judgement {
    let tries = kube_proxy.tries().min(tandem.tries());
    let (needed, how) = if probe.sticky {
        (CONFIRMATION, sticky(round, state, probe, kube_proxy, tandem))
    } else {
        let (left, right) = (kube_proxy.fates().collect(), tandem.fates().collect());
        (needed(&left, &right), (left != right).then(|| "the outcomes differ".to_string()))
    };
    let Some(how) = how else {
        // Of a client that is remembered, one answer says nothing about staying.
        let enough = if probe.sticky { CONFIRMATION.min(probe.first_tries()) } else { 1 };
        return if tries < enough { Judgement::NeedMore { tries: enough } } else { Judgement::Same };
    };
    if tries < needed {
        return Judgement::NeedMore { tries: needed };
    }
    let case = Case { round, state, probe, kube_proxy, tandem };
    if let Some(deliberate) = DELIBERATE.iter().find(|d| (d.matches)(&case)) {
        return Judgement::Deliberate(deliberate.name);
    }
    Judgement::Different(format!(
        "{how}: {probe}: kube-proxy: {kube_proxy}; Tandem: {tandem}; the oracle expects {}",
        probe.expected
    ))
}

/// Tries of each side after which chance does not explain the difference.
fn needed(left: &BTreeSet<&Fate>, right: &BTreeSet<&Fate>) -> usize {
    let chosen = |fates: &BTreeSet<&Fate>| fates.iter().filter(|f| matches!(f, Fate::Served { .. })).count();
    if chosen(left) == 0 || chosen(right) == 0 {
        return CONFIRMATION;
    }
    tries_for(left.union(right).count(), FALSE_ALARM)
}

/// How two observations of a Service with affinity differ, if they do.
fn sticky(
    round: &Round,
    state: &State,
    probe: &Probe,
    kube_proxy: &Observation,
    tandem: &Observation,
) -> Option<String> {
    for (who, seen) in [("kube-proxy", kube_proxy), ("Tandem", tandem)] {
        if seen.fates().count() > 1 {
            return Some(format!("a client of {who} does not stay"));
        }
    }
    // Nothing seen yet is no difference yet.
    let (left, right) = (kube_proxy.fates().next()?, tandem.fates().next()?);
    let (
        Fate::Served { endpoint: a, source: from_a, answered: back_a },
        Fate::Served { endpoint: b, source: from_b, answered: back_b },
    ) = (left, right)
    else {
        return (left != right).then(|| "the outcomes differ".into());
    };
    let local = round.world.local_addresses();
    let claims = claims(&state.objects, probe.proto, probe.to, &local);
    for (who, endpoint) in [("kube-proxy", a), ("Tandem", b)] {
        if !claims.iter().any(|claim| claim.endpoints.contains(endpoint)) {
            return Some(format!("{who} went to {endpoint}, which is no usable endpoint of the Service"));
        }
    }
    if back_a != back_b {
        return Some("answers come back on one side only".into());
    }
    // Whether the source is rewritten depends on the endpoint where that is the client itself, and is not seen where it is the
    // node: then the two can be compared only if they are the same one.
    let special = |at: &std::net::SocketAddr| at.ip() == probe.source || local.contains(&at.ip());
    let comparable = a == b || (!special(a) && !special(b));
    let odd = |source: &Source| matches!(source, Source::Other(_));
    (odd(from_a) || odd(from_b) || (comparable && from_a != from_b)).then(|| "the source addresses differ".into())
}

#[cfg(test)]
mod tests {
    use super::super::chance::Chance;
    use super::super::{Expected, Position, places};
    use super::*;
    use crate::engine::Objects;
    use crate::probe::Proto;
    use serde_json::json;
    use std::net::SocketAddr;

    fn round() -> Round {
        let states = Vec::new();
        Round { seed: 0, number: 0, flags: Vec::new(), world: places::world(), ports: BTreeSet::new(), states }
    }

    fn probe(sticky: bool) -> Probe {
        Probe {
            id: "p".into(),
            position: Position::Outside,
            party: "ext".into(),
            source: "203.0.113.2".parse().unwrap(),
            proto: Proto::Tcp,
            to: "172.30.0.41:80".parse().unwrap(),
            expected: Expected::Served { endpoints: 3, masqueraded: false },
            services: Vec::new(),
            sticky,
        }
    }

    fn at(address: &str, source: Source) -> Fate {
        Fate::Served { endpoint: address.parse().unwrap(), source, answered: true }
    }

    fn remote(n: usize) -> Fate {
        at(&format!("10.0.1.{n}:8080"), Source::Kept)
    }

    fn seen(fates: &[(Fate, usize)]) -> Observation {
        let mut all = Observation::default();
        fates.iter().for_each(|(fate, n)| (0..*n).for_each(|_| all.count(fate.clone())));
        all
    }

    fn state() -> State {
        let mut objects = Objects::default();
        objects.put(json!({
            "kind": "Service", "metadata": { "namespace": "a", "name": "s" },
            "spec": { "clusterIPs": ["172.30.0.41"], "ports": [{ "port": 80, "protocol": "TCP" }] },
        }));
        objects.put(json!({
            "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": { "namespace": "a", "name": "s", "labels": { "kubernetes.io/service-name": "s" } },
            "ports": [{ "name": "", "port": 8080, "protocol": "TCP" }],
            "endpoints": [
                { "addresses": ["10.0.1.1"] }, { "addresses": ["10.0.1.2"] }, { "addresses": ["192.168.0.2"] },
                { "addresses": ["10.0.1.9"], "conditions": { "ready": false } },
            ],
        }));
        State { what: Vec::new(), objects, probes: Vec::new() }
    }

    fn verdict(sticky: bool, left: &[(Fate, usize)], right: &[(Fate, usize)]) -> Judgement {
        judge(&round(), &state(), &probe(sticky), &seen(left), &seen(right))
    }

    #[test]
    fn the_number_of_tries_keeps_the_promised_error_and_is_not_wasteful() {
        for n in 2..=64_u32 {
            let missed = |tries: usize| f64::from(n) * (1.0 - 1.0 / f64::from(n)).powi(i32::try_from(tries).unwrap());
            let tries = tries_for(usize::try_from(n).unwrap(), FALSE_ALARM);
            assert!(missed(tries) <= FALSE_ALARM, "{n}: {tries} tries miss one with {}", missed(tries));
            assert!(missed(tries / 3) > FALSE_ALARM, "{n}: {tries} tries are far too many");
        }
        assert_eq!(tries_for(1, FALSE_ALARM), 1);
    }

    #[test]
    fn equal_choices_are_never_called_different_and_a_missing_endpoint_always_is() {
        let mut chance = Chance::new(5, 0);
        for n in [2, 3, 7, 20] {
            for missing in [0, 1] {
                for _ in 0..60 {
                    let (mut left, mut right) = (Observation::default(), Observation::default());
                    let mut tries = tries_for(n, 0.02);
                    let end = loop {
                        while left.tries() < tries {
                            left.count(remote(1 + chance.below(n)));
                            right.count(remote(1 + chance.below(n - missing)));
                        }
                        match judge(&round(), &state(), &probe(false), &left, &right) {
                            Judgement::NeedMore { tries: more } => {
                                assert!(more > tries, "no progress");
                                tries = more;
                            }
                            other => break other,
                        }
                    };
                    // The sides may have missed the same one at first: that looks the same, rarely.
                    let same = end == Judgement::Same;
                    assert!(missing == 1 || same, "{n}: {end:?}");
                    assert!(missing == 0 || !same || n == 20, "{n}: {end:?}");
                }
            }
        }
    }

    #[test]
    fn what_is_not_left_to_chance_is_confirmed_and_then_different() {
        let (reject, drop) = (Fate::Rejected, Fate::Dropped);
        assert_eq!(verdict(false, &[(drop.clone(), 1)], &[(drop.clone(), 1)]), Judgement::Same);
        assert_eq!(verdict(false, &[(reject.clone(), 2)], &[(drop.clone(), 1)]), Judgement::NeedMore { tries: 3 });
        let different = verdict(false, &[(reject, 3)], &[(drop.clone(), 3)]);
        let Judgement::Different(text) = different else { panic!("{different:?}") };
        assert!(text.contains("rejected (3×)") && text.contains("dropped (3×)"), "{text}");
        assert!(matches!(verdict(false, &[(remote(1), 3)], &[(drop, 3)]), Judgement::Different(_)));
        let masqueraded = at("10.0.1.1:8080", Source::Masqueraded);
        assert!(matches!(verdict(false, &[(remote(1), 40)], &[(masqueraded, 40)]), Judgement::Different(_)));
        assert_eq!(verdict(false, &[], &[]), Judgement::NeedMore { tries: 1 }, "nothing was tried");
    }

    #[test]
    fn with_affinity_each_side_stays_with_an_endpoint_of_its_own() {
        let is_different = |left: &[(Fate, usize)], right: &[(Fate, usize)]| match verdict(true, left, right) {
            Judgement::Different(text) => text,
            other => panic!("{other:?}"),
        };
        assert_eq!(verdict(true, &[(remote(1), 4)], &[(remote(2), 4)]), Judgement::Same);
        assert_eq!(verdict(true, &[(remote(1), 1)], &[(remote(2), 1)]), Judgement::NeedMore { tries: 3 });
        assert!(is_different(&[(remote(1), 4)], &[(remote(1), 2), (remote(2), 2)]).contains("does not stay"));
        assert!(is_different(&[(remote(1), 4)], &[(remote(7), 4)]).contains("no usable endpoint"));
        assert!(is_different(&[(remote(1), 4)], &[(remote(9), 4)]).contains("no usable endpoint"), "not ready");
        assert!(is_different(&[(remote(1), 4)], &[(Fate::Dropped, 4)]).contains("outcomes differ"));
        let masqueraded = at("10.0.1.2:8080", Source::Masqueraded);
        assert!(is_different(&[(remote(1), 4)], &[(masqueraded.clone(), 4)]).contains("source"));
        let host = at("192.168.0.2:8080", Source::Kept);
        assert_eq!(verdict(true, &[(host, 4)], &[(masqueraded, 4)]), Judgement::Same, "M is not seen at the node");
        assert_eq!(verdict(true, &[(Fate::Rejected, 4)], &[(Fate::Rejected, 4)]), Judgement::Same);
    }

    #[test]
    fn the_node_port_of_a_service_with_affinity_is_found_from_the_objects() {
        let mut state = state();
        let service = state.objects.values().find(|o| o["kind"] == "Service").cloned();
        let mut service = service.expect("made above");
        service["spec"]["ports"][0]["nodePort"] = json!(30_001);
        state.objects.put(service);
        let to: SocketAddr = "192.168.0.2:30001".parse().unwrap();
        let probe = Probe { to, ..probe(true) };
        let tries = [(remote(1), 4)];
        assert_eq!(judge(&round(), &state, &probe, &seen(&tries), &seen(&tries)), Judgement::Same);
        let elsewhere = Probe { to: "192.168.0.9:30001".parse().unwrap(), ..probe };
        let verdict = judge(&round(), &state, &elsewhere, &seen(&tries), &seen(&tries));
        assert!(matches!(verdict, Judgement::Different(_)), "{verdict:?}");
    }
}
