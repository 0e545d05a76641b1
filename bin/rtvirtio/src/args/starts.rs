//! The command line of `starts`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_startup::SLICE_IDLE;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::starts::{LARGEST_WEIGHT, StartVm};

/// `starts`.
#[derive(Args, Debug)]
pub struct StartsArgs {
    /// The spec with the device and its VMs
    pub spec: PathBuf,
    /// A VM, and QEMU's socket of the port on which its guest says that something starts. Once for
    /// each VM
    #[arg(long = "port", value_name = "VM=SOCKET", required = true, value_parser = port)]
    pub ports: Vec<StartVm>,
    /// BFQ weight of the VM meanwhile
    #[arg(long, value_name = "N", default_value_t = LARGEST_WEIGHT, value_parser = clap::value_parser!(u32).range(1..=i64::from(LARGEST_WEIGHT)))]
    pub weight: u32,
    /// BFQ's slice_idle of the device for the VM's next request meanwhile, in ms (8 otherwise); a
    /// longer one stays. The longer, the less is left to others
    #[arg(long, value_name = "MS", default_value_t = SLICE_IDLE, value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub slice_idle: u32,
    /// Longest preference of a VM without a break
    #[arg(long, value_name = "TIME", default_value = "10s")]
    pub budget: Nanos,
    /// A used-up budget is full again after this time
    #[arg(long, value_name = "TIME", default_value = "1min")]
    pub within: Nanos,
    /// A start is over after this time, whatever the guest says
    #[arg(long, value_name = "TIME", default_value = "30s")]
    pub longest: Nanos,
    /// Also take a burst of small reads after quiet for a start. Jobs that wake up and read small
    /// files are taken for one too
    #[arg(long)]
    pub recognise: bool,
}

fn port(text: &str) -> Result<StartVm, String> {
    match text.split_once('=') {
        Some((name, socket)) if !name.is_empty() && !socket.is_empty() => {
            Ok(StartVm { name: name.to_owned(), socket: socket.into() })
        }
        _ => Err("write it as VM=SOCKET, such as desk=/run/desk.start".to_owned()),
    }
}
