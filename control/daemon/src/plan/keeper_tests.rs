use std::collections::BTreeMap;
use std::path::Path;

use rtvirtio_kernel::ProcessId;
use rtvirtio_planner::replan::{Change, Effect, NoPlan, Outline, Unplanned};
use rtvirtio_spec::{Criticality, HostSpec};
use rtvirtio_units::Nanos;

use super::super::snapshot::PlanState;
use super::*;
use crate::config::{DriftPolicy, PlanConfig};
use crate::desired::{Contract, PlannedHost};
use crate::observed::{Drift, KnobClass, ObservedVm, PlanScope};

const DONE: Outcome = Outcome::Done { changes: Vec::new(), notes: Vec::new() };

fn desired(block: &str) -> Desired {
    let text = format!(
        "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"plc\"\npid = 7\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"{block}\"\nrate = \"100/s\"\n"
    );
    let spec = HostSpec::parse("x.toml", &text).unwrap();
    let contracts = Contract::of_spec(&spec, Path::new("x.toml"));
    Desired { contracts, plant: Some(PlannedHost { id: block.to_owned(), host: spec }), ..Desired::default() }
}

fn outline(change: Change) -> Outline {
    let effect = Effect { vm: "plc".to_owned(), criticality: Criticality::Medium, change };
    Outline { changes: 1, effects: vec![effect], given_up: BTreeSet::new() }
}

fn prediction() -> PredictionSnapshot {
    PredictionSnapshot {
        vm: "plc".to_owned(),
        task: "t".to_owned(),
        percentile: "p99".to_owned(),
        latency_ns: Nanos(1),
        bound_ns: None,
    }
}

struct Case {
    desired: Desired,
    observed: Observed,
    config: Config,
    memory: Memory,
    keeper: PlanKeeper,
    now: u64,
}

impl Case {
    fn new(mode: Mode) -> Self {
        let config = Config {
            plan: Some(PlanConfig { mode: Some(mode), ..PlanConfig::default() }),
            ..Config::default()
        };
        let presence = Presence::Running(vec![ProcessId { pid: 7, start_time: 1 }]);
        let vm = ObservedVm { presence, ..ObservedVm::off("") };
        let observed = Observed { vms: [("plc".to_owned(), vm)].into(), ..Observed::default() };
        let keeper = PlanKeeper::new(&config);
        let mut case =
            Self { desired: desired("4KiB"), observed, config, memory: Memory::default(), keeper, now: 0 };
        // The VMs have to be there for a while.
        assert_eq!(case.look(), None);
        case.now = 10_000;
        case
    }

    fn look(&mut self) -> Option<Request> {
        let request = self.keeper.update(Millis(self.now), &self.desired, &self.observed, None);
        self.observed.made = None;
        request
    }

    fn steps(&self) -> Vec<Step> {
        self.keeper.steps(&self.desired, &self.observed, &self.config, &self.memory, Millis(self.now))
    }

    fn actions(&self) -> Vec<Action> {
        self.steps().into_iter().map(|step| step.action).collect()
    }

    /// A plan is asked for, and made.
    fn made(&mut self, change: Change) {
        let request = self.look().unwrap();
        let plan = MadePlan {
            outline: outline(change),
            changes: Vec::new(),
            reasons: Vec::new(),
            predictions: vec![prediction()],
        };
        self.observed.made = Some((request.number, Ok(plan)));
        assert_eq!(self.look(), None);
    }

    /// The step is carried out, and found in force.
    fn carried_out(&mut self) {
        let step = self.steps().remove(0);
        assert_eq!(step.action, Action::SetPlan);
        self.keeper.note(&step, &DONE, Millis(self.now));
        self.observed.plan = Some(PlanScope {
            basis: self.keeper.replan.basis().cloned(),
            state: ScopeState::Whole,
            drift: Vec::new(),
            lost: Vec::new(),
            yielded: BTreeSet::new(),
            reason: step.reason,
            since: String::new(),
            devices: BTreeSet::new(),
            predictions: Vec::new(),
        });
        assert_eq!(self.look(), None);
        assert_eq!(self.steps(), []);
    }

