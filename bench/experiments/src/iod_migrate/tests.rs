use std::path::Path;

use rtvirtio_domain_protocol::histograms::DirectionHistogram;
use rtvirtio_vmm::agent::ExecOutput;

use super::*;
use crate::experiment::Experiment as _;
use crate::net::probe::RoundTrips;
use crate::saved::{Saved as _, from_json};

fn moved(disk: DiskKind, downtime_ms: u64) -> Move {
    let contract = (disk == DiskKind::Domain).then_some(Contract::InForce);
    Move { disk, downtime_ms, total_ms: 1_000 + downtime_ms, syncs: 3, contract, failed: None }
}

fn found(disk: DiskKind) -> Findings {
    Findings { disk, fio_runs: 4, sums: 160, ..Findings::default() }
}

fn killed(victim: Victim, phase: Phase, outcome: Outcome) -> Kill {
    let (contract, findings) = match outcome {
        Outcome::Nowhere => (None, None),
        _ => (Some(Contract::InForce), Some(found(DiskKind::Domain))),
    };
    Kill { victim, phase, outcome: Some(outcome), contract, findings, failed: None }
}

/// Three migrations each, and two rounds.
fn data() -> MigrateData {
    let times = [(DiskKind::Domain, [30, 60, 40]), (DiskKind::Qemu, [40, 45, 90])];
    MigrateData {
        schema: MigrateData::SCHEMA.to_owned(),
        host: HostFacts { cpus: 1, ..HostFacts::default() },
        command: String::new(),
        generated: String::new(),
        pieces: Vec::new(),
        moves: times.into_iter().flat_map(|(disk, ms)| ms.map(|ms| moved(disk, ms))).collect(),
        findings: vec![found(DiskKind::Domain), found(DiskKind::Qemu)],
        kills: vec![killed(Victim::TargetQemu, Phase::Active, Outcome::Source)],
        refusals: Vec::new(),
        cards: Vec::new(),
        rounds: vec![
            LogRound { fixed: 1_000.0, ready: 1_000.0, logging: 950.0 },
            LogRound { fixed: 1_000.0, ready: 990.0, logging: 891.0 },
        ],
        evidence: Vec::new(),
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
    assert_eq!(claims(&data).iter().filter(|c| c.has_limit()).count(), 6);
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
fn a_lost_guest_counts_once() {
    let mut lost = data();
    lost.findings[0] = Findings { unanswered: true, ..Findings::default() };
    let claim_of = |data: &MigrateData| claim(data, "migrate.lost");
    assert_eq!((claim_of(&lost).value, claim_of(&lost).met), (1.0, false), "silent after its migrations");
    lost.moves.push(Move { failed: Some("no answer".to_owned()), ..moved(DiskKind::Domain, 0) });
    assert_eq!((claim_of(&lost).value, claim_of(&lost).n), (1.0, 4), "silent since its last migration");
    // Silence shows nothing of its data.
    let corrupt = claim(&lost, "migrate.corrupt");
    assert_eq!((corrupt.n, corrupt.met), (0, false));
    let half = Findings { unanswered: true, ..found(DiskKind::Domain) };
    assert!(!half.is_clean() && found(DiskKind::Domain).is_clean());
}

#[test]
fn a_piece_adds_to_what_is_there() {
    let first = data();
    let begun = |before: Option<MigrateData>, host: &HostFacts| {
        pieces::begin(before, host.clone(), "again".to_owned())
    };
    let mut both = begun(Some(first.clone()), &first.host).unwrap();
    assert_eq!(both.pieces.len(), 2, "the file without pieces is one");
    let second = both.pieces.last().unwrap();
    assert_eq!((second.moves, second.findings, second.kills, second.rounds), (6, 2, 1, 2));
    // A piece that was stopped before its guests were asked shows nothing.
    both.moves.push(moved(DiskKind::Domain, 35));
    let (lost, corrupt) = (claim(&both, "migrate.lost"), claim(&both, "migrate.corrupt"));
    assert_eq!((lost.n, lost.met, corrupt.n), (3, true, 3));
    both.findings.push(Findings { wrong_sums: 1, ..found(DiskKind::Domain) });
    let corrupt = claim(&both, "migrate.corrupt");
    assert_eq!((corrupt.value, corrupt.n, corrupt.met), (1.0, 4, false));
    assert_eq!(claim(&both, "migrate.lost").n, 4);
    assert_eq!(claim(&both, "migrate.sums").value, 320.0);
    // The guest that is lost in one piece is not excused by another.
    both.moves.push(Move { failed: Some("no".to_owned()), ..moved(DiskKind::Domain, 0) });
    both.findings[0].unanswered = true;
    assert_eq!(claim(&both, "migrate.lost").value, 2.0);
    let saved = serde_json::to_string(&both).unwrap();
    assert_eq!(from_json::<MigrateData>(&saved).unwrap(), both);
    let other = HostFacts { cpus: 2, ..first.host.clone() };
    let refused = begun(Some(first), &other).unwrap_err().to_string();
    assert!(refused.contains("another host (1 CPUs"), "{refused}");
    assert_eq!(begun(None, &other).unwrap().pieces.len(), 1);
    assert_eq!(pieces::version("QEMU emulator version 7.2.22 (Debian 1:7.2)\nCopyright"), Some("7.2.22"));
    assert_eq!(pieces::version("no"), None);
}

#[test]
fn a_refused_move_leaves_the_guest_as_it_was() {
    let of = |ms: u64| Window { requests: 150, longest_ns: ms * 1_000_000 };
    let good = Refusal {
        answer: Answer::Refused("110.0 % of the device are reserved".to_owned()),
        during: of(30),
        before: of(40),
        contract: Contract::InForce,
    };
    let bad = [
        Refusal { answer: Answer::Admitted, ..good.clone() },
        Refusal { answer: Answer::Failed("no I/O domain answers there".to_owned()), ..good.clone() },
        Refusal { contract: Contract::Unverified(String::new()), ..good.clone() },
        Refusal { during: Window::default(), ..good.clone() },
        Refusal { during: of(1_001), ..good.clone() },
    ];
    assert!(good.is_without_stop() && bad.iter().all(|refusal| !refusal.is_without_stop()));
    let data = MigrateData { refusals: [vec![good], Vec::from(bad)].concat(), ..data() };
    let counted = claim(&data, "migrate.refused_without_stop");
    assert_eq!((counted.value, counted.n), (1.0, 6));
    assert_eq!(claim(&data, "migrate.refused.longest_ms").value, 1_001.0);
    assert_eq!(claim(&data, "migrate.refused.longest_ms.before").value, 40.0);
    let text = serde_json::to_string(&data).unwrap();
    assert_eq!(from_json::<MigrateData>(&text).unwrap(), data);
    let tables = &data.report().unwrap().sections[0].tables;
    assert_eq!(tables.last().unwrap().rows[0][1..3], ["150", "30.0"]);
}

#[test]
fn requests_of_a_window_are_those_that_came_in_it() {
    let seen = |requests: u64, latencies: &[(u64, u64)]| DirectionHistogram {
        requests,
        latencies: latencies.to_vec(),
        ..DirectionHistogram::default()
    };
    let begin = seen(12, &[(100, 10), (200, 1), (900, 1)]);
    let end = seen(15, &[(100, 11), (200, 2), (300, 1), (900, 1)]);
    assert_eq!(refusals::between(&begin, &end), Window { requests: 3, longest_ns: 300 });
    assert_eq!(refusals::between(&end, &end), Window::default());
}

#[test]
fn a_full_target_has_no_room_for_the_disk() {
    let parse = |text: &str| rtvirtio_domain_config::File::parse(Path::new("x"), text);
    let (side, disk) = (Path::new("/run/x"), Path::new("/x/disk"));
    let full = refusals::config(side);
    let with_card = measure::config(side, disk) + &cards::network(side, 1);
    assert_eq!(parse(&with_card).unwrap().networks[0].ports.len(), 1);
    assert_eq!(parse(&full).unwrap().devices[0].disks[0].name, "other");
    // Each fits alone; admission refuses the sum.
    parse(&measure::config(side, disk)).unwrap();
    let both = full + &measure::disk_table(side, disk);
    let refused = parse(&both).unwrap_err().to_string();
    assert!(refused.contains("110.0 % of the device are reserved, and it can give"), "{refused}");
    assert!(refusals::arrival(side, disk).starts_with("[[device]]\nname = \"file\"\n[[device.disk]]\n"));
}

#[test]
fn flows_are_of_moves_that_they_outlast() {
    let of = |lost: u64, gap_ms: u64, covered: bool| {
        let moved = moved(DiskKind::Domain, 40);
        CardMove { moved, covered, sent: 2_400, lost, gap_ns: gap_ms * 1_000_000 }
    };
    let mut data =
        MigrateData { cards: vec![of(10, 70, true), of(30, 90, true), of(7, 900, false)], ..data() };
    data.cards.push(of(2_000, 9_000, true));
    data.cards[3].moved.failed = Some("no".to_owned());
    let value = |id: &str| (claim(&data, id).value, claim(&data, id).n);
    assert_eq!([value("migrate.frames_lost"), value("migrate.frames_unseen")], [(40.0, 2), (2.0, 4)]);
    assert_eq!([value("migrate.frame_gap_ms"), value("migrate.frame_gap_ms.most")], [(80.0, 2), (90.0, 2)]);
    let text = serde_json::to_string(&data).unwrap();
    assert_eq!(from_json::<MigrateData>(&text).unwrap(), data);
    let tables = &data.report().unwrap().sections[0].tables;
    assert!(tables.last().unwrap().rows[2][5].contains("ended before"), "{:?}", tables.last());
    // Answers at 5, 11 and 30, and none until the end.
    let trips = RoundTrips { ns: vec![5, 20, 1], sent: vec![0, 10, 10], lost: 4 };
    assert_eq!(cards::longest_gap(&trips, 60), 30);
    assert_eq!(cards::longest_gap(&trips, 35), 19);
    assert_eq!(cards::longest_gap(&RoundTrips::default(), 60), 60);
}

#[test]
fn evidence_says_the_state_of_each_part() {
    let seen = serde_json::json!({
        "device": "file", "name": "vm", "socket": "/x", "connected": true, "peer": 7, "attached": false,
        "errors": 0, "broken": 1, "read": {}, "write": {}, "promises": [],
        "refused": { "why": "a bad message", "seconds_ago": 3, "count": 2 },
        "refused_requests": { "range": 4 },
    });
    let said = evidence::describe(&serde_json::from_value(seen).unwrap());
    for part in ["to process 7", "attached: false", "errors 0", "broken 1", "malformed unknown", "range: 4"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(said.ends_with("messages refused: 2, the last 3 s ago: a bad message"), "{said}");
    let part = Part { name: "QEMU domain3".to_owned(), state: "hangs".to_owned(), log: "\n    x".to_owned() };
    let evidence = Evidence { what: "migration 3".to_owned(), parts: vec![part] };
    assert_eq!(evidence.to_string(), "migration 3\n  QEMU domain3: hangs\n    x");
    let data = MigrateData { evidence: vec![evidence], ..data() };
    let text = serde_json::to_string(&data).unwrap();
    assert_eq!(from_json::<MigrateData>(&text).unwrap(), data);
    let tables = &data.report().unwrap().sections[0].tables;
    assert_eq!(tables.last().unwrap().rows[0][2], "hangs");
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
    assert_eq!(report.sections[0].tables.iter().map(|t| t.rows.len()).collect::<Vec<_>>(), [2, 2, 2, 1]);
}

#[test]
fn configurations_are_ones() {
    let disk = |text: &str| {
        let mut file = rtvirtio_domain_config::File::parse(Path::new("x"), text).unwrap();
        file.devices.remove(0).disks.remove(0)
    };
    let moves = disk(&measure::config(Path::new("/run/x"), Path::new("/x/disk")));
    assert!(moves.migrate && moves.reserve.is_some());
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

#[test]
fn an_arrival_without_its_contract_is_not_met() {
    let mut bad = data();
    bad.moves[0].contract = Some(Contract::Unverified("no reservation".to_owned()));
    let unverified = claim(&bad, "migrate.unverified");
    assert_eq!((unverified.value, unverified.n, unverified.met), (1.0, 3, false));
    bad.moves.iter_mut().for_each(|m| m.contract = None);
    let unseen = claim(&bad, "migrate.unverified");
    assert!(unseen.n == 0 && !unseen.met, "{unseen:?}");
}

#[test]
fn a_killed_migration_leaves_the_guest_where_it_may_run() {
    let is_right = |victim, phase, outcome| killed(victim, phase, outcome).is_as_expected();
    for phase in [Phase::Begun, Phase::Active, Phase::Stopped] {
        assert!(is_right(Victim::SourceQemu, phase, Outcome::Nowhere));
        assert!(!is_right(Victim::SourceQemu, phase, Outcome::Target));
        assert!(is_right(Victim::TargetQemu, phase, Outcome::Source));
        assert!(is_right(Victim::SourceDomain, phase, Outcome::Target));
        assert!(!is_right(Victim::TargetDomain, phase, Outcome::Nowhere));
    }
    assert!(is_right(Victim::SourceQemu, Phase::Completed, Outcome::Target));
    assert!(is_right(Victim::TargetQemu, Phase::Completed, Outcome::Nowhere));
    assert!(!is_right(Victim::SourceDomain, Phase::Completed, Outcome::Source));
    for (victim, phase) in kills::order(16) {
        assert!(!is_right(victim, phase, Outcome::Both), "{victim:?} {phase:?}");
    }
    let good = killed(Victim::TargetQemu, Phase::Active, Outcome::Source);
    let unverified = Some(Contract::Unverified(String::new()));
    let unseen = Findings { sums: 0, ..found(DiskKind::Domain) };
    for bad in [
        Kill { contract: unverified, ..good.clone() },
        Kill { findings: Some(unseen), ..good.clone() },
        Kill { findings: None, ..good.clone() },
        Kill { outcome: None, ..good.clone() },
        Kill { failed: Some("no".to_owned()), ..good },
    ] {
        let data = MigrateData { kills: vec![bad], ..data() };
        let unexpected = claim(&data, "migrate.kills.unexpected");
        assert_eq!((unexpected.value, unexpected.n), (1.0, 1), "{:?}", data.kills);
    }
}

#[test]
fn kills_are_of_all_parts_in_all_phases() {
    let all: Vec<_> = kills::order(17).collect();
    assert_eq!(all[0], (Victim::TargetQemu, Phase::Active));
    assert_eq!(all[16], all[0]);
    assert!(all[..16].iter().enumerate().all(|(i, kill)| !all[..i].contains(kill)));
}
