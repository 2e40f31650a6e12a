//! Connections that are open while the cluster changes: which go on, which move, which end.
//!
//! Which endpoint a connection gets is chance, so the nodes are compared by endpoint: what became of the connections that
//! were at the same one on both.

use crate::conformance::claims::claims;
use crate::conformance::pair::Side;
use crate::conformance::volley::{Shot, fire};
use crate::engine::Objects;
use crate::probe::{Flow, Proto, Seen};
use crate::world::World;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// Connections to each frontend on each node.
const EACH: usize = 6;
/// How long an answer may take when one is expected.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long nothing must come back to call it silence.
const SILENCE: Duration = Duration::from_millis(500);

/// Where connections are opened.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The party that opens them.
    pub party: String,
    /// From which of its addresses.
    pub source: IpAddr,
    /// TCP or UDP.
    pub proto: Proto,
    /// Where to.
    pub to: SocketAddr,
}

/// What became of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FlowFate {
    /// The same endpoint answers.
    Same,
    /// Another one answers.
    Moved,
    /// Nobody does.
    Silent,
    /// It was refused or reset.
    Refused,
}

struct Open {
    place: usize,
    side: Side,
    backend: SocketAddr,
    flow: Flow,
}

/// Open connections around both nodes.
pub struct Flows {
    places: Vec<Place>,
    open: Vec<Open>,
}

/// The connections of one place to one endpoint, which had different fates.
#[derive(Clone, Debug)]
pub struct FlowDifference {
    /// Where they were opened.
    pub place: Place,
    /// The endpoint that they were at.
    pub backend: SocketAddr,
    /// Their fates: reference, subject.
    pub fates: [BTreeSet<FlowFate>; 2],
}

/// Comparison of connections over a change.
#[derive(Clone, Debug, Default)]
pub struct FlowComparison {
    /// Pairs of place and endpoint that were compared.
    pub compared: usize,
    /// How many of them did not just go on, on the reference.
    pub changed: usize,
    /// Those that differ.
    pub differences: Vec<FlowDifference>,
}

impl Flows {
    /// Opens connections at every place on both nodes. Those that get no answer are left out.
    #[must_use]
    pub fn open(worlds: &[World; 2], places: Vec<Place>) -> Self {
        let mut open = Vec::new();
        for side in Side::BOTH {
            let world = &worlds[side.index()];
            for (index, place) in places.iter().enumerate() {
                let Some(ns) = world.netns(&place.party) else { continue };
                open.extend(ns.run(|| {
                    let one = || {
                        let opened = match place.proto {
                            Proto::Tcp => Flow::tcp(place.source, place.to, PATIENCE),
                            _ => Flow::udp(place.source, place.to, PATIENCE, &world.arrivals),
                        };
                        let (flow, answer) = opened.ok()?;
                        Some(Open { place: index, side, backend: answer.local, flow })
                    };
                    (0..EACH).map_while(|_| one()).collect::<Vec<_>>()
                }));
            }
        }
        Self { places, open }
    }

    /// Puts the UDP connections of one node back into its conntrack table as they were, where they were deleted. Returns how many.
    #[must_use]
    pub fn restore_udp(&self, worlds: &[World; 2], side: Side) -> usize {
        let node = &worlds[side.index()].node;
        let mut restored = 0;
        for open in self.open.iter().filter(|open| open.side == side) {
            let Flow::Udp(socket) = &open.flow else { continue };
            let Some(local) = socket.local_addr().ok().and_then(|a| a.as_socket()) else { continue };
            let (to, backend) = (self.places[open.place].to, open.backend);
            let command = format!(
                "conntrack -I -p udp -s {} -d {} --sport {} --dport {} --dst-nat {backend} -t 60",
                local.ip(),
                to.ip(),
                local.port(),
                to.port()
            );
            // One that is still there is refused.
            restored += usize::from(node.output(&command.split(' ').collect::<Vec<_>>()).is_ok());
        }
        restored
    }

    /// Uses all of them again and compares what became of them.
    #[must_use]
    pub fn compare(&self, worlds: &[World; 2]) -> FlowComparison {
        let fates = std::thread::scope(|scope| {
            let threads: Vec<_> = self
                .open
                .iter()
                .map(|open| scope.spawn(|| fate(&open.flow, open.backend, &worlds[open.side.index()])))
                .collect();
            threads.into_iter().map(|t| t.join().expect("a probe does not panic")).collect::<Vec<_>>()
        });
        let mut groups: BTreeMap<(usize, SocketAddr), [BTreeSet<FlowFate>; 2]> = BTreeMap::new();
        for (open, fate) in self.open.iter().zip(fates) {
            groups.entry((open.place, open.backend)).or_default()[open.side.index()].insert(fate);
        }
        let mut all = FlowComparison::default();
        for ((place, backend), fates) in groups {
            if fates.iter().any(BTreeSet::is_empty) {
                continue; // Only one node had connections to this endpoint.
            }
            all.compared += 1;
            all.changed += usize::from(fates[0] != [FlowFate::Same].into());
            if fates[0].is_disjoint(&fates[1]) {
                all.differences.push(FlowDifference { place: self.places[place].clone(), backend, fates });
            }
        }
        all
    }
}

fn fate(flow: &Flow, backend: SocketAddr, world: &World) -> FlowFate {
    // The first datagram after a change may meet an entry that is just going.
    match flow.again(SILENCE, &world.arrivals) {
        Seen::Answer(answer) | Seen::OneWay(answer) if answer.local == backend => FlowFate::Same,
        Seen::Answer(_) | Seen::OneWay(_) => FlowFate::Moved,
        Seen::Nothing => FlowFate::Silent,
        _ => FlowFate::Refused,
    }
}

/// Whether a difference is a deliberate one: Tandem deletes UDP entries that contradict the service map after any change, and
/// kube-proxy only after changes of endpoints and only where the frontend still exists (its known limit 14).
///
/// So: UDP, kube-proxy let it go on, Tandem did not, and the endpoint serves this frontend no more: nobody has the frontend, or the
/// endpoint is no serving one of an owner; and new connections do not get there.
#[must_use]
pub fn is_thorough_clean_up(difference: &FlowDifference, objects: &Objects, worlds: &[World; 2]) -> bool {
    let place = &difference.place;
    let node_addresses = worlds[0].spec.local_addresses();
    let claims = claims(objects, place.proto, place.to, &node_addresses);
    if place.proto != Proto::Udp
        || difference.fates[0] != [FlowFate::Same].into()
        || difference.fates[1].contains(&FlowFate::Same)
        || claims.iter().any(|claim| claim.serving.contains(&difference.backend))
    {
        return false;
    }
    let shots = Side::BOTH.map(|side| {
        let (party, source, proto, to) = (place.party.clone(), place.source, place.proto, place.to);
        vec![Shot { side, party, source, proto, to, tries: 16, timeout: SILENCE, silences: 2 }]
    });
    let seen = fire(worlds, &shots);
    !seen.iter().flatten().flatten().any(|seen| match seen {
        Seen::Answer(answer) | Seen::OneWay(answer) => answer.local == difference.backend,
        _ => false,
    })
}
