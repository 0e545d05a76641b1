//! `cpu` and `priorities` of a VM: the CPU time of all its threads together, and their real-time
//! priorities. Also reads `urgency`, `cores` and `memory`.

use rtvirtio_units::{Iops, Nanos};
use toml::de::DeTable;

use crate::error::Report;
use crate::field::{Field, Place, Section};
use crate::types::{CpuNeed, Priorities, VmCpu};
use crate::{cores, memory, urgency};

/// Shortest budget. `cpu.cfs_quota_us` takes no less (`min_cfs_quota_period`), and below it context
/// switches cost a noticeable part.
const MIN_BUDGET: Nanos = Nanos::from_millis(1);
/// Shortest and longest period: the range that both `cpu.max` and SCHED_DEADLINE accept by default
/// (`max_cfs_quota_period`, `sched_deadline_period_max_us`).
const PERIODS: [Nanos; 2] = [Nanos::from_millis(1), Nanos::from_millis(1000)];
/// Ranges of a demand's rate and deadline.
const RATES: [Iops; 2] = [Iops(1.0 / 60.0), Iops(1e6)];
const DEADLINES: [Nanos; 2] = [Nanos::from_millis(1), Nanos::from_millis(60_000)];

const KEYS: &[&str] = &["budget", "period", "requests", "deadline"];
const ALIASES: &[(&str, &str)] =
    &[("runtime", "budget"), ("quota", "budget"), ("q", "budget"), ("p", "period"), ("rate", "requests")];
const WORDS: &[(&str, Priorities)] = &[("rt", Priorities::Rt)];
const WORD_ALIASES: &[(&str, &str)] = &[
    ("fifo", "priorities = \"rt\""),
    ("realtime", "priorities = \"rt\""),
    ("real-time", "priorities = \"rt\""),
    ("high", "priorities = \"rt\""),
];

/// Reads `cpu`, `priorities`, `urgency`, `cores` and `memory`; `None` when an error was reported.
pub(crate) fn read(report: &mut Report<'_>, vm: &Section<'_, '_>) -> Option<VmCpu> {
    let help = "write cpu = { budget = \"4ms\", period = \"20ms\" }";
    let need = vm.table(report, "cpu", help).and_then(|(place, table)| need(report, table, place, help));
    let priorities = vm.word(report, "priorities", WORDS, WORD_ALIASES);
    if let (Field::Given(_), Field::Absent, Some(place)) = (&priorities, &need, vm.place("priorities")) {
        report.add(
            place.key,
            "`priorities` without `cpu`: a real-time thread without a budget can stop the whole machine",
            "add cpu = { budget = \"4ms\", period = \"20ms\" }",
        );
        return None;
    }
    let (urgency, cores) = (urgency::read(report, vm), cores::read(report, vm));
    let memory = memory::read(report, vm);
    let (need, priorities) = (need.optional()?, priorities.optional()?);
    Some(VmCpu { need, priorities, urgency: urgency?, cores: cores?, memory: memory? })
}

fn need(report: &mut Report<'_>, table: &DeTable<'_>, place: Place, help: &str) -> Field<CpuNeed> {
    let section = Section::open(report, "cpu", table, place.value.clone(), KEYS, ALIASES);
    let has = |keys: [&str; 2]| keys.iter().any(|k| section.place(k).is_some() || section.meant(k));
    match (has(["budget", "period"]), has(["requests", "deadline"])) {
        (true, true) => {
            let help = "keep budget and period, or requests and deadline, from which a budget is found";
            report.add(place.value, "`cpu` says a contract and a demand at once", help);
            Field::Bad
        }
        (false, true) => demand(report, &section),
        (true, false) => contract(report, &section),
        // Unknown keys were reported already.
        (false, false) if !table.is_empty() => Field::Bad,
        (false, false) => {
            report.add(place.value, "`cpu` is empty", help);
            Field::Bad
        }
    }
}

fn contract(report: &mut Report<'_>, section: &Section<'_, '_>) -> Field<CpuNeed> {
    let period = time(report, section, "period", PERIODS);
    let period = section.required(report, "period", "\"20ms\"", period).into_value();
    let budget = time(report, section, "budget", [MIN_BUDGET, PERIODS[1]]);
    let budget = section.required(report, "budget", "\"4ms\"", budget).into_value();
    let Some((budget, period)) = budget.zip(period) else { return Field::Bad };
    if budget > period {
        report.add(
            section.value_span("budget"),
            format!("the budget {budget} is longer than the period {period}"),
            format!("a budget is what each CPU gives in one period: write at most \"{period}\""),
        );
        return Field::Bad;
    }
    Field::Given(CpuNeed::Contract { budget, period })
}

fn demand(report: &mut Report<'_>, section: &Section<'_, '_>) -> Field<CpuNeed> {
    let rate = section.ranged(report, "requests", RATES, "write a rate from 1/min to 1000000/s");
    let rate = section.required(report, "requests", "\"50/s\"", rate).into_value();
    let deadline = time(report, section, "deadline", DEADLINES);
    let deadline = section.required(report, "deadline", "\"20ms\"", deadline).into_value();
    rate.zip(deadline).map(|(requests, deadline)| CpuNeed::Demand { requests, deadline }).into()
}

fn time(report: &mut Report<'_>, section: &Section<'_, '_>, key: &str, range: [Nanos; 2]) -> Field<Nanos> {
    section.ranged(report, key, range, format!("write a time from {} to {}", range[0], range[1]))
}
