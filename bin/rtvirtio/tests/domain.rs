//! The I/O domain from the user's side: planned, simulated, applied, stopped, and under a lab's
//! guests.

use std::path::{Path, PathBuf};

mod plane;

use plane::{Plane, differences};
use rtvirtio_domain_client::{BlkRequest, Client, Options};
use rtvirtio_testbed::RamDisk;
use rtvirtio_testbed::netns::{self, Namespace};
use rtvirtio_testkit::site::{PROFILE, Site, can_run, project, text};
use rtvirtio_testkit::{ChildGuard, Machine, Need, has};
use rtvirtio_units::Bytes;

fn vm(name: &str, reach: &str, task: &str) -> String {
    format!(
        "[[vm]]\nname = \"{name}\"\n{reach}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n{task}\n"
    )
}

const RATE: &str = "rate = \"500/s\"\ntarget = { percentile = \"p99.99\", latency = \"80ms\" }";

#[test]
fn a_simulation_shows_worst_case_and_bound() {
    let site = Site::new();
    let both = ["simulate", "examples/flood.toml", "--for", "20s", "--policy", "edf", "--policy", "fifo"];
    let (code, out) = site.json(&both);
    assert_eq!(code, 0, "{out:#}");
    assert_eq!(out["simulated"], true);
    let tasks = |i: usize| out["runs"][i]["tasks"].as_array().unwrap().clone();
    for (edf, fifo) in tasks(0).iter().zip(tasks(1)).filter(|(t, _)| !t["target"].is_null()) {
        assert!(edf["bound_over_longest"].as_f64().unwrap() >= 1.0, "{edf:#}");
        assert!(edf["p50"].as_u64() < fifo["p50"].as_u64(), "{edf:#} {fifo:#}");
        assert!(fifo["bound"].is_null(), "the bound is the plan's: {fifo:#}");
    }
    // The same seed gives the same run.
    let (_, again) = site.json(&both);
    assert_eq!(again["runs"][0]["tasks"], out["runs"][0]["tasks"]);
    let (_, worst) = site.json(&["simulate", "examples/flood.toml", "--for", "20s", "--worst"]);
    let longest = |out: &serde_json::Value| out["runs"][0]["tasks"][0]["longest"].as_u64().unwrap();
    assert!(longest(&worst) > longest(&out), "{worst:#}");
    // More than the device can do: said, with a reason, and by the exit code.
    let much = vm("a", "lab = \"qemu\"", &RATE.replace("500", "20000"));
    let spec = site.write("much.toml", &format!("[device]\ntwin = \"qlc-nvme\"\n{much}"));
    let (code, out) = site.json(&["simulate", &spec, "--for", "1s"]);
    assert_eq!(code, 2, "{out:#}");
    assert!(
        out["plan"]["vms"][0]["refused"].as_str().unwrap().contains("% of the device are reserved"),
        "{out:#}"
    );
}

