//! The device time that a VM must have reserved so that its targets hold in the worst case.

use rtvirtio_model::Profile;
use rtvirtio_sched::Op;
use rtvirtio_sched::bound::EdfRoom;
use rtvirtio_spec::{Arrival, CpuNeed, Target, Task, Vm};
use rtvirtio_units::{Bytes, Iops, Nanos, Ratio};
use serde::Serialize;

use crate::DeviceModel;

/// Choices of a plan of the I/O domain.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// A reservation's rate over the declared one, so that a closed loop can catch up.
    pub headroom: f64,
    /// Longest stall of a vCPU that is planned for; its tasks then submit the accumulated requests
    /// as one burst. The first value that fits is chosen.
    pub catch_up: Vec<Nanos>,
    /// Quanta; the first that fits is chosen.
    pub quanta: Vec<Bytes>,
    /// Latency within the guest, which the I/O domain cannot reduce.
    pub guest: Nanos,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            headroom: 1.1,
            catch_up: [5, 1, 0].map(Nanos::from_millis).to_vec(),
            quanta: [64, 16, 4].map(Bytes::from_kib).to_vec(),
            guest: Nanos(0),
        }
    }
}

impl Options {
    /// Defaults with the latency within the guest from a profile: the longest request of a guest
    /// that ran alone, less the device's median.
    #[must_use]
    pub fn of_profile(profile: &Profile) -> Self {
        let alone = profile.read.iter().min_by_key(|p| p.depth).map_or(0, |p| p.p50.0);
        let guest = profile.guest.as_ref().map_or(0, |g| g.point.max.0.saturating_sub(alone));
        Self { guest: Nanos(guest), ..Self::default() }
    }
}

/// Reserved device time of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Reserve {
    /// Share of one of the device's servers; above 1 where it has several.
    pub share: Ratio,
    /// Burst of device time.
    pub burst: Nanos,
    /// Longest time from a request to its completion.
    pub deadline: Nanos,
    /// Share of one server that all reservations together must leave free, so that the VM's tasks
    /// that make one request at a time keep their rates; 0 without such tasks.
    #[serde(skip)]
    pub spare: Ratio,
}

/// Parameters that all VMs of a device share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Shape {
    /// Pieces at the device at once.
    pub window: u32,
    /// Largest piece of a transfer.
    pub quantum: Bytes,
    /// The vCPU stall that bursts are sized for.
    pub catch_up: Nanos,
    /// Longest time of one piece of a discard.
    pub discard: Nanos,
}

/// Time of a discard's piece that allows large pieces: deallocating one block takes nearly as long
/// as a large range.
const DISCARD_PIECE: Nanos = Nanos(500_000);

impl Shape {
    /// All shapes of a device in the order of preference: with the largest window (a smaller one
    /// costs throughput), then with the longest stall to catch up from, then with the largest
    /// pieces, then with the largest pieces of discards. Never empty.
    pub fn all(device: &DeviceModel, options: &Options) -> Vec<Self> {
        let full = device.window.max(1);
        let short = Nanos(device.cost.discard_ns);
        let mut all = Vec::new();
        for window in std::iter::successors(Some(full), |w| (*w > 1).then_some(w / 2)) {
            for &catch_up in &options.catch_up {
                for &quantum in &options.quanta {
                    all.extend([short.max(DISCARD_PIECE), short].map(|discard| Self {
                        window,
                        quantum,
                        catch_up,
                        discard,
                    }));
                }
            }
        }
        if all.is_empty() {
            // `options` may be empty.
            let quantum = Bytes::from_kib(64);
            all.push(Self { window: full, quantum, catch_up: Nanos(0), discard: short });
        }
        all
    }

    /// The device model with these parameters.
    #[must_use]
    pub fn device(&self, device: &DeviceModel) -> DeviceModel {
        let mut device = device.limited_to(self.window);
        device.cost.discard_ns = self.discard.0;
        device
    }
}

/// The targets of a task that can be promised. A flush has no bound, see
/// [`Unpromised`](crate::Unpromised).
#[must_use]
pub fn promised(task: &Task) -> &[Target] {
    if task.sync.is_some() { &[] } else { &task.targets }
}

/// The shortest latency that a VM can be promised; `None` for one that is promised nothing.
#[must_use]
pub fn tightest(vm: &Vm) -> Option<Nanos> {
    vm.tasks.iter().flat_map(promised).map(|t| t.latency).min()
}

/// Whether a task with a target is a closed loop.
#[must_use]
pub fn has_closed_loop_target(vm: &Vm) -> bool {
    vm.tasks.iter().any(|t| !promised(t).is_empty() && t.rate.is_none())
}

