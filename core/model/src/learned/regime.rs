//! Regimes of the host's scheduler in which tails behave differently.

use rtvirtio_spec::Spec;

use crate::types::{Config, Elevator};

/// Regimes in which tails behave differently. The bound is judged in each, and calibrated in two
/// classes of them (`docs/explanation/models.md` says why).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Regime {
    /// BFQ idles and all tasks have a rate.
    Idling,
    /// BFQ idles, and a neighbour has no rate.
    IdlingWithUnpacedNeighbour,
    /// BFQ does not idle and all tasks have a rate: requests wait only for other requests.
    NonIdling,
    /// BFQ does not idle, and a neighbour has no rate.
    NonIdlingWithUnpacedNeighbour,
}

impl Regime {
    /// All regimes, in the order of [`Regime::category`].
    pub const ALL: [Self; 4] = [
        Self::Idling,
        Self::IdlingWithUnpacedNeighbour,
        Self::NonIdling,
        Self::NonIdlingWithUnpacedNeighbour,
    ];

    /// The regime of a configuration.
    #[must_use]
    pub fn from_config(spec: &Spec, config: &Config) -> Self {
        let idles =
            config.elevator == Elevator::Bfq && (config.bfq.slice_idle.0 > 0 || config.bfq.strict_guarantees);
        let unpaced = spec.tasks().any(|(_, t)| t.rate.is_none());
        match (idles, unpaced) {
            (true, false) => Self::Idling,
            (true, true) => Self::IdlingWithUnpacedNeighbour,
            (false, false) => Self::NonIdling,
            (false, true) => Self::NonIdlingWithUnpacedNeighbour,
        }
    }

    /// Index of the regime in [`Regime::ALL`].
    #[must_use]
    pub fn category(self) -> usize {
        self as usize
    }

    /// Whether requests wait for requests only, never for BFQ's idling.
    #[must_use]
    pub fn is_non_idling(self) -> bool {
        matches!(self, Self::NonIdling | Self::NonIdlingWithUnpacedNeighbour)
    }

    /// Short name for tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Idling => "BFQ idling",
            Self::IdlingWithUnpacedNeighbour => "BFQ idling, neighbour",
            Self::NonIdling => "not idling",
            Self::NonIdlingWithUnpacedNeighbour => "not idling, neighbour",
        }
    }
}
