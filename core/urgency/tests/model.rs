//! The state machine against a reference that keeps the whole history and computes each answer
//! from it anew; by random histories, and by all short ones over a small alphabet.

use proptest::prelude::*;
use rtvirtio_units::Nanos;
use rtvirtio_urgency::{Config, GuestPolicy, Interrupt, Level, Reason, Report, Vcpu, VcpuSample};

#[derive(Clone, Copy, Debug)]
enum Event {
    VcpuSample(VcpuSample),
    Interrupt(Interrupt),
    Completion,
    KvmInterrupt,
    Lead(Nanos),
    Answer(Nanos),
    End,
}

struct Entry {
    now: Nanos,
    event: Event,
    level: Level,
    reason: Reason,
}

/// The contract in the simplest form: every answer from the list of all events.
struct Reference {
    config: Config,
    start: Nanos,
    history: Vec<Entry>,
}

/// The paper's mapping of a reported priority.
fn mapped(report: &Report, config: &Config) -> u32 {
    let priority = f64::from(report.priority.min(99)) * f64::from(config.ceiling) / 99.0;
    match report.policy {
        GuestPolicy::Other => 0,
        _ => (priority + 1e-9).floor().max(1.0) as u32,
    }
}

impl Reference {
    fn before(&self, at: usize) -> (Level, Reason) {
        match at.checked_sub(1) {
            Some(at) => (self.history[at].level, self.history[at].reason),
            None => (Level::fifo(self.config.contract), Reason::Contract),
        }
    }

    fn period(&self, now: Nanos) -> u64 {
        (now.0 - self.start.0) / self.config.period.0
    }

    /// Charge of the promotions in the period of `now` against the budget for tasks.
    fn promotions(&self, now: Nanos, reasons: &[Reason]) -> u64 {
        let entries = self.history.iter().enumerate();
        let counted = entries.filter(|(at, e)| {
            self.period(e.now) == self.period(now)
                && reasons.contains(&e.reason)
                && e.level.priority > self.before(*at).0.priority
        });
        counted.count() as u64 * self.config.promotion_cost.0
    }

    /// CPU time in the period of `now` under these reasons.
    fn used(&self, now: Nanos, reasons: &[Reason]) -> u64 {
        let entries = self.history.iter().enumerate();
        let counted = entries.filter_map(|(at, e)| {
            let (level, reason) = self.before(at);
            let Event::VcpuSample(look) = e.event else { return None };
            let counts = self.period(e.now) == self.period(now)
                && reasons.contains(&reason)
                && level.priority > self.config.floor;
            counts.then_some(look.ran.0)
        });
        counted.sum()
    }

    fn is_pending(&self, kind: Interrupt) -> bool {
        let mut pending = false;
        for e in &self.history {
            match e.event {
                Event::Interrupt(k) if k == kind => pending = true,
                Event::End => pending = false,
                Event::VcpuSample(VcpuSample { report: Some(r), is_new: true, .. }) => {
                    pending &= if kind == Interrupt::Maskable { r.interrupt } else { r.nmi };
                }
                _ => {}
            }
        }
        pending
    }

    /// Whether an interrupt by KVM waits for its answer: nothing urgent was reported since, and the
    /// vCPU has not run for it as long as an answer takes.
    fn is_interrupted(&self, now: Nanos, config: &Config, answered: impl Fn(&Entry) -> bool) -> bool {
        let last = self.history.iter().rposition(|e| matches!(e.event, Event::KvmInterrupt));
        let Some(last) = last.filter(|last| !self.history[*last..].iter().any(&answered)) else {
            return false;
        };
        let ran = (last + 1..self.history.len()).map(|at| match self.history[at].event {
            Event::VcpuSample(look) if self.before(at).1 == Reason::Interrupt => look.ran.0,
            _ => 0,
        });
        let Config { hold, answer, .. } = *config;
        now.0 < self.history[last].now.0 + hold.0 + answer.0 && ran.sum::<u64>() < answer.0
    }

