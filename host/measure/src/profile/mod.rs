//! Measured performance of a device: throughput and latency over depth, and the cost of BFQ on it.
//!
//! fio (libaio, direct, random addresses) runs at depths 1 to 32 under elevator `none`, the same
//! under `bfq`, and writes where they are allowed, alone and with an fdatasync(2) after each; under
//! `none` also with larger requests, so that time per request and time per byte can be separated.
//! The series alternate, so that a slow change of the host (heat, a neighbour) affects all of them
//! alike. Every number is checked; an implausible one becomes a line in [`Profile::doubts`] and is
//! left as it was measured.

mod checks;
mod store;
mod watched;

pub use store::{MAX_FILE_BYTES, load, parse, save, to_json};

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rtvirtio_kernel::Claim;
use rtvirtio_model::{DepthPoint, LargeRequests, PROFILE_SCHEMA, Profile};
use rtvirtio_stats::Latencies;
use rtvirtio_units::{Bytes, Iops, Percentile};

use crate::MeasureError;
use crate::error::io_error;
use crate::fio::{COMMON, JobStats, escaped, parse_json};
use crate::local::{Control, Load, run_text};
use crate::noise::NoiseProbe;
use crate::run::add_bins;

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
/// Number of points whose time a point of synced writes takes: a flush takes up to hundreds of
/// times as long as a write.
const SYNC_SLOTS: usize = 4;
/// Repetitions of each point.
const REPETITIONS: usize = 3;
/// Time at the start of each point that does not count.
const RAMP: Duration = Duration::from_millis(100);
/// Pause between two points, so that they do not overlap when fio starts one late.
const GAP: Duration = Duration::from_millis(30);
/// Shortest time of a point that is meaningful.
const SHORTEST: Duration = Duration::from_millis(50);
/// Time that one fio process takes beyond its runs (start, clock calibration, end): 0.4 s measured
/// on two cores with fio 3.33.
const START_COST: Duration = Duration::from_millis(500);

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

impl Extent {
    fn series(self, bfq: bool, writes: bool) -> Vec<Series> {
        let whole = self == Self::Whole;
        let all = [
            (Series::Read, true),
            (Series::ReadBfq, bfq && whole),
            (Series::Write, writes),
            (Series::Sync, writes && whole),
        ];
        all.into_iter().filter(|(_, asked)| *asked).map(|(one, _)| one).collect()
    }
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
    /// Time for all points; at least 11 s, with writes 21 s. The default is 36 s.
    pub budget: Duration,
    /// Absolute directory for fio's files.
    pub dir: PathBuf,
    /// Seed of the addresses.
    pub seed: u64,
}

impl ProfileOptions {
    /// Reads only, 4 KiB, 36 s.
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
    /// Called with the steps done, the number of steps, and the name of the current one.
    pub progress: &'a mut dyn FnMut(u64, u64, &str),
    /// Flag that stops the measurement when set.
    pub cancel: &'a AtomicBool,
}

/// Series of points: a direction under an elevator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Series {
    Read,
    ReadBfq,
    Write,
    /// Writes with an fdatasync(2) after each.
    Sync,
}

impl Series {
    fn elevator(self) -> &'static str {
        if self == Self::ReadBfq { "bfq" } else { "none" }
    }

    /// Depth and size of its points. The cost of BFQ is counted per request, so larger ones would
    /// add nothing there; and they load the device most.
    fn points(self, block: Bytes, extent: Extent) -> Vec<(u32, Bytes)> {
        if extent != Extent::Whole {
            return self.depths(extent).iter().map(|d| (*d, block)).collect();
        }
        if self == Self::Sync {
            return SYNC_DEPTHS.iter().flat_map(|d| [(*d, block); SYNC_SLOTS]).collect();
        }
        let large = if self == Self::ReadBfq || block >= LARGE { &[][..] } else { &LARGE_DEPTHS[..] };
        let own = DEPTHS.iter().map(|d| (*d, block));
        own.chain(large.iter().map(|d| (*d, LARGE))).collect()
    }

    fn label(self) -> &'static str {
        match self {
            Self::Read => "reads with none",
            Self::ReadBfq => "reads with bfq",
            Self::Write => "writes with none",
            Self::Sync => "synced writes with none",
        }
    }

    fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Sync)
    }

    /// Depths of the block-sized points, in their order.
    fn depths(self, extent: Extent) -> &'static [u32] {
        match (extent, self) {
            (Extent::Gentle, _) => &GENTLE_DEPTHS,
            (Extent::Confirming, _) => &CONFIRMING_DEPTHS,
            (Extent::Whole, Self::Sync) => &SYNC_DEPTHS,
            (Extent::Whole, _) => &DEPTHS,
        }
    }

    /// Index of the point that the `i`-th run belongs to.
    fn point_of(self, i: usize) -> usize {
        if self == Self::Sync { i / SYNC_SLOTS } else { i }
    }

    /// Lines of the job file.
    fn options(self) -> &'static str {
        match self {
            Self::Read | Self::ReadBfq => "rw=randread\nioengine=libaio\n",
            Self::Write => "rw=randwrite\nioengine=libaio\n",
            // As for a task that syncs (`JobFile`): one call that copies, writes back and flushes.
            Self::Sync => "rw=randwrite\nioengine=psync\ndirect=0\nsync=dsync\n",
        }
    }
}

