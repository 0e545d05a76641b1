//! Raises a VM's vCPUs for interrupts that KVM makes pending.

use std::sync::mpsc::{Receiver, TryRecvError};

use rtvirtio_units::Nanos;
use rtvirtio_urgency::Reason;

use super::{ServedVcpu, ServedVm};
use crate::KvmInterrupts;
use crate::kvm::Slot;

/// Time after an interrupt from which on a report is no answer to it.
const ANSWER_WINDOW: Nanos = Nanos::from_millis(10);

/// Time after which a tracer that has not started is reported.
const LONGEST_START: Nanos = Nanos::from_millis(10_000);

/// Tracer of KVM's interrupts, started or starting, whose end may wait for the kernel.
pub(crate) type StoppedTracer = (Option<KvmInterrupts>, Option<Receiver<KvmInterrupts>>);

/// Interrupt that may be for an urgent task.
#[derive(Clone, Copy, Debug)]
pub(super) struct Open {
    /// Time at which KVM made it pending.
    pub since: Nanos,
    /// CPU time of the vCPU since then.
    ran: Nanos,
}

impl ServedVcpu {
    /// Handles an interrupt by KVM. To be called after the poll: earlier reports are no answer, and
    /// an urgent task needs none. Returns the time of the next change without a report; `None`
    /// where the interrupt changes nothing.
    pub(super) fn take_interrupt(&mut self, open: Open, now: Nanos) -> Option<Option<Nanos>> {
        if self.machine.reason() != Reason::Floor {
            return None;
        }
        self.interrupted = Some(open);
        Some(self.machine.kvm_interrupt(now).next)
    }

    /// Charges CPU time after the vCPU's report was taken. Returns the CPU time until the answer,
    /// if the report is one. `by_other`: a timer or a completion may have woken the task instead.
    pub(super) fn answered(&mut self, ran: Nanos, by_other: bool, now: Nanos) -> Option<Nanos> {
        let is_urgent = self.machine.is_urgent();
        let open = self.interrupted.as_mut()?;
        open.ran.0 += ran.0;
        let took = open.ran;
        let counts = !by_other && now.0 <= open.since.0 + ANSWER_WINDOW.0;
        if is_urgent || !counts {
            self.interrupted = None;
        }
        (is_urgent && counts).then_some(took)
    }

    /// Whether something other than an interrupt by KVM may wake an urgent task now.
    pub(super) fn expects(&self, now: Nanos) -> bool {
        self.machine.expects_timer(now) || matches!(self.machine.reason(), Reason::Timer | Reason::Completion)
    }
}

impl ServedVm {
    /// Also raises its vCPUs for interrupts that KVM makes pending.
    #[must_use]
    pub fn with_interrupts(mut self, interrupts: KvmInterrupts) -> Self {
        self.interrupts = Some(interrupts);
        self
    }

    /// Also raises its vCPUs for interrupts that KVM makes pending, by a tracer that starts
    /// meanwhile: a vCPU that computes at its contract's priority can keep PREEMPT_RT from
    /// attaching it, so its VM is followed before. A sender that is gone has no tracer.
    #[must_use]
    pub fn with_interrupts_of(mut self, tracer: Receiver<KvmInterrupts>) -> Self {
        self.starting = Some((tracer, crate::thread::now()));
        self
    }

    /// Takes the tracer that has started meanwhile.
    pub(super) fn take_tracer(&mut self) {
        let Some((starting, _)) = &self.starting else { return };
        match starting.try_recv() {
            Ok(tracer) => self.interrupts = Some(tracer),
            Err(TryRecvError::Empty) => return,
            Err(TryRecvError::Disconnected) => {}
        }
        self.starting = None;
        for at in 0..self.vcpus.len() {
            let v = &self.vcpus[at];
            let slot = self.slot_of(v.vcpu, v.thread.movable().tid);
            self.vcpus[at].slot = slot;
        }
    }

    /// Reason why no interrupt raises its vCPUs yet, where the kernel takes long to attach the
    /// tracer.
    pub(super) fn lacks_tracer(&self) -> Option<&'static str> {
        let (_, since) = self.starting.as_ref()?;
        let is_late = crate::thread::now().0.saturating_sub(since.0) > LONGEST_START.0;
        is_late.then_some("KVM's interrupts do not raise it yet: the kernel has not attached their tracer")
    }

    /// Returns the tracer of KVM's interrupts, which no longer raise vCPUs.
    pub(crate) fn stop_interrupts(&mut self) -> Option<StoppedTracer> {
        self.vcpus.iter_mut().for_each(|v| v.slot = None);
        let stopped = (self.interrupts.take(), self.starting.take().map(|(starting, _)| starting));
        (stopped.0.is_some() || stopped.1.is_some()).then_some(stopped)
    }

    /// Whether KVM has made an interrupt pending for a vCPU at its floor, which a poll then raises.
    /// A guest cannot flood this: a vCPU that has been raised causes no wake-up until it is at its
    /// floor again, and is charged for each time.
    pub(crate) fn take_interrupts(&self) -> bool {
        self.interrupts.as_ref().is_some_and(KvmInterrupts::take)
    }

    /// Interrupt of a vCPU since the last poll, if it is to raise it; one that comes while the vCPU
    /// is raised does not.
    pub(super) fn interrupt_of(&self, at: usize) -> Option<Open> {
        let v = &self.vcpus[at];
        let since = self.interrupts.as_ref()?.since(v.slot.as_ref()?)?;
        (v.machine.reason() == Reason::Floor).then_some(Open { since, ran: Nanos(0) })
    }

    /// Lets the next interrupt of a vCPU at its floor wake this process. Before threads are
    /// lowered, so that an interrupt just then is not lost. A vCPU without budget left causes no
    /// wake-up, which could not be charged.
    pub(super) fn arm(&self) {
        let Some(interrupts) = &self.interrupts else { return };
        for v in &self.vcpus {
            let is_armed = !v.foreign && v.machine.awaits_interrupt();
            v.slot.iter().for_each(|slot| interrupts.arm(slot, is_armed));
        }
    }

    /// Slot for interrupts of a new vCPU's thread; `None` where they cannot be recorded.
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

    /// Removes a vCPU that has ended, or whose thread is no longer in the journal.
    pub(super) fn drop_vcpu(&mut self, at: usize) {
        let gone = self.vcpus.remove(at);
        if let (Some(interrupts), Some(slot)) = (&mut self.interrupts, gone.slot) {
            interrupts.remove(&slot);
        }
    }
}
