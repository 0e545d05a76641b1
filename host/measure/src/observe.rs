//! I/O of a VM on a disk while it works, from counters of QEMU or the kernel: rates, sizes,
//! requests in flight and, from QEMU, latencies. Needs nothing from the guest.
//!
//! QEMU counts a request from when the device model fetches it until it is complete. The time that
//! a request waits in the guest's own queues is not included.

use std::time::Duration;

use rtvirtio_kernel::io_counters::IoCounters;
use rtvirtio_units::{Bytes, Iops, Nanos, Percentile};
use rtvirtio_vmm::disk_stats::{Counters, Direction, DiskStats};
use serde::Serialize;

/// Number of bin limits of a latency histogram per factor of ten: one bin is 12 % wide, so a
/// latency read from it is at most 12 % too high.
const BINS_PER_DECADE: u32 = 20;
/// Lowest bin limit, in nanoseconds.
const LOWEST: u64 = 10_000;
/// Factors of ten above the lowest limit: up to 10 s.
const DECADES: u32 = 6;
/// Percentiles that are reported where there are enough requests.
const PERCENTILES: [f64; 4] = [50.0, 99.0, 99.9, 99.99];

/// Bin limits for [`Qmp::set_latency_histogram`](rtvirtio_vmm::Qmp::set_latency_histogram), in
/// nanoseconds: 10 us to 10 s.
#[must_use]
pub fn boundaries() -> Vec<u64> {
    let limit = |i: u32| LOWEST as f64 * 10f64.powf(f64::from(i) / f64::from(BINS_PER_DECADE));
    (0..=DECADES * BINS_PER_DECADE).map(|i| limit(i).round() as u64).collect()
}

/// I/O of a VM in one direction on one disk, over an observed time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Observed {
    /// Reads, writes or flushes.
    pub direction: Direction,
    /// Number of requests completed.
    pub n: u64,
    /// Rate in requests per second.
    pub rate: Iops,
    /// Mean size of a request; `None` for flushes.
    pub mean_size: Option<Bytes>,
    /// Mean latency; `None` with only the kernel's counters.
    pub mean_ns: Option<Nanos>,
    /// Mean number of requests in flight: rate times mean latency (Little's law).
    pub depth: Option<f64>,
    /// Percentiles of the latency, rising; only those that at least ten requests exceed.
    pub tails: Vec<Tail>,
    /// Upper limit of the longest request; `None` without a histogram, or above 10 s.
    pub longest_ns: Option<Nanos>,
}

/// Percentile of a latency.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Tail {
    /// Percentile of the latency, in percent.
    pub percentile: Percentile,
    /// Upper limit of its bin; at most 12 % above the latency itself.
    pub latency_ns: Nanos,
}

/// I/O of a disk between two readings of QEMU's counters; directions without a request are left
/// out. `None` when the counters were reset, as by a restart of QEMU.
#[must_use]
pub fn of_qemu(before: &DiskStats, after: &DiskStats, time: Duration) -> Option<Vec<Observed>> {
    let directions = [Direction::Read, Direction::Write, Direction::Flush];
    let all = directions.map(|d| (d, observe_direction(d, before.counters(d), after.counters(d), time)));
    if all.iter().any(|(_, observed)| observed.is_none()) {
        return None;
    }
    Some(all.into_iter().filter_map(|(_, observed)| observed).filter(|o| o.n > 0).collect())
}

fn observe_direction(
    direction: Direction,
    before: &Counters,
    after: &Counters,
    time: Duration,
) -> Option<Observed> {
    let n = after.ops.checked_sub(before.ops)?;
    let bytes = after.bytes.checked_sub(before.bytes)?;
    let busy = after.time_ns.checked_sub(before.time_ns)?;
    let rate = per_second(n, time);
    let mean = (n > 0).then(|| busy as f64 / n as f64);
    // A histogram that was set between the readings counts from zero.
    let histogram = match (&before.histogram, &after.histogram) {
        (Some(then), Some(now)) => now.since(then).or_else(|| Some(now.clone())),
        (_, now) => now.clone(),
    };
    let mut tails = Vec::new();
    let mut longest_ns = None;
    if let Some(histogram) = &histogram {
        let enough = |p: &f64| histogram.count() as f64 * (1.0 - p / 100.0) >= 10.0;
        for p in PERCENTILES.into_iter().filter(enough) {
            let latency = histogram.quantile(p / 100.0);
            tails.extend(latency.map(|l| Tail { percentile: Percentile(p), latency_ns: Nanos(l) }));
        }
        longest_ns = histogram.quantile(1.0).map(Nanos);
    }
    Some(Observed {
        direction,
        n,
        rate: Iops(rate),
        mean_size: (direction != Direction::Flush && n > 0).then(|| Bytes(bytes / n)),
        mean_ns: mean.map(|m| Nanos(m as u64)),
        depth: mean.map(|m| rate * m / 1e9),
        tails,
        longest_ns,
    })
}

