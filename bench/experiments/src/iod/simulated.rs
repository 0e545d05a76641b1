//! The I/O domain's scheduler in simulation: worst case and bound, the exactness of a regulator,
//! and the scheduler's speed.

use std::time::{Duration, Instant};

use rtvirtio_domain_plan::{DeviceModel, Options, Simulation, Traffic, plan};
use rtvirtio_sched::{Cap, Config, Piece, Tspec, VmConfig, WindowConfig};
use rtvirtio_sim::{Arrival, Load, Observer, Sim};
use rtvirtio_spec::Spec;
use rtvirtio_twin::TwinProfile;
use rtvirtio_units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use crate::iod::{FLOOD_DEPTH, PROTECTED, RATES};

/// Target of the protected tasks: above the twin's longest stall.
const TARGET: &str = "20ms";
/// Longest virtual time of a run.
const TIME: Nanos = Nanos(600_000_000_000);
/// Virtual seconds for each second of a measured run.
const PER_MEASURED: u64 = 60;
/// Requests per second that the regulator admits.
const CAP: u64 = 2_000;

/// Failure of the simulation, always a defect of ours.
#[derive(Debug, thiserror::Error)]
#[error("the simulation: {0}")]
pub struct SimulatedError(String);

/// Values measured in the simulation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Simulated {
    /// Simulated requests per second of one CPU, declared traffic.
    pub requests_per_second: f64,
    /// Requests of that run.
    pub requests: u64,
    /// Smallest bound over longest latency, of the nine protected tasks under the worst traffic
    /// that the plan allows for.
    pub bound_least: f64,
    /// Largest bound over longest latency of these nine tasks.
    pub bound_most: f64,
    /// Requests of the nine tasks.
    pub judged: u64,
    /// Largest deviation of a held piece's dispatch from its due time, ns.
    pub regulator_ns: u64,
    /// Pieces that the regulator held.
    pub held: u64,
}

/// The flood's case as a spec.
fn spec() -> Result<Spec, SimulatedError> {
    let mut text = "[device]\ntwin = \"qlc-nvme\"\n".to_owned();
    for vm in 0..PROTECTED {
        text += &format!("[[vm]]\nname = \"vm{vm}\"\nlab = \"qemu\"\n");
        for (name, rate) in ["L", "M", "H"].iter().zip(RATES) {
            text += &format!(
                "[[vm.task]]\nname = \"{name}\"\nop = \"read\"\nblock = \"4KiB\"\nrate = \"{rate}/s\"\ntarget = {{ percentile = \"p99.99\", latency = \"{TARGET}\" }}\n"
            );
        }
    }
    text += &format!(
        "[[vm]]\nname = \"flood\"\nlab = \"qemu\"\n[[vm.task]]\nname = \"all\"\nop = \"read\"\nblock = \"4KiB\"\ndepth = {FLOOD_DEPTH}\n"
    );
    rtvirtio_spec::parse("flood", &text).map_err(|e| SimulatedError(e.to_string()))
}

/// Runs all simulations; some seconds. `measured` is the length of the runs on the machine.
pub fn measure(measured: Duration) -> Result<Simulated, SimulatedError> {
    let of_run = u64::try_from(measured.as_nanos()).unwrap_or(u64::MAX).saturating_mul(PER_MEASURED);
    let time = TIME.min(Nanos(of_run));
    let err = |e: rtvirtio_sim::SimError| SimulatedError(e.to_string());
    let twin = TwinProfile::built_in("qlc-nvme").map_err(|e| SimulatedError(e.to_string()))?;
    let spec = spec()?;
    let plan = plan(&spec, &DeviceModel::declared("qlc-nvme", &twin, Bytes(1 << 30)), &Options::default());
    if !plan.feasible {
        return Err(SimulatedError("the plan does not hold".to_owned()));
    }
    let config = plan.sched().map_err(|e| SimulatedError(e.to_string()))?;
    let run = |traffic| {
        let mut simulation = Simulation::new(&spec, &plan, &config, traffic, true, 1)?;
        let begin = Instant::now();
        simulation.run(time)?;
        Ok((simulation.result().requests, begin.elapsed().as_secs_f64(), simulation.outcomes()))
    };
    let (requests, seconds, _) = run(Traffic::Declared).map_err(err)?;
    let (_, _, worst) = run(Traffic::Worst).map_err(err)?;
    let ratios: Vec<f64> = worst.iter().filter_map(|t| t.bound_over_longest).collect();
    if ratios.len() != RATES.len() * PROTECTED {
        return Err(SimulatedError(format!("bounds of {} tasks", ratios.len())));
    }
    let (regulator_ns, held) = regulator(&twin, time).map_err(err)?;
    Ok(Simulated {
        requests_per_second: requests as f64 / seconds.max(1e-9),
        requests,
        bound_least: ratios.iter().copied().fold(f64::INFINITY, f64::min),
        bound_most: ratios.iter().copied().fold(0.0, f64::max),
        judged: worst.iter().filter(|t| t.bound.is_some()).map(|t| t.n).sum(),
        regulator_ns,
        held,
    })
}

