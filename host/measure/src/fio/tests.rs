use std::path::PathBuf;
use std::time::Duration;

use proptest::prelude::*;
use rtvirtio_spec::{Arrival, Burst, LabKind, Op, Pattern, Task, Vm};
use rtvirtio_units::{Bytes, Iops, Nanos, Ratio};

use super::*;
use crate::MeasureError;

fn task(name: &str, op: Op, pattern: Pattern, rate: Option<f64>, depth: u32, arrival: Arrival) -> Task {
    Task { op, pattern, depth, arrival, ..Task::reads(name, rate.map(Iops)) }
}

/// VM of the recorded output in `tests/fixtures`.
pub(crate) fn recorded_vm() -> Vm {
    let mixed = Op::Mixed { write_share: Ratio(0.3) };
    let tasks = vec![
        task("light", Op::Read, Pattern::Random, Some(100.0), 1, Arrival::Closed),
        task("global", mixed, Pattern::Random, Some(62.5), 1, Arrival::Closed),
        task("open", Op::Write, Pattern::Random, Some(200.0), 3, Arrival::Open),
        task("deep", Op::Read, Pattern::Random, Some(300.0), 4, Arrival::Closed),
        task("flood", mixed, Pattern::Sequential, None, 2, Arrival::Closed),
    ];
    Vm::of_lab("vm0", LabKind::Process, tasks)
}

pub(crate) fn recorded_options() -> JobOptions {
    JobOptions {
        target: PathBuf::from("/var/tmp/rtvirtio-fixture/disk"),
        region: Some(Region { offset: Bytes::from_kib(64), size: Bytes(4 << 20) }),
        warmup: Duration::from_millis(250),
        runtime: Duration::from_millis(1_000),
        seed: 42,
        dir: PathBuf::from("/var/tmp/rtvirtio-fixture"),
        io_class: None,
        clock: LogClock::JobStart,
        preload: true,
    }
}

#[test]
fn job_file_is_as_recorded() {
    let job = JobFile::new(&recorded_vm(), recorded_options()).unwrap();
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/job.fio");
    if std::env::var_os("RTVIRTIO_WRITE_GOLDEN").is_some() {
        std::fs::write(golden, job.text()).unwrap();
    }
    assert_eq!(job.text(), std::fs::read_to_string(golden).unwrap());
    assert_eq!(
        job.args(),
        [
            "--output-format=json+",
            "--eta=never",
            "--output=/var/tmp/rtvirtio-fixture/fio.json",
            "/var/tmp/rtvirtio-fixture/job.fio"
        ]
    );
    let at = |n: u32| Some(PathBuf::from(format!("/var/tmp/rtvirtio-fixture/rtvirtio_lat.{n}.log")));
    assert_eq!(job.log_paths(), [at(1), at(2), at(3), at(4), at(5), at(6), None]);
    assert_eq!(job.sections().iter().map(|s| s.task).collect::<Vec<_>>(), [0, 1, 2, 2, 2, 3, 4]);
}

#[test]
fn reads_only_are_marked_and_names_with_colons_are_escaped() {
    let vm = Vm { tasks: recorded_vm().tasks[..1].to_vec(), ..recorded_vm() };
    let mut options = recorded_options();
    options.target = PathBuf::from("/dev/disk/by-path/pci-0000:00:03.0");
    options.region = None;
    let job = JobFile::new(&vm, options).unwrap();
    assert!(!job.writes() && job.args().contains(&"--readonly".to_owned()));
    assert!(job.text().contains("\nfilename=/dev/disk/by-path/pci-0000\\:00\\:03.0\n"));
    assert!(!job.text().contains("offset="));
}

#[test]
fn what_a_job_file_cannot_hold_is_refused() {
    let with = |change: &dyn Fn(&mut JobOptions)| {
        let mut options = recorded_options();
        change(&mut options);
        JobFile::new(&recorded_vm(), options).unwrap_err().to_string()
    };
    assert_eq!(with(&|o| o.target = "disk".into()), "job of VM vm0: path disk is not absolute");
    for bad in ["/dev/a\nrw=write", "/dev/${HOME}"] {
        assert!(with(&|o| o.target = bad.into()).contains("cannot hold"), "{bad}");
        assert!(with(&|o| o.dir = bad.into()).contains("cannot hold"), "{bad}");
    }
    assert!(with(&|o| o.runtime = Duration::ZERO).contains("runtime is zero"));
    let small = Region { offset: Bytes(0), size: Bytes(512) };
    assert!(with(&|o| o.region = Some(small)).contains("multiple of 4KiB"));

    let refuse = |task: Task| {
        let vm = Vm { tasks: vec![task], ..recorded_vm() };
        JobFile::new(&vm, recorded_options()).unwrap_err().to_string()
    };
    let open = task("t", Op::Read, Pattern::Random, None, 1, Arrival::Open);
    assert!(refuse(open).contains("an open loop needs a rate"));
    let sequence = task("t", Op::Read, Pattern::Sequential, Some(50.0), 2, Arrival::Open);
    assert!(refuse(sequence).contains("use depth = 1 or a closed loop"));
    let third = Op::Mixed { write_share: Ratio(1.0 / 3.0) };
    assert!(refuse(task("t", third, Pattern::Random, None, 1, Arrival::Closed)).contains("whole percents"));
    assert!(
        refuse(task("t", Op::Read, Pattern::Random, Some(1e-5), 1, Arrival::Closed)).contains("cannot pace")
    );
}

