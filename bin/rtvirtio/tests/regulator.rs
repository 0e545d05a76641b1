//! `rtvirtio regulator`: what it prints is what QEMU, tc and libvirt take.

use std::process::Command;

use rtvirtio_testbed::netns::{self, Namespace};
use rtvirtio_testkit::site::{PROFILE, Site, text};
use rtvirtio_testkit::{Machine, Need, has, skip};
use rtvirtio_vmm::Qmp;
use serde_json::{Value, json};

const SPEC: &str = "[device]\npath = \"/dev/nvme0n1\"\n[[vm]]\nname = \"batch\"\ndomain = \"test\"\ndisk = \"vda\"\n\
    traffic.read = { rate = \"1MiB/s\", burst = \"20MiB\", peak = \"4MiB/s\" }\n\
    traffic.write = { rate = \"100/s\", burst = 300 }\n\
    traffic.rx = { rate = \"1MB/s\", burst = \"30000B\", peak = \"4MB/s\" }\n\
    [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n";

/// The first VM's outcomes.
fn outcomes(site: &Site, more: &[&str]) -> Vec<Value> {
    outcomes_of(site, SPEC, more)
}

fn outcomes_of(site: &Site, text: &str, more: &[&str]) -> Vec<Value> {
    let spec = site.write("s.toml", text);
    let (code, found) = site.json(&[&["regulator", &spec], more].concat());
    assert_eq!(code, 0, "{found}");
    found[0]["outcomes"].as_array().unwrap().clone()
}

/// Settings of one direction, as they are printed.
fn settings(outcomes: &[Value], actuator: &str, direction: &str, field: &str) -> Vec<String> {
    let of = |o: &&Value| o["compiled"]["actuator"] == actuator && o["compiled"]["direction"] == direction;
    let found = outcomes.iter().find(of).unwrap_or_else(|| panic!("{actuator} {direction}: {outcomes:#?}"));
    let all = found["compiled"]["settings"].as_array().unwrap();
    all.iter().filter_map(|s| s[field].as_str().map(str::to_owned)).collect()
}

#[test]
fn every_direction_says_what_is_kept_and_what_cannot_be() {
    let site = Site::new();
    let all = outcomes(&site, &[]);
    let worth = |actuator: &str| {
        let of = |o: &&Value| o["compiled"]["actuator"] == actuator;
        all.iter().find(of).map(|o| o["compiled"]["worth"].clone())
    };
    assert_eq!(worth("io-domain"), Some(json!("guarantee")));
    assert_eq!(worth("throttle-v1"), Some(json!("cap")));
    assert_eq!(worth("qos400"), None, "not without a clock");
    let whole = site.ok(&["regulator", "examples/traffic.toml"]);
    assert!(whole.contains("guarantee") && whole.contains("Not known here"), "{whole}");
    // A request is no byte: nothing that was asked for can be.
    let args = ["regulator", "examples/traffic.toml", "--actuator", "tc-tbf", "--vm", "plc"];
    let none = site.output(&args);
    assert!(text(&none.stderr).contains("vm plc has no `traffic`"), "{}", text(&none.stderr));
}

#[test]
fn words_of_a_qos400_are_printed_and_read_back() {
    let site = Site::new();
    let port = ["--clock", "247.5MHz"];
    let rate = ["regulator", "qos400", "--rate", "15468750/s", "--soc", "zynqmp", "--master", "gem"];
    let (code, words) = site.json(&[&rate[..], &port].concat());
    assert_eq!((code, &words["words"]["rate"]), (0, &json!(0x1000_0000)), "{words}");
    let settings = words["compiled"][0]["settings"].as_array().unwrap();
    assert_eq!(settings[2]["address"], json!(0xFE14_A120_u64));
    let back = ["regulator", "qos400", "--decode", "0xff000000", "0x1", "0x10000000"];
    let (_, fields) = site.json(&[&back[..], &port].concat());
    assert_eq!(fields["fields"], words["fields"]);
    assert_eq!(fields["rates"]["rate"], json!(15_468_750.0));
    let short = ["regulator", "qos400", "--rate", "1MB/s"];
    for (args, says) in [
        (&["regulator", "qos400", "--rate", "1/s", "--clock", "250MHz"][..], "out of its range"),
        (&short, "--clock"),
        (&["regulator", "qos400", "--decode", "1", "1", "1", "--clock", "250MHz"], "not part of its field"),
        (&[&short[..], &["--clock", "250MHz", "--soc", "zynqmp", "--master", "x"]].concat(), "gem"),
    ] {
        let out = site.output(args);
        assert_eq!(out.status.code(), Some(1), "{args:?}");
        assert!(text(&out.stderr).contains(says), "{args:?}: {}", text(&out.stderr));
    }
}

