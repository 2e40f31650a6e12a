//! The kernel's nf_tables over netlink.
//!
//! [`Connection`] is the only way to the kernel. A transaction is encoded by libnftnl (`ffi`, the only unsafe code; `encode`,
//! `decode`), expressions are lowered and raised by `operation`, user data of nft(8) is written by `userdata`, and `socket`
//! carries it: netlink-sys, since a batch must go out by one `sendmsg` whatever its size and mnl's `send_all` cuts it.

mod decode;
mod encode;
mod ffi;
pub mod monitor;
mod operation;
mod socket;
#[cfg(test)]
pub(crate) mod tests;
mod userdata;

use super::object::{Chain, Key, Name, Ruleset, Set, TableId, Value};
use super::transaction::{Op, Step, Transaction};
use crate::model::ObjectName;
use proxy_common::IpFamily;
use socket::Socket;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;

/// What to do about an error of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Passing trouble (EBUSY, EINTR, EAGAIN, ENOMEM): nothing was changed, try the same again later.
    Retry,
    /// Our picture of the kernel is wrong (EEXIST, ENOENT, ERESTART for a generation) or the outcome is unknown (ENOBUFS,
    /// ETIMEDOUT: the answer was lost): read it back.
    Resync,
    /// The kernel refuses this object (EINVAL, ERANGE, ENAMETOOLONG, ENOSPC/ENFILE of one set …): leave it out if it belongs to a service.
    Object,
    /// Nothing can work (EPERM, EOPNOTSUPP: missing privilege or feature).
    Fatal,
}

/// Why a commit or a read failed.
#[derive(Debug, thiserror::Error)]
#[error("nftables: {what}: {source}")]
pub struct Error {
    /// The operation and object, in words.
    pub what: String,
    /// The Service that the failed operation was for.
    pub service: Option<ObjectName>,
    /// Number of the failed step of the transaction.
    pub step: Option<usize>,
    /// The set and the element that the kernel refuses, if it says so.
    pub element: Option<(Name, Key)>,
    /// How to go on.
    pub class: Class,
    /// The kernel's answer.
    #[source]
    pub source: io::Error,
}

/// A rule of any table, as far as its removal needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleInfo {
    /// The chain that it is in.
    pub chain: Name,
    /// The kernel's handle, for [`Op::DeleteRule`].
    pub handle: u64,
    /// Chains that it jumps or goes to.
    pub targets: Vec<Name>,
}

/// A netlink socket to nf_tables of the network namespace in which it was opened.
pub struct Connection {
    socket: Socket,
}

// Attributes of requests, <linux/netfilter/nf_tables.h>.
const NFTA_TABLE_NAME: u16 = 1;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_SET_TABLE: u16 = 1;
const NFTA_SET_ELEM_LIST_TABLE: u16 = 1;
const NFTA_SET_ELEM_LIST_SET: u16 = 2;
const NFTA_GEN_ID: u16 = 1;

/// Tries of a read that transactions of others overtake.
const READ_TRIES: usize = 10;

impl Connection {
    /// Opens a socket in the network namespace of the calling thread. Needs CAP_NET_ADMIN there.
    ///
    /// # Errors
    /// The kernel has no netfilter netlink, or no file descriptor is left.
    pub fn open() -> Result<Self, Error> {
        let socket = Socket::open().map_err(|source| failure("open a netlink socket", None, source))?;
        Ok(Self { socket })
    }

    /// Opens a socket in another network namespace, given by a descriptor of `/proc/PID/ns/net` or `/run/netns/NAME`. The
    /// calling thread stays where it is. Needs CAP_SYS_ADMIN.
    ///
    /// # Errors
    /// The namespace cannot be entered; as [`Connection::open`].
    pub fn open_in(namespace: BorrowedFd<'_>) -> Result<Self, Error> {
        socket_in(namespace).map(|socket| Self { socket })
    }

    /// Netlink port id: events of our own transactions carry it.
    #[must_use]
    pub fn port_id(&self) -> u32 {
        self.socket.port()
    }

    /// Commits a transaction: all of it or nothing.
    ///
    /// # Errors
    /// The first error of the kernel, with the step that it belongs to.
    pub fn commit(&mut self, transaction: &Transaction) -> Result<(), Error> {
        self.commit_at(transaction, None)
    }

