//! `rtvirtio iod status --watch`: service of each VM per interval.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rtvirtio_domain_protocol::Status;
use rtvirtio_domain_protocol::status::{DirectionStatus, DiskStatus};
use rtvirtio_units::Nanos;
use serde::Serialize;
use serde_json::json;

use super::ask;
use super::table::known;
use rtvirtio_console::Ui;
use rtvirtio_workflow::Progress as _;

/// Interval of checks for Ctrl-C.
const LOOK: Duration = Duration::from_millis(50);

/// Prints the rates of each interval until Ctrl-C, or until the I/O domain ends.
pub fn run(control: &Path, every: Nanos, ui: &Ui) -> anyhow::Result<ExitCode> {
    let every = Duration::from_nanos(every.0).max(Duration::from_millis(100));
    let (mut before, mut begin) = (ask(control)?, Instant::now());
    while !ui.is_cancelled() {
        while begin.elapsed() < every && !ui.is_cancelled() {
            std::thread::sleep(LOOK.min(every.saturating_sub(begin.elapsed())));
        }
        if ui.is_cancelled() {
            break;
        }
        let now = ask(control)?;
        let seconds = begin.elapsed().as_secs_f64();
        begin = Instant::now();
        let rates = rates(&before, &now, seconds);
        let text = if ui.json { format!("{}\n", json!({ "vms": rates })) } else { table(&rates) };
        let mut out = std::io::stdout().lock();
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => break,
            other => other?,
        }
        before = now;
    }
    Ok(ExitCode::SUCCESS)
}

/// Service of a VM in between; `None` where the domain does not have the number, or has begun to
/// count anew.
#[derive(Debug, PartialEq, Serialize)]
struct Rates<'a> {
    name: &'a str,
    attached: bool,
    outstanding: Option<u64>,
    reads_per_second: Option<f64>,
    writes_per_second: Option<f64>,
    bytes_per_second: Option<f64>,
    capped_per_second: Option<f64>,
}

fn rates<'a>(before: &Status, now: &'a Status, seconds: f64) -> Vec<Rates<'a>> {
    let rate = |vm: &'a DiskStatus| {
        let was = before.vms.iter().find(|was| was.name == vm.name);
        let per_second = |count: &dyn Fn(&DiskStatus) -> Option<u64>| {
            // Of a disk that came in between, all of it is new.
            let was = was.map_or(Some(0), count)?;
            Some(count(vm)?.checked_sub(was)? as f64 / seconds)
        };
        let both = |count: &dyn Fn(&DirectionStatus) -> Option<u64>| {
            per_second(&|vm| Some(count(&vm.read)? + count(&vm.write)?))
        };
        Rates {
            name: &vm.name,
            attached: vm.attached,
            outstanding: vm.outstanding,
            reads_per_second: per_second(&|vm| vm.read.requests),
            writes_per_second: per_second(&|vm| vm.write.requests),
            bytes_per_second: both(&|direction| direction.service.bytes),
            capped_per_second: both(&|direction| direction.service.cap_hits),
        }
    };
    now.vms.iter().map(rate).collect()
}

fn table(rates: &[Rates<'_>]) -> String {
    let mut s = format!(
        "{:<16} {:>10} {:>10} {:>10} {:>11} {:>9}\n",
        "VM", "reads/s", "writes/s", "MB/s", "outstanding", "capped/s"
    );
    let number =
        |value: Option<f64>, decimals: usize| known(value.map(|value| format!("{value:.decimals$}")));
    for vm in rates {
        let name = rtvirtio_report::terminal(vm.name, false);
        s.push_str(&format!(
            "{name:<16} {:>10} {:>10} {:>10} {:>11} {:>9}{}\n",
            number(vm.reads_per_second, 0),
            number(vm.writes_per_second, 0),
            number(vm.bytes_per_second.map(|bytes| bytes / 1e6), 1),
            known(vm.outstanding),
            number(vm.capped_per_second, 0),
            if vm.attached { "" } else { "  no guest" }
        ));
    }
    s
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(reads: u64, bytes: u64) -> Status {
        let direction =
            |requests: u64, bytes: u64| json!({ "requests": requests, "bytes": bytes, "cap_hits": 1 });
        let vm = json!({ "device": "d", "name": "a", "socket": "/s", "connected": true, "attached": true,
            "outstanding": 3, "read": direction(reads, bytes), "write": direction(0, 0), "promises": [],
            "refused": null, "refused_requests": {} });
        let status = json!({ "version": 1, "devices": [], "vms": [vm], "networks": [], "ports": [] });
        serde_json::from_value(status).unwrap()
    }

    #[test]
    fn rates_are_differences_over_time() {
        let (before, now) = (at(100, 4_096), at(300, 8_192));
        let r = rates(&before, &now, 2.0);
        assert_eq!(r[0].reads_per_second, Some(100.0));
        assert_eq!(r[0].bytes_per_second, Some(2_048.0));
        assert!(table(&r).lines().nth(1).unwrap().contains(" 100 "), "{}", table(&r));
        assert_eq!(rates(&Status::default(), &at(50, 0), 1.0)[0].reads_per_second, Some(50.0));
    }

    #[test]
    fn what_is_not_known_is_no_rate_of_zero() {
        // Started anew in between.
        let (before, now) = (at(300, 0), at(10, 0));
        assert_eq!(rates(&before, &now, 1.0)[0].reads_per_second, None);
        let mut older = at(1, 1);
        (older.vms[0].outstanding, older.vms[0].write.service.bytes) = (None, None);
        let r = rates(&before, &older, 1.0);
        assert_eq!((r[0].bytes_per_second, r[0].writes_per_second), (None, Some(0.0)));
        assert_eq!(table(&r).matches("unknown").count(), 3, "{}", table(&r));
    }
}
