//! Plans that cannot act are refused with the reason and the remedy, and nothing is written.

mod support;

use std::path::PathBuf;

use rtvirtio_apply::{ApplyError, Binding, Write, resolve};
use rtvirtio_planner::{BfqTunable, IoCostFile, Knob, LimitKind, Plan};
use support::{Sim, full_plan, io_cost, limit, plan, weight};

struct Lab {
    sim: Sim,
    binding: Binding,
}

fn lab(v2: bool, elevator: &str) -> Lab {
    let groups = ["/lab", "/lab/vm0", "/lab/vm1", "/lab/vm2", "/else", "/else/vm2"];
    let sim = Sim::new().with_disk(v2, &groups, elevator).with_guests(&["none"]);
    Lab { binding: sim.case.binding(), sim }
}

impl Lab {
    fn resolve(&self, plan: &Plan) -> Result<Vec<Write>, ApplyError> {
        resolve(plan, &self.binding, &self.sim.machine())
    }

    fn error(&self, plan: &Plan) -> String {
        self.resolve(plan).unwrap_err().to_string()
    }

    fn cgroup(&mut self, vm: &str, cgroup: Option<&str>) {
        self.binding.vms.get_mut(vm).unwrap().cgroup = cgroup.map(PathBuf::from);
    }
}

fn assert_says(error: &str, words: &[&str]) {
    for word in words {
        assert!(error.contains(word), "`{word}` is missing in: {error}");
    }
}

#[test]
fn bfq_knobs_need_bfq() {
    let lab = lab(false, "mq-deadline");
    let tunable = (Knob::HostBfq(BfqTunable::SliceIdle), "0");
    assert_says(
        &lab.error(&plan(std::slice::from_ref(&tunable))),
        &["slice_idle of loop0", "`mq-deadline`", "set the elevator to `bfq`"],
    );
    assert_says(&lab.error(&plan(&[(Knob::HostElevator, "kyber"), tunable])), &["`kyber`"]);
    assert_says(&lab.error(&plan(&[(weight(0), "100")])), &["weight of vm0", "only under BFQ", "limits"]);
    lab.sim.kernel.put("/sys/block/loop0/queue/scheduler", "[none] mq-deadline\n");
    assert_says(&lab.error(&plan(&[(Knob::HostElevator, "bfq")])), &["does not offer", "modprobe bfq"]);
}

#[test]
fn a_vm_needs_a_cgroup_of_its_own() {
    let mut l = lab(false, "bfq");
    let weights = plan(&[(weight(0), "100"), (weight(1), "200"), (weight(2), "300")]);
    l.cgroup("vm1", Some("/lab/vm0"));
    assert_says(&l.error(&weights), &["same cgroup", "/lab/vm0", "cgroup of its own"]);
    l.cgroup("vm1", Some("/lab/vm0/inner"));
    assert_says(
        &l.error(&plan(&[(limit(0, LimitKind::ReadBps), "9")])),
        &["rbps limit of vm0", "one inside the other"],
    );
    l.cgroup("vm1", Some("/"));
    assert_says(&l.error(&weights), &["weight of vm1", "root cgroup", "systemd-run --scope"]);
    l.cgroup("vm1", None);
    assert_says(&l.error(&weights), &["cgroup is not known", "is the VM running?"]);
    l.cgroup("vm1", Some("/lab/vm1"));
    l.cgroup("vm2", Some("/else/vm2"));
    assert_says(&l.error(&weights), &["one parent", "/else/vm2", "machine.slice"]);
    l.cgroup("vm2", Some("/lab/gone"));
    assert_says(&l.error(&weights), &["weight of vm2", "is gone", "start it first"]);
    l.binding.cgroups = None;
    assert_says(&l.error(&weights), &["no cgroup hierarchy"]);
}

