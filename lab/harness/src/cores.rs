//! One core for an experiment's guests, and the others for all other threads.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use rtvirtio_apply::Session;
use rtvirtio_cpu::{Backend, choose, probe};
use rtvirtio_kernel::{Cgroups, Root};
use rtvirtio_measure::pm_qos::PmQosGuard;
use rustix::thread::CpuSet;

use rtvirtio_testbed::LabHost;

use crate::BENCH_DIR;
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::scoped_contracts::{ScopedContracts, release};

/// Directory of the contracts' journal, below that of the experiments.
const STATE: &str = "cpu";

/// A cgroup of the CPU controller without limits. Dropping it removes the cgroup.
pub struct FairGroup {
    cgroups: Cgroups,
    path: PathBuf,
}

impl FairGroup {
    /// Makes the group below the root of the hierarchy.
    pub fn make(name: &str) -> anyhow::Result<Self> {
        let cgroups = Cgroups::detect_cpu(&Root::default())?;
        let path = Path::new("/").join(name);
        cgroups.create(&Root::default(), &path)?;
        Ok(Self { cgroups, path })
    }

    /// Moves a process with all its threads into the group.
    pub fn attach(&self, pid: u32) -> anyhow::Result<()> {
        Ok(self.cgroups.attach(&Root::default(), &self.path, pid)?)
    }
}

impl Drop for FairGroup {
    fn drop(&mut self) {
        if let Err(e) = self.cgroups.remove(&Root::default(), &self.path) {
            eprintln!("rtvirtio: {e}");
        }
    }
}

/// Binds all threads of a process to these CPUs; later threads inherit them.
pub fn bind(pid: u32, cpus: &[u32]) -> anyhow::Result<()> {
    let set = set_of(cpus);
    // A thread that starts meanwhile may have inherited the CPUs of a thread not bound yet.
    loop {
        let tids = rtvirtio_kernel::task::tids(&Root::default(), pid)?;
        for tid in &tids {
            let thread = i32::try_from(*tid).ok().and_then(rustix::process::Pid::from_raw);
            match rustix::thread::sched_setaffinity(thread, &set) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(e) => return Err(e).with_context(|| format!("thread {tid} cannot be bound to {cpus:?}")),
            }
        }
        if rtvirtio_kernel::task::tids(&Root::default(), pid)? == tids {
            return Ok(());
        }
    }
}

/// Binds the calling thread to one CPU.
pub fn bind_this_thread(cpu: u32) -> anyhow::Result<()> {
    rustix::thread::sched_setaffinity(None, &set_of(&[cpu])).with_context(|| format!("CPU {cpu}"))
}

fn set_of(cpus: &[u32]) -> CpuSet {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu as usize));
    set
}

/// The last online CPU, for the guests, and the other CPUs.
///
/// # Errors
/// With fewer than two CPUs.
pub fn core_and_others() -> anyhow::Result<(u32, Vec<u32>)> {
    let online = Root::default().read(Path::new("/sys/devices/system/cpu/online"))?;
    let mut cpus: Vec<u32> =
        rtvirtio_kernel::text::cpu_list(&online).unwrap_or_default().into_iter().collect();
    match (cpus.pop(), cpus.is_empty()) {
        (Some(core), false) => Ok((core, cpus)),
        _ => bail!("two CPUs are needed: one for the guests, another one for their clients"),
    }
}

/// Keeps idle CPUs awake, as real-time hosts are set up; warns where that is not possible.
pub fn keep_awake(progress: &dyn Progress) -> Option<PmQosGuard> {
    PmQosGuard::hold()
        .inspect_err(|e| progress.warn(&format!("the CPUs may sleep when they are idle, and wake late: {e}")))
        .ok()
}

/// Whether idle CPUs sleep, as text.
#[must_use]
pub fn idle_text(awake: bool) -> &'static str {
    if awake { "CPUs kept awake" } else { "idle CPUs sleep" }
}

/// Contracts of a backend that gives a group of threads a budget on one CPU. Contracts that a
/// killed run left are reverted.
///
/// # Errors
/// When the kernel has no such backend, or a contract cannot be reverted.
pub fn on_one_core<'a>(labs: &LabHost, progress: &'a dyn Progress) -> anyhow::Result<ScopedContracts<'a>> {
    // A deadline thread may not be bound to one CPU, and a cap on ordinary threads counts all CPUs
    // together.
    with_backend(&[Backend::Hcbs, Backend::RtGroup], labs, progress)
}

/// Contracts of the first of these backends that the kernel has, with a journal of their own.
pub fn with_backend<'a>(
    fits: &[Backend],
    labs: &LabHost,
    progress: &'a dyn Progress,
) -> anyhow::Result<ScopedContracts<'a>> {
    let session = Session::open(labs.dirs.run.join(BENCH_DIR).join(STATE))?;
    // Reverted first: the probe counts the contracts of other programs.
    release(&session)?;
    let probe = probe(&Root::default())?;
    let Some(backend) = fits.iter().copied().find(|b| choose(&probe, Some(*b), false).is_some()) else {
        let missing = probe.missing.iter().filter(|(b, _)| fits.contains(b));
        let why: Vec<String> = missing.map(|(b, why)| format!("{b}: {why}")).collect();
        bail!("this kernel cannot hold the threads of a VM on one CPU: {}", why.join("; "));
    };
    Ok(ScopedContracts::new(session, probe, backend, progress))
}
