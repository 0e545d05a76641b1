use proptest::prelude::*;
use rtvirtio_units::Nanos;

use super::*;

fn target(percentile: f64) -> Target {
    Target { percentile: Percentile(percentile), latency: Nanos::from_millis(300) }
}

fn judged(percentile: f64, n: u64, k: u64, declared: f64, achieved: f64) -> (Verdict, String) {
    let evidence = Evidence { n, exceedances: k, declared: Some(Iops(declared)), achieved: Iops(achieved) };
    let j = judge(target(percentile), &evidence);
    (j.verdict, j.why)
}

/// Exact binomial values, computed independently by a forward sum in double precision. (The rule of
/// thumb -ln(0.05) / 1e-4 gives 29 957 for the first, one more than the exact value.)
#[test]
fn samples_that_p9999_needs() {
    for (k, n) in [(0, 29_956), (1, 47_437), (2, 62_956), (3, 77_535), (4, 91_533), (5, 105_128)] {
        assert_eq!(samples_needed(k, Percentile::P9999), Some(n), "{k} exceedances");
    }
    // 0.99^299 = 0.0495, 0.99^298 = 0.0500 (above).
    assert_eq!(samples_needed(0, Percentile(99.0)), Some(299));
    assert_eq!(samples_needed(0, Percentile(50.0)), Some(5));
    assert_eq!(samples_needed(0, Percentile(100.0)), None);
}

#[test]
fn verdict_table() {
    use Verdict::{Met, Missed, Unproven};
    for (p, n, k, achieved, verdict, why) in [
        (99.99, 29_956, 0, 100.0, Met, "0 of 29956 above 300ms"),
        (99.99, 29_957, 0, 100.0, Met, "0 of 29957 above 300ms"),
        (
            99.99,
            29_955,
            0,
            100.0,
            Unproven,
            "0 of 29955 above 300ms; p99.99 needs 29956 samples, 1 s more at 100/s",
        ),
        (
            99.99,
            1_000,
            0,
            100.0,
            Unproven,
            "0 of 1000 above 300ms; p99.99 needs 29956 samples, 290 s more at 100/s",
        ),
        (99.99, 1_000, 1, 100.0, Missed, "1 of 1000 above 300ms"),
        (99.99, 9_999, 1, 100.0, Missed, "1 of 9999 above 300ms"),
        // At 10 000 the percentile is the second largest sample, which kept the target.
        (
            99.99,
            10_000,
            1,
            100.0,
            Unproven,
            "1 of 10000 above 300ms; p99.99 needs 47437 samples, 375 s more at 100/s",
        ),
        (
            99.99,
            47_436,
            1,
            100.0,
            Unproven,
            "1 of 47436 above 300ms; p99.99 needs 47437 samples, 1 s more at 100/s",
        ),
        (99.99, 47_437, 1, 100.0, Met, "1 of 47437 above 300ms"),
        (99.99, 29_956, 0, 98.9, Missed, "98.9/s instead of 100/s"),
        (99.99, 29_956, 0, 99.0, Met, "0 of 29956 above 300ms"),
        (99.99, 1_000, 3, 50.0, Missed, "3 of 1000 above 300ms; 50/s instead of 100/s"),
        (99.0, 300, 0, 100.0, Met, "0 of 300 above 300ms"),
        (99.0, 300, 3, 100.0, Unproven, "3 of 300 above 300ms; p99 needs 773 samples, 5 s more at 100/s"),
        (99.0, 300, 4, 100.0, Missed, "4 of 300 above 300ms"),
        (99.0, 0, 0, 0.0, Missed, "0/s instead of 100/s"),
        (
            100.0,
            1_000_000,
            0,
            100.0,
            Unproven,
            "0 of 1000000 above 300ms; no number of samples can show p100",
        ),
        (100.0, 1_000_000, 1, 100.0, Missed, "1 of 1000000 above 300ms"),
    ] {
        assert_eq!(judged(p, n, k, 100.0, achieved), (verdict, why.to_owned()), "p{p} n={n} k={k}");
    }
}

#[test]
fn a_task_without_a_rate_is_judged_by_its_tail() {
    let evidence = Evidence { n: 0, exceedances: 0, declared: None, achieved: Iops(0.0) };
    let j = judge(target(99.99), &evidence);
    assert_eq!(
        (j.verdict, j.why.as_str()),
        (Verdict::Unproven, "0 of 0 above 300ms; p99.99 needs 29956 samples")
    );
}

/// Upper confidence bound (one-sided 95 %, Clopper-Pearson) of the true share of exceedances, given
/// `k` of `n`; 1 when `k >= n`.
fn share_bound(k: u64, n: u64) -> f64 {
    if k >= n {
        return 1.0;
    }
    let (mut low, mut high) = (0.0f64, 1.0f64);
    // 100 halvings: to the last bit of a double.
    for _ in 0..100 {
        let middle = 0.5 * (low + high);
        if at_most(k, n, middle) > ALPHA { low = middle } else { high = middle }
    }
    high
}

#[test]
fn the_bound_is_clopper_and_pearsons() {
    // One-sided 95 %: k = 0 gives 1 - 0.05^(1/n); k = n gives 1; the others from tables of the Beta
    // distribution.
    let closed = |n: f64| 1.0 - 0.05f64.powf(1.0 / n);
    for n in [1u64, 10, 1_000, 1_000_000] {
        assert!((share_bound(0, n) / closed(n as f64) - 1.0).abs() < 1e-9, "{n}");
        assert_eq!(share_bound(n, n), 1.0);
    }
    assert!((share_bound(1, 10) - 0.394_163).abs() < 1e-5, "{}", share_bound(1, 10));
    assert!((share_bound(5, 100) - 0.102_253).abs() < 1e-4, "{}", share_bound(5, 100));
}

#[test]
fn large_numbers_do_not_underflow() {
    let n = 1_000_000_000;
    // Mean 1e7, deviation 3.1e3: 1.645 deviations below the mean is the limit.
    assert!(at_most(9_990_000, n, 0.01) < ALPHA);
    assert!(at_most(9_999_000, n, 0.01) > ALPHA);
    assert_eq!(judged(99.0, n, 9_990_000, 100.0, 100.0).0, Verdict::Met);
}

proptest! {
    /// Against the sum in the other direction, from the smallest term up.
    #[test]
    fn at_most_is_the_binomial_sum(n in 1u64..2_000, k in 0u64..60, p in 0.0005f64..0.5) {
        let mut term = (1.0 - p).powi(n as i32);
        prop_assume!(term > 1e-290);
        let mut sum = term;
        for i in 0..k.min(n) {
            term *= (n - i) as f64 / (i + 1) as f64 * p / (1.0 - p);
            sum += term;
        }
        let got = at_most(k, n, p);
        if (k as f64) < n as f64 * p {
            prop_assert!((got - sum).abs() < 1e-9, "{got} {sum}");
        } else {
            prop_assert!(sum >= 0.5 - 1e-9 && got >= 0.5);
        }
    }

    #[test]
    fn needed_is_the_first_that_suffices(k in 0u64..200, p in prop_oneof![Just(99.99), Just(99.9), Just(99.0), Just(90.0)]) {
        let share = Percentile(p).exceedance();
        let n = samples_needed(k, Percentile(p)).unwrap();
        prop_assert!(share_bound(k, n) <= share * (1.0 + 1e-9));
        prop_assert!(share_bound(k, n - 1) > share * (1.0 - 1e-9));
        prop_assert!(k <= allowed(n, Percentile(p)));
    }
}
