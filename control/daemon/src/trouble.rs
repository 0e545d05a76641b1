//! VMs and their targets as lines, the most trouble first: what is missed, why, and who waits for
//! whom.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use rtvirtio_blame::Cause;
use rtvirtio_measure::Verdict;
use rtvirtio_measure::waits::{WaitKind, WaitRow};
use rtvirtio_units::{Nanos, Percentile};
use serde::{Deserialize, Serialize};

use crate::observe::{ObservedTargets, ObservedVmTargets, TargetObservation, WaitsObservation};
use crate::snapshot::{Snapshot, TargetSnapshot, VmSnapshot, VmState};

/// Line of one target, or of a VM without targets.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TroubleLine {
    pub vm: String,
    /// State of its contract.
    pub state: VmState,
    /// Target; `None` for a VM without one.
    pub target: Option<TargetSnapshot>,
    /// Largest p99 of the VM's reads and writes over the last minutes; `None` with too few
    /// requests.
    pub p99_ns: Option<Nanos>,
    /// Verdict over the last minutes; `None` where the target is not observed.
    pub verdict: Option<Verdict>,
    /// Reason of the verdict, or why there is none.
    pub why: Option<String>,
    /// Share of the requests that were late.
    pub late: Option<f64>,
    /// Causes of a missed target, the most certain first; empty where none is seen, `None` where
    /// it is not missed.
    pub causes: Option<Vec<Cause>>,
    /// Names of counters that could not be read.
    pub causes_unread: Vec<String>,
    /// Neighbour that the VM waited for longest; `None` where it waited for none, or that is not
    /// known.
    pub waits_for: Option<LongestWait>,
}

/// Neighbour that a VM waited for longest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LongestWait {
    /// Name of the neighbour.
    pub vm: String,
    /// Share of the VM's waiting time on the device, 0 to 1.
    pub share: f64,
    /// Path of the device, or its name in the I/O domain.
    pub device: String,
    /// Accuracy of the share.
    pub kind: WaitKind,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LineOrder {
    /// The most trouble first.
    #[default]
    Trouble,
    /// By the name of the VM.
    Vm,
    /// The largest p99 first.
    P99,
}

impl LineOrder {
    /// The order after this one, in turn.
    #[must_use]
    pub fn next(self) -> Self {
        match self {
            Self::Trouble => Self::Vm,
            Self::Vm => Self::P99,
            Self::P99 => Self::Trouble,
        }
    }
}

/// Lines of all VMs of the service, in an order.
#[must_use]
pub fn lines(
    status: &Snapshot,
    seen: &ObservedTargets,
    waits: &WaitsObservation,
    order: LineOrder,
) -> Vec<TroubleLine> {
    let waits = longest_waits(&waits.rows);
    let of_vm = |vm: &VmSnapshot| -> Vec<TroubleLine> {
        let seen = seen.vms.get(&vm.name);
        let waits_for = waits.get(vm.name.as_str()).cloned();
        let base = TroubleLine {
            vm: vm.name.clone(),
            state: vm.state,
            target: None,
            p99_ns: seen.and_then(p99),
            verdict: None,
            why: vm.why.clone(),
            late: None,
            causes: None,
            causes_unread: Vec::new(),
            waits_for,
        };
        if vm.targets.is_empty() {
            return vec![base];
        }
        vm.targets.iter().map(|target| line(&base, vm, target, seen)).collect()
    };
    let mut all: Vec<TroubleLine> = status.vms.iter().flat_map(of_vm).collect();
    all.sort_by(|a, b| compare(a, b, order));
    all
}

