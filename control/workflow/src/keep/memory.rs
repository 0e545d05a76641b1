//! Threads that come later and inherit no group of resctrl: those of the kernel, and of processes
//! that QEMU did not start.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rtvirtio_apply::{Machine, NoGuests, Silent};
use rtvirtio_spec::Vm;
use rtvirtio_vmm::Thread;

use super::Keeper;
use crate::error::Result;
use crate::managed_vm::ManagedVm;
use crate::memory::late;
use crate::pieces::{Key, key};

/// Interval of looks.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Threads that were looked at: one that another program moves later is left to it.
#[derive(Default)]
pub(super) struct MemoryGroups {
    known: BTreeSet<Key>,
    looked: Option<Instant>,
}

impl MemoryGroups {
    /// Takes new threads of these VMs into the VM's group. Returns sentences on what failed.
    pub fn poll(&mut self, keeper: &Keeper<'_>, kept: &[ManagedVm]) -> Vec<String> {
        let now = Instant::now();
        if self.looked.is_some_and(|at| now.saturating_duration_since(at) < LOOK_EVERY) {
            return Vec::new();
        }
        self.looked = Some(now);
        let (mut lines, mut known) = (Vec::new(), BTreeSet::new());
        for vm in kept {
            let name = &vm.contract().vm;
            let Some(spec) = keeper.vms.iter().find(|of| of.name == *name && of.cpu.memory.is_some()) else {
                continue;
            };
            let (old, new): (Vec<Thread>, Vec<Thread>) =
                vm.threads().into_iter().partition(|t| self.known.contains(&key(t)));
            known.extend(old.iter().map(key));
            match take_in(keeper, spec, &new) {
                Ok(None) => {}
                Ok(Some(failed)) => {
                    known.extend(new.iter().map(key));
                    lines.extend(failed);
                }
                Err(e) => {
                    known.extend(new.iter().map(key));
                    lines.push(format!("new threads of {name} are in no group of resctrl: {e:#}"));
                }
            }
        }
        self.known = known;
        lines
    }
}

/// Settings that failed; `None` while another rtvirtio is at work.
fn take_in(keeper: &Keeper<'_>, vm: &Vm, threads: &[Thread]) -> Result<Option<Vec<String>>> {
    if threads.is_empty() {
        return Ok(Some(Vec::new()));
    }
    let writes = late(&keeper.root, vm, threads)?;
    if writes.is_empty() {
        return Ok(Some(Vec::new()));
    }
    let Some(session) = keeper.session()? else { return Ok(None) };
    if session.applied_by()? != Some(keeper.by) {
        return Ok(None);
    }
    let amended = session.amend(&writes, &Machine::new(&keeper.root, &NoGuests), &mut Silent)?;
    let failed = amended.failed.iter().map(|(knob, why)| format!("{knob}: {why}"));
    Ok(Some(failed.chain(amended.warnings.iter().cloned()).collect()))
}
