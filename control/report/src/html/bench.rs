//! A page of experiments: sections of text, plots and tables that the caller fills with data.

use super::{Rows, SMALL, Small, WIDE, section};
use crate::clean::xml;
use crate::svg::{self, BarPlot, XyPlot, svg_bars, svg_xy};

/// A page.
#[derive(Clone, Debug)]
pub struct BenchPage {
    /// Heading.
    pub title: String,
    /// Sentences below it.
    pub lead: Vec<String>,
    /// Sections in order.
    pub sections: Vec<BenchSection>,
    /// When and by what it was made.
    pub generated: String,
}

/// A section.
#[derive(Clone, Debug, Default)]
pub struct BenchSection {
    /// Heading.
    pub title: String,
    /// Paragraphs.
    pub text: Vec<String>,
    /// Plots with their captions.
    pub plots: Vec<(String, Plot)>,
    /// Tables.
    pub tables: Vec<BenchTable>,
}

/// A plot.
#[derive(Clone, Debug)]
pub enum Plot {
    /// Curves.
    Xy(Box<XyPlot>),
    /// Bars of shares.
    Bars(BarPlot),
}

/// A table.
#[derive(Clone, Debug, Default)]
pub struct BenchTable {
    /// What it holds, for screen readers.
    pub label: String,
    /// Headings.
    pub head: Vec<String>,
    /// Rows; the first field is a row heading.
    pub rows: Vec<Vec<String>>,
}

/// The page as one HTML document.
#[must_use]
pub fn bench_html(page: &BenchPage) -> String {
    let body: String = page
        .sections
        .iter()
        .enumerate()
        .map(|(i, s)| section(&format!("s{i}"), &s.title, &inner(s)))
        .collect();
    let lead: String = page.lead.iter().map(|l| format!("<p>{}</p>\n", xml(l))).collect();
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"/>\
         <title>{title}</title>\n<style>\n{}{}</style></head>\n<body>\n\
         <header><h1>{title}</h1>\n{lead}</header>\n<main>\n{body}</main>\n\
         <footer>{}</footer>\n</body></html>\n",
        svg::STYLE,
        include_str!("page.css"),
        xml(&page.generated),
        title = xml(&page.title),
    )
}

fn inner(s: &BenchSection) -> String {
    let mut out: String = s.text.iter().map(|t| format!("<p>{}</p>\n", xml(t))).collect();
    for (caption, plot) in &s.plots {
        let draw = |width: f64| match plot {
            Plot::Xy(plot) => svg_xy(plot, width).inline(),
            Plot::Bars(plot) => svg_bars(plot, width).inline(),
        };
        out.push_str(&format!(
            "<figure><figcaption>{}</figcaption><div class=\"wide\">{}</div><div class=\"narrow\">{}</div></figure>\n",
            xml(caption),
            draw(WIDE),
            draw(SMALL)
        ));
    }
    for table in &s.tables {
        let head: Vec<(&str, &str)> = table.head.iter().map(|h| (h.as_str(), "")).collect();
        let mut rows = Rows::new(&table.label, Small::Scroll, &head);
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
        let page = BenchPage {
            title: "a <b> & c".to_owned(),
            lead: vec!["<script>".to_owned()],
            sections: vec![BenchSection {
                title: "x".to_owned(),
                text: vec!["1 < 2".to_owned()],
                plots: Vec::new(),
                tables: vec![BenchTable {
                    label: "t".to_owned(),
                    head: vec!["case".to_owned()],
                    rows: vec![vec!["<i>".to_owned()]],
                }],
            }],
            generated: "now".to_owned(),
        };
        let html = bench_html(&page);
        assert!(!html.contains("<script>") && !html.contains("<i>"), "{html}");
        assert!(html.contains("a &lt;b&gt; &amp; c") && html.contains("1 &lt; 2"));
    }
}