fn line(
    base: &TroubleLine,
    vm: &VmSnapshot,
    target: &TargetSnapshot,
    seen: Option<&ObservedVmTargets>,
) -> TroubleLine {
    let is_it = |of: &&TargetObservation| of.task == target.task && of.percentile == target.percentile;
    let judged = seen.and_then(|seen| seen.targets.iter().find(is_it));
    let base = TroubleLine { target: Some(target.clone()), ..base.clone() };
    let Some(judged) = judged else {
        let unseen = seen.and_then(|seen| seen.disks_unseen.clone());
        let why = unseen.or_else(|| vm.why.clone()).unwrap_or_else(|| match seen {
            None => "it does not run, or was not sampled yet".to_owned(),
            Some(_) => "no verdict: it has several disks, or two samples are not there yet".to_owned(),
        });
        return TroubleLine { why: Some(why), ..base };
    };
    TroubleLine {
        verdict: Some(judged.verdict),
        why: Some(judged.why.clone()),
        late: (judged.n > 0).then(|| judged.exceedances as f64 / judged.n as f64),
        causes: judged.causes.clone(),
        causes_unread: judged.causes_unread.clone(),
        ..base
    }
}

/// Largest p99 of a VM's reads and writes.
fn p99(seen: &ObservedVmTargets) -> Option<Nanos> {
    let directions = seen.disks.iter().flat_map(|disk| &disk.directions);
    let tails = directions.filter(|of| of.direction != "flush").flat_map(|of| &of.tails);
    tails.filter(|tail| tail.percentile == Percentile(99.0)).map(|tail| tail.latency_ns).max()
}

/// The longest wait of each VM, by waiting time where that is known.
fn longest_waits(rows: &[WaitRow]) -> BTreeMap<&str, LongestWait> {
    let mut longest: BTreeMap<&str, (f64, LongestWait)> = BTreeMap::new();
    for row in rows {
        let Some(one) = row.longest() else { continue };
        let waited = row.waited_s.unwrap_or(0.0) * one.share;
        if longest.get(row.vm.as_str()).is_some_and(|(other, _)| *other >= waited) {
            continue;
        }
        let (vm, device) = (one.vm.clone(), row.device.clone());
        longest.insert(&row.vm, (waited, LongestWait { vm, share: one.share, device, kind: row.kind }));
    }
    longest.into_iter().map(|(vm, (_, wait))| (vm, wait)).collect()
}

/// Place of a line by trouble: what is missed, contracts that are not as they should be, what is
/// not known, what is met, and what does not run.
fn trouble(line: &TroubleLine) -> u8 {
    match (line.verdict, line.state) {
        (Some(Verdict::Missed), _) => 0,
        (_, VmState::Failed | VmState::Refused | VmState::Drift | VmState::Unplanned | VmState::Aged) => 1,
        (_, VmState::Off) => 5,
        (Some(Verdict::Unproven), _) => 2,
        (None, VmState::Unknown | VmState::Held | VmState::Waiting | VmState::Pending) => 2,
        (None, _) if line.target.is_some() => 3,
        (Some(Verdict::Met) | None, _) => 4,
    }
}

