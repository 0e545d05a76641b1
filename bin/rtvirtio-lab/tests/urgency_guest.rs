//! What a real guest says about its vCPU moves that vCPU's thread, by the product's own commands:
//! apply, keep, `kill -9` of keep, revert while it runs.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use rtvirtio_kernel::sched::{self, Attr, Policy};
use rtvirtio_testbed::image;
use rtvirtio_testbed::qemu::{GuestDisk, QemuConfig, QemuGuest, UrgencyDevice};
use rtvirtio_testkit::site::{Site, program, signal, text, wait_for};
use rtvirtio_testkit::{ChildGuard, HANG, Need, has, vm_spec};
use rtvirtio_vmm::threads::Named;
use rustix::process::Signal;
use serde_json::Value;

/// Where the program is in the guest.
const PROGRAM: &str = "/usr/bin/rtvirtio-guest";

struct Guest {
    vm: QemuGuest,
    name: String,
    /// The thread of its only vCPU.
    vcpu: u32,
}

impl Guest {
    fn boot(site: &Site, device: UrgencyDevice, disk: GuestDisk) -> Self {
        let image = image::ensure(Path::new("/var/cache/rtvirtio"), &|_| ()).unwrap();
        let name = site.vm("plc");
        let config = QemuConfig {
            urgency: Some(device),
            ..QemuConfig::new(&name, image, disk, &site.dir.path().join("vms"))
        };
        let mut vm = QemuGuest::start(&config).unwrap();
        let binary = fs::read(program("rtvirtio-guest")).unwrap();
        vm.write_file(PROGRAM, &binary).unwrap();
        let named = Named::ask(&mut vm.qmp().unwrap()).unwrap();
        let vcpu = *named.vcpus.keys().next().unwrap();
        let mut guest = Self { vm, name, vcpu };
        guest.run(&format!("chmod 755 {PROGRAM}"));
        guest
    }

    fn run(&mut self, script: &str) -> String {
        let done = self.vm.exec(&["sh", "-c", script], HANG).unwrap();
        assert!(done.success(), "{script}: {}{}", text(&done.stdout), text(&done.stderr));
        text(&done.stdout)
    }

    fn spec(&self, site: &Site) -> String {
        self.spec_with(site, "")
    }

    /// With further keys of `[vm.urgency]`.
    fn spec_with(&self, site: &Site, more: &str) -> String {
        let keys = format!(
            "cpu = {{ budget = \"4ms\", period = \"20ms\" }}\npriorities = \"rt\"\n\
             urgency = {{ ceiling = 90, budget = \"1s\"{more} }}"
        );
        site.write("plant.toml", &vm_spec("/dev/sdz", &self.name, &self.vm.handle().qmp_socket(), &keys))
    }

    fn scheduling(&self) -> Attr {
        sched::get(self.vcpu).unwrap()
    }

    /// The weight of the group that has its budget.
    fn shares(&self) -> u64 {
        let cgroups = fs::read_to_string(format!("/proc/{}/task/{0}/cgroup", self.vcpu)).unwrap();
        let cpu = |line: &str| Some(line.split_once(":cpu:")?.1.to_owned());
        let group = cgroups.lines().find_map(cpu).expect("the CPU controller of cgroup v1");
        let path = Path::new("/sys/fs/cgroup/cpu").join(group.trim_start_matches('/')).join("cpu.shares");
        fs::read_to_string(&path).unwrap().trim().parse().unwrap()
    }

    /// Waits until its vCPU has this policy and priority.
    fn wait_for(&self, policy: Policy, priority: u32) {
        wait_for(&format!("{policy:?} {priority}"), || {
            let found = self.scheduling();
            (found.policy, found.priority) == (policy, priority)
        });
    }
}

fn keep(site: &Site, spec: &str) -> ChildGuard {
    ChildGuard(site.spawn(&["keep", spec, "--every", "50ms"]))
}

