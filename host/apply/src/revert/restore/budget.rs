//! Real-time budgets of cgroup v1. The kernel refuses to put one back for a moment after threads or
//! groups have ended.

use std::path::Path;
use std::thread;
use std::time::Duration;

use rtvirtio_kernel::sched::Attr;
use rustix::io::Errno;

use super::fault;
use crate::machine::{Fault, Machine, TASKS};
use crate::outcome::Fate;
use crate::target::Target;

/// File of a v1 cgroup with its real-time budget, in us per period.
pub(super) const FILE: &str = "cpu.rt_runtime_us";

const PAUSE: Duration = Duration::from_millis(10);
/// The budget of a removed cgroup counts against its ancestors until its last reference is dropped
/// (`EINVAL`; `cpu_cgroup_css_released()`), some milliseconds on an idle machine. Maximum number of
/// pauses for it.
const PAUSES: u32 = 30;

/// Writes a budget, and retries while ended threads or cgroups make the kernel refuse it.
pub(super) fn write(target: &Target, text: &str, machine: &Machine<'_>) -> Result<(), Fate> {
    let mut pauses = 0;
    loop {
        let refused = match machine.write(target, text) {
            Ok(()) => return Ok(()),
            Err(refused) => refused,
        };
        let code = match &refused {
            Fault::Io(e) => e.raw_os_error().map(Errno::from_raw_os_error),
            Fault::Gone(_) => None,
        };
        let mut doing = format!("writing `{text}`");
        let mut may_pass = matches!(code, Some(Errno::BUSY | Errno::INVAL));
        if code == Some(Errno::BUSY) {
            let dir = target.path.parent().unwrap_or(Path::new("/"));
            if let Some(tid) = demote_exiting(dir, machine) {
                doing += &format!(" while thread {tid} in it is real-time");
                may_pass = false;
            }
        }
        if !may_pass || pauses == PAUSES {
            return Err(fault(target, refused, &doing));
        }
        pauses += 1;
        thread::sleep(PAUSE);
    }
}

/// Makes the real-time threads of the group that are about to end ordinary. Such a thread keeps the
/// budget from being taken away (`EBUSY`), and needs that budget to give its memory back
/// (`do_exit()` calls `exit_mm()` before `cgroup_exit()`): 1 GiB under 1 % of a CPU took 9 to 20 s,
/// and 0.3 s as an ordinary thread (Linux 6.18). Returns a real-time thread that is not about to
/// end.
fn demote_exiting(dir: &Path, machine: &Machine<'_>) -> Option<u32> {
    let host = machine.host();
    let tasks = host.read(&dir.join(TASKS)).ok()?;
    tasks.split_whitespace().filter_map(|tid| tid.parse().ok()).find(|tid| {
        let is_real_time = host.scheduling(*tid, *tid).is_ok_and(|now| now.policy.is_real_time());
        // Every thread has a directory of its own number.
        let lives = is_real_time && host.thread_start(*tid, *tid).is_ok();
        if is_real_time && !lives {
            // A thread that is gone by now counts as ended too.
            let _ = host.set_scheduling(*tid, *tid, &Attr::other(0));
        }
        lives
    })
}
