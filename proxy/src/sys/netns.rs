//! Network namespaces: open one, enter it, run something inside.
//!
//! A namespace is a property of a thread, so code that must act in another one runs in a thread of its own. Sockets stay
//! in the namespace in which they were opened, whichever thread uses them later.

use nix::sched::{CloneFlags, setns, unshare};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

/// The namespace of the calling thread. `/proc/self` would be that of the process's first thread.
const OF_THIS_THREAD: &str = "/proc/thread-self/ns/net";

/// An open network namespace; it lives at least as long as this value. Cheap to clone.
#[derive(Clone, Debug)]
pub struct NetNs {
    file: Arc<File>,
    identity: (u64, u64),
}

/// Two handles are equal if they mean the same namespace (device and inode, see namespaces(7)).
impl PartialEq for NetNs {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity
    }
}

impl Eq for NetNs {}

impl NetNs {
    /// Opens a namespace by path: `/run/netns/NAME`, `/proc/PID/ns/net`. Anything else is an error of kind `InvalidInput`
    /// when it is entered.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Self> {
        let file = File::open(path)?;
        let meta = file.metadata()?;
        Ok(Self { file: Arc::new(file), identity: (meta.dev(), meta.ino()) })
    }

    /// Opens a namespace that `ip netns add NAME` made.
    pub fn named(name: &str) -> io::Result<Self> {
        Self::open(Path::new("/run/netns").join(name))
    }

    /// The namespace of the calling thread.
    pub fn current() -> io::Result<Self> {
        Self::open(OF_THIS_THREAD)
    }

    /// Makes a new, empty namespace that has no name and ends with its last user. Needs CAP_SYS_ADMIN.
    pub fn create() -> io::Result<Self> {
        in_own_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET)?;
            Self::current()
        })?
    }

    /// Moves the calling thread into the namespace; threads that it starts from now on begin there too. Needs CAP_SYS_ADMIN.
    pub fn enter(&self) -> io::Result<()> {
        Ok(setns(&*self.file, CloneFlags::CLONE_NEWNET)?)
    }

    /// Runs `work` inside the namespace, in a thread of its own, and waits for it. The caller's thread stays where it is.
    /// A panic of `work` goes on in the caller.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        in_own_thread(|| {
            self.enter()?;
            Ok(work())
        })?
    }
}

fn in_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("netns".into()).spawn_scoped(scope, work)?;
        thread.join().map_or_else(|panic| std::panic::resume_unwind(panic), Ok)
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::process::Command;

    /// A new namespace with its loopback device up, or `None` (with a SKIP line) where the machine does not allow it.
    pub(crate) fn for_test() -> Option<NetNs> {
        let netns = match NetNs::create() {
            Ok(netns) => netns,
            Err(error) => {
                println!("SKIP cannot make a network namespace: {error}");
                return None;
            }
        };
        sh(&netns, "ip link set lo up");
        Some(netns)
    }

    /// Runs a shell script in `netns`; it must succeed. Returns what it printed.
    pub(crate) fn sh(netns: &NetNs, script: &str) -> String {
        let output = netns.run(|| Command::new("sh").args(["-ec", script]).output()).expect("enter").expect("start sh");
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{script}\n{out}{err}");
        out.into_owned()
    }

    #[test]
    fn work_runs_in_the_namespace_and_the_caller_stays_outside() {
        let Some(netns) = for_test() else { return };
        let before = NetNs::current().unwrap();
        assert_ne!(before, netns);
        assert_eq!(netns.run(NetNs::current).unwrap().unwrap(), netns);
        assert_eq!(NetNs::current().unwrap(), before);
    }

    #[test]
    fn a_socket_stays_in_the_namespace_where_it_was_opened() {
        let Some(netns) = for_test() else { return };
        let listener = netns.run(|| std::net::TcpListener::bind("127.0.0.1:0")).unwrap().unwrap();
        let address = listener.local_addr().unwrap();
        netns.run(|| std::net::TcpStream::connect(address)).unwrap().expect("reachable inside");
        assert!(listener.accept().is_ok(), "accepted by a thread outside");
    }

    #[test]
    fn what_is_not_a_namespace_is_an_error() {
        assert!(NetNs::named("no-such-namespace-here").is_err());
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(NetNs::open(file.path()).unwrap().run(|| ()).is_err());
    }

    #[test]
    #[should_panic(expected = "from inside")]
    fn a_panic_inside_reaches_the_caller() {
        NetNs::current().unwrap().run(|| panic!("from inside")).unwrap();
    }
}
