//! Two VMs on one core under contracts: the reservations paper's Figs. 1b, 2, 3 and 4.
//!
//! A guest serves a file of [`FILE_BYTES`] over HTTP. Its network is QEMU's own, so that every
//! instruction from the client's socket on is a thread of QEMU. *Throughput* is received by
//! [`CONNECTIONS`] clients that send the next request at once. *Web* requests are sent at a fixed
//! period, which is also their deadline, and counted from the moment at which they were to be sent;
//! their loaded neighbour serves [`LOAD_CONNECTIONS`] such clients and computes on every vCPU.

mod guest_pair;
pub mod kills;
mod measure;
mod page;
pub(crate) mod web;

pub use measure::{ReservationOptions, measure, with_kills};

use rtvirtio_measure::HostFacts;
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use rtvirtio_learn::statistic::median;

/// Bytes of a response (the paper's section 4).
pub const FILE_BYTES: usize = 100_000;
/// Clients that send the next request at once, for throughput.
pub const CONNECTIONS: usize = 4;
/// Such clients of the loaded neighbour of the web requests.
pub const LOAD_CONNECTIONS: usize = 16;
/// Period of the contracts for throughput, in us, by default (the paper's section 4).
pub const PERIOD_US: u64 = 100_000;
/// Budgets of one VM alone, in percent of its core (the paper's Fig. 1b).
pub const BUDGETS: [u64; 9] = [10, 20, 30, 40, 50, 60, 70, 80, 90];
/// Budget of the VM whose neighbour's budget grows, in percent of the core.
pub const OWN_BUDGET: u64 = 40;
/// The neighbour's budgets, in percent of the core (the paper's Figs. 2 and 3).
pub const NEIGHBOUR_BUDGETS: [u64; 4] = [10, 20, 30, 40];
/// The deadline of web requests as a multiple of an unloaded response: 20 ms over 2.1 ms in the
/// paper.
pub const DEADLINE_OVER_RESPONSE: f64 = 10.0;
/// Budget of the VM that serves web requests, as a part of the period: 4 ms of 20 ms in the paper.
pub const WEB_SHARE: f64 = 0.2;

/// Throughput of one VM at one budget, alone.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alone {
    /// Budget of the VM, percent of the core.
    pub budget: u64,
    /// Throughput of the VM's clients, MB/s.
    pub mb_per_s: f64,
    /// CPU time of all threads of the VM, percent of a core.
    pub used: f64,
}

/// Throughput of one VM with a neighbour.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WithNeighbour {
    pub round: usize,
    /// The neighbour's budget, in percent of the core; the VM's own is [`OWN_BUDGET`].
    pub neighbour: u64,
    /// Whether all threads of both VMs are inside their contracts, or their vCPUs only.
    pub all_threads: bool,
    /// Throughput of the VM's clients, MB/s.
    pub mb_per_s: f64,
    /// Throughput of the neighbour's clients, MB/s.
    pub neighbour_mb_per_s: f64,
    /// CPU time that all of the VM's threads used, in percent of a core.
    pub used: f64,
}

/// Web requests under one condition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Web {
    /// Whether the neighbour is loaded.
    pub loaded: bool,
    /// Whether the VM has its contract.
    pub contract: bool,
    /// Whether the VMs are in cgroups of their own, so that the kernel's fair scheduler shares
    /// between them; else between all their threads as in the paper.
    pub apart: bool,
    /// Every response, in ms from the moment at which the request was to be sent.
    pub ms: Vec<f64>,
    /// Requests that were refused or never answered, which are late too.
    pub failed: usize,
}

/// `apply` and `revert` of a contract of a guest that runs, killed at every point: before and after
/// each single change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kills {
    /// Date of the kills, and version of the program.
    pub generated: String,
    pub apply: usize,
    pub revert: usize,
    /// Differences that remain after the next `revert`: scheduling, affinity or cgroups of a
    /// thread, a cgroup, or a journal.
    pub differences: Vec<String>,
}

