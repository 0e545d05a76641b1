//! From arguments to reports.

mod daemon;

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::Context;
use rtvirtio_console::{Global, MISSED, Ui, generated, need_root, show, write_file};
use rtvirtio_experiments::cases::{CaseOptions, Tier, cases};
use rtvirtio_experiments::daemon::scale::sleep_with;
use rtvirtio_experiments::fleet_cluster::Parts;
use rtvirtio_experiments::regulation::planned;
use rtvirtio_experiments::report::{ExperimentReport, read, save};
use rtvirtio_experiments::reservation::kills::{KillAt, run_child};
use rtvirtio_experiments::run_basis::check_out;
use rtvirtio_experiments::{
    accuracy, before_after, cases, contention, cyclictest, directory, fleet, fleet_cluster, host, iod,
    iod_attach, iod_crash, iod_startup, net, paravirt, planning, regulation, reservation, responsiveness,
    sweep, tails,
};
use rtvirtio_harness::test_bed::{device_name, spec_device};
use rtvirtio_learn::dataset::Dataset;
use rtvirtio_paper::PaperModels;
use rtvirtio_testbed::LabHost;
use rtvirtio_units::Bytes;
use rtvirtio_workflow::{Progress as _, check_writable, model_choice};

use crate::args::{
    BenchAccuracyArgs, BenchBeforeAfterArgs, BenchCasesArgs, BenchCommand, BenchContentionArgs,
    BenchCyclictestArgs, BenchFleetArgs, BenchFleetClusterArgs, BenchHostArgs, BenchIodArgs,
    BenchIodAttachArgs, BenchIodCrashArgs, BenchIodStartupArgs, BenchNetArgs, BenchParavirtArgs,
    BenchPlanArgs, BenchRegulationArgs, BenchReportArgs, BenchReservationArgs, BenchResponsivenessArgs,
    BenchResult, BenchSweepArgs, BenchTailsArgs, PartName,
};
use daemon::{run_daemon, run_daemon_day, run_daemon_scale};

pub fn run(command: &BenchCommand, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    match command {
        BenchCommand::Sweep(args) => run_sweep(args, global, ui),
        BenchCommand::Cases(args) => run_cases(args, global, ui),
        BenchCommand::Contention(args) => run_contention(args, global, ui),
        BenchCommand::Accuracy(args) => run_accuracy(args, ui),
        BenchCommand::BeforeAfter(args) => run_before_after(args, global, ui),
        BenchCommand::Plan(args) => run_plan(args, ui),
        BenchCommand::Iod(args) => run_iod(args, global, ui),
        BenchCommand::Daemon(args) => run_daemon(args, global, ui),
        BenchCommand::DaemonDay(args) => run_daemon_day(args, global, ui),
        BenchCommand::DaemonScale(args) => run_daemon_scale(args, ui),
        BenchCommand::IodAttach(args) => run_iod_attach(args, ui),
        BenchCommand::IodCrash(args) => run_iod_crash(args, global, ui),
        BenchCommand::IodStartup(args) => run_iod_startup(args, global, ui),
        BenchCommand::Responsiveness(args) => run_responsiveness(args, global, ui),
        BenchCommand::Net(args) => run_net(args, global, ui),
        BenchCommand::Tails(args) => run_tails(args, global, ui),
        BenchCommand::Cyclictest(args) => run_cyclictest(args, global, ui),
        BenchCommand::Paravirt(args) => run_paravirt(args, global, ui),
        BenchCommand::Reservation(args) => run_reservation(args, global, ui),
        BenchCommand::Regulation(args) => run_regulation(args, global, ui),
        BenchCommand::Fleet(args) => run_fleet(args, ui),
        BenchCommand::FleetCluster(args) => run_fleet_cluster(args, global, ui),
        BenchCommand::Host(args) => run_host(args, global, ui),
        BenchCommand::KillAt(args) => run_child(&args.options()).map(|()| ExitCode::SUCCESS),
        BenchCommand::Sleeper(args) => sleep_with(args.threads).map(|()| ExitCode::SUCCESS),
        BenchCommand::Report(args) => run_report(args, ui),
    }
}

