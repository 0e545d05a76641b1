//! VMs by the names that libvirt gives them, on a real daemon: nothing of libvirt's breaks while
//! settings are in force, and a VM that restarts is found again.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Command;

use rtvirtio_testkit::site::{PROFILE, Site, signal, text, wait_for};
use rustix::process::Signal;
use serde_json::{Value, json};

#[path = "guest_libvirt/host.rs"]
mod host;

use host::Host;

const GROUPS_OF_V1: &str = "/sys/fs/cgroup/cpu/cpu.rt_runtime_us";

/// Everything that the settings of a plan touched is as it was; threads that QEMU started meanwhile
/// are left out.
fn assert_same_threads(before: &[(String, String, String)], after: &[(String, String, String)]) {
    let lasting = |t: &&(String, String, String)| t.0 != "worker";
    for thread in before.iter().filter(lasting) {
        assert!(after.contains(thread), "{thread:?} is not among {after:#?}");
    }
}

#[test]
fn a_domain_is_planned_held_restarted_and_put_back() {
    let test = "a_domain_is_planned_held_restarted_and_put_back";
    let site = Site::new();
    let Some(mut host) = Host::start(test, &site) else { return };
    let spec = host.spec(&site);
    let plan = site.path("plant.plan");
    what_is_not_there_is_an_error(&site, &host, &spec);

    let before = host.threads(&site, &spec);
    for name in ["CPU 0/TCG", "IO iothread1"] {
        assert!(before.iter().any(|t| t.0 == name), "{name}: {before:?}");
    }
    site.ok(&["plan", &spec, "--profile", PROFILE, "-o", &plan]);
    // The planner may do without a limit; libvirt must get on with one.
    let mut saved: Value = serde_json::from_slice(&fs::read(&plan).unwrap()).unwrap();
    let settings = saved["devices"][0]["plan"]["settings"].as_array_mut().unwrap();
    let limit = json!({ "vm_limit": { "vm": host.historian, "limit": "read_iops" } });
    settings.retain(|s| s["knob"] != limit);
    settings.push(json!({ "knob": limit, "value": "500", "reason": "a test", "strength": "cap" }));
    fs::write(&plan, saved.to_string()).unwrap();
    site.ok(&["apply", &plan]);
    in_force(&site, &host, &spec);
    // What is in force for its own VMs is not counted as another's.
    site.ok(&["plan", &spec, "--profile", PROFILE]);
    discovered(&site, &host, &spec);

    plugged_threads(&site, &host, &spec, 2);
    host.libvirt.restart();
    plugged_threads(&site, &host, &spec, 3);
    host.libvirt.ok(&["schedinfo", &host.plc]);
    host.libvirt.ok(&["vcpupin", &host.plc, "0", "0"]);
    assert_eq!(site.output(&["status"]).status.code(), Some(0), "{}", site.ok(&["status"]));

    restarted(&site, &host, &spec);
    // The plan was made for the start before.
    let before = host.threads(&site, &spec);
    site.ok(&["apply", &plan]);
    in_force(&site, &host, &spec);
    site.ok(&["revert"]);
    assert_same_threads(&before, &host.threads(&site, &spec));
    urgent(&site, &host, &spec);

    host.libvirt.ok(&["destroy", &host.plc]);
    host.libvirt.ok(&["destroy", &host.historian]);
    assert_eq!(host.libvirt.cgroups(), Vec::<std::path::PathBuf>::new(), "{}", host.libvirt.log());
    drop(host);
    site.assert_clean();
}

/// The contract is in force, in libvirt's own cgroup of the VM where the kernel has real-time
/// groups.
fn in_force(site: &Site, host: &Host, spec: &str) {
    let shown = site.output(&["status"]);
    assert_eq!(shown.status.code(), Some(0), "{}", text(&shown.stdout));
    let shown = text(&shown.stdout);
    assert!(shown.contains(&format!("policy of vcpu 0 ({})", host.plc)), "{shown}");
    if !Path::new(GROUPS_OF_V1).exists() {
        return;
    }
    let vm = |t: &(String, String, String)| t.2.rsplit('/').next().unwrap_or_default().to_owned();
    for thread in
        host.threads(site, spec).iter().filter(|t| t.0.starts_with("CPU ") || t.0.starts_with("IO "))
    {
        assert_eq!(thread.1, "fifo", "{thread:?}");
        assert!(vm(thread).starts_with("qemu-") && vm(thread).contains(&host.plc), "{thread:?}");
    }
}

