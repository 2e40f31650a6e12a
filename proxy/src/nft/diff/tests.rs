//! Against a kernel in memory that refuses what the real one refuses, with random rulesets.

use super::*;
use crate::nft::expr::Load;
use crate::nft::fake::FakeKernel;
use crate::nft::object::{BaseChain, Bytes, ChainType, Field, Hook, Rule, TableId};
use proptest::prelude::*;
use proxy_common::IpFamily;

fn chain_name(n: u8) -> Name {
    format!("chain-{n}").into()
}

fn set_name(n: u8) -> Name {
    format!("set-{n}").into()
}

fn address(n: u8) -> Bytes {
    [10, 0, 0, n].into()
}

type SetSeed = (u8, Vec<(u8, u8)>, bool);

/// What a random ruleset is made of; `build` leaves out what would not be valid.
#[derive(Clone, Debug)]
struct Seed {
    /// Kind (0 absent, 1 and 2 regular, 3… base chains) and rules (kind, number) of each chain.
    chains: Vec<(u8, Vec<(u8, u8)>)>,
    /// Kind, elements (key, data) and `delete_late` of each set.
    sets: Vec<SetSeed>,
}

pub(crate) fn seeds() -> impl Strategy<Value = Ruleset> {
    let chains = prop::collection::vec((0..6u8, prop::collection::vec((0..6u8, 0..6u8), 0..4)), 6);
    let sets = prop::collection::vec((0..7u8, prop::collection::vec((0..6u8, 0..6u8), 0..6), any::<bool>()), 6);
    (chains, sets).prop_map(|(chains, sets)| build(&Seed { chains, sets }))
}

fn build(seed: &Seed) -> Ruleset {
    let mut ruleset = Ruleset {
        table: TableId { family: IpFamily::V4, name: "t".into() },
        comment: None,
        chains: BTreeMap::new(),
        sets: BTreeMap::new(),
        elements: BTreeMap::new(),
    };
    let regular = |n: u8| seed.chains.get(usize::from(n)).is_some_and(|(kind, _)| (1..3).contains(kind));
    for (number, (kind, elements, delete_late)) in seed.sets.iter().enumerate() {
        let data = match kind {
            3 => Some(MapData::Verdict),
            4 => Some(MapData::Value(vec![Field::Address])),
            _ => None,
        };
        let set = Set {
            key: vec![Field::Address],
            data: data.clone(),
            interval: *kind == 2,
            dynamic_timeout_ms: (*kind > 4).then(|| u64::from(*kind) * 1000),
            size: (*kind > 4).then_some(1000),
            comment: None,
            delete_late: *delete_late && *kind < 5,
        };
        if *kind == 0 {
            continue;
        }
        let name = set_name(number as u8);
        for (key, n) in elements {
            let data = match &data {
                None => None,
                Some(MapData::Value(_)) => Some(Data::Value(address(*n))),
                Some(MapData::Verdict) if regular(*n) => Some(Data::Verdict(Verdict::Goto(chain_name(*n)))),
                Some(MapData::Verdict) => Some(Data::Verdict(Verdict::Drop)),
            };
            let key = match kind {
                // Ranges of different lengths that do not overlap with each other, but with those of another ruleset.
                2 => Key::range(address(key * 10), address(key * 10 + n)),
                5.. => continue,
                _ => Key::single(address(*key)),
            };
            let elements = ruleset.elements.entry(name.clone()).or_default();
            if !elements.keys().any(|other| other.start == key.start) {
                elements.insert(key, Value { data, comment: None, expires_ms: None });
            }
        }
        ruleset.sets.insert(name, set);
    }
    for (number, (kind, rules)) in seed.chains.iter().enumerate() {
        let base = |hook, priority| Some(BaseChain { chain_type: ChainType::Filter, hook, priority });
        let base = match kind {
            0 => continue,
            1 | 2 => None,
            3 => base(Hook::Input, 0),
            4 => base(Hook::Input, 1),
            _ => base(Hook::Output, 0),
        };
        let rules = rules.iter().filter_map(|(kind, n)| {
            let loads = vec![Load::SourceAddress];
            let set = ruleset.sets.get(&set_name(*n));
            let data = set.and_then(|set| set.data.as_ref());
            let expr = match kind {
                // No loops: only towards higher numbers.
                0 | 1 if regular(*n) && usize::from(*n) > number => Expr::Verdict(Verdict::Jump(chain_name(*n))),
                2 | 3 if data == Some(&MapData::Verdict) => Expr::VerdictMap { loads, map: set_name(*n) },
                2 | 3 if set.is_some_and(|set| set.dynamic_timeout_ms.is_some()) => Expr::UpdateSet(set_name(*n)),
                2 | 3 if set.is_some() && data.is_none() => {
                    Expr::InSet { loads, set: set_name(*n), negate: *kind == 3 }
                }
                4 => Expr::Counter,
                5 => Expr::MarkSet(u32::from(*n) + 1),
                _ => return None,
            };
            Some(Rule { exprs: vec![expr], comment: None })
        });
        let rules = rules.collect();
        ruleset.chains.insert(chain_name(number as u8), Chain { base, comment: None, rules });
    }
    // A verdict map towards a chain from which the map is used would be a loop for the kernel.
    let users: Vec<(u8, Name)> = ruleset
        .chains
        .iter()
        .flat_map(|(name, chain)| chain.rules.iter().flat_map(|rule| &rule.exprs).map(move |expr| (name, expr)))
        .filter_map(|(name, expr)| match expr {
            Expr::VerdictMap { map, .. } => Some((name.trim_start_matches("chain-").parse().ok()?, map.clone())),
            _ => None,
        })
        .collect();
    for (user, map) in users {
        for value in ruleset.elements.get_mut(&map).into_iter().flat_map(BTreeMap::values_mut) {
            if let Some(Data::Verdict(Verdict::Goto(target))) = &value.data
                && target.trim_start_matches("chain-").parse::<u8>().is_ok_and(|target| target <= user)
            {
                value.data = Some(Data::Verdict(Verdict::Drop));
            }
        }
    }
    ruleset
}

