//! What a queue thread between a guest's kick and the scheduler costs, or wins.
//!
//! ```text
//! cargo run --release -p rtvirtio-ioring --example handoff
//! cargo run --release -p rtvirtio-ioring --example handoff -- --parse-ns 300 --schedule-ns 1000
//! ```
//!
//! A thread that stands in for the guest puts a batch of requests into a ring that stands in for the virtqueue, kicks an eventfd, and sleeps on another until all are answered. Who takes them:
//!
//! | | |
//! |---|---|
//! | `one` | the scheduler's thread, woken by the kick |
//! | `queue, same CPU` | a queue thread, woken by the kick, hands them through a ring to the scheduler's thread and wakes that; both on one CPU |
//! | `queue, own CPU` | the same, the queue thread on the guest's CPU |
//! | `one, polls` | the scheduler's thread, which never sleeps |
//! | `queue, polls` | a queue thread that sleeps, before a scheduler that never does |
//!
//! *Latency* is from the moment at which the guest makes a request to the moment at which the scheduler has it. *CPU* is that of the queue thread and the scheduler's, for each request. Nobody writes
//! an eventfd for somebody who is awake. The real engine waits in io_uring and not in `read`; that is the same for all.

mod common;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::thread::{Scope, ScopedJoinHandle};

use anyhow::Context;
use clap::Parser;
use common::{Spread, at, cpu_time, now, pin, spread};
use rtvirtio_ioring::{Consumer, Producer, ring};
use rustix::event::{EventfdFlags, eventfd};
use serde_json::json;

/// Measures what a second thread on a request's way costs.
#[derive(Parser)]
struct Args {
    /// Rounds, in each of which every way has its turn
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Requests of one turn at depth 1; four times as many at larger depths
    #[arg(long, default_value_t = 20_000)]
    requests: u64,
    /// Requests that the guest makes at once
    #[arg(long, num_args = 1.., default_values_t = [1, 32])]
    depths: Vec<usize>,
    /// Work to parse a request, in ns
    #[arg(long, default_value_t = 0)]
    parse_ns: u64,
    /// Work to schedule one, in ns
    #[arg(long, default_value_t = 0)]
    schedule_ns: u64,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// About what a parsed request holds.
#[derive(Clone, Copy)]
struct Request {
    id: u64,
    made: u64,
    _segments: [u64; 6],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    One,
    SameCpu,
    OwnCpu,
    OnePolls,
    QueuePolls,
}

impl Way {
    const ALL: [Self; 5] = [Self::One, Self::SameCpu, Self::OwnCpu, Self::OnePolls, Self::QueuePolls];

    const fn name(self) -> &'static str {
        match self {
            Self::One => "one",
            Self::SameCpu => "queue, same CPU",
            Self::OwnCpu => "queue, own CPU",
            Self::OnePolls => "one, polls",
            Self::QueuePolls => "queue, polls",
        }
    }

    const fn polls(self) -> bool {
        matches!(self, Self::OnePolls | Self::QueuePolls)
    }

    /// CPU of the queue thread, if there is one. The guest is on 0, the scheduler on 1.
    const fn queue(self) -> Option<usize> {
        match self {
            Self::One | Self::OnePolls => None,
            Self::SameCpu => Some(1),
            Self::OwnCpu | Self::QueuePolls => Some(0),
        }
    }
}

/// An eventfd that is only written when its owner sleeps.
struct Bell {
    fd: OwnedFd,
    asleep: AtomicBool,
}

impl Bell {
    fn new() -> anyhow::Result<Self> {
        Ok(Self { fd: eventfd(0, EventfdFlags::CLOEXEC).context("eventfd")?, asleep: AtomicBool::new(false) })
    }

    /// Sleeps until rung, unless there is something to do.
    fn wait(&self, nothing: impl Fn() -> bool) {
        self.asleep.store(true, Ordering::Relaxed);
        // Either we see what the other side put into the ring, or it sees that we sleep.
        fence(Ordering::SeqCst);
        if nothing() {
            let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
        } else if !self.asleep.swap(false, Ordering::Relaxed) {
            // Rung meanwhile: the count must not wake us the next time.
            let _ = rustix::io::read(&self.fd, &mut [0u8; 8]);
        }
    }

    fn ring(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            let _ = rustix::io::write(&self.fd, &1u64.to_ne_bytes());
        }
    }
}

fn work(ns: u64) {
    if ns > 0 {
        let end = now() + ns;
        while now() < end {}
    }
}

/// What a turn showed.
struct Turn {
    /// Sorted, in ns.
    latency: Vec<u32>,
    cpu_per_request: f64,
    per_second: f64,
}

struct Bells {
    kick: Bell,
    handed: Bell,
    call: Bell,
}

/// Takes requests from the virtqueue and hands them on; its CPU time.
fn queue_thread<'s>(
    scope: &'s Scope<'s, '_>,
    args: &'s Args,
    bells: &'s Bells,
    cpu: usize,
    n: u64,
    mut from: Consumer<Request>,
    mut to: Producer<Request>,
) -> ScopedJoinHandle<'s, anyhow::Result<u64>> {
    scope.spawn(move || {
        pin(cpu)?;
        let begin = cpu_time();
        let mut seen = 0;
        while seen < n {
            let before = seen;
            while let Some(request) = from.pop() {
                work(args.parse_ns);
                // There is room: both rings have the virtqueue's size.
                anyhow::ensure!(to.push(request).is_ok(), "the scheduler's ring is full");
                seen += 1;
            }
            if seen > before {
                bells.handed.ring();
            }
            if seen < n {
                bells.kick.wait(|| from.is_empty());
            }
        }
        Ok(cpu_time() - begin)
    })
}

