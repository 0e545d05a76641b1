//! fio as a child of this process.
//!
//! fio must not outlive this process, even when it is killed. The parent-death signal is SIGTERM,
//! not SIGKILL, so that fio ends its own child processes. On cancel fio gets SIGTERM, then its
//! whole process group SIGKILL.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::MeasureError;
use crate::error::io_error;
use crate::fio::{FioOutput, JobFile, PRELOAD, fio_args};

/// Interval at which the child and the cancel flag are polled.
const TICK: Duration = Duration::from_millis(20);
/// Time for fio to end its processes after SIGTERM.
const TERM_GRACE: Duration = Duration::from_millis(1_500);
/// Time for processes to vanish after SIGKILL; one that waits for a hung device cannot.
const KILL_GRACE: Duration = Duration::from_secs(5);
/// Largest JSON output read, in bytes.
const MAX_JSON: u64 = 64 << 20;
/// Largest log read, in bytes.
const MAX_LOG: u64 = 512 << 20;
/// Bytes kept from the end of stderr.
const STDERR_TAIL: u64 = 8 << 10;

/// Cgroups, limits and callbacks of a run.
pub struct Control<'a> {
    /// `cgroup.procs` files that fio is put into before it starts, one per hierarchy.
    pub cgroup_procs: &'a [PathBuf],
    /// Flag that stops the run when set.
    pub cancel: &'a AtomicBool,
    /// Time beyond its declared duration that fio may take, for its start and for requests that are
    /// still in flight.
    pub grace: Duration,
    /// Called about every 20 ms with the time since the start.
    pub on_tick: &'a mut dyn FnMut(Duration),
}

/// Whether fio can be run here; called before anything is prepared for its runs.
///
/// # Errors
/// [`MeasureError::FioMissing`], or [`MeasureError::Start`] where it exists and cannot be started.
pub fn ensure_fio() -> Result<(), MeasureError> {
    let asked = Command::new("fio").arg("--version").stdin(Stdio::null()).output();
    asked.map(drop).map_err(|e| not_started(e, &[]))
}

/// Maps the error of starting fio in these cgroups.
fn not_started(source: io::Error, cgroups: &[PathBuf]) -> MeasureError {
    match source.kind() {
        io::ErrorKind::NotFound => MeasureError::FioMissing,
        _ => MeasureError::Start { cgroups: cgroups.to_vec(), source },
    }
}

/// Runs a job here and waits for it. Its directory must exist; files of an earlier run in it are
/// removed first.
///
/// Call it from a thread that lives as long as the run: the kernel ties the parent-death signal to
/// the thread.
///
/// # Errors
/// [`MeasureError::FioMissing`], [`MeasureError::Start`] (such as a cgroup that is gone),
/// [`MeasureError::Fio`] with fio's stderr, [`MeasureError::Cancelled`],
/// [`MeasureError::TimedOut`], or a failed file operation. fio is gone in every case.
pub fn run_fio(job: &JobFile, control: &mut Control<'_>) -> Result<FioOutput, MeasureError> {
    if let Some(path) = job.preload_path() {
        std::fs::write(&path, PRELOAD).map_err(io_error("write", &path))?;
    }
    let text = job.text();
    let load = Load {
        dir: &job.options().dir,
        text: &text,
        logs: &job.log_paths(),
        read_only: !job.writes(),
        environment: &job.environment(),
        duration: job.duration(),
    };
    run_text(&load, control)
}

/// Job file as text, with its directory, logs and duration.
pub(crate) struct Load<'a> {
    /// Directory for its files.
    pub(crate) dir: &'a Path,
    pub(crate) text: &'a str,
    /// Paths of the logs that it makes.
    pub(crate) logs: &'a [Option<PathBuf>],
    pub(crate) read_only: bool,
    /// Environment variables in addition to those of this process.
    pub(crate) environment: &'a [(&'static str, String)],
    /// Planned duration of the run.
    pub(crate) duration: Duration,
}

/// Runs a job file given as text.
pub(crate) fn run_text(load: &Load<'_>, control: &mut Control<'_>) -> Result<FioOutput, MeasureError> {
    let Load { dir, text, logs, read_only, environment, duration } = *load;
    let (job_path, json_path, stderr_path) =
        (dir.join("job.fio"), dir.join("fio.json"), dir.join("fio.stderr"));
    for old in logs.iter().flatten().chain([&json_path]) {
        match std::fs::remove_file(old) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io_error("remove", old)(e)),
            _ => {}
        }
    }
    std::fs::write(&job_path, text).map_err(io_error("write", &job_path))?;
    let stderr = File::create(&stderr_path).map_err(io_error("create", &stderr_path))?;

    let mut command = Command::new("fio");
    command.args(fio_args(&job_path, &json_path, read_only));
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    command.current_dir(dir).stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
    let status = wait(&mut Running::start(&mut command, control.cgroup_procs)?, duration, control)?;

    let stderr = tail(&stderr_path, STDERR_TAIL)?;
    if !status.success() {
        // fio reports some errors on stderr, others in front of its JSON.
        let said = if stderr.trim().is_empty() { first_lines(&json_path) } else { stderr };
        return Err(MeasureError::Fio { status: status.to_string(), stderr: said.trim().to_owned() });
    }
    let json = read_bounded(&json_path, MAX_JSON)?;
    let logs = logs
        .iter()
        .map(|path| path.as_deref().map(|p| read_bounded(p, MAX_LOG)).transpose())
        .collect::<Result<Vec<_>, _>>()?;
    Ok(FioOutput { json, logs, stderr })
}

