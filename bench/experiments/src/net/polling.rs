//! A polling I/O domain next to OVS-DPDK: round trips of the victim, idle and while its neighbour
//! is flooded.
//!
//! Both switches poll on the core of the load and the host's end; the guests have the other one.
//! The switch that is not measured is stopped.

use rtvirtio_measure::HostFacts;
use rtvirtio_testbed::image::GuestImage;
use rtvirtio_testbed::qemu::Accel;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::Progress;
use serde::{Deserialize, Serialize};

use super::measure::{FAST, NetOptions, path};
use super::test_bed::{BedOptions, NetTestBed, NetThread, System};
use super::{PathData, Situation, Tails, ovs};
use crate::guest::facts;
use crate::interleave::{Counter, interleaved};

/// Polling time of the I/O domain's thread: longer than a period of the probe, so it never sleeps
/// while there is traffic, and sleeps when there is none.
const POLL: Nanos = Nanos::from_millis(1);

/// Round trips of one system in one situation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PollingRun {
    /// Switch under test.
    pub system: System,
    /// Load of the neighbour.
    pub situation: Situation,
    /// Round trips of the victim.
    pub tails: Tails,
    /// Frames per second of the flood.
    pub flood: Option<f64>,
    /// CPUs of the switch.
    pub switch_cpus: f64,
}

/// Runs of both switches.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PollingData {
    /// Version of OVS-DPDK; empty where it is not installed.
    pub peer: String,
    /// Commands that made OVS-DPDK.
    pub commands: Vec<String>,
    /// Reason for measuring nothing; `None` where it was measured.
    pub skipped: Option<String>,
    /// The runs, round by round.
    pub runs: Vec<PollingRun>,
}

impl PollingData {
    /// Paragraphs on OVS-DPDK: its version and commands, or the reason why there is none.
    pub(super) fn peer_text(&self) -> Vec<String> {
        match &self.skipped {
            Some(why) => vec![format!("Skipped, a polling domain next to OVS-DPDK: {why}.")],
            None => vec![format!("{}: {}.", self.peer, self.commands.join("; "))],
        }
    }
}

/// Measures both systems and returns them with the host's facts for the result file. The result
/// says so where OVS-DPDK is not installed.
pub fn measure_polling(
    options: &NetOptions,
    image: &GuestImage,
    accel: Accel,
    progress: &dyn Progress,
) -> anyhow::Result<(PollingData, Option<HostFacts>)> {
    let version = match ovs::find() {
        Ok((_, version)) => version,
        Err(why) => {
            progress.warn(&format!("skipped, a polling domain next to OVS-DPDK: {why}"));
            return Ok((PollingData { skipped: Some(why), ..PollingData::default() }, None));
        }
    };
    progress.step("booting two guests on a polling domain and two on OVS-DPDK");
    let thread = NetThread { poll: Some(POLL), ..options.thread };
    let bed_options = BedOptions { thread, ..options.bed() };
    let bed = |system| NetTestBed::new(system, (image, accel), bed_options, None, progress);
    let mut domain = bed(System::Domain)?;
    let host = facts(&mut domain.guests[0], accel, "veth".to_owned())?;
    let mut dpdk = bed(System::Dpdk)?;
    let commands = dpdk.ovs.as_ref().map(|ovs| ovs.commands.clone()).unwrap_or_default();
    let mut data = PollingData { peer: version, commands, ..PollingData::default() };
    let cells: Vec<(System, Situation)> = [System::Domain, System::Dpdk]
        .into_iter()
        .flat_map(|system| [Situation::Idle, Situation::Flood].map(|situation| (system, situation)))
        .collect();
    let mut counter = Counter::new(progress, "rounds with polling", options.rounds * cells.len());
    for round in 0..options.rounds {
        let measured = interleaved(&cells, round, &mut counter, progress, |(system, situation)| {
            if let Some(ovs) = &dpdk.ovs {
                ovs.set_stopped(*system != System::Dpdk)?;
            }
            let bed = if *system == System::Dpdk { &mut dpdk } else { &mut domain };
            let (path, switch_cpus) = path(bed, *situation, options.requests, FAST)?;
            let PathData { tails, flood, .. } = path;
            Ok(PollingRun { system: *system, situation: *situation, tails, flood, switch_cpus })
        })?;
        data.runs.extend(measured);
    }
    Ok((data, Some(host)))
}
