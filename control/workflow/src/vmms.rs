//! Virtual machine monitors that have a disk in use, by device or by an image on it.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rtvirtio_kernel::{Root, Stack, process, unless_gone};
use rtvirtio_vmm::machines::CommandLine;

use crate::error::Result;

/// Starts of the names of programs that run VMs or serve their disks, also as in `/proc/PID/comm`.
const PROGRAMS: [&str; 8] =
    ["qemu", "kvm", "CPU ", "cloud-hypervis", "firecracker", "crosvm", "rtvirtio-iod", "qemu-storage-da"];
/// Largest depth of stacked devices that is followed.
pub(crate) const DEEPEST: usize = 8;

/// A process that has a disk in use for a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vmm {
    /// Id of the process.
    pub pid: u32,
    /// Name of its program, as in `/proc/PID/comm`.
    pub program: String,
    /// The VM's name, where the command line has it (QEMU's `-name`).
    pub vm: Option<String>,
    /// Whether it is unknown if it has the disk, as its open files cannot be read.
    pub is_unseen: bool,
}

impl fmt::Display for Vmm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unseen = if self.is_unseen { ", whose open files cannot be read" } else { "" };
        match &self.vm {
            Some(vm) => write!(f, "{vm} (process {}, {}{unseen})", self.pid, self.program),
            None => write!(f, "process {} ({}{unseen})", self.pid, self.program),
        }
    }
}

/// The VMMs that have a device, a disk below it, a part of these, a device on top of them or a file
/// on any of these open, or may have it, as they cannot be inspected.
///
/// # Errors
/// When `/proc` cannot be read. Processes that end meanwhile are none.
pub fn using(stack: &Stack) -> Result<Vec<Vmm>> {
    // What lies on a disk below the device is disturbed as well.
    let disks: Vec<&str> =
        stack.disks.iter().chain([&stack.device]).map(|device| device.name.as_str()).collect();
    let mut found = Vec::new();
    let root = Root::default();
    for pid in process::pids(&root)? {
        let Some(program) = serving(&root, pid)? else { continue };
        let is_on = |n| disks.iter().any(|disk| lies_on(n, disk, DEEPEST));
        let has = has_open(pid, &|file| number(file).is_some_and(is_on));
        if has.as_ref().is_ok_and(|has| !has) {
            continue;
        }
        let words = process::command_line(&root, pid).unwrap_or_default();
        found.push(Vmm { pid, program, vm: name_of(&words), is_unseen: has.is_err() });
    }
    found.sort_by_key(|vmm| vmm.pid);
    Ok(found)
}

/// Name of a process that may run a VM or serve its disks, by its program or by its name: with
/// `-name process=` QEMU has one of the user's choice, and its threads have names too.
fn serving(root: &Root, pid: u32) -> Result<Option<String>> {
    let Some(name) = unless_gone(process::name(root, pid))? else { return Ok(None) };
    let program = process::program_or_name(root, pid)?;
    let is_one = |name: &str| PROGRAMS.iter().any(|start| name.starts_with(start));
    Ok((is_one(&name) || program.is_some_and(|program| is_one(&program))).then_some(name))
}

