//! Several devices under one spec, and devices that pass requests on: plan, apply, status, verify
//! and revert on the real kernel.

use std::fs;
use std::path::Path;
use std::process::Command;

mod plane;

use plane::{Host, differences};
use rtvirtio_kernel::{BlockDevice, Hierarchy, Root};
use rtvirtio_testkit::site::{PROFILE, Site, text, wait_for};
use rtvirtio_testkit::{Need, has, skip};
use serde_json::{Value, json};

impl Host {
    fn node(&self, n: usize) -> String {
        format!("/dev/{}", self.devices[n].name)
    }

    /// BFQ weight of a VM on a device.
    fn weight(&self, vm: usize, device: &BlockDevice) -> Option<u64> {
        let file = self.cgroups.weight_file(&Root::default(), &self.vm(vm)).unwrap();
        let weights = rtvirtio_kernel::text::weights(&fs::read_to_string(file.path).unwrap()).unwrap();
        weights.devices.get(&device.dev).copied()
    }

    /// Read requests per second that a VM may have on a device.
    fn read_limit(&self, vm: usize, dev: &str) -> Option<u64> {
        let path = self.cgroups.limit_file(&self.vm(vm), rtvirtio_kernel::cgroup::Limit::ReadIops).unwrap();
        let content = fs::read_to_string(path).unwrap();
        match self.cgroups.hierarchy {
            Hierarchy::V1 => rtvirtio_kernel::text::throttle_limit(&content, dev),
            Hierarchy::V2 => rtvirtio_kernel::text::io_max_limit(&content, dev, "riops"),
        }
    }
}

/// The measured profile of the flash twin as that of a device.
fn profile(site: &Site, device: &str) {
    let dir = site.state_dir().join("profiles");
    fs::create_dir_all(&dir).unwrap();
    fs::copy(PROFILE, dir.join(format!("{device}.json"))).unwrap();
}

fn reader(name: &str, disk: Option<&str>, rate: u32) -> String {
    let disk = disk.map_or(String::new(), |disk| format!("disk = \"{disk}\"\n"));
    format!(
        "[[vm.task]]\nname = \"{name}\"\n{disk}op = \"read\"\nblock = \"4KiB\"\nrate = \"{rate}/s\"\n\
         target = {{ percentile = \"p99\", latency = \"1s\" }}\n"
    )
}

/// A VM on both devices, and one more on each.
fn two_devices(host: &Host, fast: &str, big: &str) -> String {
    let cgroup = |n: usize| host.vm(n).display().to_string();
    format!(
        "[[device]]\nname = \"fast\"\npath = \"{fast}\"\n[[device]]\nname = \"big\"\npath = \"{big}\"\n\
         [[vm]]\nname = \"both\"\ncgroup = '{}'\ndisks = [\n\
         {{ name = \"log\", device = \"fast\", path = \"{fast}\" }},\n\
         {{ name = \"data\", device = \"big\", path = \"{big}\" }},\n]\n{}{}\
         [[vm]]\nname = \"a\"\ncgroup = '{}'\ndevice = \"fast\"\ndisk = \"{fast}\"\n{}\
         [[vm]]\nname = \"b\"\ncgroup = '{}'\ndevice = \"big\"\ndisk = \"{big}\"\n{}",
        cgroup(0),
        reader("commit", Some("log"), 50),
        reader("query", Some("data"), 20),
        cgroup(1),
        reader("t", None, 20),
        cgroup(2),
        reader("t", None, 20),
    )
}

/// Settings as they stand in a plan file.
fn settings(all: &[(Value, &str)]) -> Value {
    let one = |(knob, value): &(Value, &str)| json!({"knob": knob, "value": value, "reason": "test", "strength": "hint"});
    all.iter().map(one).collect()
}

fn weight(vm: &str) -> Value {
    json!({"vm_weight": {"vm": vm}})
}

fn read_iops(vm: &str) -> Value {
    json!({"vm_limit": {"vm": vm, "limit": "read_iops"}})
}

