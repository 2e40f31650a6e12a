//! The service map: what Kubernetes says about Services, endpoints and this node, and what follows from it for packets.
//!
//! Pure: no IO, no clock, no async, no unsafe, no Kubernetes API types. Input arrives as [`Delta`]s in a [`ServiceTable`];
//! [`resolve()`] derives what a Service means on this node; [`lookup()`] is the oracle: what must happen to a new connection.
#![forbid(unsafe_code)]

pub mod detector;
pub mod endpoint;
#[cfg(test)]
pub(crate) mod fixtures;
pub mod lookup;
pub mod name;
pub mod node;
pub mod node_ports;
pub mod resolve;
pub mod service;
#[cfg(any(test, feature = "test-util"))]
pub mod strategies;
pub mod table;
pub mod topology;

pub use detector::{DetectLocalMode, LocalDetector, UnknownDetectLocalMode};
pub use endpoint::{Endpoint, EndpointSlice, Hints, SlicePort};
pub use lookup::{Choice, Oracle, Outcome, Packet, lookup};
pub use name::{ObjectName, ServicePortName};
pub use node::{Node, Settings};
pub use node_ports::NodePortAddresses;
pub use proxy_common::{IpFamily, Protocol};
pub use resolve::{Backend, ServicePortView, resolve};
pub use service::{Service, ServicePort, ServiceType, TrafficPolicy};
pub use table::{Changes, Delta, ServiceTable};
pub use topology::TopologyMode;