/// The reservation of the VM's tasks with a target, which leave `target` for the device. All
/// requests are charged as the task's most expensive operation, so a random run of expensive ones
/// stays within it. `device` is that of the shape ([`Shape::device`]).
///
/// Closed loops keep the reservation used up, so a request of their VM first waits until the burst
/// is replenished ([`replenishment`]): half of the target covers that, and half is the deadline.
#[must_use]
pub fn reserve(vm: &Vm, device: &DeviceModel, options: &Options, shape: Shape, target: Nanos) -> Reserve {
    let declared = declared_share(vm, device, shape.quantum);
    let (mut share, mut burst) = (declared * options.headroom, 0.0);
    for task in vm.tasks.iter().filter(|t| !promised(t).is_empty()) {
        let most = max_request_cost(task, device, shape.quantum);
        match task.rate {
            Some(rate) => burst += at_once(vm, task, rate, device, shape) * most,
            None => burst += f64::from(task.depth) * most,
        }
    }
    let deadline = if has_closed_loop_target(vm) {
        share = f64::max(share, declared + 2.0 * burst / target.0.max(1) as f64);
        Nanos(target.0 / 2)
    } else {
        target
    };
    // Whole ns per second, rounded up: the scheduler's unit.
    let share = (share * 1e9).ceil() / 1e9;
    let spare = vm.tasks.iter().map(|task| spare_for(task, device, shape)).fold(0.0, f64::max);
    Reserve { share: Ratio(share), burst: Nanos(burst.ceil() as u64), deadline, spare: Ratio(spare) }
}

/// Longest time for which the tasks of a VM stand still and then submit what was due: `catch_up`,
/// or the time `2 (P - Q)` without a CPU under its contract, where that is longer. A budget that is
/// found for a demand answers within the deadline, which is no shorter than that time.
#[must_use]
pub fn longest_stall(vm: &Vm, catch_up: Nanos) -> Nanos {
    let blackout = match vm.cpu.need {
        None => Nanos(0),
        Some(CpuNeed::Contract { budget, period }) => Nanos(2 * period.0.saturating_sub(budget.0)),
        Some(CpuNeed::Demand { deadline, .. }) => deadline,
    };
    blackout.max(catch_up)
}

/// Longest delay of a task's requests before their submission that the reservation counts: the
/// stall, and of a task that makes one request at a time also that of the device, behind which it
/// falls.
#[must_use]
pub fn counted_delay(vm: &Vm, task: &Task, device: &DeviceModel, shape: Shape) -> Nanos {
    let stall = longest_stall(vm, shape.catch_up);
    let device = if task.arrival == Arrival::Closed { device.latency } else { Nanos(0) };
    Nanos(stall.0.saturating_add(device.0))
}

/// Requests of a task with a rate that the reservation counts at once.
fn at_once(vm: &Vm, task: &Task, rate: Iops, device: &DeviceModel, shape: Shape) -> f64 {
    let delay = counted_delay(vm, task, device, shape);
    f64::from(task.at_once()) + (rate.0 * delay.as_secs_f64()).ceil()
}

/// Longest time from the intended start of a request to its completion, for a task that makes one
/// at a time at a rate r while its guest never stalls and the reservation covers all its requests.
/// `all` has the reservations of all VMs.
///
/// In a busy period that begins with an intended start, the n-th request completes by
/// `t_n = (k T + n (W C + c) + sum b_j) / (k - R) + n l`, with R and b_j the rate and the bursts of
/// all other demand, and l the last piece's time beyond its share of the servers. Each step is at
/// most `1 / r` where the task keeps its rate ([`missed_turn`]), so that `t_n - (n - 1) / r` is
/// largest at n = 1.
#[must_use]
pub fn longest_from_intended(
    (vm, task): (&Vm, &Task),
    device: &DeviceModel,
    shape: Shape,
    all: &[Reserve],
) -> Option<Nanos> {
    let rate = task.rate?;
    let cost = max_request_cost(task, device, shape.quantum);
    let room = device.with_window(shape.window).edf_room(device.max_piece_cost(shape.quantum));
    let reserved: f64 = all.iter().map(|r| r.share.0).sum();
    let bursts: f64 = all.iter().map(|r| r.burst.0 as f64).sum();
    let others = (bursts - at_once(vm, task, rate, device, shape) * cost).max(0.0);
    let left = room.speed - (reserved - rate.0 * cost / 1e9).max(0.0);
    (left > 0.0).then(|| Nanos(((cost + room.lost + others) / left).ceil() as u64))
}

