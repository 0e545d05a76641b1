use std::process::Command;

use serde_json::json;

use super::*;

fn host(path: &str, form: &Value) -> Value {
    json!({ "place": "host", "path": path, "form": form })
}

fn one(target: &Value, old: &str) -> Result<Vec<String>, String> {
    let entry = json!({ "id": 0, "knob": "k", "target": target, "old": old, "new": "x", "changed_by": null });
    let readable = Readable::parse(entry.to_string().as_bytes());
    assert_eq!(readable.entries.len(), 1, "{entry}");
    readable.entries[0].commands.clone()
}

#[test]
fn each_form_has_a_command() {
    let weights = "/sys/fs/cgroup/blkio/a/blkio.bfq.weight_device";
    let throttle = "/sys/fs/cgroup/blkio/a/blkio.throttle.read_iops_device";
    let weight = json!({ "device_weight": { "dev": "7:0" } });
    let limit = json!({ "throttle": { "dev": "7:0" } });
    let io_max = json!({ "io_max": { "dev": "7:0", "key": "riops" } });
    for (path, form, old, command) in [
        (
            "/sys/block/sda/queue/scheduler",
            json!("elevator"),
            "mq-deadline",
            "echo 'mq-deadline' > '/sys/block/sda/queue/scheduler'",
        ),
        (
            "/sys/block/sda/queue/nr_requests",
            json!("plain"),
            "64",
            "echo '64' > '/sys/block/sda/queue/nr_requests'",
        ),
        (weights, weight.clone(), "55", &format!("echo '7:0 55' > '{weights}'")),
        (throttle, limit.clone(), "max", &format!("echo '7:0 0' > '{throttle}'")),
        (throttle, limit, "77", &format!("echo '7:0 77' > '{throttle}'")),
        ("/sys/fs/cgroup/a/io.max", io_max, "max", "echo '7:0 riops=max' > '/sys/fs/cgroup/a/io.max'"),
        (
            "/sys/fs/cgroup/cgroup.subtree_control",
            json!("io_enabled"),
            "-io",
            "echo '-io' > '/sys/fs/cgroup/cgroup.subtree_control'",
        ),
        (
            r"/sys/fs/cgroup/machine-qemu\x2d1.scope/cpu.max",
            json!("plain"),
            "max 100000",
            r"echo 'max 100000' > '/sys/fs/cgroup/machine-qemu\x2d1.scope/cpu.max'",
        ),
    ] {
        assert_eq!(one(&host(path, &form), old).unwrap(), [command]);
    }
    let vector = json!({ "interrupt": { "vector": "/sys/devices/pci0/msi_irqs/24", "inode": 7 } });
    let irq = "/proc/irq/24/smp_affinity_list";
    let same = "test \"$(stat -c %i '/sys/devices/pci0/msi_irqs/24')\" = 7";
    assert_eq!(one(&host(irq, &vector), "0-3").unwrap(), [format!("{same} && echo 0-3 > {irq}")]);
    one(&host("/proc/sysrq-trigger", &vector), "0").unwrap_err();
    let default = one(&host(weights, &weight), "default").unwrap();
    assert!(default[0].starts_with("# this erases") && default[1].starts_with("weight=$(awk"), "{default:?}");
}

#[test]
fn threads_and_groups_and_guests_have_commands() {
    let thread = |form: Value| json!({ "place": { "thread": { "pid": 7, "tid": 8, "start": 1008 } }, "path": "/proc/7/task/8/x", "form": form });
    let same = "test \"$(sed 's/.*) //' /proc/7/task/8/stat | cut -d' ' -f20)\" = 1008 && ";
    for (old, command) in [
        ("other nice -2", "chrt --other --pid 0 8 && renice -n -2 -p 8"),
        ("fifo 3 reset-on-fork", "chrt --reset-on-fork --fifo --pid 3 8"),
        (
            "deadline 4000000/20000000/20000000",
            "chrt --deadline --sched-runtime 4000000 --sched-deadline 20000000 --sched-period 20000000 --pid 0 8",
        ),
    ] {
        assert_eq!(one(&thread(json!("scheduling")), old).unwrap(), [format!("{same}{command}")]);
    }
    assert!(one(&thread(json!("scheduling")), "fifo 3; reboot").is_err());
    let cgroup = json!({ "thread_cgroup": { "controller": "cpu", "mount": "/sys/fs/cgroup/cpu" } });
    assert_eq!(
        one(&thread(cgroup), "/vms").unwrap(),
        [format!("{same}echo '8' > '/sys/fs/cgroup/cpu/vms/tasks'")]
    );
    let group = json!({ "group": { "home": "/sys/fs/cgroup/cpu/vms", "scheduling": "other nice 0" } });
    let commands = one(&host("/sys/fs/cgroup/cpu/rtvirtio-vm", &group), "absent").unwrap();
    assert_eq!(commands[1], "rmdir '/sys/fs/cgroup/cpu/rtvirtio-vm'");
    let task = json!({ "resctrl_task": { "mount": "/sys/fs/resctrl" } });
    assert_eq!(one(&thread(task), "/").unwrap(), [format!("{same}echo '8' > '/sys/fs/resctrl/tasks'")]);
    let group = json!({ "resctrl_group": { "processes": [7] } });
    let at = "/sys/fs/resctrl/rtvirtio-vm";
    assert_eq!(one(&host(at, &group), "absent").unwrap(), [format!("rmdir '{at}'")]);
    let line = json!({ "schemata": { "resource": "L3" } });
    let commands = one(&host("/sys/fs/resctrl/schemata", &line), "0=ff").unwrap();
    assert_eq!(commands, ["echo 'L3:0=ff' > '/sys/fs/resctrl/schemata'"]);
    let guest = json!({ "guest": { "vm": "vm0", "agent": "/run/a.sock" } });
    let target = json!({ "place": guest, "path": "/sys/block/vda/queue/scheduler", "form": "elevator" });
    let commands = one(&target, "none").unwrap();
    assert!(
        commands.len() == 1
            && commands[0].starts_with("# in the guest 'vm0' (agent '/run/a.sock'): echo 'none'")
    );
}

