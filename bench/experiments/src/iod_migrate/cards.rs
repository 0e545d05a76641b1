//! Moves of a guest with a network card of the I/O domain, and a flow of frames to it meanwhile.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rtvirtio_testbed::netns::{self, Namespace};
use rtvirtio_testbed::qemu::{GuestNic, NicBackend};
use rtvirtio_workflow::Progress;
use serde::{Deserialize, Serialize};

use super::measure::{MovingGuest, Place};
use super::{Evidence, MigrateData, Move};
use crate::net::probe::{PEER, RoundTrips, round_trips};
use crate::net::test_bed::{GUESTS, HOST, address_setup, command, mac};
use crate::report::write;

/// Number of echo requests in a flow, and the time between two.
const FRAMES: u32 = 2_400;
const PERIOD: Duration = Duration::from_millis(5);
/// Time from the first request to the move.
const LEAD: Duration = Duration::from_secs(1);
/// Taps of the ports, one on each side.
const TAPS: [&str; 2] = ["tap-0", "tap-1"];

/// A move with a flow to the guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CardMove {
    pub moved: Move,
    /// Whether the flow lasted until the guest had arrived.
    pub covered: bool,
    /// Echo requests that were sent, one each 5 ms.
    pub sent: u64,
    /// Requests without an answer.
    pub lost: u64,
    /// Longest time without an answer.
    pub gap_ns: u64,
}

impl CardMove {
    /// Whether the guest arrived within the flow.
    #[must_use]
    pub fn is_seen(&self) -> bool {
        self.covered && self.moved.failed.is_none()
    }
}

/// Moves a guest with a card until the data have `n` of such moves, or one fails; writes the data
/// after each. The calling thread moves into a network namespace.
///
/// # Errors
/// A namespace, an I/O domain or a guest that cannot be made, and cancellation.
pub(super) fn measure(
    n: usize,
    place: &Place,
    dir: &Path,
    (path, data): (&Path, &mut MigrateData),
    progress: &dyn Progress,
) -> anyhow::Result<()> {
    let numbers = data.cards.len()..n;
    if numbers.is_empty() {
        return Ok(());
    }
    progress.step("booting a guest with a disk and a network card on the I/O domain");
    let namespace = Namespace::new().context("a network namespace")?;
    namespace.enter()?;
    netns::bridge(&TAPS)?;
    netns::run("ip", &format!("link set {PEER} address {}", mac(HOST)))?;
    let dir = dir.join("card");
    std::fs::create_dir(&dir)?;
    // The guest is dropped before its I/O domains.
    let (_domains, mut guest) = place.boot(&dir, true)?;
    command(&mut guest.here, &address_setup(GUESTS[0]))?;
    for i in numbers {
        progress.check_cancelled()?;
        let (card, evidence) = move_in_flow(&mut guest, &namespace)?;
        progress.step(&match &card.moved.failed {
            Some(why) => format!("move {} of {n} with a network card failed: {why}", i + 1),
            None => format!(
                "move {} of {n} with a network card: {} of {} frames lost, longest gap {} ms",
                i + 1,
                card.lost,
                card.sent,
                card.gap_ns / 1_000_000
            ),
        });
        let has_failed = card.moved.failed.is_some();
        data.cards.push(card);
        data.keep(evidence, progress);
        write(path, data)?;
        if has_failed {
            progress.warn("a migration with a network card has failed: no more are made");
            break;
        }
    }
    Ok(())
}

fn move_in_flow(
    guest: &mut MovingGuest,
    namespace: &Namespace,
) -> anyhow::Result<(CardMove, Option<Evidence>)> {
    let length = PERIOD * FRAMES;
    let begin = Instant::now();
    let (moved, evidence, covered, flow) = thread::scope(|scope| {
        let flow = scope.spawn(|| round_trips(namespace, HOST, GUESTS[0], FRAMES, PERIOD));
        thread::sleep(LEAD);
        let (moved, evidence) = guest.move_on();
        let covered = begin.elapsed() < length;
        (moved, evidence, covered, flow.join())
    });
    let trips = flow.map_err(|_| anyhow::anyhow!("the flow: a defect"))??;
    let gap_ns = longest_gap(&trips, length.as_nanos() as u64);
    let (sent, lost) = (u64::from(FRAMES), trips.lost);
    Ok((CardMove { moved, covered, sent, lost, gap_ns }, evidence))
}

/// Longest time without an answer in a flow that ends at `end`, in ns.
pub(super) fn longest_gap(trips: &RoundTrips, end: u64) -> u64 {
    let mut answers: Vec<u64> = trips.sent.iter().zip(&trips.ns).map(|(sent, took)| sent + took).collect();
    answers.sort_unstable();
    answers.push(end);
    let begins = [0].into_iter().chain(answers.iter().copied());
    answers.iter().zip(begins).map(|(at, begin)| at.saturating_sub(begin)).max().unwrap_or(end)
}

/// Network of a side in its I/O domain's file.
pub(super) fn network(side: &Path, number: usize) -> String {
    format!(
        "[[network]]\nname = \"net\"\n[[network.port]]\nname = \"vm-net\"\nsocket = {:?}\ntap = {:?}\n\
         mac = \"{}\"\n",
        socket(side).display().to_string(),
        TAPS[number % TAPS.len()],
        mac(GUESTS[0]),
    )
}

pub(super) fn card(side: &Path) -> GuestNic {
    GuestNic { mac: mac(GUESTS[0]), backend: NicBackend::VhostUser(socket(side)) }
}

fn socket(side: &Path) -> PathBuf {
    side.join("net.sock")
}
