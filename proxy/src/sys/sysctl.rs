//! The conntrack settings that kube-proxy makes at start, and the forwarding settings that it leaves to others.
//!
//! None of these is needed to serve correctly, and containers and nested namespaces often may not write them, so a failure
//! is a value that names the file, never the end of the agent (kube-proxy v1.37 exits).

use super::Root;
use proxy_common::IpFamily;
use std::io;
use std::time::Duration;

/// Where the conntrack sysctls are.
const NETFILTER: &str = "/proc/sys/net/netfilter";
/// Number of buckets of the conntrack hash table, for all network namespaces.
const HASHSIZE: &str = "/sys/module/nf_conntrack/parameters/hashsize";
/// The largest table size that kube-proxy v1.37 derives from the number of processors (`getConntrackMax`).
const LARGEST_SCALED: u64 = 1 << 20;

/// `conntrack` of KubeProxyConfiguration v1alpha1, with its defaults filled in by the caller. Zero = leave as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConntrackSettings {
    /// `maxPerCore`
    pub max_per_core: u64,
    /// `min`; without `max_per_core` it means nothing.
    pub min: u64,
    /// `tcpEstablishedTimeout`
    pub tcp_established_timeout: Duration,
    /// `tcpCloseWaitTimeout`
    pub tcp_close_wait_timeout: Duration,
    /// `tcpBeLiberal`; false leaves the kernel's value.
    pub tcp_be_liberal: bool,
    /// `udpTimeout`
    pub udp_timeout: Duration,
    /// `udpStreamTimeout`
    pub udp_stream_timeout: Duration,
}

impl ConntrackSettings {
    /// The table size that is wanted on a machine with `cpus` processors; `None` = leave it.
    #[must_use]
    pub fn wanted_max(&self, cpus: u64) -> Option<u64> {
        if self.max_per_core == 0 {
            return None;
        }
        let scaled = self.max_per_core.saturating_mul(cpus);
        Some(if scaled > LARGEST_SCALED { LARGEST_SCALED } else { scaled.max(self.min) })
    }
}

/// One file and the value that it should have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// Absolute path.
    pub path: String,
    /// New value.
    pub value: u64,
}

/// A setting could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} {path}{}: {source}", .value.map(|v| format!(" (wanted {v})")).unwrap_or_default())]
pub struct Error {
    /// `read` or `set`
    pub verb: &'static str,
    /// The file.
    pub path: String,
    /// The value that was wanted.
    pub value: Option<u64>,
    /// What the kernel said.
    #[source]
    pub source: io::Error,
}

/// What must be written, given what `read` finds; and what could not be read although it had to be. Pure apart from `read`.
pub fn plan(
    settings: &ConntrackSettings,
    cpus: u64,
    read: impl Fn(&str) -> io::Result<u64>,
) -> (Vec<Write>, Vec<Error>) {
    let (mut writes, mut errors) = (Vec::new(), Vec::new());
    if let Some(max) = settings.wanted_max(cpus) {
        let path = format!("{NETFILTER}/nf_conntrack_max");
        // Never lowered: someone else may need more.
        if read(&path).map_or(true, |present| present < max) {
            writes.push(Write { path, value: max });
        }
        match read(HASHSIZE) {
            Ok(present) if present < max / 4 => writes.push(Write { path: HASHSIZE.into(), value: max / 4 }),
            Ok(_) => {}
            Err(source) => errors.push(Error { verb: "read", path: HASHSIZE.into(), value: Some(max / 4), source }),
        }
    }
    let seconds = [
        ("nf_conntrack_tcp_timeout_established", settings.tcp_established_timeout.as_secs()),
        ("nf_conntrack_tcp_timeout_close_wait", settings.tcp_close_wait_timeout.as_secs()),
        ("nf_conntrack_tcp_be_liberal", u64::from(settings.tcp_be_liberal)),
        ("nf_conntrack_udp_timeout", settings.udp_timeout.as_secs()),
        ("nf_conntrack_udp_timeout_stream", settings.udp_stream_timeout.as_secs()),
    ];
    for (name, value) in seconds {
        let path = format!("{NETFILTER}/{name}");
        if value > 0 && read(&path).map_or(true, |present| present != value) {
            writes.push(Write { path, value });
        }
    }
    (writes, errors)
}

/// Makes the settings. Returns what was written, and what failed; each failure leaves the others in force.
pub fn apply(root: &Root, settings: &ConntrackSettings, cpus: u64) -> (Vec<Write>, Vec<Error>) {
    let read = |path: &str| root.read(path)?.parse::<u64>().map_err(io::Error::other);
    let (writes, mut errors) = plan(settings, cpus, read);
    let mut done = Vec::new();
    for write in writes {
        match root.write(&write.path, &write.value.to_string()) {
            Ok(()) => done.push(write),
            Err(source) => errors.push(Error { verb: "set", path: write.path, value: Some(write.value), source }),
        }
    }
    (done, errors)
}

