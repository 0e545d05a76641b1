//! The dataset: one measured run per line, with everything needed to use and to repeat it.
//!
//! A file is JSON lines: first a [`Header`], then [`Point`]s; where another host continued it, a
//! [`Moved`] before its first point. An interrupted write leaves at most one incomplete last line,
//! which is dropped when the file is resumed.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};

use rtvirtio_kernel::trusted;
use rtvirtio_measure::fio::IoClass;
use rtvirtio_measure::noise::Noise;
use rtvirtio_measure::run::TaskMeasurement;
use rtvirtio_measure::standstill::Standstills;
use rtvirtio_measure::{HostFacts, VmKind};
use rtvirtio_model::Profile;
use rtvirtio_stats::Latencies;
use rtvirtio_units::{Iops, Nanos, Percentile};
use serde::{Deserialize, Serialize};

use crate::load::{Knobs, Stream};

/// Version of the file's form.
pub const DATASET_SCHEMA: &str = "rtvirtio.dataset.v2";

/// [`Point::scheme`] of a space-filling design. Only these points fit and judge models: settings
/// chosen by a model would bias its accuracy.
pub const SWEEP: &str = "sweep";

/// First line of a dataset.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Always [`DATASET_SCHEMA`], for readers of the file.
    pub schema: String,
    /// Host that began the file.
    pub host: HostFacts,
    /// Command that makes the file again, with every option that affects a run.
    pub command: String,
    /// Start of the first run, as text.
    pub generated: String,
    /// [`rtvirtio_model::HostModel::fingerprint`] of the learned model in use: a file name does not
    /// identify it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Confidence of the model's bound, as a share of runs; 0.99 where absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confidence: Option<f64>,
    /// Profiles of `rtvirtio profile`, by the device's name in the points.
    pub profiles: BTreeMap<String, Profile>,
}

/// Marks the lines after it as measured by another host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moved {
    /// Host of the following points.
    pub host: HostFacts,
}

/// Whether a host may continue a file of another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OtherHost {
    /// No: runs are compared or learned from as those of one host.
    Refused,
    /// Allowed for a host with as many CPUs; a [`Moved`] line notes it.
    Noted,
}

/// A measured run: settings, load and outcome.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Point {
    /// Unique name in the file: a resumed sweep skips runs that are there.
    pub id: String,
    /// Device under test, such as `qlc-nvme`.
    pub device: String,
    /// Kind of the VMs.
    pub kind: VmKind,
    /// Scheme that chose the settings, or several, separated by commas; [`SWEEP`] for a point of a
    /// design.
    pub scheme: String,
    /// Seed of the addresses.
    pub seed: u64,
    /// Length of the measured part.
    pub seconds: f64,
    /// Host settings in force.
    pub knobs: Knobs,
    /// I/O class per VM, with all VMs in one cgroup; absent when each VM had its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<Vec<IoClass>>,
    /// Streams of the VMs.
    pub vms: Vec<Vec<Stream>>,
    /// Stalls of the host during the run.
    pub noise: Noise,
    /// Stalls of the disk itself; absent in older data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<Standstills>,
    /// Outcome of each task, VM by VM.
    pub results: Vec<Outcome>,
}

/// Outcome of one task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// Number of completed requests.
    pub n: u64,
    /// Requests completed per second.
    pub rate: Iops,
    /// Median latency, in ns.
    pub p50: Nanos,
    /// 99th percentile of latency.
    pub p99: Nanos,
    /// 99.99th percentile by nearest rank: the maximum when `n` < 10 000.
    pub p9999: Nanos,
    /// Longest latency of a request.
    pub max: Nanos,
    /// 99.99th percentile of the latencies less the time in which a CPU of the host stalled
    /// ([`rtvirtio_measure::stalls::Stalls`]): the part of the tail that settings can change.
    /// Absent where the times of requests are not known, as in a guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p9999_awake: Option<Nanos>,
    /// Counterpart of `p9999_awake`, with the stalls shifted by a second: the effect of the
    /// subtraction alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p9999_placebo: Option<Nanos>,
    /// p99.99 by fio's own clock, from submission, as the papers report it: the delay that a late
    /// request causes to the next one is not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p9999_fio: Option<Nanos>,
    /// All latencies, see [`pack`].
    pub hist: Vec<u64>,
    /// Upper bound for [`Outcome::tail`] that a learned model gave before the run; absent without a
    /// model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upper: Option<Nanos>,
    /// Upper bound for [`Outcome::p9999`], which includes the host's own stalls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub promised: Option<Nanos>,
}

