//! A second device's traffic: sequential direct reads of another loop device over memory, bypassing
//! the I/O domain. The reader is an ordinary thread, so that it takes memory and cache from engine
//! and front end, not CPU time.

use std::os::unix::fs::OpenOptionsExt as _;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rtvirtio_testbed::RamDisk;
use rtvirtio_units::Bytes;

use super::gate::Gate;

/// Larger than the part of a shared cache that the memory load leaves.
const SIZE: Bytes = Bytes(128 << 20);
/// Bytes of a request.
const REQUEST: usize = 1 << 20;
/// Alignment of the buffer for direct reads.
const ALIGNED: usize = 4_096;
/// Longest wait for the first request; a device over memory is far faster.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

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
        let before = self.gate.moved();
        self.gate.set(on);
        let begin = Instant::now();
        while on && self.gate.moved() == before {
            ensure!(begin.elapsed() < FIRST_REQUEST_TIMEOUT, "the second device moves nothing");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

impl Drop for DeviceLoad {
    fn drop(&mut self) {
        self.gate.end();
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
    while gate.pass() {
        std::os::unix::fs::FileExt::read_exact_at(file, part, at)?;
        gate.count(REQUEST);
        at = (at + REQUEST as u64) % SIZE.0;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rtvirtio_testkit::{Need, has};

    use super::super::gate::wait_for_rest;
    use super::*;

    #[test]
    fn it_reads_while_it_is_on_and_rests_otherwise() {
        let test = "it_reads_while_it_is_on_and_rests_otherwise";
        if !has(test, &[Need::Root, Need::Path("/dev/loop-control", "no loop devices")]) {
            return;
        }
        let load = DeviceLoad::new().unwrap();
        assert_eq!(load.gate.moved(), 0);
        load.set(true).unwrap();
        assert!(load.gate.moved() > 0);
        load.set(false).unwrap();
        wait_for_rest(|| load.gate.moved());
    }
}
