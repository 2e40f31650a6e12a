//! The nftables plan of one family.

use super::affinity::{self, Objects};
use super::base::{self, Balancer};
use super::batch::{Batch, ElementChanges};
use super::claims::{Claims, Counts};
use super::elements::{self, SetId, Shared};
use super::service::{Front, List, ServicePlan};
use super::slots::Target;
use crate::model::{ObjectName, ServicePortView, ServiceTable, Settings, resolve};
use crate::nft::object::{Chain, Key, Name, Ruleset, TableId, Value};
use crate::nft::transaction::{Op, Step};
use ipnet::IpNet;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// Something that could not be programmed as asked: which object, why, and what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The Service.
    pub service: ObjectName,
    /// In words for an operator.
    pub message: String,
}

/// What one update asks for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Update {
    /// Operations for one transaction, in order.
    pub steps: Vec<Step>,
    /// If not 0: the first `prepare` steps should be a transaction of their own, right before the rest. They add chains to which
    /// nothing leads yet. A packet walks the rules of one generation from the entry of its base chain on, but finds the
    /// elements of whichever generation is current; so one that is on its way during a commit can be led to a chain
    /// that is empty in its own generation. That chain has to be one generation old.
    pub prepare: usize,
    /// The Services that were compiled: those that changed, and those that win or lose a frontend by it. What was said of
    /// them before is replaced by `problems`.
    pub compiled: BTreeSet<ObjectName>,
    /// Objects that could not be programmed as asked.
    pub problems: Vec<Problem>,
}

/// What the kernel holds before the next update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Nothing.
    Empty,
    /// A table that was adopted: `nft::diff` makes the first operations.
    Adopted,
    /// The plan.
    Running,
}

/// Keeps the plan of one family and turns changes of the service map into operations.
///
/// The operations are right for a kernel that holds the plan as it was before. If a transaction fails, or somebody else changes the
/// table, read the kernel back and apply `nft::diff(kernel, compiler.ruleset())`.
#[derive(Debug)]
pub struct Compiler {
    settings: Settings,
    service_cidrs: Vec<IpNet>,
    stage: Stage,
    plans: HashMap<ObjectName, ServicePlan>,
    claims: Claims,
    shared: Counts<Shared>,
    /// Balancing chains in the kernel, and how many elements lead to each; those with none wait for `settle`.
    balancers: BTreeMap<(Balancer, u32), u32>,
    /// Chains of affinity ports that are empty and wait for `settle`.
    idle_chains: BTreeSet<Name>,
    /// Slots in the kernel of frontends that use their list no more; they wait for `settle`.
    stale_slots: HashMap<(List, Front), Box<[Target]>>,
    /// Elements in the kernel of second look-ups (`external-local`, `firewall`) to which nothing leads any more; they wait for `settle`.
    stale_elements: BTreeMap<(SetId, Key), Value>,
    /// Services with surplus slots.
    surplus: BTreeSet<ObjectName>,
    /// What of all that was there at the last [`Compiler::mark`] and has not been used since.
    marked: Marks,
    quarantined: HashSet<ObjectName>,
}

