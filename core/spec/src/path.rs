//! `[[vm.path]]`: one target for the sum of a VM's network, CPU and disk latency.

use std::collections::HashMap;

use rtvirtio_units::Nanos;
use serde::Serialize;
use toml::de::DeValue;

use crate::error::Report;
use crate::field::{Field, Section, any_of, each, kind, quoted};
use crate::goal::Target;
use crate::limits::MAX_PATHS_PER_VM;
use crate::network::Flow;
use crate::network_read::{optional_tables, unique};
use crate::source::Span;
use crate::suggest::closest;
use crate::target;
use crate::types::Task;

/// Parts of a VM that a message passes, with a target for their sum.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmPath {
    /// Name, unique among the paths of its VM.
    pub name: String,
    /// Parts, in the order of passing; at least two, each kind once.
    pub parts: Vec<PathPart>,
    /// Target of the whole path.
    pub target: Target,
}

/// A part of a path.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PathPart {
    /// A frame of this flow, by its index in [`Vm::flows`](crate::Vm::flows).
    Net(usize),
    /// Amount of CPU time in the VM.
    Cpu(Nanos),
    /// A request of this task, by its index in [`Vm::tasks`](crate::Vm::tasks).
    Disk(usize),
}

const KEYS: &[&str] = &["name", "path", "flow", "work", "task", "target"];
const ALIASES: &[(&str, &str)] = &[
    ("parts", "path"),
    ("chain", "path"),
    ("net", "path = [\"net\", ...] with flow = \"NAME\""),
    ("network", "path = [\"net\", ...] with flow = \"NAME\""),
    ("cpu", "path = [\"cpu\", ...] with work = \"300us\""),
    ("disk", "path = [\"disk\", ...] with task = \"NAME\""),
    ("wcet", "work"),
    ("runtime", "work"),
    ("latency", TARGET),
    ("deadline", TARGET),
];
/// Suggestion for other names of a target.
const TARGET: &str = "target = { latency = ... }";
const PARTS: [&str; 3] = ["net", "cpu", "disk"];
/// Key with the details of each part.
const OF_PART: [&str; 3] = ["flow", "work", "task"];
const PART_ALIASES: &[(&str, &str)] = &[
    ("network", "net"),
    ("nic", "net"),
    ("flow", "net"),
    ("vcpu", "cpu"),
    ("work", "cpu"),
    ("block", "disk"),
    ("task", "disk"),
    ("storage", "disk"),
];
const WORK: [Nanos; 2] = [Nanos(1_000), Nanos(60_000_000_000)];

/// Reads all `[[vm.path]]` of a VM; `None` when an error was reported.
pub(crate) fn read_all(
    report: &mut Report<'_>,
    vm: &Section<'_, '_>,
    tasks: &[Task],
    flows: &[Flow],
) -> Option<Vec<VmPath>> {
    let tables = optional_tables(report, vm, "path", "[[vm.path]]")?;
    let mut names = HashMap::new();
    let of = ("a VM", "paths", "keep those with the shortest targets");
    each(report, tables, MAX_PATHS_PER_VM, of, |report, table, span| {
        let section = Section::open(report, "[[vm.path]]", table, span, KEYS, ALIASES);
        let distinct = unique(report, &section, "name", &mut names, "a path of this VM");
        read(report, &section, tasks, flows).filter(|_| distinct)
    })
}

fn read(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    tasks: &[Task],
    flows: &[Flow],
) -> Option<VmPath> {
    let name = section.name(report, "\"trip\"");
    let kinds = kinds(report, section);
    let targets = target::read_all(report, section);
    let work = section.ranged(report, "work", WORK, "write a CPU time from 1us to 1min");
    let kinds = kinds?;
    let mut good = true;
    for (part, key) in PARTS.into_iter().zip(OF_PART) {
        let Some(place) = section.place(key).filter(|_| !kinds.contains(&part)) else { continue };
        let message = format!("`{key}` belongs to a path with \"{part}\"");
        report.add(place.key, message, format!("remove this line, or add \"{part}\" to `path`"));
        good = false;
    }
    let mut parts = Vec::new();
    for part in &kinds {
        let found = match *part {
            "net" => {
                let named = flows.iter().map(|flow| (flow.name.as_str(), flow.target.is_some()));
                let all: Vec<(&str, bool)> = named.collect();
                member(report, section, ("flow", "[[vm.flow]]"), &all).map(PathPart::Net)
            }
            "disk" => {
                let named = tasks.iter().map(|task| (task.name.as_str(), !task.targets.is_empty()));
                let all: Vec<(&str, bool)> = named.collect();
                member(report, section, ("task", "[[vm.task]]"), &all).map(PathPart::Disk)
            }
            _ => section
                .required(report, "work", "\"300us\", the CPU time that one message takes", work.clone())
                .into_value()
                .map(PathPart::Cpu),
        };
        parts.extend(found);
    }
    let targets = targets?;
    let Some(target) = targets.first().copied() else {
        if !section.meant(TARGET) {
            let help = "add target = { latency = \"20ms\" }";
            report.add(section.span.clone(), "[[vm.path]] has no `target`", help);
        }
        return None;
    };
    let whole = parts.len() == kinds.len() && good;
    Some(VmPath { name: name.into_value()?.to_owned(), parts, target }).filter(|_| whole)
}