/// Longest time for which a request of a VM with a closed loop waits for the reservation that
/// [`reserve`] made.
///
/// A request waits for those of its VM that came before it and are not covered yet: with W the
/// longest wait, these are the burst, which has all requests of closed loops, and what the tasks
/// with a rate r submit in W. So `W <= (b + r W) / share`, that is, `W <= b / (share - r)`.
#[must_use]
pub fn replenishment(vm: &Vm, device: &DeviceModel, shape: Shape, reserve: &Reserve) -> Nanos {
    let left = reserve.share.0 - declared_share(vm, device, shape.quantum);
    Nanos((reserve.burst.0 as f64 / left.max(1e-9)).ceil() as u64)
}

/// Longest time of one request of a task that makes this many a second, one at a time, without the
/// device's stalls. `reserved` is the sum of all reservations' shares.
///
/// Each request finds the window full again, of the largest pieces, and those of other reservations
/// go before it at their rates: the time x in which the device serves all that is
/// `k x = W C + c + (reserved - own) x`.
fn longest_turn(task: &Task, rate: Iops, device: &DeviceModel, shape: Shape, reserved: f64) -> Nanos {
    let cost = max_request_cost(task, device, shape.quantum);
    let room = steady_room(device, shape);
    let left = room.speed - (reserved - rate.0 * cost / 1e9).max(0.0);
    Nanos(((cost + room.lost) / left.max(1e-9)).ceil() as u64)
}

/// Room of a device between its stalls: a loss at every request, not once.
fn steady_room(device: &DeviceModel, shape: Shape) -> EdfRoom {
    let mut steady = device.with_window(shape.window);
    (steady.latency, steady.deallocations.piece) = (Nanos(0), Nanos(0));
    steady.edf_room(device.max_piece_cost(shape.quantum))
}

/// Share of one server that all reservations must leave free for a promised task that makes one
/// request at a time at a rate r; 0 for any other.
///
/// With L the loss of the [`steady_room`] and R the sum of all shares, its turn is
/// `x = (c + L) / (k - R + r c)` ([`longest_turn`]), so that `r x <= 1` exactly if
/// `R + r L <= k`. Of several tasks the largest `r L` decides.
fn spare_for(task: &Task, device: &DeviceModel, shape: Shape) -> f64 {
    let rate = task.rate.filter(|_| task.arrival == Arrival::Closed && !promised(task).is_empty());
    rate.map_or(0.0, |rate| (rate.0 * steady_room(device, shape).lost).ceil() / 1e9)
}

/// Longest time of one request of a promised task that makes one at a time, where it is too long
/// for the task's rate: a target is met only with it. `reserved` is the sum of all reservations'
/// shares.
#[must_use]
pub fn missed_turn(task: &Task, device: &DeviceModel, shape: Shape, reserved: f64) -> Option<Nanos> {
    let spare = spare_for(task, device, shape);
    let is_missed = spare > 0.0 && reserved + spare > steady_room(device, shape).speed;
    task.rate.filter(|_| is_missed).map(|rate| longest_turn(task, rate, device, shape, reserved))
}

/// Share of one server that the promised tasks with a rate need.
fn declared_share(vm: &Vm, device: &DeviceModel, quantum: Bytes) -> f64 {
    let tasks = vm.tasks.iter().filter(|t| !promised(t).is_empty());
    let share = |t: &Task| Some(t.rate?.0 * max_request_cost(t, device, quantum) / 1e9);
    tasks.filter_map(share).fold(0.0, |a, b| a + b)
}

