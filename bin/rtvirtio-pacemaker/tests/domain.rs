//! The agents on VMs of a real libvirt: contracts of several next to each other, and a guest
//! that starts with its contract in force.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use rtvirtio_testkit::{Libvirt, Need, has, tempdir, unique};

const PROGRAM: &str = env!("CARGO_BIN_EXE_rtvirtio-pacemaker");
const AGENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/VirtualDomain");
const MACHINE: &str = "/sys/fs/cgroup/cpu/machine/cpu.rt_runtime_us";

struct Site {
    dir: tempfile::TempDir,
    libvirt: Libvirt,
}

impl Site {
    /// A VM in its firmware, and its spec.
    fn write(&self, vm: &str, budget: &str) {
        let domain = format!(
            "<domain type='qemu'>\n<name>{vm}</name>\n<memory unit='MiB'>64</memory>\n<vcpu>1</vcpu>\n\
             <os><type arch='x86_64' machine='pc'>hvm</type></os>\n\
             <devices><emulator>/usr/bin/qemu-system-x86_64</emulator><memballoon model='none'/></devices>\n</domain>\n"
        );
        fs::write(self.path(vm, "xml"), domain).unwrap();
        let spec = format!(
            "[device]\npath = \"/dev/vda\"\n[[vm]]\nname = \"{vm}\"\ndomain = \"{vm}\"\nuri = \"{}\"\n\
             cpu = {{ budget = \"{budget}\", period = \"100ms\" }}\n\
             [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"10/s\"\n",
            self.libvirt.uri()
        );
        fs::write(self.path(vm, "toml"), spec).unwrap();
    }

    fn path(&self, name: &str, end: &str) -> PathBuf {
        self.dir.path().join(format!("{name}.{end}"))
    }

    fn command(&self, program: &Path, vm: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("OCF_ROOT", "/usr/lib/ocf")
            .env("HA_RSCTMP", self.dir.path())
            .env("OCF_RESOURCE_INSTANCE", vm)
            .env("OCF_RESKEY_config", self.path(vm, "xml"))
            .env("OCF_RESKEY_hypervisor", self.libvirt.uri())
            .env("OCF_RESKEY_force_stop", "true")
            .env("OCF_RESKEY_spec", self.path(vm, "toml"))
            .env("RTVIRTIO_STATE_DIR", self.dir.path().join("state"))
            .env("RTVIRTIO_RUN_DIR", self.dir.path().join("run"))
            .env("RTVIRTIO_PACEMAKER", self.path("watched", "sh"));
        command
    }

    /// `ocf:rtvirtio:VirtualDomain`; what it printed to standard error.
    fn domain(&self, vm: &str, action: &str) -> String {
        done(&self.command(Path::new(AGENT), vm).arg(action).output().unwrap(), action)
    }

    /// `ocf:rtvirtio:contract`.
    fn contract(&self, vm: &str, action: &str) -> String {
        done(&self.command(Path::new(PROGRAM), vm).args(["agent", action]).output().unwrap(), action)
    }

    fn state(&self, vm: &str) -> String {
        self.libvirt.ok(&["domstate", vm]).trim().to_owned()
    }
}

fn done(out: &Output, action: &str) -> String {
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(0), "{action}: {said}");
    said
}

