//! Features of learned models: derived physical quantities, not raw knobs alone.
//!
//! The paper's network reads the raw values of its Table I. Ours also reads the forecasts of the
//! slice model and of the paper's equations, the utilisation, and the neighbours; logarithms where
//! a quantity acts by ratio. A model then learns where the formulas are wrong instead of learning
//! queueing from nothing, which takes far fewer points.

use rtvirtio_spec::Spec;

use crate::analytical::Analytical;
use crate::device::Device;
use crate::flow::Flow;
use crate::load::{flows, is_guest};
use crate::slice::{BACKLOG, HORIZON, Slice};
use crate::types::{Config, Elevator, Forecast, Profile};
use crate::{ModelError, TailModel};

/// Name of each feature, in order, with what it is for reports of features outside the measured
/// range.
pub(super) const FEATURES: [(&str, &str); 37] = [
    ("ln_slice", "predicted latency"),
    ("ln_slice_other_vms", "wait for other VMs"),
    ("ln_slice_own_vm", "wait for the VM's own tasks"),
    ("ln_slice_device", "time in the device"),
    ("slice_kept", "share of the rate that is kept"),
    ("ln_analytical", "latency by the paper's equations"),
    ("ln_requests", "requests in a run"),
    ("idles", "idling"),
    ("elevator_none", "elevator none"),
    ("elevator_mq_deadline", "elevator mq-deadline"),
    ("elevator_kyber", "elevator kyber"),
    ("slice_idle_ms", "slice_idle"),
    ("ln_timeout_ms", "timeout_sync"),
    ("low_latency", "low_latency"),
    ("ln_budget", "max_budget"),
    ("vms", "number of VMs"),
    ("tasks_of_vm", "tasks of the VM"),
    ("tasks", "tasks in all"),
    ("ln_rate", "rate"),
    ("ln_service", "service time"),
    ("write_share", "share of writes"),
    ("ln_think", "think time"),
    ("load", "load"),
    ("load_of_vm", "load of the VM"),
    ("share", "share of the weights"),
    ("ln_share_ratio", "weight relative to the heaviest"),
    ("ln_flood", "neighbour's queue"),
    ("flood_writes", "neighbour's writes"),
    ("bursts", "bursts"),
    ("ln_neighbour_cap", "neighbour's limit"),
    ("own_cap", "the VM's own limit"),
    ("guest", "guest"),
    ("largest_cost_ln", "size of the largest request"),
    ("weights_differ", "unequal weights"),
    ("ln_base", "service time of the device"),
    ("write_load", "load by writes"),
    ("offered", "load with the neighbour's limit"),
];

/// Names of the features, in order. A model file lists them, so that one of another version is
/// refused.
pub const NAMES: [&str; WIDTH] = {
    let (mut names, mut i) = ([""; WIDTH], 0);
    while i < WIDTH {
        names[i] = FEATURES[i].0;
        i += 1;
    }
    names
};

/// Index of `ln_slice`, ln(tail in s) by the slice model over a run.
pub const LN_SLICE: usize = 0;

/// Index of `slice_kept`, the share of the declared rate that is kept by the slice model, 0 to 1.
pub const SLICE_KEPT: usize = 4;

/// Number of features per row.
pub const WIDTH: usize = FEATURES.len();

/// Smallest latency or share whose logarithm is taken, in s: far below any I/O.
const TINY: f64 = 1e-7;

/// Largest n that counts: a percentile that n cannot resolve is the maximum, which grows with n.
const RESOLVED: f64 = 1e4;

/// Feature rows, one per task in spec order, with the slice forecasts that they are built on.
/// `seconds` is the length of the run whose tail is predicted.
pub fn features(
    profile: &Profile,
    spec: &Spec,
    config: &Config,
    seconds: f64,
) -> Result<(Vec<[f64; WIDTH]>, Vec<Forecast>), ModelError> {
    let slice = Slice.forecast_tasks(profile, spec, config)?;
    // The paper's equations cover BFQ only; other elevators get the value of BFQ without idling.
    let mut as_bfq = config.clone();
    as_bfq.elevator = Elevator::Bfq;
    if config.elevator != Elevator::Bfq {
        as_bfq.bfq.slice_idle.0 = 0;
    }
    let paper = Analytical::default().forecast_tasks(profile, spec, &as_bfq)?;
    let device = Device::new(profile, config.elevator == Elevator::Bfq)?;
    let flows = flows(spec, config, &device);
    let common = Common::new(spec, config, &flows);
    let base = device.read.base;
    let rows = (0..flows.len())
        .map(|i| row(spec, config, &flows, i, &common, (&slice[i], &paper[i]), (seconds, base)))
        .collect();
    Ok((rows, slice))
}

/// Features that all tasks of a configuration have in common.
struct Common {
    load: f64,
    write_load: f64,
    load_of: Vec<f64>,
    weights: f64,
    heaviest: f64,
    flood: f64,
    flood_writes: f64,
    bursts: f64,
    neighbour_cap: f64,
    largest_cost: f64,
}

