//! Load generators: open loop at fixed times, or closed loop; latencies from the intended start.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rtvirtio_stats::Latencies;
use rtvirtio_stats::Random;
use rtvirtio_units::{Nanos, Percentile};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::client::Client;
use crate::queue::BlkRequest;

/// Largest latency that the histograms distinguish: 1000 s.
const LONGEST_LATENCY: Nanos = Nanos(1_000_000_000_000);

/// A stream of requests to one client.
#[derive(Clone, Debug, PartialEq)]
pub struct Stream {
    /// Name in the result.
    pub name: String,
    pub client: usize,
    pub queue: usize,
    /// Requests per second at fixed times; `None` keeps `depth` outstanding.
    pub rate: Option<f64>,
    /// Largest number of outstanding requests.
    pub depth: usize,
    /// Bytes of a request.
    pub block: u32,
    /// Share of writes, 0 to 1.
    pub writes: f64,
    /// Linux's I/O priority in the header.
    pub priority: u32,
    /// End of the range of offsets from 0, in bytes.
    pub span: u64,
    /// First offset of sequential requests, which start over after `span` bytes; random offsets
    /// from 0 when `None`.
    pub in_order_from: Option<u64>,
    /// A stream without a rate works for this long, then rests for as long, in turn; without rest
    /// when `None`.
    pub burst: Option<Duration>,
}

impl Stream {
    /// A closed loop of random 4 KiB reads on the first queue of the first client.
    #[must_use]
    pub fn reads(name: &str, depth: usize, span: u64) -> Self {
        Self {
            name: name.to_owned(),
            client: 0,
            queue: 0,
            rate: None,
            depth,
            block: 4_096,
            writes: 0.0,
            priority: 0,
            span,
            in_order_from: None,
            burst: None,
        }
    }

    /// End of a rest that is under way at `now`, both in ns since the beginning; `None` while the
    /// stream works.
    fn rests_until(&self, now: u64) -> Option<u64> {
        let burst = self.burst.filter(|_| self.rate.is_none())?.as_nanos() as u64;
        let turn = now / burst.max(1);
        (turn % 2 == 1).then(|| (turn + 1) * burst.max(1))
    }
}

#[derive(Clone, Debug)]
pub struct StreamResult {
    pub name: String,
    /// Requests that were due after the warm-up.
    pub n: u64,
    /// Requests due after the warm-up that completed with a status other than 0.
    pub errors: u64,
    /// Completions per second, of requests due after the warm-up.
    pub rate: f64,
    /// Requests not completed by the end; their latency is the time until then.
    pub unanswered: u64,
    /// Intended start and completion of each request, in ns of CLOCK_MONOTONIC.
    pub spans: Vec<(u64, u64)>,
    hist: Latencies,
}

impl StreamResult {
    /// A percentile of the latency from the intended start.
    #[must_use]
    pub fn percentile(&self, percentile: f64) -> Nanos {
        self.hist.at(Percentile(percentile))
    }

    /// Longest latency from the intended start.
    #[must_use]
    pub fn max(&self) -> Nanos {
        self.hist.max()
    }

    /// 99.99th percentile; the maximum where there are fewer than 10 000.
    #[must_use]
    pub fn tail(&self) -> Nanos {
        self.hist.tail()
    }
}

/// Stream and intended start of the request in each slot.
type Slots = Vec<Option<(usize, u64)>>;

struct StreamState {
    stream: Stream,
    random: Random,
    /// Requests submitted so far.
    made: u64,
    /// Next intended start, in ns since the beginning.
    due: u64,
    period: u64,
    outstanding: usize,
    /// Intended starts that wait for a slot.
    overdue: std::collections::VecDeque<u64>,
    /// Completions after the warm-up.
    completions: u64,
    result: StreamResult,
}

/// Duration and mode of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// Time before the measurement.
    pub warm_up: Duration,
    /// Time of the measurement.
    pub length: Duration,
    /// Seed of offsets and directions.
    pub seed: u64,
    /// Polls for completions without sleeping, as a polling guest does. Otherwise sleeps until the
    /// back end calls.
    pub spin: bool,
}

