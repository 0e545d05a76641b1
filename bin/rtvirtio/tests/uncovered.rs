//! What a running VM has now and no setting acts on: disks that came later, writes through the
//! host's page cache, reads that never reached the device.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rtvirtio_kernel::{Cgroups, Hierarchy, Root};
use rtvirtio_testkit::site::{PROFILE, Site, text};
use rtvirtio_testkit::{HANG, LoopDevice, Machine, Need, has, skip, unique};
use rtvirtio_vmm::Qmp;
use serde_json::{Value, json};

/// Loop devices, and the cgroup of a VM. All of it is removed when this is dropped.
struct Host {
    devices: Vec<LoopDevice>,
    cgroups: Cgroups,
    cgroup: PathBuf,
}

impl Host {
    /// `None`, after saying so, where the machine does not allow it.
    fn new(test: &str, site: &Site, devices: usize) -> Option<Self> {
        let needs = [Need::Root, Need::QEMU, Need::Path("/dev/loop-control", "no loop devices")];
        if !has(test, &needs) {
            return None;
        }
        let root = Root::default();
        let cgroups = Cgroups::detect(&root).map_err(|e| skip(test, &e.to_string())).ok()?;
        let cgroup = PathBuf::from(format!("/rtvirtio-{}", unique(test)));
        cgroups.create(&root, &cgroup).unwrap();
        let mut host = Self { devices: Vec::new(), cgroups, cgroup };
        for n in 0..devices {
            let file = site.dir.path().join(format!("device{n}.img"));
            fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
            let Some(device) = LoopDevice::attach(&file) else {
                skip(test, "no loop device can be attached");
                return None;
            };
            host.devices.push(device);
        }
        Some(host)
    }

    fn node(&self, n: usize) -> String {
        self.devices[n].0.display().to_string()
    }

    fn name(&self, n: usize) -> String {
        self.devices[n].0.file_name().unwrap().to_string_lossy().into_owned()
    }

    /// A QEMU in the cgroup, with the first device as its disk.
    fn machine(&self, dir: &Path, cache: &str) -> Machine {
        let drive = format!("file={},format=raw,if=none,id=d0,cache={cache}", self.node(0));
        let options = ["-S", "-drive", &drive, "-device", "virtio-blk-pci,drive=d0,id=disk0"];
        let machine = Machine::start(dir, &unique("tenant"), &options);
        let procs = self.cgroups.dir(&self.cgroup).unwrap().join("cgroup.procs");
        fs::write(procs, machine.pid().to_string()).unwrap();
        machine
    }

    /// Whether the kernel charges write-back to the cgroup.
    fn charges_write_back(&self) -> bool {
        self.cgroups.hierarchy == Hierarchy::V2
            && self.cgroups.dir(&self.cgroup).unwrap().join("memory.current").exists()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.cgroups.remove(&Root::default(), &self.cgroup);
    }
}

/// Standard error of a command.
fn warned(site: &Site, args: &[&str]) -> String {
    text(&site.output(args).stderr)
}

/// The entries of `status --json` on what no setting acts on, by kind and disk.
fn uncovered(status: &Value) -> Vec<(String, String)> {
    let all = status["uncovered"].as_array().cloned().unwrap_or_default();
    let word = |of: &Value, key: &str| of[key].as_str().unwrap_or_default().to_owned();
    all.iter().map(|of| (word(of, "kind"), word(of, "disk"))).collect()
}

fn spec(host: &Host, machine: &Machine, traffic: &str, task: &str) -> String {
    format!(
        "[device]\npath = \"{}\"\n[[vm]]\nname = \"tenant\"\nqmp = \"{}\"\n{traffic}\n[[vm.task]]\nname = \"t\"\n{task}\n",
        host.node(0),
        machine.qmp().display()
    )
}

const READS: &str =
    "op = \"read\"\nblock = \"4KiB\"\nrate = \"100/s\"\ntarget = { percentile = \"p99\", latency = \"1s\" }";

