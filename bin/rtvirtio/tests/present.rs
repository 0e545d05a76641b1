//! What is on the host already counts: limits, parents of cgroups and the root cgroup are named by
//! the commands that predict and plan.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};

mod plane;

use plane::Plane;
use rtvirtio_kernel::{Cgroups, Hierarchy, Root};
use rtvirtio_testkit::site::{PROFILE, Site, text};
use rtvirtio_testkit::{Need, has, skip, unique};
use serde_json::Value;

/// A process in cgroups of its own. They go with it.
struct Process {
    child: Child,
    groups: Vec<(Cgroups, PathBuf)>,
}

impl Process {
    fn new() -> Self {
        Self { child: Command::new("sleep").arg("1000").spawn().unwrap(), groups: Vec::new() }
    }

    /// Moves it into a new cgroup, which goes before its parents.
    fn enter(&mut self, cgroups: &Cgroups, path: &Path) {
        let root = Root::default();
        cgroups.create(&root, path).unwrap();
        let made = path.ancestors().filter(|p| !Cgroups::is_root(p)).map(|p| (cgroups.clone(), p.to_owned()));
        self.groups.extend(made);
        cgroups.attach(&root, path, self.child.id()).unwrap();
    }

    fn vm(&self, name: &str) -> String {
        format!("[[vm]]\nname = \"{name}\"\npid = {}\n{TASK}", self.child.id())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for (cgroups, path) in &self.groups {
            let _ = cgroups.remove(&Root::default(), path);
        }
    }
}

const TASK: &str = "[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"10/s\"\n\
                    target = { percentile = \"p99\", latency = \"10s\" }\n";

fn write_spec(site: &Site, plane: &Plane, vms: &str) -> String {
    site.write("present.toml", &format!("[device]\npath = \"/dev/{}\"\n{vms}", plane.device.name))
}

/// What the command prints and warns of.
fn shown(site: &Site, args: &[&str]) -> (Value, String) {
    let out = site.output(&[args, &["--json"]].concat());
    let warned = text(&out.stderr);
    let json = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{args:?}: {e}: {warned}"));
    (json, warned)
}

/// A limit that an administrator has set on a VM's cgroup, on v2 on one above it.
#[test]
fn a_limit_on_the_path_is_named_and_counted() {
    let test = "a_limit_on_the_path_is_named_and_counted";
    let site = Site::new();
    let Some(plane) = Plane::new(test, &site) else { return };
    if !has(test, &[Need::Program("fio")]) {
        return;
    }
    let (root, dev) = (Root::default(), &plane.device.dev);
    let (parent, cgroups) = plane.groups();
    let (vm, dir) = (parent.join("vm0"), cgroups.dir(parent).unwrap());
    let by = match cgroups.hierarchy {
        Hierarchy::V1 => {
            root.write(dir.join("vm0/blkio.throttle.read_iops_device"), &format!("{dev} 5")).unwrap();
            // The kernel does not pass on this one.
            root.write(dir.join("blkio.throttle.read_iops_device"), &format!("{dev} 2")).unwrap();
            format!("{} (blkio.throttle.read_iops_device)", vm.display())
        }
        Hierarchy::V2 => {
            root.write(dir.join("io.max"), &format!("{dev} riops=5")).unwrap();
            format!("{} (io.max)", parent.display())
        }
    };
    let disk = format!("cgroup = '{}'\ndisk = \"/dev/{}\"\n", vm.display(), plane.device.name);
    let spec = write_spec(&site, &plane, &format!("[[vm]]\nname = \"vm0\"\n{disk}{TASK}"));
    let line = format!("vm0: limited to 5/s by {by}");
    let (tasks, warned) = shown(&site, &["predict", &spec, "--profile", PROFILE]);
    assert!(warned.contains(&line) && !warned.contains("limited to 2/s"), "{warned}");
    assert!(tasks[0]["forecast"]["rate_kept"].as_f64().unwrap() < 0.51, "{tasks}");
    let (plan, warned) = shown(&site, &["plan", &spec, "--profile", PROFILE]);
    assert!(warned.contains(&line), "{warned}");
    assert_eq!(plan["controls"][0]["kind"], "cgroup_limit", "{plan}");
    // Why it was missed, by the same name: on a busy machine the task may not reach its limit,
    // which is not the cause then.
    for last in [false, false, false, false, true] {
        let (result, warned) = shown(&site, &["verify", &spec, "--for", "2s"]);
        assert!(warned.contains(&line), "{warned}");
        let task = &result["runs"][0]["tasks"][0];
        assert_eq!(task["verdict"], "missed", "{result}");
        if task["causes"][0]["kind"] == "kernel_limit" {
            assert!(task["causes"][0]["evidence"].as_str().unwrap().contains(&by), "{result}");
            break;
        }
        let reached = task["achieved_rate"].as_f64().unwrap() >= 4.5;
        assert!(!reached && !last, "{result}");
    }
}

