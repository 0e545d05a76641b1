//! The experiments with the service.

use std::process::ExitCode;

use rtvirtio_console::{Global, Ui, need_root};
use rtvirtio_experiments::daemon;
use rtvirtio_experiments::report::{read, save};

use super::{check_result, lab_host, print_result, write_picture};
use crate::args::{BenchDaemonArgs, BenchDaemonDayArgs, BenchDaemonScaleArgs};

pub fn run_daemon(args: &BenchDaemonArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(daemon::FILE);
    if !args.result.report_only {
        check_result(&args.result)?;
        need_root("bench daemon")?;
        let (options, labs) = (args.options()?, lab_host(global));
        let data = if args.only_observation {
            let mut data = read(&path)?;
            daemon::measure_observation(&mut data, &options, &labs, ui)?;
            data
        } else {
            daemon::measure(&options, &labs, ui)?
        };
        save(&path, &data, ui)?;
    }
    print_result(daemon::report, &path, "rtvirtio: the service", &args.result, ui)
}

pub fn run_daemon_day(args: &BenchDaemonDayArgs, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(daemon::day::FILE);
    if !args.result.report_only {
        check_result(&args.result)?;
        need_root("bench daemon-day")?;
        save(&path, &daemon::day::measure(&args.options()?, &lab_host(global), ui)?, ui)?;
    }
    if let Some(dir) = &args.svg {
        write_picture(dir, daemon::day::svg(&path)?, ui)?;
    }
    print_result(daemon::day::report, &path, "rtvirtio: a day of the service", &args.result, ui)
}

pub fn run_daemon_scale(args: &BenchDaemonScaleArgs, ui: &Ui) -> anyhow::Result<ExitCode> {
    let path = args.result.out.join(daemon::scale::FILE);
    if !args.result.report_only {
        check_result(&args.result)?;
        need_root("bench daemon-scale")?;
        save(&path, &daemon::scale::measure(&args.options()?, ui)?, ui)?;
    }
    print_result(daemon::scale::report, &path, "rtvirtio: the service at scale", &args.result, ui)
}
