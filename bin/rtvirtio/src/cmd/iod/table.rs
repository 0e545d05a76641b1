//! `rtvirtio iod status` for people.

use std::fmt::Write as _;

use rtvirtio_report::terminal;
use rtvirtio_units::{Bytes, Nanos};
use serde_json::Value;

/// What the columns are.
const LEGEND: &str = "\
promised: longest time of a request within share and burst of its reservation, if device and host are as the
  configuration declares them; worst and missed: the longest such request, and those that took longer
p50 ... longest: from the guest's queue to the answer, of all requests, also beyond a reservation
alpha: rate while the VM had something to ask; Delta: longest time between two pieces meanwhile (bounded delay)
capped: pieces that waited for a cap of the VM; held by regulators: the same for all VMs of a device, and how much
  later than their exact moment they went
";

/// The status as a table, with its legend.
pub fn status(status: &Value) -> String {
    let mut s = String::new();
    list(status, "devices").iter().for_each(|d| device(d, &mut s));
    promises(status, &mut s);
    let _ = writeln!(
        s,
        "{:<16} {:<6} {:>10} {:>12} {:>9} {:>9} {:>9} {:>9} {:>11} {:>9} {:>7}",
        "VM", "", "requests", "moved", "p50", "p99", "p99.99", "longest", "alpha", "Delta", "capped"
    );
    list(status, "vms").iter().for_each(|v| vm(v, &mut s));
    s.push_str(LEGEND);
    s
}

fn list(value: &Value, key: &str) -> Vec<Value> {
    value[key].as_array().cloned().unwrap_or_default()
}

fn time(value: &Value, key: &str) -> String {
    Nanos(value[key].as_u64().unwrap_or(0)).to_string()
}

fn name(value: &Value) -> String {
    terminal(value["name"].as_str().unwrap_or_default(), false)
}

fn device(d: &Value, s: &mut String) {
    // Writing to a String cannot fail.
    let _ = write!(s, "device {}: window {}", name(d), d["window"]);
    if d["held"].as_u64().unwrap_or(0) > 0 {
        let _ =
            write!(s, ", {} pieces held by regulators, p99.99 {} late", d["held"], time(d, "late_p9999_ns"));
    }
    if let Some(policy) = d["policy"].as_str().filter(|policy| *policy != "edf") {
        let _ = write!(s, "; policy {policy}: reservations have no effect");
    }
    s.push('\n');
    if d["discard_pieces"].as_u64().unwrap_or(0) > 0 {
        let _ = writeln!(
            s,
            "  discards: {} pieces, the longest took {}; {} took longer than `cost.discard`",
            d["discard_pieces"],
            time(d, "discard_longest_ns"),
            d["discard_overruns"],
        );
    }
}

/// The promises first: they are what the domain is for.
fn promises(status: &Value, s: &mut String) {
    let vms = list(status, "vms");
    if vms.iter().all(|vm| list(vm, "promises").is_empty()) {
        return;
    }
    let _ = writeln!(
        s,
        "{:<16} {:<7} {:>6} {:>9} {:>9} {:>9} {:>7} {:>10}",
        "VM", "", "share", "burst", "promised", "worst", "missed", "requests"
    );
    for vm in &vms {
        for p in list(vm, "promises") {
            let count = |key: &str| p[key].as_u64().unwrap_or(0);
            // Nothing was seen: neither kept nor missed.
            let seen = count("requests") > 0;
            let worst = if seen { time(&p, "worst_ns") } else { "-".into() };
            let missed = if seen { count("missed").to_string() } else { "-".into() };
            let _ = writeln!(
                s,
                "{:<16} {:<7} {:>6} {:>9} {:>9} {worst:>9} {missed:>7} {:>10}",
                name(vm),
                p["key"].as_str().unwrap_or_default(),
                format!("{:.0}%", p["share"].as_f64().unwrap_or(0.0) * 100.0),
                time(&p, "burst_ns"),
                time(&p, "deadline_ns"),
                count("requests"),
            );
        }
    }
}

