//! I/O and cache load on the core, from the host or for the guest.

use std::hint::black_box;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::Context;
use rtvirtio_units::Bytes;
use rtvirtio_vmm::spawn::{Lifetime, spawn};

use super::WALK;
use rtvirtio_harness::cores::{bind, bind_this_thread};

/// Size of the guest's disk.
pub const DISK: Bytes = Bytes(256 << 20);

/// The I/O load in place of the paper's bonnie, without an end.
pub fn fio_argv(file: &str) -> Vec<String> {
    let fixed =
        ["fio", "--name=load", "--rw=randrw", "--bs=16k", "--ioengine=libaio", "--iodepth=8", "--direct=1"];
    let mut args: Vec<String> = fixed.iter().map(|a| (*a).to_owned()).collect();
    args.extend(["--time_based".to_owned(), "--runtime=1d".to_owned(), format!("--filename={file}")]);
    args.push(format!("--size={}", DISK.0));
    args
}

/// A thread of the host that touches every cache line of a buffer, until it is dropped.
pub struct MemoryWalk {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl MemoryWalk {
    /// Starts the thread on a core.
    pub fn start(core: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let walk = move || {
            // On another core the load is only weaker.
            let _ = bind_this_thread(core);
            let mut memory = vec![0u8; WALK];
            while !stopped.load(Ordering::Relaxed) {
                // One byte of each cache line.
                memory.iter_mut().step_by(64).for_each(|b| *b = b.wrapping_add(1));
                black_box(&mut memory);
            }
        };
        Self { stop, thread: Some(std::thread::spawn(walk)) }
    }
}

impl Drop for MemoryWalk {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread has no result.
            let _ = thread.join();
        }
    }
}

/// The I/O load on the host, until it is dropped.
pub struct HostFio(Child);

impl HostFio {
    pub fn start(disk: &Path, core: u32) -> anyhow::Result<Self> {
        let args = fio_argv(&disk.display().to_string());
        let mut command = Command::new(&args[0]);
        command.args(&args[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // A thread instead of a child process: fio then ends with this process.
        command.arg("--thread");
        let child = spawn(command, Vec::new(), Lifetime::WithParent);
        let child = Self(child.context("cannot run fio on the host: install it")?);
        bind(child.0.id(), &[core])?;
        Ok(child)
    }
}

impl Drop for HostFio {
    fn drop(&mut self) {
        // SIGKILL: on SIGTERM fio may wait for ever, as in the guest.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Writes the whole disk: reads of a hole never reach the device.
pub fn write_disk(path: &Path) -> std::io::Result<()> {
    use std::io::Write;
    let mut file = std::fs::File::create(path)?;
    let block = vec![0x5a; 1 << 20];
    for _ in 0..DISK.0 >> 20 {
        file.write_all(&block)?;
    }
    file.sync_all()
}
