//! Servers that say who they are: one thread per namespace listens on every wanted port of every local address.
//!
//! The answer names the server, its own address and port, and the peer that it saw: all that a probe needs to know about
//! translation and masquerade. Arrivals of UDP datagrams and SCTP INITs are also logged, so that a packet whose reply
//! cannot come back is still observed.

use crate::netns;
use crate::packet::{parse_ipv4, parse_sctp_init};
use anyhow::{Context, Result};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrIn6, recvmsg, sendmsg, setsockopt, sockopt,
};
use socket2::{Domain, Protocol as SockProtocol, SockAddr, Socket, Type};
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Write};
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// IP protocol number of SCTP.
pub const SCTP: i32 = 132;

/// Who answered a probe, and what it saw.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Answer {
    /// Name of the server, which is that of its namespace in the world.
    pub server: String,
    /// The address and port at which the probe arrived.
    pub local: SocketAddr,
    /// The peer that the server saw.
    pub peer: SocketAddr,
}

impl fmt::Display for Answer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.server, self.local, self.peer)
    }
}

impl Answer {
    /// Reads the text that a server sends.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        Some(Self {
            server: words.next()?.to_string(),
            local: words.next()?.parse().ok()?,
            peer: words.next()?.parse().ok()?,
        })
    }
}

/// What arrived where, by the token in the packet.
#[derive(Clone, Debug, Default)]
pub struct Arrivals(Arc<Mutex<HashMap<String, Answer>>>);

impl Arrivals {
    /// Where the packet with `token` arrived, if it did.
    #[must_use]
    pub fn get(&self, token: &str) -> Option<Answer> {
        self.0.lock().expect("no thread panics with the lock").get(token).cloned()
    }

    fn put(&self, token: String, answer: Answer) {
        self.0.lock().expect("no thread panics with the lock").insert(token, answer);
    }
}

/// A running server; stops on drop.
#[derive(Debug)]
pub struct Server {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts a server called `name` in the namespace at `path`, on `ports` (TCP and UDP, both families), and for SCTP
    /// INITs to any port.
    ///
    /// # Errors
    /// A socket cannot be made or bound.
    pub fn start(path: &Path, name: &str, ports: &BTreeSet<u16>, arrivals: &Arrivals) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (path, name, arrivals, ports) = (path.to_path_buf(), name.to_string(), arrivals.clone(), ports.clone());
        let (ready, wait) = std::sync::mpsc::channel();
        let thread = {
            let stop = stop.clone();
            std::thread::Builder::new().name(format!("server-{name}")).spawn(move || {
                netns::enter(&path);
                match Sockets::open(&ports) {
                    Ok(sockets) => {
                        let _ = ready.send(Ok(()));
                        sockets.serve(&name, &arrivals, &stop);
                    }
                    Err(error) => {
                        let _ = ready.send(Err(error));
                    }
                }
            })?
        };
        wait.recv().context("server thread ended")??;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Sockets {
    tcp: Vec<TcpListener>,
    udp: Vec<(u16, Socket)>,
    sctp4: Socket,
    sctp6: Socket,
}

impl Sockets {
    fn open(ports: &BTreeSet<u16>) -> Result<Self> {
        let mut tcp = Vec::new();
        let mut udp = Vec::new();
        for &port in ports {
            let any = SockAddr::from(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)));
            let socket = Socket::new(Domain::IPV6, Type::STREAM, None)?;
            socket.set_only_v6(false)?;
            socket.set_reuse_address(true)?;
            socket.bind(&any).with_context(|| format!("TCP port {port}"))?;
            socket.listen(1024)?;
            socket.set_nonblocking(true)?;
            tcp.push(socket.into());
            let socket = Socket::new(Domain::IPV6, Type::DGRAM, None)?;
            socket.set_only_v6(false)?;
            // The destination address of each datagram; as a mapped address for IPv4.
            setsockopt(&socket, sockopt::Ipv6RecvPacketInfo, &true)?;
            // Answers from addresses that only a route makes local (the sink's).
            socket.set_freebind_v6(true)?;
            socket.bind(&any).with_context(|| format!("UDP port {port}"))?;
            socket.set_nonblocking(true)?;
            udp.push((port, socket));
        }
        let raw = |domain| -> Result<Socket> {
            let socket = Socket::new(domain, Type::RAW, Some(SockProtocol::from(SCTP)))?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        let (sctp4, sctp6) = (raw(Domain::IPV4)?, raw(Domain::IPV6)?);
        setsockopt(&sctp6, sockopt::Ipv6RecvPacketInfo, &true)?;
        Ok(Self { tcp, udp, sctp4, sctp6 })
    }

