//! A small SVG writer: escapes all text, writes no number that is not finite, takes colours only
//! from CSS classes.

use unicode_width::UnicodeWidthStr;

/// Size of labels in pixels, as in the style sheet.
pub(crate) const FONT: f64 = 12.0;
/// Upper estimate of the average width of a character, in ems (DejaVu Sans; other system fonts are
/// narrower).
const EM: f64 = 0.62;
/// Font size of bold row names, for estimates of their width.
pub(crate) const BOLD: f64 = FONT * 1.12;

/// A finished drawing with its size.
#[derive(Clone, Debug, PartialEq)]
pub struct Svg {
    pub(crate) width: f64,
    pub(crate) height: f64,
    title: String,
    body: String,
}

/// Alignment of a text at its position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// A drawing under construction.
#[derive(Debug, Default)]
pub(crate) struct Canvas {
    body: String,
}

impl Svg {
    /// An `<svg>` element for an HTML page that includes [`super::STYLE`]. Screen readers read its
    /// title; the marks have their values as titles.
    #[must_use]
    pub fn inline(&self) -> String {
        self.element("", "")
    }

    /// A standalone SVG file with a background: the embedding page may be dark where the reader's
    /// system is light, and light where that is dark.
    #[must_use]
    pub fn standalone(&self) -> String {
        let ground = "<rect width=\"100%\" height=\"100%\" style=\"fill:var(--paper)\"/>";
        let style = format!("<style>{}</style>{ground}", super::STYLE);
        self.element(" xmlns=\"http://www.w3.org/2000/svg\"", &style)
    }

    fn element(&self, namespace: &str, style: &str) -> String {
        let (w, h, title) = (number(self.width), number(self.height), rtvirtio_text::xml(&self.title));
        format!(
            "<svg{namespace} class=\"rt\" viewBox=\"0 0 {w} {h}\" width=\"{w}\" height=\"{h}\" role=\"img\" \
             aria-label=\"{title}\">{style}{}</svg>",
            self.body
        )
    }
}

impl Canvas {
    /// Turns the canvas into a drawing of this size.
    pub(crate) fn finish(self, width: f64, height: f64, title: &str) -> Svg {
        Svg { width, height, title: title.to_owned(), body: self.body }
    }

    pub(crate) fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), class: &str) {
        self.body.push_str(&format!(
            "<line x1=\"{}\" y1=\"{}\" x2=\"{}\" y2=\"{}\" class=\"{class}\"/>",
            number(x1),
            number(y1),
            number(x2),
            number(y2)
        ));
    }

    /// A rectangle; a negative size draws nothing.
    pub(crate) fn rect(&mut self, (x, y): (f64, f64), (w, h): (f64, f64), class: &str) {
        if w > 0.0 && h > 0.0 {
            self.body.push_str(&format!(
                "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" class=\"{class}\"/>",
                number(x),
                number(y),
                number(w),
                number(h)
            ));
        }
    }

    pub(crate) fn polygon(&mut self, points: &[(f64, f64)], class: &str) {
        self.body.push_str(&format!("<polygon points=\"{}\" class=\"{class}\"/>", coordinates(points)));
    }

    pub(crate) fn polyline(&mut self, points: &[(f64, f64)], class: &str) {
        self.body.push_str(&format!("<polyline points=\"{}\" class=\"{class}\"/>", coordinates(points)));
    }

    pub(crate) fn circle(&mut self, (x, y): (f64, f64), r: f64, class: &str) {
        self.body.push_str(&format!(
            "<circle cx=\"{}\" cy=\"{}\" r=\"{}\" class=\"{class}\"/>",
            number(x),
            number(y),
            number(r)
        ));
    }

    pub(crate) fn text(&mut self, (x, y): (f64, f64), anchor: Anchor, class: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => " text-anchor=\"middle\"",
            Anchor::End => " text-anchor=\"end\"",
        };
        self.body.push_str(&format!(
            "<text x=\"{}\" y=\"{}\"{anchor} class=\"{class}\">{}</text>",
            number(x),
            number(y),
            rtvirtio_text::xml(text)
        ));
    }

    /// Draws with a title that browsers show as a tooltip.
    pub(crate) fn titled(&mut self, title: &str, draw: impl FnOnce(&mut Self)) {
        self.body.push_str(&format!("<g><title>{}</title>", rtvirtio_text::xml(title)));
        draw(self);
        self.body.push_str("</g>");
    }

    /// Draws the mark of a series: filled, and of another shape for each, so that colour is not
    /// needed to distinguish them.
    pub(crate) fn mark(&mut self, series: usize, (x, y): (f64, f64), r: f64) {
        let class = format!("mark s{}", series % super::SERIES);
        let around = |angles: &[f64], r: f64| -> Vec<(f64, f64)> {
            angles.iter().map(|a| a.to_radians()).map(|a| (x + r * a.sin(), y - r * a.cos())).collect()
        };
        match series % super::SERIES {
            0 => self.circle((x, y), r, &class),
            1 => self.rect((x - r * 0.9, y - r * 0.9), (r * 1.8, r * 1.8), &class),
            2 => self.polygon(&around(&[0.0, 120.0, 240.0], r * 1.25), &class),
            3 => self.polygon(&around(&[60.0, 180.0, 300.0], r * 1.25), &class),
            4 => self.polygon(&around(&[0.0, 72.0, 144.0, 216.0, 288.0], r * 1.15), &class),
            _ => self.polygon(&around(&[30.0, 90.0, 150.0, 210.0, 270.0, 330.0], r * 1.1), &class),
        }
    }

    /// Draws a hollow diamond, the mark of a prediction.
    pub(crate) fn diamond(&mut self, series: usize, (x, y): (f64, f64), r: f64) {
        let points = [(x, y - r), (x + r, y), (x, y + r), (x - r, y)];
        self.polygon(&points, &format!("hollow s{}", series % super::SERIES));
    }
}

/// Upper estimate of a label's width. The browser's font is unknown here, so layouts must not
/// depend on the exact width.
pub(crate) fn text_width(s: &str, size: f64) -> f64 {
    s.width() as f64 * size * EM
}

/// Text shortened in its middle to about `room` pixels.
pub(crate) fn fit(s: &str, room: f64, size: f64) -> String {
    let style = crate::text::Style::default();
    style.shorten(s, (room / (size * EM)).floor().max(3.0) as usize)
}

/// Coordinate with at most one decimal. A non-finite value becomes 0: a mark in the corner is
/// visible, `NaN` makes browsers drop the element.
fn number(v: f64) -> String {
    let v = if v.is_finite() { (v * 10.0).round() / 10.0 } else { 0.0 };
    let s = format!("{v}");
    if s == "-0" { "0".to_owned() } else { s }
}

fn coordinates(points: &[(f64, f64)]) -> String {
    points.iter().map(|&(x, y)| format!("{},{}", number(x), number(y))).collect::<Vec<_>>().join(" ")
}
