//! Watches on directories with contracts and cgroups of VMs (inotify) and on processes (pidfd).

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_kernel::{Cgroups, Hierarchy, ProcessId, Root};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::contract_scan::is_contract_name;

/// Most reads at a time: a queue that is filled faster than it is read is left.
const MOST_READS: usize = 64;
/// Most watches of each kind; scans find what changes elsewhere.
const MOST_WATCHES: usize = 1_024;

/// Entries of a directory whose events matter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WatchKind {
    /// Files with these names, and where `contracts` is set every contract file.
    Files { contracts: bool, names: BTreeSet<OsString> },
    /// Child cgroups that come and go.
    Groups,
    /// The file itself: whether a cgroup has processes.
    Populated,
}

impl WatchKind {
    fn flags(&self) -> WatchFlags {
        let entries = WatchFlags::CREATE | WatchFlags::DELETE | WatchFlags::ONLYDIR;
        match self {
            Self::Files { .. } => {
                entries | WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO | WatchFlags::MOVED_FROM
            }
            Self::Groups => entries,
            Self::Populated => WatchFlags::MODIFY,
        }
    }

    /// Whether an event about this entry matters; without a name it is about the directory itself.
    fn concerns(&self, name: Option<&OsStr>) -> bool {
        match (self, name) {
            (_, None) | (Self::Groups | Self::Populated, _) => true,
            (Self::Files { contracts, names }, Some(name)) => {
                names.contains(name) || (*contracts && is_contract_name(name))
            }
        }
    }
}

pub(super) fn of_files(contracts: &Path, specs: &[PathBuf]) -> BTreeMap<PathBuf, WatchKind> {
    let none = |contracts| WatchKind::Files { contracts, names: BTreeSet::new() };
    let mut out = BTreeMap::from([(contracts.to_owned(), none(true))]);
    for spec in specs {
        let Some(name) = spec.file_name() else { continue };
        // A file is mostly replaced by a rename: the directory is watched.
        let dir = spec.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        if let WatchKind::Files { names, .. } = out.entry(dir.to_owned()).or_insert_with(|| none(false)) {
            names.insert(name.to_owned());
        }
    }
    out
}

/// Watches on the cgroup of a VM, where its threads get cgroups, and on the one above, where its
/// next start gets one. On v2 also on whether it has processes. Empty in the root cgroup.
pub(super) fn of_vm(root: &Root, processes: &[ProcessId]) -> BTreeMap<PathBuf, WatchKind> {
    let mut out = BTreeMap::new();
    let Some(process) = processes.first() else { return out };
    let Ok(cgroups) = Cgroups::detect(root) else { return out };
    let Ok(group) = cgroups.of_pid(root, process.pid) else { return out };
    let group = Cgroups::unit_of(&group);
    if Cgroups::is_root(&group) {
        return out;
    }
    let above = group.parent().filter(|above| !Cgroups::is_root(above));
    for of in above.into_iter().chain([group.as_path()]) {
        if let Ok(dir) = cgroups.dir(of) {
            out.insert(dir, WatchKind::Groups);
        }
    }
    if cgroups.hierarchy == Hierarchy::V2 {
        if let Ok(dir) = cgroups.dir(&group) {
            out.insert(dir.join("cgroup.events"), WatchKind::Populated);
        }
    }
    out
}

/// Sources that ended a wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wakeup {
    /// A watched file or process changed.
    pub here: bool,
    /// Some other descriptor is readable.
    pub others: bool,
}

/// Inotify watches and pidfds.
#[derive(Debug)]
pub(super) struct Watches {
    inotify: OwnedFd,
    by_wd: BTreeMap<i32, (PathBuf, WatchKind)>,
    processes: BTreeMap<(u32, u64), OwnedFd>,
}

