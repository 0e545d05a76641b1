//! A second device's traffic: sequential direct reads of another loop device over memory, bypassing
//! the I/O domain. The reader is an ordinary thread, so that it takes memory and cache from engine
//! and front end, not CPU time.

use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rtvirtio_testbed::RamDisk;
use rtvirtio_units::Bytes;

/// Larger than the part of a shared cache that the memory load leaves.
const SIZE: Bytes = Bytes(128 << 20);
/// Bytes of a request.
const REQUEST: usize = 1 << 20;
/// Alignment of the buffer for direct reads.
const ALIGNED: usize = 4_096;
/// Longest wait for the first request; a device over memory is far faster.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
    stop: AtomicBool,
    read: AtomicU64,
}

/// A thread that reads while the load is on. Dropping it ends it and removes the device.
#[derive(Debug)]
pub(super) struct DeviceLoad {
    gate: Arc<Gate>,
    thread: Option<JoinHandle<std::io::Result<()>>>,
    _disk: RamDisk,
}

impl DeviceLoad {
    /// Makes the device and a paused thread.
    pub(super) fn new() -> anyhow::Result<Self> {
        let disk = RamDisk::new(SIZE)?;
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32)
            .open(disk.device())
            .context("the second device")?;
        let gate = Arc::new(Gate::default());
        let shared = Arc::clone(&gate);
        let thread = std::thread::Builder::new()
            .name("second device".to_owned())
            .spawn(move || read_until(&shared, &file))?;
        Ok(Self { gate, thread: Some(thread), _disk: disk })
    }

    /// Starts the load, and waits for its first completion; or pauses it.
    pub(super) fn set(&self, on: bool) -> anyhow::Result<()> {
        let before = self.read();
        if let Ok(mut open) = self.gate.open.lock() {
            *open = on;
        }
        self.gate.changed.notify_all();
        let begin = Instant::now();
        while on && self.read() == before {
            ensure!(begin.elapsed() < FIRST_REQUEST_TIMEOUT, "the second device moves nothing");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Bytes read so far.
    fn read(&self) -> u64 {
        self.gate.read.load(Ordering::Relaxed)
    }
}

impl Drop for DeviceLoad {
    fn drop(&mut self) {
        self.gate.stop.store(true, Ordering::Relaxed);
        if let Ok(mut open) = self.gate.open.lock() {
            *open = true;
        }
        self.gate.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn read_until(gate: &Gate, file: &std::fs::File) -> std::io::Result<()> {
    let mut buffer = vec![0u8; REQUEST + ALIGNED];
    let skip = buffer.as_ptr().align_offset(ALIGNED);
    let part = &mut buffer[skip..skip + REQUEST];
    let mut at = 0;
    while !gate.stop.load(Ordering::Relaxed) {
        let Ok(open) = gate.open.lock() else { return Ok(()) };
        let Ok(guard) = gate.changed.wait_while(open, |open| !*open) else { return Ok(()) };
        drop(guard);
        if gate.stop.load(Ordering::Relaxed) {
            break;
        }
        std::os::unix::fs::FileExt::read_exact_at(file, part, at)?;
        gate.read.fetch_add(REQUEST as u64, Ordering::Relaxed);
        at = (at + REQUEST as u64) % SIZE.0;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rtvirtio_testkit::{Need, has};

    use super::*;

    #[test]
    fn it_reads_while_it_is_on_and_rests_otherwise() {
        let test = "it_reads_while_it_is_on_and_rests_otherwise";
        if !has(test, &[Need::Root, Need::Path("/dev/loop-control", "no loop devices")]) {
            return;
        }
        let load = DeviceLoad::new().unwrap();
        assert_eq!(load.read(), 0);
        load.set(true).unwrap();
        assert!(load.read() > 0);
        load.set(false).unwrap();
        // The request under way is finished, then it rests.
        let mut before = load.read();
        loop {
            std::thread::sleep(Duration::from_millis(20));
            if load.read() == before {
                break;
            }
            before = load.read();
        }
    }
}
