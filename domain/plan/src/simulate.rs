//! A spec's tasks on the I/O domain's scheduler, under virtual time.

use rtvirtio_sched::{Config, Op as IoOp, Priority};
use rtvirtio_sim::{Arrival, Load, Sim, SimError, SimResult};
use rtvirtio_spec::{Op, Pattern, Spec, Task, Vm};
use rtvirtio_stats::Random;
use rtvirtio_units::{Iops, Nanos, Percentile};
use serde::Serialize;

use rtvirtio_capacity::{longest_stall, promised};

use crate::plan::DomainPlan;

/// Clock drift between machines, so that periodic tasks meet in all phases.
pub(crate) const DRIFT: f64 = 100e-6;
/// Fraction of the declared rate that counts as met: one request more or less at the end of a run
/// is no miss.
pub(crate) const RATE_SLACK: f64 = 0.99;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TaskOutcome {
    pub vm: String,
    /// Name of the task in its VM.
    pub task: String,
    /// Number of completed requests.
    pub n: u64,
    /// Requests per second that the spec declares; `None` for a closed loop.
    pub declared_rate: Option<Iops>,
    /// Measured completions per second.
    pub rate: Iops,
    /// Median latency from the moment at which the request was due.
    pub p50: Nanos,
    /// 99.99th percentile; the maximum where there are fewer than 10 000.
    pub p9999: Nanos,
    /// Longest latency of a request.
    pub longest: Nanos,
    /// The plan's bound; only with the planned `edf` configuration.
    pub bound: Option<Nanos>,
    /// Ratio of `bound` to `longest`; `None` without a bound.
    pub bound_over_longest: Option<f64>,
    /// Latency of the target, the tightest of several.
    pub target: Option<Nanos>,
    /// Requests slower than the target.
    pub late: u64,
    /// Whether tail and rate meet all targets; `None` without one, and where the task syncs its
    /// writes, because flushes are not simulated.
    pub met: Option<bool>,
}

/// Demand of the simulated tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Traffic {
    /// Periodic tasks at their declared rates, with clocks that drift. Each request is submitted
    /// when it is due, also where the task would wait for the one before it.
    Declared,
    /// The worst demand that the plan allows for: all guests stall for the planned time and then
    /// submit the accumulated requests at once; tasks that are promised nothing submit the largest
    /// pieces, half of them writes.
    Worst,
}

/// A spec running on the I/O domain's scheduler.
pub struct Simulation {
    sim: Sim,
    spec: Spec,
    bounds: Vec<Option<Nanos>>,
}

impl Simulation {
    /// A simulation with this configuration; `as_planned` when the plan's bounds apply to it.
    pub fn new(
        spec: &Spec,
        plan: &DomainPlan,
        config: &Config,
        traffic: Traffic,
        as_planned: bool,
        seed: u64,
    ) -> Result<Self, SimError> {
        let mut random = Random::new(seed);
        let loads: Vec<Load> = spec
            .vms
            .iter()
            .enumerate()
            .flat_map(|(vm, v)| v.tasks.iter().map(move |t| (vm, v.name.as_str(), t)))
            .map(|(vm, name, task)| match traffic {
                Traffic::Declared => load(vm, name, task, plan.vms[vm].urgent_only, &mut random),
                Traffic::Worst => {
                    let declared = load(vm, name, task, plan.vms[vm].urgent_only, &mut random);
                    worst(declared, (&spec.vms[vm], task), plan)
                }
            })
            .collect();
        let sim = Sim::new(config, plan.device.twin.clone(), plan.device.size.0, &loads, seed)?;
        // The plan has a row for each target, all of a task with its bound.
        let bound_of = |(vm, task): (&Vm, &Task)| {
            plan.tasks.iter().find(|t| (&t.vm, &t.task) == (&vm.name, &task.name))?.bound
        };
        let bounds = spec.tasks().map(|of| bound_of(of).filter(|_| as_planned)).collect();
        Ok(Self { sim, spec: spec.clone(), bounds })
    }

    /// Advances virtual time to `end`.
    ///
    /// # Errors
    /// [`SimError::Scheduler`].
    pub fn run(&mut self, end: Nanos) -> Result<(), SimError> {
        self.sim.run(end)
    }

    /// Results of all loads so far.
    #[must_use]
    pub fn result(&self) -> SimResult {
        self.sim.result()
    }

