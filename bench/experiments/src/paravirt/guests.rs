//! Two guests on one core: one that reports its urgent tasks, and its neighbour.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rtvirtio_cpu::{Backend, Contract, Order, UrgencyRange};
use rtvirtio_kernel::sched::{self, Attr};
use rtvirtio_measure::HostFacts;
use rtvirtio_spec::Kernel;
use rtvirtio_testbed::qemu::{GuestDisk, QemuConfig, QemuGuest, UrgencyDevice};
use rtvirtio_testbed::{AccelChoice, LabHost, choose_accel};
use rtvirtio_units::Nanos;
use rtvirtio_urgency::Config;
use rtvirtio_urgency_host::{
    Ended, History, KvmInterrupts, ServedVm, Server, UrgencyError, VmStatus, find_page, serve,
};
use rtvirtio_vmm::agent::Process;
use rtvirtio_vmm::threads::Named;
use rtvirtio_vmm::{Qmp, VmHandle};
use rtvirtio_workflow::domain::urgent::UrgentSignals;
use rtvirtio_workflow::scoped_contracts::{ScopedContracts, VmContract};
use rtvirtio_workflow::{Kind, Progress};

use super::Setup;
use super::chain::DiskTestBed;
use crate::guest;
use rtvirtio_harness::cores::{FairGroup, bind, core_and_others};

/// Programs in the guest: the reporter, and the experiment's load.
const PROGRAMS: [&str; 2] = ["rtvirtio-guest", "rtvirtio-guestload"];
/// Time limit of an exchange with QEMU's monitor.
const QMP_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait until other programs' contracts leave room.
const ADMISSION: Duration = Duration::from_secs(120);
/// Longest wait until a guest that reports is followed.
const FOLLOW_TIMEOUT: Duration = Duration::from_secs(60);

/// Most recorded moments of a vCPU: some minutes of them.
const MOMENTS: usize = 1 << 20;

/// Two guests of one vCPU on the last CPU; this process is bound to the others.
pub struct Guests<'c> {
    contracts: &'c ScopedContracts<'c>,
    contract: Contract,
    budget: Nanos,
    names: [String; 2],
    /// A, and its neighbour B.
    pub vms: [QemuGuest; 2],
    /// Group of B, and of A where its contract allows one. Dropped after the guests.
    groups: Vec<FairGroup>,
    /// CPU of both guests.
    pub core: u32,
    /// First of the other CPUs.
    pub other: u32,
    /// The host, as a result file describes it.
    pub facts: HostFacts,
    /// Whether KVM's interrupts raise A's vCPU when its page is followed next.
    pub kvm_interrupts: bool,
    following: Option<Following>,
    /// Records of the last time that A was followed, with disks.
    history: Option<History>,
    _server: Server,
    disks: Option<DiskTestBed>,
}

/// Result of following, the VM's last status, and its history.
type Followed = (Ended, VmStatus, Option<History>);

/// A thread that follows A's page.
struct Following {
    stop: Arc<AtomicBool>,
    latest: Arc<Mutex<Option<VmStatus>>>,
    /// Least weight at the floor so far.
    least_weight: Arc<Mutex<Option<f64>>>,
    thread: JoinHandle<Result<Followed, UrgencyError>>,
    /// Policy of the thread.
    priority: String,
    /// Contract of A's vCPU.
    contract: String,
    _signals: Option<UrgentSignals>,
}

