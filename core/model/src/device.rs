//! Device parameters from a profile, in the form that the models use.

use rtvirtio_spec::{Op, Spec, Task, Vm};
use rtvirtio_units::{Bytes, Iops, Nanos};

use crate::flow::Access;
use crate::saturation::SaturationTails;
use crate::tail_curve::{TailCurve, TailPoint, segments};
use crate::tail_model::check_syncs;
use crate::types::{DepthPoint, Elevator, LargeRequests, Profile};
use crate::{Config, ModelError};

/// Requests per second that the declared rates leave to each VM under this configuration's host
/// elevator: the device time left over, divided equally among the VMs that have a task without a
/// rate. `None` for other VMs.
///
/// A planner derives caps for floods from it. At least 1 % of the device is left, so that a cap
/// never stops a VM.
pub fn spare_rates(profile: &Profile, spec: &Spec, config: &Config) -> Result<Vec<Option<Iops>>, ModelError> {
    const LEAST: f64 = 0.01;
    check_syncs(profile, spec)?;
    let device = Device::new(profile, config.elevator == Elevator::Bfq)?;
    let used: f64 = device.taken(spec).iter().sum();
    let floods = |vm: &Vm| vm.tasks.iter().filter(|t| t.rate.is_none()).count();
    let flooding = spec.vms.iter().filter(|vm| floods(vm) > 0).count().max(1) as f64;
    let left = (1.0 - used).max(LEAST) / flooding;
    Ok(spec
        .vms
        .iter()
        .map(|vm| {
            let n = floods(vm);
            let costs: f64 = vm.tasks.iter().filter(|t| t.rate.is_none()).map(|t| device.occupancy(t)).sum();
            (n > 0).then(|| Iops(left * n as f64 / costs))
        })
        .collect())
}

/// Share of the device's time that the declared rates of each VM take under this configuration's
/// host elevator; above 1 in sum some VM loses rate under every setting. Tasks without a rate count
/// nothing.
pub fn declared_shares(profile: &Profile, spec: &Spec, config: &Config) -> Result<Vec<f64>, ModelError> {
    check_syncs(profile, spec)?;
    Ok(Device::new(profile, config.elevator == Elevator::Bfq)?.taken(spec))
}

/// Device time of requests in one direction, for a device that serves them in order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServiceLine {
    /// Device time of a request of the profile's block size, s: 1 / capacity. For writes the
    /// sustained capacity, at the largest depth: few may fit into the drive's cache.
    pub occupancy: f64,
    /// Device time of each byte beyond that size, s.
    pub per_byte: f64,
    /// Time of a request that finds the device idle, s; at least `occupancy`.
    pub alone: f64,
    /// Time of each byte beyond that size on an idle device, s.
    pub alone_per_byte: f64,
}

/// Service parameters of the device without an elevator, as a scheduler above it needs them.
///
/// Seen from outside, k servers that take s for a request are one server that takes s / k and
/// answers s (1 - 1/k) later. So `occupancy` is the cost of a request, and the rest of `alone` is
/// latency.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// Service parameters of reads.
    pub read: ServiceLine,
    /// Parameters of writes; `None` when they were not measured, so that their cost is unknown.
    pub write: Option<ServiceLine>,
    /// Request size at which the lines begin.
    pub block: Bytes,
    /// Fewest measured requests in flight that reach 95 % of the capacity, for reads and writes.
    pub depth: u32,
    /// Longest latency beyond that which the requests in flight explain, at any depth: stalls of
    /// the device and of the host together.
    pub stall: Nanos,
    /// Longest such latency while writing, where that is longer than while reading: a drive that
    /// erases or empties its cache stalls now and then, and all requests wait. Zero where reads
    /// were delayed as long, so that writes are not the cause.
    pub write_stall: Nanos,
    /// Reached share of the capacity by requests in flight, both rising; the smaller one of reads
    /// and writes.
    reach: Vec<(u32, f64)>,
}

