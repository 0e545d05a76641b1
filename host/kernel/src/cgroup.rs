//! Control groups of the block I/O controller, v1 `blkio` and v2 `io`, and of the CPU controller,
//! `cpu` on both (`Documentation/admin-guide/cgroup-v1/blkio-controller.rst`,
//! `Documentation/admin-guide/cgroup-v2.rst`, `Documentation/block/bfq-iosched.rst`).
//!
//! Files of BFQ, of the throttling policy and of io.cost are written. `io.latency` belongs to
//! another policy: it is read, to report its effect.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::mounts::{Mount, mounts};
use crate::task::Membership;
use crate::{HostError, Root, process, text};

mod member;
mod path;

pub use member::MemberGroup;
pub use path::{CpuLimit, OtherControl, SetLimit};

/// Number of times that [`Cgroups::remove`] waits for dead processes to leave the group.
const REMOVE_TRIES: u32 = 50;
const REMOVE_PAUSE: Duration = Duration::from_millis(20);

/// Version of the interface that has the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hierarchy {
    /// cgroup v1, where each controller may have its own hierarchy.
    V1,
    /// cgroup v2, one hierarchy for all.
    V2,
}

/// The hierarchy that holds the block I/O controller, the CPU controller, or that of memory.
///
/// A cgroup is named by its path below the hierarchy's root, such as `/machine.slice/vm0.scope`, as
/// `/proc/PID/cgroup` prints it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cgroups {
    /// Version of the interface.
    pub hierarchy: Hierarchy,
    /// Mount point of the hierarchy.
    pub mount: PathBuf,
    /// Cgroup that is mounted there: `/` except inside some containers.
    mount_root: PathBuf,
    /// The controller's name on v1.
    controller: &'static str,
}

/// File with the BFQ weight of a cgroup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightFile {
    /// Path of `io.bfq.weight`, or of its counterpart on v1.
    pub path: PathBuf,
    /// Whether it takes `MAJ:MIN WEIGHT` for one device; else only the group's default for all
    /// devices (v1 before Linux 5.4).
    pub per_device: bool,
}

/// Direction and unit of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// Bytes read per second.
    ReadBps,
    /// Bytes written per second.
    WriteBps,
    /// Read requests per second.
    ReadIops,
    /// Write requests per second.
    WriteIops,
}

impl Limit {
    /// Key in v2 `io.max`.
    #[must_use]
    pub fn key(self) -> &'static str {
        match self {
            Self::ReadBps => "rbps",
            Self::WriteBps => "wbps",
            Self::ReadIops => "riops",
            Self::WriteIops => "wiops",
        }
    }

    /// File name in a v1 cgroup.
    #[must_use]
    pub fn v1_file(self) -> &'static str {
        match self {
            Self::ReadBps => "blkio.throttle.read_bps_device",
            Self::WriteBps => "blkio.throttle.write_bps_device",
            Self::ReadIops => "blkio.throttle.read_iops_device",
            Self::WriteIops => "blkio.throttle.write_iops_device",
        }
    }

    /// Largest value that the kernel keeps as written. Request rates are held in 32 bits and
    /// truncated without an error (measured on 6.18: 99999999999 reads back as 1215752191); all
    /// bits set mean no limit.
    #[must_use]
    pub fn largest(self) -> u64 {
        match self {
            Self::ReadBps | Self::WriteBps => u64::MAX - 1,
            Self::ReadIops | Self::WriteIops => u64::from(u32::MAX) - 1,
        }
    }
}

/// Result of a search for a controller's hierarchy.
enum Search {
    Found(Cgroups),
    /// Neither v1 with the controller nor v2 is mounted.
    Unmounted,
    /// The hierarchy of v2 does not offer it.
    Without {
        mount: PathBuf,
        offered: String,
    },
}

impl Search {
    /// Searches for a controller by its names on v1 and v2.
    fn find(root: &Root, v1: &'static str, v2: &str) -> Result<Self, HostError> {
        let mounts = mounts(root)?;
        // The same hierarchy may be mounted twice; the mount of its root sees all groups.
        let outermost = |f: &dyn Fn(&&Mount) -> bool| {
            mounts.iter().filter(|m| f(m)).min_by_key(|m| m.root.components().count()).cloned()
        };
        let found = |hierarchy, m: Mount| {
            let (mount, mount_root) = (m.point, m.root);
            Self::Found(Cgroups { hierarchy, mount, mount_root, controller: v1 })
        };
        if let Some(m) = outermost(&|m| m.fs == "cgroup" && m.options.iter().any(|o| o == v1)) {
            return Ok(found(Hierarchy::V1, m));
        }
        let Some(m) = outermost(&|m| m.fs == "cgroup2") else { return Ok(Self::Unmounted) };
        let controllers = root.read(m.point.join("cgroup.controllers"))?;
        if text::has_word(&controllers, v2) {
            return Ok(found(Hierarchy::V2, m));
        }
        Ok(Self::Without { mount: m.point, offered: controllers.trim().to_owned() })
    }
}

