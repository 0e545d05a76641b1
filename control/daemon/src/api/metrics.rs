//! `/metrics`: the state as Prometheus takes it, made anew for each scrape.

use std::sync::atomic::Ordering;

use prometheus::{Counter, GaugeVec, Opts, Registry, TextEncoder};

use crate::observe::Observation;
use crate::placement::PlacementSnapshot;
use crate::service::{Counters, Shared};
use crate::snapshot::Snapshot;
use crate::word;

/// The whole text.
///
/// # Errors
/// When a name or a value is refused.
pub(super) fn text(shared: &Shared) -> prometheus::Result<String> {
    text_of(&shared.snapshot(), &shared.observation(), &shared.counters)
}

fn text_of(snapshot: &Snapshot, seen: &Observation, counters: &Counters) -> prometheus::Result<String> {
    let registry = Registry::new();
    let counter = |name: &str, help: &str, value: f64| {
        let counter = Counter::new(name, help)?;
        counter.inc_by(value);
        registry.register(Box::new(counter))
    };
    let gauge = |name: &str, help: &str, labels: &[&str]| {
        let gauge = GaugeVec::new(Opts::new(name, help), labels)?;
        registry.register(Box::new(gauge.clone())).map(|()| gauge)
    };
    let counted = |of: &std::sync::atomic::AtomicU64| of.load(Ordering::Relaxed) as f64;
    counter("rtvirtio_loop_passes_total", "Passes of the loop.", counted(&counters.passes))?;
    counter(
        "rtvirtio_loop_busy_seconds_total",
        "Time that the passes of the loop took.",
        counted(&counters.pass_us) / 1e6,
    )?;
    counter("rtvirtio_loop_wakes_total", "Passes that an event asked for.", counted(&counters.wakes))?;
    counter(
        "rtvirtio_loop_reports_total",
        "Events of libvirt and of monitors that may concern a contract.",
        counted(&counters.reports),
    )?;
    counter(
        "rtvirtio_loop_report_compares_total",
        "Comparisons of every setting that these events asked for.",
        counted(&counters.report_compares),
    )?;
    gauge("rtvirtio_loop_reporters", "libvirt daemons and monitors whose events are heard.", &[])?
        .with_label_values::<&str>(&[])
        .set(counted(&counters.reporters));
    counter("rtvirtio_settings_written_total", "Settings that were written.", counted(&counters.changes))?;
    counter("rtvirtio_steps_failed_total", "Steps that were not done.", counted(&counters.failures))?;
    let info = gauge("rtvirtio_service_info", "Version and mode of the service.", &["version", "mode"])?;
    info.with_label_values(&[snapshot.version.as_str(), &word(&snapshot.mode)]).set(1.0);
    gauge("rtvirtio_contract_files_unused", "Contract files with a mistake.", &[])?
        .with_label_values::<&str>(&[])
        .set(snapshot.faults.len() as f64);
    let state = gauge(
        "rtvirtio_contract_state",
        "How the contract of a VM stands: 1 for its state.",
        &["vm", "state"],
    )?;
    let drift =
        gauge("rtvirtio_contract_drift_settings", "Settings that another program has changed.", &["vm"])?;
    for vm in &snapshot.vms {
        state.with_label_values(&[vm.name.as_str(), &word(&vm.state)]).set(1.0);
        drift.with_label_values(&[&vm.name]).set(vm.drift.len() as f64);
    }
    let plan = gauge(
        "rtvirtio_plan_state",
        "How the plan of the contracts' disks stands: 1 for its state; none without `[plan]`.",
        &["state"],
    )?;
    let unplanned = gauge(
        "rtvirtio_plan_device_unplanned",
        "Devices of the contracts that are not planned: 1 for each; nothing is promised for tasks on them.",
        &["device"],
    )?;
    if let Some(of) = &snapshot.plan {
        plan.with_label_values(&[word(&of.state)]).set(1.0);
        for device in &of.unplanned {
            unplanned.with_label_values(&[&device.device]).set(1.0);
        }
    }
    if let Some(of) = &snapshot.placement {
        published(of, &gauge)?;
        counter("rtvirtio_placement_failures_total", "Rounds that failed.", of.failures as f64)?;
    }
    observed(seen, &gauge)?;
    TextEncoder::new().encode_to_string(&registry.gather())
}

/// Makes and registers a gauge: name, help, labels.
type NewGauge<'a> = dyn Fn(&str, &str, &[&str]) -> prometheus::Result<GaugeVec> + 'a;

/// What stands in OpenStack's Placement.
fn published(of: &PlacementSnapshot, gauge: &NewGauge<'_>) -> prometheus::Result<()> {
    let is_up = of.problem.is_none() && of.published.is_some();
    let up = gauge("rtvirtio_placement_up", "Whether Placement has what this host can promise now.", &[])?;
    up.with_label_values::<&str>(&[]).set(if is_up { 1.0 } else { 0.0 });
    let at = gauge("rtvirtio_placement_published_timestamp_seconds", "When Placement last had it.", &[])?;
    if let Some(time) = of.published.as_ref().and_then(|t| t.parse::<jiff::Timestamp>().ok()) {
        at.with_label_values::<&str>(&[]).set(time.as_second() as f64);
    }
    let reserved = gauge(
        "rtvirtio_placement_reserved_ratio",
        "Share of a resource that contracts take of which Placement has no allocation.",
        &["resource_class"],
    )?;
    for (class, i) in &of.inventories {
        reserved.with_label_values(&[class]).set(f64::from(i.reserved) / f64::from(i.total.max(1)));
    }
    Ok(())
}

