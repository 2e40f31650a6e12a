//! A netlink socket to netfilter: requests, dumps, batches.
#![forbid(unsafe_code)]

use super::encode::{Batch, protocol_family};
use super::ffi::Scratch;
use netlink_sys::{Socket as RawSocket, SocketAddr, protocols::NETLINK_NETFILTER};
use nix::sys::socket::{setsockopt, sockopt};
use nix::sys::time::{TimeVal, TimeValLike};
use proxy_common::IpFamily;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::{Duration, Instant};

/// The kernel handles a batch inside `sendmsg`, so its answer is there when that returns; a dump answers at once too. More
/// time passes only if the answer was lost.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// An acknowledgement takes one buffer of the kernel of about 768 bytes of `SO_RCVBUF`; a batch may answer one per message.
const RECEIVE_BUFFER: usize = 4 << 20;
/// Tries of a dump that a concurrent transaction interrupts.
const DUMP_TRIES: usize = 10;

const HEADER: usize = 16;

/// One netlink message with its header.
#[derive(Clone, Copy)]
pub struct Message<'a>(pub &'a [u8]);

impl Message<'_> {
    fn u32(&self, at: usize) -> u32 {
        self.0.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_ne_bytes)
    }
    fn u16(&self, at: usize) -> u16 {
        self.0.get(at..at + 2).and_then(|bytes| bytes.try_into().ok()).map_or(0, u16::from_ne_bytes)
    }
    /// Whole message type.
    pub fn kind(&self) -> u16 {
        self.u16(4)
    }
    /// `NFT_MSG_*` if it is one of nf_tables.
    pub fn nftables_kind(&self) -> Option<i32> {
        (i32::from(self.kind() >> 8) == libc::NFNL_SUBSYS_NFTABLES).then(|| i32::from(self.kind() & 0xff))
    }
    pub fn flags(&self) -> u16 {
        self.u16(6)
    }
    pub fn seq(&self) -> u32 {
        self.u32(8)
    }
    /// Port id of whom it is for, or who caused an event.
    pub fn port(&self) -> u32 {
        self.u32(12)
    }
    /// Of an error message: 0 = acknowledgement.
    pub fn errno(&self) -> i32 {
        -(self.u32(HEADER) as i32)
    }
    /// Offset of the attribute that the kernel blames (`NLMSGERR_ATTR_OFFS`) and its words (`NLMSGERR_ATTR_MSG`).
    pub fn extended(&self) -> (Option<usize>, Option<String>) {
        const CAPPED: u16 = libc::NLM_F_CAPPED as u16;
        const TLVS: u16 = libc::NLM_F_ACK_TLVS as u16;
        const MSG: u16 = 1;
        const OFFS: u16 = 2;
        let (mut offset, mut text) = (None, None);
        if self.flags() & TLVS == 0 {
            return (None, None);
        }
        // errno, then the header of the request (and its payload unless capped), then attributes.
        let request =
            if self.flags() & CAPPED != 0 { HEADER } else { (self.u32(HEADER + 4) as usize).next_multiple_of(4) };
        let mut rest = self.0.get(HEADER + 4 + request..).unwrap_or_default();
        while let [a, b, c, d, ..] = rest {
            let len = usize::from(u16::from_ne_bytes([*a, *b]));
            let Some(data) = rest.get(4..len) else { break };
            match u16::from_ne_bytes([*c, *d]) {
                MSG => text = Some(String::from_utf8_lossy(data).trim_end_matches('\0').to_owned()),
                OFFS => offset = data.try_into().ok().map(|bytes| u32::from_ne_bytes(bytes) as usize),
                _ => {}
            }
            rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
        }
        (offset, text)
    }
}

/// The messages in a received datagram.
pub fn messages(mut data: &[u8]) -> impl Iterator<Item = Message<'_>> {
    std::iter::from_fn(move || {
        let len = u32::from_ne_bytes(data.get(..4)?.try_into().ok()?) as usize;
        if len < HEADER {
            return None;
        }
        let message = data.get(..len)?;
        data = data.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some(Message(message))
    })
}

/// An error that the kernel answers to one message of a batch.
pub struct BatchError {
    pub seq: u32,
    pub errno: i32,
    pub offset: Option<usize>,
    pub text: Option<String>,
}

