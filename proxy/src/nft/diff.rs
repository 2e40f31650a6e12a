//! From one ruleset to another: the operations that turn what the kernel holds into what is wanted.
#![forbid(unsafe_code)]

use super::expr::Expr;
use super::object::{Chain, Data, Key, MapData, Name, Ruleset, Set, Value, Verdict};
use super::transaction::{Op, Transaction};
use std::borrow::Cow;
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
    let nothing = Ruleset {
        table: want.table.clone(),
        comment: None,
        chains: BTreeMap::new(),
        sets: BTreeMap::new(),
        elements: BTreeMap::new(),
    };
    let mut now = Transaction::new(want.table.clone());
    if have.is_none() {
        now.push(Op::AddTable { comment: want.comment.clone() }, None);
    }
    let have = have.unwrap_or(&nothing);
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
    let mut late_keys: BTreeMap<&Name, Vec<Key>> = BTreeMap::new();
    let mut added: BTreeMap<&Name, Vec<(Key, Value)>> = BTreeMap::new();
    for (name, set) in &want.sets {
        let keep = have.sets.contains_key(name) && !remade.sets.contains(name);
        let changes =
            ElementChanges::of(set, have.elements.get(name).filter(|_| keep), want.elements.get(name), &remade);
        if set.dynamic_timeout_ms.is_some() && keep {
            continue;
        }
        if !changes.delete.is_empty() {
            now.push(Op::DeleteElements { set: name.clone(), keys: changes.delete }, None);
        }
        if !changes.surplus.is_empty() {
            // New ranges may overlap old ones: those cannot wait.
            if set.delete_late && !set.interval {
                late_keys.insert(name, changes.surplus);
            } else {
                now.push(Op::DeleteElements { set: name.clone(), keys: changes.surplus }, None);
            }
        }
        if !changes.add.is_empty() {
            added.insert(name, changes.add);
        }
    }
    let gone_sets: Vec<(&Name, &Set)> = have.sets.iter().filter(|(name, _)| !want.sets.contains_key(*name)).collect();
    for (name, _) in &gone_sets {
        let keys: Vec<Key> = have
            .elements
            .get(*name)
            .into_iter()
            .flatten()
            .filter(|(_, value)| remade.is_target(value))
            .map(|(key, _)| key.clone())
            .collect();
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
pub(super) fn normal_key<'a>(set: &Set, key: &'a Key) -> Cow<'a, Key> {
    if set.interval && key.end.is_none() {
        Cow::Owned(Key::range(key.start.clone(), key.start.clone()))
    } else {
        Cow::Borrowed(key)
    }
}

#[derive(Default)]
struct ElementChanges {
    /// Elements that go now in any case: those with other data, which are added again, and what hinders the transaction.
    delete: Vec<Key>,
    /// Elements that are not wanted.
    surplus: Vec<Key>,
    add: Vec<(Key, Value)>,
}

impl ElementChanges {
    fn of(
        set: &Set,
        have: Option<&BTreeMap<Key, Value>>,
        want: Option<&BTreeMap<Key, Value>>,
        remade: &Remade<'_>,
    ) -> Self {
        let mut changes = Self::default();
        let mut wanted = 0;
        for (key, value) in want.into_iter().flatten() {
            let key = normal_key(set, key);
            match have.and_then(|have| have.get(&*key)) {
                Some(held) if held.data == value.data && !remade.is_target(held) => wanted += 1,
                Some(_) => {
                    wanted += 1;
                    changes.delete.push(key.clone().into_owned());
                    changes.add.push((key.into_owned(), value.clone()));
                }
                None => changes.add.push((key.into_owned(), value.clone())),
            }
        }
        if have.map_or(0, BTreeMap::len) > wanted {
            let want: BTreeSet<Cow<'_, Key>> =
                want.into_iter().flatten().map(|(key, _)| normal_key(set, key)).collect();
            for (key, value) in have.into_iter().flatten().filter(|(key, _)| !want.contains(*key)) {
                let list = if remade.is_target(value) { &mut changes.delete } else { &mut changes.surplus };
                list.push(key.clone());
            }
        }
        changes
    }
}