impl Watches {
    pub fn new() -> rustix::io::Result<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        Ok(Self { inotify, by_wd: BTreeMap::new(), processes: BTreeMap::new() })
    }

    /// Watches these and no others. A directory that is not there is tried again at the next call.
    /// Returns whether a process ended before it was watched.
    pub fn set(&mut self, wanted: &BTreeMap<PathBuf, WatchKind>, processes: &[ProcessId]) -> bool {
        let inotify = &self.inotify;
        self.by_wd.retain(|wd, (path, of)| {
            let stays = wanted.get(path) == Some(of);
            if !stays {
                // Perhaps removed with its directory.
                let _ = inotify::remove_watch(inotify, *wd);
            }
            stays
        });
        for (path, of) in wanted {
            let known = self.by_wd.values().any(|(known, _)| known == path);
            if known || self.by_wd.len() >= MOST_WATCHES {
                continue;
            }
            if let Ok(wd) = inotify::add_watch(&self.inotify, path, of.flags()) {
                self.by_wd.insert(wd, (path.clone(), of.clone()));
            }
        }
        let is_wanted = |key: &(u32, u64)| processes.iter().any(|p| (p.pid, p.start_time) == *key);
        self.processes.retain(|key, _| is_wanted(key));
        let mut ended = false;
        for process in processes.iter().take(MOST_WATCHES) {
            let key = (process.pid, process.start_time);
            let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
            let Some(pid) = pid.filter(|_| !self.processes.contains_key(&key)) else { continue };
            // The PID may have been reused already: then the pidfd is another process's.
            match pidfd_open(pid, PidfdFlags::empty()) {
                Ok(fd) if process.is_alive() => {
                    self.processes.insert(key, fd);
                }
                _ => ended |= !process.is_alive(),
            }
        }
        ended
    }

    /// Waits until a watch fires or one of `others` is readable, for at most `time`.
    pub fn wait(&mut self, time: Duration, others: &[BorrowedFd<'_>]) -> Wakeup {
        let own = [&self.inotify].into_iter().chain(self.processes.values());
        let mut fds: Vec<PollFd<'_>> = own.map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
        let others = others.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN));
        fds.extend(others);
        let Ok(timeout) = Timespec::try_from(time) else { return Wakeup::default() };
        // After EINTR the caller waits again.
        let ready = poll(&mut fds, Some(&timeout)).unwrap_or(0) > 0;
        let mut ready =
            fds.iter().map(|fd| ready && !fd.revents().is_empty()).collect::<Vec<_>>().into_iter();
        let files = ready.next().unwrap_or(false) && self.drain();
        let before = self.processes.len();
        self.processes.retain(|_, _| !ready.next().unwrap_or(false));
        Wakeup { here: files || self.processes.len() < before, others: ready.any(|ready| ready) }
    }

    /// Reads queued inotify events; returns whether any of them matters.
    fn drain(&mut self) -> bool {
        let mut buffer = [MaybeUninit::uninit(); 4_096];
        let mut matters = false;
        let mut gone = Vec::new();
        let mut reader = inotify::Reader::new(&self.inotify, &mut buffer);
        let mut reads = 0;
        loop {
            reads += usize::from(reader.is_buffer_empty());
            if reads > MOST_READS {
                break;
            }
            let Ok(event) = reader.next() else { break };
            // The kernel dropped events: anything may have happened.
            matters |= event.events().contains(ReadFlags::QUEUE_OVERFLOW);
            if event.events().contains(ReadFlags::IGNORED) {
                gone.push(event.wd());
                matters = true;
                continue;
            }
            let name = event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()));
            matters |= self.by_wd.get(&event.wd()).is_some_and(|(_, of)| of.concerns(name));
        }
        for wd in gone {
            self.by_wd.remove(&wd);
        }
        matters
    }

    /// Number of watched paths and processes.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.by_wd.len() + self.processes.len()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::os::fd::AsFd as _;
    use std::process::Command;

    use super::*;

    /// Longer than any machine takes; nothing waits for it unless the test fails.
    const HANG: Duration = Duration::from_secs(60);
    const NONE: Duration = Duration::ZERO;

    fn happened(watches: &mut Watches, time: Duration) -> bool {
        watches.wait(time, &[]).here
    }

    #[test]
    fn contract_files_wake_and_what_editors_leave_does_not() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let spec = dir.path().join("spec/plant.toml");
        fs::create_dir(dir.path().join("spec")).unwrap();
        let contracts = dir.path().join("contracts.d");
        let wanted = of_files(&contracts, std::slice::from_ref(&spec));
        assert_eq!(wanted.len(), 2);
        let mut watches = Watches::new().unwrap();
        assert!(!watches.set(&wanted, &[]));
        assert_eq!(watches.len(), 1, "the directory of contracts is not there yet");
        fs::create_dir(&contracts).unwrap();
        assert!(!watches.set(&wanted, &[]));
        assert_eq!(watches.len(), 2);
        assert!(!happened(&mut watches, NONE));
        fs::write(contracts.join(".plc.toml.swp"), "x").unwrap();
        fs::write(contracts.join("plc.toml.dpkg-new"), "x").unwrap();
        fs::write(dir.path().join("spec/other.toml"), "x").unwrap();
        assert!(!happened(&mut watches, NONE));
        for change in [
            &|| fs::write(contracts.join("plc.toml"), "x").unwrap(),
            &|| fs::rename(contracts.join("plc.toml.dpkg-new"), contracts.join("plc.toml")).unwrap(),
            &|| fs::remove_file(contracts.join("plc.toml")).unwrap(),
            &|| fs::write(&spec, "x").unwrap(),
        ] as [&dyn Fn(); 4]
        {
            change();
            assert!(happened(&mut watches, HANG));
            assert!(!happened(&mut watches, NONE));
        }
        // A directory that goes is watched again when it is back.
        fs::remove_dir_all(&contracts).unwrap();
        assert!(happened(&mut watches, HANG));
        fs::create_dir(&contracts).unwrap();
        assert!(!watches.set(&wanted, &[]));
        fs::write(contracts.join("plc.toml"), "x").unwrap();
        assert!(happened(&mut watches, HANG));
        assert!(!watches.set(&BTreeMap::new(), &[]));
        assert_eq!(watches.len(), 0);
    }

    #[test]
    fn the_end_of_a_process_wakes_once() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let process = ProcessId::find(child.id()).unwrap().unwrap();
        let other = ProcessId { start_time: process.start_time + 1, ..process };
        let mut watches = Watches::new().unwrap();
        assert!(!watches.set(&BTreeMap::new(), std::slice::from_ref(&process)));
        assert!(watches.set(&BTreeMap::new(), &[process, other]), "the other one has ended");
        assert_eq!((watches.len(), happened(&mut watches, NONE)), (1, false));
        child.kill().unwrap();
        assert!(happened(&mut watches, HANG));
        child.wait().unwrap();
        assert_eq!((watches.len(), happened(&mut watches, NONE)), (0, false));
    }

    #[test]
    fn other_descriptors_end_a_wait_and_are_told_apart() {
        let mut watches = Watches::new().unwrap();
        let (reader, mut writer) = std::os::unix::net::UnixStream::pair().unwrap();
        let mut wait = |time| watches.wait(time, &[reader.as_fd()]);
        assert_eq!(wait(NONE), Wakeup::default());
        writer.write_all(b"x").unwrap();
        assert_eq!(wait(HANG), Wakeup { here: false, others: true });
    }

    #[test]
    fn a_spec_among_the_contracts_is_watched_with_them() {
        let wanted = of_files(Path::new("/c"), &["/c/a.spec".into(), "b.toml".into()]);
        assert_eq!(wanted.len(), 2);
        let concerns = |dir: &str, name: &str| wanted[Path::new(dir)].concerns(Some(OsStr::new(name)));
        assert!(concerns("/c", "a.spec") && concerns("/c", "x.toml") && !concerns("/c", "b.spec"));
        assert!(concerns(".", "b.toml") && !concerns(".", "x.toml"));
    }
}
