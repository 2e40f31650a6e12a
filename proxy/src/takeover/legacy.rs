//! Leftovers of kube-proxy that are outside nf_tables: legacy iptables and IPVS.
//!
//! They are looked for in `/proc` only. Asking the iptables or IPVS interfaces would load the kernel modules, which slows
//! every packet of the node down from then on; so they are named, with the command that shows or removes them.

use crate::sys::Root;

/// What was found, one sentence each, for the operator; empty = nothing. Looks at the network namespace of the calling
/// thread. A file that does not exist means that the module is not loaded.
#[must_use]
pub fn warnings(root: &Root) -> Vec<String> {
    let mut warnings = Vec::new();
    for (file, command) in [("ip_tables_names", "iptables-legacy"), ("ip6_tables_names", "ip6tables-legacy")] {
        let names = root.read(&format!("/proc/thread-self/net/{file}")).unwrap_or_default();
        let tables: Vec<_> =
            names.lines().map(str::trim).filter(|name| ["nat", "filter", "mangle"].contains(name)).collect();
        if !tables.is_empty() {
            warnings.push(format!(
                "legacy iptables tables are loaded ({}): if kube-proxy used them, its old rules may still answer before ours. \
                 Look with `{command}-save | grep KUBE-`; remove them with `kube-proxy --cleanup` of the version that made them",
                tables.join(", ")
            ));
        }
    }
    // The first three lines of ip_vs are its header; virtual servers begin with their protocol.
    let virtual_servers = root.read("/proc/thread-self/net/ip_vs").unwrap_or_default();
    let count =
        virtual_servers.lines().filter(|line| ["TCP ", "UDP ", "SCTP "].iter().any(|p| line.starts_with(p))).count();
    if count > 0 {
        warnings.push(format!(
            "IPVS has {count} virtual servers: if kube-proxy made them, they answer instead of our rules. \
             Look with `ipvsadm -Ln`; remove them with `ipvsadm --clear` or `kube-proxy --cleanup`"
        ));
    }
    let devices = root.read("/proc/thread-self/net/dev").unwrap_or_default();
    if devices.lines().any(|line| line.trim_start().starts_with("kube-ipvs0:")) {
        warnings.push(
            "the device kube-ipvs0 of kube-proxy's ipvs mode exists: its addresses make the node answer for every ClusterIP itself. \
             Remove it with `ip link delete kube-ipvs0`"
                .into(),
        );
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::netns::tests::{for_test, sh};
    use crate::sys::sysctl::tests::fake;

    const NET: &str = "/proc/thread-self/net";
    const IP_VS: &str = "IP Virtual Server version 1.2.1 (size=4096)\nProt LocalAddress:Port Scheduler Flags\n  -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n";

    #[test]
    fn a_machine_without_leftovers_is_quiet() {
        let dev = "Inter-|   Receive\n    lo: 0 0\n  eth0: 0 0\n";
        for files in [
            vec![],
            vec![("ip_tables_names", ""), ("ip6_tables_names", "raw\nsecurity\n"), ("ip_vs", IP_VS), ("dev", dev)],
        ] {
            let files: Vec<_> = files.into_iter().map(|(name, text)| (format!("{NET}/{name}"), text)).collect();
            let files: Vec<_> = files.iter().map(|(name, text)| (name.as_str(), *text)).collect();
            assert_eq!(warnings(&fake(&files).1), Vec::<String>::new());
        }
    }

    #[test]
    fn legacy_tables_and_ipvs_are_named_with_the_command_to_run() {
        let ip_vs = format!(
            "{IP_VS}TCP  0A60000A:0050 rr\n  -> 0AF40105:1F90      Masq    1      0          0\nUDP  0A60000A:0035 rr\n"
        );
        let files = [
            (format!("{NET}/ip_tables_names"), "nat\nraw\nfilter\n"),
            (format!("{NET}/ip6_tables_names"), "mangle\n"),
            (format!("{NET}/ip_vs"), &ip_vs),
            (format!("{NET}/dev"), "Inter-|\nkube-ipvs0:       0       0\n"),
        ];
        let files: Vec<_> = files.iter().map(|(name, text)| (name.as_str(), *text)).collect();
        let (_dir, root) = fake(&files);
        let found = warnings(&root);
        let expected = [
            ["(nat, filter)", "`iptables-legacy-save | grep KUBE-`"],
            ["(mangle)", "`ip6tables-legacy-save | grep KUBE-`"],
            ["2 virtual servers", "`ipvsadm -Ln`"],
            ["kube-ipvs0", "`ip link delete kube-ipvs0`"],
        ];
        assert_eq!(found.len(), expected.len(), "{found:?}");
        for (warning, words) in found.iter().zip(expected) {
            assert!(words.iter().all(|word| warning.contains(word)), "{warning}");
        }
    }

    #[test]
    fn real_legacy_tables_are_seen_in_their_own_namespace_only() {
        let (Some(here), Some(there)) = (for_test(), for_test()) else { return };
        let made = there
            .run(|| std::process::Command::new("iptables-legacy").args(["-t", "nat", "-N", "KUBE-SERVICES"]).output())
            .unwrap();
        if !made.as_ref().is_ok_and(|output| output.status.success()) {
            println!("SKIP legacy iptables does not work here: {made:?}");
            return;
        }
        assert_eq!(there.run(|| warnings(&Root::default())).unwrap().len(), 1);
        assert_eq!(here.run(|| warnings(&Root::default())).unwrap(), Vec::<String>::new());
        // Looking loaded nothing.
        assert_eq!(sh(&here, "cat /proc/thread-self/net/ip_tables_names"), "");
    }
}
