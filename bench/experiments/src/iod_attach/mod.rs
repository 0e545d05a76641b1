//! Disks are attached and detached while a guest on the same engine verifies its data.
//!
//! Turns alternate with rests of the same length. In a turn a disk is attached, used by a guest of
//! its own, and detached, as by `rtvirtio iod attach` and `detach`. The verifying client writes
//! blocks and reads them back all the time; its requests that overlap with a turn are compared with
//! those that do not.

mod measure;

pub use measure::{AttachOptions, measure};

use crate::experiment::Experiment;

use rtvirtio_measure::HostFacts;
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use crate::page::Section;
use crate::page::xy::table;
use crate::report::ExperimentReport;
use crate::stats::rank::nearest_rank;

/// Requests that the verifying client keeps outstanding.
pub const DEPTH: usize = 8;

/// Requests of the verifying client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Requests {
    /// Number of requests that completed.
    pub n: u64,
    /// Median latency, ns.
    pub p50_ns: u64,
    /// 99.99th percentile, ns; the longest where there are fewer than 10 000.
    pub p9999_ns: u64,
    /// Longest latency, ns.
    pub longest_ns: u64,
}

impl Requests {
    /// Summary of latencies in ns.
    #[must_use]
    pub fn from_latencies(mut latencies: Vec<u64>) -> Self {
        latencies.sort_unstable();
        let n = latencies.len();
        let at = |share| nearest_rank(&latencies, share).unwrap_or(0);
        Self { n: n as u64, p50_ns: at(0.5), p9999_ns: at(0.9999), longest_ns: at(1.0) }
    }
}

/// Times of one attached disk.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// Duration of the request to attach, until the disk is served, ms.
    pub attach_ms: f64,
    /// Duration of the successful request to detach, ms.
    pub detach_ms: f64,
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttachData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Disks that were attached and detached.
    pub turns: Vec<Turn>,
    /// Requests that overlap with a turn.
    pub during: Requests,
    /// Requests that overlap with no turn.
    pub between: Requests,
    /// Requests that were submitted and not completed exactly once, or failed.
    pub lost: u64,
    /// Blocks that were not read back as written.
    pub wrong: u64,
}

/// The claims of a result.
#[must_use]
pub fn claims(data: &AttachData) -> Vec<Claim> {
    let n = data.turns.len();
    let all = (data.during.n + data.between.n) as usize;
    let ms = |ns: u64| ns as f64 / 1e6;
    let longest = |of: fn(&Turn) -> f64| data.turns.iter().map(of).fold(0.0, f64::max);
    let request = |id: &str, what: &str, value: u64, n: u64| {
        Claim::new(format!("iod.attach.{id}"), what, ms(value), "ms", n as usize)
    };
    let (during, between) = (&data.during, &data.between);
    vec![
        Claim::new(
            "iod.attach.turns",
            "disks that came, were used and went next to the client",
            n as f64,
            "disks",
            n,
        ),
        Claim::new(
            "iod.attach.lost",
            "requests of the client lost, doubled or failed",
            data.lost as f64,
            "requests",
            all,
        )
        .at_most(0.0),
        Claim::new(
            "iod.attach.wrong",
            "blocks of the client that were not as written",
            data.wrong as f64,
            "blocks",
            all,
        )
        .at_most(0.0),
        request(
            "longest_ms",
            "longest request of the client while a disk comes or goes",
            during.longest_ns,
            during.n,
        ),
        request(
            "longest_without_ms",
            "longest request of the client meanwhile, without",
            between.longest_ns,
            between.n,
        ),
        request("p9999_ms", "p99.99 of the client while a disk comes or goes", during.p9999_ns, during.n),
        request("p9999_without_ms", "p99.99 of the client meanwhile, without", between.p9999_ns, between.n),
        Claim::new("iod.attach.attach_ms", "longest attach", longest(|t| t.attach_ms), "ms", n),
        Claim::new("iod.attach.detach_ms", "longest detach", longest(|t| t.detach_ms), "ms", n),
    ]
}

impl Experiment for AttachData {
    const FORM: &str = "rtvirtio-iod-attach/1";
    const FILE: &str = "iod-attach.json";
    const TITLE: &str = "rtvirtio: disks come and go";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "{}: {} disks in turn next to a client that verifies {} requests at a time; {}.",
            self.host.device,
            self.turns.len(),
            DEPTH,
            self.command
        );
        let ms = |ns: u64| format!("{:.3}", ns as f64 / 1e6);
        let row = |name: &str, r: &Requests| {
            vec![name.to_owned(), r.n.to_string(), ms(r.p50_ns), ms(r.p9999_ns), ms(r.longest_ns)]
        };
        let head = ["", "n", "p50 ms", "p99.99 ms", "longest ms"];
        let rows = vec![row("a disk comes or goes", &self.during), row("none does", &self.between)];
        let section = Section {
            title: "Disks come and go".to_owned(),
            tables: vec![table("requests of the verifying client", &head, rows)],
            ..Section::default()
        };
        ExperimentReport::of_data(self, self.host.clone(), claims(self), lead, vec![section])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_right_rank() {
        let requests = Requests::from_latencies((1..=20_000).rev().collect());
        assert_eq!((requests.n, requests.p50_ns, requests.p9999_ns), (20_000, 10_000, 19_998));
        assert_eq!(requests.longest_ns, 20_000);
        assert_eq!(Requests::from_latencies(Vec::new()), Requests::default());
        assert_eq!(
            Requests::from_latencies(vec![7]),
            Requests { n: 1, p50_ns: 7, p9999_ns: 7, longest_ns: 7 }
        );
    }
}
