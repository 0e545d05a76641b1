//! How quiet the host was during a run: wake-ups that came late although nothing of the run was in their way.
//!
//! One thread per CPU sleeps to absolute times and notes by how much it woke late, as cyclictest does. It runs under SCHED_FIFO, so
//! what delays it is not the load under test but the hypervisor below, interrupts, and the kernel with interrupts off. A latency
//! tail of a run in which the host itself stood still says nothing about the setting under test.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

/// Time between two wake-ups of a probe. A stall shorter than this may fall between them.
const PERIOD_NS: u64 = 1_000_000;
/// Below QEMU's and the kernel's own real-time threads, above everything else.
const PRIORITY: i32 = 10;
/// A wake-up later than this counts as a stall of the host: above the few hundred microseconds of a stock kernel (the RT hypervisor
/// paper's Fig. 1 has 500 us), below what matters to targets of some milliseconds.
const STALL: Nanos = Nanos(1_000_000);

/// What the probes saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Noise {
    /// Latest wake-up over all CPUs.
    pub max_ns: Nanos,
    /// Wake-ups more than 1 ms late.
    pub stalls: u64,
    /// Sum of the lateness of those.
    pub stalled_ns: Nanos,
    /// Wake-ups in all.
    pub n: u64,
    /// Whether the probes ran under SCHED_FIFO. Without it, load under test delays them too.
    pub realtime: bool,
}

/// Probes at work. Dropping it stops them.
#[derive(Debug)]
pub struct NoiseProbe {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Noise>>,
}

impl NoiseProbe {
    /// Starts one probe per CPU that this process may use.
    #[must_use]
    pub fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let threads = allowed_cpus()
            .into_iter()
            .filter_map(|cpu| {
                let stop = Arc::clone(&stop);
                // Without a thread there is one probe less, and `n` shows it.
                std::thread::Builder::new().name(format!("noise/{cpu}")).spawn(move || probe(cpu, &stop)).ok()
            })
            .collect();
        Self { stop, threads }
    }

    /// Stops the probes and gives what they saw.
    #[must_use]
    pub fn finish(mut self) -> Noise {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Noise { realtime: true, ..Noise::default() };
        for thread in self.threads.drain(..) {
            let Ok(one) = thread.join() else { continue };
            all.max_ns = all.max_ns.max(one.max_ns);
            all.stalls += one.stalls;
            all.stalled_ns = Nanos(all.stalled_ns.0.saturating_add(one.stalled_ns.0));
            all.n += one.n;
            all.realtime &= one.realtime;
        }
        all.realtime &= all.n > 0;
        all
    }
}

impl Drop for NoiseProbe {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn allowed_cpus() -> Vec<usize> {
    rustix::thread::sched_getaffinity(None)
        .map(|set| (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
        .unwrap_or_default()
}

fn probe(cpu: usize, stop: &AtomicBool) -> Noise {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    // A probe that is not pinned still sees stalls, only less surely.
    let _ = rustix::thread::sched_setaffinity(None, &set);
    let mut noise = Noise { realtime: set_fifo(), ..Noise::default() };
    let mut due = now() + PERIOD_NS;
    while !stop.load(Ordering::Relaxed) {
        sleep_until(due);
        let woke = now();
        let late = Nanos(woke.saturating_sub(due));
        noise.n += 1;
        noise.max_ns = noise.max_ns.max(late);
        if late > STALL {
            noise.stalls += 1;
            noise.stalled_ns = Nanos(noise.stalled_ns.0 + late.0);
        }
        // Wake-ups that a stall has swallowed are not made up for: one stall counts once.
        due = (due + PERIOD_NS).max(woke);
    }
    noise
}

/// SCHED_FIFO for the calling thread; false where the kernel refuses (no privilege, or a CPU cgroup without a real-time budget).
fn set_fifo() -> bool {
    let param = libc::sched_param { sched_priority: PRIORITY };
    // SAFETY: a thread id of 0 is the caller, and `param` is a valid sched_param.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const param) == 0 }
}

fn now() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

fn sleep_until(due: u64) {
    let at =
        rustix::time::Timespec { tv_sec: (due / 1_000_000_000) as i64, tv_nsec: (due % 1_000_000_000) as _ };
    // Interrupted sleeps only make one sample early.
    let _ = rustix::thread::clock_nanosleep_absolute(rustix::thread::ClockId::Monotonic, &at);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_count_and_stop() {
        let probe = NoiseProbe::start();
        std::thread::sleep(std::time::Duration::from_millis(100));
        let noise = probe.finish();
        // At most one wake-up per period and CPU; at least one at all.
        assert!(noise.n > 0, "{noise:?}");
        assert!(noise.stalled_ns.0 >= noise.stalls * STALL.0, "{noise:?}");
        assert!((noise.stalls > 0) == (noise.max_ns > STALL), "{noise:?}");
    }
}
