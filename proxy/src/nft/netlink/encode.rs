//! From a transaction to the bytes of one netlink batch.
#![forbid(unsafe_code)]

use super::ffi::{self, Object, Scratch};
use super::operation::{self, Base, Ct, Meta, Operation};
use super::{Class, Error, userdata};
use crate::nft::expr::Direction;
use crate::nft::object::{BaseChain, ChainType, Data, Field, Key, MapData, Rule, Set, TableId, Value, Verdict};
use crate::nft::transaction::{Op, Transaction};
use nftnl_sys as sys;
use proxy_common::IpFamily;

/// An element list ends before this size: `nla_len` has 16 bits.
const ELEMENTS_MAX: usize = 60_000;
/// `NFT_RULE_MAXEXPRS`
const RULE_OPERATIONS_MAX: usize = 128;
/// `NFT_NAME_MAXLEN` without the final zero.
const NAME_MAX: usize = 255;
/// `NFT_DATA_VALUE_MAXLEN`
const VALUE_MAX: usize = 64;

// <linux/netfilter/nfnetlink.h>, <linux/netfilter/nf_tables.h>
const NFNL_MSG_BATCH_BEGIN: u16 = 0x10;
const NFNL_MSG_BATCH_END: u16 = 0x11;
const NFNL_BATCH_GENID: u16 = 1;
const NFNETLINK_V0: u8 = 0;
pub const NFT_SET_CONCAT: u32 = 0x80;
pub const NFT_BITWISE_BOOL: u32 = 0;
pub const DATA_TYPE_VERDICT: u32 = 0xffff_ff00;
pub const NFT_NUMGEN_RANDOM: u32 = 1;
pub const NFT_FIB_RESULT_ADDRTYPE: u32 = 3;
pub const NFTA_FIB_F_SADDR: u32 = 1;
pub const NFTA_FIB_F_DADDR: u32 = 2;
pub const NFT_DYNSET_OP_UPDATE: u32 = 1;
pub const NFT_NAT_DNAT: u32 = 1;
pub const NFT_REJECT_ICMP_UNREACH: u32 = 0;
pub const NFT_LOOKUP_F_INV: u32 = 1;
/// `NF_NAT_RANGE_PROTO_SPECIFIED`, `NF_NAT_RANGE_PROTO_RANDOM_FULLY`
pub const NAT_PROTO_SPECIFIED: u32 = 2;
pub const NAT_FULLY_RANDOM: u32 = 0x10;
/// Verdicts: `NF_DROP`, `NF_ACCEPT`, `NFT_JUMP`, `NFT_GOTO`, `NFT_RETURN`.
pub const VERDICT_DROP: i32 = 0;
pub const VERDICT_ACCEPT: i32 = 1;
pub const VERDICT_JUMP: i32 = -3;
pub const VERDICT_GOTO: i32 = -4;
pub const VERDICT_RETURN: i32 = -5;
/// nft's datatype numbers, 6 bits each in a concatenation.
pub const TYPE_BITS: u32 = 6;
pub const TYPE_INTEGER: u32 = 4;
pub const TYPE_IPV4: u32 = 7;
pub const TYPE_IPV6: u32 = 8;
pub const TYPE_INET_PROTO: u32 = 12;
pub const TYPE_INET_SERVICE: u32 = 13;

/// One message of a batch.
struct Message {
    start: usize,
    step: usize,
    /// Number of the first element of the step that is in this message.
    element: usize,
    /// Elements of an interval set without concatenation take two netlink elements (start, end) unless open at the end.
    elements: Vec<u8>,
}

/// A transaction as it is sent.
pub struct Batch {
    /// All messages, begin to end.
    pub data: Vec<u8>,
    messages: Vec<Message>,
    end_start: usize,
    first_seq: u32,
}

impl Batch {
    /// Sequence number of the message that asks for an acknowledgement: the last before the end.
    pub fn last_seq(&self) -> u32 {
        self.first_seq.wrapping_add(self.messages.len() as u32)
    }

    /// Sequence number of the begin message, on which errors of the whole batch are reported.
    pub fn first_seq(&self) -> u32 {
        self.first_seq
    }

    /// Number of sequence numbers used.
    pub fn sequence_numbers(&self) -> u32 {
        self.messages.len() as u32 + 2
    }

