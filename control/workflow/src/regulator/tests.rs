use rtvirtio_traffic::Enforcement;

use super::*;
use crate::error::Kind;
use crate::fixtures::put;

fn host_spec(traffic: &str) -> HostSpec {
    let text = format!(
        "[device]\npath = \"/dev/sda\"\n[[vm]]\nname = \"a\"\ncgroup = \"/a\"\n{traffic}\n\
         [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n\
         [[vm]]\nname = \"b\"\ncgroup = \"/b\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
    );
    HostSpec::parse("s.toml", &text).unwrap()
}

fn root(files: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
    let (dir, root) = crate::fixtures::root();
    for (path, text) in files {
        put(&root, path, text);
    }
    (dir, root)
}

const V2: &str = "38 31 0:35 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
const RESCTRL: &str = "40 31 0:40 / /sys/fs/resctrl rw - resctrl resctrl rw\n";

/// A host with a disk, cgroup v2 with `/a`, and what `more` adds.
fn host(more: &[(&str, &str)]) -> (tempfile::TempDir, Root) {
    let mut files = vec![
        ("/proc/self/mountinfo", V2),
        ("/sys/fs/cgroup/cgroup.controllers", "io\n"),
        ("/sys/fs/cgroup/a/cgroup.procs", ""),
        ("/sys/class/block/sda/size", "8\n"),
        ("/sys/class/block/sda/dev", "8:0\n"),
        ("/sys/block/sda/dev", "8:0\n"),
        ("/sys/block/sda/queue/scheduler", "none mq-deadline [bfq]\n"),
        ("/dev/sda", ""),
    ];
    files.extend_from_slice(more);
    root(&files)
}

fn dirs() -> Dirs {
    let nowhere = std::path::PathBuf::from("/nonexistent/rtvirtio");
    Dirs { state: nowhere.clone(), run: nowhere }
}

fn all(traffic: &str, options: &RegulatorOptions, root: &Root) -> Vec<VmRegulators> {
    regulators(&host_spec(traffic), options, root, &dirs()).unwrap_or_else(|e| panic!("{e:#}"))
}

fn compiled(vm: &VmRegulators, actuator: Actuator) -> &Compiled {
    let of = |outcome: &&Outcome| matches!(outcome, Outcome::Compiled(c) if c.actuator == actuator);
    match vm.outcomes.iter().find(of) {
        Some(Outcome::Compiled(compiled)) => compiled,
        _ => panic!("{actuator} is not compiled: {:#?}", vm.outcomes),
    }
}

#[test]
fn what_is_here_has_its_path_and_the_rest_is_a_variable_with_its_reason() {
    let (_dir, root) = host(&[]);
    let found = all("traffic.read = { rate = \"20MB/s\" }", &RegulatorOptions::default(), &root);
    assert_eq!(found.len(), 1, "only VMs with traffic");
    let unknown = found[0].unknown.join("\n");
    assert!(unknown.contains("$CGROUP_V1: this host has block I/O on cgroup v2"), "{unknown}");
    assert!(unknown.contains("$DOMAIN"), "{unknown}");
    let set = compiled(&found[0], Actuator::IoMax).settings[0].to_string();
    assert!(set.contains("rbps=20000000") && set.contains("/sys/fs/cgroup/a/io.max"), "{set} {unknown}");
    let refused = found[0].outcomes.iter().any(|o| {
        matches!(o, Outcome::Refused { actuator: Actuator::Resctrl, why, .. } if why.contains("no resctrl"))
    });
    assert!(refused, "{:#?}", found[0].outcomes);
}

#[test]
fn a_host_of_intel_needs_the_bandwidth_at_100_percent() {
    let (_dir, root) = host(&[
        ("/proc/self/mountinfo", &(V2.to_owned() + RESCTRL)),
        ("/proc/cpuinfo", "vendor_id\t: GenuineIntel\n"),
        ("/sys/fs/resctrl/schemata", "MB:0=100\nL3:0=7ff\n"),
        ("/sys/fs/resctrl/info/MB/min_bandwidth", "10\n"),
        ("/sys/fs/resctrl/info/MB/bandwidth_gran", "10\n"),
        ("/sys/fs/resctrl/info/L3/cbm_mask", "7ff\n"),
        ("/sys/fs/resctrl/info/L3/min_cbm_bits", "1\n"),
        ("/sys/fs/resctrl/info/L3/shareable_bits", "600\n"),
    ]);
    let traffic = "traffic.read = { rate = \"2600MB/s\" }";
    let mut options = RegulatorOptions { actuators: vec![Actuator::Resctrl], ..RegulatorOptions::default() };
    let refused = &all(traffic, &options, &root)[0].outcomes[0];
    assert!(
        matches!(refused, Outcome::Refused { why, .. } if why.contains("--full-bandwidth")),
        "{refused:?}"
    );
    options.full_bandwidth = Some(BytesPerSec(10e9));
    options.ways = Some(3);
    let found = all(traffic, &options, &root);
    let lines: Vec<String> =
        compiled(&found[0], Actuator::Resctrl).settings.iter().map(ToString::to_string).collect();
    assert!(lines.iter().any(|l| l.contains("MB:0=20\"")), "{lines:?}");
    assert!(lines.iter().any(|l| l.contains("L3:0=1c0\"")), "{lines:?}");
    assert_eq!(compiled(&found[0], Actuator::Resctrl).worth, Enforcement::Hint);
}