/// All repetitions of one point.
#[derive(Clone, Debug, Default)]
struct Point {
    iops: Vec<f64>,
    latencies: Latencies,
    max: rtvirtio_units::Nanos,
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
    let points_of = |s: &Series| s.points(options.block, options.extent).len();
    let series = options.extent.series(options.bfq, control.claim.is_some());
    let steps: usize = series.iter().map(points_of).sum();
    let point = point_time(options.budget, series.len(), steps).ok_or_else(|| {
        let least = least_budget(series.len(), steps).as_secs_f64().ceil();
        refuse(&format!("the time budget is too short: give at least {least} s"))
    })?;
    let mut points: Vec<Vec<Point>> = series.iter().map(|s| vec![Point::default(); points_of(s)]).collect();
    for (series, points) in series.iter().zip(&mut points) {
        points.truncate(series.point_of(points.len() - 1) + 1);
    }
    let total = (REPETITIONS * steps) as u64;
    let mut done = 0;
    for repetition in 0..REPETITIONS {
        for (series, points) in series.iter().zip(&mut points) {
            let elevator = series.elevator();
            if options.extent != Extent::Gentle {
                (control.set_elevator)(elevator)
                    .map_err(|e| MeasureError::Elevator { elevator, reason: e.to_string() })?;
            }
            let label = format!("{} ({}/{REPETITIONS})", series.label(), repetition + 1);
            let runs = points_of(series) as u64;
            let stats = run_series(
                options,
                *series,
                repetition,
                point,
                &mut |elapsed| {
                    let step = elapsed.as_secs_f64() / slot(point).as_secs_f64();
                    (control.progress)(done + (step as u64).min(runs - 1), total, &label);
                },
                control.cancel,
            )?;
            for (i, (stats, less)) in stats.iter().enumerate() {
                let point = &mut points[series.point_of(i)];
                let direction = if series.writes() { &stats.write } else { &stats.read };
                let max = match less {
                    Some(less) => {
                        point.latencies.merge(less);
                        less.at(Percentile(100.0))
                    }
                    None => {
                        add_bins(&mut point.latencies, direction, None)?;
                        direction.max()
                    }
                };
                point.iops.push(direction.iops);
                point.max = point.max.max(max);
            }
            done += runs;
        }
    }
    if let Some((series, _)) =
        series.iter().zip(&points).find(|(_, p)| p.iter().any(|p| p.latencies.n() == 0))
    {
        let reason = "no request completed".to_owned();
        return Err(MeasureError::Task { task: series.label().to_owned(), reason });
    }
    (control.progress)(total, total, "done");
    let mut doubts = Vec::new();
    let mut results: Vec<(Series, Vec<DepthPoint>)> = Vec::new();
    let mut large: Vec<(Series, Vec<DepthPoint>)> = Vec::new();
    for (series, points) in series.iter().zip(&points) {
        let (own, larger) = points.split_at(series.depths(options.extent).len());
        let summary = summarise(series.depths(options.extent), own);
        doubts.extend(checks::doubts(series.label(), &summary, own));
        results.push((*series, summary));
        if *series == Series::Sync {
            continue;
        }
        // Fewer samples than the other checks require: only the deepest one's tail is used.
        let summary = summarise(&LARGE_DEPTHS, larger);
        doubts.extend(checks::held_up(&format!("large {}", series.label()), &summary));
        large.push((*series, summary));
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
    let series = extent.series(true, writes);
    least_budget(series.len(), series.iter().map(|s| s.points(block, extent).len()).sum())
}

/// Measured time of each point that fits all points into the budget; `None` when less than
/// [`SHORTEST`] would be left.
fn point_time(budget: Duration, series: usize, points: usize) -> Option<Duration> {
    let runs = (REPETITIONS * series) as u32;
    let per_point = budget.checked_sub(START_COST * runs)? / (REPETITIONS * points) as u32;
    per_point.checked_sub(RAMP + GAP).filter(|t| *t >= SHORTEST)
}

/// Smallest budget for which [`point_time`] has an answer.
fn least_budget(series: usize, points: usize) -> Duration {
    START_COST * (REPETITIONS * series) as u32 + slot(SHORTEST) * (REPETITIONS * points) as u32
}

/// Time from the start of one point to the start of the next.
fn slot(point: Duration) -> Duration {
    RAMP + point + GAP
}

fn run_series(
    options: &ProfileOptions,
    series: Series,
    repetition: usize,
    point: Duration,
    on_tick: &mut dyn FnMut(Duration),
    cancel: &AtomicBool,
) -> Result<Vec<(JobStats, Option<Latencies>)>, MeasureError> {
    let points = series.points(options.block, options.extent);
    let duration = slot(point) * points.len() as u32;
    let mut control = Control { cgroup_procs: &[], cancel, grace: Duration::from_secs(30), on_tick };
    let text = job_text(options, series, repetition, point);
    let logs = if options.watch { watched::log_paths(&options.dir, points.len()) } else { Vec::new() };
    let load = Load {
        dir: &options.dir,
        text: &text,
        logs: &logs,
        read_only: !series.writes(),
        environment: &[],
        duration,
    };
    let probe = options.watch.then(NoiseProbe::start);
    let output = run_text(&load, &mut control);
    let stalls = probe.and_then(|probe| probe.finish().1);
    let output = output?;
    let stats = parse_json(&output.json)?;
    if stats.len() != points.len() {
        return Err(MeasureError::Json {
            reason: format!("{} sections for {} points", stats.len(), points.len()),
        });
    }
    let mut out = Vec::with_capacity(stats.len());
    for (i, (stats, (depth, block))) in stats.into_iter().zip(points).enumerate() {
        let task = || format!("{} of {block} at depth {depth}", series.label());
        if stats.error != 0 {
            let reason = std::io::Error::from_raw_os_error(stats.error).to_string();
            return Err(MeasureError::Task { task: task(), reason });
        }
        // A flush may take longer than one run; all of them together are checked later.
        if stats.total_ios() == 0 && series != Series::Sync {
            let reason = format!("no request completed in {} ms", point.as_millis());
            return Err(MeasureError::Task { task: task(), reason });
        }
        let less = match (&stalls, output.logs.get(i).and_then(Option::as_deref)) {
            (Some(stalls), Some(log)) => Some(watched::latencies(&task(), log, stalls)?),
            _ => None,
        };
        out.push((stats, less));
    }
    Ok(out)
}

/// Job file with a section per point, in sequence by `startdelay`. (`stonewall` would do the same,
/// but fio 3.33 then takes a quarter of a second to start each next section.)
fn job_text(options: &ProfileOptions, series: Series, repetition: usize, point: Duration) -> String {
    let mut s = format!("[global]\n{COMMON}");
    // Cannot fail: writing to a String.
    let _ = write!(
        s,
        "filename={}\nsize={}\n{}ramp_time={}ms\nruntime={}ms\n",
        escaped(&options.device),
        options.size.0,
        series.options(),
        RAMP.as_millis(),
        point.as_millis(),
    );
    if options.watch {
        s.push_str(&watched::log_options(&options.dir));
    }
    let points = series.points(options.block, options.extent);
    for (i, (depth, block)) in points.iter().enumerate() {
        let seed = options.seed.wrapping_add((repetition * points.len() + i + 1) as u64);
        let delay = (slot(point) * i as u32).as_millis();
        let bytes = block.0;
        let _ = write!(s, "\n[p{i}]\nstartdelay={delay}ms\nbs={bytes}\niodepth={depth}\nrandseed={seed}\n");
    }
    s
}

fn summarise(depths: &[u32], points: &[Point]) -> Vec<DepthPoint> {
    depths
        .iter()
        .zip(points)
        .map(|(depth, p)| {
            let mut sorted = p.iops.clone();
            sorted.sort_by(f64::total_cmp);
            let median = sorted.get(sorted.len() / 2).copied().unwrap_or(0.0);
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
