//! Seeded random numbers: the same seed gives the same stream on every machine (ChaCha8).

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// A seeded stream of random numbers.
#[derive(Clone, Debug)]
pub struct Random(ChaCha8Rng);

impl Random {
    /// The stream of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Uniform in [0, 1), with 53 bits.
    pub fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `0..n`; 0 for `n` = 0. The bias of the multiplication is below n / 2^64.
    pub fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.0.next_u64()) * n as u128) >> 64) as usize
    }

    /// Standard normal (Box and Muller, 1958).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (2.0 * std::f64::consts::PI * self.unit()).cos()
    }

    /// Puts a slice into random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_a_stream() {
        let draw = |seed| -> Vec<u64> {
            let mut r = Random::new(seed);
            (0..4).map(|_| (r.unit() * 1e9) as u64).collect()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn moments_are_those_of_the_distributions() {
        let mut r = Random::new(1);
        let n = 20_000;
        let (mut mean, mut square, mut low) = (0.0, 0.0, 0);
        for _ in 0..n {
            let z = r.normal();
            mean += z / f64::from(n);
            square += z * z / f64::from(n);
            low += usize::from(r.below(10) < 3);
        }
        assert!(mean.abs() < 0.03 && (square - 1.0).abs() < 0.05, "{mean} {square}");
        assert!((low as f64 / f64::from(n) - 0.3).abs() < 0.02);
        assert_eq!(r.below(0), 0);
    }

    #[test]
    fn shuffling_keeps_the_items() {
        let mut items: Vec<u32> = (0..50).collect();
        Random::new(3).shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
