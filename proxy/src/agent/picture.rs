//! One complete picture of the cluster, for the commands that run once.

use super::engine::Engine;
use super::settings::settings;
use crate::config::{Config, SourceConfig};
use crate::model::table::Changes;
use crate::model::{IpFamily, Node, ServiceTable, Settings};
use crate::nft::netlink::Connection;
use crate::source::address::unusable;
use crate::source::kube::{ApiServer, KubeSource};
use crate::source::manifest::ManifestSource;
use crate::source::{Problem, SourceEvent};
use crate::sys::address::Addresses;
use anyhow::Context;
use std::net::IpAddr;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Events that may wait until the agent takes them.
const EVENTS_MAX: usize = 1024;

/// How long the commands that run once wait for the first complete list.
const FIRST_PICTURE_TIMEOUT: Duration = Duration::from_secs(60);

/// The service map as the source gave it first, and this host's addresses.
pub struct Picture {
    /// The service map.
    pub table: ServiceTable,
    /// Addresses of this host's interfaces.
    pub host: Vec<IpAddr>,
    problems: Vec<Problem>,
}

impl Picture {
    /// Settings of `family` on this node.
    #[must_use]
    pub fn settings(&self, config: &Config, family: IpFamily) -> Settings {
        let mut settings = settings(config, self.table.node(), &self.host, family);
        if config.node_name != super::host_name() {
            // Asked about another node: its addresses are those that its Node object names.
            settings.local_addresses.extend(self.table.node().address(family));
        }
        settings
    }

    /// How many objects, or parts of objects, the source refused.
    #[must_use]
    pub fn errors(&self) -> usize {
        self.problems.iter().filter(|p| p.error).count()
    }
}

/// Reads the source until the first complete picture; problems are logged.
///
/// # Errors
/// The source cannot be opened, or gives no complete picture in time.
pub fn first_picture(config: &Config) -> anyhow::Result<Picture> {
    if let SourceConfig::Manifests(dir) = &config.source {
        // The running agent waits for the directory; a command that runs once does not.
        std::fs::read_dir(dir).with_context(|| format!("cannot read the manifest directory {}", dir.display()))?;
    }
    super::runtime()?.block_on(async {
        let mut events = open(config).await?;
        let mut picture = Picture {
            table: ServiceTable::new(),
            host: Addresses::open()?.list().await?.into_iter().collect(),
            problems: Vec::new(),
        };
        let read = async {
            while let Some(event) = events.recv().await {
                match event {
                    SourceEvent::Deltas(deltas) => deltas.into_iter().for_each(|d| picture.table.apply(d)),
                    SourceEvent::Problem(problem) => {
                        super::events::log_problem(&problem);
                        picture.problems.push(problem);
                    }
                    SourceEvent::Synced => return true,
                }
            }
            false
        };
        match tokio::time::timeout(FIRST_PICTURE_TIMEOUT, read).await {
            Ok(true) => Ok(picture),
            Ok(false) => anyhow::bail!("the source ended before its first complete list"),
            Err(_) => anyhow::bail!("no complete list of Services and EndpointSlices within {FIRST_PICTURE_TIMEOUT:?}"),
        }
    })
}

/// Opens the source that the configuration names.
pub(super) async fn open(config: &Config) -> anyhow::Result<mpsc::Receiver<SourceEvent>> {
    let (sender, receiver) = mpsc::channel(EVENTS_MAX);
    match &config.source {
        SourceConfig::Manifests(dir) => {
            let source = ManifestSource::new(dir, &config.node_name, machine(config).await?);
            tokio::spawn(source.run(sender));
        }
        SourceConfig::Kubernetes { kubeconfig, master } => {
            let server = ApiServer { kubeconfig: kubeconfig.clone(), master: master.clone() };
            let client = crate::source::kube::connect(&server).await?;
            tokio::spawn(KubeSource::new(client, &config.node_name).run(sender));
        }
    }
    Ok(receiver)
}

/// The node as the machine knows it, for what no Node object says: its addresses are those by which default routes leave, else
/// the first of each family that is not a loopback or link-local one.
async fn machine(config: &Config) -> anyhow::Result<Node> {
    let addresses = Addresses::open()?;
    let all = addresses.list().await?;
    let mut node = Node { name: config.node_name.as_str().into(), ..Node::default() };
    for family in IpFamily::ALL {
        let usable = |ip: &&IpAddr| IpFamily::of(**ip) == family && unusable(**ip).is_none();
        node.addresses.extend(addresses.default_source(family).await?.or_else(|| all.iter().find(usable).copied()));
    }
    Ok(node)
}

/// The plan of one family as nft text; the kernel is not asked.
#[must_use]
pub fn plan_text(config: &Config, picture: &Picture, family: IpFamily) -> String {
    let plan = super::engine::plan(&config.table, &picture.settings(config, family), &picture.table);
    crate::nft::text::ruleset(&plan)
}

/// Brings the kernel in step once, for each family. Returns how many objects could not be served.
///
/// # Errors
/// The kernel's answer.
pub fn sync_once(config: &Config, picture: &Picture) -> anyhow::Result<usize> {
    let mut errors = picture.errors();
    let mut engines = Vec::new();
    for family in super::families() {
        let settings = picture.settings(config, family);
        let mut engine = Engine::new(&config.table, settings.clone(), Connection::open()?);
        engine.sync(&picture.table, &Changes::default(), &settings, Instant::now())?;
        errors += engine.problems().len();
        engines.push(engine);
    }
    while let Some(at) = engines.iter().filter_map(Engine::settle_at).max() {
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        for engine in &mut engines {
            engine.settle(Instant::now())?;
        }
    }
    Ok(errors)
}
