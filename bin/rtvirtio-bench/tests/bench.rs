//! The experiments on a real twin, in small: a sweep that is stopped and gone on with, a
//! calibration from it and plans with that, cases, tuning.

use std::path::Path;
use std::process::Stdio;

use rtvirtio_testkit::site::{PROFILE, Site, can_run, lines, signal, text, wait_for};
use rustix::process::Signal;
use serde_json::Value;

/// Words of a command line.
fn words(line: &str) -> Vec<&str> {
    line.split(' ').collect()
}

fn claim<'a>(result: &'a Value, id: &str) -> &'a Value {
    let claims = result["claims"].as_array().unwrap_or_else(|| panic!("{result}"));
    claims.iter().find(|c| c["id"] == id).unwrap_or_else(|| panic!("no {id}: {result}"))
}

#[test]
fn a_sweep_is_stopped_gone_on_with_and_calibrates() {
    let test = "a_sweep_is_stopped_gone_on_with_and_calibrates";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    let out = site.dir.path().join("sweep");
    let out = out.to_str().unwrap();
    let sweep = words("bench sweep twin:qlc-nvme --points 20 --for 500ms --profile");
    let sweep = [&sweep[..], &[PROFILE, "--out", out]].concat();
    let file = Path::new(out).join("qlc-nvme.jsonl");
    let mut child = site.command(&sweep).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    wait_for("three runs", || lines(&file).len() >= 4);
    signal(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130), "stopped as asked");
    let before = lines(&file);
    site.ok(&sweep);
    let after = lines(&file);
    assert_eq!(after.len(), 21, "the header and every run, once");
    assert_eq!(after[..before.len()], before[..], "what was measured stays");
    for point in &after[1..] {
        let tasks: usize =
            point["vms"].as_array().unwrap().iter().map(|vm| vm.as_array().unwrap().len()).sum();
        assert_eq!(point["results"].as_array().unwrap().len(), tasks);
        assert!(point["noise"]["n"].as_u64().unwrap() > 0, "the host was watched: {}", point["noise"]);
        assert!(point["disk"]["n"].as_u64().unwrap() > 0, "and the disk: {}", point["disk"]);
        // Without a cpuidle driver the CPUs cannot be kept awake, which is said and no reason to
        // stop.
        assert_eq!(point["noise"]["awake"], rtvirtio_measure::pm_qos::PmQosGuard::hold().is_ok());
        let streams = point["vms"].as_array().unwrap().iter().flat_map(|vm| vm.as_array().unwrap());
        // A host that stands still all the time is not taken off, for what is left shows nothing.
        // The sum decides: many waits of 0.3 ms are none that `stalls` counts.
        let quiet = point["noise"]["stood_still"].as_f64().is_some_and(|share| share <= 0.05);
        let known = point["results"].as_array().unwrap().iter().any(|r| r["p9999_awake"].is_u64());
        assert_eq!(known, quiet, "{point}");
        for (stream, result) in streams.zip(point["results"].as_array().unwrap()) {
            let (tail, awake) = (&result["p9999"], &result["p9999_awake"]);
            assert_eq!(
                awake.is_u64(),
                known && stream["rate"].is_number(),
                "of all paced tasks or none: {point}"
            );
            assert!(!known || awake.as_u64() <= tail.as_u64(), "{awake} {tail}");
        }
    }
    // Runs of another length do not belong in this file.
    let longer: Vec<&str> = sweep.iter().map(|a| if *a == "500ms" { "600ms" } else { *a }).collect();
    let mixed = site.output(&longer);
    assert_eq!(mixed.status.code(), Some(1));
    assert!(text(&mixed.stderr).contains("it was begun by"), "{}", text(&mixed.stderr));
    assert_eq!(lines(&file).len(), 21);
    // Nor those of another design, as another version may have.
    let elsewhere = site.dir.path().join("other");
    std::fs::create_dir(&elsewhere).unwrap();
    let mut other = after.clone();
    let knobs = &mut other[1]["knobs"];
    knobs["elevator"] = if knobs["elevator"] == "kyber" { "none" } else { "kyber" }.into();
    let rows: Vec<String> = other.iter().map(Value::to_string).collect();
    std::fs::write(elsewhere.join(file.file_name().unwrap()), rows.join("\n") + "\n").unwrap();
    let there = elsewhere.to_str().unwrap();
    let moved: Vec<&str> = sweep.iter().map(|a| if *a == out { there } else { *a }).collect();
    let refused = site.output(&moved);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("of another design"), "{}", text(&refused.stderr));
    // Too few for a bound at 99 %: that is said, not guessed.
    let refused = site.output(&["bench", "accuracy", file.to_str().unwrap()]);
    assert_eq!(refused.status.code(), Some(1));
    let told = text(&refused.stderr);
    assert!(told.contains("different conditions, 120 are needed for a bound at 99 %"), "{told}");
    calibrated(&site, &file, &after[1..]);
    site.assert_clean();
}

