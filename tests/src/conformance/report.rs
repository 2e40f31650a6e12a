//! What a comparison says to people and to machines.

use crate::conformance::Coverage;
use crate::engine::Objects;
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

/// A probe or an open connection of which the two nodes made different things.
#[derive(Clone, Debug, Serialize)]
pub struct Difference {
    /// Number of the state in its round, from 1.
    pub state: usize,
    /// The probe.
    pub probe: String,
    /// What differs, in words.
    pub what: String,
    /// What the node of kube-proxy showed.
    pub reference: Vec<String>,
    /// What the other node showed.
    pub subject: Vec<String>,
    /// What the oracle says.
    pub expected: String,
    /// The objects that own the destination, as YAML.
    pub objects: String,
    /// Where rules, objects and logs were written.
    pub dump: Option<PathBuf>,
    /// The command that makes this round again.
    pub repeat: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "DIFFERENT in state {}: {}", self.state, self.probe)?;
        writeln!(f, "  {}", self.what)?;
        for (who, seen) in [("kube-proxy", &self.reference), ("subject", &self.subject)] {
            for (n, line) in seen.iter().enumerate() {
                writeln!(f, "  {:>10}  {line}", if n == 0 { who } else { "" })?;
            }
        }
        if !self.expected.is_empty() {
            writeln!(f, "  {:>10}  {}", "oracle", self.expected)?;
        }
        for line in self.objects.lines() {
            writeln!(f, "    {line}")?;
        }
        if let Some(dump) = &self.dump {
            writeln!(f, "  rules, objects and logs: {}", dump.display())?;
        }
        write!(f, "  again: {}", self.repeat)
    }
}

/// What came of one round.
#[derive(Clone, Debug, Default, Serialize)]
pub struct RoundReport {
    /// Seed of the run.
    pub seed: u64,
    /// Number of the round.
    pub round: u32,
    /// States that were compared.
    pub states: usize,
    /// Open connections that were compared over a change of state.
    pub flows: usize,
    /// Number of probes, and of those of each class, by what kube-proxy did.
    #[serde(serialize_with = "shown")]
    pub coverage: Coverage,
    /// Deliberate differences by name.
    pub deliberate: BTreeMap<String, usize>,
    /// How probes differed that did so at first and not when they were looked at again: a machine under load, or a bug that is
    /// hard to catch.
    pub passing: Vec<String>,
    /// Differences.
    pub differences: Vec<Difference>,
    /// Classes without a probe, and other reasons why the round proves too little.
    pub missing: Vec<String>,
    /// How long it took.
    pub seconds: f64,
}

impl RoundReport {
    /// Whether all is the same, and enough was compared.
    #[must_use]
    pub fn is_good(&self) -> bool {
        self.differences.is_empty() && self.missing.is_empty()
    }

    /// Adds `other` to the sums of `self`.
    pub fn add(&mut self, other: &Self) {
        self.states += other.states;
        self.flows += other.flows;
        self.passing.extend(other.passing.iter().cloned());
        self.seconds += other.seconds;
        self.coverage.add(&other.coverage);
        for (name, count) in &other.deliberate {
            *self.deliberate.entry(name.clone()).or_default() += count;
        }
        self.differences.extend(other.differences.iter().cloned());
        self.missing.extend(other.missing.iter().map(|m| format!("round {}: {m}", other.round)));
    }
}

fn shown<T: fmt::Display, S: serde::Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// One line for a round; differences follow on lines of their own.
impl fmt::Display for RoundReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = |map: &BTreeMap<String, usize>| {
            map.iter().map(|(name, n)| format!("{name} {n}")).collect::<Vec<_>>().join(", ")
        };
        write!(f, "{} states, {} flows, {}", self.states, self.flows, self.coverage)?;
        if !self.deliberate.is_empty() {
            write!(f, "; deliberate: {}", count(&self.deliberate))?;
        }
        if !self.passing.is_empty() {
            write!(f, "; {} gone at a second look", self.passing.len())?;
        }
        write!(f, "; {:.1} s: ", self.seconds)?;
        if self.differences.is_empty() {
            f.write_str("same")
        } else {
            write!(f, "{} DIFFERENT", self.differences.len())
        }?;
        self.missing.iter().try_for_each(|m| write!(f, "; {m}"))
    }
}

/// The Services that own `destination`, by address or NodePort, and their EndpointSlices, as YAML.
#[must_use]
pub fn owners(objects: &Objects, destination: SocketAddr) -> String {
    let mut found: Vec<&Value> = owning_services(objects, destination).collect();
    found.extend(owning_slices(objects, destination));
    if found.is_empty() {
        return format!("(no Service has {destination})");
    }
    found.iter().map(|o| yaml(o)).collect::<Vec<_>>().join("---\n")
}

/// The Services that own `destination`, by address or NodePort.
pub fn owning_services(objects: &Objects, destination: SocketAddr) -> impl Iterator<Item = &Value> {
    let address = destination.ip().to_string();
    objects.values().filter(move |object| {
        let ports = object["spec"]["ports"].as_array().map(Vec::as_slice).unwrap_or_default();
        let by_port = ports.iter().any(|p| p["nodePort"] == destination.port());
        object["kind"] == "Service" && (by_port || has_text(object, &address))
    })
}

/// The EndpointSlices of the Services that own `destination`.
pub fn owning_slices(objects: &Objects, destination: SocketAddr) -> impl Iterator<Item = &Value> {
    let name = |object: &Value, pointer: &str| {
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or("default").to_string();
        (namespace, object.pointer(pointer).and_then(Value::as_str).map(String::from))
    };
    let services: BTreeSet<_> = owning_services(objects, destination).map(|s| name(s, "/metadata/name")).collect();
    objects.values().filter(move |object| {
        object["kind"] == "EndpointSlice"
            && services.contains(&name(object, "/metadata/labels/kubernetes.io~1service-name"))
    })
}

/// An object as YAML, or as JSON (which is YAML) if that fails.
#[must_use]
pub fn yaml(object: &Value) -> String {
    serde_saphyr::to_string(object).unwrap_or_else(|_| format!("{object}\n"))
}

fn has_text(value: &Value, text: &str) -> bool {
    match value {
        Value::String(s) => s == text,
        Value::Array(all) => all.iter().any(|v| has_text(v, text)),
        Value::Object(all) => all.values().any(|v| has_text(v, text)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_owners_of_a_destination_are_found_by_address_and_by_node_port() {
        let mut objects = Objects::default();
        let service = |name: &str, ip: &str, node_port: u16| {
            json!({ "apiVersion": "v1", "kind": "Service", "metadata": { "namespace": "a", "name": name },
                "spec": { "clusterIP": ip, "ports": [{ "port": 80, "nodePort": node_port }] } })
        };
        let slice = |name: &str| {
            json!({ "kind": "EndpointSlice", "metadata": { "namespace": "a", "name": format!("{name}-x"),
                "labels": { "kubernetes.io/service-name": name } } })
        };
        for (n, name) in [(1, "one"), (2, "two")] {
            objects.put(service(name, &format!("172.30.0.{n}"), 30_000 + n));
            objects.put(slice(name));
        }
        let by_address = owners(&objects, "172.30.0.1:81".parse().unwrap());
        assert!(by_address.contains("one-x") && !by_address.contains("two"), "{by_address}");
        let by_port = owners(&objects, "192.168.0.2:30002".parse().unwrap());
        assert!(by_port.contains("two-x") && !by_port.contains("one"), "{by_port}");
        assert!(owners(&objects, "172.30.0.9:80".parse().unwrap()).starts_with("(no Service"));
    }
}
