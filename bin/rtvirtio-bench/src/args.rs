//! The command line of the experiments, with examples. No logic.

mod accuracy;
mod blame;
mod cases;
mod contention;
mod daemon;
mod demo_busy;
mod fleet;
mod host;
mod isolation;
mod net;
mod plan;
mod regulation;
mod report;
mod reservation;
mod responsiveness;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use rtvirtio_console::Global;
use rtvirtio_experiments::ageing::AgeingOptions;
use rtvirtio_experiments::before_after::BeforeAfterOptions;
use rtvirtio_experiments::cores::CoresOptions;
use rtvirtio_experiments::cpu_predict::CpuPredictOptions;
use rtvirtio_experiments::cyclictest::CyclictestOptions;
use rtvirtio_experiments::fleet::FleetOptions;
use rtvirtio_experiments::iod::IodOptions;
use rtvirtio_experiments::iod_added::AddedOptions;
use rtvirtio_experiments::iod_attach::AttachOptions;
use rtvirtio_experiments::iod_crash::CrashOptions;
use rtvirtio_experiments::iod_migrate::MigrateOptions;
use rtvirtio_experiments::iod_startup::StartupOptions;
use rtvirtio_experiments::paravirt::ParavirtOptions;
use rtvirtio_experiments::profile_time::ProfileTimeOptions;
use rtvirtio_experiments::run_basis::RunOptions;
use rtvirtio_experiments::sweep::SweepOptions;
use rtvirtio_experiments::tails::TailsOptions;

pub use accuracy::BenchAccuracyArgs;
pub use blame::BenchBlameArgs;
pub use cases::BenchCasesArgs;
pub use contention::BenchContentionArgs;
pub use daemon::{BenchDaemonArgs, BenchDaemonDayArgs, BenchDaemonScaleArgs, SLEEPER, SleeperArgs};
pub use demo_busy::BenchDemoBusyArgs;
pub use fleet::BenchFleetClusterArgs;
pub use host::BenchHostArgs;
pub use isolation::BenchIsolationArgs;
pub use net::BenchNetArgs;
pub use plan::BenchPlanArgs;
pub use regulation::{BenchRegulationArgs, PartName};
pub use report::BenchReportArgs;
pub use reservation::{BenchKillAtArgs, BenchReservationArgs};
pub use responsiveness::BenchResponsivenessArgs;

/// The experiments: datasets, the papers' cases, how well predictions hold.
#[derive(Parser, Debug)]
#[command(
    name = "rtvirtio-bench",
    version,
    about,
    max_term_width = 110,
    after_help = "\
EXAMPLES
  sudo rtvirtio-bench before-after         does the first tour show what it says, ten times
  sudo rtvirtio-bench cases --only 3vm-LM- the RT-VirtIO paper's Fig. 7
  rtvirtio-bench report --html report.html all results of a directory

Emulated devices and guests are served by the rtvirtio-lab next to this program."
)]
pub struct Cli {
    /// The experiment.
    #[command(subcommand)]
    pub command: BenchCommand,
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
}

