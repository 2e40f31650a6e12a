//! Which objects of one kind are known, so that what a new list does not have is recognised as gone.

use super::Watched;
use crate::model::{Delta, ObjectName};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::HashSet;

/// Namespace (empty for kinds without one) and name.
pub(crate) type Key = ObjectName;

/// The key of an object.
pub(crate) fn key(meta: &ObjectMeta) -> Key {
    Key::new(meta.namespace.as_deref().unwrap_or(""), meta.name.as_deref().unwrap_or(""))
}

/// Names of one kind. The contract of `kube::runtime::watcher::Event`: `Init`, then `InitApply` for each object, then
/// `InitDone`; what was not applied in between is gone, and may never be deleted one by one.
pub(crate) struct Tracker {
    kind: Watched,
    known: HashSet<Key>,
    /// `None`: no list, or the first one, which nobody acts on before it is complete: it is passed on as it comes.
    list: Option<List>,
    listed: bool,
}

/// A list that is being read while objects are known. Its deltas wait until it is complete, so that what changed is seen at once.
#[derive(Default)]
struct List {
    seen: HashSet<Key>,
    deltas: Vec<Delta>,
}

impl Tracker {
    pub(crate) fn new(kind: Watched) -> Self {
        Self { kind, known: HashSet::new(), list: None, listed: false }
    }

    /// Whether a complete list was ever read.
    pub(crate) fn listed(&self) -> bool {
        self.listed
    }

    /// A list begins; one that began before has failed.
    pub(crate) fn init(&mut self) {
        self.list = (!self.known.is_empty()).then(List::default);
    }

    /// An object is there; `None` if a proxy has nothing to do with it.
    pub(crate) fn apply(&mut self, key: Key, delta: Option<Delta>) -> Vec<Delta> {
        match (&mut self.list, delta) {
            (Some(list), Some(delta)) => {
                list.seen.insert(key);
                list.deltas.push(delta);
                Vec::new()
            }
            (Some(_), None) => Vec::new(),
            (None, Some(delta)) => {
                self.known.insert(key);
                vec![delta]
            }
            (None, None) => self.delete(&key),
        }
    }

    /// An object is gone.
    pub(crate) fn delete(&mut self, key: &Key) -> Vec<Delta> {
        if self.known.remove(key) { vec![gone(self.kind, key)] } else { Vec::new() }
    }

    /// The list is complete.
    pub(crate) fn done(&mut self) -> Vec<Delta> {
        self.listed = true;
        let Some(List { seen, deltas }) = self.list.take() else { return Vec::new() };
        let mut all: Vec<Delta> = self.known.difference(&seen).map(|key| gone(self.kind, key)).collect();
        if all.is_empty() {
            all = deltas;
        } else {
            all.extend(deltas);
        }
        self.known = seen;
        all
    }
}

fn gone(kind: Watched, key: &Key) -> Delta {
    match kind {
        Watched::Services => Delta::ServiceGone(key.clone()),
        Watched::Slices => Delta::SliceGone(key.clone()),
        Watched::Node => Delta::NodeGone,
        Watched::ServiceCidrs => Delta::ServiceCidrGone(key.name.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cidr(name: &str) -> Delta {
        Delta::ServiceCidr(name.into(), Vec::new())
    }

    fn cidr_gone(name: &str) -> Delta {
        Delta::ServiceCidrGone(name.into())
    }

    fn key(name: &str) -> Key {
        Key::new("", name)
    }

    #[test]
    fn the_first_list_is_passed_on_and_others_are_delivered_whole_and_take_away_what_they_lack() {
        let mut tracker = Tracker::new(Watched::ServiceCidrs);
        tracker.init();
        assert_eq!(tracker.apply(key("a"), Some(cidr("a"))), [cidr("a")]);
        assert_eq!(tracker.apply(key("b"), Some(cidr("b"))), [cidr("b")]);
        assert!(!tracker.listed());
        assert_eq!(tracker.done(), []);
        assert!(tracker.listed());
        tracker.init();
        assert_eq!(tracker.apply(key("b"), Some(cidr("b"))), []);
        assert_eq!(tracker.done(), [cidr_gone("a"), cidr("b")]);
        assert_eq!(tracker.delete(&key("a")), []);
        assert_eq!(tracker.delete(&key("b")), [cidr_gone("b")]);
    }

    #[test]
    fn a_list_that_fails_half_way_changes_nothing() {
        let mut tracker = Tracker::new(Watched::ServiceCidrs);
        tracker.init();
        tracker.apply(key("a"), Some(cidr("a")));
        tracker.apply(key("b"), Some(cidr("b")));
        tracker.done();
        tracker.init();
        tracker.apply(key("a"), Some(cidr("a")));
        // Failed here; the next attempt.
        tracker.init();
        tracker.apply(key("b"), Some(cidr("b")));
        assert_eq!(tracker.done(), [cidr_gone("a"), cidr("b")]);
    }

    #[test]
    fn what_a_failed_first_list_had_passed_on_is_taken_back_by_the_next() {
        let mut tracker = Tracker::new(Watched::ServiceCidrs);
        tracker.init();
        tracker.apply(key("a"), Some(cidr("a")));
        tracker.init();
        assert_eq!(tracker.apply(key("b"), Some(cidr("b"))), []);
        assert!(!tracker.listed());
        assert_eq!(tracker.done(), [cidr_gone("a"), cidr("b")]);
        assert!(tracker.listed());
    }

    #[test]
    fn an_object_that_is_not_ours_any_more_is_gone() {
        let mut tracker = Tracker::new(Watched::ServiceCidrs);
        tracker.init();
        tracker.done();
        assert_eq!(tracker.apply(key("x"), None), []);
        assert_eq!(tracker.apply(key("x"), Some(cidr("x"))), [cidr("x")]);
        assert_eq!(tracker.apply(key("x"), None), [cidr_gone("x")]);
        assert_eq!(tracker.apply(key("x"), None), []);
        tracker.apply(key("x"), Some(cidr("x")));
        tracker.init();
        tracker.apply(key("x"), None);
        assert_eq!(tracker.done(), [cidr_gone("x")]);
    }
}
