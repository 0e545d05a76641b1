//! Helpers of the tests: a machine description, snapshots, and processes that kill themselves.
#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod child;
pub mod inject;
pub mod resctrl;
pub mod sim;
pub mod tasks;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rtvirtio_apply::{
    ApplyError, Binding, HostFiles, JOURNAL_FILE, KnobState, Machine, OnConflict, Reverted, Session, Silent,
    Status, VmBinding, Write, append, resolve, status,
};
use rtvirtio_kernel::{Cgroups, Root, Stack, sched, task};
use rtvirtio_model::ModelKind;
use rtvirtio_planner::{BfqTunable, Enforcement, IoCostFile, Knob, LimitKind, Plan, Setting};
use serde::{Deserialize, Serialize};
use tempfile::TempDir;

use self::sim::{SimGuests, SimKernel};
use self::tasks::VMS;

/// Plan with the machine that it is applied to; passed to the child processes as a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Case {
    /// `/` for the real kernel, else a directory with a simulated one.
    pub root: PathBuf,
    pub state: PathBuf,
    pub device: String,
    /// VM `vmN` is in the cgroup `parent/vmN`.
    pub parent: PathBuf,
    pub vms: usize,
    /// VM `vmN` has a simulated guest in this directory below `guests/vmN`, and an agent socket
    /// next to it.
    pub guests: Option<PathBuf>,
    pub plan: Plan,
    /// Writes in addition to the plan's.
    pub cpu: Vec<Write>,
    /// A process of the real kernel whose threads are part of the snapshot.
    pub threads_of: Option<u32>,
}

impl Case {
    /// Simulated machine in a directory, where nothing is to be applied yet.
    pub fn new(dir: &Path) -> Self {
        Self {
            root: dir.join("root"),
            state: dir.join("state"),
            device: "loop0".into(),
            parent: "/lab".into(),
            vms: 3,
            guests: None,
            plan: plan(&[]),
            cpu: Vec::new(),
            threads_of: None,
        }
    }

    /// All writes: the plan's, and those in addition.
    pub fn writes(&self, machine: &Machine<'_>) -> Result<Vec<Write>, ApplyError> {
        let mut writes = if self.plan.settings.is_empty() {
            Vec::new()
        } else {
            resolve(&self.plan, &self.binding(), machine)?
        };
        append(&mut writes, self.cpu.clone());
        Ok(writes)
    }

    /// The files of some directories, and policy and cgroups of the threads of a process.
    pub fn snapshot(&self, dirs: &[PathBuf]) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut files = snapshot(dirs);
        let Some(pid) = self.threads_of else { return files };
        let root = self.root();
        for tid in task::tids(&root, pid).unwrap() {
            let dir = PathBuf::from(format!("/proc/{pid}/task/{tid}"));
            files.insert(dir.join("sched"), sched::get(tid).unwrap().to_string().into_bytes());
            files.insert(dir.join("cgroup"), fs::read(dir.join("cgroup")).unwrap());
        }
        files
    }

    pub fn root(&self) -> Root {
        Root::new(&self.root)
    }

    pub fn binding(&self) -> Binding {
        let root = self.root();
        let vm = |n: usize| {
            let name = format!("vm{n}");
            let agent = self.guests.as_ref().map(|dir| dir.join(format!("{name}.sock")).into());
            let cgroup = Some(self.parent.join(&name));
            (name, VmBinding { cgroup, agent, guest_disks: vec!["vda".into()] })
        };
        Binding {
            stack: Stack::find(&root, &self.device).unwrap(),
            cgroups: Some(Cgroups::detect(&root).unwrap()),
            vms: (0..self.vms).map(vm).collect(),
        }
    }
}

/// Simulated machine, and what is applied to it.
pub struct Sim {
    pub dir: TempDir,
    pub root: Root,
    pub kernel: SimKernel,
    pub case: Case,
    /// Whether files take every value, without the simulated kernel's rules.
    pub is_plain: bool,
}