#[test]
fn hosts_of_amd_and_mpam_have_their_own_units() {
    let amd = [
        ("/proc/self/mountinfo", &*(V2.to_owned() + RESCTRL)),
        ("/proc/cpuinfo", "vendor_id\t: AuthenticAMD\n"),
        ("/sys/fs/resctrl/schemata", "MB:0=2048;1=2048\n"),
        ("/sys/fs/resctrl/info/MB/min_bandwidth", "1\n"),
        ("/sys/fs/resctrl/info/MB/bandwidth_gran", "1\n"),
    ];
    let options = RegulatorOptions {
        actuators: vec![Actuator::Resctrl],
        full_bandwidth: Some(BytesPerSec(20e9)),
        ..RegulatorOptions::default()
    };
    let traffic = "traffic.write = { rate = \"2600MB/s\" }";
    let (_dir, root) = host(&amd);
    let found = all(traffic, &options, &root);
    let c = compiled(&found[0], Actuator::Resctrl);
    assert!(c.settings.iter().any(|s| s.to_string().contains("MB:0=20;1=20")), "{c:?}");
    assert_eq!(c.worth, Enforcement::Cap);
    let mut mpam = amd;
    mpam[1].1 = "CPU implementer\t: 0x41\n";
    mpam[2].1 = "MB:0=100\n";
    let (_dir, root) = host(&mpam);
    let found = all(traffic, &options, &root);
    let c = compiled(&found[0], Actuator::Resctrl);
    assert!(c.settings.iter().any(|s| s.to_string().contains("MB:0=13\"")), "{c:?}");
}

#[test]
fn a_group_of_resctrl_takes_every_thread_that_works_for_the_vm() {
    let amd = [
        ("/proc/self/mountinfo", &*(V2.to_owned() + RESCTRL)),
        ("/proc/cpuinfo", "vendor_id\t: AuthenticAMD\n"),
        ("/sys/fs/resctrl/schemata", "MB:0=2048\n"),
        ("/sys/fs/resctrl/info/MB/min_bandwidth", "1\n"),
        ("/sys/fs/resctrl/info/MB/bandwidth_gran", "1\n"),
    ];
    let (_dir, root) = host(&amd);
    let put = |path: String, text: &str| put(&root, path, text);
    let task = |pid: u32, tid: u32, name: &str, flags: u64| {
        let dir = format!("/proc/{pid}/task/{tid}");
        let stat = format!("{tid} ({name}) S 1 1 1 0 -1 {flags} {}1 50 1 0 0 0\n", "0 ".repeat(29));
        put(format!("{dir}/stat"), &stat);
        put(format!("{dir}/status"), &format!("Tgid:\t{pid}\nCpus_allowed_list:\t0-1\n"));
        put(format!("{dir}/cgroup"), "0::/a\n");
        put(format!("/proc/{pid}/comm"), &format!("{name}\n"));
    };
    let options = RegulatorOptions { actuators: vec![Actuator::Resctrl], ..RegulatorOptions::default() };
    let traffic = "traffic.write = { rate = \"2600MB/s\" }";
    let tasks = |found: &VmRegulators| -> Vec<String> {
        let lines = compiled(found, Actuator::Resctrl).settings.iter().map(ToString::to_string);
        lines.filter(|line| line.contains("/sys/fs/resctrl/a/tasks")).collect()
    };
    let found = all(traffic, &options, &root);
    assert!(tasks(&found[0]).is_empty());
    assert!(found[0].unknown.iter().any(|line| line.starts_with("threads of a, ")), "{:?}", found[0].unknown);

    put("/sys/fs/cgroup/a/cgroup.procs".to_owned(), "100\n");
    for (tid, name) in [(102, "IO io0"), (103, "CPU 0/KVM"), (100, "qemu-system-x86")] {
        task(100, tid, name, 0x0040_0040);
    }
    task(200, 200, "vhost-100", 0x0020_8040);
    task(300, 300, "qemu-system-x86", 0x0040_0040);
    let found = all(traffic, &options, &root);
    let lines = tasks(&found[0]);
    assert_eq!(lines.len(), 4, "{lines:?} {:?}", found[0].unknown);
    for tid in ["100", "102", "103", "200"] {
        assert!(lines.iter().any(|line| line.contains(tid)), "{tid}: {lines:?}");
    }
    assert!(found[0].unknown.iter().all(|line| !line.starts_with("threads")), "{:?}", found[0].unknown);
}

#[test]
fn what_cannot_be_is_an_error_with_its_remedy() {
    let (_dir, root) = host(&[]);
    let error = |traffic: &str, options: &RegulatorOptions| {
        regulators(&host_spec(traffic), options, &root, &dirs()).unwrap_err()
    };
    let none = error("", &RegulatorOptions::default());
    assert_eq!(none.kind(), Kind::Argument);
    assert!(none.to_string().contains("traffic = { rate"), "{none}");
    let other = RegulatorOptions { vm: Some("c".to_owned()), ..RegulatorOptions::default() };
    assert!(error("traffic = { rate = \"1MB/s\" }", &other).to_string().contains("no VM \"c\""));
    let port = RegulatorOptions { actuators: vec![Actuator::Qos400], ..RegulatorOptions::default() };
    let refused = &all("traffic.rx = { rate = \"1MB/s\" }", &port, &root)[0].outcomes[0];
    assert!(matches!(refused, Outcome::Refused { why, .. } if why.contains("--clock")), "{refused:?}");
}

#[test]
fn broken_files_of_resctrl_are_an_error_and_not_absence() {
    let (_dir, root) = host(&[("/proc/self/mountinfo", &(V2.to_owned() + RESCTRL))]);
    let spec = host_spec("traffic = { rate = \"1MB/s\" }");
    assert!(regulators(&spec, &RegulatorOptions::default(), &root, &dirs()).is_err());
}
