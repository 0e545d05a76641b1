//! The tail of one measured point of a profile.

use rtvirtio_units::Nanos;

use crate::types::DepthPoint;

/// A share of the samples, and the latency in s that it exceeds; with their logarithms, in which
/// the tail is linear from point to point.
#[derive(Clone, Copy)]
pub(crate) struct TailPoint {
    /// Name of the statistic, such as `p99`.
    name: &'static str,
    share: f64,
    pub(crate) latency: f64,
    pub(crate) ln_share: f64,
    pub(crate) ln_latency: f64,
}

impl TailPoint {
    fn new(name: &'static str, share: f64, latency: f64) -> Self {
        Self { name, share, latency, ln_share: share.ln(), ln_latency: latency.ln() }
    }

    /// The latency at a part `t`, 0 to 1, of the way to `far` on a logarithmic scale, s.
    pub(crate) fn towards(&self, far: &Self, t: f64) -> f64 {
        (self.ln_latency + t.clamp(0.0, 1.0) * (far.ln_latency - self.ln_latency)).exp()
    }
}

/// Least samples behind a statistic for it to give a frequency; fewer are single events.
const OFTEN: f64 = 10.0;

/// The share beyond p99.99, and rounding. A target beyond it is about events that a profile shows a
/// few times at most, so that all of them count.
pub(crate) const RARE: f64 = 1.000_001e-4;

/// Shares falling, latencies rising, from the median to the maximum; never empty.
#[derive(Clone)]
pub(crate) struct TailCurve {
    pub(crate) points: Vec<TailPoint>,
    /// Number of samples.
    n: f64,
    /// Requests in flight at this point.
    depth: u32,
}

impl TailCurve {
    /// `median` in s, in case the point has none.
    pub(crate) fn new(point: &DepthPoint, median: f64) -> Self {
        let n = point.n.max(1) as f64;
        let mut tail = vec![TailPoint::new("median", 0.5, median)];
        let all = [("p99", 1e-2, point.p99), ("p99.99", 1e-4, point.p9999), ("largest", 1.0 / n, point.max)];
        for (name, exceedance, latency) in all {
            let last = tail[tail.len() - 1];
            // A percentile that n cannot resolve is the maximum; the maximum is the last point by
            // itself.
            if exceedance < last.share && exceedance * n >= 1.0 - 1e-9 {
                tail.push(TailPoint::new(name, exceedance, latency.as_secs_f64().max(last.latency)));
            }
        }
        Self { points: tail, n, depth: point.depth }
    }

    /// The points that show what a share `e` of requests exceeds. Of those beyond it, single events
    /// are left out: a stall that the profile shows once gives no rate of such stalls, so it
    /// decides nothing about the hundredth request.
    pub(crate) fn of_share(&self, e: f64) -> &[TailPoint] {
        if e <= RARE {
            return &self.points;
        }
        let mut kept = 0;
        let mut reached = false;
        for p in &self.points {
            if reached && p.share * self.n < OFTEN {
                break;
            }
            reached |= p.share <= e * 1.000_001;
            kept += 1;
        }
        &self.points[..kept]
    }

    /// The statistics between which a latency lies, for the user: `p99 to p99.99 of 27865 samples`.
    pub(crate) fn named(&self, between: (&TailPoint, &TailPoint)) -> String {
        let (near, far) = (between.0.name, between.1.name);
        let what = if near == far { near.to_owned() } else { format!("{near} to {far}") };
        let depth = if self.depth == 1 { String::new() } else { format!(", {} in flight", self.depth) };
        format!("{what} of {} samples{depth}", self.n)
    }

    /// The largest latency, where the estimate for a share `e` of requests ignores it; else `None`.
    pub(crate) fn left_out(&self, e: f64) -> Option<Nanos> {
        let (last, kept) = (self.points.last()?, self.of_share(e).last()?);
        (last.share < kept.share).then(|| Nanos::from_secs_f64(last.latency))
    }

    /// The latency that a share of the samples exceeds whose logarithm is `ln_e`, s: at least the
    /// median, at most the maximum.
    pub(crate) fn quantile(&self, ln_e: f64) -> f64 {
        for (near, far) in segments(&self.points) {
            if ln_e >= far.ln_share {
                return near.towards(far, (near.ln_share - ln_e) / (near.ln_share - far.ln_share));
            }
        }
        self.points[self.points.len() - 1].latency
    }

    /// The points around the quantile at `ln_e`.
    pub(crate) fn around(&self, ln_e: f64) -> (&TailPoint, &TailPoint) {
        let last = &self.points[self.points.len() - 1];
        segments(&self.points).find(|(_, far)| ln_e >= far.ln_share).map_or((last, last), |(near, far)| {
            if ln_e <= far.ln_share + 1e-6 { (far, far) } else { (near, far) }
        })
    }
}

/// Neighbouring points, the nearer to the median first.
pub(crate) fn segments(points: &[TailPoint]) -> impl DoubleEndedIterator<Item = (&TailPoint, &TailPoint)> {
    points.windows(2).map(|pair| (&pair[0], &pair[1]))
}
