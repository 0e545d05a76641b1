//! Adds to the plan in force: threads that have appeared, and new values of settings.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::apply::write_one;
use crate::capture::{Line, capture, value_of};
use crate::error::ApplyError;
use crate::journal::{self, Entry, Journal, KnownJournal};
use crate::machine::{Fault, Machine};
use crate::observer::{Observer, Step};
use crate::resolve::{Write, cannot};
use crate::revert::{State, inspect};
use crate::state_dir::StateDir;
use crate::target::{Form, Place, Target};
use crate::units;
use inherited::{Inherited, before_us};

mod inherited;

/// Result of adding writes to a journal in force.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Amended {
    /// Settings that were changed, with their values before and after.
    pub written: Vec<Line>,
    /// Settings that another program has changed since, which are left to it: the setting, and what
    /// it is now.
    pub left: Vec<(String, String)>,
    /// Settings that could not be changed, or not read back, and why.
    pub failed: Vec<(String, String)>,
    /// Errors that concern no single setting.
    pub warnings: Vec<String>,
}

impl Amended {
    /// Whether one of these writes that give was not done. What only takes leaves more to others.
    fn has_gaps(&self, writes: &[Write]) -> bool {
        let mut not_done = self.left.iter().chain(&self.failed);
        not_done.any(|(knob, _)| writes.iter().any(|w| !w.takes && w.knob == *knob))
    }
}

/// Error text of a write that [takes](Write::takes) and was left out.
const NOT_GIVEN: &str = "left out: what it takes was not given by a setting before it";

/// Entries to write, each with the position of its write among those asked for.
type Touched = Vec<(usize, usize)>;

/// Order: entries of threads that have ended are dropped; new values are journaled along with the
/// old ones, then written; at last intermediate values are dropped. A kill at any point leaves a
/// journal from which everything can be put back.
pub(crate) fn amend(
    dir: &StateDir,
    known: &mut KnownJournal,
    writes: &[Write],
    machine: &Machine<'_>,
    observer: &mut dyn Observer,
) -> Result<Amended, ApplyError> {
    let (mut journal, read_at) = known.take(dir, machine)?;
    if let Some(wrong) = writes.iter().find(|w| !stands_alone(w)) {
        let remedy = "revert, and apply all of it again";
        let why = "only settings that change no other file can be added to what is in force";
        return Err(cannot(&wrong.knob, why, remedy));
    }
    let mut given = units::given(writes, machine)?.writes;
    // Of all entries, so not with each of many additions.
    let forgotten = read_at.is_none() && forget_gone(&mut journal, machine);
    // The journal has the value from before the first change.
    let is_known = |target: &Target| journal.entries.iter().any(|e| e.target == *target);
    given.iter_mut().for_each(|write| write.side_effects.retain(|target| !is_known(target)));
    let writes = &given;
    let mut out = Amended::default();
    let Known { mut touched, again, fresh } = change_known(&mut journal, writes, machine, &mut out)?;
    touched.extend(add_fresh(&mut journal, writes, &fresh, machine, &mut out)?);
    // In the order asked for: writes that give before writes that take.
    touched.sort_by_key(|(_, place)| *place);
    if touched.is_empty() && !forgotten {
        known.keep(dir, journal, read_at);
        return Ok(out);
    }
    if let Err(e) = journal::store(dir, &journal) {
        // The journal on disk, old or new, has these entries' values from before the first write.
        if again.is_empty() && !touched.is_empty() {
            return Err(e);
        }
        let (again, left): (Touched, Touched) = touched.into_iter().partition(|(id, _)| again.contains(id));
        write_touched(&journal, writes, &again, machine, observer, &mut out);
        // What is new has to be journaled first: the caller tries all of it again.
        if !left.is_empty() {
            return Err(e);
        }
        out.warnings.push(format!("threads that have ended stay in the journal: {e}"));
        return Ok(out);
    }
    observer.step(Step::Journaled);
    write_touched(&journal, writes, &touched, machine, observer, &mut out);
    if forget_former(&mut journal, writes, &touched, machine) {
        // The journal on disk holds these values too, so everything can be put back from it.
        if let Err(e) = journal::store_done(dir, &journal) {
            out.warnings.push(format!("values that are no longer used stay in the journal: {e}"));
            return Ok(out);
        }
    }
    known.keep(dir, journal, read_at);
    Ok(out)
}

