//! What a profile says about the device, in the form the models use.

use rtvirtio_spec::{Op, Spec, Task, Vm};
use rtvirtio_units::{Bytes, Iops, Nanos};

use crate::flow::Access;
use crate::saturation::SaturationTails;
use crate::tail_curve::{TailCurve, TailPoint};
use crate::tail_model::check_syncs;
use crate::types::{DepthPoint, Elevator, LargeRequests, Profile};
use crate::{Config, ModelError};

/// Requests per second that the declared rates leave to each VM under this configuration's host
/// elevator: the share of the device's time that is left, divided equally among the VMs that have a
/// task without a rate. `None` for other VMs.
///
/// A planner derives caps for floods from it. At least 1 % of the device is left, so that a cap
/// never stops a VM.
///
/// # Errors
/// [`ModelError::BadProfile`] without a usable read measurement.
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
///
/// # Errors
/// [`ModelError::BadProfile`] without a usable read measurement.
pub fn declared_shares(profile: &Profile, spec: &Spec, config: &Config) -> Result<Vec<f64>, ModelError> {
    check_syncs(profile, spec)?;
    Ok(Device::new(profile, config.elevator == Elevator::Bfq)?.taken(spec))
}

/// What requests of one direction take of a device that serves them in order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ServiceLine {
    /// Device time of a request of the profile's block size, s: 1 / capacity. Of writes the
    /// capacity that lasts, with most in flight: few fit a drive's cache.
    pub occupancy: f64,
    /// Device time of each byte beyond that size, s.
    pub per_byte: f64,
    /// Time of a request that finds the device idle, s; at least `occupancy`.
    pub alone: f64,
    /// The same for each byte beyond that size, s.
    pub alone_per_byte: f64,
}

/// What the profile shows of the device without an elevator: the numbers that a scheduler above it
/// needs.
///
/// Seen from outside, k servers that take s for a request are one server that takes s / k and
/// answers s (1 - 1/k) later. So `occupancy` is what a request costs, and what `alone` has beyond
/// it is latency.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// Reads.
    pub read: ServiceLine,
    /// Writes; `None` when they were not measured, which shows nothing about what they cost.
    pub write: Option<ServiceLine>,
    /// Size that the lines begin at.
    pub block: Bytes,
    /// Fewest measured requests in flight that reach 95 % of the capacity, for reads and writes.
    pub depth: u32,
    /// Longest time that a request took beyond what those in flight with it explain, at any depth:
    /// stalls of the device and of the host together.
    pub stall: Nanos,
    /// The same while writing, where that is longer than while reading: a drive that erases or
    /// empties its cache stands still now and then, and all requests wait. Zero where reads were
    /// held up as long, which shows nothing about writes.
    pub write_stall: Nanos,
    /// Share of the capacity by requests in flight, both rising; of reads and writes the smaller
    /// one.
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
///
/// # Errors
/// [`ModelError::BadProfile`] without a usable read measurement.
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

/// How much longer the longest request of a closed loop took than those in flight with it explain:
/// that many service times, and the latency that the servers' number adds. At least 0, s.
fn beyond(points: &[DepthPoint], line: &ServiceLine) -> f64 {
    let explained = |p: &DepthPoint| f64::from(p.depth) * line.occupancy + (line.alone - line.occupancy);
    points.iter().map(|p| p.max.as_secs_f64() - explained(p)).fold(0.0, f64::max)
}

/// The device of a profile under one class of elevator.
pub(crate) struct Device {
    pub(crate) read: Curve,
    pub(crate) write: Curve,
    /// Writes with a flush after each; `None` where that was not measured.
    sync: Option<Curve>,
    /// What requests meet while floods fill it.
    pub(crate) saturation_tails: SaturationTails,
    block: Bytes,
}

/// One direction of the device.
#[derive(Clone)]
pub(crate) struct Curve {
    /// Median service time at the smallest measured depth, s.
    pub(crate) base: f64,
    /// Requests per second at the best depth.
    pub(crate) capacity: f64,
    /// Mean time per request at the smallest depth, s: the time one sample of the tail stands for.
    cycle: f64,
    /// Of the smallest depth.
    tail: TailCurve,
    /// What each byte beyond the profile's size adds; `None` when larger requests were not
    /// measured.
    byte: Option<PerByte>,
}

/// Time per byte, s.
#[derive(Clone, Copy)]
struct PerByte {
    /// To a request that finds the device idle.
    service: f64,
    /// To the device time of a request at the best depth.
    occupancy: f64,
}

