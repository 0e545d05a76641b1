//! Requests to a web server while its neighbour sends without end: the reservations paper's Fig. 4,
//! with requests and answers as frames through the I/O domain's network.
//!
//! The host's end sends a request each 20 ms, which is also the deadline, and counts from the
//! moment at which the request was due. Server and neighbour are vhost-user-net front ends without
//! a VM: where guests are emulated, making one answer takes most of the deadline. So only the I/O
//! domain and its link are judged. CPU contracts of whole VMs are judged by [`crate::reservation`].

mod run;
mod simulated;

use std::path::Path;
use std::time::Duration;

use rtvirtio_units::Nanos;
use rtvirtio_workflow::Progress;
use serde::{Deserialize, Serialize};

use super::measure::NetOptions;
use super::probe::RoundTrips;
use super::test_bed::{GUESTS, LINK, NAMES, mac};
use super::{Tails, claims::claim};
use crate::claims::Claim;
use crate::interleave::{Counter, interleaved};
use crate::page::Table;
use crate::reservation::FILE_BYTES;

/// Period and deadline of the requests (the paper's section 4).
const DEADLINE: Duration = Duration::from_millis(20);
/// Bytes of the file in a frame: the payload of TCP with timestamps in a frame of [`FRAME_BYTES`].
const SEGMENT: usize = 1_448;
/// Bytes of a frame without its FCS.
const FRAME_BYTES: usize = 1_514;
/// Frames of an answer.
const FRAMES: u16 = FILE_BYTES.div_ceil(SEGMENT) as u16;
/// The server's reservation: an answer, which takes 107 660 bytes of the link, each 20 ms.
const RESERVE: &str = "reserve = { rate = \"45Mbit/s\", burst = \"110kB\", deadline = \"12ms\" }\n";
/// Round trips of the fast probe for each request: 500 requests by default, as in the paper.
const ROUND_TRIPS_PER_REQUEST: u32 = 40;

/// Order of the frames on the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Order {
    /// The server has a reservation.
    Reservation,
    /// No port has one: both share the link by weight.
    Shared,
    /// First come, first served.
    Fifo,
}

impl Order {
    /// Name in tables.
    fn name(self) -> &'static str {
        match self {
            Self::Reservation => "reservation",
            Self::Shared => "shared by weight",
            Self::Fifo => "first come, first served",
        }
    }
}

/// Order, and whether the neighbour sends.
type Condition = (Order, bool);

/// The paper's four, and the I/O domain's own order without a reservation.
const CONDITIONS: [Condition; 5] = [
    (Order::Fifo, false),
    (Order::Reservation, false),
    (Order::Fifo, true),
    (Order::Shared, true),
    (Order::Reservation, true),
];

/// Latencies of one condition in one round.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WebRun {
    /// Order of the frames on the link.
    pub order: Order,
    /// Whether the neighbour sends without end.
    pub loaded: bool,
    /// Times from the moment at which a request was due until its answer is complete. A request
    /// without a complete answer is lost.
    pub tails: Tails,
    /// Answers after the deadline, lost ones included.
    pub late: u64,
    /// Rate of the neighbour on the wire, bit/s.
    pub neighbour: f64,
    /// Latest wake-up of a real-time probe meanwhile, as a measure of the host's own stalls; 0 in
    /// virtual time.
    pub stalled: Nanos,
}

impl WebRun {
    fn new((order, loaded): Condition, answers: &RoundTrips, neighbour: f64, stalled: Nanos) -> Self {
        let late = answers.ns.iter().filter(|ns| u128::from(**ns) > DEADLINE.as_nanos()).count() as u64;
        Self {
            order,
            loaded,
            tails: Tails::from_trips(answers),
            late: late + answers.lost,
            neighbour,
            stalled,
        }
    }
}

/// Runs of all rounds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct WebData {
    /// Runs on the I/O domain, round by round.
    pub runs: Vec<WebRun>,
    /// Runs on the I/O domain's scheduler in virtual time, once.
    pub simulated: Vec<WebRun>,
}

/// Configuration of the I/O domain with an order.
fn config(order: Order, dir: &Path) -> String {
    let (policy, reserve) = match order {
        Order::Reservation => ("edf", RESERVE),
        Order::Shared => ("edf", ""),
        Order::Fifo => ("fifo", ""),
    };
    let mut text = format!(
        "control = {:?}\n[[network]]\nname = \"web\"\nlink = \"{}Mbit/s\"\npolicy = \"{policy}\"\n",
        dir.join("control"),
        LINK / 1e6
    );
    for ((name, address), keys) in NAMES.iter().zip(GUESTS).zip([reserve, ""]) {
        text.push_str(&format!(
            "[[network.port]]\nname = {name:?}\nsocket = {:?}\ntap = {:?}\nmac = \"{}\"\n{keys}",
            dir.join(name),
            tap(name),
            mac(address)
        ));
    }
    text
}

fn tap(name: &str) -> String {
    format!("tap-{name}")
}

/// Measures all conditions, and simulates them in virtual time.
pub fn measure_web(options: &NetOptions, progress: &dyn Progress) -> anyhow::Result<WebData> {
    let requests = (options.requests / ROUND_TRIPS_PER_REQUEST).max(1);
    let mut counter = Counter::new(progress, "rounds of web requests", options.rounds * CONDITIONS.len());
    let mut data = WebData::default();
    for condition in CONDITIONS {
        data.simulated.push(simulated::simulate(condition, requests)?);
    }
    for round in 0..options.rounds {
        let measured = interleaved(&CONDITIONS, round, &mut counter, progress, |condition| {
            run::run(*condition, requests, progress)
        })?;
        data.runs.extend(measured);
    }
    Ok(data)
}

