//! Reservations with which a spec's targets hold in the worst case.

use rtvirtio_capacity::{
    DeviceModel, Options, Reserve, Shape, has_closed_loop_target, longest_stall, promised, replenishment,
    reserve, tightest,
};
use rtvirtio_sched::Policy;
use rtvirtio_sched::bound::{Flow, admit, bounds};
use rtvirtio_spec::{Spec, Vm};
use rtvirtio_units::{Bytes, Nanos, Ratio};
use serde::Serialize;

use crate::caps::{Caps, caps, held_back};
use crate::disk_refusal::{keep_rates, reason};
use crate::intended::Reserved;
use crate::network::NetworkPlan;
use crate::promise::{PathPromise, TaskPromise};

/// A VM's reservation of the device, and its caps.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmPlan {
    pub vm: String,
    /// Reservation of device time; `None` for a VM that shares the unreserved rest.
    pub reserve: Option<Reserve>,
    /// Whether the reservation covers real-time requests only, because a task without a target in
    /// the same VM would use it up: protected tasks must run with `ionice -c1`.
    pub urgent_only: bool,
    /// Reason for no reservation of a VM with targets.
    pub refused: Option<String>,
    /// Sum of the depths of its tasks.
    pub depth: u32,
    /// Caps of its traffic, as keys of its disk.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub caps: Vec<String>,
    /// Reasons for limits of its traffic that are no caps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub uncapped: Vec<String>,
}

/// Nothing bounds a flush: it takes as long as the device needs for what all VMs have in its cache.
const UNBOUNDED_FLUSH: &str = "its writes are synced, and no schedule bounds a flush: it takes as long as the drive needs for what all VMs have in its cache (nothing \
     on a drive whose cache is safe); `rtvirtio verify` shows what it gets";

/// A task is promised no latency where its VM's own cap may delay requests without a bound.
const HELD_BACK: &str = "its VM's own traffic limit is below what its tasks may ask for, so nothing bounds how long it holds a request back: raise the limit, or give \
     every task of the VM a rate within it";

/// The plan of an I/O domain: reservations of one device, and of networks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DomainPlan {
    /// Largest piece into which requests are split.
    pub quantum: Bytes,
    /// Largest number of pieces submitted to the device and not completed.
    pub window: u32,
    /// Smallest window at full throughput; a smaller window costs throughput.
    pub full_window: u32,
    /// The vCPU stall that bursts are sized for, where no CPU contract makes it longer.
    pub catch_up: Nanos,
    /// Reserved share of the device.
    pub reserved: Ratio,
    /// VMs in the spec's order.
    pub vms: Vec<VmPlan>,
    /// All tasks in the spec's order, once for each target.
    pub tasks: Vec<TaskPromise>,
    /// The networks of the spec.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub networks: Vec<NetworkPlan>,
    /// The paths through network, CPU and disk.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<PathPromise>,
    /// Whether every target holds in the worst case, those of flows and paths too.
    pub feasible: bool,
    #[serde(skip)]
    pub device: DeviceModel,
    /// The group whose members may connect to the sockets of disks and ports.
    #[serde(skip)]
    pub socket_group: Option<String>,
}

impl DomainPlan {
    /// Adds the plans of networks.
    #[must_use]
    pub fn with_networks(mut self, networks: Vec<NetworkPlan>) -> Self {
        self.feasible &= networks.iter().all(|network| network.feasible);
        self.networks = networks;
        self
    }

    /// Lets the members of a group connect to all sockets.
    #[must_use]
    pub fn with_socket_group(mut self, group: Option<&str>) -> Self {
        self.socket_group = group.map(str::to_owned);
        for port in self.networks.iter_mut().flat_map(|network| &mut network.config.ports) {
            port.socket_group.clone_from(&self.socket_group);
        }
        self
    }
}

struct Candidate {
    shape: Shape,
    vms: Vec<VmPlan>,
    flows: Vec<Flow>,
}

/// Chooses reservations, window and quantum.
///
/// The most urgent VM is admitted first; a VM that is not admitted with the more urgent ones gets
/// no reservation, and a reason. Of all shapes, the one that admits most VMs is chosen: with the
/// largest window (a smaller one costs throughput), then with the longest stall to catch up from,
/// then with the largest pieces, then with the largest pieces of discards.
#[must_use]
pub fn plan(spec: &Spec, device: &DeviceModel, options: &Options) -> DomainPlan {
    let mut best: Option<Candidate> = None;
    let shapes = Shape::all(device, options);
    for shape in &shapes {
        let this = evaluate(spec, device, options, *shape);
        let admitted = |t: &Candidate| t.vms.iter().filter(|vm| vm.refused.is_none()).count();
        if best.as_ref().is_none_or(|b| admitted(&this) > admitted(b)) {
            best = Some(this);
        }
    }
    let full = device.window.max(1);
    // There is at least one shape.
    let best = best.unwrap_or_else(|| evaluate(spec, device, options, shapes[0]));
    assemble(spec, device, options, full, best)
}

