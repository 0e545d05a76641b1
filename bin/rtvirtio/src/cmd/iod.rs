//! `rtvirtio iod ...`: the running I/O domain.

mod table;
mod trace;
mod watch;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use rtvirtio_console::{Global, Ui, show};
use rtvirtio_domain_protocol::Command;
use rtvirtio_kernel::trusted::CONFIG_LIMIT;
use rtvirtio_report::terminal;
use rtvirtio_workflow::Progress as _;
use rtvirtio_workflow::domain::client::{ask, send_command};
use rtvirtio_workflow::domain::live::{self, Changes, Preview};

use crate::args::IodCommand;

pub fn run(command: &IodCommand, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let at = |given: &Option<PathBuf>| given.clone().unwrap_or_else(|| global.run_dir.join("iod.sock"));
    match command {
        IodCommand::Status(args) => {
            let control = at(&args.control);
            if let Some(every) = args.watch {
                return watch::run(&control, every, ui);
            }
            if ui.json {
                // As it came, with what only a newer domain has.
                show(ui, &send_command::<serde_json::Value>(&control, &Command::Status)?, String::new)?;
            } else {
                let status = ask(&control)?;
                show(ui, &status, || table::status(&status))?;
            }
        }
        IodCommand::Reload(args) if args.dry_run => {
            let found = live::preview(&at(&args.control))?;
            show(ui, &found, || preview(&found))?;
        }
        IodCommand::Reload(args) => changed(&live::reload(&at(&args.control), args.force)?, ui)?,
        IodCommand::Attach(args) => {
            changed(&live::attach(&at(&args.control), &read_tables(&args.tables)?)?, ui)?;
        }
        IodCommand::Detach(args) => changed(&live::detach(&at(&args.control), &args.names, args.force)?, ui)?,
        IodCommand::Stop(args) => {
            let stopped = live::end(&at(&args.control), &global.dirs(), args.force)?;
            ui.step(&format!("the I/O domain, process {}, is stopped", stopped.pid));
            if let Some(kept) = &stopped.kept {
                ui.step(&super::domain::kept_text(kept));
            }
            show(ui, &stopped, String::new)?;
        }
        IodCommand::Trace(args) => return trace::run(args, &at(&args.control), ui),
    }
    Ok(ExitCode::SUCCESS)
}

fn read_tables(path: &Path) -> anyhow::Result<String> {
    if path.as_os_str() == "-" {
        return std::io::read_to_string(std::io::stdin()).context("standard input");
    }
    rtvirtio_kernel::trusted::read_named_text(path, CONFIG_LIMIT).with_context(|| path.display().to_string())
}

fn changed(changes: &Changes, ui: &Ui) -> anyhow::Result<()> {
    show(ui, changes, || {
        let line = |what: &str, text: &String| format!("{what}{}\n", terminal(text, false));
        let mut lines: String = changes.changed.iter().map(|c| line("in force: ", c)).collect();
        if changes.changed.is_empty() {
            lines.push_str("nothing is new\n");
        }
        lines.extend(changes.notes.iter().map(|note| line("", note)));
        lines
    })
}

fn preview(found: &Preview) -> String {
    let line = |what: &str, kind: &str, names: &[String]| -> String {
        names.iter().map(|name| format!("{what}: {kind} \"{}\"\n", terminal(name, false))).collect()
    };
    let lines = line("would be added", "disk", &found.attach)
        + &line("would be added", "port", &found.attach_ports)
        + &line("would be removed", "disk", &found.detach)
        + &line("would be removed", "port", &found.detach_ports);
    if lines.is_empty() { "no disk or port would be added or removed\n".into() } else { lines }
}
