//! Reasons not to trust a measured series.

use rtvirtio_model::DepthPoint;
use rtvirtio_stats::Latencies;
use rtvirtio_units::{Nanos, Percentile};

use super::Point;
use super::known::{MARGIN, NOISE, bearable_tail, tail_factor, tail_is_open};

/// Spread of the repetitions above which a point is doubted.
const SPREAD: f64 = 0.15;
/// Rise of p99.99 to the deepest point, relative to that of the depth, which no device causes.
const HELD_UP: f64 = 4.0;
/// Equal rates from which on they are no chance: two short measurements may count as many requests.
const EQUAL: usize = 3;

/// Doubts about one series, most general first.
pub(super) fn doubts(series: &str, summary: &[DepthPoint], points: &[Point]) -> Vec<String> {
    let mut doubts = not_known(series, summary, points);
    let unsteady: Vec<_> = summary.iter().filter(|p| p.spread > SPREAD).collect();
    if let Some(worst) = unsteady.iter().max_by(|a, b| a.spread.total_cmp(&b.spread)) {
        doubts.push(format!(
            "{series}: repetitions differ by up to {:.0} % at depth {}: something else uses the device or the CPUs",
            worst.spread * 100.0,
            list(unsteady.iter().map(|p| p.depth)),
        ));
    }
    for pair in summary.windows(2) {
        let (a, b) = (&pair[0], &pair[1]);
        if b.iops.0 < a.iops.0 * (1.0 - NOISE.max(a.spread).max(b.spread)) {
            doubts.push(format!(
                "{series}: throughput falls from {} at depth {} to {} at depth {}",
                a.iops, a.depth, b.iops, b.depth
            ));
        }
        if (b.p50.0 as f64) < a.p50.0 as f64 * (1.0 - NOISE.max(a.spread).max(b.spread)) {
            doubts.push(format!(
                "{series}: median latency falls from {} at depth {} to {} at depth {}: the device or a CPU was in a sleep state",
                a.p50, a.depth, b.p50, b.depth
            ));
        }
    }
    doubts.extend(held_up(series, summary));
    doubts.extend(identical(series, summary, points));
    for (p, point) in summary.iter().zip(points) {
        if let Some((low, high)) = two_groups(&point.latencies) {
            doubts.push(format!(
                "{series}: at depth {} latencies lie around {low} or above {high} and not between: this looks like a rate \
                 limit (a cloud volume, a cgroup), not like a device",
                p.depth
            ));
            break;
        }
    }
    doubts
}

/// Figures that models read and that are not known to the error that a plan can bear.
pub(super) fn not_known(series: &str, summary: &[DepthPoint], points: &[Point]) -> Vec<String> {
    let mut doubts = Vec::new();
    let both = || summary.iter().zip(points);
    let tails: Vec<_> = both().filter(|(_, point)| tail_is_open(point)).collect();
    if let Some(least) = tails.iter().map(|(p, _)| p.n).min() {
        let worst = tails.iter().map(|(_, point)| tail_factor(point)).fold(0.0, f64::max);
        let worst = if worst < 100.0 { format!("{worst:.1}") } else { "over 100".to_owned() };
        doubts.push(format!(
            "{series}: too few samples for p99.99 at depth {} (at least {least}): it may be {worst} times as long, and a plan bears {:.1}",
            list(tails.iter().map(|(p, _)| p.depth)),
            bearable_tail(),
        ));
    }
    let rates: Vec<_> = both().filter(|(_, point)| point.error > MARGIN).collect();
    if !rates.is_empty() {
        let worst = rates.iter().map(|(_, point)| point.error).fold(0.0, f64::max);
        doubts.push(format!(
            "{series}: the rate at depth {} is known to {:.0} % only, and a plan bears {:.0} %",
            list(rates.iter().map(|(p, _)| p.depth)),
            worst * 100.0,
            MARGIN * 100.0,
        ));
    }
    doubts
}

/// The deepest point determines the effect of a full device on others, and no deeper one corrects
/// it. One standstill delays all requests in flight, so it alone can make one request in 10 000
/// slow there.
pub(super) fn held_up(series: &str, summary: &[DepthPoint]) -> Option<String> {
    let [.., a, b] = summary else { return None };
    let deeper = f64::from(b.depth) / f64::from(a.depth.max(1));
    (b.p9999.0 as f64 > HELD_UP * deeper * a.p9999.0 as f64).then(|| {
        format!(
            "{series}: one request in 10 000 took {} at depth {} and {} at depth {}: something stalled; predictions next to VMs without a limit rest on that, so measure again",
            a.p9999, a.depth, b.p9999, b.depth
        )
    })
}

/// Numbers that are equal to the last digit are not from a measurement, or not from this run.
fn identical(series: &str, summary: &[DepthPoint], points: &[Point]) -> Option<String> {
    let repeated = points.iter().any(|p| p.iops.len() >= EQUAL && p.iops.iter().all(|v| *v == p.iops[0]));
    let across = summary.windows(2).any(|w| w[0].iops == w[1].iops && w[0].p50 == w[1].p50);
    (repeated || across).then(|| format!("{series}: identical numbers in several measurements"))
}

/// Detects a token bucket: most requests are fast, at least one in a hundred is slow, and a factor
/// of four between them is empty. Returns the median and the lower edge of the slow group.
fn two_groups(latencies: &Latencies) -> Option<(Nanos, Nanos)> {
    const EMPTY: f64 = 0.001;
    const SLOW: f64 = 0.01;
    if latencies.n() < 1_000 {
        return None;
    }
    let median = latencies.at(Percentile(50.0));
    let mut low = median.0;
    while low < latencies.at(Percentile(100.0)).0 {
        let high = low.saturating_mul(4);
        let between = latencies.share_between(Nanos(low + low / 100), Nanos(high));
        let above = latencies.share_between(Nanos(high + 1), Nanos(u64::MAX));
        if above < SLOW {
            return None;
        }
        if between < EMPTY {
            return Some((median, Nanos(high)));
        }
        low += (low / 4).max(1);
    }
    None
}

fn list(depths: impl Iterator<Item = u32>) -> String {
    depths.map(|d| d.to_string()).collect::<Vec<_>>().join(", ")
}
