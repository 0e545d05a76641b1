//! Runs the tasks of several VMs at once, each inside its guest through the agent, or on the host
//! in the VM's cgroup.

mod start;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::fio::{FioOutput, IoClass, JobFile, JobOptions, LogClock, PRELOAD, Region};
use crate::local::{Control, run_fio};
use crate::noise::{Noise, NoiseProbe};
use crate::run::{TaskMeasurement, task_measurements};
use crate::stalls::Stalls;
use crate::standstill::{DiskWatch, Standstills};
use crate::{MeasureError, TaskResult};
use rtvirtio_kernel::Root;
use rtvirtio_kernel::steal::StealWatch;
use rtvirtio_spec::Vm;
use rtvirtio_units::Nanos;
use rtvirtio_vmm::agent::NEEDED;
use rtvirtio_vmm::{AgentAddress, GuestAgent, VmmError, shown};
use start::Start;

/// Warm-up before the measured part: files are opened and queues are filled.
///
/// An emulated guest also translates fio's code in it, which took up to 2 s in each of three guests
/// on two cores.
pub const WARM_UP: Duration = Duration::from_secs(2);
/// Time beyond its declared duration that fio may take. A guest under emulation starts slowly.
const GRACE: Duration = Duration::from_secs(60);
/// Interval at which a guest is asked whether its fio has ended, once its time is over.
const POLL: Duration = Duration::from_millis(500);
/// Interval of these questions before that.
const WATCH: Duration = Duration::from_secs(30);
/// Time for fio in a guest to end after SIGTERM.
const TERM_PATIENCE: Duration = Duration::from_secs(5);
/// Interval at which cancellation is checked.
const TICK: Duration = Duration::from_millis(100);
/// Time before the end of the warm-up at which [`Moment::Begin`] is reported.
const EARLY: Duration = Duration::from_millis(300);
/// Directory in a guest for a run's files: a RAM disk in the lab's and on all systemd guests.
const GUEST_DIR: &str = "/run/rtvirtio-fio";
/// Largest file of a guest that is read, in bytes. A log line has about 30: two million requests.
const GUEST_FILE_LIMIT: usize = 64 << 20;
/// Largest number of a guest program's stderr lines in an error.
const GUEST_LINES: usize = 20;

/// Location of a VM's tasks.
#[derive(Clone, Debug)]
pub enum Place {
    /// Inside the guest, through its agent.
    Guest {
        agent: AgentAddress,
        /// Block device inside the guest.
        target: PathBuf,
        /// Load [`PRELOAD`] into the guest's fio.
        preload: bool,
    },
    /// On the host, in the VM's cgroup.
    Host {
        /// `cgroup.procs` files, one per hierarchy.
        cgroup_procs: Vec<PathBuf>,
        /// Block device or file.
        target: PathBuf,
        /// Part of it that belongs to the VM; `None` for all.
        region: Option<Region>,
    },
}

/// Part of a run for one VM.
#[derive(Clone, Debug)]
pub struct VmLoad {
    /// The VM and its tasks.
    pub vm: Vm,
    /// Location of the tasks.
    pub place: Place,
    /// Disk of each task; empty where all use that of the place.
    pub targets: Vec<PathBuf>,
    /// Predicted latency for each target of its tasks (and each task without one), for the result.
    pub predicted: Vec<Option<Nanos>>,
    /// I/O class of its tasks, where they run on the host.
    pub io_class: Option<IoClass>,
}

impl VmLoad {
    /// All tasks of a VM on the disk of its place, without predictions.
    #[must_use]
    pub fn new(vm: Vm, place: Place) -> Self {
        Self { vm, place, targets: Vec::new(), predicted: Vec::new(), io_class: None }
    }

    /// Disk that the task at this position uses.
    #[must_use]
    pub fn target(&self, task: usize) -> &Path {
        let (Place::Guest { target, .. } | Place::Host { target, .. }) = &self.place;
        self.targets.get(task).unwrap_or(target)
    }
}

/// Reason why a run has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WorkloadError {
    /// Error of fio, or of its output.
    #[error("vm {vm}: {source}")]
    Measure {
        vm: String,
        /// Error of the measurement.
        source: MeasureError,
    },
    /// The guest's agent has a command disabled that is needed.
    #[error("vm {vm}: {source}")]
    AgentDisabled {
        vm: String,
        /// Error with the name of the command.
        source: Box<VmmError>,
    },
    /// Error of the connection to the guest's agent.
    #[error(
        "vm {vm}: {source}; is the guest still alive, and does it run qemu-guest-agent? For a lab: `rtvirtio-lab status`"
    )]
    Agent {
        vm: String,
        /// Error of the agent's client.
        source: Box<VmmError>,
    },
    /// A command inside the guest failed.
    #[error("vm {vm}: {what} failed inside the guest: {said}")]
    InGuest {
        vm: String,
        /// Command that was run.
        what: String,
        /// First lines of its stderr.
        said: String,
    },
    /// A directory on the host could not be made.
    #[error("cannot create {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The user stopped it.
    #[error("cancelled")]
    Cancelled,
}

