//! From arguments to reports.

mod daemon;
mod run;

use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::Context as _;
use rtvirtio_console::{Global, Ui, need_root, show, write_file};
use rtvirtio_experiments::ageing::AgeingOptions;
use rtvirtio_experiments::before_after::{BeforeAfterData, BeforeAfterOptions};
use rtvirtio_experiments::blame::{BlameData, SLOW_BY};
use rtvirtio_experiments::cases::{CaseOptions, Tier, cases};
use rtvirtio_experiments::cores::CoresOptions;
use rtvirtio_experiments::cpu_predict::{self, CpuPredictData, CpuPredictOptions};
use rtvirtio_experiments::cyclictest::{CyclictestData, CyclictestOptions};
use rtvirtio_experiments::daemon::scale::sleep_with;
use rtvirtio_experiments::demo_busy::{self, DemoBusyData};
use rtvirtio_experiments::experiment::{Experiment as _, report};
use rtvirtio_experiments::fleet::{FleetData, FleetOptions};
use rtvirtio_experiments::fleet_cluster::slow::SlowData;
use rtvirtio_experiments::fleet_cluster::{ClusterData, Parts};
use rtvirtio_experiments::iod::{IodData, IodOptions};
use rtvirtio_experiments::iod_added::{AddedData, AddedOptions};
use rtvirtio_experiments::iod_attach::{AttachData, AttachOptions};
use rtvirtio_experiments::iod_crash::{CrashData, CrashOptions};
use rtvirtio_experiments::iod_migrate::{MigrateData, MigrateOptions};
use rtvirtio_experiments::iod_startup::{StartupData, StartupOptions};
use rtvirtio_experiments::isolation::IsolationData;
use rtvirtio_experiments::net::NetData;
use rtvirtio_experiments::net::timeline::TimelineData;
use rtvirtio_experiments::paravirt::ParavirtData;
use rtvirtio_experiments::profile_time::{ProfileTimeData, ProfileTimeOptions};
use rtvirtio_experiments::regulation::RegulationData;
use rtvirtio_experiments::regulation::planned;
use rtvirtio_experiments::regulation::planned::PlannedData;
use rtvirtio_experiments::report::{ExperimentReport, read, save};
use rtvirtio_experiments::reservation::ReservationData;
use rtvirtio_experiments::reservation::kills::{KillAt, run_child};
use rtvirtio_experiments::responsiveness::ResponsivenessData;
use rtvirtio_experiments::run_basis::check_out;
use rtvirtio_experiments::sweep::SweepOptions;
use rtvirtio_experiments::tails::{TailsData, TailsOptions};
use rtvirtio_experiments::{
    accuracy, ageing, before_after, blame, cases, contention, cores, cyclictest, directory, fleet,
    fleet_cluster, host, iod, iod_added, iod_attach, iod_crash, iod_migrate, iod_startup, isolation, net,
    paravirt, planning, profile_time, regulation, reservation, responsiveness, sweep, tails,
};
use rtvirtio_harness::test_bed::{device_name, spec_device};
use rtvirtio_learn::dataset::Dataset;
use rtvirtio_paper::PaperModels;
use rtvirtio_testbed::LabHost;
use rtvirtio_units::Bytes;
use rtvirtio_workflow::{Progress as _, model_choice};

use crate::args::{
    Bench, BenchAccuracyArgs, BenchBlameArgs, BenchCasesArgs, BenchCommand, BenchContentionArgs,
    BenchDemoBusyArgs, BenchFleetClusterArgs, BenchHostArgs, BenchIsolationArgs, BenchNetArgs,
    BenchParavirtArgs, BenchPlanArgs, BenchRegulationArgs, BenchReportArgs, BenchReservationArgs,
    BenchResponsivenessArgs, PartName,
};
use daemon::{run_daemon, run_daemon_day, run_daemon_scale};
use run::{Run, check_page, print, unchecked};

