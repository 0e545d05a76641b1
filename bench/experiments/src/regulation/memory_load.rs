//! A memory-bound load on every CPU: sequential writes over an array far larger than the caches, as
//! the bandwidth task of Isolbench does.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use rtvirtio_kernel::Root;

use super::gate::Gate;
use rtvirtio_harness::cores::bind_this_thread;

/// Size of all arrays together over the largest cache.
const TIMES: u64 = 4;
/// Bytes of all arrays where the cache's size is unknown.
const LEAST: u64 = 256 << 20;
/// Bytes between two checks for a pause.
const STEP: usize = 1 << 20;

/// Thread ids of a load, each there once the thread's memory is allocated and written.
type Tids = Arc<Mutex<Vec<u32>>>;

/// Threads that write while the load is on. Dropping it ends them.
#[derive(Debug)]
pub struct MemoryLoad {
    gate: Arc<Gate>,
    threads: Vec<JoinHandle<()>>,
    tids: Tids,
    /// Bytes of all arrays together.
    pub bytes: u64,
}

/// Size of the largest cache of the first CPU, in bytes; 0 where the kernel shows none.
pub fn largest_cache(root: &Root) -> anyhow::Result<u64> {
    let dir = "/sys/devices/system/cpu/cpu0/cache";
    if !root.exists(dir)? {
        return Ok(0);
    }
    let mut largest = 0;
    for index in root.list(dir)?.iter().filter(|name| name.starts_with("index")) {
        let Some(text) = root.read_optional(format!("{dir}/{index}/size"))? else { continue };
        let kib = text.strip_suffix('K').unwrap_or(&text).parse::<u64>();
        largest = largest.max(kib.with_context(|| format!("{index}/size is `{text}`"))? << 10);
    }
    Ok(largest)
}

/// Memory that can be used without swapping, in bytes.
fn available(root: &Root) -> anyhow::Result<u64> {
    let text = root.read("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|l| l.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    Ok(kib.context("/proc/meminfo has no MemAvailable")? << 10)
}

impl MemoryLoad {
    /// Makes a paused thread for each CPU, with all its memory.
    ///
    /// # Errors
    /// When that is more than half of the memory that is free.
    pub fn new(cpus: &[u32]) -> anyhow::Result<Self> {
        let root = Root::default();
        let bytes = (largest_cache(&root)? * TIMES).max(LEAST);
        let free = available(&root)?;
        ensure!(
            bytes <= free / 2,
            "the memory load needs {} MiB, four times the largest cache, and {} MiB are free: stop other programs",
            bytes >> 20,
            free >> 20
        );
        let (gate, tids) = (Arc::new(Gate::default()), Tids::default());
        let each = (bytes / cpus.len().max(1) as u64) as usize;
        let threads = cpus.iter().map(|&cpu| {
            let (gate, tids) = (Arc::clone(&gate), Arc::clone(&tids));
            std::thread::Builder::new().name(format!("memory/{cpu}")).spawn(move || {
                // A thread that cannot be bound still writes.
                let _ = bind_this_thread(cpu);
                write_until(&gate, &tids, each);
            })
        });
        let threads = threads.collect::<Result<Vec<_>, _>>()?;
        let load = Self { gate, threads, tids, bytes };
        while load.threads().len() < load.threads.len() {
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(load)
    }

    /// Starts or pauses the load.
    pub fn set(&self, on: bool) {
        self.gate.set(on);
    }

    /// Thread ids of the load.
    #[must_use]
    pub fn threads(&self) -> Vec<u32> {
        self.tids.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Bytes written so far.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.gate.moved()
    }

    /// Bytes per second since a moment at which `before` were written.
    #[must_use]
    pub fn rate_since(&self, before: u64, moment: Instant) -> f64 {
        (self.written() - before) as f64 / moment.elapsed().as_secs_f64().max(1e-9)
    }
}

impl Drop for MemoryLoad {
    fn drop(&mut self) {
        self.gate.end();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn write_until(gate: &Gate, tids: &Mutex<Vec<u32>>, bytes: usize) {
    // Written once, so that every page is mapped before the first measurement.
    let mut array = vec![1u8; bytes.max(STEP)];
    let mut value = 1u8;
    let tid = rustix::thread::gettid().as_raw_nonzero().get() as u32;
    tids.lock().unwrap_or_else(PoisonError::into_inner).push(tid);
    while gate.pass() {
        for part in array.chunks_mut(STEP) {
            value = value.wrapping_add(1);
            part.fill(value);
            std::hint::black_box(part.first());
            gate.count(part.len());
            if !gate.is_open() {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::gate::wait_for_rest;
    use super::*;

    #[test]
    fn the_largest_cache_is_read_and_a_size_of_another_form_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::new(dir.path());
        assert_eq!(largest_cache(&root).unwrap(), 0);
        let at = dir.path().join("sys/devices/system/cpu/cpu0/cache");
        for (index, size) in [("index0", "32K\n"), ("index3", "4096K\n")] {
            std::fs::create_dir_all(at.join(index)).unwrap();
            std::fs::write(at.join(index).join("size"), size).unwrap();
        }
        assert_eq!(largest_cache(&root).unwrap(), 4 << 20);
        std::fs::write(at.join("index0/size"), "many\n").unwrap();
        assert!(largest_cache(&root).is_err());
    }

    #[test]
    fn it_writes_while_it_is_on_and_rests_otherwise() {
        let gate = Arc::new(Gate::default());
        let inner = Arc::clone(&gate);
        let thread = std::thread::spawn(move || write_until(&inner, &Tids::default(), 2 * STEP));
        let load = MemoryLoad { gate, threads: vec![thread], tids: Tids::default(), bytes: 0 };
        assert_eq!(load.written(), 0);
        load.set(true);
        while load.written() == 0 {
            std::thread::yield_now();
        }
        load.set(false);
        wait_for_rest(|| load.written());
    }
}
