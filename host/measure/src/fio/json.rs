//! fio's JSON output (`json+`): counts, errors and the latency histogram of each section.

use std::collections::BTreeMap;

use rtvirtio_units::Nanos;
use serde::Deserialize;

use crate::MeasureError;

/// Largest JSON output accepted, in bytes. fio's histogram has at most 1856 bins per direction, so
/// real output is far below.
const MAX_BYTES: usize = 64 << 20;

/// Section in fio's JSON output.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct JobStats {
    /// Name of the section.
    pub jobname: String,
    /// `errno` of the first error, else zero.
    #[serde(default)]
    pub error: i32,
    /// Wall time in ms, without ramp.
    #[serde(default)]
    pub job_runtime: u64,
    /// CPU time in user mode, percent of one CPU.
    #[serde(default)]
    pub usr_cpu: f64,
    /// CPU time in the kernel, percent of one CPU.
    #[serde(default)]
    pub sys_cpu: f64,
    /// Statistics of its reads.
    pub read: Direction,
    /// Statistics of its writes.
    pub write: Direction,
}

/// Direction of a section in fio's JSON output.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct Direction {
    /// Number of completed requests.
    pub total_ios: u64,
    /// Wall time of this direction in ms.
    #[serde(default)]
    pub runtime: u64,
    /// Requests per second by fio's own count.
    #[serde(default)]
    pub iops: f64,
    /// Latency from submission to completion.
    #[serde(default)]
    lat_ns: Lat,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
struct Lat {
    max: u64,
    bins: BTreeMap<String, u64>,
}

#[derive(Deserialize)]
struct Output {
    jobs: Vec<JobStats>,
}

impl Direction {
    /// Largest latency, exact, unlike the bins.
    #[must_use]
    pub fn max(&self) -> Nanos {
        Nanos(self.lat_ns.max)
    }

    /// Latency histogram: bin value and count, in rising order. A bin is known to about 1.6 %
    /// (fio's stat.h: 64 bins per power of two); its value is the bin's middle.
    ///
    /// # Errors
    /// [`MeasureError::Json`] when a bin's key is not a number.
    pub fn bins(&self) -> Result<Vec<(Nanos, u64)>, MeasureError> {
        let mut bins = self
            .lat_ns
            .bins
            .iter()
            .map(|(key, n)| match key.parse() {
                Ok(v) => Ok((Nanos(v), *n)),
                Err(_) => Err(MeasureError::Json { reason: format!("bin {key:?} is not a number") }),
            })
            .collect::<Result<Vec<_>, _>>()?;
        bins.sort_unstable();
        Ok(bins)
    }
}

impl JobStats {
    /// Completed requests of both directions.
    #[must_use]
    pub fn total_ios(&self) -> u64 {
        self.read.total_ios.saturating_add(self.write.total_ios)
    }
}

/// Parses fio's JSON. Lines before it are skipped: fio puts warnings there.
///
/// # Errors
/// [`MeasureError::Json`] when it is not JSON of this form, [`MeasureError::TooBig`].
pub fn parse_json(bytes: &[u8]) -> Result<Vec<JobStats>, MeasureError> {
    if bytes.len() > MAX_BYTES {
        return Err(MeasureError::TooBig { what: "fio's JSON output".to_owned(), limit: MAX_BYTES as u64 });
    }
    let start = if bytes.first() == Some(&b'{') {
        Some(0)
    } else {
        bytes.windows(2).position(|w| w == b"\n{").map(|i| i + 1)
    };
    let Some(start) = start else {
        let head = String::from_utf8_lossy(&bytes[..bytes.len().min(300)]).trim().to_owned();
        let reason =
            if head.is_empty() { "it is empty".to_owned() } else { format!("its header is {head:?}") };
        return Err(MeasureError::Json { reason });
    };
    let output: Output =
        serde_json::from_slice(&bytes[start..]).map_err(|e| MeasureError::Json { reason: e.to_string() })?;
    Ok(output.jobs)
}
