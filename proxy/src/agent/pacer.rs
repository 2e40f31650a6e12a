//! When the next sync may start. Pure: the time is an argument.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// Paces syncs as kube-proxy v1.37's runner does: at least `min` between the end of one run and the start of the next, requests in between
/// collapse into one, a failed run is repeated after `retry` at the latest, and without any request one run takes place every `max`.
///
/// Better than kube-proxy, the repeat after a failure comes early at first and then with doubled pauses, up to `retry`.
#[derive(Clone, Debug)]
pub struct Pacer {
    min: Duration,
    retry: Duration,
    max: Duration,
    requested: bool,
    ended: Option<Instant>,
    failures: u32,
}

/// First pause after a failed sync, if `min` is not longer.
const FIRST_RETRY: Duration = Duration::from_millis(100);

impl Pacer {
    /// No run has taken place and none is requested.
    #[must_use]
    pub fn new(min: Duration, retry: Duration, max: Duration) -> Self {
        Self { min, retry: retry.min(max), max, requested: false, ended: None, failures: 0 }
    }

    /// Something changed.
    pub fn request(&mut self) {
        self.requested = true;
    }

    /// When the next run is due; `None` before the first request.
    #[must_use]
    pub fn due(&self, now: Instant) -> Option<Instant> {
        let Some(ended) = self.ended else { return self.requested.then_some(now) };
        let pause = if self.requested {
            self.min
        } else if self.failures > 0 {
            self.retry_pause()
        } else {
            self.max
        };
        Some((ended + pause).max(now))
    }

    /// A run ended. Requests that came while it ran were taken by it only if they were made before it started, so call
    /// [`Pacer::started`] first.
    pub fn ended(&mut self, now: Instant, success: bool) {
        self.ended = Some(now);
        self.failures = if success { 0 } else { self.failures + 1 };
    }

    /// A run starts: it takes all requests made so far.
    pub fn started(&mut self) {
        self.requested = false;
    }

    fn retry_pause(&self) -> Duration {
        let doubled = FIRST_RETRY.saturating_mul(1 << (self.failures - 1).min(20));
        doubled.max(self.min).min(self.retry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const HOUR: Duration = Duration::from_secs(3600);

    fn pacer() -> Pacer {
        Pacer::new(1000 * MS, 30_000 * MS, HOUR)
    }

    #[test]
    fn a_single_change_after_quiet_runs_at_once() {
        let (mut p, t) = (pacer(), Instant::now());
        assert_eq!(p.due(t), None, "nothing asked for");
        p.request();
        assert_eq!(p.due(t), Some(t));
        p.started();
        p.ended(t, true);
        p.request();
        let later = t + 5000 * MS;
        assert_eq!(p.due(later), Some(later));
    }

    #[test]
    fn requests_within_the_minimum_collapse_into_one_run() {
        let (mut p, t) = (pacer(), Instant::now());
        p.request();
        p.started();
        p.ended(t, true);
        for at in [500, 999] {
            p.request();
            assert_eq!(p.due(t + at * MS), Some(t + 1000 * MS));
        }
        p.started();
        p.ended(t + 1000 * MS, true);
        assert_eq!(p.due(t + 1001 * MS), Some(t + 1000 * MS + HOUR));
    }

    #[test]
    fn without_requests_one_run_per_maximum_interval() {
        let (mut p, t) = (pacer(), Instant::now());
        p.request();
        p.started();
        p.ended(t, true);
        assert_eq!(p.due(t), Some(t + HOUR));
    }

    #[test]
    fn a_failure_is_repeated_with_growing_pauses_up_to_the_retry_interval() {
        let (mut p, mut t) = (pacer(), Instant::now());
        p.request();
        let mut pauses = Vec::new();
        for _ in 0..12 {
            p.started();
            p.ended(t, false);
            let due = p.due(t).unwrap();
            pauses.push((due - t).as_millis());
            t = due;
        }
        assert_eq!(pauses[0], 1000, "never before the minimum");
        assert!(pauses.windows(2).all(|w| w[0] <= w[1]));
        assert_eq!(*pauses.last().unwrap(), 30_000);
    }

    #[test]
    fn a_success_cancels_the_retry() {
        let (mut p, t) = (pacer(), Instant::now());
        p.request();
        p.started();
        p.ended(t, false);
        p.request();
        p.started();
        p.ended(t + 1000 * MS, true);
        assert_eq!(p.due(t + 1000 * MS), Some(t + 1000 * MS + HOUR));
    }

    #[test]
    fn a_request_during_a_run_is_not_lost() {
        let (mut p, t) = (pacer(), Instant::now());
        p.request();
        p.started();
        p.request();
        p.ended(t, true);
        assert_eq!(p.due(t), Some(t + 1000 * MS));
    }
}
