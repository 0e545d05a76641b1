//! CPU time that the host has for its guests' requests now.

use std::time::{Duration, Instant};

use rtvirtio_kernel::steal::StealWatch;
use rtvirtio_kernel::{HostError, Root, process};
use rtvirtio_model::Profile;
use rtvirtio_planner::CpuRoom;
use rtvirtio_spec::{HostSpec, Spec};

use crate::dirs::Dirs;
use crate::error::Result;
use crate::find;
use crate::host::cpus;
use crate::progress::Progress;
use crate::started::StartedVm;

/// Length of the look.
const LOOK: Duration = Duration::from_secs(1);

/// CPUs that are free for a second from now on. What these processes use counts as free.
///
/// # Errors
/// When `/proc/stat` cannot be read, and cancellation.
pub fn free(own: &[u32], progress: &dyn Progress) -> Result<f64> {
    let root = Root::default();
    let watch = StealWatch::start(&root)?;
    let used = || own.iter().map(|pid| used(&root, *pid)).sum::<Result<Duration, HostError>>();
    let (begin, before) = (Instant::now(), used()?);
    progress.pause(LOOK)?;
    let passed = begin.elapsed().as_secs_f64();
    let idle = watch.idle(&root)?.unwrap_or(0.0) * f64::from(cpus());
    Ok(idle + used()?.saturating_sub(before).as_secs_f64() / passed)
}

/// CPU time of a process; none of one that has ended.
fn used(root: &Root, pid: u32) -> Result<Duration, HostError> {
    match process::cpu_time(root, pid) {
        Err(e) if e.is_gone() => Ok(Duration::ZERO),
        time => time,
    }
}

/// CPU time for the guests of a host with these parts, looked at for a second; `None` without any
/// that declare rates, or where none of the devices was measured in a VM. What cannot be read is a
/// warning.
///
/// # Errors
/// Cancellation.
pub fn look<'a>(
    host: &HostSpec,
    parts: impl Iterator<Item = (&'a Spec, &'a Profile)>,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Option<CpuRoom>> {
    let Some(mut room) = CpuRoom::sum(parts, cpus(), 0.0) else { return Ok(None) };
    // VMs that do not run, or are not found, use nothing that is known.
    let own = find::of_host(host.vms(), dirs).map(|vms| {
        let started = vms.iter().filter_map(|vm| StartedVm::find(vm, progress));
        started.flat_map(|vm| vm.processes).map(|process| process.pid).collect::<Vec<u32>>()
    });
    match free(&own.unwrap_or_default(), progress) {
        Ok(free) => room.free = free,
        Err(_) if progress.is_cancelled() => return progress.check_cancelled().map(|()| None),
        Err(e) => {
            progress.warn(&format!("free CPU time is not known: {e:#}"));
            return Ok(None);
        }
    }
    Ok(Some(room))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Quiet;

    #[test]
    fn what_its_own_processes_use_counts_as_free() {
        let all = f64::from(cpus());
        let free = free(&[std::process::id()], &Quiet::default()).unwrap();
        assert!((0.0..=all + 0.1).contains(&free), "{free}");
        // One that has ended uses nothing, and is no error.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        super::free(&[child.id()], &Quiet::default()).unwrap();
    }
}
