//! `memory` of a VM: its share of the L3 cache and of the memory bandwidth. Also reads the section
//! `[memory]`: what all VMs share of it.

use rtvirtio_units::{BytesPerSec, Ratio};
use serde::Serialize;
use toml::de::{DeTable, DeValue};

use crate::cores::flag;
use crate::error::Report;
use crate::field::{Field, Place, Section, quoted};

/// Ways of each L3 cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ways {
    /// So many adjacent ones, chosen when they are applied.
    Count(u32),
    /// Bit mask of the ways.
    Mask(u64),
}

/// Memory bandwidth in the unit of the host's CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bandwidth {
    /// Percent of all: Intel, Arm.
    Percent(u32),
    /// Bytes per second: AMD, and `mba_MBps`.
    Rate(u64),
}

/// Group of resctrl for the threads of a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// Ways that its threads fill.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ways: Option<Ways>,
    /// Whether all other groups leave these ways to it.
    pub own: bool,
    /// Most memory bandwidth of each resctrl domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Bandwidth>,
    /// Most bandwidth of slow memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slow_bandwidth: Option<Bandwidth>,
    /// Whether its traffic is to be counted, also where nothing limits it.
    pub monitor: bool,
}

impl Memory {
    /// Whether anything is limited; else a monitoring group is enough.
    #[must_use]
    pub fn is_limited(&self) -> bool {
        self.ways.is_some() || self.bandwidth.is_some() || self.slow_bandwidth.is_some()
    }
}

const KEYS: &[&str] = &["ways", "own", "bandwidth", "slow_bandwidth", "monitor"];
const ALIASES: &[(&str, &str)] = &[
    ("l3", "ways"),
    ("cache", "ways"),
    ("cbm", "ways"),
    ("exclusive", "own"),
    ("mb", "bandwidth"),
    ("mba", "bandwidth"),
    ("smba", "slow_bandwidth"),
    ("mon", "monitor"),
];
const DEVICE_KEYS: &[&str] = &["device_ways"];
const DEVICE_ALIASES: &[(&str, &str)] = &[("io_alloc", "device_ways"), ("dma", "device_ways")];
const EXAMPLE: &str =
    "write memory = { ways = 4, bandwidth = \"40%\" }, with a rate such as \"8GB/s\" on AMD";
/// Bits of the kernel's masks (`RESCTRL_MAX_CBM` is 32; a mask here has 64).
const MAX_WAYS: u32 = 64;

/// Reads `memory`; `Some(None)` without it, `None` when an error was reported.
pub(crate) fn read(report: &mut Report<'_>, vm: &Section<'_, '_>) -> Option<Option<Memory>> {
    let found = vm.table(report, "memory", EXAMPLE);
    found.and_then(|(place, table)| of_table(report, table, place).into()).optional()
}

fn of_table(report: &mut Report<'_>, table: &DeTable<'_>, place: Place) -> Option<Memory> {
    let section = Section::open(report, "memory", table, place.value.clone(), KEYS, ALIASES);
    let ways = ways(report, &section).optional();
    let (own, monitor) = (flag(report, &section, "own"), flag(report, &section, "monitor"));
    let rate = bandwidth(report, &section, "bandwidth").optional();
    let slow = bandwidth(report, &section, "slow_bandwidth").optional();
    let memory =
        Memory { ways: ways?, own: own?, bandwidth: rate?, slow_bandwidth: slow?, monitor: monitor? };
    if !section.known {
        return None;
    }
    if memory.own && memory.ways.is_none() {
        report.add(section.value_span("own"), "`own` without `ways`: which of the cache?", "add ways = 4");
        return None;
    }
    if !memory.is_limited() && !memory.monitor {
        report.add(place.value, "`memory` asks for nothing", EXAMPLE);
        return None;
    }
    Some(memory)
}

fn ways(report: &mut Report<'_>, section: &Section<'_, '_>) -> Field<Ways> {
    let Some((place, DeValue::String(text))) = section.get("ways") else {
        return section.integer(report, "ways", 1, MAX_WAYS).map(Ways::Count);
    };
    let digits = text.strip_prefix("0x").unwrap_or(text);
    match u64::from_str_radix(digits, 16) {
        Ok(mask) if mask > 0 && !digits.starts_with('+') => Field::Given(Ways::Mask(mask)),
        _ => {
            let help = "write ways = \"0xf0\", or how many: ways = 4";
            report.add(place.value, format!("{} is no mask of ways", quoted(text)), help);
            Field::Bad
        }
    }
}

