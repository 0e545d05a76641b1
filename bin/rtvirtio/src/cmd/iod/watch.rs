//! `rtvirtio iod status --watch`: service of each VM per interval.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rtvirtio_units::Nanos;
use serde_json::{Value, json};

use super::ask;
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

/// Service of every VM between two samples, per second.
fn rates(before: &Value, now: &Value, seconds: f64) -> Vec<Value> {
    let none = Vec::new();
    let vms = |v: &Value| v["vms"].as_array().unwrap_or(&none).clone();
    let old = vms(before);
    let rate = |vm: &Value| {
        let was = old.iter().find(|o| o["name"] == vm["name"]).unwrap_or(&Value::Null);
        let per_second = |direction: &str, key: &str| {
            let count = |v: &Value| v[direction][key].as_u64().unwrap_or(0);
            // A restarted I/O domain counts from 0 again.
            count(vm).saturating_sub(count(was)) as f64 / seconds
        };
        json!({
            "name": vm["name"],
            "attached": vm["attached"],
            "outstanding": vm["outstanding"],
            "reads_per_second": per_second("read", "requests"),
            "writes_per_second": per_second("write", "requests"),
            "bytes_per_second": per_second("read", "bytes") + per_second("write", "bytes"),
            "capped_per_second": per_second("read", "cap_hits") + per_second("write", "cap_hits"),
        })
    };
    vms(now).iter().map(rate).collect()
}

fn table(rates: &[Value]) -> String {
    let mut s = format!(
        "{:<16} {:>10} {:>10} {:>10} {:>11} {:>9}\n",
        "VM", "reads/s", "writes/s", "MB/s", "outstanding", "capped/s"
    );
    for vm in rates {
        let number = |key: &str| vm[key].as_f64().unwrap_or(0.0);
        let name = rtvirtio_report::terminal(vm["name"].as_str().unwrap_or_default(), false);
        s.push_str(&format!(
            "{name:<16} {:>10.0} {:>10.0} {:>10.1} {:>11} {:>9.0}{}\n",
            number("reads_per_second"),
            number("writes_per_second"),
            number("bytes_per_second") / 1e6,
            vm["outstanding"],
            number("capped_per_second"),
            if vm["attached"] == false { "  no guest" } else { "" }
        ));
    }
    s
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_differences_over_time() {
        let at = |reads: u64, bytes: u64| {
            json!({ "vms": [{ "name": "a", "attached": true, "outstanding": 3,
                "read": { "requests": reads, "bytes": bytes, "cap_hits": 1 },
                "write": { "requests": 0, "bytes": 0, "cap_hits": 0 } }] })
        };
        let r = rates(&at(100, 4_096), &at(300, 8_192), 2.0);
        assert_eq!(r[0]["reads_per_second"], 100.0);
        assert_eq!(r[0]["bytes_per_second"], 2_048.0);
        assert!(table(&r).lines().nth(1).unwrap().contains(" 100 "), "{}", table(&r));
        // Started anew in between.
        assert_eq!(rates(&at(300, 0), &at(10, 0), 1.0)[0]["reads_per_second"], 0.0);
        assert_eq!(rates(&json!({}), &at(50, 0), 1.0)[0]["reads_per_second"], 50.0);
    }
}
