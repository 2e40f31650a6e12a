//! All files together: which object counts, which clash, and what changed since the last look.

use super::FileText;
use super::document::{Place, parse_file};
use super::object::{Entry, Key, Meaning, entry};
use crate::model::{Delta, Node, ObjectName, Protocol, Service};
use crate::source::Problem;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

/// A parsed file, kept so that an unchanged file is not parsed again.
struct FileState {
    text: Result<[u8; 32], String>,
    entries: Vec<Entry>,
    skipped: Vec<(String, Place)>,
    problems: Vec<Problem>,
    incomplete: bool,
}

struct Served {
    file: Arc<str>,
    place: Place,
    meaning: Arc<Meaning>,
}

/// What the manifests say now. Files are given to [`Picture::update`] as text: no IO here.
pub(crate) struct Picture {
    /// The Node object that is ours.
    node_name: String,
    /// Facts of the machine, for what no Node object says.
    machine: Node,
    files: BTreeMap<Arc<str>, FileState>,
    served: BTreeMap<Key, Served>,
    node: Option<Node>,
}

/// What an update brought.
pub(crate) struct Update {
    /// The difference to the picture before.
    pub deltas: Vec<Delta>,
    /// Everything that is wrong now, whether it was told before or not; without duplicates, sorted by file.
    pub problems: Vec<Problem>,
}

impl Picture {
    pub(crate) fn new(node_name: &str, machine: Node) -> Self {
        Self { node_name: node_name.to_owned(), machine, files: BTreeMap::new(), served: BTreeMap::new(), node: None }
    }

    /// Keys of the objects that count now.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &Key> {
        self.served.keys()
    }

    /// Whether nothing was ever loaded.
    pub(crate) fn is_empty(&self) -> bool {
        self.node.is_none()
    }

    /// Takes the texts of all files, and says what changed.
    pub(crate) fn update(&mut self, files: Vec<FileText>) -> Update {
        self.parse(files);
        let mut problems: Vec<Problem> = self.files.values().flat_map(|file| file.problems.iter().cloned()).collect();
        self.skipped_kinds(&mut problems);
        let served = self.choose(&mut problems);
        let mut deltas = difference(&self.served, &served);
        self.served = served;
        self.advise(&mut problems);
        if let Some(node) = self.own_node(&mut problems) {
            deltas.insert(0, Delta::Node(node));
        }
        problems.sort_by_cached_key(|p| (!p.error, natural(&p.location), natural(&p.field)));
        problems.dedup();
        Update { deltas, problems }
    }

    fn parse(&mut self, files: Vec<FileText>) {
        let mut before = std::mem::take(&mut self.files);
        for FileText { name, text } in files {
            let digest = text.as_ref().map(|text| digest(text)).map_err(Clone::clone);
            let state = match before.remove(name.as_str()) {
                Some(state) if state.text == digest => state,
                _ => parse_state(&name, &text, digest),
            };
            self.files.insert(name.into(), state);
        }
    }

    /// Chooses the version of each object that counts. An object that is invalid, that clashes with another, or that may be
    /// in a document that cannot be read, keeps its last good version.
    fn choose(&self, problems: &mut Vec<Problem>) -> BTreeMap<Key, Served> {
        let mut first: BTreeMap<&Key, &Entry> = BTreeMap::new();
        for entry in self.files.values().flat_map(|file| &file.entries) {
            if let Some(other) = first.get(&entry.key) {
                let message = format!("is also defined at {}; this second definition is not used", other.place);
                problems.push(at(&entry.place, &entry.key, "metadata.name", message));
            } else {
                first.insert(&entry.key, entry);
            }
        }
        let (mut unchanged, mut changed, mut refused) = (Vec::new(), Vec::new(), Vec::new());
        for entry in
            self.files.values().flat_map(|file| &file.entries).filter(|entry| std::ptr::eq(first[&entry.key], *entry))
        {
            match &entry.meaning {
                None => refused.push(&entry.key),
                Some(meaning) if self.served.get(&entry.key).is_some_and(|old| old.meaning == *meaning) => {
                    unchanged.push((entry, meaning));
                }
                Some(meaning) => changed.push((entry, meaning)),
            }
        }
        let mut claims = Claims::default();
        let mut served = BTreeMap::new();
        // Who is served already goes first: a newcomer cannot take its address or port.
        for (entry, meaning) in unchanged.into_iter().chain(changed) {
            match claims.take(&entry.key, &entry.place, meaning) {
                Ok(()) => {
                    let version = Served {
                        file: Arc::clone(&entry.place.file),
                        place: entry.place.clone(),
                        meaning: Arc::clone(meaning),
                    };
                    served.insert(entry.key.clone(), version);
                }
                Err(clashes) => {
                    for (field, message) in clashes {
                        problems.push(at(&entry.place, &entry.key, &field, message));
                    }
                    refused.push(&entry.key);
                }
            }
        }
        let lost = self.served.iter().filter(|(key, old)| {
            !first.contains_key(key) && self.files.get(&old.file).is_some_and(|file| file.incomplete)
        });
        for key in refused.into_iter().chain(lost.map(|(key, _)| key)) {
            if let Some(old) = self.served.get(key)
                && claims.take(key, &old.place, &old.meaning).is_ok()
            {
                let version =
                    Served { file: Arc::clone(&old.file), place: old.place.clone(), meaning: Arc::clone(&old.meaning) };
                served.insert(key.clone(), version);
            }
        }
        served
    }

    fn skipped_kinds(&self, problems: &mut Vec<Problem>) {
        let mut kinds: BTreeMap<&str, (&Place, usize)> = BTreeMap::new();
        for (kind, place) in self.files.values().flat_map(|file| &file.skipped) {
            kinds.entry(kind).or_insert((place, 0)).1 += 1;
        }
        for (kind, (place, count)) in kinds {
            let hint = if kind.ends_with(" Endpoints") { "; write EndpointSlices instead" } else { "" };
            let message = format!("objects of kind {kind} are not read ({count} skipped){hint}");
            problems.push(place.problem(false, "kind", message));
        }
    }

    /// The facts about our node if they changed.
    fn own_node(&mut self, problems: &mut Vec<Problem>) -> Option<Node> {
        let mut node = self.machine.clone();
        node.name = self.node_name.as_str().into();
        let key = Key::Node(Arc::clone(&node.name));
        let others = self.served.keys().filter(|key| matches!(key, Key::Node(_))).count();
        match self.served.get(&key).map(|served| &*served.meaning) {
            Some(Meaning::Node(ours)) => {
                let addresses = if ours.addresses.is_empty() { node.addresses } else { ours.addresses.clone() };
                node = Node { addresses, ..ours.clone() };
            }
            _ if others != 0 && !self.node_name.is_empty() => problems.push(Problem {
                error: false,
                location: format!("Node {}", self.node_name),
                field: "metadata.name".to_owned(),
                message: "no manifest has the Node object of this node, so its facts come from the machine; \
                          if one of the Nodes in the manifests is meant, name it with --hostname-override"
                    .to_owned(),
            }),
            _ => {}
        }
        (self.node.as_ref() != Some(&node)).then(|| {
            self.node = Some(node.clone());
            node
        })
    }

    /// Warnings about objects that are valid one by one, but do not fit together.
    fn advise(&self, problems: &mut Vec<Problem>) {
        let mut slices: BTreeMap<&ObjectName, Vec<(&Key, &Served)>> = BTreeMap::new();
        for (key, served) in &self.served {
            if let Meaning::Slice(slice) = &*served.meaning {
                slices.entry(&slice.service).or_default().push((key, served));
            }
        }
        for (key, served) in &self.served {
            let Meaning::Service(service) = &*served.meaning else { continue };
            let own = slices.get(&service.name).map(Vec::as_slice).unwrap_or_default();
            if let Some((field, message)) = unmatched(service, own) {
                problems.push(Problem { error: false, ..at(&served.place, key, &field, message) });
            }
        }
        for (service, own) in slices {
            if !self.served.contains_key(&Key::Service(service.clone())) {
                for (key, served) in own {
                    let message = format!("Service {service} is not in the manifests, so nothing leads to this slice");
                    problems.push(Problem { error: false, ..at(&served.place, key, "metadata.labels", message) });
                }
            }
        }
    }
}

