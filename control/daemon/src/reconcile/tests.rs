use std::collections::BTreeMap;
use std::path::Path;

use rtvirtio_cpu::{Backend, Level};
use rtvirtio_spec::HostSpec;

use super::*;
use crate::host::Outcome;
use crate::observed::{Admission, KnobClass};

fn contract(vm: &str, criticality: &str, budget: &str) -> Contract {
    let text = format!(
        "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"{vm}\"\npid = 7\ncriticality = \"{criticality}\"\n\
         cpu = {{ budget = \"{budget}\", period = \"20ms\" }}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n"
    );
    let spec = HostSpec::parse("x.toml", &text).unwrap();
    Contract::of_spec(&spec, Path::new("/etc/x.toml")).remove(0)
}

fn process(pid: u32) -> ProcessId {
    ProcessId { pid, start_time: 100 + u64::from(pid) }
}

fn running(pid: u32) -> ObservedVm {
    ObservedVm { presence: Presence::Running(vec![process(pid)]), ..ObservedVm::off("") }
}

fn scope(of: &Contract, pid: u32) -> ScopeView {
    ScopeView {
        contract: of.id.clone(),
        start: vec![process(pid)],
        start_alive: true,
        state: ScopeState::Whole,
        level: Some(Level::ALONE),
        cpu: Some(Backend::RtGroup),
        drift: Vec::new(),
        lost: Vec::new(),
    }
}

fn in_force(of: &Contract, pid: u32) -> ObservedVm {
    ObservedVm { scope: Some(scope(of, pid)), ..running(pid) }
}

struct Case {
    desired: Desired,
    observed: Observed,
    config: Config,
    memory: Memory,
}

impl Case {
    fn new(all: Vec<(Contract, ObservedVm)>) -> Self {
        let mut case = Self {
            desired: Desired::default(),
            observed: Observed::default(),
            config: Config::default(),
            memory: Memory::default(),
        };
        for (contract, vm) in all {
            let name = contract.vm.name.clone();
            case.observed.admission.admitted.insert(name.clone(), Level::ALONE);
            case.observed.vms.insert(name, vm);
            case.desired.contracts.push(contract);
        }
        case
    }

    fn steps_at(&self, now: u64) -> Vec<Step> {
        reconcile(&self.desired, &self.observed, &self.config, &self.memory, Millis(now))
    }

    fn steps(&self) -> Vec<(String, Action)> {
        self.steps_at(0).into_iter().map(|s| (s.vm, s.action)).collect()
    }

    fn vm(&mut self, name: &str) -> &mut ObservedVm {
        self.observed.vms.get_mut(name).unwrap()
    }

    fn scope(&mut self, name: &str) -> &mut ScopeView {
        self.vm(name).scope.as_mut().unwrap()
    }
}

const BACK: Action = Action::PutBack { force: true };

fn one(action: Action) -> Vec<(String, Action)> {
    vec![("plc".to_owned(), action)]
}

fn plc() -> Contract {
    contract("plc", "high", "4ms")
}

#[test]
fn a_vm_that_runs_gets_its_contract_once() {
    let mut case = Case::new(vec![(plc(), running(7))]);
    assert_eq!(case.steps(), one(Action::Apply));
    case.vm("plc").scope = Some(scope(&plc(), 7));
    assert_eq!(case.steps(), []);
    // Not seen is not ended.
    case.vm("plc").presence = Presence::Unknown("its monitor is taken".to_owned());
    assert_eq!(case.steps(), []);
    case.vm("plc").presence = Presence::Off("libvirt says so".to_owned());
    assert_eq!(case.steps(), [], "a process of it is still there");
}

#[test]
fn one_that_is_off_held_by_hand_or_without_settings_is_left() {
    assert_eq!(Case::new(vec![(plc(), ObservedVm::off("shut off"))]).steps(), []);
    let by_hand = ObservedVm { applied_by_hand: true, ..running(7) };
    assert_eq!(Case::new(vec![(plc(), by_hand)]).steps(), []);
    let mut nothing = plc();
    nothing.vm.cpu.need = None;
    assert_eq!(Case::new(vec![(nothing, running(7))]).steps(), []);
}

