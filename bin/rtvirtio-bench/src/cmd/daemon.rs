//! The experiments with the service.

use std::process::ExitCode;

use rtvirtio_experiments::daemon::day::DayData;
use rtvirtio_experiments::daemon::scale::ScaleData;
use rtvirtio_experiments::daemon::{self, DaemonData};
use rtvirtio_experiments::experiment::Experiment as _;
use rtvirtio_experiments::report::{read, save};

use super::run::{Run, unchecked};
use super::write_picture;
use crate::args::{BenchDaemonArgs, BenchDaemonDayArgs, BenchDaemonScaleArgs};

pub fn run_daemon(args: &BenchDaemonArgs, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.whole::<DaemonData>(unchecked, |path, labs| {
        let options = args.options()?;
        let data = if args.only_observation {
            let mut data = read(path)?;
            daemon::measure_observation(&mut data, &options, labs, run.ui)?;
            data
        } else {
            daemon::measure(&options, labs, run.ui)?
        };
        save(path, &data, run.ui)
    })
}

pub fn run_daemon_day(args: &BenchDaemonDayArgs, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    let path = run.measured(DayData::FILE, unchecked, |path, labs| {
        save(path, &daemon::day::measure(&args.options()?, labs, run.ui)?, run.ui)
    })?;
    if let Some(dir) = &args.svg {
        write_picture(dir, daemon::day::svg(&path)?, run.ui)?;
    }
    run.shown::<DayData>(&path)
}

pub fn run_daemon_scale(args: &BenchDaemonScaleArgs, run: &Run<'_>) -> anyhow::Result<ExitCode> {
    run.whole::<ScaleData>(unchecked, |path, _| {
        save(path, &daemon::scale::measure(&args.options()?, run.ui)?, run.ui)
    })
}
