//! The command line, with examples. No logic.

mod apply;
mod contract;
mod discover;
mod fleet;
mod iod;
mod ivshmem;
mod keep;
mod measure;
mod plan;
mod profile;
mod regulator;
mod simulate;
mod starts;
mod threads;
mod top;
mod tune;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use rtvirtio_arguments::Group;
use rtvirtio_console::Global;

pub use apply::*;
pub use contract::*;
pub use discover::*;
pub use fleet::*;
pub use iod::*;
pub use ivshmem::*;
pub use keep::*;
pub use measure::*;
pub use plan::*;
pub use profile::*;
pub use regulator::*;
pub use simulate::*;
pub use starts::*;
pub use threads::*;
pub use top::*;
pub use tune::*;

/// Predictable I/O for virtual machines on stock Linux with QEMU/KVM.
#[derive(Parser, Debug)]
#[command(
    name = "rtvirtio",
    version,
    about,
    max_term_width = 110,
    after_help = "\
EXAMPLES
  sudo rtvirtio check                         is this host ready?
  sudo rtvirtio profile /dev/nvme0n1          measure the device (reads only)
  rtvirtio plan plant.toml -o plant.plan      choose settings that meet every target
  sudo rtvirtio apply plant.plan --dry-run    what would be written
  sudo rtvirtio apply plant.plan              write it, journaled
  sudo rtvirtio verify plant.toml             run the declared tasks and judge them
  sudo rtvirtio revert                        put everything back
  sudo rtvirtio-lab demo                      all of it on an emulated device and three QEMU guests"
)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
}

/// Headings of the commands in the help.
pub const GROUPS: &[Group] = &[
    ("See what is there", &["check", "discover", "profile", "threads"]),
    ("Plan, apply, put back", &["predict", "plan", "apply", "status", "verify", "tune", "revert"]),
    ("Keep in force", &["contract", "top", "keep"]),
    ("I/O domain: disks and network cards served by a process", &["iod", "simulate"]),
    ("Single uses", &["measure", "starts", "ivshmem", "regulator", "fleet"]),
];

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Check whether this host is ready; each finding names its reason and remedy
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio check            exit code 0 when nothing fails, 1 otherwise, as without root
  sudo rtvirtio check --guest /run/vm0.qga   also whether this guest passes its I/O priorities to the I/O domain
  sudo rtvirtio check --json | jq '.[] | select(.level == \"fail\")'")]
    Check(CheckArgs),
    /// List the VMs that run here, with their disks, and write a first spec for them; nothing in a
    /// guest is touched
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio discover                                 libvirt, Proxmox, plain QEMU, Cloud Hypervisor, Firecracker, crosvm
  sudo rtvirtio discover --observe 5min -o plant.toml    with what each VM does, and proposed targets
  sudo rtvirtio discover --observe 1min --json | jq '.vms[].disks[].activity'

What a VM does is read from QEMU's own counters and latency histograms where its monitor can be reached, else from its cgroup's.
The histograms are set for the time of the observation and removed at its end. Without sudo only your own VMs can be inspected.")]
    Discover(DiscoverArgs),
    /// Measure a device, or with `cpu` a VM, and save its profile, which `predict`, `plan` and
    /// `apply` read
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio profile /dev/nvme0n1            reads only: data stays, but it floods the disk for half a minute
  sudo rtvirtio profile /dev/nvme0n1 --gentle   under VMs that run: at most 4 reads at a time, the elevator as it is
  sudo rtvirtio profile /dev/sdb --destroy-data writes too: everything on the disk is lost
  sudo rtvirtio profile examples/fig7.toml      the device of a running lab, and I/O as its first VM sees it
  sudo rtvirtio profile /dev/nvme0n1 --sweep 30min    also learn how tails depend on load and settings
  sudo rtvirtio profile cpu web --url http://10.0.0.7/   a VM's throughput over its CPU budget
  sudo rtvirtio profile /dev/nvme0n1 --sweep 5min --shard 3/8 -o share-3.json   part 3 of a sweep that 8 hosts share
  sudo rtvirtio profile /dev/nvme0n1 --library /srv/devices   of a known kind: seconds, to confirm that it is like the others

