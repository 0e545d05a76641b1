//! A month of a simulated host under the loop of the service, in virtual time.
//!
//! The loop is [`rtvirtio_daemon::Daemon`] itself; the host is simulated: VMs that start, crash and
//! restart, new threads, another program that changes settings now and then or all day long,
//! contracts that come, change and go, steps that fail, a service and a host that are restarted.
//! Whatever happens, the loop has to come to rest, and to do nothing without an external cause.

use std::collections::BTreeMap;
use std::path::Path;

use rtvirtio_cpu::Level;
use rtvirtio_daemon::{
    Action, Admission, Config, Contract, Daemon, Desired, Drift, DriftPolicy, Host, KnobClass, Memory,
    Millis, Observed, ObservedVm, Outcome, Presence, ScanDepth, ScopeState, ScopeView, Step,
};
use rtvirtio_kernel::ProcessId;
use rtvirtio_spec::HostSpec;
use rtvirtio_stats::Random;
use serde::{Deserialize, Serialize};

/// Virtual milliseconds of a day.
const DAY: u64 = 86_400_000;
/// Interval of passes while steps are pending.
const SCAN: u64 = 200;
/// Interval of comparisons of all settings, as in the loop.
const COMPARE: u64 = 5_000;
/// Longest time until an undisturbed host is at rest: the longest wait after failures, and some
/// passes.
const REST: u64 = 200_000;
/// VMs of the simulated host.
const VMS: usize = 12;
/// Share of each CPU that contracts can have.
const GRANT: f64 = 0.95;

/// Counts of a simulated month.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Month {
    /// Seed of the random events.
    pub seed: u64,
    /// Days that were simulated.
    pub days: u64,
    /// Events from outside that may need a reaction.
    pub causes: u64,
    /// Passes of the service's loop.
    pub passes: u64,
    /// Steps that were carried out.
    pub steps: u64,
    /// Contracts put in force or reverted without an external cause.
    pub oscillating: u64,
    /// Times that the loop was not at rest within the limit after the last cause.
    pub restless: u64,
    /// Most restores of one setting in an hour.
    pub restores_per_hour: u64,
    /// VMs whose contract was not as desired at rest.
    pub wrong_at_rest: u64,
}

struct Scope {
    contract: String,
    start: ProcessId,
    level: Level,
    whole: bool,
    drift: BTreeMap<&'static str, String>,
}

struct Vm {
    /// Budget of the contract, ms.
    budget_ms: u64,
    criticality: &'static str,
    process: Option<ProcessId>,
    threads: u32,
    taken_in: u32,
    scope: Option<Scope>,
    has_contract: bool,
    /// Causes that may change the state of the contract: each allows one revert and one activation.
    allowance: u64,
}

struct SimHost {
    now: u64,
    random: Random,
    vms: BTreeMap<String, Vm>,
    changed: bool,
    next_pid: u32,
    out: Month,
    restores: BTreeMap<String, Vec<u64>>,
    /// Number of next steps that fail.
    failing: u32,
}

const BUDGET: &str = "/sys/fs/cgroup/cpu/rtvirtio-vm/cpu.rt_runtime_us";
const THREAD: &str = "/proc/7/task/8/sched";
const WEIGHT: &str = "/sys/fs/cgroup/blkio/vm/blkio.bfq.weight_device";

impl SimHost {
    fn new(seed: u64) -> Self {
        let vm = |i: usize| {
            let vm = Vm {
                budget_ms: 1 + (i as u64 % 3),
                criticality: ["low", "medium", "high"][i % 3],
                process: None,
                threads: 0,
                taken_in: 0,
                scope: None,
                has_contract: i % 4 != 3,
                allowance: 2,
            };
            (format!("vm{i}"), vm)
        };
        Self {
            now: 0,
            random: Random::new(seed),
            vms: (0..VMS).map(vm).collect(),
            changed: true,
            next_pid: 100,
            out: Month { seed, ..Month::default() },
            restores: BTreeMap::new(),
            failing: 0,
        }
    }

    fn below(&mut self, n: usize) -> usize {
        ((self.random.unit() * n as f64) as usize).min(n - 1)
    }

