//! ctnetlink: one dump of the UDP flows, one deletion per stale flow. Safe code.

use super::stale::{Flow, Frontends};
use crate::sys::nfnetlink::{Connection, Message, attribute, attributes, emit};
use netlink_packet_core::DefaultNla;
use proxy_common::{IpFamily, Protocol};
use std::io;
use std::net::{IpAddr, SocketAddr};

// uapi/linux/netfilter/nfnetlink_conntrack.h
const SUBSYSTEM: u16 = 1 << 8;
const GET: u16 = SUBSYSTEM | 1;
const DELETE: u16 = SUBSYSTEM | 2;
const CTA_TUPLE_ORIG: u16 = 1;
const CTA_TUPLE_REPLY: u16 = 2;
const CTA_STATUS: u16 = 3;
const CTA_ID: u16 = 12;
const CTA_ZONE: u16 = 18;
const CTA_FILTER: u16 = 25;
const CTA_TUPLE_IP: u16 = 1;
const CTA_TUPLE_PROTO: u16 = 2;
const CTA_PROTO_NUM: u16 = 1;
const CTA_PROTO_SRC_PORT: u16 = 2;
const CTA_PROTO_DST_PORT: u16 = 3;
const CTA_FILTER_ORIG_FLAGS: u16 = 1;
const CTA_FILTER_REPLY_FLAGS: u16 = 2;
/// `CTA_FILTER_F_CTA_PROTO_NUM` of net/netfilter/nf_conntrack_netlink.c
const FILTER_PROTOCOL: u32 = 1 << 3;
const NESTED: u16 = netlink_packet_core::NLA_F_NESTED;

/// Tries of a dump that the kernel says was interrupted.
const DUMP_TRIES: u32 = 5;
/// Stale flows that are held while a dump runs, before they are deleted: bounds the memory, whatever the table's size.
const DELETE_AT: usize = 1024;

/// What one reconcile did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// UDP flows that were looked at.
    pub examined: u64,
    /// Stale flows that were deleted.
    pub deleted: u64,
    /// Stale flows that the kernel keeps because they are offloaded to a flow table (EBUSY); they end with the offload.
    pub offloaded: u64,
}

/// Why a reconcile did not finish. The flows that were deleted before stay deleted; try again later.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No socket.
    #[error("cannot open a conntrack netlink socket: {0}")]
    Open(#[source] io::Error),
    /// The list of flows could not be read, or not completely.
    #[error("cannot list the {family} conntrack entries: {source}")]
    Dump {
        /// Which list.
        family: IpFamily,
        /// The kernel's answer; `EINTR` = the table changed during each of several tries.
        #[source]
        source: io::Error,
    },
    /// A flow could not be deleted.
    #[error("cannot delete the conntrack entry {} -> {}: {source}", .flow.original_source, .flow.original_destination)]
    Delete {
        /// The flow.
        flow: Box<Flow>,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// A stale flow and the message that deletes it.
struct Stale {
    flow: Flow,
    delete: Message,
}

/// Deletes stale flows in one network namespace.
pub struct Reconciler {
    dump: Connection,
    delete: Connection,
    kernel_filter: bool,
}

impl Reconciler {
    /// Opens its sockets in the calling thread's network namespace. Needs CAP_NET_ADMIN there.
    pub fn open() -> Result<Self, Error> {
        let open = || Connection::open().map_err(Error::Open);
        Ok(Self { dump: open()?, delete: open()?, kernel_filter: true })
    }

    /// Looks at every UDP flow once and deletes those that contradict `frontends`. Does nothing if there are none.
    pub fn reconcile(&mut self, frontends: &Frontends) -> Result<Report, Error> {
        let mut report = Report::default();
        for family in frontends.families() {
            self.family(family, frontends, &mut report)?;
        }
        Ok(report)
    }

    fn family(&mut self, family: IpFamily, frontends: &Frontends, report: &mut Report) -> Result<(), Error> {
        let mut tries = 0;
        loop {
            let mut failed = None;
            let mut found = Vec::new();
            let (delete, examined) = (&mut self.delete, &mut report.examined);
            let (mut deleted, mut offloaded) = (0, 0);
            let mut flush = |found: &mut Vec<Stale>| {
                for stale in found.drain(..) {
                    match delete_one(delete, &stale) {
                        Ok(Deleted::Yes) => deleted += 1,
                        Ok(Deleted::Gone) => {}
                        Ok(Deleted::Offloaded) => offloaded += 1,
                        Err(error) => failed = failed.take().or(Some(error)),
                    }
                }
            };
            let result = self.dump.dump(&request(family, self.kernel_filter), |_, message| {
                let Some(flow) = parse(message).filter(|flow| flow.protocol == Protocol::Udp as u8) else { return };
                *examined += 1;
                if frontends.stale(&flow) {
                    found.push(Stale { flow, delete: deletion(family, message) });
                    if found.len() >= DELETE_AT {
                        flush(&mut found);
                    }
                }
            });
            flush(&mut found);
            report.deleted += deleted;
            report.offloaded += offloaded;
            if let Some(error) = failed {
                return Err(error);
            }
            match result {
                Ok(()) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) && tries < DUMP_TRIES => tries += 1,
                // Kernels before 5.8 ignore the filter; one that refuses it gets a plain request.
                Err(error)
                    if self.kernel_filter && matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) =>
                {
                    self.kernel_filter = false;
                }
                Err(source) => return Err(Error::Dump { family, source }),
            }
        }
    }
}

