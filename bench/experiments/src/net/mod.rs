//! Guests behind one uplink: round trips of a victim while its neighbour is flooded, floods a slow
//! link, or attacks; on QEMU's taps, with and without a tuned HTB, and on the I/O domain.
//!
//! The host's end sends ICMP echo requests as raw frames, which the victim's kernel answers. All
//! four guests run all the time; every round measures each system and situation once, in random
//! order. Parts without guests have vhost-user front ends in their place.

mod claims;
mod host_only;
mod measure;
mod ovs;
mod part;
mod polling;
pub(crate) mod probe;
mod simulated;
mod sink;
mod sv;
pub(crate) mod test_bed;
pub mod timeline;
mod web;
mod worker;

use crate::experiment::Experiment;
use std::collections::BTreeMap;

use rtvirtio_learn::statistic::median;
use rtvirtio_measure::HostFacts;
use serde::{Deserialize, Serialize};

pub use self::claims::claims;
pub use self::measure::{NetOptions, measure};
pub use self::part::{Part, PartFacts};
pub use self::polling::{PollingData, PollingRun};
use self::probe::RoundTrips;
pub use self::simulated::{Simulated, simulate};
pub use self::sv::{SvData, SvRun};
pub use self::test_bed::{NetThread, System};
pub use self::web::{Order, WebData, WebRun};
use crate::page::{Section, Table};
use crate::report::ExperimentReport;
use crate::saved::Saved as _;
use crate::stats::rank::nearest_rank;

/// Load of the neighbour during a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Situation {
    /// No load.
    Idle,
    /// The neighbour receives frames as fast as one thread sends them.
    Flood,
    /// Malicious frames and headers of a third port on the I/O domain.
    Attack,
}

/// Percentiles of round trips, in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tails {
    /// Requests, lost ones included.
    pub n: u64,
    /// Requests without an answer.
    pub lost: u64,
    /// Mean, ns.
    pub mean: f64,
    /// Median, ns.
    pub p50: u64,
    /// 99th percentile, ns.
    pub p99: u64,
    /// 99.9th percentile, ns.
    pub p999: u64,
    /// Longest round trip, ns.
    pub max: u64,
}

impl Tails {
    fn from_trips(trips: &RoundTrips) -> Self {
        let mut ns = trips.ns.clone();
        ns.sort_unstable();
        let at = |share| nearest_rank(&ns, share).unwrap_or(0);
        let sum: u64 = ns.iter().sum();
        Self {
            n: ns.len() as u64 + trips.lost,
            lost: trips.lost,
            mean: sum as f64 / ns.len().max(1) as f64,
            p50: at(0.5),
            p99: at(0.99),
            p999: at(0.999),
            max: at(1.0),
        }
    }
}

/// Round trips of the victim, one round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PathData {
    /// On the I/O domain; on taps otherwise.
    pub domain: bool,
    /// Load of the neighbour.
    pub situation: Situation,
    /// Round trips of the victim.
    pub tails: Tails,
    /// Frames per second of the flood.
    pub flood: Option<f64>,
    /// Connections of the attacker.
    pub attacks: Option<u64>,
    /// CPUs used by the neighbour's QEMU and by the I/O domain.
    pub cpus: f64,
}

/// Round trips on a slow link, one round.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UplinkData {
    /// On the I/O domain; on taps otherwise.
    pub domain: bool,
    /// With a tuned HTB.
    pub htb: bool,
    /// The neighbour sends UDP; TCP otherwise.
    pub udp: bool,
    /// Round trips of the victim.
    pub tails: Tails,
    /// Rate of the frames that left, bit/s.
    pub bits_per_second: f64,
}

/// Recovery after kills of the I/O domain.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CrashData {
    /// From the kill until the victim answers again, s.
    pub back_s: Vec<f64>,
    /// Kills after which it does not answer.
    pub broken: u64,
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct NetData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the latest measurement.
    pub host: HostFacts,
    /// Command line of the latest measurement.
    pub command: String,
    /// Date of the latest measurement, and version of the program.
    pub generated: String,
    /// Round trips without a slow link.
    pub paths: Vec<PathData>,
    /// Round trips on a slow link.
    pub uplinks: Vec<UplinkData>,
    /// Recovery after kills of the I/O domain.
    pub crashes: CrashData,
    /// Frames per second of one port, of a network of one.
    pub frames_one_port: Vec<f64>,
    /// Frames per second of one port, of a network of 64.
    pub frames_of_many: Vec<f64>,
    /// Frames per second of a flood without guests: into a link without a receiver, and through the
    /// bridge.
    #[serde(default)]
    pub floods: Vec<[f64; 2]>,
    /// Seconds of a TCP transfer on a tap, and on the I/O domain.
    pub tcp: Vec<[f64; 2]>,
    /// Seconds of it on the I/O domain with a declared link, where large segments are cut.
    #[serde(default)]
    pub tcp_cut: Vec<f64>,
    /// Victim's reservation: bound and worst in ns, and frames over the deadline.
    pub promises: Vec<[u64; 3]>,
    /// Contracts in virtual time.
    pub simulated: Simulated,
    /// Pings, idle and while the neighbour is flooded.
    #[serde(default)]
    pub pings: Vec<PathData>,
    /// Sampled values (IEC 61850-9-2).
    #[serde(default)]
    pub sv: Option<SvData>,
    /// A polling I/O domain next to OVS-DPDK.
    #[serde(default)]
    pub polling: Option<PollingData>,
    /// Requests to a web server.
    #[serde(default)]
    pub web: Option<WebData>,
    /// Host, command and date of each part; empty where all were measured at once.
    #[serde(default)]
    pub parts: BTreeMap<Part, PartFacts>,
}

