//! CPU time that requests of guests take, against what the host has free for them.

use rtvirtio_planner::{CpuRoom, CpuWait, TaskOutlook};

use crate::num;

/// Sentences about the CPU time of guests' requests, with what would help where it is too little.
#[must_use]
pub fn cpu_room(room: &CpuRoom) -> String {
    let CpuRoom { cpus, needed, free, rate, each_ns, .. } = room;
    let each = num::latency(*each_ns, "");
    let sum = format!(
        "CPU: requests of guests need {needed:.2} of {cpus} CPUs at the declared rates ({rate:.0}/s, {each} each, as measured in a VM), \
         {free:.2} are free now"
    );
    if !room.is_short() {
        return sum;
    }
    let lower = match room.most() {
        most if most >= 1.0 => format!("lower the rates to {most:.0}/s in sum"),
        _ => "lower the rates".to_owned(),
    };
    if room.is_too_much() {
        return format!(
            "{sum}: they wait without end, whatever the disk and its settings do. {lower}",
            lower = capital(&lower)
        );
    }
    format!(
        "{sum}: they wait while others use the CPUs, whatever the disk and its settings do. End other programs, {lower}, or give the VMs CPU \
         contracts (`cpu` in the spec)"
    )
}

/// Sentence about the estimated waits of a task for CPUs.
fn cpu_wait(vm: &str, of: &CpuWait) -> String {
    let from = of.mean_ns.zip(of.n).map_or_else(
        || "from the use of the CPUs by others and by guests".to_owned(),
        |(mean, n)| format!("from {n} waits of a thread in a second, {} in the mean", num::latency(mean, "")),
    );
    match of.wait_ns {
        Some(wait) => {
            let wait = num::latency(wait, "");
            format!("CPU of {vm}: an estimate: requests wait {wait} at this percentile, {from}")
        }
        None => {
            format!(
                "CPU of {vm}: its requests may need more CPU time than others leave, or than one CPU of the guest has, so no \
                 wait is estimated"
            )
        }
    }
}

/// Sentences about the waits of the tasks, the same one once, with whether a target may be missed
/// for it.
pub(crate) fn waits_of_tasks(tasks: &[TaskOutlook]) -> Vec<(String, bool)> {
    let mut all: Vec<(String, bool)> = Vec::new();
    for task in tasks.iter().filter(|task| task.target_ns.is_some()) {
        let Some(wait) = &task.cpu_wait else { continue };
        let said = cpu_wait(&task.vm, wait);
        match all.iter_mut().find(|(of, _)| *of == said) {
            Some((_, too_long)) => *too_long |= task.waits_too_long(),
            None => all.push((said, task.waits_too_long())),
        }
    }
    all
}

/// Sentence about CPU time of which it is not known whether it suffices.
pub(crate) fn unknown_of_tasks(tasks: &[TaskOutlook]) -> Option<String> {
    let why = tasks.iter().find_map(|task| task.cpu_unknown.as_ref())?;
    Some(format!("CPU: whether the guests have CPU time enough is not known: {why}"))
}

/// With a first letter that begins a sentence.
fn capital(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
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
    fn an_estimate_says_so() {
        let ms = |of| Some(Nanos::from_millis(of));
        let wait = CpuWait { wait_ns: ms(9), mean_ns: ms(1), n: Some(812) };
        let said = cpu_wait("plc", &wait);
        assert!(said.contains("an estimate: requests wait 9ms at this percentile, from 812 waits"), "{said}");
        let wait = CpuWait { mean_ns: None, n: None, ..wait };
        let said = cpu_wait("plc", &wait);
        assert!(
            said.ends_with("wait 9ms at this percentile, from the use of the CPUs by others and by guests")
        );
        let said = cpu_wait("plc", &CpuWait { wait_ns: None, ..wait });
        assert!(
            said.contains(
                "its requests may need more CPU time than others leave, or than one CPU of the guest has"
            ),
            "{said}"
        );
    }

    #[test]
    fn too_little_is_said_with_the_rate_that_fits() {
        let room = |free| CpuRoom {
            cpus: 2,
            needed: 1.03,
            free,
            rate: 1800.0,
            each_ns: Nanos(572_000),
            margin: 1.8,
        };
        let said = cpu_room(&room(1.2));
        assert!(said.contains("need 1.03 of 2 CPUs") && said.ends_with("1.20 are free now"), "{said}");
        let said = cpu_room(&room(0.4));
        assert!(said.contains("0.40 are free now: they wait while others"), "{said}");
        assert!(said.contains("to 699/s in sum"), "{said}");
        let said = cpu_room(&room(0.0));
        assert!(said.contains("End other programs, lower the rates, or"), "{said}");
        let said = cpu_room(&CpuRoom { needed: 2.5, ..room(2.0) });
        assert!(
            said.contains("without end") && said.ends_with(". Lower the rates to 1440/s in sum"),
            "{said}"
        );
    }
}