/// Runs streams against connected clients, from one thread.
pub fn run(clients: &mut [Client], streams: &[Stream], plan: &Plan) -> std::io::Result<Vec<StreamResult>> {
    run_until(clients, streams, plan, &AtomicBool::new(false))
}

/// Runs streams as [`run`] does; also ends when `stop` is set and a back end calls.
pub fn run_until(
    clients: &mut [Client],
    streams: &[Stream],
    plan: &Plan,
    stop: &AtomicBool,
) -> std::io::Result<Vec<StreamResult>> {
    let mut states: Vec<StreamState> = streams
        .iter()
        .enumerate()
        .map(|(i, s)| StreamState::new(s, plan.seed.wrapping_add(i as u64)))
        .collect();
    let mut slots: Vec<Vec<Slots>> = clients
        .iter()
        .map(|c| c.queues.iter().map(|q| vec![None; usize::from(q.size())]).collect())
        .collect();
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let begin = Instant::now();
    let base = clock.tv_sec as u64 * 1_000_000_000 + clock.tv_nsec as u64;
    let (from, latest) = (plan.warm_up.as_nanos() as u64, (plan.warm_up + plan.length).as_nanos() as u64);
    let end = loop {
        let now = begin.elapsed().as_nanos() as u64;
        if now >= latest || stop.load(Ordering::Relaxed) {
            break now.min(latest);
        }
        for (c, client) in clients.iter_mut().enumerate() {
            for (q, queue) in client.queues.iter_mut().enumerate() {
                while let Some(completion) = queue.pop_used() {
                    let slot =
                        slots.get_mut(c).and_then(|s| s.get_mut(q)?.get_mut(usize::from(completion.slot)));
                    let Some((stream, intended)) = slot.and_then(Option::take) else { continue };
                    let now = begin.elapsed().as_nanos() as u64;
                    states[stream].on_completion((now, intended), completion.status, from, base);
                }
            }
        }
        let mut next = latest;
        for (i, r) in states.iter_mut().enumerate() {
            let client = &mut clients[r.stream.client];
            let queue = &mut client.queues[r.stream.queue];
            let mut any = false;
            while let Some(intended) = r.next_due(now) {
                let Some(slot) = queue.push(&r.next_request()) else {
                    r.overdue.push_front(intended);
                    break;
                };
                slots[r.stream.client][r.stream.queue][usize::from(slot)] = Some((i, intended));
                r.outstanding += 1;
                any = true;
            }
            if any {
                queue.notify()?;
            }
            if r.stream.rate.is_some() {
                next = next.min(r.due);
            }
            next = r.stream.rests_until(now).map_or(next, |until| next.min(until));
        }
        if !plan.spin {
            sleep(clients, begin, next)?;
        }
    };
    let seconds = end.saturating_sub(from).max(1) as f64 / 1e9;
    // A request without a completion has waited at least until the end.
    for (stream, intended) in slots.into_iter().flatten().flatten().flatten() {
        states[stream].record_incomplete(end, intended, from, base);
    }
    for r in &mut states {
        for intended in std::mem::take(&mut r.overdue) {
            r.result.unanswered += 1;
            r.record_incomplete(end, intended, from, base);
        }
    }
    Ok(states
        .into_iter()
        .map(|r| {
            let unanswered =
                if r.stream.rate.is_some() { r.result.unanswered + r.outstanding as u64 } else { 0 };
            StreamResult { rate: r.completions as f64 / seconds, unanswered, ..r.result }
        })
        .collect())
}

