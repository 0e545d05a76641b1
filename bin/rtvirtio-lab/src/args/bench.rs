//! The command line of `bench`.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use rtvirtio_bench::accuracy::FOLDS;
use rtvirtio_bench::cyclictest::Setup;
use rtvirtio_units::{Bytes, Nanos};

use rtvirtio_console::MarginArg;

/// `bench`.
#[derive(Subcommand, Debug)]
pub enum BenchCommand {
    /// Measure a space-filling design of loads and settings: the dataset that models learn from
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-lab bench sweep twin:qlc-nvme --points 20 --out /tmp/sweep
  sudo rtvirtio-lab bench sweep twin:qlc-nvme twin:emmc --points 300   a run that was stopped goes on where it was")]
    Sweep(BenchSweepArgs),
    /// 1 to 4 VMs by six task sets in three tiers of targets, all schemes side by side
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-lab bench cases --tier paper --only 3vm-LM-           the paper's Fig. 7
  sudo rtvirtio-lab bench cases --repeat 3 --model data/qlc-nvme.model.json
  rtvirtio-lab bench cases --report-only --json | jq .claims          what was measured so far

A run that was stopped goes on where it was. Exit code 2 when a claim is not met.")]
    Cases(BenchCasesArgs),
    /// How tails grow with contention and follow settings: the RT-VirtIO paper's Figs. 2 and 5
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-lab bench contention --repeat 3
  rtvirtio-lab bench contention --report-only --model data/qlc-nvme.model.json --html contention.html

A run that was stopped goes on where it was.")]
    Contention(BenchContentionArgs),
    /// Fit the models on a part of a dataset and judge them on the rest
    #[command(after_help = "\
EXAMPLES
  rtvirtio-lab bench accuracy data/qlc-nvme.jsonl
  rtvirtio-lab bench accuracy data/qlc-nvme.jsonl --model data/qlc-nvme.model.json")]
    Accuracy(BenchAccuracyArgs),
    /// Whether estimates of p99.99 from few samples hold: long runs cut into pieces
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-lab bench tails
  sudo rtvirtio-lab bench tails twin:emmc --for 10min --piece 2s --out /tmp/tails
  rtvirtio-lab bench tails --report-only --json | jq .claims

Exit code 2 when a claim is not met.")]
    Tails(BenchTailsArgs),
    /// How long planning takes, and how near it comes to the best of an exhaustive search
    #[command(
        after_help = "EXAMPLES\n  rtvirtio-lab bench plan --model data/qlc-nvme.model.json\n  rtvirtio-lab bench plan --repeat 50 --out /tmp/planning --json | jq .claims"
    )]
    Plan(BenchPlanArgs),
    /// The I/O domain beside what is there today: a flood next to declared rates, and the cost of a request
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-lab bench iod --repeat 3 --html iod.html
  rtvirtio-lab bench iod --report-only --json | jq .claims

Measured by a vhost-user-blk frontend without a VM. Exit code 2 when a claim is not met.")]
    Iod(BenchIodArgs),
    /// The I/O domain under a real guest, killed again and again: nothing written may be lost
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-lab bench iod-crash                       50 times `kill -9`, about five minutes under TCG
  sudo rtvirtio-lab bench iod-crash file:/var/tmp/disk --kills 5 --seed 7
  rtvirtio-lab bench iod-crash --report-only --json | jq .claims

A guest writes with fio and verifies what it wrote while the domain that serves its disk is killed at random moments and
started again. Exit code 2 when a claim is not met.")]
    IodCrash(BenchIodCrashArgs),
    /// How long an application takes to start in a real guest, beside load in the guest and from another VM
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-lab bench iod-startup
  sudo rtvirtio-lab bench iod-startup twin:emmc --repeat 7
  sudo rtvirtio-lab bench iod-startup --with /usr/lib/python3.11 -- python3 -c 'import json, http.client'
  rtvirtio-lab bench iod-startup --report-only --json | jq .claims

Start-ups with a cold page cache: without load; with load first come first served; with a reservation for the VM; with a
reservation for the requests that the guest's kernel calls real-time (`ionice -c 1`). Exit code 2 when a claim is not met.")]
    IodStartup(BenchIodStartupArgs),
    /// CPU contracts: throughput over budget, isolation and web requests of two guests on one core
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-lab bench reservation --repeat 3
  sudo rtvirtio-lab bench reservation --kills
  sudo rtvirtio-lab bench reservation --for 4s --requests 200 --html reservation.html
  rtvirtio-lab bench reservation --report-only --json | jq .claims

