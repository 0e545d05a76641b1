//! CPU time that requests of guests take, against what the host has free for them.

use std::collections::BTreeSet;

use rtvirtio_measure::Run;
use rtvirtio_model::Profile;
use rtvirtio_units::Nanos;

/// A sentence where requests at the declared rates take more CPU time than is free, which makes
/// tails long whatever the disk does; `free` in CPUs, while none of these requests came. `None`
/// without a measurement in guests, or where there is enough.
#[must_use]
pub fn cpu_shortage(profile: &Profile, run: &Run, free: f64) -> Option<String> {
    let each = profile.guest.as_ref()?.cpu_per_request;
    let mut known = BTreeSet::new();
    let rates = run.tasks.iter().filter(|task| task.flow.is_none());
    let rates = rates.filter(|task| known.insert((&task.vm, &task.task))).filter_map(|t| t.declared_rate);
    let rate: f64 = rates.map(|rate| rate.0).sum();
    let needed = rate * each;
    (needed > free).then(|| {
        format!(
            "Too little CPU time: {rate:.0} requests per second in guests take {needed:.2} CPUs ({} each, measured here), and of the {} CPUs \
             {free:.2} were free before the runs. Requests wait for a CPU, whatever the disk and its settings do: end other programs, or lower \
             the rates.",
            Nanos::from_secs_f64(each),
            profile.cpus
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    #[test]
    fn more_than_is_free_is_said() {
        let (profile, run) = (fixture::profile(), fixture::result().runs[0].clone());
        let each = profile.guest.as_ref().unwrap().cpu_per_request;
        let mut tasks = BTreeSet::new();
        let of = run.tasks.iter().filter(|t| tasks.insert((&t.vm, &t.task)));
        let needed = each * of.filter_map(|t| t.declared_rate).map(|rate| rate.0).sum::<f64>();
        assert!(needed > 0.0);
        assert_eq!(cpu_shortage(&profile, &run, needed * 1.01), None);
        let said = cpu_shortage(&profile, &run, needed * 0.99).unwrap();
        assert!(said.starts_with("Too little CPU time"), "{said}");
        let without = Profile { guest: None, ..profile };
        assert_eq!(cpu_shortage(&without, &run, 0.0), None);
    }
}
