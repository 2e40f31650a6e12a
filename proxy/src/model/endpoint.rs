//! EndpointSlices as a proxy sees them.

use super::name::ObjectName;
use proxy_common::{IpFamily, Protocol};
use std::fmt;
use std::net::IpAddr;
use std::ops::Deref;
use std::sync::Arc;

/// One port of a slice; ports without a number ("all ports") never reach the model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SlicePort {
    /// Matches `ServicePort::name`; empty for an unnamed port.
    pub name: Arc<str>,
    /// Transport protocol.
    pub protocol: Protocol,
    /// Port number on the endpoint.
    pub port: u16,
}

/// One endpoint of a slice, conditions defaulted (ready nil → true, serving nil → true, terminating nil → false).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// `addresses[0]`
    pub address: IpAddr,
    /// `nodeName`
    pub node_name: Option<Arc<str>>,
    /// `conditions.ready`
    pub ready: bool,
    /// `conditions.serving`
    pub serving: bool,
    /// `conditions.terminating`
    pub terminating: bool,
    /// `hints.forZones[].name`
    pub zone_hints: Hints,
    /// `hints.forNodes[].name`
    pub node_hints: Hints,
}

/// Names of zones or nodes. Most endpoints have none, and there are many endpoints: so none takes one pointer.
#[derive(Clone, Default, PartialEq, Eq)]
#[allow(clippy::box_collection)] // a boxed slice is two pointers wide
pub struct Hints(Option<Box<Vec<Arc<str>>>>);

impl Deref for Hints {
    type Target = [Arc<str>];

    fn deref(&self) -> &[Arc<str>] {
        self.0.as_deref().map_or(&[], Vec::as_slice)
    }
}

impl From<Vec<Arc<str>>> for Hints {
    fn from(names: Vec<Arc<str>>) -> Self {
        Self((!names.is_empty()).then(|| Box::new(names)))
    }
}

impl FromIterator<Arc<str>> for Hints {
    fn from_iter<I: IntoIterator<Item = Arc<str>>>(names: I) -> Self {
        names.into_iter().collect::<Vec<_>>().into()
    }
}

impl fmt::Debug for Hints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// An EndpointSlice of one Service and one family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// Namespace and name of the slice.
    pub name: ObjectName,
    /// The Service that the label `kubernetes.io/service-name` names.
    pub service: ObjectName,
    /// `addressType`
    pub family: IpFamily,
    /// Ports, in order.
    pub ports: Vec<SlicePort>,
    /// Endpoints, in order.
    pub endpoints: Vec<Endpoint>,
}
