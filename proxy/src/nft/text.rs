//! nft(8) syntax of rulesets and transactions, such that `nft -f` takes it.
#![forbid(unsafe_code)]

use super::expr::{Direction, Expr, Load};
use super::object::{
    BaseChain, Chain, ChainType, Data, Field, Hook, Key, MapData, Name, Rule, Ruleset, Set, Value, Verdict,
};
use super::transaction::{Op, Transaction};
use ipnet::IpNet;
use proxy_common::{IpFamily, Protocol};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::net::IpAddr;

#[cfg(test)]
mod tests;

/// Elements on one line; more are written one per line.
const INLINE_ELEMENTS: usize = 2;

/// The ruleset in the order and words of `nft list table`.
#[must_use]
pub fn ruleset(ruleset: &Ruleset) -> String {
    let family = ruleset.table.family;
    let mut out = format!("table {} {{\n", ruleset.table);
    if let Some(comment) = &ruleset.comment {
        let _ = writeln!(out, "\tcomment {}", quoted(comment));
    }
    let mut blocks = Vec::new();
    for (name, set) in &ruleset.sets {
        blocks.push(set_block(family, name, set, ruleset.elements.get(name)));
    }
    for (name, chain) in &ruleset.chains {
        blocks.push(chain_block(family, name, chain));
    }
    out + &blocks.join("\n") + "}\n"
}

fn set_block(family: IpFamily, name: &str, set: &Set, elements: Option<&BTreeMap<Key, Value>>) -> String {
    let mut out = format!("\t{} {name} {{\n", kind(set));
    for property in set_properties(family, set) {
        let _ = writeln!(out, "\t\t{property}");
    }
    if let Some(elements) = elements.filter(|elements| !elements.is_empty()) {
        let texts: Vec<String> = elements.iter().map(|(key, value)| element(family, set, key, Some(value))).collect();
        let _ = writeln!(
            out,
            "\t\telements = {{ {} }}",
            texts.join(if texts.len() > INLINE_ELEMENTS { ",\n\t\t\t     " } else { ", " })
        );
    }
    out + "\t}\n"
}

fn chain_block(family: IpFamily, name: &str, chain: &Chain) -> String {
    let mut out = format!("\tchain {name} {{\n");
    if let Some(comment) = &chain.comment {
        let _ = writeln!(out, "\t\tcomment {}", quoted(comment));
    }
    if let Some(base) = &chain.base {
        let _ = writeln!(out, "\t\t{} policy accept;", base_chain(base));
    }
    for rule in &chain.rules {
        let _ = writeln!(out, "\t\t{}", self::rule(family, rule));
    }
    out + "\t}\n"
}

/// The transaction as commands of nft(8), one per step. `sets` are the definitions of the sets that the transaction uses but
/// does not add; elements of a set that is in neither are shown in hexadecimal as a comment.
#[must_use]
pub fn transaction(transaction: &Transaction, sets: &BTreeMap<Name, Set>) -> String {
    let table = &transaction.table;
    let family = table.family;
    let mut added: BTreeMap<&Name, &Set> = sets.iter().collect();
    let mut out = String::new();
    for step in &transaction.steps {
        let line = match &step.op {
            Op::AddTable { comment: None } => format!("add table {table}"),
            Op::AddTable { comment: Some(comment) } => format!("add table {table} {{ comment {}; }}", quoted(comment)),
            Op::DeleteTable(id) => format!("delete table {id}"),
            Op::DestroyTable(id) => format!("add table {id}\ndelete table {id}"),
            Op::AddChain { name, base, comment } => {
                let base = base.as_ref().map(|base| format!(" {}", base_chain(base)));
                let comment = comment.as_ref().map(|comment| format!(" comment {};", quoted(comment)));
                let properties = base.unwrap_or_default() + &comment.unwrap_or_default();
                if properties.is_empty() {
                    format!("add chain {table} {name}")
                } else {
                    format!("add chain {table} {name} {{{properties} }}")
                }
            }
            Op::FlushChain(name) => format!("flush chain {table} {name}"),
            Op::DeleteChain(name) => format!("delete chain {table} {name}"),
            Op::AddRule { chain, rule } => format!("add rule {table} {chain} {}", self::rule(family, rule)),
            Op::DeleteRule { chain, handle } => format!("delete rule {table} {chain} handle {handle}"),
            Op::AddSet { name, set } => {
                added.insert(name, set);
                let properties: Vec<String> =
                    set_properties(family, set).into_iter().map(|property| property + ";").collect();
                format!("add {} {table} {name} {{ {} }}", kind(set), properties.join(" "))
            }
            Op::DeleteSet(name) => format!("delete {} {table} {name}", added.get(name).map_or("set", |set| kind(set))),
            Op::FlushSet(name) => format!("flush {} {table} {name}", added.get(name).map_or("set", |set| kind(set))),
            Op::AddElements { set, elements } => element_command(
                "add",
                transaction,
                set,
                added.get(set).copied(),
                elements.iter().map(|(key, value)| (key, Some(value))),
            ),
            Op::DeleteElements { set, keys } => {
                element_command("delete", transaction, set, added.get(set).copied(), keys.iter().map(|key| (key, None)))
            }
        };
        out += &line;
        out.push('\n');
    }
    out
}