    fn any(&mut self) -> String {
        let i = self.below(VMS);
        self.vms.keys().nth(i).cloned().unwrap_or_default()
    }

    fn start(&mut self, name: &str) {
        self.next_pid += 1;
        let process = ProcessId { pid: self.next_pid, start_time: self.now };
        if let Some(vm) = self.vms.get_mut(name) {
            vm.process = Some(process);
            (vm.threads, vm.taken_in) = (6, 0);
            vm.allowance += 2;
        }
    }

    /// Marks the contracts as changed: the admission of every VM may change.
    fn contracts_changed(&mut self) {
        self.changed = true;
        self.vms.values_mut().for_each(|vm| vm.allowance += 2);
    }

    fn desired_now(&self) -> Desired {
        let with = self.vms.iter().filter(|(_, vm)| vm.has_contract);
        let contracts = with.filter_map(|(name, vm)| {
            let text = format!(
                "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{name}\"\npid = 7\ncriticality = \"{}\"\n\
                 cpu = {{ budget = \"{}ms\", period = \"20ms\" }}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n",
                vm.criticality, vm.budget_ms
            );
            let spec = HostSpec::parse("vm.toml", &text).ok()?;
            Contract::of_spec(&spec, Path::new("vm.toml")).pop()
        });
        Desired { contracts: contracts.collect(), ..Desired::default() }
    }

    fn admission(&self, desired: &Desired) -> Admission {
        let in_force = |vm: &str| self.vms.get(vm).is_some_and(|vm| vm.scope.is_some());
        let (mut admission, mut taken) = (Admission::default(), 0.0);
        for contract in desired.by_criticality(in_force) {
            let name = contract.vm.name.clone();
            let share = self.vms.get(&name).map_or(0.0, |vm| vm.budget_ms as f64 / 20.0);
            if taken + share > GRANT {
                admission.refused.insert(name, "it is too much".to_owned());
                continue;
            }
            taken += share;
            let above = u32::try_from(admission.admitted.len()).unwrap_or(0);
            admission.admitted.insert(name, Level { above, below: 0 });
        }
        admission
    }

    fn change(&mut self, name: &str, path: &'static str) {
        if let Some(scope) = self.vms.get_mut(name).and_then(|vm| vm.scope.as_mut()) {
            scope.drift.insert(path, "3000".to_owned());
        }
    }
}

impl Host for SimHost {
    fn now(&self) -> Millis {
        Millis(self.now)
    }

    fn desired(&mut self) -> Option<Desired> {
        std::mem::take(&mut self.changed).then(|| self.desired_now())
    }

    fn observe(&mut self, desired: &Desired, look: ScanDepth) -> Observed {
        let mut observed = Observed { admission: self.admission(desired), ..Observed::default() };
        for (name, vm) in &self.vms {
            if desired.contract_of(name).is_none() && vm.scope.is_none() {
                continue;
            }
            let drift = |(path, found): (&&'static str, &String)| Drift {
                knob: "setting".to_owned(),
                path: (*path).to_owned(),
                class: KnobClass::of_path(path),
                wanted: "4000".to_owned(),
                found: found.clone(),
            };
            let scope = vm.scope.as_ref().map(|scope| ScopeView {
                contract: scope.contract.clone(),
                start: vec![scope.start.clone()],
                start_alive: vm.process.as_ref() == Some(&scope.start),
                state: if scope.whole { ScopeState::Whole } else { ScopeState::Cut },
                level: Some(scope.level),
                cpu: None,
                // A shallow scan compares nothing.
                drift: if look == ScanDepth::Compare {
                    scope.drift.iter().map(drift).collect()
                } else {
                    Vec::new()
                },
                lost: Vec::new(),
            });
            let presence = match &vm.process {
                Some(process) => Presence::Running(vec![process.clone()]),
                None => Presence::Off("it is off".to_owned()),
            };
            let new_threads = vm.scope.is_some() && vm.taken_in < vm.threads;
            observed
                .vms
                .insert(name.clone(), ObservedVm { presence, scope, new_threads, ..ObservedVm::off("") });
        }
        observed
    }