/// Drops entries whose setting ended with its thread or device, or with the cgroup of an ended VM:
/// nothing is left to put back, and the next cgroup of this name has old values of its own. Returns
/// whether any was dropped.
fn forget_gone(journal: &mut Journal, machine: &Machine<'_>) -> bool {
    // A VM may have thousands of threads, each with several settings.
    let mut ended: BTreeMap<(u32, u64), bool> = BTreeMap::new();
    let mut gone = |e: &Entry| {
        let ended = match e.target.place {
            Place::Thread { pid, tid, start } => *ended
                .entry((tid, start))
                .or_insert_with(|| matches!(machine.same_thread(pid, tid, start), Err(Fault::Gone(_)))),
            Place::Host | Place::Guest { .. } => false,
        };
        let removed = (e.identity.is_some() && e.created_by.is_none() && e.changed_by.is_none())
            || e.target.is_interrupt();
        // systemd is not asked for each unit: its directory says whether it is the same. Files of a
        // cpuset come back with their controller, and have to get our values again.
        let is_by_directory =
            e.target.form.unit().is_some() || matches!(e.target.form, Form::CpuList | Form::Partition);
        let is_gone = || match is_by_directory {
            true => is_other_directory(e, machine),
            false => matches!(inspect(e, true, machine), State::Gone(_)),
        };
        ended || (removed && is_gone())
    };
    let had = journal.entries.len();
    journal.entries.retain(|e| !gone(e));
    // What changed along with a setting that is gone has ended with it, or is the kernel's; a
    // reference to an entry that is missing would make the journal unreadable.
    let ids: BTreeSet<usize> = journal.entries.iter().map(|e| e.id).collect();
    journal.entries.retain(|e| e.changed_by.is_none_or(|id| ids.contains(&id)));
    for entry in &mut journal.entries {
        entry.created_by = entry.created_by.filter(|id| ids.contains(id));
    }
    journal.entries.len() < had
}

/// Whether the cgroup of an entry has ended, or is another of its name. An error is not the end.
fn is_other_directory(entry: &Entry, machine: &Machine<'_>) -> bool {
    let (Some(identity), Some(dir)) = (entry.identity, entry.target.path.parent()) else { return false };
    match machine.host().identity(dir) {
        Ok(now) => now != identity,
        Err(e) => matches!(Fault::from_io(e), Fault::Gone(_)),
    }
}

/// Writes, split by whether the journal has an entry for their target.
struct Known {
    touched: Touched,
    /// Ids among `touched` whose journaled value is the one asked for: the journal need not change.
    again: Vec<usize>,
    /// Writes without an entry.
    fresh: Vec<Write>,
}

/// Gives journaled entries the new values of the writes.
fn change_known(
    journal: &mut Journal,
    writes: &[Write],
    machine: &Machine<'_>,
    out: &mut Amended,
) -> Result<Known, ApplyError> {
    let (mut touched, mut again, mut fresh) = (Touched::new(), Vec::new(), Vec::new());
    // A VM may have thousands of threads; the first entry of a target counts.
    let asked: BTreeSet<&Target> = writes.iter().map(|write| &write.target).collect();
    let mut known: BTreeMap<Target, usize> = BTreeMap::new();
    for (at, entry) in journal.entries.iter().enumerate() {
        if entry.new.is_some() && asked.contains(&entry.target) {
            known.entry(entry.target.clone()).or_insert(at);
        }
    }
    for (place, write) in writes.iter().enumerate() {
        if write.takes && out.has_gaps(writes) {
            out.failed.push((write.knob.clone(), NOT_GIVEN.to_owned()));
            continue;
        }
        let Some(entry) = known.get(&write.target).and_then(|at| journal.entries.get_mut(*at)) else {
            fresh.push(write.clone());
            continue;
        };
        let found = match machine.read(&entry.target) {
            Ok(text) => value_of(&entry.target, &text)?,
            Err(Fault::Gone(_)) => continue,
            Err(fault) => {
                out.failed.push((write.knob.clone(), fault.into_io().to_string()));
                continue;
            }
        };
        let form = &entry.target.form;
        let is_new = entry.new.as_ref().is_some_and(|new| form.is(&found, new));
        if is_new && entry.new.as_deref() == Some(&write.value) && entry.levels == write.levels {
            continue;
        }
        if !is_new && !entry.is_ours(&found) && entry.old.as_ref() != Some(&found) {
            out.left.push((write.knob.clone(), found));
            continue;
        }
        let is_same = entry.new.as_deref() == Some(&write.value) && entry.levels == write.levels;
        if is_same && (entry.old.as_ref() == Some(&found) || entry.is_ours(&found)) {
            again.push(entry.id);
        }
        // Also what systemd makes of the file by a property that is written before it.
        for ours in write.also_ours.iter().chain([&found]) {
            if !entry.also_ours.contains(ours) {
                entry.also_ours.push(ours.clone());
            }
        }
        // Levels from before may be read until the write.
        for level in write.levels.iter().filter(|l| !entry.levels.contains(*l)).cloned().collect::<Vec<_>>() {
            entry.levels.push(level);
        }
        entry.new = Some(write.value.clone());
        touched.push((entry.id, place));
    }
    Ok(Known { touched, again, fresh })
}

