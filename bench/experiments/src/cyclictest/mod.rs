//! Latency of a timed real-time thread in a guest under I/O load: the RT hypervisor paper's Figs. 1
//! to 5.
//!
//! cyclictest (Debian's rt-tests) wakes each [`INTERVAL_US`] at priority 99 and counts latencies.
//! All runs share one core of the host with a thread that walks through memory, as the paper's
//! calibrator did.

mod latencies;
mod load;
mod measure;
mod page;
mod pinned_guest;
pub(crate) mod wake_up_probe;

pub use latencies::{Latencies, parse};
pub use measure::{CyclictestOptions, measure};
pub(crate) use page::points;

use std::fmt;
use std::str::FromStr;

use rtvirtio_measure::HostFacts;
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use rtvirtio_learn::statistic::median;

/// Interval of wake-ups, us (the paper's section 3.2).
pub const INTERVAL_US: u64 = 1000;
/// Interval of the probe on the host's core, us: different from the guest's, or both would keep the
/// same phase.
pub const WATCH_US: u64 = 997;
/// Latencies from here on are only counted, in us (the paper's upper bound of its histograms).
pub const LARGEST_US: u64 = 100_000;
/// Memory that the host's load touches, in bytes: more than the caches next to a core hold.
pub const WALK: usize = 4 << 20;

/// Place of cyclictest, and priorities of its VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setup {
    /// On the host, with the load: the floor.
    Host,
    /// In a guest with default priorities.
    Guest,
    /// All threads of the VM are real-time, AIO workers too.
    Prioritised,
    /// Priorities of `Prioritised`, with ordinary AIO workers.
    AioLowered,
    /// Priorities of `AioLowered`, with the I/O load on the host.
    LoadMoved,
}

impl Setup {
    /// All set-ups, in the paper's order.
    pub const ALL: [Self; 5] =
        [Self::Host, Self::Guest, Self::Prioritised, Self::AioLowered, Self::LoadMoved];

    /// Name with the paper's figure.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host (Fig. 1)",
            Self::Guest => "guest, no priorities (Fig. 2)",
            Self::Prioritised => "prioritised (Fig. 3)",
            Self::AioLowered => "AIO workers lowered (Fig. 4)",
            Self::LoadMoved => "I/O load on the host (Fig. 5)",
        }
    }
}

impl fmt::Display for Setup {
    /// Name in results and options.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Guest => "guest",
            Self::Prioritised => "prioritised",
            Self::AioLowered => "aio-lowered",
            Self::LoadMoved => "load-moved",
        })
    }
}

impl FromStr for Setup {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed = Self::ALL.into_iter().find(|s| s.to_string() == text);
        parsed.ok_or_else(|| "one of host, guest, prioritised, aio-lowered, load-moved".to_owned())
    }
}

/// The runs of one set-up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Priorities and place of the load.
    pub setup: Setup,
    /// Release of the kernel that runs cyclictest.
    pub kernel: String,
    pub rounds: Vec<Latencies>,
}

impl Series {
    /// Latencies of all rounds together.
    #[must_use]
    pub fn all(&self) -> Latencies {
        let mut all = Latencies::default();
        self.rounds.iter().for_each(|r| all.merge(r));
        all
    }

    /// Latencies of the rounds with a probe on the host's core, together.
    #[must_use]
    pub fn watched(&self) -> Latencies {
        let mut all = Latencies::default();
        self.rounds.iter().filter(|r| r.floor.is_some()).for_each(|r| all.merge(r));
        all
    }
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CyclictestData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command lines that measured the rounds, in order.
    pub commands: Vec<String>,
    /// Date of the last round, and version of the program.
    pub generated: String,
    /// Whether the CPUs were kept from sleeping.
    pub awake: bool,
    /// Whether a thread of the host wakes on the guest's core ([`Latencies::floor`]), which takes
    /// some of the guest's time.
    #[serde(default)]
    pub watched: bool,
    /// The kernel's name of the mechanism that holds the contract.
    pub backend: String,
    /// The contract, as `2ms in 3ms`.
    pub contract: String,
    /// The set-ups, each guest's kernel after the other.
    pub series: Vec<Series>,
}

