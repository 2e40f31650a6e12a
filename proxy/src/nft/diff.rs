//! From one ruleset to another: the operations that turn what the kernel holds into what is wanted.
#![forbid(unsafe_code)]

use super::expr::Expr;
use super::object::{Chain, Data, Key, MapData, Name, Ruleset, Set, Value, Verdict};
use super::transaction::{Op, Transaction};
use std::collections::{BTreeMap, BTreeSet};

#[cfg(test)]
pub(crate) mod tests;

/// The result of [`diff`]: `now`, and at least one second later `late` (slots, chains and sets that go: a packet in flight may
/// still look them up).
///
/// If something else is committed in between, `late` is void: compare again with what the kernel holds then; `now` of that
/// comparison is empty if nothing else is to be done, and its `late` takes the place of this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// To be committed at once.
    pub now: Transaction,
    /// To be committed at least one second after `now`.
    pub late: Transaction,
}

/// Operations that turn `have` into `want`; `have` is `None` if the table does not exist.
///
/// Comments of tables, chains, sets and elements are not compared, since the kernel cannot change them and no packet sees
/// them. Elements of dynamic sets are not touched. A set or base chain with another definition is deleted and made anew in the
/// same transaction, with all that refers to it.
#[must_use]
pub fn diff(have: Option<&Ruleset>, want: &Ruleset) -> Difference {
    diff_elements(have.cloned(), want, |each| {
        for (set, elements) in &want.elements {
            elements.iter().for_each(|(key, value)| each(set, key.clone(), value.clone()));
        }
    })
}