    fn perform(&mut self, step: &Step, desired: &Desired) -> Outcome {
        self.out.steps += 1;
        if self.random.unit() < 0.01 {
            return Outcome::Busy;
        }
        if self.failing > 0 {
            self.failing -= 1;
            if let (Action::Apply, Some(vm)) = (&step.action, self.vms.get_mut(&step.vm)) {
                // Rolled back: no setting remains. A failure is a cause too.
                vm.allowance += 1;
            }
            return Outcome::Failed("the kernel refuses it".to_owned());
        }
        let level = self.admission(desired).admitted.get(&step.vm).copied().unwrap_or_default();
        let Some(vm) = self.vms.get_mut(&step.vm) else { return Outcome::Failed("no such VM".to_owned()) };
        match &step.action {
            Action::Apply | Action::PutBack { .. } => {
                if vm.allowance == 0 {
                    self.out.oscillating += 1;
                } else {
                    vm.allowance -= 1;
                }
                vm.scope = match (&step.action, &vm.process, desired.contract_of(&step.vm)) {
                    (Action::Apply, Some(start), Some(contract)) => Some(Scope {
                        contract: contract.id.clone(),
                        start: start.clone(),
                        level,
                        whole: true,
                        drift: BTreeMap::new(),
                    }),
                    _ => None,
                };
                vm.taken_in = if vm.scope.is_some() { vm.threads } else { 0 };
            }
            Action::Renew | Action::RenewHeld | Action::SetPlan => {}
            Action::TakeIn | Action::Split => vm.taken_in = vm.threads,
            Action::Relevel => {
                if let Some(scope) = &mut vm.scope {
                    scope.level = level;
                }
            }
            Action::Restore { paths } => {
                if let Some(scope) = &mut vm.scope {
                    scope.drift.retain(|path, _| !paths.iter().any(|p| p == path));
                }
                self.restores.entry(step.vm.clone()).or_default().push(self.now);
            }
            Action::Release { paths } => {
                if let Some(scope) = &mut vm.scope {
                    scope.drift.retain(|path, _| !paths.iter().any(|p| p == path));
                }
            }
        }
        Outcome::Done { changes: Vec::new(), notes: Vec::new() }
    }
}

fn config() -> Config {
    Config { drift: BTreeMap::from([(KnobClass::Weight, DriftPolicy::Yield)]), ..Config::default() }
}

/// Runs the loop until no step is left, at most for [`REST`]; whether it came to rest.
fn rest(daemon: &mut Daemon<SimHost>) -> bool {
    let begin = daemon.host().now;
    let mut quiet = 0;
    // Two comparisons in a row without a step: no step is left, not even a pending one.
    while quiet < 2 {
        if daemon.host().now - begin > REST {
            return false;
        }
        let steps = daemon.host().out.steps;
        daemon.compare_next();
        daemon.pass();
        daemon.host().out.passes += 1;
        let waits = daemon.snapshot().vms.iter().any(|vm| vm.state == rtvirtio_daemon::VmState::Failed);
        let acted = daemon.host().out.steps != steps || waits;
        quiet = if acted { 0 } else { quiet + 1 };
        daemon.host().now += if acted { SCAN } else { COMPARE };
    }
    true
}

/// Causes a random event from outside. Returns whether the service or the host restarts.
fn happen(host: &mut SimHost) -> bool {
    host.out.causes += 1;
    let name = host.any();
    match host.below(100) {
        // A VM starts, restarts or ends.
        0..25 => host.start(&name),
        25..35 => {
            if let Some(vm) = host.vms.get_mut(&name) {
                vm.process = None;
                vm.allowance += 1;
            }
        }
        // Workers and hot-plugged threads.
        35..60 => {
            if let Some(vm) = host.vms.get_mut(&name).filter(|vm| vm.process.is_some()) {
                vm.threads += 1;
            }
        }
        // Another program changes a setting.
        60..68 => host.change(&name, BUDGET),
        68..73 => host.change(&name, THREAD),
        73..76 => host.change(&name, WEIGHT),
        // Contracts come, change and go.
        76..82 => {
            if let Some(vm) = host.vms.get_mut(&name) {
                vm.has_contract = !vm.has_contract;
            }
            host.contracts_changed();
        }
        82..87 => {
            let budget = 1 + host.below(8) as u64;
            if let Some(vm) = host.vms.get_mut(&name) {
                vm.budget_ms = budget;
            }
            host.contracts_changed();
        }
        87..90 => {
            let word = ["low", "medium", "high"][host.below(3)];
            if let Some(vm) = host.vms.get_mut(&name) {
                vm.criticality = word;
            }
            host.contracts_changed();
        }
        // The kernel refuses some steps.
        90..94 => {
            host.failing = 1 + host.below(4) as u32;
            host.start(&name);
        }
        // Killed between two steps.
        94..96 => {
            if let Some(vm) = host.vms.get_mut(&name) {
                if let Some(scope) = &mut vm.scope {
                    scope.whole = false;
                }
                vm.allowance += 2;
            }
            return true;
        }
        96..99 => return true,
        // The host is restarted: all VMs are, and no setting is in force.
        _ => {
            let names: Vec<String> = host.vms.keys().cloned().collect();
            for name in names {
                host.start(&name);
                if let Some(vm) = host.vms.get_mut(&name) {
                    vm.scope = None;
                }
            }
            return true;
        }
    }
    false
}

