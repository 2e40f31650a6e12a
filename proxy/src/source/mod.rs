//! Where objects come from: the API server ([`kube`]), or a directory of manifests ([`manifest`]).
//!
//! Both end in [`convert`], which turns API objects into `model` objects, and both tell the agent the same way: a stream of
//! [`SourceEvent`]s. Input that cannot be used becomes a [`Problem`] that names the place; everything else goes on.
#![forbid(unsafe_code)]

pub mod address;
pub mod convert;
pub mod kube;
pub mod manifest;

use crate::model::Delta;
use std::fmt;

/// What a source tells the agent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceEvent {
    /// Changes; the first ones after start come before `Synced`.
    Deltas(Vec<Delta>),
    /// The first complete picture (all Services and all slices) has been delivered. Nothing is programmed before.
    Synced,
    /// Something is wrong with an object, a file or the connection; all others go on.
    Problem(Problem),
}

/// A problem with an input: where it is, and what to do, in words for an operator.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Problem {
    /// Error (the object is not served) or warning.
    pub error: bool,
    /// File and document, or API object (`Service default/web`).
    pub location: String,
    /// Field path, for instance `spec.ports[0].port`; empty if the whole object is meant.
    pub field: String,
    /// What is wrong and what to do.
    pub message: String,
}

/// `error: LOCATION: FIELD: MESSAGE`
impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", if self.error { "error" } else { "warning" }, self.text())
    }
}

impl Problem {
    /// `LOCATION: FIELD: MESSAGE`, for a log, whose level says the rest.
    #[must_use]
    pub fn text(&self) -> String {
        let field = if self.field.is_empty() { String::new() } else { format!("{}: ", Visible(&self.field)) };
        format!("{}: {field}{}", Visible(&self.location), Visible(&self.message))
    }
}

/// Text from outside as one line that shows what it is: control characters and those that change the direction of writing are
/// escaped, so that a name cannot forge a log line or hide what follows.
struct Visible<'a>(&'a str);

impl fmt::Display for Visible<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.chars() {
            match c {
                '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                    write!(f, "{}", c.escape_unicode())?
                }
                c if c.is_control() => write!(f, "{}", c.escape_default())?,
                c => write!(f, "{c}")?,
            }
        }
        Ok(())
    }
}

/// Collects the problems of one object. The location is written only when there is one, since most objects are fine.
pub(crate) struct Report<'a> {
    kind: &'static str,
    namespace: Option<&'a str>,
    name: &'a str,
    problems: Vec<Problem>,
}

impl<'a> Report<'a> {
    pub(crate) fn new(kind: &'static str, namespace: Option<&'a str>, name: &'a str) -> Self {
        Self { kind, namespace, name, problems: Vec::new() }
    }

    /// The object cannot be served.
    pub(crate) fn error(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.push(true, field.into(), message.into());
    }

    /// A part of the object is left out, or is probably not what its author meant.
    pub(crate) fn warn(&mut self, field: impl Into<String>, message: impl Into<String>) {
        self.push(false, field.into(), message.into());
    }

    pub(crate) fn has_errors(&self) -> bool {
        self.problems.iter().any(|p| p.error)
    }

    pub(crate) fn into_problems(self) -> Vec<Problem> {
        self.problems
    }

    fn push(&mut self, error: bool, field: String, message: String) {
        let location = match self.namespace {
            Some(namespace) => format!("{} {namespace}/{}", self.kind, self.name),
            None => format!("{} {}", self.kind, self.name),
        };
        self.problems.push(Problem { error, location, field, message });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_outside_cannot_forge_a_line() {
        let problem = Problem {
            error: true,
            location: "a.yaml\nERROR fine".into(),
            field: "spec\u{1b}[2J".into(),
            message: "näme \u{202e}x".into(),
        };
        assert_eq!(problem.to_string(), "error: a.yaml\\nERROR fine: spec\\u{1b}[2J: näme \\u{202e}x");
    }
}
