//! What runs in which BFQ does not idle teach, by themselves.
//!
//! Where requests wait for requests the slice model is right within a factor of two or three, and
//! two runs of one condition differ by a fifth; where BFQ idles, which task waits is chance. One
//! forest with one calibration for both gives the first the width of the second
//! (`docs/explanation/models.md`, The learned models, has the figures). So these runs have a forest
//! of their own, which learns only how far the slice model is off, and a calibration of their own.

use rtvirtio_stats::conformal::Quantile;
use rtvirtio_stats::forest::{Forest, ForestError, Scratch};
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use super::estimate::{Estimate, check_bound, check_forest, estimate};
use super::features::{LN_SLICE, SLICE_KEPT, WIDTH};

/// The part of a learned model that is of runs in which BFQ does not idle.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NonIdlingModel {
    /// ln(latency / latency by the slice model) of the measured tasks, each with the share of its
    /// declared rate that was lost beyond what the slice model says, -1 to 1.
    pub forest: Forest,
    /// Level of the forest's quantile that the bound starts from, 0 to 1.
    pub high: f64,
    /// Calibrated score `ln(latency) - high quantile`, at the confidence of the whole model.
    pub bound: Quantile,
    /// What the host's own stalls add here, as [`super::HostModel::host_stalls`] says of the rest.
    pub host_stalls: Option<Nanos>,
}

impl NonIdlingModel {
    /// Checks what was read; the error says what is damaged. `miss` is the share of runs that the
    /// whole model's bound may miss.
    pub(super) fn check(&self, miss: f64) -> Result<(), String> {
        let here = |what: String| format!("where BFQ does not idle, {what}");
        if self.bound.miss != miss {
            return Err(here("its bound has another confidence".to_owned()));
        }
        check_forest(&self.forest, self.high, -1.0..=1.0)
            .and_then(|()| check_bound(&self.bound))
            .map_err(here)
    }

    /// Its estimate of one row.
    pub(super) fn estimate(
        &self,
        row: &[f64; WIDTH],
        scratch: &mut Scratch,
    ) -> Result<Estimate, ForestError> {
        Ok(estimate(&self.forest, self.high, row, scratch)?.beyond(row[LN_SLICE], 1.0 - row[SLICE_KEPT]))
    }
}
