//! A Gaussian process with a few dozen points at most: solved directly.

/// Deviation of a model's log error: a factor of e either way.
const DEVIATION: f64 = 1.0;
/// Deviation of one measured log score: tails of short runs vary by a third.
const NOISE: f64 = 0.3;

/// Zero-mean process with the squared-exponential kernel and unit length.
#[derive(Clone, Debug, Default)]
pub(super) struct Process {
    places: Vec<Vec<f64>>,
    values: Vec<f64>,
}

impl Process {
    pub(super) fn add(&mut self, place: Vec<f64>, value: f64) {
        if value.is_finite() {
            self.places.push(place);
            self.values.push(value);
        }
    }

    /// Mean and standard deviation at these coordinates.
    pub(super) fn at(&self, place: &[f64]) -> (f64, f64) {
        let n = self.values.len();
        if n == 0 {
            return (0.0, DEVIATION);
        }
        let k: Vec<f64> = self.places.iter().map(|p| kernel(p, place)).collect();
        let mut matrix: Vec<Vec<f64>> =
            (0..n).map(|i| (0..n).map(|j| kernel(&self.places[i], &self.places[j])).collect()).collect();
        for (i, row) in matrix.iter_mut().enumerate() {
            row[i] += NOISE * NOISE;
        }
        let lower = cholesky(matrix);
        let weights = solve(&lower, &self.values);
        let spread = solve(&lower, &k);
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(x, y)| x * y).sum::<f64>();
        let variance = DEVIATION * DEVIATION - dot(&k, &spread);
        (dot(&k, &weights), variance.max(0.0).sqrt())
    }
}

fn kernel(a: &[f64], b: &[f64]) -> f64 {
    let square: f64 = a.iter().zip(b).map(|(x, y)| (x - y) * (x - y)).sum();
    DEVIATION * DEVIATION * (-0.5 * square).exp()
}

/// Lower triangle L with L L^T = `m`. The noise on the diagonal keeps `m` positive definite.
fn cholesky(mut m: Vec<Vec<f64>>) -> Vec<Vec<f64>> {
    for i in 0..m.len() {
        for j in 0..=i {
            let sum: f64 = (0..j).map(|k| m[i][k] * m[j][k]).sum();
            m[i][j] = if i == j { (m[i][i] - sum).max(1e-12).sqrt() } else { (m[i][j] - sum) / m[j][j] };
        }
    }
    m
}

/// Solves L L^T x = b.
fn solve(lower: &[Vec<f64>], b: &[f64]) -> Vec<f64> {
    let n = b.len();
    let mut x = b.to_vec();
    for i in 0..n {
        let sum: f64 = (0..i).map(|k| lower[i][k] * x[k]).sum();
        x[i] = (x[i] - sum) / lower[i][i];
    }
    for i in (0..n).rev() {
        let sum: f64 = (i + 1..n).map(|k| lower[k][i] * x[k]).sum();
        x[i] = (x[i] - sum) / lower[i][i];
    }
    x
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_knows_what_it_saw_and_forgets_with_distance() {
        let mut p = Process::default();
        p.add(vec![0.0, 0.0], 2.0);
        p.add(vec![0.0, 0.0], 2.0);
        let (near, sure) = p.at(&[0.0, 0.0]);
        let (far, unsure) = p.at(&[5.0, 0.0]);
        assert!((near - 2.0).abs() < 0.15 && sure < 0.25, "{near} {sure}");
        assert!(far.abs() < 0.01 && (unsure - DEVIATION).abs() < 0.01, "{far} {unsure}");
    }

    #[test]
    fn two_observations_match_the_closed_form() {
        let mut p = Process::default();
        p.add(vec![0.0], 1.0);
        p.add(vec![1.0], -1.0);
        // By symmetry the middle is 0, and with c = exp(-1/2): mean at 0 is (1 - c) / (1 +
        // noise^2 - c).
        let c = (-0.5f64).exp();
        assert!(p.at(&[0.5]).0.abs() < 1e-12);
        assert!((p.at(&[0.0]).0 - (1.0 - c) / (1.0 + NOISE * NOISE - c)).abs() < 1e-12);
    }
}
