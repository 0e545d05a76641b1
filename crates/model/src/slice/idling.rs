//! BFQ while it idles: one queue has the device, the others wait for its slice to end.

use rtvirtio_spec::Spec;

use super::Wait;
use crate::load::{Flow, JIFFY, queue_per_task};
use crate::types::{Bfq, Config, Elevator};

/// Timeouts that a queue may have to wait for being charged too much, see [`waits`]. Fitted: 3 VMs with 3 or 6 queues in all, under
/// defaults, measured 0.25 to 2.0 s (12 runs of 10 to 60 s) where their slices add up to 0.25 and 0.62 s; with `low_latency` on and
/// off alike, so weight raising is not the reason.
const DEBT: f64 = 10.0;

/// BFQ waits at least this long for the next request of a weight-raised queue, s (`bfq_arm_slice_timer`).
const RAISED_IDLE: f64 = 0.020;

/// `slice_idle` below which the kernel raises it when `strict_guarantees` is set, s (`bfq_strict_guarantees_store`).
const STRICT_IDLE: f64 = 0.008;

/// Whether BFQ idles: it must be the elevator with `slice_idle` > 0 (or strict), and the scenario must be asymmetric, which
/// it is as soon as requests of two groups are pending, or a queue is weight-raised among others.
pub(super) fn acts(spec: &Spec, config: &Config) -> bool {
    let bfq = &config.bfq;
    let idles = bfq.strict_guarantees || bfq.slice_idle.0 > 0;
    let queues: usize = spec.vms.iter().map(|vm| if queue_per_task(vm) { vm.tasks.len() } else { 1 }).sum();
    config.elevator == Elevator::Bfq && idles && (spec.vms.len() > 1 || (queues > 1 && bfq.low_latency))
}

/// One BFQ queue: a task of a process VM, or all of a QEMU guest.
#[derive(Clone, Default)]
struct Queue {
    rate: f64,
    /// Sums weighted by rate, divided by it once all flows are in.
    service: f64,
    cost: f64,
    exclusive: f64,
    block: f64,
    depth: f64,
    flood: bool,
}

impl Queue {
    fn of<'a>(flows: impl IntoIterator<Item = &'a Flow>) -> Self {
        let mut q = Self::default();
        let mut weight = 0.0;
        for f in flows {
            let w = f.rate.max(f64::MIN_POSITIVE);
            weight += w;
            q.rate += f.rate;
            q.service += w * f.service;
            q.cost += w * f.cost;
            q.exclusive += w * f.exclusive();
            q.block += w * f.block;
            q.depth += f.burst();
            q.flood |= f.flood;
        }
        for sum in [&mut q.service, &mut q.cost, &mut q.exclusive, &mut q.block] {
            *sum /= weight.max(f64::MIN_POSITIVE);
        }
        q
    }

    /// Whether BFQ, idling for `idle`, sees the next request before it gives up: think time = 1 / rate - service.
    fn holds(&self, idle: f64) -> bool {
        self.flood || (self.rate > 0.0 && 1.0 / self.rate - self.service < idle)
    }
}

/// How long BFQ lets a queue have the device.
struct Rules {
    idle: f64,
    timeout: f64,
    /// Bytes; infinite while BFQ tunes it (to what the device moves in `timeout_sync`, so it never ends a slice first).
    budget: f64,
}

impl Rules {
    fn new(bfq: &Bfq) -> Self {
        let mut idle = bfq.slice_idle.as_secs_f64();
        if bfq.strict_guarantees {
            idle = idle.max(STRICT_IDLE);
        }
        // The timeout is checked in jiffies, on arrivals and completions: one jiffy late.
        let timeout = bfq.timeout_sync.as_secs_f64();
        if bfq.low_latency {
            idle = idle.max(RAISED_IDLE);
        }
        Self { idle, timeout: timeout + JIFFY, budget: bfq.max_budget.map_or(f64::INFINITY, |b| b.0 as f64) }
    }

