//! From the kernel's answers to our objects.
//!
//! What Tandem never makes is not an error (another program may have changed the table): it is read as something that differs
//! from every plan: [`Expr::Foreign`], [`ChainType::Foreign`], a set without key parts.
#![forbid(unsafe_code)]

use super::encode::{self, successor};
use super::ffi::{self, Borrowed, Object};
use super::operation::{self, Base, Ct, Meta, Operation};
use super::userdata;
use crate::nft::expr::{Direction, Expr};
use crate::nft::object::{
    BaseChain, Chain, ChainType, Data, Field, Hook, Key, MapData, Name, Rule, Set, TableId, Value, Verdict,
};
use nftnl_sys as sys;
use proxy_common::IpFamily;
use std::collections::BTreeMap;

/// `nfgen_family` of a message.
pub fn family(message: &[u8]) -> Option<IpFamily> {
    match i32::from(*message.get(16)?) {
        libc::AF_INET => Some(IpFamily::V4),
        libc::AF_INET6 => Some(IpFamily::V6),
        _ => None,
    }
}

/// The string attribute `kind` of an nfnetlink message.
pub fn string_attribute(message: &[u8], kind: u16) -> Option<&str> {
    let data = attribute(message, kind)?;
    std::str::from_utf8(data.split(|byte| *byte == 0).next()?).ok()
}

/// The 32-bit attribute `kind` (network order) of an nfnetlink message.
pub fn number_attribute(message: &[u8], kind: u16) -> Option<u32> {
    attribute(message, kind)?.try_into().ok().map(u32::from_be_bytes)
}

fn attribute(message: &[u8], kind: u16) -> Option<&[u8]> {
    let mut rest = message.get(20..)?;
    while let [a, b, c, d, ..] = rest {
        let len = usize::from(u16::from_ne_bytes([*a, *b]));
        let data = rest.get(4..len)?;
        if u16::from_ne_bytes([*c, *d]) & 0x3fff == kind {
            return Some(data);
        }
        rest = rest.get(len.next_multiple_of(4)..)?;
    }
    None
}

/// Table id and comment.
pub fn table(message: &[u8]) -> Option<(TableId, Option<String>)> {
    let table = ffi::parse::<ffi::Table>(message)?;
    let id = TableId { family: family(message)?, name: table.string(sys::NFTNL_TABLE_NAME)?.into() };
    let comment =
        table.bytes(sys::NFTNL_TABLE_USERDATA).and_then(|data| userdata::find_comment(data, userdata::COMMENT));
    Some((id, comment))
}

/// `NFTA_CHAIN_TABLE`, `NFTA_CHAIN_NAME`, `NFTA_CHAIN_TYPE`, `NFTA_SET_TABLE`, `NFTA_SET_NAME`
const CHAIN_TABLE: u16 = 1;
const CHAIN_NAME: u16 = 3;
const CHAIN_TYPE: u16 = 7;
const SET_TABLE: u16 = 1;
const SET_NAME: u16 = 2;
/// `NFT_CHAIN_BASE`
const CHAIN_FLAGS_OURS: u32 = 1;

/// A chain (without rules) of this table; `None` if it belongs to another one.
pub fn chain(message: &[u8], of: &TableId) -> Option<(Name, Chain)> {
    if family(message) != Some(of.family) || string_attribute(message, CHAIN_TABLE) != Some(&of.name) {
        return None;
    }
    let name = string_attribute(message, CHAIN_NAME)?.into();
    let Some(chain) = ffi::parse::<ffi::Chain>(message) else {
        return Some((name, Chain { base: Some(FOREIGN_BASE), ..Chain::default() }));
    };
    // Not through libnftnl, which says that this string has 4 bytes (1.2.4, `nftnl_chain_get_data`).
    let base = string_attribute(message, CHAIN_TYPE).map(|kind| base_chain(&chain, kind));
    let comment =
        chain.bytes(sys::NFTNL_CHAIN_USERDATA).and_then(|data| userdata::find_comment(data, userdata::COMMENT));
    Some((name, Chain { base, comment, rules: Vec::new() }))
}

