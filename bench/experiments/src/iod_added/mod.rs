//! Latency and CPU time that the I/O domain adds to the bare device.
//!
//! A round reads 4 KiB at random at each depth in three ways, in random order: fio on the device,
//! by io_uring with registered buffers and files; and a vhost-user client without a VM through the
//! I/O domain, which sleeps until it is notified or polls for completions. The CPU time on the bare
//! device is that of fio's thread; through the I/O domain it is that of the client's thread and of
//! the I/O domain's process. Threads of the kernel count on neither side.

mod measure;
mod page;

pub use measure::{AddedOptions, bare_job, measure};

use rtvirtio_learn::statistic::median;
use rtvirtio_measure::HostFacts;
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use crate::stats::rank::nearest_rank;

/// Numbers of requests that are kept outstanding.
pub const DEPTHS: [u32; 3] = [1, 8, 32];
/// Name of the loop device over memory. Its claims alone have limits.
pub const MEMORY: &str = "ram";
/// Limits of the median latency added at depth 1, for a sleeping and for a polling client, us.
const ADDED_US: [f64; 2] = [25.0, 5.0];
/// Limit of the CPU time per request over the bare device's, for a client that sleeps as fio does.
const CPU_RATIO: f64 = 1.5;

/// Way of the requests to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From fio, without the I/O domain.
    Bare,
    /// From a client of the I/O domain.
    Through {
        /// Whether the client polls for completions; else it sleeps until it is notified.
        polling: bool,
    },
}

/// Ways in the order of a [`Round`].
pub const WAYS: [Way; 3] = [Way::Bare, Way::Through { polling: false }, Way::Through { polling: true }];

/// Values of one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reads {
    /// Requests that completed.
    pub n: u64,
    /// Completed requests per second.
    pub iops: f64,
    /// Median latency, ns.
    pub p50_ns: u64,
    /// 99th percentile, ns.
    pub p99_ns: u64,
    /// 99.9th percentile, ns.
    pub p999_ns: u64,
    /// 99.99th percentile, ns; the longest where there are fewer than 10 000.
    pub p9999_ns: u64,
    /// CPU time per request of fio's thread, or of the client's, ns.
    pub client_cpu_ns: f64,
    /// CPU time per request of the I/O domain's process, ns; 0 on the bare device.
    pub domain_cpu_ns: f64,
}

impl Reads {
    /// CPU time per request of all that is counted, ns.
    #[must_use]
    pub fn cpu_ns(&self) -> f64 {
        self.client_cpu_ns + self.domain_cpu_ns
    }
}

/// Runs at one depth, next to each other in time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// Requests outstanding at a time.
    pub depth: u32,
    /// Run on the bare device.
    pub bare: Reads,
    /// Run through the I/O domain, with a client that sleeps.
    pub sleeping: Reads,
    /// Run through the I/O domain, with a client that polls.
    pub polling: Reads,
}

impl Round {
    fn through(&self, polling: bool) -> &Reads {
        if polling { &self.polling } else { &self.sleeping }
    }
}

/// Median of a value over the rounds, with its quartiles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Quartiles {
    /// Lower quartile, by nearest rank.
    pub low: f64,
    /// Median; of an even number of values the mean of the two in the middle.
    pub median: f64,
    /// Upper quartile, by nearest rank.
    pub high: f64,
}

impl Quartiles {
    /// Quartiles of `values`; zeros of an empty list.
    #[must_use]
    pub fn from_values(mut values: Vec<f64>) -> Self {
        values.sort_unstable_by(f64::total_cmp);
        let at = |share| nearest_rank(&values, share).unwrap_or(0.0);
        let (low, high) = (at(0.25), at(0.75));
        Self { low, median: median(values), high }
    }
}

/// A value on the bare device and through the I/O domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Compared {
    /// Value on the bare device.
    pub bare: Quartiles,
    /// Value through the I/O domain.
    pub through: Quartiles,
    /// Value through the I/O domain less that on the bare device of the same round; for CPU time
    /// and requests per second their ratio.
    pub pairs: Quartiles,
}

impl Compared {
    fn new(
        rounds: &[&Round],
        polling: bool,
        value: impl Fn(&Reads) -> f64,
        pair: impl Fn(f64, f64) -> f64,
    ) -> Self {
        let bare: Vec<f64> = rounds.iter().map(|r| value(&r.bare)).collect();
        let through: Vec<f64> = rounds.iter().map(|r| value(r.through(polling))).collect();
        let pairs = through.iter().zip(&bare).map(|(through, bare)| pair(*through, *bare)).collect();
        Self {
            bare: Quartiles::from_values(bare),
            through: Quartiles::from_values(through),
            pairs: Quartiles::from_values(pairs),
        }
    }

    /// Difference of the two medians.
    #[must_use]
    pub fn added(&self) -> f64 {
        self.through.median - self.bare.median
    }
}

