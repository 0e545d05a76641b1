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
    /// Cells and planes
    #[command(flatten)]
    pub choice: Choice,
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
        let options = ResponsivenessOptions {
            devices: self.devices.clone(),
            choice: self.choice.clone(),
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
        let of = &self.choice;
        let planes: Vec<&str> = of.planes.iter().map(|plane| plane.name()).collect();
        let video = self.video.map_or(String::new(), |length| format!(" --video {length}"));
        format!(
            "rtvirtio-bench responsiveness {devices} --apps {} --guest-loads {} --host-loads {} --guest-schedulers {} --host-schedulers {} \
             --planes {} --starts {} --repeat {} --limit {}{video}",
            of.apps.join(","),
            of.guest_loads.join(","),
            of.host_loads.join(","),
            of.guest_schedulers.join(","),
            of.host_schedulers.join(","),
            planes.join(","),
            self.starts,
            self.repeat,
            self.limit
        )
    }
}
