//! Load in the guest and on the host, until it is dropped.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rtvirtio_domain_client::load::{Plan, Stream, StreamResult, run_until};
use rtvirtio_domain_client::{Client, Options};
use rtvirtio_testbed::qemu::{GUEST_DISK, QemuGuest};
use rtvirtio_vmm::agent::Process;
use rtvirtio_vmm::spawn::{Lifetime, spawn};

use super::cell::{Load, PART};

/// The agent answers late under load.
const AGENT_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit until fio has ended its processes.
const FIO_STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Longer than any run: the load ends when it is dropped.
const UNLIMITED: Duration = Duration::from_secs(24 * 3_600);
/// Bytes of a request of the I/O domain's client, the same as of the host's readers.
const BLOCK: u32 = 128 << 10;

pub fn start_in_guest(load: &Load, vm: &mut QemuGuest) -> anyhow::Result<Option<Process>> {
    let args = load.fio(GUEST_DISK);
    let argv: Vec<&str> = args.iter().map(String::as_str).collect();
    Ok(if argv.is_empty() { None } else { Some(vm.spawn(&argv)?) })
}

/// Ends the load in a guest; `None` is no error.
pub fn end_in_guest(process: Option<Process>, vm: &mut QemuGuest) -> anyhow::Result<()> {
    if let Some(process) = process {
        vm.agent()?.terminate(process, AGENT_TIMEOUT)?;
    }
    Ok(())
}

/// Load of the host's readers.
pub enum HostReaders {
    None,
    /// Process of fio on the device.
    Fio(Child),
    /// A client of the I/O domain.
    Client {
        stop: Arc<AtomicBool>,
        thread: Option<JoinHandle<std::io::Result<Vec<StreamResult>>>>,
    },
}

impl HostReaders {
    /// Starts readers of the device in these cgroups, bypassing the page cache.
    pub fn on_device(load: &Load, device: &str, procs: &[PathBuf]) -> anyhow::Result<Self> {
        let args = load.fio(device);
        let Some((program, rest)) = args.split_first() else { return Ok(Self::None) };
        let mut command = Command::new(program);
        command.args(rest).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let open = |path: &PathBuf| {
            let file = std::fs::OpenOptions::new().write(true).open(path);
            file.with_context(|| path.display().to_string())
        };
        let groups = procs.iter().map(open).collect::<anyhow::Result<Vec<_>>>()?;
        Ok(Self::Fio(spawn(command, groups, Lifetime::WithParent).context("cannot start fio")?))
    }

    /// Starts sequential reads of another disk of the I/O domain.
    pub fn on_domain(load: &Load, socket: &std::path::Path) -> anyhow::Result<Self> {
        if load.readers == 0 {
            return Ok(Self::None);
        }
        let options = Options { buffer: BLOCK as usize, ..Options::default() };
        let mut client = [Client::connect(socket, options)?];
        let streams: Vec<Stream> = (0..load.readers)
            .map(|i| Stream {
                block: BLOCK,
                in_order_from: Some(i * PART),
                ..Stream::reads(&format!("reader{i}"), 1, PART)
            })
            .collect();
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let plan = Plan { warm_up: Duration::ZERO, length: UNLIMITED, seed: 1, spin: false };
        let thread = std::thread::Builder::new()
            .name("readers".to_owned())
            .spawn(move || run_until(&mut client, &streams, &plan, &flag))?;
        Ok(Self::Client { stop, thread: Some(thread) })
    }

    /// Ends the readers. A reader that failed or ended by itself invalidates the run.
    pub fn end(mut self) -> anyhow::Result<()> {
        match &mut self {
            Self::None => {}
            Self::Fio(child) => {
                if let Some(status) = child.try_wait()? {
                    bail!("fio on the host ended by itself: {status}");
                }
                terminate(child);
            }
            Self::Client { stop, thread } => {
                stop.store(true, Ordering::Relaxed);
                let Some(thread) = thread.take() else { return Ok(()) };
                let results = thread.join().map_err(|_| anyhow::anyhow!("the host's readers panicked"))??;
                if let Some(bad) = results.iter().find(|r| r.errors > 0) {
                    bail!("{} of the host's reads failed: a run with errors is not counted", bad.errors);
                }
            }
        }
        Ok(())
    }
}

/// SIGTERM, which makes fio end its own processes; SIGKILL when that does not help.
fn terminate(child: &mut Child) {
    let pid = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw);
    if let (Some(pid), Ok(None)) = (pid, child.try_wait()) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    }
    let begin = Instant::now();
    while matches!(child.try_wait(), Ok(None)) {
        if begin.elapsed() > FIO_STOP_TIMEOUT {
            let _ = child.kill();
            let _ = child.wait();
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Drop for HostReaders {
    fn drop(&mut self) {
        match self {
            Self::None => {}
            Self::Fio(child) => terminate(child),
            Self::Client { stop, thread } => {
                stop.store(true, Ordering::Relaxed);
                if let Some(thread) = thread.take() {
                    // An error is reported where the run ends.
                    let _ = thread.join();
                }
            }
        }
    }
}