/// Records the dispatch of held pieces: of a flood with a burst of one, the i-th is due i periods
/// after the first.
#[derive(Default)]
struct Regulator {
    first: Option<Nanos>,
    worst: u64,
    held: u64,
}

impl Observer for Regulator {
    fn on_dispatch(&mut self, now: Nanos, _: &Piece) {
        let Some(first) = self.first else {
            self.first = Some(now);
            return;
        };
        self.held += 1;
        let due = first.0 + self.held * 1_000_000_000 / CAP;
        self.worst = self.worst.max(now.0.abs_diff(due));
    }
}

fn regulator(twin: &TwinProfile, time: Nanos) -> Result<(u64, u64), rtvirtio_sim::SimError> {
    let tspec = Tspec { rate: CAP, burst: 1, peak: None };
    let cap = Cap { requests: Some(tspec), ..Cap::default() };
    let vm = VmConfig { caps: [cap, Cap::default()], ..VmConfig::default() };
    let config = Config { vms: vec![vm], window: WindowConfig::fixed(8), ..Config::default() };
    let loads = [Load::reads(0, Arrival::Closed { depth: 32 })];
    let mut sim = Sim::with_observer(&config, twin.clone(), 1 << 30, &loads, 1, Regulator::default())?;
    sim.run(Nanos(time.0 / 10))?;
    let observed = sim.into_observer();
    Ok((observed.worst, observed.held))
}

/// The claims of a simulation.
#[must_use]
pub fn claims(s: &Simulated) -> Vec<Claim> {
    let n = |v: u64| usize::try_from(v).unwrap_or(usize::MAX);
    vec![
        Claim::new(
            "iod.bound.over_worst",
            "bound over the longest time of any request, smallest of nine tasks; simulated, with the worst traffic that the plan allows for",
            s.bound_least,
            "times",
            n(s.judged),
        )
        .at_least(1.0),
        Claim::new(
            "iod.bound.over_worst.most",
            "the same, largest of the nine",
            s.bound_most,
            "times",
            n(s.judged),
        )
        .at_most(3.0),
        Claim::new(
            "iod.regulator.error_us.simulated",
            "largest time by which a held request went later than it might, simulated",
            s.regulator_ns as f64 / 1e3,
            "us",
            n(s.held),
        )
        .at_most(1.0),
        Claim::new(
            "iod.simulate.requests_per_second",
            "simulated requests per second of one CPU",
            s.requests_per_second,
            "1/s",
            n(s.requests),
        )
        .at_least(1e6),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_regulator_is_exact_and_holds() {
        let twin = TwinProfile::built_in("qlc-nvme").unwrap();
        let (worst, held) = regulator(&twin, TIME).unwrap();
        assert_eq!(worst, 0);
        assert!(held > 100_000, "{held}");
    }

    #[test]
    fn the_case_is_feasible_as_planned() {
        let twin = TwinProfile::built_in("qlc-nvme").unwrap();
        let device = DeviceModel::declared("q", &twin, Bytes(1 << 30));
        let plan = plan(&spec().unwrap(), &device, &Options::default());
        assert!(plan.feasible, "{plan:?}");
        assert_eq!(plan.sched().unwrap().vms.len(), PROTECTED + 1);
    }
}
