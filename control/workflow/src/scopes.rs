//! Settings that a service keeps: one journal for each VM, so that a crash, a conflict or the end
//! of one VM affects no other. Settings for several VMs together, as larger budgets of the groups
//! above theirs, have a journal of their own.

mod ancestors;
mod retry;

use std::path::Path;

use rtvirtio_apply::{
    Amended, Applied, ApplyError, JOURNAL_FILE, KnownJournal, Machine, OnConflict, Reverted, Session, Silent,
    Status, Write, append,
};
use rtvirtio_cpu::{Partition, Probe};
use rtvirtio_kernel::Root;

use crate::acting;
use crate::contracts::{self, InForce, partition_of_one, room_for};
use crate::dirs::{Dirs, is_there, write_before_journal, write_state};
use crate::error::{Result, bail};
use crate::guests::GuestAgents;
use crate::holders::{self, Holder};
use crate::in_force::forget;
use crate::renew::{Renewal, renew};
use crate::scope_files::{
    IN_FORCE_FILE, SHARED, VM, VmInForce, cpusets_dir, dir, entries, in_force, vm_dir, vms,
};
use crate::started::{self, StartedVm};
pub(crate) use ancestors::refuse_next_to_service;
use retry::{LAST_REFERENCES, put_back_with_retries};

/// Name of the held plan among what is put back: no VM has this name.
pub const HELD: &str = "(plan)";
/// Name of the groups above partitions there.
const CPUSETS: &str = "(groups above partitions)";

/// The CPU contracts in force that have journals of their own, without that in the directory
/// `name`: of VMs that have not ended since.
pub fn in_force_beside(dirs: &Dirs, name: &str) -> Result<Vec<InForce>> {
    let mut all = Vec::new();
    for vm in vms(dirs)? {
        all.extend(in_force(dirs, &vm)?.and_then(|of| of.cpu));
    }
    for (other, path) in entries(dirs)? {
        // A held plan makes room in its own journal.
        let is_other = other != name && !other.starts_with(VM) && path != dirs.held_plan();
        if is_other && contracts::any_in_force(&path)? && started::ended(&path)?.is_empty() {
            all.extend(contracts::in_force(&path)?);
        }
    }
    Ok(all)
}

/// Compares a VM's journal with the machine, with what the groups above its partition have for it;
/// `None` when nothing is in force for it.
pub fn status(dirs: &Dirs, vm: &str, machine: &Machine<'_>) -> Result<Option<Status>> {
    let Some(mut status) = rtvirtio_apply::status(&vm_dir(dirs, vm), machine)? else { return Ok(None) };
    ancestors::add_to(&mut status, dirs, machine)?;
    Ok(Some(status))
}

/// The right to change scopes: no other rtvirtio changes anything meanwhile.
pub struct Scopes<'a> {
    dirs: &'a Dirs,
    /// Of the state directory, with what `rtvirtio apply` has put in force.
    session: Session,
}

/// Contract to be put in force for one VM.
pub struct NewContract {
    /// Record to be saved next to the journal.
    pub in_force: VmInForce,
    /// Writes in the order in which they are carried out, after those that make its partition.
    pub writes: Vec<Write>,
    /// VMs with other contracts of this service, the only one on its state directory; `None` to
    /// read them from there. For each of many contracts that would cost more than applying it.
    pub beside: Option<Vec<StartedVm>>,
}

impl<'a> Scopes<'a> {
    /// Takes the lock of the state directory.
    ///
    /// # Errors
    /// [`Kind::InForce`](crate::Kind::InForce) while another rtvirtio holds it: try again.
    pub fn lock(dirs: &'a Dirs) -> Result<Self> {
        Ok(Self { session: Session::open(&dirs.state)?, dirs })
    }

    /// Directories that hold the state of all programs.
    pub(crate) fn dirs(&self) -> &Dirs {
        self.dirs
    }

    /// Puts a contract in force; [`Scopes::make_room`] comes first.
    ///
    /// # Errors
    /// [`Kind::InForce`](crate::Kind::InForce) when another program holds settings of the VM, or
    /// the scope has a journal; as [`Session::apply`], after everything was put back.
    pub fn apply(&self, new: &NewContract) -> Result<Applied> {
        let vm = &new.in_force.vm;
        let start = StartedVm { vm: vm.clone(), processes: new.in_force.processes.clone() };
        let own = Holder::Service(vm.clone());
        match &new.beside {
            Some(beside) => holders::refuse_known(&start, &own, beside, self.dirs)?,
            None => holders::refuse(&[start], &own, self.dirs)?,
        }
        let (root, dir) = (Root::default(), vm_dir(self.dirs, vm));
        let session = Session::open(&dir)?;
        if session.in_force()? {
            return Err(ApplyError::InForce { path: dir.join(JOURNAL_FILE) }.into());
        }
        let mut writes = match new.in_force.cpu.as_ref().and_then(|cpu| cpu.partition.as_ref()) {
            Some(partition) => partition_of_one(&root, vm, partition)?,
            None => Vec::new(),
        };
        append(&mut writes, new.writes.clone());
        // The journal that follows is on disk before the first write.
        write_before_journal(session.state(), IN_FORCE_FILE, &serde_json::to_vec_pretty(&new.in_force)?)?;
        acting::note_own(self.dirs)?;
        Ok(session.apply(&writes, &Machine::new(&root, &GuestAgents), &mut Silent)?)
    }

