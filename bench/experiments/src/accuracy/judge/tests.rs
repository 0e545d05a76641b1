//! Judging on synthetic runs whose law is known: tails are the slice model's times a log-normal
//! factor.

use rtvirtio_learn::condition::regime;
use rtvirtio_learn::synthetic::{follow, profile, quick, synthetic_runs};
use rtvirtio_learn::train::fit_guests;
use rtvirtio_measure::VmKind;
use rtvirtio_model::{Elevator, GuestPoint};
use rtvirtio_units::Nanos;

use super::*;

#[test]
fn a_known_law_is_learnt_and_bounded() {
    let points = synthetic_runs(400, 0.3, 1);
    let all = folds(&points, 3, 2);
    let (train, test) = all[0].clone();
    let a = evaluate(&train, &test, &profile(), &quick()).unwrap();
    let ours = &a.scores[0];
    assert!(ours.factor < 1.45, "typical factor {}", ours.factor);
    assert!(a.coverage > 0.97, "coverage {}", a.coverage);
    // With a deviation of 0.3, 99 % lie below exp(2.33 * 0.3) = 2.0 times the median. A forest
    // gives away some of that on a law as smooth as this one; on real runs it is far sharper than
    // networks (docs/results/accuracy.md).
    assert!(a.sharpness < 4.5, "upper / actual {}", a.sharpness);
    assert_eq!(
        a.held.len(),
        test.iter().map(|p| p.tasks().filter(|(_, s, _)| s.rate.is_some()).count()).sum::<usize>()
    );
    // Every run is judged once, by a model that did not see its condition.
    let mut ids: Vec<&str> = all.iter().flat_map(|(_, test)| test).map(|p| p.id.as_str()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), points.len());
    assert!(all.iter().all(|(train, test)| !train.iter().any(|t| test.iter().any(|p| t.repeats(p)))));
    let models = all
        .iter()
        .map(|(train, test)| (Models::of_host(fit(train, &profile(), "", &quick()).unwrap()), test.clone()));
    let c = judge(&models.collect::<Vec<_>>(), &profile()).unwrap();
    assert_eq!((c.held_out, c.trained), (points.len(), train.len()));
    assert!(c.held.len() > 2 * a.held.len() && c.coverage > 0.97 && c.sharpness < 4.5, "{}", c.sharpness);
}

#[test]
fn what_the_host_adds_is_bounded_by_itself() {
    let mut points = synthetic_runs(130, 0.3, 1);
    // Every run loses i ms to host stalls in its worst task, and tails without stalls are learned.
    for (i, p) in points.iter_mut().enumerate() {
        for r in &mut p.results {
            r.p9999_awake = Some(r.p9999);
            r.p9999 = Nanos(r.p9999.0 + 1_000_000 * (i as u64 + 1));
        }
    }
    let model = fit(&points, &profile(), "", &quick()).unwrap();
    let model = Models::of_host(model);
    let a = judge(&[(model.clone(), points.clone())], &profile()).unwrap();
    assert!(a.held.iter().all(|h| h.with_host_ms > h.actual_ms));
    let (n, before) = (a.held.len(), a.with_host.clone().unwrap());
    assert!(before.coverage > 0.98 && (before.n, before.unknown) == (n, 0));
    // A run in which the host stalled for a minute still counts for tails as
    // measured.
    let mut lost = points[..5].to_vec();
    for r in lost.iter_mut().flat_map(|p| &mut p.results) {
        (r.p9999, r.p9999_awake) = (Nanos::from_secs_f64(60.0), None);
    }
    let a = a.as_measured_with(&model, &lost, &profile()).unwrap();
    let after = a.with_host.unwrap();
    assert!(after.unknown == 5 && after.n > n && after.coverage < before.coverage, "{after:?}");
    assert_eq!(a.held.len(), n, "of tails less the stalls nothing is known there");
}

#[test]
fn a_curve_has_no_point_of_too_few_conditions() {
    let few = synthetic_runs(50, 0.3, 1);
    let again = [few.clone(), few.clone(), few].concat();
    let curve = learning_curve(&again, &again[..5], &profile(), &[120, 150], &quick()).unwrap();
    assert!(curve.is_empty());
}

/// Runs that follow the slice model within a tenth, but where BFQ idles at random within a
/// factor of ten.
fn chancy(n: usize, seed: u64) -> Vec<Point> {
    let mut points = synthetic_runs(n, 0.1, seed);
    let mut random = Random::new(seed);
    for point in points.iter_mut().filter(|p| !regime(p).is_non_idling()) {
        let factor = (2.3 * random.normal()).exp();
        point.results.iter_mut().for_each(|r| r.p9999 = Nanos((r.p9999.0 as f64 * factor) as u64));
    }
    points
}