fn evaluate(spec: &Spec, device: &DeviceModel, options: &Options, shape: Shape) -> Candidate {
    let device = &shape.device(device);
    let known = device.with_window(shape.window);
    let free = |vm: usize| Flow {
        vm,
        rate: 0.0,
        burst: 0.0,
        piece: device.max_piece_cost(shape.quantum),
        outstanding: None,
        deadline: None,
        weight: 100,
    };
    // A guest may exceed its declared demand, so every VM also counts as a neighbour without a
    // reservation.
    let mut flows: Vec<Flow> = (0..spec.vms.len()).map(free).collect();
    let mut vms: Vec<VmPlan> = spec.vms.iter().map(unreserved).collect();
    let mut urgent: Vec<(usize, Nanos)> =
        spec.vms.iter().enumerate().filter_map(|(i, vm)| Some((i, tightest(vm)?))).collect();
    urgent.sort_by_key(|(_, target)| *target);
    for (i, target) in urgent {
        let vm = &spec.vms[i];
        let Some(deadline) = target.0.checked_sub(options.guest.0).filter(|d| *d > 0).map(Nanos) else {
            vms[i].refused =
                Some(format!("the guest's own part takes {} of the {target} already", options.guest));
            continue;
        };
        let reserve = reserve(vm, device, options, shape, deadline);
        let flow = Flow {
            rate: reserve.share.0,
            burst: reserve.burst.0 as f64,
            deadline: Some(reserve.deadline),
            ..free(i)
        };
        flows.push(flow);
        let admitted = admit(&known, &flows).map_err(|e| reason(spec, i, reserve.deadline, &e));
        match admitted.and_then(|()| keep_rates(spec, device, shape, &flows)) {
            Ok(()) => {
                vms[i].reserve = Some(reserve);
                vms[i].urgent_only = vm.tasks.iter().any(|t| promised(t).is_empty());
            }
            Err(why) => {
                flows.pop();
                vms[i].refused = Some(why);
            }
        }
    }
    Candidate { shape, vms, flows }
}

fn unreserved(vm: &Vm) -> VmPlan {
    let depth: u32 = vm.tasks.iter().map(|t| t.depth).sum();
    let depth = depth.clamp(1, 65_536);
    let Caps { lines: caps, refused: uncapped } = caps(vm);
    VmPlan { vm: vm.name.clone(), reserve: None, urgent_only: false, refused: None, depth, caps, uncapped }
}