/// I/O of a cgroup between two readings of the kernel's counters, which have no latencies.
#[must_use]
pub fn of_cgroup(between: &IoCounters, time: Duration) -> Vec<Observed> {
    let one = |direction, n: u64, bytes: u64| Observed {
        direction,
        n,
        rate: Iops(per_second(n, time)),
        mean_size: (n > 0).then(|| Bytes(bytes / n)),
        mean_ns: None,
        depth: None,
        tails: Vec::new(),
        longest_ns: None,
    };
    let reads = one(Direction::Read, between.reads, between.read_bytes);
    let writes = one(Direction::Write, between.writes, between.write_bytes);
    [reads, writes].into_iter().filter(|o| o.n > 0).collect()
}

fn per_second(n: u64, time: Duration) -> f64 {
    n as f64 / time.as_secs_f64().max(f64::MIN_POSITIVE)
}

#[cfg(test)]
mod tests {
    use rtvirtio_vmm::disk_stats::Histogram;

    use super::*;

    fn disk(ops: u64, bins: &[(usize, u64)]) -> DiskStats {
        let boundaries = boundaries();
        let mut counts = vec![0; boundaries.len() + 1];
        for (bin, n) in bins {
            counts[*bin] += n;
        }
        let histogram = Some(Histogram { boundaries, bins: counts });
        let read = Counters { ops, bytes: ops * 4096, time_ns: ops * 2_000_000, histogram };
        DiskStats {
            id: "d".to_owned(),
            file: None,
            format: None,
            read_only: false,
            read,
            write: Counters::default(),
            flush: Counters::default(),
        }
    }

    #[test]
    fn limits_rise_from_10_us_to_10_s() {
        let limits = boundaries();
        assert_eq!((limits[0], limits[120], limits.len()), (10_000, 10_000_000_000, 121));
        assert!(limits.windows(2).all(|w| w[0] < w[1] && (w[1] as f64) < w[0] as f64 * 1.13));
    }

    #[test]
    fn rates_depth_and_tails_of_the_time_between() {
        // 100 requests before; then 1000 of 2 ms each within 10 s, 12 of them above 1 s.
        let (before, after) = (disk(100, &[(3, 100)]), disk(1100, &[(3, 100), (40, 988), (101, 12)]));
        let seen = of_qemu(&before, &after, Duration::from_secs(10)).unwrap();
        let [read] = &seen[..] else { panic!("{seen:?}") };
        assert_eq!((read.n, read.rate, read.mean_size), (1000, Iops(100.0), Some(Bytes(4096))));
        assert!((read.depth.unwrap() - 0.2).abs() < 1e-9);
        let tails: Vec<_> = read.tails.iter().map(|t| (t.percentile.0, t.latency_ns.0)).collect();
        assert_eq!(tails, [(50.0, 1_000_000), (99.0, boundaries()[101])], "p99.9 rests on one request");
        assert_eq!(read.longest_ns, Some(Nanos(boundaries()[101])));
    }

    #[test]
    fn counters_that_began_anew_give_nothing() {
        assert_eq!(of_qemu(&disk(100, &[]), &disk(5, &[]), Duration::from_secs(1)), None);
    }

    #[test]
    fn a_disk_at_rest_has_no_direction() {
        assert_eq!(of_qemu(&disk(5, &[]), &disk(5, &[]), Duration::from_secs(1)), Some(Vec::new()));
        assert_eq!(of_cgroup(&IoCounters::default(), Duration::from_secs(1)), Vec::new());
    }

    #[test]
    fn the_kernel_knows_rates_and_sizes() {
        let between = IoCounters { reads: 0, read_bytes: 0, writes: 50, write_bytes: 50 * 8192 };
        let seen = of_cgroup(&between, Duration::from_secs(5));
        assert_eq!(seen.len(), 1);
        assert_eq!((seen[0].rate, seen[0].mean_size), (Iops(10.0), Some(Bytes(8192))));
        assert!(seen[0].tails.is_empty() && seen[0].depth.is_none());
    }
}
