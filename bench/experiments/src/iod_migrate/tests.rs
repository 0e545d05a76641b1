use std::path::Path;

use rtvirtio_vmm::agent::ExecOutput;

use super::*;
use crate::experiment::Experiment as _;
use crate::saved::from_json;

fn moved(disk: DiskKind, downtime_ms: u64) -> Move {
    Move { disk, downtime_ms, total_ms: 1_000 + downtime_ms, syncs: 3, failed: None }
}

fn found(disk: DiskKind) -> Findings {
    Findings { disk, fio_runs: 4, sums: 160, ..Findings::default() }
}

/// Three migrations each, and two rounds.
fn data() -> MigrateData {
    let times = [(DiskKind::Domain, [30, 60, 40]), (DiskKind::Qemu, [40, 45, 90])];
    MigrateData {
        schema: MigrateData::SCHEMA.to_owned(),
        host: HostFacts { cpus: 1, ..HostFacts::default() },
        command: String::new(),
        generated: String::new(),
        moves: times.into_iter().flat_map(|(disk, ms)| ms.map(|ms| moved(disk, ms))).collect(),
        findings: vec![found(DiskKind::Domain), found(DiskKind::Qemu)],
        rounds: vec![
            LogRound { fixed: 1_000.0, ready: 1_000.0, logging: 950.0 },
            LogRound { fixed: 1_000.0, ready: 990.0, logging: 891.0 },
        ],
    }
}

fn claim(data: &MigrateData, id: &str) -> Claim {
    let all = claims(data);
    all.into_iter().find(|c| c.id == id).unwrap_or_else(|| panic!("no {id}"))
}

#[test]
fn claims_are_those_of_the_numbers() {
    let data = data();
    let value = |id: &str| claim(&data, id).value;
    assert_eq!([value("migrate.downtime_ms"), value("migrate.downtime_ms.most")], [40.0, 60.0]);
    assert_eq!([value("migrate.downtime_ms.qemu"), value("migrate.downtime_ms.most.qemu")], [45.0, 90.0]);
    assert_eq!([value("migrate.total_ms"), value("migrate.total_ms.most")], [1_040.0, 1_060.0]);
    let ratio = claim(&data, "migrate.downtime_ratio");
    assert!((ratio.value - 40.0 / 45.0).abs() < 1e-9 && ratio.n == 3 && ratio.met, "{ratio:?}");
    // Medians of 0.05 and 0.1, and of 0 and 0.01.
    let (cost, off) = (claim(&data, "migrate.log_cost"), claim(&data, "migrate.log_cost_off"));
    assert!((cost.value - 0.075).abs() < 1e-9 && (off.value - 0.005).abs() < 1e-9, "{cost:?} {off:?}");
    assert!(claims(&data).iter().all(|c| c.met));
    assert_eq!(claims(&data).iter().filter(|c| c.has_limit()).count(), 5);
}

#[test]
fn a_failed_migration_and_what_guests_found_are_not_met() {
    let mut bad = data();
    bad.moves.push(Move { failed: Some("no".to_owned()), ..moved(DiskKind::Domain, 0) });
    bad.findings[0].errors = 2;
    let lost = claim(&bad, "migrate.lost");
    assert_eq!((lost.value, lost.n, lost.met), (3.0, 4, false));
    // Its numbers are none.
    assert_eq!(claim(&bad, "migrate.downtime_ms").value, 40.0);
    let mut bad = data();
    (bad.findings[0].bad_blocks, bad.findings[0].wrong_sums) = (1, 2);
    let corrupt = claim(&bad, "migrate.corrupt");
    assert_eq!((corrupt.value, corrupt.met), (3.0, false));
    // The guest on QEMU's own disk does not count as ours.
    let mut peer = data();
    peer.findings[1].errors = 1;
    peer.moves.push(Move { failed: Some("no".to_owned()), ..moved(DiskKind::Qemu, 0) });
    assert_eq!(claim(&peer, "migrate.lost").value, 0.0);
    assert_eq!(claim(&peer, "migrate.lost.qemu").value, 2.0);
}

