//! State of one knob compared with the journal.

use rtvirtio_kernel::text;

use crate::journal::Entry;
use crate::machine::{Fault, Machine};
use crate::target::Form;

/// Current value of a knob, compared with the journal.
#[derive(Clone, Debug)]
pub(crate) enum State {
    /// The old value (or absent, as before).
    Old,
    /// A value of ours: written by the plan, or caused in the kernel by one of its writes.
    Ours(String),
    /// Any value that is neither.
    Foreign(String),
    /// The device, cgroup, guest or file is gone.
    Gone(String),
    /// Reading it failed, with the error.
    Unreadable(String),
}

impl State {
    fn from_fault(fault: Fault, what: &str) -> Self {
        match fault {
            Fault::Gone(e) => Self::Gone(format!("{what}: {e}")),
            Fault::Io(e) => Self::Unreadable(format!("{what}: {e}")),
        }
    }
}

/// Reads one knob. Only what the kernel reports as gone counts as gone: after any other error
/// our value may still be in force.
pub(crate) fn inspect(entry: &Entry, complete: bool, machine: &Machine<'_>) -> State {
    if let (Some(identity), Some(dir)) = (entry.identity, entry.target.path.parent()) {
        match machine.host().identity(dir) {
            Ok(now) if now == identity => {}
            Ok(_) => return State::Gone(format!("{} was removed and made again", dir.display())),
            Err(e) => return State::from_fault(Fault::from_io(e), &dir.display().to_string()),
        }
    }
    if let Some(dev) = entry.target.dev() {
        if let Err(e) = machine.host().identity(format!("/sys/dev/block/{dev}").as_ref()) {
            return State::from_fault(Fault::from_io(e), &format!("device {dev}"));
        }
    }
    let text = match machine.read(&entry.target) {
        Ok(text) => text,
        Err(Fault::Gone(_)) if entry.old.is_none() => return State::Old,
        Err(Fault::Gone(e)) => return State::Gone(e.to_string()),
        Err(Fault::Io(e)) => return State::Unreadable(e.to_string()),
    };
    let form = &entry.target.form;
    let Some(found) = form.value(&text) else {
        return State::Unreadable(format!("it holds `{}`, which is not understood", text.trim()));
    };
    // A missing line of a cgroup's file equals a line that sets nothing.
    if entry.old.as_deref().or(form.unset()).is_some_and(|old| entry.target.is_old(&found, old)) {
        return State::Old;
    }
    let ours = entry.new.as_ref().is_some_and(|new| form.is(&found, new) || is_cut(entry, &found, new, machine))
        || entry.is_ours(&found)
        || entry.unsettled
        // Killed between the write that created the file and our own: the kernel's default.
        || (entry.old.is_none() && !complete);
    if ours { State::Ours(found) } else { State::Foreign(found) }
}

/// Whether CPUs that a thread or an interrupt has are what the kernel left of ours: a part of them,
/// or others where none of them is online. Then a thread gets those of its cpuset, and an interrupt
/// any that are online (`migrate_one_irq()`).
fn is_cut(entry: &Entry, found: &str, new: &str, machine: &Machine<'_>) -> bool {
    let form = &entry.target.form;
    if form.is_left_of(found, new) {
        return true;
    }
    let gone = || {
        let online = machine.host().read("/sys/devices/system/cpu/online".as_ref()).ok()?;
        let (online, ours) = (text::cpu_list(&online)?, text::cpu_list(new)?);
        Some(ours.is_disjoint(&online))
    };
    let may_get = match form {
        Form::Affinity => entry.old.as_deref().is_some_and(|old| form.is_left_of(found, old)),
        Form::Interrupt { .. } => true,
        _ => false,
    };
    may_get && gone() == Some(true)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rtvirtio_kernel::Root;

    use super::*;
    use crate::capture::capture;
    use crate::machine::NoGuests;
    use crate::resolve::Write;
    use crate::target::Target;

    /// CPUs go offline, and cpusets shrink, while a thread has CPUs of ours.
    #[test]
    fn cpus_that_the_kernel_cut_are_ours_and_those_of_another_program_are_not() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let root = Root::new(dir.path());
        let put = |path: &str, text: &str| {
            let path = root.at(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let cpus = |list: &str| put("/proc/7/task/7/status", &format!("Cpus_allowed_list:\t{list}\n"));
        put("/proc/7/task/7/stat", &format!("7 (qemu) S 1 {}\n", "0 ".repeat(60)));
        put("/sys/devices/system/cpu/online", "0-7\n");
        cpus("0-7");
        let machine = Machine::new(&root, &NoGuests);
        let write = Write::new("CPUs of emulator (plc)", Target::affinity(7, 7, 0), "6-7");
        let entry = capture(&[write], &machine).unwrap().remove(0);
        let state = |list: &str| {
            cpus(list);
            inspect(&entry, true, &machine)
        };
        assert!(matches!(state("0-7"), State::Old));
        assert!(matches!(state("6-7"), State::Ours(_)));
        assert!(matches!(state("6"), State::Ours(_)), "CPU 7 is gone");
        for foreign in ["2", "0-5", "5-6"] {
            assert!(matches!(state(foreign), State::Foreign(_)), "{foreign}");
        }
        put("/sys/devices/system/cpu/online", "0-5\n");
        assert!(matches!(state("0-5"), State::Ours(_)), "both are gone");
    }
}
