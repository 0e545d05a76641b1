//! vCPUs whose announced timers are due are raised without a new report. Only CPU time above the
//! floor is charged to their budgets.

use rtvirtio_units::Nanos;
use rtvirtio_urgency::{Change, Config, GuestPolicy, Level, Reason, Report, Usage, Vcpu, VcpuSample};

/// A thread's CPU time, as the kernel counts it: each use is returned once.
#[derive(Default)]
struct CpuTime {
    ran: u64,
    asked: u64,
}

impl CpuTime {
    fn used_since(&mut self) -> Option<Usage> {
        let ran = Nanos(self.ran - self.asked);
        self.asked = self.ran;
        Some(Usage { ran, waited: Nanos(0) })
    }
}

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

/// A real-time floor of 0 and a ceiling of 90, with the default budgets: 500 ms in each second.
fn config() -> Config {
    Config::new(90, 0, 0)
}

/// Lets the guest report at `now`.
fn says(vcpu: &mut Vcpu, time: &mut CpuTime, report: Report, now: u64) {
    let ran = time.used_since().unwrap().ran;
    vcpu.observe(VcpuSample { report: Some(report), is_new: true, alive: true, ran }, Nanos(now));
}

fn ordinary_until(deadline: u64) -> Report {
    Report { deadline: Some(Nanos(deadline)), ..Report::default() }
}

fn task() -> Report {
    Report { policy: GuestPolicy::Fifo, priority: 80, ..Report::default() }
}

/// A vCPU at its floor that has announced a timer.
fn at_floor(deadline: u64) -> (Vcpu, CpuTime) {
    let (mut vcpu, mut time) = (Vcpu::new(config(), Nanos(0)), CpuTime::default());
    says(&mut vcpu, &mut time, ordinary_until(deadline), 100 * US);
    assert_eq!((vcpu.level(), vcpu.reason()), (Level::ORDINARY, Reason::Floor));
    (vcpu, time)
}

#[test]
fn a_due_timer_raises_without_a_report() {
    let (mut vcpu, mut time) = at_floor(3 * MS);
    time.ran += 2 * MS;
    let due = vcpu.timer_due().unwrap();
    assert_eq!(due, Nanos(3 * MS - 50 * US), "as early as the lead says");
    let mut asked = 0;
    let mut used_since = || {
        asked += 1;
        time.used_since()
    };
    assert_eq!(vcpu.raise_due(Nanos(due.0 - 1), &mut used_since), None);
    assert_eq!(vcpu.reason(), Reason::Floor, "not a moment before");
    let used = vcpu.raise_due(due, &mut used_since).unwrap();
    assert_eq!((used.ran, vcpu.level(), vcpu.reason()), (Nanos(2 * MS), Level::fifo(90), Reason::Timer));
    // A vCPU that is raised already is not queried again.
    assert_eq!(vcpu.raise_due(Nanos(due.0 + 1), &mut used_since), None);
    assert_eq!((asked, vcpu.counters().promotions), (1, 1));
    // A new lead applies at once; a thread that has ended is left for the observation.
    let (mut vcpu, _) = at_floor(3 * MS);
    vcpu.set_lead(Nanos(150 * US));
    assert_eq!(vcpu.raise_due(Nanos(3 * MS - 150 * US), || None), None);
    assert_eq!(vcpu.reason(), Reason::Floor);
    // A vCPU that has announced nothing is not raised.
    let (mut vcpu, mut time) = (Vcpu::new(config(), Nanos(0)), CpuTime::default());
    says(&mut vcpu, &mut time, Report::default(), 100 * US);
    assert_eq!(vcpu.raise_due(Nanos(500 * MS), || time.used_since()), None);
}

/// A task each millisecond, and a job that takes all the rest at the floor: were that charged, the
/// budget would be used up after half a second, and the task would wait for the next one.
#[test]
fn time_at_the_floor_is_on_no_budget() {
    let (mut vcpu, mut time) = (Vcpu::new(config(), Nanos(0)), CpuTime::default());
    let left = config().task_budget.0;
    let cycles = 900;
    let mut raised = 0;
    for cycle in 1..=cycles {
        let due = cycle * MS;
        says(&mut vcpu, &mut time, ordinary_until(due), due - 900 * US);
        assert_eq!(vcpu.reason(), Reason::Floor, "cycle {cycle}");
        time.ran += 850 * US;
        vcpu.raise_due(Nanos(due - 50 * US), || time.used_since());
        assert_eq!(vcpu.reason(), Reason::Timer, "cycle {cycle}: late for its timer");
        // The job goes on until the timer fires, then the task runs.
        time.ran += 60 * US;
        says(&mut vcpu, &mut time, task(), due + 10 * US);
        assert_eq!(vcpu.reason(), Reason::Task, "cycle {cycle}");
        time.ran += 40 * US;
        raised += 100 * US;
        says(&mut vcpu, &mut time, Report::default(), due + 50 * US);
    }
    let counters = vcpu.counters();
    assert_eq!((counters.boosted.0, counters.exhausted, counters.promotions), (raised, 0, cycles));
    let promotions = cycles * config().promotion_cost.0;
    assert_eq!(vcpu.left().0, Nanos(left - raised - promotions));
}

