//! User data of nft(8): comments and declarations that the kernel keeps for `nft list` and does not read.
//!
//! A sequence of (type: u8, length: u8, bytes), see libnftnl's `udata.h`; numbers are in host byte order.
#![forbid(unsafe_code)]

use crate::nft::object::{Field, MapData, Set};
use proxy_common::IpFamily;

/// `NFTNL_UDATA_{TABLE,CHAIN,RULE,SET_ELEM}_COMMENT`
pub const COMMENT: u8 = 0;
/// `NFTNL_UDATA_SET_COMMENT`
pub const SET_COMMENT: u8 = 7;
const SET_KEY_BYTE_ORDER: u8 = 0;
const SET_DATA_BYTE_ORDER: u8 = 1;
const SET_KEY_TYPEOF: u8 = 3;
const SET_DATA_TYPEOF: u8 = 4;
/// `NFTNL_UDATA_COMMENT_MAXLEN` (128) counts the final zero.
const COMMENT_MAX: usize = 127;

/// nft's `enum byteorder`: for a concatenation and for `inet_proto` it says "invalid".
const ORDER_NONE: u32 = 0;
const ORDER_BIG: u32 = 2;

// nft's `enum expr_types`, `enum proto_desc_id` and header fields (nftables 1.0.6, include/expression.h, include/proto.h):
// what `typeof` in a set declaration is stored as.
const EXPR_PAYLOAD: u32 = 7;
const EXPR_META: u32 = 9;
const EXPR_CONCAT: u32 = 13;
const EXPR_NUMGEN: u32 = 23;
const PROTO_TH: u32 = 11;
const PROTO_IP: u32 = 12;
const PROTO_IP6: u32 = 13;
const FIELD_TH_DPORT: u32 = 2;
const FIELD_IP_DADDR: u32 = 12;
const FIELD_IP6_DADDR: u32 = 9;
const META_L4PROTO: u32 = 16;
const NUMGEN_RANDOM: u32 = 1;
/// Modulus in the declaration of a set with [`Field::Random`].
pub const RANDOM_MODULUS: u32 = 65536;

/// Cut to what nft(8) takes, at a character.
#[must_use]
pub fn cut(comment: &str) -> &str {
    let mut end = comment.len().min(COMMENT_MAX);
    while !comment.is_char_boundary(end) {
        end -= 1;
    }
    &comment[..end]
}

fn put(out: &mut Vec<u8>, kind: u8, data: &[u8]) {
    let len = u8::try_from(data.len())
        .expect("comments are cut to 127 bytes, a typeof of at most 5 parts has fewer than 256");
    out.extend([kind, len]);
    out.extend(data);
}

fn put_number(out: &mut Vec<u8>, kind: u8, value: u32) {
    put(out, kind, &value.to_ne_bytes());
}

/// User data that holds a comment only.
#[must_use]
pub fn comment(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    put_comment(&mut out, COMMENT, text);
    out
}

fn put_comment(out: &mut Vec<u8>, kind: u8, text: &str) {
    let mut data = cut(text).as_bytes().to_vec();
    data.push(0);
    put(out, kind, &data);
}

/// The comment in user data; `kind` is [`COMMENT`] or [`SET_COMMENT`].
#[must_use]
pub fn find_comment(mut data: &[u8], kind: u8) -> Option<String> {
    while let [found, len, rest @ ..] = data {
        let value = rest.get(..usize::from(*len))?;
        if *found == kind {
            let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
            return std::str::from_utf8(&value[..end]).ok().map(str::to_owned);
        }
        data = &rest[value.len()..];
    }
    None
}

