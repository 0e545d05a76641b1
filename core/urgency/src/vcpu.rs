//! The level of one vCPU, over time.

use rtvirtio_units::Nanos;
use serde::Serialize;

use crate::{Config, GuestPolicy, Level, Report, Usage};

/// A kind of interrupt. At most one of each is pending at a time: one level of nesting, as in the
/// paper's section 5.1 for NMIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interrupt {
    /// An interrupt that can be masked.
    Maskable,
    /// A non-maskable interrupt, which may come within a handler.
    NonMaskable,
}

/// Reason for a vCPU's level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    /// The guest reports nothing: the contract's priority.
    Contract,
    /// The vCPU is blocked, so that an interrupt finds it at its ceiling.
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
    /// KVM has made an interrupt of a device or of another vCPU pending for this one, and the guest
    /// has reported nothing urgent since.
    Interrupt,
    /// Nothing urgent is running.
    Floor,
    /// Something urgent runs, and the budget for it is used up.
    Exhausted,
}

impl Reason {
    /// Whether CPU time at this level counts against a budget.
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

/// Observation of a vCPU at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct VcpuSample {
    /// Report of the guest; `None` where it could not be read, as while the guest writes it.
    pub report: Option<Report>,
    /// Whether the report is a new one since the last observation.
    pub is_new: bool,
    /// Whether the guest's beat or report has changed since the last observation.
    pub alive: bool,
    /// CPU time that the thread has used since the last observation; time at its floor while it
    /// waited to be raised does not count ([`Vcpu::is_boosted_at`]).
    pub ran: Nanos,
}

/// Decision after an observation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Level that the vCPU's thread must get now.
    pub level: Level,
    /// Reason for the level.
    pub reason: Reason,
    /// Time at which the level may change without an event; `None` for never.
    pub next: Option<Nanos>,
}

/// Counters of a vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Changes to a higher priority.
    pub promotions: u64,
    /// Changes to a lower priority.
    pub demotions: u64,
    /// Demotions delayed by [`Config::dwell`].
    pub deferred: u64,
    /// Periods in which a budget was used up.
    pub exhausted: u64,
    /// CPU time above the floor for the guest's reports.
    pub boosted: Nanos,
}

/// State of one vCPU: its reports, budgets and level.
#[derive(Clone, Debug)]
pub struct Vcpu {
    config: Config,
    start: Nanos,
    report: Report,
    /// Interrupts by the host about which the guest has not yet reported.
    pending: [bool; 2],
    /// Time at which an urgent request was completed, until the guest's next report.
    completed: Option<Nanos>,
    /// Time at which KVM made an interrupt pending, until the guest's next report of an urgent
    /// task, and the CPU time used for it.
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
    /// A vCPU at its contract's level from `now` on.
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

    /// Level by the last decision.
    #[must_use]
    pub fn level(&self) -> Level {
        self.level
    }

    /// Reason for the level.
    #[must_use]
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// Whether the next interrupt that KVM makes pending would raise the vCPU: it is at its floor,
    /// or about to be, and has budget left.
    #[must_use]
    pub fn awaits_interrupt(&self) -> bool {
        self.reason == Reason::Floor && self.left().0 > Nanos(0)
    }