    /// Adds to what is in force for a VM, or changes it. `saved` takes the place of what is saved
    /// with it; `known` as in [`Session::amend_known`].
    pub fn amend(
        &self,
        vm: &str,
        writes: &[Write],
        saved: Option<&VmInForce>,
        known: &mut KnownJournal,
    ) -> Result<Amended> {
        let dir = vm_dir(self.dirs, vm);
        let root = Root::default();
        let machine = Machine::new(&root, &GuestAgents);
        let amended = Session::open(&dir)?.amend_known(known, writes, &machine, &mut Silent)?;
        if let Some(saved) = saved {
            write_state(&dir, IN_FORCE_FILE, &serde_json::to_vec_pretty(saved)?)?;
        }
        Ok(amended)
    }

    /// Saves the contract in force for a VM anew.
    pub fn save(&self, saved: &VmInForce) -> Result<()> {
        write_state(&vm_dir(self.dirs, &saved.vm), IN_FORCE_FILE, &serde_json::to_vec_pretty(saved)?)
    }

    /// Restores our values of a VM's settings that another program has changed, those of the groups
    /// above it first; `paths` are their files.
    pub fn restore(&self, vm: &str, paths: &[String]) -> Result<Amended> {
        let (root, chosen) = (Root::default(), |knob: &str, path: &str| is_chosen(paths, knob, path));
        let mut all = ancestors::restore(self.dirs, &chosen, &Machine::new(&root, &GuestAgents))?;
        let Amended { written, left, failed, warnings } = self.restore_in(&vm_dir(self.dirs, vm), paths)?;
        all.written.extend(written);
        all.left.extend(left);
        all.failed.extend(failed);
        all.warnings.extend(warnings);
        Ok(all)
    }

    /// Leaves settings of a VM, and of the groups above it, to another program that has changed
    /// them.
    pub fn release(&self, vm: &str, paths: &[String]) -> Result<Vec<String>> {
        let (root, chosen) = (Root::default(), |knob: &str, path: &str| is_chosen(paths, knob, path));
        let mut all = ancestors::release(self.dirs, &chosen, &Machine::new(&root, &GuestAgents))?;
        all.extend(self.release_in(&vm_dir(self.dirs, vm), paths)?);
        Ok(all)
    }

    /// Puts back what is in force for a VM; `None` when nothing is.
    ///
    /// # Errors
    /// When the journal cannot be used. The result names settings that remain.
    pub fn put_back(&self, vm: &str, on_conflict: OnConflict) -> Result<Option<Reverted>> {
        let reverted = put_back(&vm_dir(self.dirs, vm), on_conflict)?;
        Ok(settled(reverted, self.dirs))
    }

    /// Makes the groups above those of managed VMs as large as these contracts need together, with
    /// those that agents of a cluster's resources hold, and gives those above partitions the
    /// exclusive CPUs of all of these. With none they are put back.
    ///
    /// # Errors
    /// As [`Session::apply`] and [`Session::amend`]; [`Kind::NotPutBack`](crate::Kind::NotPutBack)
    /// when a budget remains: the kernel counts that of a VM's group for a moment after the group
    /// is gone.
    pub fn make_room(&self, probe: &Probe, contracts: &[InForce]) -> Result<()> {
        let dir = dir(self.dirs).join(SHARED);
        let root = Root::default();
        let machine = Machine::new(&root, &GuestAgents);
        let mut all = contracts.to_vec();
        let others = holders::cpu_of_resources(self.dirs)?;
        all.extend(others.into_iter().filter(|of| !contracts.iter().any(|c| c.vm == of.vm)));
        let partitions: Vec<&Partition> = all.iter().filter_map(|c| c.partition.as_ref()).collect();
        if !partitions.is_empty() {
            acting::note_own(self.dirs)?;
        }
        ancestors::hold(self.dirs, &partitions, &root, &machine)?;
        let managed = || all.iter().filter_map(|c| Some((c.backend, c.group.clone()?, c.contract)));
        if managed().next().is_none() {
            back_whole(put_back(&dir, OnConflict::Accept)?)?;
            return acting::settle(self.dirs);
        }
        let status = rtvirtio_apply::status(&dir, &machine)?;
        let whole = status.as_ref().is_some_and(Status::is_whole);
        if status.is_some() && !whole {
            back_whole(put_back(&dir, OnConflict::Accept)?)?;
        }
        let known = status.filter(|_| whole);
        let before = |path: &Path| {
            let path = path.display().to_string();
            known.as_ref()?.knobs.iter().find(|k| k.path == path)?.old.as_ref()?.parse().ok()
        };
        let writes = room_for(&root, probe, managed(), &before)?;
        let session = Session::open(&dir)?;
        acting::note_own(self.dirs)?;
        if known.is_some() {
            session.amend(&writes, &machine, &mut Silent)?;
        } else if !writes.is_empty() {
            session.apply(&writes, &machine, &mut Silent)?;
        }
        Ok(())
    }

