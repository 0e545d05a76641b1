//! Loop over all VMs, with polls at the relevant times.

use std::borrow::BorrowMut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::thread::JoinHandle;

use rtvirtio_apply::{ApplyError, Hold, Levels};
use rtvirtio_units::Nanos;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::thread::now;
use crate::{ServedVm, UrgencyError, VmStatus};

/// Least time between two polls while a vCPU is boosted; otherwise an eighth of the time for which
/// it has been, so that a task that is done keeps it raised for little longer than it was urgent.
pub const LOOK_BOOSTED: Nanos = Nanos::from_micros(25);
/// Time between two polls otherwise: longest delay of an urgent task without announced timer.
pub const LOOK: Nanos = Nanos::from_millis(1);
/// Time between two reports, and between two checks of the journal.
const REPORT: Nanos = Nanos::from_millis(1000);
const JOURNAL: Nanos = Nanos::from_millis(50);
/// Number of failed checks of the journal after which following ends.
const MOST_UNREAD: u32 = 100;
/// Longest wait at the end until the kernel has removed the programs that trace KVM's interrupts.
const REMOVAL: Nanos = Nanos::from_millis(10_000);

/// Reason why serving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Stopped by the caller; all vCPUs are at their contract's level.
    Stopped,
    /// The contracts were put back, or others were applied.
    PutBack,
    /// All VMs have ended.
    VmsEnded,
}

/// Follows the pages of these VMs until `stop` is set. `report` gets their status, each second. The
/// calling thread should have a higher priority than all vCPUs.
///
/// # Errors
/// When the journal cannot be read for some seconds; vCPUs stay at their current level, because
/// only the journal shows whether they may be moved. A VM whose monitor does not answer, or whose
/// vCPUs share a thread, is no error: [`VmStatus::refused`] has it.
pub fn serve(
    vms: &mut [ServedVm],
    levels: &mut Levels,
    stop: &AtomicBool,
    report: &mut dyn FnMut(&[VmStatus]),
) -> Result<Ended, UrgencyError> {
    serve_all(vms.iter_mut().collect(), &mut || None, levels, stop, report)
}

/// Follows VMs as [`serve`] does, adding those that arrive, until the last sender is gone and all
/// have ended: a VM whose monitor does not answer keeps no other one from being followed.
pub fn serve_newcomers(
    vms: &Receiver<ServedVm>,
    levels: &mut Levels,
    stop: &AtomicBool,
    report: &mut dyn FnMut(&[VmStatus]),
) -> Result<Ended, UrgencyError> {
    let mut more = || match vms.try_recv() {
        Ok(vm) => Some(Next::Vm(vm)),
        Err(TryRecvError::Empty) => Some(Next::Later),
        Err(TryRecvError::Disconnected) => None,
    };
    let ended = serve_all(Vec::new(), &mut more, levels, stop, report);
    // VMs that arrived too late are not followed.
    vms.try_iter().for_each(|vm| vm.close());
    ended
}

/// Next VM to follow, or none yet.
enum Next<V> {
    Vm(V),
    Later,
}

/// Source of further VMs; `None` when no more will come.
type More<'m, V> = dyn FnMut() -> Option<Next<V>> + 'm;

fn serve_all<V: BorrowMut<ServedVm>>(
    mut vms: Vec<V>,
    more: &mut More<'_, V>,
    levels: &mut Levels,
    stop: &AtomicBool,
    report: &mut dyn FnMut(&[VmStatus]),
) -> Result<Ended, UrgencyError> {
    let by = levels.applied_by();
    let ended = follow(&mut vms, more, levels, stop, report);
    // Also where following has failed, or was ended by others; no vCPU waits for it.
    Removal::start(&mut vms, now());
    vms.iter().for_each(|vm| vm.borrow().close());
    if matches!(ended, Ok(Ended::PutBack)) {
        return ended;
    }
    // One that cannot be settled keeps no other at its levels.
    let settled: Vec<_> = vms.iter_mut().map(|vm| vm.borrow_mut().settle(levels, by)).collect();
    settled.into_iter().collect::<Result<(), _>>()?;
    ended
}

