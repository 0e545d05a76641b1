//! A learned model file: any bytes are refused with words, or are a model that answers for every
//! task, or refuses with words.
//!
//! Layout of the input: that of [`json`], over small models of all parts: with guests and runs that
//! do not idle, and without.

use std::sync::{Arc, OnceLock};

use rtvirtio_model::learned::{
    GuestModel, HOST_MODEL_SCHEMA, HostModel, NAMES, NonIdlingModel, Regime, WIDTH, features,
};
use rtvirtio_model::{
    Bfq, Config, Elevator, Forecast, GuestPoint, ModelKind, Profile, UpperBasis, VmConfig, model,
};
use rtvirtio_spec::Spec;
use rtvirtio_stats::Rows;
use rtvirtio_stats::conformal::Quantile;
use rtvirtio_stats::forest::{Forest, ForestOptions};
use rtvirtio_units::{Iops, Nanos};

use super::json;

const PROFILE: &str = include_str!("../documents/own-disk.profile.json");
const PROCESSES: &str = include_str!("../../examples/flood.toml");
const GUESTS: &str = include_str!("../../examples/existing-vms.toml");

/// Rows that the small models learn from.
const ROWS: usize = 12;

fn random(state: &mut u64) -> f64 {
    // Knuth's MMIX generator: the documents must be the same in every run.
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 11) as f64 / (1u64 << 53) as f64
}

fn rows(width: usize, seed: u64) -> Rows {
    let mut rows = Rows::new(width);
    let mut state = seed;
    for _ in 0..ROWS {
        let x: Vec<f64> = (0..width).map(|_| 6.0 * random(&mut state) - 3.0).collect();
        rows.push(&x, x[0] - 5.0, 1.0).expect("a row");
    }
    rows
}

fn groups() -> Vec<usize> {
    (0..ROWS).map(|i| i / 2).collect()
}

fn forest(seed: u64) -> Forest {
    let options = ForestOptions { trees: 10, leaf: 3, seed, ..ForestOptions::default() };
    let lost: Vec<f64> = (0..ROWS).map(|i| i as f64 / 100.0).collect();
    let (mut forest, _) =
        Forest::fit(&rows(WIDTH, seed), &lost, &groups(), &[0.5], &options).expect("a forest");
    // Fewer trees than a fit makes: edits then hit each of them.
    forest.trees.truncate(2);
    forest
}

fn whole() -> HostModel {
    let profile: Profile = serde_json::from_str(PROFILE).expect("a profile");
    let bound = Quantile { score: 0.4, miss: 0.1, groups: 40, rows: 90 };
    let guest =
        GuestPoint { kind: "qemu-kvm".to_owned(), point: profile.read[0].clone(), cpu_per_request: 2e-5 };
    HostModel {
        schema: HOST_MODEL_SCHEMA.to_owned(),
        profile,
        features: NAMES.map(str::to_owned).to_vec(),
        seconds: 8.0,
        points: 12,
        rows: ROWS,
        generated: "2026-11-23".to_owned(),
        forest: forest(1),
        high: 0.9,
        bound,
        non_idling: Some(NonIdlingModel {
            forest: forest(2),
            high: 0.8,
            bound,
            host_stalls: Some(Nanos(50_000)),
        }),
        host_stalls: Some(Nanos(1_000_000)),
        guests: Some(GuestModel { guest, points: 12, rows: ROWS, forest: forest(3), high: 0.7, bound }),
    }
}

/// The models whose edits are read, as their files hold them.
pub fn documents() -> &'static [String; 2] {
    static MADE: OnceLock<[String; 2]> = OnceLock::new();
    MADE.get_or_init(|| {
        let whole = whole();
        let least = HostModel { non_idling: None, host_stalls: None, guests: None, ..whole.clone() };
        [whole, least].map(|m| serde_json::to_string(&m).expect("JSON"))
    })
}

fn specs() -> &'static [Spec; 2] {
    static READ: OnceLock<[Spec; 2]> = OnceLock::new();
    READ.get_or_init(|| {
        [PROCESSES, GUESTS].map(|t| rtvirtio_spec::parse("spec.toml", t).expect("an example"))
    })
}

fn configs(spec: &Spec) -> [Config; 3] {
    let vm = VmConfig { weight: 100, cap: None, guest_elevator: Elevator::None, guest_bfq: Bfq::default() };
    let mut vms = vec![vm; spec.vms.len()];
    let idling = Config { elevator: Elevator::Bfq, bfq: Bfq::default(), vms: vms.clone() };
    vms[0].cap = Some(Iops(20.0));
    vms[1].weight = 1_000;
    let bfq = Bfq { slice_idle: Nanos(0), low_latency: false, ..Bfq::default() };
    let quick = Config { elevator: Elevator::Bfq, bfq, vms: vms.clone() };
    [idling, quick, Config { elevator: Elevator::None, bfq, vms }]
}

/// Reads a model, and asks it.
///
/// # Panics
/// When a refusal has no words, a model does not come back from its own text, or an answer is none.
pub fn play(data: &[u8]) {
    let documents = documents().each_ref().map(String::as_str);
    let document = json::document(&documents, data);
    let read = match std::str::from_utf8(&document) {
        Ok(text) => HostModel::from_json(text),
        Err(_) => return,
    };
    let read = match read {
        Ok(read) => Arc::new(read),
        Err(e) => return assert!(!e.to_string().is_empty()),
    };
    let again = HostModel::from_json(&serde_json::to_string(&*read).expect("JSON")).expect("its own text");
    assert_eq!(again.fingerprint(), read.fingerprint());
    assert!((0.0..1.0).contains(&read.confidence()));
    let here: Profile = serde_json::from_str(PROFILE).expect("a profile");
    assert!(read.fits(&read.profile).is_ok());
    // One spec and configuration for an input: all of them would take most of the time.
    let choice = data.iter().map(|b| usize::from(*b)).sum::<usize>();
    let spec = &specs()[choice % 2];
    let config = &configs(spec)[choice / 2 % 3];
    let model = model(ModelKind::Bound, Some(&read)).expect("a model");
    match model.forecast(&here, spec, config) {
        Ok(forecasts) => answered(&forecasts, spec),
        Err(e) => assert!(!e.to_string().is_empty()),
    }
    if let Ok((rows, _)) = features(&read.profile, spec, config, read.seconds) {
        for row in rows {
            assert!(row.iter().all(|v| v.is_finite()), "{row:?}");
            let spread = read.spread(&row, Regime::from_config(spec, config)).expect("finite features");
            assert!(spread.is_finite() && spread >= 0.0, "{spread}");
        }
    }
}

fn answered(forecasts: &[Forecast], spec: &Spec) {
    assert_eq!(forecasts.len(), spec.tasks().count());
    for f in forecasts {
        assert!((0.0..=1.0).contains(&f.rate_kept), "{f:?}");
        let upper = f.upper.as_ref().expect("a bound");
        assert!(
            upper.latency_ns >= f.latency_ns || upper.latency_ns.0 > 1 << 53,
            "a bound below what is expected: {f:?}"
        );
        assert!(upper.confidence.0 > 0.0 && upper.confidence.0 < 1.0);
        assert_eq!(upper.basis == UpperBasis::Extrapolated, !upper.outside.is_empty());
        assert!(f.promised() >= f.judged());
    }
}