/// Errors of reading and writing a dataset.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatasetError {
    /// The file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// A line is invalid.
    #[error("{} line {line}: {reason}", path.display())]
    Line {
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// Error, with the remedy.
        reason: String,
    },
}

impl Outcome {
    /// Outcome of a measured task.
    #[must_use]
    pub fn from_measurement(m: &TaskMeasurement) -> Self {
        Self {
            n: m.result.n,
            rate: m.result.achieved_rate,
            p50: m.result.p50_ns,
            p99: m.result.p99_ns,
            p9999: m.result.p9999_ns,
            max: m.result.max_ns,
            p9999_awake: m.result.p9999_excl_host_stalls_ns,
            p9999_placebo: m.result.p9999_placebo_ns,
            p9999_fio: Some(m.result.fio_p9999_ns),
            hist: pack(&m.latencies),
            upper: None,
            promised: None,
        }
    }

    /// Tail that settings can change: without the host's own stalls where they are known.
    #[must_use]
    pub fn tail(&self) -> Nanos {
        self.p9999_awake.unwrap_or(self.p9999)
    }
}

/// Buckets per power of two: 4.4 % resolution.
const STEPS: f64 = 16.0;

/// A histogram as pairs: distance to the previous non-empty bucket, count. Bucket `i` holds
/// latencies up to `2^(i / 16)` ns.
#[must_use]
pub fn pack(latencies: &Latencies) -> Vec<u64> {
    let mut buckets: BTreeMap<u64, u64> = BTreeMap::new();
    for (latency, count) in latencies.iter() {
        let index = ((latency.0.max(1) as f64).log2() * STEPS).ceil() as u64;
        *buckets.entry(index).or_default() += count;
    }
    let mut out = Vec::with_capacity(2 * buckets.len());
    let mut last = 0;
    for (index, count) in buckets {
        out.extend([index - last, count]);
        last = index;
    }
    out
}

/// Upper edge and count of every bucket of [`pack`], rising; `None` when the pairs are not a
/// histogram.
#[must_use]
pub fn unpack(hist: &[u64]) -> Option<Vec<(Nanos, u64)>> {
    let mut out = Vec::with_capacity(hist.len() / 2);
    let mut index = 0u64;
    for (i, pair) in hist.chunks(2).enumerate() {
        let &[step, count] = pair else { return None };
        index = index.checked_add(step)?;
        if index > (64.0 * STEPS) as u64 || count == 0 || (i > 0 && step == 0) {
            return None;
        }
        out.push((Nanos((index as f64 / STEPS).exp2() as u64), count));
    }
    Some(out)
}

/// Smallest latency that at least a share `p` of a packed histogram does not exceed; `None` when it
/// is empty or not a histogram.
#[must_use]
pub fn percentile(hist: &[u64], p: Percentile) -> Option<Nanos> {
    let buckets = unpack(hist)?;
    let n: u64 = buckets.iter().map(|b| b.1).sum();
    let rank = (p.0 / 100.0 * n as f64).ceil().max(1.0) as u64;
    let mut seen = 0;
    buckets
        .iter()
        .find(|b| {
            seen += b.1;
            seen >= rank
        })
        .map(|b| b.0)
}

/// A dataset in memory.
#[derive(Clone, Debug)]
pub struct Dataset {
    /// First line of the file.
    pub header: Header,
    /// Runs in the order of measurement.
    pub points: Vec<Point>,
    /// Hosts that continued the file, each with the number of earlier runs.
    pub moves: Vec<(usize, HostFacts)>,
}

impl Dataset {
    /// Reads a file and checks every line.
    ///
    /// # Errors
    /// [`DatasetError`] naming the line: another version, a result that does not fit the tasks, a
    /// number out of its range.
    pub fn load(path: &Path) -> Result<Self, DatasetError> {
        Self::read(path, false)
    }

