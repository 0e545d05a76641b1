//! fio's output, which comes from inside a guest: any JSON and any logs are refused with words, or
//! are results that lie within what was asked for.
//!
//! Layout of the input: flags and which tasks, length of the JSON's part (2 bytes), the part
//! (layout of [`json`], over what fio 3.33 said of these tasks), then rows of log lines: section,
//! kind, time in ms (3 bytes), latency (4 bytes and how far to shift them), how often (a power of
//! two). A row of kind 0 has text instead: its length and the text.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use rtvirtio_measure::fio::{FioOutput, JobFile, JobOptions, LogClock, Region, parse_json};
use rtvirtio_measure::run::task_measurements;
use rtvirtio_measure::stalls::Stalls;
use rtvirtio_spec::{Arrival, LabKind, Op, Pattern, Target, Task, Vm};
use rtvirtio_units::{Bytes, Iops, Nanos, Percentile, Ratio};
use serde_json::Value;

use super::json;

/// Bytes of all logs of one input.
const MOST: usize = 512 << 10;

/// What fio 3.33 wrote, without the fields that are not read.
const RECORDED: &str = include_str!("../documents/fio.json");
const LOGS: [&str; 6] = [
    include_str!("../../host/measure/tests/fixtures/fio-3.33_lat.1.log"),
    include_str!("../../host/measure/tests/fixtures/fio-3.33_lat.2.log"),
    include_str!("../../host/measure/tests/fixtures/fio-3.33_lat.3.log"),
    include_str!("../../host/measure/tests/fixtures/fio-3.33_lat.4.log"),
    include_str!("../../host/measure/tests/fixtures/fio-3.33_lat.5.log"),
    include_str!("../../host/measure/tests/fixtures/fio-3.33_lat.6.log"),
];

/// The job whose output was recorded, or one of its tasks alone, with targets where a flag asks for
/// them.
fn job(flags: u8) -> JobFile {
    let mixed = Op::Mixed { write_share: Ratio(0.3) };
    let targets = flags & 1 != 0;
    let task = |name: &str, op, rate: Option<f64>, depth, arrival| Task {
        op,
        pattern: if rate.is_some() { Pattern::Random } else { Pattern::Sequential },
        depth,
        arrival,
        targets: targets
            .then_some(Target { percentile: Percentile::P9999, latency: Nanos::from_millis(20) })
            .into_iter()
            .collect(),
        ..Task::reads(name, rate.map(Iops))
    };
    let tasks = vec![
        task("light", Op::Read, Some(100.0), 1, Arrival::Closed),
        task("global", mixed, Some(62.5), 1, Arrival::Closed),
        task("open", Op::Write, Some(200.0), 3, Arrival::Open),
        task("deep", Op::Read, Some(300.0), 4, Arrival::Closed),
        task("flood", mixed, None, 2, Arrival::Closed),
    ];
    let mut vm = Vm::of_lab("vm0", LabKind::Process, tasks);
    let alone = usize::from(flags >> 5);
    if alone < vm.tasks.len() {
        vm.tasks = vec![vm.tasks.swap_remove(alone)];
    }
    let options = JobOptions {
        target: PathBuf::from("/var/tmp/rtvirtio-fixture/disk"),
        region: Some(Region { offset: Bytes::from_kib(64), size: Bytes(4 << 20) }),
        warmup: Duration::from_millis(250),
        runtime: Duration::from_millis(1_000),
        seed: 42,
        dir: PathBuf::from("/var/tmp/rtvirtio-fixture"),
        io_class: None,
        clock: if flags & 2 == 0 { LogClock::JobStart } else { LogClock::Monotonic },
        preload: flags & 4 != 0,
    };
    JobFile::new(&vm, options).expect("the recorded job")
}

/// First of the recorded sections of a job.
fn first_section(flags: u8) -> usize {
    [0, 1, 2, 5, 6].get(usize::from(flags >> 5)).copied().unwrap_or(0)
}

/// What fio said of a job's sections, and its name for each.
fn recorded(job: &JobFile, first: usize) -> String {
    let mut root: Value = serde_json::from_str(RECORDED).expect("JSON");
    let jobs = root["jobs"].as_array_mut().expect("sections");
    jobs.drain(..first);
    jobs.truncate(job.sections().len());
    for (of_fio, section) in jobs.iter_mut().zip(job.sections()) {
        of_fio["jobname"] = section.name.clone().into();
    }
    root.to_string()
}

