use std::path::Path;

use rtvirtio_cpu::{Backend, Level};
use rtvirtio_kernel::ProcessId;
use rtvirtio_spec::HostSpec;

use super::*;
use crate::desired::Contract;
use crate::host::ScanDepth;
use crate::observed::{Admission, KnobClass, ObservedVm, Outside, ScopeState, ScopeView};

/// Host with a VM that runs without its contract; it tells whether it is at rest.
#[derive(Default)]
struct OneVm {
    now: u64,
    desired: Option<Desired>,
    rests: bool,
    fails: bool,
    applied: bool,
    looks: Vec<ScanDepth>,
}

impl Host for OneVm {
    fn now(&self) -> Millis {
        Millis(self.now)
    }

    fn desired(&mut self) -> Option<Desired> {
        self.desired.take()
    }

    fn rests(&mut self) -> bool {
        self.rests
    }

    fn observe(&mut self, _: &Desired, look: ScanDepth) -> Observed {
        self.looks.push(look);
        let presence = match self.applied {
            // Nothing more is to be done for a VM that is off.
            true => Presence::Off("it has ended".to_owned()),
            false => Presence::Running(vec![ProcessId { pid: 7, start_time: 1 }]),
        };
        Observed {
            vms: BTreeMap::from([("plc".to_owned(), ObservedVm { presence, ..ObservedVm::off("") })]),
            admission: Admission {
                admitted: BTreeMap::from([("plc".to_owned(), Level::ALONE)]),
                ..Admission::default()
            },
            ..Observed::default()
        }
    }

    fn perform(&mut self, _: &Step, _: &Desired) -> Outcome {
        if self.fails {
            return Outcome::Busy;
        }
        self.applied = true;
        Outcome::Done { changes: Vec::new(), notes: Vec::new() }
    }
}

fn contracts() -> Desired {
    let text = "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"plc\"\npid = 7\n\
                cpu = { budget = \"5ms\", period = \"20ms\" }\n[[vm.task]]\nname = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n";
    let spec = HostSpec::parse("x.toml", text).unwrap();
    Desired { contracts: Contract::of_spec(&spec, Path::new("/etc/x.toml")), ..Desired::default() }
}

/// Looks of the next pass, a scan later.
fn looks(daemon: &mut Daemon<OneVm>) -> Vec<ScanDepth> {
    daemon.host().now += 200;
    daemon.host().looks.clear();
    let _ = daemon.pass();
    daemon.host_ref().looks.clone()
}

#[test]
fn a_host_at_rest_is_left_alone_until_something_asks_for_a_look() {
    let host = OneVm { desired: Some(contracts()), rests: true, fails: true, ..OneVm::default() };
    let mut daemon = Daemon::new(host, Config::default(), Memory::default());
    assert_eq!(looks(&mut daemon), [ScanDepth::Compare], "the first look");
    assert_eq!(looks(&mut daemon), [ScanDepth::Scan], "a step is to be done");
    daemon.host().fails = false;
    assert_eq!(looks(&mut daemon), [ScanDepth::Scan, ScanDepth::Scan], "it is done, and looked at");
    assert_eq!((looks(&mut daemon), daemon.rested(), daemon.is_new()), (vec![], true, false));
    daemon.look_next();
    assert_eq!((looks(&mut daemon), daemon.rested()), (vec![ScanDepth::Scan], false), "it was asked for");
    assert_eq!(looks(&mut daemon), []);
    daemon.host().rests = false;
    assert_eq!(looks(&mut daemon), [ScanDepth::Scan], "something may have changed");
    daemon.host().rests = true;
    assert_eq!(looks(&mut daemon), []);
    daemon.host().desired = Some(contracts());
    assert_eq!(looks(&mut daemon), [ScanDepth::Scan], "contracts have changed");
    daemon.compare_next();
    assert_eq!(looks(&mut daemon), [ScanDepth::Compare]);
    daemon.host().now += 5_000;
    assert_eq!(looks(&mut daemon), [ScanDepth::Compare], "a comparison is due");
    assert_eq!(looks(&mut daemon), []);
}