pub fn run(command: &BenchCommand, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let of = |name, result| Run { name, result, global, ui };
    match command {
        BenchCommand::Sweep(args) => run_sweep(args, global, ui),
        BenchCommand::Cases(args) => run_cases(args, global, ui),
        BenchCommand::Contention(args) => run_contention(args, global, ui),
        BenchCommand::Accuracy(args) => run_accuracy(args, ui),
        BenchCommand::BeforeAfter(args) => run_before_after(args, &of("before-after", &args.result)),
        BenchCommand::Blame(args) => run_blame(args, &of("blame", &args.result)),
        BenchCommand::CpuPredict(args) => run_cpu_predict(args, &of("cpu-predict", &args.result)),
        BenchCommand::DemoBusy(args) => run_demo_busy(args, &of("demo-busy", &args.result)),
        BenchCommand::Plan(args) => run_plan(args, &of("plan", &args.result)),
        BenchCommand::Cores(args) => run_cores(args, &of("cores", &args.result)),
        BenchCommand::Drift(args) => run_drift(args, &of("drift", &args.result)),
        BenchCommand::Isolation(args) => run_isolation(args, &of("isolation", &args.result)),
        BenchCommand::Iod(args) => run_iod(args, &of("iod", &args.result)),
        BenchCommand::Daemon(args) => run_daemon(args, &of("daemon", &args.result)),
        BenchCommand::DaemonDay(args) => run_daemon_day(args, &of("daemon-day", &args.result)),
        BenchCommand::DaemonScale(args) => run_daemon_scale(args, &of("daemon-scale", &args.result)),
        BenchCommand::IodAdded(args) => run_iod_added(args, &of("iod-added", &args.result)),
        BenchCommand::IodAttach(args) => run_iod_attach(args, &of("iod-attach", &args.result)),
        BenchCommand::IodCrash(args) => run_iod_crash(args, &of("iod-crash", &args.result)),
        BenchCommand::IodMigrate(args) => run_iod_migrate(args, &of("iod-migrate", &args.result)),
        BenchCommand::IodStartup(args) => run_iod_startup(args, &of("iod-startup", &args.result)),
        BenchCommand::Responsiveness(args) => run_responsiveness(args, &of("responsiveness", &args.result)),
        BenchCommand::Net(args) => run_net(args, &of("net", &args.result)),
        BenchCommand::Tails(args) => run_tails(args, &of("tails", &args.result)),
        BenchCommand::ProfileTime(args) => run_profile_time(args, &of("profile-time", &args.result)),
        BenchCommand::Cyclictest(args) => run_cyclictest(args, &of("cyclictest", &args.result)),
        BenchCommand::Paravirt(args) => run_paravirt(args, &of("paravirt", &args.result)),
        BenchCommand::Reservation(args) => run_reservation(args, &of("reservation", &args.result)),
        BenchCommand::Regulation(args) => run_regulation(args, &of("regulation", &args.result)),
        BenchCommand::Fleet(args) => run_fleet(args, &of("fleet", &args.result)),
        BenchCommand::FleetCluster(args) => run_fleet_cluster(args, &of("fleet-cluster", &args.result)),
        BenchCommand::Host(args) => run_host(args, global, ui),
        BenchCommand::KillAt(args) => run_child(&args.options()).map(|()| ExitCode::SUCCESS),
        BenchCommand::Sleeper(args) => sleep_with(args.threads).map(|()| ExitCode::SUCCESS),
        BenchCommand::Report(args) => run_report(args, ui),
    }
}

fn run_sweep(options: &SweepOptions, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    options.check()?;
    need_root("rtvirtio-bench sweep")?;
    sweep::measure(options, &lab_host(global), ui)?;
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
        need_root("rtvirtio-bench cases")?;
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
    let model = args.runs.options.model.as_deref();
    let (learned, paper) = (model_choice::read_if(model)?, PaperModels::read_if(model)?);
    if !args.runs.report_only {
        options.check()?;
        check_page(args.runs.html.as_deref())?;
        need_root("rtvirtio-bench contention")?;
        contention::measure(&options, &lab_host(global), ui)?;
    }
    let data = Dataset::load(&options.path())?;
    let title = format!("rtvirtio: contention on {}", data.header.host.device);
    let report = contention::report((learned.as_ref(), &paper), &data, ui)?
        .with_suffix(device_name(&args.runs.options.device));
    print(report, &title, args.runs.html.as_deref(), ui)
}

fn run_accuracy(args: &BenchAccuracyArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let reports = args.data.iter().map(|path| accuracy::report(path, &args.options(), ui));
    let reports = reports.collect::<anyhow::Result<Vec<_>>>()?;
    let all = reports.into_iter().reduce(ExperimentReport::and).context("no dataset was given")?;
    print(all, "rtvirtio: accuracy of the models", args.html.as_deref(), ui)
}

fn run_fleet(args: &Bench<FleetOptions>, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(FleetData::FILE);
    if !args.result.report_only {
        run.check_result()?;
        save(&path, &fleet::measure(&args.options, run.ui)?, run.ui)?;
    }
    let mut all = report::<FleetData>(&path)?;
    // The saved result of a real cluster in this directory is reported too.
    let cluster = args.result.out.join(ClusterData::FILE);
    if cluster.exists() {
        all = all.and(report::<ClusterData>(&cluster)?);
    }
    let slow = args.result.out.join(SlowData::FILE);
    if slow.exists() {
        all = all.and(report::<SlowData>(&slow)?);
    }
    run.print(all, FleetData::TITLE)
}

