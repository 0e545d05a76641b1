//! Ports with random contracts on the scheduler itself, in virtual time: reservations are kept,
//! caps are exact, and the link is neither exceeded nor left idle.

use std::path::Path;

use anyhow::Context;
use rtvirtio_domain_config::{CATCH_UP, File, LINK_WINDOW, Network, PortId, SHORTEST_FRAME};
use rtvirtio_sched::{Next, Op, Priority, Request, Scheduler, VirtualLink, VmId};
use rtvirtio_stats::Random;
use rtvirtio_units::Nanos;
use serde::{Deserialize, Serialize};

/// Length of a case.
const LENGTH: Nanos = Nanos(2_000_000_000);

/// Counts over all cases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Simulated {
    pub cases: usize,
    /// Frames under a reservation.
    pub promised: u64,
    /// Frames that took longer than the computed bound, less the stall that it contains.
    pub over_bound: u64,
    /// Frames that took longer than their deadline.
    pub missed: u64,
    /// Frames of capped ports.
    pub capped: u64,
    /// Frames dispatched at another nanosecond than the first one at which rate and burst admit
    /// them, while the cap alone held them.
    pub inexact: u64,
    /// Largest deviation of the link's rate from the declared one while it was backlogged, as a
    /// share.
    pub rate_error: f64,
}

/// Three ports on a link of 10 to 1000 Mbit/s: one with a reservation, which sends within it, and
/// two that flood.
fn network(random: &mut Random) -> anyhow::Result<Network> {
    let link = [10.0, 100.0, 1_000.0][random.below(3)];
    let share = 0.05 + 0.4 * random.unit();
    let burst = 84 + random.below(3_000) as u64;
    let port = |i: usize, keys: &str| {
        format!(
            "[[network.port]]\nname = \"p{i}\"\nsocket = \"/s{i}\"\ntap = \"t{i}\"\nmac = \"52:54:00:00:00:0{i}\"\n{keys}\n"
        )
    };
    let text = |deadline: f64| {
        let reserve = format!(
            "reserve = {{ rate = \"{}Mbit/s\", burst = \"{burst}B\", deadline = \"{}us\" }}",
            link * share,
            deadline.ceil()
        );
        let head = format!("[[network]]\nname = \"n\"\nlink = \"{link}Mbit/s\"\nstall = \"0ns\"\n");
        head + &port(1, &reserve) + &port(2, "") + &port(3, "weight = 300")
    };
    // First the bound, then a deadline that admission accepts.
    let roomy = File::parse(Path::new("simulated"), &text(1e6))?;
    let bound = roomy.networks[0].bounds(PortId(0))[1].context("no bound")?;
    let file = File::parse(Path::new("simulated"), &text(bound.0 as f64 / 1e3 + 1.0))?;
    file.networks.into_iter().next().context("no network")
}

/// Simulates this many cases.
pub fn simulate(cases: usize) -> anyhow::Result<Simulated> {
    let mut all = Simulated { cases, ..Simulated::default() };
    for case in 0..cases {
        let mut random = Random::new(case as u64 + 1);
        play(&network(&mut random)?, &mut random, &mut all)?;
        caps(&mut random, &mut all)?;
    }
    Ok(all)
}

