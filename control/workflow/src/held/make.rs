//! Making the plan that is to be held. Sets nothing.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_apply::{Line, Machine, Write, dry_run, merge, resolve};
use rtvirtio_kernel::Root;
use rtvirtio_planner::replan::{
    Change, Effect, Ground, Input, Outline, Patience, Request, candidate, difference,
};
use rtvirtio_planner::{Plan, Setting};
use rtvirtio_spec::{Device, HostSpec, Spec};

use super::{Held, Start, find, plan};
use crate::devices::Devices;
use crate::dirs::Dirs;
use crate::error::{Result, bail};
use crate::guests::GuestAgents;
use crate::model_choice::{ModelChoice, ModelName};
use crate::plan::load_profile;
use crate::plan_file::{DevicePlan, HostPlan};
use crate::progress::Progress;
use crate::site::Site;
use crate::traffic;

/// A plan that could be held, beside what is in force.
#[derive(Clone, Debug)]
pub struct HeldCandidate {
    /// The contracts that it carries out.
    pub contract: String,
    /// What it was made from besides.
    pub input: Input,
    pub(super) patience: BTreeMap<String, Patience>,
    /// Why it was made.
    pub reason: String,
    /// The VMs that run, with their devices.
    pub(super) host: HostSpec,
    /// Its settings, from the configuration before any plan.
    pub(super) plan: HostPlan,
    pub(super) starts: Vec<Start>,
    /// Device by device what it changes of what is in force.
    pub(super) changes: Vec<Vec<Setting>>,
    /// Every setting that it would change, with its value now.
    pub lines: Vec<Line>,
    /// What it would do.
    pub outline: Outline,
    /// Why not all targets are met, in one sentence for each device.
    pub reasons: Vec<String>,
}

/// Plans for the VMs of a host that run, `host` without the others. `may_load` allows to load BFQ,
/// where it is a module.
///
/// # Errors
/// [`Kind::NotMeasured`](crate::Kind::NotMeasured) without a profile;
/// [`Kind::NotRunning`](crate::Kind::NotRunning) when a VM has ended meanwhile.
pub fn make(
    host: HostSpec,
    request: &Request,
    may_load: bool,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<HeldCandidate> {
    let held = find(dirs)?;
    let in_force = plan(dirs)?;
    let devices = Devices::find(host, dirs)?;
    if may_load {
        devices.load_bfq(progress);
    }
    let mut made = HeldCandidate {
        contract: request.contract.clone(),
        input: request.input.clone(),
        patience: request.patience.clone(),
        reason: request.reason.clone(),
        plan: HostPlan::new(Vec::new()),
        starts: Vec::new(),
        changes: Vec::new(),
        lines: Vec::new(),
        outline: Outline { changes: 0, effects: Vec::new(), given_up: BTreeSet::new() },
        reasons: Vec::new(),
        host: devices.host.clone(),
    };
    let mut plans = Vec::new();
    for site in &devices.sites {
        let device = path_of(&site.spec)?;
        let ours = in_force.as_ref().and_then(|plan| of_device(plan, &device));
        let start = held.as_ref().and_then(|held| held.start(&device));
        let one = of_site(site, &device, ours, start, &request.input, dirs, progress)?;
        made.starts.push(one.start);
        made.changes.push(one.changes);
        made.outline.effects.extend(one.effects);
        made.outline.given_up.extend(one.given_up);
        // The path names a device in whichever spec.
        plans.push(DevicePlan { device: Some(device), plan: one.plan, notes: Vec::new() });
    }
    made.plan = HostPlan::new(plans);
    made.reasons = made.plan.reasons();
    let yielded = yielded(held.as_ref(), &made.contract);
    made.lines = changed_lines(&made, &devices, &yielded)?;
    made.outline.changes = made.lines.len();
    // A VM can stand on several devices.
    made.outline.effects = worst_of_each(std::mem::take(&mut made.outline.effects));
    Ok(made)
}

/// What was left to other programs, as far as it counts under these contracts.
pub(super) fn yielded(held: Option<&Held>, contract: &str) -> BTreeSet<String> {
    held.filter(|held| held.contract == contract).map(|held| held.yielded.clone()).unwrap_or_default()
}

fn path_of(spec: &Spec) -> Result<String> {
    match &spec.device {
        Device::Path(path) => Ok(path.display().to_string()),
        Device::Twin { .. } | Device::File { .. } => {
            bail!(File, "the device exists only in a lab: the service holds plans of real ones")
        }
    }
}

fn of_device<'p>(plan: &'p HostPlan, device: &str) -> Option<&'p Plan> {
    plan.devices.iter().find(|d| d.device.as_deref() == Some(device)).map(|d| &d.plan)
}

