//! CPU contracts for the length of a measurement: applied, journaled and reverted as those of
//! `apply`.

use std::time::Duration;

use rtvirtio_apply::{Levels, Machine, NoGuests, OnConflict, Session, Silent, append};
use rtvirtio_cpu::{
    Ask, Backend, Contract, Order, Probe, UrgencyRange, admit, choose, levels, settings, with_levels,
};
use rtvirtio_kernel::Root;
use rtvirtio_vmm::threads::discover;
use rtvirtio_vmm::{Role, VmHandle};

use crate::contracts::room_for;
use crate::error::{Context as _, Result, bail};
use crate::progress::Progress;

/// The contract of one VM.
pub struct VmContract<'a> {
    pub vm: &'a str,
    /// Processes and thread roles. Threads are discovered while no contract is in force: under a
    /// previous contract its cgroups would be captured as the original ones.
    pub handle: VmHandle,
    /// Whether the contract holds its vCPUs only.
    pub vcpus_only: bool,
    /// Budget and period of all of its threads together.
    pub contract: Contract,
    /// Order of its threads.
    pub order: Order,
    /// CPU time of each thread in the last period of observation, for a split by use.
    pub used: Vec<(u32, Duration)>,
    /// The range in which its guest moves its vCPUs.
    pub urgency: Option<UrgencyRange>,
}

/// A backend with the contracts that it holds. Dropping it reverts them.
pub struct ScopedContracts<'a> {
    session: Session,
    probe: Probe,
    backend: Backend,
    progress: &'a dyn Progress,
}

impl<'a> ScopedContracts<'a> {
    /// Contracts of a backend. [`ScopedContracts::release`] reverts everything in the session's
    /// journal, so the session must not hold settings that are to stay.
    pub fn new(session: Session, probe: Probe, backend: Backend, progress: &'a dyn Progress) -> Self {
        Self { session, probe, backend, progress }
    }

    /// Kernel mechanism that enforces the contracts.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// The kernel's CPU mechanisms, as probed before the first contract.
    pub fn probe(&self) -> &Probe {
        &self.probe
    }

    /// Sets these contracts in place of the previous ones.
    ///
    /// # Errors
    /// [`Kind::Infeasible`](crate::Kind::Infeasible) when they are more than the kernel grants.
    pub fn set(&self, all: &[VmContract<'_>]) -> Result<()> {
        self.release()?;
        let choice = choose(&self.probe, Some(self.backend), false).context("the mechanism is gone")?;
        admit(&choice.grant, &all.iter().map(|w| (w.vm.to_owned(), w.contract)).collect::<Vec<_>>())?;
        let root = Root::default();
        let (mut of_vms, mut budgets) = (Vec::new(), Vec::new());
        let levels = levels(&all.iter().map(|w| (self.backend, w.order, w.contract)).collect::<Vec<_>>());
        for (w, level) in all.iter().zip(levels) {
            let mut threads =
                discover(&root, &w.handle).with_context(|| format!("{}: is it still running?", w.vm))?;
            threads.retain(|t| !w.vcpus_only || matches!(t.role, Role::Vcpu(_)));
            let (vm, threads, used) = (w.vm, &threads, &w.used);
            let ask = Ask { vm, threads, contract: w.contract, order: w.order, level, used };
            let mut settings = settings(&root, &self.probe, self.backend, &ask)?;
            if let Some(range) = &w.urgency {
                with_levels(&root, vm, threads, self.backend, range, &mut settings.writes)?;
            }
            budgets.extend(settings.group.map(|group| (self.backend, group, w.contract)));
            append(&mut of_vms, settings.writes);
        }
        let mut writes = room_for(&root, &self.probe, budgets.into_iter(), &|_| None)?;
        append(&mut writes, of_vms);
        self.session.apply(&writes, &Machine::new(&root, &NoGuests), &mut Silent)?;
        Ok(())
    }

    /// The vCPUs that may be moved, until these contracts are replaced or released.
    pub fn levels(&self) -> Result<Levels> {
        Ok(Levels::of_session(&self.session)?)
    }

    /// Puts everything back.
    ///
    /// # Errors
    /// [`Kind::NotPutBack`](crate::Kind::NotPutBack) when a setting remains.
    pub fn release(&self) -> Result<()> {
        release(&self.session)
    }
}

/// Puts back what a session has set, also that of an earlier process.
///
/// # Errors
/// [`Kind::NotPutBack`](crate::Kind::NotPutBack) when a setting remains.
pub fn release(session: &Session) -> Result<()> {
    let root = Root::default();
    match session.revert(OnConflict::Report, &Machine::new(&root, &NoGuests), &mut Silent)? {
        Some(r) if !r.done => bail!(NotPutBack, "contracts were not put back: {}", r.summary()),
        _ => Ok(()),
    }
}

impl Drop for ScopedContracts<'_> {
    fn drop(&mut self) {
        if let Err(e) = self.release() {
            self.progress.warn(&format!("{e:#}"));
        }
    }
}