#[test]
fn a_restart_an_end_a_cut_and_a_reboot_are_put_back_first() {
    let mut case = Case::new(vec![(plc(), in_force(&plc(), 7))]);
    case.vm("plc").presence = Presence::Running(vec![process(8)]);
    assert_eq!(case.steps(), one(BACK));
    for presence in [Presence::Off("gone".to_owned()), Presence::Unknown("?".to_owned())] {
        case.vm("plc").presence = presence;
        case.scope("plc").start_alive = false;
        assert_eq!(case.steps(), one(BACK));
    }
    for state in [ScopeState::Cut, ScopeState::Rebooted] {
        let mut case = Case::new(vec![(plc(), in_force(&plc(), 7))]);
        case.scope("plc").state = state;
        assert_eq!(case.steps(), one(BACK));
    }
    // What was there before is not known: nothing is written.
    let mut case = Case::new(vec![(plc(), in_force(&plc(), 7))]);
    case.scope("plc").state = ScopeState::Unusable("damaged".to_owned());
    case.scope("plc").start_alive = false;
    assert_eq!(case.steps(), []);
}

#[test]
fn a_contract_that_is_removed_or_changed_is_put_back_and_a_mistake_removes_none() {
    let mut case = Case::new(vec![(plc(), in_force(&plc(), 7))]);
    case.desired.contracts.clear();
    assert_eq!(case.steps(), one(BACK));
    case.desired.held.push("plc".to_owned());
    assert_eq!(case.steps(), []);
    let mut case = Case::new(vec![(contract("plc", "high", "5ms"), in_force(&plc(), 7))]);
    assert_eq!(case.steps(), one(BACK));
    // While it waits for acceptance the old one stays.
    case.config.mode = Mode::Ask;
    assert_eq!(case.steps(), []);
    let id = case.desired.contracts[0].id.clone();
    case.memory.accept("plc", &id);
    assert_eq!(case.steps(), one(BACK));
}

#[test]
fn asked_first_and_only_shown() {
    let mut case = Case::new(vec![(plc(), running(7))]);
    case.config.mode = Mode::Observe;
    assert_eq!(case.steps(), []);
    case.config.mode = Mode::Ask;
    assert_eq!(case.steps(), []);
    case.memory.accept("plc", &plc().id);
    assert_eq!(case.steps(), one(Action::Apply));
    // What was accepted is kept: a restart asks no more.
    case.vm("plc").scope = Some(scope(&plc(), 6));
    assert_eq!(case.steps(), one(BACK));
}

#[test]
fn the_least_critical_gives_way_before_the_most_critical_comes() {
    let (low, high) = (contract("a", "low", "9ms"), contract("z", "high", "9ms"));
    let mut case = Case::new(vec![(low.clone(), in_force(&low, 7)), (high, running(8))]);
    case.observed.admission.admitted.remove("a");
    case.observed.admission.refused.insert("a".to_owned(), "too much".to_owned());
    let steps: Vec<(String, Action)> = case.steps();
    assert_eq!(steps, [("a".to_owned(), BACK), ("z".to_owned(), Action::Apply)]);
    // Refused from the beginning: nothing is set, and the VM runs as it is.
    case.vm("a").scope = None;
    assert_eq!(case.steps(), [("z".to_owned(), Action::Apply)]);
}

#[test]
fn new_threads_and_another_place_are_taken_in() {
    let mut case = Case::new(vec![(plc(), in_force(&plc(), 7))]);
    case.vm("plc").new_threads = true;
    assert_eq!(case.steps(), one(Action::TakeIn));
    case.observed.admission.admitted.insert("plc".to_owned(), Level { above: 1, below: 0 });
    assert_eq!(case.steps(), one(Action::Relevel));
    // Not known what is admitted: nothing moves.
    case.observed.admission = Admission::default();
    assert_eq!(case.steps(), one(Action::TakeIn));
    // New threads get their shares along with it.
    case.vm("plc").splits = true;
    assert_eq!(case.steps(), one(Action::TakeIn));
    case.vm("plc").new_threads = false;
    assert_eq!(case.steps(), one(Action::Split));
}

#[test]
fn a_plan_that_was_applied_by_hand_is_kept_too() {
    let mut case = Case::new(vec![(plc(), ObservedVm { lacks_plan: true, ..running(7) })]);
    case.vm("plc").applied_by_hand = true;
    assert_eq!(case.steps(), one(Action::Renew));
    case.vm("plc").presence = Presence::Off("shut off".to_owned());
    assert_eq!(case.steps(), []);
    case.observed.applied_drift = vec![drifted(KnobClass::Elevator, "/e")];
    let again = Action::Restore { paths: vec!["/e".to_owned()] };
    assert_eq!(case.steps(), [(APPLIED.to_owned(), again)]);
    case.config.drift = BTreeMap::from([(KnobClass::Elevator, DriftPolicy::Report)]);
    assert_eq!(case.steps(), []);
}

fn drifted(class: KnobClass, path: &str) -> Drift {
    Drift {
        knob: "k".to_owned(),
        path: path.to_owned(),
        class,
        wanted: "1".to_owned(),
        found: "2".to_owned(),
    }
}

