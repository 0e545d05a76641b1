//! Text of a device's profile.

use rtvirtio_model::{DepthPoint, Profile};

use super::{Column, Paint, Style, Table};
use crate::num;

/// Throughput and latency by depth, the cost of BFQ, the VM's share, and every doubt.
#[must_use]
pub fn profile(p: &Profile, style: &Style) -> String {
    let mut out = style.heading(&format!("profile of {} ({}, {} requests)", p.device, p.size, p.block));
    out.push_str(&style.wrap(&format!("kernel {}, {} CPUs", p.kernel, p.cpus), 0));
    out.push('\n');
    out.push_str(&depths("reads", &p.read, &p.read_bfq, style));
    if p.write.is_empty() {
        out.push_str("\nwrites were not measured\n");
    } else {
        out.push('\n');
        out.push_str(&depths("writes", &p.write, &[], style));
    }
    if p.sync.is_empty() {
        out.push_str("syncs were not measured\n");
    } else {
        out.push('\n');
        out.push_str(&depths("writes with an fdatasync after each", &p.sync, &[], style));
    }
    if let Some(large) = &p.large {
        out.push('\n');
        out.push_str(&depths(&format!("reads of {}", large.block), &large.read, &[], style));
        if !large.write.is_empty() {
            out.push('\n');
            out.push_str(&depths(&format!("writes of {}", large.block), &large.write, &[], style));
        }
    }
    if let Some(g) = &p.guest {
        let line = format!(
            "alone in a VM ({}), depth {}: {}/s, p50 {}, p99 {}, p99.99 {}, {} us of host CPU a request",
            g.kind,
            g.point.depth,
            num::rate(g.point.iops),
            num::latency(g.point.p50, ""),
            num::latency(g.point.p99, ""),
            num::latency(g.point.p9999, ""),
            num::sig3(g.cpu_per_request * 1e6),
        );
        out.push('\n');
        out.push_str(&style.wrap(&line, 0));
    }
    out.push('\n');
    if p.doubts.is_empty() {
        out.push_str(&format!("{}\n", style.paint("all checks passed", Paint::Good)));
    } else {
        out.push_str(&format!("{}\n", style.paint("reasons to doubt these numbers", Paint::Open)));
        for d in &p.doubts {
            out.push_str(&style.wrap(&format!("- {d}"), 2));
        }
    }
    out
}

fn depths(title: &str, none: &[DepthPoint], bfq: &[DepthPoint], style: &Style) -> String {
    let mut columns = vec![
        Column::number("depth"),
        Column::number("IOPS"),
        Column::number("spread"),
        Column::number("n"),
        Column::number("p50"),
        Column::number("p99"),
        Column::number("p99.99"),
        Column::number("max"),
    ];
    if !bfq.is_empty() {
        columns.extend([
            Column::number("IOPS bfq"),
            Column::number("p99.99 bfq"),
            Column::number("bfq keeps"),
        ]);
    }
    let mut table = Table::new(columns);
    for point in none {
        let tail = |p: &DepthPoint| {
            let mark = if p.n < 10_000 { "*" } else { "" };
            format!("{}{mark}", num::latency(p.p9999, ""))
        };
        let mut row = vec![
            point.depth.to_string().into(),
            num::rate(point.iops).into(),
            num::percent(point.spread).into(),
            point.n.to_string().into(),
            num::latency(point.p50, "").into(),
            num::latency(point.p99, "").into(),
            tail(point).into(),
            num::latency(point.max, "").into(),
        ];
        if let Some(b) = bfq.iter().find(|b| b.depth == point.depth) {
            row.extend([
                num::rate(b.iops).into(),
                tail(b).into(),
                num::percent(b.iops.0 / point.iops.0).into(),
            ]);
        }
        table.row(row);
    }
    let mut out =
        style.heading(&format!("{title}, elevator none{}", if bfq.is_empty() { "" } else { " and bfq" }));
    out.push_str(&table.draw(style));
    if none.iter().chain(bfq).any(|p| p.n < 10_000) {
        out.push_str("* the largest of fewer than 10000 samples\n");
    }
    out
}