    /// Slice of a queue that was kept waiting for `waited`:
    ///
    /// ```text
    /// catch-up = min(budget / block, 1 + rate * waited) * service
    /// slice    = min(timeout, catch-up + idle)                              think time >= idle
    ///          = min(timeout, max(budget / (rate * block), catch-up + idle))  think time <  idle: it keeps the device
    ///          = min(timeout, budget / block * cost)                        flood
    /// ```
    fn slice(&self, q: &Queue, waited: f64) -> f64 {
        let requests = (self.budget / q.block.max(1.0)).max(1.0);
        if q.flood {
            return self.timeout.min(requests * q.cost);
        }
        let brief = requests.min(1.0 + q.rate * waited) * q.service + self.idle;
        let slice = if q.holds(self.idle) { brief.max(requests / q.rate) } else { brief };
        self.timeout.min(slice)
    }

    /// Slices of all queues: each catches up on what it missed while the holders had the device.
    fn slices<'a>(&self, queues: impl Iterator<Item = &'a Queue> + Clone) -> Vec<f64> {
        let round: f64 = queues.clone().map(|q| self.slice(q, 0.0)).sum();
        queues.map(|q| self.slice(q, round)).collect()
    }
}

/// The waits of all tasks.
///
/// Between two services of a queue its group serves each of its queues once (equal weights inside a VM), for `G` in all. WF2Q+
/// meanwhile gives another group j its share of time for that, `G * phi_j / phi_i`, and at worst one whole slice that was due:
///
/// ```text
/// wait = sum over own other queues of slice + sum over other groups of max(G * phi_j / phi_i, longest slice of j) + debt
/// debt = DEBT * timeout * largest phi of the other groups that keep the device / phi_i      when i keeps it too
/// ```
///
/// The debt: a queue whose slice ends by timeout is charged a whole budget, however little it moved (`bfq_bfqq_charge_time`), and
/// is served again only when the others have been charged as much by weight. Those whose requests come slowly need many slices
/// for that.
///
/// A group none of whose queues keeps the device serves at most one slice of each meanwhile, if that is less.
pub(super) fn waits(spec: &Spec, config: &Config, flows: &[Flow]) -> Vec<Wait> {
    let rules = Rules::new(&config.bfq);
    // Per VM its queues; per flow (VM, queue).
    let mut groups: Vec<Vec<Queue>> = Vec::with_capacity(spec.vms.len());
    let mut place = Vec::with_capacity(flows.len());
    let mut rest = flows;
    for (v, vm) in spec.vms.iter().enumerate() {
        let (own, others) = rest.split_at(vm.tasks.len());
        rest = others;
        if queue_per_task(vm) {
            place.extend((0..own.len()).map(|q| (v, q)));
            groups.push(own.iter().map(|f| Queue::of([f])).collect());
        } else {
            place.extend(own.iter().map(|_| (v, 0)));
            groups.push(vec![Queue::of(own)]);
        }
    }
    let flat = rules.slices(groups.iter().flatten());
    let mut next = flat.into_iter();
    let slices: Vec<Vec<f64>> = groups.iter().map(|g| next.by_ref().take(g.len()).collect()).collect();
    let totals: Vec<f64> = slices.iter().map(|s| s.iter().sum()).collect();
    let longest: Vec<f64> = slices.iter().map(|s| s.iter().fold(0.0, |a: f64, &b| a.max(b))).collect();
    let greedy: Vec<bool> = groups.iter().map(|g| g.iter().any(|q| q.holds(rules.idle))).collect();
    let phi: Vec<f64> = config.vms.iter().map(|c| f64::from(c.weight)).collect();
    // One request at the device at a time when strict.
    let per_request = |q: &Queue| if config.bfq.strict_guarantees { q.service } else { q.exclusive };
    let shares = shares(&groups, &phi, rules.idle, per_request);

    let other_vms: Vec<f64> = (0..groups.len())
        .map(|i| {
            (0..groups.len())
                .filter(|&j| j != i)
                .map(|j| {
                    let due = (totals[i] * phi[j] / phi[i]).max(longest[j]);
                    if greedy[j] { due } else { due.min(totals[j]) }
                })
                .sum::<f64>()
                + debt(i, rules.timeout, &greedy, &phi)
        })
        .collect();

    flows
        .iter()
        .zip(&place)
        .map(|(f, &(v, q))| {
            let queue = &groups[v][q];
            // Requests of the VM's other tasks in the same queue go first come, first served.
            let beside = (queue.depth - f.burst()).max(0.0) * queue.cost;
            let need = queue.rate * per_request(queue);
            let mut kept = if need > 0.0 { (shares[v][q] / need).min(1.0) } else { 1.0 };
            if queue.flood && !f.flood && f.rate > 0.0 {
                // Behind a flood in its own queue it gets one turn per pass of that queue.
                kept = (shares[v][q] * f.depth / (f.service + beside) / f.rate).min(1.0);
            }
            Wait {
                own_vm: totals[v] - slices[v][q] + beside,
                other_vms: other_vms[v],
                kept,
                slack: 1.0 - need / shares[v][q].max(f64::MIN_POSITIVE),
                service: f.service,
            }
        })
        .collect()
}

