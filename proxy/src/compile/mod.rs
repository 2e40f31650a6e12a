//! From the service map to plans: plain data that can be printed, compared and diffed. Pure.
#![forbid(unsafe_code)]

pub mod nft;
