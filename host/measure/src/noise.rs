//! How quiet the host was during a run: wake-ups that came late although nothing of the run was in their way.
//!
//! One thread per CPU sleeps to absolute times and notes by how much it woke late, as cyclictest does. It runs under SCHED_FIFO, so
//! what delays it is not a task under test but the hypervisor below, interrupts, and the kernel where it cannot be preempted (which a load
//! on the device takes part in). A latency
//! tail of a run in which the host itself stood still says nothing about the setting under test.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

/// Time between two wake-ups of a probe. A stall shorter than this may fall between them.
const PERIOD_NS: u64 = 500_000;
/// A wake-up later than this is kept as a [`Stalls`] span: above what a stock kernel needs, so that the list stays short.
const KEPT_NS: u64 = 250_000;
/// Most spans that a probe keeps: at one every 0.5 ms, what a run of eight minutes could give.
const MOST_SPANS: usize = 1_000_000;
/// Above the threads of an emulated device (FIFO 40), whose own time is no stall of the host, and below threaded interrupts (50).
const PRIORITY: i32 = 42;
/// Larger share of the time in which some CPU stood still than this, and taking it off says nothing any more.
const MOST_STALLED: f64 = 0.05;
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
    /// Whether the CPUs were kept from sleeping meanwhile ([`crate::awake`]).
    #[serde(default)]
    pub awake: bool,
    /// Share of all CPU time that this machine, itself a guest, had work for and its hypervisor gave to others (0 to 1), where it was looked at. Emulated guests, whose
    /// CPUs are threads like any other, stand still meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stolen: Option<f64>,
}

/// From and to, in ns of CLOCK_MONOTONIC.
pub type Span = (u64, u64);

/// When a CPU of the host stood still: spans of CLOCK_MONOTONIC that do not overlap, rising.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stalls {
    spans: Vec<Span>,
    /// Length of all spans before each.
    before: Vec<u64>,
}

impl Stalls {
    /// The union of spans in any order, in ns.
    #[must_use]
    pub fn union(mut spans: Vec<Span>) -> Self {
        spans.sort_unstable();
        let mut merged: Vec<Span> = Vec::new();
        for (from, to) in spans {
            match merged.last_mut() {
                Some(last) if from <= last.1 => last.1 = last.1.max(to),
                _ if from < to => merged.push((from, to)),
                _ => {}
            }
        }
        let mut sum = 0;
        let before = merged
            .iter()
            .map(|(from, to)| {
                sum += to - from;
                sum - (to - from)
            })
            .collect();
        Self { spans: merged, before }
    }

    /// The same stalls at another time, `by` ns later: what taking them off does where nothing stood still, which is the method's own error.
    #[must_use]
    pub fn shifted(&self, by: u64) -> Self {
        let spans = self.spans.iter().map(|(from, to)| (from + by, to + by)).collect();
        Self { spans, before: self.before.clone() }
    }

    /// How much of the time from `from` to `to` lies in a stall, in ns.
    #[must_use]
    pub fn within(&self, from: u64, to: u64) -> u64 {
        self.until(to.max(from)) - self.until(from)
    }

    /// Stalled time before `t`.
    fn until(&self, t: u64) -> u64 {
        let i = self.spans.partition_point(|(from, _)| *from < t);
        let Some(last) = i.checked_sub(1) else { return 0 };
        let (from, to) = self.spans[last];
        self.before[last] + (t.min(to) - from)
    }
}

/// Probes at work. Dropping it stops them.
#[derive(Debug)]
pub struct NoiseProbe {
    stop: Arc<AtomicBool>,
    started: Instant,
    /// Whether every CPU that this process may use has its probe.
    all_there: bool,
    threads: Vec<JoinHandle<(Noise, Vec<Span>)>>,
}

impl NoiseProbe {
    /// Starts one probe per CPU that this process may use.
    #[must_use]
    pub fn start() -> Self {
        Self::start_above(PRIORITY - 1)
    }

    /// The same, above threads of a real-time priority that are themselves under test: what they hold a CPU for is no stall of the host.
    #[must_use]
    pub fn start_above(priority: i32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let (watched, all) = watched_cpus();
        let threads: Vec<_> = watched
            .iter()
            .filter_map(|&cpu| {
                let stop = Arc::clone(&stop);
                std::thread::Builder::new()
                    .name(format!("noise/{cpu}"))
                    .spawn(move || probe(cpu, priority + 1, &stop))
                    .ok()
            })
            .collect();
        let all_there = all && !threads.is_empty() && threads.len() == watched.len();
        Self { stop, started: Instant::now(), all_there, threads }
    }

    /// Stops the probes and gives what they saw. When the host stood still is known only where a probe ran under SCHED_FIFO on every CPU that
    /// this process may use and kept all that it saw, and when it did so for less than a twentieth of the time.
    #[must_use]
    pub fn finish(mut self) -> (Noise, Option<Stalls>) {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Noise { realtime: true, ..Noise::default() };
        let mut spans = Vec::new();
        let mut known = self.all_there;
        for thread in self.threads.drain(..) {
            let Ok((one, seen)) = thread.join() else {
                known = false;
                continue;
            };
            known &= seen.len() < MOST_SPANS;
            spans.extend(seen);
            all.max_ns = all.max_ns.max(one.max_ns);
            all.stalls += one.stalls;
            all.stalled_ns = Nanos(all.stalled_ns.0.saturating_add(one.stalled_ns.0));
            all.n += one.n;
            all.realtime &= one.realtime;
        }
        all.realtime &= all.n > 0;
        let stalls = Stalls::union(spans);
        let length = self.started.elapsed().as_nanos() as f64;
        known &= all.realtime && stalls.within(0, u64::MAX) as f64 <= MOST_STALLED * length;
        (all, known.then_some(stalls))
    }
}

