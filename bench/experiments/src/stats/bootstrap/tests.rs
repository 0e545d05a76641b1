use proptest::prelude::*;

use super::*;
use rtvirtio_stats::Random;

fn mean(x: &[f64]) -> Option<f64> {
    (!x.is_empty()).then(|| x.iter().sum::<f64>() / x.len() as f64)
}

/// An autoregression of order 1 with unit innovations; its mean has the variance 1 / (1 - phi)^2 /
/// n for large n.
fn autoregression(phi: f64, n: usize, seed: u64) -> Vec<f64> {
    let mut random = Random::new(seed);
    let mut x = random.normal() / (1.0 - phi * phi).sqrt();
    (0..n)
        .map(|_| {
            x = phi * x + random.normal();
            x
        })
        .collect()
}

/// For autocovariances phi^k the two sums have the ratio 2 phi / (1 - phi^2), so the best length is
/// known exactly.
#[test]
fn the_block_length_is_that_of_an_autoregression() {
    let (n, phi) = (20_000usize, 0.6f64);
    for (scheme, d) in [(Scheme::Moving, 4.0 / 3.0), (Scheme::Stationary, 2.0)] {
        let ratio = 2.0 * phi / (1.0 - phi * phi);
        let exact = (2.0 * ratio * ratio / d * n as f64).cbrt();
        let mut lengths: Vec<f64> =
            (0..9).map(|seed| block_length(&autoregression(phi, n, seed), scheme).unwrap()).collect();
        lengths.sort_by(f64::total_cmp);
        assert!((lengths[4] / exact - 1.0).abs() < 0.2, "{scheme:?}: {lengths:?} for {exact}");
    }
    assert!(block_length(&autoregression(0.0, n, 3), Scheme::Moving).unwrap() < 3.0);
    assert_eq!(block_length(&[4.0; 50], Scheme::Moving), Ok(1.0));
    let trend: Vec<f64> = (0..900).map(f64::from).collect();
    assert_eq!(block_length(&trend, Scheme::Moving), Ok(90.0), "the cap");
}

#[test]
fn blocks_keep_the_dependence_that_single_draws_lose() {
    let (n, phi) = (2_000, 0.7);
    let exact = 1.0 / (1.0 - phi) / (n as f64).sqrt();
    let series = autoregression(phi, n, 5);
    for scheme in [Scheme::Moving, Scheme::Stationary] {
        let error = |block| {
            let plan = Plan { scheme, block, replicates: 300, seed: 9 };
            bootstrap(&series, &plan, mean).unwrap().standard_error()
        };
        let (kept, lost) = (error(None), error(Some(1.0)));
        assert!((kept / exact - 1.0).abs() < 0.25, "{scheme:?}: {kept} for {exact}");
        assert!(lost < 0.6 * exact, "{scheme:?}: {lost} for {exact}");
    }
}

/// Nominal 90 % on 300 autoregressions of 300 values; so short a series keeps a little less. Blocks
/// of one value would keep 72 %: their interval is shorter by sqrt(0.6 / 1.4).
#[test]
fn intervals_of_the_mean_cover_it() {
    let repetitions = 300;
    let (mut percentile, mut basic) = (0, 0);
    for seed in 0..repetitions {
        let series = autoregression(0.4, 300, 1_000 + seed);
        let b = bootstrap(&series, &Plan { replicates: 99, seed, ..Plan::default() }, mean).unwrap();
        percentile += u32::from(b.percentile_interval(0.9).unwrap().contains(0.0));
        basic += u32::from(b.basic_interval(0.9).unwrap().contains(0.0));
    }
    for (name, covered) in [("percentile", percentile), ("basic", basic)] {
        let share = f64::from(covered) / repetitions as f64;
        assert!((0.79..0.95).contains(&share), "{name}: {share}");
    }
}

#[test]
fn the_basic_interval_mirrors_the_percentile_interval() {
    let b =
        Bootstrap { estimate: 10.0, replicates: (1..=99).map(f64::from).collect(), failed: 0, block: 1.0 };
    assert_eq!(b.percentile_interval(0.9), Some(Interval { low: 5.0, high: 95.0 }));
    assert_eq!(b.basic_interval(0.9), Some(Interval { low: -75.0, high: 15.0 }));
    assert_eq!((b.quantile(0.0), b.quantile(1.0)), (1.0, 99.0));
    assert!((b.standard_error() - 28.722_813).abs() < 1e-5, "sqrt((99^2 - 1) / 12 * 99 / 98)");
    assert!([0.0, 1.0, f64::NAN].iter().all(|c| b.basic_interval(*c).is_none()));
}

#[test]
fn a_seed_decides_everything() {
    let series = autoregression(0.5, 300, 1);
    let run = |seed| bootstrap(&series, &Plan { seed, replicates: 50, ..Plan::default() }, mean).unwrap();
    assert_eq!(run(4), run(4));
    assert_ne!(run(4).replicates, run(5).replicates);
}

#[test]
fn bad_input_is_refused() {
    let series = [1.0, 2.0, 4.0, 3.0, 1.0, 2.0, 4.0, 3.0, 1.0, 2.0];
    let try_with = |plan: Plan, x: &[f64]| bootstrap(x, &plan, mean);
    let plan = Plan { replicates: 10, ..Plan::default() };
    assert!(try_with(plan, &series).is_ok());
    assert_eq!(try_with(plan, &[1.0, f64::NAN]), Err(BootstrapError::NotFinite { index: 1 }));
    assert_eq!(try_with(plan, &[1.0]), Err(BootstrapError::TooFew { have: 1, need: 10 }));
    assert_eq!(
        try_with(Plan { block: Some(2.0), ..plan }, &[]),
        Err(BootstrapError::TooFew { have: 0, need: 1 })
    );
    for bad in [
        Plan { replicates: 0, ..plan },
        Plan { replicates: usize::MAX, ..plan },
        Plan { block: Some(0.5), ..plan },
        Plan { block: Some(f64::NAN), ..plan },
    ] {
        assert!(matches!(try_with(bad, &series), Err(BootstrapError::BadSetting(_))), "{bad:?}");
    }
    assert_eq!(bootstrap(&series, &plan, |_| None), Err(BootstrapError::Unstable { failed: 1, of: 1 }));
    let picky = |x: &[f64]| (x == series).then_some(1.0);
    assert_eq!(bootstrap(&series, &plan, picky), Err(BootstrapError::Unstable { failed: 10, of: 10 }));
}

proptest! {
    #[test]
    fn runs_have_the_length_of_the_series(
        n in 1usize..200,
        length in 1.0f64..250.0,
        seed in 0u64..1_000,
        moving in proptest::bool::ANY,
    ) {
        let scheme = if moving { Scheme::Moving } else { Scheme::Stationary };
        let mut blocks = Blocks::new(n, scheme, length, seed).unwrap();
        let mut runs = Vec::new();
        for _ in 0..3 {
            blocks.draw(&mut runs);
            prop_assert_eq!(runs.iter().map(|r| r.len()).sum::<usize>(), n);
            prop_assert!(runs.iter().all(|r| r.end <= n && !r.is_empty()));
        }
    }
}
