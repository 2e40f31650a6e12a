//! Lists and watches one kind, for ever.
//!
//! The list is read by [`super::list`], changes by `kube::Api::watch`. (`kube::runtime::watcher`, which does both, reads JSON
//! only, and each page of it at once: at 10,000 Services that is most of the time and memory of a start.)

use super::Watched;
use super::lenient::{Decoded, Lenient, Undecodable};
use super::list::Listing;
use super::outage::{Failure, PERSISTENT};
use super::track::{Key, key};
use super::trouble::{Trouble, WatchError};
use super::wire;
use crate::model::Delta;
use crate::source::Problem;
use crate::source::convert::{self, Names};
use ::kube::api::{ListParams, WatchEvent, WatchParams};
use ::kube::client::Body;
use ::kube::runtime::utils::Backoff;
use ::kube::runtime::watcher::DefaultBackoff;
use ::kube::{Api, Client, Resource, ResourceExt};
use futures::StreamExt;
use http::Request;
use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery, networking::v1 as networking};
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// What a watch task tells the hub.
#[derive(Debug)]
pub(crate) struct Message {
    pub kind: Watched,
    pub payload: Payload,
}

#[derive(Debug)]
pub(crate) enum Payload {
    /// A new list begins.
    Init,
    /// Objects of a list, or a new or changed one.
    Applied(Vec<Applied>),
    Deleted {
        key: Key,
    },
    /// The list is complete.
    Listed,
    /// The server has answered.
    Reached,
    /// A list or a watch could not be started.
    Failed(Failure),
}

#[derive(Debug)]
pub(crate) struct Applied {
    pub key: Key,
    /// `None`: nothing for a proxy.
    pub delta: Option<Delta>,
    pub problems: Vec<Problem>,
}

/// How long is waited, and how much is asked for at once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Longest time between two attempts while the server cannot be reached. It grows to that from 0.8 s.
    pub max_delay: Duration,
    /// Until it is asked again for ServiceCIDRs if the server has none, or keeps them from us.
    pub absent_delay: Duration,
    /// Objects in one page of a list.
    pub page: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Self { max_delay: Duration::from_secs(15), absent_delay: Duration::from_secs(600), page: PAGE }
    }
}

/// A page is a round trip in which the server reads and we wait, and costs the server memory.
const PAGE: u32 = 5000;
/// Longest time until a response begins (a watch's begins at once). Without it a server that vanished without a word would be
/// waited for until TCP gives up, some 15 minutes.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// A list that is needed sooner than this after the last is waited for.
const RELIST_INTERVAL: Duration = Duration::from_secs(30);
/// After so many refusals in a row to continue a watch, everything is listed anew.
const MAX_REFUSALS: u32 = 3;
/// The server ends a watch after 290 s, as `WatchParams` asks, and sends bookmarks meanwhile. Later than this it is dead.
const IDLE: Duration = Duration::from_secs(295);
/// A watch that ends sooner, and without any event, is not begun again at once.
const SHORT_WATCH: Duration = Duration::from_secs(1);

/// A kind that can be watched.
pub(crate) trait Watchable:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static
{
    /// The protobuf message.
    type Wire: prost::Message + Default + Into<Self>;

    fn convert(&self, names: &mut Names) -> (Option<Delta>, Vec<Problem>);
}

impl Watchable for core::Service {
    type Wire = wire::Service;

    fn convert(&self, names: &mut Names) -> (Option<Delta>, Vec<Problem>) {
        let (object, problems) = convert::service(self, names);
        (object.map(Delta::Service), problems)
    }
}

impl Watchable for discovery::EndpointSlice {
    type Wire = wire::EndpointSlice;

    fn convert(&self, names: &mut Names) -> (Option<Delta>, Vec<Problem>) {
        let (object, problems) = convert::endpoint_slice(self, names);
        (object.map(Delta::Slice), problems)
    }
}

impl Watchable for core::Node {
    type Wire = wire::Node;

    fn convert(&self, _: &mut Names) -> (Option<Delta>, Vec<Problem>) {
        let (object, problems) = convert::node(self);
        (object.map(Delta::Node), problems)
    }
}

impl Watchable for networking::ServiceCIDR {
    type Wire = wire::ServiceCidr;

    fn convert(&self, _: &mut Names) -> (Option<Delta>, Vec<Problem>) {
        let (object, problems) = convert::service_cidr(self);
        (object.map(|(name, cidrs)| Delta::ServiceCidr(name, cidrs)), problems)
    }
}

/// Which objects of a kind are asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct Selectors {
    pub labels: Option<String>,
    pub fields: Option<String>,
}

/// The watch of one kind.
pub(crate) struct Task {
    pub kind: Watched,
    pub client: Client,
    pub pace: Pace,
    pub out: mpsc::Sender<Message>,
}

