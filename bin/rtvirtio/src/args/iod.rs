//! `iod`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use rtvirtio_units::Nanos;

/// `iod`.
#[derive(Subcommand, Debug)]
pub enum IodCommand {
    /// Promised and observed service of each VM: worst cases, misses, rates, tails, (alpha, Delta)
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio iod status
  sudo rtvirtio iod status --watch 1s
  sudo rtvirtio iod status --json | jq '.vms[] | {name, missed: (.promises | map(.missed) | add)}'

The JSON's fields: docs/reference/json.md.")]
    Status(IodStatusArgs),
    /// Take over the changed configuration file under live guests: disks and ports that come and
    /// go, policy, window, weights, reservations, caps, priorities
    #[command(after_help = "\
A file that is wrong, cannot be admitted or needs a restart changes nothing; the answer says why.
Removal of a disk or port with an attached guest is refused without --force.

EXAMPLES
  sudo rtvirtio iod reload
  sudo rtvirtio iod reload --dry-run                          which disks and ports would be added or removed?
  sudo rtvirtio iod reload --control /run/rtvirtio/iod.sock")]
    Reload(IodReloadArgs),
    /// Serve another disk or port: add its table to the configuration file, and reload
    #[command(after_help = "\
FILE has the disk's table under its device, or the port's under its network, as in iod.toml:

  [[device]]
  name = \"nvme0\"
  [[device.disk]]
  name = \"plc2\"
  socket = \"/run/rtvirtio/disks/plc2.sock\"
  path = \"/dev/vg0/plc2\"

  [[network]]
  name = \"station\"
  [[network.port]]
  name = \"plc2\"
  socket = \"/run/rtvirtio/ports/plc2.sock\"
  tap = \"tap-plc2\"
  mac = \"52:54:00:00:00:0d\"

All that a start checks is checked, admission included; a refused one leaves file and domain as they were. A port's tap is
made before, in the network namespace of this command.

EXAMPLES
  sudo rtvirtio iod attach plc2.toml
  sudo rtvirtio iod attach - <plc2.toml")]
    Attach(IodAttachArgs),
    /// Serve a disk or port no longer: remove its table from the configuration file, and reload
    #[command(after_help = "\
Remove it from its guest first (QEMU's device_del, then chardev-remove): vhost-user has no message for a device that goes, only
the end of the connection, after which a guest's requests wait for ever and its link is down. So one whose
queues a guest uses is refused without --force.

EXAMPLES
  sudo rtvirtio iod detach plc2
  sudo rtvirtio iod detach port:plc2                          where a disk and a port have this name
  sudo rtvirtio iod detach plc2 --force")]
    Detach(IodDetachArgs),
    /// End the I/O domain's process
    #[command(after_help = "\
Refused while guests are attached. With --force their requests wait until an I/O domain runs again; they lose nothing.
An I/O domain that `rtvirtio apply` has started is stopped as `rtvirtio revert` stops it.

EXAMPLES
  sudo rtvirtio iod stop
  sudo rtvirtio iod stop --control /run/rtvirtio/iod-b.sock --force")]
    Stop(IodStopArgs),
    /// Each request as it is answered: how long it waited for its turn, and how long the device
    /// took. Each frame as it is passed on or dropped: how long it waited, and why it was dropped
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio iod trace --for 10s
  sudo rtvirtio iod trace --slower-than 2ms                    until Ctrl-C
  sudo rtvirtio iod trace --dropped                            dropped frames and refused requests, with reasons
  sudo rtvirtio iod trace --for 10s --json | jq -s 'map(select(.vm == \"batch\") | .wait_ns) | max'

One listener at a time. With --json one object a line. What came faster than this program reads is counted at the end.")]
    Trace(IodTraceArgs),
}

/// `iod status`.
#[derive(Args, Debug)]
pub struct IodStatusArgs {
    /// The I/O domain's control socket, as in its configuration [default: iod.sock in the run
    /// directory]
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Again and again: what each VM gets in every interval, until Ctrl-C; with --json one object a
    /// line
    #[arg(long, value_name = "TIME")]
    pub watch: Option<Nanos>,
}

/// `iod reload`.
#[derive(Args, Debug)]
pub struct IodReloadArgs {
    /// The I/O domain's control socket, as in its configuration [default: iod.sock in the run
    /// directory]
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Check the file and list the disks and ports that would be added or removed; change nothing
    #[arg(long, conflicts_with = "force")]
    pub dry_run: bool,
    /// Disks and ports go even while guests are attached to them
    #[arg(long)]
    pub force: bool,
}

/// `iod attach`.
#[derive(Args, Debug)]
pub struct IodAttachArgs {
    /// The disk's table under its device, the port's under its network; `-` for standard input
    #[arg(value_name = "FILE")]
    pub tables: PathBuf,
    /// The I/O domain's control socket, as in its configuration [default: iod.sock in the run
    /// directory]
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
}

/// `iod detach`.
#[derive(Args, Debug)]
pub struct IodDetachArgs {
    /// Names of disks and ports, as in `iod status`
    #[arg(value_name = "[disk:|port:]NAME", required = true)]
    pub names: Vec<String>,
    /// The I/O domain's control socket, as in its configuration [default: iod.sock in the run
    /// directory]
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Even while guests are attached
    #[arg(long)]
    pub force: bool,
}

/// `iod stop`.
#[derive(Args, Debug)]
pub struct IodStopArgs {
    /// The I/O domain's control socket, as in its configuration [default: iod.sock in the run
    /// directory]
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Even while guests are attached
    #[arg(long)]
    pub force: bool,
}

/// `iod trace`.
#[derive(Args, Debug)]
pub struct IodTraceArgs {
    /// The I/O domain's control socket, as in its configuration [default: iod.sock in the run
    /// directory]
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// For how long; until Ctrl-C when not given
    #[arg(long = "for", value_name = "TIME")]
    pub length: Option<Nanos>,
    /// Only requests and frames that took longer
    #[arg(long, value_name = "TIME")]
    pub slower_than: Option<Nanos>,
    /// Only frames that were not passed on, and requests that were refused
    #[arg(long)]
    pub dropped: bool,
}
