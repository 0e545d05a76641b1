//! `rtvirtio plan --traffic`.

use std::fmt::Write as _;
use std::process::ExitCode;

use rtvirtio_console::{INFEASIBLE, Ui, show, style};
use rtvirtio_planner::neighbours::{NeighbourLimit, NeighbourPlan, VictimOutlook};
use rtvirtio_report::terminal;
use rtvirtio_report::text::{Cell, Column, Style, Table};
use rtvirtio_traffic::{Tspec, Unit};
use rtvirtio_units::{Iops, Nanos};
use rtvirtio_workflow::find::load_host;
use rtvirtio_workflow::neighbours::{LimitOptions, choose};
use rtvirtio_workflow::{Dirs, Kind, Progress, one_line};

use crate::args::PlanArgs;

/// Chooses limits for the VMs without a target, and prints them for the spec. Changes nothing.
pub fn make(args: &PlanArgs, dirs: &Dirs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let host = load_host(&args.model.spec)?;
    let options = LimitOptions {
        profile: args.model.profile.clone(),
        curve: args.curve.clone(),
        asked: args.alpha_delta.clone(),
        actuator: args.actuator.into(),
    };
    match choose(host.single()?, &options, dirs, ui) {
        Ok(plan) => {
            show(ui, &plan, || text(&plan, &style()))?;
            Ok(ExitCode::SUCCESS)
        }
        Err(e) if e.kind() == Kind::Infeasible => {
            ui.warn(&one_line(&e));
            Ok(ExitCode::from(INFEASIBLE))
        }
        Err(e) => Err(e.into()),
    }
}

fn text(plan: &NeighbourPlan, style: &Style) -> String {
    let mut out = String::new();
    for (i, limit) in plan.limits.iter().enumerate() {
        if i == 0 || plan.limits[i - 1].vm != limit.vm {
            let _ = writeln!(out, "{}", terminal(&limit.vm, style.ascii));
        }
        let _ = writeln!(out, "  {}", line(limit));
    }
    let mut table = Table::new(vec![
        Column::name("kept"),
        Column::number("alpha asked"),
        Column::number("alpha left"),
        Column::number("time asked"),
        Column::number("bound"),
        Column::number("measured alpha"),
        Column::number("measured Delta"),
    ]);
    for victim in &plan.victims {
        table.row(row(victim, style));
    }
    let _ = writeln!(out, "\n{}", table.draw(style));
    let _ = writeln!(out, "By the {}, held by {}:", plan.basis, plan.actuator);
    for note in &plan.notes {
        out += &style.wrap(&format!("- {}", terminal(note, style.ascii)), 2);
    }
    out
}

/// The line of a spec.
fn line(limit: &NeighbourLimit) -> String {
    let Tspec { unit, rate, burst, peak, .. } = limit.tspec;
    let per_second = |n: u64| match unit {
        Unit::Requests => format!("\"{n}/s\""),
        Unit::Bytes => format!("\"{n}B/s\""),
    };
    let burst = if unit == Unit::Requests { burst.to_string() } else { format!("\"{burst}B\"") };
    let peak = peak.map_or(String::new(), |peak| format!(", peak = {}", per_second(peak)));
    let name = limit.direction.name();
    let of = if limit.given { "as in the spec" } else { "chosen" };
    format!(
        "traffic.{name} = {{ rate = {}, burst = {burst}{peak} }}  # {of}, requests of at most {}",
        per_second(rate),
        limit.block
    )
}

fn row(victim: &VictimOutlook, style: &Style) -> Vec<Cell> {
    let time = |seconds: f64| Nanos::from_secs_f64(seconds).to_string();
    let name = match &victim.task {
        Some(task) => format!("{}/{task}", victim.vm),
        None => format!("{}, Delta", victim.vm),
    };
    let seen = victim.expected;
    vec![
        terminal(&name, style.ascii).into(),
        Iops(victim.rate).to_string().into(),
        Iops(victim.alpha.floor()).to_string().into(),
        time(victim.within).into(),
        victim.bound.map_or_else(|| "none".to_owned(), time).into(),
        seen.map_or_else(|| "-".to_owned(), |s| Iops(s.alpha.floor()).to_string()).into(),
        seen.map_or_else(|| "-".to_owned(), |s| time(s.delta)).into(),
    ]
}
