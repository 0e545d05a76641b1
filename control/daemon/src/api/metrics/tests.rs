use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_blame::{Cause, CauseKind};
use rtvirtio_measure::Verdict;
use rtvirtio_measure::late::LateCauses;
use rtvirtio_measure::observe::{Observed, Tail};
use rtvirtio_measure::waits::{WaitFor, WaitKind, WaitRow};
use rtvirtio_units::{Iops, Percentile};
use rtvirtio_vmm::disk_stats::Direction;
use rtvirtio_workflow::covered::InForce;
use rtvirtio_workflow::uncovered::{Uncovered, UncoveredKind};

use super::*;
use crate::observe::{
    AgeingObservation, DiskObservation, DiskSource, LimiterKind, LimiterObservation, StallsObservation,
    TargetObservation, ThreadObservation, VmObservation, WaitsObservation,
};

fn empty() -> Snapshot {
    serde_json::from_value(serde_json::json!({
        "schema": "rtvirtio.service.v1", "version": "1", "pid": 1, "mode": "auto", "faults": [], "problems": [], "vms": [],
    }))
    .unwrap()
}

/// Text with every metric that is ever exported.
fn everything() -> String {
    let snapshot: Snapshot = serde_json::from_value(serde_json::json!({
        "schema": "rtvirtio.service.v1", "version": "1", "pid": 1, "mode": "auto", "faults": [], "problems": [],
        "vms": [{ "name": "plc", "state": "in_force", "processes": [], "drift": [], "targets": [] }],
        "arrivals": [{ "vm": "mover", "state": "reserved", "until": "2026-01-01T00:00:00Z" }],
        "plan": { "state": "partial", "vms": ["plc"],
            "predictions": [{ "vm": "plc", "task": "t", "percentile": "p99.99", "latency_ns": 2_000_000, "bound_ns": 3_000_000 }],
            "unplanned": [{ "device": "/dev/sdb", "why": "no profile", "vms": ["hist"], "is_held": false }] },
    }))
    .unwrap();
    let (percentile, latency_ns) = (Percentile(99.99), Nanos(1_000));
    let directions = vec![Observed {
        direction: Direction::Read,
        n: 1,
        rate: Iops(1.0),
        mean_size: None,
        mean_ns: None,
        depth: None,
        tails: vec![Tail { percentile, latency_ns }],
        longest_ns: None,
    }];
    let disk = DiskObservation {
        source: DiskSource::Qemu,
        id: "d".to_owned(),
        file: None,
        seconds: 1.0,
        directions,
        histogram: None,
    };
    let target = TargetObservation {
        task: "t".to_owned(),
        percentile,
        latency_ns,
        verdict: Verdict::Met,
        why: String::new(),
        n: 1,
        exceedances: 0,
        rate: Iops(1.0),
        seconds: 1.0,
        late: Some(LateCauses { told: 4, host: 1, disk: Some(1), other: 2 }),
        late_unseen: None,
        causes: Some(vec![Cause {
            kind: CauseKind::CpuQuota,
            share: Some(0.5),
            evidence: String::new(),
            remedy: String::new(),
        }]),
        causes_unread: Vec::new(),
    };
    let vm = VmObservation {
        disks: vec![disk],
        cpu_used: Some(0.5),
        cpu_delay: Some(0.1),
        throttled_per_s: Some(0.1),
        threads: vec![ThreadObservation {
            tid: 7,
            role: "vcpu 0".to_owned(),
            cpu_used: 0.5,
            cpu_delay: Some(0.1),
        }],
        limiters: vec![LimiterObservation {
            kind: LimiterKind::IoDomainCap,
            name: "read cap of d".to_owned(),
            limit: Some(100.0),
            used: Some(50.0),
            hits_per_s: Some(2.0),
            unseen: None,
            dimension: None,
            cgroup: None,
        }],
        targets: vec![target],
        looked_s: Some(1.0),
        ..VmObservation::default()
    };
    let row = WaitRow {
        vm: "plc".to_owned(),
        device: "/dev/sda".to_owned(),
        kind: WaitKind::Estimate,
        seconds: 10.0,
        waited_s: Some(5.0),
        own: 0.2,
        idle: None,
        neighbours: vec![WaitFor { vm: "hist".to_owned(), share: 0.6 }],
        others: 0.2,
    };
    let mut seen = Observation {
        vms: [("plc".to_owned(), vm)].into(),
        waits: WaitsObservation { rows: vec![row], ..WaitsObservation::default() },
        ..Observation::default()
    };
    seen.host.pressure.insert("io".to_owned(), 0.1);
    seen.host.stolen = Some(0.1);
    let stalls = StallsObservation { count: 1, share: 0.01, longest_ns: Nanos(1) };
    seen.host.stalls = Some(stalls);
    seen.host.standstills.insert("/dev/sda".to_owned(), stalls);
    let aged = AgeingObservation {
        state: DeviceAge::Slower,
        factor: 2.0,
        ratios: [("reads", 1.9)].into(),
        standstill_ns: None,
        since_s: Some(600.0),
        few: 0,
        waited: 0,
        alarm: Some("slower".to_owned()),
        is_followed: false,
        vms: vec!["plc".to_owned()],
    };
    seen.host.ageing.insert("/dev/sda".to_owned(), aged.clone());
    let unclear = AgeingObservation { state: DeviceAge::Unclear, alarm: None, ..aged };
    seen.host.ageing.insert("/dev/sdb".to_owned(), unclear);
    let of = Uncovered {
        vm: "plc".to_owned(),
        kind: UncoveredKind::WriteBack,
        disk: Some("/images/plc.img".into()),
        text: "through the page cache".to_owned(),
    };
    seen.uncovered.all.push(InForce { of, void: vec!["limit on writes for sda".to_owned()] });
    seen.uncovered.looked_s = Some(1.0);
    text_of(&snapshot, &seen, &Counters::default()).unwrap()
}

