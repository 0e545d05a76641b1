//! `/metrics`: the state in Prometheus' text format, made anew for each scrape.

use std::sync::atomic::Ordering;

use prometheus::{Counter, GaugeVec, Opts, Registry, TextEncoder};
use rtvirtio_units::Nanos;

use crate::observe::{DeviceAge, Observation, TargetObservation};
use crate::plan::PlanSnapshot;
use crate::shared::{Counters, Shared};
use crate::snapshot::{PlacementSnapshot, Snapshot};
use crate::word;

/// The state in Prometheus' text format.
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
    gauge("rtvirtio_loop_reporters", "libvirt daemons and monitors whose events are received.", &[])?
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
        "State of a VM's contract: 1 for the current one.",
        &["vm", "state"],
    )?;
    let drift =
        gauge("rtvirtio_contract_drift_settings", "Settings that another program has changed.", &["vm"])?;
    let looked = gauge(
        "rtvirtio_contract_looked_seconds",
        "Age of the last check of a VM and its contract.",
        &["vm"],
    )?;
    for vm in &snapshot.vms {
        if let Some(age) = vm.looked_s {
            looked.with_label_values(&[&vm.name]).set(age);
        }
        state.with_label_values(&[vm.name.as_str(), &word(&vm.state)]).set(1.0);
        drift.with_label_values(&[&vm.name]).set(vm.drift.len() as f64);
    }
    let arrival = gauge(
        "rtvirtio_arrival_state",
        "State of the reservation for a VM that is about to arrive: 1 for the current one.",
        &["vm", "state"],
    )?;
    for of in &snapshot.arrivals {
        arrival.with_label_values(&[of.vm.as_str(), &word(&of.state)]).set(1.0);
    }
    let plan = gauge(
        "rtvirtio_plan_state",
        "State of the plan of the contracts' disks: 1 for the current one; none without `[plan]`.",
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
        predicted(of, &gauge)?;
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

/// Gauges of the latency that the plan in force predicts for each target.
fn predicted(of: &PlanSnapshot, gauge: &NewGauge<'_>) -> prometheus::Result<()> {
    let labels = &["vm", "task", "percentile"];
    let expected =
        gauge("rtvirtio_target_predicted_seconds", "Latency that the plan in force predicts.", labels)?;
    let bound = gauge(
        "rtvirtio_target_bound_seconds",
        "Predicted upper bound of a target's latency, with the host's own stalls; only of models that were learned on this host.",
        labels,
    )?;
    let seconds = |time: Nanos| time.0 as f64 / 1e9;
    for one in &of.predictions {
        let labels = [one.vm.as_str(), &one.task, &one.percentile];
        expected.with_label_values(&labels).set(seconds(one.latency_ns));
        if let Some(time) = one.bound_ns {
            bound.with_label_values(&labels).set(seconds(time));
        }
    }
    Ok(())
}

/// Gauges of what is published to OpenStack's Placement.
fn published(of: &PlacementSnapshot, gauge: &NewGauge<'_>) -> prometheus::Result<()> {
    let is_up = of.problem.is_none() && of.published.is_some();
    let up =
        gauge("rtvirtio_placement_up", "1 while Placement has the current inventory of this host.", &[])?;
    up.with_label_values::<&str>(&[]).set(if is_up { 1.0 } else { 0.0 });
    let at = gauge(
        "rtvirtio_placement_published_timestamp_seconds",
        "Time of the last publication in Placement.",
        &[],
    )?;
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

/// Gauges of the last observations, over their windows.
fn observed(seen: &Observation, gauge: &NewGauge<'_>) -> prometheus::Result<()> {
    let verdict = gauge(
        "rtvirtio_target_verdict",
        "Verdict of a target over the last minutes: 1 for met, missed or unproven.",
        &["vm", "task", "percentile", "verdict"],
    )?;
    let named = gauge(
        "rtvirtio_target_cause",
        "Cause of a missed target over the last minutes: 1 for each that is seen, or for not_seen.",
        &["vm", "task", "percentile", "cause"],
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
    let hits =
        gauge("rtvirtio_vm_quota_hits_per_second", "Number of times that a quota throttled a VM.", &["vm"])?;
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
        "Number of times that a limiter delayed a VM; only limiters that count it.",
        &["vm", "kind", "limiter"],
    )?;
    let limiter_used =
        gauge("rtvirtio_limiter_used_ratio", "Used share of a limit of a VM.", &["vm", "kind", "limiter"])?;
    let late = gauge(
        "rtvirtio_target_late_ratio",
        "Share of a target's late requests by cause, an estimate: stalls of the host, of the disk, or neither.",
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
    ageing(seen, gauge)?;
    uncovered(seen, gauge)?;
    let looked = gauge(
        "rtvirtio_vm_observed_seconds",
        "Age of the last observation of a VM's load and targets.",
        &["vm"],
    )?;
    for (vm, of) in &seen.vms {
        if let Some(age) = of.looked_s {
            looked.with_label_values(&[vm]).set(age);
        }
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
        if let Some(share) = of.cpu_used {
            used.with_label_values(&[vm]).set(share);
        }
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
            for cause in cause_words(t) {
                named.with_label_values(&[vm.as_str(), &t.task, &percentile, &cause]).set(1.0);
            }
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
        // Labels in brackets are no names of VMs.
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

/// Kinds of the causes of a missed target, `not_seen` without one; none for another verdict.
fn cause_words(target: &TargetObservation) -> Vec<String> {
    match target.causes.as_deref() {
        None => Vec::new(),
        Some([]) => vec!["not_seen".to_owned()],
        Some(causes) => causes.iter().map(|cause| word(&cause.kind)).collect(),
    }
}

/// Gauges of I/O on which no setting in force acts.
fn uncovered(seen: &Observation, gauge: &NewGauge<'_>) -> prometheus::Result<()> {
    let parts = gauge(
        "rtvirtio_uncovered",
        "I/O of a VM on which no setting in force acts: 1 for each part.",
        &["vm", "disk", "reason"],
    )?;
    for one in &seen.uncovered.all {
        let disk = one.of.disk.as_ref().map_or_else(String::new, |disk| disk.display().to_string());
        parts.with_label_values(&[one.of.vm.as_str(), &disk, &word(&one.of.kind)]).set(1.0);
    }
    let known = gauge(
        "rtvirtio_uncovered_known",
        "1 if uncovered I/O is known; with 0 a missing metric of it means nothing.",
        &[],
    )?;
    let is_known = seen.uncovered.unseen.is_none() && seen.uncovered.looked_s.is_some();
    known.with_label_values::<&str>(&[]).set(if is_known { 1.0 } else { 0.0 });
    Ok(())
}

/// Gauges of devices against their profiles.
fn ageing(seen: &Observation, gauge: &NewGauge<'_>) -> prometheus::Result<()> {
    let ratio = gauge(
        "rtvirtio_device_service_time_ratio",
        "Time of requests of a device as a multiple of that in its profile, over the last windows that could tell.",
        &["device", "direction"],
    )?;
    let slower = gauge(
        "rtvirtio_device_slower",
        "1 for a device that is slower than its profile, 0 for one that is not; none while that is not known.",
        &["device"],
    )?;
    for (device, of) in &seen.host.ageing {
        for (direction, value) in &of.ratios {
            ratio.with_label_values(&[device.as_str(), *direction]).set(*value);
        }
        if of.state != DeviceAge::Unclear {
            slower.with_label_values(&[device]).set(if of.alarm.is_some() { 1.0 } else { 0.0 });
        }
    }
    Ok(())
}

/// Gauges of stalls of the host and of disks, where they were watched.
fn stalls(seen: &Observation, gauge: &NewGauge<'_>) -> prometheus::Result<()> {
    let host = gauge(
        "rtvirtio_host_stalled_ratio",
        "Share of the time in which some CPU of the host was stalled; monitored while requests with targets arrive.",
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
mod tests;
