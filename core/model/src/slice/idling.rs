//! BFQ while it idles: one queue has the device, the others wait for its slice to end.

use std::ops::Range;

use rtvirtio_spec::Spec;

use super::Wait;
use crate::flow::Flow;
use crate::load::{JIFFY, queue_per_task};
use crate::types::{Bfq, Config, Elevator, VmConfig};

/// Timeouts that a queue may have to wait for being charged too much, see [`waits`]. Fitted: 3 VMs
/// with 3 or 6 queues in all, under defaults, measured 0.25 to 2.0 s (12 runs of 10 to 60 s) where
/// their slices sum to 0.25 and 0.62 s; with `low_latency` on and off alike, so weight raising is
/// not the reason.
const DEBT: f64 = 10.0;

/// BFQ waits at least this long for the next request of a weight-raised queue, s
/// (`bfq_arm_slice_timer`).
const RAISED_IDLE: f64 = 0.020;

/// `slice_idle` below which the kernel raises it when `strict_guarantees` is set, s
/// (`bfq_strict_guarantees_store`).
const STRICT_IDLE: f64 = 0.008;

/// Whether BFQ idles: it must be the elevator with `slice_idle` > 0 (or strict), and the scenario
/// must be asymmetric, which it is as soon as requests of two groups are pending, or a queue is
/// weight-raised among others.
pub(super) fn acts(spec: &Spec, config: &Config) -> bool {
    let bfq = &config.bfq;
    let idles = bfq.strict_guarantees || bfq.slice_idle.0 > 0;
    let queues: usize = spec.vms.iter().map(|vm| if queue_per_task(vm) { vm.tasks.len() } else { 1 }).sum();
    config.elevator == Elevator::Bfq && idles && (spec.vms.len() > 1 || (queues > 1 && bfq.low_latency))
}

/// A BFQ queue: a task of a process VM, or all tasks of a QEMU guest.
#[derive(Clone, Default)]
struct Queue {
    rate: f64,
    /// Rate-weighted sums, divided by the weights once all flows are in.
    service: f64,
    cost: f64,
    exclusive: f64,
    block: f64,
    depth: f64,
    flood: bool,
}

impl Queue {
    fn from_flows<'a>(flows: impl IntoIterator<Item = &'a Flow>) -> Self {
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

    /// Whether BFQ, idling for `idle`, gets the next request before it expires the queue: think
    /// time = 1 / rate - service.
    fn holds(&self, idle: f64) -> bool {
        self.flood || (self.rate > 0.0 && 1.0 / self.rate - self.service < idle)
    }
}

/// BFQ's limits of a slice, s.
struct Rules {
    idle: f64,
    timeout: f64,
    /// Bytes; infinite while BFQ tunes it (to what the device moves in `timeout_sync`, so it never
    /// ends a slice first).
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
    ///          = min(timeout, max(budget / (rate * block), catch-up + idle))  think time <  idle:
    ///                                                                     it keeps the device
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

    /// Slices of all queues: each catches up on its requests during the other queues' slices.
    fn slices<'a>(&self, queues: impl Iterator<Item = &'a Queue> + Clone) -> Vec<f64> {
        let round: f64 = queues.clone().map(|q| self.slice(q, 0.0)).sum();
        queues.map(|q| self.slice(q, round)).collect()
    }
}