#[test]
fn guests_start_with_their_contracts_and_leave_each_other_alone() {
    let agents = Need::Path("/usr/lib/ocf/resource.d/heartbeat/VirtualDomain", "no resource-agents");
    let needs = [&Libvirt::NEEDS[..], &[Need::RT_GROUPS, agents]].concat();
    if !has("guests_start_with_their_contracts_and_leave_each_other_alone", &needs) {
        return;
    }
    let dir = tempdir().unwrap();
    let libvirt = Libvirt::start(dir.path());
    let site = Site { dir, libvirt };
    let (a, b) = (unique("ocfa"), unique("ocfb"));
    // The program, after a note of the state in which it finds the guest.
    let note = site.path("found", "txt");
    let script = format!(
        "#!/bin/sh\nvirsh --quiet --connect '{}' domstate \"$OCF_RESOURCE_INSTANCE\" >'{}'\nexec {PROGRAM} \"$@\"\n",
        site.libvirt.uri(),
        note.display()
    );
    let watched = site.path("watched", "sh");
    fs::write(&watched, script).unwrap();
    fs::set_permissions(&watched, fs::Permissions::from_mode(0o755)).unwrap();

    site.write(&a, "2ms");
    assert!(!site.domain(&a, "start").contains("rtvirtio:"), "no warning");
    assert_eq!((fs::read_to_string(&note).unwrap().trim(), site.state(&a).as_str()), ("paused", "running"));
    assert_eq!(site.contract(&a, "monitor"), "");
    let alone: u64 = fs::read_to_string(MACHINE).unwrap().trim().parse().unwrap();

    // Another VM needs room in the group above both: that is no change of the first contract.
    site.write(&b, "3ms");
    site.domain(&b, "start");
    let both: u64 = fs::read_to_string(MACHINE).unwrap().trim().parse().unwrap();
    assert!(both > alone, "{alone} {both}");
    for vm in [&a, &b] {
        assert_eq!(site.contract(vm, "monitor"), "");
        // It is in force already.
        assert_eq!(site.contract(vm, "start"), "");
    }
    // What agents hold stays, with the room above both, and has the agents' names.
    let revert =
        site.command(&rtvirtio_testkit::site::program("rtvirtio"), &a).arg("revert").output().unwrap();
    let said = String::from_utf8_lossy(&revert.stdout).into_owned();
    assert!(revert.status.code() == Some(3) && !said.contains("FAILED"), "{said}");
    for vm in [&a, &b] {
        assert!(said.contains(&format!("contract of {vm}: resource {vm} of Pacemaker holds it")), "{said}");
        assert_eq!(site.contract(vm, "monitor"), "");
    }
    assert_eq!(fs::read_to_string(MACHINE).unwrap().trim(), both.to_string());
    site.contract(&b, "stop");
    assert_eq!(fs::read_to_string(MACHINE).unwrap().trim(), alone.to_string());
    assert_eq!(site.contract(&a, "monitor"), "");
    site.domain(&b, "stop");

    // An agent that was killed before it resumed the guest; and an operator who paused it.
    site.libvirt.ok(&["suspend", &a]);
    site.domain(&a, "monitor");
    assert_eq!(site.state(&a), "paused", "the operator's");
    let mark = site.dir.path().join("run/paused").join(&a);
    fs::write(&mark, "").unwrap();
    site.domain(&a, "monitor");
    assert_eq!((site.state(&a).as_str(), mark.exists()), ("running", false));
    // The contract goes with the VM, also when its own resource was never started.
    site.domain(&a, "stop");
    assert_eq!(fs::read_to_string(MACHINE).map(|t| t.trim().to_owned()).unwrap_or_default(), "0");
    assert_eq!(site.contract(&a, "stop"), "", "nothing is left");

    // A VM that ended without its agents holds no room.
    site.write(&a, "60ms");
    site.domain(&a, "start");
    site.libvirt.ok(&["destroy", &a]);
    site.write(&b, "60ms");
    assert!(!site.domain(&b, "start").contains("rtvirtio:"), "no warning");
    site.domain(&b, "stop");
    site.contract(&a, "stop");

    // A contract that cannot be had stops no guest.
    site.write(&b, "99.9ms");
    let said = site.domain(&b, "start");
    assert!(said.contains("the guest runs without it"), "{said}");
    assert_eq!(site.state(&b), "running");
    site.domain(&b, "stop");
    let meta = site.command(Path::new(AGENT), &b).arg("meta-data").output().unwrap();
    let meta = String::from_utf8_lossy(&meta.stdout).into_owned();
    assert!(meta.contains("name=\"spec\"") && meta.contains("name=\"force_stop\""), "{meta}");
}

/// An error of libvirt's is not read as a guest that runs.
#[test]
fn a_guest_that_may_be_paused_is_not_said_to_run() {
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    // Heartbeat's agent: the VM does not run, and is started.
    fs::write(at("heartbeat"), "#!/bin/sh\n[ \"$1\" != monitor ]\n").unwrap();
    fs::set_permissions(at("heartbeat"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::write(at("plc.xml"), "<domain>\n<name>plc</name>\n</domain>\n").unwrap();
    let agent = |action: &str, config: &str| {
        let out = Command::new(AGENT)
            .arg(action)
            .env("OCF_RESOURCE_INSTANCE", "plc")
            .env("OCF_RESKEY_config", at(config))
            .env("OCF_RESKEY_hypervisor", "test:///no/such/file")
            .env("RTVIRTIO_VIRTUALDOMAIN", at("heartbeat"))
            .env("RTVIRTIO_PACEMAKER", "true")
            .env("RTVIRTIO_RUN_DIR", at("run"))
            .output()
            .unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    let (code, said) = agent("start", "plc.xml");
    assert!(code == Some(1) && said.contains("cannot be resumed"), "{code:?}: {said}");
    let mark = at("run").join("paused/plc");
    assert!(mark.exists(), "a monitor tries again");
    assert_eq!(agent("monitor", "plc.xml").0, Some(1));
    assert!(mark.exists(), "and again");
    agent("stop", "plc.xml");
    assert!(!mark.exists());
    // A VM without a name could not be resumed, and is not paused.
    let (code, said) = agent("start", "none.xml");
    assert!(code == Some(0) && said.contains("names no domain"), "{code:?}: {said}");
}
