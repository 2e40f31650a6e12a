//! Classes of probes that a round must contain, counted from what kube-proxy did.

#![forbid(unsafe_code)]

use super::{Fate, Observation, Position, Probe, Source};
use crate::probe::Proto;
use std::collections::BTreeMap;
use std::fmt;

/// A kind of probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Reached an endpoint.
    Served,
    /// Reached an endpoint with another source address.
    Masqueraded,
    /// Rejected.
    Rejected,
    /// Dropped.
    Dropped,
    /// Left alone.
    Untouched,
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
    /// ICMP or ICMPv6 echo.
    Icmp,
    /// From this position.
    From(Position),
}

impl Class {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        use Class::{Dropped, Icmp, Ipv4, Ipv6, Masqueraded, Rejected, Sctp, Served, Tcp, Udp, Untouched};
        [Served, Masqueraded, Rejected, Dropped, Untouched, Ipv4, Ipv6, Tcp, Udp, Sctp, Icmp]
            .into_iter()
            .chain(Position::ALL.map(Class::From))
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Served => f.write_str("served"),
            Self::Masqueraded => f.write_str("masqueraded"),
            Self::Rejected => f.write_str("rejected"),
            Self::Dropped => f.write_str("dropped"),
            Self::Untouched => f.write_str("untouched"),
            Self::Ipv4 => f.write_str("IPv4"),
            Self::Ipv6 => f.write_str("IPv6"),
            Self::Tcp => f.write_str("TCP"),
            Self::Udp => f.write_str("UDP"),
            Self::Sctp => f.write_str("SCTP"),
            Self::Icmp => f.write_str("ICMP"),
            Self::From(position) => write!(f, "from: {position}"),
        }
    }
}

/// Number of probes of each class.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    counts: BTreeMap<Class, usize>,
    probes: usize,
}

impl Coverage {
    /// Counts a probe by what kube-proxy made of it.
    pub fn count(&mut self, probe: &Probe, kube_proxy: &Observation) {
        self.probes += 1;
        let served = |f: &Fate| matches!(f, Fate::Served { .. });
        let masqueraded = |f: &Fate| matches!(f, Fate::Served { source: Source::Masqueraded, .. });
        let protocol = match probe.proto {
            Proto::Tcp => Class::Tcp,
            Proto::Udp => Class::Udp,
            Proto::Sctp => Class::Sctp,
            Proto::Icmp => Class::Icmp,
        };
        let classes = [
            (Class::Served, kube_proxy.fates().any(served)),
            (Class::Masqueraded, kube_proxy.fates().any(masqueraded)),
            (Class::Rejected, kube_proxy.has(&Fate::Rejected)),
            (Class::Dropped, kube_proxy.has(&Fate::Dropped)),
            (Class::Untouched, kube_proxy.has(&Fate::Untouched)),
            (Class::Ipv4, probe.to.is_ipv4()),
            (Class::Ipv6, probe.to.is_ipv6()),
            (protocol, true),
            (Class::From(probe.position), true),
        ];
        for (class, _) in classes.into_iter().filter(|(_, is)| *is) {
            *self.counts.entry(class).or_default() += 1;
        }
    }

    /// Adds the counts of another.
    pub fn add(&mut self, other: &Self) {
        self.probes += other.probes;
        for (class, count) in &other.counts {
            *self.counts.entry(*class).or_default() += count;
        }
    }

    /// Number of probes.
    #[must_use]
    pub fn probes(&self) -> usize {
        self.probes
    }

    /// Number of probes of one class.
    #[must_use]
    pub fn of(&self, class: Class) -> usize {
        self.counts.get(&class).copied().unwrap_or_default()
    }

    /// Classes of which there was no probe.
    #[must_use]
    pub fn missing(&self) -> Vec<Class> {
        Class::all().filter(|class| self.of(*class) == 0).collect()
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} probes", self.probes)?;
        Class::all().try_for_each(|class| write!(f, ", {class} {}", self.of(class)))
    }
}