const FOREIGN_BASE: BaseChain = BaseChain { chain_type: ChainType::Foreign, hook: Hook::Prerouting, priority: 0 };

fn base_chain(chain: &Object<ffi::Chain>, kind: &str) -> BaseChain {
    let hook = chain.number(sys::NFTNL_CHAIN_HOOKNUM).and_then(|number| {
        [Hook::Prerouting, Hook::Input, Hook::Forward, Hook::Output, Hook::Postrouting]
            .into_iter()
            .find(|hook| *hook as u32 == number)
    });
    let chain_type = match kind {
        "filter" => Some(ChainType::Filter),
        "nat" => Some(ChainType::Nat),
        _ => None,
    };
    let priority = chain.number(sys::NFTNL_CHAIN_PRIO).map(|priority| priority as i32);
    let accepts = chain.number(sys::NFTNL_CHAIN_POLICY).is_none_or(|policy| policy == libc::NF_ACCEPT as u32);
    let plain = chain.number(sys::NFTNL_CHAIN_FLAGS).unwrap_or(0) & !CHAIN_FLAGS_OURS == 0;
    match (hook, chain_type, priority) {
        (Some(hook), Some(chain_type), Some(priority)) if accepts && plain => BaseChain { chain_type, hook, priority },
        _ => FOREIGN_BASE,
    }
}

/// A rule, its chain and its handle.
pub fn rule(message: &[u8]) -> Option<(Name, u64, Rule)> {
    const RULE_CHAIN: u16 = 2;
    const RULE_HANDLE: u16 = 3;
    let chain = string_attribute(message, RULE_CHAIN)?.into();
    let handle = attribute(message, RULE_HANDLE)?.try_into().ok().map(u64::from_be_bytes)?;
    let Some(rule) = ffi::parse::<ffi::Rule>(message) else {
        return Some((
            chain,
            handle,
            Rule { exprs: vec![Expr::Foreign("a rule that libnftnl cannot read".to_owned())], comment: None },
        ));
    };
    let mut operations = Vec::new();
    rule.for_each(|expression| operations.push(operation(expression)));
    let comment = rule.bytes(sys::NFTNL_RULE_USERDATA).and_then(|data| userdata::find_comment(data, userdata::COMMENT));
    Some((chain, handle, Rule { exprs: operation::raise(family(message)?, &operations), comment }))
}

/// Word of a register number.
fn word(register: u32) -> Option<u32> {
    match register {
        1..=4 => Some((register - 1) * 4),
        8..=23 => Some(register - 8),
        _ => None,
    }
}

fn operation(expression: &Borrowed<'_, ffi::Expression>) -> Operation {
    let name = expression.string(sys::NFTNL_EXPR_NAME).unwrap_or_default();
    known_operation(&name, expression).unwrap_or(Operation::Other(name))
}

