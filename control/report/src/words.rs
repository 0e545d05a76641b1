//! Names and short sentences for types of other crates.

use rtvirtio_measure::{HostFacts, Run, TaskResult, Verdict, VmKind};
use rtvirtio_model::{ModelKind, Side};
use rtvirtio_planner::{BfqTunable, Knob, LimitKind, TaskOutlook};
use rtvirtio_units::{Nanos, Percentile};

use crate::num;
use crate::text::Paint;

/// Forecast of a task against its target, in a few words.
pub(crate) fn outlook(t: &TaskOutlook) -> (&'static str, Option<Paint>) {
    let but_for_host = |target: Nanos| t.forecast.judged() <= target && t.forecast.promised() > target;
    match t.margin_ns {
        None => ("no target", None),
        Some(_) if t.not_predicted.is_some() => ("not predicted", Some(Paint::Open)),
        Some(m) if m < 0 => ("misses", Some(Paint::Bad)),
        Some(_) if !t.keeps_rate() => ("rate not kept", Some(Paint::Bad)),
        Some(_) if t.exceeds_cpus() => ("does not hold: CPU", Some(Paint::Bad)),
        Some(_) if t.lacks_cpu() => ("may not hold: CPU", Some(Paint::Open)),
        Some(_) if t.cpu_unknown.is_some() => ("not known: CPU", Some(Paint::Open)),
        Some(_) if t.target_ns.is_some_and(but_for_host) => ("holds but for the host", Some(Paint::Open)),
        Some(_) => ("holds", Some(Paint::Good)),
    }
}

/// A target, with its percentile where that is not p99.99.
pub(crate) fn target(percentile: Percentile, latency: Nanos, gap: &str) -> String {
    let latency = num::latency(latency, gap);
    if percentile == Percentile::P9999 { latency } else { format!("{percentile} {latency}") }
}

/// The verdict as one word; `-` for a task that has no target.
pub(crate) fn verdict(v: Option<Verdict>) -> &'static str {
    match v {
        Some(Verdict::Met) => "met",
        Some(Verdict::Missed) => "missed",
        Some(Verdict::Unproven) => "unproven",
        None => "-",
    }
}

/// Name of a knob for users.
pub(crate) fn knob(k: &Knob) -> String {
    match k {
        Knob::HostElevator => "host elevator".to_owned(),
        Knob::HostBfq(t) => format!("host bfq {}", t.file_name()),
        Knob::HostIoCost(file) => format!("host {}", file.file_name()),
        Knob::VmWeight { vm } => format!("{vm} bfq weight"),
        Knob::VmIoWeight { vm } => format!("{vm} io.weight"),
        Knob::VmIoLatency { vm } => format!("{vm} io.latency"),
        Knob::VmLimit { vm, limit } => format!("{vm} {} limit", limit_name(*limit)),
        Knob::GuestElevator { vm } => format!("{vm} guest elevator"),
        Knob::GuestBfq { vm, tunable } => format!("{vm} guest bfq {}", tunable.file_name()),
    }
}

/// Name of a knob for users.
#[must_use]
pub fn knob_name(k: &Knob) -> String {
    knob(k)
}

/// Unit of a knob's value, with a leading space; empty for names and plain numbers.
pub(crate) fn knob_unit(k: &Knob) -> &'static str {
    match k {
        Knob::HostBfq(t) | Knob::GuestBfq { tunable: t, .. } => match t {
            BfqTunable::SliceIdle | BfqTunable::TimeoutSync => " ms",
            BfqTunable::MaxBudget => " sectors",
            BfqTunable::LowLatency | BfqTunable::StrictGuarantees => "",
        },
        Knob::VmIoLatency { .. } => " us",
        Knob::VmLimit { limit: LimitKind::ReadBps | LimitKind::WriteBps, .. } => " B/s",
        Knob::VmLimit { limit: LimitKind::ReadIops | LimitKind::WriteIops, .. } => "/s",
        Knob::HostElevator
        | Knob::HostIoCost(_)
        | Knob::VmWeight { .. }
        | Knob::VmIoWeight { .. }
        | Knob::GuestElevator { .. } => "",
    }
}