    /// Gives all messages new sequence numbers from this one on.
    pub fn renumber(&mut self, first_seq: u32) {
        self.first_seq = first_seq;
        let begin_and_rest =
            std::iter::once(0).chain(self.messages.iter().map(|message| message.start)).chain([self.end_start]);
        for (number, start) in begin_and_rest.enumerate() {
            self.data[start + 8..start + 12].copy_from_slice(&first_seq.wrapping_add(number as u32).to_ne_bytes());
        }
    }

    /// The step that the message with this sequence number belongs to.
    pub fn step(&self, seq: u32) -> Option<usize> {
        self.message(seq).map(|message| message.step)
    }

    fn message(&self, seq: u32) -> Option<&Message> {
        self.messages.get((seq.wrapping_sub(self.first_seq) as usize).checked_sub(1)?)
    }

    /// The element of its step at this offset of the message with this sequence number (`NLMSGERR_ATTR_OFFS`).
    pub fn element(&self, seq: u32, offset: usize) -> Option<usize> {
        let message = self.message(seq)?;
        let data = &self.data[message.start..];
        let end = u32::from_ne_bytes(data.get(..4)?.try_into().ok()?) as usize;
        // Header, nfgenmsg, then attributes; the elements are nested in NFTA_SET_ELEM_LIST_ELEMENTS.
        let mut at = 20;
        while at + 4 <= end && at < offset {
            let len = usize::from(u16::from_ne_bytes(data[at..at + 2].try_into().ok()?));
            let kind = u16::from_ne_bytes(data[at + 2..at + 4].try_into().ok()?) & 0x3fff;
            if kind == NFTA_SET_ELEM_LIST_ELEMENTS {
                let (mut inner, inner_end) = (at + 4, at + len);
                for halves in 0.. {
                    if inner + 4 > inner_end {
                        return None;
                    }
                    let len = usize::from(u16::from_ne_bytes(data[inner..inner + 2].try_into().ok()?));
                    if offset < inner + len {
                        return nth_element(&message.elements, halves).map(|element| message.element + element);
                    }
                    inner += len.next_multiple_of(4).max(4);
                }
            }
            at += len.next_multiple_of(4).max(4);
        }
        None
    }
}

const NFTA_SET_ELEM_LIST_ELEMENTS: u16 = 3;

fn nth_element(parts: &[u8], halves: usize) -> Option<usize> {
    let mut seen = 0;
    parts.iter().position(|count| {
        seen += usize::from(*count);
        halves < seen
    })
}

/// `AF_INET` or `AF_INET6`, which are also `NFPROTO_IPV4` and `NFPROTO_IPV6`.
pub fn protocol_family(family: IpFamily) -> u16 {
    if family == IpFamily::V4 { libc::AF_INET as u16 } else { libc::AF_INET6 as u16 }
}

/// Makes the batch. With `generation` the kernel refuses it (ERESTART) if another transaction came in between.
///
/// # Errors
/// A step that cannot be expressed; [`Class::Object`].
pub fn encode(transaction: &Transaction, first_seq: u32, generation: Option<u32>) -> Result<Batch, Error> {
    let mut encoder = Encoder {
        table: &transaction.table,
        batch: Batch { data: Vec::new(), messages: Vec::new(), end_start: 0, first_seq },
        scratch: Scratch::new(),
        step: 0,
        set_id: 0,
    };
    encoder.mark(NFNL_MSG_BATCH_BEGIN, first_seq, generation);
    for (number, step) in transaction.steps.iter().enumerate() {
        encoder.step = number;
        encoder.op(&step.op).map_err(|reason| Error {
            what: super::describe(&transaction.table, &step.op, None),
            service: step.service.clone(),
            step: Some(number),
            element: None,
            class: Class::Object,
            source: std::io::Error::new(std::io::ErrorKind::InvalidInput, reason),
        })?;
    }
    let mut batch = encoder.finish();
    if let Some(last) = batch.messages.last() {
        let flags = last.start + 6;
        let value = u16::from_ne_bytes([batch.data[flags], batch.data[flags + 1]]) | libc::NLM_F_ACK as u16;
        batch.data[flags..flags + 2].copy_from_slice(&value.to_ne_bytes());
    }
    Ok(batch)
}

struct Encoder<'a> {
    table: &'a TableId,
    batch: Batch,
    scratch: Scratch,
    step: usize,
    set_id: u32,
}

