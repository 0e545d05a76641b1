//! VMs on this host, resolved once: the cgroup for I/O settings, processes and thread roles for CPU
//! contracts.

pub(crate) mod drives;

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rtvirtio_cpu::is_helper_process;
use rtvirtio_kernel::process::{self, of_thread, serves};
use rtvirtio_kernel::{Cgroups, ProcessId, Root};
use rtvirtio_spec::{HostHandle, LabKind, Reach, Spec, Vm, VmDisk};
use rtvirtio_vmm::libvirt::{AgentState, RunningDomain, guest_device};
use rtvirtio_vmm::threads::{Named, discover};
use rtvirtio_vmm::{AgentAddress, GuestAgent, Qmp, Role, VmHandle};

use crate::dirs::Dirs;
use crate::error::{Context as _, Error, Result, bail};
use crate::inventory::{Inventory, ListedVm};
use crate::managed;
use crate::progress::Progress;
use crate::unreached::unreached;

/// Time limit of a monitor's answer; all its answers together have twice that. It serves one client
/// at a time, and QEMU's main loop may itself have a small budget.
const QMP_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit of a guest agent's answer when a disk is looked for.
const AGENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Reads a spec file of one device, which the user of a command names.
///
/// # Errors
/// As [`crate::named::load_host`], and for a file of several devices.
pub fn load_spec(path: &Path) -> Result<Spec> {
    Ok(crate::named::named_host(path)?.single()?.clone())
}

/// A VM on this host. Its processes are looked up at their first use, so that a step which needs
/// only cgroups asks no monitor, and one which needs only threads needs no block I/O hierarchy.
pub struct HostVm {
    /// Name in the spec, or `pid N`.
    pub name: String,
    /// Socket of the guest agent, where the spec names it.
    agent: Option<PathBuf>,
    /// The disk that its tasks use: inside the guest where there is an agent.
    disk: Option<VmDisk>,
    reach: HostReach,
    handle: OnceCell<VmHandle>,
    /// Domain of libvirt, looked up at its first use.
    running: OnceCell<RunningDomain>,
}

/// Handle by which a VM is found.
enum HostReach {
    /// Handle that a spec or a user gives.
    Named(HostHandle),
    /// Processes of the lab in this cgroup.
    LabProcesses(PathBuf),
    /// A guest of the lab.
    LabGuest { process: ProcessId, qmp: PathBuf, cgroup: PathBuf },
}

impl HostVm {
    fn new(name: &str, reach: HostReach) -> Self {
        let (handle, running) = (OnceCell::new(), OnceCell::new());
        Self { name: name.to_owned(), agent: None, disk: None, reach, handle, running }
    }

    /// A process that is no VM of a spec.
    #[must_use]
    pub fn of_pid(pid: u32) -> Self {
        Self::new(&format!("pid {pid}"), HostReach::Named(HostHandle::Pid(pid)))
    }

    fn of_spec(vm: &Vm) -> Result<Self> {
        let Reach::Existing { host, agent, disk } = &vm.reach else {
            bail!(Argument, "vm {}: it is a lab's VM", vm.name)
        };
        let new = Self::new(&vm.name, HostReach::Named(host.clone()));
        Ok(Self { agent: agent.clone(), disk: disk.clone(), ..new })
    }

    fn of_lab(vm: &ListedVm) -> Self {
        let cgroup = vm.cgroup.clone();
        match &vm.guest {
            None => Self::new(&vm.name, HostReach::LabProcesses(cgroup)),
            Some(guest) => {
                let (process, qmp) = (guest.process.clone(), guest.qmp.clone());
                Self {
                    agent: Some(guest.agent.clone()),
                    disk: Some(VmDisk::Path(guest.disk.clone())),
                    ..Self::new(&vm.name, HostReach::LabGuest { process, qmp, cgroup })
                }
            }
        }
    }

    /// Process ids of the VM; none for the lab's VMs of processes, which come and go.
    ///
    /// # Errors
    /// As [`HostVm::handle`].
    pub(crate) fn pids(&self) -> Result<Vec<u32>> {
        let root = Root::default();
        match &self.reach {
            HostReach::LabProcesses(_) => Ok(Vec::new()),
            HostReach::Named(HostHandle::Pid(pid)) => Ok(vec![*pid]),
            HostReach::LabGuest { process, .. } => Ok(vec![process.pid]),
            HostReach::Named(HostHandle::Cgroup(path)) => {
                Ok(of_cgroup(&root, &Cgroups::detect(&root)?, path)?.pids.into_iter().collect())
            }
            HostReach::Named(HostHandle::Qmp(_)) => {
                Ok(self.handle_under(&root, &|_| {})?.pids.into_iter().collect())
            }
            HostReach::Named(HostHandle::Domain(_)) => Ok(vec![self.domain(&root)?.process.pid]),
            HostReach::Named(HostHandle::Proxmox(id)) => Ok(vec![managed::proxmox(&root, *id)?.pid]),
        }
    }

