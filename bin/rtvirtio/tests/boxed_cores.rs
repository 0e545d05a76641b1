//! `cores` on a host of two sockets, each a NUMA node of four cores with two threads: a VM's whole
//! life. In the box, because the machine that runs the tests need not be such a host.

// In a directory: cargo builds each file of `tests` itself as a test program.
#[path = "boxed/inside.rs"]
mod inside;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rtvirtio_kernel::text::cpu_list;
use rtvirtio_kernel::{Root, topology};
use rtvirtio_testkit::{HANG, Machine, ThreadCpus};

const MOUNT: &str = "/sys/fs/cgroup";
const STATE: &str = "/root/state";

#[test]
fn cpus_of_vms_on_a_host_of_two_sockets() {
    inside::run("cpus_of_vms_on_a_host_of_two_sockets", &[]);
}

/// A VM of so many vCPUs that runs no system, alone in its cgroup.
struct Vm {
    name: &'static str,
    machine: Option<Machine>,
    dir: PathBuf,
}

impl Vm {
    fn start(name: &'static str, vcpus: u32) -> Self {
        let dir = PathBuf::from(format!("/root/{name}"));
        fs::create_dir_all(&dir).unwrap();
        let smp = format!("{vcpus},maxcpus={}", vcpus + 1);
        let machine = Machine::start(&dir, name, &["-machine", "q35", "-smp", &smp]);
        let group = format!("{MOUNT}/machine.slice/{name}.scope");
        fs::create_dir_all(&group).unwrap();
        fs::write(format!("{group}/cgroup.procs"), machine.pid().to_string()).unwrap();
        Self { name, machine: Some(machine), dir }
    }

    /// Its threads with their CPUs.
    fn cpus(&self) -> Vec<ThreadCpus> {
        self.machine.as_ref().unwrap().threads()
    }

    /// The CPU of each vCPU, which has just one.
    fn vcpus(&self) -> Vec<u32> {
        let all = self.cpus().into_iter().filter(|thread| thread.name.starts_with("CPU "));
        let one = |list: String| {
            let cpus = cpu_list(&list).unwrap();
            assert_eq!(cpus.len(), 1, "{list}");
            *cpus.first().unwrap()
        };
        all.map(|thread| one(thread.cpus)).collect()
    }

    fn spec(&self, cores: &str) -> String {
        self.spec_on("/dev/nullb0", cores)
    }

    fn spec_on(&self, disk: &str, cores: &str) -> String {
        let path = self.dir.join("spec.toml");
        let spec = format!(
            "[device]\npath = \"{disk}\"\n[[vm]]\nname = \"{}\"\nqmp = \"{}\"\n\
             cpu = {{ budget = \"10ms\", period = \"20ms\" }}\ncores = {cores}\n\
             [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n",
            self.name,
            self.dir.join("qmp").display()
        );
        fs::write(&path, spec).unwrap();
        path.to_str().unwrap().to_owned()
    }

    fn plug(&self) {
        let machine = self.machine.as_ref().unwrap();
        machine.plug_vcpu();
        machine.execute("object-add", &serde_json::json!({ "qom-type": "iothread", "id": "late" }));
    }
}

/// The program with a state directory for each VM.
fn command(of: &str, args: &[&str]) -> Command {
    let mut command = Command::new("rtvirtio");
    command.args(args).env("RTVIRTIO_STATE_DIR", format!("{STATE}/{of}"));
    command.env("RTVIRTIO_RUN_DIR", format!("/run/{of}"));
    command
}

fn rtvirtio(of: &str, args: &[&str]) -> Output {
    command(of, args).output().unwrap()
}

fn ok(of: &str, args: &[&str]) -> String {
    let out = rtvirtio(of, args);
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{args:?}: {text}");
    text
}

fn until(mut is_so: impl FnMut() -> bool, why: impl Fn() -> String) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < HANG, "{}", why());
        std::thread::sleep(Duration::from_millis(50));
    }
}

fn online(cpu: u32, online: bool) {
    fs::write(format!("/sys/devices/system/cpu/cpu{cpu}/online"), if online { "1" } else { "0" }).unwrap();
}