/// What was observed last, over its windows.
fn observed(seen: &Observation, gauge: &NewGauge<'_>) -> prometheus::Result<()> {
    let verdict = gauge(
        "rtvirtio_target_verdict",
        "Verdict of a target over the last minutes: 1 for met, missed or unproven.",
        &["vm", "task", "percentile", "verdict"],
    )?;
    let latency = gauge(
        "rtvirtio_disk_latency_seconds",
        "Latency of a VM's requests as QEMU counts them, over the last minutes; at most 12 % too high.",
        &["vm", "disk", "direction", "percentile"],
    )?;
    let requests = gauge(
        "rtvirtio_disk_requests_per_second",
        "Requests of a VM over the last minutes.",
        &["vm", "disk", "direction"],
    )?;
    let used = gauge("rtvirtio_vm_cpu_used_ratio", "CPUs that a VM's threads used.", &["vm"])?;
    let delay = gauge(
        "rtvirtio_vm_cpu_delay_ratio",
        "Time that a VM's threads were ready and waited for a CPU, per second.",
        &["vm"],
    )?;
    let hits = gauge("rtvirtio_vm_quota_hits_per_second", "How often a quota stopped a VM.", &["vm"])?;
    let memory = gauge(
        "rtvirtio_vm_memory_bytes_per_second",
        "Bytes that a VM's threads moved to and from memory; none where the CPU does not show it for the VM.",
        &["vm"],
    )?;
    let thread_delay = gauge(
        "rtvirtio_vm_thread_cpu_delay_ratio",
        "Share of the time in which a thread of a VM was ready and waited for a CPU.",
        &["vm", "thread"],
    )?;
    let limiter_hits = gauge(
        "rtvirtio_limiter_hits_per_second",
        "How often a limiter has held something of a VM up; only limiters that count it.",
        &["vm", "kind", "limiter"],
    )?;
    let limiter_used = gauge(
        "rtvirtio_limiter_used_ratio",
        "What a VM used of a limit, as a share of it.",
        &["vm", "kind", "limiter"],
    )?;
    let late = gauge(
        "rtvirtio_target_late_ratio",
        "Share of a target's late requests by what they waited for, an estimate: stalls of the host, of the disk, or neither.",
        &["vm", "task", "percentile", "cause"],
    )?;
    let waits = gauge(
        "rtvirtio_vm_wait_ratio",
        "Time per second that requests of a VM waited for a neighbour's; of an estimate that of all requests together.",
        &["vm", "device", "neighbour", "kind"],
    )?;
    let pressure =
        gauge("rtvirtio_host_pressure_ratio", "Share of the time in which some task waited.", &["resource"])?;
    let stolen = gauge(
        "rtvirtio_host_stolen_ratio",
        "Share of the CPUs that the host's hypervisor gave to others.",
        &[],
    )?;
    stalls(seen, gauge)?;
    for (vm, of) in &seen.vms {
        for thread in &of.threads {
            if let Some(value) = thread.cpu_delay {
                thread_delay.with_label_values(&[vm.as_str(), &thread.role]).set(value);
            }
        }
        for one in &of.limiters {
            let labels = [vm.as_str(), &word(&one.kind), &one.name];
            if let Some(value) = one.hits_per_s {
                limiter_hits.with_label_values(&labels).set(value);
            }
            if let Some((used, limit)) = one.used.zip(one.limit.filter(|limit| *limit > 0.0)) {
                limiter_used.with_label_values(&labels).set(used / limit);
            }
        }
        used.with_label_values(&[vm]).set(of.cpu_used);
        if let Some(value) = of.cpu_delay {
            delay.with_label_values(&[vm]).set(value);
        }
        if let Some(value) = of.throttled_per_s {
            hits.with_label_values(&[vm]).set(value);
        }
        if let Some(value) = of.memory.bytes_per_s {
            memory.with_label_values(&[vm]).set(value);
        }
        for t in &of.targets {
            let percentile = t.percentile.to_string();
            verdict.with_label_values(&[vm, &t.task, &percentile, &word(&t.verdict)]).set(1.0);
            let Some(causes) = t.late.filter(|causes| causes.told > 0) else { continue };
            for (cause, n) in
                [("host", Some(causes.host)), ("disk", causes.disk), ("other", Some(causes.other))]
            {
                let share = n.map(|n| n as f64 / causes.told as f64);
                if let Some(share) = share {
                    late.with_label_values(&[vm.as_str(), &t.task, &percentile, cause]).set(share);
                }
            }
        }
        for disk in &of.disks {
            let name = disk.file.as_ref().unwrap_or(&disk.id);
            for one in &disk.directions {
                let direction = word(&one.direction);
                requests.with_label_values(&[vm, name, &direction]).set(one.rate.0);
                for tail in &one.tails {
                    let percentile = tail.percentile.to_string();
                    let seconds = tail.latency_ns.0 as f64 / 1e9;
                    latency.with_label_values(&[vm, name, &direction, &percentile]).set(seconds);
                }
            }
        }
    }
    for row in &seen.waits.rows {
        let kind = word(&row.kind);
        let Some(waited) = row.waited_s.filter(|_| row.seconds > 0.0) else { continue };
        let named = row.neighbours.iter().map(|one| (one.vm.as_str(), one.share));
        // Names in brackets are of no VM.
        for (neighbour, share) in named.chain([("(own)", row.own), ("(others)", row.others)]) {
            let labels = [row.vm.as_str(), &row.device, neighbour, &kind];
            waits.with_label_values(&labels).set(waited * share / row.seconds);
        }
    }
    for (resource, share) in &seen.host.pressure {
        pressure.with_label_values(&[resource]).set(*share);
    }
    if let Some(share) = seen.host.stolen {
        stolen.with_label_values::<&str>(&[]).set(share);
    }
    Ok(())
}

