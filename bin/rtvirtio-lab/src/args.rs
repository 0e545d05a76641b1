//! The command line of the laboratory, with examples. No logic.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use rtvirtio_console::Global;
use rtvirtio_spec::Kernel;
use rtvirtio_testbed::AccelChoice;
use rtvirtio_units::{Bytes, Nanos};

/// Laboratory: emulated devices, guests, and the whole loop on them.
#[derive(Parser, Debug)]
#[command(
    name = "rtvirtio-lab",
    version,
    about,
    max_term_width = 110,
    after_help = "\
EXAMPLES
  sudo rtvirtio-lab demo                      the whole loop on an emulated device and three QEMU guests
  sudo rtvirtio-lab up examples/fig7.toml     make the device, start the VMs
  sudo rtvirtio-lab run --for 20s             run their tasks
  sudo rtvirtio-lab down                      remove everything"
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
    /// The whole loop in a lab: default BFQ, plan, apply, verify, revert, report
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-lab demo
  sudo rtvirtio-lab demo --for 30s --out /tmp/demo examples/heavy-process.toml

Writes report.html, result.json and plan.json. Ctrl-C at any time leaves nothing behind.")]
    Demo(DemoArgs),
    /// Make the device and start the VMs of a spec
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-lab up examples/fig7.toml
  sudo rtvirtio-lab up examples/fig7-process.toml
  sudo rtvirtio-lab up examples/fig7.toml --domain   every request scheduled by the I/O domain

The commands of rtvirtio then find the VMs: `rtvirtio plan examples/fig7.toml`.")]
    Up(LabUpArgs),
    /// Run the spec's tasks in the lab that is up
    #[command(after_help = "EXAMPLES\n  sudo rtvirtio-lab run\n  sudo rtvirtio-lab run --for 20s --json")]
    Run(LabRunArgs),
    /// Stop the VMs and remove the device, also after a crash
    #[command(after_help = "EXAMPLES\n  sudo rtvirtio-lab down")]
    Down,
    /// Show the lab
    #[command(after_help = "EXAMPLES\n  rtvirtio-lab status\n  rtvirtio-lab status --json | jq -r .device")]
    Status,
    /// Measure an emulated device and save its profile, which `rtvirtio plan` reads for specs with
    /// that twin
    #[command(after_help = "\
EXAMPLES
  sudo rtvirtio-lab profile twin:qlc-nvme                 makes the device, measures it, removes it
  sudo rtvirtio-lab profile twin:qlc-nvme --sweep 30min   also learn how tails depend on load and settings")]
    Profile(TwinProfileArgs),
    /// Test whether a stock guest boots under KVM here, with Debian's guest kernel (downloads it
    /// once)
    #[command(after_help = "EXAMPLES\n  rtvirtio-lab kvm")]
    Kvm,
    /// Run a command on an emulated host with Debian's standard or PREEMPT_RT kernel, cgroup v2 and
    /// KVM
    #[command(after_help = "\
EXAMPLES
  rtvirtio-lab box -- rtvirtio check
  rtvirtio-lab box --kernel rt --out box-rt -- rtvirtio-bench paravirt --priorities-only --only both \\
      --for 30s --repeat 1 --out .

The command has rtvirtio's programs, fio, QEMU and busybox, and is root there; the files that it leaves in
its directory are brought out. Nothing of this host is changed, and no root is needed. Every instruction
of the host there, and of its guests, is emulated: it shows what works, not how fast.")]
    Box(BoxArgs),
    /// Serves a twin's FUSE file; started by the lab
    #[command(hide = true)]
    TwinServe(TwinServeArgs),
}

/// `profile`.
#[derive(Args, Debug)]
pub struct TwinProfileArgs {
    /// The emulated device
    #[arg(value_name = "twin:NAME")]
    pub target: String,
    /// File for the profile instead of the state directory
    #[arg(long, short, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Also measure chosen loads and settings for this long and learn a model of the host from
    /// them; a stopped sweep continues with the same command. It needs at least about 120 runs of
    /// 10 s
    #[arg(long, value_name = "TIME")]
    pub sweep: Option<Nanos>,
    /// Most time for the measurement of the device, which ends when all is known
    #[arg(long = "for", value_name = "TIME", default_value = "36s")]
    pub length: Nanos,
}

