//! Writing one old value so that the file reads exactly as before.

mod budget;
mod group;

use std::collections::BTreeSet;
use std::io;
use std::path::Path;

use rtvirtio_kernel::text;
use rustix::io::Errno;

use crate::machine::{ABSENT, Fault, Machine};
use crate::outcome::Fate;
use crate::systemd;
use crate::target::{Form, Target};

/// The kernel's tick is at most 10 ms, so a value in ms that was rounded up lies at most so far
/// above one that was not.
const TICK_MS: u64 = 10;
const ONLINE: &str = "/sys/devices/system/cpu/online";

/// Puts `old` back, and reads it back.
pub(crate) fn restore(target: &Target, old: &str, machine: &Machine<'_>) -> Result<(), Fate> {
    match (&target.form, old) {
        (Form::DeviceWeight { dev }, "default") => default_weight(target, dev, machine)?,
        (Form::UnitDeviceWeight { path, .. }, "default") => {
            let text = machine.read(target).map_err(|f| fault(target, f, "reading"))?;
            let others = systemd::without_weight(path, &text);
            let others = others.ok_or_else(|| failed("its weights are not understood".to_owned()))?;
            write(target, &others, machine)?;
        }
        (Form::IoEnabled, "-io") => disable(target, old, IO_FILES, machine)?,
        (Form::CpusetEnabled, "-cpuset") => disable(target, old, CPUSET_FILES, machine)?,
        (Form::Group { home, scheduling }, ABSENT) => {
            group::empty(&target.path, home, scheduling, machine)?;
            group::give_back(&target.path, machine);
            group::remove(target, machine)?;
        }
        (Form::ResctrlGroup { processes }, ABSENT) => {
            group::has_no_others(&target.path, processes, machine)?;
            group::remove(target, machine)?;
        }
        (Form::Interrupt { .. }, _) => return interrupt(target, old, machine),
        (Form::Plain, _) if target.path.ends_with(budget::FILE) => budget::write(target, old, machine)?,
        _ => write(target, &target.form.text(old), machine)?,
    }
    let found = read(target, machine)?;
    if target.is_old(&found, old) || target.form.is_left_of(&found, old) {
        return Ok(());
    }
    // With HZ=300 the kernel shows 124 for 37 ticks but takes 124 for 38: the value that shows
    // as 124 lies a little below.
    if let (Form::Plain | Form::Jiffies, Ok(wanted), Ok(_)) =
        (&target.form, old.parse::<u64>(), found.parse::<u64>())
    {
        for lower in (wanted.saturating_sub(TICK_MS)..wanted).rev() {
            write(target, &lower.to_string(), machine)?;
            if read(target, machine)? == old {
                return Ok(());
            }
        }
        write(target, old, machine)?;
    }
    Err(Fate::Failed { error: format!("`{old}` was written but it shows `{found}`") })
}

/// Lets an interrupt come to its old CPUs again; to all that are online where none of them is, or
/// where the kernel refuses them, as without room for a vector there. An interrupt for which it
/// refuses these too is left. Another value right after the write is another program's.
fn interrupt(target: &Target, old: &str, machine: &Machine<'_>) -> Result<(), Fate> {
    // An error here leaves it to the kernel to refuse.
    let online = machine.host().read(Path::new(ONLINE)).ok().and_then(|text| text::cpu_list(text.trim()));
    let online = online.filter(|online| !online.is_empty());
    let offline = |online: &BTreeSet<u32>| text::cpu_list(old).is_some_and(|old| old.is_disjoint(online));
    let is_offline = online.as_ref().is_some_and(offline);
    let first = (!is_offline).then(|| old.to_owned());
    for given in first.into_iter().chain(online.as_ref().map(text::cpu_ranges)) {
        match machine.write(target, &given) {
            Ok(()) => {
                let found = read(target, machine)?;
                let is_back = found == given || target.form.is_left_of(&found, &given);
                return if is_back { Ok(()) } else { Err(Fate::Accepted) };
            }
            Err(Fault::Io(e)) if is_refused(&e) => {}
            Err(error) => return Err(fault(target, error, &format!("writing `{given}`"))),
        }
    }
    Err(Fate::Accepted)
}

