//! Plot of shares as bars, several to a row.

use super::canvas::{Anchor, Canvas, Svg};
use super::legend::fills;
use super::rows::Frame;
use super::{NARROW, Scale};
use crate::num;

/// Shares from 0 to 1, in rows of bars.
#[derive(Clone, Debug, PartialEq)]
pub struct BarPlot {
    /// Text for screen readers.
    pub title: String,
    pub series: Vec<String>,
    /// The rows from top to bottom.
    pub rows: Vec<BarRow>,
}

/// A named group of bars.
#[derive(Clone, Debug, PartialEq)]
pub struct BarRow {
    /// Label of the row.
    pub name: String,
    /// Bars of the row, from top to bottom.
    pub bars: Vec<Bar>,
}

/// Share of one series.
#[derive(Clone, Debug, PartialEq)]
pub struct Bar {
    pub series: usize,
    /// Length of the bar, 0 to 1.
    pub share: f64,
    /// Text after the percentage, such as "of 24 cases".
    pub note: String,
    /// Whether the number is from a publication: the bar is pale.
    pub pale: bool,
}

/// Draws shares as bars, for a width in CSS pixels.
#[must_use]
pub fn svg_bars(plot: &BarPlot, width: f64) -> Svg {
    let mut c = Canvas::default();
    let labels = plot.rows.iter().map(|r| r.name.as_str());
    let f = Frame::new(width, labels, if width < NARROW { 62.0 } else { 170.0 });
    let pale = |i: usize| plot.rows.iter().flat_map(|r| &r.bars).any(|b| b.series == i && b.pale);
    let entries = fills(&plot.series, pale);
    let f = f.with_legend(&mut c, &entries);
    let scale = Scale::exact(super::Spread::Linear, 0.0, 1.0, f.left, f.right);
    let bottom = f.bottom(plot.rows.iter().map(|r| r.bars.len()));
    f.grid(&mut c, &scale, bottom, 60.0, num::percent);
    f.rows(&mut c, plot.rows.iter().map(|r| (r.name.as_str(), r.bars.len())), |c, i, y| {
        let bars = &plot.rows[i].bars;
        for (lane, bar) in bars.iter().enumerate() {
            draw_bar(c, &f, &scale, plot, bar, f.lane_centre(y, bars.len(), lane));
        }
    });
    let (height, width) = (f.foot(bottom), f.width);
    c.finish(width, height, &plot.title)
}

fn draw_bar(c: &mut Canvas, f: &Frame, scale: &Scale, plot: &BarPlot, bar: &Bar, y: f64) {
    let share = bar.share.clamp(0.0, 1.0);
    let name = plot.series.get(bar.series).map_or("", String::as_str);
    let text = num::percent(share);
    c.titled(&format!("{name}: {text} {}", bar.note), |c| {
        let pale = if bar.pale { " pale" } else { "" };
        let class = format!("fill s{}{pale}", bar.series % super::SERIES);
        // A share of 0 still gets a pixel, so that its title can be shown.
        c.rect((f.left, y - 6.0), ((scale.at(share) - f.left).max(1.0), 12.0), &class);
    });
    let text = if f.narrow || bar.note.is_empty() { text } else { format!("{text} {}", bar.note) };
    c.text((f.right + 10.0, y + 4.0), Anchor::Start, "", &text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_shares() {
        let bar = |series, share| Bar { series, share, note: "of 24".to_owned(), pale: series == 1 };
        let plot = BarPlot {
            title: "pass rates".to_owned(),
            series: vec!["here".to_owned(), "paper".to_owned()],
            rows: vec![BarRow { name: "default-bfq".to_owned(), bars: vec![bar(0, 0.5), bar(1, 1.0)] }],
        };
        let svg = svg_bars(&plot, 900.0).inline();
        let widths: Vec<f64> = svg
            .split("<rect ")
            // Without the legend's marks, which are 14 wide.
            .filter(|r| r.contains("height=\"12\"") && !r.contains("width=\"14\""))
            .filter_map(|r| r.split("width=\"").nth(1)?.split('"').next()?.parse().ok())
            .collect();
        assert_eq!(widths.len(), 2, "{svg}");
        assert!((widths[1] / widths[0] - 2.0).abs() < 0.02, "{widths:?}");
        assert!(svg.contains("50%") && svg.contains("pale"), "{svg}");
        let odd =
            BarPlot { rows: vec![BarRow { name: "x".to_owned(), bars: vec![bar(0, f64::NAN)] }], ..plot };
        assert!(!svg_bars(&odd, 300.0).inline().contains("NaN"));
    }
}