#[test]
fn a_warning_of_the_planning_is_an_event_when_it_is_new() {
    let plan = Some(crate::config::PlanConfig::default());
    let mut daemon = Daemon::new(OneVm::default(), Config { plan, ..Config::default() }, Memory::default());
    let spec = "[device]\npath = \"/dev/sdz\"\n[[vm]]\nname = \"plc\"\npid = 7\n[[vm.task]]\n\
                name = \"t\"\nop = \"read\"\nblock = \"4KiB\"\n";
    let host = HostSpec::parse("x.toml", spec).unwrap();
    daemon.desired.plant = Some(crate::desired::PlannedHost { id: "x".to_owned(), host });
    let events = |daemon: &mut Daemon<OneVm>, warning: Option<&str>| -> Vec<String> {
        daemon.observed.plan_warnings = warning.into_iter().map(str::to_owned).collect();
        let mut out = Vec::new();
        daemon.notice(Millis(1), &mut out);
        out.into_iter().map(|event| event.text).collect()
    };
    assert_eq!(events(&mut daemon, Some("no BFQ")), ["planning: no BFQ"]);
    assert_eq!(events(&mut daemon, Some("no BFQ")), [""; 0], "the same again");
    assert_eq!(events(&mut daemon, None), [""; 0]);
    assert_eq!(events(&mut daemon, Some("no BFQ")), ["planning: no BFQ"], "it is back");
}

/// A VM that is kept and VMs without their contracts, on a host where a step takes long.
#[derive(Default)]
struct Many {
    now: u64,
    new: BTreeSet<String>,
    desired: Option<Desired>,
    /// Steps as they were carried out, by VM.
    done: Vec<String>,
    looks: usize,
    /// Policy of a thread of the VM that is kept, to which its budget is split anew.
    splits: Option<&'static str>,
}

const OLD: &str = "old";

impl Many {
    fn with(n: usize) -> Self {
        let new: BTreeSet<String> = (0..n).map(|i| format!("new{i:03}")).collect();
        let names = new.iter().map(String::as_str).chain([OLD]);
        let vms = names.enumerate().map(|(i, name)| {
            format!(
                "[[vm]]\nname = \"{name}\"\npid = {}\ncpu = {{ budget = \"1ms\", period = \"1s\" }}\n[[vm.task]]\nname = \"t\"\n\
                 op = \"read\"\nblock = \"4KiB\"\n",
                7 + i
            )
        });
        let text = format!("[device]\npath = \"/dev/sdz\"\n{}", vms.collect::<String>());
        let spec = HostSpec::parse("x.toml", &text).unwrap();
        let contracts = Contract::of_spec(&spec, Path::new("/etc/x.toml"));
        Self { new, desired: Some(Desired { contracts, ..Desired::default() }), ..Self::default() }
    }

    /// The scope of a VM whose contract is in force.
    fn scope(&self, desired: &Desired, name: &str) -> ScopeView {
        let drift = Drift {
            knob: "budget".to_owned(),
            path: "/sys/fs/cgroup/cpu/old/cpu.rt_runtime_us".to_owned(),
            class: KnobClass::Budget,
            wanted: "1".to_owned(),
            found: "2".to_owned(),
        };
        // Another program changes it while the first contracts are put in force.
        let is_changed = name == OLD && self.done.len() >= 2 && !self.done.iter().any(|vm| vm == OLD);
        ScopeView {
            contract: desired.contract_of(name).unwrap().id.clone(),
            start: vec![ProcessId { pid: 7, start_time: 1 }],
            start_alive: true,
            state: ScopeState::Whole,
            level: Some(Level::ALONE),
            cpu: Some(Backend::RtGroup),
            drift: if is_changed { vec![drift] } else { Vec::new() },
            lost: Vec::new(),
        }
    }
}

impl Host for Many {
    fn now(&self) -> Millis {
        Millis(self.now)
    }

    fn desired(&mut self) -> Option<Desired> {
        self.desired.take()
    }

