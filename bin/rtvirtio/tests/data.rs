//! No data of the user is overwritten while anything uses it, and the refusal names what does.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rtvirtio_testkit::site::{Site, can_run, signal, text};
use rtvirtio_testkit::{ChildGuard, LoopDevice, Need, has};

const SIZE: usize = 64 << 20;

/// A loop device over a file full of data; detached when dropped.
struct Disk {
    file: PathBuf,
    device: String,
    _attached: LoopDevice,
    _dir: tempfile::TempDir,
}

impl Disk {
    fn new() -> Self {
        let dir = rtvirtio_testkit::disk_dir().unwrap();
        let file = dir.path().join("disk");
        let mut bytes = vec![0; SIZE];
        for (word, i) in bytes.chunks_exact_mut(8).zip(0_u64..) {
            word.copy_from_slice(&(i ^ 0x5555).to_le_bytes());
        }
        std::fs::write(&file, bytes).unwrap();
        let attached = LoopDevice::attach(&file).expect("losetup");
        Self { file, device: attached.0.display().to_string(), _attached: attached, _dir: dir }
    }

    /// FNV-1a of all that is on it, eight bytes at a time.
    fn checksum(&self) -> u64 {
        run("blockdev", &["--flushbufs", &self.device]);
        let mut bytes = Vec::new();
        File::open(&self.device).unwrap().read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes.len(), SIZE);
        let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        words.fold(0xcbf2_9ce4_8422_2325, |h, word| (h ^ word).wrapping_mul(0x0100_0000_01b3))
    }
}

fn run(program: &str, args: &[&str]) {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let out = Command::new(program).args(args).env("PATH", path).output().unwrap();
    assert!(out.status.success(), "{program} {args:?}: {}", text(&out.stderr));
}

/// A stock QEMU, paused, with its default locking.
fn qemu(disk: &str) -> ChildGuard {
    let mut child = Command::new("qemu-system-x86_64")
        .args(["-machine", "q35,accel=tcg", "-nodefaults", "-display", "none", "-S", "-m", "16"])
        .args(["-drive", &format!("file={disk},format=raw,if=none,id=d")])
        .args(["-device", "virtio-blk-pci,drive=d", "-qmp", "stdio"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // An answer comes from its main loop: the devices are made by then.
    child.stdin.as_mut().unwrap().write_all(b"{\"execute\": \"qmp_capabilities\"}\n").unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut said = String::new();
    while !said.contains("return") {
        assert!(out.read_line(&mut said).unwrap() > 0, "{said}");
    }
    child.stdout = Some(out.into_inner());
    ChildGuard(child)
}

fn sleeper(file: File) -> ChildGuard {
    ChildGuard(Command::new("sleep").arg("1000").stdin(file).spawn().unwrap())
}

/// Every way of the program to overwrite a device says `names`, and changes nothing.
fn refused(site: &Site, disk: &Disk, names: &[&str]) {
    let before = disk.checksum();
    let spec = |name: &str, vm: &str| {
        let text = format!(
            "[device]\npath = \"{}\"\n[[vm]]\nname = \"a\"\n{vm}\n[[vm.task]]\nname = \"t\"\nop = \"write\"\n\
             block = \"4KiB\"\nrate = \"100/s\"\n",
            disk.device
        );
        site.write(name, &text)
    };
    let lab = spec("lab.toml", "lab = \"process\"");
    let existing =
        spec("existing.toml", &format!("pid = {}\ndisk = \"{}\"", std::process::id(), disk.device));
    let ways: [&[&str]; 3] = [
        &["profile", &disk.device, "--destroy-data"],
        &["lab", "up", &lab],
        &["verify", &existing, "--destroy-data", "--for", "3s"],
    ];
    for way in ways {
        let said = site.refused(way);
        for name in names {
            assert!(said.contains(name), "{way:?} does not name {name}: {said}");
        }
    }
    assert_eq!(disk.checksum(), before, "the data was changed");
    assert!(!site.run_dir().join("lab.json").exists(), "a lab was left");
}

#[test]
fn a_disk_that_is_in_use_is_never_overwritten() {
    let test = "a_disk_that_is_in_use_is_never_overwritten";
    if !can_run(test) || !has(test, &[Need::QEMU]) {
        return;
    }
    let (site, disk) = (Site::new(), Disk::new());
    {
        let qemu = qemu(&disk.device);
        let pid = format!("process {} (qemu-system-x86) has {} open for writing", qemu.id(), disk.device);
        refused(&site, &disk, &[&pid]);
    }
    {
        let qemu = qemu(disk.file.to_str().unwrap());
        let pid = format!("process {} (qemu-system-x86) has {}", qemu.id(), disk.file.display());
        refused(&site, &disk, &[&pid]);
    }
    {
        let reader = sleeper(File::open(&disk.device).unwrap());
        refused(&site, &disk, &[&format!("process {} (sleep)", reader.id()), "open for reading"]);
    }
    {
        let other = LoopDevice::attach(&disk.file).expect("losetup");
        refused(&site, &disk, &[&format!("is the backing file of {}", other.0.display())]);
    }
    {
        let point = site.dir.path().join("mnt");
        std::fs::create_dir(&point).unwrap();
        run("mkfs.ext4", &["-q", "-F", &disk.device]);
        // Read-only, so that the mount itself changes nothing.
        run("mount", &["-o", "ro,noload", &disk.device, point.to_str().unwrap()]);
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            refused(&site, &disk, &[&format!("{} is mounted on {}", disk.device, point.display())]);
        }));
        run("umount", &[point.to_str().unwrap()]);
        done.unwrap();
    }
    site.assert_clean();
}

