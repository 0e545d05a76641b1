//! The threads of a VM's vCPUs: which of those that the journal lets move are which.

use rtvirtio_apply::{Hold, Levels, Movable};
use rtvirtio_units::Nanos;
use rtvirtio_urgency::{Config, Unreported, Vcpu};
use rtvirtio_vmm::threads::Named;

use super::raises::Trace;
use super::{Event, ServedVcpu, ServedVm};
use crate::UrgencyError;
use crate::thread::{VcpuThread, now};

/// Before QEMU is asked again where it did not answer, at least.
const ASK_AGAIN: Nanos = Nanos::from_millis(1000);
/// All other VMs wait while QEMU is asked, so this many times as long passes before the next time.
const PATIENCE: u64 = 10;

impl ServedVm {
    /// Takes the threads that the journal lets move: those that are not known yet are found by
    /// QEMU's monitor. Where that fails they have their contract's level, [`VmStatus::refused`]
    /// says why, and [`serve`](crate::serve) tries again: that concerns no other VM.
    ///
    /// [`VmStatus::refused`]: super::VmStatus::refused
    pub fn update(&mut self, levels: &Levels, at: Nanos) {
        if self.untaken.take().is_some() {
            self.refused = None;
        }
        if let Err(e) = self.take_vcpus(levels, at) {
            let after = now();
            let asked = after.0.saturating_sub(at.0);
            self.untaken = Some(Nanos(after.0 + ASK_AGAIN.0.max(asked.saturating_mul(PATIENCE))));
            self.refused = Some(format!("not all of its vCPUs are known: {e}"));
        }
    }

    /// Does it again once it is time, where it has failed.
    pub(crate) fn take_missing(&mut self, levels: &Levels, at: Nanos) {
        if self.untaken.is_some_and(|due| at >= due) {
            self.update(levels, at);
        }
    }

    fn take_vcpus(&mut self, levels: &Levels, at: Nanos) -> Result<(), UrgencyError> {
        let ours: Vec<&Movable> = levels.movable().iter().filter(|m| m.pid == self.pid).collect();
        for at in (0..self.vcpus.len()).rev() {
            if !ours.iter().any(|m| *m == self.vcpus[at].thread.movable()) {
                self.drop_vcpu(at);
            }
        }
        self.had_vcpus |= !ours.is_empty();
        let is_new = |m: &&Movable| !self.vcpus.iter().any(|v| v.thread.movable() == *m);
        let mut new = Vec::new();
        for movable in ours.into_iter().filter(is_new) {
            // One that has ended is none to ask for.
            new.extend(VcpuThread::open(movable.clone())?);
        }
        if new.is_empty() {
            return Ok(());
        }
        let named = match (self.monitor)().and_then(|mut qmp| Ok(Named::ask(&mut qmp)?)) {
            Ok(named) => named,
            Err(e) => {
                to_contract(new, levels);
                return Err(e);
            }
        };
        for mut thread in new {
            let vcpu = match named.vcpus.get(&thread.movable().tid).map(Vec::as_slice) {
                Some([vcpu]) => *vcpu as usize,
                Some([_, ..]) => return Err(UrgencyError::SharedThread { vm: self.name.clone() }),
                // It has ended since.
                _ => continue,
            };
            if !self.reports {
                thread = thread.with_status()?;
            }
            let config = Config { contract: thread.contract().priority, ..self.config };
            let machine = Vcpu::new(config, at);
            if let Some(history) = &mut self.history {
                history.push(at, vcpu, Event::Level(thread.level(), machine.reason()));
            }
            let slot = self.slot_of(vcpu, thread.movable().tid);
            self.vcpus.push(ServedVcpu {
                vcpu,
                thread,
                machine,
                unreported: Unreported::default(),
                sequence: None,
                report: None,
                foreign: false,
                trace: Trace::default(),
                slot,
                interrupted: None,
            });
        }
        Ok(())
    }
}

/// One that a former process left at another level must not stay there while QEMU does not answer.
fn to_contract(threads: Vec<VcpuThread>, levels: &Levels) {
    // Where another rtvirtio is at work the next time will do; a journal that cannot be read ends
    // all following at once.
    let Ok(Hold::Free(guard)) = levels.hold() else { return };
    for mut thread in threads {
        let contract = thread.contract();
        // One that has ended needs no level, and another program's stays.
        let _ = thread.set(contract, &guard);
    }
}