/// A netlink socket of the network namespace in which it was opened.
pub struct Socket {
    raw: RawSocket,
    port: u32,
    buffer: Scratch,
    seq: u32,
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.raw.as_raw_fd()
    }
}

impl Socket {
    pub fn open() -> io::Result<Self> {
        let mut raw = RawSocket::new(NETLINK_NETFILTER)?;
        let port = raw.bind_auto()?.port_number();
        raw.connect(&SocketAddr::new(0, 0))?;
        // Errors must not carry the request back: a refused batch would not fit into the receive buffer.
        raw.set_cap_ack(true)?;
        raw.set_ext_ack(true)?;
        let socket = Self { raw, port, buffer: Scratch::new(), seq: 1 };
        socket.receive_buffer(RECEIVE_BUFFER);
        setsockopt(&socket.raw, sockopt::ReceiveTimeout, &TimeVal::milliseconds(ANSWER_TIMEOUT.as_millis() as i64))?;
        Ok(socket)
    }

    /// Port id, by which the kernel tells who changed something.
    pub fn port(&self) -> u32 {
        self.port
    }

    /// Joins or leaves the group of nftables events.
    pub fn listen(&self, on: bool) -> io::Result<()> {
        let group = libc::NFNLGRP_NFTABLES as u32;
        if on { self.raw.add_membership(group) } else { self.raw.drop_membership(group) }
    }

    /// Next sequence number, of a range of `count`.
    pub fn reserve(&mut self, count: u32) -> u32 {
        if self.seq.checked_add(count).is_none() {
            self.seq = 1;
        }
        let first = self.seq;
        self.seq += count;
        first
    }

    /// Without privilege over the machine's memory (CAP_NET_ADMIN in the first user namespace) the system's limit holds.
    pub fn receive_buffer(&self, bytes: usize) {
        if setsockopt(&self.raw, sockopt::RcvBufForce, &bytes).is_err() {
            let _ = setsockopt(&self.raw, sockopt::RcvBuf, &bytes);
        }
    }

    fn send_buffer(&self, bytes: usize) {
        if setsockopt(&self.raw, sockopt::SndBufForce, &bytes).is_err() {
            let _ = setsockopt(&self.raw, sockopt::SndBuf, &bytes);
        }
    }