impl Service {
    /// Share of the capacity that so many requests in flight reach, 0 to 1.
    #[must_use]
    pub fn share_at(&self, depth: u32) -> f64 {
        let at = f64::from(depth);
        let mut last = (0.0, 0.0);
        for &(d, share) in &self.reach {
            let d = f64::from(d);
            if at <= d {
                return last.1 + (share - last.1) * (at - last.0) / (d - last.0).max(1e-9);
            }
            last = (d, share);
        }
        last.1
    }
}

/// The device of a profile as one server.
pub fn service(profile: &Profile) -> Result<Service, ModelError> {
    const NEARLY_ALL: f64 = 0.95;
    let device = Device::new(profile, false)?;
    let line = |c: &Curve, capacity: f64| {
        let occupancy = 1.0 / capacity;
        let all = occupancy / profile.block.0 as f64;
        let alone = c.base.max(occupancy);
        ServiceLine {
            occupancy,
            per_byte: c.byte.map_or(all, |b| b.occupancy),
            alone,
            alone_per_byte: c.byte.map_or(alone / profile.block.0 as f64, |b| b.service.max(b.occupancy)),
        }
    };
    let deepest = profile.write.iter().filter(|p| p.iops.0 > 0.0).max_by_key(|p| p.depth);
    let read = line(&device.read, device.read.capacity);
    let write = deepest.map(|p| line(&device.write, p.iops.0.min(device.write.capacity)));
    let by_reads = beyond(&profile.read, &read);
    let by_writes = write.as_ref().map_or(0.0, |w| beyond(&profile.write, w));
    let stall = by_reads.max(by_writes);
    let share = |points: &[DepthPoint], capacity: f64, depth: u32| {
        let reached = points.iter().filter(|p| p.depth <= depth).map(|p| p.iops.0 / capacity);
        reached.fold(0.0, f64::max).min(1.0)
    };
    let mut depths: Vec<u32> = profile.read.iter().map(|p| p.depth).collect();
    depths.sort_unstable();
    depths.dedup();
    let reach: Vec<(u32, f64)> = depths
        .into_iter()
        .map(|d| {
            let reads = share(&profile.read, device.read.capacity, d);
            let writes = write.as_ref().map_or(1.0, |w| share(&profile.write, 1.0 / w.occupancy, d));
            (d, reads.min(writes))
        })
        .collect();
    let depth = reach.iter().find(|(_, s)| *s >= NEARLY_ALL).or(reach.last()).map_or(1, |(d, _)| *d);
    Ok(Service {
        read,
        write,
        block: profile.block,
        depth: depth.max(1),
        stall: Nanos::from_secs_f64(stall),
        write_stall: Nanos::from_secs_f64(if by_writes > by_reads { by_writes } else { 0.0 }),
        reach,
    })
}

/// Longest latency of a closed loop beyond that which the requests in flight explain: as many
/// service times, and the latency of several servers. At least 0, s.
fn beyond(points: &[DepthPoint], line: &ServiceLine) -> f64 {
    let explained = |p: &DepthPoint| f64::from(p.depth) * line.occupancy + (line.alone - line.occupancy);
    points.iter().map(|p| p.max.as_secs_f64() - explained(p)).fold(0.0, f64::max)
}

/// Curves of a profile's device, with BFQ's own cost or without.
pub(crate) struct Device {
    pub(crate) read: Curve,
    pub(crate) write: Curve,
    /// Writes with a flush after each; `None` where that was not measured.
    sync: Option<Curve>,
    /// Latencies while floods fill the device.
    pub(crate) saturation_tails: SaturationTails,
    block: Bytes,
}

