//! A page of experiments: sections of text, plots and tables.

pub mod claims;
pub mod xy;

use rtvirtio_report::html::{HtmlTable, NarrowLayout, document, figure, section};
use rtvirtio_report::svg::{BarPlot, Svg, TimePlot, XyPlot, svg_bars, svg_times, svg_xy};
use rtvirtio_report::xml;

/// A page with its sections.
#[derive(Clone, Debug)]
pub struct Page {
    /// Heading of the page.
    pub title: String,
    /// Sentences below the heading.
    pub lead: Vec<String>,
    /// Sections in the order shown.
    pub sections: Vec<Section>,
    /// Date, and version of the program.
    pub generated: String,
}

/// Text, plots and tables below a heading.
#[derive(Clone, Debug, Default)]
pub struct Section {
    /// Heading of the section.
    pub title: String,
    /// Paragraphs below the heading.
    pub text: Vec<String>,
    /// Plots with their captions.
    pub plots: Vec<(String, Plot)>,
    /// Tables below the plots.
    pub tables: Vec<Table>,
}

/// A plot of any kind.
#[derive(Clone, Debug)]
pub enum Plot {
    /// Curves over two numeric axes.
    Xy(Box<XyPlot>),
    /// Bars of shares, 0 to 1.
    Bars(BarPlot),
    /// Bars of durations.
    Times(TimePlot),
}

/// Width of a plot in a file of its own, in CSS pixels.
const FILE_WIDTH: f64 = 720.0;

impl Plot {
    /// Plot as an SVG file of its own.
    #[must_use]
    pub fn standalone_svg(&self) -> String {
        self.svg(FILE_WIDTH).standalone()
    }

    fn svg(&self, width: f64) -> Svg {
        match self {
            Self::Xy(plot) => svg_xy(plot, width),
            Self::Bars(plot) => svg_bars(plot, width),
            Self::Times(plot) => svg_times(plot, width),
        }
    }
}

/// A table of text.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// Description for screen readers.
    pub label: String,
    /// Headings of the columns.
    pub head: Vec<String>,
    /// Rows; the first field of each is a row heading.
    pub rows: Vec<Vec<String>>,
}

/// The page as one HTML document.
#[must_use]
pub fn page_html(page: &Page) -> String {
    let body: String = page
        .sections
        .iter()
        .enumerate()
        .map(|(i, s)| section(&format!("s{i}"), &s.title, &inner(s)))
        .collect();
    let lead: String = page.lead.iter().map(|l| format!("<p>{}</p>\n", xml(l))).collect();
    document(&page.title, &lead, &body, &page.generated)
}

fn inner(s: &Section) -> String {
    let mut out: String = s.text.iter().map(|t| format!("<p>{}</p>\n", xml(t))).collect();
    for (caption, plot) in &s.plots {
        out.push_str(&figure(&xml(caption), |width| plot.svg(width)));
    }
    for table in &s.tables {
        let head: Vec<(&str, &str)> = table.head.iter().map(|h| (h.as_str(), "")).collect();
        let mut rows = HtmlTable::new(&table.label, NarrowLayout::Scroll, &head);
        for row in &table.rows {
            let cells: Vec<(&str, &str)> = row.iter().map(|c| (c.as_str(), "")).collect();
            rows.row(1, &cells);
        }
        out.push_str(&rows.done());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_stays_text() {
        let page = Page {
            title: "a <b> & c".to_owned(),
            lead: vec!["<script>".to_owned()],
            sections: vec![Section {
                title: "x".to_owned(),
                text: vec!["1 < 2".to_owned()],
                plots: Vec::new(),
                tables: vec![Table {
                    label: "t".to_owned(),
                    head: vec!["case".to_owned()],
                    rows: vec![vec!["<i>".to_owned()]],
                }],
            }],
            generated: "now".to_owned(),
        };
        let html = page_html(&page);
        assert!(!html.contains("<script>") && !html.contains("<i>"), "{html}");
        assert!(html.contains("a &lt;b&gt; &amp; c") && html.contains("1 &lt; 2"));
    }
}
