//! When the next sync may start. Pure: the time is an argument.
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// How long is waited after a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// So long.
    Fixed(Duration),
    /// As long as costs ask for: [`PAUSE_PER_SYNC`] times what the sync took, at most so long.
    ByCost(Duration),
}

/// Under changes that never stop, syncs take at most a fifth of one processor.
pub const PAUSE_PER_SYNC: u32 = 4;

/// Paces syncs as kube-proxy v1.37's runner does: at least a pause between the end of one run and the start of the next, requests in between
/// collapse into one, a failed run is repeated after `retry` at the latest, and without any request one run takes place every `max`.
///
/// Better than kube-proxy, the repeat after a failure comes early at first and then with doubled pauses, up to `retry`; and unless the pause is
/// given it follows the cost: kube-proxy waits a second, because its syncs are costly, so that an EndpointSlice which follows
/// its Service by a moment waits for that second.
#[derive(Clone, Debug)]
pub struct Pacer {
    pause: Pause,
    retry: Duration,
    max: Duration,
    requested: bool,
    started: Option<Instant>,
    /// When the last run ended, and how long it took.
    ended: Option<(Instant, Duration)>,
    failures: u32,
}

/// First pause after a failed sync, if the usual pause is not longer.
const FIRST_RETRY: Duration = Duration::from_millis(100);

impl Pacer {
    /// No run has taken place and none is requested.
    #[must_use]
    pub fn new(pause: Pause, retry: Duration, max: Duration) -> Self {
        Self { pause, retry: retry.min(max), max, requested: false, started: None, ended: None, failures: 0 }
    }

    /// Something changed.
    pub fn request(&mut self) {
        self.requested = true;
    }

    /// When the next run is due; `None` before the first request.
    #[must_use]
    pub fn due(&self, now: Instant) -> Option<Instant> {
        let Some((ended, took)) = self.ended else { return self.requested.then_some(now) };
        let usual = match self.pause {
            Pause::Fixed(pause) => pause,
            Pause::ByCost(most) => (took * PAUSE_PER_SYNC).min(most),
        };
        let pause = if self.requested {
            usual
        } else if self.failures > 0 {
            self.retry_pause(usual)
        } else {
            self.max
        };
        Some((ended + pause).max(now))
    }

    /// A run ended. Requests that came while it ran were taken by it only if they were made before it started, so call
    /// [`Pacer::started`] first.
    pub fn ended(&mut self, now: Instant, success: bool) {
        let took = self.started.map_or(Duration::ZERO, |started| now.saturating_duration_since(started));
        self.ended = Some((now, took));
        self.failures = if success { 0 } else { self.failures + 1 };
    }

    /// A run starts: it takes all requests made so far.
    pub fn started(&mut self, now: Instant) {
        self.started = Some(now);
        self.requested = false;
    }

    fn retry_pause(&self, usual: Duration) -> Duration {
        let doubled = FIRST_RETRY.saturating_mul(1 << (self.failures - 1).min(20));
        doubled.max(usual).min(self.retry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const HOUR: Duration = Duration::from_secs(3600);

    fn pacer() -> Pacer {
        Pacer::new(Pause::Fixed(1000 * MS), 30_000 * MS, HOUR)
    }

    #[test]
    fn a_single_change_after_quiet_runs_at_once() {
        let (mut p, t) = (pacer(), Instant::now());
        assert_eq!(p.due(t), None, "nothing asked for");
        p.request();
        assert_eq!(p.due(t), Some(t));
        p.started(t);
        p.ended(t, true);
        p.request();
        let later = t + 5000 * MS;
        assert_eq!(p.due(later), Some(later));
    }

    #[test]
    fn requests_within_the_minimum_collapse_into_one_run() {
        let (mut p, t) = (pacer(), Instant::now());
        p.request();
        p.started(t);
        p.ended(t, true);
        for at in [500, 999] {
            p.request();
            assert_eq!(p.due(t + at * MS), Some(t + 1000 * MS));
        }
        p.started(t);
        p.ended(t + 1000 * MS, true);
        assert_eq!(p.due(t + 1001 * MS), Some(t + 1000 * MS + HOUR));
    }

    #[test]
    fn without_requests_one_run_per_maximum_interval() {
        let (mut p, t) = (pacer(), Instant::now());
        p.request();
        p.started(t);
        p.ended(t, true);
        assert_eq!(p.due(t), Some(t + HOUR));
    }

    #[test]
    fn a_failure_is_repeated_with_growing_pauses_up_to_the_retry_interval() {
        let (mut p, mut t) = (pacer(), Instant::now());
        p.request();
        let mut pauses = Vec::new();
        for _ in 0..12 {
            p.started(t);
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
        p.started(t);
        p.ended(t, false);
        p.request();
        p.started(t);
        p.ended(t + 1000 * MS, true);
        assert_eq!(p.due(t + 1000 * MS), Some(t + 1000 * MS + HOUR));
    }

    #[test]
    fn a_request_during_a_run_is_not_lost() {
        let (mut p, t) = (pacer(), Instant::now());
        p.request();
        p.started(t);
        p.request();
        p.ended(t, true);
        assert_eq!(p.due(t), Some(t + 1000 * MS));
    }

    #[test]
    fn a_cheap_run_is_followed_soon_and_a_costly_one_after_a_second() {
        let t = Instant::now();
        let due_after = |took: Duration| {
            let mut p = Pacer::new(Pause::ByCost(1000 * MS), 30_000 * MS, HOUR);
            p.request();
            p.started(t);
            p.ended(t + took, true);
            p.request();
            p.due(t + took).unwrap() - (t + took)
        };
        assert_eq!([due_after(MS), due_after(100 * MS), due_after(2000 * MS)], [4 * MS, 400 * MS, 1000 * MS]);
    }
}