    /// Reads only the first line of a file.
    ///
    /// # Errors
    /// As of [`Dataset::load`], for that line.
    pub fn header(path: &Path) -> Result<Header, DatasetError> {
        let io = |source| DatasetError::Io { path: path.to_owned(), source };
        let mut first = String::new();
        BufReader::new(trusted::open_config(path).map_err(io)?).read_line(&mut first).map_err(io)?;
        header_of(path, &first)
    }

    fn read(path: &Path, forgive_last: bool) -> Result<Self, DatasetError> {
        let io = |source| DatasetError::Io { path: path.to_owned(), source };
        let file = BufReader::new(trusted::open_config(path).map_err(io)?);
        let lines = file.lines().collect::<Result<Vec<String>, _>>().map_err(io)?;
        let bad = |line: usize, reason: String| DatasetError::Line { path: path.to_owned(), line, reason };
        let header = header_of(path, lines.first().map_or("", String::as_str))?;
        let (mut points, mut moves) = (Vec::new(), Vec::new());
        for (i, line) in lines.iter().enumerate().skip(1) {
            if let Ok(Moved { host }) = serde_json::from_str(line) {
                moves.push((points.len(), host));
                continue;
            }
            let point = serde_json::from_str::<Point>(line).map_err(|e| e.to_string());
            match point.and_then(|p| p.check().map(|()| p)) {
                Ok(point) => points.push(point),
                Err(_) if forgive_last && i + 1 == lines.len() => break,
                Err(reason) => return Err(bad(i + 1, reason)),
            }
        }
        Ok(Self { header, points, moves })
    }

    /// Host of the last points.
    #[must_use]
    pub fn last_host(&self) -> &HostFacts {
        self.moves.last().map_or(&self.header.host, |(_, host)| host)
    }
}

fn header_of(path: &Path, line: &str) -> Result<Header, DatasetError> {
    let bad = |reason: String| DatasetError::Line { path: path.to_owned(), line: 1, reason };
    if line.trim().is_empty() {
        return Err(bad("the file is empty".to_owned()));
    }
    let header: Header = serde_json::from_str(line)
        .map_err(|e| bad(format!("not the header of a dataset of form {DATASET_SCHEMA}: {e}")))?;
    if header.schema != DATASET_SCHEMA {
        return Err(bad(format!("form {} where {DATASET_SCHEMA} is known: measure again", header.schema)));
    }
    Ok(header)
}

impl Point {
    pub(crate) fn check(&self) -> Result<(), String> {
        let tasks: usize = self.vms.iter().map(Vec::len).sum();
        if tasks == 0 || self.results.len() != tasks {
            return Err(format!("{} results for {tasks} tasks", self.results.len()));
        }
        if self.knobs.weights.len() != self.vms.len() {
            return Err(format!("{} weights for {} VMs", self.knobs.weights.len(), self.vms.len()));
        }
        for r in &self.results {
            if !r.rate.0.is_finite() || unpack(&r.hist).is_none() {
                return Err("an impossible rate or histogram".to_owned());
            }
            if r.p9999_awake.is_some_and(|awake| awake > r.p9999) {
                return Err("a tail that is longer without the host's stalls than with them".to_owned());
            }
        }
        if !(self.seconds.is_finite() && self.seconds > 0.0) {
            return Err("a run without length".to_owned());
        }
        Ok(())
    }

    /// Whether this scheme chose the settings. Schemes that chose the same settings share a run.
    #[must_use]
    pub fn is_of(&self, scheme: &str) -> bool {
        self.scheme.split(',').any(|s| s == scheme)
    }

    /// Whether both ran the same load under the same settings in VMs of one kind for the same time.
    #[must_use]
    pub fn repeats(&self, other: &Self) -> bool {
        self.kind == other.kind && self.seconds == other.seconds && self.does_the_same(other)
    }

    /// Whether both ran the same load under the same settings, for any time and in VMs of any kind.
    #[must_use]
    pub fn does_the_same(&self, other: &Self) -> bool {
        self.device == other.device
            && self.knobs == other.knobs
            && self.classes == other.classes
            && self.vms == other.vms
    }

