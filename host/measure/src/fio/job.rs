//! fio job file for the tasks of one VM.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rtvirtio_spec::{Arrival, Op, Pattern, SyncKind, Task, Vm};
use rtvirtio_units::Bytes;
use serde::{Deserialize, Serialize};

use super::FioRate;
use crate::MeasureError;

/// Disk, times and directory of a VM's tasks.
#[derive(Clone, Debug, PartialEq)]
pub struct JobOptions {
    /// Block device or file that the tasks use, as the fio process sees it.
    pub target: PathBuf,
    /// Part of it that the tasks may access; `None` for all.
    pub region: Option<Region>,
    /// Time before the measured part, whose requests do not count. Best at least 500 ms, because
    /// files are opened and processes placed in this time.
    pub warmup: Duration,
    /// Length of the measured part.
    pub runtime: Duration,
    /// Seed of the addresses. The same seed gives the same addresses in every run.
    pub seed: u64,
    /// Absolute directory for the job file, the JSON and the logs, as the fio process sees it.
    pub dir: PathBuf,
    /// I/O class and level of the tasks' threads; `None` leaves them as they are started.
    pub io_class: Option<IoClass>,
    /// Zero of the logs' time stamps.
    pub clock: LogClock,
    /// Load [`PRELOAD`] into fio, where a task paces its requests.
    pub preload: bool,
}

/// Zero of the time stamps in fio's logs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogClock {
    /// The job's own start: fio's default.
    #[default]
    JobStart,
    /// CLOCK_MONOTONIC of the machine that fio runs on, to compare with other events there.
    Monotonic,
}

impl LogClock {
    /// Lines of the job file.
    pub(crate) fn options(self) -> String {
        match self {
            Self::JobStart => String::new(),
            Self::Monotonic => {
                format!("log_alternate_epoch=1\nlog_alternate_epoch_clock_id={}\n", libc::CLOCK_MONOTONIC)
            }
        }
    }
}

/// Linux I/O scheduling class with its level, 0 (most urgent) to 7 (ioprio_set(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IoClass {
    /// Served before all other classes.
    RealTime(u8),
    /// Class of tasks without another one.
    BestEffort(u8),
    /// Only when no other task wants the device.
    Idle,
}

impl IoClass {
    /// Lines of the job file.
    fn options(self) -> String {
        match self {
            Self::RealTime(level) => format!("prioclass=1\nprio={}\n", level.min(7)),
            Self::BestEffort(level) => format!("prioclass=2\nprio={}\n", level.min(7)),
            Self::Idle => "prioclass=3\n".to_owned(),
        }
    }
}

/// fio's engine for tasks that keep requests in flight without waiting for each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Engine {
    /// Linux AIO.
    #[default]
    Libaio,
    /// io_uring with registered buffers and files, without polling for completions.
    IoUring,
}

impl Engine {
    /// Lines of the job file.
    fn options(self) -> &'static str {
        match self {
            Self::Libaio => "ioengine=libaio\n",
            Self::IoUring => "ioengine=io_uring\nfixedbufs=1\nregisterfiles=1\nhipri=0\n",
        }
    }
}

/// Part of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    /// First byte; a multiple of 4 KiB.
    pub offset: Bytes,
    /// Length; a multiple of 4 KiB.
    pub size: Bytes,
}

/// Shared object for fio's `LD_PRELOAD`, for Linux with glibc or musl on this machine's
/// architecture; `preload/fio_sleep.rs` has its source, and the reason for it. Where it cannot be
/// loaded fio reports it on stderr and runs without.
pub const PRELOAD: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/fio_sleep.so"));

/// fio job of one VM: one fio process with one thread per section. A task is one section, an open
/// task several.
#[derive(Clone, Debug, PartialEq)]
pub struct JobFile {
    vm: String,
    tasks: Vec<Task>,
    sections: Vec<Section>,
    options: JobOptions,
    /// Disk of each task; empty where all use that of the options.
    targets: Vec<PathBuf>,
    engine: Engine,
}

/// Section of a job file: a thread of fio.
#[derive(Clone, Debug, PartialEq)]
pub struct Section {
    /// Name, which fio repeats as `jobname`. A prefix keeps a task named `global` from being taken
    /// for fio's own section.
    pub name: String,
    /// Index of its task in [`JobFile::tasks`].
    pub task: usize,
    /// Pace of its requests; `None` for as fast as the loop allows.
    pub pace: Option<FioRate>,
}

