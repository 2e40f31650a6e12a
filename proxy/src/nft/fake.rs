//! A kernel that is none: applies transactions to a [`Ruleset`] and refuses what nf_tables would refuse.
//!
//! It is stricter where the kernel forgives what is surely a mistake (a rule in a chain that nobody flushed is not noticed by
//! either, but an element whose range overlaps another is). For tests of whatever makes transactions.
#![forbid(unsafe_code)]

use super::expr::Expr;
use super::object::{Chain, Data, Key, MapData, Name, Ruleset, Set, TableId, Value, Verdict};
use super::transaction::{Op, Step};
use std::collections::BTreeMap;

/// Longest name in bytes (`NFT_NAME_MAXLEN` less the final zero).
const LONGEST_NAME: usize = 255;
/// Longest comment in bytes (`NFTNL_UDATA_COMMENT_MAXLEN` less the final zero).
const LONGEST_COMMENT: usize = 127;
/// Longest interface name in bytes (`IFNAMSIZ` less the final zero).
const LONGEST_INTERFACE: usize = 15;

/// Why a transaction was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("step {step} ({op}): {why}")]
pub struct Refusal {
    /// Position in the transaction.
    pub step: usize,
    /// The operation.
    pub op: String,
    /// In words.
    pub why: String,
}

/// One table of the imitated kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FakeKernel {
    table: TableId,
    ruleset: Option<Ruleset>,
}

impl FakeKernel {
    /// A kernel without the table.
    #[must_use]
    pub fn new(table: TableId) -> Self {
        Self { table, ruleset: None }
    }

    /// What it holds.
    #[must_use]
    pub fn ruleset(&self) -> Option<&Ruleset> {
        self.ruleset.as_ref()
    }

    /// Applies a transaction: all of it or nothing.
    ///
    /// # Errors
    /// The first operation that is refused.
    pub fn commit(&mut self, steps: &[Step]) -> Result<(), Refusal> {
        let mut next = self.ruleset.clone();
        for (number, step) in steps.iter().enumerate() {
            self.step(&mut next, &step.op).map_err(|why| Refusal {
                step: number,
                op: format!("{:?}", step.op),
                why,
            })?;
        }
        // Sets without elements have no entry, as in a plan.
        if let Some(ruleset) = &mut next {
            ruleset.elements.retain(|_, elements| !elements.is_empty());
        }
        self.ruleset = next;
        Ok(())
    }

    fn step(&self, ruleset: &mut Option<Ruleset>, op: &Op) -> Result<(), String> {
        match op {
            Op::AddTable { comment } => {
                ruleset.get_or_insert_with(|| Ruleset {
                    table: self.table.clone(),
                    comment: comment.clone(),
                    chains: BTreeMap::new(),
                    sets: BTreeMap::new(),
                    elements: BTreeMap::new(),
                });
                return Ok(());
            }
            Op::DeleteTable(table) if *table == self.table => {
                return ruleset.take().map(drop).ok_or("no such table".to_owned());
            }
            Op::DestroyTable(table) if *table == self.table => {
                *ruleset = None;
                return Ok(());
            }
            // Tables of others are not imitated.
            Op::DeleteTable(_) | Op::DestroyTable(_) => return Ok(()),
            _ => {}
        }
        change(ruleset.as_mut().ok_or("the table does not exist")?, op)
    }
}

fn check(condition: bool, why: &str) -> Result<(), String> {
    condition.then_some(()).ok_or_else(|| why.to_owned())
}

fn check_comment(comment: Option<&String>) -> Result<(), String> {
    check(comment.is_none_or(|comment| comment.len() <= LONGEST_COMMENT), "the comment is too long")
}

