//! Takes memory from a VM's processes again and again: it is swapped to a file on a disk, and has
//! to be read back.
//!
//! The limit is that of a cgroup in which QEMU begins: memory stays with the group in which it was
//! first used, so that one which a running QEMU is moved into would hold nothing of it. While the
//! limit is in force QEMU has less than it uses all the time; it is taken back after a while, so
//! that the guest goes on.

use std::fs::{self, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use rtvirtio_kernel::leftovers::mark;
use rtvirtio_kernel::{Cgroups, Hierarchy, HostError, Root, faults};
use rustix::fs::{FallocateFlags, fallocate, statfs};

/// Name of the file that is swapped to.
pub const SWAP_FILE: &str = "blame.swap";
/// Size of it: more than a guest of the lab has, with its QEMU.
const SIZE: u64 = 1 << 30;
/// Size of one that is made to see whether the host swaps to files.
const SMALL: u64 = 1 << 20;
/// Priority of the file, the highest: nothing is swapped elsewhere (swapon(8)).
const PRIORITY: &str = "32767";
/// Interval at which a pause notices its end.
const TICK: Duration = Duration::from_millis(10);
/// Active areas of swap (proc_swaps(5)).
const SWAPS: &str = "/proc/swaps";
/// File systems that are no disk, or show another file than they write (`linux/magic.h`).
const NO_DISK: [(u64, &str); 3] =
    [(0x0102_1994, "tmpfs"), (0x8584_58f6, "ramfs"), (0x794c_7630, "overlayfs")];

/// Limit of memory that comes and goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Squeeze {
    /// Limit, in MiB.
    pub limit_mib: u64,
    /// Time for which it is in force.
    pub hold: Duration,
    /// Time for which it is not, before each.
    pub pause: Duration,
}

/// File that the host swaps to. It is switched off and removed on drop at the latest.
pub struct SwapFile {
    path: PathBuf,
    is_on: bool,
}

impl SwapFile {
    /// Makes a file of this size, and has the host swap to it before any other. A file that was
    /// left over is removed first.
    pub fn make(path: &Path, size: u64) -> anyhow::Result<Self> {
        let dir = path.parent().context("a swap file is in a directory")?;
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let kind = u64::try_from(statfs(dir)?.f_type).ok();
        if let Some((_, name)) = NO_DISK.iter().find(|(number, _)| Some(*number) == kind) {
            bail!("{} is on {name}: a swap file needs a disk", dir.display());
        }
        // A program that was killed leaves it, and it may be in use.
        let left = Self { path: path.to_owned(), is_on: used(path)?.is_some() };
        left.remove().context("a swap file that was left over")?;
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        let made = made.with_context(|| format!("cannot make {}", path.display()))?;
        let mut file = Self { path: path.to_owned(), is_on: false };
        let filled = fallocate(&made, FallocateFlags::empty(), 0, size);
        filled.with_context(|| format!("cannot make {} of {size} bytes", path.display()))?;
        drop(made);
        tool(Command::new("mkswap").arg("-q").arg(path))?;
        tool(Command::new("swapon").args(["--priority", PRIORITY]).arg(path))?;
        file.is_on = true;
        let is_compressed = faults::of_host(&Root::default())?.may_be_compressed;
        ensure!(!is_compressed, "swap is compressed here (zswap, or zram): reading it back needs no disk");
        Ok(file)
    }

    /// Switches it off, which reads all of it back, and removes it.
    pub fn remove(mut self) -> anyhow::Result<()> {
        self.end()
    }

    fn end(&mut self) -> anyhow::Result<()> {
        if self.is_on {
            tool(Command::new("swapoff").arg(&self.path))?;
            self.is_on = false;
        }
        match fs::remove_file(&self.path) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                Err(e).with_context(|| format!("cannot remove {}", self.path.display()))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        // Removed before, where all went well; else the error that led here is reported.
        let _ = self.end();
    }
}

/// KiB that are swapped to this file; `None` where the host does not swap to it.
fn used(path: &Path) -> anyhow::Result<Option<u64>> {
    let text = Root::default().read_optional(SWAPS)?.unwrap_or_default();
    let fields = |line: &str| line.split_ascii_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let mut all = text.lines().skip(1).map(fields);
    let Some(line) = all.find(|line| line.first().is_some_and(|name| Path::new(name) == path)) else {
        return Ok(None);
    };
    let used = line.get(3).and_then(|used| used.parse().ok());
    used.with_context(|| format!("{SWAPS}: {line:?}")).map(Some)
}

