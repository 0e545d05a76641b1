//! `keep` on a real QEMU: a vCPU that is plugged in, `kill -9`, revert.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Child;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rtvirtio_kernel::text::cpu_list;
use rtvirtio_testkit::site::{Site, signal, text, wait_for};
use rtvirtio_testkit::{HANG, Machine, Need, SmallDisk, has, vm_spec};
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
        let keys = format!("cpu = {{ budget = \"4ms\", period = \"20ms\" }}\npriorities = \"rt\"\n{key}");
        site.write("plant.toml", &vm_spec("/dev/sdz", &self.name, self.machine.qmp(), &keys))
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

fn stderr_lines(keeper: &mut Child) -> Receiver<String> {
    let (sender, lines) = channel();
    let err = BufReader::new(keeper.stderr.take().unwrap());
    std::thread::spawn(move || err.lines().map_while(Result::ok).for_each(|line| drop(sender.send(line))));
    lines
}

/// The next line with these words.
fn line_with(lines: &Receiver<String>, words: &str) -> String {
    loop {
        let line = lines.recv_timeout(HANG).unwrap();
        if line.contains(words) {
            return line;
        }
    }
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
    machine.machine.plug_vcpu();
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
    let warnings = stderr_lines(&mut keeper);
    small.fill();
    machine.machine.plug_vcpu();
    let warning = line_with(&warnings, "have no contract yet");
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
    let _alone = alone();
    let site = Site::new();
    let Some(machine) = Plc::start(test, &site) else { return };
    let threads = || machine.machine.threads();
    let before = threads();
    let all = before[0].cpus.clone();
    assert!(has_all(&machine, &all), "{before:?}");
    let host = cpu_list(&all).unwrap();
    let refused = machine.spec_with(&site, "cores = \"8000\"");
    let error = text(&site.output(&["apply", &refused, "--cpu-only"]).stderr);
    assert!(error.contains("no CPUs for its threads") && error.contains("online"), "{error}");
    assert_eq!(threads(), before);

    let spec = machine.spec_with(&site, "cores = \"auto\"");
    let preview = site.ok(&["apply", &spec, "--cpu-only", "--dry-run"]);
    assert!(preview.contains("/status: "), "{preview}");
    assert_eq!(threads(), before, "a dry run");
    let applied = site.output(&["apply", &spec, "--cpu-only"]);
    let applied = text(&applied.stderr);
    assert!(applied.contains("vCPU 0 on CPU "), "{applied}");
    let of = |vcpu: u32| machine.machine.vcpu_cpus(vcpu).unwrap();
    let vcpu = of(0);
    assert_eq!(cpu_list(&vcpu).unwrap().len(), 1, "{vcpu}");
    let main = threads()[0].cpus.clone();
    assert!(host.len() == 1 || cpu_list(&main).unwrap().is_disjoint(&cpu_list(&vcpu).unwrap()), "{main}");

    // A thread that starts meanwhile inherits CPUs of ours, and is in no journal.
    machine.machine.plug_vcpu();
    wait_for("the second vCPU", || machine.machine.vcpu_cpus(1).is_some());
    assert_eq!(of(1), main);
    site.ok(&["revert"]);
    assert!(has_all(&machine, &all), "{:?}", machine.machine.threads());

    // Or it is in the journal, by `keep`. Both vCPUs have a CPU where the host has two.
    let applied = text(&site.output(&["apply", &spec, "--cpu-only"]).stderr);
    if host.len() > 1 {
        assert!(applied.contains("vCPU 1 on CPU "), "{applied}");
        assert_ne!(of(0), of(1));
    }
    site.ok(&["revert"]);
    assert!(has_all(&machine, &all), "{:?}", machine.machine.threads());
    drop(machine);
    site.assert_clean();
}

/// A VM that has a CPU of the host keeps those of other tests from it.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether each thread may use these CPUs.
fn has_all(machine: &Plc, all: &str) -> bool {
    machine.machine.threads().iter().all(|thread| thread.cpus == all)
}

#[test]
fn a_vcpu_plugged_in_while_cpus_are_kept_gets_one_and_later_those_from_before() {
    let test = "a_vcpu_plugged_in_while_cpus_are_kept_gets_one_and_later_those_from_before";
    let _alone = alone();
    let site = Site::new();
    let Some(machine) = Plc::start(test, &site) else { return };
    let all = machine.machine.threads()[0].cpus.clone();
    let spec = machine.spec_with(&site, "cores = \"auto\"");
    site.ok(&["apply", &spec, "--cpu-only"]);
    let first = machine.machine.vcpu_cpus(0);
    let (mut keeper, lines) = keep(&site, &spec);
    machine.machine.plug_vcpu();
    let set = lines.recv_timeout(HANG).unwrap();
    assert_eq!(set["event"], "set", "{set}");
    wait_for("the policy", || machine.vcpus(&site) == [fifo("CPU 0/TCG"), fifo("CPU 1/TCG")]);
    if cpu_list(&all).unwrap().len() > 1 {
        let has_one =
            || machine.machine.vcpu_cpus(1).and_then(|cpus| cpu_list(&cpus)).is_some_and(|c| c.len() == 1);
        wait_for("a CPU of its own", has_one);
        let second = machine.machine.vcpu_cpus(1);
        assert_ne!(second, first);
        // The next keeper leaves it there.
        keeper.kill().unwrap();
        keeper.wait().unwrap();
        let lines;
        (keeper, lines) = keep(&site, &spec);
        assert!(lines.recv_timeout(Duration::from_millis(800)).is_err());
        assert_eq!(machine.machine.vcpu_cpus(1), second);
        assert!(site.ok(&["status"]).contains("CPUs of vcpu 1"));
    }
    assert_eq!(machine.machine.vcpu_cpus(0), first);
    wait_for("the revert", || site.output(&["revert"]).status.success());
    assert!(keeper.wait().unwrap().success());
    assert!(has_all(&machine, &all), "{:?}", machine.machine.threads());
    drop(machine);
    site.assert_clean();
}

#[test]
fn where_no_cpu_is_left_for_a_plugged_vcpu_keep_says_so() {
    let test = "where_no_cpu_is_left_for_a_plugged_vcpu_keep_says_so";
    let _alone = alone();
    let site = Site::new();
    let Some(machine) = Plc::start(test, &site) else { return };
    let all = machine.machine.threads()[0].cpus.clone();
    let only = *cpu_list(&all).unwrap().first().unwrap();
    let spec = machine.spec_with(&site, &format!("cores = \"{only}\""));
    site.ok(&["apply", &spec, "--cpu-only"]);
    let mut keeper = site.spawn(&["keep", &spec, "--every", "50ms", "--quiet"]);
    let warnings = stderr_lines(&mut keeper);
    machine.machine.plug_vcpu();
    let line = line_with(&warnings, "vcpu 1 was plugged in later");
    assert!(line.contains("gets no CPU of its own") && line.contains(&format!("CPUs {only}")), "{line}");
    assert_eq!(machine.vcpus(&site), [fifo("CPU 0/TCG"), fifo("CPU 1/TCG")], "its contract is kept");
    wait_for("the revert", || site.output(&["revert"]).status.success());
    assert!(keeper.wait().unwrap().success());
    assert!(has_all(&machine, &all), "{:?}", machine.machine.threads());
    drop(machine);
    site.assert_clean();
}