fn change(ruleset: &mut Ruleset, op: &Op) -> Result<(), String> {
    match op {
        Op::AddTable { .. } | Op::DeleteTable(_) | Op::DestroyTable(_) => unreachable!("handled by the caller"),
        Op::DeleteRule { .. } => Err("rules have no handles here".to_owned()),
        Op::AddChain { name, base, comment } => {
            check(!name.is_empty() && name.len() <= LONGEST_NAME, "bad length of the name")?;
            check_comment(comment.as_ref())?;
            let chain = ruleset.chains.entry(name.clone()).or_insert_with(|| Chain {
                base: *base,
                comment: comment.clone(),
                rules: Vec::new(),
            });
            check(chain.base == *base, "the chain exists with another hook")
        }
        Op::FlushChain(name) => {
            ruleset.chains.get_mut(name).ok_or("no such chain")?.rules.clear();
            Ok(())
        }
        Op::DeleteChain(name) => {
            check(!is_target(ruleset, name), "something leads to the chain")?;
            let chain = ruleset.chains.remove(name).ok_or("no such chain")?;
            check(chain.rules.is_empty(), "the chain has rules")
        }
        Op::AddRule { chain, rule } => {
            check_comment(rule.comment.as_ref())?;
            for expr in &rule.exprs {
                check_expr(ruleset, expr)?;
            }
            ruleset.chains.get_mut(chain).ok_or("no such chain")?.rules.push(rule.clone());
            Ok(())
        }
        Op::AddSet { name, set } => {
            check(!name.is_empty() && name.len() <= LONGEST_NAME, "bad length of the name")?;
            check_comment(set.comment.as_ref())?;
            let Some(known) = ruleset.sets.get_mut(name) else {
                ruleset.sets.insert(name.clone(), set.clone());
                return Ok(());
            };
            let fixed = |set: &Set| (set.key.clone(), set.data.clone(), set.interval, set.dynamic_timeout_ms.is_some());
            check(fixed(known) == fixed(set), "the set exists with another type")?;
            known.dynamic_timeout_ms = set.dynamic_timeout_ms;
            known.size = set.size;
            Ok(())
        }
        Op::DeleteSet(name) => {
            check(
                !ruleset
                    .chains
                    .values()
                    .flat_map(|chain| &chain.rules)
                    .any(|rule| rule.exprs.iter().any(|expr| uses_set(expr, name))),
                "a rule uses the set",
            )?;
            ruleset.elements.remove(name);
            ruleset.sets.remove(name).map(drop).ok_or("no such set".to_owned())
        }
        Op::FlushSet(name) => {
            check(ruleset.sets.contains_key(name), "no such set")?;
            ruleset.elements.remove(name);
            Ok(())
        }
        Op::AddElements { set, elements } => {
            elements.iter().try_for_each(|(key, value)| add_element(ruleset, set, key, value))
        }
        Op::DeleteElements { set, keys } => {
            check(ruleset.sets.contains_key(set), "no such set")?;
            let held = ruleset.elements.entry(set.clone()).or_default();
            keys.iter()
                .try_for_each(|key| held.remove(key).map(drop).ok_or_else(|| format!("no such element: {key:?}")))
        }
    }
}

fn leads_to(verdict: &Verdict) -> Option<&Name> {
    match verdict {
        Verdict::Jump(chain) | Verdict::Goto(chain) => Some(chain),
        Verdict::Accept | Verdict::Drop | Verdict::Return => None,
    }
}

fn is_target(ruleset: &Ruleset, chain: &Name) -> bool {
    let in_rules = ruleset.chains.values().flat_map(|chain| &chain.rules).flat_map(|rule| &rule.exprs);
    let in_elements = ruleset.elements.values().flat_map(BTreeMap::values);
    in_rules
        .filter_map(|expr| if let Expr::Verdict(verdict) = expr { leads_to(verdict) } else { None })
        .any(|to| to == chain)
        || in_elements
            .filter_map(|value| if let Some(Data::Verdict(verdict)) = &value.data { leads_to(verdict) } else { None })
            .any(|to| to == chain)
}

fn uses_set(expr: &Expr, name: &Name) -> bool {
    match expr {
        Expr::InSet { set, .. } | Expr::UpdateSet(set) => set == name,
        Expr::VerdictMap { map, .. } | Expr::DnatMap { map, .. } => map == name,
        _ => false,
    }
}

fn check_verdict(ruleset: &Ruleset, verdict: &Verdict) -> Result<(), String> {
    let Some(name) = leads_to(verdict) else { return Ok(()) };
    let chain = ruleset.chains.get(name).ok_or_else(|| format!("no such chain: {name}"))?;
    check(chain.base.is_none(), "nothing leads to a base chain")
}

fn check_expr(ruleset: &Ruleset, expr: &Expr) -> Result<(), String> {
    let map = |name: &Name| ruleset.sets.get(name).ok_or_else(|| format!("no such set: {name}"));
    match expr {
        Expr::Verdict(verdict) => check_verdict(ruleset, verdict),
        Expr::InSet { loads, set, .. } => {
            let set = map(set)?;
            check(set.data.is_none(), "a map in place of a set")?;
            check(set.key.len() == loads.len(), "the key has another length")
        }
        Expr::UpdateSet(set) => check(map(set)?.dynamic_timeout_ms.is_some(), "the set is not dynamic"),
        Expr::VerdictMap { loads, map: name } => {
            let map = map(name)?;
            check(map.data == Some(MapData::Verdict), "not a verdict map")?;
            check(map.key.len() == loads.len(), "the key has another length")
        }
        Expr::DnatMap { loads, map: name } => {
            let map = map(name)?;
            check(matches!(map.data, Some(MapData::Value(_))), "not a map of addresses")?;
            check(map.key.len() == loads.len(), "the key has another length")
        }
        Expr::InputInterface { name, .. } => {
            check(!name.is_empty() && name.len() <= LONGEST_INTERFACE, "bad length of the interface name")
        }
        Expr::Foreign(what) => Err(format!("cannot be programmed: {what}")),
        Expr::OneIn(0) => Err("numgen mod 0".to_owned()),
        _ => Ok(()),
    }
}

