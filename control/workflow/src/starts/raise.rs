//! Weights of VMs, and the time that their device waits for them: raised and put back at any
//! moment, all values journaled before.

use std::io;

use rtvirtio_apply::{
    Amended, Binding, Hold, Levels, Machine, MovableFile, NoGuests, OnConflict, Raised, Session, Silent,
    Write, raise_writes,
};
use rtvirtio_kernel::Root;

use crate::acting;
use crate::dirs::Dirs;
use crate::error::{Context as _, Result, bail};
use crate::in_force;

/// Result of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The values are as asked.
    Done,
    /// The lock is held by another rtvirtio: try again later.
    Busy,
    /// The settings in force were put back, or replaced by others.
    PutBack,
}

/// Writes and state of one VM.
struct OfVm {
    name: String,
    writes: Vec<Write>,
    raised: bool,
}

/// The values in the journal. Dropping it lowers all, and takes them out of what is in force.
pub struct Raise {
    dirs: Dirs,
    vms: Vec<OfVm>,
    /// Writes to the device, raised while any VM is.
    shared: Vec<Write>,
    levels: Levels,
    /// The process that applied what is in force.
    by: u32,
    /// Whether nothing was in force before.
    ours_alone: bool,
    ended: bool,
}

impl Raise {
    /// Journals the VMs' own values and the raised ones. Settings in force stay, and get them in
    /// addition; with nothing in force they are a plan of their own.
    ///
    /// # Errors
    /// [`Kind::InForce`](crate::Kind::InForce) while the service holds a plan; as [`raise_writes`]
    /// for a VM whose weight would have no effect; when the journal cannot be written, or a setting
    /// not be changed.
    pub fn begin(vms: &[&str], raised: Raised, binding: &Binding, dirs: &Dirs) -> Result<Self> {
        let root = Root::default();
        let machine = Machine::new(&root, &NoGuests);
        let session = Session::open(&dirs.state)?;
        // It would set each raised weight again.
        in_force::refuse_held(dirs)?;
        let ours_alone = !session.in_force()?;
        // A process that was killed may have left one raised: the journal has what it was before.
        let left = Levels::of_session(&session)?;
        let of_left = |w: &Write| left.files().iter().find(|f| f.target == w.target);
        let (mut all, mut of_vms, mut device) = (Vec::new(), Vec::new(), Vec::<Write>::new());
        for vm in vms {
            let mut writes = raise_writes(&[vm], raised, binding, &machine)?;
            let moved = writes.of_vms.iter_mut().filter(|w| !w.levels.is_empty());
            for write in moved.chain(&mut writes.of_device) {
                if let Some(file) = of_left(write) {
                    write.value.clone_from(&file.contract);
                }
            }
            // A device that waits as long already stays so, and one whose time a plan has set. What
            // a killed process left is put back.
            writes.of_device.iter_mut().filter(|w| !is_longer(w)).for_each(|w| w.levels.clear());
            writes
                .of_device
                .retain(|w| !left.is_fixed(&w.target) && (!w.levels.is_empty() || of_left(w).is_some()));
            let moved = writes.of_vms.iter().filter(|w| !w.levels.is_empty()).cloned().collect();
            of_vms.push(OfVm { name: (*vm).to_owned(), writes: moved, raised: false });
            let is_new = |w: &&Write| !device.iter().any(|known| known.target == w.target);
            let new: Vec<Write> = writes.of_device.iter().filter(is_new).cloned().collect();
            device.extend(new);
            rtvirtio_apply::merge(&mut all, writes.of_vms)?;
            rtvirtio_apply::merge(&mut all, writes.of_device)?;
        }
        if ours_alone {
            // What an apply that was rolled back, or a revert that was cut off, has left there is
            // not in force by this journal.
            in_force::forget(&dirs.state)?;
            acting::note(dirs)?;
            session.apply(&all, &machine, &mut Silent)?;
        } else {
            // What enables I/O control of a cgroup is done where a plan in force has weights.
            all.retain(|w| !w.levels.is_empty() || device.iter().any(|d| d.target == w.target));
            check(&session.amend(&all, &machine, &mut Silent)?)?;
        }
        let by = session.applied_by()?.context("the journal is gone")?;
        drop(session);
        let levels = Levels::open(&dirs.state)?;
        let shared = device.into_iter().filter(|w| !w.levels.is_empty()).collect();
        Ok(Self { dirs: dirs.clone(), vms: of_vms, shared, levels, by, ours_alone, ended: false })
    }

