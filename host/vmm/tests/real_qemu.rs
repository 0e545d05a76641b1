//! The monitor client against a real QEMU. Needs neither root nor a guest image: the machine stays
//! in its firmware.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rtvirtio_kernel::sched::Policy;
use rtvirtio_kernel::{Root, process};
use rtvirtio_vmm::probe::QEMU;
use rtvirtio_vmm::spawn::{Lifetime, spawn};
use rtvirtio_vmm::threads::{Named, discover};
use rtvirtio_vmm::{GuestAgent, Qmp, Role, VmHandle, VmmError, Watcher};

const LIMIT: Duration = rtvirtio_testkit::HANG;

struct Machine {
    child: Child,
    dir: tempfile::TempDir,
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts a machine without a guest, or reports why the test is skipped.
fn machine(test: &str) -> Option<Machine> {
    if Command::new(QEMU).arg("--version").stdout(Stdio::null()).status().is_err() {
        rtvirtio_testkit::skip(test, &format!("no {QEMU}"));
        return None;
    }
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let mut command = Command::new(QEMU);
    command
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-accel", "tcg"])
        .args(["-smp", "2", "-object", "iothread,id=io0", "-name", "probe,debug-threads=on"])
        .args(["-device", "virtio-serial-pci"])
        .args(["-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"])
        .arg("-chardev")
        .arg(format!("socket,id=agent,server=on,wait=off,path={}", dir.path().join("qga").display()))
        .arg("-qmp")
        .arg(format!("unix:{},server=on,wait=off", dir.path().join("qmp").display()))
        .stdin(Stdio::null());
    let child = spawn(command, Vec::new(), Lifetime::WithParent).unwrap();
    let machine = Machine { child, dir };
    let start = Instant::now();
    // The path exists from bind(2) on, but no client can connect before listen(2).
    while let Err(error) = Qmp::connect(&machine.dir.path().join("qmp"), LIMIT) {
        assert!(start.elapsed() < LIMIT, "QEMU's monitor does not answer: {error}");
        thread::sleep(Duration::from_millis(10));
    }
    Some(machine)
}

fn thread_name(pid: u32, tid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/task/{tid}/comm")).unwrap().trim().to_owned()
}

#[test]
fn all_commands() {
    let Some(mut machine) = machine("all_commands") else { return };
    let socket = machine.dir.path().join("qmp");
    let mut qmp = Qmp::connect(&socket, LIMIT).unwrap();
    let pid = machine.child.id();
    assert!(qmp.query_status().unwrap().running);
    assert!(qmp.version().qemu.major >= 7);
    assert!(!qmp.query_kvm().unwrap().enabled);
    assert!(process::serves(&Root::default(), pid, &socket).unwrap());
    assert!(!process::serves(&Root::default(), pid, &machine.dir.path().join("other")).unwrap());
    assert!(
        !process::serves(&Root::default(), std::process::id(), &socket).unwrap(),
        "we are a client of it"
    );
    // The monitor's thread ids agree with the kernel's.
    let cpus = qmp.query_cpus_fast().unwrap();
    assert_eq!(cpus.len(), 2);
    for cpu in cpus {
        assert!(thread_name(pid, cpu.thread_id).starts_with(&format!("CPU {}/TCG", cpu.cpu_index)));
    }
    let threads = qmp.query_iothreads().unwrap();
    assert_eq!(threads.len(), 1);
    assert_eq!(thread_name(pid, threads[0].thread_id), "IO io0");
    assert!(matches!(qmp.execute("no-such-command", None), Err(VmmError::Refused { .. })));
    qmp.execute("stop", None).unwrap();
    assert_eq!(qmp.query_status().unwrap().status, "paused");
    qmp.execute("cont", None).unwrap();
    assert_eq!(qmp.events_skipped(), 2);
    qmp.execute("system_powerdown", None).unwrap();
    qmp.quit().unwrap();
    drop(qmp);
    assert!(machine.child.wait().unwrap().success());
}

#[test]
fn second_client_is_reported() {
    let Some(machine) = machine("second_client_is_reported") else { return };
    let socket = machine.dir.path().join("qmp");
    let _first = Qmp::connect(&socket, LIMIT).unwrap();
    let start = Instant::now();
    // The second client waits in the listen queue; when it is full, others cannot connect.
    for _ in 0..3 {
        let error = Qmp::connect(&socket, Duration::from_millis(200)).unwrap_err();
        assert!(error.is_timeout(), "{error}");
    }
    assert!(start.elapsed() < LIMIT);
}

#[test]
fn killed_machine_is_reported_as_closed() {
    let Some(mut machine) = machine("killed_machine_is_told_as_closed") else { return };
    let socket = machine.dir.path().join("qmp");
    let mut qmp = Qmp::connect(&socket, LIMIT).unwrap();
    machine.child.kill().unwrap();
    machine.child.wait().unwrap();
    let error = qmp.query_status().unwrap_err();
    assert!(error.is_closed(), "{error}");
}

#[test]
fn guest_without_an_agent_times_out() {
    let Some(machine) = machine("guest_without_an_agent_times_out") else { return };
    let start = Instant::now();
    let error =
        GuestAgent::connect(Path::new(&machine.dir.path().join("qga")), Duration::from_secs(1)).unwrap_err();
    assert!(error.is_timeout() && error.to_string().contains("1000 ms"), "{error}");
    assert!(start.elapsed() < LIMIT);
}

/// All threads of a real machine with their roles, by the monitor and by names alone; a short-lived
/// worker is detected.
#[test]
fn threads_of_a_machine_with_their_roles() {
    let Some(machine) = machine("threads_of_a_machine_with_their_roles") else { return };
    let root = Root::default();
    let pid = machine.child.id();
    let mut qmp = Qmp::connect(&machine.dir.path().join("qmp"), LIMIT).unwrap();
    let named = Named::ask(&mut qmp).unwrap();
    assert_eq!(process::of_thread(&root, named.any_thread().unwrap()).unwrap(), pid);
    let known = VmHandle { named, ..VmHandle::of_pid(pid) };
    for vm in [known.clone(), VmHandle::of_pid(pid)] {
        let found = discover(&root, &vm).unwrap();
        let count = |role: &Role| found.iter().filter(|t| t.role == *role).count();
        for role in [
            Role::Emulator,
            Role::Vcpu(vec![0]),
            Role::Vcpu(vec![1]),
            Role::IoThread("io0".into()),
            Role::Rcu,
        ] {
            assert_eq!(count(&role), 1, "{role}: {found:#?}");
        }
        assert_eq!(found.len(), fs::read_dir(format!("/proc/{pid}/task")).unwrap().count());
        assert!(found.iter().all(|t| t.policy == Some(Policy::Other) && t.reset_on_fork == Some(false)));
    }
    let mut watcher = Watcher::new(known);
    watcher.poll(&root, Instant::now()).unwrap();
    // A new I/O thread is one of the threads that appear in a running machine.
    let object = serde_json::json!({ "qom-type": "iothread", "id": "late" });
    qmp.execute("object-add", Some(object)).unwrap();
    let changes = watcher.poll(&root, Instant::now()).unwrap();
    let new: Vec<_> = changes.appeared.iter().map(|a| a.thread.role.clone()).collect();
    assert_eq!(new, [Role::IoThread("late".into())]);
    let begin = Instant::now();
    qmp.execute("object-del", Some(serde_json::json!({ "id": "late" }))).unwrap();
    // The monitor answers before the thread has ended.
    let is_gone = |watcher: &mut Watcher| {
        let gone = watcher.poll(&root, Instant::now()).unwrap().gone;
        gone.iter().any(|t| t.role == Role::IoThread("late".into()))
    };
    while !is_gone(&mut watcher) {
        assert!(begin.elapsed() < LIMIT, "the thread is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}
