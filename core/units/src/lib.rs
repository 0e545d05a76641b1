//! Unit newtypes: durations, sizes, rates and ratios, with their text forms.
//!
//! A bare number never crosses a crate boundary where its unit could be mistaken. Values are read
//! from text ("300ms", "4KiB", "500/s", "99.99%") once at the edge and printed in the same forms.

pub mod as_text;
pub mod blk_throttle;
mod enforcement;
mod ethernet;
pub mod io_cost;
mod parse;

pub use enforcement::Enforcement;
pub use ethernet::{MAX_INTERFACE_NAME, Mac, MacError, SHORTEST_FRAME, WIRE_OVERHEAD};
pub use parse::UnitError;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A duration or latency in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Bytes(pub u64);

/// A request rate in operations per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Iops(pub f64);

/// A data rate in bytes per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct BytesPerSec(pub f64);

/// A dimensionless share; 1.0 is the whole. Written as a percentage ("30%").
#[derive(Clone, Copy, Debug, Default, PartialEq, PartialOrd)]
pub struct Ratio(pub f64);

/// A percentile such as p99.99, held as a percentage in (0, 100].
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct Percentile(pub f64);

impl Nanos {
    /// Whole microseconds as nanoseconds.
    #[must_use]
    pub const fn from_micros(us: u64) -> Self {
        Self(us * 1_000)
    }

    /// Whole milliseconds as nanoseconds.
    #[must_use]
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms * 1_000_000)
    }

    /// Seconds, rounded to the nearest nanosecond. Negative values become zero; infinity and NaN
    /// the longest time, as no time at all would keep every target.
    #[must_use]
    pub fn from_secs_f64(s: f64) -> Self {
        // The conversion saturates at both ends.
        if s.is_nan() { Self(u64::MAX) } else { Self((s * 1e9).round() as u64) }
    }

    /// The duration in seconds.
    #[must_use]
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// The duration in milliseconds.
    #[must_use]
    pub fn as_millis_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }
}

impl Bytes {
    /// Whole KiB as bytes.
    #[must_use]
    pub const fn from_kib(kib: u64) -> Self {
        Self(kib * 1024)
    }

    /// The size in KiB, the unit of the paper's model ("KB" there).
    #[must_use]
    pub fn as_kib_f64(self) -> f64 {
        self.0 as f64 / 1024.0
    }
}

impl Iops {
    /// The data rate of this many requests per second of one size.
    #[must_use]
    pub fn times(self, block: Bytes) -> BytesPerSec {
        BytesPerSec(self.0 * block.0 as f64)
    }

    /// The time between two requests; `None` for a rate of zero.
    #[must_use]
    pub fn period(self) -> Option<Nanos> {
        (self.0 > 0.0).then(|| Nanos::from_secs_f64(1.0 / self.0))
    }
}

impl Percentile {
    /// p99.99, the tail the project is about.
    pub const P9999: Self = Self(99.99);

    /// The share of samples that may lie above, e.g. 1e-4 for p99.99.
    #[must_use]
    pub fn exceedance(self) -> f64 {
        1.0 - self.0 / 100.0
    }
}

/// A float without a needless ".0" and with at most `digits` decimals.
fn trimmed(v: f64, digits: usize) -> String {
    let s = format!("{v:.digits$}");
    let s = if s.contains('.') { s.trim_end_matches('0').trim_end_matches('.') } else { &s };
    // The sum of nothing is -0.0.
    if s == "-0" { "0".to_owned() } else { s.to_owned() }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ns = self.0;
        let (v, unit) = match ns {
            0..=999 => (ns as f64, "ns"),
            1_000..=999_999 => (ns as f64 / 1e3, "us"),
            1_000_000..=999_999_999 => (ns as f64 / 1e6, "ms"),
            _ => (ns as f64 / 1e9, "s"),
        };
        let digits = if v < 10.0 { 3 } else { 1 };
        f.pad(&format!("{}{unit}", trimmed(v, digits)))
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["KiB", "MiB", "GiB", "TiB"];
        let mut best = format!("{}B", self.0);
        for (i, unit) in units.iter().enumerate() {
            let one = 1u64 << (10 * (i + 1));
            if self.0 >= one && self.0 % one == 0 {
                best = format!("{}{unit}", self.0 / one);
            }
        }
        f.pad(&best)
    }
}

impl fmt::Display for Iops {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}/s", trimmed(self.0, 1)))
    }
}

impl fmt::Display for BytesPerSec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let v = self.0;
        let s = if v >= 1e6 {
            format!("{}MB/s", trimmed(v / 1e6, 1))
        } else if v >= 1e3 {
            format!("{}kB/s", trimmed(v / 1e3, 1))
        } else {
            format!("{}B/s", trimmed(v, 1))
        };
        f.pad(&s)
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}%", trimmed(self.0 * 100.0, 2)))
    }
}

impl fmt::Display for Percentile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("p{}", trimmed(self.0, 4)))
    }
}

macro_rules! text_form {
    ($($t:ident => $parse:path),* $(,)?) => {$(
        impl FromStr for $t {
            type Err = UnitError;
            fn from_str(s: &str) -> Result<Self, UnitError> {
                $parse(s).map($t)
            }
        }
    )*};
}

text_form!(
    Nanos => parse::duration,
    Bytes => parse::size,
    Iops => parse::rate,
    BytesPerSec => parse::bandwidth,
    Ratio => parse::ratio,
    Percentile => parse::percentile,
);

// In result and plan files values are plain numbers in the base unit (ns, bytes, per second):
// machines read them.
macro_rules! number_form {
    ($($t:ident($inner:ty)),*) => {$(
        impl Serialize for $t {
            fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
                // -0.0, as the sum of nothing, is written as 0.
                (self.0 + <$inner>::default()).serialize(s)
            }
        }
        impl<'de> Deserialize<'de> for $t {
            fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
                <$inner>::deserialize(d).map($t)
            }
        }
    )*};
}

number_form!(Nanos(u64), Bytes(u64), Iops(f64), BytesPerSec(f64), Ratio(f64), Percentile(f64));

#[cfg(test)]
mod tests;
