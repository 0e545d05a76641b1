//! Options of the search.

use std::sync::Arc;

use rtvirtio_model::{Config, Elevator, HostModel, ModelKind};
use rtvirtio_units::{Bytes, Nanos, Ratio};

use crate::{Placements, PlanError};

/// Margin that counts unless set otherwise ([`PlanOptions::enough`]): with it a prediction four
/// times too low still meets the target, and the slice model aims to be within three.
const ENOUGH: f64 = 0.75;

/// Default of [`PlanOptions::enough`] for upper bounds, which hold for all but one run in a hundred
/// already. Limited until its victim's bound was a quarter of the target, a neighbour had 10
/// requests per second left where the slice model leaves 290. Not 0, because a search for a bound
/// that is just allowed also finds where the bound errs (`docs/explanation/models.md`).
const ENOUGH_OF_BOUND: f64 = 0.25;

/// Options of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct PlanOptions {
    /// Kind of the predicting model; it also decides the scheme.
    pub model: ModelKind,
    /// Model that was learned on this host; [`ModelKind::Bound`] needs it.
    pub learned: Option<Arc<HostModel>>,
    /// Knobs and values that may be used.
    pub space: Space,
    /// The configuration in force. Its values are always allowed.
    pub start: Config,
    /// Positions of the VMs among I/O cgroups: which weights compare, which limits act from above.
    pub placements: Placements,
    /// Margin that a target needs to count as met: predicted <= target * (1 - safety).
    pub safety: Ratio,
    /// Share of a target up to which margin counts, so that changes and tighter limits on VMs
    /// without targets are made for it. `None` leaves it to the model: 75 %, 25 % of upper bounds.
    pub enough: Option<Ratio>,
    /// Most configurations to evaluate, over the whole of [`crate::plan`].
    pub budget: u64,
}

/// Knobs and values that a search may use; empty lists leave a knob as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Space {
    /// Host elevators that the device offers.
    pub elevators: Vec<Elevator>,
    /// Values of the host's `slice_idle`.
    pub slice_idle: Vec<Nanos>,
    /// Values of the host's `timeout_sync`.
    pub timeout_sync: Vec<Nanos>,
    /// Values of the host's `max_budget`; `None` lets BFQ choose.
    pub max_budget: Vec<Option<Bytes>>,
    /// Whether `low_latency` may be set to 0.
    pub low_latency: bool,
    /// Weights of VMs, rising.
    pub weights: Vec<u32>,
    /// Whether VMs without targets may be capped, and others where the device cannot carry all
    /// declared rates.
    pub caps: bool,
    /// Whether knobs inside guests may be set.
    pub guests: bool,
}

impl Default for Space {
    /// The RT-VirtIO paper's Table II and more: no idling, shorter slices and budgets, the other
    /// elevators, caps, guests. Weights as in the paper, although the kernel takes 1 to 1000:
    /// against a flood 700 to 1 keeps a tail of 1 ms for a minute, but not for five
    /// (`docs/explanation/models.md`, Where it is weak).
    fn default() -> Self {
        Self {
            elevators: vec![Elevator::Bfq, Elevator::None, Elevator::MqDeadline, Elevator::Kyber],
            slice_idle: [0, 1, 2, 4, 6, 8].map(Nanos::from_millis).to_vec(),
            timeout_sync: [8, 16, 32, 64, 124].map(Nanos::from_millis).to_vec(),
            max_budget: vec![None, Some(Bytes::from_kib(512)), Some(Bytes::from_kib(2048))],
            low_latency: true,
            weights: vec![50, 100, 150, 250, 300, 500, 700],
            caps: true,
            guests: true,
        }
    }
}

impl PlanOptions {
    /// The default search from the configuration in force: slice model, whole space, 20 % safety,
    /// margin up to 75 %.
    #[must_use]
    pub fn new(start: Config) -> Self {
        Self {
            model: ModelKind::Slice,
            learned: None,
            space: Space::default(),
            start,
            placements: Placements::default(),
            safety: Ratio(0.2),
            enough: None,
            budget: 50_000,
        }
    }

    /// Our search on the upper bound over the whole space. No safety margin: the bound has its own.
    #[must_use]
    pub fn bound(start: Config, learned: Arc<HostModel>) -> Self {
        Self { model: ModelKind::Bound, learned: Some(learned), safety: Ratio(0.0), ..Self::new(start) }
    }

    /// Margin beyond which more does not count, 0 to 1.
    #[must_use]
    pub fn enough(&self) -> f64 {
        let of_model = if self.model == ModelKind::Bound { ENOUGH_OF_BOUND } else { ENOUGH };
        self.enough.map_or(of_model, |said| said.0)
    }

    pub(crate) fn check(&self) -> Result<(), PlanError> {
        let bad = |what: &str| Err(PlanError::BadOptions(what.to_owned()));
        if !(0.0..1.0).contains(&self.safety.0) {
            return bad("the safety margin must be at least 0 % and below 100 %");
        }
        if !(0.0..1.0).contains(&self.enough()) {
            return bad("the margin that is worth something must be at least 0 % and below 100 %");
        }
        if self.space.weights.iter().any(|w| !(1..=1000).contains(w)) {
            return bad("weights must be 1 to 1000");
        }
        if self.budget == 0 {
            return bad("the budget must allow at least one evaluation");
        }
        Ok(())
    }
}
