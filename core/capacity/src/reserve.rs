//! The device time that a VM must have reserved so that its targets hold in the worst case.

use rtvirtio_model::Profile;
use rtvirtio_sched::Op;
use rtvirtio_spec::{Target, Task, Vm};
use rtvirtio_units::{Bytes, Nanos, Ratio};
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
/// is replenished: half of the target covers that, and half is the deadline.
#[must_use]
pub fn reserve(vm: &Vm, device: &DeviceModel, options: &Options, shape: Shape, target: Nanos) -> Reserve {
    let (mut share, mut burst) = (0.0, 0.0);
    for task in vm.tasks.iter().filter(|t| !promised(t).is_empty()) {
        let most = max_request_cost(task, device, shape.quantum);
        match task.rate {
            Some(rate) => {
                share += rate.0 * most * options.headroom / 1e9;
                burst += (f64::from(task.at_once()) + (rate.0 * shape.catch_up.as_secs_f64()).ceil()) * most;
            }
            None => burst += f64::from(task.depth) * most,
        }
    }
    let deadline = if has_closed_loop_target(vm) {
        share = f64::max(share, 2.0 * burst / target.0.max(1) as f64);
        Nanos(target.0 / 2)
    } else {
        target
    };
    Reserve { share: Ratio(share), burst: Nanos(burst.ceil() as u64), deadline }
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
