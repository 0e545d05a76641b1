//! Settings that threads inherited from threads that have ours.

use std::collections::{BTreeMap, BTreeSet};

use rtvirtio_kernel::sched::Attr;
use rtvirtio_kernel::text;

use crate::journal::{Entry, Journal};
use crate::machine::{Fault, Machine, PRESENT};
use crate::target::{Form, Place, Target};

/// Value of a thread's setting without our settings, where it differs from the value read: one of
/// ours started the thread in our cgroup, or it inherited the real-time policy that we gave QEMU's
/// main thread, or CPUs that we gave a thread of its process. `None` where nothing was inherited or
/// it has ended; an error when unknown.
pub(super) fn before_us(
    known: &Inherited<'_>,
    target: &Target,
    machine: &Machine<'_>,
) -> Result<Option<String>, String> {
    let Place::Thread { pid, tid, start } = target.place else { return Ok(None) };
    let read_now = |target: &Target| match machine.read(target) {
        Ok(text) => target.form.value(&text).map(Some).ok_or_else(|| format!("{target} is not understood")),
        Err(Fault::Gone(_)) => Ok(None),
        Err(Fault::Io(e)) => Err(format!("{target} cannot be read: {e}")),
    };
    let read = |target: &Target| match known.captured.get(target) {
        Some(value) => Ok(Some((*value).to_owned())),
        None => read_now(target),
    };
    if target.form == Form::Affinity {
        let now = read(target)?;
        let of_process = known.cpus.get(&pid).into_iter().flatten();
        let mut common: Option<BTreeSet<u32>> = None;
        for entry in of_process.filter(|e| now.as_ref().is_some_and(|now| e.has_set(now))) {
            // The entry may be of an ended process that had this pid.
            if read_now(&entry.target)?.is_none() {
                continue;
            }
            let before = entry.old.as_deref().and_then(text::cpu_list).unwrap_or_default();
            // Which of several handed it down is not known: the CPUs that are none too many.
            common = match common {
                Some(common) if common.is_disjoint(&before) => Some(common),
                Some(common) => Some(common.intersection(&before).copied().collect()),
                None => Some(before).filter(|cpus| !cpus.is_empty()),
            };
        }
        return Ok(common.map(|cpus| text::cpu_ranges(&cpus)));
    }
    if let Form::ResctrlTask { mount } = &target.form {
        let Some(now) = read(target)? else { return Ok(None) };
        let group = mount.join(now.trim_start_matches('/'));
        let of_resctrl = |e: &Entry| matches!(e.target.form, Form::ResctrlGroup { .. });
        // Threads come from the default group only.
        return Ok(known
            .groups
            .iter()
            .any(|e| e.target.path == group && of_resctrl(e))
            .then(|| "/".to_owned()));
    }
    let attr = |text: &str| text.parse::<Attr>().map_err(|e| e.to_string());
    let Some(inherited) = read(&Target::scheduling(pid, tid, start))? else { return Ok(None) };
    let is_policy = target.form == Form::Scheduling;
    if is_policy && !attr(&inherited)?.policy.is_real_time() {
        return Ok(None);
    }
    for entry in &known.groups {
        let (Form::Group { home, scheduling }, Some(mount)) =
            (&entry.target.form, entry.target.path.parent())
        else {
            continue;
        };
        let Some(now) = read(&Target::thread_cgroup(pid, tid, start, "cpu", mount))? else { return Ok(None) };
        if mount.join(now.trim_start_matches('/')) != entry.target.path {
            continue;
        }
        if is_policy {
            return Ok(Some(scheduling.clone()));
        }
        let home =
            home.strip_prefix(mount).map_err(|_| format!("{} is in another hierarchy", home.display()))?;
        return Ok(Some(format!("/{}", home.display())));
    }
    let Some(main) = known.main_policies.get(&pid).filter(|_| is_policy) else { return Ok(None) };
    // The entry may be of an ended process that had this pid.
    if read(&main.target)?.is_none() {
        return Ok(None);
    }
    let Some(old) = main.old.as_deref() else { return Ok(None) };
    let old = attr(old)?;
    Ok(Some(if old.reservation.is_none() { old } else { Attr::other(0) }.to_string()))
}

/// Journaled settings that new threads may have inherited, and what was just read of these threads.
pub(super) struct Inherited<'j> {
    /// Entries of cgroups that we made.
    groups: Vec<&'j Entry>,
    /// Policy entry of each process's main thread, by pid.
    main_policies: BTreeMap<u32, &'j Entry>,
    /// Entries of the CPUs of each process's threads, by pid.
    cpus: BTreeMap<u32, Vec<&'j Entry>>,
    captured: BTreeMap<&'j Target, &'j str>,
}

impl<'j> Inherited<'j> {
    pub(super) fn from_journal(journal: &'j Journal, fresh: &'j [Entry]) -> Self {
        let groups = journal.entries.iter().filter(|e| e.new.as_deref() == Some(PRESENT)).collect();
        let (mut main_policies, mut cpus) = (BTreeMap::new(), BTreeMap::<u32, Vec<&Entry>>::new());
        for entry in journal.entries.iter().filter(|e| e.target.form == Form::Scheduling) {
            if let Place::Thread { pid, tid, .. } = entry.target.place {
                if pid == tid {
                    // The last one is of the process that has this pid now.
                    main_policies.insert(pid, entry);
                }
            }
        }
        for entry in journal.entries.iter().filter(|e| e.target.form == Form::Affinity) {
            if let Place::Thread { pid, .. } = entry.target.place {
                cpus.entry(pid).or_default().push(entry);
            }
        }
        let captured = fresh.iter().filter_map(|e| Some((&e.target, e.old.as_deref()?))).collect();
        Self { groups, main_policies, cpus, captured }
    }
}