fn element_command<'a>(
    verb: &str,
    transaction: &Transaction,
    name: &str,
    set: Option<&Set>,
    elements: impl Iterator<Item = (&'a Key, Option<&'a Value>)>,
) -> String {
    let table = &transaction.table;
    match set {
        Some(set) => {
            let texts: Vec<String> = elements.map(|(key, value)| element(table.family, set, key, value)).collect();
            if texts.is_empty() {
                return format!("# {verb} no element of {table} {name}");
            }
            format!(
                "{verb} element {table} {name} {{ {} }}",
                texts.join(if texts.len() > INLINE_ELEMENTS { ",\n\t" } else { ", " })
            )
        }
        None => {
            let keys: Vec<String> = elements.map(|(key, _)| hexadecimal(&key.start)).collect();
            format!("# {verb} element {table} {name} {{ {} }}", keys.join(", "))
        }
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold("0x".to_owned(), |text, byte| text + &format!("{byte:02x}"))
}

/// nft(8) has no way to write a quotation mark or a line break in a string.
fn quoted(text: &str) -> String {
    let text: String = text
        .chars()
        .map(|c| {
            if c == '"' {
                '\''
            } else if c.is_control() {
                ' '
            } else {
                c
            }
        })
        .collect();
    format!("\"{text}\"")
}

fn kind(set: &Set) -> &'static str {
    if set.data.is_some() { "map" } else { "set" }
}

fn set_properties(family: IpFamily, set: &Set) -> Vec<String> {
    let data = match &set.data {
        Some(MapData::Value(fields)) => fields.as_slice(),
        _ => &[],
    };
    if set.key.is_empty() {
        return vec!["# of a shape that Tandem does not use".to_owned()];
    }
    let type_of = set.key.contains(&Field::Random) || data.contains(&Field::Random);
    let all = |fields: &[Field]| {
        let names: Vec<&str> = fields
            .iter()
            .map(|field| if type_of { field_expression(family, *field) } else { field_type(family, *field) })
            .collect();
        names.join(" . ")
    };
    let key = all(&set.key);
    let to = match &set.data {
        None => String::new(),
        Some(MapData::Verdict) => " : verdict".to_owned(),
        Some(MapData::Value(fields)) => format!(" : {}", all(fields)),
    };
    let mut properties = vec![format!("{} {key}{to}", if type_of { "typeof" } else { "type" })];
    if let Some(size) = set.size {
        properties.push(format!("size {size}"));
    }
    if set.interval {
        properties.push("flags interval".to_owned());
    }
    if let Some(timeout) = set.dynamic_timeout_ms {
        properties.push("flags dynamic,timeout".to_owned());
        properties.push(format!("timeout {}", duration(timeout)));
    }
    if let Some(comment) = &set.comment {
        properties.push(format!("comment {}", quoted(comment)));
    }
    properties
}

fn field_type(family: IpFamily, field: Field) -> &'static str {
    match field {
        Field::Address if family == IpFamily::V4 => "ipv4_addr",
        Field::Address => "ipv6_addr",
        Field::Protocol => "inet_proto",
        Field::Port => "inet_service",
        Field::Random => "integer",
    }
}

fn field_expression(family: IpFamily, field: Field) -> &'static str {
    match field {
        Field::Address if family == IpFamily::V4 => "ip daddr",
        Field::Address => "ip6 daddr",
        Field::Protocol => "meta l4proto",
        Field::Port => "th dport",
        Field::Random => "numgen random mod 65536",
    }
}

