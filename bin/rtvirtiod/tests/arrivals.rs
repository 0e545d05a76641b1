//! VMs that arrive by live migration: admitted, and their contracts reserved, before they leave
//! their host. The service and the hooks are real, and so is the QEMU that arrives; `virsh` is a
//! script that shows the domains which the test has written.

mod common;

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use common::{Rig, answer_of_body, can_run, output_text};
use rtvirtio_testkit::site::{project, wait_for};
use rtvirtio_testkit::{HANG, Machine, Need, has};
use rtvirtio_vmm::Qmp;
use rtvirtio_vmm::libvirt::CONTRACT_NAMESPACE;
use serde_json::{Value, json};

const VIRSH: &str = r#"#!/bin/sh
dir=$(dirname "$0")
for last; do :; done
case " $* " in
*" list "*) cat "$dir/list" ;;
*" event "*) exec sleep 1000 ;;
*" domstate "*) echo "running (booted)" ;;
*" echo "*)
    echo "$last" | tr ';' '\n' | while read -r command first second; do
        case $command in
        dumpxml) cat "$dir/$second.xml" ;;
        echo) echo "$first" ;;
        esac
    done
    ;;
*" dumpxml "*) cat "$dir/$last.xml" ;;
esac
"#;

/// Host to which VMs come.
struct Target {
    rig: Rig,
    virsh: PathBuf,
}

