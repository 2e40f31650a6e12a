//! Reads a list of one kind, object by object while it arrives.
//!
//! Protobuf is asked for ([`super::wire`]), so that neither the answer nor the API objects in it are ever held whole. A server
//! that answers in JSON is fine too: then a page is held.

use super::lenient::{Decoded, Lenient, Undecodable};
use super::split::{Part, Splitter};
use super::track::key;
use super::trouble::root_cause;
use super::watch::Watchable;
use super::wire;
use ::kube::Client;
use ::kube::api::ListParams;
use ::kube::client::Body;
use ::kube::core::{ObjectList, Status, request};
use http::header::{ACCEPT, CONTENT_TYPE, HeaderValue};
use http_body_util::BodyExt;
use prost::Message;
use prost::bytes::Bytes;
use std::time::Duration;

const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";
/// A connection on which so long nothing of an answer arrives is dead.
const STALL: Duration = Duration::from_secs(60);
/// Of an answer with an error status, this much is read.
const ERROR_MAX: usize = 64 << 10;

/// Why there is no list.
#[derive(Debug)]
pub(super) enum ListError {
    /// The server answers with an error status.
    Refused(Box<Status>),
    /// There is no answer, or it breaks off.
    Unreachable(String),
    /// The answer is no list.
    Unreadable(String),
}

/// A list that is being read.
pub(super) struct Listing<'a> {
    client: &'a Client,
    params: ListParams,
    protobuf: bool,
    /// A page that arrives.
    page: Option<(Body, Splitter)>,
    begun: bool,
    version: String,
}

impl<'a> Listing<'a> {
    /// Begins with the first page of `params.limit` objects; nothing is sent yet.
    pub(super) fn new(client: &'a Client, params: ListParams, protobuf: bool) -> Self {
        Self { client, params, protobuf, page: None, begun: false, version: String::new() }
    }

    /// The next objects, at least one. `None`: that was all.
    pub(super) async fn next<K: Watchable>(&mut self) -> Result<Option<Vec<Decoded<K>>>, ListError> {
        loop {
            let objects = if let Some((body, splitter)) = &mut self.page {
                match chunk(body).await? {
                    Some(chunk) => {
                        splitter.push(&chunk);
                        self.split()?
                    }
                    None if splitter.complete() => {
                        self.page = None;
                        continue;
                    }
                    None => return Err(ListError::Unreachable("the answer ends early".to_owned())),
                }
            } else if self.begun && self.params.continue_token.is_none() {
                return Ok(None);
            } else {
                self.ask().await?
            };
            if !objects.is_empty() {
                return Ok(Some(objects));
            }
        }
    }

    /// The position from which to watch, once the list has been read.
    pub(super) fn version(self) -> Result<String, ListError> {
        if self.version.is_empty() {
            return Err(ListError::Unreadable("it has no resourceVersion".to_owned()));
        }
        Ok(self.version)
    }

    /// Asks for a page; what is in it, if it is JSON.
    async fn ask<K: Watchable>(&mut self) -> Result<Vec<Decoded<K>>, ListError> {
        let unreachable = |error: &dyn std::error::Error| ListError::Unreachable(root_cause(error));
        let mut request =
            request::Request::new(K::url_path(&(), None)).list(&self.params).map_err(|e| unreachable(&e))?;
        let accept =
            if self.protobuf { "application/vnd.kubernetes.protobuf,application/json" } else { "application/json" };
        request.headers_mut().insert(ACCEPT, HeaderValue::from_static(accept));
        let answer = self.client.send(request.map(Body::from)).await.map_err(|e| unreachable(&e))?;
        let status = answer.status();
        let content_type = answer.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let protobuf = content_type.is_some_and(|value| value.starts_with(PROTOBUF));
        let mut body = answer.into_body();
        if !status.is_success() {
            let text = whole(&mut body, ERROR_MAX).await?;
            return Err(ListError::Refused(Box::new(error_status(&text, protobuf, status.as_u16()))));
        }
        self.begun = true;
        self.params.continue_token = None;
        if protobuf {
            self.page = Some((body, Splitter::default()));
            return Ok(Vec::new());
        }
        let text = whole(&mut body, usize::MAX).await?;
        if let Ok(list) = serde_json::from_slice::<ObjectList<K>>(&text) {
            self.metadata(list.metadata.resource_version, list.metadata.continue_);
            return Ok(list.items.into_iter().map(Ok).collect());
        }
        let list: ObjectList<Lenient<K>> =
            serde_json::from_slice(&text).map_err(|error| ListError::Unreadable(error.to_string()))?;
        self.metadata(list.metadata.resource_version, list.metadata.continue_);
        Ok(list.items.into_iter().map(Lenient::decoded).collect())
    }

    /// The objects that have arrived whole.
    fn split<K: Watchable>(&mut self) -> Result<Vec<Decoded<K>>, ListError> {
        let unreadable = |error: &dyn std::error::Error| ListError::Unreadable(error.to_string());
        let mut objects = Vec::new();
        while let Some((_, splitter)) = &mut self.page
            && let Some(part) = splitter.next().map_err(|e| unreadable(&e))?
        {
            match part {
                Part::Metadata(bytes) => {
                    let metadata = wire::ListMeta::decode(bytes).map_err(|e| unreadable(&e))?;
                    self.metadata(Some(metadata.resource_version), Some(metadata.continue_));
                }
                Part::Item(bytes) => objects.push(object(bytes)?),
            }
        }
        Ok(objects)
    }

    fn metadata(&mut self, version: Option<String>, token: Option<String>) {
        self.version = version.unwrap_or_default();
        self.params.continue_token = token.filter(|token| !token.is_empty());
    }
}

fn object<K: Watchable>(bytes: Bytes) -> Result<Decoded<K>, ListError> {
    let error = match K::Wire::decode(bytes.clone()) {
        Ok(object) => return Ok(Ok(object.into())),
        Err(error) => error.to_string(),
    };
    let named = wire::Named::decode(bytes).map_err(|_| ListError::Unreadable(error.clone()))?;
    Ok(Err(Undecodable { key: key(&named.metadata.unwrap_or_default().into()), error }))
}

async fn chunk(body: &mut Body) -> Result<Option<Bytes>, ListError> {
    loop {
        match tokio::time::timeout(STALL, body.frame()).await {
            Err(_) => return Err(ListError::Unreachable(format!("nothing of the answer arrived for {STALL:?}"))),
            Ok(None) => return Ok(None),
            Ok(Some(Err(error))) => return Err(ListError::Unreachable(root_cause(&error))),
            Ok(Some(Ok(frame))) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}

async fn whole(body: &mut Body, max: usize) -> Result<Vec<u8>, ListError> {
    let mut text = Vec::new();
    while let Some(chunk) = chunk(body).await? {
        text.extend_from_slice(&chunk);
        if text.len() >= max {
            break;
        }
    }
    Ok(text)
}

/// What an answer with an error status says. Whoever is between us and the server may answer with anything.
fn error_status(text: &[u8], protobuf: bool, code: u16) -> Status {
    if protobuf {
        let raw = text.get(4..).and_then(|text| wire::Unknown::decode(text).ok()).unwrap_or_default().raw;
        return wire::Status::decode(&*raw).unwrap_or_default().with_code(code);
    }
    let json = serde_json::from_slice::<Status>(text).map(|status| status.with_code(code));
    json.unwrap_or_else(|_| Status::failure(String::from_utf8_lossy(text).trim(), "").with_code(code))
}
