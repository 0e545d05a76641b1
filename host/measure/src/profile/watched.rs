//! Points of a profile less the host's own stalls: latencies of the device, and not of the machine
//! around it.

use std::path::{Path, PathBuf};

use rtvirtio_stats::Latencies;
use rtvirtio_units::Nanos;

use crate::MeasureError;
use crate::fio::{LogClock, escaped, parse_log};
use crate::stalls::Stalls;

/// Prefix of the logs' names.
const LOG: &str = "profile";

/// Options of fio for logs by the machine's clock.
pub(super) fn log_options(dir: &Path) -> String {
    format!("{}write_lat_log={}\n", LogClock::Monotonic.options(), escaped(&dir.join(LOG)))
}

/// Path of the log of each of `n` sections.
pub(super) fn log_paths(dir: &Path, n: usize) -> Vec<Option<PathBuf>> {
    (1..=n).map(|i| Some(dir.join(format!("{LOG}_lat.{i}.log")))).collect()
}

/// Latencies of a section less the stalls during them. The log's time is the completion rounded
/// down to 1 ms; assuming the middle, the error is at most half of that.
pub(super) fn latencies(point: &str, log: &[u8], stalls: &Stalls) -> Result<Latencies, MeasureError> {
    let samples = parse_log(point, log, LogClock::Monotonic)?;
    let less = samples.iter().map(|s| {
        let done = s.time_ms * 1_000_000 + 500_000;
        Nanos(s.lat_ns - stalls.within(done.saturating_sub(s.lat_ns), done).min(s.lat_ns))
    });
    Ok(less.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rtvirtio_units::Percentile;

    #[test]
    fn stalls_are_taken_off_where_they_fell() {
        // Three requests of 0.1, 5 and 0.1 ms that end at 10, 16 and 17 s of uptime; the host
        // stalled in the second.
        let log = b"10000, 100000, 0, 4096, 0\n16000, 5000000, 0, 4096, 0\n17000, 100000, 0, 4096, 0\n";
        let stalls = Stalls::union(vec![(15_996_000_000, 15_999_000_000)]);
        let less = latencies("p", log, &stalls).unwrap();
        assert_eq!(less.n(), 3);
        let (middle, most) = (less.at(Percentile(50.0)).0, less.at(Percentile(100.0)).0);
        assert!(middle.abs_diff(100_000) < 1_000 && most.abs_diff(2_000_000) < 10_000, "{middle} {most}");
        let reported = latencies("reads at depth 1", b"x\n", &stalls).unwrap_err().to_string();
        assert!(reported.contains("reads at depth 1"), "{reported}");
    }
}
