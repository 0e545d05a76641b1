//! `none`, `mq-deadline`, `kyber`, and BFQ while it does not idle: requests share the device
//! without idling.

use rtvirtio_spec::Spec;

use super::Wait;
use crate::device::MIN_SLACK;
use crate::flow::Flow;
use crate::types::{Config, Elevator};

/// Requests of one direction that mq-deadline sends in a row (`fifo_batch`, block/mq-deadline.c).
const DEADLINE_BATCH: f64 = 16.0;

/// With low_latency a weight-raised queue may pass the others once more than its turn (weight
/// raising acts inside a group only, so never for long without idling). Not measured on its own;
/// with this factor the planner prefers `low_latency=0`.
const RAISED_TURNS: f64 = 2.0;

/// Latencies that Kyber aims at for reads and for writes, s (`kyber_latency_targets`,
/// block/kyber-iosched.c).
const KYBER_READ_TARGET: f64 = 0.002;
const KYBER_WRITE_TARGET: f64 = 0.010;

/// Steps of the bisection for the mean wait: beyond the precision of a double.
const STEPS: u32 = 60;

/// The waits of all tasks.
///
/// Mean: with W the time to serve everything in flight, a flow of rate r has
/// `min(depth, r (s + W))` requests in flight (Little), each of which costs c of device time:
///
/// ```text
/// W = sum over flows of c * min(depth, r (s + W))        flood: c * depth
/// ```
///
/// The right side is concave in W and positive at 0, so the positive solution is unique; it is
/// found by bisection below the population bound `sum of c * depth`. A task gets `depth / (s + W)`
/// requests per second at most: at depth 1 next to a flood of depth 32 that is a third of 1500/s on
/// a device with one channel, although its tail looks fine.
///
/// Tail: a flood is in flight with its full depth (with what blk-throttle lets through at once,
/// when capped); the others queue like M/D/1, whose wait decays by `exp(-2 (1 - rho) t / c)`, and
/// never beyond their own depths:
///
/// ```text
/// t = sum over floods c * depth
///   + min( sum over others c * depth,  c_max ln(1 / e) / (2 (1 - rho)) )
///   + sum over tasks whose requests come N at once c * (N - 1)
/// ```
///
/// A burst is no chance: it is there in full for whoever comes next to it, and its own request
/// waits for those of it that are before the share e.
pub(super) fn waits(spec: &Spec, config: &Config, flows: &[Flow]) -> Vec<Wait> {
    let in_flight = |f: &Flow, w: f64| if f.flood { f.depth } else { f.depth.min(f.rate * (f.service + w)) };
    let population: f64 = flows.iter().map(|f| f.cost * f.depth).sum();
    let (mut low, mut high) = (0.0, population);
    for _ in 0..STEPS {
        let mid = 0.5 * (low + high);
        let served: f64 = flows.iter().map(|f| f.cost * in_flight(f, mid)).sum();
        if served > mid {
            low = mid;
        } else {
            high = mid;
        }
    }
    let mean = high;

    // Requests in flight for the tail: per VM, so that own and others' stay separate.
    let mut floods = vec![0.0; spec.vms.len()];
    let mut rated = vec![0.0; spec.vms.len()];
    let mut bursts = vec![0.0; spec.vms.len()];
    let (mut rho, mut longest) = (0.0, 0.0f64);
    for f in flows {
        // A cap makes a flood's bursts smaller, but not its arrivals random.
        if f.steady() {
            floods[f.vm] += f.cost_in_flight(f.burst());
        } else {
            rated[f.vm] += f.cost_in_flight(f.depth);
            bursts[f.vm] += f.cost * f.more_at_once();
            rho += f.rate * f.cost;
            longest = longest.max(f.most);
        }
    }
    let (all_floods, all_rated): (f64, f64) = (floods.iter().sum(), rated.iter().sum());
    let all_bursts: f64 = bursts.iter().sum();
    let spare = (1.0 - rho).max(MIN_SLACK);
    let held = OneByOne::from_flows(config, flows);
    let turns = if config.elevator == Elevator::Bfq && config.bfq.low_latency { RAISED_TURNS } else { 1.0 };

    flows
        .iter()
        .map(|f| {
            let queueing = longest * (1.0 / f.exceedance).ln() / (2.0 * spare);
            // The bound on the others' requests, then shared among VMs in proportion to what each
            // may have in flight.
            let steady = f.steady();
            let self_cost = if steady { 0.0 } else { f.most };
            let bound = (all_rated - self_cost).max(0.0);
            let share = if bound > 0.0 { queueing.min(bound) / bound } else { 0.0 };
            let own_floods = floods[f.vm] - if steady { f.most } else { 0.0 };
            let own_burst = if steady { 0.0 } else { f.cost * (f.more_at_once() - f.ahead_in_burst()) };
            let own_bursts = (bursts[f.vm] - own_burst).max(0.0);
            let own_vm = turns * (own_floods + own_bursts + share * (rated[f.vm] - self_cost).max(0.0));
            let (own_writes, other_writes) = held.tail(flows, f);
            let own_vm = own_vm + own_writes;
            let other_bursts = all_bursts - bursts[f.vm];
            let other_vms = turns
                * (all_floods - floods[f.vm] + other_bursts + share * (all_rated - rated[f.vm])).max(0.0)
                + batch(config, flows, f)
                + other_writes;
            // A request does not wait for itself.
            let ahead = (mean - f.cost * in_flight(f, mean).min(1.0)).max(0.0);
            let possible = f.depth / (f.service + ahead + held.mean(f));
            let kept = if f.rate > 0.0 { (possible / f.rate).min(1.0) } else { 1.0 };
            let slack = (1.0 - rho).min(1.0 - f.rate / possible);
            Wait { own_vm, other_vms, kept, slack, service: f.service }
        })
        .collect()
}