impl JobFile {
    /// Makes the job of a VM's tasks.
    ///
    /// # Errors
    /// [`MeasureError::JobFile`] for a path or region that a job file cannot hold,
    /// [`MeasureError::Unsupported`] for a task that fio cannot run as declared.
    pub fn new(vm: &Vm, options: JobOptions) -> Result<Self, MeasureError> {
        check_options(vm, &options)?;
        let mut sections = Vec::new();
        for (i, task) in vm.tasks.iter().enumerate() {
            let paces = FioRate::from_task(task)?;
            check_task(task, &paces)?;
            let base = format!("t{i}-{}", task.name);
            match paces.as_slice() {
                [] => sections.push(Section { name: base, task: i, pace: None }),
                [pace] => sections.push(Section { name: base, task: i, pace: Some(*pace) }),
                many => sections.extend(many.iter().enumerate().map(|(k, pace)| Section {
                    name: format!("{base}.{k}"),
                    task: i,
                    pace: Some(*pace),
                })),
            }
        }
        let (vm, tasks) = (vm.name.clone(), vm.tasks.clone());
        Ok(Self { vm, tasks, sections, options, targets: Vec::new(), engine: Engine::default() })
    }

    /// Sets a disk for each task, in place of the one of all; an empty list changes nothing.
    ///
    /// # Errors
    /// [`MeasureError::JobFile`] for a path that a job file cannot hold, or another number of disks
    /// than of tasks.
    pub fn with_targets(mut self, targets: &[PathBuf]) -> Result<Self, MeasureError> {
        if !targets.is_empty() && targets.len() != self.tasks.len() {
            let reason = format!("{} disks for {} tasks", targets.len(), self.tasks.len());
            return Err(MeasureError::JobFile { vm: self.vm, reason });
        }
        for path in targets {
            check_path(&self.vm, path)?;
        }
        self.targets = targets.to_vec();
        Ok(self)
    }

    /// Sets the engine of the tasks that neither sync their writes nor wait for each request.
    #[must_use]
    pub fn with_engine(self, engine: Engine) -> Self {
        Self { engine, ..self }
    }

    /// Name of the VM.
    #[must_use]
    pub fn vm(&self) -> &str {
        &self.vm
    }

    /// Tasks of the VM in spec order.
    #[must_use]
    pub fn tasks(&self) -> &[Task] {
        &self.tasks
    }

    /// All sections in the order in which fio numbers them.
    #[must_use]
    pub fn sections(&self) -> &[Section] {
        &self.sections
    }

    /// Options that the job was made with.
    #[must_use]
    pub fn options(&self) -> &JobOptions {
        &self.options
    }

    /// Whether any task writes.
    #[must_use]
    pub fn writes(&self) -> bool {
        self.tasks.iter().any(|t| t.op != Op::Read)
    }

    /// Time from start to end of the tasks: warm-up and measured part.
    #[must_use]
    pub fn duration(&self) -> Duration {
        self.options.warmup + self.options.runtime
    }

    #[must_use]
    pub fn job_path(&self) -> PathBuf {
        self.options.dir.join("job.fio")
    }

    /// Path of [`PRELOAD`], for a job that paces requests with that option set, else `None`.
    #[must_use]
    pub fn preload_path(&self) -> Option<PathBuf> {
        let wanted = self.options.preload && self.sections.iter().any(|s| s.pace.is_some());
        wanted.then(|| self.options.dir.join("fio_sleep.so"))
    }

