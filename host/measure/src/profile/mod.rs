//! Measured performance of a device: throughput and latency over depth, and the cost of BFQ on it.
//!
//! fio (libaio, direct, random addresses) runs at depths 1 to 32 under elevator `none`, the same
//! under `bfq`, and writes where they are allowed, alone and with an fdatasync(2) after each; under
//! `none` also with larger requests, so that time per request and time per byte can be separated.
//! The series alternate, so that a slow change of the host (heat, a neighbour) affects all of them
//! alike, until each number that models read is known to the error that a plan can bear
//! ([`MARGIN`], [`SPARE`]), or the time is over. Every number is checked; an implausible one, and
//! one that is not known, becomes a line in [`Profile::doubts`] and is left as it was measured.

mod checks;
mod known;
mod process;
mod rounds;
mod series;
mod store;
mod watched;

pub use known::{MARGIN, SPARE, tail_is_known};
pub use store::{MAX_FILE_BYTES, load, parse, save, to_json};

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rtvirtio_kernel::Claim;
use rtvirtio_model::{DepthPoint, LargeRequests, PROFILE_SCHEMA, Profile};
use rtvirtio_stats::Latencies;
use rtvirtio_units::{Bytes, Iops, Nanos, Percentile};

use self::rounds::{first_time, millis};
use self::series::Series;
use crate::MeasureError;
use crate::error::io_error;

/// Depths that are measured.
pub const DEPTHS: [u32; 6] = [1, 2, 4, 8, 16, 32];
/// Depths of a gentle measurement: as much as a few VMs have in flight anyway.
pub const GENTLE_DEPTHS: [u32; 3] = [1, 2, 4];
/// Depths of the few points that confirm a profile: lowest, middle and highest.
pub const CONFIRMING_DEPTHS: [u32; 3] = [1, 8, 32];
/// Depths at which larger requests are measured: one alone, and enough for the best throughput.
pub const LARGE_DEPTHS: [u32; 2] = [1, 32];
/// Size of the larger requests: typical for a sequential writer or a loader, and much larger than 4
/// KiB.
pub const LARGE: Bytes = Bytes(128 << 10);
/// Depths at which synced writes are measured.
pub const SYNC_DEPTHS: [u32; 1] = [1];

/// Extent of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// All series that models read.
    Whole,
    /// Only reads at [`GENTLE_DEPTHS`], under the elevator that is set: for a device that VMs use.
    /// There must be no claim then.
    Gentle,
    /// Only reads, and writes where they are allowed, at [`CONFIRMING_DEPTHS`]: to check whether a
    /// device is like another that was measured whole.
    Confirming,
}

/// Device, extent and time of a measurement.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileOptions {
    /// The block device (or a file that stands for one).
    pub device: PathBuf,
    /// Bytes of the device that are used, from its start.
    pub size: Bytes,
    /// Block size; the models expect [`Bytes::from_kib`]`(4)`.
    pub block: Bytes,
    /// Whether a probe under SCHED_FIFO on every CPU detects stalls of the host itself, which are
    /// subtracted from the latencies. Not on a machine that does real work.
    pub watch: bool,
    /// Series and depths that are measured.
    pub extent: Extent,
    /// Whether reads are measured under BFQ too; false where the device has no choice of elevators.
    pub bfq: bool,
    /// Most time for all points; at least 6 s, with writes 10 s. The default is 36 s.
    pub budget: Duration,
    /// Whether all of it is used, also where everything is known before.
    pub all_of_budget: bool,
    /// Absolute directory for fio's files.
    pub dir: PathBuf,
    /// Seed of the addresses.
    pub seed: u64,
}

impl ProfileOptions {
    /// Reads only, 4 KiB, at most 36 s.
    #[must_use]
    pub fn new(device: PathBuf, size: Bytes, dir: PathBuf) -> Self {
        Self {
            device,
            size,
            block: Bytes::from_kib(4),
            watch: false,
            extent: Extent::Whole,
            bfq: true,
            budget: Duration::from_secs(36),
            all_of_budget: false,
            dir,
            seed: 1,
        }
    }
}

