//! Predictions of runs in QEMU guests by models that learned from other guests too.

use std::fmt::Write as _;
use std::sync::Arc;

use super::judge::{Accuracy, HeldOut, Models, judge};
use crate::claims::Claim;
use rtvirtio_learn::dataset::Point;
use rtvirtio_learn::train::{TrainError, TrainSettings, fit_guests, median};
use rtvirtio_model::learned::GuestModel;
use rtvirtio_model::{HostModel, Profile};

/// Runs in guests, each judged by a model that learned from guests of other conditions.
pub struct FromGuests {
    accuracy: Accuracy,
    /// Fewest runs in guests that one of the models learned from.
    from: usize,
    /// Least confidence of their bounds.
    pub confidence: f64,
}

impl FromGuests {
    /// `unseen` are models of process VMs with the guests' runs of conditions that each has not
    /// seen; it learns from all others of `runs`.
    pub fn evaluate(
        unseen: &[(Models, Vec<Point>)],
        (runs, profile): (&[Point], &Profile),
        settings: &TrainSettings,
    ) -> Result<Self, TrainError> {
        let with_guests = |(models, test): &(Models, Vec<Point>)| {
            let is_new = |run: &&Point| !test.iter().any(|t| t.does_the_same(run));
            let other_runs: Vec<Point> = runs.iter().filter(is_new).cloned().collect();
            let guests = fit_guests(&other_runs, &models.host, profile.guest.as_ref(), settings)?;
            let host = Arc::new(HostModel { guests: Some(guests), ..HostModel::clone(&models.host) });
            Ok((Models { host, paper: models.paper.clone() }, test.clone()))
        };
        let judged = unseen.iter().map(with_guests).collect::<Result<Vec<_>, TrainError>>()?;
        let parts = || judged.iter().filter_map(|(models, _)| models.host.guests.as_ref());
        Ok(Self {
            accuracy: judge(&judged, profile)?,
            from: parts().map(|g| g.points).min().unwrap_or(0),
            confidence: parts().map(GuestModel::confidence).fold(1.0, f64::min),
        })
    }

    /// Tails whose bound is not extrapolated: its confidence holds for these.
    fn inside(&self) -> Vec<&HeldOut> {
        self.accuracy.held.iter().filter(|h| !h.extrapolated).collect()
    }

    /// Number of tails whose bound is extrapolated, and of these above it.
    fn outside(&self) -> (usize, usize) {
        let outside: Vec<&HeldOut> = self.accuracy.held.iter().filter(|h| h.extrapolated).collect();
        (outside.len(), outside.iter().filter(|h| above(h)).count())
    }

    /// Share of tails below the bound, and median of the bound over the tail.
    fn bound(&self) -> (f64, f64) {
        let inside = self.inside();
        let below = inside.iter().filter(|h| !above(h)).count();
        let ratios = inside.iter().map(|h| h.upper_ms / h.with_host_ms.max(1e-6)).collect();
        (below as f64 / inside.len().max(1) as f64, median(ratios))
    }

    /// Typical factor, coverage and sharpness for a terminal.
    pub fn text(&self) -> String {
        let a = &self.accuracy;
        let ((coverage, sharpness), (guessed, missed)) = (self.bound(), self.outside());
        let mut s = format!(
            "  learned from guests too, each judged by a model from at least {} others: typical factor {:.2}, {:.1}% of {} tails below the bound at {:.0} %, upper/actual {sharpness:.2}\n",
            self.from,
            a.scores[0].factor,
            100.0 * coverage,
            self.inside().len(),
            100.0 * self.confidence,
        );
        if guessed > 0 {
            let _ = writeln!(
                s,
                "  {guessed} more lie outside of what those learned from: their bounds are widened and not proven, {missed} tails are above"
            );
        }
        for h in a.held.iter().filter(|h| above(h)) {
            let _ = writeln!(s, "    {}", is_above(h, h.upper_ms));
        }
        s
    }

    /// The claims; `on` names the host.
    pub fn claims(&self, on: &str) -> [Claim; 3] {
        let (a, (coverage, sharpness)) = (&self.accuracy, self.bound());
        let of = format!("in {} runs of QEMU guests ({on})", a.held_out);
        let (n, (guessed, _), from) = (self.inside().len(), self.outside(), self.from);
        let what = format!(
            "tails {of} below the bound at {:.0} % of models learned from at least {from} other runs in guests, without {guessed} tails outside of what was learned from",
            100.0 * self.confidence
        );
        let sharp = format!("median of that bound over the tail {of}");
        let factor =
            format!("typical factor by which the expected tail {of} is wrong, learned from guests too");
        [
            Claim::new("accuracy.guests.coverage", what, coverage, "share", n).at_least(self.confidence),
            Claim::new("accuracy.guests.sharpness", sharp, sharpness, "ratio", n),
            Claim::new("accuracy.guests.factor", factor, a.scores[0].factor, "ratio", a.held.len()),
        ]
    }
}

/// Whether a tail is above its bound, both with the host's own stalls.
fn above(h: &HeldOut) -> bool {
    h.with_host_ms > h.upper_ms
}

/// A line on a tail above `upper`, its bound in ms.
pub fn is_above(h: &HeldOut, upper: f64) -> String {
    let (id, task, tail) = (&h.id, h.task, h.with_host_ms);
    format!("above it: {id} task {task} ({}), {tail:.1} ms over {upper:.1} ms", h.regime)
}
