//! Minima of functions without derivatives: Nelder and Mead's simplex in a box.

mod region;
mod simplex;
#[cfg(test)]
mod tests;

use region::Region;
use simplex::Simplex;

/// How to search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MinimizeOptions {
    /// First size of the simplex in each coordinate, in (0, 0.5]: a share of the box where that is
    /// finite, else of the start's magnitude (of 1 where the start is 0).
    pub step: f64,
    /// The simplex has to shrink to this share of its first size in every coordinate (as
    /// transformed by the bounds, see [`nelder_mead`]).
    pub x_tolerance: f64,
    /// Values at the corners have to differ by at most this times (1 + the magnitude of the
    /// lowest).
    pub f_tolerance: f64,
    /// Most evaluations of the function; at least 2 for each coordinate that can vary, plus 3.
    pub max_evaluations: usize,
    /// Most fresh simplexes around the minimum found: they leave points where a simplex has
    /// collapsed. A fresh one that finds nothing better ends the search.
    pub restarts: usize,
}

impl Default for MinimizeOptions {
    fn default() -> Self {
        Self { step: 0.1, x_tolerance: 1e-7, f_tolerance: 1e-12, max_evaluations: 10_000, restarts: 3 }
    }
}

/// The lowest point that was found.
#[derive(Clone, Debug, PartialEq)]
pub struct Minimum {
    /// Where; inside the box.
    pub point: Vec<f64>,
    /// The function there; infinite if it was nowhere a number.
    pub value: f64,
    /// How often the function was evaluated.
    pub evaluations: usize,
    /// Whether the last simplex met both tolerances at a finite value, before the evaluations ran
    /// out. It may be a local minimum.
    pub converged: bool,
}

/// A search that cannot start.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MinimizeError {
    /// There is no coordinate.
    #[error("there is nothing to vary: the start has no coordinates")]
    Empty,
    /// The start is not a point.
    #[error("coordinate {index} of the start is not finite")]
    Start {
        /// The coordinate, from 0.
        index: usize,
    },
    /// The box has another number of coordinates.
    #[error("{found} bounds for {expected} coordinates")]
    Bounds {
        /// Bounds given.
        found: usize,
        /// Coordinates of the start.
        expected: usize,
    },
    /// The box is empty in a coordinate.
    #[error("the bounds {low} to {high} of coordinate {index} hold no number of sane size")]
    Bound {
        /// The coordinate, from 0.
        index: usize,
        /// Its lower bound.
        low: f64,
        /// Its upper bound.
        high: f64,
    },
    /// An option has no meaning.
    #[error("{name} = {value}: must be {allowed}")]
    Option {
        /// The option.
        name: &'static str,
        /// What was given.
        value: f64,
        /// What is allowed.
        allowed: &'static str,
    },
    /// The evaluations do not suffice for one move of the simplex.
    #[error("{found} evaluations are too few: at least {needed} are needed")]
    Budget {
        /// What was given.
        found: usize,
        /// The least number.
        needed: usize,
    },
}

/// Searches a minimum of `objective` from `start` (Nelder and Mead, The Computer Journal 7, 1965),
/// with the parameters that adapt to the number of coordinates of Gao and Han (Computational
/// Optimization and Applications 51, 2012, equation 4.1).
///
/// `bounds` are the lowest and highest value of each coordinate, infinite where there is none; an
/// empty slice is no bounds at all. A start outside is moved to the nearest point of the box. The
/// search itself runs in free coordinates that a smooth map folds into the box, so the function is
/// never called outside, and the simplex does not collapse onto an edge as it does where points are
/// clamped. Coordinates with one possible value are left out of the search; magnitudes beyond
/// [`MAGNITUDE_MAX`] are not reached. A NaN from the function counts as infinite.
///
/// # Errors
///
/// A start, bounds or options without meaning; see [`MinimizeError`].
pub fn nelder_mead(
    objective: impl FnMut(&[f64]) -> f64,
    start: &[f64],
    bounds: &[(f64, f64)],
    options: &MinimizeOptions,
) -> Result<Minimum, MinimizeError> {
    check_start(start)?;
    check_bounds(bounds, start.len())?;
    let region = Region::new(start, bounds, options.step);
    options.check(region.dims())?;
    let mut simplex = Simplex::new(objective, region, options);
    let mut converged = simplex.run();
    let mut direction = 1.0;
    for _ in 0..options.restarts {
        let before = simplex.lowest();
        direction = -direction;
        if !simplex.restart(direction) {
            break;
        }
        converged = simplex.run();
        if before - simplex.lowest() <= options.value_tolerance(before) {
            break;
        }
    }
    let (point, value) = (simplex.best_point(), simplex.lowest());
    Ok(Minimum { point, value, evaluations: simplex.evaluations(), converged })
}

/// Largest magnitude of a coordinate; bounds beyond it count as none.
pub const MAGNITUDE_MAX: f64 = 1e150;

impl MinimizeOptions {
    fn check(&self, dims: usize) -> Result<(), MinimizeError> {
        let positive = |value: f64| value > 0.0 && value < 1.0;
        for (name, value, ok, allowed) in [
            ("step", self.step, self.step > 0.0 && self.step <= 0.5, "above 0, at most 0.5"),
            ("x_tolerance", self.x_tolerance, positive(self.x_tolerance), "between 0 and 1"),
            ("f_tolerance", self.f_tolerance, positive(self.f_tolerance), "between 0 and 1"),
        ] {
            if !ok {
                return Err(MinimizeError::Option { name, value, allowed });
            }
        }
        let needed = simplex::first_cost(dims) + simplex::move_cost(dims);
        if self.max_evaluations < needed {
            return Err(MinimizeError::Budget { found: self.max_evaluations, needed });
        }
        Ok(())
    }

    fn value_tolerance(&self, lowest: f64) -> f64 {
        self.f_tolerance * (1.0 + lowest.abs())
    }
}

fn check_start(start: &[f64]) -> Result<(), MinimizeError> {
    if start.is_empty() {
        return Err(MinimizeError::Empty);
    }
    match start.iter().position(|value| !value.is_finite()) {
        Some(index) => Err(MinimizeError::Start { index }),
        None => Ok(()),
    }
}

fn check_bounds(bounds: &[(f64, f64)], dims: usize) -> Result<(), MinimizeError> {
    if !bounds.is_empty() && bounds.len() != dims {
        return Err(MinimizeError::Bounds { found: bounds.len(), expected: dims });
    }
    for (index, &(low, high)) in bounds.iter().enumerate() {
        // False for a NaN.
        let holds_a_number = low <= high && low <= MAGNITUDE_MAX && high >= -MAGNITUDE_MAX;
        if !holds_a_number {
            return Err(MinimizeError::Bound { index, low, high });
        }
    }
    Ok(())
}