/// The plan in a file, with its settings replaced, device by device.
fn with_settings(plan: &str, devices: &[Value]) {
    let mut value: Value = serde_json::from_slice(&fs::read(plan).unwrap()).unwrap();
    for (n, settings) in devices.iter().enumerate() {
        value["devices"][n]["plan"]["settings"] = settings.clone();
    }
    fs::write(plan, value.to_string()).unwrap();
}

#[test]
fn two_devices_have_one_plan_one_journal_and_weights_of_their_own() {
    let test = "two_devices_have_one_plan_one_journal_and_weights_of_their_own";
    let site = Site::new();
    let Some(host) = Host::new(test, &site, 2, 3) else { return };
    let spec = site.write("host.toml", &two_devices(&host, &host.node(0), &host.node(1)));
    let plan = site.path("host.plan");
    host.devices.iter().for_each(|device| profile(&site, &device.name));

    // One plan, with the tasks of each device.
    let (code, value) = site.json(&["plan", &spec, "-o", &plan]);
    assert_eq!((code, value["schema"].as_str()), (0, Some("rtvirtio.plan.v2")), "{value}");
    let tasks = |n: usize| {
        let tasks = value["devices"][n]["plan"]["tasks"].as_array().unwrap();
        tasks.iter().map(|t| format!("{}/{}", t["vm"], t["task"]).replace('"', "")).collect::<Vec<_>>()
    };
    assert_eq!(
        (value["devices"][0]["device"].as_str(), tasks(0)),
        (Some("fast"), vec!["both/commit".into(), "a/t".into()])
    );
    assert_eq!(
        (value["devices"][1]["device"].as_str(), tasks(1)),
        (Some("big"), vec!["both/query".into(), "b/t".into()])
    );
    let shown = site.ok(&["plan", &spec]);
    assert!(shown.contains("== device fast") && shown.contains("== device big"), "{shown}");
    let (_, predicted) = site.json(&["predict", &spec]);
    assert_eq!(predicted.as_array().unwrap().len(), 4, "{predicted}");

    // A VM has another weight, and another limit, on each of its devices.
    let fast = [
        (json!("host_elevator"), "bfq"),
        (json!({"host_bfq": "slice_idle"}), "2"),
        (weight("both"), "700"),
        (weight("a"), "50"),
    ];
    let big = [
        (json!("host_elevator"), "bfq"),
        (weight("both"), "200"),
        (weight("b"), "900"),
        (read_iops("b"), "333"),
    ];
    with_settings(&plan, &[settings(&fast), settings(&big)]);
    let before = host.snapshot();
    site.ok(&["apply", &plan, "--dry-run"]);
    assert_eq!(differences(&before, &host.snapshot()), [""; 0]);
    site.ok(&["apply", &plan]);
    let weights: Vec<_> =
        (0..3).map(|vm| host.devices.iter().map(|d| host.weight(vm, d)).collect::<Vec<_>>()).collect();
    assert_eq!(weights, [[Some(700), Some(200)], [Some(50), None], [None, Some(900)]]);
    assert_eq!(host.read_limit(2, &host.devices[1].dev), Some(333));
    assert_eq!(host.read_limit(2, &host.devices[0].dev), None);
    let root = Root::default();
    assert_eq!(host.devices[0].tunables(&root).unwrap()["slice_idle"], "2");
    assert_eq!(host.devices[1].tunables(&root).unwrap()["slice_idle"], "8");

    // One journal, and one status.
    let (code, status) = site.json(&["status"]);
    assert_eq!(code, 0, "{status}");
    for name in host.devices.iter().map(|d| &d.name) {
        assert!(status.to_string().contains(&format!("elevator of {name}")), "{status}");
    }
    assert!(site.state_dir().join("journal.json").exists());

    // All tasks of both devices run at once, each on its own disk.
    let reads = |device: &BlockDevice| -> u64 {
        let stat = root.read(device.sysfs().join("stat")).unwrap();
        stat.split_whitespace().next().unwrap().parse().unwrap()
    };
    let counted: Vec<u64> = host.devices.iter().map(reads).collect();
    // Meanwhile another program changes a setting: what is measured proves nothing of the plan.
    let knob = host.devices[0].sysfs().join("queue/iosched/slice_idle");
    let (begun, set) = (site.run_dir().join("fio"), |value: &str| root.write(&knob, value).unwrap());
    let (code, result) = std::thread::scope(|s| {
        s.spawn(|| {
            wait_for("the run", || begun.exists());
            set("5");
        });
        site.json(&["verify", &spec, "--for", "3s"])
    });
    set("2");
    // 4: nothing missed, and nothing proven; 2: missed, as a busy machine may.
    assert!([2, 4].contains(&code), "{code} {result}");
    assert!(result["changed"].as_str().unwrap().contains("changed during the measurement"), "{result}");
    let scheme = result["runs"][0]["scheme"].as_str().unwrap();
    assert!(scheme.ends_with(", changed during the run"), "{result}");
    let tasks = result["runs"][0]["tasks"].as_array().unwrap();
    let names: Vec<_> = tasks.iter().map(|t| format!("{}/{}", t["vm"], t["task"]).replace('"', "")).collect();
    assert_eq!(names, ["both/commit", "both/query", "a/t", "b/t"]);
    assert!(tasks.iter().all(|t| t["n"].as_u64().unwrap() > 0 && t["predicted_ns"].is_u64()), "{result}");
    for (device, counted) in host.devices.iter().zip(counted) {
        assert!(reads(device) > counted, "{} was not read", device.name);
    }

    assert!(site.ok(&["revert"]).contains("everything was put back"));
    assert_eq!(differences(&before, &host.snapshot()), [""; 0]);
    assert!(!site.state_dir().join("journal.json").exists());
}

