//! Whether two observations of one probe show the same behaviour.
//!
//! An endpoint is chosen by chance for each connection, so an observation is a sample. That one side saw what the other did
//! not is a difference only when enough tries make it incredible that chance did it.

#![forbid(unsafe_code)]

use super::{Fate, Observation, Probe, Round, State};
use std::collections::BTreeSet;

/// A false alarm must be rarer than this.
const FALSE_ALARM: f64 = 1e-6;
/// Tries that confirm a difference between two outcomes of which none is left to chance.
const CONFIRMATION: usize = 3;

/// What the judge says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// No difference.
    Same,
    /// Not yet known: both sides need this many tries in all.
    NeedMore {
        /// Tries of each side, the ones made already included.
        tries: usize,
    },
    /// They differ, and this named difference is meant.
    Deliberate(&'static str),
    /// They differ; the text says how.
    Different(String),
}

/// Number of tries after which `n` equally likely endpoints were all seen, but for a probability of `error`.
///
/// A certain endpoint is missed in t tries with (1 − 1/n)^t ≤ e^(−t/n); some endpoint with at most n times that (the union
/// bound of the coupon collector's problem). So t = n · ln(n / error).
#[must_use]
pub fn tries_for(n: usize, error: f64) -> usize {
    if n <= 1 {
        return 1;
    }
    let n = u32::try_from(n).map_or(f64::from(u32::MAX), f64::from);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "positive, and small")]
    let tries = (n * (n / error).ln()).ceil() as usize;
    tries
}

/// Compares what two proxies made of `probe` in `state`.
#[must_use]
pub fn judge(round: &Round, state: &State, probe: &Probe, kube_proxy: &Observation, tandem: &Observation) -> Judgement {
    let _ = (round, state);
    let (left, right): (BTreeSet<&Fate>, BTreeSet<&Fate>) = (kube_proxy.fates().collect(), tandem.fates().collect());
    if left == right && !left.is_empty() {
        return Judgement::Same;
    }
    let needed = needed(&left, &right);
    if kube_proxy.tries().min(tandem.tries()) < needed {
        return Judgement::NeedMore { tries: needed };
    }
    Judgement::Different(format!(
        "{probe}: kube-proxy: {kube_proxy}; Tandem: {tandem}; the oracle expects {}",
        probe.expected
    ))
}

/// Tries of each side after which chance does not explain the difference.
fn needed(left: &BTreeSet<&Fate>, right: &BTreeSet<&Fate>) -> usize {
    let by_chance = |fates: &BTreeSet<&Fate>| fates.iter().filter(|f| matches!(f, Fate::Served { .. })).count();
    if by_chance(left) == 0 || by_chance(right) == 0 {
        return CONFIRMATION;
    }
    tries_for(left.union(right).count(), FALSE_ALARM)
}