#[test]
fn flows_are_planned_and_played() {
    let site = Site::new();
    let (code, out) = site.json(&["simulate", "examples/station.toml", "--for", "5s", "--worst"]);
    assert_eq!(code, 0, "{out:#}");
    let flows = out["networks"][0]["flows"].as_array().unwrap();
    assert_eq!(flows.len(), 3, "{out:#}");
    for flow in flows.iter().filter(|flow| !flow["target"].is_null()) {
        assert_eq!(flow["met"], true, "{flow:#}");
        assert!(flow["longest"].as_u64() <= flow["bound"].as_u64(), "{flow:#}");
    }
    let text_of = std::fs::read_to_string(project().join("examples/station.toml")).unwrap();
    // A link too slow for it: said, with a reason, and by the exit code.
    let spec = &site.write("station.toml", &text_of.replace("100Mbit/s", "4Mbit/s"));
    let planned = site.output(&["plan", spec, "--domain", "--profile", PROFILE]);
    assert_eq!(planned.status.code(), Some(2), "{}", text(&planned.stderr));
    assert!(text(&planned.stdout).contains("relay/goose: no promise:"), "{}", text(&planned.stdout));
    // What goes to a VM has no class.
    let whole = std::fs::read_to_string(spec).unwrap();
    let to_vm =
        whole.replace("name = \"report\"\ndirection = \"tx\"", "name = \"report\"\ndirection = \"rx\"");
    assert_ne!(to_vm, whole);
    std::fs::write(spec, to_vm.replace("4Mbit/s", "100Mbit/s")).unwrap();
    let tc = site.output(&["plan", spec, "--tc", "up0"]);
    assert_eq!(tc.status.code(), Some(2), "{}", text(&tc.stderr));
    assert!(text(&tc.stderr).contains("relay/report: frames to a VM"), "{}", text(&tc.stderr));
    assert!(text(&tc.stdout).contains("# relay/report: NO RATE OF ITS OWN"), "{}", text(&tc.stdout));
    let kernel = site.output(&["plan", spec, "--profile", PROFILE]);
    assert!(
        text(&kernel.stderr).contains("flows of the spec's networks are left out"),
        "{}",
        text(&kernel.stderr)
    );
}

#[test]
fn a_domain_is_planned_applied_and_stopped() {
    let test = "a_domain_is_planned_applied_and_stopped";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    let disk = RamDisk::new(Bytes(64 << 20)).unwrap();
    let image = site.dir.path().join("b.img");
    std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    let body = format!(
        "[device]\npath = \"{}\"\n{}{}",
        disk.device().display(),
        vm("a", "pid = 1", RATE),
        vm("b", "pid = 2", "depth = 32")
    );
    let (spec, file) = (&site.write("two.toml", &body), &site.path("iod.toml"));
    let a = format!("a={}", disk.device().display());
    let b = format!("b={}", image.display());
    let planned = |disks: &[&str]| {
        let mut args = vec!["plan", spec, "--domain", "--profile", PROFILE, "-o", file];
        for disk in disks {
            args.extend(["--disk", disk]);
        }
        site.output(&args)
    };
    // Nothing is guessed about where disks are.
    for (disks, said) in [
        (vec![], "--disk a=PATH"),
        (vec!["x=/dev/null"], "no VM \"x\""),
        (vec!["a"], "write VM=PATH"),
        (vec![a.as_str(), a.as_str()], "another --disk"),
    ] {
        let out = planned(&disks);
        assert!(!out.status.success() && text(&out.stderr).contains(said), "{}", text(&out.stderr));
        assert!(!Path::new(file).exists());
    }
    let out = planned(&[&a, &b]);
    assert_eq!(out.status.code(), Some(0), "{}{}", text(&out.stdout), text(&out.stderr));
    assert!(text(&out.stdout).contains("guaranteed"), "{}", text(&out.stdout));
    assert!(text(&out.stdout).contains("guaranteed: from the submission"), "{}", text(&out.stdout));

    let text_of_file = std::fs::read_to_string(file).unwrap();
    let relative = text_of_file.replace(&image.display().to_string(), "b.img");
    let said = site.refused(&["apply", &site.write("relative.toml", &relative), "--dry-run"]);
    assert!(said.contains("must be an absolute path"), "{said}");
    let dry = site.ok(&["apply", file, "--dry-run"]);
    assert!(dry.contains("vhost-user-blk-pci") && dry.contains("<disk type='vhostuser'"), "{dry}");
    assert!(!site.state_dir().join("iod.toml").exists(), "a dry run changes nothing");
    let (code, status) = site.json(&["apply", file]);
    assert_eq!((code, status["vms"].as_array().unwrap().len()), (0, 2), "{status:#}");
    assert!(site.ok(&["status"]).contains("I/O domain: process"));
    let (_, in_force) = site.json(&["status"]);
    assert_eq!(in_force["domain"]["pids"].as_array().unwrap().len(), 1, "{in_force:#}");
    let twice = site.refused(&["apply", file]);
    assert!(twice.contains("applied already"), "{twice}");

    // It serves; and it is not taken away from under a guest.
    let socket: PathBuf = site.run_dir().join("disks/a.sock");
    let mut client = Client::connect(&socket, Options::default()).unwrap();
    assert_eq!(client.capacity, 64 << 20);
    let queue = &mut client.queues[0];
    queue.push(&BlkRequest { kind: 0, priority: 0, sector: 0, len: 4_096 }).unwrap();
    queue.notify().unwrap();
    let answer = (0..100_000).find_map(|_| {
        std::thread::sleep(std::time::Duration::from_micros(100));
        queue.pop_used()
    });
    assert_eq!(answer.unwrap().status, 0);
    let out = site.output(&["revert"]);
    assert_eq!(out.status.code(), Some(3), "{}{}", text(&out.stdout), text(&out.stderr));
    let said = text(&out.stdout);
    assert!(said.contains("serves a:") && said.contains("--stop-domain"), "{said}");
    assert!(!said.contains("put back"), "{said}");
    // Also not when the file is edited and wrong; and to force settings is not to stop guests.
    let applied = site.state_dir().join("iod.toml");
    let right = std::fs::read_to_string(&applied).unwrap();
    std::fs::write(&applied, "[[device]]\nnam = 1\n").unwrap();
    let (code, out) = site.json(&["revert", "--force"]);
    assert_eq!((code, &out["domain"]["fate"], &out["done"]), (3, &"left".into(), &false.into()), "{out:#}");
    assert!(out["domain"]["why"].as_str().unwrap().contains("serves a:"), "{out:#}");
    std::fs::write(&applied, right).unwrap();
    let (code, out) = site.json(&["revert", "--stop-domain"]);
    assert_eq!((code, &out["domain"]["fate"], &out["done"]), (0, &"stopped".into(), &true.into()), "{out:#}");
    drop(client);
    // A wrong file of an I/O domain without guests keeps nothing from going back.
    site.ok(&["apply", file]);
    std::fs::write(&applied, "[[device]]\nnam = 1\n").unwrap();
    let (code, out) = site.json(&["revert"]);
    assert_eq!((code, &out["domain"]["fate"], &out["done"]), (0, &"stopped".into(), &true.into()), "{out:#}");
    assert!(site.ok(&["status"]).contains("no plan is in force"));
    assert!(site.ok(&["revert"]).contains("nothing to put back"));
    site.assert_clean();
}

