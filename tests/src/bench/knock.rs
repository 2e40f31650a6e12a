//! Knocking at a Service by real connections until it answers, and which endpoint it was that answered.

use super::lane::Lane;
use crate::netns;
use crate::server::Answer;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Pause between two attempts: short beside what is measured, long beside an attempt, so that knocking costs few CPU.
const PAUSE: Duration = Duration::from_millis(1);
/// An attempt that is neither answered nor refused by then is given up: the kernel would repeat its packet after a second only.
const PATIENCE: Duration = Duration::from_millis(100);

/// An attempt that was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// When the connection was there.
    pub at: Instant,
    /// The endpoint's address.
    pub by: Ipv4Addr,
}

/// One attempt in the calling thread's namespace. The connection ends with a reset, so that no side keeps it.
#[must_use]
pub fn once(to: SocketAddrV4) -> Option<Answered> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).ok()?;
    socket.set_linger(Some(Duration::ZERO)).ok()?;
    socket.set_nonblocking(true).ok()?;
    match socket.connect(&SockAddr::from(to)) {
        Ok(()) => {}
        Err(e) if e.raw_os_error() == Some(nix::libc::EINPROGRESS) => {}
        Err(_) => return None,
    }
    let timeout = PollTimeout::try_from(PATIENCE).expect("PATIENCE is in poll's range");
    let events = poll(&mut [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)], timeout);
    if events != Ok(1) || !matches!(socket.take_error(), Ok(None)) || socket.peer_addr().is_err() {
        return None;
    }
    let at = Instant::now();
    socket.set_nonblocking(false).ok()?;
    // Longer than any pause of a busy server; what is measured is `at`.
    socket.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    let mut line = String::new();
    BufReader::new(TcpStream::from(socket)).read_line(&mut line).ok()?;
    match Answer::parse(&line)?.local.ip() {
        IpAddr::V4(by) => Some(Answered { at, by }),
        IpAddr::V6(_) => None,
    }
}

/// Knocks from the client of a lane; for threads of their own.
#[derive(Clone, Debug)]
pub struct Knocker {
    client: PathBuf,
}

impl Knocker {
    /// One that knocks from `lane`'s client.
    #[must_use]
    pub fn new(lane: &Lane) -> Self {
        Self { client: lane.client().path() }
    }

    /// Runs `f` on a thread of its own in the client's namespace.
    pub fn spawn<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> std::thread::JoinHandle<T> {
        let client = self.client.clone();
        std::thread::spawn(move || {
            netns::enter(&client);
            f()
        })
    }
}

/// Knocks until `good` takes an answer; `None` = not before `deadline`, or `alive` says that there is nothing to wait for any more.
#[must_use]
pub fn until(
    to: SocketAddrV4,
    deadline: Instant,
    mut alive: impl FnMut() -> bool,
    mut good: impl FnMut(Answered) -> bool,
) -> Option<Answered> {
    loop {
        if let Some(answered) = once(to).filter(|answered| good(*answered)) {
            return Some(answered);
        }
        if Instant::now() >= deadline || !alive() {
            return None;
        }
        std::thread::sleep(PAUSE);
    }
}