/// The waits of all tasks.
///
/// Between two services of a queue its group serves each of its queues once (equal weights inside a
/// VM), for `G` in all. WF2Q+ meanwhile gives another group j its share of time for that,
/// `G * phi_j / phi_i`, and at worst one whole slice that was due:
///
/// ```text
/// wait = sum over own other queues of slice
///      + sum over other groups of max(G * phi_j / phi_i, longest slice of j)
///      + debt
/// debt = DEBT * timeout * largest phi of the other groups that keep the device / phi_i
///        when i keeps it too
/// ```
///
/// The debt: a queue whose slice ends by timeout is charged a whole budget, however little it moved
/// (`bfq_bfqq_charge_time`), and is served again only when the others have been charged as much by
/// weight. Queues whose requests come slowly need many slices for that.
///
/// A group none of whose queues keeps the device serves at most one slice of each meanwhile, if
/// that is less.
pub(super) fn waits(spec: &Spec, config: &Config, flows: &[Flow]) -> Vec<Wait> {
    let rules = Rules::new(&config.bfq);
    let mut queues = Vec::with_capacity(flows.len());
    // Per VM its queues; per flow its queue.
    let mut of_vm = Vec::with_capacity(spec.vms.len());
    let mut place = Vec::with_capacity(flows.len());
    let mut rest = flows;
    for vm in &spec.vms {
        let (own, others) = rest.split_at(vm.tasks.len());
        rest = others;
        let first = queues.len();
        if queue_per_task(vm) {
            place.extend(first..first + own.len());
            queues.extend(own.iter().map(|f| Queue::from_flows([f])));
        } else {
            place.extend(own.iter().map(|_| first));
            queues.push(Queue::from_flows(own));
        }
        of_vm.push(first..queues.len());
    }
    let slices = rules.slices(queues.iter());
    let group = |(range, vm): (&Range<usize>, &VmConfig)| {
        let own = &slices[range.clone()];
        Group {
            total: own.iter().sum(),
            longest: own.iter().fold(0.0, |a: f64, &b| a.max(b)),
            greedy: queues[range.clone()].iter().any(|q| q.holds(rules.idle)),
            phi: f64::from(vm.weight),
        }
    };
    let groups: Vec<Group> = of_vm.iter().zip(&config.vms).map(group).collect();
    // With strict_guarantees one request is at the device at a time.
    let per_request = |q: &Queue| if config.bfq.strict_guarantees { q.service } else { q.exclusive };
    let shares = shares((&queues, &of_vm), &groups, rules.idle, per_request);

    let other_vms: Vec<f64> = groups
        .iter()
        .enumerate()
        .map(|(i, me)| {
            let others = groups.iter().enumerate().filter(|&(j, _)| j != i).map(|(_, other)| {
                let due = (me.total * other.phi / me.phi).max(other.longest);
                if other.greedy { due } else { due.min(other.total) }
            });
            others.sum::<f64>() + debt(i, rules.timeout, &groups)
        })
        .collect();

    flows
        .iter()
        .zip(&place)
        .map(|(f, &q)| {
            let (queue, share) = (&queues[q], shares[q]);
            // Requests of the VM's other tasks in the same queue, first come, first served.
            let alongside = (queue.depth - f.burst()).max(0.0) * queue.cost + f.ahead_in_burst() * f.cost;
            let need = queue.rate * per_request(queue);
            let mut kept = if need > 0.0 { (share / need).min(1.0) } else { 1.0 };
            if queue.flood && !f.flood && f.rate > 0.0 {
                // Behind a flood in its own queue the task gets one turn per pass of that queue.
                kept = (share * f.depth / (f.service + alongside) / f.rate).min(1.0);
            }
            Wait {
                own_vm: groups[f.vm].total - slices[q] + alongside,
                other_vms: other_vms[f.vm],
                kept,
                slack: 1.0 - need / share.max(f64::MIN_POSITIVE),
                service: f.service,
            }
        })
        .collect()
}

/// The queues of one VM together.
struct Group {
    /// Sum of the slices, s.
    total: f64,
    /// Longest slice of one queue, s.
    longest: f64,
    /// Whether BFQ idles for one of the queues until its slice ends.
    greedy: bool,
    /// BFQ weight of the VM's cgroup.
    phi: f64,
}

/// Wait of group `i` for having been charged too much, s; 0 while no other group keeps the device,
/// or when its own slices never end by timeout.
fn debt(i: usize, timeout: f64, groups: &[Group]) -> f64 {
    let others = groups.iter().enumerate().filter(|&(j, other)| j != i && other.greedy);
    let heaviest = others.map(|(_, other)| other.phi).fold(0.0, f64::max);
    if groups[i].greedy { DEBT * timeout * heaviest / groups[i].phi } else { 0.0 }
}

