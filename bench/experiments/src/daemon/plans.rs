//! A month of plans under patterns of load, in virtual time.
//!
//! The loop, the decision when to plan anew and the search for plans are the service's own; the
//! host is simulated: load of the VMs, speed of the device, missed targets. Whatever the pattern,
//! settings have to settle.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use rtvirtio_daemon::{
    Action, Config, Contract, Daemon, Desired, Host, MadePlan, Memory, Millis, Observed, ObservedVm, Outcome,
    PlanConfig, PlanScope, PlannedHost, Presence, ScanDepth, ScopeState, SettingChange, Step,
};
use rtvirtio_kernel::ProcessId;
use rtvirtio_model::Profile;
use rtvirtio_planner::replan::{
    Basis, Candidate, Change, Observations, Outline, PlanInput, Request, candidate, load_key,
};
use rtvirtio_planner::{PlanOptions, Setting};
use rtvirtio_spec::{HostSpec, Spec};
use rtvirtio_stats::Random;
use rtvirtio_workflow::site::default_config;
use serde::{Deserialize, Serialize};

pub use super::pattern::Pattern;

/// Virtual milliseconds of a minute.
const MINUTE: u64 = 60_000;
/// Virtual milliseconds of a day.
const DAY: u64 = 24 * 60 * MINUTE;
/// Interval of observations, virtual milliseconds.
const LOOK: u64 = 5 * MINUTE;
/// Changes of a setting from one value to another in a month that count as oscillation.
const OFTEN: u32 = 3;
const DEVICE: &str = "/dev/sdz";
/// A controller, an operator's screen, and a neighbour that reads as fast as it can.
const SPEC: &str = r#"
[device]
path = "/dev/sdz"

[[vm]]
name = "plc"
pid = 7
criticality = "high"
[[vm.task]]
name = "cycle"
op = "read"
block = "4KiB"
rate = "200/s"
target = { latency = "12ms" }

[[vm]]
name = "hmi"
pid = 8
[[vm.task]]
name = "screen"
op = "read"
block = "16KiB"
rate = "100/s"
target = { percentile = "p99", latency = "40ms" }

[[vm]]
name = "hist"
pid = 9
criticality = "low"
[[vm.task]]
name = "bulk"
op = "read"
block = "64KiB"
depth = 16
"#;

/// Counts of a month under one pattern.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanMonth {
    /// Pattern of load and device.
    pub pattern: Pattern,
    /// Seed of the random draws.
    pub seed: u64,
    /// Days that were simulated.
    pub days: u64,
    /// Whether an operator accepts every pending plan.
    pub accepts: bool,
    /// Plans that were made.
    pub planned: u64,
    /// Times that settings were changed.
    pub changes: u64,
    /// Settings that were changed.
    pub settings: u64,
    /// Settings that were changed from one value to another for the third time or more.
    pub oscillating: u64,
    /// Changes in the last third of the month, where the pattern has nothing new.
    pub restless: u64,
    /// VMs that a plan made worse for the sake of less critical ones, unasked.
    pub hurt: u64,
    /// Changes that came sooner after the one before than allowed.
    pub hasty: u64,
}

struct PlanHost {
    now: u64,
    pattern: Pattern,
    random: Random,
    spec: Spec,
    profile: Profile,
    desired: Option<Desired>,
    running: BTreeMap<String, (ProcessId, bool)>,
    in_force: Option<(Vec<Setting>, Basis)>,
    made: Option<(u64, Candidate, Basis)>,
    answered: bool,
    looked: bool,
    /// Random numbers of the pattern, 0 to 1; drawn anew at `until`.
    state: [f64; 4],
    until: u64,
    /// Last value of each setting that was ever changed.
    values: BTreeMap<String, String>,
    /// Number of changes of each setting from one value to another.
    moves: BTreeMap<(String, String, String), u32>,
    changed: Option<u64>,
    /// Whether an operator has accepted the plan that is applied next.
    asked: bool,
    out: PlanMonth,
}

