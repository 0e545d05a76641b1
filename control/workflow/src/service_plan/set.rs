//! Puts a plan in force for the service, in place of the one that is.

use std::path::Path;

use rtvirtio_apply::{Amended, ApplyError, Line, Machine, NoGuests, OnConflict, Session, Silent, Status};
use rtvirtio_kernel::Root;

use super::make::{HeldCandidate, without, writes_of, yielded};
use super::{ServicePlan, find, put_back, save};
use crate::apply::{Resolved, Room, Wanted, resolve};
use crate::covered;
use crate::devices::Devices;
use crate::dirs::Dirs;
use crate::error::{Error, Result, bail};
use crate::guests::GuestAgents;
use crate::in_force;
use crate::progress::Progress;
use crate::scopes::Scopes;
use crate::site::Site;
use crate::started::{self, StartedVm};

/// Result of setting a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Set {
    /// Settings that were changed, with their values before and after.
    pub changed: Vec<Line>,
    /// Failures of single settings, and limitations, in sentences.
    pub notes: Vec<String>,
}

/// Devices and VMs of a plan that was made, looked up anew to set it.
pub struct FoundDevices {
    devices: Devices,
    /// Error of each device that was not found.
    lost: Vec<(usize, Error)>,
    starts: Vec<StartedVm>,
    /// VMs whose processes are not known, each with the reason.
    unknown: Vec<String>,
}

impl FoundDevices {
    /// Looks them up. Needs no lock: the answer may take as long as monitors, or libvirt, do.
    #[must_use]
    pub fn find(made: &HeldCandidate, dirs: &Dirs, progress: &dyn Progress) -> Self {
        let (devices, lost) = Devices::find_each(made.host.clone(), dirs);
        let (mut starts, mut unknown) = (Vec::new(), Vec::new());
        for vm in devices.host_vms() {
            match StartedVm::find(vm, progress) {
                Ok(start) => starts.extend(start),
                Err(e) => unknown.push(format!("{}: which start it is is not known: {e:#}", vm.name)),
            }
        }
        Self { devices, lost, starts, unknown }
    }

    /// Whether a VM has ended since, or a device or a VM's cgroup is another one by now.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        self.starts.iter().any(StartedVm::has_ended) || !self.devices.sites.iter().all(Site::is_in_place)
    }
}

