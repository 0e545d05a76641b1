//! The fair server of a CPU, which keeps a share of it for ordinary threads next to real-time ones
//! (`kernel/sched/debug.c`, from Linux 6.12 on).

use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::mounts::mounts;
use crate::{HostError, Root};

/// Mount point of debugfs, which is for root only.
const DEBUGFS: &str = "/sys/kernel/debug";
/// Directory of the servers' values, with a subdirectory for each CPU.
pub(crate) const SERVERS: &str = "/sys/kernel/debug/sched/fair_server";
/// First kernel version that has it.
pub(crate) const SINCE: (u32, u32) = (6, 12);

/// Cause for which the fair server of a CPU cannot be set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoFairServer {
    /// An older kernel.
    #[error("this kernel has none: it comes with Linux 6.12")]
    Kernel,
    /// No debugfs at its place.
    #[error("debugfs is not mounted: mount -t debugfs debugfs /sys/kernel/debug")]
    Debugfs,
    /// A debugfs without the file.
    #[error("this kernel shows none in debugfs (CONFIG_SCHED_DEBUG)")]
    File,
    /// A debugfs that no program may read, not even root's.
    #[error(
        "the kernel is locked down, as with Secure Boot, and shows it to no program: start the host without"
    )]
    Lockdown,
}

/// File with the time in ns that the server keeps for ordinary threads in each period; with 0 it is
/// off.
#[must_use]
pub fn runtime_file(cpu: u32) -> PathBuf {
    PathBuf::from(format!("{SERVERS}/cpu{cpu}/runtime"))
}

/// CPU of a [`runtime_file`]; `None` for other paths.
#[must_use]
pub fn cpu_in(path: &str) -> Option<u32> {
    path.strip_prefix(SERVERS)?.strip_prefix("/cpu")?.strip_suffix("/runtime")?.parse().ok()
}

/// Cause for which the server of a CPU cannot be set; `None` where its file can be read.
///
/// # Errors
/// When a file cannot be read, as by another user than root.
pub fn missing(root: &Root, cpu: u32) -> Result<Option<NoFairServer>, HostError> {
    match root.read_optional(runtime_file(cpu)) {
        Ok(Some(_)) => return Ok(None),
        Ok(None) => {}
        Err(e) if e.is_errno(Errno::PERM) => return Ok(Some(NoFairServer::Lockdown)),
        Err(e) => return Err(e),
    }
    if version(root)? < SINCE {
        return Ok(Some(NoFairServer::Kernel));
    }
    let is_mounted = mounts(root)?.iter().any(|m| m.fs == "debugfs" && m.point == Path::new(DEBUGFS));
    Ok(Some(if is_mounted { NoFairServer::File } else { NoFairServer::Debugfs }))
}

/// Version of the kernel.
pub(crate) fn version(root: &Root) -> Result<(u32, u32), HostError> {
    const PATH: &str = "/proc/sys/kernel/osrelease";
    let release = root.read(PATH)?;
    let mut parts = release.trim().split(['.', '-']).map(|n| n.parse().ok());
    match (parts.next().flatten(), parts.next().flatten()) {
        (Some(major), Some(minor)) => Ok((major, minor)),
        _ => Err(HostError::form(PATH, &release, "a kernel version")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_root::TestRoot;

    #[test]
    fn what_is_missing_has_its_remedy() {
        let root = TestRoot::new(&[]);
        let release = |text: &str| root.put("/proc/sys/kernel/osrelease", text);
        let mount = |line: &str| root.put("/proc/self/mountinfo", line);
        missing(&root, 4).unwrap_err();
        release("6.1.0-18-amd64\n");
        assert_eq!(missing(&root, 4).unwrap(), Some(NoFairServer::Kernel));
        release("6.12.9\n");
        missing(&root, 4).unwrap_err();
        mount("38 31 0:7 / /sys/kernel/tracing rw - tracefs tracefs rw\n");
        assert_eq!(missing(&root, 4).unwrap(), Some(NoFairServer::Debugfs));
        mount("38 31 0:7 / /sys/kernel/debug rw - debugfs debugfs rw\n");
        assert_eq!(missing(&root, 4).unwrap(), Some(NoFairServer::File));
        root.put(runtime_file(4).to_str().unwrap(), "50000000\n");
        assert_eq!(missing(&root, 4).unwrap(), None);
        assert_eq!(missing(&root, 5).unwrap(), Some(NoFairServer::File));
        let mounting = NoFairServer::Debugfs.to_string();
        assert!(mounting.ends_with("mount -t debugfs debugfs /sys/kernel/debug"), "{mounting}");
    }

    #[test]
    fn a_path_is_of_the_cpu_that_it_names() {
        let of = |path: &Path| cpu_in(path.to_str().unwrap());
        assert_eq!(of(&runtime_file(12)), Some(12));
        for other in ["/sys/kernel/debug/sched/fair_server/cpu4/period", "/proc/irq/4/smp_affinity_list"] {
            assert_eq!(of(Path::new(other)), None);
        }
    }
}
