//! Names of what a test makes: each holds the id and the start time of the test's process.
//!
//! `PID-START` names a process for good: ids are used again, the pair is not. The mark before it
//! keeps the names of tests apart from a user's:
//!
//! | what | name |
//! |---|---|
//! | directory | `rtvirtio-test-PID-START-RANDOM` in the directory of temporary files or `/var/tmp` |
//! | VM | `NAME-test-PID-START-N`, so the cgroup of its CPU contract is `rtvirtio-NAME-test-PID-START-N` |
//! | cgroup made by hand | `rtvirtio-NAME-test-PID-START-N` |
//! | process | its command line, its environment or an open file names such a directory |
//!
//! The laboratory's library names its directories `rtvirtio-box-PID-START-RANDOM` and
//! `rtvirtio-probe-...`. Files, sockets, mounts, loop devices and the state of the programs lie
//! below such a directory. [`crate::sweep`] removes what carries the name of a process that is
//! gone.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

use crate::sweep;

/// Stands before the process in every name.
const MARK: &str = "test-";
/// The same where the laboratory's library names a directory of its own.
const OF_LIBRARIES: [&str; 2] = ["box-", "probe-"];

/// A process by id and start time, in 1/100 s since boot (proc_pid_stat(5), field 22).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pid: u32,
    start: u64,
}

impl Owner {
    /// This process.
    fn this() -> Self {
        static THIS: OnceLock<Owner> = OnceLock::new();
        *THIS.get_or_init(|| {
            let pid = std::process::id();
            Self { pid, start: start_of(pid).expect("this process's own /proc") }
        })
    }

    /// The process that a name holds; `None` for a name that no test gave.
    pub(crate) fn of(name: &str) -> Option<Self> {
        let after = |mark: &str| {
            let at_start = |at: usize| at == 0 || name.as_bytes()[at - 1] == b'-';
            name.match_indices(mark).filter(|(at, _)| at_start(*at)).find_map(|(at, _)| {
                let mut parts = name[at + mark.len()..].split('-');
                let (pid, start) = (parts.next()?, parts.next()?);
                Some(Self { pid: pid.parse().ok()?, start: start.parse().ok()? })
            })
        };
        std::iter::once(MARK).chain(OF_LIBRARIES).find_map(after)
    }

    /// Whether it has ended. One that only waits for its parent to reap it has.
    pub(crate) fn is_gone(self) -> bool {
        start_of(self.pid) != Some(self.start)
    }
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{MARK}{}-{}", self.pid, self.start)
    }
}

/// When a process started; `None` when it has ended.
fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // After the name in brackets: the state, which is field 3, and on to field 22.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if matches!(fields.first(), Some(&("Z" | "X"))) {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// A name of this process that no other test has: for VMs, and for cgroups after `rtvirtio-`.
#[must_use]
pub fn unique(name: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    sweep();
    format!("{name}-{}-{}", Owner::this(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A directory for temporary files, removed when dropped, and after this process's death by the
/// next test that runs.
///
/// # Errors
/// When it cannot be made.
pub fn tempdir() -> io::Result<TempDir> {
    tempdir_in(std::env::temp_dir())
}

/// The same on a file system with direct I/O, where `/tmp` may have none.
///
/// # Errors
/// When it cannot be made.
pub fn disk_dir() -> io::Result<TempDir> {
    tempdir_in("/var/tmp")
}

/// The same below `parent`, which must be a directory that the sweep looks into: `/tmp`,
/// `/var/tmp`, `/dev/shm` or the environment's directory of temporary files.
///
/// # Errors
/// When it cannot be made.
pub fn tempdir_in(parent: impl AsRef<Path>) -> io::Result<TempDir> {
    sweep();
    tempfile::Builder::new().prefix(&format!("rtvirtio-{}-", Owner::this())).tempdir_in(parent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_hold_their_process() {
        let this = Owner::this();
        assert_eq!(Owner::of(&unique("plc")), Some(this));
        assert_ne!(unique("plc"), unique("plc"));
        let dir = tempdir().unwrap();
        assert_eq!(Owner::of(dir.path().file_name().unwrap().to_str().unwrap()), Some(this));
        assert!(!this.is_gone());
        assert!(Owner { start: this.start + 1, ..this }.is_gone(), "its id was used again");
    }

    #[test]
    fn other_names_are_of_no_test() {
        for name in ["rtvirtio-web", "rtvirtio-test-", "rtvirtio-test-1", "test-1-x", "rtvirtio-latest-1-2"] {
            assert_eq!(Owner::of(name), None, "{name}");
        }
        assert_eq!(Owner::of("rtvirtio-box-1-2-ab"), Some(Owner { pid: 1, start: 2 }));
        assert_eq!(Owner::of("rtvirtio-test-test-1-2-ab"), Some(Owner { pid: 1, start: 2 }));
    }

    #[test]
    fn an_ended_process_is_gone_before_it_is_reaped() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let start = std::time::Instant::now();
        while start_of(child.id()).is_some() {
            assert!(start.elapsed() < crate::HANG, "`true` does not end");
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert_eq!(start_of(child.id()), None);
    }
}
