//! A VM with `partition = true`: reservations on two CPUs of sixteen, on a kernel that makes the
//! partition, by `rtvirtio apply` and by the service. In the box, because the machine that runs the
//! tests need not have cgroup v2.

// In a directory: cargo builds each file of `tests` itself as a test program.
#[path = "boxed/inside.rs"]
mod inside;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rtvirtio_kernel::{Root, partition_fault, root_domain, sched, task};
use rtvirtio_testkit::Machine;
use serde_json::Value;

const MOUNT: &str = "/sys/fs/cgroup";
/// Groups above the VM's, which give no controller to those below.
const SLICES: [&str; 2] = ["/machine.slice", "/machine.slice/machine-plc.slice"];
const GROUP: &str = "/machine.slice/machine-plc.slice/plc.scope";
const DIR: &str = "/root/plc";
const CONTRACTS: &str = "/root/contracts.d";
/// Longest wait for the service.
const LIMIT: Duration = Duration::from_secs(120);
/// Pause between two wake-ups of the VM's threads.
const WAKE_EVERY: Duration = Duration::from_millis(20);

#[test]
fn a_partition_of_a_vm_on_a_host_of_sixteen_cpus() {
    let service = rtvirtio_testkit::site::program("rtvirtiod");
    inside::run("a_partition_of_a_vm_on_a_host_of_sixteen_cpus", &[service.as_path()]);
}

fn rtvirtio(args: &[&str]) -> Output {
    Command::new("rtvirtio").args(args).env("RTVIRTIO_STATE_DIR", "/root/state").output().unwrap()
}

fn said(out: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr))
}

fn ok(args: &[&str]) -> String {
    let out = rtvirtio(args);
    assert!(out.status.success(), "{args:?}: {}", said(&out));
    said(&out)
}

fn spec(cores: &str) -> String {
    let path = PathBuf::from(DIR).join("spec.toml");
    let spec = format!(
        "[device]\npath = \"/dev/nullb0\"\n[[vm]]\nname = \"plc\"\nqmp = \"{DIR}/qmp\"\n\
         cpu = {{ budget = \"10ms\", period = \"20ms\" }}\ncores = {cores}\n\
         [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
    );
    fs::write(&path, spec).unwrap();
    path.to_str().unwrap().to_owned()
}

/// Ends the wake-ups when it is dropped, also by a failed assertion.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does something while all threads of the VMs wake up now and then, as those of a guest that
/// works: the kernel takes no reservation for a thread that has slept since its CPUs changed.
fn awake<T>(machines: &[&Machine], work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    let pids: Vec<String> = machines.iter().map(|machine| machine.pid().to_string()).collect();
    let wake = format!("kill -STOP {0}; kill -CONT {0}", pids.join(" "));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let _ = Command::new("sh").args(["-c", &wake]).status();
                std::thread::sleep(WAKE_EVERY);
            }
        });
        let _done = Done(&done);
        work()
    })
}

fn apply(machines: &[&Machine], spec: &str) -> Value {
    let out = awake(machines, || rtvirtio(&["apply", spec, "--cpu-only", "--json"]));
    assert!(out.status.success(), "{}", said(&out));
    println!("{}", said(&out));
    serde_json::from_slice(&out.stdout).unwrap()
}

/// What must come back: policy and CPUs of each thread, and all settings of the groups.
fn snapshot(machine: &Machine) -> String {
    let mut out = String::new();
    for thread in machine.threads() {
        writeln!(out, "{thread:?} {}", sched::get(thread.tid).unwrap()).unwrap();
    }
    for group in ["", SLICES[0], SLICES[1], GROUP] {
        let mut names: Vec<_> =
            fs::read_dir(format!("{MOUNT}{group}")).unwrap().map(|entry| entry.unwrap().path()).collect();
        names.sort();
        for path in names {
            let name = path.file_name().unwrap().to_str().unwrap();
            if name.starts_with("cpuset.") || name == "cgroup.subtree_control" {
                writeln!(out, "{}: {:?}", path.display(), fs::read_to_string(&path).ok()).unwrap();
            }
        }
    }
    out
}

/// Puts back with the program itself; nothing may differ from before.
fn revert(machine: &Machine, before: &str) {
    println!("{}", ok(&["revert"]));
    let after = snapshot(machine);
    assert!(before == after, "before\n{before}\nafter\n{after}");
}

