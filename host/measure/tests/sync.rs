//! Tasks that sync each write, on a loop device over a file that records writes and flushes.

mod common;

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use common::{
    FLUSH, LoopDevice, Seen, StallingFile, disk_dir, loop_device, no_fio, no_fuse, no_loop, skip, task, vm,
};
use rtvirtio_measure::Verdict;
use rtvirtio_measure::fio::{JobFile, JobOptions};
use rtvirtio_measure::local::{Control, run_fio};
use rtvirtio_measure::run::task_results;
use rtvirtio_spec::{Arrival, BlockShare, Op, Pattern, SyncKind, Target};
use rtvirtio_units::{Bytes, Nanos, Percentile, Ratio};

/// File that records writes and flushes, and a loop device over it.
fn disk() -> (StallingFile, LoopDevice) {
    let disk = StallingFile::new(&[]);
    let device = loop_device(&disk.path());
    (disk, device)
}

fn options(device: &LoopDevice, dir: &Path) -> JobOptions {
    JobOptions { seed: 5, ..common::options(&device.0, dir, Duration::from_millis(1_800)) }
}

fn run(job: &JobFile) -> rtvirtio_measure::fio::FioOutput {
    let cancel = AtomicBool::new(false);
    let grace = Duration::from_secs(60);
    run_fio(job, &mut Control { cgroup_procs: &[], cancel: &cancel, grace, on_tick: &mut |_| {} }).unwrap()
}

#[test]
fn each_write_is_followed_by_its_flush_and_its_latency_holds_both() {
    let name = "each_write_is_followed_by_its_flush_and_its_latency_holds_both";
    if let Some(reason) = no_fio().or(no_fuse()).or(no_loop()) {
        return skip(name, reason);
    }
    let ((disk, device), work) = (disk(), disk_dir());
    for (sync, rate) in
        [(SyncKind::Fdatasync, Some(20.0)), (SyncKind::Fsync, Some(20.0)), (SyncKind::Fdatasync, None)]
    {
        let mut log = task("log", Op::Write, rate, 1, Arrival::Closed);
        log.pattern = Pattern::Sequential;
        log.sync = Some(sync);
        let job = JobFile::new(&vm(vec![log]), options(&device, work.path())).unwrap();
        disk.take();
        let output = run(&job);
        let seen = disk.take();
        let result = task_results(&job, &output, &[]).unwrap().remove(0);
        let writes: Vec<u64> = seen
            .iter()
            .filter_map(|s| match s {
                Seen::Write { offset, bytes } => {
                    assert_eq!(*bytes, 4096);
                    Some(*offset)
                }
                Seen::Flush => None,
            })
            .collect();
        let flushes = seen.len() - writes.len();
        // Order: a write, its flush, the next write. The device adds none of its own, except one
        // when it is closed.
        for (i, pair) in seen.chunks(2).take(writes.len()).enumerate() {
            assert!(
                matches!(pair, [Seen::Write { offset, .. }, Seen::Flush] if *offset == 4096 * i as u64),
                "{sync:?} {rate:?}: {i}: {pair:?}"
            );
        }
        assert!(
            writes.len() > 5 && flushes - writes.len() <= 1,
            "{} writes, {flushes} flushes",
            writes.len()
        );
        // Every write is counted once, and takes at least as long as its flush.
        if let Some(rate) = rate {
            let logged = String::from_utf8(output.logs[0].clone().unwrap()).unwrap();
            assert_eq!(logged.lines().count(), writes.len());
            assert!(writes.len() as f64 <= rate * 2.0 + 1.0, "{} writes in two seconds", writes.len());
        }
        assert!(result.n > 0 && result.n <= writes.len() as u64);
        assert!(result.p50_ns >= Nanos::from_millis(12), "{}", result.p50_ns);
    }
}

/// Counts and percentiles that fio itself computed for a run's first section.
fn fios_own(json: &[u8], side: &str) -> (u64, u64, [u64; 2]) {
    let json: serde_json::Value = serde_json::from_slice(json).unwrap();
    let side = &json["jobs"][0][side];
    let number = |v: &serde_json::Value| v.as_u64().unwrap_or_else(|| panic!("{v} in {side:#}"));
    let at = |p: &str| number(&side["lat_ns"]["percentile"][p]);
    (number(&side["total_ios"]), number(&side["lat_ns"]["N"]), [at("50.000000"), at("99.000000")])
}

/// Whether two percentiles are in the same bin, which is 1.6 % wide, or in adjacent ones.
fn same_bin(ours: Nanos, fios: u64) -> bool {
    (ours.0 as f64 / fios as f64 - 1.0).abs() < 0.033
}

