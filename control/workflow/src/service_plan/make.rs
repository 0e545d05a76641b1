//! Makes the plan that the service is to hold. Sets nothing.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_apply::{Line, Machine, Write, dry_run, merge, resolve};
use rtvirtio_kernel::Root;
use rtvirtio_planner::replan::{
    Backoff, Change, Effect, Input, NoPlan, Outline, PlanInput, Request, Unplanned, candidate, difference,
};
use rtvirtio_planner::{Plan, Setting};
use rtvirtio_spec::{Device, HostSpec, Part};

use super::{ServicePlan, Start, find, plan};
use crate::devices::Devices;
use crate::dirs::Dirs;
use crate::error::{Context as _, Error, Kind, Result};
use crate::guests::GuestAgents;
use crate::model_choice::{ModelChoice, ModelName};
use crate::plan::load_profile;
use crate::plan_file::{DevicePlan, HostPlan};
use crate::progress::Progress;
use crate::site::Site;
use crate::traffic;

/// A plan that could be held, next to the one in force.
#[derive(Clone, Debug)]
pub struct HeldCandidate {
    /// The contracts that it carries out.
    pub contract: String,
    /// Observations from which it was made.
    pub input: Input,
    pub(super) patience: BTreeMap<String, Backoff>,
    /// Reason for making it, for the user.
    pub reason: String,
    /// The VMs that run, with their devices.
    pub(super) host: HostSpec,
    /// Settings, computed from the configuration before any plan.
    pub(super) plan: HostPlan,
    pub(super) starts: Vec<Start>,
    /// Settings of each device that differ from those in force.
    pub(super) changes: Vec<Vec<Setting>>,
    /// Every setting that it would change, with its value now.
    pub lines: Vec<Line>,
    /// Summary of its effects.
    pub outline: Outline,
    /// Reasons for unmet targets, one sentence for each device.
    pub reasons: Vec<String>,
}

impl HeldCandidate {
    /// Settings and predictions of each device.
    #[must_use]
    pub fn plan(&self) -> &HostPlan {
        &self.plan
    }
}

