//! `rtvirtio iod trace`: what the I/O domain does with each request, while it does it.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use rtvirtio_units::{Bytes, Nanos};
use serde_json::{Value, json};

use crate::args::IodTraceArgs;
use crate::ui::Ui;

/// How long it may take to notice Ctrl-C.
const LOOK: Duration = Duration::from_millis(100);

/// Prints requests as they are answered.
pub fn run(args: &IodTraceArgs, control: &Path, ui: &Ui) -> anyhow::Result<ExitCode> {
    let stream = super::connect(control)?;
    stream.set_read_timeout(Some(LOOK))?;
    let asked = match args.length {
        Some(length) => json!({ "command": "trace", "for_ms": length.0.div_ceil(1_000_000) }),
        None => json!({ "command": "trace" }),
    };
    writeln!(&stream, "{asked}")?;
    let mut lines = Lines { from: BufReader::new(&stream), stream: &stream, line: Vec::new(), left: false };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    let mut first = None;
    while let Some(event) = lines.next(ui, &mut out)? {
        if let Some(error) = event["error"].as_str() {
            anyhow::bail!("{}: {error}", control.display());
        }
        let total = event["total_ns"].as_u64();
        let text = if let Some(end) = event.get("end") {
            out.flush()?;
            ui.step(&format!("{} requests, {} more were not caught up with", end["events"], end["dropped"]));
            if ui.json { event.to_string() } else { return Ok(ExitCode::SUCCESS) }
        } else if let Some(total) = total {
            if args.slower_than.is_some_and(|least| total <= least.0) {
                continue;
            }
            let at = event["at_ns"].as_u64().unwrap_or(0);
            let begin = *first.get_or_insert(at);
            if ui.json { event.to_string() } else { row(&event, at.saturating_sub(begin)) }
        } else if ui.json {
            event.to_string()
        } else {
            HEADER.to_owned()
        };
        match writeln!(out, "{text}") {
            // `rtvirtio iod trace | head` is not an error.
            Err(e) if e.kind() == ErrorKind::BrokenPipe => return Ok(ExitCode::SUCCESS),
            other => other?,
        }
        if event.get("end").is_some() {
            out.flush()?;
            return Ok(ExitCode::SUCCESS);
        }
    }
    anyhow::bail!("{}: the I/O domain ended, or was not read for too long", control.display())
}

/// The answer, line by line.
struct Lines<'a> {
    from: BufReader<&'a UnixStream>,
    stream: &'a UnixStream,
    line: Vec<u8>,
    /// We have said that we want no more.
    left: bool,
}

impl Lines<'_> {
    /// The next one; what was printed is shown while nothing comes.
    fn next(&mut self, ui: &Ui, out: &mut impl Write) -> anyhow::Result<Option<Value>> {
        loop {
            if ui.is_cancelled() && !self.left {
                // The domain then says the end, with its counts.
                self.left = true;
                self.stream.shutdown(Shutdown::Write)?;
            }
            // What came before a time-out stays in `line`.
            match self.from.read_until(b'\n', &mut self.line) {
                Ok(0) => return Ok(None),
                Ok(_) => {
                    let value = serde_json::from_slice(&self.line).context("not an answer of an I/O domain");
                    self.line.clear();
                    return value.map(Some);
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    match out.flush() {
                        Err(e) if e.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
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
    match e["status"].as_u64() {
        Some(0) => {}
        Some(2) => s.push_str("  not supported"),
        _ => s.push_str("  I/O error"),
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
    }
}