/// What is killed between two devices is put back on both.
#[test]
fn a_kill_between_two_devices_is_reverted_on_both() {
    let test = "a_kill_between_two_devices_is_reverted_on_both";
    let site = Site::new();
    let Some(host) = Host::new(test, &site, 2, 3) else { return };
    let spec = site.write("host.toml", &two_devices(&host, &host.node(0), &host.node(1)));
    let plan = site.path("host.plan");
    host.devices.iter().for_each(|device| profile(&site, &device.name));
    site.ok(&["plan", &spec, "-o", &plan]);
    let one = |vm: &str| settings(&[(json!("host_elevator"), "bfq"), (weight(vm), "700")]);
    with_settings(&plan, &[one("a"), one("b")]);
    let before = host.snapshot();
    let mut child = site.spawn(&["apply", &plan, "-q"]);
    // The journal is there before the first setting is written.
    let begun = std::time::Instant::now();
    while !site.state_dir().join("journal.json").exists() && child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < rtvirtio_testkit::HANG, "apply hangs");
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(site.ok(&["revert"]).contains("everything was put back"));
    assert_eq!(differences(&before, &host.snapshot()), [""; 0]);
}

#[test]
fn what_takes_one_device_refuses_several_with_the_place() {
    let test = "what_takes_one_device_refuses_several_with_the_place";
    let site = Site::new();
    let Some(host) = Host::new(test, &site, 2, 3) else { return };
    let spec = site.write("host.toml", &two_devices(&host, &host.node(0), &host.node(1)));
    let out = site.path("out");
    let lab: &[&str] = &["lab", "up", &spec];
    let commands: [&[&str]; 4] = [
        &["tune", &spec],
        &["simulate", &spec, "--for", "1s"],
        &["plan", &spec, "--domain", "-o", &out],
        lab,
    ];
    for args in commands {
        let said = site.refused(args);
        assert!(
            said.contains("takes one device, and this spec has 2") && said.contains(":4:1"),
            "{args:?}: {said}"
        );
    }
    for args in [
        &["plan", &spec, "--profile", PROFILE][..],
        &["apply", &spec, "--profile", PROFILE, "--dry-run"],
        &["profile", &spec, "--out", &out],
    ] {
        let said = site.refused(args);
        assert!(said.contains("the spec has 2"), "{args:?}: {said}");
    }
    assert!(!Path::new(&out).exists());
}