impl Encoder<'_> {
    /// Begin or end of the batch: a header, and `nfgenmsg` with the subsystem.
    fn mark(&mut self, kind: u16, seq: u32, generation: Option<u32>) {
        let len = 20 + if generation.is_some() { 8 } else { 0 };
        let out = &mut self.batch.data;
        out.extend(u32::to_ne_bytes(len));
        out.extend(kind.to_ne_bytes());
        out.extend((libc::NLM_F_REQUEST as u16).to_ne_bytes());
        out.extend(seq.to_ne_bytes());
        out.extend([0; 4]);
        out.extend([libc::AF_UNSPEC as u8, NFNETLINK_V0]);
        out.extend((libc::NFNL_SUBSYS_NFTABLES as u16).to_be_bytes());
        if let Some(generation) = generation {
            out.extend(8u16.to_ne_bytes());
            out.extend(NFNL_BATCH_GENID.to_ne_bytes());
            out.extend(generation.to_be_bytes());
        }
    }

    fn finish(mut self) -> Batch {
        let seq = self.batch.last_seq().wrapping_add(1);
        self.batch.end_start = self.batch.data.len();
        self.mark(NFNL_MSG_BATCH_END, seq, None);
        self.batch
    }

    fn message<K: ffi::Message>(&mut self, kind: i32, flags: i32, object: &mut Object<K>) {
        self.message_of(self.table.family, kind, flags, object, 0, Vec::new());
    }

    fn message_of<K: ffi::Message>(
        &mut self,
        family: IpFamily,
        kind: i32,
        flags: i32,
        object: &mut Object<K>,
        element: usize,
        elements: Vec<u8>,
    ) {
        let seq = self.batch.last_seq().wrapping_add(1);
        let start = self.batch.data.len();
        self.batch.messages.push(Message { start, step: self.step, element, elements });
        let message = self.scratch.build(kind as u16, protocol_family(family), flags as u16, seq, object);
        self.batch.data.extend_from_slice(message);
    }

    fn op(&mut self, op: &Op) -> Result<(), String> {
        match op {
            Op::AddTable { comment } => {
                let mut table = table_object(self.table)?;
                if let Some(comment) = comment {
                    table.set_bytes(sys::NFTNL_TABLE_USERDATA, &userdata::comment(comment));
                }
                self.message(libc::NFT_MSG_NEWTABLE, libc::NLM_F_CREATE, &mut table);
            }
            Op::DeleteTable(id) => {
                self.message_of(id.family, libc::NFT_MSG_DELTABLE, 0, &mut table_object(id)?, 0, Vec::new())
            }
            Op::DestroyTable(id) => {
                // NFT_MSG_DESTROYTABLE exists since Linux 6.3 only: make sure that it exists, then delete it.
                self.message_of(
                    id.family,
                    libc::NFT_MSG_NEWTABLE,
                    libc::NLM_F_CREATE,
                    &mut table_object(id)?,
                    0,
                    Vec::new(),
                );
                self.message_of(id.family, libc::NFT_MSG_DELTABLE, 0, &mut table_object(id)?, 0, Vec::new());
            }
            Op::AddChain { name, base, comment } => {
                let mut chain = self.chain_object(name)?;
                if let Some(base) = base {
                    set_base(&mut chain, base)?;
                }
                if let Some(comment) = comment {
                    chain.set_bytes(sys::NFTNL_CHAIN_USERDATA, &userdata::comment(comment));
                }
                self.message(libc::NFT_MSG_NEWCHAIN, libc::NLM_F_CREATE, &mut chain);
            }
            Op::FlushChain(name) => {
                let mut rule = self.rule_object(name)?;
                self.message(libc::NFT_MSG_DELRULE, 0, &mut rule);
            }
            Op::DeleteChain(name) => {
                let mut chain = self.chain_object(name)?;
                self.message(libc::NFT_MSG_DELCHAIN, 0, &mut chain);
            }
            Op::AddRule { chain, rule } => {
                let mut object = self.rule_object(chain)?;
                self.fill_rule(&mut object, rule)?;
                self.message(libc::NFT_MSG_NEWRULE, libc::NLM_F_CREATE | libc::NLM_F_APPEND, &mut object);
            }
            Op::DeleteRule { chain, handle } => {
                let mut rule = self.rule_object(chain)?;
                rule.set_number64(sys::NFTNL_RULE_HANDLE, *handle);
                self.message(libc::NFT_MSG_DELRULE, 0, &mut rule);
            }
            Op::AddSet { name, set } => {
                let mut object = self.set_object(name, set)?;
                self.message(libc::NFT_MSG_NEWSET, libc::NLM_F_CREATE, &mut object);
            }
            Op::DeleteSet(name) => {
                let mut object = Object::<ffi::Set>::new();
                object
                    .set_string(sys::NFTNL_SET_TABLE, &self.table.name)
                    .set_string(sys::NFTNL_SET_NAME, checked(name)?);
                self.message(libc::NFT_MSG_DELSET, 0, &mut object);
            }
            Op::FlushSet(name) => {
                let mut object = self.elements_object(name)?;
                self.message(libc::NFT_MSG_DELSETELEM, 0, &mut object);
            }
            Op::AddElements { set, elements } => {
                let elements = elements.iter().map(|(key, value)| (key, Some(value)));
                self.elements(set, libc::NFT_MSG_NEWSETELEM, libc::NLM_F_CREATE, elements)?;
            }
            Op::DeleteElements { set, keys } => {
                self.elements(set, libc::NFT_MSG_DELSETELEM, 0, keys.iter().map(|key| (key, None)))?;
            }
        }
        Ok(())
    }

    fn chain_object(&self, name: &str) -> Result<Object<ffi::Chain>, String> {
        let mut chain = Object::<ffi::Chain>::new();
        chain.set_string(sys::NFTNL_CHAIN_TABLE, &self.table.name).set_string(sys::NFTNL_CHAIN_NAME, checked(name)?);
        Ok(chain)
    }

    fn rule_object(&self, chain: &str) -> Result<Object<ffi::Rule>, String> {
        let mut rule = Object::<ffi::Rule>::new();
        rule.set_string(sys::NFTNL_RULE_TABLE, &self.table.name).set_string(sys::NFTNL_RULE_CHAIN, checked(chain)?);
        Ok(rule)
    }

    fn elements_object(&self, set: &str) -> Result<Object<ffi::Elements>, String> {
        let mut object = Object::<ffi::Elements>::new();
        object.set_string(sys::NFTNL_SET_TABLE, &self.table.name).set_string(sys::NFTNL_SET_NAME, checked(set)?);
        Ok(object)
    }

    fn fill_rule(&self, object: &mut Object<ffi::Rule>, rule: &Rule) -> Result<(), String> {
        let mut operations = Vec::new();
        for expr in &rule.exprs {
            operation::lower(self.table.family, expr, &mut operations)?;
        }
        if operations.len() > RULE_OPERATIONS_MAX {
            return Err(format!(
                "a rule of {} kernel expressions; at most {RULE_OPERATIONS_MAX} are possible",
                operations.len()
            ));
        }
        for operation in &operations {
            object.push(expression(operation)?);
        }
        if let Some(comment) = &rule.comment {
            object.set_bytes(sys::NFTNL_RULE_USERDATA, &userdata::comment(comment));
        }
        Ok(())
    }

    fn set_object(&mut self, name: &str, set: &Set) -> Result<Object<ffi::Set>, String> {
        let family = self.table.family;
        if set.key.is_empty() || set.key.len() > 5 {
            return Err("a set needs 1 to 5 key parts".to_owned());
        }
        self.set_id += 1;
        let mut flags = 0;
        let mut object = Object::<ffi::Set>::new();
        object
            .set_string(sys::NFTNL_SET_TABLE, &self.table.name)
            .set_string(sys::NFTNL_SET_NAME, checked(name)?)
            .set_number(sys::NFTNL_SET_FAMILY, u32::from(protocol_family(family)))
            .set_number(sys::NFTNL_SET_ID, self.set_id)
            .set_number(sys::NFTNL_SET_KEY_TYPE, type_number(family, &set.key))
            .set_number(sys::NFTNL_SET_KEY_LEN, key_len(family, &set.key));
        // The kernel takes a description of the parts together with NFT_SET_CONCAT only.
        if set.interval && set.key.len() > 1 {
            let lens: Vec<u8> = set.key.iter().map(|field| field_len(family, *field) as u8).collect();
            object.set_value(sys::NFTNL_SET_DESC_CONCAT, &lens);
        }
        match &set.data {
            None => {}
            Some(MapData::Verdict) => {
                flags |= libc::NFT_SET_MAP as u32;
                object.set_number(sys::NFTNL_SET_DATA_TYPE, DATA_TYPE_VERDICT).set_number(sys::NFTNL_SET_DATA_LEN, 0);
            }
            Some(MapData::Value(fields)) => {
                flags |= libc::NFT_SET_MAP as u32;
                object
                    .set_number(sys::NFTNL_SET_DATA_TYPE, type_number(family, fields))
                    .set_number(sys::NFTNL_SET_DATA_LEN, key_len(family, fields));
            }
        }
        if set.interval {
            flags |= libc::NFT_SET_INTERVAL as u32;
            if set.key.len() > 1 {
                flags |= NFT_SET_CONCAT;
            }
        }
        if let Some(timeout) = set.dynamic_timeout_ms {
            flags |= (libc::NFT_SET_TIMEOUT | libc::NFT_SET_EVAL) as u32;
            object.set_number64(sys::NFTNL_SET_TIMEOUT, timeout);
        }
        if let Some(size) = set.size {
            object.set_number(sys::NFTNL_SET_DESC_SIZE, size);
        }
        object.set_number(sys::NFTNL_SET_FLAGS, flags).set_bytes(sys::NFTNL_SET_USERDATA, &userdata::set(family, set));
        Ok(object)
    }

    fn elements<'k>(
        &mut self,
        set: &str,
        kind: i32,
        flags: i32,
        elements: impl Iterator<Item = (&'k Key, Option<&'k Value>)>,
    ) -> Result<(), String> {
        let mut object = self.elements_object(set)?;
        let (mut size, mut first, mut parts) = (0, 0, Vec::new());
        for (number, (key, value)) in elements.enumerate() {
            let cost =
                2 * (80 + key.start.len() + key.end.as_ref().map_or(0, |end| end.len())) + value.map_or(0, value_cost);
            if size + cost > ELEMENTS_MAX {
                self.message_of(self.table.family, kind, flags, &mut object, first, std::mem::take(&mut parts));
                object = self.elements_object(set)?;
                (size, first) = (0, number);
            }
            size += cost;
            parts.push(self.element(&mut object, key, value)?);
        }
        if !parts.is_empty() {
            self.message_of(self.table.family, kind, flags, &mut object, first, parts);
        }
        Ok(())
    }

    /// Adds an element; returns of how many netlink elements it is made.
    fn element(&self, object: &mut Object<ffi::Elements>, key: &Key, value: Option<&Value>) -> Result<u8, String> {
        if key.start.is_empty()
            || key.start.len() > VALUE_MAX
            || key.end.as_ref().is_some_and(|end| end.len() != key.start.len())
        {
            return Err(format!("a key has 1 to {VALUE_MAX} bytes and its end as many"));
        }
        let mut element = Object::<ffi::Element>::new();
        element.set_value(sys::NFTNL_SET_ELEM_KEY, &key.start);
        if let Some(value) = value {
            fill_element(&mut element, value)?;
        }
        let Some(end) = &key.end else {
            object.push(element);
            return Ok(1);
        };
        if !is_single_field(self.table.family, &key.start) {
            element.set_value(sys::NFTNL_SET_ELEM_KEY_END, end);
            object.push(element);
            return Ok(1);
        }
        // The kernel keeps a range of one field as two elements: its start, and the first key behind it.
        object.push(element);
        let Some(behind) = successor(end) else { return Ok(1) };
        let mut element = Object::<ffi::Element>::new();
        element
            .set_value(sys::NFTNL_SET_ELEM_KEY, &behind)
            .set_number(sys::NFTNL_SET_ELEM_FLAGS, libc::NFT_SET_ELEM_INTERVAL_END as u32);
        object.push(element);
        Ok(2)
    }
}