impl WebData {
    /// Claims; those of the loaded conditions correspond to the paper's.
    pub(super) fn claims(&self) -> Vec<Claim> {
        let of = |runs: &[WebRun], order: Order| -> (f64, f64, usize) {
            let runs = || runs.iter().filter(move |run| run.order == order && run.loaded);
            let late: u64 = runs().map(|run| run.late).sum();
            let n: u64 = runs().map(|run| run.tails.n).sum();
            // A request without an answer counts as the latest.
            let longest = runs().map(|run| if run.tails.lost > 0 { u64::MAX } else { run.tails.max }).max();
            (late as f64, longest.unwrap_or(0) as f64 / DEADLINE.as_nanos() as f64, n as usize)
        };
        let (late, longest, n) = of(&self.runs, Order::Reservation);
        let (shared, _, n_shared) = of(&self.runs, Order::Shared);
        let (fifo, longest_fifo, n_fifo) = of(&self.runs, Order::Fifo);
        let (simulated, _, n_simulated) = of(&self.simulated, Order::Reservation);
        let (simulated_fifo, _, n_simulated_fifo) = of(&self.simulated, Order::Fifo);
        vec![
            claim(
                "web.late",
                "answers of a web server after 20 ms while its neighbour sends without end, with a reservation",
                late,
                "requests",
                n,
            )
            .at_most(0.0),
            claim(
                "web.late_shared",
                "the same without a reservation, both sharing the link by weight",
                shared,
                "requests",
                n_shared,
            ),
            claim("web.late_fifo", "the same, first come, first served", fifo, "requests", n_fifo),
            claim(
                "web.longest_over_deadline",
                "the longest answer with a reservation, over the deadline",
                longest,
                "ratio",
                n,
            )
            .at_most(1.0),
            claim(
                "web.longest_over_deadline_fifo",
                "the same, first come, first served",
                longest_fifo,
                "ratio",
                n_fifo,
            ),
            claim(
                "web.simulated.late",
                "the same answers after 20 ms in virtual time, with a reservation",
                simulated,
                "requests",
                n_simulated,
            )
            .at_most(0.0),
            claim(
                "web.simulated.late_fifo",
                "the same, first come, first served",
                simulated_fifo,
                "requests",
                n_simulated_fifo,
            ),
        ]
    }

    /// Table of the rounds.
    pub(super) fn table(&self) -> Table {
        let ms = |ns: u64| format!("{:.1}", ns as f64 / 1e6);
        let row = |(run, how): (&WebRun, &str)| {
            let neighbour = if run.loaded { "neighbour sends" } else { "neighbour idle" };
            let name = format!("{}, {neighbour}{how}", run.order.name());
            let counts = [run.tails.n, run.late, run.tails.lost].map(|n| n.to_string());
            let times = [run.tails.p50, run.tails.p99, run.tails.max, run.stalled.0].map(ms);
            let rate = format!("{:.1}", run.neighbour / 1e6);
            [name].into_iter().chain(counts).chain(times).chain([rate]).collect()
        };
        let runs = self.runs.iter().map(|run| (run, ""));
        let simulated = self.simulated.iter().map(|run| (run, ", in virtual time"));
        let head = [
            "",
            "n",
            "late",
            "unanswered",
            "p50 ms",
            "p99 ms",
            "longest ms",
            "host stood still ms",
            "neighbour Mbit/s",
        ];
        Table {
            label: format!(
                "a file of {FILE_BYTES} bytes each {0} ms through 100 Mbit/s, deadline {0} ms, each round",
                DEADLINE.as_millis()
            ),
            head: head.map(str::to_owned).to_vec(),
            rows: runs.chain(simulated).map(row).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(condition: Condition, ns: &[u64], lost: u64) -> WebRun {
        let answers = RoundTrips { ns: ns.to_vec(), sent: Vec::new(), lost };
        WebRun::new(condition, &answers, 0.0, Nanos(0))
    }

    #[test]
    fn late_and_unanswered_requests_are_claimed() {
        let mut data = WebData::default();
        let value = |data: &WebData, id: &str| {
            let claim = data.claims().into_iter().find(|claim| claim.id == id);
            claim.map(|claim| (claim.value, claim.n, claim.met)).unwrap()
        };
        assert!(!value(&data, "net.web.late").2, "nothing measured meets nothing");
        data.runs.push(run((Order::Reservation, true), &[9_000_000, 20_000_000], 0));
        // Without load it is another claim.
        data.runs.push(run((Order::Reservation, false), &[30_000_000], 0));
        data.runs.push(run((Order::Fifo, true), &[20_000_001, 24_000_000, 1], 0));
        assert_eq!(value(&data, "net.web.late"), (0.0, 2, true));
        assert_eq!(value(&data, "net.web.longest_over_deadline"), (1.0, 2, true));
        assert_eq!(value(&data, "net.web.late_fifo"), (2.0, 3, true));
        data.runs.push(run((Order::Reservation, true), &[1], 1));
        assert_eq!(value(&data, "net.web.late"), (1.0, 4, false));
        assert!(!value(&data, "net.web.longest_over_deadline").2, "one was never answered");
    }
}