/// Limits of neighbours are chosen on each device with a target. A VM on several has one limit for
/// all of them, which none of them can choose.
#[test]
fn limits_are_chosen_on_the_devices_with_a_target() {
    let test = "limits_are_chosen_on_the_devices_with_a_target";
    let site = Site::new();
    let Some(host) = Host::new(test, &site, 2, 3) else { return };
    // The other one, which has no target, need not be measured.
    profile(&site, &host.devices[0].name);
    let (fast, big) = (host.node(0), host.node(1));
    let on = |name: &str, node: &str| format!("device = \"{name}\"\ndisk = \"{node}\"\n");
    let bulk = |name: &str, disk: &str| {
        format!("[[vm.task]]\nname = \"{name}\"\n{disk}op = \"read\"\nblock = \"16KiB\"\ndepth = 16\n")
    };
    let spec = |name: &str, last: &str| {
        let vm = |n: usize, more: &str| {
            format!("[[vm]]\nname = \"vm{n}\"\ncgroup = '{}'\n{more}", host.vm(n).display())
        };
        let text = format!(
            "[[device]]\nname = \"fast\"\npath = \"{fast}\"\n[[device]]\nname = \"big\"\npath = \"{big}\"\n{}{}{}",
            vm(0, &(on("fast", &fast) + &reader("t", None, 100))),
            vm(1, &(on("fast", &fast) + &bulk("t", ""))),
            vm(2, last),
        );
        site.write(name, &text)
    };
    let plain = spec("plain.toml", &(on("big", &big) + &bulk("t", "")));
    let saved = site.path("saved.toml");
    let (code, found) = site.json(&["plan", &plain, "--traffic", "-o", &saved]);
    assert_eq!((code, &found["device"]), (0, &json!("fast")), "{found}");
    let limits = found["limits"].as_array().unwrap();
    assert_eq!((limits.len(), &limits[0]["vm"]), (1, &json!("vm1")), "{found}");
    let (before, after) = (fs::read_to_string(&plain).unwrap(), fs::read_to_string(&saved).unwrap());
    assert_eq!(after.lines().filter(|line| !before.contains(line)).count(), 1, "{after}");
    let refused = |args: &[&str], says: &str| {
        let out = site.output(args);
        let said = text(&out.stderr);
        assert!(out.status.code() == Some(1) && said.contains(says), "{args:?}: {said}");
    };
    refused(&["plan", &plain, "--traffic", "--profile", PROFILE], "the spec has 2");
    let disks = format!(
        "disks = [{{ name = \"log\", device = \"fast\", path = \"{fast}\" }}, {{ name = \"data\", device = \"big\", path = \"{big}\" }}]\n"
    );
    let both = spec("both.toml", &(disks + &bulk("t", "disk = \"log\"\n") + &bulk("u", "disk = \"data\"\n")));
    refused(&["plan", &both, "--traffic"], "vm vm2: it has tasks on 2 devices");
}