/// The hub is gone.
struct Closed;

/// Why a watch was given up.
enum End {
    /// Everything must be listed anew.
    Relist,
    Closed,
}

impl From<Closed> for End {
    fn from(Closed: Closed) -> Self {
        End::Closed
    }
}

/// What is remembered between attempts.
struct State {
    names: Names,
    backoff: DefaultBackoff,
    /// When a list was last needed because a watch could not go on.
    relisted: Option<Instant>,
    refusals_in_a_row: u32,
    absences_in_a_row: u32,
    /// Lists are asked for in protobuf, until the server sends something else by this name.
    protobuf: bool,
    /// There is an object that cannot be decoded: so that a watch survives it, it decodes more slowly.
    lenient: bool,
}

impl State {
    /// All is well.
    fn reset(&mut self) {
        self.backoff.reset();
        (self.refusals_in_a_row, self.absences_in_a_row) = (0, 0);
    }
}

impl Task {
    /// Until the hub is gone.
    pub(crate) async fn run<K: Watchable>(self, selectors: Selectors) {
        let client = self.observed();
        let mut state = State {
            names: Names::default(),
            backoff: DefaultBackoff::default(),
            relisted: None,
            refusals_in_a_row: 0,
            absences_in_a_row: 0,
            protobuf: true,
            lenient: false,
        };
        loop {
            let Ok(version) = self.list::<K>(&client, &selectors, &mut state).await else { return };
            let end = if state.lenient {
                let api = Api::<Lenient<K>>::all(client.clone());
                self.watch(api, &selectors, version, &mut state, |object, names| applied(&object.decoded(), names))
                    .await
            } else {
                let api = Api::<K>::all(client.clone());
                self.watch(api, &selectors, version, &mut state, |object, names| applied(&Ok(object), names)).await
            };
            if let End::Closed = end {
                return;
            }
        }
    }

    /// A client that tells when the server answers.
    fn observed(&self) -> Client {
        let (client, out, kind) = (self.client.clone(), self.out.clone(), self.kind);
        let namespace = client.default_namespace().to_owned();
        let service = tower::service_fn(move |request: Request<Body>| {
            let (client, out) = (client.clone(), out.clone());
            async move {
                let response = tokio::time::timeout(RESPONSE_TIMEOUT, client.send(request)).await??;
                if response.status().is_success() {
                    // If the hub is gone, the task notices by itself.
                    let _ = out.send(Message { kind, payload: Payload::Reached }).await;
                }
                Ok::<_, tower::BoxError>(response)
            }
        });
        Client::new(service, namespace)
    }

    /// Lists everything, however often it must be tried; the position from which to watch.
    async fn list<K: Watchable>(
        &self,
        client: &Client,
        selectors: &Selectors,
        state: &mut State,
    ) -> Result<String, Closed> {
        let params = ListParams {
            label_selector: selectors.labels.clone(),
            field_selector: selectors.fields.clone(),
            limit: Some(self.pace.page),
            ..ListParams::default()
        };
        loop {
            self.send(Payload::Init).await?;
            let mut listing = Listing::new(client, params.clone(), state.protobuf);
            let error = loop {
                match listing.next::<K>().await {
                    Ok(Some(objects)) => {
                        state.lenient |= objects.iter().any(Result::is_err);
                        let applied = objects.iter().map(|object| applied(object, &mut state.names)).collect();
                        self.send(Payload::Applied(applied)).await?;
                    }
                    Ok(None) => match listing.version() {
                        Ok(version) => {
                            state.reset();
                            self.send(Payload::Listed).await?;
                            return Ok(version);
                        }
                        Err(error) => break error,
                    },
                    Err(error) => break error,
                }
            };
            tracing::debug!(kind = self.kind.plural(), ?error, "list failed");
            let trouble = Trouble::from(&error);
            if trouble.undecodable && std::mem::take(&mut state.protobuf) {
                tracing::warn!(
                    kind = self.kind.plural(),
                    ?error,
                    "a list cannot be decoded; asking for JSON from now on"
                );
            }
            self.wait(&trouble, state).await?;
        }
    }

