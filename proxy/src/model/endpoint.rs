//! EndpointSlices as a proxy sees them.

use super::name::ObjectName;
use proxy_common::{IpFamily, Protocol};
use std::net::IpAddr;
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
    pub zone_hints: Vec<Arc<str>>,
    /// `hints.forNodes[].name`
    pub node_hints: Vec<Arc<str>>,
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