fn follow<V: BorrowMut<ServedVm>>(
    vms: &mut Vec<V>,
    more: &mut More<'_, V>,
    levels: &mut Levels,
    stop: &AtomicBool,
    report: &mut dyn FnMut(&[VmStatus]),
) -> Result<Ended, UrgencyError> {
    let by = levels.applied_by();
    if by.is_none() {
        return Ok(Ended::PutBack);
    }
    for vm in vms.iter_mut() {
        vm.borrow_mut().update(levels, now());
    }
    let mut may_come = true;
    let mut due = vec![Nanos(0); vms.len()];
    let (mut journal, mut next_report) = (now(), now());
    let mut removal = None;
    let mut unread = 0;
    loop {
        let at = now();
        if stop.load(Ordering::Relaxed) {
            let removal = removal.get_or_insert_with(|| Removal::start(vms, at));
            if removal.is_over(at) {
                return Ok(Ended::Stopped);
            }
        }
        if at >= journal {
            journal = Nanos(at.0 + JOURNAL.0);
            while may_come {
                match more() {
                    Some(Next::Vm(mut vm)) => {
                        vm.borrow_mut().update(levels, at);
                        vms.push(vm);
                        due.push(Nanos(0));
                    }
                    Some(Next::Later) => break,
                    None => may_come = false,
                }
            }
            match is_changed(levels) {
                Ok(true) if levels.applied_by() != by => return Ok(Ended::PutBack),
                Ok(changed) => {
                    unread = 0;
                    for vm in vms.iter_mut() {
                        let vm = vm.borrow_mut();
                        if changed { vm.update(levels, at) } else { vm.go_on(levels, at) }
                    }
                }
                // A journal that cannot be read for a moment, as without a free descriptor, would
                // leave vCPUs at their levels.
                Err(_) if unread < MOST_UNREAD => unread += 1,
                Err(e) => return Err(e.into()),
            }
        }
        for (vm, due) in vms.iter_mut().map(V::borrow_mut).zip(&mut due) {
            if at >= *due {
                vm.raise_due(levels, at);
            }
            let is_called = vm.take_notices(at) | vm.take_interrupts();
            let is_raised = vm.take_completions(levels, at);
            if at < *due && !is_called && !is_raised {
                continue;
            }
            let next = vm.poll(levels, now());
            let after = now();
            // A task that has been urgent for long may stay so for some time.
            let interval =
                vm.boosted_for(after).map_or(LOOK, |since| Nanos(since.0 / 8).clamp(LOOK_BOOSTED, LOOK));
            let latest = Nanos(after.0 + interval.0);
            *due = next.map_or(latest, |next| next.min(latest)).max(Nanos(after.0 + 1));
        }
        if at >= next_report && !vms.is_empty() {
            next_report = Nanos(at.0 + REPORT.0);
            report(&vms.iter().map(|vm| vm.borrow().status()).collect::<Vec<_>>());
        }
        // The set of threads is unknown while the journal cannot be read.
        if unread == 0 && !may_come && vms.iter().all(|vm| vm.borrow().has_ended()) {
            return Ok(Ended::VmsEnded);
        }
        let wake = due.iter().copied().min().unwrap_or(journal);
        wait(vms, wake)?;
    }
}

/// Whether the journal was replaced; it is read again then.
fn is_changed(levels: &mut Levels) -> Result<bool, ApplyError> {
    let changed = matches!(levels.hold()?, Hold::Changed);
    if changed {
        levels.reload()?;
    }
    Ok(changed)
}

/// Removes the programs that trace KVM's interrupts, in a thread of its own: the kernel waits
/// meanwhile until no thread can be in one any more (`synchronize_rcu_tasks`). A vCPU that computes
/// at its contract's priority keeps PREEMPT_RT's RCU from its CPU, which would block that wait
/// forever, so vCPUs are followed until it is over, as their budgets let all others run.
struct Removal {
    thread: Option<JoinHandle<()>>,
    latest: Nanos,
}

impl Removal {
    fn start<V: BorrowMut<ServedVm>>(vms: &mut [V], at: Nanos) -> Self {
        let all: Vec<_> = vms.iter_mut().filter_map(|vm| vm.borrow_mut().stop_interrupts()).collect();
        let latest = Nanos(at.0 + REMOVAL.0);
        if all.is_empty() {
            return Self { thread: None, latest };
        }
        // Without a thread they are dropped with the closure, here.
        let remove = move || {
            for (started, starting) in all {
                drop(started);
                // A tracer that is being attached is removed where it arrives.
                drop(starting.map(|starting| starting.recv()));
            }
        };
        let thread = std::thread::Builder::new().name("removal".to_owned()).spawn(remove).ok();
        Self { thread, latest }
    }

    fn is_over(&self, at: Nanos) -> bool {
        at >= self.latest || self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }
}

/// Sleeps until the given time, or until a guest rings.
fn wait<V: BorrowMut<ServedVm>>(vms: &[V], until: Nanos) -> Result<(), UrgencyError> {
    let at = now();
    let bells = vms.iter().flat_map(|vm| vm.borrow().bells(at));
    let mut bells: Vec<PollFd<'_>> = bells.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
    let left = until.0.saturating_sub(at.0);
    // A sleep is no more than milliseconds, so both parts fit.
    let timeout = Timespec { tv_sec: (left / 1_000_000_000) as i64, tv_nsec: (left % 1_000_000_000) as i64 };
    match poll(&mut bells, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(e) => Err(UrgencyError::io("wait for", "the doorbells")(e.into())),
    }
}