#[test]
#[ignore = "runs in the box, started by the test above"]
fn inside_the_box() {
    fs::create_dir_all(format!("{MOUNT}{GROUP}")).unwrap();
    fs::create_dir_all(DIR).unwrap();
    fs::write(format!("{MOUNT}/cgroup.subtree_control"), "+cpu +cpuset").unwrap();
    let machine = Machine::start(Path::new(DIR), "plc", &["-machine", "q35"]);
    fs::write(format!("{MOUNT}{GROUP}/cgroup.procs"), machine.pid().to_string()).unwrap();
    let before = snapshot(&machine);

    // Linux before 6.7 makes no partition here, and nothing is set.
    if !Path::new(&format!("{MOUNT}{}/cpuset.cpus.exclusive", SLICES[0])).exists() {
        let out = rtvirtio(&["apply", &spec("{ cpus = \"2-3\", partition = true }"), "--cpu-only"]);
        println!("{}", said(&out));
        assert!(!out.status.success() && said(&out).contains("cpuset.cpus.exclusive"), "{}", said(&out));
        assert_eq!(snapshot(&machine), before);
        return;
    }

    // What the kernel would not have is refused, and sets nothing.
    let out = rtvirtio(&["apply", &spec("{ cpus = \"0-15\", partition = true }"), "--cpu-only"]);
    assert!(!out.status.success() && said(&out).contains("no CPU would be left"), "{}", said(&out));
    assert_eq!(snapshot(&machine), before);

    // A guarantee on two CPUs, in a group two levels below the root.
    let of_two = spec("{ cpus = \"2-3\", partition = true }");
    let held = apply(&[&machine], &of_two);
    assert!(held[0]["backend"] == "deadline" && held[0]["strength"] == "guarantee", "{held}");
    let root = Root::default();
    assert_eq!(partition_fault(&root, Path::new(GROUP)).unwrap(), None);
    for thread in machine.threads() {
        let cgroups = task::cgroups(&root, machine.pid(), thread.tid).unwrap();
        let domain = root_domain(&root, &cgroups, &thread.cpus).unwrap();
        assert_eq!((domain, thread.cpus.as_str()), (BTreeSet::from([2, 3]), "2-3"), "{thread:?}");
    }
    assert!(has_its_budget(&machine));
    let status = ok(&["status"]);
    assert!(!status.contains("no valid partition"), "{status}");
    revert(&machine, &before);
    println!("put back: 0 differences");

    // Another program takes the partition away.
    apply(&[&machine], &of_two);
    fs::write(format!("{MOUNT}{GROUP}/cpuset.cpus.partition"), "member").unwrap();
    let fault = partition_fault(&root, Path::new(GROUP)).unwrap().unwrap();
    let out = rtvirtio(&["status"]);
    println!("{fault}\n{}", said(&out));
    assert!(said(&out).contains("no valid partition") && fault.contains("`member`"), "{}", said(&out));
    revert(&machine, &before);

    let _other = beside_another_vm(&machine);
    revert(&machine, &before);

    kept_by_the_service(&machine);
}

/// Whether the threads have 10 ms on each of two CPUs together; the parts are whole nanoseconds.
fn has_its_budget(machine: &Machine) -> bool {
    let runtime = |tid: u32| sched::get(tid).unwrap().reservation.map_or(0, |r| r.runtime);
    let all: u64 = machine.threads().iter().map(|thread| runtime(thread.tid)).sum();
    println!("reserved: {all} ns");
    (10_000_000..=20_000_000).contains(&all)
}

/// `rtvirtiod`; killed when this is dropped, as `kill -9` does.
struct Service(Child);

