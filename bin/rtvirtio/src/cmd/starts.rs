//! `rtvirtio starts`.

use std::io::Write as _;
use std::process::ExitCode;

use rtvirtio_apply::Raised;
use rtvirtio_console::{Global, Ui, need_root};
use rtvirtio_startup::FavourLimits;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::find::load_spec;
use rtvirtio_workflow::site::Site;
use rtvirtio_workflow::starts::{StartEvent, StartEventKind, StartsEnded, StartsOptions, follow_starts};

use crate::args::StartsArgs;

pub fn run(args: &StartsArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    need_root("starts")?;
    let site = Site::find(load_spec(&args.spec)?, &global.dirs())?;
    site.load_bfq(ui);
    let limits = FavourLimits { budget: args.budget, within: args.within, longest: args.longest };
    let raised = Raised { weight: args.weight, slice_idle: Some(args.slice_idle) };
    let options = StartsOptions { raised, limits, recognise: args.recognise };
    let binding = site.binding()?;
    match follow_starts(&args.ports, &binding, &options, &global.dirs(), ui, &mut |event| show(&event, ui))? {
        StartsEnded::Cancelled => {}
        StartsEnded::PutBack => ui.step("what it had applied was put back: nothing is left to be raised"),
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a line for each event.
fn show(event: &StartEvent, ui: &Ui) -> rtvirtio_workflow::Result<()> {
    let mut out = std::io::stdout().lock();
    if ui.json {
        writeln!(out, "{}", serde_json::to_string(event)?)?;
        return Ok(out.flush()?);
    }
    let what = match event.what {
        StartEventKind::Connected => "its port is connected".to_owned(),
        StartEventKind::Closed => "its port was closed".to_owned(),
        StartEventKind::Raised => "something starts: raised".to_owned(),
        StartEventKind::Lowered(all) => {
            format!(
                "put back; {} starts so far, {} refused, {} ended by the budget",
                all.starts, all.refused, all.cut
            )
        }
    };
    writeln!(out, "{}: {what}", rtvirtio_report::terminal(&event.vm, false))?;
    Ok(out.flush()?)
}
