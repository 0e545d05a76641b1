//! Process VMs on a real block device: a cgroup and a part of the device for each.
//!
//! The device's data is only read. Cgroups are created, named after the creating process, and on v2
//! the `io` controller is enabled below the root; both are undone on drop, and after a crash by
//! [`remove_leftovers`].

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_apply::{Binding, VmBinding};
use rtvirtio_kernel::holders::describe_unseen;
use rtvirtio_kernel::process::Process;
use rtvirtio_kernel::{BlockDevice, Cgroups, Claim, ClaimError, HostError, Root, Stack, task};
use rtvirtio_measure::VmKind;
use rtvirtio_measure::fio::Region;
use rtvirtio_measure::workload::{Place, VmLoad};
use rtvirtio_model::Elevator;
use rtvirtio_spec::Spec;
use rtvirtio_units::Bytes;
use rtvirtio_workflow::Kind;

use crate::load::vm_name;
use crate::rig::{Rig, RigError};

/// Alignment of the VMs' parts of the device, in bytes.
const ALIGNMENT: u64 = 1 << 20;
/// Smallest part of the device for one VM.
const SMALLEST_PART: Bytes = Bytes(16 << 20);
/// Timeout for a leftover process to end.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

/// Errors of creating process VMs.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessVmsError {
    /// The device is in use; a sweep needs one of its own.
    #[error("a sweep needs a device of its own: {0}")]
    Claim(#[from] ClaimError),
    /// The device is too small.
    #[error("device {}: {size} is too small for {vms} VMs: each needs {SMALLEST_PART}", path.display())]
    TooSmall {
        /// Node of the disk.
        path: PathBuf,
        /// Size of the disk.
        size: Bytes,
        /// Number of VMs asked for.
        vms: usize,
    },
    /// This process has created process VMs already.
    #[error("this process has process VMs already, in the cgroup {}", .0.display())]
    AlreadyThere(PathBuf),
    /// A task that would overwrite the device's data.
    #[error("task {vm}/{task} writes, and the device's data may only be read")]
    Writes {
        /// Name of the task's VM.
        vm: String,
        task: String,
    },
    /// A process in a cgroup to be removed cannot be ended.
    #[error("process {pid}: {source}")]
    Process {
        /// Process id in the list of the cgroup.
        pid: u32,
        /// Error of the system call.
        source: io::Error,
    },
    /// A kernel file cannot be read or written.
    #[error(transparent)]
    Host(#[from] HostError),
}

/// Cgroup of one process's VMs: `/rtvirtio-learn-PID-START`, with the suffix `-io` where `io` was
/// not enabled below the hierarchy's root before. The name holds all that its removal needs.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    pid: u32,
    /// Start time of the process, in 1/100 s since boot: ids are reused.
    start: u64,
    /// Whether `io` is to be disabled again below the hierarchy's root (v2).
    enables_io: bool,
}

impl Group {
    const PREFIX: &str = "rtvirtio-learn-";
    const ENABLES_IO: &str = "-io";

    fn parse(name: &str) -> Option<Self> {
        let rest = name.strip_prefix(Self::PREFIX)?;
        let (ids, enables_io) = match rest.strip_suffix(Self::ENABLES_IO) {
            Some(ids) => (ids, true),
            None => (rest, false),
        };
        let (pid, start) = ids.split_once('-')?;
        Some(Self { pid: pid.parse().ok()?, start: start.parse().ok()?, enables_io })
    }

    fn path(&self) -> PathBuf {
        let suffix = if self.enables_io { Self::ENABLES_IO } else { "" };
        PathBuf::from(format!("/{}{}-{}{suffix}", Self::PREFIX, self.pid, self.start))
    }