    /// Watches from `version` on, until a new list is needed.
    async fn watch<T>(
        &self,
        api: Api<T>,
        selectors: &Selectors,
        mut version: String,
        state: &mut State,
        applied: impl Fn(T, &mut Names) -> Applied,
    ) -> End
    where
        T: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let params = WatchParams {
            label_selector: selectors.labels.clone(),
            field_selector: selectors.fields.clone(),
            ..WatchParams::default()
        };
        loop {
            let begun = Instant::now();
            let mut quiet = true;
            let mut stream = match api.watch(&params, &version).await {
                Ok(stream) => stream.boxed(),
                Err(error) => {
                    if let Err(end) = self.failed(&WatchError::Start(error), state).await {
                        return end;
                    }
                    continue;
                }
            };
            // Its end is ordinary, and so is that of a connection on which nothing comes any more.
            while let Ok(Some(event)) = tokio::time::timeout(IDLE, stream.next()).await {
                quiet = false;
                let outcome = match event {
                    Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => match object.resource_version() {
                        Some(new) if !new.is_empty() => {
                            version = new;
                            Ok(Some(Payload::Applied(vec![applied(object, &mut state.names)])))
                        }
                        _ => Err(WatchError::NoVersion),
                    },
                    Ok(WatchEvent::Deleted(object)) => match object.resource_version() {
                        Some(new) if !new.is_empty() => {
                            version = new;
                            Ok(Some(Payload::Deleted { key: key(object.meta()) }))
                        }
                        _ => Err(WatchError::NoVersion),
                    },
                    Ok(WatchEvent::Bookmark(bookmark)) => {
                        version = bookmark.metadata.resource_version;
                        Ok(None)
                    }
                    Ok(WatchEvent::Error(status)) => Err(WatchError::Event(status)),
                    Err(error) => Err(WatchError::Broken(error)),
                };
                let result = match outcome {
                    Ok(Some(payload)) => {
                        state.reset();
                        self.send(payload).await.map_err(End::from)
                    }
                    Ok(None) => Ok(()),
                    Err(error) => self.failed(&error, state).await,
                };
                if let Err(end) = result {
                    return end;
                }
            }
            if quiet
                && begun.elapsed() < SHORT_WATCH
                && let Err(closed) = self.wait(&Trouble::default(), state).await
            {
                return closed.into();
            }
        }
    }

    /// Tells of a failed watch and waits. `Ok`: it can go on where it was.
    async fn failed(&self, error: &WatchError, state: &mut State) -> Result<(), End> {
        tracing::debug!(kind = self.kind.plural(), ?error, "watch failed");
        let trouble = Trouble::from(error);
        self.wait(&trouble, state).await?;
        if trouble.undecodable {
            if !std::mem::replace(&mut state.lenient, true) {
                tracing::warn!(kind = self.kind.plural(), "a change cannot be decoded; from now on object by object");
            }
            return Err(End::Relist);
        }
        // A server that has forgotten the position refuses it for ever.
        if trouble.expired || state.refusals_in_a_row >= MAX_REFUSALS {
            return Err(End::Relist);
        }
        Ok(())
    }

    async fn wait(&self, trouble: &Trouble, state: &mut State) -> Result<(), Closed> {
        if let Some(failure) = &trouble.failure {
            self.send(Payload::Failed(failure.clone())).await?;
        }
        let mut delay = state.backoff.next().unwrap_or(self.pace.max_delay).min(self.pace.max_delay);
        if trouble.expired || trouble.undecodable {
            // Everyday life, nothing to wait for, unless it happens all the time.
            if state.relisted.is_none_or(|last| last.elapsed() > RELIST_INTERVAL) {
                delay = Duration::ZERO;
            }
            state.relisted = Some(Instant::now());
        }
        state.absences_in_a_row = if trouble.absent { state.absences_in_a_row + 1 } else { 0 };
        if state.absences_in_a_row >= PERSISTENT && self.kind == Watched::ServiceCidrs {
            delay = self.pace.absent_delay;
        }
        state.refusals_in_a_row += u32::from(trouble.refused);
        tokio::select! {
            () = self.out.closed() => Err(Closed),
            () = tokio::time::sleep(delay.max(trouble.retry_after)) => Ok(()),
        }
    }

    async fn send(&self, payload: Payload) -> Result<(), Closed> {
        self.out.send(Message { kind: self.kind, payload }).await.map_err(|_| Closed)
    }
}

fn applied<K: Watchable>(object: &Decoded<K>, names: &mut Names) -> Applied {
    match object {
        Ok(object) => {
            let (delta, problems) = object.convert(names);
            let key = match &delta {
                Some(Delta::Service(service)) => service.name.clone(),
                Some(Delta::Slice(slice)) => slice.name.clone(),
                _ => key(object.meta()),
            };
            Applied { key, delta, problems }
        }
        Err(Undecodable { key, error }) => {
            let key = key.clone();
            let name = if key.namespace.is_empty() { key.name.to_string() } else { key.to_string() };
            let message = format!("cannot be decoded ({error}); the object is not served");
            let location = format!("{} {name}", K::kind(&()));
            let problem = Problem { error: true, location, field: String::new(), message };
            Applied { key, delta: None, problems: vec![problem] }
        }
    }
}
