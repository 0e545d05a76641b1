//! Guests compared with process VMs.

use super::guest_pairs::{GuestRatio, Pair};
use crate::page::Section;
use rtvirtio_report::svg::{Axis, Spread};

use crate::page::xy::{axis, plot, series, table};

/// Section on the tasks that were measured both ways; `None` without any.
pub fn guests(
    device: &str,
    [guests_on, others_on]: [&str; 2],
    pairs: &[Pair],
    guest_ratios: &[GuestRatio],
) -> Option<Section> {
    if pairs.is_empty() {
        return None;
    }
    let mut pairs: Vec<&Pair> = pairs.iter().collect();
    pairs.sort_by(|a, b| a.process_ms.total_cmp(&b.process_ms));
    let points = |of: fn(&Pair) -> f64| {
        let one =
            |(i, p): (usize, &&Pair)| (i as f64, of(p), format!("{} task {}: {:.2} ms", p.id, p.task, of(p)));
        pairs.iter().enumerate().map(one).collect()
    };
    let both = vec![
        series(0, "process VM", points(|p| p.process_ms)),
        series(1, "QEMU guest", points(|p| p.guest_ms)),
    ];
    let x = Axis {
        format: |v| format!("{v:.0}"),
        ..axis("tasks by rising tail as a process VM", Spread::Linear)
    };
    let plot = plot("tails in guests", x, axis("p99.99, ms", Spread::Log), both, None);
    let rows = guest_ratios
        .iter()
        .map(|l| {
            let spread = format!("{:.2} to {:.2}", l.spread[0], l.spread[1]);
            vec![
                l.name.clone(),
                l.n.to_string(),
                format!("{:.2}", l.ratio),
                spread,
                format!("{:+.1}", l.more_ms),
            ]
        })
        .collect();
    let head = ["settings", "tasks", "guest / process, median", "p10 to p90", "guest - process, ms, median"];
    Some(Section {
        title: format!("{device}: QEMU guests and process VMs"),
        text: vec![format!(
            "The same loads under the same settings, by processes ({others_on}) and by fio inside guests ({guests_on}): models learn from the former, because a machine runs many more of them, and from the latter for what they say of guests. Two runs of the \
                 same thing differ too, most where BFQ idles."
        )],
        plots: vec![("tails of each task both ways".to_owned(), plot)],
        tables: vec![table("guest over process", &head, rows)],
    })
}
