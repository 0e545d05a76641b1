//! Opens files of another process from its own mappings, not from a path that it reports.
//!
//! A process that names a file may name one that it cannot open itself. A file that it has mapped
//! shared and writable it can write to anyway, so opening that one gives it no further access.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, MemfdFlags, Mode, OFlags, fcntl_getfl, fstat, memfd_create};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::Refusal;
use crate::process::descriptors;
use crate::{HostError, Root};

#[cfg(test)]
mod tests;

/// Bytes of `/proc/PID/maps` that are read at most.
const MOST_OF_MAPS: u64 = 16 << 20;
/// File systems of this kernel alone. A FUSE or NFS server, another process or host, could make a
/// reader wait forever.
const LOCAL: [&str; 13] = [
    "tmpfs",
    "ramfs",
    "devtmpfs",
    "hugetlbfs",
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "f2fs",
    "bcachefs",
    "zfs",
    "overlay",
];

/// File that a process has mapped shared and writable (proc_pid_maps(5)).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedMapping {
    /// Path as the kernel prints it, without ` (deleted)`.
    pub name: PathBuf,
    /// Length of one mapping of it, in bytes.
    pub length: u64,
    pid: u32,
    /// Start and end address of the mapping.
    range: (u64, u64),
    /// Major and minor number of its file system, and its inode.
    id: (u32, u32, u64),
}

impl SharedMapping {
    /// Whether both map the same file.
    #[must_use]
    pub fn is_same_file(&self, other: &Self) -> bool {
        self.id == other.id
    }

    /// Opens the file to read and write, without using its path.
    ///
    /// # Errors
    /// When it is no regular file of a local file system, or cannot be reached: it is unmapped, or
    /// `map_files` is refused, and the process has no descriptor of it that can be taken.
    pub fn open(&self) -> io::Result<File> {
        let by_mapping = self.by_mapping();
        match by_mapping {
            Ok(file) => Ok(file),
            // map_files requires CAP_CHECKPOINT_RESTORE; some inodes have two device numbers.
            Err(e) => self.by_descriptor()?.ok_or(e),
        }
    }

    /// Opens the file by `/proc/PID/map_files`, only if its device and inode are those that the
    /// kernel has listed together with the right to write.
    fn by_mapping(&self) -> io::Result<File> {
        let path = format!("/proc/{}/map_files/{:x}-{:x}", self.pid, self.range.0, self.range.1);
        let found = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        self.check(&found)?;
        let stat = fstat(&found)?;
        let device = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
        if (device.0, device.1, stat.st_ino) != self.id {
            return Err(io::Error::other(
                "its file system gives it other numbers: put it on a tmpfs, as /dev/shm",
            ));
        }
        reopen(&found)
    }

    /// Opens the file by a descriptor with the right to write anywhere in it; `None` without one.
    fn by_descriptor(&self) -> io::Result<Option<File>> {
        let root = Root::default();
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
        let process = pidfd_open(pid, PidfdFlags::empty())?;
        for descriptor in descriptors(&root, self.pid).map_err(HostError::into_io)? {
            // A descriptor that was closed meanwhile is skipped.
            let Ok(target) = descriptor.target(&root) else { continue };
            if without_deleted(target.as_os_str().as_bytes()) != self.name.as_os_str().as_bytes() {
                continue;
            }
            let number = i32::try_from(descriptor.number()).unwrap_or(-1);
            let Ok(taken) = pidfd_getfd(&process, number, PidfdGetfdFlags::empty()) else { continue };
            // Flags of the descriptor taken: the number may be another file's by now.
            let flags = fcntl_getfl(&taken)?;
            let writes = flags & OFlags::RWMODE == OFlags::RDWR && !flags.contains(OFlags::APPEND);
            if writes && self.check(&taken).is_ok() && fstat(&taken)?.st_ino == self.id.2 {
                return reopen(&taken).map(Some);
            }
        }
        Ok(None)
    }

    /// Checks the file system first: any other question may wait for it.
    fn check(&self, file: &OwnedFd) -> io::Result<()> {
        let kind = file_system(self.pid, file)?;
        if !kind.as_deref().is_some_and(|kind| LOCAL.contains(&kind)) {
            let kind = kind.unwrap_or_else(|| "one that is not seen from here".to_owned());
            return Err(io::Error::other(format!(
                "its file system is {kind}: put it on a tmpfs, as /dev/shm"
            )));
        }
        match FileType::from_raw_mode(fstat(file)?.st_mode) {
            FileType::RegularFile => Ok(()),
            _ => Err(Refusal::NotRegular { kind: "device" }.into()),
        }
    }
}

