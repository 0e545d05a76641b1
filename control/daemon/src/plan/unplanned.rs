//! Devices and settings that the plan leaves out, and the consequence for VMs.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_planner::replan::{Observations, Unplanned, load_key};
use rtvirtio_spec::Part;
use rtvirtio_workflow::service_plan::device_key;
use serde::{Deserialize, Serialize};

use crate::desired::Desired;
use crate::observed::Observed;

/// A device of the contracts that is not planned.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnplannedDevice {
    /// Path of the device.
    pub device: String,
    /// Reason why it is not planned.
    pub why: String,
    /// Command that solves the problem, where one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
    /// The VMs with tasks on it: nothing is promised for these tasks.
    pub vms: Vec<String>,
    /// Whether settings of an earlier plan are in force on it: they stay, and are no promise.
    pub is_held: bool,
}

impl UnplannedDevice {
    pub(super) fn all(
        unplanned: BTreeMap<String, Unplanned>,
        desired: &Desired,
        observed: &Observed,
    ) -> Vec<Self> {
        let held = observed.plan.as_ref().map(|plan| &plan.devices);
        let one = |(device, of): (String, Unplanned)| {
            let part = parts(desired).find(|part| device_key(&part.spec.device) == device)?;
            Some(Self {
                vms: part.spec.vms.iter().map(|vm| vm.name.clone()).collect(),
                is_held: held.is_some_and(|held| held.contains(&device)),
                why: of.why,
                remedy: of.remedy,
                device,
            })
        };
        unplanned.into_iter().filter_map(one).collect()
    }

    /// Sentence for users, with the remedy.
    #[must_use]
    pub fn message(&self) -> String {
        let of = Unplanned { why: self.why.clone(), remedy: self.remedy.clone() };
        let stays = if self.is_held { "; what an earlier plan has set stays" } else { "" };
        format!("{} is not planned: {}{stays}", self.device, unplanned_words(&of))
    }
}

/// The reason, with the remedy where the reason does not name it.
pub(super) fn unplanned_words(of: &Unplanned) -> String {
    match &of.remedy {
        Some(remedy) if !of.why.contains(remedy.as_str()) => format!("{}: `{remedy}`", of.why),
        _ => of.why.clone(),
    }
}

/// Warnings of the last planning; none without contracts.
pub(super) fn plan_warnings<'o>(desired: &Desired, observed: &'o Observed) -> &'o [String] {
    if desired.plant.is_some() { &observed.plan_warnings } else { &[] }
}

fn parts(desired: &Desired) -> impl Iterator<Item = &Part> {
    desired.plant.iter().flat_map(|plant| plant.host.parts())
}

/// The VMs that have no task on any planned device.
pub(super) fn vms_without_plan(unplanned: &[UnplannedDevice], desired: &Desired) -> BTreeSet<String> {
    let is_left_out = |part: &Part| {
        let key = device_key(&part.spec.device);
        unplanned.iter().any(|of| of.device == key && !of.is_held)
    };
    let vms = |left_out: bool| -> BTreeSet<String> {
        let of = parts(desired).filter(|part| is_left_out(part) == left_out);
        of.flat_map(|part| &part.spec.vms).map(|vm| vm.name.clone()).collect()
    };
    vms(true).difference(&vms(false)).cloned().collect()
}

/// Observations of planned devices only: nothing was predicted for the others, so a miss there is
/// not the plan's.
pub(super) fn planned_part<'s>(
    sight: &'s Observations,
    unplanned: &BTreeMap<String, Unplanned>,
    desired: &Desired,
) -> Cow<'s, Observations> {
    if unplanned.is_empty() {
        return Cow::Borrowed(sight);
    }
    let mut sight = sight.clone();
    sight.slow.retain(|device, _| !unplanned.contains_key(device));
    for part in parts(desired).filter(|part| unplanned.contains_key(&device_key(&part.spec.device))) {
        for vm in &part.spec.vms {
            for task in &vm.tasks {
                sight.missed.remove(&format!("{}/{}", vm.name, task.name));
            }
            sight.loads.remove(&load_key(&vm.name, false));
            sight.loads.remove(&load_key(&vm.name, true));
        }
    }
    Cow::Owned(sight)
}
