//! An API object that may be unreadable, so that one bad object does not make a whole list unreadable.

use super::track::{Key, key};
use ::kube::Resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error};
use serde_json::Value;
use std::borrow::Cow;

/// `K`, or why it cannot be decoded. Decoding goes through a tree, which costs time and memory: only for servers that have
/// sent something undecodable.
#[derive(Clone, Debug)]
pub(crate) struct Lenient<K> {
    metadata: ObjectMeta,
    object: Result<K, String>,
}

/// An object that cannot be decoded.
#[derive(Clone, Debug)]
pub(crate) struct Undecodable {
    /// Its name.
    pub key: Key,
    /// Why not.
    pub error: String,
}

/// `K`, or why it cannot be decoded.
pub(crate) type Decoded<K> = Result<K, Undecodable>;

impl<K> Lenient<K> {
    pub(crate) fn decoded(self) -> Decoded<K> {
        let Self { metadata, object } = self;
        object.map_err(|error| Undecodable { key: key(&metadata), error })
    }
}

impl<'de, K: DeserializeOwned> Deserialize<'de> for Lenient<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut tree = Value::deserialize(deserializer)?;
        // Neither is needed, and both are large.
        if let Some(metadata) = tree.get_mut("metadata").and_then(Value::as_object_mut) {
            metadata.remove("managedFields");
            metadata.remove("annotations");
        }
        let metadata = tree.get("metadata").ok_or_else(|| D::Error::custom("object without metadata"))?;
        let metadata = ObjectMeta::deserialize(metadata).or_else(|_| minimal(metadata)).map_err(D::Error::custom)?;
        let object = K::deserialize(tree).map_err(|error| error.to_string());
        Ok(Self { metadata, object })
    }
}

/// Only what the watch needs.
fn minimal(metadata: &Value) -> Result<ObjectMeta, serde_json::Error> {
    let mut kept = serde_json::Map::new();
    for key in ["name", "namespace", "resourceVersion", "uid"] {
        if let Some(value) = metadata.get(key) {
            kept.insert(key.to_owned(), value.clone());
        }
    }
    ObjectMeta::deserialize(Value::Object(kept))
}

impl<K: Resource<DynamicType = ()>> Resource for Lenient<K> {
    type DynamicType = ();
    type Scope = K::Scope;

    fn kind((): &()) -> Cow<'_, str> {
        K::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        K::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        K::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        K::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}