#[test]
fn a_guests_tasks_move_its_vcpu() {
    let test = "a_guests_tasks_move_its_vcpu";
    if !has(test, &[Need::Root, Need::RT_GROUPS, Need::QEMU, Need::Cpus(2)]) {
        return;
    }
    let site = Site::new();
    let mut guest = Guest::boot(&site, UrgencyDevice::Memory, GuestDisk::None);
    let refused = guest.vm.exec(&[PROGRAM, "bpf"], HANG).unwrap();
    assert!(
        !refused.success() && text(&refused.stderr).contains("no host offers"),
        "{}",
        text(&refused.stderr)
    );
    let spec = guest.spec(&site);
    site.ok(&["apply", &spec, "--cpu-only"]);
    guest.wait_for(Policy::Fifo, 97);
    let mut keeper = keep(&site, &spec);
    wait_for("the page", || guest.vm.exec(&[PROGRAM, "status"], HANG).unwrap().success());

    // Without a report the contract holds.
    assert_eq!(guest.scheduling().priority, 97);
    // A command: 90 * 50 / 99 = 45; ordinary work that fills the vCPU afterwards; its end.
    let hog = guest.vm.spawn(&["sh", "-c", "while :; do :; done"]).unwrap();
    let command = guest.vm.spawn(&[PROGRAM, "run", "--urgent", "--priority", "50", "sleep", "2"]).unwrap();
    guest.wait_for(Policy::Fifo, 45);
    assert!(site.ok(&["status"]).contains("in force"));
    guest.wait_for(Policy::Fifo, 97);
    assert!(guest.vm.poll(command).unwrap().is_none_or(|out| out.success()));

    // All tasks, by the guest's scheduler: the hog at the floor, a timed task above it.
    guest.run(&format!("{PROGRAM} bpf >/tmp/bpf.log 2>&1 & echo $! >/tmp/bpf.pid"));
    guest.wait_for(Policy::Other, 0);
    let status = site.ok(&["status"]);
    assert!(!status.contains("changed"), "a level is in force: {status}");
    let urgent = guest.vm.spawn(&["cyclictest", "-m", "-q", "-p99", "-i300", "-D5"]).unwrap();
    guest.wait_for(Policy::Fifo, 90);
    // What it has comes off the VM's share at the floor, and goes back afterwards.
    wait_for("a smaller share", || guest.shares() < 1024);
    let status = site.ok(&["status"]);
    assert!(!status.contains("changed"), "a weight is in force: {status}");
    wait_for("the end of the urgent task", || {
        guest.vm.poll(urgent).unwrap().is_some_and(|out| {
            assert!(out.success(), "{}", text(&out.stderr));
            true
        })
    });
    guest.wait_for(Policy::Other, 0);
    wait_for("its own share", || guest.shares() == 1024);
    let (code, all) = site.json(&["threads", &spec]);
    assert_eq!(code, 0);
    let vcpu = &all[0]["urgency"]["vcpus"][0];
    assert!(vcpu["promotions"].as_u64().unwrap() >= 1, "{all}");

    // Killed, and another one takes over: the level is its to change.
    keeper.kill().unwrap();
    keeper.wait().unwrap();
    sched::set(guest.vcpu, &Attr { reset_on_fork: true, .."fifo 33".parse().unwrap() }).unwrap();
    let mut keeper = keep(&site, &spec);
    guest.wait_for(Policy::Other, 0);
    let mut second = keep(&site, &spec);
    let out = {
        std::thread::sleep(Duration::from_millis(1500));
        signal(&second, Signal::INT);
        second.wait().unwrap();
        let mut err = String::new();
        std::io::Read::read_to_string(second.stderr.as_mut().unwrap(), &mut err).unwrap();
        err
    };
    assert!(out.contains("another process follows"), "{out}");

    // The reporter dies: the contract's priority. Another one begins: the floor again.
    guest.run("kill -9 $(cat /tmp/bpf.pid)");
    guest.wait_for(Policy::Fifo, 97);
    guest.run(&format!("{PROGRAM} bpf >/tmp/bpf.log 2>&1 &"));
    guest.wait_for(Policy::Other, 0);

    // Put back while it is followed.
    wait_for("the revert", || site.output(&["revert"]).status.success());
    assert!(keeper.wait().unwrap().success());
    let found = guest.scheduling();
    assert_eq!((found.policy, found.reset_on_fork), (Policy::Other, false));
    let (_, after): (_, Value) = site.json(&["status"]);
    assert_eq!(after["in_force"], false, "{after}");
    assert!(guest.vm.poll(hog).unwrap().is_none());
    guest.vm.stop().unwrap();
    site.assert_clean();
}

/// Notices that a VM's guest has rung so far, as `threads` shows them.
fn notices(site: &Site, spec: &str) -> u64 {
    let (_, all) = site.json(&["threads", spec]);
    all[0]["urgency"]["notices"][0].as_u64().unwrap_or(0)
}

/// Signals of urgent completions, once the file that shows them is the follower's.
fn signals(site: &Site, spec: &str) -> Option<u64> {
    let (_, all) = site.json(&["threads", spec]);
    all[0]["urgency"]["completions"][0].as_u64()
}

