//! Real guests on the I/O domain, in small: killed, migrated, and an application that starts.

use std::io::{BufRead, BufReader};
use std::process::Child;
use std::time::Duration;

use rtvirtio_testkit::site::{PROFILE, Site, can_run, lines, signal, text, wait_for};
use rtvirtio_testkit::{Need, has};
use rustix::process::Signal;
use serde_json::Value;

fn site(test: &str) -> Option<Site> {
    if !can_run(test) || !has(test, &[Need::QEMU]) {
        return None;
    }
    Some(Site::new())
}

fn start(site: &Site, args: &[&str]) -> Child {
    site.command(args)
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap()
}

/// Runs it to its end: its JSON, whatever the exit code.
fn json(site: &Site, args: &[&str]) -> Value {
    let out = start(site, &[args, &["--json"]].concat()).wait_with_output().unwrap();
    serde_json::from_slice(&out.stdout)
        .unwrap_or_else(|e| panic!("{args:?}: {e}\n{}\n{}", text(&out.stdout), text(&out.stderr)))
}

fn claim<'a>(result: &'a Value, id: &str) -> &'a Value {
    let claims = result["claims"].as_array().unwrap_or_else(|| panic!("{result}"));
    claims.iter().find(|c| c["id"] == id).unwrap_or_else(|| panic!("no {id}: {result}"))
}

fn assert_clean(site: &Site) {
    site.assert_clean();
    // The programs' temporary files are in the site too.
    let left: Vec<_> = std::fs::read_dir(site.dir.path().join("tmp")).unwrap().flatten().collect();
    assert!(left.is_empty(), "left behind: {left:?}");
}

#[test]
fn a_killed_domain_loses_nothing() {
    let Some(site) = site("a_killed_domain_loses_nothing") else { return };
    let out = site.dir.path().join("out");
    let out = out.to_str().unwrap();
    let result = json(&site, &["bench", "iod-crash", "--kills", "2", "--out", out]);
    for id in ["iod.crash.lost", "iod.crash.corrupt", "iod.crash.io_errors"] {
        assert_eq!(
            (&claim(&result, id)["value"], &claim(&result, id)["n"]),
            (&0.0.into(), &2.into()),
            "{id}"
        );
    }
    assert!(claim(&result, "iod.crash.away_ms")["value"].as_f64().unwrap() > 0.0);
    // What was measured can be shown again, by itself and with all about the I/O domain.
    for command in ["iod-crash", "iod"] {
        let again = json(&site, &["bench", command, "--report-only", "--out", out]);
        assert_eq!(again["claims"], result["claims"], "{command}");
    }
    assert_clean(&site);
}

#[test]
fn a_stopped_crash_run_leaves_nothing() {
    let Some(site) = site("a_stopped_crash_run_leaves_nothing") else { return };
    let out = site.dir.path().join("out");
    let mut run = start(&site, &["bench", "iod-crash", "--out", out.to_str().unwrap()]);
    let said = BufReader::new(run.stderr.take().unwrap());
    let killing = said.lines().map_while(Result::ok).any(|l| l.contains("kill -9 under a guest"));
    assert!(killing, "it came to its kills");
    std::thread::sleep(Duration::from_secs(2));
    signal(&run, Signal::INT);
    wait_for("the end", || run.try_wait().unwrap().is_some());
    assert_ne!(run.wait().unwrap().code(), Some(0));
    assert!(!out.exists(), "half a result is none");
    assert_clean(&site);
}

