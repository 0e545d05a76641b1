//! VM whose page is followed.

mod history;
mod interrupts;
mod monitor_poller;
mod place;
mod raises;
mod share;
mod status;
mod vcpus;

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::mpsc::Receiver;

use rtvirtio_apply::{Guard, Hold, Levels};
use rtvirtio_units::Nanos;
use rtvirtio_urgency::page::{BLOCK, Blocks, Host, LEAST_SIZE, Mode};
use rtvirtio_urgency::{
    Answer, Change, Config, Doorbell, FairShare, GuestClock, Lead, Reason, Report, Unreported, Vcpu,
    VcpuSample,
};
use rtvirtio_vmm::Qmp;
use rustix::io::Errno;

use crate::kvm::Slot;
use crate::thread::VcpuThread;
use crate::{DOORBELL, FileMemory, KvmInterrupts, Page, UrgencyError};

use monitor_poller::MonitorPoller;
use raises::Trace;
use vcpus::{Untaken, set_to_contract};

pub use history::{Event, History, Moment};
pub use raises::{Delays, Raises};
pub use status::{VcpuStatus, VmStatus};

/// Connects to a VM's monitor, for a short time.
pub type Monitor = Box<dyn FnMut() -> Result<Qmp, UrgencyError> + Send>;

/// vCPU with its thread and state.
struct ServedVcpu {
    vcpu: usize,
    thread: VcpuThread,
    machine: Vcpu,
    /// Report made from the thread's activity, for a guest that does not report.
    unreported: Unreported,
    /// Sequence number of the last report.
    sequence: Option<u32>,
    /// Last report, after the checks.
    report: Option<Report>,
    /// Whether another program has set its policy.
    foreign: bool,
    trace: Trace,
    /// Slot in which KVM's interrupts are recorded.
    slot: Option<Slot>,
    /// Last interrupt by KVM that may be for an urgent task.
    interrupted: Option<interrupts::Open>,
}

impl ServedVcpu {
    /// Direction in which its thread is to be moved; `None` for none.
    fn change(&self) -> Option<Change> {
        Change::between(self.thread.level(), self.machine.level())
    }
}

/// VM whose page is followed.
pub struct ServedVm {
    name: String,
    pid: u32,
    config: Config,
    host: Host<FileMemory>,
    /// Locked as long as the VM is followed.
    _lock: std::fs::File,
    monitor: MonitorPoller,
    mode: Mode,
    /// Blocks in which the guest reports; `None` while unknown.
    blocks: Option<Blocks<FileMemory>>,
    /// Blocks in which levels are shown: always in the page. The guest's own memory is only read,
    /// because the reporter may end, and the guest reuse the memory, before that is known here.
    shown: Blocks<FileMemory>,
    beat: Option<u32>,
    vcpus: Vec<ServedVcpu>,
    clock: GuestClock,
    ask_again: Nanos,
    /// Whether the guest has named memory that it does not have, and no other since.
    wrong: bool,
    bell: Option<(OwnedFd, Doorbell)>,
    /// Eventfd that the I/O domain signals at urgent completions. A guest that has many is treated
    /// like one that rings all the time.
    completions: Option<(OwnedFd, Doorbell)>,
    interrupts: Option<KvmInterrupts>,
    /// Source of the tracer that starts meanwhile, and since when.
    starting: Option<(Receiver<KvmInterrupts>, Nanos)>,
    share: FairShare,
    /// Time by which vCPUs are raised before announced timers.
    lead: Lead,
    /// CPU time in which urgent tasks answer interrupts.
    answer: Answer,
    /// Weight at the floor, as a share of the VM's own; `None` where it is not moved.
    weight: Option<f64>,
    nonsense: u64,
    unreadable: u64,
    refused: Option<String>,
    had_vcpus: bool,
    untaken: Untaken,
    /// Recorded events, for measurements only.
    history: Option<History>,
    /// Whether the guest reports; otherwise the host uses the activity of the threads.
    reports: bool,
    /// Whether the guest has rung the doorbell since the last poll.
    is_called: bool,
}

