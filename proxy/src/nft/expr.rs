//! Rule expressions, one variant per shape that Tandem's rules use.
//!
//! These are statements and matches as nft(8) prints them, not single kernel expressions: `netlink` turns each into the
//! kernel's register operations and back, `text` into nft syntax. A shape that is not listed here cannot be programmed.
#![forbid(unsafe_code)]

use super::object::{Name, Verdict};
use ipnet::IpNet;
use proxy_common::Protocol;
use std::net::IpAddr;

/// Something that is loaded into a register to be looked up; several make a concatenation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Load {
    /// `ip saddr` / `ip6 saddr`
    SourceAddress,
    /// `ip daddr` / `ip6 daddr`
    DestinationAddress,
    /// `meta l4proto`
    L4Protocol,
    /// `th dport`
    DestinationPort,
    /// `numgen random mod N`
    Random(u32),
}

/// Which address of the packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// saddr
    Source,
    /// daddr
    Destination,
}

/// One match or statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expr {
    /// `ct state new`
    CtStateNew,
    /// `ct status dnat`
    CtStatusDnat,
    /// `meta mark & BIT != 0`
    MarkHas(u32),
    /// `meta mark set meta mark | BIT`
    MarkSet(u32),
    /// `meta mark set meta mark ^ BIT` (after `MarkHas`: clears it)
    MarkToggle(u32),
    /// `ip saddr [!=] NETWORK`
    InNetwork {
        /// Which address.
        direction: Direction,
        /// Network, or a single address as /32 or /128.
        network: IpNet,
        /// `!=`
        negate: bool,
    },
    /// `iifname [!=] "NAME"`
    InputInterface {
        /// Interface name, at most 15 bytes.
        name: Name,
        /// `name` is a prefix: `"NAME*"`
        prefix: bool,
        /// `!=`
        negate: bool,
    },
    /// `fib saddr type local` / `fib daddr type local`
    FibLocal(Direction),
    /// `meta l4proto tcp`
    L4Proto(Protocol),
    /// `LOADS [!=] @SET`
    InSet {
        /// Key parts.
        loads: Vec<Load>,
        /// Set name.
        set: Name,
        /// `!=`
        negate: bool,
    },
    /// `LOADS vmap @MAP`
    VerdictMap {
        /// Key parts.
        loads: Vec<Load>,
        /// Verdict map name.
        map: Name,
    },
    /// `numgen random mod N 0`: true once in N.
    OneIn(u32),
    /// `dnat ip to LOADS map @MAP`; the map's data is address . port.
    DnatMap {
        /// Key parts.
        loads: Vec<Load>,
        /// Map name.
        map: Name,
    },
    /// `dnat ip to ADDRESS:PORT`
    Dnat {
        /// New destination address.
        address: IpAddr,
        /// New destination port.
        port: u16,
    },
    /// `masquerade fully-random`; with a range `masquerade to :MIN-MAX fully-random`
    Masquerade {
        /// Source ports that may be taken (inclusive); `None` = any.
        ports: Option<(u16, u16)>,
    },
    /// `update @SET { ip saddr }`
    UpdateSet(Name),
    /// `counter`
    Counter,
    /// `reject` (ICMP or ICMPv6 port unreachable for every protocol)
    Reject,
    /// accept, drop, return, jump, goto
    Verdict(Verdict),
    /// Only in what is read back: something that Tandem does not make, in words.
    Foreign(String),
}
