use super::*;
use crate::model::{Choice, Oracle, Outcome};
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::collections::BTreeMap;

/// Kinds of outcome among many random packets, with how often each came.
fn outcomes(family: IpFamily) -> BTreeMap<&'static str, u32> {
    let mut runner = TestRunner::deterministic();
    let mut seen = BTreeMap::new();
    for _ in 0..150 {
        let situation = situation(family, 40).new_tree(&mut runner).expect("nothing is filtered").current();
        let oracle = Oracle::new(&situation.table, &situation.settings);
        for packet in situation.packets {
            let kind = match oracle.lookup(&packet.as_packet()) {
                Outcome::Reject => "reject",
                Outcome::Drop => "drop",
                Outcome::NotOurs => "not ours",
                Outcome::Forward { choices, .. } => kind(&choices, &packet),
            };
            *seen.entry(kind).or_default() += 1;
        }
    }
    seen
}

fn kind(choices: &[Choice], packet: &OwnedPacket) -> &'static str {
    let masqueraded = choices.iter().filter(|choice| choice.masquerade).count();
    match (masqueraded, choices.len()) {
        (0, _) => "forward",
        (m, n) if m == n && !choices.iter().any(|choice| choice.backend.address == packet.source) => "masquerade",
        (m, n) if m < n => "masquerade some",
        _ => "masquerade or hairpin",
    }
}

#[test]
fn random_packets_meet_every_kind_of_outcome_often() {
    for family in IpFamily::ALL {
        let seen = outcomes(family);
        for kind in ["reject", "drop", "not ours", "forward", "masquerade", "masquerade some", "masquerade or hairpin"]
        {
            let times = seen.get(kind).copied().unwrap_or(0);
            assert!(times >= 60, "{family}: {kind} came {times} times of 6000: {seen:?}");
        }
    }
}

#[test]
fn random_services_are_valid_in_their_ports() {
    let mut runner = TestRunner::deterministic();
    for _ in 0..300 {
        let ports = service().new_tree(&mut runner).expect("nothing is filtered").current().ports;
        for (i, a) in ports.iter().enumerate() {
            for b in ports[i + 1..].iter().filter(|b| b.protocol == a.protocol) {
                assert!(a.name != b.name && a.port != b.port && (a.node_port == 0 || a.node_port != b.node_port));
            }
        }
    }
}
