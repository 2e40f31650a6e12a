//! A small nfnetlink socket: streaming dumps, single requests, atomic batches. Safe code over `netlink-sys`.
//!
//! For ctnetlink and for tables of others; Tandem's own tables have their own connection in `nft`. Attributes are read in
//! place: a dump may hold a million flows, and typed messages (netlink-packet-netfilter 0.4) allocate for every attribute
//! and know neither zones, ids and filters of conntrack nor the generation of a batch.

use netlink_packet_core::{DefaultNla, NLM_F_ACK, NLM_F_DUMP, NLM_F_REQUEST, NlaBuffer, NlasIterator};
use netlink_sys::{Socket, SocketAddr, protocols::NETLINK_NETFILTER};
use std::io;

/// `struct nlmsghdr`: length, type, flags, sequence number, port; all in host byte order.
const HEADER: usize = 16;
/// `struct nfgenmsg`: family, version, resource id.
const GENERIC: usize = 4;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
/// `NLM_F_DUMP_INTR`: the table changed during the dump.
const NLM_F_DUMP_INTERRUPTED: u16 = 0x10;
const NFNL_MSG_BATCH_BEGIN: u16 = 16;
const NFNL_MSG_BATCH_END: u16 = 17;
/// `NFNL_BATCH_GENID`: the generation that the batch is made for; the kernel answers ERESTART if it is another one by now.
const NFNL_BATCH_GENID: u16 = 1;
/// `NFNL_SUBSYS_NFTABLES`; the resource id of a batch names its subsystem.
const NFTABLES: u16 = 10;
/// Larger than any dump message of the kernel (it uses at most 32 KiB for a page of a dump).
const RECEIVE: usize = 128 << 10;

/// One message: `subsystem << 8 | type`, address family, attributes.
#[derive(Clone, Debug)]
pub struct Message {
    /// `NFNL_SUBSYS_… << 8 | …_MSG_…`
    pub kind: u16,
    /// `NFPROTO_IPV4` (2), `NFPROTO_IPV6` (10), 0 = unspecified
    pub family: u8,
    /// Attributes in wire format, padded.
    pub attributes: Vec<u8>,
}

impl Message {
    /// A message with these attributes.
    #[must_use]
    pub fn new(kind: u16, family: u8, attributes: &[DefaultNla]) -> Self {
        Self { kind, family, attributes: emit(attributes) }
    }

    fn encode(&self, flags: u16, sequence: u32, resource: u16, into: &mut Vec<u8>) {
        let length = (HEADER + GENERIC + self.attributes.len()) as u32;
        into.extend(length.to_ne_bytes());
        into.extend(self.kind.to_ne_bytes());
        into.extend(flags.to_ne_bytes());
        into.extend(sequence.to_ne_bytes());
        into.extend(0u32.to_ne_bytes());
        into.extend([self.family, 0]);
        into.extend(resource.to_be_bytes());
        into.extend(&self.attributes);
    }
}

/// Attributes in wire format.
#[must_use]
pub fn emit(attributes: &[DefaultNla]) -> Vec<u8> {
    use netlink_packet_core::Emitable;
    let mut bytes = vec![0; attributes.buffer_len()];
    attributes.emit(&mut bytes);
    bytes
}

/// An attribute that holds a string, with its final zero.
#[must_use]
pub fn text(kind: u16, value: &str) -> DefaultNla {
    DefaultNla::new(kind, value.bytes().chain([0]).collect())
}

/// Walks over attributes; stops silently at a malformed one (the kernel sends none).
pub fn attributes(bytes: &[u8]) -> impl Iterator<Item = NlaBuffer<&[u8]>> {
    NlasIterator::new(bytes).map_while(Result::ok)
}

/// The value of the first attribute of this kind.
#[must_use]
pub fn attribute(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    let nla = attributes(bytes).find(|nla| nla.kind() == kind)?;
    let length = usize::from(nla.length()); // without the padding
    nla.into_inner().get(4..length)
}

/// The string in the first attribute of this kind.
#[must_use]
pub fn string(bytes: &[u8], kind: u16) -> Option<&str> {
    let value = attribute(bytes, kind)?;
    std::str::from_utf8(value.split(|b| *b == 0).next()?).ok()
}

/// A socket to the netfilter of the network namespace in which it was opened.
pub struct Connection {
    socket: Socket,
    sequence: u32,
    buffer: Vec<u8>,
}

