//! The resource agent, called as Pacemaker's executor calls it, on a real QEMU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rtvirtio_kernel::{Cgroups, Root};
use rtvirtio_testkit::{LoopDevice, Machine, Need, has, skip, tempdir, unique};

const PROGRAM: &str = env!("CARGO_BIN_EXE_rtvirtio-pacemaker");
const NEEDS: [Need; 3] = [Need::Root, Need::QEMU, Need::RT_GROUPS];

struct Agent {
    spec: PathBuf,
    state: PathBuf,
    disk: bool,
}

impl Agent {
    fn run(&self, action: &str) -> (Option<i32>, String) {
        self.run_killed_at(0, action)
    }

    /// Ends itself by SIGKILL at a point of its changes to the host; 0 is none.
    fn run_killed_at(&self, point: u64, action: &str) -> (Option<i32>, String) {
        let out: Output = Command::new(PROGRAM)
            .args(["agent", action, "--state-dir"])
            .env("RTVIRTIO_KILL_AT", point.to_string())
            .arg(&self.state)
            .arg("--run-dir")
            .arg(self.state.with_file_name("run"))
            .env("OCF_RESKEY_spec", &self.spec)
            .env("OCF_RESOURCE_INSTANCE", "plc")
            .env("OCF_RESKEY_disk", self.disk.to_string())
            .output()
            .unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    }

    fn ok(&self, action: &str) -> String {
        let (code, said) = self.run(action);
        assert_eq!(code, Some(0), "{action}: {said}");
        said
    }

    fn write(&self, vm: &str, qmp: &Path, budget: &str) {
        let spec = format!(
            "[device]\npath = \"/dev/vda\"\n[[vm]]\nname = \"{vm}\"\nqmp = \"{}\"\ncpu = {{ budget = \"{budget}\", period = \"100ms\" }}\n\
             [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"10/s\"\n",
            qmp.display()
        );
        fs::write(&self.spec, spec).unwrap();
    }
}

#[test]
fn a_contract_comes_is_restored_changes_and_goes() {
    if !has("a_contract_comes_is_restored_changes_and_goes", &NEEDS) {
        return;
    }
    let dir = tempdir().unwrap();
    let vm = unique("ocf");
    let mut machine = Machine::spinning(dir.path(), &vm, &[]);
    let agent = Agent { spec: dir.path().join("plc.toml"), state: dir.path().join("state"), disk: false };
    agent.write(&vm, machine.qmp(), "1ms");
    let budget = Path::new("/sys/fs/cgroup/cpu").join(format!("rtvirtio-{vm}/cpu.rt_runtime_us"));
    let found = || fs::read_to_string(&budget).ok().map(|t| t.trim().to_owned());
    assert_eq!(agent.run("monitor").0, Some(7), "nothing is applied");
    agent.ok("start");
    assert_eq!(found().as_deref(), Some("1000"));
    agent.ok("start");
    assert_eq!(agent.ok("monitor"), "");
    // Another program: said, and put right.
    fs::write(&budget, "700").unwrap();
    let said = agent.ok("monitor");
    assert!(said.contains("was changed to 700") && said.contains("applied again"), "{said}");
    assert_eq!(found().as_deref(), Some("1000"));
    // The user: the new contract.
    agent.write(&vm, machine.qmp(), "2ms");
    let said = agent.ok("monitor");
    assert!(said.contains("asks for 2ms in 100ms now"), "{said}");
    assert_eq!(found().as_deref(), Some("2000"));
    // A file that is broken takes nothing away.
    let good = fs::read(&agent.spec).unwrap();
    fs::write(&agent.spec, "[[vm").unwrap();
    assert!(agent.ok("monitor").contains("in force as applied"));
    fs::write(&agent.spec, good).unwrap();
    // The other programs know of it, and leave it.
    let rtvirtio = |args: &[&str]| {
        let mut command = Command::new(rtvirtio_testkit::site::program("rtvirtio"));
        command.args(args).env("RTVIRTIO_STATE_DIR", &agent.state);
        let out = command.env("RTVIRTIO_RUN_DIR", agent.state.with_file_name("run")).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (out.status.code(), text(&out.stdout) + &text(&out.stderr))
    };
    let (code, said) = rtvirtio(&["status"]);
    assert!(
        code == Some(0) && said.contains("held by resource plc") && said.contains(&vm),
        "{code:?} {said}"
    );
    let status: serde_json::Value = serde_json::from_str(&rtvirtio(&["status", "--json"]).1).unwrap();
    let of = &status["contracts_of_resources"][0];
    assert!(status["in_force"] == true && of["resource"] == "plc" && of["whole"] == true, "{status:#}");
    let (code, said) = rtvirtio(&["revert"]);
    assert!(code == Some(3) && said.contains("resource plc of Pacemaker holds it"), "{code:?} {said}");
    let spec = agent.spec.to_str().unwrap();
    let (code, said) = rtvirtio(&["apply", spec, "--cpu-only"]);
    let by = "in force already by resource plc";
    assert!(code == Some(1) && said.contains(by), "{code:?} {said}");
    // The same process under another name is the same VM.
    let other = agent.spec.with_file_name("other.toml");
    let text = fs::read_to_string(spec).unwrap();
    fs::write(&other, text.replace(&format!("\"{vm}\""), &format!("\"{vm}x\""))).unwrap();
    let (code, said) = rtvirtio(&["apply", other.to_str().unwrap(), "--cpu-only"]);
    assert!(code == Some(1) && said.contains(by), "{code:?} {said}");
    assert_eq!(found().as_deref(), Some("2000"));
    agent.ok("stop");
    // And the agent knows of theirs, at once.
    let (code, said) = rtvirtio(&["apply", spec, "--cpu-only"]);
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = agent.run("start");
    assert!(code == Some(1) && said.contains("in force already by `rtvirtio apply`"), "{code:?} {said}");
    let (code, said) = rtvirtio(&["revert"]);
    assert_eq!(code, Some(0), "{said}");
    agent.ok("start");
    agent.ok("stop");
    assert_eq!(found(), None, "its group is gone");
    assert_eq!(agent.run("monitor").0, Some(7));
    agent.ok("stop");
    // A VM that has ended takes its contract with it.
    agent.ok("start");
    machine.kill();
    assert_eq!(agent.run("monitor").0, Some(7));
    agent.ok("stop");
    assert_eq!(found(), None);
}

