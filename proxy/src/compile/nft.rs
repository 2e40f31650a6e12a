//! The nftables plan of one family.

use super::affinity::{self, Objects};
use super::base::{self, Balancer};
use super::batch::{Batch, ElementChanges};
use super::claims::{Claims, Counts};
use super::elements::{self, SetId, Shared};
use super::names::Prefix;
use super::service::{Front, List, ServicePlan};
use super::slots::{self, Slots, Target};
use crate::model::{ObjectName, ServicePortView, ServiceTable, Settings, resolve};
use crate::nft::object::{Chain, Data, Key, Name, Ruleset, TableId, Value, Verdict};
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
            quarantined: HashSet::new(),
        }
    }

    /// The table that the plan is for.
    #[must_use]
    pub fn table(&self) -> TableId {
        base::table(self.settings.family)
    }

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
        let mut batch = Batch::default();
        let stage = std::mem::replace(&mut self.stage, Stage::Running);
        if stage == Stage::Empty {
            let base = base::ruleset(&self.settings, &self.service_cidrs);
            let nothing =
                Ruleset { chains: BTreeMap::new(), sets: BTreeMap::new(), elements: BTreeMap::new(), ..base.clone() };
            replace_base(&mut batch, &nothing, &base);
        }
        let settings = self.settings.clone();
        let mut update = self.compile(batch, changed, views, &settings);
        match stage {
            Stage::Empty => {
                let op = Op::AddTable { comment: Some(base::TABLE_COMMENT.to_owned()) };
                update.steps.insert(0, Step { op, service: None });
                update.prepare = 0;
            }
            Stage::Adopted => {
                update.steps.clear();
                update.prepare = 0;
            }
            Stage::Running => {}
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

    /// Compiles `changed` and whoever wins or loses a frontend by it. `before`: the settings of the plan so far.
    fn compile(
        &mut self,
        mut batch: Batch,
        changed: BTreeSet<ObjectName>,
        views: Views<'_>,
        before: &Settings,
    ) -> Update {
        let mut problems = Vec::new();
        let mut plans = self.claim(changed, views, &mut problems);
        for (name, plan) in &mut plans {
            plan.lose(name, |front| self.claims.owner(front), &mut problems);
        }
        // A frontend may pass from one service to another: all give before any takes.
        let mut released = HashMap::new();
        for (name, plan) in &plans {
            released.insert(name.clone(), self.release(name, plan));
        }
        let compiled: BTreeSet<ObjectName> = plans.keys().cloned().collect();
        let served = compiled.iter().any(|name| self.plans.contains_key(name));
        let mut pass = Pass { batch, served, released, shared: BTreeMap::new() };
        for (name, plan) in plans {
            self.install(&mut pass, name, plan, before);
        }
        let Pass { mut batch, shared, .. } = pass;
        for (element, (held, service)) in shared {
            let mut changes = ElementChanges::default();
            let (set, key) = element.element();
            match (held, self.shared.contains(&element)) {
                (false, true) => changes.add(set, key, Value::default()),
                (true, false) => changes.delete(set, key),
                _ => {}
            }
            batch.elements(changes, Some(&service));
        }
        let (steps, prepare) = batch.into_steps();
        Update { steps, prepare, compiled, problems }
    }

    /// Plans of `changed` and of all whose frontends come or go by it, with all frontends that they claim.
    fn claim(
        &mut self,
        changed: BTreeSet<ObjectName>,
        views: Views<'_>,
        problems: &mut Vec<Problem>,
    ) -> BTreeMap<ObjectName, ServicePlan> {
        let mut plans: BTreeMap<ObjectName, ServicePlan> = BTreeMap::new();
        let mut work: Vec<ObjectName> = changed.into_iter().collect();
        while let Some(name) = work.pop() {
            if plans.contains_key(&name) {
                continue;
            }
            let plan = if self.quarantined.contains(&name) {
                ServicePlan::default()
            } else {
                ServicePlan::new(views(&name), problems)
            };
            let old: HashSet<Front> = self.plans.get(&name).into_iter().flat_map(ServicePlan::claims).collect();
            let new: HashSet<Front> = plan.claims().collect();
            work.extend(old.difference(&new).flat_map(|front| self.claims.release(*front, &name)));
            work.extend(new.difference(&old).flat_map(|front| self.claims.claim(*front, &name)));
            plans.insert(name, plan);
        }
        plans
    }

    /// Notes what `name` will use no more, but a packet in flight may still look up. Returns the elements (slots are not among them).
    fn release(&mut self, name: &ObjectName, plan: &ServicePlan) -> HashSet<(SetId, Key)> {
        let mut released = HashSet::new();
        let Some(old) = self.plans.get(name) else { return released };
        let kept: HashSet<(Front, List)> = plan.ports.iter().flat_map(|port| port.slotted()).collect();
        for port in &old.ports {
            for (front, list) in port.slotted().into_iter().collect::<BTreeSet<_>>() {
                if !kept.contains(&(front, list)) {
                    let slots = port.list(list).all().iter().map(slots::target).collect();
                    self.stale_slots.insert((list, front), slots);
                }
            }
        }
        let new = own(plan);
        let kept: HashSet<(SetId, &Key)> = new.iter().map(|(set, key, _)| (*set, key)).collect();
        let filtered: Vec<&Key> =
            new.iter().filter(|(set, _, _)| *set == SetId::FirewallIps).map(|(_, key, _)| key).collect();
        for (set, key, value) in own(old).into_iter().filter(|(set, _, _)| set.is_second_lookup()) {
            // Sources of an address that is still filtered must go at once.
            let still =
                set == SetId::FirewallSources && filtered.iter().any(|front| key.start.starts_with(&front.start));
            if !still && !kept.contains(&(set, &key)) {
                if let Some(balancer) = elements::balancer(&value) {
                    *self.balancers.entry(balancer).or_default() += 1;
                }
                released.insert((set, key.clone()));
                self.stale_elements.insert((set, key), value);
            }
        }
        released
    }

    /// Replaces the plan of a service.
    fn install(&mut self, pass: &mut Pass, name: ObjectName, mut plan: ServicePlan, before: &Settings) {
        let old = self.plans.remove(&name).unwrap_or_default();
        let mut changes = ElementChanges::default();
        self.place_slots(&old, &mut plan, &mut changes);
        let mut old_own = own(&old);
        if let Some(released) = pass.released.get(&name).filter(|released| !released.is_empty()) {
            old_own.retain(|(set, key, _)| !released.contains(&(*set, key.clone())));
        }
        self.replace_own(old_own, own(&plan), &mut changes);
        pass.batch.elements(changes, Some(&name));
        self.replace_affinity(pass, &name, objects(&old, before), objects(&plan, &self.settings));

        for id in plan.ports.iter().flat_map(elements::balancers) {
            let (balancer, n) = id;
            let count = self.balancers.entry(id).or_insert_with(|| {
                let rules = balancer.rules(n, &self.settings);
                pass.batch.chain(&balancer.chain(n), &Chain { rules, ..Chain::default() }, Some(&name));
                if pass.served {
                    pass.batch.prepare();
                }
                0
            });
            *count += 1;
        }
        for id in old.ports.iter().flat_map(elements::balancers) {
            *self.balancers.get_mut(&id).expect("counted when the old plan was installed") -= 1;
        }

        let all_shared = |plan: &ServicePlan| plan.ports.iter().flat_map(Shared::of).collect::<HashSet<_>>();
        let (old_shared, new_shared) = (all_shared(&old), all_shared(&plan));
        for element in new_shared.difference(&old_shared) {
            let first = self.shared.add(*element);
            pass.shared.entry(*element).or_insert_with(|| (!first, name.clone()));
        }
        for element in old_shared.difference(&new_shared) {
            pass.shared.entry(*element).or_insert_with(|| (true, name.clone()));
            self.shared.remove(element);
        }

        if plan.has_surplus() {
            self.surplus.insert(name.clone());
        } else {
            self.surplus.remove(&name);
        }
        if !plan.ports.is_empty() {
            self.plans.insert(name, plan);
        }
    }

    /// Assigns endpoints to slots, next to what the kernel holds for each frontend.
    fn place_slots(&mut self, old: &ServicePlan, plan: &mut ServicePlan, changes: &mut ElementChanges) {
        let mut held: HashMap<(List, Front), &Slots> = HashMap::new();
        for port in &old.ports {
            held.extend(port.slotted().into_iter().map(|(front, list)| ((list, front), port.list(list))));
        }
        for port in &mut plan.ports {
            let mut lists: BTreeMap<List, BTreeSet<Front>> = BTreeMap::new();
            for (front, list) in port.slotted() {
                lists.entry(list).or_default().insert(front);
            }
            for (list, fronts) in lists {
                let mut fronts_held: Vec<(Front, Box<[Target]>)> = Vec::with_capacity(fronts.len());
                for front in fronts {
                    let targets = match held.get(&(list, front)) {
                        Some(slots) => slots.all().iter().map(slots::target).collect(),
                        None => self.stale_slots.remove(&(list, front)).unwrap_or_default(),
                    };
                    fronts_held.push((front, targets));
                }
                let longest = fronts_held.iter().map(|(_, held)| held).max_by_key(|held| held.len());
                let placed = Slots::place(longest.map_or(&[], |held| held), port.list(list).live());
                for (front, held) in fronts_held {
                    let set = SetId::slots(front, list);
                    for (number, backend) in placed.all().iter().enumerate() {
                        match held.get(number) {
                            Some(held) if *held == slots::target(backend) => continue,
                            Some(_) => changes.delete(set, elements::slot_key(front, number)),
                            None => {}
                        }
                        changes.add(
                            set,
                            elements::slot_key(front, number),
                            elements::slot_value(backend.address, backend.port),
                        );
                    }
                }
                *port.list_mut(list) = placed;
            }
        }
    }

    /// From the elements of an old plan, less what it released, to those of a new one.
    fn replace_own(&mut self, mut old: Vec<Element>, new: Vec<Element>, changes: &mut ElementChanges) {
        // What was released waits for `settle`, or comes back to whoever has the frontend now.
        let mut back: Vec<(SetId, Key)> = Vec::new();
        for (set, key, _) in &new {
            match set {
                SetId::FirewallIps => {
                    // Ranges must not overlap, so all old ones of the address have to go if it is filtered again.
                    let first = (SetId::FirewallSources, key.clone());
                    let stale = self.stale_elements.range(first..).map(|(id, _)| id);
                    let of_front =
                        |id: &&(SetId, Key)| id.0 == SetId::FirewallSources && id.1.start.starts_with(&key.start);
                    back.extend(stale.take_while(of_front).cloned());
                }
                set if set.is_second_lookup() => back.push((*set, key.clone())),
                _ => {}
            }
        }
        for id in back {
            if let Some(value) = self.stale_elements.remove(&id) {
                if let Some(count) = elements::balancer(&value).and_then(|balancer| self.balancers.get_mut(&balancer)) {
                    *count -= 1;
                }
                old.push((id.0, id.1, value));
            }
        }
        changes.replace(old, new);
    }

    /// From one set of affinity objects to another.
    fn replace_affinity(&mut self, pass: &mut Pass, service: &ObjectName, old: Objects, new: Objects) {
        for (name, set) in &new.sets {
            if old.sets.get(name) != Some(set) {
                // If it exists the kernel takes the new timeout (since 6.2) and size (since 6.5), and keeps the clients.
                pass.batch.set(name, set, Some(service));
            }
        }
        // No map leads to an endpoint's chain.
        for (old, new, leads) in [(&old.endpoint_chains, &new.endpoint_chains, false), (&old.chains, &new.chains, true)]
        {
            for (name, chain) in new {
                self.idle_chains.remove(name);
                match old.get(name) {
                    Some(before) if before == chain => {}
                    Some(_) => pass.batch.rules(name, &chain.rules, Some(service)),
                    None => {
                        pass.batch.chain(name, chain, Some(service));
                        if leads && pass.served {
                            pass.batch.prepare();
                        }
                    }
                }
            }
            for name in old.keys().filter(|name| !new.contains_key(*name)) {
                pass.batch.flush(name, Some(service));
                self.idle_chains.insert(name.clone());
            }
        }
        for name in old.sets.keys().filter(|name| !new.sets.contains_key(*name)) {
            pass.batch.delete_set(name, Some(service));
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
                elements::own(port).iter().any(|(set, own, _)| set.name() == name && own == key)
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
        let mut ruleset = base::ruleset(&self.settings, &self.service_cidrs);
        for (balancer, n) in self.balancers.keys() {
            let rules = balancer.rules(*n, &self.settings);
            ruleset.chains.insert(balancer.chain(*n), Chain { rules, ..Chain::default() });
        }
        for name in &self.idle_chains {
            ruleset.chains.insert(name.clone(), Chain::default());
        }
        let mut all: BTreeMap<SetId, BTreeMap<Key, Value>> = BTreeMap::new();
        let mut insert = |set: SetId, key: Key, value: Value| drop(all.entry(set).or_default().insert(key, value));
        for plan in self.plans.values() {
            for port in &plan.ports {
                for (front, list) in port.slotted() {
                    for (number, backend) in port.list(list).all().iter().enumerate() {
                        let value = elements::slot_value(backend.address, backend.port);
                        insert(SetId::slots(front, list), elements::slot_key(front, number), value);
                    }
                }
                elements::own(port).into_iter().for_each(|(set, key, value)| insert(set, key, value));
            }
            let objects = objects(plan, &self.settings);
            ruleset.sets.extend(objects.sets);
            ruleset.chains.extend(objects.endpoint_chains.into_iter().chain(objects.chains));
        }
        for ((list, front), slots) in &self.stale_slots {
            for (number, (address, port)) in slots.iter().enumerate() {
                insert(
                    SetId::slots(*front, *list),
                    elements::slot_key(*front, number),
                    elements::slot_value(*address, *port),
                );
            }
        }
        for ((set, key), value) in &self.stale_elements {
            insert(*set, key.clone(), value.clone());
        }
        for shared in self.shared.iter() {
            let (set, key) = shared.element();
            insert(set, key, Value::default());
        }
        ruleset.elements.extend(all.into_iter().map(|(set, elements)| (set.name().into(), elements)));
        ruleset
    }
}

/// What one call of `compile` collects.
struct Pass {
    batch: Batch,
    /// Some of the services were in the plan before.
    served: bool,
    /// Elements that a service left to `stale_elements`.
    released: HashMap<ObjectName, HashSet<(SetId, Key)>>,
    /// Shared elements that were touched: whether the kernel holds them, and by which service.
    shared: BTreeMap<Shared, (bool, ObjectName)>,
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

#[cfg(test)]
mod tests;