/// Value of a knob with its unit; `max` has none.
pub(crate) fn knob_value(k: &Knob, value: &str) -> String {
    let unit = if value.parse::<f64>().is_ok() { knob_unit(k) } else { "" };
    format!("{value}{unit}")
}

fn limit_name(l: LimitKind) -> &'static str {
    match l {
        LimitKind::ReadBps => "read bandwidth",
        LimitKind::WriteBps => "write bandwidth",
        LimitKind::ReadIops => "read rate",
        LimitKind::WriteIops => "write rate",
    }
}

/// Side of a term, in one word.
pub(crate) fn side(s: Side) -> &'static str {
    match s {
        Side::Guest => "guest",
        Side::Host => "host",
    }
}

/// Name of the model with a short description.
pub(crate) fn model(m: ModelKind) -> &'static str {
    match m {
        ModelKind::Slice => "slice model (BFQ's slices and queueing at the device)",
        ModelKind::Bound => "learned on this host, with an upper bound",
    }
}

/// Kind of a run's VMs, in one line.
pub(crate) fn kind(run: &Run, host: &HostFacts) -> String {
    match run.kind {
        VmKind::Mixed => "some VMs as QEMU guests with fio inside, others as fio in their cgroup (no guest kernel, no virtio)".to_owned(),
        VmKind::Process => "process VMs (fio in a cgroup each: no guest kernel, no virtio)".to_owned(),
        VmKind::Qemu => match host.accelerator.as_str() {
            "kvm" => format!("QEMU guests under KVM ({})", host.vmm),
            "tcg" => format!("QEMU guests under TCG, that is, with emulated CPUs ({})", host.vmm),
            // A run with flows only.
            "" => "VMs as they are behind their networks".to_owned(),
            other => format!("QEMU guests, accelerator {other} ({})", host.vmm),
        },
    }
}

/// Whether the device under test is emulated: its description then contains the word `twin`.
/// `twin`.
pub(crate) fn is_twin(host: &HostFacts) -> bool {
    host.device.split(|c: char| !c.is_alphanumeric()).any(|w| w.eq_ignore_ascii_case("twin"))
}

/// Approximate number of samples without an exceedance that a claim at 95 % needs: `ln 20 / (1 -
/// p)`, to two digits.
///
/// The verdict's own reason has exact counts; this is for prose and for results without a reason.
pub(crate) fn samples_for_proof(p: Percentile) -> Option<u64> {
    let n = 20f64.ln() / p.exceedance();
    if !(1.0..=1e15).contains(&n) {
        return None;
    }
    let unit = 10f64.powf((n.log10().floor() - 1.0).max(0.0));
    Some(((n / unit).ceil() * unit) as u64)
}

/// Causes of a missed target, or that none is seen, then the reason of the verdict; only the reason
/// where causes were not looked for.
pub(crate) fn reason(t: &TaskResult) -> String {
    let why = explain(t);
    let Some(causes) = t.causes.as_ref().filter(|_| t.verdict == Some(Verdict::Missed)) else { return why };
    format!("{}; {why}", rtvirtio_blame::describe(causes, &t.causes_unread))
}