impl Compiler {
    /// A compiler with an empty plan, for a kernel without the table.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            service_cidrs: Vec::new(),
            stage: Stage::Empty,
            plans: HashMap::new(),
            claims: Claims::default(),
            shared: Counts::default(),
            balancers: BTreeMap::new(),
            idle_chains: BTreeSet::new(),
            stale_slots: HashMap::new(),
            stale_elements: BTreeMap::new(),
            surplus: BTreeSet::new(),
            marked: Marks::default(),
            quarantined: HashSet::new(),
        }
    }

    /// The table that the plan is for.
    #[must_use]
    pub fn table(&self) -> TableId {
        base::table(self.settings.family)
    }

    /// Replaces the settings. All services are compiled anew; what does not change costs no operation.
    ///
    /// # Panics
    /// If the family changes.
    pub fn set_settings(&mut self, table: &ServiceTable, settings: Settings) -> Update {
        assert_eq!(settings.family, self.settings.family, "a compiler is for one family");
        let before = std::mem::replace(&mut self.settings, settings);
        if self.stage != Stage::Running {
            return Update::default();
        }
        let mut batch = Batch::default();
        replace_base(
            &mut batch,
            &base::ruleset(&before, &self.service_cidrs),
            &base::ruleset(&self.settings, &self.service_cidrs),
        );
        for (balancer, n) in self.balancers.keys() {
            let rules = balancer.rules(*n, &self.settings);
            if rules != balancer.rules(*n, &before) {
                batch.rules(&balancer.chain(*n), &rules, None);
            }
        }
        let all: BTreeSet<ObjectName> = self.plans.keys().cloned().chain(names(table)).collect();
        let settings = self.settings.clone();
        self.compile(batch, all, &|name| views(table, &settings, name), &before)
    }

    /// Compiles `changed` services (all that claim the same frontends included). The first update compiles all services, and its
    /// steps begin with the table.
    pub fn update<'a>(&mut self, table: &ServiceTable, changed: impl IntoIterator<Item = &'a ObjectName>) -> Update {
        let mut changed: BTreeSet<ObjectName> = changed.into_iter().cloned().collect();
        if self.stage != Stage::Running {
            self.service_cidrs = table.service_cidrs(self.settings.family);
            changed.extend(names(table));
        }
        let settings = self.settings.clone();
        self.update_views(changed, &|name| views(table, &settings, name))
    }

    /// `update` with the views given.
    fn update_views(&mut self, changed: BTreeSet<ObjectName>, views: Views<'_>) -> Update {
        for name in &changed {
            self.quarantined.remove(name);
        }
        let stage = std::mem::replace(&mut self.stage, Stage::Running);
        let mut batch = if stage == Stage::Adopted { Batch::discarding() } else { Batch::default() };
        if stage == Stage::Empty {
            let base = base::ruleset(&self.settings, &self.service_cidrs);
            replace_base(&mut batch, &Ruleset::empty(base.table.clone()), &base);
        }
        let settings = self.settings.clone();
        let mut update = self.compile(batch, changed, views, &settings);
        if stage == Stage::Empty {
            let op = Op::AddTable { comment: Some(base::TABLE_COMMENT.to_owned()) };
            update.steps.insert(0, Step { op, service: None });
            update.prepare = 0;
        }
        update
    }

    /// The set of service CIDRs changed.
    pub fn update_service_cidrs(&mut self, table: &ServiceTable) -> Update {
        let before = std::mem::replace(&mut self.service_cidrs, table.service_cidrs(self.settings.family));
        if self.stage != Stage::Running {
            return Update::default();
        }
        let mut batch = Batch::default();
        replace_base(
            &mut batch,
            &base::ruleset(&self.settings, &before),
            &base::ruleset(&self.settings, &self.service_cidrs),
        );
        Update { steps: batch.into_steps().0, ..Update::default() }
    }

    /// Leaves a service out of the plan (its old rules go) until its object changes: the kernel refused it.
    ///
    /// The kernel refuses a transaction as a whole, so it does not hold what the plan says: read it back and apply
    /// `nft::diff(kernel, self.ruleset())`; the steps are for a kernel that holds the plan.
    pub fn quarantine(&mut self, table: &ServiceTable, service: &ObjectName) -> Update {
        self.quarantined.insert(service.clone());
        if self.stage != Stage::Running {
            return Update::default();
        }
        let settings = self.settings.clone();
        self.compile(
            Batch::default(),
            BTreeSet::from([service.clone()]),
            &|name| views(table, &settings, name),
            &settings,
        )
    }

    /// The Service for which the plan has this element, or this chain or set; `None` for the fixed part. Looks at all services: it
    /// is for naming what the kernel refused when it was told everything at once.
    #[must_use]
    pub fn owner(&self, name: &str, key: Option<&Key>) -> Option<&ObjectName> {
        let has_element = |plan: &ServicePlan, key: &Key| {
            plan.ports.iter().any(|port| {
                let slot = |(front, list): (Front, List)| {
                    SetId::slots(front, list).name() == name
                        && (0..port.list(list).all().len()).any(|number| elements::slot_key(front, number) == *key)
                };
                let shared = |(set, shared): (SetId, Key)| set.name() == name && shared == *key;
                elements::own(port).iter().any(|(set, own, _)| set.name() == name && own == key)
                    || Shared::of(port).map(Shared::element).any(shared)
                    || port.slotted().into_iter().any(slot)
            })
        };
        let has_object = |plan: &ServicePlan| {
            let objects = objects(plan, &self.settings);
            objects.sets.iter().any(|(set, _)| &**set == name)
                || objects.chains.iter().chain(&objects.endpoint_chains).any(|(chain, _)| &**chain == name)
        };
        let found = self.plans.iter().find(|(_, plan)| match key {
            Some(key) => has_element(plan, key),
            None => has_object(plan),
        });
        found.map(|(service, _)| service)
    }

    /// The whole plan as it should be in the kernel now, what waits for `settle` included. Built anew at each call.
    #[must_use]
    pub fn ruleset(&self) -> Ruleset {
        let mut ruleset = self.definitions();
        let mut all: BTreeMap<String, BTreeMap<Key, Value>> = BTreeMap::new();
        self.elements(&mut |set, key, value| {
            match all.get_mut(set) {
                Some(elements) => elements.insert(key, value),
                None => all.entry(set.to_owned()).or_default().insert(key, value),
            };
        });
        ruleset.elements = all.into_iter().map(|(set, elements)| (set.into(), elements)).collect();
        ruleset
    }

    /// The plan without its elements: chains, rules, sets.
    #[must_use]
    pub fn definitions(&self) -> Ruleset {
        let mut ruleset = base::ruleset(&self.settings, &self.service_cidrs);
        ruleset.elements.clear();
        for (balancer, n) in self.balancers.keys() {
            let rules = balancer.rules(*n, &self.settings);
            ruleset.chains.insert(balancer.chain(*n), Chain { rules, ..Chain::default() });
        }
        for name in &self.idle_chains {
            ruleset.chains.insert(name.clone(), Chain::default());
        }
        for plan in self.plans.values() {
            let objects = objects(plan, &self.settings);
            ruleset.sets.extend(objects.sets);
            ruleset.chains.extend(objects.endpoint_chains.into_iter().chain(objects.chains));
        }
        ruleset
    }

    /// The elements of the plan, with the name of their set; each key of a set once, in no order.
    pub fn elements(&self, each: &mut dyn FnMut(&str, Key, Value)) {
        for (set, elements) in base::ruleset(&self.settings, &self.service_cidrs).elements {
            elements.into_iter().for_each(|(key, value)| each(&set, key, value));
        }
        for plan in self.plans.values() {
            for port in &plan.ports {
                for (front, list) in port.slotted().into_iter().collect::<BTreeSet<_>>() {
                    for (number, backend) in port.list(list).all().iter().enumerate() {
                        let value = elements::slot_value(backend.address, backend.port);
                        each(SetId::slots(front, list).name(), elements::slot_key(front, number), value);
                    }
                }
                elements::own(port).into_iter().for_each(|(set, key, value)| each(set.name(), key, value));
            }
        }
        for ((list, front), slots) in &self.stale_slots {
            for (number, (address, port)) in slots.iter().enumerate() {
                let (key, value) = (elements::slot_key(*front, number), elements::slot_value(*address, *port));
                each(SetId::slots(*front, *list).name(), key, value);
            }
        }
        for ((set, key), value) in &self.stale_elements {
            each(set.name(), key.clone(), value.clone());
        }
        for shared in self.shared.iter() {
            let (set, key) = shared.element();
            each(set.name(), key, Value::default());
        }
    }
}

