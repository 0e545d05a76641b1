//! Formats in which the kernel prints knobs, and comparison by meaning.
//!
//! Sources: `block/elevator.c` (scheduler), `block/bfq-iosched.c` (tunables), `block/bfq-cgroup.c`
//! (weights), `block/blk-throttle.c` (limits), `kernel/cgroup/cgroup.c` (subtree_control).

use std::collections::{BTreeMap, BTreeSet};

pub use rtvirtio_cores::{cpu_list, cpu_ranges};

/// Parsed content of `queue/scheduler`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Elevators {
    /// Elevator that is in use.
    pub current: String,
    /// Elevators on offer now; a module that is not loaded yet is not among them.
    pub available: Vec<String>,
}

/// Parses `queue/scheduler`: `mq-deadline kyber [bfq] none`, or one bare word for a device that has
/// no choice.
///
/// Returns `None` when no word, or more than one, is marked as current.
#[must_use]
pub fn elevators(text: &str) -> Option<Elevators> {
    let mut current = None;
    let mut available = Vec::new();
    for word in text.split_whitespace() {
        let bare = word.strip_prefix('[').and_then(|w| w.strip_suffix(']'));
        if let Some(name) = bare {
            if current.replace(name.to_owned()).is_some() {
                return None;
            }
        }
        available.push(bare.unwrap_or(word).to_owned());
    }
    match (current, available.as_slice()) {
        (Some(current), _) => Some(Elevators { current, available }),
        (None, [only]) => Some(Elevators { current: only.clone(), available }),
        _ => None,
    }
}

/// Largest CPU number that a mask may name.
const MAX_CPU: u32 = rtvirtio_cores::MAX_CPUS as u32 - 1;

/// Parses a mask of CPUs in hexadecimal words of 32 bits: `3`, `ff,00000001`. `None` for another
/// format.
#[must_use]
pub fn cpu_mask(text: &str) -> Option<BTreeSet<u32>> {
    let mut cpus = BTreeSet::new();
    for (at, word) in (0..).zip(text.trim().rsplit(',')) {
        let bits = u32::from_str_radix(word, 16).ok()?;
        if at > MAX_CPU / 32 || word.len() > 8 {
            return None;
        }
        cpus.extend((0..32).filter(|bit| bits >> bit & 1 == 1).map(|bit| at * 32 + bit));
    }
    Some(cpus)
}

/// Values that a knob in milliseconds which the kernel holds in jiffies may show after `ms` was
/// written to it.
///
/// `msecs_to_jiffies()` and `jiffies_to_msecs()` both round up (`kernel/time/time.c`), so with `HZ`
/// ticks per second the value is `ceil(ceil(ms * HZ / 1000) * 1000 / HZ)`. The HZ of the running
/// kernel is not readable without its config; the four values that `kernel/Kconfig.hz` offers are
/// tried. BFQ raises `timeout_sync` to at least 1 ms first.
#[must_use]
pub fn jiffies_readbacks(ms: u64) -> [u64; 4] {
    [100, 250, 300, 1000].map(|hz: u64| {
        let jiffies = ms.max(1).saturating_mul(hz).div_ceil(1000);
        jiffies.saturating_mul(1000).div_ceil(hz)
    })
}

/// Weights of a cgroup as BFQ prints them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Weights {
    /// Weight for every device without a line of its own; `None` when BFQ has no data for this
    /// group.
    pub default: Option<u64>,
    /// Weight per device, by `MAJ:MIN`.
    pub devices: BTreeMap<String, u64>,
}

/// Parses `io.bfq.weight` (v2) or `blkio.bfq.weight_device` (v1): `default 100` and lines
/// `7:0 400`; also the bare number of `blkio.bfq.weight`. Returns `None` for anything else.
#[must_use]
pub fn weights(text: &str) -> Option<Weights> {
    let mut out = Weights::default();
    for line in text.lines().filter(|l| !l.trim().is_empty()) {
        let words: Vec<_> = line.split_whitespace().collect();
        match words[..] {
            ["default", w] | [w] => out.default = Some(w.parse().ok()?),
            [dev, w] if is_dev(dev) => {
                out.devices.insert(dev.to_owned(), w.parse().ok()?);
            }
            _ => return None,
        }
    }
    Some(out)
}

/// Limit that a v1 `blkio.throttle.*_device` file sets for a device; `None` without a line (no
/// limit).
#[must_use]
pub fn throttle_limit(text: &str, dev: &str) -> Option<u64> {
    throttle_value(text, dev).flatten()
}

/// Limit of a device in such a file, `Some(None)` without a line. `None` for a line that is not
/// understood, which is not the same as no limit.
#[must_use]
pub fn throttle_value(text: &str, dev: &str) -> Option<Option<u64>> {
    let Some(rest) = device_line(text, dev) else { return Some(None) };
    rest.trim().parse().ok().map(Some)
}

/// Limit of a device in v2 `io.max` (`7:0 rbps=max wbps=1048576 riops=max wiops=max`), by its key;
/// `None` for `max` or no line.
#[must_use]
pub fn io_max_limit(text: &str, dev: &str, key: &str) -> Option<u64> {
    io_max_value(text, dev, key).flatten()
}

/// Limit of a device in `io.max`, `Some(None)` for `max` or no line. `None` for a line that is not
/// understood, which is not the same as no limit.
#[must_use]
pub fn io_max_value(text: &str, dev: &str, key: &str) -> Option<Option<u64>> {
    let Some(rest) = device_line(text, dev) else { return Some(None) };
    match rest.split_whitespace().find_map(|kv| kv.strip_prefix(key)?.strip_prefix('='))? {
        "max" => Some(None),
        number => number.parse().ok().map(Some),
    }
}

/// Whether a list such as `cgroup.controllers` or `cgroup.subtree_control` contains a word.
#[must_use]
pub fn has_word(text: &str, word: &str) -> bool {
    text.split_whitespace().any(|w| w == word)
}

/// Whether a word is a device number `MAJ:MIN`.
#[must_use]
pub fn is_dev(word: &str) -> bool {
    word.split_once(':').is_some_and(|(a, b)| a.parse::<u32>().is_ok() && b.parse::<u32>().is_ok())
}

/// Quota and period of `cpu.max` (`4000 20000`, `max 20000`), in us. `Some(None)` without a limit.
#[must_use]
pub fn cpu_quota(text: &str) -> Option<Option<(u64, u64)>> {
    let (quota, period) = text.trim().split_once(' ')?;
    let period: u64 = period.trim().parse().ok()?;
    match quota {
        "max" => Some(None),
        quota => Some(Some((quota.parse().ok()?, period))),
    }
}

/// Rest of a device's line, after its number.
#[must_use]
pub fn device_line<'a>(text: &'a str, dev: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.trim().strip_prefix(dev)?.strip_prefix(' '))
}

#[cfg(test)]
mod tests;
