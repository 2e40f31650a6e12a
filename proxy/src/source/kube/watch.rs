//! Lists and watches one kind, for ever.
//!
//! `kube::runtime::watcher` does list, watch, bookmarks and most of the recovery; here is what it leaves to its users: waiting
//! after an error, a new list where it would ask the same question for ever, and what an outage looks like from outside.

use super::Watched;
use super::lenient::Lenient;
use super::outage::{Failure, PERSISTENT};
use super::track::Key;
use crate::model::Delta;
use crate::source::{Problem, convert};
use ::kube::client::Body;
use ::kube::runtime::utils::Backoff;
use ::kube::runtime::watcher::{self, Config, DefaultBackoff, Event, watcher};
use ::kube::{Api, Client, Resource};
use futures::StreamExt;
use http::Request;
use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery, networking::v1 as networking};
use serde::de::DeserializeOwned;
use std::fmt::Debug;
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// What a watch task tells the hub.
#[derive(Debug)]
pub(crate) struct Message {
    pub kind: Watched,
    pub payload: Payload,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // nearly all are `Applied`
pub(crate) enum Payload {
    /// A new list begins.
    Init,
    /// An object of a list, or a new or changed one; `None`: nothing for a proxy.
    Applied {
        key: Key,
        delta: Option<Delta>,
        problems: Vec<Problem>,
    },
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

/// How long is waited.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Longest time between two attempts while the server cannot be reached. It grows to that from 0.8 s.
    pub max_delay: Duration,
    /// Until it is asked again for ServiceCIDRs if the server has none, or keeps them from us.
    pub absent_delay: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { max_delay: Duration::from_secs(15), absent_delay: Duration::from_secs(600) }
    }
}

/// Longest time until a response begins (a watch's begins at once). Without it a server that vanished without a word would be
/// waited for until TCP gives up, some 15 minutes.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// A list that is needed sooner than this after the last is waited for.
const RELIST_INTERVAL: Duration = Duration::from_secs(30);
/// After so many refusals in a row to continue a watch, everything is listed anew.
const MAX_REFUSALS: u32 = 3;

/// A kind that can be watched.
pub(crate) trait Watchable:
    Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static
{
    fn convert(&self) -> (Option<Delta>, Vec<Problem>);
}

impl Watchable for core::Service {
    fn convert(&self) -> (Option<Delta>, Vec<Problem>) {
        let (object, problems) = convert::service(self);
        (object.map(Delta::Service), problems)
    }
}

impl Watchable for discovery::EndpointSlice {
    fn convert(&self) -> (Option<Delta>, Vec<Problem>) {
        let (object, problems) = convert::endpoint_slice(self);
        (object.map(Delta::Slice), problems)
    }
}

impl Watchable for core::Node {
    fn convert(&self) -> (Option<Delta>, Vec<Problem>) {
        let (object, problems) = convert::node(self);
        (object.map(Delta::Node), problems)
    }
}

impl Watchable for networking::ServiceCIDR {
    fn convert(&self) -> (Option<Delta>, Vec<Problem>) {
        let (object, problems) = convert::service_cidr(self);
        (object.map(|(name, cidrs)| Delta::ServiceCidr(name, cidrs)), problems)
    }
}

/// The watch of one kind.
pub(crate) struct Task {
    pub kind: Watched,
    pub client: Client,
    pub pace: Pace,
    pub out: mpsc::Sender<Message>,
}

/// Why a watcher was given up.
enum End {
    /// Everything must be listed anew.
    Relist,
    /// A list holds something that cannot be decoded.
    Undecodable,
    /// The hub is gone.
    Closed,
}

impl Task {
    pub(crate) async fn run<K: Watchable>(self, config: Config) {
        let client = self.observed();
        let mut strict = true;
        let mut relisted = None;
        loop {
            let end = if strict {
                self.follow(Api::<K>::all(client.clone()), &config, &mut relisted, |object| applied(&object)).await
            } else {
                let applied = |object| self.applied_leniently(&object);
                self.follow(Api::<Lenient<K>>::all(client.clone()), &config, &mut relisted, applied).await
            };
            match end {
                End::Relist => {}
                End::Undecodable => {
                    tracing::warn!(kind = self.kind.plural(), "a list cannot be decoded; from now on object by object");
                    strict = false;
                }
                End::Closed => return,
            }
        }
    }

    /// A client that tells when the server answers. The watcher itself is silent about a watch that was resumed.
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

