//! Latency of a timed real-time thread in a guest under I/O load: the RT hypervisor paper's Figs. 1 to 5.
//!
//! cyclictest (Debian's rt-tests) wakes each [`INTERVAL_US`] at priority 99 and counts how late. All runs share one core of the host with a thread that
//! walks through memory, as the paper's calibrator did.

mod load;
mod measure;
mod page;
mod pinned_guest;
mod wake_up_probe;

pub use measure::{CyclictestOptions, measure};
pub use page::report;

use std::fmt;
use std::str::FromStr;

use rtvirtio_measure::HostFacts;
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use rtvirtio_learn::statistic::median;

/// File name of the result.
pub const FILE: &str = "cpu-cyclictest.json";

/// From one wake-up to the next, in us (the paper's section 3.2).
pub const INTERVAL_US: u64 = 1000;
/// The same for the thread of the host that watches the core, in us: not the guest's, or both would meet at the same phase all along.
pub const WATCH_US: u64 = 997;
/// Latencies from here on are only counted, in us (the paper's upper bound of its histograms).
pub const LARGEST_US: u64 = 100_000;
/// Memory that the host's load walks through, in bytes: more than the caches next to a core hold.
pub const WALK: usize = 4 << 20;

/// Where the thread runs, and how its VM is set up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Setup {
    /// On the host, load too: the floor.
    Host,
    /// In a guest as QEMU starts it.
    Guest,
    /// All threads of the VM are real-time, AIO workers too.
    Prioritised,
    /// The same with ordinary AIO workers.
    AioLowered,
    /// The same, and the I/O load on the host.
    LoadMoved,
}

impl Setup {
    /// In the paper's order.
    pub const ALL: [Self; 5] =
        [Self::Host, Self::Guest, Self::Prioritised, Self::AioLowered, Self::LoadMoved];

    /// What it is, with the paper's figure.
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
    /// As in results and options.
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
        let found = Self::ALL.into_iter().find(|s| s.to_string() == text);
        found.ok_or_else(|| "one of host, guest, prioritised, aio-lowered, load-moved".to_owned())
    }
}

/// How often each latency was seen.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Latencies {
    /// Latency in us and count, by rising latency. From 1 ms on latencies are rounded up to three figures.
    pub counts: Vec<(u64, u64)>,
    /// How many were [`LARGEST_US`] or more.
    pub above: u64,
    /// The longest, in us.
    pub max_us: u64,
    /// How long was measured, in s.
    pub seconds: f64,
    /// How long of that the hypervisor below the host gave the core to others, in s: no setting here changes what waits for that. Absent where it was
    /// not looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stolen: Option<f64>,
    /// What a thread of the host saw on the same core at the same time, above all that ran there: how late the core itself was. Absent for the host's own
    /// runs, and where it was not looked at.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor: Option<Box<Self>>,
}

/// Rounds up to three figures, but to single microseconds below 1 ms.
fn rounded(us: u64) -> u64 {
    let step = match us {
        0..1_000 => 1,
        1_000..10_000 => 10,
        _ => 100,
    };
    us.div_ceil(step) * step
}

impl Latencies {
    /// How many.
    #[must_use]
    pub fn n(&self) -> u64 {
        self.above + self.counts.iter().map(|c| c.1).sum::<u64>()
    }

    /// The latency that the share `p` of all does not pass, by nearest rank, in us. Beyond the histogram it is the longest.
    #[must_use]
    pub fn at(&self, p: f64) -> u64 {
        let rank = ((self.n() as f64 * p).ceil() as u64).max(1);
        let mut seen = 0;
        for (us, count) in &self.counts {
            seen += count;
            if seen >= rank {
                return *us;
            }
        }
        self.max_us
    }

    /// Counts one more.
    pub fn add(&mut self, us: u64) {
        self.max_us = self.max_us.max(us);
        self.add_many(us, 1);
    }

    fn add_many(&mut self, us: u64, n: u64) {
        if us >= LARGEST_US {
            self.above += n;
            return;
        }
        let us = rounded(us);
        match self.counts.binary_search_by_key(&us, |c| c.0) {
            Ok(i) => self.counts[i].1 += n,
            Err(i) => self.counts.insert(i, (us, n)),
        }
    }

    /// Counts those of another run too.
    pub fn merge(&mut self, other: &Self) {
        // Nothing yet is no run in which it was not looked at.
        let begun = self.n() > 0;
        self.stolen = if begun { self.stolen.zip(other.stolen).map(|(a, b)| a + b) } else { other.stolen };
        self.floor = match (self.floor.take(), &other.floor) {
            (Some(mut mine), Some(theirs)) => {
                mine.merge(theirs);
                Some(mine)
            }
            (None, Some(theirs)) if !begun => Some(theirs.clone()),
            _ => None,
        };
        other.counts.iter().for_each(|(us, n)| self.add_many(*us, *n));
        self.above += other.above;
        self.max_us = self.max_us.max(other.max_us);
        self.seconds += other.seconds;
    }