/// The experiments.
#[derive(Subcommand, Debug)]
pub enum BenchCommand {
    /// Measure a space-filling design of loads and settings: the dataset that models learn from
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench sweep twin:qlc-nvme --points 20 --out /tmp/sweep
  sudo rtvirtio-bench sweep twin:qlc-nvme twin:emmc --points 300   a stopped run continues")]
    Sweep(SweepOptions),
    /// 1 to 4 VMs by six task sets in three tiers of targets, all schemes side by side
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench cases --tier paper --only 3vm-LM-           the paper's Fig. 7
  sudo rtvirtio-bench cases --repeat 3 --model /tmp/model.json
  rtvirtio-bench cases --report-only --json | jq .claims          the results so far

A stopped run continues. Exit code 2 when a claim is not met.")]
    Cases(BenchCasesArgs),
    /// Growth of tails with contention, and effect of settings: the RT-VirtIO paper's Figs. 2 and 5
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench contention --repeat 3
  rtvirtio-bench contention --report-only --model /tmp/model.json --html contention.html

A stopped run continues.")]
    Contention(BenchContentionArgs),
    /// Fit the models on a part of a dataset and judge them on the remaining runs
    #[command(after_help = "\
EXAMPLES
  rtvirtio-bench accuracy data/qlc-nvme.jsonl
  rtvirtio-bench accuracy data/qlc-nvme.jsonl --model /tmp/model.json
                                                     also save the models for `--model` of the others")]
    Accuracy(BenchAccuracyArgs),
    /// Whether estimates of p99.99 from few samples hold: long runs cut into pieces
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench tails
  sudo rtvirtio-bench tails twin:emmc --for 10min --piece 2s --out /tmp/tails
  rtvirtio-bench tails --report-only --json | jq .claims

Exit code 2 when a claim is not met.")]
    Tails(Bench<TailsOptions>),
    /// Profiles that end when all is known against 36 s: time, and whether bounds hold
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench profile-time                  ten rounds on each emulated device, under two hours
  sudo rtvirtio-bench profile-time file:/var/tmp/disk --repeat 3 --out /tmp/own
  rtvirtio-bench profile-time --report-only --json | jq .claims

Exit code 2 when a claim is not met.")]
    ProfileTime(Bench<ProfileTimeOptions>),
    /// The first tour again and again: the kernel's default settings and a plan in turn
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench before-after                    ten rounds of examples/heavy-process.toml, ten minutes
  sudo rtvirtio-bench before-after examples/fig7-process.toml --repeat 3 --for 60s --out /tmp/tour
  rtvirtio-bench before-after --report-only --json | jq .claims

Exit code 2 when a round misses nothing without the plan, misses a target with it, or shows no target of a VM to hold.")]
    BeforeAfter(Bench<BeforeAfterOptions>),
    /// Causes of missed targets: those that the product names against those that were planted
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench blame --runs 1 --out /tmp/blame        each cause once, alone, and five pairs: about four minutes
  sudo rtvirtio-bench blame --vm process --only disk_stall,kernel_limit --out /tmp/blame
  rtvirtio-bench blame --report-only --out /tmp/blame --json | jq .claims

The VM and its neighbour are QEMU guests on an emulated drive. A VM of plain processes has no lasting threads, so
causes on its CPUs cannot be seen there. A CPU quota is planted by cgroup v1 only, and `paging` where the directory of
downloads (`--cache-dir`) is on a disk that the host can swap to. All causes are taken away after each run. Exit code 2 when a claim is not met.")]
    Blame(BenchBlameArgs),
    /// Predictions with and without the CPU's term, against runs under CPU load
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench cpu-predict                              80 runs with loads of 0 to 2 CPUs: about 25 minutes
  sudo rtvirtio-bench cpu-predict --runs 3 --for 4s --out /tmp/cpu
  rtvirtio-bench cpu-predict --report-only --json | jq .claims

The VM is a QEMU guest on an emulated drive. The result is written after each run, and the same command goes on from it.
Exit code 2 when a claim is not met.")]
    CpuPredict(Bench<CpuPredictOptions>),
    /// The demo while other programs use the CPUs: misses of what it said would hold, and causes
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench demo-busy                              ten demos next to busy threads: half an hour
  sudo rtvirtio-bench demo-busy --runs 1 --for 10s --out /tmp/busy
  rtvirtio-bench demo-busy --report-only --json | jq .claims

The result is written after each demo, and the same command goes on from it. Exit code 2 when a claim is not met.")]
    DemoBusy(BenchDemoBusyArgs),
    /// Duration of planning, and distance from the best of an exhaustive search
    #[command(
        after_help = "EXAMPLES\n  rtvirtio-bench plan --model /tmp/model.json\n  rtvirtio-bench plan --repeat 50 --out /tmp/planning --json | jq .claims"
    )]
    Plan(BenchPlanArgs),
    /// CPUs for the threads of VMs on random hosts, against the rules and an exhaustive search
    #[command(after_help = "\