impl CyclictestData {
    /// Releases of the guests' kernels, in the order in which they ran.
    #[must_use]
    pub fn kernels(&self) -> Vec<&str> {
        let guests = self.series.iter().filter(|s| s.setup == Setup::Guest);
        guests.map(|s| s.kernel.as_str()).collect()
    }

    /// Appends a round to its set-up.
    pub fn push(&mut self, setup: Setup, kernel: &str, round: Latencies) {
        match self.series.iter_mut().find(|s| s.setup == setup && s.kernel == kernel) {
            Some(series) => series.rounds.push(round),
            None => self.series.push(Series { setup, kernel: kernel.to_owned(), rounds: vec![round] }),
        }
    }

    /// First difference that makes rounds of `new` incomparable with these. `None` when they were
    /// measured in the same way.
    #[must_use]
    pub fn differs(&self, new: &Self) -> Option<String> {
        let host = |h: &HostFacts| format!("{}, {} CPUs, {} ({})", h.kernel, h.cpus, h.vmm, h.accelerator);
        let pairs = [
            ("form", self.schema.clone(), new.schema.clone()),
            ("host", host(&self.host), host(&new.host)),
            ("contract", self.contract.clone(), new.contract.clone()),
            ("mechanism", self.backend.clone(), new.backend.clone()),
            ("--awake", self.awake.to_string(), new.awake.to_string()),
            ("a watching thread on the core", self.watched.to_string(), new.watched.to_string()),
        ];
        let (what, old, new) = pairs.into_iter().find(|(_, old, new)| old != new)?;
        Some(format!("{what}: {old} there, {new} here"))
    }

    /// The runs of a set-up of the guest with this kernel; the host's for [`Setup::Host`].
    #[must_use]
    pub fn series_for(&self, kernel: &str, setup: Setup) -> Option<&Series> {
        self.series.iter().find(|s| s.setup == setup && (setup == Setup::Host || s.kernel == kernel))
    }
}

/// Ratio of p99.9 with priorities to that without, for each guest's kernel, and the worst of them.
#[must_use]
pub fn claims(data: &CyclictestData) -> Vec<Claim> {
    let mut claims = Vec::new();
    let (mut worst, mut samples, mut least) = (None, 0, f64::INFINITY);
    for kernel in data.kernels() {
        let pair = data.series_for(kernel, Setup::AioLowered).zip(data.series_for(kernel, Setup::Guest));
        let Some((with_series, without_series)) = pair else { continue };
        let rounds = with_series.rounds.iter().zip(&without_series.rounds);
        let ratios: Vec<f64> = rounds.map(|(w, o)| w.at(0.999) as f64 / o.at(0.999).max(1) as f64).collect();
        let (with, without) = (with_series.all(), without_series.all());
        let n = usize::try_from(with.n().min(without.n())).unwrap_or(usize::MAX);
        let ratio = with.at(0.999) as f64 / without.at(0.999).max(1) as f64;
        let id = if is_rt(kernel) { "rt" } else { "standard" };
        let what = format!(
            "p99.9 in a guest with {kernel} prioritised with AIO lowered, over no priorities; all rounds together"
        );
        claims.push(Claim::new(format!("cpu.cyclictest.p999_ratio.{id}"), what, ratio, "times", n));
        let rounds = ratios.len();
        claims.push(Claim::new(
            format!("cpu.cyclictest.p999_ratio.{id}.rounds"),
            "the same for each round, median",
            median(ratios),
            "times",
            rounds,
        ));
        claims.extend(beyond_floor(id, with_series, without_series));
        worst = Some(worst.map_or(ratio, |w: f64| w.max(ratio)));
        least = least.min(with.seconds.min(without.seconds));
        samples += n;
    }
    let least = if least.is_finite() { least / 60.0 } else { 0.0 };
    let what = format!(
        "p99.9 of cyclictest in a guest under I/O load: prioritised with AIO lowered, over no priorities; {least:.1} min of each at least, worst kernel"
    );
    let worst = worst.unwrap_or(0.0);
    claims.insert(0, Claim::new("cpu.cyclictest.p999_ratio", what, worst, "times", samples).at_most(0.25));
    claims
}