    /// Outcome of each task so far, in the spec's order.
    #[must_use]
    pub fn outcomes(&self) -> Vec<TaskOutcome> {
        let result = self.sim.result();
        let tasks = self.spec.tasks().zip(&result.loads).zip(&self.bounds);
        let outcome =
            |(((vm, task), got), bound): (((&Vm, &Task), &rtvirtio_sim::LoadResult), &Option<Nanos>)| {
                let tightest = task.tightest_target();
                // Flushes are not simulated.
                let met = tightest.filter(|_| task.sync.is_none()).map(|target| {
                    // Late requests that the percentile allows, of all that were due, completed or
                    // not.
                    let allowed = (got.n as f64 * target.percentile.exceedance()).floor() as u64;
                    let rate = task.rate.is_none_or(|r| got.rate >= RATE_SLACK * r.0);
                    // Further targets by the next percentile above that is known.
                    let further = task.targets.iter().skip(1).all(|t| {
                        let known = if t.percentile <= Percentile::P9999 { got.p9999 } else { got.max };
                        known <= t.latency
                    });
                    got.n > 0 && got.late <= allowed && further && rate
                });
                TaskOutcome {
                    vm: vm.name.clone(),
                    task: task.name.clone(),
                    n: got.n,
                    declared_rate: task.rate,
                    rate: Iops(got.rate),
                    p50: got.p50,
                    p9999: got.p9999,
                    longest: got.max,
                    bound: *bound,
                    bound_over_longest: bound
                        .filter(|_| got.max.0 > 0)
                        .map(|b| b.0 as f64 / got.max.0 as f64),
                    target: tightest.map(|t| t.latency),
                    late: got.late,
                    met,
                }
            };
        tasks.map(outcome).collect()
    }
}

fn load(vm: usize, name: &str, task: &Task, urgent_only: bool, random: &mut Random) -> Load {
    let arrival = match (task.rate, task.busy_period()) {
        (Some(rate), _) if task.at_once() > 1 => {
            let count = task.at_once();
            Arrival::Bursts { count, period: Nanos::from_secs_f64(f64::from(count) / rate.0) }
        }
        (Some(rate), _) => {
            let drift = 1.0 + DRIFT * (2.0 * random.unit() - 1.0);
            let period = Nanos::from_secs_f64(drift / rate.0);
            Arrival::Periodic { period, phase: Nanos((random.unit() * period.0 as f64) as u64) }
        }
        (None, Some(on)) => Arrival::OnOff { depth: task.depth, on, off: on },
        (None, None) => Arrival::Closed { depth: task.depth },
    };
    Load {
        name: format!("{name}/{}", task.name),
        vm,
        arrival,
        writes: match task.op {
            Op::Read => 0.0,
            Op::Write => 1.0,
            Op::Mixed { write_share } => write_share.0,
        },
        len: task.block.0,
        sequential: task.pattern == Pattern::Sequential,
        priority: if urgent_only && !promised(task).is_empty() { Priority::URGENT } else { Priority::NORMAL },
        deadline: task.tightest_target().map(|t| t.latency),
    }
}

/// Replaces a load's demand by the worst that the plan allows for.
fn worst(load: Load, (vm, task): (&Vm, &Task), plan: &DomainPlan) -> Load {
    if promised(task).is_empty() {
        return Load { len: plan.quantum.0.max(load.len), writes: 0.5, ..load };
    }
    // For mixed tasks, the more expensive operation only.
    let cost = |op| plan.device.request(op, task.block, plan.quantum);
    let costlier = if cost(IoOp::Write) > cost(IoOp::Read) { 1.0 } else { 0.0 };
    let writes = if load.writes > 0.0 && load.writes < 1.0 { costlier } else { load.writes };
    let Some(rate) = task.rate else { return Load { writes, ..load } };
    let stall = longest_stall(vm, plan.catch_up);
    let count = task.at_once() + (rate.0 * stall.as_secs_f64()).ceil() as u32;
    let period = Nanos::from_secs_f64(f64::from(count) / rate.0);
    Load { arrival: Arrival::Bursts { count, period }, writes, ..load }
}

#[cfg(test)]
mod tests {
    use rtvirtio_sched::Policy;

    use super::*;
    use crate::testing::{device, spec, task_of, with};
    use crate::{Options, plan};

    /// Two VMs with targets, and one that floods, under a policy.
    fn simulate(policy: Policy, traffic: Traffic) -> Vec<TaskOutcome> {
        let second = "rate = \"500/s\"\ntarget = { percentile = \"p99.99\", latency = \"20ms\" }";
        let spec = spec(&[
            ("a", &with(1_500, "10ms")),
            ("b", &task_of("t", "read", "16KiB", second)),
            ("c", &task_of("flood", "read", "64KiB", "depth = 128")),
        ]);
        let plan = plan(&spec, &device(), &Options::default());
        assert!(plan.feasible, "{plan:?}");
        let mut config = plan.sched().unwrap();
        config.policy = policy;
        let mut s = Simulation::new(&spec, &plan, &config, traffic, policy == Policy::Edf, 7).unwrap();
        s.run(Nanos(60_000_000_000)).unwrap();
        s.outcomes()
    }