EXAMPLES
  rtvirtio-bench cores
  rtvirtio-bench cores --hosts 1000 --seed 7 --out /tmp/cores --json | jq .claims

No host is measured: hosts and VMs are drawn from the seed, the placements and their time are real. Exit code 2 when a
claim is not met.")]
    Cores(Bench<CoresOptions>),
    /// Devices that age over months, in simulation: bounds from a corrected profile, and from a
    /// fixed one
    #[command(after_help = "\
EXAMPLES
  rtvirtio-bench drift                                90 days of 12 devices, about a minute
  rtvirtio-bench drift --seed 7 --out /tmp/drift --json | jq .claims

No device is measured: the emulated flash drive ages in simulation. Exit code 2 when a claim is not met.")]
    Drift(Bench<AgeingOptions>),
    /// isol-bench's questions to ten ways to divide a device: overhead, fairness, priority, bursts
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench isolation --rounds 1 --for 2s --out /tmp/isolation      about ten minutes
  rtvirtio-lab box --timeout 2h --out box -- rtvirtio-bench isolation /dev/nullb0 --rounds 1 --for 2s --out .
  rtvirtio-bench isolation --report-only --out box --html isolation.html

io.cost and io.latency need cgroup v2, as in the box. A mode that the host lacks is left out with the reason. A stopped run
goes on: the result is written after each case.")]
    Isolation(BenchIsolationArgs),
    /// The I/O domain compared with existing schedulers: a flood next to declared rates, and the
    /// cost of a request
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench iod --repeat 3 --html iod.html
  rtvirtio-bench iod --report-only --json | jq .claims

Measured by a vhost-user-blk frontend without a VM. Exit code 2 when a claim is not met.")]
    Iod(Bench<IodOptions>),
    /// The service that keeps contracts: how soon it acts, its cost, `kill -9`, simulated months
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench daemon
  sudo rtvirtio-bench daemon --threads 10 --restarts 3 --kills 6 --idle 10s --pairs 2 --out /tmp/daemon --json | jq .claims
  rtvirtio-bench daemon --report-only --json | jq .claims

On QEMU processes, one of them with a guest, with the rtvirtiod next to this program. Exit code 2 when a claim is not met.")]
    Daemon(BenchDaemonArgs),
    /// A day of mishaps in minutes, under a static plan and under the service
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench daemon-day
  sudo rtvirtio-bench daemon-day --windows 2 --out /tmp/day --svg /tmp/day
  rtvirtio-bench daemon-day --report-only --json | jq .claims

Three emulated guests on an emulated eMMC: one gets a thread, a neighbour floods, the device slows by half, another tool
takes a limit away, a guest is started again. About 40 minutes, with the rtvirtio and rtvirtiod next to this program. Needs root.")]
    DaemonDay(BenchDaemonDayArgs),
    /// Hundreds of contracts, 100 VMs in one file, and a VM of 5000 threads
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench daemon-scale
  sudo rtvirtio-bench daemon-scale --repeat 1 --service target/release/rtvirtiod --out /tmp/scale --json | jq .claims
  rtvirtio-bench daemon-scale --report-only --json | jq .claims

VMs are processes that sleep. About a minute a round. Exit code 2 when a claim is not met. Needs root, and real-time groups
of cgroup v1.")]
    DaemonScale(BenchDaemonScaleArgs),
    /// Latency and CPU time that the I/O domain adds to the bare device, which fio reads by
    /// io_uring
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench iod-added                       five minutes, on a loop device over memory
  sudo rtvirtio-bench iod-added --device twin:emmc --device file:/var/tmp/disk
  sudo rtvirtio-bench iod-added --pairs 1 --for 1s --out /tmp/added --json | jq .claims

