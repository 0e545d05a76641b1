use std::collections::BTreeMap;
use std::path::Path;

use rtvirtio_kernel::ProcessId;
use rtvirtio_planner::replan::{Change, Effect, Outline};
use rtvirtio_spec::{Criticality, HostSpec};

use super::super::snapshot::PlanState;
use super::*;
use crate::config::PlanConfig;
use crate::desired::{Contract, Plant};
use crate::observed::{Drift, KnobClass, ObservedVm, PlanScope};

const DONE: Outcome = Outcome::Done { changes: Vec::new(), notes: Vec::new() };

fn desired(block: &str) -> Desired {
    let text = format!(
        "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"plc\"\npid = 7\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"{block}\"\nrate = \"100/s\"\n"
    );
    let spec = HostSpec::parse("x.toml", &text).unwrap();
    let contracts = Contract::of_spec(&spec, Path::new("x.toml"));
    Desired { contracts, plant: Some(Plant { id: block.to_owned(), host: spec }), ..Desired::default() }
}

fn outline(change: Change) -> Outline {
    let effect = Effect { vm: "plc".to_owned(), criticality: Criticality::Medium, change };
    Outline { changes: 1, effects: vec![effect], given_up: BTreeSet::new() }
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
        let request = self.keeper.look(Millis(self.now), &self.desired, &self.observed, None);
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
        let plan = MadePlan { outline: outline(change), changes: Vec::new(), reasons: Vec::new() };
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
            yielded: BTreeSet::new(),
            reason: step.reason,
            since: String::new(),
        });
        assert_eq!(self.look(), None);
        assert_eq!(self.steps(), []);
    }

    fn scope(&mut self) -> &mut PlanScope {
        self.observed.plan.as_mut().unwrap()
    }

    fn state(&self) -> PlanState {
        self.keeper.snapshot(&self.observed, &self.config, &self.memory).unwrap().state
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
    assert_eq!(case.keeper.snapshot(&case.observed, &case.config, &case.memory), None);
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
        let states: Vec<_> = case.keeper.states(&case.config, &case.memory).collect();
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
    case.observed.made = Some((request.number, Err("no profile".to_owned())));
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
    // A restart is not left to wait for it.
    case.observed.vms.get_mut("plc").unwrap().lacks_held = true;
    assert_eq!(case.actions()[0], Action::RenewHeld);
    case.observed.vms.get_mut("plc").unwrap().presence = Presence::Off("shut off".to_owned());
    assert!(!case.actions().contains(&Action::RenewHeld));
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
