//! Months of an ageing device in simulation: bounds from its profile as it was, and from the
//! profile as corrected ([`rtvirtio_model::ageing`]).
//!
//! A twin serves reads and writes of 4 KiB in order for four seconds of each window, and each
//! window counts for ten minutes. The bound of a direction is its highest p99 over a day of windows
//! of the new device, plus a plan's safety margin. It is multiplied by the factor that is in force
//! when the window begins, and a longer standstill is added.

mod device;
mod pattern;

use clap::Args;
use rayon::prelude::*;
use rtvirtio_measure::HostFacts;
use rtvirtio_model::ModelError;
use rtvirtio_model::ageing::{Ageing, FOLLOW, LOWER_AFTER, Profiled, WINDOW_S};
use rtvirtio_stats::Random;
use rtvirtio_twin::TwinProfile;
use rtvirtio_units::Nanos;
use rtvirtio_workflow::{Progress, generated};
use serde::{Deserialize, Serialize};

use crate::claims::Claim;
use crate::experiment::{Experiment, host_facts};
use crate::page::{Section, xy};
use crate::report::ExperimentReport;
use crate::saved::Saved as _;
use device::{Device, Sample, profile};
use pattern::Condition;
pub use pattern::Pattern;

/// Windows of a day.
const DAY: u64 = (86_400.0 / WINDOW_S) as u64;
/// Room of a bound above the p99 of a new device: a plan keeps a safety margin of 20 %.
const MARGIN: f64 = 1.25;
/// Windows after a change that belong to it: a week.
const SETTLING: u64 = 7 * DAY;
/// Emulated device.
const TWIN: &str = "qlc-nvme";
/// Names of the parts of a run.
const PHASES: [&str; 3] = ["before", "while", "after"];

/// Options of the experiment.
#[derive(Args, Clone, Copy, Debug)]
pub struct AgeingOptions {
    /// Simulated days.
    #[arg(long, value_name = "N", default_value_t = 90, value_parser = clap::value_parser!(u32).range(30..=730))]
    pub days: u32,
    /// Seed of devices, load and noise.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
}

/// Windows of one part of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// Number of windows.
    pub windows: u64,
    /// Windows in which a p99 was above the corrected bound.
    pub broken: u64,
    /// Windows in which a p99 was above the bound of the fixed profile.
    pub broken_fixed: u64,
}

impl Phase {
    fn kept(&self, is_fixed: bool) -> Option<f64> {
        let broken = if is_fixed { self.broken_fixed } else { self.broken };
        (self.windows > 0).then(|| 1.0 - broken as f64 / self.windows as f64)
    }
}

/// A device that aged in one way.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// The way.
    pub pattern: Pattern,
    /// Before the change, from its begin to a week after its end, and afterwards.
    pub phases: [Phase; 3],
    /// Most windows in a row with a p99 above the corrected bound.
    pub longest_broken: u64,
    /// Times that an alarm rose.
    pub alarms: u64,
    /// Of these, those of a device that had not been slower for a day.
    pub false_alarms: u64,
    /// Windows from a better device until the factor was lowered; absent where the device never
    /// was better, or the factor was not lowered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given_back: Option<u64>,
    /// Largest factor.
    pub highest: f64,
    /// Factor at the end.
    pub last: f64,
    /// Windows that were no evidence.
    pub uncounted: u64,
}

/// Simulated devices with their conditions, as saved in
/// [`FILE`](crate::experiment::Experiment::FILE).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgeingData {
    /// [`FORM`](crate::experiment::Experiment::FORM), checked on reading.
    pub schema: String,
    /// Host of the simulation.
    pub host: HostFacts,
    /// Command line of the simulation.
    pub command: String,
    /// Date of the simulation, and version of the program.
    pub generated: String,
    /// Simulated days of each device.
    pub days: u32,
    /// Outcomes of all patterns.
    pub outcomes: Vec<Outcome>,
}

/// Simulates a device for each pattern.
///
/// # Errors
/// Cancellation, and an emulated device whose profile is not usable.
pub fn measure(options: &AgeingOptions, progress: &dyn Progress) -> anyhow::Result<AgeingData> {
    let AgeingOptions { days, seed } = *options;
    let twin = TwinProfile::built_in(TWIN)?;
    let one = |pattern: &Pattern| -> anyhow::Result<Outcome> {
        progress.check_cancelled()?;
        let outcome = run(*pattern, &twin, u64::from(days), seed)?;
        progress.step(&format!("{}: {} alarms", pattern.description(), outcome.alarms));
        Ok(outcome)
    };
    let outcomes = Pattern::ALL.par_iter().map(one).collect::<anyhow::Result<Vec<_>>>()?;
    Ok(AgeingData {
        schema: AgeingData::SCHEMA.to_owned(),
        host: host_facts(("none", "none"), format!("twin:{TWIN}, simulated")),
        command: format!("rtvirtio-bench drift --days {days} --seed {seed}"),
        generated: generated(),
        days,
        outcomes,
    })
}