fn tool(command: &mut Command) -> anyhow::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let out = command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {name}"))?;
    ensure!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr).trim());
    Ok(())
}

/// Cgroup of the memory controller in which the VM's QEMU begins, with the path of its swap file:
/// on v1 removed on drop, on v2 the lab's own.
pub struct MemoryGroup {
    cgroups: Cgroups,
    group: PathBuf,
    swap: PathBuf,
    /// Files (v2) into which `+memory` was written, outermost first.
    enabled: Vec<PathBuf>,
}

impl MemoryGroup {
    /// Makes the group, and sees whether the host swaps to such a file. `state` is the file that
    /// refers to the group, so that it is known as left over should this process be killed.
    pub fn make(group: &Path, swap: &Path, state: &Path) -> anyhow::Result<Self> {
        let root = Root::default();
        let cgroups = Cgroups::detect_memory(&root)?.context("no cgroups limit memory")?;
        let (Some(dir), Some(name)) = (swap.parent(), swap.file_name()) else {
            bail!("{} names no file", swap.display())
        };
        fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
        // As the kernel lists it.
        let swap = fs::canonicalize(dir)?.join(name);
        let mut made = Self { cgroups, group: group.to_owned(), swap, enabled: Vec::new() };
        made.cgroups.create(&root, &made.group)?;
        if let Some(parent) = made.group.parent() {
            // A group that takes no mark is not found then.
            let _ = mark(&root, &made.cgroups.dir(parent)?, state);
        }
        for file in made.cgroups.to_enable(&root, &made.group, "memory")? {
            root.write(&file, "+memory")?;
            made.enabled.push(file);
        }
        let limit = made.limit_file()?;
        ensure!(root.exists(&limit)?, "{} is not there", limit.display());
        SwapFile::make(&made.swap, SMALL)?.remove()?;
        Ok(made)
    }

    fn limit_file(&self) -> anyhow::Result<PathBuf> {
        let name = match self.cgroups.hierarchy {
            Hierarchy::V1 => "memory.limit_in_bytes",
            Hierarchy::V2 => "memory.max",
        };
        Ok(self.cgroups.dir(&self.group)?.join(name))
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let root = Root::default();
        // On v2 the lab has removed them. What cannot be removed is found by its mark.
        for group in [Some(self.group.as_path()), self.group.parent()].into_iter().flatten() {
            let _ = self.cgroups.remove(&root, group);
        }
        // Refused when another program uses the controller below by now: then it stays on.
        for file in self.enabled.iter().rev() {
            let _ = root.write(file, "-memory");
        }
    }
}

/// Waits, unless the flag is set.
pub fn wait(flag: &AtomicBool, time: Duration) {
    let begin = Instant::now();
    while begin.elapsed() < time && !flag.load(Ordering::Relaxed) {
        thread::sleep(TICK.min(time));
    }
}

/// Sets a limit. Where the kernel cannot get below it, it has swapped out what it could, and what
/// was set before stays; the same where a signal interrupts that.
fn set(file: &Path, value: &str) -> anyhow::Result<()> {
    match Root::default().write(file, value) {
        Err(HostError::Write { source, .. })
            if matches!(source.kind(), ErrorKind::ResourceBusy | ErrorKind::Interrupted) =>
        {
            Ok(())
        }
        other => Ok(other?),
    }
}