impl Target {
    fn new() -> Self {
        let rig = Rig::new();
        let virsh = rig.site.dir.path().join("libvirt");
        fs::create_dir(&virsh).unwrap();
        fs::write(virsh.join("list"), "").unwrap();
        fs::write(virsh.join("virsh"), VIRSH).unwrap();
        fs::set_permissions(virsh.join("virsh"), fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(rig.config(), "libvirt = \"qemu:///system\"\n").unwrap();
        Self { rig, virsh }
    }

    /// Starts the service, and waits until it knows libvirt's VMs.
    fn start(&mut self) {
        let mut command = self.rig.command(&[]);
        let path = std::env::var("PATH").unwrap_or_default();
        command.env("PATH", format!("{}:{path}", self.virsh.display()));
        self.rig.run(command);
        wait_for("libvirt's answer", || {
            let (code, text) = self.post("", &domain("probe", 0, "").0);
            assert!(code == 200 || code == 503, "{text}");
            code == 200
        });
    }

    fn ask(&self, method: &str, path: &str, body: &[u8]) -> (u16, String) {
        answer_of_body(UnixStream::connect(self.rig.socket()).unwrap(), method, path, body)
    }

    fn post(&self, query: &str, body: &str) -> (u16, String) {
        self.ask("POST", &format!("/v1/arrivals{query}"), body.as_bytes())
    }

    /// Names and states of the VMs that are about to arrive.
    fn arrivals(&self) -> Vec<(String, String)> {
        let all: Vec<Value> = serde_json::from_str(&self.ask("GET", "/v1/arrivals", b"").1).unwrap();
        let text = |of: &Value, key: &str| of[key].as_str().unwrap().to_owned();
        all.iter().map(|of| (text(of, "vm"), text(of, "state"))).collect()
    }

    fn hook(&self, vm: &str, event: &str, xml: &str) -> Output {
        hook(&self.rig, vm, event, xml)
    }

    /// libvirt's hook for a VM that is to come; the reason where it is refused.
    fn comes(&self, vm: &str, xml: &str) -> Result<(), String> {
        let out = self.hook(vm, "migrate", xml);
        assert!(out.stdout.is_empty(), "what it prints would replace the XML: {}", output_text(&out));
        match out.status.code() {
            Some(0) => Ok(()),
            Some(1) => Err(output_text(&out)),
            code => panic!("{code:?}: {}", output_text(&out)),
        }
    }

    fn write_contract(&self, vm: &str, budget: &str, more: &str) {
        let text = contract(&format!("name = \"{vm}\"\n{more}\n"), budget);
        fs::write(self.rig.contracts().join(format!("{vm}.toml")), text).unwrap();
    }
}

fn hook(rig: &Rig, vm: &str, event: &str, xml: &str) -> Output {
    let mut child = Command::new("timeout")
        .args([HANG.as_secs().to_string().as_str(), "sh"])
        .arg(project().join("packaging/libvirt/rtvirtio"))
        .args([vm, event, "begin", "-"])
        .env("RTVIRTIO_RUN_DIR", rig.site.run_dir())
        .env("RTVIRTIO_ARRIVALS", rig.site.dir.path().join("arrivals"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // It reads nothing at other events.
    let _ = child.stdin.take().unwrap().write_all(xml.as_bytes());
    child.wait_with_output().unwrap()
}

fn contract(vm: &str, budget: &str) -> String {
    let cpu = if budget.is_empty() {
        String::new()
    } else {
        format!("cpu = {{ budget = \"{budget}\", period = \"20ms\" }}\n")
    };
    format!(
        "[device]\npath = \"/dev/sdz\"\n[[vm]]\n{vm}{cpu}[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
    )
}

/// XML of a domain as libvirt gives it to its hook, with a contract for `budget` in its metadata,
/// and the domain's UUID.
fn domain(name: &str, n: u8, budget: &str) -> (String, String) {
    let uuid = format!("a9949d75-95e3-4747-82e3-c9fee10476{n:02x}");
    let metadata = match budget {
        "" => String::new(),
        budget => {
            let text = contract("", budget).replace('"', "&quot;");
            format!(
                "<metadata>\n    <rtvirtio:contract xmlns:rtvirtio=\"{CONTRACT_NAMESPACE}\">{text}</rtvirtio:contract>\n  </metadata>\n"
            )
        }
    };
    let xml = format!(
        "<domain type='qemu'>\n  <name>{name}</name>\n  <uuid>{uuid}</uuid>\n  {metadata}  <memory unit='KiB'>65536</memory>\n\
         <currentMemory unit='KiB'>65536</currentMemory>\n  <vcpu placement='static'>1</vcpu>\n  <os>\n    \
         <type arch='x86_64' machine='pc-q35-7.2'>hvm</type>\n    <boot dev='hd'/>\n  </os>\n  <clock offset='utc'/>\n  \
         <on_poweroff>destroy</on_poweroff>\n  <devices>\n    <emulator>/usr/bin/qemu-system-x86_64</emulator>\n    \
         <disk type='block' device='disk'>\n      <driver name='qemu' type='raw' cache='none'/>\n      <source dev='/dev/sdz'/>\n      \
         <target dev='vda' bus='virtio'/>\n    </disk>\n    <memballoon model='none'/>\n  </devices>\n</domain>\n"
    );
    (xml, uuid)
}

#[test]
fn a_vm_that_arrives_is_admitted_before_it_leaves_and_counted_once() {
    if !can_run("a_vm_that_arrives_is_admitted_before_it_leaves_and_counted_once") {
        return;
    }
    let mut target = Target::new();
    let [mover, other, late] = ["mover", "other", "late"].map(|name| target.rig.site.vm(name));
    let ((xml, uuid), (other_xml, _)) = (domain(&mover, 1, "12ms"), domain(&other, 2, "12ms"));
    target.start();
    assert_eq!(target.comes("plain", &domain("plain", 3, "").0), Ok(()), "without a contract");
    assert_eq!(target.arrivals(), []);
    assert_eq!(target.comes(&mover, &xml), Ok(()));
    let reserved = |state: &str| vec![(mover.clone(), state.to_owned())];
    assert_eq!(target.arrivals(), reserved("reserved"));
    let (code, metrics) = target.ask("GET", "/metrics", b"");
    let line = format!("rtvirtio_arrival_state{{state=\"reserved\",vm=\"{mover}\"}} 1");
    assert!(code == 200 && metrics.contains(&line), "{metrics}");

    // What comes later finds the room taken: another arrival, a contract, and a file.
    let refused = target.comes(&other, &other_xml).unwrap_err();
    assert!(refused.contains("does not fit on this host") && refused.contains("too much"), "{refused}");
    let spec = target.rig.site.dir.path().join("late.spec.toml");
    fs::write(&spec, contract(&format!("name = \"{late}\"\nqmp = \"/nowhere/late.qmp\"\n"), "12ms")).unwrap();
    let directory = target.rig.contracts();
    let set = ["contract", "set", &late, spec.to_str().unwrap(), "--contracts", directory.to_str().unwrap()];
    let out = target.rig.site.output(&set);
    assert_eq!(out.status.code(), Some(2), "{}", output_text(&out));
    target.write_contract(&late, "12ms", "qmp = \"/nowhere/late.qmp\"");
    target.rig.wait_state(&late, "refused");
    // A reservation takes nothing from what is admitted, and gives way to what is more critical.
    target.write_contract(&late, "12ms", "qmp = \"/nowhere/late.qmp\"\ncriticality = \"high\"");
    wait_for("the reservation to give way", || target.arrivals() == reserved("refused"));
    let again = target.comes(&mover, &xml).unwrap_err();
    assert!(again.contains("does not fit"), "{again}");
    fs::remove_file(directory.join(format!("{late}.toml"))).unwrap();
    wait_for("the reservation again", || target.arrivals() == reserved("reserved"));

    // Killed and started again; asked again, as by a second try of the same move.
    target.rig.kill();
    target.start();
    assert_eq!(target.arrivals(), reserved("reserved"));
    assert_eq!(target.comes(&mover, &xml), Ok(()));
    assert_eq!(target.arrivals(), reserved("reserved"));
    assert!(target.comes(&other, &other_xml).is_err());

    // Another VM with its name: one of both can be admitted, and none takes the other's budget.
    fs::write(&spec, contract(&format!("name = \"{mover}\"\nqmp = \"/nowhere/mover.qmp\"\n"), "1ms"))
        .unwrap();
    let set = ["contract", "set", &mover, spec.to_str().unwrap(), "--contracts", directory.to_str().unwrap()];
    let out = target.rig.site.output(&set);
    let text = output_text(&out);
    assert!(out.status.code() == Some(2) && text.contains("about to arrive"), "{text}");
    target.write_contract(&mover, "1ms", "qmp = \"/nowhere/mover.qmp\"");
    wait_for("the reservation without a name", || target.arrivals() == reserved("refused"));
    let (_, listed) = target.ask("GET", "/v1/arrivals", b"");
    assert!(listed.contains("is the name of another VM here"), "{listed}");
    fs::remove_file(directory.join(format!("{mover}.toml"))).unwrap();
    wait_for("the reservation again", || target.arrivals() == reserved("reserved"));

    // The end of another domain frees nothing. The move failed: the room is another's.
    assert!(target.hook(&mover, "release", &other_xml).status.success());
    assert_eq!(target.arrivals(), reserved("reserved"));
    assert!(target.hook(&mover, "release", &xml).status.success());
    assert_eq!(target.arrivals(), []);
    assert_eq!(target.comes(&other, &other_xml), Ok(()));
    let refused = target.comes(&mover, &xml).unwrap_err();
    assert!(refused.contains("too much"), "{refused}");
    assert_eq!(target.ask("DELETE", &format!("/v1/arrivals?vm={other}"), b"").0, 200);
    assert_eq!(target.ask("DELETE", &format!("/v1/arrivals?vm={other}"), b"").0, 404);

    // It comes: its own contract takes the place of the reservation, which twice would not fit.
    assert_eq!(target.comes(&mover, &xml), Ok(()));
    let source = target.rig.site.dir.path().join("source");
    fs::create_dir(&source).unwrap();
    let left = Machine::start(&source, "left", &[]);
    let channel = format!("unix:{}", source.join("migration").display());
    let receives = ["-uuid", &uuid, "-incoming", &channel];
    let mut machine = Machine::start(&target.virsh, &format!("guest={mover}"), &receives);
    fs::write(target.virsh.join(format!("{uuid}.xml")), xml.replace("type='qemu'", "type='qemu' id='1'"))
        .unwrap();
    fs::write(target.virsh.join("list"), format!("{uuid} {mover}\n")).unwrap();
    assert!(target.hook(&mover, "started", "").status.success());
    target.rig.wait_state(&mover, "in_force");
    wait_for("the end of the reservation", || target.arrivals().is_empty());
    // All before the guest runs here. Then it moves.
    let mut there = Qmp::connect(machine.qmp(), HANG).unwrap();
    assert_eq!(there.execute("query-status", None).unwrap()["status"], "inmigrate");
    let mut here = Qmp::connect(left.qmp(), HANG).unwrap();
    here.execute("migrate", Some(json!({ "uri": channel }))).unwrap();
    wait_for("the guest", || there.execute("query-status", None).unwrap()["status"] == "running");
    assert_eq!(here.execute("query-migrate", None).unwrap()["status"], "completed");
    target.rig.wait_state(&mover, "in_force");
    let refused = target.comes(&other, &other_xml).unwrap_err();
    assert!(refused.contains("too much"), "{refused}");
    let events = target.rig.events();
    let tells = |text: &str| events.iter().any(|e| e["text"].as_str().is_some_and(|t| t.contains(text)));
    for text in ["it is about to arrive", "it was not let in", "it was given back", "the VM has come"] {
        assert!(tells(text), "{text}: {events:#?}");
    }
    // It leaves again: nothing is given up before its process has ended.
    assert!(target.hook(&mover, "stopped", "").status.success());
    target.rig.wait_state(&mover, "in_force");
    fs::write(target.virsh.join("list"), "").unwrap();
    machine.kill();
    // It comes straight back: what its earlier stay has left counts for nothing.
    assert_eq!(target.comes(&mover, &xml), Ok(()));
    assert_eq!(target.arrivals(), reserved("reserved"));
    // A domain whose UUID is not known ends no reservation: another one may have its name.
    assert!(target.hook(&mover, "release", "").status.success());
    assert_eq!(target.arrivals(), reserved("reserved"));
    assert!(target.hook(&mover, "release", &xml).status.success());
    assert_eq!(target.arrivals(), []);
    wait_for("the end of its contract", || target.rig.vm(&mover).is_null());
    wait_for("the room of the VM that has left", || target.comes(&other, &other_xml).is_ok());
}

#[test]
fn a_reservation_ends_with_its_time_and_no_name_is_taken_twice() {
    if !has("a_reservation_ends_with_its_time_and_no_name_is_taken_twice", &[Need::Root, Need::RT_GROUPS]) {
        return;
    }
    let mut target = Target::new();
    let [mover, here] = ["mover", "here"].map(|name| target.rig.site.vm(name));
    target.write_contract(&here, "1ms", "qmp = \"/nowhere/here.qmp\"");
    target.start();
    let (xml, _) = domain(&mover, 1, "12ms");
    assert_eq!(target.post("?for=1s", &xml).0, 200);
    wait_for("the end of the reservation", || target.arrivals().is_empty());
    // A name of another VM here; a VM whose file here counts in place of what it brings along.
    let (named, _) = domain(&here, 2, "1ms");
    let (code, text) = target.post("", &named);
    assert!(code == 409 && text.contains("another VM"), "{code} {text}");
    target.write_contract(&mover, "2ms", &format!("domain = \"{mover}\""));
    // libvirt knows no such domain.
    target.rig.wait_state(&mover, "unknown");
    let (code, text) = target.post("", &xml);
    assert!(code == 200 && text.contains("\"counted\"") && text.contains(".toml"), "{code} {text}");
    assert_eq!(target.arrivals(), []);
    fs::remove_file(target.rig.contracts().join(format!("{mover}.toml"))).unwrap();
    wait_for("the end of the file", || target.rig.vm(&mover).is_null());
    // A contract file, as of a cluster's resource: by its name, and of several the one that is
    // asked for.
    let file = contract(&format!("name = \"{mover}\"\nqmp = \"/nowhere/mover.qmp\"\n"), "12ms");
    assert_eq!(target.post("", &file).0, 200);
    assert_eq!(target.arrivals(), [(mover.clone(), "reserved".to_owned())]);
    // The same by the command.
    let path = target.rig.site.dir.path().join("mover.toml");
    fs::write(&path, &file).unwrap();
    let (path, run) = (path.to_str().unwrap(), |args: &[&str]| target.rig.site.json(args));
    let (code, released) = run(&["contract", "release", &mover]);
    assert_eq!((code, &released["given_back"]), (0, &json!(true)));
    assert_eq!(target.arrivals(), []);
    let out = target.rig.site.output(&["contract", "release", &mover]);
    assert!(out.status.code() == Some(1) && output_text(&out).contains("nothing is reserved"));
    let (code, answer) = run(&["contract", "reserve", path, "--vm", &mover, "--for", "5min"]);
    assert_eq!((code, &answer["state"], &answer["vm"]), (0, &json!("reserved"), &json!(mover)));
    fs::write(path, file.replace("12ms", "19999us").replace(&mover, "large")).unwrap();
    let (code, answer) = run(&["contract", "reserve", path]);
    assert!(code == 2 && answer["why"].as_str().unwrap().contains("does not fit"), "{answer}");
    let out = target.rig.site.output(&["contract", "reserve", path, "--for", "2h"]);
    assert!(out.status.code() == Some(1) && output_text(&out).contains("at most"), "{}", output_text(&out));
    let (code, text) = target.post("?vm=mover", &xml);
    assert!(code == 400 && text.contains("one domain"), "{code} {text}");
    let (code, text) = target.post("?vm=none", &file);
    assert!(code == 400 && text.contains(&mover), "{code} {text}");
    let (code, text) = target.post("", &xml);
    assert!(code == 409 && text.contains("about to arrive too"), "{code} {text}");

    // Proxmox VE: the contract is in a file of each node.
    target.write_contract("vm100", "12ms", "proxmox = 100");
    let proxmox = |id: &str, from: &str| {
        Command::new("sh")
            .arg(project().join("packaging/proxmox/rtvirtio-hook.sh"))
            .args([id, "pre-start"])
            .env("RTVIRTIO_RUN_DIR", target.rig.site.run_dir())
            .env("PVE_MIGRATED_FROM", from)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    wait_for("the contract of vm100", || !proxmox("100", "node2").status.success());
    let out = proxmox("100", "node2");
    assert!(out.status.code() == Some(1) && output_text(&out).contains("too much"), "{}", output_text(&out));
    for (id, from) in [("100", ""), ("101", "node2"), ("../x", "node2")] {
        assert!(proxmox(id, from).status.success(), "{id} {from}");
    }

    // Where the service only observes, nothing is refused.
    target.rig.kill();
    target.rig.start(&["--mode", "observe"]);
    let observed = target.post("", &domain("big", 9, "19ms").0);
    assert!(observed.0 == 200 && observed.1.contains("observed"), "{observed:?}");
    // Where it reads no metadata, the contract would be lost.
    target.rig.kill();
    fs::write(target.rig.config(), "").unwrap();
    target.rig.start(&[]);
    wait_for("the first pass", || !target.rig.vm("vm100").is_null());
    let (code, text) = target.post("", &domain("big", 9, "1ms").0);
    assert!(code == 409 && text.contains("reads no metadata"), "{code} {text}");
}

#[test]
fn hostile_descriptions_are_refused_and_reservations_have_a_limit() {
    let test = "hostile_descriptions_are_refused_and_reservations_have_a_limit";
    if !has(test, &[Need::Root, Need::RT_GROUPS]) {
        return;
    }
    let mut target = Target::new();
    target.start();
    let (xml, uuid) = domain("plc", 1, "1ms");
    let long = "x".repeat(300);
    let deep = format!("{}{}", "<domain>".repeat(5_000), "</domain>".repeat(5_000));
    for (body, code) in [
        (String::new(), 400),
        ("<domain>".to_owned(), 400),
        (deep, 400),
        ("<!DOCTYPE x [<!ENTITY a \"b\">]><domain/>".to_owned(), 400),
        (xml.replace("plc", &long), 400),
        (xml.replace(&uuid, "../../etc"), 400),
        (xml.replace("block = ", "blok = "), 400),
        (xml.replace("[[vm]]", "[[vm]]\nname = &quot;../x&quot;"), 400),
        (xml.replace("[[vm]]", "[[vm]]\npid = 1"), 400),
        (xml.replace("</contract>", "</contract><x/>").replace("4KiB", &"y".repeat(70_000)), 400),
        ("[[vm]]\n".repeat(5_000), 400),
        ("x".repeat((4 << 20) + 1), 413),
    ] {
        let (found, text) = target.post("", &body);
        assert_eq!(found, code, "{}: {text}", &body[..body.len().min(200)]);
    }
    assert_eq!(target.ask("POST", "/v1/arrivals", &[0xff, 0xfe, b'<']).0, 400);
    for query in ["?for=0s", "?for=2h", "?for=x", "?for=-1s", "?proxmox=x"] {
        assert_eq!(target.post(query, &xml).0, 400, "{query}");
    }
    assert_eq!(target.ask("DELETE", "/v1/arrivals", b"").0, 400);
    // A name that only libvirt understands is text.
    let odd =
        domain("a &lt;b&gt; %2e&amp;\u{1b}[31m'", 2, "1ms").0.replace('\u{1b}', "").replace("20ms", "500ms");
    let named = odd.replace("[[vm]]", "[[vm]]\nname = &quot;odd&quot;");
    let (code, text) = target.post("", &named);
    assert_eq!(code, 200, "{text}");
    assert!(target.hook("a <b> %2e&[31m'", "release", &named).status.success());
    assert_eq!(target.arrivals(), []);

    let small = |name: &str, n: u8| domain(name, n, "1ms").0.replace("20ms", "500ms");
    for n in 0..32 {
        let (code, text) = target.post("", &small(&format!("vm{n}"), n + 10));
        assert_eq!(code, 200, "{n}: {text}");
    }
    let (code, text) = target.post("", &small("more", 99));
    assert!(code == 503 && text.contains("32 VMs are about to arrive"), "{code} {text}");
    assert_eq!(target.post("", &small("vm0", 10)).0, 200, "one of them again");
    assert_eq!(target.arrivals().len(), 32);
    // What was stored and cannot be read is not taken for nothing.
    target.rig.kill();
    let stored = target.rig.site.state_dir().join("arrivals.json");
    fs::write(&stored, "{").unwrap();
    let command = target.rig.command(&[]);
    target.rig.run(command);
    wait_for("the problem", || target.rig.status()["problems"].to_string().contains("arrivals.json"));
    let (code, text) = target.post("", &xml);
    assert!(code == 503 && text.contains("not known"), "{code} {text}");
    fs::remove_file(&stored).unwrap();
}

#[test]
fn a_service_that_does_not_answer_is_met_by_the_declared_policy() {
    if !has("a_service_that_does_not_answer_is_met_by_the_declared_policy", &[Need::Root]) {
        return;
    }
    let rig = Rig::new();
    let (with, without) = (domain("plc", 1, "1ms").0, domain("plc", 1, "").0);
    let policy = rig.site.dir.path().join("arrivals");
    let code = |xml: &str| hook(&rig, "plc", "migrate", xml).status.code();
    // No service at all, and one that takes the request and never answers.
    let refused = hook(&rig, "plc", "migrate", &with);
    assert_eq!(refused.status.code(), Some(1));
    assert!(output_text(&refused).contains("rtvirtiod did not answer"), "{}", output_text(&refused));
    fs::create_dir_all(rig.site.run_dir()).unwrap();
    let hangs = UnixListener::bind(rig.socket()).unwrap();
    let begin = Instant::now();
    assert_eq!(code(&with), Some(1));
    assert!(begin.elapsed() < Duration::from_secs(9), "{:?}", begin.elapsed());
    drop(hangs);
    for (word, expected) in [("refuse", 1), ("answered", 0), ("never", 0), ("nevr", 1)] {
        fs::write(&policy, word).unwrap();
        assert_eq!((code(&with), code(&without)), (Some(expected), Some(0)), "{word}");
    }
    // One that is busy decides nothing.
    fs::remove_file(rig.socket()).unwrap();
    let busy = UnixListener::bind(rig.socket()).unwrap();
    std::thread::spawn(move || busy.incoming().for_each(|stream| answer_busy(&stream.unwrap())));
    for (word, expected) in [("refuse", 1), ("answered", 0), ("never", 0), ("nevr", 1)] {
        fs::write(&policy, word).unwrap();
        assert_eq!((code(&with), code(&without)), (Some(expected), Some(0)), "{word}");
    }
    let refused = output_text(&hook(&rig, "plc", "migrate", &with));
    assert!(refused.contains("nothing was decided"), "{refused}");
}

fn answer_busy(mut stream: &UnixStream) {
    let mut request = BufReader::new(stream);
    let (mut line, mut length) = (String::new(), 0);
    while request.read_line(&mut line).unwrap() > 2 {
        if let Some(found) = line.strip_prefix("Content-Length:") {
            length = found.trim().parse().unwrap();
        }
        line.clear();
    }
    request.take(length).read_to_end(&mut Vec::new()).unwrap();
    let body = r#"{"error":"the service is busy: nothing was decided"}"#;
    let head = "HTTP/1.1 503 Service Unavailable\r\nConnection: close";
    write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
}
