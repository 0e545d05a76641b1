use super::*;
use crate::TwinProfile;

fn profile(text: &str) -> TwinProfile {
    TwinProfile::parse("test", text).unwrap()
}

const PLAIN: &str = r#"
description = "test"
channels = 1
read = { base = "60us", per_byte_ns = 1.0 }
write = { base = "20us", per_byte_ns = 2.0 }
"#;

#[test]
fn one_channel_serves_in_order() {
    let mut m = ServiceModel::new(profile(PLAIN), 1 << 30, 1);
    assert_eq!(m.complete_at(0, Access::Read, 0, 4096), 64_096);
    assert_eq!(m.complete_at(10, Access::Read, 0, 4096), 128_192);
    assert_eq!(m.complete_at(1_000_000, Access::Write, 0, 1000), 1_022_000);
}

#[test]
fn channels_serve_at_once() {
    let two = PLAIN.replace("channels = 1", "channels = 2");
    let mut m = ServiceModel::new(profile(&two), 1 << 30, 1);
    assert_eq!(m.complete_at(0, Access::Read, 0, 0), 60_000);
    assert_eq!(m.complete_at(0, Access::Read, 0, 0), 60_000);
    assert_eq!(m.complete_at(0, Access::Read, 0, 0), 120_000);
}

#[test]
fn jitter_stays_in_its_band_and_repeats_with_the_seed() {
    let jittery = format!("{PLAIN}jitter = \"10%\"\n");
    let run = |seed| {
        let mut m = ServiceModel::new(profile(&jittery), 1 << 30, seed);
        (0..1000u64)
            .map(|i| m.complete_at(i * 1_000_000, Access::Read, 0, 0) - i * 1_000_000)
            .collect::<Vec<_>>()
    };
    let a = run(7);
    assert_eq!(a, run(7));
    assert_ne!(a, run(8));
    assert!(a.iter().all(|&t| (60_000..66_000).contains(&t)));
    let mean = a.iter().sum::<u64>() as f64 / 1000.0;
    assert!((mean - 63_000.0).abs() < 300.0, "{mean}");
}

#[test]
fn a_full_write_cache_slows_writes_to_the_drain_rate() {
    let cached = format!("{PLAIN}write_cache = {{ size = \"1MiB\", drain = \"10MB/s\" }}\n");
    let mut m = ServiceModel::new(profile(&cached), 1 << 30, 1);
    let mut now = 0;
    let mut durations = Vec::new();
    for _ in 0..64 {
        let done = m.complete_at(now, Access::Write, 0, 65_536);
        durations.push(done - now);
        now = done;
    }
    let fast = 20_000 + 2 * 65_536;
    assert_eq!(durations[0], fast);
    // 64 KiB at 10 MB/s take 6.55 ms.
    let last = durations[60] as f64;
    assert!((last - 6_553_600.0).abs() < 100_000.0, "{last}");
    // A flush waits for what is still cached: 1 MiB at 10 MB/s is 105 ms.
    let flush = (m.complete_at(now, Access::Flush, 0, 0) - now) as f64;
    assert!((flush - 104.8e6).abs() < 1e6, "{flush}");
}

#[test]
fn garbage_collection_stops_readers_too() {
    let gc = format!("{PLAIN}garbage_collection = {{ every = \"1MiB\", pause = \"50ms\" }}\n");
    let mut m = ServiceModel::new(profile(&gc), 1 << 30, 1);
    let mut now = 0;
    for _ in 0..15 {
        now = m.complete_at(now, Access::Write, 0, 65_536);
    }
    let before = now;
    now = m.complete_at(now, Access::Write, 0, 65_536);
    assert!(now - before > 50_000_000);
    assert!(m.complete_at(before + 1, Access::Read, 0, 4096) > before + 50_000_000);
}

#[test]
fn the_arm_moves_only_for_random_requests() {
    let disk =
        format!("{PLAIN}arm = {{ settle = \"2ms\", average_seek = \"15ms\", revolution = \"14ms\" }}\n");
    let size = 1u64 << 30;
    let mut m = ServiceModel::new(profile(&disk), size, 1);
    assert_eq!(m.complete_at(0, Access::Read, 0, 4096), 64_096);
    let done = m.complete_at(10_000_000_000, Access::Read, size / 2, 4096);
    assert!(done - 10_000_000_000 > 2_000_000);
    // Mean over uniformly random places: average seek plus half a revolution.
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let (n, mut total) = (20_000u64, 0u64);
    for i in 0..n {
        let now = (i + 100) * 1_000_000_000;
        let offset = rng.next_u64() % size;
        total += m.complete_at(now, Access::Read, offset, 4096) - now;
    }
    let mean = total as f64 / n as f64 / 1e6;
    assert!((mean - 22.06).abs() < 0.5, "mean {mean} ms");
}

#[test]
fn a_device_that_slows_takes_a_multiple_of_what_is_declared() {
    let mut m = ServiceModel::new(profile(PLAIN), 1 << 30, 1);
    m.set_slowness(2.0);
    assert_eq!(m.complete_at(0, Access::Read, 0, 4096), 128_192);
    m.set_slowness(1.0);
    assert_eq!(m.complete_at(1_000_000, Access::Read, 0, 4096), 1_064_096);
}

#[test]
fn another_profile_counts_for_later_requests() {
    let mut m = ServiceModel::new(profile(PLAIN), 1 << 30, 1);
    let mut worn = profile(PLAIN);
    worn.read.base = Nanos::from_micros(600);
    m.set_profile(worn);
    assert_eq!(m.complete_at(0, Access::Read, 0, 4096), 604_096);
}