impl WorkloadError {
    /// Whether the user stopped the run, or another VM's failure did.
    #[must_use]
    pub fn is_cancelled(&self) -> bool {
        matches!(self, Self::Cancelled | Self::Measure { source: MeasureError::Cancelled, .. })
    }
}

/// Moment of a run at which its caller may read counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// All VMs are prepared, and the warm-up begins.
    Start,
    /// The warm-up is almost over: readings that take a while end before the measured part.
    Begin,
    /// The measured part is over; requests may still be in flight.
    End,
}

/// Times, files and callbacks of a run.
pub struct RunOptions<'a> {
    /// Length of the measured part.
    pub length: Duration,
    /// Time before it: [`WARM_UP`], or less where no emulated guest is in it.
    pub warm_up: Duration,
    /// Seed of the addresses; each VM's own is derived from it.
    pub seed: u64,
    /// A directory on the host for fio's files; made when missing.
    pub work_dir: &'a Path,
    /// Whether a probe under SCHED_FIFO on every CPU detects stalls of the host. Not beside VMs
    /// that do real work.
    pub watch: bool,
    /// Directory in sysfs of the disk that the tasks share, to detect its standstills; `None` for
    /// no detection.
    pub disk: Option<&'a Path>,
    /// Flag that stops the run when set.
    pub cancel: &'a AtomicBool,
    /// Called about ten times a second with the seconds since the start.
    pub on_tick: &'a mut dyn FnMut(Duration),
    /// Called at each moment by the host's clock, up to a tick late: fio in a guest takes a moment
    /// to start. A run that ends earlier leaves calls out.
    pub on_moment: &'a mut dyn FnMut(Moment),
}

/// Measurements of a run.
#[derive(Clone, Debug)]
pub struct Measured {
    /// All tasks, VM by VM.
    pub tasks: Vec<TaskMeasurement>,
    /// Stalls of the host, summed up; `None` unless it was watched.
    pub noise: Option<Noise>,
    /// Spans of these stalls, where they are known.
    pub stalls: Option<Stalls>,
    /// Standstills of the disk, where it was watched and the kernel counts its requests.
    pub disk: Option<Standstills>,
}

/// Results of a run: each task, stalls of the host, and standstills of the disk.
pub type RunResults = (Vec<TaskResult>, Option<Noise>, Option<Standstills>);

/// Runs the tasks of all VMs at once and judges them, in the order given, with the stalls of host
/// and disk. When one VM fails the others are stopped.
///
/// # Errors
/// The first failure that is not a consequence of another one.
pub fn run(loads: &[VmLoad], options: &mut RunOptions<'_>) -> Result<RunResults, WorkloadError> {
    let measured = measure(loads, options)?;
    let tasks = measured.tasks.into_iter().map(TaskMeasurement::with_tail).collect();
    Ok((tasks, measured.noise, measured.disk))
}

/// Measurement by [`run()`], with every latency.
pub fn measure(loads: &[VmLoad], options: &mut RunOptions<'_>) -> Result<Measured, WorkloadError> {
    let probe = options.watch.then(NoiseProbe::start);
    let disk = options.disk.and_then(|disk| DiskWatch::start(disk, options.watch));
    let root = Root::default();
    let steal = StealWatch::start(&root);
    let tasks = measure_tasks(loads, options);
    let stolen = steal.and_then(|watch| watch.share(&root)).ok().flatten();
    let (noise, stalls) = probe.map(NoiseProbe::finish).unzip();
    let noise = noise.map(|noise| Noise { stolen, ..noise });
    let stalls = stalls.flatten();
    let disk = disk.map(|watch| watch.finish(stalls.as_ref()));
    let mut measured = Measured { tasks: tasks?, noise, stalls, disk };
    if let Some(stalls) = &measured.stalls {
        measured.tasks.iter_mut().for_each(|t| t.subtract_host_stalls(stalls));
    }
    Ok(measured)
}

