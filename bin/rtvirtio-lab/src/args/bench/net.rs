//! `bench net`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use rtvirtio_bench::net::ping::PingOptions;
use rtvirtio_bench::net::sv::SvOptions;
use rtvirtio_bench::net::{NetOptions, NetThread};
use rtvirtio_units::{Nanos, Ratio};

use super::BenchResult;

/// Situations that are measured alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NetPart {
    /// Pings, idle and next to a flood, on QEMU's taps and on the I/O domain
    Ping,
    /// Sampled values: publisher to client to disk and back, alone and next to floods on network
    /// and disk
    Sv,
    /// Round trips over time while a neighbour begins to send through a slow link, and ends
    Timeline,
}

/// `bench net`.
#[derive(Args, Debug)]
pub struct BenchNetArgs {
    /// One situation that is not in the rest, with a result file of its own: about two minutes
    #[arg(long, value_name = "NAME", value_enum)]
    pub only: Option<NetPart>,
    /// Rounds [default: 5; 1 with --only]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: Option<u32>,
    /// Round trips of a round and situation, at 4 kHz; a quarter on the slow link, at 1 kHz
    /// [default: 20000; with --only 1000 pings, 40000 sampled values]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(400..))]
    pub requests: Option<u32>,
    /// Sampled values per second
    #[arg(long, value_name = "N", default_value_t = 4_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub rate: u32,
    /// What 99.9 % of the sampled values are to take at most, there, to the disk and back
    #[arg(long, value_name = "TIME", default_value = "20ms")]
    pub target: Nanos,
    /// Cases of the simulation
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub cases: usize,
    /// How often the domain is killed in a round
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub crashes: usize,
    /// Frames per second that the flooded neighbour gets at most, on the I/O domain
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub cap: u32,
    /// SCHED_FIFO priority of the domain's network thread; not with --only
    #[arg(long, value_name = "N", conflicts_with = "only", value_parser = clap::value_parser!(u8).range(1..=99))]
    pub fifo: Option<u8>,
    /// Budget of CPU time of that thread, such as 30%; not with --only
    #[arg(long, value_name = "SHARE", conflicts_with = "only")]
    pub cpu_budget: Option<Ratio>,
    /// Period of that budget
    #[arg(long, value_name = "TIME", requires = "cpu_budget")]
    pub cpu_period: Option<Nanos>,
    /// Draws the picture of `--only timeline` into this directory
    #[arg(long, value_name = "DIR", requires = "only")]
    pub svg: Option<PathBuf>,
    /// Where the result goes
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchNetArgs {
    /// For the experiment.
    pub fn options(&self) -> NetOptions {
        NetOptions {
            rounds: self.rounds.unwrap_or(5) as usize,
            requests: self.requests.unwrap_or(20_000),
            cases: self.cases,
            crashes: self.crashes,
            cap: self.cap,
            thread: NetThread { fifo: self.fifo, cpu_budget: self.cpu_budget, cpu_period: self.cpu_period },
        }
    }

    /// For the table of pings.
    pub fn ping(&self) -> PingOptions {
        PingOptions {
            rounds: self.rounds.unwrap_or(1) as usize,
            requests: self.requests.unwrap_or(1_000),
            cap: self.cap,
        }
    }

    /// For sampled values.
    pub fn sv(&self) -> SvOptions {
        SvOptions {
            rounds: self.rounds.unwrap_or(1) as usize,
            frames: self.requests.unwrap_or(40_000),
            rate: self.rate,
            target: self.target,
            cap: self.cap,
        }
    }
}