    /// Environment variables that load [`PRELOAD`] into fio; none for a job without it. Symbols are
    /// resolved at the start and not in the middle of fio's clock calibration.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        self.preload_path().map_or_else(Vec::new, |path| {
            vec![("LD_BIND_NOW", "1".to_owned()), ("LD_PRELOAD", path.display().to_string())]
        })
    }

    /// Path of fio's JSON output.
    #[must_use]
    pub fn json_path(&self) -> PathBuf {
        self.options.dir.join("fio.json")
    }

    /// Path of the latency log of each section; `None` for a section without a pace, whose
    /// latencies need no correction. fio numbers the logs by section, from 1.
    #[must_use]
    pub fn log_paths(&self) -> Vec<Option<PathBuf>> {
        let path = |i: usize| self.options.dir.join(format!("rtvirtio_lat.{}.log", i + 1));
        self.sections.iter().enumerate().map(|(i, s)| s.pace.map(|_| path(i))).collect()
    }

    /// Arguments for fio. `--readonly` makes fio itself refuse every write when no task writes.
    #[must_use]
    pub fn args(&self) -> Vec<String> {
        fio_args(&self.job_path(), &self.json_path(), !self.writes())
    }

    #[must_use]
    pub fn text(&self) -> String {
        let mut s = String::from("[global]\n");
        s.push_str(COMMON);
        // Cannot fail: writing to a String. fio appends a section's own file name to a global one,
        // so each is written in one place only.
        if self.targets.is_empty() {
            let _ = writeln!(s, "filename={}", escaped(&self.options.target));
        }
        if let Some(region) = self.options.region {
            let _ = writeln!(s, "offset={}\nsize={}", region.offset.0, region.size.0);
        }
        if let Some(class) = self.options.io_class {
            s.push_str(&class.options());
        }
        s.push_str(&self.options.clock.options());
        for (i, section) in self.sections.iter().enumerate() {
            let _ = write!(s, "\n[{}]\n{}", section.name, self.section_text(i, section));
        }
        s
    }

    fn section_text(&self, i: usize, section: &Section) -> String {
        let task = &self.tasks[section.task];
        let mut s = String::new();
        let random = if task.pattern == Pattern::Random { "rand" } else { "" };
        let rw = match task.op {
            Op::Read => "read",
            Op::Write => "write",
            Op::Mixed { .. } => "rw",
        };
        if let Some(target) = self.targets.get(section.task) {
            let _ = writeln!(s, "filename={}", escaped(target));
        }
        let _ = writeln!(s, "rw={random}{rw}\n{}", sizes(task));
        if let Op::Mixed { write_share } = task.op {
            let percent = (write_share.0 * 100.0).round().clamp(1.0, 99.0);
            let _ = writeln!(s, "rwmixwrite={percent}");
        }
        // fio refuses a number beyond its signed 64 bits.
        let seed = self.options.seed.wrapping_add(i as u64 + 1) & (u64::MAX >> 1);
        let _ = writeln!(s, "randseed={seed}");
        let ms = |d: Duration| d.as_millis();
        if let Some(sync) = task.sync {
            s.push_str(sync_options(sync));
        }
        let Some(pace) = section.pace else {
            // A synced write is one system call that returns when the data is durable.
            match task.sync {
                Some(_) => s.push_str("ioengine=psync\n"),
                None => {
                    let _ = writeln!(s, "{}iodepth={}", self.engine.options(), task.depth);
                }
            }
            if !self.options.warmup.is_zero() {
                let _ = writeln!(s, "ramp_time={}ms", ms(self.options.warmup));
            }
            let _ = writeln!(s, "runtime={}ms", ms(self.options.runtime));
            if let Some(burst) = task.busy_period() {
                // fio ends the phase at a request's end, so a phase lasts up to one request longer.
                let us = burst.0.div_ceil(1000);
                let _ = writeln!(s, "thinktime={us}us\nthinktime_iotime={us}us");
            }
            return s;
        };
        if task.arrival == Arrival::Closed && task.depth > 1 {
            let _ = writeln!(s, "{}iodepth={}", self.engine.options(), task.depth);
        } else {
            s.push_str("ioengine=psync\n");
        }
        let _ = writeln!(s, "{}\nrate_process=linear", pace.option());
        // No ramp_time here: fio drops a task's backlog when it ends. The log allows the warm-up to
        // be cut off here.
        let _ = writeln!(s, "runtime={}ms", ms(self.duration()));
        let _ = writeln!(s, "write_lat_log={}", escaped(&self.options.dir.join("rtvirtio")));
        s
    }
}

/// Size option: `bs`, or the shares of a mix.
fn sizes(task: &Task) -> String {
    if task.mix.is_empty() {
        return format!("bs={}", task.block.0);
    }
    let percent = |share: f64| (share * 100.0).round();
    let mix: Vec<String> = task.mix.iter().map(|m| format!("{}/{}", m.size.0, percent(m.share.0))).collect();
    format!("bssplit={}", mix.join(":"))
}

