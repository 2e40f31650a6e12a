//! Walks the first packet of a new connection through a table, as the kernel would.
//!
//! A random choice is followed in every direction, so the result is the set of all that may happen. Conntrack is empty before the
//! packet, affinity sets too, and there are no other tables.
#![forbid(unsafe_code)]

use super::expr::{Direction, Expr, Load};
use super::object::{BytesBuilder, Chain, ChainType, Data, Field, Hook, Key, Name, Rule, Ruleset, Verdict};
use crate::model::Packet;
use proxy_common::Protocol;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// What may happen to a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fate {
    /// Translated to this endpoint, perhaps with another source.
    Forward {
        /// The endpoint.
        to: SocketAddr,
        /// Source is rewritten.
        masquerade: bool,
    },
    /// Rejected with an ICMP error.
    Reject,
    /// Dropped.
    Drop,
    /// None of these; `masquerade`: but its source is rewritten.
    Untouched {
        /// Source is rewritten.
        masquerade: bool,
    },
}

/// All fates that `packet` may have. `local_addresses`: addresses of this host.
///
/// # Panics
/// If a rule has an expression that is not one of ours, or refers to a chain or set that does not exist or has another type.
#[must_use]
pub fn trace(ruleset: &Ruleset, local_addresses: &BTreeSet<IpAddr>, packet: &Packet<'_>) -> BTreeSet<Fate> {
    trace_across(ruleset, ruleset, usize::MAX, local_addresses, packet)
}

/// As [`trace`], for a packet that is on its way while a transaction turns `before` into `after`: at its event number `at`. Events are
/// entries of base chains and look-ups. As in the kernel, the packet walks the rules that were current when it entered the base
/// chain, and looks up elements that are current at the look-up (Linux: `nft_do_chain`, `nft_genmask_cur`).
///
/// # Panics
/// As [`trace`].
#[must_use]
pub fn trace_across(
    before: &Ruleset,
    after: &Ruleset,
    at: usize,
    local_addresses: &BTreeSet<IpAddr>,
    packet: &Packet<'_>,
) -> BTreeSet<Fate> {
    let walker = Walker { before, after, at, local_addresses };
    let start = State {
        interface: packet.interface.unwrap_or_default().to_owned(),
        source: packet.source,
        destination: packet.destination,
        protocol: packet.protocol,
        port: packet.port,
        mark: 0,
        translated: false,
        masquerade: false,
        events: 0,
        old_rules: true,
    };
    let mut fates = BTreeSet::new();
    let from_node = packet.interface.is_none();
    let entry = if from_node { Hook::Output } else { Hook::Prerouting };
    for state in walker.hook(entry, true, vec![start], &mut fates) {
        let to_node = walker.is_local(state.destination);
        let left = match (from_node, to_node) {
            // Out by the loopback device and in again; the nat chains of prerouting see no connection twice.
            (true, true) => {
                let out = walker.hook(Hook::Postrouting, true, vec![state], &mut fates);
                let looped = out.into_iter().map(|state| State { interface: "lo".to_owned(), ..state }).collect();
                let back = walker.hook(Hook::Prerouting, false, looped, &mut fates);
                walker.hook(Hook::Input, true, back, &mut fates)
            }
            (true, false) => walker.hook(Hook::Postrouting, true, vec![state], &mut fates),
            (false, true) => walker.hook(Hook::Input, true, vec![state], &mut fates),
            (false, false) => {
                let forwarded = walker.hook(Hook::Forward, true, vec![state], &mut fates);
                walker.hook(Hook::Postrouting, true, forwarded, &mut fates)
            }
        };
        fates.extend(left.into_iter().map(|state| match state.translated {
            true => Fate::Forward { to: SocketAddr::new(state.destination, state.port), masquerade: state.masquerade },
            false => Fate::Untouched { masquerade: state.masquerade },
        }));
    }
    fates
}

/// A packet on its way.
#[derive(Clone, Debug)]
struct State {
    interface: String,
    source: IpAddr,
    destination: IpAddr,
    protocol: Option<Protocol>,
    port: u16,
    mark: u32,
    translated: bool,
    masquerade: bool,
    events: usize,
    /// The base chain was entered before the commit.
    old_rules: bool,
}

/// How a packet leaves a rule or chain.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Exit {
    /// On to the next rule, or back to the caller at the end of a chain.
    Continue,
    Accept,
    Drop,
    Reject,
    Return,
    Jump(String),
    Goto(String),
}

impl From<&Verdict> for Exit {
    fn from(verdict: &Verdict) -> Self {
        match verdict {
            Verdict::Accept => Exit::Accept,
            Verdict::Drop => Exit::Drop,
            Verdict::Return => Exit::Return,
            Verdict::Jump(chain) => Exit::Jump(chain.to_string()),
            Verdict::Goto(chain) => Exit::Goto(chain.to_string()),
        }
    }
}