/// As [`diff`], with the wanted elements given one by one, each key of a set once: `elements` calls its argument with the name of the
/// set, which must be one of `want.sets`. `want.elements` is not looked at. So a large table is in memory once and not twice.
#[must_use]
pub fn diff_elements(
    have: Option<Ruleset>,
    want: &Ruleset,
    elements: impl FnOnce(&mut dyn FnMut(&str, Key, Value)),
) -> Difference {
    let mut now = Transaction::new(want.table.clone());
    if have.is_none() {
        now.push(Op::AddTable { comment: want.comment.clone() }, None);
    }
    let mut have = have.unwrap_or_else(|| Ruleset::empty(want.table.clone()));
    let mut held = std::mem::take(&mut have.elements);
    let have = &have;
    let remade = Remade::of(have, want);
    let changed_chains: BTreeSet<&Name> = want
        .chains
        .iter()
        .filter(|(name, chain)| remade.changes_rules(name, have.chains.get(*name), chain))
        .map(|(name, _)| name)
        .collect();

    // What refers to something goes first.
    let mut flushed = BTreeSet::new();
    for (name, chain) in &have.chains {
        let goes = !want.chains.contains_key(name) && (chain.base.is_some() || remade.is_used_by(chain));
        if (goes || remade.chains.contains(name) || changed_chains.contains(name)) && !chain.rules.is_empty() {
            now.push(Op::FlushChain(name.clone()), None);
            flushed.insert(name);
        }
    }
    let mut sets: BTreeMap<&str, ElementChanges<'_>> = BTreeMap::new();
    for (name, set) in &want.sets {
        let keep = have.sets.contains_key(name) && !remade.sets.contains(name);
        let held = if keep { held.remove(name).unwrap_or_default() } else { BTreeMap::new() };
        sets.insert(name, ElementChanges { set, keep, held, delete: Vec::new(), add: Vec::new() });
    }
    elements(&mut |set, key, value| {
        if let Some(changes) = sets.get_mut(set) {
            changes.want(key, value, &remade);
        }
    });
    let mut late_keys: Vec<(&Name, Vec<Key>)> = Vec::new();
    let mut added: Vec<(&Name, Vec<(Key, Value)>)> = Vec::new();
    for (name, set) in &want.sets {
        let Some(changes) = sets.remove(&**name) else { continue };
        if set.dynamic_timeout_ms.is_some() && changes.keep {
            continue;
        }
        let (delete, surplus, add) = changes.finish(&remade);
        if !delete.is_empty() {
            now.push(Op::DeleteElements { set: name.clone(), keys: delete }, None);
        }
        if !surplus.is_empty() {
            // New ranges may overlap old ones: those cannot wait.
            if set.delete_late && !set.interval {
                late_keys.push((name, surplus));
            } else {
                now.push(Op::DeleteElements { set: name.clone(), keys: surplus }, None);
            }
        }
        if !add.is_empty() {
            added.push((name, add));
        }
    }
    let gone_sets: Vec<(&Name, &Set)> = have.sets.iter().filter(|(name, _)| !want.sets.contains_key(*name)).collect();
    for (name, _) in &gone_sets {
        let elements = held.remove(*name).unwrap_or_default();
        let keys: Vec<Key> =
            elements.into_iter().filter(|(_, value)| remade.is_target(value)).map(|(key, _)| key).collect();
        if !keys.is_empty() {
            now.push(Op::DeleteElements { set: (*name).clone(), keys }, None);
        }
    }
    for name in &remade.sets {
        delete_set(&mut now, name, &have.sets[*name]);
    }
    for (name, chain) in &have.chains {
        if remade.chains.contains(name) || (chain.base.is_some() && !want.chains.contains_key(name)) {
            now.push(Op::DeleteChain(name.clone()), None);
        }
    }

    // Then what is new: sets and chains before what refers to them.
    for (name, set) in &want.sets {
        if !have.sets.contains_key(name) || remade.sets.contains(name) {
            now.push(Op::AddSet { name: name.clone(), set: set.clone() }, None);
        }
    }
    for (name, chain) in &want.chains {
        if !have.chains.contains_key(name) || remade.chains.contains(name) {
            now.push(Op::AddChain { name: name.clone(), base: chain.base, comment: chain.comment.clone() }, None);
        }
    }
    for name in changed_chains {
        for rule in &want.chains[name].rules {
            now.push(Op::AddRule { chain: name.clone(), rule: rule.clone() }, None);
        }
    }
    for (set, elements) in added {
        now.push(Op::AddElements { set: set.clone(), elements }, None);
    }

    let mut late = Transaction::new(want.table.clone());
    let gone_chains: Vec<(&Name, &Chain)> =
        have.chains.iter().filter(|(name, chain)| chain.base.is_none() && !want.chains.contains_key(*name)).collect();
    for (name, chain) in &gone_chains {
        if !chain.rules.is_empty() && !flushed.contains(name) {
            late.push(Op::FlushChain((*name).clone()), None);
        }
    }
    for (set, keys) in late_keys {
        late.push(Op::DeleteElements { set: set.clone(), keys }, None);
    }
    for (name, set) in gone_sets {
        delete_set(&mut late, name, set);
    }
    for (name, _) in gone_chains {
        late.push(Op::DeleteChain(name.clone()), None);
    }
    Difference { now, late }
}

/// Older kernels (before Linux 6.2) release the chains that a verdict map's elements go to only when the elements are deleted.
fn delete_set(transaction: &mut Transaction, name: &Name, set: &Set) {
    if set.data == Some(MapData::Verdict) {
        transaction.push(Op::FlushSet(name.clone()), None);
    }
    transaction.push(Op::DeleteSet(name.clone()), None);
}

/// Sets and chains that exist with another definition, and are deleted and made anew.
struct Remade<'a> {
    sets: BTreeSet<&'a Name>,
    chains: BTreeSet<&'a Name>,
}