/// One turn of one way.
fn turn(args: &Args, way: Way, depth: usize) -> anyhow::Result<Turn> {
    let bells = &Bells { kick: Bell::new()?, handed: Bell::new()?, call: Bell::new()? };
    let n = if depth == 1 { args.requests } else { (args.requests * 4).next_multiple_of(depth as u64) };
    let (mut virtqueue, from_guest) = ring::<Request>(256);
    let (answered, parse) = (&AtomicU64::new(0), if way.queue().is_some() { 0 } else { args.parse_ns });
    std::thread::scope(|scope| {
        let (queue, mut requests) = match way.queue() {
            None => (None, from_guest),
            Some(cpu) => {
                let (to, requests) = ring::<Request>(256);
                (Some(queue_thread(scope, args, bells, cpu, n, from_guest, to)), requests)
            }
        };
        let bell = if queue.is_some() { &bells.handed } else { &bells.kick };
        let scheduler = scope.spawn(move || {
            pin(1)?;
            let mut latency = Vec::with_capacity(n as usize);
            let begin = cpu_time();
            let mut seen = 0;
            while seen < n {
                while let Some(request) = requests.pop() {
                    latency.push(u32::try_from(now() - request.made).unwrap_or(u32::MAX));
                    anyhow::ensure!(request.id == seen, "request {} came for {seen}", request.id);
                    work(parse + args.schedule_ns);
                    seen += 1;
                    if seen % depth as u64 == 0 {
                        answered.store(seen, Ordering::Release);
                        bells.call.ring();
                    }
                }
                if way.polls() {
                    std::hint::spin_loop();
                } else if seen < n {
                    bell.wait(|| requests.is_empty());
                }
            }
            Ok((latency, cpu_time() - begin))
        });
        pin(0)?;
        let begin = now();
        let mut id = 0;
        while id < n {
            for _ in 0..depth {
                anyhow::ensure!(
                    virtqueue.push(Request { id, made: now(), _segments: [id; 6] }).is_ok(),
                    "--depths: at most 256"
                );
                id += 1;
            }
            bells.kick.ring();
            while answered.load(Ordering::Acquire) < id {
                bells.call.wait(|| answered.load(Ordering::Acquire) < id);
            }
        }
        let per_second = n as f64 * 1e9 / (now() - begin) as f64;
        let gone = |_| anyhow::anyhow!("a thread panicked");
        let queue_cpu = queue.map_or(Ok(Ok(0)), ScopedJoinHandle::join).map_err(gone)??;
        let (mut latency, cpu) = scheduler.join().map_err(gone)??;
        latency.sort_unstable();
        Ok(Turn { latency, cpu_per_request: (cpu + queue_cpu) as f64 / n as f64, per_second })
    })
}

/// One line of the table: p50, p99.99, CPU, rate.
struct Line {
    way: Way,
    depth: usize,
    values: [Spread; 4],
}

const COLUMNS: [(&str, &str); 4] =
    [("p50", "us"), ("p99.99", "us"), ("CPU/request", "us"), ("requests", "k/s")];

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    anyhow::ensure!(args.rounds > 0 && args.requests > 0, "nothing to measure: give at least 1 of each");
    anyhow::ensure!(args.depths.iter().all(|d| (1..=256).contains(d)), "--depths: 1 to 256");
    let mut lines = Vec::new();
    for &depth in &args.depths {
        let mut turns: Vec<Vec<Turn>> = Way::ALL.iter().map(|_| Vec::new()).collect();
        for round in 0..args.rounds {
            for i in 0..Way::ALL.len() {
                let i = (i + round) % Way::ALL.len();
                turns[i].push(turn(&args, Way::ALL[i], depth)?);
            }
        }
        for (way, turns) in Way::ALL.into_iter().zip(&turns) {
            let of = |f: &dyn Fn(&Turn) -> f64| spread(turns.iter().map(f).collect());
            lines.push(Line {
                way,
                depth,
                values: [
                    of(&|t| at(&t.latency, 50.0) / 1e3),
                    of(&|t| at(&t.latency, 99.99) / 1e3),
                    of(&|t| t.cpu_per_request / 1e3),
                    of(&|t| t.per_second / 1e3),
                ],
            });
        }
    }
    if args.json {
        let all = lines.iter().map(|l| {
            let values = COLUMNS.iter().zip(&l.values).map(|((name, unit), s)| {
                (name.to_string(), json!({ "unit": unit, "median": s.median, "low": s.low, "high": s.high }))
            });
            let values: serde_json::Map<_, _> = values.collect();
            let requests = if l.depth == 1 { args.requests } else { args.requests * 4 };
            json!({ "way": l.way.name(), "depth": l.depth, "rounds": args.rounds, "requests": requests, "values": values })
        });
        println!("{}", serde_json::to_string_pretty(&all.collect::<Vec<_>>())?);
        return Ok(());
    }
    print!("{:<16} {:>5}", "median [low..high]", "depth");
    for (name, unit) in COLUMNS {
        print!(" {:>24}", format!("{name} {unit}"));
    }
    println!();
    for l in &lines {
        print!("{:<18} {:>5}", l.way.name(), l.depth);
        for s in l.values {
            print!(" {:>24}", format!("{:.2} [{:.2}..{:.2}]", s.median, s.low, s.high));
        }
        println!();
    }
    Ok(())
}
