//! Knocking at a Service by real connections until it answers, and which endpoint it was that answered.

use super::lane::Lane;
use crate::netns;
use crate::server::Answer;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{Domain, SockAddr, Socket, Type};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4, TcpStream};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Time between two attempts: short beside what is measured, long beside an attempt, so that knocking costs few CPU.
const PAUSE: Duration = Duration::from_millis(1);
/// An attempt that is neither answered nor refused by then is given up: the kernel would repeat its packet after a second only.
const PATIENCE: Duration = Duration::from_millis(100);
/// So many attempts pass between two looks at whether there is something to wait for.
const LOOK: usize = 32;

/// An attempt that was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answered {
    /// When the connection was there.
    pub at: Instant,
    /// The endpoint's address.
    pub by: Ipv4Addr,
}

/// One attempt in the calling thread's namespace, to its end.
#[must_use]
pub fn once(to: SocketAddrV4) -> Option<Answered> {
    let socket = attempt(to)?;
    let timeout = PollTimeout::try_from(PATIENCE).expect("PATIENCE is in poll's range");
    let ready = poll(&mut [PollFd::new(socket.as_fd(), PollFlags::POLLOUT)], timeout) == Ok(1);
    if ready { answer(socket) } else { None }
}

/// Begins a connection that will end with a reset, so that no side keeps it. `None` = it was refused already.
fn attempt(to: SocketAddrV4) -> Option<Socket> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).ok()?;
    socket.set_linger(Some(Duration::ZERO)).ok()?;
    socket.set_nonblocking(true).ok()?;
    match socket.connect(&SockAddr::from(to)) {
        Ok(()) => Some(socket),
        Err(e) if e.raw_os_error() == Some(nix::libc::EINPROGRESS) => Some(socket),
        Err(_) => None,
    }
}

/// Who answered a connection that is ready, now; `None` = it was refused.
fn answer(socket: Socket) -> Option<Answered> {
    if !matches!(socket.take_error(), Ok(None)) || socket.peer_addr().is_err() {
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
///
/// A new attempt begins every millisecond, whether those before have ended or not: packets to a Service that a proxy does not know
/// yet are dropped, not refused, while an answer may be slow on a busy machine.
#[must_use]
pub fn until(
    to: SocketAddrV4,
    deadline: Instant,
    mut alive: impl FnMut() -> bool,
    mut good: impl FnMut(Answered) -> bool,
) -> Option<Answered> {
    let mut open: VecDeque<(Instant, Socket)> = VecDeque::new();
    for number in 1usize.. {
        let begun = Instant::now();
        open.extend(attempt(to).map(|socket| (begun, socket)));
        while let Some(left) = PAUSE.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()) {
            if open.is_empty() {
                std::thread::sleep(left);
                break;
            }
            let mut fds: Vec<PollFd> =
                open.iter().map(|(_, socket)| PollFd::new(socket.as_fd(), PollFlags::POLLOUT)).collect();
            // Rounded up to a whole millisecond.
            if poll(&mut fds, PollTimeout::from(1u8)).unwrap_or(0) == 0 {
                break;
            }
            let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(true)).collect();
            let (ended, rest): (Vec<_>, Vec<_>) = open.drain(..).zip(ready).partition(|(_, ready)| *ready);
            open.extend(rest.into_iter().map(|(attempt, _)| attempt));
            for ((_, socket), _) in ended {
                if let Some(answered) = answer(socket).filter(|answered| good(*answered)) {
                    return Some(answered);
                }
            }
        }
        while open.front().is_some_and(|(begun, _)| begun.elapsed() > PATIENCE) {
            open.pop_front();
        }
        if Instant::now() >= deadline || (number % LOOK == 0 && !alive()) {
            return None;
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::cluster::ENDPOINT_PORT;
    use crate::server::{Arrivals, Server};

    #[test]
    fn an_answer_is_noticed_at_once_after_refusals_and_after_silence() {
        if let Some(why) = netns::missing() {
            println!("SKIP {why}");
            return;
        }
        let lane = Lane::new("knock").unwrap();
        let _server =
            Server::start(&lane.pods().path(), "pods", &[ENDPOINT_PORT].into(), &Arrivals::default()).unwrap();
        lane.node.sysctl(&[("net/ipv4/icmp_ratemask", "0")]).unwrap();
        let pod = Ipv4Addr::new(10, 128, 3, 4);
        let (to, patient) = (SocketAddrV4::new(pod, ENDPOINT_PORT), Instant::now() + Duration::from_secs(20));
        for kind in ["unreachable", "blackhole"] {
            lane.node.ip(&format!("route add {kind} {pod}")).unwrap();
            let knocked = Knocker::new(&lane).spawn(move || until(to, patient, || true, |_| true));
            std::thread::sleep(Duration::from_millis(300));
            assert!(!knocked.is_finished(), "{kind}");
            lane.node.ip(&format!("route del {kind} {pod}")).unwrap();
            let open = Instant::now();
            let answered = knocked.join().unwrap().unwrap();
            assert_eq!(answered.by, pod);
            // The attempts before the change stay silent; only one of those after it can be answered. Loose for busy machines.
            assert!(answered.at < open + Duration::from_millis(60), "{kind}: {:?}", answered.at.duration_since(open));
        }
        let nowhere = SocketAddrV4::new(Ipv4Addr::new(172, 30, 0, 1), 80);
        let knocked = Knocker::new(&lane).spawn(move || (once(nowhere), until(nowhere, patient, || false, |_| true)));
        assert_eq!(knocked.join().unwrap(), (None, None));
    }
}