/// Reads the words of `path`; `None` when an error was reported.
fn kinds(report: &mut Report<'_>, section: &Section<'_, '_>) -> Option<Vec<&'static str>> {
    const EXAMPLE: &str =
        "write path = [\"net\", \"cpu\", \"disk\"], in the order in which a message passes them";
    let Some((place, value)) = section.get("path") else {
        if !section.meant("path") {
            report.add(section.span.clone(), "[[vm.path]] has no `path`", EXAMPLE);
        }
        return None;
    };
    let mut refuse = |span: Span, message: String, help: String| {
        report.add(span, message, help);
        None
    };
    let DeValue::Array(items) = value else {
        return refuse(
            place.value,
            format!("`path` must be a list, not {}", kind(value)),
            EXAMPLE.to_owned(),
        );
    };
    let mut kinds: Vec<&'static str> = Vec::new();
    for item in items.iter() {
        let Some(text) = item.get_ref().as_str() else {
            let message = format!("each part of `path` must be a string, not {}", kind(item.get_ref()));
            return refuse(item.span(), message, EXAMPLE.to_owned());
        };
        let Some(part) = PARTS.into_iter().find(|part| *part == text) else {
            let alias = PART_ALIASES.iter().find(|(from, _)| from.eq_ignore_ascii_case(text));
            let near = alias.map(|(_, to)| *to).or_else(|| closest(text, PARTS));
            let help = match near {
                Some(near) => format!("did you mean \"{near}\"?"),
                None => format!("write {}", any_of(PARTS)),
            };
            return refuse(item.span(), format!("a path has no part {}", quoted(text)), help);
        };
        if kinds.contains(&part) {
            let help = "a path passes each part once; make two paths of it".to_owned();
            return refuse(item.span(), format!("\"{part}\" is in the path twice"), help);
        }
        kinds.push(part);
    }
    if kinds.len() < 2 {
        let help = format!("{EXAMPLE}; for one part its own `target` is enough");
        return refuse(place.value, "a path has at least two parts".to_owned(), help);
    }
    Some(kinds)
}

/// Index of the flow or task named by `key`, or of the only one with a target.
fn member(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    (key, header): (&str, &str),
    all: &[(&str, bool)],
) -> Option<usize> {
    let with_target: Vec<usize> =
        all.iter().enumerate().filter(|(_, (_, target))| *target).map(|(i, _)| i).collect();
    let names = any_of(with_target.iter().map(|i| all[*i].0));
    let no_target = format!(
        "add target = {{ latency = ... }} to its {header}: the path's bound is the sum of the parts' own"
    );
    let (span, message, help) = match (section.string(report, key, "\"control\""), with_target.as_slice()) {
        (Field::Bad, _) => return None,
        (Field::Given(name), _) => match all.iter().position(|(known, _)| *known == name) {
            Some(i) if all[i].1 => return Some(i),
            Some(_) => (section.value_span(key), format!("{key} {} has no target", quoted(name)), no_target),
            None if names.is_empty() => {
                (section.value_span(key), format!("this VM has no {key} {}", quoted(name)), no_target)
            }
            None => {
                let message = format!("this VM has no {key} {}", quoted(name));
                (section.value_span(key), message, format!("write {key} = {names}"))
            }
        },
        (Field::Absent, [one]) => return Some(*one),
        (Field::Absent, []) => (section.span.clone(), format!("no {key} of this VM has a target"), no_target),
        (Field::Absent, _) => {
            let message = format!("several {key}s of this VM have a target, and the path names none");
            (section.span.clone(), message, format!("add {key} = {names}"))
        }
    };
    report.add(span, message, help);
    None
}
