//! A machine of the box as users have theirs: KVM, vhost-net on a tap, an I/O thread, the PIT in
//! the kernel, a cgroup of its own.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rtvirtio_kernel::{Root, sched, task};
use rtvirtio_testbed::image;
use rtvirtio_vmm::spawn::{Lifetime, spawn};
use rtvirtio_vmm::threads::discover;
use rtvirtio_vmm::{GuestAgent, Qmp, Role, Thread, VmHandle};
use serde_json::Value;

/// The machine's cgroup, as systemd would have made it.
pub const GROUP: &str = "/machine.slice/plc.scope";
const MOUNT: &str = "/sys/fs/cgroup";
/// Printed when the machine stops answering: the test outside starts another box then.
pub const LOST: &str = "the guest is lost";
const QMP: &str = "/run/plc.qmp";
const AGENT: &str = "/run/plc.qga";
const CONSOLE: &str = "/run/plc.console";
const TAP: &str = "rtvirtio0";
const STATE: &str = "/root/state";
/// Boots that are tried: emulated SVM resets about one guest in twenty while it boots.
const TRIES: u32 = 4;
/// More than three times what a boot takes under PREEMPT_RT on two free cores.
const BOOT: Duration = Duration::from_secs(150);
/// The time for any answer of a machine or its guest.
pub const ANSWER: Duration = Duration::from_secs(120);

/// A running machine.
pub struct Plc {
    child: Child,
    agent: Option<GuestAgent>,
}

pub fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

pub fn group_dir() -> String {
    format!("{MOUNT}{GROUP}")
}

fn run_program(args: &[&str]) -> Output {
    Command::new("rtvirtio").args(args).env("RTVIRTIO_STATE_DIR", STATE).output().unwrap()
}

/// Runs the program under test and expects success.
pub fn program(args: &[&str]) -> String {
    let out = run_program(args);
    let said = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(
        out.status.success(),
        "{args:?}: {}\n{said}\n{}",
        out.status,
        String::from_utf8_lossy(&out.stderr)
    );
    said
}

pub fn state_dir() -> &'static Path {
    Path::new(STATE)
}

/// Groups as systemd has them, and a tap with an address of the host.
pub fn prepare_host() {
    fs::create_dir_all(group_dir()).unwrap();
    fs::write(format!("{MOUNT}/machine.slice/cgroup.subtree_control"), "+cpu").unwrap();
    fs::write(format!("{MOUNT}/cgroup.subtree_control"), "+cpuset").unwrap();
}

/// Gives machines CPUs of their own, as a user pins them, or takes them back.
pub fn partition(cpus: Option<&str>) {
    let set = |file: &str, value: &str| {
        let path = format!("{MOUNT}/machine.slice/{file}");
        fs::write(&path, value).unwrap_or_else(|e| panic!("{value} to {path}: {e}"));
    };
    if let Some(cpus) = cpus {
        set("cpuset.cpus", cpus);
        set("cpuset.cpus.partition", "root");
        assert_eq!(read(&format!("{MOUNT}/machine.slice/cpuset.cpus.partition")).trim(), "root");
    } else {
        set("cpuset.cpus.partition", "member");
        // Empty, where threads are, the kernel refuses.
        set("cpuset.cpus", "0-1");
    }
}

/// A spec of the machine; returns its path.
pub fn write_spec(name: &str, keys: &str) -> String {
    let path = format!("/root/{name}.toml");
    let spec = format!(
        "[device]\npath = \"/dev/nullb0\"\n[[vm]]\nname = \"plc\"\nqmp = \"{QMP}\"\n\
         cpu = {{ budget = \"15ms\", period = \"20ms\" }}\n{keys}\n\
         [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
    );
    fs::write(&path, spec).unwrap();
    path
}

/// Every file of the machine's cgroups that a user could have set, and who is in them.
pub fn cgroup_files() -> String {
    let mut out = String::new();
    let mut dirs = vec![Path::new(MOUNT).join("machine.slice")];
    while let Some(dir) = dirs.pop() {
        let mut names: Vec<_> = fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).collect();
        names.sort();
        for path in names {
            let name = path.file_name().unwrap().to_str().unwrap();
            let settings = ["max", "weight", "nice", "burst", "idle", "type", "control", "threads", "procs"];
            if path.is_dir() {
                dirs.push(path);
            } else if settings.iter().any(|s| name.ends_with(s)) {
                writeln!(out, "{}: {:?}", path.display(), fs::read_to_string(&path).ok()).unwrap();
            }
        }
    }
    out
}

impl Plc {
    /// Starts a machine, calls `early` while its guest boots, and waits until the guest answers. A
    /// machine that emulation ended is started again, and what was applied to it put back before.
    pub fn boot<T>(early: impl Fn(&Plc) -> T) -> (Plc, T) {
        for _ in 0..TRIES {
            let mut plc = Plc::start();
            let result = early(&plc);
            if plc.answers_within(BOOT) {
                return (plc, result);
            }
            println!("a guest did not come up; its console ends with {:?}", console_end());
            plc.end();
            program(&["revert"]);
        }
        panic!("{LOST}: none of {TRIES} came up");
    }

