//! One self-contained HTML file: no network, no scripts, no web fonts.
//!
//! The file is also well-formed XML, so that a strict parser can check that all foreign text was
//! escaped. Colours follow the reader's light or dark theme, and turn black on paper. Every figure
//! has a caption, every plot a text alternative, and a table at the end has the numbers of all of
//! them.

mod method;
mod plan;
mod profile;
mod results;

use rtvirtio_measure::ResultFile;
use rtvirtio_model::Profile;
use rtvirtio_planner::Plan;

use crate::svg;
use rtvirtio_text::xml;

/// Width that plots are drawn for on a large screen, in CSS pixels.
const WIDE_WIDTH: f64 = 1040.0;
/// Width that plots are drawn for on a phone, in CSS pixels.
const NARROW_WIDTH: f64 = 368.0;
/// Between number and unit: a space that does not break.
const GAP: &str = "\u{a0}";
/// Between groups of three digits: a narrow space that does not break.
const THIN: &str = "\u{202f}";

#[derive(Clone, Copy, Debug)]
pub struct ReportInput<'a> {
    /// Heading of the page.
    pub title: &'a str,
    /// Result with the runs. The first is the baseline of comparisons.
    pub result: &'a ResultFile,
    /// The plan in force during the last run, if there was one.
    pub plan: Option<&'a Plan>,
    /// The device's profile, if it was measured.
    pub profile: Option<&'a Profile>,
    /// Paragraphs before everything else, a sentence or two each.
    pub first: &'a [String],
    /// Remarks of the caller, a sentence or two each.
    pub notes: &'a [String],
    /// Date and program of the report, as shown at its end.
    pub generated: &'a str,
}

/// The report as one HTML document.
#[must_use]
pub fn html(report: &ReportInput<'_>) -> String {
    let mut main = String::new();
    main.push_str(&results::latency(report));
    main.push_str(&results::curves(report));
    main.push_str(&results::rates(report));
    if let Some(p) = report.plan {
        main.push_str(&plan::settings(p));
        main.push_str(&plan::terms(p));
    }
    if let Some(p) = report.profile {
        main.push_str(&profile::section(p));
    }
    main.push_str(&results::numbers(report));
    main.push_str(&method::sections(report));
    document(report.title, &results::headline(report), &main, report.generated)
}

/// An HTML document. `lead`, below the heading, and `main` are markup; `title` and `generated` are
/// text.
#[must_use]
pub fn document(title: &str, lead: &str, main: &str, generated: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\"/>\
         <title>{title}</title>\n<style>\n{}{}</style></head>\n<body>\n\
         <header><h1>{title}</h1>\n{lead}</header>\n<main>\n{main}</main>\n\
         <footer>{}</footer>\n</body></html>\n",
        svg::STYLE,
        include_str!("page.css"),
        xml(generated),
        title = xml(title),
    )
}

/// A section with its heading. `body` is markup.
#[must_use]
pub fn section(id: &str, title: &str, body: &str) -> String {
    format!("<section aria-labelledby=\"{id}\"><h2 id=\"{id}\">{}</h2>\n{body}</section>\n", xml(title))
}

/// A figure drawn for both widths; style sheets show one of them. `caption` is markup.
pub fn figure(caption: &str, draw: impl Fn(f64) -> svg::Svg) -> String {
    format!(
        "<figure><figcaption>{caption}</figcaption><div class=\"wide\">{}</div><div class=\"narrow\">{}</div></figure>\n",
        draw(WIDE_WIDTH).inline(),
        draw(NARROW_WIDTH).inline()
    )
}

/// Legend outside the plots, as HTML.
fn keys<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let items: String =
        names.enumerate().map(|(i, n)| format!("<li>{}{}</li>", svg::svg_key(i), xml(n))).collect();
    format!("<ul class=\"keys\">{items}</ul>")
}

/// Layout of a table on a narrow screen.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum NarrowLayout {
    /// Scrolls sideways, by keyboard too, with its row headings in sight.
    Scroll,
    /// Puts the last field of a row below the others. Roles are then spelled out, since a changed
    /// `display` takes them from a table in some browsers.
    Stack,
}

/// A table under construction: headings and fields are escaped, classes are not.
pub struct HtmlTable {
    out: String,
    label: String,
    small: NarrowLayout,
}

impl HtmlTable {
    /// `head` holds (title, class) per column.
    #[must_use]
    pub fn new(label: &str, small: NarrowLayout, head: &[(&str, &str)]) -> Self {
        let mut rows = Self { out: String::new(), label: xml(label), small };
        let role = rows.role("columnheader");
        let cells: String = head
            .iter()
            .map(|(t, class)| format!("<th scope=\"col\"{role} class=\"{class}\">{}</th>", xml(t)))
            .collect();
        let (group, row) = (rows.role("rowgroup"), rows.role("row"));
        rows.out = format!("<thead{group}><tr{row}>{cells}</tr></thead><tbody{group}>");
        rows
    }

    fn role(&self, role: &str) -> String {
        if self.small == NarrowLayout::Stack { format!(" role=\"{role}\"") } else { String::new() }
    }

    /// Adds a row of (text, class); the first `names` fields are row headings.
    pub fn row<S: AsRef<str>>(&mut self, names: usize, cells: &[(S, &str)]) {
        let mut line = String::new();
        for (i, (text, class)) in cells.iter().enumerate() {
            let (tag, scope, role) =
                if i < names { ("th", " scope=\"row\"", "rowheader") } else { ("td", "", "cell") };
            let role = self.role(role);
            line.push_str(&format!("<{tag}{scope}{role} class=\"{class}\">{}</{tag}>", xml(text.as_ref())));
        }
        self.out.push_str(&format!("<tr{}>{line}</tr>\n", self.role("row")));
    }

    /// Closes the table and returns its HTML.
    #[must_use]
    pub fn done(self) -> String {
        let class = if self.small == NarrowLayout::Stack { "stack" } else { "pin" };
        format!(
            "<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{}\"><table class=\"{class}\"{}>{}</tbody>\
             </table></div>\n",
            self.label,
            self.role("table"),
            self.out
        )
    }
}

#[cfg(test)]
mod tests;
