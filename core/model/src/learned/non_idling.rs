//! Part of a model for runs in which BFQ does not idle.
//!
//! Without idling the slice model is right within a factor of two or three, and two runs of one
//! condition differ by a fifth; where BFQ idles, which task waits is chance. One forest with one
//! calibration for both gives the first the width of the second (`docs/explanation/models.md`, The
//! learned models, has the figures). So these runs have a forest of their own, which learns only
//! the slice model's error, and a calibration of their own.

use rtvirtio_stats::conformal::Quantile;
use rtvirtio_stats::forest::{Forest, ForestError, Scratch};
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use super::estimate::{Estimate, check_bound, check_forest, estimate};
use super::features::{LN_SLICE, SLICE_KEPT, WIDTH};

/// Part of a learned model for runs in which BFQ does not idle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NonIdlingModel {
    /// ln(latency / latency by the slice model) of the measured tasks, each with the share of its
    /// declared rate that was lost beyond the slice model's forecast, -1 to 1.
    pub forest: Forest,
    /// Level of the forest's quantile that the bound starts from, 0 to 1.
    pub high: f64,
    /// Calibrated score `ln(latency) - high quantile`, at the confidence of the whole model.
    pub bound: Quantile,
    /// Addition for the host's own stalls in these runs, like [`super::HostModel::host_stalls`].
    pub host_stalls: Option<Nanos>,
}

impl NonIdlingModel {
    /// Checks the part as read from a file; the error describes the damage. `miss` is the share of
    /// runs that the whole model's bound may miss.
    pub(super) fn check(&self, miss: f64) -> Result<(), String> {
        let here = |what: String| format!("where BFQ does not idle, {what}");
        if self.bound.miss != miss {
            return Err(here("its bound has another confidence".to_owned()));
        }
        check_forest(&self.forest, self.high, -1.0..=1.0)
            .and_then(|()| check_bound(&self.bound))
            .map_err(here)
    }

    /// Estimate of one row, in absolute terms.
    pub(super) fn estimate(
        &self,
        row: &[f64; WIDTH],
        scratch: &mut Scratch,
    ) -> Result<Estimate, ForestError> {
        Ok(estimate(&self.forest, self.high, row, scratch)?.beyond(row[LN_SLICE], 1.0 - row[SLICE_KEPT]))
    }
}
