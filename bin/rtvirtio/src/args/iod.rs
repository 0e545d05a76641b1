//! `iod`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use rtvirtio_units::Nanos;

/// `iod`.
#[derive(Subcommand, Debug)]
pub enum IodCommand {
    /// What each VM gets: rates, tails, (alpha, Delta), regulator hits
    #[command(after_help = "\
EXAMPLES
  rtvirtio iod status
  rtvirtio iod status --watch 1s
  rtvirtio iod status --json | jq '.vms[] | {name, p9999: .read.p9999_ns}'")]
    Status(IodStatusArgs),
    /// Take over the changed configuration file under live guests: policy, window, weights, reservations, caps, priorities
    #[command(after_help = "\
A file that is wrong, cannot be admitted or needs a restart changes nothing; the answer says why.

EXAMPLES
  rtvirtio iod reload
  rtvirtio iod reload --control /run/rtvirtio/iod.sock")]
    Reload(IodReloadArgs),
    /// Each request as it is answered: how long it waited for its turn, and how long the device took
    #[command(after_help = "\
EXAMPLES
  rtvirtio iod trace --for 10s
  rtvirtio iod trace --slower-than 2ms                    until Ctrl-C
  rtvirtio iod trace --for 10s --json | jq -s 'map(select(.vm == \"batch\") | .wait_ns) | max'

One listener at a time. With --json one object a line. Requests that came faster than this program reads are counted at the end.")]
    Trace(IodTraceArgs),
}

/// `iod status`.
#[derive(Args, Debug)]
pub struct IodStatusArgs {
    /// The domain's control socket, as its configuration says [default: iod.sock in the run directory]
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Again and again: what each VM gets in every interval, until Ctrl-C; with --json one object a line
    #[arg(long, value_name = "TIME")]
    pub watch: Option<Nanos>,
}

/// `iod reload`.
#[derive(Args, Debug)]
pub struct IodReloadArgs {
    /// The domain's control socket, as its configuration says [default: iod.sock in the run directory]
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
}

/// `iod trace`.
#[derive(Args, Debug)]
pub struct IodTraceArgs {
    /// The domain's control socket, as its configuration says [default: iod.sock in the run directory]
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// For how long; until Ctrl-C when not given
    #[arg(long = "for", value_name = "TIME")]
    pub length: Option<Nanos>,
    /// Only requests that took longer
    #[arg(long, value_name = "TIME")]
    pub slower_than: Option<Nanos>,
}
