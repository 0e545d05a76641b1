//! Synthetic runs for tests: tails are the slice model's times a log-normal factor.

use rtvirtio_measure::noise::Noise;
use rtvirtio_measure::{HostFacts, VmKind};
use rtvirtio_model::{Analytical, Coefficients, Elevator, Profile, Slice, TailModel};
use rtvirtio_stats::Random;
use rtvirtio_units::{Iops, Nanos};

use crate::condition::inputs;
use crate::dataset::{Outcome, Point, pack};
use crate::design::{Limits, conditions};
use crate::train::TrainSettings;

/// Profile of the flash twin.
#[must_use]
pub fn profile() -> Profile {
    let text = include_str!("../data/qlc-nvme.profile.json");
    serde_json::from_str(text).unwrap()
}

/// A host with a device of this name.
#[must_use]
pub fn host(device: &str) -> HostFacts {
    HostFacts {
        kernel: "6.1".to_owned(),
        cpus: 2,
        vmm: "none".to_owned(),
        accelerator: "none".to_owned(),
        device: device.to_owned(),
    }
}

const ELEVATORS: [Elevator; 2] = [Elevator::Bfq, Elevator::None];

/// Limits of the flash twin.
#[must_use]
pub fn limits() -> Limits<'static> {
    Limits { elevators: &ELEVATORS, writes: true, cost: &|_, block| 60e-6 + block.0 as f64 * 1e-9 }
}

/// Synthetic runs; `spread` is the standard deviation of ln(tail).
#[must_use]
pub fn synthetic_runs(n: usize, spread: f64, seed: u64) -> Vec<Point> {
    let mut random = Random::new(seed);
    conditions(n, &limits(), seed)
        .into_iter()
        .enumerate()
        .map(|(i, c)| {
            let mut point = Point {
                id: format!("synthetic/{i}"),
                device: "qlc-nvme".to_owned(),
                kind: VmKind::Process,
                scheme: "sweep".to_owned(),
                seed: i as u64,
                seconds: 8.0,
                knobs: c.knobs,
                classes: None,
                vms: c.vms,
                noise: Noise::default(),
                disk: None,
                results: Vec::new(),
            };
            follow(&mut point, spread, &mut random);
            point
        })
        .collect()
}

/// Sets the results of a run by the synthetic law: rates are lost as in the slice model.
pub fn follow(point: &mut Point, spread: f64, random: &mut Random) {
    let (spec, config) = inputs(point);
    let forecasts = Slice.forecast(&profile(), &spec, &config).unwrap();
    // Shared factor: tasks of one run are correlated.
    let common = random.normal();
    let streams = point.vms.iter().flatten();
    point.results = streams
        .zip(forecasts)
        .map(|(stream, f)| {
            let factor = (spread * (0.8 * common + 0.6 * random.normal())).exp();
            let tail = Nanos((f.latency_ns.0 as f64 * factor) as u64);
            let rate = Iops(stream.rate.map_or(1000.0, |r| r.0) * f.rate_kept);
            Outcome { hist: vec![400, 1000], ..alike(1000, rate, tail) }
        })
        .collect();
}

/// Settings of a fit that is fast enough for a test.
#[must_use]
pub fn quick() -> TrainSettings {
    TrainSettings { trees: 60, ..TrainSettings::default() }
}

/// Outcome of a task whose `n` requests all took the same time.
#[must_use]
pub fn alike(n: u64, rate: Iops, tail: Nanos) -> Outcome {
    let latencies = std::iter::repeat_n(tail, n as usize).collect();
    Outcome {
        n,
        rate,
        p50: tail,
        p99: tail,
        p9999: tail,
        max: tail,
        p9999_awake: None,
        p9999_placebo: None,
        p9999_fio: None,
        hist: pack(&latencies),
        upper: None,
        promised: None,
    }
}

/// Runs whose tails follow the paper's equations with these coefficients.
#[must_use]
pub fn by_equations(truth: Coefficients) -> Vec<Point> {
    let model = Analytical { coefficients: truth, ..Default::default() };
    let mut points = synthetic_runs(700, 0.0, 5);
    for p in &mut points {
        let (spec, config) = inputs(p);
        if let Ok(forecasts) = model.forecast(&profile(), &spec, &config) {
            for (r, f) in p.results.iter_mut().zip(forecasts) {
                r.p9999 = f.latency_ns;
            }
        }
    }
    points
}