/// Reason of a task's verdict; a general one where the result has none.
pub(crate) fn explain(t: &TaskResult) -> String {
    let why = t.why.trim();
    match t.verdict {
        Some(Verdict::Unproven) if why.starts_with("not missed") => why.to_owned(),
        Some(Verdict::Unproven) if !why.is_empty() => format!("not missed; {why}"),
        Some(Verdict::Unproven) => {
            let above = if t.target_ns.is_some_and(|l| t.max_ns <= l) { "0" } else { "too few" };
            let proof = samples_for_proof(t.percentile)
                .map_or_else(String::new, |n| format!(", proof needs about {n} without one"));
            format!("not missed; {above} of {} above target{proof}", t.n)
        }
        _ if !why.is_empty() => why.to_owned(),
        Some(Verdict::Missed) => {
            let target = t.target_ns.map_or_else(|| num::MISSING.to_owned(), |l| num::latency(l, ""));
            format!("target {target}, p99.99 {}", num::latency(t.p9999_ns, ""))
        }
        Some(Verdict::Met) | None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proof_sizes() {
        assert_eq!(samples_for_proof(Percentile(99.99)), Some(30_000));
        assert_eq!(samples_for_proof(Percentile(99.0)), Some(300));
        assert_eq!(samples_for_proof(Percentile(50.0)), Some(6));
        assert_eq!(samples_for_proof(Percentile(100.0)), None);
    }

    #[test]
    fn a_cause_that_was_not_seen_is_told_apart_from_one_that_nobody_looked_for() {
        let mut t = crate::fixture::result().runs[0].tasks[0].clone();
        t.verdict = Some(Verdict::Missed);
        t.why = "9 of 100 above 1ms".to_owned();
        assert_eq!(reason(&t), "9 of 100 above 1ms");
        t.causes = Some(Vec::new());
        assert_eq!(reason(&t), "cause not seen: no counter shows one; 9 of 100 above 1ms");
        t.causes_unread = vec!["steal".to_owned(), "its limits".to_owned()];
        assert_eq!(reason(&t), "cause not seen: not known are steal, its limits; 9 of 100 above 1ms");
        t.verdict = Some(Verdict::Met);
        assert_eq!(reason(&t), "9 of 100 above 1ms");
    }

    #[test]
    fn values_carry_their_unit() {
        let k = Knob::HostBfq(BfqTunable::SliceIdle);
        assert_eq!(knob_value(&k, "0"), "0 ms");
        let k = Knob::VmLimit { vm: "a".into(), limit: LimitKind::ReadIops };
        assert_eq!(knob_value(&k, "max"), "max");
        assert_eq!(knob_value(&k, "500"), "500/s");
    }

    #[test]
    fn what_the_host_adds_is_reported_apart_from_what_settings_can_do() {
        use rtvirtio_model::{Upper, UpperBasis};
        use rtvirtio_units::Ratio;
        let mut t = crate::fixture::plan().tasks[0].clone();
        t.target_ns = Some(Nanos::from_millis(20));
        let mut with = |bound: u64, host: u64| {
            t.forecast.upper = Some(Upper {
                run_s: 8.0,
                latency_ns: Nanos::from_millis(bound),
                confidence: Ratio(0.99),
                basis: UpperBasis::Pooled,
                host_ns: Nanos::from_millis(host),
                outside: Vec::new(),
            });
            t.margin_ns = Some((20 - bound as i64) * 1_000_000);
            outlook(&t).0
        };
        assert_eq!(with(15, 0), "holds");
        assert_eq!(with(15, 5), "holds");
        assert_eq!(with(15, 6), "holds but for the host");
        assert_eq!(with(21, 0), "misses");
        let cpu_unknown = Some("CPUs differ".to_owned());
        let unknown = TaskOutlook { cpu_unknown, margin_ns: Some(1), ..t.clone() };
        assert_eq!(outlook(&unknown).0, "not known: CPU");
        t.not_predicted = Some("io.cost divides the device".to_owned());
        for margin in [-1, 1] {
            t.margin_ns = Some(margin);
            assert_eq!(outlook(&t).0, "not predicted");
        }
    }

    #[test]
    fn a_twin_is_recognised_by_the_word() {
        let host = |d: &str| HostFacts {
            kernel: String::new(),
            cpus: 1,
            vmm: String::new(),
            accelerator: String::new(),
            device: d.into(),
        };
        assert!(is_twin(&host("loop7 (twin qlc-nvme)")));
        assert!(is_twin(&host("Twin:emmc")));
        assert!(!is_twin(&host("nvme-twinax0")));
    }
}
