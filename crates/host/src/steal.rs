//! Time in which this machine, itself a guest, had work for a CPU and its hypervisor ran something else (proc_stat(5), `steal`).

use std::path::PathBuf;
use std::time::Duration;

use crate::task::TICK;
use crate::{HostError, Root};

/// Place of the number in a CPU's line, after its name.
const STEAL: usize = 7;

/// Stolen time of one CPU since boot, in steps of 10 ms; zero on a machine that is no guest, or whose hypervisor does not tell.
///
/// # Errors
/// When `/proc/stat` cannot be read, or has no such CPU.
pub fn stolen(root: &Root, cpu: u32) -> Result<Duration, HostError> {
    let path = PathBuf::from("/proc/stat");
    let text = root.read(&path)?;
    let name = format!("cpu{cpu}");
    let line = text.lines().find_map(|l| l.strip_prefix(name.as_str()).filter(|rest| rest.starts_with(' ')));
    let ticks = line.and_then(|l| l.split_ascii_whitespace().nth(STEAL)).and_then(|t| t.parse::<u32>().ok());
    ticks.map(|t| TICK * t).ok_or(HostError::Form { path, text: name, expected: "a line for each CPU" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_right_cpu_and_field_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::new(dir.path());
        std::fs::create_dir_all(root.at("/proc")).unwrap();
        let text =
            "cpu  9 9 9 9 9 9 9 9 0 0\ncpu1 1 2 3 4 5 6 7 8 9 10\ncpu10 0 0 0 0 0 0 0 300 0 0\nintr 5\n";
        std::fs::write(root.at("/proc/stat"), text).unwrap();
        assert_eq!(stolen(&root, 1).unwrap(), Duration::from_millis(80));
        assert_eq!(stolen(&root, 10).unwrap(), Duration::from_secs(3));
        assert!(stolen(&root, 0).is_err());
        assert!(stolen(&Root::default(), 0).is_ok());
    }
}