    /// Receives one datagram.
    pub fn receive(&mut self, flags: i32) -> io::Result<&[u8]> {
        let buffer = self.buffer.bytes_mut();
        let len = self.raw.recv(&mut &mut buffer[..], flags)?;
        // The kernel fills at most 32 KiB per dump datagram; events and acknowledgements are smaller.
        if len > buffer.len() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a netlink datagram of {len} bytes")));
        }
        Ok(&self.buffer.bytes_mut()[..len])
    }

    /// Throws away what is left of earlier requests.
    fn drain(&mut self) {
        loop {
            match self.receive(libc::MSG_DONTWAIT) {
                Ok(_) => {}
                Err(error)
                    if error.raw_os_error() == Some(libc::ENOBUFS) || error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    /// Sends a batch at once and collects the kernel's errors in order; none = committed.
    ///
    /// # Errors
    /// The outcome is unknown (answer lost), or nothing was sent.
    pub fn commit(&mut self, batch: &Batch) -> io::Result<Vec<BatchError>> {
        self.drain();
        // The kernel accounts the buffer's overhead too, and doubles what is asked for.
        self.send_buffer(batch.data.len() + 4096);
        let sent = self.raw.send(&batch.data, 0)?;
        if sent != batch.data.len() {
            return Err(io::Error::new(io::ErrorKind::WriteZero, "the batch was sent in part"));
        }
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let (mut errors, mut acknowledged, mut overrun) = (Vec::new(), false, false);
        while !acknowledged {
            match self.receive(0) {
                Ok(data) => {
                    for message in messages(data).filter(|message| i32::from(message.kind()) == libc::NLMSG_ERROR) {
                        let seq = message.seq();
                        if seq.wrapping_sub(batch.first_seq()) >= batch.sequence_numbers() {
                            continue;
                        }
                        if message.errno() != 0 {
                            let (offset, text) = message.extended();
                            errors.push(BatchError { seq, errno: message.errno(), offset, text });
                        }
                        // An error of the begin message is the only answer to the whole batch.
                        acknowledged |= seq == batch.last_seq() || seq == batch.first_seq();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted && Instant::now() < deadline => {}
                // Answers were dropped: what is queued still tells the first errors. The commit itself has happened or not.
                Err(error) if error.raw_os_error() == Some(libc::ENOBUFS) => overrun = true,
                Err(_) if !errors.is_empty() => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::Error::from_raw_os_error(if overrun { libc::ENOBUFS } else { libc::ETIMEDOUT }));
                }
                Err(error) => return Err(error),
            }
            if overrun && !acknowledged {
                // Do not wait for what was dropped.
                setsockopt(&self.raw, sockopt::ReceiveTimeout, &TimeVal::milliseconds(50))?;
            }
        }
        if overrun {
            setsockopt(&self.raw, sockopt::ReceiveTimeout, &TimeVal::milliseconds(ANSWER_TIMEOUT.as_millis() as i64))?;
        }
        Ok(errors)
    }

    /// Asks and hands every answer to `each`. With `NLM_F_DUMP` the whole dump is repeated if it was interrupted by a change;
    /// `restart` is called before each try.
    pub fn request<T>(
        &mut self,
        kind: i32,
        family: Option<IpFamily>,
        flags: i32,
        attributes: &[(u16, &[u8])],
        mut restart: impl FnMut() -> T,
        mut each: impl FnMut(&mut T, Message<'_>),
    ) -> io::Result<T> {
        self.drain();
        for _ in 0..DUMP_TRIES {
            let seq = self.reserve(1);
            let request = request(kind, family, flags, seq, attributes);
            self.raw.send(&request, 0)?;
            let mut result = restart();
            if !self.answers(seq, flags & libc::NLM_F_DUMP == libc::NLM_F_DUMP, |message| each(&mut result, message))? {
                return Ok(result);
            }
        }
        Err(io::Error::from_raw_os_error(libc::EINTR))
    }

    /// Whether the answers are inconsistent.
    fn answers(&mut self, seq: u32, dump: bool, mut each: impl FnMut(Message<'_>)) -> io::Result<bool> {
        let mut interrupted = false;
        loop {
            let data = match self.receive(0) {
                Ok(data) => data,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::Error::from_raw_os_error(libc::ETIMEDOUT));
                }
                Err(error) => return Err(error),
            };
            for message in messages(data).filter(|message| message.seq() == seq) {
                interrupted |= i32::from(message.flags()) & libc::NLM_F_DUMP_INTR != 0;
                match i32::from(message.kind()) {
                    libc::NLMSG_ERROR => {
                        return match message.errno() {
                            0 => Ok(interrupted),
                            libc::EINTR => Ok(true),
                            errno => Err(io::Error::from_raw_os_error(errno)),
                        };
                    }
                    libc::NLMSG_DONE => {
                        // The end of a dump carries its result.
                        return match message.errno() {
                            0 => Ok(interrupted),
                            libc::EINTR => Ok(true),
                            errno => Err(io::Error::from_raw_os_error(errno)),
                        };
                    }
                    _ => each(message),
                }
                if !dump {
                    return Ok(false);
                }
            }
        }
    }
}

fn request(kind: i32, family: Option<IpFamily>, flags: i32, seq: u32, attributes: &[(u16, &[u8])]) -> Vec<u8> {
    let mut out = vec![0; 4];
    let kind = (libc::NFNL_SUBSYS_NFTABLES << 8 | kind) as u16;
    out.extend(kind.to_ne_bytes());
    out.extend(((libc::NLM_F_REQUEST | flags) as u16).to_ne_bytes());
    out.extend(seq.to_ne_bytes());
    out.extend([0; 4]);
    out.extend([family.map_or(libc::AF_UNSPEC as u8, |family| protocol_family(family) as u8), 0, 0, 0]);
    for (kind, data) in attributes {
        out.extend(((data.len() + 4) as u16).to_ne_bytes());
        out.extend(kind.to_ne_bytes());
        out.extend(*data);
        out.resize(out.len().next_multiple_of(4), 0);
    }
    let len = out.len() as u32;
    out[..4].copy_from_slice(&len.to_ne_bytes());
    out
}