    /// Whether the guest has last reported a task with a level above the floor.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        self.task().priority > self.config.floor
    }

    /// Whether the vCPU is above its floor for something urgent, so that CPU time counts against a
    /// budget.
    #[must_use]
    pub fn is_boosted(&self) -> bool {
        self.reason.is_boost() && self.level.priority > self.config.floor
    }

    /// Whether [`Vcpu::is_boosted`] and the thread's level `stood` is above the floor too: it is
    /// raised later than this state, and not while another program works with the journal.
    #[must_use]
    pub fn is_boosted_at(&self, stood: Level) -> bool {
        self.is_boosted() && stood.priority > self.config.floor
    }

    /// Sets [`Config::lead`] from now on.
    pub fn set_lead(&mut self, lead: Nanos) {
        self.config.lead = lead;
    }

    /// Sets [`Config::answer`] from now on.
    pub fn set_answer(&mut self, answer: Nanos) {
        self.config.answer = answer;
    }

    /// Time at which the announced timer raises the vCPU, past or future; `None` without one.
    #[must_use]
    pub fn timer_due(&self) -> Option<Nanos> {
        self.report.deadline.map(|at| Nanos(at.0.saturating_sub(self.config.lead.0)))
    }

    /// Time of the last change of the level.
    #[must_use]
    pub fn changed(&self) -> Nanos {
        self.changed
    }

    /// Counters since the start.
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

    /// Records that the host makes an interrupt pending for the vCPU, until the guest has written a
    /// report without the flag of its kind.
    pub fn interrupt(&mut self, kind: Interrupt, now: Nanos) -> Step {
        self.roll(now);
        self.pending[kind as usize] = true;
        self.decide(now)
    }

    /// Records that the I/O domain completes an urgent request of the VM, and is about to interrupt
    /// one of its vCPUs: which one is not known here. The report of an urgent task is the answer to
    /// it; without one the vCPU stays raised for [`Config::hold`]. Call [`Vcpu::observe`] first:
    /// reports written before are no answer.
    pub fn completion(&mut self, now: Nanos) -> Step {
        self.roll(now);
        self.completed = Some(now);
        self.decide(now)
    }

    /// Records a pending interrupt by KVM that is not from the vCPU's own timer. As after a
    /// completion the report of an urgent task is the answer; without one the vCPU stays raised
    /// until it has run for [`Config::answer`], and no longer than that and [`Config::hold`].
    pub fn kvm_interrupt(&mut self, now: Nanos) -> Step {
        self.roll(now);
        self.interrupted = Some((now, Nanos(0)));
        self.decide(now)
    }

    /// Handles an observation and decides the level.
    pub fn observe(&mut self, look: VcpuSample, now: Nanos) -> Step {
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
                // A task that has just begun to wait reports the next task instead, perhaps only
                // after its request completed: that is no answer to the interrupt.
                if self.is_urgent() {
                    (self.completed, self.interrupted) = (None, None);
                }
            }
        }
        self.decide(now)
    }

    /// Raises the vCPU where its announced timer is due and it is at its floor, without a new
    /// report: reading one would take as long again. `used_since` returns the thread's use since
    /// the last query, `None` for a thread that has ended; it is called only where the timer is
    /// due. All of that use was at the floor: no budget pays for it, and no later observation may
    /// count it. Returns the use; `None` where nothing was done.
    pub fn raise_due(&mut self, now: Nanos, used_since: impl FnOnce() -> Option<Usage>) -> Option<Usage> {
        if self.reason != Reason::Floor || self.timer_due().is_none_or(|due| now < due) {
            return None;
        }
        let used = used_since()?;
        self.observe(VcpuSample { ran: used.ran, ..VcpuSample::default() }, now);
        Some(used)
    }

    /// Records that the guest reports no more.
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

    /// Charges CPU time since the last observation to the budget of the level's reason. Time across
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

    /// Level for the present reports within the budgets, without the limit on demotions.
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

    /// Level of the reported task.
    fn task(&self) -> Level {
        Level::of_guest(self.report.policy, self.report.priority, self.config.ceiling)
    }

    /// End of the boost by a completed request.
    fn completed_until(&self) -> Option<Nanos> {
        self.completed.map(|at| plus(at, self.config.hold))
    }

    /// End of the boost by an interrupt; `None` when the vCPU has run for its answer.
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

    /// The next time at which the decision changes without a new report.
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
            // A blocked vCPU uses none, and an idle observation finds one that does.
            _ => None,
        };
        let called = [self.completed_until(), self.interrupted_until()];
        [silence, timer, budget].into_iter().chain(called).flatten().filter(|at| *at > now).min()
    }
}
