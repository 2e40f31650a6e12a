//! Which module of `proxy` may use which, and which crates: the table, and the check of it.
//!
//! Test code may use what it likes: the edges are about what the program depends on.

use super::Finding;
use super::source::SourceFile;

/// What a module may use of this crate besides itself, and which outside paths it must not.
struct Row {
    module: &'static str,
    may: &'static [&'static str],
    not: &'static [&'static str],
}

/// Nothing but values: no IO, no clock, no async, no kernel.
const PURE: &[&str] = &[
    "tokio",
    "futures",
    "kube",
    "k8s_openapi",
    "aya",
    "nftnl",
    "nftnl_sys",
    "mnl",
    "mnl_sys",
    "libc",
    "nix",
    "rtnetlink",
    "netlink_sys",
    "netlink_packet_core",
    "netlink_packet_netfilter",
    "netlink_packet_route",
    "notify",
    "tracing",
    "anyhow",
    "std::fs",
    "std::env",
    "std::process",
    "std::thread",
    "std::os",
    "std::time::Instant",
    "std::time::SystemTime",
    "std::net::TcpStream",
    "std::net::TcpListener",
    "std::net::UdpSocket",
    "std::net::ToSocketAddrs",
];

/// Outside the kernel's reach: may read files and talk to the API server.
const NO_KERNEL: &[&str] = &["aya", "nftnl", "nftnl_sys", "mnl", "mnl_sys", "anyhow"];

/// Talks to the kernel, knows nothing of Kubernetes.
const NO_KUBERNETES: &[&str] = &["kube", "k8s_openapi", "anyhow"];

/// No raw nf_tables: that is `nft::netlink` alone.
const NO_NFTABLES: &[&str] = &["nftnl", "nftnl_sys", "mnl", "mnl_sys"];

/// The longest module name that a file's module starts with is its row.
const TABLE: &[Row] = &[
    Row { module: "model", may: &[], not: PURE },
    Row { module: "source", may: &["model"], not: NO_KERNEL },
    Row { module: "compile", may: &["model", "nft::object", "nft::expr", "nft::transaction"], not: PURE },
    Row { module: "nft::object", may: &["nft::expr"], not: PURE },
    Row { module: "nft::expr", may: &["nft::object"], not: PURE },
    Row { module: "nft::text", may: &["nft::object", "nft::expr", "nft::transaction"], not: PURE },
    Row { module: "nft::diff", may: &["nft::object", "nft::expr", "nft::transaction"], not: PURE },
    Row { module: "nft::transaction", may: &["nft::object", "nft::expr", "model::ObjectName"], not: PURE },
    Row { module: "nft::fake", may: &["nft::object", "nft::expr", "nft::transaction", "nft::netlink"], not: PURE },
    // Walks a packet through rules, so that compile's tests can compare with the oracle.
    Row {
        module: "nft::trace",
        may: &["nft::object", "nft::expr", "nft::transaction", "model::Packet", "model::Outcome"],
        not: PURE,
    },
    Row {
        module: "nft::netlink",
        may: &["nft::object", "nft::expr", "nft::transaction", "model::ObjectName"],
        not: NO_KUBERNETES,
    },
    Row { module: "nft::foreign", may: &["nft::object", "sys::nfnetlink"], not: NO_KUBERNETES },
    Row { module: "nft", may: &["model::ObjectName"], not: &["kube", "k8s_openapi", "anyhow", "nftnl_sys", "mnl_sys"] },
    Row { module: "conntrack::stale", may: &["model"], not: PURE },
    Row { module: "conntrack", may: &["model", "sys"], not: NO_KUBERNETES },
    Row { module: "sys", may: &[], not: NO_KUBERNETES },
    Row { module: "config", may: &["model"], not: NO_KERNEL },
    Row { module: "takeover", may: &["nft", "sys", "config", "model"], not: NO_KUBERNETES },
    Row {
        module: "agent",
        may: &["source", "model", "compile", "nft", "conntrack", "sys", "config", "takeover"],
        not: NO_NFTABLES,
    },
    Row {
        module: "cli",
        may: &["agent", "source", "model", "compile", "nft", "conntrack", "sys", "config", "takeover"],
        not: NO_NFTABLES,
    },
    Row { module: "main", may: &["agent", "cli", "config", "sys"], not: NO_NFTABLES },
];