    /// As [`Connection::commit`]; with `generation` (of [`Connection::generation`]) the kernel refuses it, as
    /// [`Class::Resync`], if any transaction was committed since then, also of another table.
    ///
    /// # Errors
    /// As [`Connection::commit`].
    pub fn commit_at(&mut self, transaction: &Transaction, generation: Option<u32>) -> Result<(), Error> {
        if transaction.is_empty() {
            return Ok(());
        }
        // Two messages for a destroyed table, and more for long element lists: reserve after counting.
        let mut batch = encode::encode(transaction, 1, generation)?;
        let first = self.socket.reserve(batch.sequence_numbers());
        batch.renumber(first);
        let errors = self.socket.commit(&batch).map_err(|source| {
            failure(&format!("commit {} steps to table {}", transaction.steps.len(), transaction.table), None, source)
        })?;
        let Some(first) = errors.into_iter().next() else { return Ok(()) };
        let step = batch.step(first.seq).and_then(|number| transaction.steps.get(number));
        let element = first.offset.and_then(|offset| batch.element(first.seq, offset));
        let source = io::Error::from_raw_os_error(first.errno);
        Err(match step {
            Some(step) => {
                let mut what = describe(&transaction.table, &step.op, element);
                if let Some(text) = first.text {
                    what = format!("{what} ({text})");
                }
                Error {
                    what,
                    service: step.service.clone(),
                    step: batch.step(first.seq),
                    element: element.and_then(|number| nth_key(&step.op, number)),
                    class: class(first.errno, Some(step)),
                    source,
                }
            }
            None => failure(&format!("commit to table {}", transaction.table), None, source),
        })
    }

    /// Number of the kernel's current generation: it changes with each transaction of anyone in this network namespace.
    ///
    /// # Errors
    /// As for a read.
    pub fn generation(&mut self) -> Result<u32, Error> {
        let answer = self.socket.request(
            libc::NFT_MSG_GETGEN,
            None,
            0,
            &[],
            || None,
            |found, message| {
                *found = decode::number_attribute(message.0, NFTA_GEN_ID);
            },
        );
        match answer {
            Ok(Some(generation)) => Ok(generation),
            Ok(None) => Err(failure("read the generation", None, io::ErrorKind::InvalidData.into())),
            Err(source) => Err(failure("read the generation", None, source)),
        }
    }

    /// Names of all tables of a family.
    ///
    /// # Errors
    /// The kernel's.
    pub fn list_tables(&mut self, family: IpFamily) -> Result<Vec<Name>, Error> {
        self.socket
            .request(libc::NFT_MSG_GETTABLE, Some(family), libc::NLM_F_DUMP, &[], Vec::new, |tables, message| {
                if decode::family(message.0) == Some(family)
                    && let Some(name) = decode::string_attribute(message.0, NFTA_TABLE_NAME)
                {
                    tables.push(name.into());
                }
            })
            .map_err(|source| failure("list tables", None, source))
    }

    /// All chains of a table, without rules; empty if the table does not exist.
    ///
    /// # Errors
    /// The kernel's.
    pub fn list_chains(&mut self, table: &TableId) -> Result<BTreeMap<Name, Chain>, Error> {
        self.socket
            .request(
                libc::NFT_MSG_GETCHAIN,
                Some(table.family),
                libc::NLM_F_DUMP,
                &[],
                BTreeMap::new,
                |chains, message| {
                    chains.extend(decode::chain(message.0, table));
                },
            )
            .map_err(|source| failure(&format!("list chains of table {table}"), None, source))
    }

    /// All rules of a table of anyone, as far as their removal needs; empty if the table does not exist.
    ///
    /// # Errors
    /// The kernel's.
    pub fn list_rules(&mut self, table: &TableId) -> Result<Vec<RuleInfo>, Error> {
        let rules = self.rules(table)?;
        Ok(rules
            .into_iter()
            .map(|(chain, handle, rule)| RuleInfo { chain, handle, targets: decode::targets(&rule) })
            .collect())
    }

    /// Definitions of the named sets and maps of a table; empty if the table does not exist. A set of a shape that Tandem does
    /// not use has no key parts.
    ///
    /// # Errors
    /// The kernel's.
    pub fn list_sets(&mut self, table: &TableId) -> Result<BTreeMap<Name, Set>, Error> {
        let name = with_zero(&table.name);
        self.socket
            .request(
                libc::NFT_MSG_GETSET,
                Some(table.family),
                libc::NLM_F_DUMP,
                &[(NFTA_SET_TABLE, &name)],
                BTreeMap::new,
                |sets, message| {
                    sets.extend(decode::set(message.0, table));
                },
            )
            .or_else(|error| if error.raw_os_error() == Some(libc::ENOENT) { Ok(BTreeMap::new()) } else { Err(error) })
            .map_err(|source| failure(&format!("list sets of table {table}"), None, source))
    }

