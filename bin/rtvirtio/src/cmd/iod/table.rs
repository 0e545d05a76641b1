//! `rtvirtio iod status` as a table.

use std::fmt::Write as _;

use rtvirtio_report::terminal;
use rtvirtio_units::{Bytes, Nanos};
use serde_json::Value;

/// Meaning of the columns of disks.
const LEGEND: &str = "\
promised: longest time of a request within share and burst of its reservation, if device and host are as the
  configuration declares them; worst and missed: the longest such request, and those that took longer
p50 ... longest: from the guest's queue to the answer, of all requests, also beyond a reservation
alpha: rate while the VM had something to ask; Delta: longest time between two pieces meanwhile (bounded delay)
waited: time in which a VM had requests in its queue; for: of it, that in which pieces of the other VM were at the
  device, of several at once each. The rest was for its own pieces, a cap or pacing
capped: pieces that waited for a cap of the VM; held by regulators: the same for all VMs of a device, and how much
  later than their exact moment they went
";

/// Meaning of the columns of ports.
const PORT_LEGEND: &str = "\
promised: longest time from when rate and burst of its reservation cover a frame until it is sent; bound: what
  is computed for the worst case; worst and missed: the longest such frame, and those that took longer
p50 ... longest: out, from the guest's queue to the uplink; in, from the uplink to the guest's memory
capped: frames that waited for a cap of the VM. Of a flood to a VM the kernel drops the rest, which is not seen here
";

/// Status as a table, with its legend.
pub fn status(status: &Value) -> String {
    let mut s = String::new();
    if list(status, "networks").is_empty() || !list(status, "devices").is_empty() {
        disks(status, &mut s);
    }
    if !list(status, "networks").is_empty() {
        networks(status, &mut s);
    }
    s
}

fn disks(status: &Value, s: &mut String) {
    list(status, "devices").iter().for_each(|d| device(d, s));
    promises(status, s);
    let _ = writeln!(
        s,
        "{:<16} {:<6} {:>10} {:>12} {:>9} {:>9} {:>9} {:>9} {:>11} {:>9} {:>7}",
        "VM", "", "requests", "moved", "p50", "p99", "p99.99", "longest", "alpha", "Delta", "capped"
    );
    list(status, "vms").iter().for_each(|v| vm(v, s));
    waits(status, s);
    s.push_str(LEGEND);
}

fn bit_rate(bytes_per_second: f64) -> String {
    format!("{:.1}Mbit/s", bytes_per_second * 8.0 / 1e6)
}

fn networks(status: &Value, s: &mut String) {
    for n in list(status, "networks") {
        let link = n["link_bytes_per_second"].as_f64();
        let link = link.map_or_else(|| "no rate declared: frames go at once".to_owned(), bit_rate);
        let _ = write!(s, "network {}: {link}", name(&n));
        if n["held"].as_u64().unwrap_or(0) > 0 {
            let late = time(&n, "late_p9999_ns");
            let _ = write!(s, ", {} frames held by regulators, p99.99 {late} late", n["held"]);
        }
        s.push('\n');
    }
    let ports = list(status, "ports");
    if ports.iter().any(|port| !list(port, "promises").is_empty()) {
        let _ = writeln!(
            s,
            "{:<16} {:<7} {:>12} {:>9} {:>9} {:>9} {:>9} {:>7} {:>10}",
            "VM", "", "rate", "burst", "promised", "bound", "worst", "missed", "frames"
        );
        ports.iter().for_each(|port| link_promises(port, s));
    }
    let _ = writeln!(
        s,
        "{:<16} {:<6} {:>10} {:>12} {:>9} {:>9} {:>9} {:>9} {:>11} {:>9} {:>7}",
        "VM", "", "frames", "moved", "p50", "p99", "p99.99", "longest", "alpha", "Delta", "capped"
    );
    ports.iter().for_each(|p| port(p, s));
    s.push_str(PORT_LEGEND);
}

fn link_promises(port: &Value, s: &mut String) {
    for p in list(port, "promises") {
        let frames = p["frames"].as_u64().unwrap_or(0);
        // Without frames the promise was neither kept nor missed.
        let seen = |text: String| if frames > 0 { text } else { "-".into() };
        let bound = if p["bound_ns"].is_null() { "none".to_owned() } else { time(&p, "bound_ns") };
        let _ = writeln!(
            s,
            "{:<16} {:<7} {:>12} {:>9} {:>9} {bound:>9} {:>9} {:>7} {frames:>10}",
            name(port),
            p["key"].as_str().unwrap_or_default(),
            bit_rate(p["bytes_per_second"].as_f64().unwrap_or(0.0)),
            format!("{}B", p["burst"]),
            time(&p, "deadline_ns"),
            seen(time(&p, "worst_ns")),
            seen(p["missed"].to_string()),
        );
    }
}

