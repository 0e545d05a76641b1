//! The command line of `measure`.

use clap::{Args, Subcommand};
use rtvirtio_units::Nanos;

/// `measure`.
#[derive(Subcommand, Debug)]
pub enum MeasureCommand {
    /// Start-up time of a command in a guest, with cold caches
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio measure start-up desk --spec desk.toml --command 'xterm -e true'
  sudo rtvirtio measure start-up desk --spec desk.toml --command 'firefox --version' --times 10 --json
  sudo rtvirtio measure start-up desk --spec desk.toml --command 'xterm -e true' --say     with `rtvirtio starts` on the host

The command must end once the application has started. It runs through the guest agent (guest-exec), which drops the guest's caches before each start. Make the
load that you want to know about yourself. Exit code 2 when a start takes longer than the limit.")]
    StartUp(MeasureStartUpArgs),
}

/// `measure start-up`.
#[derive(Args, Debug)]
pub struct MeasureStartUpArgs {
    /// The VM: its name in the spec or in the lab that is up
    pub vm: String,
    /// The spec that describes how the VMs are reached [default: the lab that is up]
    #[arg(long, value_name = "SPEC")]
    pub spec: Option<String>,
    /// A command of the guest's shell that ends once the application has started
    #[arg(long, value_name = "CMD")]
    pub command: String,
    /// Start-ups
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub times: usize,
    /// A longer start-up counts as failed
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub limit: Nanos,
    /// Have the guest say that something starts: by `rtvirtio-guest start`, which must be installed
    /// in it
    #[arg(long)]
    pub say: bool,
    /// Also drop the host's page cache before each start, for a disk that is not opened with
    /// `cache=none`. All programs of the host become slower
    #[arg(long)]
    pub drop_host_caches: bool,
}
