//! The spec file: any bytes are a spec that keeps its own rules, or errors with words and places
//! that exist.

use std::collections::BTreeSet;

use rtvirtio_spec::{
    Arrival, CpuNeed, HostSpec, MAX_DEVICES, MAX_SHOWN_ERRORS, MAX_TASKS_PER_VM, MAX_VMS, Op, Spec,
    SpecErrors, Task,
};
use rtvirtio_units::{Bytes, Nanos};

/// Longest text of all errors of one file.
const MOST_WORDS: usize = 256 << 10;

/// Reads a spec.
///
/// # Panics
/// When an error has no words, control characters or a place outside of the text, when the text of
/// all errors is not bounded, and when a spec that was accepted breaks what its types promise or
/// reads otherwise the second time.
pub fn play(data: &[u8]) {
    match HostSpec::parse_bytes("dir/spec.toml", data) {
        Ok(host) => {
            check_parts(&host);
            let again = HostSpec::parse_bytes("dir/spec.toml", data).expect("the same text");
            assert_eq!(format!("{host:?}"), format!("{again:?}"));
            assert!(!serde_json::to_string(&host).expect("JSON").is_empty());
            assert_eq!(host.single().is_ok(), host.parts().len() == 1);
        }
        Err(errors) => refused(&errors, &String::from_utf8_lossy(data)),
    }
}

fn refused(errors: &SpecErrors, text: &str) {
    assert!((1..=MAX_SHOWN_ERRORS).contains(&errors.errors().len()));
    let lines: Vec<&str> = text.split('\n').collect();
    for e in errors.errors() {
        for words in [&e.message, &e.help] {
            assert!(!words.is_empty() && !words.contains(char::is_control), "{words:?}");
        }
        let Some(line) = e.line else { continue };
        let of_line =
            lines.get(line.wrapping_sub(1)).unwrap_or_else(|| panic!("line {line} of {}", lines.len()));
        let column = e.column.expect("a line has a column");
        assert!((1..=of_line.chars().count() + 1).contains(&column), "column {column} of {of_line:?}");
    }
    let shown = errors.to_string();
    assert!(shown.len() <= MOST_WORDS && !shown.chars().any(|c| c.is_control() && c != '\n'), "{shown:?}");
    assert!(!serde_json::to_string(errors).expect("JSON").is_empty());
}

/// The parts hold each task of the host once, on the device of its disk.
fn check_parts(host: &HostSpec) {
    assert!((1..=MAX_DEVICES).contains(&host.parts().len()));
    host.parts().iter().for_each(|part| check(&part.spec));
    let mut parts: BTreeSet<(usize, &str, &str)> = BTreeSet::new();
    for (i, part) in host.parts().iter().enumerate() {
        assert_eq!(part.disks.len(), part.spec.vms.len());
        for (vm, disks) in part.spec.vms.iter().zip(&part.disks) {
            assert_eq!(vm.tasks.len(), disks.len());
        }
        parts.extend(part.spec.tasks().map(|(vm, task)| (i, vm.name.as_str(), task.name.as_str())));
    }
    let mut whole = BTreeSet::new();
    for (i, vm) in host.vms().iter().enumerate() {
        assert_eq!(vm.tasks.len(), host.disks(i).len());
        let tasks = vm.tasks.iter().zip(host.disks(i));
        whole.extend(tasks.map(|(task, disk)| (disk.part, vm.name.as_str(), task.name.as_str())));
    }
    assert_eq!(parts, whole);
}

/// What `rtvirtio_spec`'s types promise.
fn check(spec: &Spec) {
    assert!((1..=MAX_VMS).contains(&spec.vms.len()));
    let names: BTreeSet<&str> = spec.vms.iter().map(|vm| vm.name.as_str()).collect();
    assert_eq!(names.len(), spec.vms.len(), "names of VMs are unique");
    for vm in &spec.vms {
        name(&vm.name);
        assert!((1..=MAX_TASKS_PER_VM).contains(&vm.tasks.len()));
        let names: BTreeSet<&str> = vm.tasks.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names.len(), vm.tasks.len(), "names of tasks are unique");
        assert!(vm.cpu.need.is_some() || vm.cpu.priorities.is_none());
        match vm.cpu.need {
            Some(CpuNeed::Contract { budget, period }) => {
                assert!(
                    Nanos::from_millis(1) <= budget
                        && budget <= period
                        && period <= Nanos::from_millis(1_000)
                );
            }
            Some(CpuNeed::Demand { requests, deadline }) => {
                assert!(requests.0.is_finite() && requests.0 > 0.0 && deadline.0 > 0);
            }
            None => {}
        }
        assert!(vm.declared_rate().0.is_finite());
        vm.tasks.iter().for_each(check_task);
    }
}

fn check_task(task: &Task) {
    name(&task.name);
    assert!(task.block.0 % 512 == 0 && (Bytes(512)..=Bytes(16 << 20)).contains(&task.block));
    assert!((1..=1024).contains(&task.depth));
    assert!(task.arrival == Arrival::Closed || task.rate.is_some());
    if let Op::Mixed { write_share } = task.op {
        assert!(write_share.0 > 0.0 && write_share.0 < 1.0);
    }
    if let Some(rate) = task.rate {
        assert!(rate.0.is_finite() && rate.0 > 0.0 && task.busy_period().is_none());
        assert!(task.at_once() <= task.depth && (task.at_once() == 1 || task.arrival == Arrival::Open));
    }
    for target in &task.targets {
        assert!(target.percentile.0 > 0.0 && target.percentile.0 <= 100.0 && target.latency.0 > 0);
    }
    for pair in task.targets.windows(2) {
        assert!(pair[0].percentile < pair[1].percentile && pair[0].latency <= pair[1].latency);
    }
    if !task.mix.is_empty() {
        assert!((task.mix.iter().map(|m| m.share.0).sum::<f64>() - 1.0).abs() < 1e-9);
        assert!(task.mix.iter().all(|m| m.size <= task.block && m.size.0 % 512 == 0));
    }
    if task.sync.is_some() {
        assert!(task.op == Op::Write && task.block.0 % 4096 == 0);
    }
}

/// Names become directories, cgroups and sections of fio's files.
fn name(name: &str) {
    assert!(name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.len() <= 32, "{name:?}");
    assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)), "{name:?}");
}