The experiments of the reservations paper (its Figs. 1b to 4), all through QEMU's own network; and apply and revert of a contract, killed (kill -9) before and
after every change. Where guests are emulated, period and deadline of the
web requests are scaled so that an unloaded response is a tenth of them. Exit code 2 when a claim is not met.")]
    Reservation(BenchReservationArgs),
    /// How late a timed thread in a guest wakes beside I/O and cache load: cyclictest, with and without real-time priorities
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-lab bench cyclictest
  sudo rtvirtio-lab bench cyclictest --for 5min --repeat 3 --preempt-rt --html cyclictest.html
  rtvirtio-lab bench cyclictest --report-only --json | jq .claims

The RT hypervisor paper's Figs. 1 to 5: on the host; in a guest as it is; with its threads real-time; with AIO workers lowered; with the I/O load moved to
the host. One core for all of it. Exit code 2 when a claim is not met.")]
    Cyclictest(BenchCyclictestArgs),
    /// The process that `bench reservation` kills
    #[command(hide = true)]
    KillAt(BenchKillAtArgs),
    /// All claims and figures of the datasets in a directory, on one page
    #[command(after_help = "\
EXAMPLES
  rtvirtio-lab bench report --html report.html
  rtvirtio-lab bench report --json | jq '.claims[] | select(.met | not)'

Measures nothing. Exit code 2 when a claim is not met.")]
    Report(BenchReportArgs),
}

/// Where an experiment's result goes.
#[derive(Args, Debug)]
pub struct BenchResult {
    /// Directory of the result
    #[arg(long, value_name = "DIR", default_value = "data")]
    pub out: PathBuf,
    /// Measure nothing: show what is in the directory
    #[arg(long)]
    pub report_only: bool,
    /// Write an HTML report here
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// `bench iod`.
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
    /// Where the result goes
    #[command(flatten)]
    pub result: BenchResult,
}

/// `bench tails`.
#[derive(Args, Debug)]
pub struct BenchTailsArgs {
    /// Emulated device, or `file:PATH` for a file that is made on a disk of this machine and removed again
    #[arg(value_name = "twin:NAME", default_value = "twin:qlc-nvme")]
    pub device: String,
    /// Length of each of the four runs: 100 requests a second show their p99.99 in five minutes
    #[arg(long = "for", value_name = "TIME", default_value = "6min")]
    pub length: Nanos,
    /// Length of a piece: with 10000 requests and more it needs no estimate
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub piece: Nanos,
    /// Where the result goes
    #[command(flatten)]
    pub result: BenchResult,
}

/// `bench iod-crash`.
#[derive(Args, Debug)]
pub struct BenchIodCrashArgs {
    /// Emulated device, or `file:PATH` for a file that is made on a disk of this machine and removed again
    #[arg(value_name = "twin:NAME", default_value = "twin:emmc")]
    pub device: String,
    /// How often the domain is killed
    #[arg(long, value_name = "N", default_value_t = 50)]
    pub kills: usize,
    /// Decides the moments
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Where the result goes
    #[command(flatten)]
    pub result: BenchResult,
}

/// `bench iod-startup`.
#[derive(Args, Debug)]
pub struct BenchIodStartupArgs {
    /// Emulated device
    #[arg(value_name = "twin:NAME", default_value = "twin:microsd")]
    pub device: String,
    /// The application, found on this host, with its arguments
    #[arg(last = true, value_name = "COMMAND", default_values = ["qemu-system-x86_64", "--version"])]
    pub app: Vec<String>,
    /// A directory of this host that the application needs beside its libraries
    #[arg(long = "with", value_name = "DIR")]
    pub with: Vec<PathBuf>,
    /// Only these ways to run, such as idle,urgent
    #[arg(long, value_delimiter = ',', value_name = "SCHEMES")]
    pub schemes: Vec<String>,
    /// Start-ups of each kind
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub repeat: usize,
    /// A start-up that takes longer has failed
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub limit: Nanos,
    /// Largest piece of requests that are not urgent, where the guest's priority is read
    #[arg(long, value_name = "BYTES", default_value = "16KiB")]
    pub quantum: Bytes,
    /// The same for requests that are: those that the guest calls real-time, as long as they keep to their reservation
    #[arg(long, value_name = "BYTES", default_value = "128KiB")]
    pub urgent_quantum: Bytes,
    /// Pieces at the device under the domain's reservations
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub window: u32,
    /// Where the result goes
    #[command(flatten)]
    pub result: BenchResult,
}

