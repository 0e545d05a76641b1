//! Cgroups of rtvirtio that no journal, state file or process refers to any more, found by name and
//! mark.
//!
//! A cgroup of ours has the path of the file that refers to it, a journal or a lab's state, as an
//! extended attribute (xattr(7)). Where that file is gone, nothing will remove the cgroup. A cgroup
//! that is named after its process needs no mark.

use std::collections::BTreeSet;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{XattrFlags, getxattr, setxattr};

use crate::cgroup::pids_below;
use crate::mounts::{Mount, mounts};
use crate::{HostError, Root, process, task, unless_gone};

/// Prefix of the names of our cgroups, directly below the root of a hierarchy.
const PREFIX: &str = "rtvirtio-";
/// Prefixes, after `rtvirtio-`, of cgroups that are named after their process: `PID-START` follows.
const OF_A_PROCESS: [&str; 2] = ["learn-", "bench-"];
/// Name of the mark; `trusted.` attributes are for root on every file system with attributes,
/// cgroups of both versions among them.
const ATTRIBUTE: &str = "trusted.rtvirtio.known_by";
/// Longest path, in bytes (`PATH_MAX`).
const MAX_PATH: usize = 4096;

/// Owner of a cgroup: a process or a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KnownBy {
    /// The process that made it, by id and start in 1/100 s since boot.
    Process(u32, u64),
    /// A journal or state file, by the path in the mark.
    File(PathBuf),
    /// No mark: made by hand, or on a kernel that took none.
    Unknown,
}

/// Cgroup that rtvirtio made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OurGroup {
    /// Directory of the cgroup.
    pub dir: PathBuf,
    /// Process or file that refers to it.
    pub known_by: KnownBy,
    /// Processes in it and below it.
    pub pids: Vec<u32>,
}

impl OurGroup {
    /// Whether its process or file is gone; never for a cgroup without a mark.
    pub fn is_left(&self, root: &Root) -> Result<bool, HostError> {
        match &self.known_by {
            KnownBy::Process(pid, start) => match task::stat(root, *pid, *pid) {
                Ok(stat) => Ok(stat.start != *start || stat.ended),
                Err(e) if e.is_gone() => Ok(true),
                Err(e) => Err(e),
            },
            KnownBy::File(path) => Ok(!root.exists(path)?),
            KnownBy::Unknown => Ok(false),
        }
    }
}

/// Marks a cgroup's directory with the path of the file that refers to it.
///
/// # Errors
/// Without root, and where the file system takes no attributes. The cgroup is then never taken for
/// a leftover.
pub fn mark(root: &Root, dir: &Path, file: &Path) -> Result<(), HostError> {
    let path = root.at(dir);
    let failed = |source: std::io::Error| HostError::Write {
        path: dir.to_owned(),
        value: file.display().to_string(),
        source,
    };
    let file = std::path::absolute(file).map_err(failed)?;
    setxattr(path, ATTRIBUTE, file.as_os_str().as_bytes(), XattrFlags::empty()).map_err(|e| failed(e.into()))
}

fn known_by(root: &Root, dir: &Path, name: &str) -> KnownBy {
    let after = |kind: &&str| name.strip_prefix(PREFIX)?.strip_prefix(*kind);
    if let Some(ids) = OF_A_PROCESS.iter().find_map(after) {
        let mut ids = ids.split('-').map(str::parse::<u64>);
        // A VM's contract may have such a name without the start.
        if let (Some(Ok(pid)), Some(Ok(start))) = (ids.next(), ids.next()) {
            return u32::try_from(pid).map_or(KnownBy::Unknown, |pid| KnownBy::Process(pid, start));
        }
    }
    let mut path = vec![0; MAX_PATH];
    match getxattr(root.at(dir), ATTRIBUTE, &mut path) {
        Ok(length) => {
            path.truncate(length);
            KnownBy::File(PathBuf::from(std::ffi::OsString::from_vec(path)))
        }
        Err(_) => KnownBy::Unknown,
    }
}

/// All cgroups of rtvirtio, of every hierarchy.
pub fn groups(root: &Root) -> Result<Vec<OurGroup>, HostError> {
    let mut found = Vec::new();
    let mut seen = BTreeSet::new();
    let is_whole = |m: &Mount| ["cgroup", "cgroup2"].contains(&m.fs.as_str()) && m.root == Path::new("/");
    for mount in mounts(root)?.into_iter().filter(is_whole) {
        // The same hierarchy may be mounted twice.
        if !seen.insert(mount.dev) {
            continue;
        }
        for name in root.list(&mount.point)?.into_iter().filter(|n| n.starts_with(PREFIX)) {
            let dir = mount.point.join(&name);
            if !root.at(&dir).is_dir() {
                continue;
            }
            let pids = match pids_below(root, &dir) {
                Ok(pids) => pids,
                // Removed meanwhile.
                Err(e) if e.is_gone() => continue,
                Err(e) if e.is_unsupported() => pids_of_threads(root, &dir)?,
                Err(e) => return Err(e),
            };
            found.push(OurGroup { known_by: known_by(root, &dir, &name), dir, pids });
        }
    }
    Ok(found)
}