    /// Processes of the VM, and its threads' roles as far as the monitor names them.
    ///
    /// # Errors
    /// [`Kind::NotRunning`](crate::Kind::NotRunning) when it has ended; a monitor that does not
    /// answer where nothing else leads to the process.
    pub fn handle(&self, progress: &dyn Progress) -> Result<VmHandle> {
        self.handle_under(&Root::default(), &|line| progress.warn(line))
    }

    /// Like [`HostVm::handle`], below this root; `warn` gets a line where roles are less sure.
    pub(crate) fn handle_under(&self, root: &Root, warn: &dyn Fn(&str)) -> Result<VmHandle> {
        if let Some(handle) = self.handle.get() {
            return Ok(handle.clone());
        }
        let handle = match &self.reach {
            HostReach::Named(HostHandle::Pid(pid)) => VmHandle::of_pid(*pid),
            HostReach::Named(HostHandle::Cgroup(path)) | HostReach::LabProcesses(path) => {
                of_cgroup(root, &Cgroups::detect(root)?, path).with_context(|| self.context())?
            }
            HostReach::Named(HostHandle::Qmp(socket)) => {
                of_monitor(root, socket).with_context(|| self.context())?
            }
            HostReach::Named(HostHandle::Domain(_)) => {
                let domain = self.domain(root)?;
                VmHandle { named: self.named(root, &domain)?, ..VmHandle::of_pid(domain.process.pid) }
            }
            HostReach::Named(HostHandle::Proxmox(id)) => {
                let vm = managed::proxmox(root, *id).with_context(|| self.context())?;
                let found = of_monitor(root, &vm.qmp).with_context(|| self.context())?;
                if !found.pids.contains(&vm.pid) {
                    let (pid, monitor) = (vm.pid, vm.qmp.display());
                    bail!(NotRunning, "vm {}: {monitor} is not of process {pid}: `qm start {id}`", self.name);
                }
                found
            }
            // The process id may be another process's by now.
            HostReach::LabGuest { process, .. } if !process.is_alive() => bail!(
                NotRunning,
                "the lab's QEMU of vm {} (process {}) has ended: `rtvirtio-lab down`, then `rtvirtio-lab up` again",
                self.name,
                process.pid
            ),
            HostReach::LabGuest { process, qmp, .. } => match ask_monitor(qmp) {
                Ok(named) => VmHandle { named, ..VmHandle::of_pid(process.pid) },
                Err(e) => {
                    warn(&format!("{}: roles are derived from thread names only: {e}", self.name));
                    VmHandle::of_pid(process.pid)
                }
            },
        };
        Ok(self.handle.get_or_init(|| handle).clone())
    }

    /// Cgroup of the VM in the hierarchy of the block I/O controller.
    ///
    /// # Errors
    /// [`Kind::NotRunning`](crate::Kind::NotRunning) when the VM does not run.
    pub fn io_cgroup(&self, root: &Root, cgroups: &Cgroups) -> Result<PathBuf> {
        let of_pid = |pid: u32| -> Result<PathBuf> {
            let cgroup =
                cgroups.of_pid(root, pid).with_context(|| format!("no process {pid}: is the VM running?"))?;
            Ok(Cgroups::unit_of(&cgroup))
        };
        match &self.reach {
            HostReach::LabProcesses(cgroup) | HostReach::LabGuest { cgroup, .. } => Ok(cgroup.clone()),
            HostReach::Named(HostHandle::Pid(pid)) => of_pid(*pid),
            HostReach::Named(HostHandle::Domain(_)) => of_pid(self.domain(root)?.process.pid),
            HostReach::Named(HostHandle::Proxmox(id)) => {
                managed::proxmox(root, *id).and_then(|vm| of_pid(vm.pid))
            }
            HostReach::Named(HostHandle::Cgroup(path)) => {
                if !root.exists(cgroups.dir(path)?)? {
                    let (name, path, why) = (&self.name, path.display(), missing_cgroup(path));
                    bail!(NotRunning, "vm {name}: cgroup {path} does not exist: {why}");
                }
                Ok(path.clone())
            }
            HostReach::Named(HostHandle::Qmp(_)) => {
                let pids = self.handle_under(root, &|_| {})?.pids;
                of_pid(*pids.first().context("QEMU has no process")?)
            }
        }
        .with_context(|| self.context())
    }