#[test]
fn a_guest_migrates_and_finds_what_it_wrote() {
    let Some(site) = site("a_guest_migrates_and_finds_what_it_wrote") else { return };
    let out = site.dir.path().join("out");
    let out = out.to_str().unwrap();
    let migrate = |pairs: &str| {
        let args = ["--migrations", "2", "--pairs", pairs, "--kills", "1", "--refusals", "1", "--cards", "0"];
        json(&site, &[&["bench", "iod-migrate", "--out", out], &args[..]].concat())
    };
    let result = migrate("1");
    for id in ["migrate.lost", "migrate.corrupt", "migrate.unverified", "migrate.lost.qemu"] {
        let claim = claim(&result, id);
        assert_eq!((&claim["value"], &claim["n"]), (&0.0.into(), &2.into()), "{claim}");
    }
    for id in ["migrate.sums", "migrate.total_ms", "migrate.total_ms.qemu", "migrate.iops.logging"] {
        assert!(claim(&result, id)["value"].as_f64().unwrap() > 0.0, "{id}: {result}");
    }
    let kills = claim(&result, "migrate.kills.unexpected");
    assert_eq!((&kills["value"], &kills["n"]), (&0.0.into(), &1.into()), "{kills}");
    let refused = claim(&result, "migrate.refused_without_stop");
    assert_eq!(
        (&refused["value"], &refused["n"]),
        (&1.0.into(), &1.into()),
        "{}",
        result["data"][0]["refusals"]
    );
    assert_eq!(claim(&result, "migrate.log_cost")["n"], 1);
    let again = json(&site, &["bench", "iod", "--report-only", "--out", out]);
    assert_eq!(again["claims"], result["claims"]);
    // A second call makes only what is missing, as a piece of its own.
    let result = migrate("2");
    assert_eq!(claim(&result, "migrate.lost")["n"], 2, "{result}");
    assert_eq!(claim(&result, "migrate.log_cost")["n"], 2);
    let pieces = result["data"][0]["pieces"].as_array().unwrap();
    assert_eq!((&pieces[1]["moves"], &pieces[1]["rounds"]), (&4.into(), &1.into()), "{pieces:?}");
    assert!(pieces.iter().all(|p| p["host"]["vmm"].as_str().unwrap().starts_with("QEMU ")), "{pieces:?}");
    assert_clean(&site);
}

#[test]
fn a_network_card_moves_with_its_guest() {
    let Some(site) = site("a_network_card_moves_with_its_guest") else { return };
    let out = site.dir.path().join("out");
    let only = ["--migrations", "0", "--pairs", "0", "--kills", "0", "--refusals", "0", "--cards", "2"];
    let result =
        json(&site, &[&["bench", "iod-migrate", "--out", out.to_str().unwrap()], &only[..]].concat());
    let cards = result["data"][0]["cards"].as_array().unwrap_or_else(|| panic!("{result}"));
    assert!(cards.len() == 2 && cards.iter().all(|card| card["moved"].get("failed").is_none()), "{result}");
    // There and back again: frames reach the guest before the move, and after it.
    for card in cards {
        let (sent, lost) = (card["sent"].as_u64().unwrap(), card["lost"].as_u64().unwrap());
        assert!(lost < sent && card["gap_ns"].as_u64().unwrap() > 0, "{card}");
    }
    assert_clean(&site);
}

#[test]
fn stopped_migrations_leave_what_was_measured() {
    let Some(site) = site("stopped_migrations_leave_what_was_measured") else { return };
    let out = site.dir.path().join("out");
    let mut run = start(&site, &["bench", "iod-migrate", "--out", out.to_str().unwrap()]);
    let mut said = BufReader::new(run.stderr.take().unwrap()).lines();
    let moved = said.by_ref().map_while(Result::ok).any(|l| l.contains("migration 1 of 100"));
    assert!(moved, "both guests moved");
    signal(&run, Signal::INT);
    wait_for("the end", || run.try_wait().unwrap().is_some());
    assert_ne!(run.wait().unwrap().code(), Some(0));
    let text = std::fs::read_to_string(out.join("iod-migrate.json")).unwrap();
    let data: Value = serde_json::from_str(&text).unwrap();
    assert!(
        data["moves"].as_array().unwrap().len() >= 2 && data["findings"] == serde_json::json!([]),
        "{text}"
    );
    // What was not asked is not met.
    let shown = json(&site, &["bench", "iod-migrate", "--report-only", "--out", out.to_str().unwrap()]);
    assert_eq!(claim(&shown, "migrate.lost")["met"], false);
    assert_clean(&site);
}