impl Cgroups {
    /// Finds the hierarchy: v1 `blkio` when it is mounted (a controller lives in one hierarchy
    /// only), else v2 with `io`.
    ///
    /// # Errors
    /// [`HostError::NoIoController`] when neither is there, with the remedy.
    pub fn detect(root: &Root) -> Result<Self, HostError> {
        let why = match Search::find(root, "blkio", "io")? {
            Search::Found(found) => return Ok(found),
            Search::Unmounted => {
                "neither v1 `blkio` nor v2 is mounted; mount it with `mount -t cgroup2 none /sys/fs/cgroup`"
                    .into()
            }
            Search::Without { mount, offered } => format!(
                "the v2 hierarchy at {} offers only `{offered}`; boot without `cgroup_disable=io`, and without v1 `blkio` claimed \
                 (`cgroup_no_v1=blkio`), on a kernel with CONFIG_BLK_CGROUP",
                mount.display()
            ),
        };
        Err(HostError::NoIoController { why })
    }

    /// Finds the hierarchy of the CPU controller: v1 `cpu` when it is mounted, else v2 with `cpu`.
    ///
    /// # Errors
    /// [`HostError::NoCpuController`] when neither is there, with the remedy.
    pub fn detect_cpu(root: &Root) -> Result<Self, HostError> {
        let why = match Search::find(root, "cpu", "cpu")? {
            Search::Found(found) => return Ok(found),
            Search::Unmounted => {
                "neither v1 `cpu` nor v2 is mounted; mount it with `mount -t cgroup2 none /sys/fs/cgroup`"
                    .into()
            }
            Search::Without { mount, offered } => format!(
                "the v2 hierarchy at {} offers only `{offered}`; boot without `cgroup_disable=cpu`. With RT_GROUP_SCHED the kernel also \
                 withholds it while a real-time thread is outside of the root cgroup",
                mount.display()
            ),
        };
        Err(HostError::NoCpuController { why })
    }

    /// Finds the hierarchy of the memory controller: v1 `memory` when it is mounted, else v2 with
    /// `memory`; `None` where neither is there.
    pub fn detect_memory(root: &Root) -> Result<Option<Self>, HostError> {
        Ok(match Search::find(root, "memory", "memory")? {
            Search::Found(found) => Some(found),
            Search::Unmounted | Search::Without { .. } => None,
        })
    }

