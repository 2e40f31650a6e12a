//! The ORACLE: what must happen to the first packet of a new connection.

use super::name::ServicePortName;
use super::node::Settings;
use super::resolve::Backend;
use super::table::ServiceTable;
use proxy_common::Protocol;
use std::net::IpAddr;

/// The first packet of a new connection, as the node's stack sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet<'a> {
    /// The interface by which it enters; `None` = made by a process of the node itself (output hook).
    pub interface: Option<&'a str>,
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Transport protocol; `None` = another IP protocol, ICMP included.
    pub protocol: Option<Protocol>,
    /// Destination port; 0 if the protocol has none.
    pub port: u16,
}

/// An endpoint that may be chosen, and whether the packet's source is rewritten if it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Choice {
    /// The endpoint.
    pub backend: Backend,
    /// Source is rewritten to the address of the interface by which the packet leaves.
    pub masquerade: bool,
}

/// What happens to the packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Sent to one of these endpoints, uniformly at random (or to the one that affinity remembers).
    Forward {
        /// The service port that serves it.
        service_port: ServicePortName,
        /// The endpoints that are allowed, sorted; never empty.
        choices: Vec<Choice>,
    },
    /// Rejected with ICMP (ICMPv6) port unreachable.
    Reject,
    /// Dropped silently.
    Drop,
    /// Neither translated nor rejected nor dropped by us.
    NotOurs,
}

/// Says what happens to `packet` given everything in `table`.
#[must_use]
pub fn lookup(table: &ServiceTable, settings: &Settings, packet: &Packet<'_>) -> Outcome {
    let _ = (table, settings, packet);
    Outcome::NotOurs
}
