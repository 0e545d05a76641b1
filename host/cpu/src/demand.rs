//! From a demand to a budget: the paper's look-up (section 4), Fig. 1b for a VM alone and Fig. 2
//! with neighbours.

use rtvirtio_units::{Iops, Nanos};
use serde::Serialize;

use crate::curve::Point;
use crate::profile::CpuProfile;
use crate::supply::Surroundings;
use crate::{Backend, Contract};

/// Part of its throughput that a VM must have in reserve when no curve was measured with a
/// neighbour: the largest loss that the paper saw when its neighbour's share grew from 10 to 40 %
/// (section 4: 20 to 30 %). A share of the neighbours above that counts in full, which is the same
/// slope: one percent of throughput for each percent of theirs.
pub const MARGIN: f64 = 0.30;
/// Shortest budget that the spec allows for a contract, in microseconds.
const LEAST_BUDGET_US: u64 = 1000;

/// Rate of requests, each answered within the deadline.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Demand {
    /// Requests per second to be answered.
    pub requests: Iops,
    /// Time from each request to its answer.
    pub deadline: Nanos,
}

/// Other VMs that run alongside.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Neighbours {
    /// Sum of the others' shares of each CPU, 0 to 1.
    pub share: f64,
    /// Whether some have no contract, so that their load is not known.
    pub unknown: bool,
    /// Number of VMs with a contract.
    pub count: u32,
}

/// Curve that was read, and the margin added to the demand.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum CurveChoice {
    /// Fig. 1b: no other VM runs.
    Alone,
    /// Fig. 2: the curve with a neighbour whose budget is at least that of the other VMs.
    Neighbour {
        /// The neighbour's budget, in percent.
        neighbour_percent: u64,
    },
    /// Fig. 2, its last curve, and a margin for the other VMs' share beyond that neighbour's.
    BeyondNeighbour {
        /// The neighbour's budget, in percent.
        neighbour_percent: u64,
        /// Part of the throughput held in reserve, 0 to 1.
        margin: f64,
    },
    /// Fig. 1b with a margin, because no curve with a neighbour was measured.
    Margin {
        /// Part of the throughput held in reserve, 0 to 1.
        margin: f64,
    },
}

impl CurveChoice {
    fn neighbour(self) -> Option<u64> {
        match self {
            Self::Alone | Self::Margin { .. } => None,
            Self::Neighbour { neighbour_percent } | Self::BeyondNeighbour { neighbour_percent, .. } => {
                Some(neighbour_percent)
            }
        }
    }

    /// Part of the throughput held in reserve, 0 to 1.
    #[must_use]
    pub fn margin(self) -> f64 {
        match self {
            Self::Alone | Self::Neighbour { .. } => 0.0,
            Self::BeyondNeighbour { margin, .. } | Self::Margin { margin } => margin,
        }
    }

    /// Description for the user.
    #[must_use]
    pub fn description(self) -> String {
        match self {
            Self::Alone => "measured alone, as it is here".to_owned(),
            Self::Neighbour { neighbour_percent } => {
                format!("measured alongside a neighbour of {neighbour_percent} %")
            }
            Self::BeyondNeighbour { neighbour_percent, margin } => format!(
                "measured alongside a neighbour of {neighbour_percent} %, with {:.0} % held back for what its neighbours have beyond that",
                margin * 100.0
            ),
            Self::Margin { margin } => format!(
                "measured alone, with {:.0} % held back for its neighbours; `rtvirtio profile cpu --neighbour` measures what they take",
                margin * 100.0
            ),
        }
    }
}

/// Contract for a demand, with the measurements that decided.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// Smallest contract that carries the demand.
    pub contract: Contract,
    /// Point of the curve that decided.
    pub point: Point,
    /// Curve that was read, and its margin.
    pub curve: CurveChoice,
    /// Requests a second that the point must carry: the demand and the margin.
    pub needed: Iops,
    /// CPU time of one request on this curve: the largest of its points.
    #[serde(rename = "work_ns")]
    pub work: Nanos,
    /// Longest time until an answer, counted from the request.
    #[serde(rename = "latest_ns")]
    pub latest: Nanos,
    /// Whether a single CPU's share does not suffice, so that `latest` holds for a request whose
    /// vCPU has no other request to answer.
    pub parallel: bool,
    /// Whether `latest` is an estimate and no bound ([`Surroundings::is_estimate`]).
    pub estimate: bool,
}

impl Choice {
    /// Sentence for the user: the point that decided.
    #[must_use]
    pub fn description(&self, demand: &Demand) -> String {
        let mut text = format!(
            "{} for {} within {}: the smallest measured budget that carries {} is {} %, which answered {} ({} or more with 95 % confidence, n = {}; {}); \
             a request of {} of CPU time is {} within {}",
            self.contract,
            demand.requests,
            demand.deadline,
            self.needed,
            self.point.budget_percent,
            Iops(self.point.mean),
            Iops(self.point.lower.unwrap_or(0.0)),
            self.point.n,
            self.curve.description(),
            self.work,
            if self.estimate { "estimated to be answered" } else { "answered" },
            self.latest,
        );
        if self.parallel {
            text += " when its vCPU has no other one to answer: several CPUs must work at once for so many";
        }
        text
    }
}

