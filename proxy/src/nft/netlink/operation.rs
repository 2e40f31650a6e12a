//! The kernel's rule expressions, and how each [`Expr`] is made of them.
//!
//! nft(8) compiles `ip daddr . meta l4proto vmap @m` to register loads and a lookup; so does [`lower`]. [`raise`] goes back:
//! it recognises exactly the sequences that `lower` makes (and the equal ones that nft 1.0.6 makes), anything else becomes
//! [`Expr::Foreign`], so that a comparison sees a difference.
#![forbid(unsafe_code)]

use crate::nft::expr::{Direction, Expr, Load};
use crate::nft::object::{Name, Verdict};
use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use proxy_common::{IpFamily, Protocol};
use std::net::IpAddr;

/// Base of a payload load: `NFT_PAYLOAD_NETWORK_HEADER`, `NFT_PAYLOAD_TRANSPORT_HEADER`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    Network,
    Transport,
}

/// Keys of `meta`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meta {
    Mark,
    InputName,
    L4Protocol,
}

/// Keys of `ct`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ct {
    State,
    Status,
}

/// One expression of the kernel. Registers are counted in 32-bit words from `NFT_REG32_00` on, which is also `NFT_REG_1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    Payload {
        base: Base,
        offset: u32,
        len: u32,
        to: u32,
    },
    Meta {
        key: Meta,
        to: u32,
    },
    SetMark {
        from: u32,
    },
    Ct {
        key: Ct,
        to: u32,
    },
    /// `word[to] = (word[from] & mask) ^ xor`
    Bitwise {
        from: u32,
        to: u32,
        mask: Vec<u8>,
        xor: Vec<u8>,
    },
    Compare {
        register: u32,
        equal: bool,
        data: Vec<u8>,
    },
    Immediate {
        to: u32,
        data: Vec<u8>,
    },
    Verdict(Verdict),
    /// `to`: `None` = match only; `Some(None)` = verdict map; `Some(Some(word))` = data map.
    Lookup {
        from: u32,
        to: Option<Option<u32>>,
        set: Name,
        invert: bool,
    },
    DestinationNat {
        family: IpFamily,
        address: u32,
        port: u32,
    },
    Masquerade {
        fully_random: bool,
        ports: Option<(u32, u32)>,
    },
    Random {
        modulus: u32,
        to: u32,
    },
    /// `fib saddr|daddr type`
    FibType {
        direction: Direction,
        to: u32,
    },
    Update {
        set: Name,
        key: u32,
    },
    Counter,
    /// ICMP unreachable (type 0 of `enum nft_reject_types`) with this code.
    Reject {
        code: u8,
    },
    /// A byte order change that changes nothing: nft 1.0.6 puts one after `meta l4proto` in an interval concatenation.
    Nothing,
    /// What we never make, in words.
    Other(String),
}

/// `NF_CT_STATE_BIT(IP_CT_NEW)`
const CT_STATE_NEW: u32 = 8;
/// `IPS_DST_NAT`
const CT_STATUS_DNAT: u32 = 0x20;
/// `RTN_LOCAL`
const ROUTE_LOCAL: u32 = 2;
/// `IFNAMSIZ`
const INTERFACE_NAME_SIZE: usize = 16;
/// ICMP code of "port unreachable".
const PORT_UNREACHABLE_V4: u8 = 3;
const PORT_UNREACHABLE_V6: u8 = 4;
/// Word of `NFT_REG_2`.
const REGISTER_2: u32 = 4;

fn address_len(family: IpFamily) -> u32 {
    if family == IpFamily::V4 { 4 } else { 16 }
}

fn address_offset(family: IpFamily, direction: Direction) -> u32 {
    match (family, direction) {
        (IpFamily::V4, Direction::Source) => 12,
        (IpFamily::V4, Direction::Destination) => 16,
        (IpFamily::V6, Direction::Source) => 8,
        (IpFamily::V6, Direction::Destination) => 24,
    }
}