/// Adds entries for writes without one; returns them.
fn add_fresh(
    journal: &mut Journal,
    writes: &[Write],
    fresh: &[Write],
    machine: &Machine<'_>,
    out: &mut Amended,
) -> Result<Touched, ApplyError> {
    let next = journal.entries.iter().map(|e| e.id + 1).max().unwrap_or(0);
    let fresh = capture(fresh, machine)?;
    let inherited = Inherited::from_journal(journal, &fresh);
    let before: Vec<_> = fresh.iter().map(|e| before_us(&inherited, &e.target, machine)).collect();
    // A value of ours must not be taken for what a thread had before. Such a thread is left out as
    // a whole: one that is in our cgroup and in no journal is moved to `home` when the cgroup is
    // removed; with half of its settings journaled it could not be.
    let unknown: Vec<Place> =
        fresh.iter().zip(&before).filter(|(_, b)| b.is_err()).map(|(e, _)| e.target.place.clone()).collect();
    let mut touched = Touched::new();
    let mut places: BTreeMap<&Target, usize> = BTreeMap::new();
    for (place, write) in writes.iter().enumerate() {
        places.entry(&write.target).or_insert(place);
    }
    for (mut entry, before) in fresh.into_iter().zip(before) {
        entry.id += next;
        entry.changed_by = entry.changed_by.map(|cause| cause + next);
        if unknown.contains(&entry.target.place) {
            let why =
                before.err().unwrap_or_else(|| "left out with another setting of this thread".to_owned());
            out.failed.push((entry.knob, why));
            continue;
        }
        if let Ok(Some(own)) = before {
            entry.also_ours.extend(entry.old.replace(own));
        }
        touched.extend(places.get(&entry.target).map(|place| (entry.id, *place)));
        journal.entries.push(entry);
    }
    Ok(touched)
}

/// Writes journaled entries, in order. A refusal by the kernel is reported, and undoes nothing.
fn write_touched(
    journal: &Journal,
    writes: &[Write],
    touched: &[(usize, usize)],
    machine: &Machine<'_>,
    observer: &mut dyn Observer,
    out: &mut Amended,
) {
    let of = touched.len();
    let entries: BTreeMap<usize, &Entry> = journal.entries.iter().map(|entry| (entry.id, entry)).collect();
    for (index, (id, place)) in touched.iter().enumerate() {
        let Some(entry) = entries.get(id) else { continue };
        if writes[*place].takes && out.has_gaps(writes) {
            out.failed.push((entry.knob.clone(), NOT_GIVEN.to_owned()));
            continue;
        }
        match write_one(entry, machine) {
            Ok(Some(old)) => out.written.push(Line {
                knob: entry.knob.clone(),
                path: entry.target.to_string(),
                old: Some(old),
                new: entry.new.clone().unwrap_or_default(),
            }),
            Ok(None) => {}
            Err(e) => out.failed.push((entry.knob.clone(), e.to_string())),
        }
        observer.step(Step::Wrote { index: index + 1, of });
    }
}

/// Drops intermediate values from `also_ours`. Where the new value was not taken, they stay until a
/// later one is. Returns whether any was dropped.
fn forget_former(
    journal: &mut Journal,
    writes: &[Write],
    touched: &[(usize, usize)],
    machine: &Machine<'_>,
) -> bool {
    let touched: BTreeMap<usize, usize> = touched.iter().copied().collect();
    let mut any = false;
    for entry in &mut journal.entries {
        let Some(place) = touched.get(&entry.id) else { continue };
        let write = &writes[*place];
        if entry.also_ours == write.also_ours && entry.levels == write.levels {
            continue;
        }
        let now = machine.read(&entry.target).ok().and_then(|t| entry.target.form.value(&t));
        let arrived = now.zip(entry.new.as_ref()).is_some_and(|(now, new)| entry.target.form.is(&now, new));
        if arrived {
            entry.also_ours.clone_from(&write.also_ours);
            entry.levels.clone_from(&write.levels);
            any = true;
        }
    }
    any
}

