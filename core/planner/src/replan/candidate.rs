//! A plan for an input, and its difference from the settings in force.

use std::collections::BTreeSet;

use rtvirtio_model::{Config, Elevator, Profile, model};
use rtvirtio_spec::Spec;

use super::effect::{Effect, effects, given_up};
use super::input::Input;
use crate::{
    Knob, LimitKind, Plan, PlanError, PlanOptions, Setting, TaskOutlook, config_of, outlook, plan,
    settings_of,
};

/// Inputs of a plan for one device that do not change with observations.
#[derive(Clone, Copy, Debug)]
pub struct PlanInput<'a> {
    /// Path of the device.
    pub device: &'a str,
    /// The device and its VMs, as declared.
    pub spec: &'a Spec,
    /// The device as it was measured.
    pub profile: &'a Profile,
    /// Options of the search. `start` is the configuration from before any plan: so a plan depends
    /// on the observations, and not on the plans before it.
    pub options: &'a PlanOptions,
    /// Settings in force, as changes of that configuration; also of VMs not in the spec.
    pub in_force: &'a [Setting],
}

/// A plan for one device.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The plan, from the configuration before any plan.
    pub plan: Plan,
    /// Configuration under the plan.
    pub then: Config,
    /// Settings that the plan changes of those in force.
    pub changes: Vec<Setting>,
    /// Predicted effect on each VM.
    pub effects: Vec<Effect>,
    /// Tasks (`VM/TASK`) that are predicted to miss a target.
    pub given_up: BTreeSet<String>,
}

/// Plans one device.
///
/// # Errors
/// Errors of [`plan()`]; [`PlanError::UnderIoCost`] while io.cost divides the device, and
/// [`PlanError::UnderIoLatency`] while latency targets of a plan are in force.
pub fn candidate(ground: &PlanInput<'_>, input: &Input) -> Result<Candidate, PlanError> {
    if ground.options.placements.is_under_io_cost() {
        return Err(PlanError::UnderIoCost);
    }
    if ground.in_force.iter().any(|s| matches!(s.knob, Knob::VmIoLatency { .. })) {
        return Err(PlanError::UnderIoLatency);
    }
    let spec = input.spec(ground.spec);
    let profile = input.profile(ground.device, ground.profile);
    let options = PlanOptions { safety: input.safety(ground.options.safety), ..ground.options.clone() };
    let plan = plan(&spec, &profile, &options)?;
    let then = plan.config(&spec, &options.start)?;
    let now = config_of(&spec, &options.start, &known(&spec, ground.in_force))?;
    let predicted = |config: &Config| -> Result<Vec<TaskOutlook>, PlanError> {
        let model = model(options.model, options.learned.as_ref())?;
        let in_effect = options.placements.in_effect(config);
        Ok(outlook(&spec, model.forecast(&profile, &spec, &in_effect)?))
    };
    let (before, after) = (predicted(&now)?, predicted(&then)?);
    Ok(Candidate {
        effects: effects(&spec, (&now, &before), (&then, &after)),
        given_up: given_up(&after),
        changes: difference(&spec, &options.start, ground.in_force, &plan.settings)?,
        then,
        plan,
    })
}

/// Settings that the models cover, of VMs in the spec.
fn known(spec: &Spec, settings: &[Setting]) -> Vec<Setting> {
    let is_known = |s: &&Setting| match &s.knob {
        Knob::VmLimit { limit: LimitKind::ReadBps | LimitKind::WriteBps, .. }
        | Knob::HostIoCost(_)
        | Knob::VmIoWeight { .. }
        | Knob::VmIoLatency { .. } => false,
        Knob::VmWeight { vm }
        | Knob::VmLimit { vm, .. }
        | Knob::GuestElevator { vm }
        | Knob::GuestBfq { vm, .. } => spec.vms.iter().any(|v| v.name == *vm),
        Knob::HostElevator | Knob::HostBfq(_) => true,
    };
    settings.iter().filter(is_known).cloned().collect()
}

