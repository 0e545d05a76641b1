//! Tasks as programs have them, end to end on a device of the lab: writes that are synced, several
//! targets for one task, and requests of several sizes.

use std::collections::BTreeMap;
use std::fs;

use rtvirtio_testkit::site::{PROFILE, Site, can_run, text};
use serde_json::{Value, json};

const SPEC: &str = "examples/durable.toml";
/// VM, task and percentile of each row that the example's tasks have.
const ROWS: [(&str, &str, f64); 4] =
    [("etcd", "wal", 99.0), ("etcd", "wal", 99.9), ("shop", "tables", 99.0), ("backup", "copy", 99.99)];

fn rows(tasks: &Value) -> Vec<(&str, &str, f64)> {
    tasks
        .as_array()
        .unwrap()
        .iter()
        .map(|t| (t["vm"].as_str().unwrap(), t["task"].as_str().unwrap(), t["percentile"].as_f64().unwrap()))
        .collect()
}

/// The quiet profile of the flash twin, with syncs of 0.4 ms.
fn with_syncs() -> Value {
    let mut profile: Value = serde_json::from_slice(&fs::read(PROFILE).unwrap()).unwrap();
    profile["sync"] = json!([{
        "depth": 1, "iops": 2400.0, "spread": 0.05, "n": 2400,
        "p50": 400_000, "p99": 700_000, "p9999": 3_000_000, "max": 3_000_000,
    }]);
    profile
}

#[test]
fn every_target_has_a_prediction_and_a_verdict() {
    if !can_run("every_target_has_a_prediction_and_a_verdict") {
        return;
    }
    let site = Site::new();
    site.ok(&["lab", "up", SPEC]);

    // What a sync costs is measured with the writes.
    site.ok(&["profile", SPEC, "--for", "22s"]);
    let saved: Vec<_> =
        fs::read_dir(site.state_dir().join("profiles")).unwrap().map(|e| e.unwrap().path()).collect();
    let [saved] = saved.as_slice() else { panic!("{saved:?}") };
    let profile: Value = serde_json::from_slice(&fs::read(saved).unwrap()).unwrap();
    let sync = &profile["sync"][0];
    assert!(sync["depth"] == 1 && sync["n"].as_u64() > Some(0) && sync["p50"].as_u64() > Some(0), "{sync}");
    // No write is durable sooner than the twin's medium has it: 25 us, and 4 KiB at 150 MB/s.
    assert!(sync["p50"].as_u64() > Some(25_000 + 27_000), "{sync}");

    let (_, outlook) = site.json(&["predict", SPEC]);
    assert_eq!(rows(&outlook), ROWS);
    let shown = site.ok(&["predict", SPEC]);
    assert!(shown.contains("etcd/wal") && shown.contains("p99.9 "), "{shown}");

    // Without a measurement nothing is guessed.
    let error = site.refused(&["plan", SPEC, "--profile", PROFILE]);
    assert!(error.contains("etcd/wal syncs its writes") && error.contains("--destroy-data"), "{error}");

    // On a busy machine the measured profile may carry no plan; that of a quiet one does.
    let (quiet, plan_arg) = (&site.write("quiet.json", &with_syncs().to_string()), &site.path("a.plan"));
    let (code, plan) = site.json(&["plan", SPEC, "-o", plan_arg, "--profile", quiet]);
    assert_eq!((code, &plan["feasible"]), (0, &true.into()), "{plan:#}");
    assert_eq!(rows(&plan["devices"][0]["plan"]["tasks"]), ROWS);
    let planned = plan["devices"][0]["plan"]["tasks"].as_array().unwrap();
    let targets: Vec<_> = planned.iter().map(|t| &t["target_ns"]).collect();
    assert_eq!(json!(targets), json!([10_000_000, 50_000_000, 20_000_000, null]));
    site.ok(&["apply", plan_arg]);

    let (result_file, html) = (site.path("result.json"), site.path("r.html"));
    let files = ["-o", &result_file, "--html", &html];
    let (_, result) = site.json(&[&["verify", SPEC, "--for", "5s"][..], &files].concat());
    let tasks = &result["runs"][0]["tasks"];
    assert_eq!(rows(tasks), ROWS);
    let number = |t: &Value, key: &str| t[key].as_u64().unwrap_or_else(|| panic!("{key} in {t:#}"));
    for t in tasks.as_array().unwrap() {
        assert!(number(t, "n") > 0 && number(t, "p50_ns") > 0, "{t:#}");
        assert_eq!(t["verdict"].is_null(), t["target_ns"].is_null(), "{t:#}");
        assert!(t["predicted_ns"].is_u64(), "{t:#}");
        // The verdict is about what was measured at the target's percentile.
        if let Some(target) = t["target_ns"].as_u64() {
            let at = number(t, "at_target_ns");
            assert!(at >= number(t, "p50_ns") && at <= number(t, "max_ns"), "{t:#}");
            let kept = t["achieved_rate"].as_f64().unwrap() >= 0.99 * t["declared_rate"].as_f64().unwrap();
            match t["verdict"].as_str().unwrap() {
                "missed" => assert!(at > target || !kept, "{t:#}"),
                // A bin of the histogram is 1.6 % wide.
                _ => assert!(at as f64 <= target as f64 * 1.02 && kept, "{t:#}"),
            }
        }
    }
    // Both rows of the log are of the same requests.
    let (first, second) = (&tasks[0], &tasks[1]);
    for key in ["n", "p50_ns", "p99_ns", "p9999_ns", "max_ns", "fio_p9999_ns"] {
        assert_eq!(first[key], second[key], "{key}");
    }
    assert_eq!(first["at_target_ns"], first["p99_ns"]);
    assert!(number(second, "at_target_ns") >= number(first, "at_target_ns"));
    // 500 requests show p99 at best; p99.9 needs 2995.
    assert_ne!(second["verdict"], "met", "{second:#}");

    let page = fs::read_to_string(&html).unwrap();
    let rows: BTreeMap<&str, usize> =
        ["etcd/wal", "shop/tables"].into_iter().map(|name| (name, page.matches(name).count())).collect();
    assert!(page.starts_with("<!DOCTYPE html>") && rows["etcd/wal"] > rows["shop/tables"], "{rows:?}");
    let saved: Value = serde_json::from_slice(&fs::read(&result_file).unwrap()).unwrap();
    assert_eq!(saved, result);

    site.ok(&["revert"]);
    site.ok(&["lab", "down"]);
    site.assert_clean();
}

