//! Interrupts of the spec's disks, kept off the CPUs that vCPUs have by `cores`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use rtvirtio_apply::{Applied, KnobState, Left, LeftCause, Line, Machine, NoGuests, Status, Target, Write};
use rtvirtio_cores::Cpu;
use rtvirtio_cpu::Cores;
use rtvirtio_kernel::irq::{Vector, Vectors};
use rtvirtio_kernel::text::{cpu_list, cpu_ranges};
use rtvirtio_kernel::{BlockDevice, HostError, Root, Stack, irq, topology};
use rtvirtio_spec::{Device, HostSpec};

use crate::acting;
use crate::contracts::{self, VmCpu};
use crate::dirs::{Dirs, is_there};
use crate::error::{Context as _, Result};
use crate::holders;
use crate::progress::Progress;
use crate::site::Site;

/// Fact and remedy where the kernel lets no program move an interrupt.
const FIXED: &str = "the kernel lets no program move them; where it manages them itself they come for requests that are sent from these CPUs, and \
                     booting with isolcpus=managed_irq,CPUS keeps those of other CPUs away";

/// The writes that keep the interrupts of the disks of VMs with `cores` off the CPUs of the vCPUs
/// of all of these. `sites` are the spec's devices where they were looked for. What cannot be moved
/// is reported, and hinders nothing.
pub(crate) fn writes(
    host: &HostSpec,
    sites: Option<&[Site]>,
    held: &[VmCpu],
    dirs: &Dirs,
    progress: &dyn Progress,
) -> Vec<Write> {
    let with_cores: BTreeMap<&str, &Cores> =
        held.iter().filter_map(|v| Some((v.vm.as_str(), v.cores.as_ref()?))).collect();
    if with_cores.is_empty() {
        return Vec::new();
    }
    let root = Root::default();
    let own: Vec<&Cores> = with_cores.values().copied().collect();
    let known =
        find_free(&root, &own, dirs).and_then(|free| Ok((free, journaled(&root, dirs, irq::number_in)?)));
    let (free, journaled) = match known {
        Ok(known) => known,
        Err(e) => {
            progress.warn(&format!("interrupts of disks stay where they are: {e:#}"));
            return Vec::new();
        }
    };
    let mut writes = Vec::new();
    for disk in disks(&root, host, sites, &|vm| with_cores.contains_key(vm), progress) {
        match irq::vectors(&root, &disk) {
            Ok(vectors) => {
                let found = of_disk(&vectors, &free, &journaled);
                found.notes.iter().for_each(|note| progress.step(note));
                // Several disks may have one controller.
                let fresh = |write: &Write| writes.iter().all(|w: &Write| w.target != write.target);
                let more: Vec<Write> = found.writes.into_iter().filter(fresh).collect();
                writes.extend(more);
            }
            Err(e) => progress.warn(&format!("interrupts of {} stay where they are: {e}", disk.name)),
        }
    }
    let numbers: BTreeSet<u32> =
        writes.iter().filter_map(|write| irq::number_in(&write.target.to_string())).collect();
    if !numbers.is_empty() {
        match irq::balancer(&root) {
            Ok(pid) => {
                let vcpus = cpu_ranges(&free.taken);
                pid.into_iter().for_each(|pid| progress.warn(&remedy(pid, &numbers, &vcpus)));
            }
            Err(e) => progress.warn(&format!("whether irqbalance runs is not known: {e}")),
        }
    }
    writes
}

/// Advice on irqbalance. Where the vCPUs' CPUs are banned it moves an interrupt among the others
/// only, and numbers that change at a restart of the host do not matter.
fn remedy(pid: u32, numbers: &BTreeSet<u32>, vcpus: &str) -> String {
    format!(
        "irqbalance runs (process {pid}) and moves interrupts again: start it with IRQBALANCE_BANNED_CPULIST={vcpus}, or with --banirq=N for each N of {}, or stop it",
        cpu_ranges(numbers)
    )
}

