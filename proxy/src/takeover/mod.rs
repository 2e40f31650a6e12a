//! Taking over from kube-proxy, in this node's network namespace only.
//!
//! * [`tables`]: its nftables tables. They are deleted in the transaction that brings ours up; what clients its affinity
//!   sets remember can be carried over.
//! * [`iptables`]: its chains in the tables of iptables-nft, removed through netlink, nothing else touched.
//! * [`legacy`]: what can be seen but not removed without loading kernel modules: legacy iptables, IPVS. Named with the
//!   command to run.
//! * [`rival`] and [`probe`]: a kube-proxy that is still running here.
#![forbid(unsafe_code)]

pub mod iptables;
pub mod legacy;
pub mod probe;
pub mod rival;
pub mod tables;

use crate::nft::foreign::ForeignTables;
use std::io;

/// All rules of kube-proxy that exist in the namespace of `tables`, in words; empty = none.
pub fn find_rules(tables: &mut ForeignTables) -> io::Result<Vec<String>> {
    let mut found: Vec<_> = tables::find(tables)?.iter().map(|table| format!("nftables table {table}")).collect();
    found.extend(iptables::find(tables)?);
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::rival::{Action, Rival, Sign};
    use super::*;
    use crate::sys::netns::tests::{for_test, sh};
    use std::time::{Duration, Instant};

    #[test]
    fn a_kube_proxy_that_writes_its_rules_again_is_named_and_undone_once_a_minute() {
        let Some(netns) = for_test() else { return };
        let write_rules = || {
            sh(
                &netns,
                "iptables-nft -w -t nat -N KUBE-SERVICES; iptables-nft -w -t nat -I PREROUTING -j KUBE-SERVICES
                nft add table ip6 kube-proxy",
            )
        };
        let mut tables = netns.run(|| ForeignTables::open().unwrap()).unwrap();
        let (mut rival, start) = (Rival::new(), Instant::now());
        let mut look = |tables: &mut ForeignTables, after: u64| {
            let now = start + Duration::from_secs(after);
            let action = rival.observe(&Sign::Rules(find_rules(tables).unwrap()), now);
            if matches!(action, Action::Remove | Action::ReportAndRemove(_)) {
                iptables::remove(tables).unwrap();
                sh(&netns, "nft delete table ip6 kube-proxy");
                assert_eq!(find_rules(tables).unwrap(), Vec::<String>::new());
                rival.removed(now);
            }
            (action, rival.status(now).is_some())
        };
        write_rules();
        assert_eq!(look(&mut tables, 0), (Action::Remove, false), "leftovers");
        assert_eq!(look(&mut tables, 1), (Action::Nothing, false));
        write_rules();
        let (action, running) = look(&mut tables, 10);
        let Action::Report(message) = action else { panic!("{action:?}") };
        assert!(
            running && message.contains("nftables table ip6 kube-proxy") && message.contains("iptables table ip nat"),
            "{message}"
        );
        assert_eq!(look(&mut tables, 20), (Action::Nothing, true));
        assert!(matches!(look(&mut tables, 60), (Action::ReportAndRemove(_), true)));
        assert_eq!(look(&mut tables, 61), (Action::Nothing, true));
    }
}