impl PlanHost {
    fn new(pattern: Pattern, seed: u64, days: u64, accepts: bool, profile: &Profile) -> anyhow::Result<Self> {
        let host = HostSpec::parse("plant.toml", SPEC)?;
        let contracts = Contract::of_spec(&host, Path::new("plant.toml"));
        let plant = Some(PlannedHost { id: "plant".to_owned(), host: host.clone() });
        let process = |pid| (ProcessId { pid, start_time: 1 }, false);
        let names = host.vms().iter().map(|vm| vm.name.clone());
        Ok(Self {
            now: 0,
            pattern,
            random: Random::new(seed),
            running: names.zip(100..).map(|(name, pid)| (name, process(pid))).collect(),
            spec: host.single()?.clone(),
            profile: profile.clone(),
            desired: Some(Desired { contracts, plant, ..Desired::default() }),
            in_force: None,
            made: None,
            answered: false,
            looked: false,
            state: [0.0; 4],
            until: 0,
            values: BTreeMap::new(),
            moves: BTreeMap::new(),
            changed: None,
            asked: false,
            out: PlanMonth {
                pattern,
                seed,
                days,
                accepts,
                planned: 0,
                changes: 0,
                settings: 0,
                oscillating: 0,
                restless: 0,
                hurt: 0,
                hasty: 0,
            },
        })
    }

    /// Draws `state` anew once its time is over; the draw holds for `ms`.
    fn draw(&mut self, ms: u64) {
        if self.now >= self.until {
            self.until = self.now + ms;
            self.state = [0; 4].map(|_| self.random.unit());
        }
    }

    fn basis(&self) -> Basis {
        let none = || Basis {
            contract: String::new(),
            input: rtvirtio_planner::replan::Input::default(),
            given_up: BTreeSet::new(),
            patience: BTreeMap::new(),
        };
        self.in_force.as_ref().map_or_else(none, |(_, basis)| basis.clone())
    }

    /// State of the pattern now: load and slowness as multiples, whether a target is missed.
    fn shown(&mut self) -> (f64, f64, bool) {
        let (hour, day) = (self.now / (60 * MINUTE) % 24, self.now / DAY);
        let caution = self.basis().input.caution;
        let planned = self.basis().input.loads.get(&load_key("plc", false)).copied().unwrap_or(0);
        let high = |is_high: bool, ratio: f64| if is_high { ratio } else { 1.0 };
        match self.pattern {
            Pattern::Steady | Pattern::Restarts => (1.0, 1.0, false),
            Pattern::Daily => (high((8..17).contains(&hour), 2.0), 1.0, false),
            Pattern::Weekly => (high(day % 7 >= 5, 3.0), 1.0, false),
            Pattern::Noise => {
                self.draw(5 * MINUTE);
                (4.0 * self.state[0], 1.0, false)
            }
            Pattern::Border => {
                self.draw(20 * MINUTE);
                (1.1 * 1.25 * (0.98 + 0.04 * self.state[0]), 1.0, false)
            }
            Pattern::Bursts => {
                self.draw(7 * MINUTE);
                (high(self.state[0] < 0.02, 5.0), 1.0, false)
            }
            Pattern::Ramp => {
                let part = self.now as f64 / (self.out.days * DAY) as f64;
                (1.0 + 5.0 * part, 1.0, false)
            }
            Pattern::Step => (high(day >= 9, 3.0), 1.0, false),
            Pattern::Square => (high(day % 11 == 0, 3.0), 1.0, false),
            Pattern::SlowDevice => {
                self.draw(DAY);
                let is_slow = self.state[0] < 0.6 && (2..6).contains(&hour);
                (1.0, high(is_slow, 2.5), false)
            }
            Pattern::Misses => {
                self.draw(60 * MINUTE);
                (1.0, 1.0, self.state[0] < 0.1)
            }
            Pattern::Cautious => (1.0, 1.0, caution == 0),
            Pattern::Contrary => (high(planned == 0, 3.0), 1.0, false),
            Pattern::Chaos => {
                let minutes = 1 + self.random.below(2_000) as u64;
                self.draw(minutes * MINUTE);
                let [load, slow, miss, _] = self.state;
                (0.5 + 5.0 * load, 1.0 + 3.0 * slow * slow, miss < 0.2)
            }
        }
    }

    /// Restarts VMs, in the patterns that have restarts.
    fn restarts(&mut self) {
        if !matches!(self.pattern, Pattern::Restarts | Pattern::Chaos) || self.random.unit() > 0.02 {
            return;
        }
        let i = self.random.below(self.running.len());
        let now = self.now;
        if let Some((process, lacks)) = self.running.values_mut().nth(i) {
            process.start_time = now + 2;
            *lacks = self.in_force.is_some();
        }
    }

