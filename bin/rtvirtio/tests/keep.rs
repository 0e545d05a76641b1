//! `keep` on a real QEMU: a vCPU that is plugged in, `kill -9`, revert.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rtvirtio_kernel::text::cpu_list;
use rtvirtio_kernel::{Root, task};
use rtvirtio_testkit::site::{Site, signal, text, wait_for};
use rtvirtio_testkit::{HANG, Machine, Need, SmallDisk, has};
use rtvirtio_vmm::Qmp;
use rustix::process::Signal;
use serde_json::Value;

/// A machine with room for one more vCPU.
struct Plc {
    machine: Machine,
    name: String,
}

impl Plc {
    fn start(test: &str, site: &Site) -> Option<Self> {
        let options = ["-machine", "q35", "-smp", "1,maxcpus=2"];
        has(test, &[Need::Root, Need::RT_GROUPS, Need::QEMU])
            .then(|| Self { machine: Machine::start(site.dir.path(), "plc", &options), name: site.vm("plc") })
    }

    fn spec(&self, site: &Site) -> String {
        self.spec_with(site, "")
    }

    fn spec_with(&self, site: &Site, key: &str) -> String {
        let path = site.dir.path().join("plant.toml");
        let spec = format!(
            "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{}\"\nqmp = \"{}\"\ncpu = {{ budget = \"4ms\", period = \"20ms\" }}\n\
             priorities = \"rt\"\n{key}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n",
            self.name,
            self.machine.qmp().display()
        );
        fs::write(&path, spec).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Plugs the second vCPU in. The monitor serves one client at a time, and `keep` asks it too.
    fn plug(&self) {
        let mut qmp = Qmp::connect(self.machine.qmp(), HANG).unwrap();
        let all = qmp.execute("query-hotpluggable-cpus", None).unwrap();
        let free = all.as_array().unwrap().iter().find(|c| c.get("qom-path").is_none()).unwrap();
        let mut arguments = free["props"].clone();
        arguments["driver"] = free["type"].clone();
        qmp.execute("device_add", Some(arguments)).unwrap();
    }

    /// The vCPUs' policy, priority and CPU cgroup, by name.
    fn vcpus(&self, site: &Site) -> Vec<(String, String, u64)> {
        let all = site.json(&["threads", &self.machine.pid().to_string()]).1;
        let threads = all[0]["threads"].as_array().unwrap().iter();
        let vcpus = threads.filter(|t| t["role"]["kind"] == "vcpu");
        let one = |t: &Value| {
            let policy = t["policy"].as_str().unwrap().to_owned();
            (t["name"].as_str().unwrap().to_owned(), policy, t["priority"].as_u64().unwrap())
        };
        vcpus.map(one).collect()
    }
}

/// Threads of a process by name, each with the CPUs that it may use.
fn cpus_of(pid: u32) -> Vec<(String, String)> {
    let root = Root::default();
    let one = |tid: u32| {
        let name = task::stat(&root, pid, tid).ok()?.comm;
        Some((name, task::affinity(&root, pid, tid).ok()?))
    };
    task::tids(&root, pid).unwrap().into_iter().filter_map(one).collect()
}

/// `keep` in the background, and the lines that it prints.
fn keep(site: &Site, spec: &str) -> (Child, Receiver<Value>) {
    let mut child = site.spawn(&["keep", spec, "--every", "50ms", "--json"]);
    let (sender, lines) = channel();
    let out = BufReader::new(child.stdout.take().unwrap());
    std::thread::spawn(move || {
        for line in out.lines().map_while(Result::ok) {
            let _ = sender.send(serde_json::from_str(&line).unwrap());
        }
    });
    (child, lines)
}

fn fifo(name: &str) -> (String, String, u64) {
    (name.to_owned(), "fifo".to_owned(), 97)
}

#[test]
fn a_plugged_vcpu_is_kept_and_put_back_after_kill_9() {
    let test = "a_plugged_vcpu_is_kept_and_put_back_after_kill_9";
    let site = Site::new();
    let Some(machine) = Plc::start(test, &site) else { return };
    let spec = machine.spec(&site);
    let refused = text(&site.output(&["keep", &spec]).stderr);
    assert!(
        refused.contains("no CPU contract is in force") && refused.contains("rtvirtio apply"),
        "{refused}"
    );
    site.ok(&["apply", &spec, "--cpu-only"]);
    assert_eq!(machine.vcpus(&site), [fifo("CPU 0/TCG")]);

    let (mut keeper, lines) = keep(&site, &spec);
    machine.plug();
    let set = lines.recv_timeout(HANG).unwrap();
    assert_eq!(set["event"], "set", "{set}");
    wait_for("the policy", || machine.vcpus(&site) == [fifo("CPU 0/TCG"), fifo("CPU 1/TCG")]);
    keeper.kill().unwrap();
    keeper.wait().unwrap();

    // It goes on where it was, finds nothing to do, and ends when the contracts are put back.
    let (mut keeper, lines) = keep(&site, &spec);
    assert!(lines.recv_timeout(Duration::from_millis(800)).is_err());
    assert!(site.ok(&["status"]).contains("policy of vcpu 1"));
    // The lock may be held for a moment while it looks.
    wait_for("the revert", || site.output(&["revert"]).status.success());
    assert!(keeper.wait().unwrap().success());
    let other = |name: &str| (name.to_owned(), "other".to_owned(), 0);
    assert_eq!(machine.vcpus(&site), [other("CPU 0/TCG"), other("CPU 1/TCG")]);
    assert!(!Path::new(&format!("/sys/fs/cgroup/cpu/rtvirtio-{}", machine.name)).exists());

    // Ctrl-C leaves the contracts in force.
    site.ok(&["apply", &spec, "--cpu-only"]);
    let (mut keeper, lines) = keep(&site, &spec);
    assert!(lines.recv_timeout(Duration::from_millis(500)).is_err(), "all is set already");
    signal(&keeper, Signal::INT);
    assert!(keeper.wait().unwrap().success());
    assert_eq!(machine.vcpus(&site), [fifo("CPU 0/TCG"), fifo("CPU 1/TCG")]);
    wait_for("the revert", || site.output(&["revert"]).status.success());
    drop(machine);
    site.assert_clean();
}

#[test]
fn a_thread_that_cannot_be_journaled_is_tried_again() {
    let test = "a_thread_that_cannot_be_journaled_is_tried_again";
    let site = Site::new();
    let Some(machine) = Plc::start(test, &site) else { return };
    let spec = machine.spec(&site);
    let small = SmallDisk::mount(&site.state_dir());
    site.ok(&["apply", &spec, "--cpu-only"]);
    let (mut keeper, lines) = keep(&site, &spec);
    let (sender, warnings) = channel();
    let err = BufReader::new(keeper.stderr.take().unwrap());
    std::thread::spawn(move || err.lines().map_while(Result::ok).for_each(|line| drop(sender.send(line))));
    small.fill();
    machine.plug();
    let warning = loop {
        let line = warnings.recv_timeout(HANG).unwrap();
        if line.contains("have no contract yet") {
            break line;
        }
    };
    assert!(warning.contains(&machine.name) && warning.contains("tried again"), "{warning}");
    assert!(lines.try_recv().is_err(), "nothing was set");
    assert_eq!(machine.vcpus(&site)[0], fifo("CPU 0/TCG"));

    small.empty();
    assert_eq!(lines.recv_timeout(HANG).unwrap()["event"], "set");
    wait_for("the policy", || machine.vcpus(&site) == [fifo("CPU 0/TCG"), fifo("CPU 1/TCG")]);
    wait_for("the revert", || site.output(&["revert"]).status.success());
    assert!(keeper.wait().unwrap().success());
    let again = warnings.try_iter().filter(|line| line.contains("have no contract yet")).count();
    assert!(again < 2, "{again}: once for each reason");
    drop((machine, small));
    site.assert_clean();
}

#[test]
fn each_vcpu_has_a_cpu_and_every_thread_gets_its_cpus_back() {
    let test = "each_vcpu_has_a_cpu_and_every_thread_gets_its_cpus_back";
    let site = Site::new();
    let Some(machine) = Plc::start(test, &site) else { return };
    let pid = machine.machine.pid();
    let before = cpus_of(pid);
    let all = before[0].1.clone();
    assert!(before.iter().all(|(_, cpus)| *cpus == all), "{before:?}");
    let host = cpu_list(&all).unwrap();
    let refused = machine.spec_with(&site, "cores = \"8000\"");
    let error = text(&site.output(&["apply", &refused, "--cpu-only"]).stderr);
    assert!(error.contains("no CPUs for its threads") && error.contains("online"), "{error}");
    assert_eq!(cpus_of(pid), before);

    let spec = machine.spec_with(&site, "cores = \"auto\"");
    let preview = site.ok(&["apply", &spec, "--cpu-only", "--dry-run"]);
    assert!(preview.contains("/status: "), "{preview}");
    assert_eq!(cpus_of(pid), before, "a dry run");
    let applied = site.output(&["apply", &spec, "--cpu-only"]);
    let applied = text(&applied.stderr);
    assert!(applied.contains("vCPU 0 on CPU "), "{applied}");
    let of = |name: &str| cpus_of(pid).into_iter().find(|(n, _)| n == name).map(|(_, cpus)| cpus).unwrap();
    let vcpu = of("CPU 0/TCG");
    assert_eq!(cpu_list(&vcpu).unwrap().len(), 1, "{vcpu}");
    let main = cpus_of(pid)[0].1.clone();
    assert!(host.len() == 1 || cpu_list(&main).unwrap().is_disjoint(&cpu_list(&vcpu).unwrap()), "{main}");

    // A thread that starts meanwhile inherits CPUs of ours, and is in no journal.
    machine.plug();
    wait_for("the second vCPU", || cpus_of(pid).iter().any(|(name, _)| name == "CPU 1/TCG"));
    assert_eq!(of("CPU 1/TCG"), main);
    site.ok(&["revert"]);
    assert!(cpus_of(pid).iter().all(|(_, cpus)| *cpus == all), "{:?}", cpus_of(pid));

    // Or it is in the journal, by `keep`. Both vCPUs have a CPU where the host has two.
    let applied = text(&site.output(&["apply", &spec, "--cpu-only"]).stderr);
    if host.len() > 1 {
        assert!(applied.contains("vCPU 1 on CPU "), "{applied}");
        assert_ne!(of("CPU 0/TCG"), of("CPU 1/TCG"));
    }
    site.ok(&["revert"]);
    assert!(cpus_of(pid).iter().all(|(_, cpus)| *cpus == all), "{:?}", cpus_of(pid));
    drop(machine);
    site.assert_clean();
}

#[test]
fn a_vcpu_plugged_in_while_cpus_are_kept_gets_those_from_before_back() {
    let test = "a_vcpu_plugged_in_while_cpus_are_kept_gets_those_from_before_back";
    let site = Site::new();
    let Some(machine) = Plc::start(test, &site) else { return };
    let pid = machine.machine.pid();
    let all = cpus_of(pid)[0].1.clone();
    let spec = machine.spec_with(&site, "cores = \"auto\"");
    site.ok(&["apply", &spec, "--cpu-only"]);
    let (mut keeper, lines) = keep(&site, &spec);
    machine.plug();
    let set = lines.recv_timeout(HANG).unwrap();
    assert_eq!(set["event"], "set", "{set}");
    wait_for("the policy", || machine.vcpus(&site) == [fifo("CPU 0/TCG"), fifo("CPU 1/TCG")]);
    wait_for("the revert", || site.output(&["revert"]).status.success());
    assert!(keeper.wait().unwrap().success());
    assert!(cpus_of(pid).iter().all(|(_, cpus)| *cpus == all), "{:?}", cpus_of(pid));
    drop(machine);
    site.assert_clean();
}
