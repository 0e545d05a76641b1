//! What a spec says, after validation: plain data, no way to hold an impossible value by accident.

use std::path::PathBuf;

use rtvirtio_units::{Bytes, Iops, Nanos, Percentile, Ratio};
use serde::{Deserialize, Serialize};

use crate::network::{Flow, Nic};
use crate::traffic::Traffic;

/// A validated spec file.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Spec {
    /// The one block device that the VMs share.
    pub device: Device,
    /// The VMs in file order; names are unique.
    pub vms: Vec<Vm>,
}

/// The shared device: a real one by path, or a twin or file that the lab makes.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Device {
    /// A block device that exists, such as `/dev/nvme0n1`.
    Path(PathBuf),
    /// An emulated device that `rtvirtio-lab up` makes.
    Twin {
        /// Name of the built-in service-time profile, such as `qlc-nvme`, or path of a profile TOML
        /// file.
        profile: String,
        /// Size of the device.
        size: Bytes,
    },
    /// A file that `rtvirtio-lab up` makes on a disk of this machine, and removes again.
    File {
        /// Absolute path; nothing may be there yet.
        path: PathBuf,
        /// Size of the file.
        size: Bytes,
    },
}

impl Device {
    /// Whether a lab makes it: then its content may be overwritten.
    #[must_use]
    pub fn is_made(&self) -> bool {
        !matches!(self, Self::Path(_))
    }
}

/// One VM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Vm {
    /// Unique name: letters, digits, `-`, `_`, `.`; starts with a letter or digit; at most 32
    /// characters.
    pub name: String,
    /// How rtvirtio reaches it.
    pub reach: Reach,
    /// The CPU time that its threads get.
    pub cpu: VmCpu,
    /// The kernel that the lab boots for it; standard unless the spec says otherwise, and only with
    /// `lab = "qemu"`.
    pub kernel: Kernel,
    /// How much its contract matters beside those of others.
    #[serde(skip_serializing_if = "Criticality::is_default")]
    pub criticality: Criticality,
    /// Limits on what it moves.
    #[serde(skip_serializing_if = "Traffic::is_none")]
    pub traffic: Traffic,
    /// Its I/O tasks in file order; names are unique within the VM. Never empty.
    pub tasks: Vec<Task>,
    /// Its ports on networks, at most one on each.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nics: Vec<Nic>,
    /// What it sends and receives there, in file order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub flows: Vec<Flow>,
}

/// The CPU side of a VM: one contract for all its threads, and their real-time order. Nothing by
/// default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct VmCpu {
    /// What all its threads get together; `None` leaves them as they are.
    pub need: Option<CpuNeed>,
    /// Order of its threads; only together with `need`.
    pub priorities: Option<Priorities>,
    /// The range in which the guest may move its vCPUs; only together with `need`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub urgency: Option<Urgency>,
}

/// The range in which a VM's guest moves its vCPUs by what they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Urgency {
    /// Highest real-time priority, 1 to 97; `None` for the one that the contract gives vCPUs.
    pub ceiling: Option<u32>,
    /// Priority while nothing urgent runs, 0 for an ordinary thread; below the ceiling.
    pub floor: u32,
    /// CPU time above the floor in each second, 1 ms to 1 s.
    pub budget: Nanos,
    /// Whether its guest reports what is urgent; else the host goes by what it sees of the threads.
    pub reports: bool,
    /// Whether interrupts that KVM makes pending raise vCPUs.
    pub interrupts: bool,
}

/// CPU time that a VM needs.
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
    /// So many requests a second, each answered within the deadline; the budget is found from what
    /// was measured.
    Demand {
        /// Requests that the VM answers.
        requests: Iops,
        /// Time that each may take.
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

/// How a VM is reached. Exactly one of `lab`, `domain`, `proxmox`, `cgroup`, `pid`, `qmp` stands in
/// the file.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reach {
    /// The lab starts it.
    Lab(LabKind),
    /// An existing VM.
    Existing {
        /// What identifies its host-side processes.
        host: HostHandle,
        /// Socket of its QEMU guest agent; needed for guest knobs and for verifying inside the
        /// guest. A libvirt domain and a VM of Proxmox VE lead to their own.
        agent: Option<PathBuf>,
        /// What its tasks use.
        disk: Option<VmDisk>,
    },
}