#[test]
fn a_disk_that_came_while_limits_are_in_force_is_named() {
    let test = "a_disk_that_came_while_limits_are_in_force_is_named";
    let site = Site::new();
    let Some(host) = Host::new(test, &site, 3) else { return };
    let machine = host.machine(site.dir.path(), "none");
    let limits = "traffic.read = { rate = \"4MB/s\" }\ntraffic.write = { rate = \"4MB/s\" }";
    let path = site.write("s.toml", &spec(&host, &machine, limits, READS));
    let said = warned(&site, &["apply", &path, "--traffic-only"]);
    assert!(!said.contains("nothing is set") && !said.contains("page cache"), "{said}");
    let (code, status) = site.json(&["status"]);
    assert_eq!((code, uncovered(&status)), (0, vec![]), "{status:#}");

    let mut qmp = Qmp::connect(machine.qmp(), HANG).unwrap();
    let mut plug = |id: &str, driver: &str, file: &str| {
        let node =
            json!({ "driver": driver, "node-name": id, "filename": file, "cache": { "direct": true } });
        qmp.execute("blockdev-add", Some(node)).unwrap();
        let device = json!({ "driver": "virtio-blk-pci", "drive": id, "id": format!("of-{id}") });
        qmp.execute("device_add", Some(device)).unwrap();
    };
    plug("late", "host_device", &host.node(1));
    // A file that no command line has named, on a device of its own.
    let mount = Mount::of(&host.devices[2], &site.dir.path().join("mnt"));
    let image = mount.0.join("late.img");
    fs::File::create(&image).unwrap().set_len(1 << 20).unwrap();
    plug("file", "file", image.to_str().unwrap());
    let (code, status) = site.json(&["status"]);
    let expected: Vec<(String, String)> = {
        let mut disks = [host.node(1), image.display().to_string()];
        disks.sort();
        disks.into_iter().map(|disk| ("elsewhere".to_owned(), disk)).collect()
    };
    assert_eq!((code, uncovered(&status)), (0, expected), "{status:#}");
    let shown = text(&site.output(&["status"]).stdout);
    assert!(shown.contains(&format!("lies on {}, for which nothing is set", host.name(1))), "{shown}");
    assert!(shown.contains(&format!("lies on {}, for which nothing is set", host.name(2))), "{shown}");

    // A snapshot moves the writes to an overlay.
    let overlay = mount.0.join("overlay.qcow2");
    let snapshot = json!({ "device": "d0", "snapshot-file": overlay, "format": "qcow2" });
    qmp.execute("blockdev-snapshot-sync", Some(snapshot)).unwrap();
    let (_, status) = site.json(&["status"]);
    assert!(
        uncovered(&status).contains(&("elsewhere".to_owned(), overlay.display().to_string())),
        "{status:#}"
    );
    let (_, found) = site.json(&["discover"]);
    let vm = found["vms"].as_array().unwrap().iter().find(|vm| vm["pid"] == machine.pid()).unwrap();
    let writes = |disk: &str| {
        vm["disks"].as_array().unwrap().iter().find(|d| d["path"] == disk).map(|d| d["writes"].clone())
    };
    assert_eq!(writes(overlay.to_str().unwrap()), Some(json!(true)), "{vm:#}");
    assert_eq!(writes(image.to_str().unwrap()), Some(json!(true)), "{vm:#}");
    assert_eq!(writes(&host.node(0)), Some(json!(false)), "{vm:#}");
    site.ok(&["revert"]);
    let (_, status) = site.json(&["status"]);
    assert_eq!(uncovered(&status), [], "nothing is in force: {status:#}");

    // A new `apply`, and predictions, say it too. The monitor takes one client at a time.
    drop(qmp);
    let place = format!("lies on {}", host.name(1));
    for args in [
        &["apply", &path, "--traffic-only", "--dry-run"][..],
        &["predict", &path, "--profile", PROFILE],
        &["plan", &path, "--profile", PROFILE],
    ] {
        let said = warned(&site, args);
        assert!(said.contains(&place), "{args:?}: {said}");
    }
    let (_, plan) = site.json(&["plan", &path, "--profile", PROFILE]);
    let of = |c: &&Value| c["kind"] == "uncovered" && c["text"].as_str().unwrap().contains(&place);
    assert!(plan["controls"].as_array().unwrap().iter().any(|c| of(&c)), "{plan:#}");
    let (_, regulators) = site.json(&["regulator", &path]);
    let said = regulators[0]["uncovered"].to_string();
    assert!(said.contains(&place), "{regulators:#}");
    // Named by the spec, it is none.
    let two = format!(
        "[[device]]\nname = \"a\"\npath = \"{}\"\n[[device]]\nname = \"b\"\npath = \"{}\"\n[[vm]]\nname = \"tenant\"\nqmp = \"{}\"\n\
         [[vm.task]]\nname = \"t\"\ndevice = \"a\"\n{READS}\n[[vm.task]]\nname = \"u\"\ndevice = \"b\"\n{READS}\n",
        host.node(0),
        host.node(1),
        machine.qmp().display()
    );
    let profiles = site.state_dir().join("profiles");
    fs::create_dir_all(&profiles).unwrap();
    for n in [0, 1] {
        fs::copy(PROFILE, profiles.join(format!("{}.json", host.name(n)))).unwrap();
    }
    let said = warned(&site, &["plan", &site.write("two.toml", &two)]);
    assert!(!said.contains(&place), "{said}");
    drop(machine);
}

