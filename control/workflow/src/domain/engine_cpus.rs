//! Threads of the I/O domain among the other threads of a VM with `cores`: those that serve its
//! disks and no other VM's.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_apply::{Target, Write};
use rtvirtio_domain_protocol::{Command, Status};
use rtvirtio_kernel::text::cpu_ranges;
use rtvirtio_kernel::{HostError, Root, cpuset, process as processes, task, unless_gone};

use super::client::{self, ANSWER_TIMEOUT, PROGRAM, connect};
use super::process;
use crate::contracts::VmCpu;
use crate::dirs::Dirs;
use crate::error::{Context as _, Result, ensure};
use crate::progress::Progress;
use crate::started::StartedVm;

/// Most bytes of a thread's name that the kernel keeps.
const NAME: usize = 15;
/// Reason against a process whose process ids are not ours.
const OTHER_NAMESPACE: &str = "its process is in another PID namespace";

/// The writes that give the I/O domain's threads for these VMs' disks the CPUs of the VMs' other
/// threads. What stays where it is is reported, and hinders nothing.
pub(crate) fn writes(held: &[VmCpu], vms: &[StartedVm], dirs: &Dirs, progress: &dyn Progress) -> Vec<Write> {
    if held.iter().all(|v| v.cores.is_none()) {
        return Vec::new();
    }
    let root = Root::default();
    let (pid, status) = match running(&root, dirs) {
        Ok(None) => return Vec::new(),
        Ok(Some(found)) => found,
        Err(e) => {
            progress.warn(&format!("threads of the I/O domain stay on their CPUs: {e:#}"));
            return Vec::new();
        }
    };
    let mut writes = Vec::new();
    for of in held {
        let (Some(cores), Some(vm)) = (&of.cores, vms.iter().find(|vm| vm.vm == of.vm)) else { continue };
        let pids: BTreeSet<u32> = vm.processes.iter().map(|process| process.pid).collect();
        let (service, devices) = (cores.service(), devices(&status, &pids));
        // On the vCPUs' CPUs it would have neither budget nor policy.
        if cores.placement.service.is_empty() && !devices.is_empty() {
            progress.step(&format!(
                "{}: threads of the I/O domain stay on their CPUs: its other threads have none of their own",
                of.vm
            ));
            continue;
        }
        for (device, is_alone) in devices {
            let thread = if is_alone {
                thread(&root, pid, device, &service).unwrap_or_else(|e| Err(e.to_string()))
            } else {
                Err("serves other VMs too, or has sockets for them".to_owned())
            };
            let name = format!("thread {device} of the I/O domain");
            match thread {
                Ok((tid, start)) => {
                    let (knob, cpus) = (format!("CPUs of {name} ({})", of.vm), cpu_ranges(&service));
                    writes.push(Write::new(knob, Target::affinity(pid, tid, start), cpus));
                }
                Err(why) => {
                    progress.step(&format!("{}: the {name} stays on its CPUs: it {why}", of.vm));
                }
            }
        }
    }
    writes
}

/// The process of the I/O domain that answers, with its status; `None` where none listens.
fn running(root: &Root, dirs: &Dirs) -> Result<Option<(u32, Status)>> {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    let control = process::control(&dirs.state)?.unwrap_or_else(|| dirs.run.join("iod.sock"));
    let stream = match connect(&control) {
        Ok(stream) => stream,
        Err(e) => {
            let cause = e.cause::<std::io::Error>().map(std::io::Error::kind);
            return if matches!(cause, Some(NotFound | ConnectionRefused)) { Ok(None) } else { Err(e) };
        }
    };
    let pid = processes::peer(&stream)?.context(OTHER_NAMESPACE)?;
    ensure_domain(root, pid).with_context(|| control.display().to_string())?;
    Ok(Some((pid, client::request(&stream, &control, &Command::Status, ANSWER_TIMEOUT)?)))
}

