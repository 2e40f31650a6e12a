//! Collects the operations of one transaction and puts them into an order that the kernel accepts: what is referred to exists
//! before what refers to it, and goes after it; of one key the old element goes before the new one comes.

use super::elements::SetId;
use crate::model::ObjectName;
use crate::nft::object::{Chain, Key, Name, Rule, Set, Value};
use crate::nft::transaction::{Op, Step};
use std::collections::BTreeMap;

/// Operations by phase.
#[derive(Debug, Default)]
pub(super) struct Batch {
    sets: Vec<Step>,
    chains: Vec<Step>,
    new_rules: Vec<Step>,
    prepare: bool,
    rules: Vec<Step>,
    deletions: Vec<Step>,
    additions: Vec<Step>,
    flushes: Vec<Step>,
    set_deletions: Vec<Step>,
    chain_deletions: Vec<Step>,
    discarding: bool,
}

fn step(op: Op, service: Option<&ObjectName>) -> Step {
    Step { op, service: service.cloned() }
}

impl Batch {
    /// Keeps no operation: only the plan that comes of it is wanted.
    pub(super) fn discarding() -> Self {
        Self { discarding: true, ..Self::default() }
    }

    /// Makes sure that a set exists.
    pub(super) fn set(&mut self, name: &Name, set: &Set, service: Option<&ObjectName>) {
        self.sets.push(step(Op::AddSet { name: name.clone(), set: set.clone() }, service));
    }

    /// Makes sure that a chain exists to which nothing led so far, with exactly these rules.
    pub(super) fn chain(&mut self, name: &Name, chain: &Chain, service: Option<&ObjectName>) {
        let add = Op::AddChain { name: name.clone(), base: chain.base, comment: chain.comment.clone() };
        self.chains.push(step(add, service));
        self.new_rules.extend(replace_rules(name, &chain.rules, service));
    }

    /// Packets that are served already will be led to a new chain: see [`Update::prepare`](super::nft::Update::prepare).
    pub(super) fn prepare(&mut self) {
        self.prepare = true;
    }

    /// Gives a chain that exists other rules.
    pub(super) fn rules(&mut self, chain: &Name, rules: &[Rule], service: Option<&ObjectName>) {
        self.rules.extend(replace_rules(chain, rules, service));
    }

    /// Takes the changed elements of a service.
    pub(super) fn elements(&mut self, changes: ElementChanges, service: Option<&ObjectName>) {
        if self.discarding {
            // They are most of it, and would pile up.
            return;
        }
        for (set, keys) in changes.deletions {
            self.deletions.push(step(Op::DeleteElements { set: set.name().into(), keys }, service));
        }
        for (set, elements) in changes.additions {
            self.additions.push(step(Op::AddElements { set: set.name().into(), elements }, service));
        }
    }

    /// Empties a chain that nothing leads to any more.
    pub(super) fn flush(&mut self, chain: &Name, service: Option<&ObjectName>) {
        self.flushes.push(step(Op::FlushChain(chain.clone()), service));
    }

    /// Deletes a set to which no rule refers any more.
    pub(super) fn delete_set(&mut self, set: &Name, service: Option<&ObjectName>) {
        self.set_deletions.push(step(Op::DeleteSet(set.clone()), service));
    }

    /// Empties and deletes a chain that nothing leads to any more.
    pub(super) fn delete_chain(&mut self, chain: &Name) {
        self.flush(chain, None);
        self.chain_deletions.push(step(Op::DeleteChain(chain.clone()), None));
    }

    /// All operations in order, and how many of them prepare the rest.
    pub(super) fn into_steps(self) -> (Vec<Step>, usize) {
        if self.discarding {
            return (Vec::new(), 0);
        }
        let mut steps = self.sets;
        steps.extend(self.chains);
        steps.extend(self.new_rules);
        let prepare = if self.prepare { steps.len() } else { 0 };
        for phase in
            [self.rules, self.deletions, self.additions, self.flushes, self.set_deletions, self.chain_deletions]
        {
            steps.extend(phase);
        }
        (steps, prepare)
    }
}

fn replace_rules(chain: &Name, rules: &[Rule], service: Option<&ObjectName>) -> Vec<Step> {
    let add = |rule: &Rule| Op::AddRule { chain: chain.clone(), rule: rule.clone() };
    std::iter::once(Op::FlushChain(chain.clone())).chain(rules.iter().map(add)).map(|op| step(op, service)).collect()
}

/// Elements that come and go, by set.
#[derive(Debug, Default)]
pub(super) struct ElementChanges {
    deletions: BTreeMap<SetId, Vec<Key>>,
    additions: BTreeMap<SetId, Vec<(Key, Value)>>,
}

impl ElementChanges {
    /// An element goes.
    pub(super) fn delete(&mut self, set: SetId, key: Key) {
        self.deletions.entry(set).or_default().push(key);
    }

    /// An element comes.
    pub(super) fn add(&mut self, set: SetId, key: Key, value: Value) {
        self.additions.entry(set).or_default().push((key, value));
    }

    /// From some elements to others.
    pub(super) fn replace(&mut self, old: Vec<(SetId, Key, Value)>, new: Vec<(SetId, Key, Value)>) {
        let mut old: BTreeMap<(SetId, Key), Value> =
            old.into_iter().map(|(set, key, value)| ((set, key), value)).collect();
        for (set, key, value) in new {
            let id = (set, key);
            match old.remove(&id) {
                Some(before) if before == value => continue,
                Some(_) => self.delete(id.0, id.1.clone()),
                None => {}
            }
            self.add(id.0, id.1, value);
        }
        for ((set, key), _) in old {
            self.delete(set, key);
        }
    }
}
