use super::*;
use crate::sys::netns::NetNs;
use crate::sys::netns::tests::{for_test, sh};

#[test]
fn its_names_are_known_and_kubelets_are_not_among_them() {
    for name in [
        "KUBE-SERVICES",
        "KUBE-SVC-TCOU7JCQXEZGVUNU",
        "KUBE-SEP-X",
        "KUBE-FW-X",
        "KUBE-EXT-X",
        "KUBE-SVL-X",
        "KUBE-PROXY-CANARY",
    ] {
        assert!(is_kube_proxy_chain(name), "{name}");
    }
    for name in [
        "KUBE-FIREWALL",
        "KUBE-KUBELET-CANARY",
        "KUBE-MARK-DROP",
        "KUBE-ROUTER-INPUT",
        "KUBE-NWPLCY-X",
        "CNI-HOSTPORT",
        "PREROUTING",
    ] {
        assert!(!is_kube_proxy_chain(name), "{name}");
    }
}

fn table() -> TableId {
    TableId { family: IpFamily::V4, name: "nat".into() }
}

fn chains(names: &[&str]) -> Vec<ForeignChain> {
    let chain = |name: &&str| ForeignChain {
        table: table(),
        name: (*name).into(),
        base: matches!(*name, "PREROUTING" | "POSTROUTING"),
    };
    names.iter().map(chain).collect()
}

fn jumps(pairs: &[(&str, &str)]) -> Vec<ForeignJump> {
    let jump = |(n, (chain, target)): (usize, &(&str, &str))| ForeignJump {
        table: table(),
        chain: (*chain).into(),
        handle: n as u64,
        target: (*target).into(),
    };
    pairs.iter().enumerate().map(jump).collect()
}

#[test]
fn chains_that_someone_else_uses_stay_with_what_they_need() {
    let plan = plan(
        &chains(&[
            "PREROUTING",
            "POSTROUTING",
            "KUBE-SERVICES",
            "KUBE-SVC-A",
            "KUBE-MARK-MASQ",
            "KUBE-POSTROUTING",
            "CNI-DN-1",
        ]),
        &jumps(&[
            ("PREROUTING", "KUBE-SERVICES"),
            ("KUBE-SERVICES", "KUBE-SVC-A"),
            ("KUBE-SVC-A", "KUBE-MARK-MASQ"),
            ("POSTROUTING", "KUBE-POSTROUTING"),
            ("CNI-DN-1", "KUBE-MARK-MASQ"),
            ("PREROUTING", "CNI-DN-1"),
        ]),
    );
    assert_eq!(plan.removal.rules.iter().map(|rule| rule.handle).collect::<Vec<_>>(), [0]);
    assert_eq!(
        plan.removal.chains.iter().map(|chain| chain.name.as_str()).collect::<Vec<_>>(),
        ["KUBE-SERVICES", "KUBE-SVC-A"]
    );
    let kept = [
        "chain KUBE-MARK-MASQ of table ip nat: chain CNI-DN-1 uses it",
        "chain KUBE-POSTROUTING of table ip nat: chain KUBE-MARK-MASQ uses it",
    ];
    assert_eq!(plan.kept, kept);
}

#[test]
fn other_tables_and_base_chains_are_never_touched() {
    let mut all = chains(&["KUBE-SERVICES"]);
    all[0].table.name = "kube-firewall".into();
    all.push(ForeignChain { base: true, ..chains(&["KUBE-SERVICES"]).remove(0) });
    assert_eq!(plan(&all, &[]), Plan::default());
}

