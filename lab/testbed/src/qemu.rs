//! A lab guest: one QEMU process with the guest image and one disk, a slice of the device under
//! test.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use rtvirtio_vmm::agent::{ExecOutput, Process};
use rtvirtio_vmm::spawn::{self};
use rtvirtio_vmm::{GuestAgent, Qmp, VmmError};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use rtvirtio_kernel::ProcessId;

mod args;
mod config;
mod error;
mod files;
mod migrate;
#[cfg(test)]
mod tests;
mod view;

pub use config::{Accel, DiskRegion, GuestDisk, GuestNic, NicBackend, QemuConfig, UrgencyDevice};
pub use error::QemuError;
use files::Files;
pub use migrate::Migration;
pub use view::GuestState;

/// Path of the guest's only disk, in the guest.
pub const GUEST_DISK: &str = "/dev/vda";
/// Port in the guest of the service that [`QemuConfig::port`] leads to.
pub const GUEST_PORT: u16 = 80;
/// Default boot timeout: three guests at once under TCG on two busy cores took 12 s.
pub const BOOT_TIMEOUT: Duration = Duration::from_secs(120);
/// Timeout of one exchange with the monitor: QEMU's main thread may wait for a CPU on a host that
/// is overloaded.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of the monitor when the guest is ended: SIGKILL follows.
const QUIT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time from `quit` to the end of the process, which must finish its requests first.
const QUIT_PATIENCE: Duration = Duration::from_secs(5);

/// Name and process of a guest, by which another process finds it again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QemuHandle {
    /// Name of the guest.
    pub name: String,
    /// QEMU's process, by id and start time.
    pub process: ProcessId,
    /// Directory of the guest's sockets and logs.
    pub run_dir: PathBuf,
}

impl QemuHandle {
    /// Whether this very process is still running.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.process.is_alive()
    }

    /// Path of the monitor's socket.
    #[must_use]
    pub fn qmp_socket(&self) -> PathBuf {
        Files::new(&self.run_dir, &self.name).qmp
    }

    /// Path of the guest agent's socket.
    #[must_use]
    pub fn agent_socket(&self) -> PathBuf {
        Files::new(&self.run_dir, &self.name).agent
    }

    /// Path of QEMU's socket of the port for the guest's start reports, if it has that port.
    #[must_use]
    pub fn start_socket(&self) -> PathBuf {
        Files::new(&self.run_dir, &self.name).start
    }

    /// Ends the guest if it runs, and removes its files in any case.
    pub fn kill(&self) -> Result<(), QemuError> {
        QemuGuest::adopt(self, true).stop()
    }
}

/// A running guest. Dropping it ends it, unless it was attached or detached.
#[derive(Debug)]
pub struct QemuGuest {
    handle: QemuHandle,
    files: Files,
    child: Option<Child>,
    agent: Option<GuestAgent>,
    owned: bool,
    boot_time: Duration,
}

impl QemuGuest {
    /// Starts a guest and waits until its agent answers; one that waits for a migration, until its
    /// monitor does.
    ///
    /// # Errors
    /// See [`QemuError`]. A guest that died meanwhile is reported with the last lines of its
    /// console and of QEMU's standard error; all of its parts are removed.
    pub fn start(config: &QemuConfig) -> Result<QemuGuest, QemuError> {
        let start = Instant::now();
        args::check(config)?;
        let cgroups = config
            .cgroup_procs
            .iter()
            .map(|path| {
                let open = OpenOptions::new().write(true).open(path);
                open.map_err(|source| QemuError::Cgroup { path: path.clone(), source })
            })
            .collect::<Result<Vec<_>, _>>()?;
        let files = Files::new(&config.run_dir, &config.name);
        files.prepare()?;
        let command = args::command(config, &files).inspect_err(|_| files.remove())?;
        let mut child = spawn::spawn(command, cgroups, config.lifetime).map_err(|source| {
            files.remove();
            QemuError::Spawn { name: config.name.clone(), cgroups: config.cgroup_procs.clone(), source }
        })?;
        let pid = child.id();
        // A child that has ended at once is a zombie without a start time; `died` below reports its
        // exit status.
        let process = match ProcessId::find(pid) {
            Ok(found) => found.unwrap_or(ProcessId { pid, start_time: 0 }),
            Err(source) => {
                // The first error is reported.
                let _ = child.kill().and_then(|()| child.wait());
                files.remove();
                let path = PathBuf::from(format!("/proc/{pid}/stat"));
                return Err(QemuError::Io { operation: "read", path, source });
            }
        };
        let handle = QemuHandle { name: config.name.clone(), process, run_dir: config.run_dir.clone() };
        let mut guest = QemuGuest {
            handle,
            files,
            child: Some(child),
            agent: None,
            owned: true,
            boot_time: Duration::ZERO,
        };
        // On an error the guest is dropped, which ends it and removes its files.
        if config.incoming {
            guest.await_monitor(start, config.boot_timeout)?;
        } else {
            guest.await_agent(start, config.boot_timeout)?;
        }
        guest.boot_time = start.elapsed();
        Ok(guest)
    }

