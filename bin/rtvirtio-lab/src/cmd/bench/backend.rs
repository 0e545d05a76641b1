//! Backends as processes of an experiment: the I/O domain, and its peer.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rtvirtio_bench::iod::socket;
use rtvirtio_vmm::spawn::{Lifetime, spawn};
use rtvirtio_workflow::domain::start::is_ready;

use rtvirtio_workflow::domain::client as iod;

/// The peer.
pub const PEER: &str = "qemu-storage-daemon";
/// Until a backend listens.
const PATIENCE: Duration = Duration::from_secs(10);

/// A backend's process. It is ended when this is dropped, and by the kernel when this process ends in another way.
pub struct Backend {
    child: Child,
}

impl Backend {
    /// The I/O domain on a configuration, which is written into `dir`.
    pub fn ours(dir: &Path, config: &str) -> anyhow::Result<Self> {
        let file = dir.join("iod.toml");
        std::fs::write(&file, config)?;
        let program = iod::program();
        let mut command = Command::new(&program);
        command.arg("--config").arg(&file).stdin(Stdio::null()).stdout(Stdio::piped());
        let child = spawn(command, Vec::new(), Lifetime::WithParent)
            .with_context(|| format!("cannot start {}", program.display()))?;
        let mut backend = Self { child };
        if !is_ready(&mut backend.child) {
            bail!("{} did not start: its reason is above", program.display());
        }
        Ok(backend)
    }

    /// The peer on a block device.
    pub fn peer(device: &Path, dir: &Path) -> anyhow::Result<Self> {
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
            if begin.elapsed() > PATIENCE {
                bail!("{PEER} does not listen");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(backend)
    }

    /// Ends it as a crash would.
    pub fn kill(mut self) -> anyhow::Result<()> {
        self.child.kill().context("kill -9 of the I/O domain")?;
        let status = self.child.wait()?;
        // One that had ended by itself was not killed by us, which is the news.
        match std::os::unix::process::ExitStatusExt::signal(&status) {
            Some(9) => Ok(()),
            _ => bail!("the I/O domain had ended by itself: {status}"),
        }
    }

    /// CPU time of the process so far.
    pub fn cpu(&self) -> anyhow::Result<Duration> {
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
            // The peer was seen not to end while its last frontend was just leaving.
            if begin.elapsed() > Duration::from_secs(3) {
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