    fn scope(&mut self) -> &mut PlanScope {
        self.observed.plan.as_mut().unwrap()
    }

    fn snapshot(&self) -> Option<PlanSnapshot> {
        self.keeper.snapshot(&self.desired, &self.observed, &self.config, &self.memory)
    }

    fn states(&self) -> Vec<(String, EventKind, String)> {
        self.keeper.states(&self.desired, &self.observed, &self.config, &self.memory).collect()
    }

    fn state(&self) -> PlanState {
        self.snapshot().unwrap().state
    }
}

const BACK: Action = Action::PutBack { force: true };

#[test]
fn contracts_lead_to_a_plan_and_their_end_puts_it_back() {
    let mut case = Case::new(Mode::Auto);
    assert_eq!((case.steps(), case.state()), (Vec::new(), PlanState::Off));
    case.made(Change::Better);
    assert_eq!((case.actions(), case.state()), (vec![Action::SetPlan], PlanState::Pending));
    case.carried_out();
    assert_eq!(case.state(), PlanState::InForce);
    // A file with a mistake leaves it.
    case.desired.plant = None;
    case.desired.held = vec!["plc".to_owned()];
    assert_eq!((case.look(), case.actions()), (None, Vec::new()));
    case.desired.held.clear();
    assert_eq!((case.look(), case.actions()), (None, vec![BACK]));
    // So does the end of `[plan]`.
    case.desired = desired("4KiB");
    assert_eq!(case.actions(), []);
    case.config.plan = None;
    assert_eq!(case.actions(), [BACK]);
    case.observed.plan = None;
    assert_eq!(case.actions(), []);
    assert_eq!(case.snapshot(), None);
}

#[test]
fn other_contracts_are_another_plan_and_the_old_one_stays_until_then() {
    let mut case = Case::new(Mode::Auto);
    case.made(Change::Better);
    case.carried_out();
    case.desired = desired("8KiB");
    case.made(Change::Better);
    assert_eq!(case.actions(), [Action::SetPlan]);
    case.carried_out();
    assert_eq!(case.keeper.replan.basis().unwrap().contract, "8KiB");
}

#[test]
fn it_waits_where_it_is_asked_for_and_where_it_would_hurt() {
    for (mode, change) in [(Mode::Ask, Change::Better), (Mode::Auto, Change::Worse)] {
        let mut case = Case::new(mode);
        case.made(change);
        assert_eq!((case.actions(), case.state()), (Vec::new(), PlanState::Waiting));
        let states = case.states();
        assert!(states.len() == 1 && states[0].1 == EventKind::Waiting, "{states:?}");
        let name = case.keeper.waiting(&case.config, &case.memory).unwrap().name();
        case.memory.accept(PLAN, &name);
        assert_eq!(case.actions(), [Action::SetPlan]);
        case.carried_out();
        // What was accepted is kept: a service that begins anew asks no more.
        let (memory, config) = (case.memory.clone(), case.config.clone());
        let mut anew = Case { memory, config, ..Case::new(mode) };
        anew.made(change);
        assert_eq!(anew.actions(), [Action::SetPlan]);
    }
    let mut case = Case::new(Mode::Ask);
    case.made(Change::Better);
    assert!(case.keeper.refuse() && !case.keeper.refuse());
    case.now += 86_400_000;
    assert_eq!((case.look(), case.actions()), (None, Vec::new()));
    let mut case = Case::new(Mode::Observe);
    case.made(Change::Better);
    assert_eq!((case.actions(), case.state()), (Vec::new(), PlanState::WouldApply));
    assert!(case.keeper.waiting(&case.config, &case.memory).is_none());
}