    /// The latency, in us, above which no more than the share `1 - p` of wake-ups lie while the core itself is late by no more than that. Each lateness
    /// of the core makes the guest's thread late once at most, and the watcher's too, so as many a second are taken off as the watcher saw above the same
    /// latency. Above it this holds for all latencies. `None` without [`Latencies::floor`].
    #[must_use]
    pub fn at_beyond_floor(&self, p: f64) -> Option<u64> {
        let floor = self.floor.as_ref()?;
        let a_second = |l: &Self, us: u64| {
            let above = l.above + l.counts.iter().filter(|c| c.0 > us).map(|c| c.1).sum::<u64>();
            above as f64 / l.seconds.max(1e-9)
        };
        let allowed = (1.0 - p) * self.n() as f64 / self.seconds.max(1e-9);
        let holds = |us: u64| a_second(self, us) - a_second(floor, us) <= allowed;
        let last = self.counts.iter().rev().map(|c| c.0).take_while(|us| holds(*us)).last();
        Some(last.unwrap_or(self.max_us))
    }

    /// Mean in us; those above the histogram count as its end.
    #[must_use]
    pub fn mean(&self) -> f64 {
        let sum: u64 = self.counts.iter().map(|(us, n)| us * n).sum::<u64>() + self.above * LARGEST_US;
        sum as f64 / self.n().max(1) as f64
    }
}

/// What `cyclictest -q -h N` printed for one thread.
///
/// # Errors
/// When it is no such output, or has no cycle.
pub fn parse(text: &str) -> Result<Latencies, String> {
    let mut all = Latencies::default();
    let (mut max, mut above) = (0, 0);
    let number = |t: &str| t.trim().parse::<u64>().ok();
    for line in text.lines() {
        if let Some(of) = line.strip_prefix("# Max Latencies:") {
            max = number(of).ok_or_else(|| format!("cyclictest: `{line}`"))?;
        } else if let Some(of) = line.strip_prefix("# Histogram Overflows:") {
            above = number(of).ok_or_else(|| format!("cyclictest: `{line}`"))?;
        } else if let Some((us, count)) = line.split_once(char::is_whitespace) {
            if let (Some(us), Some(count @ 1..)) = (number(us), number(count)) {
                all.add_many(us, count);
            }
        }
    }
    (all.max_us, all.above) = (max, above);
    if all.n() == 0 {
        return Err(format!("cyclictest printed no latency: {text:.200}"));
    }
    Ok(all)
}

/// The runs of one set-up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// Set-up.
    pub setup: Setup,
    /// Release of the kernel that runs cyclictest.
    pub kernel: String,
    /// What was seen in each round.
    pub rounds: Vec<Latencies>,
}

impl Series {
    /// All rounds together.
    #[must_use]
    pub fn all(&self) -> Latencies {
        let mut all = Latencies::default();
        self.rounds.iter().for_each(|r| all.merge(r));
        all
    }

    /// The rounds in which the host's core was watched, together.
    #[must_use]
    pub fn watched(&self) -> Latencies {
        let mut all = Latencies::default();
        self.rounds.iter().filter(|r| r.floor.is_some()).for_each(|r| all.merge(r));
        all
    }
}

/// All that was measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CyclictestData {
    /// [`CyclictestData::SCHEMA`].
    pub schema: String,
    /// Where.
    pub host: HostFacts,
    /// How: the commands that measured the rounds, one after the other.
    pub commands: Vec<String>,
    /// When the last of them ended a round.
    pub generated: String,
    /// Whether the CPUs were kept from sleeping.
    pub awake: bool,
    /// Whether a thread of the host wakes on the core beside the guest's ([`Latencies::floor`]), which costs the guest some of it.
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
    /// Form of the file.
    pub const SCHEMA: &str = "rtvirtio-cpu-cyclictest/2";

    /// Releases of the guests' kernels, in the order in which they ran.
    #[must_use]
    pub fn kernels(&self) -> Vec<&str> {
        let guests = self.series.iter().filter(|s| s.setup == Setup::Guest);
        guests.map(|s| s.kernel.as_str()).collect()
    }

    /// Puts one more round to its set-up's.
    pub fn push(&mut self, setup: Setup, kernel: &str, round: Latencies) {
        match self.series.iter_mut().find(|s| s.setup == setup && s.kernel == kernel) {
            Some(series) => series.rounds.push(round),
            None => self.series.push(Series { setup, kernel: kernel.to_owned(), rounds: vec![round] }),
        }
    }

    /// What keeps rounds of `new` from standing beside these: they were measured in another way. `None` when nothing does.
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
    pub fn of(&self, kernel: &str, setup: Setup) -> Option<&Series> {
        self.series.iter().find(|s| s.setup == setup && (setup == Setup::Host || s.kernel == kernel))
    }
}

