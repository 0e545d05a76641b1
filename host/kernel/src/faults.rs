//! Major page faults: uses of memory that had to be read from a disk first, as it was swapped out
//! or is of a file.

use crate::task::{form, stat_at};
use crate::{HostError, Root};

/// Counters of all of the host (`/proc/vmstat`).
const HOST: &str = "/proc/vmstat";

/// Faults of a process since it began, those of its threads that have ended included
/// (proc_pid_stat(5), `majflt`). Memory that KVM reads back for a vCPU is counted for a thread of
/// the kernel.
///
/// # Errors
/// When the process is gone.
pub fn of_process(root: &Root, pid: u32) -> Result<u64, HostError> {
    Ok(stat_at(root, format!("/proc/{pid}/stat").into())?.major_faults)
}

/// Faults of the host since its boot, whoever had them.
///
/// # Errors
/// When `/proc/vmstat` cannot be read or does not have them.
pub fn of_host(root: &Root) -> Result<u64, HostError> {
    let text = root.read(HOST)?;
    let count = text.lines().find_map(|line| line.strip_prefix("pgmajfault ")?.trim().parse().ok());
    count.ok_or_else(|| form(HOST.into(), "no pgmajfault", "counters of the host's memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_read_and_one_that_lacks_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::new(dir.path());
        std::fs::create_dir_all(root.at("/proc/7")).unwrap();
        let fields =
            "S 1 7 7 0 -1 4194560 900 0 31 0 5 6 0 0 20 0 1 0 99 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 17 0 0 0";
        std::fs::write(root.at("/proc/7/stat"), format!("7 (a) b) {fields}\n")).unwrap();
        assert_eq!(of_process(&root, 7).unwrap(), 31);
        assert!(of_process(&root, 8).unwrap_err().is_gone());
        std::fs::write(root.at(HOST), "pgfault 9\npgmajfault 12\npgmajfault_x 3\n").unwrap();
        assert_eq!(of_host(&root).unwrap(), 12);
        std::fs::write(root.at(HOST), "pgfault 9\n").unwrap();
        assert!(of_host(&root).is_err());
        let real = Root::default();
        assert!(of_process(&real, std::process::id()).is_ok() && of_host(&real).is_ok());
    }
}