/// Reads an output, and judges it.
///
/// # Panics
/// When a refusal has no words, or a result lies beyond what was asked for.
pub fn play(data: &[u8]) {
    let [flags, low, high, rest @ ..] = data else { return };
    let length = usize::from(u16::from_le_bytes([*low, *high]));
    let (part, rows) = rest.split_at(length.min(rest.len()));
    let job = job(*flags);
    let first = first_section(*flags);
    let mut logs: Vec<Vec<u8>> = vec![Vec::new(); job.sections().len()];
    if flags & 4 != 0 {
        logs.iter_mut()
            .zip(&LOGS[first.min(LOGS.len())..])
            .for_each(|(log, recorded)| log.extend(recorded.as_bytes()));
    }
    add_rows(&mut logs, rows);
    let mut json = json::document(&[&recorded(&job, first)], part);
    if flags & 8 != 0 {
        // Else almost every log is refused for its number of requests.
        json = counted(json, &logs);
    }
    if let Ok(stats) = parse_json(&json) {
        for s in &stats {
            assert!(s.total_ios() >= s.read.total_ios.max(s.write.total_ios));
            if let Ok(bins) = s.read.bins() {
                assert!(bins.is_sorted(), "{bins:?}");
            }
        }
    }
    let logs = logs.into_iter().map(|log| Some(log).filter(|_| flags & 16 == 0)).collect();
    let output = FioOutput { json, logs, stderr: String::new() };
    let predicted = [Some(Nanos::from_millis(1)), None, Some(Nanos(u64::MAX))];
    let mut measured = match task_measurements(&job, &output, &predicted) {
        Ok(measured) => measured,
        Err(e) => return assert!(!e.to_string().is_empty()),
    };
    assert_eq!(measured.len(), job.tasks().len());
    let stalls = Stalls::union(vec![(1_000_000, 3_000_000), (400_000_000, 1_200_000_000)]);
    for (m, task) in measured.iter_mut().zip(job.tasks()) {
        m.subtract_host_stalls(&stalls);
        let r = &m.result;
        assert!(r.p50_ns <= r.p99_ns && r.p99_ns <= r.p9999_ns && r.p9999_ns <= r.max_ns, "{r:?}");
        assert!(r.achieved_rate.0.is_finite() && r.achieved_rate.0 >= 0.0, "{r:?}");
        if let Some(rate) = task.rate {
            assert!(r.achieved_rate.0 <= rate.0, "{r:?}");
        }
        assert!(r.p9999_excl_host_stalls_ns.is_none_or(|awake| awake <= r.p9999_ns), "{r:?}");
        assert_eq!(r.verdict.is_some(), !task.targets.is_empty());
        assert!(!r.why.is_empty() && m.series.is_sorted());
    }
}

/// Adds the log lines of an input.
fn add_rows(logs: &mut [Vec<u8>], mut rows: &[u8]) {
    let sections = logs.len();
    let mut size = 0;
    while let [section, kind, tail @ ..] = rows {
        let log = &mut logs[usize::from(*section) % sections];
        if *kind == 0 {
            let [length, tail @ ..] = tail else { return };
            let (text, tail) = tail.split_at(usize::from(*length).min(tail.len()));
            log.extend(text);
            rows = tail;
            continue;
        }
        let Some((row, tail)) = tail.split_first_chunk::<9>() else { return };
        rows = tail;
        let time = u64::from(u32::from_le_bytes([row[0], row[1], row[2], 0]));
        let latency = u64::from(u32::from_le_bytes([row[3], row[4], row[5], row[6]])) << (row[7] % 22);
        let mut line = String::new();
        for i in 0..1u64 << (row[8] % 15) {
            line.clear();
            let time = if kind & 4 == 0 { time } else { time + i };
            let _ = writeln!(line, "{time}, {latency}, {}, 4096", kind & 1);
            size += line.len();
            if size > MOST {
                return;
            }
            log.extend(line.as_bytes());
        }
    }
}

/// The document with each section's number of requests as its log has lines.
fn counted(json: Vec<u8>, logs: &[Vec<u8>]) -> Vec<u8> {
    let Ok(mut root) = serde_json::from_slice::<Value>(&json) else { return json };
    let Some(jobs) = root.get_mut("jobs").and_then(Value::as_array_mut) else { return json };
    for (job, log) in jobs.iter_mut().zip(logs) {
        let lines = log.split(|b| *b == b'\n').filter(|l| !l.is_empty()).count();
        for (direction, n) in [("read", lines), ("write", 0)] {
            if let Some(total) = job.get_mut(direction).and_then(|d| d.get_mut("total_ios")) {
                *total = n.into();
            }
        }
    }
    serde_json::to_vec(&root).unwrap_or(json)
}