#[test]
fn without_fio_no_lab_is_made() {
    let test = "without_fio_no_lab_is_made";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    let out = site.dir.path().join("cases");
    let args = ["bench", "cases", "twin:qlc-nvme", "--profile", PROFILE, "--out", out.to_str().unwrap()];
    let refused = site.command(&args).env("PATH", site.dir.path()).output().unwrap();
    let told = text(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{told}");
    assert!(told.contains("apt-get install fio") && !told.contains("lab"), "{told}");
    assert!(!out.exists());
    site.assert_clean();
}

/// From the runs to a bound at 90 %, and from the saved model to a plan that is measured.
fn calibrated(site: &Site, file: &Path, points: &[Value]) {
    let model = site.dir.path().join("model.json");
    let (file, model) = (file.to_str().unwrap(), model.to_str().unwrap());
    let fit = ["bench", "accuracy", file, "--confidence", "90", "--folds", "10", "--model", model];
    // A run in which this machine stood still for too long counts for nothing, and of too few of
    // the others there is no bound.
    let results = |p: &Value| p["results"].as_array().unwrap().clone();
    let known = points.iter().filter(|p| results(p).iter().any(|r| r["p9999_awake"].is_u64())).count();
    let usable = if 2 * known > points.len() { known } else { points.len() };
    if usable - usable.div_ceil(10) < 12 {
        let refused = site.output(&fit);
        assert!(
            text(&refused.stderr).contains("12 are needed for a bound at 90 %"),
            "{}",
            text(&refused.stderr)
        );
        return;
    }
    let (code, result) = site.json(&fit);
    assert!([0, 2].contains(&code), "{result}");
    let coverage = claim(&result, "accuracy.bound.coverage");
    assert_eq!(coverage["at_least"], 0.9);
    // A bound that most tails exceed is none, however few runs it is from.
    assert!(coverage["value"].as_f64().unwrap() > 0.5, "{coverage}");
    assert!(claim(&result, "accuracy.bound.sharpness")["value"].as_f64().unwrap() > 1.0);
    let runs = result["runs"].as_array().unwrap();
    assert_eq!(runs.len(), points.len(), "the runs that the claims came from");
    let expected =
        runs.iter().flat_map(|r| r["tasks"].as_array().unwrap()).filter(|t| t["predicted_ns"].is_u64());
    // On a host that stands still all the time tails are judged as measured only.
    let claims = result["claims"].as_array().unwrap();
    let judged = claims.iter().find(|c| c["id"] == "accuracy.awake.coverage").unwrap_or(coverage);
    assert_eq!(expected.count() as u64, judged["n"].as_u64().unwrap());
    // The model plans on the device that it is of; its profile is of another kernel than this one,
    // which is said.
    let out = site.dir.path().join("planned");
    let out = out.to_str().unwrap();
    let cases = |device: &'static str| {
        let schemes = ["--schemes", "bound", "--for", "1s", "--model", model, "--out", out];
        [&["bench", "cases", device, "--tier", "paper", "--only", "1vm-L-"][..], &schemes].concat()
    };
    let elsewhere = site.output(&cases("twin:emmc"));
    assert_eq!(elsewhere.status.code(), Some(1));
    let told = text(&elsewhere.stderr);
    assert!(told.contains("twin-qlc-nvme") && told.contains("this is twin-emmc"), "{told}");
    let (_, planned) = site.json(&[&cases("twin:qlc-nvme")[..], &["--other-host"]].concat());
    let rate = claim(&planned, "cases.paper.bound.pass_rate");
    assert_eq!(rate["n"], 1, "{rate}");
    let header = &lines(&Path::new(out).join("cases-qlc-nvme.jsonl"))[0];
    assert_eq!(header["model"].as_str().map(str::len), Some(16), "{header}");
    let typo = site.output(&["bench", "cases", "--schemes", "bond", "--out", out]);
    assert_eq!(typo.status.code(), Some(1));
    assert!(
        text(&typo.stderr).contains("there is no scheme bond; there are default-bfq"),
        "{}",
        text(&typo.stderr)
    );
}