/// Fails unless a process is an I/O domain of root that sees the process ids that this program
/// sees: the peers in its status are by these.
fn ensure_domain(root: &Root, pid: u32) -> Result<()> {
    let is_domain = processes::is_of_root(root, pid, PROGRAM)?;
    ensure!(is_domain, NotRunning, "process {pid} answers there, which is no {PROGRAM} of root");
    // Absent on a kernel without such namespaces.
    let namespace = |of: &str| unless_gone(root.inode(format!("/proc/{of}/ns/pid")));
    ensure!(namespace(&pid.to_string())? == namespace("self")?, NotRunning, "{OTHER_NAMESPACE}");
    Ok(())
}

/// Devices with a disk of these processes, each with whether no other process has one there, nor
/// may connect to one: a socket without a front end is another VM's.
fn devices<'s>(status: &'s Status, pids: &BTreeSet<u32>) -> Vec<(&'s str, bool)> {
    let mut found: BTreeMap<&str, (bool, bool)> = BTreeMap::new();
    for disk in &status.vms {
        let is_own = disk.connected && disk.peer.is_some_and(|pid| pids.contains(&pid));
        let (has_own, is_alone) = found.entry(&disk.device).or_insert((false, true));
        *has_own |= is_own;
        *is_alone &= is_own;
    }
    found.into_iter().filter(|(_, (has_own, _))| *has_own).map(|(name, (_, alone))| (name, alone)).collect()
}

