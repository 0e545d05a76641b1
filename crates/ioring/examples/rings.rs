//! Measures this ring beside `rtrb`'s, in turn, in one run.
//!
//! ```text
//! cargo run --release -p rtvirtio-ioring --example rings
//! cargo run --release -p rtvirtio-ioring --example rings -- --rounds 21 --json
//! ```
//!
//! *Throughput*: `one core` is one thread that puts a batch in and takes it out again, the bare cost of the instructions; `two cores` are two threads, each on a CPU of its own, that look again at once
//! when the ring is full or empty. *Latency*: an item goes there through one ring and back through another, and the way is half of that. In each round both rings have their turn, and who begins changes;
//! the ratio is the median of the rounds' ratios, so that what disturbs a round disturbs both.

mod common;

use std::hint::{black_box, spin_loop};
use std::sync::Barrier;

use clap::Parser;
use common::{Spread, at, now, pin, spread};
use serde_json::json;

/// Compares the ring with rtrb.
#[derive(Parser)]
struct Args {
    /// Rounds, in each of which both rings have their turn
    #[arg(long, default_value_t = 11)]
    rounds: usize,
    /// Items of one turn of throughput
    #[arg(long, default_value_t = 2_000_000)]
    items: u64,
    /// Exchanges of one turn of latency
    #[arg(long, default_value_t = 100_000)]
    exchanges: usize,
    /// Slots of a ring
    #[arg(long, default_value_t = 256)]
    capacity: usize,
    /// The two CPUs
    #[arg(long, num_args = 2, default_values_t = [0, 1])]
    cpus: Vec<usize>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

const BATCH: usize = 32;

#[derive(Clone, Copy)]
struct Item<const WORDS: usize>([u64; WORDS]);

impl<const WORDS: usize> Item<WORDS> {
    fn new(id: u64) -> Self {
        Self([id; WORDS])
    }

    fn check(&self, id: u64) {
        assert!(
            self.0[0] == id && self.0[WORDS - 1] == id,
            "{} and {} for {id}",
            self.0[0],
            self.0[WORDS - 1]
        );
    }
}

/// One ring or the other.
trait Kind: 'static {
    const NAME: &'static str;
    type Tx<const W: usize>: Send;
    type Rx<const W: usize>: Send;
    fn ring<const W: usize>(capacity: usize) -> (Self::Tx<W>, Self::Rx<W>);
    fn put<const W: usize>(tx: &mut Self::Tx<W>, id: u64) -> bool;
    fn take<const W: usize>(rx: &mut Self::Rx<W>) -> Option<Item<W>>;
    /// Puts in items from `id` on, `most` of them if there is room; how many it was.
    fn put_many<const W: usize>(tx: &mut Self::Tx<W>, id: u64, most: usize) -> usize;
    fn take_many<const W: usize>(rx: &mut Self::Rx<W>, most: usize, each: impl FnMut(Item<W>)) -> usize;
}

/// This crate's.
struct Ours;

impl Kind for Ours {
    const NAME: &'static str = "ioring";
    type Tx<const W: usize> = rtvirtio_ioring::Producer<Item<W>>;
    type Rx<const W: usize> = rtvirtio_ioring::Consumer<Item<W>>;

    fn ring<const W: usize>(capacity: usize) -> (Self::Tx<W>, Self::Rx<W>) {
        rtvirtio_ioring::ring(capacity)
    }

    #[inline]
    fn put<const W: usize>(tx: &mut Self::Tx<W>, id: u64) -> bool {
        tx.push(Item::new(id)).is_ok()
    }

    #[inline]
    fn take<const W: usize>(rx: &mut Self::Rx<W>) -> Option<Item<W>> {
        rx.pop()
    }

    #[inline]
    fn put_many<const W: usize>(tx: &mut Self::Tx<W>, id: u64, most: usize) -> usize {
        tx.push_from(&mut (id..id + most as u64).map(Item::new))
    }

    #[inline]
    fn take_many<const W: usize>(rx: &mut Self::Rx<W>, most: usize, each: impl FnMut(Item<W>)) -> usize {
        rx.pop_into(most, each)
    }
}

/// The one that many use: two shared indices, each side remembering what it last saw of the other's.
struct Rtrb;

impl Kind for Rtrb {
    const NAME: &'static str = "rtrb";
    type Tx<const W: usize> = rtrb::Producer<Item<W>>;
    type Rx<const W: usize> = rtrb::Consumer<Item<W>>;

