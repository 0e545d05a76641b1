//! The runs: each limit enforced by the I/O domain or the kernel, in rounds, interleaved.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use rtvirtio_domain_client::load::{Plan, Stream, run as run_load};
use rtvirtio_domain_client::{Client, Options as Connection};
use rtvirtio_domain_plan::{DeviceModel, Options as DomainOptions, plan as plan_domain};
use rtvirtio_kernel::{Cgroups, Hierarchy, Root};
use rtvirtio_learn::stage::{RunPlan, Stage, Treatment};
use rtvirtio_measure::noise::NoiseProbe;
use rtvirtio_measure::stalls::Stalls;
use rtvirtio_model::{Config, Elevator, Profile, service};
use rtvirtio_planner::neighbours::{NeighbourOptions, NeighbourPlan, neighbours};
use rtvirtio_spec::{LabKind, Spec};
use rtvirtio_testbed::LabHost;
use rtvirtio_traffic::Actuator;
use rtvirtio_units::{Bytes, Nanos};
use rtvirtio_workflow::neighbours::with_limits;
use rtvirtio_workflow::{Progress, generated};

use super::{
    BLOCKS, BURST, DEPTH, HeldBy, PlannedData, PlannedLimit, PlannedPoint, RATE, RefusedLimit, TIMES,
    VictimSeen,
};
use crate::backend::Backend;
use crate::interleave::{Counter, interleaved};
use crate::regulation::disk::{config, socket};
use crate::regulation::measure::{ENGINE, WARM_UP};
use crate::saved::Saved as _;
use rtvirtio_harness::test_bed::{TestBed, device_text};

/// Requests that the I/O domain has at the device at once.
const WINDOW: u32 = 32;

/// Options of the experiment.
#[derive(Clone, Debug)]
pub struct PlannedOptions {
    /// Emulated device, `twin:NAME`.
    pub device: String,
    /// Length of each run.
    pub length: Duration,
    /// Measurements of each limit.
    pub rounds: u32,
    /// The command's options, for the result.
    pub words: String,
}

/// A limit to be measured in each round.
struct Setup {
    held_by: HeldBy,
    block: Bytes,
    limit: Option<PlannedLimit>,
    /// Spec with the limit in it.
    spec: Spec,
}

/// Measures the device, chooses limits, and measures their effect.
pub fn measure(
    options: &PlannedOptions,
    labs: &LabHost,
    progress: &dyn Progress,
) -> anyhow::Result<PlannedData> {
    let _lock = labs.dirs.lock_vms()?;
    let bed = TestBed::make(&options.device, 2, LabKind::Process, labs, progress)?;
    let measured = measure_on(options, &bed, progress);
    bed.remove()?;
    measured
}

fn measure_on(
    options: &PlannedOptions,
    bed: &TestBed<'_>,
    progress: &dyn Progress,
) -> anyhow::Result<PlannedData> {
    let profile = bed.profile()?;
    let stall = service(&profile)?.stall;
    let device = device_text(&options.device)?;
    let (setups, refused) = setups(&device, &profile, stall, of_the_kernel()?)?;
    let dir = tempfile::Builder::new().prefix("rtvirtio-regulation-").tempdir()?;
    let stage = bed.stage()?;
    let settings = Config { elevator: Elevator::None, ..bed.baseline()? };
    let rounds = options.rounds.max(1);
    let total = setups.len() * rounds as usize;
    let mut counter = Counter::new(progress, "a victim next to a planned limit", total);
    let mut points = Vec::new();
    for round in 0..rounds {
        points.extend(interleaved(&setups, 1 + round as usize, &mut counter, progress, |setup| {
            let how = (options.length, u64::from(round));
            let (victim, neighbour) = match setup.held_by {
                HeldBy::Domain => by_domain(&setup.spec, bed, &profile, dir.path(), how)?,
                HeldBy::Kernel => by_kernel(&setup.spec, &stage, &settings, how, progress)?,
            };
            let Setup { held_by, block, limit, .. } = *setup;
            Ok(PlannedPoint { held_by, block, limit, round, victim, neighbour })
        })?);
    }
    Ok(PlannedData {
        schema: PlannedData::SCHEMA.to_owned(),
        host: bed.facts(),
        command: format!("rtvirtio-bench regulation --only plan{}", options.words),
        generated: generated(),
        seconds: options.length.as_secs_f64(),
        stall,
        points,
        refused,
    })
}

