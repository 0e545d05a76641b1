//! Waiting and throttling that the kernel counts: pressure stall information
//! (`Documentation/accounting/psi.rst`) and `cpu.stat` of cgroups.

use std::path::Path;
use std::time::Duration;

use crate::{HostError, Root};

/// Pressure of a resource since boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Time in which at least one task waited for it.
    pub some: Duration,
    /// Time in which all non-idle tasks waited for it; zero where the kernel does not count it.
    pub full: Duration,
}

/// Pressure of `cpu`, `io` or `memory` on the host; `None` where the kernel does not count it.
pub fn pressure(root: &Root, resource: &str) -> Result<Option<Pressure>, HostError> {
    pressure_in(root, &Path::new("/proc/pressure").join(resource))
}

/// Pressure in a file of the host or of a cgroup (v2); `None` where the kernel does not count it.
pub fn pressure_in(root: &Root, path: &Path) -> Result<Option<Pressure>, HostError> {
    let text = match root.read_optional(path) {
        Ok(Some(text)) => text,
        Ok(None) => return Ok(None),
        // Compiled in but switched off: `psi=0`.
        Err(e) if e.is_unsupported() => return Ok(None),
        Err(e) => return Err(e),
    };
    let total = |kind: &str| {
        let line = text.lines().find(|line| line.split_whitespace().next() == Some(kind))?;
        let total = line.split_whitespace().find_map(|word| word.strip_prefix("total="))?;
        total.parse().ok().map(Duration::from_micros)
    };
    match total("some") {
        Some(some) => Ok(Some(Pressure { some, full: total("full").unwrap_or_default() })),
        None => Err(HostError::form(path, &text, "pressure stall information")),
    }
}

/// Number and duration of a cgroup's stops by its CPU quota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttled {
    /// Number of periods in which tasks were stopped.
    pub periods: u64,
    /// Time in which they were stopped, summed over CPUs.
    pub time: Duration,
}

/// Throttling in `cpu.stat` of a cgroup's directory; `None` without the file, or where it counts no
/// throttling.
pub fn throttled(root: &Root, dir: &Path) -> Result<Option<Throttled>, HostError> {
    let Some(text) = root.read_optional(dir.join("cpu.stat"))? else { return Ok(None) };
    let value = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))?;
        line.trim().parse::<u64>().ok()
    };
    let Some(periods) = value("nr_throttled") else { return Ok(None) };
    // Microseconds on v2, nanoseconds on v1.
    let time = value("throttled_usec").map(Duration::from_micros);
    let time = time.or_else(|| value("throttled_time").map(Duration::from_nanos));
    Ok(Some(Throttled { periods, time: time.unwrap_or_default() }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_root::TestRoot;

    #[test]
    fn pressure_is_read_and_its_lack_is_none() {
        let io = "some avg10=0.00 avg60=0.12 avg300=0.00 total=1500\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=500\n";
        let root = TestRoot::new(&[("/proc/pressure/io", io), ("/proc/pressure/cpu", "nothing\n")]);
        let us = Duration::from_micros;
        assert_eq!(pressure(&root, "io").unwrap(), Some(Pressure { some: us(1500), full: us(500) }));
        assert_eq!(pressure(&root, "memory").unwrap(), None);
        assert!(pressure(&root, "cpu").is_err());
    }

    #[test]
    fn throttling_of_both_hierarchies() {
        let v1 = "nr_periods 10\nnr_throttled 4\nthrottled_time 7000000\n";
        let v2 = "usage_usec 1\nnr_periods 10\nnr_throttled 4\nthrottled_usec 7000\n";
        let root =
            TestRoot::new(&[("/a/cpu.stat", v1), ("/b/cpu.stat", v2), ("/c/cpu.stat", "usage_usec 1\n")]);
        let found = Some(Throttled { periods: 4, time: Duration::from_millis(7) });
        assert_eq!(throttled(&root, Path::new("/a")).unwrap(), found);
        assert_eq!(throttled(&root, Path::new("/b")).unwrap(), found);
        assert_eq!(throttled(&root, Path::new("/c")).unwrap(), None);
        assert_eq!(throttled(&root, Path::new("/d")).unwrap(), None);
    }
}
