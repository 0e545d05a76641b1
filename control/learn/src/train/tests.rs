//! The pipeline on synthetic runs whose law is known: tails are the slice model's times a
//! log-normal factor.

use rtvirtio_model::learned::ModelFileError;
use rtvirtio_model::{Config, Elevator, Slice, TailModel};
use rtvirtio_spec::{Device, LabKind, Spec};
use rtvirtio_units::{Bytes, Iops, Nanos};

use super::*;
use crate::chooser::least_sure;
use crate::load::{Stream, spec};
use crate::synthetic::{limits, profile, quick, synthetic_runs};

#[test]
fn the_host_adds_at_most_what_its_worst_run_lost() {
    let mut points = synthetic_runs(130, 0.3, 1);
    // Every run loses i ms to host stalls in its worst task, and tails without stalls are learned.
    for (i, p) in points.iter_mut().enumerate() {
        for r in &mut p.results {
            r.p9999_awake = Some(r.p9999);
            r.p9999 = Nanos(r.p9999.0 + 1_000_000 * (i as u64 + 1));
        }
    }
    // At most the loss of the worst run, and less where the bound has room for it.
    let more = fit(&points, &profile(), "", &quick()).unwrap().host_stalls.unwrap();
    assert!(more > Nanos(0) && more <= Nanos::from_millis(130), "{more}");
    // Tails with and without stalls are not mixed; all of them with stalls are accepted.
    let paced = points[5].tasks().position(|(_, s, _)| s.rate.is_some()).unwrap();
    points[5].results[paced].p9999_awake = None;
    assert!(matches!(fit(&points, &profile(), "", &quick()), Err(TrainError::Mixed { .. })));
    points.iter_mut().flat_map(|p| &mut p.results).for_each(|r| r.p9999_awake = None);
    assert_eq!(fit(&points, &profile(), "", &quick()).unwrap().host_stalls, None);
}

#[test]
fn too_few_runs_are_refused() {
    let few = synthetic_runs(50, 0.3, 1);
    let message = |points: &[Point]| fit(points, &profile(), "", &quick()).unwrap_err().to_string();
    let text = "runs of 50 different conditions, 120 are needed for a bound at 99 %: measure for longer";
    assert_eq!(message(&few), text);
    // Repeated conditions add no information: with them there would be enough runs.
    let again = [few.clone(), few.clone(), few].concat();
    assert_eq!(message(&again), text);
}

#[test]
fn runs_whose_stalls_are_not_known_count_where_they_are_most() {
    let known = |mut p: Point| {
        p.results.iter_mut().for_each(|r| r.p9999_awake = Some(r.p9999));
        p
    };
    let mut points: Vec<Point> = synthetic_runs(10, 0.3, 1).into_iter().map(known).collect();
    assert_eq!(comparable(&points).len(), 10);
    let forget = |p: &mut Point| p.results.iter_mut().for_each(|r| r.p9999_awake = None);
    points[..4].iter_mut().for_each(forget);
    assert_eq!(comparable(&points), points[4..], "four of ten say nothing");
    points[4..6].iter_mut().for_each(forget);
    let all = comparable(&points);
    assert!(
        all.len() == 10 && all.iter().flat_map(|p| &p.results).all(|r| r.p9999_awake.is_none()),
        "all, as measured"
    );
    let message = fit(&vec![points.clone(); 20].concat(), &profile(), "", &quick()).unwrap_err().to_string();
    assert!(message.contains("120 are needed"), "the same runs again are no more of them: {message}");
    let mut many = synthetic_runs(130, 0.3, 1);
    many[5] = known(many[5].clone());
    let message = fit(&many, &profile(), "", &quick()).unwrap_err().to_string();
    assert!(message.contains("known of") && message.contains("in the same way"), "{message}");
}