/// A limit for each target, and the same loads without one; and the targets that have no limit.
fn setups(
    device: &str,
    profile: &Profile,
    stall: Nanos,
    kernel: Actuator,
) -> anyhow::Result<(Vec<Setup>, Vec<RefusedLimit>)> {
    let (mut all, mut refused) = (Vec::new(), Vec::new());
    for held_by in HeldBy::ALL {
        let actuator = match held_by {
            HeldBy::Domain => Actuator::IoDomain,
            HeldBy::Kernel => kernel,
        };
        for block in BLOCKS {
            for times in TIMES {
                // Whole microseconds, as in the spec's text.
                let target = Nanos((stall.0 as f64 * times) as u64 / 1_000 * 1_000);
                let text = spec_text(device, block, target);
                let spec = rtvirtio_spec::parse("plan", &text)?;
                let options = NeighbourOptions { asked: &[], curve: None, actuator };
                match neighbours(&spec, Some(profile), &options) {
                    Ok(plan) => {
                        let spec = rtvirtio_spec::parse("plan", &with_limits("plan", &text, &plan.limits)?)?;
                        all.push(Setup { held_by, block, limit: Some(limit(&plan, target)?), spec });
                    }
                    Err(e) if e.is_infeasible() => {
                        refused.push(RefusedLimit { held_by, block, target, why: e.to_string() });
                    }
                    Err(e) => return Err(e.into()),
                }
            }
            let spec = rtvirtio_spec::parse("plan", &spec_text(device, block, stall))?;
            all.push(Setup { held_by, block, limit: None, spec });
        }
    }
    Ok((all, refused))
}

fn limit(plan: &NeighbourPlan, target: Nanos) -> anyhow::Result<PlannedLimit> {
    let ([limit], [victim]) = (&plan.limits[..], &plan.victims[..]) else {
        bail!("{} limits for {} victims: a defect", plan.limits.len(), plan.victims.len());
    };
    let bound = Nanos::from_secs_f64(victim.bound.context("a limit without a bound: a defect")?);
    let of = limit.tspec;
    Ok(PlannedLimit { target, bound, rate: of.rate, burst: of.burst, peak: of.peak })
}

/// Mechanism by which the kernel of this host limits disks.
fn of_the_kernel() -> anyhow::Result<Actuator> {
    Ok(match Cgroups::detect(&Root::default())?.hierarchy {
        Hierarchy::V1 => Actuator::ThrottleV1,
        Hierarchy::V2 => Actuator::IoMax,
    })
}

/// A user's spec of victim and neighbour.
fn spec_text(device: &str, block: Bytes, target: Nanos) -> String {
    let vm = |name: &str, task: &str| {
        format!(
            "[[vm]]\nname = \"{name}\"\nlab = \"process\"\n[[vm.task]]\nname = \"t0\"\nop = \"read\"\n{task}\n"
        )
    };
    let victim =
        format!("block = \"4KiB\"\nrate = \"{RATE}/s\"\ntarget = {{ latency = \"{}us\" }}", target.0 / 1_000);
    let neighbour = format!("block = \"{}B\"\ndepth = {DEPTH}\nburst = \"{}ns\"", block.0, BURST.0);
    format!("[device]\n{device}\n{}{}", vm("vm0", &victim), vm("vm1", &neighbour))
}

