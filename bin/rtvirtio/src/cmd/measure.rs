//! `rtvirtio measure`.

use std::fmt::Write as _;
use std::process::ExitCode;

use rtvirtio_console::{Global, MISSED, Ui, need_root, show, style};
use rtvirtio_report::text::{Cell, Column, Table};
use rtvirtio_workflow::start_up::{StartUpOptions, StartUps, measure_start_up};

use crate::args::{MeasureCommand, MeasureStartUpArgs};

pub fn run(command: &MeasureCommand, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    match command {
        MeasureCommand::StartUp(args) => start_up(args, global, ui),
    }
}

fn start_up(args: &MeasureStartUpArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    if args.drop_host_caches {
        need_root("measure start-up --drop-host-caches")?;
    }
    let options = StartUpOptions {
        vm: &args.vm,
        spec: args.spec.as_deref(),
        command: &args.command,
        times: args.times,
        limit: args.limit,
        say: args.say,
        host_caches: args.drop_host_caches,
    };
    let result = measure_start_up(&options, &global.dirs(), ui)?;
    let failed = result.failed();
    show(ui, &result, || text(&result))?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::from(MISSED) })
}

fn text(result: &StartUps) -> String {
    let columns = ["min", "mean", "max", "deviation", "95 % of the mean"].map(Column::number);
    let mut table = Table::new(
        [vec![Column::number("starts"), Column::number("over the limit")], columns.to_vec()].concat(),
    );
    let mut s = String::new();
    if let Some(of) = &result.summary {
        let seconds = |v: f64| format!("{v:.2} s");
        let interval =
            if of.interval.is_finite() { format!("± {:.2} s", of.interval) } else { "-".to_owned() };
        let cells = [
            of.n.to_string(),
            result.failed().to_string(),
            seconds(of.min),
            seconds(of.mean),
            seconds(of.max),
            seconds(of.deviation),
            interval,
        ];
        table.row(cells.map(Cell::from).to_vec());
    }
    let also = if result.host_caches { " and the host" } else { "" };
    let (command, vm) =
        (rtvirtio_report::terminal(&result.command, false), rtvirtio_report::terminal(&result.vm, false));
    let _ = writeln!(s, "start-up of `{command}` in {vm}, cold caches in the guest{also}");
    s.push_str(&table.draw(&style()));
    if result.failed() > 0 {
        let _ = writeln!(s, "\na start-up over {} s counts as {} s", result.limit, result.limit);
    }
    s
}