/// `None` for what Tandem does not make.
fn known_operation(name: &str, e: &Borrowed<'_, ffi::Expression>) -> Option<Operation> {
    let register = |attribute| e.number(attribute).and_then(word);
    let unset = |attribute| e.bytes(attribute).is_none();
    Some(match name {
        "payload" if unset(sys::NFTNL_EXPR_PAYLOAD_SREG) => Operation::Payload {
            base: match e.number(sys::NFTNL_EXPR_PAYLOAD_BASE)? as i32 {
                libc::NFT_PAYLOAD_NETWORK_HEADER => Base::Network,
                libc::NFT_PAYLOAD_TRANSPORT_HEADER => Base::Transport,
                _ => return None,
            },
            offset: e.number(sys::NFTNL_EXPR_PAYLOAD_OFFSET)?,
            len: e.number(sys::NFTNL_EXPR_PAYLOAD_LEN)?,
            to: register(sys::NFTNL_EXPR_PAYLOAD_DREG)?,
        },
        "meta" => {
            let key = e.number(sys::NFTNL_EXPR_META_KEY)? as i32;
            if unset(sys::NFTNL_EXPR_META_SREG) {
                let key = match key {
                    libc::NFT_META_MARK => Meta::Mark,
                    libc::NFT_META_IIFNAME => Meta::InputName,
                    libc::NFT_META_L4PROTO => Meta::L4Protocol,
                    _ => return None,
                };
                Operation::Meta { key, to: register(sys::NFTNL_EXPR_META_DREG)? }
            } else if key == libc::NFT_META_MARK {
                Operation::SetMark { from: register(sys::NFTNL_EXPR_META_SREG)? }
            } else {
                return None;
            }
        }
        "ct" if unset(sys::NFTNL_EXPR_CT_SREG) => Operation::Ct {
            key: match e.number(sys::NFTNL_EXPR_CT_KEY)? as i32 {
                libc::NFT_CT_STATE => Ct::State,
                libc::NFT_CT_STATUS => Ct::Status,
                _ => return None,
            },
            to: register(sys::NFTNL_EXPR_CT_DREG)?,
        },
        "bitwise" if e.number(sys::NFTNL_EXPR_BITWISE_OP).is_none_or(|op| op == encode::NFT_BITWISE_BOOL) => {
            Operation::Bitwise {
                from: register(sys::NFTNL_EXPR_BITWISE_SREG)?,
                to: register(sys::NFTNL_EXPR_BITWISE_DREG)?,
                mask: e.bytes(sys::NFTNL_EXPR_BITWISE_MASK)?.to_vec(),
                xor: e.bytes(sys::NFTNL_EXPR_BITWISE_XOR)?.to_vec(),
            }
        }
        "cmp" => Operation::Compare {
            register: register(sys::NFTNL_EXPR_CMP_SREG)?,
            equal: match e.number(sys::NFTNL_EXPR_CMP_OP)? as i32 {
                libc::NFT_CMP_EQ => true,
                libc::NFT_CMP_NEQ => false,
                _ => return None,
            },
            data: e.bytes(sys::NFTNL_EXPR_CMP_DATA)?.to_vec(),
        },
        "immediate" => match e.number(sys::NFTNL_EXPR_IMM_DREG)? {
            0 => Operation::Verdict(verdict(
                e.number(sys::NFTNL_EXPR_IMM_VERDICT)? as i32,
                e.string(sys::NFTNL_EXPR_IMM_CHAIN),
            )?),
            _ => Operation::Immediate {
                to: register(sys::NFTNL_EXPR_IMM_DREG)?,
                data: e.bytes(sys::NFTNL_EXPR_IMM_DATA)?.to_vec(),
            },
        },
        "lookup" => Operation::Lookup {
            from: register(sys::NFTNL_EXPR_LOOKUP_SREG)?,
            to: match e.number(sys::NFTNL_EXPR_LOOKUP_DREG) {
                None => None,
                Some(0) => Some(None),
                Some(register) => Some(Some(word(register)?)),
            },
            set: e.string(sys::NFTNL_EXPR_LOOKUP_SET)?.into(),
            invert: e.number(sys::NFTNL_EXPR_LOOKUP_FLAGS).unwrap_or(0) & encode::NFT_LOOKUP_F_INV != 0,
        },
        "nat" => {
            // The kernel adds the flags "addresses given" and "ports given" by itself.
            const IMPLIED: u32 = 1 | encode::NAT_PROTO_SPECIFIED;
            let same = |min, max| e.number(max).is_none_or(|max| Some(max) == e.number(min));
            if e.number(sys::NFTNL_EXPR_NAT_TYPE)? != encode::NFT_NAT_DNAT
                || e.number(sys::NFTNL_EXPR_NAT_FLAGS).unwrap_or(0) & !IMPLIED != 0
                || !same(sys::NFTNL_EXPR_NAT_REG_ADDR_MIN, sys::NFTNL_EXPR_NAT_REG_ADDR_MAX)
                || !same(sys::NFTNL_EXPR_NAT_REG_PROTO_MIN, sys::NFTNL_EXPR_NAT_REG_PROTO_MAX)
            {
                return None;
            }
            Operation::DestinationNat {
                family: match e.number(sys::NFTNL_EXPR_NAT_FAMILY)? as i32 {
                    libc::AF_INET => IpFamily::V4,
                    libc::AF_INET6 => IpFamily::V6,
                    _ => return None,
                },
                address: register(sys::NFTNL_EXPR_NAT_REG_ADDR_MIN)?,
                port: register(sys::NFTNL_EXPR_NAT_REG_PROTO_MIN)?,
            }
        }
        "masq" => {
            let flags = e.number(sys::NFTNL_EXPR_MASQ_FLAGS).unwrap_or(0) & !encode::NAT_PROTO_SPECIFIED;
            let ports =
                match (register(sys::NFTNL_EXPR_MASQ_REG_PROTO_MIN), register(sys::NFTNL_EXPR_MASQ_REG_PROTO_MAX)) {
                    (None, None) => None,
                    (Some(min), Some(max)) => Some((min, max)),
                    _ => return None,
                };
            if flags & !encode::NAT_FULLY_RANDOM != 0 {
                return None;
            }
            Operation::Masquerade { fully_random: flags != 0, ports }
        }
        "numgen"
            if e.number(sys::NFTNL_EXPR_NG_TYPE)? == encode::NFT_NUMGEN_RANDOM
                && e.number(sys::NFTNL_EXPR_NG_OFFSET).unwrap_or(0) == 0 =>
        {
            Operation::Random { modulus: e.number(sys::NFTNL_EXPR_NG_MODULUS)?, to: register(sys::NFTNL_EXPR_NG_DREG)? }
        }
        "fib" if e.number(sys::NFTNL_EXPR_FIB_RESULT)? == encode::NFT_FIB_RESULT_ADDRTYPE => Operation::FibType {
            direction: match e.number(sys::NFTNL_EXPR_FIB_FLAGS)? {
                encode::NFTA_FIB_F_SADDR => Direction::Source,
                encode::NFTA_FIB_F_DADDR => Direction::Destination,
                _ => return None,
            },
            to: register(sys::NFTNL_EXPR_FIB_DREG)?,
        },
        "dynset"
            if e.number(sys::NFTNL_EXPR_DYNSET_OP)? == encode::NFT_DYNSET_OP_UPDATE
                && unset(sys::NFTNL_EXPR_DYNSET_SREG_DATA)
                && unset(sys::NFTNL_EXPR_DYNSET_EXPR)
                && unset(sys::NFTNL_EXPR_DYNSET_EXPRESSIONS)
                && e.number64(sys::NFTNL_EXPR_DYNSET_TIMEOUT).unwrap_or(0) == 0 =>
        {
            Operation::Update {
                set: e.string(sys::NFTNL_EXPR_DYNSET_SET_NAME)?.into(),
                key: register(sys::NFTNL_EXPR_DYNSET_SREG_KEY)?,
            }
        }
        "counter" => Operation::Counter,
        "reject" if e.number(sys::NFTNL_EXPR_REJECT_TYPE)? == encode::NFT_REJECT_ICMP_UNREACH => {
            Operation::Reject { code: *e.bytes(sys::NFTNL_EXPR_REJECT_CODE)?.first()? }
        }
        // nft 1.0.6 converts `meta l4proto`, one byte, in units of two bytes: no byte changes.
        "byteorder" if e.number(sys::NFTNL_EXPR_BYTEORDER_LEN)? < e.number(sys::NFTNL_EXPR_BYTEORDER_SIZE)? => {
            Operation::Nothing
        }
        _ => return None,
    })
}