/// io.cost excludes BFQ, what another program has set up is left alone, and each refusal says what
/// to do.
#[test]
fn io_cost_is_refused_where_it_cannot_act_or_is_another_programs() {
    let with = |settings: &[(Knob, &'static str)]| plan(&[io_cost(), settings.to_vec()].concat());
    assert_says(&lab(false, "none").error(&with(&[])), &["io.cost.model", "cgroup v2", "cgroup_no_v1=blkio"]);
    let bfq = lab(true, "bfq");
    assert_says(&bfq.error(&with(&[])), &["loop0", "BFQ is its elevator", "set the elevator to `none`"]);
    let l = lab(true, "none");
    assert_says(&l.error(&with(&[(Knob::HostElevator, "bfq")])), &["BFQ is its elevator"]);
    assert_says(&l.error(&with(&[(weight(0), "100")])), &["weight of vm0", "only under BFQ"]);
    let only = |n: usize| plan(&io_cost()[n..=n]);
    assert_says(&l.error(&only(2)), &["io.weight of vm0", "only under io.cost"]);
    for (file, value, says) in [
        (IoCostFile::Qos, "enable=1 rpct=99.999 rlat=1 wpct=0 wlat=1 min=50 max=150", "two decimals"),
        (IoCostFile::Model, "rbps=1", "`rseqiops=` is missing"),
    ] {
        assert_says(&l.error(&plan(&[(Knob::HostIoCost(file), value)])), &[says, "correct it in the plan"]);
    }
    let heavy = [&io_cost()[..2], &[(Knob::VmIoWeight { vm: "vm0".into() }, "10001")]].concat();
    assert_says(&l.error(&plan(&heavy)), &["from 1 to 10000"]);

    l.sim.kernel.put("/sys/fs/cgroup/else/io.latency", "7:0 target=100\n");
    assert_says(&l.error(&with(&[])), &["else/io.latency", "IODeviceLatencyTargetSec="]);
    l.sim.kernel.put("/sys/fs/cgroup/else/io.latency", "8:0 target=100\n");
    l.sim.kernel.put(
        "/sys/fs/cgroup/io.cost.qos",
        "7:0 enable=1 ctrl=auto rpct=0.00 rlat=1 wpct=0.00 wlat=1 min=1.00 max=2.00\n",
    );
    assert_says(
        &l.error(&with(&[])),
        &["enabled there already", "not overwritten", "iocost.conf", "7:0 enable=0"],
    );
    // A VM that was started again gets its weight alone, under what is in force.
    assert!(l.resolve(&only(2)).is_ok());
    l.sim.kernel.put("/sys/fs/cgroup/io.cost.qos", "7:0 enable=maybe\n");
    assert_says(&l.error(&with(&[])), &["io.cost.qos holds `7:0 enable=maybe`", "not understood"]);
    std::fs::remove_file(l.sim.kernel.at("/sys/fs/cgroup/io.cost.qos")).unwrap();
    assert_says(&l.error(&with(&[])), &["does not exist", "CONFIG_BLK_CGROUP_IOCOST", "BFQ's weights"]);
}

/// BFQ where another program's io.cost divides the disk.
#[test]
fn bfq_is_refused_where_io_cost_is_on() {
    let on = "7:0 enable=1 ctrl=auto rpct=0.00 rlat=1 wpct=0.00 wlat=1 min=1.00 max=2.00\n";
    let qos = "/sys/fs/cgroup/io.cost.qos";
    let chooses = [(Knob::HostElevator, "bfq")];
    let tunes = [(Knob::HostBfq(BfqTunable::SliceIdle), "0")];
    let weighs = [(weight(0), "100")];
    for (elevator, settings) in [("none", &chooses), ("bfq", &chooses), ("bfq", &tunes), ("bfq", &weighs)] {
        let l = lab(true, elevator);
        let resolved = || l.resolve(&plan(settings));
        let is_refused = |words: &[&str]| assert_says(&resolved().unwrap_err().to_string(), words);
        l.sim.kernel.put(qos, on);
        is_refused(&["BFQ of loop0", "io.cost is enabled there", "7:0 enable=0", "iocost.conf"]);
        l.sim.kernel.put(qos, "7:0 enable=maybe\n");
        is_refused(&["io.cost.qos holds `7:0 enable=maybe`", "not understood"]);
        std::fs::remove_file(l.sim.kernel.at(qos)).unwrap();
        std::fs::create_dir(l.sim.kernel.at(qos)).unwrap();
        is_refused(&["io.cost.qos"]);
        std::fs::remove_dir(l.sim.kernel.at(qos)).unwrap();
        resolved().unwrap();
        for off in ["", "7:0 enable=0 ctrl=auto\n", "8:0 enable=1 ctrl=auto\n"] {
            l.sim.kernel.put(qos, off);
            resolved().unwrap();
        }
    }
    // Without BFQ both go together, and a limit does not rely on it.
    let l = lab(true, "bfq");
    l.sim.kernel.put(qos, on);
    for setting in [(Knob::HostElevator, "none"), (limit(0, LimitKind::ReadIops), "1000")] {
        l.resolve(&plan(&[setting])).unwrap();
    }
}

/// io.latency excludes io.cost, and acts between siblings of cgroup v2 only.
#[test]
fn io_latency_is_refused_where_it_cannot_act() {
    let of = |n: usize, us: &'static str| (Knob::VmIoLatency { vm: format!("vm{n}") }, us);
    let one = plan(&[of(0, "20000")]);
    assert_says(&lab(false, "none").error(&one), &["io.latency of vm0", "cgroup v2", "cgroup_no_v1=blkio"]);
    let mut l = lab(true, "none");
    let both = [io_cost(), vec![of(0, "20000")]].concat();
    assert_says(&l.error(&plan(&both)), &["the plan enables io.cost too", "leave one of the two out"]);
    for value in ["0", "soon", "18446744073709552"] {
        assert_says(&l.error(&plan(&[of(0, value)])), &["whole number of us", "correct it in the plan"]);
    }
    let target = l.resolve(&one).unwrap().pop().unwrap().target.to_string();
    assert_eq!(target, "/sys/fs/cgroup/lab/vm0/io.latency");
    let qos = "/sys/fs/cgroup/io.cost.qos";
    l.sim.kernel.put(qos, "7:0 enable=1 ctrl=auto rpct=0.00 rlat=1 wpct=0.00 wlat=1 min=1.00 max=2.00\n");
    assert_says(&l.error(&one), &["io.cost is enabled on loop0", "iocost.conf", "7:0 enable=0"]);
    l.sim.kernel.put(qos, "7:0 enable=maybe\n");
    assert_says(&l.error(&one), &["not understood"]);
    // A kernel without io.cost.
    std::fs::remove_file(l.sim.kernel.at(qos)).unwrap();
    l.resolve(&one).unwrap();
    l.cgroup("vm1", Some("/else/vm1"));
    l.cgroup("vm2", Some("/else/vm2"));
    assert_says(&l.error(&one), &["latency targets compare only cgroups with one parent", "machine.slice"]);
    // Of a kernel without io.latency the groups have no such file.
    let l = lab(true, "none");
    for dir in ["", "/lab"] {
        l.sim.kernel.put(format!("/sys/fs/cgroup{dir}/cgroup.subtree_control"), "io\n");
    }
    assert_says(&l.error(&one), &["io.latency does not exist", "CONFIG_BLK_CGROUP_IOLATENCY"]);
}

/// The model is of the whole device.
#[test]
fn io_cost_is_refused_for_a_device_of_several_drives() {
    let mut l = lab(true, "none");
    l.sim.kernel.disk("loop1", "none");
    let other = l.binding.stack.disks[0].clone();
    l.binding.stack.disks.push(rtvirtio_kernel::BlockDevice { name: "loop1".into(), ..other });
    assert_says(&l.error(&plan(&io_cost())), &["several drives (loop0, loop1)", "BFQ's weights"]);
}

#[test]
fn a_missing_weight_file_points_to_bfq() {
    let l = lab(false, "bfq");
    for file in ["blkio.bfq.weight", "blkio.bfq.weight_device"] {
        std::fs::remove_file(l.sim.kernel.at(format!("/sys/fs/cgroup/blkio/lab/vm0/{file}"))).unwrap();
    }
    assert_says(
        &l.error(&plan(&[(weight(0), "100")])),
        &["blkio.bfq.weight_device does not exist", "modprobe bfq"],
    );
}

#[test]
fn values_that_the_kernel_would_cut_or_refuse_are_refused_first() {
    let l = lab(false, "bfq");
    for (knob, value, says) in [
        (weight(0), "0", "from 1 to 1000"),
        (weight(0), "1001", "from 1 to 1000"),
        (limit(0, LimitKind::ReadIops), "4294967295", "from 1 to 4294967294"),
        (limit(0, LimitKind::ReadIops), "0", "neither `max`"),
        (Knob::HostBfq(BfqTunable::SliceIdle), "100000", "from 0 to 4294"),
        (Knob::HostBfq(BfqTunable::LowLatency), "2", "from 0 to 1"),
        (Knob::HostBfq(BfqTunable::MaxBudget), "-1", "whole number"),
        (Knob::HostBfq(BfqTunable::TimeoutSync), "8ms", "whole number"),
    ] {
        assert_says(&l.error(&plan(&[(knob, value)])), &[says, value]);
    }
    assert_says(&l.error(&plan(&[(weight(0), "1"), (weight(0), "2")])), &["sets it twice"]);
}

#[test]
fn guests_need_an_agent_a_disk_and_bfq() {
    let mut l = lab(false, "bfq");
    let elevator = |vm: &str, e: &'static str| (Knob::GuestElevator { vm: vm.into() }, e);
    assert_says(
        &l.error(&plan(&[elevator("vm1", "bfq")])),
        &["elevator of vda in vm1", "cannot be reached", "is the guest running"],
    );
    assert_says(&l.error(&plan(&[elevator("vm0", "cfq")])), &["does not offer `cfq`", "modprobe cfq"]);
    let tunable = Knob::GuestBfq { vm: "vm0".into(), tunable: BfqTunable::SliceIdle };
    assert_says(&l.error(&plan(&[(tunable, "0")])), &["slice_idle in vm0", "the guest's elevator is `none`"]);
    l.binding.vms.get_mut("vm0").unwrap().guest_disks = vec!["../../etc".into()];
    assert_says(&l.error(&plan(&[elevator("vm0", "bfq")])), &["`../../etc` is not a disk's name"]);
    l.binding.vms.get_mut("vm0").unwrap().agent = None;
    assert_says(&l.error(&plan(&[elevator("vm0", "bfq")])), &["no guest agent"]);
    assert_says(&l.error(&plan(&[elevator("vm9", "bfq")])), &["no guest agent"]);
}

#[test]
fn writes_come_in_the_order_that_the_kernel_needs() {
    for v2 in [false, true] {
        let l = lab(v2, "none");
        let writes = l.resolve(&full_plan(false)).unwrap();
        let at = |part: &str| {
            let found = writes.iter().position(|w| w.target.to_string().contains(part));
            found.unwrap_or_else(|| panic!("no {part}"))
        };
        assert_eq!(at("scheduler"), 0);
        assert!(at("strict_guarantees") < at("slice_idle"), "strict mode raises slice_idle");
        assert!(writes[at("slice_idle")].also_ours.contains(&"8".to_owned()));
        if v2 {
            assert!(at("cgroup/cgroup.subtree_control") < at("lab/cgroup.subtree_control"));
            assert!(at("lab/cgroup.subtree_control") < at("io.bfq.weight"));
            assert_eq!(
                writes.iter().filter(|w| w.target.to_string().ends_with("subtree_control")).count(),
                2
            );
            assert_eq!(writes[at("io.max")].created_by, Some(at("lab/cgroup.subtree_control")));
        } else {
            assert!(at("blkio.bfq.weight_device") < at("read_iops_device"));
        }
    }
}

/// A setting as `apply` names it.
fn label(knob: &Knob) -> String {
    match knob {
        Knob::HostElevator => "elevator of loop0".to_owned(),
        Knob::HostBfq(tunable) => format!("{} of loop0", tunable.file_name()),
        Knob::HostIoCost(file) => format!("{} of loop0", file.file_name()),
        Knob::VmWeight { vm } => format!("weight of {vm}"),
        Knob::VmIoWeight { vm } => format!("io.weight of {vm}"),
        Knob::VmIoLatency { vm } => format!("io.latency of {vm}"),
        Knob::VmLimit { vm, limit } => {
            let key = match limit {
                LimitKind::ReadBps => "rbps",
                LimitKind::WriteBps => "wbps",
                LimitKind::ReadIops => "riops",
                LimitKind::WriteIops => "wiops",
            };
            format!("{key} limit of {vm}")
        }
        Knob::GuestElevator { vm } => format!("elevator in {vm}"),
        Knob::GuestBfq { vm, tunable } => format!("{} of vda in {vm}", tunable.file_name()),
    }
}

#[test]
fn settings_are_written_in_the_order_in_which_a_plan_lists_them() {
    listed_as_written(full_plan(true));
    let settings = [io_cost(), vec![(limit(2, LimitKind::ReadIops), "1000"), (Knob::HostElevator, "none")]];
    listed_as_written(plan(&settings.concat()));
    let latency = (Knob::VmIoLatency { vm: "vm0".into() }, "20000");
    listed_as_written(plan(&[
        (Knob::HostElevator, "none"),
        latency,
        (limit(2, LimitKind::ReadIops), "1000"),
    ]));
}

fn listed_as_written(mut plan: Plan) {
    let lab = lab(true, "mq-deadline");
    // The simulated host has one guest.
    plan.settings.retain(|s| !matches!(&s.knob, Knob::GuestElevator { vm } if vm == "vm1"));
    plan.settings.reverse();
    let writes = lab.resolve(&plan).unwrap();
    plan.settings.sort_by_key(|s| s.knob.write_order());
    let listed: Vec<String> = plan.settings.iter().map(|s| label(&s.knob)).collect();
    // A write names the guest's disk too.
    let named = |w: &Write| w.knob.replace("elevator of vda in", "elevator in");
    let mut written: Vec<String> = writes.iter().map(named).collect();
    // Writes that a plan needs and does not list: controllers of cgroups v2.
    written.retain(|knob| !knob.starts_with("I/O control for"));
    assert_eq!(written, listed);
}