#[test]
fn an_application_starts_in_a_guest() {
    let Some(site) = site("an_application_starts_in_a_guest") else { return };
    let out = site.dir.path().join("out");
    let args = ["bench", "iod-startup", "twin:emmc", "--schemes", "idle,fifo,urgent", "--repeat", "1"];
    let app = ["--out", out.to_str().unwrap(), "--", "perl", "-e", "1"];
    let mut run = start(&site, &[&args[..], &app].concat());
    let mut said = String::new();
    std::io::Read::read_to_string(&mut run.stderr.take().unwrap(), &mut said).unwrap();
    run.wait().unwrap();
    let file = out.join("iod-startup.json");
    let text = std::fs::read_to_string(&file).unwrap_or_else(|e| panic!("{e}: {said}"));
    let data: Value = serde_json::from_str(&text).unwrap();
    let starts = data["starts"].as_array().unwrap();
    assert_eq!(starts.len(), 3, "{said}");
    let of = |scheme: &str| starts.iter().find(|s| s["scheme"] == scheme).unwrap();
    // perl and its libraries come from the device, and under load the other VM asks too.
    assert!(of("idle")["bytes"].as_u64().unwrap() > 1 << 20, "{starts:#?}");
    assert!(of("fifo")["flood"].as_f64().unwrap() > 0.0);
    // The guest's kernel wrote the class into its requests, and the I/O domain read it; otherwise
    // nothing went by the reservation.
    assert_eq!(of("fifo")["reserved"], 0);
    assert!(of("urgent")["reserved"].as_u64().unwrap() > 10, "{starts:#?}");
    // An application that needs what is not there is told.
    let wrong = ["bench", "iod-startup", "twin:emmc", "--repeat", "1", "--", "no-such-program"];
    let refused = start(&site, &wrong).wait_with_output().unwrap();
    assert!(rtvirtio_testkit::site::text(&refused.stderr).contains("no-such-program"), "{refused:?}");
    assert_clean(&site);
}

#[test]
fn a_sweep_runs_in_guests() {
    let Some(site) = site("a_sweep_runs_in_guests") else { return };
    let out = site.dir.path().join("out");
    let device = ["bench", "sweep", "twin:qlc-nvme", "--points", "20", "--qemu", "2", "--for", "1s"];
    let sweep = [&device[..], &["--profile", PROFILE, "--out", out.to_str().unwrap()]].concat();
    let file = out.join("qlc-nvme-qemu.jsonl");
    let first = site.output(&sweep);
    // On a busy machine an emulated guest may not keep up, which is said; once is shown, twice is a
    // failure.
    if text(&first.stderr).contains("completed no more requests") {
        eprintln!("the first sweep ended with: {}", text(&first.stderr));
        site.ok(&sweep);
    } else {
        assert!(first.status.success(), "{}", text(&first.stderr));
    }
    let runs = lines(&file);
    assert_eq!(runs.len(), 3, "the header and two runs: {runs:#?}");
    // The profile is of process VMs: what these guests add is measured.
    let accelerator = runs[0]["host"]["accelerator"].as_str().unwrap();
    assert_eq!(runs[0]["profiles"]["qlc-nvme"]["guest"]["kind"], format!("qemu-{accelerator}"));
    for run in &runs[1..] {
        assert_eq!(run["kind"], "qemu");
        let vms = run["vms"].as_array().unwrap();
        let tasks = vms.iter().flat_map(|vm| vm.as_array().unwrap());
        let mut completed = 0.0;
        for (task, result) in tasks.zip(run["results"].as_array().unwrap()) {
            // On a busy machine all of it may have been due in the warm-up, which leaves `n` at 0.
            completed += result["rate"].as_f64().unwrap();
            assert!(result["p9999"].as_u64().unwrap() > 0, "{task}: {result}");
            // Nobody knows when the host stood still while a guest waited.
            assert!(result["p9999_awake"].is_null(), "{result}");
        }
        assert!(completed > 0.0, "{run}");
    }
    site.ok(&sweep);
    assert_eq!(lines(&file), runs, "what is measured is not measured again");
    assert_clean(&site);
}