#[test]
fn what_was_not_seen_shows_nothing() {
    let mut stopped = data();
    stopped.findings.clear();
    assert!(!claim(&stopped, "migrate.lost").met && !claim(&stopped, "migrate.corrupt").met);
    let mut half = data();
    half.findings[0].sums = 0;
    assert!(!claim(&half, "migrate.corrupt").met, "no sums");
    let mut half = data();
    half.findings[0].fio_runs = 0;
    assert!(!claim(&half, "migrate.corrupt").met, "no run of fio");
    let mut alone = data();
    alone.moves.retain(|m| m.disk == DiskKind::Domain);
    alone.rounds.clear();
    for id in ["migrate.downtime_ratio", "migrate.log_cost", "migrate.log_cost_off"] {
        let unknown = claim(&alone, id);
        assert!(!unknown.met && unknown.n == 0, "{unknown:?}");
    }
}

#[test]
fn a_saved_result_is_read_again() {
    let mut data = data();
    data.moves.push(Move { failed: Some("no".to_owned()), ..Move::default() });
    let text = serde_json::to_string(&data).unwrap();
    assert_eq!(from_json::<MigrateData>(&text).unwrap(), data);
    assert!(text.contains(r#""disk":"domain""#) && text.contains(r#""disk":"qemu""#), "{text}");
    let other = text.replace(MigrateData::SCHEMA, "rtvirtio-iod-migrate/0");
    assert!(from_json::<MigrateData>(&other).unwrap_err().to_string().contains("iod-migrate/0"));
    let report = data.report().unwrap();
    assert_eq!(report.claims, claims(&data));
    assert_eq!(report.sections[0].tables.iter().map(|t| t.rows.len()).collect::<Vec<_>>(), [2, 2, 2]);
}

#[test]
fn configurations_are_ones() {
    let disk = |text: &str| {
        let mut file = rtvirtio_domain_config::File::parse(Path::new("x"), text).unwrap();
        file.devices.remove(0).disks.remove(0)
    };
    assert!(disk(&measure::config(Path::new("/run/x"), Path::new("/x/disk"))).migrate);
    let migrate = |log| disk(&log_cost::config(log, Path::new("/run/x"), Path::new("/dev/loop9"))).migrate;
    assert_eq!(log_cost::RUNS.map(migrate), [false, true, true]);
}

fn output(code: i32, stdout: &str) -> ExecOutput {
    let stdout = stdout.as_bytes().to_vec();
    ExecOutput { code: Some(code), signal: None, stdout, stderr: Vec::new(), truncated: false }
}

#[test]
fn what_fio_prints_is_told_apart() {
    let of = |code, text: &str| {
        let mut findings = Findings::default();
        guest_load::add_writer(&mut findings, &output(code, text));
        (findings.fio_runs, findings.bad_blocks, findings.errors)
    };
    assert_eq!(of(0, "7 runs\n"), (7, 0, 0));
    assert_eq!(of(0, ""), (0, 0, 1), "no word of its runs");
    let bad = "verify: bad header rand_seed 1, wanted 2 at file /dev/vda offset 4096, length 4096\n\
               crc32c: verify failed at file /dev/vda offset 10240000, length 4096\n\n3 runs\n";
    assert_eq!(of(1, bad), (3, 2, 0));
    assert_eq!(of(1, "fio: io_u error on file /dev/vda: Input/output error\n\n3 runs\n"), (3, 0, 1));
}

#[test]
fn sums_are_compared_part_by_part() {
    let sum = |digit: char| digit.to_string().repeat(32);
    let printed: Vec<String> = "01234567".chars().map(sum).collect();
    let expected = guest_load::expected(&(printed.join("\n") + "\n")).unwrap();
    assert_eq!(expected, printed);
    assert!(guest_load::expected("").is_err() && guest_load::expected(&printed[1..].join("\n")).is_err());
    let lines = format!("8 {}\n15 {}\n9 {}\n7 {}\nx\n", sum('0'), sum('7'), sum('0'), sum('0'));
    let mut findings = Findings::default();
    guest_load::add_sums(&mut findings, &lines, &expected);
    assert_eq!((findings.sums, findings.wrong_sums), (5, 3));
    guest_load::add_kernel(&mut findings, "a\n[ 1] I/O error, dev vda\n[ 2] BUG: soft lockup\n");
    assert_eq!(findings.errors, 2);
}

#[test]
fn each_run_of_fio_has_a_seed_of_its_own() {
    let script = guest_load::writer();
    assert!(script.contains("--randseed=$((n + 1))") && script.contains("verify_fatal=1"), "{script}");
    assert!(script.contains("exit 1; }; n=$((n + 1))"), "{script}");
    let reader = guest_load::reader();
    assert!(reader.contains("in 8 9 10 11 12 13 14 15;") && reader.contains("in 15 14 13"), "{reader}");
}
