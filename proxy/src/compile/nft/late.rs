//! What outlives a change: for packets in flight, and over a restart.

use super::{Compiler, Stage, Update};
use crate::compile::base::Balancer;
use crate::compile::batch::{Batch, ElementChanges};
use crate::compile::elements::{self, SetId};
use crate::compile::names::Prefix;
use crate::compile::service::{Front, List};
use crate::compile::slots::Target;
use crate::model::ObjectName;
use crate::nft::object::{Data, Key, Name, Ruleset, Value, Verdict};
use std::collections::{BTreeMap, BTreeSet, HashMap};

impl Compiler {
    /// Takes over the slot order of a table that the kernel already holds, so that the first plan keeps what is right. Call before
    /// the first `update`, which then returns no steps: apply `nft::diff(kernel, self.ruleset())` instead.
    pub fn adopt(&mut self, kernel: &Ruleset) {
        self.stage = Stage::Adopted;
        for id in
            [List::Cluster, List::Local].into_iter().flat_map(|list| [SetId::Slots(list), SetId::NodeportSlots(list)])
        {
            let (SetId::Slots(list) | SetId::NodeportSlots(list)) = id else { continue };
            let Some(found) = kernel.elements.get(id.name()) else { continue };
            let mut fronts: HashMap<Front, BTreeMap<u32, Target>> = HashMap::new();
            for (key, value) in found {
                if let Some((front, number, target)) = elements::parse_slot(self.settings.family, id, key, value) {
                    fronts.entry(front).or_default().insert(number, target);
                }
            }
            for (front, slots) in fronts {
                // Up to the first gap; what is behind it is not ours to explain, and nft::diff removes it.
                let slots = slots.into_iter().enumerate().take_while(|(i, (number, _))| *i == *number as usize);
                self.stale_slots.insert((list, front), slots.map(|(_, (_, target))| target).collect());
            }
        }
        self.balancers = kernel.chains.keys().filter_map(|name| Balancer::parse(name)).map(|id| (id, 0)).collect();
        let prefixes =
            [Prefix::Service, Prefix::Local, Prefix::External, Prefix::Endpoint].map(|prefix| prefix.to_string());
        // kube-proxy's test as well: only names of per-service chains have a slash.
        let ours = |name: &&Name| name.contains('/') && prefixes.iter().any(|prefix| name.starts_with(prefix.as_str()));
        self.idle_chains = kernel.chains.keys().filter(ours).cloned().collect();
        for id in SetId::ALL.into_iter().filter(|id| id.is_second_lookup()) {
            for (key, value) in kernel.elements.get(id.name()).into_iter().flatten() {
                match &value.data {
                    None => {}
                    Some(Data::Verdict(Verdict::Goto(chain))) if self.idle_chains.contains(chain) => {}
                    _ => match elements::balancer(value).and_then(|balancer| self.balancers.get_mut(&balancer)) {
                        Some(count) => *count += 1,
                        None => continue,
                    },
                }
                self.stale_elements.insert((id, key.clone()), value.clone());
            }
        }
    }

    /// Whether [`Compiler::settle`] has something to do.
    #[must_use]
    pub fn unsettled(&self) -> bool {
        !self.surplus.is_empty()
            || !self.stale_slots.is_empty()
            || !self.stale_elements.is_empty()
            || !self.idle_chains.is_empty()
            || self.balancers.values().any(|count| *count == 0)
    }

    /// Removes all that the last updates left for packets in flight (surplus slots, unused chains). Call at least one second after
    /// the transaction of the last update, or see [`Compiler::mark`].
    pub fn settle(&mut self) -> Update {
        let mut all = Update::default();
        // A chain to which the elements led that go in the first turn goes in the second.
        for _ in 0..2 {
            self.mark();
            all.steps.extend(self.settle_marked().steps);
        }
        all
    }

    /// Begins a second after which [`Compiler::settle_marked`] removes what is left for packets in flight now and is not used until then.
    /// So changes that never stop do not hold up the removal.
    pub fn mark(&mut self) {
        self.marked = Marks {
            surplus: self.surplus.clone(),
            slots: self.stale_slots.keys().copied().collect(),
            elements: self.stale_elements.keys().cloned().collect(),
            chains: self.idle_chains.clone(),
            balancers: self.balancers.iter().filter(|(_, count)| **count == 0).map(|(id, _)| *id).collect(),
        };
    }

    /// Removes what was marked and is still unused. Call at least one second after [`Compiler::mark`].
    pub fn settle_marked(&mut self) -> Update {
        let marked = std::mem::take(&mut self.marked);
        let mut batch = Batch::default();
        for name in marked.surplus {
            self.surplus.remove(&name);
            let Some(plan) = self.plans.get_mut(&name) else { continue };
            let mut changes = ElementChanges::default();
            for port in &mut plan.ports {
                for (front, list) in port.slotted().into_iter().collect::<BTreeSet<_>>() {
                    let slots = port.list(list);
                    for number in slots.live().len()..slots.all().len() {
                        changes.delete(SetId::slots(front, list), elements::slot_key(front, number));
                    }
                }
                port.cluster.drop_surplus();
                port.local.drop_surplus();
            }
            batch.elements(changes, Some(&name));
        }
        let mut changes = ElementChanges::default();
        for (list, front) in marked.slots {
            for number in 0..self.stale_slots.remove(&(list, front)).map_or(0, |slots| slots.len()) {
                changes.delete(SetId::slots(front, list), elements::slot_key(front, number));
            }
        }
        for id in marked.elements {
            if let Some(value) = self.stale_elements.remove(&id) {
                self.leads_no_more(&value);
                changes.delete(id.0, id.1);
            }
        }
        batch.elements(changes, None);
        for (balancer, n) in marked.balancers {
            if self.balancers.get(&(balancer, n)) == Some(&0) {
                self.balancers.remove(&(balancer, n));
                batch.delete_chain(&balancer.chain(n));
            }
        }
        for name in marked.chains {
            if self.idle_chains.remove(&name) {
                batch.delete_chain(&name);
            }
        }
        Update { steps: batch.into_steps().0, ..Update::default() }
    }

    /// An element with this value is gone.
    pub(super) fn leads_no_more(&mut self, value: &Value) {
        let Some(id) = elements::balancer(value) else { return };
        if let Some(count) = self.balancers.get_mut(&id) {
            *count -= 1;
            self.marked.balancers.remove(&id);
        }
    }
}

/// What has been left for packets in flight for some time.
#[derive(Debug, Default)]
pub(super) struct Marks {
    pub surplus: BTreeSet<ObjectName>,
    pub slots: BTreeSet<(List, Front)>,
    pub elements: BTreeSet<(SetId, Key)>,
    pub chains: BTreeSet<Name>,
    pub balancers: BTreeSet<(Balancer, u32)>,
}
