//! Values that every part of Tandem shares: address family, transport protocol, and (later) the eBPF map ABI.
//!
//! This crate is `no_std`, has no dependencies and does no IO, so that the eBPF programs can use it too.
#![no_std]
#![forbid(unsafe_code)]

use core::fmt;

/// IP version of an address, a slice, or one of Tandem's two nftables tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum IpFamily {
    /// IPv4
    V4,
    /// IPv6
    V6,
}

impl IpFamily {
    /// Both families, IPv4 first.
    pub const ALL: [IpFamily; 2] = [IpFamily::V4, IpFamily::V6];

    /// The family of `address`.
    #[must_use]
    pub fn of(address: core::net::IpAddr) -> Self {
        match address {
            core::net::IpAddr::V4(_) => IpFamily::V4,
            core::net::IpAddr::V6(_) => IpFamily::V6,
        }
    }
}

/// As in the Kubernetes API and in the metric label `ip_family`: `IPv4`, `IPv6`.
impl fmt::Display for IpFamily {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IpFamily::V4 => "IPv4",
            IpFamily::V6 => "IPv6",
        })
    }
}

/// Transport protocol of a Service port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Protocol {
    /// TCP, IP protocol 6
    Tcp = 6,
    /// UDP, IP protocol 17
    Udp = 17,
    /// SCTP, IP protocol 132
    Sctp = 132,
}

impl Protocol {
    /// All protocols that a Service port may have.
    pub const ALL: [Protocol; 3] = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp];

    /// The protocol with this IP protocol number, if it is one of ours.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Protocol::ALL.into_iter().find(|p| *p as u8 == number)
    }

    /// Lower-case name, as nftables prints it: `tcp`, `udp`, `sctp`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
            Protocol::Sctp => "sctp",
        }
    }
}

/// As in the Kubernetes API: `TCP`, `UDP`, `SCTP`.
impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Protocol::Tcp => "TCP",
            Protocol::Udp => "UDP",
            Protocol::Sctp => "SCTP",
        })
    }
}
