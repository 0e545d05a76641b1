//! Devices for which each VM's settings in force were made, so that its I/O on other devices or
//! outside its cgroup is reported meanwhile.

use std::path::Path;

use rtvirtio_kernel::{Cgroups, Root, unless_gone};
use rtvirtio_planner::{Knob, LimitKind, Plan};
use serde::{Deserialize, Serialize};

use crate::dirs::write_state;
use crate::error::Result;
use crate::site::Site;
use crate::started;
use crate::uncovered::{self, Covered, Uncovered, UncoveredKind};

/// Name of the file next to the journal, which is valid only with one.
pub(crate) const COVERED_FILE: &str = "covered.json";

/// The devices of one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoveredVm {
    /// Name of the VM in the spec.
    pub vm: String,
    /// Kernel names of the disks.
    pub devices: Vec<String>,
    /// Names of its settings that are to act on what it writes.
    pub of_writes: Vec<String>,
}

/// Devices and settings of each VM in these plans. None for a lab, which starts its VMs itself.
pub(crate) fn covered_vms<'a>(all: impl Iterator<Item = (&'a Plan, &'a Site)>) -> Vec<CoveredVm> {
    let mut found: Vec<CoveredVm> = Vec::new();
    for (plan, site) in all.filter(|(_, site)| site.lab.is_none()) {
        for vm in &site.spec.vms {
            let device = site.stack.device.name.clone();
            let of_writes = plan.settings.iter().filter(|s| s.value != "max").filter_map(|s| match &s.knob {
                Knob::VmWeight { vm: of } | Knob::VmIoWeight { vm: of } if *of == vm.name => Some("weight"),
                Knob::VmIoLatency { vm: of } if *of == vm.name => Some("latency target"),
                Knob::VmLimit { vm: of, limit: LimitKind::WriteBps | LimitKind::WriteIops }
                    if *of == vm.name =>
                {
                    Some("limit on writes")
                }
                _ => None,
            });
            let of_writes: Vec<String> = of_writes.map(|name| format!("{name} for {device}")).collect();
            match found.iter_mut().find(|known| known.vm == vm.name) {
                Some(known) => {
                    known.devices.push(device);
                    known.of_writes.extend(of_writes);
                }
                None => found.push(CoveredVm { vm: vm.name.clone(), devices: vec![device], of_writes }),
            }
        }
    }
    found
}

/// Saves them for settings that are about to be journaled.
pub(crate) fn save(all: &[CoveredVm], state_dir: &Path) -> Result<()> {
    write_state(state_dir, COVERED_FILE, &serde_json::to_vec_pretty(all)?)
}

/// I/O on which no setting in force acts now, of the settings' VMs that still run.
pub fn uncovered(state_dir: &Path) -> Result<Vec<InForce>> {
    let (root, mut found) = (Root::default(), Vec::new());
    for vm in started::list_of_journal::<CoveredVm>(state_dir, COVERED_FILE)? {
        let pids: Vec<u32> =
            started::processes(state_dir, &[&vm.vm])?.into_iter().map(|process| process.pid).collect();
        let charges_write_back = charges_write_back(&root, &pids)?;
        let of = Covered { vm: &vm.vm, pids: &pids, devices: &vm.devices, others: &[], charges_write_back };
        found.extend(uncovered::scan(&root, &of).into_iter().map(|of| InForce::new(of, &vm)));
    }
    Ok(found)
}

/// A part of a VM's I/O on which no setting in force acts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct InForce {
    /// VM, kind and text of that I/O.
    #[serde(flatten)]
    pub of: Uncovered,
    /// Settings that are in force and do not hold because of it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub void: Vec<String>,
}

impl InForce {
    fn new(of: Uncovered, vm: &CoveredVm) -> Self {
        // With an unknown kind it is not known whether the settings hold.
        let is_void = matches!(of.kind, UncoveredKind::WriteBack | UncoveredKind::Unknown);
        let void = if is_void { vm.of_writes.clone() } else { Vec::new() };
        Self { of, void }
    }
}

impl std::fmt::Display for InForce {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.void.as_slice() {
            [] => write!(f, "{}", self.of),
            void if self.of.kind == UncoveredKind::Unknown => {
                write!(f, "{}; NOT KNOWN WHETHER IT HOLDS: {}", self.of, void.join(", "))
            }
            void => write!(f, "{}; DOES NOT HOLD: {}", self.of, void.join(", ")),
        }
    }
}

/// Whether write-back is charged to the VM's cgroup; true for a VM that has just ended.
fn charges_write_back(root: &Root, pids: &[u32]) -> Result<bool> {
    let Some(pid) = pids.first() else { return Ok(true) };
    let cgroups = Cgroups::detect(root)?;
    match unless_gone(cgroups.of_pid(root, *pid))? {
        Some(cgroup) => uncovered::charges_write_back(root, &cgroups, &Cgroups::unit_of(&cgroup)),
        None => Ok(true),
    }
}
