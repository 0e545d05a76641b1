//! The main plot: measured and predicted tails of every task against its target, on a log axis.

use rtvirtio_units::Nanos;

use super::canvas::{Anchor, Canvas, Svg};
use super::legend::Key;
use super::rows::Frame;
use super::{NARROW, Scale};
use crate::num;

/// Latencies per task against targets.
#[derive(Clone, Debug, PartialEq)]
pub struct LatencyPlot {
    /// Text for screen readers.
    pub title: String,
    /// Names of the series, such as the schemes.
    pub series: Vec<String>,
    /// Rows from top to bottom, one per task.
    pub rows: Vec<LatencyRow>,
    /// Name of the filled mark, such as `p99.99`.
    pub mark: String,
}

/// Targets and runs of one task.
#[derive(Clone, Debug, PartialEq)]
pub struct LatencyRow {
    /// Name of the task.
    pub name: String,
    /// Second label, such as the target in words.
    pub second: String,
    /// Target latency; `None` for a best-effort task.
    pub target: Option<Nanos>,
    /// Lanes from top to bottom, one per run.
    pub lanes: Vec<Lane>,
}

/// Latencies of one task in one run.
#[derive(Clone, Debug, PartialEq)]
pub struct Lane {
    pub series: usize,
    /// Median, mark (the tail) and maximum; `None` when no request completed.
    pub measured: Option<[Nanos; 3]>,
    /// Predicted value of the mark.
    pub predicted: Option<Nanos>,
    /// Verdict in one word; may be empty.
    pub verdict: String,
    /// Style class for the verdict: `bad`, `good`, `open` or empty.
    pub tone: &'static str,
    /// Suffix of the number, such as `*` for a maximum in place of a percentile.
    pub suffix: &'static str,
}

/// Draws the plot for a width in CSS pixels.
#[must_use]
pub fn svg_latency(plot: &LatencyPlot, width: f64) -> Svg {
    let mut c = Canvas::default();
    let names = plot.rows.iter().flat_map(|r| [r.name.as_str(), r.second.as_str()]);
    let f = Frame::new(width, names, if width < NARROW { 130.0 } else { 150.0 });
    let f = f.with_legend(&mut c, &entries(plot));
    let values = plot.rows.iter().flat_map(|r| {
        let lanes = r.lanes.iter().flat_map(|l| l.measured.into_iter().flatten().chain(l.predicted));
        lanes.chain(r.target)
    });
    // Scaled in ms, so that ticks are whole decades of ms.
    let scale = Scale::log(values.map(Nanos::as_millis_f64), f.left, f.right);
    let bottom = f.top + plot.rows.iter().map(|r| f.row_height(r.lanes.len())).sum::<f64>();
    f.grid(&mut c, &scale, bottom, if f.narrow { 46.0 } else { 58.0 }, |ms| {
        num::latency(Nanos((ms * 1e6).round() as u64), "\u{a0}")
    });
    let mut y = f.top;
    for row in &plot.rows {
        draw_row(&mut c, &f, &scale, plot, row, y);
        y += f.row_height(row.lanes.len());
    }
    c.line((0.0, bottom), (f.width, bottom), "row");
    let (height, width) = (f.foot(bottom), f.width);
    c.finish(width, height, &plot.title)
}

fn entries(plot: &LatencyPlot) -> Vec<(Key, String)> {
    let mut out: Vec<_> =
        plot.series.iter().enumerate().map(|(i, s)| (Key::Mark(i), format!("{s}: {}", plot.mark))).collect();
    let lanes = || plot.rows.iter().flat_map(|r| &r.lanes);
    if lanes().any(|l| l.predicted.is_some()) {
        out.push((Key::Hollow, "predicted".to_owned()));
    }
    if lanes().any(|l| l.measured.is_some()) {
        out.push((Key::Span, "median to maximum".to_owned()));
    }
    if plot.rows.iter().any(|r| r.target.is_some()) {
        out.push((Key::Target, "target; shaded is above it".to_owned()));
    }
    out
}

fn draw_row(c: &mut Canvas, f: &Frame, scale: &Scale, plot: &LatencyPlot, row: &LatencyRow, y: f64) {
    let lanes = row.lanes.len();
    c.line((0.0, y), (f.width, y), "row");
    f.names(c, y, lanes, &row.name, &row.second);
    let (a, b) = f.lanes_extent(y, lanes);
    if let Some(target) = row.target {
        let x = scale.at(target.as_millis_f64());
        c.rect((x, a - 2.0), (f.right - x, b - a + 4.0), "zone");
        c.titled(&format!("{}: target {}", row.name, num::latency(target, " ")), |c| {
            c.line((x, a - 2.0), (x, b + 2.0), "target");
        });
    }
    for (i, lane) in row.lanes.iter().enumerate() {
        draw_lane(c, f, scale, plot, lane, f.lane_centre(y, lanes, i));
    }
}

fn draw_lane(c: &mut Canvas, f: &Frame, scale: &Scale, plot: &LatencyPlot, lane: &Lane, y: f64) {
    let x = |v: Nanos| scale.at(v.as_millis_f64());
    let name = plot.series.get(lane.series).map_or("", String::as_str);
    let series = lane.series % super::SERIES;
    if let Some([p50, mark, max]) = lane.measured {
        let value_text = |v| num::latency(v, " ");
        let title = format!(
            "{name}: p50 {}, {} {}, max {}",
            value_text(p50),
            plot.mark,
            value_text(mark),
            value_text(max)
        );
        c.titled(&title, |c| {
            c.line((x(p50), y), (x(max), y), &format!("span s{series}"));
            c.line((x(p50), y - 4.0), (x(p50), y + 4.0), &format!("cap s{series}"));
            c.line((x(max), y - 3.0), (x(max), y + 3.0), &format!("cap s{series}"));
        });
        if let Some(p) = lane.predicted {
            c.titled(&format!("{name}: predicted {}", value_text(p)), |c| c.diamond(series, (x(p), y), 5.5));
        }
        c.titled(&title, |c| c.mark(series, (x(mark), y), 5.0));
    } else if let Some(p) = lane.predicted {
        c.titled(&format!("{name}: predicted {}", num::latency(p, " ")), |c| {
            c.diamond(series, (x(p), y), 5.5)
        });
    }
    let value = lane.measured.map_or_else(|| "no data".to_owned(), |[_, m, _]| num::latency(m, "\u{a0}"));
    let split = f.right + if f.narrow { 53.0 } else { 68.0 };
    c.text((split, y + 4.0), Anchor::End, "", &value);
    c.text((split + 1.0, y + 4.0), Anchor::Start, "soft", lane.suffix);
    c.text((split + 10.0, y + 4.0), Anchor::Start, lane.tone, &lane.verdict);
}