/// p99 of reads and writes that no window of a day exceeds, with the margin of a plan.
fn bounds(device: &mut Device, pattern: Pattern, random: &mut Random) -> [f64; 2] {
    let mut most = [0.0f64; 2];
    for _ in 0..DAY {
        let condition = Condition { rate: pattern.declared_rate(), ..Condition::new(random) };
        let Sample { tails, .. } = device.window(&condition);
        most = [0usize, 1].map(|i| most[i].max(tails[i].as_secs_f64()));
    }
    most.map(|tail| tail * MARGIN)
}

fn run(pattern: Pattern, twin: &TwinProfile, days: u64, seed: u64) -> Result<Outcome, ModelError> {
    let seed = seed.wrapping_mul(1_000).wrapping_add(pattern as u64);
    let (mut device, mut random) = (Device::new(twin, seed), Random::new(seed));
    let fixed = bounds(&mut device, pattern, &mut random);
    let mut ageing = Ageing::new(Profiled::new(&profile(twin, seed))?);
    let mut tally = Tally::new(pattern);
    for number in 0..days * DAY {
        let condition = pattern.condition(day_of(number), &mut random);
        let sample = device.window(&condition);
        let more = ageing.standstill().map_or(0.0, Nanos::as_secs_f64);
        let corrected = fixed.map(|bound| bound * ageing.factor() + more);
        let exceeds = |bounds: [f64; 2]| (0..2usize).any(|i| sample.tails[i].as_secs_f64() > bounds[i]);
        let broken = [exceeds(corrected), exceeds(fixed)];
        ageing.see(&sample.window);
        tally.count(number, broken, &ageing);
    }
    let uncounted = ageing.uncounted();
    let last = ageing.factor();
    Ok(Outcome { last, uncounted: uncounted.few + uncounted.waited, ..tally.outcome })
}

fn day_of(window: u64) -> f64 {
    window as f64 / DAY as f64
}

/// Counts of a run.
struct Tally {
    outcome: Outcome,
    /// Windows in a row with a broken bound.
    in_row: u64,
    was_alarmed: bool,
    factor: f64,
    /// Last window in which the device was slower than new.
    slower: Option<u64>,
}

impl Tally {
    fn new(pattern: Pattern) -> Self {
        let outcome = Outcome {
            pattern,
            phases: [Phase::default(); 3],
            longest_broken: 0,
            alarms: 0,
            false_alarms: 0,
            given_back: None,
            highest: 1.0,
            last: 1.0,
            uncounted: 0,
        };
        Self { outcome, in_row: 0, was_alarmed: false, factor: 1.0, slower: None }
    }

    /// Takes a window: whether the corrected and the fixed bound are broken, and the state after
    /// it.
    fn count(&mut self, number: u64, [broken, broken_fixed]: [bool; 2], ageing: &Ageing) {
        let of = &mut self.outcome;
        let phase = &mut of.phases[phase_of(of.pattern, number)];
        phase.windows += 1;
        phase.broken += u64::from(broken);
        phase.broken_fixed += u64::from(broken_fixed);
        self.in_row = if broken { self.in_row + 1 } else { 0 };
        of.longest_broken = of.longest_broken.max(self.in_row);
        if of.pattern.is_slower(day_of(number)) {
            self.slower = Some(number);
        }
        let is_alarmed = ageing.alarm().is_some();
        if is_alarmed && !self.was_alarmed {
            of.alarms += 1;
            of.false_alarms += u64::from(self.slower.is_none_or(|at| number - at > DAY));
        }
        self.was_alarmed = is_alarmed;
        let factor = ageing.factor();
        let better = of.pattern.better().map(|day| (day * DAY as f64) as u64);
        if let Some(since) = better.filter(|since| number >= *since && factor < self.factor) {
            of.given_back = of.given_back.or(Some(number - since));
        }
        self.factor = factor;
        of.highest = of.highest.max(factor);
    }
}

