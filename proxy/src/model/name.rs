//! Names of API objects and of service ports.

use proxy_common::Protocol;
use std::fmt;
use std::sync::Arc;

/// Namespace and name of an API object; cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectName {
    /// Namespace.
    pub namespace: Arc<str>,
    /// Name within the namespace.
    pub name: Arc<str>,
}

impl ObjectName {
    /// Makes a name from its two parts.
    #[must_use]
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }
}

/// `namespace/name`
impl fmt::Display for ObjectName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The unit of everything: one port of one Service. The key of Kubernetes' `ServicePortName` plus the protocol.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServicePortName {
    /// The Service.
    pub service: ObjectName,
    /// `spec.ports[].name`; empty for an unnamed port.
    pub port: Arc<str>,
    /// `spec.ports[].protocol`
    pub protocol: Protocol,
}

/// `namespace/name:port`, or `namespace/name` for an unnamed port, as kube-proxy prints it in element comments.
impl fmt::Display for ServicePortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.port.is_empty() { write!(f, "{}", self.service) } else { write!(f, "{}:{}", self.service, self.port) }
    }
}
