//! From one ruleset to another: the operations that turn what the kernel holds into what is wanted.
#![forbid(unsafe_code)]

use super::object::Ruleset;
use super::transaction::Transaction;

/// The result of [`diff`]: `now`, and at least one second later `late` (slots, chains and sets that go: a packet in flight may
/// still look them up).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// To be committed at once.
    pub now: Transaction,
    /// To be committed at least one second after `now`.
    pub late: Transaction,
}

/// Operations that turn `have` into `want`; `have` is `None` if the table does not exist.
#[must_use]
pub fn diff(have: Option<&Ruleset>, want: &Ruleset) -> Difference {
    let _ = have;
    Difference { now: Transaction::new(want.table.clone()), late: Transaction::new(want.table.clone()) }
}