/// One expression of a `typeof`.
fn type_of(family: IpFamily, field: Field) -> Vec<u8> {
    let mut data = Vec::new();
    let kind = match field {
        Field::Address if family == IpFamily::V4 => {
            put_number(&mut data, 0, PROTO_IP);
            put_number(&mut data, 1, FIELD_IP_DADDR);
            EXPR_PAYLOAD
        }
        Field::Address => {
            put_number(&mut data, 0, PROTO_IP6);
            put_number(&mut data, 1, FIELD_IP6_DADDR);
            EXPR_PAYLOAD
        }
        Field::Port => {
            put_number(&mut data, 0, PROTO_TH);
            put_number(&mut data, 1, FIELD_TH_DPORT);
            EXPR_PAYLOAD
        }
        Field::Protocol => {
            put_number(&mut data, 0, META_L4PROTO);
            EXPR_META
        }
        Field::Random => {
            put_number(&mut data, 0, NUMGEN_RANDOM);
            put_number(&mut data, 1, RANDOM_MODULUS);
            put_number(&mut data, 2, 0);
            EXPR_NUMGEN
        }
    };
    let mut out = Vec::new();
    put_number(&mut out, 0, kind);
    put(&mut out, 1, &data);
    out
}

fn type_of_all(family: IpFamily, fields: &[Field]) -> Vec<u8> {
    if let [field] = fields {
        return type_of(family, *field);
    }
    let mut parts = Vec::new();
    for (number, field) in fields.iter().enumerate() {
        put(&mut parts, number as u8, &type_of(family, *field));
    }
    let mut out = Vec::new();
    put_number(&mut out, 0, EXPR_CONCAT);
    put(&mut out, 1, &parts);
    out
}

fn byte_order(fields: &[Field]) -> u32 {
    match fields {
        [Field::Address | Field::Port] => ORDER_BIG,
        _ => ORDER_NONE,
    }
}

/// User data of a set.
#[must_use]
pub fn set(family: IpFamily, set: &Set) -> Vec<u8> {
    let mut out = Vec::new();
    put_number(&mut out, SET_KEY_BYTE_ORDER, byte_order(&set.key));
    let data = match &set.data {
        Some(MapData::Value(fields)) => fields.as_slice(),
        Some(MapData::Verdict) | None => &[],
    };
    if set.data.is_some() {
        put_number(&mut out, SET_DATA_BYTE_ORDER, byte_order(data));
    }
    // A set with a part that has no named type is declared by `typeof`; nft(8) refuses to load it otherwise.
    if set.key.contains(&Field::Random) || data.contains(&Field::Random) {
        put(&mut out, SET_KEY_TYPEOF, &type_of_all(family, &set.key));
        if !data.is_empty() {
            put(&mut out, SET_DATA_TYPEOF, &type_of_all(family, data));
        }
    }
    if let Some(comment) = &set.comment {
        put_comment(&mut out, SET_COMMENT, comment);
    }
    out
}

#[cfg(all(test, target_endian = "little"))]
mod tests {
    use super::*;

    /// What nft 1.0.6 sends for `typeof ip daddr . meta l4proto . th dport . numgen random mod 65536 : ip daddr . th dport`
    /// with the comment "slots".
    const SLOTS: &str = "000400000000010400000000\
        036000040d000000015800140004070000000\
        10c00040c00000001040c000000010e000409000000010600041000000002140004070000\
        00010c00040b000000010402000000031a0004170000000112000401000000010400000100020400000000\
        043400040d000000012c001400040700000001\
        0c00040c00000001040c0000000114000407000000010c00040b000000010402000000\
        0706736c6f747300";

    #[test]
    fn a_set_declared_by_typeof_has_the_user_data_of_nft() {
        let set = Set {
            key: vec![Field::Address, Field::Protocol, Field::Port, Field::Random],
            data: Some(MapData::Value(vec![Field::Address, Field::Port])),
            interval: false,
            dynamic_timeout_ms: None,
            size: None,
            comment: Some("slots".to_owned()),
            delete_late: true,
        };
        let hexadecimal: String = super::set(IpFamily::V4, &set).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hexadecimal, SLOTS);
    }

    #[test]
    fn comments_are_cut_at_a_character_and_found_again() {
        let long = "é".repeat(100);
        let data = comment(&long);
        assert_eq!(data.len(), 2 + 126 + 1);
        assert_eq!(find_comment(&data, COMMENT), Some("é".repeat(63)));
        assert_eq!(find_comment(&[7, 200, 1], SET_COMMENT), None);
        assert_eq!(find_comment(&[], COMMENT), None);
    }
}
