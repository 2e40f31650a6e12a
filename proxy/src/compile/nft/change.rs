//! From one plan to the next.

use super::{Compiler, Element, Problem, Update, Views, objects, own};
use crate::compile::affinity::Objects;
use crate::compile::batch::{Batch, ElementChanges};
use crate::compile::claims::Rank;
use crate::compile::elements::{self, SetId, Shared};
use crate::compile::service::{Front, List, Lookup, ServicePlan};
use crate::compile::slots::{self, Slots, Target};
use crate::model::{ObjectName, Settings};
use crate::nft::object::{Chain, Key, Value};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

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

impl Compiler {
    /// Compiles `changed` and whoever wins or loses a frontend by it. `before`: the settings of the plan so far.
    pub(super) fn compile(
        &mut self,
        batch: Batch,
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
                // It serves nothing, but keeps its claims: what the kernel refuses to one Service is nobody else's.
                ServicePlan::new(views(&name), &mut Vec::new()).claims_only()
            } else {
                ServicePlan::new(views(&name), problems)
            };
            let old: HashSet<(Front, Rank)> = self.plans.get(&name).into_iter().flat_map(ServicePlan::claims).collect();
            let new: HashSet<(Front, Rank)> = plan.claims().collect();
            work.extend(old.difference(&new).flat_map(|(front, rank)| self.claims.release(*front, *rank, &name)));
            work.extend(new.difference(&old).flat_map(|(front, rank)| self.claims.claim(*front, *rank, &name)));
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
                    self.marked.slots.remove(&(list, front));
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
                self.marked.elements.remove(&(set, key.clone()));
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
            self.marked.balancers.remove(&id);
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

        self.marked.surplus.remove(&name);
        if plan.has_surplus() {
            self.surplus.insert(name.clone());
        } else {
            self.surplus.remove(&name);
        }
        if !plan.ports.is_empty() || !plan.lost.is_empty() {
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
        for (set, key, value) in &new {
            match set {
                SetId::Ips(Lookup::Service) | SetId::Nodeports(Lookup::Service)
                    if elements::leads_to_second_lookup(value) =>
                {
                    // Packets still come by here, so what the second look-up does not find any more has to go at once.
                    let second = |lookup| {
                        if matches!(set, SetId::Ips(_)) { SetId::Ips(lookup) } else { SetId::Nodeports(lookup) }
                    };
                    back.extend([Lookup::ShortCircuit, Lookup::Local].map(|lookup| (second(lookup), key.clone())));
                }
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
                self.leads_no_more(&value);
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
                self.marked.chains.remove(name);
                self.idle_chains.insert(name.clone());
            }
        }
        for name in old.sets.keys().filter(|name| !new.sets.contains_key(*name)) {
            pass.batch.delete_set(name, Some(service));
        }
    }
}
