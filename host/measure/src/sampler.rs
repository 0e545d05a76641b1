//! Thread that samples at absolute times, for probes of the host and of a disk.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use rustix::thread::{ClockId, CpuSet, clock_nanosleep_absolute, sched_setaffinity};
use rustix::time::{Timespec, clock_gettime};

/// Name, period and scheduling of the thread.
pub(crate) struct Options {
    /// Name of the thread, at most 15 bytes.
    pub name: String,
    /// Time between two samples, ns.
    pub period_ns: u64,
    /// CPU to pin the thread to. A thread that cannot be pinned samples less reliably.
    pub cpu: Option<usize>,
    /// SCHED_FIFO priority, used where the kernel allows it.
    pub priority: Option<i32>,
}

/// Sampling thread with a state of its own. Dropping it stops the thread.
#[derive(Debug)]
pub(crate) struct Sampler<T> {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<T>>,
}

impl<T: Send + 'static> Sampler<T> {
    /// Starts the thread; `None` when the system has none left. `begin` makes the state in the
    /// thread and is given whether it runs under SCHED_FIFO. `sample` is given the time at which
    /// the sample is due, and returns the time at which it was taken, ns of CLOCK_MONOTONIC; `None`
    /// ends the thread. Samples missed by a late wake-up are not taken later.
    pub fn start(
        options: Options,
        begin: impl FnOnce(bool) -> T + Send + 'static,
        mut sample: impl FnMut(&mut T, u64) -> Option<u64> + Send + 'static,
    ) -> Option<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let Options { name, period_ns, cpu, priority } = options;
        let run = move || {
            if let Some(cpu) = cpu {
                let mut set = CpuSet::new();
                set.set(cpu);
                let _ = sched_setaffinity(None, &set);
            }
            let mut state = begin(priority.is_some_and(set_fifo));
            let mut due = now() + period_ns;
            while !stopped.load(Ordering::Relaxed) {
                sleep_until(due);
                let Some(taken) = sample(&mut state, due) else { break };
                due = (due + period_ns).max(taken);
            }
            state
        };
        let thread = std::thread::Builder::new().name(name).spawn(run).ok()?;
        Some(Self { stop, thread: Some(thread) })
    }

    /// Asks the thread to end, without waiting for it.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Ends the thread and returns its state; `None` when it panicked.
    pub fn finish(mut self) -> Option<T> {
        self.stop();
        self.thread.take()?.join().ok()
    }
}

impl<T> Drop for Sampler<T> {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Sets SCHED_FIFO for the calling thread; false where the kernel refuses (no privilege, or a CPU
/// cgroup without a real-time budget).
fn set_fifo(priority: i32) -> bool {
    let param = libc::sched_param { sched_priority: priority };
    // SAFETY: a thread id of 0 is the caller, and `param` is a valid sched_param.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const param) == 0 }
}

/// Current time of CLOCK_MONOTONIC, in ns.
pub(crate) fn now() -> u64 {
    let t = clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

fn sleep_until(due: u64) {
    let at = Timespec { tv_sec: (due / 1_000_000_000) as i64, tv_nsec: (due % 1_000_000_000) as _ };
    // An interrupted sleep only makes one sample early.
    let _ = clock_nanosleep_absolute(ClockId::Monotonic, &at);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options { name: "sampler-test".to_owned(), period_ns: 100_000, cpu: None, priority: None }
    }

    #[test]
    fn it_samples_in_order_until_it_is_stopped() {
        let sampled = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let has_sampled = std::sync::Arc::clone(&sampled);
        let sample = move |seen: &mut Vec<(u64, u64)>, due: u64| {
            let taken = now();
            seen.push((due, taken));
            has_sampled.store(true, std::sync::atomic::Ordering::Relaxed);
            Some(taken)
        };
        let sampler = Sampler::start(options(), |_| Vec::new(), sample).unwrap();
        while !sampled.load(std::sync::atomic::Ordering::Relaxed) {
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        let seen = sampler.finish().unwrap();
        assert!(!seen.is_empty() && seen.iter().all(|(due, taken)| taken >= due), "{seen:?}");
        assert!(seen.windows(2).all(|w| w[1].0 >= w[0].0 + 100_000 && w[1].0 >= w[0].1), "{seen:?}");
    }

    #[test]
    fn a_sample_that_cannot_be_taken_ends_it() {
        let sampler = Sampler::start(
            options(),
            |_| 0,
            |n, _| {
                *n += 1;
                None
            },
        );
        while !sampler.as_ref().unwrap().thread.as_ref().unwrap().is_finished() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        assert_eq!(sampler.unwrap().finish(), Some(1));
    }
}