Through the I/O domain reads a vhost-user client without a VM, which sleeps or polls. Exit code 2 when a claim is not met.")]
    IodAdded(Bench<AddedOptions>),
    /// Disks come and go while a client on the same engine verifies its data
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench iod-attach
  sudo rtvirtio-bench iod-attach --disks 10 --out /tmp/attach --json | jq .claims

Attaches and detaches as `rtvirtio iod attach|detach` do. Exit code 2 when a claim is not met.")]
    IodAttach(Bench<AttachOptions>),
    /// The I/O domain under a real guest, killed repeatedly: no acknowledged write may be lost
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench iod-crash                       50 times `kill -9`, about five minutes under TCG
  sudo rtvirtio-bench iod-crash file:/var/tmp/disk --kills 5 --seed 7
  rtvirtio-bench iod-crash --report-only --json | jq .claims

A guest writes and verifies with fio while the domain that serves its disk is killed at random moments and restarted. Exit code 2 when a claim is not met.")]
    IodCrash(Bench<CrashOptions>),
    /// Live migrations of a guest that verifies, next to one on QEMU's own disk; cost of the log
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench iod-migrate                                  100 migrations of each guest, under an hour with 16 kills
  sudo rtvirtio-bench iod-migrate --migrations 4 --pairs 1 --kills 1 --refusals 2 --cards 1 --out /tmp/migrate
  rtvirtio-bench iod-migrate --report-only --json | jq .claims

The result is written after each migration. A second call with the same --out makes what the file lacks. Exit code 2 when a claim is not met.")]
    IodMigrate(Bench<MigrateOptions>),
    /// Start-up time of an application in a real guest, under load in the guest and from another VM
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench iod-startup
  sudo rtvirtio-bench iod-startup twin:emmc --repeat 7
  sudo rtvirtio-bench iod-startup --with /usr/lib/python3.11 -- python3 -c 'import json, http.client'
  rtvirtio-bench iod-startup --report-only --json | jq .claims

Start-ups with a cold page cache: without load; with load first come first served; with a reservation for the VM; with a
reservation for the requests that the guest's kernel marks real-time (`ionice -c 1`). Exit code 2 when a claim is not met.")]
    IodStartup(Bench<StartupOptions>),
    /// Start-ups of applications in a guest, cell by cell: guest load, host load, schedulers, and
    /// what the host does about it
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench responsiveness --quick --out /tmp/start          a first look, about two minutes
  sudo rtvirtio-bench responsiveness twin:microsd twin:emmc twin:disk-1.8in --html start.html
  sudo rtvirtio-bench responsiveness file:/var/tmp/disk --planes default,kernel --host-schedulers bfq,mq-deadline,none
  rtvirtio-bench responsiveness --report-only --json | jq .claims

Caches are cold before every start-up. A stopped matrix continues, and one with other cells is added to. Exit code 2 when a claim is not met.")]
    Responsiveness(Box<BenchResponsivenessArgs>),
    /// Networks of the I/O domain next to QEMU's taps: round trips of a VM while its neighbour is
    /// flooded, floods a slow link, or attacks
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench net
  sudo rtvirtio-bench net --rounds 1 --requests 4000 --crashes 1      a first look, about two minutes
  sudo rtvirtio-bench net --only ping             1000 pings, idle and next to a flood
  sudo rtvirtio-bench net --only sv               sampled values to a disk, next to floods on both
  sudo rtvirtio-bench net --only web              the web requests of `rtvirtio-bench reservation` as frames, deadline 20 ms
  sudo rtvirtio-bench net --only timeline --svg /tmp/figures   round trips while a flood begins and ends
  sudo rtvirtio-bench net --fifo 30 --cpu-budget 30%           with a real-time thread that has a limit
  rtvirtio-bench net --report-only --json | jq .claims

