//! Comparison of `docs/reference/openapi.json` with answers that have every field.

use std::collections::BTreeMap;
use std::path::PathBuf;

use rtvirtio_apply::{KnobState, KnobStatus};
use rtvirtio_blame::{Cause, CauseKind};
use rtvirtio_fleet::Inventory;
use rtvirtio_kernel::ProcessId;
use rtvirtio_measure::Verdict;
use rtvirtio_measure::late::LateCauses;
use rtvirtio_measure::observe::{Observed, Tail};
use rtvirtio_measure::waits::{WaitFor, WaitKind, WaitRow};
use rtvirtio_planner::replan::{Change, Effect};
use rtvirtio_spec::Criticality;
use rtvirtio_testkit::openapi::{differences, vague};
use rtvirtio_units::{Bytes, Iops, Nanos, Percentile};
use rtvirtio_vmm::disk_stats::Direction;
use rtvirtio_workflow::covered::InForce;
use rtvirtio_workflow::uncovered::{Uncovered, UncoveredKind};
use serde::Serialize;
use serde_json::{Value, json};

use super::routes::OPENAPI;
use crate::arrivals::{ArrivalAnswer, ArrivalSnapshot, ArrivalState};
use crate::config::Mode;
use crate::history::{Event, EventKind};
use crate::host::SettingChange;
use crate::observe::{
    AgeingObservation, DeviceAge, DiskObservation, DiskSource, HistogramObservation, HostObservation,
    LimiterKind, LimiterObservation, MemoryObservation, Observation, StallsObservation, TargetObservation,
    ThreadObservation, UncoveredObservation, VmObservation, WaitsObservation,
};
use crate::observed::{DriftSnapshot, PredictionSnapshot};
use crate::plan::{PlanSnapshot, PlanState, ProposalSnapshot, UnplannedDevice};
use crate::snapshot::{
    FaultSnapshot, PlacementSnapshot, SNAPSHOT_SCHEMA, Snapshot, TargetSnapshot, VmSnapshot, VmState,
};

fn description() -> Value {
    serde_json::from_str(OPENAPI).unwrap()
}

fn text() -> String {
    "text".to_owned()
}

fn texts() -> Vec<String> {
    vec![text()]
}

fn some() -> Option<String> {
    Some(text())
}

fn drift() -> DriftSnapshot {
    DriftSnapshot { knob: text(), path: text(), wanted: text(), found: text() }
}

fn change() -> SettingChange {
    SettingChange { knob: text(), path: text(), old: None, new: text() }
}

fn plan() -> PlanSnapshot {
    let prediction = PredictionSnapshot {
        vm: text(),
        task: text(),
        percentile: "p99.99".to_owned(),
        latency_ns: Nanos(1),
        bound_ns: None,
    };
    let effect = Effect { vm: text(), criticality: Criticality::High, change: Change::Misses };
    PlanSnapshot {
        state: PlanState::Partial,
        why: some(),
        vms: texts(),
        assumes: some(),
        reason: some(),
        since: some(),
        given_up: texts(),
        warnings: texts(),
        predictions: vec![prediction],
        drift: vec![drift()],
        yielded: texts(),
        unplanned: vec![UnplannedDevice {
            device: text(),
            why: text(),
            remedy: some(),
            vms: texts(),
            is_held: true,
        }],
        proposal: Some(ProposalSnapshot {
            reason: text(),
            changes: vec![change()],
            effects: vec![effect],
            given_up: texts(),
            reasons: texts(),
        }),
    }
}

fn vm() -> VmSnapshot {
    VmSnapshot {
        name: text(),
        state: VmState::Drift,
        why: some(),
        criticality: Some(Criticality::Medium),
        file: some(),
        domain: some(),
        uri: some(),
        overrides: some(),
        contract: some(),
        written: some(),
        waits_for: some(),
        looked_s: Some(0.5),
        processes: vec![ProcessId { pid: 1, start_time: 2 }],
        drift: vec![drift()],
        targets: vec![TargetSnapshot { task: text(), percentile: Percentile(99.0), latency_ns: Nanos(1) }],
    }
}