impl<'c> Guests<'c> {
    /// Boots both, with disks or without, and with the port of the host's loopback interface that
    /// is to lead to A.
    pub fn boot(
        contracts: &'c ScopedContracts<'c>,
        (contract, budget): (Contract, Nanos),
        (disks, port): (Option<DiskTestBed>, Option<u16>),
        dir: &Path,
        labs: &LabHost,
        progress: &dyn Progress,
    ) -> anyhow::Result<Self> {
        let (core, others) = core_and_others()?;
        // Guests inherit the CPUs of this process, and boot faster on all of them.
        bind(std::process::id(), &[&others[..], &[core]].concat())?;
        let programs = PROGRAMS.map(|name| -> anyhow::Result<(String, Vec<u8>)> {
            let path = guest::program(name)?;
            let bytes = std::fs::read(&path).with_context(|| path.display().to_string())?;
            Ok((format!("/usr/bin/{name}"), bytes))
        });
        let programs = programs.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        let group = |name: &str| {
            FairGroup::make(&format!("{}fair-{name}", rtvirtio_kernel::ProcessId::prefix("bench")))
        };
        // A real-time thread without a budget of its VM's own can only be in the root group.
        let in_root = contracts.backend() == Backend::Throttle;
        let groups = if in_root { vec![group("b")?] } else { vec![group("b")?, group("a")?] };
        let image = labs.guest_image(Kernel::Standard, progress)?;
        let accel = choose_accel(AccelChoice::Auto, &image, progress)?;
        progress.step("booting two guests");
        let names = ["a", "b"].map(|n| format!("bench-{}-{n}", std::process::id()));
        let socket = dir.join("urgency");
        let mut server = Server::bind(&socket)?;
        // QEMU waits for the server while it starts.
        let server = std::thread::spawn(move || server.serve_one(&|| false).map(|_| server));
        let guest_disks = disks.as_ref().map_or([GuestDisk::None, GuestDisk::None], DiskTestBed::disks);
        let config = |i: usize| QemuConfig {
            accel,
            port: port.filter(|_| i == 0),
            urgency: (i == 0).then(|| UrgencyDevice::Doorbell { socket: socket.clone() }),
            ..QemuConfig::new(&names[i], image.clone(), guest_disks[i].clone(), dir)
        };
        let mut vms = [QemuGuest::start(&config(0))?, QemuGuest::start(&config(1))?];
        let server = server.join().map_err(|_| anyhow::anyhow!("the doorbell's server panicked"))??;
        for (group, vm) in groups.iter().zip(vms.iter().rev()) {
            group.attach(vm.handle().process.pid)?;
        }
        for vm in &mut vms {
            for (path, bytes) in &programs {
                vm.write_file(path, bytes)?;
                guest::run_command(vm, &["chmod", "755", path])?;
            }
            bind(vm.handle().process.pid, &[core])?;
        }
        // Read before this process is bound: the number of CPUs is that of its affinity.
        let facts = guest::facts(&mut vms[0], accel, format!("two guests of 1 vCPU on CPU {core}"))?;
        bind(std::process::id(), &others)?;
        disks.as_ref().map_or(Ok(()), |disks| disks.bind(&others))?;
        let other = others.first().copied().context("one CPU only")?;
        Ok(Self {
            contracts,
            contract,
            budget,
            names,
            vms,
            groups,
            core,
            other,
            facts,
            kvm_interrupts: false,
            following: None,
            history: None,
            _server: server,
            disks,
        })
    }

    /// Applies a set-up to A; removes the previous one.
    pub fn set(&mut self, setup: Setup, progress: &dyn Progress) -> anyhow::Result<()> {
        self.unfollow()?;
        self.contracts.release()?;
        if setup == Setup::None {
            return Ok(());
        }
        let pid = self.vms[0].handle().process.pid;
        let named = Named::ask(&mut self.vms[0].qmp()?)?;
        let range = UrgencyRange {
            ceiling: None,
            floor: 0,
            budget: self.budget,
            reports: true,
            interrupts: self.kvm_interrupts,
        };
        let contract = [VmContract {
            vm: &self.names[0],
            handle: VmHandle { named, ..VmHandle::of_pid(pid) },
            vcpus_only: false,
            contract: self.contract,
            order: Order::Rt,
            used: Vec::new(),
            urgency: (setup == Setup::Urgency).then_some(range),
        }];
        // Other programs may have contracts for some time.
        let begin = Instant::now();
        while let Err(e) = self.contracts.set(&contract) {
            if e.kind() != Kind::Infeasible || begin.elapsed() > ADMISSION {
                return Err(e.into());
            }
            progress.pause(Duration::from_secs(1))?;
        }
        if setup == Setup::Urgency {
            self.follow(pid)?;
        }
        Ok(())
    }

