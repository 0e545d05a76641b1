//! Interrupts of the spec's disks, kept off the CPUs that vCPUs have by `cores`.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_apply::{Applied, KnobState, Left, Line, Status, Target, Write};
use rtvirtio_cores::Cpu;
use rtvirtio_kernel::irq::{Vector, Vectors};
use rtvirtio_kernel::text::{cpu_list, cpu_ranges};
use rtvirtio_kernel::{BlockDevice, HostError, Root, Stack, irq, topology};
use rtvirtio_spec::{Device, HostSpec};

use crate::contracts::VmCpu;
use crate::progress::Progress;
use crate::site::Site;

/// Reason and remedy where the kernel lets no program move an interrupt.
const MANAGED: &str = "the kernel manages them itself, and they come for requests that are sent from these CPUs; booting with isolcpus=managed_irq,CPUS keeps \
                       those of other CPUs away";

/// The writes that keep the interrupts of the disks of VMs with `cores` off the CPUs of the vCPUs
/// of all of these. `sites` are the spec's devices where they were looked for. What cannot be moved
/// is reported, and hinders nothing.
pub(crate) fn writes(
    host: &HostSpec,
    sites: Option<&[Site]>,
    held: &[VmCpu],
    progress: &dyn Progress,
) -> Vec<Write> {
    let with_cores: BTreeMap<&str, &[u32]> =
        held.iter().filter_map(|v| Some((v.vm.as_str(), &v.cores.as_ref()?.placement.vcpus[..]))).collect();
    if with_cores.is_empty() {
        return Vec::new();
    }
    let root = Root::default();
    let free = match topology(&root) {
        Ok(cpus) => Free::new(&cpus, with_cores.values().copied().flatten().copied().collect()),
        Err(e) => {
            progress.warn(&format!("interrupts of disks stay where they are: {e}"));
            return Vec::new();
        }
    };
    let mut writes = Vec::new();
    for disk in disks(&root, host, sites, &|vm| with_cores.contains_key(vm), progress) {
        match irq::vectors(&root, &disk) {
            Ok(vectors) => {
                let found = of_disk(&vectors, &free);
                found.notes.iter().for_each(|note| progress.step(note));
                // Several disks may have one controller.
                let fresh = |write: &Write| writes.iter().all(|w: &Write| w.target != write.target);
                let more: Vec<Write> = found.writes.into_iter().filter(fresh).collect();
                writes.extend(more);
            }
            Err(e) => progress.warn(&format!("interrupts of {} stay where they are: {e}", disk.name)),
        }
    }
    if !writes.is_empty() {
        match irq::balancer(&root) {
            Ok(pid) => pid.into_iter().for_each(|pid| progress.warn(&remedy(pid, &cpu_ranges(&free.taken)))),
            Err(e) => progress.warn(&format!("whether irqbalance runs is not known: {e}")),
        }
    }
    writes
}

fn remedy(pid: u32, cpus: &str) -> String {
    format!(
        "irqbalance runs (process {pid}) and will move interrupts again: ban it from the vCPUs' CPUs \
         (IRQBALANCE_BANNED_CPULIST={cpus} in its configuration, then restart it), or stop it"
    )
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
    /// CPUs that vCPUs have.
    taken: BTreeSet<u32>,
    /// CPUs that are online and not taken.
    online: BTreeSet<u32>,
    /// CPUs among these that are not isolated.
    ordinary: BTreeSet<u32>,
}

impl Free {
    fn new(cpus: &[Cpu], taken: BTreeSet<u32>) -> Self {
        let left = || cpus.iter().filter(|cpu| !taken.contains(&cpu.id));
        let online = left().map(|cpu| cpu.id).collect();
        let ordinary = left().filter(|cpu| !cpu.isolated).map(|cpu| cpu.id).collect();
        Self { online, ordinary, taken }
    }

    /// CPUs for an interrupt: those that it has now, else those near its device, else any. `None`
    /// where no CPU is left.
    fn for_interrupt(&self, now: &BTreeSet<u32>, local: &BTreeSet<u32>) -> Option<BTreeSet<u32>> {
        let of = |cpus: &BTreeSet<u32>| cpus.intersection(&self.ordinary).copied().collect();
        let choices: [BTreeSet<u32>; 4] = [of(now), of(local), self.ordinary.clone(), self.online.clone()];
        choices.into_iter().find(|cpus| !cpus.is_empty())
    }
}

