//! Latency of a request while floods fill the device: as the profile measured it with as many
//! requests in flight.
//!
//! On an ideal server requests wait for the requests in flight times the device's time for one. A
//! device that others share, or whose requests take CPU time, has a tail of its own when it is
//! full, which one request at a time never shows: on a virtual disk one in 10 000 took 0.8 ms alone
//! and 4.4 ms among 32, of which waiting for 32 explains 0.5.

use rtvirtio_spec::Op;
use rtvirtio_units::blk_throttle;

use crate::flow::Flow;
use crate::tail_curve::TailCurve;
use crate::types::{DepthPoint, Profile};

/// The measured tails by direction and size.
pub(crate) struct SaturationTails {
    read: DepthTails,
    write: DepthTails,
    /// Tails of the larger requests, and by how many bytes they are larger.
    large: Option<(DepthTails, DepthTails, f64)>,
    /// Bytes of the requests in `read` and `write`.
    block: f64,
}

/// The tails of requests of one direction and size, by requests in flight, rising.
struct DepthTails(Vec<(f64, TailCurve)>);

impl DepthTails {
    fn from_points(points: &[DepthPoint]) -> Self {
        let usable = points.iter().filter(|p| p.depth > 0 && p.p50.0 > 0);
        let mut by_depth: Vec<(f64, TailCurve)> =
            usable.map(|p| (f64::from(p.depth), TailCurve::new(p, p.p50.as_secs_f64()))).collect();
        by_depth.sort_by(|a, b| a.0.total_cmp(&b.0));
        Self(by_depth)
    }

    /// Latency that a share of requests exceeds whose logarithm is `ln_e`, with `depth` in flight,
    /// s. Linear in logarithms between the measured depths, constant beyond the last one. The least
    /// over this and all greater depths counts: a longer latency with fewer in flight has another
    /// cause than the number in flight.
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

/// The floods of one direction and size, taken together.
pub(crate) struct Kind {
    op: Op,
    /// Bytes of the largest request.
    block: f64,
    /// Most requests in flight of these floods together.
    depth: f64,
    /// Share of the time in which they are in flight.
    share: f64,
}

/// Requests in flight of all backlogged tasks, by kind. The share of the time is 1 for a flood
/// without a limit; for a limited one
///
/// ```text
/// share = allowed / slice * time for one
/// ```
///
/// Divided by what tasks at a rate leave of the device, as an ideal server would have it, the
/// learned bounds on top of this were wider (`docs/explanation/models.md`, A full device).
pub(crate) fn kinds(flows: &[Flow]) -> Vec<Kind> {
    let mut kinds: Vec<Kind> = Vec::new();
    for f in flows.iter().filter(|f| f.steady()) {
        let share = match f.allowed {
            Some(allowed) => allowed / blk_throttle::SLICE * f.cost.max(f.service / f.burst()),
            None => 1.0,
        };
        match kinds.iter_mut().find(|k| k.op == f.op && k.block == f.largest) {
            Some(kind) => {
                kind.depth += f.burst();
                kind.share = (kind.share + share).min(1.0);
            }
            None => {
                kinds.push(Kind { op: f.op, block: f.largest, depth: f.burst(), share: share.min(1.0) });
            }
        }
    }
    kinds
}

impl SaturationTails {
    pub(crate) fn from_profile(profile: &Profile) -> Self {
        // Without measured writes those of reads are taken, as everywhere.
        let writes = |writes: &[DepthPoint], reads: &[DepthPoint]| {
            DepthTails::from_points(if profile.write.is_empty() { reads } else { writes })
        };
        let large = profile.large.as_ref().filter(|l| l.block > profile.block);
        Self {
            read: DepthTails::from_points(&profile.read),
            write: writes(&profile.write, &profile.read),
            large: large.map(|l| {
                let more = (l.block.0 - profile.block.0) as f64;
                (DepthTails::from_points(&l.read), writes(&l.write, &l.read), more)
            }),
            block: profile.block.0 as f64,
        }
    }