The elevator is changed during the measurement and put back (not with --gentle). Other I/O on the device spoils the numbers: stop it
first. While VMs have the device, or an image on it, open, it is refused without --gentle or --yes.")]
    Profile(Box<ProfileArgs>),
    /// Predict every task's tail latency under the settings in force, and show where the time goes
    #[command(after_help = "\
EXAMPLES
  rtvirtio predict plant.toml                under the settings found on this host
  rtvirtio predict plant.toml --defaults     under the kernel's default BFQ settings
  rtvirtio predict plant.toml --model slice  by the formulas, although a model was learned")]
    Predict(PredictArgs),
    /// Choose settings that meet every target, or report which cannot be met and why. Changes
    /// nothing
    #[command(after_help = "\
EXAMPLES
  rtvirtio plan plant.toml                     show the plan
  rtvirtio plan plant.toml -o plant.plan       and save it for `apply`
  rtvirtio plan plant.toml --model bound       search with the bound that was learned on this host
  rtvirtio plan plant.toml --margin 20         leave VMs without targets more of the device
  rtvirtio plan plant.toml --domain --disk vm0=/dev/vg0/vm0 --disk vm1=/dev/vg0/vm1 -o iod.toml
                                               plan the I/O domain instead: reservations with bounds

Exit code 2 when some target cannot be met; the plan is then the best compromise.")]
    Plan(PlanArgs),
    /// Run the spec's tasks on the I/O domain's own scheduler under virtual time: worst case and
    /// bound. Changes nothing
    #[command(after_help = "\
EXAMPLES
  rtvirtio simulate examples/flood.toml                              ten minutes
  rtvirtio simulate examples/flood.toml --for 24h                    a day
  rtvirtio simulate examples/flood.toml --policy edf --policy fifo   next to a backend that does not schedule
  rtvirtio simulate examples/flood.toml --worst                      how near it comes to the bound

The device is what the spec's twin declares, or the measured profile of a real one. Exit code 2 when a target cannot be promised, or is missed as planned.")]
    Simulate(SimulateArgs),
    /// Write a plan's settings: captured, journaled, read back, rolled back on any failure
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio apply plant.plan --dry-run   every write as `path: old -> new`, nothing changed
  sudo rtvirtio apply plant.plan
  sudo rtvirtio apply plant.toml             plan first, then apply when all targets are predicted to be met
  sudo rtvirtio apply iod.toml               start the I/O domain on a file of `plan --domain`
  sudo rtvirtio apply plant.toml --cpu-only  only the CPU contracts and priorities of its VMs
  sudo rtvirtio apply plant.toml --traffic-only   only the limits of its VMs' traffic

Exit code 2, and nothing changed, when some target cannot be met or the CPU contracts are more than the kernel grants.")]
    Apply(ApplyArgs),
    /// Keep the CPU contracts in force valid: give new threads their settings, split budgets by
    /// use. Until Ctrl-C
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio apply plant.toml --cpu-only && sudo rtvirtio keep plant.toml
  sudo rtvirtio keep plant.toml --json | jq -r 'select(.event == \"failed\")'

Each new thread is journaled before it is touched, so `rtvirtio revert` puts it back, also after a crash of this command. It may be stopped and started again
at any time, and ends by itself after a revert, or with the VMs.")]
    Keep(KeepArgs),
    /// Raise a VM's share of the device while something starts in it, as its guest says. Until
    /// Ctrl-C
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio starts desk.toml --port desk=/run/desk.start
  sudo rtvirtio starts desk.toml --port desk=/run/desk.start --budget 20s --within 2min --weight 500
  rtvirtio-guest start gimp                 in the guest: this is being started

