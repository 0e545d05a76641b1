//! Process that the `pid` of a contract means: PID and start time as first seen. Once it has ended,
//! its PID may be reused by a process that the contract does not mean.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rtvirtio_kernel::{ProcessId, trusted};
use rtvirtio_spec::{HostHandle, Reach};
use rtvirtio_workflow::write_state;
use serde::{Deserialize, Serialize};

use crate::desired::Desired;
use crate::observed::Presence;

/// Name of the file in the state directory.
const FILE: &str = "pids.json";
/// Boot ID: PIDs and start times begin anew with each boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// A process as first seen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Bound {
    boot: String,
    process: ProcessId,
}

/// The processes of contracts by `pid`, kept in a file so that a restart of the service forgets
/// none.
pub(super) struct Numbers {
    state: PathBuf,
    /// ID of this boot.
    boot: String,
    /// Processes by VM, or the reason why they cannot be known.
    all: Result<BTreeMap<String, Bound>, String>,
    /// Whether the file is written.
    writes: bool,
    /// Whether the file matches `all`.
    is_saved: bool,
    problem: Option<String>,
}

/// The PID by which a VM is named, if it is.
pub(super) fn number(reach: &Reach) -> Option<u32> {
    match reach {
        Reach::Existing { host: HostHandle::Pid(pid), .. } => Some(*pid),
        _ => None,
    }
}

impl Numbers {
    pub fn load(state: &Path) -> Self {
        // kernel file
        let boot = fs::read_to_string(BOOT_ID).map(|id| id.trim().to_owned());
        let all = match &boot {
            Ok(_) => read(state),
            Err(e) => Err(format!("{BOOT_ID} cannot be read: {e}")),
        };
        let (state, boot) = (state.to_owned(), boot.unwrap_or_default());
        Self { state, boot, all, writes: true, is_saved: true, problem: None }
    }

    /// Writes nothing from here on.
    pub fn read_only(&mut self) {
        self.writes = false;
    }

    /// Problem of the last save; `None` if it succeeded.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// Checks that the process with a VM's PID is the one that its contract means: the one of the
    /// first call or, where something was in force for the VM by then, the one of that start.
    pub fn check(
        &mut self,
        vm: &str,
        pid: u32,
        now: &[ProcessId],
        in_force: &[ProcessId],
    ) -> Result<(), Presence> {
        let all = self.all.as_mut().map_err(|why| Presence::Unknown(why.clone()))?;
        let Some(now) = now.iter().find(|process| process.pid == pid) else { return Ok(()) };
        let known = all.get(vm).filter(|bound| bound.process.pid == pid);
        let bound = match known {
            Some(bound) => bound.clone(),
            None => {
                let process = in_force.iter().find(|process| process.pid == pid).unwrap_or(now).clone();
                let bound = Bound { boot: self.boot.clone(), process };
                all.insert(vm.to_owned(), bound.clone());
                self.is_saved = false;
                bound
            }
        };
        if bound.boot == self.boot && bound.process == *now {
            return Ok(());
        }
        Err(Presence::Off(format!(
            "process {pid} of its contract has ended, and another process has this number since: `rtvirtio contract remove {vm}`, then set it \
             with the number that the VM has now, or name the VM by `domain`, `proxmox` or `qmp`"
        )))
    }

    /// Forgets the processes of VMs that no contract names by this PID any more.
    pub fn keep_only(&mut self, desired: &Desired) {
        let Ok(all) = &mut self.all else { return };
        let before = all.len();
        all.retain(|vm, bound| {
            let named = desired.contract_of(vm).and_then(|contract| number(&contract.vm.reach));
            desired.holds(vm) || named == Some(bound.process.pid)
        });
        self.is_saved &= all.len() == before;
        self.save();
    }