/// `1d2h3m4s5ms`
fn duration(mut ms: u64) -> String {
    let mut out = String::new();
    for (unit, length) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)] {
        if ms >= length {
            let _ = write!(out, "{}{unit}", ms / length);
            ms %= length;
        }
    }
    if out.is_empty() { "0s".to_owned() } else { out }
}

/// An element as in a list of elements.
pub(super) fn element(family: IpFamily, set: &Set, key: &Key, value: Option<&Value>) -> String {
    let mut out = self::key(family, &set.key, key);
    let Some(value) = value else { return out };
    if let Some(expires) = value.expires_ms {
        let _ = write!(out, " expires {}", duration(expires));
    }
    if let Some(comment) = &value.comment {
        let _ = write!(out, " comment {}", quoted(comment));
    }
    match (&value.data, &set.data) {
        (Some(Data::Verdict(verdict)), _) => out += &format!(" : {}", self::verdict(verdict)),
        (Some(Data::Value(bytes)), Some(MapData::Value(fields))) => {
            out += &format!(" : {}", concatenation(family, fields, bytes))
        }
        (Some(Data::Value(bytes)), _) => out += &format!(" : {}", hexadecimal(bytes)),
        (None, _) => {}
    }
    out
}

/// The bytes of each part; the last ones are short if the key is.
fn split<'a>(family: IpFamily, fields: &'a [Field], mut bytes: &'a [u8]) -> impl Iterator<Item = (Field, &'a [u8])> {
    fields.iter().map(move |field| {
        let (part, rest) = bytes.split_at(field.length(family).min(bytes.len()));
        bytes = rest;
        (*field, part)
    })
}

fn concatenation(family: IpFamily, fields: &[Field], bytes: &[u8]) -> String {
    let parts: Vec<String> = split(family, fields, bytes).map(|(field, part)| field_value(field, part)).collect();
    parts.join(" . ")
}

fn key(family: IpFamily, fields: &[Field], key: &Key) -> String {
    let Some(end) = &key.end else { return concatenation(family, fields, &key.start) };
    let parts: Vec<String> = split(family, fields, &key.start)
        .zip(split(family, fields, end))
        .map(|((field, start), (_, end))| {
            if start == end {
                return field_value(field, start);
            }
            network(start, end).map_or_else(
                || format!("{}-{}", field_value(field, start), field_value(field, end)),
                |network| network.to_string(),
            )
        })
        .collect();
    parts.join(" . ")
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    <[u8; 4]>::try_from(bytes).map(IpAddr::from).or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

/// The network of these first and last addresses, if it is one.
fn network(start: &[u8], end: &[u8]) -> Option<IpNet> {
    let (start, end) = (ip(start)?, ip(end)?);
    let bits = |ip| match ip {
        IpAddr::V4(ip) => (u128::from(u32::from(ip)), 32),
        IpAddr::V6(ip) => (u128::from(ip), 128),
    };
    let ((first, width), (last, _)) = (bits(start), bits(end));
    let prefix = width - (128 - (first ^ last).leading_zeros());
    let network = IpNet::new(start, prefix as u8).ok()?;
    (network.network() == start && network.broadcast() == end).then_some(network)
}

fn field_value(field: Field, bytes: &[u8]) -> String {
    let number = |bytes: &[u8]| bytes.try_into().ok().map(u32::from_ne_bytes);
    let text = match (field, bytes) {
        (Field::Address, bytes) => ip(bytes).map(|ip| ip.to_string()),
        (Field::Protocol, [protocol, ..]) => Some(
            Protocol::from_number(*protocol)
                .map_or_else(|| protocol.to_string(), |protocol| protocol.name().to_owned()),
        ),
        (Field::Port, [high, low, ..]) => Some(u16::from_be_bytes([*high, *low]).to_string()),
        (Field::Random, bytes) => number(bytes).map(|number| number.to_string()),
        _ => None,
    };
    text.unwrap_or_else(|| hexadecimal(bytes))
}

/// The definition of a set in one line.
pub(super) fn set_definition(family: IpFamily, set: &Set) -> String {
    set_properties(family, set).join("; ")
}

/// What makes a base chain, or that it is none.
pub(super) fn base_chain_or_none(base: Option<&BaseChain>) -> String {
    base.map_or_else(|| "no base chain".to_owned(), base_chain)
}

fn base_chain(base: &BaseChain) -> String {
    let kind = match base.chain_type {
        ChainType::Filter => "filter",
        ChainType::Nat => "nat",
        ChainType::Foreign => "foreign",
    };
    let hook = match base.hook {
        Hook::Prerouting => "prerouting",
        Hook::Input => "input",
        Hook::Forward => "forward",
        Hook::Output => "output",
        Hook::Postrouting => "postrouting",
    };
    format!("type {kind} hook {hook} priority {};", base.priority)
}

fn verdict(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Accept => "accept".to_owned(),
        Verdict::Drop => "drop".to_owned(),
        Verdict::Return => "return".to_owned(),
        Verdict::Jump(chain) => format!("jump {chain}"),
        Verdict::Goto(chain) => format!("goto {chain}"),
    }
}