fn run_fleet_cluster(args: &BenchFleetClusterArgs, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    let (vms, ui) = (args.cluster_vms(), run.ui);
    let file = if args.slow { SlowData::FILE } else { vms.file() };
    let path = run.measured(file, unchecked, |path, labs| {
        let own = std::env::current_exe()?.with_file_name("rtvirtio-pacemaker");
        let program = args.program.as_deref().unwrap_or(&own);
        let parts = Parts { program, agent: include_str!("../../rtvirtio-pacemaker/VirtualDomain") };
        if args.slow {
            save(path, &fleet_cluster::slow::measure(args.repeat, parts, labs, ui)?, ui)
        } else {
            save(path, &fleet_cluster::measure(args.repeat, vms, parts, ui)?, ui)
        }
    })?;
    if args.slow { run.shown::<SlowData>(&path) } else { run.shown::<ClusterData>(&path) }
}

fn run_plan(args: &BenchPlanArgs, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.without_device(|| planning::measure(args.repeat.max(1), args.model.as_deref()))
}

fn run_cores(args: &Bench<CoresOptions>, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.without_device(|| cores::measure(&args.options, run.ui))
}

fn run_drift(args: &Bench<AgeingOptions>, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.without_device(|| ageing::measure(&args.options, run.ui))
}

fn run_isolation(args: &BenchIsolationArgs, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.whole::<IsolationData>(known(&args.device), |path, labs| {
        isolation::measure(&args.options(), path, labs, run.ui)
    })
}

fn run_iod(args: &Bench<IodOptions>, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.measured(IodData::FILE, known(&args.options.device), |path, labs| {
        save(path, &iod::measure(&args.options, labs, run.ui)?, run.ui)
    })?;
    let all = directory::iod_report(&args.result.out)?;
    let all = all.with_context(|| format!("{} holds no result", args.result.out.display()))?;
    run.print(all, IodData::TITLE)
}

fn run_iod_added(args: &Bench<AddedOptions>, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.whole::<AddedData>(
        || args.options.check(),
        |path, labs| save(path, &iod_added::measure(&args.options, labs, run.ui)?, run.ui),
    )
}

fn run_iod_attach(args: &Bench<AttachOptions>, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.whole::<AttachData>(unchecked, |path, _| {
        save(path, &iod_attach::measure(&args.options, run.ui)?, run.ui)
    })
}

fn run_iod_crash(args: &Bench<CrashOptions>, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.whole::<CrashData>(known(&args.options.device), |path, labs| {
        save(path, &iod_crash::measure(&args.options, labs, run.ui)?, run.ui)
    })
}

fn run_iod_migrate(args: &Bench<MigrateOptions>, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.whole::<MigrateData>(unchecked, |path, labs| iod_migrate::measure(&args.options, path, labs, run.ui))
}

fn run_iod_startup(args: &Bench<StartupOptions>, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.whole::<StartupData>(known(&args.options.device), |path, labs| {
        save(path, &iod_startup::measure(&args.options, labs, run.ui)?, run.ui)
    })
}

/// Check of a device, for [`Run::measured`].
fn known(device: &str) -> impl FnOnce() -> anyhow::Result<()> {
    move || spec_device(device).map(drop)
}

fn run_responsiveness(args: &BenchResponsivenessArgs, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    let options = args.options();
    let path = run.measured(
        ResponsivenessData::FILE,
        || options.check(),
        |path, labs| responsiveness::measure(&options, path, labs, run.ui),
    )?;
    if let Some(dir) = &args.svg {
        save_figures(dir, responsiveness::svg(&path)?, run.ui)?;
    }
    run.shown::<ResponsivenessData>(&path)
}

fn run_net(args: &BenchNetArgs, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    let (parts, ui) = (args.parts(), run.ui);
    let timeline = args.result.out.join(TimelineData::FILE);
    let path = run.measured(NetData::FILE, unchecked, |path, labs| {
        if !parts.is_empty() {
            // Read first, so that an unreadable file costs no measurement.
            let before: Option<NetData> =
                if args.only.is_empty() || !path.exists() { None } else { Some(read(path)?) };
            let mut data = net::measure(&args.options, &parts, labs, ui)?;
            if let Some(mut all) = before {
                all.merge(data);
                data = all;
            }
            save(path, &data, ui)?;
        }
        if args.has_timeline() {
            save(&timeline, &net::timeline::measure_timeline(args.options.cap, labs, ui)?, ui)?;
        }
        Ok(())
    })?;
    if let Some(dir) = args.svg.as_ref().filter(|_| args.has_timeline()) {
        write_picture(dir, net::timeline::svg(&timeline)?, ui)?;
    }
    let report = match (parts.is_empty(), args.has_timeline()) {
        (true, _) => report::<TimelineData>(&timeline)?,
        (false, true) => report::<NetData>(&path)?.and(report::<TimelineData>(&timeline)?),
        (false, false) => report::<NetData>(&path)?,
    };
    run.print(report, NetData::TITLE)
}