/// `bench reservation`.
#[derive(Args, Debug)]
pub struct BenchReservationArgs {
    /// Length of each measurement of throughput, which is made in pieces of 2 s between those of all others
    #[arg(long = "for", value_name = "TIME", default_value = "10s")]
    pub length: Nanos,
    /// Measurements of throughput at each budget
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub repeat: usize,
    /// Web requests under each condition; 0 leaves them out
    #[arg(long, value_name = "N", default_value_t = 500)]
    pub requests: usize,
    /// Period of the contracts for throughput
    #[arg(long, value_name = "TIME", default_value = "100ms")]
    pub period: Nanos,
    /// While its budget grows the neighbour only computes, in a loop without memory, and serves nobody
    #[arg(long)]
    pub neighbour_computes: bool,
    /// Budgets of one VM alone, in percent of a core, such as 20,50,80 [default: 10 to 90 in tens]
    #[arg(long, value_delimiter = ',', value_name = "PERCENT")]
    pub budgets: Vec<u64>,
    /// vCPUs of the loaded neighbour of the web requests, each of which computes
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub neighbour_vcpus: u16,
    /// Keep idle CPUs from sleeping, as on a real-time host
    #[arg(long)]
    pub awake: bool,
    /// Only kill `apply` and `revert` of a contract at every change, and put that to the result that is there
    #[arg(long, conflicts_with = "report_only")]
    pub kills: bool,
    /// Where the result goes
    #[command(flatten)]
    pub result: BenchResult,
}

/// `bench kill-at`.
#[derive(Args, Debug)]
pub struct BenchKillAtArgs {
    /// What is killed
    #[arg(value_enum)]
    pub action: KillAction,
    /// Order of the guest's threads
    #[arg(value_enum)]
    pub order: KillOrder,
    /// At which point; 0 for not at all
    #[arg(long)]
    pub at: u64,
    /// Name of the guest
    #[arg(long)]
    pub vm: String,
    /// Its process
    #[arg(long)]
    pub pid: u32,
    /// Directory of the journal
    #[arg(long)]
    pub state: PathBuf,
}

/// What is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KillAction {
    /// `apply`
    Apply,
    /// `revert`
    Revert,
}

impl KillAction {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Apply => "apply",
            Self::Revert => "revert",
        }
    }
}

/// Order of the threads of the guest whose contract is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KillOrder {
    /// A contract
    Contract,
    /// The paper's priorities
    Rt,
}

impl KillOrder {
    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Contract => "contract",
            Self::Rt => "rt",
        }
    }
}

/// `bench cyclictest`.
#[derive(Args, Debug)]
pub struct BenchCyclictestArgs {
    /// Length of each run, in whole seconds
    #[arg(long = "for", value_name = "TIME", default_value = "60s")]
    pub length: Nanos,
    /// Runs of each set-up, in turn
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..))]
    pub repeat: u16,
    /// Put the runs to those that are in the result already, which must be of the same host and contract
    #[arg(long, conflicts_with = "report_only")]
    pub add: bool,
    /// Set-ups to measure, such as guest,aio-lowered [default: all]
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    pub setups: Vec<Setup>,
    /// Also with Debian's PREEMPT_RT kernel in the guest
    #[arg(long)]
    pub preempt_rt: bool,
    /// Budget of the VM in each period, for the set-ups with priorities
    #[arg(long, value_name = "TIME", default_value = "1800us")]
    pub budget: Nanos,
    /// The period
    #[arg(long, value_name = "TIME", default_value = "2ms")]
    pub period: Nanos,
    /// Where the guest's disk is made, a file of 256 MiB: a file system on a disk, not in memory
    #[arg(long, value_name = "DIR", default_value = "/var/tmp")]
    pub disk_dir: PathBuf,
    /// Keep idle CPUs from sleeping, as on a real-time host
    #[arg(long)]
    pub awake: bool,
    /// Where the result goes
    #[command(flatten)]
    pub result: BenchResult,
}