    /// Cgroup of a thread in this hierarchy, from its memberships; `None` when the hierarchy is not
    /// among them.
    #[must_use]
    pub fn of_thread<'a>(&self, memberships: &'a [Membership]) -> Option<&'a Path> {
        let ours = |m: &&Membership| match self.hierarchy {
            Hierarchy::V1 => m.has(self.controller),
            Hierarchy::V2 => m.controllers.is_empty(),
        };
        memberships.iter().find(ours).map(|m| m.path.as_path())
    }

    /// Whether a cgroup is the root, which has no weight.
    #[must_use]
    pub fn is_root(cgroup: &Path) -> bool {
        !cgroup.components().any(|c| matches!(c, Component::Normal(_)))
    }

    /// Directory of a cgroup.
    ///
    /// # Errors
    /// [`HostError::BadCgroup`] for a path with `..`, or one outside of the part that is mounted.
    pub fn dir(&self, cgroup: &Path) -> Result<PathBuf, HostError> {
        let bad = |why| HostError::BadCgroup { path: cgroup.to_owned(), why };
        if cgroup.components().any(|c| c == Component::ParentDir) {
            return Err(bad("it leads upwards with `..`"));
        }
        let absolute = Path::new("/").join(cgroup);
        let below = absolute
            .strip_prefix(&self.mount_root)
            .map_err(|_| bad("it lies outside of the part of the hierarchy that is mounted here"))?;
        Ok(if below.as_os_str().is_empty() { self.mount.clone() } else { self.mount.join(below) })
    }

    /// Makes a cgroup, and its parents when they are missing.
    pub fn create(&self, root: &Root, cgroup: &Path) -> Result<(), HostError> {
        let dir = self.dir(cgroup)?;
        fs::create_dir_all(root.at(&dir)).map_err(|source| HostError::Directory {
            action: "create",
            path: dir,
            source,
        })
    }

    /// Removes a cgroup that has no processes and no children. Waits up to a second for processes
    /// that have just died.
    ///
    /// # Errors
    /// When it is in use or does not exist.
    pub fn remove(&self, root: &Root, cgroup: &Path) -> Result<(), HostError> {
        remove_dir(root, &self.dir(cgroup)?)
    }

    /// Moves a process with all its threads into a cgroup.
    ///
    /// # Errors
    /// When the process or the cgroup is gone, or the kernel refuses.
    pub fn attach(&self, root: &Root, cgroup: &Path, pid: u32) -> Result<(), HostError> {
        root.write(self.dir(cgroup)?.join("cgroup.procs"), &pid.to_string())
    }

    /// Processes in a cgroup and all those below it, ascending.
    ///
    /// # Errors
    /// When the cgroup is gone; [`HostError::is_unsupported`] when it is itself a threaded one,
    /// whose threads belong to processes of another cgroup.
    pub fn pids(&self, root: &Root, cgroup: &Path) -> Result<Vec<u32>, HostError> {
        pids_below(root, &self.dir(cgroup)?)
    }

    /// The cgroup of a process in this hierarchy.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn of_pid(&self, root: &Root, pid: u32) -> Result<PathBuf, HostError> {
        let all = process::cgroups(root, pid)?;
        let ours = all.iter().find(|m| match self.hierarchy {
            Hierarchy::V1 => m.has(self.controller),
            Hierarchy::V2 => m.controllers.is_empty(),
        });
        let expected = "a list with the controller's hierarchy";
        let form = || HostError::form(format!("/proc/{pid}/cgroup"), &format!("{all:?}"), expected);
        ours.map(|m| m.path.clone()).ok_or_else(form)
    }

    /// Whether a cgroup is one of those that libvirt makes for parts of a VM's threads: `emulator`,
    /// `vcpuN`, `iothreadN` (its `docs/cgroups.rst`).
    #[must_use]
    pub fn is_of_thread(cgroup: &Path) -> bool {
        let name = cgroup.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let numbered = |prefix: &str| {
            let digits = name.strip_prefix(prefix);
            digits.is_some_and(|d| !d.is_empty() && d.bytes().all(|b| b.is_ascii_digit()))
        };
        name == "emulator" || numbered("vcpu") || numbered("iothread")
    }

    /// Cgroup that holds a whole VM, given that of one of its threads: up to the last systemd scope
    /// or service in the path (libvirt puts QEMU into `machine-qemu-1.scope/libvirt/emulator`),
    /// else the path itself, without libvirt's groups below the VM's.
    #[must_use]
    pub fn unit_of(cgroup: &Path) -> PathBuf {
        let is_unit = |p: &&Path| {
            p.extension().is_some_and(|e| [OsStr::new("scope"), OsStr::new("service")].contains(&e))
        };
        if let Some(unit) = cgroup.ancestors().find(is_unit) {
            return unit.to_owned();
        }
        let vm = cgroup.parent().filter(|_| Self::is_of_thread(cgroup)).unwrap_or(cgroup);
        let below = vm.parent().filter(|_| vm.file_name() == Some(OsStr::new("libvirt")));
        below.unwrap_or(vm).to_owned()
    }

    /// File with the BFQ weight of a cgroup, which may appear only once the controller is enabled.
    ///
    /// # Errors
    /// When the path is not a cgroup's, or cannot be read. The file exists only while BFQ is built
    /// in or its module is loaded.
    pub fn weight_file(&self, root: &Root, cgroup: &Path) -> Result<WeightFile, HostError> {
        let dir = self.dir(cgroup)?;
        Ok(match self.hierarchy {
            Hierarchy::V2 => WeightFile { path: dir.join("io.bfq.weight"), per_device: true },
            Hierarchy::V1 => {
                let per_device = dir.join("blkio.bfq.weight_device");
                let plain = dir.join("blkio.bfq.weight");
                if root.exists(&plain)? && !root.exists(&per_device)? {
                    WeightFile { path: plain, per_device: false }
                } else {
                    WeightFile { path: per_device, per_device: true }
                }
            }
        })
    }

    /// Path of the file with a limit of a cgroup.
    ///
    /// # Errors
    /// When the path is not a cgroup's.
    pub fn limit_file(&self, cgroup: &Path, limit: Limit) -> Result<PathBuf, HostError> {
        Ok(self.dir(cgroup)?.join(match self.hierarchy {
            Hierarchy::V2 => "io.max",
            Hierarchy::V1 => limit.v1_file(),
        }))
    }

    /// On v2, the `cgroup.subtree_control` files, outermost first, that must get `+io` before a
    /// cgroup has I/O files. None on v1.
    pub fn io_to_enable(&self, root: &Root, cgroup: &Path) -> Result<Vec<PathBuf>, HostError> {
        self.to_enable(root, cgroup, "io")
    }

    /// Files as of [`Cgroups::io_to_enable`], for a controller of this name.
    pub fn to_enable(&self, root: &Root, cgroup: &Path, controller: &str) -> Result<Vec<PathBuf>, HostError> {
        if self.hierarchy == Hierarchy::V1 {
            return Ok(Vec::new());
        }
        let dir = self.dir(cgroup)?;
        let mut files = Vec::new();
        for above in dir.ancestors().skip(1).take_while(|d| d.starts_with(&self.mount)) {
            let file = above.join("cgroup.subtree_control");
            if !text::has_word(&root.read(&file)?, controller) {
                files.push(file);
            }
        }
        files.reverse();
        Ok(files)
    }

    /// All cgroups of the hierarchy as directories, the root first.
    ///
    /// # Errors
    /// When the hierarchy cannot be read. Groups that vanish meanwhile are left out.
    pub fn all_dirs(&self, root: &Root) -> Result<Vec<PathBuf>, HostError> {
        let mut out = vec![self.mount.clone()];
        let mut next = 0;
        while let Some(dir) = out.get(next).cloned() {
            next += 1;
            match child_dirs(root, &dir) {
                Ok(children) => out.extend(children),
                Err(e) if e.is_gone() && next > 1 => {}
                Err(e) => return Err(e),
            }
        }
        Ok(out)
    }
}

