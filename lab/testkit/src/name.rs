//! Names of what a test makes: each contains the id and the start time of the test's process.
//!
//! `PID-START` names a process uniquely: ids are reused, the pair is not. The prefix keeps the
//! names of tests apart from a user's:
//!
//! | what | name |
//! |---|---|
//! | directory | `rtvirtio-test-PID-START-RANDOM` in the directory of temporary files or `/var/tmp` |
//! | VM | `NAME-test-PID-START-N`; the cgroup of its CPU contract has `rtvirtio-` before it |
//! | libvirt VM | as a VM, so its cgroup is `qemu-ID-NAME-test-PID-START-N.libvirt-qemu` |
//! | cgroup made by hand | `rtvirtio-NAME-test-PID-START-N` |
//! | process | its command line, its environment or an open file names such a directory |
//!
//! The laboratory's library names its directories `rtvirtio-box-PID-START-RANDOM` and
//! `rtvirtio-probe-...`. Files, sockets, mounts, loop devices and the state of the programs are
//! below such a directory. [`crate::sweep`] removes all with the name of a process that has ended.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

use crate::owner::Owner;
use crate::sweep;

/// A unique name of this process: for VMs, and for cgroups after `rtvirtio-`.
#[must_use]
pub fn unique(name: &str) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    sweep();
    format!("{name}-{}-{}", Owner::this(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A directory for temporary files, removed when dropped, and after this process's death by the
/// next test that runs.
pub fn tempdir() -> io::Result<TempDir> {
    tempdir_in(std::env::temp_dir())
}

/// A temporary directory on a file system with direct I/O, where `/tmp` may have none.
pub fn disk_dir() -> io::Result<TempDir> {
    tempdir_in("/var/tmp")
}

/// A temporary directory below `parent`, which must be one that the sweep searches: `/tmp`,
/// `/var/tmp`, `/dev/shm` or the environment's directory of temporary files.
pub fn tempdir_in(parent: impl AsRef<Path>) -> io::Result<TempDir> {
    sweep();
    tempfile::Builder::new().prefix(&format!("rtvirtio-{}-", Owner::this())).tempdir_in(parent)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::start_of;

    #[test]
    fn names_hold_their_process() {
        let this = Owner::this();
        assert_eq!(Owner::from_name(&unique("plc")), Some(this));
        assert_ne!(unique("plc"), unique("plc"));
        let dir = tempdir().unwrap();
        assert_eq!(Owner::from_name(dir.path().file_name().unwrap().to_str().unwrap()), Some(this));
        assert!(!this.is_gone());
        assert!(Owner { start: this.start + 1, ..this }.is_gone(), "its id was used again");
    }

    #[test]
    fn other_names_are_of_no_test() {
        for name in ["rtvirtio-web", "rtvirtio-test-", "rtvirtio-test-1", "test-1-x", "rtvirtio-latest-1-2"] {
            assert_eq!(Owner::from_name(name), None, "{name}");
        }
        assert_eq!(Owner::from_name("rtvirtio-box-1-2-ab"), Some(Owner { pid: 1, start: 2 }));
        assert_eq!(Owner::from_name("rtvirtio-test-test-1-2-ab"), Some(Owner { pid: 1, start: 2 }));
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