/// A batch was refused: the answer for each message that failed, by its index, the batch's own begin and end not counted.
#[derive(Debug)]
pub struct Refused {
    /// Index of the message and the kernel's answer; `None` = the batch as a whole.
    pub failures: Vec<(Option<usize>, io::Error)>,
}

impl Connection {
    /// Opens a socket in the calling thread's network namespace.
    pub fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_NETFILTER)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        // Answers to failed requests need not repeat the request.
        socket.set_cap_ack(true)?;
        Ok(Self { socket, sequence: 0, buffer: Vec::with_capacity(RECEIVE) })
    }

    /// Asks for a dump and hands each message's family and attributes to `each` while it comes in. An interrupted or
    /// refused dump is an error (`EINTR`: the table changed meanwhile; what came before may be incomplete).
    pub fn dump(&mut self, request: &Message, mut each: impl FnMut(u8, &[u8])) -> io::Result<()> {
        let sequence = self.send(request, NLM_F_REQUEST | NLM_F_DUMP)?;
        let mut interrupted = false;
        loop {
            let mut end = None;
            self.receive(|header, payload| {
                if header.sequence != sequence {
                    return;
                }
                interrupted |= header.flags & NLM_F_DUMP_INTERRUPTED != 0;
                match header.kind {
                    NLMSG_DONE | NLMSG_ERROR => end = Some(errno(payload)),
                    _ if payload.len() >= GENERIC => each(payload[0], &payload[GENERIC..]),
                    _ => {}
                }
            })?;
            if let Some(result) = end {
                result?;
                return if interrupted { Err(io::Error::from_raw_os_error(libc::EINTR)) } else { Ok(()) };
            }
        }
    }

    /// Sends one request and waits for its acknowledgement.
    pub fn request(&mut self, request: &Message) -> io::Result<()> {
        let sequence = self.send(request, NLM_F_REQUEST | NLM_F_ACK)?;
        loop {
            let mut end = None;
            self.receive(|header, payload| {
                if header.sequence == sequence && header.kind == NLMSG_ERROR {
                    end = Some(errno(payload));
                }
            })?;
            if let Some(result) = end {
                return result;
            }
        }
    }

    /// Sends one request and returns the attributes of its single answer.
    pub fn get(&mut self, request: &Message) -> io::Result<Vec<u8>> {
        let sequence = self.send(request, NLM_F_REQUEST)?;
        loop {
            let mut end = None;
            self.receive(|header, payload| {
                if header.sequence == sequence {
                    end = Some(match header.kind {
                        NLMSG_ERROR => errno(payload).map(|()| Vec::new()),
                        _ => Ok(payload.get(GENERIC..).unwrap_or_default().to_vec()),
                    });
                }
            })?;
            if let Some(result) = end {
                return result;
            }
        }
    }

    /// Commits nf_tables messages as one transaction: all or none. With `generation`, the kernel refuses the batch
    /// (`ERESTART`) if any rule set of the namespace changed since that generation.
    pub fn batch(&mut self, messages: &[Message], generation: Option<u32>) -> io::Result<Result<(), Refused>> {
        let first = self.sequence.wrapping_add(1);
        let mut bytes = Vec::new();
        let generation: Vec<_> =
            generation.map(|g| DefaultNla::new(NFNL_BATCH_GENID, g.to_be_bytes().to_vec())).into_iter().collect();
        Message::new(NFNL_MSG_BATCH_BEGIN, 0, &generation).encode(NLM_F_REQUEST, first, NFTABLES, &mut bytes);
        let mut sequence = first;
        for (index, message) in messages.iter().enumerate() {
            sequence = sequence.wrapping_add(1);
            // An acknowledgement of the last message is enough to know that the kernel is through: errors come always,
            // and in order (nfnetlink_rcv_batch).
            let flags = if index + 1 == messages.len() { NLM_F_REQUEST | NLM_F_ACK } else { NLM_F_REQUEST };
            message.encode(flags, sequence, 0, &mut bytes);
        }
        let last = sequence;
        sequence = sequence.wrapping_add(1);
        Message::new(NFNL_MSG_BATCH_END, 0, &[]).encode(NLM_F_REQUEST, sequence, NFTABLES, &mut bytes);
        self.sequence = sequence;
        if messages.is_empty() {
            return Ok(Ok(()));
        }
        self.make_room(bytes.len())?;
        self.socket.send(&bytes, 0)?;
        let mut failures = Vec::new();
        let mut end = false;
        while !end {
            self.receive(|header, payload| {
                if header.kind != NLMSG_ERROR {
                    return;
                }
                if let Err(error) = errno(payload) {
                    let index = header.sequence.wrapping_sub(first);
                    // The begin message stands for the batch: wrong generation, no privilege. Nothing else follows then.
                    end |= index == 0;
                    failures.push(((index > 0).then(|| index as usize - 1), error));
                }
                end |= header.sequence == last;
            })?;
        }
        Ok(if failures.is_empty() { Ok(()) } else { Err(Refused { failures }) })
    }

    /// A batch must leave in one piece, so the send buffer must hold it (`netlink_sendmsg` answers EMSGSIZE otherwise).
    fn make_room(&self, bytes: usize) -> io::Result<()> {
        use nix::sys::socket::{setsockopt, sockopt};
        let borrowed = std::os::fd::AsFd::as_fd(&self.socket);
        // Half of a socket buffer is the kernel's bookkeeping; FORCE needs CAP_NET_ADMIN, which a commit needs anyway.
        setsockopt(&borrowed, sockopt::SndBufForce, &(2 * bytes + 4096).max(212_992))?;
        setsockopt(&borrowed, sockopt::RcvBufForce, &(4 << 20))?;
        Ok(())
    }

    fn send(&mut self, message: &Message, flags: u16) -> io::Result<u32> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut bytes = Vec::with_capacity(HEADER + GENERIC + message.attributes.len());
        message.encode(flags, self.sequence, 0, &mut bytes);
        self.socket.send(&bytes, 0)?;
        Ok(self.sequence)
    }

    fn receive(&mut self, mut each: impl FnMut(&Header, &[u8])) -> io::Result<()> {
        self.buffer.clear();
        loop {
            match self.socket.recv(&mut self.buffer, 0) {
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {} // a signal
                Err(error) => return Err(error),
            }
        }
        let mut rest = &self.buffer[..];
        while let Some(header) = Header::parse(rest) {
            each(&header, &rest[HEADER..header.length]);
            rest = rest.get(header.length.next_multiple_of(4)..).unwrap_or_default();
        }
        Ok(())
    }
}

