//! The service map itself: takes [`Delta`]s, knows what changed.

use super::endpoint::EndpointSlice;
use super::name::ObjectName;
use super::node::Node;
use super::service::Service;
use ipnet::IpNet;
use proxy_common::IpFamily;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// One change from a source. Deleting what was never seen is no change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// A Service appeared or changed.
    Service(Service),
    /// A Service is gone, turned headless or ExternalName, or belongs to another proxy now.
    ServiceGone(ObjectName),
    /// A slice appeared or changed. If it named another Service before, it leaves that one (kube-proxy v1.37 keeps it in both
    /// until the slice is deleted).
    Slice(EndpointSlice),
    /// A slice is gone; the name is the slice's own.
    SliceGone(ObjectName),
    /// This node's object appeared or changed.
    Node(Node),
    /// This node's object is gone. The last facts stay in force.
    NodeGone,
    /// A ServiceCIDR object appeared or changed: its name and CIDRs.
    ServiceCidr(Arc<str>, Vec<IpNet>),
    /// A ServiceCIDR object is gone. A CIDR that another object names stays (kube-proxy v1.37 forgets it).
    ServiceCidrGone(Arc<str>),
}

/// What changed since the changes were last taken. Net: what changed and changed back is not in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Services to compile anew: their own object or one of their slices changed.
    pub services: BTreeSet<ObjectName>,
    /// Services of which a slice changed (for conntrack clean-up).
    pub endpoints: BTreeSet<ObjectName>,
    /// The node's name or zone changed: every service is affected.
    pub node: bool,
    /// The node's addresses or pod CIDRs changed: [`super::Settings`] have to be made anew.
    pub node_addresses: bool,
    /// The set of service CIDRs changed.
    pub service_cidrs: bool,
}

impl Changes {
    /// Nothing changed.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// All Services, slices and node facts that are known now.
#[derive(Clone, Debug, Default)]
pub struct ServiceTable {
    /// Ordered, so that whoever walks the services meets the owner of a contested frontend (among equal claims the smallest name) first.
    services: BTreeMap<ObjectName, Arc<Service>>,
    /// By Service; those of one Service are ordered by their own name. Most Services have one or two, a few have many.
    slices: HashMap<ObjectName, Vec<Arc<EndpointSlice>>>,
    /// By the slice's own name.
    slice_names: HashMap<ObjectName, Arc<EndpointSlice>>,
    node: Node,
    service_cidrs: BTreeMap<Arc<str>, Vec<IpNet>>,
    before: Before,
}

/// How everything that has changed since the changes were last taken was at that time. What is as it was then has no entry,
/// so that changes which undo each other vanish.
#[derive(Clone, Debug, Default)]
struct Before {
    services: HashMap<ObjectName, Option<Arc<Service>>>,
    slices: HashMap<ObjectName, Option<Arc<EndpointSlice>>>,
    node: Option<Node>,
    service_cidrs: Option<BTreeSet<IpNet>>,
}

impl ServiceTable {
    /// An empty table with no pending change.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in one change. An object that equals the known one is no change.
    pub fn apply(&mut self, delta: Delta) {
        match delta {
            Delta::Service(service) => self.set_service(service.name.clone(), Some(service)),
            Delta::ServiceGone(name) => self.set_service(name, None),
            Delta::Slice(slice) => self.set_slice(slice.name.clone(), Some(slice)),
            Delta::SliceGone(name) => self.set_slice(name, None),
            Delta::Node(node) => self.set_node(node),
            Delta::NodeGone => {}
            Delta::ServiceCidr(name, cidrs) => self.set_service_cidrs(name, Some(cidrs)),
            Delta::ServiceCidrGone(name) => self.set_service_cidrs(name, None),
        }
    }

    /// What changed since the last call, and forgets it.
    pub fn take_changes(&mut self) -> Changes {
        let before = std::mem::take(&mut self.before);
        let mut endpoints = BTreeSet::new();
        for (name, old) in before.slices {
            endpoints.extend(old.map(|slice| slice.service.clone()));
            endpoints.extend(self.slice_names.get(&name).map(|slice| slice.service.clone()));
        }
        let mut services = endpoints.clone();
        services.extend(before.services.into_keys());
        let node = before.node.as_ref();
        Changes {
            services,
            endpoints,
            node: node.is_some_and(|old| !same_place(old, &self.node)),
            node_addresses: node
                .is_some_and(|old| old.addresses != self.node.addresses || old.pod_cidrs != self.node.pod_cidrs),
            service_cidrs: before.service_cidrs.is_some(),
        }
    }