fn vm(vm: &Value, s: &mut String) {
    for (i, direction) in ["read", "write"].into_iter().enumerate() {
        let f = &vm[direction];
        let title = if i == 0 { name(vm) } else { String::new() };
        let _ = writeln!(
            s,
            "{title:<16} {direction:<6} {:>10} {:>12} {:>9} {:>9} {:>9} {:>9} {:>11} {:>9} {:>7}",
            f["requests"],
            Bytes(f["bytes"].as_u64().unwrap_or(0) >> 20 << 20).to_string(),
            time(f, "p50_ns"),
            time(f, "p99_ns"),
            time(f, "p9999_ns"),
            time(f, "max_ns"),
            format!("{:.1}MB/s", f["alpha_bytes_per_second"].as_f64().unwrap_or(0.0) / 1e6),
            time(f, "delta_ns"),
            f["cap_hits"],
        );
    }
    let refused = vm["refused"]["why"].as_str().map(|why| {
        let seconds = Nanos(vm["refused"]["seconds_ago"].as_u64().unwrap_or(0) * 1_000_000_000);
        format!(
            "the last refusal, {seconds} ago ({} in all): {}",
            vm["refused"]["count"],
            terminal(why, false)
        )
    });
    if vm["attached"] == false {
        let state = if vm["connected"] == true {
            "a QEMU is connected, and its guest does not use the disk (yet)"
        } else {
            "no guest is attached"
        };
        let _ = writeln!(s, "                 {state}");
    }
    if let Some(refused) = refused {
        let _ = writeln!(s, "                 {refused}");
    }
    for fault in ["errors", "malformed", "broken"] {
        if vm[fault].as_u64().unwrap_or(0) > 0 {
            let _ = writeln!(s, "                 {fault}: {}", vm[fault]);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn example(requests: u64, missed: u64) -> Value {
        let direction = json!({ "requests": 5, "bytes": 0, "p50_ns": 1, "p99_ns": 1, "p9999_ns": 1, "max_ns": 1,
            "alpha_bytes_per_second": 0.0, "delta_ns": 0, "cap_hits": 0 });
        json!({
            "devices": [{ "name": "d", "policy": "edf", "window": 2, "held": 0, "discard_pieces": 0 }],
            "vms": [{ "name": "plc", "attached": false, "connected": false, "read": direction, "write": direction,
                "refused": { "why": "memory: region 0 is not sealed", "seconds_ago": 7, "count": 3 },
                "promises": [{ "key": "reserve", "share": 0.17, "burst_ns": 500_000, "deadline_ns": 2_000_000,
                    "requests": requests, "worst_ns": 2_500_000, "missed": missed }] }]
        })
    }

    #[test]
    fn promised_worst_and_missed_are_shown() {
        let text = status(&example(10, 3));
        let line = text.lines().find(|l| l.starts_with("plc") && l.contains("reserve")).unwrap();
        assert_eq!(
            line.split_whitespace().collect::<Vec<_>>(),
            ["plc", "reserve", "17%", "500us", "2ms", "2.5ms", "3", "10"]
        );
        // Without a request nothing was kept.
        let text = status(&example(0, 0));
        let line = text.lines().find(|l| l.contains("reserve")).unwrap();
        assert!(line.split_whitespace().filter(|w| *w == "-").count() == 2, "{line}");
    }

    #[test]
    fn the_last_refusal_and_every_column_are_explained() {
        let text = status(&example(1, 0));
        assert!(text.contains("no guest is attached\n"), "{text}");
        assert!(
            text.contains("the last refusal, 7s ago (3 in all): memory: region 0 is not sealed"),
            "{text}"
        );
        for word in ["promised:", "worst", "missed", "alpha:", "Delta:", "capped:", "held by regulators:"] {
            assert!(LEGEND.contains(word), "{word}");
        }
    }
}