struct Header {
    length: usize,
    kind: u16,
    flags: u16,
    sequence: u32,
}

impl Header {
    /// `None` at the end of the buffer.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let two = |at: usize| Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?));
        let four = |at: usize| Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let length = four(0)? as usize;
        let header = Self { length, kind: two(4)?, flags: two(6)?, sequence: four(8)? };
        (length >= HEADER && length <= bytes.len()).then_some(header)
    }
}

/// The error number at the start of an NLMSG_ERROR or NLMSG_DONE payload: zero or negative.
fn errno(payload: &[u8]) -> io::Result<()> {
    match payload.first_chunk().map_or(0, |bytes| i32::from_ne_bytes(*bytes)) {
        0 => Ok(()),
        code => Err(io::Error::from_raw_os_error(code.wrapping_neg())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_that_are_emitted_are_found_again() {
        let nested = emit(&[text(1, "abc"), DefaultNla::new(2, vec![7])]);
        let bytes = emit(&[DefaultNla::new(9, vec![1, 2, 3]), DefaultNla::new(4, nested)]);
        assert_eq!(bytes.len() % 4, 0);
        let inner = attribute(&bytes, 4).unwrap();
        assert_eq!(string(inner, 1), Some("abc"));
        assert_eq!(attribute(inner, 2), Some(&[7][..]));
        assert_eq!(attribute(inner, 3), None);
        assert_eq!(attribute(&bytes, 9), Some(&[1, 2, 3][..]));
    }

    #[test]
    fn malformed_input_ends_the_walk() {
        for bytes in [&[][..], &[1, 0], &[3, 0, 1, 0], &[255, 255, 1, 0, 0]] {
            assert_eq!(attributes(bytes).count(), 0, "{bytes:?}");
            assert!(Header::parse(bytes).is_none());
        }
        let mut short = vec![0; 16];
        short[0] = 4; // a length below that of the header itself
        assert!(Header::parse(&short).is_none());
    }
}