    /// Every task with its VM's index and its result.
    pub fn tasks(&self) -> impl Iterator<Item = (usize, &Stream, &Outcome)> {
        let streams = self.vms.iter().enumerate().flat_map(|(vm, s)| s.iter().map(move |s| (vm, s)));
        streams.zip(&self.results).map(|((vm, s), r)| (vm, s, r))
    }
}

/// Appends points to a file; each is on disk before the next is measured.
#[derive(Debug)]
pub struct Recorder {
    path: PathBuf,
    file: File,
}

impl Recorder {
    /// Begins a file, or continues one: then returns its points too, and cuts off an incomplete
    /// last line.
    ///
    /// [`DatasetError`]; also when the file was begun with another `command` than that of `header`,
    /// or on another host and `other` does not allow it.
    pub fn open(path: &Path, header: &Header, other: OtherHost) -> Result<(Self, Vec<Point>), DatasetError> {
        let io = |source| DatasetError::Io { path: path.to_owned(), source };
        let begun = std::fs::metadata(path).is_ok_and(|m| m.len() > 0);
        let mut points = Vec::new();
        let mut moved = None;
        if begun {
            let old = Dataset::read(path, true)?;
            let last = old.last_host();
            if *last != header.host {
                let alike = HostFacts { kernel: last.kernel.clone(), ..header.host.clone() } == *last;
                let remedy = match other {
                    OtherHost::Noted if alike => "",
                    OtherHost::Refused if alike => {
                        "begin a new file, or go on with --other-host where the command has it"
                    }
                    _ => "begin a new file",
                };
                if !remedy.is_empty() {
                    let (kernel, cpus) = (&last.kernel, last.cpus);
                    let reason =
                        format!("it was measured on another host (kernel {kernel}, {cpus} CPUs): {remedy}");
                    return Err(DatasetError::Line { path: path.to_owned(), line: 1, reason });
                }
                moved = Some(Moved { host: header.host.clone() });
            }
            if old.header.command != header.command {
                let reason = format!(
                    "it was begun by `{}`, this is `{}`: give the same options, or begin a new file",
                    old.header.command, header.command
                );
                return Err(DatasetError::Line { path: path.to_owned(), line: 1, reason });
            }
            let models = old.header.model.as_ref().zip(header.model.as_ref());
            if let Some((theirs, ours)) = models.filter(|(theirs, ours)| theirs != ours) {
                let reason = format!(
                    "it was begun with another learned model (fingerprint {theirs}, this one has {ours}): name that one, or begin a new file"
                );
                return Err(DatasetError::Line { path: path.to_owned(), line: 1, reason });
            }
            points = old.points;
            cut_last_line(path, points.len() + old.moves.len() + 1).map_err(io)?;
        }
        let file = trusted::append_named(path).map_err(io)?;
        let mut recorder = Self { path: path.to_owned(), file };
        if !begun {
            recorder.line(header)?;
        }
        if let Some(moved) = moved {
            recorder.line(&moved)?;
        }
        Ok((recorder, points))
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Adds a point.
    pub fn add(&mut self, point: &Point) -> Result<(), DatasetError> {
        self.line(point)
    }

    fn line<T: Serialize>(&mut self, row: &T) -> Result<(), DatasetError> {
        let io = |source| DatasetError::Io { path: self.path.clone(), source };
        let mut text = serde_json::to_vec(row).map_err(|e| io(e.into()))?;
        text.push(b'\n');
        self.file.write_all(&text).and_then(|()| self.file.sync_data()).map_err(io)
    }
}

/// Truncates a file to its first `lines` lines.
fn cut_last_line(path: &Path, lines: usize) -> io::Result<()> {
    let text = trusted::read_config(path, u64::MAX)?;
    let mut end = 0;
    for _ in 0..lines {
        end += text[end..].iter().position(|b| *b == b'\n').map_or(text.len() - end, |i| i + 1);
    }
    let file = trusted::append_named(path)?;
    file.set_len(end as u64)?;
    // The last row is complete, but its line end is missing.
    if end > 0 && text[end - 1] != b'\n' {
        trusted::append_named(path)?.write_all(b"\n")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
