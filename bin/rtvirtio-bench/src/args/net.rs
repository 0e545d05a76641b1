//! `rtvirtio-bench net`.

use std::collections::BTreeSet;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use rtvirtio_experiments::net::{NetOptions, Part};

use super::BenchResult;

/// Parts that are measured alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum NetPart {
    /// Contracts in virtual time
    Simulated,
    /// Round trips, idle and next to a flood, on QEMU's taps and on the I/O domain
    Flood,
    /// Round trips through a slow link that a neighbour fills, on taps, with HTB and on the domain
    Uplink,
    /// Round trips while another guest attacks the domain
    Hostile,
    /// kill -9 of the domain
    Crash,
    /// Frames per second of one port, alone and of 64
    Frames,
    /// TCP of a guest
    Tcp,
    /// Pings, idle and next to a flood, 1000 a round, on taps and on the domain
    Ping,
    /// Sampled values: publisher to client to disk and back, alone and next to floods on network
    /// and disk
    Sv,
    /// A polling domain next to OVS-DPDK, idle and next to a flood; needs openvswitch-switch-dpdk
    /// and ethtool
    Polling,
    /// Requests to a web server, a client without a guest, while its neighbour sends without end:
    /// with a reservation and without, deadline 20 ms
    Web,
    /// Round trips over time while a neighbour begins to send through a slow link, and ends; a
    /// result file of its own, and only when it is named
    Timeline,
}

impl NetPart {
    /// For the experiment, whose part has the same name; `None` for the one with a file of its own.
    fn part(self) -> Option<Part> {
        let value = self.to_possible_value()?;
        Part::ALL.into_iter().find(|part| part.name() == value.get_name())
    }
}

/// `rtvirtio-bench net`.
#[derive(Args, Debug)]
pub struct BenchNetArgs {
    /// Only these parts, such as sv,ping: their results replace those in the result file, and the
    /// other parts there stay
    #[arg(long, value_name = "PARTS", value_enum, value_delimiter = ',')]
    pub only: Vec<NetPart>,
    /// Options of the measurement
    #[command(flatten)]
    pub options: NetOptions,
    /// Draws the picture of `--only timeline` into this directory
    #[arg(long, value_name = "DIR", requires = "only")]
    pub svg: Option<PathBuf>,
    /// Output options
    #[command(flatten)]
    pub result: BenchResult,
}

impl BenchNetArgs {
    /// The parts of the result file.
    pub fn parts(&self) -> BTreeSet<Part> {
        if self.only.is_empty() {
            return Part::ALL.into();
        }
        self.only.iter().filter_map(|part| part.part()).collect()
    }

    /// Whether the course over time is measured.
    pub fn has_timeline(&self) -> bool {
        self.only.contains(&NetPart::Timeline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_the_experiment_can_be_named() {
        let named: Vec<Option<Part>> = NetPart::value_variants().iter().map(|name| name.part()).collect();
        let measured = Part::ALL.into_iter().map(Some);
        assert_eq!(named, measured.chain([NetPart::Timeline.part()]).collect::<Vec<_>>());
        assert_eq!(NetPart::Timeline.part(), None);
    }
}
