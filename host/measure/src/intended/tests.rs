use proptest::prelude::*;
use rtvirtio_spec::{Op, Task};
use rtvirtio_units::{Bytes, Iops, Ratio};

use super::*;

fn pace(op: Op, rate: f64) -> FioRate {
    let task = Task { op, ..Task::reads("t", Some(Iops(rate))) };
    FioRate::from_task(&task).unwrap()[0]
}

/// Simulates a closed loop at depth 1: returns the true latencies, and the log that fio would
/// write. `service` has direction, time in the device and delay of the program itself for each
/// request, all in ns.
fn simulate(pace: &FioRate, service: &[(bool, u64, u64)]) -> (Vec<u64>, Vec<Sample>) {
    let (mut clock, mut next) = (0u64, [0u64; 2]);
    let (mut truth, mut log) = (Vec::new(), Vec::new());
    for (write, lat_ns, late) in service {
        let intended = pace.intended_ns(*write, next[usize::from(*write)]).unwrap();
        next[usize::from(*write)] += 1;
        let issued = clock.max(intended) + late;
        clock = issued + lat_ns;
        truth.push(clock - intended);
        log.push(Sample { time_ms: clock / 1_000_000, lat_ns: *lat_ns, write: *write, bytes: 4096 });
    }
    (truth, log)
}

#[test]
fn of_a_mix_of_sizes_the_bytes_are_due_evenly() {
    // 100/s of 4 and 16 KiB, half each: 10 240 B a request, so 4 KiB take 4 ms and 16 KiB 16 ms.
    let size = |kib, share| rtvirtio_spec::BlockShare { size: Bytes::from_kib(kib), share: Ratio(share) };
    let mix = vec![size(4, 0.5), size(16, 0.5)];
    let mut task = Task { block: Bytes::from_kib(16), mix, ..Task::reads("t", Some(Iops(100.0))) };
    let pace = FioRate::from_task(&task).unwrap()[0];
    let sizes = [4096u64, 16384, 16384, 4096, 4096];
    let log: Vec<_> = sizes
        .iter()
        .zip([0, 4, 20, 36, 40])
        .map(|(bytes, ms)| Sample { time_ms: ms, lat_ns: 300_000, write: false, bytes: *bytes })
        .collect();
    let timed = from_intended_start(&log, &pace, 1);
    let due: Vec<u64> = timed.iter().map(|t| t.intended_ns / 1_000_000).collect();
    assert_eq!(due, [0, 4, 20, 36, 40]);
    assert_eq!(latencies(&timed), [300_000; 5]);
    assert_eq!(timed.iter().map(|t| t.bytes).collect::<Vec<_>>(), sizes);
    // With a single size, the log's sizes do not matter.
    task.mix.clear();
    let pace = FioRate::from_task(&task).unwrap()[0];
    let due = from_intended_start(&log, &pace, 1).last().unwrap().intended_ns;
    assert_eq!(due, 40_000_000);
}

fn latencies(timed: &[Timed]) -> Vec<u64> {
    timed.iter().map(|t| t.latency_ns).collect()
}

#[test]
fn a_stall_is_spread_over_the_requests_that_were_due_in_it() {
    // 1000/s; the second request takes 3.5 ms, so the next three start late.
    let ms = 1_000_000;
    let (truth, log) = simulate(
        &pace(Op::Read, 1_000.0),
        &[100_000, 3_500_000, 100_000, 100_000, 100_000, 100_000].map(|l| (false, l, 0)),
    );
    assert_eq!(truth, [100_000, 3_500_000, 2_600_000, 1_700_000, 800_000, 100_000]);
    assert_eq!(latencies(&from_intended_start(&log, &pace(Op::Read, 1_000.0), 1)), truth);
    // A program that did not run for 5 ms is detected by the time stamp alone, to 1 ms.
    let (truth, log) = simulate(&pace(Op::Read, 1_000.0), &[(false, 100_000, 5 * ms)]);
    assert_eq!(truth, [5_100_000]);
    assert_eq!(latencies(&from_intended_start(&log, &pace(Op::Read, 1_000.0), 1)), [5_000_000]);
}

#[test]
fn the_recursion_is_lindleys() {
    // W_i = max(0, W_(i-1) + l_(i-1) - T), L_i = W_i + l_i with a whole period T, without the time
    // stamps.
    let period = 2_000_000u64;
    let lat = [500_000u64, 9_000_000, 100_000, 2_500_000, 0, 100_000, 7_000_000, 1_999_999];
    let log: Vec<_> =
        lat.iter().map(|l| Sample { time_ms: 0, lat_ns: *l, write: false, bytes: 4096 }).collect();
    let mut wait = 0u64;
    let mut expected = Vec::new();
    for (i, l) in lat.iter().enumerate() {
        if i > 0 {
            wait = (wait + lat[i - 1]).saturating_sub(period);
        }
        expected.push(wait + l);
    }
    assert_eq!(latencies(&from_intended_start(&log, &pace(Op::Read, 500.0), 1)), expected);
}

