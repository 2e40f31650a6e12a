//! The agent: joins source, model, compiler and kernel.
//!
//! An event only marks state dirty; one paced loop applies it. No policy lives here: what packets meet is decided in `model`
//! and `compile`, and nothing is programmed before the first complete picture.

pub mod engine;
mod events;
pub mod metrics;
pub mod pacer;
mod picture;
mod rivals;
pub mod settings;
pub mod status;

pub use picture::{Picture, first_picture, plan_text, sync_once};

use crate::config::Config;
use crate::model::IpFamily;
use crate::sys::{Root, host};
use tokio::runtime::Runtime;

/// Families that this host's kernel has.
#[must_use]
pub fn families() -> Vec<IpFamily> {
    let root = Root::default();
    IpFamily::ALL.into_iter().filter(|family| host::supports(&root, *family)).collect()
}

/// The host's name, trimmed and in lower case; empty if it cannot be read.
#[must_use]
pub fn host_name() -> String {
    host::hostname().map(|name| name.trim().to_lowercase()).unwrap_or_default()
}

fn runtime() -> anyhow::Result<Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

/// Runs until SIGTERM or SIGINT. The rules stay in force.
///
/// # Errors
/// What keeps the agent from starting: no source of objects, no privilege.
pub fn run(config: Config) -> anyhow::Result<()> {
    runtime()?.block_on(events::run(config))
}
