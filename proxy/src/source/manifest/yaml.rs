//! A YAML or JSON document as a tree whose nodes know their line, so that every message can name the place.

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use serde_saphyr::Spanned;
use std::fmt;

/// A value and the line on which it begins (1-based, 0 = unknown).
#[derive(Clone, Debug)]
pub(crate) struct Yaml {
    pub line: usize,
    pub content: Content,
}

#[derive(Clone, Debug)]
pub(crate) enum Content {
    Null,
    Bool(bool),
    Number(serde_json::Number),
    String(String),
    Seq(Vec<Yaml>),
    Map(Vec<(String, Yaml)>),
}

impl Yaml {
    /// The value of `key`, if this is a map that has it.
    pub(crate) fn get(&self, key: &str) -> Option<&Yaml> {
        match &self.content {
            Content::Map(entries) => entries.iter().find(|(name, _)| name == key).map(|(_, value)| value),
            _ => None,
        }
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        match &self.content {
            Content::String(text) => Some(text),
            _ => None,
        }
    }

    /// The text at `key.key`.
    pub(crate) fn text_at(&self, keys: &[&str]) -> Option<&str> {
        keys.iter().try_fold(self, |node, key| node.get(key))?.as_str()
    }

    pub(crate) fn is_null(&self) -> bool {
        matches!(self.content, Content::Null)
    }

    /// The line of the field that `path` (`spec.ports[0].port`) names, or of its nearest parent that exists.
    pub(crate) fn line_of(&self, path: &str) -> usize {
        let (mut node, mut line) = (self, self.line);
        let mut rest = path;
        while !rest.is_empty() {
            let next = if let Some(after) = rest.strip_prefix('[') {
                let Some((index, after)) = after.split_once(']') else { break };
                rest = after.strip_prefix('.').unwrap_or(after);
                match (&node.content, index.parse::<usize>()) {
                    (Content::Seq(items), Ok(index)) => items.get(index),
                    _ => None,
                }
            } else {
                let end = rest.find(['.', '[']).unwrap_or(rest.len());
                let (key, after) = rest.split_at(end);
                rest = after.strip_prefix('.').unwrap_or(after);
                node.get(key)
            };
            let Some(next) = next else { break };
            node = next;
            if node.line != 0 {
                line = node.line;
            }
        }
        line
    }

    /// The same tree without lines, for typed decoding.
    pub(crate) fn into_json(self) -> Value {
        match self.content {
            Content::Null => Value::Null,
            Content::Bool(value) => Value::Bool(value),
            Content::Number(value) => Value::Number(value),
            Content::String(value) => Value::String(value),
            Content::Seq(items) => Value::Array(items.into_iter().map(Yaml::into_json).collect()),
            Content::Map(entries) => Value::Object(entries.into_iter().map(|(k, v)| (k, v.into_json())).collect()),
        }
    }
}

impl<'de> Deserialize<'de> for Yaml {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // serde-saphyr fills in the place; other formats (JSON) leave it unknown.
        let spanned = Spanned::<Content>::deserialize(deserializer)?;
        let line = usize::try_from(spanned.referenced.line()).unwrap_or(0);
        Ok(Self { line, content: spanned.value })
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ContentVisitor)
    }
}

struct ContentVisitor;