/// Measured performance in one direction.
#[derive(Clone)]
pub(crate) struct Curve {
    /// Median service time at the smallest measured depth, s.
    pub(crate) base: f64,
    /// Requests per second at the best depth.
    pub(crate) capacity: f64,
    /// Mean time per request at the smallest depth, s: the time per sample of the tail.
    cycle: f64,
    /// Tail at the smallest depth.
    tail: TailCurve,
    /// Additional time per byte beyond the profile's size; `None` when larger requests were not
    /// measured.
    byte: Option<PerByte>,
}

/// Additional time per byte, s.
#[derive(Clone, Copy)]
struct PerByte {
    /// Of a request that finds the device idle.
    service: f64,
    /// Of the device time at the best depth.
    occupancy: f64,
}

impl Device {
    /// `bfq` selects the device as measured under BFQ, where that was done.
    pub(crate) fn new(profile: &Profile, bfq: bool) -> Result<Self, ModelError> {
        let bad =
            |what: &str| ModelError::BadProfile { device: profile.device.clone(), what: what.to_owned() };
        if profile.block.0 == 0 {
            return Err(bad("its block size is zero"));
        }
        let large = profile.large.as_ref();
        let more = |points: fn(&LargeRequests) -> &[DepthPoint]| {
            large.map(|l| (points(l), l.block.0.saturating_sub(profile.block.0)))
        };
        let plain = Curve::new(&profile.read, more(|l| &l.read))
            .ok_or_else(|| bad("it has no usable read measurement"))?;
        let read = match Curve::new(&profile.read_bfq, None) {
            // The tail stays the device's own: the BFQ points are there for BFQ's cost, often with
            // fewer samples.
            Some(with) if bfq => Curve {
                base: with.base.max(plain.base),
                capacity: with.capacity.min(plain.capacity),
                cycle: plain.cycle,
                tail: plain.tail.clone(),
                byte: plain.byte,
            },
            _ => plain.clone(),
        };
        // BFQ's cost is CPU time and lock time per request, equal in both directions: the ratio of
        // reads applies to writes.
        let under_bfq = |w: Curve| Curve {
            base: w.base * (read.base / plain.base),
            capacity: w.capacity * (read.capacity / plain.capacity),
            ..w
        };
        let write = match Curve::new(&profile.write, more(|l| &l.write)) {
            Some(w) => under_bfq(w),
            None => read.clone(),
        };
        // A synced write has the per-byte cost of other writes.
        let sync = Curve::new(&profile.sync, None).map(|s| Curve { byte: write.byte, ..under_bfq(s) });
        Ok(Self {
            read,
            write,
            sync,
            saturation_tails: SaturationTails::from_profile(profile),
            block: profile.block,
        })
    }

    /// Scales a time measured at the profile's size to `block`.
    ///
    /// With a larger size measured: plus the bytes' own time. Without: times
    /// `max(1, block / profile.block)`, because one size cannot separate time per byte from time
    /// per request. Charging all of it to the bytes errs on the safe side for larger blocks; on a
    /// device that moves 1 GB/s by a factor of ten at 128 KiB. Smaller blocks are charged as the
    /// profile's.
    fn sized(&self, time: f64, per_byte: Option<f64>, block: Bytes) -> f64 {
        match per_byte {
            Some(per_byte) => time + per_byte * block.0.saturating_sub(self.block.0) as f64,
            None => time * (block.0 as f64 / self.block.0 as f64).max(1.0),
        }
    }

    fn mix(&self, access: Access, f: impl Fn(&Curve) -> f64) -> f64 {
        let w = access.op.write_share();
        (1.0 - w) * f(&self.read) + w * f(self.writes(access))
    }

    /// Curve of the writes of an access; [`check_syncs`] has refused syncs that were not measured.
    fn writes(&self, access: Access) -> &Curve {
        self.sync.as_ref().filter(|_| access.sync).unwrap_or(&self.write)
    }

    /// Time of a task's largest request where it finds the device idle, s.
    pub(crate) fn service(&self, task: &Task) -> f64 {
        let time = |c: &Curve| self.sized(c.base, c.byte.map(|b| b.service), task.block);
        self.mix(Access::from_task(task), time)
    }