/// What is in force is put back only for a contract that fits.
#[test]
fn a_contract_that_does_not_fit_takes_none_away() {
    if !has("a_contract_that_does_not_fit_takes_none_away", &NEEDS) {
        return;
    }
    let dir = tempdir().unwrap();
    let vm = unique("ocffit");
    let machine = Machine::spinning(dir.path(), &vm, &[]);
    let agent = Agent { spec: dir.path().join("plc.toml"), state: dir.path().join("state"), disk: false };
    agent.write(&vm, machine.qmp(), "1ms");
    let budget = Path::new("/sys/fs/cgroup/cpu").join(format!("rtvirtio-{vm}/cpu.rt_runtime_us"));
    let stays = |why: &str| {
        let said = agent.ok("monitor");
        assert!(said.contains(why), "{said}");
        assert_eq!(fs::read_to_string(&budget).unwrap().trim(), "1000");
    };
    agent.ok("start");
    agent.write(&vm, machine.qmp(), "99ms");
    stays("what is in force stays");
    fs::write(&budget, "700").unwrap();
    stays("applied again");
    // Another program, while the spec is broken, or missing.
    fs::write(&agent.spec, "[[vm").unwrap();
    fs::write(&budget, "700").unwrap();
    stays("applied again");
    fs::remove_file(&agent.spec).unwrap();
    fs::write(&budget, "700").unwrap();
    stays("applied again");
    agent.ok("stop");
    assert!(!budget.exists());
}

/// The contract in force under the old name is replaced too, and does not count.
#[test]
fn a_vm_that_is_renamed_keeps_its_contract() {
    if !has("a_vm_that_is_renamed_keeps_its_contract", &NEEDS) {
        return;
    }
    let dir = tempdir().unwrap();
    let (old, new) = (unique("ocfold"), unique("ocfnew"));
    let machine = Machine::spinning(dir.path(), &old, &[]);
    let agent = Agent { spec: dir.path().join("plc.toml"), state: dir.path().join("state"), disk: false };
    let group = |vm: &str| Path::new("/sys/fs/cgroup/cpu").join(format!("rtvirtio-{vm}"));
    // Twice of it is more than the kernel grants.
    agent.write(&old, machine.qmp(), "50ms");
    agent.ok("start");
    assert!(group(&old).exists());
    agent.write(&new, machine.qmp(), "50ms");
    let said = agent.ok("monitor");
    assert!(group(&new).exists() && !group(&old).exists(), "{said}");
    agent.ok("stop");
    assert!(!group(&new).exists());
}

