use super::*;
use crate::saved::Saved as _;

fn run(kinds: &[Kind], missed: bool, named: &[CauseKind]) -> BlameRun {
    BlameRun {
        planted: kinds.iter().map(|kind| PlantedCause { kind: *kind, strength: 0.5, form: 0.5 }).collect(),
        settings: kinds.iter().map(|kind| kind.name().to_owned()).collect(),
        missed,
        n: 800,
        late: if missed { 80 } else { 0 },
        p99_ns: Nanos::from_millis(60),
        named: named.to_vec(),
        unread: Vec::new(),
        words: String::new(),
        failed: None,
    }
}

fn data(runs: Vec<BlameRun>) -> BlameData {
    BlameData {
        schema: BlameData::SCHEMA.to_owned(),
        host: HostFacts { cpus: 2, ..HostFacts::default() },
        command: String::new(),
        generated: String::new(),
        vm: "qemu".to_owned(),
        seed: 1,
        seconds: 8.0,
        matrix: matrix(&runs),
        runs,
    }
}

#[test]
fn the_first_cause_named_decides() {
    use CauseKind as C;
    let quota = [Kind::CpuQuota];
    assert_eq!(run(&quota, true, &[C::CpuQuota, C::Neighbour]).answer(), Answer::Right);
    assert_eq!(run(&quota, true, &[C::Neighbour, C::CpuQuota]).answer(), Answer::Wrong);
    assert_eq!(run(&quota, true, &[]).answer(), Answer::Unseen);
    assert_eq!(run(&quota, false, &[]).answer(), Answer::NoMiss);
    let both = [Kind::CpuQuota, Kind::DiskStall];
    assert_eq!(run(&both, true, &[C::DiskStall]).answer(), Answer::Right, "one of both");
    assert_eq!(run(&both, true, &[C::HostStall]).answer(), Answer::Wrong);
    assert_eq!(run(&[Kind::Nothing], true, &[C::HostStall]).answer(), Answer::Wrong);
    let failed = BlameRun { failed: Some("the guest is gone".to_owned()), ..run(&quota, true, &[]) };
    assert_eq!(failed.answer(), Answer::Failed, "an error is not an answer");
}

#[test]
fn runs_without_a_miss_or_a_result_are_left_out_and_counted() {
    use CauseKind as C;
    let mut runs: Vec<BlameRun> = (0..96).map(|_| run(&[Kind::DiskStall], true, &[C::DiskStall])).collect();
    runs.extend((0..4).map(|_| run(&[Kind::DiskStall], true, &[])));
    runs.extend((0..50).map(|_| run(&[Kind::CpuOthers], false, &[])));
    runs.push(BlameRun { failed: Some("x".to_owned()), ..run(&[Kind::Load], false, &[]) });
    runs.push(run(&[Kind::Nothing], true, &[C::HostStall]));
    let good = data(runs.clone());
    let found = claims(&good);
    let of = |id: &str| found.iter().find(|claim| claim.id == id).unwrap();
    assert_eq!((of("blame.right").value, of("blame.right").n, of("blame.right").met), (0.96, 100, true));
    assert!(of("blame.right").what.contains("50 not missed, 1 without result"));
    assert!(of("blame.wrong").met && (of("blame.unseen").value - 0.04).abs() < 1e-9);
    assert_eq!((of("blame.nothing.named").value, of("blame.nothing.named").n), (1.0, 1));
    // Two wrong answers of 102 are too many.
    runs.extend((0..2).map(|_| run(&[Kind::DiskStall], true, &[C::Neighbour])));
    assert!(!claims(&data(runs))[1].met);
    assert!(claims(&data(Vec::new())).iter().filter(|claim| claim.has_limit()).all(|claim| !claim.met));
    let back: BlameData = serde_json::from_str(&serde_json::to_string(&good).unwrap()).unwrap();
    assert_eq!(back, good);
}

#[test]
fn the_matrix_has_each_run_once() {
    use CauseKind as C;
    let runs = [
        run(&[Kind::Neighbour], true, &[C::Neighbour]),
        run(&[Kind::Neighbour], true, &[C::Device, C::Neighbour]),
        run(&[Kind::Neighbour], true, &[]),
        run(&[Kind::Neighbour], false, &[]),
        run(&[Kind::CpuQuota, Kind::Load], true, &[C::CpuQuota]),
    ];
    let rows = matrix(&runs);
    assert_eq!(rows.len(), 2);
    assert_eq!(rows[0].planted, "neighbour");
    assert_eq!(rows[0].named, BTreeMap::from([("device".to_owned(), 1), ("neighbour".to_owned(), 1)]));
    assert_eq!((rows[0].unseen, rows[0].no_miss, rows[0].failed), (1, 1, 0));
    assert_eq!(rows[1].planted, "cpu_quota + load");
    let sum: usize = rows
        .iter()
        .map(|row| row.named.values().sum::<usize>() + row.unseen + row.no_miss + row.failed)
        .sum();
    assert_eq!(sum, runs.len());
}

#[test]
fn a_measurement_goes_on_where_its_file_ends() {
    let drawn = draw(&[Kind::Load, Kind::Device], 2, 7);
    let runs = |n: usize| {
        let of = |planted: &Vec<PlantedCause>| BlameRun { planted: planted.clone(), ..run(&[], true, &[]) };
        data(drawn.iter().take(n).map(of).collect())
    };
    let now = data(Vec::new());
    let goes_on = |before: &BlameData| measure::goes_on(before, &now, &drawn);
    assert!(goes_on(&runs(0)) && goes_on(&runs(3)) && goes_on(&runs(drawn.len())));
    let text = serde_json::to_string(&runs(3)).unwrap();
    assert!(goes_on(&crate::saved::from_json(&text).unwrap()), "as it was saved");
    assert!(!goes_on(&BlameData { seed: 2, ..runs(3) }));
    assert!(!goes_on(&BlameData { seconds: 5.0, ..runs(3) }));
    let mut other = runs(3);
    other.runs[1].planted[0].strength += 0.01;
    assert!(!goes_on(&other));
    other.runs = runs(4).runs.into_iter().chain(runs(4).runs).collect();
    assert!(!goes_on(&other), "more than are asked for");
}