fn play(network: &Network, random: &mut Random, all: &mut Simulated) -> anyhow::Result<()> {
    let config = network.tx_sched();
    let mut scheduler = Scheduler::new(&config)?;
    let mut link = VirtualLink::new(LINK_WINDOW, CATCH_UP);
    let reservation = config.vms[0].normal.context("a reservation")?;
    let bound = network.bounds(PortId(0))[1].context("no bound")?;
    let largest = network.largest_frame();
    let (mut now, mut next_at, mut tag) = (Nanos(0), Nanos(0), 0u64);
    let mut sent = 0u64;
    while now < LENGTH {
        // Two ports are always backlogged.
        for vm in [VmId(1), VmId(2)] {
            while scheduler.outstanding(vm) < 8 {
                let len = SHORTEST_FRAME + random.below((largest - SHORTEST_FRAME + 1) as usize) as u64;
                tag += 1;
                scheduler.submit(
                    vm,
                    Request { tag, op: Op::Write, len, priority: Priority::NORMAL, arrival: now },
                )?;
            }
        }
        // The third port sends bursts within its contract: as large as the bucket, then a pause.
        if now >= next_at {
            let mut burst = reservation.burst;
            let mut used = 0;
            loop {
                let len = SHORTEST_FRAME + random.below(200) as u64;
                let cost = config.cost.time_of(Op::Write, len);
                if cost > burst {
                    break;
                }
                burst -= cost;
                used += cost;
                tag += 1;
                let request = Request { tag, op: Op::Write, len, priority: Priority::NORMAL, arrival: now };
                if scheduler.submit(VmId(0), request).is_err() {
                    break;
                }
            }
            let pause = used.max(1_000) as f64 * 1e9 / reservation.rate as f64;
            next_at = Nanos(now.0 + (pause * (1.0 + random.unit())) as u64 + 1);
        }
        while let Some((at, piece)) = link.pop_completed(now) {
            let _ = scheduler.complete(at, &piece);
        }
        let wake = match scheduler.next(now) {
            Next::Piece(piece) => {
                sent += piece.cost;
                let done = link.submit(now, piece);
                if piece.reserved {
                    let took = done.0 - piece.eligible_at.0;
                    all.promised += 1;
                    all.over_bound += u64::from(took > bound.0);
                    all.missed += u64::from(done > piece.due);
                }
                continue;
            }
            Next::Wait(at) => at,
            Next::Full | Next::Idle => Nanos(u64::MAX),
        };
        let completion = link.next_completion().unwrap_or(Nanos(u64::MAX));
        let at = wake.min(completion).min(next_at).max(Nanos(now.0 + 1));
        now = at;
    }
    // The first frames use the catch-up.
    let busy = (now.0 + CATCH_UP.0) as f64;
    all.rate_error = all.rate_error.max((sent as f64 / busy - 1.0).abs());
    Ok(())
}

/// A port with a cap and nothing else: each frame goes at the first nanosecond that admits it.
fn caps(random: &mut Random, all: &mut Simulated) -> anyhow::Result<()> {
    let (rate, burst) = (100 + random.below(100_000) as u64, 1 + random.below(50) as u64);
    let text = format!(
        "[[network]]\nname = \"n\"\n[[network.port]]\nname = \"p\"\nsocket = \"/s\"\ntap = \"t\"\nmac = \"52:54:00:00:00:01\"\n\
         tx_cap = {{ frames = \"{rate}/s\", frames_burst = {burst} }}\n"
    );
    let file = File::parse(Path::new("simulated"), &text)?;
    let mut scheduler = Scheduler::new(&file.networks[0].tx_sched())?;
    let mut now = Nanos(random.below(1_000_000) as u64);
    let (begin, mut last) = (now, now);
    for n in 0..300u64 {
        let request = Request { tag: n, op: Op::Write, len: 60, priority: Priority::NORMAL, arrival: now };
        scheduler.submit(VmId(0), request)?;
        loop {
            match scheduler.next(now) {
                Next::Piece(piece) => {
                    let _ = scheduler.complete(now, &piece);
                    break;
                }
                Next::Wait(at) => now = at,
                other => anyhow::bail!("a frame is neither sent nor held: {other:?}"),
            }
        }
        // The burst at once, then frame n at the first nanosecond with n - burst + 1 tokens more. A
        // burst of one keeps no part of a nanosecond that was waited too long.
        let tokens = (n + 1).saturating_sub(burst);
        let exact = match (burst, n) {
            (1, 1..) => last.0 + 1_000_000_000u64.div_ceil(rate),
            _ => begin.0 + (u128::from(tokens) * 1_000_000_000).div_ceil(u128::from(rate)) as u64,
        };
        last = now;
        all.capped += 1;
        all.inexact += u64::from(now.0 != exact);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_promised_is_kept_and_caps_are_exact() {
        let all = simulate(6).unwrap();
        assert!(all.promised > 500, "{all:?}");
        assert_eq!((all.over_bound, all.missed, all.inexact), (0, 0, 0), "{all:?}");
        assert!(all.rate_error < 0.001, "{all:?}");
    }
}
