//! `rtvirtio profile cpu`.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use rtvirtio_console::{Global, Ui, generated, show, style, write_result};
use rtvirtio_cpu::{CpuProfile, Point};
use rtvirtio_report::text::{Column, Table};
use rtvirtio_units::{Iops, Nanos};
use rtvirtio_workflow::check_writable;
use rtvirtio_workflow::named::named_host;
use rtvirtio_workflow::profile_cpu::{LoadWith, ProfileCpuOptions, partial, profile_cpu};
use rtvirtio_workflow::{Error, Kind, Progress, one_line};

use crate::args::ProfileCpuArgs;

/// `rtvirtio profile cpu`; root is checked by the caller.
pub fn run(args: &ProfileCpuArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    args.out.as_deref().map_or(Ok(()), check_writable)?;
    let dirs = &global.dirs();
    let _lock = dirs.lock_vms()?;
    let host =
        args.spec.as_deref().map(|path| Ok::<_, anyhow::Error>((named_host(path)?, path))).transpose()?;
    let load = load_with(args.url.as_deref(), args.load.as_deref()).context("nothing loads the VM")?;
    let neighbour = match &args.neighbour {
        None => None,
        Some(name) => {
            let load = load_with(args.neighbour_url.as_deref(), args.neighbour_load.as_deref())
                .context("say how the neighbour is loaded: --neighbour-url or --neighbour-load")?;
            Some((name.as_str(), load))
        }
    };
    let write = |path: &Path, content: &[u8]| {
        write_result(path, content, global).map_err(|e| Error::new(Kind::System, one_line(e.as_ref())))
    };
    let options = ProfileCpuOptions {
        vm: &args.vm,
        spec: host.as_ref().map(|(host, path)| (host.vms(), *path)),
        load,
        connections: args.connections,
        neighbour,
        neighbour_budgets: &args.neighbour_budgets,
        budgets: &args.budgets,
        period: args.period,
        length: args.length,
        repeat: args.repeat,
        generated: &generated(),
        out: args.out.as_deref(),
        write: &write,
    };
    let (profile, path) = profile_cpu(&options, dirs, ui)?;
    let json = profile.to_json()?;
    // Printed first: a full disk must not cost the measurement.
    show(ui, &json, || text(&profile))?;
    write_result(&path, serde_json::to_string_pretty(&json)?.as_bytes(), global)?;
    // The partial result has nothing that the saved profile lacks.
    let _ = std::fs::remove_file(partial(&path));
    ui.step(&format!("saved {}", path.display()));
    Ok(ExitCode::SUCCESS)
}

fn load_with<'a>(url: Option<&'a str>, command: Option<&'a str>) -> Option<LoadWith<'a>> {
    url.map(LoadWith::Url).or(command.map(LoadWith::Command))
}

fn text(profile: &CpuProfile) -> String {
    let s = &profile.setup;
    let mut table = Table::new(vec![
        Column::word("neighbour"),
        Column::number("budget"),
        Column::number("answered"),
        Column::number("sd"),
        Column::number("at least (95 %)"),
        Column::number("n"),
        Column::number("CPU of one"),
    ]);
    let row = |p: &Point| {
        vec![
            p.neighbour_percent.map_or_else(|| "none".to_owned(), |n| format!("{n} %")).into(),
            format!("{} %", p.budget_percent).into(),
            Iops(p.mean).to_string().into(),
            Iops(p.sd).to_string().into(),
            p.lower.map_or_else(|| "-".to_owned(), |l| Iops(l).to_string()).into(),
            p.n.to_string().into(),
            p.cpu_per_request.map_or_else(|| "-".to_owned(), |c| Nanos::from_secs_f64(c).to_string()).into(),
        ]
    };
    for point in profile.points() {
        table.row(row(&point));
    }
    format!(
        "{}: requests answered over its budget in a period of {}, held by {} ({} without a contract)\n{}",
        s.vm,
        profile.period(),
        s.backend,
        Iops(profile.free_requests_per_s),
        table.draw(&style())
    )
}
