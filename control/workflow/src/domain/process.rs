//! The process of an applied I/O domain: started, found, stopped.
//!
//! It inherits an open file that holds the lock of `iod.lock` in the state directory, so the lock
//! is held from its first instruction to its end, whatever becomes of `rtvirtio apply`. Only root
//! can open that file; see [`rtvirtio_kernel::flock`].

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rtvirtio_apply::StateDir;
use rtvirtio_kernel::ProcessId;
use rtvirtio_kernel::{Root, flock, process::Process, trusted};
use serde::{Deserialize, Serialize};

use super::start::{self, Inherited};
use crate::error::{Context as _, Error, Result, bail};

/// The configuration in force, in the state directory.
pub const FILE: &str = "iod.toml";
/// The configuration that was in force last, where it was nowhere else: as `attach`, `detach` or an
/// editor had left it.
pub const KEPT: &str = "iod.last.toml";
/// Name of the log file, in the state directory.
pub const LOG: &str = "iod.log";
/// Locked by the I/O domain's process as long as it lives.
const LOCK: &str = "iod.lock";
/// The process that was started, and where it answers.
const RECORD: &str = "iod.json";
/// Timeout from SIGTERM to SIGKILL, in which requests complete.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// State of an applied I/O domain, with its processes.
pub enum Domain {
    /// No I/O domain is applied.
    Absent,
    /// Applied, and the process has ended.
    Ended,
    /// These processes hold its lock: one, but for the moment in which it is started.
    Runs(Vec<Process>),
}

/// Record of the started process, as JSON.
#[derive(Serialize, Deserialize)]
struct Record {
    /// Boot id of the kernel at the start.
    boot_id: String,
    #[serde(flatten)]
    process: ProcessId,
    /// Control socket of the configuration at the start: the file may be edited since, and be
    /// wrong.
    #[serde(default)]
    control: Option<PathBuf>,
    /// The file from which the configuration was applied.
    #[serde(default)]
    source: Option<PathBuf>,
}

/// Parameters of a start.
pub struct Start<'a> {
    /// Text of the configuration.
    pub config: &'a str,
    /// Control socket named in the text.
    pub control: &'a Path,
    /// File from which the text is.
    pub source: &'a Path,
    /// Whether the text is that of an ended I/O domain: it stays, whatever becomes of the start.
    pub again: bool,
}

/// Looks for the I/O domain that is applied from a state directory. Changes nothing.
///
/// # Errors
/// When it is unknown whether one runs, or which process it is: this is never absence.
pub fn find(state_dir: &Path) -> Result<Domain> {
    let Some(dir) = StateDir::find(state_dir)? else { return Ok(Domain::Absent) };
    let exists = |name: &str| dir.exists(name).with_context(|| state_dir.join(name).display().to_string());
    let path = state_dir.join(LOCK);
    if exists(LOCK)? {
        let lock = dir.open_file(LOCK, 0o600).with_context(|| path.display().to_string())?;
        if flock::is_held(&lock).with_context(|| path.display().to_string())? {
            return Ok(Domain::Runs(holders(&path, &lock)?));
        }
    }
    if let Some(process) = recorded(&dir)? {
        bail!(
            InForce,
            "process {} was started as the I/O domain and runs, but does not hold {}: end it by hand, with `kill {}`",
            process.pid,
            path.display(),
            process.pid
        );
    }
    Ok(if exists(FILE)? { Domain::Ended } else { Domain::Absent })
}

fn holders(path: &Path, lock: &File) -> Result<Vec<Process>> {
    let holder = flock::search(path, lock).context("looking for the I/O domain's process")?;
    if !holder.holders.is_empty() {
        return Ok(holder.holders);
    }
    let unknown: Vec<String> = holder.unknown.iter().map(|(pid, e)| format!("process {pid}: {e}")).collect();
    bail!(
        InForce,
        "an I/O domain runs, for {} is locked, but its process is not found{}",
        path.display(),
        if unknown.is_empty() {
            ": does it run in another PID namespace?".to_owned()
        } else {
            format!("; these could not be inspected: {}", unknown.join(", "))
        }
    )
}

/// The process of the record, if it runs.
fn recorded(dir: &StateDir) -> Result<Option<ProcessId>> {
    let Some(record) = record(dir)? else { return Ok(None) };
    let is_of_this_boot = record.boot_id == boot_id()?;
    Ok(Some(record.process).filter(|process| is_of_this_boot && process.is_alive()))
}

/// Control socket of the I/O domain that was started; `None` where it is not recorded.
pub fn control(state_dir: &Path) -> Result<Option<PathBuf>> {
    let Some(dir) = StateDir::find(state_dir)? else { return Ok(None) };
    Ok(record(&dir)?.and_then(|record| record.control))
}

