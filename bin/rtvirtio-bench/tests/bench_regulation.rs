//! Regulated traffic, in small: real I/O domain, real frames.

use rtvirtio_testkit::site::{Site, text};
use rtvirtio_testkit::{Need, has, skip};
use serde_json::Value;

#[test]
fn each_rate_is_measured_with_and_without_load() {
    let test = "each_rate_is_measured_with_and_without_load";
    if !has(test, &[Need::Root, Need::Path("/dev/loop-control", "no loop devices")]) {
        return;
    }
    let site = Site::new();
    let (out, figures) = (site.dir.path().join("out"), site.dir.path().join("figures"));
    let (out, figures) = (out.to_str().unwrap(), figures.to_str().unwrap());
    let args = ["bench", "regulation", "--top", "2048", "--rates", "1", "--for", "100ms", "--repeat", "2"];
    let args = [&args[..], &["--flow", "read", "--flow", "tx", "--out", out, "--svg", figures]].concat();
    let ran = site.output(&args);
    let said = text(&ran.stderr);
    if said.contains("the memory load needs") {
        return skip(test, &said);
    }
    assert!(matches!(ran.status.code(), Some(0 | 2)), "{said}");
    let file = std::fs::read_to_string(format!("{out}/regulation.json")).unwrap();
    let data: Value = serde_json::from_str(&file).unwrap();
    let points = data["points"].as_array().unwrap();
    assert_eq!(points.len(), 2 * 2 * 2, "two flows, two loads, a rate and none");
    for p in points {
        let (alpha, rate) = (p[4].as_f64().unwrap(), p[2].as_f64().unwrap_or(f64::INFINITY));
        // More than its rate is let go at no time; a first unit that is late makes it a little
        // more.
        assert!(alpha > 0.0 && alpha <= 1.5 * rate, "{p}");
        assert_eq!(p[8].as_f64().is_some_and(|b| b > 0.0), p[1] == "memory", "{p}");
    }
    let victims = data["victims"].as_array().unwrap();
    let rounds: Vec<u64> = victims.iter().map(|v| v["round"].as_u64().unwrap()).collect();
    assert_eq!(rounds, [0, 0, 1, 1], "alone and at one rate, in two rounds");
    assert!(data["spoiled"].is_u64() && data["refused"].is_array(), "{data}");
    let mut names: Vec<String> = std::fs::read_dir(figures)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names.len(), 4, "{names:?}");
    assert!(std::fs::read_to_string(format!("{figures}/{}", names[0])).unwrap().starts_with("<svg"));
    // Two more loads into the same result, and the victim's curve.
    let curve = site.dir.path().join("curve.json");
    let mut more = vec!["bench", "regulation", "--add", "--load", "device", "--flow", "read"];
    let is_v1 = std::path::Path::new("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").exists();
    if is_v1 {
        more.extend(["--load", "held"]);
    }
    more.extend(["--top", "2048", "--rates", "1", "--for", "100ms", "--out", out]);
    more.extend(["--curve", curve.to_str().unwrap()]);
    let ran = site.output(&more);
    assert!(matches!(ran.status.code(), Some(0 | 2)), "{}", text(&ran.stderr));
    let file = std::fs::read_to_string(format!("{out}/regulation.json")).unwrap();
    let added: Value = serde_json::from_str(&file).unwrap();
    let beside = |name: &str| added["points"].as_array().unwrap().iter().filter(|p| p[1] == name).count();
    assert_eq!((beside("memory"), beside("device"), beside("held")), (4, 2, if is_v1 { 2 } else { 0 }));
    assert_eq!(added["victims"], data["victims"], "the rest stays");
    let saved: Value = serde_json::from_str(&std::fs::read_to_string(&curve).unwrap()).unwrap();
    assert_eq!((&saved["schema"], saved["runs"].as_array().unwrap().len()), (&"rtvirtio.curve.v1".into(), 4));
    let (_, report) = site.json(&["bench", "report", "--data", out]);
    let claims = report["claims"].as_array().unwrap();
    let of = |id: &str| claims.iter().find(|c| c["id"] == id).unwrap_or_else(|| panic!("{id}"));
    assert_eq!(
        (of("regulation.qos400.wrong")["value"].as_f64(), of("regulation.qos400.wrong")["n"].as_u64()),
        (Some(0.0), Some(10))
    );
    assert!(of("regulation.rate_error")["n"].as_u64().unwrap() > 0);
}
