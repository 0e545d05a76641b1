//! `[[vm.task]]`: a stream of I/O.

use std::collections::HashMap;

use rtvirtio_units::{Iops, Nanos, Ratio};
use toml::de::DeValue;

use crate::error::Report;
use crate::field::{Field, Section, each, tables};
use crate::limits::{DEFAULT_OPEN_DEPTH, MAX_TASKS_PER_VM};
use crate::source::printable;
use crate::types::{Arrival, Burst, Op, Pattern, Task};
use crate::{block, sync, target};
use block::Sizes;

const KEYS: &[&str] = &[
    "name",
    "disk",
    "op",
    "write_share",
    "block",
    "pattern",
    "rate",
    "depth",
    "loop",
    "burst",
    "sync",
    "target",
    "targets",
];
/// Names of these keys in fio and elsewhere.
const KEY_ALIASES: &[(&str, &str)] = &[
    ("rw", "op"),
    ("operation", "op"),
    ("bs", "block"),
    ("size", "block"),
    ("blocksize", "block"),
    ("block_size", "block"),
    ("iops", "rate"),
    ("rate_iops", "rate"),
    ("iodepth", "depth"),
    ("queue_depth", "depth"),
    ("qd", "depth"),
    ("rwmixwrite", "write_share"),
    ("latency", "target = { latency = ... }"),
    ("deadline", "target = { latency = ... }"),
    ("percentile", "target = { percentile = ..., latency = ... }"),
    ("arrival", "loop"),
    ("thinktime", "burst"),
    ("blocks", "block = [{ size = ..., share = ... }, ...]"),
    ("bssplit", "block = [{ size = ..., share = ... }, ...]"),
    ("fsync", "sync = \"fsync\""),
    ("fdatasync", "sync = \"fdatasync\""),
    ("durable", "sync = \"fdatasync\""),
];
const MAX_DEPTH: u32 = 1024;
/// Largest rate: beyond any device of today.
const MAX_RATE: Iops = Iops(10e6);
/// Smallest rate: slower tasks give no percentile in a reasonable time.
const MIN_RATE: Iops = Iops(1.0 / 60.0);

/// Shortest burst: below it a burst is a few requests.
const MIN_BURST: Nanos = Nanos(1_000_000);
/// Longest burst: a longer rest would not be seen in a run.
const MAX_BURST: Nanos = Nanos(60_000_000_000);

#[derive(Clone, Copy, PartialEq)]
enum OpWord {
    Read,
    Write,
    Mixed,
}

const OPS: &[(&str, OpWord)] = &[("read", OpWord::Read), ("write", OpWord::Write), ("mixed", OpWord::Mixed)];
const OP_ALIASES: &[(&str, &str)] = &[
    ("randread", "op = \"read\" with pattern = \"random\""),
    ("randwrite", "op = \"write\" with pattern = \"random\""),
    ("rw", "op = \"mixed\" with write_share = \"50%\""),
    ("readwrite", "op = \"mixed\" with write_share = \"50%\""),
    ("randrw", "op = \"mixed\" with write_share = \"50%\""),
];
const PATTERNS: &[(&str, Pattern)] = &[("random", Pattern::Random), ("sequential", Pattern::Sequential)];
const PATTERN_ALIASES: &[(&str, &str)] = &[
    ("rand", "pattern = \"random\""),
    ("seq", "pattern = \"sequential\""),
    ("linear", "pattern = \"sequential\""),
];
const LOOPS: &[(&str, Arrival)] = &[("closed", Arrival::Closed), ("open", Arrival::Open)];

/// Reads all tasks of a VM; `None` when an error was reported.
pub(crate) fn read_all(report: &mut Report<'_>, vm: &Section<'_, '_>) -> Option<Vec<Task>> {
    let tables = tables(report, vm, "task", "[[vm.task]]")?;
    let mut lines: HashMap<&str, usize> = HashMap::new();
    let of = ("a VM", "tasks", "merge tasks of one kind, or spread them over VMs");
    each(report, tables, MAX_TASKS_PER_VM, of, |report, table, span| {
        let section = Section::open(report, "[[vm.task]]", table, span, KEYS, KEY_ALIASES);
        let name = section.name(report, "\"light\"");
        let unique = name.given().is_none_or(|name| {
            let message = format!("this VM already has a task \"{name}\"");
            section.first_use(report, "name", (&mut lines, *name), message, "; give each task its own name")
        });
        read(report, &section, name).filter(|_| unique)
    })
}

fn read(report: &mut Report<'_>, section: &Section<'_, '_>, name: Field<&str>) -> Option<Task> {
    let op = operation(report, section);
    let sizes = block::read(report, section);
    let pattern = section.word(report, "pattern", PATTERNS, PATTERN_ALIASES).or(Pattern::Random);
    let rate = rate(report, section);
    let arrival = section.word(report, "loop", LOOPS, &[]);
    let depth = section.integer(report, "depth", 1, MAX_DEPTH);
    let targets = target::read_all(report, section);
    let burst = burst(report, section, &rate);
    let arrival = match (&burst, arrival) {
        // Of a burst none waits for the one before.
        (Field::Given(Burst::Requests { .. }), Field::Absent) => Field::Given(Arrival::Open),
        (_, arrival) => arrival,
    };
    let sync = sync::read(report, section);
    let consistent = check_loop(report, section, &arrival, &rate, &depth)
        & check_burst(report, section, &burst, &arrival, &depth);
    let consistent = consistent & sync::check(report, section, &sync, op, sizes.as_ref(), &depth, &arrival);
    let arrival = arrival.or(Arrival::Closed);
    let at_once = match burst.given() {
        Some(Burst::Requests { requests }) => *requests,
        Some(Burst::Busy(_)) | None => 1,
    };
    let default_depth = if arrival == Some(Arrival::Open) { DEFAULT_OPEN_DEPTH.max(at_once) } else { 1 };
    let Sizes { largest, mix } = sizes?;
    let task = Task {
        name: name.into_value()?.to_owned(),
        op: op?,
        block: largest,
        mix,
        pattern: pattern?,
        rate: rate.optional()?,
        depth: depth.or(default_depth)?,
        arrival: arrival?,
        burst: burst.optional()?,
        sync: sync.optional()?,
        targets: targets?,
    };
    consistent.then_some(task)
}