/// Why no endpoint can be found for a Service or one of its ports.
fn unmatched(service: &Service, slices: &[(&Key, &Served)]) -> Option<(String, String)> {
    if slices.is_empty() {
        return service.has_selector.then(|| {
            let message = format!(
                "selects pods, but no EndpointSlice has the label kubernetes.io/service-name={}: without an API server nothing \
                 turns a selector into endpoints; write the EndpointSlices",
                service.name.name
            );
            ("spec.selector".to_owned(), message)
        });
    }
    let ports: BTreeSet<(&str, Protocol)> = slices
        .iter()
        .filter_map(|(_, served)| if let Meaning::Slice(slice) = &*served.meaning { Some(slice) } else { None })
        .flat_map(|slice| slice.ports.iter().map(|port| (&*port.name, port.protocol)))
        .collect();
    let missing = service.ports.iter().enumerate().find(|(_, port)| !ports.contains(&(&*port.name, port.protocol)));
    missing.map(|(index, port)| {
        let message = format!(
            "no EndpointSlice of the Service has a {} port with the name {:?}, so this port has no endpoints",
            port.protocol, port.name
        );
        (format!("spec.ports[{index}].name"), message)
    })
}

/// Addresses and ports that only one Service may have.
#[derive(Default)]
struct Claims {
    cluster_ips: HashMap<IpAddr, String>,
    node_ports: HashMap<(u16, Protocol), String>,
    health_ports: HashMap<u16, String>,
}

