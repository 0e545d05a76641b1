//! Fleets: the cost of sums of integers on single hosts, and contracts placed in simulated fleets
//! of up to 100 000 hosts.

mod crm;
mod instance;
mod page;
mod peers;
mod simulate;
mod sums;

use crate::experiment::{Experiment, host_facts};

use clap::Args;
use rtvirtio_measure::HostFacts;
use rtvirtio_workflow::{Progress, generated};
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use crate::report::ExperimentReport;
use crate::saved::Saved as _;

use instance::Instance;

pub use instance::VMS_PER_HOST;
pub use simulate::Filled;
pub use sums::Sums;

/// Hosts of the fleet that Pacemaker's own scheduler fills: it takes minutes for some hundred
/// resources.
const SMALL: usize = 6;

/// Options of `rtvirtio-bench fleet`.
#[derive(Args, Clone, Debug)]
pub struct FleetOptions {
    /// Sizes of simulated fleets, in hosts.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_values_t = [100, 1_000, 10_000, 100_000])]
    pub hosts: Vec<usize>,
    /// Single hosts that are filled by sums and by the full admission.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    pub singles: usize,
    /// Seed of hosts and contracts.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host on which the decisions were timed.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Contracts admitted by sums on single hosts.
    pub sums: Sums,
    /// Fleets by rising size.
    pub fleets: Vec<Filled>,
    /// A small fleet, by Pacemaker's own scheduler; `None` where it is not installed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pacemaker: Option<ByPacemaker>,
    /// Peak memory of the process, with every rule's data, GiB.
    pub memory_gib: f64,
}

/// Placements of Pacemaker's scheduler in a small fleet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ByPacemaker {
    /// Contracts that `crm_simulate` places.
    pub by_crm_simulate: usize,
    /// Instance of `by_crm_simulate`, filled by the rules of the larger fleets.
    pub fleet: Filled,
}

/// Fills single hosts and fleets.
///
/// # Errors
/// Cancellation, and when a built-in profile cannot be read.
pub fn measure(options: &FleetOptions, progress: &dyn Progress) -> anyhow::Result<FleetData> {
    let sums = sums::sums(options.singles, options.seed)?;
    let mut sizes = options.hosts.clone();
    sizes.sort_unstable();
    let mut fleets = Vec::new();
    for hosts in &sizes {
        progress.check_cancelled()?;
        progress.step(&format!("{hosts} hosts, {} contracts", hosts * VMS_PER_HOST));
        fleets.push(simulate::fill(*hosts, options.seed)?);
    }
    progress.step("Pacemaker's own scheduler on a small fleet");
    let small = Instance::new(SMALL, options.seed)?;
    let by_crm_simulate = crm::placed(&small)?;
    let fleet = simulate::fill(SMALL, options.seed)?;
    let pacemaker = by_crm_simulate.map(|by_crm_simulate| ByPacemaker { by_crm_simulate, fleet });
    let list: Vec<String> = sizes.iter().map(usize::to_string).collect();
    Ok(FleetData {
        schema: FleetData::SCHEMA.to_owned(),
        host: host_facts(("none", "none"), "none: hosts and contracts are simulated"),
        command: format!(
            "rtvirtio-bench fleet --hosts {} --singles {} --seed {}",
            list.join(","),
            options.singles,
            options.seed
        ),
        generated: generated(),
        sums,
        fleets,
        pacemaker,
        memory_gib: simulate::peak_memory_gib()?,
    })
}

