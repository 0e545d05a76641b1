//! Guests behind one uplink: round trips of a victim while its neighbour is flooded, floods a slow
//! link, or attacks; on QEMU's taps, with and without a tuned HTB, and on the I/O domain.
//!
//! The far end sends ICMP echo requests as raw frames, which the victim's kernel answers. All four
//! guests run all the time; every round measures each system and situation once, in random order.

mod bed;
mod host_only;
mod measure;
pub mod ping;
pub(crate) mod probe;
mod simulated;
pub mod sv;
pub mod timeline;

use std::path::Path;

use rtvirtio_learn::statistic::median;
use rtvirtio_measure::HostFacts;
use serde::{Deserialize, Serialize};

pub use self::bed::{NetThread, System};
pub use self::measure::{NetOptions, measure};
use self::probe::RoundTrips;
pub use self::simulated::{Simulated, simulate};
use crate::claims::Claim;
use crate::page::{Section, Table};
use crate::report::{ExperimentReport, read};
use crate::saved::Saved;
use crate::stats::rank::nearest_rank;

/// File name of the result.
pub const FILE: &str = "net.json";

/// What happens next to the victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Situation {
    /// Nothing.
    Idle,
    /// Its neighbour gets frames as fast as one thread sends them.
    Flood,
    /// Another guest attacks the domain.
    Attack,
}

/// Percentiles of round trips, in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tails {
    /// Requests.
    pub n: u64,
    /// Without an answer.
    pub lost: u64,
    /// Mean.
    pub mean: f64,
    /// Median.
    pub p50: u64,
    /// 99th percentile.
    pub p99: u64,
    /// 99.9th percentile.
    pub p999: u64,
    /// The longest.
    pub max: u64,
}

impl Tails {
    fn of(trips: &RoundTrips) -> Self {
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
    /// What happens next to it.
    pub situation: Situation,
    /// Its round trips.
    pub tails: Tails,
    /// Frames per second of the flood.
    pub flood: Option<f64>,
    /// Connections of the attacker.
    pub attacks: Option<u64>,
    /// CPUs of the neighbour's QEMU and of the domain.
    pub cpus: f64,
}

impl PathData {
    fn new(
        system: System,
        situation: Situation,
        trips: &RoundTrips,
        flood: Option<f64>,
        attacks: Option<u64>,
        cpus: f64,
    ) -> Self {
        Self { domain: system == System::Domain, situation, tails: Tails::of(trips), flood, attacks, cpus }
    }
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
    /// Bits per second that left.
    pub bits_per_second: f64,
}

impl UplinkData {
    fn new(system: System, htb: bool, udp: bool, trips: &RoundTrips, bits_per_second: f64) -> Self {
        Self { domain: system == System::Domain, htb, udp, tails: Tails::of(trips), bits_per_second }
    }
}

/// Kills of the domain.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CrashData {
    /// From the kill until the victim answers again, in seconds.
    pub back_s: Vec<f64>,
    /// Kills after which it does not.
    pub broken: u64,
}

/// All that was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NetData {
    /// [`NetData::SCHEMA`].
    pub schema: String,
    /// Where.
    pub host: HostFacts,
    /// How.
    pub command: String,
    /// When.
    pub generated: String,
    /// Round trips without a slow link.
    pub paths: Vec<PathData>,
    /// Round trips on a slow link.
    pub uplinks: Vec<UplinkData>,
    /// Kills.
    pub crashes: CrashData,
    /// Frames per second of one port, of a network of one.
    pub frames_one_port: Vec<f64>,
    /// The same, of a network of 64.
    pub frames_of_many: Vec<f64>,
    /// Seconds of a TCP transfer on a tap, and on the domain.
    pub tcp: Vec<[f64; 2]>,
    /// Seconds of it on the domain with a declared link, where large segments are cut.
    #[serde(default)]
    pub tcp_cut: Vec<f64>,
    /// Of the victim's reservation: bound and worst in ns, and frames over the deadline.
    pub promises: Vec<[u64; 3]>,
    /// The simulation.
    pub simulated: Simulated,
}

impl Saved for NetData {
    const SCHEMA: &str = "rtvirtio-net/1";
}