impl Claims {
    /// Takes everything that `meaning` claims, or nothing and says what clashes: field and message.
    fn take(&mut self, key: &Key, place: &Place, meaning: &Meaning) -> Result<(), Vec<(String, String)>> {
        let Meaning::Service(service) = meaning else { return Ok(()) };
        let mut clashes = Vec::new();
        for (index, ip) in service.cluster_ips.iter().enumerate() {
            if let Some(owner) = self.cluster_ips.get(ip) {
                clashes
                    .push((format!("spec.clusterIPs[{index}]"), format!("{ip} is already the ClusterIP of {owner}")));
            }
        }
        for (index, port) in service.ports.iter().enumerate().filter(|(_, port)| port.node_port != 0) {
            let field = format!("spec.ports[{index}].nodePort");
            if let Some(owner) = self.node_ports.get(&(port.node_port, port.protocol)) {
                clashes
                    .push((field, format!("{} {} is already the nodePort of {owner}", port.protocol, port.node_port)));
            } else if let Some(owner) = self.health_ports.get(&port.node_port) {
                clashes.push((field, format!("{} is already the healthCheckNodePort of {owner}", port.node_port)));
            }
        }
        let health = service.health_check_node_port;
        if health != 0 {
            let field = || "spec.healthCheckNodePort".to_owned();
            if let Some(owner) = self.health_ports.get(&health) {
                clashes.push((field(), format!("{health} is already the healthCheckNodePort of {owner}")));
            } else if let Some(owner) =
                Protocol::ALL.iter().find_map(|protocol| self.node_ports.get(&(health, *protocol)))
            {
                clashes.push((field(), format!("{health} is already the nodePort of {owner}")));
            }
        }
        if !clashes.is_empty() {
            return Err(clashes);
        }
        let owner = format!("{key} ({place})");
        self.cluster_ips.extend(service.cluster_ips.iter().map(|ip| (*ip, owner.clone())));
        let node_ports = service.ports.iter().filter(|port| port.node_port != 0);
        self.node_ports.extend(node_ports.map(|port| ((port.node_port, port.protocol), owner.clone())));
        if health != 0 {
            self.health_ports.insert(health, owner);
        }
        Ok(())
    }
}

fn at(place: &Place, key: &Key, field: &str, message: String) -> Problem {
    let mut problem = place.problem(true, field, message);
    problem.location = format!("{}, {key}", problem.location);
    problem
}

fn difference(before: &BTreeMap<Key, Served>, after: &BTreeMap<Key, Served>) -> Vec<Delta> {
    let mut deltas = Vec::new();
    for (key, old) in before {
        let gone = after.get(key).is_none_or(|new| *new.meaning == Meaning::Nothing);
        if gone && *old.meaning != Meaning::Nothing {
            deltas.extend(match key {
                Key::Service(name) => Some(Delta::ServiceGone(name.clone())),
                Key::Slice(name) => Some(Delta::SliceGone(name.clone())),
                Key::ServiceCidr(name) => Some(Delta::ServiceCidrGone(Arc::clone(name))),
                Key::Node(_) => None,
            });
        }
    }
    for (key, new) in after {
        if before.get(key).is_some_and(|old| old.meaning == new.meaning) {
            continue;
        }
        deltas.extend(match (&*new.meaning, key) {
            (Meaning::Service(service), _) => Some(Delta::Service(service.clone())),
            (Meaning::Slice(slice), _) => Some(Delta::Slice(slice.clone())),
            (Meaning::ServiceCidr(cidrs), Key::ServiceCidr(name)) => {
                Some(Delta::ServiceCidr(Arc::clone(name), cidrs.clone()))
            }
            _ => None,
        });
    }
    deltas
}

fn parse_state(name: &str, text: &Result<String, String>, digest: Result<[u8; 32], String>) -> FileState {
    match text {
        Ok(text) => {
            let parsed = parse_file(name, text);
            let mut problems = parsed.problems;
            let entries = parsed.objects.into_iter().map(|object| entry(object, &mut problems)).collect();
            FileState { text: digest, entries, skipped: parsed.skipped, problems, incomplete: parsed.incomplete }
        }
        Err(message) => {
            let problem =
                Problem { error: true, location: name.to_owned(), field: String::new(), message: message.clone() };
            FileState {
                text: digest,
                entries: Vec::new(),
                skipped: Vec::new(),
                problems: vec![problem],
                incomplete: true,
            }
        }
    }
}

/// A key that sorts numbers in a text by value: line 9 before line 16.
fn natural(text: &str) -> String {
    let mut key = String::with_capacity(text.len() + 16);
    let mut digits = String::new();
    for c in text.chars().chain(['\0']) {
        if c.is_ascii_digit() {
            digits.push(c);
            continue;
        }
        if !digits.is_empty() {
            key.push_str(&format!("{digits:0>10}"));
            digits.clear();
        }
        key.push(c);
    }
    key
}

fn digest(text: &str) -> [u8; 32] {
    use sha2::Digest;
    sha2::Sha256::digest(text.as_bytes()).into()
}