    fn start() -> Plc {
        let image = image::ensure(Path::new("/nonexistent"), &|_| ()).unwrap();
        for old in [QMP, AGENT] {
            let _ = fs::remove_file(old);
        }
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-nodefaults", "-no-user-config", "-display", "none", "-name", "plc,debug-threads=on"])
            // The PIT in the kernel has a thread of the kernel for its ticks.
            .args(["-machine", "q35,kernel-irqchip=on", "-accel", "kvm", "-cpu", "max", "-no-reboot"])
            .args(["-m", &format!("{}M", image.memory().0 >> 20)])
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(&image.initrd)
            .args(["-append", "console=ttyS0 quiet panic=-1 reboot=t"])
            .args(["-serial", &format!("file:{CONSOLE}")])
            .args(["-qmp", &format!("unix:{QMP},server=on,wait=off")])
            .args(["-chardev", &format!("socket,id=agent,server=on,wait=off,path={AGENT}")])
            .args(["-device", "virtio-serial-pci"])
            .args(["-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"])
            // A page for what the guest says is urgent.
            .args(["-object", "memory-backend-memfd,id=urgency,size=4K,share=on"])
            .args(["-device", "ivshmem-plain,id=rtvirtio,memdev=urgency"])
            .args(["-object", "iothread,id=disk"])
            .args([
                "-drive",
                "if=none,id=d0,file=/dev/nullb0,format=raw,cache=none,aio=native,file.locking=off",
            ])
            .args(["-device", "virtio-blk-pci,drive=d0,iothread=disk"])
            .args(["-netdev", &format!("tap,id=net0,ifname={TAP},script=no,downscript=no,vhost=on")])
            .args(["-device", "virtio-net-pci,netdev=net0,romfile="])
            .stdin(Stdio::null());
        let procs = File::options().write(true).open(format!("{}/cgroup.procs", group_dir())).unwrap();
        let child = spawn(command, vec![procs], Lifetime::WithParent).unwrap();
        let plc = Plc { child, agent: None };
        let start = Instant::now();
        let all = |roles: &[Role]| {
            let has = |f: fn(&Role) -> bool| roles.iter().any(f);
            has(|r| *r == Role::Vcpu(vec![0])) && has(|r| *r == Role::Vhost) && has(|r| *r == Role::KvmPit)
        };
        while !Path::new(QMP).exists()
            || !all(&plc.discovered().into_iter().map(|t| t.role).collect::<Vec<_>>())
        {
            assert!(start.elapsed() < ANSWER, "threads: {:#?}", plc.discovered());
            std::thread::sleep(Duration::from_millis(100));
        }
        // Its nice value must come back too.
        run("renice", &["-n", "-5", "-p", &plc.pid().to_string()]);
        run("ip", &["addr", "replace", "10.0.9.1/24", "dev", TAP]);
        run("ip", &["link", "set", TAP, "up"]);
        plc
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its threads by names alone.
    fn discovered(&self) -> Vec<Thread> {
        discover(&Root::default(), &VmHandle::of_pid(self.pid())).unwrap_or_default()
    }

    /// What `rtvirtio threads` says; every role that KVM adds must be there.
    pub fn threads(&self) -> Vec<Value> {
        let start = Instant::now();
        let shown: Value = loop {
            let out = run_program(&["threads", "/root/contract.toml", "--json"]);
            if out.status.success() {
                break serde_json::from_slice(&out.stdout).unwrap();
            }
            // On a processor this slow a main loop with its part of a deadline budget may take
            // longer than the program's patience.
            assert!(start.elapsed() < ANSWER, "{}", String::from_utf8_lossy(&out.stderr));
        };
        let threads = shown[0]["threads"].as_array().unwrap().clone();
        let pid = self.pid();
        let one = |kind: &str, name: &str| {
            let found: Vec<&Value> = threads.iter().filter(|t| t["role"]["kind"] == kind).collect();
            let named: Vec<_> = found.iter().filter(|t| t["name"] == name).collect();
            assert_eq!(named.len(), 1, "{kind} {name}: {threads:#?}");
            (*named[0]).clone()
        };
        assert_eq!(one("vcpu", "CPU 0/KVM")["role"]["which"][0], 0);
        assert_eq!(one("io_thread", "IO disk")["role"]["which"], "disk");
        assert_eq!(one("emulator", "qemu-system-x86")["tid"], pid);
        assert_eq!(one("kvm_pit", &format!("kvm-pit/{pid}"))["kernel"], true);
        one("vhost", &format!("vhost-{pid}"));
        threads
    }

    /// What must come back: policy and cgroup of every thread but workers, which come and go, and
    /// KVM's own thread, which may start after the vCPU; and the cgroups' files.
    pub fn snapshot(&self) -> String {
        let mut out = String::new();
        let late = [Role::AioWorker, Role::KvmHugePages];
        for t in self.discovered().into_iter().filter(|t| !late.contains(&t.role)) {
            let cgroups = task::cgroups(&Root::default(), t.pid, t.tid).unwrap();
            writeln!(out, "{} {} {} {:?} {}", t.tid, t.role, sched::get(t.tid).unwrap(), cgroups, t.affinity)
                .unwrap();
        }
        // Workers are in the list of threads.
        let keep = |l: &&str| !l.contains("cgroup.threads");
        out + &cgroup_files().lines().filter(keep).collect::<Vec<_>>().join("\n")
    }

    fn answers_within(&mut self, patience: Duration) -> bool {
        let start = Instant::now();
        let mut told = Duration::ZERO;
        while start.elapsed() < patience && self.child.try_wait().unwrap().is_none() {
            // A box that prints nothing for 75 s counts as hung.
            if start.elapsed() > told + Duration::from_secs(30) {
                told = start.elapsed();
                println!("the guest boots for {:.0} s", told.as_secs_f64());
            }
            if let Ok(agent) = GuestAgent::connect(Path::new(AGENT), Duration::from_secs(5)) {
                self.agent = Some(agent);
                return true;
            }
        }
        false
    }

    /// The thread of its only vCPU.
    pub fn vcpu(&self) -> u32 {
        self.discovered().into_iter().find(|t| t.role == Role::Vcpu(vec![0])).unwrap().tid
    }

    /// Copies a program into the guest.
    pub fn copy_in(&mut self, from: &Path, to: &str) {
        let bytes = fs::read(from).unwrap();
        let written = self.agent.as_mut().unwrap().write_file(to, &bytes);
        written.unwrap_or_else(|e| panic!("{LOST}: {to}: {e}"));
        self.exec(&["chmod", "755", to]);
    }

    /// Runs a program in the guest.
    pub fn exec(&mut self, argv: &[&str]) -> String {
        let agent = self.agent.as_mut().unwrap();
        let out = match agent.exec(argv, ANSWER) {
            Ok(out) => out,
            Err(e) => panic!("{LOST}: {argv:?}: {e}; its console ends with {:?}", console_end()),
        };
        assert!(out.success(), "{argv:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    /// Monitor, guest, disk and vhost-net answer.
    pub fn works(&mut self, when: &str) {
        match Qmp::connect(Path::new(QMP), ANSWER).and_then(|mut qmp| qmp.query_status()) {
            Ok(status) => assert!(status.running, "{when}: {status:?}"),
            Err(e) => panic!("{LOST} {when}: {e}"),
        }
        self.exec(&["dd", "if=/dev/vda", "of=/dev/null", "bs=4k", "count=20", "iflag=direct"]);
        self.exec(&["sh", "-c", "ip addr replace 10.0.9.2/24 dev eth0 && ip link set eth0 up"]);
        let before = self.cpu_time(&Role::Vhost);
        let start = Instant::now();
        // One that is lost while the guest brings its interface up tells nothing.
        let answered = || {
            Command::new("ping").args(["-c", "1", "-W", "2", "10.0.9.2"]).output().unwrap().status.success()
        };
        while !answered() {
            assert!(start.elapsed() < ANSWER, "{when}: the guest's network does not answer");
        }
        let out = Command::new("ping").args(["-c", "10", "-i", "0.1", "10.0.9.2"]).output().unwrap();
        println!("{when}: {}", String::from_utf8_lossy(&out.stdout).lines().last().unwrap());
        assert!(self.cpu_time(&Role::Vhost) > before, "{when}: vhost moved the packets");
    }

    /// A guest that spins at its real-time priority keeps neither its monitor, nor its own disk,
    /// nor the host's programs from answering.
    pub fn spins(&mut self) {
        let vcpu = Role::Vcpu(vec![0]);
        let before = self.cpu_time(&vcpu);
        let agent = self.agent.as_mut().unwrap();
        agent.spawn(&["timeout", "6", "sh", "-c", "while :; do :; done"]).unwrap();
        std::thread::sleep(Duration::from_secs(1));
        let qmp = Qmp::connect(Path::new(QMP), ANSWER).and_then(|mut qmp| qmp.query_status());
        assert!(qmp.unwrap().running);
        run("sh", &["-c", "ls /proc >/dev/null"]);
        self.exec(&["dd", "if=/dev/vda", "of=/dev/null", "bs=4k", "count=20", "iflag=direct"]);
        let start = Instant::now();
        while self.cpu_time(&vcpu) - before < Duration::from_millis(300) {
            assert!(start.elapsed() < ANSWER, "the guest did not spin");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn cpu_time(&self, role: &Role) -> Duration {
        self.discovered().into_iter().find(|t| t.role == *role).unwrap().cpu_time
    }

    /// Kills it, and returns what its cgroups are like without it.
    pub fn end(mut self) -> String {
        self.kill();
        cgroup_files()
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Plc {
    fn drop(&mut self) {
        self.kill();
    }
}

fn console_end() -> String {
    let text = fs::read(CONSOLE).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
    text.chars().skip(text.chars().count().saturating_sub(400)).collect()
}

fn run(name: &str, args: &[&str]) {
    let out = Command::new(name).args(args).output().unwrap();
    assert!(out.status.success(), "{name} {args:?}: {out:?}");
}