#[test]
fn a_plan_that_cannot_be_made_or_set_is_tried_again_later() {
    let mut case = Case::new(Mode::Auto);
    let request = case.look().unwrap();
    case.observed.made = Some((request.number, Err(NoPlan::Whole("no host".to_owned()))));
    assert_eq!((case.look(), case.state()), (None, PlanState::Failed));
    case.now += 60_000;
    case.made(Change::Better);
    let step = case.steps().remove(0);
    case.keeper.note(&step, &Outcome::Failed("the kernel refuses it".to_owned()), Millis(case.now));
    assert_eq!((case.look(), case.actions(), case.state()), (None, Vec::new(), PlanState::Failed));
    case.now += 600_000;
    case.made(Change::Better);
    // Another rtvirtio at work is no failure.
    let step = case.steps().remove(0);
    case.keeper.note(&step, &Outcome::Busy, Millis(case.now));
    assert_eq!(case.steps(), [step]);
}

#[test]
fn a_cut_a_reboot_and_what_cannot_be_read() {
    for state in [ScopeState::Cut, ScopeState::Rebooted] {
        let mut case = Case::new(Mode::Auto);
        case.made(Change::Better);
        case.carried_out();
        case.scope().state = state;
        assert_eq!(case.actions(), [BACK]);
        // Put back, it is made anew.
        case.observed.plan = None;
        case.now += 15_000;
        assert!(case.look().is_some());
    }
    let mut case = Case::new(Mode::Auto);
    case.made(Change::Better);
    case.carried_out();
    case.scope().state = ScopeState::Unusable("damaged".to_owned());
    assert_eq!((case.actions(), case.state()), (Vec::new(), PlanState::Failed));
}

#[test]
fn each_policy_about_drift_of_each_kind_of_setting() {
    let drift = |class, path: &str| Drift {
        knob: "k".to_owned(),
        path: path.to_owned(),
        class,
        wanted: "1".to_owned(),
        found: "2".to_owned(),
    };
    let mut case = Case::new(Mode::Auto);
    case.made(Change::Better);
    case.carried_out();
    for class in [KnobClass::Weight, KnobClass::Limit, KnobClass::Elevator] {
        case.scope().drift = vec![drift(class, "/x")];
        case.config.drift = BTreeMap::new();
        assert_eq!(case.actions(), [Action::Restore { paths: vec!["/x".to_owned()] }]);
        case.config.drift = BTreeMap::from([(class, DriftPolicy::Report)]);
        assert_eq!((case.actions(), case.state()), (Vec::new(), PlanState::Drift));
        case.config.drift = BTreeMap::from([(class, DriftPolicy::Yield)]);
        assert_eq!(case.actions(), [Action::Release { paths: vec!["/x".to_owned()] }]);
    }
    // What is gone cannot be set again.
    let changed = std::mem::take(&mut case.scope().drift);
    case.scope().lost = vec!["limit of plc is gone".to_owned()];
    assert_eq!((case.actions(), case.state()), (Vec::new(), PlanState::Drift));
    assert_eq!(case.snapshot().unwrap().why.as_deref(), Some("limit of plc is gone"));
    (case.scope().drift, case.scope().lost) = (changed, Vec::new());
    // A restart is not left to wait for it.
    case.observed.vms.get_mut("plc").unwrap().lacks_held = true;
    assert_eq!(case.actions()[0], Action::RenewHeld);
    case.observed.vms.get_mut("plc").unwrap().presence = Presence::Off("shut off".to_owned());
    assert!(!case.actions().contains(&Action::RenewHeld));
}

#[test]
fn a_vm_that_cannot_be_renewed_holds_up_no_other_plan() {
    let mut case = Case::new(Mode::Auto);
    case.made(Change::Better);
    case.carried_out();
    case.observed.vms.get_mut("plc").unwrap().lacks_held = true;
    case.desired = desired("8KiB");
    case.made(Change::Better);
    assert_eq!(case.actions(), [Action::RenewHeld]);
    let renewal = case.steps().remove(0);
    case.memory.note(&renewal, &Outcome::NotYet, Millis(case.now));
    assert_eq!(case.actions(), [Action::RenewHeld]);
    case.memory.note(&renewal, &Outcome::Failed("its device is gone".to_owned()), Millis(case.now));
    assert_eq!(case.actions(), [Action::SetPlan]);
}

