//! Plot of stacked bars: terms of the predicted latency.

use rtvirtio_units::Nanos;

use super::canvas::{Anchor, Canvas, Svg, text_width};
use super::legend::Key;
use super::rows::Frame;
use super::{NARROW, Scale};
use crate::num;

/// Parts of a total per task.
#[derive(Clone, Debug, PartialEq)]
pub struct StackPlot {
    /// Text for screen readers.
    pub title: String,
    /// Names of the parts; pale parts are the guest's.
    pub parts: Vec<(String, bool)>,
    /// Rows from top to bottom, one per task.
    pub rows: Vec<StackRow>,
}

/// Stacked bar of one task.
#[derive(Clone, Debug, PartialEq)]
pub struct StackRow {
    /// Name of the task.
    pub name: String,
    /// Segments from left to right.
    pub segments: Vec<Segment>,
    /// Total as shown next to the bar.
    pub whole: Nanos,
}

/// Part of a stacked bar.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Segment {
    /// Index into [`StackPlot::parts`].
    pub part: usize,
    pub value: Nanos,
}

/// Draws stacked bars on a linear axis from zero, where lengths are proportional to shares.
#[must_use]
pub fn svg_stack(plot: &StackPlot, width: f64) -> Svg {
    let mut c = Canvas::default();
    let labels = plot.rows.iter().map(|r| r.name.as_str());
    let mut f = Frame::new(width, labels, if width < NARROW { 70.0 } else { 80.0 });
    f.lane = 22.0;
    let entries: Vec<_> = plot
        .parts
        .iter()
        .enumerate()
        .map(|(series, (name, pale))| (Key::Fill { series, pale: *pale }, name.clone()))
        .collect();
    let f = f.with_legend(&mut c, &entries);
    let sums = plot.rows.iter().map(|r| r.segments.iter().map(|s| s.value.as_millis_f64()).sum::<f64>());
    let scale = Scale::linear(sums, f.left, f.right);
    let bottom = f.top + plot.rows.iter().map(|_| f.row_height(1)).sum::<f64>();
    f.grid(&mut c, &scale, bottom, 60.0, |ms| num::latency(Nanos((ms * 1e6).round() as u64), "\u{a0}"));
    let mut y = f.top;
    for row in &plot.rows {
        c.line((0.0, y), (f.width, y), "row");
        f.names(&mut c, y, 1, &row.name, "");
        draw_segments(&mut c, &scale, plot, row, f.lane_centre(y, 1, 0));
        let value = num::latency(row.whole, "\u{a0}");
        c.text((f.right + 10.0, f.lane_centre(y, 1, 0) + 4.0), Anchor::Start, "bold", &value);
        y += f.row_height(1);
    }
    let (height, width) = (f.foot(bottom), f.width);
    c.finish(width, height, &plot.title)
}

fn draw_segments(c: &mut Canvas, scale: &Scale, plot: &StackPlot, row: &StackRow, y: f64) {
    let mut done = 0.0;
    for s in &row.segments {
        let (a, b) = (scale.at(done), scale.at(done + s.value.as_millis_f64()));
        done += s.value.as_millis_f64();
        let (name, pale) = plot.parts.get(s.part).map_or(("", false), |(n, p)| (n.as_str(), *p));
        let class = format!("fill s{}{}", s.part % super::SERIES, if pale { " pale" } else { "" });
        let value = num::latency(s.value, "\u{a0}");
        c.titled(&format!("{}: {name} {value}", row.name), |c| {
            c.rect((a, y - 9.0), (b - a, 18.0), &class);
            if !pale && b - a > text_width(&value, 11.0) + 8.0 {
                c.text(((a + b) / 2.0, y + 4.0), Anchor::Middle, "on", &value);
            }
        });
    }
}