fn checked(name: &str) -> Result<&str, String> {
    if name.is_empty() || name.len() > NAME_MAX || name.contains('\0') {
        return Err(format!("a name has 1 to {NAME_MAX} bytes, none of them zero"));
    }
    Ok(name)
}

fn table_object(id: &TableId) -> Result<Object<ffi::Table>, String> {
    let mut table = Object::<ffi::Table>::new();
    table.set_string(sys::NFTNL_TABLE_NAME, checked(&id.name)?);
    Ok(table)
}

fn set_base(chain: &mut Object<ffi::Chain>, base: &BaseChain) -> Result<(), String> {
    let kind = match base.chain_type {
        ChainType::Filter => "filter",
        ChainType::Nat => "nat",
        ChainType::Foreign => return Err("a base chain of a foreign kind cannot be programmed".to_owned()),
    };
    chain
        .set_number(sys::NFTNL_CHAIN_HOOKNUM, base.hook as u32)
        .set_bytes(sys::NFTNL_CHAIN_PRIO, &base.priority.to_ne_bytes())
        .set_string(sys::NFTNL_CHAIN_TYPE, kind);
    Ok(())
}

/// Whether the key is one address, so that a range is kept in the kernel's `rbtree` set. No interval set of other single
/// parts, and no concatenation of this length in an interval set exists in our layout.
fn is_single_field(family: IpFamily, key: &[u8]) -> bool {
    key.len() == field_len(family, Field::Address)
}