    fn step(&mut self, event: Event, now: Nanos) -> (Level, Reason) {
        let (level, reason) = self.before(self.history.len());
        self.history.push(Entry { now, event, level, reason });
        let mut config = self.config;
        let leads = self.history.iter().rev();
        let lead =
            leads.filter_map(|e| if let Event::Lead(lead) = e.event { Some(lead) } else { None }).next();
        config.lead = lead.unwrap_or(config.lead);
        let answers = self.history.iter().rev();
        let answer =
            answers.filter_map(|e| if let Event::Answer(time) = e.event { Some(time) } else { None }).next();
        config.answer = answer.unwrap_or(config.answer);
        let since = self.history.iter().rposition(|e| matches!(e.event, Event::End)).map_or(0, |at| at + 1);
        let looks = || {
            self.history[since..].iter().rev().filter_map(|e| match e.event {
                Event::VcpuSample(look) => Some((e.now, look)),
                _ => None,
            })
        };
        let alive = looks().find(|(_, l)| l.alive).is_some_and(|(at, _)| now.0 < at.0 + config.silence.0);
        let report = looks().find_map(|(_, l)| l.report).unwrap_or_default();
        let irq = report.interrupt || self.is_pending(Interrupt::Maskable);
        let nmi = report.nmi || self.is_pending(Interrupt::NonMaskable);
        let critical = irq || nmi || report.critical;
        let may_critical = self.used(now, &[Reason::Critical]) < config.critical_budget.0;
        let tasks = [Reason::Task, Reason::Timer, Reason::Completion, Reason::Interrupt, Reason::Blocked];
        let answered = |e: &Entry| match e.event {
            Event::End => true,
            Event::VcpuSample(VcpuSample { report: Some(report), is_new: true, .. }) => {
                mapped(&report, &config) > config.floor
            }
            _ => false,
        };
        let unanswered = self.history.iter().rev().take_while(|e| !answered(e));
        let completed = unanswered.filter(|e| matches!(e.event, Event::Completion)).map(|e| e.now.0).max();
        let completion = completed.is_some_and(|at| now.0 < at + config.hold.0);
        let interrupt = self.is_interrupted(now, &config, answered);
        let may_task = self.used(now, &tasks) + self.promotions(now, &tasks) < config.task_budget.0;
        let rr = report.policy == GuestPolicy::Rr;
        let mapped = mapped(&report, &config);
        let timer =
            report.deadline.is_some_and(|d| now.0 + config.lead.0 >= d.0 && now.0 < d.0 + config.hold.0);
        let mut wanted = (Level::fifo(config.floor), Reason::Floor);
        if critical {
            wanted.1 = Reason::Exhausted;
        }
        let boosts = [
            (mapped > config.floor, Level { priority: mapped, round_robin: rr }, Reason::Task),
            (interrupt, Level::fifo(config.ceiling), Reason::Interrupt),
            (completion, Level::fifo(config.ceiling), Reason::Completion),
            (timer, Level::fifo(config.ceiling), Reason::Timer),
            (report.idle, Level::fifo(config.ceiling), Reason::Blocked),
        ];
        // The later one wins.
        for (is, level, reason) in boosts {
            if is {
                wanted =
                    if may_task { (level, reason) } else { (Level::fifo(config.floor), Reason::Exhausted) };
            }
        }
        if critical && may_critical {
            wanted = (Level { priority: config.ceiling, round_robin: rr }, Reason::Critical);
        }
        if !alive {
            wanted = (Level::fifo(config.contract), Reason::Contract);
        }
        let changed = (0..self.history.len() - 1)
            .rev()
            .find(|at| self.history[*at].level != self.before(*at).0)
            .map_or(self.start, |at| self.history[at].now);
        if wanted.0.priority < level.priority && now.0 < changed.0 + config.dwell.0 {
            wanted = (level, reason);
        }
        let last = self.history.len() - 1;
        (self.history[last].level, self.history[last].reason) = wanted;
        wanted
    }
}