fn verdict(number: i32, chain: Option<String>) -> Option<Verdict> {
    match (number, chain) {
        (encode::VERDICT_ACCEPT, None) => Some(Verdict::Accept),
        (encode::VERDICT_DROP, None) => Some(Verdict::Drop),
        (encode::VERDICT_RETURN, None) => Some(Verdict::Return),
        (encode::VERDICT_JUMP, Some(chain)) => Some(Verdict::Jump(chain.into())),
        (encode::VERDICT_GOTO, Some(chain)) => Some(Verdict::Goto(chain.into())),
        _ => None,
    }
}

/// A set (without elements) of this table. Anonymous sets belong to their rule and are left out.
pub fn set(message: &[u8], of: &TableId) -> Option<(Name, Set)> {
    if family(message) != Some(of.family) || string_attribute(message, SET_TABLE) != Some(&of.name) {
        return None;
    }
    let name = string_attribute(message, SET_NAME)?.into();
    let Some(object) = ffi::parse::<ffi::Set>(message) else { return Some((name, foreign_set())) };
    if object.number(sys::NFTNL_SET_FLAGS).unwrap_or(0) & libc::NFT_SET_ANONYMOUS as u32 != 0 {
        return None;
    }
    Some((name, known_set(of.family, &object).unwrap_or_else(foreign_set)))
}