/// VMs whose contract is not as desired.
fn wrong(daemon: &mut Daemon<SimHost>) -> u64 {
    let desired = daemon.desired().clone();
    let host = daemon.host();
    let admission = host.admission(&desired);
    let mut wrong = 0;
    for (name, vm) in &host.vms {
        let should = desired
            .contract_of(name)
            .filter(|_| vm.process.is_some() && admission.admitted.contains_key(name));
        let fits = match (should, &vm.scope) {
            (None, None) => true,
            (Some(contract), Some(scope)) => {
                scope.contract == contract.id
                    && vm.process.as_ref() == Some(&scope.start)
                    && vm.taken_in == vm.threads
                    && admission.admitted.get(name) == Some(&scope.level)
            }
            _ => false,
        };
        wrong += u64::from(!fits);
    }
    wrong
}

#[must_use]
pub fn simulate(seed: u64, days: u64) -> Month {
    let mut daemon = Daemon::new(SimHost::new(seed), config(), Memory::default());
    let end = days * DAY;
    while daemon.host().now < end {
        let host = daemon.host();
        // On average every ten minutes; sometimes several things at once.
        let gap = (-(1.0 - host.random.unit()).ln() * 600_000.0) as u64;
        host.now += gap;
        let mut anew = happen(host);
        while host.random.unit() < 0.2 {
            anew |= happen(host);
        }
        let pattern = host.below(200);
        if anew {
            daemon = restarted(daemon);
        }
        match pattern {
            // A VM that crashes again and again, for an hour.
            0 => {
                let name = daemon.host().any();
                for _ in 0..720 {
                    daemon.host().start(&name);
                    daemon.host().out.causes += 1;
                    daemon.pass();
                    daemon.host().now += 5_000;
                }
            }
            // Another program that sets a budget every half minute, for six hours.
            1 => {
                let name = daemon.host().any();
                for _ in 0..720 {
                    daemon.host().change(&name, BUDGET);
                    daemon.host().out.causes += 1;
                    daemon.compare_next();
                    daemon.pass();
                    daemon.host().now += 30_000;
                }
                // That program stops; its last value stays until the budget may be set again.
                daemon.host().now += 3_600_000;
            }
            _ => {}
        }
        if rest(&mut daemon) {
            let wrong = wrong(&mut daemon);
            daemon.host().out.wrong_at_rest += wrong;
        } else {
            daemon.host().out.restless += 1;
        }
    }
    let host = daemon.host();
    let per_hour = |times: &Vec<u64>| {
        let within = |at: &u64| times.iter().filter(|t| (*at..at + 3_600_000).contains(*t)).count();
        times.iter().map(within).max().unwrap_or(0)
    };
    host.out.restores_per_hour = host.restores.values().map(per_hour).max().unwrap_or(0) as u64;
    host.out.days = days;
    host.out.clone()
}

/// Restarts the service: its memory is lost, the host is unchanged.
fn restarted(daemon: Daemon<SimHost>) -> Daemon<SimHost> {
    let mut host = daemon.into_host();
    host.changed = true;
    Daemon::new(host, config(), Memory::default())
}

#[cfg(test)]
mod tests;
