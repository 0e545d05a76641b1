//! Lead time by which a vCPU is raised before an announced timer.

use rtvirtio_units::Nanos;

/// Step of the estimate after a raise that took longer.
const UP: Nanos = Nanos::from_micros(3);
/// Divisor of [`UP`] for the step back after a faster raise, so that the estimate settles at the
/// 75th percentile (Robbins and Monro, 1951). Slower raises have the fixed time; a higher
/// percentile costs more of the budget.
const DOWN: u64 = 3;

/// Time before an announced timer at which the host begins to raise the vCPU: a fixed time for the
/// vCPU itself, which must get its core and handle pending work, and the time that recent raises
/// took from when they were due. The latter depends on the host, its load and the number of VMs
/// that are monitored, so it is measured.
#[derive(Clone, Copy, Debug)]
pub struct Lead {
    fixed: Nanos,
    raise: Nanos,
}

impl Lead {
    /// Limit of the measured part. It bounds the cost of an announced timer to the neighbours.
    pub const MAX: Nanos = Nanos::from_micros(100);

    /// A lead without any measured raise yet.
    #[must_use]
    pub fn new(fixed: Nanos) -> Self {
        Self { fixed, raise: Nanos(0) }
    }

    /// Records the time of a raise, from when it was due.
    pub fn took(&mut self, raise: Nanos) {
        let moved =
            if raise > self.raise { self.raise.0 + UP.0 } else { self.raise.0.saturating_sub(UP.0 / DOWN) };
        self.raise = Nanos(moved).min(Self::MAX);
    }

    /// Lead time, fixed and measured parts together.
    #[must_use]
    pub fn get(&self) -> Nanos {
        Nanos(self.fixed.0.saturating_add(self.raise.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_settles_at_what_most_raises_take() {
        let us = Nanos::from_micros;
        let mut lead = Lead::new(us(50));
        assert_eq!(lead.get(), us(50));
        let mut late = 0;
        for i in 0..20_000_u64 {
            // 30 to 79 us, and each 200th stalls.
            let raise = if i % 200 == 0 { us(5000) } else { us(30 + i * 7 % 50) };
            lead.took(raise);
            late += u64::from(i > 2000 && raise > lead.get());
        }
        assert_eq!(late, 89, "the stalls only");
        assert!((us(105).0..=us(130).0).contains(&lead.get().0), "{}", lead.get());
        // The lead falls again, and has a bound.
        (0..2000).for_each(|_| lead.took(us(20)));
        assert!(lead.get() < us(75), "{}", lead.get());
        (0..2000).for_each(|_| lead.took(Nanos(u64::MAX)));
        assert_eq!(lead.get().0, us(50).0 + Lead::MAX.0);
    }
}