/// Measurements and their conditions, as saved in [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReservationData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the measurement.
    pub host: HostFacts,
    /// Command line of the measurement.
    pub command: String,
    /// Date of the measurement, and version of the program.
    pub generated: String,
    /// Whether the CPUs were kept from sleeping.
    #[serde(default)]
    pub awake: bool,
    /// The kernel's name of the mechanism that holds the contracts.
    pub backend: String,
    /// vCPUs of the neighbour of the web requests; all other guests have one.
    pub neighbour_vcpus: u16,
    /// Length of each measurement of throughput, in s.
    pub length: f64,
    /// Pieces of each, measured in one random order with those of all others.
    #[serde(default = "default_one")]
    pub slices: usize,
    /// Period of the contracts for throughput, in us.
    #[serde(default = "paper_period")]
    pub period_us: u64,
    /// Whether the neighbour, while its budget grows, only computes, in a loop without memory
    /// accesses, and serves no client.
    #[serde(default)]
    pub neighbour_computes: bool,
    /// Throughput of one VM alone.
    pub alone: Vec<Alone>,
    /// Throughput of one VM with a neighbour.
    pub beside: Vec<WithNeighbour>,
    /// Median of unloaded responses before the web requests, in ms.
    pub response_ms: f64,
    /// Period and deadline of the web requests, in ms.
    pub deadline_ms: f64,
    /// Response times of the web requests.
    pub web: Vec<Web>,
    /// `apply` and `revert`, killed.
    #[serde(default)]
    pub kills: Kills,
}

fn default_one() -> usize {
    1
}

fn paper_period() -> u64 {
    PERIOD_US
}

impl ReservationData {
    /// Web requests under a condition, all repetitions.
    #[must_use]
    pub fn responses(&self, loaded: bool, contract: bool, apart: bool) -> Vec<f64> {
        let matching =
            self.web.iter().filter(|w| (w.loaded, w.contract, w.apart) == (loaded, contract, apart));
        matching.flat_map(|w| w.ms.iter().copied()).collect()
    }

    /// Number of late requests under a condition, and of all.
    #[must_use]
    pub fn late(&self, loaded: bool, contract: bool, apart: bool) -> (usize, usize) {
        let matching =
            self.web.iter().filter(|w| (w.loaded, w.contract, w.apart) == (loaded, contract, apart));
        let failed: usize = matching.map(|w| w.failed).sum();
        let ms = self.responses(loaded, contract, apart);
        let late = ms.iter().filter(|ms| **ms > self.deadline_ms).count();
        (late + failed, ms.len() + failed)
    }

    /// Median throughput of the VM at a budget of the neighbour, MB/s, and the number of
    /// measurements.
    #[must_use]
    pub fn throughput_next_to(&self, neighbour: u64, all_threads: bool) -> (f64, usize) {
        let matching =
            self.beside.iter().filter(|b| b.neighbour == neighbour && b.all_threads == all_threads);
        let values: Vec<f64> = matching.map(|b| b.mb_per_s).collect();
        (median(values.clone()), values.len())
    }

    /// Relative change of the VM's throughput from the neighbour's smallest budget to its largest:
    /// median over the rounds, in each of which they were measured one after the other; and n.
    #[must_use]
    pub fn change(&self, all_threads: bool) -> (f64, usize) {
        let at = |round: usize, neighbour: u64| {
            let fits =
                |b: &&WithNeighbour| (b.round, b.neighbour, b.all_threads) == (round, neighbour, all_threads);
            self.beside.iter().find(fits).map(|b| b.mb_per_s)
        };
        let rounds = self.beside.iter().map(|b| b.round + 1).max().unwrap_or(0);
        let change = |round| {
            Some(
                at(round, NEIGHBOUR_BUDGETS[NEIGHBOUR_BUDGETS.len() - 1])? / at(round, NEIGHBOUR_BUDGETS[0])?
                    - 1.0,
            )
        };
        let all: Vec<f64> = (0..rounds).filter_map(change).collect();
        (median(all.clone()), all.len())
    }
}

/// Response time of a request without an answer, in ms: the client's time limit.
const UNANSWERED_MS: f64 = 30_000.0;

