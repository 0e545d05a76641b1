//! `contract`: contracts that the service keeps.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use rtvirtio_units::Nanos;

/// `contract`.
#[derive(Args, Debug)]
pub struct ContractArgs {
    /// The directory with the contracts, one spec in each `*.toml`; without it the one that the
    /// service reads, else /etc/rtvirtio/contracts.d
    #[arg(long, global = true, value_name = "DIR", env = "RTVIRTIO_CONTRACTS_DIR")]
    pub contracts: Option<PathBuf>,
    /// Action.
    #[command(subcommand)]
    pub command: ContractCommand,
}

/// Action on a contract.
#[derive(Subcommand, Debug)]
pub enum ContractCommand {
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio contract set plc plant.toml
  sudo rtvirtio contract set plc plant.toml --dry-run            says whether it fits, and writes nothing
  sudo rtvirtio contract set plc plant.toml --contracts /srv/contracts
  sudo rtvirtio contract set plc plant.toml --libvirt            into the metadata of libvirt's VM, which carries it along")]
    /// Make a VM's part of a spec its contract, in place of the one it has; one that does not fit
    /// changes nothing
    Set {
        /// The VM
        vm: String,
        /// The spec with the VM
        spec: PathBuf,
        /// Write it into the metadata of libvirt's VM of this name instead of a file
        #[arg(long)]
        libvirt: bool,
        /// Say whether it fits next to the others, and write nothing; with `--json`, `uncounted` is
        /// the reason why CPUs for `cores` were not counted, or null
        #[arg(long)]
        dry_run: bool,
    },
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio contract show
  sudo rtvirtio contract show plc --json | jq '.[].state'")]
    /// Show contracts, and how they stand: as the service says, or where none runs as this command
    /// finds it
    Show {
        /// VM; all without it
        vm: Option<String>,
    },
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio contract remove plc
  sudo rtvirtio contract remove plc --libvirt                     from the metadata of libvirt's VM of this name")]
    /// Remove a VM's contract; the service puts back what is in force for it
    Remove {
        /// The VM
        vm: String,
        /// Remove it from the metadata of libvirt's VM of this name or UUID instead of a file
        #[arg(long, value_name = "URI", num_args = 0..=1, default_missing_value = "qemu:///system")]
        libvirt: Option<String>,
    },
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio contract accept plc")]
    /// Accept the contract that a VM waits for, where the service asks (`mode = "ask"`)
    Accept {
        /// The VM
        vm: String,
    },
    #[command(after_help = "\
The service on the host where the VM is to come admits the contract next to all others, and holds its CPU budget until the VM runs there
or the time is over. `rtvirtio status` names VMs that are about to arrive. libvirt's hook and Proxmox VE's hookscript of the packages ask
by themselves.

EXAMPLES
  sudo rtvirtio contract reserve plc.toml
  virsh dumpxml plc | ssh TARGET sudo rtvirtio contract reserve -      a VM whose contract is in its metadata
  sudo rtvirtio contract reserve plant.toml --vm plc --for 2min

Exit code 2, and nothing changed, when the VM may not come: the reason says why.")]
    /// Reserve room on this host for a VM that is about to arrive by live migration
    Reserve {
        /// A contract file, or the XML of libvirt's domain; `-` is standard input
        file: PathBuf,
        /// VM of a contract file with several
        #[arg(long, value_name = "NAME")]
        vm: Option<String>,
        /// Time after which the room is given back where the VM has not come; 10 minutes without
        /// it, an hour at most
        #[arg(long = "for", value_name = "TIME")]
        hold: Option<Nanos>,
    },
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio contract release plc")]
    /// Give back the room reserved for a VM that does not arrive after all
    Release {
        /// The VM's UUID or its name in libvirt; for a contract file its name there
        vm: String,
    },
    #[command(after_help = "\
Under the I/O domain the waiting is counted; elsewhere it is an estimate from statistics of the VMs' cgroups, and says so.

EXAMPLES
  sudo rtvirtio contract waits
  sudo rtvirtio contract waits plc --json | jq '.rows[0].neighbours[0].vm'")]
    /// Show which VM waits for which on each device, over the last minutes
    Waits {
        /// The VM that waits; all without it
        vm: Option<String>,
    },
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio contract plan                what is held, and a plan that waits with all that it would change
  sudo rtvirtio contract plan accept
  sudo rtvirtio contract plan refuse
  sudo rtvirtio contract plan --json | jq '.proposal.changes'")]
    /// Show the plan that the service holds for the contracts' disks, accept or refuse a new one
    Plan {
        /// Decision on the waiting plan; without it, plans are shown
        #[arg(value_enum)]
        answer: Option<PlanAnswer>,
    },
}

/// Decision on a waiting plan.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanAnswer {
    /// Put the plan in force.
    Accept,
    /// Keep the plan back until the observation changes.
    Refuse,
}