/// mq-deadline sends requests of one direction in batches, so a read may wait for a batch of writes
/// and the other way.
fn batch(config: &Config, flows: &[Flow], me: &Flow) -> f64 {
    if config.elevator != Elevator::MqDeadline {
        return 0.0;
    }
    let writes = |f: &Flow| f.op.write_share();
    flows
        .iter()
        .filter(|f| (writes(me) < 1.0 && writes(f) > 0.0) || (writes(me) > 0.0 && writes(f) < 1.0))
        .map(|f| f.cost * f.depth.min(DEADLINE_BATCH))
        .fold(0.0, f64::max)
}

/// Kyber while reads are slow: writes pass one by one.
///
/// Kyber takes reads that are slower on the device than their target for congestion, and then
/// lowers the number of writes that may be in flight, as long as these are within their own target
/// (`kyber_timer_fn`), down to one. Every other write before a write then costs it a wait for the
/// reads that fill the device. Measured alongside a limited flood of reads:
/// `docs/explanation/models.md`.
#[derive(Default)]
struct OneByOne {
    /// Tail delay of a write for each write before it, s; 0 where Kyber does not throttle writes.
    tail: f64,
    /// Mean delay for each, where only floods without a limit fill the device all the time.
    mean: f64,
    /// Mean share of the time in which some write is in flight.
    rho: f64,
    /// Most writes that may wait at once.
    writers: f64,
}

impl OneByOne {
    fn from_flows(config: &Config, flows: &[Flow]) -> Self {
        if config.elevator != Elevator::Kyber {
            return Self::default();
        }
        let fill = |of: &dyn Fn(&Flow) -> bool| -> f64 {
            let reads = flows.iter().filter(|f| f.op.write_share() < 1.0);
            let alone = reads.clone().map(|f| f.service).fold(0.0, f64::max);
            let queue: f64 =
                reads.filter(|f| of(f)).map(|f| f.cost * f.burst() * (1.0 - f.op.write_share())).sum();
            // Where it takes longer than the write target, writes miss theirs too.
            if alone + queue > KYBER_READ_TARGET { queue.min(KYBER_WRITE_TARGET) } else { 0.0 }
        };
        let (tail, mean) = (fill(&Flow::steady), fill(&|f| f.flood));
        let rho = flows.iter().map(|f| f.rate * f.op.write_share() * (f.service + mean)).sum();
        Self { tail, mean, rho, writers: writers(flows, |_| true) }
    }

    /// Tail delay of a write of `me`, s: behind writes of its own VM, and behind those of others.
    fn tail(&self, flows: &[Flow], me: &Flow) -> (f64, f64) {
        if self.tail <= 0.0 || me.op.write_share() <= 0.0 {
            return (0.0, 0.0);
        }
        let own = writers(flows, |f| f.vm == me.vm);
        (self.tail * (own - 1.0).max(0.0), self.tail * (self.writers - own))
    }

    /// Mean delay of a request of `me`, s: as in M/D/1, and never behind more writes than there can
    /// be.
    fn mean(&self, me: &Flow) -> f64 {
        let turns = if self.rho < 1.0 { 1.0 + self.rho / (2.0 * (1.0 - self.rho)) } else { f64::INFINITY };
        me.op.write_share() * self.mean * turns.min((self.writers - 1.0).max(0.0))
    }
}

/// Writes of some flows that may be in flight or wait.
fn writers(flows: &[Flow], of: impl Fn(&Flow) -> bool) -> f64 {
    flows.iter().filter(|f| f.op.write_share() > 0.0 && of(f)).map(Flow::burst).sum()
}
