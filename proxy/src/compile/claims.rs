//! Who owns what several Services may ask for.
//!
//! A ClusterIP belongs to the Service that has it, whoever else names it as an external or load balancer address: nobody can take
//! the traffic of another's ClusterIP. Among equals a frontend belongs to the Service with the smallest `namespace/name` that
//! claims it, whatever came first: so the result depends on the objects alone. Set elements that several Services need (`cluster-ips`, `hairpin-connections`) are counted.

use super::service::Front;
use crate::model::ObjectName;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::hash::Hash;

/// As what a frontend is claimed; the first outranks the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Rank {
    /// The Service's own ClusterIP.
    ClusterIp,
    /// External IP, load balancer address or NodePort.
    External,
}

type Claimant = (Rank, ObjectName);

/// The claimants of one frontend. Nearly always it is one.
#[derive(Clone, Debug)]
enum Claimants {
    One(Claimant),
    #[expect(clippy::box_collection, reason = "several claims are rare, and there is one entry per frontend")]
    Several(Box<BTreeSet<Claimant>>),
}

/// All claims.
#[derive(Clone, Debug, Default)]
pub struct Claims(HashMap<Front, Claimants>);

impl Claims {
    /// The owner of `front`.
    #[must_use]
    pub fn owner(&self, front: Front) -> Option<&ObjectName> {
        match self.0.get(&front)? {
            Claimants::One((_, service)) => Some(service),
            Claimants::Several(claimants) => claimants.first().map(|(_, service)| service),
        }
    }

    /// `service` claims `front`. If it becomes the owner, returns all others that claim it: what is said of them changes.
    pub fn claim(&mut self, front: Front, rank: Rank, service: &ObjectName) -> Vec<ObjectName> {
        let claimant = (rank, service.clone());
        let claimants = match self.0.entry(front) {
            Entry::Vacant(entry) => {
                entry.insert(Claimants::One(claimant));
                return Vec::new();
            }
            Entry::Occupied(entry) => entry.into_mut(),
        };
        match claimants {
            Claimants::One(only) if *only == claimant => return Vec::new(),
            Claimants::One(only) => *claimants = Claimants::Several(Box::new([only.clone(), claimant.clone()].into())),
            Claimants::Several(all) => drop(all.insert(claimant.clone())),
        }
        match claimants {
            Claimants::Several(all) if all.first() == Some(&claimant) => names(all.iter().skip(1)),
            _ => Vec::new(),
        }
    }

    /// `service` claims `front` no more. If it was the owner, returns all others that claim it; the first owns it from now on.
    pub fn release(&mut self, front: Front, rank: Rank, service: &ObjectName) -> Vec<ObjectName> {
        let claimant = (rank, service.clone());
        let Entry::Occupied(mut entry) = self.0.entry(front) else { return Vec::new() };
        match entry.get_mut() {
            Claimants::One(only) => {
                if *only == claimant {
                    entry.remove();
                }
                Vec::new()
            }
            Claimants::Several(all) => {
                let owned = all.first() == Some(&claimant);
                all.remove(&claimant);
                let left = names(all.iter());
                if all.len() == 1
                    && let Some(only) = all.pop_first()
                {
                    entry.insert(Claimants::One(only));
                }
                if owned { left } else { Vec::new() }
            }
        }
    }
}

fn names<'a>(claimants: impl Iterator<Item = &'a Claimant>) -> Vec<ObjectName> {
    claimants.map(|(_, service)| service.clone()).collect()
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
        assert_eq!(claims.claim(front, Rank::External, &b), []);
        assert_eq!(claims.claim(front, Rank::External, &c), [], "b keeps it");
        assert_eq!(claims.claim(front, Rank::External, &a), [b.clone(), c.clone()], "b loses it, c loses to another");
        assert_eq!(claims.owner(front), Some(&a));
        assert_eq!(claims.release(front, Rank::External, &b), []);
        assert_eq!(claims.release(front, Rank::External, &a), std::slice::from_ref(&c));
        assert_eq!(claims.owner(front), Some(&c));
        assert_eq!(claims.release(front, Rank::External, &c), []);
        assert_eq!(claims.owner(front), None);
    }

    #[test]
    fn a_cluster_ip_cannot_be_taken_by_an_external_address_of_a_smaller_name() {
        let (a, b) = (ObjectName::new("a", "x"), ObjectName::new("b", "x"));
        let front = Front::Address("172.30.0.1".parse().unwrap(), Protocol::Tcp, 80);
        let mut claims = Claims::default();
        assert_eq!(claims.claim(front, Rank::External, &a), []);
        assert_eq!(claims.claim(front, Rank::ClusterIp, &b), std::slice::from_ref(&a), "a loses it");
        assert_eq!(claims.owner(front), Some(&b));
        assert_eq!(claims.release(front, Rank::ClusterIp, &b), std::slice::from_ref(&a), "a has it again");
        assert_eq!(claims.owner(front), Some(&a));
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