    fn observe(&mut self, desired: &Desired, _: ScanDepth) -> Observed {
        self.looks += 1;
        let names = || self.new.iter().map(String::as_str).chain([OLD]);
        let one = |name: &str| {
            let is_in_force = name == OLD || self.done.iter().any(|vm| vm == name);
            let presence = Presence::Running(vec![ProcessId { pid: 7, start_time: 1 }]);
            let scope = is_in_force.then(|| self.scope(desired, name));
            let splits = self.splits.is_some() && name == OLD;
            (name.to_owned(), ObservedVm { presence, scope, splits, ..ObservedVm::off("") })
        };
        let admitted = names().map(|name| (name.to_owned(), Level::ALONE)).collect();
        let admission = Admission { admitted, ..Admission::default() };
        Observed { vms: names().map(one).collect(), admission, ..Observed::default() }
    }

    fn perform(&mut self, step: &Step, _: &Desired) -> Outcome {
        self.now += 200;
        self.done.push(step.vm.clone());
        let (knob, path) = ("budget of a thread".to_owned(), "/proc/7/task/8/sched".to_owned());
        let change = SettingChange { knob, path, old: self.splits.map(str::to_owned), new: "1".to_owned() };
        let changes = if step.action == Action::Split { vec![change] } else { Vec::new() };
        Outcome::Done { changes, notes: Vec::new() }
    }
}

#[test]
fn a_budget_that_is_split_anew_all_the_time_is_no_event() {
    let host = Many { splits: Some("deadline 1/2/2"), ..Many::with(0) };
    let mut daemon = Daemon::new(host, Config::default(), Memory::default());
    let events = daemon.pass();
    assert!(events.iter().all(|of| of.kind == EventKind::Appeared), "{events:?}");
    for _ in 0..10 {
        assert_eq!(daemon.pass(), []);
    }
    assert!(daemon.host_ref().done.len() > 10, "it was split each time");
    // Another program has taken the thread out.
    daemon.host().splits = Some("other nice 0");
    assert!(daemon.pass().iter().any(|of| of.kind == EventKind::Changed));
}

#[test]
fn a_caller_is_asked_between_the_first_look_and_each_step() {
    let mut daemon = Daemon::new(Many::with(3), Config::default(), Memory::default());
    let (mut out, mut seen) = (Vec::new(), Vec::new());
    loop {
        let goes_on = daemon.advance(&mut out);
        seen.push((daemon.host_ref().looks, daemon.host_ref().done.len()));
        if !goes_on {
            break;
        }
    }
    // The third step ends its time, and the look after it shows the change.
    assert_eq!(seen[..4], [(1, 0), (1, 1), (1, 2), (2, 3)], "{seen:?}");
}

#[test]
fn many_new_contracts_hold_up_no_contract_that_is_in_force() {
    let mut daemon = Daemon::new(Many::with(60), Config::default(), Memory::default());
    daemon.pass();
    let first = daemon.host_ref().done.len();
    assert!((1..10).contains(&first) && daemon.has_more(), "{first} of 60");
    daemon.pass();
    let done = &daemon.host_ref().done;
    assert_eq!(done[first], OLD, "{done:?}");
    while daemon.has_more() {
        daemon.pass();
    }
    let all: BTreeSet<&String> = daemon.host_ref().done.iter().collect();
    assert_eq!((all.len(), daemon.host_ref().done.len()), (61, 61), "each once");
}

#[test]
fn a_state_that_is_too_old_is_not_known_and_never_in_force() {
    let mut daemon = Daemon::new(Many::with(1), Config::default(), Memory::default());
    while {
        daemon.pass();
        daemon.has_more()
    } {}
    let limit = std::time::Duration::from_secs(10);
    let aged = |s: u64| daemon.snapshot().aged(Some(std::time::Duration::from_secs(s)), limit);
    let states = |s| aged(s).vms.iter().map(|vm| vm.state).collect::<Vec<_>>();
    assert_eq!(states(10), [crate::VmState::InForce; 2]);
    assert!(aged(10).is_whole() && aged(10).vms[0].looked_s == Some(10.0));
    assert_eq!(states(11), [crate::VmState::Unknown; 2]);
    let old = aged(11);
    assert!(!old.is_whole() && old.problems[0].contains("was last checked 11 s ago"), "{old:?}");
    assert_eq!(old.vms[0].why.as_deref(), Some("last checked 11 s ago"));
    let never = daemon.snapshot().aged(None, limit);
    assert_eq!(never.vms[0].looked_s, None);
}