    /// Whether the process that created the cgroup still runs.
    fn is_in_use(&self, root: &Root) -> Result<bool, HostError> {
        match task::stat(root, self.pid, self.pid) {
            Ok(stat) => Ok(stat.start == self.start && !stat.ended),
            Err(e) if e.is_gone() => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Ends the processes in the cgroups, removes the cgroups, and disables the controller again. A
    /// removal by another process at the same time is no error.
    fn remove(&self, root: &Root, cgroups: &Cgroups) -> Result<(), ProcessVmsError> {
        let path = self.path();
        let dir = cgroups.dir(&path)?;
        stop_all(root, cgroups, &path)?;
        for name in unless_gone(root.list(&dir))?.unwrap_or_default() {
            if root.at(dir.join(&name)).is_dir() {
                unless_gone(cgroups.remove(root, &path.join(name)))?;
            }
        }
        unless_gone(cgroups.remove(root, &path))?;
        if self.enables_io {
            // Refused (EBUSY) when another group below uses the controller by now: then it stays
            // enabled.
            let _ = root.write(control_file(cgroups)?, "-io");
        }
        Ok(())
    }
}

/// `None` when the process or cgroup is gone.
fn unless_gone<T>(done: Result<T, HostError>) -> Result<Option<T>, HostError> {
    match done {
        Ok(it) => Ok(Some(it)),
        Err(e) if e.is_gone() => Ok(None),
        Err(e) => Err(e),
    }
}

/// File with the controllers of the groups below the hierarchy's root (v2).
fn control_file(cgroups: &Cgroups) -> Result<PathBuf, HostError> {
    Ok(cgroups.dir(Path::new("/"))?.join("cgroup.subtree_control"))
}

/// Ends the processes that a killed one left in its cgroup.
fn stop_all(root: &Root, cgroups: &Cgroups, cgroup: &Path) -> Result<(), ProcessVmsError> {
    let pids = || unless_gone(cgroups.pids(root, cgroup)).map(Option::unwrap_or_default);
    for pid in pids()? {
        let failed = |source| ProcessVmsError::Process { pid, source };
        let Some(process) = Process::open(pid).map_err(failed)? else { continue };
        // The process was in the list after the pidfd was opened, so the pidfd is not of a reused
        // id.
        if pids()?.contains(&pid) {
            // A process that does not end keeps the cgroup busy, and its removal fails.
            process.stop(STOP_PATIENCE).map_err(failed)?;
        }
    }
    Ok(())
}

/// Removes the cgroups of process VMs whose process has ended, and returns their paths.
pub fn remove_leftovers(root: &Root) -> Result<Vec<PathBuf>, ProcessVmsError> {
    let cgroups = Cgroups::detect(root)?;
    let mut removed = Vec::new();
    for name in root.list(cgroups.dir(Path::new("/"))?)? {
        let Some(group) = Group::parse(&name) else { continue };
        if !group.is_in_use(root)? {
            group.remove(root, &cgroups)?;
            removed.push(group.path());
        }
    }
    Ok(removed)
}

/// Process VMs named `vm0`, `vm1`, ... on one block device.
#[derive(Debug)]
pub struct ProcessVms {
    root: Root,
    cgroups: Cgroups,
    stack: Stack,
    group: Group,
    /// Each VM's region of the device.
    parts: Vec<Region>,
    unseen: Option<String>,
}

impl ProcessVms {
    /// Creates VMs on the disk at `path`; a partition stands for its disk. Leftovers of processes
    /// that have ended are removed first.
    ///
    /// # Errors
    /// When the disk is in use or too small, or the kernel refuses a cgroup; then everything
    /// created is removed again.
    pub fn new(path: &Path, vms: usize) -> Result<Self, ProcessVmsError> {
        let root = Root::default();
        let device = BlockDevice::find(&root, path)?;
        // Nothing is written, but other users of the disk would be slowed, and would disturb the
        // runs.
        let claim = Claim::take(&node(&device), &[])?;
        let unseen = describe_unseen(claim.unseen());
        drop(claim);
        let mut made = Self::make(root, device, vms)?;
        made.unseen = unseen;
        Ok(made)
    }

    /// Checks whether [`ProcessVms::new`] could succeed now; creates nothing.
    ///
    /// # Errors
    /// When the disk is in use or too small.
    pub fn check(path: &Path, vms: usize) -> Result<(), ProcessVmsError> {
        let root = Root::default();
        let device = BlockDevice::find(&root, path)?;
        drop(Claim::take(&node(&device), &[])?);
        parts(&node(&device), Bytes(device.size(&root)?), vms).map(drop)
    }

    fn make(root: Root, device: BlockDevice, vms: usize) -> Result<Self, ProcessVmsError> {
        let parts = parts(&node(&device), Bytes(device.size(&root)?), vms)?;
        let cgroups = Cgroups::detect(&root)?;
        remove_leftovers(&root)?;
        let pid = std::process::id();
        let start = task::stat(&root, pid, pid)?.start;
        let enables_io = |enables_io| Group { pid, start, enables_io };
        for taken in [false, true].map(|io| enables_io(io).path()) {
            if root.exists(cgroups.dir(&taken)?)? {
                return Err(ProcessVmsError::AlreadyThere(taken));
            }
        }
        let group = enables_io(!cgroups.io_to_enable(&root, &enables_io(false).path())?.is_empty());
        // From here on an error drops `vms`, which removes what was created.
        let stack = Stack::resolve(&root, device)?;
        let vms = Self { root, cgroups, stack, group, parts, unseen: None };
        vms.make_cgroups()?;
        Ok(vms)
    }

    fn make_cgroups(&self) -> Result<(), ProcessVmsError> {
        for vm in 0..self.parts.len() {
            self.cgroups.create(&self.root, &self.cgroup(vm))?;
        }
        // On v2 a cgroup has I/O files only when its parents enable the controller.
        for file in self.cgroups.io_to_enable(&self.root, &self.cgroup(0))? {
            self.root.write(&file, "+io")?;
        }
        Ok(())
    }

    fn cgroup(&self, vm: usize) -> PathBuf {
        self.group.path().join(vm_name(vm))
    }

    /// The device, with the disks that schedule its requests.
    #[must_use]
    pub fn stack(&self) -> &Stack {
        &self.stack
    }

    /// Processes of which it is not known whether they use the disk, in words, for a warning;
    /// `None` without any.
    #[must_use]
    pub fn unseen(&self) -> Option<&str> {
        self.unseen.as_deref()
    }

    /// Elevators that the disk offers and the models know.
    pub fn elevators(&self) -> Result<Vec<Elevator>, HostError> {
        let offered = self.stack.offered(&self.root)?;
        let known = [Elevator::None, Elevator::MqDeadline, Elevator::Kyber, Elevator::Bfq];
        Ok(known.into_iter().filter(|e| offered.iter().any(|name| name == e.name())).collect())
    }

    /// Removes the cgroups; also done on drop, where errors cannot be returned.
    pub fn remove(self) -> Result<(), ProcessVmsError> {
        self.group.remove(&self.root, &self.cgroups)
    }
}

impl From<ProcessVmsError> for rtvirtio_workflow::Error {
    fn from(e: ProcessVmsError) -> Self {
        let kind = if matches!(e, ProcessVmsError::Claim(_)) { Kind::Guarded } else { Kind::System };
        Self::from_source(kind, e)
    }
}

impl Drop for ProcessVms {
    fn drop(&mut self) {
        // Remaining cgroups are leftovers, which the next start removes.
        let _ = self.group.remove(&self.root, &self.cgroups);
    }
}

impl Rig for ProcessVms {
    fn binding(&self) -> Result<Binding, RigError> {
        let vm = |i: usize| {
            let cgroup = Some(self.cgroup(i));
            (vm_name(i), VmBinding { cgroup, agent: None, guest_disks: Vec::new() })
        };
        Ok(Binding {
            stack: self.stack.clone(),
            cgroups: Some(self.cgroups.clone()),
            vms: (0..self.parts.len()).map(vm).collect(),
        })
    }

    fn kind(&self) -> VmKind {
        VmKind::Process
    }

    fn vms(&self) -> usize {
        self.parts.len()
    }

    fn loads(&self, spec: &Spec) -> Result<Vec<VmLoad>, RigError> {
        if let Some((vm, task)) = spec.tasks().find(|(_, task)| task.op.write_share() > 0.0) {
            let (vm, task) = (vm.name.clone(), task.name.clone());
            return Err(RigError::Vms(Box::new(ProcessVmsError::Writes { vm, task })));
        }
        let mut loads = Vec::new();
        for (i, (vm, part)) in spec.vms.iter().zip(&self.parts).enumerate() {
            let place = Place::Host {
                cgroup_procs: vec![self.cgroups.dir(&self.cgroup(i))?.join("cgroup.procs")],
                target: node(&self.stack.device),
                region: Some(*part),
            };
            loads.push(VmLoad::new(vm.clone(), place));
        }
        Ok(loads)
    }
}

/// Node of the disk. sysfs writes the slash of a name such as `cciss/c0d0` as `!`.
fn node(device: &BlockDevice) -> PathBuf {
    Path::new("/dev").join(device.name.replace('!', "/"))
}

/// Equal regions of a disk.
fn parts(path: &Path, size: Bytes, vms: usize) -> Result<Vec<Region>, ProcessVmsError> {
    let part = size.0 / vms.max(1) as u64 / ALIGNMENT * ALIGNMENT;
    if part < SMALLEST_PART.0 {
        return Err(ProcessVmsError::TooSmall { path: path.to_owned(), size, vms });
    }
    Ok((0..vms as u64).map(|i| Region { offset: Bytes(i * part), size: Bytes(part) }).collect())
}

#[cfg(test)]
mod tests;
