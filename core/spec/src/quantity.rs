//! Values with a unit as text, and remedies for a missing or misspelt unit.

use std::str::FromStr;

use rtvirtio_units::{Bytes, BytesPerSec, Iops, Nanos, Percentile, Ratio, UnitError};
use toml::de::DeValue;

use crate::error::Report;
use crate::field::{Field, Section, kind, listing};
use crate::source::printable;
use crate::suggest::closest;

/// A unit newtype that can be the value of a key.
pub(crate) trait Quantity: FromStr<Err = UnitError> {
    /// A valid value, in quotes.
    const EXAMPLE: &'static str;
    /// Units that error messages suggest.
    const UNITS: &'static [&'static str];
    /// Units of other tools, with the spec's unit; whole values for types without units.
    const ALIASES: &'static [(&'static str, &'static str)];
    /// Likeliest text for a bare number.
    fn guess(number: &str) -> String;
    /// Valid text for a number whose unit has an unsupported prefix, such as `2k/s`.
    fn without_prefix(_number: &str, _unit: &str) -> Option<String> {
        None
    }
}

impl Quantity for Nanos {
    const EXAMPLE: &'static str = "\"400ms\"";
    const UNITS: &'static [&'static str] = &["ms", "us", "ns", "s", "min", "h"];
    const ALIASES: &'static [(&'static str, &'static str)] = &[
        ("msec", "ms"),
        ("millis", "ms"),
        ("milliseconds", "ms"),
        ("usec", "us"),
        ("µsec", "us"),
        ("micros", "us"),
        ("microseconds", "us"),
        ("nsec", "ns"),
        ("sec", "s"),
        ("secs", "s"),
        ("second", "s"),
        ("seconds", "s"),
    ];
    fn guess(number: &str) -> String {
        format!("{number}ms")
    }
}

impl Quantity for Bytes {
    const EXAMPLE: &'static str = "\"4KiB\"";
    const UNITS: &'static [&'static str] = &["KiB", "MiB", "GiB", "TiB", "B", "kB", "MB", "GB", "TB"];
    const ALIASES: &'static [(&'static str, &'static str)] = &[
        ("k", "KiB"),
        ("m", "MiB"),
        ("g", "GiB"),
        ("t", "TiB"),
        ("ki", "KiB"),
        ("mi", "MiB"),
        ("gi", "GiB"),
        ("byte", "B"),
        ("bytes", "B"),
    ];
    fn guess(number: &str) -> String {
        // A block of 4 bytes is a mistake.
        match number.parse::<u64>() {
            Ok(n) if n < 512 => format!("{n}KiB"),
            _ => format!("{number}B"),
        }
    }
}

/// Length of a frame: bare numbers are bytes, where those of a block are KiB.
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub(crate) struct FrameLength(pub(crate) Bytes);

impl FromStr for FrameLength {
    type Err = UnitError;
    fn from_str(text: &str) -> Result<Self, UnitError> {
        let expected = "a length such as \"140B\" or \"1514B\"";
        text.parse().map(Self).map_err(|e: UnitError| UnitError { expected, ..e })
    }
}

impl Quantity for FrameLength {
    const EXAMPLE: &'static str = "\"200B\"";
    const UNITS: &'static [&'static str] = Bytes::UNITS;
    const ALIASES: &'static [(&'static str, &'static str)] = Bytes::ALIASES;
    fn guess(number: &str) -> String {
        format!("{number}B")
    }
}

impl Quantity for Iops {
    const EXAMPLE: &'static str = "\"100/s\"";
    const UNITS: &'static [&'static str] = &["/s", "/min", "/ms"];
    const ALIASES: &'static [(&'static str, &'static str)] = &[
        ("io/s", "/s"),
        ("rps", "/s"),
        ("s", "/s"),
        ("per second", "/s"),
        ("/sec", "/s"),
        ("/second", "/s"),
        ("hz", "/s"),
        ("/m", "/min"),
        ("/minute", "/min"),
    ];
    fn guess(number: &str) -> String {
        format!("{number}/s")
    }
    fn without_prefix(number: &str, unit: &str) -> Option<String> {
        let mut rest = unit.chars();
        let factor = match rest.next()? {
            'k' | 'K' => 1e3,
            'm' | 'M' => 1e6,
            _ => return None,
        };
        let per = rest.as_str();
        let ours = Self::UNITS.contains(&per)
            || Self::ALIASES.iter().any(|(from, _)| from.eq_ignore_ascii_case(per))
            || format!("1{per}").parse::<Self>().is_ok();
        // `2k` is a rate per second; `2 ms` and `2 min` are not rates with a prefix.
        let is_rate = per.is_empty() && factor < 1e6 || ours && !per.eq_ignore_ascii_case("s");
        let rate: f64 = number.replace('_', "").parse().ok()?;
        let per = if Self::UNITS.contains(&per) { per } else { "/s" };
        is_rate.then(|| format!("{}{per}", rate * factor))
    }
}

impl Quantity for BytesPerSec {
    const EXAMPLE: &'static str = "\"100Mbit/s\"";
    const UNITS: &'static [&'static str] =
        &["Mbit/s", "Gbit/s", "kbit/s", "bit/s", "MB/s", "MiB/s", "kB/s", "KiB/s", "GB/s", "GiB/s", "B/s"];
    const ALIASES: &'static [(&'static str, &'static str)] = &[
        ("mbps", "Mbit/s"),
        ("gbps", "Gbit/s"),
        ("kbps", "kbit/s"),
        ("bps", "bit/s"),
        ("mbit", "Mbit/s"),
        ("gbit", "Gbit/s"),
        ("kbit", "kbit/s"),
        ("m", "Mbit/s"),
        ("g", "Gbit/s"),
    ];
    fn guess(number: &str) -> String {
        format!("{number}Mbit/s")
    }
}