fn record(dir: &StateDir) -> Result<Option<Record>> {
    let path = dir.path().join(RECORD);
    let text = match dir.read(RECORD) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        read => read.with_context(|| path.display().to_string())?,
    };
    serde_json::from_slice(&text).map(Some).with_context(|| {
        format!("{} is damaged: see that no rtvirtio-iod runs, and remove it", path.display())
    })
}

/// Identifies this run of the kernel.
fn boot_id() -> Result<String> {
    Ok(Root::default().read("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Starts an I/O domain on a configuration, and waits until guests may connect. The state directory
/// is locked by the caller.
///
/// # Errors
/// The last line of its log when it did not start; the configuration is removed then, unless it is
/// that of an I/O domain that is started again.
pub fn start(mut command: Command, on: &Start<'_>, state_dir: &Path) -> Result<u32> {
    let Start { config, control, source, again } = *on;
    let dir = StateDir::open(state_dir)?;
    let at = |name: &'static str| move || state_dir.join(name).display().to_string();
    let lock = dir.open_file(LOCK, 0o600).with_context(at(LOCK))?;
    // Another open file, to read only: the I/O domain cannot write there.
    let lock = File::open(format!("/proc/self/fd/{}", lock.as_raw_fd())).with_context(at(LOCK))?;
    if !flock::lock(&lock).with_context(at(LOCK))? {
        bail!(InForce, "an I/O domain runs already: `rtvirtio revert` stops it");
    }
    let source = if again {
        record(&dir).ok().flatten().and_then(|record| record.source)
    } else {
        Some(super::absolute(source))
    };
    dir.remove(RECORD).with_context(at(RECORD))?;
    // Before it runs: whatever happens from here on, `revert` finds it.
    dir.replace(FILE, 0o644, config.as_bytes()).with_context(at(FILE))?;
    let inherited = Inherited {
        stdin: lock.into(),
        log: dir.create_file(LOG, 0o644).with_context(at(LOG))?,
        read_log: &|| dir.read(LOG),
    };
    command.arg("--config").arg(config_path(state_dir));
    let started = start::start(command, None, inherited).map_err(Error::from);
    let recorded = started.and_then(|process| {
        let record = Record {
            boot_id: boot_id()?,
            process: process.clone(),
            control: Some(control.to_owned()),
            source,
        };
        let record = serde_json::to_vec_pretty(&record)?;
        match dir.replace(RECORD, 0o644, &record).with_context(at(RECORD)) {
            Ok(()) => Ok(process.pid),
            Err(e) => {
                process.stop(STOP_TIMEOUT);
                Err(e)
            }
        }
    });
    recorded.inspect_err(|_| {
        if !again {
            // The first error is reported; `status` reports a file that stays.
            let _ = dir.remove(FILE);
        }
    })
}

/// Saves the configuration in force, unless the file that it was applied from has the same text;
/// returns its path.
fn keep(dir: &StateDir) -> Result<Option<PathBuf>> {
    let named = |name: &str| dir.path().join(name).display().to_string();
    let config = match dir.read(FILE) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        read => read.with_context(|| named(FILE))?,
    };
    // A record that cannot be read names no source.
    let source = record(dir).ok().flatten().and_then(|record| record.source);
    if source.is_some_and(|source| {
        trusted::read_config(source, trusted::CONFIG_LIMIT).is_ok_and(|text| text == config)
    }) {
        return Ok(None);
    }
    dir.replace(KEPT, 0o644, &config).with_context(|| named(KEPT))?;
    Ok(Some(super::absolute(dir.path()).join(KEPT)))
}

/// The configuration in force: a path that does not depend on where this program was started.
pub fn config_path(state_dir: &Path) -> PathBuf {
    super::absolute(state_dir).join(FILE)
}

/// Stops the processes of an I/O domain and removes its files. A configuration that is nowhere else
/// stays, as [`KEPT`]; returns its path. The state directory is locked by the caller.
///
/// # Errors
/// The remaining parts, and why they remain.
pub fn stop(processes: &[Process], state_dir: &Path) -> Result<Option<PathBuf>> {
    for process in processes {
        if !process.stop(STOP_TIMEOUT).with_context(|| format!("process {}", process.pid()))? {
            bail!(
                NotPutBack,
                "process {} does not end, not even by SIGKILL: it waits in the kernel",
                process.pid()
            );
        }
    }
    // Not taken for granted: a process that was not found may share the lock.
    if let Domain::Runs(left) = find(state_dir)? {
        let left: Vec<String> = left.iter().map(|p| p.pid().to_string()).collect();
        bail!(NotPutBack, "process {} holds {} too", left.join(", "), state_dir.join(LOCK).display());
    }
    let dir = StateDir::open(state_dir)?;
    let kept = keep(&dir)?;
    // The configuration last: as long as it is there, the I/O domain counts as applied.
    for name in [LOG, RECORD, LOCK, FILE] {
        dir.remove(name).with_context(|| state_dir.join(name).display().to_string())?;
    }
    Ok(kept)
}
