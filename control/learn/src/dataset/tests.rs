use rtvirtio_model::Elevator;

use super::*;
use crate::synthetic::{alike, host};

fn header() -> Header {
    Header {
        schema: DATASET_SCHEMA.to_owned(),
        host: host("twin"),
        command: "rtvirtio-bench sweep".to_owned(),
        generated: "today".to_owned(),
        model: Some("a1".to_owned()),
        confidence: Some(0.95),
        profiles: BTreeMap::new(),
    }
}

fn point(id: &str) -> Point {
    let latencies: Latencies = (1..=100u64).map(|i| Nanos(i * 10_000)).collect();
    let outcome = Outcome {
        p50: Nanos(500_000),
        p99: Nanos(990_000),
        p9999_awake: Some(Nanos(900_000)),
        hist: pack(&latencies),
        ..alike(100, Iops(100.0), Nanos(1_000_000))
    };
    Point {
        id: id.to_owned(),
        device: "qlc-nvme".to_owned(),
        kind: VmKind::Process,
        scheme: "sweep".to_owned(),
        seed: 1,
        seconds: 1.0,
        knobs: Knobs { elevator: Elevator::None, ..Knobs::default_bfq(1) },
        classes: None,
        vms: vec![vec![Stream::paced(100.0)]],
        noise: Noise::default(),
        disk: None,
        results: vec![outcome],
    }
}

#[test]
fn a_packed_histogram_keeps_counts_and_percentiles() {
    let latencies: Latencies = (1..=20_000u64).map(|i| Nanos(i * 1_000)).collect();
    let hist = pack(&latencies);
    let buckets = unpack(&hist).unwrap();
    assert_eq!(buckets.iter().map(|b| b.1).sum::<u64>(), 20_000);
    assert!(buckets.windows(2).all(|w| w[0].0 < w[1].0));
    for (p, exact) in [(50.0, 1e7), (99.99, 1.9998e7)] {
        let got = percentile(&hist, Percentile(p)).unwrap().0 as f64;
        assert!(got >= exact * 0.999 && got <= exact * 1.05, "p{p}: {got}");
    }
    assert_eq!(percentile(&[], Percentile(50.0)), None);
    for wrong in [&[5][..], &[5, 0], &[5, 1, 0, 1], &[u64::MAX, 1, 2, 1]] {
        assert_eq!(unpack(wrong), None, "{wrong:?}");
    }
}

#[test]
fn a_cut_off_recording_goes_on_where_it_stopped() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("d.jsonl");
    let (mut recorder, old) = Recorder::open(&path, &header(), OtherHost::Refused).unwrap();
    assert!(old.is_empty());
    recorder.add(&point("a")).unwrap();
    recorder.add(&point("b")).unwrap();
    drop(recorder);
    let whole = std::fs::read(&path).unwrap();
    // Killed while writing the last point.
    std::fs::write(&path, &whole[..whole.len() - 20]).unwrap();
    assert!(Dataset::load(&path).is_err(), "a plain reader gets an error");
    let (mut recorder, old) = Recorder::open(&path, &header(), OtherHost::Refused).unwrap();
    assert_eq!(old.iter().map(|p| p.id.as_str()).collect::<Vec<_>>(), ["a"]);
    recorder.add(&point("b")).unwrap();
    drop(recorder);
    assert_eq!(std::fs::read(&path).unwrap(), whole);
    // Killed between the row and its line end.
    std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    let (_, old) = Recorder::open(&path, &header(), OtherHost::Refused).unwrap();
    assert_eq!(old.len(), 2);
    assert_eq!(std::fs::read(&path).unwrap(), whole);
}

#[test]
fn what_cannot_be_a_dataset_is_refused_with_its_line() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("d.jsonl");
    let refused = |rows: &[String]| {
        std::fs::write(&path, rows.iter().map(|r| format!("{r}\n")).collect::<String>()).unwrap();
        Dataset::load(&path).unwrap_err().to_string()
    };
    let row = |p: &Point| serde_json::to_string(p).unwrap();
    let head = serde_json::to_string(&header()).unwrap();
    assert!(refused(&[]).contains("empty"));
    assert!(refused(&[row(&point("a"))]).contains("line 1"));
    let other = head.replace(DATASET_SCHEMA, "rtvirtio.dataset.v0");
    assert!(refused(&[other]).contains("measure again"));
    let mut lost = point("b");
    lost.results.clear();
    assert!(refused(&[head.clone(), row(&point("a")), row(&lost)]).contains("line 3: 0 results for 1 tasks"));
    let mut broken = point("a");
    broken.results[0].hist = vec![1, 0];
    assert!(refused(&[head.clone(), row(&broken)]).contains("histogram"));
    let nan = row(&point("a")).replace("\"seconds\":1.0", "\"seconds\":null");
    assert!(refused(&[head.clone(), nan]).contains("line 2"));
    // Points of another host are appended only on request.
    std::fs::write(&path, format!("{head}\n")).unwrap();
    let mut elsewhere = header();
    elsewhere.host.kernel = "6.12".to_owned();
    assert!(
        Recorder::open(&path, &elsewhere, OtherHost::Refused)
            .unwrap_err()
            .to_string()
            .contains("another host")
    );
    // Runs of another design are refused too.
    let learned = Header { model: Some("b2".to_owned()), ..header() };
    let message = Recorder::open(&path, &learned, OtherHost::Refused).unwrap_err().to_string();
    assert!(message.contains("fingerprint a1") && message.contains("b2"), "{message}");
    // Older files lack the field.
    assert!(Recorder::open(&path, &Header { model: None, ..header() }, OtherHost::Refused).is_ok());
    let longer = Header { command: "rtvirtio-bench sweep --for 9s".to_owned(), ..header() };
    assert!(
        Recorder::open(&path, &longer, OtherHost::Refused)
            .unwrap_err()
            .to_string()
            .contains("begun by `rtvirtio-bench sweep`")
    );
}

#[test]
fn runs_of_one_condition_are_known_by_what_they_ran() {
    let (a, mut b) = (point("a"), point("b"));
    b.seed = 9;
    assert!(a.repeats(&b));
    b.vms[0][0].rate = Some(Iops(200.0));
    assert!(!a.repeats(&b));
}

#[test]
fn another_host_goes_on_only_when_asked_and_is_noted() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("d.jsonl");
    let (mut recorder, _) = Recorder::open(&path, &header(), OtherHost::Refused).unwrap();
    recorder.add(&point("a")).unwrap();
    let mut elsewhere = header();
    elsewhere.host.kernel = "6.12".to_owned();
    let message = Recorder::open(&path, &elsewhere, OtherHost::Refused).unwrap_err().to_string();
    assert!(message.contains("kernel 6.1, 2 CPUs") && message.contains("--other-host"), "{message}");
    let mut larger = elsewhere.clone();
    larger.host.cpus = 4;
    assert!(Recorder::open(&path, &larger, OtherHost::Noted).is_err(), "not the same kind of host");

    let (mut recorder, old) = Recorder::open(&path, &elsewhere, OtherHost::Noted).unwrap();
    assert_eq!(old.len(), 1);
    recorder.add(&point("b")).unwrap();
    // Killed while it wrote the next; the same host continues without another note.
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, [&whole[..], b"{\"id\":"].concat()).unwrap();
    let (_, old) = Recorder::open(&path, &elsewhere, OtherHost::Refused).unwrap();
    assert_eq!(old.len(), 2);
    assert_eq!(std::fs::read(&path).unwrap(), whole);
    let all = Dataset::load(&path).unwrap();
    assert_eq!((all.points.len(), all.moves), (2, vec![(1, elsewhere.host)]));
}