/// The shell itself splits the words, and runs nothing else.
#[test]
fn nothing_from_the_file_is_taken_for_shell() {
    let hostile = [
        "$(touch x)",
        "`touch x`",
        "a'; touch x; '",
        "\"$HOME\"",
        "a b",
        "*",
        "~",
        "-n",
        "-e",
        "\\n",
        "!",
        "# no",
        "é",
    ];
    for text in hostile {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let file = format!("/sys/{text}/y");
        let command = one(&host(&file, &json!("plain")), text).unwrap().remove(0);
        // The same words, printed instead of written to a file.
        let script = command.replacen("echo ", "printf '%s\\n' ", 1).replace(" > ", " ");
        let output = Command::new("sh").arg("-c").arg(&script).current_dir(dir.path()).output().unwrap();
        assert!(output.status.success(), "{command}");
        assert_eq!(String::from_utf8(output.stdout).unwrap(), format!("{text}\n{file}\n"), "{command}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "{command}");
    }
    for bad in ["a\nreboot", "a\rb", "\u{1b}[2J", "a\u{202e}b", "a\u{0}b", "a\u{85}b"] {
        for (path, old) in [("/sys/x", bad.to_owned()), (&format!("/sys/{bad}"), "1".to_owned())] {
            let why = one(&host(path, &json!("plain")), &old).unwrap_err();
            assert!(why.contains("control characters"), "{why}");
        }
    }
    for path in ["/etc/passwd", "/sys/../etc/passwd", "sys/x", "/systems/x", "", "/proc/sysrq-trigger"] {
        let why = one(&host(path, &json!("plain")), "1").unwrap_err();
        assert!(why.contains("does not lie below /sys"), "{path}: {why}");
    }
    let dev = json!({ "throttle": { "dev": "7:0\n8:0" } });
    assert!(one(&host("/sys/x", &dev), "5").is_err());
}

#[test]
fn every_line_is_marked_and_holds_no_control_character() {
    let entries: Vec<Value> = ["a\nrm -rf /", "\u{1b}]0;x\u{7}", "\u{202e}", "plain"]
        .iter()
        .map(|text| json!({ "id": 0, "knob": text, "target": host(&format!("/sys/{text}"), &json!("plain")), "old": text, "new": text }))
        .collect();
    let bytes = json!({ "entries": entries, "knob": 7 }).to_string();
    let readable = Readable::parse(bytes.as_bytes());
    assert_eq!(readable.entries.len(), 4);
    let text = readable.to_string();
    assert!(text.chars().all(|c| c == '\n' || !is_hidden(c)), "{text}");
    for line in text.lines().skip(2) {
        assert!(line.ends_with("# unverified"), "{line}");
        assert!(line.starts_with('#') || line.starts_with("echo '"), "{line}");
    }
    // The only line that is no comment is the command.
    assert_eq!(text.lines().filter(|l| !l.starts_with('#')).count(), 1, "{text}");
}

#[test]
fn what_is_whole_is_found_around_what_is_not() {
    let entry = |n: usize| json!({ "id": n, "knob": format!("k{n}"), "target": host(&format!("/sys/{n}"), &json!("plain")), "old": "1", "new": "2", "changed_by": null });
    let good =
        serde_json::to_string_pretty(&json!({ "version": "0", "entries": [entry(0), entry(1), entry(2)] }))
            .unwrap();
    let found =
        |text: &[u8]| -> Vec<String> { Readable::parse(text).entries.into_iter().map(|e| e.knob).collect() };
    assert_eq!(found(good.as_bytes()), ["k2", "k1", "k0"]);
    // Cut off in the last entry.
    assert_eq!(found(&good.as_bytes()[..good.rfind("k2").unwrap()]), ["k1", "k0"]);
    let mut bytes = good.clone().into_bytes();
    // A byte that is not UTF-8, in the middle entry.
    bytes[good.find("k1").unwrap()] = 0xff;
    assert_eq!(found(&bytes), ["k2", "k0"]);
    // A key that has changed: shown without a command.
    let changed = good.replacen("\"plain\"", "\"plaim\"", 1);
    let readable = Readable::parse(changed.as_bytes());
    assert_eq!(readable.entries.iter().filter(|e| e.commands.is_err()).count(), 1, "{readable}");
    for text in ["", "{", "{{{{", "[]", "\u{0}", "{\"target\":{}}"] {
        assert_eq!(found(text.as_bytes()), Vec::<String>::new(), "{text}");
        assert!(Readable::parse(text.as_bytes()).to_string().contains("No entry of it can be read"));
    }
}
