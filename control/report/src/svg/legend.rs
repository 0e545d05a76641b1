//! Legends that wrap into lines.

use super::canvas::{Anchor, Canvas, FONT, text_width};

/// Height of a line of the legend.
const LINE: f64 = 20.0;
/// Width of the mark before the text.
const KEY: f64 = 26.0;

/// Mark of an entry.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Key {
    /// A series' filled mark.
    Mark(usize),
    /// A line with the series' mark.
    Curve { series: usize, dashed: bool },
    /// Hollow diamond of a prediction.
    Hollow,
    /// Bar of a target with the zone above it.
    Target,
    /// Dashed line of a limit.
    Limit,
    /// Line from median to maximum.
    Span,
    /// Filled area; pale for the guest's part or a published number.
    Fill { series: usize, pale: bool },
}

/// Filled entries, one for each series; `pale` selects those with published numbers.
pub(crate) fn fills(series: &[String], pale: impl Fn(usize) -> bool) -> Vec<(Key, String)> {
    let entry = |(i, name): (usize, &String)| (Key::Fill { series: i, pale: pale(i) }, name.clone());
    series.iter().enumerate().map(entry).collect()
}

/// Draws the entries from the top left; returns the height used.
pub(crate) fn legend(c: &mut Canvas, entries: &[(Key, String)], at: (f64, f64), width: f64) -> f64 {
    let (mut x, mut y) = (at.0, at.1 + LINE / 2.0);
    for (key, label) in entries {
        let label = super::canvas::fit(label, width - KEY, FONT);
        let need = KEY + text_width(&label, FONT);
        if x > at.0 && x + need > at.0 + width {
            x = at.0;
            y += LINE;
        }
        draw(c, *key, (x, y));
        c.text((x + KEY, y + 4.0), Anchor::Start, "", &label);
        x += need + 10.0;
    }
    if entries.is_empty() { 0.0 } else { y + LINE / 2.0 - at.1 }
}

fn draw(c: &mut Canvas, key: Key, (x, y): (f64, f64)) {
    let mid = x + 10.0;
    match key {
        Key::Mark(s) => c.mark(s, (mid, y), 5.0),
        Key::Curve { series, dashed } => {
            let dash = if dashed { " dashed" } else { "" };
            c.line((x, y), (x + 20.0, y), &format!("curve s{}{dash}", series % super::SERIES));
            if !dashed {
                c.mark(series, (mid, y), 4.0);
            }
        }
        Key::Hollow => c.diamond(5, (mid, y), 5.0),
        Key::Target => {
            c.rect((mid, y - 7.0), (10.0, 14.0), "zone");
            c.line((mid, y - 7.0), (mid, y + 7.0), "target");
        }
        Key::Limit => c.line((x, y), (x + 20.0, y), "limit"),
        Key::Span => {
            c.line((x + 1.0, y), (x + 19.0, y), "span s5");
            c.line((x + 1.0, y - 4.0), (x + 1.0, y + 4.0), "cap s5");
            c.line((x + 19.0, y - 3.0), (x + 19.0, y + 3.0), "cap s5");
        }
        Key::Fill { series, pale } => {
            let pale = if pale { " pale" } else { "" };
            c.rect((x + 4.0, y - 6.0), (14.0, 12.0), &format!("fill s{}{pale}", series % super::SERIES));
        }
    }
}