/// Callbacks and claim of the caller.
pub struct ProfileControl<'a> {
    /// Sets the device's elevator to `none` or `bfq`. The caller reads the old one before and
    /// restores it afterwards, whatever happens.
    #[expect(clippy::type_complexity, reason = "the error is the caller's; it is only shown")]
    pub set_elevator: &'a mut dyn FnMut(&str) -> Result<(), Box<dyn std::error::Error + Send + Sync>>,
    /// Claim on the device: with it writes are measured too, which **destroys the data on it**.
    pub claim: Option<&'a Claim>,
    /// Called with the time spent and the most that it takes, in ms, and what is measured. The last
    /// call says that all is done.
    pub progress: &'a mut dyn FnMut(u64, u64, &str),
    /// Flag that stops the measurement when set.
    pub cancel: &'a AtomicBool,
}

/// All repetitions of one point.
#[derive(Clone, Debug, Default)]
struct Point {
    iops: Vec<f64>,
    latencies: Latencies,
    max: Nanos,
    /// Whether models read its tail.
    tail: bool,
    /// Half of the 95 % interval of its mean rate, relative to it.
    error: f64,
}

/// A point of a series.
#[derive(Clone, Debug)]
struct Cell {
    series: Series,
    depth: u32,
    /// Size of its requests.
    block: Bytes,
    point: Point,
}

impl Cell {
    fn name(&self) -> String {
        format!("{} of {} at depth {}", self.series.label(), self.block, self.depth)
    }
}

/// Measures a device. [`Profile::guest`] is left empty.
///
/// # Errors
/// [`MeasureError::Elevator`]; any error of fio; a claim on another device.
pub fn measure(options: &ProfileOptions, control: &mut ProfileControl<'_>) -> Result<Profile, MeasureError> {
    let refuse = |reason: &str| MeasureError::JobFile {
        vm: options.device.display().to_string(),
        reason: reason.to_owned(),
    };
    if options.size.0 < options.block.0.max(1) * 64 {
        return Err(refuse("the device is smaller than 64 blocks"));
    }
    if control.claim.is_some_and(|claim| claim.path() != options.device) {
        return Err(refuse("the claim is on another device"));
    }
    if options.extent == Extent::Gentle && control.claim.is_some() {
        return Err(refuse("a gentle measurement does not write"));
    }
    let series = options.extent.series(options.bfq, control.claim.is_some());
    let mut cells: Vec<Cell> = series.iter().flat_map(|s| s.cells(options.block, options.extent)).collect();
    let least = first_time(&cells);
    if options.budget < least {
        let least = least.as_secs_f64().ceil();
        return Err(refuse(&format!("the time budget is too short: give at least {least} s")));
    }
    rounds::run(options, control, &mut cells)?;
    if let Some(cell) = cells.iter().find(|cell| cell.point.latencies.n() == 0) {
        let reason = "no request completed".to_owned();
        return Err(MeasureError::Task { task: cell.name(), reason });
    }
    let total = millis(options.budget);
    (control.progress)(total, total, "done");
    of_cells(options, &series, &cells)
}

