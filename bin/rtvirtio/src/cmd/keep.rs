//! `rtvirtio keep`.

use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use rtvirtio_console::{Global, Ui, need_root};
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::keep::{Amendment, Ended, KeepOptions, keep};
use rtvirtio_workflow::named::named_host;
use serde::Serialize;

use crate::args::KeepArgs;

/// A line of JSON output.
#[derive(Serialize)]
struct Event<'a> {
    /// `set`, `left` to another program that has changed it, or `failed`.
    event: &'static str,
    vm: &'a str,
    knob: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    old: Option<&'a str>,
    /// New value, value set by the other program, or reason of the failure.
    what: &'a str,
}

pub fn run(args: &KeepArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("keep")?;
    let host = named_host(&args.spec)?;
    let options = KeepOptions {
        every: Duration::from_nanos(args.every.0),
        split_every: Duration::from_nanos(args.split_every.0),
    };
    match keep(host.vms(), &options, &global.dirs(), ui, &mut |amendment| report(amendment, ui))? {
        Ended::Cancelled => {}
        Ended::PutBack => ui.step("the contracts were put back: nothing is left to be kept"),
        Ended::VmsEnded => ui.step("no thread is left: the VMs have ended"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a line for each setting, and warnings.
fn report(amendment: &Amendment<'_>, ui: &Ui) -> rtvirtio_workflow::Result<()> {
    let (vm, amended) = (amendment.vm, amendment.amended);
    let set = amended.written.iter().map(|l| ("set", &l.knob, l.old.as_deref(), &l.new));
    let left = amended.left.iter().map(|(knob, found)| ("left", knob, None, found));
    let failed = amended.failed.iter().map(|(knob, why)| ("failed", knob, None, why));
    for warning in &amended.warnings {
        ui.warn(&format!("{vm}: {warning}"));
    }
    let mut out = std::io::stdout().lock();
    for (event, knob, old, what) in set.chain(left).chain(failed) {
        let result = if ui.json {
            let line = serde_json::to_string(&Event { event, vm, knob, old, what })?;
            writeln!(out, "{line}")
        } else {
            let line = match event {
                "set" => format!("{knob}: {} -> {what}", old.unwrap_or("-")),
                "left" => format!("{knob}: another program has set {what}; left alone"),
                _ => format!("{knob}: FAILED: {what}"),
            };
            writeln!(out, "{}", rtvirtio_report::terminal(&line, false))
        };
        result.and_then(|()| out.flush())?;
    }
    for reason in amendment.without_cpus {
        ui.warn(&format!("{vm}: {reason}"));
    }
    for note in amendment.notes {
        ui.step(&format!("{vm}: {note}"));
    }
    Ok(())
}