/// The printed command goes to the monitor of the VM as it is printed.
#[test]
fn qemu_takes_its_limits() {
    let test = "qemu_takes_its_limits";
    if !has(test, &[Need::QEMU]) {
        return;
    }
    let site = Site::new();
    let disk = site.dir.path().join("disk.img");
    std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let drive = format!("file={},format=raw,if=none,id=d0", disk.display());
    let options = ["-drive", &drive, "-device", "virtio-blk-pci,drive=d0,id=disk0"];
    let machine = Machine::start(site.dir.path(), "throttled", &options);
    let spec =
        SPEC.replace("domain = \"test\"\ndisk = \"vda\"", &format!("qmp = \"{}\"", machine.qmp().display()));
    let all = outcomes_of(&site, &spec, &["--actuator", "qemu"]);
    let mut qmp = Qmp::connect(machine.qmp(), rtvirtio_testkit::HANG).unwrap();
    for direction in ["read", "write"] {
        let [command] = &settings(&all, "qemu", direction, "json")[..] else { panic!("one command") };
        let command: Value = serde_json::from_str(command).unwrap();
        qmp.execute(command["execute"].as_str().unwrap(), Some(command["arguments"].clone())).unwrap();
        // Either sets both: the second does not put the first aside.
        let drives = qmp.query_drives().unwrap();
        assert_eq!(
            drives[0].limits[0].to_string(),
            "iops-write=100 iops-write-max=300 bps-read=1048576 bps-read-max=4194304 bps-read-max-length=5"
        );
    }
    let worth = |direction: &str| {
        let of = |o: &&Value| o["compiled"]["direction"] == direction;
        all.iter().find(of).map(|o| o["compiled"]["worth"].clone())
    };
    // QEMU joins requests before it counts them, and no bytes.
    assert_eq!((worth("read"), worth("write")), (Some(json!("cap")), Some(json!("hint"))), "{all:#?}");
}

#[test]
fn tc_takes_its_commands() {
    let test = "tc_takes_its_commands";
    if !has(test, &[Need::Root]) {
        return;
    }
    let namespace = Namespace::new().unwrap();
    namespace.enter().unwrap();
    netns::run("ip", "link add tap0 type veth peer name far0").unwrap();
    let site = Site::new();
    let shell = |line: &str| {
        let out = Command::new("sh").args(["-c", line]).output().unwrap();
        (out.status.success(), text(&out.stdout) + &text(&out.stderr))
    };
    for (actuator, shown, says) in [
        ("tc-tbf", "tc qdisc show dev tap0", ["rate 8Mbit burst 30000b peakrate 32Mbit", "lat 50ms"]),
        ("tc-htb", "tc class show dev tap0", ["rate 8Mbit ceil 32Mbit burst 30000b", "class htb 1:1 root"]),
    ] {
        let all = outcomes(&site, &["--actuator", actuator, "--interface", "tap0"]);
        for line in settings(&all, actuator, "rx", "line") {
            let (done, said) = shell(&line);
            if !done && said.contains("Unknown qdisc") {
                skip(test, &format!("this kernel has no {actuator}"));
                return;
            }
            assert!(done, "{line}: {said}");
        }
        let (_, found) = shell(shown);
        assert!(says.iter().all(|word| found.contains(word)), "{actuator}: {found}");
        shell("tc qdisc del dev tap0 root");
    }
}

#[test]
fn libvirt_takes_its_commands() {
    let test = "libvirt_takes_its_commands";
    if !has(test, &[Need::Program("virsh")]) {
        return;
    }
    let site = Site::new();
    let all = outcomes(&site, &["--actuator", "libvirt", "--interface", "testnet0"]);
    // libvirt's own driver for tests, in one session: it forgets all at its end.
    let virsh = |script: &str| {
        let out = Command::new("virsh").args(["-c", "test:///default", script]).output().unwrap();
        text(&out.stdout) + &text(&out.stderr)
    };
    for (direction, show, says) in [
        ("read", "blkdeviotune test vda", &["read_bytes_sec : 1048576", "read_bytes_sec_max_length: 5"][..]),
        ("write", "blkdeviotune test vda", &["write_iops_sec : 100", "write_iops_sec_max: 300"]),
        (
            "rx",
            "domiftune test testnet0",
            &["inbound.average: 1000", "inbound.peak   : 4000", "inbound.burst  : 29"],
        ),
    ] {
        let [line] = &settings(&all, "libvirt", direction, "line")[..] else { panic!("one command") };
        let set = line.strip_prefix("virsh ").unwrap();
        let found = virsh(&format!("{set}; {show}"));
        assert!(says.iter().all(|word| found.contains(word)), "{line}: {found}");
    }
}