/// VMs with different parents: what is planned is what `apply` takes.
#[test]
fn vms_of_different_parents_have_one_answer() {
    let test = "vms_of_different_parents_have_one_answer";
    let site = Site::new();
    let Some(plane) = Plane::new(test, &site) else { return };
    let (parent, cgroups) = plane.groups();
    let (mut plc, mut db) = (Process::new(), Process::new());
    let top = PathBuf::from(format!("{}-apart", parent.display()));
    plc.enter(cgroups, &top.join("rt.slice/plc.scope"));
    db.enter(cgroups, &top.join("nort.slice/db.scope"));
    let spec = write_spec(&site, &plane, &(plc.vm("plc") + &db.vm("db")));
    let (plan, warned) = shown(&site, &["plan", &spec, "--profile", PROFILE]);
    let named = format!("plc ({})", top.join("rt.slice/plc.scope").display());
    assert!(
        warned.contains("weights compare only cgroups with one parent") && warned.contains(&named),
        "{warned}"
    );
    let settings = plan["devices"][0]["plan"]["settings"].as_array().unwrap();
    assert!(settings.iter().all(|s| s["knob"]["vm_weight"].is_null()), "{plan}");
    let dry = site.output(&["apply", &spec, "--profile", PROFILE, "--dry-run"]);
    assert!(dry.status.success(), "{}", text(&dry.stderr));
}

/// Without a cgroup of its own a VM can be given nothing, which is said with the remedy.
#[test]
fn vms_in_the_root_cgroup_are_named() {
    let test = "vms_in_the_root_cgroup_are_named";
    let site = Site::new();
    let Some(plane) = Plane::new(test, &site) else { return };
    let (_, cgroups) = plane.groups();
    let (database, other) = (Process::new(), Process::new());
    for process in [&database, &other] {
        if let Err(e) = cgroups.attach(&Root::default(), Path::new("/"), process.child.id()) {
            return skip(test, &e.to_string());
        }
    }
    let spec = write_spec(&site, &plane, &(database.vm("database") + &other.vm("other")));
    for command in ["predict", "plan"] {
        let (_, warned) = shown(&site, &[command, &spec, "--profile", PROFILE]);
        for vm in ["database", "other"] {
            let line = format!("{vm}: is in the root cgroup: no weights or limits can act");
            assert!(warned.contains(&line) && warned.contains("systemd-run --scope"), "{warned}");
        }
    }
}

/// A quota of CPU time above the VM makes its I/O wait, which no model knows.
#[test]
fn a_quota_of_cpu_time_above_a_vm_is_named() {
    let test = "a_quota_of_cpu_time_above_a_vm_is_named";
    let site = Site::new();
    let Some(plane) = Plane::new(test, &site) else { return };
    let root = Root::default();
    let cpu = match Cgroups::detect_cpu(&root) {
        Ok(cpu) if cpu.hierarchy == Hierarchy::V1 => cpu,
        _ => return skip(test, "the CPU controller is not one of cgroup v1"),
    };
    let mut vm = Process::new();
    let slice = PathBuf::from(format!("/rtvirtio-{}", unique(test)));
    cpu.create(&root, &slice).unwrap();
    vm.enter(&cpu, &slice.join("vm"));
    root.write(cpu.dir(&slice).unwrap().join("cpu.cfs_quota_us"), "20000").unwrap();
    let spec = write_spec(&site, &plane, &vm.vm("vm"));
    let (_, warned) = shown(&site, &["predict", &spec, "--profile", PROFILE]);
    let line = format!("(0.20 CPUs) by {} (cpu.cfs_quota_us)", slice.display());
    assert!(warned.contains(&line), "{warned}");
}
