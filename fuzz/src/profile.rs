//! A measured profile: any bytes are refused with words, or are a profile with which the models
//! answer or refuse with words, whatever its numbers are.
//!
//! Layout of the input: that of [`json`], over profiles that were measured.

use std::path::Path;
use std::sync::OnceLock;

use rtvirtio_measure::profile::parse;
use rtvirtio_model::{
    Analytical, Bfq, Config, Elevator, Forecast, Profile, Slice, TailModel, VmConfig, declared_shares,
    service, spare_rates,
};
use rtvirtio_spec::Spec;
use rtvirtio_units::{Iops, Nanos};

use super::json;

const SPECS: [&str; 2] =
    [include_str!("../../examples/flood.toml"), include_str!("../../examples/existing-vms.toml")];

fn specs() -> &'static [Spec] {
    static SPECS_READ: OnceLock<Vec<Spec>> = OnceLock::new();
    SPECS_READ.get_or_init(|| {
        SPECS.iter().map(|text| rtvirtio_spec::parse("spec.toml", text).expect("an example")).collect()
    })
}

/// Configurations that take each way through the models.
fn configs(spec: &Spec) -> [Config; 3] {
    let quick = Bfq { slice_idle: Nanos(0), low_latency: false, ..Bfq::default() };
    let vm = VmConfig { weight: 100, cap: None, guest_elevator: Elevator::None, guest_bfq: quick };
    let vms = vec![vm; spec.vms.len()];
    let mut weighted = vms.clone();
    for (i, vm) in weighted.iter_mut().enumerate() {
        vm.weight = [1, 1_000, 300][i % 3];
        vm.cap = [None, Some(Iops(1.0)), Some(Iops(50_000.0))][i % 3];
    }
    [
        Config { elevator: Elevator::Bfq, bfq: Bfq::default(), vms: vms.clone() },
        Config { elevator: Elevator::Bfq, bfq: quick, vms: weighted },
        Config { elevator: Elevator::None, bfq: quick, vms },
    ]
}

/// Reads a profile, and asks the models.
///
/// # Panics
/// When a refusal has no words, a profile does not come back from its own text, or an answer is no
/// number.
pub fn play(data: &[u8]) {
    let measured = [
        include_str!("../../control/learn/data/qlc-nvme.profile.json"),
        include_str!("../documents/own-disk.profile.json"),
        include_str!("../documents/guest.profile.json"),
    ];
    let profile = match parse(Path::new("profile.json"), &json::document(&measured, data)) {
        Ok(profile) => profile,
        Err(e) => return assert!(!e.to_string().is_empty()),
    };
    let text = serde_json::to_vec_pretty(&profile).expect("JSON");
    assert_eq!(parse(Path::new("profile.json"), &text).expect("its own text"), profile);
    if let Ok(service) = service(&profile) {
        let lines = [Some(service.read), service.write];
        for line in lines.into_iter().flatten() {
            for v in [line.occupancy, line.per_byte, line.alone, line.alone_per_byte] {
                assert!(v.is_finite() && v >= 0.0, "{line:?}");
            }
        }
        for depth in [0, 1, 7, 32, u32::MAX] {
            let share = service.share_at(depth);
            assert!((0.0..=1.0).contains(&share), "{share} at depth {depth}");
        }
    }
    // One spec and configuration for an input: all of them would take most of the time.
    let choice = data.iter().map(|b| usize::from(*b)).sum::<usize>();
    let spec = &specs()[choice % SPECS.len()];
    ask(&profile, spec, &configs(spec)[choice / SPECS.len() % 3]);
}

fn ask(profile: &Profile, spec: &Spec, config: &Config) {
    for model in [&Slice as &dyn TailModel, &Analytical::default()] {
        match model.forecast(profile, spec, config) {
            Ok(forecasts) => answered(&forecasts, spec),
            Err(e) => assert!(!e.to_string().is_empty()),
        }
    }
    if let Ok(rates) = spare_rates(profile, spec, config) {
        assert!(rates.iter().flatten().all(|r| r.0.is_finite() && r.0 >= 0.0), "{rates:?}");
    }
    if let Ok(shares) = declared_shares(profile, spec, config) {
        assert!(shares.iter().all(|s| s.is_finite() && *s >= 0.0), "{shares:?}");
    }
}

/// What a forecast is, whatever it rests on.
pub fn answered(forecasts: &[Forecast], spec: &Spec) {
    assert_eq!(forecasts.len(), spec.tasks().count());
    for f in forecasts {
        assert!((0.0..=1.0).contains(&f.rate_kept), "{f:?}");
        let sum: u128 = f.terms.iter().map(|t| u128::from(t.latency_ns.0)).sum();
        assert_eq!(u128::from(f.latency_ns.0), sum, "{f:?}");
    }
}