/// `lab up`.
#[derive(Args, Debug)]
pub struct LabUpArgs {
    /// The spec file
    pub spec: PathBuf,
    /// Accelerator of QEMU guests: by default KVM when a guest really boots under it, else TCG
    #[arg(long, value_enum, default_value_t = AccelName::Auto)]
    pub accel: AccelName,
    /// Serve the guests' disks through the I/O domain, planned for the spec's targets
    #[arg(long)]
    pub domain: bool,
    /// The device's profile for --domain, instead of the one saved
    #[arg(long, value_name = "FILE", requires = "domain")]
    pub profile: Option<PathBuf>,
}

/// Accelerator of QEMU guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AccelName {
    /// KVM when it really works, else TCG
    Auto,
    /// KVM
    Kvm,
    /// Emulation
    Tcg,
}

impl From<AccelName> for AccelChoice {
    fn from(name: AccelName) -> Self {
        match name {
            AccelName::Auto => Self::Auto,
            AccelName::Kvm => Self::Kvm,
            AccelName::Tcg => Self::Tcg,
        }
    }
}

/// `lab run`.
#[derive(Args, Debug)]
pub struct LabRunArgs {
    /// Duration of the measurement
    #[arg(long = "for", value_name = "TIME", default_value = "20s")]
    pub length: Nanos,
    /// Name of the scheme in force, for the result file
    #[arg(long, default_value = "as-found")]
    pub scheme: String,
    /// Let tasks write although the device is real: the data that they overwrite is LOST
    #[arg(long)]
    pub destroy_data: bool,
}

/// `box`.
#[derive(Args, Debug)]
pub struct BoxArgs {
    /// The emulated host's kernel
    #[arg(long, value_enum, default_value_t = KernelName::Standard)]
    pub kernel: KernelName,
    /// Directory for what the command leaves, 256 MiB at most: empty, or made
    #[arg(long, value_name = "DIR", default_value = "box")]
    pub out: PathBuf,
    /// Time limit of the command; files written until then are copied out
    #[arg(long, value_name = "TIME", default_value = "30min")]
    pub timeout: Nanos,
    /// The command with its arguments
    #[arg(required = true, last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// A kernel of Debian's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KernelName {
    /// The one for virtual machines
    Standard,
    /// The one with PREEMPT_RT
    Rt,
}

impl From<KernelName> for Kernel {
    fn from(name: KernelName) -> Self {
        match name {
            KernelName::Standard => Self::Standard,
            KernelName::Rt => Self::Rt,
        }
    }
}

/// `demo`.
#[derive(Args, Debug)]
pub struct DemoArgs {
    /// A lab spec instead of the paper's Fig. 7 case
    pub spec: Option<PathBuf>,
    /// Duration of each of the two runs
    #[arg(long = "for", value_name = "TIME", default_value = "40s")]
    pub length: Nanos,
    /// Directory for report.html, result.json, plan.json, and page.html, the service's page of the
    /// second run
    #[arg(long, value_name = "DIR", default_value = "demo")]
    pub out: PathBuf,
    /// Accelerator of QEMU guests
    #[arg(long, value_enum, default_value_t = AccelName::Auto)]
    pub accel: AccelName,
}

/// `twin-serve`.
#[derive(Args, Debug)]
pub struct TwinServeArgs {
    /// Profile name or file.
    #[arg(long)]
    pub profile: String,
    /// Size.
    #[arg(long)]
    pub size: Bytes,
    /// Seed of the jitter.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Mount point.
    #[arg(long)]
    pub mount: PathBuf,
    /// Factor on the declared duration of a service after SIGUSR1.
    #[arg(long, default_value_t = 2.0)]
    pub slow_by: f64,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn files_that_the_help_names_exist() {
        let text = rtvirtio_testkit::help(&mut Cli::command());
        assert!(text.contains("EXAMPLES") && text.contains("examples/fig7.toml"), "{text}");
        assert_eq!(rtvirtio_testkit::missing_files(&text), Vec::<String>::new());
    }

    #[test]
    fn the_reference_is_that_of_the_arguments() {
        rtvirtio_testkit::check_reference(Cli::command());
    }
}
