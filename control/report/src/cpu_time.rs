//! CPU time that requests of guests take, against what the host has free for them.

use rtvirtio_planner::{CpuRoom, CpuWait, TaskOutlook};

use crate::num;

/// Sentences about the CPU time of guests' requests, with what would help where it is too little.
#[must_use]
pub fn cpu_room(room: &CpuRoom) -> String {
    room_sentence("CPU", room)
}

fn room_sentence(subject: &str, room: &CpuRoom) -> String {
    let CpuRoom { cpus, needed, free, rate, each_ns, .. } = room;
    let each = num::latency(*each_ns, "");
    let sum = format!(
        "{subject}: requests of guests need {needed:.2} of {cpus} CPUs at the declared rates ({rate:.0}/s, {each} each, as measured in a VM), \
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

/// Facts that the estimated waits of some tasks follow from; `None` where no wait is estimated.
fn source(of: &CpuWait) -> Option<String> {
    of.wait_ns?;
    Some(of.mean_ns.zip(of.n).map_or_else(
        || "from the use of the CPUs by others and by guests".to_owned(),
        |(mean, n)| format!("from {n} waits of a thread in a second, {} in the mean", num::latency(mean, "")),
    ))
}

/// Estimated waits for CPUs that follow from the same facts.
struct Waits {
    source: Option<String>,
    vms: Vec<String>,
    /// Each with its percentile.
    waits: Vec<String>,
    /// Whether a target may be missed for them.
    are_too_long: bool,
}

impl Waits {
    fn sentence(&self) -> String {
        let (vms, waits) = (self.vms.join(", "), self.waits.join(", "));
        match &self.source {
            Some(source) => format!("CPU of {vms}: an estimate: requests wait {waits}, {source}"),
            None => format!(
                "CPU of {vms}: requests may need more CPU time than others leave, or than one CPU of the guest has, so no \
                 wait is estimated"
            ),
        }
    }
}

/// Sentences about the waits of the tasks, one for all that follow from the same facts, with
/// whether a target may be missed for them.
pub(crate) fn waits_of_tasks(tasks: &[TaskOutlook]) -> Vec<(String, bool)> {
    let mut all: Vec<Waits> = Vec::new();
    for task in tasks.iter().filter(|task| task.target_ns.is_some()) {
        let Some(wait) = &task.cpu_wait else { continue };
        let (source, vms, waits) = (source(wait), Vec::new(), Vec::new());
        let at = all.iter().position(|of| of.source == source).unwrap_or_else(|| {
            all.push(Waits { source, vms, waits, are_too_long: false });
            all.len() - 1
        });
        let of = &mut all[at];
        of.are_too_long |= task.waits_too_long();
        let estimated = wait.wait_ns.map(|ns| format!("{} ({})", num::latency(ns, ""), task.percentile));
        of.waits.extend(estimated.filter(|said| !of.waits.contains(said)));
        of.vms.extend(Some(&task.vm).filter(|vm| !of.vms.contains(vm)).cloned());
    }
    all.iter().map(|of| (of.sentence(), of.are_too_long)).collect()
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

/// Sentences about the CPU time for the tasks' requests, with whether it is too little; with the
/// names of its VMs where these share no CPU with the others.
pub(crate) fn rooms_of_tasks(tasks: &[TaskOutlook]) -> Vec<(String, bool)> {
    let mut all: Vec<(&CpuRoom, Vec<&str>)> = Vec::new();
    for task in tasks {
        let Some(room) = &task.cpu else { continue };
        let at = all.iter().position(|(of, _)| *of == room).unwrap_or_else(|| {
            all.push((room, Vec::new()));
            all.len() - 1
        });
        let vms = &mut all[at].1;
        vms.extend(Some(task.vm.as_str()).filter(|vm| !vms.contains(vm)));
    }
    let is_one = all.len() == 1;
    let subject = |vms: &[&str]| if is_one { "CPU".to_owned() } else { format!("CPU of {}", vms.join(", ")) };
    all.iter().map(|(room, vms)| (room_sentence(&subject(vms), room), room.is_short())).collect()
}

#[cfg(test)]
mod tests {
    use rtvirtio_units::Nanos;

    use super::*;

    #[test]
    fn an_estimate_says_so_once_for_all_that_follow_from_the_same_facts() {
        let ms = |of| Some(Nanos::from_millis(of));
        let mut tasks = crate::fixture::plan().tasks;
        tasks.truncate(4);
        let (vms, percentile) = (["plc", "plc", "hmi", "hist"], tasks[0].percentile);
        let by_use = |wait_ns| CpuWait { wait_ns, mean_ns: None, n: None };
        let waits = [
            by_use(ms(9)),
            by_use(ms(12)),
            by_use(ms(9)),
            CpuWait { wait_ns: ms(3), mean_ns: ms(1), n: Some(812) },
        ];
        for ((task, vm), wait) in tasks.iter_mut().zip(vms).zip(waits) {
            (task.vm, task.cpu_wait) = (vm.to_owned(), Some(wait));
        }
        let said = waits_of_tasks(&tasks).into_iter().map(|(said, _)| said).collect::<Vec<_>>();
        let want = format!(
            "CPU of plc, hmi: an estimate: requests wait 9ms ({percentile}), 12ms ({percentile}), from the use of the CPUs by \
             others and by guests"
        );
        assert_eq!((said.len(), &said[0]), (2, &want));
        assert!(said[1].ends_with(" from 812 waits of a thread in a second, 1ms in the mean"), "{said:?}");
        tasks[0].cpu_wait = Some(by_use(None));
        let said = waits_of_tasks(&tasks);
        assert!(
            said[0].0.starts_with(
                "CPU of plc: requests may need more CPU time than others leave, or than one CPU of the guest has"
            ),
            "{said:?}"
        );
        assert_eq!(said.len(), 3);
    }

    #[test]
    fn cpus_that_vms_do_not_share_are_said_apart() {
        let room =
            CpuRoom { cpus: 1, needed: 0.3, free: 0.9, rate: 500.0, each_ns: Nanos(600_000), margin: 1.2 };
        let mut tasks = crate::fixture::plan().tasks;
        tasks.truncate(3);
        for (task, vm) in tasks.iter_mut().zip(["plc", "hmi", "hist"]) {
            (task.vm, task.cpu) = (vm.to_owned(), Some(room));
        }
        assert_eq!(rooms_of_tasks(&tasks), [(cpu_room(&room), false)]);
        tasks[2].cpu = Some(CpuRoom { free: 0.1, ..room });
        let said = rooms_of_tasks(&tasks);
        assert!(said[0].0.starts_with("CPU of plc, hmi: requests of guests need 0.30 of 1 CPUs"), "{said:?}");
        assert!(said[1].0.starts_with("CPU of hist: ") && said[1].1, "{said:?}");
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
