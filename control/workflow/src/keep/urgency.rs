//! Follows the VMs whose guests report their urgency, while their contracts are kept.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SendError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use rtvirtio_apply::Levels;
use rtvirtio_cpu::UrgencyRange;
use rtvirtio_kernel::Root;
use rtvirtio_kernel::sched::{self, Attr};
use rtvirtio_kernel::trusted::DATA_LIMIT;
use rtvirtio_urgency::Config;
use rtvirtio_urgency_host::{
    Ended, KvmInterrupts, ServedVm, UrgencyError, VmStatus, find_page, serve_newcomers,
};
use rtvirtio_vmm::{Qmp, VmHandle};
use serde::{Deserialize, Serialize};

use crate::contracts::InForce;
use crate::dirs::{Dirs, write_state};
use crate::domain::urgent::UrgentSignals;
use crate::error::{Context as _, Result, bail};
use crate::find::HostVm;
use crate::progress::Progress;

use super::signals::Signals;
use super::warnings::{About, Warnings};

/// File of [`UrgencyStatus`] in the run directory, written each second.
pub const STATUS_FILE: &str = "urgency.json";

/// State of the VMs whose guests report their urgency.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct UrgencyStatus {
    /// The process that follows them.
    pub pid: u32,
    /// Start time of that process, in clock ticks since boot.
    pub start_time: u64,
    /// State of each VM, as [`VmStatus`] is serialised.
    pub vms: Vec<serde_json::Value>,
}

impl UrgencyStatus {
    /// Reads the last state; `None` when the process that wrote it has ended.
    pub fn read(dirs: &Dirs) -> Result<Option<Self>> {
        let path = dirs.run.join(STATUS_FILE);
        let text = match rtvirtio_kernel::trusted::read_config(&path, DATA_LIMIT) {
            Ok(text) => text,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
        };
        let status: Self = serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
        let process = rtvirtio_kernel::ProcessId { pid: status.pid, start_time: status.start_time };
        Ok(process.is_alive().then_some(status))
    }

    /// State of a VM by name; `None` for one that is not followed.
    #[must_use]
    pub fn of_vm(&self, name: &str) -> Option<&serde_json::Value> {
        self.vms.iter().find(|vm| vm["vm"].as_str() == Some(name))
    }
}

/// A VM that is to be followed.
pub(super) struct Wanted {
    pub of: InForce,
    pub vm: HostVm,
    pub handle: VmHandle,
}

/// Result of offering a VM its page.
struct Offered {
    vm: String,
    warnings: Vec<String>,
    signals: Option<UrgentSignals>,
}

/// A thread that follows pages, until it is stopped or dropped.
pub(super) struct Follower {
    stop: Arc<AtomicBool>,
    latest: Arc<Mutex<Option<Vec<VmStatus>>>>,
    thread: Option<JoinHandle<std::result::Result<Ended, UrgencyError>>>,
    /// To that thread: VMs whose page was offered.
    newcomers: Sender<ServedVm>,
    offering: Sender<Offered>,
    offered: Receiver<Offered>,
    signals: Signals,
    warnings: Warnings,
    /// Last reported reason for which the status could not be written.
    unwritten: Option<String>,
}

impl Follower {
    /// Starts a thread that follows the pages of no VM yet.
    pub fn start(dirs: &Dirs, progress: &dyn Progress) -> Result<Self> {
        let mut levels = Levels::open(&dirs.state)?;
        let (stop, latest) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
        let (stopped, reported) = (stop.clone(), latest.clone());
        let (ready, is_ready) = channel();
        let (newcomers, more) = channel();
        let thread = std::thread::Builder::new().name("urgency".to_owned()).spawn(move || {
            // Below a vCPU it could not take back what that vCPU was given.
            let high = sched::set(0, &Attr::fifo(99));
            let _ = ready.send(high.err());
            let mut report = |all: &[VmStatus]| {
                *reported.lock().unwrap_or_else(PoisonError::into_inner) = Some(all.to_vec());
            };
            serve_newcomers(&more, &mut levels, &stopped, &mut report)
        });
        let thread = thread.context("a thread that follows urgency pages")?;
        if let Ok(Some(e)) = is_ready.recv() {
            progress.warn(&format!(
                "urgency is followed by an ordinary thread, late while the host is busy: {e}; run it in the root cgroup, or give its cgroup a \
                 real-time budget"
            ));
        }
        let (offering, offered) = channel();
        Ok(Self {
            stop,
            latest,
            thread: Some(thread),
            newcomers,
            offering,
            offered,
            signals: Signals::start()?,
            warnings: Warnings::default(),
            unwritten: None,
        })
    }