/// CPUs for interrupts, next to those that the VMs of this spec and all others have by `cores`.
fn find_free(root: &Root, own: &[&Cores], dirs: &Dirs) -> Result<Free> {
    let others = holders::cpu_of_others(dirs).context("the CPUs of other VMs are not known")?;
    let cpus = topology(root).context("the host's CPUs are not known")?;
    let placed = || others.iter().filter_map(|(of, _)| of.cores.as_ref());
    let vcpus = |of: &Cores| of.placement.vcpus.clone();
    let siblings = own.iter().copied().chain(placed()).flat_map(|of| of.siblings.iter().copied());
    let siblings: BTreeSet<u32> = siblings.collect();
    let taken: BTreeSet<u32> = own.iter().copied().flat_map(vcpus).collect();
    Ok(Free::new(&cpus, taken, &placed().flat_map(vcpus).collect(), &siblings))
}

/// Numbers that `number_in` takes from the paths of settings that the journals of other state
/// directories have, such as those of interrupts, each with the directory.
pub(crate) fn journaled(
    root: &Root,
    dirs: &Dirs,
    number_in: fn(&str) -> Option<u32>,
) -> Result<BTreeMap<u32, PathBuf>> {
    let mut found = BTreeMap::new();
    for of in acting::elsewhere(dirs)? {
        let status = rtvirtio_apply::status(&of.state, &Machine::new(root, &NoGuests))?;
        let Some(status) = status.filter(|status| !status.rebooted) else { continue };
        // The number of an interrupt that is gone may be another's by now.
        let held = status.knobs.iter().filter(|knob| !matches!(knob.state, KnobState::Gone { .. }));
        let numbers = held.filter_map(|knob| number_in(&knob.path));
        found.extend(numbers.map(|number| (number, of.state.clone())));
    }
    Ok(found)
}

/// The disks below the devices of these VMs, each once.
fn disks(
    root: &Root,
    host: &HostSpec,
    sites: Option<&[Site]>,
    is_wanted: &dyn Fn(&str) -> bool,
    progress: &dyn Progress,
) -> Vec<BlockDevice> {
    let mut stacks = Vec::new();
    if let Some(sites) = sites {
        let of_vms = sites.iter().filter(|site| site.spec.vms.iter().any(|vm| is_wanted(&vm.name)));
        stacks.extend(of_vms.map(|site| site.stack.clone()));
    } else {
        for part in host.parts().iter().filter(|part| part.spec.vms.iter().any(|vm| is_wanted(&vm.name))) {
            // A lab's device has no interrupt.
            let Device::Path(path) = &part.spec.device else { continue };
            match Stack::find(root, path) {
                Ok(stack) => stacks.push(stack),
                Err(e) => {
                    progress.warn(&format!("interrupts of {} stay where they are: {e}", path.display()));
                }
            }
        }
    }
    let all = stacks.into_iter().flat_map(|stack| stack.disks).map(|disk| (disk.name.clone(), disk));
    all.collect::<BTreeMap<_, _>>().into_values().collect()
}

/// CPUs that are left for interrupts.
struct Free {
    /// CPUs that vCPUs of this spec have.
    taken: BTreeSet<u32>,
    /// CPUs that are online, on no core that a vCPU is to have whole, and of no vCPU.
    online: BTreeSet<u32>,
    /// CPUs among these that are not isolated.
    ordinary: BTreeSet<u32>,
    /// CPUs that are online and of no vCPU.
    last: BTreeSet<u32>,
}

impl Free {
    /// `others` are CPUs of the vCPUs of other VMs, `siblings` those of whole cores.
    fn new(cpus: &[Cpu], taken: BTreeSet<u32>, others: &BTreeSet<u32>, siblings: &BTreeSet<u32>) -> Self {
        let left = || cpus.iter().filter(|cpu| !taken.contains(&cpu.id) && !others.contains(&cpu.id));
        let apart = || left().filter(|cpu| !siblings.contains(&cpu.id));
        let online = apart().map(|cpu| cpu.id).collect();
        let ordinary = apart().filter(|cpu| !cpu.isolated).map(|cpu| cpu.id).collect();
        let last = left().map(|cpu| cpu.id).collect();
        Self { taken, online, ordinary, last }
    }