/// Ratio of the p99.9 that the guest adds to the core's own. Only rounds with the probe count.
fn beyond_floor(id: &str, with: &Series, without: &Series) -> Option<Claim> {
    let (with, without) = (with.watched(), without.watched());
    let ratio = with.at_beyond_floor(0.999)? as f64 / without.at_beyond_floor(0.999)?.max(1) as f64;
    let n = usize::try_from(with.n().min(without.n())).unwrap_or(usize::MAX);
    let what = format!(
        "the same less what a thread of the host saw on the core at the same time, {:.1} min of each at least",
        with.seconds.min(without.seconds) / 60.0
    );
    Some(Claim::new(format!("cpu.cyclictest.p999_ratio.{id}.beyond_host"), what, ratio, "times", n))
}

/// Whether a Debian kernel's release is that of one with `PREEMPT_RT`.
#[must_use]
pub fn is_rt(release: &str) -> bool {
    release.split('-').any(|part| part == "rt")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::Saved as _;

    #[test]
    fn a_setup_is_named_as_in_results() {
        for setup in Setup::ALL {
            let name = serde_json::to_value(setup).unwrap();
            assert_eq!(name, setup.to_string());
            assert_eq!(setup.to_string().parse(), Ok(setup));
        }
        assert!("idle".parse::<Setup>().is_err());
    }

    #[test]
    fn the_worst_kernel_counts() {
        let series = |kernel: &str, setup, us: [u64; 2]| {
            let rounds = us.map(|us| {
                let mut latencies = Latencies::default();
                latencies.add(us);
                latencies
            });
            Series { setup, kernel: kernel.to_owned(), rounds: rounds.to_vec() }
        };
        let mut data = CyclictestData {
            schema: CyclictestData::SCHEMA.to_owned(),
            host: HostFacts { cpus: 2, ..HostFacts::default() },
            commands: Vec::new(),
            generated: String::new(),
            awake: true,
            watched: false,
            backend: String::new(),
            contract: String::new(),
            series: vec![
                series("6.1.0-1-cloud-amd64", Setup::Guest, [500, 900]),
                series("6.1.0-1-cloud-amd64", Setup::AioLowered, [100, 180]),
            ],
        };
        let all = claims(&data);
        assert!((all[0].value - 0.2).abs() < 1e-9 && all[0].met && all[0].n == 2, "{all:?}");
        assert_eq!(all[2].id, "cpu.cyclictest.p999_ratio.standard.rounds");
        let rt = "6.1.0-1-rt-amd64";
        data.series.extend([series(rt, Setup::Guest, [900, 500]), series(rt, Setup::AioLowered, [270, 1])]);
        let all = claims(&data);
        assert!((all[0].value - 0.3).abs() < 1e-9 && !all[0].met && all[0].n == 4, "{all:?}");
        data.push(Setup::Guest, rt, Latencies { seconds: 2.0, ..Latencies::default() });
        assert_eq!(data.series_for(rt, Setup::Guest).unwrap().rounds.len(), 3);
        assert!((data.series_for(rt, Setup::Guest).unwrap().all().seconds - 2.0).abs() < 1e-9);
        assert_eq!(data.differs(&data), None);
        let asleep = CyclictestData { awake: false, ..data.clone() };
        assert_eq!(data.differs(&asleep).unwrap(), "--awake: true there, false here");
        data.series.clear();
        assert!(!claims(&data)[0].met, "nothing was measured");
    }
}