/// The next key; `None` after the last one.
pub fn successor(key: &[u8]) -> Option<Vec<u8>> {
    let mut next = key.to_vec();
    for byte in next.iter_mut().rev() {
        let (sum, carry) = byte.overflowing_add(1);
        *byte = sum;
        if !carry {
            return Some(next);
        }
    }
    None
}

/// Bytes of a part, without padding.
pub fn field_len(family: IpFamily, field: Field) -> usize {
    match field {
        Field::Address if family == IpFamily::V4 => 4,
        Field::Address => 16,
        Field::Protocol => 1,
        Field::Port => 2,
        Field::Random => 4,
    }
}

/// Bytes of a key: a single part as it is, parts of a concatenation padded to words.
fn key_len(family: IpFamily, fields: &[Field]) -> u32 {
    match fields {
        [field] => field_len(family, *field) as u32,
        fields => fields.iter().map(|field| field_len(family, *field).next_multiple_of(4) as u32).sum(),
    }
}

fn type_number(family: IpFamily, fields: &[Field]) -> u32 {
    fields.iter().fold(0, |number, field| {
        let part = match field {
            Field::Address if family == IpFamily::V4 => TYPE_IPV4,
            Field::Address => TYPE_IPV6,
            Field::Protocol => TYPE_INET_PROTO,
            Field::Port => TYPE_INET_SERVICE,
            Field::Random => TYPE_INTEGER,
        };
        number << TYPE_BITS | part
    })
}

