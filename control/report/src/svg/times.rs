//! Plot of times as bars, several to a row, with a reference and a limit.

use super::canvas::{Anchor, Canvas, Svg};
use super::legend::{Key, fills};
use super::rows::Frame;
use super::{NARROW, Scale};

/// Times in rows of bars.
#[derive(Clone, Debug, PartialEq)]
pub struct TimePlot {
    /// Text for screen readers.
    pub title: String,
    pub series: Vec<String>,
    /// The rows from top to bottom.
    pub rows: Vec<TimeRow>,
    /// A time to compare with, and its name.
    pub reference: Option<(f64, String)>,
    /// A time of this many seconds or more is a failure.
    pub limit: f64,
}

/// A named group of bars.
#[derive(Clone, Debug, PartialEq)]
pub struct TimeRow {
    /// Label of the row.
    pub name: String,
    /// Bars of the row, from top to bottom.
    pub bars: Vec<TimeBar>,
}

/// Time of one series.
#[derive(Clone, Debug, PartialEq)]
pub struct TimeBar {
    pub series: usize,
    /// Length of the bar, in s.
    pub seconds: f64,
    /// Whether the time is a failure: its text is an X.
    pub failed: bool,
    /// Tooltip after the time.
    pub note: String,
}

/// Draws times as bars, for a width in CSS pixels.
#[must_use]
pub fn svg_times(plot: &TimePlot, width: f64) -> Svg {
    let mut c = Canvas::default();
    let labels = plot.rows.iter().map(|r| r.name.as_str());
    let f = Frame::new(width, labels, if width < NARROW { 62.0 } else { 90.0 });
    let mut entries = fills(&plot.series, |_| false);
    entries.extend(plot.reference.iter().map(|(_, name)| (Key::Limit, name.clone())));
    let f = f.with_legend(&mut c, &entries);
    let times = plot.rows.iter().flat_map(|r| &r.bars).map(|b| b.seconds);
    let longest = times.filter(|t| t.is_finite()).fold(0.0, f64::max).min(plot.limit).max(0.1);
    let scale = Scale::exact(super::Spread::Linear, 0.0, longest * 1.02, f.left, f.right);
    let bottom = f.bottom(plot.rows.iter().map(|r| r.bars.len()));
    f.grid(&mut c, &scale, bottom, 60.0, |v| format!("{v} s"));
    f.rows(&mut c, plot.rows.iter().map(|r| (r.name.as_str(), r.bars.len())), |c, i, y| {
        let bars = &plot.rows[i].bars;
        for (lane, bar) in bars.iter().enumerate() {
            draw_bar(c, &f, &scale, plot, bar, f.lane_centre(y, bars.len(), lane));
        }
        if let Some((at, _)) = &plot.reference {
            f.limit(c, y, bars.len(), scale.at(*at));
        }
    });
    let (height, width) = (f.foot(bottom), f.width);
    c.finish(width, height, &plot.title)
}

fn draw_bar(c: &mut Canvas, f: &Frame, scale: &Scale, plot: &TimePlot, bar: &TimeBar, y: f64) {
    let name = plot.series.get(bar.series).map_or("", String::as_str);
    let seconds = if bar.seconds.is_finite() { bar.seconds.max(0.0) } else { plot.limit };
    let text = if bar.failed { "X".to_owned() } else { format!("{seconds:.2} s") };
    c.titled(&format!("{name}: {text}, {}", bar.note), |c| {
        let class = format!("fill s{}", bar.series % super::SERIES);
        let end = scale.at(seconds.min(plot.limit));
        // A time of 0 still gets a pixel, so that its title can be shown.
        c.rect((f.left, y - 6.0), ((end - f.left).max(1.0), 12.0), &class);
    });
    let class = if bar.failed { "bad" } else { "" };
    c.text((f.right + 10.0, y + 4.0), Anchor::Start, class, &text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_as_long_as_their_times_and_failures_are_crossed() {
        let bar = |series, seconds: f64| TimeBar {
            series,
            seconds,
            failed: seconds >= 60.0,
            note: "n 5".to_owned(),
        };
        let plot = TimePlot {
            title: "start-up".to_owned(),
            series: vec!["default".to_owned(), "domain".to_owned()],
            rows: vec![TimeRow { name: "5r-seq".to_owned(), bars: vec![bar(0, 60.0), bar(1, 15.0)] }],
            reference: Some((1.0, "idle".to_owned())),
            limit: 60.0,
        };
        let svg = svg_times(&plot, 900.0).inline();
        let widths: Vec<f64> = svg
            .split("<rect ")
            // Without the legend's marks, which are 14 wide.
            .filter(|r| r.contains("height=\"12\"") && !r.contains("width=\"14\""))
            .filter_map(|r| r.split("width=\"").nth(1)?.split('"').next()?.parse().ok())
            .collect();
        assert_eq!(widths.len(), 2, "{svg}");
        assert!((widths[0] / widths[1] - 4.0).abs() < 0.05, "{widths:?}");
        assert!(svg.contains(">X<") && svg.contains("15.00 s") && svg.contains("idle"), "{svg}");
        let odd = TimePlot {
            rows: vec![TimeRow { name: "x".to_owned(), bars: vec![bar(0, f64::NAN)] }],
            reference: None,
            ..plot
        };
        assert!(!svg_times(&odd, 300.0).inline().contains("NaN"));
    }
}
