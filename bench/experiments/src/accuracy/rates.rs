//! Accuracy of predicting whether a task keeps its declared rate: a plan needs the rate as much as
//! the tail, and a rate doubted without need rules out good settings.

use rtvirtio_measure::verdict::RATE_KEPT;
use serde::Serialize;

use super::held_out::HeldOut;

/// Tasks whose rate was predicted and then measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Rates {
    /// Tasks predicted to keep their rate, which is [`RATE_KEPT`] of it.
    pub promised: usize,
    /// Tasks of `Rates::promised` that did not keep their rate.
    pub broken: usize,
    /// Tasks that kept their rate.
    pub kept: usize,
    /// Tasks of `Rates::kept` predicted not to keep their rate.
    pub refused: usize,
}

impl Rates {
    /// Counts predictions and outcomes of held-out tasks.
    pub fn from_held_out<'a>(held: impl IntoIterator<Item = &'a HeldOut>) -> Self {
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

    /// Share of broken promises, 0 to 1; 0 without promises.
    #[must_use]
    pub fn broken_share(&self) -> f64 {
        self.broken as f64 / self.promised.max(1) as f64
    }

    /// Share of the kept rates that were predicted lost, 0 to 1; 0 without kept rates.
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
        let rates = Rates::from_held_out(&all);
        assert_eq!(rates, Rates { promised: 2, broken: 1, kept: 2, refused: 1 });
        assert_eq!((rates.broken_share(), rates.refused_share()), (0.5, 0.5));
        let none = Rates::from_held_out(&[]);
        assert_eq!((none, none.broken_share(), none.refused_share()), (Rates::default(), 0.0, 0.0));
    }
}
