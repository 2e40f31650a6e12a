//! Connection tracking entries that contradict the service map.
//!
//! A conntrack entry keeps its translation, or its lack of one, for as long as packets refresh it. For TCP that is right:
//! a connection belongs to its endpoint. A UDP "connection" is only a pair of sockets, so a client that keeps sending would
//! be held at an endpoint that is gone, or at a ClusterIP that nothing translated yet. [`stale`] says which flows these are
//! and [`netlink`] finds and deletes them.
//!
//! The decision looks at state, not at events: what the kernel holds against what is served now. So it is right after a
//! failed attempt, after a restart, and for changes that happened while no proxy ran; and a restart with unchanged
//! services deletes nothing.
#![forbid(unsafe_code)]

pub mod netlink;
pub mod stale;

pub use netlink::{Error, Reconciler, Report};
pub use stale::{Flow, Frontend, Frontends, Revision};