fn bandwidth(report: &mut Report<'_>, section: &Section<'_, '_>, key: &str) -> Field<Bandwidth> {
    section.string(report, key, "\"40%\"").and_then(|text| {
        let percent = text.parse::<Ratio>().map(|share| share.0 * 100.0);
        let rate = text.parse::<BytesPerSec>().map(|rate| rate.0);
        match (percent, rate) {
            (Ok(percent), _) if (1.0..=100.0).contains(&percent) => {
                Field::Given(Bandwidth::Percent((percent + 1e-9) as u32))
            }
            (Err(_), Ok(rate)) if (1e6..=1e13).contains(&rate) => Field::Given(Bandwidth::Rate(rate as u64)),
            _ => {
                let message = format!("`{key}` cannot be {}", quoted(text));
                let help = format!("write {key} = \"40%\", or a rate of at least 1 MB/s: {key} = \"8GB/s\"");
                report.add(section.value_span(key), message, help);
                Field::Bad
            }
        }
    })
}

/// Reads `device_ways` of the section `[memory]`; `Some(None)` without the section.
pub(crate) fn device_ways(report: &mut Report<'_>, file: &Section<'_, '_>) -> Option<Option<u32>> {
    let help = "write it as a section: [memory], and below it device_ways = 2";
    let ways = file.table(report, "memory", help).and_then(|(place, table)| {
        let section = Section::open(report, "[memory]", table, place.value, DEVICE_KEYS, DEVICE_ALIASES);
        let ways = section.integer(report, "device_ways", 1, MAX_WAYS);
        if !section.known {
            return Field::Bad;
        }
        section.required(report, "device_ways", "2", ways).into_value().into()
    });
    ways.optional()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostSpec;

    fn parse(memory: &str, section: &str) -> Result<(Memory, Option<u32>), String> {
        let text = format!(
            "[device]\npath = \"/dev/sdz\"\n{section}\n[[vm]]\nname = \"plc\"\nqmp = \"/run/plc.qmp\"\n\
             memory = {memory}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
        );
        let spec = HostSpec::parse("x.toml", &text).map_err(|e| e.to_string())?;
        Ok((spec.vms()[0].cpu.memory.unwrap(), spec.device_ways()))
    }

    #[test]
    fn a_share_of_cache_and_bandwidth_is_read_in_either_unit() {
        let (all, devices) = parse(
            "{ ways = 4, own = true, bandwidth = \"40%\", slow_bandwidth = \"1GB/s\" }",
            "[memory]\ndevice_ways = 2",
        )
        .unwrap();
        assert_eq!((all.ways, all.own, devices), (Some(Ways::Count(4)), true, Some(2)));
        assert_eq!(all.bandwidth, Some(Bandwidth::Percent(40)));
        assert_eq!(all.slow_bandwidth, Some(Bandwidth::Rate(1_000_000_000)));
        for mask in ["\"0xf0\"", "\"f0\""] {
            let (of, devices) = parse(&format!("{{ ways = {mask} }}"), "").unwrap();
            assert_eq!((of.ways, of.own, devices), (Some(Ways::Mask(0xf0)), false, None));
        }
        let (counted, _) = parse("{ monitor = true }", "").unwrap();
        assert!(counted.monitor && !counted.is_limited());
    }

    #[test]
    fn what_says_nothing_or_too_much_is_refused() {
        for (memory, section, why) in [
            ("{ }", "", "asks for nothing"),
            ("{ own = true, bandwidth = \"40%\" }", "", "`own` without `ways`"),
            ("{ ways = 0 }", "", "out of its range"),
            ("{ ways = \"0xg\" }", "", "no mask of ways"),
            ("{ bandwidth = \"140%\" }", "", "`bandwidth` cannot be"),
            ("{ bandwidth = \"8\" }", "", "`bandwidth` cannot be"),
            ("{ l3 = 4 }", "", "did you mean `ways`?"),
            ("4", "", "`memory` must be a table"),
            ("{ ways = 4 }", "[memory]", "has no `device_ways`"),
            ("{ ways = 4 }", "[memory]\nio_alloc = 2", "did you mean `device_ways`?"),
        ] {
            let error = parse(memory, section).unwrap_err();
            assert!(error.contains(why), "{memory} {section}: {error}");
        }
    }
}
