//! `threads` and `apply --cpu-only` on a real QEMU.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Output};

use rtvirtio_testkit::site::{Site, signal, text};
use rtvirtio_testkit::{ChildGuard, Machine, Need, has, skip, vm_spec};
use rustix::process::Signal;
use serde_json::Value;

fn machine(test: &str, site: &Site) -> Option<Machine> {
    let options = ["-machine", "q35", "-smp", "2", "-object", "iothread,id=disk"];
    has(test, &[Need::Root, Need::QEMU]).then(|| Machine::start(site.dir.path(), "plc", &options))
}

fn spec(site: &Site, vm: &str, cpu: &str) -> String {
    site.write("plant.toml", &vm_spec("/dev/sdz", vm, &site.dir.path().join("qmp"), cpu))
}

fn roles(threads: &Value) -> Vec<String> {
    let list = threads.as_array().unwrap().iter();
    list.map(|t| format!("{}{}", t["role"]["kind"].as_str().unwrap(), t["role"]["which"])).collect()
}

#[test]
fn threads_of_a_machine_are_shown_and_watched() {
    let site = Site::new();
    let Some(mut machine) = machine("threads_of_a_machine_are_shown_and_watched", &site) else {
        return;
    };
    let spec = spec(&site, &site.vm("plc"), "");
    for target in [spec.as_str(), &machine.pid().to_string()] {
        let (code, json) = site.json(&["threads", target]);
        let threads = &json[0]["threads"];
        let roles = roles(threads);
        assert_eq!(code, 0);
        for role in ["vcpu[0]", "vcpu[1]", "io_thread\"disk\"", "emulatornull", "rcunull"] {
            assert_eq!(roles.iter().filter(|r| *r == role).count(), 1, "{role} {roles:?}");
        }
        assert!(threads.as_array().unwrap().iter().all(|t| t["control"]["by"].is_null()));
    }
    let shown = site.ok(&["threads", &machine.pid().to_string()]);
    assert!(shown.contains("not under control") && shown.contains("iothread disk"), "{shown}");
    let wrong = site.output(&["threads", &spec, "nobody"]);
    assert!(text(&wrong.stderr).contains("no VM `nobody`: there is plc-"), "{}", text(&wrong.stderr));

    let mut watch = site.spawn(&["threads", &machine.pid().to_string(), "--watch", "--every", "50ms"]);
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let first = lines.next().unwrap().unwrap();
    assert!(first.starts_with(&format!("appeared pid {}", machine.pid())), "{first}");
    machine.kill();
    // It ends by itself when the machine has ended, and says of each thread that it did.
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert!(rest.iter().filter(|l| l.starts_with("ended")).count() >= 5, "{rest:#?}");
    assert!(watch.wait().unwrap().success());
    let gone = site.output(&["threads", &machine.pid().to_string()]);
    assert!(!gone.status.success() && text(&gone.stderr).contains(&format!("/proc/{}", machine.pid())));
}

#[test]
fn a_watch_ends_with_ctrl_c() {
    let site = Site::new();
    let Some(machine) = machine("a_watch_ends_with_ctrl_c", &site) else { return };
    let mut watch = site.spawn(&["threads", &machine.pid().to_string(), "--watch"]);
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    lines.next().unwrap().unwrap();
    signal(&watch, Signal::INT);
    assert!(watch.wait().unwrap().success());
}