/// Writes a spec of two VMs on a small twin, one reading task each under `load`, by name and p99
/// target; gives its path.
fn two_vms(site: &Site, file: &str, load: &str, vms: [(&str, &str); 2]) -> String {
    let vm = |(name, target): (&str, &str)| {
        format!(
            "[[vm]]\nname = \"{name}\"\nlab = \"process\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n{load}\ntarget = {{ percentile = \"p99\", latency = \"{target}\" }}\n"
        )
    };
    let path = site.dir.path().join(file);
    let text = format!("[device]\ntwin = \"qlc-nvme\"\nsize = \"256MiB\"\n{}", vms.map(vm).concat());
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn tuning_in_small() {
    let test = "tuning_in_small";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    let spec_of =
        |name: &str, target: &str| two_vms(&site, name, "rate = \"200/s\"", [("a", target), ("b", target)]);
    let possible = spec_of("possible.toml", "20s");
    site.ok(&["lab", "up", &possible]);
    let tune = |spec: &str| {
        let args = ["tune", spec, "--budget", "5min", "--for", "1s", "--trials", "3", "--profile", PROFILE];
        site.json(&args)
    };
    let (_, tuned) = tune(&possible);
    let run = &tuned["result"]["runs"][0];
    let missed = run["tasks"].as_array().unwrap().iter().any(|t| t["verdict"] == "missed");
    let trials = tuned["trials"].as_array().unwrap();
    // Two good trials of the same setting, then the proof: no request waits for 20 s. But a machine
    // that stands still for long enough loses the rate.
    if trials.iter().all(|t| t["score"].as_f64().unwrap() <= 0.9) && !missed {
        assert_eq!((trials.len(), &tuned["plan"]["feasible"]), (2, &Value::from(true)), "{tuned:#}");
    }
    assert_eq!(tuned["in_force"], !missed, "{tuned:#}");
    // 473 requests for p99 at 95 % with one of them late: 2.4 s at 200/s, not the whole budget.
    assert!((1.0..5.0).contains(&run["seconds"].as_f64().unwrap()), "{run:#}");
    site.ok(&["revert"]);
    // A target that nothing meets: tried until the trials are used up, nothing stays in force, and
    // it is said.
    site.ok(&["lab", "down"]);
    let impossible = spec_of("impossible.toml", "1us");
    site.ok(&["lab", "up", &impossible]);
    let (code, tuned) = tune(&impossible);
    assert_eq!(code, 2, "{tuned:#}");
    let trials = tuned["trials"].as_array().unwrap();
    assert!((2..=3).contains(&trials.len()), "{tuned:#}");
    assert!(trials.iter().all(|t| t["score"].as_f64().unwrap() > 1.0));
    assert_eq!((&tuned["plan"]["feasible"], &tuned["in_force"]), (&Value::from(false), &Value::from(false)));
    assert!(site.ok(&["revert"]).len() < 200, "there is nothing to put back");
    site.ok(&["lab", "down"]);
    site.assert_clean();
}

#[test]
fn more_declared_than_the_device_can_do() {
    let test = "more_declared_than_the_device_can_do";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    let load = "rate = \"9000/s\"\ndepth = 4\nloop = \"open\"";
    let spec = two_vms(&site, "much.toml", load, [("later", "60ms"), ("sooner", "25ms")]);
    let spec = spec.as_str();
    site.ok(&["lab", "up", spec]);
    let (code, plan) = site.json(&["plan", spec, "--profile", PROFILE]);
    assert_eq!(
        (code, &plan["devices"][0]["plan"]["infeasible"]["sacrificed"]),
        (2, &serde_json::json!(["later"])),
        "{plan:#}"
    );
    let limit = plan["devices"][0]["plan"]["settings"]
        .as_array()
        .unwrap()
        .iter()
        .find(|s| !s["knob"]["vm_limit"].is_null())
        .unwrap();
    assert_eq!(limit["knob"]["vm_limit"]["vm"], "later");

    let tune = ["tune", spec, "--budget", "5min", "--for", "1s", "--trials", "2", "--profile", PROFILE];
    let refused = site.output(&tune);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("later given up for the others"), "{}", text(&refused.stderr));
    assert!(site.ok(&["revert"]).contains("nothing to put back"));

    let apply =
        |more: &[&str]| site.output(&[&["apply", spec, "--profile", PROFILE], more].concat()).status.code();
    assert_eq!(apply(&[]), Some(2), "not without consent");
    let dry = site.output(&["apply", spec, "--profile", PROFILE, "--dry-run"]);
    assert_eq!(dry.status.code(), Some(2), "the verdict of the dry run is that of `plan`");
    let said = text(&dry.stderr);
    assert!(said.contains("would not be applied") && said.contains("--compromise"), "{said}");
    assert!(text(&dry.stdout).contains(" -> "), "what the compromise would write: {}", text(&dry.stdout));
    assert_eq!(apply(&["--dry-run", "--compromise"]), Some(0));
    assert_eq!(apply(&["--compromise"]), Some(0));
    let (_, status) = site.json(&["status"]);
    let of_later = |k: &&Value| k.to_string().contains("later");
    let held = status["knobs"].as_array().unwrap().iter().find(of_later).unwrap();
    assert!(held.to_string().contains("in_force"), "{status:#}");
    site.ok(&["revert"]);

    let (_, tuned) = site.json(&[&tune[..], &["--compromise", "--put-back"]].concat());
    assert_eq!(tuned["given_up"], serde_json::json!(["later"]));
    assert_eq!(tuned["plan"]["devices"][0]["plan"]["infeasible"]["sacrificed"], tuned["given_up"]);
    let settings = tuned["plan"]["devices"][0]["plan"]["settings"].as_array().unwrap();
    let limit = settings.iter().find(|s| s["knob"]["vm_limit"]["vm"] == "later").unwrap();
    let limit: f64 = limit["value"].as_str().unwrap().parse().unwrap();
    let run = &tuned["result"]["runs"][0];
    let later = run["tasks"].as_array().unwrap().iter().find(|t| t["vm"] == "later").unwrap();
    let rate = later["achieved_rate"].as_f64().unwrap();
    assert!(limit >= 100.0 && rate <= 1.3 * limit + 10.0, "{rate} of {limit}");
    site.ok(&["lab", "down"]);
    site.assert_clean();
}

