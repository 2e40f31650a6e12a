//! kube-proxy's chains in the tables of iptables-nft (`nat`, `filter`, `mangle`, both families).
//!
//! Removed are exactly its chains and the rules of built-in chains that lead to them. kubelet's KUBE-FIREWALL and
//! KUBE-KUBELET-CANARY stay, and everybody else's rules. Where a chain of someone else still leads to one of its chains
//! (a network plugin that marks for masquerade with KUBE-MARK-MASQ), that chain stays too, and is named.

use crate::nft::foreign::{ForeignChain, ForeignJump, ForeignTables, Removal};
use crate::nft::object::TableId;
use proxy_common::IpFamily;
use std::collections::{BTreeMap, BTreeSet};
use std::io;

/// The tables in which kube-proxy makes chains (mangle: its canary only).
const TABLES: [&str; 3] = ["nat", "filter", "mangle"];
/// Chains with fixed names of kube-proxy v1.37's iptables and ipvs modes.
const CHAINS: [&str; 13] = [
    "KUBE-SERVICES",
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-NODEPORTS",
    "KUBE-POSTROUTING",
    "KUBE-MARK-MASQ",
    "KUBE-FORWARD",
    "KUBE-PROXY-FIREWALL",
    "KUBE-PROXY-CANARY",
    // ipvs mode
    "KUBE-NODE-PORT",
    "KUBE-LOAD-BALANCER",
    "KUBE-SOURCE-RANGES-FIREWALL",
    "KUBE-IPVS-FILTER",
    "KUBE-IPVS-OUT-FILTER",
];
/// Beginnings of its chains per service and endpoint.
const PREFIXES: [&str; 5] = ["KUBE-SVC-", "KUBE-SVL-", "KUBE-SEP-", "KUBE-FW-", "KUBE-EXT-"];
/// Marks packets for [`POSTROUTING`].
const MARK: &str = "KUBE-MARK-MASQ";
/// Masquerades what is marked.
const POSTROUTING: &str = "KUBE-POSTROUTING";

/// Whether a chain of that name belongs to kube-proxy.
#[must_use]
pub fn is_kube_proxy_chain(name: &str) -> bool {
    CHAINS.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

fn is_its(chain: &ForeignChain) -> bool {
    !chain.base && TABLES.contains(&&*chain.table.name) && is_kube_proxy_chain(&chain.name)
}

/// What to remove, and what stays although it is kube-proxy's, in words.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// For the kernel.
    pub removal: Removal,
    /// Chains that stay and why.
    pub kept: Vec<String>,
}

/// Decides what to remove, given all chains and jumps of the tables concerned. Pure.
#[must_use]
pub fn plan(chains: &[ForeignChain], jumps: &[ForeignJump]) -> Plan {
    let its: BTreeSet<(&TableId, &str)> =
        chains.iter().filter(|chain| is_its(chain)).map(|c| (&c.table, c.name.as_str())).collect();
    let base: BTreeSet<(&TableId, &str)> =
        chains.iter().filter(|chain| chain.base).map(|c| (&c.table, c.name.as_str())).collect();
    // Chains that somebody else leads to, and what these lead to.
    let mut kept: BTreeMap<(&TableId, &str), &str> = BTreeMap::new();
    let mut todo: Vec<((&TableId, &str), &str)> = jumps
        .iter()
        .filter(|jump| {
            !base.contains(&(&jump.table, jump.chain.as_str())) && !its.contains(&(&jump.table, jump.chain.as_str()))
        })
        .map(|jump| ((&jump.table, jump.target.as_str()), jump.chain.as_str()))
        .filter(|(target, _)| its.contains(target))
        .collect();
    while let Some((chain, because)) = todo.pop() {
        if kept.contains_key(&chain) {
            continue;
        }
        kept.insert(chain, because);
        let next = jumps.iter().filter(|jump| (&jump.table, jump.chain.as_str()) == chain);
        todo.extend(
            next.map(|jump| ((&jump.table, jump.target.as_str()), chain.1)).filter(|(target, _)| its.contains(target)),
        );
        if chain.1 == MARK && its.contains(&(chain.0, POSTROUTING)) {
            todo.push(((chain.0, POSTROUTING), MARK)); // without it the mark would mean nothing
        }
    }
    let leads_to_its = |jump: &&ForeignJump| {
        let from = (&jump.table, jump.chain.as_str());
        let to = (&jump.table, jump.target.as_str());
        base.contains(&from) && its.contains(&to) && !(kept.contains_key(&to) && to.1 == POSTROUTING)
    };
    let removal = Removal {
        rules: jumps.iter().filter(leads_to_its).cloned().collect(),
        chains: chains
            .iter()
            .filter(|c| is_its(c) && !kept.contains_key(&(&c.table, c.name.as_str())))
            .cloned()
            .collect(),
    };
    let kept =
        kept.iter().map(|((table, chain), because)| format!("chain {chain} of table {table}: chain {because} uses it"));
    Plan { removal, kept: kept.collect() }
}

/// What [`remove`] did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Rules removed from built-in chains.
    pub rules: usize,
    /// Chains removed.
    pub chains: usize,
    /// Chains of kube-proxy that stay, and why, in words. They are no fault, and no sign of a running kube-proxy.
    pub kept: Vec<String>,
}

fn look(tables: &mut ForeignTables) -> io::Result<Plan> {
    let mut chains = Vec::new();
    for family in IpFamily::ALL {
        chains.extend(tables.chains(family)?.into_iter().filter(|chain| TABLES.contains(&&*chain.table.name)));
    }
    // Rules are read only where there is something to remove: they may be many.
    let concerned: BTreeSet<_> = chains.iter().filter(|chain| is_its(chain)).map(|chain| chain.table.clone()).collect();
    let mut jumps = Vec::new();
    for table in &concerned {
        jumps.extend(tables.jumps(table)?);
    }
    Ok(plan(&chains, &jumps))
}

/// Its chains that could be removed, in words, one entry per table. A table that has only KUBE-MARK-MASQ and
/// KUBE-POSTROUTING is left out: kubelet before v1.28 makes these again and again (`IPTablesOwnershipCleanup`).
pub fn find(tables: &mut ForeignTables) -> io::Result<Vec<String>> {
    let mut found: BTreeMap<TableId, Vec<String>> = BTreeMap::new();
    for chain in look(tables)?.removal.chains {
        found.entry(chain.table).or_default().push(chain.name);
    }
    found.retain(|_, chains| chains.iter().any(|chain| ![MARK, POSTROUTING].contains(&chain.as_str())));
    let words = |(table, chains): (&TableId, &Vec<String>)| match &chains[..] {
        [only] => format!("iptables table {table}: chain {only}"),
        _ => format!("iptables table {table}: {} chains such as {}", chains.len(), chains[0]),
    };
    Ok(found.iter().map(words).collect())
}

/// Removes its chains and the rules that lead to them, in one transaction for both families. Repeating it is harmless.
/// An error means that nothing was removed.
pub fn remove(tables: &mut ForeignTables) -> io::Result<Report> {
    /// Tries if somebody else changes rules meanwhile.
    const TRIES: u32 = 10;
    let mut tries = 1;
    loop {
        let generation = tables.generation()?;
        let Plan { removal, kept } = look(tables)?;
        let report = Report { rules: removal.rules.len(), chains: removal.chains.len(), kept };
        if removal.is_empty() {
            return Ok(report);
        }
        match tables.remove(&removal, generation) {
            Ok(()) => return Ok(report),
            Err(error) if error.raw_os_error() == Some(libc::ERESTART) && tries < TRIES => tries += 1,
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests;
