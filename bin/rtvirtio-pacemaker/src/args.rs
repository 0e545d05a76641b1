//! The command line, with examples. No logic.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use rtvirtio_console::Global;
use rtvirtio_units::Nanos;

/// Contracts of virtual machines in a Pacemaker cluster.
#[derive(Parser, Debug)]
#[command(
    name = "rtvirtio-pacemaker",
    version,
    about,
    max_term_width = 110,
    after_help = "\
EXAMPLES
  rtvirtio-pacemaker show site.toml                    which node could promise which contract, and why not
  sudo rtvirtio-pacemaker publish site.toml            publish what this node could promise
  sudo rtvirtio-pacemaker constraints site.toml        the rules that would be written, as XML
  sudo rtvirtio-pacemaker constraints site.toml --apply

docs/guide/fleet.md leads through it. Where VMs run stays Pacemaker's decision."
)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
    /// Options of every command.
    #[command(flatten)]
    pub global: Global,
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Tell the cluster what this node could promise: capacity, what each contract takes, vetoes
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-pacemaker publish site.toml                  once
  sudo rtvirtio-pacemaker publish site.toml --every 10s      until Ctrl-C, as a service does
  sudo rtvirtio-pacemaker publish site.toml --dry-run --json | jq '.contracts[] | select(.refused)'

Disks count by their profiles (`rtvirtio profile`), the CPU by what the kernel grants. A contract is never vetoed on the node where it is in force.")]
    Publish(PublishArgs),
    /// Write demands, priorities, vetoes and the agent's resources into the CIB; without --apply
    /// only print them
    #[command(after_help = "\
EXAMPLES
  rtvirtio-pacemaker constraints site.toml           what would be written
  sudo rtvirtio-pacemaker constraints site.toml --apply

The VMs must be resources already, and every node must have published: what a contract takes is the most over the nodes.")]
    Constraints(ConstraintsArgs),
    /// Published state of every node: needs of each contract, vetoes and reasons. Changes nothing
    #[command(after_help = "\
EXAMPLES
  rtvirtio-pacemaker show site.toml
  rtvirtio-pacemaker show site.toml --json | jq '.[] | select(.veto)'")]
    Show(FileArgs),
    /// The resource agent `ocf:rtvirtio:contract`, as Pacemaker's executor calls it
    #[command(after_help = "\
EXAMPLES
  rtvirtio-pacemaker agent meta-data
  sudo OCF_RESKEY_spec=/etc/rtvirtio/plc.toml OCF_RESOURCE_INSTANCE=plc rtvirtio-pacemaker agent monitor; echo $?

Parameters come as OCF_RESKEY_* in the environment. Exit codes are OCF's: 0 held, 1 failed, 6 wrong parameter, 7 not applied.")]
    Agent(AgentArgs),
}

/// The file with the cluster's contracts.
#[derive(Args, Debug)]
pub struct FileArgs {
    /// The cluster file: the contracts, each with the resource of its VM
    #[arg(value_name = "CLUSTER")]
    pub file: PathBuf,
}

/// `publish`.
#[derive(Args, Debug)]
pub struct PublishArgs {
    /// The file.
    #[command(flatten)]
    pub file: FileArgs,
    /// This node's name in the cluster, instead of asking `crm_node`
    #[arg(long)]
    pub node: Option<String>,
    /// Again and again, with so much time between
    #[arg(long, value_name = "TIME")]
    pub every: Option<Nanos>,
    /// Show what would be published, and tell the cluster nothing
    #[arg(long, conflicts_with = "every")]
    pub dry_run: bool,
}

/// `constraints`.
#[derive(Args, Debug)]
pub struct ConstraintsArgs {
    /// The file.
    #[command(flatten)]
    pub file: FileArgs,
    /// Write them
    #[arg(long)]
    pub apply: bool,
}

/// `agent`.
#[derive(Args, Debug)]
pub struct AgentArgs {
    /// start, stop, monitor, validate-all or meta-data
    pub action: String,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn files_that_the_help_names_exist() {
        let text = rtvirtio_testkit::help(&mut Cli::command());
        assert!(text.contains("EXAMPLES") && text.contains("docs/"), "{text}");
        assert_eq!(rtvirtio_testkit::missing_files(&text), Vec::<String>::new());
    }

    #[test]
    fn the_reference_is_that_of_the_arguments() {
        rtvirtio_testkit::check_reference(Cli::command());
    }
}