    /// Raises a VM, or puts it back to what it had.
    ///
    /// # Errors
    /// Another program has set one of the values, which is left alone, or the kernel refuses. A VM
    /// that has ended is no error.
    pub fn set(&mut self, vm: &str, raised: bool) -> Result<Change> {
        if !self.vms.iter().any(|of| of.name == vm) {
            bail!(Argument, "{vm} is not one of the VMs that may be raised")
        }
        let any = self.vms.iter().any(|of| if of.name == vm { raised } else { of.raised });
        let of_vm = self.vms.iter().filter(|of| of.name == vm).flat_map(|of| &of.writes);
        let of_device = self.shared.iter().map(|w| (w, any, true));
        let moves: Vec<(&Write, bool, bool)> = of_vm.map(|w| (w, raised, false)).chain(of_device).collect();
        // A journal that was written anew in between is read once.
        for attempt in 0..2 {
            let held = self.levels.hold()?;
            if matches!(held, Hold::Changed) {
                drop(held);
                if attempt > 0 {
                    break;
                }
                self.levels.reload()?;
                if self.levels.applied_by() != Some(self.by) {
                    return Ok(Change::PutBack);
                }
                continue;
            }
            let Hold::Free(guard) = held else { return Ok(Change::Busy) };
            let mut failed = None;
            for (write, raised, is_shared) in &moves {
                let file = self.levels.files().iter().find(|f| f.target == write.target);
                let Some(file) = file else {
                    // Another process that raises VMs of the device has ended.
                    if *is_shared {
                        continue;
                    }
                    return Ok(Change::PutBack);
                };
                match guard.set_file(file, value(file, write, *raised)) {
                    Ok(_) => {}
                    Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                    // The others are moved all the same.
                    Err(e) => failed = failed.or(Some(e)),
                }
            }
            drop(guard);
            self.vms.iter_mut().filter(|of| of.name == vm).for_each(|of| of.raised = raised);
            return match failed {
                None => Ok(Change::Done),
                Some(e) => Err(e).with_context(|| format!("what raises {vm}")),
            };
        }
        Ok(Change::Busy)
    }

    /// Whether the values are still in force.
    pub fn is_in_force(&mut self) -> Result<bool> {
        if matches!(self.levels.hold()?, Hold::Changed) {
            self.levels.reload()?;
            return Ok(self.levels.applied_by() == Some(self.by));
        }
        Ok(true)
    }

    /// Lowers all, and puts them back as they were before where nothing else is in force.
    ///
    /// # Errors
    /// [`Kind::NotPutBack`](crate::Kind::NotPutBack) with the setting that remains.
    pub fn end(mut self) -> Result<()> {
        self.put_back()
    }

    fn put_back(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        let root = Root::default();
        let machine = Machine::new(&root, &NoGuests);
        let session = Session::open(&self.dirs.state)?;
        if session.applied_by()? != Some(self.by) {
            // Reverted in the meantime, with all of this.
            return Ok(());
        }
        if self.ours_alone {
            return match session.revert(OnConflict::Report, &machine, &mut Silent)? {
                Some(r) if !r.done => bail!(NotPutBack, "not put back: {}", r.summary()),
                _ => acting::settle(&self.dirs),
            };
        }
        let lowered = |w: &Write| Write { levels: Vec::new(), ..w.clone() };
        let all: Vec<Write> =
            self.vms.iter().flat_map(|of| &of.writes).chain(&self.shared).map(lowered).collect();
        check(&session.amend(&all, &machine, &mut Silent)?)
    }
}

impl Drop for Raise {
    fn drop(&mut self) {
        // `end` reports it; `rtvirtio revert` puts back what stays.
        let _ = self.put_back();
    }
}

/// Whether the raised time is longer than the device's own.
fn is_longer(write: &Write) -> bool {
    let raised = write.levels.first().and_then(|level| level.parse::<u32>().ok());
    raised.zip(write.value.parse().ok()).is_some_and(|(raised, own)| raised > own)
}

/// The value of a file.
fn value<'a>(file: &'a MovableFile, write: &'a Write, raised: bool) -> &'a str {
    if raised { write.levels.first().unwrap_or(&write.value) } else { &file.contract }
}

fn check(amended: &Amended) -> Result<()> {
    if let Some((knob, why)) = amended.failed.first() {
        bail!(System, "{knob}: {why}");
    }
    if let Some((knob, found)) = amended.left.first() {
        bail!(System, "{knob}: another program has set `{found}`; it is left alone");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rtvirtio_kernel::Stack;

    use super::*;
    use crate::contracts::IN_FORCE_FILE;
    use crate::dirs::{is_there, write_state};

    #[test]
    fn a_plan_that_was_rolled_back_is_not_in_force_by_the_journal_of_raised_weights() {
        let (dir, root) = crate::fixtures::root();
        for (path, text) in [("dev", "8:0\n"), ("queue/scheduler", "[none] mq-deadline\n")] {
            crate::fixtures::put(&root, format!("/sys/block/sda/{path}"), text);
        }
        std::fs::create_dir_all(root.at("/sys/class/block/sda")).unwrap();
        let stack = Stack::find(&root, "sda").unwrap();
        let binding = Binding { stack, cgroups: None, vms: Default::default() };
        let dirs = Dirs { state: dir.path().join("state"), run: dir.path().join("run") };
        write_state(&dirs.state, "plan.json", b"left").unwrap();
        write_state(&dirs.state, IN_FORCE_FILE, b"left").unwrap();
        let raise = Raise::begin(&[], Raised { weight: 900, slice_idle: None }, &binding, &dirs).unwrap();
        assert_eq!(in_force::plan(&dirs.state).unwrap(), None);
        assert!(!is_there(&dirs.state.join(IN_FORCE_FILE)).unwrap());
        raise.end().unwrap();
    }
}
