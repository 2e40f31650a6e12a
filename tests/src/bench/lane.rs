//! One client, one node and the pods behind it, in a row, and how long the first packets of new connections need through it.
//!
//! ```text
//!   client ── eth0 │ node │ eth1 ── pods (every address of the pod network is local there)
//! ```
//!
//! One thread does it all: it connects in the client's namespace and accepts in that of the pods, pinned to one CPU. A packet
//! on a veth pair is handled on the CPU that sent it before `connect` returns, so that neither another thread's wake-up nor a
//! move to another CPU is part of a measured time.

use super::cluster::{ENDPOINT_PORT, POD_NETWORK};
use crate::netns::{self, Netns};
use anyhow::{Context, Result, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use socket2::{Domain, SockAddr, Socket, Type};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// The client's address.
pub const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 10, 1, 2);
/// The node's address.
pub const NODE: Ipv4Addr = Ipv4Addr::new(10, 10, 1, 1);
/// Holds the client and all pods, as `--cluster-cidr` takes it: nothing is masqueraded.
pub const CLUSTER_CIDR: &str = "10.0.0.0/8";

/// Source ports in turn, outside the range that the kernel chooses from by itself.
const PORTS: std::ops::Range<usize> = 2_000..32_000;
/// Longer than any answer takes; the kernel's first retransmission comes after one second and shows as what it is.
const PATIENCE: Duration = Duration::from_secs(3);
/// Connections before the first that counts: neighbours are resolved, caches are warm.
const WARM_UP: usize = 50;

/// Namespaces of a client, a node and pods.
#[derive(Debug)]
pub struct Lane {
    client: Netns,
    /// The node, on which a proxy may run.
    pub node: Netns,
    pods: Netns,
    next_port: AtomicUsize,
}

impl Lane {
    /// Makes the namespaces and the links between them. `role` is only for the eye.
    ///
    /// # Errors
    /// The `ip` tool refuses.
    pub fn new(role: &str) -> Result<Self> {
        let [client, node, pods] = ["client", role, "pods"].map(Netns::new);
        let (client, node, pods) = (client?, node?, pods?);
        node.ip(&format!(
            "link add eth0 type veth peer name eth0 netns {}\nlink add eth1 type veth peer name eth0 netns {}\n\
             addr add {NODE}/24 dev eth0\naddr add 10.10.2.1/24 dev eth1\nlink set eth0 up\nlink set eth1 up",
            client.name(),
            pods.name()
        ))?;
        client.ip(&format!("addr add {CLIENT}/24 dev eth0\nlink set eth0 up\nroute add default via {NODE}"))?;
        pods.ip(&format!(
            "addr add 10.10.2.2/24 dev eth0\nlink set eth0 up\nroute add default via 10.10.2.1\nroute add local {POD_NETWORK} dev lo"
        ))?;
        node.ip(&format!("route add {POD_NETWORK} via 10.10.2.2"))?;
        node.sysctl(&[("net/ipv4/ip_forward", "1"), ("net/ipv4/icmp_ratelimit", "0")])?;
        Ok(Self { client, node, pods, next_port: AtomicUsize::new(0) })
    }

    /// The namespace of the client.
    #[must_use]
    pub fn client(&self) -> &Netns {
        &self.client
    }

    /// The namespace of the pods.
    #[must_use]
    pub fn pods(&self) -> &Netns {
        &self.pods
    }