/// Checks the files of `proxy/src`.
pub fn check(files: &[SourceFile]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|f| f.path.starts_with("proxy/src/") && !f.is_test()) {
        let module = file.module().join("::");
        if module.is_empty() {
            continue;
        }
        let Some(row) = row_of(&module) else {
            let message =
                format!("module `{module}` has no row in the table of edges (xtask/src/tidy/edges.rs): add one");
            findings.push(Finding::new(&file.path, 0, message));
            continue;
        };
        for path in file.paths().into_iter().filter(|p| !p.test) {
            let mut full = path.segments.join("::");
            // The program sees the library as a crate of its own.
            if module == "main" && path.segments[0] == "proxy" {
                full = full.replacen("proxy", "crate", 1);
            }
            let broken = match full.strip_prefix("crate::") {
                Some(inner) => !within(inner, row.module) && !row.may.iter().any(|may| within(inner, may)),
                None => row.not.iter().any(|not| within(&full, not)),
            };
            if broken {
                let may = if row.may.is_empty() { "nothing else of this crate".into() } else { row.may.join(", ") };
                let message =
                    format!("`{full}` breaks the row `{}`: may use {may}; not {}", row.module, row.not.join(", "));
                findings.push(Finding::new(&file.path, path.line, message));
            }
        }
    }
    findings
}

fn row_of(module: &str) -> Option<&'static Row> {
    TABLE.iter().filter(|row| within(module, row.module)).max_by_key(|row| row.module.len())
}

/// Whether `path` is `outer` or below it.
fn within(path: &str, outer: &str) -> bool {
    path.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, text: &str) -> Vec<String> {
        check(&[SourceFile::parse(path, text).unwrap()]).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn an_edge_against_the_table_is_named_with_its_row() {
        let found =
            findings("proxy/src/model/lookup.rs", "use super::Node;\nuse crate::{nft::object, model::Service};");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with("proxy/src/model/lookup.rs:2: `crate::nft::object` breaks the row `model`"),
            "{found:?}"
        );
    }

    #[test]
    fn a_forbidden_crate_is_found_in_expressions_too() {
        assert_eq!(findings("proxy/src/compile/nft.rs", "fn f() { tokio::spawn(g()); }").len(), 1);
        assert_eq!(findings("proxy/src/model/x.rs", "fn f() { let _ = std::time::Instant::now(); }").len(), 1);
        assert_eq!(findings("proxy/src/model/x.rs", "use std::time::Duration;").len(), 0);
    }

    #[test]
    fn the_longest_row_counts_and_super_is_followed() {
        assert_eq!(findings("proxy/src/nft/netlink/encode.rs", "use super::super::object::Set;").len(), 0);
        assert_eq!(findings("proxy/src/nft/netlink/encode.rs", "use super::super::apply::Class;").len(), 1);
        assert_eq!(findings("proxy/src/nft/transaction.rs", "use crate::model::ObjectName;").len(), 0);
        assert_eq!(findings("proxy/src/nft/transaction.rs", "use crate::model::Service;").len(), 1);
    }

    #[test]
    fn nobody_uses_the_agent() {
        assert_eq!(findings("proxy/src/takeover/mod.rs", "use crate::agent::Event;").len(), 1);
        assert_eq!(findings("proxy/src/main.rs", "use proxy::agent;\nfn main() { proxy::nft::x() }").len(), 1);
    }

    #[test]
    fn tests_are_free() {
        assert_eq!(findings("proxy/src/model/x.rs", "#[cfg(test)]\nmod tests { use crate::nft::x; }").len(), 0);
        assert_eq!(findings("proxy/src/model/x/tests.rs", "use crate::nft::x;").len(), 0);
    }

    #[test]
    fn a_module_without_a_row_is_a_finding() {
        assert!(findings("proxy/src/metrics.rs", "")[0].contains("no row"));
    }
}
