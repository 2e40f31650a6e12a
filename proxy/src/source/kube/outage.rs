//! Tells an outage once, and once more when it is over.

use super::Watched;
use crate::source::Problem;
use std::collections::{BTreeMap, BTreeSet};

/// Why a list or watch did not work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The server cannot be reached, or the connection broke.
    Unreachable(String),
    /// The server answers, but refuses: HTTP status and message.
    Refused(u16, String),
    /// What the server sends cannot be decoded.
    Unreadable(String),
}

/// Stands for [`Failure::Unreadable`] where statuses are; not an HTTP status.
const UNREADABLE: u16 = 0;

/// A refusal is told when it has been repeated so often. An API server that starts refuses all kinds of things for a moment:
/// its own roles are not there yet.
pub(crate) const PERSISTENT: u32 = 3;

/// Which kinds fail, and what was told.
#[derive(Default)]
pub(crate) struct Outage {
    unreachable: BTreeSet<Watched>,
    unreachable_told: bool,
    refused: BTreeMap<Watched, Refusal>,
}

struct Refusal {
    code: u16,
    count: u32,
    told: bool,
}

impl Outage {
    /// A kind failed; what is news. That the server cannot be reached is told once for all kinds.
    pub(crate) fn failed(&mut self, kind: Watched, failure: Failure) -> Vec<Problem> {
        let (code, why) = match &failure {
            Failure::Unreachable(why) => {
                self.unreachable.insert(kind);
                let news = !std::mem::replace(&mut self.unreachable_told, true);
                return news.then(|| unreachable(why)).into_iter().collect();
            }
            Failure::Refused(code, why) => (*code, why),
            Failure::Unreadable(why) => (UNREADABLE, why),
        };
        // A refusal is an answer too.
        let mut news: Vec<Problem> = self.answered(kind).into_iter().collect();
        let refusal = self.refused.entry(kind).or_insert(Refusal { code, count: 0, told: false });
        if refusal.code != code {
            *refusal = Refusal { code, count: 0, told: false };
        }
        refusal.count += 1;
        if refusal.count >= PERSISTENT && !refusal.told {
            refusal.told = true;
            news.push(refused(kind, code, why));
        }
        news
    }

    /// A kind was answered as it should; what ends thereby of what was told.
    pub(crate) fn reached(&mut self, kind: Watched) -> Vec<Problem> {
        let mut news: Vec<Problem> = self.answered(kind).into_iter().collect();
        if self.refused.remove(&kind).is_some_and(|refusal| refusal.told) {
            news.push(problem(false, format!("answers for {} again", kind.plural())));
        }
        news
    }

    fn answered(&mut self, kind: Watched) -> Option<Problem> {
        let was_last = self.unreachable.remove(&kind) && self.unreachable.is_empty();
        let over = was_last && std::mem::take(&mut self.unreachable_told);
        over.then(|| problem(false, "can be reached again".to_owned()))
    }
}

fn problem(error: bool, message: String) -> Problem {
    Problem { error, location: "API server".to_owned(), field: String::new(), message }
}

const STAYS: &str = "the last known state stays in force, and Tandem tries again";

fn unreachable(why: &str) -> Problem {
    problem(true, format!("cannot be reached ({why}); {STAYS}"))
}

fn refused(kind: Watched, code: u16, why: &str) -> Problem {
    let what = kind.plural();
    match code {
        404 if kind == Watched::ServiceCidrs => problem(
            false,
            "has no networking.k8s.io/v1 ServiceCIDRs (they came with Kubernetes 1.33); traffic to cluster addresses that no Service has is \
             not dropped"
                .to_owned(),
        ),
        403 if kind == Watched::ServiceCidrs => problem(
            false,
            format!(
                "does not let Tandem list and watch ServiceCIDRs ({why}); traffic to cluster addresses that no Service has is not dropped. \
                 Give the right to list and watch servicecidrs in networking.k8s.io"
            ),
        ),
        403 => problem(true, format!("does not let Tandem list and watch {what} ({why}); give that right in the ClusterRole; {STAYS}")),
        UNREADABLE => problem(true, format!("sends a list of {what} that cannot be decoded ({why}); {STAYS}")),
        401 => problem(true, format!("does not accept the credentials ({why}); {STAYS}")),
        code => problem(true, format!("refuses {what} with status {code} ({why}); {STAYS}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn down() -> Failure {
        Failure::Unreachable("connection refused".to_owned())
    }

    fn no(code: u16) -> Failure {
        Failure::Refused(code, "no".to_owned())
    }

    /// Refuses as often as needed; the one message.
    fn persist(outage: &mut Outage, kind: Watched, code: u16) -> Problem {
        for _ in 1..PERSISTENT {
            assert_eq!(outage.failed(kind, no(code)), []);
        }
        let mut news = outage.failed(kind, no(code));
        assert_eq!(news.len(), 1);
        news.remove(0)
    }

    #[test]
    fn an_unreachable_server_is_told_once_for_all_kinds() {
        let mut outage = Outage::default();
        assert!(outage.failed(Watched::Services, down())[0].message.contains("connection refused"));
        assert_eq!(outage.failed(Watched::Slices, down()), []);
        assert_eq!(outage.failed(Watched::Services, down()), []);
        assert_eq!(outage.reached(Watched::Services), []);
        let over = outage.reached(Watched::Slices);
        assert!(over.len() == 1 && !over[0].error && over[0].message.contains("reached again"), "{over:?}");
        assert_eq!(outage.reached(Watched::Slices), []);
        assert_eq!(outage.failed(Watched::Node, down()).len(), 1);
    }

    #[test]
    fn refusals_that_last_are_told_per_kind_and_status() {
        let mut outage = Outage::default();
        assert!(persist(&mut outage, Watched::Services, 403).message.contains("ClusterRole"));
        assert_eq!(outage.failed(Watched::Services, no(403)), []);
        persist(&mut outage, Watched::Slices, 403);
        persist(&mut outage, Watched::Services, 500);
        assert!(outage.reached(Watched::Services)[0].message.contains("Services again"));
    }

    #[test]
    fn refusals_while_the_server_starts_are_not_told() {
        let mut outage = Outage::default();
        assert_eq!(outage.failed(Watched::Services, down()).len(), 1);
        let over = outage.failed(Watched::Services, no(403));
        assert!(over.len() == 1 && over[0].message.contains("reached again"), "{over:?}");
        assert_eq!(outage.failed(Watched::Services, no(403)), []);
        assert_eq!(outage.reached(Watched::Services), []);
    }

    #[test]
    fn missing_service_cidrs_are_a_warning() {
        for code in [403, 404] {
            let problem = persist(&mut Outage::default(), Watched::ServiceCidrs, code);
            assert!(!problem.error && problem.message.contains("not dropped"), "{problem}");
        }
    }
}
