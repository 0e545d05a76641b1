//! The start of each VM to which the settings in force belong: a VM that ends takes its cgroups and
//! threads with it, and its next start has none of the settings.

use std::path::Path;

use rtvirtio_apply::{JOURNAL_FILE, StateDir};
use rtvirtio_kernel::ProcessId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::dirs::write_state;
use crate::error::{Context as _, Error, Kind, Result};
use crate::find::HostVm;
use crate::progress::Progress;

/// Name of the file next to the journal, which is valid only with one.
pub(crate) const VMS_FILE: &str = "vms.json";

/// A VM that settings were applied to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartedVm {
    /// Name of the VM in the spec.
    pub vm: String,
    /// Processes when the settings were applied.
    pub processes: Vec<ProcessId>,
}

impl StartedVm {
    /// Current processes of a VM; `None` where none last as long as it.
    ///
    /// # Errors
    /// When they are not known.
    pub(crate) fn find(vm: &HostVm, progress: &dyn Progress) -> Result<Option<Self>> {
        let pids = vm.lasting_pids(progress)?.unwrap_or_default();
        let processes: std::io::Result<Vec<Option<ProcessId>>> =
            pids.into_iter().map(ProcessId::find).collect();
        let processes: Vec<ProcessId> = processes?.into_iter().flatten().collect();
        Ok((!processes.is_empty()).then(|| Self { vm: vm.name.clone(), processes }))
    }

    /// Whether this start has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        !self.processes.iter().any(ProcessId::is_alive)
    }

    /// Warning that this start has ended, with the remedy.
    #[must_use]
    pub fn message(&self) -> String {
        let pids: Vec<String> = self.processes.iter().map(|p| p.pid.to_string()).collect();
        format!(
            "{}: the VM that the settings were applied to has ended (process {}), and a later start of it has none of them: \
             `rtvirtio revert`, start it, and apply again",
            self.vm,
            pids.join(", ")
        )
    }
}

/// Saves the VMs of settings that are about to be journaled.
pub(crate) fn save(all: &[StartedVm], state_dir: &Path) -> Result<()> {
    write_state(state_dir, VMS_FILE, &serde_json::to_vec_pretty(all)?)
}

/// Notes another start of a VM.
pub(crate) fn replace(start: StartedVm, state_dir: &Path) -> Result<()> {
    let mut all = started(state_dir)?;
    all.retain(|vm| vm.vm != start.vm);
    all.push(start);
    save(&all, state_dir)
}

/// The VMs that settings in force were applied to, and that have ended since.
pub fn ended(state_dir: &Path) -> Result<Vec<StartedVm>> {
    Ok(started(state_dir)?.into_iter().filter(StartedVm::has_ended).collect())
}

/// Processes, of those of these VMs that settings in force were applied to, that live.
pub fn processes(state_dir: &Path, vms: &[&str]) -> Result<Vec<ProcessId>> {
    let of = started(state_dir)?.into_iter().filter(|vm| vms.contains(&vm.vm.as_str()));
    Ok(of.flat_map(|vm| vm.processes).filter(ProcessId::is_alive).collect())
}

/// Names of the VMs that settings in force were applied to.
pub fn applied_vms(state_dir: &Path) -> Result<Vec<String>> {
    Ok(started(state_dir)?.into_iter().map(|vm| vm.vm).collect())
}

/// The VMs that settings in force were applied to.
pub(crate) fn started(state_dir: &Path) -> Result<Vec<StartedVm>> {
    list_of_journal(state_dir, VMS_FILE)
}

/// The list in a file of the state directory that means something next to a journal only; empty
/// without either.
pub(crate) fn list_of_journal<T: DeserializeOwned>(state_dir: &Path, file: &'static str) -> Result<Vec<T>> {
    let Some(dir) = StateDir::find(state_dir)? else { return Ok(Vec::new()) };
    let at = |name: &'static str| move || state_dir.join(name).display().to_string();
    if !dir.exists(JOURNAL_FILE).with_context(at(JOURNAL_FILE))?
        || !dir.exists(file).with_context(at(file))?
    {
        return Ok(Vec::new());
    }
    let text = dir.read(file).with_context(at(file))?;
    serde_json::from_slice(&text).map_err(|e| Error::from_source(Kind::File, e)).with_context(at(file))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{READS, alive_and_ended, spec, start};

    #[test]
    fn a_start_has_ended_with_its_last_process() {
        let (this, other) = alive_and_ended();
        assert!(!start("plc", &[&other, &this]).has_ended());
        // The process id is another process's by now.
        let ended = start("plc", &[&other]);
        assert!(ended.has_ended());
        assert!(ended.message().contains("rtvirtio revert") && ended.message().starts_with("plc: "));
    }

    /// A VM without a start is one that no conflict is looked for.
    #[test]
    fn processes_that_are_not_known_are_not_none() {
        let host = spec("name = \"plc\"\nproxmox = 100", READS);
        let quiet = crate::progress::Quiet::default();
        // This machine is no node of Proxmox VE, or has no such VM.
        let vm = crate::find::of_spec_in(&host.parts()[0].spec, None).unwrap().remove(0);
        StartedVm::find(&vm, &quiet).unwrap_err();
        let this = StartedVm::find(&HostVm::of_pid(std::process::id()), &quiet).unwrap().unwrap();
        assert!(!this.has_ended());
        assert_eq!(StartedVm::find(&HostVm::of_pid(u32::MAX), &quiet).unwrap(), None, "it has ended");
    }

    #[test]
    fn without_a_journal_no_vm_is_in_question() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let all = [start("plc", &[&ProcessId { pid: 1, start_time: u64::MAX }])];
        let state = dir.path().join("state");
        assert_eq!(ended(&state).unwrap(), []);
        save(&all, &state).unwrap();
        assert_eq!(ended(&state).unwrap(), []);
        std::fs::write(state.join(JOURNAL_FILE), "{}").unwrap();
        assert_eq!(ended(&state).unwrap(), all);
        std::fs::write(state.join(VMS_FILE), "{").unwrap();
        assert!(ended(&state).is_err(), "damaged is not the same as none");
    }
}
