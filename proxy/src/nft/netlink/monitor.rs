//! Who else changes nftables: events of the group `NFNLGRP_NFTABLES`, one per transaction.
//!
//! Listening costs the writer: the kernel makes a message of each element of a commit while a listener exists. The agent leaves
//! the group before a bulk commit and joins it again afterwards.
#![forbid(unsafe_code)]

use super::socket::{Message, Socket, messages};
use super::{Error, failure};
use super::{decode, ffi};
use crate::nft::object::TableId;
use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use tokio::io::unix::AsyncFd;

/// What a listener learns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Another socket than those of [`Monitor::ignore`] committed a transaction.
    Changed(Change),
    /// Events were lost (ENOBUFS): whatever matters must be compared with the kernel. Not a reason to write it anew.
    Verify,
}

/// A transaction of someone else.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Tables in which it changed something.
    pub tables: BTreeSet<TableId>,
    /// The generation that it made.
    pub generation: u32,
    /// Process id of its sender, in the first process id namespace of the machine; 0 if unknown.
    pub process: u32,
    /// Name of the sending program (at most 15 bytes).
    pub program: String,
}

/// A listener in one network namespace. Joined from the start.
pub struct Monitor {
    socket: AsyncFd<Socket>,
    events: VecDeque<Event>,
    collector: Collector,
}

/// Events of one transaction arrive before its NEWGEN, maybe in several datagrams.
#[derive(Default)]
struct Collector {
    own: BTreeSet<u32>,
    tables: BTreeSet<TableId>,
}

// <linux/netfilter/nf_tables.h>: the table's name is the first attribute of every kind of object.
const NFTA_TABLE: u16 = 1;
const NFTA_GEN_ID: u16 = 1;
const NFTA_GEN_PROC_PID: u16 = 2;
const NFTA_GEN_PROC_NAME: u16 = 3;

impl Collector {
    fn take(&mut self, message: Message<'_>) -> Option<Event> {
        let kind = message.nftables_kind()?;
        if kind != libc::NFT_MSG_NEWGEN {
            if let (Some(family), Some(name)) =
                (decode::family(message.0), decode::string_attribute(message.0, NFTA_TABLE))
            {
                self.tables.insert(TableId { family, name: name.into() });
            }
            return None;
        }
        let tables = std::mem::take(&mut self.tables);
        if self.own.contains(&message.port()) {
            return None;
        }
        Some(Event::Changed(Change {
            tables,
            generation: decode::number_attribute(message.0, NFTA_GEN_ID).unwrap_or(0),
            process: decode::number_attribute(message.0, NFTA_GEN_PROC_PID).unwrap_or(0),
            program: decode::string_attribute(message.0, NFTA_GEN_PROC_NAME).unwrap_or_default().to_owned(),
        }))
    }
}

impl Monitor {
    /// Listens in the network namespace of the calling thread. Must be called in a tokio runtime with IO enabled.
    ///
    /// # Errors
    /// As [`super::Connection::open`].
    pub fn open() -> Result<Self, Error> {
        Self::new(Socket::open().map_err(|source| failure("open a netlink socket", None, source))?)
    }

    /// Listens in another network namespace, as [`super::Connection::open_in`].
    ///
    /// # Errors
    /// As [`super::Connection::open_in`].
    pub fn open_in(namespace: BorrowedFd<'_>) -> Result<Self, Error> {
        Self::new(super::socket_in(namespace)?)
    }

    #[cfg(test)]
    pub(super) fn open_with_buffer(bytes: usize) -> Self {
        let socket = Socket::open().unwrap();
        socket.receive_buffer(bytes);
        Self::new(socket).unwrap()
    }

    fn new(socket: Socket) -> Result<Self, Error> {
        let wrap = |source| failure("listen to nftables events", None, source);
        let socket = ffi::watch(socket).map_err(wrap)?;
        let mut monitor = Self { socket, events: VecDeque::new(), collector: Collector::default() };
        monitor.join()?;
        Ok(monitor)
    }

    /// Transactions of the connection with this port id ([`super::Connection::port_id`]) are our own.
    pub fn ignore(&mut self, port_id: u32) {
        self.collector.own.insert(port_id);
    }

    /// Joins the group again after [`Monitor::leave`]. What others changed meanwhile was not seen: compare with the kernel.
    ///
    /// # Errors
    /// The kernel's.
    pub fn join(&mut self) -> Result<(), Error> {
        let joined = self.socket.get_ref().listen(true);
        joined.map_err(|source| failure("join the group of nftables events", None, source))
    }

    /// Leaves the group: no event is made for us until [`Monitor::join`]. Those that are waiting are still reported.
    ///
    /// # Errors
    /// The kernel's.
    pub fn leave(&mut self) -> Result<(), Error> {
        let left = self.socket.get_ref().listen(false);
        left.map_err(|source| failure("leave the group of nftables events", None, source))
    }

    /// Waits for the next event. Can be dropped at any time without losing one.
    ///
    /// # Errors
    /// The socket does not work any more.
    pub async fn next(&mut self) -> io::Result<Event> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Ok(event);
            }
            let mut ready = self.socket.readable_mut().await?;
            let received = ready.try_io(|socket| {
                let data = socket.get_mut().receive(libc::MSG_DONTWAIT)?;
                Ok(messages(data).filter_map(|message| self.collector.take(message)).collect::<Vec<_>>())
            });
            match received {
                Ok(Ok(events)) => self.events.extend(events),
                Ok(Err(error)) if error.raw_os_error() == Some(libc::ENOBUFS) => {
                    self.collector.tables.clear();
                    self.events.push_back(Event::Verify);
                }
                Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(Err(error)) => return Err(error),
                Err(_would_block) => {}
            }
        }
    }
}
