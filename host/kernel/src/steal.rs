//! Time in which this machine, itself a guest, had work for a CPU and its hypervisor ran something
//! else (proc_stat(5), `steal`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::task::TICK;
use crate::{HostError, Root};

const STAT: &str = "/proc/stat";
/// Index of the steal time in a CPU's line, after the name.
const STEAL: usize = 7;

/// Places of the time in which a CPU had nothing to do, or only waited for I/O.
const IDLE: [usize; 2] = [3, 4];

/// Part of the time that passed by which counters may have gone back, as rounding does.
const BACK: f64 = 0.05;

/// Times of a line, in steps of 10 ms, up to the steal time. Guest times, which follow, are
/// included in earlier columns.
type Times = [u64; STEAL + 1];

/// Steal time of one CPU since boot, in steps of 10 ms; zero on a machine that is no guest, or
/// whose hypervisor does not report it.
pub fn stolen(root: &Root, cpu: u32) -> Result<Duration, HostError> {
    Ok(TICK * u32::try_from(times_of(root, Some(cpu))?[STEAL]).unwrap_or(u32::MAX))
}

/// Number of CPUs that are online, whichever of them this process may use.
pub fn cpus_online(root: &Root) -> Result<u32, HostError> {
    Ok(u32::try_from(times(root, |cpu| cpu.is_some())?.len()).unwrap_or(u32::MAX))
}

/// Steal time of all CPUs, from a moment on.
#[derive(Clone, Copy, Debug)]
pub struct StealWatch {
    before: Times,
}

impl StealWatch {
    /// Starts now.
    pub fn start(root: &Root) -> Result<Self, HostError> {
        Ok(Self { before: times_of(root, None)? })
    }

    /// Share of all CPUs' time that was stolen since the start, 0 to 1; `None` without any time,
    /// and where counters went back, as those of a CPU that goes offline do.
    pub fn share(&self, root: &Root) -> Result<Option<f64>, HostError> {
        Ok(share_of_time(&self.before, &times_of(root, None)?, &[STEAL]))
    }

    /// Share of all CPUs' time that was stolen between the two starts, 0 to 1; `None` as of
    /// [`Self::share`].
    #[must_use]
    pub fn share_until(&self, later: &Self) -> Option<f64> {
        share_of_time(&self.before, &later.before, &[STEAL])
    }
}

/// Idle time of some CPUs, from a moment on.
#[derive(Clone, Debug)]
pub struct IdleWatch {
    before: BTreeMap<Option<u32>, Times>,
}

impl IdleWatch {
    /// Starts now, for those of these CPUs that are online, or for all that are.
    pub fn start(root: &Root, cpus: Option<&BTreeSet<u32>>) -> Result<Self, HostError> {
        let is_wanted = |cpu: u32| cpus.is_none_or(|cpus| cpus.contains(&cpu));
        Ok(Self { before: times(root, |cpu| cpu.is_some_and(is_wanted))? })
    }

    /// Number of these CPUs that are online still, and how many of them had nothing to do in the
    /// mean; `None` where no time passed on one of them, or its counters went back.
    pub fn idle(&self, root: &Root) -> Result<Option<(u32, f64)>, HostError> {
        let now = times(root, |cpu| self.before.contains_key(&cpu))?;
        let both = self.before.iter().filter_map(|(cpu, then)| Some((then, now.get(cpu)?)));
        let shares: Option<Vec<f64>> = both.map(|(then, now)| share_of_time(then, now, &IDLE)).collect();
        let sum = |all: Vec<f64>| (u32::try_from(all.len()).unwrap_or(u32::MAX), all.iter().sum::<f64>());
        Ok(shares.filter(|all| !all.is_empty()).map(sum))
    }
}

/// Share of the time between two readings of a line that was spent in these places.
fn share_of_time(then: &Times, now: &Times, places: &[usize]) -> Option<f64> {
    // The kernel counts idle time as waits for I/O or not by what is pending when it is read: only
    // their sum never goes back (proc_stat(5)).
    let merged = |of: &Times| {
        let [idle, waits] = IDLE;
        let mut of = *of;
        of[idle] = of[idle].saturating_add(std::mem::take(&mut of[waits]));
        of
    };
    let (then, now) = (merged(then), merged(now));
    let passed: Vec<u64> = now.iter().zip(then).map(|(now, then)| now.saturating_sub(then)).collect();
    let back: u64 = now.iter().zip(then).map(|(now, then)| then.saturating_sub(*now)).sum();
    let all: u64 = passed.iter().sum();
    let sum: u64 = places.iter().map(|place| passed[*place]).sum();
    (all > 0 && back as f64 <= BACK * all as f64).then(|| sum as f64 / all as f64)
}

