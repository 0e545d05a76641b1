use rtvirtio_model::Elevator;
use rtvirtio_spec::LabKind;
use rtvirtio_units::{Nanos, Percentile, Ratio};

use crate::tests::{profile, spec, start, task};
use crate::{PlanOptions, Space, plan, quality};

/// A setting that makes the worst prediction a few percent shorter is left out: the model is not
/// that exact. One that decides whether a target is met stays.
#[test]
fn no_change_for_a_gain_within_the_error() {
    let mut s = spec(LabKind::Process, &[vec![task("light", 100.0, Some(20))]]);
    s.vms[0].tasks[0].targets[0].percentile = Percentile(99.0);
    let mut options = PlanOptions::new(start(&s));
    options.start.bfq.slice_idle = Nanos(0);
    options.space = Space {
        elevators: vec![Elevator::None],
        slice_idle: Vec::new(),
        timeout_sync: Vec::new(),
        max_budget: Vec::new(),
        weights: Vec::new(),
        caps: false,
        ..Space::default()
    };
    let none = rtvirtio_model::Config { elevator: Elevator::None, ..options.start.clone() };
    let latencies = |s: &rtvirtio_spec::Spec, options: &PlanOptions| {
        let share = |config| 1.0 - quality(s, &profile(), options, config).unwrap().margin;
        (share(&options.start), share(&none))
    };
    let (before, after) = latencies(&s, &options);
    assert!(after < before && after > 0.9 * before, "{before} {after}");
    // Both meet the target, and neither has margin to spare.
    let latency = |share: f64| Nanos((share * Nanos::from_millis(20).0 as f64) as u64);
    s.vms[0].tasks[0].targets[0].latency = latency(before * 1.4);
    let p = plan(&s, &profile(), &options).unwrap();
    assert!(p.feasible && p.settings.is_empty(), "{:?}", p.settings);
    // Between the two, only the change meets it.
    options.safety = Ratio(0.0);
    s.vms[0].tasks[0].targets[0].latency = latency((before + after) / 2.0);
    let p = plan(&s, &profile(), &options).unwrap();
    assert!(p.feasible && p.settings.len() == 1, "{:?}", p.settings);
}