#[test]
fn outside_of_what_was_measured_a_bound_is_doubled_and_says_what_lies_outside() {
    use rtvirtio_model::{Forecast, Learned, UpperBasis};
    use rtvirtio_spec::Pattern;
    let points = synthetic_runs(130, 0.3, 3);
    let model = Learned::bound(std::sync::Arc::new(fit(&points, &profile(), "", &quick()).unwrap()));
    let (mut spec, config) = inputs(&points[0]);
    let of = |spec: &Spec| -> Forecast { model.forecast(&profile(), spec, &config).unwrap().swap_remove(0) };
    let inside = of(&spec).upper.unwrap();
    assert_eq!((inside.basis, inside.outside.len(), inside.run_s), (UpperBasis::Pooled, 0, 8.0));
    spec.vms[0].tasks[0].pattern = Pattern::Sequential;
    let outside = of(&spec).upper.unwrap();
    assert_eq!((outside.basis, outside.outside), (UpperBasis::Extrapolated, vec!["pattern".to_owned()]));
    let ratio = outside.latency_ns.0 as f64 / inside.latency_ns.0 as f64;
    assert!((ratio - 2.0).abs() < 1e-3, "{ratio}");
    spec.vms[0].tasks[0].pattern = Pattern::Random;
    spec.vms[0].tasks[0].rate = Some(Iops(1e6));
    let far = of(&spec).upper.unwrap();
    assert!(far.outside.iter().any(|what| what == "rate"), "{:?}", far.outside);
    // Held below its own rates: late by more the longer it lasts, which no sweep has measured.
    let (spec, mut config) = inputs(&points[0]);
    let declared: f64 = spec.vms[0].tasks.iter().filter_map(|t| t.rate).map(|r| r.0).sum();
    for (cap, marked) in [(0.5 * declared, true), (2.0 * declared, false)] {
        config.vms[0].cap = Some(Iops(cap));
        let held = model.forecast(&profile(), &spec, &config).unwrap().swap_remove(0).upper.unwrap();
        assert_eq!(held.outside.iter().any(|what| what.contains("limit")), marked, "{:?}", held.outside);
    }
}

#[test]
fn a_bound_alongside_writes_has_room_for_the_drive_to_stand_still() {
    use rtvirtio_model::learned::writes;
    use rtvirtio_model::{Forecast, Learned, declared_shares, service};
    let mut erasing = profile();
    let longest = erasing.write.iter_mut().max_by_key(|p| p.depth).unwrap();
    longest.max = Nanos(longest.max.0 + 1_000_000_000);
    let stall = service(&erasing).unwrap().write_stall;
    assert!(stall > Nanos::from_millis(900), "{stall}");
    let points = synthetic_runs(130, 0.3, 3);
    let of = |model: &HostModel, point: &Point| -> Vec<Forecast> {
        let (spec, config) = inputs(point);
        Learned::bound(std::sync::Arc::new(model.clone())).forecast(&profile(), &spec, &config).unwrap()
    };
    let model = fit(&points, &profile(), "", &quick()).unwrap();
    let stalling = HostModel { profile: erasing.clone(), ..model.clone() };
    let (mut with_writes, mut alone) = (0, 0);
    for point in &points {
        let (spec, config) = inputs(point);
        let load: f64 = declared_shares(&erasing, &spec, &config).unwrap().iter().sum();
        for (with, without) in of(&stalling, point).iter().zip(of(&model, point)) {
            let bound = |f: &Forecast| f.upper.as_ref().unwrap().latency_ns.as_secs_f64();
            if writes(&spec) {
                // The busy period that the stall begins, on top of the expected tail.
                let room = with.latency_ns.as_secs_f64() + stall.as_secs_f64() / (1.0 - load).max(0.05);
                assert!(bound(with) >= 0.999 * room, "{} of {room}", bound(with));
                with_writes += 1;
            } else {
                assert!((bound(with) / bound(&without) - 1.0).abs() < 1e-6);
                alone += 1;
            }
        }
    }
    assert!(with_writes > 50 && alone > 50, "{with_writes} with writes, {alone} not");
}

#[test]
fn a_lower_confidence_needs_fewer_runs() {
    assert_eq!([0.01, 0.05, 0.1].map(fewest), [120, 24, 12]);
    let settings = TrainSettings { miss: 0.1, ..quick() };
    let model = fit(&synthetic_runs(12, 0.3, 1), &profile(), "", &settings).unwrap();
    assert!((model.confidence() - 0.9).abs() < 1e-12 && (model.high - 0.9).abs() < 1e-12);
    let message = fit(&synthetic_runs(11, 0.3, 1), &profile(), "", &settings).unwrap_err().to_string();
    assert!(message.contains("12 are needed for a bound at 90 %"), "{message}");
}