#[test]
fn the_domain_promises_the_reads_and_names_the_flush() {
    let site = Site::new();
    // Without the emulated guest, whose own part takes longer than the targets.
    let mut measured = with_syncs();
    measured["guest"] = Value::Null;
    let profile = &site.write("profile.json", &measured.to_string());
    // Code 2: a target cannot be promised.
    let (code, simulated) = site.json(&["simulate", SPEC, "--for", "5s", "--profile", profile]);
    assert_eq!(code, 2, "{simulated:#}");
    let promised: Vec<_> = simulated["plan"]["tasks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| (t["task"].as_str().unwrap(), &t["met"], t["unpromised"].is_string()))
        .collect();
    let (yes, no, none) = (json!(true), json!(false), json!(null));
    assert_eq!(
        promised,
        [("wal", &no, true), ("wal", &no, true), ("tables", &yes, false), ("copy", &none, false)],
        "{simulated:#}"
    );
    let simulated = simulated["runs"][0]["tasks"].as_array().unwrap();
    assert!(simulated[0]["met"].is_null() && simulated[0]["bound"].is_null(), "{:#}", simulated[0]);
    assert!(simulated[1]["met"] == true && simulated[1]["bound"].is_u64(), "{:#}", simulated[1]);
    let shown = site.output(&["simulate", SPEC, "--for", "5s", "--profile", profile]);
    let shown = text(&shown.stdout);
    assert_eq!(shown.matches("etcd/wal: no promise").count(), 1, "{shown}");
}