/// How host and disks stood still, where that was watched.
fn stalls(seen: &Observation, gauge: &NewGauge<'_>) -> prometheus::Result<()> {
    let host = gauge(
        "rtvirtio_host_stalled_ratio",
        "Share of the time in which some CPU of the host stood still; watched while requests with targets come.",
        &[],
    )?;
    if let Some(stalls) = &seen.host.stalls {
        host.with_label_values::<&str>(&[]).set(stalls.share);
    }
    let disk = gauge(
        "rtvirtio_disk_stalled_ratio",
        "Share of the time in which a disk had requests and completed none, without the host's stalls.",
        &["device"],
    )?;
    for (device, stalls) in &seen.host.standstills {
        disk.with_label_values(&[device]).set(stalls.share);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use rtvirtio_measure::Verdict;
    use rtvirtio_measure::late::LateCauses;
    use rtvirtio_measure::observe::{Observed, Tail};
    use rtvirtio_measure::waits::{WaitFor, WaitKind, WaitRow};
    use rtvirtio_units::{Iops, Nanos, Percentile};
    use rtvirtio_vmm::disk_stats::Direction;

    use super::*;
    use crate::observe::{
        DiskObservation, DiskSource, LimiterKind, LimiterObservation, StallsObservation, TargetObservation,
        ThreadObservation, VmObservation, WaitsObservation,
    };

    /// Something of everything that is ever shown.
    fn everything() -> String {
        let snapshot: Snapshot = serde_json::from_value(serde_json::json!({
            "schema": "rtvirtio.service.v1", "version": "1", "pid": 1, "mode": "auto", "faults": [], "problems": [],
            "vms": [{ "name": "plc", "state": "in_force", "processes": [], "drift": [], "targets": [] }],
            "plan": { "state": "partial", "vms": ["plc"],
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
        };
        let vm = VmObservation {
            disks: vec![disk],
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
            }],
            targets: vec![target],
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
        text_of(&snapshot, &seen, &Counters::default()).unwrap()
    }

    /// What `promtool check metrics` asks of names, types, units and labels, where they can go
    /// wrong here.
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
                    let (name, labels) =
                        line.split_once('{').unwrap_or((line.split(' ').next().unwrap(), ""));
                    let family =
                        families.get_mut(name).unwrap_or_else(|| panic!("{line}: no type before it"));
                    let names = labels.split("\",").filter_map(|label| label.split_once("=\"")).map(|l| l.0);
                    family.2.extend(names);
                }
            }
        }
        assert!(families.len() >= 23, "{text}");
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

    /// The dashboard for Grafana asks for nothing that is not exported, and for labels that it has.
    #[test]
    fn the_dashboard_shows_what_is_exported() {
        const DASHBOARD: &str = include_str!("../../../../packaging/grafana/rtvirtio.json");
        let dashboard: serde_json::Value = serde_json::from_str(DASHBOARD).unwrap();
        let text = everything();
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let mut seen = 0;
        for panel in dashboard["panels"].as_array().unwrap() {
            for target in panel["targets"].as_array().unwrap() {
                let (expr, legend) =
                    (target["expr"].as_str().unwrap(), target["legendFormat"].as_str().unwrap());
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
        assert!(seen >= 12, "{seen}");
    }

    #[test]
    fn waiting_is_shown_by_neighbour_in_seconds_per_second() {
        let text = everything();
        let value = |neighbour: &str| {
            let labels =
                format!("device=\"/dev/sda\",kind=\"estimate\",neighbour=\"{neighbour}\",vm=\"plc\"");
            let line = text.lines().find(|l| l.starts_with("rtvirtio_vm_wait_ratio{") && l.contains(&labels));
            line.unwrap_or_else(|| panic!("{labels}: {text}"))
                .rsplit(' ')
                .next()
                .unwrap()
                .parse::<f64>()
                .unwrap()
        };
        assert_eq!((value("hist"), value("(own)"), value("(others)")), (0.3, 0.1, 0.1));
    }
}