/// Comparison at one depth, for one kind of client.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Added {
    /// Requests outstanding at a time.
    pub depth: u32,
    /// Whether the client polls.
    pub polling: bool,
    /// Number of pairs.
    pub n: usize,
    /// Median latency, us.
    pub p50_us: Compared,
    /// 99th percentile, us.
    pub p99_us: Compared,
    /// 99.9th percentile, us.
    pub p999_us: Compared,
    /// 99.99th percentile, us.
    pub p9999_us: Compared,
    /// CPU time per request, us.
    pub cpu_us: Compared,
    /// Share of it that is the I/O domain's process, us.
    pub domain_cpu_us: Quartiles,
    /// Requests per second.
    pub iops: Compared,
}

impl Added {
    /// Compares the rounds of this depth.
    #[must_use]
    pub fn from_rounds(rounds: &[Round], depth: u32, polling: bool) -> Self {
        let rounds: Vec<&Round> = rounds.iter().filter(|r| r.depth == depth).collect();
        let latency = |ns: fn(&Reads) -> u64| {
            Compared::new(&rounds, polling, |r| ns(r) as f64 / 1e3, |through, bare| through - bare)
        };
        let ratio = |value: fn(&Reads) -> f64| {
            Compared::new(&rounds, polling, value, |through, bare| through / bare.max(1e-9))
        };
        let domain_cpu_us = rounds.iter().map(|r| r.through(polling).domain_cpu_ns / 1e3).collect();
        Self {
            depth,
            polling,
            n: rounds.len(),
            p50_us: latency(|r| r.p50_ns),
            p99_us: latency(|r| r.p99_ns),
            p999_us: latency(|r| r.p999_ns),
            p9999_us: latency(|r| r.p9999_ns),
            cpu_us: ratio(|r| r.cpu_ns() / 1e3),
            domain_cpu_us: Quartiles::from_values(domain_cpu_us),
            iops: ratio(|r| r.iops),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DeviceRounds {
    /// Name in ids of claims, such as [`MEMORY`].
    pub name: String,
    /// Description, as of [`HostFacts::device`].
    pub device: String,
    /// Rounds in the order made.
    pub rounds: Vec<Round>,
    /// Comparison at each depth, a client that sleeps before one that polls.
    pub added: Vec<Added>,
}

impl DeviceRounds {
    /// Rounds with their comparison.
    #[must_use]
    pub fn new(name: &str, device: String, rounds: Vec<Round>) -> Self {
        let at = |depth: &u32| [false, true].map(|polling| Added::from_rounds(&rounds, *depth, polling));
        let added = DEPTHS.iter().flat_map(at).collect();
        Self { name: name.to_owned(), device, rounds, added }
    }
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AddedData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Devices with their rounds.
    pub devices: Vec<DeviceRounds>,
}

/// The claims of a result.
#[must_use]
pub fn claims(data: &AddedData) -> Vec<Claim> {
    data.devices.iter().flat_map(of_device).collect()
}

fn of_device(device: &DeviceRounds) -> Vec<Claim> {
    let mut claims: Vec<Claim> =
        [false, true].into_iter().flat_map(|polling| of_client(&device.added, polling)).collect();
    if let Some(one) = device.added.iter().find(|a| a.depth == 1) {
        let bare = |id: &str, what: &str, value: f64| {
            Claim::new(format!("iod.added.bare.{id}"), what, value, "us", one.n)
        };
        claims.push(bare("p50_us", "p50 of the bare device at depth 1", one.p50_us.bare.median));
        claims.push(bare("cpu_us", "CPU time per request of the same", one.cpu_us.bare.median));
    }
    if device.name == MEMORY {
        return claims;
    }
    let named = |c: Claim| Claim { id: format!("{}@{}", c.id, device.name), ..c.for_comparison() };
    claims.into_iter().map(named).collect()
}

/// Claims of one kind of client. The page of claims has little room: those with a limit are brief.
fn of_client(added: &[Added], polling: bool) -> Vec<Claim> {
    let (id, client) = if polling { ("iod.polling.added", ", polling") } else { ("iod.added", "") };
    let added = added.iter().filter(|a| a.polling == polling);
    let (mut claims, mut worst, mut n) = (Vec::new(), 0.0_f64, 0);
    for a in added {
        let at = if a.depth == 1 { id.to_owned() } else { format!("{id}.qd{}", a.depth) };
        let tails =
            [("p99", &a.p99_us), ("p999", &a.p999_us), ("p9999", &a.p9999_us)].map(|(name, compared)| {
                let what = format!("{name} added at depth {}{client}", a.depth);
                Claim::new(format!("{at}.{name}_us"), what, compared.added(), "us", a.n)
            });
        let what = format!("p50 added at depth {}{client}", a.depth);
        let p50 = Claim::new(format!("{at}.p50_us"), what, a.p50_us.added(), "us", a.n);
        claims.push(if a.depth == 1 { p50.at_most(ADDED_US[usize::from(polling)]) } else { p50 });
        claims.extend(tails);
        let ratios = [
            ("cpu_ratio", "CPU time per request", a.cpu_us.pairs.median),
            ("iops_ratio", "requests per second", a.iops.pairs.median),
        ];
        claims.extend(ratios.map(|(name, what, value)| {
            let what = format!("{what} at depth {}{client}, over the bare device's", a.depth);
            Claim::new(format!("{id}.qd{}.{name}", a.depth), what, value, "times", a.n)
        }));
        (worst, n) = (worst.max(a.cpu_us.pairs.median), n + a.n);
    }
    let what = format!("CPU time over the bare device's{client}");
    let cpu = Claim::new(format!("{id}.cpu_ratio"), what, worst, "times", n);
    // A client that polls uses all of a CPU, whatever the I/O domain costs.
    claims.push(if polling { cpu } else { cpu.at_most(CPU_RATIO) });
    claims
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::{Saved as _, from_json};

    fn reads(p50_us: u64, client_us: f64, domain_us: f64) -> Reads {
        Reads {
            n: 1_000,
            iops: 1e6 / p50_us as f64,
            p50_ns: p50_us * 1_000,
            p99_ns: p50_us * 2_000,
            p999_ns: p50_us * 3_000,
            p9999_ns: p50_us * 4_000,
            client_cpu_ns: client_us * 1e3,
            domain_cpu_ns: domain_us * 1e3,
        }
    }

    /// Three rounds at each depth, with the CPU time of the I/O domain in each.
    fn device(name: &str, domain_us: f64) -> DeviceRounds {
        let round = |depth: u32, [bare, sleeping, polling]: [u64; 3]| Round {
            depth,
            bare: reads(bare, 10.0, 0.0),
            sleeping: reads(sleeping, 5.0, domain_us),
            polling: reads(polling, 20.0, domain_us),
        };
        let rounds = [[10, 30, 15], [12, 31, 17], [11, 35, 16]];
        let all = DEPTHS.into_iter().flat_map(|depth| rounds.map(|latencies| round(depth, latencies)));
        DeviceRounds::new(name, "RAM disk".to_owned(), all.collect())
    }

    fn data(devices: Vec<DeviceRounds>) -> AddedData {
        AddedData {
            schema: AddedData::SCHEMA.to_owned(),
            host: HostFacts::default(),
            command: String::new(),
            generated: String::new(),
            devices,
        }
    }

    fn claim(claims: &[Claim], id: &str) -> Claim {
        claims.iter().find(|c| c.id == id).unwrap_or_else(|| panic!("no {id}")).clone()
    }

    #[test]
    fn claims_are_differences_of_medians_and_ratios_of_pairs() {
        let all = claims(&data(vec![device(MEMORY, 10.0)]));
        let value = |id: &str| claim(&all, id).value;
        // Medians of 31, 16 and 11 us.
        assert_eq!((value("iod.added.p50_us"), value("iod.polling.added.p50_us")), (20.0, 5.0));
        assert_eq!((value("iod.added.p99_us"), value("iod.added.p999_us")), (40.0, 60.0));
        assert_eq!(value("iod.added.bare.p50_us"), 11.0);
        assert_eq!((value("iod.added.cpu_ratio"), value("iod.polling.added.cpu_ratio")), (1.5, 3.0));
        let limited: Vec<&Claim> = all.iter().filter(|c| c.has_limit()).collect();
        assert_eq!(
            limited.iter().map(|c| (c.id.as_str(), c.at_most, c.n, c.met)).collect::<Vec<_>>(),
            [
                ("iod.added.p50_us", Some(25.0), 3, true),
                ("iod.added.cpu_ratio", Some(1.5), 9, true),
                ("iod.polling.added.p50_us", Some(5.0), 3, true),
            ]
        );
        let mut ids: Vec<&str> = all.iter().map(|c| c.id.as_str()).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), all.len(), "each id once");
    }

    #[test]
    fn limits_are_missed_by_more_cpu_time_and_without_rounds() {
        let all = claims(&data(vec![device(MEMORY, 11.0)]));
        assert!(!claim(&all, "iod.added.cpu_ratio").met);
        let none = claims(&data(vec![DeviceRounds::new(MEMORY, String::new(), Vec::new())]));
        assert!(none.iter().filter(|c| c.has_limit()).all(|c| !c.met), "no rounds show nothing");
    }

    #[test]
    fn other_devices_are_there_for_comparison() {
        let all = claims(&data(vec![device(MEMORY, 10.0), device("emmc", 90.0)]));
        let other = claim(&all, "iod.added.cpu_ratio@emmc");
        assert!(!other.has_limit() && other.met && other.value > 9.0, "{other:?}");
    }

    #[test]
    fn spread_is_that_of_pairs() {
        let device = device(MEMORY, 10.0);
        let one = device.added.iter().find(|a| a.depth == 1 && !a.polling).unwrap();
        assert_eq!((one.n, one.domain_cpu_us.median), (3, 10.0));
        // Pairs differ by 20, 19 and 24 us.
        assert_eq!(one.p50_us.pairs, Quartiles { low: 19.0, median: 20.0, high: 24.0 });
        assert_eq!(Quartiles::from_values(Vec::new()), Quartiles::default());
    }

    #[test]
    fn a_result_is_read_as_saved() {
        let data = data(vec![device(MEMORY, 10.0)]);
        assert_eq!(from_json::<AddedData>(&serde_json::to_string(&data).unwrap()).unwrap(), data);
    }
}