    /// Device time that a task's mean request takes from the others at the best depth, s: 1 /
    /// capacity. A synced write counts as long as it takes alone: nothing shows that a device
    /// serves others while it empties its cache.
    pub(crate) fn occupancy(&self, task: &Task) -> f64 {
        match task.mix.as_slice() {
            [] => self.most_occupancy(task),
            mix => mix.iter().map(|m| m.share.0 * self.occupancy_of(Access::from_task(task), m.size)).sum(),
        }
    }

    /// Device time that a task's largest request takes from the others at the best depth, s.
    pub(crate) fn most_occupancy(&self, task: &Task) -> f64 {
        self.occupancy_of(Access::from_task(task), task.block)
    }

    fn occupancy_of(&self, access: Access, block: Bytes) -> f64 {
        self.mix(access, |c| self.sized(1.0 / c.capacity, c.byte.map(|b| b.occupancy), block))
    }

    /// Share of the device's time that the declared rates of each VM take.
    fn taken(&self, spec: &Spec) -> Vec<f64> {
        let of = |vm: &Vm| -> f64 {
            vm.tasks.iter().filter_map(|t| t.rate.map(|r| r.0.max(0.0) * self.occupancy(t))).sum()
        };
        spec.vms.iter().map(of).collect()
    }

    /// Latency above which the device alone holds a share `exceedance` of *arrivals*, s; see
    /// [`Curve::stall`].
    pub(crate) fn stall(&self, access: Access, exceedance: f64, slack: f64) -> f64 {
        self.worst(access, exceedance, slack).0.latency
    }

    /// The profile's statistics that [`Device::stall`] is computed from, for the user.
    pub(crate) fn stall_statistic(&self, access: Access, exceedance: f64, slack: f64) -> String {
        let (stall, curve) = self.worst(access, exceedance, slack);
        let named = curve.tail.named(stall.between);
        let whole = curve.stall_within(&curve.tail.points, exceedance, slack);
        match curve.tail.left_out(exceedance) {
            Some(largest) if whole.latency > stall.latency => {
                format!("{named}; the largest, {largest}, is a single event")
            }
            _ => named,
        }
    }

    fn worst(&self, access: Access, exceedance: f64, slack: f64) -> (Stall<'_>, &Curve) {
        let of = |c| (Curve::stall(c, exceedance, slack), c);
        match access.op {
            Op::Read => of(&self.read),
            Op::Write => of(self.writes(access)),
            Op::Mixed { .. } => {
                let (read, write) = (of(&self.read), of(&self.write));
                if write.0.latency > read.0.latency { write } else { read }
            }
        }
    }
}

impl Curve {
    /// `more` holds points of larger requests, and by how many bytes they are larger.
    fn new(points: &[DepthPoint], more: Option<(&[DepthPoint], u64)>) -> Option<Self> {
        let usable = |p: &&DepthPoint| p.iops.0.is_finite() && p.iops.0 > 0.0 && p.depth > 0;
        let first = points.iter().filter(usable).min_by_key(|p| p.depth)?;
        let capacity = points.iter().filter(usable).map(|p| p.iops.0).fold(0.0, f64::max);
        let cycle = f64::from(first.depth) / first.iops.0;
        let base = if first.p50.0 > 0 { first.p50.as_secs_f64() } else { cycle };
        let tail = TailCurve::new(first, base);
        let byte = more.and_then(|(points, bytes)| {
            let large = Self::new(points, None).filter(|_| bytes > 0)?;
            // At the largest depth, not at the best: large writes at depth 1 fit into a drive's
            // cache, which a neighbour that writes as fast as it can soon fills.
            let sustained = points.iter().filter(|p| p.iops.0 > 0.0).max_by_key(|p| p.depth)?.iops.0;
            // More bytes never take less time; where the measurement says so, it is noise.
            let slope = |small: f64, large: f64| ((large - small) / bytes as f64).max(0.0);
            Some(PerByte {
                service: slope(base, large.base),
                occupancy: slope(1.0 / capacity, 1.0 / sustained),
            })
        });
        Some(Self { base, capacity, cycle, tail, byte })
    }

