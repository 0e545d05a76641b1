//! Layout of plots with one row per task, and the plot of kept rates.

use rtvirtio_units::Iops;

use super::canvas::{Anchor, BOLD, Canvas, Svg, fit, text_width};
use super::legend::{Key, fills, legend};
use super::{NARROW, Scale};
use crate::num;

/// Layout of a plot whose rows are tasks.
pub(crate) struct Frame {
    pub(crate) width: f64,
    pub(crate) narrow: bool,
    /// Left and right edge of the data.
    pub(crate) left: f64,
    pub(crate) right: f64,
    /// Upper edge of the first row.
    pub(crate) top: f64,
    /// Height of one lane.
    pub(crate) lane: f64,
}

impl Frame {
    /// `labels` are the names of the rows, `values` the space to the right of the data.
    pub(crate) fn new<'a>(width: f64, labels: impl Iterator<Item = &'a str>, values: f64) -> Self {
        let width = width.max(260.0);
        let narrow = width < NARROW;
        let widest = labels.map(|l| text_width(l, BOLD)).fold(60.0, f64::max);
        let left = if narrow { 8.0 } else { widest.min(width * 0.26) + 16.0 };
        Self { width, narrow, left, right: width - values, top: 0.0, lane: if narrow { 17.0 } else { 18.0 } }
    }

    /// Height of a row: its lanes, and its name above or next to them.
    pub(crate) fn row_height(&self, lanes: usize) -> f64 {
        let lanes = self.lane * lanes.max(1) as f64;
        if self.narrow { lanes + 26.0 } else { lanes.max(32.0) + 12.0 }
    }

    pub(crate) fn lane_centre(&self, row_top: f64, lanes: usize, lane: usize) -> f64 {
        let offset = self.lane * (lane as f64 + 0.5);
        if self.narrow {
            row_top + 21.0 + offset
        } else {
            row_top + (self.row_height(lanes) - self.lane * lanes.max(1) as f64) / 2.0 + offset
        }
    }

    /// Vertical extent of a row's lanes.
    pub(crate) fn lanes_extent(&self, row_top: f64, lanes: usize) -> (f64, f64) {
        let first = self.lane_centre(row_top, lanes, 0) - self.lane / 2.0;
        (first, first + self.lane * lanes.max(1) as f64)
    }

    /// Draws the row's name, and a second text below or next to it.
    pub(crate) fn names(&self, c: &mut Canvas, row_top: f64, lanes: usize, name: &str, second: &str) {
        if self.narrow {
            let room = self.width - self.left - text_width(second, 11.0) - 16.0;
            let y = row_top + 15.0;
            c.titled(name, |c| c.text((self.left, y), Anchor::Start, "bold", &fit(name, room, BOLD)));
            c.text((self.width - 8.0, y), Anchor::End, "soft small", second);
        } else {
            let middle = row_top + self.row_height(lanes) / 2.0;
            let y = if second.is_empty() { middle + 4.0 } else { middle - 3.0 };
            let x = self.left - 12.0;
            c.titled(name, |c| c.text((x, y), Anchor::End, "bold", &fit(name, self.left - 14.0, BOLD)));
            c.text((x, middle + 12.0), Anchor::End, "soft small", second);
        }
    }

    /// Draws grid lines from the first row to `bottom` with numbers above and, on long plots,
    /// below.
    pub(crate) fn grid(
        &self,
        c: &mut Canvas,
        scale: &Scale,
        bottom: f64,
        room: f64,
        format: impl Fn(f64) -> String,
    ) {
        let ticks = scale.ticks(room);
        for t in &ticks {
            let x = scale.at(t.value);
            c.line((x, self.top), (x, bottom), if t.labelled { "grid" } else { "minor" });
        }
        let long = bottom - self.top > 500.0;
        for t in ticks.iter().filter(|t| t.labelled) {
            let label = format(t.value);
            let half = text_width(&label, 11.0) / 2.0;
            let x = scale.at(t.value).clamp(half, (self.width - half).max(half));
            c.text((x, self.top - 6.0), Anchor::Middle, "soft small", &label);
            if long {
                c.text((x, bottom + 15.0), Anchor::Middle, "soft small", &label);
            }
        }
    }

    /// Draws the legend above the data, and leaves room for the numbers below it.
    pub(crate) fn with_legend(mut self, c: &mut Canvas, entries: &[(Key, String)]) -> Self {
        self.top = legend(c, entries, (8.0, 0.0), self.width - 16.0) + 26.0;
        self
    }

    /// Lower edge of rows with these numbers of lanes.
    pub(crate) fn bottom(&self, lanes: impl Iterator<Item = usize>) -> f64 {
        self.top + lanes.map(|lanes| self.row_height(lanes)).sum::<f64>()
    }

    /// Draws rows by name and number of lanes, from the top on; `lanes` draws the lanes of the row
    /// at an index, below the given edge.
    pub(crate) fn rows<'a>(
        &self,
        c: &mut Canvas,
        rows: impl Iterator<Item = (&'a str, usize)>,
        mut lanes: impl FnMut(&mut Canvas, usize, f64),
    ) {
        let mut y = self.top;
        for (i, (name, count)) in rows.enumerate() {
            c.line((0.0, y), (self.width, y), "row");
            self.names(c, y, count, name, "");
            lanes(c, i, y);
            y += self.row_height(count);
        }
    }

    /// Draws a vertical line over the lanes of a row.
    pub(crate) fn limit(&self, c: &mut Canvas, row_top: f64, lanes: usize, x: f64) {
        let (a, b) = self.lanes_extent(row_top, lanes);
        c.line((x, a - 2.0), (x, b + 2.0), "limit");
    }

    /// Lower edge of the plot with the numbers below its grid.
    pub(crate) fn foot(&self, bottom: f64) -> f64 {
        bottom + if bottom - self.top > 500.0 { 22.0 } else { 6.0 }
    }
}

