//! Reservations of threads that slept while their CPUs became a partition.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use rtvirtio_kernel::sched::{self, Attr};
use rtvirtio_kernel::{Root, WaitLimit, task, text};
use rustix::io::Errno;

/// Pause between two tries, while a thread does not run on its new CPUs.
const TRY_EVERY: Duration = Duration::from_millis(10);
/// Largest number of pauses of this process, for all threads of all VMs together: 10 s. A thread
/// that is refused after these, or after the end of the call's waits, fails at once.
const PAUSES: u32 = 1_000;

static PAUSED: AtomicU32 = AtomicU32::new(0);

/// Sets a thread's scheduling. A thread that has slept since its CPUs became a partition still
/// counts to the root domain of its last CPU, and the kernel refuses it a reservation: a wake-up
/// moves it.
pub(crate) fn set_when_it_has_run(root: &Root, pid: u32, tid: u32, attr: &Attr) -> io::Result<()> {
    let is_off_its_cpus = || {
        let last = task::stat(root, pid, tid).ok()?.cpu;
        let may = text::cpu_list(&task::affinity(root, pid, tid).ok()?)?;
        Some(!may.contains(&last))
    };
    // It may have moved between the refusal and the look.
    let mut may_have_moved = true;
    loop {
        let refused = match sched::set(tid, attr) {
            Err(e) if e.raw_os_error() == Some(Errno::PERM.raw_os_error()) => e,
            done => return done,
        };
        match is_off_its_cpus() {
            _ if attr.reservation.is_none() => return Err(refused),
            Some(true)
                if PAUSED.load(Ordering::Relaxed) < PAUSES && !WaitLimit::left(TRY_EVERY).is_zero() =>
            {
                PAUSED.fetch_add(1, Ordering::Relaxed);
                may_have_moved = true;
                thread::sleep(TRY_EVERY);
            }
            Some(false) if may_have_moved => may_have_moved = false,
            _ => return Err(refused),
        }
    }
}
