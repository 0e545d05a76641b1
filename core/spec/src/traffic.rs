//! `traffic` of a VM: rate, burst and peak for each direction (RFC 2215's TSPEC).

use rtvirtio_units::{Bytes, BytesPerSec, Iops};
use serde::Serialize;
use toml::de::DeTable;

use crate::error::Report;
use crate::field::{Field, Place, Section, quoted};

/// Limits of a VM's traffic; each direction is limited separately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Limit of reads from disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read: Option<TrafficSpec>,
    /// Limit of writes to disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write: Option<TrafficSpec>,
    /// Limit of frames received from networks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rx: Option<TrafficSpec>,
    /// Limit of frames sent to networks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tx: Option<TrafficSpec>,
}

impl Traffic {
    /// Whether no direction is limited.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// Unit of a traffic limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TrafficUnit {
    /// Bytes of data.
    Bytes,
    /// Requests of disks, frames of networks.
    Requests,
}

/// Limit of one direction: in any time t at most `min(peak t + one unit, rate t + burst)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TrafficSpec {
    /// Unit of all numbers.
    pub unit: TrafficUnit,
    /// Long-run rate per second; bytes are rounded down: a limit is never more than asked.
    pub rate: u64,
    /// Amount beyond the rate that may come at once; `None` for one request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
    /// Largest rate per second within the burst; `None` for no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peak: Option<u64>,
    /// Requests or frames besides, where `unit` is bytes; `None` for no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<RequestLimit>,
}

impl TrafficSpec {
    /// A rate with a burst of one unit, and no peak.
    #[must_use]
    pub fn new(unit: TrafficUnit, rate: u64) -> Self {
        Self { unit, rate, burst: None, peak: None, requests: None }
    }
}

/// A limit on requests or frames next to the one on bytes; both hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RequestLimit {
    /// Per second in the long run.
    pub rate: u64,
    /// Beyond the rate; `None` for one request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<u64>,
}

const DIRECTIONS: [&str; 4] = ["read", "write", "rx", "tx"];
const KEYS: &[&str] = &["rate", "burst", "peak", "iops", "iops_burst"];
const ALL_KEYS: &[&str] = &["read", "write", "rx", "tx", "rate", "burst", "peak", "iops", "iops_burst"];
const ALIASES: &[(&str, &str)] = &[
    ("average", "rate"),
    ("avg", "rate"),
    ("bps", "rate"),
    ("requests", "iops"),
    ("frames", "iops"),
    ("max", "peak"),
    ("ceil", "peak"),
    ("receive", "rx"),
    ("inbound", "rx"),
    ("transmit", "tx"),
    ("outbound", "tx"),
    ("r", "rate"),
    ("b", "burst"),
    ("p", "peak"),
];
const EXAMPLE: &str = "write traffic = { rate = \"20MB/s\", burst = \"1MiB\", peak = \"80MB/s\" }, or a table of these for read, write, rx or tx";
/// Ranges of rates: the upper ends exceed any device of today.
const BYTES_RANGE: [f64; 2] = [512.0, 1e12];
const REQUESTS_RANGE: [f64; 2] = [1.0, 10e6];
/// Largest burst of the I/O domain's regulators.
const MAX_BURST: u64 = 1 << 34;

/// Reads `traffic`; no limits without it, `None` when an error was reported.
pub(crate) fn read(report: &mut Report<'_>, vm: &Section<'_, '_>) -> Option<Traffic> {
    let found = vm.table(report, "traffic", EXAMPLE);
    found.and_then(|(place, table)| of_table(report, table, place).into()).or(Traffic::default())
}

