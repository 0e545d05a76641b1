//! HTML of a device's profile.

use rtvirtio_model::{DepthPoint, Profile};
use rtvirtio_units::Nanos;

use super::{GAP, HtmlTable, NarrowLayout, THIN};
use crate::num;
use crate::svg::{Axis, Series, Spread, XyPlot, svg_xy};
use rtvirtio_text::xml;

/// Throughput and latency over depth, the cost of BFQ, and every doubt.
fn body(p: &Profile) -> String {
    let mut body: String = format!(
        "<p>{}</p>\n",
        xml(&format!(
            "{}, {}, measured with {} requests under kernel {}.",
            p.device, p.size, p.block, p.kernel
        ))
    );
    if p.doubts.is_empty() {
        body.push_str("<p class=\"soft\">All checks of the measurement passed.</p>\n");
    } else {
        let items: String = p.doubts.iter().map(|d| format!("<li>{}</li>", xml(d))).collect();
        body.push_str(&format!(
            "<div class=\"alert doubt\"><p class=\"open\">Reasons to doubt these numbers</p><ul>{items}</ul></div>\n"
        ));
    }
    let mut sets =
        vec![("reads, none", p.read.as_slice()), ("reads, bfq", &p.read_bfq), ("writes, none", &p.write)];
    sets.retain(|s| !s.1.is_empty());
    if sets.is_empty() {
        return body;
    }
    body.push_str(&format!(
        "<figure><figcaption>Left: requests a second by requests in flight, with elevator none and with bfq; the gap is what \
         BFQ itself costs. Right: their latency; solid is the median, dashed p99.99.</figcaption>\
         <div class=\"panels two\">{}{}</div></figure>\n",
        throughput(&sets).inline(),
        latencies(&sets).inline()
    ));
    body.push_str(&table(p, &sets));
    for s in &p.sync {
        let text = format!(
            "A write with an fdatasync after it, at depth {}: {} a second, median {}, p99 {}, longest {}.",
            s.depth,
            num::rate(s.iops),
            num::latency(s.p50, GAP),
            num::latency(s.p99, GAP),
            num::latency(s.max, GAP)
        );
        body.push_str(&format!("<p>{}</p>\n", xml(&text)));
    }
    if let Some(g) = &p.guest {
        let text = format!(
            "Alone in a VM ({}) at depth {}: {} requests a second, median {}, p99.99 {}; each costs {}{GAP}\u{b5}s of host CPU.",
            g.kind,
            g.point.depth,
            num::rate(g.point.iops),
            num::latency(g.point.p50, GAP),
            num::latency(g.point.p9999, GAP),
            num::sig3(g.cpu_per_request * 1e6)
        );
        body.push_str(&format!("<p>{}</p>\n", xml(&text)));
    }
    body
}

/// The section with its heading.
pub(super) fn section(p: &Profile) -> String {
    super::section("profile", "The device", &body(p))
}

type Set<'a> = (&'a str, &'a [DepthPoint]);

/// Axis of queue depth, with a mark at each doubling.
fn depth_axis(sets: &[Set<'_>]) -> Axis {
    let mut depths: Vec<u32> = sets.iter().flat_map(|s| s.1).map(|p| p.depth.max(1)).collect();
    depths.sort_unstable();
    depths.dedup();
    let (first, last) = (depths.first().copied().unwrap_or(1), depths.last().copied().unwrap_or(1));
    Axis {
        label: "requests in flight".to_owned(),
        spread: Spread::Log,
        ends: Some((f64::from(first) * 0.9, f64::from(last) * 1.1)),
        marks: Some(depths.iter().map(|&d| (f64::from(d), d.to_string())).collect()),
        format: num::sig3,
    }
}

fn throughput(sets: &[Set<'_>]) -> crate::svg::Svg {
    let series = sets
        .iter()
        .enumerate()
        .map(|(index, (name, points))| Series {
            name: (*name).to_owned(),
            index,
            dashed: false,
            points: points
                .iter()
                .map(|p| {
                    (f64::from(p.depth), p.iops.0, format!("depth {}, {}/s", p.depth, num::rate(p.iops)))
                })
                .collect(),
        })
        .collect();
    let plot = XyPlot {
        title: "Requests per second over requests in flight".to_owned(),
        heading: "Throughput".to_owned(),
        x: depth_axis(sets),
        y: Axis {
            label: "requests per second".to_owned(),
            spread: Spread::Linear,
            ends: None,
            marks: None,
            format: |v| num::count(v.max(0.0) as u64, THIN),
        },
        series,
        limits: Vec::new(),
        legend: true,
        height: 190.0,
    };
    svg_xy(&plot, 460.0)
}

fn latencies(sets: &[Set<'_>]) -> crate::svg::Svg {
    let mut series = Vec::new();
    for (index, (name, points)) in sets.iter().enumerate() {
        for (what, dashed) in [("median", false), ("p99.99", true)] {
            let of = |p: &DepthPoint| if dashed { p.p9999 } else { p.p50 };
            let points = points.iter().map(|p| {
                let text = format!("depth {}, {}", p.depth, num::latency(of(p), " "));
                (f64::from(p.depth), of(p).as_millis_f64(), text)
            });
            series.push(Series { name: format!("{name}, {what}"), index, dashed, points: points.collect() });
        }
    }
    let plot = XyPlot {
        title: "Latency over requests in flight".to_owned(),
        heading: "Latency".to_owned(),
        x: depth_axis(sets),
        y: Axis {
            label: "latency".to_owned(),
            spread: Spread::Log,
            ends: None,
            marks: None,
            format: |ms| num::latency(Nanos((ms * 1e6).round() as u64), GAP),
        },
        series,
        limits: Vec::new(),
        legend: true,
        height: 190.0,
    };
    svg_xy(&plot, 460.0)
}

fn table(p: &Profile, sets: &[Set<'_>]) -> String {
    let mut table = HtmlTable::new(
        "profile by depth",
        NarrowLayout::Scroll,
        &[
            ("", ""),
            ("depth", "num"),
            ("requests/s", "num"),
            ("spread", "num"),
            ("n", "num"),
            ("p50", "num"),
            ("p99", "num"),
            ("p99.99", "num"),
            ("max", "num"),
            ("kept of none", "num"),
        ],
    );
    for (name, points) in sets {
        for q in *points {
            let base = p.read.iter().find(|r| r.depth == q.depth).filter(|_| *name == "reads, bfq");
            let kept = base.map_or_else(String::new, |r| num::percent(q.iops.0 / r.iops.0));
            let mark = if q.n < 10_000 { "*" } else { "" };
            table.row(
                1,
                &[
                    ((*name).to_owned(), "keep"),
                    (q.depth.to_string(), "num"),
                    (num::rate(q.iops), "num"),
                    (num::percent(q.spread), "num"),
                    (num::count(q.n, THIN), "num"),
                    (num::latency(q.p50, GAP), "num"),
                    (num::latency(q.p99, GAP), "num"),
                    (format!("{}{mark}", num::latency(q.p9999, GAP)), "num"),
                    (num::latency(q.max, GAP), "num"),
                    (kept, "num"),
                ],
            );
        }
    }
    table.done()
}
