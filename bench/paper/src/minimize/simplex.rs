//! The simplex of Nelder and Mead, and its moves.

use super::MinimizeOptions;
use super::region::Region;

/// A point in unbounded coordinates, and the function's value there.
struct Corner {
    value: f64,
    free: Vec<f64>,
}

/// Lengths of the moves, in units of the distance between the worst corner and the centroid of the
/// others.
struct Moves {
    expand: f64,
    contract: f64,
    shrink: f64,
}

/// Corners, one more than coordinates, sorted by value from the lowest.
pub(super) struct Simplex<'a, F> {
    objective: F,
    region: Region,
    options: &'a MinimizeOptions,
    moves: Moves,
    corners: Vec<Corner>,
    /// First size in each coordinate.
    sizes: Vec<f64>,
    evaluations: usize,
}

/// Largest number of evaluations of one move: a reflection, a contraction, and a shrink of all but
/// the best corner.
fn move_cost(dims: usize) -> usize {
    dims + 2
}

impl Moves {
    /// Gao and Han's equation 4.1. In 1 dimension it would shrink to a point, so that of 2 is used,
    /// which is the original method's.
    fn for_dimensions(dims: usize) -> Self {
        let n = dims.max(2) as f64;
        Self { expand: 1.0 + 2.0 / n, contract: 0.75 - 0.5 / n, shrink: 1.0 - 1.0 / n }
    }
}

impl<'a, F: FnMut(&[f64]) -> f64> Simplex<'a, F> {
    pub(super) fn new(objective: F, region: Region, options: &'a MinimizeOptions) -> Self {
        let moves = Moves::for_dimensions(region.dims());
        let start = region.free_start();
        let (corners, sizes) = (Vec::new(), Vec::new());
        let mut simplex = Self { objective, region, options, moves, corners, sizes, evaluations: 0 };
        let first = simplex.corner(start);
        simplex.build(first, 1.0);
        simplex
    }

    /// Lowest value so far.
    pub(super) fn lowest(&self) -> f64 {
        self.corners[0].value
    }

    pub(super) fn evaluations(&self) -> usize {
        self.evaluations
    }

    /// Point with the lowest value.
    pub(super) fn best_point(&self) -> Vec<f64> {
        self.region.point(&self.corners[0].free)
    }

    /// Builds a fresh simplex at the best corner; `false` if too few evaluations are left to move
    /// it.
    pub(super) fn restart(&mut self, direction: f64) -> bool {
        let dims = self.region.dims();
        if !self.can_afford(dims + move_cost(dims)) {
            return false;
        }
        let best = self.corners.swap_remove(0);
        self.build(best, direction);
        true
    }

    /// Moves until it has converged to a finite value (`true`), or no move is possible.
    pub(super) fn run(&mut self) -> bool {
        while !self.is_small() {
            if !self.can_afford(move_cost(self.region.dims())) {
                return false;
            }
            self.advance();
        }
        self.lowest().is_finite()
    }

    fn can_afford(&self, evaluations: usize) -> bool {
        self.options.max_evaluations - self.evaluations >= evaluations
    }

    fn corner(&mut self, free: Vec<f64>) -> Corner {
        self.evaluations += 1;
        let value = (self.objective)(&self.region.point(&free));
        Corner { value: if value.is_nan() { f64::INFINITY } else { value }, free }
    }

    fn build(&mut self, first: Corner, direction: f64) {
        let start = first.free.clone();
        self.corners.clear();
        self.corners.push(first);
        self.sizes.clear();
        for (axis, t) in start.iter().enumerate() {
            let mut free = start.clone();
            free[axis] = self.region.neighbour(axis, *t, direction);
            self.sizes.push((free[axis] - t).abs());
            let corner = self.corner(free);
            self.corners.push(corner);
        }
        self.sort();
    }

    /// Stable sort, so that the order of equal values is defined too.
    fn sort(&mut self) {
        self.corners.sort_by(|a, b| a.value.total_cmp(&b.value));
    }

    fn is_small(&self) -> bool {
        let best = &self.corners[0];
        let small = |(index, (x, size)): (usize, (&f64, &f64))| {
            let limit = self.options.x_tolerance * size + 4.0 * f64::EPSILON * x.abs();
            self.corners.iter().all(|corner| (corner.free[index] - x).abs() <= limit)
        };
        let worst = self.worst();
        // The difference of equal infinite values is NaN.
        let flat = worst == best.value || worst - best.value <= self.options.value_tolerance(best.value);
        flat && best.free.iter().zip(&self.sizes).enumerate().all(small)
    }