/// The line for QEMU is the one that a user pastes: it starts a VM with more CPUs than the disk has
/// queues, also where the socket's path has characters that QEMU or a shell takes for its own.
#[test]
fn the_printed_line_starts_a_qemu() {
    let test = "the_printed_line_starts_a_qemu";
    if !can_run(test) || !has(test, &[Need::QEMU]) {
        return;
    }
    let site = Site::new();
    let config = site.domain_of_a_file();
    let plain = std::fs::read_to_string(&config).unwrap();
    for (name, keys) in [("disks/a.sock", ""), ("disks/a,b & it's c.sock", "queues = 3\n")] {
        std::fs::write(&config, plain.replace("disks/a.sock", name) + keys).unwrap();
        let shown = site.ok(&["apply", config.to_str().unwrap()]);
        let lines: Vec<&str> = shown.lines().map(str::trim).collect();
        let memory = lines.iter().find(|line| line.starts_with("-object")).unwrap().replace("MEMORY", "64M");
        let disk = lines.iter().find_map(|line| line.strip_prefix("a: -chardev")).unwrap();
        // As a shell reads it.
        let script = format!("for word in {memory} -chardev{disk} -smp 2 -S; do echo \"$word\"; done");
        let words = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        assert!(words.status.success() && words.stderr.is_empty(), "{}: {shown}", text(&words.stderr));
        let words = text(&words.stdout);
        let dir = rtvirtio_testkit::tempdir().unwrap();
        // Its monitor answers when every device is realized.
        let machine = Machine::start(dir.path(), "printed", &words.lines().collect::<Vec<_>>());
        let control = site.run_dir().join("iod.sock");
        let (_, status) = site.json(&["iod", "status", "--control", control.to_str().unwrap()]);
        assert_eq!(status["vms"][0]["peer"], machine.pid(), "{name}: {status:#}");
        drop(machine);
        rtvirtio_testkit::site::wait_for("QEMU's end", || site.output(&["revert"]).status.success());
    }
    site.assert_clean();
}