    /// Latency above which a share `exceedance` of the requests of any task lies while these floods
    /// come and go, s; 0 where they are in flight more rarely than that.
    ///
    /// ```text
    /// latency = quantile of the floods' kind, with as many in flight as they may have,
    ///           at exceedance / share
    /// ```
    pub(crate) fn latency(&self, floods: &Kind, exceedance: f64) -> f64 {
        if exceedance >= floods.share {
            return 0.0;
        }
        let ln_e = (exceedance / floods.share).ln();
        let of = |small: &DepthTails, large: Option<&DepthTails>| {
            let small = small.quantile(floods.depth, ln_e);
            let (Some(large), Some((.., more))) = (large, &self.large) else { return small };
            // The cost of still larger requests is counted elsewhere; a stall that the large ones
            // met does not grow with bytes.
            let bytes = (floods.block - self.block).clamp(0.0, *more);
            small + (large.quantile(floods.depth, ln_e) - small).max(0.0) * bytes / more
        };
        let read = || of(&self.read, self.large.as_ref().map(|(read, ..)| read));
        let write = || of(&self.write, self.large.as_ref().map(|(_, write, _)| write));
        match floods.op {
            Op::Read => read(),
            Op::Write => write(),
            Op::Mixed { .. } => read().max(write()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Bytes;

    use super::*;
    use crate::testkit::{point, twin};

    /// A virtual disk: alone 0.8 ms in one of 10 000, among 32 4.4 ms. The run with 16 in flight
    /// was disturbed.
    fn points() -> Vec<DepthPoint> {
        vec![
            point(32, 58_000.0, [519, 1_016, 4_387, 4_500]),
            point(1, 18_000.0, [50, 105, 830, 1_050]),
            point(16, 49_000.0, [306, 750, 174_000, 174_000]),
            point(4, 36_000.0, [105, 187, 1_251, 1_255]),
        ]
    }

    fn profile() -> Profile {
        Profile { read: points(), large: None, ..twin() }
    }

    fn tail(saturation_tails: &SaturationTails, flows: &[Flow]) -> f64 {
        kinds(flows).iter().map(|kind| saturation_tails.latency(kind, 1e-4)).fold(0.0, f64::max)
    }

    /// A flood of 32 reads of 4 KiB, without a limit.
    fn flood() -> Flow {
        Flow {
            vm: 0,
            op: Op::Read,
            access: crate::flow::Access { op: Op::Read, sync: false },
            block: 4096.0,
            largest: 4096.0,
            rate: 58_000.0,
            flood: true,
            allowed: None,
            at_once: 1.0,
            depth: 32.0,
            through_cap: 1.0,
            service: 50e-6,
            cost: 1.0 / 58_000.0,
            most: 1.0 / 58_000.0,
            declared: false,
            exceedance: 1e-4,
        }
    }

    fn held(rate: f64) -> Flow {
        Flow { rate, flood: false, allowed: Some(rate * 0.1), ..flood() }
    }

    fn about(value: f64, wanted: f64) -> bool {
        (value / wanted - 1.0).abs() < 1e-3
    }

    #[test]
    fn what_was_measured_with_as_many_in_flight_is_met_again() {
        let tails = DepthTails::from_points(&points());
        let at = |depth: f64, e: f64| tails.quantile(depth, e.ln());
        assert!(about(at(32.0, 1e-4), 4.387e-3) && about(at(32.0, 1e-2), 1.016e-3));
        assert!(about(at(1.0, 1e-4), 0.83e-3) && about(at(200.0, 1e-4), 4.387e-3));
        // Half of the way from 1 to 4 in logarithms.
        assert!(about(at(2.0, 1e-4), (0.83e-3f64 * 1.251e-3).sqrt()));
        // A shorter tail with more in flight: the longer one has another cause.
        assert!(about(at(16.0, 1e-4), 4.387e-3));
        assert_eq!(DepthTails::from_points(&[]).quantile(8.0, -9.0), 0.0);
    }

    #[test]
    fn a_limit_fills_the_device_for_a_share_of_the_time() {
        let saturation_tails = SaturationTails::from_profile(&profile());
        let tail = |flow: &Flow| tail(&saturation_tails, std::slice::from_ref(flow));
        assert!(about(tail(&flood()), 4.387e-3));
        // In flight 1 % of the time: 1 in 10 000 of all is 1 in 100 of those that meet it.
        assert!(about(tail(&held(580.0)), 1.016e-3));
        assert!(tail(&held(3_000.0)) > tail(&held(580.0)) && tail(&held(3_000.0)) < 2e-3);
        // Ten requests at a time, rarely.
        assert!(tail(&held(90.0)) < 0.4e-3);
        assert_eq!(tail(&held(2.0)), 0.0, "less often than one in 10 000");
    }

    #[test]
    fn floods_of_one_kind_are_added_up() {
        let saturation_tails = SaturationTails::from_profile(&profile());
        let parts = |n: usize, flow: Flow| vec![Flow { depth: 32.0 / n as f64, ..flow }; n];
        for n in [1, 4, 32] {
            assert!(about(tail(&saturation_tails, &parts(n, flood())), 4.387e-3), "{n}");
        }
        // Each too rare to be met, together not.
        let rare = Flow { depth: 1.0, ..held(1.5) };
        assert_eq!(tail(&saturation_tails, std::slice::from_ref(&rare)), 0.0);
        assert!(tail(&saturation_tails, &vec![rare; 30]) > 0.0);
    }

    #[test]
    fn unmeasured_writes_are_taken_for_reads() {
        let without = Profile { write: Vec::new(), ..profile() };
        let writes = [Flow { op: Op::Write, ..flood() }];
        assert!(about(tail(&SaturationTails::from_profile(&without), &writes), 4.387e-3));
        assert!(about(tail(&SaturationTails::from_profile(&profile()), &writes), 3.5e-3));
    }

    #[test]
    fn larger_requests_have_tails_of_their_own() {
        let mut profile = profile();
        let large = |us| vec![point(1, 5_700.0, [154, 270, 1_000, 1_000]), point(32, 9_200.0, us)];
        profile.large = Some(crate::types::LargeRequests {
            block: Bytes::from_kib(128),
            read: large([3_375, 6_971, 10_486, 10_500]),
            write: Vec::new(),
        });
        let saturation_tails = SaturationTails::from_profile(&profile);
        let of =
            |block: f64, op: Op| tail(&saturation_tails, &[Flow { block, largest: block, op, ..flood() }]);
        assert!(about(of(131_072.0, Op::Read), 10.486e-3));
        assert!(about(of(67_584.0, Op::Read), (4.387e-3 + 10.486e-3) / 2.0));
        assert!(about(of(1_024.0, Op::Read), 4.387e-3), "smaller ones count as the profile's");
        assert!(about(of(1_048_576.0, Op::Read), 10.486e-3), "a stall does not grow with bytes");
        // Large writes were not measured: they count as small ones.
        assert!(about(of(131_072.0, Op::Write), 3.5e-3));
    }
}