fn of_table(report: &mut Report<'_>, table: &DeTable<'_>, place: Place) -> Option<Traffic> {
    let section = Section::open(report, "traffic", table, place.value.clone(), ALL_KEYS, ALIASES);
    let has = |keys: &[&str]| keys.iter().any(|key| section.place(key).is_some());
    let traffic = match (has(&DIRECTIONS), has(KEYS)) {
        (true, true) => {
            let help = "write one rate for every direction, or a table for each of read, write, rx and tx";
            report.add(place.value, "`traffic` has a rate of its own and directions with theirs", help);
            None
        }
        (false, true) => read_limit(report, &section).map(Some).map(|every| Traffic {
            read: every,
            write: every,
            rx: every,
            tx: every,
        }),
        (true, false) => {
            let mut of = |key: &'static str| direction(report, &section, key);
            let [read, write, rx, tx] = DIRECTIONS.map(&mut of);
            Some(Traffic { read: read?, write: write?, rx: rx?, tx: tx? })
        }
        // Unknown keys were reported already.
        (false, false) if !section.known => None,
        (false, false) => {
            report.add(place.value, "`traffic` is empty", EXAMPLE);
            None
        }
    };
    traffic.filter(|_| section.known)
}

fn direction(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    key: &'static str,
) -> Option<Option<TrafficSpec>> {
    let help = format!("write {key} = {{ rate = \"20MB/s\", burst = \"1MiB\" }}");
    let limit = section.table(report, key, help).and_then(|(place, table)| {
        let section = Section::open(report, "traffic", table, place.value, KEYS, ALIASES);
        read_limit(report, &section).filter(|_| section.known).into()
    });
    limit.optional()
}

/// Reads a rate in its unit, not rounded.
fn per_second(report: &mut Report<'_>, section: &Section<'_, '_>, key: &str) -> Field<(TrafficUnit, f64)> {
    section.string(report, key, "\"20MB/s\"").and_then(|text| {
        let bytes = text.parse::<BytesPerSec>().map(|rate| (TrafficUnit::Bytes, rate.0));
        let rate = bytes.or_else(|_| text.parse::<Iops>().map(|rate| (TrafficUnit::Requests, rate.0)));
        let at = section.value_span(key);
        let Ok((unit, rate)) = rate else {
            let message = format!("`{key}` {} is neither bytes nor requests per second", quoted(text));
            report.add(at, message, format!("write {key} = \"20MB/s\" or {key} = \"500/s\""));
            return Field::Bad;
        };
        let [least, most] = if unit == TrafficUnit::Bytes { BYTES_RANGE } else { REQUESTS_RANGE };
        if !(least..=most).contains(&rate) {
            let message = format!("`{key}` is {}, out of its range", quoted(text));
            report.add(at, message, "write 512B/s to 1TB/s, or 1/s to 10000000/s");
            return Field::Bad;
        }
        // Conversion of "30000/min" may have a rounding error.
        let whole = rate.round();
        if unit == TrafficUnit::Requests && (whole - rate).abs() > rate * 1e-9 {
            let message = format!("`{key}` {} is no whole number per second", quoted(text));
            let help = format!("the kernel counts whole requests: write {key} = \"{}/s\"", rate as u64);
            report.add(at, message, help);
            return Field::Bad;
        }
        Field::Given((unit, if unit == TrafficUnit::Requests { whole } else { rate }))
    })
}

fn read_limit(report: &mut Report<'_>, section: &Section<'_, '_>) -> Option<TrafficSpec> {
    let requests = requests(report, section);
    if section.place("rate").is_none() && section.place("iops").is_some() {
        let RequestLimit { rate, burst } = requests??;
        if let Some(key) = ["burst", "peak"].into_iter().find(|key| section.place(key).is_some()) {
            let help = "give `rate`, to which it belongs, or `iops_burst` instead of it";
            report.add(section.value_span(key), format!("`{key}` without `rate`"), help);
            return None;
        }
        return Some(TrafficSpec { burst, ..TrafficSpec::new(TrafficUnit::Requests, rate) });
    }
    let rate = per_second(report, section, "rate");
    let rate = section.required(report, "rate", "\"20MB/s\"", rate).into_value();
    let peak = per_second(report, section, "peak").optional();
    let (unit, rate) = rate?;
    let burst = burst(report, section, unit).optional();
    let (peak, burst, requests) = (peak?, burst?, requests?);
    if unit == TrafficUnit::Requests && requests.is_some() {
        let help = "give `rate` in bytes per second, or leave `iops` out";
        report.add(section.value_span("iops"), "`rate` and `iops` both count requests", help);
        return None;
    }
    if let Some((of_peak, peak)) = peak {
        if of_peak != unit {
            let help = "write both in bytes per second, or both in requests per second";
            report.add(section.value_span("peak"), "`peak` and `rate` count different things", help);
            return None;
        }
        if peak < rate {
            let help = "a peak is the largest rate within a burst: write at least the rate, or leave it out";
            report.add(section.value_span("peak"), "`peak` is below the rate", help);
            return None;
        }
    }
    let peak = peak.map(|(_, peak)| peak as u64);
    Some(TrafficSpec { unit, rate: rate as u64, burst, peak, requests })
}

