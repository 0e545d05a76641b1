//! A twin that ages, the counters of its windows, and its profile as measured when new.

use std::collections::VecDeque;

use rtvirtio_model::ageing::{AgeingWindow, Completed};
use rtvirtio_model::{DepthPoint, PROFILE_SCHEMA, Profile};
use rtvirtio_stats::{Latencies, Random};
use rtvirtio_twin::{Access, ServiceModel, TwinProfile};
use rtvirtio_units::{Bytes, Iops, Nanos, Percentile};

use super::pattern::Condition;

/// Time of a window that is simulated, ns; it stands for the whole window. A pause of the new twin
/// delays fewer requests of it than the percentile leaves out.
const SIMULATED: u64 = 4_000_000_000;
/// Requests per second of each direction.
const RATE: f64 = 300.0;
/// Size of a request, in bytes.
const BLOCK: u64 = 4096;
/// Size of the device, in bytes.
const SIZE: u64 = 1 << 30;
/// Requests of each depth of the profile.
const PROFILED: u64 = 100_000;
/// Percentile that is bounded.
const PERCENTILE: f64 = 99.0;

/// Operations in the order of all pairs here.
const ACCESSES: [Access; 2] = [Access::Read, Access::Write];

/// Counters and tails of one window.
pub struct Sample {
    /// Counters of the device, as the kernel has them.
    pub window: AgeingWindow,
    /// p99 of reads and writes, without the host's stalls.
    pub tails: [Nanos; 2],
}

/// A twin under load.
pub struct Device {
    twin: TwinProfile,
    model: ServiceModel,
    random: Random,
    now: u64,
    /// Time of the next read and the next write.
    next: [u64; 2],
    /// Time at which the device is at rest.
    rests: u64,
}

impl Device {
    pub fn new(twin: &TwinProfile, seed: u64) -> Self {
        let model = ServiceModel::new(twin.clone(), SIZE, seed);
        let random = Random::new(seed.wrapping_add(1));
        Self { twin: twin.clone(), model, random, now: 0, next: [0; 2], rests: 0 }
    }

    /// Serves a window, with Poisson arrivals.
    pub fn window(&mut self, condition: &Condition) -> Sample {
        self.model.set_profile(condition.twin(&self.twin));
        let end = self.now + SIMULATED;
        let length = condition.host_stall.0.min(SIMULATED);
        let from = self.now + (self.random.unit() * (SIMULATED - length) as f64) as u64;
        let stalled = from..from + length;
        let mut window = AgeingWindow {
            seconds: SIMULATED as f64 / 1e9,
            host_stalled_s: length as f64 / 1e9,
            ..AgeingWindow::default()
        };
        let mut latencies = [Vec::new(), Vec::new()];
        let (mut busy, mut in_flight, mut standstill) = (0u64, 0u64, 0u64);
        loop {
            let direction = usize::from(self.next[1] < self.next[0]);
            let at = self.next[direction];
            if at >= end {
                break;
            }
            let gap = -(1.0 - self.random.unit()).ln() / (RATE * condition.rate);
            self.next[direction] = at + (gap * 1e9) as u64;
            let done = self.serve(at, direction, condition);
            // Requests are completed in order.
            standstill = standstill.max(done.saturating_sub(self.rests.max(at)));
            // A completion during a stall of the host is seen at its end.
            let seen = if stalled.contains(&done) { stalled.end } else { done };
            busy += seen.saturating_sub(self.rests.max(at));
            in_flight += seen - at;
            self.rests = seen.max(self.rests);
            latencies[direction].push(seen - at);
        }
        self.now = end;
        (window.busy_s, window.in_flight_s) = (busy as f64 / 1e9, in_flight as f64 / 1e9);
        window.standstill_s = Some(standstill as f64 / 1e9);
        window.read = completed(&latencies[0]);
        window.write = completed(&latencies[1]);
        let tails = latencies.map(|all| Nanos(tail(all).saturating_sub(length)));
        Sample { window, tails }
    }

    /// Time at which a request is done that arrives `at`.
    fn serve(&mut self, at: u64, direction: usize, condition: &Condition) -> u64 {
        let offset = self.random.below((SIZE / BLOCK) as usize) as u64 * BLOCK;
        let access = ACCESSES[direction];
        let done = self.model.complete_at(at, access, offset, BLOCK);
        if direction == 0 && condition.retries > 0.0 && self.random.unit() < condition.retries {
            return self.model.complete_at(at, access, offset, BLOCK);
        }
        done
    }
}

fn completed(latencies: &[u64]) -> Completed {
    let n = latencies.len() as u64;
    Completed { n, bytes: n * BLOCK, time_s: latencies.iter().sum::<u64>() as f64 / 1e9 }
}

/// The percentile by nearest rank; 0 of none.
fn tail(mut latencies: Vec<u64>) -> u64 {
    let rank = (latencies.len() as f64 * PERCENTILE / 100.0).ceil() as usize;
    if rank == 0 {
        return 0;
    }
    *latencies.select_nth_unstable(rank - 1).1
}

/// The profile of a twin as new: closed loops of each direction, at depths 1 and 4.
pub fn profile(twin: &TwinProfile, seed: u64) -> Profile {
    let points = |access| [1, 4].map(|depth| point(twin, access, depth, seed)).to_vec();
    Profile {
        schema: PROFILE_SCHEMA.to_owned(),
        device: "simulated".to_owned(),
        identity: None,
        size: Bytes(SIZE),
        block: Bytes(BLOCK),
        read: points(Access::Read),
        write: points(Access::Write),
        // No flush is simulated.
        sync: points(Access::Write),
        read_bfq: Vec::new(),
        large: None,
        guest: None,
        cpus: 1,
        kernel: "simulated".to_owned(),
        doubts: Vec::new(),
    }
}

fn point(twin: &TwinProfile, access: Access, depth: u32, seed: u64) -> DepthPoint {
    let (mut model, mut random) = (ServiceModel::new(twin.clone(), SIZE, seed), Random::new(seed));
    let mut latencies = Latencies::new();
    // A request comes when the one before it by the depth is done.
    let mut due: VecDeque<u64> = vec![0; depth as usize].into();
    let mut last = 0u64;
    for _ in 0..PROFILED {
        let Some(at) = due.pop_front() else { break };
        let offset = random.below((SIZE / BLOCK) as usize) as u64 * BLOCK;
        last = model.complete_at(at, access, offset, BLOCK);
        latencies.record(Nanos(last - at), 1);
        due.push_back(last);
    }
    DepthPoint {
        depth,
        iops: Iops(PROFILED as f64 * 1e9 / last.max(1) as f64),
        spread: 0.0,
        n: PROFILED,
        p50: latencies.at(Percentile(50.0)),
        p99: latencies.at(Percentile(99.0)),
        p9999: latencies.tail(),
        max: latencies.max(),
    }
}