    /// Guest agent of the VM; `None` without one, or while a libvirt domain's is not connected.
    ///
    /// # Errors
    /// As [`HostVm::handle`].
    pub fn agent(&self, root: &Root) -> Result<Option<AgentAddress>> {
        match &self.reach {
            HostReach::Named(HostHandle::Domain(_)) => Ok(self.domain(root)?.agent()),
            HostReach::Named(HostHandle::Proxmox(id)) => {
                let vm = managed::proxmox(root, *id).with_context(|| self.context())?;
                Ok(vm.agent.map(AgentAddress::Socket))
            }
            _ => Ok(self.agent.clone().map(AgentAddress::Socket)),
        }
    }

    /// The device or file that its tasks use: inside the guest where it has an agent, else on the
    /// host. `None` when the spec names none.
    ///
    /// # Errors
    /// As [`HostVm::handle`]; a libvirt domain without such a disk, or a disk that tasks cannot use
    /// from there.
    pub fn disk(&self, root: &Root) -> Result<Option<PathBuf>> {
        self.disk.as_ref().map(|disk| self.disk_at(root, disk)).transpose()
    }

    /// Path of a disk of this VM for its tasks, as [`HostVm::disk`].
    pub fn disk_at(&self, root: &Root, disk: &VmDisk) -> Result<PathBuf> {
        let target = match disk {
            VmDisk::Path(path) => return Ok(path.clone()),
            VmDisk::Target(target) => target,
        };
        let domain = self.domain(root)?;
        let found = || -> Result<PathBuf> {
            let disk = managed::disk(&domain, target)?;
            match domain.agent() {
                None => managed::host_path(&domain, disk),
                Some(agent) => {
                    let mut agent = GuestAgent::reach(&agent, AGENT_TIMEOUT)?;
                    Ok(guest_device(&mut agent, disk)?)
                }
            }
        };
        found().with_context(|| self.context())
    }

    /// Whether the spec names a disk for its tasks.
    #[must_use]
    pub fn names_disk(&self) -> bool {
        self.disk.is_some()
    }

    /// Note for readers of results where the guest agent is disconnected or cannot run tasks.
    pub(crate) fn agent_note(&self, root: &Root) -> Option<String> {
        match &self.reach {
            HostReach::Named(HostHandle::Domain(_)) => {
                let domain = self.domain(root).ok()?;
                if domain.xml.agent == AgentState::Disconnected {
                    return Some(format!(
                        "{}: no guest agent is connected (is qemu-guest-agent running in it?): its tasks run on the host, past \
                         QEMU, and its own settings are neither known nor set",
                        self.name
                    ));
                }
            }
            // The lab's own guests have all that tasks need.
            HostReach::LabGuest { .. } => return None,
            _ => {}
        }
        let agent = self.agent(root).ok()??;
        let lacks = GuestAgent::reach(&agent, AGENT_TIMEOUT).and_then(|mut agent| agent.lacks_for_tasks());
        match lacks {
            Ok(lacks) if lacks.is_empty() => None,
            Ok(lacks) => {
                Some(format!("{}: its tasks cannot run in the guest: {}", self.name, lacks.join("; ")))
            }
            Err(e) => {
                Some(format!("{}: whether its tasks can run in the guest is not known: {e}", self.name))
            }
        }
    }

    /// The libvirt domain of the current start of the VM.
    fn domain(&self, root: &Root) -> Result<RunningDomain> {
        let HostReach::Named(HostHandle::Domain(of)) = &self.reach else {
            bail!(Argument, "vm {} is no domain of libvirt", self.name)
        };
        if let Some(domain) = self.running.get() {
            return Ok(domain.clone());
        }
        let domain = managed::running(root, of).with_context(|| self.context())?;
        Ok(self.running.get_or_init(|| domain).clone())
    }