fn config(ceiling: u32, floor: u32, contract: u32) -> Config {
    Config {
        task_budget: Nanos(500),
        critical_budget: Nanos(30),
        promotion_cost: Nanos(60),
        period: Nanos(1000),
        dwell: Nanos(20),
        silence: Nanos(400),
        lead: Nanos(10),
        hold: Nanos(30),
        answer: Nanos(15),
        ..Config::new(ceiling, floor, contract)
    }
}

/// Runs both on one history and compares them; checks invariants too.
fn compare(config: Config, events: &[(u64, Event)]) {
    let start = Nanos(7);
    let mut vcpu = Vcpu::new(config, start);
    let mut reference = Reference { config, start, history: Vec::new() };
    let (mut now, mut last_change) = (start, start);
    for (after, event) in events {
        now = Nanos(now.0 + after);
        let before = vcpu.level();
        let step = match event {
            Event::VcpuSample(look) => vcpu.observe(*look, now),
            Event::Interrupt(kind) => vcpu.interrupt(*kind, now),
            Event::Completion => vcpu.completion(now),
            Event::KvmInterrupt => vcpu.kvm_interrupt(now),
            // The timer acts at the next event; an event without a change will do.
            Event::Lead(lead) => {
                vcpu.set_lead(*lead);
                vcpu.observe(VcpuSample::default(), now)
            }
            Event::Answer(answer) => {
                vcpu.set_answer(*answer);
                vcpu.observe(VcpuSample::default(), now)
            }
            Event::End => vcpu.end(now),
        };
        assert_eq!((step.level, step.reason), reference.step(*event, now), "{config:?} {events:?}");
        assert_eq!((vcpu.level(), vcpu.reason()), (step.level, step.reason));
        assert!(step.level.priority <= config.ceiling.max(config.contract), "never above");
        assert!(step.level.priority >= config.floor.min(config.contract), "never below");
        assert!(step.next.is_none_or(|next| next > now), "what is next lies ahead");
        if step.level.priority < before.priority {
            assert!(now.0 >= last_change.0 + config.dwell.0, "a demotion waits");
        }
        if step.level != before {
            last_change = now;
        }
    }
}

fn report() -> impl Strategy<Value = Report> {
    let policy = prop_oneof![Just(GuestPolicy::Other), Just(GuestPolicy::Fifo), Just(GuestPolicy::Rr)];
    let flag = || prop::bool::weighted(0.15);
    (policy, 0..120_u32, flag(), flag(), flag(), flag(), prop::option::weighted(0.3, 0..6000_u64)).prop_map(
        |(policy, priority, interrupt, nmi, critical, idle, deadline)| Report {
            policy,
            priority,
            interrupt,
            nmi,
            critical,
            idle,
            deadline: deadline.map(Nanos),
        },
    )
}

fn event() -> impl Strategy<Value = Event> {
    let look = (prop::option::weighted(0.8, report()), any::<bool>(), prop::bool::weighted(0.7), 0..120_u64);
    let look = look.prop_map(|(report, is_new, alive, ran)| {
        Event::VcpuSample(VcpuSample { report, is_new, alive, ran: Nanos(ran) })
    });
    prop_oneof![
        10 => look,
        1 => Just(Event::Interrupt(Interrupt::Maskable)),
        1 => Just(Event::Interrupt(Interrupt::NonMaskable)),
        2 => Just(Event::Completion),
        2 => Just(Event::KvmInterrupt),
        1 => (0..40_u64).prop_map(|lead| Event::Lead(Nanos(lead))),
        1 => (0..40_u64).prop_map(|answer| Event::Answer(Nanos(answer))),
        1 => Just(Event::End),
    ]
}