#[test]
fn limits_on_writes_through_the_page_cache_are_not_taken_for_held() {
    let test = "limits_on_writes_through_the_page_cache_are_not_taken_for_held";
    let site = Site::new();
    let Some(host) = Host::new(test, &site, 1) else { return };
    let machine = host.machine(site.dir.path(), "writeback");
    let limit = "traffic.write = { rate = \"2MB/s\" }";
    let path = site.write("s.toml", &spec(&host, &machine, limit, READS));
    let said = warned(&site, &["apply", &path, "--traffic-only"]);
    assert!(said.contains("goes through the host's page cache"), "{said}");
    let (code, status) = site.json(&["status"]);
    if host.charges_write_back() {
        assert_eq!(code, 0, "{status:#}");
        assert_eq!(uncovered(&status), [("page_cache".to_owned(), host.node(0))], "{status:#}");
        return;
    }
    assert_eq!(code, 3, "{status:#}");
    assert_eq!(uncovered(&status), [("write_back".to_owned(), host.node(0))], "{status:#}");
    assert_eq!(status["uncovered"][0]["void"], json!([format!("limit on writes for {}", host.name(0))]));
    let shown = text(&site.output(&["status"]).stdout);
    assert!(shown.contains("DOES NOT HOLD: limit on writes"), "{shown}");
    site.ok(&["revert"]);

    // A plan sets no limit that does not act, and does not promise what only one would give.
    let writer = "op = \"write\"\nblock = \"64KiB\"\ndepth = 16";
    let reader = |cgroup: &Path| {
        format!(
            "[[vm]]\nname = \"plc\"\ncgroup = '{}'\n[[vm.task]]\nname = \"c\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"100/s\"\n\
             target = {{ percentile = \"p99\", latency = \"8ms\" }}\n",
            cgroup.display()
        )
    };
    let other = host.cgroup.with_extension("plc");
    host.cgroups.create(&Root::default(), &other).unwrap();
    let both = site.write("both.toml", &(spec(&host, &machine, "", writer) + &reader(&other)));
    let (_, plan) = site.json(&["plan", &both, "--profile", PROFILE]);
    drop(machine);
    let knobs = |plan: &Value| plan["devices"][0]["plan"]["settings"].to_string();
    assert!(!knobs(&plan).contains("vm_limit") && !knobs(&plan).contains("vm_weight"), "{plan:#}");
    let machine = host.machine(site.dir.path(), "none");
    let both = site.write("direct.toml", &(spec(&host, &machine, "", writer) + &reader(&other)));
    let (_, plan) = site.json(&["plan", &both, "--profile", PROFILE]);
    assert!(knobs(&plan).contains("vm_limit"), "with cache=none the writer can be limited: {plan:#}");
    let saved = site.path("direct.plan");
    let _ = site.output(&["plan", &both, "--profile", PROFILE, "-o", &saved]);
    drop(machine);
    // A plan that was made before is refused where the VM's next start has the cache again.
    let _machine = host.machine(site.dir.path(), "writeback");
    let why = site.refused(&["apply", &saved, "--compromise", "--dry-run"]);
    assert!(why.contains("goes through the host's page cache"), "{why}");
    let _ = host.cgroups.remove(&Root::default(), &other);
}

/// A file system on a device, mounted.
struct Mount(PathBuf);

impl Mount {
    fn of(device: &LoopDevice, dir: &Path) -> Self {
        let run = |program: &str, args: &[&std::ffi::OsStr]| {
            let out = Command::new(program).args(args).output().unwrap();
            assert!(out.status.success(), "{program}: {}", text(&out.stderr));
        };
        fs::create_dir_all(dir).unwrap();
        run("mkfs.ext4", &["-q".as_ref(), device.0.as_os_str()]);
        run("mount", &[device.0.as_os_str(), dir.as_os_str()]);
        Self(dir.to_owned())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// A hole of an image is answered without the device, as memory of the host is.
#[test]
fn reads_that_never_reached_the_device_prove_nothing() {
    let test = "reads_that_never_reached_the_device_prove_nothing";
    let site = Site::new();
    let Some(host) = Host::new(test, &site, 1) else { return };
    if !has(test, &[Need::Program("fio"), Need::Program("mkfs.ext4")]) {
        return;
    }
    let mount = Mount::of(&host.devices[0], &site.dir.path().join("mnt"));
    let image = mount.0.join("vm.img");
    let file = fs::File::create(&image).unwrap();
    file.set_len(16 << 20).unwrap();
    let spec = format!(
        "[device]\npath = \"{}\"\n[[vm]]\nname = \"plc\"\ncgroup = '{}'\ndisk = \"{}\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\n\
         block = \"4KiB\"\nrate = \"200/s\"\ntarget = {{ percentile = \"p90\", latency = \"60s\" }}\n",
        host.node(0),
        host.cgroup.display(),
        image.display()
    );
    let path = site.write("s.toml", &spec);
    let verify = || {
        let (code, result) = site.json(&["verify", &path, "--for", "3s"]);
        let task = result["runs"][0]["tasks"][0].clone();
        (code, task["verdict"].clone(), task["why"].as_str().unwrap_or_default().to_owned())
    };
    let (code, verdict, why) = verify();
    // A busy machine may not keep the rate, which is a miss.
    assert!(code != 0 && verdict != "met", "{verdict} {why}");
    // Some are of the file system itself.
    let reached: u64 = why.split(' ').next().unwrap().parse().unwrap();
    assert!(reached < 60 && why.contains("reads reached the device"), "{why}");
    // Filled, and nothing of it in the host's memory, which direct reads pass by.
    fs::write(&image, vec![0x5a; 16 << 20]).unwrap();
    fs::File::open(&image).unwrap().sync_all().unwrap();
    let (_, verdict, why) = verify();
    // A busy machine may not keep the rate; that the reads did not reach the device it never says.
    assert!(!why.contains("reached the device"), "{verdict} {why}");
}
