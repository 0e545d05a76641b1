//! The command line of `profile`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use rtvirtio_learn::library::Shard;
use rtvirtio_units::Nanos;

/// `profile`.
#[derive(Args, Debug)]
#[command(
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    subcommand_value_name = "cpu|merge"
)]
pub struct ProfileArgs {
    /// Something else than a device.
    #[command(subcommand)]
    pub what: Option<ProfileCommand>,
    /// A block device, or the spec of a running lab
    #[arg(value_name = "DEVICE|SPEC", required = true)]
    pub target: Option<String>,
    /// Measure writes too: EVERYTHING ON THE DEVICE IS LOST
    #[arg(long)]
    pub destroy_data: bool,
    /// At most 4 reads at a time, under the elevator that is set: for a disk that VMs use. What the
    /// device does when it is full, BFQ's cost, larger requests and writes are then not known
    #[arg(long, conflicts_with_all = ["destroy_data", "sweep"])]
    pub gentle: bool,
    /// Let a gentle measurement take the place of a whole one, which shows more, or of a file that
    /// cannot be read
    #[arg(long, requires = "gentle")]
    pub replace: bool,
    /// Flood the device although VMs use it: they are slowed meanwhile
    #[arg(long)]
    pub yes: bool,
    /// File for the profile instead of the state directory. With --shard: file for this host's
    /// share, for `profile merge`
    #[arg(long, short, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Also measure chosen loads and settings for this long and learn a model of the host from
    /// them; a stopped sweep continues with the same command. About 120 runs of 10 s are the least
    #[arg(long, value_name = "TIME")]
    pub sweep: Option<Nanos>,
    /// Only part I of N of the sweep, such as 3/8, for hosts with devices of one kind; `slurm`
    /// takes I and N from the job array that it runs in
    #[arg(long, value_name = "I/N|slurm", requires_all = ["sweep", "out"])]
    pub shard: Option<ShardArg>,
    /// A directory of `profile merge`: where it knows the kind of device, a few points confirm that
    /// this one is like it, and its profile and model are saved. Else all is measured
    #[arg(long, value_name = "DIR", conflicts_with_all = ["gentle", "sweep"])]
    pub library: Option<PathBuf>,
    /// Stands for the drive's model, for --shard and --library, where the kernel knows none: the
    /// same on every host
    #[arg(long, value_name = "NAME")]
    pub kind: Option<String>,
    /// Most time for the measurement of the device, which ends when all is known: at least 6 s, 3 s
    /// with --gentle, 10 s with writes
    #[arg(long = "for", value_name = "TIME", default_value = "36s")]
    pub length: Nanos,
}

/// Measurements of other things than a device.
#[derive(Subcommand, Debug)]
pub enum ProfileCommand {
    /// A VM's throughput over its CPU budget, from which `plan` and `apply` find the budget of a
    /// demand
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio profile cpu web --spec plant.toml --url http://10.0.0.7/page
                                          throughput at 10, 20 ... 90 % of its period, three times, about 3 min
  sudo rtvirtio profile cpu web --spec plant.toml --url http://10.0.0.7/page --neighbour batch --neighbour-url http://10.0.0.8/
                                          also next to a neighbour that has 10, 20, 30, 40 %: what its traffic takes
  sudo rtvirtio profile cpu db --load 'pgbench -h 10.0.0.9 -T {seconds} | sed -n \"s/^tps = \\([0-9.]*\\).*/\\1/p\"'
                                          a VM of the lab that is up, and a client of its own
  sudo rtvirtio profile cpu 4711 --period 5ms --url http://10.0.0.7/ -o web.json
                                          a VMM by its process id

A contract of each budget is applied and put back, journaled: `rtvirtio revert` does it after a crash. Meanwhile the VM gets less CPU time than it
is used to. Make the load from another machine, or it competes with the VM for the CPUs. The same command resumes where it was stopped.")]
    Cpu(Box<ProfileCpuArgs>),
    /// Make one entry of a library from the shares of hosts with one kind of device, or report why
    /// they do not belong together
    #[command(after_help = "\
EXAMPLES
  rtvirtio profile merge share-*.json --library /srv/devices
  rtvirtio profile merge share-*.json --library /srv/devices --dry-run --json | jq .missing

A kind is model, firmware, size and cache of the drive, kernel and CPUs of the host. Shares and entries hold no serial numbers and no
host names. Of throughput and median latency the entry has the medians, of every tail the longest. With 120 different runs a model is
learned too. examples/fleet/slurm/ has the job array.")]
    Merge(ProfileMergeArgs),
}

/// `profile merge`.
#[derive(Args, Debug)]
pub struct ProfileMergeArgs {
    /// Shares written by `profile DEVICE --sweep TIME --shard I/N -o FILE`
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// The library's directory
    #[arg(long, value_name = "DIR")]
    pub library: PathBuf,
    /// Replace what the library has of this kind
    #[arg(long)]
    pub replace: bool,
    /// Show what it would be, and write nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// Parsed value of `--shard`.
#[derive(Clone, Copy, Debug)]
pub enum ShardArg {
    /// Part given as `I/N`.
    Given(Shard),
    /// By the environment of a job array.
    Slurm,
}

impl std::str::FromStr for ShardArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "slurm" { Ok(Self::Slurm) } else { text.parse().map(Self::Given) }
    }
}

/// `profile cpu`.
#[derive(Args, Debug)]
pub struct ProfileCpuArgs {
    /// The VM: its name in the spec or in the lab that is up, or the process id of its VMM
    pub vm: String,
    /// The spec that describes how the VMs are reached [default: the lab that is up]
    #[arg(long, value_name = "SPEC")]
    pub spec: Option<PathBuf>,
    /// Load: requests to this web server of the VM, which follow each other at once
    #[arg(long, value_name = "http://...", required_unless_present = "load", conflicts_with = "load")]
    pub url: Option<String>,
    /// Load: a command of the shell that loads the VM for about {seconds} and prints how many
    /// requests a second were answered, as its last word
    #[arg(long, value_name = "CMD")]
    pub load: Option<String>,
    /// Connections at a time to a web server
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub connections: usize,
    /// Also measure next to this VM under load
    #[arg(long, value_name = "VM")]
    pub neighbour: Option<String>,
    /// The neighbour's load, as --url
    #[arg(long, value_name = "http://...", requires = "neighbour", conflicts_with = "neighbour_load")]
    pub neighbour_url: Option<String>,
    /// The neighbour's load, as --load; it is started again whenever it ends
    #[arg(long, value_name = "CMD", requires = "neighbour")]
    pub neighbour_load: Option<String>,
    /// The neighbour's budgets, in percent of the period
    #[arg(
        long,
        value_name = "PERCENT,...",
        value_delimiter = ',',
        default_values_t = [10, 20, 30, 40],
        requires = "neighbour"
    )]
    pub neighbour_budgets: Vec<u64>,
    /// The VM's budgets, in percent of the period
    #[arg(long, value_name = "PERCENT,...", value_delimiter = ',', default_values_t = [10, 20, 30, 40, 50, 60, 70, 80, 90])]
    pub budgets: Vec<u64>,
    /// Period of the contracts [default: what the deadline of the spec's demand allows, else 100ms]
    #[arg(long, value_name = "TIME")]
    pub period: Option<Nanos>,
    /// Length of each measurement
    #[arg(long = "for", value_name = "TIME", default_value = "5s")]
    pub length: Nanos,
    /// Measurements of each budget; a demand needs at least two for a confidence
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub repeat: usize,
    /// File for the profile instead of the state directory
    #[arg(long, short, value_name = "FILE")]
    pub out: Option<PathBuf>,
}
