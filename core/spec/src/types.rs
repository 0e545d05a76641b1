//! Contents of a validated spec: plain data without impossible values.

use std::path::PathBuf;

use rtvirtio_units::{Bytes, Iops, Nanos, Ratio};
use serde::{Deserialize, Serialize};

use crate::cores::Cores;
use crate::goal::Target;
use crate::memory::Memory;
use crate::network::{Flow, Nic};
use crate::traffic::Traffic;

/// A validated spec file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spec {
    /// Block device that the VMs share.
    pub device: Device,
    /// VMs in file order; names are unique.
    pub vms: Vec<Vm>,
}

/// Shared device: a real one by path, or a twin or file that the lab creates.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// An existing block device, such as `/dev/nvme0n1`.
    Path(PathBuf),
    /// An emulated device that `rtvirtio-lab up` creates.
    Twin {
        /// Name of the built-in service-time profile, such as `qlc-nvme`, or path of a profile's
        /// TOML file.
        profile: String,
        /// Size of the device.
        size: Bytes,
    },
    /// A file that `rtvirtio-lab up` creates on a disk of this machine, and removes again.
    File {
        /// Absolute path, where no file may exist yet.
        path: PathBuf,
        /// Size of the file.
        size: Bytes,
    },
}

impl Device {
    /// Whether a lab creates it: then its content may be overwritten.
    #[must_use]
    pub fn is_made(&self) -> bool {
        !matches!(self, Self::Path(_))
    }
}

/// A VM with its contract and load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Vm {
    /// Unique name: letters, digits, `-`, `_`, `.`; starts with a letter or digit; at most 32
    /// characters.
    pub name: String,
    /// Access to the VM's processes, or the kind of VM that the lab starts.
    pub reach: Reach,
    /// CPU time and priorities of its threads.
    pub cpu: VmCpu,
    /// Kernel that the lab boots for it; standard unless the spec says otherwise, and only with
    /// `lab = "qemu"`.
    pub kernel: Kernel,
    /// Importance of its contract relative to others.
    #[serde(skip_serializing_if = "Criticality::is_default")]
    pub criticality: Criticality,
    /// Limits of its traffic.
    #[serde(skip_serializing_if = "Traffic::is_none")]
    pub traffic: Traffic,
    /// I/O tasks in file order; names are unique within the VM. Never empty.
    pub tasks: Vec<Task>,
    /// Ports on networks, at most one on each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<Nic>,
    /// Flows over these ports, in file order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub flows: Vec<Flow>,
}

/// CPU side of a VM: one contract for all its threads, and their real-time priorities. Empty by
/// default.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct VmCpu {
    /// CPU time of all its threads together; `None` sets no limit.
    pub need: Option<CpuNeed>,
    /// Priorities of its threads; only together with `need`.
    pub priorities: Option<Priorities>,
    /// Range of priorities in which the guest may move its vCPUs; only together with `need`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub urgency: Option<Urgency>,
    /// CPUs of its threads; only together with `need`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<Cores>,
    /// Share of the L3 cache and of the memory bandwidth for its threads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Memory>,
}

/// Range of priorities in which a VM's guest moves its vCPUs by what they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Urgency {
    /// Highest real-time priority, 1 to 97; `None` for that of vCPUs under the contract.
    pub ceiling: Option<u32>,
    /// Priority while nothing urgent runs, 0 for SCHED_OTHER; below the ceiling.
    pub floor: u32,
    /// Limit of CPU time above the floor in each second, 1 ms to 1 s.
    pub budget: Nanos,
    /// Whether its guest reports urgent threads; else the host judges by its own view of them.
    pub reports: bool,
    /// Whether pending interrupts in KVM raise vCPUs.
    pub interrupts: bool,
}

/// Need of a VM for CPU time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CpuNeed {
    /// `budget` on each CPU in every `period`: (Q, P) of the reservations paper, section 3.
    Contract {
        /// Q, at least 1 ms and at most the period.
        budget: Nanos,
        /// P, 1 ms to 1 s.
        period: Nanos,
    },
    /// Rate of requests, each answered within the deadline; the budget is derived from a
    /// measurement.
    Demand {
        /// Rate of requests that the VM answers.
        requests: Iops,
        /// Longest time until the answer.
        deadline: Nanos,
    },
}

/// Real-time priorities of a VM's threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Priorities {
    /// The RT hypervisor paper's section 3.3: I/O threads at FIFO 98, vCPUs at 97, AIO workers
    /// ordinary; memory is to be locked.
    Rt,
}

