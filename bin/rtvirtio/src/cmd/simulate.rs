//! `rtvirtio simulate`.

use std::process::ExitCode;
use std::time::Instant;

use rtvirtio_console::{Global, INFEASIBLE, Ui, show, style};
use rtvirtio_domain_plan::{DomainPlan, FlowOutcome, NetworkSimulation, Simulation, TaskOutcome, Traffic};
use rtvirtio_report::terminal;
use rtvirtio_report::text::{Cell, Column, Paint, Table, domain_refusals};
use rtvirtio_sched::Policy;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::domain::plan::{for_simulation, with_networks};
use rtvirtio_workflow::find::load_host;
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
    /// Flows of the spec's networks, under `edf`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    networks: Vec<NetworkRun>,
}

#[derive(Serialize)]
struct NetworkRun {
    network: String,
    /// Virtual time.
    seconds: f64,
    flows: Vec<FlowOutcome>,
}

/// `rtvirtio simulate`.
pub fn run(args: &SimulateArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let host = load_host(&args.spec)?;
    let spec = host.single()?.clone();
    let dirs = global.dirs();
    let plan = with_networks(for_simulation(&spec, args.profile.as_deref(), &dirs)?, &host, &dirs);
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
    let networks = networks(&plan, traffic, args, ui)?;
    let late = networks.iter().flat_map(|n| &n.flows).filter(|f| f.met == Some(false)).count();
    let missed = missed.filter(|t| t.met == Some(false)).count() + late;
    let output = Output { simulated: true, traffic, plan, runs, networks };
    show(ui, &output, || {
        let flows = output.networks.iter().map(flow_table).collect::<String>();
        output.runs.iter().map(table).collect::<String>() + &flows + &domain_refusals(&output.plan, &style())
    })?;
    Ok(if missed == 0 && output.plan.feasible { ExitCode::SUCCESS } else { ExitCode::from(INFEASIBLE) })
}

/// Plays the flows of every network.
fn networks(
    plan: &DomainPlan,
    traffic: Traffic,
    args: &SimulateArgs,
    ui: &Ui,
) -> anyhow::Result<Vec<NetworkRun>> {
    let mut all = Vec::new();
    for network in plan.networks.iter().filter(|network| !network.flows.is_empty()) {
        let mut simulation = NetworkSimulation::new(network, traffic, args.seed)?;
        let label = format!("network {}, virtual time", terminal(&network.network, false));
        let mut bar = ui.bar(&label, args.length.0.div_ceil(STEP));
        let mut now = 0;
        while now < args.length.0 && !ui.is_cancelled() {
            now = (now + STEP).min(args.length.0);
            simulation.run(Nanos(now));
            bar.set(now / STEP);
        }
        let seconds = Nanos(now).as_secs_f64();
        all.push(NetworkRun { network: network.network.clone(), seconds, flows: simulation.outcomes() });
    }
    Ok(all)
}

fn flow_table(run: &NetworkRun) -> String {
    let style = style();
    let mut t = Table::new(vec![
        Column::name("VM"),
        Column::name("flow"),
        Column::number("frames"),
        Column::number("per second"),
        Column::number("p50"),
        Column::number("p99.99"),
        Column::number("longest"),
        Column::number("bound"),
        Column::number("target"),
        Column::word(""),
    ]);
    let text = |v: Option<Nanos>| v.map_or_else(|| "-".to_owned(), |v| v.to_string());
    for flow in &run.flows {
        t.row(vec![
            terminal(&flow.vm, style.ascii).into(),
            terminal(&flow.flow, style.ascii).into(),
            flow.n.to_string().into(),
            flow.rate.to_string().into(),
            flow.p50.to_string().into(),
            flow.p9999.to_string().into(),
            flow.longest.to_string().into(),
            text(flow.bound).into(),
            text(flow.target).into(),
            met(flow.met, flow.target),
        ]);
    }
    let network = terminal(&run.network, style.ascii);
    format!("network {network}: simulated {:.0} s, frames from VMs\n{}", run.seconds, t.draw(&style))
}

/// The verdict on a simulated task or flow.
fn met(met: Option<bool>, target: Option<Nanos>) -> Cell {
    let (word, paint) = match met {
        Some(true) => ("met", Some(Paint::Good)),
        Some(false) => ("MISSED", Some(Paint::Bad)),
        None if target.is_some() => ("flushes are not simulated", None),
        None => ("", None),
    };
    Cell::painted(word, paint)
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
            met(task.met, task.target),
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
