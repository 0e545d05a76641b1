//! Stalls of the host during a run: wake-ups that came late although no task of the run delayed
//! them.
//!
//! One thread per CPU sleeps to absolute times and records by how much it woke late, as cyclictest
//! does. It runs under SCHED_FIFO, so it is delayed not by a task under test but by the hypervisor
//! below, interrupts, and the kernel where it cannot be preempted (to which a load on the device
//! contributes). A latency tail of a run in which the host itself stalled shows nothing about the
//! setting under test.

use std::time::Instant;

use rtvirtio_kernel::{Root, text};
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

use crate::sampler::{Options, Sampler, now};
use crate::stalls::{Span, Stalls};

/// Time between two wake-ups of a probe. A stall shorter than this may fall between them.
const PERIOD_NS: u64 = 500_000;
/// Time between two wake-ups of [`NoiseProbe::start_sparse`].
const SPARSE_PERIOD_NS: u64 = 5_000_000;
/// Lateness above which a wake-up is kept as a [`Stalls`] span: more than a stock kernel needs, so
/// that the list stays short.
const KEPT_NS: u64 = 250_000;
/// Largest number of spans that a probe keeps: at one every 0.5 ms, a run of eight minutes.
const MOST_SPANS: usize = 1_000_000;
/// Above the threads of an emulated device (FIFO 40), whose own time is no stall of the host, and
/// below threaded interrupts (50).
const PRIORITY: i32 = 42;
/// Share of the time with a stall of some CPU above which subtracting the stalls shows nothing any
/// more.
pub const MOST_STALLED: f64 = 0.05;
/// Lateness above which a wake-up counts as a stall of the host: above the few hundred microseconds
/// of a stock kernel (the RT hypervisor paper's Fig. 1 has 500 us), below the scale of targets of
/// some milliseconds.
const STALL: Nanos = Nanos(1_000_000);

/// Statistics of the probes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Noise {
    /// Largest lateness over all CPUs.
    pub max_ns: Nanos,
    /// Number of wake-ups more than 1 ms late.
    pub stalls: u64,
    /// Sum of their lateness.
    pub stalled_ns: Nanos,
    /// Number of all wake-ups.
    pub n: u64,
    /// Whether the probes ran under SCHED_FIFO. Without it, load under test delays them too.
    pub realtime: bool,
    /// Whether the CPUs were kept out of idle states meanwhile ([`crate::pm_qos`]).
    #[serde(default)]
    pub awake: bool,
    /// Share of all CPU time that the hypervisor stole from this machine, itself a guest (0 to 1),
    /// where it was measured. Emulated guests, whose CPUs are threads like any other, stall
    /// meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stolen: Option<f64>,
    /// Share of the time (0 to 1) in which some CPU stalled for more than 0.25 ms, where the probes
    /// covered every CPU. Above [`MOST_STALLED`] stalls are not subtracted from tails.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stood_still: Option<f64>,
}

/// Running probes. Dropping it stops them.
#[derive(Debug)]
pub struct NoiseProbe {
    started: Instant,
    /// Whether every CPU that this process may use has its probe.
    all_there: bool,
    probes: Vec<Sampler<(Noise, Vec<Span>)>>,
}

impl NoiseProbe {
    /// Starts one probe per CPU that this process may use.
    #[must_use]
    pub fn start() -> Self {
        Self::start_above(PRIORITY - 1)
    }

    /// Starts probes above threads of a real-time priority that are themselves under test: the time
    /// for which these hold a CPU is no stall of the host.
    #[must_use]
    pub fn start_above(priority: i32) -> Self {
        Self::start_every(PERIOD_NS, priority + 1)
    }

    /// Starts probes for a service, which runs for months: they wake every 5 ms only, at a tenth of
    /// the cost. A stall shorter than that may fall between two wake-ups, and a longer one is
    /// measured up to 5 ms too short.
    #[must_use]
    pub fn start_sparse() -> Self {
        Self::start_every(SPARSE_PERIOD_NS, PRIORITY)
    }