/// What kube-proxy's iptables mode leaves behind, cut short; `$IPT` is the command, `$IP` a service, `$EP` an endpoint.
const KUBE_PROXY: &str = "
    for c in KUBE-SERVICES KUBE-NODEPORTS KUBE-POSTROUTING KUBE-MARK-MASQ KUBE-PROXY-CANARY KUBE-SVC-A KUBE-SVL-A KUBE-SEP-A KUBE-EXT-A KUBE-FW-A; do $IPT -t nat -N $c; done
    $IPT -t nat -I PREROUTING -m comment --comment 'kubernetes service portals' -j KUBE-SERVICES
    $IPT -t nat -I OUTPUT -m comment --comment 'kubernetes service portals' -j KUBE-SERVICES
    $IPT -t nat -I POSTROUTING -m comment --comment 'kubernetes postrouting rules' -j KUBE-POSTROUTING
    $IPT -t nat -A KUBE-SERVICES -d $IP -p tcp -m comment --comment 'default/web:http cluster IP' -m tcp --dport 80 -j KUBE-SVC-A
    $IPT -t nat -A KUBE-SERVICES -m addrtype --dst-type LOCAL -j KUBE-NODEPORTS
    $IPT -t nat -A KUBE-NODEPORTS -p tcp -m tcp --dport 30080 -j KUBE-EXT-A
    $IPT -t nat -A KUBE-EXT-A -j KUBE-MARK-MASQ
    $IPT -t nat -A KUBE-EXT-A -j KUBE-SVC-A
    $IPT -t nat -A KUBE-SVC-A -m statistic --mode random --probability 0.5 -j KUBE-SEP-A
    $IPT -t nat -A KUBE-SEP-A -s $EP -j KUBE-MARK-MASQ
    $IPT -t nat -A KUBE-SEP-A -p tcp -m tcp -j DNAT --to-destination $EP
    $IPT -t nat -A KUBE-MARK-MASQ -j MARK --or-mark 0x4000
    $IPT -t nat -A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
    $IPT -t nat -A KUBE-POSTROUTING -j MASQUERADE
    for c in KUBE-SERVICES KUBE-EXTERNAL-SERVICES KUBE-NODEPORTS KUBE-FORWARD KUBE-PROXY-FIREWALL KUBE-PROXY-CANARY; do $IPT -N $c; done
    $IPT -I INPUT -m conntrack --ctstate NEW -m comment --comment 'kubernetes load balancer firewall' -j KUBE-PROXY-FIREWALL
    $IPT -I INPUT -m conntrack --ctstate NEW -j KUBE-EXTERNAL-SERVICES
    $IPT -I FORWARD -m comment --comment 'kubernetes forwarding rules' -j KUBE-FORWARD
    $IPT -I OUTPUT -m conntrack --ctstate NEW -j KUBE-SERVICES
    $IPT -A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
    $IPT -A KUBE-SERVICES -d $IP -p tcp -m tcp --dport 81 -j REJECT
    $IPT -t mangle -N KUBE-PROXY-CANARY
";

/// What others have: kubelet, a network plugin, the administrator.
const OTHERS: &str = "
    $IPT -N KUBE-FIREWALL; $IPT -t mangle -N KUBE-KUBELET-CANARY; $IPT -t nat -N KUBE-KUBELET-CANARY
    $IPT -A INPUT -j KUBE-FIREWALL; $IPT -A OUTPUT -j KUBE-FIREWALL
    $IPT -A KUBE-FIREWALL -m comment --comment 'block incoming localnet connections' -j DROP
    $IPT -t nat -N CNI-HOSTPORT-DNAT; $IPT -t nat -A PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT
    $IPT -t nat -A POSTROUTING -s $EP -j MASQUERADE
    $IPT -A FORWARD -m comment --comment 'mentions KUBE-SERVICES' -j ACCEPT
    $IPT -A INPUT -p tcp --dport 22 -j ACCEPT
";

fn iptables(netns: &NetNs, script: &str) {
    for (tool, ip, ep) in
        [("iptables-nft -w", "10.96.0.10", "10.244.0.5"), ("ip6tables-nft -w", "fd00:96::10", "fd00:244::5")]
    {
        sh(netns, &format!("IPT='{tool}'; IP={ip}; EP={ep}; {script}"));
    }
}

/// All rules as the iptables tools print them, without comments and counters.
fn saved(netns: &NetNs) -> String {
    let text = sh(netns, "iptables-nft-save; ip6tables-nft-save");
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split(" [").next().unwrap().to_owned() + "\n")
        .collect()
}

