//! `[vm.urgency]`: the range of priorities in which a VM's guest may move its vCPUs.

use rtvirtio_units::Nanos;
use toml::de::DeTable;

use crate::contract_keys::has_vcpus_under_contract;
use crate::error::Report;
use crate::field::{Place, Section};
use crate::types::Urgency;

/// Highest priority: that of vCPUs under `priorities = "rt"`.
const HIGHEST: u32 = 97;
/// Range of the budget in each second.
const BUDGETS: [Nanos; 2] = [Nanos::from_millis(1), Nanos::from_millis(1000)];
const DEFAULT_BUDGET: Nanos = Nanos::from_millis(500);

const KEYS: &[&str] = &["ceiling", "floor", "budget", "reports", "interrupts"];
const REPORTS: &[(&str, bool)] = &[("guest", true), ("none", false)];
const INTERRUPTS: &[(&str, bool)] = &[("kvm", true), ("none", false)];
const ALIASES: &[(&str, &str)] = &[
    ("max", "ceiling"),
    ("p_max", "ceiling"),
    ("maxprio", "ceiling"),
    ("min", "floor"),
    ("boost", "budget"),
    ("boost_budget", "budget"),
    ("priority", "ceiling"),
    ("period", "budget, which is that of each second"),
];
const EXAMPLE: &str = "write [vm.urgency] with floor = 0, or urgency = {} for all defaults";

/// Reads `urgency`; `Some(None)` without it, `None` when an error was reported.
pub(crate) fn read(report: &mut Report<'_>, vm: &Section<'_, '_>) -> Option<Option<Urgency>> {
    let found = vm.table(report, "urgency", EXAMPLE);
    found.and_then(|(place, table)| of_table(report, vm, table, place).into()).optional()
}

fn of_table(
    report: &mut Report<'_>,
    vm: &Section<'_, '_>,
    table: &DeTable<'_>,
    place: Place,
) -> Option<Urgency> {
    let why = "what a guest calls urgent is held by its VM's budget";
    if !has_vcpus_under_contract(report, vm, "urgency", &place, (why, "table")) {
        return None;
    }
    let section = Section::open(report, "[vm.urgency]", table, place.value, KEYS, ALIASES);
    let ceiling = section.integer(report, "ceiling", 1, HIGHEST).optional();
    let floor = section.integer(report, "floor", 0, HIGHEST - 1).or(0);
    let help = format!("write a time of each second, from {} to {}", BUDGETS[0], BUDGETS[1]);
    let budget = section.ranged(report, "budget", BUDGETS, help);
    let reports = section.word(report, "reports", REPORTS, &[("blind", "reports = \"none\"")]).or(true);
    let interrupts = section.word(report, "interrupts", INTERRUPTS, &[]).or(false);
    let (ceiling, floor, budget) = (ceiling?, floor?, budget.or(DEFAULT_BUDGET)?);
    let (reports, interrupts) = (reports?, interrupts?);
    if let Some(ceiling) = ceiling.filter(|ceiling| floor >= *ceiling) {
        report.add(
            section.value_span(if section.place("floor").is_some() { "floor" } else { "ceiling" }),
            format!("the floor {floor} is not below the ceiling {ceiling}"),
            "floor = 0 makes ordinary threads of vCPUs that run nothing urgent",
        );
        return None;
    }
    section.known.then_some(Urgency { ceiling, floor, budget, reports, interrupts })
}