/// Reason why no budget was found.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum DemandError {
    /// No measured budget carries the requests.
    #[error(
        "{vm}: no measured budget carries {asked}: {needed} are needed ({curve}), and {most} is the most that may be relied on, at {percent} % of each CPU; \
         ask for at most {fits}, give the VM more vCPUs, or move its neighbours"
    )]
    TooMany {
        vm: String,
        /// Requests a second asked for.
        asked: Iops,
        /// Requests a second needed, margin included.
        needed: Iops,
        /// Description of the curve.
        curve: String,
        /// Largest rate that any point carries.
        most: Iops,
        /// Budget of that point, in percent of its period.
        percent: u64,
        /// Largest demand that would fit.
        fits: Iops,
    },
    /// Enough requests, but not within the deadline.
    #[error(
        "{vm}: no measured budget answers within {deadline}: at its profile's period of {period} the latest answer comes after {best}, with {percent} % of each CPU; {remedy}"
    )]
    TooLate {
        vm: String,
        /// Deadline that was asked for.
        deadline: Nanos,
        /// Period of the profile.
        period: Nanos,
        /// Shortest worst-case response time of any point.
        best: Nanos,
        /// Budget of that point, in percent of its period.
        percent: u64,
        remedy: String,
    },
    /// The profile is not good enough to rely on.
    #[error(
        "{vm}: its CPU profile cannot be used: {why}; measure again with `rtvirtio profile cpu {vm}{options}`"
    )]
    Profile {
        vm: String,
        /// Reason why the profile is not usable.
        why: String,
        /// Options for the next measurement, empty or with a leading space.
        options: String,
    },
}

impl DemandError {
    /// Whether the demand is the reason, rather than the profile.
    #[must_use]
    pub fn is_infeasible(&self) -> bool {
        !matches!(self, Self::Profile { .. })
    }
}

/// Curve to read with these neighbours.
fn curve_for(points: &[Point], neighbours: &Neighbours) -> CurveChoice {
    if neighbours.share <= 0.0 && !neighbours.unknown {
        return CurveChoice::Alone;
    }
    let mut measured: Vec<u64> = points.iter().filter_map(|p| p.neighbour_percent).collect();
    measured.sort_unstable();
    // Rounding of shares must not push a neighbour of exactly 40 % to the next curve.
    let percent = neighbours.share * 100.0 - 1e-6;
    let fits = measured.iter().find(|n| **n as f64 >= percent && !neighbours.unknown);
    match (fits, measured.last()) {
        (Some(n), _) => CurveChoice::Neighbour { neighbour_percent: *n },
        (None, Some(last)) if percent <= *last as f64 => CurveChoice::Neighbour { neighbour_percent: *last },
        (None, Some(last)) => CurveChoice::BeyondNeighbour {
            neighbour_percent: *last,
            margin: (neighbours.share - *last as f64 / 100.0).clamp(0.0, 0.99),
        },
        (None, None) => CurveChoice::Margin { margin: neighbours.share.clamp(MARGIN, 0.99) },
    }
}