/// A disk under VMs is flooded only when the user says that it may be; a gentle measurement leaves
/// the elevator alone and says what it does not know.
#[test]
fn a_disk_under_vms_is_measured_gently_or_with_consent() {
    let test = "a_disk_under_vms_is_measured_gently_or_with_consent";
    if !can_run(test) || !has(test, &[Need::QEMU]) {
        return;
    }
    let (site, disk) = (Site::new(), Disk::new());
    let name = disk.device.trim_start_matches("/dev/");
    let elevator = || std::fs::read_to_string(format!("/sys/block/{name}/queue/scheduler")).unwrap();
    let (before, checksum) = (elevator(), disk.checksum());
    let out = &site.path("out.json");
    let qemu = qemu(&disk.device);
    for (way, sweeps) in
        [(vec!["profile", &disk.device], false), (vec!["profile", &disk.device, "--sweep", "30min"], true)]
    {
        let said = site.refused(&[way, vec!["-o", out]].concat());
        for part in [&format!("process {} (qemu-system-x86)", qemu.id()), &disk.device] {
            assert!(said.contains(part), "{part}: {said}");
        }
        // A sweep needs a device of its own.
        let ways = said.contains("--gentle") && said.contains("--yes");
        assert!(ways || sweeps && said.contains("Stop what uses it first"), "{said}");
    }
    let short = site.output(&["profile", &disk.device, "--gentle", "--for", "1s"]);
    assert!(text(&short.stderr).contains("give at least"), "{}", text(&short.stderr));
    site.ok(&["profile", &disk.device, "--gentle", "--for", "5s", "-o", out]);
    let profile: serde_json::Value = serde_json::from_slice(&std::fs::read(out).unwrap()).unwrap();
    let depths: Vec<u64> =
        profile["read"].as_array().unwrap().iter().map(|p| p["depth"].as_u64().unwrap()).collect();
    assert_eq!(depths, [1, 2, 4]);
    let doubt = profile["doubts"][0].as_str().unwrap();
    assert!(doubt.contains("measured gently") && doubt.contains("not known"), "{doubt}");
    assert_eq!(elevator(), before);
    // With consent it is what it is without VMs; the default settings are measured, and put back.
    site.ok(&["profile", &disk.device, "--yes", "--for", "12s", "-o", out]);
    let profile: serde_json::Value = serde_json::from_slice(&std::fs::read(out).unwrap()).unwrap();
    assert_eq!(profile["read"].as_array().unwrap().len(), 6);
    assert_eq!(elevator(), before);
    drop(qemu);
    assert_eq!(disk.checksum(), checksum);
    site.assert_clean();
}