/// A partition stands for its disk, and the plan names it; a disk is named once.
#[test]
fn settings_of_a_partition_act_on_its_disk() {
    let test = "settings_of_a_partition_act_on_its_disk";
    let site = Site::new();
    let Some(host) = Host::new(test, &site, 1, 3) else { return };
    let (disk, node) = (&host.devices[0], host.node(0));
    let added = Command::new("addpart").args([&node, "1", "2048", "65536"]).output();
    match &added {
        Ok(out) if out.status.success() => {}
        Ok(out) => return skip(test, &format!("addpart: {}", text(&out.stderr).trim())),
        Err(e) => return skip(test, &format!("addpart: {e}")),
    }
    profile(&site, &disk.name);
    let spec = format!(
        "[device]\npath = \"{node}p1\"\n[[vm]]\nname = \"a\"\ncgroup = '{}'\n{task}[[vm]]\nname = \"b\"\ncgroup = '{}'\n{task}",
        host.vm(0).display(),
        host.vm(1).display(),
        task = reader("t", None, 20),
    );
    let spec = site.write("part.toml", &spec);
    let plan = site.path("part.plan");
    let shown = site.ok(&["plan", &spec, "-o", &plan]);
    let note = format!("{}p1 is a partition: settings act on the whole disk {}", disk.name, disk.name);
    assert!(shown.replace('\n', " ").contains(&note), "{shown}");
    with_settings(&plan, &[settings(&[(json!("host_elevator"), "bfq"), (weight("a"), "300")])]);
    let before = host.snapshot();
    site.ok(&["apply", &plan]);
    assert_eq!(disk.elevators(&Root::default()).unwrap().current, "bfq");
    assert_eq!(host.weight(0, disk), Some(300));
    site.ok(&["revert"]);
    assert_eq!(differences(&before, &host.snapshot()), [""; 0]);

    let twice = two_devices(&host, &node, &format!("{node}p1"));
    let twice = site.write("twice.toml", &twice);
    let said = site.refused(&["apply", &twice, "--dry-run"]);
    assert!(said.contains("are on one disk"), "{said}");
}

/// A disk that has no file for an elevator leaves no choice: limits act on it, and nothing else.
#[test]
fn a_disk_without_an_elevator_takes_limits_only() {
    let test = "a_disk_without_an_elevator_takes_limits_only";
    if !has(test, &[Need::Root, Need::Path("/sys/block/zram0", "no zram device")]) {
        return;
    }
    let site = Site::new();
    let Some(host) = Host::new(test, &site, 0, 1) else { return };
    let root = Root::default();
    let zram = BlockDevice::find(&root, "zram0").unwrap();
    profile(&site, "zram0");
    let spec = format!(
        "[device]\npath = \"/dev/zram0\"\n[[vm]]\nname = \"a\"\ncgroup = '{}'\n{}",
        host.vm(0).display(),
        reader("t", None, 20)
    );
    let spec = site.write("zram.toml", &spec);
    let plan = site.path("zram.plan");
    let (code, value) = site.json(&["plan", &spec, "-o", &plan]);
    assert_eq!(code, 0, "{value}");
    let notes = value["devices"][0]["notes"].to_string();
    assert!(notes.contains("only limits can act") && notes.contains("zram0 is memory"), "{notes}");
    let chosen = value["devices"][0]["plan"]["settings"].to_string();
    assert!(!chosen.contains("elevator") && !chosen.contains("weight"), "{chosen}");

    let before = host.snapshot();
    for knob in [json!("host_elevator"), weight("a")] {
        let value = if knob.is_string() { "bfq" } else { "300" };
        with_settings(&plan, &[settings(&[(knob, value)])]);
        let said = site.refused(&["apply", &plan]);
        assert!(said.contains("limits"), "{said}");
    }
    with_settings(&plan, &[settings(&[(read_iops("a"), "500")])]);
    site.ok(&["apply", &plan]);
    assert_eq!(host.read_limit(0, &zram.dev), Some(500));
    site.ok(&["revert"]);
    assert_eq!(differences(&before, &host.snapshot()), [""; 0]);
}