proptest! {
    #[test]
    fn random_histories(
        ceiling in 1..=97_u32,
        below in 0..97_u32,
        contract in 0..=97_u32,
        events in prop::collection::vec((0..150_u64, event()), 0..60),
    ) {
        compare(config(ceiling, below % ceiling, contract), &events);
    }

    /// A guest with arbitrary reports gets no more CPU time above its floor than the budgets, and
    /// the time that one observation finds too late.
    #[test]
    fn lies_are_bounded(events in prop::collection::vec((1..50_u64, report(), any::<bool>()), 0..200)) {
        let config = Config { contract: 0, ..config(50, 0, 0) };
        let mut vcpu = Vcpu::new(config, Nanos(0));
        let (mut now, mut boosted, mut longest) = (0, 0, 0);
        for (after, report, interrupted) in &events {
            now += after;
            // The vCPU computes all the time, also while it reports that it is blocked.
            let above = vcpu.level().priority > 0;
            let look = VcpuSample { report: Some(*report), is_new: true, alive: true, ran: Nanos(*after) };
            vcpu.observe(look, Nanos(now));
            let awaits = vcpu.awaits_interrupt();
            if *interrupted {
                let promotions = vcpu.counters().promotions;
                vcpu.kvm_interrupt(Nanos(now));
                // Every wake-up of the host's thread is charged.
                prop_assert!(!awaits || vcpu.counters().promotions > promotions);
            }
            boosted += if above { *after } else { 0 };
            longest = longest.max(*after);
        }
        let periods = now / config.period.0 + 1;
        // An observation that finds the budget used up may precede the demotion, by the dwell time.
        let late = 2 * (longest + config.dwell.0 + longest);
        prop_assert!(boosted <= periods * (500 + 30 + late), "{boosted} in {now}");
        prop_assert_eq!(vcpu.counters().boosted, Nanos(boosted));
    }

    #[test]
    fn priorities_are_mapped_as_in_the_paper(p_guest in 0..200_u32, p_max in 1..=99_u32) {
        let level = Level::of_guest(GuestPolicy::Fifo, p_guest, p_max);
        let exact = p_guest.min(99) * p_max / 99;
        prop_assert_eq!(level.priority, exact.max(1));
        prop_assert!(level.priority <= p_max);
        prop_assert_eq!(Level::of_guest(GuestPolicy::Other, p_guest, p_max), Level::ORDINARY);
    }
}

/// Every history of five events out of thirteen, at two paces.
#[test]
fn all_short_histories() {
    let says = |report: Report| {
        Event::VcpuSample(VcpuSample { report: Some(report), is_new: true, alive: true, ran: Nanos(35) })
    };
    let task = Report { policy: GuestPolicy::Fifo, priority: 80, ..Report::default() };
    let alphabet = [
        says(Report::default()),
        says(task),
        says(Report { idle: true, ..Report::default() }),
        says(Report { interrupt: true, ..Report::default() }),
        says(Report { interrupt: true, nmi: true, ..task }),
        says(Report { deadline: Some(Nanos(90)), ..Report::default() }),
        Event::VcpuSample(VcpuSample { report: None, is_new: false, alive: false, ran: Nanos(250) }),
        // A part of the time that an answer may take.
        Event::VcpuSample(VcpuSample { report: None, is_new: false, alive: true, ran: Nanos(8) }),
        Event::Interrupt(Interrupt::Maskable),
        Event::Interrupt(Interrupt::NonMaskable),
        Event::Completion,
        Event::KvmInterrupt,
        Event::End,
    ];
    let n = alphabet.len();
    for pace in [15, 110] {
        for number in 0..n.pow(5) {
            let events: Vec<_> = (0..5).map(|i| (pace, alphabet[number / n.pow(i) % n])).collect();
            compare(config(40, 0, 20), &events);
        }
    }
}

