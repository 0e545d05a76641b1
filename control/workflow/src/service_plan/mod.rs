//! The plan that the service holds: made from contracts and observations, with a journal of its own
//! next to those of VMs, so that neither blocks the other.

mod make;
mod set;

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_apply::{JOURNAL_FILE, Machine, OnConflict, Reverted, Session, Status};
use rtvirtio_kernel::trusted::DATA_LIMIT;
use rtvirtio_model::{Bfq, Config, Elevator, VmConfig};
use rtvirtio_planner::replan::{Backoff, Basis, Input};
use rtvirtio_spec::{Device, HostSpec, Spec};
use serde::{Deserialize, Serialize};

use crate::dirs::{Dirs, is_there, write_state};
use crate::error::{Context as _, Error, Kind, Result, bail};
use crate::in_force;
use crate::plan_file::HostPlan;
use crate::progress::Progress;
use crate::renew::Renewal;
use crate::scopes::Scopes;
use crate::started;

pub use make::{HeldCandidate, device_key, make, unmeasured};
pub use set::{FoundDevices, Set, set};

/// Description of the plan in force, next to its journal; ignored without one.
const HELD_FILE: &str = "held.json";

/// A plan that is held.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ServicePlan {
    /// The contracts that it carries out.
    pub contract: String,
    /// Observations from which it was made.
    pub input: Input,
    /// Tasks (`VM/TASK`) whose target it is predicted to miss.
    pub given_up: BTreeSet<String>,
    /// Hysteresis of loads, devices and caution, to be restored after a restart.
    #[serde(default)]
    pub patience: BTreeMap<String, Backoff>,
    /// The configuration of each device before any plan.
    pub starts: Vec<Start>,
    /// Settings that were left to another program, by name: never touched again under these
    /// contracts.
    pub yielded: BTreeSet<String>,
    /// Reason for putting it in force, for the user.
    pub reason: String,
    /// Time at which it was put in force, RFC 3339.
    pub since: String,
}

impl ServicePlan {
    /// Contracts and observations behind it, for the decision to plan again.
    #[must_use]
    pub fn basis(&self) -> Basis {
        Basis {
            contract: self.contract.clone(),
            input: self.input.clone(),
            given_up: self.given_up.clone(),
            patience: self.patience.clone(),
        }
    }

    fn start(&self, device: &str) -> Option<&Start> {
        self.starts.iter().find(|start| start.device == device)
    }
}

/// The configuration of a device before any plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Start {
    /// Path of the device.
    device: String,
    elevator: Elevator,
    bfq: Bfq,
    vms: BTreeMap<String, VmConfig>,
}

impl Start {
    fn new(device: &str, spec: &Spec, config: &Config) -> Self {
        let vms = spec.vms.iter().zip(&config.vms).map(|(vm, of)| (vm.name.clone(), of.clone()));
        Self { device: device.to_owned(), elevator: config.elevator, bfq: config.bfq, vms: vms.collect() }
    }

    /// The configuration before any plan; a VM unknown to it is as now: no plan has set it.
    fn config(&self, spec: &Spec, now: &Config) -> Config {
        let of = |(vm, now): (&rtvirtio_spec::Vm, &VmConfig)| {
            self.vms.get(&vm.name).cloned().unwrap_or_else(|| now.clone())
        };
        Config {
            elevator: self.elevator,
            bfq: self.bfq,
            vms: spec.vms.iter().zip(&now.vms).map(of).collect(),
        }
    }
}

/// The plan that is held; `None` without a journal.
///
/// # Errors
/// When the file beside the journal is damaged, or missing.
pub fn find(dirs: &Dirs) -> Result<Option<ServicePlan>> {
    if !is_in_force(dirs)? {
        return Ok(None);
    }
    let path = dirs.held_plan().join(HELD_FILE);
    let text = rtvirtio_kernel::trusted::read_config(&path, DATA_LIMIT)
        .with_context(|| path.display().to_string())?;
    serde_json::from_slice(&text)
        .map_err(|e| Error::from_source(Kind::File, e))
        .with_context(|| format!("{} is damaged: it is put back, and planned again", path.display()))
}

/// Whether one is in force.
pub fn is_in_force(dirs: &Dirs) -> Result<bool> {
    is_there(&dirs.held_plan().join(JOURNAL_FILE))
}

/// Settings of the plan; `None` where no plan is in force.
pub fn plan(dirs: &Dirs) -> Result<Option<HostPlan>> {
    in_force::plan(&dirs.held_plan())
}

/// The devices on which it acts, by [`device_key`]; none where no plan is in force.
pub fn devices(dirs: &Dirs) -> Result<BTreeSet<String>> {
    let plan = plan(dirs)?;
    Ok(plan.into_iter().flat_map(|plan| plan.devices).filter_map(|of| of.device).collect())
}

/// Compares its journal with the machine; `None` when no plan is in force.
pub fn status(dirs: &Dirs, machine: &Machine<'_>) -> Result<Option<Status>> {
    Ok(rtvirtio_apply::status(&dirs.held_plan(), machine)?)
}

/// Names of its VMs that have ended since.
pub fn ended(dirs: &Dirs) -> Result<Vec<String>> {
    Ok(started::ended(&dirs.held_plan())?.into_iter().map(|vm| vm.vm).collect())
}