/// Writes and sentences for the interrupts of a disk.
#[derive(Default)]
struct OfDisk {
    writes: Vec<Write>,
    notes: Vec<String>,
}

fn of_disk(found: &Vectors, free: &Free) -> OfDisk {
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
            "{name}: its interrupts {} cannot be moved off the vCPUs' CPUs {taken}: {MANAGED}",
            numbers(&fixed)
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
    let (fixed, moved): (Vec<&Left>, Vec<&Left>) = applied.left.iter().partition(|left| left.is_fixed);
    if let [first, rest @ ..] = &fixed[..] {
        let Left { knob, error, .. } = first;
        let others = if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
        progress.warn(&format!("left as before: {knob}{others}: {error}: {MANAGED}"));
    }
    for Left { knob, error, .. } in moved {
        progress.warn(&format!("left to another program: {knob}: {error}"));
    }
    let root = Root::default();
    for Line { knob, path, new, .. } in applied.knobs.iter().filter(|line| number(&line.path).is_some()) {
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

/// CPUs that an interrupt is sent to, by the path of the CPUs that it is set to.
fn sent_to(root: &Root, path: &str) -> Result<Option<BTreeSet<u32>>, HostError> {
    number(path).map_or(Ok(None), |number| irq::effective(root, number))
}

fn number(path: &str) -> Option<u32> {
    let number = path.strip_prefix("/proc/irq/")?.strip_suffix("/smp_affinity_list")?;
    number.parse().ok()
}

/// Sentences on the interrupts among settings in force: the CPUs that they are sent to, and the
/// program that moves them again.
#[must_use]
pub fn notes(status: &Status) -> Vec<String> {
    let (root, mut notes, mut moved) = (Root::default(), Vec::new(), BTreeSet::new());
    for knob in status.knobs.iter().filter(|knob| number(&knob.path).is_some()) {
        match &knob.state {
            KnobState::InForce => match sent_to(&root, &knob.path) {
                Ok(on) => {
                    notes.extend(on.map(|on| format!("{}: sent to CPU {}", knob.knob, cpu_ranges(&on))));
                }
                Err(e) => notes.push(format!("{}: where it goes is not known: {e}", knob.knob)),
            },
            KnobState::Changed { .. } | KnobState::Original => {
                let before = knob.old.as_deref().and_then(cpu_list).unwrap_or_default();
                let ours = cpu_list(&knob.new).unwrap_or_default();
                moved.extend(before.difference(&ours).copied());
            }
            KnobState::Gone { .. } | KnobState::Unknown { .. } => {}
        }
    }
    if !moved.is_empty() {
        notes.push(match irq::balancer(&root) {
            Ok(Some(pid)) => remedy(pid, &cpu_ranges(&moved)),
            Ok(None) => "another program moved interrupts of disks; no irqbalance runs".to_owned(),
            Err(e) => format!("another program moved interrupts; whether irqbalance runs is not known: {e}"),
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
    fn free(taken: &[u32]) -> Free {
        let cpu =
            |id| Cpu { id, core: id, llc: 0, node: 0, capacity: 1024, isolated: id > 5, tickless: false };
        Free::new(&(0..8).map(cpu).collect::<Vec<_>>(), taken.iter().copied().collect())
    }

    fn of(all: Vec<Vector>, taken: &[u32]) -> (Vec<String>, String) {
        let local = BTreeSet::from([2, 3]);
        let found = of_disk(&Vectors { disk: "vda".to_owned(), all, local }, &free(taken));
        (found.writes.into_iter().map(|write| write.value).collect(), found.notes.join("; "))
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
        assert_eq!(number("/proc/irq/24/smp_affinity_list"), Some(24));
        assert_eq!(number("/proc/irq/x/smp_affinity_list"), None);
        assert_eq!(number("/sys/block/sda/queue/scheduler"), None);
    }
}
