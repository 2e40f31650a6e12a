//! Who owns what several Services may ask for.
//!
//! A frontend belongs to the Service with the smallest `namespace/name` that claims it, whatever came first: so the result
//! depends on the objects alone. Set elements that several Services need (`cluster-ips`, `hairpin-connections`) are counted.

use super::service::Front;
use crate::model::ObjectName;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

/// The claimants of one frontend. Nearly always it is one.
#[derive(Clone, Debug)]
enum Claimants {
    One(ObjectName),
    #[expect(clippy::box_collection, reason = "several claims are rare, and there is one entry per frontend")]
    Several(Box<BTreeSet<ObjectName>>),
}

/// All claims.
#[derive(Clone, Debug, Default)]
pub struct Claims(HashMap<Front, Claimants>);

impl Claims {
    /// The owner of `front`.
    #[must_use]
    pub fn owner(&self, front: Front) -> Option<&ObjectName> {
        match self.0.get(&front)? {
            Claimants::One(service) => Some(service),
            Claimants::Several(services) => services.first(),
        }
    }

    /// `service` claims `front`. If it becomes the owner, returns all others that claim it: what is said of them changes.
    pub fn claim(&mut self, front: Front, service: &ObjectName) -> Vec<ObjectName> {
        let claimants = self.0.entry(front).or_insert_with(|| Claimants::One(service.clone()));
        match claimants {
            Claimants::One(only) if only == service => return Vec::new(),
            Claimants::One(only) => *claimants = Claimants::Several(Box::new([only.clone(), service.clone()].into())),
            Claimants::Several(services) => drop(services.insert(service.clone())),
        }
        match claimants {
            Claimants::Several(services) if services.first() == Some(service) => {
                services.iter().skip(1).cloned().collect()
            }
            _ => Vec::new(),
        }
    }

    /// `service` claims `front` no more. If it was the owner, returns all others that claim it; the first owns it from now on.
    pub fn release(&mut self, front: Front, service: &ObjectName) -> Vec<ObjectName> {
        let Entry::Occupied(mut entry) = self.0.entry(front) else { return Vec::new() };
        match entry.get_mut() {
            Claimants::One(only) => {
                if only == service {
                    entry.remove();
                }
                Vec::new()
            }
            Claimants::Several(services) => {
                let owned = services.first() == Some(service);
                services.remove(service);
                let left: Vec<ObjectName> = services.iter().cloned().collect();
                if let [only] = &left[..] {
                    entry.insert(Claimants::One(only.clone()));
                }
                if owned { left } else { Vec::new() }
            }
        }
    }
}

/// How many Services need each of something.
#[derive(Clone, Debug)]
pub struct Counts<T>(HashMap<T, u32>);

impl<T> Default for Counts<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T: Eq + Hash> Counts<T> {
    /// One more needs `item`. Whether it is the first.
    pub fn add(&mut self, item: T) -> bool {
        let count = self.0.entry(item).or_insert(0);
        *count += 1;
        *count == 1
    }

    /// One less needs `item`. Whether it was the last.
    pub fn remove(&mut self, item: &T) -> bool {
        let Some(count) = self.0.get_mut(item) else { return false };
        *count -= 1;
        let last = *count == 0;
        if last {
            self.0.remove(item);
        }
        last
    }

    /// Whether anybody needs `item`.
    #[must_use]
    pub fn contains(&self, item: &T) -> bool {
        self.0.contains_key(item)
    }

    /// Everything that is needed, in no order.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.0.keys()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Protocol;

    #[test]
    fn the_smallest_name_owns_a_frontend_whatever_came_first() {
        let (a, b, c) = (ObjectName::new("a", "x"), ObjectName::new("b", "x"), ObjectName::new("c", "x"));
        let front = Front::NodePort(Protocol::Tcp, 30000);
        let mut claims = Claims::default();
        assert_eq!(claims.claim(front, &b), []);
        assert_eq!(claims.claim(front, &c), [], "b keeps it");
        assert_eq!(claims.claim(front, &a), [b.clone(), c.clone()], "b loses it, c loses to another");
        assert_eq!(claims.owner(front), Some(&a));
        assert_eq!(claims.release(front, &b), []);
        assert_eq!(claims.release(front, &a), std::slice::from_ref(&c));
        assert_eq!(claims.owner(front), Some(&c));
        assert_eq!(claims.release(front, &c), []);
        assert_eq!(claims.owner(front), None);
    }

    #[test]
    fn something_shared_stays_until_the_last_user_goes() {
        let mut counts = Counts::default();
        assert!(counts.add("x"));
        assert!(!counts.add("x"));
        assert!(!counts.remove(&"x"));
        assert!(counts.remove(&"x"));
        assert!(!counts.contains(&"x"));
    }
}
