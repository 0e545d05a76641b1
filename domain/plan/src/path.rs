//! One target for a message that passes a VM's network card, its CPU and its disk: the bounds of
//! the parts add, because each bound holds from the moment at which the part before it is done. A
//! task that makes one request at a time may then still have an earlier message at the disk: its
//! part is the bound from the intended start, whose stall is no shorter than that of the VM's CPU.
//!
//! The part of the CPU is [`rtvirtio_model::response_of_stream`], with the debt of the host's tick:
//! it holds for a guaranteed budget of all threads together, as a real-time cgroup has it, and for
//! work that the VM does alone. A host that guarantees no such budget gives the part no bound, and
//! neither does a budget that the messages exceed.

use rtvirtio_capacity::longest_stall;
use rtvirtio_model::response_of_stream;
use rtvirtio_spec::{Arrival, CpuNeed, HostSpec, PathPart, Target, Vm, VmPath};
use rtvirtio_units::{Iops, Nanos, Ratio};

use crate::flow::FlowPromise;
use crate::plan::DomainPlan;
use crate::promise::{PartPromise, PathPromise, TaskPromise};

/// Whether a VM's threads together get the budget of its CPU contract; else the reason why not.
pub type Guaranteed<'a> = dyn Fn(&Vm) -> Result<(), String> + 'a;

impl DomainPlan {
    /// Adds the paths of a spec, whose networks the plan has. `debt` is the CPU time that a
    /// contract may owe from before; `guaranteed` says why a VM's threads together may not get the
    /// budget of its contract on the host.
    #[must_use]
    pub fn with_paths(mut self, host: &HostSpec, debt: Nanos, guaranteed: &Guaranteed<'_>) -> Self {
        self.paths = paths(host, &self, (debt, guaranteed));
        self.feasible &= self.paths.iter().all(|path| path.met);
        self
    }
}