    /// CPUs for an interrupt: those that it has now, else those near its device, else any. `None`
    /// where no CPU is left.
    fn for_interrupt(&self, now: &BTreeSet<u32>, local: &BTreeSet<u32>) -> Option<BTreeSet<u32>> {
        let of = |cpus: &BTreeSet<u32>| cpus.intersection(&self.ordinary).copied().collect();
        let (ordinary, online, last) = (self.ordinary.clone(), self.online.clone(), self.last.clone());
        let choices: [BTreeSet<u32>; 5] = [of(now), of(local), ordinary, online, last];
        choices.into_iter().find(|cpus| !cpus.is_empty())
    }
}

/// Writes and sentences for the interrupts of a disk.
#[derive(Default)]
struct OfDisk {
    writes: Vec<Write>,
    notes: Vec<String>,
}

fn of_disk(found: &Vectors, free: &Free, journaled: &BTreeMap<u32, PathBuf>) -> OfDisk {
    let (mut out, name, taken) = (OfDisk::default(), &found.disk, cpu_ranges(&free.taken));
    let (fixed, movable): (Vec<&Vector>, Vec<&Vector>) =
        found.all.iter().filter(|vector| !vector.cpus.is_disjoint(&free.taken)).partition(|v| v.is_fixed);
    let numbers = |of: &[&Vector]| cpu_ranges(&of.iter().map(|vector| vector.number).collect());
    if found.all.is_empty() {
        out.notes.push(format!("{name}: no interrupt of its own is seen (no MSI), so none is moved"));
    } else if fixed.is_empty() && movable.is_empty() {
        out.notes.push(format!("{name}: none of its interrupts may come to the vCPUs' CPUs {taken}"));
    }
    if !fixed.is_empty() {
        out.notes.push(format!(
            "{name}: its interrupts {} cannot be moved off the vCPUs' CPUs {taken}: {FIXED}",
            numbers(&fixed)
        ));
    }
    let (elsewhere, movable): (Vec<&Vector>, Vec<&Vector>) =
        movable.into_iter().partition(|vector| journaled.contains_key(&vector.number));
    if let Some(state) = elsewhere.first().and_then(|vector| journaled.get(&vector.number)) {
        out.notes.push(format!(
            "{name}: its interrupts {} stay: settings in force of another state directory have them (`--state-dir {}`)",
            numbers(&elsewhere),
            state.display()
        ));
    }
    for vector in &movable {
        let Some(cpus) = free.for_interrupt(&vector.cpus, &found.local) else { break };
        let knob = format!("CPUs of interrupt {} ({name})", vector.number);
        out.writes.push(Write::new(knob, Target::interrupt(vector), cpu_ranges(&cpus)));
    }
    if !movable.is_empty() {
        let numbers = numbers(&movable);
        let now: BTreeSet<u32> =
            movable.iter().filter_map(|v| v.effective.as_ref()).flatten().copied().collect();
        out.notes.push(match (out.writes.is_empty(), now.is_empty()) {
            (true, _) => {
                format!("{name}: its interrupts {numbers} stay: the vCPUs have all CPUs that are online")
            }
            (false, true) => format!("{name}: its interrupts {numbers} are to leave the vCPUs' CPUs {taken}"),
            (false, false) => format!(
                "{name}: its interrupts {numbers}, now sent to CPU {}, are to leave the vCPUs' CPUs {taken}",
                cpu_ranges(&now)
            ),
        });
    }
    out
}

