//! One attempt to reach an address, and exactly what became of it.
//!
//! Refusals are told apart: an ICMP error is taken from the socket's error queue (`IP_RECVERR`, `IPV6_RECVERR`; for TCP the
//! kernel queues them since `tcp_v4_err` calls `ip_icmp_error` for a connecting socket), a reset leaves the queue empty.

use crate::packet::{icmp_echo, parse_ipv4, parse_ipv6, sctp_init};
use crate::server::{Answer, Arrivals, SCTP};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt};
use socket2::{Domain, Protocol as SockProtocol, SockAddr, Socket, Type};
use std::fmt;
use std::io::{BufRead, BufReader, ErrorKind, IoSliceMut, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// What a probe sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Proto {
    /// A TCP connection.
    Tcp,
    /// A UDP datagram.
    Udp,
    /// An SCTP INIT.
    Sctp,
    /// An ICMP or ICMPv6 echo request.
    Icmp,
}

impl fmt::Display for Proto {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Proto::Tcp => "tcp",
            Proto::Udp => "udp",
            Proto::Sctp => "sctp",
            Proto::Icmp => "icmp",
        })
    }
}

/// What became of a probe.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Seen {
    /// A server got it and its answer came back.
    Answer(Answer),
    /// A server got it, but no answer came back.
    OneWay(Answer),
    /// An ICMP error of this type and code came back.
    Unreachable {
        /// ICMP (ICMPv6) type.
        kind: u8,
        /// ICMP (ICMPv6) code.
        code: u8,
    },
    /// A TCP reset came back.
    Reset,
    /// Nothing came back within the time, and no server saw it.
    Nothing,
    /// Something else.
    Other(String),
}

impl Seen {
    /// ICMP destination unreachable (port), the answer of nft's `reject`: type 3 code 3, ICMPv6 type 1 code 4.
    #[must_use]
    pub fn is_port_unreachable(&self) -> bool {
        matches!(self, Seen::Unreachable { kind: 3, code: 3 } | Seen::Unreachable { kind: 1, code: 4 })
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Seen::Answer(a) => write!(f, "answer of {} at {} to {}", a.server, a.local, a.peer),
            Seen::OneWay(a) => write!(f, "arrived at {} ({}) from {}, no way back", a.server, a.local, a.peer),
            s if s.is_port_unreachable() => f.write_str("rejected (port unreachable)"),
            Seen::Unreachable { kind, code } => write!(f, "ICMP error type {kind} code {code}"),
            Seen::Reset => f.write_str("TCP reset"),
            Seen::Nothing => f.write_str("nothing (dropped)"),
            Seen::Other(text) => f.write_str(text),
        }
    }
}

static TOKEN: AtomicU32 = AtomicU32::new(1);

fn token() -> u32 {
    // Unique over the processes that may share a namespace's servers, too.
    TOKEN.fetch_add(1, Ordering::Relaxed).wrapping_add(std::process::id() << 16)
}

/// Makes one attempt from `source` in the calling thread's namespace. `port` is ignored for ICMP.
#[must_use]
pub fn once(proto: Proto, source: IpAddr, destination: SocketAddr, timeout: Duration, arrivals: &Arrivals) -> Seen {
    let seen = match proto {
        Proto::Tcp => {
            Flow::tcp(source, destination, timeout).map_or_else(|seen| seen, |(_, answer)| Seen::Answer(answer))
        }
        Proto::Udp => match udp_socket(source, destination) {
            Ok(socket) => udp_exchange(&socket, timeout, arrivals),
            Err(e) => Seen::Other(format!("UDP socket: {e}")),
        },
        Proto::Sctp => {
            return sctp(source, destination, timeout, arrivals).unwrap_or_else(|e| Seen::Other(format!("SCTP: {e}")));
        }
        Proto::Icmp => {
            return icmp(source, destination.ip(), timeout).unwrap_or_else(|e| Seen::Other(format!("ICMP: {e}")));
        }
    };
    if let Seen::Other(text) = &seen {
        return Seen::Other(format!("{proto} {source} -> {destination}: {text}"));
    }
    seen
}

