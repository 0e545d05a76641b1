//! The tail of one measured point of a profile.

use crate::types::DepthPoint;

/// A share of the samples, and the latency in s that it lies above; with their logarithms, in which
/// the tail is a line from point to point.
#[derive(Clone, Copy)]
pub(crate) struct TailPoint {
    share: f64,
    pub(crate) latency: f64,
    pub(crate) ln_share: f64,
    pub(crate) ln_latency: f64,
}

impl TailPoint {
    fn new(share: f64, latency: f64) -> Self {
        Self { share, latency, ln_share: share.ln(), ln_latency: latency.ln() }
    }

    /// The latency at a part `t`, 0 to 1, of the way to `far` on a logarithmic scale, s.
    pub(crate) fn towards(&self, far: &Self, t: f64) -> f64 {
        (self.ln_latency + t.clamp(0.0, 1.0) * (far.ln_latency - self.ln_latency)).exp()
    }
}

/// Shares falling, latencies rising, from the median to the maximum; never empty.
#[derive(Clone)]
pub(crate) struct TailCurve(Vec<TailPoint>);

impl TailCurve {
    /// `median` in s, which the point may lack.
    pub(crate) fn new(point: &DepthPoint, median: f64) -> Self {
        let n = point.n.max(1) as f64;
        let mut tail = vec![TailPoint::new(0.5, median)];
        for (exceedance, latency) in [(1e-2, point.p99), (1e-4, point.p9999), (1.0 / n, point.max)] {
            let last = tail[tail.len() - 1];
            // A percentile that n cannot resolve is the maximum; the maximum stands for itself as
            // the last point.
            if exceedance < last.share && exceedance * n >= 1.0 - 1e-9 {
                tail.push(TailPoint::new(exceedance, latency.as_secs_f64().max(last.latency)));
            }
        }
        Self(tail)
    }

    /// Neighbouring points, the nearer to the median first.
    pub(crate) fn segments(&self) -> impl DoubleEndedIterator<Item = (&TailPoint, &TailPoint)> {
        self.0.windows(2).map(|pair| (&pair[0], &pair[1]))
    }

    /// The latency that a share of the samples exceeds whose logarithm is `ln_e`, s: at least the
    /// median, at most the maximum.
    pub(crate) fn quantile(&self, ln_e: f64) -> f64 {
        for (near, far) in self.segments() {
            if ln_e >= far.ln_share {
                return near.towards(far, (near.ln_share - ln_e) / (near.ln_share - far.ln_share));
            }
        }
        self.0[self.0.len() - 1].latency
    }
}
