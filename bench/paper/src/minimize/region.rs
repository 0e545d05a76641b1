//! The bounds of a search, and the smooth map into them from unbounded coordinates.
//!
//! The map follows MINUIT (James and Roos, Computer Physics Communications 10, 1975, section 4).
//! It is symmetric around a bound, so a minimum on the bound is a smooth minimum inside.

/// First size of the simplex in each coordinate, as a share of the box.
const STEP: f64 = 0.1;

/// A coordinate with more than one possible value.
struct Axis {
    /// Index in the point.
    index: usize,
    low: f64,
    high: f64,
}

/// Bounds of the search, and its start within them.
pub(super) struct Region {
    start: Vec<f64>,
    axes: Vec<Axis>,
}

impl Axis {
    fn range(&self) -> f64 {
        self.high - self.low
    }

    /// Maps an unbounded number to its coordinate.
    fn inwards(&self, t: f64) -> f64 {
        // Clamped because rounding may lead out of the bounds.
        (self.low + self.range() * t.sin().powi(2)).clamp(self.low, self.high)
    }

    /// Maps a coordinate within the bounds to an unbounded number.
    fn outwards(&self, x: f64) -> f64 {
        ((x - self.low) / self.range()).clamp(0.0, 1.0).sqrt().asin()
    }
}

impl Region {
    /// From a start and the lowest and highest value of each of its coordinates.
    pub(super) fn new(start: &[f64], bounds: &[(f64, f64)]) -> Self {
        let within = start.iter().zip(bounds).map(|(x, (low, high))| x.clamp(*low, *high));
        let axes = bounds.iter().enumerate().filter(|(_, (low, high))| low < high);
        let axes = axes.map(|(index, &(low, high))| Axis { index, low, high });
        Self { start: within.collect(), axes: axes.collect() }
    }

    /// Number of coordinates to search.
    pub(super) fn dims(&self) -> usize {
        self.axes.len()
    }

    /// Start of the search in unbounded coordinates.
    pub(super) fn free_start(&self) -> Vec<f64> {
        self.axes.iter().map(|axis| axis.outwards(self.start[axis.index])).collect()
    }

    /// Point for unbounded coordinates.
    pub(super) fn point(&self, free: &[f64]) -> Vec<f64> {
        let mut point = self.start.clone();
        for (axis, t) in self.axes.iter().zip(free) {
            point[axis.index] = axis.inwards(*t);
        }
        point
    }

    /// Unbounded coordinate at a distance of one first size along an axis, forwards or backwards,
    /// whichever stays within the bounds.
    pub(super) fn neighbour(&self, axis: usize, free: f64, direction: f64) -> f64 {
        let axis = &self.axes[axis];
        let (x, size) = (axis.inwards(free), STEP * axis.range());
        let there = x + direction * size;
        // The size is at most half of the range: if one side is outside, the other is not.
        let inside = (axis.low..=axis.high).contains(&there);
        let there = if inside { there } else { x - direction * size };
        axis.outwards(there.clamp(axis.low, axis.high))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_map_is_inverse_and_stays_inside() {
        for (low, high, points) in
            [(-3.0, 5.0, [-3.0, 4.9, 5.0]), (0.0, 1e-6, [0.0, 1e-9, 1e-6]), (-8.0, 2.0, [-7.0, 0.0, 1.5])]
        {
            for start in points {
                let region = Region::new(&[9.0, start], &[(9.0, 9.0), (low, high)]);
                assert_eq!(region.dims(), 1);
                let back = region.point(&region.free_start());
                assert!(back[0] == 9.0 && (back[1] - start).abs() <= 1e-14 * (1.0 + start.abs()), "{back:?}");
                for t in [-1e150, -7.7, -1.0, 0.0, 1e-9, 0.4, 100.0, 1e150] {
                    let x = region.point(&[t])[1];
                    assert!(x >= low && x <= high && x.is_finite(), "{t}: {x} in {low} to {high}");
                }
                let next = region.point(&[region.neighbour(0, region.free_start()[0], 1.0)])[1];
                let distance = (next - start).abs() / (STEP * (high - low));
                assert!((distance - 1.0).abs() < 1e-6, "{start}: {next}");
            }
        }
    }

    #[test]
    fn rounding_does_not_lead_out_of_the_box() {
        let mut random = rtvirtio_stats::Random::new(1);
        for _ in 0..2000 {
            let (low, high) = (random.unit() - 1.0, random.unit());
            let x = Region::new(&[low], &[(low, high)]).point(&[std::f64::consts::FRAC_PI_2])[0];
            assert!(x <= high && high - x < 1e-15, "{x} {high}");
        }
    }
}
