//! Virtual machines among this host's processes: QEMU, Cloud Hypervisor, Firecracker, crosvm.

mod answered;
mod command_line;

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::PathBuf;

use rtvirtio_kernel::process::{self, Descriptor};
use rtvirtio_kernel::{HostError, Root, is_gone, unless_gone};
use serde::Serialize;

pub use command_line::CommandLine;

/// Size in bytes below which a file that a VMM has open is no disk: variables of the firmware, a
/// log, a socket's lock.
const LEAST_DISK: u64 = 1 << 20;
/// Bytes on which QEMU locks the images of its disks (`RAW_LOCK_PERM_BASE` and
/// `RAW_LOCK_SHARED_BASE` of `block/file-posix.c`, each with fewer than 100 permissions): these
/// locks show images that were added after its start, such as overlays and hot-plugged disks.
const IMAGE_LOCKS: std::ops::Range<u64> = 100..300;

/// Program that runs virtual machines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Vmm {
    /// QEMU, also as `kvm` or `qemu-kvm`.
    Qemu,
    /// Cloud Hypervisor, with a program `cloud-hypervisor`.
    CloudHypervisor,
    /// Firecracker, with a program `firecracker`.
    Firecracker,
    /// crosvm, with a program `crosvm`.
    Crosvm,
}

impl Vmm {
    /// VMM by the program's file name, or by its 15 bytes in a truncated one (proc_pid_comm(5)).
    #[must_use]
    pub fn of_program(name: &str) -> Option<Self> {
        match name {
            "qemu-kvm" | "kvm" => Some(Self::Qemu),
            "firecracker" => Some(Self::Firecracker),
            "crosvm" => Some(Self::Crosvm),
            _ if name.starts_with("qemu-system-") => Some(Self::Qemu),
            // Released as `cloud-hypervisor-static` and `firecracker-v1.7.0-x86_64`.
            _ if name.starts_with("cloud-hyperviso") => Some(Self::CloudHypervisor),
            _ if name.starts_with("firecracker-v") => Some(Self::Firecracker),
            _ => None,
        }
    }

    /// VMM of a process by its executable: a process name can be chosen freely, as by QEMU's `-name
    /// process=`. By the name where only the process's owner may read the link. `None` also for a
    /// process that has ended.
    pub fn of_process(root: &Root, pid: u32) -> Result<Option<Self>, HostError> {
        Ok(process::program_or_name(root, pid)?.and_then(|program| Self::of_program(&program)))
    }

    /// Name of the program for users.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Qemu => "QEMU",
            Self::CloudHypervisor => "Cloud Hypervisor",
            Self::Firecracker => "Firecracker",
            Self::Crosvm => "crosvm",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OpenDisk {
    /// Path of the disk, as the VMM sees it.
    pub path: PathBuf,
    /// Number `(major, minor)` of the block device, or of the device with the file.
    pub dev: (u32, u32),
    /// Whether it is a file, not a block device.
    pub is_file: bool,
    /// Whether the VMM may write to it.
    pub writes: bool,
    /// Whether its requests bypass the host's page cache, as with `cache=none`; with several
    /// descriptors, whether all do.
    pub direct: bool,
}

/// Virtual machine that runs on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Process id of its VMM.
    pub pid: u32,
    /// Kind of the VMM.
    pub vmm: Vmm,
    /// Parsed command line; empty for any VMM but QEMU.
    pub line: CommandLine,
    /// Disks that are open, by path.
    pub disks: Vec<OpenDisk>,
}

/// Process that may be a VMM and cannot be inspected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unreadable {
    /// Process id of the process.
    pub pid: u32,
    /// Name of the process.
    pub program: String,
    /// Error of the inspection.
    pub why: String,
}

/// Virtual machines of this host, and processes that could not be inspected. A QEMU without vCPUs,
/// such as one that only answers a question about itself, is included while it runs.
pub fn find(root: &Root) -> Result<(Vec<Machine>, Vec<Unreadable>), HostError> {
    let (mut machines, mut unreadable) = (Vec::new(), Vec::new());
    for pid in process::pids(root)? {
        let Some(vmm) = Vmm::of_process(root, pid)? else { continue };
        let Some(name) = unless_gone(process::name(root, pid))? else { continue };
        match answered::machine(root, pid, vmm) {
            Ok(machine) => machines.extend(machine),
            Err(e) => unreadable.push(Unreadable { pid, program: name, why: e.to_string() }),
        }
    }
    Ok((machines, unreadable))
}

/// Virtual machine that a process runs, with its current disks; `None` where it runs none, or has
/// ended.
pub fn of_process(root: &Root, pid: u32) -> Result<Option<Machine>, HostError> {
    Vmm::of_process(root, pid)?.map_or(Ok(None), |vmm| answered::machine(root, pid, vmm))
}