    /// Roles of a libvirt domain's threads. libvirt has QEMU name them (`debug-threads=on`), so
    /// that the monitor, whose use taints the domain, is asked only where no name shows a vCPU.
    fn named(&self, root: &Root, domain: &RunningDomain) -> Result<Named> {
        let threads = discover(root, &VmHandle::of_pid(domain.process.pid))
            .with_context(|| format!("vm {}: is it still running?", self.name))?;
        if threads.iter().any(|t| matches!(t.role, Role::Vcpu(_))) {
            return Ok(Named::default());
        }
        let asked = Qmp::of_domain(domain, QMP_TIMEOUT).and_then(|mut qmp| Named::ask(&mut qmp));
        asked.with_context(|| self.context())
    }

    /// Process ids that last as long as the VM: `None` for the lab's VMs of processes.
    ///
    /// # Errors
    /// As [`HostVm::handle`].
    pub(crate) fn lasting_pids(&self, progress: &dyn Progress) -> Result<Option<Vec<u32>>> {
        Ok(match &self.reach {
            HostReach::LabProcesses(_) => None,
            // Without its monitor, which may be busy.
            HostReach::Named(HostHandle::Domain(_) | HostHandle::Proxmox(_)) => Some(self.pids()?),
            _ => Some(self.handle(progress)?.pids.into_iter().collect()),
        })
    }

    /// A connection to its monitor, where it has one. For a domain of libvirt this taints the
    /// domain (`custom-monitor`) until it ends.
    ///
    /// # Errors
    /// As [`HostVm::handle`].
    pub fn monitor(&self, root: &Root) -> Result<Option<Qmp>> {
        self.monitor_within(root, 2 * QMP_TIMEOUT)
    }

    /// Like [`HostVm::monitor`]; the connection and all commands together end within `total`.
    fn monitor_within(&self, root: &Root, total: Duration) -> Result<Option<Qmp>> {
        let (begin, timeout) = (Instant::now(), QMP_TIMEOUT.min(total));
        let qmp = match &self.reach {
            HostReach::Named(HostHandle::Domain(_)) => Qmp::of_domain(&self.domain(root)?, timeout),
            HostReach::Named(HostHandle::Proxmox(id)) => {
                let machine = managed::proxmox(root, *id).with_context(|| self.context())?;
                Qmp::connect(&machine.qmp, timeout)
            }
            HostReach::Named(HostHandle::Qmp(qmp)) | HostReach::LabGuest { qmp, .. } => {
                Qmp::connect(qmp, timeout)
            }
            HostReach::Named(HostHandle::Pid(_) | HostHandle::Cgroup(_)) | HostReach::LabProcesses(_) => {
                return Ok(None);
            }
        };
        let left = total.saturating_sub(begin.elapsed());
        Ok(Some(qmp.with_context(|| self.context())?.within(left)))
    }

    fn context(&self) -> String {
        format!("vm {}", self.name)
    }
}

/// The VMs that `target` names: a spec file, a process, or the lab that is up.
///
/// # Errors
/// [`Kind::Argument`](crate::Kind::Argument) when none is called `only`.
pub fn find(target: Option<&str>, only: Option<&str>, dirs: &Dirs) -> Result<Vec<HostVm>> {
    let vms = match target {
        Some(text) if text.parse::<u32>().is_ok() => vec![HostVm::of_pid(text.parse()?)],
        Some(path) => of_host(crate::named::named_host(Path::new(path))?.vms(), dirs)?,
        None => of_lab(dirs)?,
    };
    let Some(only) = only else { return Ok(vms) };
    let names: Vec<String> = vms.iter().map(|v| v.name.clone()).collect();
    let chosen: Vec<HostVm> = vms.into_iter().filter(|v| v.name == only).collect();
    if chosen.is_empty() {
        bail!(Argument, "no VM `{only}`: there is {}", names.join(", "));
    }
    Ok(chosen)
}

/// Kind of VM that the lab starts for these; `None` for VMs that run without a lab.
fn lab_kind(vms: &[Vm]) -> Option<LabKind> {
    vms.iter().find_map(|vm| match vm.reach {
        Reach::Lab(kind) => Some(kind),
        Reach::Existing { .. } => None,
    })
}

/// The VMs of a spec file, in its order.
///
/// # Errors
/// A lab that is not up, or has other VMs.
pub fn of_host(vms: &[Vm], dirs: &Dirs) -> Result<Vec<HostVm>> {
    if lab_kind(vms).is_some() {
        let lab = of_lab(dirs)?;
        if !lab.iter().map(|v| &v.name).eq(vms.iter().map(|v| &v.name)) {
            bail!(
                Argument,
                "the lab that is up has other VMs than this spec: `rtvirtio-lab down`, then `up` with it"
            );
        }
        return Ok(lab);
    }
    vms.iter().map(HostVm::of_spec).collect()
}