/// Ratio of achieved to declared rate per task.
#[derive(Clone, Debug, PartialEq)]
pub struct RatePlot {
    /// Text for screen readers.
    pub title: String,
    pub series: Vec<String>,
    /// Rows from top to bottom, one per task.
    pub rows: Vec<RateRow>,
    /// Share below which the rate counts as not kept, 0 to 1.
    pub limit: f64,
}

/// Rates of one task.
#[derive(Clone, Debug, PartialEq)]
pub struct RateRow {
    /// Name of the task.
    pub name: String,
    /// Bars from top to bottom, one per run.
    pub bars: Vec<RateBar>,
}

/// Rates of one run.
#[derive(Clone, Debug, PartialEq)]
pub struct RateBar {
    pub series: usize,
    /// Achieved requests per second.
    pub achieved: f64,
    /// Declared requests per second.
    pub declared: f64,
}

/// Draws kept rates as bars with a line at the limit.
#[must_use]
pub fn svg_rate(plot: &RatePlot, width: f64) -> Svg {
    let mut c = Canvas::default();
    let labels = plot.rows.iter().map(|r| r.name.as_str());
    let f = Frame::new(width, labels, if width < NARROW { 62.0 } else { 150.0 });
    let mut entries = fills(&plot.series, |_| false);
    entries.push((Key::Limit, format!("{} of the declared rate", num::percent(plot.limit))));
    let f = f.with_legend(&mut c, &entries);
    let scale = Scale::exact(super::Spread::Linear, 0.0, 1.05, f.left, f.right);
    let bottom = f.bottom(plot.rows.iter().map(|r| r.bars.len()));
    f.grid(&mut c, &scale, bottom, 60.0, num::percent);
    f.rows(&mut c, plot.rows.iter().map(|r| (r.name.as_str(), r.bars.len())), |c, i, y| {
        let bars = &plot.rows[i].bars;
        for (lane, bar) in bars.iter().enumerate() {
            rate_bar(c, &f, &scale, plot, bar, f.lane_centre(y, bars.len(), lane));
        }
        f.limit(c, y, bars.len(), scale.at(plot.limit));
    });
    let (height, width) = (f.foot(bottom), f.width);
    c.finish(width, height, &plot.title)
}

fn rate_bar(c: &mut Canvas, f: &Frame, scale: &Scale, plot: &RatePlot, bar: &RateBar, y: f64) {
    let share = if bar.declared > 0.0 { bar.achieved / bar.declared } else { f64::NAN };
    let (achieved_text, declared_text) = (num::rate(Iops(bar.achieved)), num::rate(Iops(bar.declared)));
    let name = plot.series.get(bar.series).map_or("", String::as_str);
    c.titled(
        &format!("{name}: {achieved_text} of {declared_text} requests a second, {}", num::percent(share)),
        |c| {
            let class = format!("fill s{}", bar.series % super::SERIES);
            c.rect((f.left, y - 6.0), (scale.at(share) - f.left, 12.0), &class);
        },
    );
    let kept = share >= plot.limit;
    let text = if f.narrow {
        num::percent(share)
    } else {
        format!("{} ({achieved_text} of {declared_text})", num::percent(share))
    };
    c.text((f.right + 10.0, y + 4.0), Anchor::Start, if kept { "" } else { "bad" }, &text);
}
