//! Minima of functions without derivatives: Nelder and Mead's simplex in a box.

mod region;
mod simplex;
#[cfg(test)]
mod tests;

use region::Region;
use simplex::Simplex;

/// Tolerances and limits of a search.
#[derive(Clone, Copy, Debug)]
pub struct MinimizeOptions {
    /// Convergence: size of the simplex in every coordinate, as a share of its first size.
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

/// Lowest point found by a search.
#[derive(Clone, Debug)]
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

/// Searches a minimum of `objective` from `start` (Nelder and Mead, The Computer Journal 7, 1965),
/// with the parameters that adapt to the number of coordinates of Gao and Han (Computational
/// Optimization and Applications 51, 2012, equation 4.1).
///
/// `bounds` are the lowest and highest value of each coordinate, both finite. A start outside is
/// moved to the nearest point within. The search runs in unbounded coordinates that a smooth
/// function maps into the bounds, so `objective` is never called outside, and the simplex does not
/// collapse onto an edge as with clamped points. Coordinates with one possible value are not
/// searched. A NaN of the function counts as infinite.
pub fn nelder_mead(
    objective: impl FnMut(&[f64]) -> f64,
    start: &[f64],
    bounds: &[(f64, f64)],
    options: &MinimizeOptions,
) -> Minimum {
    let mut simplex = Simplex::new(objective, Region::new(start, bounds), options);
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
    Minimum { point, value, evaluations: simplex.evaluations(), converged }
}

impl MinimizeOptions {
    fn value_tolerance(&self, lowest: f64) -> f64 {
        self.f_tolerance * (1.0 + lowest.abs())
    }
}
