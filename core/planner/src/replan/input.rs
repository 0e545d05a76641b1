//! Inputs of a plan besides the contracts: all of them whole numbers, so that equal observations
//! give equal plans.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use rtvirtio_model::Profile;
use rtvirtio_spec::{Op, Spec};
use rtvirtio_units::{Iops, Ratio};
use serde::{Deserialize, Serialize};

use super::hysteresis::HIGHEST;

/// Ratio between two levels of load.
pub const LOAD_STEP: f64 = 1.25;
/// Largest ratio to the declared load that still counts as the declared load.
const LOAD_TOLERANCE: f64 = 1.1;
/// Ratio between two levels of slowness of a device.
pub const SLOW_STEP: f64 = 1.5;
/// Highest level of caution.
pub const MOST_CAUTION: u8 = 3;
/// Addition to the safety margin per level of caution, share of a target.
const CAUTION_STEP: f64 = 0.15;

/// Observations, as far as plans depend on them.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Input {
    /// The VMs that are planned for.
    pub vms: BTreeSet<String>,
    /// Load above the declared one, by [`load_key`], as a power of [`LOAD_STEP`]. Never below: the
    /// declared load is promised.
    #[serde(default)]
    pub loads: BTreeMap<String, u8>,
    /// Slowness of a device by its path, as a power of [`SLOW_STEP`].
    #[serde(default)]
    pub slow: BTreeMap<String, u8>,
    /// Additional margin for predictions, because targets were missed that were predicted to be
    /// met: 0 to [`MOST_CAUTION`].
    #[serde(default)]
    pub caution: u8,
    /// Devices, by path, that are not planned: their settings in force stay.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub without: BTreeSet<String>,
}

/// Key of the load of a VM in one direction.
#[must_use]
pub fn load_key(vm: &str, writes: bool) -> String {
    format!("{vm} {}", if writes { "write" } else { "read" })
}

fn level(ratio: f64, tolerance: f64, step: f64) -> u8 {
    if !ratio.is_finite() || ratio <= tolerance {
        return 0;
    }
    let level = ((ratio / tolerance).ln() / step.ln()).ceil();
    // A cast from float saturates.
    (level as u8).min(HIGHEST)
}

/// Level of a load, given its ratio to the declared one.
#[must_use]
pub fn load_level(ratio: f64) -> u8 {
    level(ratio, LOAD_TOLERANCE, LOAD_STEP)
}

/// Level of slowness of a device, by the ratio of its request time to the measured one. Less than a
/// step comes of fragmentation, other sizes and other places of the disk.
#[must_use]
pub fn slow_level(factor: f64) -> u8 {
    level(factor, SLOW_STEP, SLOW_STEP)
}

impl Input {
    /// Input for these VMs with the declared load.
    #[must_use]
    pub fn declared(vms: BTreeSet<String>) -> Self {
        Self { vms, ..Self::default() }
    }

    /// The spec with the planned loads. A task that reads and writes takes the larger factor.
    #[must_use]
    pub fn spec(&self, spec: &Spec) -> Spec {
        let mut spec = spec.clone();
        for vm in &mut spec.vms {
            let factor = |writes| {
                let level = self.loads.get(&load_key(&vm.name, writes)).copied().unwrap_or(0);
                LOAD_STEP.powi(i32::from(level))
            };
            let (read, write) = (factor(false), factor(true));
            for task in &mut vm.tasks {
                let more = match task.op {
                    Op::Read => read,
                    Op::Write => write,
                    Op::Mixed { .. } => read.max(write),
                };
                task.rate = task.rate.map(|rate| Iops(rate.0 * more));
            }
        }
        spec
    }

    /// Factor of the service times of the device at this path that is planned for.
    #[must_use]
    pub fn slowness(&self, device: &str) -> f64 {
        SLOW_STEP.powi(i32::from(self.slow.get(device).copied().unwrap_or(0)))
    }

