//! Tables, chains, rules, sets, maps and elements: the nouns of nft(8), as plain data.
#![forbid(unsafe_code)]

use super::expr::Expr;
use proxy_common::IpFamily;
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

/// Name of a chain, set or map. Kernel limit: 255 bytes (`NFT_NAME_MAXLEN` = 256 with the final zero).
/// A keyword of nft(8) (`masquerade`, `reject`, `drop` …) makes a table that nft 1.0.6 lists but cannot load: names have a hyphen
/// or are no keyword.
pub type Name = Arc<str>;

/// A table of one family: `ip NAME` or `ip6 NAME`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TableId {
    /// `ip` or `ip6`
    pub family: IpFamily,
    /// Table name.
    pub name: Name,
}

/// `ip tandem`, `ip6 tandem`
impl fmt::Display for TableId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", if self.family == IpFamily::V4 { "ip" } else { "ip6" }, self.name)
    }
}

/// Netfilter hook of a base chain. Numbers: `enum nf_inet_hooks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Hook {
    /// prerouting
    Prerouting = 0,
    /// input
    Input = 1,
    /// forward
    Forward = 2,
    /// output
    Output = 3,
    /// postrouting
    Postrouting = 4,
}

/// Type of a base chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChainType {
    /// `type filter`
    Filter,
    /// `type nat`
    Nat,
    /// Only in what is read back: a base chain that Tandem does not make (another type or hook, a device, policy drop).
    Foreign,
}

/// What makes a chain a base chain. Policy is always the kernel's default, accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseChain {
    /// filter or nat
    pub chain_type: ChainType,
    /// Where it is hooked.
    pub hook: Hook,
    /// Priority: dstnat = −100, srcnat = 100.
    pub priority: i32,
}

/// A chain with its rules, in order.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Chain {
    /// Set for a base chain.
    pub base: Option<BaseChain>,
    /// Shown by `nft list`.
    pub comment: Option<String>,
    /// Rules in order.
    pub rules: Vec<Rule>,
}

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Rule {
    /// Expressions in order.
    pub exprs: Vec<Expr>,
    /// Shown by `nft list`; at most 128 bytes with its final zero (`NFTNL_UDATA_COMMENT_MAXLEN`).
    pub comment: Option<String>,
}

/// The type of one part of a set key or of map data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Field {
    /// `ipv4_addr` or `ipv6_addr`, by the table's family; 4 or 16 bytes in network order.
    Address,
    /// `inet_proto`; 1 byte.
    Protocol,
    /// `inet_service`; 2 bytes in network order.
    Port,
    /// The value of `numgen random mod 65536`; 4 bytes in host order. A set with this field is declared with `typeof`.
    Random,
}

impl Field {
    /// Bytes in a key or value, the padding to a multiple of 4 included.
    #[must_use]
    pub fn length(self, family: IpFamily) -> usize {
        match (self, family) {
            (Field::Address, IpFamily::V6) => 16,
            _ => 4,
        }
    }
}

/// What a map maps to; a plain set has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MapData {
    /// Verdict map.
    Verdict,
    /// Concatenation of these fields.
    Value(Vec<Field>),
}

/// Definition of a set or map, without elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Set {
    /// Key parts; more than one = concatenation. None in what is read back: a set of a shape that Tandem does not make.
    pub key: Vec<Field>,
    /// For maps.
    pub data: Option<MapData>,
    /// `flags interval`: elements may be networks. In a concatenation only the last part varies.
    pub interval: bool,
    /// `flags dynamic,timeout` with this timeout in ms: elements are added by rules. Their elements are not ours: never part of a plan.
    pub dynamic_timeout_ms: Option<u64>,
    /// Maximum number of elements.
    pub size: Option<u32>,
    /// Shown by `nft list`.
    pub comment: Option<String>,
    /// Not for interval sets. Elements that go are deleted one transaction (≥ 1 s) after the change (a commit is atomic per lookup, not per packet).
    pub delete_late: bool,
}

/// A key or value: each part in its own byte order, padded with zeros to a multiple of 4 bytes.
pub type Bytes = Box<[u8]>;

/// What a rule or a verdict map does with a packet.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verdict {
    /// accept
    Accept,
    /// drop
    Drop,
    /// return
    Return,
    /// jump CHAIN
    Jump(Name),
    /// goto CHAIN
    Goto(Name),
}

/// Data of a map element.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Data {
    /// In a verdict map.
    Verdict(Verdict),
    /// In any other map.
    Value(Bytes),
}

/// Key of an element. In interval sets `end` is always set, also for a single key, and is the last key of the range,
/// inclusive; in all others it is `None`. A range of an interval set with one key part is an address range.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The key, or the first key of a range.
    pub start: Bytes,
    /// The last key of a range.
    pub end: Option<Bytes>,
}

impl Key {
    /// Key of a set without `interval`.
    #[must_use]
    pub fn single(key: Bytes) -> Self {
        Self { start: key, end: None }
    }
    /// Key of an interval set, from the first to the last key of the range.
    #[must_use]
    pub fn range(start: Bytes, end: Bytes) -> Self {
        Self { start, end: Some(end) }
    }
}

/// The rest of an element.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Value {
    /// For maps.
    pub data: Option<Data>,
    /// Shown by `nft list`; cut to 127 bytes. Not compared by `diff`.
    pub comment: Option<String>,
    /// In sets with a timeout: what is left, in ms (read back from the kernel, and for imports).
    pub expires_ms: Option<u64>,
}

/// A whole table: what is wanted, or what the kernel holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ruleset {
    /// Family and name.
    pub table: TableId,
    /// Comment of the table.
    pub comment: Option<String>,
    /// Chains by name.
    pub chains: BTreeMap<Name, Chain>,
    /// Sets and maps by name.
    pub sets: BTreeMap<Name, Set>,
    /// Elements by set and key. Sets with `dynamic_timeout_ms` have none here unless asked for.
    pub elements: BTreeMap<Name, BTreeMap<Key, Value>>,
}

impl Ruleset {
    /// A table with nothing in it.
    #[must_use]
    pub fn empty(table: TableId) -> Self {
        Self { table, comment: None, chains: BTreeMap::new(), sets: BTreeMap::new(), elements: BTreeMap::new() }
    }
}

/// Builds keys and values.
#[derive(Default)]
pub struct BytesBuilder(Vec<u8>);

impl BytesBuilder {
    /// An empty key.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
    /// Adds [`Field::Address`].
    #[must_use]
    pub fn address(mut self, ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(ip) => self.0.extend(ip.octets()),
            IpAddr::V6(ip) => self.0.extend(ip.octets()),
        }
        self
    }
    /// Adds [`Field::Protocol`].
    #[must_use]
    pub fn protocol(mut self, protocol: proxy_common::Protocol) -> Self {
        self.0.extend([protocol as u8, 0, 0, 0]);
        self
    }
    /// Adds [`Field::Port`].
    #[must_use]
    pub fn port(mut self, port: u16) -> Self {
        let [a, b] = port.to_be_bytes();
        self.0.extend([a, b, 0, 0]);
        self
    }
    /// Adds [`Field::Random`].
    #[must_use]
    pub fn random(mut self, n: u32) -> Self {
        self.0.extend(n.to_ne_bytes());
        self
    }
    /// The bytes.
    #[must_use]
    pub fn build(self) -> Bytes {
        self.0.into()
    }
}