    #[test]
    fn the_plan_holds_under_a_flood_and_fifo_does_not() {
        let edf = simulate(Policy::Edf, Traffic::Declared);
        for t in &edf[..2] {
            assert_eq!((t.met, t.late), (Some(true), 0), "{t:?}");
            assert!(t.bound_over_longest.unwrap() >= 1.0, "{t:?}");
        }
        assert_eq!(edf[2].met, None);
        assert!(edf[2].rate.0 > 1_000.0, "{:?}", edf[2]);
        // 128 requests of 128 us are ahead of all others.
        let fifo = simulate(Policy::Fifo, Traffic::Declared);
        assert_eq!(fifo[0].met, Some(false), "{:?}", fifo[0]);
        assert_eq!(fifo[0].bound, None);
    }

    #[test]
    fn bounds_stand_with_their_own_tasks_where_one_has_several_targets() {
        let targets = "targets = [{ percentile = \"p99\", latency = \"50ms\" }, { percentile = \"p99.9\", latency = \"90ms\" }]";
        let log = format!("rate = \"50/s\"\nsync = \"fdatasync\"\n{targets}");
        let spec = spec(&[
            ("a", &task_of("log", "write", "4KiB", &log)),
            ("b", &task_of("t", "read", "16KiB", &format!("rate = \"100/s\"\n{targets}"))),
            ("c", &task_of("flood", "read", "64KiB", "depth = 16")),
        ]);
        let plan = plan(&spec, &device(), &Options::default());
        let config = plan.sched().unwrap();
        let mut s = Simulation::new(&spec, &plan, &config, Traffic::Declared, true, 7).unwrap();
        s.run(Nanos(10_000_000_000)).unwrap();
        let bound = plan.tasks[2].bound;
        assert!(bound.is_some() && plan.tasks[3].bound == bound, "{plan:?}");
        let outcomes = s.outcomes();
        let found: Vec<_> = outcomes.iter().map(|t| (t.task.as_str(), t.bound, t.met)).collect();
        assert_eq!(found, [("log", None, None), ("t", bound, Some(true)), ("flood", None, None)]);
    }

    /// Behind stalls of its guest and of the device a task that makes one request at a time makes
    /// up for what it missed, one by one.
    #[test]
    fn no_request_takes_longer_from_its_intended_start_than_bounded() {
        let flood = task_of("flood", "write", "64KiB", "depth = 32");
        let planned = |reads: &str, catch_up: u64| {
            let options = Options { catch_up: vec![Nanos::from_millis(catch_up)], ..Options::default() };
            plan(&spec(&[("a", reads), ("b", &flood)]), &device(), &options)
        };
        let of_plan = planned(&with(500, "60ms"), 5);
        let promised = of_plan.tasks[0].from_intended.unwrap();
        let ms = Nanos::from_millis;
        assert!(promised.stall > ms(1) && promised.stall <= ms(5), "{promised:?}");
        let paced = Arrival::Paced { period: ms(2), stall: promised.stall, every: ms(98) };
        let flood = Load::reads(1, Arrival::Closed { depth: 32 });
        let loads = [Load::reads(0, paced), Load { len: 65_536, writes: 1.0, ..flood }];
        let config = of_plan.sched().unwrap();
        let (twin, size) = (of_plan.device.twin.clone(), of_plan.device.size.0);
        let mut sim = Sim::new(&config, twin, size, &loads, 3).unwrap();
        sim.run(ms(20_000)).unwrap();
        let longest = sim.result().loads[0].max;
        assert!(longest > promised.stall && longest <= promised.bound, "{longest} {promised:?}");
        // In an open loop only the guest's stall comes before the submission.
        let open = planned(&with(500, "60ms").replace("rate =", "loop = \"open\"\nrate ="), 5);
        let (bound, found) = (open.tasks[0].bound.unwrap(), open.tasks[0].from_intended.unwrap());
        assert_eq!((found.bound, found.stall), (Nanos(bound.0 + ms(5).0), ms(5)));
        // A reservation that counts no stall covers none: what the device alone delays is too much.
        let none = planned(&with(3_000, "60ms"), 0);
        assert!(none.tasks[0].bound.is_some() && none.tasks[0].from_intended.is_none(), "{none:?}");
    }

    #[test]
    fn worst_traffic_approaches_the_bound_from_below() {
        let declared = simulate(Policy::Edf, Traffic::Declared);
        let worst = simulate(Policy::Edf, Traffic::Worst);
        for (t, easy) in worst.iter().zip(&declared).take(2) {
            assert_eq!((t.met, t.late), (Some(true), 0), "{t:?}");
            let over = t.bound_over_longest.unwrap();
            assert!((1.0..3.0).contains(&over), "{over} of {t:?}");
            assert!(t.longest > easy.longest, "{t:?}");
        }
    }
}
