//! The command line of `threads`.

use clap::Args;
use rtvirtio_units::Nanos;

/// `threads`.
#[derive(Args, Debug)]
pub struct ThreadsArgs {
    /// A spec, or the process id of a VMM; the lab that is up by default
    #[arg(value_name = "SPEC|PID")]
    pub target: Option<String>,
    /// Only this VM of the spec
    pub vm: Option<String>,
    /// Continue, and report which threads appear and end, until Ctrl-C
    #[arg(long)]
    pub watch: bool,
    /// Interval of --watch: the longest delay until a new thread is reported
    #[arg(long, value_name = "TIME", default_value = "200ms")]
    pub every: Nanos,
}
