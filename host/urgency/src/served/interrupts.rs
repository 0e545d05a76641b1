//! What KVM makes pending for a VM's vCPUs raises them.

use rtvirtio_units::Nanos;
use rtvirtio_urgency::Reason;

use super::{ServedVcpu, ServedVm};
use crate::KvmInterrupts;
use crate::kvm::Slot;

/// A report that comes later is no answer.
const LONGEST: Nanos = Nanos::from_millis(10);

/// An interrupt that may be for an urgent task.
#[derive(Clone, Copy, Debug)]
pub(super) struct Open {
    /// When KVM made it pending.
    pub since: Nanos,
    /// CPU time that the vCPU has used since.
    ran: Nanos,
}

impl ServedVcpu {
    /// KVM has made something pending for it. After the look: what the guest had reported before is
    /// no answer, and an urgent task needs none. When something changes by itself then; `None`
    /// where this changes nothing.
    pub(super) fn take_interrupt(&mut self, open: Open, now: Nanos) -> Option<Option<Nanos>> {
        if self.machine.reason() != Reason::Floor {
            return None;
        }
        self.interrupted = Some(open);
        Some(self.machine.kvm_interrupt(now).next)
    }

    /// It has run for some time, and its report was taken. The CPU time that an answer took where
    /// this is one. `by_other` says that a timer or a completed request may have woken the task.
    pub(super) fn answered(&mut self, ran: Nanos, by_other: bool, now: Nanos) -> Option<Nanos> {
        let is_urgent = self.machine.is_urgent();
        let open = self.interrupted.as_mut()?;
        open.ran.0 += ran.0;
        let took = open.ran;
        let counts = !by_other && now.0 <= open.since.0 + LONGEST.0;
        if is_urgent || !counts {
            self.interrupted = None;
        }
        (is_urgent && counts).then_some(took)
    }

    /// Whether something else than an interrupt by KVM may wake an urgent task now.
    pub(super) fn expects(&self, now: Nanos) -> bool {
        self.machine.expects_timer(now) || matches!(self.machine.reason(), Reason::Timer | Reason::Completion)
    }
}

impl ServedVm {
    /// Also raises its vCPUs for what KVM makes pending for them.
    #[must_use]
    pub fn with_interrupts(mut self, interrupts: KvmInterrupts) -> Self {
        self.interrupts = Some(interrupts);
        self
    }

    /// Hands out what says when KVM interrupts its vCPUs; nothing does any more.
    pub(crate) fn stop_interrupts(&mut self) -> Option<KvmInterrupts> {
        self.vcpus.iter_mut().for_each(|v| v.slot = None);
        self.interrupts.take()
    }

    /// Whether KVM has made something pending for a vCPU at its floor: a look raises it. None can
    /// flood this: one that has been raised causes no wake-up until it is at its floor again, and
    /// pays for each time.
    pub(crate) fn take_interrupts(&self) -> bool {
        self.interrupts.as_ref().is_some_and(KvmInterrupts::take)
    }

    /// What KVM has made pending for a vCPU since the last look, where that is to raise it. What
    /// comes while it stands high finds it high.
    pub(super) fn interrupt_of(&self, at: usize) -> Option<Open> {
        let v = &self.vcpus[at];
        let since = self.interrupts.as_ref()?.since(v.slot.as_ref()?)?;
        (v.machine.reason() == Reason::Floor).then_some(Open { since, ran: Nanos(0) })
    }

    /// Lets the next interrupt of a vCPU at its floor wake this. Before threads are lowered: one
    /// that comes just then is not lost. A vCPU without budget left causes no wake-up: that
    /// could not be charged.
    pub(super) fn arm(&self) {
        let Some(interrupts) = &self.interrupts else { return };
        for v in &self.vcpus {
            let is_armed = !v.foreign && v.machine.awaits_interrupt();
            v.slot.iter().for_each(|slot| interrupts.arm(slot, is_armed));
        }
    }

    /// Where interrupts of a new vCPU's thread are noted; `None` where they cannot be.
    pub(super) fn slot_of(&mut self, vcpu: usize, thread: u32) -> Option<Slot> {
        let added = self.interrupts.as_mut()?.add(thread);
        let why = match added {
            Ok(Some(slot)) => return Some(slot),
            Ok(None) => "there are too many vCPUs".to_owned(),
            Err(e) => e.to_string(),
        };
        self.refused = Some(format!("interrupts do not raise vCPU {vcpu}: {why}"));
        None
    }

    /// One that has ended, or is not ours to move any more.
    pub(super) fn drop_vcpu(&mut self, at: usize) {
        let gone = self.vcpus.remove(at);
        if let (Some(interrupts), Some(slot)) = (&mut self.interrupts, gone.slot) {
            interrupts.remove(&slot);
        }
    }
}
