//! Contracts of VMs in a Pacemaker cluster: arguments, output and wiring.

mod args;

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use rtvirtio_arguments::Section;
use rtvirtio_console::{Global, Ui, finish, need_root, print, show, style};
use rtvirtio_pacemaker_control::agent::{self, Ocf, Parameters};
use rtvirtio_pacemaker_control::{
    Crm, Demand, DiskWatch, METADATA, NodeAnswer, Published, constraints_xml, demands, load, primitive_xml,
    publish, published, survey, write_constraints,
};
use rtvirtio_report::terminal;
use rtvirtio_report::text::{Cell, Column, Paint, Table};
use rtvirtio_workflow::Progress as _;
use serde::Serialize;

use args::{AgentArgs, Cli, Command, ConstraintsArgs, FileArgs, PublishArgs};

fn main() -> ExitCode {
    let cli: Cli = match rtvirtio_arguments::parse(Section::Admin) {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    let result = Ui::new(&cli.global).and_then(|ui| run(&cli, &ui));
    // Another program may give these threads reservations at once.
    rtvirtio_kernel::sched::settle();
    finish(result, cli.global.json)
}

fn run(cli: &Cli, ui: &Ui) -> anyhow::Result<ExitCode> {
    let global = &cli.global;
    match &cli.command {
        Command::Publish(args) => run_publish(args, global, ui),
        Command::Constraints(args) => run_constraints(args, ui),
        Command::Show(args) => run_show(args, ui),
        Command::Agent(args) => Ok(run_agent(args, global, ui)),
    }
}

fn run_publish(args: &PublishArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let contracts = load(&args.file.file)?;
    let dirs = global.dirs();
    let mut watch = DiskWatch::default();
    if args.dry_run {
        let answer = survey(&contracts, &dirs, &watch.sample(&contracts, &dirs))?;
        show(ui, &answer, || answer_text(&answer))?;
        return Ok(ExitCode::SUCCESS);
    }
    need_root("rtvirtio-pacemaker publish")?;
    let node = args.node.clone().map_or_else(|| Crm::new(ui).node_name(), Ok)?;
    let mut once = || -> anyhow::Result<()> {
        let answer = survey(&contracts, &dirs, &watch.sample(&contracts, &dirs))?;
        publish(Crm::new(ui), &node, &answer)?;
        show(ui, &answer, || answer_text(&answer))
    };
    let Some(every) = args.every else {
        once()?;
        return Ok(ExitCode::SUCCESS);
    };
    let mut failed = None;
    while !ui.is_cancelled() {
        // Published attributes stay; the next round may reach the cluster again.
        let why = once().err().map(|e| format!("{e:#}"));
        match &why {
            Some(why) if failed.as_ref() != Some(why) => ui.warn(why),
            None if failed.is_some() => ui.step("published again"),
            _ => {}
        }
        failed = why;
        let _ = ui.pause(Duration::from_nanos(every.0));
    }
    Ok(ExitCode::SUCCESS)
}

fn answer_text(answer: &NodeAnswer) -> String {
    let mut out = String::new();
    for of in &answer.contracts {
        let takes: Vec<String> = of.takes.iter().map(|(name, n)| format!("{name} {n}")).collect();
        let word = match (&of.refused, of.in_force) {
            (None, true) => "in force".to_owned(),
            (Some(why), true) => format!("in force, and would not be promised now: {}", terminal(why, false)),
            (None, false) => "fits".to_owned(),
            (Some(why), false) => format!("does not fit: {}", terminal(why, false)),
        };
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{}: {word} ({})", of.resource, takes.join(", "));
    }
    out
}

#[derive(Serialize)]
struct Constraints {
    demands: Vec<Demand>,
    resources: Vec<String>,
    constraints: String,
    applied: bool,
}

fn run_constraints(args: &ConstraintsArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let contracts = load(&args.file.file)?;
    let published = published(Crm::new(ui), &contracts)?;
    for of in &contracts {
        anyhow::ensure!(
            published.iter().any(|p| p.resource == of.resource),
            "no node has published what {} takes: run `rtvirtio-pacemaker publish` on each",
            of.resource
        );
    }
    let demands = demands(&contracts, &published);
    if args.apply {
        need_root("rtvirtio-pacemaker constraints --apply")?;
        write_constraints(Crm::new(ui), &contracts, &demands)?;
    }
    let all = Constraints {
        demands,
        resources: contracts.iter().map(primitive_xml).collect(),
        constraints: constraints_xml(&contracts),
        applied: args.apply,
    };
    show(ui, &all, || {
        let mut out = String::new();
        for of in &all.demands {
            let takes: Vec<String> = of.takes.iter().map(|(name, n)| format!("{name}={n}")).collect();
            // Writing to a String cannot fail.
            let _ = writeln!(out, "{} takes {}", of.resource, takes.join(" "));
        }
        out + &all.resources.join("\n") + "\n" + &all.constraints + "\n"
    })?;
    Ok(ExitCode::SUCCESS)
}

fn run_show(args: &FileArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let contracts = load(&args.file)?;
    let all = published(Crm::new(ui), &contracts)?;
    show(ui, &all, || table(&all))?;
    Ok(ExitCode::SUCCESS)
}

fn table(all: &[Published]) -> String {
    let style = style();
    let mut t = Table::new(vec![
        Column::name("contract"),
        Column::name("node"),
        Column::word(""),
        Column::name("takes"),
        Column::name("why"),
    ]);
    for p in all {
        let takes: Vec<String> = p.takes.iter().map(|(name, n)| format!("{name} {n}")).collect();
        let (word, paint) = if p.veto { ("VETO", Paint::Bad) } else { ("fits", Paint::Good) };
        t.row(vec![
            terminal(&p.resource, style.ascii).into(),
            terminal(&p.node, style.ascii).into(),
            Cell::painted(word, Some(paint)),
            terminal(&takes.join(", "), style.ascii).into(),
            terminal(&p.why, style.ascii).into(),
        ]);
    }
    t.draw(&style)
}

fn run_agent(args: &AgentArgs, global: &Global, ui: &Ui) -> ExitCode {
    if args.action == "meta-data" {
        let printed = print(METADATA);
        return printed.map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS);
    }
    let variable = |name: &str| std::env::var(name).ok();
    let code = match Parameters::of_environment(&variable, &global.dirs()) {
        Ok(parameters) => agent::run(&args.action, &parameters, ui),
        Err(why) => {
            ui.warn(&why);
            Ocf::Configured
        }
    };
    ExitCode::from(code as u8)
}
