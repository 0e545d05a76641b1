//! What both measurements need.
#![allow(dead_code, reason = "each program uses a part")]

/// Keeps the calling thread on one CPU.
///
/// # Errors
/// The kernel's.
pub fn pin(cpu: usize) -> anyhow::Result<()> {
    let mut set = rustix::thread::CpuSet::new();
    set.set(cpu);
    anyhow::Context::context(rustix::thread::sched_setaffinity(None, &set), format!("CPU {cpu}"))
}

/// Middle, lowest and highest of rounds.
#[derive(Clone, Copy)]
pub struct Spread {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

pub fn spread(mut values: Vec<f64>) -> Spread {
    values.sort_by(f64::total_cmp);
    let at = |i: usize| values.get(i).copied().unwrap_or(f64::NAN);
    let n = values.len();
    let median = if n % 2 == 1 { at(n / 2) } else { (at(n / 2) + at((n / 2).wrapping_sub(1))) / 2.0 };
    Spread { median, low: at(0), high: at(n.wrapping_sub(1)) }
}

/// Percentile of sorted values, the nearest rank.
pub fn at(sorted: &[u32], percent: f64) -> f64 {
    let rank = (sorted.len() as f64 * percent / 100.0).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).map_or(f64::NAN, |v| f64::from(*v))
}

/// Nanoseconds since some moment, on the clock of all threads.
pub fn now() -> u64 {
    nanos(rustix::time::ClockId::Monotonic)
}

/// CPU time of the calling thread in ns.
pub fn cpu_time() -> u64 {
    nanos(rustix::time::ClockId::ThreadCPUTime)
}

fn nanos(clock: rustix::time::ClockId) -> u64 {
    let t = rustix::time::clock_gettime(clock);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}
