//! Tandem's table of one family as the `nft` tool shows it, and what to tell the tool to change it: for an outsider who
//! breaks it.

use crate::netns::Netns;
use anyhow::{Context, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;

/// A table in a kernel.
#[derive(Clone, Debug)]
pub struct LiveTable {
    /// `ip` or `ip6`, as the tool calls it.
    pub family: &'static str,
    objects: Vec<Value>,
}

/// A rule of a [`LiveTable`].
#[derive(Clone, Copy, Debug)]
pub struct LiveRule<'a> {
    /// Chain it is in.
    pub chain: &'a str,
    /// Number by which it is deleted.
    pub handle: u64,
    /// Its expressions.
    pub expr: &'a Value,
}

impl LiveRule<'_> {
    /// Whether an expression of this kind is in it.
    #[must_use]
    pub fn has(&self, expression: &str) -> bool {
        self.expr.as_array().is_some_and(|all| all.iter().any(|e| e.get(expression).is_some()))
    }

    /// Whether its text has `part`: for names of sets.
    #[must_use]
    pub fn mentions(&self, part: &str) -> bool {
        self.expr.to_string().contains(part)
    }
}

/// An element of a map, in the words of the tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveElement {
    /// Parts of the key.
    pub key: Vec<String>,
    /// What it leads to.
    pub data: String,
}

impl LiveTable {
    /// Reads the table `tandem` of `family` in the namespace.
    ///
    /// # Errors
    /// There is none.
    pub fn read(node: &Netns, family: &'static str) -> Result<Self> {
        let text = node.output(&["nft", "-j", "list", "table", family, "tandem"])?;
        let mut all: Value = serde_json::from_str(&text).context("what nft -j says")?;
        let objects = all["nftables"].as_array_mut().map(std::mem::take).context("nft -j lists no objects")?;
        Ok(Self { family, objects })
    }

    /// All rules.
    pub fn rules(&self) -> impl Iterator<Item = LiveRule<'_>> {
        self.objects.iter().filter_map(|object| {
            let rule = object.get("rule")?;
            Some(LiveRule { chain: rule["chain"].as_str()?, handle: rule["handle"].as_u64()?, expr: rule.get("expr")? })
        })
    }

    /// The names of its sets (not maps).
    pub fn sets(&self) -> impl Iterator<Item = &str> {
        self.objects.iter().filter_map(|object| object.get("set")?["name"].as_str())
    }

    /// The elements of a map; nothing if there is no such map.
    #[must_use]
    pub fn map(&self, name: &str) -> Vec<LiveElement> {
        let map = self.objects.iter().filter_map(|o| o.get("map")).find(|map| map["name"] == name);
        let elements = map.and_then(|map| map["elem"].as_array()).map(Vec::as_slice).unwrap_or_default();
        elements
            .iter()
            .filter_map(|pair| {
                let key = pair.get(0)?;
                let key = key.pointer("/elem/val").unwrap_or(key);
                Some(LiveElement { key: parts(key), data: data(pair.get(1)?) })
            })
            .collect()
    }

    /// Number of elements of a set.
    #[must_use]
    pub fn set_len(&self, name: &str) -> usize {
        let set = self.objects.iter().filter_map(|o| o.get("set")).find(|set| set["name"] == name);
        set.and_then(|set| set["elem"].as_array()).map_or(0, Vec::len)
    }

    /// Its contents without handles, counters and the clients that affinity remembers: equal for equal tables.
    #[must_use]
    pub fn essence(&self) -> Vec<String> {
        let mut lines: Vec<String> = Vec::new();
        let mut places: BTreeMap<String, usize> = BTreeMap::new();
        for object in &self.objects {
            let Some((kind, value)) = object.as_object().and_then(|o| o.iter().next()) else { continue };
            let mut value = value.clone();
            let name = value["name"].as_str().unwrap_or_default().to_string();
            if let Some(fields) = value.as_object_mut() {
                fields.remove("handle");
                if let Some(Value::Array(elements)) = fields.remove("elem")
                    && !name.starts_with("affinity-")
                {
                    lines.extend(elements.iter().map(|e| format!("{kind} {name} {e}")));
                }
            }
            // The place of a rule in its chain stays visible in the sorted lines.
            let place = places.entry(format!("{kind} {}", value["chain"])).or_default();
            *place += 1;
            lines.push(format!("{kind} {} #{place} {value}", value["chain"]));
        }
        lines.sort_unstable();
        lines
    }

    /// Deletes a rule.
    #[must_use]
    pub fn delete_rule(&self, rule: LiveRule) -> String {
        format!("delete rule {} tandem {} handle {}", self.family, rule.chain, rule.handle)
    }

    /// Removes all elements of a set.
    #[must_use]
    pub fn flush_set(&self, set: &str) -> String {
        format!("flush set {} tandem {set}", self.family)
    }

    /// Removes all elements of a map.
    #[must_use]
    pub fn flush_map(&self, map: &str) -> String {
        format!("flush map {} tandem {map}", self.family)
    }

    /// Removes all rules of a chain.
    #[must_use]
    pub fn flush_chain(&self, chain: &str) -> String {
        format!("flush chain {} tandem {chain}", self.family)
    }

    /// Lets an element of a map lead elsewhere, or nowhere.
    #[must_use]
    pub fn point(&self, map: &str, element: &LiveElement, data: Option<&str>) -> String {
        let (family, key) = (self.family, element.key.join(" . "));
        let mut command = format!("delete element {family} tandem {map} {{ {key} }}");
        if let Some(data) = data {
            let _ = write!(command, "\nadd element {family} tandem {map} {{ {key} : {data} }}");
        }
        command
    }
}

fn parts(key: &Value) -> Vec<String> {
    match key.get("concat") {
        Some(Value::Array(parts)) => parts.iter().map(word).collect(),
        _ => vec![word(key)],
    }
}

fn word(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn data(value: &Value) -> String {
    for verdict in ["goto", "jump"] {
        if let Some(target) = value.pointer(&format!("/{verdict}/target")).and_then(Value::as_str) {
            return format!("{verdict} {target}");
        }
    }
    if value.get("drop").is_some() {
        return "drop".into();
    }
    parts(value).join(" . ")
}