/// Each part is put back by itself: an I/O domain with guests keeps no setting from going back.
#[test]
fn settings_go_back_while_the_domain_serves_guests() {
    let test = "settings_go_back_while_the_domain_serves_guests";
    let site = Site::new();
    let Some(plane) = Plane::new(test, &site) else { return };
    let before = plane.snapshot();
    site.ok(&["apply", site.domain_of_a_file().to_str().unwrap()]);
    site.ok(&["apply", plane.plan()]);
    assert!(!differences(&before, &plane.snapshot()).is_empty());
    let client = Client::connect(&site.run_dir().join("disks/a.sock"), Options::default()).unwrap();
    let out = site.output(&["revert"]);
    let said = text(&out.stdout);
    assert_eq!(out.status.code(), Some(3), "{said}{}", text(&out.stderr));
    assert!(said.contains("every setting was put back, the I/O domain was not"), "{said}");
    assert!(said.contains("--stop-domain") && !said.contains("everything was put back"), "{said}");
    assert_eq!(differences(&before, &plane.snapshot()), [""; 0]);
    assert!(site.ok(&["status"]).contains("I/O domain: process"));
    drop(client);
    // The guest is gone: now the rest goes too, without a word of force.
    rtvirtio_testkit::site::wait_for("the guest's end", || site.output(&["revert"]).status.success());
    assert!(site.ok(&["status"]).contains("no plan is in force"));
    drop(plane);
    site.assert_clean();
}

/// The I/O domain is known by its lock: neither a process that has its name and arguments, nor one
/// that writes its files, stands for it.
#[test]
fn a_process_of_another_user_with_the_domains_name_is_none() {
    use std::os::unix::process::CommandExt as _;
    let test = "a_process_of_another_user_with_the_domains_name_is_none";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    let config = site.state_dir().join("iod.toml");
    let mut foreign = ChildGuard(
        std::process::Command::new("sh")
            .arg0("/usr/bin/rtvirtio-iod")
            .args(["-c", "read x", "rtvirtio-iod", "--config"])
            .arg(&config)
            .stdin(std::process::Stdio::piped())
            .uid(65534)
            .gid(65534)
            .current_dir("/")
            .spawn()
            .unwrap(),
    );
    site.ok(&["apply", site.domain_of_a_file().to_str().unwrap()]);
    let (_, status) = site.json(&["status"]);
    let pids: Vec<u64> =
        status["domain"]["pids"].as_array().unwrap().iter().map(|p| p.as_u64().unwrap()).collect();
    assert_eq!(pids.len(), 1, "{status:#}");
    assert_ne!(pids[0], u64::from(foreign.id()));
    let record: serde_json::Value =
        serde_json::from_slice(&std::fs::read(site.state_dir().join("iod.json")).unwrap()).unwrap();
    assert_eq!(record["pid"], pids[0], "{record}");
    let said = site.ok(&["revert", "--force", "--stop-domain"]);
    assert!(said.contains("the I/O domain is stopped"), "{said}");
    assert_eq!(foreign.try_wait().unwrap(), None, "the other user's process is alive");
    assert!(site.ok(&["revert"]).contains("nothing to put back"));
    assert_eq!(foreign.try_wait().unwrap(), None);
    drop(foreign);
    site.assert_clean();
}