    /// Finds a guest again that another process started with
    /// [`Lifetime::Detached`](rtvirtio_vmm::spawn::Lifetime::Detached). Dropping this leaves the
    /// guest running.
    ///
    /// # Errors
    /// [`QemuError::Gone`] when that process has ended.
    pub fn attach(handle: &QemuHandle) -> Result<QemuGuest, QemuError> {
        if handle.is_alive() {
            return Ok(QemuGuest::adopt(handle, false));
        }
        let log = Files::new(&handle.run_dir, &handle.name).last_words();
        Err(QemuError::Gone { name: handle.name.clone(), status: "ended".into(), log })
    }

    fn adopt(handle: &QemuHandle, owned: bool) -> QemuGuest {
        let files = Files::new(&handle.run_dir, &handle.name);
        QemuGuest {
            handle: handle.clone(),
            files,
            child: None,
            agent: None,
            owned,
            boot_time: Duration::ZERO,
        }
    }

    /// Keeps the guest running after this process; start it with
    /// [`Lifetime::Detached`](rtvirtio_vmm::spawn::Lifetime::Detached) for that.
    #[must_use]
    pub fn detach(mut self) -> QemuHandle {
        self.owned = false;
        self.handle.clone()
    }

    /// Handle by which another process finds the guest.
    #[must_use]
    pub fn handle(&self) -> &QemuHandle {
        &self.handle
    }

