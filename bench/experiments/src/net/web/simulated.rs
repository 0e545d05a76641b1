//! The I/O domain's scheduler in virtual time: the link alone, without threads and copies.

use std::collections::VecDeque;
use std::path::Path;

use anyhow::{Context, bail};
use rtvirtio_domain_config::{CATCH_UP, File, LINK_WINDOW, WIRE_OVERHEAD};
use rtvirtio_sched::{Idx, Next, Op, Priority, Request, Scheduler, VirtualLink, VmId};
use rtvirtio_units::Nanos;

use super::{Condition, DEADLINE, FRAME_BYTES, FRAMES, WebRun, config};
use crate::net::probe::RoundTrips;

/// Ports: the server, and its neighbour.
const SERVER: VmId = VmId(0);
const NEIGHBOUR: VmId = VmId(1);
const NEVER: Nanos = Nanos(u64::MAX);

/// Due time of a request: the first one comes a period after the neighbour's begin.
fn due(number: u32) -> Nanos {
    Nanos(DEADLINE.as_nanos() as u64 * (u64::from(number) + 1))
}

/// Simulates this many requests.
pub(super) fn simulate(condition: Condition, requests: u32) -> anyhow::Result<WebRun> {
    let (order, loaded) = condition;
    let file = File::parse(Path::new("simulated"), &config(order, Path::new("/")))?;
    let sched = file.networks.first().context("no network")?.tx_sched();
    let depth = |port: VmId| sched.vms[port.index()].depth as usize;
    let mut scheduler = Scheduler::new(&sched)?;
    let mut link = VirtualLink::new(LINK_WINDOW, CATCH_UP);
    // Frames of answers for which the port has no room yet, by the number of their request.
    let mut backlog: VecDeque<u32> = VecDeque::new();
    let mut missing = vec![FRAMES; requests as usize];
    let (mut answers, mut asked, mut sent) = (RoundTrips::default(), 0, 0u64);
    let mut now = Nanos(0);
    loop {
        while asked < requests && due(asked) <= now {
            backlog.extend(std::iter::repeat_n(asked, FRAMES.into()));
            asked += 1;
        }
        while let Some((at, piece)) = link.pop_completed(now) {
            let _ = scheduler.complete(at, &piece);
            if piece.vm == NEIGHBOUR {
                sent += 1;
                continue;
            }
            let number = piece.tag as u32;
            let left = missing.get_mut(number as usize).context("an unknown request")?;
            *left -= 1;
            if *left == 0 {
                answers.ns.push(at.0 - due(number).0);
            }
        }
        if answers.ns.len() == requests as usize {
            break;
        }
        let request = |tag: u64| Request {
            tag,
            op: Op::Write,
            len: FRAME_BYTES as u64,
            priority: Priority::NORMAL,
            arrival: now,
        };
        while scheduler.outstanding(SERVER) < depth(SERVER) {
            let Some(number) = backlog.pop_front() else { break };
            scheduler.submit(SERVER, request(number.into()))?;
        }
        while loaded && scheduler.outstanding(NEIGHBOUR) < depth(NEIGHBOUR) {
            scheduler.submit(NEIGHBOUR, request(0))?;
        }
        let wake = match scheduler.next(now) {
            Next::Piece(piece) => {
                link.submit(now, piece);
                continue;
            }
            Next::Wait(at) => at,
            Next::Full | Next::Idle => NEVER,
        };
        let completion = link.next_completion().unwrap_or(NEVER);
        let next_due = if asked < requests { due(asked) } else { NEVER };
        let next = wake.min(completion).min(next_due);
        if next == NEVER {
            bail!("{} of {requests} answers, and nothing goes on: a defect", answers.ns.len());
        }
        now = next.max(Nanos(now.0 + 1));
    }
    let bits = sent * (FRAME_BYTES as u64 + WIRE_OVERHEAD) * 8;
    Ok(WebRun::new(condition, &answers, bits as f64 * 1e9 / now.0 as f64, Nanos(0)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::web::Order;

    /// The reservation is admitted, and only with it the neighbour makes no difference.
    #[test]
    fn a_reservation_keeps_the_deadline_and_first_come_first_served_does_not() {
        let run = |order, loaded| simulate((order, loaded), 50).unwrap();
        let alone = run(Order::Fifo, false);
        let reserved = run(Order::Reservation, true);
        assert_eq!((alone.late, reserved.late, alone.neighbour), (0, 0, 0.0));
        // The reservation waits for the frames that the link has already, and a link that is never
        // idle has no time to catch up.
        let most = alone.tails.max + CATCH_UP.0 + 125_000 * u64::from(LINK_WINDOW + 1);
        assert!(reserved.tails.max < most, "{reserved:?} {alone:?}");
        let fifo = run(Order::Fifo, true);
        assert_eq!(fifo.late, 50, "{fifo:?}");
        // The neighbour gets the rest of the link.
        assert!(reserved.neighbour > 50e6 && reserved.neighbour < 60e6, "{reserved:?}");
    }
}