fn assemble(spec: &Spec, device: &DeviceModel, options: &Options, full: u32, best: Candidate) -> DomainPlan {
    let device = &best.shape.device(device);
    let known = device.with_window(best.shape.window);
    let of_flows = bounds(Policy::Edf, &known, &best.flows);
    let bound_of = |vm: usize| {
        let flow = best.flows.iter().position(|f| f.vm == vm && f.deadline.is_some())?;
        let wait = match best.vms[vm].reserve {
            Some(r) if has_closed_loop_target(&spec.vms[vm]) => {
                replenishment(&spec.vms[vm], device, best.shape, &r).0
            }
            _ => 0,
        };
        of_flows[flow].map(|b| Nanos(b.0.saturating_add(wait).saturating_add(options.guest.0)))
    };
    let all: Vec<Reserve> = best.vms.iter().filter_map(|vm| vm.reserve).collect();
    let reserved: f64 = all.iter().map(|r| r.share.0).fold(0.0, |a, b| a + b);
    let counted = Reserved { device, shape: best.shape, all, guest: options.guest };
    let counted = &counted;
    let tasks = spec.vms.iter().enumerate().flat_map(|(i, vm)| {
        let held = held_back(vm, longest_stall(vm, best.shape.catch_up));
        let bound = bound_of(i).zip(held).map(|(bound, held)| Nanos(bound.0.saturating_add(held.0)));
        let goals = vm.tasks.iter().flat_map(|task| task.goals().map(move |target| (task, target)));
        goals.map(move |(task, target)| {
            let flush = target.and(task.sync).map(|_| UNBOUNDED_FLUSH.to_owned());
            let unpromised =
                flush.or_else(|| (target.is_some() && held.is_none()).then(|| HELD_BACK.to_owned()));
            let bound = target.and(bound).filter(|_| unpromised.is_none());
            let met = target.map(|t| bound.is_some_and(|b| b <= t.latency));
            let from_intended =
                bound.and_then(|bound| counted.intended_bound((vm, task), bound, held.unwrap_or_default()));
            let (vm, task) = (vm.name.clone(), task.name.clone());
            TaskPromise { vm, task, target, bound, met, from_intended, unpromised }
        })
    });
    let tasks: Vec<TaskPromise> = tasks.collect();
    DomainPlan {
        quantum: best.shape.quantum,
        window: best.shape.window,
        full_window: full,
        catch_up: best.shape.catch_up,
        reserved: Ratio(reserved / f64::from(device.parallel.min(best.shape.window).max(1))),
        feasible: tasks.iter().all(|t| t.met != Some(false)),
        vms: best.vms,
        tasks,
        networks: Vec::new(),
        paths: Vec::new(),
        device: device.clone(),
        socket_group: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{device, spec, task, with};
    use rtvirtio_capacity::DeviceError;

    #[test]
    fn demand_is_reserved_and_the_rest_is_shared() {
        let flood = task("flood", "depth = 32");
        let spec = spec(&[("a", &with(1_000, "20ms")), ("b", &with(500, "40ms")), ("c", &flood)]);
        let plan = plan(&spec, &device(), &Options::default());
        assert!(plan.feasible, "{plan:?}");
        let a = plan.vms[0].reserve.unwrap();
        // 1000 reads of 63 us + 4.3 us, plus 10 %.
        assert!((a.share.0 - 1.1 * 0.0673).abs() < 0.001, "{a:?}");
        let c = &plan.vms[2];
        assert_eq!((c.reserve, c.urgent_only, &c.refused, c.depth), (None, false, &None, 32));
        assert_eq!(plan.tasks[2].met, None);
        assert!(plan.tasks[0].bound.unwrap() <= Nanos::from_millis(20));
        // It includes the pause of garbage collection.
        assert!(plan.tasks[0].bound.unwrap() > Nanos::from_millis(8));
    }

    #[test]
    fn the_most_urgent_is_admitted_first_and_refusals_have_reasons() {
        let open = |target: &str| with(9_000, target).replace("rate =", "loop = \"open\"\nrate =");
        let spec = spec(&[("late", &open("60ms")), ("first", &open("30ms"))]);
        let plan = plan(&spec, &device(), &Options::default());
        assert!(!plan.feasible);
        assert!(plan.vms[1].reserve.is_some(), "{plan:?}");
        let why = plan.vms[0].refused.as_deref().unwrap();
        assert!(why.contains("% of the device are reserved"), "{why}");
        assert_eq!((plan.tasks[0].met, plan.tasks[1].met), (Some(false), Some(true)));
        // Shorter than the device's own stalls: no plan meets it.
        let strict = super::plan(&self::spec(&[("a", &with(100, "5ms"))]), &device(), &Options::default());
        let why = strict.vms[0].refused.as_deref().unwrap();
        assert!(why.contains("8ms for its own stalls"), "{why}");
    }

    #[test]
    fn a_tight_target_shrinks_window_and_pieces_before_it_is_refused() {
        let mut device = device();
        device.latency = Nanos(0);
        device.window = 8;
        let loose = plan(&spec(&[("a", &with(100, "20ms"))]), &device, &Options::default());
        assert_eq!((loose.window, loose.quantum), (8, Bytes::from_kib(64)));
        let tight = plan(&spec(&[("a", &with(100, "700us"))]), &device, &Options::default());
        assert!(tight.feasible, "{tight:?}");
        assert!(tight.window < 8 || tight.quantum < Bytes::from_kib(64), "{tight:?}");
        assert!(
            plan(&spec(&[("a", &with(100, "50us"))]), &device, &Options::default()).vms[0].refused.is_some()
        );
    }

    #[test]
    fn a_task_of_one_request_at_a_time_is_promised_no_more_than_it_can_make() {
        let of = |rate: u32| plan(&spec(&[("a", &with(rate, "60ms"))]), &device(), &Options::default());
        let quantum = |plan: &DomainPlan| (plan.feasible, plan.quantum);
        // Each read waits for a write of the largest piece: 465 us of 64 KiB, 136 us of 16 KiB.
        assert_eq!(quantum(&of(1_000)), (true, Bytes::from_kib(64)));
        assert_eq!(quantum(&of(3_000)), (true, Bytes::from_kib(16)));
        let all = of(9_000);
        assert!(!all.feasible && all.tasks[0].met == Some(false), "{all:?}");
        assert!(all.vms[0].refused.as_ref().unwrap().contains("a/t makes one request at a time"), "{all:?}");
    }

    #[test]
    fn a_task_without_a_rate_makes_its_vm_wait_for_the_reservation() {
        let mut device = device();
        device.latency = Nanos(0);
        let closed = task("c", "depth = 4\ntarget = { percentile = \"p99.99\", latency = \"20ms\" }");
        let plan = plan(&spec(&[("a", &(with(100, "20ms") + &closed))]), &device, &Options::default());
        assert!(plan.feasible, "{plan:?}");
        let r = plan.vms[0].reserve.unwrap();
        assert_eq!(r.deadline, Nanos::from_millis(10));
        // The burst is replenished within half of the target, and no sooner than the share allows;
        // both tasks wait for it, and the closed loop gets only what the other leaves.
        let wait = r.burst.0 as f64 / (r.share.0 - 0.0067);
        assert!(wait <= 10.1e6, "{wait}");
        assert!(plan.tasks.iter().all(|t| t.bound.unwrap().0 as f64 > wait), "{plan:?}");
    }

    #[test]
    fn a_smaller_window_costs_throughput() {
        let text = include_str!("../../../control/learn/data/qlc-nvme.profile.json");
        let profile: rtvirtio_model::Profile = serde_json::from_str(text).unwrap();
        let device = DeviceModel::measured(&profile).unwrap();
        let one = device.limited_to(1);
        assert!(one.cost.read.base_ns > device.cost.read.base_ns * 11 / 10, "{one:?} {device:?}");
        assert_eq!(device.limited_to(device.window * 2).cost.read, device.limited_to(64).cost.read);
        let unknown = rtvirtio_model::Profile { write: Vec::new(), ..profile };
        let e = DeviceModel::measured(&unknown).unwrap_err();
        assert!(matches!(&e, DeviceError::NoWrites { device } if *device == unknown.device), "{e}");
        assert!(e.to_string().contains("--destroy-data"), "{e}");
    }

    #[test]
    fn every_target_is_held_against_the_bound_of_its_task() {
        let two = "rate = \"500/s\"\ntargets = [{ percentile = \"p99\", latency = \"20ms\" }, { latency = \"80ms\" }]";
        let both = plan(&spec(&[("a", &task("t", two))]), &device(), &Options::default());
        let one = plan(&spec(&[("a", &with(500, "20ms"))]), &device(), &Options::default());
        let rows: Vec<_> = both.tasks.iter().map(|t| (t.target.unwrap().latency, t.bound, t.met)).collect();
        let bound = one.tasks[0].bound;
        let ms = Nanos::from_millis;
        assert_eq!(rows, [(ms(20), bound, Some(true)), (ms(80), bound, Some(true))]);
        // The shortest latency is the deadline: a bound of every request bounds each percentile.
        assert_eq!(both.vms[0].reserve, one.vms[0].reserve);
    }

    #[test]
    fn a_flush_is_not_promised_and_its_vm_keeps_its_other_promises() {
        let sync =
            "sync = \"fdatasync\"\nrate = \"100/s\"\ntarget = { percentile = \"p99\", latency = \"10ms\" }";
        let log = task("log", sync).replace("\"read\"", "\"write\"");
        let both = plan(&spec(&[("a", &(with(500, "20ms") + &log))]), &device(), &Options::default());
        let alone = plan(&spec(&[("a", &with(500, "20ms"))]), &device(), &Options::default());
        assert_eq!((both.tasks[0].met, both.tasks[1].met), (Some(true), Some(false)));
        assert!(both.tasks[1].bound.is_none() && both.tasks[1].unpromised.is_some() && !both.feasible);
        assert_eq!(both.vms[0].reserve, alone.vms[0].reserve);
        assert!(both.vms[0].urgent_only && !alone.vms[0].urgent_only, "its writes would use it up");
        // Nothing is reserved for flushes alone.
        let only = plan(&spec(&[("a", &log)]), &device(), &Options::default());
        assert!(only.vms[0].reserve.is_none() && !only.feasible, "{only:?}");
        // The sum of no floating-point numbers is -0.0.
        assert_eq!(only.reserved.to_string(), "0%");
    }

    #[test]
    fn a_flush_is_charged_as_measured() {
        let text = include_str!("../../../control/learn/data/qlc-nvme.profile.json");
        let mut profile: rtvirtio_model::Profile = serde_json::from_str(text).unwrap();
        let unknown = DeviceModel::measured(&profile).unwrap().cost.flush_ns;
        let mut point = profile.write[0].clone();
        point.iops = rtvirtio_units::Iops(400.0);
        profile.sync = vec![point];
        let known = DeviceModel::measured(&profile).unwrap().cost.flush_ns;
        // 2.5 ms for both, less the write.
        assert!(unknown < 1_000_000 && (2_000_000..2_500_000).contains(&known), "{unknown} {known}");
    }

    #[test]
    fn a_vm_with_targets_and_a_flood_needs_guest_priorities() {
        let both = with(500, "20ms") + &task("flood", "depth = 32");
        let plan = plan(&spec(&[("a", &both)]), &device(), &Options::default());
        assert!(plan.vms[0].urgent_only);
        assert!(plan.feasible);
    }

    #[test]
    fn a_vm_that_is_held_back_by_its_own_limit_has_that_in_its_bound() {
        let spec = |traffic: &str| {
            let vm = "[[vm]]\nname = \"a\"\nlab = \"qemu\"\n";
            let text = format!("[device]\ntwin = \"qlc-nvme\"\n{vm}{traffic}\n{}", with(500, "60ms"));
            rtvirtio_spec::parse("test", &text).unwrap()
        };
        let of = |traffic: &str| plan(&spec(traffic), &device(), &Options::default());
        let free = of("");
        let bound = |plan: &DomainPlan| plan.tasks[0].bound.map(|bound| bound.0);
        // A burst as large as what the guest submits at once after a stall costs nothing.
        let roomy = of("traffic.read = { rate = \"1000/s\", burst = 100 }");
        assert_eq!(bound(&roomy), bound(&free));
        let lines = ["read_cap = { requests = \"1000/s\", requests_burst = 100 }"];
        assert_eq!(roomy.vms[0].caps, lines);
        // Of the requests submitted at once all but one wait for 1 ms each.
        let tight = of("traffic.read = { rate = \"1000/s\" }");
        let at_once = 500.0 * tight.catch_up.as_secs_f64() + 1.0;
        let held = ((at_once - 1.0) * 1e6) as u64;
        assert!(bound(&tight).unwrap().abs_diff(bound(&free).unwrap() + held) <= 1, "{tight:?}");
        // Bytes and requests together: the slower of the two counts, in one line of the file.
        let both = of("traffic.read = { rate = \"100MB/s\", iops = \"1000/s\" }");
        assert_eq!(bound(&both), bound(&tight));
        let line = "read_cap = { bytes = \"100000000B/s\", bytes_burst = \"65536B\", requests = \"1000/s\", requests_burst = 1 }";
        assert_eq!(both.vms[0].caps, [line]);
        let below = of("traffic.read = { rate = \"499/s\" }");
        assert_eq!((bound(&below), below.feasible), (None, false));
        assert!(below.tasks[0].unpromised.as_ref().unwrap().contains("traffic limit"), "{below:?}");
        // Another direction is no matter.
        assert_eq!(bound(&of("traffic.write = { rate = \"1/s\" }")), bound(&free));
    }

    #[test]
    fn the_bound_of_a_held_back_vm_holds_in_simulation() {
        let limited = "traffic.read = { rate = \"800/s\", burst = 2 }";
        let text = format!(
            "[device]\ntwin = \"qlc-nvme\"\n[[vm]]\nname = \"a\"\nlab = \"qemu\"\n{limited}\n{}\
             [[vm]]\nname = \"b\"\nlab = \"qemu\"\ntraffic.read = {{ rate = \"50MB/s\", iops = \"300/s\" }}\n{}",
            with(500, "60ms"),
            task("flood", "depth = 32")
        );
        let spec = rtvirtio_spec::parse("test", &text).unwrap();
        let plan = plan(&spec, &device(), &Options::default());
        assert!(plan.feasible, "{plan:?}");
        let config = plan.sched().unwrap();
        assert!(config.vms.iter().all(|vm| vm.caps[0] != rtvirtio_sched::Cap::default()), "{config:?}");
        let mut simulation =
            crate::Simulation::new(&spec, &plan, &config, crate::Traffic::Worst, true, 1).unwrap();
        simulation.run(Nanos::from_millis(20_000)).unwrap();
        let outcome = &simulation.outcomes()[0];
        assert!(outcome.n > 1_000 && outcome.longest <= plan.tasks[0].bound.unwrap(), "{outcome:?} {plan:?}");
        let flood = &simulation.outcomes()[1];
        // 50 MB/s alone are 763 reads of the largest piece; as many writes go with them.
        assert!((400.0..=620.0).contains(&flood.rate.0), "{flood:?}");
    }
}
