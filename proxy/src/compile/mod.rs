//! From the service map to plans: plain data that can be printed, compared and diffed. Pure.
//!
//! `nft` is the entry: [`nft::Compiler`]. It turns views into compact plans (`service`), decides who owns a frontend
//! (`claims`), keeps the order of slots (`slots`), and derives nftables objects when they are needed (`base`, `elements`,
//! `affinity`), so that what stays in memory is the plans alone.
#![forbid(unsafe_code)]

pub mod affinity;
pub mod base;
pub mod claims;
pub mod elements;
pub mod names;
pub mod nft;
pub mod service;
pub mod slots;

mod batch;
