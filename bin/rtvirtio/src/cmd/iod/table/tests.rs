use std::collections::BTreeMap;

use rtvirtio_domain_protocol::status::{
    DirectionStatus, FlowStatus, LinkPromiseStatus, Neighbour, PromiseStatus, Waits,
};

use super::*;

const SERVICE: Service = Service {
    bytes: Some(0),
    p50_ns: Some(1),
    p99_ns: Some(1),
    p9999_ns: Some(1),
    max_ns: Some(1),
    alpha_bytes_per_second: Some(0.0),
    delta_ns: Some(0),
    cap_hits: Some(0),
};
const IDLE: Regulators = Regulators { held: Some(0), late_p50_ns: Some(0), late_p9999_ns: Some(0) };

fn example(requests: u64, missed: u64) -> Status {
    let device = DeviceStatus {
        name: "d".into(),
        policy: "edf".into(),
        window: Some(2),
        regulators: IDLE,
        discard_pieces: Some(0),
        discard_longest_ns: Some(0),
        discard_overruns: Some(0),
    };
    let promise = PromiseStatus {
        key: "reserve".into(),
        share: Some(0.17),
        burst_ns: Some(500_000),
        deadline_ns: Some(2_000_000),
        requests: Some(requests),
        worst_ns: Some(2_500_000),
        missed: Some(missed),
    };
    let direction = DirectionStatus { requests: Some(5), service: SERVICE };
    let why = "memory: region 0 is not sealed".into();
    let disk = DiskStatus {
        device: "d".into(),
        name: "plc".into(),
        socket: "/s".into(),
        size: Some(1 << 20),
        connected: false,
        peer: None,
        attached: false,
        trusted: Some(true),
        outstanding: Some(0),
        read: direction,
        write: direction,
        promises: vec![promise],
        urgent_signals: None,
        waits: None,
        refused: Some(Refusal { why, seconds_ago: 7, count: 3 }),
        reserved: Some(0),
        shared: Some(0),
        errors: Some(0),
        waiting_for_room: Some(0),
        waited_for_room: Some(0),
        last_error: None,
        refused_requests: BTreeMap::new(),
        malformed: Some(0),
        broken: Some(0),
    };
    Status { version: 1, devices: vec![device], vms: vec![disk], ..Status::default() }
}

fn network() -> Status {
    let bytes = Some(3 << 20);
    let flow = FlowStatus { frames: Some(9), service: Service { bytes, cap_hits: Some(4), ..SERVICE } };
    let promise = LinkPromiseStatus {
        key: "reserve".into(),
        bytes_per_second: Some(1.25e6),
        burst: Some(3_000),
        deadline_ns: Some(2_000_000),
        bound_ns: Some(1_400_000),
        frames: Some(9),
        worst_ns: Some(900_000),
        missed: Some(0),
    };
    let port = PortStatus {
        network: "lan".into(),
        name: "plc".into(),
        socket: "/s".into(),
        mac: "52:54:00:00:00:01".into(),
        connected: true,
        peer: Some(7),
        attached: true,
        trusted: Some(false),
        tx: flow,
        rx: flow,
        promises: vec![promise],
        reserved: Some(0),
        shared: Some(0),
        drops: [("spoofed".to_owned(), 3), ("no_buffer".to_owned(), 0)].into(),
        backoffs: Some(2),
        urgent_signals: None,
        cpu_ns: Some(0),
        throttled: Some(7),
        throttled_ns: Some(40_000_000),
        broken: Some(0),
        refused: None,
    };
    let network = NetworkStatus {
        name: "lan".into(),
        policy: "edf".into(),
        link_bytes_per_second: Some(12.5e6),
        regulators: IDLE,
    };
    Status { version: 1, networks: vec![network], ports: vec![port], ..Status::default() }
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
fn who_waited_for_whom_is_shown_where_anyone_has() {
    assert!(!status(&example(1, 0)).lines().any(|l| l.ends_with("waited for")), "nobody has");
    let mut seen = example(1, 0);
    let neighbours = [("hmi", 2_000_000), ("bulk", 70_000_000)]
        .map(|(name, ns)| Neighbour { name: name.into(), ns })
        .to_vec();
    seen.vms[0].waits = Some(Waits { queued_ns: 80_000_000, idle_ns: 0, own_ns: 0, neighbours });
    let text = status(&seen);
    let line = text.lines().skip_while(|l| !l.ends_with("waited for")).nth(1).unwrap();
    assert_eq!(line.split_whitespace().collect::<Vec<_>>().join(" "), "plc 80ms bulk 70ms, hmi 2ms");
}

#[test]
fn ports_are_shown_with_what_was_dropped() {
    let text = status(&network());
    assert!(text.starts_with("network lan: 100.0Mbit/s\n"), "{text}");
    let line = text.lines().find(|l| l.contains("reserve")).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words, ["plc", "reserve", "10.0Mbit/s", "3000B", "2ms", "1.4ms", "900us", "0", "9"]);
    assert!(text.contains("dropped: spoofed 3\n") && text.contains(PORT_LEGEND), "{text}");
    assert!(text.contains("cpu_budget 7 times, and waited for 40ms in all\n"), "{text}");
    assert!(text.contains("waited 2 times for up to 1ms"), "{text}");
}

#[test]
fn the_last_refusal_and_every_column_are_explained() {
    let text = status(&example(1, 0));
    assert!(text.contains("no guest is attached\n"), "{text}");
    assert!(text.contains("is trusted with its memory (trust = true)\n"), "{text}");
    assert!(text.contains("the last refusal, 7s ago (3 in all): memory: region 0 is not sealed"), "{text}");
    assert!(!text.contains("unknown") && !text.contains("errors") && !text.contains("broken"), "{text}");
    let mut seen = example(1, 0);
    seen.vms[0].errors = Some(2);
    seen.vms[0].last_error = Some("No space left on device (os error 28)".into());
    let reasons = [("outside_memory", 204), ("outside_disk", 0), ("of_a_newer_kind", 5)];
    seen.vms[0].refused_requests = reasons.map(|(reason, n)| (reason.to_owned(), n)).into();
    let text = status(&seen);
    assert!(text.contains("errors: 2 (last: No space left on device"), "{text}");
    assert!(text.contains("refused: 204 requests outside of the memory that QEMU has shared"), "{text}");
    assert!(text.contains("refused: 5 requests (of a newer kind)"), "{text}");
    assert!(!text.contains("beyond the end"), "{text}");
    for word in ["promised:", "worst", "missed", "alpha:", "Delta:", "capped:", "held by regulators:"] {
        assert!(LEGEND.contains(word), "{word}");
    }
}

/// Of a domain whose numbers have other names, none is shown as 0.
#[test]
fn numbers_that_the_domain_does_not_have_are_unknown() {
    let whole = [example(1, 0), network()].map(|status| serde_json::to_value(status).unwrap());
    let mut shown = 0;
    for value in whole {
        for key in [
            "requests",
            "frames",
            "p99_ns",
            "held",
            "missed",
            "worst_ns",
            "errors",
            "malformed",
            "broken",
            "cap_hits",
            "alpha_bytes_per_second",
            "share",
            "burst",
            "window",
            "backoffs",
        ] {
            let text = value.to_string();
            let older: Status =
                serde_json::from_str(&text.replace(&format!("\"{key}\":"), "\"renamed\":")).unwrap();
            if text.contains(&format!("\"{key}\":")) {
                let table = status(&older);
                assert!(table.contains("unknown"), "{key}: {table}");
                shown += 1;
            }
        }
    }
    assert!(shown > 18, "{shown}");
}