    /// The profile of the device at this path, slowed down to its present level.
    #[must_use]
    pub fn profile<'p>(&self, device: &str, profile: &'p Profile) -> Cow<'p, Profile> {
        match self.slowness(device) {
            factor if factor > 1.0 => Cow::Owned(profile.slowed(factor)),
            _ => Cow::Borrowed(profile),
        }
    }

    /// A safety margin with the caution added, which raises it to 80 % at most.
    #[must_use]
    pub fn safety(&self, safety: Ratio) -> Ratio {
        Ratio((safety.0 + CAUTION_STEP * f64::from(self.caution)).min(0.8).max(safety.0))
    }

    /// Difference from an earlier input, in words for people.
    #[must_use]
    pub fn difference(&self, before: &Self) -> String {
        let mut words = Vec::new();
        let keys = |a: &BTreeMap<String, u8>, b: &BTreeMap<String, u8>| -> BTreeSet<String> {
            a.keys().chain(b.keys()).cloned().collect()
        };
        let at = |of: &BTreeMap<String, u8>, key: &str| of.get(key).copied().unwrap_or(0);
        for key in keys(&self.loads, &before.loads) {
            let (new, old) = (at(&self.loads, &key), at(&before.loads, &key));
            if new != old {
                words.push(match new {
                    0 => format!("{key}s are back at the declared rate"),
                    _ => format!("{key}s need {:.2} times the declared rate", LOAD_STEP.powi(i32::from(new))),
                });
            }
        }
        for key in keys(&self.slow, &before.slow) {
            let (new, old) = (at(&self.slow, &key), at(&before.slow, &key));
            if new != old {
                words.push(match new {
                    0 => format!("{key} is as fast as it was measured"),
                    _ => format!("{key} takes {:.1} times as long", SLOW_STEP.powi(i32::from(new))),
                });
            }
        }
        match self.caution.cmp(&before.caution) {
            std::cmp::Ordering::Greater => {
                words.push("a target is missed that was predicted to be met".to_owned());
            }
            std::cmp::Ordering::Less => words.push("no target was missed for a long time".to_owned()),
            std::cmp::Ordering::Equal => {}
        }
        let only = |a: &BTreeSet<String>, b| a.difference(b).cloned().collect::<Vec<_>>().join(", ");
        for (devices, what) in [
            (only(&self.without, &before.without), "cannot be planned"),
            (only(&before.without, &self.without), "is planned for too"),
        ] {
            if !devices.is_empty() {
                words.push(format!("{devices} {what}"));
            }
        }
        let came: Vec<&str> = self.vms.difference(&before.vms).map(String::as_str).collect();
        if !came.is_empty() {
            words.push(format!("{} came", came.join(", ")));
        }
        let went: Vec<&str> = before.vms.difference(&self.vms).map(String::as_str).collect();
        if !went.is_empty() && words.is_empty() {
            words.push(format!("{} went", went.join(", ")));
        }
        words.join("; ")
    }
}

impl fmt::Display for Input {
    /// Short, complete form for the name of a plan.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let vms: Vec<&str> = self.vms.iter().map(String::as_str).collect();
        f.write_str(&vms.join(","))?;
        for (key, level) in self.loads.iter().chain(&self.slow).filter(|(_, level)| **level > 0) {
            write!(f, ";{key}={level}")?;
        }
        if self.caution > 0 {
            write!(f, ";caution={}", self.caution)?;
        }
        for device in &self.without {
            write!(f, ";without={device}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rtvirtio_spec::LabKind;
    use rtvirtio_units::Nanos;

    use super::*;
    use crate::tests::{flood, profile, spec, task};

    #[test]
    fn levels_are_steps_above_a_tolerance() {
        for (ratio, expected) in [(0.0, 0), (1.0, 0), (1.1, 0), (1.2, 1), (1.375, 1), (1.4, 2), (2.0, 3)] {
            assert_eq!(load_level(ratio), expected, "{ratio}");
        }
        assert_eq!((load_level(f64::NAN), load_level(f64::INFINITY), load_level(1e12)), (0, 0, HIGHEST));
        for (factor, expected) in [(1.0, 0), (1.5, 0), (1.6, 1), (2.25, 1), (2.3, 2)] {
            assert_eq!(slow_level(factor), expected, "{factor}");
        }
    }

    #[test]
    fn an_input_scales_what_is_declared_and_nothing_else() {
        let spec = spec(LabKind::Process, &[vec![task("t", 100.0, Some(10)), flood()]]);
        let mut input = Input::declared(["vm0".to_owned()].into());
        assert_eq!(input.spec(&spec), spec);
        let name = spec.vms[0].name.clone();
        input.loads.insert(load_key(&name, false), 2);
        input.loads.insert(load_key(&name, true), 5);
        let more = input.spec(&spec);
        assert_eq!(more.vms[0].tasks[0].rate, Some(Iops(100.0 * LOAD_STEP * LOAD_STEP)));
        assert_eq!(more.vms[0].tasks[1].rate, None);
        input.slow.insert("/dev/a".to_owned(), 1);
        let slow = input.profile("/dev/a", &profile()).into_owned();
        assert_eq!(slow.read[0].p50, Nanos(157_500));
        assert!((slow.read[0].iops.0 - 6_200.0).abs() < 1e-6);
        assert_eq!(input.profile("/dev/b", &profile()).into_owned(), profile());
        assert_eq!(input.safety(Ratio(0.2)), Ratio(0.2));
        let cautious = Input { caution: 2, ..input.clone() };
        assert!((cautious.safety(Ratio(0.2)).0 - 0.5).abs() < 1e-9);
        let words = cautious.difference(&Input::default());
        assert!(
            words.contains("1.56 times") && words.contains("missed") && words.contains("came"),
            "{words}"
        );
        assert_ne!(cautious.to_string(), input.to_string());
        let without = Input { without: ["/dev/b".to_owned()].into(), ..input.clone() };
        assert_ne!(without.to_string(), input.to_string());
        assert_eq!(without.difference(&input), "/dev/b cannot be planned");
        assert_eq!(input.difference(&without), "/dev/b is planned for too");
    }
}