/// Finds the smallest measured budget that carries the demand: enough throughput with 95 %
/// confidence, and the deadline met in the worst case, or by an estimate of it
/// ([`Surroundings::latest`]). Admission is the caller's.
pub fn find(
    profile: &CpuProfile,
    demand: &Demand,
    neighbours: &Neighbours,
    surroundings: Surroundings,
) -> Result<Choice, DemandError> {
    let (vm, points) = (&profile.setup.vm, profile.points());
    let unusable = |why: String, options: String| DemandError::Profile { vm: vm.clone(), why, options };
    if profile.setup.backend != surroundings.backend {
        let why = format!(
            "it was measured under {}, and the contract would be held by {}",
            profile.setup.backend, surroundings.backend
        );
        return Err(unusable(why, String::new()));
    }
    if matches!(surroundings.backend, Backend::CpuMax | Backend::Throttle) {
        let why = format!("{} gives no VM a budget, so no demand can be promised", surroundings.backend);
        return Err(unusable(why, String::new()));
    }
    let curve = curve_for(&points, neighbours);
    let on_curve: Vec<&Point> = points.iter().filter(|p| p.neighbour_percent == curve.neighbour()).collect();
    if on_curve.is_empty() {
        return Err(unusable("it has no measurement of this VM alone".to_owned(), String::new()));
    }
    if let Some(few) = on_curve.iter().find(|p| p.lower.is_none()) {
        let why = format!("{} % was measured once only, which gives no confidence", few.budget_percent);
        return Err(unusable(why, " --repeat 3".to_owned()));
    }
    let needed = demand.requests.0 / (1.0 - curve.margin());
    let lower = |p: &Point| p.lower.unwrap_or(0.0);
    let most = on_curve.iter().map(|p| lower(p)).fold(0.0, f64::max);
    if most < needed {
        // The smallest budget with this bound: the curve is flat from there.
        let percent = on_curve.iter().find(|p| lower(p) >= most).map_or(0, |p| p.budget_percent);
        let fits = Iops(most * (1.0 - curve.margin()));
        let (vm, asked, curve) = (vm.clone(), demand.requests, curve.description());
        return Err(DemandError::TooMany {
            vm,
            asked,
            needed: Iops(needed),
            curve,
            most: Iops(most),
            percent,
            fits,
        });
    }
    // The most expensive request of the curve: a small budget finds the caches cold more often.
    let work = Nanos::from_secs_f64(on_curve.iter().filter_map(|p| p.cpu_per_request).fold(0.0, f64::max));
    let mut best: Option<(Nanos, u64)> = None;
    for point in on_curve.iter().copied().filter(|p| lower(p) >= needed) {
        let budget = Nanos(profile.period().0 * point.budget_percent / 100);
        let Some(contract) = Contract::new(budget, profile.period()) else { continue };
        if contract.budget_us() < LEAST_BUDGET_US {
            continue;
        }
        let latest = surroundings.latest(contract, work);
        if latest <= demand.deadline {
            return Ok(Choice {
                contract,
                point: point.clone(),
                curve,
                needed: Iops(needed),
                work,
                latest,
                parallel: demand.requests.0 * point.cpu_per_request.unwrap_or(0.0) > contract.share().0,
                estimate: surroundings.is_estimate(),
            });
        }
        if best.is_none_or(|b| latest < b.0) {
            best = Some((latest, point.budget_percent));
        }
    }
    let (best, percent) = best.unwrap_or((Nanos(u64::MAX), 0));
    let period = surroundings.period_for(demand.deadline);
    let remedy = if period < profile.period() {
        format!("measure at a shorter one: `rtvirtio profile cpu {vm} --period {period}`")
    } else {
        "the deadline is too short for this host: allow more time".to_owned()
    };
    let (vm, deadline) = (vm.clone(), demand.deadline);
    Err(DemandError::TooLate { vm, deadline, period: profile.period(), best, percent, remedy })
}

/// VM of a spec, as an input of the search.
#[derive(Clone, Debug)]
pub enum Asked<'a> {
    /// No contract: the VM runs alongside the others without a limit.
    Nothing,
    Given(Contract),
    /// A demand, for which a contract is searched.
    Found {
        /// Measured curves of the VM.
        profile: &'a CpuProfile,
        /// Requests to carry, and their deadline.
        demand: Demand,
        /// Mechanism that will enforce the contract.
        backend: Backend,
    },
}

/// Finds the contracts of all VMs that have a demand. Each VM's share is a neighbour's to the
/// others, so the search repeats until no budget grows any more; it ends, because budgets only grow
/// and the points are few.
///
/// `taken` is the share of each CPU that others hold already. The result has an entry for each VM,
/// `None` for a VM without a demand.
///
/// # Errors
/// [`DemandError`] of the first VM whose demand cannot be carried.
pub fn find_all(asked: &[Asked<'_>], taken: f64, tick: Nanos) -> Result<Vec<Option<Choice>>, DemandError> {
    let share = |c: Option<Contract>| c.map_or(0.0, |c| c.share().0);
    let mut now: Vec<Option<Contract>> = asked
        .iter()
        .map(|a| match a {
            Asked::Given(contract) => Some(*contract),
            _ => None,
        })
        .collect();
    loop {
        let mut choices = Vec::with_capacity(asked.len());
        let mut next = now.clone();
        for (i, one) in asked.iter().enumerate() {
            let Asked::Found { profile, demand, backend } = one else {
                choices.push(None);
                continue;
            };
            let others = || asked.iter().zip(&now).enumerate().filter(|(j, _)| *j != i);
            let count = others().filter(|(_, (a, _))| !matches!(a, Asked::Nothing)).count();
            let neighbours = Neighbours {
                share: taken + others().map(|(_, (_, c))| share(*c)).sum::<f64>(),
                unknown: others().any(|(_, (a, _))| matches!(a, Asked::Nothing)),
                count: u32::try_from(count).unwrap_or(u32::MAX),
            };
            let surroundings = Surroundings { backend: *backend, tick, others: neighbours.count };
            let choice = find(profile, demand, &neighbours, surroundings)?;
            // Never back: a smaller share of one VM must not let another one's shrink and grow
            // forever.
            if share(Some(choice.contract)) >= share(now[i]) {
                next[i] = Some(choice.contract);
            }
            choices.push(Some(choice));
        }
        if next == now {
            return Ok(choices);
        }
        now = next;
    }
}