/// Two controllers, each with a disk of its own.
fn two_devices() -> Case {
    let text = "[[device]]\nname = \"a\"\npath = \"/dev/sdz\"\n[[device]]\nname = \"b\"\npath = \"/dev/sdy\"\n".to_owned()
        + &["plc a 7", "hist b 8"].map(|line| {
            let [vm, device, pid] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
            format!(
                "[[vm]]\nname = \"{vm}\"\npid = {pid}\ndevice = \"{device}\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n\
                 rate = \"100/s\"\ntarget = {{ latency = \"9ms\" }}\n"
            )
        }).concat();
    let spec = HostSpec::parse("x.toml", &text).unwrap();
    let contracts = Contract::of_spec(&spec, Path::new("x.toml"));
    let plant = PlannedHost { id: "two".to_owned(), host: spec };
    let mut case = Case::new(Mode::Auto);
    case.desired = Desired { contracts, plant: Some(plant), ..Desired::default() };
    let hist = Presence::Running(vec![ProcessId { pid: 8, start_time: 1 }]);
    case.observed.vms.insert("hist".to_owned(), ObservedVm { presence: hist, ..ObservedVm::off("") });
    assert_eq!(case.look(), None);
    case.now += 10_000;
    case
}

fn no_profile(device: &str) -> BTreeMap<String, Unplanned> {
    let why = "the device has not been measured".to_owned();
    let remedy = Some(format!("rtvirtio profile {device}"));
    [(device.to_owned(), Unplanned { why, remedy })].into()
}

#[test]
fn a_device_without_a_profile_is_not_in_the_way_of_the_others() {
    let mut case = two_devices();
    case.observed.unmeasured = no_profile("/dev/sdy");
    case.made(Change::Better);
    let asked = case.keeper.replan.proposal().unwrap().request.input.without.clone();
    assert_eq!(asked, BTreeSet::from(["/dev/sdy".to_owned()]));
    case.carried_out();
    case.scope().devices = ["/dev/sdz".to_owned()].into();
    let shown = case.snapshot().unwrap();
    assert_eq!(
        (shown.state, shown.is_whole(), shown.vms.as_slice()),
        (PlanState::Partial, false, &["plc".to_owned()][..])
    );
    assert_eq!(shown.assumes, None, "what is left out is no assumption");
    let [one] = shown.unplanned.as_slice() else { panic!("{shown:?}") };
    assert_eq!((one.vms.as_slice(), one.is_held), (&["hist".to_owned()][..], false));
    assert!(one.message().contains("`rtvirtio profile /dev/sdy`"), "{}", one.message());
    assert!(case.states().iter().any(|(_, kind, text)| *kind == EventKind::Failed && *text == one.message()));
    // Whatever else is in force for its VM, its contract is not as it should be.
    let all = crate::Snapshot::build(&case.desired, &case.observed, &case.config, &case.memory)
        .with_plan(Some(shown));
    let state = |vm: &str| all.vms.iter().find(|one| one.name == vm).unwrap().state;
    assert_eq!((state("plc"), state("hist")), (crate::VmState::Observed, crate::VmState::Unplanned));
    assert!(!all.is_whole());
    // A target that was never promised is no miss of the plan's.
    let missed =
        |task: &str| Observations { missed: [(task.to_owned(), true)].into(), ..Observations::default() };
    let seen = |case: &Case, task: &str| {
        let sight = missed(task);
        planned_part(&sight, &case.keeper.replan.unplanned(), &case.desired).missed.len()
    };
    assert_eq!((seen(&case, "hist/t"), seen(&case, "plc/t")), (0, 1));
    // Its profile arrives.
    case.observed.unmeasured.clear();
    case.now += 10_000;
    case.made(Change::Better);
    assert_eq!(case.actions(), [Action::SetPlan]);
    case.carried_out();
    assert_eq!((case.state(), case.snapshot().unwrap().vms.len()), (PlanState::InForce, 2));
}