/// Least share of the device's time of each queue.
///
/// Without a flood, time that a queue leaves is given to the others (BFQ injects their requests
/// while it idles), so demands are filled from the smallest up, by weight. With a flood nothing is
/// left over: a queue that keeps the device gets its VM's share by weight, divided by the number of
/// such queues.
fn shares(
    (queues, of_vm): (&[Queue], &[Range<usize>]),
    groups: &[Group],
    idle: f64,
    per_request: impl Fn(&Queue) -> f64,
) -> Vec<f64> {
    let need = |q: &Queue| if q.flood { f64::INFINITY } else { q.rate * per_request(q) };
    let needs: Vec<f64> = queues.iter().map(need).collect();
    let group_needs: Vec<f64> = of_vm.iter().map(|range| needs[range.clone()].iter().sum()).collect();
    let mut group_shares = Vec::with_capacity(groups.len());
    fill(1.0, &group_needs, |i| groups[i].phi, &mut group_shares);
    let flood = queues.iter().any(|q| q.flood);
    let total: f64 = groups.iter().map(|g| g.phi).sum();
    let mut out = Vec::with_capacity(queues.len());
    for ((range, group), share) in of_vm.iter().zip(groups).zip(group_shares) {
        fill(share, &needs[range.clone()], |_| 1.0, &mut out);
        let own = &queues[range.clone()];
        if flood && group.greedy {
            let holders = own.iter().filter(|q| q.holds(idle)).count().max(1) as f64;
            let held = group.phi / total / holders;
            let holders = own.iter().zip(&mut out[range.clone()]).filter(|(q, _)| q.holds(idle));
            holders.for_each(|(_, share)| *share = share.min(held));
        }
    }
    out
}

/// Weighted max-min fair division: each queue gets its need or its weight's share of the remainder,
/// whichever is less; capacity that no queue needs is spread by weight. The shares go to the end of
/// `out`.
fn fill(whole: f64, needs: &[f64], weight: impl Fn(usize) -> f64, out: &mut Vec<f64>) {
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by(|&a, &b| (needs[a] / weight(a)).total_cmp(&(needs[b] / weight(b))));
    let first = out.len();
    out.resize(first + needs.len(), 0.0);
    let out = &mut out[first..];
    let all: f64 = (0..needs.len()).map(&weight).sum();
    let (mut left, mut weights) = (whole, all);
    for &i in &order {
        out[i] = needs[i].min(left * weight(i) / weights);
        left -= out[i];
        weights -= weight(i);
    }
    // Spread the remainder, so that a share is the guaranteed part, not the demand.
    for (i, share) in out.iter_mut().enumerate() {
        *share += left.max(0.0) * weight(i) / all;
    }
}

/// Wait of a task inside its own guest, s.
///
/// All tasks of a guest are in one group, so its BFQ idles only for weight-raised queues. Then a
/// task waits for the other tasks' slices; otherwise, and with every other guest elevator, for
/// their requests, which the host part counts.
pub(super) fn guest_wait(config: &Config, flows: &[Flow], me: usize) -> f64 {
    let vm = &config.vms[flows[me].vm];
    let bfq = &vm.guest_bfq;
    if vm.guest_elevator != Elevator::Bfq
        || !((bfq.low_latency && bfq.slice_idle.0 > 0) || bfq.strict_guarantees)
    {
        return 0.0;
    }
    let rules = Rules::new(bfq);
    let queues: Vec<Queue> =
        flows.iter().filter(|f| f.vm == flows[me].vm).map(|f| Queue::from_flows([f])).collect();
    let mine = flows[..me].iter().filter(|f| f.vm == flows[me].vm).count();
    let slices = rules.slices(queues.iter());
    slices.iter().enumerate().filter(|&(i, _)| i != mine).map(|(_, s)| s).sum()
}
