//! A scripted API server behind `kube::Client`, without sockets.

use super::encode;
use ::kube::Client;
use ::kube::client::Body;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};

const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
pub const SERVICES: &str = "/api/v1/services";
pub const SLICES: &str = "/apis/discovery.k8s.io/v1/endpointslices";
pub const NODES: &str = "/api/v1/nodes";
pub const CIDRS: &str = "/apis/networking.k8s.io/v1/servicecidrs";

type Query = HashMap<String, String>;
type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// What happens to requests for a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The connection is refused.
    Unreachable,
    /// No answer until the fault is taken away.
    Hang,
    /// This status, with so many seconds to wait.
    Status(u16, u32),
}

#[derive(Default)]
pub struct State {
    /// Of the newest change.
    pub version: u64,
    /// Changes up to here are forgotten.
    compacted: u64,
    objects: BTreeMap<&'static str, BTreeMap<String, Value>>,
    history: Vec<(u64, &'static str, String)>,
    streams: Vec<(&'static str, mpsc::UnboundedSender<String>)>,
    faults: HashMap<&'static str, Fault>,
    queries: Vec<(&'static str, Query)>,
    /// It knows no protobuf.
    pub json_only: bool,
    /// It writes what is not protobuf and calls it so.
    pub garbled: bool,
    /// An old position is answered with HTTP 410 in place of an ERROR event.
    pub expire_at_open: bool,
    /// Watches from this position or an older one get 504.
    pub refuse_watches_from: Option<u64>,
}

#[derive(Clone)]
pub struct Server {
    state: Arc<Mutex<State>>,
    changed: Arc<Notify>,
}

impl State {
    pub fn put(&mut self, kind: &'static str, mut object: Value) {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let name = object["metadata"]["name"].as_str().expect("a name").to_owned();
        let old = self.objects.entry(kind).or_default().insert(name, object.clone());
        self.event(kind, if old.is_some() { "MODIFIED" } else { "ADDED" }, &object);
    }

    pub fn delete(&mut self, kind: &'static str, name: &str) {
        self.version += 1;
        let mut object =
            self.objects.get_mut(kind).and_then(|objects| objects.remove(name)).expect("the object exists");
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.event(kind, "DELETED", &object);
    }

    /// Forgets all changes.
    pub fn compact(&mut self) {
        self.compacted = self.version;
        self.history.clear();
    }

    /// Ends all watches of a kind.
    pub fn cut(&mut self, kind: &'static str) {
        self.streams.retain(|(of, _)| *of != kind);
    }

    pub fn fault(&mut self, kind: &'static str, fault: Option<Fault>) {
        match fault {
            Some(fault) => self.faults.insert(kind, fault),
            None => self.faults.remove(kind),
        };
    }

    /// Number of open watches of a kind.
    pub fn open(&self, kind: &'static str) -> usize {
        self.streams.iter().filter(|(of, stream)| *of == kind && !stream.is_closed()).count()
    }

    /// Number of list requests for a kind.
    pub fn lists(&self, kind: &'static str) -> usize {
        self.queries.iter().filter(|(of, query)| *of == kind && !query.contains_key("watch")).count()
    }

    /// Positions from which a kind was watched.
    pub fn watched_from(&self, kind: &'static str) -> Vec<u64> {
        let watches = self.queries.iter().filter(|(of, query)| *of == kind && query.contains_key("watch"));
        watches.map(|(_, query)| query["resourceVersion"].parse().expect("a version")).collect()
    }

    fn event(&mut self, kind: &'static str, change: &str, object: &Value) {
        let line = format!("{}\n", json!({"type": change, "object": object}));
        self.history.push((self.version, kind, line.clone()));
        self.streams.retain(|(of, stream)| *of != kind || stream.send(line.clone()).is_ok());
    }

    fn list(&self, kind: &'static str, query: &Query, protobuf: bool) -> Answer {
        let empty = BTreeMap::new();
        let objects = self.objects.get(kind).unwrap_or(&empty);
        let start: usize = query.get("continue").map_or(0, |token| token.parse().expect("our token"));
        let limit = query.get("limit").map_or(usize::MAX, |limit| limit.parse().expect("a number"));
        let items: Vec<&Value> = objects.values().skip(start).take(limit).collect();
        let next = start + items.len();
        let token = if next < objects.len() { next.to_string() } else { String::new() };
        if protobuf {
            let body =
                if self.garbled { b"k8s\0garbled".to_vec() } else { encode::list(kind, self.version, &token, &items) };
            return protobuf_answer(200, body);
        }
        json_answer(
            200,
            &json!({"metadata": {"resourceVersion": self.version.to_string(), "continue": token}, "items": items}),
        )
    }

    fn watch(&mut self, kind: &'static str, query: &Query) -> Answer {
        let from: u64 = query["resourceVersion"].parse().expect("a version");
        if self.refuse_watches_from.is_some_and(|version| from <= version) {
            return status(504, 0);
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        if from < self.compacted {
            if self.expire_at_open {
                return status(410, 0);
            }
            let _ = sender.send(format!("{}\n", json!({"type": "ERROR", "object": status_object(410, 0)})));
        } else {
            for (_, _, line) in self.history.iter().filter(|(version, of, _)| *of == kind && *version > from) {
                let _ = sender.send(line.clone());
            }
            self.streams.push((kind, sender));
        }
        let lines = futures::stream::unfold(receiver, |mut receiver| async move {
            let line = receiver.recv().await?;
            Some((Ok::<_, Infallible>(Frame::data(Bytes::from(line))), receiver))
        });
        Response::new(StreamBody::new(lines).boxed_unsync())
    }

    fn answer(&mut self, kind: &'static str, query: &Query, protobuf: bool) -> Answer {
        if query.get("watch").is_some_and(|watch| watch == "true") {
            self.watch(kind, query)
        } else {
            self.list(kind, query, protobuf)
        }
    }
}

impl Server {
    pub fn new() -> Self {
        Self { state: Arc::default(), changed: Arc::default() }
    }

    pub fn client(&self) -> Client {
        let server = self.clone();
        Client::new(tower::service_fn(move |request| server.clone().serve(request)), "default")
    }

    /// Several changes at once, unseen by the watches until all are made.
    pub fn hold<R>(&self, change: impl FnOnce(&mut State) -> R) -> R {
        let result = change(&mut self.lock());
        self.changed.notify_waiters();
        result
    }

    pub fn put(&self, kind: &'static str, object: Value) {
        self.hold(|state| state.put(kind, object));
    }

    pub fn delete(&self, kind: &'static str, name: &str) {
        self.hold(|state| state.delete(kind, name));
    }

    pub fn fault(&self, kind: &'static str, fault: Option<Fault>) {
        self.hold(|state| state.fault(kind, fault));
    }

    pub fn cut(&self, kind: &'static str) {
        self.hold(|state| state.cut(kind));
    }

    /// Sends a bookmark to the watches of a kind.
    pub fn bookmark(&self, kind: &'static str, version: u64) {
        let object =
            json!({"metadata": {"resourceVersion": version.to_string()}, "apiVersion": "v1", "kind": "Service"});
        let line = format!("{}\n", json!({"type": "BOOKMARK", "object": object}));
        self.hold(|state| {
            for (_, stream) in state.streams.iter().filter(|(of, _)| *of == kind) {
                let _ = stream.send(line.clone());
            }
        });
    }

    pub fn lists(&self, kind: &'static str) -> usize {
        self.lock().lists(kind)
    }

    pub fn queries(&self, kind: &'static str) -> Vec<Query> {
        self.lock().queries.iter().filter(|(of, _)| *of == kind).map(|(_, query)| query.clone()).collect()
    }

    /// Waits until the server is in a certain state.
    pub async fn wait(&self, condition: impl Fn(&State) -> bool) {
        let waiting = async {
            while !condition(&self.lock()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), waiting).await.expect("the state in time");
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no test panicked in the server")
    }

    async fn serve(self, request: Request<Body>) -> Result<Answer, tower::BoxError> {
        let kinds = [SERVICES, SLICES, NODES, CIDRS];
        let kind = kinds.into_iter().find(|kind| *kind == request.uri().path()).expect("a kind that is watched");
        let query = parse_query(request.uri().query().unwrap_or(""));
        let accept = request.headers().get("accept").and_then(|value| value.to_str().ok()).unwrap_or_default();
        let protobuf = accept.starts_with(PROTOBUF) && !self.lock().json_only;
        self.lock().queries.push((kind, query.clone()));
        loop {
            let changed = self.changed.notified();
            {
                let mut state = self.lock();
                match state.faults.get(kind).copied() {
                    None => return Ok(state.answer(kind, &query, protobuf)),
                    Some(Fault::Unreachable) => {
                        let refused = std::io::Error::new(
                            std::io::ErrorKind::ConnectionRefused,
                            "connection refused, says the script",
                        );
                        return Err(refused.into());
                    }
                    Some(Fault::Status(code, retry_after)) if protobuf => {
                        let body = encode::status(&format!("scripted {code}"), retry_after);
                        return Ok(protobuf_answer(code, body));
                    }
                    Some(Fault::Status(code, retry_after)) => return Ok(status(code, retry_after)),
                    Some(Fault::Hang) => {}
                }
            }
            changed.await;
        }
    }
}

fn status_object(code: u16, retry_after: u32) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": format!("scripted {code}"), "reason": "Scripted",
        "details": {"retryAfterSeconds": retry_after}, "code": code
    })
}

fn status(code: u16, retry_after: u32) -> Answer {
    json_answer(code, &status_object(code, retry_after))
}

fn protobuf_answer(code: u16, body: Vec<u8>) -> Answer {
    // In pieces, as it comes from a network.
    let pieces: Vec<Bytes> = body.chunks(37).map(Bytes::copy_from_slice).collect();
    let pieces = futures::stream::iter(pieces.into_iter().map(|piece| Ok::<_, Infallible>(Frame::data(piece))));
    let mut answer = Response::new(StreamBody::new(pieces).boxed_unsync());
    *answer.status_mut() = StatusCode::from_u16(code).expect("a status code");
    answer.headers_mut().insert("content-type", http::HeaderValue::from_static(PROTOBUF));
    answer
}

fn json_answer(code: u16, body: &Value) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(body.to_string())).boxed_unsync());
    *answer.status_mut() = StatusCode::from_u16(code).expect("a status code");
    answer
}

fn parse_query(text: &str) -> Query {
    let pairs = text.split('&').filter_map(|pair| pair.split_once('='));
    pairs.map(|(key, value)| (decode(key), decode(value))).collect()
}

/// Undoes `application/x-www-form-urlencoded`.
fn decode(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let digits: String = rest.by_ref().take(2).map(char::from).collect();
                u8::from_str_radix(&digits, 16).expect("two hexadecimal digits")
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).expect("UTF-8")
}