/// Times of CPUs that are online and wanted; `None` is the line of all together.
fn times(
    root: &Root,
    is_wanted: impl Fn(Option<u32>) -> bool,
) -> Result<BTreeMap<Option<u32>, Times>, HostError> {
    let mut found = BTreeMap::new();
    for line in root.read(STAT)?.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(number) = words.next().and_then(|name| name.strip_prefix("cpu")) else { continue };
        let cpu: Option<u32> = number.parse().ok();
        if !is_wanted(cpu) || cpu.is_none() != number.is_empty() {
            continue;
        }
        let times: Option<Vec<u64>> = words.take(STEAL + 1).map(|t| t.parse().ok()).collect();
        let times = times.and_then(|times| times.try_into().ok());
        found.insert(cpu, times.ok_or_else(|| no_line(line))?);
    }
    Ok(found)
}

fn times_of(root: &Root, cpu: Option<u32>) -> Result<Times, HostError> {
    let name = || cpu.map_or_else(|| "cpu".to_owned(), |cpu| format!("cpu{cpu}"));
    times(root, |of| of == cpu)?.remove(&cpu).ok_or_else(|| no_line(&name()))
}

fn no_line(text: &str) -> HostError {
    HostError::Form { path: STAT.into(), text: text.to_owned(), expected: "a line for each CPU" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_root::TestRoot;

    #[test]
    fn what_is_idle_is_what_neither_worked_nor_was_stolen() {
        let root = TestRoot::new(&[]);
        let put = |line: &str| root.put("/proc/stat", line);
        put("cpu0 10 0 10 100 5 0 0 1\n");
        let watch = IdleWatch::start(&root, None).unwrap();
        assert_eq!(watch.idle(&root).unwrap(), None);
        put("cpu0 30 0 20 150 15 5 0 6\n");
        assert_eq!(watch.idle(&root).unwrap(), Some((1, 0.6)), "60 of 100 steps");
    }

    #[test]
    fn counters_that_went_back_are_no_share() {
        let root = TestRoot::new(&[]);
        let put = |line: &str| root.put("/proc/stat", line);
        put("cpu 100 0 100 9000 50 0 0 10\n");
        let watch = StealWatch::start(&root).unwrap();
        // A CPU has gone offline: what others lost is not all that passed.
        put("cpu 100 0 100 4600 20 0 0 15\n");
        assert_eq!(watch.share(&root).unwrap(), None);
        // The time of waits for I/O goes back, as idle time.
        put("cpu 140 0 140 9050 10 0 0 20\n");
        assert_eq!(watch.share(&root).unwrap(), Some(0.1));
    }

    #[test]
    fn idle_time_is_of_the_cpus_that_are_asked_for_and_online() {
        let root = TestRoot::new(&[]);
        let put = |lines: &str| root.put("/proc/stat", lines);
        let at_rest = "cpu0 0 0 0 0 0 0 0 0\ncpu1 0 0 0 0 0 0 0 0\ncpu2 0 0 0 0 0 0 0 0\n";
        put(&format!("cpu  0 0 0 0 0 0 0 0\n{at_rest}intr 5\n"));
        let of = |cpus: &[u32]| IdleWatch::start(&root, Some(&cpus.iter().copied().collect())).unwrap();
        let (all, two, other) = (IdleWatch::start(&root, None).unwrap(), of(&[0, 1]), of(&[7]));
        assert_eq!(all.idle(&root).unwrap(), None, "no time passed");
        put("cpu0 75 0 0 25 0 0 0 0\ncpu1 50 0 0 50 0 0 0 0\ncpu2 0 0 0 100 0 0 0 0\n");
        assert_eq!(all.idle(&root).unwrap(), Some((3, 1.75)));
        assert_eq!((two.idle(&root).unwrap(), other.idle(&root).unwrap()), (Some((2, 0.75)), None));
        // The second and the third went offline.
        put("cpu0 75 0 0 25 0 0 0 0\n");
        assert_eq!((all.idle(&root).unwrap(), two.idle(&root).unwrap()), (Some((1, 0.25)), Some((1, 0.25))));
        put("cpu0 1 2\n");
        assert!(all.idle(&root).is_err() && cpus_online(&root).is_err());
        assert!(IdleWatch::start(&Root::default(), None).is_ok());
    }

    #[test]
    fn the_right_cpu_and_field_are_read() {
        let root = TestRoot::new(&[]);
        let text =
            "cpu  9 9 9 9 9 9 9 9 0 0\ncpu1 1 2 3 4 5 6 7 8 9 10\ncpu10 0 0 0 0 0 0 0 300 0 0\nintr 5\n";
        root.put("/proc/stat", text);
        assert_eq!(cpus_online(&root).unwrap(), 2);
        assert_eq!(stolen(&root, 1).unwrap(), Duration::from_millis(80));
        assert_eq!(stolen(&root, 10).unwrap(), Duration::from_secs(3));
        assert!(stolen(&root, 0).is_err());
        assert!(stolen(&Root::default(), 0).is_ok());
    }

    #[test]
    fn the_share_is_of_the_time_that_passed() {
        let root = TestRoot::new(&[]);
        let put = |line: &str| root.put("/proc/stat", line);
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
