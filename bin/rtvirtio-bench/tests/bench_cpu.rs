//! The CPU plane's experiments with real guests, in small.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use rtvirtio_testkit::site::{Site, text};
use rtvirtio_testkit::{Need, has};
use serde_json::Value;

/// Budgets of both tests together are more than a core has.
static ONE: Mutex<()> = Mutex::new(());

fn site(test: &str) -> Option<Site> {
    has(test, &[Need::Root, Need::RT_GROUPS, Need::QEMU, Need::Cpus(2)]).then(Site::new)
}

fn groups() -> Vec<String> {
    let entries = std::fs::read_dir("/sys/fs/cgroup/cpu").unwrap().flatten();
    let names = entries.map(|e| e.file_name().into_string().unwrap());
    names.filter(|n| n.starts_with("rtvirtio-bench-")).collect()
}

#[test]
fn contracts_hold_two_guests_on_one_core() {
    let test = "contracts_hold_two_guests_on_one_core";
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(site) = site(test) else { return };
    let out = site.dir.path().join("out");
    let out = out.to_str().unwrap();
    let short = ["--for", "1s", "--repeat", "1", "--requests", "5", "--budgets", "10,50"];
    let args = [&["bench", "reservation", "--neighbour-vcpus", "2", "--out", out][..], &short].concat();
    let (_, result) = site.json(&args);
    let file = std::fs::read_to_string(format!("{out}/cpu-reservation.json")).unwrap();
    let data: Value = serde_json::from_str(&file).unwrap();
    let alone = data["alone"].as_array().unwrap();
    assert_eq!(alone.len(), 2);
    for a in alone {
        // A busy machine gives less, never more: the budget of ten periods, and of one for each
        // end.
        let (budget, used) = (a["budget"].as_f64().unwrap(), a["used"].as_f64().unwrap());
        assert!(used > 0.0 && used <= 1.2 * budget + 1.0, "{a}");
    }
    assert!(alone.iter().any(|a| a["mb_per_s"].as_f64().unwrap() > 0.0), "{alone:?}");
    for b in data["beside"].as_array().unwrap().iter().filter(|b| b["all_threads"] == true) {
        assert!(b["used"].as_f64().unwrap() <= 1.2 * 40.0 + 1.0, "{b}");
    }
    let answered = |w: &Value| w["ms"].as_array().unwrap().len() + w["failed"].as_u64().unwrap() as usize;
    let web: Vec<usize> = data["web"].as_array().unwrap().iter().map(answered).collect();
    assert_eq!(web, [5; 5]);
    let claims = result["claims"].as_array().unwrap();
    let claim = claims.iter().find(|c| c["id"] == "cpu.web.misses_with").unwrap();
    assert_eq!(claim["n"], 5);
    for command in
        [&["bench", "reservation", "--report-only", "--out", out][..], &["bench", "report", "--data", out]]
    {
        assert_eq!(site.json(command).1["claims"], result["claims"], "{command:?}");
    }
    assert_eq!(groups(), Vec::<String>::new());
    site.assert_clean();
    let refused = site.output(&["bench", "reservation", "--budgets", "96"]);
    assert!(text(&refused.stderr).contains("keeps 5 % for others"), "{refused:?}");
}

#[test]
fn latencies_are_measured_in_a_guest_and_on_its_host() {
    let test = "latencies_are_measured_in_a_guest_and_on_its_host";
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(site) = site(test) else { return };
    let out = site.dir.path().join("out");
    let out = out.to_str().unwrap();
    let setups = "host,guest,aio-lowered,load-moved";
    let args = ["bench", "cyclictest", "--for", "1s", "--repeat", "1", "--setups", setups, "--out", out];
    let begin = Instant::now();
    let (_, result) = site.json(&args);
    let length = begin.elapsed().as_millis() as u64;
    let file_path = format!("{out}/cpu-cyclictest.json");
    let file = std::fs::read_to_string(&file_path).unwrap();
    let data: Value = serde_json::from_str(&file).unwrap();
    let series = data["series"].as_array().unwrap();
    let setups: Vec<&str> = series.iter().map(|s| s["setup"].as_str().unwrap()).collect();
    assert_eq!(setups, ["host", "guest", "aio-lowered", "load-moved"]);
    for s in series {
        let rounds = s["rounds"].as_array().unwrap();
        assert_eq!(rounds.len(), 1);
        for round in rounds {
            let counts = round["counts"].as_array().unwrap();
            let n: u64 = counts.iter().map(|c| c[1].as_u64().unwrap()).sum();
            // A wake-up each millisecond at most; a busy machine misses some, and ends the run
            // later.
            assert!((1..=length).contains(&n), "{n} in {s}");
            assert_eq!(round["floor"]["counts"].is_array(), s["setup"] != "host", "{s}");
        }
        let guest = s["setup"] != "host";
        assert_eq!(s["kernel"].as_str().unwrap().ends_with("-cloud-amd64"), guest, "{s}");
    }
    let claim = &result["claims"][0];
    assert_eq!(claim["id"], "cpu.cyclictest.p999_ratio");
    assert!(claim["value"].as_f64().unwrap() > 0.0 && claim["n"].as_u64().unwrap() > 0, "{claim}");
    let page = site.dir.path().join("page.html");
    let shown = ["bench", "report", "--data", out, "--html", page.to_str().unwrap()];
    assert_eq!(site.json(&shown).1["claims"], result["claims"]);
    assert!(std::fs::read_to_string(page).unwrap().contains("AIO workers lowered (Fig. 4)"));
    // More runs of the same, and none of another contract.
    let more =
        ["bench", "cyclictest", "--add", "--for", "2s", "--repeat", "1", "--setups", "guest", "--out", out];
    site.json(&more);
    let data: Value = serde_json::from_slice(&std::fs::read(&file_path).unwrap()).unwrap();
    let seconds =
        |s: &Value| s["rounds"].as_array().unwrap().iter().map(|r| r["seconds"].as_f64().unwrap()).sum();
    let all: Vec<f64> = data["series"].as_array().unwrap().iter().map(seconds).collect();
    assert_eq!((all, data["commands"].as_array().unwrap().len()), (vec![1.0, 3.0, 1.0, 1.0], 2));
    let other = site.output(&[&more[..], &["--period", "3ms"]].concat());
    assert!(text(&other.stderr).contains("contract: 1.8ms in 2ms there, 1.8ms in 3ms here"), "{other:?}");
    assert_eq!(serde_json::from_slice::<Value>(&std::fs::read(&file_path).unwrap()).unwrap(), data);
    assert_eq!(groups(), Vec::<String>::new());
    site.assert_clean();
    for (wrong, why) in [
        (["--for", "500ms"], "whole seconds"),
        (["--budget", "3ms"], "no more than the period"),
        (["--disk-dir", "/nowhere"], "--disk-dir /nowhere"),
    ] {
        let refused = site.output(&[&["bench", "cyclictest", "--out", out][..], &wrong].concat());
        assert!(text(&refused.stderr).contains(why), "{refused:?}");
    }
}