/// What the lab starts for a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LabKind {
    /// A QEMU guest with fio inside.
    Qemu,
    /// fio in a cgroup of its own: the fast stand-in for sweeps.
    Process,
}

/// A kernel of Debian's that the lab can boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kernel {
    /// The one for virtual machines (`linux-image-cloud-amd64`).
    #[default]
    Standard,
    /// The one with PREEMPT_RT (`linux-image-rt-amd64`).
    Rt,
}

/// How much a VM's contract matters beside those of others: where not all can be held, lower ones
/// give way first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Criticality {
    /// Gives way to all others.
    Low,
    /// Where the spec says nothing.
    #[default]
    Medium,
    /// Gives way to none.
    High,
}

impl Criticality {
    /// The spec's word for it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }

    /// The priority of its contract where a cluster or a fleet decides what is placed first.
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

/// The disk that the tasks of a running VM use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum VmDisk {
    /// A block device or file: inside the guest, or on the host without an agent.
    Path(PathBuf),
    /// The name that libvirt gives a disk of the domain (`<target dev=...>`), such as `vdb`.
    Target(String),
}

/// A domain of libvirt.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct LibvirtDomain {
    /// Its name or UUID. Its id changes at every start and does not count.
    pub domain: String,
    /// The daemon to ask; `None` is [`LibvirtDomain::DEFAULT_URI`].
    pub uri: Option<String>,
}

impl LibvirtDomain {
    /// The system's daemon on this host.
    pub const DEFAULT_URI: &str = "qemu:///system";

    /// The daemon to ask.
    #[must_use]
    pub fn uri(&self) -> &str {
        self.uri.as_deref().unwrap_or(Self::DEFAULT_URI)
    }
}

/// What leads to the processes of a running VM.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum HostHandle {
    /// A domain of libvirt, found again at each start.
    Domain(LibvirtDomain),
    /// The number of a VM of Proxmox VE.
    Proxmox(u32),
    /// A cgroup path below the hierarchy's root, such as `/machine.slice/vm0.scope`.
    Cgroup(PathBuf),
    /// The process id of the VMM.
    Pid(u32),
    /// A QMP socket of QEMU.
    Qmp(PathBuf),
}

/// One stream of I/O in a VM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Task {
    /// Name, unique within its VM; same form as a VM name.
    pub name: String,
    /// Direction of the requests.
    pub op: Op,
    /// Size of each request: a multiple of 512 B, 512 B to 16 MiB. Of a mix the largest.
    pub block: Bytes,
    /// The sizes by share, smallest first, where requests are of several; empty where all are of
    /// `block`. Shares are whole percents and sum to 1.
    pub mix: Vec<BlockShare>,
    /// Order of the addresses.
    pub pattern: Pattern,
    /// Declared rate; `None` means as fast as the loop allows.
    pub rate: Option<Iops>,
    /// Most requests in flight at once, 1 to 1024.
    pub depth: u32,
    /// Whether a late request delays the next.
    pub arrival: Arrival,
    /// A task without a rate works for this long, then rests for as long, in turn; `None` means
    /// without rest.
    pub burst: Option<Nanos>,
    /// What makes each write durable before the next; `None` where writes may stay in a cache. Only
    /// of tasks that write, with one request in flight in each of their loops.
    pub sync: Option<SyncKind>,
    /// What the task must get, by rising percentile with latencies that do not fall; empty for a
    /// best-effort task.
    pub targets: Vec<Target>,
}

/// One size of a mix.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct BlockShare {
    /// Size of the requests: a multiple of 512 B, 512 B to 16 MiB.
    pub size: Bytes,
    /// Share of the requests that have it, above 0 and below 1.
    pub share: Ratio,
}

