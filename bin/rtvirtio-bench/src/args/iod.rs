//! `rtvirtio-bench iod`, `iod-added`, `iod-attach`, `iod-crash`, `iod-migrate`, `iod-startup`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_experiments::iod::IodOptions;
use rtvirtio_experiments::iod_added::AddedOptions;
use rtvirtio_experiments::iod_attach::AttachOptions;
use rtvirtio_experiments::iod_crash::CrashOptions;
use rtvirtio_experiments::iod_migrate::MigrateOptions;
use rtvirtio_experiments::iod_startup::StartupOptions;
use rtvirtio_units::{Bytes, Nanos};

use super::BenchResult;

/// `rtvirtio-bench iod`.
#[derive(Args, Debug)]
pub struct BenchIodArgs {
    /// Emulated device for the flood
    #[arg(value_name = "twin:NAME", default_value = "twin:qlc-nvme")]
    pub device: String,
    /// Rounds
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub repeat: usize,
    /// Length of each run
    #[arg(long = "for", value_name = "TIME", default_value = "10s")]
    pub length: Nanos,
    /// Leave out the comparison with qemu-storage-daemon, and the regulator
    #[arg(long)]
    pub no_peer: bool,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchIodArgs {
    pub fn options(&self) -> IodOptions {
        IodOptions {
            device: self.device.clone(),
            length: self.length,
            repeat: self.repeat,
            no_peer: self.no_peer,
        }
    }
}

/// `rtvirtio-bench iod-added`.
#[derive(Args, Debug)]
pub struct BenchIodAddedArgs {
    /// Pairs of runs at each depth, for each kind of client
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    pub pairs: u32,
    /// Length of each run
    #[arg(long = "for", value_name = "TIME", default_value = "5s")]
    pub length: Nanos,
    /// A device besides memory, again for each: emulated, or `file:PATH` for a file that is made on
    /// a disk of this machine and removed afterwards
    #[arg(long = "device", value_name = "twin:NAME")]
    pub devices: Vec<String>,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchIodAddedArgs {
    pub fn options(&self) -> AddedOptions {
        AddedOptions { devices: self.devices.clone(), length: self.length, pairs: self.pairs as usize }
    }
}

/// `rtvirtio-bench iod-attach`.
#[derive(Args, Debug)]
pub struct BenchIodAttachArgs {
    /// Number of disks added and removed in turn
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    pub disks: u32,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchIodAttachArgs {
    pub fn options(&self) -> AttachOptions {
        AttachOptions { disks: self.disks as usize }
    }
}

/// `rtvirtio-bench iod-crash`.
#[derive(Args, Debug)]
pub struct BenchIodCrashArgs {
    /// Emulated device, or `file:PATH` for a file that is made on a disk of this machine and
    /// removed afterwards
    #[arg(value_name = "twin:NAME", default_value = "twin:emmc")]
    pub device: String,
    /// Number of kills of the domain
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub kills: usize,
    /// Seed of the moments
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchIodCrashArgs {
    pub fn options(&self) -> CrashOptions {
        CrashOptions { device: self.device.clone(), kills: self.kills, seed: self.seed }
    }
}

/// `rtvirtio-bench iod-migrate`.
#[derive(Args, Debug)]
pub struct BenchIodMigrateArgs {
    /// Migrations of each guest, there and back in turn; those in the file count
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub migrations: u32,
    /// Rounds of requests/s with the log and without it
    #[arg(long, value_name = "N", default_value_t = 9)]
    pub pairs: u32,
    /// Migrations of which source, target or an I/O domain is killed; 16 are all parts in all
    /// phases
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub kills: u32,
    /// Moves to a target without room, which its I/O domain refuses before they begin
    #[arg(long, value_name = "N", default_value_t = 20)]
    pub refusals: u32,
    /// Migrations of a guest with a network card, and a frame to it each 5 ms
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub cards: u32,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchIodMigrateArgs {
    pub fn options(&self) -> MigrateOptions {
        let numbers = [self.migrations, self.pairs, self.kills, self.refusals, self.cards];
        let [migrations, pairs, kills, refusals, cards] = numbers.map(|n| n as usize);
        MigrateOptions { migrations, pairs, kills, refusals, cards }
    }
}

/// `rtvirtio-bench iod-startup`.
#[derive(Args, Debug)]
pub struct BenchIodStartupArgs {
    /// Emulated device
    #[arg(value_name = "twin:NAME", default_value = "twin:microsd")]
    pub device: String,
    /// The application, a program of this host, with its arguments
    #[arg(last = true, value_name = "COMMAND", default_values = ["qemu-system-x86_64", "--version"])]
    pub app: Vec<String>,
    /// A directory of this host that the application needs in addition to its libraries
    #[arg(long = "with", value_name = "DIR")]
    pub with: Vec<PathBuf>,
    /// Only these schemes, such as idle,urgent
    #[arg(long, value_delimiter = ',', value_name = "SCHEMES")]
    pub schemes: Vec<String>,
    /// Start-ups of each kind
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub repeat: usize,
    /// A longer start-up counts as failed
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub limit: Nanos,
    /// Largest piece of requests that are not urgent, where the guest's priority is read
    #[arg(long, value_name = "BYTES", default_value = "16KiB")]
    pub quantum: Bytes,
    /// Largest piece of urgent requests: those that the guest marks real-time, within their
    /// reservation
    #[arg(long, value_name = "BYTES", default_value = "128KiB")]
    pub urgent_quantum: Bytes,
    /// Pieces at the device under the domain's reservations
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub window: u32,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchIodStartupArgs {
    pub fn options(&self) -> StartupOptions {
        StartupOptions {
            device: self.device.clone(),
            app: self.app.clone(),
            with: self.with.clone(),
            schemes: self.schemes.clone(),
            repeat: self.repeat,
            limit: self.limit,
            quantum: self.quantum,
            urgent_quantum: self.urgent_quantum,
            window: self.window,
        }
    }
}