/// A connection or a connected UDP socket that stays open.
#[derive(Debug)]
pub enum Flow {
    /// An established TCP connection.
    Tcp(TcpStream),
    /// A connected UDP socket.
    Udp(Socket),
}

impl Flow {
    /// Connects and reads the greeting.
    ///
    /// # Errors
    /// What happened instead.
    pub fn tcp(source: IpAddr, destination: SocketAddr, timeout: Duration) -> Result<(Self, Answer), Seen> {
        let other = |e: std::io::Error| Seen::Other(e.to_string());
        let socket = Socket::new(Domain::for_address(destination), Type::STREAM, None).map_err(other)?;
        receive_errors(&socket, destination).map_err(other)?;
        socket.bind(&SockAddr::from(SocketAddr::new(source, 0))).map_err(other)?;
        socket.set_nonblocking(true).map_err(other)?;
        let deadline = Instant::now() + timeout;
        let mut failed = match socket.connect(&SockAddr::from(destination)) {
            Ok(()) => None,
            Err(e) if e.raw_os_error() == Some(nix::libc::EINPROGRESS) => None,
            Err(e) => Some(e),
        };
        loop {
            if let Some(seen) = queued_error(&socket, destination) {
                return Err(seen);
            }
            if let Some(e) = failed.take().or_else(|| socket.take_error().ok().flatten()) {
                // A reset and an ICMP port unreachable give the same errno; the error queue was empty above, but the
                // error may be queued just now.
                std::thread::sleep(Duration::from_millis(1));
                if let Some(seen) = queued_error(&socket, destination) {
                    return Err(seen);
                }
                return Err(match e.kind() {
                    ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset => Seen::Reset,
                    ErrorKind::TimedOut => Seen::Nothing,
                    _ => Seen::Other(e.to_string()),
                });
            }
            if socket.peer_addr().is_ok() {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Seen::Nothing);
            }
            wait(&socket, PollFlags::POLLOUT, left);
        }
        socket.set_nonblocking(false).map_err(other)?;
        let stream = TcpStream::from(socket);
        stream.set_read_timeout(Some(timeout)).map_err(other)?;
        let answer = read_answer(&stream).map_err(|e| Seen::Other(format!("connected, but no greeting: {e}")))?;
        Ok((Flow::Tcp(stream), answer))
    }

    /// Opens a connected UDP socket and makes a first exchange.
    ///
    /// # Errors
    /// What happened instead.
    pub fn udp(
        source: IpAddr,
        destination: SocketAddr,
        timeout: Duration,
        arrivals: &Arrivals,
    ) -> Result<(Self, Answer), Seen> {
        let socket = udp_socket(source, destination).map_err(|e| Seen::Other(e.to_string()))?;
        match udp_exchange(&socket, timeout, arrivals) {
            Seen::Answer(answer) => Ok((Flow::Udp(socket), answer)),
            seen => Err(seen),
        }
    }

    /// Sends again on the same flow.
    #[must_use]
    pub fn again(&self, timeout: Duration, arrivals: &Arrivals) -> Seen {
        match self {
            Flow::Tcp(stream) => {
                let mut writer = stream;
                let _ = stream.set_read_timeout(Some(timeout));
                match writeln!(writer, "again").and_then(|()| read_answer(stream)) {
                    Ok(answer) => Seen::Answer(answer),
                    Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Seen::Nothing,
                    Err(e) if e.kind() == ErrorKind::ConnectionReset => Seen::Reset,
                    Err(e) => Seen::Other(e.to_string()),
                }
            }
            Flow::Udp(socket) => udp_exchange(socket, timeout, arrivals),
        }
    }
}

fn read_answer(stream: &TcpStream) -> std::io::Result<Answer> {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line)?;
    Answer::parse(&line).ok_or_else(|| std::io::Error::other(format!("not an answer: {line:?}")))
}

fn udp_socket(source: IpAddr, destination: SocketAddr) -> std::io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(destination), Type::DGRAM, None)?;
    receive_errors(&socket, destination)?;
    socket.bind(&SockAddr::from(SocketAddr::new(source, 0)))?;
    socket.connect(&SockAddr::from(destination))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