/// Prints a report, and writes its page. Exit code 2 when a claim is not met.
fn print(
    mut report: ExperimentReport,
    title: &str,
    html: Option<&Path>,
    ui: &Ui,
) -> anyhow::Result<ExitCode> {
    if let Some(out) = html {
        write_file(out, report.html(title, generated()).as_bytes())?;
        ui.step(&format!("wrote {}", out.display()));
    }
    let is_met = report.is_met();
    let (file, text) = report.into_file();
    show(ui, &file, || text)?;
    Ok(if is_met { ExitCode::SUCCESS } else { ExitCode::from(MISSED) })
}

/// Prints the report of a saved result.
fn print_result(
    report: fn(&Path) -> anyhow::Result<ExperimentReport>,
    path: &Path,
    title: &str,
    result: &BenchResult,
    ui: &Ui,
) -> anyhow::Result<ExitCode> {
    print(report(path)?, title, result.html.as_deref(), ui)
}

/// Refuses a result that cannot be written, before anything is measured.
fn check_result(result: &BenchResult) -> anyhow::Result<()> {
    check_out(&result.out)?;
    check_page(result.html.as_deref())
}

fn check_page(html: Option<&Path>) -> anyhow::Result<()> {
    html.map_or(Ok(()), check_writable).context("--html")
}

fn run_sweep(args: &BenchSweepArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let options = args.options();
    options.check()?;
    need_root("bench sweep")?;
    sweep::measure(&options, &lab_host(global), ui)?;
    Ok(ExitCode::SUCCESS)
}

fn run_cases(args: &BenchCasesArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    if let Some(dir) = &args.write {
        return write_specs(dir, ui);
    }
    let options = args.options();
    if !args.runs.report_only {
        options.check()?;
        check_page(args.runs.html.as_deref())?;
        need_root("bench cases")?;
        cases::measure(&options, &lab_host(global), ui)?;
    }
    let data = Dataset::load(&options.path())?;
    let title = format!("rtvirtio: cases on {}", data.header.host.device);
    let report = cases::report(&options.tiers, &data).with_suffix(&options.data_name());
    print(report, &title, args.runs.html.as_deref(), ui)
}

/// The spec files of `examples/cases`.
fn write_specs(dir: &Path, ui: &Ui) -> anyhow::Result<ExitCode> {
    let mut n = 0;
    for tier in Tier::ALL {
        for case in cases(tier, &CaseOptions { writes: 0.0, third_of: None }) {
            write_file(&dir.join(format!("{}.toml", case.name)), case.toml().as_bytes())?;
            n += 1;
        }
    }
    ui.step(&format!("wrote {n} specs in {}", dir.display()));
    Ok(ExitCode::SUCCESS)
}

fn run_contention(args: &BenchContentionArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let options = args.options();
    let model = args.runs.model.as_deref();
    let (learned, paper) = (model_choice::read_if(model)?, PaperModels::read_if(model)?);
    if !args.runs.report_only {
        options.check()?;
        check_page(args.runs.html.as_deref())?;
        need_root("bench contention")?;
        contention::measure(&options, &lab_host(global), ui)?;
    }
    let data = Dataset::load(&options.path())?;
    let title = format!("rtvirtio: contention on {}", data.header.host.device);
    let report = contention::report((learned.as_ref(), &paper), &data, ui)?
        .with_suffix(device_name(&args.runs.device));
    print(report, &title, args.runs.html.as_deref(), ui)
}

fn run_accuracy(args: &BenchAccuracyArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let reports = args.data.iter().map(|path| accuracy::report(path, &args.options(), ui));
    let reports = reports.collect::<anyhow::Result<Vec<_>>>()?;
    let all = reports.into_iter().reduce(ExperimentReport::and).context("no dataset was given")?;
    print(all, "rtvirtio: accuracy of the models", args.html.as_deref(), ui)
}

