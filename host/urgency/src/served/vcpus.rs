//! Threads of a VM's vCPUs among those that the journal lets move.

use rtvirtio_apply::{Guard, Hold, Levels, Movable};
use rtvirtio_units::Nanos;
use rtvirtio_urgency::{Config, Unreported, Vcpu};

use super::monitor_poller::{Again, Vcpus};
use super::raises::Trace;
use super::{Event, ServedVcpu, ServedVm};
use crate::UrgencyError;
use crate::thread::VcpuThread;

/// Threads of a VM in the journal that are not followed.
#[derive(Default)]
pub(super) struct Untaken {
    pub any: bool,
    again: Again,
    /// Reason why the last attempt failed.
    pub why: Option<String>,
    /// Whether they are still to be set to their contract's level.
    unsettled: bool,
    /// Time of the next check whether they still exist.
    look: Nanos,
}

/// Time between two such checks.
const LOOK_AGAIN: Nanos = Nanos::from_millis(1000);

impl ServedVm {
    /// Takes the threads that the journal lets move: QEMU's monitor is asked for their vCPUs, and
    /// its answer comes later ([`ServedVm::take_vcpus`]).
    pub(crate) fn update(&mut self, levels: &Levels, at: Nanos) {
        for i in (0..self.vcpus.len()).rev() {
            if !levels.movable().iter().any(|m| m == self.vcpus[i].thread.movable()) {
                self.drop_vcpu(i);
            }
        }
        self.had_vcpus |= levels.movable().iter().any(|m| m.pid == self.pid);
        // A thread must not stay at another level, left by an earlier process, until it is
        // followed.
        let any = !self.new_threads(levels).is_empty();
        self.untaken = Untaken { any, unsettled: any, why: self.untaken.why.take(), ..Untaken::default() };
        self.go_on(levels, at);
    }

    /// Asks again, and sets threads not followed to their contract's level, once it is time.
    pub(crate) fn go_on(&mut self, levels: &Levels, at: Nanos) {
        self.take_tracer();
        if self.untaken.any && at >= self.untaken.look {
            self.untaken.look = Nanos(at.0.saturating_add(LOOK_AGAIN.0));
            // They may have ended meanwhile.
            self.untaken.any = !self.new_threads(levels).is_empty();
        }
        if !self.untaken.any {
            self.untaken = Untaken::default();
            return;
        }
        if self.untaken.unsettled {
            self.settle_untaken(levels);
        }
        if self.untaken.again.is_due(at) {
            self.monitor.ask_vcpus();
        }
    }

    /// Takes the threads that QEMU has named. The others keep their contract's level, and
    /// [`VmStatus::refused`] has the reason.
    ///
    /// [`VmStatus::refused`]: super::VmStatus::refused
    pub(super) fn take_vcpus(&mut self, named: Result<Vcpus, UrgencyError>, levels: &Levels, at: Nanos) {
        if levels.applied_by().is_none() {
            // The journal could not be read: its threads are checked again once it can be.
            return;
        }
        let taken = named.and_then(|named| self.take_named(&named, levels, at));
        self.untaken.any = !self.new_threads(levels).is_empty();
        match taken {
            Err(e) if self.untaken.any => {
                self.untaken.again.failed(at);
                self.untaken.why = Some(format!("not all of its vCPUs are known: {e}"));
                self.untaken.unsettled = true;
            }
            // Threads that appeared meanwhile are asked for at the next check of the journal.
            _ => self.untaken = Untaken { any: self.untaken.any, ..Untaken::default() },
        }
    }

    /// Takes all threads that can be taken.
    fn take_named(&mut self, named: &Vcpus, levels: &Levels, at: Nanos) -> Result<(), UrgencyError> {
        let mut failed = None;
        for movable in self.new_threads(levels) {
            if let Err(e) = self.take_one(movable, named, at) {
                failed = failed.or(Some(e));
            }
        }
        failed.map_or(Ok(()), Err)
    }

    fn take_one(&mut self, movable: Movable, named: &Vcpus, at: Nanos) -> Result<(), UrgencyError> {
        let vcpu = match named.get(&movable.tid).map(Vec::as_slice) {
            Some([vcpu]) => *vcpu as usize,
            Some([_, ..]) => return Err(UrgencyError::SharedThread { vm: self.name.clone() }),
            _ => {
                let why = format!("it names no vCPU for thread {}", movable.tid);
                return Err(UrgencyError::NoMonitor { vm: self.name.clone(), why });
            }
        };
        // A thread that has ended since needs nothing.
        let Some(mut thread) = VcpuThread::open(movable)? else { return Ok(()) };
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
        Ok(())
    }

    /// Threads of the journal that exist and are not followed yet.
    fn new_threads(&self, levels: &Levels) -> Vec<Movable> {
        let is_known = |m: &Movable| self.vcpus.iter().any(|v| v.thread.movable() == m);
        let new = levels.movable().iter().filter(|m| m.pid == self.pid && !is_known(m));
        // A thread that cannot be read is tried again.
        new.filter(|m| !matches!(VcpuThread::open((*m).clone()), Ok(None))).cloned().collect()
    }

    /// Threads not followed yet that can be opened.
    pub(super) fn open_untaken(&self, levels: &Levels) -> Vec<VcpuThread> {
        self.new_threads(levels).into_iter().filter_map(|m| VcpuThread::open(m).ok().flatten()).collect()
    }

    fn settle_untaken(&mut self, levels: &Levels) {
        let mut threads = self.open_untaken(levels);
        // Where another rtvirtio has the lock it is done at the next check of the journal; where
        // the journal was replaced, with its threads.
        if let Ok(Hold::Free(guard)) = levels.hold() {
            set_to_contract(&mut threads, &guard);
            self.untaken.unsettled = false;
        }
    }
}

/// Sets threads to their contract's level.
pub(super) fn set_to_contract(threads: &mut [VcpuThread], guard: &Guard<'_>) {
    for thread in threads {
        let contract = thread.contract();
        // A thread that has ended needs no level, and a level set by another program stays.
        let _ = thread.set(contract, guard);
    }
}
