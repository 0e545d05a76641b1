//! Plot of curves over two axes.

use super::canvas::{Anchor, Canvas, Svg, text_width};
use super::legend::{Key, legend};
use super::{Scale, Spread};

/// Curves in one panel.
#[derive(Clone, Debug)]
pub struct XyPlot {
    /// Text for screen readers.
    pub title: String,
    /// A short heading in the panel; may be empty.
    pub heading: String,
    /// Horizontal axis of the panel.
    pub x: Axis,
    /// Vertical axis of the panel.
    pub y: Axis,
    /// Curves, drawn in this order.
    pub series: Vec<Series>,
    /// Horizontal lines, such as targets: value and name.
    pub limits: Vec<(f64, String)>,
    /// Whether the panel has its own legend.
    pub legend: bool,
    /// Height of the data area in CSS pixels.
    pub height: f64,
}

/// Label, scale and ticks of an axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// Quantity and unit of the values.
    pub label: String,
    /// Linear or logarithmic scale.
    pub spread: Spread,
    /// Ends of the axis; from the data when `None`.
    pub ends: Option<(f64, f64)>,
    /// Ticks with their labels; computed when `None`.
    pub marks: Option<Vec<(f64, String)>>,
    /// Formats the value of a computed tick.
    pub format: fn(f64) -> String,
}

/// A named curve with its points.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// Index of its colour and mark.
    pub index: usize,
    /// Dashed and with small marks: the second measure of a series whose first is solid.
    pub dashed: bool,
    /// Points by rising x, each with the text of its tooltip.
    pub points: Vec<(f64, f64, String)>,
}

impl Axis {
    fn scale(&self, values: impl Iterator<Item = f64>, from: f64, to: f64) -> Scale {
        match (self.ends, self.spread) {
            (Some((a, b)), spread) => Scale::exact(spread, a, b, from, to),
            (None, Spread::Log) => Scale::log(values, from, to),
            (None, Spread::Linear) => Scale::linear(values, from, to),
        }
    }

    /// Positions with labels; without a label there is only a faint line.
    fn ticks(&self, scale: &Scale, room: f64) -> Vec<(f64, Option<String>)> {
        match &self.marks {
            Some(marks) => marks.iter().map(|(v, l)| (*v, Some(l.clone()))).collect(),
            None => {
                let ticks = scale.ticks(room);
                ticks.into_iter().map(|t| (t.value, t.labelled.then(|| (self.format)(t.value)))).collect()
            }
        }
    }
}

/// Draws curves with marks at their points, for a width in CSS pixels.
#[must_use]
pub fn svg_xy(plot: &XyPlot, width: f64) -> Svg {
    let mut c = Canvas::default();
    let width = width.max(200.0);
    let mut top = 4.0;
    if !plot.heading.is_empty() {
        let heading = super::canvas::fit(&plot.heading, width - 16.0, super::canvas::BOLD);
        c.titled(&plot.heading, |c| c.text((8.0, top + 12.0), Anchor::Start, "bold", &heading));
        top += 20.0;
    }
    if plot.legend {
        let mut entries: Vec<_> = plot
            .series
            .iter()
            .map(|s| (Key::Curve { series: s.index, dashed: s.dashed }, s.name.clone()))
            .collect();
        entries.extend(plot.limits.iter().map(|(_, name)| (Key::Limit, name.clone())));
        top += legend(&mut c, &entries, (8.0, top), width - 16.0);
    }
    c.text((8.0, top + 14.0), Anchor::Start, "soft small", &plot.y.label);
    top += 24.0;
    let points = || plot.series.iter().flat_map(|s| &s.points);
    let bottom = top + plot.height.max(40.0);
    let y = plot.y.scale(points().map(|p| p.1).chain(plot.limits.iter().map(|l| l.0)), bottom, top);
    let y_ticks = plot.y.ticks(&y, 22.0);
    let widest =
        y_ticks.iter().filter_map(|t| t.1.as_deref()).map(|l| text_width(l, 11.0)).fold(20.0, f64::max);
    let (left, right) = (widest + 12.0, width - 14.0);
    let x = plot.x.scale(points().map(|p| p.0), left, right);
    axes(&mut c, plot, (&x, &y), &y_ticks, (left, right, top, bottom));
    for (v, name) in &plot.limits {
        c.titled(name, |c| c.line((left, y.at(*v)), (right, y.at(*v)), "limit"));
    }
    for s in &plot.series {
        curve(&mut c, s, &x, &y);
    }
    c.finish(width, bottom + 40.0, &plot.title)
}

type Area = (f64, f64, f64, f64);

fn axes(
    c: &mut Canvas,
    plot: &XyPlot,
    (x, y): (&Scale, &Scale),
    y_ticks: &[(f64, Option<String>)],
    (left, right, top, bottom): Area,
) {
    for (v, label) in y_ticks {
        let at = y.at(*v);
        c.line((left, at), (right, at), if label.is_some() { "grid" } else { "minor" });
        if let Some(l) = label {
            c.text((left - 6.0, at + 4.0), Anchor::End, "soft small", l);
        }
    }
    for (v, label) in plot.x.ticks(x, 46.0) {
        let at = x.at(v);
        c.line((at, top), (at, bottom), "minor");
        if let Some(l) = label {
            let half = text_width(&l, 11.0) / 2.0;
            c.text((at.min(right + 14.0 - half), bottom + 15.0), Anchor::Middle, "soft small", &l);
        }
    }
    c.line((left, bottom), (right, bottom), "axis");
    c.text(((left + right) / 2.0, bottom + 32.0), Anchor::Middle, "soft small", &plot.x.label);
}

fn curve(c: &mut Canvas, s: &Series, x: &Scale, y: &Scale) {
    let points: Vec<_> = s.points.iter().map(|p| (x.at(p.0), y.at(p.1))).collect();
    let class = format!("curve s{}{}", s.index % super::SERIES, if s.dashed { " dashed" } else { "" });
    if points.len() > 1 {
        c.polyline(&points, &class);
    }
    for (p, at) in s.points.iter().zip(points) {
        let r = if s.dashed { 3.0 } else { 4.5 };
        c.titled(&format!("{}: {}", s.name, p.2), |c| c.mark(s.index, at, r));
    }
}

/// Mark of a series, for a legend in HTML. It has no text alternative: the name must be next to it.
#[must_use]
pub fn svg_key(series: usize) -> String {
    let mut c = Canvas::default();
    c.line((0.0, 8.0), (22.0, 8.0), &format!("curve s{}", series % super::SERIES));
    c.mark(series, (11.0, 8.0), 4.5);
    let svg = c.finish(22.0, 16.0, "");
    svg.inline().replacen("role=\"img\" aria-label=\"\"", "aria-hidden=\"true\"", 1)
}
