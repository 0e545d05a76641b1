//! The I/O domain as the product runs it: plan, start, status, stop.

pub mod client;
mod cpu_guarantee;
pub(crate) mod engine_cpus;
pub mod live;
pub mod plan;
pub mod process;
pub mod start;
pub mod urgent;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rtvirtio_apply::{Session, StateDir};
use rtvirtio_domain_config::File;
use rtvirtio_domain_protocol::Status;
use rtvirtio_domain_resources::doubts;
use rtvirtio_kernel::process::Process;
use rtvirtio_kernel::trusted::{CONFIG_LIMIT, read_config_text};
use rtvirtio_kernel::{BlockDevice, Root};
use serde::Serialize;

use self::client::program;
use self::process::{Domain, FILE, LOG, Start};
use crate::dirs::Dirs;
use crate::error::{Context as _, Error, Result, bail};
use crate::progress::Progress;

/// Timeout from the start of an I/O domain to its first answer.
const START: Duration = Duration::from_secs(3);
/// Interval between status requests to an I/O domain that does not answer yet.
const RETRY: Duration = Duration::from_millis(20);

/// A path that does not depend on where this program was started.
fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Whether a file is an I/O domain's configuration rather than a spec, which has VMs and may have
/// several devices too.
#[must_use]
pub fn is_config(path: &Path) -> bool {
    let Ok(text) = read_config_text(path, CONFIG_LIMIT) else { return false };
    let has = |title: &str| text.lines().any(|line| line.trim_start().starts_with(title));
    // Only an I/O domain has ports: a spec's network has none.
    (has("[[device]]") || has("[[network.port]]")) && !has("[[vm]]")
}

/// A configuration file that can be applied.
pub struct Config {
    /// Parsed content of the file.
    pub file: File,
    text: String,
    path: PathBuf,
}

/// Reads a configuration file.
///
/// # Errors
/// [`Kind::File`](crate::Kind::File) for mistakes, and for paths that are not absolute.
pub fn load(path: &Path) -> Result<Config> {
    let text = read_config_text(path, CONFIG_LIMIT).with_context(|| path.display().to_string())?;
    let file = File::parse(path, &text)?;
    let paths = file.devices.iter().flat_map(|d| &d.disks).flat_map(|d| [&d.socket, &d.path]);
    let ports = file.networks.iter().flat_map(|n| &n.ports).map(|p| &p.socket);
    if let Some(relative) = paths.chain(ports).chain([&file.control]).find(|p| p.is_relative()) {
        bail!(
            File,
            "{}: {} must be an absolute path: the I/O domain does not run where you are",
            path.display(),
            relative.display()
        );
    }
    Ok(Config { file, text, path: path.to_owned() })
}

impl Config {
    /// Actions of [`Config::start`], one a line, after all checks of a start.
    ///
    /// # Errors
    /// A configuration that the I/O domain would refuse.
    pub fn preview(&self, source: &Path, dirs: &Dirs, progress: &dyn Progress) -> Result<Vec<String>> {
        if rustix::process::geteuid().is_root() {
            plan::check(&self.file, source)?;
            doubts::warnings(&self.file).iter().for_each(|doubt| progress.warn(doubt));
        } else {
            progress.warn("the disks were not checked: that needs root");
        }
        let ours = process::config_path(&dirs.state);
        Ok(vec![
            format!("{}: -> {}", ours.display(), source.display()),
            format!("start {} --config {}", program().display(), ours.display()),
        ])
    }

    /// Whether it is the applied I/O domain's own file, in the state directory.
    fn is_the_applied(&self, dirs: &Dirs) -> bool {
        let real = |path: &Path| std::fs::canonicalize(path).ok();
        let applied = real(&process::config_path(&dirs.state));
        applied.is_some() && real(&self.path) == applied
    }