/// Takes memory from what is in the group again and again; returns what ends that: the limit is as
/// before, then swap is off and its file removed, also where one of these fails.
pub fn squeeze(
    group: &MemoryGroup,
    how: Squeeze,
) -> anyhow::Result<impl FnOnce() -> anyhow::Result<()> + use<>> {
    let file = group.limit_file()?;
    let before = Root::default().read(&file)?.trim().to_owned();
    let limit = (how.limit_mib << 20).to_string();
    let swap = SwapFile::make(&group.swap, SIZE)?;
    // Once here, so that a limit which is refused, or takes nothing away, is no cause that counts.
    let first = set(&file, &limit);
    let back = set(&file, &before);
    first.and(back)?;
    let kib = used(&group.swap)?.unwrap_or(0);
    ensure!(kib > 0, "with a limit of {} MiB nothing of the VM's memory was swapped out", how.limit_mib);
    let stop = Arc::new(AtomicBool::new(false));
    let (flag, path, free) = (Arc::clone(&stop), file.clone(), before.clone());
    let run = move || -> anyhow::Result<()> {
        loop {
            wait(&flag, how.pause);
            if flag.load(Ordering::Relaxed) {
                return Ok(());
            }
            set(&path, &limit)?;
            wait(&flag, how.hold);
            set(&path, &free)?;
        }
    };
    let thread = thread::Builder::new().name("squeeze".to_owned()).spawn(run)?;
    Ok(move || {
        stop.store(true, Ordering::Relaxed);
        let ended = thread.join().unwrap_or_else(|_| Err(anyhow!("the thread that limits memory panicked")));
        let back = set(&file, &before);
        let off = swap.remove();
        ended.and(back).and(off)
    })
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};

    use rtvirtio_kernel::ProcessId;
    use rtvirtio_testkit::{ChildGuard, Need, has, skip};

    use super::*;

    fn group_path(name: &str) -> PathBuf {
        PathBuf::from(format!("/{}{name}", ProcessId::prefix("bench"))).join("vm")
    }

    #[test]
    fn memory_file_systems_are_refused_by_name() {
        let Ok(dir) = rtvirtio_testkit::tempdir_in("/dev/shm") else { return };
        let path = dir.path().join(SWAP_FILE);
        let refused = SwapFile::make(&path, SMALL).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(refused.contains("is on tmpfs"), "{refused}");
        assert!(!path.exists());
    }

    #[test]
    fn a_swap_file_is_switched_off_and_removed_on_drop_and_where_it_was_left() {
        let test = "a_swap_file_is_switched_off_and_removed_on_drop_and_where_it_was_left";
        if !has(test, &[Need::Root]) {
            return;
        }
        let dir = rtvirtio_testkit::disk_dir().unwrap();
        let path = dir.path().join(SWAP_FILE);
        let file = match SwapFile::make(&path, SMALL) {
            Ok(file) => file,
            Err(e) => return skip(test, &format!("no swap file: {e:#}")),
        };
        assert_eq!(used(&path).unwrap(), Some(0));
        drop(file);
        assert_eq!((used(&path).unwrap(), path.exists()), (None, false));
        // As a program that is killed leaves it.
        std::mem::forget(SwapFile::make(&path, SMALL).unwrap());
        assert_eq!(used(&path).unwrap(), Some(0));
        SwapFile::make(&path, SMALL).unwrap().remove().unwrap();
        assert_eq!((used(&path).unwrap(), path.exists()), (None, false));
    }

    /// A shell that has 48 MB is limited to 8 MiB, and is as before afterwards.
    #[test]
    fn memory_is_swapped_out_and_all_is_as_before_at_the_end() {
        let test = "memory_is_swapped_out_and_all_is_as_before_at_the_end";
        if !has(test, &[Need::Root]) {
            return;
        }
        let dir = rtvirtio_testkit::disk_dir().unwrap();
        let swap = dir.path().join(SWAP_FILE);
        let group = match MemoryGroup::make(&group_path("squeeze"), &swap, &dir.path().join("state")) {
            Ok(group) => group,
            Err(e) => return skip(test, &format!("memory cannot be limited: {e:#}")),
        };
        let at = group.cgroups.dir(&group.group).unwrap();
        let script = format!(
            "echo $$ >{}/cgroup.procs; x=$(head -c 48000000 /dev/zero | tr '\\0' x); echo ready; read line",
            at.display()
        );
        let mut shell = Command::new("sh");
        let child = shell.args(["-c", script.as_str()]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = ChildGuard(child.unwrap());
        let mut line = String::new();
        BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line.trim(), "ready");
        let limit = group.limit_file().unwrap();
        let before = Root::default().read(&limit).unwrap();
        let (hold, pause) = (Duration::from_millis(5), Duration::from_millis(5));
        let undo = squeeze(&group, Squeeze { limit_mib: 8, hold, pause }).unwrap();
        assert!(used(&swap).unwrap().is_some_and(|kib| kib > 10_000), "{:?}", used(&swap));
        undo().unwrap();
        assert_eq!(Root::default().read(&limit).unwrap(), before);
        assert_eq!((used(&swap).unwrap(), swap.exists()), (None, false));
        drop(child);
        drop(group);
        assert!(!at.exists(), "{}", at.display());
    }
}
