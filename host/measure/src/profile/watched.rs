//! Points of a profile without the host's own stalls: what the device does, and not what the
//! machine around it does.

use std::path::{Path, PathBuf};

use rtvirtio_stats::Latencies;
use rtvirtio_units::Nanos;

use crate::MeasureError;
use crate::fio::{LogClock, escaped, parse_log};
use crate::stalls::Stalls;

/// What the logs' names begin with.
const LOG: &str = "profile";

/// fio's options for logs by the machine's clock.
pub(super) fn log_options(dir: &Path) -> String {
    format!("{}write_lat_log={}\n", LogClock::Monotonic.options(), escaped(&dir.join(LOG)))
}

/// Where fio writes the log of each of `n` sections.
pub(super) fn log_paths(dir: &Path, n: usize) -> Vec<Option<PathBuf>> {
    (1..=n).map(|i| Some(dir.join(format!("{LOG}_lat.{i}.log")))).collect()
}

/// Latencies of a section less the stalls that fell into them. The log's time is the completion
/// rounded down to 1 ms; in the middle of it the error is half of that at most.
///
/// # Errors
/// [`MeasureError::Log`].
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
        // Three requests of 0.1, 5 and 0.1 ms that end at 10, 16 and 17 s of uptime; the host stood
        // still in the second.
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