    fn ring<const W: usize>(capacity: usize) -> (Self::Tx<W>, Self::Rx<W>) {
        rtrb::RingBuffer::new(capacity)
    }

    #[inline]
    fn put<const W: usize>(tx: &mut Self::Tx<W>, id: u64) -> bool {
        tx.push(Item::new(id)).is_ok()
    }

    #[inline]
    fn take<const W: usize>(rx: &mut Self::Rx<W>) -> Option<Item<W>> {
        rx.pop().ok()
    }

    #[inline]
    fn put_many<const W: usize>(tx: &mut Self::Tx<W>, id: u64, most: usize) -> usize {
        // The whole batch when there is room for it, without a look at the other side's index when that is known; else what fits.
        let n = if tx.cached_slots() >= most { most } else { tx.slots().min(most) };
        tx.write_chunk_uninit(n).map_or(0, |chunk| chunk.fill_from_iter((id..).map(Item::new)))
    }

    #[inline]
    fn take_many<const W: usize>(rx: &mut Self::Rx<W>, most: usize, each: impl FnMut(Item<W>)) -> usize {
        let n = if rx.cached_slots() >= most { most } else { rx.slots().min(most) };
        rx.read_chunk(n).map_or(0, |chunk| {
            chunk.into_iter().for_each(each);
            n
        })
    }
}

/// Items per second in one thread: puts a batch in and takes it out.
fn one_core<K: Kind, const W: usize>(args: &Args, batch: usize) -> anyhow::Result<f64> {
    pin(args.cpus[0])?;
    let (mut tx, mut rx) = K::ring::<W>(args.capacity);
    let begin = now();
    let mut id = 0;
    while id < args.items {
        if batch == 1 {
            K::put(&mut tx, black_box(id));
            if let Some(item) = K::take(&mut rx) {
                black_box(&item).check(id);
                id += 1;
            }
        } else {
            K::put_many(&mut tx, black_box(id), batch);
            K::take_many(&mut rx, batch, |item| {
                black_box(&item).check(id);
                id += 1;
            });
        }
    }
    Ok(id as f64 * 1e9 / (now() - begin) as f64)
}