/// Access to a VM. Exactly one of `lab`, `domain`, `proxmox`, `cgroup`, `pid`, `qmp` is in the
/// file.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reach {
    /// The lab starts the VM.
    Lab(LabKind),
    /// A VM that exists already.
    Existing {
        /// Handle of its host-side processes.
        host: HostHandle,
        /// Socket of its QEMU guest agent; needed for guest knobs and for verifying inside the
        /// guest. For a libvirt domain and a VM of Proxmox VE it is found through the manager.
        agent: Option<PathBuf>,
        /// Disk of its tasks; of several the first task's.
        disk: Option<VmDisk>,
    },
}

/// Kind of VM that the lab starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LabKind {
    /// A QEMU guest with fio inside.
    Qemu,
    /// A host process, fio, in a cgroup of its own: fast, for sweeps.
    Process,
}

/// A Debian kernel that the lab can boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kernel {
    /// Kernel for virtual machines (`linux-image-cloud-amd64`).
    #[default]
    Standard,
    /// Kernel with PREEMPT_RT (`linux-image-rt-amd64`).
    Rt,
}

/// Importance of a VM's contract relative to others: where not all can be kept, lower ones are
/// given up first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Criticality {
    /// Given up before all others.
    Low,
    /// Default of a spec without the key.
    #[default]
    Medium,
    /// Given up after all others.
    High,
}

impl Criticality {
    /// Value of the key in a spec.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }

    /// Priority of its contract for placement by a cluster or a fleet: -100, 0 or 100.
    #[must_use]
    pub fn priority(self) -> i32 {
        match self {
            Self::Low => -100,
            Self::Medium => 0,
            Self::High => 100,
        }
    }

    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Disk of a running VM's tasks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum VmDisk {
    /// A block device or file: inside the guest, or on the host without an agent.
    Path(PathBuf),
    /// Name of a disk in libvirt (`<target dev=...>`), such as `vdb`.
    Target(String),
}

/// A VM managed by libvirt.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct LibvirtDomain {
    /// Name or UUID of the libvirt domain. Its id changes at every start and is not accepted.
    pub domain: String,
    /// URI of the daemon; `None` is [`LibvirtDomain::DEFAULT_URI`].
    pub uri: Option<String>,
}

impl LibvirtDomain {
    /// URI of the system's daemon on this host.
    pub const DEFAULT_URI: &str = "qemu:///system";

    /// URI of the daemon, by default [`LibvirtDomain::DEFAULT_URI`].
    #[must_use]
    pub fn uri(&self) -> &str {
        self.uri.as_deref().unwrap_or(Self::DEFAULT_URI)
    }
}

/// Handle of a running VM's processes.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HostHandle {
    /// A libvirt domain, looked up again at each start.
    Domain(LibvirtDomain),
    /// VMID of Proxmox VE.
    Proxmox(u32),
    /// A cgroup path below the hierarchy's root, such as `/machine.slice/vm0.scope`.
    Cgroup(PathBuf),
    /// Process id of the VMM.
    Pid(u32),
    /// QMP socket of QEMU.
    Qmp(PathBuf),
}

/// A stream of I/O in a VM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Task {
    /// Name, unique within its VM; same form as a VM name.
    pub name: String,
    /// Direction of the requests.
    pub op: Op,
    /// Size of each request: a multiple of 512 B, 512 B to 16 MiB; of a mix the largest.
    pub block: Bytes,
    /// Sizes by share, smallest first, where requests have several; empty where all are of `block`.
    /// Shares are whole percents and sum to 1.
    pub mix: Vec<BlockShare>,
    /// Order of the addresses.
    pub pattern: Pattern,
    /// Declared rate; `None` means as fast as the loop allows.
    pub rate: Option<Iops>,
    /// Limit of requests in flight, 1 to 1024.
    pub depth: u32,
    /// Whether a late request delays the next.
    pub arrival: Arrival,
    /// In which way its requests come in bursts; `None` where they come evenly, or without rest.
    pub burst: Option<Burst>,
    /// Call that makes each write durable before the next; `None` where writes may stay in a cache.
    /// Only for tasks that write, with one request in flight in each of their loops.
    pub sync: Option<SyncKind>,
    /// Latency targets, by rising percentile with latencies that do not fall; empty for a
    /// best-effort task.
    pub targets: Vec<Target>,
}

/// Arrival of a task's requests in bursts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Burst {
    /// A task without a rate works for this long, then rests for as long, in turn.
    Busy(Nanos),
    /// So many requests of a task with a rate come at once, 2 to 1024; its loop is open.
    Requests {
        /// Number of requests that come at once, 2 to 1024.
        requests: u32,
    },
}

/// A size of a mix with its share.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BlockShare {
    /// Size of the requests: a multiple of 512 B, 512 B to 16 MiB.
    pub size: Bytes,
    /// Share of the requests of this size, above 0 and below 1.
    pub share: Ratio,
}