#[test]
fn cases_in_small() {
    let test = "cases_in_small";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    let out = site.dir.path().join("cases");
    let schemes = "default-bfq,ionice,rt-xen,slice";
    let args = words("bench cases --tier paper --only 3vm-LM- --for 1s --schemes");
    let args = [&args[..], &[schemes, "--profile", PROFILE, "--out", out.to_str().unwrap()]].concat();
    let (code, result) = site.json(&args);
    assert!([0, 2].contains(&code), "{result}");
    for scheme in schemes.split(',') {
        let rate = claim(&result, &format!("cases.paper.{scheme}.pass_rate"));
        assert_eq!(rate["n"], 1, "{rate}");
    }
    assert_eq!(result["runs"].as_array().unwrap().len(), 4, "four treatments that differ");
    // The report finds the same in the directory, with every run's host stalls set apart.
    let html = out.join("report.html");
    let table = out.join("claims.tsv");
    let (html_path, table_path) = (html.to_str().unwrap(), table.to_str().unwrap());
    let report =
        ["bench", "report", "--data", out.to_str().unwrap(), "--html", html_path, "--table", table_path];
    let (_, again) = site.json(&report);
    assert_eq!(again["claims"], result["claims"]);
    claim(&result, "cases.paper.slice.pass_rate_awake");
    for file in [&html, &table] {
        assert!(std::fs::read_to_string(file).unwrap().contains("cases.paper.slice.pass_rate"));
    }
    // A second call measures nothing again.
    let file = out.join("cases-qlc-nvme.jsonl");
    let before = std::fs::read(&file).unwrap();
    site.json(&args);
    assert_eq!(std::fs::read(&file).unwrap(), before);
    site.assert_clean();
}