impl FleetData {
    /// The claims of a result.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        let s = &self.sums;
        let lost = |of: usize| 1.0 - s.by_sums as f64 / of.max(1) as f64;
        let wrong = Claim::new(
            "fleet.sum.admitted_wrongly",
            "contracts whose sum of integers is within a host's limits and that the full admission refuses",
            s.admitted_wrongly as f64,
            "contracts",
            s.by_sums,
        );
        let mut claims = vec![
            wrong.at_most(0.0),
            Claim::new(
                "fleet.sum.lost_share",
                "contracts that the full admission lets in and sums keep out, on hosts filled from random sequences",
                lost(s.by_admission),
                "share",
                s.hosts,
            ),
            Claim::new(
                "fleet.sum.lost_share.same_shape",
                "the same against the exact admission under the window and piece size that the sums are of",
                lost(s.by_ledger),
                "share",
                s.hosts,
            ),
        ];
        claims.extend(self.fleets.last().map(|f| self.of_largest(f)).into_iter().flatten());
        claims.extend(self.pacemaker.iter().map(|p| {
            Claim::new(
                "fleet.placed_over_crm_simulate",
                "contracts placed over those that Pacemaker's own scheduler places in the same fleet of 6 hosts",
                p.fleet.placed as f64 / p.by_crm_simulate.max(1) as f64,
                "ratio",
                p.fleet.vms,
            )
        }));
        claims
    }

    fn of_largest(&self, f: &Filled) -> Vec<Claim> {
        let over = |ours: usize, peer: usize| ours as f64 / peer.max(1) as f64;
        let compared = |id: &str, what: &str, value| Claim::new(id, what, value, "ratio", f.vms);
        vec![
            Claim::new("fleet.sim.hosts", "hosts of the largest simulated fleet", f.hosts as f64, "hosts", 1)
                .at_least(100_000.0),
            Claim::new("fleet.sim.vms", "contracts that come to it", f.vms as f64, "contracts", 1)
                .at_least(1e6),
            Claim::new("fleet.sim.seconds", "time for all of its decisions on one core", f.seconds, "s", 1)
                .at_most(600.0),
            Claim::new(
                "fleet.sim.memory_gib",
                "most memory of the process, with every compared rule",
                self.memory_gib,
                "GiB",
                1,
            )
            .at_most(4.0),
            Claim::new(
                "fleet.sim.beyond_capacity",
                "hosts on which the full admission refuses what was placed, computed anew",
                f.beyond_capacity as f64,
                "hosts",
                f.hosts,
            )
            .at_most(0.0),
            compared(
                "fleet.sim.placed_over_first_fit",
                "contracts placed over those of first fit on the same integers, in the order in which they come",
                over(f.placed, f.first_fit),
            )
            .at_least(1.0),
            compared(
                "fleet.sim.placed_over_first_fit_decreasing",
                "the same where both know all that will come, the largest first",
                over(f.placed_decreasing, f.first_fit_decreasing),
            ),
            compared(
                "fleet.sim.placed_over_pacemaker",
                "contracts placed over those of Pacemaker's rule: by priority, the emptiest host, one demand for all kinds of hosts",
                over(f.placed, f.pacemaker),
            ),
            compared(
                "fleet.sim.exact_over_sums",
                "contracts placed over those placed by sums alone, by the same search",
                over(f.placed, f.placed_by_sums),
            ),
        ]
    }
}

impl Experiment for FleetData {
    const FORM: &str = "rtvirtio-fleet/1";
    const FILE: &str = "fleet.json";
    const TITLE: &str = "rtvirtio: fleets";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "Fleets are simulated; decisions were timed on Linux {} with {} CPUs; {}, {}.",
            self.host.kernel, self.host.cpus, self.command, self.generated
        );
        ExperimentReport::of_data(self, self.host.clone(), self.claims(), lead, page::sections(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_fleet_is_filled_and_never_beyond() {
        let kinds = Instance::new(1, 3).unwrap().kinds;
        let with_flow = kinds.iter().filter(|k| !k.networks.is_empty()).count();
        assert_eq!((kinds.len(), with_flow), (144, 96));
        let data = simulate::fill(60, 3).unwrap();
        assert_eq!((data.vms, data.beyond_capacity), (60 * VMS_PER_HOST, 0));
        // More contracts arrive than fit, and by sums alone no more fit.
        assert!(data.placed < data.vms && data.placed_by_sums <= data.placed, "{data:?}");
        assert!(data.first_fit > data.vms / 3 && data.pacemaker > data.vms / 4, "{data:?}");
        let sums = sums::sums(12, 3).unwrap();
        assert_eq!(sums.admitted_wrongly, 0);
        // An admitted contract may keep two later ones out, so neither rule is always ahead.
        assert!(sums.by_sums > sums.hosts && sums.by_ledger > sums.hosts, "{sums:?}");
        assert_eq!(simulate::fill(60, 3).unwrap().placed, data.placed, "a seed decides all but the time");
    }
}