    /// Whether [`Self::take_changes`] would return anything.
    #[must_use]
    pub fn has_changes(&self) -> bool {
        !self.before.services.is_empty()
            || !self.before.slices.is_empty()
            || self.before.node.is_some()
            || self.before.service_cidrs.is_some()
    }

    /// The Service of this name.
    #[must_use]
    pub fn service(&self, name: &ObjectName) -> Option<&Arc<Service>> {
        self.services.get(name)
    }

    /// All Services, ordered by namespace, then name.
    pub fn services(&self) -> impl ExactSizeIterator<Item = &Arc<Service>> {
        self.services.values()
    }

    /// The slices of both families that name `service`, ordered by their own name; whether or not that Service exists.
    #[must_use]
    pub fn slices(&self, service: &ObjectName) -> Vec<Arc<EndpointSlice>> {
        self.slices.get(service).cloned().unwrap_or_default()
    }

    /// What is known of this node; an empty zone label reads as none.
    #[must_use]
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// The union of all ServiceCIDRs of `family`: sorted, each once, reduced to its network. They may overlap.
    #[must_use]
    pub fn service_cidrs(&self, family: IpFamily) -> Vec<IpNet> {
        self.service_cidr_set().into_iter().filter(|net| IpFamily::of(net.addr()) == family).collect()
    }

    fn set_service(&mut self, name: ObjectName, new: Option<Service>) {
        let new = new.map(Arc::new);
        let old = self.services.get(&name).cloned();
        if old == new {
            return;
        }
        match &new {
            Some(service) => self.services.insert(name.clone(), Arc::clone(service)),
            None => self.services.remove(&name),
        };
        remember(&mut self.before.services, name, old, &new);
    }

    fn set_slice(&mut self, name: ObjectName, new: Option<EndpointSlice>) {
        let new = new.map(Arc::new);
        let old = self.slice_names.get(&name).cloned();
        if old == new {
            return;
        }
        if let Some(old) = &old {
            self.remove_slice(old);
        }
        if let Some(slice) = &new {
            let slices = self.slices.entry(slice.service.clone()).or_insert_with(|| Vec::with_capacity(1));
            let at = slices.partition_point(|other| other.name < name);
            slices.insert(at, Arc::clone(slice));
            self.slice_names.insert(name.clone(), Arc::clone(slice));
        }
        remember(&mut self.before.slices, name, old, &new);
    }

    fn remove_slice(&mut self, slice: &EndpointSlice) {
        self.slice_names.remove(&slice.name);
        if let Some(slices) = self.slices.get_mut(&slice.service) {
            slices.retain(|other| other.name != slice.name);
            if slices.is_empty() {
                self.slices.remove(&slice.service);
            }
        }
    }

    fn set_node(&mut self, mut new: Node) {
        new.zone = new.effective_zone().cloned();
        if new == self.node {
            return;
        }
        let old = std::mem::replace(&mut self.node, new);
        let before = self.before.node.get_or_insert(old);
        if *before == self.node {
            self.before.node = None;
        }
    }

    fn set_service_cidrs(&mut self, name: Arc<str>, cidrs: Option<Vec<IpNet>>) {
        let old = self.service_cidr_set();
        match cidrs {
            Some(cidrs) => self.service_cidrs.insert(name, cidrs),
            None => self.service_cidrs.remove(&name),
        };
        let new = self.service_cidr_set();
        if new == old {
            return;
        }
        let before = self.before.service_cidrs.get_or_insert(old);
        if *before == new {
            self.before.service_cidrs = None;
        }
    }

    fn service_cidr_set(&self) -> BTreeSet<IpNet> {
        self.service_cidrs.values().flatten().map(IpNet::trunc).collect()
    }
}

/// Keeps the first `old` for `name`, and forgets it once the object is again as it was.
fn remember<T: PartialEq>(
    before: &mut HashMap<ObjectName, Option<Arc<T>>>,
    name: ObjectName,
    old: Option<Arc<T>>,
    new: &Option<Arc<T>>,
) {
    match before.entry(name) {
        Entry::Vacant(entry) => {
            entry.insert(old);
        }
        Entry::Occupied(entry) => {
            if entry.get() == new {
                entry.remove();
            }
        }
    }
}

/// Same name and same zone: what decides which endpoints are local and which hints count.
fn same_place(a: &Node, b: &Node) -> bool {
    a.name == b.name && a.zone == b.zone
}

#[cfg(test)]
mod tests;
