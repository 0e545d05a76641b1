//! `rtvirtio contract waits`: the VMs that each VM waits for, as text.

use std::fmt::Write as _;

use rtvirtio_daemon::observe::WaitsObservation;
use rtvirtio_measure::waits::{WaitKind, WaitRow};
use rtvirtio_report::terminal;

/// A line for each VM and device, the longest waits first.
pub fn text(seen: &WaitsObservation) -> String {
    let mut out = String::new();
    let mut rows: Vec<&WaitRow> = seen.rows.iter().collect();
    rows.sort_by(|a, b| b.waited_s.unwrap_or(0.0).total_cmp(&a.waited_s.unwrap_or(0.0)));
    // Writing to a String cannot fail.
    if !rows.is_empty() {
        let _ = writeln!(out, "{:<20} {:<18} {:>10} {:>7}  for", "VM", "device", "waited", "window");
    }
    for row in &rows {
        let waited = row.waited_s.map_or_else(|| "-".to_owned(), |s| format!("{s:.3}s"));
        let window = format!("{:.0}s", row.seconds);
        let (vm, device) = (terminal(&row.vm, false), terminal(&row.device, false));
        let _ = writeln!(out, "{vm:<20} {device:<18} {waited:>10} {window:>7}  {}", targets(row));
    }
    if rows.iter().any(|row| row.kind == WaitKind::Estimate) {
        out.push_str(
            "estimate: what its requests took beyond what they take alone, shared out by what the others had of the device meanwhile\n",
        );
    }
    if rows.is_empty() && seen.unseen.is_empty() {
        out.push_str(
            "nothing is seen yet: rtvirtiod samples the running VMs of contracts every `observe` (10 s)\n",
        );
    }
    for why in &seen.unseen {
        let _ = writeln!(out, "not seen: {}", terminal(why, false));
    }
    out
}

fn targets(row: &WaitRow) -> String {
    let percent = |share: f64| format!("{:.0}%", 100.0 * share);
    let mut parts: Vec<String> = row
        .neighbours
        .iter()
        .map(|one| format!("{} {}", terminal(&one.vm, false), percent(one.share)))
        .collect();
    let rest = [("itself", row.own), ("others", row.others), ("a cap", row.idle.unwrap_or(0.0))];
    parts.extend(
        rest.iter().filter(|(_, share)| *share >= 0.005).map(|(name, s)| format!("{name} {}", percent(*s))),
    );
    if parts.is_empty() {
        parts.push("no other VM".to_owned());
    }
    let kind = match (row.kind, row.waited_s) {
        (WaitKind::Exact, _) => "",
        (WaitKind::Estimate, Some(_)) => " (estimate)",
        (WaitKind::Estimate, None) => " of the device's time (estimate; nothing counts its latencies)",
    };
    parts.join(", ") + kind
}

#[cfg(test)]
mod tests {
    use rtvirtio_measure::waits::WaitFor;

    use super::*;

    fn row(vm: &str, kind: WaitKind, waited_s: Option<f64>, neighbours: &[(&str, f64)]) -> WaitRow {
        let one = |(vm, share): &(&str, f64)| WaitFor { vm: (*vm).to_owned(), share: *share };
        WaitRow {
            vm: vm.to_owned(),
            device: "/dev/sda".to_owned(),
            kind,
            seconds: 300.0,
            waited_s,
            own: 0.1,
            idle: None,
            neighbours: neighbours.iter().map(one).collect(),
            others: 0.0,
        }
    }

    #[test]
    fn the_longest_first_and_an_estimate_says_that_it_is_one() {
        let seen = WaitsObservation {
            rows: vec![
                row("hmi", WaitKind::Estimate, None, &[("hist", 0.5)]),
                row("plc", WaitKind::Estimate, Some(4.0), &[("hist", 0.6), ("hmi", 0.3)]),
                row("db", WaitKind::Exact, Some(1.5), &[]),
            ],
            unseen: vec!["/dev/sdb: it is not measured".to_owned()],
            ..WaitsObservation::default()
        };
        let text = text(&seen);
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines[1].starts_with("plc ") && lines[1].ends_with("hist 60%, hmi 30%, itself 10% (estimate)"),
            "{text}"
        );
        assert!(lines[2].starts_with("db ") && lines[2].ends_with("itself 10%"), "{text}");
        assert!(lines[3].contains("of the device's time (estimate"), "{text}");
        assert!(lines[4].starts_with("estimate:") && lines[5].starts_with("not seen: /dev/sdb"), "{text}");
    }

    #[test]
    fn nothing_seen_is_said() {
        assert!(text(&WaitsObservation::default()).contains("nothing is seen yet"));
    }
}
