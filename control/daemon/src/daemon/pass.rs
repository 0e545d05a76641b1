//! A pass of the loop: looks, and steps between which the caller may do other work.

use std::collections::VecDeque;

use super::{Daemon, PassEvent};
use crate::host::{Host, Millis, ScanDepth};
use crate::observed::Observed;
use crate::reconcile::reconcile;
use crate::step::Step;

/// Rounds of one pass: what is put back is applied anew in the next; one confirms that all is done.
const ROUNDS: usize = 4;
/// Time for the steps of one round, in ms. The rest waits for the next pass, which looks at all VMs
/// first: many contracts, or a slow one, delay no other.
const STEPS_MS: u64 = 500;
/// Interval of looks at a host at rest for which plans are made, in ms.
const PLAN_LOOK_MS: u64 = 1_000;

/// A pass under way: between two of its steps the caller may do other work.
pub(super) struct Pass {
    /// Observations before the pass.
    before: Observed,
    /// Rounds that are left.
    rounds: usize,
    /// Start of this round's steps.
    began: Millis,
    steps: VecDeque<Step>,
    /// Whether this round has changed anything.
    acted: bool,
    /// Whether the pass reported an event.
    is_new: bool,
}

impl<H: Host> Daemon<H> {
    /// Whether steps wait for the next pass, which need not wait itself.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.has_more
    }

    /// Looks at the host so far, including those that found it at rest.
    #[must_use]
    pub fn scan_count(&self) -> u64 {
        self.looks
    }

    /// Looks, decides and acts once. Returns what happened.
    pub fn pass(&mut self) -> Vec<PassEvent> {
        let mut out = Vec::new();
        while self.advance(&mut out) {}
        out
    }

    /// Carries out a part of a pass: its first look, or one step. Adds events to `out`; returns
    /// whether the pass goes on.
    pub fn advance(&mut self, out: &mut Vec<PassEvent>) -> bool {
        let had = out.len();
        let pass = match self.under_way.take() {
            Some(pass) => Some(self.step(pass, out)),
            None => self.begin(out),
        };
        let Some(mut pass) = pass else { return false };
        pass.is_new |= out.len() > had;
        let goes_on = !pass.steps.is_empty() && !self.has_more;
        if goes_on {
            self.under_way = Some(pass);
        } else {
            self.is_new = pass.is_new || self.observed != pass.before;
        }
        goes_on
    }

    /// Carries out the next step; looks again after the last one of a round with changes.
    fn step(&mut self, mut pass: Pass, out: &mut Vec<PassEvent>) -> Pass {
        if let Some(step) = pass.steps.pop_front() {
            let acted = self.perform(&step, out);
            pass.acted |= acted;
            // A failure is tried again later, from the look that follows.
            pass.steps.extend(if acted { self.host.rest(&step) } else { None });
        }
        if pass.steps.is_empty() && pass.acted && pass.rounds > 0 {
            self.observe_host(&mut pass, ScanDepth::Scan, out);
        }
        self.has_more = !pass.steps.is_empty() && self.host.now().since(pass.began) >= STEPS_MS;
        pass
    }

    /// Begins a pass with its first look; `None` where the host is at rest.
    fn begin(&mut self, out: &mut Vec<PassEvent>) -> Option<Pass> {
        if let Some(desired) = self.host.desired() {
            self.changed(&desired, out);
            self.desired = desired;
            self.is_settled = false;
        }
        let now = self.host.now();
        let due = self.compared.is_none_or(|at| now.since(at) >= self.config.compare.0 / 1_000_000);
        // Plans depend on elapsed time, which `rests` does not report.
        let plans = self.config.plan.is_some() && now.since(self.looked) >= PLAN_LOOK_MS;
        self.rested = !due && !plans && self.is_settled && self.host.rests();
        if self.rested {
            self.looks += 1;
            (self.is_new, self.has_more) = (false, false);
            return None;
        }
        (self.is_settled, self.looked, self.has_more) = (false, now, false);
        let before = self.observed.clone();
        let (rounds, steps) = (ROUNDS, VecDeque::new());
        let mut pass = Pass { before, rounds, began: now, steps, acted: false, is_new: false };
        self.observe_host(&mut pass, if due { ScanDepth::Compare } else { ScanDepth::Scan }, out);
        Some(pass)
    }

    /// Looks at the host, and computes the steps of one round.
    fn observe_host(&mut self, pass: &mut Pass, look: ScanDepth, out: &mut Vec<PassEvent>) {
        let now = self.host.now();
        self.observed = self.host.observe(&self.desired, look);
        self.looks += 1;
        if look == ScanDepth::Compare {
            self.compared = Some(now);
        }
        self.forget_gone(now);
        self.look_at_plan(now);
        self.notice(now, out);
        let mut steps = reconcile(&self.desired, &self.observed, &self.config, &self.memory, now);
        steps.extend(self.plan.steps(&self.desired, &self.observed, &self.config, &self.memory, now));
        self.is_settled = steps.is_empty() && !self.memory.has_failures();
        (pass.rounds, pass.began, pass.acted) = (pass.rounds - 1, self.host.now(), false);
        pass.steps = steps.into();
    }
}