    fn set(&mut self) -> Outcome {
        let Some((_, made, basis)) = self.made.take() else {
            return Outcome::Failed("no plan was made".to_owned());
        };
        if !made.changes.is_empty() {
            self.note(&made);
        }
        let change = |s: &Setting| SettingChange {
            knob: format!("{:?}", s.knob),
            path: String::new(),
            old: None,
            new: s.value.clone(),
        };
        let changes = made.changes.iter().map(change).collect();
        self.in_force = Some((made.plan.settings, basis));
        Outcome::Done { changes, notes: Vec::new() }
    }

    fn note(&mut self, made: &Candidate) {
        self.out.changes += 1;
        self.out.settings += made.changes.len() as u64;
        let every = PlanConfig::default().timing().every;
        self.out.hasty += u64::from(self.changed.is_some_and(|at| self.now - at < every));
        self.changed = Some(self.now);
        if self.pattern.is_stationary() && self.now > self.out.days * DAY * 2 / 3 {
            self.out.restless += 1;
        }
        for s in &made.changes {
            let knob = format!("{:?}", s.knob);
            let from = self.values.insert(knob.clone(), s.value.clone()).unwrap_or_default();
            let times = self.moves.entry((knob, from, s.value.clone())).or_default();
            *times += 1;
            self.out.oscillating += u64::from(*times >= OFTEN);
        }
        let gains = made.effects.iter().filter(|e| e.change == Change::Better).map(|e| e.criticality).max();
        let is_worse = |change| matches!(change, Change::Worse | Change::Misses);
        // An accepted plan has been asked for.
        if std::mem::take(&mut self.asked) {
            return;
        }
        let hurt = made.effects.iter().filter(|e| is_worse(e.change) && Some(e.criticality) > gains);
        self.out.hurt += hurt.count() as u64;
    }
}

impl Host for PlanHost {
    fn now(&self) -> Millis {
        Millis(self.now)
    }

    fn desired(&mut self) -> Option<Desired> {
        self.desired.take()
    }

    fn observe(&mut self, _: &Desired, _: ScanDepth) -> Observed {
        let vm = |(name, (process, lacks_held)): (&String, &(ProcessId, bool))| {
            let presence = Presence::Running(vec![process.clone()]);
            (name.clone(), ObservedVm { presence, lacks_held: *lacks_held, ..ObservedVm::off("") })
        };
        let made = self.made.as_ref().filter(|_| !std::mem::replace(&mut self.answered, true));
        let made = made.map(|(number, made, _)| {
            let outline = Outline {
                changes: made.changes.len(),
                effects: made.effects.clone(),
                given_up: made.given_up.clone(),
            };
            (
                *number,
                Ok(MadePlan { outline, changes: Vec::new(), reasons: Vec::new(), predictions: Vec::new() }),
            )
        });
        let plan = self.in_force.as_ref().map(|(_, basis)| PlanScope {
            basis: Some(basis.clone()),
            state: ScopeState::Whole,
            drift: Vec::new(),
            lost: Vec::new(),
            yielded: BTreeSet::new(),
            reason: String::new(),
            since: String::new(),
            devices: [DEVICE.to_owned()].into(),
            predictions: Vec::new(),
        });
        Observed { vms: self.running.iter().map(vm).collect(), plan, made, ..Observed::default() }
    }

    fn sight(&mut self, _: &Desired) -> Option<Observations> {
        if std::mem::replace(&mut self.looked, true) {
            return None;
        }
        let (load, slow, missed) = self.shown();
        Some(Observations {
            loads: [(load_key("plc", false), load), (load_key("hmi", false), 1.0)].into(),
            slow: [(DEVICE.to_owned(), slow)].into(),
            missed: [("plc/cycle".to_owned(), missed), ("hmi/screen".to_owned(), false)].into(),
        })
    }