/// A VM with a target, and one that reads without an end.
fn beside(site: &Site, latency: &str, traffic: &str) -> String {
    let spec = format!(
        "[device]\ntwin = \"qlc-nvme\"\n[[vm]]\nname = \"plc\"\nlab = \"process\"\n[[vm.task]]\nname = \"cycle\"\n\
         op = \"read\"\nblock = \"4KiB\"\nrate = \"100/s\"\ntarget = {{ latency = \"{latency}\" }}\n\
         [[vm]]\nname = \"batch\"\nlab = \"process\"\n{traffic}\n[[vm.task]]\nname = \"bulk\"\nop = \"read\"\n\
         block = \"16KiB\"\ndepth = 16\n"
    );
    site.write("beside.toml", &spec)
}

/// Help lists what is accepted; a refusal says why, and what takes the value.
#[test]
fn a_regulator_that_holds_no_limit_of_disks_is_not_offered() {
    let site = Site::new();
    let refused = |name: &str| {
        let out = site.output(&["plan", "x.toml", "--traffic", "--actuator", name]);
        assert_eq!(out.status.code(), Some(64), "{name}: {}", text(&out.stderr));
        text(&out.stderr)
    };
    for (name, why) in [
        ("tc-htb", "does not limit the requests of disks"),
        ("resctrl", "does not limit the requests of disks"),
        ("qemu", "joins neighbouring requests"),
        ("libvirt", "joins neighbouring requests"),
    ] {
        let said = refused(name);
        assert!(said.contains(why) && said.contains("choose io-max, throttle-v1 or io-domain"), "{said}");
        assert!(said.contains(&format!("regulator SPEC --actuator {name}")), "{said}");
    }
    assert!(refused("other").contains("[possible values: io-domain, io-max, throttle-v1]"));
    let help = text(&site.output(&["help", "plan"]).stdout);
    assert!(help.contains("throttle-v1") && !help.contains("tc-htb"), "{help}");
}

#[test]
fn a_target_becomes_the_limit_of_its_neighbour() {
    let site = Site::new();
    let spec = beside(&site, "40ms", "");
    let args = ["plan", &spec, "--traffic", "--profile", PROFILE, "--actuator", "io-domain"];
    let (code, plan) = site.json(&args);
    assert_eq!((code, &plan["basis"]), (0, &json!("profile")), "{plan}");
    let (limit, victim) = (&plan["limits"][0], &plan["victims"][0]);
    assert_eq!((&limit["vm"], &limit["direction"]), (&json!("batch"), &json!("read")));
    assert!(victim["bound"].as_f64().unwrap() <= 0.04, "{plan}");
    // The printed line is one of a spec, and a regulator takes it.
    let shown = site.ok(&args);
    let line = shown.lines().find(|line| line.contains("traffic.read = ")).unwrap();
    let limited = beside(&site, "40ms", line.trim());
    let (code, regulators) = site.json(&["regulator", &limited, "--actuator", "io-domain"]);
    assert_eq!(code, 0, "{regulators}");
    assert_eq!(regulators[0]["outcomes"][0]["compiled"]["asked"]["rate"], limit["tspec"]["rate"]);
    // What no limit gives is refused with what is left.
    let close = beside(&site, "2ms", "");
    let out = site.output(&["plan", &close, "--traffic", "--profile", PROFILE]);
    assert_eq!(out.status.code(), Some(2));
    let says = text(&out.stderr);
    assert!(says.contains("plc/cycle") && says.contains("asks for 100.0/s and 2.00 ms"), "{says}");
    // The spec with the limit is written on request only, and differs by its line.
    let spec = beside(&site, "40ms", "");
    let saved = &site.path("limited.toml");
    site.ok(&[&args[..], &["--out", saved]].concat());
    let (before, after) = (std::fs::read_to_string(&spec).unwrap(), std::fs::read_to_string(saved).unwrap());
    let added: Vec<&str> = after.lines().filter(|line| !before.lines().any(|old| old == *line)).collect();
    assert_eq!(added, [line.split("  #").next().unwrap().trim()], "{after}");
    let given = site.output(&["plan", saved, "--traffic", "--profile", PROFILE]);
    assert!(text(&given.stderr).contains("no VM to choose a limit for"), "{}", text(&given.stderr));
    let out = site.output(&["plan", &spec, "--curve", "x.json"]);
    assert_eq!(out.status.code(), Some(64), "not without --traffic: {}", text(&out.stderr));
}