    /// Saves what is new, once for a look at all VMs. Retried with the next one where it fails:
    /// until the service ends the processes are known anyway.
    pub fn save(&mut self) {
        let Ok(all) = &self.all else { return };
        if self.is_saved || !self.writes {
            return;
        }
        let text = serde_json::to_vec_pretty(all).map_err(|e| e.to_string());
        let saved = text.and_then(|text| write_state(&self.state, FILE, &text).map_err(|e| format!("{e:#}")));
        self.is_saved = saved.is_ok();
        self.problem = saved
            .err()
            .map(|e| format!("after a restart of the service a `pid` may mean another process: {e}"));
    }
}

fn read(state: &Path) -> Result<BTreeMap<String, Bound>, String> {
    let path = state.join(FILE);
    let why = |e: &dyn std::fmt::Display| {
        format!(
            "which process its `pid` means is not known, as {} cannot be read: {e}; remove the file to take the numbers as they are now",
            path.display()
        )
    };
    match trusted::read_config(&path, trusted::CONFIG_LIMIT) {
        Ok(text) => serde_json::from_slice(&text).map_err(|e| why(&e)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(BTreeMap::new()),
        Err(e) => Err(why(&e)),
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::HostSpec;

    use super::*;
    use crate::desired::Contract;

    fn desired(vm: &str, pid: u32) -> Desired {
        let text = format!(
            "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{vm}\"\npid = {pid}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
        );
        let spec = HostSpec::parse("x.toml", &text).unwrap();
        Desired { contracts: Contract::of_spec(&spec, Path::new("x.toml")), ..Desired::default() }
    }

    fn process(start_time: u64) -> ProcessId {
        ProcessId { pid: 700, start_time }
    }

    #[test]
    fn a_number_means_the_process_that_had_it_first_also_after_a_restart_of_the_service() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let mut numbers = Numbers::load(dir.path());
        numbers.check("plc", 700, &[process(5)], &[]).unwrap();
        numbers.save();
        let other = numbers.check("plc", 700, &[process(9)], &[]).unwrap_err();
        assert!(matches!(&other, Presence::Off(why) if why.contains("contract remove plc")), "{other:?}");
        // Another process of the service.
        let mut numbers = Numbers::load(dir.path());
        assert!(numbers.check("plc", 700, &[process(9)], &[]).is_err());
        numbers.check("plc", 700, &[process(5)], &[]).unwrap();
        // As long as the contract may be there, and no longer.
        numbers.keep_only(&desired("plc", 700));
        numbers.keep_only(&Desired { held: vec!["plc".to_owned()], ..Desired::default() });
        assert!(numbers.check("plc", 700, &[process(9)], &[]).is_err());
        numbers.keep_only(&desired("plc", 701));
        numbers.check("plc", 700, &[process(9)], &[]).unwrap();
        numbers.save();
        assert!(Numbers::load(dir.path()).check("plc", 700, &[process(5)], &[]).is_err(), "it is saved");
    }

    #[test]
    fn what_is_in_force_shows_the_first_process_and_another_boot_has_none_of_it() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let mut numbers = Numbers::load(dir.path());
        assert!(numbers.check("plc", 700, &[process(9)], &[process(5)]).is_err());
        numbers.check("plc", 700, &[process(5)], &[]).unwrap();
        numbers.save();
        let file = dir.path().join(FILE);
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, text.replace(&numbers.boot, "another")).unwrap();
        assert!(Numbers::load(dir.path()).check("plc", 700, &[process(5)], &[]).is_err());
        // Damaged is not the same as none.
        fs::write(&file, "{").unwrap();
        let unknown = Numbers::load(dir.path()).check("plc", 700, &[process(5)], &[]).unwrap_err();
        assert!(matches!(&unknown, Presence::Unknown(why) if why.contains(FILE)), "{unknown:?}");
    }

    #[test]
    fn a_look_writes_nothing() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let mut numbers = Numbers::load(dir.path());
        numbers.read_only();
        numbers.check("plc", 700, &[process(5)], &[]).unwrap();
        numbers.save();
        assert!(!dir.path().join(FILE).exists() && numbers.problem().is_none());
    }
}