/// The profile of measured points, with every reason to doubt them.
fn of_cells(options: &ProfileOptions, series: &[Series], cells: &[Cell]) -> Result<Profile, MeasureError> {
    let mut doubts = Vec::new();
    let mut results: Vec<(Series, Vec<DepthPoint>)> = Vec::new();
    let mut large: Vec<(Series, Vec<DepthPoint>)> = Vec::new();
    for &series in series {
        let of = |own: bool| -> (Vec<u32>, Vec<Point>) {
            let of = cells.iter().filter(|c| c.series == series && (c.block == options.block) == own);
            of.map(|cell| (cell.depth, cell.point.clone())).unzip()
        };
        let (depths, points) = of(true);
        let summary = summarise(&depths, &points);
        doubts.extend(checks::doubts(series.label(), &summary, &points));
        results.push((series, summary));
        let (depths, points) = of(false);
        if !points.is_empty() {
            // Only the deepest one's tail is used, so that the other checks say little.
            let label = format!("large {}", series.label());
            let summary = summarise(&depths, &points);
            doubts.extend(checks::not_known(&label, &summary, &points));
            doubts.extend(checks::held_up(&label, &summary));
            large.push((series, summary));
        }
    }
    let large = LargeRequests {
        block: LARGE,
        read: take_points(&mut large, Series::Read),
        write: take_points(&mut large, Series::Write),
    };
    Ok(Profile {
        schema: PROFILE_SCHEMA.to_owned(),
        device: device_name(&options.device),
        identity: None,
        size: options.size,
        block: options.block,
        read: take_points(&mut results, Series::Read),
        read_bfq: take_points(&mut results, Series::ReadBfq),
        write: take_points(&mut results, Series::Write),
        sync: take_points(&mut results, Series::Sync),
        large: (!large.read.is_empty()).then_some(large),
        guest: None,
        cpus: online_cpus(),
        kernel: kernel_release()?,
        doubts,
    })
}

/// Points of a series; none where it was not measured.
fn take_points(all: &mut [(Series, Vec<DepthPoint>)], series: Series) -> Vec<DepthPoint> {
    all.iter_mut()
        .find(|(one, _)| *one == series)
        .map(|(_, points)| std::mem::take(points))
        .unwrap_or_default()
}

/// Least [`ProfileOptions::budget`] of a measurement with blocks of `block`, for a check before
/// anything is touched. A device without a choice of elevators may need less.
#[must_use]
pub fn least_time(block: Bytes, extent: Extent, writes: bool) -> Duration {
    let cells = |s: Series| s.cells(block, extent);
    first_time(&extent.series(true, writes).into_iter().flat_map(cells).collect::<Vec<_>>())
}

fn summarise(depths: &[u32], points: &[Point]) -> Vec<DepthPoint> {
    depths
        .iter()
        .zip(points)
        .map(|(depth, p)| {
            let mut sorted = p.iops.clone();
            sorted.sort_by(f64::total_cmp);
            let middle = |i: usize| sorted.get(i).copied().unwrap_or(0.0);
            // Of an even number the mean of both in the middle.
            let median = (middle(sorted.len() / 2) + middle(sorted.len().saturating_sub(1) / 2)) / 2.0;
            let range = sorted.last().zip(sorted.first()).map_or(0.0, |(high, low)| high - low);
            let at = |q: f64| p.latencies.at(Percentile(q)).min(p.max);
            DepthPoint {
                depth: *depth,
                iops: Iops(median),
                // Four digits: further ones would be noise.
                spread: if median > 0.0 { (range / median * 1e4).round() / 1e4 } else { 0.0 },
                n: p.latencies.n(),
                p50: at(50.0),
                p99: at(99.0),
                p9999: at(99.99),
                max: p.max,
            }
        })
        .collect()
}

fn device_name(device: &Path) -> String {
    let real = device.canonicalize().unwrap_or_else(|_| device.to_owned());
    real.file_name().map_or_else(|| real.display().to_string(), |n| n.to_string_lossy().into_owned())
}

fn online_cpus() -> u32 {
    // SAFETY: plain call without pointers.
    let n = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    u32::try_from(n).unwrap_or(1).max(1)
}

fn kernel_release() -> Result<String, MeasureError> {
    let path = Path::new("/proc/sys/kernel/osrelease");
    // kernel file
    Ok(std::fs::read_to_string(path).map_err(io_error("read", path))?.trim().to_owned())
}

#[cfg(test)]
mod tests;