fn measure_tasks(
    loads: &[VmLoad],
    options: &mut RunOptions<'_>,
) -> Result<Vec<TaskMeasurement>, WorkloadError> {
    let stop = AtomicBool::new(false);
    let ready = Start::new(loads.len());
    let start = Instant::now();
    let (length, warm_up, seed, work_dir) = (options.length, options.warm_up, options.seed, options.work_dir);
    let watch = options.watch;
    let outcomes: Vec<Result<Vec<TaskMeasurement>, WorkloadError>> = std::thread::scope(|scope| {
        let threads: Vec<_> = loads
            .iter()
            .enumerate()
            .map(|(i, load)| {
                let (stop, ready) = (&stop, &ready);
                scope.spawn(move || {
                    let seed = seed.wrapping_add(1000 * i as u64);
                    let result = run_vm(load, (warm_up, length), (seed, watch), work_dir, ready, stop);
                    if result.is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    result
                })
            })
            .collect();
        let moments = [
            (Duration::ZERO, Moment::Start),
            (warm_up.saturating_sub(EARLY), Moment::Begin),
            (warm_up + length, Moment::End),
        ];
        let mut moments = moments.into_iter().peekable();
        while !threads.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            if let Some((_, moment)) = moments.next_if(|(time, _)| ready.is_past(*time)) {
                (options.on_moment)(moment);
            }
            if options.cancel.load(Ordering::Relaxed) {
                stop.store(true, Ordering::Relaxed);
            }
            (options.on_tick)(start.elapsed());
            std::thread::sleep(TICK);
        }
        let panicked = |_| Err(WorkloadError::Cancelled);
        threads.into_iter().map(|t| t.join().unwrap_or_else(panicked)).collect()
    });
    let mut results = Vec::new();
    let mut cancelled = None;
    for outcome in outcomes {
        match outcome {
            Ok(tasks) => results.extend(tasks),
            Err(e) if e.is_cancelled() => cancelled = Some(e),
            Err(e) => return Err(e),
        }
    }
    cancelled.map_or(Ok(results), |_| Err(WorkloadError::Cancelled))
}

fn run_vm(
    load: &VmLoad,
    (warmup, runtime): (Duration, Duration),
    (seed, watch): (u64, bool),
    work_dir: &Path,
    ready: &Start,
    stop: &AtomicBool,
) -> Result<Vec<TaskMeasurement>, WorkloadError> {
    let vm = &load.vm.name;
    let measure = |source| WorkloadError::Measure { vm: vm.clone(), source };
    let (target, region, dir) = match &load.place {
        Place::Guest { target, .. } => (target.clone(), None, PathBuf::from(GUEST_DIR)),
        Place::Host { target, region, .. } => (target.clone(), *region, work_dir.join(vm)),
    };
    // A guest has another clock.
    let clock = match &load.place {
        Place::Host { .. } if watch => LogClock::Monotonic,
        _ => LogClock::JobStart,
    };
    let preload = !matches!(load.place, Place::Guest { preload: false, .. });
    let io_class = load.io_class;
    let options = JobOptions { target, region, warmup, runtime, seed, dir, io_class, clock, preload };
    // Every thread passes the barrier, also one that has failed already, or the others would wait
    // forever.
    let (job, output) = match &load.place {
        Place::Guest { agent, .. } => {
            let prepared = JobFile::new(&load.vm, options)
                .and_then(|job| job.with_targets(&load.targets))
                .map_err(measure)
                .and_then(|job| GuestRun::prepare(vm, agent, &job).map(|guest| (job, guest)));
            ready.wait();
            let (job, mut guest) = prepared?;
            let output = guest.run(&job, stop);
            guest.clean_up();
            (job, output?)
        }
        Place::Host { cgroup_procs, .. } => {
            let dir = options.dir.clone();
            let job = JobFile::new(&load.vm, options).and_then(|job| job.with_targets(&load.targets));
            let prepared = job.map_err(measure).and_then(|job| {
                fs::create_dir_all(&dir).map_err(|source| WorkloadError::Io { path: dir.clone(), source })?;
                Ok(job)
            });
            ready.wait();
            let job = prepared?;
            let mut control = Control { cgroup_procs, cancel: stop, grace: GRACE, on_tick: &mut |_| {} };
            let output = run_fio(&job, &mut control).map_err(measure);
            // The results are in memory; a directory that cannot be removed does no harm.
            let _ = fs::remove_dir_all(&dir);
            (job, output?)
        }
    };
    task_measurements(&job, &output, &load.predicted).map_err(measure)
}

/// Command line of fio in a guest. Its variables are set by env(1), which then executes fio: the
/// agent's own way would clear all others.
fn command_line(job: &JobFile) -> Vec<String> {
    let mut argv = Vec::new();
    let environment = job.environment();
    if !environment.is_empty() {
        argv.push("env".to_owned());
        argv.extend(environment.iter().map(|(name, value)| format!("{name}={value}")));
    }
    argv.push("fio".to_owned());
    argv.extend(job.args());
    argv
}

