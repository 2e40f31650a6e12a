//! What outlives a change: for packets in flight, and over a restart.

use super::{Compiler, Stage, Update};
use crate::compile::base::Balancer;
use crate::compile::batch::{Batch, ElementChanges};
use crate::compile::elements::{self, SetId};
use crate::compile::names::Prefix;
use crate::compile::service::{Front, List};
use crate::compile::slots::Target;
use crate::nft::object::{Data, Name, Ruleset, Verdict};
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

    /// Removes what the last updates left for packets in flight (surplus slots, unused chains). Call at least one second after the
    /// transaction of the last update.
    pub fn settle(&mut self) -> Update {
        let mut batch = Batch::default();
        for name in std::mem::take(&mut self.surplus) {
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
        for ((list, front), slots) in std::mem::take(&mut self.stale_slots).into_iter().collect::<BTreeMap<_, _>>() {
            for number in 0..slots.len() {
                changes.delete(SetId::slots(front, list), elements::slot_key(front, number));
            }
        }
        for ((set, key), value) in std::mem::take(&mut self.stale_elements) {
            if let Some(count) = elements::balancer(&value).and_then(|balancer| self.balancers.get_mut(&balancer)) {
                *count -= 1;
            }
            changes.delete(set, key);
        }
        batch.elements(changes, None);
        self.balancers.retain(|(balancer, n), count| {
            if *count == 0 {
                batch.delete_chain(&balancer.chain(*n));
            }
            *count > 0
        });
        for name in std::mem::take(&mut self.idle_chains) {
            batch.delete_chain(&name);
        }
        Update { steps: batch.into_steps().0, ..Update::default() }
    }
}