enum Deleted {
    Yes,
    Gone,
    Offloaded,
}

fn delete_one(connection: &mut Connection, stale: &Stale) -> Result<Deleted, Error> {
    match connection.request(&stale.delete) {
        Ok(()) => Ok(Deleted::Yes),
        Err(source) => match source.raw_os_error() {
            // Ended by itself meanwhile, or another flow has the same tuple now (another id).
            Some(libc::ENOENT) => Ok(Deleted::Gone),
            // ctnetlink_del_conntrack refuses offloaded flows.
            Some(libc::EBUSY) => Ok(Deleted::Offloaded),
            _ => Err(Error::Delete { flow: Box::new(stale.flow), source }),
        },
    }
}

fn number(family: IpFamily) -> u8 {
    match family {
        IpFamily::V4 => libc::AF_INET as u8,
        IpFamily::V6 => libc::AF_INET6 as u8,
    }
}

/// A dump of one family; with `filter`, the kernel sends UDP flows only (since Linux 5.8).
fn request(family: IpFamily, filter: bool) -> Message {
    if !filter {
        return Message::new(GET, number(family), &[]);
    }
    let protocol = emit(&[DefaultNla::new(CTA_PROTO_NUM, vec![Protocol::Udp as u8])]);
    let tuple = emit(&[DefaultNla::new(CTA_TUPLE_PROTO | NESTED, protocol)]);
    let flags = emit(&[
        DefaultNla::new(CTA_FILTER_ORIG_FLAGS, FILTER_PROTOCOL.to_ne_bytes().to_vec()),
        DefaultNla::new(CTA_FILTER_REPLY_FLAGS, 0u32.to_ne_bytes().to_vec()),
    ]);
    let attributes = [DefaultNla::new(CTA_TUPLE_ORIG | NESTED, tuple), DefaultNla::new(CTA_FILTER | NESTED, flags)];
    Message::new(GET, number(family), &attributes)
}

/// Deletes the very entry that `message` of a dump described: its original tuple with its zones, and its id, so that a new
/// flow with the same tuple is not taken for it.
fn deletion(family: IpFamily, message: &[u8]) -> Message {
    let keep = [(CTA_TUPLE_ORIG, NESTED), (CTA_ZONE, 0), (CTA_ID, 0)];
    let copy =
        keep.iter().filter_map(|(kind, flag)| Some(DefaultNla::new(kind | flag, attribute(message, *kind)?.to_vec())));
    Message::new(DELETE, number(family), &copy.collect::<Vec<_>>())
}

fn parse(message: &[u8]) -> Option<Flow> {
    let (protocol, original_source, original_destination) = tuple(attribute(message, CTA_TUPLE_ORIG)?)?;
    let (_, reply_source, reply_destination) = tuple(attribute(message, CTA_TUPLE_REPLY)?)?;
    let status = attribute(message, CTA_STATUS)?.try_into().map(u32::from_be_bytes).ok()?;
    Some(Flow { protocol, original_source, original_destination, reply_source, reply_destination, status })
}

/// Protocol, source, destination.
fn tuple(bytes: &[u8]) -> Option<(u8, SocketAddr, SocketAddr)> {
    let (mut source, mut destination) = (None, None);
    for nla in attributes(attribute(bytes, CTA_TUPLE_IP)?) {
        let address = match nla.value_length() {
            4 => IpAddr::from(<[u8; 4]>::try_from(nla.value()).ok()?),
            16 => IpAddr::from(<[u8; 16]>::try_from(nla.value()).ok()?),
            _ => continue,
        };
        match nla.kind() {
            1 | 3 => source = Some(address),      // CTA_IP_V4_SRC, CTA_IP_V6_SRC
            2 | 4 => destination = Some(address), // CTA_IP_V4_DST, CTA_IP_V6_DST
            _ => {}
        }
    }
    let proto = attribute(bytes, CTA_TUPLE_PROTO)?;
    let port = |kind| attribute(proto, kind).and_then(|value| value.try_into().ok()).map_or(0, u16::from_be_bytes);
    let side = |ip: Option<IpAddr>, kind| ip.map(|ip| SocketAddr::new(ip, port(kind)));
    let protocol = *attribute(proto, CTA_PROTO_NUM)?.first()?;
    Some((protocol, side(source, CTA_PROTO_SRC_PORT)?, side(destination, CTA_PROTO_DST_PORT)?))
}

#[cfg(test)]
mod tests;
