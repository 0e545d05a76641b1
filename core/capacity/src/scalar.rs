//! Capacity as integers that a cluster scheduler may add up.

use serde::{Deserialize, Serialize};

/// A thousandth of what a host can promise of one resource. Shares taken are rounded up, so that no
/// sum is too small.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Permille(pub u32);

/// Everything that a host has of one resource.
pub const WHOLE: Permille = Permille(1000);

/// Covers the rounding of floats below a whole thousandth.
const ROUNDING: f64 = 1e-9;

impl Permille {
    /// Rounded up; more than 1000 wholes, or NaN, counts as 1000 wholes.
    #[must_use]
    pub fn taken(share: f64) -> Self {
        let most = 1000 * WHOLE.0;
        if share <= 0.0 {
            return Self(0);
        }
        let permille = (share * f64::from(WHOLE.0) + ROUNDING).ceil();
        // NaN is not below `most`.
        Self(if permille < f64::from(most) { permille as u32 } else { most })
    }

    /// Fraction of the whole, 1.0 for [`WHOLE`].
    #[must_use]
    pub fn share(self) -> f64 {
        f64::from(self.0) / f64::from(WHOLE.0)
    }
}

impl std::ops::Add for Permille {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl std::iter::Sum for Permille {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self(0), |a, b| a + b)
    }
}

/// Share of one host that one contract takes, or several together: contracts fit with at most
/// [`WHOLE`] of each resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scalars {
    /// Share of each disk, in the host's order.
    pub disks: Vec<Permille>,
    /// Share of each network, in the host's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<Permille>,
    /// Part of the share of each CPU that contracts may have.
    pub cpu: Permille,
}

impl Scalars {
    /// Scalars of no contract on a host with so many disks and networks.
    #[must_use]
    pub fn none(disks: usize, networks: usize) -> Self {
        Self { disks: vec![Permille(0); disks], networks: vec![Permille(0); networks], cpu: Permille(0) }
    }

    /// Adds another contract's scalars on the same host.
    pub fn add(&mut self, other: &Self) {
        self.parts(other).for_each(|(a, b)| *a = *a + *b);
        self.cpu = self.cpu + other.cpu;
    }

    /// Subtracts one contract's scalars, not below 0.
    pub fn subtract(&mut self, other: &Self) {
        let less = |a: Permille, b: Permille| Permille(a.0.saturating_sub(b.0));
        self.parts(other).for_each(|(a, b)| *a = less(*a, *b));
        self.cpu = less(self.cpu, other.cpu);
    }

    fn parts<'s>(&'s mut self, other: &'s Self) -> impl Iterator<Item = (&'s mut Permille, &'s Permille)> {
        let networks = self.networks.iter_mut().zip(&other.networks);
        self.disks.iter_mut().zip(&other.disks).chain(networks)
    }

    /// Whether contracts with this sum are certainly admitted.
    #[must_use]
    pub fn fit(&self) -> bool {
        self.largest() <= WHOLE
    }

    /// Share of the scarcest resource.
    #[must_use]
    pub fn largest(&self) -> Permille {
        self.disks.iter().chain(&self.networks).copied().fold(self.cpu, Permille::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_rounded_up_and_never_overflow() {
        assert_eq!((Permille::taken(0.0), Permille::taken(1e-12)), (Permille(0), Permille(1)));
        assert_eq!(Permille::taken(0.5), Permille(501));
        assert_eq!(Permille::taken(0.5001), Permille(501));
        for none in [f64::INFINITY, f64::NAN, 1e30] {
            assert!(Permille::taken(none) > WHOLE, "{none}");
        }
        let sum: Permille = [Permille(u32::MAX), Permille(1)].into_iter().sum();
        assert_eq!(sum, Permille(u32::MAX));
    }
}
