//! Time in which this machine, itself a guest, had work for a CPU and its hypervisor ran something
//! else (proc_stat(5), `steal`).

use std::path::PathBuf;
use std::time::Duration;

use crate::task::TICK;
use crate::{HostError, Root};

/// Index of the steal time in a CPU's line, after the name.
const STEAL: usize = 7;

/// Places of the time in which a CPU had nothing to do, or only waited for I/O.
const IDLE: [usize; 2] = [3, 4];

/// Name of the line of all CPUs together.
const ALL: &str = "cpu";

/// Steal time of one CPU since boot, in steps of 10 ms; zero on a machine that is no guest, or
/// whose hypervisor does not report it.
///
/// # Errors
/// When `/proc/stat` cannot be read, or has no such CPU.
pub fn stolen(root: &Root, cpu: u32) -> Result<Duration, HostError> {
    Ok(TICK * u32::try_from(times(root, &format!("cpu{cpu}"))?[STEAL]).unwrap_or(u32::MAX))
}

/// Number of CPUs that are online, whichever of them this process may use.
///
/// # Errors
/// When `/proc/stat` cannot be read.
pub fn cpus_online(root: &Root) -> Result<u32, HostError> {
    let text = root.read("/proc/stat")?;
    let is_cpu = |line: &&str| {
        let number = line.strip_prefix(ALL).and_then(|rest| rest.split(' ').next());
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    };
    Ok(u32::try_from(text.lines().filter(is_cpu).count()).unwrap_or(u32::MAX))
}

/// Steal time of all CPUs, from a moment on.
#[derive(Clone, Copy, Debug)]
pub struct StealWatch {
    before: [u64; STEAL + 1],
}

impl StealWatch {
    /// Starts now.
    ///
    /// # Errors
    /// When `/proc/stat` cannot be read, or has no such line.
    pub fn start(root: &Root) -> Result<Self, HostError> {
        Ok(Self { before: times(root, ALL)? })
    }

    /// Share of all CPUs' time that was stolen since the start, 0 to 1; `None` without any time.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn share(&self, root: &Root) -> Result<Option<f64>, HostError> {
        self.share_of(root, &[STEAL])
    }

    /// Share of the time of all CPUs since then in which they had nothing to do, 0 to 1; `None`
    /// when no time has passed.
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn idle(&self, root: &Root) -> Result<Option<f64>, HostError> {
        self.share_of(root, &IDLE)
    }

    /// Share of all CPUs' time that was stolen between the two starts, 0 to 1; `None` where no time
    /// lies between them.
    #[must_use]
    pub fn share_until(&self, later: &Self) -> Option<f64> {
        self.share_between(&later.before, &[STEAL])
    }

    fn share_of(&self, root: &Root, places: &[usize]) -> Result<Option<f64>, HostError> {
        Ok(self.share_between(&times(root, ALL)?, places))
    }

    fn share_between(&self, now: &[u64; STEAL + 1], places: &[usize]) -> Option<f64> {
        // A CPU that goes offline takes its times out of the sum.
        let passed: Vec<u64> =
            now.iter().zip(self.before).map(|(now, then)| now.saturating_sub(then)).collect();
        let all: u64 = passed.iter().sum();
        let sum: u64 = places.iter().map(|place| passed[*place]).sum();
        (all > 0).then(|| sum as f64 / all as f64)
    }
}

/// Times of a line, in steps of 10 ms, up to the steal time. Guest times, which follow, are
/// included in earlier columns.
fn times(root: &Root, name: &str) -> Result<[u64; STEAL + 1], HostError> {
    let path = PathBuf::from("/proc/stat");
    let text = root.read(&path)?;
    let line = text.lines().find_map(|l| l.strip_prefix(name).filter(|rest| rest.starts_with(' ')));
    let parsed = line.and_then(|l| {
        let times: Option<Vec<u64>> =
            l.split_ascii_whitespace().take(STEAL + 1).map(|t| t.parse().ok()).collect();
        times?.try_into().ok()
    });
    parsed.ok_or(HostError::Form { path, text: name.to_owned(), expected: "a line for each CPU" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_idle_is_what_neither_worked_nor_was_stolen() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        std::fs::create_dir(dir.path().join("proc")).unwrap();
        let put = |line: &str| std::fs::write(root.at("/proc/stat"), line).unwrap();
        put("cpu 10 0 10 100 5 0 0 1\n");
        let watch = StealWatch::start(&root).unwrap();
        assert_eq!(watch.idle(&root).unwrap(), None);
        put("cpu 30 0 20 150 15 5 0 6\n");
        assert_eq!(watch.idle(&root).unwrap(), Some(0.6), "60 of 100 steps");
    }

    #[test]
    fn the_right_cpu_and_field_are_read() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        std::fs::create_dir_all(root.at("/proc")).unwrap();
        let text =
            "cpu  9 9 9 9 9 9 9 9 0 0\ncpu1 1 2 3 4 5 6 7 8 9 10\ncpu10 0 0 0 0 0 0 0 300 0 0\nintr 5\n";
        std::fs::write(root.at("/proc/stat"), text).unwrap();
        assert_eq!(cpus_online(&root).unwrap(), 2);
        assert_eq!(stolen(&root, 1).unwrap(), Duration::from_millis(80));
        assert_eq!(stolen(&root, 10).unwrap(), Duration::from_secs(3));
        assert!(stolen(&root, 0).is_err());
        assert!(stolen(&Root::default(), 0).is_ok());
    }

    #[test]
    fn the_share_is_of_the_time_that_passed() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        std::fs::create_dir_all(root.at("/proc")).unwrap();
        let put = |line: &str| std::fs::write(root.at("/proc/stat"), line).unwrap();
        put("cpu  100 0 50 1000 10 5 5 30 90 0\n");
        let watch = StealWatch::start(&root).unwrap();
        assert_eq!(watch.share(&root).unwrap(), None);
        // 200 steps passed, 30 of them stolen; guest time (the ninth) is in the first already.
        put("cpu  150 0 60 1100 20 5 5 60 990 0\n");
        assert_eq!(watch.share(&root).unwrap(), Some(0.15));
        let later = StealWatch::start(&root).unwrap();
        assert_eq!((watch.share_until(&later), later.share_until(&later)), (Some(0.15), None));
        put("cpu  1 2 3\n");
        assert!(watch.share(&root).is_err());
        assert!(StealWatch::start(&Root::default()).is_ok());
    }
}