/// Files of the state directory are made anew: a symbolic link that lies there leads nowhere.
#[test]
fn links_in_the_state_directory_are_not_followed() {
    let test = "links_in_the_state_directory_are_not_followed";
    let site = Site::new();
    let Some(plane) = Plane::new(test, &site) else { return };
    let victim = site.dir.path().join("victim");
    std::fs::write(&victim, "precious").unwrap();
    std::fs::create_dir(site.state_dir()).unwrap();
    let names = ["iod.toml", "iod.log", "iod.json", "plan.json", "cpu.json", "iod.toml.new", "plan.json.new"];
    for name in names {
        std::os::unix::fs::symlink(&victim, site.state_dir().join(name)).unwrap();
    }
    // One that is there already is an I/O domain in force, which has ended.
    let config = site.domain_of_a_file();
    site.refused(&["apply", config.to_str().unwrap()]);
    std::fs::remove_file(site.state_dir().join("iod.toml")).unwrap();
    std::fs::remove_file(site.state_dir().join("iod.json")).unwrap();
    site.ok(&["apply", config.to_str().unwrap()]);
    site.ok(&["apply", plane.plan()]);
    assert!(site.ok(&["status"]).contains("in force"));
    assert!(site.ok(&["revert"]).contains("everything was put back"));
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious");
    // A directory of another user is none to write in.
    std::os::unix::fs::chown(site.state_dir(), Some(65534), Some(65534)).unwrap();
    for args in [vec!["apply", config.to_str().unwrap()], vec!["apply", plane.plan()], vec!["revert"]] {
        let said = site.refused(&args);
        assert!(said.contains("65534"), "{said}");
    }
    drop(plane);
    site.assert_clean();
}

#[test]
fn guests_run_on_a_planned_domain() {
    let test = "guests_run_on_a_planned_domain";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    let body = format!(
        "[device]\ntwin = \"qlc-nvme\"\nsize = \"128MiB\"\n{}{}",
        vm("a", "lab = \"qemu\"", RATE),
        vm("b", "lab = \"qemu\"", "depth = 8")
    );
    let spec = site.write("lab.toml", &body);
    let said = site.ok(&["lab", "up", &spec, "--domain", "--accel", "tcg", "--profile", PROFILE]);
    assert!(said.contains("guaranteed"), "{said}");
    let (_, state) = site.json(&["lab", "status"]);
    assert!(state["iod"]["pid"].as_u64().is_some(), "{state:#}");
    let (_, result) = site.json(&["lab", "run", "--for", "3s"]);
    assert!(result["host"]["vmm"].as_str().unwrap().contains("through the I/O domain"), "{result:#}");
    for task in result["runs"][0]["tasks"].as_array().unwrap() {
        assert!(task["n"].as_u64().unwrap() > 0, "{task:#}");
    }
    let agent = site.run_dir().join("guests/a.qga");
    let (_, found) = site.json(&["check", "--guest", agent.to_str().unwrap()]);
    let tasks = found.as_array().unwrap().iter().find(|f| f["id"] == "guest.tasks").unwrap();
    assert_eq!(tasks["level"], "ok", "{tasks:#}");
    let guest = found.as_array().unwrap().iter().find(|f| f["id"] == "guest.ioprio").unwrap();
    assert!(guest["what"].as_str().unwrap().contains("Linux "), "{guest:#}");
    // All of it went through the I/O domain.
    let (_, seen) = site.json(&["iod", "status"]);
    for vm in seen["vms"].as_array().unwrap() {
        assert!(vm["read"]["requests"].as_u64().unwrap() > 0, "{seen:#}");
        assert_eq!((&vm["errors"], &vm["malformed"]), (&0.into(), &0.into()), "{seen:#}");
    }
    assert!(seen["vms"][0]["reserved"].as_u64().unwrap() > 0, "requests go by their deadlines: {seen:#}");
    site.ok(&["lab", "down"]);
    site.assert_clean();
}

