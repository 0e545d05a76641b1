//! Reservations of threads that slept while their CPUs became a partition.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use rtvirtio_kernel::sched::{self, Attr};
use rtvirtio_kernel::{Root, task, text};
use rustix::io::Errno;

/// Longest wait for a thread to run on its new CPUs, and the pause between two tries.
const RUNS_WITHIN: Duration = Duration::from_secs(10);
const TRY_EVERY: Duration = Duration::from_millis(10);

/// Sets a thread's scheduling. A thread that has slept since its CPUs became a partition still
/// counts to the root domain of its last CPU, and the kernel refuses it a reservation: a wake-up
/// moves it.
pub(crate) fn set_when_it_has_run(root: &Root, pid: u32, tid: u32, attr: &Attr) -> io::Result<()> {
    let begin = Instant::now();
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
            _ if attr.reservation.is_none() || begin.elapsed() >= RUNS_WITHIN => return Err(refused),
            Some(true) => {
                may_have_moved = true;
                thread::sleep(TRY_EVERY);
            }
            Some(false) if may_have_moved => may_have_moved = false,
            Some(false) | None => return Err(refused),
        }
    }
}