    fn worst(&self) -> f64 {
        self.corners.last().map_or(f64::INFINITY, |corner| corner.value)
    }

    /// Replaces the worst corner, or all but the best.
    fn advance(&mut self) {
        let centroid = self.centroid();
        let reflected = self.along(&centroid, 1.0);
        let second_worst = self.corners[self.corners.len() - 2].value;
        if reflected.value < self.lowest() {
            let expanded = self.along(&centroid, self.moves.expand);
            self.replace_worst(if expanded.value < reflected.value { expanded } else { reflected });
        } else if reflected.value < second_worst {
            self.replace_worst(reflected);
        } else {
            let outside = reflected.value < self.worst();
            let contract = if outside { self.moves.contract } else { -self.moves.contract };
            let contracted = self.along(&centroid, contract);
            if contracted.value < self.worst() && (!outside || contracted.value <= reflected.value) {
                self.replace_worst(contracted);
            } else {
                self.shrink();
            }
        }
        self.sort();
    }

    /// Centroid of all corners but the worst.
    fn centroid(&self) -> Vec<f64> {
        let others = &self.corners[..self.corners.len() - 1];
        let mean = |index| others.iter().map(|corner| corner.free[index]).sum::<f64>() / others.len() as f64;
        (0..self.region.dims()).map(mean).collect()
    }

    /// Point on the line from the worst corner through the centroid, `times` their distance beyond
    /// it.
    fn along(&mut self, centroid: &[f64], times: f64) -> Corner {
        let worst = &self.corners[self.corners.len() - 1].free;
        let free = centroid.iter().zip(worst).map(|(c, w)| c + times * (c - w)).collect();
        self.corner(free)
    }

    fn replace_worst(&mut self, corner: Corner) {
        self.corners.pop();
        self.corners.push(corner);
    }

    fn shrink(&mut self) {
        let best = self.corners[0].free.clone();
        for index in 1..self.corners.len() {
            let free = self.corners[index].free.iter().zip(&best);
            let free = free.map(|(x, b)| b + self.moves.shrink * (x - b)).collect();
            self.corners[index] = self.corner(free);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moves_are_the_classic_ones_in_2_dimensions_and_smaller_in_more() {
        for (dims, expected) in [(1, [2.0, 0.5, 0.5]), (2, [2.0, 0.5, 0.5]), (4, [1.5, 0.625, 0.75])] {
            let moves = Moves::for_dimensions(dims);
            assert_eq!([moves.expand, moves.contract, moves.shrink], expected);
        }
    }

    #[test]
    fn moves_go_where_the_paper_says() {
        // In tenths of the first size, from the start: its corners are (0, 0), (0.1, 0), (0, 0.1).
        let new_corner = |objective: fn(f64, f64) -> f64| {
            let options =
                MinimizeOptions { x_tolerance: 1e-7, f_tolerance: 1e-12, max_evaluations: 99, restarts: 0 };
            let region = Region::new(&[0.5, 0.5], &[(0.0, 1.0); 2]);
            let origin = region.free_start()[0];
            let size = region.neighbour(0, origin, 1.0) - origin;
            let units = |t: f64| 0.1 * (t - origin) / size;
            let free = |x: f64| units(x.sqrt().asin());
            let mut simplex = Simplex::new(|x: &[f64]| objective(free(x[0]), free(x[1])), region, &options);
            let first: Vec<Vec<f64>> = simplex.corners.iter().map(|corner| corner.free.clone()).collect();
            simplex.advance();
            let moved = simplex.corners.iter().filter(|corner| !first.contains(&corner.free));
            let moved: Vec<[f64; 2]> = moved.map(|c| [units(c.free[0]), units(c.free[1])]).collect();
            (moved, simplex.evaluations)
        };
        let near = |(corners, evaluations): (Vec<[f64; 2]>, usize), expected: [f64; 2], cost| {
            let off = corners[0].iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(corners.len() == 1 && off < 1e-12 && evaluations == cost, "{corners:?} {evaluations}");
        };
        // The reflection is (0.1, 0.1), the expansion twice as far.
        near(new_corner(|x, y| -x - y), [0.15, 0.15], 5);
        // The worst is (0, 0.1); contracted inside if (0.1, -0.1) is not better, else outside.
        near(new_corner(|x, y| x.powi(2) + 2.0 * y.powi(2)), [0.025, 0.05], 5);
        near(new_corner(|x, y| x.powi(2) + 2.0 * (y + 0.02).powi(2)), [0.075, -0.05], 5);
    }
}
