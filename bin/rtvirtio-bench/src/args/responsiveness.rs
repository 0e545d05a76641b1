//! `rtvirtio-bench responsiveness`.

use std::path::PathBuf;

use clap::Args;
use rtvirtio_experiments::responsiveness::{Choice, Plane, ResponsivenessOptions};
use rtvirtio_units::{Bytes, Nanos};

use super::BenchResult;

/// `rtvirtio-bench responsiveness`.
#[derive(Args, Debug)]
pub struct BenchResponsivenessArgs {
    /// Emulated devices, or `file:PATH` for a file that is made on a disk of this machine and
    /// removed afterwards
    #[arg(value_name = "twin:NAME", default_values = ["twin:microsd"])]
    pub devices: Vec<String>,
    /// Applications: small (bash), medium (qemu-img), large (qemu-system-x86_64)
    #[arg(long, value_delimiter = ',', value_name = "APPS", default_value = "medium")]
    pub apps: Vec<String>,
    /// Loads in the guest: readers and writers in order or at random positions
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "LOADS",
        default_value = "none,1r-seq,5r-seq,1r-rand,5r-rand,2r2w-seq,2r2w-rand"
    )]
    pub guest_loads: Vec<String>,
    /// Loads of the host: readers in order
    #[arg(long, value_delimiter = ',', value_name = "LOADS", default_value = "none,1r,5r")]
    pub host_loads: Vec<String>,
    /// I/O schedulers in the guest: bfq, mq-deadline, kyber, none (CFQ left the kernel in 5.0)
    #[arg(long, value_delimiter = ',', value_name = "NAMES", default_value = "bfq")]
    pub guest_schedulers: Vec<String>,
    /// I/O schedulers of the host, the same ones; `kernel` is measured under bfq only
    #[arg(long, value_delimiter = ',', value_name = "NAMES", default_value = "bfq")]
    pub host_schedulers: Vec<String>,
    /// default: as in the paper; grouped: the VM in a cgroup of its own; kernel: its weight raised
    /// while something starts; domain: the I/O domain
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "PLANES",
        default_value = "default,grouped,kernel,domain"
    )]
    pub planes: Vec<Plane>,
    /// Start-ups in a row
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub starts: usize,
    /// Repetitions of each of these runs; the paper has ten
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub repeat: usize,
    /// A longer start-up counts as failed, and its run ends
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub limit: Nanos,
    /// From the start of the load to the first start-up
    #[arg(long, value_name = "TIME", default_value = "4s")]
    pub settle: Nanos,
    /// Under the domain: largest piece of requests that are not urgent
    #[arg(long, value_name = "BYTES", default_value = "16KiB")]
    pub quantum: Bytes,
    /// Under the domain: largest piece of urgent requests
    #[arg(long, value_name = "BYTES", default_value = "128KiB")]
    pub urgent_quantum: Bytes,
    /// Under the domain: pieces at the device
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub window: u32,
    /// Also play a video of this length in two VMs next to each host load, and count late frames
    #[arg(long, value_name = "TIME")]
    pub video: Option<Nanos>,
    /// A first look in about two minutes: the small application, four cells, two start-ups of at
    /// most 10 s
    #[arg(long, conflicts_with_all = ["apps", "guest_loads", "host_loads", "planes", "starts", "limit", "settle"])]
    pub quick: bool,
    /// Write the figures as SVG files into this directory
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchResponsivenessArgs {
    pub fn options(&self) -> ResponsivenessOptions {
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect();
        let choice = Choice {
            apps: self.apps.clone(),
            guest_loads: self.guest_loads.clone(),
            host_loads: self.host_loads.clone(),
            guest_schedulers: self.guest_schedulers.clone(),
            host_schedulers: self.host_schedulers.clone(),
            planes: self.planes.clone(),
        };
        let options = ResponsivenessOptions {
            devices: self.devices.clone(),
            choice,
            starts: self.starts,
            repeat: self.repeat,
            limit: self.limit,
            settle: self.settle,
            pieces: (self.quantum, self.urgent_quantum, self.window),
            video: self.video.map_or(0, |length| length.0.div_ceil(1_000_000_000)),
            command: self.command(),
        };
        if !self.quick {
            return options;
        }
        ResponsivenessOptions {
            choice: Choice {
                apps: names(&["small"]),
                guest_loads: names(&["none", "5r-seq"]),
                host_loads: names(&["none", "5r"]),
                planes: vec![Plane::Default, Plane::Kernel, Plane::Domain],
                ..options.choice
            },
            starts: 2,
            limit: Nanos::from_millis(10_000),
            settle: Nanos::from_millis(2_500),
            ..options
        }
    }

    /// Command line with the same options, for the result.
    fn command(&self) -> String {
        let devices = self.devices.join(" ");
        if self.quick {
            return format!("rtvirtio-bench responsiveness {devices} --quick");
        }
        let planes: Vec<&str> = self.planes.iter().map(|plane| plane.name()).collect();
        let video = self.video.map_or(String::new(), |length| format!(" --video {length}"));
        format!(
            "rtvirtio-bench responsiveness {devices} --apps {} --guest-loads {} --host-loads {} --guest-schedulers {} --host-schedulers {} \
             --planes {} --starts {} --repeat {} --limit {}{video}",
            self.apps.join(","),
            self.guest_loads.join(","),
            self.host_loads.join(","),
            self.guest_schedulers.join(","),
            self.host_schedulers.join(","),
            planes.join(","),
            self.starts,
            self.repeat,
            self.limit
        )
    }
}