/// CPUs are searched before anything is put back.
#[test]
fn a_contract_without_cpus_takes_none_away() {
    if !has("a_contract_without_cpus_takes_none_away", &NEEDS) {
        return;
    }
    let dir = tempdir().unwrap();
    let vm = unique("ocfcpus");
    let machine = Machine::spinning(dir.path(), &vm, &[]);
    let agent = Agent { spec: dir.path().join("plc.toml"), state: dir.path().join("state"), disk: false };
    agent.write(&vm, machine.qmp(), "1ms");
    agent.ok("start");
    agent.write(&vm, machine.qmp(), "2ms");
    let spec = fs::read_to_string(&agent.spec).unwrap();
    // No host of these tests has it.
    fs::write(&agent.spec, spec.replace("period = \"100ms\" }", "period = \"100ms\" }\ncores = \"4095\""))
        .unwrap();
    let said = agent.ok("monitor");
    assert!(said.contains("what is in force stays") && said.contains("no CPUs"), "{said}");
    let budget = Path::new("/sys/fs/cgroup/cpu").join(format!("rtvirtio-{vm}/cpu.rt_runtime_us"));
    assert_eq!(fs::read_to_string(&budget).unwrap().trim(), "1000");
    agent.ok("stop");
    assert!(!budget.exists());
}

/// The group of the new contract is another program's: no check finds that before.
#[test]
fn a_contract_that_fails_to_start_gives_way_to_the_one_before() {
    if !has("a_contract_that_fails_to_start_gives_way_to_the_one_before", &NEEDS) {
        return;
    }
    let dir = tempdir().unwrap();
    let (old, new) = (unique("ocfwas"), unique("ocfis"));
    let machine = Machine::spinning(dir.path(), &old, &[]);
    let agent = Agent { spec: dir.path().join("plc.toml"), state: dir.path().join("state"), disk: false };
    let group = |vm: &str| Path::new("/sys/fs/cgroup/cpu").join(format!("rtvirtio-{vm}"));
    let taken = Group(group(&new));
    let old_is_in_force = || {
        assert_eq!(fs::read_to_string(group(&old).join("cpu.rt_runtime_us")).unwrap().trim(), "1000");
    };
    agent.write(&old, machine.qmp(), "1ms");
    agent.ok("start");
    fs::create_dir(&taken.0).unwrap();
    agent.write(&new, machine.qmp(), "2ms");
    let said = agent.ok("monitor");
    let words = format!("the contract from before ({old} 1ms in 100ms) is in force again");
    assert!(said.contains(&words) && said.contains("asks for 2ms in 100ms now"), "{said}");
    old_is_in_force();
    let refused = agent.state.join("contracts/plc/refused.toml");
    assert!(refused.exists());
    // Not taken away again at each monitor.
    let said = agent.ok("monitor");
    assert!(said.contains("restart this resource") && !said.contains("applied again"), "{said}");
    old_is_in_force();
    drop(taken);
    let spec = fs::read_to_string(&agent.spec).unwrap();
    fs::write(&agent.spec, spec + "# again\n").unwrap();
    let said = agent.ok("monitor");
    assert!(group(&new).exists() && !group(&old).exists() && !refused.exists(), "{said}");
    assert_eq!(agent.ok("monitor"), "");
    agent.ok("stop");
    assert!(!group(&new).exists());
}

/// No answer is "running" without a contract, wherever the monitor before was killed.
#[test]
fn a_monitor_that_is_killed_while_it_replaces_a_contract_leaves_nothing_behind() {
    if !has("a_monitor_that_is_killed_while_it_replaces_a_contract_leaves_nothing_behind", &NEEDS) {
        return;
    }
    let dir = tempdir().unwrap();
    let vm = unique("ocfkill");
    let machine = Machine::spinning(dir.path(), &vm, &[]);
    let agent = Agent { spec: dir.path().join("plc.toml"), state: dir.path().join("state"), disk: false };
    let group = Path::new("/sys/fs/cgroup/cpu").join(format!("rtvirtio-{vm}"));
    for at in (1..).step_by(7) {
        agent.write(&vm, machine.qmp(), "1ms");
        agent.ok("start");
        agent.write(&vm, machine.qmp(), "2ms");
        let (code, said) = agent.run_killed_at(at, "monitor");
        let is_killed = code.is_none();
        // Release builds have no such points.
        assert!(is_killed || at > 1 || !cfg!(debug_assertions), "{said}");
        assert!(is_killed || code == Some(0), "{code:?} {said}");
        let (code, said) = agent.run("monitor");
        let found = fs::read_to_string(group.join("cpu.rt_runtime_us")).ok();
        match (code, found.as_deref().map(str::trim)) {
            (Some(0), Some("1000" | "2000")) => {}
            (Some(7), None) => assert!(!group.exists(), "point {at}"),
            (code, found) => panic!("point {at}: {code:?} {found:?} {said}"),
        }
        agent.ok("stop");
        for left in [group.clone(), agent.state.join("contracts/plc/applied.toml")] {
            assert!(!left.exists(), "point {at}: {}", left.display());
        }
        assert!(!agent.state.join("contracts/plc/refused.toml").exists(), "point {at}");
        if !is_killed {
            break;
        }
    }
}