#[test]
fn fio_rounds_intended_starts_down_to_microseconds() {
    let p = pace(Op::Read, 333.3);
    assert_eq!(p.intended_ns(false, 0), Some(0));
    // 333.3 * 4096 = 1365196.8, held as 1365197 B/s: 4096e6 / 1365197 = 3000.299 us.
    assert_eq!(p.intended_ns(false, 1), Some(3_000_000));
    assert_eq!(p.intended_ns(true, 1), None);
    let p = pace(Op::Mixed { write_share: Ratio(0.3) }, 100.0);
    assert_eq!(p.intended_ns(false, 7), Some(100_000_000));
    assert_eq!(p.intended_ns(true, 3), Some(100_000_000));
    assert_eq!((p.due_before(false, 100_000_000), p.due_before(false, 100_000_001)), (7, 8));
    assert_eq!((p.due_before(true, 0), p.due_before(true, 1)), (0, 1));
}

proptest! {
    /// Reads and writes with random stalls, against the simulation: never above the truth, never
    /// more than 1 ms below, and exact when the program itself is never late.
    #[test]
    fn correction_bounds_the_truth(
        rate in 20.0f64..5_000.0,
        mixed in any::<bool>(),
        service in proptest::collection::vec(
            (any::<bool>(), prop_oneof![9 => 1_000u64..400_000, 1 => 1_000_000u64..400_000_000],
             prop_oneof![8 => Just(0u64), 2 => 0u64..3_000_000]), 1..300),
    ) {
        let op = if mixed { Op::Mixed { write_share: Ratio(0.5) } } else { Op::Read };
        let pace = pace(op, rate.round());
        let service: Vec<_> = service.into_iter().map(|(w, l, late)| (w && mixed, l, late)).collect();
        let (truth, log) = simulate(&pace, &service);
        let ours = latencies(&from_intended_start(&log, &pace, 1));
        for (ours, truth) in ours.iter().zip(&truth) {
            prop_assert!(ours <= truth && ours + 1_000_000 > *truth, "{ours} for {truth}");
        }
        let punctual: Vec<_> = service.iter().map(|(w, l, _)| (*w, *l, 0)).collect();
        let (truth, log) = simulate(&pace, &punctual);
        prop_assert_eq!(latencies(&from_intended_start(&log, &pace, 1)), truth);
    }

    /// Several in flight: `depth` servers, requests made in order when a server is free. The log is
    /// in the order of completion.
    #[test]
    fn correction_with_depth_is_within_its_bound(
        rate in 100.0f64..3_000.0,
        depth in 2usize..9,
        lat in proptest::collection::vec(prop_oneof![9 => 1_000u64..400_000, 1 => 1_000_000u64..100_000_000], 1..300),
    ) {
        let pace = pace(Op::Read, rate.round());
        let mut free = vec![0u64; depth];
        let mut starts = Vec::new();
        let mut done: Vec<(u64, u64, u64)> = Vec::new();
        for (i, lat) in lat.iter().enumerate() {
            let intended = pace.intended_ns(false, i as u64).unwrap();
            let server = free.iter_mut().min().unwrap();
            let issued = intended.max(*server);
            *server = issued + lat;
            starts.push(issued);
            done.push((*server, *lat, intended));
        }
        done.sort_unstable();
        let log: Vec<_> = done
            .iter()
            .map(|(at, lat, _)| Sample { time_ms: at / 1_000_000, lat_ns: *lat, write: false, bytes: 4096 })
            .collect();
        let mut truth: Vec<u64> = done.iter().map(|(at, _, intended)| at - intended).collect();
        let mut ours = latencies(&from_intended_start(&log, &pace, depth as u32));
        truth.sort_unstable();
        ours.sort_unstable();
        // Requests made within the same ms may change places: the bound of the module's text.
        let together = starts.iter().map(|a| starts.iter().filter(|b| b.abs_diff(*a) <= 1_000_000).count()).max().unwrap();
        let bound = 1_000_000 + pace.intended_ns(false, together as u64).unwrap();
        for (ours, truth) in ours.iter().zip(&truth) {
            prop_assert!(ours.abs_diff(*truth) <= bound, "{ours} for {truth}, bound {bound}");
        }
    }

    /// The job's start is found in a log by the machine's clock, as long as one request was made in
    /// time.
    #[test]
    fn the_start_of_a_job_is_found_in_its_log(
        rate in 20.0f64..5_000.0,
        base in 1_000_000u64..4_000_000_000,
        service in proptest::collection::vec(
            (prop_oneof![9 => 1_000u64..400_000, 1 => 1_000_000u64..400_000_000], 0u64..20_000_000), 1..200),
        punctual in any::<proptest::sample::Index>(),
    ) {
        let pace = pace(Op::Read, rate.round());
        let mut service: Vec<_> = service.into_iter().map(|(l, late)| (false, l, late)).collect();
        let first = punctual.index(service.len());
        // Requests before one that was made in time do not matter.
        service.iter_mut().take(first + 1).for_each(|s| (s.1, s.2) = (1_000, 0));
        let (_, mut log) = simulate(&pace, &service);
        for s in &mut log {
            s.time_ms += base;
        }
        prop_assert_eq!(job_start_ms(&log, &pace, 1), Some(base));
        // With several in flight two may have changed places within 1 ms.
        let deep = job_start_ms(&log, &pace, 4).unwrap();
        prop_assert!(deep == base || deep + 1 == base, "{deep} for {base}");
    }

    #[test]
    fn due_before_counts_intended_starts(rate in 1.0f64..2_000_000.0, ns in 0u64..10_000_000_000) {
        let pace = pace(Op::Read, rate);
        let n = pace.due_before(false, ns);
        prop_assert!(pace.intended_ns(false, n).unwrap() >= ns);
        prop_assert!(n == 0 || pace.intended_ns(false, n - 1).unwrap() < ns);
    }
}