    fn make_plan(&mut self, request: &Request, _: &Desired) {
        self.out.planned += 1;
        let options = PlanOptions::new(default_config(&self.spec));
        let in_force = self.in_force.as_ref().map(|(settings, _)| settings.as_slice()).unwrap_or_default();
        let (spec, profile) = (&self.spec, &self.profile);
        let ground = PlanInput { device: DEVICE, spec, profile, options: &options, in_force };
        // A model refuses no load of the patterns; were it to, no request would be answered, and
        // the month would show no plan.
        let Ok(made) = candidate(&ground, &request.input) else { return };
        let basis = Basis {
            contract: request.contract.clone(),
            input: request.input.clone(),
            given_up: made.given_up.clone(),
            patience: request.patience.clone(),
        };
        self.made = Some((request.number, made, basis));
        self.answered = false;
    }

    fn perform(&mut self, step: &Step, _: &Desired) -> Outcome {
        match &step.action {
            Action::SetPlan => self.set(),
            Action::RenewHeld => {
                if let Some((_, lacks)) = self.running.get_mut(&step.vm) {
                    *lacks = false;
                }
                Outcome::Done { changes: Vec::new(), notes: Vec::new() }
            }
            other => Outcome::Failed(format!("{other:?} of a plan that nothing disturbs")),
        }
    }
}

/// Simulates `days` days under one pattern.
///
/// # Errors
/// Never: the spec is part of this file.
pub fn simulate(
    pattern: Pattern,
    seed: u64,
    days: u64,
    accepts: bool,
    profile: &Profile,
) -> anyhow::Result<PlanMonth> {
    simulate_with(&PlanConfig::default(), PlanHost::new(pattern, seed, days, accepts, profile)?)
}

fn simulate_with(plan: &PlanConfig, host: PlanHost) -> anyhow::Result<PlanMonth> {
    let (days, accepts) = (host.out.days, host.out.accepts);
    let config = || Config { plan: Some(plan.clone()), ..Config::default() };
    let mut daemon = Daemon::new(host, config(), Memory::default());
    while daemon.host().now < days * DAY {
        let host = daemon.host();
        host.looked = false;
        host.restarts();
        // At random times the service is restarted, and continues from the settings in force.
        if host.random.unit() < 0.000_2 {
            let mut host = daemon.into_host();
            let spec = HostSpec::parse("plant.toml", SPEC)?;
            let contracts = Contract::of_spec(&spec, Path::new("plant.toml"));
            let plant = Some(PlannedHost { id: "plant".to_owned(), host: spec });
            host.desired = Some(Desired { contracts, plant, ..Desired::default() });
            daemon = Daemon::new(host, config(), Memory::default());
        }
        daemon.pass();
        if accepts && daemon.accept_plan() {
            daemon.host().asked = true;
            daemon.pass();
            daemon.host().asked = false;
        }
        daemon.host().now += LOOK;
    }
    Ok(daemon.into_host().out)
}

#[cfg(test)]
mod tests {
    use rtvirtio_learn::synthetic::profile;

    use super::*;

    #[test]
    fn no_pattern_makes_settings_oscillate() {
        let profile = profile();
        let check = |pattern| {
            // An operator who accepts every plan: only the service can keep settings stable.
            let month = simulate(pattern, 1, 30, true, &profile).unwrap();
            let zeros = (month.oscillating, month.restless, month.hurt, month.hasty);
            assert_eq!(zeros, (0, 0, 0, 0), "{month:?}");
            assert!(month.changes >= 1, "{month:?}");
            match pattern {
                Pattern::Steady | Pattern::Restarts => assert_eq!(month.planned, 1, "{month:?}"),
                Pattern::Ramp | Pattern::Step => assert!(month.changes > 1, "{month:?}"),
                _ => {}
            }
        };
        let check = &check;
        std::thread::scope(|scope| {
            for pattern in Pattern::ALL {
                scope.spawn(move || check(pattern));
            }
        });
        let once = simulate(Pattern::Chaos, 7, 3, false, &profile).unwrap();
        assert_eq!(once.hurt, 0);
        assert_eq!(simulate(Pattern::Chaos, 7, 3, false, &profile).unwrap(), once, "seeded");
    }

    #[test]
    fn plans_that_forget_within_minutes_would_oscillate() {
        let minutes = |n| rtvirtio_units::Nanos::from_millis(n * MINUTE);
        let plan = PlanConfig { horizon: minutes(10), every: minutes(10), ..PlanConfig::default() };
        let host = PlanHost::new(Pattern::Square, 1, 30, true, &profile()).unwrap();
        let month = simulate_with(&plan, host).unwrap();
        assert!(month.oscillating > 0 && month.restless > 0, "{month:?}");
    }
}
