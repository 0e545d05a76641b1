//! `target` or `targets` of a task.

use rtvirtio_units::{Nanos, Percentile};
use toml::de::DeValue;

use crate::error::Report;
use crate::field::{Section, kind};
use crate::goal::Target;
use crate::source::Span;

/// Shortest target latency: below it the clock's own error prevails.
const MIN_LATENCY: Nanos = Nanos(1_000);
/// Longest target latency: one hour.
const MAX_LATENCY: Nanos = Nanos(3_600_000_000_000);
/// Lowest percentile of a target: the median.
const MIN_PERCENTILE: Percentile = Percentile(50.0);
/// Highest percentile of a target; more would take over three million samples to prove.
const MAX_PERCENTILE: Percentile = Percentile(99.9999);

/// Limit of targets of one task.
const MAX_TARGETS: usize = 8;

/// Reads `target = { percentile, latency }` or `targets = [{ ... }, ...]`; `None` when an error was
/// reported.
pub(crate) fn read_all(report: &mut Report<'_>, task: &Section<'_, '_>) -> Option<Vec<Target>> {
    match (task.get("target"), task.get("targets")) {
        (None, None) => (!task.meant("target") && !task.meant("targets")).then(Vec::new),
        (Some((place, value)), None) => Some(vec![read(report, "target", value, place.value)?]),
        (None, Some((place, value))) => read_list(report, value, place.value),
        (Some(_), Some((place, _))) => {
            let help = "move the one target into the list and remove `target`";
            report.add(place.key, "a task has `target` or `targets`, not both", help);
            None
        }
    }
}

fn read_list(report: &mut Report<'_>, value: &DeValue<'_>, span: Span) -> Option<Vec<Target>> {
    let example = "write targets = [{ percentile = \"p99\", latency = \"2ms\" }, { percentile = \"p99.99\", latency = \"20ms\" }]";
    let DeValue::Array(items) = value else {
        report.add(span, format!("`targets` must be a list of tables, not {}", kind(value)), example);
        return None;
    };
    if items.is_empty() {
        report.add(span, "`targets` is an empty list", "remove the line, or name a target");
        return None;
    }
    if items.len() > MAX_TARGETS {
        let help = "keep the needed ones: a target at one percentile bounds all lower ones";
        report.add(span, format!("a task has at most {MAX_TARGETS} targets"), help);
        return None;
    }
    let mut read_all: Vec<(Target, Span)> = Vec::new();
    for item in items.iter() {
        if let Some(target) = read(report, "targets", item.get_ref(), item.span()) {
            read_all.push((target, item.span()));
        }
    }
    if read_all.len() < items.len() {
        return None;
    }
    read_all.sort_by(|a, b| a.0.percentile.0.total_cmp(&b.0.percentile.0));
    for pair in read_all.windows(2) {
        let [(low, _), (high, at)] = pair else { continue };
        if low.percentile == high.percentile {
            let message = format!("this task already has a target at {}", high.percentile);
            report.add(at.clone(), message, "keep the shorter one");
            return None;
        }
        if high.latency < low.latency {
            let message = format!(
                "the target at {} is shorter than that at {} ({} and {})",
                high.percentile, low.percentile, high.latency, low.latency
            );
            let help = format!("remove the one at {}: the other includes it", low.percentile);
            report.add(at.clone(), message, help);
            return None;
        }
    }
    Some(read_all.into_iter().map(|(target, _)| target).collect())
}

/// Reads one target under the key `name`.
fn read(report: &mut Report<'_>, name: &'static str, value: &DeValue<'_>, span: Span) -> Option<Target> {
    let DeValue::Table(table) = value else {
        let help = match value {
            DeValue::String(text) if text.parse::<Nanos>().is_ok() => {
                format!("write target = {{ latency = \"{text}\" }}")
            }
            _ => "write target = { percentile = \"p99.99\", latency = \"400ms\" }".to_owned(),
        };
        let what = if name == "target" { "`target`" } else { "each of `targets`" };
        report.add(span, format!("{what} must be a table, not {}", kind(value)), help);
        return None;
    };
    let aliases = [
        ("p", "percentile"),
        ("quantile", "percentile"),
        ("max", "latency"),
        ("deadline", "latency"),
        ("limit", "latency"),
        ("rate", "rate beside target"),
    ];
    let section = Section::open(report, name, table, span, &["percentile", "latency"], &aliases);
    let help = format!("write a percentile from {MIN_PERCENTILE} to {MAX_PERCENTILE}");
    let percentile = section.ranged(report, "percentile", [MIN_PERCENTILE, MAX_PERCENTILE], help);
    let help = "write a latency from 1us to 1h";
    let latency = section.ranged(report, "latency", [MIN_LATENCY, MAX_LATENCY], help);
    let latency = section.required(report, "latency", "\"400ms\"", latency).into_value();
    let percentile = percentile.or(Percentile::P9999);
    latency.zip(percentile).map(|(latency, percentile)| Target { percentile, latency })
}