fn add_element(ruleset: &mut Ruleset, name: &Name, key: &Key, value: &Value) -> Result<(), String> {
    let set = ruleset.sets.get(name).ok_or("no such set")?;
    let fits = match (&set.data, &value.data) {
        (None, None) | (Some(MapData::Value(_)), Some(Data::Value(_))) => true,
        (Some(MapData::Verdict), Some(Data::Verdict(verdict))) => {
            check_verdict(ruleset, verdict)?;
            true
        }
        _ => false,
    };
    check(fits, "the data does not fit the map")?;
    check(set.interval == key.end.is_some(), "ranges belong into interval sets only")?;
    check_comment(value.comment.as_ref())?;
    let fields: Vec<usize> = set.key.iter().map(|field| field.length(ruleset.table.family)).collect();
    let length: usize = fields.iter().sum();
    check(
        std::iter::once(&key.start).chain(&key.end).all(|bytes| bytes.len() == length),
        "the key has another length",
    )?;
    let held = ruleset.elements.entry(name.clone()).or_default();
    if let Some(known) = held.get(key) {
        return check(known.data == value.data, "the element exists with other data");
    }
    if let Some(end) = &key.end {
        let overlaps = |other: &Key| {
            let mut at = 0;
            fields.iter().all(|length| {
                let part = at..at + length;
                at += length;
                let other_end = other.end.as_ref().unwrap_or(&other.start);
                key.start[part.clone()] <= other_end[part.clone()] && other.start[part.clone()] <= end[part]
            })
        };
        check(!held.keys().any(overlaps), "the range overlaps another")?;
    }
    held.insert(key.clone(), value.clone());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nft::object::{BytesBuilder, Field};
    use proxy_common::IpFamily;

    fn element(chain: &str) -> (Key, Value) {
        let key = Key { start: BytesBuilder::new().port(80).build(), end: None };
        (key, Value { data: Some(Data::Verdict(Verdict::Goto(chain.into()))), ..Value::default() })
    }

    fn steps(ops: impl IntoIterator<Item = Op>) -> Vec<Step> {
        ops.into_iter().map(|op| Step { op, service: None }).collect()
    }

    fn kernel() -> FakeKernel {
        let mut kernel = FakeKernel::new(TableId { family: IpFamily::V4, name: "t".into() });
        let set = Set {
            key: vec![Field::Port],
            data: Some(MapData::Verdict),
            interval: false,
            dynamic_timeout_ms: None,
            size: None,
            comment: None,
            delete_late: false,
        };
        let chain = |name: &str| Op::AddChain { name: name.into(), base: None, comment: None };
        kernel
            .commit(&steps([
                Op::AddTable { comment: None },
                chain("a"),
                chain("b"),
                Op::AddSet { name: "m".into(), set },
            ]))
            .unwrap();
        kernel
    }

    fn refused(ops: impl IntoIterator<Item = Op>) -> String {
        let mut kernel = kernel();
        kernel.commit(&steps([Op::AddElements { set: "m".into(), elements: vec![element("a")] }])).unwrap();
        let before = kernel.clone();
        let refusal = kernel.commit(&steps(ops)).unwrap_err();
        assert_eq!(kernel, before, "all or nothing");
        refusal.why
    }

    #[test]
    fn refuses_what_the_kernel_refuses() {
        let (key, _) = element("a");
        let other = Key { start: BytesBuilder::new().port(81).build(), end: None };
        let add = |chain| Op::AddElements { set: "m".into(), elements: vec![element(chain)] };
        assert_eq!(refused([add("b")]), "the element exists with other data");
        assert_eq!(
            refused([Op::DeleteElements { set: "m".into(), keys: vec![key.clone()] }, add("c")]),
            "no such chain: c"
        );
        assert!(refused([Op::DeleteElements { set: "m".into(), keys: vec![other] }]).starts_with("no such element"));
        assert_eq!(refused([Op::DeleteChain("b".into()), Op::DeleteChain("a".into())]), "something leads to the chain");
        assert_eq!(refused([Op::FlushChain("c".into())]), "no such chain");
    }

    #[test]
    fn an_element_can_be_replaced_in_one_transaction() {
        let mut kernel = kernel();
        kernel.commit(&steps([Op::AddElements { set: "m".into(), elements: vec![element("a")] }])).unwrap();
        kernel
            .commit(&steps([
                Op::DeleteElements { set: "m".into(), keys: vec![element("a").0] },
                Op::AddElements { set: "m".into(), elements: vec![element("b")] },
                Op::DeleteChain("a".into()),
            ]))
            .unwrap();
    }
}
