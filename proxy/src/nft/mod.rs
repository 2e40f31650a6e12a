//! nftables: typed objects, their text, transactions, and the netlink that carries them.
//!
//! `object`, `expr`, `text`, `diff` and `transaction` are pure. Only `netlink` talks to the kernel, and `foreign` for tables of others.
//! The table name and the network namespace are parameters, so that other rule managers can use this module.

pub mod apply;
pub mod diff;
pub mod expr;
pub mod fake;
pub mod foreign;
pub mod netlink;
pub mod object;
pub mod text;
pub mod trace;
pub mod transaction;
