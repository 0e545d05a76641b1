//! `keep` on a real QEMU: a vCPU that is plugged in, `kill -9`, revert.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

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
        let path = site.dir.path().join("plant.toml");
        let spec = format!(
            "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{}\"\nqmp = \"{}\"\ncpu = {{ budget = \"4ms\", period = \"20ms\" }}\n\
             priorities = \"rt\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n",
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
