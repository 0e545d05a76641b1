//! CPU time that the host has for its guests' requests now.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use rtvirtio_kernel::steal::{StealWatch, cpus_online};
use rtvirtio_kernel::{HostError, Root, process};
use rtvirtio_model::Profile;
use rtvirtio_planner::CpuRoom;
use rtvirtio_spec::{Device, HostSpec, Spec};

use crate::dirs::Dirs;
use crate::error::Result;
use crate::find;
use crate::progress::Progress;
use crate::started::StartedVm;

/// Time over which the CPUs are watched.
const WINDOW: Duration = Duration::from_secs(1);

/// CPUs of the host, and how many of them are free for a second from now on. What these processes
/// use counts as free.
///
/// # Errors
/// When `/proc/stat` cannot be read, and cancellation.
pub fn free(own: &[u32], progress: &dyn Progress) -> Result<(u32, f64)> {
    let root = Root::default();
    let cpus = cpus_online(&root)?;
    let watch = StealWatch::start(&root)?;
    let used = || own.iter().map(|pid| used(&root, *pid)).collect::<Result<Vec<Duration>, HostError>>();
    let (begin, before) = (Instant::now(), used()?);
    progress.pause(WINDOW)?;
    let passed = begin.elapsed().as_secs_f64();
    let idle = watch.idle(&root)?.unwrap_or(0.0) * f64::from(cpus);
    let more: Duration = used()?.iter().zip(&before).map(|(now, then)| now.saturating_sub(*then)).sum();
    Ok((cpus, idle + more.as_secs_f64() / passed))
}

/// CPU time of a process; none of one that has ended.
fn used(root: &Root, pid: u32) -> Result<Duration, HostError> {
    match process::cpu_time(root, pid) {
        Err(e) if e.is_gone() => Ok(Duration::ZERO),
        time => time,
    }
}

/// CPU time for the guests of a host with these parts, measured for a second; `None` without any
/// that declare rates, where none of the devices was measured in a VM, and for a device or a
/// measurement of another machine. What cannot be read is a warning.
///
/// # Errors
/// Cancellation.
pub fn measure<'a>(
    host: &HostSpec,
    parts: impl Iterator<Item = (&'a Spec, &'a Profile)>,
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Result<Option<CpuRoom>> {
    let parts: Vec<_> = parts.collect();
    let is_elsewhere = |spec: &Spec| matches!(&spec.device, Device::Path(path) if !path.exists());
    if parts.iter().any(|(spec, _)| is_elsewhere(spec)) {
        return Ok(None);
    }
    let Some(room) = CpuRoom::sum(parts.iter().copied(), 0, 0.0) else { return Ok(None) };
    // Of VMs with a contract the time is reserved: it is not free for others.
    let vms = host.vms().iter().filter(|vm| vm.cpu.need.is_none()).map(|vm| vm.name.as_str());
    let vms: BTreeSet<&str> = vms.collect();
    let (mut own, mut unseen) = (Vec::new(), Vec::new());
    match find::of_host(host.vms(), dirs) {
        Ok(found) => {
            for vm in found.iter().filter(|vm| vms.contains(vm.name.as_str())) {
                match StartedVm::find(vm, progress) {
                    Some(of) => own.extend(of.processes.iter().map(|process| process.pid)),
                    None => unseen.push(vm.name.clone()),
                }
            }
        }
        Err(_) => unseen.extend(vms.iter().map(|name| (*name).to_owned())),
    }
    let (cpus, free) = match free(&own, progress) {
        Ok(found) => found,
        Err(_) if progress.is_cancelled() => return progress.check_cancelled().map(|()| None),
        Err(e) => {
            progress.warn(&format!("free CPU time is not known: {e:#}"));
            return Ok(None);
        }
    };
    // Measured on a host with other CPUs.
    if parts.iter().any(|(_, profile)| profile.guest.is_some() && profile.cpus > cpus) {
        return Ok(None);
    }
    let room = CpuRoom { cpus, free, ..room };
    if room.is_short() && !unseen.is_empty() {
        let names = unseen.join(", ");
        progress.step(&format!("{names}: not seen to run; CPU time of such a VM counts as other programs'"));
    }
    Ok(Some(room))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Quiet;

    #[test]
    fn what_its_own_processes_use_counts_as_free() {
        let (all, free) = free(&[std::process::id()], &Quiet::default()).unwrap();
        assert!((0.0..=f64::from(all) + 0.1).contains(&free), "{free} of {all}");
        // One that has ended uses nothing, and is no error.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        super::free(&[child.id()], &Quiet::default()).unwrap();
    }
}