fn value_cost(value: &Value) -> usize {
    let data = match &value.data {
        None => 0,
        Some(Data::Value(bytes)) => 16 + bytes.len(),
        Some(Data::Verdict(Verdict::Jump(chain) | Verdict::Goto(chain))) => 40 + chain.len(),
        Some(Data::Verdict(_)) => 40,
    };
    data + value.comment.as_ref().map_or(0, |comment| 12 + comment.len().min(128))
}

/// Number and chain of a verdict.
fn verdict_parts(verdict: &Verdict) -> (i32, Option<&str>) {
    match verdict {
        Verdict::Accept => (VERDICT_ACCEPT, None),
        Verdict::Drop => (VERDICT_DROP, None),
        Verdict::Return => (VERDICT_RETURN, None),
        Verdict::Jump(chain) => (VERDICT_JUMP, Some(chain)),
        Verdict::Goto(chain) => (VERDICT_GOTO, Some(chain)),
    }
}

fn fill_element(element: &mut Object<ffi::Element>, value: &Value) -> Result<(), String> {
    match &value.data {
        None => {}
        Some(Data::Value(bytes)) => {
            if bytes.len() > VALUE_MAX {
                return Err(format!("a value has at most {VALUE_MAX} bytes"));
            }
            element.set_value(sys::NFTNL_SET_ELEM_DATA, bytes);
        }
        Some(Data::Verdict(verdict)) => {
            let (number, chain) = verdict_parts(verdict);
            element.set_bytes(sys::NFTNL_SET_ELEM_VERDICT, &number.to_ne_bytes());
            if let Some(chain) = chain {
                element.set_string(sys::NFTNL_SET_ELEM_CHAIN, checked(chain)?);
            }
        }
    }
    if let Some(expires) = value.expires_ms {
        element.set_number64(sys::NFTNL_SET_ELEM_EXPIRATION, expires);
    }
    if let Some(comment) = &value.comment {
        element.set_bytes(sys::NFTNL_SET_ELEM_USERDATA, &userdata::comment(comment));
    }
    Ok(())
}