    /// Latency above which a share `e` of arrivals is held by the device alone.
    ///
    /// The profile samples in a closed loop: a stall of length x is one sample, however many
    /// arrivals it would have held. With G(x) the profile's share of samples above x and one sample
    /// every `cycle` seconds, stalls longer than x fill the share G(x) x / cycle of time, and the
    /// backlog they leave is worked off with the spare share `slack` of the capacity, so that
    ///
    /// ```text
    /// P(arrival held longer than x)  <=  G(x) * x / (cycle * slack)
    /// ```
    ///
    /// G is a straight line in log-log between the profile's percentiles. The answer is the
    /// largest x at which the bound reaches `e`, at least the plain percentile, at most the
    /// profile's maximum. G holds what the profile shows often enough for `e`
    /// ([`TailCurve::of_share`]).
    fn stall(&self, e: f64, slack: f64) -> Stall<'_> {
        self.stall_within(self.tail.of_share(e), e, slack)
    }

    /// [`Curve::stall`] for these points of the profile only.
    fn stall_within<'c>(&'c self, points: &'c [TailPoint], e: f64, slack: f64) -> Stall<'c> {
        let ln_e = e.ln();
        let ln_spare = (self.cycle * slack.clamp(MIN_SLACK, 1.0)).ln();
        let held = |p: &TailPoint| p.ln_share + p.ln_latency - ln_spare;
        let plain = Stall { latency: self.tail.quantile(ln_e), between: self.tail.around(ln_e) };
        let more = |latency: f64, between| {
            if latency > plain.latency { Stall { latency, between } } else { plain }
        };
        for (near, far) in segments(points).rev() {
            if held(far) > ln_e {
                return more(far.latency, (far, far));
            }
            if held(near) > ln_e {
                // On this segment log(held) falls linearly with log(x).
                let t = (held(near) - ln_e) / (held(near) - held(far));
                return more(near.towards(far, t), (near, far));
            }
        }
        plain
    }
}

/// Latency that the device alone causes, with the points of the profile that show it.
#[derive(Clone, Copy)]
struct Stall<'c> {
    /// Latency in s.
    latency: f64,
    between: (&'c TailPoint, &'c TailPoint),
}

/// Least spare share for working off a backlog: below it a task counts as saturated, which its kept
/// rate shows.
pub(crate) const MIN_SLACK: f64 = 0.05;

#[cfg(test)]
mod tests {
    use super::*;
    use rtvirtio_spec::BlockShare;
    use rtvirtio_units::Ratio;

    use crate::testkit::{point, task, twin};