#[test]
fn nested_interrupts_end_one_by_one() {
    let mut vcpu = Vcpu::new(config(90, 0, 0), Nanos(0));
    let at = Nanos;
    let says = |report| VcpuSample { report: Some(report), is_new: true, alive: true, ran: Nanos(0) };
    assert_eq!(vcpu.observe(says(Report::default()), at(100)).level, Level::ORDINARY);
    assert_eq!(vcpu.interrupt(Interrupt::Maskable, at(101)).level, Level::fifo(90));
    assert_eq!(vcpu.interrupt(Interrupt::NonMaskable, at(102)).level, Level::fifo(90));
    // The NMI's handler is done, that of the other goes on.
    let report = Report { interrupt: true, ..Report::default() };
    assert_eq!(vcpu.observe(says(report), at(150)).reason, Reason::Critical);
    assert_eq!(vcpu.observe(says(Report::default()), at(200)).reason, Reason::Floor);
    assert_eq!(vcpu.counters().demotions, 1);
}

#[test]
fn a_silent_guest_has_its_contract_again() {
    let mut vcpu = Vcpu::new(config(90, 0, 45), Nanos(0));
    let look = |alive| VcpuSample { report: Some(Report::default()), is_new: true, alive, ran: Nanos(0) };
    assert_eq!(vcpu.level(), Level::fifo(45));
    let step = vcpu.observe(look(true), Nanos(100));
    assert_eq!((step.level, step.next), (Level::ORDINARY, Some(Nanos(500))));
    assert_eq!(vcpu.observe(look(false), Nanos(499)).level, Level::ORDINARY);
    assert_eq!(vcpu.observe(look(false), Nanos(500)).reason, Reason::Contract);
    assert_eq!(vcpu.level(), Level::fifo(45));
}

#[test]
fn a_completion_raises_until_an_urgent_task_is_reported_or_its_time_is_over() {
    let config = Config { dwell: Nanos(0), ..config(90, 0, 0) };
    let mut vcpu = Vcpu::new(config, Nanos(0));
    let says = |report, is_new| VcpuSample { report: Some(report), is_new, alive: true, ran: Nanos(0) };
    let (nothing, urgent) =
        (Report::default(), Report { policy: GuestPolicy::Fifo, priority: 50, ..Report::default() });
    vcpu.observe(says(nothing, true), Nanos(100));
    assert_eq!(vcpu.completion(Nanos(110)).reason, Reason::Completion);
    // The interrupt has not been taken yet; the guest's report began before it.
    let step = vcpu.observe(says(nothing, true), Nanos(139));
    assert_eq!((step.level, step.next), (Level::fifo(90), Some(Nanos(140))));
    assert_eq!(vcpu.observe(says(nothing, false), Nanos(140)).level, Level::ORDINARY);
    vcpu.completion(Nanos(200));
    assert_eq!(vcpu.observe(says(urgent, true), Nanos(205)).reason, Reason::Task);
    assert_eq!(vcpu.observe(says(nothing, true), Nanos(206)).reason, Reason::Floor);
}

#[test]
fn an_interrupt_by_kvm_raises_for_as_long_as_an_answer_takes() {
    let config = Config { dwell: Nanos(0), ..config(90, 0, 0) };
    let mut vcpu = Vcpu::new(config, Nanos(0));
    let says =
        |ran| VcpuSample { report: Some(Report::default()), is_new: false, alive: true, ran: Nanos(ran) };
    vcpu.observe(says(0), Nanos(100));
    let step = vcpu.kvm_interrupt(Nanos(110));
    assert_eq!((step.level, step.reason, step.next), (Level::fifo(90), Reason::Interrupt, Some(Nanos(125))));
    // The vCPU waits for the CPU, and has a part of its answer's time left then.
    assert_eq!(vcpu.observe(says(9), Nanos(119)).next, Some(Nanos(125)));
    assert_eq!(vcpu.observe(says(6), Nanos(125)).reason, Reason::Floor, "it was for ordinary work");
    vcpu.kvm_interrupt(Nanos(200));
    assert_eq!(vcpu.observe(says(0), Nanos(244)).reason, Reason::Interrupt);
    assert_eq!(vcpu.observe(says(0), Nanos(245)).reason, Reason::Floor, "it has not run at all");
    vcpu.set_answer(Nanos(5));
    assert_eq!(vcpu.kvm_interrupt(Nanos(300)).next, Some(Nanos(305)));
}
