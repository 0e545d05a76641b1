//! `rtvirtio plan --traffic`.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::Context as _;
use rtvirtio_console::{INFEASIBLE, Ui, show, style};
use rtvirtio_kernel::trusted::CONFIG_LIMIT;
use rtvirtio_planner::neighbours::{NeighbourLimit, NeighbourPlan, VictimOutlook};
use rtvirtio_report::terminal;
use rtvirtio_report::text::{Cell, Column, Style, Table};
use rtvirtio_text::shell_path;
use rtvirtio_traffic::{Actuator, Unit};
use rtvirtio_units::{Iops, Nanos};
use rtvirtio_workflow::named::named_host;
use rtvirtio_workflow::neighbours::{DeviceLimits, LimitOptions, as_toml, choose, with_limits};
use rtvirtio_workflow::{Dirs, Kind, Progress, check_writable, one_line, write_file};

use super::title;
use crate::args::PlanArgs;

/// Chooses limits for the VMs without a target, and prints them for the spec; with `--out` also
/// writes the spec with them. Changes nothing else.
pub fn make(args: &PlanArgs, dirs: &Dirs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let spec = &args.model.spec;
    let host = named_host(spec)?;
    if let Some(out) = &args.out {
        check_writable(out)?;
    }
    let options = LimitOptions {
        profile: args.model.profile.clone(),
        curve: args.curve.clone(),
        asked: args.alpha_delta.clone(),
        actuator: args.actuator.into(),
    };
    let found = match choose(&host, &options, dirs, ui) {
        Ok(found) => found,
        Err(e) if e.kind() == Kind::Infeasible => {
            ui.warn(&one_line(&e));
            return Ok(ExitCode::from(INFEASIBLE));
        }
        Err(e) => return Err(e.into()),
    };
    if let Some(out) = &args.out {
        let name = spec.display().to_string();
        let before = rtvirtio_kernel::trusted::read_config_text(spec, CONFIG_LIMIT)
            .with_context(|| format!("cannot read {name}"))?;
        let limits = found.iter().flat_map(|of| &of.plan.limits);
        write_file(out, with_limits(&name, &before, limits)?.as_bytes())?;
        let out = terminal(&shell_path(out), false);
        ui.step(&match options.actuator {
            Actuator::IoDomain => format!("saved {out}; `rtvirtio plan {out} --domain` takes its limits"),
            _ => format!("saved {out}; `rtvirtio apply {out} --traffic-only` sets its limits"),
        });
    }
    let shown = || {
        let one =
            |of: &DeviceLimits| title(of.device.as_deref(), host.parts().len()) + &text(&of.plan, &style());
        found.iter().map(one).collect::<Vec<_>>().join("\n")
    };
    match &found[..] {
        [one] => show(ui, one, shown)?,
        all => show(ui, &all, shown)?,
    }
    Ok(ExitCode::SUCCESS)
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

/// Line for a spec file.
fn line(limit: &NeighbourLimit) -> String {
    let of = if limit.given { "as in the spec" } else { "chosen" };
    // The kernel may let less through than a limit of the spec says.
    let kept = if limit.tspec.unit == Unit::Requests && limit.kept.rate < limit.tspec.rate as f64 {
        format!(", {} pass", Iops(limit.kept.rate))
    } else {
        String::new()
    };
    format!(
        "traffic.{} = {}  # {of}{kept}, requests of at most {}",
        limit.direction.name(),
        as_toml(&limit.tspec),
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

#[cfg(test)]
mod tests {
    use rtvirtio_traffic::{Arrival, Direction, Tspec};
    use rtvirtio_units::Bytes;

    use super::*;

    #[test]
    fn a_limit_of_which_less_passes_says_so() {
        let of = |rate, kept| NeighbourLimit {
            vm: "bulk".to_owned(),
            direction: Direction::Read,
            block: Bytes::from_kib(4),
            tspec: Tspec { unit: Unit::Requests, rate, burst: 2, peak: None, largest: 1 },
            kept: Arrival { rate: kept, burst: 7.0, peak: None },
            given: true,
        };
        let text = line(&of(78, 70.0));
        assert!(text.ends_with("# as in the spec, 70/s pass, requests of at most 4KiB"), "{text}");
        let text = line(&of(70, 70.0));
        assert!(text.ends_with("# as in the spec, requests of at most 4KiB"), "{text}");
    }
}