    /// Offers a VM its page, in a thread of its own that waits for its monitor, and follows it from
    /// then on. A VM whose page cannot be found has its contract's priority, and a warning.
    pub fn follow(&mut self, one: Wanted, dirs: &Dirs) -> Result<()> {
        let Some(range) = one.of.urgency else { return Ok(()) };
        let (dirs, newcomers, offering) = (dirs.clone(), self.newcomers.clone(), self.offering.clone());
        let run = move || {
            let mut out = Offered { vm: one.of.vm.clone(), warnings: Vec::new(), signals: None };
            let tracer = match offer(one, &range, &dirs) {
                Ok((vm, pid)) => {
                    let vm = match UrgentSignals::new(pid, &dirs) {
                        Ok((of_vm, eventfd)) => {
                            out.signals = Some(of_vm);
                            vm.with_completions(eventfd)
                        }
                        Err(e) => {
                            out.warnings.push(format!("urgent requests do not raise {}: {e:#}", out.vm));
                            vm
                        }
                    };
                    let (tracer, started) = channel();
                    let vm = if range.interrupts { vm.with_interrupts_of(started) } else { vm };
                    match newcomers.send(vm) {
                        Ok(()) => range.interrupts.then_some(tracer),
                        // Following has ended meanwhile.
                        Err(SendError(vm)) => {
                            vm.close();
                            None
                        }
                    }
                }
                Err(e) => {
                    out.warnings.push(format!("the urgency of {} is not followed: {e:#}", out.vm));
                    None
                }
            };
            let name = out.vm.clone();
            let _ = offering.send(out);
            // Last: a vCPU that computes at its contract's priority can delay it without end.
            if let Some(warning) = tracer.and_then(|tracer| trace_interrupts(&tracer, &name)) {
                let _ = offering.send(Offered { vm: name, warnings: vec![warning], signals: None });
            }
        };
        let thread = std::thread::Builder::new().name("offer".to_owned()).spawn(run);
        thread.map(drop).context("a thread that offers a VM its urgency page")
    }

    /// Writes the status file, and warns of new failures. To be called periodically. Returns the
    /// reason for which following has ended; `None` while it goes on, and from the second call on.
    ///
    /// # Errors
    /// When following has ended with an error.
    pub fn poll(&mut self, dirs: &Dirs, progress: &dyn Progress) -> Result<Option<Ended>> {
        for offered in self.offered.try_iter() {
            offered.warnings.iter().for_each(|line| progress.warn(line));
            if let Some(signals) = offered.signals {
                self.signals.add(offered.vm, signals);
            }
        }
        let latest = self.latest.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(latest) = latest {
            for vm in &latest {
                match &vm.refused {
                    Some(why) => self.warn((&vm.vm, About::Vm), why, progress),
                    None => self.warnings.forget((&vm.vm, About::Vm)),
                }
            }
            // A full disk ends no VM's urgency.
            match write_status(&latest, dirs) {
                Ok(()) => self.unwritten = None,
                Err(e) => {
                    // What stands there is old by now.
                    let _ = std::fs::remove_file(dirs.run.join(STATUS_FILE));
                    let why = format!("the state of the VMs is not shown: {e:#}");
                    if self.unwritten.as_ref() != Some(&why) {
                        progress.warn(&why);
                        self.unwritten = Some(why);
                    }
                }
            }
        }
        for (vm, why) in self.signals.failures() {
            self.warn((&vm, About::Completions), &why, progress);
        }
        if self.thread.as_ref().is_some_and(JoinHandle::is_finished) {
            return self.finish();
        }
        Ok(None)
    }

