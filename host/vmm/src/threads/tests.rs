use std::fs;
use std::time::Instant;

use super::*;

/// Simulated `/proc` below a directory.
struct Proc {
    _dir: tempfile::TempDir,
    root: Root,
}

const KERNEL: u64 = 0x0020_8040;
const USER: u64 = 0x0040_0040;

impl Proc {
    fn new() -> Self {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        Self { _dir: dir, root }
    }

    fn put(&self, path: &str, text: &str) {
        let path = self.root.at(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn task(&self, pid: u32, tid: u32, name: &str, flags: u64, start: u64) {
        let dir = format!("/proc/{pid}/task/{tid}");
        let stat = format!(
            "{tid} ({name}) S 1 1 1 0 -1 {flags} 0 0 0 0 5 5 0 0 20 0 1 0 {start} 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 1 50 1 0 0 0\n"
        );
        self.put(&format!("{dir}/stat"), &stat);
        self.put(&format!("{dir}/status"), &format!("Tgid:\t{pid}\nCpus_allowed_list:\t0-1\n"));
        self.put(&format!("{dir}/cgroup"), "1:cpu:/vm\n0::/\n");
        if pid == tid {
            self.put(&format!("/proc/{pid}/comm"), &format!("{name}\n"));
            self.put(&format!("/proc/{pid}/status"), &format!("Tgid:\t{pid}\n"));
        }
    }

    fn gone(&self, path: &str) {
        fs::remove_dir_all(self.root.at(path)).unwrap();
    }

    /// A VM under KVM on an old kernel: vhost is a kernel thread.
    fn vm(&self) -> VmHandle {
        for (tid, name) in [
            (100, "qemu-system-x86"),
            (101, "qemu-system-x86"),
            (102, "IO io0"),
            (103, "CPU 0/KVM"),
            (104, "CPU 1/KVM"),
            (105, "worker"),
            (106, "kvm-nx-lpage-re"),
            (107, "iou-wrk-102"),
            (108, "vhost-100"),
            (109, "IO mon_iothread"),
            (110, "unheard of"),
        ] {
            self.task(100, tid, name, USER, u64::from(tid));
        }
        self.task(2, 2, "kthreadd", KERNEL, 0);
        self.task(200, 200, "vhost-103", KERNEL, 200);
        self.task(201, 201, "kvm-pit/100", KERNEL, 201);
        self.task(202, 202, "vhost-999", KERNEL, 202);
        self.task(203, 203, "kvm-nx-lpage-recovery-100", KERNEL, 203);
        self.task(204, 204, "vhost-100", USER, 204);
        VmHandle::of_pid(100)
    }
}

fn roles(threads: &[Thread]) -> Vec<(u32, String)> {
    threads.iter().map(|t| (t.tid, t.role.to_string())).collect()
}

#[test]
fn every_thread_has_its_role_by_name() {
    let proc = Proc::new();
    let vm = proc.vm();
    let found = discover(&proc.root, &vm).unwrap();
    let expected = [
        (100, "emulator"),
        (101, "rcu"),
        (102, "iothread io0"),
        (103, "vcpu 0"),
        (104, "vcpu 1"),
        (105, "aio worker"),
        (106, "kvm huge pages"),
        (107, "io_uring worker"),
        (108, "vhost"),
        (109, "iothread mon_iothread"),
        (110, "other"),
        // A user's process with such a name (204) and another VM's (202) are left out.
        (200, "vhost"),
        (201, "kvm-pit"),
        (203, "kvm huge pages"),
    ];
    assert_eq!(roles(&found), expected.map(|(tid, role)| (tid, role.to_owned())));
    let vcpu = &found[3];
    assert_eq!((vcpu.policy, vcpu.priority, vcpu.kernel), (Some(Policy::Fifo), 50, false));
    assert_eq!((vcpu.scheduling(), vcpu.affinity.as_str()), ("fifo 50".to_owned(), "0-1"));
    assert_eq!(vcpu.cgroup("cpu").unwrap().to_str(), Some("/vm"));
    assert_eq!(vcpu.cgroup("").unwrap().to_str(), Some("/"));
    assert_eq!((vcpu.cgroup("blkio"), vcpu.cpu_time), (None, Duration::from_millis(100)));
    assert!(found.iter().filter(|t| t.kernel).map(|t| t.tid).eq([200, 201, 203]));
}

/// Without `debug-threads=on` all threads have one name; the monitor's reply suffices, and takes
/// precedence over any name.
#[test]
fn the_monitors_word_goes_before_names() {
    let proc = Proc::new();
    for tid in 99..104 {
        proc.task(100, tid, "qemu-system-x86", USER, u64::from(tid != 100));
    }
    proc.task(100, 104, "CPU 7/KVM", USER, 1);
    let blind = discover(&proc.root, &VmHandle::of_pid(100)).unwrap();
    assert_eq!(blind.iter().filter(|t| t.role == Role::Other).count(), 3);
    let named = Named {
        vcpus: BTreeMap::from([(101, vec![0, 1])]),
        iothreads: BTreeMap::from([(102, "fast".to_owned()), (104, "liar".to_owned())]),
    };
    let vm = VmHandle { named, ..VmHandle::of_pid(100) };
    let roles = roles(&discover(&proc.root, &vm).unwrap());
    let expected = ["rcu", "emulator", "vcpu 0,1", "iothread fast", "other", "iothread liar"];
    assert!(roles.iter().map(|r| r.1.as_str()).eq(expected), "{roles:?}");
    assert_eq!(process::of_thread(&proc.root, 100).unwrap(), 100);
}

#[test]
fn a_vm_that_ended_is_reported_and_a_thread_that_ended_is_not() {
    let proc = Proc::new();
    let vm = proc.vm();
    // The directory is listed, but its files are gone: the moment between listing and reading.
    fs::remove_file(proc.root.at("/proc/100/task/105/stat")).unwrap();
    fs::remove_file(proc.root.at("/proc/100/task/110/cgroup")).unwrap();
    fs::remove_file(proc.root.at("/proc/200/task/200/stat")).unwrap();
    let found = discover(&proc.root, &vm).unwrap();
    assert_eq!(found.len(), 11);
    proc.gone("/proc/100");
    assert!(discover(&proc.root, &vm).unwrap_err().is_gone());
}

#[test]
fn the_watcher_takes_in_what_appears() {
    let proc = Proc::new();
    let mut watcher = Watcher::new(proc.vm());
    let start = Instant::now();
    fs::write(proc.root.at("/proc/100/task/110/stat"), "110 (cut off").unwrap();
    assert!(watcher.poll(&proc.root, start).is_err() && !watcher.has_polled());
    proc.task(100, 110, "unheard of", USER, 110);
    let first = watcher.poll(&proc.root, start).unwrap();
    assert_eq!((first.appeared.len(), first.gone.len()), (14, 0));
    assert!(first.appeared.iter().all(|a| a.late == Duration::ZERO));
    let at = |ms| start + Duration::from_millis(ms);
    assert_eq!(watcher.poll(&proc.root, at(100)).unwrap(), Changes::default());

    proc.task(100, 120, "worker", USER, 500);
    proc.task(220, 220, "vhost-104", KERNEL, 501);
    proc.gone("/proc/100/task/105");
    let next = watcher.poll(&proc.root, at(250)).unwrap();
    let roles: Vec<_> = next.appeared.iter().map(|a| (a.thread.tid, a.thread.role.clone(), a.late)).collect();
    let late = Duration::from_millis(150);
    assert_eq!(roles, [(120, Role::AioWorker, late), (220, Role::Vhost, late)]);
    assert!(next.gone.iter().map(|t| t.tid).eq([105]));

    // The id is reused by another thread: one ended, one appeared.
    proc.task(100, 120, "worker", USER, 900);
    let again = watcher.poll(&proc.root, at(300)).unwrap();
    assert_eq!((again.appeared.len(), again.gone.len(), again.gone[0].start), (1, 1, 500));

    // A poll that fails shows nothing: new threads may exist since the one before it.
    fs::write(proc.root.at("/proc/100/task/110/stat"), "110 (cut off").unwrap();
    assert!(watcher.poll(&proc.root, at(350)).is_err());
    proc.task(100, 110, "unheard of", USER, 110);
    proc.task(100, 121, "worker", USER, 901);
    let next = watcher.poll(&proc.root, at(360)).unwrap();
    assert_eq!((next.appeared.len(), next.appeared[0].late), (1, Duration::from_millis(60)));

    proc.gone("/proc/100");
    for pid in [200, 201, 203, 220] {
        proc.gone(&format!("/proc/{pid}"));
    }
    let end = watcher.poll(&proc.root, at(400)).unwrap();
    assert_eq!((end.appeared.len(), watcher.threads().count()), (0, 0));
    assert_eq!(end.gone.len(), 16);
}

/// VMMs other than QEMU have fixed names for their threads; a device's id may be the user's choice.
#[test]
fn threads_of_other_vmms_are_known_by_their_names() {
    let of = |threads: &[(u32, &str)]| {
        let proc = Proc::new();
        for (tid, name) in threads {
            proc.task(100, *tid, name, USER, u64::from(*tid));
        }
        let found = discover(&proc.root, &VmHandle::of_pid(100)).unwrap();
        found.iter().map(|t| t.role.to_string()).collect::<Vec<_>>()
    };
    let cloud_hypervisor = of(&[
        (100, "cloud-hyperviso"),
        (101, "vmm"),
        (102, "http-server"),
        (103, "vcpu0"),
        (104, "vcpu11"),
        (105, "_disk0_q0"),
        (106, "_net1_qp0"),
        (107, "data_q1"),
        (108, "_rng"),
        (109, "event-monitor"),
    ]);
    let expected = [
        "emulator",
        "emulator",
        "other",
        "vcpu 0",
        "vcpu 11",
        "iothread _disk0_q0",
        "iothread _net1_qp0",
        "iothread data_q1",
        "iothread _rng",
        "other",
    ];
    assert_eq!(cloud_hypervisor, expected);
    let firecracker = of(&[(100, "firecracker"), (101, "fc_api"), (102, "fc_vcpu 0"), (103, "fc_vcpu 1")]);
    assert_eq!(firecracker, ["emulator", "other", "vcpu 0", "vcpu 1"]);
    // A second thread with the main one's name is an RCU thread in QEMU only.
    let crosvm = of(&[(100, "crosvm"), (101, "crosvm"), (102, "crosvm_vcpu0")]);
    assert_eq!(crosvm, ["emulator", "other", "vcpu 0"]);
    // Started under another name, as QEMU with `-name process=plc`.
    let renamed = of(&[(100, "plc"), (101, "CPU 0/KVM"), (102, "data_q1")]);
    assert_eq!(renamed, ["emulator", "vcpu 0", "other"]);
    // Names that only look like these.
    let others = of(&[(100, "sh"), (101, "vcpux"), (102, "fc_vcpu"), (103, "_disk0_q0"), (104, "vmm")]);
    assert_eq!(others, ["other"; 5]);
}
