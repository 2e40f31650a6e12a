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