/// An element of a shared set.
type Element = (SetId, Key, Value);

/// The elements of all ports that are not shared, less the slots.
fn own(plan: &ServicePlan) -> Vec<Element> {
    plan.ports.iter().flat_map(elements::own).collect()
}

/// Resolves a service; empty if there is none.
type Views<'a> = &'a dyn Fn(&ObjectName) -> Vec<ServicePortView>;

fn views(table: &ServiceTable, settings: &Settings, name: &ObjectName) -> Vec<ServicePortView> {
    let Some(service) = table.service(name) else { return Vec::new() };
    resolve(service, &table.slices(name), table.node(), settings)
}

fn names(table: &ServiceTable) -> impl Iterator<Item = ObjectName> {
    table.services().map(|service| service.name.clone())
}

/// The affinity objects of all ports.
fn objects(plan: &ServicePlan, settings: &Settings) -> Objects {
    let mut all = Objects::default();
    for port in &plan.ports {
        let Objects { endpoint_chains, chains, sets } = affinity::objects(port, settings);
        all.endpoint_chains.extend(endpoint_chains);
        all.chains.extend(chains);
        all.sets.extend(sets);
    }
    all
}

/// From one fixed part to another.
fn replace_base(batch: &mut Batch, old: &Ruleset, new: &Ruleset) {
    for (name, set) in new.sets.iter().filter(|(name, _)| !old.sets.contains_key(*name)) {
        batch.set(name, set, None);
    }
    for (name, chain) in &new.chains {
        match old.chains.get(name) {
            None => batch.chain(name, chain, None),
            Some(before) if before.rules != chain.rules => batch.rules(name, &chain.rules, None),
            Some(_) => {}
        }
    }
    let content = |ruleset: &Ruleset, id: SetId| -> Vec<(SetId, Key, Value)> {
        // The elements of a set that goes, go with it.
        let kept = new.sets.contains_key(id.name());
        let elements = ruleset.elements.get(id.name()).filter(|_| kept).into_iter().flatten();
        elements.map(|(key, value)| (id, key.clone(), value.clone())).collect()
    };
    let mut changes = ElementChanges::default();
    for id in [SetId::NodeportIps, SetId::ServiceCidrs] {
        changes.replace(content(old, id), content(new, id));
    }
    batch.elements(changes, None);
    for name in old.sets.keys().filter(|name| !new.sets.contains_key(*name)) {
        batch.delete_set(name, None);
    }
}

mod change;
mod late;

use late::Marks;

#[cfg(test)]
mod tests;