/// Whether a process has such a file open: the link's target, whatever its name is in another mount
/// namespace.
fn has_open(pid: u32, is_one: &dyn Fn(&Metadata) -> bool) -> io::Result<bool> {
    let Some(files) = unless_gone(fs::read_dir(format!("/proc/{pid}/fd")))? else { return Ok(false) };
    for file in files {
        let Some(file) = unless_gone(file)? else { continue };
        if unless_gone(fs::metadata(file.path()))?.is_some_and(|file| is_one(&file)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Number of the block device that a file is, or lies on.
fn number(file: &Metadata) -> Option<u64> {
    if file.file_type().is_block_device() { Some(file.rdev()) } else { file.is_file().then(|| file.dev()) }
}

/// Whether a block device is the disk, a partition of it, or built on it.
pub(crate) fn lies_on(number: u64, disk: &str, depth: usize) -> bool {
    let link = format!("/sys/dev/block/{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
    // No block device, as tmpfs, overlayfs and the network have it.
    let Ok(dir) = fs::canonicalize(link) else { return false };
    let whole = if dir.join("partition").exists() { dir.parent() } else { Some(dir.as_path()) };
    let Some(whole) = whole else { return false };
    if whole.file_name().is_some_and(|name| name == disk) {
        return true;
    }
    depth > 0 && below(&dir, whole).into_iter().any(|number| lies_on(number, disk, depth - 1))
}

/// Numbers of the devices below a device: those it is built on, and that of a loop device's file.
fn below(dir: &Path, whole: &Path) -> BTreeSet<u64> {
    let slaves = fs::read_dir(dir.join("slaves")).into_iter().flatten().flatten();
    let of_slave = |path: PathBuf| {
        // kernel file
        let text = fs::read_to_string(path.join("dev")).ok()?;
        let (major, minor) = text.trim().split_once(':')?;
        Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
    };
    // kernel file
    let file = fs::read_to_string(whole.join("loop/backing_file")).ok();
    let of_file = file.and_then(|file| number(&fs::metadata(file.trim_end()).ok()?));
    slaves.filter_map(|slave| of_slave(slave.path())).chain(of_file).collect()
}

/// The VM's name in the words that QEMU was started with.
fn name_of(words: &[String]) -> Option<String> {
    let line = CommandLine::parse(words.get(1..).unwrap_or_default());
    // Untrusted text: what reaches a terminal is cleaned there.
    line.name.filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_named_as_its_command_line_names_it() {
        let name = |line: &str| name_of(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert_eq!(name("qemu -name plc -m 64").as_deref(), Some("plc"));
        assert_eq!(name("qemu -name guest=plc,debug-threads=on").as_deref(), Some("plc"));
        assert_eq!(name("qemu -name plc,debug-threads=on").as_deref(), Some("plc"));
        assert_eq!(name("qemu -name debug-threads=on"), None);
        assert_eq!(name("qemu -m 64"), None);
        assert_eq!(name("qemu -name"), None);
    }

    #[test]
    fn a_vm_whose_process_has_another_name_is_seen() {
        let (dir, root) = crate::fixtures::root();
        let proc = dir.path().join("proc/7");
        fs::create_dir_all(&proc).unwrap();
        assert_eq!(serving(&root, 7).unwrap(), None, "one that has ended");
        fs::write(proc.join("comm"), "plc\n").unwrap();
        std::os::unix::fs::symlink("/usr/bin/qemu-system-x86_64 (deleted)", proc.join("exe")).unwrap();
        assert_eq!(serving(&root, 7).unwrap().as_deref(), Some("plc"));
        fs::remove_file(proc.join("exe")).unwrap();
        assert_eq!(serving(&root, 7).unwrap(), None);
        fs::write(proc.join("comm"), "CPU 0/KVM\n").unwrap();
        assert_eq!(serving(&root, 7).unwrap().as_deref(), Some("CPU 0/KVM"));
    }

    #[test]
    fn one_that_cannot_be_looked_into_is_named_as_such() {
        let vmm = |is_unseen| Vmm { pid: 7, program: "kvm".into(), vm: Some("plc".into()), is_unseen };
        assert_eq!(vmm(false).to_string(), "plc (process 7, kvm)");
        assert!(vmm(true).to_string().contains("cannot be read"));
        let own = fs::metadata("/proc/self/exe").unwrap();
        let own = |file: &Metadata| (file.dev(), file.ino()) == (own.dev(), own.ino());
        assert!(!has_open(std::process::id(), &own).unwrap());
        let _open = fs::File::open("/proc/self/exe").unwrap();
        assert!(has_open(std::process::id(), &own).unwrap());
        assert!(!has_open(u32::MAX, &own).unwrap(), "one that has ended has none");
    }

    #[test]
    fn a_file_lies_on_the_disk_of_its_file_system() {
        let file = fs::metadata("/proc/self/exe").unwrap();
        let number = number(&file).unwrap();
        let link = format!("/sys/dev/block/{}:{}", rustix::fs::major(number), rustix::fs::minor(number));
        let Ok(dir) = fs::canonicalize(link) else {
            // On tmpfs or overlayfs there is no disk, and none is found.
            assert!(!lies_on(number, "vda", DEEPEST));
            return;
        };
        let whole = if dir.join("partition").exists() { dir.parent().unwrap() } else { dir.as_path() };
        let disk = whole.file_name().unwrap().to_str().unwrap();
        assert!(lies_on(number, disk, DEEPEST));
        assert!(!lies_on(number, "no-such-disk", DEEPEST));
    }
}
