//! SIGTERM in the first pass of a service with many contracts, and while a VM's many threads are
//! taken in: it ends between two steps, and each setting that it has touched is in a journal. The
//! VMs are processes with a vCPU's name.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use common::Rig;
use rtvirtio_kernel::process::Process;
use rtvirtio_kernel::sched::{self, Attr, Policy};
use rtvirtio_kernel::{Root, task};
use rtvirtio_testkit::site::number;
use rtvirtio_testkit::{HANG, Need, has, skip};
use rustix::process::Signal;

/// A process whose one thread has the name of a vCPU; killed when this is dropped.
struct ProcessVm(String, Child);

impl Drop for ProcessVm {
    fn drop(&mut self) {
        let _ = self.1.kill();
        let _ = self.1.wait();
    }
}

impl ProcessVm {
    fn start(rig: &Rig, i: u64) -> Self {
        let program = rig.site.dir.path().join("vcpu0");
        if !program.exists() {
            symlink("/bin/sleep", &program).unwrap();
        }
        let child = Command::new(program).arg("1000").stdin(Stdio::null()).spawn().unwrap();
        Self(rig.site.vm(&format!("s{i}")), child)
    }

    /// A VM whose vCPU never sleeps.
    fn busy(rig: &Rig) -> Self {
        let dir = rig.site.dir.path().join("busy");
        fs::create_dir(&dir).unwrap();
        symlink("/bin/sh", dir.join("vcpu0")).unwrap();
        let mut command = Command::new(dir.join("vcpu0"));
        command.args(["-c", "while :; do :; done"]).stdin(Stdio::null());
        Self(rig.site.vm("busy"), command.spawn().unwrap())
    }