impl NetData {
    /// A result without measurements.
    fn new(host: HostFacts, command: String, generated: String) -> Self {
        Self { schema: Self::SCHEMA.to_owned(), host, command, generated, ..Self::default() }
    }

    fn paths(&self, domain: bool, situation: Situation) -> impl Iterator<Item = &PathData> {
        self.paths.iter().filter(move |p| p.domain == domain && p.situation == situation)
    }

    fn path(&self, domain: bool, situation: Situation, of: impl Fn(&PathData) -> f64) -> f64 {
        median(self.paths(domain, situation).map(of).collect())
    }

    fn uplink(&self, domain: bool, htb: bool, udp: bool, of: impl Fn(&UplinkData) -> f64) -> f64 {
        let rows = self.uplinks.iter().filter(|u| (u.domain, u.htb, u.udp) == (domain, htb, udp));
        median(rows.map(of).collect())
    }
}

impl Experiment for NetData {
    const FORM: &str = "rtvirtio-net/1";
    const FILE: &str = "net.json";
    const TITLE: &str = "rtvirtio: networks of the I/O domain";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let mut section = Section { title: "A victim and its neighbour".to_owned(), ..Section::default() };
        let mut parts: Vec<(PartFacts, Vec<String>)> = Vec::new();
        for (part, facts) in self.facts() {
            let name = part.name();
            match parts.iter_mut().find(|(other, _)| *other == facts) {
                Some((_, names)) => names.push(name),
                None => parts.push((facts, vec![name])),
            }
        }
        section.text.extend(parts.into_iter().map(|(facts, names)| {
            let PartFacts { host, command, generated } = facts;
            let host =
                format!("Linux {}, {} CPUs, {} ({})", host.kernel, host.cpus, host.vmm, host.accelerator);
            format!("{}: {command}; {generated}; {host}.", names.join(", "))
        }));
        if let Some(polling) = &self.polling {
            section.text.extend(polling.peer_text());
        }
        let us = |ns: u64| format!("{:.0}", ns as f64 / 1e3);
        let row = |name: String, t: &Tails, more: String| {
            let numbers = [us(t.mean as u64), us(t.p50), us(t.p99), us(t.p999), us(t.max), more];
            [name, t.n.to_string(), t.lost.to_string()].into_iter().chain(numbers).collect::<Vec<String>>()
        };
        let mut table = |label: &str, last: &str, rows: Vec<Vec<String>>| {
            let head = ["", "n", "lost", "mean us", "p50 us", "p99 us", "p99.9 us", "max us", last];
            if !rows.is_empty() {
                let head = head.map(str::to_owned).to_vec();
                section.tables.push(Table { label: label.to_owned(), head, rows });
            }
        };
        let system = |domain: bool, htb: bool| match (domain, htb) {
            (true, _) => "I/O domain",
            (false, true) => "taps, HTB",
            (false, false) => "taps",
        };
        let path = |p: &PathData| {
            let name = format!("{}, {:?}", system(p.domain, false), p.situation).to_lowercase();
            row(name, &p.tails, format!("{:.2}", p.cpus))
        };
        let uplink = |u: &UplinkData| {
            let name = format!("{}, {}", system(u.domain, u.htb), if u.udp { "UDP" } else { "TCP" });
            row(name, &u.tails, format!("{:.1}", u.bits_per_second / 1e6))
        };
        let polling = |run: &PollingRun| {
            let name = format!("{}, {:?}", run.system.name(), run.situation).to_lowercase();
            row(name, &run.tails, format!("{:.2}", run.switch_cpus))
        };
        let neighbour = "CPUs of the neighbour";
        table("round trips at 4 kHz, each round", neighbour, self.paths.iter().map(path).collect());
        table(
            "round trips at 1 kHz through 100 Mbit/s, each round",
            "Mbit/s",
            self.uplinks.iter().map(uplink).collect(),
        );
        table("pings, each round", neighbour, self.pings.iter().map(path).collect());
        let runs = self.polling.iter().flat_map(|polling| &polling.runs);
        table(
            "round trips at 4 kHz through a polling switch",
            "CPUs of the switch",
            runs.map(polling).collect(),
        );
        section.tables.extend(self.sv.as_ref().map(SvData::table));
        section.tables.extend(self.web.as_ref().map(WebData::table));
        let lead = format!("{}; {}.", self.host.device, self.command);
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, vec![section])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tails_are_of_the_right_rank() {
        let tails =
            Tails::from_trips(&RoundTrips { ns: (1..=2_000).rev().collect(), lost: 3, sent: Vec::new() });
        assert_eq!(
            (tails.n, tails.lost, tails.p50, tails.p99, tails.p999, tails.max),
            (2_003, 3, 1_000, 1_980, 1_998, 2_000)
        );
        assert_eq!(Tails::from_trips(&RoundTrips::default()).max, 0);
    }
}
