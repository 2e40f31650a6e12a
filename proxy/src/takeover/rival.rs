//! What to do about a kube-proxy that runs in our network namespace: say so, and keep serving. Pure; the clock is passed in.
//!
//! Two programs that both program every service do not stop each other, but each hides the other's mistakes, and the rules
//! that come first win. So its rules are removed again, at most once a minute: a fight would cost more than it helps.

use super::probe::Answer;
use std::time::{Duration, Instant};

/// The shortest time between two removals of its rules.
pub const REMOVE_EVERY: Duration = Duration::from_secs(60);
/// The shortest time between two reports of one that answers but has no rules.
const REPORT_EVERY: Duration = Duration::from_secs(600);
/// Without a sign for so long, it counts as gone.
const FORGET_AFTER: Duration = Duration::from_secs(180);

/// Something that was observed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sign {
    /// Its rules exist, in words ([`super::find_rules`]).
    Rules(Vec<String>),
    /// It answered on its health or metrics port.
    Answers(Answer),
}

/// What to do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Nothing (more).
    Nothing,
    /// Remove its rules, then call [`Rival::removed`]. These are leftovers: the first ones since we started.
    Remove,
    /// Log this error, count it, and remove its rules, then call [`Rival::removed`].
    ReportAndRemove(String),
    /// Log this error and count it.
    Report(String),
}

/// What is known about a running kube-proxy.
#[derive(Clone, Debug, Default)]
pub struct Rival {
    last_removal: Option<Instant>,
    last_report: Option<Instant>,
    /// First and last sign that it runs.
    seen: Option<(Instant, Instant)>,
    last_words: String,
    /// Rules were seen and not removed yet because it is too early.
    pending: bool,
}

impl Rival {
    /// Nothing known.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in a sign.
    pub fn observe(&mut self, sign: &Sign, now: Instant) -> Action {
        match sign {
            Sign::Rules(rules) if rules.is_empty() => {
                self.pending = false;
                Action::Nothing
            }
            Sign::Rules(rules) => match self.last_removal {
                // Nobody removed them yet, so they need not be of a process that runs.
                None => Action::Remove,
                Some(last) => {
                    let words = format!("its rules came back after they were removed ({})", rules.join(", "));
                    self.saw(words, now);
                    if now.saturating_duration_since(last) >= REMOVE_EVERY {
                        self.last_report = Some(now);
                        Action::ReportAndRemove(self.message())
                    } else {
                        self.pending = true;
                        self.report(now)
                    }
                }
            },
            Sign::Answers(answer) => {
                self.saw(format!("it answers on {answer}"), now);
                self.report(now)
            }
        }
    }

    /// Notes that its rules were removed just now; also those that our own first transaction removed.
    pub fn removed(&mut self, now: Instant) {
        self.last_removal = Some(now);
        self.pending = false;
    }

    /// When to look for its rules again at the latest: they were seen, and could not be removed yet.
    #[must_use]
    pub fn look_again_at(&self) -> Option<Instant> {
        self.last_removal.filter(|_| self.pending).map(|last| last + REMOVE_EVERY)
    }

    /// For status and metric: what was seen of a kube-proxy that runs now; `None` = none runs.
    #[must_use]
    pub fn status(&self, now: Instant) -> Option<String> {
        let (_, last) = self.seen?;
        (now.saturating_duration_since(last) < FORGET_AFTER).then(|| self.message())
    }

    fn saw(&mut self, words: String, now: Instant) {
        let first =
            self.seen.filter(|(_, last)| now.saturating_duration_since(*last) < FORGET_AFTER).map(|(first, _)| first);
        if first.is_none() {
            self.last_report = None; // it came anew
        }
        self.seen = Some((first.unwrap_or(now), now));
        self.last_words = words;
    }

    fn report(&mut self, now: Instant) -> Action {
        if self.last_report.is_some_and(|last| now.saturating_duration_since(last) < REPORT_EVERY) {
            return Action::Nothing;
        }
        self.last_report = Some(now);
        Action::Report(self.message())
    }

    fn message(&self) -> String {
        format!(
            "a kube-proxy is running in this network namespace: {}. Tandem keeps serving. Stop the other one, for instance \
             with a nodeSelector on its DaemonSet that leaves this node out",
            self.last_words
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules() -> Sign {
        Sign::Rules(vec!["nftables table ip kube-proxy".into()])
    }

    fn answer() -> Sign {
        Sign::Answers(Answer { address: "127.0.0.1:10249".parse().unwrap(), what: "mode nftables".into() })
    }

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn leftovers_at_start_are_removed_in_silence() {
        let (mut rival, start) = (Rival::new(), Instant::now());
        assert_eq!(rival.observe(&rules(), start), Action::Remove);
        rival.removed(start);
        assert_eq!(rival.observe(&Sign::Rules(vec![]), start + s(1)), Action::Nothing);
        assert_eq!(rival.status(start + s(1)), None);
    }

    #[test]
    fn rules_that_come_back_are_reported_at_once_and_removed_once_a_minute() {
        let (mut rival, start) = (Rival::new(), Instant::now());
        rival.removed(start);
        let mut removals = Vec::new();
        let mut reports = Vec::new();
        // The other one writes its rules every second, for five minutes.
        for second in 1..=300 {
            let now = start + s(second);
            match rival.observe(&rules(), now) {
                Action::ReportAndRemove(message) => {
                    assert!(message.contains("ip kube-proxy") && message.contains("keeps serving"), "{message}");
                    removals.push(second);
                    rival.removed(now);
                }
                Action::Report(_) => reports.push(second),
                Action::Nothing => {}
                Action::Remove => panic!("no leftovers"),
            }
        }
        assert_eq!(removals, [60, 120, 180, 240, 300]);
        assert_eq!(reports, [1]);
        assert!(rival.status(start + s(301)).is_some());
    }

    #[test]
    fn rules_that_wait_for_their_removal_are_looked_at_when_the_minute_is_over() {
        let (mut rival, start) = (Rival::new(), Instant::now());
        rival.removed(start);
        assert_eq!(rival.look_again_at(), None);
        assert!(matches!(rival.observe(&rules(), start + s(2)), Action::Report(_)));
        assert_eq!(rival.look_again_at(), Some(start + s(60)));
        assert!(matches!(rival.observe(&rules(), start + s(60)), Action::ReportAndRemove(_)));
        rival.removed(start + s(60));
        assert_eq!(rival.look_again_at(), None);
        // They went by themselves.
        rival.observe(&rules(), start + s(70));
        rival.observe(&Sign::Rules(vec![]), start + s(71));
        assert_eq!(rival.look_again_at(), None);
    }

    #[test]
    fn one_that_only_answers_is_reported_seldom_and_forgotten_when_it_is_silent() {
        let (mut rival, start) = (Rival::new(), Instant::now());
        let reports: Vec<_> =
            (0..30).filter(|minute| rival.observe(&answer(), start + s(60 * minute)) != Action::Nothing).collect();
        assert_eq!(reports, [0, 10, 20]);
        let last = start + s(60 * 29);
        assert!(rival.status(last + s(100)).unwrap().contains("127.0.0.1:10249"));
        assert_eq!(rival.status(last + s(180)), None);
        assert!(matches!(rival.observe(&answer(), last + s(200)), Action::Report(_)), "it came anew");
    }
}