/// `iops` and its burst; the inner `None` without them.
fn requests(report: &mut Report<'_>, section: &Section<'_, '_>) -> Option<Option<RequestLimit>> {
    let rate = per_second(report, section, "iops").and_then(|(unit, rate)| {
        if unit == TrafficUnit::Requests {
            return Field::Given(rate as u64);
        }
        let help = "write iops = \"3000/s\"; bytes per second are `rate`";
        report.add(section.value_span("iops"), "`iops` is in bytes per second", help);
        Field::Bad
    });
    let burst = section.integer(report, "iops_burst", 1, u32::MAX).optional();
    match (rate.optional()?, burst?) {
        (Some(rate), burst) => Some(Some(RequestLimit { rate, burst: burst.map(u64::from) })),
        (None, None) => Some(None),
        (None, Some(_)) => {
            let help = "write iops = \"3000/s\" with it, or leave it out";
            report.add(section.value_span("iops_burst"), "`iops_burst` without `iops`", help);
            None
        }
    }
}

/// Reads a burst: a size for bytes, a whole number for requests.
fn burst(report: &mut Report<'_>, section: &Section<'_, '_>, unit: TrafficUnit) -> Field<u64> {
    if unit == TrafficUnit::Requests {
        return section.integer(report, "burst", 1, u32::MAX).map(u64::from);
    }
    section.quantity::<Bytes>(report, "burst").and_then(|(size, text)| {
        if (512..=MAX_BURST).contains(&size.0) {
            return Field::Given(size.0);
        }
        let message = format!("`burst` is {}, out of its range", quoted(text));
        report.add(section.value_span("burst"), message, "write a size from 512B to 16GiB");
        Field::Bad
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse;

    fn of(traffic: &str) -> Result<Traffic, String> {
        let text = format!(
            "[device]\ntwin = \"emmc\"\n[[vm]]\nname = \"a\"\nlab = \"process\"\n{traffic}\n\
             [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
        );
        let spec = parse("s.toml", &text)
            .map_err(|e| format!("{} {}", e.errors()[0].message, e.errors()[0].help))?;
        Ok(spec.vms[0].traffic)
    }

    fn bytes(rate: u64, burst: Option<u64>, peak: Option<u64>) -> TrafficSpec {
        TrafficSpec { burst, peak, ..TrafficSpec::new(TrafficUnit::Bytes, rate) }
    }

    #[test]
    fn one_table_is_for_every_direction_and_four_are_for_one_each() {
        let every = of("traffic = { rate = \"20MB/s\", burst = \"1MiB\", peak = \"80MB/s\" }").unwrap();
        let one = bytes(20_000_000, Some(1 << 20), Some(80_000_000));
        assert_eq!(every, Traffic { read: Some(one), write: Some(one), rx: Some(one), tx: Some(one) });
        let two = of("traffic.read = { rate = \"500/s\", burst = 16 }\ntraffic.tx = { rate = \"8Mbit/s\" }")
            .unwrap();
        let reads = TrafficSpec { burst: Some(16), ..TrafficSpec::new(TrafficUnit::Requests, 500) };
        assert_eq!(
            two,
            Traffic { read: Some(reads), tx: Some(bytes(1_000_000, None, None)), ..Traffic::default() }
        );
        assert!(of("").unwrap().is_none());
        assert_eq!(of("traffic.read = { rate = \"120/min\" }").unwrap().read.unwrap().rate, 2);
    }

    #[test]
    fn bytes_and_requests_together_are_one_limit() {
        let limit = |text: &str| of(&format!("traffic.read = {{ {text} }}")).unwrap().read.unwrap();
        let both = limit("rate = \"50MB/s\", burst = \"1MiB\", iops = \"3000/s\"");
        let requests = Some(RequestLimit { rate: 3_000, burst: None });
        assert_eq!(both, TrafficSpec { requests, ..bytes(50_000_000, Some(1 << 20), None) });
        let burst = limit("rate = \"50MB/s\", iops = \"180000/min\", iops_burst = 32").requests;
        assert_eq!(burst, Some(RequestLimit { rate: 3_000, burst: Some(32) }));
        // Without bytes it is the rate.
        let alone = limit("iops = \"3000/s\", iops_burst = 32");
        assert_eq!(alone, limit("rate = \"3000/s\", burst = 32"));
        let every = of("traffic = { rate = \"1MB/s\", iops = \"9/s\" }").unwrap();
        assert!(
            [every.read, every.write, every.rx, every.tx].iter().all(|of| of.unwrap().requests.is_some())
        );
    }

    #[test]
    fn mistakes_have_a_remedy() {
        for (text, says) in [
            ("traffic = {}", "is empty"),
            ("traffic = \"20MB/s\"", "must be a table"),
            ("traffic = { rate = \"20MB/s\", read = { rate = \"1MB/s\" } }", "directions with theirs"),
            ("traffic = { burst = \"1MiB\" }", "no `rate`"),
            ("traffic = { rate = \"20\" }", "rate = \"20MB/s\""),
            ("traffic = { rate = \"20MB/s\", peak = \"100/s\" }", "different things"),
            ("traffic = { rate = \"20MB/s\", peak = \"10MB/s\" }", "below the rate"),
            ("traffic = { rate = \"20MB/s\", burst = 5 }", "string with its unit"),
            ("traffic = { rate = \"20/s\", burst = \"1MiB\" }", "must be an integer"),
            ("traffic = { rate = \"1B/s\" }", "out of its range"),
            ("traffic = { rate = \"1/min\" }", "out of its range"),
            ("traffic = { rate = \"100/min\" }", "write rate = \"1/s\""),
            ("traffic = { rate = \"20MB/s\", burst = \"17GiB\" }", "16GiB"),
            ("traffic.read = { average = \"20MB/s\" }", "`rate`"),
            ("traffic.inbound = { rate = \"20MB/s\" }", "`rx`"),
            ("traffic.rx = 5", "must be a table"),
            ("traffic.read = { rate = \"9/s\", iops = \"5/s\" }", "both count requests"),
            ("traffic.read = { rate = \"9MB/s\", iops = \"5MB/s\" }", "bytes per second are `rate`"),
            ("traffic.read = { rate = \"9MB/s\", iops = \"0/s\" }", "`iops` is"),
            ("traffic.read = { rate = \"9MB/s\", iops = \"100/min\" }", "write iops = \"1/s\""),
            ("traffic.read = { rate = \"9MB/s\", iops = 5 }", "`iops`"),
            ("traffic.read = { rate = \"9MB/s\", iops_burst = 5 }", "`iops_burst` without `iops`"),
            ("traffic.read = { rate = \"9MB/s\", iops = \"5/s\", iops_burst = 0 }", "`iops_burst`"),
            ("traffic.read = { iops = \"5/s\", burst = \"1MiB\" }", "`burst` without `rate`"),
            ("traffic.read = { rate = \"9MB/s\", iops = [\"5/s\"] }", "`iops`"),
            ("traffic = { iops = \"5/s\", read = { rate = \"1MB/s\" } }", "directions with theirs"),
        ] {
            let error = of(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
