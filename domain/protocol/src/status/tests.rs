use serde_json::{Value, json};

use super::*;

/// A status with every field.
fn whole() -> Value {
    let service = |counted: &str| {
        json!({ counted: 7, "bytes": 4096, "p50_ns": 1, "p99_ns": 2, "p9999_ns": 3, "max_ns": 4,
            "alpha_bytes_per_second": 5.5, "delta_ns": 6, "cap_hits": 8 })
    };
    let refused = json!({ "why": "memory", "seconds_ago": 7, "count": 3 });
    json!({
        "version": 1,
        "devices": [{ "name": "d", "policy": "edf", "window": 2, "held": 9, "late_p50_ns": 10, "late_p9999_ns": 11,
            "discard_pieces": 12, "discard_longest_ns": 13, "discard_overruns": 14 }],
        "vms": [{ "device": "d", "name": "plc", "socket": "/s", "size": 15, "connected": true, "peer": 16,
            "attached": true, "trusted": false, "outstanding": 17, "read": service("requests"), "write": service("requests"),
            "promises": [{ "key": "reserve", "share": 0.5, "burst_ns": 18, "deadline_ns": 19, "requests": 20,
                "worst_ns": 21, "missed": 22 }],
            "urgent_signals": 23,
            "waits": { "queued_ns": 24, "idle_ns": 25, "own_ns": 26, "neighbours": [{ "name": "hmi", "ns": 27 }] },
            "refused": refused, "reserved": 28, "shared": 29, "errors": 30, "last_error": "no space",
            "refused_requests": { "outside_memory": 31 }, "malformed": 32, "broken": 33, "waiting_for_room": 55, "waited_for_room": 56 }],
        "networks": [{ "name": "n", "policy": "edf", "link_bytes_per_second": 12.5, "held": 34, "late_p50_ns": 35,
            "late_p9999_ns": 36 }],
        "ports": [{ "network": "n", "name": "p", "socket": "/p", "mac": "52:54:00:00:00:01", "connected": true,
            "peer": 37, "attached": true, "trusted": true, "tx": service("frames"), "rx": service("frames"),
            "promises": [{ "key": "urgent", "bytes_per_second": 38.5, "burst": 39, "deadline_ns": 40, "bound_ns": 41,
                "frames": 42, "worst_ns": 43, "missed": 44 }],
            "reserved": 45, "shared": 46, "drops": { "spoofed": 47 }, "backoffs": 48, "urgent_signals": 49,
            "cpu_ns": 50, "throttled": 51, "throttled_ns": 52, "broken": 53, "refused": refused }]
    })
}

/// The pointers of all fields of objects, at any depth.
fn fields(value: &Value, at: &str, all: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (key, inner) in map {
                all.push(format!("{at}/{key}"));
                fields(inner, &format!("{at}/{key}"), all);
            }
        }
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, inner)| fields(inner, &format!("{at}/{i}"), all));
        }
        _ => {}
    }
}

fn object<'a>(value: &'a mut Value, pointer: &str) -> &'a mut serde_json::Map<String, Value> {
    value.pointer_mut(pointer).unwrap().as_object_mut().unwrap()
}

#[test]
fn every_field_goes_both_ways() {
    let status: Status = serde_json::from_value(whole()).unwrap();
    assert_eq!(serde_json::to_value(&status).unwrap(), whole());
    assert!(!whole().to_string().contains("null"), "each field has a value here");
}

#[test]
fn a_missing_field_is_an_error_or_unknown_but_never_zero() {
    let mut all = Vec::new();
    fields(&whole(), "", &mut all);
    assert!(all.len() > 90, "{}", all.len());
    let (mut unknown, mut refused) = (0, 0);
    for pointer in all {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let mut older = whole();
        object(&mut older, parent).remove(key);
        match serde_json::from_value::<Status>(older) {
            Ok(status) => {
                let shown = serde_json::to_value(status).unwrap();
                assert!(shown.pointer(&pointer).is_none_or(Value::is_null), "{pointer}: {shown}");
                unknown += 1;
            }
            Err(e) => {
                assert!(e.to_string().contains(&format!("missing field `{key}`")), "{pointer}: {e}");
                refused += 1;
            }
        }
    }
    assert!(unknown > 60 && refused > 25, "{unknown} unknown, {refused} refused");
}

/// Keys whose `null` says something: without a bound, without a rate, nothing refused.
#[test]
fn a_null_that_has_a_meaning_must_be_there() {
    for pointer in [
        "/ports/0/promises/0/bound_ns",
        "/networks/0/link_bytes_per_second",
        "/vms/0/refused",
        "/ports/0/refused",
        "/ports/0/throttled",
    ] {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let mut status = whole();
        object(&mut status, parent).insert(key.to_owned(), Value::Null);
        assert!(serde_json::from_value::<Status>(status.clone()).is_ok(), "{pointer}");
        object(&mut status, parent).remove(key);
        assert!(serde_json::from_value::<Status>(status).is_err(), "{pointer}");
    }
}

#[test]
fn fields_of_a_newer_domain_are_ignored_and_its_reasons_kept() {
    let mut all = vec![String::new()];
    fields(&whole(), "", &mut all);
    for pointer in all {
        let mut newer = whole();
        let Some(map) = newer.pointer_mut(&pointer).and_then(Value::as_object_mut) else { continue };
        map.insert("later".to_owned(), json!(54));
        let status: Status = serde_json::from_value(newer).unwrap();
        let is_reason = pointer.ends_with("/drops") || pointer.ends_with("/refused_requests");
        let back = serde_json::to_value(&status).unwrap();
        assert_eq!(back == whole(), !is_reason, "{pointer}");
    }
}
