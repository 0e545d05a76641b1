//! Plots as SVG.
//!
//! Written by hand, not with `plotters`: its SVG backend writes fixed colours into every element,
//! so a plot could not follow the reader's light or dark theme or turn black on paper; it has no
//! titles or text alternatives; and it places labels by the metrics of one font. Here elements have
//! classes, one style sheet ([`STYLE`]) colours them with custom properties, every mark has a
//! title, and layouts leave room for any system font.
//!
//! All plots are functions of plain data. Values that are zero or not finite are drawn at the edge
//! of their axis, never written as `NaN`. Each plot takes its width; below [`NARROW`] names are
//! above rows instead of next to them.

mod bars;
mod canvas;
mod latency;
mod legend;
mod rows;
mod scale;
mod stack;
mod times;
mod xy;

pub use bars::{Bar, BarPlot, BarRow, svg_bars};
pub use canvas::Svg;
pub use latency::{Lane, LatencyPlot, LatencyRow, svg_latency};
pub use rows::{RateBar, RatePlot, RateRow, svg_rate};
pub use scale::{Scale, Spread, Tick};
pub use stack::{Segment, StackPlot, StackRow, svg_stack};
pub use times::{TimeBar, TimePlot, TimeRow, svg_times};
pub use xy::{Axis, Series, XyPlot, svg_key, svg_xy};

/// Colours and line styles of all plots; an HTML page that holds inline plots must carry it once.
pub const STYLE: &str = include_str!("style.css");

/// Distinct colours and marks; series beyond that repeat them.
pub const SERIES: usize = 6;

/// Plots below this width, in CSS pixels, use the layout for phones.
pub const NARROW: f64 = 560.0;

#[cfg(test)]
mod tests;
