//! `profile cpu` and a demand's budget, on a real QEMU whose guest computes without end. Its load
//! counts each millisecond of CPU time as a request.

use std::fs;
use std::path::PathBuf;

use rtvirtio_testkit::site::{Site, signal, text, wait_for};
use rtvirtio_testkit::{Machine, Need, has, vm_spec};
use rustix::process::Signal;
use serde_json::Value;

/// A guest that computes without end.
struct Spinner {
    machine: Machine,
    vm: String,
    spec: PathBuf,
}

impl Spinner {
    fn start(test: &str, site: &Site) -> Option<Self> {
        let dir = site.dir.path();
        has(test, &[Need::Root, Need::RT_GROUPS, Need::QEMU]).then(|| Self {
            machine: Machine::spinning(dir, "web", &[]),
            vm: site.vm("web"),
            spec: dir.join("plant.toml"),
        })
    }

    fn demand(&self, requests: f64, deadline_ms: u64) -> &str {
        let keys = format!("cpu = {{ requests = \"{requests:.3}/s\", deadline = \"{deadline_ms}ms\" }}");
        fs::write(&self.spec, vm_spec("/dev/sdz", &self.vm, self.machine.qmp(), &keys)).unwrap();
        self.spec.to_str().unwrap()
    }

    /// Milliseconds of CPU time a second. A clock tick is 10 ms.
    fn load(&self) -> String {
        format!(
            "t() {{ set -- $(cat /proc/{}/stat); echo $((${{14}} + ${{15}})); }}; a=$(t); sleep {{seconds}}; echo $((($(t) - a) * 10 / {{seconds}}))",
            self.machine.pid()
        )
    }

    fn group(&self) -> PathBuf {
        PathBuf::from(format!("/sys/fs/cgroup/cpu/rtvirtio-{}", self.vm))
    }

    /// Policy and cgroup of every thread.
    fn state(&self, site: &Site) -> Vec<Value> {
        let all = site.json(&["threads", &self.machine.pid().to_string()]).1;
        let keep = ["tid", "policy", "priority", "nice", "cgroups", "reset_on_fork"];
        let pick = |t: &Value| keep.iter().map(|k| t[*k].clone()).collect::<Value>();
        all[0]["threads"].as_array().unwrap().iter().map(pick).collect()
    }

    fn profile<'a>(&'a self, load: &'a str, spec: &'a str) -> Vec<&'a str> {
        let fixed = ["--budgets", "10,20,40", "--repeat", "3", "--for", "1s"];
        [&["profile", "cpu", self.vm.as_str(), "--spec", spec, "--load", load][..], &fixed].concat()
    }
}

/// As the spec says it.
fn thousandths(value: f64) -> f64 {
    format!("{value:.3}").parse().unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap()
}