/// Machine of a VMM's process; `None` when it has ended.
fn machine(root: &Root, pid: u32, vmm: Vmm) -> Result<Option<Machine>, HostError> {
    let Some(arguments) = unless_gone(process::command_line(root, pid))? else { return Ok(None) };
    let line = match vmm {
        Vmm::Qemu => CommandLine::parse(arguments.get(1..).unwrap_or_default()),
        _ => CommandLine::default(),
    };
    let mut disks: Vec<OpenDisk> = Vec::new();
    let Some(descriptors) = unless_gone(process::descriptors(root, pid))? else { return Ok(None) };
    for descriptor in descriptors {
        match disk(root, descriptor, vmm, &line) {
            Ok(Some(found)) => match disks.iter_mut().find(|d| d.path == found.path) {
                Some(known) => {
                    known.writes |= found.writes;
                    known.direct &= found.direct;
                }
                None => disks.push(found),
            },
            Ok(None) => {}
            Err(e) if is_gone(&e) => {}
            Err(source) => return Err(HostError::Read { path: descriptor.link(), source }),
        }
    }
    disks.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(Some(Machine { pid, vmm, line, disks }))
}

/// Disk behind a descriptor; `None` for any other file that a VMM has open.
fn disk(root: &Root, of: Descriptor, vmm: Vmm, line: &CommandLine) -> io::Result<Option<OpenDisk>> {
    let path = of.target(root)?;
    if !path.is_absolute() || path.starts_with("/proc") || path.starts_with("/sys") {
        return Ok(None);
    }
    let meta = fs::metadata(root.at(of.link()))?;
    let kind = meta.file_type();
    if !kind.is_block_device() && !kind.is_file() {
        return Ok(None);
    }
    let process::OpenMode { writes, direct } = of.mode(root)?;
    let number = |dev: u64| (rustix::fs::major(dev), rustix::fs::minor(dev));
    if kind.is_block_device() {
        return Ok(Some(OpenDisk { path, dev: number(meta.rdev()), is_file: false, writes, direct }));
    }
    let named = line.disks.contains(&path);
    let is_image = |(first, _): &(u64, u64)| IMAGE_LOCKS.contains(first);
    // Files not on the command line: an image that QEMU locks, or a large file that another VMM
    // writes to. Guest memory is in files below /dev.
    let guessed = match vmm {
        Vmm::Qemu => {
            // The command line may have a path relative to a directory of QEMU's.
            let is_firmware = line.firmware.iter().any(|file| path.ends_with(file));
            !is_firmware && of.file_locks(root)?.iter().any(is_image)
        }
        _ => writes && meta.len() >= LEAST_DISK && !path.starts_with("/dev"),
    };
    Ok((named || guessed).then(|| OpenDisk { path, dev: number(meta.dev()), is_file: true, writes, direct }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_known_by_name() {
        for (name, vmm) in [
            ("qemu-system-x86_64", Some(Vmm::Qemu)),
            ("qemu-system-x86", Some(Vmm::Qemu)),
            ("kvm", Some(Vmm::Qemu)),
            ("cloud-hyperviso", Some(Vmm::CloudHypervisor)),
            ("cloud-hypervisor-static", Some(Vmm::CloudHypervisor)),
            ("firecracker", Some(Vmm::Firecracker)),
            ("firecracker-v1.7.0-x86_64", Some(Vmm::Firecracker)),
            ("firecracker-containerd", None),
            ("qemu-img", None),
            ("kvm-nx-lpage-re", None),
        ] {
            assert_eq!(Vmm::of_program(name), vmm, "{name}");
        }
    }

    #[test]
    fn a_vmm_is_known_by_its_executable_also_after_an_update() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        let proc = dir.path().join("proc/7");
        fs::create_dir_all(proc.join("fd")).unwrap();
        fs::write(proc.join("cmdline"), "q\0").unwrap();
        let of = |program: &str, name: &str| {
            let _ = fs::remove_file(proc.join("exe"));
            std::os::unix::fs::symlink(program, proc.join("exe")).unwrap();
            fs::write(proc.join("comm"), format!("{name}\n")).unwrap();
            // Seen by all that look for machines in the same way.
            let vmm = Vmm::of_process(&root, 7).unwrap();
            assert_eq!(of_process(&root, 7).unwrap().map(|machine| machine.vmm), vmm);
            let (machines, unreadable) = find(&root).unwrap();
            assert_eq!((machines.first().map(|machine| machine.vmm), unreadable.len()), (vmm, 0));
            vmm
        };
        for (program, vmm) in [
            ("/usr/bin/qemu-system-x86_64", Vmm::Qemu),
            ("/usr/bin/qemu-system-x86_64 (deleted)", Vmm::Qemu),
            ("/nix/store/q/bin/.qemu-system-x86_64-wrapped", Vmm::Qemu),
            ("/usr/bin/kvm (deleted)", Vmm::Qemu),
            ("/firecracker (deleted)", Vmm::Firecracker),
            ("/usr/bin/crosvm (deleted)", Vmm::Crosvm),
            ("/opt/cloud-hypervisor (deleted)", Vmm::CloudHypervisor),
        ] {
            assert_eq!(of(program, "plc"), Some(vmm), "{program}, with `-name process=plc`");
        }
        assert_eq!(of("/usr/bin/sleep", "qemu-system-x86"), None, "a name that any user can choose");
        fs::remove_file(proc.join("exe")).unwrap();
        assert_eq!(Vmm::of_process(&root, 7).unwrap(), None, "a thread of the kernel");
    }
}