struct OfSite {
    plan: Plan,
    start: Start,
    changes: Vec<Setting>,
    effects: Vec<Effect>,
    given_up: BTreeSet<String>,
}

fn of_site(
    site: &Site,
    device: &str,
    in_force: Option<&Plan>,
    start: Option<&Start>,
    input: &Input,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<OfSite> {
    let profile = load_profile(&site.spec, None, dirs)?;
    let choice = ModelChoice::find(ModelName::Auto, &site.spec, &profile, dirs, progress)?;
    let mut survey = site.survey(progress)?;
    if let Some(start) = start {
        survey.config = start.config(&site.spec, &survey.config);
    }
    let start = Start::of(device, &site.spec, &survey.config);
    let mut options = site.options(survey, &choice)?;
    // A guest that is restarted forgets them, and its next start has no journal.
    options.space.guests = false;
    let settings = in_force.map(|plan| plan.settings.as_slice()).unwrap_or_default();
    let ground =
        Ground { device, spec: &site.spec, profile: &profile, options: &options, in_force: settings };
    let made = candidate(&ground, input)?;
    let plan = traffic::with_limits(&made.plan, &site.spec)?;
    let changes = difference(&site.spec, &options.start, settings, &plan.settings)?;
    Ok(OfSite { plan, start, changes, effects: made.effects, given_up: made.given_up })
}

/// Every setting that changes, with its value now.
fn changed_lines(made: &HeldCandidate, devices: &Devices, yielded: &BTreeSet<String>) -> Result<Vec<Line>> {
    let root = Root::default();
    let machine = Machine::new(&root, &GuestAgents);
    let writes = writes_of(&made.plan, &made.changes, devices, yielded, &machine)?;
    let lines = dry_run(&writes, &machine)?;
    Ok(lines.into_iter().filter(|line| line.old.as_ref() != Some(&line.new)).collect())
}

/// The writes of some settings, device by device, without those that were left to others.
pub(super) fn writes_of(
    plan: &HostPlan,
    settings: &[Vec<Setting>],
    devices: &Devices,
    yielded: &BTreeSet<String>,
    machine: &Machine<'_>,
) -> Result<Vec<Write>> {
    let mut writes = Vec::new();
    for ((of, settings), site) in plan.devices.iter().zip(settings).zip(&devices.sites) {
        let some = Plan { settings: settings.clone(), ..of.plan.clone() };
        merge(&mut writes, resolve(&some, &site.binding()?, machine)?)?;
    }
    Ok(without(writes, yielded))
}

/// Leaves out settings by name, and what depends on them.
pub(super) fn without(writes: Vec<Write>, yielded: &BTreeSet<String>) -> Vec<Write> {
    let mut places: Vec<Option<usize>> = Vec::new();
    let mut kept: Vec<Write> = Vec::new();
    for write in writes {
        let parent = write.created_by.map(|by| places.get(by).copied().flatten());
        let is_left = yielded.contains(&write.knob) || parent == Some(None);
        places.push((!is_left).then_some(kept.len()));
        if !is_left {
            kept.push(Write { created_by: parent.flatten(), ..write });
        }
    }
    kept
}

fn worst_of_each(effects: Vec<Effect>) -> Vec<Effect> {
    let rank = |change: Change| match change {
        Change::Same => 0,
        Change::Better => 1,
        Change::Worse => 2,
        Change::Misses => 3,
    };
    let mut out: Vec<Effect> = Vec::new();
    for effect in effects {
        match out.iter_mut().find(|known| known.vm == effect.vm) {
            Some(known) if rank(effect.change) > rank(known.change) => *known = effect,
            Some(_) => {}
            None => out.push(effect),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use rtvirtio_apply::{Form, Target};

    use super::*;

    #[test]
    fn what_was_left_goes_with_what_depends_on_it() {
        let write = |knob: &str, created_by| Write {
            created_by,
            ..Write::new(knob, Target::host("/x", Form::Plain), "1")
        };
        let all = vec![write("a", None), write("b", Some(0)), write("c", None), write("d", Some(2))];
        let left: Vec<(String, Option<usize>)> = without(all.clone(), &["a".to_owned()].into())
            .into_iter()
            .map(|w| (w.knob, w.created_by))
            .collect();
        assert_eq!(left, [("c".to_owned(), None), ("d".to_owned(), Some(0))]);
        assert_eq!(without(all.clone(), &BTreeSet::new()), all);
    }
}
