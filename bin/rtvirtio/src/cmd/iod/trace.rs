//! `rtvirtio iod trace`: live trace of the I/O domain's requests and frames.

use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use rtvirtio_domain_protocol::Command;
use rtvirtio_domain_protocol::trace::{End, Event, Line, Mark};
use rtvirtio_units::{Bytes, Nanos};

use crate::args::IodTraceArgs;
use rtvirtio_console::Ui;
use rtvirtio_workflow::Progress as _;

/// Read timeout: the longest delay of Ctrl-C.
const LOOK: Duration = Duration::from_millis(100);

/// Prints requests on completion, and frames when passed on or dropped.
pub fn run(args: &IodTraceArgs, control: &Path, ui: &Ui) -> anyhow::Result<ExitCode> {
    let stream = rtvirtio_workflow::domain::client::connect(control)?;
    stream.set_read_timeout(Some(LOOK))?;
    let for_ms = args.length.map(|length| length.0.div_ceil(1_000_000));
    (&stream).write_all(Command::Trace { for_ms }.line()?.as_bytes())?;
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
        let line = Line::parse(text).with_context(|| format!("{}: not an answer", control.display()))?;
        let shown = match &line {
            Line::Mark(Mark::Failed { error }) => anyhow::bail!("{}: {error}", control.display()),
            Line::Event(event) if args.slower_than.is_some_and(|least| event.total_ns <= least.0) => Ok(()),
            Line::Event(event) if args.dropped && !event.is_dropped() => Ok(()),
            // As it came, with what only a newer domain has.
            _ if ui.json => out.write_all(text),
            Line::Event(event) => {
                let since = event.at_ns.saturating_sub(*first.get_or_insert(event.at_ns));
                writeln!(out, "{}", rtvirtio_report::terminal(&row(event, since), false))
            }
            Line::Mark(Mark::Begin { .. }) => writeln!(out, "{HEADER}"),
            Line::Mark(Mark::End { .. }) => Ok(()),
        };
        let end = match line {
            Line::Mark(Mark::End { end }) => Some(end),
            _ => None,
        };
        let shown = if end.is_some() { shown.and_then(|()| out.flush()) } else { shown };
        match shown {
            // `rtvirtio iod trace | head` is not an error.
            Err(e) if e.kind() == ErrorKind::BrokenPipe => return Ok(ExitCode::SUCCESS),
            other => other?,
        }
        if let Some(End { events, dropped }) = end {
            ui.step(&format!("{events} requests and frames, {dropped} more were lost"));
            return Ok(ExitCode::SUCCESS);
        }
    }
    if lines.unread {
        return Ok(ExitCode::SUCCESS);
    }
    anyhow::bail!("{}: the I/O domain ended, or was not read for too long", control.display())
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

fn row(e: &Event<'_>, since: u64) -> String {
    let mut s = format!(
        "{:>9.6}s  {:<16} {:<12} {:>8}  {:<11} {:>1} {:>9}  {:>9}  {:>9}",
        since as f64 / 1e9,
        e.vm,
        e.op,
        Bytes(e.len).to_string(),
        e.class,
        e.level,
        Nanos(e.wait_ns).to_string(),
        Nanos(e.device_ns).to_string(),
        Nanos(e.total_ns).to_string(),
    );
    if e.reserved {
        s.push_str("  reserved");
    }
    let outcome = match (e.fate.as_deref(), e.refused.as_deref(), e.status) {
        (Some("passed"), ..) | (None, None, Some(0)) => String::new(),
        (Some(fate), ..) => format!("  dropped: {}", fate.replace('_', " ")),
        (None, Some(why), _) => format!("  refused: {}", why.replace('_', " ")),
        (None, None, Some(2)) => "  not supported".to_owned(),
        (None, None, Some(_)) => "  I/O error".to_owned(),
        (None, None, None) => "  outcome unknown".to_owned(),
    };
    s + &outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_all_that_matters() {
        let mut event: Event<'_> = serde_json::from_str(
            r#"{ "device": "d", "vm": "controller", "queue": 0, "op": "read", "len": 4096, "class": "real-time",
                "level": 4, "reserved": true, "status": 0, "at_ns": 0, "wait_ns": 1500, "device_ns": 62000,
                "total_ns": 63500 }"#,
        )
        .unwrap();
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
        event.status = Some(1);
        assert!(row(&event, 0).ends_with("I/O error"));
        event.status = None;
        assert!(row(&event, 0).ends_with("outcome unknown"));
        event.refused = Some("outside_memory".into());
        assert!(row(&event, 0).ends_with("refused: outside memory"));
        let mut frame: Event<'_> = serde_json::from_str(
            r#"{ "network": "lan", "vm": "relay", "op": "send", "len": 140, "class": "real-time", "level": 4,
                "reserved": true, "fate": "passed", "at_ns": 0, "wait_ns": 9000, "device_ns": 13000,
                "total_ns": 22000 }"#,
        )
        .unwrap();
        assert!(row(&frame, 0).ends_with("22us  reserved"), "{}", row(&frame, 0));
        frame.fate = Some("no_buffer".into());
        assert!(row(&frame, 0).ends_with("dropped: no buffer"));
    }
}