#[test]
fn an_open_loop_is_streams_that_add_up_to_its_rate_and_drift() {
    for (rate, depth, streams) in
        [(500.0, 8, 8), (500.0, 1, 1), (3.0, 8, 3), (0.5, 8, 1), (5_000.0, 1_024, 64)]
    {
        let open = task("t", Op::Read, Pattern::Random, Some(rate), depth, Arrival::Open);
        let paces = FioRate::from_task(&open).unwrap();
        assert_eq!(paces.len(), streams, "{rate}/s at depth {depth}");
        let day = 86_400_000_000_000;
        let total: u64 = paces.iter().map(|p| p.due_before(false, day)).sum();
        assert!((total as f64 / 86_400.0 / rate - 1.0).abs() < 1e-3, "{total}");
        let mut periods: Vec<_> = paces.iter().map(|p| p.intended_ns(false, 1).unwrap()).collect();
        let (least, most) = (periods.iter().min().unwrap(), periods.iter().max().unwrap());
        assert!(*most as f64 <= *least as f64 * 1.11);
        periods.sort_unstable();
        periods.dedup();
        assert_eq!(periods.len(), streams, "no two streams are in step");
    }
}

#[test]
fn requests_that_come_at_once_are_streams_in_step() {
    let mut batch = task("t", Op::Read, Pattern::Random, Some(200.0), 64, Arrival::Open);
    batch.burst = Some(Burst::Requests { requests: 100 });
    let paces = FioRate::from_task(&batch).unwrap();
    assert_eq!(paces.len(), 100);
    // A hundred each half second: all of the first, then all of the second.
    let due = |i| paces.iter().map(move |pace| pace.intended_ns(false, i).unwrap());
    assert!(due(0).all(|at| at == 0) && due(1).all(|at| at == 500_000_000));
    let text =
        JobFile::new(&Vm { tasks: vec![batch.clone()], ..recorded_vm() }, recorded_options()).unwrap().text();
    assert_eq!(text.matches("rate_iops=2\n").count(), 100, "{text}");
    batch.burst = Some(Burst::Requests { requests: 129 });
    assert!(matches!(FioRate::from_task(&batch), Err(MeasureError::Unsupported { .. })));
}