fn arrival() -> ArrivalSnapshot {
    ArrivalSnapshot {
        vm: text(),
        domain: some(),
        uuid: some(),
        state: ArrivalState::Refused,
        why: some(),
        until: text(),
    }
}

fn snapshot() -> Snapshot {
    let inventory = Inventory {
        total: 1000,
        reserved: 0,
        min_unit: 1,
        max_unit: 1000,
        step_size: 1,
        allocation_ratio: 1.0,
    };
    Snapshot {
        schema: SNAPSHOT_SCHEMA.to_owned(),
        version: text(),
        pid: 1,
        mode: Mode::Auto,
        contracts: Some(PathBuf::from("/contracts.d")),
        libvirt: some(),
        vms: vec![vm()],
        plan: Some(plan()),
        placement: Some(PlacementSnapshot {
            url: text(),
            provider: text(),
            is_dry: false,
            published: some(),
            inventories: BTreeMap::from([(text(), inventory)]),
            problem: some(),
            notes: texts(),
            failures: 1,
        }),
        arrivals: vec![arrival()],
        applied_drift: vec![drift()],
        faults: vec![FaultSnapshot { file: text(), why: text() }],
        problems: texts(),
    }
}

fn observed_disk() -> DiskObservation {
    let observed = Observed {
        direction: Direction::Flush,
        n: 1,
        rate: Iops(1.5),
        mean_size: Some(Bytes(4096)),
        mean_ns: Some(Nanos(1)),
        depth: Some(0.5),
        tails: vec![Tail { percentile: Percentile(50.0), latency_ns: Nanos(1) }],
        longest_ns: Some(Nanos(1)),
    };
    DiskObservation {
        source: DiskSource::IoDomain,
        id: text(),
        file: some(),
        seconds: 60.0,
        directions: vec![observed],
        histogram: Some(HistogramObservation { limits_ns: vec![1], reads: vec![1, 0], writes: vec![0, 1] }),
    }
}

fn observed_target() -> TargetObservation {
    let causes = CauseKind::ALL.map(|kind| Cause { kind, share: None, evidence: text(), remedy: text() });
    TargetObservation {
        task: text(),
        percentile: Percentile(99.0),
        latency_ns: Nanos(1),
        verdict: Verdict::Missed,
        why: text(),
        n: 1,
        exceedances: 1,
        rate: Iops(0.5),
        seconds: 60.0,
        late: Some(LateCauses { told: 1, host: 1, disk: None, other: 0 }),
        late_unseen: some(),
        causes: Some(causes.to_vec()),
        causes_unread: texts(),
    }
}

fn observed_vm() -> VmObservation {
    VmObservation {
        at: None,
        looked_s: Some(1.0),
        disks: vec![observed_disk()],
        disks_unseen: some(),
        cpu_used: Some(0.5),
        cpu_delay: Some(0.5),
        throttled_per_s: Some(0.5),
        throttled_time: Some(0.5),
        memory: MemoryObservation { bytes_per_s: Some(0.5), unseen: some() },
        threads: vec![ThreadObservation { tid: 1, role: text(), cpu_used: 0.5, cpu_delay: None }],
        limiters: vec![LimiterObservation {
            kind: LimiterKind::Tc,
            name: text(),
            limit: Some(0.5),
            used: Some(0.5),
            hits_per_s: Some(0.5),
            unseen: some(),
            dimension: None,
            cgroup: None,
        }],
        targets: vec![observed_target()],
    }
}

fn aged() -> AgeingObservation {
    AgeingObservation {
        state: DeviceAge::Slower,
        factor: 1.5,
        ratios: BTreeMap::from([("reads", 1.5)]),
        standstill_ns: Some(Nanos(1)),
        since_s: Some(600.0),
        few: 1,
        waited: 1,
        alarm: some(),
        is_followed: true,
        vms: texts(),
    }
}

