//! Load of a spec's tasks on the device under a configuration: caps applied, floods found.

use rtvirtio_spec::{LabKind, Reach, Spec, Vm};
use rtvirtio_units::blk_throttle;

use crate::device::Device;
use crate::flow::{Access, Flow};
use crate::percentile_of;
use crate::types::Config;

/// A jiffy at HZ = 250 (Debian's and most distributions' kernels), s. BFQ's slice timeouts are
/// counted in jiffies.
pub(crate) const JIFFY: f64 = 0.004;

/// Requests per second that stand for an unlimited rate: never reached by a device, small enough to
/// keep sums finite.
const UNBOUNDED_RATE: f64 = 1e9;

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
            let service = device.service(task);
            let cost = device.occupancy(task);
            let depth = f64::from(task.depth.max(1));
            // Rate of the task alone: limited by its depth or by the device.
            let alone = 1.0 / cost.max(service / depth);
            let (rate, flood, allowed) = match (task.rate, cap) {
                (Some(r), _) => {
                    let rate = r.0.clamp(0.0, UNBOUNDED_RATE) * through;
                    (rate, false, (through < 1.0).then_some(rate * blk_throttle::SLICE))
                }
                // A cap above that rate has no effect.
                (None, Some(c)) if (c - declared).max(0.0) / floods < alone => {
                    ((c - declared).max(0.0) / floods, false, Some(c * blk_throttle::SLICE / floods))
                }
                (None, _) => (alone, true, None),
            };
            flows.push(Flow {
                vm: i,
                op: task.op,
                access: Access::from_task(task),
                block: task.mean_block(),
                largest: task.block.0 as f64,
                rate,
                flood,
                allowed,
                depth,
                at_once: f64::from(task.at_once()),
                through_cap: if task.rate.is_some() { through } else { 1.0 },
                service,
                cost,
                most: device.most_occupancy(task),
                declared: task.rate.is_some(),
                exceedance: percentile_of(task).exceedance().clamp(1e-9, 0.5),
            });
        }
    }
    flows
}

/// Whether each task of a VM has its own BFQ queue on the host.
///
/// QEMU with `aio=native` or `threads=1` submits all requests of a VM from one thread, and BFQ keys
/// its queues by the submitting task's io_context, so such a VM is one queue; a process VM has a
/// process per task, each its own queue.
pub(crate) fn queue_per_task(vm: &Vm) -> bool {
    matches!(vm.reach, Reach::Lab(LabKind::Process))
}

/// Whether requests pass a guest kernel and a VMM.
#[must_use]
pub fn is_guest(vm: &Vm) -> bool {
    !queue_per_task(vm)
}
