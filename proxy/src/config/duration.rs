//! Durations as Go writes them: `30s`, `1m30s`, `1.5h`, `500ms`.

use std::time::Duration;

const UNITS: [(&str, f64); 8] =
    [("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("μs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];

/// Parses what Go's `time.ParseDuration` takes, negative values excepted: no setting here may be negative.
///
/// # Errors
/// A sentence that quotes the text.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no duration such as 30s, 1m30s or 500ms");
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(wrong());
    }
    let mut seconds = 0.0;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let number: f64 = rest[..digits].parse().map_err(|_| wrong())?;
        rest = &rest[digits..];
        let unit_len = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == &rest[..unit_len]).ok_or_else(wrong)?;
        seconds += number * factor;
        rest = &rest[unit_len..];
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| wrong())
}

/// The shortest text that [`parse_duration`] reads back, in seconds or milliseconds.
#[must_use]
pub fn format_duration(duration: Duration) -> String {
    if duration.subsec_nanos() == 0 {
        format!("{}s", duration.as_secs())
    } else {
        format!("{}ms", duration.as_secs_f64() * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn go_durations_are_read() {
        for (text, ms) in [("30s", 30_000), ("1m30s", 90_000), ("1.5h", 5_400_000), ("500ms", 500), ("0", 0), ("0s", 0)]
        {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
    }

    #[test]
    fn other_text_is_refused_and_quoted() {
        for text in ["", "30", "s", "1x", "-1s", "1m 30s", "1..5s"] {
            assert!(parse_duration(text).unwrap_err().contains(&format!("{text:?}")), "{text}");
        }
    }
}
