//! Neighbours that come and go: bursts, and floods that a limit does not hold for a part of every
//! tenth of a second. A task that loses rate in one phase catches up in the other.

use rtvirtio_spec::Spec;
use rtvirtio_units::blk_throttle;

use super::Wait;
use crate::flow::Flow;

/// Service of a task in a phase, with everything that limits it.
#[derive(Clone, Copy)]
pub(super) struct Share {
    /// Share of the task's rate that gets through.
    pub(super) kept: f64,
    /// Spare share of the rate it could have, for catching up.
    pub(super) slack: f64,
}

/// The flows while neighbours with bursts are idle.
pub(super) fn without_bursts(spec: &Spec, flows: &[Flow]) -> Vec<Flow> {
    let mut flows = flows.to_vec();
    for (flow, (_, task)) in flows.iter_mut().zip(spec.tasks()) {
        if task.rate.is_none() && task.busy_period().is_some() {
            (flow.rate, flow.depth, flow.flood, flow.allowed) = (0.0, 0.0, false, None);
        }
    }
    flows
}

/// Share of the rate that is kept over a busy phase of `length` s and the `rest` that follows it,
/// and how late the task is at the end of the busy one, s.
pub(super) fn recovered(busy: f64, quiet: Share, (length, rest): (f64, f64)) -> (f64, f64) {
    let owed = (1.0 - busy.min(1.0)) * length;
    let slack = quiet.slack.clamp(0.0, 0.99);
    let caught_up = if quiet.kept < 1.0 { (quiet.kept - 1.0) * rest } else { slack / (1.0 - slack) * rest };
    ((1.0 - (owed - caught_up).max(0.0) / (length + rest)).clamp(0.0, 1.0), owed)
}

/// Phases of each throttle slice: floods within loose limits run unchecked in a part of it, and are
/// limited in the rest.
pub(super) struct Unchecked {
    /// Length of the unchecked part, s.
    length: f64,
    /// Waits of all tasks in that part.
    busy: Vec<Wait>,
    /// Waits of all tasks in the rest of the slice.
    rest: Vec<Wait>,
}

impl Unchecked {
    /// `None` where the requests that limits allow at once fit into the queues of the floods.
    ///
    /// ```text
    /// length = min(slice, sum over limited floods of beyond * c
    ///                     + most rounds of one of them * sum over tasks of c_t * depth_t)
    /// beyond = 1 + allowed - depth                    rounds = beyond / depth
    /// ```
    ///
    /// In each round every task that keeps its rate is served too, at most; of their depths only
    /// requests that come in a slice count. With a flood without a limit the part is the whole
    /// slice. Requests that fit into a flood's queue count as even in both parts.
    pub(super) fn from_flows(flows: &[Flow], regime: &dyn Fn(&[Flow]) -> Vec<Wait>) -> Option<Self> {
        let tasks: f64 = flows
            .iter()
            .filter(|f| f.declared && !f.steady())
            .map(|f| f.cost * f.depth.min(1.0 + f.rate * blk_throttle::SLICE))
            .sum();
        let alone = |f: &Flow| f.beyond_queue() * f.exclusive();
        let rounds = flows.iter().map(|f| alone(f) / (f.cost * f.depth)).fold(0.0, f64::max);
        let shared = flows.iter().map(alone).sum::<f64>() + rounds * tasks;
        if shared <= 0.0 || tasks <= 0.0 {
            return None;
        }
        let unlimited = flows.iter().any(|f| f.flood);
        let length = if unlimited { blk_throttle::SLICE } else { shared.min(blk_throttle::SLICE) };
        let (mut busy, mut rest) = (flows.to_vec(), flows.to_vec());
        for (busy, rest) in busy.iter_mut().zip(&mut rest).filter(|(f, _)| f.beyond_queue() > 0.0) {
            (rest.rate, rest.allowed) =
                ((rest.rate - rest.beyond_queue() / blk_throttle::SLICE).max(0.0), Some(rest.depth - 1.0));
            (busy.rate, busy.flood, busy.allowed) = (1.0 / busy.exclusive(), true, None);
        }
        Some(Self { length, busy: regime(&busy), rest: regime(&rest) })
    }

    /// The share of a task's rate that gets through, and its lateness when the floods are limited
    /// again, s. A permanent loss adds lateness by a share of `over` s; both together are at most
    /// the lateness that floods without a limit would cause.
    pub(super) fn lateness(&self, task: usize, over: f64, limited: impl Fn(&Wait) -> Share) -> (f64, f64) {
        let worst = limited(&self.busy[task]).kept;
        let phases = (self.length, blk_throttle::SLICE - self.length);
        let (kept, owed) = recovered(worst, limited(&self.rest[task]), phases);
        (kept, owed.min((kept - worst).max(0.0) * over))
    }
}