/// Sets the own process's `oom_score_adj`, as kube-proxy does with `--oom-score-adj`.
pub fn set_oom_score_adj(root: &Root, score: i32) -> Result<(), Error> {
    let path = "/proc/self/oom_score_adj";
    root.write(path, &score.to_string()).map_err(|source| Error { verb: "set", path: path.into(), value: None, source })
}

/// Says which of `families` the kernel does not forward. Forwarding is not switched on here: kube-proxy v1.37 does not do
/// it in nftables mode either, the network plugin does.
#[must_use]
pub fn forwarding_warnings(root: &Root, families: &[IpFamily]) -> Vec<String> {
    let mut warnings = Vec::new();
    for family in families {
        let (path, name) = match family {
            IpFamily::V4 => ("/proc/sys/net/ipv4/ip_forward", "net.ipv4.ip_forward"),
            IpFamily::V6 => ("/proc/sys/net/ipv6/conf/all/forwarding", "net.ipv6.conf.all.forwarding"),
        };
        match root.read(path).as_deref() {
            Ok("0") => warnings.push(format!(
                "{family} forwarding is off ({name}=0): services reach only endpoints that run in the node's own network; \
                 the network plugin or the administrator must set {name}=1"
            )),
            Ok(_) => {}
            Err(error) => warnings.push(format!("cannot tell whether {family} forwarding is on: {path}: {error}")),
        }
    }
    warnings
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A machine that has only these files.
    pub(crate) fn fake(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path());
        for (path, content) in files {
            let path = root.path(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        (dir, root)
    }

    const MAX: &str = "/proc/sys/net/netfilter/nf_conntrack_max";

    /// Applies to a fake machine; returns what its table size and hash size are afterwards, and the errors.
    fn sizes(
        settings: &ConntrackSettings,
        cpus: u64,
        max: Option<&str>,
        hash: &str,
    ) -> (Option<String>, String, usize, Vec<Error>) {
        let mut files = vec![(HASHSIZE, hash)];
        files.extend(max.map(|max| (MAX, max)));
        let (_dir, root) = fake(&files);
        let (done, errors) = apply(&root, settings, cpus);
        (root.read(MAX).ok(), root.read(HASHSIZE).unwrap(), done.len(), errors)
    }

    #[test]
    fn s1_the_table_grows_with_the_processors_and_the_hash_with_the_table() {
        let settings = ConntrackSettings { max_per_core: 12, ..Default::default() };
        let (max, hash, _, errors) = sizes(&settings, 8, Some("48"), "12");
        assert_eq!((max.as_deref(), hash.as_str(), errors.len()), (Some("96"), "24", 0));
        // Unreadable: written blindly (here the file is missing, so that fails and is named), the hash all the same.
        let (_, hash, _, errors) = sizes(&settings, 8, None, "12");
        assert_eq!(hash, "24");
        assert!(
            errors[0].to_string().contains("cannot set /proc/sys/net/netfilter/nf_conntrack_max (wanted 96)"),
            "{}",
            errors[0]
        );
    }

    #[test]
    fn s2_what_is_large_enough_is_left() {
        for max in ["96", "192"] {
            let settings = ConntrackSettings { max_per_core: 12, ..Default::default() };
            let (after, hash, written, errors) = sizes(&settings, 8, Some(max), "24");
            assert_eq!((after.as_deref(), hash.as_str(), written, errors.len()), (Some(max), "24", 0, 0));
        }
    }

    #[test]
    fn s3_the_hash_alone_grows() {
        let settings = ConntrackSettings { max_per_core: 12, ..Default::default() };
        let (max, hash, written, _) = sizes(&settings, 8, Some("96"), "0");
        assert_eq!((max.as_deref(), hash.as_str(), written), (Some("96"), "24", 1));
    }

    #[test]
    fn s4_s5_the_minimum_counts_only_with_a_number_per_core() {
        let mut settings = ConntrackSettings { max_per_core: 1, min: 123_456, ..Default::default() };
        assert_eq!(settings.wanted_max(4), Some(123_456));
        settings.max_per_core = 0;
        assert_eq!(settings.wanted_max(4), None);
        assert_eq!(sizes(&settings, 4, Some("1"), "1").2, 0);
    }

    #[test]
    fn many_processors_never_ask_for_more_than_a_million_even_against_the_minimum() {
        let settings = ConntrackSettings { max_per_core: 32_768, min: 2_000_000, ..Default::default() };
        assert_eq!(settings.wanted_max(33), Some(1_048_576));
        assert_eq!(settings.wanted_max(32), Some(2_000_000));
    }

    #[test]
    fn s6_nothing_is_written_without_wishes() {
        let (writes, errors) = plan(&ConntrackSettings::default(), 8, |path| panic!("{path} was read"));
        assert!(writes.is_empty() && errors.is_empty());
    }

    #[test]
    fn timeouts_are_whole_seconds_and_written_only_if_different() {
        let settings = ConntrackSettings {
            tcp_established_timeout: Duration::from_millis(86_400_900),
            tcp_close_wait_timeout: Duration::from_secs(3600),
            tcp_be_liberal: true,
            udp_timeout: Duration::from_millis(500), // less than a second: nothing to write
            udp_stream_timeout: Duration::from_secs(120),
            ..Default::default()
        };
        let (_dir, root) = fake(&[
            ("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established", "432000\n"),
            ("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close_wait", "3600\n"),
            ("/proc/sys/net/netfilter/nf_conntrack_tcp_be_liberal", "0\n"),
            ("/proc/sys/net/netfilter/nf_conntrack_udp_timeout_stream", "180\n"),
        ]);
        let (done, errors) = apply(&root, &settings, 1);
        let done: Vec<_> = done.iter().map(|w| (w.path.rsplit('/').next().unwrap(), w.value)).collect();
        let expected = [
            ("nf_conntrack_tcp_timeout_established", 86_400),
            ("nf_conntrack_tcp_be_liberal", 1),
            ("nf_conntrack_udp_timeout_stream", 120),
        ];
        assert_eq!(done, expected);
        assert!(errors.is_empty());
    }

    #[test]
    fn a_read_only_machine_yields_errors_that_name_the_files_and_does_the_rest() {
        // s7 of kube-proxy is "start fails"; here it is a value. A missing file stands for one that cannot be written.
        let settings = ConntrackSettings {
            max_per_core: 10,
            tcp_established_timeout: Duration::from_secs(5),
            udp_timeout: Duration::from_secs(30),
            ..Default::default()
        };
        let (_dir, root) = fake(&[("/proc/sys/net/netfilter/nf_conntrack_udp_timeout", "10")]);
        let (done, errors) = apply(&root, &settings, 2);
        assert_eq!(done, [Write { path: "/proc/sys/net/netfilter/nf_conntrack_udp_timeout".into(), value: 30 }]);
        let named: Vec<_> = errors.iter().map(|e| (e.verb, e.path.rsplit('/').next().unwrap())).collect();
        assert_eq!(
            named,
            [("read", "hashsize"), ("set", "nf_conntrack_max"), ("set", "nf_conntrack_tcp_timeout_established")]
        );
    }

    #[test]
    fn forwarding_that_is_off_is_named_with_the_setting() {
        let (_dir, root) =
            fake(&[("/proc/sys/net/ipv4/ip_forward", "1\n"), ("/proc/sys/net/ipv6/conf/all/forwarding", "0\n")]);
        let warnings = forwarding_warnings(&root, &IpFamily::ALL);
        assert_eq!(warnings.len(), 1);
        assert!(warnings[0].contains("net.ipv6.conf.all.forwarding=1"), "{}", warnings[0]);
        assert!(forwarding_warnings(&root, &[IpFamily::V4]).is_empty());
        assert!(forwarding_warnings(&fake(&[]).1, &[IpFamily::V4])[0].contains("cannot tell"));
    }

    #[test]
    fn the_oom_score_is_written() {
        let (_dir, root) = fake(&[("/proc/self/oom_score_adj", "0")]);
        set_oom_score_adj(&root, -999).unwrap();
        assert_eq!(root.read("/proc/self/oom_score_adj").unwrap(), "-999");
        assert!(set_oom_score_adj(&fake(&[]).1, 1).is_err());
    }

    #[test]
    fn the_kernel_takes_the_timeouts_of_one_namespace() {
        use crate::sys::netns::tests::{for_test, sh};
        let Some(netns) = for_test() else { return };
        // Tracking makes the settings exist where conntrack is a module.
        sh(&netns, "nft 'table ip t { chain c { type filter hook input priority 0; ct state new counter; }; }'");
        let settings = ConntrackSettings {
            tcp_established_timeout: Duration::from_secs(7777),
            tcp_be_liberal: true,
            udp_stream_timeout: Duration::from_secs(99),
            ..Default::default()
        };
        let before = Root::default().read("/proc/sys/net/netfilter/nf_conntrack_udp_timeout_stream").ok();
        let (done, errors) = netns.run(|| apply(&Root::default(), &settings, 1)).unwrap();
        assert_eq!((done.len(), errors.len()), (3, 0), "{errors:?}");
        let read = |name: &str| sh(&netns, &format!("cat {NETFILTER}/{name}")).trim().to_owned();
        assert_eq!(read("nf_conntrack_tcp_timeout_established"), "7777");
        assert_eq!(read("nf_conntrack_tcp_be_liberal"), "1");
        assert_eq!(read("nf_conntrack_udp_timeout_stream"), "99");
        assert!(
            netns.run(|| apply(&Root::default(), &settings, 1)).unwrap().0.is_empty(),
            "nothing to do the second time"
        );
        assert_eq!(Root::default().read("/proc/sys/net/netfilter/nf_conntrack_udp_timeout_stream").ok(), before);
        // The table's size belongs to the first namespace: elsewhere that is an error, and no more than that.
        let max = netns.run(|| Root::default().write("/proc/sys/net/netfilter/nf_conntrack_max", "1000")).unwrap();
        assert!(max.is_err());
    }
}
