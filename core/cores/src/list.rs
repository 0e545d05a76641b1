//! Lists of CPUs in the kernel's form (`Documentation/admin-guide/kernel-parameters.rst`, CPU
//! lists).

use std::collections::BTreeSet;

use crate::topology::MAX_CPUS;

/// Largest CPU number that a list may name.
const MAX_CPU: u32 = MAX_CPUS as u32 - 1;

/// Parses a list of CPUs: `0-3,6`. `None` for another format.
#[must_use]
pub fn cpu_list(text: &str) -> Option<BTreeSet<u32>> {
    let mut cpus = BTreeSet::new();
    for part in text.trim().split(',').filter(|p| !p.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if first > last || last > MAX_CPU {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

/// CPUs in the kernel's form of a list: `0-3,6`; empty for none.
#[must_use]
pub fn cpu_ranges(cpus: &BTreeSet<u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for &cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => ranges.push((cpu, cpu)),
        }
    }
    let one = |(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    ranges.iter().map(one).collect::<Vec<_>>().join(",")
}