/// Whether a write depends on no other and changes no other file: those of an elevator do, and a
/// cgroup of our own is made with its files at once. The cpuset controller brings files that set
/// nothing, each of which has an entry of its own as soon as it is written.
fn stands_alone(write: &Write) -> bool {
    let alone = write.created_by.is_none() && write.side_effects.is_empty();
    let of_one_file = match (&write.target.place, &write.target.form) {
        (Place::Thread { .. }, _) => true,
        (Place::Host, form) => !matches!(
            form,
            Form::Elevator
                | Form::Group { .. }
                | Form::ResctrlGroup { .. }
                | Form::IoAlloc
                | Form::IoEnabled
                | Form::Partition
        ),
        (Place::Guest { .. }, _) => false,
    };
    alone && of_one_file
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use rtvirtio_kernel::Root;

    use super::*;
    use crate::machine::NoGuests;

    /// A unit's cap with what systemd changes along with it, where the VM's cgroup is made anew: no
    /// entry may refer to one that is dropped.
    #[test]
    fn what_changed_along_goes_with_a_cgroup_that_has_ended() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let slice = dir.path().join("sys/fs/cgroup/machine.slice");
        let scope = slice.join("plc.scope");
        let make = || {
            fs::create_dir_all(&scope).unwrap();
            fs::write(scope.join("cpu.max"), "max 100000\n").unwrap();
        };
        make();
        fs::write(slice.join("cgroup.subtree_control"), "cpu io\n").unwrap();
        let (root, file) = (Root::new(dir.path()), |path: &str| Path::new("/sys/fs/cgroup").join(path));
        let machine = Machine::new(&root, &NoGuests);
        let above = Target::host(file("machine.slice/cgroup.subtree_control"), Form::IoEnabled);
        let cap = Target::host(file("machine.slice/plc.scope/cpu.max"), Form::Plain);
        let write = Write { side_effects: vec![above], ..Write::new("cap of plc", cap, "50000 100000") };
        let entries = capture(&[write], &machine).unwrap();
        assert!(entries.len() == 2 && entries[1].changed_by == Some(entries[0].id), "{entries:?}");
        let mut journal = Journal { complete: true, entries, ..Journal::default() };
        assert!(!forget_gone(&mut journal, &machine));
        // Another directory has the inode of the removed one only where nothing stands between.
        fs::rename(&scope, dir.path().join("old")).unwrap();
        make();
        assert!(forget_gone(&mut journal, &machine));
        assert_eq!(journal.entries, []);
    }

    /// A program takes the cpuset controller from a group: its files are gone, and have to be
    /// set again when they are back.
    #[test]
    fn settings_of_a_cpuset_stay_known_without_their_files_and_end_with_the_group() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let scope = dir.path().join("sys/fs/cgroup/plc.scope");
        fs::create_dir_all(&scope).unwrap();
        fs::write(scope.join("cpuset.cpus.exclusive"), "\n").unwrap();
        fs::write(scope.join("cpuset.cpus.partition"), "member\n").unwrap();
        let root = Root::new(dir.path());
        let machine = Machine::new(&root, &NoGuests);
        let write = |name: &str, form: Form, value: &str| {
            Write::new(name, Target::host(Path::new("/sys/fs/cgroup/plc.scope").join(name), form), value)
        };
        let writes = [
            write("cpuset.cpus.exclusive", Form::CpuList, "2-3"),
            write("cpuset.cpus.partition", Form::Partition, "root"),
        ];
        let mut journal =
            Journal { complete: true, entries: capture(&writes, &machine).unwrap(), ..Journal::default() };
        ["cpuset.cpus.exclusive", "cpuset.cpus.partition"]
            .iter()
            .for_each(|name| fs::remove_file(scope.join(name)).unwrap());
        assert!(!forget_gone(&mut journal, &machine));
        assert_eq!(journal.entries.len(), 2);
        fs::remove_dir_all(&scope).unwrap();
        assert!(forget_gone(&mut journal, &machine));
        assert_eq!(journal.entries, []);
    }

    /// A unit of a VM that was started again: what systemd changes with its new property is put
    /// back with that property, not with another setting.
    #[test]
    fn what_changes_along_with_an_added_property_belongs_to_it() {
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let scope = dir.path().join("sys/fs/cgroup/plc.scope");
        fs::create_dir_all(&scope).unwrap();
        fs::write(scope.join("cpu.max"), "max 100000\n").unwrap();
        fs::write(scope.join("cpu.weight"), "77\n").unwrap();
        let root = Root::new(dir.path());
        let machine = Machine::new(&root, &NoGuests);
        let file = |name: &str| Target::host(Path::new("/sys/fs/cgroup/plc.scope").join(name), Form::Plain);
        let first = Write::new("weight", file("cpu.weight"), "50");
        let mut journal = Journal {
            complete: true,
            entries: capture(&[first.clone(), first], &machine).unwrap(),
            ..Journal::default()
        };
        let along = vec![file("cpu.weight")];
        let added = Write { side_effects: along, ..Write::new("cap", file("cpu.max"), "50000 100000") };
        let added = [added];
        let mut out = Amended::default();
        let touched = add_fresh(&mut journal, &added, &added, &machine, &mut out).unwrap();
        let found: Vec<_> =
            journal.entries.iter().skip(2).map(|e| (e.id, e.changed_by, e.old.as_deref())).collect();
        assert_eq!(found, [(2, None, Some("max 100000")), (3, Some(2), Some("77"))]);
        assert_eq!((touched, out), (vec![(2, 0)], Amended::default()));
    }
}
