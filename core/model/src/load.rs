//! What the tasks of a spec ask of the device under a configuration: caps applied, floods found.

use rtvirtio_spec::{LabKind, Op, Reach, Spec, Vm};

use crate::device::Device;
use crate::percentile_of;
use crate::types::Config;

/// One jiffy at HZ = 250 (Debian's and most distributions' kernels), s. BFQ's slice timeouts are counted in jiffies.
pub(crate) const JIFFY: f64 = 0.004;

/// Length over which blk-throttle counts, s (`DFL_THROTL_SLICE`, HZ / 10, `block/blk-throttle.c`; a fifth of it on disks without rotation from Linux 6.10 until it was mended, in 6.12.63 for one, and
/// before 6.10 where `BLK_DEV_THROTTLING_LOW` is built in). It rounds the time that has passed up to whole slices
/// (`tg_within_iops_limit`), so that what a limit allows for a slice may all come at its begin. Measured on 6.18: a neighbour of 32 in flight, held to 682/s, filled
/// the device for others as often as its depth allows; held to 200/s, twenty requests at a time.
pub(crate) const THROTTLE_SLICE: f64 = 0.1;

/// Requests per second that stand for "as fast as it can": never reached by a device, small enough to keep sums finite.
const UNBOUNDED_RATE: f64 = 1e9;

/// One task as the device sees it.
#[derive(Clone)]
pub(crate) struct Flow {
    /// Index of its VM.
    pub(crate) vm: usize,
    pub(crate) op: Op,
    /// Bytes per request.
    pub(crate) block: f64,
    /// Requests per second that it offers after its VM's cap.
    pub(crate) rate: f64,
    /// Whether it always has a request waiting: no declared rate and no cap that limits it.
    pub(crate) flood: bool,
    /// Where its rate is a cap's doing, the requests that the cap allows for a [`THROTTLE_SLICE`], which may all come at its begin. Those of the VM's
    /// tasks with rates are among them: a flood takes what there is. A task with a rate that the cap is below has a request waiting at all times, as a flood has.
    pub(crate) allowed: Option<f64>,
    /// Most requests in flight.
    pub(crate) depth: f64,
    /// Share of the declared rate that the VM's cap lets through.
    pub(crate) through_cap: f64,
    /// Time of one request on an idle device, s.
    pub(crate) service: f64,
    /// Device time it takes from others, s.
    pub(crate) cost: f64,
    /// Whether a rate was declared.
    pub(crate) declared: bool,
    /// Share of requests that may lie above the predicted latency.
    pub(crate) exceedance: f64,
}

impl Flow {
    /// Whether it asks for as much as it may get: without a rate, or with one that its VM's cap is below.
    pub(crate) fn steady(&self) -> bool {
        self.flood || self.allowed.is_some()
    }

    /// Requests of this flow that the tail must expect in flight at once.
    pub(crate) fn burst(&self) -> f64 {
        self.allowed.map_or(self.depth, |allowed| self.depth.min(1.0 + allowed))
    }

    /// Requests of every [`THROTTLE_SLICE`] that a cap allows beyond what can be in flight at once: the flow goes unchecked until they are through.
    pub(crate) fn beyond_queue(&self) -> f64 {
        self.allowed.map_or(0.0, |allowed| (1.0 + allowed - self.depth).max(0.0))
    }

    /// Device time per request when it has the device to itself at its own depth, s.
    pub(crate) fn exclusive(&self) -> f64 {
        self.cost.max(self.service / self.depth.max(1.0))
    }
}

/// All flows in spec order.
pub(crate) fn flows(spec: &Spec, config: &Config, device: &Device) -> Vec<Flow> {
    let mut flows = Vec::new();
    for (i, vm) in spec.vms.iter().enumerate() {
        let declared: f64 =
            vm.tasks.iter().filter_map(|t| t.rate).map(|r| r.0.clamp(0.0, UNBOUNDED_RATE)).sum();
        let floods = vm.tasks.iter().filter(|t| t.rate.is_none()).count().max(1) as f64;
        let cap = config.vms[i].cap.map(|c| c.0);
        let through = cap.map_or(1.0, |c| if declared > c { c / declared } else { 1.0 });
        for task in &vm.tasks {
            let service = device.service(task.op, task.block);
            let cost = device.occupancy(task.op, task.block);
            let depth = f64::from(task.depth.max(1));
            // What it would do alone: limited by its depth or by the device.
            let alone = 1.0 / cost.max(service / depth);
            let (rate, flood, allowed) = match (task.rate, cap) {
                (Some(r), _) => {
                    let rate = r.0.clamp(0.0, UNBOUNDED_RATE) * through;
                    (rate, false, (through < 1.0).then_some(rate * THROTTLE_SLICE))
                }
                // A cap that it could not reach anyway does not hold it.
                (None, Some(c)) if (c - declared).max(0.0) / floods < alone => {
                    ((c - declared).max(0.0) / floods, false, Some(c * THROTTLE_SLICE / floods))
                }
                (None, _) => (alone, true, None),
            };
            flows.push(Flow {
                vm: i,
                op: task.op,
                block: task.block.0 as f64,
                rate,
                flood,
                allowed,
                depth,
                through_cap: if task.rate.is_some() { through } else { 1.0 },
                service,
                cost,
                declared: task.rate.is_some(),
                exceedance: percentile_of(task).exceedance().clamp(1e-9, 0.5),
            });
        }
    }
    flows
}

/// How many BFQ queues a VM has on the host.
///
/// QEMU with `aio=native` or `threads=1` submits all requests of a VM from one thread, and BFQ keys its queues by the
/// submitting task's io_context, so such a VM is one queue; a process VM has a process per task, each its own queue.
pub(crate) fn queue_per_task(vm: &Vm) -> bool {
    matches!(vm.reach, Reach::Lab(LabKind::Process))
}

/// Whether requests pass a guest kernel and a VMM.
pub(crate) fn is_guest(vm: &Vm) -> bool {
    !queue_per_task(vm)
}