/// The claims of a result.
#[must_use]
pub fn claims(data: &ReservationData) -> Vec<Claim> {
    let budgets: Vec<u64> = data.alone.iter().map(|a| a.budget).collect();
    let ends = (budgets.iter().min().unwrap_or(&0), budgets.iter().max().unwrap_or(&0));
    let points: Vec<(f64, f64)> = data.alone.iter().map(|a| (a.budget as f64, a.mb_per_s)).collect();
    let (change, n) = data.change(true);
    let (vcpus_only, n_vcpus) = data.change(false);
    let missed = |contract, apart| {
        let (late, n) = data.late(true, contract, apart);
        (late as f64 / n.max(1) as f64, n)
    };
    let held = data.web.iter().filter(|w| w.loaded && w.contract && !w.apart);
    // A request without an answer counts as the latest.
    let unanswered = if held.map(|w| w.failed).sum::<usize>() > 0 { UNANSWERED_MS } else { 0.0 };
    let worst = data.responses(true, true, false).into_iter().fold(unanswered, f64::max) / data.deadline_ms;
    let (without, n_without) = missed(false, false);
    let (apart, n_apart) = missed(false, true);
    let (with, n_with) = missed(true, false);
    let mut claims = vec![
        Claim::new(
            "cpu.budget.r2",
            format!("throughput of a VM over its budget, {} to {} % of a core, is a line: R^2", ends.0, ends.1),
            r2(&points),
            "",
            points.len(),
        )
        .at_least(0.98),
        Claim::new(
            "cpu.budget.r2_means",
            "the same for the mean of each budget, which is what the paper draws",
            r2(&means(&points)),
            "",
            points.len(),
        ),
        Claim::new(
            "cpu.budget.used_error",
            "CPU time that a VM alone used less its budget, the farthest off, in percent of a core",
            data.alone.iter().map(|a| (a.used - a.budget as f64).abs()).fold(0.0, f64::max),
            "%",
            points.len(),
        ),
        Claim::new(
            "cpu.isolation.change",
            format!(
                "change of a VM's throughput at a budget of {OWN_BUDGET} % when its neighbour's grows from 10 to 40 %, all threads inside"
            ),
            change.abs(),
            "share",
            n,
        )
        .at_most(0.10),
        Claim::new(
            "cpu.isolation.change_vcpus_only",
            "the same with only the vCPUs inside the contracts",
            vcpus_only.abs(),
            "share",
            n_vcpus,
        ),
    ];
    let kills = data.kills.apply + data.kills.revert;
    if kills > 0 {
        let what = format!(
            "settings of a guest's threads that are not as before when `apply` ({}) or `revert` ({}) of its contract was killed at each of its changes, and reverted",
            data.kills.apply, data.kills.revert
        );
        claims.push(
            Claim::new(
                "cpu.revert.differences",
                what,
                data.kills.differences.len() as f64,
                "differences",
                kills,
            )
            .at_most(0.0),
        );
    }
    if data.web.is_empty() {
        return claims;
    }
    claims.extend([
        Claim::new(
            "cpu.web.misses_without",
            format!(
                "requests of 100 kB, one each {:.0} ms, that take longer than that with a loaded neighbour of {} vCPUs, without contract",
                data.deadline_ms, data.neighbour_vcpus
            ),
            without,
            "share",
            n_without,
        )
        .at_least(0.30),
        Claim::new(
            "cpu.web.misses_fair_group",
            "the same where each VM has a group of its own in the fair scheduler, as libvirt and autogroups have it",
            apart,
            "share",
            n_apart,
        ),
        Claim::new("cpu.web.misses_with", "the same with a contract for the VM", with, "share", n_with).at_most(0.0),
        Claim::new(
            "cpu.web.worst_over_deadline",
            "longest response with a loaded neighbour and a contract, over the deadline",
            worst,
            "",
            n_with,
        )
        .at_most(0.5),
    ]);
    claims
}

/// Share of the variance that a straight line explains; 0 without one.
fn r2(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let mean = |of: &dyn Fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / n;
    let (x, y) = (mean(&|p| p.0), mean(&|p| p.1));
    let sum = |of: &dyn Fn(f64, f64) -> f64| points.iter().map(|p| of(p.0 - x, p.1 - y)).sum::<f64>();
    let (xx, xy, yy) = (sum(&|a, _| a * a), sum(&|a, b| a * b), sum(&|_, b| b * b));
    if xx > 0.0 && yy > 0.0 { xy * xy / (xx * yy) } else { 0.0 }
}