impl NetData {
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

/// The claims of a result: medians of the rounds.
#[must_use]
pub fn claims(data: &NetData) -> Vec<Claim> {
    use Situation::{Attack, Flood, Idle};
    let n = data.paths(true, Idle).count();
    let claim =
        |id: &str, what: &str, value: f64, unit: &str| Claim::new(format!("net.{id}"), what, value, unit, n);
    let p50 = |p: &PathData| p.tails.p50 as f64;
    let p999 = |p: &PathData| p.tails.p999 as f64;
    let lost = |situation| data.paths(true, situation).map(|p| p.tails.lost as f64).sum::<f64>();
    let requests = |situation| data.paths(true, situation).map(|p| p.tails.n as usize).sum::<usize>();
    let idle = data.path(true, Idle, p50);
    let mut claims = vec![
        claim(
            "idle.p50_over_tap",
            "idle round trip at 4 kHz, median, to that of tap and bridge",
            idle / data.path(false, Idle, p50),
            "ratio",
        )
        .at_most(1.1),
        Claim::new(
            "net.flood.lost",
            "requests of the victim lost while its neighbour is flooded",
            lost(Flood),
            "requests",
            requests(Flood),
        )
        .at_most(0.0),
        claim(
            "flood.p999_over_idle",
            "the victim's p99.9 while its neighbour is flooded, to its own idle one",
            data.path(true, Flood, p999) / data.path(true, Idle, p999),
            "ratio",
        )
        .at_most(2.0),
        claim(
            "flood.p999_over_idle_tap",
            "the same on tap and bridge",
            data.path(false, Flood, p999) / data.path(false, Idle, p999),
            "ratio",
        ),
        claim(
            "flood.cpu_over_tap",
            "CPU time for the flooded neighbour, to that of tap and bridge",
            data.path(true, Flood, |p| p.cpus) / data.path(false, Flood, |p| p.cpus),
            "ratio",
        )
        .at_most(0.5),
        claim(
            "flood.kpps",
            "frames of the flood",
            data.path(true, Flood, |p| p.flood.unwrap_or(0.0)) / 1e3,
            "kpps",
        ),
        claim(
            "flood.mean_over_idle",
            "mean round trip under the flood, to the idle one",
            data.path(true, Flood, |p| p.tails.mean) / data.path(true, Idle, |p| p.tails.mean),
            "ratio",
        )
        .at_most(1.1),
    ];
    for (name, udp) in [("udp", true), ("tcp", false)] {
        for (key, limit, of) in [
            ("p50_ms", 0.3, (|u: &UplinkData| u.tails.p50 as f64 / 1e6) as fn(&UplinkData) -> f64),
            ("p99_ms", 1.0, |u| u.tails.p99 as f64 / 1e6),
            ("p999_ms", 3.0, |u| u.tails.p999 as f64 / 1e6),
        ] {
            let what =
                format!("round trip while the neighbour sends {} through 100 Mbit/s", name.to_uppercase());
            let value = |domain, htb| data.uplink(domain, htb, udp, of);
            let id = |suffix: &str| format!("uplink.{name}.{key}{suffix}");
            claims.push(claim(&id(""), &what, value(true, false), "ms").at_most(limit));
            claims.push(claim(&id("_fifo"), &format!("{what}, on taps"), value(false, false), "ms"));
            claims.push(claim(&id("_htb"), &format!("{what}, on taps with HTB"), value(false, true), "ms"));
        }
    }
    let rest = |udp| data.uplink(true, false, udp, |u| u.bits_per_second) / bed::LINK;
    claims.push(
        claim(
            "uplink.of_the_rest",
            "share of the link that is used while the neighbour sends UDP",
            rest(true),
            "share",
        )
        .at_least(0.97),
    );
    let simulated = &data.simulated;
    let promised = simulated.promised as usize;
    claims.extend([
        Claim::new(
            "net.simulated.over_bound",
            "simulated frames beyond the computed bound",
            simulated.over_bound as f64,
            "frames",
            promised,
        )
        .at_most(0.0),
        Claim::new(
            "net.simulated.missed",
            "simulated frames beyond an admitted deadline",
            simulated.missed as f64,
            "frames",
            promised,
        )
        .at_most(0.0),
        Claim::new(
            "net.simulated.inexact",
            "capped frames that went at another nanosecond than the exact one",
            simulated.inexact as f64,
            "frames",
            simulated.capped as usize,
        )
        .at_most(0.0),
        Claim::new(
            "net.simulated.rate_error",
            "deviation of the link's rate from the declared one",
            simulated.rate_error,
            "share",
            simulated.cases,
        )
        .at_most(0.001),
        claim(
            "delta.bound_over_measured",
            "the computed bound of the victim's frames to the longest one",
            data.promises
                .iter()
                .map(|[bound, worst, _]| *bound as f64 / (*worst).max(1) as f64)
                .fold(f64::INFINITY, f64::min),
            "ratio",
        )
        .at_least(1.0),
        claim(
            "delta.missed",
            "frames of the victim beyond their deadline",
            data.promises.iter().map(|p| p[2] as f64).sum(),
            "frames",
        ),
        claim(
            "kpps",
            "frames of 64 bytes from one port, one core",
            median(data.frames_one_port.clone()) / 1e3,
            "kpps",
        )
        .at_least(400.0),
        claim(
            "many.kpps_ratio",
            "the same of a network of 64 ports, to that of one",
            median(data.frames_of_many.clone()) / median(data.frames_one_port.clone()),
            "ratio",
        )
        .at_least(0.8),
        claim(
            "tcp_over_tap",
            "TCP from an emulated guest, to tap and bridge",
            median(data.tcp.iter().map(|[tap, domain]| tap / domain).collect()),
            "ratio",
        )
        .at_least(0.9),
        Claim::new(
            "net.tcp_cut_over_tap",
            "the same through a declared link of 10 Gbit/s, where large segments are cut",
            median(data.tcp.iter().zip(&data.tcp_cut).map(|([tap, _], cut)| tap / cut).collect()),
            "ratio",
            data.tcp_cut.len(),
        ),
        Claim::new(
            "net.crash.link_back_s",
            "from kill -9 until the victim answers, the longest",
            data.crashes.back_s.iter().copied().fold(0.0, f64::max),
            "s",
            data.crashes.back_s.len(),
        )
        .at_most(1.1),
        Claim::new(
            "net.crash.broken",
            "kills after which it does not",
            data.crashes.broken as f64,
            "kills",
            data.crashes.back_s.len() + data.crashes.broken as usize,
        )
        .at_most(0.0),
        Claim::new(
            "net.hostile.lost",
            "requests of the victim lost while another guest attacks",
            lost(Attack),
            "requests",
            requests(Attack),
        )
        .at_most(0.0),
    ]);
    claims.retain(|claim| claim.n > 0 || claim.id != "net.tcp_cut_over_tap");
    claims
}

/// The report of a saved result.
///
/// # Errors
/// When the file cannot be read.
pub fn report(path: &Path) -> anyhow::Result<ExperimentReport> {
    let data: NetData = read(path)?;
    let lead = format!("{}; {}.", data.host.device, data.command);
    let us = |ns: u64| format!("{:.0}", ns as f64 / 1e3);
    let row = |name: String, t: &Tails, more: String| {
        vec![name, t.n.to_string(), t.lost.to_string(), us(t.p50), us(t.p99), us(t.p999), us(t.max), more]
    };
    let head = |last: &str| {
        ["", "n", "lost", "p50 us", "p99 us", "p99.9 us", "max us", last].map(str::to_owned).to_vec()
    };
    let system = |domain: bool, htb: bool| match (domain, htb) {
        (true, _) => "I/O domain",
        (false, true) => "taps, HTB",
        (false, false) => "taps",
    };
    let paths = data.paths.iter().map(|p| {
        let name = format!("{}, {:?}", system(p.domain, false), p.situation).to_lowercase();
        row(name, &p.tails, format!("{:.2}", p.cpus))
    });
    let uplinks = data.uplinks.iter().map(|u| {
        let name = format!("{}, {}", system(u.domain, u.htb), if u.udp { "UDP" } else { "TCP" });
        row(name, &u.tails, format!("{:.1}", u.bits_per_second / 1e6))
    });
    let section = Section {
        title: "A victim and its neighbour".to_owned(),
        tables: vec![
            Table {
                label: "round trips at 4 kHz, each round".to_owned(),
                head: head("CPUs of the neighbour"),
                rows: paths.collect(),
            },
            Table {
                label: "round trips at 1 kHz through 100 Mbit/s, each round".to_owned(),
                head: head("Mbit/s"),
                rows: uplinks.collect(),
            },
        ],
        ..Section::default()
    };
    ExperimentReport::of_data(&data, data.host.clone(), claims(&data), lead, vec![section])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tails_are_of_the_right_rank() {
        let tails = Tails::of(&RoundTrips { ns: (1..=2_000).rev().collect(), lost: 3, sent: Vec::new() });
        assert_eq!(
            (tails.n, tails.lost, tails.p50, tails.p99, tails.p999, tails.max),
            (2_003, 3, 1_000, 1_980, 1_998, 2_000)
        );
        assert_eq!(Tails::of(&RoundTrips::default()).max, 0);
    }
}