    /// Makes `count` TCP connections to `to`, one after the other, each from a port of its own. Returns how long each
    /// `connect` took, in nanoseconds. A connection ends with a reset, so that no side keeps it.
    ///
    /// # Errors
    /// One of them fails.
    pub fn tcp(&self, to: SocketAddrV4, count: usize) -> Result<Vec<u64>> {
        self.measured(count, |pods, client| {
            netns::enter(pods);
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, ENDPOINT_PORT))?;
            listener.set_nonblocking(true)?;
            netns::enter(client);
            Ok(move |port| {
                let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
                socket.set_linger(Some(Duration::ZERO))?;
                // It limits connect, too (inet_stream_connect takes it from sock_sndtimeo).
                socket.set_write_timeout(Some(PATIENCE))?;
                socket.bind(&SocketAddrV4::new(CLIENT, port).into())?;
                let to = SockAddr::from(to);
                let start = Instant::now();
                let result = socket.connect(&to);
                let time = start.elapsed();
                result.with_context(|| format!("TCP connection from port {port}"))?;
                await_readable(&listener)?;
                listener.accept()?;
                Ok(time)
            })
        })
    }

    /// Sends `count` UDP requests to `to`, each from a port of its own, and answers them at the pod's address `endpoint`.
    /// Returns how long each took from before the request is sent until its answer is read, in nanoseconds.
    ///
    /// # Errors
    /// One of them is not answered.
    pub fn udp(&self, to: SocketAddrV4, endpoint: Ipv4Addr, count: usize) -> Result<Vec<u64>> {
        self.measured(count, move |pods, client| {
            netns::enter(pods);
            let server = UdpSocket::bind((endpoint, ENDPOINT_PORT))?;
            server.set_read_timeout(Some(PATIENCE))?;
            netns::enter(client);
            Ok(move |port| {
                let socket = UdpSocket::bind((CLIENT, port))?;
                socket.set_read_timeout(Some(PATIENCE))?;
                socket.connect(to)?;
                let mut buffer = [0u8; 64];
                let start = Instant::now();
                let exchange = (|| {
                    socket.send(b"request")?;
                    let (_, peer) = server.recv_from(&mut buffer)?;
                    server.send_to(b"answer", peer)?;
                    socket.recv(&mut buffer)
                })();
                let time = start.elapsed();
                exchange.with_context(|| format!("UDP exchange from port {port}"))?;
                Ok(time)
            })
        })
    }

    /// Whether a TCP connection to `to` succeeds now.
    #[must_use]
    pub fn reaches_tcp(&self, to: SocketAddrV4) -> bool {
        self.in_turn(|pods, client| {
            netns::enter(pods);
            let _listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, ENDPOINT_PORT))?;
            netns::enter(client);
            let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
            socket.set_linger(Some(Duration::ZERO))?;
            Ok(socket.connect_timeout(&to.into(), Duration::from_millis(200))?)
        })
        .is_ok()
    }

    /// Whether a UDP request to `to` arrives at the pod's address `endpoint` now.
    #[must_use]
    pub fn reaches_udp(&self, to: SocketAddrV4, endpoint: Ipv4Addr) -> bool {
        self.in_turn(|pods, client| {
            netns::enter(pods);
            let server = UdpSocket::bind((endpoint, ENDPOINT_PORT))?;
            server.set_read_timeout(Some(Duration::from_millis(200)))?;
            netns::enter(client);
            UdpSocket::bind((CLIENT, 0))?.send_to(b"request", to)?;
            server.recv_from(&mut [0u8; 64])?;
            Ok(())
        })
        .is_ok()
    }

    fn in_turn<T: Send>(&self, work: impl FnOnce(&std::path::Path, &std::path::Path) -> Result<T> + Send) -> Result<T> {
        let (pods, client) = (self.pods.path(), self.client.path());
        std::thread::scope(|scope| scope.spawn(|| work(&pods, &client)).join().expect("probes do not panic"))
    }

    /// Opens the sockets of a sample, then takes its measures: `open` gives what makes one connection from a port.
    fn measured<F>(
        &self,
        count: usize,
        open: impl FnOnce(&std::path::Path, &std::path::Path) -> Result<F> + Send,
    ) -> Result<Vec<u64>>
    where
        F: FnMut(u16) -> Result<Duration>,
    {
        // What earlier samples left would be looked at, and ended, by the connections of this one. An error means that there is
        // no conntrack here, as on a node without any rules.
        let _ = self.node.output(&["conntrack", "-F"]);
        self.in_turn(|pods, client| {
            pin()?;
            let mut one = open(pods, client)?;
            let mut times = Vec::with_capacity(count);
            for number in 0..WARM_UP + count {
                let port = PORTS.start + self.next_port.fetch_add(1, Ordering::Relaxed) % PORTS.len();
                let time = one(u16::try_from(port).expect("PORTS ends below 65536"))?;
                if number >= WARM_UP {
                    times.push(u64::try_from(time.as_nanos()).expect("less than 584 years"));
                }
            }
            Ok(times)
        })
    }
}

/// Keeps the calling thread on the last CPU that it may use.
fn pin() -> Result<()> {
    let this = Pid::from_raw(0);
    let allowed = nix::sched::sched_getaffinity(this)?;
    let last = (0..CpuSet::count()).rev().find(|cpu| allowed.is_set(*cpu).unwrap_or(false)).context("no CPU")?;
    let mut set = CpuSet::new();
    set.set(last)?;
    sched_setaffinity(this, &set)?;
    Ok(())
}

/// The last packet of the handshake may still be under way when `connect` returns.
fn await_readable(listener: &TcpListener) -> Result<()> {
    let mut fds = [PollFd::new(listener.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(PATIENCE).expect("PATIENCE is in poll's range");
    if poll(&mut fds, timeout)? == 0 {
        bail!("connected, but nothing to accept after {PATIENCE:?}: it went elsewhere");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_measures_connections_to_pods_and_sees_which_addresses_do_not_answer() {
        if let Some(why) = netns::missing() {
            println!("SKIP {why}");
            return;
        }
        let lane = Lane::new("plain").unwrap();
        let pod = Ipv4Addr::new(10, 128, 3, 4);
        let to = SocketAddrV4::new(pod, ENDPOINT_PORT);
        for times in [lane.tcp(to, 20).unwrap(), lane.udp(to, pod, 20).unwrap()] {
            assert_eq!(times.len(), 20);
            assert!(times.iter().all(|t| (1_000..1_000_000_000).contains(t)), "{times:?}");
        }
        assert!(lane.reaches_tcp(to) && lane.reaches_udp(to, pod));
        let nowhere = SocketAddrV4::new(Ipv4Addr::new(172, 30, 0, 1), 80);
        assert!(!lane.reaches_tcp(nowhere) && !lane.reaches_udp(nowhere, pod));
        assert!(lane.tcp(nowhere, 1).is_err());
    }
}