/// Sleeps until the next intended start, or a call of a back end.
fn sleep(clients: &mut [Client], begin: Instant, next: u64) -> std::io::Result<()> {
    for queue in clients.iter_mut().flat_map(|c| c.queues.iter_mut()) {
        queue.enable_call();
        if queue.has_used() {
            return Ok(());
        }
    }
    let now = begin.elapsed().as_nanos() as u64;
    let Some(rest) = next.checked_sub(now).filter(|r| *r > 0) else { return Ok(()) };
    let time = Timespec { tv_sec: (rest / 1_000_000_000) as i64, tv_nsec: (rest % 1_000_000_000) as i64 };
    let queues: Vec<_> = clients.iter().flat_map(|c| c.queues.iter()).collect();
    let mut fds: Vec<PollFd<'_>> =
        queues.iter().map(|q| PollFd::from_borrowed_fd(q.call_fd(), PollFlags::IN)).collect();
    match poll(&mut fds, Some(&time)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(e) => return Err(e.into()),
    }
    for (fd, queue) in fds.iter().zip(&queues) {
        if fd.revents().contains(PollFlags::IN) {
            let _ = queue.call.read();
        }
    }
    Ok(())
}

impl StreamState {
    fn new(stream: &Stream, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let period = stream.rate.map_or(0, |r| (1e9 / r.max(1e-3)) as u64);
        // Streams start at random phases.
        let due = (random.unit() * period as f64) as u64;
        let result = StreamResult {
            name: stream.name.clone(),
            n: 0,
            errors: 0,
            rate: 0.0,
            unanswered: 0,
            spans: Vec::new(),
            hist: Latencies::with_range(LONGEST_LATENCY, 3),
        };
        Self {
            stream: stream.clone(),
            random,
            made: 0,
            due,
            period,
            outstanding: 0,
            overdue: std::collections::VecDeque::new(),
            completions: 0,
            result,
        }
    }

    /// The intended start of the next request, if one may be submitted now.
    fn next_due(&mut self, now: u64) -> Option<u64> {
        if self.stream.rate.is_some() {
            while self.due <= now {
                self.overdue.push_back(self.due);
                self.due += self.period.max(1);
            }
        }
        if self.outstanding >= self.stream.depth || self.stream.rests_until(now).is_some() {
            return None;
        }
        if self.stream.rate.is_some() { self.overdue.pop_front() } else { Some(now) }
    }

    fn next_request(&mut self) -> BlkRequest {
        let write = self.stream.writes > 0.0 && self.random.unit() < self.stream.writes;
        let places = (self.stream.span / u64::from(self.stream.block)).max(1);
        let place = match self.stream.in_order_from {
            Some(_) => self.made % places,
            None => self.random.below(places as usize) as u64,
        };
        self.made += 1;
        let first = self.stream.in_order_from.unwrap_or(0) / 512;
        BlkRequest {
            kind: u32::from(write),
            priority: self.stream.priority,
            sector: first + place * u64::from(self.stream.block) / 512,
            len: self.stream.block,
        }
    }

    /// Records a lower bound of a latency.
    fn record_incomplete(&mut self, now: u64, intended: u64, from: u64, base: u64) {
        // A closed loop has no intended start for its next request.
        if intended < from || self.stream.rate.is_none() {
            return;
        }
        self.record(now, intended, base);
    }

    fn record(&mut self, now: u64, intended: u64, base: u64) {
        let latency = now.saturating_sub(intended);
        self.result.n += 1;
        self.result.hist.record(Nanos(latency), 1);
        self.result.spans.push((base + intended, base + now.max(intended)));
    }

    fn on_completion(&mut self, (now, intended): (u64, u64), status: u8, from: u64, base: u64) {
        self.outstanding -= 1;
        if intended < from {
            return;
        }
        self.completions += 1;
        self.result.errors += u64::from(status != 0);
        self.record(now, intended, base);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_in_bursts_rests_every_other_time() {
        let stream = Stream { burst: Some(Duration::from_nanos(10)), ..Stream::reads("s", 1, 4_096) };
        let at = |now| stream.rests_until(now);
        assert_eq!([at(0), at(9), at(10), at(19), at(20)], [None, None, Some(20), Some(20), None]);
        let paced = Stream { rate: Some(5.0), ..stream };
        assert_eq!(paced.rests_until(10), None, "a rate has its own times");
        assert_eq!(Stream { burst: None, rate: None, ..paced }.rests_until(10), None);
    }
}