    /// A VM with so many threads of the name that QEMU gives its workers.
    fn of_threads(rig: &Rig, threads: u64) -> Self {
        const SCRIPT: &str = "import sys, threading
def name(text):
    with open('/proc/self/comm', 'w') as comm:
        comm.write(text)
threading.stack_size(1 << 16)
wait = threading.Event().wait
name('vcpu0')
threading.Thread(target=wait).start()
name('worker')
for _ in range(int(sys.argv[1])):
    threading.Thread(target=wait).start()
print('ready', flush=True)
wait()
";
        let mut command = Command::new("python3");
        command.args(["-c", SCRIPT, &threads.to_string()]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut vm = Self(rig.site.vm("threads"), command.spawn().unwrap());
        let mut line = String::new();
        BufReader::new(vm.1.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        vm
    }

    fn contract(&self) -> String {
        format!(
            "[[vm]]\nname = \"{}\"\npid = {}\ncpu = {{ budget = \"1ms\", period = \"1s\" }}\n[[vm.task]]\nname = \"t\"\n\
             op = \"read\"\nblock = \"4KiB\"\n",
            self.0,
            self.1.id()
        )
    }

    fn group(&self) -> PathBuf {
        Path::new("/sys/fs/cgroup/cpu").join(format!("rtvirtio-{}", self.0))
    }

    /// Policy and groups of its first thread.
    fn settings(&self) -> (String, String) {
        self.settings_of(self.1.id())
    }

    fn settings_of(&self, tid: u32) -> (String, String) {
        let groups = task::cgroups(&Root::default(), self.1.id(), tid).unwrap();
        (sched::get(tid).unwrap().to_string(), format!("{groups:?}"))
    }

    /// The same of all its threads.
    fn all_settings(&self) -> BTreeMap<u32, (String, String)> {
        let tids = task::tids(&Root::default(), self.1.id()).unwrap();
        tids.into_iter().map(|tid| (tid, self.settings_of(tid))).collect()
    }

    /// Threads in the group of its contract.
    fn threads_in_group(&self) -> usize {
        fs::read_to_string(self.group().join("tasks")).map_or(0, |tasks| tasks.lines().count())
    }
}

/// VMs with a journal.
fn journals(rig: &Rig) -> Vec<String> {
    let all = fs::read_dir(rig.site.state_dir().join("contracts")).into_iter().flatten().flatten();
    let with = all.filter(|entry| entry.path().join(rtvirtio_apply::JOURNAL_FILE).exists());
    with.filter_map(|e| e.file_name().to_str()?.strip_prefix("vm-").map(str::to_owned)).collect()
}

fn ended(rig: &mut Rig) -> ExitStatus {
    let begin = Instant::now();
    loop {
        if let Some(status) = rig.service.as_mut().unwrap().0.try_wait().unwrap() {
            return status;
        }
        assert!(begin.elapsed() < HANG, "it does not end: {}", rig.log());
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn sigterm_in_the_first_pass_ends_it_and_leaves_nothing_half_set() {
    let test = "sigterm_in_the_first_pass_ends_it_and_leaves_nothing_half_set";
    if !has(test, &[Need::Root, Need::RT_GROUPS]) {
        return;
    }
    let n = number("RTVIRTIO_VMS", 100);
    let mut rig = Rig::new();
    let vms: Vec<ProcessVm> = (0..n).map(|i| ProcessVm::start(&rig, i)).collect();
    let settings = || vms.iter().map(|vm| (vm.0.clone(), vm.settings())).collect::<BTreeMap<_, _>>();
    rtvirtio_testkit::site::wait_for("the names of all", || {
        vms.iter().all(|vm| {
            fs::read_to_string(format!("/proc/{}/comm", vm.1.id())).is_ok_and(|name| name.trim() == "vcpu0")
        })
    });
    let before = settings();
    for vm in &vms {
        let spec = format!("[device]\npath = \"/dev/sdz\"\n{}", vm.contract());
        fs::write(rig.contracts().join(format!("{}.toml", vm.0)), spec).unwrap();
    }

    let notify = rig.site.dir.path().join("notify");
    let socket = UnixDatagram::bind(&notify).unwrap();
    socket.set_read_timeout(Some(HANG)).unwrap();
    let mut command = rig.command(&[]);
    command.env("NOTIFY_SOCKET", &notify);
    rig.run(command);
    let mut text = [0; 64];
    let read = socket.recv(&mut text).unwrap();
    assert_eq!(text[..read].trim_ascii(), b"READY=1");
    rtvirtio_testkit::site::wait_for("the first contracts", || journals(&rig).len() >= 3);
    let pid = rig.service.as_ref().unwrap().0.id();
    Process::open(pid).unwrap().unwrap().signal(Signal::TERM).unwrap();
    let status = ended(&mut rig);
    assert!(status.success(), "{status}: {}", rig.log());

    let journaled = journals(&rig);
    println!("{} of {n} contracts were in force at SIGTERM", journaled.len());
    for (vm, now) in vms.iter().zip(settings()) {
        let is_touched = vm.group().exists() || vm.settings() != before[&vm.0];
        assert_eq!(is_touched, journaled.contains(&vm.0), "{}: {now:?}", vm.0);
    }
    // None of them is cut off: a step that was begun was finished, unless it took too long.
    let is_cut = rig.log().contains("in the middle of a step");
    let (_, status) = rig.site.json(&["status"]);
    let in_force = status["contracts_in_force"].as_array().map_or(0, Vec::len);
    assert!(is_cut || in_force == journaled.len(), "{status:#}");
    let (code, reverted) = rig.site.json(&["revert"]);
    assert_eq!((code, &reverted["done"]), (0, &true.into()), "{reverted:#}");
    assert_eq!(settings(), before);
    assert!(journals(&rig).is_empty() && vms.iter().all(|vm| !vm.group().exists()));
}

/// A service that has begun with the contract of a VM of thousands of threads: with the settings of
/// these threads before, and the contract's file.
fn vm_of_threads() -> (Rig, ProcessVm, BTreeMap<u32, (String, String)>, PathBuf) {
    let n = number("RTVIRTIO_THREADS", 2_000);
    let mut rig = Rig::new();
    let vm = ProcessVm::of_threads(&rig, n);
    let before = vm.all_settings();
    assert!(before.len() as u64 > n);
    let file = rig.contracts().join("threads.toml");
    fs::write(&file, format!("[device]\npath = \"/dev/sdz\"\n{}", vm.contract())).unwrap();
    rig.start(&[]);
    (rig, vm, before, file)
}

#[test]
fn sigterm_while_threads_are_taken_in_leaves_nothing_and_a_restart_goes_on() {
    let test = "sigterm_while_threads_are_taken_in_leaves_nothing_and_a_restart_goes_on";
    if !has(test, &[Need::Root, Need::RT_GROUPS, Need::Program("python3")]) {
        return;
    }
    let (mut rig, vm, before, file) = vm_of_threads();
    let pid = rig.service.as_ref().unwrap().0.id();
    rtvirtio_testkit::site::wait_for("the first threads", || vm.threads_in_group() > 300);
    Process::open(pid).unwrap().unwrap().signal(Signal::TERM).unwrap();
    let status = ended(&mut rig);
    assert!(status.success(), "{status}: {}", rig.log());
    println!("{} of {} threads were in the group at SIGTERM", vm.threads_in_group(), before.len());
    let (code, reverted) = rig.site.json(&["revert"]);
    assert_eq!((code, &reverted["done"]), (0, &true.into()), "{reverted:#}");
    assert!(vm.all_settings() == before && journals(&rig).is_empty() && !vm.group().exists());

    // Cut off a second time, it is gone on with instead.
    rig.start(&[]);
    rtvirtio_testkit::site::wait_for("the first threads again", || vm.threads_in_group() > 300);
    rig.kill();
    rig.start(&[]);
    rig.wait_state(&vm.0, "in_force");
    assert_eq!(vm.threads_in_group(), before.len());
    fs::remove_file(&file).unwrap();
    rtvirtio_testkit::site::wait_for("the end of the contract", || journals(&rig).is_empty());
    assert!(vm.all_settings() == before && !vm.group().exists());
}

/// A revert of thousands of threads is one step, and may take longer than the service has to end.
#[test]
fn sigterm_while_threads_are_put_back_loses_nothing() {
    let test = "sigterm_while_threads_are_put_back_loses_nothing";
    if !has(test, &[Need::Root, Need::RT_GROUPS, Need::Program("python3")]) {
        return;
    }
    let (mut rig, vm, before, file) = vm_of_threads();
    rig.wait_state(&vm.0, "in_force");
    assert_eq!(vm.threads_in_group(), before.len());
    fs::remove_file(&file).unwrap();
    // Policies come back first.
    let fifo = |of: &BTreeMap<u32, (String, String)>| {
        of.values().filter(|(policy, _)| policy.contains("fifo")).count()
    };
    rtvirtio_testkit::site::wait_for("the first threads", || fifo(&vm.all_settings()) < before.len());
    let begin = Instant::now();
    let pid = rig.service.as_ref().unwrap().0.id();
    Process::open(pid).unwrap().unwrap().signal(Signal::TERM).unwrap();
    let status = ended(&mut rig);
    println!(
        "it ended {} ms after SIGTERM, {} threads still had ours",
        begin.elapsed().as_millis(),
        fifo(&vm.all_settings())
    );
    assert!(status.success(), "{status}: {}", rig.log());
    // The contract is gone, so the next start finishes it.
    rig.start(&[]);
    rtvirtio_testkit::site::wait_for("the end of the contract", || journals(&rig).is_empty());
    assert!(vm.all_settings() == before && !vm.group().exists());
}

/// SCHED_DEADLINE is the mechanism where no cgroup has a budget. A thread that is taken out of it
/// throttled must not get another reservation before the kernel has forgotten the first.
#[test]
fn the_end_waits_until_the_kernel_has_forgotten_a_reservation() {
    let test = "the_end_waits_until_the_kernel_has_forgotten_a_reservation";
    if !has(test, &[Need::Root, Need::RT_GROUPS, Need::Program("unshare")]) {
        return;
    }
    let mut rig = Rig::new();
    let sleeper = ProcessVm::start(&rig, 0);
    if let Err(e) = sched::set(sleeper.1.id(), &Attr::deadline(1_000_000, 200_000_000)) {
        return skip(test, &format!("no SCHED_DEADLINE: {e}"));
    }
    drop(sleeper);
    let vm = ProcessVm::busy(&rig);
    let file = rig.contracts().join("busy.toml");
    let contract = vm.contract().replace("\"1s\"", "\"200ms\"");
    fs::write(&file, format!("[device]\npath = \"/dev/sdz\"\n{contract}")).unwrap();
    let service = rig.command(&[]);
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private", "sh", "-c"])
        .args(["umount --lazy /sys/fs/cgroup/cpu && exec \"$@\"", "sh"])
        .arg(service.get_program())
        .args(service.get_args())
        .envs(service.get_envs().filter_map(|(name, value)| Some((name, value?))))
        .stdin(Stdio::null());
    rig.run(command);
    let has_reservation = || sched::get(vm.1.id()).unwrap().policy == Policy::Deadline;
    rtvirtio_testkit::site::wait_for("the contract", has_reservation);
    fs::remove_file(&file).unwrap();
    let begin = Instant::now();
    let mut had_until = begin;
    loop {
        let now = Instant::now();
        if !has_reservation() {
            break;
        }
        had_until = now;
        assert!(begin.elapsed() < HANG, "it is not put back: {}", rig.log());
        std::thread::sleep(Duration::from_millis(1));
    }
    let pid = rig.service.as_ref().unwrap().0.id();
    Process::open(pid).unwrap().unwrap().signal(Signal::TERM).unwrap();
    let status = ended(&mut rig);
    println!("it ended {} ms after the reservation was last seen", had_until.elapsed().as_millis());
    assert!(status.success(), "{status}: {}", rig.log());
    // A period, and ten more for a tick of the kernel beyond 1 ms of runtime.
    assert!(had_until.elapsed() >= Duration::from_millis(2_200), "{:?}", had_until.elapsed());
    assert!(!has_reservation() && journals(&rig).is_empty());
}