fn port(port: &Value, s: &mut String) {
    service(&name(port), [("tx", "out"), ("rx", "in")], "frames", port, s);
    let drops = port["drops"].as_object().cloned().unwrap_or_default();
    let drops: Vec<String> = drops
        .iter()
        .filter(|(_, count)| count.as_u64() != Some(0))
        .map(|(reason, count)| format!("{} {count}", reason.replace('_', " ")))
        .collect();
    if !drops.is_empty() {
        let _ = writeln!(s, "                 not passed on: {}", drops.join(", "));
    }
    let (throttled, backoffs) = (count(port, "throttled"), count(port, "backoffs"));
    if throttled > 0 {
        let waited = time(port, "throttled_ns");
        let _ = writeln!(
            s,
            "                 used up its part of cpu_budget {throttled} times, and waited for {waited} in all"
        );
    }
    if backoffs > 0 {
        let _ = writeln!(
            s,
            "                 waited {backoffs} times for up to 1ms: its kicks brought nothing, or its frames were refused"
        );
    }
    notes(port, "the network", s);
}

fn list(value: &Value, key: &str) -> Vec<Value> {
    value[key].as_array().cloned().unwrap_or_default()
}

/// Formats a number with a width, which a JSON value ignores.
fn count(value: &Value, key: &str) -> u64 {
    value[key].as_u64().unwrap_or(0)
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

/// Table of promises, printed first.
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
            // Without requests the promise was neither kept nor missed.
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

/// Table of the VMs that each VM has waited for, the longest wait first.
fn waits(status: &Value, s: &mut String) {
    let vms = list(status, "vms");
    let waited = vms.iter().filter(|vm| count(&vm["waits"], "queued_ns") > 0).collect::<Vec<_>>();
    if waited.is_empty() {
        return;
    }
    let _ = writeln!(s, "{:<16} {:>9} for", "VM", "waited");
    for vm in waited {
        let waits = &vm["waits"];
        let mut all = list(waits, "neighbours");
        all.sort_by_key(|n| std::cmp::Reverse(count(n, "ns")));
        let all: Vec<String> = all.iter().map(|n| format!("{} {}", name(n), time(n, "ns"))).collect();
        let all = if all.is_empty() { "no other VM".to_owned() } else { all.join(", ") };
        let _ = writeln!(s, "{:<16} {:>9} {all}", name(vm), time(waits, "queued_ns"));
    }
}

fn vm(vm: &Value, s: &mut String) {
    service(&name(vm), [("read", "read"), ("write", "write")], "requests", vm, s);
    notes(vm, "the disk", s);
    if count(vm, "errors") > 0 {
        let why = vm["last_error"].as_str().map(|why| format!(" (the last one: {})", terminal(why, false)));
        let _ = writeln!(s, "                 errors: {}{}", vm["errors"], why.unwrap_or_default());
    }
    if count(vm, "malformed") > 0 {
        let _ = writeln!(s, "                 malformed: {}", vm["malformed"]);
    }
    for (key, what) in REFUSED {
        let refused = count(&vm["refused_requests"], key);
        if refused > 0 {
            let _ = writeln!(s, "                 refused: {refused} requests {what}");
        }
    }
}

/// Reasons for which a disk refuses requests, with remedies.
const REFUSED: [(&str, &str); 5] = [
    (
        "outside_memory",
        "outside of the memory that QEMU has shared: memory-backend-memfd with share=on for all of its memory, also what is added later",
    ),
    ("outside_disk", "beyond the end of the disk"),
    ("read_only", "that write to a disk that is read-only"),
    ("unsupported", "of a kind that the disk does not offer"),
    ("invalid", "that contradict themselves"),
];

/// Size in whole MiB, or in KiB where it is smaller.
fn moved(bytes: u64) -> Bytes {
    let unit = [20, 10].into_iter().find(|unit| bytes >> unit > 0).unwrap_or(0);
    Bytes(bytes >> unit << unit)
}

/// Rows for both directions of a disk or port: key and title of each.
fn service(name: &str, directions: [(&str, &str); 2], counted: &str, of: &Value, s: &mut String) {
    for (i, (direction, title)) in directions.into_iter().enumerate() {
        let f = &of[direction];
        let vm = if i == 0 { name } else { "" };
        let _ = writeln!(
            s,
            "{vm:<16} {title:<6} {:>10} {:>12} {:>9} {:>9} {:>9} {:>9} {:>11} {:>9} {:>7}",
            count(f, counted),
            moved(count(f, "bytes")).to_string(),
            time(f, "p50_ns"),
            time(f, "p99_ns"),
            time(f, "p9999_ns"),
            time(f, "max_ns"),
            format!("{:.1}MB/s", f["alpha_bytes_per_second"].as_f64().unwrap_or(0.0) / 1e6),
            time(f, "delta_ns"),
            count(f, "cap_hits"),
        );
    }
}

/// Notes on a VM: whether its guest is connected, and refused requests.
fn notes(vm: &Value, device: &str, s: &mut String) {
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
            format!("a QEMU is connected, and its guest does not use {device} (yet)")
        } else {
            "no guest is attached".to_owned()
        };
        let _ = writeln!(s, "                 {state}");
    }
    if let Some(refused) = refused {
        let _ = writeln!(s, "                 {refused}");
    }
    if vm["broken"].as_u64().unwrap_or(0) > 0 {
        let _ = writeln!(s, "                 broken: {}", vm["broken"]);
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
        // Without requests no promise was tested.
        let text = status(&example(0, 0));
        let line = text.lines().find(|l| l.contains("reserve")).unwrap();
        assert!(line.split_whitespace().filter(|w| *w == "-").count() == 2, "{line}");
    }

    #[test]
    fn who_waited_for_whom_is_shown_where_anyone_has() {
        assert!(!status(&example(1, 0)).lines().any(|l| l.ends_with("waited for")), "nobody has");
        let mut seen = example(1, 0);
        let neighbours = json!([{ "name": "hmi", "ns": 2_000_000 }, { "name": "bulk", "ns": 70_000_000 }]);
        seen["vms"][0]["waits"] =
            json!({ "queued_ns": 80_000_000, "idle_ns": 0, "own_ns": 0, "neighbours": neighbours });
        let text = status(&seen);
        let line = text.lines().skip_while(|l| !l.ends_with("waited for")).nth(1).unwrap();
        assert_eq!(line.split_whitespace().collect::<Vec<_>>().join(" "), "plc 80ms bulk 70ms, hmi 2ms");
    }

    #[test]
    fn ports_are_shown_with_what_was_dropped() {
        let flow = json!({ "frames": 9, "bytes": 3 << 20, "p50_ns": 1, "p99_ns": 1, "p9999_ns": 1, "max_ns": 1,
            "alpha_bytes_per_second": 0.0, "delta_ns": 0, "cap_hits": 4 });
        let value = json!({
            "networks": [{ "name": "lan", "link_bytes_per_second": 12.5e6, "held": 0 }],
            "ports": [{ "name": "plc", "attached": true, "tx": flow, "rx": flow,
                "drops": { "spoofed": 3, "no_buffer": 0 }, "backoffs": 2, "throttled": 7, "throttled_ns": 40_000_000,
                "promises": [{ "key": "reserve", "bytes_per_second": 1.25e6, "burst": 3_000,
                    "deadline_ns": 2_000_000, "bound_ns": 1_400_000, "worst_ns": 900_000, "frames": 9, "missed": 0 }] }]
        });
        let text = status(&value);
        assert!(text.starts_with("network lan: 100.0Mbit/s\n"), "{text}");
        let line = text.lines().find(|l| l.contains("reserve")).unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        assert_eq!(words, ["plc", "reserve", "10.0Mbit/s", "3000B", "2ms", "1.4ms", "900us", "0", "9"]);
        assert!(text.contains("not passed on: spoofed 3\n") && text.contains(PORT_LEGEND), "{text}");
        assert!(text.contains("cpu_budget 7 times, and waited for 40ms in all\n"), "{text}");
        assert!(text.contains("waited 2 times for up to 1ms"), "{text}");
    }

    #[test]
    fn the_last_refusal_and_every_column_are_explained() {
        let text = status(&example(1, 0));
        assert!(text.contains("no guest is attached\n"), "{text}");
        assert!(
            text.contains("the last refusal, 7s ago (3 in all): memory: region 0 is not sealed"),
            "{text}"
        );
        let mut seen = example(1, 0);
        seen["vms"][0]["errors"] = json!(2);
        seen["vms"][0]["last_error"] = json!("No space left on device (os error 28)");
        seen["vms"][0]["refused_requests"] = json!({ "outside_memory": 204, "outside_disk": 0 });
        let text = status(&seen);
        assert!(text.contains("errors: 2 (the last one: No space left on device"), "{text}");
        assert!(text.contains("refused: 204 requests outside of the memory that QEMU has shared"), "{text}");
        assert!(!text.contains("beyond the end"), "{text}");
        for word in ["promised:", "worst", "missed", "alpha:", "Delta:", "capped:", "held by regulators:"] {
            assert!(LEGEND.contains(word), "{word}");
        }
    }
}
