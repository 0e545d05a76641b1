//! Size that the paper's network needs: its Fig. 3, loss over layers and neurons.

use rtvirtio_learn::dataset::Point;
use rtvirtio_paper::ensemble::{EnsembleError, EnsembleOptions};
use rtvirtio_paper::mlp::Loss;
use rtvirtio_paper::network::{self, fit, rows};
use serde::Serialize;

/// Numbers of hidden layers that are tried.
const LAYERS: [usize; 3] = [1, 2, 3];
/// Neurons of each hidden layer.
const NEURONS: [usize; 7] = [1, 2, 5, 10, 15, 20, 30];

/// A network of one size.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Size {
    /// Number of hidden layers.
    pub layers: usize,
    /// Neurons of each hidden layer.
    pub neurons: usize,
    /// Tasks that the loss is the mean of.
    pub n: usize,
    /// Mean squared error over tasks, each predicted by the network of the fold that did not learn
    /// from its condition, s^2.
    pub loss: f64,
}

/// The loss of each size on the runs of the paper's kind; empty with too few of them for the folds.
pub fn loss_by_size(points: &[Point], seed: u64, epochs: usize) -> Result<Vec<Size>, EnsembleError> {
    let rows = rows(points);
    let n = rows.len();
    let mut out = Vec::new();
    for (layers, neurons) in LAYERS.into_iter().flat_map(|l| NEURONS.map(|n| (l, n))) {
        let options = network::options(epochs, seed, Loss::Squared);
        let options = EnsembleOptions { hidden: vec![neurons; layers], ..options };
        let Some((_, out_of_fold)) = fit(&rows, &options)? else { return Ok(Vec::new()) };
        let errors = rows.iter().zip(&out_of_fold).map(|(r, p)| (r.actual - p) * (r.actual - p));
        out.push(Size { layers, neurons, n, loss: errors.sum::<f64>() / n as f64 });
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use rtvirtio_learn::synthetic::{limits, synthetic_runs};
    use rtvirtio_units::Nanos;

    use super::*;
    use rtvirtio_learn::dataset::Outcome;
    use rtvirtio_learn::design::paper_conditions;

    #[test]
    fn a_network_of_one_neuron_cannot_follow_a_tail_that_rises_and_falls() {
        assert_eq!(loss_by_size(&[], 1, 60).unwrap(), [], "no runs, no folds");
        let like = synthetic_runs(1, 0.0, 6).remove(0);
        let points: Vec<Point> = paper_conditions(80, &limits(), 6)
            .into_iter()
            .map(|c| {
                // One extreme in the middle: a hinge has none.
                let idle = c.knobs.slice_idle.0 as f64 / 1e6;
                let tail = Nanos::from_secs_f64(2.1 - (idle - 4.5).abs() / 2.0);
                let outcome = Outcome { p9999: tail, ..like.results[0].clone() };
                let results = c.vms.iter().flatten().map(|_| outcome.clone()).collect();
                Point { knobs: c.knobs, vms: c.vms, results, ..like.clone() }
            })
            .collect();
        let sizes = loss_by_size(&points, 1, 60).unwrap();
        let loss = |layers, neurons| {
            sizes.iter().find(|s| (s.layers, s.neurons) == (layers, neurons)).map(|s| s.loss).unwrap()
        };
        assert_eq!(sizes.len(), 21);
        assert!(loss(1, 1) > 1.5 * loss(2, 15), "{sizes:?}");
    }
}