    #[test]
    fn one_server_stands_for_what_the_profile_shows() {
        let mut profile = twin();
        let best = profile.read.iter().map(|p| p.iops.0).fold(0.0, f64::max);
        let s = service(&profile).unwrap();
        assert!((s.read.occupancy * best - 1.0).abs() < 1e-9);
        assert!(s.read.alone > s.read.occupancy);
        // 9 300 of 15 500 at depth 1, all at 16; linear in between.
        assert_eq!(s.depth, 16);
        assert!((s.share_at(1) - 0.6).abs() < 1e-9 && (s.share_at(16) - 1.0).abs() < 1e-9);
        assert!((s.share_at(8) - (0.6 + 0.4 * 7.0 / 15.0)).abs() < 1e-9, "{}", s.share_at(8));
        assert!((s.share_at(99) - 1.0).abs() < 1e-9);
        // Longest latency at depth 1 beyond the median, and at depth 16 beyond 16 service times: 5
        // - 0.1 and 8 - 1.07 ms.
        assert!(s.stall > Nanos::from_micros(6_900) && s.stall < Nanos::from_micros(7_000), "{}", s.stall);
        // Reads were delayed as long as writes, so writes are not the cause. A drive that erases
        // for 30 ms while it is written to:
        assert_eq!(s.write_stall, Nanos(0));
        let mut erasing = profile.clone();
        erasing.write[1].max = Nanos::from_millis(30);
        let held = service(&erasing).unwrap();
        // Of the 30 ms 16 in flight explain 15 times the device's time and once the time of a
        // request alone: 1.1 ms.
        let one = held.write.as_ref().unwrap();
        let beyond = 30e-3 - 15.0 * one.occupancy - one.alone;
        assert!((held.write_stall.as_secs_f64() - beyond).abs() < 1e-8, "{}", held.write_stall);
        assert!(beyond > 28.8e-3 && beyond < 29.0e-3 && held.stall == held.write_stall, "{beyond}");
        // Twice as many at once in the same time: half the device time, the same latency alone.
        for p in &mut profile.read {
            p.iops.0 *= 2.0;
        }
        let two = service(&profile).unwrap();
        assert!((two.read.occupancy * 2.0 / s.read.occupancy - 1.0).abs() < 1e-9);
        assert!((two.read.alone - s.read.alone).abs() < 1e-12);
        // Few writes fit a cache, more do not: the sustained rate counts. Without a measurement
        // their cost is unknown.
        profile.write[0].iops.0 = 60_000.0;
        profile.write[1].iops.0 = 4_000.0;
        let cache = service(&profile).unwrap();
        assert!((cache.write.unwrap().occupancy - 1.0 / 4_000.0).abs() < 1e-9);
        profile.write.clear();
        assert_eq!(service(&profile).unwrap().write, None);
    }

    #[test]
    fn bytes_cost_what_was_measured_and_without_a_measurement_all() {
        let kib = Bytes::from_kib;
        let mut profile = twin();
        let of = |op, k| Task { op, block: kib(k), ..task("t", 1.0, 1) };
        let guessed = Device::new(&profile, false).unwrap();
        assert!((guessed.service(&of(Op::Read, 128)) - 32.0 * 105e-6).abs() < 1e-9);
        // 60 us + 1 ns per byte: 128 KiB take about 124 us longer than 4 KiB, at any depth.
        let read = vec![
            point(1, 4_300.0, [229, 300, 2_000, 5_000]),
            point(32, 5_300.0, [6_000, 7_000, 9_000, 9_500]),
        ];
        profile.large = Some(LargeRequests { block: kib(128), read, write: Vec::new() });
        let device = Device::new(&profile, false).unwrap();
        assert!((device.service(&of(Op::Read, 4)) - 105e-6).abs() < 1e-9);
        assert!((device.service(&of(Op::Read, 128)) - 229e-6).abs() < 1e-9);
        assert!((device.service(&of(Op::Read, 66)) - 167e-6).abs() < 1e-9);
        assert!((device.occupancy(&of(Op::Read, 128)) - 1.0 / 5_300.0).abs() < 1e-9);
        // Writes of that size were not measured.
        assert!((device.service(&of(Op::Write, 128)) - 32.0 * 105e-6).abs() < 1e-9);
        // A mix loads the device by its mean and has the tail of its largest.
        let mut mixed = of(Op::Read, 128);
        let size = |k, share| BlockShare { size: kib(k), share: Ratio(share) };
        mixed.mix = vec![size(4, 0.75), size(128, 0.25)];
        assert_eq!(device.service(&mixed), device.service(&of(Op::Read, 128)));
        let parts = 0.75 * device.occupancy(&of(Op::Read, 4)) + 0.25 * device.occupancy(&of(Op::Read, 128));
        assert!((device.occupancy(&mixed) - parts).abs() < 1e-12);
        assert_eq!(device.most_occupancy(&mixed), device.occupancy(&of(Op::Read, 128)));
    }
}
