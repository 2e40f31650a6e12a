//! The API server as a source: watches Services, EndpointSlices, our Node and ServiceCIDRs.
//!
//! One task per kind ([`watch`]) lists ([`list`]) and watches, and turns objects into deltas at once, so that no API object is kept. The
//! hub here puts the four together: what a new list no longer has is gone ([`track`]), nothing is called synced before Services
//! *and* slices were listed once, and an outage is told once and once more when it is over ([`outage`]); meanwhile the last
//! known state stays in force, since no delta is sent.

mod client;
mod lenient;
mod list;
mod outage;
mod split;
mod track;
mod trouble;
mod watch;
mod wire;

#[cfg(test)]
mod tests;

pub use client::{ApiServer, ConnectError, connect};

use super::{Problem, SourceEvent};
use crate::model::{Delta, Node};
use ::kube::Client;
use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery, networking::v1 as networking};
use outage::Outage;
use std::collections::HashMap;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use track::{Key, Tracker};
use watch::{Applied, Message, Pace, Payload, Selectors, Task};

/// The kinds that are watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Watched {
    Services,
    Slices,
    Node,
    ServiceCidrs,
}

impl Watched {
    const ALL: [Watched; 4] = [Watched::Services, Watched::Slices, Watched::Node, Watched::ServiceCidrs];

    /// As in messages.
    fn plural(self) -> &'static str {
        match self {
            Watched::Services => "Services",
            Watched::Slices => "EndpointSlices",
            Watched::Node => "Nodes",
            Watched::ServiceCidrs => "ServiceCIDRs",
        }
    }
}

/// Messages between the watch tasks and the hub; a full channel slows the tasks down.
const CHANNEL: usize = 1024;
/// So many messages are put into one batch of deltas at most.
const BATCH: usize = 512;

/// Watches an API server.
pub struct KubeSource {
    client: Client,
    node_name: String,
    pace: Pace,
}

impl KubeSource {
    /// Watches the server of `client`; `node_name` is the name of the Node object that is ours.
    #[must_use]
    pub fn new(client: Client, node_name: &str) -> Self {
        Self { client, node_name: node_name.to_owned(), pace: Pace::default() }
    }

    /// Delivers the first picture, `Synced`, and then all changes, until the receiver of `events` is dropped.
    pub async fn run(self, events: mpsc::Sender<SourceEvent>) {
        let (sender, mut messages) = mpsc::channel(CHANNEL);
        // Dropped, and its tasks with it, when this function ends.
        let mut tasks = JoinSet::new();
        self.spawn(&mut tasks, &sender);
        drop(sender);
        let mut hub = Hub::new(&self.node_name);
        let mut batch = Vec::with_capacity(BATCH);
        loop {
            tokio::select! {
                () = events.closed() => return,
                ended = tasks.join_next() => {
                    // The tasks run for ever; one that panicked leaves a kind unwatched, which must not go unnoticed.
                    tracing::error!(?ended, "a watch of the API server ended; the source stops");
                    return;
                }
                count = messages.recv_many(&mut batch, BATCH) => if count == 0 { return },
            }
            let mut out = Vec::new();
            for message in batch.drain(..) {
                hub.take(message, &mut out);
            }
            hub.flush(&mut out);
            for event in out {
                if events.send(event).await.is_err() {
                    return;
                }
            }
        }
    }

    fn spawn(&self, tasks: &mut JoinSet<()>, sender: &mpsc::Sender<Message>) {
        let task = |kind| Task { kind, client: self.client.clone(), pace: self.pace, out: sender.clone() };
        let services = Selectors {
            labels: Some("!service.kubernetes.io/service-proxy-name".to_owned()),
            fields: Some("spec.clusterIP!=None".to_owned()),
        };
        let slices = Selectors { labels: Some("!service.kubernetes.io/headless".to_owned()), fields: None };
        let node = Selectors { labels: None, fields: Some(format!("metadata.name={}", self.node_name)) };
        tasks.spawn(task(Watched::Services).run::<core::Service>(services));
        tasks.spawn(task(Watched::Slices).run::<discovery::EndpointSlice>(slices));
        tasks.spawn(task(Watched::Node).run::<core::Node>(node));
        tasks.spawn(task(Watched::ServiceCidrs).run::<networking::ServiceCIDR>(Selectors::default()));
    }
}

