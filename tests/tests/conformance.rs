//! A short conformance run, and its controls: the real kube-proxy against itself shows nothing, broken rules show.

use proxy_tests::conformance::mutation::{self, Mutation};
use proxy_tests::conformance::round;
use proxy_tests::conformance::run::Lab;
use proxy_tests::engine::Program;
use proxy_tests::{envtest, netns};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The seed of all but the daily run.
const SEED: u64 = 37;
/// Seeds of the rounds in which mutations must show. The flags of the later ones leave addresses without NodePorts.
const MUTATED: [u64; 3] = [37, 44, 36];

/// One lab at a time: the others would only slow each other down.
static LAB: Mutex<()> = Mutex::new(());

fn lab() -> Option<(MutexGuard<'static, ()>, Lab)> {
    if let Some(why) = netns::missing().or_else(envtest::missing) {
        println!("SKIP {why}");
        return None;
    }
    let alone = LAB.lock().unwrap_or_else(PoisonError::into_inner);
    Some((alone, Lab::start().unwrap()))
}

fn compare(lab: &Lab, subject: Program, seed: u64, number: u32) {
    let report = lab.round(subject, &round(seed, number), &|_| {}).unwrap();
    println!("seed {seed}, round {number}: {report}");
    let differences: Vec<String> = report.differences.iter().map(ToString::to_string).collect();
    assert!(report.is_good(), "seed {seed}, round {number}: {report}\n{}", differences.join("\n"));
}

#[test]
fn kube_proxy_against_itself_shows_no_difference() {
    let Some((_alone, lab)) = lab() else { return };
    compare(&lab, Program::KubeProxy, SEED, 1);
}

#[test]
fn tandem_is_kube_proxys_equal_in_random_states() {
    let Some((_alone, lab)) = lab() else { return };
    compare(&lab, Program::Tandem, SEED, 1);
    compare(&lab, Program::Tandem, SEED, 2);
    // Another one each day, so that the runs of many days see much.
    let day = std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() / 86_400;
    compare(&lab, Program::Tandem, day, 1);
}

#[test]
fn every_kind_of_broken_rule_is_found_out() {
    let Some((_alone, lab)) = lab() else { return };
    let mut found = BTreeMap::new();
    for seed in MUTATED {
        let left: Vec<&'static Mutation> = mutation::ALL.iter().filter(|m| !found.contains_key(m.name)).collect();
        if left.is_empty() {
            break;
        }
        found.extend(lab.mutated(&round(seed, 1), &left, &|_| {}).unwrap());
    }
    found.iter().for_each(|(name, difference)| println!("{name}: {}", difference.probe));
    let missed: Vec<&str> = mutation::ALL.iter().map(|m| m.name).filter(|name| !found.contains_key(name)).collect();
    assert!(missed.is_empty(), "not found out in the first rounds of {MUTATED:?}: {missed:?}");
}