impl Sim {
    pub fn new() -> Self {
        Self::within(rtvirtio_testkit::tempdir().unwrap())
    }

    pub fn within(dir: TempDir) -> Self {
        let case = Case::new(dir.path());
        let kernel = SimKernel::new(&case.root);
        kernel.boot("one\n");
        Self { root: case.root(), kernel, case, dir, is_plain: false }
    }

    /// Adds disk `loop0`, and cgroups.
    pub fn with_disk(self, v2: bool, groups: &[&str], elevator: &str) -> Self {
        if v2 {
            self.kernel.v2(groups)
        } else {
            self.kernel.v1(groups)
        }
        self.kernel.disk("loop0", elevator);
        self
    }

    /// Adds guests `vm0` and further ones, each with disk `vda` under one of these elevators.
    pub fn with_guests(mut self, elevators: &[&str]) -> Self {
        let guests = self.dir.path().join("guests");
        for (n, elevator) in elevators.iter().enumerate() {
            SimKernel::new(guests.join(format!("vm{n}"))).disk("vda", elevator);
            fs::write(guests.join(format!("vm{n}.sock")), "").unwrap();
        }
        self.case.guests = Some(guests);
        self
    }

    /// Adds cgroup v1's hierarchy of the CPU with a group for VMs.
    pub fn with_cpu(self) -> Self {
        self.kernel.cpu_root();
        self.kernel.make_dir(Path::new(VMS)).unwrap();
        self
    }

    pub fn journal(&self) -> PathBuf {
        self.case.state.join(JOURNAL_FILE)
    }

    pub fn session(&self) -> Session {
        Session::open(&self.case.state).unwrap()
    }

    pub fn machine(&self) -> Machine<'_> {
        let host: &dyn HostFiles = if self.is_plain { &self.root } else { &self.kernel };
        Machine::with_host(&self.root, host, &SimGuests)
    }

    pub fn apply(&self) -> Result<(), ApplyError> {
        self.apply_on(&self.machine())
    }

    pub fn apply_on(&self, machine: &Machine<'_>) -> Result<(), ApplyError> {
        let writes = self.case.writes(machine)?;
        Session::open(&self.case.state)?.apply(&writes, machine, &mut Silent).map(drop)
    }

    pub fn revert(&self, on_conflict: OnConflict) -> Reverted {
        self.session().revert(on_conflict, &self.machine(), &mut Silent).unwrap().unwrap()
    }

    pub fn status(&self) -> Option<Status> {
        status(&self.case.state, &self.machine()).unwrap()
    }

    /// State of each setting.
    pub fn states(&self) -> Vec<KnobState> {
        self.status().unwrap().knobs.into_iter().map(|knob| knob.state).collect()
    }

    /// Directories of the host and its guests.
    pub fn dirs(&self) -> Vec<PathBuf> {
        [Some(&self.case.root), self.case.guests.as_ref()].into_iter().flatten().cloned().collect()
    }

    pub fn snapshot(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        self.case.snapshot(&self.dirs())
    }
}

pub fn plan(settings: &[(Knob, &str)]) -> Plan {
    let setting = |(knob, value): &(Knob, &str)| Setting {
        knob: knob.clone(),
        value: (*value).to_owned(),
        reason: "test".into(),
        strength: Enforcement::Hint,
    };
    Plan {
        scheme: "test".into(),
        model: ModelKind::Slice,
        settings: settings.iter().map(setting).collect(),
        tasks: Vec::new(),
        feasible: true,
        infeasible: None,
        evaluated: 0,
    }
}

pub fn weight(vm: usize) -> Knob {
    Knob::VmWeight { vm: format!("vm{vm}") }
}