/// Whether the kernel refuses these CPUs for an interrupt (`irq_set_affinity()`).
fn is_refused(error: &io::Error) -> bool {
    let code = error.raw_os_error().map(Errno::from_raw_os_error);
    matches!(code, Some(Errno::NOSPC | Errno::INVAL | Errno::BUSY))
}

/// Removes a device's weight line.
///
/// `MAJ:MIN default` hides the line, but `bfq_io_set_device_weight()` then keeps the weight that
/// was in effect (measured on 6.18: 1000 against 100 went on sharing 7.9 to 1). Writing the group's
/// default makes every device follow it at once, and erases the lines of other devices, which are
/// therefore written again.
fn default_weight(target: &Target, dev: &str, machine: &Machine<'_>) -> Result<(), Fate> {
    let file = machine.read(target).map_err(|f| failed(f.into_io().to_string()))?;
    let Some(weights) = text::weights(&file) else {
        return Err(failed(format!("it holds `{}`, which is not understood", file.trim())));
    };
    let Some(default) = weights.default else {
        return Err(failed("it shows no default weight".to_owned()));
    };
    write(target, &default.to_string(), machine)?;
    for (other, weight) in weights.devices.iter().filter(|(d, _)| *d != dev) {
        write(target, &format!("{other} {weight}"), machine)?;
    }
    Ok(())
}

/// Files of a controller in the groups below, each with its text where it sets nothing.
type ControllerFiles = &'static [(&'static str, &'static str)];

const IO_FILES: ControllerFiles =
    &[("io.max", ""), ("io.latency", ""), ("io.weight", "default 100"), ("io.bfq.weight", "default 100")];
const CPUSET_FILES: ControllerFiles = &[
    ("cpuset.cpus", ""),
    ("cpuset.mems", ""),
    ("cpuset.cpus.exclusive", ""),
    ("cpuset.cpus.partition", "member"),
];

/// Takes a controller from the groups below by writing `off`, unless another program has come to
/// rely on it.
fn disable(target: &Target, off: &str, files: ControllerFiles, machine: &Machine<'_>) -> Result<(), Fate> {
    let dir = target.path.parent().unwrap_or(Path::new("/"));
    let unknown =
        |path: &Path, e: io::Error| failed(format!("whether {} uses it cannot be read: {e}", path.display()));
    for name in machine.host().list(dir).map_err(|e| unknown(dir, e))? {
        for (file, unset) in files {
            let path = dir.join(&name).join(file);
            let text = match machine.host().read(&path) {
                Ok(text) => text,
                // The names in a group's directory are its own files too, and a group need not have
                // every file.
                Err(e) if e.kind() == io::ErrorKind::NotADirectory || rtvirtio_kernel::is_gone(&e) => {
                    continue;
                }
                Err(e) => return Err(unknown(&path, e)),
            };
            let text = text.trim();
            // BFQ shows a bare number where no device has a line (before 5.4).
            if !text.is_empty() && text != *unset && text != unset.trim_start_matches("default ") {
                let on = off.replacen('-', "+", 1);
                return Err(Fate::Conflict { found: format!("{on}, used by {}", path.display()) });
            }
        }
    }
    write(target, off, machine)
}

fn write(target: &Target, text: &str, machine: &Machine<'_>) -> Result<(), Fate> {
    machine.write(target, text).map_err(|f| fault(target, f, &format!("writing `{}`", text.trim_end())))
}

fn read(target: &Target, machine: &Machine<'_>) -> Result<String, Fate> {
    let file = machine.read(target).map_err(|f| fault(target, f, "reading back"))?;
    target
        .form
        .value(&file)
        .ok_or_else(|| failed(format!("it holds `{}`, which is not understood", file.trim())))
}

/// A thread or an interrupt may end at any moment, and takes its settings with it.
fn fault(target: &Target, fault: Fault, doing: &str) -> Fate {
    match fault {
        Fault::Gone(e) if target.may_end() => Fate::Gone { why: e.to_string() },
        other => failed(format!("{doing}: {}", other.into_io())),
    }
}

pub(super) fn failed(error: String) -> Fate {
    Fate::Failed { error }
}