/// `<iotune>` limits what the guest gets, and is no limit for tasks that run past QEMU.
fn throttled_by_libvirt(site: &Site, host: &Host, spec: &str) {
    host.libvirt.ok(&["blkdeviotune", &host.plc, "vdb", "--read-iops-sec", "40", "--live"]);
    host.libvirt.ok(&["blkdeviotune", &host.historian, "vdb", "--total-iops-sec", "300", "--live"]);
    let plan = site.output(&["plan", spec, "--profile", PROFILE]);
    let shown = text(&plan.stdout) + &text(&plan.stderr);
    assert!(shown.contains("limited to 40/s by QEMU's own throttling"), "{shown}");
    assert!(shown.contains("limited to 300/s by QEMU's own throttling"), "{shown}");
    let verify = site.output(&["verify", spec, "--for", "1s"]);
    let shown = text(&verify.stdout) + &text(&verify.stderr);
    assert!(shown.contains("past QEMU and its throttling"), "{shown}");
    // 0 clears a limit.
    host.libvirt.ok(&["blkdeviotune", &host.plc, "vdb", "--read-iops-sec", "0", "--live"]);
    host.libvirt.ok(&["blkdeviotune", &host.historian, "vdb", "--total-iops-sec", "0", "--live"]);
}

/// Tasks run inside of `plc`, through libvirt, and on the host for `historian`.
fn verified(site: &Site, host: &Host, spec: &str) {
    let out = site.output(&["verify", spec, "--for", "3s", "--json"]);
    let code = out.status.code();
    // 2: a target is missed, as a busy machine may.
    assert!(matches!(code, Some(0 | 2 | 4)), "{code:?} {}", text(&out.stderr));
    let result: Value = serde_json::from_slice(&out.stdout).unwrap();
    let tasks = result["runs"][0]["tasks"].as_array().unwrap();
    for (vm, task) in [(&host.plc, "cycle"), (&host.historian, "bulk")] {
        let of = |t: &&Value| t["vm"] == vm.as_str() && t["task"] == task;
        let found = tasks.iter().find(of).unwrap_or_else(|| panic!("{vm} {task}: {result}"));
        assert!(found["n"].as_u64().unwrap() > 0, "{found}");
    }
}

/// The VM is found with its disk and what its tasks do, and the spec of it names it by domain.
fn discovered(site: &Site, host: &Host, spec: &str) {
    let first = site.dir.path().join("first.toml");
    let (uri, out) = (host.libvirt.uri(), first.display().to_string());
    let mut child = site.spawn(&["discover", "--uri", &uri, "--observe", "1h", "--json", "-o", &out]);
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("observing")), "it ended before it observed anything");
    verified(site, host, spec);
    signal(&child, Signal::INT);
    let rest: Vec<String> = lines.collect();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success(), "{rest:?}");
    let found: Value = serde_json::from_slice(&out.stdout).unwrap();
    let of = |vm: &&Value| vm["reach"]["domain"] == host.plc.as_str();
    let vm = found["vms"].as_array().unwrap().iter().find(of).unwrap_or_else(|| panic!("{found:#}"));
    let disk = &vm["disks"][0];
    assert_eq!((&disk["target"], &disk["activity"]["source"]), (&"vdb".into(), &"qemu".into()), "{vm:#}");
    let reads = |d: &Value| d["direction"] == "read" && d["n"].as_u64() > Some(0);
    assert!(disk["activity"]["directions"].as_array().unwrap().iter().any(reads), "{vm:#}");
    let text = fs::read_to_string(&first).unwrap();
    for line in [format!("domain = \"{}\"", host.plc), format!("uri = \"{uri}\"")] {
        assert!(text.contains(&line), "{line}: {text}");
    }
}

/// `iothreadadd` works while the contract is in force, the new thread starts as libvirt wants it,
/// and `keep` takes it in.
fn plugged_threads(site: &Site, host: &Host, spec: &str, id: u32) {
    host.libvirt.ok(&["iothreadadd", &host.plc, &id.to_string()]);
    let name = format!("IO iothread{id}");
    let policy =
        |threads: &[(String, String, String)]| threads.iter().find(|t| t.0 == name).map(|t| t.1.clone());
    assert_eq!(policy(&host.threads(site, spec)).as_deref(), Some("other"));
    let mut keeper = site.spawn(&["keep", spec, "--every", "50ms", "--json"]);
    let mut lines = BufReader::new(keeper.stdout.take().unwrap()).lines();
    // Its end closes the pipe, so this does not wait for ever.
    let set = lines
        .by_ref()
        .map_while(Result::ok)
        .find(|line| line.contains(&format!("policy of iothread iothread{id}")));
    let set: Value = serde_json::from_str(&set.expect("keep takes it in")).unwrap();
    assert_eq!(set["event"], "set", "{set}");
    signal(&keeper, Signal::INT);
    keeper.wait().unwrap();
    assert_eq!(policy(&host.threads(site, spec)).as_deref(), Some("fifo"));
}