/// Child process fio with its forked processes; ended when dropped.
struct Running {
    child: Child,
    reaped: bool,
}

impl Running {
    fn start(command: &mut Command, cgroups: &[PathBuf]) -> Result<Self, MeasureError> {
        // Opened here, where an error can still name the path; written by the child, so that no
        // request runs outside.
        let procs = cgroups
            .iter()
            // kernel file
            .map(|p| OpenOptions::new().write(true).open(p).map_err(io_error("open", p)))
            .collect::<Result<Vec<_>, _>>()?;
        let parent = std::process::id();
        command.process_group(0);
        // SAFETY: between fork and exec only async-signal-safe calls are made: write, prctl and
        // getppid on values captured before the fork; no allocation, no lock. `procs` is moved in,
        // so its descriptors stay open.
        unsafe {
            command.pre_exec(move || {
                for file in &procs {
                    // "0" means the writing process, in cgroup v1 and v2.
                    if libc::write(file.as_raw_fd(), b"0".as_ptr().cast(), 1) != 1 {
                        return Err(io::Error::last_os_error());
                    }
                }
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) != 0 {
                    return Err(io::Error::last_os_error());
                }
                // The parent may have died before the line above.
                if libc::getppid() as u32 != parent {
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
                Ok(())
            });
        }
        let child = command.spawn().map_err(|e| not_started(e, cgroups))?;
        Ok(Self { child, reaped: false })
    }

    fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        let status = self.child.try_wait()?;
        self.reaped |= status.is_some();
        Ok(status)
    }

    /// Sends a signal to the whole group; `false` when no process is left in it.
    fn signal(&self, signal: libc::c_int) -> bool {
        let group = self.child.id() as libc::pid_t;
        // SAFETY: plain system call. The group id is ours: its leader is our child, and while any
        // member lives the id is not reused; after that the call says ESRCH.
        unsafe { libc::kill(-group, signal) == 0 }
    }

    fn wait_for(&mut self, limit: Duration) -> bool {
        let start = Instant::now();
        while start.elapsed() < limit {
            if !matches!(self.try_wait(), Ok(None)) {
                return true;
            }
            std::thread::sleep(TICK / 4);
        }
        false
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.reaped {
            return;
        }
        // SAFETY: plain system call on our own child, which has not been reaped, so its id is not
        // reused.
        unsafe { libc::kill(self.child.id() as libc::pid_t, libc::SIGTERM) };
        if self.wait_for(TERM_GRACE) {
            return;
        }
        self.signal(libc::SIGKILL);
        let start = Instant::now();
        self.wait_for(KILL_GRACE);
        // The forked processes are init's to reap now; wait until they are gone, so that the device
        // is free.
        while self.signal(0) && start.elapsed() < KILL_GRACE {
            std::thread::sleep(TICK);
        }
    }
}

fn wait(
    running: &mut Running,
    duration: Duration,
    control: &mut Control<'_>,
) -> Result<ExitStatus, MeasureError> {
    let start = Instant::now();
    let limit = duration + control.grace;
    loop {
        if let Some(status) = running.try_wait().map_err(io_error("wait for", Path::new("fio")))? {
            return Ok(status);
        }
        if control.cancel.load(Ordering::Relaxed) {
            return Err(MeasureError::Cancelled);
        }
        let elapsed = start.elapsed();
        if elapsed > limit {
            return Err(MeasureError::TimedOut { after: limit });
        }
        (control.on_tick)(elapsed);
        std::thread::sleep(TICK);
    }
}

fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, MeasureError> {
    let mut bytes = Vec::new();
    // own file
    let file = File::open(path).map_err(io_error("open", path))?;
    file.take(limit + 1).read_to_end(&mut bytes).map_err(io_error("read", path))?;
    if bytes.len() as u64 > limit {
        return Err(MeasureError::TooBig { what: path.display().to_string(), limit });
    }
    Ok(bytes)
}

fn tail(path: &Path, limit: u64) -> Result<String, MeasureError> {
    // own file
    let mut file = File::open(path).map_err(io_error("open", path))?;
    let size = file.metadata().map_err(io_error("stat", path))?.len();
    file.seek(SeekFrom::Start(size.saturating_sub(limit))).map_err(io_error("seek", path))?;
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes).map_err(io_error("read", path))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Text that fio wrote before its JSON, for an error message; empty if unreadable.
fn first_lines(path: &Path) -> String {
    let mut bytes = Vec::new();
    // own file
    if let Ok(file) = File::open(path) {
        let _ = file.take(2_048).read_to_end(&mut bytes);
    }
    let text = String::from_utf8_lossy(&bytes);
    text.lines().take_while(|l| !l.starts_with('{')).collect::<Vec<_>>().join("; ")
}