/// Options for a write with its sync: through the page cache with O_DSYNC or O_SYNC, so that one
/// call copies the data, writes it back and flushes the device's cache, as write(2) and
/// fdatasync(2) of a database do, and the log has one entry for all of it.
///
/// fio's own `fdatasync=1` logs only the write and never the sync (to 3.42, add_sync_clat_sample in
/// stat.c). With `direct=1` a block device gets two flushes for each O_DSYNC write: the write's own
/// (REQ_FUA, `dio_bio_write_op`) and that of `generic_write_sync` after it (block/fops.c).
fn sync_options(sync: SyncKind) -> &'static str {
    match sync {
        SyncKind::Fdatasync => "direct=0\nsync=dsync\n",
        SyncKind::Fsync => "direct=0\nsync=sync\n",
    }
}

/// Options of every job.
///
/// `lat` (submission + completion) is the latency that is used; `slat` and `clat` are off because
/// their logs would triple the volume. `allow_file_create=0`: a mistyped path is an error and not a
/// new file. `thread`: a switch between tasks then changes no address space, which costs an
/// emulated guest its whole TLB (3 flushes a request without, 0.05 with it).
pub(crate) const COMMON: &str = "\
direct=1
time_based=1
thread=1
group_reporting=0
lat_percentiles=1
clat_percentiles=0
disable_slat=1
disable_clat=1
percentile_list=50:99:99.9:99.99
norandommap=1
allow_file_create=0
invalidate=0
";

/// Arguments of fio for a job file.
pub(crate) fn fio_args(job: &Path, json: &Path, read_only: bool) -> Vec<String> {
    let mut args = vec![
        "--output-format=json+".to_owned(),
        "--eta=never".to_owned(),
        format!("--output={}", json.display()),
    ];
    if read_only {
        args.push("--readonly".to_owned());
    }
    args.push(job.display().to_string());
    args
}

/// Path for a job file, with escaped colons, at which fio splits file names.
pub(crate) fn escaped(path: &Path) -> String {
    path.display().to_string().replace(':', "\\:")
}

fn check_options(vm: &Vm, options: &JobOptions) -> Result<(), MeasureError> {
    let refuse = |reason: String| Err(MeasureError::JobFile { vm: vm.name.clone(), reason });
    check_path(&vm.name, &options.target)?;
    check_path(&vm.name, &options.dir)?;
    if options.runtime < Duration::from_millis(1) {
        return refuse("the runtime is zero".to_owned());
    }
    let largest = vm.tasks.iter().map(|t| t.block.0).max().unwrap_or(0);
    if let Some(region) = options.region {
        if region.size.0 < largest || region.offset.0 % 4096 != 0 || region.size.0 % 4096 != 0 {
            return refuse(format!(
                "region {} at {} must be a multiple of 4KiB and hold a block of {}",
                region.size,
                region.offset,
                Bytes(largest)
            ));
        }
    }
    Ok(())
}

fn check_path(vm: &str, path: &Path) -> Result<(), MeasureError> {
    let refuse = |reason: String| Err(MeasureError::JobFile { vm: vm.to_owned(), reason });
    if !path.is_absolute() {
        return refuse(format!("path {} is not absolute", path.display()));
    }
    // fio expands `$`, and takes a line break as the end of the option.
    match path.to_str() {
        Some(s) if !s.contains(|c: char| c == '$' || c.is_control()) => Ok(()),
        _ => refuse(format!("path {} has a character that a fio job file cannot hold", path.display())),
    }
}

fn check_task(task: &Task, paces: &[FioRate]) -> Result<(), MeasureError> {
    let refuse =
        |reason: &str| Err(MeasureError::Unsupported { task: task.name.clone(), reason: reason.to_owned() });
    if paces.len() > 1 && task.pattern == Pattern::Sequential {
        return refuse(
            "fio cannot keep one sequence over several requests of an open loop; use depth = 1 or a closed loop",
        );
    }
    if paces.is_empty() {
        if task.arrival == Arrival::Open {
            return refuse("an open loop needs a rate");
        }
        if let Op::Mixed { write_share } = task.op {
            let percent = write_share.0 * 100.0;
            if (percent - percent.round()).abs() > 1e-6 {
                return refuse(
                    "without a rate fio mixes by whole percents; declare a rate or another write share",
                );
            }
        }
    }
    Ok(())
}