/// Plans for the VMs of a host that run, `host` without the others. `may_load` allows to load BFQ,
/// where it is a module. Devices that [`Input::without`] names are not planned: what is in force of
/// them stays as it is.
///
/// # Errors
/// [`NoPlan::Devices`] with those that cannot be planned, such as one without a profile.
pub fn make(
    host: HostSpec,
    request: &Request,
    may_load: bool,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> std::result::Result<HeldCandidate, NoPlan> {
    let whole = |e: Error| NoPlan::Whole(format!("{e:#}"));
    let held = find(dirs).map_err(whole)?;
    let in_force = plan(dirs).map_err(whole)?;
    let without = &request.input.without;
    let ours = |device: &str| in_force.as_ref().and_then(|plan| of_device(plan, device));
    let devices = present(host, without, |device| ours(device).is_some(), dirs)?;
    match may_load {
        true => devices.load_bfq(progress),
        false => devices.warn_without_bfq(progress),
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
    let (mut plans, mut failed) = (Vec::new(), BTreeMap::new());
    for part in devices.host.parts() {
        let device = device_key(&part.spec.device);
        let site = devices.sites.iter().find(|site| site.spec.device == part.spec.device);
        let start = held.as_ref().and_then(|held| held.start(&device));
        if without.contains(&device) {
            let Some(kept) = ours(&device) else { continue };
            plans.push(DevicePlan::new(Some(device), kept.clone()));
            made.changes.push(Vec::new());
            made.starts.extend(start.cloned());
            let before = held.as_ref().map(|held| &held.given_up);
            made.outline.given_up.extend(before.into_iter().flat_map(|all| of_part(all, part)));
            continue;
        }
        let Some(site) = site else { continue };
        match of_site(site, &device, ours(&device), start, &request.input, dirs, progress) {
            Ok(one) => {
                made.starts.push(one.start);
                made.changes.push(one.changes);
                made.outline.effects.extend(one.effects);
                made.outline.given_up.extend(one.given_up);
                // The path names a device in whichever spec.
                plans.push(DevicePlan::new(Some(device), one.plan));
            }
            Err(e) => {
                failed.insert(device, unplanned(&part.spec.device, &e));
            }
        }
    }
    if !failed.is_empty() {
        return Err(NoPlan::Devices(failed));
    }
    made.plan = HostPlan::new(plans);
    made.reasons = made.plan.reasons();
    let yielded = yielded(held.as_ref(), &made.contract);
    made.lines = changed_lines(&made, &devices, &yielded).map_err(whole)?;
    made.outline.changes = made.lines.len();
    // A VM can stand on several devices.
    made.outline.effects = worst_of_each(std::mem::take(&mut made.outline.effects));
    Ok(made)
}

/// The devices of the plan: those that are planned, and those of `without` on which settings are in
/// force (`is_held`). The latter need not be found.
fn present(
    host: HostSpec,
    without: &BTreeSet<String>,
    is_held: impl Fn(&str) -> bool,
    dirs: &Dirs,
) -> std::result::Result<Devices, NoPlan> {
    // All are looked for: one that is left out may be one disk with another.
    let (devices, lost) = Devices::find_each(host, dirs);
    let lost = lost.into_iter().filter_map(|(place, e)| {
        let device = &devices.host.parts().get(place)?.spec.device;
        Some((device_key(device), unplanned(device, &e)))
    });
    let lost: BTreeMap<_, _> = lost.filter(|(device, _)| !without.contains(device)).collect();
    if !lost.is_empty() {
        return Err(NoPlan::Devices(lost));
    }
    let stays = |device: &Device| {
        let key = device_key(device);
        !without.contains(&key) || is_held(&key)
    };
    let Some(host) = devices.host.on_devices(stays) else {
        return Err(NoPlan::Whole("no device of the contracts can be planned".to_owned()));
    };
    let sites = devices.sites.into_iter().filter(|site| stays(&site.spec.device)).collect();
    Ok(Devices { host, sites })
}

/// Names a device in plans and observations: its path.
#[must_use]
pub fn device_key(device: &Device) -> String {
    match device {
        Device::Path(path) | Device::File { path, .. } => path.display().to_string(),
        Device::Twin { profile, .. } => format!("twin:{profile}"),
    }
}

fn unplanned(device: &Device, error: &Error) -> Unplanned {
    let measures = error.kind() == Kind::NotMeasured;
    let remedy = match device {
        Device::Path(path) if measures => Some(format!("rtvirtio profile {}", path.display())),
        _ => None,
    };
    Unplanned { why: format!("{error:#}"), remedy }
}

/// The devices of a host that cannot be planned for want of a usable profile, by
/// [`device_key`]; read from the profiles' files.
#[must_use]
pub fn unmeasured(host: &HostSpec, dirs: &Dirs) -> BTreeMap<String, Unplanned> {
    let one = |part: &Part| {
        let error = load_profile(&part.spec, None, dirs).err()?;
        Some((device_key(&part.spec.device), unplanned(&part.spec.device, &error)))
    };
    host.parts().iter().filter_map(one).collect()
}

/// Subset of the tasks (`VM/TASK`) that are on a device.
fn of_part(tasks: &BTreeSet<String>, part: &Part) -> BTreeSet<String> {
    let here = part.spec.vms.iter().flat_map(|vm| vm.tasks.iter().map(|t| format!("{}/{}", vm.name, t.name)));
    here.filter(|task| tasks.contains(task)).collect()
}

/// Settings left to other programs under the same contracts; empty under others.
pub(super) fn yielded(held: Option<&ServicePlan>, contract: &str) -> BTreeSet<String> {
    held.filter(|held| held.contract == contract).map(|held| held.yielded.clone()).unwrap_or_default()
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
    crate::block_sizes::check(&site.spec, &site.stack.device, progress)?;
    let profile = load_profile(&site.spec, None, dirs)?;
    let choice = ModelChoice::find(ModelName::Auto, &site.spec, &profile, dirs, progress)?;
    let mut survey = site.survey(progress)?;
    if let Some(start) = start {
        survey.config = start.config(&site.spec, &survey.config);
    }
    let start = Start::new(device, &site.spec, &survey.config);
    let mut options = site.options(survey, &choice)?;
    // A guest that is restarted loses its settings, and its next start has no journal.
    options.space.guests = false;
    let settings = in_force.map(|plan| plan.settings.as_slice()).unwrap_or_default();
    let ground =
        PlanInput { device, spec: &site.spec, profile: &profile, options: &options, in_force: settings };
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

/// Writes of the settings of each device, without those left to other programs. A missing device is
/// an error only if it has settings to write.
pub(super) fn writes_of(
    plan: &HostPlan,
    settings: &[Vec<Setting>],
    devices: &Devices,
    yielded: &BTreeSet<String>,
    machine: &Machine<'_>,
) -> Result<Vec<Write>> {
    let mut writes = Vec::new();
    let is = |site: &Site, of: &DevicePlan| of.device.as_ref() == Some(&device_key(&site.spec.device));
    for (of, settings) in plan.devices.iter().zip(settings).filter(|(_, settings)| !settings.is_empty()) {
        let site = devices.sites.iter().find(|site| is(site, of));
        let site =
            site.with_context(|| format!("{}: it is gone", of.device.as_deref().unwrap_or_default()))?;
        let some = Plan { settings: settings.clone(), ..of.plan.clone() };
        merge(&mut writes, resolve(&some, &site.binding_for(&some)?, machine)?)?;
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