fn run_fleet(args: &BenchFleetArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(fleet::FILE);
    if !args.result.report_only {
        check_result(&args.result)?;
        save(&path, &fleet::measure(&args.options(), ui)?, ui)?;
    }
    let mut report = fleet::report(&path)?;
    // The saved result of a real cluster in this directory is reported too.
    let cluster = args.result.out.join(fleet_cluster::FILE);
    if cluster.exists() {
        report = report.and(fleet_cluster::report(&cluster)?);
    }
    let slow = args.result.out.join(fleet_cluster::slow::FILE);
    if slow.exists() {
        report = report.and(fleet_cluster::slow::report(&slow)?);
    }
    print(report, "rtvirtio: fleets", args.result.html.as_deref(), ui)
}

fn run_fleet_cluster(args: &BenchFleetClusterArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let vms = args.cluster_vms();
    let file = if args.slow { fleet_cluster::slow::FILE } else { vms.file() };
    let path = args.result.out.join(file);
    if !args.result.report_only {
        check_result(&args.result)?;
        need_root("bench fleet-cluster")?;
        let own = std::env::current_exe()?.with_file_name("rtvirtio-pacemaker");
        let program = args.program.as_deref().unwrap_or(&own);
        let parts = Parts { program, agent: include_str!("../../rtvirtio-pacemaker/VirtualDomain") };
        if args.slow {
            save(&path, &fleet_cluster::slow::measure(args.repeat, parts, &lab_host(global), ui)?, ui)?;
        } else {
            save(&path, &fleet_cluster::measure(args.repeat, vms, parts, ui)?, ui)?;
        }
    }
    let report = if args.slow { fleet_cluster::slow::report } else { fleet_cluster::report };
    print_result(report, &path, "rtvirtio: contracts in a cluster", &args.result, ui)
}

fn run_plan(args: &BenchPlanArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(planning::FILE);
    if !args.result.report_only {
        let model = args.model.as_deref();
        let planning = planning::measure(args.repeat.max(1), model)?;
        save(&path, &planning, ui)?;
    }
    print_result(planning::report, &path, "rtvirtio: planning", &args.result, ui)
}

fn run_iod(args: &BenchIodArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(iod::FILE);
    if !args.result.report_only {
        spec_device(&args.device)?;
        check_result(&args.result)?;
        need_root("bench iod")?;
        save(&path, &iod::measure(&args.options(), &lab_host(global), ui)?, ui)?;
    }
    let all = directory::iod_report(&args.result.out)?;
    let all = all.with_context(|| format!("{} holds no result", args.result.out.display()))?;
    print(all, "rtvirtio: the I/O domain", args.result.html.as_deref(), ui)
}

fn run_iod_attach(args: &BenchIodAttachArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(iod_attach::FILE);
    if !args.result.report_only {
        check_result(&args.result)?;
        need_root("bench iod-attach")?;
        save(&path, &iod_attach::measure(&args.options(), ui)?, ui)?;
    }
    print_result(iod_attach::report, &path, "rtvirtio: disks come and go", &args.result, ui)
}

fn run_iod_crash(args: &BenchIodCrashArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(iod_crash::FILE);
    if !args.result.report_only {
        spec_device(&args.device)?;
        check_result(&args.result)?;
        need_root("bench iod-crash")?;
        save(&path, &iod_crash::measure(&args.options(), &lab_host(global), ui)?, ui)?;
    }
    print_result(iod_crash::report, &path, "rtvirtio: the I/O domain, killed", &args.result, ui)
}

fn run_iod_startup(args: &BenchIodStartupArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(iod_startup::FILE);
    if !args.result.report_only {
        spec_device(&args.device)?;
        check_result(&args.result)?;
        need_root("bench iod-startup")?;
        save(&path, &iod_startup::measure(&args.options(), &lab_host(global), ui)?, ui)?;
    }
    print_result(iod_startup::report, &path, "rtvirtio: start-up of an application", &args.result, ui)
}

fn run_responsiveness(args: &BenchResponsivenessArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(responsiveness::FILE);
    if !args.result.report_only {
        let options = args.options();
        options.check()?;
        check_result(&args.result)?;
        need_root("bench responsiveness")?;
        responsiveness::measure(&options, &path, &lab_host(global), ui)?;
    }
    if let Some(dir) = &args.svg {
        save_figures(dir, responsiveness::svg(&path)?, ui)?;
    }
    print_result(responsiveness::report, &path, "rtvirtio: responsiveness", &args.result, ui)
}