fn write_picture(dir: &Path, (name, text): (&str, String), ui: &Ui) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| dir.display().to_string())?;
    write_file(&dir.join(name), text.as_bytes())?;
    ui.step(&format!("wrote {}", dir.join(name).display()));
    Ok(())
}

fn run_tails(args: &Bench<TailsOptions>, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.written::<TailsData>(known(&args.options.device), |path, labs| {
        tails::measure(&args.options, path, labs, run.ui)
    })
}

fn run_profile_time(args: &Bench<ProfileTimeOptions>, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    let known = || args.options.devices.iter().try_for_each(|device| spec_device(device).map(drop));
    run.written::<ProfileTimeData>(known, |path, labs| {
        profile_time::measure(&args.options, path, labs, run.ui)
    })
}

fn run_before_after(args: &Bench<BeforeAfterOptions>, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.written::<BeforeAfterData>(unchecked, |path, labs| {
        before_after::measure(&args.options, path, labs, run.ui)
    })
}

fn run_blame(args: &BenchBlameArgs, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.written::<BlameData>(known(&args.device), |path, labs| {
        let labs = LabHost { twin_server: slow_twin_server, ..labs.clone() };
        blame::measure(&args.options(), path, &labs, run.ui)
    })
}

fn run_cpu_predict(args: &Bench<CpuPredictOptions>, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.written::<CpuPredictData>(known(&args.options.device), |path, labs| {
        cpu_predict::measure(&args.options, path, labs, run.ui)
    })
}

fn run_demo_busy(args: &BenchDemoBusyArgs, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.written::<DemoBusyData>(unchecked, |path, _| {
        demo_busy::measure(&args.options(run.global)?, path, run.ui)
    })
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

fn run_regulation(args: &BenchRegulationArgs, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    let ui = run.ui;
    if args.only == Some(PartName::Plan) {
        return run.whole::<PlannedData>(unchecked, |path, labs| {
            save(path, &planned::measure(&args.planned(), labs, ui)?, ui)
        });
    }
    let path = run.measured(RegulationData::FILE, unchecked, |path, _| {
        let found = if args.add {
            regulation::add(regulation::load(path)?, &args.options(), ui)?
        } else {
            regulation::measure(&args.options(), ui)?
        };
        save(path, &found, ui)
    })?;
    if let Some(out) = &args.curve {
        let curve = regulation::victim_curve(&regulation::load(&path)?.victims);
        let curve = curve.context("the result has no victim: measure without --add first")?;
        write_file(out, &serde_json::to_vec_pretty(&curve)?)?;
        ui.step(&format!("wrote the victim's curve to {}", out.display()));
    }
    if let Some(dir) = &args.svg {
        save_figures(dir, regulation::svg(&path)?, ui)?;
    }
    run.shown::<RegulationData>(&path)
}

fn run_cyclictest(args: &Bench<CyclictestOptions>, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.whole::<CyclictestData>(unchecked, |path, labs| {
        cyclictest::measure(&args.options, path, labs, run.ui)
    })
}

fn run_paravirt(args: &BenchParavirtArgs, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    let options = &args.options;
    let path = run
        .measured(&options.file(), unchecked, |path, labs| paravirt::measure(options, path, labs, run.ui))?;
    if let Some(dir) = &args.svg {
        save_figures(dir, vec![paravirt::svg(&path)?], run.ui)?;
    }
    run.shown::<ParavirtData>(&path)
}

fn run_reservation(args: &BenchReservationArgs, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.whole::<ReservationData>(unchecked, |path, labs| {
        let data = if args.kills {
            reservation::with_kills(read(path)?, &kill_command, labs, run.ui)?
        } else {
            reservation::measure(&args.options, &kill_command, labs, run.ui)?
        };
        save(path, &data, run.ui)
    })
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
        need_root("rtvirtio-bench host")?;
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

/// A twin that becomes slow as the causes of `rtvirtio-bench blame` do.
fn slow_twin_server(profile: &str, size: Bytes, mount: &Path) -> Command {
    let mut command = twin_server(profile, size, mount);
    command.args(["--slow-by", &SLOW_BY.to_string()]);
    command
}
