//! Tandem's agent: a Kubernetes service proxy for one node.
//!
//! One pipeline: `source` (API server or manifests) → `model` (the service map and its oracle) → `compile` (plans) →
//! `nft` (apply). Dependencies between modules point one way only; `cargo xtask tidy` checks it.

pub mod agent;
pub mod cli;
pub mod compile;
pub mod config;
pub mod conntrack;
pub mod model;
pub mod nft;
pub mod source;
pub mod sys;
pub mod takeover;
