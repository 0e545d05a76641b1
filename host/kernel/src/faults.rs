//! Major page faults: uses of memory that had to be read from a disk first, as it was swapped out
//! or is of a file.

use std::path::Path;

use crate::task::{form, stat_at};
use crate::{HostError, Root};

/// Counters of all of the host.
pub const HOST: &str = "/proc/vmstat";

/// Active areas of swap (proc_swaps(5)), each with its path.
const SWAPS: &str = "/proc/swaps";
/// Whether zswap compresses memory before it is swapped out
/// (`Documentation/admin-guide/mm/zswap.rst`).
const ZSWAP: &str = "/sys/module/zswap/parameters/enabled";

/// Faults of a process since it began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessFaults {
    /// Start time of the process, in 1/100 s since boot.
    pub start: u64,
    pub count: u64,
}

/// Faults of all threads of the host since its boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostFaults {
    pub count: u64,
    /// Memory may be swapped to compressed memory: zram, or zswap before any swap. Reading it back
    /// is a fault too, and takes no disk.
    pub may_be_compressed: bool,
}

/// Faults of a process, those of its threads that have ended included (proc_pid_stat(5),
/// `majflt`). Memory that KVM reads back for a vCPU is counted for a thread of the kernel.
pub fn of_process(root: &Root, pid: u32) -> Result<ProcessFaults, HostError> {
    let stat = stat_at(root, format!("/proc/{pid}/stat").into())?;
    Ok(ProcessFaults { start: stat.start, count: stat.major_faults })
}

/// Faults of the host.
pub fn of_host(root: &Root) -> Result<HostFaults, HostError> {
    Ok(HostFaults { count: counted_in(root, Path::new(HOST))?, may_be_compressed: is_swap_compressed(root)? })
}

/// Faults that [`HOST`] or the `memory.stat` of a cgroup (v2) counts.
pub fn counted_in(root: &Root, path: &Path) -> Result<u64, HostError> {
    let text = root.read(path)?;
    let count = text.lines().find_map(|line| line.strip_prefix("pgmajfault ")?.trim().parse().ok());
    count.ok_or_else(|| form(path.to_owned(), "no pgmajfault", "counters of memory"))
}

/// Whether some swap is in compressed memory. A kernel without swap, or without zswap, has no such
/// file.
fn is_swap_compressed(root: &Root) -> Result<bool, HostError> {
    let text = root.read_optional(SWAPS)?.unwrap_or_default();
    let mut areas = text.lines().skip(1).filter_map(|line| line.split_ascii_whitespace().next()).peekable();
    if areas.peek().is_none() {
        return Ok(false);
    }
    let is_zswap = root.read_optional(ZSWAP)?.is_some_and(|word| word == "Y");
    Ok(is_zswap || areas.any(|area| area.contains("/zram")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_root::TestRoot;

    #[test]
    fn counters_are_read_and_one_that_lacks_is_an_error() {
        let root = TestRoot::new(&[]);
        let fields =
            "S 1 7 7 0 -1 4194560 900 0 31 0 5 6 0 0 20 0 1 0 99 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 0 0 0";
        root.put("/proc/7/stat", &format!("7 (a) b) {fields}\n"));
        assert_eq!(of_process(&root, 7).unwrap(), ProcessFaults { start: 99, count: 31 });
        assert!(of_process(&root, 8).unwrap_err().is_gone());
        root.put(HOST, "pgfault 9\npgmajfault 12\npgmajfault_x 3\n");
        let host = |may_be_compressed| HostFaults { count: 12, may_be_compressed };
        assert_eq!(of_host(&root).unwrap(), host(false));
        let swaps = |lines: &str| {
            let head = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n";
            root.put(SWAPS, &format!("{head}{lines}"));
            of_host(&root).unwrap()
        };
        assert_eq!(swaps("/dev/zram0 partition 8 0 100\n"), host(true));
        assert_eq!(swaps("/dev/sda2 partition 8 0 -2\n"), host(false));
        root.put(ZSWAP, "Y\n");
        assert_eq!((swaps("/dev/sda2 partition 8 0 -2\n"), swaps("")), (host(true), host(false)));
        root.put(HOST, "pgfault 9\n");
        assert!(of_host(&root).is_err());
        let real = Root::default();
        assert!(of_process(&real, std::process::id()).is_ok() && of_host(&real).is_ok());
    }
}