/// `bench report`.
#[derive(Args, Debug)]
pub struct BenchReportArgs {
    /// Directory of the datasets, and of models as DEVICE.model.json
    #[arg(long, value_name = "DIR", default_value = "data")]
    pub data: PathBuf,
    /// Write the claims as a Markdown table here
    #[arg(long, value_name = "FILE")]
    pub markdown: Option<PathBuf>,
    /// Write an HTML report here
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// What experiments of runs on a device have in common.
#[derive(Args, Debug)]
pub struct BenchRuns {
    /// Emulated device, or `file:PATH` for a file that is made on a disk of this machine and removed again
    #[arg(value_name = "twin:NAME", default_value = "twin:qlc-nvme")]
    pub device: String,
    /// Learned model: for the schemes that need one, or to draw its predictions beside
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// A profile of the device, instead of measuring it
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Directory of the results
    #[arg(long, value_name = "DIR", default_value = "data")]
    pub out: PathBuf,
    /// Go on with results that were begun under another host kernel, which is noted in the file; take a learned model of another host too
    #[arg(long)]
    pub other_host: bool,
    /// Measure nothing: show what is in the directory
    #[arg(long)]
    pub report_only: bool,
    /// Write an HTML report here
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// `bench cases`.
#[derive(Args, Debug)]
pub struct BenchCasesArgs {
    /// Device, model and results
    #[command(flatten)]
    pub runs: BenchRuns,
    /// Tiers; all when none is named
    #[arg(long = "tier", value_enum)]
    pub tiers: Vec<TierName>,
    /// 30 % of the requests write
    #[arg(long)]
    pub writes: bool,
    /// Scale the rates to a third of what the device can do, for slow devices
    #[arg(long)]
    pub scaled: bool,
    /// How our planners weigh targets against the neighbours' rate
    #[command(flatten)]
    pub margin: MarginArg,
    /// Only cases whose name contains this
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Only these schemes, such as default-bfq,bound
    #[arg(long, value_delimiter = ',', value_name = "SCHEMES")]
    pub schemes: Vec<String>,
    /// Repetitions of every case
    #[arg(long, default_value_t = 1)]
    pub repeat: usize,
    /// Length of each run
    #[arg(long = "for", value_name = "TIME", default_value = "10s")]
    pub length: Nanos,
    /// Measure a run at most so often when the host itself stood still in it; the quietest counts
    #[arg(long, value_name = "N", default_value_t = rtvirtio_learn::runs::TRIES, value_parser = clap::value_parser!(u32).range(1..=10))]
    pub tries: u32,
    /// Measure nothing: write the cases as spec files
    #[arg(long, value_name = "DIR")]
    pub write: Option<PathBuf>,
}

/// `bench contention`.
#[derive(Args, Debug)]
pub struct BenchContentionArgs {
    /// Device, model and results
    #[command(flatten)]
    pub runs: BenchRuns,
    /// Only set-ups whose name contains this, such as fig2
    #[arg(long, value_name = "TEXT")]
    pub only: Option<String>,
    /// Repetitions of every set-up
    #[arg(long, default_value_t = 3)]
    pub repeat: usize,
    /// Length of each run
    #[arg(long = "for", value_name = "TIME", default_value = "8s")]
    pub length: Nanos,
}

/// Tiers by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TierName {
    /// The paper's targets
    Paper,
    /// A tenth of them
    Tight,
    /// A fiftieth, with neighbours
    Strict,
}

/// `bench accuracy`.
#[derive(Args, Debug)]
pub struct BenchAccuracyArgs {
    /// Dataset of one device, as `bench sweep` writes it
    #[arg(value_name = "FILE.jsonl", required = true)]
    pub data: Vec<PathBuf>,
    /// Parts that the runs are split into: each is judged by models fitted on the others
    #[arg(long, default_value_t = FOLDS as u64, value_parser = clap::value_parser!(u64).range(2..=100))]
    pub folds: u64,
    /// Confidence of the upper bound, %: a lower one needs fewer runs (120 for 99, 24 for 95, 12 for 90)
    #[arg(long, value_name = "PERCENT", default_value_t = 99, value_parser = clap::value_parser!(u8).range(60..=99))]
    pub confidence: u8,
    /// Which runs are in which part
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Judge on these runs in QEMU guests too, as `bench sweep --qemu` writes them, by models without and with others of them;
    /// the model that is saved learns from all of them
    #[arg(long, value_name = "FILE.jsonl")]
    pub guests: Option<PathBuf>,
    /// Save a model fitted on all runs here
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Write an HTML report here
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// `bench plan`.
#[derive(Args, Debug)]
pub struct BenchPlanArgs {
    /// Repetitions
    #[arg(long, default_value_t = 20)]
    pub repeat: usize,
    /// Plan with this learned model too
    #[arg(long, value_name = "FILE")]
    pub model: Option<PathBuf>,
    /// Where the result goes
    #[command(flatten)]
    pub result: BenchResult,
}

/// `bench sweep`.
#[derive(Args, Debug)]
pub struct BenchSweepArgs {
    /// Emulated devices, or `file:PATH` for a file that is made on a disk of this machine and removed again; one dataset each
    #[arg(value_name = "twin:NAME", required = true)]
    pub devices: Vec<String>,
    /// Conditions per device
    #[arg(long, default_value_t = 100)]
    pub points: usize,
    /// Length of each run
    #[arg(long = "for", value_name = "TIME", default_value = "8s")]
    pub length: Nanos,
    /// Conditions of the RT-VirtIO paper's Table II beside them, for its coefficients and its network
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub paper: usize,
    /// How many of them run two times more, to know how far runs of one condition differ
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub again: usize,
    /// Run the first N of them that three emulated guests can carry in QEMU guests, into a file of their own
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with_all = ["again", "paper"])]
    pub qemu: usize,
    /// Which design
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// A profile of the device, instead of measuring it
    #[arg(long, value_name = "FILE")]
    pub profile: Option<PathBuf>,
    /// Directory of the dataset
    #[arg(long, value_name = "DIR", default_value = "data")]
    pub out: PathBuf,
}
