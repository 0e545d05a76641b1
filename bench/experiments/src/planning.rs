//! Duration of planning, and distance of its answer from the optimum.

use crate::experiment::{Experiment, host_facts};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rtvirtio_measure::HostFacts;
use rtvirtio_model::{Bfq, Config, Elevator, HostModel, Profile};
use rtvirtio_planner::{PlanError, PlanOptions, Space, plan, quality};
use rtvirtio_spec::{Device, LabKind, Spec};
use rtvirtio_stats::Random;
use rtvirtio_units::{Bytes, Nanos};
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use crate::report::ExperimentReport;
use crate::saved::Saved as _;
use rtvirtio_learn::design::{HEAVY, LIGHT, MEDIUM, TASK_SETS};
use rtvirtio_learn::load::{Knobs, Stream, spec};
use rtvirtio_learn::statistic::median;
use rtvirtio_workflow::{generated, model_choice};

/// The measured profile of the emulated flash device, for planning without a device.
pub fn flash_twin() -> serde_json::Result<Profile> {
    serde_json::from_str(PROFILE)
}

const PROFILE: &str = include_str!("../../../control/learn/data/qlc-nvme.profile.json");

/// Targets missed per VM, most urgent first, and the smallest margin as a share of the target.
pub type Missed = (Vec<u32>, f64);

/// Small specs that are searched exhaustively too.
const SMALL: usize = 60;

/// Time and quality of planning.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Planning {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Times with the slice model.
    pub slice: Times,
    /// Times with a learned model, where one was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound: Option<Times>,
    /// Per small spec: targets missed by VM in order of urgency and the smallest margin, by
    /// exhaustive search and by the plan.
    pub small: Vec<(Missed, Missed)>,
}

/// Planning times, s, one for each repetition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Times {
    /// 4 VMs with 3 tasks each.
    pub four: Vec<f64>,
    /// 4 VMs with 3 tasks each and targets that no setting meets: searched to the end, and
    /// explained.
    pub infeasible: Vec<f64>,
    /// 64 VMs with 3 tasks each.
    pub sixty_four: Vec<f64>,
}

/// Plans built-in specs this many times, also with a learned model where one is given.
pub fn measure(repeat: usize, model: Option<&Path>) -> anyhow::Result<Planning> {
    let learned = model_choice::read_if(model)?;
    let model = model.and_then(Path::file_name);
    let model = model.map_or(String::new(), |name| format!(" --model {}", name.to_string_lossy()));
    let profile = flash_twin()?;
    let mut random = Random::new(1);
    let of_model = |learned: &Arc<HostModel>| {
        times(&learned.profile, repeat, &|start| PlanOptions::bound(start, Arc::clone(learned)))
    };
    Ok(Planning {
        schema: Planning::SCHEMA.to_owned(),
        host: host_facts(("none", "none"), "profile of the flash twin, built in"),
        command: format!("rtvirtio-bench plan --repeat {repeat}{model}"),
        generated: generated(),
        slice: times(&profile, repeat, &PlanOptions::new)?,
        bound: learned.as_ref().map(of_model).transpose()?,
        small: (0..SMALL).map(|i| gap(&any(2 + i % 3, &mut random), &profile)).collect::<Result<_, _>>()?,
    })
}

fn times(
    profile: &Profile,
    repetitions: usize,
    options: &dyn Fn(Config) -> PlanOptions,
) -> Result<Times, PlanError> {
    let time = |spec: &Spec, n: usize| -> Result<Vec<f64>, PlanError> {
        (0..n)
            .map(|_| {
                let options = options(Knobs::default_bfq(spec.vms.len()).config());
                let start = Instant::now();
                plan(spec, profile, &options)?;
                Ok(start.elapsed().as_secs_f64())
            })
            .collect()
    };
    Ok(Times {
        // Targets that take a search: too tight for the defaults.
        four: time(&mix(4, 1.0, 20), repetitions)?,
        infeasible: time(&mix(4, 1.0, 1), repetitions.min(5))?,
        // The same load in total: more does not fit.
        sixty_four: time(&mix(64, 4.0 / 64.0, 40), repetitions.min(5))?,
    })
}

/// VMs with a light, a medium and a heavy task each.
fn mix(vms: usize, scale: f64, target_ms: u64) -> Spec {
    let streams = |vm: usize| {
        [LIGHT, MEDIUM, HEAVY].map(|rate| Stream {
            // Later VMs are less urgent.
            target: Some(Nanos::from_millis(target_ms * (1 + vm as u64 % 4))),
            ..Stream::paced((rate * scale).max(1.0))
        })
    };
    let device = Device::Twin { profile: "qlc-nvme".to_owned(), size: Bytes(1 << 30) };
    let all: Vec<Vec<Stream>> = (0..vms).map(|vm| streams(vm).to_vec()).collect();
    spec(&all, device, LabKind::Process)
}

/// VMs with one to three tasks and targets from 20 ms to 4 s, of which some can be met together and
/// some cannot.
fn any(vms: usize, random: &mut Random) -> Spec {
    let mut all = Vec::new();
    for _ in 0..vms {
        let set = TASK_SETS[random.below(TASK_SETS.len())];
        let stream = |rate: &f64, random: &mut Random| Stream {
            target: Some(Nanos::from_secs_f64(0.02 * 200f64.powf(random.unit()))),
            ..Stream::paced(*rate)
        };
        all.push(set.iter().map(|rate| stream(rate, random)).collect());
    }
    spec(&all, Device::Twin { profile: "qlc-nvme".to_owned(), size: Bytes(1 << 30) }, LabKind::Process)
}