fn fixture(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

#[test]
fn recorded_json_is_read() {
    let stats = parse_json(&fixture("fio-3.33.json")).unwrap();
    assert_eq!(
        stats.iter().map(|s| s.jobname.as_str()).collect::<Vec<_>>(),
        ["t0-light", "t1-global", "t2-open.0", "t2-open.1", "t2-open.2", "t3-deep", "t4-flood"]
    );
    for s in &stats {
        assert_eq!(s.error, 0);
        for d in [&s.read, &s.write] {
            let bins = d.bins().unwrap();
            let n: u64 = bins.iter().map(|b| b.1).sum();
            assert!(n.abs_diff(d.total_ios) <= 2, "{}: {n} of {}", s.jobname, d.total_ios);
            assert!(bins.windows(2).all(|w| w[0].0 < w[1].0));
            assert_eq!(bins.is_empty(), d.max() == Nanos(0));
        }
    }
    assert_eq!((stats[0].read.total_ios, stats[0].write.total_ios), (125, 0));
    // A warning in front, as fio prints it.
    let mut noisy = b"fio: this platform does not support process shared mutexes\n".to_vec();
    noisy.extend(fixture("fio-3.33.json"));
    assert_eq!(parse_json(&noisy).unwrap(), stats);
}

#[test]
fn other_output_is_an_error_with_what_it_says() {
    let e = |b: &[u8]| parse_json(b).unwrap_err().to_string();
    assert!(e(b"").contains("it is empty"));
    assert!(e(b"fio: engine libaio not loadable\n").contains("engine libaio not loadable"));
    assert!(e(b"{\"jobs\": [").contains("EOF"));
    assert!(
        e(b"{\"jobs\": [{\"jobname\": \"a\", \"read\": {\"total_ios\": -1}, \"write\": {}}]}").contains("-1")
    );
    let bins = br#"{"jobs":[{"jobname":"a","read":{"total_ios":1,"lat_ns":{"bins":{"x":1}}},"write":{"total_ios":0}}]}"#;
    assert!(parse_json(bins).unwrap()[0].read.bins().is_err());
}

#[test]
fn recorded_logs_are_read() {
    let stats = parse_json(&fixture("fio-3.33.json")).unwrap();
    for (i, stats) in stats.iter().enumerate().take(6) {
        let samples =
            parse_log("t", &fixture(&format!("fio-3.33_lat.{}.log", i + 1)), LogClock::JobStart).unwrap();
        for (write, d) in [(false, &stats.read), (true, &stats.write)] {
            assert_eq!(samples.iter().filter(|s| s.write == write).count() as u64, d.total_ios, "task {i}");
            assert_eq!(
                samples.iter().filter(|s| s.write == write).map(|s| s.lat_ns).max().unwrap_or(0),
                d.max().0
            );
        }
    }
}

#[test]
fn log_lines_of_older_and_newer_fio_are_accepted() {
    let one = Sample { time_ms: 10, lat_ns: 171_387, write: true, bytes: 4096 };
    for line in [
        "10, 171387, 1, 4096",
        "10, 171387, 1, 4096, 0",
        "10, 171387, 1, 4096, 0x2004\n",
        "10, 171387, 1, 4096, 81920, 0\n",
        "10, 171387, 1, 4096, 81920, 0, 123456789\n",
    ] {
        assert_eq!(parse_log("t", line.as_bytes(), LogClock::JobStart).unwrap(), [one], "{line}");
    }
    assert_eq!(parse_log("t", b"", LogClock::JobStart).unwrap(), []);
}

#[test]
fn bad_log_lines_are_named() {
    for (line, reason) in [
        ("10, 1713", "no direction"),
        ("10", "no latency"),
        ("ten, 1, 0, 4096, 0", "time \"ten\" is not a number"),
        ("10, -1, 0, 4096, 0", "latency \"-1\" is not a number"),
        ("10, 1, 2, 4096, 0", "direction 2 is out of range"),
        ("18446744073709551615, 1, 0, 4096, 0", "time 18446744073709551615 is out of range"),
        ("10, 18446744073709551615, 0, 4096", "latency 18446744073709551615 is out of range"),
        ("10, 1, 0, 4096, x", "unexpected column \"x\""),
        ("10, 1, 0, 4096, 0, 0, 0, 0, 0", "unexpected column \"0\""),
    ] {
        let log = format!("1, 2, 0, 4096, 0\n\n{line}\n");
        let e = parse_log("light", log.as_bytes(), LogClock::JobStart).unwrap_err();
        assert_eq!(e.to_string(), format!("latency log of task light, line 3: {reason}"));
    }
    let e = parse_log("light", b"1, 2, 0, \xff\n", LogClock::JobStart).unwrap_err();
    assert!(matches!(e, MeasureError::Log { line: 1, .. }), "{e}");
}

proptest! {
    #[test]
    fn parsers_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), text in "[0-9, x\n]{0,200}") {
        let _ = parse_log("t", &bytes, LogClock::JobStart);
        let _ = parse_log("t", text.as_bytes(), LogClock::JobStart);
        let _ = parse_json(&bytes);
    }
}

#[test]
fn classes_and_bursts_become_fio_options() {
    let mut flood = task("flood", Op::Read, Pattern::Random, None, 32, Arrival::Closed);
    flood.burst = Some(Burst::Busy(Nanos::from_millis(200)));
    let vm = Vm { tasks: vec![flood], ..recorded_vm() };
    let text = |io_class| JobFile::new(&vm, JobOptions { io_class, ..recorded_options() }).unwrap().text();
    assert!(text(None).contains("thinktime=200000us\nthinktime_iotime=200000us\n"), "{}", text(None));
    assert!(!text(None).contains("prio"));
    assert!(text(Some(IoClass::RealTime(0))).contains("prioclass=1\nprio=0\n"));
    assert!(
        text(Some(IoClass::BestEffort(9))).contains("prioclass=2\nprio=7\n"),
        "level is kept within 0 to 7"
    );
    assert!(text(Some(IoClass::Idle)).contains("prioclass=3\n"));
}

#[test]
fn a_ring_replaces_libaio_and_no_other_engine() {
    let job = JobFile::new(&recorded_vm(), recorded_options()).unwrap();
    let (aio, ring) = (job.text(), job.with_engine(Engine::IoUring).text());
    let options = "ioengine=io_uring\nfixedbufs=1\nregisterfiles=1\nhipri=0\n";
    assert!(!ring.contains("libaio") && aio.contains("ioengine=psync\n"), "{ring}");
    assert_eq!(ring.replace(options, "ioengine=libaio\n"), aio);
}

#[test]
fn nothing_is_loaded_into_fio_unless_it_is_wanted() {
    let job = |preload| JobFile::new(&recorded_vm(), JobOptions { preload, ..recorded_options() }).unwrap();
    let (with, without) = (job(true), job(false));
    assert!(
        with.preload_path().is_some() && with.environment().iter().any(|(name, _)| *name == "LD_PRELOAD")
    );
    assert_eq!((without.preload_path(), without.environment()), (None, Vec::new()));
    assert_eq!(with.text(), without.text());
}

#[test]
fn any_seed_is_one_that_fio_takes() {
    for seed in [0, 1 << 63, u64::MAX - 3, u64::MAX] {
        let text = JobFile::new(&recorded_vm(), JobOptions { seed, ..recorded_options() }).unwrap().text();
        for line in text.lines().filter_map(|l| l.strip_prefix("randseed=")) {
            assert!(line.parse::<i64>().is_ok(), "{line}");
        }
    }
}