fn observation() -> Observation {
    let stalls = StallsObservation { count: 1, share: 0.5, longest_ns: Nanos(1) };
    let row = WaitRow {
        vm: text(),
        device: text(),
        kind: WaitKind::Exact,
        seconds: 60.0,
        waited_s: Some(0.5),
        own: 0.5,
        idle: Some(0.5),
        neighbours: vec![WaitFor { vm: text(), share: 0.5 }],
        others: 0.5,
    };
    let uncovered =
        Uncovered { vm: text(), kind: UncoveredKind::WriteBack, disk: Some("/d".into()), text: text() };
    Observation {
        time: text(),
        vms: BTreeMap::from([(text(), observed_vm()), ("plain".to_owned(), VmObservation::default())]),
        host: HostObservation {
            pressure: BTreeMap::from([(text(), 0.5)]),
            stolen: Some(0.5),
            stalls: Some(stalls),
            stalls_unseen: some(),
            standstills: BTreeMap::from([(text(), stalls)]),
            slow: BTreeMap::from([(text(), 1.5)]),
            ageing: BTreeMap::from([(text(), aged())]),
            ageing_unseen: vec![text()],
        },
        waits: WaitsObservation { time: text(), rows: vec![row], unseen: texts() },
        uncovered: UncoveredObservation {
            at: None,
            all: vec![InForce { of: uncovered, void: texts() }],
            has_looked: true,
            unseen: some(),
            looked_s: Some(1.0),
        },
    }
}

/// Compares an answer with the description.
fn check(operation: (&str, &str), answer: &impl Serialize) {
    let answer = serde_json::to_value(answer).unwrap();
    assert_eq!(differences(&description(), operation, 200, &answer), Vec::<String>::new());
}

#[test]
fn every_field_of_an_answer_is_described_and_every_required_one_is_there() {
    check(("get", "/v1/status"), &snapshot());
    check(("get", "/v1/vms/{vm}"), &vm());
    check(("get", "/v1/plan"), &plan());
    check(("get", "/v1/observation"), &observation());
    check(("get", "/v1/observation"), &Observation::default());
    check(("get", "/v1/waits"), &observation().waits);
    let event = Event {
        id: 1,
        time: text(),
        kind: EventKind::Changed,
        vm: some(),
        text: text(),
        changes: vec![change(), SettingChange { old: some(), ..change() }],
    };
    check(("get", "/v1/history"), &[event]);
    check(("get", "/v1/arrivals"), &[arrival()]);
    for answer in [
        ArrivalAnswer::NoContract,
        ArrivalAnswer::Reserved { vm: text(), until: text() },
        ArrivalAnswer::Counted { vm: text(), contract: text() },
        ArrivalAnswer::Observed,
    ] {
        check(("post", "/v1/arrivals"), &answer);
    }
    let knobs = [
        KnobState::InForce,
        KnobState::Original,
        KnobState::Changed { found: text() },
        KnobState::Gone { why: text() },
        KnobState::Unknown { error: text() },
    ]
    .map(|state| KnobStatus { knob: text(), path: text(), old: None, new: text(), state });
    check(("get", "/v1/vms/{vm}/settings"), &json!({ "knobs": knobs, "reason": some(), "since": some() }));
}

/// Fields that are left out where there is nothing to say are not required.
#[test]
fn a_state_at_rest_has_what_is_required() {
    let at_rest = Snapshot {
        contracts: None,
        libvirt: None,
        vms: Vec::new(),
        plan: None,
        placement: None,
        arrivals: Vec::new(),
        applied_drift: Vec::new(),
        faults: Vec::new(),
        problems: Vec::new(),
        ..snapshot()
    };
    check(("get", "/v1/status"), &at_rest);
}

/// The description itself, as an answer, is an object of any fields.
#[test]
fn no_type_of_the_description_is_left_open() {
    let open = vague(&description());
    let others: Vec<&String> = open.iter().filter(|place| !place.contains("openapi.json")).collect();
    assert!(others.is_empty(), "{others:#?}");
}
