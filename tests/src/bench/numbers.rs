//! Quantiles of a sample, and the spread of several samples.

use serde::Serialize;
use std::fmt;

/// The value below which the share `q` (0 to 1) of the ascending `sorted` lies: nearest rank.
///
/// # Panics
/// If there are no values.
#[must_use]
pub fn quantile(sorted: &[u64], q: f64) -> f64 {
    assert!(!sorted.is_empty(), "a quantile of nothing");
    #[allow(clippy::cast_precision_loss, reason = "times in ns and counts are far below 2^52")]
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "q is 0 to 1")]
    let rank = ((sorted.len() as f64 * q).ceil() as usize).clamp(1, sorted.len());
    #[allow(clippy::cast_precision_loss, reason = "times in ns are far below 2^52")]
    let value = sorted[rank - 1] as f64;
    value
}

/// The median of several samples, with the smallest and the largest.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// The middle one; of an even number, the mean of the two in the middle.
    pub median: f64,
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// Of these values.
    ///
    /// # Panics
    /// If there are none.
    #[must_use]
    pub fn of(values: &[f64]) -> Self {
        assert!(!values.is_empty(), "the spread of nothing");
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { f64::midpoint(sorted[middle - 1], sorted[middle]) };
        Self { median, min: sorted[0], max: sorted[sorted.len() - 1] }
    }
}

/// `median (min–max)`, with the formatter's precision (default 1).
impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let p = f.precision().unwrap_or(1);
        write!(f, "{:.p$} ({:.p$}–{:.p$})", self.median, self.min, self.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_of_the_sample() {
        let hundred: Vec<u64> = (1..=100).collect();
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|q| quantile(&hundred, q)), [1.0, 50.0, 99.0, 100.0]);
        assert_eq!(quantile(&[7], 0.99), 7.0);
    }

    #[test]
    fn the_spread_does_not_depend_on_order() {
        let spread = Spread { median: 2.0, min: 1.0, max: 9.0 };
        assert_eq!(Spread::of(&[9.0, 1.0, 2.0]), spread);
        assert_eq!(Spread::of(&[1.0, 2.0, 3.0, 9.0]).median, 2.5);
        assert_eq!(format!("{spread} {spread:.2}"), "2.0 (1.0–9.0) 2.00 (1.00–9.00)");
    }
}