Four guests in network namespaces of their own; nothing leaves the machine. Exit code 2 when a claim is not met.")]
    Net(BenchNetArgs),
    /// (alpha, Delta) under ten rates of the I/O domain's regulators, alone and next to a
    /// memory-bound load; bounds; a neighbour's rate for a victim's target
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench regulation                          about 26 minutes
  sudo rtvirtio-bench regulation --load device --load held --add      two more loads into the same result, about 24 minutes
  sudo rtvirtio-bench regulation --quick --out /tmp/regulation
  sudo rtvirtio-bench regulation --quick --flow read --out /tmp/regulation --svg /tmp/figures
  rtvirtio-bench regulation --report-only --json | jq .claims

The I/O-domain paper's Figs. 8 to 10. Disk and link are memory of this machine; frames stay in a network namespace. Exit code 2 when a claim is
not met.")]
    Regulation(BenchRegulationArgs),
    /// CPU contracts: throughput over budget, isolation and web requests of two guests on one core
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench reservation --repeat 3
  sudo rtvirtio-bench reservation --kills
  sudo rtvirtio-bench reservation --for 4s --requests 200 --html reservation.html
  rtvirtio-bench reservation --report-only --json | jq .claims

The experiments of the reservations paper (its Figs. 1b to 4), all through QEMU's own network; and apply and revert of
a contract, killed (kill -9) before and after every change. Where guests are emulated, period and deadline of the web
requests are scaled so that an unloaded response is a tenth of them; `rtvirtio-bench net --only web` has them as frames through
the I/O domain with the paper's 20 ms. Exit code 2 when a claim is not met.")]
    Reservation(BenchReservationArgs),
    /// Wake-up latency of a thread in a guest under I/O and cache load: cyclictest, with and
    /// without real-time priorities
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench cyclictest
  sudo rtvirtio-bench cyclictest --for 5min --repeat 3 --preempt-rt --html cyclictest.html
  rtvirtio-bench cyclictest --report-only --json | jq .claims

The RT hypervisor paper's Figs. 1 to 5: on the host; in a guest with default priorities; with its threads real-time; with AIO
workers lowered; with the I/O load moved to the host. All of it shares one core. Exit code 2 when a claim is not met.")]
    Cyclictest(Bench<CyclictestOptions>),
    /// Many hosts: what adding up integers costs, and contracts placed in simulated fleets
    #[command(after_help = "\
EXAMPLES
  rtvirtio-bench fleet --html fleet.html              100 to 100 000 hosts, ten contracts for each
  rtvirtio-bench fleet --hosts 100,1000 --out /tmp/fleet
  rtvirtio-bench fleet --report-only --json | jq .claims

No host is measured: hosts and contracts are simulated, the decisions and their time are real. Results of `rtvirtio-bench fleet-cluster` in the same
directory (fleet-cluster.json, fleet-cluster-slow.json) are reported with it. Exit code 2 when a claim is not met.")]
    Fleet(Bench<FleetOptions>),
    /// Contracts in a real Pacemaker cluster, three nodes in namespaces of this machine: a node
    /// dies, a link is cut, a move is refused, a node joins, a contract is raised, a disk is slow
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench fleet-cluster
  sudo rtvirtio-bench fleet-cluster --vms domain        VMs as domains of a libvirt of each node
  sudo rtvirtio-bench fleet-cluster --fencing           a lost node is switched off before its VMs start elsewhere
  sudo rtvirtio-bench fleet-cluster --slow              the disk of one node becomes slow: nothing is placed there
  sudo rtvirtio-bench fleet-cluster --repeat 1 --out /tmp/cluster --json | jq .claims

Needs pacemaker, corosync and resource-agents (`scripts/deps.sh test`) and real-time groups of cgroup v1. About three minutes for a repetition. Exit code 2
when a claim is not met.")]
    FleetCluster(BenchFleetClusterArgs),
    /// A guest that says what is urgent, next to a batch VM on one core: latency, throughput, cost,
    /// lies
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-bench paravirt
  sudo rtvirtio-bench paravirt --for 60s --repeat 10 --html paravirt.html
  sudo rtvirtio-bench paravirt --only chain --out /tmp/chain    timer, task, read in the I/O domain, answer: priorities in each step
  rtvirtio-bench paravirt --report-only --json | jq .claims