    /// Runs one watcher, which begins with a list. `relisted` is when a list was last needed because a watch could not go on.
    async fn follow<T>(
        &self,
        api: Api<T>,
        config: &Config,
        relisted: &mut Option<Instant>,
        applied: impl Fn(T) -> Payload,
    ) -> End
    where
        T: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let mut stream = pin!(watcher(api, config.clone()));
        let mut backoff = DefaultBackoff::default();
        let (mut refusals_in_a_row, mut absences_in_a_row) = (0, 0);
        while let Some(item) = stream.next().await {
            let error = match item {
                Ok(event) => {
                    let payload = match event {
                        // Comes before the server is asked, so it proves nothing.
                        Event::Init => Payload::Init,
                        Event::InitDone => Payload::Listed,
                        Event::InitApply(object) | Event::Apply(object) => applied(object),
                        Event::Delete(object) => Payload::Deleted { key: key(object.meta()) },
                    };
                    if !matches!(payload, Payload::Init) {
                        backoff.reset();
                        (refusals_in_a_row, absences_in_a_row) = (0, 0);
                    }
                    if self.send(payload).await.is_err() {
                        return End::Closed;
                    }
                    continue;
                }
                Err(error) => error,
            };
            tracing::debug!(kind = self.kind.plural(), %error, "list or watch failed");
            let trouble = Trouble::of(&error);
            if let Some(failure) = trouble.failure
                && self.send(Payload::Failed(failure)).await.is_err()
            {
                return End::Closed;
            }
            if trouble.undecodable && trouble.listing {
                return End::Undecodable;
            }
            let mut delay = backoff.next().unwrap_or(self.pace.max_delay).min(self.pace.max_delay);
            if trouble.expired || trouble.undecodable {
                // Everyday life, nothing to wait for, unless it happens all the time.
                if relisted.is_none_or(|last| last.elapsed() > RELIST_INTERVAL) {
                    delay = Duration::ZERO;
                }
                *relisted = Some(Instant::now());
            }
            absences_in_a_row = if trouble.absent { absences_in_a_row + 1 } else { 0 };
            if absences_in_a_row >= PERSISTENT && self.kind == Watched::ServiceCidrs {
                delay = self.pace.absent_delay;
            }
            tokio::select! {
                () = self.out.closed() => return End::Closed,
                () = tokio::time::sleep(delay.max(trouble.retry_after)) => {}
            }
            if trouble.undecodable {
                return End::Relist;
            }
            // The watcher would ask for the same position again, which a server that has forgotten it refuses for ever.
            refusals_in_a_row += u32::from(trouble.refused);
            if !trouble.listing && (trouble.expired || refusals_in_a_row >= MAX_REFUSALS) {
                return End::Relist;
            }
        }
        End::Closed
    }

    async fn send(&self, payload: Payload) -> Result<(), mpsc::error::SendError<Message>> {
        self.out.send(Message { kind: self.kind, payload }).await
    }

    fn applied_leniently<K: Watchable>(&self, object: &Lenient<K>) -> Payload {
        let error = match &object.object {
            Ok(object) => return applied(object),
            Err(error) => error,
        };
        let key = key(object.meta());
        let name = if key.namespace.is_empty() { key.name.to_string() } else { key.to_string() };
        let message = format!("cannot be decoded ({error}); the object is not served");
        let location = format!("{} {name}", K::kind(&()));
        Payload::Applied {
            key,
            delta: None,
            problems: vec![Problem { error: true, location, field: String::new(), message }],
        }
    }
}

fn applied<K: Watchable>(object: &K) -> Payload {
    let (delta, problems) = object.convert();
    Payload::Applied { key: key(object.meta()), delta, problems }
}

fn key(meta: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> Key {
    Key::new(meta.namespace.as_deref().unwrap_or(""), meta.name.as_deref().unwrap_or(""))
}

/// What an error of the watcher means.
struct Trouble {
    /// For the operator; `None` if it is no outage (yet).
    failure: Option<Failure>,
    /// It came from a list, not from a watch.
    listing: bool,
    /// The position is too old (410).
    expired: bool,
    /// The server answered with an error.
    refused: bool,
    /// The server does not know the kind or keeps it from us.
    absent: bool,
    undecodable: bool,
    /// How long the server wants us to wait.
    retry_after: Duration,
}

impl Trouble {
    fn of(error: &watcher::Error) -> Self {
        use ::kube::Error;
        let (error, listing, connected) = match error {
            watcher::Error::InitialListFailed(error) => (error, true, false),
            watcher::Error::WatchStartFailed(error) => (error, false, false),
            // The connection worked until now. If it cannot be made again, that is the news.
            watcher::Error::WatchFailed(error) => (error, false, true),
            watcher::Error::WatchError(status) => return Self::refused(status, false),
            watcher::Error::NoResourceVersion => return Self { undecodable: true, ..Self::quiet(false) },
        };
        match error {
            // kube 5 `Client::request_events` reads a line that is no event as a Status, of which every field may be missing.
            Error::Api(status) if connected && status.code == 0 => Self { undecodable: true, ..Self::quiet(false) },
            Error::Api(status) => Self::refused(status, listing),
            Error::SerdeError(_) => Self { undecodable: true, ..Self::quiet(listing) },
            _ if connected => Self::quiet(listing),
            error => Self { failure: Some(Failure::Unreachable(root_cause(error))), ..Self::quiet(listing) },
        }
    }

    fn refused(status: &::kube::core::Status, listing: bool) -> Self {
        let expired = status.code == 410;
        let message = if status.message.is_empty() { status.reason.clone() } else { status.message.clone() };
        let retry_after = status.details.as_ref().map_or(0, |details| details.retry_after_seconds);
        Self {
            failure: (!expired).then_some(Failure::Refused(status.code, message)),
            listing,
            expired,
            refused: !matches!(status.code, 401 | 403 | 429),
            absent: matches!(status.code, 403 | 404),
            undecodable: false,
            retry_after: Duration::from_secs(retry_after.into()),
        }
    }

    fn quiet(listing: bool) -> Self {
        let retry_after = Duration::ZERO;
        Self { failure: None, listing, expired: false, refused: false, absent: false, undecodable: false, retry_after }
    }
}

/// The last of the chain of causes says most: `connection refused`, not `client error`.
fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}