#[test]
fn a_failure_of_a_vm_that_is_gone_keeps_nobody_awake() {
    let mut daemon = Daemon::new(Many::with(1), Config::default(), Memory::default());
    daemon.pass();
    for vm in ["removed", OLD, APPLIED, PLAN] {
        let step = crate::reconcile::step(vm, Action::Apply, "");
        daemon.memory.note(&step, &Outcome::Failed("no".to_owned()), Millis(0));
    }
    daemon.pass();
    let failed = |vm: &str| daemon.memory.failure(vm).is_some();
    assert_eq!(["removed", OLD, APPLIED, PLAN].map(failed), [false, true, false, false]);
    daemon.memory.forget(OLD);
    for _ in 0..3 {
        daemon.pass();
    }
    assert!(daemon.is_settled);
}

#[test]
fn what_is_not_known_to_be_in_force_is_not_shown_as_such() {
    let mut daemon = Daemon::new(Many::with(1), Config::default(), Memory::default());
    while {
        daemon.pass();
        daemon.has_more()
    } {}
    let old = |daemon: &Daemon<Many>| {
        daemon.snapshot().vms.into_iter().find(|vm| vm.name == OLD).map(|vm| (vm.state, vm.why)).unwrap()
    };
    assert_eq!(old(&daemon), (crate::VmState::InForce, None));
    daemon.observed.vms.get_mut(OLD).and_then(|vm| vm.scope.as_mut()).unwrap().cpu = Some(Backend::Throttle);
    let hint = "its CPU contract is a hint only, by priorities: nothing keeps its budget".to_owned();
    assert_eq!(old(&daemon), (crate::VmState::InForce, Some(hint)));
    let lost: Vec<String> = (0..5).map(|i| format!("limit {i} is gone")).collect();
    daemon.observed.vms.get_mut(OLD).and_then(|vm| vm.scope.as_mut()).unwrap().lost = lost;
    let why = "limit 0 is gone; limit 1 is gone; limit 2 is gone; and 2 more".to_owned();
    assert_eq!(old(&daemon), (crate::VmState::Drift, Some(why)));
    assert!(!daemon.snapshot().is_whole());
}

/// A VM with many threads, of which a step takes some in, and one that is kept.
#[derive(Default)]
struct ManyThreads {
    now: u64,
    desired: Option<Desired>,
    outside: usize,
    is_applied: bool,
    /// Steps as they were carried out.
    done: Vec<(String, Action)>,
}

const BIG: &str = "big";

impl ManyThreads {
    const PIECE: usize = 100;

    fn vms(&self, desired: &Desired) -> BTreeMap<String, ObservedVm> {
        let presence = || Presence::Running(vec![ProcessId { pid: 7, start_time: 1 }]);
        let scope = |name: &str, drift: Vec<Drift>| ScopeView {
            contract: desired.contract_of(name).unwrap().id.clone(),
            start: vec![ProcessId { pid: 7, start_time: 1 }],
            start_alive: true,
            state: ScopeState::Whole,
            level: Some(Level::ALONE),
            cpu: Some(Backend::RtGroup),
            drift,
            lost: Vec::new(),
        };
        let drift = Drift {
            knob: "budget".to_owned(),
            path: "/sys/fs/cgroup/cpu/old/cpu.rt_runtime_us".to_owned(),
            class: KnobClass::Budget,
            wanted: "1".to_owned(),
            found: "2".to_owned(),
        };
        // Another program changes the neighbour's budget after the first pieces.
        let is_changed = self.done.len() >= 3 && !self.done.iter().any(|(vm, _)| vm == OLD);
        let outside = if self.outside > 0 { Outside::Threads(self.outside) } else { Outside::None };
        let big = ObservedVm {
            presence: presence(),
            scope: self.is_applied.then(|| scope(BIG, Vec::new())),
            new_threads: self.is_applied && self.outside > 0,
            outside: if self.is_applied { outside } else { Outside::None },
            ..ObservedVm::off("")
        };
        let old = scope(OLD, if is_changed { vec![drift] } else { Vec::new() });
        let old = ObservedVm { presence: presence(), scope: Some(old), ..ObservedVm::off("") };
        BTreeMap::from([(BIG.to_owned(), big), (OLD.to_owned(), old)])
    }
}