#[test]
fn a_contract_is_applied_shown_and_put_back() {
    let test = "a_contract_is_applied_shown_and_put_back";
    let site = Site::new();
    let Some(_machine) = machine(test, &site) else { return };
    if !has(test, &[Need::RT_GROUPS]) {
        return;
    }
    let vm = site.vm("plc");
    let spec = spec(&site, &vm, "cpu = { budget = \"4ms\", period = \"20ms\" }\npriorities = \"rt\"");
    let before = site.json(&["threads", &spec]).1;
    let dry = site.ok(&["apply", &spec, "--cpu-only", "--dry-run"]);
    assert!(dry.contains(" -> fifo 98 reset-on-fork"), "{dry}");
    let (code, held) = site.json(&["apply", &spec, "--cpu-only"]);
    assert_eq!((code, held[0]["strength"].as_str()), (0, Some("guarantee")), "{held}");
    let during = site.json(&["threads", &spec]).1;
    for t in during[0]["threads"].as_array().unwrap() {
        let expected = match t["role"]["kind"].as_str().unwrap() {
            "vcpu" => Some(97),
            "emulator" | "io_thread" => Some(98),
            _ => None,
        };
        assert_eq!(t["priority"].as_u64(), Some(expected.unwrap_or(0)), "{t}");
        let by = t["control"]["by"].as_str();
        assert_eq!(by, expected.map(|_| "rt_group"), "{t}");
    }
    assert!(site.ok(&["status"]).contains("policy of vcpu 0"));
    site.ok(&["revert"]);
    let after = site.json(&["threads", &spec]).1;
    let still = |all: &Value| -> Vec<Value> {
        let keep = ["tid", "policy", "priority", "nice", "cgroups", "control", "reset_on_fork"];
        let pick = |t: &Value| keep.iter().map(|k| t[*k].clone()).collect::<Value>();
        all[0]["threads"].as_array().unwrap().iter().map(pick).collect()
    };
    assert_eq!(still(&before), still(&after));
    let group = format!("/sys/fs/cgroup/cpu/rtvirtio-{vm}");
    assert!(!Path::new(&group).exists());
    // More than there is.
    let spec = self::spec(&site, &vm, "cpu = { budget = \"199ms\", period = \"200ms\" }");
    let error = text(&site.output(&["apply", &spec, "--cpu-only"]).stderr);
    assert!(
        error.contains("4.5 % of each CPU too much") && error.contains("kernel grants 95.0 %"),
        "{error}"
    );
    let spec = self::spec(&site, &vm, "cpu = { requests = \"50/s\", deadline = \"20ms\" }");
    let error = text(&site.output(&["apply", &spec, "--cpu-only"]).stderr);
    assert!(error.contains("has not been measured"), "{error}");
}

/// Whether a QEMU that has started calls its threads after vCPUs.
fn names_vcpus(pid: u32) -> bool {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let names = threads.filter_map(|t| fs::read_to_string(t.unwrap().path().join("comm")).ok());
    names.into_iter().any(|name| name.starts_with("CPU "))
}

/// Without thread names a pid does not show the vCPUs: nothing is promised and no main loop becomes
/// real-time; through the monitor the same machine has its contract.
#[test]
fn a_contract_without_a_known_vcpu_is_refused() {
    let test = "a_contract_without_a_known_vcpu_is_refused";
    let site = Site::new();
    if !has(test, &[Need::Root, Need::QEMU, Need::RT_GROUPS]) {
        return;
    }
    let options = ["-machine", "q35", "-smp", "2", "-name", "debug-threads=off"];
    let machine = Machine::start(site.dir.path(), "plc", &options);
    if names_vcpus(machine.pid()) {
        skip(test, "this QEMU names its threads whatever it is told (11.1 does)");
        return;
    }
    for cpu in ["", "priorities = \"rt\""] {
        let cpu = format!("cpu = {{ budget = \"4ms\", period = \"20ms\" }}\n{cpu}");
        let monitored = spec(&site, &site.vm("plc"), &cpu);
        let qmp = format!("qmp = \"{}\"", site.path("qmp"));
        let text_of =
            fs::read_to_string(&monitored).unwrap().replace(&qmp, &format!("pid = {}", machine.pid()));
        let by_pid = &site.write("pid.toml", &text_of);
        for args in [&["apply", by_pid, "--cpu-only"][..], &["apply", by_pid, "--cpu-only", "--dry-run"]] {
            let said = site.refused(args);
            assert!(!said.contains("guarantee"), "{said}");
            assert!(said.contains("debug-threads=on") && said.contains("`qmp` or `domain`"), "{said}");
        }
        let (_, threads) = site.json(&["threads", by_pid]);
        let policies = |all: &Value| -> Vec<Value> {
            all[0]["threads"].as_array().unwrap().iter().map(|t| t["policy"].clone()).collect()
        };
        assert!(policies(&threads).iter().all(|p| p == "other"), "{threads}");
        assert!(text(&site.output(&["threads", by_pid]).stderr).contains("run its vCPUs is not known"));
        let (code, held) = site.json(&["apply", &monitored, "--cpu-only"]);
        assert_eq!((code, held[0]["strength"].as_str()), (0, Some("guarantee")), "{held}");
        site.ok(&["revert"]);
    }
}

