//! Contracts of an experiment's guests: applied, journaled and put back as a user's are.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use rtvirtio_apply::{Machine, NoGuests, OnConflict, Session, Silent, append};
use rtvirtio_cpu::{Ask, Backend, Contract, Order, Probe, admit, choose, probe, settings};
use rtvirtio_host::{Cgroups, Root};
use rtvirtio_vmm::{Role, Thread};

use super::BENCH_DIR;
use crate::args::Global;
use crate::ui::Ui;

/// Directory of the journal, below that of the experiments.
const STATE: &str = "cpu";

/// What one guest is to have.
pub struct Wanted<'a> {
    /// Its name.
    pub vm: &'a str,
    /// Its threads.
    pub threads: Vec<Thread>,
    /// What they get together.
    pub contract: Contract,
    /// Their order.
    pub order: Order,
}

impl Wanted<'_> {
    /// Leaves all threads out that are no vCPUs.
    pub fn vcpus_only(mut self) -> Self {
        self.threads.retain(|t| matches!(t.role, Role::Vcpu(_)));
        self
    }
}

/// What holds contracts, and what was set last. Dropping it puts everything back.
pub struct Contracts {
    session: Session,
    probe: Probe,
    backend: Backend,
}

impl Contracts {
    /// Finds a mechanism that gives a group of threads a budget on one CPU. What an earlier run that was killed has left is put back.
    pub fn open(global: &Global) -> anyhow::Result<Self> {
        let probe = probe(&Root::default())?;
        // A deadline thread may not be bound to one CPU, and a cap on ordinary threads counts all CPUs together.
        let fits = [Backend::Hcbs, Backend::RtGroup];
        let Some(backend) = fits.into_iter().find(|b| choose(&probe, Some(*b), false).is_some()) else {
            let missing = probe.missing.iter().filter(|(b, _)| fits.contains(b));
            let why: Vec<String> = missing.map(|(b, why)| format!("{b}: {why}")).collect();
            bail!("this kernel cannot give the threads of a VM a budget on one CPU: {}", why.join("; "));
        };
        let session = Session::open(global.run_dir.join(BENCH_DIR).join(STATE))?;
        let this = Self { session, probe, backend };
        this.release()?;
        Ok(this)
    }

    /// The mechanism.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// Sets these in place of what was set before.
    pub fn hold(&self, all: &[Wanted<'_>]) -> anyhow::Result<()> {
        self.release()?;
        let found = choose(&self.probe, Some(self.backend), false).context("the mechanism is gone")?;
        admit(&found.grant, &all.iter().map(|w| (w.vm.to_owned(), w.contract)).collect::<Vec<_>>())?;
        let root = Root::default();
        let mut writes = Vec::new();
        for w in all {
            let ask = Ask { vm: w.vm, threads: &w.threads, contract: w.contract, order: w.order, used: &[] };
            append(&mut writes, settings(&root, &self.probe, self.backend, &ask)?.writes);
        }
        self.session.apply(&writes, &Machine::new(&root, &NoGuests), &mut Silent)?;
        Ok(())
    }

    /// Puts everything back.
    pub fn release(&self) -> anyhow::Result<()> {
        let root = Root::default();
        let reverted =
            self.session.revert(OnConflict::Report, &Machine::new(&root, &NoGuests), &mut Silent)?;
        match reverted {
            Some(r) if !r.done => bail!("contracts were not put back: {}", r.summary()),
            _ => Ok(()),
        }
    }
}

impl Drop for Contracts {
    fn drop(&mut self) {
        if let Err(e) = self.release() {
            eprintln!("rtvirtio: {e:#}");
        }
    }
}

/// A group of the CPU controller without limits, removed when this is dropped.
pub struct FairGroup {
    cgroups: Cgroups,
    path: PathBuf,
}

impl FairGroup {
    /// Makes it.
    pub fn make(name: &str) -> anyhow::Result<Self> {
        let cgroups = Cgroups::detect_cpu(&Root::default())?;
        let path = Path::new("/").join(name);
        cgroups.create(&Root::default(), &path)?;
        Ok(Self { cgroups, path })
    }

    /// Moves a process with all its threads.
    pub fn take(&self, pid: u32) -> anyhow::Result<()> {
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

/// Binds all threads of a process to these CPUs; those that it starts later inherit.
pub fn bind(pid: u32, cpus: &[u32]) -> anyhow::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    for cpu in cpus {
        set.set(*cpu as usize);
    }
    // A thread that appears between two looks was started by one that may not be bound yet.
    loop {
        let tids = rtvirtio_host::task::tids(&Root::default(), pid)?;
        for tid in &tids {
            let thread = i32::try_from(*tid).ok().and_then(rustix::process::Pid::from_raw);
            match rustix::thread::sched_setaffinity(thread, &set) {
                Ok(()) | Err(rustix::io::Errno::SRCH) => {}
                Err(e) => return Err(e).with_context(|| format!("thread {tid} cannot be bound to {cpus:?}")),
            }
        }
        if rtvirtio_host::task::tids(&Root::default(), pid)? == tids {
            return Ok(());
        }
    }
}

/// The last CPU that is online, for the guests, and the others, for everything else.
pub fn core_and_others() -> anyhow::Result<(u32, Vec<u32>)> {
    let online = Root::default().read(Path::new("/sys/devices/system/cpu/online"))?;
    let mut cpus: Vec<u32> = rtvirtio_host::text::cpu_list(&online).unwrap_or_default().into_iter().collect();
    match (cpus.pop(), cpus.is_empty()) {
        (Some(core), false) => Ok((core, cpus)),
        _ => bail!("two CPUs are needed: one for the guests, another one for their clients"),
    }
}

/// Waits, unless Ctrl-C ends it.
pub fn pause(length: std::time::Duration, ui: &Ui) -> anyhow::Result<()> {
    let begin = std::time::Instant::now();
    while let Some(left) = length.checked_sub(begin.elapsed()).filter(|left| !left.is_zero()) {
        ui.check_cancelled()?;
        std::thread::sleep(left.min(std::time::Duration::from_millis(50)));
    }
    Ok(())
}
