//! CPU time that requests of guests take, against what the host has free for them.

use rtvirtio_planner::{CpuRoom, TaskOutlook};

use crate::num;

/// Sentences about the CPU time of guests' requests, with what would help where it is too little.
#[must_use]
pub fn cpu_room(room: &CpuRoom) -> String {
    let CpuRoom { cpus, needed, free, rate, each_ns } = room;
    let each = num::latency(*each_ns, "");
    let sum = format!(
        "CPU: requests of guests need {needed:.2} of {cpus} CPUs at the declared rates ({rate:.0}/s, {each} each, as measured in a VM), \
         {free:.2} are free now"
    );
    if !room.is_short() {
        return sum;
    }
    let most = room.most();
    format!(
        "{sum}: they wait for a CPU, whatever the disk and its settings do. End other programs, lower the rates to {most:.0}/s in sum, or \
         give the VMs CPU contracts (`cpu` in the spec)"
    )
}

/// That of the tasks, which have the same one where they have any.
pub(crate) fn of_tasks(tasks: &[TaskOutlook]) -> Option<&CpuRoom> {
    tasks.iter().find_map(|task| task.cpu.as_ref())
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Nanos;

    use super::*;

    #[test]
    fn too_little_is_said_with_the_rate_that_fits() {
        let room = |free| CpuRoom { cpus: 2, needed: 1.03, free, rate: 1800.0, each_ns: Nanos(572_000) };
        let said = cpu_room(&room(1.2));
        assert!(said.contains("need 1.03 of 2 CPUs") && said.ends_with("1.20 are free now"), "{said}");
        let said = cpu_room(&room(0.4));
        assert!(said.contains("0.40 are free now: they wait") && said.contains("to 699/s in sum"), "{said}");
    }
}