    fn warn(&mut self, about: (&str, About), why: &str, progress: &dyn Progress) {
        if self.warnings.is_new(about, why, Instant::now()) {
            progress.warn(&format!("urgency of {}: {why}", about.0));
        }
    }

    /// Stops the thread; all vCPUs then have their contract's priority, unless the contracts were
    /// put back. Returns the reason for its end; `None` where that was returned before.
    ///
    /// # Errors
    /// When following has ended with an error.
    pub fn finish(&mut self) -> Result<Option<Ended>> {
        self.stop.store(true, Ordering::Relaxed);
        match self.thread.take().map(JoinHandle::join) {
            None => Ok(None),
            Some(Ok(Ok(ended))) => Ok(Some(ended)),
            Some(Ok(Err(e))) => Err(e.into()),
            Some(Err(_)) => bail!(System, "the thread that follows urgency pages panicked"),
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        // An error was reported, or another one is.
        let _ = self.finish();
    }
}

fn write_status(latest: &[VmStatus], dirs: &Dirs) -> Result<()> {
    let this = rtvirtio_kernel::ProcessId::find(std::process::id())?.context("this process")?;
    let vms = latest.iter().map(serde_json::to_value).collect::<std::result::Result<_, _>>()?;
    let status = UrgencyStatus { pid: this.pid, start_time: this.start_time, vms };
    write_state(&dirs.run, STATUS_FILE, &serde_json::to_vec_pretty(&status)?)
}

/// Starts the tracer of KVM's interrupts and sends it to the VM's follower; returns a warning where
/// some or all interrupts are not seen. A kernel that does not say when KVM interrupts a vCPU is no
/// reason not to follow what the guest says.
fn trace_interrupts(follower: &Sender<KvmInterrupts>, vm: &str) -> Option<String> {
    match KvmInterrupts::start() {
        Ok(tracer) => {
            // Where following has ended meanwhile, the tracer ends here.
            let _ = follower.send(tracer);
            let unseen = KvmInterrupts::unseen();
            (!unseen.is_empty()).then(|| {
                format!(
                    "some interrupts do not raise {vm}: the processor delivers them past KVM ({} is on)",
                    unseen.join(", ")
                )
            })
        }
        Err(e) => Some(format!("interrupts do not raise {vm}: {e}")),
    }
}

/// Finds a VM's page and offers it; with QEMU's process.
fn offer(one: Wanted, range: &UrgencyRange, dirs: &Dirs) -> Result<(ServedVm, u32)> {
    let Wanted { of, vm, handle } = one;
    let levels = Levels::open(&dirs.state)?;
    // Only vCPUs are movable. Which is which is asked later: of a domain whose threads have
    // names it was not asked yet.
    let movable = levels.movable().iter().find(|m| handle.pids.contains(&m.pid));
    let movable = movable.context("the journal has no levels for its vCPUs: revert, and apply again")?;
    let pid = movable.pid;
    let contract = movable.contract.priority;
    let ceiling = range.ceiling.unwrap_or(contract);
    let config = Config { task_budget: range.budget, ..Config::new(ceiling, range.floor, contract) };
    let name = of.vm.clone();
    let monitor = move || -> std::result::Result<Qmp, UrgencyError> {
        let failed = |why: String| UrgencyError::NoMonitor { vm: name.clone(), why };
        let qmp = vm.monitor(&Root::default()).map_err(|e| failed(format!("{e:#}")))?;
        qmp.ok_or_else(|| failed("name it by `qmp`, `domain` or `proxmox`".to_owned()))
    };
    let served = if range.reports {
        let page = find_page(&of.vm, pid, &mut monitor()?)?;
        ServedVm::new(&of.vm, pid, config, page, Box::new(monitor))?
    } else {
        ServedVm::without_reports(&of.vm, pid, config, Box::new(monitor))?
    };
    Ok((served, pid))
}