    /// Elements of a set with this definition (of [`Connection::list_sets`]), with the time that they have left.
    ///
    /// # Errors
    /// The kernel's; ENOENT if the set does not exist.
    pub fn elements(&mut self, table: &TableId, name: &str, set: &Set) -> Result<BTreeMap<Key, Value>, Error> {
        let (table_name, set_name) = (with_zero(&table.name), with_zero(name));
        let attributes: [(u16, &[u8]); 2] =
            [(NFTA_SET_ELEM_LIST_TABLE, &table_name), (NFTA_SET_ELEM_LIST_SET, &set_name)];
        let mut unreadable = false;
        let elements = self
            .socket
            .request(
                libc::NFT_MSG_GETSETELEM,
                Some(table.family),
                libc::NLM_F_DUMP,
                &attributes,
                || decode::Elements::new(set),
                |elements, message| {
                    unreadable |= elements.add(message.0).is_none();
                },
            )
            .map_err(|source| failure(&format!("read elements of set {name} of table {table}"), None, source))?;
        if unreadable {
            return Err(failure(
                &format!("read elements of set {name} of table {table}"),
                None,
                io::ErrorKind::InvalidData.into(),
            ));
        }
        Ok(elements.finish())
    }

    fn rules(&mut self, table: &TableId) -> Result<Vec<(Name, u64, super::object::Rule)>, Error> {
        let name = with_zero(&table.name);
        self.socket
            .request(
                libc::NFT_MSG_GETRULE,
                Some(table.family),
                libc::NLM_F_DUMP,
                &[(NFTA_RULE_TABLE, &name)],
                Vec::new,
                |rules, message| {
                    if decode::string_attribute(message.0, NFTA_RULE_TABLE) == Some(&*table.name) {
                        rules.extend(decode::rule(message.0));
                    }
                },
            )
            .or_else(|error| if error.raw_os_error() == Some(libc::ENOENT) { Ok(Vec::new()) } else { Err(error) })
            .map_err(|source| failure(&format!("read rules of table {table}"), None, source))
    }

    /// Reads a table back with all its elements; `None` if it does not exist. With `dynamic`, elements of dynamic sets too.
    /// What is read is of one generation. [`Set::delete_late`] is not known to the kernel: it is false.
    ///
    /// # Errors
    /// The kernel's; [`Class::Retry`] if others change nftables all the time.
    pub fn read(&mut self, table: &TableId, dynamic: bool) -> Result<Option<Ruleset>, Error> {
        for _ in 0..READ_TRIES {
            let before = self.generation()?;
            match self.read_once(table, dynamic) {
                Ok(ruleset) if self.generation()? == before => return Ok(ruleset),
                // A set was deleted between its listing and its dump: again.
                Err(error) if error.source.raw_os_error() != Some(libc::ENOENT) || self.generation()? == before => {
                    return Err(error);
                }
                _ => {}
            }
        }
        Err(failure(
            &format!("read table {table}: it changes all the time"),
            None,
            io::Error::from_raw_os_error(libc::EAGAIN),
        ))
    }

    fn read_once(&mut self, table: &TableId, dynamic: bool) -> Result<Option<Ruleset>, Error> {
        let name = with_zero(&table.name);
        let found = self.socket.request(
            libc::NFT_MSG_GETTABLE,
            Some(table.family),
            0,
            &[(NFTA_TABLE_NAME, &name)],
            || None,
            |found, message| {
                *found = decode::table(message.0);
            },
        );
        let comment = match found {
            Ok(Some((_, comment))) => comment,
            Ok(None) => return Err(failure(&format!("read table {table}"), None, io::ErrorKind::InvalidData.into())),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            Err(error) => return Err(failure(&format!("read table {table}"), None, error)),
        };
        let mut chains = self.list_chains(table)?;
        for (name, _, rule) in self.rules(table)? {
            if let Some(chain) = chains.get_mut(&name) {
                chain.rules.push(rule);
            }
        }
        let sets = self.list_sets(table)?;
        let mut elements = BTreeMap::new();
        for (name, set) in &sets {
            if !set.key.is_empty() && (dynamic || set.dynamic_timeout_ms.is_none()) {
                let found = self.elements(table, name, set)?;
                if !found.is_empty() {
                    elements.insert(name.clone(), found);
                }
            }
        }
        Ok(Some(Ruleset { table: table.clone(), comment, chains, sets, elements }))
    }
}