docs/guide/start-up.md has the steps. Needs BFQ on the device, a cgroup for the VM, and the virtio-serial port
org.rtvirtio.start.0. Both weights are journaled before anything is changed, so `rtvirtio revert` puts the first one
back, also after a crash of this command.")]
    Starts(StartsArgs),
    /// Give a VM's part of a spec to rtvirtiod, which keeps it in force at every start of the VM;
    /// show, accept and remove such contracts
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio contract set plc plant.toml   the VM plc of the spec, from now on and at every start of it
  sudo rtvirtio contract show                 all, with their state
  sudo rtvirtio contract accept plc           where rtvirtiod asks first (`mode = \"ask\"`)
  sudo rtvirtio contract plan                 the plan of their disks that the service holds
  sudo rtvirtio contract remove plc

Exit code of `show` 3 when a contract is not as it asks.")]
    Contract(ContractArgs),
    /// Targets of all VMs that rtvirtiod observes, one line each, the most trouble first: p99,
    /// verdict, cause, and who waits for whom
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio top                  until q; space updates now, s changes the order
  sudo rtvirtio top --once           one look, as without a terminal
  sudo rtvirtio top --json | jq '.lines[] | select(.verdict == \"missed\") | {vm, causes}'

Verdicts, p99 and causes are of the last five minutes. `rtvirtio contract show VM` has each cause with its evidence and remedy.")]
    Top(TopArgs),
    /// Give a VM's `ivshmem-doorbell` device its memory and doorbell, for a guest that says what is
    /// urgent. Until Ctrl-C
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio ivshmem /run/rtvirtio/plc.ivshmem &
  qemu-system-x86_64 ... -chardev socket,id=urgency,path=/run/rtvirtio/plc.ivshmem -device ivshmem-doorbell,chardev=urgency,vectors=1

QEMU must find it when it starts, and goes on without it. `rtvirtio keep` follows the page. `ivshmem-plain` needs no server: see
docs/guide/urgency.md.")]
    Ivshmem(IvshmemArgs),
    /// Show a spec's traffic limits as settings of regulators: commands, words, addresses, what
    /// each keeps and the error that remains. Changes nothing
    #[command(after_help = "\
EXAMPLES
  rtvirtio regulator plant.toml                                     every regulator that can express them
  rtvirtio regulator plant.toml --vm build --actuator tc-htb --interface vnet3
  rtvirtio regulator plant.toml --actuator resctrl --full-bandwidth 12GB/s
  rtvirtio regulator plant.toml --actuator qos400 --soc zynqmp --master gem --clock 247.5MHz
  rtvirtio regulator qos400 --rate 125MB/s --burst 8KiB --clock 250MHz --transaction 8B
  rtvirtio regulator qos400 --clock 247.5MHz --decode 0xff000000 0x1 0x10000000

A guarantee is never exceeded; a cap by the excess that is shown; nothing bounds what passes a hint. `apply` sets those of disks through the
kernel, `plan --domain` in the I/O domain. docs/guide/traffic.md explains them.")]
    Regulator(Box<RegulatorArgs>),
    /// Show the applied settings, and whether they are still in force
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio status
  sudo rtvirtio status --json | jq '.knobs[] | select(.state != \"in_force\")'

Exit code 3 when a setting is not as applied or cannot be read, when `apply` or `revert` was interrupted, and when the I/O domain does not run. Settings that are gone
with a thread or a device are counted and are no reason, unless all are; a VM that has ended is one.")]
    Status,
    /// Put back every setting as it was before `apply`, and stop the I/O domain; also after a crash
    /// of rtvirtio
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio revert
  sudo rtvirtio revert --force         also settings that were changed since
  sudo rtvirtio revert --keep          leave those as they are, and forget about them
  sudo rtvirtio revert --stop-domain   stop the I/O domain also while guests are attached to it