/// The VMs of a spec whose lab, if it is a lab's, is this one.
pub(crate) fn of_spec_in(spec: &Spec, lab: Option<&Inventory>) -> Result<Vec<HostVm>> {
    match lab {
        Some(lab) => Ok(lab.vms.iter().map(HostVm::of_lab).collect()),
        None => spec.vms.iter().map(HostVm::of_spec).collect(),
    }
}

/// A VM of a spec by name. The others need not run.
///
/// # Errors
/// When there is no such VM.
pub fn one_of_host(vms: &[Vm], name: &str, dirs: &Dirs) -> Result<HostVm> {
    if lab_kind(vms).is_some() {
        let lab = Inventory::load(&dirs.run).context("the lab is gone")?;
        let vm = lab.vms.iter().find(|vm| vm.name == name);
        return Ok(HostVm::of_lab(vm.with_context(|| format!("the lab that is up has no VM `{name}`"))?));
    }
    let vm = vms.iter().find(|vm| vm.name == name);
    HostVm::of_spec(vm.with_context(|| format!("the spec has no VM `{name}`"))?)
}

fn of_lab(dirs: &Dirs) -> Result<Vec<HostVm>> {
    let lab = Inventory::load(&dirs.run).context("name a spec or a process, or start a lab")?;
    Ok(lab.vms.iter().map(HostVm::of_lab).collect())
}

fn of_cgroup(root: &Root, cgroups: &Cgroups, path: &Path) -> Result<VmHandle> {
    let pids = cgroups.pids(root, path).map_err(|e| {
        let why = if e.is_unsupported() {
            "it is threaded: name the one above it that holds the process, such as machine-qemu-....scope"
        } else {
            missing_cgroup(path)
        };
        Error::from(e).within(format!("cgroup {}: {why}", path.display()))
    })?;
    // A helper, such as the VM's TPM, may outlive it.
    if !pids.is_empty() && pids.iter().all(|pid| is_helper_process(root, *pid)) {
        bail!(NotRunning, "cgroup {}: only helpers of a VM are in it: is the VM running?", path.display());
    }
    Ok(VmHandle { pids: pids.into_iter().collect(), named: Named::default() })
}

/// The remedy for a cgroup that is not there.
fn missing_cgroup(path: &Path) -> &'static str {
    // libvirt's are named `qemu-ID-NAME`, in systemd's units with `\x2d` for `-`.
    let of_libvirt = path.components().any(|c| {
        let name = c.as_os_str().to_string_lossy();
        name.starts_with("machine-qemu") || name.starts_with("qemu-")
    });
    if of_libvirt {
        "libvirt gives it another name at each start of the VM: write domain = \"NAME\" instead of `cgroup`"
    } else {
        "is the VM running?"
    }
}

fn ask_monitor(socket: &Path) -> Result<Named, rtvirtio_vmm::VmmError> {
    Qmp::connect(socket, QMP_TIMEOUT).and_then(|mut qmp| Named::ask(&mut qmp))
}

/// Finds QEMU's process by one of the threads that its monitor names: the process that listens on
/// the socket may be a manager's, which opens it for QEMU. Thread ids of another PID namespace mean
/// other threads here, and the wrong ones must not become real-time: so the process must be the
/// peer of the connection, or have the socket open.
fn of_monitor(root: &Root, socket: &Path) -> Result<VmHandle> {
    const ELSEWHERE: &str =
        "QEMU seems to run in another pid namespace (a container): name the VM by `pid` or `cgroup`";
    let ask = |mut qmp: Qmp| Ok((qmp.listener()?, Named::ask(&mut qmp)?));
    let (listener, named) =
        Qmp::connect(socket, QMP_TIMEOUT).and_then(ask).map_err(|e| unreached(e, socket))?;
    let thread = named.any_thread().context("QEMU names no vCPU")?;
    let pid = of_thread(root, thread)
        .with_context(|| format!("the monitor names thread {thread}, which is not here: {ELSEWHERE}"))?;
    if listener != Some(pid) && !serves(root, pid, socket)? {
        let name = process::name(root, pid).unwrap_or_default();
        bail!(
            NotRunning,
            "the monitor {} names thread {thread}; here that belongs to process {pid} ({name}), which does not serve it: {ELSEWHERE}",
            socket.display()
        );
    }
    Ok(VmHandle { named, ..VmHandle::of_pid(pid) })
}
