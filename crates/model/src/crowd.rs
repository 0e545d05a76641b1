//! What a request meets while floods fill the device: latencies as the profile measured them with as many in flight.
//!
//! Requests in flight times the device's time for one is what an ideal server makes them wait. A device that others share, or whose requests take CPU time, has a
//! tail of its own when it is full, which one request at a time never shows: on a virtual disk one in 10 000 took 0.8 ms alone and 4.4 ms among 32, of which
//! waiting for 32 explains 0.5.

use rtvirtio_spec::Op;

use crate::load::Flow;
use crate::tail_curve::TailCurve;
use crate::types::{DepthPoint, Profile};

/// The measured tails by direction and size.
pub(crate) struct Crowds {
    read: Crowd,
    write: Crowd,
    /// Of the larger requests, and by how many bytes they are larger.
    large: Option<(Crowd, Crowd, f64)>,
    /// Bytes of the others.
    block: f64,
}

/// The tails of requests of one direction and size, by requests in flight, rising.
struct Crowd(Vec<(f64, TailCurve)>);

impl Crowd {
    fn of(points: &[DepthPoint]) -> Self {
        let usable = points.iter().filter(|p| p.depth > 0 && p.p50.0 > 0);
        let mut by_depth: Vec<(f64, TailCurve)> =
            usable.map(|p| (f64::from(p.depth), TailCurve::new(p, p.p50.as_secs_f64()))).collect();
        by_depth.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self(by_depth)
    }

    /// Latency that a share of requests exceeds whose logarithm is `ln_e`, with `depth` in flight, s. Between the measured depths it is a line in logarithms;
    /// beyond the last one it stays. More in flight never take less: where they did, what disturbed the smaller depth was not the crowd.
    fn quantile(&self, depth: f64, ln_e: f64) -> f64 {
        let mut above: Option<(f64, f64)> = None;
        for (d, curve) in self.0.iter().rev() {
            let least = above.map_or(f64::INFINITY, |(_, latency)| latency);
            let here = curve.quantile(ln_e).min(least);
            if *d <= depth {
                let Some((next, latency)) = above else { return here };
                let t = (depth / d).ln() / (next / d).ln();
                return (here.ln() + t * (latency.ln() - here.ln())).exp();
            }
            above = Some((*d, here));
        }
        above.map_or(0.0, |(_, latency)| latency)
    }
}

impl Crowds {
    pub(crate) fn of(profile: &Profile) -> Self {
        let large = profile.large.as_ref().filter(|l| l.block > profile.block);
        Self {
            read: Crowd::of(&profile.read),
            write: Crowd::of(&profile.write),
            large: large.map(|l| {
                (Crowd::of(&l.read), Crowd::of(&l.write), (l.block.0 - profile.block.0) as f64)
            }),
            block: profile.block.0 as f64,
        }
    }

    /// Latency above which a share `exceedance` of the requests of another task lies while `flood` comes and goes, s; 0 where it is in flight more
    /// rarely than that.
    ///
    /// ```text
    /// latency = quantile of the flood's kind, with as many in flight as it may have, at exceedance / share
    /// share   = 1, of a flood that a limit holds: rate * time for one
    /// ```
    pub(crate) fn latency(&self, flood: &Flow, exceedance: f64) -> f64 {
        let share = if flood.flood { 1.0 } else { (flood.rate * flood.exclusive()).min(1.0) };
        if exceedance >= share {
            return 0.0;
        }
        let ln_e = (exceedance / share).ln();
        let of = |small: &Crowd, large: Option<&Crowd>| {
            let small = small.quantile(flood.burst(), ln_e);
            let (Some(large), Some((.., more))) = (large, &self.large) else { return small };
            let bytes = (flood.block - self.block).max(0.0);
            small + (large.quantile(flood.burst(), ln_e) - small).max(0.0) * bytes / more
        };
        let read = || of(&self.read, self.large.as_ref().map(|(read, ..)| read));
        let write = || of(&self.write, self.large.as_ref().map(|(_, write, _)| write));
        match flood.op {
            Op::Read => read(),
            Op::Write => write(),
            Op::Mixed { .. } => read().max(write()),
        }
    }
}