/// Answers as QEMU's monitor does, naming `thread` as its vCPU.
fn monitor(path: &Path, thread: u32) {
    let listener = UnixListener::bind(path).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let version = r#"{"qemu":{"micro":0,"minor":2,"major":7},"package":""}"#;
            writeln!(stream, r#"{{"QMP":{{"version":{version},"capabilities":[]}}}}"#).unwrap();
            for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                let Ok(Ok(asked)) = line.map(|l| serde_json::from_str::<Value>(&l)) else { break };
                let answer = match asked["execute"].as_str() {
                    Some("query-cpus-fast") => serde_json::json!([{
                        "cpu-index": 0, "thread-id": thread, "qom-path": "/machine/cpu", "target": "x86_64", "props": {}
                    }]),
                    Some("query-iothreads") => serde_json::json!([]),
                    _ => serde_json::json!({}),
                };
                writeln!(stream, "{}", serde_json::json!({ "return": answer, "id": asked["id"] })).unwrap();
            }
        }
    });
}

#[test]
fn numbers_of_another_pid_namespace_are_not_taken_for_threads_here() {
    let site = Site::new();
    // As in a container: the number that its monitor tells is another process's here.
    let other = ChildGuard(Command::new("sleep").arg("60").spawn().unwrap());
    monitor(&site.dir.path().join("qmp"), other.id());
    let told = text(&site.output(&["threads", &spec(&site, &site.vm("plc"), "")]).stderr);
    assert!(told.contains(&format!("process {} (sleep)", other.id())), "{told}");
    assert!(told.contains("another pid namespace") && told.contains("name the VM by `pid`"), "{told}");
}

/// `rtvirtio threads SPEC --json` where `/run` holds `qemu-server` with the files that Proxmox VE
/// has there for a VM, in a mount namespace of its own.
fn on_proxmox(site: &Site, machine: &Machine, spec: &str) -> Output {
    let script = format!(
        "set -e; mount -t tmpfs tmpfs /var/run/; mkdir /var/run/qemu-server; cd /var/run/qemu-server\n\
         echo {} >100.pid; ln -s '{}' 100.qmp; exec \"$@\"",
        machine.pid(),
        machine.qmp().display()
    );
    let rtvirtio = site.command(&["threads", spec, "--json"]);
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "--propagation", "private", "sh", "-c", &script, "sh"]);
    unshare.arg(rtvirtio.get_program()).args(rtvirtio.get_args());
    unshare.envs(rtvirtio.get_envs().filter_map(|(name, value)| Some((name, value?))));
    unshare.current_dir(site.dir.path()).output().unwrap()
}

#[test]
fn a_vm_of_proxmox_is_found_by_its_number() {
    let test = "a_vm_of_proxmox_is_found_by_its_number";
    let site = Site::new();
    if !has(test, &[Need::Root, Need::QEMU, Need::Program("unshare")]) {
        return;
    }
    // Only Proxmox's QEMU has an option `-id`; here `-id` is a name, and `100` a disk.
    let disk = site.dir.path().join("100");
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let options = ["-machine", "q35", "-smp", "2", "-name", "-id", "100"];
    let machine = Machine::start(site.dir.path(), "plc", &options);
    let by_number = |number: u32| {
        let monitored = spec(&site, "plc", "");
        let qmp = format!("qmp = \"{}\"", site.path("qmp"));
        let text = fs::read_to_string(monitored).unwrap().replace(&qmp, &format!("proxmox = {number}"));
        site.write("proxmox.toml", &text)
    };
    let out = on_proxmox(&site, &machine, &by_number(100));
    assert!(out.status.success(), "{}", text(&out.stderr));
    let threads: Value = serde_json::from_slice(&out.stdout).unwrap();
    let roles = roles(&threads[0]["threads"]);
    assert!(roles.contains(&"vcpu[0]".to_owned()) && roles.contains(&"vcpu[1]".to_owned()), "{roles:?}");
    let other = on_proxmox(&site, &machine, &by_number(101));
    assert!(
        !other.status.success() && text(&other.stderr).contains("no node of Proxmox VE"),
        "{}",
        text(&other.stderr)
    );
}

#[test]
fn a_monitor_is_known_through_links_to_its_directory() {
    let site = Site::new();
    let Some(_machine) = machine("a_monitor_is_known_through_links_to_its_directory", &site) else { return };
    let link = site.dir.path().join("link");
    std::os::unix::fs::symlink(site.dir.path(), &link).unwrap();
    let spec = spec(&site, &site.vm("plc"), "");
    let through = fs::read_to_string(&spec).unwrap().replace("/qmp\"", "/link/qmp\"");
    site.write("plant.toml", &through);
    let (code, json) = site.json(&["threads", &spec]);
    assert_eq!(code, 0, "{json}");
    assert!(roles(&json[0]["threads"]).contains(&"vcpu[1]".to_owned()), "{json}");
}