/// The paths of a spec's VMs, on a plan of its disks and networks.
fn paths(host: &HostSpec, plan: &DomainPlan, of_host: (Nanos, &Guaranteed<'_>)) -> Vec<PathPromise> {
    let of_vm = |(i, vm): (usize, &Vm)| {
        let paths = host.paths(i).iter();
        paths.map(|path| promise(vm, path, plan, of_host)).collect::<Vec<_>>()
    };
    host.vms().iter().enumerate().flat_map(of_vm).collect()
}

fn promise(vm: &Vm, path: &VmPath, plan: &DomainPlan, of_host: (Nanos, &Guaranteed<'_>)) -> PathPromise {
    let parts: Vec<PartPromise> = path
        .parts
        .iter()
        .enumerate()
        .map(|(i, part)| match part {
            PathPart::Net(flow) => {
                let after_cpu = path.parts[..i].iter().any(|part| matches!(part, PathPart::Cpu(_)));
                net((vm, *flow), after_cpu, plan)
            }
            PathPart::Cpu(work) => cpu(vm, (*work, messages(vm, path)), of_host),
            PathPart::Disk(task) => disk(vm, *task, plan),
        })
        .collect();
    let bound = parts.iter().map(|part| part.bound.map(|bound| bound.0)).sum::<Option<u64>>().map(Nanos);
    let target = path.target;
    let met = bound.is_some_and(|bound| bound <= target.latency);
    let remedy = (!met).then(|| remedy(&parts, bound, target));
    PathPromise { vm: vm.name.clone(), path: path.name.clone(), parts, bound, target, met, remedy }
}

/// Change that would make a path meet its target, or the reasons of the parts without a bound.
fn remedy(parts: &[PartPromise], bound: Option<Nanos>, target: Target) -> String {
    let Some(bound) = bound else {
        let lacking = parts.iter().filter(|part| part.bound.is_none());
        let why = |part: &PartPromise| {
            format!("{} ({}): {}", part.part, part.of, part.unpromised.as_deref().unwrap_or("no bound"))
        };
        return lacking.map(why).collect::<Vec<_>>().join("; ");
    };
    let Some(largest) = parts.iter().max_by_key(|part| part.bound) else { return String::new() };
    let change = match largest.part {
        "cpu" => "a shorter period or a larger budget of the VM's `cpu`, or less `work`",
        "net" => "a shorter target of that flow",
        _ => "a shorter target of that task",
    };
    let most = largest.bound.unwrap_or_default();
    format!(
        "the parts may take {bound} together, {} more than the target; {most} of it is {} ({}): {change} makes it shorter",
        Nanos(bound.0.saturating_sub(target.latency.0)),
        largest.part,
        largest.of
    )
}

fn net((vm, flow): (&Vm, usize), after_cpu: bool, plan: &DomainPlan) -> PartPromise {
    let of = vm.flows[flow].name.clone();
    let of_flow = |f: &&FlowPromise| f.vm == vm.name && f.flow == of;
    let found = plan.networks.iter().find_map(|n| Some((n.flows.iter().find(of_flow)?, n.config.stall)));
    let bunched = found.filter(|_| after_cpu).and_then(|(flow, stall)| bunched(vm, flow, stall));
    let found = found.map(|(flow, _)| flow);
    let bound = found.and_then(|flow| flow.bound).filter(|_| bunched.is_none());
    let why = found.and_then(|flow| flow.unpromised.clone()).or(bunched);
    let unpromised = bound.is_none().then(|| why.unwrap_or_else(|| "the flow has no reservation".to_owned()));
    PartPromise { part: "net", of, bound, unpromised }
}

/// Reason for no bound of the frames that a VM sends when its contract gives it the CPU again,
/// where they are more at once than the reservation counts. That of a disk counts them.
fn bunched(vm: &Vm, flow: &FlowPromise, stall: Nanos) -> Option<String> {
    let blackout = longest_stall(vm, Nanos(0));
    let due = |time: Nanos| (flow.rate.0 * time.as_secs_f64()).ceil();
    let (sent, counted) = (1.0 + due(blackout), f64::from(flow.burst) + due(stall));
    (sent > counted).then(|| {
        format!(
            "without its CPU for {blackout} the VM may then send {sent} frames at once, and the reservation counts {counted}: give the flow a `burst` of {sent}, or `cpu` a \
             shorter period"
        )
    })
}

fn disk(vm: &Vm, task: usize, plan: &DomainPlan) -> PartPromise {
    let of = vm.tasks[task].name.clone();
    let found = plan.tasks.iter().find(|t| t.vm == vm.name && t.task == of);
    let waits = vm.tasks[task].rate.is_some() && vm.tasks[task].arrival == Arrival::Closed;
    let covered = |stall: Nanos| stall >= longest_stall(vm, Nanos(0));
    let from_intended = |t: &TaskPromise| Some(t.from_intended.filter(|due| covered(due.stall))?.bound);
    let bound = found.and_then(|t| if waits { from_intended(t) } else { t.bound });
    let behind = (waits && found.is_some_and(|t| t.bound.is_some())).then(|| {
        "it makes one request at a time, and nothing bounds how long a message waits for those before it: write loop = \"open\"".to_owned()
    });
    let refused = plan.vms.iter().find(|v| v.vm == vm.name).and_then(|v| v.refused.clone());
    let why = found.and_then(|task| task.unpromised.clone()).or(refused).or(behind);
    let unpromised = bound.is_none().then(|| why.unwrap_or_else(|| "the task has no reservation".to_owned()));
    PartPromise { part: "disk", of, bound, unpromised }
}

/// Messages of a path that may come at once, and their rate: the most that its flow or its task
/// has. A task without a rate sends one for each that is done.
fn messages(vm: &Vm, path: &VmPath) -> (u32, f64) {
    let of_part = |part: &PathPart| match *part {
        PathPart::Net(flow) => (vm.flows[flow].burst, vm.flows[flow].rate.0),
        PathPart::Cpu(_) => (1, 0.0),
        PathPart::Disk(task) => {
            let task = &vm.tasks[task];
            task.rate.map_or((task.depth, 0.0), |rate| (task.at_once(), rate.0))
        }
    };
    let parts = path.parts.iter().map(of_part);
    parts.fold((1, 0.0), |most: (u32, f64), part| (most.0.max(part.0), most.1.max(part.1)))
}

fn cpu(
    vm: &Vm,
    (work, messages): (Nanos, (u32, f64)),
    (debt, guaranteed): (Nanos, &Guaranteed<'_>),
) -> PartPromise {
    let too_much = |budget: Nanos, period: Nanos| {
        let needed = Ratio(messages.1 / 1e9 * work.0 as f64);
        format!(
            "{} of {work} take {needed} of a CPU, and the contract has {}: give it more, or lower the rate of the path's flow or task",
            Iops(messages.1),
            Ratio(budget.0 as f64 / period.0.max(1) as f64)
        )
    };
    let (bound, unpromised) = match vm.cpu.need {
        Some(CpuNeed::Contract { budget, period }) => match guaranteed(vm) {
            Ok(()) => {
                let bound = response_of_stream(work, messages, debt, budget, period);
                (bound, bound.is_none().then(|| too_much(budget, period)))
            }
            Err(why) => (None, Some(why)),
        },
        Some(CpuNeed::Demand { .. }) => {
            let why = "its budget is found when the contract is applied: write cpu = { budget = ..., period = ... } instead of a demand";
            (None, Some(why.to_owned()))
        }
        None => {
            let why = "the VM has no CPU contract: add cpu = { budget = \"4ms\", period = \"20ms\" }, which `rtvirtio apply SPEC --cpu-only` puts in force";
            (None, Some(why.to_owned()))
        }
    };
    PartPromise { part: "cpu", of: format!("work of {work}"), bound, unpromised }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::testing::device;
    use crate::{Options, plan, plan_networks};

    fn planned(vm: &str, path: &str) -> DomainPlan {
        planned_on(vm, path, &|_| Ok(()))
    }

    fn planned_on(vm: &str, path: &str, guaranteed: &Guaranteed<'_>) -> DomainPlan {
        let text = format!(
            "[device]\ntwin = \"qlc-nvme\"\n[[network]]\nlink = \"100Mbit/s\"\n[[vm]]\nname = \"relay\"\nlab = \"qemu\"\n{vm}\n\
             [[vm.task]]\nname = \"log\"\nop = \"write\"\nblock = \"4KiB\"\nrate = \"100/s\"\ntarget = {{ latency = \"60ms\" }}\n\
             [[vm.nic]]\nmac = \"52:54:00:00:00:0a\"\ntap = \"t\"\n\
             [[vm.flow]]\nname = \"trip\"\ndirection = \"tx\"\nframe = \"200B\"\nrate = \"100/s\"\ntarget = {{ latency = \"2ms\" }}\n\
             [[vm.path]]\nname = \"all\"\n{path}\n"
        );
        let host = HostSpec::parse("test", &text).unwrap_or_else(|e| panic!("{e}"));
        let spec = host.single().unwrap().clone();
        plan(&spec, &device(), &Options::default())
            .with_networks(plan_networks(&host, Path::new("/run")))
            .with_paths(&host, Nanos::from_millis(4), guaranteed)
    }

    const CPU: &str = "cpu = { budget = \"4ms\", period = \"20ms\" }";

    #[test]
    fn bounds_add() {
        let path = "path = [\"net\", \"cpu\", \"disk\"]\nwork = \"300us\"\ntarget = { latency = \"200ms\" }";
        let plan = planned(CPU, path);
        let found = &plan.paths[0];
        let parts: Vec<_> = found.parts.iter().map(|p| (p.part, p.of.as_str(), p.bound.unwrap())).collect();
        // Log entries after a time without CPU come at once, and are written one by one.
        let due = plan.tasks[0].from_intended.unwrap();
        assert!(due.stall == Nanos::from_millis(32) && due.bound > plan.tasks[0].bound.unwrap(), "{due:?}");
        let (flow, task) = (plan.networks[0].flows[0].bound.unwrap(), due.bound);
        // A tick's debt and the work are more than one budget: 3 (P - Q) without the CPU.
        let cpu = Nanos::from_micros(52_300);
        assert_eq!(parts, [("net", "trip", flow), ("cpu", "work of 300us", cpu), ("disk", "log", task)]);
        assert_eq!(found.bound, Some(Nanos(flow.0 + cpu.0 + task.0)));
        assert!(found.met && found.remedy.is_none() && plan.feasible, "{found:?}");
        // Each alone meets a target that all together do not.
        let sum = flow.0 + cpu.0 + task.0;
        let short = planned(CPU, &path.replace("200ms", &format!("{}ns", sum - 1)));
        let found = &short.paths[0];
        assert!(!found.met && !short.feasible, "{found:?}");
        let remedy = found.remedy.as_deref().unwrap();
        let largest =
            if task > cpu { "disk (log): a shorter target" } else { "cpu (work of 300us): a shorter period" };
        assert!(remedy.contains("1ns more than the target") && remedy.contains(largest), "{remedy}");
    }

    #[test]
    fn a_contract_that_the_host_does_not_guarantee_bounds_no_part() {
        let path = "path = [\"net\", \"cpu\"]\nwork = \"300us\"\ntarget = { latency = \"10s\" }";
        assert!(planned(CPU, path).paths[0].met);
        let plan = planned_on(CPU, path, &|vm| Err(format!("{} is split over threads", vm.name)));
        let found = &plan.paths[0];
        assert_eq!((found.bound, found.met, plan.feasible), (None, false, false), "{found:?}");
        let remedy = found.remedy.as_deref().unwrap();
        assert_eq!(remedy, "cpu (work of 300us): relay is split over threads");
    }

    #[test]
    fn frames_that_come_at_once_after_a_time_without_cpu_are_counted_or_have_no_bound() {
        let path = "path = [\"cpu\", \"net\"]\nwork = \"300us\"\ntarget = { latency = \"10s\" }";
        // 400 us without a CPU are no longer than the stall of the I/O domain's thread.
        assert!(planned("cpu = { budget = \"19800us\", period = \"20ms\" }", path).paths[0].met);
        let plan = planned(CPU, path);
        let found = &plan.paths[0];
        assert_eq!((found.bound, found.met), (None, false), "{found:?}");
        let remedy = found.remedy.as_deref().unwrap();
        let says = "without its CPU for 32ms the VM may then send 5 frames at once";
        assert!(remedy.contains(says), "{remedy}");
    }

    #[test]
    fn more_messages_than_the_budget_carries_have_no_bound() {
        let path = "path = [\"net\", \"cpu\"]\nwork = \"2ms\"\ntarget = { latency = \"10s\" }";
        // 100/s of 2 ms are all of the 4 ms in 20 ms, and no more.
        assert!(planned(CPU, path).paths[0].met);
        let plan = planned(CPU, &path.replace("2ms", "2001us"));
        let found = &plan.paths[0];
        assert_eq!((found.bound, found.met, plan.feasible), (None, false, false), "{found:?}");
        let remedy = found.remedy.as_deref().unwrap();
        assert!(
            remedy.contains("100/s of 2.001ms take 20.01% of a CPU, and the contract has 20%"),
            "{remedy}"
        );
    }

    #[test]
    fn a_part_without_a_promise_is_named_with_its_remedy() {
        let path = "path = [\"cpu\", \"net\"]\nwork = \"1ms\"\ntarget = { latency = \"1s\" }";
        let plan = planned("", path);
        let found = &plan.paths[0];
        assert_eq!((found.bound, found.met, plan.feasible), (None, false, false));
        let remedy = found.remedy.as_deref().unwrap();
        assert!(remedy.starts_with("cpu (work of 1ms): the VM has no CPU contract: add cpu"), "{remedy}");
        assert!(found.parts[1].bound.is_some(), "{found:?}");
    }
}
