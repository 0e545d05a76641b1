//! A plan that holds VMs back by io.latency while another one's requests take too long.
//!
//! Nothing of it is searched or predicted: each VM with a target gets the shortest one as the
//! latency target of its cgroup. The kernel acts on cgroups with the same parent that have a longer
//! target or none: it halves the requests that they may have at the device, down to one. On drives
//! without moving parts it does so once a tenth of a window's requests took longer, on others once
//! their mean did (`block/blk-iolatency.c`): a target at p99.99 is missed long before.

use rtvirtio_model::{Elevator, Profile};
use rtvirtio_spec::Spec;
use rtvirtio_units::Enforcement;

use crate::io_cost::unpredicted_plan;
use crate::{Knob, Plan, PlanError, PlanOptions, Setting};

/// Id of the scheme.
const SCHEME: &str = "io-latency";

/// Reason why nothing is predicted for a device.
const NO_MODEL: &str = "io.latency holds cgroups back, and no model covers that";

/// A plan for the device by io.latency. The profile is not used.
///
/// # Errors
/// [`PlanError::CannotAct`] without a target, or where the VMs' cgroups cannot have one.
pub fn io_latency_plan(spec: &Spec, _: &Profile, options: &PlanOptions) -> Result<Plan, PlanError> {
    let mut settings = Vec::new();
    let mut push = |knob, value: String, reason: String| {
        settings.push(Setting { knob, value, reason, strength: Enforcement::Hint });
    };
    if options.start.elevator == Elevator::Bfq {
        let reason = "BFQ holds requests back for its own shares, and io.latency counts that time too";
        push(Knob::HostElevator, Elevator::None.name().to_owned(), reason.to_owned());
    }
    for vm in &spec.vms {
        let Some(target) = vm.tightest_target() else { continue };
        let us = target.0.div_ceil(1_000).max(1);
        let reason = format!(
            "the shortest target of {}: cgroups next to it with a longer one or none are held back once a \
             tenth of its requests, on a disk with moving parts their mean, takes longer",
            vm.name
        );
        push(Knob::VmIoLatency { vm: vm.name.clone() }, us.to_string(), reason);
    }
    if spec.vms.iter().all(|vm| vm.tightest_target().is_none()) {
        return Err(PlanError::CannotAct {
            setting: "io.latency".to_owned(),
            why: "no task has a target, and it protects only VMs that have one".to_owned(),
        });
    }
    unpredicted_plan((SCHEME, NO_MODEL), spec, options, settings)
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::LabKind;

    use super::*;
    use crate::tests::{flood, profile, setting, spec, start, task};
    use crate::{IoCostFile, Placements, check_actable, config_of};

    #[test]
    fn vms_with_targets_get_them_and_nothing_is_predicted() {
        let vm = |ms| vec![task("t", 100.0, Some(ms)), task("slow", 1.0, Some(900))];
        let three = spec(LabKind::Process, &[vm(20), vec![flood()], vm(50)]);
        let options = PlanOptions::new(start(&three));
        let plan = io_latency_plan(&three, &profile(), &options).unwrap();
        let settings: Vec<_> = plan.settings.iter().map(|s| (&s.knob, s.value.as_str())).collect();
        let latency = |vm: &str| Knob::VmIoLatency { vm: vm.to_owned() };
        let (first, last) = (latency("vm0"), latency("vm2"));
        assert_eq!(settings, [(&Knob::HostElevator, "none"), (&first, "20000"), (&last, "50000")]);
        assert!(plan.settings.is_sorted_by_key(|s| s.knob.write_order()));
        assert!(!plan.feasible && plan.tasks.is_empty() && !plan.is_predicted());
        assert!(plan.infeasible.unwrap().reason.starts_with("not predicted: io.latency"));
        let floods = spec(LabKind::Process, &[vec![flood()], vec![flood()]]);
        let error = io_latency_plan(&floods, &profile(), &options).unwrap_err().to_string();
        assert!(error.contains("no task has a target"), "{error}");
    }

    #[test]
    fn what_cannot_act_is_refused() {
        let spec = spec(LabKind::Process, &[vec![task("t", 100.0, Some(20))], vec![flood()]]);
        let options = PlanOptions::new(start(&spec));
        let error = |placements: Placements| {
            let options = PlanOptions { placements, ..options.clone() };
            io_latency_plan(&spec, &profile(), &options).unwrap_err().to_string()
        };
        let shared = error(Placements::shared(2));
        assert!(shared.contains("io.latency of vm0") && shared.contains("cgroup of its own"), "{shared}");
        let under = error(Placements::default().under_io_cost(true));
        assert!(under.contains("io.cost is on"), "{under}");
        let of = |vm: &str, value| setting(Knob::VmIoLatency { vm: vm.to_owned() }, value);
        let none = setting(Knob::HostElevator, "none");
        let cost = setting(Knob::HostIoCost(IoCostFile::Qos), "enable=1 ctrl=auto");
        let both = [none, cost, of("vm0", "5")];
        let both = check_actable(&spec, &Placements::default(), &options.start, &both).unwrap_err();
        assert!(both.to_string().contains("choose one of the two"), "{both}");
        let read = |s: Setting| config_of(&spec, &options.start, &[s]);
        assert_eq!(read(of("vm0", "max")).unwrap(), options.start);
        assert_eq!(read(of("vm0", "20000")).unwrap(), options.start);
        let cases = [("vm0", "0", "above 0"), ("vm0", "soon", "above 0"), ("vm9", "1", "no VM `vm9`")];
        for (vm, value, says) in cases {
            let error = read(of(vm, value)).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