/// Register number of a word: the 16-byte registers where one begins, as the kernel itself reports them.
fn register(word: u32) -> u32 {
    if word.is_multiple_of(4) { libc::NFT_REG_1 as u32 + word / 4 } else { libc::NFT_REG32_00 as u32 + word }
}

fn expression(operation: &Operation) -> Result<Object<ffi::Expression>, String> {
    let new = Object::expression;
    let expression = match operation {
        Operation::Payload { base, offset, len, to } => {
            let base = match base {
                Base::Network => libc::NFT_PAYLOAD_NETWORK_HEADER,
                Base::Transport => libc::NFT_PAYLOAD_TRANSPORT_HEADER,
            };
            let mut expression = new(c"payload");
            expression
                .set_number(sys::NFTNL_EXPR_PAYLOAD_DREG, register(*to))
                .set_number(sys::NFTNL_EXPR_PAYLOAD_BASE, base as u32)
                .set_number(sys::NFTNL_EXPR_PAYLOAD_OFFSET, *offset)
                .set_number(sys::NFTNL_EXPR_PAYLOAD_LEN, *len);
            expression
        }
        Operation::Meta { key, to } => {
            let key = match key {
                Meta::Mark => libc::NFT_META_MARK,
                Meta::InputName => libc::NFT_META_IIFNAME,
                Meta::L4Protocol => libc::NFT_META_L4PROTO,
            };
            let mut expression = new(c"meta");
            expression
                .set_number(sys::NFTNL_EXPR_META_KEY, key as u32)
                .set_number(sys::NFTNL_EXPR_META_DREG, register(*to));
            expression
        }
        Operation::SetMark { from } => {
            let mut expression = new(c"meta");
            expression
                .set_number(sys::NFTNL_EXPR_META_KEY, libc::NFT_META_MARK as u32)
                .set_number(sys::NFTNL_EXPR_META_SREG, register(*from));
            expression
        }
        Operation::Ct { key, to } => {
            let key = match key {
                Ct::State => libc::NFT_CT_STATE,
                Ct::Status => libc::NFT_CT_STATUS,
            };
            let mut expression = new(c"ct");
            expression
                .set_number(sys::NFTNL_EXPR_CT_KEY, key as u32)
                .set_number(sys::NFTNL_EXPR_CT_DREG, register(*to));
            expression
        }
        Operation::Bitwise { from, to, mask, xor } => {
            let mut expression = new(c"bitwise");
            expression
                .set_number(sys::NFTNL_EXPR_BITWISE_SREG, register(*from))
                .set_number(sys::NFTNL_EXPR_BITWISE_DREG, register(*to))
                .set_number(sys::NFTNL_EXPR_BITWISE_OP, NFT_BITWISE_BOOL)
                .set_number(sys::NFTNL_EXPR_BITWISE_LEN, mask.len() as u32)
                .set_value(sys::NFTNL_EXPR_BITWISE_MASK, mask)
                .set_value(sys::NFTNL_EXPR_BITWISE_XOR, xor);
            expression
        }
        Operation::Compare { register: from, equal, data } => {
            let mut expression = new(c"cmp");
            expression
                .set_number(sys::NFTNL_EXPR_CMP_SREG, register(*from))
                .set_number(sys::NFTNL_EXPR_CMP_OP, if *equal { libc::NFT_CMP_EQ } else { libc::NFT_CMP_NEQ } as u32)
                .set_value(sys::NFTNL_EXPR_CMP_DATA, data);
            expression
        }
        Operation::Immediate { to, data } => {
            let mut expression = new(c"immediate");
            expression.set_number(sys::NFTNL_EXPR_IMM_DREG, register(*to)).set_value(sys::NFTNL_EXPR_IMM_DATA, data);
            expression
        }
        Operation::Verdict(verdict) => {
            let (number, chain) = verdict_parts(verdict);
            let mut expression = new(c"immediate");
            expression
                .set_number(sys::NFTNL_EXPR_IMM_DREG, libc::NFT_REG_VERDICT as u32)
                .set_bytes(sys::NFTNL_EXPR_IMM_VERDICT, &number.to_ne_bytes());
            if let Some(chain) = chain {
                expression.set_string(sys::NFTNL_EXPR_IMM_CHAIN, checked(chain)?);
            }
            expression
        }
        Operation::Lookup { from, to, set, invert } => {
            let mut expression = new(c"lookup");
            expression
                .set_number(sys::NFTNL_EXPR_LOOKUP_SREG, register(*from))
                .set_string(sys::NFTNL_EXPR_LOOKUP_SET, checked(set)?);
            if let Some(to) = to {
                let to = to.map_or(libc::NFT_REG_VERDICT as u32, register);
                expression.set_number(sys::NFTNL_EXPR_LOOKUP_DREG, to);
            }
            if *invert {
                expression.set_number(sys::NFTNL_EXPR_LOOKUP_FLAGS, NFT_LOOKUP_F_INV);
            }
            expression
        }
        Operation::DestinationNat { family, address, port } => {
            let mut expression = new(c"nat");
            expression
                .set_number(sys::NFTNL_EXPR_NAT_TYPE, NFT_NAT_DNAT)
                .set_number(sys::NFTNL_EXPR_NAT_FAMILY, u32::from(protocol_family(*family)))
                .set_number(sys::NFTNL_EXPR_NAT_REG_ADDR_MIN, register(*address))
                .set_number(sys::NFTNL_EXPR_NAT_REG_PROTO_MIN, register(*port));
            expression
        }
        Operation::Masquerade { fully_random, ports } => {
            let mut flags = if *fully_random { NAT_FULLY_RANDOM } else { 0 };
            let mut expression = new(c"masq");
            if let Some((min, max)) = ports {
                flags |= NAT_PROTO_SPECIFIED;
                expression
                    .set_number(sys::NFTNL_EXPR_MASQ_REG_PROTO_MIN, register(*min))
                    .set_number(sys::NFTNL_EXPR_MASQ_REG_PROTO_MAX, register(*max));
            }
            expression.set_number(sys::NFTNL_EXPR_MASQ_FLAGS, flags);
            expression
        }
        Operation::Random { modulus, to } => {
            let mut expression = new(c"numgen");
            expression
                .set_number(sys::NFTNL_EXPR_NG_DREG, register(*to))
                .set_number(sys::NFTNL_EXPR_NG_MODULUS, *modulus)
                .set_number(sys::NFTNL_EXPR_NG_TYPE, NFT_NUMGEN_RANDOM)
                .set_number(sys::NFTNL_EXPR_NG_OFFSET, 0);
            expression
        }
        Operation::FibType { direction, to } => {
            let flags = match direction {
                Direction::Source => NFTA_FIB_F_SADDR,
                Direction::Destination => NFTA_FIB_F_DADDR,
            };
            let mut expression = new(c"fib");
            expression
                .set_number(sys::NFTNL_EXPR_FIB_FLAGS, flags)
                .set_number(sys::NFTNL_EXPR_FIB_RESULT, NFT_FIB_RESULT_ADDRTYPE)
                .set_number(sys::NFTNL_EXPR_FIB_DREG, register(*to));
            expression
        }
        Operation::Update { set, key } => {
            let mut expression = new(c"dynset");
            expression
                .set_number(sys::NFTNL_EXPR_DYNSET_OP, NFT_DYNSET_OP_UPDATE)
                .set_number(sys::NFTNL_EXPR_DYNSET_SREG_KEY, register(*key))
                .set_string(sys::NFTNL_EXPR_DYNSET_SET_NAME, checked(set)?);
            expression
        }
        Operation::Counter => {
            let mut expression = new(c"counter");
            expression.set_number64(sys::NFTNL_EXPR_CTR_PACKETS, 0).set_number64(sys::NFTNL_EXPR_CTR_BYTES, 0);
            expression
        }
        Operation::Reject { code } => {
            let mut expression = new(c"reject");
            expression
                .set_number(sys::NFTNL_EXPR_REJECT_TYPE, NFT_REJECT_ICMP_UNREACH)
                .set_bytes(sys::NFTNL_EXPR_REJECT_CODE, &[*code]);
            expression
        }
        Operation::Nothing | Operation::Other(_) => return Err("a foreign expression cannot be programmed".to_owned()),
    };
    Ok(expression)
}