The RT hypervisor paper's section 5 on stock kernels: a timed task and a background job in one VM, a batch job in another; against no priorities
and the first VM above the second always. Exit code 2 when a claim is not met.")]
    Paravirt(BenchParavirtArgs),
    /// Capabilities of this host: as many experiments as fit into a time, in one bundle next to
    /// the published figures
    #[command(after_help = "\
EXAMPLES
  rtvirtio-bench host --dry-run                       which experiments, how long, what they touch
  sudo rtvirtio-bench host --budget 1h                with or without KVM, on an emulated drive
  sudo rtvirtio-bench host --device /srv/vms --only cases --budget 20min
  rtvirtio-bench host --report-only --json | jq .claims

A stopped run goes on. DIR/host.json and DIR/host.html are the bundle: figures, versions and kinds of hardware, without
names, serial numbers and addresses. Each experiment puts back what it changes. Exit code 2 when a claim is not met.")]
    Host(BenchHostArgs),
    /// The child process that `rtvirtio-bench reservation` kills
    #[command(hide = true)]
    KillAt(BenchKillAtArgs),
    /// A process of `rtvirtio-bench daemon-scale` that sleeps
    #[command(hide = true, name = SLEEPER)]
    Sleeper(SleeperArgs),
    /// All claims and figures of the datasets in a directory, on one page
    #[command(after_help = "\
EXAMPLES
  rtvirtio-bench report --html report.html
  rtvirtio-bench report --json | jq '.claims[] | select(.met | not)'

Measures nothing. Exit code 2 when a claim is not met.")]
    Report(BenchReportArgs),
}

/// The directories of this command as options, for another of our programs.
fn directories(global: &Global) -> Vec<String> {
    let dirs = [
        ("--state-dir", &global.state_dir),
        ("--run-dir", &global.run_dir),
        ("--cache-dir", &global.cache_dir),
    ];
    let words = |(option, dir): (&str, &PathBuf)| [option.to_owned(), dir.display().to_string()];
    dirs.into_iter().flat_map(words).collect()
}

/// Output options of an experiment.
#[derive(Args, Debug)]
pub struct BenchResult {
    /// Directory of the result
    #[arg(long, value_name = "DIR", default_value = "data")]
    pub out: PathBuf,
    /// Measure nothing: show the results in the directory
    #[arg(long)]
    pub report_only: bool,
    /// Write an HTML report here
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

/// An experiment of which the options are all that it needs.
#[derive(Args, Debug)]
pub struct Bench<O: Args> {
    /// Options of the experiment
    #[command(flatten)]
    pub options: O,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

/// `rtvirtio-bench paravirt`.
#[derive(Args, Debug)]
pub struct BenchParavirtArgs {
    /// Options of the experiment
    #[command(flatten)]
    pub options: ParavirtOptions,
    /// Write the latencies of both VMs at once as a picture into this directory
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

/// Options of experiments that make runs on a device.
#[derive(Args, Debug)]
pub struct BenchRuns {
    /// Device, model and results
    #[command(flatten)]
    pub options: RunOptions,
    /// Measure nothing: show the results in the directory
    #[arg(long)]
    pub report_only: bool,
    /// Write an HTML report here
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn files_that_the_help_names_exist() {
        let text = rtvirtio_testkit::help(&mut Cli::command());
        assert!(text.contains("EXAMPLES") && text.contains("data/"), "{text}");
        assert_eq!(rtvirtio_testkit::missing_files(&text), Vec::<String>::new());
    }

    #[test]
    fn the_reference_is_that_of_the_arguments() {
        rtvirtio_testkit::check_reference(Cli::command());
    }
}