/// Running fio inside one guest.
struct GuestRun<'a> {
    vm: &'a str,
    agent: GuestAgent,
}

impl<'a> GuestRun<'a> {
    fn prepare(vm: &'a str, agent: &AgentAddress, job: &JobFile) -> Result<Self, WorkloadError> {
        let agent = GuestAgent::reach(agent, Duration::from_secs(20))
            .map_err(|source| WorkloadError::Agent { vm: vm.to_owned(), source: Box::new(source) })?;
        let mut run = Self { vm, agent };
        run.agent.set_timeout(GRACE);
        run.agent.require(&NEEDED).map_err(|e| run.agent_error(e))?;
        run.command(&["rm", "-rf", GUEST_DIR])?;
        run.command(&["mkdir", "-p", GUEST_DIR])?;
        let path = job.job_path().display().to_string();
        run.agent.write_file(&path, job.text().as_bytes()).map_err(|e| run.agent_error(e))?;
        if let Some(path) = job.preload_path() {
            let path = path.display().to_string();
            run.agent.write_file(&path, PRELOAD).map_err(|e| run.agent_error(e))?;
        }
        Ok(run)
    }

    fn agent_error(&self, source: VmmError) -> WorkloadError {
        let (vm, source) = (self.vm.to_owned(), Box::new(source));
        match *source {
            VmmError::Disabled { .. } => WorkloadError::AgentDisabled { vm, source },
            _ => WorkloadError::Agent { vm, source },
        }
    }

    fn command(&mut self, argv: &[&str]) -> Result<(), WorkloadError> {
        let out = self.agent.exec(argv, GRACE).map_err(|e| self.agent_error(e))?;
        if out.success() { Ok(()) } else { Err(self.failed(argv.join(" "), &out.stderr)) }
    }

    fn failed(&self, what: String, stderr: &[u8]) -> WorkloadError {
        let said: Vec<String> =
            String::from_utf8_lossy(stderr).trim().lines().take(GUEST_LINES).map(shown).collect();
        let said = said.join("\n");
        WorkloadError::InGuest { vm: self.vm.to_owned(), what, said }
    }

    fn run(&mut self, job: &JobFile, stop: &AtomicBool) -> Result<FioOutput, WorkloadError> {
        let argv = command_line(job);
        let argv: Vec<&str> = argv.iter().map(String::as_str).collect();
        let process = self.agent.spawn(&argv).map_err(|e| self.agent_error(e))?;
        let start = Instant::now();
        // A request to the agent costs the guest CPU time that counts as latency, so there are few
        // before fio's time is over: one in the warm-up, for a fio that fails at once, and then as
        // many as it takes to notice a dead guest.
        let mut next_poll = job.options().warmup / 2;
        let out = loop {
            if stop.load(Ordering::Relaxed) {
                // The run is lost either way; fio's processes must not go on.
                let _ = self.agent.terminate(process, TERM_PATIENCE);
                return Err(WorkloadError::Cancelled);
            }
            let elapsed = start.elapsed();
            if elapsed >= next_poll {
                if let Some(out) = self.agent.poll(process).map_err(|e| self.agent_error(e))? {
                    break out;
                }
                next_poll = if elapsed < job.duration() {
                    job.duration().min(elapsed + WATCH)
                } else {
                    elapsed + POLL
                };
                if elapsed > job.duration() + GRACE {
                    let _ = self.agent.terminate(process, TERM_PATIENCE);
                    let source = MeasureError::TimedOut { after: elapsed };
                    return Err(WorkloadError::Measure { vm: self.vm.to_owned(), source });
                }
            }
            std::thread::sleep(TICK);
        };
        if !out.success() {
            return Err(self.failed("fio".to_owned(), &out.stderr));
        }
        let json = self.read(&job.json_path())?;
        let logs = job
            .log_paths()
            .into_iter()
            .map(|path| path.map(|path| self.read(&path)).transpose())
            .collect::<Result<_, _>>()?;
        Ok(FioOutput { json, logs, stderr: String::from_utf8_lossy(&out.stderr).into_owned() })
    }

    fn read(&mut self, path: &Path) -> Result<Vec<u8>, WorkloadError> {
        self.agent.read_file(&path.display().to_string(), GUEST_FILE_LIMIT).map_err(|e| self.agent_error(e))
    }

    /// Removes the files from the guest; a guest that died needs no cleaning.
    fn clean_up(&mut self) {
        let _ = self.agent.exec(&["rm", "-rf", GUEST_DIR], GRACE);
    }
}
