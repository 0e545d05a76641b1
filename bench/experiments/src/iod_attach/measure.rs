//! The turns, and the verifying client.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use rtvirtio_domain_client::{BlkRequest, Client, ClientQueue, Options};
use rtvirtio_testbed::RamDisk;
use rtvirtio_units::Bytes;
use rtvirtio_workflow::domain::live;
use rtvirtio_workflow::{Progress, generated};

use super::{AttachData, DEPTH, Requests, Turn};
use crate::backend::Backend;
use crate::experiment::{from_one, host_facts};
use crate::iod::{FIFO, socket};
use crate::saved::Saved as _;

/// Size of the client's disk, and of each attached one.
const DISK: Bytes = Bytes(64 << 20);
/// Bytes of a request.
const BLOCK: u32 = 4_096;
/// Longest wait for a completion.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait until the I/O domain has noticed that a guest has left.
const LEAVE: Duration = Duration::from_secs(10);
/// From the start of the client to the first turn.
const WARM_UP: Duration = Duration::from_secs(1);

/// Options of the experiment.
#[derive(Args, Clone, Copy, Debug)]
pub struct AttachOptions {
    /// Number of disks added and removed in turn.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = from_one())]
    pub disks: usize,
}

/// A request of the client: begin and end.
type Span = (Instant, Instant);

/// Requests of the verifying client.
struct Verified {
    spans: Vec<Span>,
    lost: u64,
    wrong: u64,
}

/// Measures the turns and the client's requests.
///
/// # Errors
/// A device or an I/O domain that cannot be made, a refused disk, and cancellation.
pub fn measure(options: &AttachOptions, progress: &dyn Progress) -> anyhow::Result<AttachData> {
    let dir = tempfile::Builder::new().prefix("rtvirtio-iod-").tempdir()?;
    let ram = RamDisk::new(DISK)?;
    let domain = Backend::start_domain(dir.path(), &config(ram.device(), dir.path()))?;
    let stop = Arc::new(AtomicBool::new(false));
    let client = std::thread::spawn({
        let (stop, socket) = (Arc::clone(&stop), socket(dir.path(), 0));
        move || verify(&socket, &stop)
    });
    let turned = turns(options.disks, dir.path(), progress);
    stop.store(true, Ordering::Relaxed);
    let verified = client.join().map_err(|_| anyhow::anyhow!("the verifying client: a defect"))?;
    drop(domain);
    let (turns, times) = turned?;
    let Verified { spans, lost, wrong } = verified.context("the verifying client")?;
    // Requests before the first turn are warm-up.
    let begin = times.first().context("no disk came")?.0;
    let counted = spans.into_iter().filter(|span| span.0 >= begin);
    let (during, between): (Vec<Span>, Vec<Span>) =
        counted.partition(|(from, to)| times.iter().any(|(begin, end)| from <= end && begin <= to));
    let latencies = |spans: Vec<Span>| {
        Requests::from_latencies(
            spans.into_iter().map(|(from, to)| to.duration_since(from).as_nanos() as u64).collect(),
        )
    };
    Ok(AttachData {
        schema: AttachData::SCHEMA.to_owned(),
        host: host_facts(("none: a frontend without a VM", "none"), format!("RAM disk of {DISK}")),
        command: format!("rtvirtio-bench iod-attach --disks {}", options.disks),
        generated: generated(),
        turns,
        during: latencies(during),
        between: latencies(between),
        lost,
        wrong,
    })
}

fn config(device: &Path, dir: &Path) -> String {
    format!(
        "control = {:?}\n[[device]]\nname = \"bench\"\nwindow = 8\nfifo = {FIFO}\n\
         [[device.disk]]\nname = \"vm0\"\nsocket = {:?}\npath = {:?}\n",
        dir.join("control").display().to_string(),
        socket(dir, 0).display().to_string(),
        device.display().to_string(),
    )
}

/// Attaches and detaches `n` disks; returns their times, and the span of each turn.
fn turns(n: usize, dir: &Path, progress: &dyn Progress) -> anyhow::Result<(Vec<Turn>, Vec<Span>)> {
    let (mut turns, mut times) = (Vec::new(), Vec::new());
    let mut bar = progress.bar(&format!("{n} disks come and go"), n as u64);
    progress.pause(WARM_UP)?;
    for i in 0..n {
        bar.set(i as u64);
        let begin = Instant::now();
        turns.push(turn(i, dir)?);
        let end = Instant::now();
        times.push((begin, end));
        progress.pause(end.duration_since(begin))?;
    }
    Ok((turns, times))
}