/// Reports what became of interrupts that were to be moved: those that were left, and the CPUs that
/// the others are sent to.
pub(crate) fn report(applied: &Applied, progress: &dyn Progress) {
    left(&applied.left).iter().for_each(|line| progress.warn(line));
    let root = Root::default();
    for Line { knob, path, new, .. } in applied.knobs.iter().filter(|line| is_of(&line.path)) {
        progress.step(&match sent_to(&root, path) {
            Ok(None) => format!("{knob}: set to {new}; the kernel does not tell where it goes"),
            Ok(Some(on)) => {
                let allowed = cpu_list(new).unwrap_or_default();
                let late = if on.is_subset(&allowed) { "" } else { " until it comes once more" };
                format!("{knob}: set to {new}, sent to CPU {}{late}", cpu_ranges(&on))
            }
            Err(e) => format!("{knob}: set to {new}; where it goes is not known: {e}"),
        });
    }
}

/// Sentences on interrupts that were left, one for each error.
fn left(all: &[Left]) -> Vec<String> {
    let mut by_error: BTreeMap<(LeftCause, &str), Vec<&str>> = BTreeMap::new();
    for Left { knob, error, cause } in all {
        by_error.entry((*cause, error.as_str())).or_default().push(knob.as_str());
    }
    let line = |((cause, error), knobs): ((LeftCause, &str), Vec<&str>)| {
        let more = if knobs.len() > 1 { format!(" and {} more", knobs.len() - 1) } else { String::new() };
        let knobs = format!("{}{more}", knobs.first().unwrap_or(&""));
        match cause {
            LeftCause::Fixed => format!("left as before: {knobs}: {error}: {FIXED}"),
            LeftCause::Refused => format!("left as before: {knobs}: the kernel refuses other CPUs: {error}"),
            LeftCause::Raced => format!("left to another program: {knobs}: {error}"),
        }
    };
    by_error.into_iter().map(line).collect()
}

/// CPUs that an interrupt is sent to, by the path of the CPUs that it is set to.
fn sent_to(root: &Root, path: &str) -> Result<Option<BTreeSet<u32>>, HostError> {
    irq::number_in(path).map_or(Ok(None), |number| irq::effective(root, number))
}

/// Whether a setting's path is that of an interrupt's CPUs.
#[must_use]
pub fn is_of(path: &str) -> bool {
    irq::number_in(path).is_some()
}

/// Counts interrupts that may come to no CPU of a vCPU as in force, whatever CPUs another program
/// has given them. The status is of the journal of `rtvirtio apply`.
///
/// # Errors
/// When the contracts in force cannot be read; the status is as before then.
pub fn count_by_vcpus(status: &mut Status, dirs: &Dirs) -> Result<()> {
    if !status.knobs.iter().any(|knob| is_of(&knob.path))
        || !is_there(&dirs.state.join(contracts::IN_FORCE_FILE))?
    {
        return Ok(());
    }
    let contracts = contracts::in_force(&dirs.state)?;
    let cores = contracts.iter().filter_map(|of| of.cores.as_ref());
    count_apart(status, &cores.flat_map(|cores| cores.placement.vcpus.iter().copied()).collect());
    Ok(())
}

fn count_apart(status: &mut Status, vcpus: &BTreeSet<u32>) {
    for knob in status.knobs.iter_mut().filter(|knob| is_of(&knob.path)) {
        let found = match &knob.state {
            KnobState::Changed { found } => cpu_list(found),
            KnobState::Original => knob.old.as_deref().and_then(cpu_list),
            KnobState::InForce | KnobState::Gone { .. } | KnobState::Unknown { .. } => None,
        };
        if found.is_some_and(|cpus| !cpus.is_empty() && cpus.is_disjoint(vcpus)) {
            knob.state = KnobState::InForce;
        }
    }
}

