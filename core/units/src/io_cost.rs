//! Settings of io.cost for a device, as `io.cost.model` and `io.cost.qos` of the root cgroup take
//! and show them after the device's number (`block/blk-iocost.c`,
//! `Documentation/admin-guide/cgroup-v2.rst`).
//!
//! Parsed values print in one form, so that two of one meaning have one text.

use std::fmt;
use std::str::FromStr;

/// Smallest and largest `min` and `max` that the kernel keeps, in hundredths of a percent:
/// `VRATE_MIN_PPM` and `VRATE_MAX_PPM`. Others it cuts without an error.
const RATES: (u32, u32) = (100, 1_000_000);
/// Largest `rpct` and `wpct`, in hundredths of a percent.
const WHOLE: u32 = 10_000;
/// Keys of the linear model, in the kernel's order.
const COEFFICIENTS: [&str; 6] = ["rbps", "rseqiops", "rrandiops", "wbps", "wseqiops", "wrandiops"];

/// Text that is no setting of io.cost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoCostError {
    /// A word that belongs to no key, or to one that was there already.
    #[error("`{0}` is no key of it, or is there twice")]
    Word(String),
    /// A key without which the setting is not whole.
    #[error("`{0}=` is missing")]
    Missing(&'static str),
    /// A value that its key does not take.
    #[error("`{key}={value}` is not {expected}")]
    Value {
        /// Name before the sign.
        key: String,
        /// Text after it.
        value: String,
        /// Description of what the key takes.
        expected: &'static str,
    },
    /// A `min` above `max`.
    #[error("`min` is above `max`")]
    Order,
}

/// Share in hundredths of a percent, the finest that the kernel keeps; prints as `99.99`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Hundredths(pub u32);

impl fmt::Display for Hundredths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:02}", self.0 / 100, self.0 % 100)
    }
}

/// Most that a device does in a second: its linear cost model. A request costs a part of a second
/// for itself, sequential or random, and one for each page of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearModel {
    /// Bytes read.
    pub rbps: u64,
    /// Sequential reads of 4 KiB.
    pub rseqiops: u64,
    /// Random reads of 4 KiB.
    pub rrandiops: u64,
    /// Bytes written.
    pub wbps: u64,
    /// Sequential writes of 4 KiB.
    pub wseqiops: u64,
    /// Random writes of 4 KiB.
    pub wrandiops: u64,
}

impl LinearModel {
    fn values(&self) -> [u64; 6] {
        [self.rbps, self.rseqiops, self.rrandiops, self.wbps, self.wseqiops, self.wrandiops]
    }
}

/// Setting of `io.cost.model` for a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CostModel {
    /// The kernel's own choice, which it changes by itself. A device without a line has it.
    #[default]
    Auto,
    /// Coefficients that were set.
    User(LinearModel),
}

/// Latencies that io.cost keeps a device to, and how far it may change the device's rate for them.
/// The latency of a request is from its allocation to its end, less what its size costs. The rate
/// falls where too many are above, and where requests wait for a free slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QosTargets {
    /// Share of reads that are to take no longer than `rlat`; 0 for no such target.
    pub rpct: Hundredths,
    /// Longest latency of reads, us.
    pub rlat: u32,
    /// Share of writes that are to take no longer than `wlat`; 0 for no such target.
    pub wpct: Hundredths,
    /// Longest latency of writes, us.
    pub wlat: u32,
    /// Lowest rate, in parts of what the model says.
    pub min: Hundredths,
    /// Highest rate, in parts of what the model says.
    pub max: Hundredths,
}

/// Setting of `io.cost.qos` for a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CostQos {
    /// Whether io.cost controls the device.
    pub enable: bool,
    /// Targets that were set; `None` for the kernel's own. A device without a line has these, and
    /// is not controlled.
    pub targets: Option<QosTargets>,
}

impl fmt::Display for CostModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::User(model) = self else { return f.write_str("ctrl=auto") };
        f.write_str("ctrl=user model=linear")?;
        COEFFICIENTS.iter().zip(model.values()).try_for_each(|(key, value)| write!(f, " {key}={value}"))
    }
}

impl fmt::Display for CostQos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "enable={}", u8::from(self.enable))?;
        let Some(t) = &self.targets else { return f.write_str(" ctrl=auto") };
        write!(
            f,
            " ctrl=user rpct={} rlat={} wpct={} wlat={} min={} max={}",
            t.rpct, t.rlat, t.wpct, t.wlat, t.min, t.max
        )
    }
}

impl FromStr for CostModel {
    type Err = IoCostError;

