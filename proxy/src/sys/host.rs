//! Facts about the machine: name, kernel, processors, address families, privileges.

use super::Root;
use proxy_common::IpFamily;
use std::fmt;
use std::io;

/// The host name as Kubernetes uses it for a node: without blanks around it, in lower case (`nodeutil.GetHostname`).
/// An empty name is an error.
pub fn hostname() -> io::Result<String> {
    node_name(&nix::unistd::gethostname()?.to_string_lossy())
}

fn node_name(hostname: &str) -> io::Result<String> {
    let name = hostname.trim().to_lowercase();
    if name.is_empty() { Err(io::Error::other("the host has no name; give --hostname-override")) } else { Ok(name) }
}

/// The first two numbers of a Linux version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelVersion {
    /// 6 in 6.12.3
    pub major: u32,
    /// 12 in 6.12.3
    pub minor: u32,
}

impl KernelVersion {
    /// The oldest kernel that the nftables rules need; kube-proxy v1.37 has the same limit.
    pub const MINIMUM: Self = Self { major: 5, minor: 13 };

    /// Reads `/proc/sys/kernel/osrelease`.
    pub fn of_host(root: &Root) -> io::Result<Self> {
        let text = root.read("/proc/sys/kernel/osrelease")?;
        Self::parse(&text).ok_or_else(|| io::Error::other(format!("kernel release {text:?} is not a version")))
    }

    /// Takes the first two numbers of a release such as `6.1.0-18-amd64` or `6.12-rc1`.
    #[must_use]
    pub fn parse(release: &str) -> Option<Self> {
        let mut parts = release.split(|c: char| !c.is_ascii_digit());
        Some(Self { major: parts.next()?.parse().ok()?, minor: parts.next()?.parse().ok()? })
    }
}

impl fmt::Display for KernelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Whether the network namespace of the calling thread can use `family`. IPv4 always; IPv6 unless the kernel is built or
/// booted without it (`/proc/net/if_inet6` is missing) or `net.ipv6.conf.all.disable_ipv6` is 1.
#[must_use]
pub fn supports(root: &Root, family: IpFamily) -> bool {
    match family {
        IpFamily::V4 => true,
        IpFamily::V6 => {
            root.exists("/proc/thread-self/net/if_inet6")
                && root.read("/proc/sys/net/ipv6/conf/all/disable_ipv6").is_ok_and(|value| value != "1")
        }
    }
}

/// Whether the calling thread may change the network (capability CAP_NET_ADMIN is effective).
pub fn has_net_admin(root: &Root) -> io::Result<bool> {
    /// `CAP_NET_ADMIN` of uapi/linux/capability.h
    const CAP_NET_ADMIN: u32 = 12;
    let status = root.read("/proc/thread-self/status")?;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let bits = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    bits.map(|bits| bits >> CAP_NET_ADMIN & 1 == 1)
        .ok_or_else(|| io::Error::other("/proc/thread-self/status has no CapEff"))
}

/// Number of processors that are online (`/sys/devices/system/cpu/online`), else those that this process may use.
#[must_use]
pub fn cpu_count(root: &Root) -> u64 {
    let online = root.read("/sys/devices/system/cpu/online").ok().and_then(|list| count_cpus(&list));
    online.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get() as u64))
}

/// Counts a list such as `0-3,6`.
fn count_cpus(list: &str) -> Option<u64> {
    let mut count = 0;
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u64>().ok()?, last.parse::<u64>().ok()?);
        count += last.checked_sub(first)?.checked_add(1)?;
    }
    Some(count)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::sysctl::tests::fake;

    #[test]
    fn kernel_versions_are_read_and_compared_by_number() {
        for (text, major, minor) in
            [("6.1.0-18-amd64", 6, 1), ("5.13", 5, 13), ("6.12-rc1", 6, 12), ("4.18.0-553.el8", 4, 18)]
        {
            assert_eq!(KernelVersion::parse(text), Some(KernelVersion { major, minor }), "{text}");
        }
        assert_eq!(KernelVersion::parse("linux"), None);
        assert!(KernelVersion::parse("5.4").unwrap() < KernelVersion::MINIMUM);
        assert!(KernelVersion::of_host(&Root::default()).unwrap() >= KernelVersion { major: 3, minor: 0 });
    }

    #[test]
    fn processors_are_counted_from_the_online_list() {
        for (text, count) in
            [("0", Some(1)), ("0-7", Some(8)), ("0-3,6,8-9\n", Some(7)), ("", None), ("x", None), ("3-1", None)]
        {
            assert_eq!(count_cpus(text), count, "{text:?}");
        }
        let (_dir, root) = fake(&[("/sys/devices/system/cpu/online", "0-7")]);
        assert_eq!(cpu_count(&root), 8);
        assert!(cpu_count(&fake(&[]).1) >= 1, "falls back to the process's own number");
    }

    #[test]
    fn ipv6_needs_its_proc_file_and_must_not_be_disabled() {
        let all = "/proc/sys/net/ipv6/conf/all/disable_ipv6";
        let table = "/proc/thread-self/net/if_inet6";
        for (files, expected) in [
            (vec![(table, ""), (all, "0\n")], true),
            (vec![(table, ""), (all, "1\n")], false),
            (vec![(all, "0")], false),
            (vec![(table, "")], false),
        ] {
            let (_dir, root) = fake(&files);
            assert_eq!(supports(&root, IpFamily::V6), expected, "{files:?}");
            assert!(supports(&root, IpFamily::V4));
        }
    }

    #[test]
    fn net_admin_is_bit_12_of_the_effective_set() {
        for (line, expected) in [
            ("CapEff:\t0000000000001000", true),
            ("CapEff:\t000001ffffffefff", false),
            ("CapEff:\t000001ffffffffff", true),
        ] {
            let (_dir, root) =
                fake(&[("/proc/thread-self/status", &format!("Name:\tx\nCapInh:\t0000000000001000\n{line}\n"))]);
            assert_eq!(has_net_admin(&root).unwrap(), expected, "{line}");
        }
        assert!(has_net_admin(&fake(&[("/proc/thread-self/status", "Name: x")]).1).is_err());
    }

    #[test]
    fn node_names_are_trimmed_and_lower_case() {
        assert_eq!(node_name(" Node-A\n").unwrap(), "node-a");
        assert!(node_name("  ").is_err());
    }
}