    /// Starts the I/O domain with it and returns the process id. One that has ended is started
    /// again only with its own file.
    ///
    /// # Errors
    /// [`Kind::InForce`](crate::Kind::InForce) when one is applied already; the I/O domain's error
    /// when it does not start.
    pub fn start(&self, dirs: &Dirs, progress: &dyn Progress) -> Result<u32> {
        // No other process applies or reverts meanwhile.
        let _session = Session::open(&dirs.state)?;
        let again = match process::find(&dirs.state)? {
            Domain::Absent => false,
            Domain::Runs(_) => bail!(
                InForce,
                "an I/O domain is applied already: `rtvirtio revert` stops it; to change limits of a running one, edit its file and reload it"
            ),
            Domain::Ended if self.is_the_applied(dirs) => true,
            Domain::Ended => bail!(
                InForce,
                "an I/O domain is applied already, but does not run (see {LOG} in the state directory): `rtvirtio apply {}` starts it again as it was, with all that was attached; `rtvirtio revert` forgets it",
                process::config_path(&dirs.state).display()
            ),
        };
        let disks = self.file.devices.iter().flat_map(|d| &d.disks).map(|d| &d.socket);
        let ports = self.file.networks.iter().flat_map(|n| &n.ports).map(|p| &p.socket);
        for dir in disks.chain(ports).filter_map(|socket| socket.parent()) {
            std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
        }
        doubts::warnings(&self.file).iter().for_each(|doubt| progress.warn(doubt));
        for path in self.file.devices.iter().flat_map(|d| &d.disks).map(|d| &d.path) {
            let root = Root::default();
            let elevators =
                BlockDevice::find(&root, path).and_then(|d| Ok((d.elevators(&root)?.current, d.name)));
            // Files, and devices without an elevator, have none to warn of.
            if let Ok((current, name)) = elevators {
                if !matches!(current.as_str(), "none" | "mq-deadline") {
                    progress.warn(&format!(
                        "{name} has the elevator {current}, which orders requests anew below the I/O domain: `echo none > /sys/block/{name}/queue/scheduler`"
                    ));
                }
            }
        }
        let (config, control, source) =
            (self.text.as_str(), self.file.control.as_path(), self.path.as_path());
        process::start(Command::new(program()), &Start { config, control, source, again }, &dirs.state)
    }

    /// Status of the I/O domain that was started with it.
    ///
    /// # Errors
    /// [`Kind::NotRunning`](crate::Kind::NotRunning) when another process answers.
    pub fn ask(&self, pid: u32) -> Result<Status> {
        client::ask_one_of(&self.file.control, &[pid])
    }
}

/// Processes of an applied I/O domain.
#[derive(Serialize)]
pub struct DomainStatus {
    /// Process ids; more than one only during the start.
    pub pids: Vec<u32>,
    /// Error for which its state is unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Configuration of an I/O domain that has ended: `apply` of it starts it again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<PathBuf>,
}

/// State of an applied I/O domain; `None` where none is applied.
#[must_use]
pub fn status(dirs: &Dirs) -> Option<DomainStatus> {
    match process::find(&dirs.state) {
        Ok(Domain::Absent) => None,
        Ok(Domain::Ended) => {
            let config = Some(process::config_path(&dirs.state));
            Some(DomainStatus { pids: Vec::new(), error: None, config })
        }
        Ok(Domain::Runs(all)) => Some(DomainStatus { pids: pids(&all), error: None, config: None }),
        Err(e) => Some(DomainStatus { pids: Vec::new(), error: Some(format!("{e:#}")), config: None }),
    }
}

fn pids(processes: &[Process]) -> Vec<u32> {
    processes.iter().map(Process::pid).collect()
}

impl DomainStatus {
    /// Whether it runs, for all that is known.
    #[must_use]
    pub fn runs(&self) -> bool {
        !self.pids.is_empty()
    }
}

/// Outcome of `revert` for the I/O domain.
#[derive(Serialize)]
#[serde(rename_all = "snake_case", tag = "fate")]
pub enum Fate {
    /// No I/O domain was applied.
    None,
    /// Stopped, or had ended already; its files are removed.
    Stopped {
        /// Ids of the stopped processes.
        pids: Vec<u32>,
        /// Copy of its configuration if that was edited since it was applied.
        #[serde(skip_serializing_if = "Option::is_none")]
        kept: Option<PathBuf>,
    },
    /// Not removed, or only in part: it may still run.
    Left {
        /// Process ids, as far as they are known.
        pids: Vec<u32>,
        /// Error, with the remedy.
        why: String,
    },
}

impl Fate {
    /// Whether every part of the I/O domain is removed.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        !matches!(self, Self::Left { .. })
    }
}