/// Best of every configuration of a small space, and the plan in the same space, both in the
/// planner's own order: the most urgent VM's misses first, then the margin.
fn gap(spec: &Spec, profile: &Profile) -> Result<(Missed, Missed), PlanError> {
    let start = Knobs::default_bfq(spec.vms.len()).config();
    // Only idling: without it every target of these specs holds, and the plans do not differ. More
    // settings than the planner refines the weights of, and with four VMs more weights than it
    // enumerates: there it climbs.
    let space = Space {
        elevators: vec![Elevator::Bfq],
        slice_idle: [2, 4, 8].map(Nanos::from_millis).to_vec(),
        timeout_sync: [8, 32, 64].map(Nanos::from_millis).to_vec(),
        max_budget: Vec::new(),
        low_latency: true,
        weights: vec![50, 100, 200, 300, 700],
        caps: false,
        guests: false,
    };
    let options = PlanOptions { space: space.clone(), ..PlanOptions::new(start.clone()) };
    let judge = |config: &Config| quality(spec, profile, &options, config).map(|q| (q.missed, q.margin));
    let mut best = judge(&start)?;
    let combinations = space.weights.len().pow(spec.vms.len() as u32);
    for &slice_idle in &space.slice_idle {
        for &timeout_sync in space.timeout_sync.iter().chain([&Bfq::default().timeout_sync]) {
            for low_latency in [true, false] {
                for mut code in 0..combinations {
                    let bfq = Bfq { slice_idle, timeout_sync, low_latency, ..Bfq::default() };
                    let mut config = Config { bfq, ..start.clone() };
                    for vm in &mut config.vms {
                        vm.weight = space.weights[code % space.weights.len()];
                        code /= space.weights.len();
                    }
                    let this = judge(&config)?;
                    if this.0 < best.0 || (this.0 == best.0 && this.1 > best.1) {
                        best = this;
                    }
                }
            }
        }
    }
    let found = plan(spec, profile, &options)?;
    Ok((best, judge(&found.config(spec, &start)?)?))
}

impl Planning {
    /// The claims of a result.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        // Margins count up to three quarters of a target, as for the planner: more has no value.
        let worth = |m: f64| m.min(0.75);
        let same = self.small.iter().filter(|(best, found)| best.0 == found.0);
        let gap = same.map(|(best, found)| worth(best.1) - worth(found.1)).fold(0.0, f64::max);
        let lost = self.small.iter().filter(|(best, found)| found.0 > best.0).count();
        let n = self.small.len();
        let mut claims = self.slice.claims("", "");
        claims.extend(self.bound.iter().flat_map(|times| times.claims(".bound", " on the learned bound")));
        claims.extend([
            Claim::new(
                "plan.gap",
                "largest loss of margin against an exhaustive search, as a share of the target; 2 to 4 VMs, slice model, BFQ with idling, no limits",
                gap,
                "ratio",
                n,
            )
            .at_most(0.01),
            Claim::new(
                "plan.lost",
                "small specs in which exhaustive search misses fewer targets of an urgent VM",
                lost as f64,
                "specs",
                n,
            )
            .at_most(0.0),
        ]);
        claims
    }
}

impl Times {
    fn claims(&self, id: &str, on: &str) -> Vec<Claim> {
        let claim = |vms: u32, of: &[f64], limit: f64| {
            let what = format!("time to plan {vms} VMs with 3 tasks each{on}, median");
            Claim::new(format!("plan.{vms}vm{id}.seconds"), what, median(of.to_vec()), "s", of.len())
                .at_most(limit)
        };
        let what = format!(
            "time to plan 4 VMs with 3 tasks each{on} whose targets no setting meets, and to explain it, median"
        );
        let infeasible = Claim::new(
            format!("plan.4vm.infeasible{id}.seconds"),
            what,
            median(self.infeasible.clone()),
            "s",
            self.infeasible.len(),
        )
        .at_most(0.05);
        vec![claim(4, &self.four, 0.05), infeasible, claim(64, &self.sixty_four, 2.0)]
    }
}

impl Experiment for Planning {
    const FORM: &str = "rtvirtio-planning/1";
    const FILE: &str = "planning.json";
    const TITLE: &str = "rtvirtio: planning";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "Planning on Linux {} with {} CPUs; {}, {}.",
            self.host.kernel, self.host.cpus, self.command, self.generated
        );
        ExperimentReport::of_data(self, self.host.clone(), self.claims(), lead, Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_explained_within_the_budget() {
        let profile = flash_twin().unwrap();
        for vms in [4, 8] {
            let options = PlanOptions::new(Knobs::default_bfq(vms).config());
            let found = plan(&mix(vms, 4.0 / vms as f64, 1), &profile, &options).unwrap();
            let infeasible = found.infeasible.unwrap();
            assert!(!infeasible.conflict.is_empty(), "{}", infeasible.reason);
            assert!(!infeasible.reason.contains("too many"), "{vms}: {}", infeasible.reason);
            assert!(found.evaluated < options.budget, "{vms}: {}", found.evaluated);
        }
    }
}