/// A measurement is for every user to read; a directory that cannot be read is not an absent one.
#[test]
fn a_profile_is_read_without_being_root() {
    let test = "a_profile_is_read_without_being_root";
    if !can_run(test) {
        return;
    }
    let (site, disk) = (Site::new(), Disk::new());
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
    };
    mode(site.dir.path(), 0o755);
    let program = site.dir.path().join("program");
    std::fs::copy(env!("CARGO_BIN_EXE_rtvirtio"), &program).unwrap();
    mode(&program, 0o755);
    site.ok(&["profile", &disk.device, "--gentle", "--for", "4s"]);
    let text_of = format!(
        "[device]\npath = \"{}\"\n[[vm]]\nname = \"a\"\npid = {}\n[[vm.task]]\nname = \"t\"\n\
         op = \"read\"\nblock = \"4KiB\"\nrate = \"100/s\"\n",
        disk.device,
        std::process::id()
    );
    let spec = site.write("spec.toml", &text_of);
    let nobody = || {
        let mut command = Command::new(&program);
        command.env("RTVIRTIO_STATE_DIR", site.state_dir()).env("RTVIRTIO_RUN_DIR", site.run_dir());
        command.uid(65_534).gid(65_534).current_dir("/").arg("predict").arg(&spec).output().unwrap()
    };
    let out = nobody();
    assert!(out.status.success() && text(&out.stdout).contains("a/t"), "{}", text(&out.stderr));
    mode(&site.state_dir(), 0o700);
    let out = nobody();
    let said = text(&out.stderr);
    assert!(!out.status.success() && said.contains("sudo") && !said.contains("not been measured"), "{said}");
    site.assert_clean();
}

#[test]
fn a_disk_that_the_io_domain_serves_is_never_overwritten() {
    let test = "a_disk_that_the_io_domain_serves_is_never_overwritten";
    if !can_run(test) {
        return;
    }
    let program = rtvirtio_testkit::site::program("rtvirtio-iod");
    let (site, disk) = (Site::new(), Disk::new());
    let d = site.dir.path().display().to_string();
    let text = format!(
        "control = \"{d}/ctl\"\n[[device]]\nname = \"d\"\n[[device.disk]]\nname = \"a\"\nsocket = \"{d}/a\"\npath = \"{}\"\n",
        disk.device
    );
    let config = site.write("iod.toml", &text);
    let mut child =
        Command::new(program).arg("--config").arg(&config).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    let domain = ChildGuard(child);
    refused(&site, &disk, &[&format!("process {} (rtvirtio-iod) has {}", domain.id(), disk.device)]);
}

/// A device that nothing uses goes through, and is written; while it is, nothing else gets it.
/// Reads alone warn.
#[test]
fn a_free_device_is_measured_and_one_in_use_with_a_warning() {
    let test = "a_free_device_is_measured_and_one_in_use_with_a_warning";
    if !can_run(test) {
        return;
    }
    let (site, disk) = (Site::new(), Disk::new());
    let before = disk.checksum();
    let (device, out) = (disk.device.as_str(), &site.path("out.json"));
    site.ok(&["profile", device, "--destroy-data", "--for", "22s", "-o", out]);
    let profile: serde_json::Value = serde_json::from_slice(&std::fs::read(out).unwrap()).unwrap();
    assert!(!profile["write"].as_array().unwrap().is_empty(), "writes were measured");
    assert_ne!(disk.checksum(), before, "writes were measured");
    // Reads: what uses it is named, and nothing is changed.
    let reader = sleeper(File::open(device).unwrap());
    let before = disk.checksum();
    let (mut child, wanted) = (site.spawn(&["profile", device]), format!("process {} (sleep)", reader.id()));
    let mut said = String::new();
    let mut err = BufReader::new(child.stderr.take().unwrap());
    while !said.contains(&wanted) && err.read_line(&mut said).unwrap() > 0 {}
    signal(&child, rustix::process::Signal::INT);
    err.read_to_string(&mut String::new()).unwrap();
    child.wait().unwrap();
    assert!(said.contains(&wanted) && said.contains("is slowed meanwhile"), "{said}");
    assert_eq!(disk.checksum(), before);
    drop(reader);
    // A file that a task may overwrite is looked at as a device is.
    let file = site.dir.path().join("scratch");
    std::fs::write(&file, vec![7; 1 << 20]).unwrap();
    let holder = sleeper(OpenOptions::new().read(true).write(true).open(&file).unwrap());
    let text_of = format!(
        "[device]\npath = \"{device}\"\n[[vm]]\nname = \"a\"\npid = {}\ndisk = \"{}\"\n[[vm.task]]\nname = \"t\"\n\
         op = \"write\"\nblock = \"4KiB\"\nrate = \"100/s\"\n",
        std::process::id(),
        file.display()
    );
    let spec = site.write("file.toml", &text_of);
    let said = site.refused(&["verify", &spec, "--destroy-data", "--for", "3s"]);
    assert!(said.contains(&format!("process {} (sleep)", holder.id())), "{said}");
    let mut byte = [0];
    File::open(&file).unwrap().read_exact_at(&mut byte, 4_096).unwrap();
    assert_eq!(byte, [7]);
    site.assert_clean();
}
