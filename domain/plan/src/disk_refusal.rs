//! Reasons for which a VM gets no reservation of its disk.

use rtvirtio_capacity::{DeviceModel, Shape, missed_turn};
use rtvirtio_sched::bound::{Flow, Refusal, discard_clause};
use rtvirtio_spec::Spec;
use rtvirtio_units::{Iops, Nanos};

/// Checks that each promised task which makes one request at a time keeps its rate: a target is met
/// only with it.
///
/// # Errors
/// The reason of the first that does not.
pub(crate) fn keep_rates(
    spec: &Spec,
    device: &DeviceModel,
    shape: Shape,
    flows: &[Flow],
) -> Result<(), String> {
    let reserved: f64 = flows.iter().filter(|f| f.deadline.is_some()).map(|f| f.rate).sum();
    for flow in flows.iter().filter(|f| f.deadline.is_some()) {
        let vm = &spec.vms[flow.vm];
        for task in &vm.tasks {
            if let Some(turn) = missed_turn(task, device, shape, reserved) {
                return Err(format!(
                    "{}/{} makes one request at a time, and each may wait for what the device holds already: {} in the worst case; lower its rate, or write loop = \"open\"",
                    vm.name,
                    task.name,
                    Iops((1.0 / turn.as_secs_f64()).floor())
                ));
            }
        }
    }
    Ok(())
}

/// Words of the scheduler's refusal of one VM's reservation.
pub(crate) fn reason(spec: &Spec, asking: usize, deadline: Nanos, refusal: &Refusal) -> String {
    match refusal {
        Refusal::Deadline { vm, needed, blocking, latency, discard, .. } if *vm == asking => format!(
            "{needed} may pass in the worst case, {deadline} are left for the device: {blocking} behind what it holds already, {latency} for its own stalls{}, the rest behind \
             this VM's own requests and those of more urgent ones",
            discard_clause(*discard)
        ),
        Refusal::Deadline { vm, .. } => {
            let other = spec.vms.get(*vm).map_or("another VM", |vm| vm.name.as_str());
            format!("{other}, which is more urgent, could then no longer be kept")
        }
        other => other.to_string(),
    }
}
