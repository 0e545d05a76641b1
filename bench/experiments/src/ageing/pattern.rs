//! Ways in which a device changes over months.

use rtvirtio_stats::Random;
use rtvirtio_twin::{GarbageCollection, Timing, TwinProfile};
use rtvirtio_units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

/// Deviation of a window's service times from those declared.
const NOISE: f64 = 0.03;
/// Share of windows that take twice as long for no reason.
const OUTLIERS: f64 = 0.001;
/// Share of windows in which the host stands still.
const STALLS: f64 = 1.0 / 300.0;
/// Length of such a stall.
const STALL: Nanos = Nanos(200_000_000);
/// Day on which a device begins to change.
const BEGIN: f64 = 20.0;

/// A way to age, or not to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Noise only.
    Noise,
    /// The host stands still now and then, the device does not.
    HostStalls,
    /// Twice the service times from one moment on.
    Step,
    /// Service times rise to three times over 50 days.
    Ramp,
    /// Throttled by heat for four hours of each day.
    Thermal,
    /// Six times the time of writes for three hours of each day: the drive's fast cells are used
    /// up.
    FastCellsFull,
    /// Longer and more frequent pauses for garbage collection.
    Pauses,
    /// More and more reads are read twice.
    Retries,
    /// Four times the time of writes, reads as before.
    Writes,
    /// Slower while more is asked of it, within what is declared.
    UnderLoad,
    /// Twice the service times, and as new again after a trim.
    Trimmed,
    /// Faster with a new firmware.
    Faster,
}

/// Behaviour of a device in one window, as multiples of the declared one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Condition {
    /// Service time of reads.
    pub read: f64,
    /// Service time of writes.
    pub write: f64,
    /// Share of reads that are read twice.
    pub retries: f64,
    /// Whether pauses are longer and more frequent.
    pub pauses: bool,
    /// Requests per second, of those that are simulated.
    pub rate: f64,
    /// Length of a stall of the host; 0 without one.
    pub host_stall: Nanos,
}

impl Condition {
    /// A device as new, but for noise.
    pub fn new(random: &mut Random) -> Self {
        let noise = (NOISE * random.normal()).exp();
        let host_stall = Nanos(0);
        Self { read: noise, write: noise, retries: 0.0, pauses: false, rate: 1.0, host_stall }
    }

    fn slower(self, times: f64) -> Self {
        Self { read: self.read * times, write: self.write * times, ..self }
    }

    pub fn twin(&self, twin: &TwinProfile) -> TwinProfile {
        let timing = |of: &Timing, times: f64| Timing {
            base: Nanos((of.base.0 as f64 * times) as u64),
            per_byte_ns: of.per_byte_ns * times,
        };
        let pauses = GarbageCollection { every: Bytes(4 << 20), pause: Nanos::from_millis(40) };
        TwinProfile {
            read: timing(&twin.read, self.read),
            write: timing(&twin.write, self.write),
            garbage_collection: if self.pauses { Some(pauses) } else { twin.garbage_collection.clone() },
            ..twin.clone()
        }
    }
}

impl Pattern {
    /// Patterns in the order of declaration.
    pub const ALL: [Self; 12] = [
        Self::Noise,
        Self::HostStalls,
        Self::Step,
        Self::Ramp,
        Self::Thermal,
        Self::FastCellsFull,
        Self::Pauses,
        Self::Retries,
        Self::Writes,
        Self::UnderLoad,
        Self::Trimmed,
        Self::Faster,
    ];

