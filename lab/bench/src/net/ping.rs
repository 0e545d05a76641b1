//! The paper's table of pings: the round trip to a VM, idle and while its neighbour is flooded, on
//! QEMU's taps and on the I/O domain.

use std::path::Path;
use std::time::Duration;

use rtvirtio_learn::statistic::median;
use rtvirtio_measure::HostFacts;
use rtvirtio_spec::Kernel;
use rtvirtio_testbed::{AccelChoice, LabHost, choose_accel};
use rtvirtio_workflow::{Progress, generated};
use serde::{Deserialize, Serialize};

use super::bed::{GUESTS, HOST, NetBed, NetThread, System};
use super::probe::{Flood, round_trips};
use super::{PathData, Situation, Tails};
use crate::claims::Claim;
use crate::guest::facts;
use crate::interleave::{Counter, interleaved};
use crate::page::{Section, Table};
use crate::report::{ExperimentReport, read};
use crate::saved::Saved;

/// File name of the result.
pub const FILE: &str = "net-ping.json";
/// From one request to the next.
const PERIOD: Duration = Duration::from_millis(2);
/// From the start of a load to the first request.
const SETTLE: Duration = Duration::from_millis(500);

/// Options of the table.
#[derive(Clone, Copy, Debug)]
pub struct PingOptions {
    /// Rounds; each measures every cell once, in random order.
    pub rounds: usize,
    /// Requests of a cell.
    pub requests: u32,
    /// Frames per second that the flooded neighbour gets at most, on the domain.
    pub cap: u32,
}

/// All that was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PingData {
    /// [`PingData::SCHEMA`].
    pub schema: String,
    /// Where.
    pub host: HostFacts,
    /// How.
    pub command: String,
    /// When.
    pub generated: String,
    /// The cells, round by round.
    pub cells: Vec<PathData>,
}

impl Saved for PingData {
    const SCHEMA: &str = "rtvirtio-net-ping/1";
}

impl PingData {
    fn of(&self, domain: bool, situation: Situation) -> impl Iterator<Item = &PathData> {
        self.cells.iter().filter(move |c| c.domain == domain && c.situation == situation)
    }

    fn mean(&self, domain: bool, situation: Situation) -> f64 {
        median(self.of(domain, situation).map(|cell| cell.tails.mean).collect())
    }
}

/// Measures the table.
///
/// # Errors
/// A namespace, a guest or a domain that cannot be made, and cancellation.
pub fn measure_ping(
    options: &PingOptions,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<PingData> {
    let image = labs.guest_image(Kernel::Standard, progress)?;
    let accel = choose_accel(AccelChoice::Auto, &image, progress)?;
    progress.step("booting two guests on taps and two on the I/O domain");
    let mut tap = NetBed::new(System::Tap, &image, accel, options.cap, NetThread::default(), None)?;
    let domain = NetBed::new(System::Domain, &image, accel, options.cap, NetThread::default(), None)?;
    let mut data = PingData {
        schema: PingData::SCHEMA.to_owned(),
        host: facts(&mut tap.guests[0], accel, "veth".to_owned())?,
        command: format!(
            "rtvirtio-lab bench net --only ping --rounds {} --requests {} --cap {}",
            options.rounds, options.requests, options.cap
        ),
        generated: generated(),
        cells: Vec::new(),
    };
    let cells = [(System::Tap, Situation::Idle), (System::Tap, Situation::Flood)];
    let cells: Vec<(System, Situation)> =
        cells.into_iter().chain(cells.map(|(_, situation)| (System::Domain, situation))).collect();
    let mut counter = Counter::new(progress, "rounds", options.rounds * cells.len());
    for round in 0..options.rounds {
        let measured = interleaved(&cells, round, &mut counter, progress, |(system, situation)| {
            let bed = if *system == System::Tap { &tap } else { &domain };
            cell(bed, *situation, options.requests)
        })?;
        data.cells.extend(measured);
    }
    Ok(data)
}

fn cell(bed: &NetBed, situation: Situation, requests: u32) -> anyhow::Result<PathData> {
    let flood = match situation {
        Situation::Flood => Some(Flood::start(&bed.namespace, HOST, GUESTS[1])?),
        Situation::Idle | Situation::Attack => None,
    };
    std::thread::sleep(SETTLE);
    let trips = round_trips(&bed.namespace, HOST, GUESTS[0], requests, PERIOD);
    let frames_per_second = flood.map(Flood::end);
    Ok(PathData::new(bed.system, situation, &trips?, frames_per_second, None, 0.0))
}

/// The claims of a result: medians of the rounds.
#[must_use]
pub fn claims(data: &PingData) -> Vec<Claim> {
    use Situation::{Flood, Idle};
    let n = data.of(true, Idle).map(|cell| cell.tails.n as usize).sum();
    let ratio = |domain| data.mean(domain, Flood) / data.mean(domain, Idle);
    let lost: u64 = data.of(true, Flood).map(|cell| cell.tails.lost).sum();
    vec![
        Claim::new(
            "net.ping.mean_over_idle",
            "mean of pings to a VM while its neighbour is flooded, to the idle mean",
            ratio(true),
            "ratio",
            n,
        )
        .at_most(1.1),
        Claim::new("net.ping.mean_over_idle_tap", "the same on tap and bridge", ratio(false), "ratio", n),
        Claim::new("net.ping.lost", "pings lost under the flood", lost as f64, "requests", n).at_most(0.0),
    ]
}

/// The report of a saved result.
///
/// # Errors
/// When the file cannot be read.
pub fn report(path: &Path) -> anyhow::Result<ExperimentReport> {
    let data: PingData = read(path)?;
    let us = |ns: f64| format!("{:.0}", ns / 1e3);
    let row = |cell: &PathData| {
        let t: &Tails = &cell.tails;
        let system = if cell.domain { "I/O domain" } else { "taps" };
        let flood = cell.flood.map_or_else(|| "-".to_owned(), |f| format!("{:.0}", f / 1e3));
        let name = format!("{system}, {:?}", cell.situation).to_lowercase();
        vec![name, t.n.to_string(), t.lost.to_string(), us(t.mean), us(t.p50 as f64), us(t.max as f64), flood]
    };
    let head = ["", "n", "lost", "mean us", "p50 us", "max us", "flood kpps"];
    let table = Table {
        label: "pings, each round".to_owned(),
        head: head.map(str::to_owned).to_vec(),
        rows: data.cells.iter().map(row).collect(),
    };
    let section =
        Section { title: "Pings beside a flood".to_owned(), tables: vec![table], ..Section::default() };
    let lead = format!("{}; {}.", data.host.device, data.command);
    ExperimentReport::of_data(&data, data.host.clone(), claims(&data), lead, vec![section])
}