impl ServedVm {
    /// Offers the page to a VM's guest, and locks the VM: one process follows it at a time, and the
    /// kernel releases the lock when that process ends, however it ends.
    ///
    /// # Errors
    /// [`UrgencyError::Taken`], or when the page cannot be written.
    pub fn new(
        name: &str,
        pid: u32,
        config: Config,
        page: Page,
        monitor: Monitor,
    ) -> Result<Self, UrgencyError> {
        match rtvirtio_kernel::flock::lock(&page.lock) {
            Ok(true) => {}
            Ok(false) => return Err(UrgencyError::Taken { vm: name.to_owned(), path: page.path }),
            Err(e) => return Err(UrgencyError::io("lock", page.path)(e)),
        }
        let why = format!("{} has {} bytes, {LEAST_SIZE} at least", page.path.display(), page.size);
        let host = Host::new(FileMemory::new(page.file, 0), page.size)
            .ok_or(UrgencyError::NoMemory { vm: name.to_owned(), why })?;
        host.serve(page.doorbell.as_ref().map(|_| DOORBELL)).map_err(UrgencyError::io("write", page.path))?;
        let shown = Blocks::new(host.memory().clone(), BLOCK, host.vcpus());
        Ok(Self {
            name: name.to_owned(),
            pid,
            config,
            host,
            _lock: page.lock,
            monitor: MonitorPoller::start(monitor)
                .map_err(UrgencyError::io("start", "a thread that asks QEMU"))?,
            mode: Mode::Off,
            blocks: None,
            shown,
            beat: None,
            vcpus: Vec::new(),
            clock: GuestClock::default(),
            ask_again: Nanos(0),
            wrong: false,
            bell: page.doorbell.map(|fd| (fd, Doorbell::default())),
            completions: None,
            interrupts: None,
            starting: None,
            share: FairShare::new(crate::thread::now()),
            lead: Lead::new(config.lead),
            answer: Answer::new(config.answer),
            weight: None,
            nonsense: 0,
            unreadable: 0,
            refused: None,
            had_vcpus: false,
            untaken: Untaken::default(),
            history: None,
            reports: true,
            is_called: false,
        })
    }

    /// Follows a guest that does not report: its vCPUs are moved by the activity of their threads.
    ///
    /// # Errors
    /// When the kernel has no memory for a page in place of the guest's.
    pub fn without_reports(
        name: &str,
        pid: u32,
        config: Config,
        monitor: Monitor,
    ) -> Result<Self, UrgencyError> {
        let page = Page::private().map_err(UrgencyError::io("make", "an urgency page"))?;
        Ok(Self { reports: false, ..Self::new(name, pid, config, page, monitor)? })
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it had threads once and all have ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.had_vcpus && self.vcpus.is_empty() && !self.untaken.any
    }

    /// Time for which the vCPU that was raised last has been above the floor for an urgent task;
    /// `None` where none is.
    #[must_use]
    pub fn boosted_for(&self, now: Nanos) -> Option<Nanos> {
        let boosted =
            |v: &&ServedVcpu| v.machine.reason().is_boost() && v.machine.reason() != Reason::Blocked;
        let since = self.vcpus.iter().filter(boosted).map(|v| v.machine.changed()).max()?;
        Some(Nanos(now.0.saturating_sub(since.0)))
    }

    /// Sets the eventfd that the I/O domain signals before it interrupts the guest for an urgent
    /// request: non-blocking, as `eventfd2(2)` makes it.
    #[must_use]
    pub fn with_completions(mut self, eventfd: OwnedFd) -> Self {
        self.completions = Some((eventfd, Doorbell::default()));
        self
    }

    /// Also records this number of events of its vCPUs.
    #[must_use]
    pub fn with_history(mut self, moments: usize) -> Self {
        self.history = Some(History::with_room(moments));
        self
    }

    /// Recorded events; `None` without [`ServedVm::with_history`], and from the second call on.
    pub fn take_history(&mut self) -> Option<History> {
        self.history.take()
    }

