//! `rtvirtio-lab bench ...`: the experiments.

mod accuracy;
mod arguments;
mod backend;
pub mod bed;
mod cases;
mod contention;
mod cores;
mod cyclictest;
mod found;
mod from_guests;
mod guest;
mod in_guests;
mod iod;
mod iod_crash;
mod iod_startup;
mod kills;
mod page;
mod plan;
mod report;
mod reservation;
mod runs;
pub mod sweep;
mod tails;
mod turns;
mod web;

use std::process::ExitCode;

use crate::args::BenchCommand;
use rtvirtio_console::Global;
use rtvirtio_console::Ui;

/// Run directory of experiments, below the global one.
pub const BENCH_DIR: &str = "bench";

/// `rtvirtio-lab bench ...`.
pub fn run(command: &BenchCommand, global: &Global, ui: &Ui) -> anyhow::Result<ExitCode> {
    match command {
        BenchCommand::Sweep(args) => sweep::run(args, global, ui),
        BenchCommand::Cases(args) => cases::run(args, global, ui),
        BenchCommand::Contention(args) => contention::run(args, global, ui),
        BenchCommand::Accuracy(args) => accuracy::run(args, ui),
        BenchCommand::Plan(args) => plan::run(args, ui),
        BenchCommand::Iod(args) => iod::run(args, global, ui),
        BenchCommand::IodCrash(args) => iod_crash::run(args, global, ui),
        BenchCommand::IodStartup(args) => iod_startup::run(args, global, ui),
        BenchCommand::Tails(args) => tails::run(args, global, ui),
        BenchCommand::Cyclictest(args) => cyclictest::run(args, global, ui),
        BenchCommand::Reservation(args) => reservation::run(args, global, ui),
        BenchCommand::KillAt(args) => kills::child(args),
        BenchCommand::Report(args) => report::run(args, ui),
    }
}