fn foreign_set() -> Set {
    Set {
        key: Vec::new(),
        data: None,
        interval: false,
        dynamic_timeout_ms: None,
        size: None,
        comment: None,
        delete_late: false,
    }
}

fn known_set(family: IpFamily, set: &Object<ffi::Set>) -> Option<Set> {
    const MAP: u32 = libc::NFT_SET_MAP as u32;
    const INTERVAL: u32 = libc::NFT_SET_INTERVAL as u32;
    const DYNAMIC: u32 = (libc::NFT_SET_TIMEOUT | libc::NFT_SET_EVAL) as u32;
    let flags = set.number(sys::NFTNL_SET_FLAGS).unwrap_or(0);
    let key = fields(family, set.number(sys::NFTNL_SET_KEY_TYPE)?)?;
    let data = match (flags & MAP, set.number(sys::NFTNL_SET_DATA_TYPE)) {
        (0, _) => None,
        (_, Some(encode::DATA_TYPE_VERDICT)) => Some(MapData::Verdict),
        (_, number) => Some(MapData::Value(fields(family, number?)?)),
    };
    let interval = flags & INTERVAL != 0;
    let timeout = set.number64(sys::NFTNL_SET_TIMEOUT).filter(|timeout| *timeout != 0);
    let dynamic_timeout_ms = match (flags & DYNAMIC, timeout) {
        (0, None) => None,
        (DYNAMIC, Some(timeout)) => Some(timeout),
        _ => return None,
    };
    let concat = if interval && key.len() > 1 { encode::NFT_SET_CONCAT } else { 0 };
    if flags & !(MAP | INTERVAL | DYNAMIC) != concat {
        return None;
    }
    let userdata = set.bytes(sys::NFTNL_SET_USERDATA).unwrap_or_default();
    Some(Set {
        key,
        data,
        interval,
        dynamic_timeout_ms,
        size: set.number(sys::NFTNL_SET_DESC_SIZE).filter(|size| *size != 0),
        comment: userdata::find_comment(userdata, userdata::SET_COMMENT),
        delete_late: false,
    })
}

fn fields(family: IpFamily, mut number: u32) -> Option<Vec<Field>> {
    let mut fields = Vec::new();
    while number != 0 {
        fields.push(match number & ((1 << encode::TYPE_BITS) - 1) {
            encode::TYPE_IPV4 if family == IpFamily::V4 => Field::Address,
            encode::TYPE_IPV6 if family == IpFamily::V6 => Field::Address,
            encode::TYPE_INET_PROTO => Field::Protocol,
            encode::TYPE_INET_SERVICE => Field::Port,
            encode::TYPE_INTEGER => Field::Random,
            _ => return None,
        });
        number >>= encode::TYPE_BITS;
    }
    fields.reverse();
    (!fields.is_empty()).then_some(fields)
}