struct Walker<'a> {
    before: &'a Ruleset,
    after: &'a Ruleset,
    at: usize,
    local_addresses: &'a BTreeSet<IpAddr>,
}

impl Walker<'_> {
    /// `fib … type local`: all of 127.0.0.0/8 is local, not only the address on `lo`.
    fn is_local(&self, address: IpAddr) -> bool {
        address.is_loopback() || self.local_addresses.contains(&address)
    }

    /// All base chains of a hook by priority; `nat`: the nat ones too. Returns the packets that go on.
    fn hook(&self, hook: Hook, nat: bool, mut states: Vec<State>, fates: &mut BTreeSet<Fate>) -> Vec<State> {
        // Base chains are the same before and after.
        let mut chains: Vec<(i32, &Name)> = Vec::new();
        for (name, chain) in &self.before.chains {
            if let Some(base) = chain.base
                && base.hook == hook
                && (nat || base.chain_type != ChainType::Nat)
            {
                chains.push((base.priority, name));
            }
        }
        chains.sort_unstable();
        for (_, chain) in chains {
            for state in &mut states {
                state.old_rules = state.events < self.at;
                state.events += 1;
            }
            let mut passed = Vec::new();
            for (state, exit) in states.into_iter().flat_map(|state| self.named(chain, state)) {
                match exit {
                    Exit::Continue | Exit::Accept | Exit::Return => passed.push(state),
                    Exit::Drop => drop(fates.insert(Fate::Drop)),
                    Exit::Reject => drop(fates.insert(Fate::Reject)),
                    Exit::Jump(_) | Exit::Goto(_) => unreachable!("followed in the chain"),
                }
            }
            states = passed;
        }
        states
    }

    fn chain(&self, chain: &Chain, state: State) -> Vec<(State, Exit)> {
        let mut done = Vec::new();
        let mut states = vec![state];
        for rule in &chain.rules {
            let mut next = Vec::new();
            for (state, exit) in states.into_iter().flat_map(|state| self.rule(rule, state)) {
                match exit {
                    Exit::Continue => next.push(state),
                    Exit::Return => done.push((state, Exit::Continue)),
                    Exit::Goto(name) => done.extend(self.named(&name, state)),
                    Exit::Jump(name) => {
                        for (state, exit) in self.named(&name, state) {
                            if exit == Exit::Continue { next.push(state) } else { done.push((state, exit)) }
                        }
                    }
                    Exit::Accept | Exit::Drop | Exit::Reject => done.push((state, exit)),
                }
            }
            states = next;
        }
        done.extend(states.into_iter().map(|state| (state, Exit::Continue)));
        done
    }

    fn named(&self, name: &str, state: State) -> Vec<(State, Exit)> {
        let empty = Chain::default();
        let chain = match (self.before.chains.get(name), self.after.chains.get(name)) {
            (Some(chain), _) if state.old_rules => chain,
            // The chain is new: in the generation of this packet it has no rules yet.
            (None, Some(_)) if state.old_rules => &empty,
            (_, Some(chain)) => chain,
            _ => panic!("no chain {name}"),
        };
        self.chain(chain, state)
    }

    /// A rule ends early where something does not match; what it did to the packet before stays.
    fn rule(&self, rule: &Rule, state: State) -> Vec<(State, Exit)> {
        let mut done = Vec::new();
        let mut states = vec![state];
        for expr in &rule.exprs {
            let mut next = Vec::new();
            for state in states {
                for (state, step) in self.expr(expr, state) {
                    match step {
                        Some(Exit::Continue) => next.push(state),
                        Some(exit) => done.push((state, exit)),
                        None => done.push((state, Exit::Continue)),
                    }
                }
            }
            states = next;
        }
        done.extend(states.into_iter().map(|state| (state, Exit::Continue)));
        done
    }

    /// `None`: no match. `Some(Continue)`: on to the next expression.
    fn expr(&self, expr: &Expr, mut state: State) -> Vec<(State, Option<Exit>)> {
        let matched = |matched: bool| matched.then_some(Exit::Continue);
        let exit = match expr {
            Expr::CtStateNew => matched(true),
            Expr::CtStatusDnat => matched(state.translated),
            Expr::MarkHas(bit) => matched(state.mark & bit != 0),
            Expr::MarkSet(bit) => {
                state.mark |= bit;
                matched(true)
            }
            Expr::MarkToggle(bit) => {
                state.mark ^= bit;
                matched(true)
            }
            Expr::InNetwork { direction, network, negate } => {
                matched(network.contains(&address(&state, *direction)) != *negate)
            }
            Expr::InputInterface { name, prefix, negate } => {
                let found = if *prefix { state.interface.starts_with(&**name) } else { *state.interface == **name };
                matched(found != *negate)
            }
            Expr::FibLocal(direction) => matched(self.is_local(address(&state, *direction))),
            Expr::L4Proto(protocol) => matched(state.protocol == Some(*protocol)),
            Expr::InSet { loads, set, negate } => {
                return self.lookups(loads, set, state, |state, found| (state, matched(found.is_some() != *negate)));
            }
            Expr::VerdictMap { loads, map } => {
                return self.lookups(loads, map, state, |state, found| match found {
                    Some(Some(Data::Verdict(verdict))) => (state, Some(Exit::from(verdict))),
                    Some(_) => panic!("{map} is no verdict map"),
                    None => (state, None),
                });
            }
            Expr::OneIn(n) => {
                let mut branches = vec![(state.clone(), matched(true))];
                if *n > 1 {
                    branches.push((state, None));
                }
                return branches;
            }
            Expr::DnatMap { loads, map } => {
                return self.lookups(loads, map, state, |state, found| match found {
                    Some(Some(Data::Value(bytes))) => {
                        let (ip, port) = target(bytes);
                        (translated(state, ip, port), Some(Exit::Accept))
                    }
                    Some(_) => panic!("{map} is no map of addresses"),
                    None => (state, None),
                });
            }
            Expr::Dnat { address, port } => return vec![(translated(state, *address, *port), Some(Exit::Accept))],
            Expr::Masquerade { .. } => {
                state.masquerade = true;
                Some(Exit::Accept)
            }
            Expr::Foreign(what) => panic!("not one of ours: {what}"),
            Expr::UpdateSet(_) | Expr::Counter => matched(true),
            Expr::Reject => Some(Exit::Reject),
            Expr::Verdict(verdict) => Some(Exit::from(verdict)),
        };
        vec![(state, exit)]
    }

    /// Looks up every key that the loads may give.
    fn lookups<'s>(
        &'s self,
        loads: &[Load],
        set: &str,
        mut state: State,
        result: impl Fn(State, Option<Option<&'s Data>>) -> (State, Option<Exit>),
    ) -> Vec<(State, Option<Exit>)> {
        let numbers: Vec<u32> =
            match loads.iter().find_map(|load| if let Load::Random(n) = load { Some(*n) } else { None }) {
                Some(n) => (0..n).collect(),
                None => vec![0],
            };
        let known = [self.before, self.after].iter().any(|ruleset| ruleset.sets.contains_key(set));
        assert!(known, "no set {set}");
        let ruleset = if state.events < self.at { self.before } else { self.after };
        state.events += 1;
        let found =
            numbers.into_iter().map(|number| result(state.clone(), find(ruleset, set, &key(loads, &state, number))));
        found.collect()
    }
}