/// A rule with its comment.
#[must_use]
pub fn rule(family: IpFamily, rule: &Rule) -> String {
    let mut parts: Vec<String> = rule.exprs.iter().map(|expr| self::expr(family, expr)).collect();
    parts.extend(rule.comment.as_ref().map(|comment| format!("comment {}", quoted(comment))));
    parts.join(" ")
}

fn loads(family: IpFamily, loads: &[Load]) -> String {
    let parts: Vec<String> = loads
        .iter()
        .map(|load| match load {
            Load::SourceAddress => address(family, Direction::Source).to_owned(),
            Load::DestinationAddress => address(family, Direction::Destination).to_owned(),
            Load::L4Protocol => "meta l4proto".to_owned(),
            Load::DestinationPort => "th dport".to_owned(),
            Load::Random(modulus) => format!("numgen random mod {modulus}"),
        })
        .collect();
    parts.join(" . ")
}

fn address(family: IpFamily, direction: Direction) -> &'static str {
    match (family, direction) {
        (IpFamily::V4, Direction::Source) => "ip saddr",
        (IpFamily::V4, Direction::Destination) => "ip daddr",
        (IpFamily::V6, Direction::Source) => "ip6 saddr",
        (IpFamily::V6, Direction::Destination) => "ip6 daddr",
    }
}

fn expr(family: IpFamily, expr: &Expr) -> String {
    let not = |negate: bool| if negate { "!= " } else { "" };
    match expr {
        Expr::CtStateNew => "ct state new".to_owned(),
        Expr::CtStatusDnat => "ct status dnat".to_owned(),
        Expr::MarkHas(bit) => format!("meta mark & 0x{bit:08x} != 0x00000000"),
        Expr::MarkSet(bit) => format!("meta mark set meta mark | 0x{bit:08x}"),
        Expr::MarkToggle(bit) => format!("meta mark set meta mark ^ 0x{bit:08x}"),
        Expr::InNetwork { direction, network, negate } => {
            let whole = network.prefix_len() == network.max_prefix_len();
            let network = if whole { network.addr().to_string() } else { network.trunc().to_string() };
            format!("{} {}{network}", address(family, *direction), not(*negate))
        }
        Expr::InputInterface { name, prefix, negate } => {
            format!("iifname {}\"{name}{}\"", not(*negate), if *prefix { "*" } else { "" })
        }
        Expr::FibLocal(Direction::Source) => "fib saddr type local".to_owned(),
        Expr::FibLocal(Direction::Destination) => "fib daddr type local".to_owned(),
        Expr::L4Proto(protocol) => format!("meta l4proto {}", protocol.name()),
        Expr::InSet { loads, set, negate } => format!("{} {}@{set}", self::loads(family, loads), not(*negate)),
        Expr::VerdictMap { loads, map } => format!("{} vmap @{map}", self::loads(family, loads)),
        Expr::OneIn(modulus) => format!("numgen random mod {modulus} 0"),
        Expr::DnatMap { loads, map } => {
            format!(
                "dnat {} to {} map @{map}",
                if family == IpFamily::V4 { "ip" } else { "ip6" },
                self::loads(family, loads)
            )
        }
        Expr::Dnat { address: IpAddr::V4(address), port } => format!("dnat to {address}:{port}"),
        Expr::Dnat { address: IpAddr::V6(address), port } => format!("dnat to [{address}]:{port}"),
        Expr::Masquerade { ports: None } => "masquerade fully-random".to_owned(),
        Expr::Masquerade { ports: Some((min, max)) } => format!("masquerade to :{min}-{max} fully-random"),
        Expr::UpdateSet(set) => format!("update @{set} {{ {} }}", address(family, Direction::Source)),
        Expr::Counter => "counter".to_owned(),
        Expr::Reject => "reject".to_owned(),
        Expr::Verdict(verdict) => self::verdict(verdict),
        Expr::Foreign(what) => format!("# {what}"),
    }
}