impl Drop for NoiseProbe {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// CPUs that this process may use, without those that somebody has set apart: a probe there would disturb the work it is meant to watch
/// over. Also whether these are all.
fn watched_cpus() -> (Vec<usize>, bool) {
    let apart: Vec<usize> = ["isolated", "nohz_full"]
        .iter()
        .filter_map(|file| std::fs::read_to_string(format!("/sys/devices/system/cpu/{file}")).ok())
        .flat_map(|list| cpu_list(&list))
        .collect();
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return (Vec::new(), false) };
    let usable: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    let watched: Vec<usize> = usable.iter().copied().filter(|cpu| !apart.contains(cpu)).collect();
    let all = watched.len() == usable.len();
    (watched, all)
}

/// CPUs of a list such as `2-4,7` (Documentation/admin-guide/cputopology.rst); what is no number is left out, such as `(null)`.
fn cpu_list(text: &str) -> Vec<usize> {
    let most = rustix::thread::CpuSet::MAX_CPU;
    let mut cpus = Vec::new();
    for part in text.trim().split(',') {
        let (from, to) = part.split_once('-').unwrap_or((part, part));
        if let (Ok(from), Ok(to)) = (from.parse::<usize>(), to.parse::<usize>()) {
            cpus.extend(from..=to.min(most));
        }
    }
    cpus
}

fn probe(cpu: usize, priority: i32, stop: &AtomicBool) -> (Noise, Vec<Span>) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    // A probe that is not pinned still sees stalls, only less surely.
    let _ = rustix::thread::sched_setaffinity(None, &set);
    let mut noise = Noise { realtime: set_fifo(priority), ..Noise::default() };
    // Room for a common run: a page fault under load would look like a stall of the host.
    let mut spans = Vec::with_capacity(4096);
    let mut due = now() + PERIOD_NS;
    while !stop.load(Ordering::Relaxed) {
        sleep_until(due);
        let woke = now();
        note(&mut noise, &mut spans, due, woke);
        // Wake-ups that a stall has swallowed are not made up for: one stall counts once.
        due = (due + PERIOD_NS).max(woke);
    }
    (noise, spans)
}

/// Takes in one wake-up.
fn note(noise: &mut Noise, spans: &mut Vec<Span>, due: u64, woke: u64) {
    let late = Nanos(woke.saturating_sub(due));
    noise.n += 1;
    noise.max_ns = noise.max_ns.max(late);
    if late.0 > KEPT_NS && spans.len() < MOST_SPANS {
        spans.push((due, woke));
    }
    if late > STALL {
        noise.stalls += 1;
        noise.stalled_ns = Nanos(noise.stalled_ns.0 + late.0);
    }
}

/// SCHED_FIFO for the calling thread; false where the kernel refuses (no privilege, or a CPU cgroup without a real-time budget).
pub(crate) fn set_fifo(priority: i32) -> bool {
    let param = libc::sched_param { sched_priority: priority };
    // SAFETY: a thread id of 0 is the caller, and `param` is a valid sched_param.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &raw const param) == 0 }
}

pub(crate) fn now() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

pub(crate) fn sleep_until(due: u64) {
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
        let (noise, stalls) = probe.finish();
        // At most one wake-up per period and CPU; at least one at all.
        assert!(noise.n > 0, "{noise:?}");
        assert!(noise.stalled_ns.0 >= noise.stalls * STALL.0, "{noise:?}");
        assert!((noise.stalls > 0) == (noise.max_ns > STALL), "{noise:?}");
        // Without the right to a real-time class nobody knows whose the delays are.
        assert!(noise.realtime || stalls.is_none());
        if let Some(stalls) = stalls {
            let all = stalls.within(0, u64::MAX);
            assert!(all >= noise.max_ns.0.saturating_sub(KEPT_NS), "{all} {noise:?}");
        }
    }

    #[test]
    fn late_wake_ups_become_spans() {
        let (mut noise, mut spans) = (Noise::default(), Vec::new());
        for (due, late_us) in
            [(0, 50), (1_000_000, 251), (2_000_000, 1_001), (3_000_000, 250), (4_000_000, 7_000)]
        {
            note(&mut noise, &mut spans, due, due + late_us * 1_000);
        }
        assert_eq!(spans, [(1_000_000, 1_251_000), (2_000_000, 3_001_000), (4_000_000, 11_000_000)]);
        assert_eq!((noise.n, noise.stalls, noise.max_ns), (5, 2, Nanos::from_millis(7)));
        assert_eq!(noise.stalled_ns, Nanos(8_001_000));
    }

    #[test]
    fn lists_of_cpus_are_the_kernels() {
        assert_eq!(cpu_list("2-4,7\n"), [2, 3, 4, 7]);
        assert_eq!(cpu_list("\n"), [] as [usize; 0]);
        assert_eq!(cpu_list("(null)\n"), [] as [usize; 0]);
    }

    #[test]
    fn overlap_is_counted_once() {
        // Two CPUs that stand still at the same time are one stall.
        let stalls = Stalls::union(vec![(30, 40), (10, 20), (15, 25), (40, 45), (60, 60)]);
        assert_eq!(stalls.within(0, 100), 30);
        assert_eq!(stalls.within(12, 18), 6);
        assert_eq!(stalls.within(20, 35), 10);
        assert_eq!((stalls.within(25, 30), stalls.within(45, 99), stalls.within(50, 10)), (0, 0, 0));
        assert_eq!(Stalls::default().within(0, 10), 0);
    }
}