impl Service {
    fn start() -> Self {
        let log = fs::File::options().append(true).create(true).open("/root/rtvirtiod.log").unwrap();
        let child = Command::new("rtvirtiod")
            .args(["--config", "/root/rtvirtiod.toml", "--contracts", CONTRACTS])
            .env("RTVIRTIO_STATE_DIR", "/root/state")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        Self(child.unwrap())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until this is so.
#[track_caller]
fn wait_for(what: &str, mut is: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is() {
        let log = || fs::read_to_string("/root/rtvirtiod.log").unwrap_or_default();
        assert!(begin.elapsed() < LIMIT, "not {what}: {}\n{}", said(&rtvirtio(&["status"])), log());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// State of a VM as the service has it; that of tasks without a plan counts as in force.
fn state_of(vm: &str) -> String {
    let status: Value = serde_json::from_slice(&rtvirtio(&["status", "--json"]).stdout).unwrap_or_default();
    let vms = status["service"]["vms"].as_array().cloned().unwrap_or_default();
    let of = vms.into_iter().find(|of| of["name"] == vm).unwrap_or_default();
    of["state"].as_str().unwrap_or_default().replace("unplanned", "in_force")
}

fn file_of(group: &str, name: &str) -> String {
    fs::read_to_string(format!("{MOUNT}{group}/{name}")).unwrap().trim().to_owned()
}

fn exclusive() -> String {
    file_of(SLICES[0], "cpuset.cpus.exclusive")
}

fn is_valid(group: &str) -> bool {
    partition_fault(&Root::default(), Path::new(group)).unwrap().is_none()
}

/// Gives the service the contract of a VM with a partition.
fn contract(vm: &str, cpus: &str) {
    let cores = format!("cores = {{ cpus = \"{cpus}\", partition = true }}");
    let spec = format!(
        "[device]\npath = \"/dev/nullb0\"\n[[vm]]\nname = \"{vm}\"\nqmp = \"/root/{vm}/qmp\"\n\
         cpu = {{ budget = \"10ms\", period = \"20ms\" }}\n{cores}\n\
         [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
    );
    fs::write(format!("{CONTRACTS}/{vm}.toml"), spec).unwrap();
}

/// Contracts of the service for this VM and another one below the same slice.
fn kept_by_the_service(machine: &Machine) {
    let scope = format!("{}/hmi.scope", SLICES[0]);
    fs::create_dir_all("/root/hmi").unwrap();
    fs::create_dir_all(CONTRACTS).unwrap();
    fs::write("/root/rtvirtiod.toml", "compare = \"1s\"\n").unwrap();
    fs::create_dir_all(format!("{MOUNT}{scope}")).unwrap();
    let other = Machine::start(Path::new("/root/hmi"), "hmi", &["-machine", "q35"]);
    fs::write(format!("{MOUNT}{scope}/cgroup.procs"), other.pid().to_string()).unwrap();
    let (before, of_other) = (snapshot(machine), snapshot(&other));
    let all_back = || {
        revert(machine, &before);
        assert_eq!(snapshot(&other), of_other);
    };
    contract("plc", "2-3");
    let service = Service::start();
    awake(&[machine, &other], || partitions_come_and_go(machine, &other, &scope));
    drop(service);
    all_back();

    contract("plc", "2-3");
    for after in [500, 1000, 2000, 4000] {
        let service = Service::start();
        awake(&[machine, &other], || std::thread::sleep(Duration::from_millis(after)));
        drop(service);
        println!("killed after {after} ms, with exclusive CPUs `{}` above", exclusive());
        all_back();
    }
}

/// Two VMs with partitions, of which one comes later, and the other one loses its partition to
/// another program and then its contract.
fn partitions_come_and_go(machine: &Machine, other: &Machine, scope: &str) {
    wait_for("plc in force", || state_of("plc") == "in_force");
    assert!(is_valid(GROUP) && exclusive() == "2-3", "{}", exclusive());
    assert!(has_its_budget(machine));

    // None of the two loses anything.
    contract("hmi", "4-5");
    wait_for("hmi in force", || state_of("hmi") == "in_force");
    assert!(is_valid(GROUP) && is_valid(scope) && exclusive() == "2-5", "{}", exclusive());
    assert!(has_its_budget(machine) && has_its_budget(other));

    // The service makes it again.
    fs::write(format!("{MOUNT}{GROUP}/cpuset.cpus.partition"), "member").unwrap();
    wait_for("a partition again", || is_valid(GROUP) && state_of("plc") == "in_force");
    assert!(is_valid(scope) && has_its_budget(machine));

    // What the first alone needed is put back with its contract.
    fs::remove_file(format!("{CONTRACTS}/plc.toml")).unwrap();
    wait_for("fewer exclusive CPUs above", || exclusive() == "4-5");
    assert_eq!(file_of(GROUP, "cpuset.cpus.partition"), "member");
    assert!(is_valid(scope) && has_its_budget(other));
}

/// Applies contracts of two VMs, together more than all of each CPU, of which one has a partition:
/// the kernel admits them, because they are in two root domains. Returns the other VM.
fn beside_another_vm(machine: &Machine) -> Machine {
    let dir = "/root/web";
    fs::create_dir_all(dir).unwrap();
    fs::create_dir_all(format!("{MOUNT}/web.scope")).unwrap();
    let other = Machine::start(Path::new(dir), "web", &["-machine", "q35"]);
    fs::write(format!("{MOUNT}/web.scope/cgroup.procs"), other.pid().to_string()).unwrap();
    let vm = |name: &str, rest: &str| {
        format!(
            "[[vm]]\nname = \"{name}\"\nqmp = \"/root/{name}/qmp\"\n{rest}\n\
             [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
        )
    };
    let plc = "cpu = { budget = \"16ms\", period = \"20ms\" }\ncores = { cpus = \"2-3\", partition = true }";
    let (plc, web) = (vm("plc", plc), vm("web", "cpu = { budget = \"12ms\", period = \"20ms\" }"));
    let spec = PathBuf::from(dir).join("spec.toml");
    fs::write(&spec, format!("[device]\npath = \"/dev/nullb0\"\n{plc}{web}")).unwrap();
    let held = apply(&[machine, &other], spec.to_str().unwrap());
    let of = |vm: &str| held.as_array().unwrap().iter().find(|of| of["vm"] == vm).unwrap();
    for vm in ["plc", "web"] {
        assert!(of(vm)["backend"] == "deadline" && of(vm)["strength"] == "guarantee", "{held}");
    }
    assert!(other.threads().iter().all(|thread| thread.cpus == "0-1,4-15"), "{:?}", other.threads());
    other
}
