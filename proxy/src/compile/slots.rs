//! Which endpoint sits in which slot.
//!
//! A list of N endpoints fills slots 0…N−1. Order is kept from plan to plan, so that a change of one endpoint is a change of
//! one or two slots, whatever N. Slots at or above N are *surplus*: a packet that read `goto endpoints-10` before the commit
//! may still look up slot 9 after it, so after a shrink they point to a live endpoint until they are deleted, a second later.

use crate::model::Backend;
use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

/// What a slot translates to.
pub type Target = (IpAddr, u16);

/// Address and port of `backend`.
#[must_use]
pub fn target(backend: &Backend) -> Target {
    (backend.address, backend.port)
}

/// A list of endpoints in the order of their slots, the surplus at its end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Slots {
    all: Box<[Backend]>,
    live: u32,
}

impl Slots {
    /// Assigns `want` (no duplicates) to slots, such that as few as possible change.
    ///
    /// `held` is what the kernel holds for the frontends of the list; the result has at least `held.len()` slots.
    #[must_use]
    pub fn place(held: &[Target], want: &[Backend]) -> Self {
        let Some(first) = want.first() else {
            return Self::default();
        };
        // An endpoint stays in the first slot below N where it is; what has no such slot fills the gaps, in order.
        let index: HashMap<Target, usize> = want.iter().enumerate().map(|(i, backend)| (target(backend), i)).collect();
        let mut placed = vec![false; want.len()];
        let mut slots: Vec<Option<Backend>> = vec![None; want.len()];
        for (slot, held) in slots.iter_mut().zip(held) {
            if let Some(i) = index.get(held).copied()
                && !std::mem::replace(&mut placed[i], true)
            {
                *slot = Some(want[i]);
            }
        }
        let mut rest: VecDeque<Backend> =
            want.iter().zip(&placed).filter(|(_, placed)| !**placed).map(|(b, _)| *b).collect();
        let mut all = Vec::with_capacity(want.len().max(held.len()));
        for slot in slots {
            // As many endpoints are without a slot as slots are without an endpoint.
            all.extend(slot.or_else(|| rest.pop_front()));
        }
        let live = all.len() as u32;
        for held in held.iter().skip(want.len()) {
            all.push(index.get(held).map_or(*first, |i| want[*i]));
        }
        Self { all: all.into(), live }
    }

    /// The endpoints that are in use, in the order of their slots.
    #[must_use]
    pub fn live(&self) -> &[Backend] {
        &self.all[..self.live as usize]
    }

    /// All slots, the surplus included.
    #[must_use]
    pub fn all(&self) -> &[Backend] {
        &self.all
    }

    /// N: how many slots are in use.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.live
    }

    /// Whether there are surplus slots.
    #[must_use]
    pub fn has_surplus(&self) -> bool {
        self.all.len() > self.live as usize
    }

    /// Forgets the surplus.
    pub fn drop_surplus(&mut self) {
        if self.has_surplus() {
            self.all = self.live().into();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn backend(n: u8) -> Backend {
        Backend { address: IpAddr::from([10, 0, 0, n]), port: 80, local: false }
    }
    fn backends(ns: &[u8]) -> Vec<Backend> {
        ns.iter().copied().map(backend).collect()
    }
    fn targets(ns: &[u8]) -> Vec<Target> {
        ns.iter().map(|n| target(&backend(*n))).collect()
    }
    fn numbers(backends: &[Backend]) -> Vec<u8> {
        backends
            .iter()
            .map(|b| match b.address {
                IpAddr::V4(ip) => ip.octets()[3],
                IpAddr::V6(_) => unreachable!(),
            })
            .collect()
    }

    #[test]
    fn the_last_endpoint_takes_the_place_of_one_that_goes() {
        let slots = Slots::place(&targets(&[1, 2, 3, 4]), &backends(&[1, 3, 4]));
        assert_eq!(numbers(slots.live()), [1, 4, 3]);
        assert_eq!(numbers(slots.all()), [1, 4, 3, 4], "the surplus slot is right as it is");
    }

    #[test]
    fn surplus_of_a_dead_endpoint_points_to_a_live_one() {
        let slots = Slots::place(&targets(&[1, 2, 3, 4]), &backends(&[1, 2, 3]));
        assert_eq!(numbers(slots.all()), [1, 2, 3, 1]);
    }

    #[test]
    fn a_new_endpoint_takes_the_next_slot() {
        let slots = Slots::place(&targets(&[3, 1]), &backends(&[1, 2, 3]));
        assert_eq!(numbers(slots.all()), [3, 1, 2]);
        assert!(!slots.has_surplus());
    }

    #[test]
    fn without_endpoints_there_are_no_slots() {
        assert_eq!(Slots::place(&targets(&[1, 2]), &[]), Slots::default());
    }

    proptest! {
        #[test]
        fn each_endpoint_has_exactly_one_live_slot_and_every_slot_is_alive(
            held in prop::collection::vec(0u8..12, 0..12),
            want in prop::collection::btree_set(0u8..12, 0..12),
        ) {
            let want: Vec<u8> = want.into_iter().collect();
            let slots = Slots::place(&targets(&held), &backends(&want));
            let mut live = numbers(slots.live());
            live.sort_unstable();
            prop_assert_eq!(&live, &want);
            if want.is_empty() {
                prop_assert!(slots.all().is_empty());
            } else {
                prop_assert_eq!(slots.all().len(), want.len().max(held.len()));
            }
            prop_assert!(numbers(slots.all()).iter().all(|n| want.contains(n)));
        }

        #[test]
        fn one_endpoint_more_or_less_changes_at_most_two_slots(
            held in prop::collection::btree_set(0u8..100, 1..60), n in 0u8..100,
        ) {
            let held: Vec<u8> = held.into_iter().collect();
            let mut want = held.clone();
            match want.iter().position(|h| *h == n) {
                Some(i) => drop(want.remove(i)),
                None => want.push(n),
            }
            if !want.is_empty() {
                let slots = Slots::place(&targets(&held), &backends(&want));
                let changed = numbers(slots.all()).iter().zip(&held).filter(|(a, b)| a != b).count();
                prop_assert!(changed <= 2);
            }
        }
    }
}