/// Rules of `promtool check metrics` on names, types, units and labels that can be broken here.
#[test]
fn every_metric_is_named_as_prometheus_asks() {
    let text = everything();
    let mut families: BTreeMap<&str, (&str, bool, BTreeSet<&str>)> = BTreeMap::new();
    for line in text.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "HELP", name, help] => families.entry(name).or_default().1 = !help.is_empty(),
            ["#", "TYPE", name, kind] => families.entry(name).or_default().0 = kind,
            _ => {
                let (name, labels) = line.split_once('{').unwrap_or((line.split(' ').next().unwrap(), ""));
                let family = families.get_mut(name).unwrap_or_else(|| panic!("{line}: no type before it"));
                let names = labels.split("\",").filter_map(|label| label.split_once("=\"")).map(|l| l.0);
                family.2.extend(names);
            }
        }
    }
    assert!(families.len() >= 31, "{text}");
    let is_snake = |name: &str| {
        name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
            && !name.contains("__")
    };
    for (name, (kind, has_help, labels)) in families {
        assert!(has_help && is_snake(name) && name.starts_with("rtvirtio_"), "{name}");
        assert_eq!(name.ends_with("_total"), kind == "counter", "{name} is a {kind}");
        for word in name.split('_') {
            // Abbreviated and other units than base units; types; what histograms have.
            let bad = [
                "ms",
                "us",
                "ns",
                "s",
                "sec",
                "milliseconds",
                "microseconds",
                "nanoseconds",
                "minutes",
                "kb",
                "mb",
                "kilobytes",
                "percent",
                "gauge",
                "counter",
                "histogram",
                "summary",
                "bucket",
                "count",
                "sum",
            ];
            assert!(!bad.contains(&word), "{name}: {word}");
        }
        for label in labels {
            assert!(
                is_snake(label) && !["le", "quantile", "job", "instance"].contains(&label),
                "{name}{{{label}}}"
            );
        }
    }
}

/// Labels that join them in a query.
#[test]
fn predictions_and_verdicts_have_the_same_labels() {
    let text = everything();
    let labels = r#"percentile="p99.99",task="t","#;
    for name in ["target_predicted_seconds", "target_bound_seconds", "target_verdict"] {
        assert!(text.contains(&format!("rtvirtio_{name}{{{labels}")), "{name}: {text}");
    }
}