/// The call that makes a write durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SyncKind {
    /// fdatasync(2): the data, and what is needed to find it.
    Fdatasync,
    /// fsync(2): the data with all of the file's attributes.
    Fsync,
}

/// The disk that a task uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TaskDisk {
    /// Position of its device in [`HostSpec::parts`](crate::HostSpec::parts).
    pub part: usize,
    /// Name of the disk in its VM; `None` for the only disk of a VM.
    pub name: Option<String>,
    /// What it is; `None` where the file does not say.
    pub disk: Option<VmDisk>,
}

/// Direction of a task's requests.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Op {
    /// Reads only.
    Read,
    /// Writes only.
    Write,
    /// Both; the value is the share of writes, strictly between 0 and 1.
    Mixed {
        /// Share of requests that are writes.
        write_share: Ratio,
    },
}

/// Order of the addresses of a task's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Uniformly random.
    Random,
    /// Ascending, wrapping round.
    Sequential,
}

/// Whether requests wait for their predecessors (`loop` in the file).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Arrival {
    /// A request is issued when its time has come and its predecessor (at depth 1) is complete;
    /// after a stall the task catches up.
    Closed,
    /// Requests are issued at their time whatever happens, up to `depth` in flight. Needs a rate.
    Open,
}

/// What a task must get: `percentile <= latency`, together with its declared rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Target {
    /// Which percentile of completion latency, counted from the intended start.
    pub percentile: Percentile,
    /// Its upper limit.
    pub latency: Nanos,
}

impl Spec {
    /// The VM of this name.
    #[must_use]
    pub fn vm(&self, name: &str) -> Option<&Vm> {
        self.vms.iter().find(|vm| vm.name == name)
    }

    /// What the lab starts for this spec; `None` when its VMs run already. All VMs of a spec are of
    /// one kind.
    #[must_use]
    pub fn lab_kind(&self) -> Option<LabKind> {
        self.vms.iter().find_map(|vm| match vm.reach {
            Reach::Lab(kind) => Some(kind),
            Reach::Existing { .. } => None,
        })
    }

    /// Every task with its VM, in file order.
    pub fn tasks(&self) -> impl Iterator<Item = (&Vm, &Task)> {
        self.vms.iter().flat_map(|vm| vm.tasks.iter().map(move |task| (vm, task)))
    }

    /// What is asked of every task, in file order: a task with several targets stands once for
    /// each, one without a target once. Forecasts and results have this order.
    pub fn goals(&self) -> impl Iterator<Item = (&Vm, &Task, Option<Target>)> {
        self.tasks().flat_map(|(vm, task)| task.goals().map(move |target| (vm, task, target)))
    }
}

impl Task {
    /// Its targets by rising percentile; `None` once where it has none.
    pub fn goals(&self) -> impl Iterator<Item = Option<Target>> + use<'_> {
        let none = self.targets.is_empty().then_some(None);
        self.targets.iter().map(|t| Some(*t)).chain(none)
    }

    /// The target of the shortest latency, which is that of the lowest percentile.
    #[must_use]
    pub fn tightest_target(&self) -> Option<Target> {
        self.targets.first().copied()
    }

    /// The mean size of its requests in bytes.
    #[must_use]
    pub fn mean_block(&self) -> f64 {
        match self.mix.as_slice() {
            [] => self.block.0 as f64,
            mix => mix.iter().map(|m| m.size.0 as f64 * m.share.0).sum(),
        }
    }
}

impl Vm {
    /// The shortest target latency among its tasks; `None` when all are best effort. The smaller,
    /// the more urgent.
    #[must_use]
    pub fn tightest_target(&self) -> Option<Nanos> {
        self.tasks.iter().filter_map(Task::tightest_target).map(|t| t.latency).min()
    }

    /// The sum of its tasks' declared rates; tasks without one count nothing.
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