    /// Description in messages and tables.
    pub const fn description(self) -> &'static str {
        match self {
            Self::Noise => "noise only",
            Self::HostStalls => "rare stalls of the host",
            Self::Step => "twice as slow at once",
            Self::Ramp => "three times as slow over 50 days",
            Self::Thermal => "throttled by heat, 4 h a day",
            Self::FastCellsFull => "write cache exhausted, 3 h a day",
            Self::Pauses => "longer garbage collection",
            Self::Retries => "reads retried",
            Self::Writes => "writes four times as slow",
            Self::UnderLoad => "slower under load, 8 h a day",
            Self::Trimmed => "twice as slow, as new after a trim",
            Self::Faster => "faster by a firmware",
        }
    }

    /// Days on which the change begins and ends; `None` without one. What recurs each day has no
    /// end.
    pub const fn change(self) -> Option<(f64, f64)> {
        match self {
            Self::Noise | Self::HostStalls => None,
            Self::Step | Self::Pauses | Self::Writes | Self::Faster => Some((BEGIN, BEGIN)),
            Self::Ramp | Self::Retries => Some((BEGIN, BEGIN + 50.0)),
            Self::Trimmed => Some((BEGIN, BEGIN + 30.0)),
            Self::Thermal | Self::FastCellsFull | Self::UnderLoad => Some((BEGIN, f64::INFINITY)),
        }
    }

    /// Day from which on the device is better than before; `None` where it never is.
    pub const fn better(self) -> Option<f64> {
        match self {
            Self::Trimmed => Some(BEGIN + 30.0),
            Self::Faster => Some(BEGIN),
            _ => None,
        }
    }

    /// Largest rate that the pattern asks for, which is the declared one.
    pub const fn declared_rate(self) -> f64 {
        if matches!(self, Self::UnderLoad) { 1.5 } else { 1.0 }
    }

    /// Condition in a window that begins on a day, whose fraction is the time of the day.
    pub fn condition(self, day: f64, random: &mut Random) -> Condition {
        let new = Condition::new(random);
        let (since, time) = (day - BEGIN, day.fract());
        let in_hours = |from: f64, to: f64| (from / 24.0..to / 24.0).contains(&time);
        // From 0 to 1 over 50 days.
        let ramp = (since / 50.0).clamp(0.0, 1.0);
        let is_busy = self == Self::UnderLoad && in_hours(9.0, 17.0);
        let new = Condition { rate: if is_busy { self.declared_rate() } else { 1.0 }, ..new };
        match self {
            Self::Noise if random.unit() < OUTLIERS => new.slower(2.0),
            Self::HostStalls if random.unit() < STALLS => Condition { host_stall: STALL, ..new },
            _ if since < 0.0 => new,
            Self::Noise | Self::HostStalls => new,
            Self::Step => new.slower(2.0),
            Self::Ramp => new.slower(1.0 + 2.0 * ramp),
            Self::Thermal if in_hours(13.0, 17.0) => new.slower(1.6),
            Self::FastCellsFull if in_hours(1.0, 4.0) => Condition { write: new.write * 6.0, ..new },
            Self::Pauses => Condition { pauses: true, ..new },
            Self::Retries => Condition { retries: 0.4 * ramp, ..new },
            Self::Writes => Condition { write: new.write * 4.0, ..new },
            Self::UnderLoad if is_busy => new.slower(1.8),
            Self::Trimmed if since < 30.0 => new.slower(2.0),
            Self::Faster => new.slower(0.6),
            Self::Thermal | Self::FastCellsFull | Self::UnderLoad | Self::Trimmed => new,
        }
    }

    /// Whether the device is slower than new at a time, noise apart.
    pub fn is_slower(self, day: f64) -> bool {
        let (since, time) = (day - BEGIN, day.fract());
        let in_hours = |from: f64, to: f64| (from / 24.0..to / 24.0).contains(&time);
        since >= 0.0
            && match self {
                Self::Noise | Self::HostStalls | Self::Faster => false,
                Self::Thermal => in_hours(13.0, 17.0),
                Self::FastCellsFull => in_hours(1.0, 4.0),
                Self::UnderLoad => in_hours(9.0, 17.0),
                Self::Trimmed => since < 30.0,
                Self::Step | Self::Ramp | Self::Pauses | Self::Retries | Self::Writes => true,
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_as_new_until_it_changes() {
        for pattern in Pattern::ALL {
            let mut random = Random::new(1);
            let mut mean = |day: f64| {
                let all = (0..400).map(|i| pattern.condition(day + f64::from(i) / 400.0, &mut random).write);
                all.sum::<f64>() / 400.0
            };
            assert!((mean(10.0) - 1.0).abs() < 0.02, "{pattern:?}");
            let is_worse = matches!(
                pattern,
                Pattern::Step
                    | Pattern::Ramp
                    | Pattern::Thermal
                    | Pattern::FastCellsFull
                    | Pattern::Writes
                    | Pattern::UnderLoad
                    | Pattern::Trimmed
            );
            assert_eq!(mean(40.0) > 1.05, is_worse, "{pattern:?}");
            assert_eq!(pattern.is_slower(40.5), is_worse_at_noon(pattern), "{pattern:?}");
            assert_eq!(pattern.change().is_some(), !matches!(pattern, Pattern::Noise | Pattern::HostStalls));
        }
        assert!(!Pattern::Trimmed.is_slower(60.0));
    }

    fn is_worse_at_noon(pattern: Pattern) -> bool {
        !matches!(
            pattern,
            Pattern::Noise
                | Pattern::HostStalls
                | Pattern::Faster
                | Pattern::Thermal
                | Pattern::FastCellsFull
        )
    }
}
