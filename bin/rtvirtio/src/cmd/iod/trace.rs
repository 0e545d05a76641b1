//! `rtvirtio iod trace`: live trace of the I/O domain's requests and frames.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use rtvirtio_units::{Bytes, Nanos};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::args::IodTraceArgs;
use rtvirtio_console::Ui;
use rtvirtio_workflow::Progress as _;

/// Read timeout: the longest delay of Ctrl-C.
const LOOK: Duration = Duration::from_millis(100);

/// Prints requests on completion, and frames when passed on or dropped.
pub fn run(args: &IodTraceArgs, control: &Path, ui: &Ui) -> anyhow::Result<ExitCode> {
    let stream = rtvirtio_workflow::domain::client::connect(control)?;
    stream.set_read_timeout(Some(LOOK))?;
    let asked = match args.length {
        Some(length) => json!({ "command": "trace", "for_ms": length.0.div_ceil(1_000_000) }),
        None => json!({ "command": "trace" }),
    };
    writeln!(&stream, "{asked}")?;
    let mut lines = Lines {
        from: BufReader::new(&stream),
        stream: &stream,
        line: Vec::new(),
        left: false,
        unread: false,
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let mut first = None;
    while let Some(text) = lines.next(ui, &mut out)? {
        let line: Line =
            serde_json::from_slice(text).with_context(|| format!("{}: not an answer", control.display()))?;
        let shown = match (&line.error, line.total_ns) {
            (Some(error), _) => anyhow::bail!("{}: {error}", control.display()),
            (None, Some(total)) if args.slower_than.is_some_and(|least| total <= least.0) => Ok(()),
            (None, Some(_)) if args.dropped && !is_dropped(text)? => Ok(()),
            // Copied without formatting: this program must keep up with a busy I/O domain.
            _ if ui.json => out.write_all(text),
            (None, Some(_)) => {
                let event: Value = serde_json::from_slice(text)?;
                let at = line.at_ns.unwrap_or(0);
                writeln!(out, "{}", row(&event, at.saturating_sub(*first.get_or_insert(at))))
            }
            (None, None) if line.end.is_none() => writeln!(out, "{HEADER}"),
            (None, None) => Ok(()),
        };
        let shown = if line.end.is_some() { shown.and_then(|()| out.flush()) } else { shown };
        match shown {
            // `rtvirtio iod trace | head` is not an error.
            Err(e) if e.kind() == ErrorKind::BrokenPipe => return Ok(ExitCode::SUCCESS),
            other => other?,
        }
        if let Some(end) = line.end {
            let (n, more) = (end.events, end.dropped);
            ui.step(&format!("{n} requests and frames, {more} more were not caught up with"));
            return Ok(ExitCode::SUCCESS);
        }
    }
    if lines.unread {
        return Ok(ExitCode::SUCCESS);
    }
    anyhow::bail!("{}: the I/O domain ended, or was not read for too long", control.display())
}

/// Whether an event is a dropped frame or a refused request.
fn is_dropped(text: &[u8]) -> serde_json::Result<bool> {
    let event: Value = serde_json::from_slice(text)?;
    Ok(event["refused"].is_string() || event["fate"].as_str().is_some_and(|fate| fate != "passed"))
}

/// Required fields of every line.
#[derive(Deserialize)]
struct Line {
    error: Option<String>,
    end: Option<End>,
    at_ns: Option<u64>,
    total_ns: Option<u64>,
}

#[derive(Deserialize)]
struct End {
    events: u64,
    dropped: u64,
}

/// Lines of the I/O domain's answer.
struct Lines<'a> {
    from: BufReader<&'a UnixStream>,
    stream: &'a UnixStream,
    line: Vec<u8>,
    /// The end of the trace has been requested.
    left: bool,
    /// Standard output is closed.
    unread: bool,
}

impl Lines<'_> {
    /// Next line; flushes the printed ones while none arrives. `None` when the I/O domain has
    /// ended.
    fn next(&mut self, ui: &Ui, out: &mut impl Write) -> anyhow::Result<Option<&[u8]>> {
        self.line.clear();
        loop {
            if ui.is_cancelled() && !self.left {
                // The I/O domain then sends the end of the trace with its counts.
                self.left = true;
                self.stream.shutdown(Shutdown::Write)?;
            }
            // A partial line before a timeout stays in `line`.
            match self.from.read_until(b'\n', &mut self.line) {
                Ok(_) => return Ok(self.line.ends_with(b"\n").then_some(&self.line)),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    match out.flush() {
                        // The reader is gone; the I/O domain notices the closed connection.
                        Err(e) if e.kind() == ErrorKind::BrokenPipe => {
                            self.unread = true;
                            return Ok(None);
                        }
                        other => other?,
                    }
                }
                Err(e) => return Err(e.into()),
            }
        }
    }
}

const HEADER: &str =
    "        at  VM               op           len       class          waited     device      total";

fn row(e: &Value, since: u64) -> String {
    let time = |key: &str| Nanos(e[key].as_u64().unwrap_or(0)).to_string();
    let text = |key: &str| e[key].as_str().unwrap_or_default().to_owned();
    let mut s = format!(
        "{:>9.6}s  {:<16} {:<12} {:>8}  {:<11} {:>1} {:>9}  {:>9}  {:>9}",
        since as f64 / 1e9,
        text("vm"),
        text("op"),
        Bytes(e["len"].as_u64().unwrap_or(0)).to_string(),
        text("class"),
        e["level"].as_u64().unwrap_or(0),
        time("wait_ns"),
        time("device_ns"),
        time("total_ns"),
    );
    if e["reserved"] == true {
        s.push_str("  reserved");
    }
    match (e["fate"].as_str(), e["status"].as_u64()) {
        (Some("passed"), _) | (None, Some(0)) => {}
        (Some(fate), _) => {
            s.push_str("  not passed on: ");
            s.push_str(&fate.replace('_', " "));
        }
        (None, _) if e["refused"].is_string() => {
            s.push_str("  refused: ");
            s.push_str(&e["refused"].as_str().unwrap_or_default().replace('_', " "));
        }
        (None, Some(2)) => s.push_str("  not supported"),
        (None, _) => s.push_str("  I/O error"),
    }
    s
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_all_that_matters() {
        let mut event = json!({
            "vm": "controller", "op": "read", "len": 4_096, "class": "real-time", "level": 4, "reserved": true,
            "status": 0, "wait_ns": 1_500, "device_ns": 62_000, "total_ns": 63_500,
        });
        let text = row(&event, 1_500_000);
        for part in [
            "0.001500s",
            "controller",
            "read",
            "4KiB",
            "real-time",
            "4",
            "1.5us",
            "62us",
            "63.5us",
            "reserved",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        assert!(!text.contains("error"));
        event["status"] = json!(1);
        assert!(row(&event, 0).ends_with("I/O error"));
        event["refused"] = json!("outside_memory");
        assert!(row(&event, 0).ends_with("refused: outside memory"));
        let mut frame = json!({
            "network": "lan", "vm": "relay", "op": "send", "len": 140, "class": "real-time", "level": 4,
            "reserved": true, "fate": "passed", "wait_ns": 9_000, "device_ns": 13_000, "total_ns": 22_000,
        });
        assert!(row(&frame, 0).ends_with("22us  reserved"), "{}", row(&frame, 0));
        frame["fate"] = json!("no_buffer");
        assert!(row(&frame, 0).ends_with("not passed on: no buffer"));
    }
}
