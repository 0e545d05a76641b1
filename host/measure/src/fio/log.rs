//! fio's latency log: one line per completed request.

use super::LogClock;
use crate::MeasureError;

/// Largest log accepted, in bytes: 10 h at 500/s are 0.5 GiB.
const MAX_BYTES: usize = 512 << 20;
/// Largest time stamp: 30 days in ms. Beyond it the arithmetic in nanoseconds could overflow.
const MAX_TIME_MS: u64 = 30 * 24 * 3_600_000;
/// Largest time stamp of CLOCK_MONOTONIC: 100 years of uptime.
const MAX_UP_MS: u64 = 100 * 366 * 24 * 3_600_000;
/// Largest latency: 30 days in ns.
const MAX_LAT_NS: u64 = MAX_TIME_MS * 1_000_000;

/// Completed request of a latency log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// Completion in whole ms (rounded down) of the log's clock.
    pub time_ms: u64,
    /// Latency counted by fio: from when fio made the request, which may be later than intended.
    pub lat_ns: u64,
    pub write: bool,
    /// Size of the request.
    pub bytes: u64,
}

/// Parses a latency log (`write_lat_log` without averaging). Lines are `time, latency, direction,
/// block size, ...`; fio 3.33 adds the priority, newer versions may add an offset and an issue time
/// as well: further columns are only checked to be numbers. (fio's HOWTO, "Log File Formats".)
///
/// # Errors
/// [`MeasureError::Log`] with the line number for anything else; [`MeasureError::TooBig`].
pub fn parse_log(task: &str, bytes: &[u8], clock: LogClock) -> Result<Vec<Sample>, MeasureError> {
    if bytes.len() > MAX_BYTES {
        return Err(MeasureError::TooBig {
            what: format!("latency log of task {task}"),
            limit: MAX_BYTES as u64,
        });
    }
    let latest = if clock == LogClock::Monotonic { MAX_UP_MS } else { MAX_TIME_MS };
    let mut samples = Vec::with_capacity((bytes.len() / 20).min(1 << 20));
    for (i, line) in bytes.split(|b| *b == b'\n').enumerate() {
        if line.is_empty() {
            continue;
        }
        samples.push(parse_line(line, latest).map_err(|reason| MeasureError::Log {
            task: task.to_owned(),
            line: i + 1,
            reason,
        })?);
    }
    Ok(samples)
}

fn parse_line(line: &[u8], latest: u64) -> Result<Sample, String> {
    let text = std::str::from_utf8(line).map_err(|_| "not text".to_owned())?;
    let mut fields = text.split(',').map(str::trim);
    let mut number = |name: &str, max: u64| -> Result<u64, String> {
        let field = fields.next().ok_or_else(|| format!("no {name}"))?;
        match field.parse::<u64>() {
            Ok(v) if v <= max => Ok(v),
            Ok(v) => Err(format!("{name} {v} is out of range")),
            Err(_) => Err(format!("{name} {field:?} is not a number")),
        }
    };
    let time_ms = number("time", latest)?;
    let lat_ns = number("latency", MAX_LAT_NS)?;
    let write = number("direction", 1)? == 1;
    let bytes = number("block size", MAX_BYTES as u64)?;
    let mut more = 0;
    for field in fields {
        more += 1;
        let numeric = match field.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).is_ok(),
            None => field.parse::<u64>().is_ok(),
        };
        if !numeric || more > 4 {
            return Err(format!("unexpected column {field:?}"));
        }
    }
    Ok(Sample { time_ms, lat_ns, write, bytes })
}