fn save(held: &ServicePlan, dirs: &Dirs) -> Result<()> {
    write_state(&dirs.held_plan(), HELD_FILE, &serde_json::to_vec_pretty(held)?)
}

/// Puts it back; `None` when none is in force. `_lock` shows that no other rtvirtio is at work.
///
/// # Errors
/// When the journal cannot be used. The result names settings that remain.
pub fn put_back(_lock: &Scopes<'_>, dirs: &Dirs, on_conflict: OnConflict) -> Result<Option<Reverted>> {
    let reverted = crate::scopes::put_back(&dirs.held_plan(), on_conflict)?;
    if reverted.as_ref().is_some_and(|r| r.done) {
        // Without a journal the plan's files have no meaning.
        in_force::forget(&dirs.held_plan())?;
    }
    Ok(crate::scopes::settled(reverted, &dirs.of_held_plan()))
}

/// Leaves settings that another program has changed to it, as long as the contracts stay. Returns
/// their names.
pub fn release(lock: &Scopes<'_>, dirs: &Dirs, paths: &[String], knobs: &[String]) -> Result<Vec<String>> {
    if let Some(mut held) = find(dirs)? {
        // Before the journal: after a crash here, it is released again.
        held.yielded.extend(knobs.iter().cloned());
        save(&held, dirs)?;
    }
    lock.release_in(&dirs.held_plan(), paths)
}

/// Restores our values of settings that another program has changed.
pub fn restore(lock: &Scopes<'_>, dirs: &Dirs, paths: &[String]) -> Result<rtvirtio_apply::Amended> {
    lock.restore_in(&dirs.held_plan(), paths)
}

/// Weights and limits of the held plan for a VM that was started again: looked up and resolved, not
/// written yet.
pub struct HeldRenewal {
    held: ServicePlan,
    renewal: Renewal,
}

impl HeldRenewal {
    /// Looks a VM up, and resolves what the plan that is held sets for it. `host` has the contracts
    /// that it carries out. Writes nothing, as [`Renewal::find`].
    ///
    /// # Errors
    /// [`Kind::NotInForce`] without a plan; [`Kind::NotRunning`] while the VM does not run.
    pub fn find(vm: &str, host: &HostSpec, dirs: &Dirs, progress: &dyn Progress) -> Result<Self> {
        let (held, plan, host) = held_for(vm, host, dirs)?;
        let chosen = |knob: &str| !held.yielded.contains(knob);
        let renewal = Renewal::of_plan(vm, plan, host, &chosen, dirs, progress)?;
        Ok(Self { held, renewal })
    }
}

/// Gives a VM that was started again the weights and limits of the plan that is held; `None` where
/// plan, contracts or VM have changed since the look-up.
///
/// # Errors
/// [`Kind::NotInForce`] without a plan; as [`rtvirtio_apply::Session::amend`].
pub fn renew(
    _lock: &Scopes<'_>,
    found: &HeldRenewal,
    host: &HostSpec,
    dirs: &Dirs,
) -> Result<Option<rtvirtio_apply::Amended>> {
    let (held, plan, host) = held_for(found.renewal.vm(), host, dirs)?;
    if held != found.held || !found.renewal.is_current(&plan, &host) {
        return Ok(None);
    }
    let state = dirs.held_plan();
    found.renewal.write(&Session::open(&state)?, &state).map(Some)
}

/// The plan that is held, its settings, and its contracts in the order of its devices.
fn held_for(vm: &str, host: &HostSpec, dirs: &Dirs) -> Result<(ServicePlan, HostPlan, HostSpec)> {
    let (Some(held), Some(plan)) = (find(dirs)?, plan(dirs)?) else { bail!(NotInForce, "no plan is held") };
    // As when it was made: in the order of the plan's devices.
    let is_planned = |device: &Device| {
        let key = device_key(device);
        plan.devices.iter().any(|of| of.device.as_ref() == Some(&key))
    };
    let host = HostSpec::joined([host], |name| held.input.vms.contains(name))
        .and_then(|host| host.on_devices(is_planned))
        .with_context(|| format!("vm {vm}: its contract is gone"))?;
    Ok((held, plan, host))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_journal_nothing_is_held_and_a_damaged_file_is_not_the_same_as_none() {
        let (_dir, dirs) = crate::fixtures::dirs();
        assert_eq!(find(&dirs).unwrap(), None);
        let held = ServicePlan {
            contract: "c".to_owned(),
            input: Input::declared(["plc".to_owned()].into()),
            given_up: BTreeSet::new(),
            patience: BTreeMap::new(),
            starts: Vec::new(),
            yielded: ["weight of plc".to_owned()].into(),
            reason: "r".to_owned(),
            since: "s".to_owned(),
        };
        save(&held, &dirs).unwrap();
        assert_eq!(find(&dirs).unwrap(), None);
        std::fs::write(dirs.held_plan().join(JOURNAL_FILE), "{}").unwrap();
        assert_eq!(find(&dirs).unwrap(), Some(held));
        std::fs::write(dirs.held_plan().join(HELD_FILE), "{").unwrap();
        assert!(find(&dirs).is_err());
    }
}
