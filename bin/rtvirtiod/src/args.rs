//! The command line. No logic.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;
use rtvirtio_console::Global;
use rtvirtio_daemon::CONFIG_FILE;
use rtvirtio_daemon::contract_files::CONTRACTS_DIR;

/// Keeps the contracts of virtual machines true, until it is stopped; what is in force then stays.
#[derive(Parser, Debug)]
#[command(
    name = "rtvirtiod",
    version,
    about,
    max_term_width = 110,
    after_help = "\
EXAMPLES
  systemctl start rtvirtiod                        as the packages install it
  sudo rtvirtiod --mode observe                    in the foreground: shows what it would set, and sets nothing
  sudo rtvirtiod --contracts /srv/contracts --listen 127.0.0.1:9465   with metrics and a page for this host

A contract is a spec (docs/reference/spec.md): `sudo rtvirtio contract set plc plant.toml` puts that of the VM plc into the directory.
Stopped or killed it changes nothing on the host; `sudo rtvirtio revert` puts everything back then."
)]
pub struct Cli {
    /// The configuration; without the file everything has its default
    #[arg(long, value_name = "FILE", default_value = CONFIG_FILE)]
    pub config: PathBuf,
    /// The directory with the contracts, one spec in each `*.toml`
    #[arg(long, value_name = "DIR", env = "RTVIRTIO_CONTRACTS_DIR", default_value = CONTRACTS_DIR)]
    pub contracts: PathBuf,
    /// A further spec with contracts; several times for several
    #[arg(long = "spec", value_name = "FILE")]
    pub specs: Vec<PathBuf>,
    /// Autonomy of the service, instead of the configuration's
    #[arg(long, value_name = "MODE", value_parser = ["observe", "ask", "auto"])]
    pub mode: Option<String>,
    /// A loopback address on which it also listens, read-only
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<SocketAddr>,
    /// Group whose members may use the socket besides root
    #[arg(long, value_name = "NAME", default_value = "rtvirtio")]
    pub group: String,
    /// Options of every program.
    #[command(flatten)]
    pub global: Global,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_reference_is_that_of_the_arguments() {
        rtvirtio_testkit::check_reference(Cli::command());
    }
}