Each part is put back by itself. Exit code 3 when something was left: a setting that was changed since, or an I/O domain that serves guests.")]
    Revert(RevertArgs),
    /// Run the declared tasks in their VMs and judge them against their targets
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio verify plant.toml                60 s
  sudo rtvirtio verify plant.toml --for 5min     long enough to prove p99.99 of a 100/s task
  sudo rtvirtio verify plant.toml --json | jq '.runs[0].tasks[] | select(.verdict != \"met\")'
  sudo rtvirtio verify plant.toml --network-peer br0            and the flows of its network, from its bridge
  sudo rtvirtio verify plant.toml --network-peer far/eth0 --network-echo plc=10.0.0.5:7007 --network-only

Tasks run inside the guest through its agent, or in the VM's cgroup where it has none (fio is needed there).
Exit code 2 when a target is missed, 4 when none is missed but some are not proven yet.")]
    Verify(VerifyArgs),
    /// Measure what a user of a guest waits for
    #[command(
        subcommand,
        after_help = "\
EXAMPLES
  sudo rtvirtio measure start-up desk --spec desk.toml --command 'xterm -e true'"
    )]
    Measure(MeasureCommand),
    /// Plan, apply, measure, correct, until the targets are met or the budget ends
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio tune plant.toml                            ten minutes
  sudo rtvirtio tune plant.toml --budget 30min --for 20s   longer trials, a longer proof
  sudo rtvirtio tune plant.toml --put-back -o plant.plan   keep only the plan

The settings stay in force when the last run missed no target; `rtvirtio revert` puts them back.
Exit codes are those of verify, of VMs that are given up apart; and 2, without a trial, when the device cannot carry all declared rates.")]
    Tune(TuneArgs),
    /// Every thread that works for a VM: role, policy, CPUs, cgroup, CPU time, and what holds it to
    /// a budget
    #[command(after_help = "\
EXAMPLES
  rtvirtio threads                       the VMs of the lab that is up
  rtvirtio threads plant.toml plc        one VM of a spec
  sudo rtvirtio threads 4711 --watch     a VMM by its process id; threads as they come and go
  rtvirtio threads plant.toml --json | jq '.[].threads[] | select(.control.by == null)'

Threads without a budget are shown as `not under control`.")]
    Threads(ThreadsArgs),
    /// Placement of contracts on many hosts, effect of the loss of a host, hardware to buy. Asks
    /// no host, changes nothing
    #[command(after_help = "\
EXAMPLES
  rtvirtio fleet examples/fleet/fleet.toml    hosts with their profiles, contracts with their specs
  rtvirtio fleet site.toml --json | jq '.losses[] | select(.lost != [])'
  rtvirtio fleet site.toml --json | jq -r '.contracts[] | select(.host == null) | .name'
  rtvirtio fleet site.toml --proxmox          commands for the HA manager of Proxmox VE

docs/reference/fleet-toml.md has the file's keys. Capacity is what the I/O domain and the CPU contracts of a host can promise. Where contracts are placed is
the cluster engine's decision; this shows what it can do. Exit code 2 when a contract fits on no host, or would not survive a single loss.")]
    Fleet(FleetArgs),
    /// The I/O domain, the process that serves and schedules the disks and network cards of VMs:
    /// look at it, change it, stop it
    #[command(
        subcommand,
        after_help = "\
EXAMPLES
  sudo rtvirtio apply iod.toml    start it on a file of `rtvirtio plan --domain`
  sudo rtvirtio iod status        what each VM gets
  sudo rtvirtio revert            stop it"
    )]
    Iod(IodCommand),
}

/// `check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// Socket of a guest's agent (qemu-guest-agent): also checks whether the guest's kernel passes
    /// the I/O priorities of its programs to the I/O domain. Once for each guest
    #[arg(long = "guest", value_name = "SOCKET")]
    pub guests: Vec<PathBuf>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn files_that_the_help_names_exist() {
        let text = rtvirtio_testkit::help(&mut Cli::command());
        assert!(text.contains("EXAMPLES") && text.contains("docs/") | text.contains("data/"), "{text}");
        assert_eq!(rtvirtio_testkit::missing_files(&text), Vec::<String>::new());
    }

    #[test]
    fn the_reference_is_that_of_the_arguments() {
        rtvirtio_testkit::check_reference(Cli::command());
    }
}