/// Items per second from one CPU to the other.
fn two_cores<K: Kind, const W: usize>(args: &Args, batch: usize) -> anyhow::Result<f64> {
    let (mut tx, mut rx) = K::ring::<W>(args.capacity);
    let (start, n) = (Barrier::new(2), args.items);
    std::thread::scope(|scope| {
        let producer = scope.spawn(|| {
            let pinned = pin(args.cpus[1]);
            start.wait();
            let mut id = 0;
            while id < n {
                let put = if batch == 1 {
                    usize::from(K::put(&mut tx, id))
                } else {
                    K::put_many(&mut tx, id, batch.min((n - id) as usize))
                };
                if put == 0 {
                    spin_loop();
                }
                id += put as u64;
            }
            pinned
        });
        let pinned = pin(args.cpus[0]);
        start.wait();
        let begin = now();
        let mut id = 0;
        let mut check = |item: Item<W>| {
            item.check(id);
            id += 1;
            id
        };
        let mut seen = 0;
        while seen < n {
            let before = seen;
            if batch == 1 {
                seen = K::take(&mut rx).map_or(seen, &mut check);
            } else {
                K::take_many(&mut rx, batch, |item| seen = check(item));
            }
            if seen == before {
                spin_loop();
            }
        }
        let rate = n as f64 * 1e9 / (now() - begin) as f64;
        match producer.join() {
            Ok(theirs) => theirs.and(pinned).map(|()| rate),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Half of each exchange, in ns, sorted.
fn latency<K: Kind, const W: usize>(args: &Args) -> anyhow::Result<Vec<u32>> {
    let (mut there, mut there_rx) = K::ring::<W>(args.capacity);
    let (mut back, mut back_rx) = K::ring::<W>(args.capacity);
    let n = args.exchanges;
    std::thread::scope(|scope| {
        let other = scope.spawn(move || {
            let pinned = pin(args.cpus[1]);
            for id in 0..n as u64 {
                loop {
                    if let Some(item) = K::take(&mut there_rx) {
                        item.check(id);
                        break;
                    }
                    spin_loop();
                }
                K::put(&mut back, id);
            }
            pinned
        });
        let pinned = pin(args.cpus[0]);
        let mut ways = Vec::with_capacity(n);
        let mut begin = now();
        for id in 0..n as u64 {
            K::put(&mut there, id);
            loop {
                if let Some(item) = K::take(&mut back_rx) {
                    item.check(id);
                    break;
                }
                spin_loop();
            }
            let end = now();
            ways.push(u32::try_from((end - begin) / 2).unwrap_or(u32::MAX));
            begin = end;
        }
        match other.join() {
            Ok(theirs) => theirs.and(pinned)?,
            Err(panic) => std::panic::resume_unwind(panic),
        }
        ways.sort_unstable();
        Ok(ways)
    })
}

/// Both rings in turn; ours first.
fn both<T>(
    rounds: usize,
    mut ours: impl FnMut() -> anyhow::Result<T>,
    mut rtrb: impl FnMut() -> anyhow::Result<T>,
) -> anyhow::Result<[Vec<T>; 2]> {
    let mut all = [Vec::new(), Vec::new()];
    for round in 0..rounds {
        for turn in 0..2 {
            let which = (round + turn) % 2;
            all[which].push(if which == 0 { ours()? } else { rtrb()? });
        }
    }
    Ok(all)
}

/// What one line of the table says.
struct Line {
    what: String,
    bytes: usize,
    unit: &'static str,
    n: String,
    rings: [Spread; 2],
    /// Ours over rtrb's.
    ratio: Spread,
}

fn line(what: String, bytes: usize, unit: &'static str, n: String, values: [Vec<f64>; 2]) -> Line {
    let ratio = spread(values[0].iter().zip(&values[1]).map(|(a, b)| a / b).collect());
    Line { what, bytes, unit, n, rings: values.map(spread), ratio }
}

fn measure<const W: usize>(args: &Args, lines: &mut Vec<Line>) -> anyhow::Result<()> {
    for (cores, run) in [("one core", 0), ("two cores", 1)] {
        for batch in [1, BATCH] {
            let values = if run == 0 {
                both(args.rounds, || one_core::<Ours, W>(args, batch), || one_core::<Rtrb, W>(args, batch))?
            } else {
                both(args.rounds, || two_cores::<Ours, W>(args, batch), || two_cores::<Rtrb, W>(args, batch))?
            };
            let n = format!("{} x {}", args.rounds, args.items);
            let values = values.map(|v| v.into_iter().map(|x| x / 1e6).collect());
            lines.push(line(format!("{cores}, batch {batch}"), W * 8, "M/s", n, values));
        }
    }
    let ways = both(args.rounds, || latency::<Ours, W>(args), || latency::<Rtrb, W>(args))?;
    for percent in [50.0, 99.0, 99.99] {
        let values = [0, 1].map(|i| ways[i].iter().map(|way| at(way, percent)).collect());
        let n = format!("{} x {}", args.rounds, args.exchanges);
        lines.push(line(format!("one way, p{percent}"), W * 8, "ns", n, values));
    }
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    anyhow::ensure!(
        args.rounds > 0 && args.items > 0 && args.exchanges > 0,
        "nothing to measure: give at least 1 of each"
    );
    anyhow::ensure!(args.capacity >= BATCH, "--capacity {}: a batch has {BATCH} items", args.capacity);
    let mut lines = Vec::new();
    measure::<1>(&args, &mut lines)?;
    // With its flag exactly a cache line.
    measure::<7>(&args, &mut lines)?;
    measure::<8>(&args, &mut lines)?;
    measure::<16>(&args, &mut lines)?;
    if args.json {
        let spread = |s: Spread| json!({ "median": s.median, "low": s.low, "high": s.high });
        let all = lines.iter().map(|l| {
            json!({
                "what": l.what, "item_bytes": l.bytes, "unit": l.unit, "n": l.n,
                Ours::NAME: spread(l.rings[0]), Rtrb::NAME: spread(l.rings[1]), "ratio": spread(l.ratio),
            })
        });
        println!("{}", serde_json::to_string_pretty(&all.collect::<Vec<_>>())?);
        return Ok(());
    }
    println!(
        "{:<20} {:>5} {:>4} {:>26} {:>26} {:>22}  n\n",
        "median [low..high]",
        "bytes",
        "",
        Ours::NAME,
        Rtrb::NAME,
        "ratio"
    );
    for l in &lines {
        let text = |s: Spread, digits: usize| {
            format!("{:.digits$} [{:.digits$}..{:.digits$}]", s.median, s.low, s.high)
        };
        println!(
            "{:<20} {:>5} {:>4} {:>26} {:>26} {:>22}  {}",
            l.what,
            l.bytes,
            l.unit,
            text(l.rings[0], 1),
            text(l.rings[1], 1),
            text(l.ratio, 2),
            l.n
        );
    }
    Ok(())
}