/// Sentences on the interrupts among settings in force, as [`count_by_vcpus`] counts them: the CPUs
/// that they are sent to, and the program that moves them again.
#[must_use]
pub fn notes(status: &Status) -> Vec<String> {
    let (root, mut notes, mut moved) = (Root::default(), Vec::new(), BTreeSet::new());
    for knob in &status.knobs {
        let Some(number) = irq::number_in(&knob.path) else { continue };
        match &knob.state {
            KnobState::InForce => match sent_to(&root, &knob.path) {
                Ok(on) => {
                    notes.extend(on.map(|on| format!("{}: sent to CPU {}", knob.knob, cpu_ranges(&on))));
                }
                Err(e) => notes.push(format!("{}: where it goes is not known: {e}", knob.knob)),
            },
            KnobState::Changed { .. } | KnobState::Original => {
                moved.insert(number);
            }
            KnobState::Gone { .. } | KnobState::Unknown { .. } => {}
        }
    }
    if !moved.is_empty() {
        let back = format!("interrupts {} of disks may come to the vCPUs' CPUs again", cpu_ranges(&moved));
        notes.push(match irq::balancer(&root) {
            Ok(Some(pid)) => format!("{back}: {}", remedy(pid, &moved, "CPUS")),
            Ok(None) => {
                format!(
                    "{back}: the kernel, as where all CPUs of one go offline, or another program moved them; no irqbalance runs"
                )
            }
            Err(e) => {
                format!(
                    "{back}: the kernel or another program moved them; whether irqbalance runs is not known: {e}"
                )
            }
        });
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector(number: u32, cpus: &str, is_fixed: bool) -> Vector {
        let effective = Some(BTreeSet::from([*cpu_list(cpus).unwrap().first().unwrap()]));
        let cpus = cpu_list(cpus).unwrap();
        Vector { number, file: "/sys/x/msi_irqs/1".into(), inode: 1, cpus, effective, is_fixed }
    }

    /// CPUs 0 to 7, 6 and 7 isolated.
    fn free(taken: &[u32], others: &[u32], siblings: &[u32]) -> Free {
        let cpu =
            |id| Cpu { id, core: id, llc: 0, node: 0, capacity: 1024, isolated: id > 5, tickless: false };
        let set = |cpus: &[u32]| cpus.iter().copied().collect::<BTreeSet<u32>>();
        Free::new(&(0..8).map(cpu).collect::<Vec<_>>(), set(taken), &set(others), &set(siblings))
    }

    fn on(all: Vec<Vector>, free: &Free, journaled: &[u32]) -> (Vec<String>, String) {
        let local = BTreeSet::from([2, 3]);
        let journaled = journaled.iter().map(|number| (*number, PathBuf::from("/other"))).collect();
        let found = of_disk(&Vectors { disk: "vda".to_owned(), all, local }, free, &journaled);
        (found.writes.into_iter().map(|write| write.value).collect(), found.notes.join("; "))
    }

    fn of(all: Vec<Vector>, taken: &[u32]) -> (Vec<String>, String) {
        on(all, &free(taken, &[], &[]), &[])
    }

    #[test]
    fn interrupts_leave_the_cpus_of_vcpus() {
        let (writes, notes) = of(vec![vector(24, "0-7", false), vector(25, "0", false)], &[2, 4]);
        assert_eq!(writes, ["0-1,3,5"], "no isolated CPU is added: {notes}");
        assert!(notes.contains("interrupts 24, now sent to CPU 0,"), "{notes}");
        // One that has only a vCPU's CPU goes near its device, else anywhere.
        assert_eq!(of(vec![vector(24, "4", false)], &[2, 4]).0, ["3"]);
        assert_eq!(of(vec![vector(24, "4", false)], &[2, 3, 4]).0, ["0-1,5"]);
        assert_eq!(of(vec![vector(24, "4", false)], &[0, 1, 2, 3, 4, 5]).0, ["6-7"]);
    }

    #[test]
    fn interrupts_go_to_no_other_vms_vcpus_and_to_idle_siblings_last() {
        let to = |others: &[u32], siblings: &[u32]| {
            on(vec![vector(24, "0-7", false)], &free(&[2], others, siblings), &[]).0
        };
        assert_eq!(to(&[4], &[2, 3]), ["0-1,5"]);
        assert_eq!(to(&[0, 1, 4, 5], &[2, 3]), ["6-7"], "isolated CPUs come first");
        assert_eq!(to(&[0, 1, 4, 5, 6, 7], &[2, 3]), ["3"]);
        assert!(to(&[0, 1, 3, 4, 5, 6, 7], &[2, 3]).is_empty());
    }

    #[test]
    fn interrupts_of_another_journal_are_left_to_it() {
        let all = vec![vector(24, "0-7", false), vector(25, "0-7", false)];
        let (writes, notes) = on(all, &free(&[2], &[], &[]), &[25]);
        assert_eq!(writes, ["0-1,3-5"]);
        assert!(notes.contains("its interrupts 25 stay") && notes.contains("/other"), "{notes}");
    }

    #[test]
    fn interrupts_off_the_vcpus_count_as_in_force() {
        let changed = |found: &str| KnobState::Changed { found: found.to_owned() };
        let knob = |path: &str, state: KnobState| rtvirtio_apply::KnobStatus {
            knob: "knob".to_owned(),
            path: path.to_owned(),
            old: Some("0-7".to_owned()),
            new: "0-3".to_owned(),
            state,
        };
        let file = "/proc/irq/24/smp_affinity_list";
        let of = |path: &str, state: KnobState| {
            let (version, knobs) = (String::new(), vec![knob(path, state)]);
            let (pid, complete, reverting, leftover, rebooted) = (1, true, false, false, false);
            let mut status = Status { pid, version, complete, reverting, leftover, rebooted, knobs };
            count_apart(&mut status, &BTreeSet::from([4, 5]));
            status.knobs.remove(0).state
        };
        assert_eq!(of(file, changed("6")), KnobState::InForce);
        assert_eq!(of(file, changed("4-6")), changed("4-6"));
        assert_eq!(of(file, changed("what")), changed("what"));
        assert_eq!(of(file, KnobState::Original), KnobState::Original);
        assert_eq!(of("/sys/block/sda/queue/scheduler", changed("6")), changed("6"));
    }

    #[test]
    fn each_error_of_an_interrupt_is_told_with_those_that_have_it() {
        let of = |number: u32, cause: LeftCause, error: &str| Left {
            knob: format!("CPUs of interrupt {number}"),
            error: error.to_owned(),
            cause,
        };
        let all = [
            of(24, LeftCause::Fixed, "EIO"),
            of(25, LeftCause::Refused, "ENOSPC"),
            of(26, LeftCause::Fixed, "EIO"),
            of(27, LeftCause::Raced, "it changed"),
        ];
        let lines = left(&all);
        assert_eq!(lines.len(), 3, "{lines:?}");
        assert!(lines[0].contains("interrupt 24 and 1 more: EIO: the kernel lets no program"), "{lines:?}");
        assert!(lines[1].contains("interrupt 25: the kernel refuses other CPUs: ENOSPC"), "{lines:?}");
        assert!(lines[2].contains("another program: CPUs of interrupt 27"), "{lines:?}");
    }

    #[test]
    fn what_cannot_be_moved_is_said() {
        for (all, taken, said) in [
            (vec![], &[2][..], "no interrupt of its own is seen"),
            (vec![vector(24, "0-1", true)], &[2], "none of its interrupts may come"),
            (vec![vector(24, "2-3", true), vector(25, "2", true)], &[2], "24-25 cannot be moved"),
            (vec![vector(24, "2-3", false)], &[0, 1, 2, 3, 4, 5, 6, 7], "24 stay: the vCPUs have all CPUs"),
        ] {
            let (writes, notes) = of(all, taken);
            assert!(writes.is_empty() && notes.contains(said), "{writes:?} {notes}");
        }
    }

    #[test]
    fn only_an_interrupts_path_has_a_number() {
        assert_eq!(irq::number_in("/proc/irq/24/smp_affinity_list"), Some(24));
        assert_eq!(irq::number_in("/proc/irq/x/smp_affinity_list"), None);
        assert_eq!(irq::number_in("/sys/block/sda/queue/scheduler"), None);
    }
}
