//! Tells an outage once, and once more when it is over.

use super::Watched;
use crate::source::Problem;
use std::collections::BTreeMap;

/// Why a list or watch did not work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The server cannot be reached, or the connection broke.
    Unreachable(String),
    /// The server answers, but refuses: HTTP status and message.
    Refused(u16, String),
}

/// Which kinds fail, and what was told.
#[derive(Default)]
pub(crate) struct Outage {
    failing: BTreeMap<Watched, Failure>,
}

impl Outage {
    /// A kind failed; the message if it is news. That the server cannot be reached is told once for all kinds.
    pub(crate) fn failed(&mut self, kind: Watched, failure: Failure) -> Option<Problem> {
        let news = match &failure {
            Failure::Unreachable(_) => !self.failing.values().any(is_unreachable),
            Failure::Refused(code, _) => !matches!(self.failing.get(&kind), Some(Failure::Refused(before, _)) if before == code),
        };
        let problem = news.then(|| message(kind, &failure));
        self.failing.insert(kind, failure);
        problem
    }

    /// A kind was answered; the message if that ends what was told.
    pub(crate) fn reached(&mut self, kind: Watched) -> Option<Problem> {
        let over = match self.failing.remove(&kind)? {
            Failure::Unreachable(_) if self.failing.values().any(is_unreachable) => return None,
            Failure::Unreachable(_) => "can be reached again".to_owned(),
            Failure::Refused(..) => format!("answers for {} again", kind.plural()),
        };
        Some(problem(false, over))
    }
}

fn is_unreachable(failure: &Failure) -> bool {
    matches!(failure, Failure::Unreachable(_))
}

fn problem(error: bool, message: String) -> Problem {
    Problem { error, location: "API server".to_owned(), field: String::new(), message }
}

fn message(kind: Watched, failure: &Failure) -> Problem {
    let what = kind.plural();
    let stays = "the last known state stays in force, and Tandem tries again";
    match failure {
        Failure::Unreachable(why) => problem(true, format!("cannot be reached ({why}); {stays}")),
        Failure::Refused(404, _) if kind == Watched::ServiceCidrs => problem(
            false,
            "has no networking.k8s.io/v1 ServiceCIDRs (they came with Kubernetes 1.33); traffic to cluster addresses that no Service has is \
             not dropped"
                .to_owned(),
        ),
        Failure::Refused(403, why) if kind == Watched::ServiceCidrs => problem(
            false,
            format!(
                "does not let Tandem list and watch ServiceCIDRs ({why}); traffic to cluster addresses that no Service has is not dropped. \
                 Give the right to list and watch servicecidrs in networking.k8s.io"
            ),
        ),
        Failure::Refused(403, why) => {
            problem(true, format!("does not let Tandem list and watch {what} ({why}); give that right in the ClusterRole; {stays}"))
        }
        Failure::Refused(401, why) => problem(true, format!("does not accept the credentials ({why}); {stays}")),
        Failure::Refused(code, why) => problem(true, format!("refuses {what} with status {code} ({why}); {stays}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unreachable() -> Failure {
        Failure::Unreachable("connection refused".to_owned())
    }

    fn refused(code: u16) -> Failure {
        Failure::Refused(code, "no".to_owned())
    }

    #[test]
    fn an_unreachable_server_is_told_once_for_all_kinds() {
        let mut outage = Outage::default();
        assert!(outage.failed(Watched::Services, unreachable()).unwrap().message.contains("connection refused"));
        assert_eq!(outage.failed(Watched::Slices, unreachable()), None);
        assert_eq!(outage.failed(Watched::Services, unreachable()), None);
        assert_eq!(outage.reached(Watched::Services), None);
        let over = outage.reached(Watched::Slices).unwrap();
        assert!(!over.error && over.message.contains("again"), "{over}");
        assert_eq!(outage.reached(Watched::Slices), None);
        assert!(outage.failed(Watched::Node, unreachable()).is_some());
    }

    #[test]
    fn refusals_are_told_per_kind_and_status() {
        let mut outage = Outage::default();
        assert!(outage.failed(Watched::Services, refused(403)).unwrap().message.contains("ClusterRole"));
        assert_eq!(outage.failed(Watched::Services, refused(403)), None);
        assert!(outage.failed(Watched::Slices, refused(403)).is_some());
        assert!(outage.failed(Watched::Services, refused(500)).is_some());
        assert!(outage.reached(Watched::Services).unwrap().message.contains("Services again"));
    }

    #[test]
    fn missing_service_cidrs_are_a_warning() {
        for code in [403, 404] {
            let problem = Outage::default().failed(Watched::ServiceCidrs, refused(code)).unwrap();
            assert!(!problem.error && problem.message.contains("not dropped"), "{problem}");
        }
    }
}