impl Common {
    fn new(spec: &Spec, config: &Config, flows: &[Flow]) -> Self {
        let mut c = Self {
            load: 0.0,
            write_load: 0.0,
            load_of: vec![0.0; spec.vms.len()],
            weights: config.vms.iter().map(|v| f64::from(v.weight)).sum(),
            heaviest: config.vms.iter().map(|v| f64::from(v.weight)).fold(1.0, f64::max),
            flood: 0.0,
            flood_writes: 0.0,
            bursts: 0.0,
            neighbour_cap: 0.0,
            largest_cost: 0.0,
        };
        for (f, (_, task)) in flows.iter().zip(spec.tasks()) {
            c.largest_cost = c.largest_cost.max(f.cost);
            if f.declared {
                c.load += f.rate * f.cost;
                c.load_of[f.vm] += f.rate * f.cost;
                c.write_load += f.rate * f.cost * f.op.write_share();
                continue;
            }
            // Device time of the requests in flight.
            c.flood += f.burst() * f.cost;
            c.flood_writes = c.flood_writes.max(f.op.write_share());
            c.bursts = if task.busy_period().is_some() { 1.0 } else { c.bursts };
            c.neighbour_cap += if f.flood { 1.0 } else { f.rate * f.cost };
        }
        c
    }
}

fn ln(v: f64) -> f64 {
    v.max(TINY).ln()
}

fn term(f: &Forecast, name: &str) -> f64 {
    f.terms.iter().filter(|t| t.name == name).map(|t| t.latency_ns.as_secs_f64()).sum()
}

fn row(
    spec: &Spec,
    config: &Config,
    flows: &[Flow],
    i: usize,
    c: &Common,
    (slice, paper): (&Forecast, &Forecast),
    (seconds, base): (f64, f64),
) -> [f64; WIDTH] {
    let (flow, vm) = (&flows[i], &config.vms[flows[i].vm]);
    let flag = |b: bool| f64::from(u8::from(b));
    let is = |e: Elevator| flag(config.elevator == e);
    let bfq = config.elevator == Elevator::Bfq;
    let idle = if bfq { config.bfq.slice_idle.as_millis_f64() } else { 0.0 };
    let weight = f64::from(vm.weight);
    let requests = (flow.rate * seconds).clamp(1.0, RESOLVED);
    let of_vm = spec.vms[flow.vm].tasks.len();
    let budget = config.bfq.max_budget.map_or(8192.0, rtvirtio_units::Bytes::as_kib_f64);
    // Lateness of a saturated task grows until the run ends; the slice model counts it over a run
    // of its own length.
    let late = term(slice, BACKLOG);
    let in_run = slice.latency_ns.as_secs_f64() - late + late * seconds / HORIZON;
    [
        ln(in_run),
        ln(term(slice, "other-vms")),
        ln(term(slice, "own-vm")),
        ln(term(slice, "device")),
        slice.rate_kept,
        ln(paper.latency_ns.as_secs_f64()),
        requests.ln(),
        flag(bfq && (idle > 0.0 || config.bfq.strict_guarantees)),
        is(Elevator::None),
        is(Elevator::MqDeadline),
        is(Elevator::Kyber),
        idle,
        if bfq { ln(config.bfq.timeout_sync.as_millis_f64()) } else { 0.0 },
        flag(bfq && config.bfq.low_latency),
        if bfq { budget.max(1.0).ln() } else { 0.0 },
        spec.vms.len() as f64,
        of_vm as f64,
        flows.len() as f64,
        flow.rate.max(1e-3).ln(),
        ln(flow.service),
        flow.op.write_share(),
        // With a think time below slice_idle a queue keeps the device.
        ln(1.0 / flow.rate.max(1e-3) - flow.service),
        c.load,
        c.load_of[flow.vm],
        weight / c.weights.max(1.0),
        (weight / c.heaviest).ln(),
        ln(c.flood),
        c.flood_writes,
        c.bursts,
        ln(c.neighbour_cap),
        flow.through_cap * vm.cap.map_or(0.0, |_| 1.0),
        flag(is_guest(&spec.vms[flow.vm])),
        ln(c.largest_cost),
        flag(config.vms.windows(2).any(|w| w[0].weight != w[1].weight)),
        ln(base),
        c.write_load,
        // Load of all together, with a limited neighbour at its limit: from 1 on some task starves.
        c.load + c.neighbour_cap,
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testkit;

    #[test]
    fn rows_are_finite_and_react_to_what_they_name() {
        let (profile, spec, config) = testkit::example();
        let (rows, slice) = features(&profile, &spec, &config, 10.0).unwrap();
        assert_eq!(rows.len(), slice.len());
        assert!(rows.iter().flatten().all(|v| v.is_finite()));
        let at = |name: &str| NAMES.iter().position(|n| *n == name).unwrap();
        assert_eq!((at("ln_slice"), at("slice_kept")), (LN_SLICE, SLICE_KEPT));
        let mut other = config.clone();
        other.elevator = Elevator::None;
        let (none, _) = features(&profile, &spec, &other, 10.0).unwrap();
        assert_eq!((rows[0][at("elevator_none")], none[0][at("elevator_none")]), (0.0, 1.0));
        assert_eq!((rows[0][at("idles")], none[0][at("idles")]), (1.0, 0.0));
        let (longer, _) = features(&profile, &spec, &config, 100.0).unwrap();
        assert!(longer[0][at("ln_requests")] > rows[0][at("ln_requests")]);
    }

    #[test]
    fn names_are_unique() {
        let mut names = NAMES.to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), WIDTH);
    }
}