/// Device time of a task's most expensive request, in ns.
fn max_request_cost(task: &Task, device: &DeviceModel, quantum: Bytes) -> f64 {
    let read = device.request(Op::Read, task.block, quantum);
    let write = device.request(Op::Write, task.block, quantum);
    match task.op.write_share() {
        w if w <= 0.0 => read,
        w if w >= 1.0 => write,
        _ => read.max(write),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use rtvirtio_sched::Bucket;
    use rtvirtio_twin::TwinProfile;

    use super::*;

    /// Longest wait for the bucket of a reservation: a closed loop of so many requests, and one
    /// request in each period, the oldest first.
    fn longest_wait(reserve: &Reserve, cost: u64, depth: usize, period: u64) -> u64 {
        let mut bucket = Bucket::new((reserve.share.0 * 1e9).round() as u64, reserve.burst.0);
        let (mut closed, mut due, mut longest) = (VecDeque::from(vec![0u64; depth]), 0u64, 0u64);
        for _ in 0..10_000 {
            let in_loop = closed.front().copied().filter(|at| *at < due);
            let arrival = in_loop.unwrap_or(due);
            let covered = bucket.ready_at(Nanos(arrival), cost);
            bucket.take(covered, cost);
            longest = longest.max(covered.0 - arrival);
            if in_loop.is_some() {
                closed.pop_front();
                closed.push_back(covered.0);
            } else {
                due += period;
            }
        }
        longest
    }

    /// The requests that were due without a CPU come at once.
    #[test]
    fn a_burst_has_what_is_due_while_a_contract_gives_no_cpu() {
        let twin = TwinProfile::built_in("qlc-nvme").unwrap();
        let mut device = DeviceModel::declared("q", &twin, Bytes(1 << 30));
        device.latency = Nanos(0);
        let options = Options::default();
        let shape = Shape::all(&device, &options)[0];
        let cost = device.request(Op::Read, Bytes::from_kib(4), shape.quantum) as u64;
        let requests = |cpu: &str| {
            let text = format!(
                "[device]\ntwin = \"qlc-nvme\"\n[[vm]]\nname = \"a\"\nlab = \"qemu\"\n{cpu}\n[[vm.task]]\nname = \"t\"\nop = \"read\"\n\
                 block = \"4KiB\"\nrate = \"100/s\"\ntarget = {{ latency = \"20ms\" }}\n"
            );
            let spec = rtvirtio_spec::parse("test", &text).unwrap_or_else(|e| panic!("{e:?}"));
            reserve(&spec.vms[0], &device, &options, shape, Nanos::from_millis(20)).burst.0 / cost
        };
        assert_eq!(requests(""), 2);
        // 32 ms without a CPU.
        assert_eq!(requests("cpu = { budget = \"4ms\", period = \"20ms\" }"), 5);
        // No longer than the stall that every guest may have.
        assert_eq!(requests("cpu = { budget = \"18ms\", period = \"20ms\" }"), 2);
        // A task that makes one request at a time falls behind a stall of the device too.
        let mut stalls = device.clone();
        stalls.latency = Nanos::from_millis(14);
        let text = "[device]\ntwin = \"qlc-nvme\"\n[[vm]]\nname = \"a\"\nlab = \"qemu\"\n[[vm.task]]\nname = \"t\"\nop = \"read\"\n\
                    block = \"4KiB\"\nrate = \"100/s\"\ntarget = { latency = \"60ms\" }\n";
        for (loops, requests) in [("closed", 3), ("open", 2)] {
            let text = text.replace("rate =", &format!("loop = \"{loops}\"\nrate ="));
            let spec = rtvirtio_spec::parse("test", &text).unwrap_or_else(|e| panic!("{e:?}"));
            let of = reserve(&spec.vms[0], &stalls, &options, shape, Nanos::from_millis(60));
            assert_eq!(of.burst.0 / cost, requests, "{loops}");
        }
    }

    /// A closed loop takes all that a task with a rate leaves of the reservation.
    #[test]
    fn a_closed_loop_and_a_rate_wait_no_longer_than_half_of_the_target() {
        let twin = TwinProfile::built_in("qlc-nvme").unwrap();
        let device = DeviceModel::declared("q", &twin, Bytes(1 << 30));
        let options = Options::default();
        let shape = Shape::all(&device, &options)[0];
        let cost = device.request(Op::Read, Bytes::from_kib(4), shape.quantum) as u64;
        let target = Nanos::from_millis(20);
        for rate in [10, 100, 1_000, 5_000] {
            let task = |name: &str, more: &str| {
                format!(
                    "[[vm.task]]\nname = \"{name}\"\nop = \"read\"\nblock = \"4KiB\"\n{more}\ntarget = {{ latency = \"20ms\" }}\n"
                )
            };
            let text = "[device]\ntwin = \"qlc-nvme\"\n[[vm]]\nname = \"a\"\nlab = \"qemu\"\n".to_owned()
                + &task("rated", &format!("rate = \"{rate}/s\""))
                + &task("loop", "depth = 4");
            let spec = rtvirtio_spec::parse("test", &text).unwrap_or_else(|e| panic!("{e:?}"));
            let reserved = reserve(&spec.vms[0], &device, &options, shape, target);
            let bound = replenishment(&spec.vms[0], &device, shape, &reserved);
            assert!(bound.0 <= target.0 / 2 + 1, "{rate}: {bound} {reserved:?}");
            let longest = longest_wait(&reserved, cost, 4, 1_000_000_000 / rate);
            assert!(longest <= bound.0, "{rate}: {longest} {bound}");
        }
    }
}