#[test]
fn contention_in_small() {
    let test = "contention_in_small";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    let out = site.dir.path().join("contention");
    let html = site.dir.path().join("contention.html");
    let args = words("bench contention --only fig2 --repeat 1 --for 500ms --profile");
    let (out, page) = (out.to_str().unwrap(), html.to_str().unwrap());
    let args = [&args[..], &[PROFILE, "--out", out, "--html", page]].concat();
    let (code, result) = site.json(&args);
    assert_eq!(code, 0, "{result}");
    assert_eq!(result["runs"].as_array().unwrap().len(), 6, "1 and 4 VMs by 1 to 3 tasks");
    let growth = claim(&result, "contention.tail_growth.most");
    assert!(growth["value"].as_f64().unwrap() > 0.0 && growth["n"] == 6, "{growth}");
    let page = std::fs::read_to_string(html).unwrap();
    assert!(page.contains("Fig. 2") && page.contains("<svg"), "the page has its figure");
    site.assert_clean();
}

#[test]
fn the_io_domain_in_small() {
    let test = "the_io_domain_in_small";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    let out = site.dir.path().join("iod");
    let args = ["bench", "iod", "--repeat", "1", "--for", "500ms", "--out", out.to_str().unwrap()];
    let value = |result: &Value, id: &str| claim(result, id)["value"].as_f64().unwrap();
    // Who goes first is shown in virtual time (`core/sim`), and how much it gives is what this
    // benchmark measures; half a second of it on a busy machine proves neither.
    let result = site.json(&args).1;
    assert_eq!(result["runs"].as_array().unwrap().len(), 4, "four schemes");
    for id in ["rate_kept", "of_the_rest", "p50_ms.edf", "p50_ms.fifo"] {
        assert!(value(&result, &format!("iod.flood.{id}")) >= 0.0, "{id}: {}", result["claims"]);
    }
    assert!(value(&result, "iod.regulator.error_us") >= 0.0);
    // What was measured can be shown again.
    let (_, again) = site.json(&["bench", "iod", "--report-only", "--out", out.to_str().unwrap()]);
    assert_eq!(again["claims"], result["claims"]);
    assert!(again["data"][0]["pairs"].is_array(), "what is no run: {}", again["data"]);
    site.assert_clean();
}

#[test]
fn a_ring_on_the_bare_device_and_the_io_domain_in_turn() {
    let test = "a_ring_on_the_bare_device_and_the_io_domain_in_turn";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    let out = site.dir.path().join("added");
    let out = out.to_str().unwrap();
    let args =
        ["bench", "iod-added", "--pairs", "1", "--for", "500ms", "--device", "twin:emmc", "--out", out];
    let (_, result) = site.json(&args);
    let devices = result["data"][0]["devices"].as_array().unwrap_or_else(|| panic!("{result}"));
    let names: Vec<&Value> = devices.iter().map(|d| &d["name"]).collect();
    assert_eq!(names, ["ram", "emmc"]);
    for round in devices.iter().flat_map(|d| d["rounds"].as_array().unwrap()) {
        for way in ["bare", "sleeping", "polling"] {
            let number = |name: &str| round[way][name].as_f64().unwrap();
            assert!(number("n") > 0.0 && number("p50_ns") <= number("p9999_ns"), "{way}: {round}");
            assert!(number("client_cpu_ns") > 0.0, "{way}: {round}");
        }
        assert_eq!(round["bare"]["domain_cpu_ns"], 0.0, "{round}");
    }
    assert!(devices.iter().all(|d| d["rounds"].as_array().unwrap().len() == 3), "three depths");
    let (_, again) = site.json(&["bench", "iod", "--report-only", "--out", out]);
    assert_eq!(again["claims"], result["claims"]);
    site.assert_clean();
}

#[test]
fn disks_come_and_go_next_to_a_client_that_verifies() {
    let test = "disks_come_and_go_next_to_a_client_that_verifies";
    if !can_run(test) {
        return;
    }
    let site = Site::new();
    let out = site.dir.path().join("attach");
    let out = out.to_str().unwrap();
    let (code, result) = site.json(&["bench", "iod-attach", "--disks", "4", "--out", out]);
    assert_eq!(code, 0, "{}", result["claims"]);
    assert_eq!(claim(&result, "iod.attach.turns")["value"], 4.0);
    for id in ["iod.attach.longest_ms", "iod.attach.longest_without_ms"] {
        assert!(claim(&result, id)["n"].as_u64().unwrap() > 0, "{result}");
    }
    let (_, again) = site.json(&["bench", "iod", "--report-only", "--out", out]);
    assert_eq!(again["claims"], result["claims"]);
    site.assert_clean();
}
