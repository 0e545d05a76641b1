//! `sync` of a task: the call that makes each of its writes durable.

use crate::block::Sizes;
use crate::error::Report;
use crate::field::{Field, Section};
use crate::types::{Arrival, Op, SyncKind};

/// A synchronous write goes through the page cache, which writes whole pages: the rest of a page
/// would be read first for a smaller block.
const PAGE: u64 = 4096;

const KINDS: &[(&str, SyncKind)] = &[("fdatasync", SyncKind::Fdatasync), ("fsync", SyncKind::Fsync)];
const ALIASES: &[(&str, &str)] = &[
    ("dsync", "sync = \"fdatasync\""),
    ("o_dsync", "sync = \"fdatasync\""),
    ("flush", "sync = \"fdatasync\""),
    ("sync", "sync = \"fsync\""),
    ("o_sync", "sync = \"fsync\""),
];

/// Reads `sync`: fdatasync or fsync.
pub(crate) fn read(report: &mut Report<'_>, section: &Section<'_, '_>) -> Field<SyncKind> {
    section.word(report, "sync", KINDS, ALIASES)
}

/// Checks the other keys of a task with `sync`: only writes, whole pages, depth 1 in a closed loop.
pub(crate) fn check(
    report: &mut Report<'_>,
    section: &Section<'_, '_>,
    sync: &Field<SyncKind>,
    op: Option<Op>,
    sizes: Option<&Sizes>,
    depth: &Field<u32>,
    arrival: &Field<Arrival>,
) -> bool {
    let Field::Given(_) = sync else { return true };
    let mut good = true;
    if op.is_some_and(|op| op != Op::Write) {
        let help = "write op = \"write\"; reads of the same program are a task of their own";
        report.add(section.value_span("sync"), "`sync` belongs to a task that only writes", help);
        good = false;
    }
    if let Some(sizes) = sizes.filter(|s| !s.are_multiples_of(PAGE)) {
        let whole = rtvirtio_units::Bytes(sizes.smallest().0.div_ceil(PAGE) * PAGE);
        let help = format!("write \"{whole}\": a file system writes the whole pages around a smaller record");
        report.add(
            section.value_span("block"),
            "the block of a task with `sync` is not a multiple of 4KiB",
            help,
        );
        good = false;
    }
    let closed = *arrival != Field::Given(Arrival::Open);
    if closed && depth.given().is_some_and(|d| *d > 1) {
        let help = "remove this line: each write waits for its sync; several writers are loop = \"open\" with a rate";
        report.add(section.value_span("depth"), "a task with `sync` has one request in flight", help);
        good = false;
    }
    good
}