#[test]
fn limits_of_traffic_are_set_shown_and_put_back() {
    let test = "limits_of_traffic_are_set_shown_and_put_back";
    let site = Site::new();
    let Some(host) = Host::new(test, &site, 1, 2) else { return };
    let before = host.snapshot();
    let vm = |n: usize, traffic: &str| {
        format!(
            "[[vm]]\nname = \"vm{n}\"\ncgroup = '{}'\n{traffic}[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n",
            host.vm(n).display()
        )
    };
    let limited = "traffic.read = { rate = \"500/s\" }\ntraffic.write = { rate = \"20MB/s\", burst = \"1MiB\" }\n\
         traffic.rx = { rate = \"1MB/s\" }\n";
    let text = format!("[device]\npath = \"{}\"\n{}{}", host.node(0), vm(0, limited), vm(1, ""));
    let spec = site.write("s.toml", &text);
    let args = ["apply", &spec, "--traffic-only"];
    let (code, lines) = site.json(&[&args[..], &["--dry-run"]].concat());
    let new: Vec<&str> = lines.as_array().unwrap().iter().map(|line| line["new"].as_str().unwrap()).collect();
    assert_eq!(code, 0, "{lines}");
    assert!(new.len() == 2 && new[0].contains("20000000") && new[1].contains("500"), "{lines}");
    assert_eq!(differences(&before, &host.snapshot()), Vec::<String>::new(), "a dry run changes nothing");

    let out = site.output(&args);
    let said = rtvirtio_testkit::site::text(&out.stderr);
    assert!(out.status.success() && said.contains("rx of vm0 not set"), "{said}");
    assert_eq!(host.read_limit(0, &host.devices[0].dev), Some(500));
    assert_eq!(host.read_limit(1, &host.devices[0].dev), None);
    let (code, status) = site.json(&["status"]);
    assert_eq!((code, status["knobs"].as_array().unwrap().len()), (0, 2), "{status}");
    site.ok(&["revert"]);
    assert_eq!(differences(&before, &host.snapshot()), Vec::<String>::new());

    let target = "[[vm.task]]\nname = \"in-time\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"501/s\"\n\
         target = { percentile = \"p99\", latency = \"1s\" }\n";
    let own = format!("[device]\npath = \"{}\"\n{}{target}", host.node(0), vm(0, limited));
    let spec = site.write("own.toml", &own);
    let refused = site.output(&["apply", &spec, "--traffic-only"]);
    assert_eq!(refused.status.code(), Some(2), "{}", rtvirtio_testkit::site::text(&refused.stderr));
    let none = site.write("none.toml", &format!("[device]\npath = \"{}\"\n{}", host.node(0), vm(1, "")));
    assert_eq!(site.output(&["apply", &none, "--traffic-only"]).status.code(), Some(1));
    assert_eq!(differences(&before, &host.snapshot()), Vec::<String>::new());
}

/// A VM in a cgroup of its own, with a limit in its plan, and the plan.
fn limited(host: &Host, site: &Site, rate: u32) -> (String, String) {
    let cgroup = host.vm(0).display().to_string();
    let task = reader("t", None, rate);
    let vm = format!("[[vm]]\nname = \"a\"\ncgroup = '{cgroup}'\n{task}");
    let spec = site.write("one.toml", &format!("[device]\npath = \"{}\"\n{vm}", host.node(0)));
    (spec, site.path("one.plan"))
}

/// What a plan was made from may be another by the time it is applied.
#[test]
fn a_plan_of_another_spec_or_measurement_is_refused() {
    let test = "a_plan_of_another_spec_or_measurement_is_refused";
    let site = Site::new();
    let Some(host) = Host::new(test, &site, 1, 1) else { return };
    profile(&site, &host.devices[0].name);
    let (spec, plan) = limited(&host, &site, 50);
    site.ok(&["plan", &spec, "-o", &plan]);
    with_settings(&plan, &[settings(&[(read_iops("a"), "333")])]);
    let refused = |what: &str| {
        let before = host.snapshot();
        for args in [&["apply", &plan][..], &["apply", &plan, "--dry-run"]] {
            let said = site.refused(args);
            assert!(said.contains(what) && said.contains("--force"), "{said}");
        }
        assert_eq!(differences(&before, &host.snapshot()), [""; 0]);
    };
    site.ok(&["apply", &plan, "--dry-run"]);
    limited(&host, &site, 90);
    refused("the spec has changed since");
    limited(&host, &site, 50);
    let saved = site.state_dir().join("profiles").join(format!("{}.json", host.devices[0].name));
    let text = fs::read_to_string(&saved).unwrap();
    let mut other: Value = serde_json::from_str(&text).unwrap();
    other["cpus"] = json!(64);
    fs::write(&saved, other.to_string()).unwrap();
    refused("was measured anew since");
    site.ok(&["apply", &plan, "--force"]);
    assert_eq!(host.read_limit(0, &host.devices[0].dev), Some(333));
    site.ok(&["revert"]);
}