fn socket_in(namespace: BorrowedFd<'_>) -> Result<Socket, Error> {
    std::thread::scope(|scope| {
        // A namespace is a property of the thread: enter it on one that ends.
        let opened = scope.spawn(|| {
            nix::sched::setns(namespace, nix::sched::CloneFlags::CLONE_NEWNET)
                .map_err(|errno| failure("enter the network namespace", None, errno.into()))?;
            Socket::open().map_err(|source| failure("open a netlink socket", None, source))
        });
        opened.join().unwrap_or_else(|_| {
            Err(failure("enter the network namespace", None, io::Error::other("the thread failed")))
        })
    })
}

fn with_zero(name: &str) -> Vec<u8> {
    let mut bytes = name.as_bytes().to_vec();
    bytes.push(0);
    bytes
}

fn failure(what: &str, service: Option<ObjectName>, source: io::Error) -> Error {
    let class = source.raw_os_error().map_or(Class::Resync, |errno| class(errno, None));
    Error { what: what.to_owned(), service, step: None, element: None, class, source }
}

fn nth_key(op: &Op, number: usize) -> Option<(Name, Key)> {
    match op {
        Op::AddElements { set, elements } => elements.get(number).map(|(key, _)| (set.clone(), key.clone())),
        Op::DeleteElements { set, keys } => keys.get(number).map(|key| (set.clone(), key.clone())),
        _ => None,
    }
}

fn class(errno: i32, step: Option<&Step>) -> Class {
    /// Of the kernel itself, not in libc: the generation of a batch is not the current one.
    const ERESTART: i32 = 85;
    let deletes = step.is_some_and(|step| {
        matches!(
            step.op,
            Op::DeleteTable(_)
                | Op::DeleteChain(_)
                | Op::DeleteSet(_)
                | Op::DeleteElements { .. }
                | Op::DeleteRule { .. }
        )
    });
    match errno {
        // Something that we do not know of refers to it.
        libc::EBUSY if deletes => Class::Resync,
        libc::EBUSY | libc::EINTR | libc::EAGAIN | libc::ENOMEM => Class::Retry,
        libc::EEXIST | libc::ENOENT | ERESTART | libc::ENOBUFS | libc::ETIMEDOUT => Class::Resync,
        libc::EPERM | libc::EACCES => Class::Fatal,
        _ if step.is_some_and(|step| step.service.is_some()) => Class::Object,
        libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::EAFNOSUPPORT | libc::EMFILE | libc::ENFILE
            if step.is_none() =>
        {
            Class::Fatal
        }
        libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::EAFNOSUPPORT => Class::Fatal,
        _ => Class::Object,
    }
}

/// A step in words; `element` is the number of the element that the kernel blames.
fn describe(table: &TableId, op: &Op, element: Option<usize>) -> String {
    let nth = |count: usize| {
        element.map_or_else(|| format!("{count} elements"), |number| format!("element {} of {count}", number + 1))
    };
    match op {
        Op::AddTable { .. } => format!("add table {table}"),
        Op::DeleteTable(id) | Op::DestroyTable(id) => format!("delete table {id}"),
        Op::AddChain { name, .. } => format!("add chain {name} of table {table}"),
        Op::FlushChain(name) => format!("flush chain {name} of table {table}"),
        Op::DeleteChain(name) => format!("delete chain {name} of table {table}"),
        Op::AddRule { chain, .. } => format!("add a rule to chain {chain} of table {table}"),
        Op::DeleteRule { chain, handle } => format!("delete rule {handle} of chain {chain} of table {table}"),
        Op::AddSet { name, .. } => format!("add set {name} of table {table}"),
        Op::DeleteSet(name) => format!("delete set {name} of table {table}"),
        Op::FlushSet(name) => format!("flush set {name} of table {table}"),
        Op::AddElements { set, elements } => format!("add {} to set {set} of table {table}", nth(elements.len())),
        Op::DeleteElements { set, keys } => format!("delete {} from set {set} of table {table}", nth(keys.len())),
    }
}