/// Puts the messages of the watch tasks together. No IO.
struct Hub {
    node_name: String,
    trackers: HashMap<Watched, Tracker>,
    outage: Outage,
    synced: bool,
    deltas: Vec<Delta>,
    /// What was told last about an object that has problems, so that each is told once.
    told: HashMap<(Watched, Key), Vec<Problem>>,
    node: Option<Node>,
    node_missing_told: bool,
}

impl Hub {
    fn new(node_name: &str) -> Self {
        Self {
            node_name: node_name.to_owned(),
            trackers: Watched::ALL.into_iter().map(|kind| (kind, Tracker::new(kind))).collect(),
            outage: Outage::default(),
            synced: false,
            deltas: Vec::new(),
            told: HashMap::new(),
            node: None,
            node_missing_told: false,
        }
    }

    fn take(&mut self, message: Message, out: &mut Vec<SourceEvent>) {
        let Message { kind, payload } = message;
        let tracker = self.trackers.entry(kind).or_insert_with(|| Tracker::new(kind));
        match payload {
            Payload::Init => tracker.init(),
            Payload::Applied(objects) => {
                for Applied { key, delta, problems } in objects {
                    // Most objects never had a problem.
                    if !problems.is_empty() || !self.told.is_empty() {
                        self.tell(kind, key.clone(), problems, out);
                    }
                    let deltas = self.trackers.get_mut(&kind).map(|tracker| tracker.apply(key, delta));
                    self.add(deltas.unwrap_or_default());
                }
            }
            Payload::Deleted { key } => {
                let deltas = tracker.delete(&key);
                self.tell(kind, key, Vec::new(), out);
                self.add(deltas);
            }
            Payload::Listed => {
                let deltas = tracker.done();
                self.add(deltas);
                self.listed(kind, out);
            }
            Payload::Reached => out.extend(self.outage.reached(kind).into_iter().map(SourceEvent::Problem)),
            Payload::Failed(failure) => {
                out.extend(self.outage.failed(kind, failure).into_iter().map(SourceEvent::Problem))
            }
        }
    }

    /// Deltas in one batch; what was told before them in the same batch may be about them.
    fn flush(&mut self, out: &mut Vec<SourceEvent>) {
        if !self.deltas.is_empty() {
            out.push(SourceEvent::Deltas(std::mem::take(&mut self.deltas)));
        }
        let listed = |kind| self.trackers.get(&kind).is_some_and(|tracker| tracker.listed());
        if !self.synced && listed(Watched::Services) && listed(Watched::Slices) {
            self.synced = true;
            out.push(SourceEvent::Synced);
        }
    }

    fn add(&mut self, deltas: Vec<Delta>) {
        if self.deltas.is_empty() && !deltas.iter().any(|delta| matches!(delta, Delta::Node(_) | Delta::NodeGone)) {
            self.deltas = deltas;
            return;
        }
        for delta in deltas {
            match &delta {
                // The kubelet writes the Node's status all the time; its facts rarely change.
                Delta::Node(node) if self.node.as_ref() == Some(node) => continue,
                Delta::Node(node) => self.node = Some(node.clone()),
                Delta::NodeGone => self.node = None,
                _ => {}
            }
            self.deltas.push(delta);
        }
    }

    fn listed(&mut self, kind: Watched, out: &mut Vec<SourceEvent>) {
        if kind == Watched::Node && self.node.is_none() && !self.node_missing_told {
            self.node_missing_told = true;
            let message = format!(
                "there is no such Node yet; endpoints on this node are recognised by the name {:?}, and what needs the node's \
                 addresses waits. If the node has another name, set --hostname-override",
                self.node_name
            );
            let location = format!("Node {}", self.node_name);
            out.push(SourceEvent::Problem(Problem {
                error: false,
                location,
                field: "metadata.name".to_owned(),
                message,
            }));
        }
    }

    fn tell(&mut self, kind: Watched, key: Key, problems: Vec<Problem>, out: &mut Vec<SourceEvent>) {
        if problems.is_empty() {
            self.told.remove(&(kind, key));
            return;
        }
        let before = self.told.get(&(kind, key.clone()));
        let news = problems.iter().filter(|problem| before.is_none_or(|before| !before.contains(problem)));
        out.extend(news.cloned().map(SourceEvent::Problem));
        self.told.insert((kind, key), problems);
    }
}
