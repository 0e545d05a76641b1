//! The level of one vCPU, over time.

use rtvirtio_units::Nanos;
use serde::Serialize;

use crate::{Config, GuestPolicy, Level, Report, Usage};

/// A kind of interrupt. One of each may be pending at a time: one level of nesting, as the paper's
/// section 5.1 has it for NMIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// One that can be masked.
    Maskable,
    /// One that cannot, which may come within a handler.
    NonMaskable,
}

/// Why a vCPU stands at its level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// Nothing is reported: the contract's priority.
    Contract,
    /// It is blocked, so that an interrupt finds it at its ceiling.
    Blocked,
    /// An interrupt or a critical section.
    Critical,
    /// A real-time task runs.
    Task,
    /// An announced timer is about to fire, or has just fired.
    Timer,
    /// The I/O domain has completed an urgent request of the VM, and the guest has reported nothing
    /// since.
    Completion,
    /// KVM has made an interrupt of a device or of another vCPU pending for it, and the guest has
    /// reported nothing urgent since.
    Interrupt,
    /// Nothing urgent runs.
    Floor,
    /// Something urgent runs, and the budget for it is used up.
    Exhausted,
}

impl Reason {
    /// Whether CPU time under it counts against a budget.
    #[must_use]
    pub fn is_boost(self) -> bool {
        match self {
            Self::Blocked
            | Self::Critical
            | Self::Task
            | Self::Timer
            | Self::Completion
            | Self::Interrupt => true,
            Self::Contract | Self::Floor | Self::Exhausted => false,
        }
    }
}

/// What the host has seen of a vCPU at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Look {
    /// What the guest says; `None` where it could not be read, as while the guest writes it.
    pub report: Option<Report>,
    /// Whether the report is another one than at the last look.
    pub is_new: bool,
    /// Whether the guest has shown a sign of life since the last look.
    pub alive: bool,
    /// CPU time that the thread has used since the last look; what it used at its floor while it
    /// waited to be raised does not count ([`Vcpu::is_boosted_at`]).
    pub ran: Nanos,
}

/// What follows from a look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Where the vCPU is to stand now.
    pub level: Level,
    /// Why.
    pub reason: Reason,
    /// When something changes by itself, so that a look then is useful; `None` for never.
    pub next: Option<Nanos>,
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Changes to a higher level.
    pub promotions: u64,
    /// Changes to a lower one.
    pub demotions: u64,
    /// Demotions that waited for their turn.
    pub deferred: u64,
    /// Periods in which a budget was used up.
    pub exhausted: u64,
    /// CPU time above the floor on account of the guest's reports.
    pub boosted: Nanos,
}

/// One vCPU: what it runs, what it may use, where it stands.
#[derive(Clone, Debug)]
pub struct Vcpu {
    config: Config,
    start: Nanos,
    report: Report,
    /// Interrupts that the host knows of and the guest has not yet reported about.
    pending: [bool; 2],
    /// When an urgent request was completed, until the guest's next report.
    completed: Option<Nanos>,
    /// When KVM has made an interrupt pending, until the guest's next report of an urgent task, and
    /// what the vCPU has run for it.
    interrupted: Option<(Nanos, Nanos)>,
    last_sign: Option<Nanos>,
    level: Level,
    reason: Reason,
    changed: Nanos,
    period: u64,
    task_used: Nanos,
    critical_used: Nanos,
    /// Whether a budget was used up in this period.
    spent: bool,
    counters: Counters,
}

fn plus(a: Nanos, b: Nanos) -> Nanos {
    Nanos(a.0.saturating_add(b.0))
}

impl Vcpu {
    /// One that stands at its contract's level at `now`.
    #[must_use]
    pub fn new(config: Config, now: Nanos) -> Self {
        Self {
            start: now,
            report: Report::default(),
            pending: [false; 2],
            completed: None,
            interrupted: None,
            last_sign: None,
            level: Level::fifo(config.contract),
            reason: Reason::Contract,
            changed: now,
            period: 0,
            task_used: Nanos(0),
            critical_used: Nanos(0),
            spent: false,
            counters: Counters::default(),
            config,
        }
    }

    /// The level.
    #[must_use]
    pub fn level(&self) -> Level {
        self.level
    }

    /// Why it has it.
    #[must_use]
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// Whether the next interrupt that KVM makes pending would raise it: it stands at its floor, or
    /// is about to, and has budget left.
    #[must_use]
    pub fn awaits_interrupt(&self) -> bool {
        self.reason == Reason::Floor && self.left().0 > Nanos(0)
    }