/// Settings act without the state directory, and only it can put them back.
#[test]
fn a_state_directory_that_is_lost_or_mistyped_is_not_taken_for_nothing_in_force() {
    let test = "a_state_directory_that_is_lost_or_mistyped_is_not_taken_for_nothing_in_force";
    let site = Site::new();
    let Some(host) = Host::new(test, &site, 1, 1) else { return };
    profile(&site, &host.devices[0].name);
    let (spec, plan) = limited(&host, &site, 50);
    site.ok(&["plan", &spec, "-o", &plan]);
    with_settings(&plan, &[settings(&[(read_iops("a"), "333")])]);
    let before = host.snapshot();
    site.ok(&["apply", &plan]);
    assert_eq!(site.json(&["status"]).0, 0);
    let said = |args: &[&str], what: &str| {
        let out = site.output(args);
        let all = text(&out.stdout) + &text(&out.stderr);
        assert!(all.contains(what), "{args:?}: {all}");
        assert!(!all.contains("nothing to put back"), "{args:?}: {all}");
        out.status.code()
    };

    let typo = site.path("sate");
    for command in ["status", "revert", "check"] {
        let code = said(&["--state-dir", &typo, command], "another state directory has in its journal");
        assert!(code == Some(3) || command == "check", "{command}: {code:?}");
    }
    assert_eq!(host.read_limit(0, &host.devices[0].dev), Some(333));

    let away = site.dir.path().join("away");
    fs::rename(site.state_dir(), &away).unwrap();
    for command in ["status", "revert", "check"] {
        let code = said(&[command], "their journal is lost");
        assert!(code == Some(3) || command == "check", "{command}: {code:?}");
    }
    // What it would find would be taken for what was there before.
    profile(&site, &host.devices[0].name);
    let (code, refused) = site.json(&["apply", &plan]);
    assert!(code != 0 && refused["error"].as_str().unwrap().contains("journal is lost"), "{refused}");
    fs::remove_dir_all(site.state_dir()).unwrap();
    fs::rename(&away, site.state_dir()).unwrap();
    assert_eq!(site.json(&["status"]).0, 0);
    site.ok(&["revert"]);
    assert_eq!(differences(&before, &host.snapshot()), [""; 0]);
    // Nothing acts any more, also where the directory goes then.
    fs::remove_dir_all(site.state_dir()).unwrap();
    assert_eq!(site.json(&["status"]).0, 0);
    assert!(site.ok(&["revert"]).contains("nothing to put back"));
}

/// Whatever is measured, nothing else is set meanwhile.
#[test]
fn a_gentle_measurement_takes_the_lock_and_replaces_no_whole_one() {
    let test = "a_gentle_measurement_takes_the_lock_and_replaces_no_whole_one";
    let site = Site::new();
    let Some(host) = Host::new(test, &site, 1, 0) else { return };
    let held = rtvirtio_apply::Session::open(site.state_dir()).unwrap();
    let node = host.node(0);
    let gentle = ["profile", &node, "--gentle", "--for", "4s"];
    let said = site.refused(&gentle);
    assert!(said.contains("another rtvirtio"), "{said}");
    drop(held);
    // A whole measurement is not replaced by one that shows less.
    profile(&site, &host.devices[0].name);
    let said = site.refused(&gentle);
    assert!(said.contains("--replace"), "{said}");
}