#[test]
fn a_demand_gets_the_smallest_measured_budget() {
    let site = Site::new();
    let Some(vm) = Spinner::start("a_demand_gets_the_smallest_measured_budget", &site) else { return };
    let before = vm.state(&site);
    let (spec, load) = (vm.demand(10.0, 400), vm.load());
    let error = text(&site.output(&["apply", spec, "--cpu-only"]).stderr);
    assert!(
        error.contains("has not been measured") && error.contains("rtvirtio profile cpu web-"),
        "{error}"
    );

    // Killed in the middle: `revert` puts the VM back, and what was measured is not measured again.
    let args = vm.profile(&load, spec);
    let saved = site.state_dir().join(format!("cpu-profiles/{}.json", vm.vm));
    let mut killed = site.spawn(&args);
    wait_for("two measurements", || {
        let text = fs::read_to_string(saved.with_extension("partial.json")).unwrap_or_default();
        text.matches("budget_percent").count() >= 2
    });
    wait_for("a contract", || vm.group().join("cpu.rt_runtime_us").exists());
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(vm.group().exists() && !saved.exists());
    // What is in force is not this command's to put back.
    let refused = text(&site.output(&args).stderr);
    assert!(refused.contains("a plan is in force") && refused.contains("rtvirtio revert"), "{refused}");
    site.ok(&["revert"]);
    assert!(!vm.group().exists());
    assert_eq!(vm.state(&site), before);

    let out = site.output(&[&args[..], &["--json"]].concat());
    let (said, profile) = (text(&out.stderr), serde_json::from_slice::<Value>(&out.stdout).unwrap());
    assert!(out.status.success() && said.contains("going on after"), "{said}");
    assert!(said.contains("period 100ms, for the deadline of 400ms"), "{said}");
    assert_eq!(vm.state(&site), before);
    let file: Value = serde_json::from_str(&fs::read_to_string(&saved).unwrap()).unwrap();
    assert_eq!(file, profile);
    assert_eq!(
        (profile["schema"].as_str(), profile["runs"].as_array().unwrap().len()),
        (Some("rtvirtio.cpu-profile.v1"), 9)
    );
    let points = profile["points"].as_array().unwrap();
    let cpus = number(&profile["setup"]["cpus"]);
    for p in points {
        assert_eq!(p["n"], 3);
        // Two periods for where the measurement cuts, and a clock tick. A busy machine gives less,
        // never more.
        let (budget, mean) = (number(&p["budget_percent"]), number(&p["mean"]));
        assert!(mean > 0.0 && mean <= (10.0 * budget * 1.2 + 10.0) * cpus, "{p}");
    }

    // What the machine gave is its own affair. The look-up is shown on the same profile with
    // figures that do not depend on it: half the most that each budget can answer, and nearly the
    // same in each round.
    let mut certain = profile.clone();
    for run in certain["runs"].as_array_mut().unwrap() {
        let rate = 5.0 * number(&run["budget_percent"]) * cpus + 0.01 * number(&run["round"]);
        (run["requests_per_s"], run["cpu"]) = (rate.into(), (rate / 1000.0).into());
    }
    fs::write(&saved, certain.to_string()).unwrap();
    let points = rtvirtio_cpu::CpuProfile::load(&saved).unwrap().to_json().unwrap()["points"].clone();
    let points = points.as_array().unwrap();
    // Six tenths of what may be relied on at the largest: the smallest budget that carries it must
    // be taken.
    let asked = thousandths(number(&points[2]["lower"]) * 0.6);
    let work = points.iter().map(|p| number(&p["cpu_per_request"])).fold(0.0, f64::max);
    let ns = rustix::time::clock_getres(rustix::time::ClockId::MonotonicCoarse).tv_nsec;
    let tick = ns as f64 / 1e9;
    let carries = |p: &&Value| {
        let share = number(&p["budget_percent"]) / 100.0;
        number(&p["lower"]) >= asked && 2.0 * 0.1 * (1.0 - share) + (work + tick) / share <= 0.4
    };
    let smallest = number(&points.iter().find(carries).unwrap()["budget_percent"]) as u64;
    let spec = vm.demand(asked, 400);
    let dry = text(&site.output(&["apply", spec, "--cpu-only", "--dry-run"]).stderr);
    assert!(
        dry.contains(&format!("is {smallest} %, which answered")) && dry.contains("n = 3; measured alone"),
        "{dry}"
    );
    let (code, applied) = site.json(&["apply", spec, "--cpu-only"]);
    assert_eq!(
        (code, applied[0]["found"]["point"]["budget_percent"].as_u64()),
        (0, Some(smallest)),
        "{applied}"
    );
    let group =
        |file: &str| fs::read_to_string(vm.group().join(file)).unwrap().trim().parse::<u64>().unwrap();
    assert_eq!((group("cpu.rt_runtime_us"), group("cpu.rt_period_us")), (smallest * 1000, 100_000));
    site.ok(&["revert"]);
    assert_eq!(vm.state(&site), before);

    // More than any budget carries, sooner than any answers, and a file that is none.
    for (requests, deadline, says) in [
        (50_000.0, 400, "no measured budget carries 50000/s"),
        (asked, 60, "no measured budget answers within 60ms"),
    ] {
        let spec = vm.demand(requests, deadline);
        let refused = text(&site.output(&["apply", spec, "--cpu-only"]).stderr);
        assert!(refused.contains(says), "{refused}");
    }
    let named = format!("{}={}", vm.vm, site.write("other.json", "{}"));
    let refused = text(&site.output(&["apply", spec, "--cpu-only", "--cpu-profile", &named]).stderr);
    assert!(refused.contains("is no CPU profile: it has no schema"), "{refused}");
    let refused = text(&site.output(&["apply", spec, "--cpu-only", "--cpu-profile", "nobody=x"]).stderr);
    assert!(refused.contains("write VM=FILE with a VM of the spec"), "{refused}");
    assert_eq!(vm.state(&site), before);
    drop(vm);
    site.assert_clean();
}

#[test]
fn a_measurement_that_is_stopped_or_has_no_load_leaves_nothing() {
    let site = Site::new();
    let test = "a_measurement_that_is_stopped_or_has_no_load_leaves_nothing";
    let Some(vm) = Spinner::start(test, &site) else { return };
    let before = vm.state(&site);
    let pid = vm.machine.pid().to_string();
    let run = |load: &str| {
        let out = site.output(&["profile", "cpu", &pid, "--load", load, "--budgets", "20", "--for", "1s"]);
        assert!(!out.status.success());
        text(&out.stderr)
    };
    assert!(run("echo 0").contains("answers nothing, without any contract"), "nothing was answered");
    assert!(run("echo many").contains("is `many`, and not how many"), "no number");
    assert!(run("echo broken >&2; exit 3").contains("exit status: 3: broken"), "its own words");
    let refused = |args: &[&str]| text(&site.output(&[&["profile", "cpu", &pid], args].concat()).stderr);
    assert!(refused(&[]).contains("--url"), "a load is needed");
    assert!(refused(&["--url", "https://127.0.0.1/"]).contains("TLS is not spoken"));
    assert!(refused(&["--url", "http://127.0.0.1:1/", "--for", "1s"]).contains("answered no request"));
    assert!(refused(&["--load", "echo 1", "--for", "500ms"]).contains("less than 10 periods"));
    assert!(refused(&["--load", "echo 1", "--budgets", "97"]).contains("none of the budgets can be given"));
    assert!(refused(&["--load", "echo 1", "--budgets", "0"]).contains("1 to 100 %"));
    assert!(refused(&["--load", "echo 1", "--neighbour", &pid]).contains("how the neighbour is loaded"));
    assert!(refused(&["--load", "echo 1", "--neighbour", &pid, "--neighbour-load", "x"]).contains("itself"));

    // Ctrl-C while a contract is in force, with a load that ignores everything.
    let load = "trap '' INT TERM; sleep {seconds}; echo 5";
    let mut stopped = site.spawn(&["profile", "cpu", &pid, "--load", load, "--budgets", "20", "--for", "2s"]);
    let group = PathBuf::from(format!("/sys/fs/cgroup/cpu/rtvirtio-pid-{pid}"));
    wait_for("a contract", || group.join("cpu.rt_runtime_us").exists());
    signal(&stopped, Signal::INT);
    assert_eq!(stopped.wait().unwrap().code(), Some(130));
    assert!(!group.exists());
    assert_eq!(vm.state(&site), before);
    drop(vm);
    site.assert_clean();
}