    /// Descriptors that signal notices, completions and interrupts, without muted ones.
    pub(crate) fn bells(&self, now: Nanos) -> impl Iterator<Item = BorrowedFd<'_>> {
        let both = self.bell.iter().chain(&self.completions);
        let open = both.filter(move |(_, bell)| bell.muted_until(now).is_none()).map(|(fd, _)| fd.as_fd());
        open.chain(self.interrupts.iter().map(KvmInterrupts::as_fd))
    }

    /// Takes the notices that have arrived; returns whether to poll.
    pub(crate) fn take_notices(&mut self, now: Nanos) -> bool {
        self.is_called = take(&mut self.bell, now);
        self.is_called
    }

    /// Takes the completions that have arrived, and raises the vCPUs; returns whether it did.
    pub(crate) fn take_completions(&mut self, levels: &Levels, now: Nanos) -> bool {
        if !take(&mut self.completions, now) {
            return false;
        }
        // Earlier reports are no answer to them.
        self.poll(levels, now);
        for v in &mut self.vcpus {
            v.machine.completion(now);
        }
        self.move_changed(levels);
        true
    }

    /// Polls once, and moves the threads whose level changes. Returns the time of the next change
    /// without a report. A thread that has ended is no error, and a journal that cannot be read now
    /// only keeps threads from being moved.
    pub fn poll(&mut self, levels: &Levels, now: Nanos) -> Option<Nanos> {
        self.take_answers(levels, now);
        let alive = self.find_blocks(now);
        let mut next = None;
        for at in (0..self.vcpus.len()).rev() {
            let Some(used) = self.vcpus[at].thread.used_since() else {
                self.drop_vcpu(at);
                continue;
            };
            let v = &self.vcpus[at];
            let boosted = v.machine.is_boosted_at(v.thread.level());
            self.share.used(used, boosted);
            let interrupt = self.interrupt_of(at);
            let mut wake = self.look_at(at, alive, (used.ran, boosted), now);
            if let Some(next) = interrupt.and_then(|open| self.vcpus[at].take_interrupt(open, now)) {
                wake = next;
            }
            next = [next, wake].into_iter().flatten().min();
        }
        self.arm();
        self.move_changed(levels);
        self.move_weight(levels, now);
        next
    }

    /// Takes the answers of QEMU's monitor.
    fn take_answers(&mut self, levels: &Levels, now: Nanos) {
        if let Some(named) = self.monitor.vcpus() {
            self.take_vcpus(named, levels, now);
        }
        if let Some((address, place)) = self.monitor.place() {
            self.take_memory(address, place);
        }
    }

    /// Raises vCPUs at their floor whose timers are due, before reports are read, which takes as
    /// long again.
    pub(crate) fn raise_due(&mut self, levels: &Levels, now: Nanos) {
        for v in &mut self.vcpus {
            // A vCPU that has ended is found at the poll.
            if let Some(used) = v.machine.raise_due(now, || v.thread.used_since()) {
                self.share.used(used, false);
            }
        }
        self.move_changed(levels);
    }

    /// Moves the threads whose level has changed.
    fn move_changed(&mut self, levels: &Levels) {
        let moves = |v: &ServedVcpu| !v.foreign && v.change().is_some();
        if self.vcpus.iter().any(moves) {
            if let Ok(Hold::Free(guard)) = levels.hold() {
                self.move_threads(&guard);
            }
        }
    }

    /// Tells the guest that the page is no longer followed.
    pub fn close(&self) {
        // A page that is gone with its VM needs no message.
        let _ = self.host.leave();
    }

    /// Sets all vCPUs to their contract's level. Where another rtvirtio has the lock, which may be
    /// a revert, or the journal is no longer that of the process `by`, they stay: the journal has
    /// their possible levels.
    pub(crate) fn settle(&mut self, levels: &mut Levels, by: Option<u32>) -> Result<(), UrgencyError> {
        for _ in 0..100 {
            let is_changed = match levels.hold()? {
                Hold::Free(_) if levels.applied_by() != by => return Ok(()),
                Hold::Free(guard) => {
                    let mut untaken = self.open_untaken(levels);
                    self.weight = self.set_weight(1.0, levels, &guard);
                    for v in self.vcpus.iter_mut().filter(|v| !v.foreign) {
                        let contract = v.thread.contract();
                        // A vCPU that has ended needs no level.
                        let _ = v.thread.set(contract, &guard);
                    }
                    set_to_contract(&mut untaken, &guard);
                    return Ok(());
                }
                Hold::Busy => false,
                Hold::Changed => true,
            };
            if is_changed {
                // Amended since, as by a VM that has arrived.
                levels.reload()?;
                if levels.applied_by() != by {
                    return Ok(());
                }
            } else {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
        Ok(())
    }

    fn look_at(
        &mut self,
        at: usize,
        alive: bool,
        (ran, boosted): (Nanos, bool),
        now: Nanos,
    ) -> Option<Nanos> {
        let v = &mut self.vcpus[at];
        let charged = if boosted { ran } else { Nanos(0) };
        v.machine.set_lead(self.lead.get());
        v.machine.set_answer(self.answer.get());
        if !self.reports {
            // A vCPU that has not run is unchanged. One that ended is found at the next poll.
            let seen = if ran == Nanos(0) && v.report.is_some() { None } else { v.thread.activity(ran) };
            let report = seen.map(|seen| v.unreported.report(seen, self.config.hold)).or(v.report);
            let is_new = report != v.report;
            v.report = report;
            return v.machine.observe(VcpuSample { report, is_new, alive: true, ran: charged }, now).next;
        }
        // For a guest that named memory which it does not have, nothing is urgent.
        let nothing = self.wrong.then(Report::default);
        let mut look = VcpuSample { report: nothing, is_new: false, alive, ran: charged };
        if let Some(blocks) = &self.blocks {
            // A VM that has just ended takes its memory with it: its threads show that.
            match blocks.read(v.vcpu).ok().flatten() {
                Some((sequence, raw)) => {
                    look.is_new = v.sequence.replace(sequence).is_some_and(|old| old != sequence);
                    if look.is_new || v.report.is_none() {
                        if look.is_new {
                            // Read after the report: an earlier time would set its clock early.
                            let read = crate::thread::now();
                            self.clock.observe(read, Nanos(raw.written));
                            if let Some(history) = &mut self.history {
                                history.push(read, v.vcpu, Event::Report(Nanos(raw.written)));
                            }
                            v.trace.report(&raw, |guest| self.clock.to_host(guest));
                        }
                        let (report, nonsense) = raw.checked(|guest| self.clock.to_host(guest));
                        self.nonsense += u64::from(nonsense && look.is_new);
                        v.report = Some(report);
                    }
                    look.report = v.report;
                    look.alive |= look.is_new;
                }
                None => self.unreadable += 1,
            }
        }
        let by_other = v.expects(now);
        let next = v.machine.observe(look, now).next;
        if let Some(took) = v.answered(ran, by_other, now) {
            self.answer.took(took);
        }
        next
    }

    fn move_threads(&mut self, guard: &Guard<'_>) {
        for change in Change::IN_ORDER {
            for v in self.vcpus.iter_mut().filter(|v| !v.foreign && v.change() == Some(change)) {
                let new = v.machine.level();
                match v.thread.set(new, guard) {
                    Ok(true) => {
                        if let Some(history) = &mut self.history {
                            let event = Event::Level(new, v.machine.reason());
                            history.push(crate::thread::now(), v.vcpu, event);
                        }
                        if change == Change::Lower {
                            v.trace.lowered();
                        } else if self.reports || v.machine.reason() == Reason::Interrupt {
                            let (reason, at) = (v.machine.reason(), crate::thread::now());
                            let timer = v.machine.timer_due().filter(|_| reason == Reason::Timer);
                            if let Some(due) = timer {
                                self.lead.took(Nanos(at.0.saturating_sub(due.0)));
                            }
                            let due = if reason == Reason::Interrupt {
                                v.interrupted.map(|open| open.since)
                            } else {
                                timer
                            };
                            v.trace.raised(reason, due, self.is_called, at);
                        }
                        // As above: memory that is gone shows in the threads.
                        let _ = self.shown.show(v.vcpu, new);
                    }
                    Ok(false) => v.foreign = true,
                    Err(e) if rtvirtio_kernel::is_gone(&e) => {}
                    Err(e) => self.refused = Some(format!("vCPU {}: {e}", v.vcpu)),
                }
            }
        }
    }
}

/// Takes the signals that have arrived at an eventfd; returns whether any of them counts.
fn take(bell: &mut Option<(OwnedFd, Doorbell)>, now: Nanos) -> bool {
    let Some((fd, bell)) = bell.as_mut().filter(|(_, bell)| bell.muted_until(now).is_none()) else {
        return false;
    };
    let mut count = [0; 8];
    // Nothing to read is no notice. QEMU shares the open file, and could make a read wait.
    let mut into = [std::io::IoSliceMut::new(&mut count)];
    let read = match rustix::io::preadv2(&*fd, &mut into, u64::MAX, rustix::io::ReadWriteFlags::NOWAIT) {
        // Linux before 5.8 does not support it for eventfds.
        Err(Errno::OPNOTSUPP) => rustix::io::read(&*fd, &mut count),
        read => read,
    };
    match read {
        Ok(8) => bell.ring(now, u64::from_ne_bytes(count)),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