/// Stops an applied I/O domain, unless guests are attached and it is not to be stopped under them.
/// The state directory is locked by the caller.
#[must_use]
pub fn stop(dirs: &Dirs, under_guests: bool) -> Fate {
    let left = |pids, e: Error| Fate::Left { pids, why: format!("{e:#}") };
    let processes = match process::find(&dirs.state) {
        Ok(Domain::Absent) => return Fate::None,
        Ok(Domain::Ended) => Vec::new(),
        Ok(Domain::Runs(processes)) => processes,
        Err(e) => return left(Vec::new(), e),
    };
    let pids = pids(&processes);
    let may_stop = match processes.as_slice() {
        _ if under_guests => Ok(()),
        [] => nothing_answers(dirs),
        _ => no_guest(dirs, &processes),
    };
    match may_stop.and_then(|()| process::stop(&processes, &dirs.state)) {
        Ok(kept) => Fate::Stopped { pids, kept },
        Err(e) => left(pids, e),
    }
}

/// The configuration in force.
fn applied(dirs: &Dirs) -> Result<File> {
    let path = process::config_path(&dirs.state);
    let text = StateDir::open(&dirs.state)?.read(FILE).with_context(|| path.display().to_string())?;
    Ok(File::parse(&path, &String::from_utf8(text).with_context(|| path.display().to_string())?)?)
}

/// Fails where a guest is attached, or where that is unknown.
fn no_guest(dirs: &Dirs, processes: &[Process]) -> Result<()> {
    let unknown = "which guests the I/O domain serves is not known, and their I/O would hang: correct that, or `rtvirtio revert --stop-domain`";
    let control = match process::control(&dirs.state).context(unknown)? {
        Some(control) => control,
        None => applied(dirs).context(unknown)?.control,
    };
    let attached = || -> Result<Vec<String>> {
        let status = client::ask_one_of(&control, &pids(processes))?;
        let disks = status.vms.into_iter().filter(|vm| vm.attached).map(|vm| vm.name);
        let ports = status.ports.into_iter().filter(|port| port.attached).map(|port| port.name);
        let mut names: Vec<String> = disks.chain(ports).collect();
        names.dedup();
        Ok(names)
    };
    let deadline = Instant::now() + START;
    let attached = loop {
        match attached() {
            Ok(attached) => break attached,
            // An I/O domain that has ended serves no guest.
            Err(_) if have_ended(processes)? => return Ok(()),
            Err(e) if Instant::now() > deadline => return Err(e).context(unknown),
            // After a crash of `apply` it may be starting still.
            Err(_) => std::thread::sleep(RETRY),
        }
    };
    if !attached.is_empty() {
        bail!(
            InForce,
            "it serves {}: shut these VMs down and revert again, or `rtvirtio revert --stop-domain`, after which their requests wait until an I/O domain runs again",
            attached.join(", ")
        );
    }
    Ok(())
}

fn have_ended(processes: &[Process]) -> Result<bool> {
    for process in processes {
        if !process.has_ended(Duration::ZERO)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Fails where a control socket of the I/O domain that has ended is answered although no process
/// holds the lock, as by an I/O domain that another program started.
fn nothing_answers(dirs: &Dirs) -> Result<()> {
    // That of its start, and of its file, which may be edited since, and be wrong.
    let of_file = applied(dirs).ok().map(|file| file.control);
    for control in process::control(&dirs.state)?.into_iter().chain(of_file) {
        if let Some(pid) = client::listener(&control)? {
            bail!(
                InForce,
                "process {pid} answers at {} but was not started by `rtvirtio apply`: end it and revert again, or leave it and forget the I/O domain that has ended with `rtvirtio revert --stop-domain`",
                control.display()
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use rtvirtio_kernel::ProcessId;

    use super::*;
    use crate::dirs::write_state;

    #[test]
    fn with_a_wrong_file_too_what_answers_is_not_said_to_be_stopped() {
        let (dir, dirs) = crate::fixtures::dirs();
        let this = ProcessId::find(std::process::id()).unwrap().unwrap();
        let socket = dir.path().join("iod.sock");
        let boot = Root::default().read("/proc/sys/kernel/random/boot_id").unwrap();
        let record = serde_json::json!({
            "boot_id": boot.trim(), "pid": this.pid, "start_time": this.start_time + 1, "control": socket,
        });
        write_state(&dirs.state, "iod.json", record.to_string().as_bytes()).unwrap();
        write_state(&dirs.state, FILE, b"edited, and wrong").unwrap();
        let listener = UnixListener::bind(&socket).unwrap();
        let fate = stop(&dirs, false);
        assert!(
            matches!(&fate, Fate::Left { why, .. } if why.contains("answers at")),
            "{}",
            fate.is_settled()
        );
        drop(listener);
        assert!(stop(&dirs, false).is_settled());
    }
}
