//! From the text of one file to the API objects in it.

use super::yaml::{Content, Document, Yaml, parse_documents};
use crate::source::Problem;
use k8s_openapi::api::{core::v1 as core, discovery::v1 as discovery, networking::v1 as networking};
use serde::de::DeserializeOwned;
use std::sync::Arc;

/// Where an object stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub file: Arc<str>,
    /// 1-based document number.
    pub document: usize,
    /// 1-based position in a List.
    pub item: Option<usize>,
    /// 1-based line, 0 = unknown.
    pub line: usize,
}

/// `web.yaml:14, document 2, item 3`
impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.file)?;
        if self.line != 0 {
            write!(f, ":{}", self.line)?;
        }
        write!(f, ", document {}", self.document)?;
        self.item.map_or(Ok(()), |item| write!(f, ", item {item}"))
    }
}

impl Place {
    pub(crate) fn at_line(&self, line: usize) -> Self {
        Self { line, ..self.clone() }
    }

    pub(crate) fn problem(&self, error: bool, field: impl Into<String>, message: impl Into<String>) -> Problem {
        Problem { error, location: self.to_string(), field: field.into(), message: message.into() }
    }
}

/// The kinds that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// v1 Service
    Service,
    /// discovery.k8s.io/v1 EndpointSlice
    EndpointSlice,
    /// v1 Node
    Node,
    /// networking.k8s.io/v1 ServiceCIDR
    ServiceCidr,
}

impl Kind {
    pub(crate) const ALL: [Kind; 4] = [Kind::Service, Kind::EndpointSlice, Kind::Node, Kind::ServiceCidr];

    /// `kind` in the API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Kind::Service => "Service",
            Kind::EndpointSlice => "EndpointSlice",
            Kind::Node => "Node",
            Kind::ServiceCidr => "ServiceCIDR",
        }
    }

    /// `apiVersion` in the API.
    #[must_use]
    pub fn api_version(self) -> &'static str {
        match self {
            Kind::Service | Kind::Node => "v1",
            Kind::EndpointSlice => "discovery.k8s.io/v1",
            Kind::ServiceCidr => "networking.k8s.io/v1",
        }
    }

    /// Whether objects of the kind live in a namespace.
    #[must_use]
    pub fn namespaced(self) -> bool {
        matches!(self, Kind::Service | Kind::EndpointSlice)
    }
}

/// A decoded API object.
#[derive(Clone, Debug)]
pub(crate) enum Object {
    Service(Box<core::Service>),
    EndpointSlice(Box<discovery::EndpointSlice>),
    Node(Box<core::Node>),
    ServiceCidr(Box<networking::ServiceCIDR>),
}

/// One object of a file.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub kind: Kind,
    /// `metadata.namespace`, or `default`; empty for kinds without one.
    pub namespace: String,
    pub name: String,
    pub place: Place,
    /// The tree, for the lines of later messages.
    pub tree: Yaml,
    /// `None`: a field has the wrong type; the problem is already told.
    pub object: Option<Object>,
    pub problems: Vec<Problem>,
}

/// What a file holds.
#[derive(Debug, Default)]
pub(crate) struct ParsedFile {
    pub objects: Vec<Parsed>,
    /// Kinds that are not read, with the place of each object.
    pub skipped: Vec<(String, Place)>,
    pub problems: Vec<Problem>,
    /// Some document could not be read at all, so that it is unknown which objects it holds.
    pub incomplete: bool,
}

/// Parses the text of `file`.
pub(crate) fn parse_file(file: &str, text: &str) -> ParsedFile {
    let file: Arc<str> = file.into();
    let mut parsed = ParsedFile::default();
    for Document { number, tree } in parse_documents(&file, text) {
        let place = Place { file: Arc::clone(&file), document: number, item: None, line: 0 };
        match tree {
            Ok(tree) => parsed.add(tree, &place, None),
            Err((line, message)) => {
                let place = place.at_line(line);
                parsed.broken(place.problem(
                    true,
                    "",
                    format!("cannot be read: {message}; the document is not served"),
                ));
            }
        }
    }
    parsed
}

impl ParsedFile {
    fn broken(&mut self, problem: Problem) {
        self.incomplete = true;
        self.problems.push(problem);
    }

    /// Takes one object apart; `inherited` is the kind that a typed list gives to its items.
    fn add(&mut self, tree: Yaml, place: &Place, inherited: Option<Kind>) {
        let place = place.at_line(tree.line);
        if !matches!(tree.content, Content::Map(_)) {
            return self.broken(place.problem(true, "", "is not an object with apiVersion and kind"));
        }
        let api_version = tree.text_at(&["apiVersion"]).unwrap_or("").to_owned();
        let kind_name = tree.text_at(&["kind"]).unwrap_or("").to_owned();
        let kind = match Kind::ALL.into_iter().find(|kind| kind.name() == kind_name) {
            Some(kind) if api_version == kind.api_version() => kind,
            Some(kind) => match (inherited, api_version.is_empty()) {
                (Some(_), true) => kind,
                _ => {
                    // Not ours to read: knative and others have a Service too. A wrong version of our kind is a mistake.
                    let ours = kind.api_version().split_once('/').map_or("", |(group, _)| group);
                    let group = api_version.split_once('/').map_or("", |(group, _)| group);
                    if group == ours || api_version.is_empty() {
                        let message =
                            format!("{api_version:?} is not read for kind {kind_name}; write {}", kind.api_version());
                        return self.broken(place.problem(true, "apiVersion", message));
                    }
                    self.skipped.push((format!("{api_version} {kind_name}"), place));
                    return;
                }
            },
            None if kind_name.is_empty() => match inherited {
                Some(kind) => kind,
                None => return self.broken(place.problem(true, "kind", "is missing")),
            },
            None if kind_name.ends_with("List") && tree.get("items").is_some() => {
                return self.add_list(tree, &place, &kind_name);
            }
            None if kind_name == "List" => return,
            None => {
                let name = if api_version.is_empty() { kind_name } else { format!("{api_version} {kind_name}") };
                self.skipped.push((name, place));
                return;
            }
        };
        self.decode(kind, tree, place);
    }