fn run_net(args: &BenchNetArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let (parts, path) = (args.parts(), args.result.out.join(net::FILE));
    let timeline = args.result.out.join(net::timeline::FILE);
    if !args.result.report_only {
        check_result(&args.result)?;
        need_root("bench net")?;
        let labs = lab_host(global);
        if !parts.is_empty() {
            // Read first, so that an unreadable file costs no measurement.
            let before: Option<net::NetData> =
                if args.only.is_empty() || !path.exists() { None } else { Some(read(&path)?) };
            let mut data = net::measure(&args.options(), &parts, &labs, ui)?;
            if let Some(mut all) = before {
                all.merge(data);
                data = all;
            }
            save(&path, &data, ui)?;
        }
        if args.has_timeline() {
            save(&timeline, &net::timeline::measure_timeline(args.cap, &labs, ui)?, ui)?;
        }
    }
    if let Some(dir) = args.svg.as_ref().filter(|_| args.has_timeline()) {
        write_picture(dir, net::timeline::svg(&timeline)?, ui)?;
    }
    let report = match (parts.is_empty(), args.has_timeline()) {
        (true, _) => net::timeline::report(&timeline)?,
        (false, true) => net::report(&path)?.and(net::timeline::report(&timeline)?),
        (false, false) => net::report(&path)?,
    };
    print(report, "rtvirtio: networks of the I/O domain", args.result.html.as_deref(), ui)
}

fn write_picture(dir: &Path, (name, text): (&str, String), ui: &Ui) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    write_file(&dir.join(name), text.as_bytes())?;
    ui.step(&format!("wrote {}", dir.join(name).display()));
    Ok(())
}

fn run_tails(args: &BenchTailsArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(tails::FILE);
    if !args.result.report_only {
        spec_device(&args.device)?;
        check_result(&args.result)?;
        need_root("bench tails")?;
        tails::measure(&args.options(), &path, &lab_host(global), ui)?;
        ui.step(&format!("wrote {}", path.display()));
    }
    print_result(tails::report, &path, "rtvirtio: tails from few samples", &args.result, ui)
}

fn run_before_after(args: &BenchBeforeAfterArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(before_after::FILE);
    if !args.result.report_only {
        check_result(&args.result)?;
        need_root("bench before-after")?;
        before_after::measure(&args.options(), &path, &lab_host(global), ui)?;
        ui.step(&format!("wrote {}", path.display()));
    }
    print_result(before_after::report, &path, "rtvirtio: the first tour", &args.result, ui)
}

/// Writes figures: name and text of each.
fn save_figures(dir: &Path, figures: Vec<(String, String)>, ui: &Ui) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    for (name, text) in figures {
        write_file(&dir.join(name), text.as_bytes())?;
    }
    ui.step(&format!("wrote figures into {}", dir.display()));
    Ok(())
}

fn run_regulation(args: &BenchRegulationArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    if args.only == Some(PartName::Plan) {
        let path = args.result.out.join(planned::FILE);
        if !args.result.report_only {
            check_result(&args.result)?;
            need_root("bench regulation")?;
            save(&path, &planned::measure(&args.planned(), &lab_host(global), ui)?, ui)?;
        }
        return print_result(planned::report, &path, "rtvirtio: planned limits", &args.result, ui);
    }
    let path = args.result.out.join(regulation::FILE);
    if !args.result.report_only {
        check_result(&args.result)?;
        need_root("bench regulation")?;
        let found = if args.add {
            regulation::add(regulation::load(&path)?, &args.options(), ui)?
        } else {
            regulation::measure(&args.options(), ui)?
        };
        save(&path, &found, ui)?;
    }
    if let Some(out) = &args.curve {
        let curve = regulation::victim_curve(&regulation::load(&path)?.victims);
        let curve = curve.context("the result has no victim: measure without --add first")?;
        write_file(out, &serde_json::to_vec_pretty(&curve)?)?;
        ui.step(&format!("wrote the victim's curve to {}", out.display()));
    }
    if let Some(dir) = &args.svg {
        save_figures(dir, regulation::svg(&path)?, ui)?;
    }
    print_result(regulation::report, &path, "rtvirtio: regulated traffic", &args.result, ui)
}