    fn follow(&mut self, pid: u32) -> anyhow::Result<()> {
        let mut levels = self.contracts.levels()?;
        let attr = levels.movable().first().context("no vCPU may be moved")?.contract;
        let contract = attr.priority;
        let config = Config { task_budget: self.budget, ..Config::new(contract, 0, contract) };
        let (name, socket) = (self.names[0].clone(), self.vms[0].handle().qmp_socket());
        let monitor = move || Ok(Qmp::connect(&socket, QMP_TIMEOUT)?);
        let page = find_page(&name, pid, &mut monitor()?)?;
        let mut vm = ServedVm::new(&name, pid, config, page, Box::new(monitor))?;
        let mut signals = None;
        if let Some(disks) = &self.disks {
            let (of_disk, eventfd) = disks.signals(pid)?;
            vm = vm.with_completions(eventfd).with_history(MOMENTS);
            signals = Some(of_disk);
        }
        if self.kvm_interrupts {
            vm = vm.with_interrupts(KvmInterrupts::start()?);
        }
        let mut vms = [vm];
        let (stop, latest) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(None)));
        let least_weight = Arc::new(Mutex::new(None));
        let (stopped, reported, least) = (stop.clone(), latest.clone(), least_weight.clone());
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            // Same priority as in `keep`.
            let _ = ready.send(sched::set(0, &Attr::fifo(99)).and_then(|()| sched::get(0)));
            let mut report = |all: &[VmStatus]| {
                let status = all.first().cloned();
                let mut least = least.lock().unwrap_or_else(PoisonError::into_inner);
                *least =
                    [*least, status.as_ref().and_then(|s| s.weight)].into_iter().flatten().reduce(f64::min);
                *reported.lock().unwrap_or_else(PoisonError::into_inner) = status;
            };
            let ended = serve(&mut vms, &mut levels, &stopped, &mut report)?;
            let history = vms[0].take_history();
            Ok((ended, vms[0].status(), history))
        });
        let set = is_ready.recv();
        let priority = set.as_ref().ok().and_then(|set| set.as_ref().ok()).map(Attr::to_string);
        self.following = Some(Following {
            stop,
            latest,
            least_weight,
            thread,
            priority: priority.unwrap_or_default(),
            contract: attr.to_string(),
            _signals: signals,
        });
        set.context("the thread that follows the page ended")?.context("priority 99")?;
        Ok(())
    }

    /// Policy of the thread that follows A's page, as the kernel reports it.
    pub fn follower(&self) -> anyhow::Result<&str> {
        Ok(&self.following.as_ref().context("A's page is not followed")?.priority)
    }

    /// Policy of A's vCPU by its contract.
    pub fn contract_of_vcpu(&self) -> anyhow::Result<&str> {
        Ok(&self.following.as_ref().context("A's page is not followed")?.contract)
    }

    pub fn disks(&self) -> anyhow::Result<&DiskTestBed> {
        self.disks.as_ref().context("guests without disks")
    }

    /// Records of A's vCPU from the last time that it was followed; `None` without disks.
    pub fn take_history(&mut self) -> Option<History> {
        self.history.take()
    }

    /// Stops following; returns A's last status, and whether the thread had ended by itself.
    pub fn unfollow(&mut self) -> anyhow::Result<Option<(VmStatus, bool)>> {
        let Some(following) = self.following.take() else { return Ok(None) };
        let by_itself = following.thread.is_finished();
        following.stop.store(true, Ordering::Relaxed);
        match following.thread.join() {
            Ok(ended) => {
                let (_, status, history) = ended?;
                self.history = history;
                Ok(Some((status, by_itself)))
            }
            Err(_) => bail!("the thread that follows the page panicked"),
        }
    }

    /// Status of A, at most a second old.
    pub fn status(&self) -> Option<VmStatus> {
        let following = self.following.as_ref()?;
        following.latest.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Least weight of A at its floor, as a share of its own, sampled each second.
    pub fn least_weight(&self) -> Option<f64> {
        *self.following.as_ref()?.least_weight.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts A's reporter, and waits until it is followed.
    pub fn start_reporter(&mut self, progress: &dyn Progress) -> anyhow::Result<Process> {
        let reporter = self.vms[0].spawn(&["rtvirtio-guest", "bpf"])?;
        let begin = Instant::now();
        while self.status().is_none_or(|s| s.mode != "guest_memory" || s.refused.is_some()) {
            progress.check_cancelled()?;
            if let Some(out) = self.vms[0].poll(reporter)? {
                bail!("rtvirtio-guest in the guest: {}", String::from_utf8_lossy(&out.stderr).trim());
            }
            if begin.elapsed() > FOLLOW_TIMEOUT {
                bail!("the guest's reports are not followed: {:?}", self.status());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(reporter)
    }

    /// Ends all programs of these names in a guest.
    pub fn kill(&mut self, vm: usize, names: &[&str]) -> anyhow::Result<()> {
        for name in names {
            // A program that has ended by itself is no error.
            self.vms[vm].exec(&["killall", "-9", name], FOLLOW_TIMEOUT)?;
        }
        Ok(())
    }

    /// Stops both guests and releases their contracts.
    pub fn stop(mut self) -> anyhow::Result<()> {
        self.unfollow()?;
        self.contracts.release()?;
        for vm in self.vms {
            vm.stop()?;
        }
        drop(self.groups);
        Ok(())
    }
}
