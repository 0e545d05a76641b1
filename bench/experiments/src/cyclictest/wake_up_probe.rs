//! Wake-up latencies of a real-time thread on the host.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, bail};
use rtvirtio_kernel::sched::{self, Attr};
use rustix::thread::{ClockId, clock_nanosleep_absolute};

use super::Latencies;
use rtvirtio_harness::cores::bind_this_thread;

/// A thread of the host that measures as cyclictest does, at a higher priority than all other
/// threads on its core, until it is finished or dropped. A guest on that core cannot wake faster.
pub struct WakeUpProbe {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<Latencies>>>,
}

impl WakeUpProbe {
    /// Returns when the thread has its core and its priority. After `length` it ends by itself.
    pub fn start(core: u32, interval_us: u64, length: Option<Duration>) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let (ready, is_ready) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            bind_this_thread(core)?;
            sched::set(this_thread(), &Attr::fifo(99)).context("priority 99")?;
            let _ = ready.send(());
            Ok(wake_up(interval_us, length, &stopped))
        });
        let probe = Self { stop, thread: Some(thread) };
        match is_ready.recv() {
            Ok(()) => Ok(probe),
            // The thread ended with an error.
            Err(_) => Err(probe.finish().err().context("the thread that watches the host ended")?),
        }
    }

    /// Stops the thread and returns its latencies.
    pub fn finish(mut self) -> anyhow::Result<Latencies> {
        self.stop.store(true, Ordering::Relaxed);
        let thread = self.thread.take().context("finished twice")?;
        thread.join().unwrap_or_else(|_| bail!("the thread that watches the host panicked"))
    }
}

impl Drop for WakeUpProbe {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Wakes in these intervals until `stop` is set, at most for `length`.
fn wake_up(interval_us: u64, length: Option<Duration>, stop: &AtomicBool) -> Latencies {
    let now = || {
        let t = rustix::time::clock_gettime(ClockId::Monotonic);
        t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
    };
    let mut all = Latencies::default();
    let start = now();
    let end = length.map_or(u64::MAX, |l| start + u64::try_from(l.as_nanos()).unwrap_or(u64::MAX / 2));
    let mut due = start + interval_us * 1000;
    while due < end && !stop.load(Ordering::Relaxed) {
        let at = rustix::thread::Timespec {
            tv_sec: (due / 1_000_000_000) as i64,
            tv_nsec: (due % 1_000_000_000) as i64,
        };
        let _ = clock_nanosleep_absolute(ClockId::Monotonic, &at);
        let woke = now();
        all.add(woke.saturating_sub(due) / 1000);
        // Missed wake-ups are not counted, as in cyclictest.
        while due <= woke {
            due += interval_us * 1000;
        }
    }
    all.seconds = Duration::from_nanos(now() - start).as_secs_f64();
    all
}

fn this_thread() -> u32 {
    rustix::thread::gettid().as_raw_nonzero().get().unsigned_abs()
}