/// Opens the inode anew: a lock of this open file is not shared with the process.
fn reopen(file: &OwnedFd) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Files that a process has mapped shared and writable.
///
/// # Errors
/// When the process is gone, may not be inspected, or its list of mappings is too long.
pub fn shared_mappings(pid: u32) -> io::Result<Vec<SharedMapping>> {
    let mut maps = BufReader::new(File::open(format!("/proc/{pid}/maps"))?.take(MOST_OF_MAPS));
    let (mut found, mut line) = (Vec::new(), Vec::new());
    while maps.read_until(b'\n', &mut line)? > 0 {
        found.extend(mapping(pid, line.strip_suffix(b"\n").unwrap_or(&line)));
        line.clear();
    }
    if maps.into_inner().limit() == 0 {
        return Err(io::Error::other(format!("the list of what it has mapped exceeds {MOST_OF_MAPS} bytes")));
    }
    Ok(found)
}

/// Parses `7f00-7f01 rw-s 00000000 00:19 12 /dev/shm/x`; `None` for another kind of mapping.
fn mapping(pid: u32, line: &[u8]) -> Option<SharedMapping> {
    let mut words = line.splitn(6, |b| *b == b' ');
    let mut word = || std::str::from_utf8(words.next()?).ok();
    let (range, rights, _offset, device, inode) = (word()?, word()?, word()?, word()?, word()?);
    if !(rights.starts_with("rw") && rights.ends_with('s')) {
        return None;
    }
    // Rings of io_uring (`anon_inode:[io_uring]`), which QEMU 11.1 has always, are no files.
    let name = words.next()?.trim_ascii_start();
    if !name.starts_with(b"/") {
        return None;
    }
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (from, to) = range.split_once('-')?;
    let (major, minor) = device.split_once(':')?;
    let number = |text: &str| u32::from_str_radix(text, 16).ok();
    Some(SharedMapping {
        name: PathBuf::from(OsStr::from_bytes(without_deleted(name))),
        length: hex(to)?.checked_sub(hex(from)?)?,
        pid,
        range: (hex(from)?, hex(to)?),
        id: (number(major)?, number(minor)?, inode.parse().ok()?),
    })
}

fn without_deleted(name: &[u8]) -> &[u8] {
    name.strip_suffix(b" (deleted)").unwrap_or(name)
}

/// Type of the file system of an open file, by its mount: the file system itself is not asked.
/// `None` where the mount is visible neither to this process nor to that one.
fn file_system(pid: u32, file: &OwnedFd) -> io::Result<Option<String>> {
    let mount = mount_id(file)?;
    for list in ["/proc/self/mountinfo".to_owned(), format!("/proc/{pid}/mountinfo")] {
        // A list that cannot be read counts as empty.
        let text = fs::read(list).unwrap_or_default();
        if let Some(kind) = String::from_utf8_lossy(&text).lines().find_map(|line| kind_of(line, &mount)) {
            return Ok(Some(kind));
        }
    }
    // A memfd is on a tmpfs that is mounted nowhere.
    let unnamed = memfd_create("rtvirtio-kind", MemfdFlags::CLOEXEC)?;
    Ok((mount_id(&unnamed)? == mount).then(|| "tmpfs".to_owned()))
}

fn kind_of(line: &str, mount: &str) -> Option<String> {
    let (left, right) = line.split_once(" - ")?;
    (left.split(' ').next() == Some(mount)).then(|| right.split(' ').next().unwrap_or_default().to_owned())
}

fn mount_id(file: &OwnedFd) -> io::Result<String> {
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let id = text.lines().find_map(|line| line.strip_prefix("mnt_id:"));
    id.map(|id| id.trim().to_owned()).ok_or_else(|| io::ErrorKind::Unsupported.into())
}

/// Picks the file that a process names among its mappings: by the whole path, else by the file's
/// name, else by its size. `None` without a match, or where the first criterion matches several.
#[must_use]
pub fn pick<'a>(
    all: &'a [SharedMapping],
    path: Option<&Path>,
    size: Option<u64>,
) -> Option<&'a SharedMapping> {
    let whole = |m: &SharedMapping| path.is_some_and(|path| m.name == path);
    let last = |m: &SharedMapping| path.is_some_and(|path| m.name.file_name() == path.file_name());
    // QEMU maps memory in whole pages.
    let large =
        |m: &SharedMapping| size.and_then(|size| size.checked_next_multiple_of(4096)) == Some(m.length);
    let steps: [&dyn Fn(&SharedMapping) -> bool; 3] = [&whole, &last, &large];
    let fits = steps.iter().map(|step| all.iter().filter(|m| step(m)).collect::<Vec<_>>());
    let fits = fits.into_iter().find(|fits| !fits.is_empty())?;
    let first = *fits.first()?;
    fits.iter().all(|m| m.is_same_file(first)).then_some(first)
}
