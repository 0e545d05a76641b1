//! Consequence of devices that are slower than their profiles: events, and promises taken back.

use std::collections::BTreeMap;

use crate::observe::AgeingObservation;
use crate::snapshot::{Snapshot, VmState};

/// Events of devices whose alarm came, changed or ended.
pub(super) fn events(
    before: &BTreeMap<String, AgeingObservation>,
    now: &BTreeMap<String, AgeingObservation>,
) -> Vec<String> {
    let alarm = |of: Option<&AgeingObservation>| of.and_then(|of| of.alarm.clone());
    let one = |(device, of): (&String, &AgeingObservation)| match (alarm(before.get(device)), alarm(Some(of)))
    {
        (old, Some(new)) if old.as_ref() != Some(&new) => Some(format!("{device} has aged: {new}")),
        (Some(_), None) => Some(format!("{device} is no slower than its profile any more")),
        _ => None,
    };
    now.iter().filter_map(one).collect()
}

/// Takes back what is said of VMs on devices that are slower than their plan allows for: `planned`
/// has factors of service times that the plan in force allows for, by device.
pub(super) fn take_back(
    snapshot: &mut Snapshot,
    ageing: &BTreeMap<String, AgeingObservation>,
    planned: &BTreeMap<String, f64>,
) {
    for (device, of) in ageing.iter().filter(|(_, of)| !of.vms.is_empty()) {
        let factor = planned.get(device).copied().unwrap_or(1.0);
        let Some(why) = of.void(device, factor) else { continue };
        for vm in snapshot.vms.iter_mut().filter(|vm| of.vms.contains(&vm.name)) {
            if matches!(vm.state, VmState::InForce | VmState::Observed) && !vm.targets.is_empty() {
                (vm.state, vm.why) = (VmState::Aged, Some(why.clone()));
            }
        }
        snapshot.problems.push(why);
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_model::Profile;
    use rtvirtio_model::ageing::{Ageing, AgeingWindow, Completed, FOLLOW, Profiled, WINDOW_S};

    use super::*;

    const PROFILE: &str = include_str!("../../../learn/data/qlc-nvme.profile.json");

    /// A device whose reads take so many times as long as profiled.
    fn aged(slow: f64, is_followed: bool) -> BTreeMap<String, AgeingObservation> {
        let profile: Profile = serde_json::from_str(PROFILE).unwrap();
        let profiled = Profiled::new(&profile).unwrap();
        let service = profiled.service();
        let time_s = 10_000.0 * service.read.alone * slow;
        let read = Completed { n: 10_000, bytes: 10_000 * service.block.0, time_s };
        let window = AgeingWindow {
            seconds: WINDOW_S,
            read,
            busy_s: time_s,
            in_flight_s: time_s,
            ..AgeingWindow::default()
        };
        let mut ageing = Ageing::new(profiled);
        (0..2 * FOLLOW).for_each(|_| ageing.see(&window));
        let of = AgeingObservation::new(&ageing, vec!["plc".to_owned()], is_followed);
        BTreeMap::from([("/dev/sda".to_owned(), of)])
    }

    fn shown(aged: &BTreeMap<String, AgeingObservation>, planned: &BTreeMap<String, f64>) -> Snapshot {
        let mut snapshot = snapshot();
        take_back(&mut snapshot, aged, planned);
        snapshot
    }

    fn snapshot() -> Snapshot {
        let vm = |name: &str, state: &str| {
            serde_json::json!({ "name": name, "state": state, "processes": [], "drift": [],
                "targets": [{ "task": "t", "percentile": 99.0, "latency_ns": 1_000_000 }] })
        };
        serde_json::from_value(serde_json::json!({
            "schema": "rtvirtio.service.v1", "version": "1", "pid": 1, "mode": "auto",
            "faults": [], "problems": [], "vms": [vm("plc", "in_force"), vm("hist", "in_force")],
        }))
        .unwrap()
    }

    #[test]
    fn nothing_is_said_to_hold_on_a_device_that_is_slower_than_planned_for() {
        let states = |of: &Snapshot| of.vms.iter().map(|vm| vm.state).collect::<Vec<_>>();
        let new = shown(&aged(1.0, false), &BTreeMap::new());
        assert!(new.is_whole() && new.problems.is_empty(), "{new:?}");
        let slower = aged(2.0, false);
        let one = shown(&slower, &BTreeMap::new());
        assert_eq!(states(&one), [VmState::Aged, VmState::InForce]);
        assert!(!one.is_whole() && one.problems[0].contains("reads take up to"), "{one:?}");
        assert!(one.vms[0].why.as_ref().unwrap().contains("does not hold"), "{one:?}");
        // A plan that was made for a slower device covers it, if it is slow enough.
        let planned = |factor| BTreeMap::from([("/dev/sda".to_owned(), factor)]);
        assert_eq!(states(&shown(&slower, &planned(1.5)))[0], VmState::Aged);
        assert!(shown(&slower, &planned(2.25)).is_whole());
    }

    #[test]
    fn a_plan_follows_where_it_is_to_and_never_promises_more() {
        let of = |slow, is_followed| aged(slow, is_followed)["/dev/sda"].to_plan_for();
        assert_eq!((of(2.0, false), of(1.0, true), of(0.3, true)), (None, None, None));
        assert!(of(2.0, true).is_some_and(|factor| factor > 1.9));
    }

    #[test]
    fn an_alarm_is_one_event_until_it_changes_or_ends() {
        let (none, new, slow) = (BTreeMap::new(), aged(1.0, false), aged(2.0, false));
        assert_eq!(events(&none, &new), Vec::<String>::new());
        assert_eq!(events(&new, &slow).len(), 1);
        assert_eq!(events(&slow, &slow), Vec::<String>::new());
        assert!(events(&slow, &aged(4.0, false))[0].contains("has aged"));
        assert!(events(&slow, &new)[0].contains("no slower"));
    }
}