/// A cgroup that goes with it.
struct Group(PathBuf);

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Budget and period are the same.
#[test]
fn changed_priorities_are_applied() {
    if !has("changed_priorities_are_applied", &NEEDS) {
        return;
    }
    let dir = tempdir().unwrap();
    let vm = unique("ocfprio");
    let machine = Machine::spinning(dir.path(), &vm, &[]);
    let agent = Agent { spec: dir.path().join("plc.toml"), state: dir.path().join("state"), disk: false };
    agent.write(&vm, machine.qmp(), "1ms");
    agent.ok("start");
    let spec = fs::read_to_string(&agent.spec).unwrap();
    // Neither a comment nor a target makes another contract.
    let target = "rate = \"10/s\"\ntarget = { percentile = \"p99\", latency = \"50ms\" } # changed";
    fs::write(&agent.spec, spec.replace("rate = \"10/s\"", target)).unwrap();
    assert_eq!(agent.ok("monitor"), "");
    fs::write(&agent.spec, spec.replace("\"100ms\" }", "\"100ms\" }\npriorities = \"rt\"")).unwrap();
    let said = agent.ok("monitor");
    assert!(said.contains("another value of `priorities`") && said.contains("applied again"), "{said}");
    let in_force = fs::read_to_string(agent.state.join("contracts/plc/cpu.json")).unwrap();
    assert!(in_force.contains("\"order\": \"rt\""), "{in_force}");
    assert_eq!(agent.ok("monitor"), "");
    agent.ok("stop");
}

/// A mistake in the spec is no failure of the node, and each code has its words. No second try
/// makes the file right: none is made.
#[test]
fn a_wrong_spec_is_said_and_tried_once() {
    let dir = tempdir().unwrap();
    let agent = Agent { spec: dir.path().join("plc.toml"), state: dir.path().join("state"), disk: false };
    for action in ["validate-all", "start"] {
        let (code, said) = agent.run(action);
        assert!(code == Some(5) && said.contains("plc.toml"), "{action}: {code:?} {said}");
        fs::write(&agent.spec, "[[vm]]\nname = \"plc\"\n").unwrap();
        let (code, said) = agent.run(action);
        assert!(code == Some(6) && said.contains("plc.toml"), "{action}: {code:?} {said}");
        fs::remove_file(&agent.spec).unwrap();
    }
}

/// Of the flash twin.
const PROFILE: &str = include_str!("../../../control/learn/data/qlc-nvme.profile.json");

/// A loop device and the cgroups of two VMs; all of it goes with it.
struct Disk {
    name: String,
    cgroups: Cgroups,
    parent: PathBuf,
    _attached: LoopDevice,
}

impl Disk {
    fn new(test: &str, dir: &Path) -> Option<Self> {
        let root = Root::default();
        let cgroups = Cgroups::detect(&root).map_err(|e| skip(test, &e.to_string())).ok()?;
        let file = dir.join("disk.img");
        fs::File::create(&file).unwrap().set_len(16 << 20).unwrap();
        let Some(attached) = LoopDevice::attach(&file) else {
            skip(test, "losetup");
            return None;
        };
        let name = attached.0.file_name().unwrap().to_str().unwrap().to_owned();
        let parent = format!("/rtvirtio-{}", unique("disk")).into();
        let disk = Self { name, cgroups, parent, _attached: attached };
        for vm in ["plc", "bulk"] {
            disk.cgroups.create(&root, &disk.parent.join(vm)).unwrap();
        }
        // An earlier user of this loop device may have left another.
        fs::write(disk.scheduler(), "none").unwrap();
        Some(disk)
    }

    fn scheduler(&self) -> String {
        format!("/sys/block/{}/queue/scheduler", self.name)
    }

