//! Drawing blocks of a series.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::BootstrapError;
use rtvirtio_stats::Random;

/// Method of drawing blocks of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scheme {
    /// Blocks of one length, anywhere inside the series (Künsch, Annals of Statistics 17, 1989).
    Moving,
    /// Blocks of geometric length on the series closed to a circle, which keeps the resample
    /// stationary (Politis and Romano, JASA 89, 1994).
    Stationary,
}

/// A generator of resamples: each one is a list of runs of the series that together have its
/// length.
#[derive(Clone, Debug)]
pub struct Blocks {
    n: usize,
    scheme: Scheme,
    /// Mean length of a block, 1..=n.
    length: f64,
    random: Random,
}

impl Blocks {
    /// Blocks of a mean `length` (rounded up for [`Scheme::Moving`]) from a series of `n` values.
    ///
    /// # Errors
    /// [`BootstrapError::TooFew`] without values, [`BootstrapError::BadSetting`] for a length
    /// below 1, or not finite. A length above `n` counts as `n`.
    pub fn new(n: usize, scheme: Scheme, length: f64, seed: u64) -> Result<Self, BootstrapError> {
        if n == 0 {
            return Err(BootstrapError::TooFew { have: 0, need: 1 });
        }
        if !(length.is_finite() && length >= 1.0) {
            return Err(BootstrapError::BadSetting("the block length is a finite number from 1"));
        }
        Ok(Self { n, scheme, length: length.min(n as f64), random: Random::new(seed) })
    }

    /// Draws the next resample into `runs`, whose former content is dropped.
    pub fn draw(&mut self, runs: &mut Vec<Range<usize>>) {
        runs.clear();
        let mut missing = self.n;
        while missing > 0 {
            missing -= match self.scheme {
                Scheme::Moving => self.moving(missing, runs),
                Scheme::Stationary => self.stationary(missing, runs),
            };
        }
    }

    /// Adds one block of at most `missing` values; returns how many.
    fn moving(&mut self, missing: usize, runs: &mut Vec<Range<usize>>) -> usize {
        let block = self.length.ceil() as usize;
        let start = self.random.below(self.n - block + 1);
        let length = block.min(missing);
        runs.push(start..start + length);
        length
    }

    /// Adds one block of at most `missing` values, in two runs where it passes the end; returns how
    /// many.
    fn stationary(&mut self, missing: usize, runs: &mut Vec<Range<usize>>) -> usize {
        let start = self.random.below(self.n);
        let length = self.geometric().min(missing);
        let first = length.min(self.n - start);
        runs.push(start..start + first);
        if first < length {
            runs.push(0..length - first);
        }
        length
    }

    /// A geometric number from 1 with the mean length, by inversion.
    fn geometric(&mut self) -> usize {
        if self.length <= 1.0 {
            return 1;
        }
        let u = self.random.unit();
        (((1.0 - u).ln() / (-1.0 / self.length).ln_1p()).floor() as usize).saturating_add(1)
    }
}
