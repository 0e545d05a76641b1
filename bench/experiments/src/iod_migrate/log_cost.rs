//! Requests per second of a disk with the log of written pages in use, and without it.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context as _, bail};
use rtvirtio_domain_client::load::{Plan, Stream, StreamResult, run as run_load};
use rtvirtio_domain_client::{Client, DirtyPages, Options};
use rtvirtio_testbed::RamDisk;
use rtvirtio_units::Bytes;
use rtvirtio_workflow::Progress;

use super::LogRound;
use crate::backend::Backend;
use crate::interleave::{Counter, interleaved};
use crate::iod::socket;

/// Size of the disk in memory.
const RAM: Bytes = Bytes(256 << 20);
/// Requests outstanding.
const DEPTH: usize = 32;
/// From the start of a load to its first counted request, and length of a run.
const WARM_UP: Duration = Duration::from_millis(500);
const LENGTH: Duration = Duration::from_secs(3);
/// Interval at which the log is taken out, as by QEMU in each pass over memory.
const SYNC: Duration = Duration::from_millis(100);

/// Use of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Log {
    /// Disk without `migrate`.
    Never,
    /// Disk with `migrate = true`.
    Ready,
    /// Disk with `migrate = true` and a log in use.
    InUse,
}

/// Runs of a round.
pub(super) const RUNS: [Log; 3] = [Log::Never, Log::Ready, Log::InUse];

/// Disk in memory that all runs have.
///
/// # Errors
/// No memory, or no loop device.
pub(super) fn ram_disk() -> anyhow::Result<RamDisk> {
    Ok(RamDisk::new(RAM)?)
}

/// Configuration of the I/O domain.
pub(super) fn config(log: Log, dir: &Path, device: &Path) -> String {
    format!(
        "control = {:?}\n[[device]]\nname = \"ram\"\nwindow = {{ start = 128, least = 128, most = 128 }}\n\
         [[device.disk]]\nname = \"vm0\"\nsocket = {:?}\npath = {:?}\nmigrate = {}\n",
        dir.join("control").display().to_string(),
        socket(dir, 0).display().to_string(),
        device.display().to_string(),
        log != Log::Never,
    )
}

/// Measures all [`RUNS`] once, in an order that the round decides.
///
/// # Errors
/// An I/O domain that does not start, requests that fail, and cancellation.
pub(super) fn round(
    ram: &RamDisk,
    dir: &Path,
    round: usize,
    counter: &mut Counter,
    progress: &dyn Progress,
) -> anyhow::Result<LogRound> {
    let rates = interleaved(&RUNS, round, counter, progress, |log| rate(*log, ram, dir, round as u64))?;
    let [fixed, ready, logging] = rates[..] else { bail!("{} runs of a round", rates.len()) };
    Ok(LogRound { fixed, ready, logging })
}

/// Requests per second of reads, whose data are written pages, by a client that polls. Each run has
/// an I/O domain of its own.
fn rate(log: Log, ram: &RamDisk, dir: &Path, seed: u64) -> anyhow::Result<f64> {
    let _domain = Backend::start_domain(dir, &config(log, dir, ram.device()))?;
    let mut clients = [Client::connect(&socket(dir, 0), Options::default())?];
    let plan = Plan { warm_up: WARM_UP, length: LENGTH, seed, spin: true };
    let results = match log {
        Log::Never | Log::Ready => run_load(&mut clients, &[stream()], &plan)?,
        Log::InUse => run_logged(&mut clients, &plan)?,
    };
    let result = results.first().context("a load without a result")?;
    if result.errors > 0 || result.rate <= 0.0 {
        bail!("{} requests failed, {:.0}/s: such a run is not counted", result.errors, result.rate);
    }
    Ok(result.rate)
}

fn stream() -> Stream {
    Stream::reads("log", DEPTH, RAM.0)
}

/// Runs the load while pages are logged, and taken out of the log.
fn run_logged(clients: &mut [Client; 1], plan: &Plan) -> anyhow::Result<Vec<StreamResult>> {
    let log = DirtyPages::covering(&clients[0].mem)?;
    clients[0].share_log(&log)?;
    clients[0].set_logging(true)?;
    let (stop, pages) = (AtomicBool::new(false), AtomicUsize::new(0));
    let results = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                std::thread::sleep(SYNC);
                pages.fetch_add(log.take().len(), Ordering::Relaxed);
            }
        });
        let results = run_load(clients, &[stream()], plan);
        stop.store(true, Ordering::Relaxed);
        results
    })?;
    if pages.into_inner() == 0 {
        bail!("the log stayed empty while the device wrote: it was not in use");
    }
    Ok(results)
}