/// The urgency of a VM's vCPUs is followed: libvirt names its threads, and its monitor says
/// which runs which vCPU.
fn urgent(site: &Site, host: &Host, spec: &str) {
    let period = "period = \"20ms\" }\n";
    let text = fs::read_to_string(spec).unwrap();
    let urgent = text.replace(period, &format!("{period}urgency = {{ reports = \"none\" }}\n"));
    let spec = &site.write("urgent.toml", &urgent);
    site.ok(&["apply", spec, "--cpu-only"]);
    let mut keeper = site.spawn(&["keep", spec]);
    wait_for("the domain's vCPU", || {
        let (_, all) = site.json(&["threads", spec, &host.plc]);
        all[0]["urgency"]["vcpus"].as_array().is_some_and(|vcpus| vcpus.len() == 1)
    });
    signal(&keeper, Signal::INT);
    assert!(keeper.wait().unwrap().success());
    site.ok(&["revert"]);
}

/// A VM that restarts under a contract leaves no directory, is found again, and nothing says
/// that its settings are in force.
fn restarted(site: &Site, host: &Host, spec: &str) {
    let of_plc = |host: &Host| -> Vec<_> {
        let all = host.libvirt.cgroups();
        all.into_iter().filter(|g| g.to_string_lossy().contains(&host.plc)).collect()
    };
    assert!(!of_plc(host).is_empty() || !Path::new(GROUPS_OF_V1).exists());
    for name in [&host.plc, &host.historian] {
        host.libvirt.ok(&["destroy", name]);
    }
    assert_eq!(of_plc(host), Vec::<std::path::PathBuf>::new());
    let off = site.refused(&["threads", spec]);
    assert!(off.contains(&format!("domain {} is shut off: `virsh -c", host.plc)), "{off}");
    // The remedy, as it is printed.
    let remedy = off.split('`').find(|part| part.starts_with("virsh -c")).unwrap();
    let ran = Command::new("sh").args(["-c", remedy]).output().unwrap();
    assert!(ran.status.success(), "{remedy}: {ran:?}");
    host.libvirt.ok(&["start", &host.historian]);
    host.await_agent();

    let status = site.output(&["status"]);
    let shown = text(&status.stdout);
    let words = format!("{}: the VM that the settings were applied to has ended", host.plc);
    assert!(status.status.code() == Some(3) && shown.contains(&words), "{shown}");
    let (_, json) = site.json(&["status"]);
    assert_eq!(json["ended_vms"][0]["vm"], host.plc.as_str(), "{json}");
    let verify = site.output(&["verify", spec, "--for", "1s"]);
    assert!(text(&verify.stderr).contains(&words), "{}", text(&verify.stderr));
    assert!(text(&verify.stdout).contains("(a part of it)"), "{}", text(&verify.stdout));

    let reverted = site.output(&["revert"]);
    assert!(reverted.status.success(), "{}{}", text(&reverted.stdout), text(&reverted.stderr));
    assert!(text(&site.output(&["status"]).stdout).contains("no plan is in force"));
}

/// A domain, a disk or a socket that is not there is an error with what is. Leaves the spec as it
/// was, and no limit of libvirt's.
fn what_is_not_there_is_an_error(site: &Site, host: &Host, spec: &str) {
    let good = fs::read_to_string(spec).unwrap();
    let with = |from: &str, to: &str| {
        fs::write(spec, good.replace(from, to)).unwrap();
        spec
    };
    let unknown = site.refused(&["threads", with(&format!("domain = \"{}\"", host.plc), "domain = \"pcl\"")]);
    assert!(unknown.contains("has no domain `pcl`: there is ") && unknown.contains(&host.plc), "{unknown}");
    let disk = site.refused(&["verify", with("disk = \"vdb\"", "disk = \"vdz\""), "--for", "1s"]);
    assert!(disk.contains("has no disk `vdz`: it has vdb"), "{disk}");
    let socket = site.refused(&["threads", with("/libvirt-sock", "/no-sock")]);
    assert!(socket.contains("no-sock") && socket.contains("was not reached"), "{socket}");

    // By its UUID in other letters.
    let uuid = host.libvirt.ok(&["domuuid", &host.plc]).trim().to_uppercase();
    let by_uuid = with(&format!("domain = \"{}\"", host.plc), &format!("domain = \"{uuid}\""));
    assert!(host.threads(site, by_uuid).iter().any(|t| t.0 == "CPU 0/TCG"));
    throttled_by_libvirt(site, host, with("", ""));
    // Looking has not marked the VM as tampered with.
    let log = host.libvirt.log();
    assert!(!log.contains("custom-monitor"), "{log}");
}