    fn add_list(&mut self, tree: Yaml, place: &Place, kind_name: &str) {
        let item_kind = Kind::ALL.into_iter().find(|kind| kind_name.strip_suffix("List") == Some(kind.name()));
        if item_kind.is_none() && kind_name != "List" {
            self.skipped.push((kind_name.to_owned(), place.clone()));
            return;
        }
        let Content::Map(entries) = tree.content else { return };
        for (key, value) in entries {
            match (key.as_str(), value.content) {
                ("items", Content::Seq(items)) => {
                    for (index, item) in items.into_iter().enumerate() {
                        self.add(item, &Place { item: Some(index + 1), ..place.clone() }, item_kind);
                    }
                }
                ("items", Content::Null) => {}
                ("items", _) => self.broken(place.at_line(value.line).problem(true, "items", "is not a list")),
                _ => {}
            }
        }
    }

    fn decode(&mut self, kind: Kind, mut tree: Yaml, place: Place) {
        let name = tree.text_at(&["metadata", "name"]).unwrap_or("").to_owned();
        let namespace = if kind.namespaced() {
            tree.text_at(&["metadata", "namespace"]).filter(|n| !n.is_empty()).unwrap_or("default").to_owned()
        } else {
            String::new()
        };
        if name.is_empty() {
            let message = "is missing; write a name for the object".to_owned();
            return self.broken(place.at_line(tree.line_of("metadata")).problem(true, "metadata.name", message));
        }
        // Items of typed lists carry neither; the decoder takes them as given.
        if let Content::Map(entries) = &mut tree.content {
            entries.retain(|(key, _)| key != "apiVersion" && key != "kind");
        }
        let json = tree.clone().into_json();
        let mut problems = Vec::new();
        let object = match kind {
            Kind::Service => decode(json, &tree, &place, &mut problems).map(|o| Object::Service(Box::new(o))),
            Kind::EndpointSlice => {
                decode(json, &tree, &place, &mut problems).map(|o| Object::EndpointSlice(Box::new(o)))
            }
            Kind::Node => decode(json, &tree, &place, &mut problems).map(|o| Object::Node(Box::new(o))),
            Kind::ServiceCidr => decode(json, &tree, &place, &mut problems).map(|o| Object::ServiceCidr(Box::new(o))),
        };
        let label = if kind.namespaced() {
            format!("{} {namespace}/{name}", kind.name())
        } else {
            format!("{} {name}", kind.name())
        };
        for problem in &mut problems {
            problem.location = format!("{}, {label}", problem.location);
        }
        self.objects.push(Parsed { kind, namespace, name, place, tree, object, problems });
    }
}

/// Decodes an object; a wrong type is an error with its field path, an unknown field a warning.
fn decode<K: DeserializeOwned>(
    json: serde_json::Value,
    tree: &Yaml,
    place: &Place,
    problems: &mut Vec<Problem>,
) -> Option<K> {
    let mut track = serde_path_to_error::Track::new();
    let deserializer = serde_path_to_error::Deserializer::new(json, &mut track);
    let mut unknown = Vec::new();
    let result: Result<K, _> = serde_ignored::deserialize(deserializer, |path| unknown.push(field_path(&path)));
    for field in unknown {
        let message = match super::fields::nearest(field.rsplit(['.', ']']).next().unwrap_or("")) {
            Some(known) => format!("unknown field is ignored; did you mean {known}?"),
            None => "unknown field is ignored".to_owned(),
        };
        problems.push(place.at_line(tree.line_of(&field)).problem(false, field, message));
    }
    match result {
        Ok(object) => Some(object),
        Err(error) => {
            let field = track.path().to_string();
            let line = tree.line_of(&field);
            problems.push(place.at_line(line).problem(true, field, format!("{error}; the object is not served")));
            None
        }
    }
}

/// `spec.ports[0].port`, as the API server writes paths.
fn field_path(path: &serde_ignored::Path<'_>) -> String {
    use serde_ignored::Path;
    match path {
        Path::Root => String::new(),
        Path::Seq { parent, index } => format!("{}[{index}]", field_path(parent)),
        Path::Map { parent, key } => {
            let parent = field_path(parent);
            if parent.is_empty() { key.clone() } else { format!("{parent}.{key}") }
        }
        Path::Some { parent } | Path::NewtypeStruct { parent } | Path::NewtypeVariant { parent } => field_path(parent),
    }
}
