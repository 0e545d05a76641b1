//! The reason for each setting: its effect, and the prediction without it.

use rtvirtio_units::{Bytes, Nanos, Ratio};

use crate::convert::config_of;
use crate::evaluate::{Evaluator, Outcome, Problem};
use crate::types::RATE_KEPT;
use crate::{BfqTunable, Knob, LimitKind, Setting};

/// Fills in the reasons of `settings`, which change the start into `found`.
pub(crate) fn explain(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    found: &Outcome,
    settings: &mut [Setting],
) {
    let reasons: Vec<String> = settings
        .iter()
        .map(|s| {
            let effect = effect(problem, s);
            match without(problem, evaluator, found, settings, s) {
                Some(loss) => format!("{effect}; {loss}"),
                None => effect,
            }
        })
        .collect();
    for (s, reason) in settings.iter_mut().zip(reasons) {
        s.reason = reason;
    }
}

/// Effect of a setting, whatever the load.
fn effect(problem: &Problem<'_>, s: &Setting) -> String {
    let v = &s.value;
    match &s.knob {
        Knob::HostElevator => match v.as_str() {
            "bfq" => "BFQ decides whose requests go first".to_owned(),
            "none" => "requests go to the device at once, none is held back".to_owned(),
            "mq-deadline" => "requests go by deadline, in batches of one direction".to_owned(),
            _ => "requests are held back only when latency grows".to_owned(),
        },
        Knob::HostBfq(t) => tunable(*t, v, "VM"),
        Knob::HostIoCost(_) => "io.cost divides the device by what requests cost".to_owned(),
        Knob::VmIoWeight { vm } => format!("weight {v} sets the share of {vm} under io.cost"),
        Knob::VmIoLatency { vm } => format!("other VMs are held back while {vm} takes longer than {v} us"),
        Knob::VmWeight { vm } => format!("weight {v} sets the share of {vm} while VMs compete"),
        Knob::VmLimit { vm, limit } => {
            let what = match limit {
                LimitKind::ReadBps => "bytes read",
                LimitKind::WriteBps => "bytes written",
                LimitKind::ReadIops => "reads",
                LimitKind::WriteIops => "writes",
            };
            if v == "max" {
                format!("{vm} is no longer limited in {what}")
            } else if problem.spec.vms.iter().any(|v| v.name == *vm && v.tightest_target().is_some()) {
                format!(
                    "the device cannot carry all declared rates: {vm} is given up for the others and held to {v} {what} per second"
                )
            } else {
                format!("{vm} has no target and is held to {v} {what} per second")
            }
        }
        Knob::GuestElevator { vm } => {
            format!("{v} inside {vm} leaves the order to the host, which sees all VMs")
        }
        Knob::GuestBfq { vm, tunable: t } => format!("inside {vm}: {}", tunable(*t, v, "task")),
    }
}

fn tunable(t: BfqTunable, v: &str, unit: &str) -> String {
    match t {
        BfqTunable::SliceIdle if v == "0" => {
            format!("BFQ no longer keeps the device idle for one {unit} while others wait")
        }
        BfqTunable::SliceIdle => {
            format!("BFQ waits {v} ms, no longer, for the next request of the {unit} it serves")
        }
        BfqTunable::TimeoutSync => format!("no {unit} keeps the device longer than {v} ms at a time"),
        BfqTunable::LowLatency if v == "0" => {
            "no weight raising, which lengthens slices and overrides weights".to_owned()
        }
        BfqTunable::LowLatency => "weight raising on".to_owned(),
        BfqTunable::MaxBudget if v == "0" => "BFQ chooses the budget from the speed of the device".to_owned(),
        BfqTunable::MaxBudget => {
            let size = v.parse::<u64>().map_or_else(|_| v.to_owned(), |s| Bytes(s * 512).to_string());
            format!("no {unit} moves more than {size} at a time")
        }
        BfqTunable::StrictGuarantees => format!("strict_guarantees={v}"),
    }
}

/// The task with the greatest loss without the setting, with numbers; `None` when the prediction
/// does not depend on it.
fn without(
    problem: &Problem<'_>,
    evaluator: &mut Evaluator<'_>,
    found: &Outcome,
    settings: &[Setting],
    dropped: &Setting,
) -> Option<String> {
    let rest: Vec<Setting> =
        settings.iter().filter(|s| !same_knob(&s.knob, &dropped.knob)).cloned().collect();
    let config = config_of(problem.spec, &problem.options.start, &rest).ok()?;
    let with = {
        let j = evaluator.judge(&found.config)?;
        (j.latency.clone(), j.kept.clone())
    };
    let lacking = evaluator.judge(&config)?;
    let loss = |i: usize, t: f64| {
        Problem::margin(t, with.0[i], with.1[i]) - Problem::margin(t, lacking.latency[i], lacking.kept[i])
    };
    let (i, target) = problem
        .targets
        .iter()
        .enumerate()
        .filter_map(|(i, t)| t.map(|t| (i, t)))
        .filter(|(i, _)| !found.given_up.contains(&problem.vm_of[*i]))
        .max_by(|a, b| loss(a.0, a.1).total_cmp(&loss(b.0, b.1)))?;
    if loss(i, target) < 1e-3 {
        return None;
    }
    let (vm, task, _) = problem.spec.goals().nth(i)?;
    let name = format!("{}/{}", vm.name, task.name);
    if lacking.kept[i] < RATE_KEPT && lacking.kept[i] < with.1[i] {
        return Some(format!("without it {name} would get only {} of its rate", Ratio(lacking.kept[i])));
    }
    let ns = |v: f64| Nanos(v as u64).to_string();
    let (without, with) = (ns(lacking.latency[i]), ns(with.0[i]));
    // A difference below the printed digits is left out.
    (without != with).then(|| {
        format!("without it {name} is predicted at {without} instead of {with} (target {})", ns(target))
    })
}

/// Whether two settings belong to one knob, as the limits that make up one VM's cap do.
fn same_knob(a: &Knob, b: &Knob) -> bool {
    match (a, b) {
        (Knob::VmLimit { vm: x, .. }, Knob::VmLimit { vm: y, .. }) => x == y,
        _ => a == b,
    }
}