/// Reads `op` with `write_share`.
fn operation(report: &mut Report<'_>, section: &Section<'_, '_>) -> Option<Op> {
    let word = section.word(report, "op", OPS, OP_ALIASES);
    let word = section.required(report, "op", "\"read\"", word);
    let share = section.quantity::<Ratio>(report, "write_share").and_then(|(share, text)| {
        if share.0 > 0.0 && share.0 < 1.0 {
            return Field::Given(share);
        }
        let help =
            "write a share above 0% and below 100%; for all or nothing use op = \"write\" or op = \"read\"";
        report.add(
            section.value_span("write_share"),
            format!("`write_share` is {}, out of its range", printable(text, 60)),
            help,
        );
        Field::Bad
    });
    match (word.into_value()?, share, section.place("write_share")) {
        (OpWord::Mixed, Field::Absent, _) => {
            let help = "add write_share = \"30%\"";
            report.add(section.value_span("op"), "op \"mixed\" needs a `write_share`", help);
            None
        }
        (OpWord::Mixed, share, _) => Some(Op::Mixed { write_share: share.into_value()? }),
        (_, _, Some(place)) => {
            let help = "remove this line, or write op = \"mixed\"";
            report.add(place.key, "`write_share` belongs to op \"mixed\"", help);
            None
        }
        (OpWord::Read, ..) => Some(Op::Read),
        (OpWord::Write, ..) => Some(Op::Write),
    }
}

fn rate(report: &mut Report<'_>, section: &Section<'_, '_>) -> Field<Iops> {
    let help = "write a rate from 1/min to 10000000/s; without `rate` a task runs as fast as its loop allows";
    section.ranged(report, "rate", [MIN_RATE, MAX_RATE], help)
}

/// A time for a task without a rate, a number of requests for one with it.
fn burst(report: &mut Report<'_>, section: &Section<'_, '_>, rate: &Field<Iops>) -> Field<Burst> {
    let Some((place, value)) = section.get("burst") else { return Field::Absent };
    let is_number = matches!(value, DeValue::Integer(_));
    match (is_number, rate) {
        (true, Field::Absent) => {
            let help = "add the rate, or write as `depth` how many requests there are at once, or burst = \"200ms\" for a task that works \
                        so long and rests as long";
            report.add(place.key, "a `burst` of requests belongs to a task with a `rate`", help);
            Field::Bad
        }
        (true, _) => {
            section.integer(report, "burst", 2, MAX_DEPTH).map(|requests| Burst::Requests { requests })
        }
        (false, Field::Absent) => {
            let help = format!("write a time from {MIN_BURST} to {MAX_BURST}");
            section.ranged(report, "burst", [MIN_BURST, MAX_BURST], help).map(Burst::Busy)
        }
        // A rate says already when each request is due.
        (false, _) => {
            let help = "write how many requests come at once, such as burst = 32, or remove `rate`: a task that works for a time and \
                        rests for as long runs as fast as it can";
            report.add(place.key, "a `burst` of time belongs to a task without a `rate`", help);
            Field::Bad
        }
    }
}

/// Requests that come at once are in flight at once.
fn check_burst(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    burst: &Field<Burst>,
    arrival: &Field<Arrival>,
    depth: &Field<u32>,
) -> bool {
    let Field::Given(Burst::Requests { requests }) = burst else { return true };
    if arrival.given() == Some(&Arrival::Closed) {
        let help = "write loop = \"open\", or remove the line: a closed loop has one request at a time";
        report.add(section.value_span("loop"), "requests that come at once are no closed loop", help);
        return false;
    }
    if depth.given().is_some_and(|depth| depth < requests) {
        let help = format!("write depth = {requests} or more, or remove the line");
        report.add(section.value_span("depth"), "`depth` is less than what comes at once", help);
        return false;
    }
    true
}

/// Checks rate, loop and depth together. A closed loop with a rate models a synchronous task: one
/// request at a time, issued when it is due and its predecessor is complete. A larger depth would
/// need a rule for the order of catching up after a stall.
fn check_loop(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    arrival: &Field<Arrival>,
    rate: &Field<Iops>,
    depth: &Field<u32>,
) -> bool {
    let open = arrival.given() == Some(&Arrival::Open);
    let closed = matches!(arrival, Field::Absent | Field::Given(Arrival::Closed));
    if open && *rate == Field::Absent {
        let help = "add rate = \"100/s\", or remove this line: a closed loop needs no rate";
        report.add(section.value_span("loop"), "an open loop needs a `rate`", help);
        return false;
    }
    if closed && *rate != Field::Absent && depth.given().is_some_and(|d| *d > 1) {
        let help = "remove this line, or write loop = \"open\" so that requests overlap";
        report.add(section.value_span("depth"), "a closed loop with a rate has one request in flight", help);
        return false;
    }
    true
}