/// The mean of all points of one x.
fn means(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let mut sums: Vec<(f64, f64, f64)> = Vec::new();
    for &(x, y) in points {
        match sums.iter_mut().find(|s| s.0 == x) {
            Some(sum) => (sum.1, sum.2) = (sum.1 + y, sum.2 + 1.0),
            None => sums.push((x, y, 1.0)),
        }
    }
    sums.into_iter().map(|(x, sum, n)| (x, sum / n)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saved::Saved as _;

    fn data() -> ReservationData {
        let beside = |neighbour, all_threads, mb_per_s| WithNeighbour {
            round: 0,
            neighbour,
            all_threads,
            mb_per_s,
            neighbour_mb_per_s: 1.0,
            used: 40.0,
        };
        let web =
            |contract, ms: &[f64]| Web { loaded: true, contract, apart: false, ms: ms.to_vec(), failed: 0 };
        ReservationData {
            schema: ReservationData::SCHEMA.to_owned(),
            host: HostFacts { cpus: 2, ..HostFacts::default() },
            command: String::new(),
            generated: String::new(),
            awake: true,
            backend: String::new(),
            neighbour_vcpus: 1,
            length: 1.0,
            slices: 1,
            period_us: PERIOD_US,
            neighbour_computes: false,
            kills: Kills { apply: 3, revert: 2, ..Kills::default() },
            alone: [10, 50, 90]
                .map(|budget| Alone {
                    budget,
                    mb_per_s: 0.1 * budget as f64 - 0.5,
                    used: budget as f64 - budget as f64 / 60.0,
                })
                .to_vec(),
            beside: vec![
                beside(10, true, 2.0),
                beside(40, true, 1.9),
                beside(10, false, 2.0),
                beside(40, false, 1.5),
                // Between the ends, and no part of the claim.
                beside(20, true, 0.1),
            ],
            response_ms: 2.0,
            deadline_ms: 20.0,
            web: vec![
                web(false, &[19.0, 20.5, 30.0]),
                web(true, &[2.0, 8.0]),
                Web { apart: true, ..web(false, &[3.0, 21.0]) },
                Web { loaded: false, contract: true, apart: false, ms: vec![99.0], failed: 0 },
            ],
        }
    }

    fn web_of(data: &ReservationData) -> Web {
        data.web[1].clone()
    }

    fn value(data: &ReservationData, id: &str) -> Claim {
        claims(data).into_iter().find(|c| c.id == id).unwrap()
    }

    #[test]
    fn claims_say_what_was_measured() {
        let mut d = data();
        let close = |id: &str, v: f64| assert!((value(&data(), id).value - v).abs() < 1e-9, "{id}");
        close("cpu.budget.r2", 1.0);
        close("cpu.budget.r2_means", 1.0);
        close("cpu.budget.used_error", 1.5);
        close("cpu.isolation.change", 0.05);
        close("cpu.isolation.change_vcpus_only", 0.25);
        close("cpu.web.misses_without", 2.0 / 3.0);
        close("cpu.web.misses_fair_group", 0.5);
        close("cpu.web.misses_with", 0.0);
        // Responses with an idle neighbour do not count.
        close("cpu.web.worst_over_deadline", 0.4);
        assert!(claims(&d).iter().all(|c| c.met));
        d.web[1].ms.push(20.1);
        assert!(!value(&d, "cpu.web.misses_with").met, "one of three is late");
        // A refused request is a late one.
        d.web[1] = Web { failed: 1, ..web_of(&data()) };
        assert!(!value(&d, "cpu.web.misses_with").met);
        // A higher throughput with a larger neighbour is a change too.
        d.beside[1].mb_per_s = 2.5;
        assert!(!value(&d, "cpu.isolation.change").met);
    }

    #[test]
    fn what_is_no_line_has_less() {
        assert!(r2(&[(0.0, 0.0), (1.0, 1.0), (2.0, 0.0)]) < 1e-9);
        assert!((r2(&[(0.0, 0.0), (1.0, 1.0), (2.0, 4.0)]) - 12.0 / 13.0).abs() < 1e-9);
        assert_eq!(r2(&[]), 0.0);
        assert_eq!(means(&[(1.0, 1.0), (2.0, 5.0), (1.0, 3.0)]), [(1.0, 2.0), (2.0, 5.0)]);
        assert_eq!(r2(&[(1.0, 1.0), (1.0, 2.0)]), 0.0);
    }

    #[test]
    fn nothing_measured_meets_nothing() {
        let none =
            ReservationData { alone: vec![], beside: vec![], web: vec![], kills: Kills::default(), ..data() };
        let limited = claims(&none).into_iter().filter(|c| c.at_least.is_some() || c.at_most.is_some());
        assert!(limited.map(|c| c.met).all(|met| !met));
    }
}