/// The kernel takes the classes, and sorts frames by who sends them.
#[test]
fn flows_become_classes_of_the_kernel() {
    let test = "flows_become_classes_of_the_kernel";
    if !has(test, &[Need::Root, Need::Program("tc")]) {
        return;
    }
    let site = Site::new();
    for (of, said) in [("a;b", "is no name of an interface"), ("x=eth0", "has no network \"x\"")] {
        let refused = site.refused(&["plan", "examples/station.toml", "--tc", of]);
        assert!(refused.contains(said), "{refused}");
    }
    let script = site.ok(&["plan", "examples/station.toml", "--tc", "up0"]);
    assert!(script.contains("not deadlines"), "{script}");
    // `flower`, which knows VLAN tags, is a module that a small kernel lacks.
    let script: String = script.lines().filter(|l| !l.contains("flower")).map(|l| format!("{l}\n")).collect();
    let namespace = Namespace::new().unwrap();
    let shown = std::thread::scope(|s| {
        let inside = || {
            namespace.enter().unwrap();
            netns::run("ip", "link add up0 type veth peer name up1").unwrap();
            netns::run("ip", "link set up0 up").unwrap();
            let file = site.dir.path().join("tc.sh");
            std::fs::write(&file, &script).unwrap();
            // It can be repeated; where a command fails, nothing of it stays.
            std::fs::write(&file, script.clone() + "tc filter add dev up0 parent 1: nonsense\n").unwrap();
            netns::run("sh", file.to_str().unwrap()).unwrap_err();
            assert!(!netns::run("tc", "qdisc show dev up0").unwrap().contains("htb"));
            std::fs::write(&file, &script).unwrap();
            netns::run("sh", file.to_str().unwrap()).unwrap();
            netns::run("sh", file.to_str().unwrap()).unwrap();
            netns::run("tc", "class show dev up0").unwrap()
                + &netns::run("tc", "filter show dev up0").unwrap()
        };
        s.spawn(inside).join().unwrap()
    });
    // The gateway's upload has no target: 64 kbit/s, and what is left.
    assert_eq!(shown.matches("class htb 1:").count(), 6, "{shown}");
    assert!(shown.contains("match 0000000a") || shown.contains("match 000a0000"), "{shown}");
}

#[test]
fn a_domain_of_networks_is_applied() {
    let test = "a_domain_of_networks_is_applied";
    if !has(test, &[Need::Root, Need::Program("ip")]) {
        return;
    }
    let site = Site::new();
    let socket = site.run_dir().join("ports/relay.sock");
    let body = format!(
        "control = \"{}\"\n[[network]]\nname = \"n\"\nlink = \"100Mbit/s\"\n[[network.port]]\nname = \"relay\"\n\
         socket = \"{}\"\ntap = \"tap-relay\"\nmac = \"52:54:00:00:00:0a\"\n",
        site.run_dir().join("iod.sock").display(),
        socket.display()
    );
    let file = &site.write("iod.toml", &body);
    let namespace = Namespace::new().unwrap();
    let (mut apply, mut revert) = (site.command(&["apply", file]), site.command(&["revert"]));
    std::thread::scope(|s| {
        let inside = || {
            namespace.enter().unwrap();
            netns::run("ip", "tuntap add dev tap-relay mode tap").unwrap();
            let applied = apply.output().unwrap();
            let shown = text(&applied.stdout);
            assert!(applied.status.success(), "{}", text(&applied.stderr));
            assert!(
                shown.contains("vhost-user,id=net0") && shown.contains("mac=52:54:00:00:00:0a"),
                "{shown}"
            );
            assert!(socket.exists());
            let reverted = revert.output().unwrap();
            assert!(reverted.status.success(), "{}", text(&reverted.stderr));
        };
        s.spawn(inside).join().unwrap();
    });
    site.assert_clean();
}
