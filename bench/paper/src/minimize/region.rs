//! The bounds of a search, and the smooth map into them from unbounded coordinates.
//!
//! The maps follow MINUIT (James and Roos, Computer Physics Communications 10, 1975, section 4).
//! They are symmetric around a bound, so a minimum on the bound is a smooth minimum inside.

use super::MAGNITUDE_MAX;

/// Map from an unbounded number to a coordinate.
#[derive(Clone, Copy)]
enum Map {
    Free,
    /// From the bound upwards (`scale` > 0) or downwards (`scale` < 0).
    OneSided {
        bound: f64,
        scale: f64,
    },
    TwoSided {
        low: f64,
        range: f64,
    },
}

/// A coordinate with more than one possible value.
struct Axis {
    /// Index in the point.
    index: usize,
    map: Map,
    low: f64,
    high: f64,
    /// First size of the simplex.
    size: f64,
}

/// Bounds of the search, and its start within them.
pub(super) struct Region {
    start: Vec<f64>,
    axes: Vec<Axis>,
}

impl Map {
    fn new(start: f64, low: f64, high: f64, size: f64) -> Self {
        let scale = |distance: f64| if distance > 0.0 { distance } else { size };
        match (low > -MAGNITUDE_MAX, high < MAGNITUDE_MAX) {
            (false, false) => Self::Free,
            (true, false) => Self::OneSided { bound: low, scale: scale(start - low) },
            (false, true) => Self::OneSided { bound: high, scale: -scale(high - start) },
            (true, true) => Self::TwoSided { low, range: high - low },
        }
    }

    /// Maps an unbounded number to its coordinate.
    fn inwards(self, t: f64) -> f64 {
        match self {
            Self::Free => t,
            // sqrt(t² + 1) - 1, without cancellation at the bound.
            Self::OneSided { bound, scale } => bound + scale * (t * t / ((t * t + 1.0).sqrt() + 1.0)),
            Self::TwoSided { low, range } => low + range * t.sin().powi(2),
        }
    }

    /// Maps a coordinate within the bounds to an unbounded number.
    fn outwards(self, x: f64) -> f64 {
        match self {
            Self::Free => x,
            Self::OneSided { bound, scale } => {
                let distance = (x - bound) / scale;
                (distance * (distance + 2.0)).sqrt()
            }
            Self::TwoSided { low, range } => ((x - low) / range).clamp(0.0, 1.0).sqrt().asin(),
        }
    }
}

impl Region {
    /// From checked arguments; an empty slice means no bounds.
    pub(super) fn new(start: &[f64], bounds: &[(f64, f64)], step: f64) -> Self {
        let mut region = Self { start: start.to_vec(), axes: Vec::new() };
        for (index, x) in region.start.iter_mut().enumerate() {
            let (low, high) = bounds.get(index).copied().unwrap_or((f64::NEG_INFINITY, f64::INFINITY));
            let (low, high) = (low.max(-MAGNITUDE_MAX), high.min(MAGNITUDE_MAX));
            *x = x.clamp(low, high);
            if low < high {
                let bounded = low > -MAGNITUDE_MAX && high < MAGNITUDE_MAX;
                let size = step * if bounded { high - low } else { magnitude(*x) };
                region.axes.push(Axis { index, map: Map::new(*x, low, high, size), low, high, size });
            }
        }
        region
    }

    /// Number of coordinates to search.
    pub(super) fn dims(&self) -> usize {
        self.axes.len()
    }

    /// Start of the search in unbounded coordinates.
    pub(super) fn free_start(&self) -> Vec<f64> {
        self.axes.iter().map(|axis| axis.map.outwards(self.start[axis.index])).collect()
    }

    /// Point for unbounded coordinates up to [`MAGNITUDE_MAX`].
    pub(super) fn point(&self, free: &[f64]) -> Vec<f64> {
        let mut point = self.start.clone();
        for (axis, t) in self.axes.iter().zip(free) {
            // Clamped because rounding may lead out of the bounds.
            point[axis.index] = axis.map.inwards(*t).clamp(axis.low, axis.high);
        }
        point
    }

    /// Unbounded coordinate at a distance of one first size along an axis, forwards or backwards,
    /// whichever stays within the bounds.
    pub(super) fn neighbour(&self, axis: usize, free: f64, direction: f64) -> f64 {
        let axis = &self.axes[axis];
        let x = axis.map.inwards(free);
        let there = x + direction * axis.size;
        // The size is at most half of the range: if one side is outside, the other is not.
        let inside = (axis.low..=axis.high).contains(&there);
        let there = if inside { there } else { x - direction * axis.size };
        axis.map.outwards(there.clamp(axis.low, axis.high))
    }
}

fn magnitude(x: f64) -> f64 {
    if x == 0.0 { 1.0 } else { x.abs() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_are_inverse_and_stay_inside() {
        let none = f64::INFINITY;
        for (low, high, points) in [
            (-none, none, [-7.0, 0.0, 3.0]),
            (2.0, none, [2.0, 2.0 + 1e-9, 90.0]),
            (-none, -1.0, [-50.0, -1.5, -1.0]),
            (-3.0, 5.0, [-3.0, 4.9, 5.0]),
            (0.0, 1e-6, [0.0, 1e-9, 1e-6]),
        ] {
            for start in points {
                let region = Region::new(&[9.0, start], &[(9.0, 9.0), (low, high)], 0.1);
                assert_eq!(region.dims(), 1);
                let back = region.point(&region.free_start());
                assert!(back[0] == 9.0 && (back[1] - start).abs() <= 1e-15 * (1.0 + start.abs()), "{back:?}");
                for t in [-1e150, -7.7, -1.0, 0.0, 1e-9, 0.4, 100.0, 1e150] {
                    let x = region.point(&[t])[1];
                    assert!(x >= low && x <= high && x.is_finite(), "{t}: {x} in {low} to {high}");
                }
                let next = region.point(&[region.neighbour(0, region.free_start()[0], 1.0)])[1];
                let distance = (next - start).abs() / region.axes[0].size;
                assert!((distance - 1.0).abs() < 1e-6, "{start}: {next}");
            }
        }
    }

    #[test]
    fn rounding_does_not_lead_out_of_the_box() {
        let mut random = rtvirtio_stats::Random::new(1);
        for _ in 0..2000 {
            let (low, high) = (random.unit() - 1.0, random.unit());
            let region = Region::new(&[low], &[(low, high)], 0.1);
            let x = region.point(&[std::f64::consts::FRAC_PI_2])[0];
            assert!(x <= high && high - x < 1e-15, "{x} {high}");
        }
    }
}