/// The dashboard for Grafana uses exported metrics only, with labels that they have.
#[test]
fn the_dashboard_shows_what_is_exported() {
    const DASHBOARD: &str = include_str!("../../../../../packaging/grafana/rtvirtio.json");
    let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
    let text = everything();
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut seen = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let (expr, legend) = (target["expr"].as_str().unwrap(), target["legendFormat"].as_str().unwrap());
            let names: Vec<&str> =
                expr.split(|c| !is_word(c)).filter(|w| w.starts_with("rtvirtio_")).collect();
            assert!(!names.is_empty(), "{expr}");
            seen += names.len();
            for name in names {
                assert!(text.contains(&format!("# TYPE {name} ")), "{name} of {expr} is not exported");
                let line =
                    text.lines().find(|line| line.starts_with(&format!("{name}{{"))).unwrap_or_default();
                for label in legend.split("{{").skip(1).filter_map(|rest| rest.split("}}").next()) {
                    assert!(line.contains(&format!("{label}=\"")), "{name} has no label {label}");
                }
            }
        }
    }
    assert!(seen >= 25, "{seen}");
}

/// An alert on a name that is not exported, or but for a state that does not exist, says nothing.
#[test]
fn the_alerts_of_the_guide_ask_for_what_is_exported() {
    const GUIDE: &str = include_str!("../../../../../docs/guide/service.md");
    let text = everything();
    let rules: Vec<&str> = GUIDE.lines().filter_map(|line| line.strip_prefix("    expr: ")).collect();
    assert!(rules.len() >= 6, "{rules:?}");
    for rule in rules {
        let name = rule.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').next().unwrap();
        assert!(name == "up" || text.contains(&format!("# TYPE {name} ")), "{rule}");
    }
    let states = GUIDE.split("state!~\"").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
    for state in states.split('|') {
        assert!(serde_json::from_value::<crate::VmState>(state.into()).is_ok(), "{state}");
    }
}

#[test]
fn a_missed_target_has_its_causes_or_that_none_is_seen() {
    let text = everything();
    let line = r#"rtvirtio_target_cause{cause="cpu_quota",percentile="p99.99",task="t",vm="plc"} 1"#;
    assert!(text.contains(line), "{text}");
    let judged = |causes| {
        let json = serde_json::json!({ "task": "t", "percentile": 99.0, "latency_ns": 1, "verdict": "missed", "why": "",
            "n": 1, "exceedances": 1, "rate": 1.0, "seconds": 1.0, "causes": causes });
        cause_words(&serde_json::from_value(json).unwrap())
    };
    assert_eq!(judged(serde_json::json!([])), ["not_seen"]);
    assert_eq!(judged(serde_json::Value::Null), Vec::<String>::new());
}

#[test]
fn a_slower_device_is_a_metric_and_one_that_is_not_known_has_none() {
    let text = everything();
    assert!(text.contains("rtvirtio_device_slower{device=\"/dev/sda\"} 1"), "{text}");
    assert!(!text.contains("rtvirtio_device_slower{device=\"/dev/sdb\"}"), "{text}");
    let ratio = "rtvirtio_device_service_time_ratio{device=\"/dev/sda\",direction=\"reads\"} 1.9";
    assert!(text.contains(ratio), "{text}");
}

#[test]
fn waiting_is_shown_by_neighbour_in_seconds_per_second() {
    let text = everything();
    let value = |neighbour: &str| {
        let labels = format!("device=\"/dev/sda\",kind=\"estimate\",neighbour=\"{neighbour}\",vm=\"plc\"");
        let line = text.lines().find(|l| l.starts_with("rtvirtio_vm_wait_ratio{") && l.contains(&labels));
        line.unwrap_or_else(|| panic!("{labels}: {text}")).rsplit(' ').next().unwrap().parse::<f64>().unwrap()
    };
    assert_eq!((value("hist"), value("(own)"), value("(others)")), (0.3, 0.1, 0.1));
}

#[test]
fn what_no_setting_acts_on_is_a_metric_and_not_looked_at_is_not_none() {
    let text = everything();
    let line = "rtvirtio_uncovered{disk=\"/images/plc.img\",reason=\"write_back\",vm=\"plc\"} 1";
    assert!(text.contains(line) && text.contains("rtvirtio_uncovered_known 1"), "{text}");
    let none = text_of(&empty(), &Observation::default(), &Counters::default()).unwrap();
    assert!(none.contains("rtvirtio_uncovered_known 0"), "{none}");
}