/// Number and start of the thread of a device, which may have these CPUs; the reason why it stays
/// where it is.
fn thread(
    root: &Root,
    pid: u32,
    device: &str,
    cpus: &BTreeSet<u32>,
) -> Result<Result<(u32, u64), String>, HostError> {
    let name: String = device.chars().take(NAME).collect();
    let mut found = Vec::new();
    for tid in task::tids(root, pid)?.into_iter().filter(|tid| *tid != pid) {
        // An ended thread serves no disk.
        let Some(stat) = unless_gone(task::stat(root, pid, tid))? else { continue };
        if stat.comm == name && !stat.ended {
            found.push((tid, stat.start));
        }
    }
    let [(tid, start)] = found[..] else {
        return Ok(Err(format!("is not found by its name, which {} threads have", found.len())));
    };
    // `cpus` of its configuration: the other threads have all CPUs of the process.
    if task::affinity(root, pid, tid)? != task::affinity(root, pid, pid)? {
        return Ok(Err("has CPUs by the I/O domain's configuration".to_owned()));
    }
    // `AllowedCPUs=` of its unit: the kernel takes no others.
    let may_use = cpuset(root, &task::cgroups(root, pid, tid)?)?;
    if !cpus.is_subset(&may_use) {
        let (own, wanted) = (cpu_ranges(&may_use), cpu_ranges(cpus));
        return Ok(Err(format!("has only CPUs {own} by its cpuset, not all of {wanted}")));
    }
    Ok(Ok((tid, start)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::{put, put_thread};

    fn status(disks: &[(&str, Option<u32>, bool)]) -> Status {
        let disk = |(device, peer, connected): &(&str, Option<u32>, bool)| {
            serde_json::json!({ "device": device, "name": "n", "socket": "", "connected": connected, "attached": true,
                "peer": peer, "read": {}, "write": {}, "promises": [], "refused": null, "refused_requests": {} })
        };
        let device = |name: &str| serde_json::json!({ "name": name, "policy": "drr" });
        serde_json::from_value(serde_json::json!({
            "version": 1, "devices": [device("a"), device("b")], "networks": [], "ports": [],
            "vms": disks.iter().map(disk).collect::<Vec<_>>(),
        }))
        .unwrap()
    }

    #[test]
    fn a_thread_that_serves_others_too_is_not_the_vms() {
        let own = BTreeSet::from([7, 8]);
        let of = status(&[("a", Some(7), true), ("b", Some(8), true), ("b", Some(9), true)]);
        assert_eq!(devices(&of, &own), [("a", true), ("b", false)]);
        // A front end that is not known may be another VM, and so may the next one of a socket.
        let of = status(&[("a", Some(7), true), ("a", None, true), ("b", Some(7), true), ("b", None, false)]);
        assert_eq!(devices(&of, &own), [("a", false), ("b", false)]);
        assert_eq!(devices(&of, &BTreeSet::from([1])), []);
    }

    #[test]
    fn only_roots_program_with_our_process_ids_is_the_domain() {
        let (_dir, root) = crate::fixtures::root();
        let put = |path: &str, text: &str| put(&root, path, text);
        let says = || format!("{:#}", ensure_domain(&root, 7).unwrap_err());
        put("/proc/7/comm", "rtvirtio-iod\n");
        put("/proc/7/status", "Uid:\t0\t0\t0\t0\n");
        let exe = root.at("/proc/7/exe");
        std::os::unix::fs::symlink("/usr/bin/qemu-system-x86_64", &exe).unwrap();
        assert!(says().contains("no rtvirtio-iod"), "{}", says());
        std::fs::remove_file(&exe).unwrap();
        std::os::unix::fs::symlink("/usr/bin/rtvirtio-iod", &exe).unwrap();
        ensure_domain(&root, 7).unwrap();
        put("/proc/7/ns/pid", "");
        put("/proc/self/ns/pid", "");
        assert!(says().contains("another PID namespace"), "{}", says());
        std::fs::remove_file(root.at("/proc/self/ns/pid")).unwrap();
        std::fs::hard_link(root.at("/proc/7/ns/pid"), root.at("/proc/self/ns/pid")).unwrap();
        ensure_domain(&root, 7).unwrap();
        put("/proc/7/status", "Uid:\t0\t1000\t0\t0\n");
        assert!(says().contains("of root"), "{}", says());
    }

    #[test]
    fn a_domain_that_does_not_listen_is_none() {
        let (_dir, dirs) = crate::fixtures::dirs();
        let found = || running(&Root::default(), &dirs).map(|found| found.map(|(pid, _)| pid));
        assert_eq!(found().unwrap(), None);
        std::fs::create_dir(&dirs.run).unwrap();
        // Refused from the end of the listener on.
        let listener = std::os::unix::net::UnixListener::bind(dirs.run.join("iod.sock")).unwrap();
        assert!(format!("{:#}", found().unwrap_err()).contains("no rtvirtio-iod"));
        drop(listener);
        assert_eq!(found().unwrap(), None);
    }

    #[test]
    fn the_thread_of_a_device_is_found_by_its_name() {
        let (_dir, root) = crate::fixtures::root();
        let thread_of = |tid: u32, name: &str, cpus: &str| {
            put_thread(&root, (7, tid), name, cpus);
            put(&root, format!("/proc/7/task/{tid}/cgroup"), "0::/system.slice/iod.service\n");
        };
        let file = |path: &str, text: &str| put(&root, path, text);
        file("/sys/devices/system/cpu/online", "0-7\n");
        file("/proc/self/mountinfo", "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
        thread_of(7, "rtvirtio-iod", "0-7");
        thread_of(8, "a-name-of-sixte", "0-7");
        thread_of(9, "pinned", "3");
        thread_of(10, "twice", "0-7");
        thread_of(11, "twice", "0-7");
        let of = |device: &str| thread(&root, 7, device, &BTreeSet::from([4, 5])).unwrap();
        assert_eq!(of("a-name-of-sixteen").map(|found| found.0), Ok(8));
        assert!(of("pinned").unwrap_err().contains("configuration"));
        assert!(of("twice").unwrap_err().contains("2 threads"));
        assert!(of("none").unwrap_err().contains("0 threads"));
        // Its unit has `AllowedCPUs=`.
        file("/sys/fs/cgroup/system.slice/iod.service/cpuset.cpus.effective", "0-4\n");
        assert!(of("a-name-of-sixteen").unwrap_err().contains("only CPUs 0-4"));
    }
}