/// Sets a plan on the devices that were found for it: single settings are changed one by one,
/// journaled first. Where that is impossible, as for another elevator, all settings are put back
/// and set again.
///
/// # Errors
/// [`Kind::InForce`](crate::Kind::InForce) while a plan of `rtvirtio apply` is in force; as
/// [`Resolved::apply`].
pub fn set(
    lock: &Scopes<'_>,
    made: &HeldCandidate,
    found: FoundDevices,
    since: &str,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Set> {
    if in_force::plan(&dirs.state)?.is_some() {
        bail!(
            InForce,
            "a plan of `rtvirtio apply` is in force: `rtvirtio revert`, and the service sets its own"
        );
    }
    let root = Root::default();
    // Only the paths count, so no guest is asked under the lock.
    let applied = rtvirtio_apply::status(&dirs.state, &Machine::new(&root, &NoGuests))?;
    refuse_applied(applied.as_ref(), made.lines.iter().map(|line| line.path.clone()))?;
    let before = find(dirs)?;
    let left = yielded(before.as_ref(), &made.contract);
    let held = ServicePlan {
        contract: made.contract.clone(),
        input: made.input.clone(),
        given_up: made.outline.given_up.clone(),
        patience: made.patience.clone(),
        starts: merged(before.as_ref(), made),
        yielded: left.clone(),
        reason: made.reason.clone(),
        since: since.to_owned(),
    };
    // A device that stays as it is need not be found while none of its settings is written.
    let FoundDevices { devices, lost, starts, unknown } = found;
    if before.is_some() {
        if let Some(set) = amend(made, &held, &devices, (starts, unknown), dirs)? {
            return Ok(set);
        }
    }
    if let Some((_, error)) = lost.into_iter().next() {
        return Err(error);
    }
    let mut out = Set { changed: made.lines.clone(), notes: Vec::new() };
    let at = dirs.of_held_plan();
    let wanted = Wanted::All { plan: made.plan.clone(), devices };
    if before.is_some() {
        // What cannot be resolved changes nothing. A setting that cannot act yet may be one of the
        // elevator that is put back.
        match resolve(&wanted, &[], Room::Own, &at, progress) {
            Err(e) if !cannot_act(&e) => return Err(e),
            _ => {}
        }
        let reverted = put_back(lock, dirs, OnConflict::Accept)?;
        if let Some(reverted) = reverted.filter(|r| !r.done) {
            bail!(NotPutBack, "{}", reverted.summary());
        }
    }
    // Anew: a tunable may be there since the elevator was put back.
    let resolved = resolve(&wanted, &[], Room::Own, &at, progress)?;
    let resolved = Resolved { writes: without(resolved.writes, &left), ..resolved };
    // Also those already at the wanted value: each of two journals would put them back.
    refuse_applied(applied.as_ref(), resolved.writes.iter().map(|write| write.target.to_string()))?;
    if resolved.writes.is_empty() {
        out.changed.clear();
        return Ok(out);
    }
    save(&held, dirs)?;
    resolved.apply(wanted.plan(), &at, progress)?;
    Ok(out)
}

/// Refuses settings that a user has put in force, as by `rtvirtio apply --traffic-only`.
fn refuse_applied(applied: Option<&Status>, mut paths: impl Iterator<Item = String>) -> Result<()> {
    let knobs = applied.map(|status| status.knobs.as_slice()).unwrap_or_default();
    match paths.find_map(|path| knobs.iter().find(|knob| knob.path == path)) {
        None => Ok(()),
        Some(knob) => bail!(
            InForce,
            "`rtvirtio apply` or `rtvirtio starts` has set {}: `rtvirtio revert`, and the service sets its own",
            knob.knob
        ),
    }
}

/// The configurations before any plan, also of devices that the new one does not have.
fn merged(before: Option<&ServicePlan>, made: &HeldCandidate) -> Vec<super::Start> {
    let mut starts = made.starts.clone();
    for old in before.iter().flat_map(|held| &held.starts) {
        match starts.iter_mut().find(|start| start.device == old.device) {
            // A VM that does not run now comes back as it was.
            Some(start) => {
                for (vm, config) in &old.vms {
                    start.vms.entry(vm.clone()).or_insert_with(|| config.clone());
                }
            }
            None => starts.push(old.clone()),
        }
    }
    starts
}

/// Changes what is in force; `None` where all of it has to be set anew.
fn amend(
    made: &HeldCandidate,
    held: &ServicePlan,
    devices: &Devices,
    (starts, unknown): (Vec<StartedVm>, Vec<String>),
    dirs: &Dirs,
) -> Result<Option<Set>> {
    let Some(old) = in_force::plan(&dirs.held_plan())? else { return Ok(None) };
    let names = |plan: &crate::plan_file::HostPlan| -> Vec<Option<String>> {
        plan.devices.iter().map(|d| d.device.clone()).collect()
    };
    // A device that left the plan has to be put back; a new one is added.
    let new = names(&made.plan);
    if !names(&old).iter().all(|device| new.contains(device)) {
        return Ok(None);
    }
    let root = Root::default();
    let machine = Machine::new(&root, &GuestAgents);
    let at = dirs.of_held_plan();
    let writes = match writes_of(&made.plan, &made.changes, devices, &held.yielded, &machine) {
        Ok(writes) => writes,
        // A setting without effect under the elevator in force may have one under the plan's.
        Err(e) if cannot_act(&e) => return Ok(None),
        Err(e) => return Err(e),
    };
    let amended = match Session::open(&at.state)?.amend(&writes, &machine, &mut Silent) {
        Ok(amended) => amended,
        Err(ApplyError::CannotAct { .. } | ApplyError::NotWhole { .. } | ApplyError::NothingInForce) => {
            return Ok(None);
        }
        Err(e) => return Err(e.into()),
    };
    in_force::save(&made.plan, &at.state)?;
    let plans = made.plan.devices.iter().map(|of| &of.plan);
    covered::save(&covered::covered_vms(plans.zip(&devices.sites)), &at.state)?;
    let mut set = of_amended(amended);
    set.notes.extend(unknown);
    note_starts(starts, &at.state)?;
    save(held, dirs)?;
    Ok(Some(set))
}

/// Notes the VMs' starts. A start that has ended stays noted: the next one has none of the settings
/// that the new plan does not change, and gets all of them by [`super::renew`].
fn note_starts(starts: Vec<StartedVm>, state: &Path) -> Result<()> {
    let ended = started::ended(state)?;
    let has_settings = |start: &StartedVm| !ended.iter().any(|of| of.vm == start.vm);
    starts.into_iter().filter(has_settings).try_for_each(|start| started::replace(start, state))
}

fn cannot_act(error: &Error) -> bool {
    matches!(error.cause::<ApplyError>(), Some(ApplyError::CannotAct { .. }))
}

fn of_amended(amended: Amended) -> Set {
    let failed = amended.failed.into_iter().map(|(knob, why)| format!("{knob} could not be set: {why}"));
    let left = amended.left.into_iter().map(|(knob, found)| format!("{knob} is left at {found}"));
    let notes = failed.chain(left).chain(amended.warnings).collect();
    Set { changed: amended.written, notes }
}

#[cfg(test)]
mod tests {
    use rtvirtio_apply::JOURNAL_FILE;
    use rtvirtio_kernel::ProcessId;

    use super::*;
    use crate::fixtures::{READS, alive_and_ended, spec, start};

    #[test]
    fn what_was_found_is_stale_once_a_vm_has_ended() {
        let found = |process: &ProcessId| FoundDevices {
            devices: Devices { host: spec("name = \"plc\"\npid = 7", READS), sites: Vec::new() },
            lost: Vec::new(),
            starts: vec![start("plc", &[process])],
            unknown: Vec::new(),
        };
        let (this, ended) = alive_and_ended();
        assert!(!found(&this).is_stale() && found(&ended).is_stale());
    }

    #[test]
    fn a_vm_that_was_started_again_is_still_to_get_its_settings() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let state = dir.path().join("state");
        let (this, ended) = alive_and_ended();
        started::save(&[start("plc", &[&ended]), start("hist", &[&this])], &state).unwrap();
        std::fs::write(state.join(JOURNAL_FILE), "{}").unwrap();
        note_starts(["plc", "hist", "new"].map(|vm| start(vm, &[&this])).to_vec(), &state).unwrap();
        assert_eq!(started::ended(&state).unwrap(), [start("plc", &[&ended])]);
        assert_eq!(started::applied_vms(&state).unwrap(), ["plc", "hist", "new"]);
    }
}