#[test]
fn its_rules_go_and_everything_else_stays() {
    let Some(netns) = for_test() else { return };
    let mut tables = netns.run(|| ForeignTables::open().unwrap()).unwrap();
    assert_eq!(remove(&mut tables).unwrap(), Report::default(), "nothing there: no error, nothing done");
    iptables(&netns, OTHERS);
    let others = saved(&netns);
    iptables(&netns, KUBE_PROXY);
    assert_ne!(saved(&netns), others);
    let found = find(&mut tables).unwrap();
    assert_eq!(found.len(), 6, "{found:?}");

    assert_eq!(remove(&mut tables).unwrap(), Report { rules: 2 * 7, chains: 2 * 17, kept: vec![] });
    assert_eq!(saved(&netns), others);
    assert_eq!(remove(&mut tables).unwrap(), Report::default());
    assert_eq!(find(&mut tables).unwrap(), Vec::<String>::new());
    // The tool can still work with its tables.
    iptables(&netns, KUBE_PROXY);
    assert_eq!(remove(&mut tables).unwrap().chains, 2 * 17);
    assert_eq!(saved(&netns), others);
}

#[test]
fn a_chain_that_a_network_plugin_uses_stays_usable_and_is_named() {
    let Some(netns) = for_test() else { return };
    iptables(&netns, KUBE_PROXY);
    iptables(
        &netns,
        "$IPT -t nat -A PREROUTING -j ACCEPT; $IPT -t nat -N CNI-DN-1; $IPT -t nat -A CNI-DN-1 -j KUBE-MARK-MASQ",
    );
    let mut tables = netns.run(|| ForeignTables::open().unwrap()).unwrap();
    let report = remove(&mut tables).unwrap();
    assert_eq!(report.chains, 2 * 15);
    assert_eq!(report.kept.len(), 4, "{:?}", report.kept);
    let left = saved(&netns);
    for rule in [
        "-A CNI-DN-1 -j KUBE-MARK-MASQ",
        "-A KUBE-POSTROUTING -j MASQUERADE",
        "-j KUBE-POSTROUTING",
        "-A KUBE-MARK-MASQ -j MARK",
    ] {
        assert_eq!(left.matches(rule).count(), 2, "{rule}\n{left}");
    }
    assert!(!left.contains("KUBE-SVC-A") && !left.contains("KUBE-SERVICES"), "{left}");
    // What must stay does not count as found again.
    assert_eq!(find(&mut tables).unwrap(), Vec::<String>::new());
}

#[test]
fn rules_in_another_namespace_are_not_ours_to_see_or_remove() {
    let (Some(here), Some(there)) = (for_test(), for_test()) else { return };
    iptables(&there, KUBE_PROXY);
    sh(&there, "nft add table ip kube-proxy");
    let before = saved(&there);
    let mut tables = here.run(|| ForeignTables::open().unwrap()).unwrap();
    assert_eq!(crate::takeover::find_rules(&mut tables).unwrap(), Vec::<String>::new());
    assert_eq!(remove(&mut tables).unwrap(), Report::default());
    assert_eq!(saved(&there), before);
    let mut tables = there.run(|| ForeignTables::open().unwrap()).unwrap();
    let found = crate::takeover::find_rules(&mut tables).unwrap();
    assert_eq!(found[0], "nftables table ip kube-proxy");
    assert_eq!(found.len(), 7, "{found:?}");
}

#[test]
fn the_masquerade_chains_of_an_old_kubelet_are_no_sign_of_kube_proxy() {
    let Some(netns) = for_test() else { return };
    let mut tables = netns.run(|| ForeignTables::open().unwrap()).unwrap();
    iptables(
        &netns,
        "$IPT -t nat -N KUBE-MARK-MASQ; $IPT -t nat -N KUBE-POSTROUTING; $IPT -t nat -A POSTROUTING -j KUBE-POSTROUTING",
    );
    assert_eq!(find(&mut tables).unwrap(), Vec::<String>::new());
    iptables(&netns, "$IPT -t nat -N KUBE-SVC-A");
    assert_eq!(find(&mut tables).unwrap().len(), 2);
}
