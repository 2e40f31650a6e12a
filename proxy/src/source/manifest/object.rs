//! One manifest object, ready for the picture: defaulted, validated and converted.

use super::document::{Kind, Object, Parsed, Place};
use super::{defaults, validate};
use crate::model::{EndpointSlice, Node, ObjectName, Service};
use crate::source::{Problem, Report, convert};
use ipnet::IpNet;
use std::fmt;
use std::sync::Arc;

/// What makes an object the same one: kind and name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Key {
    Node(Arc<str>),
    ServiceCidr(Arc<str>),
    Service(ObjectName),
    Slice(ObjectName),
}

impl Key {
    fn of(parsed: &Parsed) -> Self {
        match parsed.kind {
            Kind::Node => Key::Node(parsed.name.as_str().into()),
            Kind::ServiceCidr => Key::ServiceCidr(parsed.name.as_str().into()),
            Kind::Service => Key::Service(ObjectName::new(&parsed.namespace, &parsed.name)),
            Kind::EndpointSlice => Key::Slice(ObjectName::new(&parsed.namespace, &parsed.name)),
        }
    }

    pub(crate) fn kind(&self) -> Kind {
        match self {
            Key::Node(_) => Kind::Node,
            Key::ServiceCidr(_) => Kind::ServiceCidr,
            Key::Service(_) => Kind::Service,
            Key::Slice(_) => Kind::EndpointSlice,
        }
    }
}

/// `Service default/web`
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind().name())?;
        match self {
            Key::Node(name) | Key::ServiceCidr(name) => write!(f, " {name}"),
            Key::Service(name) | Key::Slice(name) => write!(f, " {name}"),
        }
    }
}

/// What an object means to the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Meaning {
    Service(Service),
    Slice(EndpointSlice),
    Node(Node),
    ServiceCidr(Vec<IpNet>),
    /// A valid object of which the proxy serves nothing (headless, ExternalName, another proxy's).
    Nothing,
}

/// One object of a file.
#[derive(Debug)]
pub(crate) struct Entry {
    pub key: Key,
    pub place: Place,
    /// `None`: invalid, not served.
    pub meaning: Option<Arc<Meaning>>,
}

/// Defaults, validates and converts `parsed`; its problems go to `problems`.
pub(crate) fn entry(parsed: Parsed, problems: &mut Vec<Problem>) -> Entry {
    let key = Key::of(&parsed);
    let Parsed { kind, namespace, name, place, tree, object, problems: told } = parsed;
    problems.extend(told);
    let mut report = Report::new(kind.name(), kind.namespaced().then_some(namespace.as_str()), &name);
    let (meaning, converted) = match object {
        None => (None, Vec::new()),
        Some(Object::Service(mut object)) => {
            defaults::service(&mut object);
            validate::service(&object, &mut report);
            let (service, problems) = convert::service(&object, &mut convert::Names::default());
            (Some(service.map_or(Meaning::Nothing, Meaning::Service)), problems)
        }
        Some(Object::EndpointSlice(mut object)) => {
            defaults::endpoint_slice(&mut object);
            validate::endpoint_slice(&object, &mut report);
            let (slice, problems) = convert::endpoint_slice(&object, &mut convert::Names::default());
            (Some(slice.map_or(Meaning::Nothing, Meaning::Slice)), problems)
        }
        Some(Object::Node(object)) => {
            validate::node(&object, &mut report);
            let (node, problems) = convert::node(&object);
            (Some(node.map_or(Meaning::Nothing, Meaning::Node)), problems)
        }
        Some(Object::ServiceCidr(object)) => {
            validate::service_cidr(&object, &mut report);
            let (cidrs, problems) = convert::service_cidr(&object);
            (Some(cidrs.map_or(Meaning::Nothing, |(_, cidrs)| Meaning::ServiceCidr(cidrs))), problems)
        }
    };
    let valid = meaning.is_some() && !report.has_errors();
    let mut found = report.into_problems();
    // What validation refused need not be told again as a part that conversion left out.
    if valid {
        found.extend(converted);
    }
    for mut problem in found {
        problem.location = format!("{}, {}", place.at_line(tree.line_of(&problem.field)), problem.location);
        if problem.error {
            problem.message.push_str("; the object is not served");
        }
        problems.push(problem);
    }
    Entry { key, place, meaning: meaning.filter(|_| valid).map(Arc::new) }
}