    /// Time from start to the agent's first answer; zero for an attached guest.
    #[must_use]
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// Whether its QEMU still runs. (It may be paused, and the guest in it may hang.)
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.handle.is_alive()
    }

    /// Opens a connection to the monitor. QEMU serves one at a time: drop it soon.
    ///
    /// # Errors
    /// The guest has ended, or another client is connected.
    pub fn qmp(&mut self) -> Result<Qmp, QemuError> {
        Qmp::connect(&self.files.qmp, MONITOR_TIMEOUT).map_err(|e| self.explain(e))
    }

    /// The connection to the guest agent, made at the first use and kept. Errors of the agent
    /// itself do not show whether the guest died; [`QemuGuest::exec`] and similar functions do.
    ///
    /// # Errors
    /// The guest has ended or its agent does not answer within 10 s.
    pub fn agent(&mut self) -> Result<&mut GuestAgent, QemuError> {
        if self.agent.is_none() {
            let agent = GuestAgent::connect(&self.files.agent, Duration::from_secs(10));
            self.agent = Some(agent.map_err(|e| self.explain(e))?);
        }
        // Just set, so this error cannot happen.
        self.agent.as_mut().ok_or_else(|| QemuError::gone(&self.handle.name))
    }

    /// Closes the connection to the guest agent, so that another program can connect: QEMU serves
    /// one at a time. [`Self::agent`] makes a new one.
    pub fn close_agent(&mut self) {
        self.agent = None;
    }

    /// Runs a program in the guest to its end: [`GuestAgent::exec`].
    ///
    /// # Errors
    /// Also when the guest dies meanwhile; then with the end of its output.
    pub fn exec(&mut self, argv: &[&str], timeout: Duration) -> Result<ExecOutput, QemuError> {
        self.with_agent(|agent| agent.exec(argv, timeout))
    }

    /// Starts a program in the guest: [`GuestAgent::spawn`].
    pub fn spawn(&mut self, argv: &[&str]) -> Result<Process, QemuError> {
        self.with_agent(|agent| agent.spawn(argv))
    }

    /// The result of a started program: [`GuestAgent::poll`].
    pub fn poll(&mut self, process: Process) -> Result<Option<ExecOutput>, QemuError> {
        self.with_agent(|agent| agent.poll(process))
    }

    /// Reads a file of at most `limit` bytes in the guest.
    pub fn read_file(&mut self, path: &str, limit: usize) -> Result<Vec<u8>, QemuError> {
        self.with_agent(|agent| agent.read_file(path, limit))
    }

    /// Writes a file in the guest; an attribute of the kernel that refuses the value is an error.
    pub fn write_file(&mut self, path: &str, data: &[u8]) -> Result<(), QemuError> {
        self.with_agent(|agent| agent.write_file(path, data))
    }

    fn with_agent<T>(
        &mut self,
        call: impl FnOnce(&mut GuestAgent) -> Result<T, VmmError>,
    ) -> Result<T, QemuError> {
        let result = call(self.agent()?);
        result.map_err(|e| self.explain(e))
    }

    /// Ends the guest: `quit` to the monitor, then SIGKILL if it still runs; removes its sockets
    /// and logs. A guest that has ended already is no error.
    ///
    /// # Errors
    /// [`QemuError::Stuck`] when even SIGKILL does not end it (it waits for a device in the
    /// kernel).
    pub fn stop(mut self) -> Result<(), QemuError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), QemuError> {
        self.owned = false;
        self.agent = None;
        if self.is_alive() {
            let quit = Qmp::connect(&self.files.qmp, QUIT_TIMEOUT).and_then(|mut qmp| qmp.quit());
            if quit.is_err() || !self.ended_within(QUIT_PATIENCE) {
                self.handle.process.signal(Signal::KILL);
                if !self.ended_within(QUIT_PATIENCE) {
                    return Err(QemuError::Stuck {
                        name: self.handle.name.clone(),
                        pid: self.handle.process.pid,
                    });
                }
            }
        }
        if let Some(mut child) = self.child.take() {
            // The process has ended, so this only reaps it.
            let _ = child.wait();
        }
        self.files.remove();
        Ok(())
    }

    fn ended_within(&self, patience: Duration) -> bool {
        let start = Instant::now();
        while self.is_alive() {
            if start.elapsed() > patience {
                return false;
            }
            thread::sleep(Duration::from_millis(5));
        }
        true
    }

    fn await_agent(&mut self, start: Instant, timeout: Duration) -> Result<(), QemuError> {
        let mut slice = Duration::from_secs(2);
        let mut agent: Option<GuestAgent> = None;
        loop {
            if !self.is_alive() {
                return Err(self.died());
            }
            let remaining = timeout.saturating_sub(start.elapsed());
            if remaining.is_zero() {
                let (name, log) = (self.handle.name.clone(), self.files.last_words());
                return Err(QemuError::NoAgent { name, waited: timeout, log });
            }
            let answer = match &mut agent {
                // QEMU makes the socket a moment after it starts.
                None if !self.files.agent.exists() => {
                    thread::sleep(Duration::from_millis(5));
                    continue;
                }
                None => GuestAgent::open(&self.files.agent, remaining).map(|opened| agent = Some(opened)),
                Some(agent) => agent.synchronise(slice.min(remaining)),
            };
            match (answer, &agent) {
                (Ok(()), Some(ready)) if ready.is_in_step() => {
                    self.agent = agent;
                    return Ok(());
                }
                (Ok(()), _) => {}
                (Err(e), _) if e.is_timeout() => {
                    self.check_running()?;
                    slice *= 2;
                }
                // The socket file exists before QEMU listens on it.
                (Err(VmmError::Connect { .. }), _) => thread::sleep(Duration::from_millis(5)),
                (Err(e), _) => return Err(self.explain(e)),
            }
        }
    }

    /// Under a KVM that cannot run the guest QEMU stays, paused. A monitor that does not answer
    /// yet, on a host that is busy with booting several guests, does not count as a hang.
    fn check_running(&mut self) -> Result<(), QemuError> {
        let status = match Qmp::connect(&self.files.qmp, QUIT_TIMEOUT).and_then(|mut qmp| qmp.query_status())
        {
            Ok(status) if !status.running => status.status,
            Err(e) if !e.is_timeout() => return Err(self.explain(e)),
            _ => return Ok(()),
        };
        let (name, log) = (self.handle.name.clone(), self.files.last_words());
        Err(QemuError::Paused { name, status, log })
    }

    /// A closed connection mostly means that the guest died, which is then the reported error.
    fn explain(&mut self, error: VmmError) -> QemuError {
        // The kernel closes a dying process's sockets before its id is free.
        if error.is_closed() && self.ended_within(Duration::from_secs(1)) || !self.is_alive() {
            return self.died();
        }
        QemuError::Vmm { name: self.handle.name.clone(), source: error }
    }

    fn died(&mut self) -> QemuError {
        let status: Option<ExitStatus> = self.child.as_mut().and_then(|c| c.wait().ok());
        let status = status.map_or_else(|| "ended".to_owned(), |s| s.to_string());
        QemuError::Gone { name: self.handle.name.clone(), status, log: self.files.last_words() }
    }
}

impl Drop for QemuGuest {
    fn drop(&mut self) {
        if self.owned {
            if let Err(e) = self.end() {
                eprintln!("rtvirtio: {e}");
            }
        }
    }
}

/// Makes the run directory, accessible to the owner only: access to a monitor's socket is control
/// of the VM.
fn make_run_dir(dir: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)
}
