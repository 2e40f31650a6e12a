//! The service map itself: takes [`Delta`]s, knows what changed.

use super::endpoint::EndpointSlice;
use super::name::ObjectName;
use super::node::Node;
use super::service::Service;
use ipnet::IpNet;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// One change from a source. Deleting what was never seen is no change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// A Service appeared or changed.
    Service(Service),
    /// A Service is gone, turned headless or ExternalName, or belongs to another proxy now.
    ServiceGone(ObjectName),
    /// A slice appeared or changed. If it named another Service before, it leaves that one (better than kube-proxy: parity 10.18).
    Slice(EndpointSlice),
    /// A slice is gone; the name is the slice's own.
    SliceGone(ObjectName),
    /// This node's object appeared or changed.
    Node(Node),
    /// This node's object is gone. The last facts stay in force.
    NodeGone,
    /// A ServiceCIDR object appeared or changed: its name and CIDRs.
    ServiceCidr(Arc<str>, Vec<IpNet>),
    /// A ServiceCIDR object is gone. A CIDR that another object names stays (better than kube-proxy: parity 10.3).
    ServiceCidrGone(Arc<str>),
}

/// What changed since the changes were last taken.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Services to compile anew: their own object or one of their slices changed.
    pub services: BTreeSet<ObjectName>,
    /// Services of which a slice changed (for conntrack clean-up).
    pub endpoints: BTreeSet<ObjectName>,
    /// The node's name or zone changed: every service is affected.
    pub node: bool,
    /// The set of service CIDRs changed.
    pub service_cidrs: bool,
}

/// All Services, slices and node facts that are known now.
#[derive(Clone, Debug, Default)]
pub struct ServiceTable {
    services: HashMap<ObjectName, Arc<Service>>,
    slices: HashMap<ObjectName, BTreeMap<Arc<str>, Arc<EndpointSlice>>>,
    slice_owner: HashMap<ObjectName, ObjectName>,
    node: Node,
    service_cidrs: BTreeMap<Arc<str>, Vec<IpNet>>,
    changes: Changes,
}