impl Quantity for Ratio {
    const EXAMPLE: &'static str = "\"30%\"";
    const UNITS: &'static [&'static str] = &["%"];
    const ALIASES: &'static [(&'static str, &'static str)] = &[("percent", "%"), ("pct", "%")];
    fn guess(number: &str) -> String {
        match number.parse::<f64>() {
            Ok(share) if share > 0.0 && share < 1.0 => Ratio(share).to_string(),
            _ => format!("{number}%"),
        }
    }
}

impl Quantity for Percentile {
    const EXAMPLE: &'static str = "\"p99.99\"";
    const UNITS: &'static [&'static str] = &[];
    const ALIASES: &'static [(&'static str, &'static str)] =
        &[("p999", "p99.9"), ("p9999", "p99.99"), ("p99999", "p99.999"), ("median", "p50")];
    fn guess(number: &str) -> String {
        match number.parse::<f64>() {
            Ok(share) if share > 0.0 && share < 1.0 => of_share(share),
            _ => format!("p{number}"),
        }
    }
}

/// Percentile for a share of all requests: `p99.9` for 0.999.
fn of_share(share: f64) -> String {
    // Rounded to hide the representation error: 99.9, not 99.90000000000001.
    format!("p{}", (share * 1e10).round() / 1e8)
}

impl<'t> Section<'t, '_> {
    /// Reads a value with a unit; also returns its text, for messages about its range.
    pub(crate) fn quantity<Q: Quantity>(&self, report: &mut Report<'_>, key: &str) -> Field<(Q, &'t str)> {
        let (place, value) = match self.get(key) {
            None => return self.absent(key),
            Some(found) => found,
        };
        let (message, help) = match value {
            DeValue::String(text) => match text.parse::<Q>() {
                Ok(quantity) => return Field::Given((quantity, text)),
                Err(e) => (format!("`{key}`: {}", printable(&e.problem, 80)), remedy::<Q>(key, text, &e)),
            },
            DeValue::Integer(_) | DeValue::Float(_) => {
                let number = match value {
                    DeValue::Integer(n) if n.radix() == 10 => n.as_str().to_owned(),
                    DeValue::Float(n) => n.as_str().to_owned(),
                    _ => String::new(),
                };
                let form = if Q::UNITS.is_empty() { "a string" } else { "a string with its unit" };
                let message = format!("`{key}` must be {form}, not {}", kind(value));
                let good = number_with_unit::<Q>(&number).unwrap_or_else(|| Q::EXAMPLE.to_owned());
                (message, format!("write {key} = {good}"))
            }
            other => (
                format!("`{key}` must be a string, not {}", kind(other)),
                format!("write {key} = {}", Q::EXAMPLE),
            ),
        };
        report.add(place.value, message, help);
        Field::Bad
    }

    /// Reads a value with a unit within a range, which `help` names.
    pub(crate) fn ranged<Q: Quantity + PartialOrd>(
        &self,
        report: &mut Report<'_>,
        key: &str,
        [least, most]: [Q; 2],
        help: impl Into<String>,
    ) -> Field<Q> {
        self.quantity::<Q>(report, key).and_then(|(value, text)| {
            if value >= least && value <= most {
                return Field::Given(value);
            }
            let message = format!("`{key}` is {}, out of its range", printable(text, 60));
            report.add(self.value_span(key), message, help);
            Field::Bad
        })
    }
}

/// Quoted text for a bare positive decimal number; `None` if that is no valid value.
fn number_with_unit<Q: Quantity>(number: &str) -> Option<String> {
    let text = Q::guess(number.trim_start_matches('+'));
    text.parse::<Q>().is_ok().then(|| format!("\"{text}\""))
}

/// Remedy for `text`, which is not a valid `Q`.
fn remedy<Q: Quantity>(key: &str, text: &str, error: &UnitError) -> String {
    let text = text.trim();
    let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.' || c == '_')).unwrap_or(text.len());
    let (number, unit) = (&text[..split], text[split..].trim());
    if unit.is_empty() || Q::UNITS.is_empty() {
        if let Some(good) = number_with_unit::<Q>(number) {
            return format!("write {key} = {good}");
        }
    }
    if let Some(good) = Q::without_prefix(number, unit) {
        if good.parse::<Q>().is_ok() {
            return format!("did you mean \"{good}\"?");
        }
    }
    if Q::UNITS.is_empty() {
        // Also handles `p0.999` and `99.9%`.
        if let Some(good) = number_with_unit::<Q>(text.trim_start_matches(['p', 'P']).trim_end_matches('%')) {
            return format!("write {key} = {good}");
        }
        if let Some((_, good)) = Q::ALIASES.iter().find(|(from, _)| from.eq_ignore_ascii_case(text)) {
            return format!("did you mean \"{good}\"?");
        }
    }
    let alias = Q::ALIASES.iter().find(|(from, _)| from.eq_ignore_ascii_case(unit)).map(|(_, to)| *to);
    if let Some(unit) = alias.or_else(|| closest(unit, Q::UNITS.iter().copied())) {
        let good = format!("{number}{unit}");
        if !number.is_empty() && good.parse::<Q>().is_ok() {
            return format!("did you mean \"{good}\"?");
        }
    }
    match Q::UNITS {
        [] => format!("write {}", error.expected),
        units => format!("write {}; units are {}", error.expected, listing(units, "and")),
    }
}