    /// Whether its guest has last reported a task that stands above the floor.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        self.task().priority > self.config.floor
    }

    /// Whether it stands above its floor for something urgent, so that CPU time counts against a
    /// budget.
    #[must_use]
    pub fn is_boosted(&self) -> bool {
        self.reason.is_boost() && self.level.priority > self.config.floor
    }

    /// [`Vcpu::is_boosted`], and its thread stood above the floor too: it is raised a moment later
    /// than this, and not while another program works with the journal.
    #[must_use]
    pub fn is_boosted_at(&self, stood: Level) -> bool {
        self.is_boosted() && stood.priority > self.config.floor
    }

    /// Raises it this long before announced timers from now on, where [`Config::lead`] was used.
    pub fn set_lead(&mut self, lead: Nanos) {
        self.config.lead = lead;
    }

    /// Gives urgent tasks this much CPU time to answer an interrupt by KVM from now on, where
    /// [`Config::answer`] was used.
    pub fn set_answer(&mut self, answer: Nanos) {
        self.config.answer = answer;
    }

    /// When the announced timer is to raise it, or was; `None` without one.
    #[must_use]
    pub fn timer_due(&self) -> Option<Nanos> {
        self.report.deadline.map(|at| Nanos(at.0.saturating_sub(self.config.lead.0)))
    }

    /// When its level last changed.
    #[must_use]
    pub fn changed(&self) -> Nanos {
        self.changed
    }

    /// What has happened so far.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// CPU time that is left in this period, for tasks and for critical sections.
    #[must_use]
    pub fn left(&self) -> (Nanos, Nanos) {
        let left = |budget: Nanos, used: Nanos| Nanos(budget.0.saturating_sub(used.0));
        (left(self.config.task_budget, self.task_used), left(self.config.critical_budget, self.critical_used))
    }

    /// The host makes an interrupt pending for it. It stays so until the guest has written a report
    /// without the flag of its kind.
    pub fn interrupt(&mut self, kind: Interrupt, now: Nanos) -> Step {
        self.roll(now);
        self.pending[kind as usize] = true;
        self.decide(now)
    }

    /// The I/O domain completes an urgent request of the VM, and is about to interrupt one of its
    /// vCPUs: which one is not known here. The report of an urgent task is the answer to it;
    /// without one the vCPU stays raised for [`Config::hold`]. Look first: what the guest has
    /// reported up to now is no answer.
    pub fn completion(&mut self, now: Nanos) -> Step {
        self.roll(now);
        self.completed = Some(now);
        self.decide(now)
    }

    /// KVM has made an interrupt pending for it that is no timer of its own. As after a completion
    /// the report of an urgent task is the answer; without one it stays raised until it has run for
    /// [`Config::answer`], and no longer than that and [`Config::hold`].
    pub fn kvm_interrupt(&mut self, now: Nanos) -> Step {
        self.roll(now);
        self.interrupted = Some((now, Nanos(0)));
        self.decide(now)
    }

    /// The host has looked.
    pub fn look(&mut self, look: Look, now: Nanos) -> Step {
        self.roll(now);
        self.charge(look.ran);
        if look.alive {
            self.last_sign = Some(now);
        }
        if let Some(report) = look.report {
            self.report = report;
            if look.is_new {
                self.pending[0] &= report.interrupt;
                self.pending[1] &= report.nmi;
                // A task that has just begun to wait reports what runs instead, perhaps only after
                // its request completed: that is no answer to the interrupt.
                if self.is_urgent() {
                    (self.completed, self.interrupted) = (None, None);
                }
            }
        }
        self.decide(now)
    }

    /// Raises it where its announced timer is due and it stands at its floor, without a new report:
    /// to read one takes as long again. `used_since` says what its thread has used since it was
    /// last asked, `None` for one that has ended; it is called only where the timer is due. All of
    /// that is of the time at the floor: no budget pays for it, and no later look may count it.
    /// Returns what was used; `None` where nothing was done.
    pub fn raise_due(&mut self, now: Nanos, used_since: impl FnOnce() -> Option<Usage>) -> Option<Usage> {
        if self.reason != Reason::Floor || self.timer_due().is_none_or(|due| now < due) {
            return None;
        }
        let used = used_since()?;
        self.look(Look { ran: used.ran, ..Look::default() }, now);
        Some(used)
    }

    /// The guest says that it reports no more.
    pub fn end(&mut self, now: Nanos) -> Step {
        self.roll(now);
        (self.last_sign, self.pending) = (None, [false; 2]);
        (self.completed, self.interrupted) = (None, None);
        self.report = Report::default();
        self.decide(now)
    }

    /// Replenishes both budgets when a period has ended.
    fn roll(&mut self, now: Nanos) {
        let period = now.0.saturating_sub(self.start.0) / self.config.period.0.max(1);
        if period != self.period {
            self.period = period;
            (self.task_used, self.critical_used, self.spent) = (Nanos(0), Nanos(0), false);
        }
    }

    /// CPU time used since the last look, on the account of what it stood there for. What crosses
    /// the end of a period counts in the new one.
    fn charge(&mut self, ran: Nanos) {
        if !self.is_boosted() {
            return;
        }
        self.counters.boosted = plus(self.counters.boosted, ran);
        let used =
            if self.reason == Reason::Critical { &mut self.critical_used } else { &mut self.task_used };
        *used = plus(*used, ran);
        if let (Reason::Interrupt, Some((_, answering))) = (self.reason, &mut self.interrupted) {
            *answering = plus(*answering, ran);
        }
    }

    /// What the reports ask for, and what they get.
    fn wanted(&self, now: Nanos) -> (Level, Reason) {
        let config = &self.config;
        let ceiling = Level { priority: config.ceiling, round_robin: false };
        let floor = Level::fifo(config.floor);
        if self.last_sign.is_none_or(|sign| now >= plus(sign, config.silence)) {
            return (Level::fifo(config.contract), Reason::Contract);
        }
        // Under the paper's boost FIFO replaces the ordinary policy only.
        let boosted = Level { round_robin: self.report.policy == GuestPolicy::Rr, ..ceiling };
        let (task_left, critical_left) = self.left();
        let may_task = task_left > Nanos(0);
        let critical =
            self.report.interrupt || self.report.nmi || self.report.critical || self.pending != [false; 2];
        if critical && critical_left > Nanos(0) {
            return (boosted, Reason::Critical);
        }
        let task = self.task();
        let asked = [
            (self.report.idle, ceiling, Reason::Blocked),
            (self.expects_timer(now), ceiling, Reason::Timer),
            (self.completed_until().is_some_and(|end| now < end), ceiling, Reason::Completion),
            (self.interrupted_until().is_some_and(|end| now < end), ceiling, Reason::Interrupt),
            (task.priority > config.floor, task, Reason::Task),
        ];
        match asked.into_iter().find(|(is, ..)| *is) {
            Some((_, level, reason)) if may_task => (level, reason),
            None if !critical => (floor, Reason::Floor),
            _ => (floor, Reason::Exhausted),
        }
    }

    /// What its task asks for.
    fn task(&self) -> Level {
        Level::of_guest(self.report.policy, self.report.priority, self.config.ceiling)
    }

    /// How long a completed request holds the vCPU up.
    fn completed_until(&self) -> Option<Nanos> {
        self.completed.map(|at| plus(at, self.config.hold))
    }

    /// How long an interrupt holds the vCPU up; `None` when it has run for its answer.
    fn interrupted_until(&self) -> Option<Nanos> {
        let open = self.interrupted.filter(|(_, ran)| *ran < self.config.answer);
        open.map(|(at, _)| plus(at, plus(self.config.hold, self.config.answer)))
    }

    /// Whether an announced timer is near, which may wake an urgent task.
    #[must_use]
    pub fn expects_timer(&self, now: Nanos) -> bool {
        let until = self.report.deadline.map(|deadline| plus(deadline, self.config.hold));
        self.timer_due().zip(until).is_some_and(|(from, until)| now >= from && now < until)
    }

    /// Promotes at once; demotes no sooner than `dwell` after the last change.
    fn decide(&mut self, now: Nanos) -> Step {
        let (level, reason) = self.wanted(now);
        let lower = level.priority < self.level.priority;
        let due = plus(self.changed, self.config.dwell);
        if reason == Reason::Exhausted && !self.spent {
            (self.spent, self.counters.exhausted) = (true, self.counters.exhausted + 1);
        }
        if lower && now < due {
            self.counters.deferred += 1;
            return Step { level: self.level, reason: self.reason, next: Some(due) };
        }
        if level.priority > self.level.priority {
            self.counters.promotions += 1;
            if reason.is_boost() && reason != Reason::Critical {
                self.task_used = plus(self.task_used, self.config.promotion_cost);
            }
        } else if lower {
            self.counters.demotions += 1;
        }
        if level != self.level {
            (self.level, self.changed) = (level, now);
        }
        self.reason = reason;
        Step { level, reason, next: self.next(now) }
    }

    /// The next moment at which the answer changes without a new report.
    fn next(&self, now: Nanos) -> Option<Nanos> {
        if self.reason == Reason::Contract {
            return None;
        }
        let config = &self.config;
        let silence = self.last_sign.map(|sign| plus(sign, config.silence));
        let timer = self.report.deadline.map(|d| {
            let from = Nanos(d.0.saturating_sub(config.lead.0));
            if now < from { from } else { plus(d, config.hold) }
        });
        let (task, critical) = self.left();
        let budget = match self.reason {
            Reason::Critical => Some(plus(now, critical)),
            Reason::Task | Reason::Timer | Reason::Completion => Some(plus(now, task)),
            Reason::Interrupt => {
                let answering = self.interrupted.map_or(Nanos(0), |(_, ran)| ran);
                Some(plus(now, task.min(Nanos(self.config.answer.0.saturating_sub(answering.0)))))
            }
            Reason::Exhausted => {
                Some(Nanos(self.start.0.saturating_add((self.period + 1).saturating_mul(config.period.0))))
            }
            // A blocked one uses none, and an idle look finds one that does.
            _ => None,
        };
        let called = [self.completed_until(), self.interrupted_until()];
        [silence, timer, budget].into_iter().chain(called).flatten().filter(|at| *at > now).min()
    }
}