impl<'de> Visitor<'de> for ContentVisitor {
    type Value = Content;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Content, E> {
        Ok(Content::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Content, E> {
        Ok(Content::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Content, E> {
        Ok(Content::Number(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Content, E> {
        serde_json::Number::from_f64(value).map(Content::Number).ok_or_else(|| E::custom("number is not finite"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Content, E> {
        Ok(Content::String(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Content, E> {
        Ok(Content::String(value))
    }

    fn visit_unit<E>(self) -> Result<Content, E> {
        Ok(Content::Null)
    }

    fn visit_none<E>(self) -> Result<Content, E> {
        Ok(Content::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Content, D::Error> {
        Content::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Content, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element()? {
            items.push(item);
        }
        Ok(Content::Seq(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Content, A::Error> {
        let mut entries: Vec<(String, Yaml)> = Vec::new();
        while let Some((key, value)) = map.next_entry::<String, Yaml>()? {
            entries.push((key, value));
        }
        Ok(Content::Map(entries))
    }
}

/// One document of a file, or why it cannot be read.
#[derive(Debug)]
pub(crate) struct Document {
    /// 1-based, empty documents not counted.
    pub number: usize,
    /// The tree, or line (0 = unknown) and message.
    pub tree: Result<Yaml, (usize, String)>,
}

/// Splits and parses the documents of a file. A broken document does not hide the others.
pub(crate) fn parse_documents(file: &str, text: &str) -> Vec<Document> {
    if file.ends_with(".json") { parse_json(text) } else { parse_yaml(text) }
}

fn parse_json(text: &str) -> Vec<Document> {
    let mut documents = Vec::new();
    for (index, tree) in serde_json::Deserializer::from_str(text).into_iter::<Yaml>().enumerate() {
        let tree = tree.map_err(|error| (error.line(), error.to_string()));
        documents.push(Document { number: index + 1, tree });
    }
    documents
}

fn parse_yaml(text: &str) -> Vec<Document> {
    let mut documents: Vec<Document> = Vec::new();
    for (first_line, chunk) in split_yaml(text) {
        let number = documents.len() + 1;
        match serde_saphyr::from_str_with_options::<Yaml>(chunk, yaml_options()) {
            Ok(tree) if tree.is_null() => {}
            Ok(mut tree) => {
                shift_lines(&mut tree, first_line);
                documents.push(Document { number, tree: Ok(tree) });
            }
            Err(error) => {
                let location = error.location();
                let line = location.and_then(|l| usize::try_from(l.line()).ok()).filter(|line| *line != 0);
                // The text of the error repeats its place relative to the chunk; the true line is told apart.
                let message = plain_message(&error);
                documents.push(Document {
                    number,
                    tree: Err((line.map_or(first_line + 1, |line| line + first_line), message)),
                });
            }
        }
    }
    documents
}

/// The chunks between document markers, each with the number of lines before it. YAML 1.2 §9.1.2: `---` at the start of a
/// line ends a document wherever it stands, even inside a block scalar, so lines are enough.
fn split_yaml(text: &str) -> Vec<(usize, &str)> {
    let mut chunks = Vec::new();
    let (mut start, mut start_line, mut offset) = (0, 0, 0);
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let marker =
            line.strip_prefix("---").is_some_and(|rest| rest.is_empty() || rest.starts_with([' ', '\t', '\r', '\n']));
        if marker && offset != start {
            chunks.push((start_line, &text[start..offset]));
            (start, start_line) = (offset, number);
        }
        offset += line.len();
    }
    chunks.push((start_line, &text[start..]));
    // Chunks of comments and directives only are no documents, and directives alone would be a syntax error.
    chunks.retain(|(_, chunk)| {
        chunk.lines().any(|line| {
            let line = line.trim_start_matches('\u{feff}').trim();
            !(line.is_empty() || line.starts_with('#') || line.starts_with('%') || line == "---" || line == "...")
        })
    });
    chunks
}

fn shift_lines(node: &mut Yaml, by: usize) {
    if node.line != 0 {
        node.line += by;
    }
    match &mut node.content {
        Content::Seq(items) => items.iter_mut().for_each(|item| shift_lines(item, by)),
        Content::Map(entries) => entries.iter_mut().for_each(|(_, value)| shift_lines(value, by)),
        _ => {}
    }
}

/// Limits for files that hold a whole cluster; the defaults of the crate are for configuration files. Aliases stay limited,
/// since they are what makes a small file explode.
fn yaml_options() -> serde_saphyr::Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_events: 100_000_000,
            max_nodes: 50_000_000,
            max_total_scalar_bytes: 1 << 30,
        },
        with_snippet: false,
    }
}

fn plain_message(error: &serde_saphyr::Error) -> String {
    let text = error.without_snippet().to_string();
    let first = text.lines().next().unwrap_or("").trim().trim_end_matches(':');
    // "… at line 3, column 5" repeats what the location says.
    first.split(" at line ").next().unwrap_or(first).trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_node_knows_its_line_across_documents() {
        let text = "# head\n---\na:\n  b: 1\n  c:\n  - x\n  - y: 2\n---\n---\nd: true\n";
        let documents = parse_documents("x.yaml", text);
        assert_eq!(documents.len(), 2);
        let first = documents[0].tree.as_ref().unwrap();
        assert_eq!(first.line_of("a.b"), 4);
        assert_eq!(first.line_of("a.c[1].y"), 7);
        assert_eq!(first.line_of("a.c[1].missing"), 7);
        assert_eq!(first.line_of("a.c[9]"), 6);
        let second = documents[1].tree.as_ref().unwrap();
        assert_eq!(documents[1].number, 2);
        assert_eq!(second.line_of("d"), 10);
    }

    #[test]
    fn a_broken_document_leaves_the_others() {
        let documents = parse_documents("x.yaml", "a: 1\n---\nb: [1, 2\nc: : d\n---\ne: 2\n");
        assert_eq!(documents.len(), 3);
        assert!(documents[0].tree.is_ok());
        let (line, message) = documents[1].tree.as_ref().unwrap_err();
        assert!((3..=5).contains(line), "line {line}: {message}");
        assert!(!message.is_empty());
        assert!(documents[2].tree.is_ok());
    }

    #[test]
    fn json_files_may_hold_several_documents_and_tabs() {
        let documents = parse_documents("x.json", "{\n\t\"a\": [1]\n}\n{\"b\": null}\n");
        assert_eq!(documents.len(), 2);
        assert!(documents.iter().all(|d| d.tree.is_ok()));
        let broken = parse_documents("x.json", "{\"a\": 1}\n{\"b\": }\n");
        assert_eq!(broken[1].tree.as_ref().unwrap_err().0, 2);
    }

    #[test]
    fn markers_inside_text_and_windows_line_ends_are_handled() {
        let documents = parse_documents("x.yaml", "a: |\n  ---\n  x\r\n---\r\nb: 1\r\n");
        assert_eq!(documents.len(), 2, "{documents:?}");
        assert!(parse_documents("x.yaml", "\n# nothing\n---\n").is_empty());
        assert!(parse_documents("x.yaml", "").is_empty());
    }
}