#[test]
fn a_doorbell_outlives_its_server_and_its_follower() {
    let test = "a_doorbell_outlives_its_server_and_its_follower";
    if !has(test, &[Need::Root, Need::RT_GROUPS, Need::QEMU, Need::Cpus(2)]) {
        return;
    }
    let site = Site::new();
    let socket = site.dir.path().join("urgency");
    let mut server = ChildGuard(site.spawn(&["ivshmem", socket.to_str().unwrap()]));
    wait_for("the server", || socket.exists());
    // A disk of the I/O domain, in which the guest may use the real-time class.
    let (disk, control) = (rtvirtio_testkit::disk_dir().unwrap(), site.run_dir().join("iod.sock"));
    let image = disk.path().join("disk");
    fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let served = site.dir.path().join("served");
    let text = format!(
        "control = \"{}\"\n[[device]]\nname = \"d\"\n[[device.disk]]\nname = \"plc-disk\"\nsocket = \"{}\"\npath = \"{}\"\n\
         guest_priority = {{ ceiling = \"real-time\" }}\n",
        control.display(),
        served.display(),
        image.display()
    );
    let config = site.write("iod.toml", &text);
    let domain = || {
        let child = Command::new(program("rtvirtio-iod")).arg("--config").arg(&config).spawn();
        let running = ChildGuard(child.unwrap());
        wait_for("the domain", || UnixStream::connect(&control).is_ok());
        running
    };
    let mut iod = domain();
    let disk = GuestDisk::VhostUser { socket: served, queues: Some(1) };
    let mut guest = Guest::boot(&site, UrgencyDevice::Doorbell { socket: socket.clone() }, disk);
    let spec = guest.spec(&site);
    site.ok(&["apply", &spec, "--cpu-only"]);
    // QEMU has all that it needs.
    server.kill().unwrap();
    server.wait().unwrap();
    let mut keeper = keep(&site, &spec);
    wait_for("the page", || guest.vm.exec(&[PROGRAM, "status"], HANG).unwrap().success());
    assert!(guest.run(&format!("{PROGRAM} status")).contains("with a doorbell"));
    guest.run(&format!("{PROGRAM} run --urgent true"));
    wait_for("notices", || notices(&site, &spec) >= 2);

    keeper.kill().unwrap();
    keeper.wait().unwrap();
    let mut keeper = keep(&site, &spec);
    // Counted anew by the one that took over.
    wait_for("the file of the second", || notices(&site, &spec) == 0);
    wait_for("notices", || {
        guest.run(&format!("{PROGRAM} run --urgent true"));
        notices(&site, &spec) >= 2
    });
    // Each urgent request raises its vCPU, also by an I/O domain that was started again; others do
    // not.
    let read = |class: u32| {
        format!(
            "fio --name=r --filename=/dev/vda --rw=read --bs=4k --size=64k --direct=1 --ioengine=psync --prioclass={class} >/dev/null"
        )
    };
    wait_for("the domain's signals", || signals(&site, &spec) == Some(0));
    guest.run(&read(2));
    assert_eq!(signals(&site, &spec), Some(0), "an ordinary read");
    guest.run(&read(1));
    wait_for("urgent reads", || signals(&site, &spec).is_some_and(|n| n >= 1));
    iod.kill().unwrap();
    iod.wait().unwrap();
    let iod = domain();
    let before = signals(&site, &spec);
    wait_for("urgent reads of another domain", || {
        guest.run(&read(1));
        signals(&site, &spec) > before
    });

    // A server that is started again replaces the dead one's socket; nothing else changes.
    let mut server = ChildGuard(site.spawn(&["ivshmem", socket.to_str().unwrap()]));
    std::thread::sleep(Duration::from_millis(300));
    assert!(server.try_wait().unwrap().is_none(), "it listens");
    server.kill().unwrap();
    server.wait().unwrap();
    signal(&keeper, Signal::INT);
    assert!(keeper.wait().unwrap().success());
    guest.wait_for(Policy::Fifo, 97);
    site.ok(&["revert"]);

    // Without the guest's word: high while it rests, at the floor while it computes.
    let spec = guest.spec_with(&site, ", reports = \"none\"");
    site.ok(&["apply", &spec, "--cpu-only"]);
    let mut keeper = keep(&site, &spec);
    guest.wait_for(Policy::Fifo, 90);
    let hog = guest.vm.spawn(&["sh", "-c", "echo $$ >/tmp/hog; while :; do :; done"]).unwrap();
    guest.wait_for(Policy::Other, 0);
    // How it stands is written some time after it is so.
    wait_for("how it stands", || site.json(&["threads", &spec]).1[0]["urgency"]["mode"] == "threads");
    guest.run("kill -9 $(cat /tmp/hog)");
    wait_for("the end of the hog", || guest.vm.poll(hog).unwrap().is_some());
    guest.wait_for(Policy::Fifo, 90);
    signal(&keeper, Signal::INT);
    assert!(keeper.wait().unwrap().success());
    guest.wait_for(Policy::Fifo, 97);
    site.ok(&["revert"]);
    guest.vm.stop().unwrap();
    drop(iod);
    site.assert_clean();
}
