//! Reservations of threads that slept while their CPUs became a partition.

use std::io;
use std::thread;
use std::time::Duration;

use rtvirtio_kernel::sched::Attr;
use rtvirtio_kernel::{WaitLimit, task, text};

use crate::error::ApplyError;
use crate::journal::Entry;
use crate::machine::Machine;
use crate::observer::Observer;
use crate::target::{Form, Place};

/// Pause between two tries, while a thread does not run on its new CPUs.
const TRY_EVERY: Duration = Duration::from_millis(10);

/// Pauses for threads that sleep, of one apply with all its VMs together: 10 s. A thread that is
/// refused after these fails at once.
#[derive(Clone, Copy, Debug)]
pub struct Pauses(u32);

impl Default for Pauses {
    fn default() -> Self {
        Self(1_000)
    }
}

impl Pauses {
    /// Takes one of them; `false` where none is left, or the call's waits have ended.
    pub fn pause(&mut self) -> bool {
        if WaitLimit::left(TRY_EVERY).is_zero() {
            return false;
        }
        let Some(left) = self.0.checked_sub(1) else { return false };
        self.0 = left;
        thread::sleep(TRY_EVERY);
        true
    }
}

/// Writes an entry. A thread that has slept since its CPUs became a partition still counts to the
/// root domain of its last CPU, and the kernel refuses it a reservation: a wake-up moves it, for
/// which the observer may wait.
pub(crate) fn when_it_has_run<T>(
    entry: &Entry,
    machine: &Machine<'_>,
    observer: &mut dyn Observer,
    mut write: impl FnMut() -> Result<T, ApplyError>,
) -> Result<T, ApplyError> {
    let Some((pid, tid)) = reserving(entry) else { return write() };
    let is_off_its_cpus = || {
        let last = task::stat(machine.root(), pid, tid).ok()?.cpu;
        let may = text::cpu_list(&task::affinity(machine.root(), pid, tid).ok()?)?;
        Some(!may.contains(&last))
    };
    let mut stopped = false;
    let pause = || {
        stopped = observer.stop();
        !stopped && observer.wait_for_sleepers()
    };
    let done = once_it_has_run(write, is_refused, is_off_its_cpus, pause);
    if stopped && done.is_err() { Err(ApplyError::Interrupted) } else { done }
}

/// Process and thread to which a write gives a reservation.
fn reserving(entry: &Entry) -> Option<(u32, u32)> {
    let Place::Thread { pid, tid, .. } = &entry.target.place else { return None };
    let attr = match &entry.target.form {
        Form::Scheduling => entry.new.as_deref()?.parse::<Attr>().ok()?,
        _ => return None,
    };
    attr.reservation.map(|_| (*pid, *tid))
}

fn is_refused(error: &ApplyError) -> bool {
    matches!(error, ApplyError::Refused { source, .. } if source.kind() == io::ErrorKind::PermissionDenied)
}

/// Writes until the write is not refused, or the thread's CPU is not the reason, or no pause is
/// left.
fn once_it_has_run<T, E>(
    mut write: impl FnMut() -> Result<T, E>,
    is_refused: impl Fn(&E) -> bool,
    is_off_its_cpus: impl Fn() -> Option<bool>,
    mut pause: impl FnMut() -> bool,
) -> Result<T, E> {
    // It may have moved between the refusal and the look.
    let mut may_have_moved = true;
    loop {
        let refused = match write() {
            Err(e) if is_refused(&e) => e,
            done => return done,
        };
        match is_off_its_cpus() {
            Some(true) if pause() => may_have_moved = true,
            Some(false) if may_have_moved => may_have_moved = false,
            _ => return Err(refused),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Number of writes, and of pauses, of a thread with this course: whether each write is
    /// refused, and whether each look finds the thread off its CPUs.
    fn play(refused: &[bool], off: &[bool], pauses: u32) -> (Result<(), &'static str>, usize, u32) {
        let (writes, looks, paused) = (Cell::new(0), Cell::new(0), Cell::new(0));
        let next = |of: &Cell<usize>| of.replace(of.get() + 1);
        let write = || if refused[next(&writes)] { Err("refused") } else { Ok(()) };
        let look = || off.get(next(&looks)).copied();
        let pause = || paused.replace(paused.get() + 1) < pauses;
        let done = once_it_has_run(write, |e| *e == "refused", look, pause);
        (done, writes.get(), paused.get())
    }

    #[test]
    fn a_sleeping_thread_is_tried_again_until_it_has_run() {
        assert_eq!(play(&[false], &[], 0), (Ok(()), 1, 0));
        assert_eq!(play(&[true, true, false], &[true, true], 9), (Ok(()), 3, 2));
        // It moved after the refusal.
        assert_eq!(play(&[true, false], &[false], 9), (Ok(()), 2, 0));
        assert_eq!(play(&[true, true, false], &[true, false], 9), (Ok(()), 3, 1));
        // Where it runs on its CPUs, or is gone, its CPU is not the reason.
        assert_eq!(play(&[true, true], &[false, false], 9), (Err("refused"), 2, 0));
        assert_eq!(play(&[true], &[], 9), (Err("refused"), 1, 0));
    }

    #[test]
    fn an_observer_that_does_not_wait_gets_the_refusal_at_once() {
        assert_eq!(play(&[true], &[true], 0), (Err("refused"), 1, 1));
        assert!(!crate::Silent.wait_for_sleepers());
        let mut pauses = Pauses(1);
        assert_eq!([pauses.pause(), pauses.pause()], [true, false]);
    }

    #[test]
    fn no_other_error_is_tried_again() {
        let write = || Err::<(), _>("busy");
        let done = once_it_has_run(write, |e| *e == "refused", || Some(true), || true);
        assert_eq!(done, Err("busy"));
    }
}