fn compare(a: &TroubleLine, b: &TroubleLine, order: LineOrder) -> Ordering {
    let late = |line: &TroubleLine| line.late.unwrap_or(0.0);
    let first = match order {
        LineOrder::Trouble => trouble(a).cmp(&trouble(b)).then(late(b).total_cmp(&late(a))),
        LineOrder::Vm => Ordering::Equal,
        LineOrder::P99 => b.p99_ns.cmp(&a.p99_ns),
    };
    let task = |line: &TroubleLine| line.target.as_ref().map(|target| target.task.clone());
    first.then_with(|| a.vm.cmp(&b.vm)).then_with(|| task(a).cmp(&task(b)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn all(order: LineOrder) -> Vec<TroubleLine> {
        let target = json!([{ "task": "t", "percentile": 99.0, "latency_ns": 10_000_000 }]);
        let vm = |name: &str, state: &str, targets: &serde_json::Value| json!({ "name": name, "state": state, "processes": [], "drift": [], "targets": targets });
        let status = json!({ "schema": "rtvirtio.service.v1", "version": "1", "pid": 1, "mode": "auto", "faults": [], "problems": [],
            "vms": [vm("a-off", "off", &target), vm("b-met", "in_force", &target), vm("c-missed", "in_force", &target),
                vm("d-drift", "drift", &json!([])), vm("e-unseen", "observed", &target), vm("f-worse", "in_force", &target)] });
        let judged = |verdict: &str, late: u64, p99: u64| {
            json!({ "targets": [{ "task": "t", "percentile": 99.0, "latency_ns": 10_000_000, "verdict": verdict, "why": "w", "n": 100,
                "exceedances": late, "rate": 1.0, "seconds": 60.0, "causes": if verdict == "missed" { json!([]) } else { json!(null) } }],
              "disks": [{ "id": "d", "directions": [{ "direction": "flush", "n": 1, "tails": [{ "percentile": 99.0, "latency_ns": 9_999_999_999_u64 }] },
                { "direction": "read", "n": 100, "tails": [{ "percentile": 50.0, "latency_ns": 1 }, { "percentile": 99.0, "latency_ns": p99 }] }] }] })
        };
        let seen = json!({ "vms": { "b-met": judged("met", 0, 5), "c-missed": judged("missed", 20, 90), "f-worse": judged("missed", 60, 70),
            "e-unseen": { "disks_unseen": "set `monitor_of_libvirt = true`" } } });
        let row = |device: &str, waited: f64, neighbour: &str| {
            json!({ "vm": "c-missed", "device": device, "kind": "estimate", "seconds": 300.0, "waited_s": waited, "own": 0.1, "idle": null,
                "neighbours": [{ "vm": neighbour, "share": 0.9 }], "others": 0.0 })
        };
        let waits = json!({ "time": "", "rows": [row("/dev/a", 1.0, "x"), row("/dev/b", 9.0, "bulk"), row("/dev/c", 2.0, "y")], "unseen": [] });
        let read = serde_json::from_value;
        lines(
            &read(status).unwrap(),
            &serde_json::from_value(seen).unwrap(),
            &serde_json::from_value(waits).unwrap(),
            order,
        )
    }

    fn names(order: LineOrder) -> Vec<String> {
        all(order).into_iter().map(|line| line.vm).collect()
    }

    #[test]
    fn the_most_trouble_first() {
        let wanted = ["f-worse", "c-missed", "d-drift", "e-unseen", "b-met", "a-off"];
        assert_eq!(names(LineOrder::Trouble), wanted);
        assert_eq!(names(LineOrder::Vm), ["a-off", "b-met", "c-missed", "d-drift", "e-unseen", "f-worse"]);
        assert_eq!(names(LineOrder::P99)[..3], ["c-missed", "f-worse", "b-met"]);
        let all: Vec<LineOrder> =
            std::iter::successors(Some(LineOrder::Trouble), |o| Some(o.next())).take(4).collect();
        assert_eq!(all[0], all[3]);
    }

    #[test]
    fn a_line_has_tail_verdict_causes_and_the_longest_wait() {
        let all = all(LineOrder::Trouble);
        let of = |vm: &str| all.iter().find(|line| line.vm == vm).unwrap();
        let missed = of("c-missed");
        assert_eq!(
            (missed.verdict, missed.p99_ns, missed.late),
            (Some(Verdict::Missed), Some(Nanos(90)), Some(0.2))
        );
        assert_eq!(missed.causes, Some(Vec::new()));
        let wait = missed.waits_for.as_ref().unwrap();
        assert_eq!(
            (wait.vm.as_str(), wait.device.as_str(), wait.kind),
            ("bulk", "/dev/b", WaitKind::Estimate)
        );
        assert_eq!((&of("b-met").causes, &of("b-met").waits_for), (&None, &None));
        let unseen = of("e-unseen");
        assert_eq!(unseen.verdict, None);
        assert!(unseen.why.as_ref().unwrap().contains("monitor_of_libvirt"), "{unseen:?}");
        assert!(of("a-off").why.as_ref().unwrap().contains("does not run"));
    }
}
