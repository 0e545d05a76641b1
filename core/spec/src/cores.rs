//! `cores` of a VM: which CPUs its threads get.

use std::collections::BTreeSet;

use rtvirtio_cores::{cpu_list, cpu_ranges};
use serde::{Serialize, Serializer};
use toml::de::DeValue;

use crate::contract_keys::has_vcpus_under_contract;
use crate::error::Report;
use crate::field::{Field, Place, Section, kind, quoted};

/// Host CPUs for the threads of a VM, chosen when its contract is applied.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Cores {
    /// CPUs among which they are chosen; all that the VM may use where `None`.
    #[serde(serialize_with = "ranges")]
    pub cpus: Option<BTreeSet<u32>>,
    /// Whether each vCPU gets a CPU that it shares with no other VM's thread.
    pub whole: bool,
    /// Whether the kernel keeps no time for ordinary threads on the vCPUs' CPUs.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub fair_server_off: bool,
    /// Whether the CPUs become a partition of cgroup v2's cpuset for the VM's cgroup, so that its
    /// threads have them together and SCHED_DEADLINE needs no others.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub partition: bool,
}

impl Cores {
    /// CPUs of the VM's partition; `None` where a CPU is chosen for each vCPU.
    #[must_use]
    pub fn partition(&self) -> Option<&BTreeSet<u32>> {
        self.cpus.as_ref().filter(|_| self.partition)
    }
}

fn ranges<S: Serializer>(cpus: &Option<BTreeSet<u32>>, s: S) -> Result<S::Ok, S::Error> {
    cpus.as_ref().map(cpu_ranges).serialize(s)
}

const KEYS: &[&str] = &["cpus", "whole", "fair_server", "partition"];
const FAIR_SERVER_OFF: &[(&str, bool)] = &[("off", true), ("on", false)];
const ALIASES: &[(&str, &str)] = &[
    ("cpu", "cpus"),
    ("list", "cpus"),
    ("cpuset", "cpus"),
    ("dedicated", "whole"),
    ("exclusive", "whole"),
    ("isolated", "whole"),
];
const EXAMPLE: &str = "write cores = \"auto\", \"whole\" or a list of CPUs such as \"2-5,8\"";

/// Reads `cores`; `Some(None)` without it, `None` when an error was reported.
pub(crate) fn read(report: &mut Report<'_>, vm: &Section<'_, '_>) -> Option<Option<Cores>> {
    let (place, value) = match vm.get("cores") {
        None => return vm.absent("cores").optional(),
        Some(found) => found,
    };
    let why = "CPUs are chosen by what a VM's contract takes of them";
    if !has_vcpus_under_contract(report, vm, "cores", &place, (why, "line")) {
        return None;
    }
    match value {
        DeValue::String(text) => match text.as_ref() {
            "auto" => Some(Some(Cores::default())),
            "whole" => Some(Some(Cores { whole: true, ..Cores::default() })),
            list => Some(Some(Cores { cpus: Some(cpus(report, &place, list)?), ..Cores::default() })),
        },
        DeValue::Table(table) => {
            let section = Section::open(report, "cores", table, place.value.clone(), KEYS, ALIASES);
            of_table(report, &section).filter(|_| section.known).map(Some)
        }
        other => {
            report.add(place.value, format!("`cores` cannot be {}", kind(other)), EXAMPLE);
            None
        }
    }
}

fn of_table(report: &mut Report<'_>, section: &Section<'_, '_>) -> Option<Cores> {
    let list = section.string(report, "cpus", "\"2-5\"").optional();
    let whole = flag(report, section, "whole");
    let partition = flag(report, section, "partition");
    let server = section.word(report, "fair_server", FAIR_SERVER_OFF, &[]).or(false);
    let given = match list? {
        Some(text) => Some(cpus(report, &section.place("cpus")?, text)?),
        None => None,
    };
    let (whole, fair_server_off, partition) = (whole?, server?, partition?);
    if partition && (whole || given.is_none()) {
        let (message, help) = match whole {
            true => {
                ("`partition` with `whole`: its threads have the partition's CPUs together", "remove `whole`")
            }
            false => ("`partition` without `cpus`: which CPUs is not known", "add cpus = \"2-3\""),
        };
        report.add(section.value_span("partition"), message, help);
        return None;
    }
    if fair_server_off && !whole {
        let message =
            "`fair_server = \"off\"` without whole CPUs: threads of others on them would get no time";
        report.add(section.value_span("fair_server"), message, "add whole = true");
        return None;
    }
    Some(Cores { cpus: given, whole, fair_server_off, partition })
}

/// Reads `true` or `false`; false without the key, `None` when an error was reported.
pub(crate) fn flag(report: &mut Report<'_>, section: &Section<'_, '_>, key: &'static str) -> Option<bool> {
    match section.get(key) {
        None => section.absent(key).or(false),
        Some((_, DeValue::Boolean(set))) => Some(*set),
        Some((place, other)) => {
            let message = format!("`{key}` must be true or false, not {}", kind(other));
            report.add(place.value, message, format!("write {key} = true"));
            None
        }
    }
}

fn cpus(report: &mut Report<'_>, place: &Place, text: &str) -> Option<BTreeSet<u32>> {
    let list: Field<BTreeSet<u32>> = cpu_list(text).filter(|cpus| !cpus.is_empty()).into();
    if list == Field::Bad {
        report.add(place.value.clone(), format!("{} is no list of CPUs", quoted(text)), EXAMPLE);
    }
    list.into_value()
}

#[cfg(test)]
mod tests {
    use super::{Cores, cpu_ranges};
    use crate::HostSpec;

    fn parse(cores: &str) -> Result<Cores, String> {
        let text = format!(
            "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"plc\"\nqmp = \"/run/plc.qmp\"\n\
             cpu = {{ budget = \"4ms\", period = \"20ms\" }}\ncores = {cores}\n\
             [[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
        );
        let spec = HostSpec::parse("x.toml", &text).map_err(|e| e.to_string())?;
        Ok(spec.vms()[0].cpu.cores.clone().unwrap())
    }

    #[test]
    fn a_partition_is_of_listed_cpus_which_its_threads_share() {
        let of = parse("{ cpus = \"2-3\", partition = true }").unwrap();
        assert_eq!(of.partition().map(cpu_ranges).as_deref(), Some("2-3"));
        for off in ["\"2-3\"", "{ cpus = \"2-3\" }", "{ cpus = \"2-3\", partition = false }"] {
            assert_eq!(parse(off).unwrap().partition(), None, "{off}");
        }
        for (refused, why) in [
            ("{ partition = true }", "`partition` without `cpus`"),
            ("{ cpus = \"2-3\", whole = true, partition = true }", "`partition` with `whole`"),
            ("{ cpus = \"2-3\", partition = \"on\" }", "`partition` must be true or false"),
        ] {
            let error = parse(refused).unwrap_err();
            assert!(error.contains(why), "{refused}: {error}");
        }
    }

    #[test]
    fn the_fair_server_is_left_on_unless_the_table_says_off() {
        let of = |cores: &str| parse(cores).unwrap();
        let off = of("{ cpus = \"0,4-5\", whole = true, fair_server = \"off\" }");
        assert!(off.fair_server_off && off.whole && off.cpus.is_some_and(|cpus| cpus.len() == 3));
        for on in [
            "\"whole\"",
            "{ whole = true }",
            "{ whole = true, fair_server = \"on\" }",
            "{ fair_server = \"on\" }",
        ] {
            assert!(!of(on).fair_server_off, "{on}");
        }
    }
}