impl<'a> Remade<'a> {
    fn of(have: &'a Ruleset, want: &Ruleset) -> Self {
        let differs = |name: &Name, set: &Set| want.sets.get(name).is_some_and(|wanted| !same_set(set, wanted));
        Self {
            sets: have.sets.iter().filter(|(name, set)| differs(name, set)).map(|(name, _)| name).collect(),
            chains: have
                .chains
                .iter()
                .filter(|(name, chain)| want.chains.get(*name).is_some_and(|wanted| wanted.base != chain.base))
                .map(|(name, _)| name)
                .collect(),
        }
    }

    /// Whether the rules of a wanted chain must be written: they differ, or something that they refer to is made anew.
    fn changes_rules(&self, name: &Name, have: Option<&Chain>, want: &Chain) -> bool {
        let Some(have) = have else { return true };
        have.rules != want.rules || self.chains.contains(name) || self.is_used_by(have)
    }

    fn is_used_by(&self, chain: &Chain) -> bool {
        chain.rules.iter().flat_map(|rule| &rule.exprs).any(|expr| self.refers(expr))
    }

    fn refers(&self, expr: &Expr) -> bool {
        match expr {
            Expr::InSet { set: name, .. }
            | Expr::VerdictMap { map: name, .. }
            | Expr::DnatMap { map: name, .. }
            | Expr::UpdateSet(name) => self.sets.contains(name),
            Expr::Verdict(Verdict::Jump(name) | Verdict::Goto(name)) => self.chains.contains(name),
            _ => false,
        }
    }

    /// Whether the element jumps or goes to a chain that is made anew.
    fn is_target(&self, value: &Value) -> bool {
        matches!(&value.data, Some(Data::Verdict(Verdict::Jump(name) | Verdict::Goto(name))) if self.chains.contains(name))
    }
}

/// Whether the definitions are the same for the kernel; comment and `delete_late` are not its business.
pub(super) fn same_set(a: &Set, b: &Set) -> bool {
    // A dynamic set without a size gets this one as soon as a rule updates it (Linux, `nft_dynset_init`).
    const DYNAMIC_SIZE: u32 = 0xffff;
    let size_of = |set: &Set| if set.dynamic_timeout_ms.is_some() { set.size.or(Some(DYNAMIC_SIZE)) } else { set.size };
    let Set { key, data, interval, dynamic_timeout_ms, size: _, comment: _, delete_late: _ } = a;
    (key, data, interval, dynamic_timeout_ms, size_of(a))
        == (&b.key, &b.data, &b.interval, &b.dynamic_timeout_ms, size_of(b))
}

/// In an interval set a key without an end is one that ends where it starts.
pub(super) fn normal_key(set: &Set, key: Key) -> Key {
    if set.interval && key.end.is_none() { Key::range(key.start.clone(), key.start) } else { key }
}

/// What becomes of the elements of one set.
struct ElementChanges<'a> {
    set: &'a Set,
    /// Whether the set stays.
    keep: bool,
    /// Elements that the kernel holds and nobody has wanted yet.
    held: BTreeMap<Key, Value>,
    /// Elements with other data, which are added again.
    delete: Vec<Key>,
    add: Vec<(Key, Value)>,
}

impl ElementChanges<'_> {
    fn want(&mut self, key: Key, value: Value, remade: &Remade<'_>) {
        let key = normal_key(self.set, key);
        match self.held.remove(&key) {
            Some(held) if held.data == value.data && !remade.is_target(&held) => {}
            Some(_) => {
                self.delete.push(key.clone());
                self.add.push((key, value));
            }
            None => self.add.push((key, value)),
        }
    }

    /// Elements that go now in any case (those with other data, and what hinders the transaction), that are not wanted, and that come.
    fn finish(mut self, remade: &Remade<'_>) -> (Vec<Key>, Vec<Key>, Vec<(Key, Value)>) {
        let mut surplus = Vec::new();
        for (key, value) in self.held {
            if remade.is_target(&value) { self.delete.push(key) } else { surplus.push(key) }
        }
        if self.set.interval {
            // The kernel looks for overlaps as they come.
            self.add.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        }
        (self.delete, surplus, self.add)
    }
}