impl Device {
    /// `bfq` asks for the device as BFQ lets through, where that was measured.
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
        // BFQ's cost is CPU time and lock time per request, the same in both directions: carry the
        // ratio over.
        let under_bfq = |w: Curve| Curve {
            base: w.base * (read.base / plain.base),
            capacity: w.capacity * (read.capacity / plain.capacity),
            ..w
        };
        let write = match Curve::new(&profile.write, more(|l| &l.write)) {
            Some(w) => under_bfq(w),
            None => read.clone(),
        };
        // More bytes cost a synced write what they cost another.
        let sync = Curve::new(&profile.sync, None).map(|s| Curve { byte: write.byte, ..under_bfq(s) });
        Ok(Self { read, write, sync, saturation_tails: SaturationTails::of(profile), block: profile.block })
    }

    /// A time of the profile's size, for `block`.
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

    /// The writes of an access; [`check_syncs`] has refused those that were not measured.
    fn writes(&self, access: Access) -> &Curve {
        self.sync.as_ref().filter(|_| access.sync).unwrap_or(&self.write)
    }

    /// Time of a task's largest request where it finds the device idle, s.
    pub(crate) fn service(&self, task: &Task) -> f64 {
        let time = |c: &Curve| self.sized(c.base, c.byte.map(|b| b.service), task.block);
        self.mix(Access::of(task), time)
    }

    /// Device time that a task's mean request takes from the others at the best depth, s: 1 /
    /// capacity. A synced write counts as long as it takes alone: nothing shows that a device
    /// serves others while it empties its cache.
    pub(crate) fn occupancy(&self, task: &Task) -> f64 {
        match task.mix.as_slice() {
            [] => self.most_occupancy(task),
            mix => mix.iter().map(|m| m.share.0 * self.occupancy_of(Access::of(task), m.size)).sum(),
        }
    }

    /// The same of its largest request.
    pub(crate) fn most_occupancy(&self, task: &Task) -> f64 {
        self.occupancy_of(Access::of(task), task.block)
    }

    fn occupancy_of(&self, access: Access, block: Bytes) -> f64 {
        self.mix(access, |c| self.sized(1.0 / c.capacity, c.byte.map(|b| b.occupancy), block))
    }

    /// Share of its time that the declared rates of each VM take.
    fn taken(&self, spec: &Spec) -> Vec<f64> {
        let of = |vm: &Vm| -> f64 {
            vm.tasks.iter().filter_map(|t| t.rate.map(|r| r.0.max(0.0) * self.occupancy(t))).sum()
        };
        spec.vms.iter().map(of).collect()
    }

    /// Latency above which the device alone holds a share `exceedance` of *arrivals*, s; see
    /// [`Curve::stall`].
    pub(crate) fn stall(&self, access: Access, exceedance: f64, slack: f64) -> f64 {
        let worst = |c: &Curve| c.stall(exceedance, slack);
        match access.op {
            Op::Read => worst(&self.read),
            Op::Write => worst(self.writes(access)),
            Op::Mixed { .. } => worst(&self.read).max(worst(&self.write)),
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
            // With many in flight, not the best of all depths: large writes at depth 1 fit into a
            // drive's cache, and a neighbour that writes as fast as it can soon finds it full.
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
    /// profile's maximum.
    pub(crate) fn stall(&self, e: f64, slack: f64) -> f64 {
        let ln_e = e.ln();
        let ln_spare = (self.cycle * slack.clamp(MIN_SLACK, 1.0)).ln();
        let held = |p: &TailPoint| p.ln_share + p.ln_latency - ln_spare;
        let plain = self.tail.quantile(ln_e);
        for (near, far) in self.tail.segments().rev() {
            if held(far) > ln_e {
                return far.latency.max(plain);
            }
            if held(near) > ln_e {
                // On this segment log(held) falls linearly with log(x).
                let t = (held(near) - ln_e) / (held(near) - held(far));
                return near.towards(far, t).max(plain);
            }
        }
        plain
    }
}

/// Least spare share that a backlog is worked off with: below it a task counts as saturated and its
/// rate shows it.
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
        // 9 300 of 15 500 at depth 1, all at 16; in between on a line.
        assert_eq!(s.depth, 16);
        assert!((s.share_at(1) - 0.6).abs() < 1e-9 && (s.share_at(16) - 1.0).abs() < 1e-9);
        assert!((s.share_at(8) - (0.6 + 0.4 * 7.0 / 15.0)).abs() < 1e-9, "{}", s.share_at(8));
        assert!((s.share_at(99) - 1.0).abs() < 1e-9);
        // The longest at depth 1 beyond the median, and at depth 16 beyond 16 service times: 5 -
        // 0.1 and 8 - 1.07 ms.
        assert!(s.stall > Nanos::from_micros(6_900) && s.stall < Nanos::from_micros(7_000), "{}", s.stall);
        // Reads were held up as long as writes: nothing is said of writes. A drive that erases
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
        // Twice as many at once at the same time for each: half the device time, and as long alone.
        for p in &mut profile.read {
            p.iops.0 *= 2.0;
        }
        let two = service(&profile).unwrap();
        assert!((two.read.occupancy * 2.0 / s.read.occupancy - 1.0).abs() < 1e-9);
        assert!((two.read.alone - s.read.alone).abs() < 1e-12);
        // Writes that fit a cache when few, and then no longer: what lasts counts. Without a
        // measurement nothing is known of them.
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
