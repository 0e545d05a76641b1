//! The command line of `discover`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_units::Nanos;

/// `discover`.
#[derive(Args, Debug)]
pub struct DiscoverArgs {
    /// Count what each VM does with its disks for this long: rates, sizes, latencies. libvirt marks
    /// its VMs as tainted (`custom-monitor`) by that, until they end
    #[arg(long, value_name = "TIME")]
    pub observe: Option<Nanos>,
    /// libvirt's daemon [default: qemu:///system]
    #[arg(long, value_name = "URI")]
    pub uri: Option<String>,
    /// Write a spec for the VMs that were found; `-` for standard output. A file that is there is
    /// not overwritten
    #[arg(short, long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Overwrite FILE
    #[arg(long, requires = "out")]
    pub force: bool,
}