/// Call that makes a write durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SyncKind {
    /// fdatasync(2): data, and the metadata needed to read it back.
    Fdatasync,
    /// fsync(2): data with all metadata of the file.
    Fsync,
}

/// Disk of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TaskDisk {
    /// Index of its device in [`HostSpec::parts`](crate::HostSpec::parts).
    pub part: usize,
    /// Name of the disk in its VM; `None` for the only disk of a VM.
    pub name: Option<String>,
    /// Disk inside the VM; `None` where the file does not say.
    pub disk: Option<VmDisk>,
}

/// Direction of a task's requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// All requests read.
    Read,
    /// All requests write.
    Write,
    /// Both; the share of writes is strictly between 0 and 1.
    Mixed {
        /// Share of requests that are writes.
        write_share: Ratio,
    },
}

/// Order of the addresses of a task's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Uniformly random addresses.
    Random,
    /// Ascending addresses, wrapping at the end.
    Sequential,
}

/// Issue of requests relative to their predecessors (`loop` in the file).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrival {
    /// A request is issued when it is due and its predecessor (at depth 1) is complete; after a
    /// stall the task catches up.
    Closed,
    /// Requests are issued when due, up to `depth` in flight. Needs a rate.
    Open,
}

impl Spec {
    /// VM of this name; `None` without one.
    #[must_use]
    pub fn vm(&self, name: &str) -> Option<&Vm> {
        self.vms.iter().find(|vm| vm.name == name)
    }

    /// Kind of the VMs that the lab starts; `None` when the VMs run already. All VMs of a spec are
    /// of one kind.
    #[must_use]
    pub fn lab_kind(&self) -> Option<LabKind> {
        self.vms.iter().find_map(|vm| match vm.reach {
            Reach::Lab(kind) => Some(kind),
            Reach::Existing { .. } => None,
        })
    }

    /// All tasks with their VMs, in file order.
    pub fn tasks(&self) -> impl Iterator<Item = (&Vm, &Task)> {
        self.vms.iter().flat_map(|vm| vm.tasks.iter().map(move |task| (vm, task)))
    }

    /// Targets of all tasks, in file order: one entry for each target, and one with `None` for a
    /// task without. Forecasts and results have this order.
    pub fn goals(&self) -> impl Iterator<Item = (&Vm, &Task, Option<Target>)> {
        self.tasks().flat_map(|(vm, task)| task.goals().map(move |target| (vm, task, target)))
    }
}

impl Task {
    /// Requests that come at once: 1 where they come evenly. Of a task without a rate its depth
    /// says how many there are.
    #[must_use]
    pub fn at_once(&self) -> u32 {
        match self.burst {
            Some(Burst::Requests { requests }) => requests.max(1),
            Some(Burst::Busy(_)) | None => 1,
        }
    }

    /// Time for which a task without a rate works before it rests for as long; `None` for one
    /// without rest.
    #[must_use]
    pub fn busy_period(&self) -> Option<Nanos> {
        match self.burst {
            Some(Burst::Busy(length)) => Some(length),
            Some(Burst::Requests { .. }) | None => None,
        }
    }

    /// Targets by rising percentile; a single `None` without targets.
    pub fn goals(&self) -> impl Iterator<Item = Option<Target>> + use<'_> {
        let none = self.targets.is_empty().then_some(None);
        self.targets.iter().map(|t| Some(*t)).chain(none)
    }

    /// Target of the shortest latency, which is that of the lowest percentile.
    #[must_use]
    pub fn tightest_target(&self) -> Option<Target> {
        self.targets.first().copied()
    }

    /// Mean size of its requests, in bytes.
    #[must_use]
    pub fn mean_block(&self) -> f64 {
        match self.mix.as_slice() {
            [] => self.block.0 as f64,
            mix => mix.iter().map(|m| m.size.0 as f64 * m.share.0).sum(),
        }
    }
}

impl Vm {
    /// Shortest target latency of its tasks; `None` when all are best effort. A smaller one is more
    /// urgent.
    #[must_use]
    pub fn tightest_target(&self) -> Option<Nanos> {
        self.tasks.iter().filter_map(Task::tightest_target).map(|t| t.latency).min()
    }

    /// Sum of its tasks' declared rates; tasks without one count as 0.
    #[must_use]
    pub fn declared_rate(&self) -> Iops {
        Iops(self.tasks.iter().filter_map(|t| t.rate).map(|r| r.0).sum())
    }
}

impl Op {
    /// Share of requests that are writes, 0 to 1.
    #[must_use]
    pub fn write_share(self) -> f64 {
        match self {
            Op::Read => 0.0,
            Op::Write => 1.0,
            Op::Mixed { write_share } => write_share.0,
        }
    }
}