/// Runs with the limit as a cap of the I/O domain, as in `plan --domain`. The I/O domain serves
/// first come first served: only the limit protects the victim.
fn by_domain(
    spec: &Spec,
    bed: &TestBed<'_>,
    profile: &Profile,
    dir: &Path,
    (length, seed): (Duration, u64),
) -> anyhow::Result<(VictimSeen, f64)> {
    let (device, size) = bed.without_elevator()?;
    let plan = plan_domain(spec, &DeviceModel::measured(profile)?, &DomainOptions::of_profile(profile));
    if let Some(why) = plan.vms.iter().flat_map(|vm| &vm.uncapped).next() {
        bail!("the domain refuses the limit: {why}");
    }
    let caps = plan.vms.iter().map(|vm| vm.caps.iter().map(|line| format!("{line}\n")).collect::<String>());
    let _domain =
        Backend::start_domain(dir, &config(dir, &device, "fifo", WINDOW, &caps.collect::<Vec<_>>()))?;
    let (mut clients, mut streams) = (Vec::new(), Vec::new());
    for (client, task) in spec.vms.iter().flat_map(|vm| &vm.tasks).enumerate() {
        let connection = Connection { buffer: task.block.0 as usize, ..Connection::default() };
        clients.push(Client::connect(&socket(dir, client), connection)?);
        streams.push(Stream {
            client,
            rate: task.rate.map(|rate| rate.0),
            block: task.block.0 as u32,
            burst: task.busy_period().map(|burst| Duration::from_nanos(burst.0)),
            ..Stream::reads(&spec.vms[client].name, task.depth as usize, size)
        });
    }
    let probe = NoiseProbe::start_above(ENGINE);
    let results = run_load(&mut clients, &streams, &Plan { warm_up: WARM_UP, length, seed, spin: false });
    let (_, stalls) = probe.finish();
    let results = results?;
    let errors: u64 = results.iter().map(|r| r.errors).sum();
    ensure!(errors == 0, "{errors} requests failed: a run with errors is not counted");
    let [victim, neighbour] = &results[..] else { bail!("{} streams: a defect", results.len()) };
    let seen = VictimSeen {
        n: victim.n,
        rate: victim.rate,
        longest: victim.max(),
        awake: stalls.map(|stalls| longest(&victim.spans, &stalls)),
    };
    Ok((seen, neighbour.rate))
}

/// Longest request less the host's stalls.
fn longest(spans: &[(u64, u64)], stalls: &Stalls) -> Nanos {
    let less = |(from, to): &(u64, u64)| to - from - stalls.within(*from, *to);
    Nanos(spans.iter().map(less).max().unwrap_or(0))
}

/// Runs with the limit in the neighbour's cgroup, set as by `apply` and reverted.
fn by_kernel(
    spec: &Spec,
    stage: &Stage<'_>,
    settings: &Config,
    (length, seed): (Duration, u64),
    progress: &dyn Progress,
) -> anyhow::Result<(VictimSeen, f64)> {
    let plan = RunPlan { length, seed, cancel: progress.cancel_flag() };
    let run = stage.run(spec, &Treatment::knobs(settings.clone()), plan)?;
    let [victim, neighbour] = &run.tasks[..] else { bail!("{} tasks: a defect", run.tasks.len()) };
    let awake = run.stalls.as_ref().and_then(|stalls| victim.latencies_less(stalls));
    let seen = VictimSeen {
        n: victim.result.n,
        rate: victim.result.achieved_rate.0,
        longest: victim.result.max_ns,
        awake: awake.map(|latencies| latencies.max()),
    };
    Ok((seen, neighbour.result.achieved_rate.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_in_the_spec_and_runs_without_one_are_there_too() {
        let profile = rtvirtio_measure::profile::load(Path::new(rtvirtio_testkit::site::PROFILE)).unwrap();
        let stall = service(&profile).unwrap().stall;
        let (all, refused) = setups("twin = \"qlc-nvme\"", &profile, stall, Actuator::ThrottleV1).unwrap();
        assert_eq!(all.len() + refused.len(), 2 * 2 * (TIMES.len() + 1), "{refused:#?}");
        for setup in &all {
            let kept = setup.spec.vms[1].traffic.read.map(|of| (of.rate, of.burst, of.peak));
            assert_eq!(kept, setup.limit.map(|of| (of.rate, Some(of.burst), of.peak)));
            assert!(setup.limit.is_none_or(|of| of.bound <= of.target), "{:?}", setup.limit);
        }
        // Only the I/O domain's regulators have a peak.
        assert!(all.iter().all(|s| s.held_by == HeldBy::Domain || s.limit.is_none_or(|l| l.peak.is_none())));
        for held_by in HeldBy::ALL {
            assert!(all.iter().any(|s| s.held_by == held_by && s.limit.is_some()), "{held_by:?}");
        }
    }

    #[test]
    fn a_stall_of_the_host_is_taken_off_the_request_that_met_it() {
        let stalls = Stalls::union(vec![(100, 160)]);
        assert_eq!(longest(&[(0, 50), (90, 170)], &stalls), Nanos(50));
        assert_eq!(longest(&[], &stalls), Nanos(0));
    }
}
