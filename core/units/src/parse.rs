//! Text to number: a decimal value and a unit, nothing else.

use std::fmt;

/// A text that is not a value with a unit. Has the expected form; the caller adds the place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnitError {
    /// Form of a correct text, with examples.
    pub expected: &'static str,
    /// The fault of the text.
    pub problem: String,
}

impl fmt::Display for UnitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; expected {}", self.problem, self.expected)
    }
}

impl std::error::Error for UnitError {}

const DURATION: &str = "a duration such as \"300ms\", \"50us\" or \"2s\"";
const SIZE: &str = "a size such as \"4KiB\", \"1MiB\" or \"512B\"";
const RATE: &str = "a request rate such as \"500/s\" or \"30000/min\"";
const BANDWIDTH: &str = "a data rate such as \"70MB/s\", \"16MiB/s\" or \"100Mbit/s\"";
const RATIO: &str = "a share such as \"30%\" or \"0.5%\"";
const PERCENTILE: &str = "a percentile such as \"p99.99\" or \"p50\"";

/// Splits "12.5ms" into (12.5, "ms") and multiplies by the unit's factor.
fn scaled(
    text: &str,
    expected: &'static str,
    factor: impl Fn(&str) -> Option<f64>,
) -> Result<f64, UnitError> {
    let err = |problem: String| UnitError { expected, problem };
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(text.len());
    let (number, unit) = (&text[..split], text[split..].trim());
    if number.is_empty() {
        return Err(err(if text.starts_with('-') {
            format!("\"{text}\" is negative")
        } else {
            format!("\"{text}\" does not start with a number")
        }));
    }
    let value: f64 =
        number.replace('_', "").parse().map_err(|_| err(format!("\"{number}\" is not a number")))?;
    if unit.is_empty() {
        return Err(err(format!("\"{text}\" has no unit")));
    }
    let factor = factor(unit).ok_or_else(|| err(format!("\"{unit}\" is not a known unit")))?;
    // Hundreds of digits.
    let scaled = value * factor;
    if scaled.is_finite() { Ok(scaled) } else { Err(err(format!("\"{text}\" is too large"))) }
}

/// Like `scaled`, rounded to a whole number of base units that must fit 2^53, where f64 is exact.
fn whole(text: &str, expected: &'static str, factor: impl Fn(&str) -> Option<f64>) -> Result<u64, UnitError> {
    let v = scaled(text, expected, factor)?;
    if v > 9.0e15 {
        return Err(UnitError { expected, problem: format!("\"{text}\" is too large") });
    }
    Ok(v.round() as u64)
}

pub(crate) fn duration(text: &str) -> Result<u64, UnitError> {
    whole(text, DURATION, |u| {
        Some(match u {
            "ns" => 1.0,
            "us" | "µs" | "μs" => 1e3,
            "ms" => 1e6,
            "s" => 1e9,
            "min" | "m" => 60e9,
            "h" => 3600e9,
            _ => return None,
        })
    })
}

fn byte_factor(unit: &str) -> Option<f64> {
    Some(match unit {
        "B" => 1.0,
        "kB" | "KB" => 1e3,
        "MB" => 1e6,
        "GB" => 1e9,
        "TB" => 1e12,
        "KiB" => 1024.0,
        "MiB" => 1024.0 * 1024.0,
        "GiB" => 1024.0 * 1024.0 * 1024.0,
        "TiB" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        _ => return None,
    })
}

/// Bytes in a unit of bits; networks count in powers of ten.
fn bit_factor(unit: &str) -> Option<f64> {
    Some(match unit {
        "bit" => 0.125,
        "kbit" => 125.0,
        "Mbit" => 125e3,
        "Gbit" => 125e6,
        _ => return None,
    })
}

pub(crate) fn size(text: &str) -> Result<u64, UnitError> {
    whole(text, SIZE, byte_factor)
}

pub(crate) fn rate(text: &str) -> Result<f64, UnitError> {
    scaled(text, RATE, |u| match u {
        "/s" => Some(1.0),
        "/min" => Some(1.0 / 60.0),
        "/ms" => Some(1e3),
        // Neither has a prefix here that case could change.
        _ if ["hz", "iops"].iter().any(|name| name.eq_ignore_ascii_case(u)) => Some(1.0),
        _ => None,
    })
}

pub(crate) fn bandwidth(text: &str) -> Result<f64, UnitError> {
    scaled(text, BANDWIDTH, |u| {
        let unit = u.strip_suffix("/s")?;
        byte_factor(unit).or_else(|| bit_factor(unit))
    })
}

pub(crate) fn ratio(text: &str) -> Result<f64, UnitError> {
    scaled(text, RATIO, |u| (u == "%").then_some(0.01))
}

pub(crate) fn percentile(text: &str) -> Result<f64, UnitError> {
    let err = |problem: String| UnitError { expected: PERCENTILE, problem };
    let digits =
        text.trim().strip_prefix('p').ok_or_else(|| err(format!("\"{text}\" does not start with \"p\"")))?;
    let v: f64 = digits.parse().map_err(|_| err(format!("\"{digits}\" is not a number")))?;
    // Below p1 it is a share, as in `p0.999` for p99.9: a target that any device meets.
    if (1.0..100.0).contains(&v) { Ok(v) } else { Err(err(format!("\"{text}\" is not between p1 and p100"))) }
}
