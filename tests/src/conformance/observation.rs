//! What a proxy made of a probe, without what is left to chance.

#![forbid(unsafe_code)]

use super::Probe;
use crate::probe::Seen;
use crate::world::WorldSpec;
use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// The source address that an endpoint saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    /// The client's own.
    Kept,
    /// An address of the node by which the packet may have left.
    Masqueraded,
    /// Something else.
    Other(IpAddr),
}

/// What became of one try. Ports of clients are left out: they are chosen by chance.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fate {
    /// It reached another address or port than its own.
    Served {
        /// Where it arrived.
        endpoint: SocketAddr,
        /// The source address seen there.
        source: Source,
        /// An answer came back. SCTP is observed one way only, so that this is always set there.
        answered: bool,
    },
    /// It reached its own destination, from its own address.
    Untouched,
    /// ICMP port unreachable, as nft's `reject` sends it.
    Rejected,
    /// Nothing came back, and it arrived nowhere.
    Dropped,
    /// A TCP reset.
    Reset,
    /// Another ICMP error.
    Unreachable {
        /// ICMP (ICMPv6) type.
        kind: u8,
        /// ICMP (ICMPv6) code.
        code: u8,
    },
    /// Something else.
    Other(String),
}

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Served { endpoint, source, answered } => {
                write!(f, "{endpoint}")?;
                match source {
                    Source::Kept => {}
                    Source::Masqueraded => f.write_str(" M")?,
                    Source::Other(ip) => write!(f, " from {ip}")?,
                }
                f.write_str(if *answered { "" } else { " (no way back)" })
            }
            Self::Untouched => f.write_str("untouched"),
            Self::Rejected => f.write_str("rejected"),
            Self::Dropped => f.write_str("dropped"),
            Self::Reset => f.write_str("TCP reset"),
            Self::Unreachable { kind, code } => write!(f, "ICMP error type {kind} code {code}"),
            Self::Other(text) => f.write_str(text),
        }
    }
}

/// What was seen in all tries of a probe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Observation {
    fates: BTreeMap<Fate, usize>,
}

impl Observation {
    /// What `seen` means for a probe in a world made from `world`.
    #[must_use]
    pub fn of(seen: &[Seen], world: &WorldSpec, probe: &Probe) -> Self {
        let mut all = Self::default();
        seen.iter().for_each(|s| all.add(s, world, probe));
        all
    }

    /// One more try.
    pub fn add(&mut self, seen: &Seen, world: &WorldSpec, probe: &Probe) {
        self.count(fate(seen, world, probe));
    }

    /// Counts one more try that ended like this.
    pub fn count(&mut self, fate: Fate) {
        *self.fates.entry(fate).or_default() += 1;
    }

    /// Number of tries.
    #[must_use]
    pub fn tries(&self) -> usize {
        self.fates.values().sum()
    }

    /// Each fate that was seen, in order.
    pub fn fates(&self) -> impl Iterator<Item = &Fate> {
        self.fates.keys()
    }

    /// Whether this fate was seen.
    #[must_use]
    pub fn has(&self, fate: &Fate) -> bool {
        self.fates.contains_key(fate)
    }

    /// How often this fate was seen.
    #[must_use]
    pub fn times(&self, fate: &Fate) -> usize {
        self.fates.get(fate).copied().unwrap_or_default()
    }
}

impl fmt::Display for Observation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.fates.is_empty() {
            return f.write_str("not tried");
        }
        for (index, (fate, times)) in self.fates.iter().enumerate() {
            write!(f, "{}{fate} ({times}×)", if index == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

fn fate(seen: &Seen, world: &WorldSpec, probe: &Probe) -> Fate {
    let (answer, answered) = match seen {
        Seen::Answer(answer) => (answer, true),
        Seen::OneWay(answer) => (answer, probe.proto == crate::probe::Proto::Sctp),
        seen if seen.is_port_unreachable() => return Fate::Rejected,
        Seen::Unreachable { kind, code } => return Fate::Unreachable { kind: *kind, code: *code },
        Seen::Reset => return Fate::Reset,
        Seen::Nothing => return Fate::Dropped,
        Seen::Other(text) => return Fate::Other(text.clone()),
    };
    let (endpoint, peer) = (answer.local, answer.peer.ip());
    let source = if peer == probe.source {
        Source::Kept
    } else {
        // What stays on the node leaves by `lo`: any address of the node may be taken for it.
        let possible = world.masquerade_addresses(endpoint.ip()).unwrap_or_else(|| world.local_addresses());
        if possible.contains(&peer) { Source::Masqueraded } else { Source::Other(peer) }
    };
    if endpoint == probe.to && source == Source::Kept && answered {
        return Fate::Untouched;
    }
    Fate::Served { endpoint, source, answered }
}

#[cfg(test)]
mod tests {
    use super::super::{Expected, Position};
    use super::*;
    use crate::probe::Proto;
    use crate::server::Answer;
    use crate::world::{Party, link};

    fn probe(proto: Proto) -> Probe {
        Probe {
            id: "p".into(),
            position: Position::Pod,
            party: "pod".into(),
            source: "10.0.0.2".parse().unwrap(),
            proto,
            to: "172.30.0.41:80".parse().unwrap(),
            expected: Expected::Untouched,
            services: Vec::new(),
            sticky: false,
        }
    }

    fn answer(local: &str, peer: &str) -> Answer {
        Answer { server: "s".into(), local: local.parse().unwrap(), peer: peer.parse().unwrap() }
    }

    #[test]
    fn what_was_seen_becomes_what_can_be_compared() {
        let world = WorldSpec {
            pods: vec![Party { name: "web".into(), device: None, addresses: vec!["10.0.0.9".parse().unwrap()] }],
            ..WorldSpec::default()
        };
        let masqueraded = format!("{}:40000", link::POD.0);
        let seen = [
            Seen::Answer(answer("10.0.0.9:8080", "10.0.0.2:1000")),
            Seen::Answer(answer("10.0.0.9:8080", "10.0.0.2:2000")),
            Seen::Answer(answer("10.0.0.9:8080", &masqueraded)),
            Seen::Answer(answer("10.0.0.9:8080", "10.9.9.9:2000")),
            Seen::OneWay(answer("10.0.0.9:8080", "10.0.0.2:2000")),
            Seen::Answer(answer("172.30.0.41:80", "10.0.0.2:1")),
            Seen::Unreachable { kind: 3, code: 3 },
            Seen::Unreachable { kind: 3, code: 1 },
            Seen::Nothing,
            Seen::Reset,
        ];
        let all = Observation::of(&seen, &world, &probe(Proto::Tcp));
        let endpoint = "10.0.0.9:8080".parse().unwrap();
        let served = |source, answered| Fate::Served { endpoint, source, answered };
        assert_eq!(all.times(&served(Source::Kept, true)), 2, "the client's port does not matter");
        for fate in [
            served(Source::Masqueraded, true),
            served(Source::Other("10.9.9.9".parse().unwrap()), true),
            served(Source::Kept, false),
            Fate::Untouched,
            Fate::Rejected,
            Fate::Unreachable { kind: 3, code: 1 },
            Fate::Dropped,
            Fate::Reset,
        ] {
            assert_eq!(all.times(&fate), 1, "{fate}");
        }
        assert_eq!(all.tries(), 10);
        let sctp = Observation::of(&seen[4..5], &world, &probe(Proto::Sctp));
        assert!(sctp.has(&served(Source::Kept, true)), "SCTP is never answered here: {sctp}");
    }
}