/// Processes of a threaded group's threads, ascending: they are in the group above it, here the
/// root.
fn pids_of_threads(root: &Root, dir: &Path) -> Result<Vec<u32>, HostError> {
    let mut found = BTreeSet::new();
    for thread in unless_gone(root.read(dir.join("cgroup.threads")))?.unwrap_or_default().lines() {
        if let Ok(thread) = thread.trim().parse() {
            found.extend(unless_gone(process::of_thread(root, thread))?);
        }
    }
    Ok(found.into_iter().collect())
}

/// Loop devices whose backing file is below a directory.
pub fn loops_below(root: &Root, dir: &Path) -> Result<Vec<PathBuf>, HostError> {
    let mut found = Vec::new();
    for name in root.list("/sys/block")? {
        let file = root.read_optional(Path::new("/sys/block").join(&name).join("loop/backing_file"));
        // For a device without a backing file the read fails.
        if file.ok().flatten().is_some_and(|file| Path::new(file.trim_end()).starts_with(dir)) {
            found.push(Path::new("/dev").join(name));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::test_root::TestRoot;

    const MOUNT: &str = "38 31 0:35 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                         39 31 0:35 / /cg rw - cgroup cgroup rw,cpu\n";

    fn host() -> TestRoot {
        TestRoot::new(&[("/proc/self/mountinfo", MOUNT)])
    }

    fn stat(root: &TestRoot, pid: u32, start: u64) {
        let tail = "0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 0 0 0 0";
        let line = format!("{pid} (x) S 1 1 1 0 -1 64 0 0 0 0 5 5 0 0 20 0 1 0 {start} {tail}\n");
        root.put(&format!("/proc/{pid}/task/{pid}/stat"), &line);
    }

    #[test]
    fn groups_named_after_a_process_are_left_when_it_is_gone() {
        let root = host();
        for name in
            ["rtvirtio-learn-7-100", "rtvirtio-learn-7-99-io", "rtvirtio-learn-8-1", "other-learn-8-1"]
        {
            root.put(&format!("/sys/fs/cgroup/cpu/{name}/cgroup.procs"), "");
        }
        stat(&root, 7, 100);
        let left: Vec<_> = groups(&root).unwrap().into_iter().filter(|g| g.is_left(&root).unwrap()).collect();
        let names: Vec<_> = left.iter().map(|g| g.dir.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(
            names,
            ["rtvirtio-learn-7-99-io", "rtvirtio-learn-8-1"],
            "its id was used again; it is gone"
        );
    }

    #[test]
    fn a_marked_group_is_left_when_its_file_is_gone() {
        let root = host();
        let dir = Path::new("/sys/fs/cgroup/cpu/rtvirtio-web");
        root.put("/sys/fs/cgroup/cpu/rtvirtio-web/cgroup.procs", "12\n");
        root.put("/state/journal.json", "{}");
        let one = || groups(&root).unwrap().remove(0);
        assert_eq!((one().known_by, one().pids), (KnownBy::Unknown, vec![12]));
        assert!(!one().is_left(&root).unwrap(), "without a mark it is never removed");
        if mark(&root, dir, Path::new("/state/journal.json")).is_err() {
            return rtvirtio_testkit::skip("a_marked_group_is_left_when_its_file_is_gone", "needs root");
        }
        assert!(!one().is_left(&root).unwrap());
        fs::remove_file(root.at("/state/journal.json")).unwrap();
        assert!(one().is_left(&root).unwrap());
    }

    #[test]
    fn a_threaded_group_is_found_too() {
        let test = "a_threaded_group_is_found_too";
        let root = Root::default();
        let mount =
            mounts(&root).unwrap().into_iter().find(|m| m.fs == "cgroup2" && m.root == Path::new("/"));
        let Some(mount) = mount else { return rtvirtio_testkit::skip(test, "no cgroup v2 is mounted") };
        if !rustix::process::geteuid().is_root() {
            return rtvirtio_testkit::skip(test, "needs root");
        }
        // Named after this process, so that another test's search for leftovers skips it.
        let dir = mount.point.join(format!("{}threads", crate::ProcessId::prefix("bench")));
        fs::create_dir(&dir).unwrap();
        let threaded = fs::write(dir.join("cgroup.type"), "threaded");
        let found = groups(&root);
        fs::remove_dir(&dir).unwrap();
        threaded.unwrap();
        let one = found.unwrap().into_iter().find(|group| group.dir == dir).unwrap();
        assert!(one.pids.is_empty() && matches!(one.known_by, KnownBy::Process(..)), "{one:?}");
    }

    #[test]
    fn loops_are_found_by_their_file() {
        let root = host();
        root.put("/sys/block/loop0/loop/backing_file", "/run/a/twin/disk (deleted)\n");
        root.put("/sys/block/loop1/loop/backing_file", "/run/ab/twin/disk\n");
        root.put("/sys/block/sda/size", "1\n");
        assert_eq!(loops_below(&root, Path::new("/run/a")).unwrap(), [Path::new("/dev/loop0")]);
    }
}
