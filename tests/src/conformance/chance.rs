//! Random choices that are the same on every machine.

#![forbid(unsafe_code)]

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// A stream of choices. ChaCha8's output is specified, so that a seed means the same in years; how numbers become choices is
/// written here and not left to a crate whose versions differ in it.
#[derive(Clone, Debug)]
pub(super) struct Chance(ChaCha8Rng);

impl Chance {
    /// The stream of a round.
    pub(super) fn new(seed: u64, number: u32) -> Self {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..12].copy_from_slice(&number.to_le_bytes());
        key[12..].copy_from_slice(b"tandem conformance 1");
        Self(ChaCha8Rng::from_seed(key))
    }

    /// 0 to `n` − 1; 0 if `n` is 0. The bias of the remainder is far below what matters here.
    pub(super) fn below(&mut self, n: usize) -> usize {
        let drawn = self.0.next_u64() % u64::try_from(n.max(1)).expect("usize has at most 64 bits");
        usize::try_from(drawn).expect("below n")
    }

    /// `from` to `to`, both included.
    pub(super) fn between(&mut self, from: usize, to: usize) -> usize {
        from + self.below(to + 1 - from)
    }

    /// True once in `n` times.
    pub(super) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of them, which must not be empty.
    pub(super) fn pick<'a, T>(&mut self, all: &'a [T]) -> &'a T {
        &all[self.below(all.len())]
    }

    /// A random order.
    pub(super) fn shuffle<T>(&mut self, all: &mut [T]) {
        for last in (1..all.len()).rev() {
            all.swap(last, self.below(last + 1));
        }
    }

    /// `n` different ones of `all` (all, if there are fewer), in random order.
    pub(super) fn some<T: Clone>(&mut self, all: &[T], n: usize) -> Vec<T> {
        let mut order: Vec<usize> = (0..all.len()).collect();
        self.shuffle(&mut order);
        order.into_iter().take(n).map(|index| all[index].clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_and_a_number_name_a_stream_for_ever() {
        let draw = |seed, number| {
            let mut chance = Chance::new(seed, number);
            (0..8).map(|_| chance.below(1000)).collect::<Vec<_>>()
        };
        assert_eq!(draw(1, 0), draw(1, 0));
        assert_ne!(draw(1, 0), draw(1, 1));
        assert_ne!(draw(1, 0), draw(2, 0));
        assert_eq!(draw(7, 3), PINNED, "a round would no longer be what its seed said when it failed");
    }

    /// Written down from the first run.
    const PINNED: [usize; 8] = [893, 525, 115, 651, 918, 27, 876, 993];

    #[test]
    fn some_are_different_and_not_more_than_there_are() {
        let mut chance = Chance::new(1, 1);
        for n in 0..6 {
            let mut some = chance.some(&[1, 2, 3, 4], n);
            some.sort_unstable();
            some.dedup();
            assert_eq!(some.len(), n.min(4));
        }
    }
}