/// The state machine raises it at once, its thread only when the journal is free.
#[test]
fn nor_is_time_in_which_the_thread_waits_to_be_raised() {
    let (mut vcpu, mut time) = at_floor(3 * MS);
    vcpu.raise_due(Nanos(3 * MS), || time.used_since());
    assert!(vcpu.is_boosted() && !vcpu.is_boosted_at(Level::ORDINARY));
    assert!(vcpu.is_boosted_at(Level::fifo(90)));
    let floor = Config::new(90, 20, 0);
    let mut vcpu = Vcpu::new(floor, Nanos(0));
    says(&mut vcpu, &mut time, task(), MS);
    assert!(!vcpu.is_boosted_at(Level::fifo(20)) && vcpu.is_boosted_at(Level::fifo(21)));
}

#[test]
fn nothing_is_raised_while_the_budget_is_spent() {
    let (mut vcpu, mut time) = (Vcpu::new(config(), Nanos(0)), CpuTime::default());
    says(&mut vcpu, &mut time, task(), MS);
    time.ran += 500 * MS;
    says(&mut vcpu, &mut time, ordinary_until(600 * MS), 502 * MS);
    assert_eq!((vcpu.reason(), vcpu.left().0), (Reason::Floor, Nanos(0)));
    let promotions = vcpu.counters().promotions;
    time.ran += 7 * MS;
    let used = vcpu.raise_due(Nanos(600 * MS), || time.used_since());
    assert_eq!(used.map(|used| used.ran), Some(Nanos(7 * MS)), "of the floor all the same");
    assert_eq!((vcpu.level(), vcpu.reason()), (Level::ORDINARY, Reason::Exhausted));
    assert_eq!(vcpu.raise_due(Nanos(601 * MS), || panic!("asked again")), None);
    assert_eq!((vcpu.counters().promotions, vcpu.counters().exhausted), (promotions, 1));
    // With the next period's budget the next timer raises it.
    says(&mut vcpu, &mut time, ordinary_until(1002 * MS), 1001 * MS);
    vcpu.raise_due(Nanos(1002 * MS), || time.used_since());
    assert_eq!(vcpu.reason(), Reason::Timer);
}

#[test]
fn all_that_are_due_are_raised_before_another_is_lowered() {
    let deadlines = [9 * MS, 4 * MS, 3 * MS];
    let mut all: Vec<(Vcpu, CpuTime)> = deadlines.into_iter().map(at_floor).collect();
    // A vCPU whose task has ended is the first.
    let (mut done, mut time) = (Vcpu::new(config(), Nanos(0)), CpuTime::default());
    says(&mut done, &mut time, task(), MS);
    all.insert(0, (done, time));
    let mut threads: Vec<Level> = all.iter().map(|(vcpu, _)| vcpu.level()).collect();
    let now = Nanos(4 * MS - 20 * US);
    for (vcpu, time) in &mut all {
        vcpu.raise_due(now, || time.used_since());
    }
    let reasons: Vec<Reason> = all.iter().map(|(vcpu, _)| vcpu.reason()).collect();
    assert_eq!(reasons, [Reason::Task, Reason::Floor, Reason::Timer, Reason::Timer]);
    let (vcpu, time) = &mut all[0];
    says(vcpu, time, Report::default(), now.0);
    let mut moves = Vec::new();
    for change in Change::IN_ORDER {
        for (at, (vcpu, _)) in all.iter().enumerate() {
            if Change::between(threads[at], vcpu.level()) == Some(change) {
                moves.push((at, change));
                threads[at] = vcpu.level();
            }
        }
    }
    assert_eq!(moves, [(2, Change::Raise), (3, Change::Raise), (0, Change::Lower)]);
    // Each is changed once, and only as its level requires.
    let in_turns = Level { round_robin: true, ..Level::fifo(90) };
    assert_eq!(Change::between(Level::fifo(90), Level::fifo(90)), None);
    assert_eq!(Change::between(Level::fifo(90), in_turns), Some(Change::Lower));
}