/// What they show: p99.9 with priorities over that without, for each guest's kernel, and the worst of them.
#[must_use]
pub fn claims(data: &CyclictestData) -> Vec<Claim> {
    let mut claims = Vec::new();
    let (mut worst, mut samples, mut least) = (None, 0, f64::INFINITY);
    for kernel in data.kernels() {
        let pair = data.of(kernel, Setup::AioLowered).zip(data.of(kernel, Setup::Guest));
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

/// The same ratio of what the guest adds to the core itself being late. Nothing in the rounds in which nobody looked.
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

    const SAID: &str = "# /dev/cpu_dma_latency set to 0us\n# Histogram\n000000 000000\n000007 000090\n000050 000009\n\
                        # Min Latencies: 00007\n# Max Latencies: 250000\n# Histogram Overflows: 00001\n# Thread 0: 00042\n";

    #[test]
    fn a_histogram_is_read() {
        let l = parse(SAID).unwrap();
        assert_eq!((l.n(), l.above, l.max_us), (100, 1, 250_000));
        assert_eq!((l.at(0.9), l.at(0.91), l.at(0.99), l.at(0.999)), (7, 50, 50, 250_000));
        assert!(parse("unable to get scheduling parameters\n").is_err());
        let mut same = Latencies::default();
        (0..90).for_each(|_| same.add(7));
        same.add(250_000);
        (0..9).for_each(|_| same.add(50));
        assert_eq!(same, l);
    }

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
    fn long_latencies_are_never_made_shorter() {
        for us in [0, 999, 1_000, 1_001, 9_999, 10_000, 10_001, 99_999] {
            let kept = rounded(us);
            assert!(kept >= us && kept as f64 <= us as f64 * 1.011 && rounded(kept) == kept, "{us}: {kept}");
        }
        let mut a = Latencies::default();
        a.add(1_001);
        let mut b = a.clone();
        b.merge(&a);
        assert_eq!((b.at(1.0), b.n(), b.max_us), (1_010, 2, 1_001));
    }

    #[test]
    fn what_the_core_itself_was_late_for_is_taken_off_once() {
        let of = |us: &[(u64, u64)]| {
            let mut all = Latencies::default();
            us.iter().for_each(|(us, n)| all.add_many(*us, *n));
            all.max_us = us.last().unwrap().0;
            all.seconds = 1.0;
            all
        };
        // The core stands still for 30 ms in 1 % of all wake-ups; the guest adds 2 ms in another 1 %.
        let floor = of(&[(5, 990), (30_000, 10)]);
        let mut guest = of(&[(50, 980), (2_000, 10), (30_000, 10)]);
        assert_eq!(guest.at_beyond_floor(0.99), None);
        guest.floor = Some(Box::new(floor));
        assert_eq!(guest.at(0.99), 2_000);
        assert_eq!(guest.at(0.999), 30_000);
        assert_eq!(guest.at_beyond_floor(0.98), Some(50));
        assert_eq!(guest.at_beyond_floor(0.99), Some(50));
        assert_eq!(guest.at_beyond_floor(0.999), Some(2_000));
        // Whether the guest's thread wakes as often as the watcher does not matter: a thread that is late all the time wakes less often.
        let mut rare = of(&[(50, 480), (2_000, 10), (30_000, 10)]);
        rare.floor.clone_from(&guest.floor);
        assert_eq!((rare.at(0.98), rare.at_beyond_floor(0.98)), (2_000, Some(50)));
        // Two rounds are as one of twice the length.
        let mut twice = Latencies::default();
        twice.merge(&guest);
        twice.merge(&guest);
        assert_eq!((twice.n(), twice.at_beyond_floor(0.999)), (2_000, Some(2_000)));
        // A round that nobody watched leaves nothing to take off.
        twice.merge(&of(&[(50, 1)]));
        assert_eq!(twice.floor, None);
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
            host: HostFacts {
                kernel: String::new(),
                cpus: 2,
                vmm: String::new(),
                accelerator: String::new(),
                device: String::new(),
            },
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
        assert_eq!(data.of(rt, Setup::Guest).unwrap().rounds.len(), 3);
        assert!((data.of(rt, Setup::Guest).unwrap().all().seconds - 2.0).abs() < 1e-9);
        assert_eq!(data.differs(&data), None);
        let asleep = CyclictestData { awake: false, ..data.clone() };
        assert_eq!(data.differs(&asleep).unwrap(), "--awake: true there, false here");
        data.series.clear();
        assert!(!claims(&data)[0].met, "nothing was measured");
    }
}