#[test]
fn each_policy_about_drift() {
    let mut case = Case::new(vec![(plc(), in_force(&plc(), 7))]);
    case.scope("plc").drift = vec![
        drifted(KnobClass::Weight, "/w"),
        drifted(KnobClass::Thread, "/t"),
        drifted(KnobClass::Limit, "/l"),
    ];
    case.config.drift =
        BTreeMap::from([(KnobClass::Weight, DriftPolicy::Report), (KnobClass::Limit, DriftPolicy::Yield)]);
    assert_eq!(case.steps(), one(Action::Release { paths: vec!["/l".to_owned()] }));
    case.scope("plc").drift.pop();
    assert_eq!(case.steps(), one(Action::Restore { paths: vec!["/t".to_owned()] }));
    case.scope("plc").drift.pop();
    assert_eq!(case.steps(), []);
    // Put back, what another program has set is left where it would not have been restored.
    case.desired.contracts.clear();
    assert_eq!(case.steps(), one(Action::PutBack { force: false }));
    // What was not compared may have such values too.
    case.scope("plc").drift.clear();
    assert_eq!(case.steps(), one(Action::PutBack { force: false }));
    case.scope("plc").state = ScopeState::Cut;
    assert_eq!(case.steps(), one(Action::PutBack { force: false }));
    case.config.drift.clear();
    assert_eq!(case.steps(), one(BACK));
}

#[test]
fn a_contest_ends_and_a_failure_waits_longer_each_time() {
    let mut case = Case::new(vec![(plc(), in_force(&plc(), 7))]);
    case.scope("plc").drift = vec![drifted(KnobClass::Thread, "/t")];
    let done = Outcome::Done { changes: Vec::new(), notes: Vec::new() };
    let mut restored = 0;
    // Ten seconds apart, for two hours.
    for now in (0..7_200_000).step_by(10_000) {
        for step in case.steps_at(now) {
            assert!(matches!(step.action, Action::Restore { .. }));
            case.memory.note(&step, &done, Millis(now));
            restored += 1;
        }
    }
    assert!((3..=6).contains(&restored), "{restored} times in two hours");

    let mut case = Case::new(vec![(plc(), running(7))]);
    let mut tries = Vec::new();
    for now in (0..300_000).step_by(200) {
        for step in case.steps_at(now) {
            case.memory.note(&step, &Outcome::Failed("no".to_owned()), Millis(now));
            tries.push(now);
        }
    }
    assert_eq!(&tries[..5], [0, 1_000, 3_000, 7_000, 15_000]);
    assert!(tries.windows(2).all(|w| w[1] - w[0] <= 60_000) && tries.len() < 12, "{tries:?}");
    assert_eq!(case.memory.failure("plc"), Some("no"));
    // Another rtvirtio at work is no failure.
    let mut case = Case::new(vec![(plc(), running(7))]);
    let step = case.steps_at(0).remove(0);
    case.memory.note(&step, &Outcome::Busy, Millis(0));
    assert_eq!(case.steps_at(1), [step]);
}

/// A good contract is never lost to one that cannot be had.
#[test]
fn a_changed_contract_that_does_not_fit_leaves_the_one_in_force() {
    let mut case = Case::new(vec![(contract("plc", "high", "19ms"), in_force(&plc(), 7))]);
    assert_eq!(case.steps(), one(BACK), "it fits");
    case.observed.admission.kept.insert("plc".to_owned(), "too much".to_owned());
    assert_eq!(case.steps(), []);
    // What is in force has its place among the others meanwhile.
    case.observed.admission.admitted.insert("plc".to_owned(), Level { above: 1, below: 0 });
    assert_eq!(case.steps(), one(Action::Relevel));
    case.observed.admission.admitted.insert("plc".to_owned(), Level::ALONE);
    // The next start of the VM gets none of the two.
    case.vm("plc").scope = None;
    assert_eq!(case.steps(), []);
}

#[test]
fn a_changed_contract_of_which_it_is_not_known_whether_it_fits_leaves_the_one_in_force() {
    let mut case = Case::new(vec![(contract("plc", "high", "5ms"), in_force(&plc(), 7))]);
    case.observed.admission = Admission::default();
    assert_eq!(case.steps(), []);
    // Where what is in force does not fit any more either, it gives way.
    case.observed.admission.refused.insert("plc".to_owned(), "too much".to_owned());
    assert_eq!(case.steps(), one(BACK));
    // Settings without a CPU contract take nothing that others could have.
    case.vm("plc").scope.as_mut().unwrap().level = None;
    assert_eq!(case.steps(), []);
}