fn find<'a>(ruleset: &'a Ruleset, set: &str, key: &[u8]) -> Option<Option<&'a Data>> {
    // An affinity set that went with the commit has no elements.
    let definition = ruleset.sets.get(set)?;
    let lengths: Vec<usize> = definition.key.iter().map(|field| Field::length(*field, ruleset.table.family)).collect();
    assert_eq!(lengths.iter().sum::<usize>(), key.len(), "{set} has another key");
    let elements = ruleset.elements.get(set)?;
    if !definition.interval {
        return elements.get(&Key { start: key.into(), end: None }).map(|value| value.data.as_ref());
    }
    let inside = |range: &Key| {
        let end = range.end.as_ref().unwrap_or(&range.start);
        let mut at = 0;
        lengths.iter().all(|length| {
            let part = at..at + length;
            at += length;
            (&range.start[part.clone()]..=&end[part.clone()]).contains(&&key[part])
        })
    };
    elements.iter().find(|(range, _)| inside(range)).map(|(_, value)| value.data.as_ref())
}

fn address(state: &State, direction: Direction) -> IpAddr {
    match direction {
        Direction::Source => state.source,
        Direction::Destination => state.destination,
    }
}

fn translated(state: State, destination: IpAddr, port: u16) -> State {
    State { destination, port, translated: true, ..state }
}

fn key(loads: &[Load], state: &State, number: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    for load in loads {
        let part = match load {
            Load::SourceAddress => BytesBuilder::new().address(state.source).build(),
            Load::DestinationAddress => BytesBuilder::new().address(state.destination).build(),
            // Whatever other protocol it is, no set of ours has it.
            Load::L4Protocol => {
                state.protocol.map_or([0; 4].into(), |protocol| BytesBuilder::new().protocol(protocol).build())
            }
            Load::DestinationPort => BytesBuilder::new().port(state.port).build(),
            Load::Random(_) => BytesBuilder::new().random(number).build(),
        };
        bytes.extend_from_slice(&part);
    }
    bytes
}

/// Address and port of a value `address . port`.
fn target(bytes: &[u8]) -> (IpAddr, u16) {
    let (ip, port) = bytes.split_at(bytes.len() - 4);
    let ip = match ip.len() {
        4 => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(ip).expect("4 bytes"))),
        _ => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(ip).expect("an address has 4 or 16 bytes"))),
    };
    (ip, u16::from_be_bytes([port[0], port[1]]))
}