    fn elevator(&self) -> String {
        let text = fs::read_to_string(self.scheduler()).unwrap();
        text.split_once('[').unwrap().1.split_once(']').unwrap().0.to_owned()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let root = Root::default();
        for vm in ["plc", "bulk"] {
            let _ = self.cgroups.remove(&root, &self.parent.join(vm));
        }
        let _ = self.cgroups.remove(&root, &self.parent);
        let _ = fs::write(self.scheduler(), "none");
    }
}

#[test]
fn with_disk_the_kernels_settings_are_planned_and_held() {
    let test = "with_disk_the_kernels_settings_are_planned_and_held";
    if !has(test, &[Need::Root, Need::Path("/dev/loop-control", "no loop devices")]) {
        return;
    }
    let dir = tempdir().unwrap();
    let Some(disk) = Disk::new(test, dir.path()) else { return };
    let agent = Agent { spec: dir.path().join("plc.toml"), state: dir.path().join("state"), disk: true };
    let vm = |name: &str, task: &str| {
        format!(
            "[[vm]]\nname = \"{name}\"\ncgroup = '{}'\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n{task}\n",
            disk.parent.join(name).display()
        )
    };
    let target = "rate = \"300/s\"\ntarget = { percentile = \"p99.99\", latency = \"25ms\" }";
    let head = format!("[device]\npath = \"/dev/{}\"\n", disk.name);
    let spec = head.clone()
        + &vm("plc", target)
        + &vm("bulk", "depth = 128").replace("4KiB\"\ndepth", "64KiB\"\ndepth");
    fs::write(&agent.spec, spec).unwrap();
    let (code, said) = agent.run("start");
    assert!(code == Some(1) && said.contains("has not been measured"), "{code:?} {said}");
    let profiles = agent.state.join("profiles");
    fs::create_dir_all(&profiles).unwrap();
    let mut profile: serde_json::Value = serde_json::from_str(PROFILE).unwrap();
    profile["device"] = disk.name.clone().into();
    fs::write(profiles.join(format!("{}.json", disk.name)), profile.to_string()).unwrap();
    let before = disk.elevator();
    agent.ok("start");
    assert_eq!(agent.ok("monitor"), "");
    let journal = fs::read_to_string(agent.state.join("contracts/plc/journal.json")).unwrap();
    assert!(journal.contains("bulk") || journal.contains(&disk.name), "{journal}");
    let planned = disk.elevator();
    if planned != before {
        fs::write(disk.scheduler(), &before).unwrap();
        assert!(agent.ok("monitor").contains("applied again"));
        assert_eq!(disk.elevator(), planned);
    }
    agent.ok("stop");
    assert_eq!(disk.elevator(), before);
    // Without a target no setting is asked for, and that is held too.
    fs::write(&agent.spec, head + &vm("plc", "rate = \"10/s\"")).unwrap();
    agent.ok("start");
    assert_eq!(agent.ok("monitor"), "");
    agent.ok("stop");
    assert_eq!(agent.run("monitor").0, Some(7));
}

#[test]
fn it_says_what_it_is_and_refuses_what_it_does_not_know() {
    let agent = |action: &str, spec: Option<&str>| {
        let mut command = Command::new(PROGRAM);
        command.args(["agent", action]).env_remove("OCF_RESKEY_spec").env("OCF_RESOURCE_INSTANCE", "plc");
        if let Some(spec) = spec {
            command.env("OCF_RESKEY_spec", spec);
        }
        command.output().unwrap()
    };
    let out = agent("meta-data", None);
    let xml = String::from_utf8(out.stdout).unwrap();
    for part in ["<resource-agent name=\"contract\"", "name=\"spec\"", "name=\"monitor\""] {
        assert!(out.status.success() && xml.contains(part), "{xml}");
    }
    assert_eq!(agent("start", None).status.code(), Some(6), "no spec");
    assert_eq!(agent("promote", Some("/x")).status.code(), Some(3));
}

/// Nothing is applied: there is nothing to put back, and the agent takes the names of the script.
#[test]
fn the_hookscript_of_proxmox_names_a_resource_that_the_agent_takes() {
    let dir = tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/fleet/proxmox-hook.sh");
    let out = Command::new("sh")
        .arg(script)
        .args(["100", "pre-stop"])
        .env("RTVIRTIO_PACEMAKER", PROGRAM)
        .env("RTVIRTIO_STATE_DIR", dir.path().join("state"))
        .env("RTVIRTIO_RUN_DIR", dir.path().join("run"))
        .output()
        .unwrap();
    assert!(out.status.success() && out.stderr.is_empty(), "{}", String::from_utf8_lossy(&out.stderr));
}
