//! `bench net`.

use clap::Args;
use rtvirtio_bench::net::NetOptions;

use super::BenchResult;

/// `bench net`.
#[derive(Args, Debug)]
pub struct BenchNetArgs {
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub rounds: u32,
    /// Round trips of a round and situation, at 4 kHz; a quarter on the slow link, at 1 kHz
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(400..))]
    pub requests: u32,
    /// Cases of the simulation
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub cases: usize,
    /// How often the domain is killed in a round
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub crashes: usize,
    /// Frames per second that the flooded neighbour gets at most, on the I/O domain
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..))]
    pub cap: u32,
    /// Where the result goes
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchNetArgs {
    /// For the experiment.
    pub fn options(&self) -> NetOptions {
        NetOptions {
            rounds: self.rounds as usize,
            requests: self.requests,
            cases: self.cases,
            crashes: self.crashes,
            cap: self.cap,
        }
    }
}