/// Changes from the settings in force to the wanted ones, both relative to `start`: a knob that is
/// no longer wanted gets its value of `start` again.
pub fn difference(
    spec: &Spec,
    start: &Config,
    in_force: &[Setting],
    wanted: &[Setting],
) -> Result<Vec<Setting>, PlanError> {
    let value = |of: &[Setting], knob: &Knob| of.iter().find(|s| s.knob == *knob).map(|s| s.value.clone());
    let mut changes: Vec<Setting> =
        wanted.iter().filter(|s| value(in_force, &s.knob).as_ref() != Some(&s.value)).cloned().collect();
    let ours = known(spec, in_force);
    let before = settings_of(spec, &config_of(spec, start, &ours)?, start);
    let is_here = |s: &&Setting| match &s.knob {
        Knob::VmLimit { vm, .. } => spec.vms.iter().any(|v| v.name == *vm),
        _ => ours.contains(s),
    };
    let is_bfq = config_of(spec, start, &known(spec, wanted))?.elevator == Elevator::Bfq;
    // Under another elevator the kernel drops them.
    let acts = |s: &&Setting| is_bfq || !matches!(s.knob, Knob::VmWeight { .. } | Knob::HostBfq(_));
    for dropped in in_force.iter().filter(is_here).filter(acts).filter(|s| value(wanted, &s.knob).is_none()) {
        let no_limit = matches!(dropped.knob, Knob::VmLimit { .. }).then(|| "max".to_owned());
        // A tunable goes with its elevator.
        let Some(value) = value(&before, &dropped.knob).or(no_limit) else { continue };
        changes.push(Setting { value, reason: "as before any plan".to_owned(), ..dropped.clone() });
    }
    changes.sort_by_key(|s| s.knob.write_order());
    Ok(changes)
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::{Criticality, LabKind};

    use super::*;
    use crate::replan::effect::{Change, objection};
    use crate::replan::input::load_key;
    use crate::tests::{flood, profile, setting, spec, start, task};

    /// A controller with a target, and a neighbour that reads as fast as it can.
    fn plant() -> Spec {
        let mut spec = spec(LabKind::Process, &[vec![task("cycle", 200.0, Some(12))], vec![flood()]]);
        spec.vms[0].criticality = Criticality::High;
        spec
    }

    #[test]
    fn nothing_is_planned_while_io_cost_is_on() {
        let (spec, profile) = (plant(), profile());
        let placements = crate::Placements::default().under_io_cost(true);
        let options = PlanOptions { placements, ..PlanOptions::new(start(&spec)) };
        let ground =
            PlanInput { device: "/dev/a", spec: &spec, profile: &profile, options: &options, in_force: &[] };
        let input = Input::declared(["vm0".to_owned(), "vm1".to_owned()].into());
        assert_eq!(candidate(&ground, &input), Err(PlanError::UnderIoCost));
        assert!(PlanError::UnderIoCost.to_string().starts_with("io.cost divides the device"));
        let in_force = [setting(Knob::VmIoLatency { vm: "vm0".to_owned() }, "12000")];
        let options = PlanOptions::new(start(&spec));
        let ground = PlanInput { options: &options, in_force: &in_force, ..ground };
        assert_eq!(candidate(&ground, &input), Err(PlanError::UnderIoLatency));
    }

    #[test]
    fn the_same_input_is_the_same_plan_whatever_is_in_force() {
        let (spec, profile) = (plant(), profile());
        let options = PlanOptions::new(start(&spec));
        let ground =
            PlanInput { device: "/dev/a", spec: &spec, profile: &profile, options: &options, in_force: &[] };
        let input = Input::declared(["vm0".to_owned(), "vm1".to_owned()].into());
        let first = candidate(&ground, &input).unwrap();
        assert!(!first.changes.is_empty() && first.given_up.is_empty());
        assert_eq!(objection(&first.effects), None, "{:?}", first.effects);
        assert!(first.effects[0].change == Change::Better, "{:?}", first.effects);
        // In force, the plan changes nothing more.
        let settings = &first.plan.settings;
        let again = candidate(&PlanInput { in_force: settings, ..ground }, &input).unwrap();
        assert_eq!((&again.plan, again.changes.len()), (&first.plan, 0));
        assert!(again.effects.iter().all(|e| e.change == Change::Same));
        // More load changes the plan, and less load changes it back.
        let mut more = input.clone();
        more.loads.insert(load_key("vm0", false), 8);
        let heavy = candidate(&PlanInput { in_force: settings, ..ground }, &more).unwrap();
        let ground = PlanInput { in_force: &heavy.plan.settings, ..ground };
        let back = candidate(&ground, &input).unwrap();
        assert_eq!(back.then, first.then);
        // A setting that is no longer wanted is reset; a limit that no model covers, too.
        let spec = &more.spec(&spec);
        let bytes = Setting {
            knob: Knob::VmLimit { vm: "vm1".to_owned(), limit: LimitKind::ReadBps },
            value: "1000".to_owned(),
            ..settings[0].clone()
        };
        let in_force = [settings.as_slice(), std::slice::from_ref(&bytes)].concat();
        let all = difference(spec, &options.start, &in_force, &[]).unwrap();
        let of_models: Vec<Setting> = all.iter().filter(|s| s.knob != bytes.knob).cloned().collect();
        assert_eq!(config_of(spec, &first.then, &of_models).unwrap(), options.start);
        assert!(all.iter().any(|s| s.knob == bytes.knob && s.value == "max"), "{all:?}");
    }
}