/// Settings that divide the device by io.cost.
pub fn io_cost() -> Vec<(Knob, &'static str)> {
    let weight = |n: usize| Knob::VmIoWeight { vm: format!("vm{n}") };
    vec![
        (
            Knob::HostIoCost(IoCostFile::Model),
            "rbps=63488000 rseqiops=15500 rrandiops=15500 wbps=63488000 wseqiops=15500 wrandiops=15500",
        ),
        (Knob::HostIoCost(IoCostFile::Qos), "enable=1 rpct=99.9 rlat=20000 wpct=0 wlat=20000 min=50 max=150"),
        (weight(0), "800"),
        (weight(1), "200"),
        (weight(2), "0001"),
    ]
}

pub fn limit(vm: usize, limit: LimitKind) -> Knob {
    Knob::VmLimit { vm: format!("vm{vm}"), limit }
}

/// A plan that touches every kind of host knob, and of guest knob when there are guests.
pub fn full_plan(guests: bool) -> Plan {
    let mut settings = vec![
        (Knob::HostElevator, "bfq"),
        (Knob::HostBfq(BfqTunable::SliceIdle), "2"),
        (Knob::HostBfq(BfqTunable::TimeoutSync), "30"),
        (Knob::HostBfq(BfqTunable::LowLatency), "0"),
        (Knob::HostBfq(BfqTunable::MaxBudget), "512"),
        (Knob::HostBfq(BfqTunable::StrictGuarantees), "1"),
        (weight(0), "700"),
        (weight(1), "300"),
        (weight(2), "50"),
        (limit(2, LimitKind::ReadIops), "1000"),
        (limit(2, LimitKind::WriteBps), "1048576"),
        (limit(1, LimitKind::WriteIops), "max"),
    ];
    if guests {
        let vm = || "vm0".to_owned();
        settings.push((Knob::GuestElevator { vm: vm() }, "bfq"));
        settings.push((Knob::GuestBfq { vm: vm(), tunable: BfqTunable::SliceIdle }, "0"));
        settings.push((Knob::GuestElevator { vm: "vm1".into() }, "none"));
    }
    plan(&settings)
}

/// Content of every writable file below some directories, by path: not the kernel's counters. Links
/// are not followed.
///
/// `memory.peak` and `memory.swap.peak` are counters too, although they can be written since Linux
/// 6.12 (a write resets them for the writer).
pub fn snapshot(dirs: &[PathBuf]) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for dir in dirs {
        walk(dir, &mut files);
    }
    files
}

fn walk(dir: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            walk(&entry.path(), files);
        } else if kind.is_file()
            && entry.metadata().unwrap().mode() & 0o200 != 0
            && !entry.file_name().to_string_lossy().ends_with(".peak")
        {
            if let Ok(bytes) = fs::read(entry.path()) {
                files.insert(entry.path(), meant(&entry.path(), bytes));
            }
        }
    }
}

/// Content without lines that mean what none means: io.cost keeps a device's line once there was
/// one.
fn meant(path: &Path, bytes: Vec<u8>) -> Vec<u8> {
    let own = match path.file_name().and_then(|name| name.to_str()) {
        Some("io.cost.model") => " ctrl=auto ",
        Some("io.cost.qos") => " enable=0 ctrl=auto ",
        _ => return bytes,
    };
    let text = String::from_utf8(bytes).unwrap();
    text.lines()
        .filter(|line| !line.contains(own))
        .flat_map(|line| [line, "\n"])
        .collect::<String>()
        .into_bytes()
}

/// Fails with the files that differ.
pub fn assert_same(before: &BTreeMap<PathBuf, Vec<u8>>, after: &BTreeMap<PathBuf, Vec<u8>>, what: &str) {
    let mut differences = Vec::new();
    for path in before.keys().chain(after.keys()) {
        let text = |files: &BTreeMap<PathBuf, Vec<u8>>| {
            files.get(path).map(|b| String::from_utf8_lossy(b).into_owned())
        };
        if before.get(path) != after.get(path) {
            differences.push(format!("{}: {:?} -> {:?}", path.display(), text(before), text(after)));
        }
    }
    differences.dedup();
    assert!(differences.is_empty(), "{what}: {} differences:\n{}", differences.len(), differences.join("\n"));
}