/// Interrupts of a virtio disk by the names of their handlers, each with the list of its CPUs.
#[derive(Debug, PartialEq, Eq)]
struct Interrupts(Vec<(u32, String, String)>);

impl Interrupts {
    fn of(disk: &str) -> Self {
        let controller = fs::canonicalize(format!("/sys/block/{disk}/device/..")).unwrap();
        let numbers = fs::read_dir(controller.join("msi_irqs")).unwrap();
        let mut numbers: Vec<u32> =
            numbers.map(|file| file.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
        numbers.sort_unstable();
        let one = |number: u32| {
            let dir = format!("/proc/irq/{number}");
            let names = fs::read_dir(&dir).unwrap().map(|file| file.unwrap().file_name());
            let names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
            let handler = names.into_iter().find(|name| name.starts_with("virtio")).unwrap_or_default();
            let cpus = fs::read_to_string(format!("{dir}/smp_affinity_list")).unwrap();
            (number, handler, cpus.trim().to_owned())
        };
        Self(numbers.into_iter().map(one).collect())
    }

    /// Checks that what can be moved has left these CPUs, and that the kernel has kept the
    /// interrupts of the queues, which it manages.
    fn moved_off(&self, vcpus: &[u32], dry: &str, told: &str) {
        let mut moved = 0;
        for (before, now) in self.0.iter().zip(Self::of("vda").0) {
            let file = format!("/proc/irq/{}/smp_affinity_list", now.0);
            println!("{before:?} -> {now:?}");
            if now.1.ends_with("-config") {
                let cpus = cpu_list(&now.2).unwrap();
                assert!(vcpus.iter().all(|cpu| !cpus.contains(cpu)), "{now:?} {vcpus:?}");
                assert!(dry.contains(&file), "{dry}");
                moved += 1;
            } else {
                assert_eq!(*before, now);
            }
        }
        assert_eq!(moved, 1, "{self:?}");
        assert!(told.contains("the kernel lets no program move them"), "{told}");
        let status = ok("first", &["status"]);
        assert!(status.contains("CPUs of interrupt"), "{status}");
    }
}

#[test]
#[ignore = "runs in the box, started by the test above"]
fn inside_the_box() {
    fs::create_dir_all(format!("{MOUNT}/machine.slice")).unwrap();
    fs::write(format!("{MOUNT}/cgroup.subtree_control"), "+cpu +cpuset").unwrap();
    fs::write(format!("{MOUNT}/machine.slice/cgroup.subtree_control"), "+cpu +cpuset").unwrap();
    let cpus = topology(&Root::default()).unwrap();
    let of = |id: u32| *cpus.iter().find(|cpu| cpu.id == id).unwrap();
    let cores: BTreeSet<u32> = cpus.iter().map(|cpu| cpu.core).collect();
    let nodes: BTreeSet<u32> = cpus.iter().map(|cpu| cpu.node).collect();
    assert_eq!((cpus.len(), cores.len(), nodes.len()), (16, 8, 2), "{cpus:?}");

    // The first VM has a node's cores whole, the second one those of the other node.
    let (first, second) = (Vm::start("first", 4), Vm::start("second", 4));
    let before = [first.cpus(), second.cpus()];
    let whole = "\"whole\"";
    let interrupts = Interrupts::of("vda");
    let on_disk = first.spec_on("/dev/vda", whole);
    let dry = ok("first", &["apply", &on_disk, "--cpu-only", "--dry-run"]);
    assert_eq!(interrupts, Interrupts::of("vda"), "a dry run sets nothing: {dry}");
    let told = ok("first", &["apply", &on_disk, "--cpu-only"]);
    println!("{dry}\n{told}");
    interrupts.moved_off(&first.vcpus(), &dry, &told);
    println!("{}", ok("second", &["apply", &second.spec(whole), "--cpu-only"]));
    let placed = [first.vcpus(), second.vcpus()];
    let groups = placed.clone().map(|vm| {
        let nodes: BTreeSet<u32> = vm.iter().map(|cpu| of(*cpu).node).collect();
        let distinct: BTreeSet<u32> = vm.iter().copied().collect();
        assert_eq!((distinct.len(), nodes.len()), (4, 1), "{vm:?}");
        vm.iter().map(|cpu| of(*cpu).core).collect::<BTreeSet<u32>>()
    });
    assert!(groups[0].is_disjoint(&groups[1]), "{placed:?}");

    // What does not fit is refused, and sets nothing.
    let third = Vm::start("third", 8);
    let of_third = third.cpus();
    let out = rtvirtio("third", &["apply", &third.spec("{ cpus = \"0-15\", whole = true }"), "--cpu-only"]);
    let text = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(!out.status.success() && text.contains("no CPUs for its threads"), "{text}");
    assert!(text.contains("has a vCPU of process"), "{text}");
    assert_eq!(third.cpus(), of_third);
    println!("refused: {text}");

    // A vCPU that comes later gets a CPU of its own, on a core that the VM has; the I/O thread gets
    // those of the main loop. A CPU that goes offline takes no other one away.
    let shared = first.cpus()[0].cpus.clone();
    let mut keeper = command("first", &["keep", &first.spec(whole)]).spawn().unwrap();
    first.plug();
    let is_placed = |of: &ThreadCpus| match of.name.as_str() {
        // One that it inherited may be a single CPU too.
        "CPU 4/TCG" => of.cpus != shared,
        "IO late" => of.cpus == shared,
        _ => false,
    };
    let are_placed = || first.cpus().iter().filter(|thread| is_placed(thread)).count() == 2;
    until(are_placed, || format!("{:?}", first.cpus()));
    keeper.kill().unwrap();
    keeper.wait().unwrap();
    let now = first.vcpus();
    println!("plugged in: {now:?}, the others {shared}");
    assert_eq!((&now[..4], now.len()), (&placed[0][..], 5), "none has moved");
    let own = cpu_list(&shared).unwrap();
    let is_own = |cpu: u32| groups[0].contains(&cpu) || own.iter().any(|id| of(*id).core == cpu);
    assert!(is_own(of(now[4]).core) && !own.contains(&now[4]), "{now:?}");
    assert_eq!(now.iter().collect::<BTreeSet<_>>().len(), 5);
    let gone = *placed[1].iter().find(|cpu| **cpu > 0).unwrap();
    let log = second.dir.join("keep");
    let mut keep = command("second", &["keep", &second.spec(whole)]);
    let mut keeper = keep.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
    let pinned = second.cpus();
    online(gone, false);
    until(|| fs::read_to_string(&log).unwrap().contains("is offline"), || format!("{:?}", second.cpus()));
    let status = String::from_utf8(rtvirtio("second", &["status"]).stdout).unwrap();
    println!("CPU {gone} offline: {:?}\n{status}", second.cpus());
    assert!(status.contains(&format!("CPU {gone} of its vCPUs is offline")), "{status}");
    // Each thread has its CPUs again: this kernel takes them all with one.
    online(gone, true);
    until(|| second.cpus() == pinned, || fs::read_to_string(&log).unwrap());
    keeper.kill().unwrap();
    keeper.wait().unwrap();
    println!("{}", fs::read_to_string(&log).unwrap());
    assert_eq!(second.vcpus(), placed[1]);

    // Everything is as before, also for what came later.
    println!("{}", ok("second", &["revert"]));
    println!("{}", ok("first", &["revert"]));
    assert_eq!(second.cpus(), before[1]);
    assert_eq!(Interrupts::of("vda"), interrupts);
    let all = &before[0][0].cpus;
    let differ: Vec<_> = first.cpus().into_iter().filter(|thread| thread.cpus != *all).collect();
    assert!(differ.is_empty(), "{differ:?}");

    // An end frees the CPUs.
    let mut first = first;
    println!("{}", ok("first", &["apply", &first.spec(whole), "--cpu-only"]));
    first.machine = None;
    println!("{}", ok("second", &["apply", &second.spec(whole), "--cpu-only"]));
    second.vcpus();
    println!("{}", ok("second", &["revert"]));
    assert_eq!(second.cpus(), before[1]);
}