/// What group `i` may wait for having been charged too much; none while no other group keeps the device, or when its own slices
/// never end by timeout.
fn debt(i: usize, timeout: f64, greedy: &[bool], phi: &[f64]) -> f64 {
    let heaviest = (0..phi.len()).filter(|&j| j != i && greedy[j]).map(|j| phi[j]).fold(0.0, f64::max);
    if greedy[i] { DEBT * timeout * heaviest / phi[i] } else { 0.0 }
}

/// Share of the device's time that each queue can count on.
///
/// Without a flood, time that a queue leaves is given to the others (BFQ injects their requests while it idles), so
/// demands are filled from the smallest up, by weight. Beside a flood nothing is left over: a queue that keeps the device gets its
/// VM's share by weight, divided by the queues that do.
fn shares(
    groups: &[Vec<Queue>],
    phi: &[f64],
    idle: f64,
    per_request: impl Fn(&Queue) -> f64,
) -> Vec<Vec<f64>> {
    let need = |q: &Queue| if q.flood { f64::INFINITY } else { q.rate * per_request(q) };
    let group_need: Vec<f64> = groups.iter().map(|g| g.iter().map(&need).sum()).collect();
    let group_share = fill(1.0, &group_need, phi);
    let flood = groups.iter().flatten().any(|q| q.flood);
    let total: f64 = phi.iter().sum();
    groups
        .iter()
        .enumerate()
        .map(|(i, g)| {
            let needs: Vec<f64> = g.iter().map(&need).collect();
            let filled = fill(group_share[i], &needs, &vec![1.0; g.len()]);
            let holders = g.iter().filter(|q| q.holds(idle)).count().max(1) as f64;
            let held = phi[i] / total / holders;
            g.iter().zip(filled).map(|(q, f)| if flood && q.holds(idle) { f.min(held) } else { f }).collect()
        })
        .collect()
}

/// Weighted max-min fair division: everyone gets what they need or their weight's share of what the others leave, whichever
/// is less; what nobody needs is spread by weight.
fn fill(whole: f64, needs: &[f64], weights: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by(|&a, &b| (needs[a] / weights[a]).total_cmp(&(needs[b] / weights[b])));
    let mut out = vec![0.0; needs.len()];
    let (mut left, mut weight) = (whole, weights.iter().sum::<f64>());
    for &i in &order {
        let fair = left * weights[i] / weight;
        out[i] = needs[i].min(fair);
        left -= out[i];
        weight -= weights[i];
    }
    // Spread the rest so that a share says what one can count on, not what one asks for.
    let all: f64 = weights.iter().sum();
    for (o, w) in out.iter_mut().zip(weights) {
        *o += left.max(0.0) * w / all;
    }
    out
}

/// What a task waits for inside its own guest, s.
///
/// All tasks of a guest are in one group, so its BFQ idles only for weight-raised queues. Then a task waits for the other
/// tasks' slices; otherwise, and with every other guest elevator, for their requests, which the host part counts.
pub(super) fn guest_wait(config: &Config, flows: &[Flow], me: usize) -> f64 {
    let vm = &config.vms[flows[me].vm];
    let bfq = &vm.guest_bfq;
    if vm.guest_elevator != Elevator::Bfq
        || !((bfq.low_latency && bfq.slice_idle.0 > 0) || bfq.strict_guarantees)
    {
        return 0.0;
    }
    let rules = Rules::new(bfq);
    let queues: Vec<Queue> = flows.iter().filter(|f| f.vm == flows[me].vm).map(|f| Queue::of([f])).collect();
    let mine = flows[..me].iter().filter(|f| f.vm == flows[me].vm).count();
    let slices = rules.slices(queues.iter());
    slices.iter().enumerate().filter(|&(i, _)| i != mine).map(|(_, s)| s).sum()
}