/// As the kernel reports it.
pub(crate) fn as_read(ruleset: &Ruleset) -> Ruleset {
    let mut ruleset = ruleset.clone();
    ruleset.sets.values_mut().for_each(|set| set.delete_late = false);
    ruleset
}

fn fake_of(ruleset: &Ruleset) -> FakeKernel {
    let mut fake = FakeKernel::new(ruleset.table.clone());
    let Difference { now, late } = diff(None, ruleset);
    assert!(late.is_empty());
    fake.commit(&now.steps).unwrap();
    fake
}

fn read(fake: &FakeKernel) -> Ruleset {
    as_read(fake.ruleset().unwrap())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn now_then_late_makes_what_is_wanted(have in seeds(), want in seeds()) {
        let mut fake = fake_of(&have);
        prop_assert_eq!(read(&fake), as_read(&have));
        let Difference { now, late } = diff(fake.ruleset(), &want);
        fake.commit(&now.steps).map_err(|refusal| TestCaseError::fail(format!("now: {refusal} of {now:#?}")))?;

        // What is left to do after `now` is `late`.
        let again = diff(fake.ruleset(), &want);
        prop_assert!(again.now.is_empty(), "{:?}", again.now);
        prop_assert_eq!(&again.late, &late);

        fake.commit(&late.steps).map_err(|refusal| TestCaseError::fail(format!("late: {refusal} of {late:#?}")))?;
        prop_assert_eq!(read(&fake), as_read(&want));
        let none = diff(fake.ruleset(), &want);
        prop_assert!(none.now.is_empty() && none.late.is_empty());
    }
}

#[test]
fn a_changed_slot_is_two_operations() {
    let name: Name = "slots".into();
    let slots = |changed: u8| {
        let mut ruleset = build(&Seed { chains: vec![], sets: vec![] });
        let set = Set {
            key: vec![Field::Address],
            data: Some(MapData::Value(vec![Field::Address])),
            interval: false,
            dynamic_timeout_ms: None,
            size: None,
            comment: None,
            delete_late: true,
        };
        ruleset.sets.insert(name.clone(), set);
        let element = |n: u8| {
            (
                Key::single(address(n)),
                Value { data: Some(Data::Value(address(if n == 7 { changed } else { n }))), ..Value::default() },
            )
        };
        ruleset.elements.insert(name.clone(), (0..100).map(element).collect());
        ruleset
    };
    let Difference { now, late } = diff(Some(&slots(7)), &slots(8));
    let ops: Vec<Op> = now.steps.into_iter().map(|step| step.op).collect();
    let element = (Key::single(address(7)), Value { data: Some(Data::Value(address(8))), ..Value::default() });
    assert_eq!(
        ops,
        [
            Op::DeleteElements { set: name.clone(), keys: vec![element.0.clone()] },
            Op::AddElements { set: name, elements: vec![element] },
        ]
    );
    assert!(late.is_empty());
}

#[test]
fn slots_that_go_are_deleted_late() {
    let mut have = build(&Seed { chains: vec![], sets: vec![(4, vec![(1, 1), (2, 2)], true)] });
    let want = build(&Seed { chains: vec![], sets: vec![(4, vec![(1, 1)], true)] });
    have.sets.values_mut().for_each(|set| set.delete_late = false);
    let Difference { now, late } = diff(Some(&have), &want);
    assert!(now.is_empty());
    assert_eq!(late.steps.len(), 1);
    assert_eq!(late.steps[0].op, Op::DeleteElements { set: set_name(0), keys: vec![Key::single(address(2))] });
}

#[test]
fn elements_of_dynamic_sets_are_left_alone() {
    let want = build(&Seed { chains: vec![], sets: vec![(5, vec![], false)] });
    let mut have = want.clone();
    have.elements
        .insert(set_name(0), [(Key::single(address(1)), Value { expires_ms: Some(5), ..Value::default() })].into());
    let Difference { now, late } = diff(Some(&have), &want);
    assert!(now.is_empty() && late.is_empty());
}

#[test]
fn comments_alone_are_no_difference() {
    let have = build(&Seed { chains: vec![(1, vec![])], sets: vec![(1, vec![(1, 1)], false)] });
    let mut want = have.clone();
    want.comment = Some("x".to_owned());
    want.chains.values_mut().for_each(|chain| chain.comment = Some("x".to_owned()));
    want.sets.values_mut().for_each(|set| set.comment = Some("x".to_owned()));
    want.elements.values_mut().flat_map(BTreeMap::values_mut).for_each(|value| value.comment = Some("x".to_owned()));
    let Difference { now, late } = diff(Some(&have), &want);
    assert!(now.is_empty() && late.is_empty());
}

#[test]
fn a_dynamic_set_without_a_size_has_the_kernel_s() {
    let want = build(&Seed { chains: vec![], sets: vec![(5, vec![], false)] });
    let with = |size| {
        let mut ruleset = want.clone();
        ruleset.sets.values_mut().for_each(|set| set.size = size);
        ruleset
    };
    assert!(diff(Some(&with(Some(0xffff))), &with(None)).now.is_empty());
    assert!(!diff(Some(&with(Some(0xffff))), &with(Some(5))).now.is_empty());
}
