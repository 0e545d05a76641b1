//! `rtvirtio simulate`.

use std::process::ExitCode;
use std::time::Instant;

use rtvirtio_console::{Global, INFEASIBLE, Ui, show, style};
use rtvirtio_domain_plan::{DomainPlan, Simulation, TaskOutcome, Traffic};
use rtvirtio_report::terminal;
use rtvirtio_report::text::{Cell, Column, Paint, Table, domain_refusals};
use rtvirtio_sched::Policy;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::domain::plan::for_simulation;
use rtvirtio_workflow::find::load_spec;
use serde::Serialize;

use crate::args::{PolicyName, SimulateArgs};

/// Virtual time between checks of the clock and for Ctrl-C.
const STEP: u64 = 1_000_000_000;

#[derive(Serialize)]
struct Run {
    policy: &'static str,
    /// Virtual time.
    seconds: f64,
    requests: u64,
    /// Simulated requests per second of one CPU.
    requests_per_second: f64,
    tasks: Vec<TaskOutcome>,
}

#[derive(Serialize)]
struct Output {
    /// No number here comes from a machine.
    simulated: bool,
    traffic: Traffic,
    plan: DomainPlan,
    runs: Vec<Run>,
}

/// `rtvirtio simulate`.
pub fn run(args: &SimulateArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let spec = load_spec(&args.spec)?;
    let plan = for_simulation(&spec, args.profile.as_deref(), &global.dirs())?;
    // Through the file, so that what is simulated is what a domain would read.
    let planned = plan.sched()?;
    let traffic = if args.worst { Traffic::Worst } else { Traffic::Declared };
    let mut runs = Vec::new();
    for policy in &args.policies {
        let policy = match policy {
            PolicyName::Fifo => Policy::Fifo,
            PolicyName::RoundRobin => Policy::RoundRobin,
            PolicyName::Drr => Policy::Drr,
            PolicyName::Edf => Policy::Edf,
        };
        let mut config = planned.clone();
        config.policy = policy;
        let mut simulation =
            Simulation::new(&spec, &plan, &config, traffic, policy == Policy::Edf, args.seed)?;
        let begin = Instant::now();
        let mut bar = ui.bar(&format!("{}, virtual time", policy.name()), args.length.0.div_ceil(STEP));
        let mut now = 0;
        while now < args.length.0 && !ui.is_cancelled() {
            now = (now + STEP).min(args.length.0);
            simulation.run(Nanos(now))?;
            bar.set(now / STEP);
        }
        drop(bar);
        let requests = simulation.result().requests;
        runs.push(Run {
            policy: policy.name(),
            seconds: Nanos(now).as_secs_f64(),
            requests,
            requests_per_second: requests as f64 / begin.elapsed().as_secs_f64().max(1e-9),
            tasks: simulation.outcomes(),
        });
        if ui.is_cancelled() {
            ui.warn("stopped as asked; this is what was seen so far");
            break;
        }
    }
    let missed = runs.iter().filter(|r| r.policy == Policy::Edf.name()).flat_map(|r| &r.tasks);
    let missed = missed.filter(|t| t.met == Some(false)).count();
    let output = Output { simulated: true, traffic, plan, runs };
    show(ui, &output, || {
        output.runs.iter().map(table).collect::<String>() + &domain_refusals(&output.plan, &style())
    })?;
    Ok(if missed == 0 && output.plan.feasible { ExitCode::SUCCESS } else { ExitCode::from(INFEASIBLE) })
}

fn table(run: &Run) -> String {
    let style = style();
    let mut t = Table::new(vec![
        Column::name("VM"),
        Column::name("task"),
        Column::number("requests"),
        Column::number("per second"),
        Column::number("p50"),
        Column::number("p99.99"),
        Column::number("longest"),
        Column::number("bound"),
        Column::number("target"),
        Column::word(""),
    ]);
    let text = |v: Option<Nanos>| v.map_or_else(|| "-".to_owned(), |v| v.to_string());
    for task in &run.tasks {
        let (word, paint) = match task.met {
            Some(true) => ("met", Some(Paint::Good)),
            Some(false) => ("MISSED", Some(Paint::Bad)),
            None if task.target.is_some() => ("flushes are not simulated", None),
            None => ("", None),
        };
        t.row(vec![
            terminal(&task.vm, style.ascii).into(),
            terminal(&task.task, style.ascii).into(),
            task.n.to_string().into(),
            task.rate.to_string().into(),
            task.p50.to_string().into(),
            task.p9999.to_string().into(),
            task.longest.to_string().into(),
            text(task.bound).into(),
            text(task.target).into(),
            Cell::painted(word, paint),
        ]);
    }
    format!(
        "{}: simulated {:.0} s, {} requests, {:.2} million per second of CPU\n{}",
        run.policy,
        run.seconds,
        run.requests,
        run.requests_per_second / 1e6,
        t.draw(&style)
    )
}
