//! Topology hints: which ready endpoints this node should use.
//!
//! kube-proxy v1.37: hints count only if *every* ready endpoint has them and at least one names this node or its zone;
//! a half-hinted Service is one whose controller is still at work, and there all endpoints are used. They never touch the
//! Local lists, and a mode once chosen does not fall back to another one.

use super::endpoint::Endpoint;
use super::node::Node;
use std::sync::Arc;

/// Which ready endpoints of a service port this node uses for cluster-wide traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TopologyMode {
    /// Those whose node hints name this node.
    Node,
    /// Those whose zone hints name this node's zone.
    Zone,
    /// All.
    All,
}

impl TopologyMode {
    /// Chooses the mode from the ready endpoints of one service port.
    pub fn of<'a>(ready: impl Iterator<Item = &'a Endpoint> + Clone, node: &Node) -> Self {
        if hinted(ready.clone(), |endpoint: &Endpoint| &endpoint.node_hints, node_name(node)) {
            return Self::Node;
        }
        if hinted(ready, |endpoint: &Endpoint| &endpoint.zone_hints, node.effective_zone()) {
            return Self::Zone;
        }
        Self::All
    }

    /// Whether a ready endpoint is used in this mode.
    #[must_use]
    pub fn allows(self, endpoint: &Endpoint, node: &Node) -> bool {
        match self {
            Self::Node => node_name(node).is_some_and(|name| endpoint.node_hints.contains(name)),
            Self::Zone => node.effective_zone().is_some_and(|zone| endpoint.zone_hints.contains(zone)),
            Self::All => true,
        }
    }
}

/// The node's name, if it is known.
fn node_name(node: &Node) -> Option<&Arc<str>> {
    Some(&node.name).filter(|name| !name.is_empty())
}

/// Every endpoint has a hint, and at least one of them names `here`.
fn hinted<'a>(
    mut ready: impl Iterator<Item = &'a Endpoint> + Clone,
    hints: impl Fn(&'a Endpoint) -> &'a [Arc<str>],
    here: Option<&Arc<str>>,
) -> bool {
    let Some(here) = here else { return false };
    ready.clone().all(|endpoint| !hints(endpoint).is_empty()) && ready.any(|endpoint| hints(endpoint).contains(here))
}