/// Number of the phase that a window belongs to.
fn phase_of(pattern: Pattern, number: u64) -> usize {
    let Some((begin, end)) = pattern.change() else { return 0 };
    let window = |day: f64| (day * DAY as f64) as u64;
    if number < window(begin) {
        0
    } else if number < window(end).saturating_add(SETTLING) {
        1
    } else {
        2
    }
}

impl AgeingData {
    /// Smallest share of windows within the bound, over all patterns and phases, and the number of
    /// windows of all.
    fn kept(&self, is_fixed: bool) -> (f64, u64) {
        let phases = || self.outcomes.iter().flat_map(|one| &one.phases);
        let least = phases().filter_map(|phase| phase.kept(is_fixed)).fold(1.0, f64::min);
        (least, phases().map(|phase| phase.windows).sum())
    }

    /// The claims of a result.
    #[must_use]
    pub fn claims(&self) -> Vec<Claim> {
        let (kept, windows) = self.kept(false);
        let n = usize::try_from(windows).unwrap_or(usize::MAX);
        let (kept_fixed, _) = self.kept(true);
        let of = |what: fn(&Outcome) -> u64| self.outcomes.iter().map(what);
        let devices = self.outcomes.len();
        let given_back = self.outcomes.iter().filter_map(|one| one.given_back);
        let back = given_back.clone().max().unwrap_or(0) as f64 / DAY as f64;
        let days = devices as f64 * f64::from(self.days);
        vec![
            Claim::new("drift.kept", "windows within the corrected bound, worst phase", kept, "share", n)
                .at_least(0.99),
            Claim::new("drift.kept_fixed", "the same with the profile as it was", kept_fixed, "share", n),
            Claim::new(
                "drift.false_alarms",
                "alarms of devices that were not slower, a year of one device",
                of(|one| one.false_alarms).sum::<u64>() as f64 * 365.0 / days.max(1.0),
                "1/year",
                n,
            ),
            Claim::new(
                "drift.longest_broken",
                "most windows of ten minutes in a row above the corrected bound",
                of(|one| one.longest_broken).max().unwrap_or(0) as f64,
                "windows",
                devices,
            ),
            Claim::new(
                "drift.given_back_days",
                "days from a better device until its bound follows, longest",
                back,
                "days",
                given_back.count(),
            ),
        ]
    }

    fn section(&self) -> Section {
        let share = |phase: &Phase| {
            let of = |is_fixed| phase.kept(is_fixed).map_or_else(|| "-".to_owned(), |v| format!("{v:.4}"));
            [of(false), of(true)]
        };
        let row = |one: &Outcome| {
            let mut row = vec![one.pattern.description().to_owned()];
            row.extend(one.phases.iter().flat_map(share));
            let back = one.given_back.map_or_else(|| "-".to_owned(), |n| format!("{:.1}", day_of(n)));
            row.extend([
                one.longest_broken.to_string(),
                format!("{} ({})", one.alarms, one.false_alarms),
                format!("{:.2}", one.highest),
                format!("{:.2}", one.last),
                back,
                one.uncounted.to_string(),
            ]);
            row
        };
        let mut head = vec!["pattern".to_owned()];
        let kinds = |phase: &&str| [format!("{phase}, corrected"), format!("{phase}, fixed")];
        head.extend(PHASES.iter().flat_map(kinds));
        head.extend(
            ["longest above", "alarms (false)", "highest factor", "last", "given back, days", "no evidence"]
                .map(str::to_owned),
        );
        let head: Vec<&str> = head.iter().map(String::as_str).collect();
        Section {
            title: "Ageing devices".to_owned(),
            text: vec![format!(
                "Share of windows in which the p99 of reads and of writes is within its bound. A slower \
                 device is followed within {FOLLOW} windows of ten minutes if all are slower, a better one \
                 after {LOWER_AFTER}."
            )],
            tables: vec![xy::table("ageing devices", &head, self.outcomes.iter().map(row).collect())],
            ..Section::default()
        }
    }
}

impl Experiment for AgeingData {
    const FORM: &str = "rtvirtio-drift/1";
    const FILE: &str = "drift.json";
    const TITLE: &str = "rtvirtio: ageing devices";

    fn report(&self) -> anyhow::Result<ExperimentReport> {
        let lead = format!(
            "Simulated: {} devices that age in different ways, {} days each. {}, {}.",
            self.outcomes.len(),
            self.days,
            self.command,
            self.generated
        );
        ExperimentReport::of_data(self, self.host.clone(), self.claims(), lead, vec![self.section()])
    }
}

#[cfg(test)]
mod tests;