/// Removes a cgroup by its directory, in any hierarchy.
pub fn remove_dir(root: &Root, dir: &Path) -> Result<(), HostError> {
    let mut tries = 0;
    loop {
        match fs::remove_dir(root.at(dir)) {
            Err(e) if e.kind() == io::ErrorKind::ResourceBusy && tries < REMOVE_TRIES => {
                tries += 1;
                thread::sleep(REMOVE_PAUSE);
            }
            result => {
                return result.map_err(|source| HostError::Directory {
                    action: "remove",
                    path: dir.to_owned(),
                    source,
                });
            }
        }
    }
}

/// Processes in a cgroup's directory and below it, ascending.
pub(crate) fn pids_below(root: &Root, dir: &Path) -> Result<Vec<u32>, HostError> {
    let mut found = BTreeSet::new();
    collect_pids(root, dir, &mut found)?;
    Ok(found.into_iter().collect())
}

fn collect_pids(root: &Root, dir: &Path, found: &mut BTreeSet<u32>) -> Result<(), HostError> {
    let path = dir.join("cgroup.procs");
    for line in root.read(&path)?.lines() {
        let pid = line.trim().parse().map_err(|_| HostError::Form {
            path: path.clone(),
            text: line.to_owned(),
            expected: "a process id",
        })?;
        found.insert(pid);
    }
    for child in child_dirs(root, dir)? {
        match collect_pids(root, &child, found) {
            Err(e) if e.is_gone() => {}
            // Threaded, as libvirt makes one for each vCPU: the processes are in the cgroup above
            // it (cgroup-v2.rst, "Threads").
            Err(e) if e.is_unsupported() => {}
            other => other?,
        }
    }
    Ok(())
}

/// Directories in a directory, sorted.
pub(crate) fn child_dirs(root: &Root, dir: &Path) -> Result<Vec<PathBuf>, HostError> {
    let wrap = |source| HostError::Read { path: dir.to_owned(), source };
    let mut out = Vec::new();
    for entry in fs::read_dir(root.at(dir)).map_err(wrap)? {
        let entry = entry.map_err(wrap)?;
        if entry.file_type().map_err(wrap)?.is_dir() {
            out.push(dir.join(entry.file_name()));
        }
    }
    out.sort();
    Ok(out)
}

#[cfg(test)]
mod tests;
