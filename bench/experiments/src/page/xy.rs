//! Plots and tables of names and numbers.

use crate::page::{Plot, Table};
use rtvirtio_report::svg::{Axis, Series, Spread, XyPlot};

/// An axis of plain numbers, as wide as the data.
pub fn axis(label: &str, spread: Spread) -> Axis {
    Axis { label: label.to_owned(), spread, ends: None, marks: None, format: |v| format!("{v}") }
}

/// A plot with a legend.
pub fn plot(title: &str, x: Axis, y: Axis, series: Vec<Series>, limit: Option<(f64, String)>) -> Plot {
    let (title, heading) = (title.to_owned(), String::new());
    Plot::Xy(Box::new(XyPlot {
        title,
        heading,
        x,
        y,
        series,
        limits: limit.into_iter().collect(),
        legend: true,
        height: 280.0,
    }))
}

/// A curve: x, y and the text of each point. All except the first are dashed.
pub fn series(index: usize, name: &str, points: Vec<(f64, f64, String)>) -> Series {
    Series { name: name.to_owned(), index, dashed: index > 0, points }
}

/// Makes a table of text.
pub fn table(label: &str, head: &[&str], rows: Vec<Vec<String>>) -> Table {
    Table { label: label.to_owned(), head: head.iter().map(|h| (*h).to_owned()).collect(), rows }
}
