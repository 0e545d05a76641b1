//! Fits the guest part of a host model to runs in QEMU guests.

use rtvirtio_model::learned::GuestModel;
use rtvirtio_model::{GuestPoint, HostModel, Profile};

use super::{Start, TrainError, TrainSettings, bounded_forest, fewest, rows};
use crate::condition::conditions;
use crate::dataset::Point;

/// Shares of runs that may miss the bound, tried in turn where guests ran too few conditions for
/// the requested share: 98, 95 and 90 %.
const MISSES: [f64; 3] = [0.02, 0.05, 0.1];

/// Share of runs that may miss a bound from `have` conditions: `asked`, or the least of [`MISSES`]
/// for which they suffice; `None` if they suffice for none.
fn carried(asked: f64, have: usize) -> Option<f64> {
    let wider = MISSES.into_iter().filter(|m| *m > asked);
    std::iter::once(asked).chain(wider).find(|m| have >= fewest(*m))
}

/// Fits the guest part of a model of process VMs. `guest` is the latency added by a lone guest,
/// measured before; the device must be as the model knows it, because it is queried with that.
/// Guests run slower than processes, so they run fewer conditions: where these are too few for the
/// share `settings.miss`, the bound has a lower confidence, which it reports.
///
/// # Errors
/// [`TrainError`]: fewer than 12 conditions, runs of another length than those of process VMs, no
/// measured guest.
pub fn fit_guests(
    points: &[Point],
    model: &HostModel,
    guest: Option<&GuestPoint>,
    settings: &TrainSettings,
) -> Result<GuestModel, TrainError> {
    let guest = guest.filter(|g| g.is_of_guest()).ok_or(TrainError::NoGuest)?;
    if let Some(other) = points.iter().find(|p| p.seconds != model.seconds) {
        return Err(TrainError::OtherLength { guests: other.seconds, processes: model.seconds });
    }
    let profile = Profile { guest: Some(guest.clone()), ..model.profile.clone() };
    let have = conditions(points).len();
    let Some(miss) = carried(settings.miss, have) else {
        let least = MISSES.into_iter().fold(settings.miss, f64::max);
        return Err(TrainError::TooFewGuests { percent: 100.0 * (1.0 - least), have, need: fewest(least) });
    };
    let mut rows = rows(points, &profile)?;
    // Tails as measured, for all rows: values known for a few do not represent the others.
    for row in &mut rows {
        row.actual = row.with_host.take().unwrap_or(row.actual);
    }
    let bounded = bounded_forest(&rows, &Start::of_all(miss), &TrainSettings { miss, ..settings.clone() })?;
    Ok(GuestModel {
        guest: guest.clone(),
        points: points.len(),
        rows: rows.len(),
        forest: bounded.forest,
        high: bounded.high,
        bound: bounded.bound,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rtvirtio_measure::VmKind;
    use rtvirtio_model::learned::ModelFileError;
    use rtvirtio_model::{Learned, TailModel, UpperBasis};
    use rtvirtio_units::Nanos;

    use super::*;
    use crate::synthetic::{profile, quick, synthetic_runs};
    use crate::train::{fit, inputs};

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
    fn few_conditions_carry_a_bound_of_less_confidence_and_it_says_so() {
        assert_eq!(carried(0.01, 120), Some(0.01));
        assert_eq!(carried(0.01, 119), Some(0.02));
        assert_eq!(carried(0.01, 24), Some(0.05));
        assert_eq!(carried(0.01, 12), Some(0.1));
        assert_eq!((carried(0.01, 11), carried(0.2, 11)), (None, Some(0.2)));
        let model = both(&in_guests(30, 2));
        assert!((model.guests.as_ref().unwrap().confidence() - 0.95).abs() < 1e-9);
        assert!((model.confidence() - 0.99).abs() < 1e-9);
        let seen = &in_guests(30, 2)[0];
        let (spec, mut config) = inputs(seen);
        let learned = Learned::bound(Arc::new(model));
        let of = |given: &Profile, config: &_| learned.forecast(given, &spec, config).unwrap().swap_remove(0);
        let upper = of(&with_guest(), &config).upper.unwrap();
        assert_eq!((upper.basis, upper.outside.len()), (UpperBasis::Guests, 0));
        assert!((upper.confidence.0 - 0.95).abs() < 1e-9);
        // A profile without a guest does not say the kind; of guests on hardware nothing was
        // learned.
        let unknown = of(&profile(), &config).upper.unwrap();
        assert!(
            unknown.basis == UpperBasis::Extrapolated && unknown.outside == ["kind of guest"],
            "{unknown:?}"
        );
        let mut kvm = with_guest();
        kvm.guest.as_mut().unwrap().kind = "qemu-kvm".to_owned();
        let other = of(&kvm, &config).upper.unwrap();
        assert!(
            other.basis == UpperBasis::Extrapolated && other.outside.contains(&"guest".to_owned()),
            "{other:?}"
        );
        // Guests of a sweep have no elevator.
        config.vms[0].guest_elevator = rtvirtio_model::Elevator::MqDeadline;
        let unlike = of(&with_guest(), &config).upper.unwrap();
        assert!(
            unlike.basis == UpperBasis::Extrapolated && unlike.latency_ns.0 >= 2 * upper.latency_ns.0 - 1
        );
        assert_eq!(unlike.outside, ["the guest's elevator"]);
    }

    #[test]
    fn where_no_guest_ran_the_worse_of_both_counts() {
        let few: Vec<Point> = in_guests(90, 2).into_iter().filter(|p| p.vms.len() <= 2).collect();
        let mut model = both(&few);
        model.host_stalls = Some(Nanos::from_millis(7));
        // More VMs than ran beside any guest.
        let heavy = |p: &&Point| p.vms.len() > 3;
        let run = synthetic_runs(60, 0.2, 3).into_iter().find(|p| heavy(&p)).unwrap();
        let (spec, config) = inputs(&Point { kind: VmKind::Qemu, ..run });
        let say = |model: &HostModel| {
            let learned = Learned::bound(Arc::new(model.clone()));
            learned.forecast(&with_guest(), &spec, &config).unwrap()
        };
        let mut quiet = model.clone();
        // Guests that are served at once: what processes suffered counts.
        let part = quiet.guests.as_mut().unwrap();
        part.forest.targets.iter_mut().for_each(|t| *t = -20.0);
        part.forest.secondary_targets.iter_mut().for_each(|c| *c = 0.0);
        let alone = HostModel { guests: None, ..model.clone() };
        for (says, processes) in say(&quiet).iter().zip(say(&alone)) {
            let (upper, of_process) = (says.upper.as_ref().unwrap(), processes.upper.as_ref().unwrap());
            assert_eq!(upper.basis, UpperBasis::Extrapolated);
            assert_eq!(upper.latency_ns, processes.promised(), "{of_process:?}");
            assert_eq!((upper.host_ns, says.latency_ns), (Nanos(0), processes.latency_ns));
            assert!((says.rate_kept - processes.rate_kept).abs() < 1e-9);
        }
        // Guests that wait longer than any process: their own bound counts, widened.
        model.guests.as_mut().unwrap().forest.targets.iter_mut().for_each(|t| *t = 9.0);
        let long = say(&model)[0].upper.clone().unwrap();
        assert!(long.latency_ns.as_secs_f64() > 2.0 * 9.0_f64.exp() * 0.9, "{long:?}");
    }

    #[test]
    fn what_no_sweep_varies_makes_a_bound_a_guess() {
        use rtvirtio_spec::{CpuNeed, Kernel};
        let seen = in_guests(30, 2);
        let model = Learned::bound(Arc::new(both(&seen)));
        let (spec, config) = inputs(&seen[0]);
        let outside = |change: &dyn Fn(&mut rtvirtio_spec::Vm)| {
            let mut spec = spec.clone();
            change(&mut spec.vms[0]);
            let upper = model.forecast(&with_guest(), &spec, &config).unwrap().swap_remove(0).upper.unwrap();
            assert_eq!(upper.outside.is_empty(), upper.basis == UpperBasis::Guests);
            upper.outside
        };
        assert_eq!(outside(&|_| ()), Vec::<String>::new());
        assert_eq!(outside(&|vm| vm.kernel = Kernel::Rt), ["the guest's kernel"]);
        let ms = Nanos::from_millis;
        let need = CpuNeed::Contract { budget: ms(5), period: ms(10) };
        assert_eq!(outside(&|vm| vm.cpu.need = Some(need)), ["the guest's CPU time"]);
    }

    #[test]
    fn plans_take_the_elevators_out_of_guests_that_were_learned_without() {
        use rtvirtio_model::Elevator;
        use rtvirtio_planner::{PlanOptions, plan};
        let seen = in_guests(130, 2);
        let calm = |p: &&Point| p.vms.iter().flatten().all(|s| s.rate.is_some()) && p.vms.len() == 2;
        let (spec, mut config) = inputs(seen.iter().find(calm).unwrap());
        config.vms.iter_mut().for_each(|vm| vm.guest_elevator = Elevator::MqDeadline);
        let knows = both(&seen);
        let alone = HostModel { guests: None, ..knows.clone() };
        let taken_out = |model: HostModel, target: f64| {
            let mut spec = spec.clone();
            let (percentile, latency) = (rtvirtio_units::Percentile::P9999, Nanos::from_secs_f64(target));
            let tasks = spec.vms.iter_mut().flat_map(|vm| &mut vm.tasks);
            tasks.for_each(|t| t.targets = vec![rtvirtio_spec::Target { percentile, latency }]);
            let options = PlanOptions::bound(config.clone(), Arc::new(model));
            let plan = plan(&spec, &with_guest(), &options).unwrap();
            let guests =
                plan.settings.iter().filter(|s| format!("{:?}", s.knob).contains("GuestElevator")).count();
            (guests, plan)
        };
        let (n, plan) = taken_out(knows.clone(), 0.05);
        assert_eq!(n, 2, "{:#?}", plan.settings);
        assert!(plan.tasks.iter().all(|t| t.forecast.upper.as_ref().unwrap().basis == UpperBasis::Guests));
        assert_eq!(taken_out(alone, 0.05).0, 0);
        // Where even a widened bound leaves all the margin that is worth something, nothing is
        // touched.
        assert_eq!(taken_out(knows, 3600.0).0, 0);
    }

    #[test]
    fn what_cannot_be_learned_from_is_refused() {
        let model = fit(&synthetic_runs(130, 0.2, 1), &profile(), "", &quick()).unwrap();
        let message = |n, guest: Option<&GuestPoint>, seconds| {
            let model = HostModel { seconds, ..model.clone() };
            fit_guests(&in_guests(n, 2), &model, guest, &quick()).unwrap_err().to_string()
        };
        let with = with_guest();
        let few = message(11, with.guest.as_ref(), 8.0);
        assert!(few.starts_with("guests ran 11 different conditions, 12 are needed"), "{few}");
        assert!(message(30, None, 8.0).contains("a guest adds when it runs alone"));
        let process = GuestPoint { kind: "process".to_owned(), ..with.guest.clone().unwrap() };
        assert!(message(30, Some(&process), 8.0).contains("a guest adds when it runs alone"));
        assert!(message(30, with.guest.as_ref(), 4.0).contains("8 s in guests and 4 s as processes"));
    }

    #[test]
    fn a_file_keeps_the_part_of_guests_and_damage_is_found() {
        let model = both(&in_guests(30, 2));
        let text = serde_json::to_string(&model).unwrap();
        assert_eq!(HostModel::from_json(&text).unwrap(), model);
        let mut other = model.clone();
        other.guests = None;
        assert_ne!(other.fingerprint(), model.fingerprint());
        assert!(!serde_json::to_string(&other).unwrap().contains("guests"), "files without are as before");
        let damaged = |change: &dyn Fn(&mut GuestModel)| {
            let mut model = model.clone();
            change(model.guests.as_mut().unwrap());
            HostModel::from_json(&serde_json::to_string(&model).unwrap()).unwrap_err()
        };
        for found in [
            damaged(&|g| g.high = 1.0),
            damaged(&|g| g.guest.kind = "process".to_owned()),
            damaged(&|g| g.forest.trees.clear()),
            damaged(&|g| g.bound.groups = 3),
        ] {
            assert!(
                matches!(&found, ModelFileError::Damaged(what) if what.starts_with("of guests")),
                "{found}"
            );
        }
    }
}