    /// Like [`Scopes::restore`], in another state directory.
    pub(crate) fn restore_in(&self, dir: &Path, paths: &[String]) -> Result<Amended> {
        let (root, chosen) = (Root::default(), |knob: &str, path: &str| is_chosen(paths, knob, path));
        Ok(Session::open(dir)?.restore(&chosen, &Machine::new(&root, &GuestAgents))?)
    }

    /// Like [`Scopes::release`], in another state directory.
    pub(crate) fn release_in(&self, dir: &Path, paths: &[String]) -> Result<Vec<String>> {
        let (root, chosen) = (Root::default(), |knob: &str, path: &str| is_chosen(paths, knob, path));
        Ok(Session::open(dir)?.release(&chosen, &Machine::new(&root, &GuestAgents))?)
    }

    /// Like [`Scopes::restore`], for settings of `rtvirtio apply`.
    pub fn restore_applied(&self, paths: &[String]) -> Result<Amended> {
        let (root, chosen) = (Root::default(), |knob: &str, path: &str| is_chosen(paths, knob, path));
        Ok(self.session.restore(&chosen, &Machine::new(&root, &GuestAgents))?)
    }

    /// Like [`Scopes::release`], for settings of `rtvirtio apply`.
    pub fn release_applied(&self, paths: &[String]) -> Result<Vec<String>> {
        let (root, chosen) = (Root::default(), |knob: &str, path: &str| is_chosen(paths, knob, path));
        Ok(self.session.release(&chosen, &Machine::new(&root, &GuestAgents))?)
    }

    /// Gives a VM that was started again the weights and limits of the plan in force; `None` where
    /// plan, spec or VM have changed since the look-up.
    pub fn renew(&self, renewal: &Renewal) -> Result<Option<Amended>> {
        renew(&self.session, renewal, self.dirs)
    }

    /// Puts everything back, VM by VM; returns each result. Settings of a cluster's resource agents
    /// stay, with the larger budgets that they need above.
    ///
    /// # Errors
    /// When a journal cannot be used.
    pub fn put_all_back(&self, on_conflict: OnConflict) -> Result<Vec<(String, Reverted)>> {
        let mut all = Vec::new();
        let mut time_left = LAST_REFERENCES;
        for vm in vms(self.dirs)? {
            if let Some(reverted) =
                put_back_with_retries(&vm_dir(self.dirs, &vm), on_conflict, &mut time_left)?
            {
                all.push((vm, settled(Some(reverted), self.dirs).unwrap_or_default()));
            }
        }
        if let Some(plan) = put_back(&self.dirs.held_plan(), on_conflict)? {
            if plan.done {
                forget(&self.dirs.held_plan())?;
            }
            let plan = settled(Some(plan), &self.dirs.of_held_plan()).unwrap_or_default();
            all.push((HELD.to_owned(), plan));
        }
        let above = put_back_with_retries(&cpusets_dir(self.dirs), on_conflict, &mut time_left)?;
        if let Some(above) = above {
            all.push((CPUSETS.to_owned(), above));
        }
        let held = holders::cpu_of_resources(self.dirs)?;
        if held.iter().any(|of| of.group.is_some()) {
            let probe = rtvirtio_cpu::probe(&Root::default())?;
            self.make_room(&probe, &[])?;
        } else if let Some(shared) =
            put_back_with_retries(&dir(self.dirs).join(SHARED), on_conflict, &mut time_left)?
        {
            all.push((SHARED.to_owned(), shared));
        }
        acting::settle(self.dirs)?;
        Ok(all)
    }
}

/// An error when the groups above those of VMs were not put back whole.
fn back_whole(reverted: Option<Reverted>) -> Result<()> {
    match reverted.filter(|back| !back.done) {
        None => Ok(()),
        Some(left) => {
            bail!(NotPutBack, "the groups above those of VMs are not as they were: {}", left.summary())
        }
    }
}

fn is_chosen(paths: &[String], _: &str, path: &str) -> bool {
    paths.iter().any(|chosen| chosen == path)
}

pub(crate) fn put_back(dir: &Path, on_conflict: OnConflict) -> Result<Option<Reverted>> {
    let root = Root::default();
    put_back_on(dir, on_conflict, &Machine::new(&root, &GuestAgents))
}

fn put_back_on(dir: &Path, on_conflict: OnConflict, machine: &Machine<'_>) -> Result<Option<Reverted>> {
    if !is_there(&dir.join(JOURNAL_FILE))? {
        return Ok(None);
    }
    Ok(Session::open(dir)?.revert(on_conflict, machine, &mut Silent)?)
}

/// Settles the note of the state directory; a failure to do so becomes a warning.
pub(crate) fn settled(reverted: Option<Reverted>, dirs: &Dirs) -> Option<Reverted> {
    let mut reverted = reverted?;
    reverted.warnings.extend(acting::settle(dirs).err().map(|e| format!("{e:#}")));
    Some(reverted)
}
