//! `target` of a task.

use rtvirtio_units::{Nanos, Percentile};
use toml::de::DeValue;

use crate::error::Report;
use crate::field::{Field, Section, kind};
use crate::source::printable;
use crate::types::Target;

/// Shortest target latency: below it a block layer is lost in the clock's own error.
const MIN_LATENCY: Nanos = Nanos(1_000);
/// Longest target latency.
const MAX_LATENCY: Nanos = Nanos(3_600_000_000_000);
/// Lowest percentile of a target: the median.
const MIN_PERCENTILE: Percentile = Percentile(50.0);
/// Highest percentile of a target; more would take over three million samples to prove.
const MAX_PERCENTILE: Percentile = Percentile(99.9999);

/// Reads `target = { percentile, latency }`.
pub(crate) fn read(report: &mut Report<'_>, task: &Section<'_, '_>) -> Field<Target> {
    let (place, value) = match task.get("target") {
        None => return task.absent("target"),
        Some(found) => found,
    };
    let DeValue::Table(table) = value else {
        let help = match value {
            DeValue::String(text) if text.parse::<Nanos>().is_ok() => {
                format!("write target = {{ latency = \"{text}\" }}")
            }
            _ => "write target = { percentile = \"p99.99\", latency = \"400ms\" }".to_owned(),
        };
        report.add(place.value, format!("`target` must be a table, not {}", kind(value)), help);
        return Field::Bad;
    };
    let aliases = [
        ("p", "percentile"),
        ("quantile", "percentile"),
        ("max", "latency"),
        ("deadline", "latency"),
        ("limit", "latency"),
        ("rate", "rate beside target"),
    ];
    let section = Section::open(report, "target", table, place.value, &["percentile", "latency"], &aliases);
    let percentile = section.quantity::<Percentile>(report, "percentile").and_then(|(p, text)| {
        if p >= MIN_PERCENTILE && p <= MAX_PERCENTILE {
            return Field::Given(p);
        }
        let help = format!("write a percentile from {MIN_PERCENTILE} to {MAX_PERCENTILE}");
        report.add(
            section.value_span("percentile"),
            format!("`percentile` is {}, out of its range", printable(text, 60)),
            help,
        );
        Field::Bad
    });
    let latency = section.quantity::<Nanos>(report, "latency").and_then(|(latency, text)| {
        if (MIN_LATENCY..=MAX_LATENCY).contains(&latency) {
            return Field::Given(latency);
        }
        let help = "write a latency from 1us to 1h".to_owned();
        report.add(
            section.value_span("latency"),
            format!("`latency` is {}, out of its range", printable(text, 60)),
            help,
        );
        Field::Bad
    });
    let latency = section.required(report, "latency", "\"400ms\"", latency).into_value();
    let percentile = percentile.or(Percentile::P9999);
    latency.zip(percentile).map(|(latency, percentile)| Target { percentile, latency }).into()
}
