//! How well models predict whether a task keeps its declared rate: a plan needs the rate as much as
//! the tail, and a rate that is doubted without need rules out good settings.

use rtvirtio_measure::verdict::RATE_KEPT;
use serde::Serialize;

use crate::held_out::HeldOut;

/// Tasks whose rate was predicted and then measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Rates {
    /// Tasks that were to keep their rate, which is [`RATE_KEPT`] of it.
    pub promised: usize,
    /// Tasks of these that did not.
    pub broken: usize,
    /// Tasks that kept their rate.
    pub kept: usize,
    /// Those of them that were not to.
    pub refused: usize,
}

impl Rates {
    /// Counts tasks.
    pub fn of<'a>(held: impl IntoIterator<Item = &'a HeldOut>) -> Self {
        let mut all = Self::default();
        for h in held {
            let (promised, kept) = (h.expected_kept >= RATE_KEPT, h.kept >= RATE_KEPT);
            all.promised += usize::from(promised);
            all.broken += usize::from(promised && !kept);
            all.kept += usize::from(kept);
            all.refused += usize::from(kept && !promised);
        }
        all
    }

    /// Share of the promises that were broken, 0 to 1; 0 of none.
    #[must_use]
    pub fn broken_share(&self) -> f64 {
        self.broken as f64 / self.promised.max(1) as f64
    }

    /// Share of the kept rates that were doubted, 0 to 1; 0 of none.
    #[must_use]
    pub fn refused_share(&self) -> f64 {
        self.refused as f64 / self.kept.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_model::Elevator;

    use super::*;

    fn held(kept: f64, expected_kept: f64) -> HeldOut {
        HeldOut {
            id: "run".to_owned(),
            task: 0,
            vms: 1,
            regime: "not idling",
            elevator: Elevator::None,
            writes: false,
            load: 0.1,
            actual_ms: 1.0,
            with_host_ms: 1.0,
            expected_ms: 1.0,
            upper_ms: 2.0,
            upper_with_host_ms: None,
            extrapolated: false,
            slice_ms: 1.0,
            analytical_ms: None,
            fitted_ms: None,
            mlp_ms: None,
            host_stall_ms: 0.0,
            kept,
            expected_kept,
        }
    }

    #[test]
    fn promises_and_doubts_are_counted_apart() {
        let all = [held(1.0, 0.995), held(0.992, 0.98), held(0.5, 0.99), held(0.1, 0.2)];
        let rates = Rates::of(&all);
        assert_eq!(rates, Rates { promised: 2, broken: 1, kept: 2, refused: 1 });
        assert_eq!((rates.broken_share(), rates.refused_share()), (0.5, 0.5));
        let none = Rates::of(&[]);
        assert_eq!((none, none.broken_share(), none.refused_share()), (Rates::default(), 0.0, 0.0));
    }
}