fn udp_exchange(socket: &Socket, timeout: Duration, arrivals: &Arrivals) -> Seen {
    let Some(destination) = socket.peer_addr().ok().and_then(|a| a.as_socket()) else {
        return Seen::Other("UDP socket is not connected".into());
    };
    let token = format!("udp-{}", token());
    // A send fails with EPERM where an output chain drops the datagram; that is a drop like any other.
    let _ = socket.send(token.as_bytes());
    let deadline = Instant::now() + timeout;
    let mut way_back = None;
    let mut buffer = [0u8; 1024];
    loop {
        if let Some(seen) = queued_error(socket, destination) {
            return seen;
        }
        let mut reader = socket;
        match reader.read(&mut buffer) {
            Ok(n) => {
                let text = String::from_utf8_lossy(&buffer[..n]).into_owned();
                if let Some(answer) = text.strip_prefix(&format!("{token} ")).and_then(Answer::parse) {
                    return Seen::Answer(answer);
                }
                continue; // a late answer to an earlier datagram of this flow
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(_) => continue, // the pending error that belongs to the queued one
        }
        let now = Instant::now();
        let arrived = arrivals.get(&token);
        if arrived.is_some() && way_back.is_none() {
            way_back = Some(now + Duration::from_millis(300));
        }
        // Once it has arrived, the answer is near or never.
        let left = way_back.map_or(deadline, |d| d.min(deadline)).saturating_duration_since(now);
        if left.is_zero() {
            return arrived.map_or(Seen::Nothing, Seen::OneWay);
        }
        wait(socket, PollFlags::POLLIN, left.min(Duration::from_millis(50)));
    }
}

fn receive_errors(socket: &Socket, destination: SocketAddr) -> std::io::Result<()> {
    if destination.is_ipv4() {
        setsockopt(socket, sockopt::Ipv4RecvErr, &true)?;
    } else {
        setsockopt(socket, sockopt::Ipv6RecvErr, &true)?;
    }
    Ok(())
}

/// Takes one ICMP error off the error queue.
fn queued_error(socket: &Socket, destination: SocketAddr) -> Option<Seen> {
    let mut buffer = [0u8; 512];
    let mut iov = [IoSliceMut::new(&mut buffer)];
    let mut space = vec![0u8; 256];
    let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
    let error = if destination.is_ipv4() {
        let message =
            recvmsg::<nix::sys::socket::SockaddrIn>(socket.as_raw_fd(), &mut iov, Some(&mut space), flags).ok()?;
        message.cmsgs().ok()?.find_map(|c| match c {
            ControlMessageOwned::Ipv4RecvErr(error, _) => Some(error),
            _ => None,
        })
    } else {
        let message =
            recvmsg::<nix::sys::socket::SockaddrIn6>(socket.as_raw_fd(), &mut iov, Some(&mut space), flags).ok()?;
        message.cmsgs().ok()?.find_map(|c| match c {
            ControlMessageOwned::Ipv6RecvErr(error, _) => Some(error),
            _ => None,
        })
    }?;
    // SO_EE_ORIGIN_ICMP = 2, SO_EE_ORIGIN_ICMP6 = 3 (linux/errqueue.h)
    if matches!(error.ee_origin, 2 | 3) {
        return Some(Seen::Unreachable { kind: error.ee_type, code: error.ee_code });
    }
    Some(Seen::Other(format!("local error {}", error.ee_errno)))
}

fn wait(socket: &Socket, flags: PollFlags, left: Duration) {
    let timeout = PollTimeout::try_from(left.min(Duration::from_millis(200))).unwrap_or(PollTimeout::ZERO);
    let _ = poll(&mut [PollFd::new(socket.as_fd(), flags)], timeout);
}

fn icmp_socket(source: IpAddr) -> std::io::Result<Socket> {
    let (domain, protocol) =
        if source.is_ipv4() { (Domain::IPV4, SockProtocol::ICMPV4) } else { (Domain::IPV6, SockProtocol::ICMPV6) };
    let socket = Socket::new(domain, Type::RAW, Some(protocol))?;
    socket.bind(&SockAddr::from(SocketAddr::new(source, 0)))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Reads one ICMP (ICMPv6) message without its IP header.
fn read_icmp(socket: &Socket, v4: bool) -> Option<Vec<u8>> {
    let mut buffer = [0u8; 1500];
    let mut reader = socket;
    let n = reader.read(&mut buffer).ok()?;
    let message = if v4 { parse_ipv4(&buffer[..n])?.3 } else { &buffer[..n] };
    (message.len() >= 8).then(|| message.to_vec())
}

/// The transport protocol and payload of the packet that an ICMP error quotes, with the error's type and code.
fn quoted(message: &[u8], v4: bool) -> Option<(u8, u8, u8, &[u8])> {
    let (kind, code) = (message[0], message[1]);
    let is_error = if v4 { matches!(kind, 3 | 11 | 12) } else { kind < 128 };
    if !is_error {
        return None;
    }
    let (protocol, _, _, payload) = if v4 { parse_ipv4(&message[8..]) } else { parse_ipv6(&message[8..]) }?;
    Some((kind, code, protocol, payload))
}

fn icmp(source: IpAddr, destination: IpAddr, timeout: Duration) -> std::io::Result<Seen> {
    let v4 = destination.is_ipv4();
    let socket = icmp_socket(source)?;
    let token = token();
    let id = u16::try_from(token & 0xffff).expect("masked");
    let sequence = u16::try_from(token >> 16).expect("16 bits");
    let request = icmp_echo(!v4, id, sequence);
    let _ = socket.send_to(&request, &SockAddr::from(SocketAddr::new(destination, 0)));
    let (reply, request_type) = if v4 { (0, 8) } else { (129, 128) };
    let deadline = Instant::now() + timeout;
    loop {
        while let Some(message) = read_icmp(&socket, v4) {
            if message[0] == reply && message[4..8] == request[4..8] {
                let local = SocketAddr::new(destination, 0);
                return Ok(Seen::Answer(Answer { server: "echo".into(), local, peer: SocketAddr::new(source, 0) }));
            }
            if let Some((kind, code, _, inner)) = quoted(&message, v4)
                && inner.len() >= 8
                && inner[0] == request_type
                && inner[4..8] == request[4..8]
            {
                return Ok(Seen::Unreachable { kind, code });
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Seen::Nothing);
        }
        wait(&socket, PollFlags::POLLIN, left);
    }
}

fn sctp(source: IpAddr, destination: SocketAddr, timeout: Duration, arrivals: &Arrivals) -> std::io::Result<Seen> {
    let v4 = destination.is_ipv4();
    let errors = icmp_socket(source)?;
    let domain = if v4 { Domain::IPV4 } else { Domain::IPV6 };
    let socket = Socket::new(domain, Type::RAW, Some(SockProtocol::from(SCTP)))?;
    socket.bind(&SockAddr::from(SocketAddr::new(source, 0)))?;
    let tag = token();
    let source_port = 20_000 + u16::try_from(tag % 10_000).expect("below 10,000");
    let init = sctp_init(source_port, destination.port(), tag);
    let _ = socket.send_to(&init, &SockAddr::from(SocketAddr::new(destination.ip(), 0)));
    let key = format!("sctp-{tag}");
    let deadline = Instant::now() + timeout;
    loop {
        if let Some(answer) = arrivals.get(&key) {
            return Ok(Seen::OneWay(answer));
        }
        while let Some(message) = read_icmp(&errors, v4) {
            if let Some((kind, code, protocol, inner)) = quoted(&message, v4)
                && i32::from(protocol) == SCTP
                && inner.len() >= 4
                && inner[..4] == init[..4]
            {
                return Ok(Seen::Unreachable { kind, code });
            }
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Seen::Nothing);
        }
        wait(&errors, PollFlags::POLLIN, left.min(Duration::from_millis(2)));
    }
}