    /// Reads a line's words. Values next to `ctrl=auto` are the kernel's own and count for nothing.
    fn from_str(text: &str) -> Result<Self, IoCostError> {
        let mut words = Words::new(text)?;
        words.one_of("model", &["linear"])?;
        let is_auto = words.one_of("ctrl", &["auto", "user"])? == Some("auto");
        let mut values = [0; 6];
        for (key, value) in COEFFICIENTS.into_iter().zip(&mut values) {
            let found = words.take(key).map(|v| number(key, v, u64::MAX)).transpose()?;
            *value = match found {
                Some(found) => found,
                None if is_auto => 0,
                None => return Err(IoCostError::Missing(key)),
            };
        }
        words.end()?;
        let [rbps, rseqiops, rrandiops, wbps, wseqiops, wrandiops] = values;
        let model = LinearModel { rbps, rseqiops, rrandiops, wbps, wseqiops, wrandiops };
        Ok(if is_auto { Self::Auto } else { Self::User(model) })
    }
}

impl FromStr for CostQos {
    type Err = IoCostError;

    /// Reads a line's words. Values next to `ctrl=auto` are the kernel's own and count for nothing.
    fn from_str(text: &str) -> Result<Self, IoCostError> {
        let mut words = Words::new(text)?;
        let enable = words.one_of("enable", &["0", "1"])?.ok_or(IoCostError::Missing("enable"))? == "1";
        let is_auto = words.one_of("ctrl", &["auto", "user"])? == Some("auto");
        let mut hundredths = |key: &'static str, range| match words.take(key) {
            Some(value) => share(key, value, range),
            None if is_auto => Ok(Hundredths(0)),
            None => Err(IoCostError::Missing(key)),
        };
        let [rpct, wpct] = [hundredths("rpct", (0, WHOLE))?, hundredths("wpct", (0, WHOLE))?];
        let [min, max] = [hundredths("min", RATES)?, hundredths("max", RATES)?];
        let mut latency = |key: &'static str| match words.take(key) {
            Some(value) => number(key, value, u32::MAX.into()).map(|us| us as u32),
            None if is_auto => Ok(0),
            None => Err(IoCostError::Missing(key)),
        };
        let [rlat, wlat] = [latency("rlat")?, latency("wlat")?];
        words.end()?;
        if min > max {
            return Err(IoCostError::Order);
        }
        let targets = QosTargets { rpct, rlat, wpct, wlat, min, max };
        Ok(Self { enable, targets: (!is_auto).then_some(targets) })
    }
}

/// Words `key=value` that are not used up yet.
struct Words<'t>(Vec<(&'t str, &'t str)>);

impl<'t> Words<'t> {
    fn new(text: &'t str) -> Result<Self, IoCostError> {
        let split = |word: &'t str| word.split_once('=').ok_or_else(|| IoCostError::Word(word.to_owned()));
        text.split_whitespace().map(split).collect::<Result<_, _>>().map(Self)
    }

    fn take(&mut self, key: &str) -> Option<&'t str> {
        let place = self.0.iter().position(|(k, _)| *k == key)?;
        Some(self.0.remove(place).1)
    }

    fn one_of(&mut self, key: &'static str, all: &[&str]) -> Result<Option<&'t str>, IoCostError> {
        match self.take(key) {
            Some(value) if !all.contains(&value) => Err(bad(key, value, "one of its words")),
            found => Ok(found),
        }
    }

    /// Refuses what no key has used up.
    fn end(self) -> Result<(), IoCostError> {
        self.0.first().map_or(Ok(()), |(key, value)| Err(IoCostError::Word(format!("{key}={value}"))))
    }
}

fn bad(key: &str, value: &str, expected: &'static str) -> IoCostError {
    IoCostError::Value { key: key.to_owned(), value: value.to_owned(), expected }
}

fn digits(text: &str) -> Option<u64> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?
}

fn number(key: &str, value: &str, most: u64) -> Result<u64, IoCostError> {
    digits(value).filter(|n| *n <= most).ok_or_else(|| bad(key, value, "a whole number in its range"))
}

/// A percentage with at most two decimals, which is all that the kernel takes.
fn share(key: &str, value: &str, (least, most): (u32, u32)) -> Result<Hundredths, IoCostError> {
    let expected = "a percentage in its range with at most two decimals";
    let (whole, part) = value.split_once('.').unwrap_or((value, "0"));
    let parsed = || {
        let part = if part.len() == 1 { digits(part)? * 10 } else { digits(part)? };
        let hundredths = digits(whole)?.checked_mul(100)?.checked_add(part)?;
        u32::try_from(hundredths).ok().filter(|n| (least..=most).contains(n))
    };
    let is_short = (1..=2).contains(&part.len());
    parsed().filter(|_| is_short).map(Hundredths).ok_or_else(|| bad(key, value, expected))
}

#[cfg(test)]
mod tests;