    fn start_every(period_ns: u64, priority: i32) -> Self {
        let started = Instant::now();
        let (watched, all) = watched_cpus();
        let probes: Vec<_> = watched.iter().filter_map(|&cpu| probe(cpu, priority, period_ns)).collect();
        let all_there = all && !probes.is_empty() && probes.len() == watched.len();
        Self { started, all_there, probes }
    }

    /// Stops the probes and returns their statistics. The stalls are returned only where a probe
    /// ran under SCHED_FIFO on every CPU that this process may use and kept all its spans, and when
    /// they take less than a twentieth of the time.
    #[must_use]
    pub fn finish(self) -> (Noise, Option<Stalls>) {
        self.probes.iter().for_each(Sampler::stop);
        let mut all = Noise { realtime: true, ..Noise::default() };
        let mut spans = Vec::new();
        let (mut known, mut whole) = (self.all_there, true);
        for probe in self.probes {
            let Some((one, seen)) = probe.finish() else {
                known = false;
                continue;
            };
            whole &= seen.len() < MOST_SPANS;
            spans.extend(seen);
            all.max_ns = all.max_ns.max(one.max_ns);
            all.stalls += one.stalls;
            all.stalled_ns = Nanos(all.stalled_ns.0.saturating_add(one.stalled_ns.0));
            all.n += one.n;
            all.realtime &= one.realtime;
        }
        all.realtime &= all.n > 0;
        let stalls = Stalls::union(spans);
        let length = self.started.elapsed().as_nanos().max(1) as f64;
        known &= all.realtime;
        all.stood_still = known.then(|| stalls.within(0, u64::MAX) as f64 / length);
        known &= whole && all.stood_still.is_some_and(|share| share <= MOST_STALLED);
        (all, known.then_some(stalls))
    }
}

/// CPUs that this process may use, without isolated ones: a probe there would disturb the very work
/// that it measures. Also whether these are all.
fn watched_cpus() -> (Vec<usize>, bool) {
    let root = Root::default();
    let apart: Vec<usize> = ["isolated", "nohz_full"]
        .iter()
        .filter_map(|file| root.read(format!("/sys/devices/system/cpu/{file}")).ok())
        // A text that is no list, such as `(null)`, counts as empty.
        .flat_map(|list| text::cpu_list(&list).unwrap_or_default())
        .map(|cpu| cpu as usize)
        .collect();
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return (Vec::new(), false) };
    let usable: Vec<usize> = (0..rustix::thread::CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect();
    let watched: Vec<usize> = usable.iter().copied().filter(|cpu| !apart.contains(cpu)).collect();
    let all = watched.len() == usable.len();
    (watched, all)
}

/// Starts a probe on one CPU.
fn probe(cpu: usize, priority: i32, period_ns: u64) -> Option<Sampler<(Noise, Vec<Span>)>> {
    let options =
        Options { name: format!("noise/{cpu}"), period_ns, cpu: Some(cpu), priority: Some(priority) };
    // Room for a common run: a page fault under load would look like a stall of the host.
    let begin = |realtime| (Noise { realtime, ..Noise::default() }, Vec::with_capacity(4096));
    Sampler::start(options, begin, |(noise, spans): &mut (Noise, Vec<Span>), due| {
        let woke = now();
        note(noise, spans, due, woke);
        Some(woke)
    })
}

/// Adds one wake-up to the statistics.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_count_and_stop() {
        // Longer and longer, until a busy machine lets it wake.
        let mut probed = (0..10).map(|n| {
            let probe = NoiseProbe::start();
            std::thread::sleep(std::time::Duration::from_millis(100 << n));
            probe.finish()
        });
        let (noise, stalls) = probed.find(|(noise, _)| noise.n > 0).expect("it wakes");
        // At most one wake-up per period and CPU; at least one in total.
        assert!(noise.n > 0, "{noise:?}");
        assert!(noise.stalled_ns.0 >= noise.stalls * STALL.0, "{noise:?}");
        assert!((noise.stalls > 0) == (noise.max_ns > STALL), "{noise:?}");
        // Without the right to a real-time class the cause of the delays is unknown.
        assert!(noise.realtime || (stalls.is_none() && noise.stood_still.is_none()));
        if let Some(stalls) = stalls {
            assert!(noise.stood_still.is_some_and(|share| share <= MOST_STALLED), "{noise:?}");
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
}
