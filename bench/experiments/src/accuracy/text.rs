//! Accuracy for a terminal.

use std::fmt::Write as _;

use super::judge::Accuracy;

use super::calibrate::Calibration;
use super::claims::rates;
use super::sizes::Size;

/// Scores, coverage, rates and the learning curve.
pub fn accuracy(device: &str, a: &Accuracy, curve: &[Accuracy]) -> String {
    let mut s = format!(
        "{device}: {} runs with {} tasks, each judged by a model fitted on at most {} others\n\n",
        a.held_out,
        a.held.len(),
        a.trained
    );
    let _ = writeln!(
        s,
        "{:<22} {:>5} {:>10} {:>8} {:>8} {:>8} {:>12} {:>14}",
        "model", "n", "median p/a", "factor", "p90", "below", "error ms", "in -500..0 ms"
    );
    for m in &a.scores {
        let _ = writeln!(
            s,
            "{:<22} {:>5} {:>10.2} {:>8.2} {:>8.1} {:>7.1}% {:>12.1} {:>13.1}%",
            m.model,
            m.n,
            m.bias,
            m.factor,
            m.factor_p90,
            100.0 * m.underestimated,
            m.error_ms,
            100.0 * m.paper_band
        );
    }
    let _ = writeln!(
        s,
        "\nupper bound: {:.2}% of {} below it ({:.2} to {:.2}% at 95%), median upper/actual {:.2}",
        100.0 * a.coverage,
        a.held.len(),
        100.0 * a.coverage_interval[0],
        100.0 * a.coverage_interval[1],
        a.sharpness
    );
    if let Some(w) = &a.with_host {
        let _ = writeln!(
            s,
            "tails are less the host's own stalls; as measured {:.2}% of {} are below the bound plus {:.1} ms, median of that/actual {:.2}",
            100.0 * w.coverage,
            w.n,
            w.adds_ms,
            w.sharpness
        );
    }
    for (name, n, ratio) in &a.sharpness_by_regime {
        let _ = writeln!(s, "  {name:<24} n {n:>5}  upper/actual {ratio:.2}");
    }
    for (_, place, rates, _) in rates(a) {
        let _ = writeln!(
            s,
            "rates where BFQ {place}: {} of {} tasks that were to keep theirs did not, {} of {} that kept theirs were doubted",
            rates.broken, rates.promised, rates.refused, rates.kept
        );
    }
    s.push_str("worst groups:");
    for (name, n, share) in a.groups.iter().take(4) {
        let _ = write!(s, "  {name} {:.1}% of {n}", 100.0 * share);
    }
    s.push_str("\n\nlearning curve: runs, typical factor, coverage, upper/actual\n");
    for c in curve {
        let _ = writeln!(
            s,
            "  {:>5} {:>6.2} {:>7.2}% {:>6.2}",
            c.trained,
            c.scores[0].factor,
            100.0 * c.coverage,
            c.sharpness
        );
    }
    s
}

/// The paper's Fig. 3: a line for each number of layers.
pub fn loss(sizes: &[Size]) -> String {
    let Some(first) = sizes.first() else { return String::new() };
    let mut s = format!(
        "\nthe paper's network on {} tasks of its kind of runs, mean squared error of folds not learned from, s^2, by neurons in each hidden layer\n",
        first.n
    );
    for of in sizes.chunk_by(|a, b| a.layers == b.layers) {
        let _ = write!(s, "  {} hidden:", of[0].layers);
        for size in of {
            let _ = write!(s, "  {}: {:.3}", size.neurons, size.loss);
        }
        s.push('\n');
    }
    s
}

/// The analytical model's coefficients.
pub fn calibration(c: &Calibration) -> String {
    let mut s = format!(
        "\nanalytical model fitted on {} runs under BFQ, {} tasks: typical factor {:.2} with Table III, {:.2} fitted; R2 {:.2}\n",
        c.runs, c.tasks, c.factor[0], c.factor[1], c.r_squared
    );
    for f in &c.fits {
        let limit = if f.at_limit { "  at its limit: the runs do not determine it" } else { "" };
        let _ = writeln!(
            s,
            "  {:<12} {:>8.3}  95% {:.3} to {:.3}  Table III {}{limit}",
            f.name, f.value, f.interval[0], f.interval[1], f.published
        );
    }
    let used: Vec<String> = c.in_use().iter().map(|(name, value)| format!("{name} {value:.3}")).collect();
    let _ = writeln!(
        s,
        "  models use {} (Table III where the runs do not determine one, the others fitted again with it fixed)",
        used.join(", ")
    );
    let residuals: Vec<String> = c.residuals.iter().map(|r| format!("{:.2}", r.exp())).collect();
    let _ = writeln!(s, "  measured / predicted, deciles: {}", residuals.join(" "));
    s
}
