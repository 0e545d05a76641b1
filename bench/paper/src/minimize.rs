//! Minima of functions without derivatives: Nelder and Mead's simplex in a box.

mod region;
mod simplex;
#[cfg(test)]
mod tests;

use region::Region;
use simplex::Simplex;

/// Step, tolerances and limits of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MinimizeOptions {
    /// First size of the simplex in each coordinate, in (0, 0.5]: a share of the box where that is
    /// finite, else of the start's magnitude (of 1 where the start is 0).
    pub step: f64,
    /// Convergence: size of the simplex in every coordinate, as a share of its first size (in the
    /// coordinates of [`nelder_mead`] without bounds).
    pub x_tolerance: f64,
    /// Convergence: difference of the values at the corners, in units of (1 + magnitude of the
    /// lowest).
    pub f_tolerance: f64,
    /// Limit of evaluations of the function; at least 2 for each free coordinate, plus 3.
    pub max_evaluations: usize,
    /// Limit of restarts with a fresh simplex at the minimum found: they leave points where a
    /// simplex has collapsed. One that finds nothing better ends the search.
    pub restarts: usize,
}

impl Default for MinimizeOptions {
    fn default() -> Self {
        Self { step: 0.1, x_tolerance: 1e-7, f_tolerance: 1e-12, max_evaluations: 10_000, restarts: 3 }
    }
}

/// Lowest point found by a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Minimum {
    /// Coordinates of the point, inside the bounds.
    pub point: Vec<f64>,
    /// Value of the function there; infinite if it was NaN everywhere.
    pub value: f64,
    /// Number of evaluations of the function.
    pub evaluations: usize,
    /// Whether the last simplex met both tolerances at a finite value before the evaluations ran
    /// out. The minimum may be local.
    pub converged: bool,
}

/// Invalid arguments of a search.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum MinimizeError {
    /// The start has no coordinate.
    #[error("there is nothing to vary: the start has no coordinates")]
    Empty,
    /// A coordinate of the start is not finite.
    #[error("coordinate {index} of the start is not finite")]
    Start {
        /// Index of the coordinate, from 0.
        index: usize,
    },
    /// Start and bounds have different numbers of coordinates.
    #[error("{found} bounds for {expected} coordinates")]
    Bounds {
        /// Number of bounds given.
        found: usize,
        /// Number of coordinates of the start.
        expected: usize,
    },
    /// The bounds of a coordinate contain no number.
    #[error("the bounds {low} to {high} of coordinate {index} hold no number of sane size")]
    Bound {
        /// Index of the coordinate, from 0.
        index: usize,
        /// Lower bound as given.
        low: f64,
        /// Upper bound as given.
        high: f64,
    },
    /// An option is out of range.
    #[error("{name} = {value}: must be {allowed}")]
    Option {
        /// Name of the option.
        name: &'static str,
        /// Value as given by the caller.
        value: f64,
        /// Allowed range, in words.
        allowed: &'static str,
    },
    /// The evaluations do not suffice for one move of the simplex.
    #[error("{found} evaluations are too few: at least {needed} are needed")]
    Budget {
        /// Number of evaluations allowed.
        found: usize,
        /// Least number of evaluations.
        needed: usize,
    },
}

/// Searches a minimum of `objective` from `start` (Nelder and Mead, The Computer Journal 7, 1965),
/// with the parameters that adapt to the number of coordinates of Gao and Han (Computational
/// Optimization and Applications 51, 2012, equation 4.1).
///
/// `bounds` are the lowest and highest value of each coordinate, infinite where there is none; an
/// empty slice means no bounds. A start outside is moved to the nearest point within. The search
/// runs in unbounded coordinates that a smooth function maps into the bounds, so `objective` is
/// never called outside, and the simplex does not collapse onto an edge as with clamped points.
/// Coordinates with one possible value are not searched; magnitudes beyond [`MAGNITUDE_MAX`] are
/// not reached. A NaN of the function counts as infinite.
///
/// # Errors
///
/// An invalid start, bounds or options; see [`MinimizeError`].
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
        // False if a bound is NaN.
        let holds_a_number = low <= high && low <= MAGNITUDE_MAX && high >= -MAGNITUDE_MAX;
        if !holds_a_number {
            return Err(MinimizeError::Bound { index, low, high });
        }
    }
    Ok(())
}
