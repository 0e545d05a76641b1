//! Disk backends as processes of an experiment: the I/O domain, and `qemu-storage-daemon`.

use std::fs::OpenOptions;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::iod::socket;
use anyhow::{Context, bail};
use rtvirtio_testbed::boxed::tail;
use rtvirtio_vmm::spawn::{Lifetime, spawn};
use rtvirtio_workflow::domain::start::is_ready;

use rtvirtio_workflow::domain::client as iod;

/// The backend that the I/O domain is compared with.
pub const PEER: &str = "qemu-storage-daemon";
/// Time limit until a backend listens.
const LISTEN_TIMEOUT: Duration = Duration::from_secs(10);
/// File of the messages of an I/O domain.
const LOG: &str = "iod.log";

/// Last messages of the I/O domain that [`Backend::start_logged`] started, each in an indented
/// line; the reason where they cannot be read.
pub(crate) fn log_end(dir: &Path) -> String {
    match std::fs::read(dir.join(LOG)) {
        Ok(log) => tail(&String::from_utf8_lossy(&log)).lines().map(|line| format!("\n    {line}")).collect(),
        Err(e) => format!("\n    its messages are not known: {e}"),
    }
}

/// A backend's process. Dropping it ends the process; the kernel ends it with this process.
pub struct Backend {
    child: Child,
}

impl Backend {
    /// Starts the I/O domain with a configuration, which is written into `dir`.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start_domain(dir: &Path, config: &str) -> anyhow::Result<Self> {
        Self::start(dir, config, Stdio::inherit(), || "its reason is above".to_owned())
    }

    /// Starts the I/O domain as [`Self::start_domain`] does, and appends its messages to a file in
    /// `dir`, for [`log_end`].
    ///
    /// # Errors
    /// When it does not start.
    pub(crate) fn start_logged(dir: &Path, config: &str) -> anyhow::Result<Self> {
        let log = OpenOptions::new().create(true).append(true).open(dir.join(LOG))?;
        Self::start(dir, config, log.into(), || format!("its last messages:{}", log_end(dir)))
    }

    fn start(dir: &Path, config: &str, log: Stdio, reason: impl FnOnce() -> String) -> anyhow::Result<Self> {
        let file = dir.join("iod.toml");
        std::fs::write(&file, config)?;
        let program = iod::program();
        let mut command = Command::new(&program);
        command.arg("--config").arg(&file).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let child = spawn(command, Vec::new(), Lifetime::WithParent)
            .with_context(|| format!("cannot start {}", program.display()))?;
        let mut backend = Self { child };
        if !is_ready(&mut backend.child) {
            bail!("{} did not start: {}", program.display(), reason());
        }
        Ok(backend)
    }

    /// Starts `qemu-storage-daemon` on a block device.
    ///
    /// # Errors
    /// When it does not listen in time.
    pub fn start_peer(device: &Path, dir: &Path) -> anyhow::Result<Self> {
        let path: PathBuf = socket(dir, 0);
        let mut command = Command::new(PEER);
        command
            .args(["--object", "iothread,id=io0", "--blockdev"])
            .arg(format!(
                "driver=host_device,node-name=d0,filename={},aio=io_uring,cache.direct=on,locking=off",
                device.display()
            ))
            .arg("--export")
            .arg(format!(
                "type=vhost-user-blk,id=e0,node-name=d0,addr.type=unix,addr.path={},writable=on,iothread=io0,num-queues=1",
                path.display()
            ))
            .stdin(Stdio::null());
        let child = spawn(command, Vec::new(), Lifetime::WithParent)
            .with_context(|| format!("cannot start {PEER}"))?;
        let backend = Self { child };
        let begin = Instant::now();
        while !path.exists() {
            if begin.elapsed() > LISTEN_TIMEOUT {
                bail!("{PEER} does not listen");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(backend)
    }

    /// A process that was started otherwise.
    pub(crate) fn from_child(child: Child) -> Self {
        Self { child }
    }

    /// Sends the process a signal.
    ///
    /// # Errors
    /// When it has ended.
    pub(crate) fn signal(&self, signal: rustix::process::Signal) -> anyhow::Result<()> {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        Ok(rustix::process::kill_process(pid.context("a process")?, signal)?)
    }

    /// Kills the process with SIGKILL.
    ///
    /// # Errors
    /// When it had ended by itself.
    pub fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill().context("kill -9 of the I/O domain")?;
        let status = self.child.wait()?;
        // An I/O domain that ended by itself has failed.
        match std::os::unix::process::ExitStatusExt::signal(&status) {
            Some(9) => Ok(()),
            _ => bail!("the I/O domain had ended by itself: {status}"),
        }
    }

    /// Process id of the backend.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// CPU time of the process so far.
    ///
    /// # Errors
    /// When `/proc` cannot be read.
    pub fn cpu_time(&self) -> anyhow::Result<Duration> {
        Ok(rtvirtio_kernel::process::cpu_time(&rtvirtio_kernel::Root::default(), self.child.id())?)
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        if let (Some(pid), Ok(None)) = (pid, self.child.try_wait()) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        let begin = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            // The peer may not end while its last frontend disconnects.
            if begin.elapsed() > Duration::from_secs(3) {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