#[test]
fn a_profile_that_vanishes_changes_nothing_and_is_said() {
    let mut case = two_devices();
    case.made(Change::Better);
    case.carried_out();
    case.scope().devices = ["/dev/sdz".to_owned(), "/dev/sdy".to_owned()].into();
    case.observed.unmeasured = no_profile("/dev/sdy");
    case.now += 10_000;
    // What is held stays: there is nothing to change, and nothing to ask for.
    let request = case.look().unwrap();
    assert_eq!(request.reason, "/dev/sdy cannot be planned");
    let same = Outline { changes: 0, effects: Vec::new(), given_up: BTreeSet::new() };
    let made =
        MadePlan { outline: same, changes: Vec::new(), reasons: Vec::new(), predictions: vec![prediction()] };
    case.observed.made = Some((request.number, Ok(made)));
    assert_eq!((case.look(), case.actions()), (None, vec![Action::SetPlan]));
    let devices = case.scope().devices.clone();
    case.carried_out();
    case.scope().devices = devices;
    let shown = case.snapshot().unwrap();
    assert_eq!((shown.state, shown.vms.len(), shown.unplanned[0].is_held), (PlanState::Partial, 2, true));
    assert!(shown.unplanned[0].message().contains("stays"), "{}", shown.unplanned[0].message());
}

/// A plan without settings has no journal; its predictions are shown until it is put back.
#[test]
fn a_plan_without_a_setting_predicts_too() {
    let mut case = Case::new(Mode::Auto);
    case.made(Change::Better);
    assert!(case.snapshot().unwrap().predictions.is_empty(), "not in force yet");
    let step = case.steps().remove(0);
    case.keeper.note(&step, &DONE, Millis(case.now));
    let shown = case.snapshot().unwrap();
    assert_eq!((shown.state, shown.predictions), (PlanState::InForce, vec![prediction()]));
}

#[test]
fn a_device_in_the_way_of_a_plan_is_named_and_the_rest_is_planned() {
    let mut case = two_devices();
    let request = case.look().unwrap();
    let gone = Unplanned { why: "hist does not answer".to_owned(), remedy: None };
    case.observed.made = Some((request.number, Err(NoPlan::Devices([("/dev/sdy".to_owned(), gone)].into()))));
    let next = case.look().unwrap();
    assert_eq!((next.number > request.number, next.input.without.len()), (true, 1));
    let shown = case.snapshot().unwrap();
    assert_eq!(
        (shown.unplanned[0].why.as_str(), shown.unplanned[0].remedy.as_ref()),
        ("hist does not answer", None)
    );
}

#[test]
fn what_a_plan_does_without_is_shown_and_reported() {
    let mut case = Case::new(Mode::Auto);
    case.observed.plan_warnings = vec!["sdz does not offer BFQ".to_owned()];
    case.made(Change::Better);
    case.carried_out();
    assert_eq!(case.snapshot().unwrap().warnings, ["sdz does not offer BFQ"]);
    let of_warnings = |case: &Case| case.states().into_iter().filter(|s| s.0.starts_with("plan warning"));
    let said: Vec<_> = of_warnings(&case).collect();
    assert_eq!(said.len(), 1, "{said:?}");
    assert_eq!((said[0].1, said[0].2.as_str()), (EventKind::Note, "planning: sdz does not offer BFQ"));
    // Without contracts there is nothing that would be planned.
    case.desired.plant = None;
    assert_eq!(of_warnings(&case).count(), 0);
}

#[test]
fn nothing_is_planned_before_it_is_known_which_vms_run() {
    let mut case = Case::new(Mode::Auto);
    let unknown = Presence::Unknown(crate::observed::LOOKED_FOR.to_owned());
    case.observed.vms.insert("hist".to_owned(), ObservedVm { presence: unknown, ..ObservedVm::off("") });
    assert_eq!(case.look(), None);
    case.observed.vms.insert("hist".to_owned(), ObservedVm::off("shut off"));
    assert_eq!(case.look().unwrap().input.vms.len(), 1);
}
