//! A victim and a regulated neighbour on one disk, first come first served.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rtvirtio_domain_client::load::{Plan, Stream, run as run_load};
use rtvirtio_domain_client::{Client, Options};
use rtvirtio_measure::noise::NoiseProbe;
use rtvirtio_traffic::Direction;

use super::disk::{config, socket};
use super::measure::{DISK, ENGINE, WARM_UP, cap, raise};
use super::{Beside, OUTSTANDING, VictimPoint, point};
use crate::backend::Backend;

/// Completions of the victim next to a neighbour of `rate` requests per second. Neither queue is
/// ever empty. Where the host stalls for most of its time it is measured anew, for longer.
pub(super) fn run(
    rate: Option<u64>,
    time: Duration,
    dir: &Path,
    device: &Path,
) -> anyhow::Result<VictimPoint> {
    for times in [1, 2, 4, 8] {
        if let Some(point) = once(rate, time * times, dir, device)? {
            return Ok(point);
        }
    }
    bail!("the victim got fewer than two requests in {:?}: is the host overloaded?", time * 8)
}

/// Measures once; `None` where the victim completed fewer than two requests.
fn once(rate: Option<u64>, time: Duration, dir: &Path, device: &Path) -> anyhow::Result<Option<VictimPoint>> {
    let caps = [String::new(), cap(Direction::Read, rate)?];
    // One at a time, in order: a device that does not schedule.
    let _domain = Backend::start_domain(dir, &config(dir, device, "fifo", 1, &caps))?;
    let connect = |i| Client::connect(&socket(dir, i), Options::default());
    let mut clients = vec![connect(0)?, connect(1)?];
    let mut streams = vec![Stream::reads("victim", OUTSTANDING, DISK.0)];
    if rate.is_some() {
        streams.push(Stream { client: 1, ..Stream::reads("neighbour", OUTSTANDING, DISK.0) });
    }
    let probe = NoiseProbe::start_above(ENGINE);
    raise()?;
    let results =
        run_load(&mut clients, &streams, &Plan { warm_up: WARM_UP, length: time, seed: 1, spin: false });
    let (_, stalls) = probe.finish();
    let mut results = results?.into_iter();
    let victim = results.next().context("no victim")?;
    let neighbour = results.next();
    let errors = victim.errors + neighbour.as_ref().map_or(0, |n| n.errors);
    ensure!(errors == 0, "{errors} requests failed: a point with errors is not counted");
    let at = victim.spans.into_iter().map(|(_, end)| end).collect();
    let victim = point(at, stalls.as_ref(), (Direction::Read, Beside::Nothing, rate));
    let neighbour = neighbour.map_or(0.0, |n| n.rate);
    Ok(victim.map(|victim| VictimPoint { rate, victim, neighbour, round: 0 }))
}