    fn serve(&self, name: &str, arrivals: &Arrivals, stop: &Arc<AtomicBool>) {
        while !stop.load(Ordering::Relaxed) {
            let mut fds: Vec<PollFd> =
                self.tcp.iter().map(AsFd::as_fd).map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
            fds.extend(self.udp.iter().map(|(_, s)| PollFd::new(s.as_fd(), PollFlags::POLLIN)));
            fds.push(PollFd::new(self.sctp4.as_fd(), PollFlags::POLLIN));
            fds.push(PollFd::new(self.sctp6.as_fd(), PollFlags::POLLIN));
            match poll(&mut fds, PollTimeout::from(50u8)) {
                Ok(0) | Err(_) => continue,
                Ok(_) => {}
            }
            for listener in &self.tcp {
                while let Ok((stream, _)) = listener.accept() {
                    serve_stream(stream, name, stop.clone());
                }
            }
            for (port, socket) in &self.udp {
                while let Some((local, peer, payload)) = receive(socket, *port) {
                    let answer = Answer { server: name.to_string(), local, peer };
                    let token = String::from_utf8_lossy(&payload).into_owned();
                    reply(socket, &answer, format!("{token} {answer}").as_bytes());
                    arrivals.put(token, answer);
                }
            }
            let mut buffer = [0u8; 2048];
            while let Ok(n) = (&self.sctp4).read_some(&mut buffer) {
                let Some((_, source, destination, body)) = parse_ipv4(&buffer[..n]) else {
                    continue;
                };
                log_init(name, arrivals, source, destination, body);
            }
            while let Some((local, peer, payload)) = receive(&self.sctp6, 0) {
                log_init(name, arrivals, peer.ip(), local.ip(), &payload);
            }
        }
    }
}

fn log_init(name: &str, arrivals: &Arrivals, source: IpAddr, destination: IpAddr, body: &[u8]) {
    if let Some(init) = parse_sctp_init(body)
        && init.checksum_ok
    {
        let answer = Answer {
            server: name.to_string(),
            local: (destination, init.destination_port).into(),
            peer: (source, init.source_port).into(),
        };
        arrivals.put(format!("sctp-{}", init.tag), answer);
    }
}

trait ReadSome {
    fn read_some(&mut self, buffer: &mut [u8]) -> std::io::Result<usize>;
}

impl ReadSome for &Socket {
    fn read_some(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        std::io::Read::read(self, buffer)
    }
}

/// Greets with an [`Answer`], then answers each line with it again: an open connection can be tried later.
fn serve_stream(stream: TcpStream, name: &str, stop: Arc<AtomicBool>) {
    let name = name.to_string();
    let _ = std::thread::Builder::new().name("connection".into()).spawn(move || {
        let _ = stream.set_nonblocking(false);
        let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
        let (Ok(local), Ok(peer)) = (stream.local_addr(), stream.peer_addr()) else {
            return;
        };
        let answer = Answer { server: name, local: canonical(local), peer: canonical(peer) };
        let mut writer = &stream;
        if writeln!(writer, "{answer}").is_err() {
            return;
        }
        let mut lines = BufReader::new(&stream);
        let mut line = String::new();
        loop {
            match lines.read_line(&mut line) {
                Ok(0) => return,
                Ok(_) => {
                    line.clear();
                    if writeln!(writer, "{answer}").is_err() {
                        return;
                    }
                }
                Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) => {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    });
}

/// An IPv4 address where an IPv6 socket shows a mapped one.
#[must_use]
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

fn receive(socket: &Socket, port: u16) -> Option<(SocketAddr, SocketAddr, Vec<u8>)> {
    let mut buffer = [0u8; 2048];
    let mut iov = [IoSliceMut::new(&mut buffer)];
    let mut space = nix::cmsg_space!(nix::libc::in6_pktinfo);
    let message =
        recvmsg::<SockaddrIn6>(socket.as_raw_fd(), &mut iov, Some(&mut space), MsgFlags::MSG_DONTWAIT).ok()?;
    let peer = message.address?;
    let local = message.cmsgs().ok()?.find_map(|c| match c {
        ControlMessageOwned::Ipv6PacketInfo(info) => Some(Ipv6Addr::from(info.ipi6_addr.s6_addr)),
        _ => None,
    })?;
    let bytes = message.bytes;
    let peer = SocketAddr::new(IpAddr::V6(peer.ip()), peer.port());
    Some((canonical(SocketAddr::new(IpAddr::V6(local), port)), canonical(peer), buffer[..bytes].to_vec()))
}

fn reply(socket: &Socket, answer: &Answer, payload: &[u8]) {
    let mapped = |ip: IpAddr| match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let info = nix::libc::in6_pktinfo {
        ipi6_addr: nix::libc::in6_addr { s6_addr: mapped(answer.local.ip()).octets() },
        ipi6_ifindex: 0,
    };
    let peer = SockaddrIn6::from(std::net::SocketAddrV6::new(mapped(answer.peer.ip()), answer.peer.port(), 0, 0));
    let _ = sendmsg(
        socket.as_raw_fd(),
        &[IoSlice::new(payload)],
        &[ControlMessage::Ipv6PacketInfo(&info)],
        MsgFlags::MSG_DONTWAIT,
        Some(&peer),
    );
}
