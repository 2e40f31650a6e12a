//! API objects to `model` objects, leniently: what cannot be used is left out and named, the rest of the object is kept.
//!
//! Each function returns the model object, or `None` if a proxy has nothing to do with the API object (headless, another
//! proxy's, broken beyond use), and the problems found on the way. `None` from an object that was served before means that it
//! is gone. Names that are likely to come again are shared through [`Names`].

mod names;
mod node;
mod service;
mod slice;

#[cfg(test)]
mod tests;

pub use names::Names;
pub use node::{ServiceCidr, node, service_cidr};
pub use service::service;
pub use slice::endpoint_slice;

use crate::model::{ObjectName, Protocol};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Label on a Service that names another proxy; any value, also an empty one, takes the Service away from us.
pub const LABEL_SERVICE_PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
/// Label on the slices of headless Services.
pub const LABEL_HEADLESS: &str = "service.kubernetes.io/headless";
/// Label on a slice that names its Service.
pub const LABEL_SERVICE_NAME: &str = "kubernetes.io/service-name";
/// Label on a Node that names its zone.
pub const LABEL_ZONE: &str = "topology.kubernetes.io/zone";

/// ClientIP affinity timeout that the API server fills in, in seconds.
pub const DEFAULT_AFFINITY_TIMEOUT_S: u32 = 10_800;

/// Namespace and name of an object, `None` if one is missing.
pub(crate) fn object_name(meta: &ObjectMeta, names: &mut Names) -> Option<ObjectName> {
    let (namespace, name) = (meta.namespace.as_deref()?, meta.name.as_deref()?);
    (!namespace.is_empty() && !name.is_empty())
        .then(|| ObjectName { namespace: names.share(namespace), name: name.into() })
}

pub(crate) fn has_label(meta: &ObjectMeta, label: &str) -> bool {
    meta.labels.as_ref().is_some_and(|labels| labels.contains_key(label))
}

/// `TCP`, `UDP` or `SCTP`; missing or empty means TCP.
pub(crate) fn protocol(text: Option<&str>) -> Option<Protocol> {
    match text {
        None | Some("") => Some(Protocol::Tcp),
        Some(text) => Protocol::ALL.into_iter().find(|protocol| protocol.to_string() == text),
    }
}

/// A port number from 1 to 65535.
pub(crate) fn port_number(number: i32) -> Option<u16> {
    u16::try_from(number).ok().filter(|port| *port != 0)
}
