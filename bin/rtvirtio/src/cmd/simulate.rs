//! `rtvirtio simulate`.

use std::process::ExitCode;
use std::time::Instant;

use rtvirtio_console::{Global, INFEASIBLE, Ui, show, style};
use rtvirtio_domain_plan::{DomainPlan, FlowOutcome, NetworkSimulation, Simulation, TaskOutcome, Traffic};
use rtvirtio_report::terminal;
use rtvirtio_report::text::{Cell, Column, Paint, Table, domain_refusals};
use rtvirtio_sched::Policy;
use rtvirtio_units::{Iops, Nanos};
use rtvirtio_workflow::Progress;
use rtvirtio_workflow::domain::plan::{for_simulation, with_networks};
use rtvirtio_workflow::named::named_host;
use serde::Serialize;

use crate::args::{PolicyName, SimulateArgs};

/// Virtual time between checks of the clock and for Ctrl-C.
const STEP: u64 = 1_000_000_000;

#[derive(Serialize)]
struct Run {
    policy: &'static str,
    /// Simulated time, in seconds.
    seconds: f64,
    requests: u64,
    /// Simulated requests per second of real time, on one CPU.
    requests_per_second: f64,
    tasks: Vec<TaskOutcome>,
}

#[derive(Serialize)]
struct Output {
    /// Always true: no number here was measured.
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
    /// Simulated time, in seconds.
    seconds: f64,
    flows: Vec<FlowOutcome>,
}

pub fn run(args: &SimulateArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let host = named_host(&args.spec)?;
    let spec = host.single()?.clone();
    let dirs = global.dirs();
    let plan = for_simulation(&spec, args.profile.as_deref(), &dirs)?;
    let plan = with_networks(plan, &host, &dirs, ui);
    // Converted through the configuration, so that the simulation has what an I/O domain would
    // read.
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
        let seconds = play(policy.name(), args.length, ui, |until| Ok(simulation.run(until)?))?;
        let requests = simulation.result().requests;
        runs.push(Run {
            policy: policy.name(),
            seconds,
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
        output.runs.iter().map(task_table).collect::<String>()
            + &flows
            + &domain_refusals(&output.plan, &style())
    })?;
    Ok(if missed == 0 && output.plan.feasible { ExitCode::SUCCESS } else { ExitCode::from(INFEASIBLE) })
}

/// Runs the simulation in steps, with progress, until its end or Ctrl-C; returns the seconds that
/// have passed.
fn play(
    what: &str,
    length: Nanos,
    ui: &Ui,
    mut run: impl FnMut(Nanos) -> anyhow::Result<()>,
) -> anyhow::Result<f64> {
    let mut bar = ui.bar(&format!("{what}, virtual time"), length.0.div_ceil(STEP));
    let mut now = 0;
    while now < length.0 && !ui.is_cancelled() {
        now = (now + STEP).min(length.0);
        run(Nanos(now))?;
        bar.set(now / STEP);
    }
    Ok(Nanos(now).as_secs_f64())
}

/// Simulates the flows of every network.
fn networks(
    plan: &DomainPlan,
    traffic: Traffic,
    args: &SimulateArgs,
    ui: &Ui,
) -> anyhow::Result<Vec<NetworkRun>> {
    let mut all = Vec::new();
    for network in plan.networks.iter().filter(|network| !network.flows.is_empty()) {
        let mut simulation = NetworkSimulation::new(network, traffic, args.seed)?;
        let label = format!("network {}", terminal(&network.network, false));
        let seconds = play(&label, args.length, ui, |until| {
            simulation.run(until);
            Ok(())
        })?;
        all.push(NetworkRun { network: network.network.clone(), seconds, flows: simulation.outcomes() });
    }
    Ok(all)
}

fn flow_table(run: &NetworkRun) -> String {
    let row = |flow: &FlowOutcome| Row {
        vm: flow.vm.clone(),
        name: flow.flow.clone(),
        n: flow.n,
        rate: flow.rate,
        latencies: [Some(flow.p50), Some(flow.p9999), Some(flow.longest), flow.bound, flow.target],
        met: flow.met,
    };
    let rows = run.flows.iter().map(row);
    let network = terminal(&run.network, style().ascii);
    format!(
        "network {network}: simulated {:.0} s, frames from VMs\n{}",
        run.seconds,
        table(["flow", "frames"], rows)
    )
}

fn task_table(run: &Run) -> String {
    let row = |task: &TaskOutcome| Row {
        vm: task.vm.clone(),
        name: task.task.clone(),
        n: task.n,
        rate: task.rate,
        latencies: [Some(task.p50), Some(task.p9999), Some(task.longest), task.bound, task.target],
        met: task.met,
    };
    format!(
        "{}: simulated {:.0} s, {} requests, {:.2} million per second of CPU\n{}",
        run.policy,
        run.seconds,
        run.requests,
        run.requests_per_second / 1e6,
        table(["task", "requests"], run.tasks.iter().map(row))
    )
}

/// A task or flow in the output.
struct Row {
    vm: String,
    name: String,
    n: u64,
    rate: Iops,
    /// p50, p99.99, longest, bound, target.
    latencies: [Option<Nanos>; 5],
    met: Option<bool>,
}

fn table([what, counted]: [&'static str; 2], rows: impl Iterator<Item = Row>) -> String {
    let style = style();
    let numbers = [counted, "per second", "p50", "p99.99", "longest", "bound", "target"];
    let mut columns = vec![Column::name("VM"), Column::name(what)];
    columns.extend(numbers.map(Column::number));
    columns.push(Column::word(""));
    let mut t = Table::new(columns);
    for row in rows {
        let mut cells: Vec<Cell> = vec![
            terminal(&row.vm, style.ascii).into(),
            terminal(&row.name, style.ascii).into(),
            row.n.to_string().into(),
            row.rate.to_string().into(),
        ];
        let latency = |v: &Option<Nanos>| v.map_or_else(|| "-".to_owned(), |v| v.to_string()).into();
        cells.extend(row.latencies.iter().map(latency));
        cells.push(met(row.met, row.latencies[4]));
        t.row(cells);
    }
    t.draw(&style)
}

/// Verdict on a simulated task or flow.
fn met(met: Option<bool>, target: Option<Nanos>) -> Cell {
    let (word, paint) = match met {
        Some(true) => ("met", Some(Paint::Good)),
        Some(false) => ("MISSED", Some(Paint::Bad)),
        None if target.is_some() => ("flushes are not simulated", None),
        None => ("", None),
    };
    Cell::painted(word, paint)
}