impl Host for ManyThreads {
    fn now(&self) -> Millis {
        Millis(self.now)
    }

    fn desired(&mut self) -> Option<Desired> {
        self.desired.take()
    }

    fn observe(&mut self, desired: &Desired, _: ScanDepth) -> Observed {
        let admitted = [BIG, OLD].map(|name| (name.to_owned(), Level::ALONE)).into();
        let admission = Admission { admitted, ..Admission::default() };
        Observed { vms: self.vms(desired), admission, ..Observed::default() }
    }

    fn perform(&mut self, step: &Step, _: &Desired) -> Outcome {
        self.now += 100;
        if step.vm == BIG {
            self.is_applied = true;
            self.outside = self.outside.saturating_sub(Self::PIECE);
        }
        self.done.push((step.vm.clone(), step.action.clone()));
        Outcome::Done { changes: Vec::new(), notes: Vec::new() }
    }

    fn rest(&self, step: &Step) -> Option<Step> {
        (step.vm == BIG && self.outside > 0).then(|| crate::reconcile::step(BIG, Action::TakeIn, "more"))
    }
}

#[test]
fn a_vm_of_thousands_of_threads_is_set_in_pieces_between_which_others_are_kept() {
    let vm = |name: &str| {
        format!(
            "[[vm]]\nname = \"{name}\"\npid = {}\ncpu = {{ budget = \"1ms\", period = \"1s\" }}\n[[vm.task]]\nname = \"t\"\n\
             op = \"read\"\nblock = \"4KiB\"\n",
            name.len()
        )
    };
    let old = vm(OLD).replace("pid = 3", "pid = 8");
    let spec =
        HostSpec::parse("x.toml", &format!("[device]\npath = \"/dev/sdz\"\n{}{old}", vm(BIG))).unwrap();
    let contracts = Contract::of_spec(&spec, Path::new("/etc/x.toml"));
    let desired = Some(Desired { contracts, ..Desired::default() });
    let host = ManyThreads { desired, outside: 5_000, ..ManyThreads::default() };
    let mut daemon = Daemon::new(host, Config::default(), Memory::default());
    let (mut out, mut asked) = (Vec::new(), 0);
    loop {
        let goes_on = daemon.advance(&mut out);
        asked += 1;
        let (outside, shown) = (daemon.host_ref().outside, daemon.snapshot());
        let big = shown.vms.iter().find(|vm| vm.name == BIG).unwrap();
        if outside > 0 {
            assert_eq!(big.state, crate::VmState::Pending, "{outside} threads are outside");
        }
        if asked > 10 && outside > 0 {
            assert!(big.why.as_ref().is_some_and(|why| why.contains("threads are still outside")), "{big:?}");
        }
        if !goes_on && !daemon.has_more() {
            break;
        }
    }
    let done = &daemon.host_ref().done;
    let pieces = done.iter().filter(|(vm, _)| vm == BIG).count();
    assert_eq!((pieces, &done[0].1), (50, &Action::Apply), "{done:?}");
    // A caller is asked after each of them, and half a second of pieces is the longest wait.
    assert!(asked >= 51, "{asked}");
    let kept = done.iter().position(|(vm, _)| vm == OLD);
    assert!(kept.is_some_and(|at| at <= 3 + 5), "{done:?}");
    assert!(daemon.snapshot().is_whole());
}
