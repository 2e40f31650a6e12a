//! Where objects come from: the API server, or a directory of manifests.

use crate::model::Delta;

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