#[test]
fn a_model_file_comes_back_and_a_wrong_one_is_refused() {
    let model = fit(&synthetic_runs(130, 0.3, 3), &profile(), "today", &quick()).unwrap();
    let text = serde_json::to_string(&model).unwrap();
    assert_eq!(HostModel::from_json(&text).unwrap(), model);
    model.fits(&profile()).unwrap();
    let (later, other) = (
        HostModel { generated: "tomorrow".to_owned(), ..model.clone() },
        HostModel { points: 1, ..model.clone() },
    );
    assert_eq!(model.fingerprint(), later.fingerprint());
    assert_ne!(model.fingerprint(), other.fingerprint());
    let of = |id: &str| Profile { identity: Some(id.to_owned()), ..profile() };
    let drive = HostModel { profile: of("wwid-a"), ..model.clone() };
    drive.fits(&profile()).unwrap();
    drive.fits(&of("wwid-a")).unwrap();
    let message = drive.fits(&of("wwid-b")).unwrap_err().to_string();
    assert!(message.contains("(wwid-a)") && message.contains("(wwid-b)"), "{message}");
    let updated = Profile { kernel: "7.0".to_owned(), ..profile() };
    assert!(model.fits(&updated).unwrap_err().to_string().contains("7.0"));
    assert!(model.fits(&Profile { cpus: 64, ..profile() }).unwrap_err().to_string().contains("64 CPUs"));
    let elsewhere = Profile { device: "sda".to_owned(), ..profile() };
    let message = model.fits(&elsewhere).unwrap_err().to_string();
    assert!(
        message.contains("twin-qlc-nvme") && message.contains("sda") && message.contains("--sweep"),
        "{message}"
    );
    let damaged = |from: &str, to: &str| HostModel::from_json(&text.replacen(from, to, 1));
    assert!(matches!(damaged("rtvirtio.model.v8", "rtvirtio.model.v0"), Err(ModelFileError::Form(_))));
    assert!(matches!(damaged("\"ln_slice\"", "\"other\""), Err(ModelFileError::Damaged(_))));
    assert!(matches!(damaged("\"weights\":[", "\"weights\":[1.0,"), Err(ModelFileError::Damaged(_))));
    assert!(matches!(damaged("\"seconds\":8.0", "\"seconds\":0.0"), Err(ModelFileError::Damaged(_))));
    assert!(HostModel::from_json("{}").is_err() && HostModel::from_json("").is_err());
}

#[test]
fn the_next_runs_are_of_every_regime_and_repeat() {
    let points = synthetic_runs(130, 0.3, 4);
    let device = Device::Twin { profile: "qlc-nvme".to_owned(), size: Bytes(1 << 30) };
    let next = |seed| least_sure(&points, &profile(), &device, &limits(), 8, seed).unwrap();
    let first = next(9);
    assert_eq!(first.len(), 8);
    assert_eq!(first, next(9));
    let regimes: std::collections::BTreeSet<usize> = first
        .iter()
        .map(|c| {
            let spec = spec(&c.vms, device.clone(), LabKind::Process);
            Regime::from_config(&spec, &c.knobs.config()).category()
        })
        .collect();
    assert_eq!(regimes.len(), 4);
    // In too few of these runs BFQ does not idle for a bound of their own.
    let flow = first.iter().filter(|c| {
        let spec = spec(&c.vms, device.clone(), LabKind::Process);
        Regime::from_config(&spec, &c.knobs.config()).is_non_idling()
    });
    assert_eq!(flow.count(), 6);
}

#[test]
fn a_setting_that_runs_speak_against_is_not_chosen() {
    use crate::design::Neighbour;
    use crate::load::Knobs;
    use rtvirtio_planner::{PlanOptions, plan};
    // Tails are 60 times those of the slice model, alongside a neighbour without a limit
    // 30 000 times.
    let mut points = synthetic_runs(300, 0.4, 8);
    for p in &mut points {
        let limited = |vm: usize| p.knobs.caps.get(vm).copied().flatten().is_some();
        let flooded =
            p.vms.iter().enumerate().any(|(i, vm)| vm.iter().any(|s| s.rate.is_none()) && !limited(i));
        let times = if flooded { 30_000 } else { 60 };
        p.results.iter_mut().for_each(|r| r.p9999 = Nanos(r.p9999.0 * times));
    }
    let model = std::sync::Arc::new(fit(&points, &profile(), "", &quick()).unwrap());
    let device = Device::Twin { profile: "qlc-nvme".to_owned(), size: Bytes(1 << 30) };
    let mut spec =
        spec(&[vec![Stream::paced(100.0)], vec![Neighbour::Flood.stream()]], device, LabKind::Process);
    let start = Knobs::default_bfq(2).config();
    // A target that the slice model has met with room to spare, and that no bound meets.
    let quick = Config { elevator: Elevator::None, ..start.clone() };
    let tail = Slice.forecast(&profile(), &spec, &quick).unwrap()[0].latency_ns;
    let target =
        rtvirtio_spec::Target { percentile: rtvirtio_units::Percentile::P9999, latency: Nanos(5 * tail.0) };
    spec.vms[0].tasks[0].targets = vec![target];
    let found = |options: PlanOptions| {
        let plan = plan(&spec, &profile(), &options).unwrap();
        (plan.feasible, plan.config(&spec, &start).unwrap().vms[1].cap.is_some())
    };
    assert_eq!(found(PlanOptions::new(start.clone())), (true, false), "no limit is needed for all it knows");
    assert_eq!(found(PlanOptions::bound(start.clone(), model)), (false, true));
}