fn bytes_of(ip: IpAddr) -> Vec<u8> {
    match ip {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}

/// Word after a load that starts at `word`.
fn lower_load(family: IpFamily, load: Load, word: u32, out: &mut Vec<Operation>) -> u32 {
    let address = |direction| Operation::Payload {
        base: Base::Network,
        offset: address_offset(family, direction),
        len: address_len(family),
        to: word,
    };
    match load {
        Load::SourceAddress => out.push(address(Direction::Source)),
        Load::DestinationAddress => out.push(address(Direction::Destination)),
        Load::L4Protocol => out.push(Operation::Meta { key: Meta::L4Protocol, to: word }),
        Load::DestinationPort => out.push(Operation::Payload { base: Base::Transport, offset: 2, len: 2, to: word }),
        Load::Random(modulus) => out.push(Operation::Random { modulus, to: word }),
    }
    word + load_words(family, load)
}

fn load_words(family: IpFamily, load: Load) -> u32 {
    match load {
        Load::SourceAddress | Load::DestinationAddress => address_len(family) / 4,
        _ => 1,
    }
}

fn lower_loads(family: IpFamily, loads: &[Load], out: &mut Vec<Operation>) {
    loads.iter().fold(0, |word, load| lower_load(family, *load, word, out));
}

fn word(value: u32) -> Vec<u8> {
    value.to_ne_bytes().to_vec()
}

/// The kernel's expressions for one of ours in a table of this family.
///
/// # Errors
/// What cannot be expressed: an address of the other family, an interface name that is too long, a foreign expression.
pub fn lower(family: IpFamily, expr: &Expr, out: &mut Vec<Operation>) -> Result<(), String> {
    let of_family = |ip: IpAddr| {
        if ip.is_ipv4() == (family == IpFamily::V4) {
            Ok(bytes_of(ip))
        } else {
            Err(format!("{ip} in a table of the other family"))
        }
    };
    let test_bits = |bits: u32, out: &mut Vec<Operation>| {
        out.push(Operation::Bitwise { from: 0, to: 0, mask: word(bits), xor: word(0) });
        out.push(Operation::Compare { register: 0, equal: false, data: word(0) });
    };
    let change_mark = |mask: u32, xor: u32, out: &mut Vec<Operation>| {
        out.push(Operation::Meta { key: Meta::Mark, to: 0 });
        out.push(Operation::Bitwise { from: 0, to: 0, mask: word(mask), xor: word(xor) });
        out.push(Operation::SetMark { from: 0 });
    };
    match expr {
        Expr::CtStateNew => {
            out.push(Operation::Ct { key: Ct::State, to: 0 });
            test_bits(CT_STATE_NEW, out);
        }
        Expr::CtStatusDnat => {
            out.push(Operation::Ct { key: Ct::Status, to: 0 });
            test_bits(CT_STATUS_DNAT, out);
        }
        Expr::MarkHas(bit) => {
            out.push(Operation::Meta { key: Meta::Mark, to: 0 });
            test_bits(*bit, out);
        }
        Expr::MarkSet(bit) => change_mark(!bit, *bit, out),
        Expr::MarkToggle(bit) => change_mark(u32::MAX, *bit, out),
        Expr::InNetwork { direction, network, negate } => {
            let mut data = of_family(network.network())?;
            let offset = address_offset(family, *direction);
            let prefix = usize::from(network.prefix_len());
            // Whole bytes are loaded as such, as nft(8) does; it recognises both forms.
            let whole_bytes = prefix > 0 && prefix % 8 == 0;
            let len = if whole_bytes { prefix as u32 / 8 } else { address_len(family) };
            out.push(Operation::Payload { base: Base::Network, offset, len, to: 0 });
            data.truncate(len as usize);
            if !whole_bytes {
                let xor = vec![0; data.len()];
                out.push(Operation::Bitwise { from: 0, to: 0, mask: bytes_of(network.netmask()), xor });
            }
            out.push(Operation::Compare { register: 0, equal: !negate, data });
        }
        Expr::InputInterface { name, prefix, negate } => {
            let mut data = name.as_bytes().to_vec();
            if data.is_empty() || data.len() >= INTERFACE_NAME_SIZE {
                return Err(format!("interface name {name:?} must have 1 to {} bytes", INTERFACE_NAME_SIZE - 1));
            }
            if !prefix {
                data.resize(INTERFACE_NAME_SIZE, 0);
            }
            out.push(Operation::Meta { key: Meta::InputName, to: 0 });
            out.push(Operation::Compare { register: 0, equal: !negate, data });
        }
        Expr::FibLocal(direction) => {
            out.push(Operation::FibType { direction: *direction, to: 0 });
            out.push(Operation::Compare { register: 0, equal: true, data: word(ROUTE_LOCAL) });
        }
        Expr::L4Proto(protocol) => {
            out.push(Operation::Meta { key: Meta::L4Protocol, to: 0 });
            out.push(Operation::Compare { register: 0, equal: true, data: vec![*protocol as u8] });
        }
        Expr::InSet { loads, set, negate } => {
            lower_loads(family, loads, out);
            out.push(Operation::Lookup { from: 0, to: None, set: set.clone(), invert: *negate });
        }
        Expr::VerdictMap { loads, map } => {
            lower_loads(family, loads, out);
            out.push(Operation::Lookup { from: 0, to: Some(None), set: map.clone(), invert: false });
        }
        Expr::OneIn(modulus) => {
            out.push(Operation::Random { modulus: *modulus, to: 0 });
            out.push(Operation::Compare { register: 0, equal: true, data: word(0) });
        }
        Expr::DnatMap { loads, map } => {
            lower_loads(family, loads, out);
            out.push(Operation::Lookup { from: 0, to: Some(Some(0)), set: map.clone(), invert: false });
            out.push(Operation::DestinationNat { family, address: 0, port: address_len(family) / 4 });
        }
        Expr::Dnat { address, port } => {
            out.push(Operation::Immediate { to: 0, data: of_family(*address)? });
            out.push(Operation::Immediate { to: REGISTER_2, data: port.to_be_bytes().to_vec() });
            out.push(Operation::DestinationNat { family, address: 0, port: REGISTER_2 });
        }
        Expr::Masquerade { ports: None } => out.push(Operation::Masquerade { fully_random: true, ports: None }),
        Expr::Masquerade { ports: Some((min, max)) } => {
            out.push(Operation::Immediate { to: 0, data: min.to_be_bytes().to_vec() });
            out.push(Operation::Immediate { to: REGISTER_2, data: max.to_be_bytes().to_vec() });
            out.push(Operation::Masquerade { fully_random: true, ports: Some((0, REGISTER_2)) });
        }
        Expr::UpdateSet(set) => {
            lower_loads(family, &[Load::SourceAddress], out);
            out.push(Operation::Update { set: set.clone(), key: 0 });
        }
        Expr::Counter => out.push(Operation::Counter),
        Expr::Reject => {
            out.push(Operation::Reject {
                code: if family == IpFamily::V4 { PORT_UNREACHABLE_V4 } else { PORT_UNREACHABLE_V6 },
            });
        }
        Expr::Verdict(verdict) => out.push(Operation::Verdict(verdict.clone())),
        Expr::Foreign(text) => return Err(format!("a foreign expression cannot be programmed: {text}")),
    }
    Ok(())
}

/// Our expressions for a rule of the kernel.
#[must_use]
pub fn raise(family: IpFamily, operations: &[Operation]) -> Vec<Expr> {
    let operations: Vec<Operation> =
        operations.iter().filter(|operation| **operation != Operation::Nothing).cloned().collect();
    let mut rest = operations.as_slice();
    let mut exprs = Vec::new();
    while let Some(first) = rest.first() {
        let (expr, used) = raise_one(family, rest).unwrap_or_else(|| (Expr::Foreign(format!("{first:?}")), 1));
        exprs.push(expr);
        rest = &rest[used..];
    }
    exprs
}

fn as_word(data: &[u8]) -> Option<u32> {
    data.try_into().ok().map(u32::from_ne_bytes)
}

fn as_port(data: &[u8]) -> Option<u16> {
    data.try_into().ok().map(u16::from_be_bytes)
}

fn raise_address(data: &[u8]) -> Option<IpAddr> {
    <[u8; 4]>::try_from(data).map(IpAddr::from).or_else(|_| <[u8; 16]>::try_from(data).map(IpAddr::from)).ok()
}

fn raise_direction(family: IpFamily, offset: u32) -> Option<Direction> {
    [Direction::Source, Direction::Destination]
        .into_iter()
        .find(|direction| address_offset(family, *direction) == offset)
}

/// The expression with which the sequence begins, and of how many operations it is made.
fn raise_one(family: IpFamily, operations: &[Operation]) -> Option<(Expr, usize)> {
    use Operation as O;
    let fixed = match operations {
        [
            O::Ct { key, to: 0 },
            O::Bitwise { from: 0, to: 0, mask, xor },
            O::Compare { register: 0, equal: false, data },
            ..,
        ] if as_word(xor) == Some(0) && as_word(data) == Some(0) => match (key, as_word(mask)?) {
            (Ct::State, CT_STATE_NEW) => Some((Expr::CtStateNew, 3)),
            (Ct::Status, CT_STATUS_DNAT) => Some((Expr::CtStatusDnat, 3)),
            _ => None,
        },
        [
            O::Meta { key: Meta::Mark, to: 0 },
            O::Bitwise { from: 0, to: 0, mask, xor },
            O::Compare { register: 0, equal: false, data },
            ..,
        ] if as_word(xor) == Some(0) && as_word(data) == Some(0) => Some((Expr::MarkHas(as_word(mask)?), 3)),
        [O::Meta { key: Meta::Mark, to: 0 }, O::Bitwise { from: 0, to: 0, mask, xor }, O::SetMark { from: 0 }, ..] => {
            match (as_word(mask)?, as_word(xor)?) {
                (u32::MAX, bit) => Some((Expr::MarkToggle(bit), 3)),
                (mask, bit) if mask == !bit => Some((Expr::MarkSet(bit), 3)),
                _ => None,
            }
        }
        [O::FibType { direction, to: 0 }, O::Compare { register: 0, equal: true, data }, ..]
            if as_word(data) == Some(ROUTE_LOCAL) =>
        {
            Some((Expr::FibLocal(*direction), 2))
        }
        [O::Meta { key: Meta::L4Protocol, to: 0 }, O::Compare { register: 0, equal: true, data }, ..] => {
            match data.as_slice() {
                [number] => Protocol::from_number(*number).map(|protocol| (Expr::L4Proto(protocol), 2)),
                _ => None,
            }
        }
        [O::Meta { key: Meta::InputName, to: 0 }, O::Compare { register: 0, equal, data }, ..] => {
            raise_interface(data).map(|(name, prefix)| (Expr::InputInterface { name, prefix, negate: !equal }, 2))
        }
        [O::Random { modulus, to: 0 }, O::Compare { register: 0, equal: true, data }, ..]
            if as_word(data) == Some(0) =>
        {
            Some((Expr::OneIn(*modulus), 2))
        }
        [
            O::Immediate { to: 0, data: address },
            O::Immediate { to: REGISTER_2, data: port },
            O::DestinationNat { family: of, address: 0, port: REGISTER_2 },
            ..,
        ] if *of == family => Some((Expr::Dnat { address: raise_address(address)?, port: as_port(port)? }, 3)),
        [
            O::Immediate { to: 0, data: min },
            O::Immediate { to: REGISTER_2, data: max },
            O::Masquerade { fully_random: true, ports: Some((0, REGISTER_2)) },
            ..,
        ] => Some((Expr::Masquerade { ports: Some((as_port(min)?, as_port(max)?)) }, 3)),
        [O::Masquerade { fully_random: true, ports: None }, ..] => Some((Expr::Masquerade { ports: None }, 1)),
        [O::Counter, ..] => Some((Expr::Counter, 1)),
        [O::Reject { code }, ..] => {
            let ours = if family == IpFamily::V4 { PORT_UNREACHABLE_V4 } else { PORT_UNREACHABLE_V6 };
            (*code == ours).then_some((Expr::Reject, 1))
        }
        [O::Verdict(verdict), ..] => Some((Expr::Verdict(verdict.clone()), 1)),
        _ => None,
    };
    fixed.or_else(|| raise_network(family, operations)).or_else(|| raise_lookup(family, operations))
}

fn raise_interface(data: &[u8]) -> Option<(Name, bool)> {
    let prefix = data.len() < INTERFACE_NAME_SIZE;
    let end = data.iter().position(|byte| *byte == 0).unwrap_or(data.len());
    if (prefix && end != data.len()) || (!prefix && (end == data.len() || data[end..].iter().any(|byte| *byte != 0))) {
        return None;
    }
    std::str::from_utf8(&data[..end]).ok().map(|name| (name.into(), prefix))
}

fn raise_network(family: IpFamily, operations: &[Operation]) -> Option<(Expr, usize)> {
    use Operation as O;
    let (offset, prefix, data, equal, used) = match operations {
        [O::Payload { base: Base::Network, offset, len, to: 0 }, O::Compare { register: 0, equal, data }, ..]
            if *len as usize == data.len() =>
        {
            (*offset, len * 8, data, equal, 2)
        }
        [
            O::Payload { base: Base::Network, offset, len, to: 0 },
            O::Bitwise { from: 0, to: 0, mask, xor },
            O::Compare { register: 0, equal, data },
            ..,
        ] if *len == address_len(family)
            && mask.len() == *len as usize
            && data.len() == *len as usize
            && xor.iter().all(|byte| *byte == 0) =>
        {
            let prefix = mask.iter().map(|byte| byte.leading_ones()).sum::<u32>();
            let contiguous = mask.iter().enumerate().all(|(i, byte)| {
                let ones = prefix.saturating_sub(8 * i as u32).min(8);
                u32::from(*byte) == 0xff00 >> ones & 0xff
            });
            if !contiguous {
                return None;
            }
            (*offset, prefix, data, equal, 3)
        }
        _ => return None,
    };
    let direction = raise_direction(family, offset)?;
    let mut address = data.clone();
    if address.len() > address_len(family) as usize {
        return None;
    }
    address.resize(address_len(family) as usize, 0);
    let network = match raise_address(&address)? {
        IpAddr::V4(ip) => IpNet::V4(Ipv4Net::new(ip, prefix as u8).ok()?),
        IpAddr::V6(ip) => IpNet::V6(Ipv6Net::new(ip, prefix as u8).ok()?),
    };
    Some((Expr::InNetwork { direction, network, negate: !equal }, used))
}

/// Loads from word 0 on without a gap, then what uses them.
fn raise_lookup(family: IpFamily, operations: &[Operation]) -> Option<(Expr, usize)> {
    use Operation as O;
    let mut loads = Vec::new();
    let mut next = 0;
    for operation in operations {
        let (load, to) = match operation {
            O::Payload { base: Base::Network, offset, len, to } if *len == address_len(family) => {
                match raise_direction(family, *offset)? {
                    Direction::Source => (Load::SourceAddress, *to),
                    Direction::Destination => (Load::DestinationAddress, *to),
                }
            }
            O::Payload { base: Base::Transport, offset: 2, len: 2, to } => (Load::DestinationPort, *to),
            O::Meta { key: Meta::L4Protocol, to } => (Load::L4Protocol, *to),
            O::Random { modulus, to } => (Load::Random(*modulus), *to),
            _ => break,
        };
        if to != next {
            return None;
        }
        next += load_words(family, load);
        loads.push(load);
    }
    let used = loads.len();
    match &operations[used..] {
        [O::Lookup { from: 0, to: None, set, invert }, ..] => {
            Some((Expr::InSet { loads, set: set.clone(), negate: *invert }, used + 1))
        }
        [O::Lookup { from: 0, to: Some(None), set, invert: false }, ..] => {
            Some((Expr::VerdictMap { loads, map: set.clone() }, used + 1))
        }
        [
            O::Lookup { from: 0, to: Some(Some(0)), set, invert: false },
            O::DestinationNat { family: of, address: 0, port },
            ..,
        ] if *of == family && *port == address_len(family) / 4 => {
            Some((Expr::DnatMap { loads, map: set.clone() }, used + 2))
        }
        [O::Update { set, key: 0 }, ..] if loads == [Load::SourceAddress] => {
            Some((Expr::UpdateSet(set.clone()), used + 1))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nft::netlink::tests::sample;

    #[test]
    fn every_rule_is_raised_to_what_was_lowered() {
        for family in IpFamily::ALL {
            for rule in sample(family).chains.values().flat_map(|chain| &chain.rules) {
                let mut operations = Vec::new();
                for expr in &rule.exprs {
                    lower(family, expr, &mut operations).unwrap();
                }
                assert_eq!(raise(family, &operations), rule.exprs);
            }
        }
    }

    #[test]
    fn what_is_almost_ours_is_foreign() {
        let family = IpFamily::V4;
        let foreign =
            |operations: &[Operation]| raise(family, operations).iter().any(|expr| matches!(expr, Expr::Foreign(_)));
        let load = |to| Operation::Meta { key: Meta::L4Protocol, to };
        assert!(foreign(&[load(1), Operation::Lookup { from: 0, to: None, set: "s".into(), invert: false }]));
        assert!(foreign(&[load(0), Operation::Lookup { from: 1, to: None, set: "s".into(), invert: false }]));
        assert!(foreign(&[load(0), Operation::Compare { register: 0, equal: false, data: vec![6] }]));
        assert!(foreign(&[Operation::Reject { code: 1 }]));
        assert!(foreign(&[Operation::Masquerade { fully_random: false, ports: None }]));
        assert!(foreign(&[Operation::DestinationNat { family, address: 0, port: 1 }]));
        let bitwise = |mask: [u8; 4]| Operation::Bitwise { from: 0, to: 0, mask: mask.into(), xor: vec![0; 4] };
        let source = Operation::Payload { base: Base::Network, offset: 12, len: 4, to: 0 };
        let compare = Operation::Compare { register: 0, equal: true, data: vec![10, 0, 0, 0] };
        assert!(foreign(&[source.clone(), bitwise([255, 0, 255, 0]), compare.clone()]));
        assert!(!foreign(&[source, bitwise([255, 128, 0, 0]), compare]));
    }

    #[test]
    fn what_cannot_be_programmed_is_refused() {
        let refuse = |expr: Expr| lower(IpFamily::V4, &expr, &mut Vec::new()).unwrap_err();
        assert!(refuse(Expr::Dnat { address: "fd00::1".parse().unwrap(), port: 1 }).contains("other family"));
        assert!(
            refuse(Expr::InputInterface { name: "sixteen-bytes-xx".into(), prefix: false, negate: false })
                .contains("1 to 15")
        );
        assert!(refuse(Expr::Foreign("x".to_owned())).contains("foreign"));
    }
}
