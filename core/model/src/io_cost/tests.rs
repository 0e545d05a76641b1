use proptest::prelude::*;
use rtvirtio_units::Bytes;

use super::*;
use crate::testkit::{disk, point, twin};
use crate::types::LargeRequests;

/// Cost of a random request in seconds of the device, as `calc_lcoefs()` and
/// `calc_vtime_cost_builtin()` compute it, without their rounding.
fn cost(bps: u64, iops: u64, bytes: u64) -> f64 {
    let page = PAGE / bps as f64;
    (1.0 / iops as f64 - page).max(0.0) + page * (bytes as f64 / PAGE).max(1.0)
}

/// Requests of 128 KiB, so many per second at the best depth.
fn with_large(profile: Profile, rate: f64) -> Profile {
    let points =
        vec![point(1, rate / 2.0, [200, 300, 900, 2_000]), point(16, rate, [900, 999, 2_000, 4_000])];
    let large = LargeRequests { block: Bytes::from_kib(128), read: points, write: Vec::new() };
    Profile { large: Some(large), ..profile }
}

/// Of a twin with 15 500/s of 4 KiB and 5 000/s of 128 KiB: 64.516 us and 200 us, so that 124 KiB
/// more take 135.484 us, 1.06700 ns a byte.
#[test]
fn rates_are_those_of_the_profile() {
    let found = io_cost(&with_large(twin(), 5_000.0)).unwrap();
    assert_eq!((found.model.rrandiops, found.model.rseqiops), (15_500, 15_500));
    let expected = 126_976.0 / (1.0 / 5_000.0 - 1.0 / 15_500.0);
    assert!((found.model.rbps as f64 - expected).abs() < 1.0, "{} {expected}", found.model.rbps);
    assert!(found.has_writes);

    // Without a second size all of the time is charged to the bytes, as the models do.
    let model = io_cost(&twin()).unwrap().model;
    assert_eq!((model.rrandiops, model.rbps), (15_500, 15_500 * 4_096));
    // Writes that were not measured cost what reads do, and that is known.
    let reads = Profile { write: Vec::new(), ..disk() };
    let found = io_cost(&reads).unwrap();
    assert!(!found.has_writes && found.model.wrandiops == found.model.rrandiops);
    assert!(io_cost(&Profile { read: Vec::new(), ..disk() }).is_err());
}

/// Of 16 KiB at 10 000/s, all charged to the bytes: 100 us, 25 us a page.
#[test]
fn another_block_size_is_brought_to_a_page() {
    let of = |block| io_cost(&Profile { block, ..twin() }).unwrap().model;
    assert_eq!(of(Bytes::from_kib(16)).rrandiops, 62_000);
    assert_eq!(of(Bytes::from_kib(16)).rbps, 15_500 * 16_384);
    let small = of(Bytes(512));
    assert!(small.rrandiops < 15_500, "{small:?}");
}

proptest! {
    /// Requests at the measured rate use the device for all of the time, whatever their size.
    #[test]
    fn the_measured_rate_is_the_whole_device(rate in 500.0..15_000.0f64) {
        let model = io_cost(&with_large(twin(), rate)).unwrap().model;
        for (bytes, rate) in [(4_096, 15_500.0), (131_072, rate)] {
            let used = rate * cost(model.rbps, model.rrandiops, bytes);
            prop_assert!((used - 1.0).abs() < 0.001, "{bytes}: {used}");
        }
    }

    /// A slower device has no larger rate, and larger requests cost no less.
    #[test]
    fn costs_are_monotone(factor in 1.0..50.0f64, rate in 500.0..15_000.0f64) {
        let fast = with_large(disk(), rate);
        let (model, slow) = (io_cost(&fast).unwrap().model, io_cost(&fast.slowed(factor)).unwrap().model);
        prop_assert!(slow.rbps <= model.rbps && slow.rrandiops <= model.rrandiops);
        prop_assert!(slow.wbps <= model.wbps && slow.wrandiops <= model.wrandiops);
        let costs: Vec<f64> = (0..8).map(|n| cost(model.rbps, model.rrandiops, 4_096 << n)).collect();
        prop_assert!(costs.windows(2).all(|two| two[0] <= two[1]), "{costs:?}");
    }
}