/// Collects the elements of one set over the messages of a dump.
pub struct Elements {
    /// `flags interval` with a single key part.
    ranges: bool,
    /// `flags interval` with several key parts.
    concatenated_ranges: bool,
    found: BTreeMap<Key, Value>,
    /// Starts and ends (first key behind) of ranges.
    starts: BTreeMap<Vec<u8>, Value>,
    ends: std::collections::BTreeSet<Vec<u8>>,
}

impl Elements {
    pub fn new(set: &Set) -> Self {
        let several = set.key.len() > 1;
        Self {
            ranges: set.interval && !several,
            concatenated_ranges: set.interval && several,
            found: BTreeMap::new(),
            starts: BTreeMap::new(),
            ends: std::collections::BTreeSet::new(),
        }
    }

    /// Adds what one message holds; `None` if libnftnl cannot read it.
    pub fn add(&mut self, message: &[u8]) -> Option<()> {
        let object = ffi::parse::<ffi::Elements>(message)?;
        object.for_each(|element| self.element(element));
        Some(())
    }

    fn element(&mut self, element: &Borrowed<'_, ffi::Element>) {
        let Some(key) = element.bytes(sys::NFTNL_SET_ELEM_KEY) else { return };
        if element.number(sys::NFTNL_SET_ELEM_FLAGS).unwrap_or(0) & libc::NFT_SET_ELEM_INTERVAL_END as u32 != 0 {
            self.ends.insert(key.to_vec());
            return;
        }
        let verdict_number = element.number(sys::NFTNL_SET_ELEM_VERDICT);
        let data = match verdict_number {
            Some(number) => verdict(number as i32, element.string(sys::NFTNL_SET_ELEM_CHAIN)).map(Data::Verdict),
            None => element.bytes(sys::NFTNL_SET_ELEM_DATA).map(|data| Data::Value(data.into())),
        };
        let comment = element
            .bytes(sys::NFTNL_SET_ELEM_USERDATA)
            .and_then(|data| userdata::find_comment(data, userdata::COMMENT));
        let value = Value { data, comment, expires_ms: element.number64(sys::NFTNL_SET_ELEM_EXPIRATION) };
        if self.ranges {
            self.starts.insert(key.to_vec(), value);
        } else {
            let end =
                self.concatenated_ranges.then(|| element.bytes(sys::NFTNL_SET_ELEM_KEY_END).unwrap_or(key).into());
            self.found.insert(Key { start: key.into(), end }, value);
        }
    }

    /// All elements.
    pub fn finish(mut self) -> BTreeMap<Key, Value> {
        for (start, value) in self.starts {
            // Ranges do not overlap: the end of one is the next end in order.
            let behind = self.ends.range((std::ops::Bound::Excluded(start.clone()), std::ops::Bound::Unbounded)).next();
            let end = behind.map_or_else(|| vec![0xff; start.len()], |behind| predecessor(behind));
            debug_assert!(behind.is_none_or(|behind| successor(&end).as_ref() == Some(behind)));
            self.found.insert(Key { start: start.into(), end: Some(end.into()) }, value);
        }
        self.found
    }
}

fn predecessor(key: &[u8]) -> Vec<u8> {
    let mut previous = key.to_vec();
    for byte in previous.iter_mut().rev() {
        let (difference, borrow) = byte.overflowing_sub(1);
        *byte = difference;
        if !borrow {
            break;
        }
    }
    previous
}

/// Whether a rule jumps or goes to a chain, and to which.
pub fn targets(rule: &Rule) -> Vec<Name> {
    rule.exprs
        .iter()
        .filter_map(|expr| match expr {
            Expr::Verdict(Verdict::Jump(chain) | Verdict::Goto(chain)) => Some(chain.clone()),
            _ => None,
        })
        .collect()
}