#[test]
fn chance_where_bfq_idles_does_not_widen_the_bounds_elsewhere() {
    let model = fit(&chancy(400, 1), &profile(), "", &quick()).unwrap();
    assert!(model.non_idling.is_some());
    // With one forest for all, the score of the runs that idle goes for all of them.
    let one = HostModel { non_idling: None, ..model.clone() };
    let test = chancy(200, 9);
    let of =
        |model: &HostModel| judge(&[(Models::of_host(model.clone()), test.clone())], &profile()).unwrap();
    let (with, measured) = of(&model).non_idling();
    let (without, _) = of(&one).non_idling();
    assert!(with.n > 100 && with.coverage > 0.97 && measured.is_none(), "{with:?}");
    assert!(with.sharpness < 2.0 && with.sharpness < 0.6 * without.sharpness, "{with:?} after {without:?}");
}

/// Runs of `chancy`, but every other run without idling of BFQ asks for more than the device
/// has, and without a scheduler a fifth more is lost than in the slice model.
fn half_full(n: usize, seed: u64) -> Vec<Point> {
    let mut points = chancy(n, seed);
    let mut random = Random::new(seed);
    for (i, point) in points.iter_mut().filter(|p| regime(p).is_non_idling()).enumerate() {
        if i % 2 == 0 {
            for rate in point.vms.iter_mut().flatten().filter_map(|s| s.rate.as_mut()) {
                rate.0 *= 60.0;
            }
        }
        follow(point, 0.1, &mut random);
        if point.knobs.elevator == Elevator::None {
            for r in &mut point.results {
                r.rate.0 *= 0.8;
                r.p9999 = Nanos(r.p9999.0 + Nanos::from_secs_f64(0.2 * point.seconds).0);
            }
        }
    }
    points
}

#[test]
fn full_runs_do_not_make_others_doubt_their_rates() {
    // Tails of full runs differ from those of the slice model by as much as others, so they are
    // in the same leaves.
    let mut model = fit(&half_full(400, 1), &profile(), "", &quick()).unwrap();
    // A bound that shows no rate.
    model.non_idling.as_mut().expect("a part of its own").host_stalls = Some(Nanos::from_secs_f64(1e3));
    let judged = judge(&[(Models::of_host(model), half_full(200, 9))], &profile()).unwrap();
    let rates = judged.non_idling_rates;
    let lost = judged.non_idling().0.n - rates.kept;
    assert!(rates.kept > 40 && lost > 80, "{lost} {rates:?}");
    assert!(rates.broken == 0 && rates.refused < rates.kept / 10, "{rates:?}");
}

/// A profile whose guests were measured, by emulation.
fn with_guest() -> Profile {
    let mut profile = profile();
    let point = profile.read[0].clone();
    profile.guest = Some(GuestPoint { kind: "qemu-tcg".to_owned(), point, cpu_per_request: 1e-5 });
    profile
}

/// Runs in guests whose tails are ten times as long as those of processes.
fn in_guests(n: usize, seed: u64) -> Vec<Point> {
    let mut runs = synthetic_runs(n, 0.2, seed);
    for (i, run) in runs.iter_mut().enumerate() {
        run.kind = VmKind::Qemu;
        run.id = format!("in-guests/{i}");
        run.results.iter_mut().for_each(|r| r.p9999 = Nanos(r.p9999.0 * 10));
    }
    runs
}

fn both(guests: &[Point]) -> HostModel {
    let model = fit(&synthetic_runs(130, 0.2, 1), &profile(), "", &quick()).unwrap();
    let part = fit_guests(guests, &model, with_guest().guest.as_ref(), &quick()).unwrap();
    HostModel { guests: Some(part), ..model }
}

#[test]
fn guests_are_predicted_from_guests_and_processes_as_before() {
    let model = both(&in_guests(130, 2));
    let alone = HostModel { guests: None, ..model.clone() };
    let test = in_guests(60, 7);
    let of = |model: &HostModel, test: &[Point]| {
        judge(&[(Models::of_host(model.clone()), test.to_vec())], &with_guest()).unwrap()
    };
    let (with, without) = (of(&model, &test), of(&alone, &test));
    assert!(with.scores[0].factor < 2.0, "{:?}", with.scores[0]);
    assert!(with.scores[0].factor < 0.5 * without.scores[0].factor, "{:?}", without.scores[0]);
    assert!(with.coverage > 0.95 && without.coverage < with.coverage, "{}", with.coverage);
    let processes = synthetic_runs(60, 0.2, 7);
    let says = |model: &HostModel| {
        let held = of(model, &processes).held;
        held.iter().map(|h| (h.expected_ms, h.upper_ms)).collect::<Vec<_>>()
    };
    assert_eq!(says(&model), says(&alone));
}