#[test]
fn counts_and_percentiles_are_fios_own_of_the_same_run() {
    let name = "counts_and_percentiles_are_fios_own_of_the_same_run";
    if let Some(reason) = no_fio().or(no_fuse()).or(no_loop()) {
        return skip(name, reason);
    }
    let ((_disk, device), work) = (disk(), disk_dir());
    let at = |p: f64, ms: u64| Target { percentile: Percentile(p), latency: Nanos::from_millis(ms) };
    for rate in [None, Some(20.0)] {
        let mut log = task("log", Op::Write, rate, 1, Arrival::Closed);
        log.pattern = Pattern::Sequential;
        log.sync = Some(SyncKind::Fdatasync);
        log.targets = vec![at(50.0, 5), at(99.0, 100_000)];
        let mut options = options(&device, work.path());
        // So that fio's figures cover the same requests as ours.
        options.warmup = Duration::ZERO;
        let job = JobFile::new(&vm(vec![log]), options).unwrap();
        let output = run(&job);
        let (total, n, [p50, p99]) = fios_own(&output.json, "write");
        let results = task_results(&job, &output, &[]).unwrap();
        let [half, tail] = results.as_slice() else { panic!("{results:?}") };
        assert_eq!(total, n);
        assert_eq!((half.n, half.p50_ns, half.p99_ns), (tail.n, tail.p50_ns, tail.p99_ns));
        assert_eq!((half.at_target_ns, tail.at_target_ns), (Some(half.p50_ns), Some(tail.p99_ns)));
        // No flush takes less than 12 ms, so half of them are never within 5.
        assert_eq!(half.verdict, Some(Verdict::Missed), "{half:?}");
        assert_ne!(tail.verdict, Some(Verdict::Missed), "{tail:?}");
        if rate.is_none() {
            assert_eq!(half.n, n);
            assert!(same_bin(half.p50_ns, p50) && same_bin(half.p99_ns, p99), "{half:?} {p50} {p99}");
        } else {
            // fio drains its schedule beyond the end; its log has each request that it counts.
            // Counted from the intended start, no request is faster than fio's own figure.
            let logged = String::from_utf8(output.logs[0].clone().unwrap()).unwrap();
            let mut own: Vec<u64> =
                logged.lines().map(|l| l.split(", ").nth(1).unwrap().parse().unwrap()).collect();
            own.sort_unstable();
            assert_eq!((own.len() as u64, half.n <= n), (n, true), "{half:?}");
            assert!(same_bin(Nanos(own[(own.len() - 1) / 2]), p50), "{own:?} {p50}");
            assert!(half.max_ns >= half.fio_p9999_ns && half.fio_p9999_ns.0 <= own[own.len() - 1]);
        }
    }
}

/// fio's own `fdatasync=1` has the same effect on a device as our jobs: one write, one flush.
#[test]
fn fios_own_syncs_reach_the_device_as_ours_do() {
    let name = "fios_own_syncs_reach_the_device_as_ours_do";
    if let Some(reason) = no_fio().or(no_fuse()).or(no_loop()) {
        return skip(name, reason);
    }
    let (disk, device) = disk();
    disk.take();
    let out = std::process::Command::new("fio")
        .args([
            "--name=log",
            "--rw=write",
            "--bs=4096",
            "--ioengine=psync",
            "--fdatasync=1",
            "--invalidate=0",
        ])
        .args(["--number_ios=40", "--size=8m", "--lat_percentiles=1", "--percentile_list=50:99"])
        .args(["--output-format=json+", &format!("--filename={}", device.0.display())])
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let (writes, _, _) = fios_own(&out.stdout, "write");
    let json: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let sync = &json["jobs"][0]["sync"];
    let seen = disk.take();
    let flushes = seen.iter().filter(|s| **s == Seen::Flush).count();
    let written = seen.len() - flushes;
    assert_eq!((written, writes), (40, 40), "{seen:?}");
    // After its last write fio ends without a flush; closing the device may flush.
    assert!((39..=41).contains(&flushes), "{flushes}: {seen:?}");
    for pair in seen.chunks(2).take(39) {
        assert!(matches!(pair, [Seen::Write { .. }, Seen::Flush]), "{pair:?}");
    }
    // fio counts each, and each took as long as the device does; a bin is 1.6 % wide.
    assert_eq!(sync["lat_ns"]["N"], 39, "{sync:#}");
    let bins = sync["lat_ns"]["bins"].as_object().unwrap();
    let shortest = bins.keys().map(|ns| ns.parse::<u64>().unwrap()).min().unwrap();
    assert!(shortest as f64 >= FLUSH.as_nanos() as f64 * 0.98, "{sync:#}");
}

#[test]
fn a_mix_of_sizes_keeps_its_shares_and_its_rate() {
    let name = "a_mix_of_sizes_keeps_its_shares_and_its_rate";
    if let Some(reason) = no_fio().or(no_fuse()).or(no_loop()) {
        return skip(name, reason);
    }
    let ((disk, device), work) = (disk(), disk_dir());
    let mut mixed = task("mixed", Op::Write, Some(200.0), 1, Arrival::Closed);
    mixed.block = Bytes::from_kib(16);
    let size = |kib, share| BlockShare { size: Bytes::from_kib(kib), share: Ratio(share) };
    mixed.mix = vec![size(4, 0.75), size(16, 0.25)];
    let job = JobFile::new(&vm(vec![mixed]), options(&device, work.path())).unwrap();
    assert!(job.text().contains("\nbssplit=4096/75:16384/25\n"), "{}", job.text());
    disk.take();
    let output = run(&job);
    let result = task_results(&job, &output, &[]).unwrap().remove(0);
    let sizes: Vec<usize> = disk
        .take()
        .iter()
        .filter_map(|s| if let Seen::Write { bytes, .. } = s { Some(*bytes) } else { None })
        .collect();
    let of = |bytes: usize| sizes.iter().filter(|s| **s == bytes).count();
    assert_eq!(of(4096) + of(16384), sizes.len(), "{sizes:?}");
    // At most what the rate allows, however slow the machine; the shares are fio's draw of 400.
    let mean = sizes.iter().sum::<usize>() as f64 / sizes.len() as f64;
    assert!(sizes.len() as f64 * mean <= 200.0 * 7168.0 * 2.0 + 16384.0, "{} of {mean}", sizes.len());
    if sizes.len() > 300 {
        let large = of(16384) as f64 / sizes.len() as f64;
        assert!((0.15..0.35).contains(&large), "{large} large ones");
    }
    let logged = String::from_utf8(output.logs[0].clone().unwrap()).unwrap();
    assert_eq!(logged.lines().count(), sizes.len());
    assert!(result.n > 0 && result.achieved_rate.0 > 0.0 && result.achieved_rate.0 <= 200.0);
}