/// Attaches, uses and detaches a disk.
fn turn(i: usize, dir: &Path) -> anyhow::Result<Turn> {
    let (name, control) = (format!("x{i}"), dir.join("control"));
    let (path, at): (PathBuf, PathBuf) = (dir.join("x.img"), dir.join("x.sock"));
    std::fs::File::create(&path)?.set_len(DISK.0)?;
    let table = format!(
        "[[device]]\nname = \"bench\"\n[[device.disk]]\nname = \"{name}\"\nsocket = {:?}\npath = {:?}\n",
        at.display().to_string(),
        path.display().to_string(),
    );
    let begin = Instant::now();
    live::attach(&control, &table).with_context(|| format!("disk {name}"))?;
    let attach_ms = begin.elapsed().as_secs_f64() * 1e3;
    let mut guest = Client::connect(&at, Options::default())?;
    let data = [i as u8; BLOCK as usize];
    let request = |kind: u32| BlkRequest { kind, priority: 0, sector: 0, len: BLOCK };
    for kind in [1, 0] {
        let queue = &mut guest.queues[0];
        let slot = queue.push_with(&request(kind), if kind == 1 { &data } else { &[] });
        let slot = slot.context("no room for a request")?;
        queue.notify()?;
        if next(queue)?.1 != 0 {
            bail!("disk {name}: a request failed");
        }
        if kind == 0 && guest.mem.read(guest.queues[0].data(slot), BLOCK as usize) != data {
            bail!("disk {name}: its guest reads other bytes than it has written");
        }
    }
    drop(guest);
    let mut begin = Instant::now();
    let left = begin;
    // A guest that has just left may still count as attached.
    while let Err(e) = live::detach(&control, std::slice::from_ref(&name), false) {
        if left.elapsed() > LEAVE {
            return Err(e).with_context(|| format!("disk {name}"));
        }
        std::thread::sleep(Duration::from_millis(1));
        begin = Instant::now();
    }
    Ok(Turn { attach_ms, detach_ms: begin.elapsed().as_secs_f64() * 1e3 })
}

/// Waits for the next completion: slot and status.
fn next(queue: &mut ClientQueue) -> anyhow::Result<(u16, u8)> {
    let begin = Instant::now();
    loop {
        if let Some(answer) = queue.pop_used() {
            return Ok((answer.slot, answer.status));
        }
        if begin.elapsed() > COMPLETION_TIMEOUT {
            bail!("no answer for {} s", COMPLETION_TIMEOUT.as_secs());
        }
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Writes blocks and reads them back until `stop` is set.
fn verify(socket: &Path, stop: &AtomicBool) -> anyhow::Result<Verified> {
    let mut client = Client::connect(socket, Options::default())?;
    let mut seen = Verified { spans: Vec::new(), lost: 0, wrong: 0 };
    let mut round = 0u64;
    while !stop.load(Ordering::Relaxed) {
        let bytes = |i: usize| -> Vec<u8> {
            (0..u64::from(BLOCK)).map(|at| (at ^ round ^ (i as u64) << 5) as u8).collect()
        };
        let first = round % 64 * DEPTH as u64;
        for kind in [1, 0] {
            let mut slots = Vec::with_capacity(DEPTH);
            for i in 0..DEPTH {
                let sector = (first + i as u64) * u64::from(BLOCK) / 512;
                let request = BlkRequest { kind, priority: 0, sector, len: BLOCK };
                let data = if kind == 1 { bytes(i) } else { Vec::new() };
                let begin = Instant::now();
                let slot = client.queues[0].push_with(&request, &data).context("no room for a request")?;
                slots.push(Some((slot, begin)));
            }
            client.queues[0].notify()?;
            for _ in 0..DEPTH {
                let (slot, status) = next(&mut client.queues[0])?;
                let end = Instant::now();
                let found = slots.iter().position(|s| s.is_some_and(|(of, _)| of == slot));
                let Some((i, (_, begin))) = found.and_then(|i| Some((i, slots[i].take()?))) else {
                    seen.lost += 1;
                    continue;
                };
                seen.lost += u64::from(status != 0);
                seen.spans.push((begin, end));
                let at = client.queues[0].data(slot);
                if kind == 0 && client.mem.read(at, BLOCK as usize) != bytes(i) {
                    seen.wrong += 1;
                }
            }
            seen.lost += slots.iter().flatten().count() as u64;
        }
        round += 1;
    }
    Ok(seen)
}