fn run_cyclictest(args: &BenchCyclictestArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(cyclictest::FILE);
    if !args.result.report_only {
        check_result(&args.result)?;
        need_root("bench cyclictest")?;
        cyclictest::measure(&args.options(), &path, &lab_host(global), ui)?;
    }
    print_result(cyclictest::report, &path, "rtvirtio: latency in a guest", &args.result, ui)
}

fn run_paravirt(args: &BenchParavirtArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let options = args.options();
    let path = args.result.out.join(options.file());
    if !args.result.report_only {
        check_result(&args.result)?;
        need_root("bench paravirt")?;
        paravirt::measure(&options, &path, &lab_host(global), ui)?;
    }
    if let Some(dir) = &args.svg {
        save_figures(dir, vec![paravirt::svg(&path)?], ui)?;
    }
    print_result(paravirt::report, &path, "rtvirtio: what a guest says is urgent", &args.result, ui)
}

fn run_reservation(args: &BenchReservationArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(reservation::FILE);
    if !args.result.report_only {
        check_result(&args.result)?;
        need_root("bench reservation")?;
        let labs = lab_host(global);
        let data = if args.kills {
            reservation::with_kills(read(&path)?, &kill_command, &labs, ui)?
        } else {
            reservation::measure(&args.options(), &kill_command, &labs, ui)?
        };
        save(&path, &data, ui)?;
    }
    print_result(reservation::report, &path, "rtvirtio: CPU contracts", &args.result, ui)
}

/// This program as the child process that is killed: `rtvirtio-bench kill-at`.
fn kill_command(run: &KillAt<'_>) -> std::io::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .args(["kill-at", run.action.name(), run.order.name(), "--at", &run.at.to_string()])
        .args(["--vm", run.vm, "--pid", &run.pid.to_string(), "--state"])
        .arg(run.state);
    Ok(command)
}

fn run_host(args: &BenchHostArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let mut path = args.out.join(host::FILE);
    if !args.report_only {
        let options = args.options(global)?;
        let work = host::prepare(&options)?;
        if args.dry_run {
            show(ui, &work.planned(&options), || work.describe(&options))?;
            return Ok(ExitCode::SUCCESS);
        }
        check_out(&args.out)?;
        check_page(args.html.as_deref())?;
        need_root("bench host")?;
        ui.step(&format!("what is measured, and what it touches:\n{}", work.describe(&options)));
        path = host::measure(work, &options, ui)?;
        ui.step(&format!("wrote {}", path.display()));
    }
    let page = args.html.clone().unwrap_or_else(|| path.with_extension("html"));
    print(host::report(&path)?, "rtvirtio: what this host can do", Some(&page), ui)
}

fn run_report(args: &BenchReportArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let report = directory::report(&args.data, ui)?;
    let made = [(&args.markdown, report.markdown()), (&args.table, report.table())];
    for (out, text) in made.iter().filter_map(|(out, text)| Some((out.as_ref()?, text))) {
        write_file(out, text.as_bytes())?;
        ui.step(&format!("wrote {}", out.display()));
    }
    print(report, "rtvirtio: experiments", args.html.as_deref(), ui)
}

/// Labs on this program's directories. Their twins are served by the `rtvirtio-lab` next to it.
fn lab_host(global: &Global) -> LabHost {
    LabHost { dirs: global.dirs(), cache_dir: global.cache_dir.clone(), twin_server }
}

fn twin_server(profile: &str, size: Bytes, mount: &Path) -> Command {
    let lab = std::env::current_exe().map(|this| this.with_file_name("rtvirtio-lab"));
    let mut command = Command::new(lab.unwrap_or_else(|_| "rtvirtio-lab".into()));
    command.arg("twin-serve").args(["--profile", profile, "--size", &size.to_string(), "--mount"]).arg(mount);
    command
}
