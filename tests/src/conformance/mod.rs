//! Conformance: random states of a cluster, the real kube-proxy and Tandem side by side, and every difference between them.
//!
//! The random clusters, the packets to try in them and the judge of what two proxies make of those are pure.
//!
//! A [`Round`] is a cluster at two to four moments. The first [`State`] is made at random, each further one by a few changes of
//! the one before. Everything follows from the seed and the number of the round, on any machine. A runner shows each state to
//! the real kube-proxy and to Tandem, sends the probes to both, collects [`Observation`]s and asks [`judge`].
//!
//! What the runner must do:
//! * Serve every port of [`Round::ports`] in both worlds, so that what is left alone is answered.
//! * Send each probe from a socket of its own: a UDP flow of an earlier state is not part of the question.
//! * Try [`Probe::first_tries`] times, then as often as the judge asks for ([`Judgement::NeedMore`]).
//! * Send probes with [`Probe::sticky`] one after the other: affinity is memory that they share.

mod chance;
mod claims;
mod class;
pub mod compare;
pub mod differences;
mod evolve;
pub mod flows;
mod judge;
pub mod live_table;
pub mod mutation;
mod objects;
mod observation;
mod oracle;
pub mod pair;
mod places;
mod probes;
mod random;
pub mod report;
mod round;
pub mod run;
pub mod volley;

pub use class::{Class, Coverage};
pub use judge::{Judgement, judge, tries_for};
pub use observation::{Fate, Observation, Source};
pub use round::round;

use crate::engine::Objects;
use crate::probe::Proto;
use crate::world::WorldSpec;
use proxy::model::ObjectName;
use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// A cluster at a few moments, and the configuration under which it is looked at.
#[derive(Clone, Debug)]
pub struct Round {
    /// Seed of the whole run.
    pub seed: u64,
    /// Number of the round.
    pub number: u32,
    /// Command line flags that both proxies take.
    pub flags: Vec<String>,
    /// Who exists. Both worlds are made from it.
    pub world: WorldSpec,
    /// Every port that a server must listen on.
    pub ports: BTreeSet<u16>,
    /// The moments, in their order.
    pub states: Vec<State>,
}

/// The cluster at one moment.
#[derive(Clone, Debug)]
pub struct State {
    /// What changed since the state before, in words.
    pub what: Vec<String>,
    /// All objects: Services, EndpointSlices, Nodes, and the ServiceCIDR that the API server of the tests makes itself.
    pub objects: Objects,
    /// The packets to try.
    pub probes: Vec<Probe>,
}

/// A new connection to try, once or often.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Unique in the round.
    pub id: String,
    /// Where the client is.
    pub position: Position,
    /// Name of the party of the world that sends; `node` for the node itself.
    pub party: String,
    /// Source address.
    pub source: IpAddr,
    /// What is sent.
    pub proto: Proto,
    /// Where to; port 0 for ICMP.
    pub to: SocketAddr,
    /// What the oracle says. Tells how often to try at first and helps to read a message; it is not the judge.
    pub expected: Expected,
    /// Services that have the destination as ClusterIP, external IP, load balancer address or NodePort, the port included, or
    /// the address as ClusterIP: the objects to print beside a difference.
    pub services: Vec<ObjectName>,
    /// One of them remembers its clients.
    pub sticky: bool,
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ({} at {}) -> {} {}", self.id, self.party, self.source, self.position, self.proto, self.to)
    }
}

/// Where a client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Position {
    /// A pod of the node that is no endpoint.
    Pod,
    /// A pod of the node that is an endpoint, perhaps of the very service.
    Endpoint,
    /// A process of the node, from the node's own address.
    Node,
    /// A process of the node, from a load balancer address that is local to it.
    NodeVip,
    /// A pod of another node.
    RemotePod,
    /// A process of another node.
    RemoteNode,
    /// A client outside of the cluster, in the source ranges that a service has.
    Outside,
    /// A client outside of the cluster that most source ranges leave out.
    OutsideBlocked,
}

impl Position {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Pod,
        Self::Endpoint,
        Self::Node,
        Self::NodeVip,
        Self::RemotePod,
        Self::RemoteNode,
        Self::Outside,
        Self::OutsideBlocked,
    ];
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pod => "pod",
            Self::Endpoint => "endpoint",
            Self::Node => "node",
            Self::NodeVip => "node with a local VIP",
            Self::RemotePod => "remote pod",
            Self::RemoteNode => "remote node",
            Self::Outside => "outside",
            Self::OutsideBlocked => "outside, blocked",
        })
    }
}

/// What the oracle says of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Expected {
    /// Sent to one of this many endpoints; `masqueraded`: for one of them at least with another source address.
    Served {
        /// Number of endpoints.
        endpoints: usize,
        /// Some source address is rewritten.
        masqueraded: bool,
    },
    /// Rejected.
    Rejected,
    /// Dropped.
    Dropped,
    /// Left alone.
    Untouched,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Served { endpoints, masqueraded } => {
                write!(f, "one of {endpoints} endpoints{}", if *masqueraded { ", masqueraded" } else { "" })
            }
            Self::Rejected => f.write_str("a reject"),
            Self::Dropped => f.write_str("a drop"),
            Self::Untouched => f.write_str("untouched"),
        }
    }
}

impl Probe {
    /// How often to try at first: enough that a set of the expected size is mostly seen as a whole.
    #[must_use]
    pub fn first_tries(&self) -> usize {
        match self.expected {
            Expected::Served { .. } if self.sticky => 4,
            // Also where one endpoint is expected: another would show then.
            Expected::Served { endpoints, .. } => tries_for(endpoints, 0.02).max(4),
            Expected::Rejected | Expected::Untouched => 2,
            Expected::Dropped => 1,
        }
    }
}
