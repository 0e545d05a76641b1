//! Requests of a disk under a cap.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::ensure;
use rtvirtio_domain_client::load::{Plan, Stream, run as run_load};
use rtvirtio_domain_client::{Client, Options};
use rtvirtio_traffic::Direction;

use super::measure::{DISK, ENGINE, WARM_UP, cap, raise};
use crate::backend::Backend;

/// Requests outstanding: the queue is never empty.
const DEPTH: usize = 32;

pub(super) fn socket(dir: &Path, disk: usize) -> PathBuf {
    dir.join(format!("disk{disk}.sock"))
}

/// Configuration of the I/O domain: disks on one device, each with its cap.
pub(super) fn config(dir: &Path, device: &Path, policy: &str, window: u32, caps: &[String]) -> String {
    let mut s = format!(
        "control = {:?}\n[[device]]\nname = \"ram\"\npolicy = \"{policy}\"\nwindow = {window}\nfifo = {ENGINE}\n",
        dir.join("control").display().to_string()
    );
    for (i, cap) in caps.iter().enumerate() {
        let _ = write!(
            s,
            "[[device.disk]]\nname = \"vm{i}\"\nsocket = {:?}\npath = {:?}\nshared = true\nformat = \"raw\"\n{cap}",
            socket(dir, i).display().to_string(),
            device.display().to_string()
        );
    }
    s
}

/// Times of completions, ns of CLOCK_MONOTONIC.
pub(super) fn run(
    flow: Direction,
    rate: Option<u64>,
    time: Duration,
    dir: &Path,
    device: &Path,
) -> anyhow::Result<Vec<u64>> {
    let _domain = Backend::start_domain(dir, &config(dir, device, "edf", 8, &[cap(flow, rate)?]))?;
    let mut clients = [Client::connect(&socket(dir, 0), Options::default())?];
    let writes = if flow == Direction::Write { 1.0 } else { 0.0 };
    let stream = Stream { writes, ..Stream::reads(flow.name(), DEPTH, DISK.0) };
    raise()?;
    let results =
        run_load(&mut clients, &[stream], &Plan { warm_up: WARM_UP, length: time, seed: 1, spin: false })?;
    let errors: u64 = results.iter().map(|r| r.errors).sum();
    ensure!(errors == 0, "{errors} requests failed: a point with errors is not counted");
    Ok(results.into_iter().flat_map(|r| r.spans).map(|(_, end)| end).collect())
}
