//! CPU contracts for the length of a measurement: applied, journaled and reverted as those of
//! `apply`.

use std::time::Duration;

use rtvirtio_apply::{Machine, NoGuests, OnConflict, Session, Silent, append};
use rtvirtio_cpu::{Ask, Backend, Contract, Order, Probe, admit, choose, levels, settings};
use rtvirtio_kernel::Root;
use rtvirtio_vmm::threads::discover;
use rtvirtio_vmm::{Role, VmHandle};

use crate::error::{Context as _, Result, bail};
use crate::progress::Progress;

/// What one VM is to have.
pub struct VmContract<'a> {
    /// Its name.
    pub vm: &'a str,
    /// What leads to its threads. They are looked for when no contract is in force: those found
    /// under the contract before would be put back there.
    pub handle: VmHandle,
    /// Whether only its vCPUs are to be held.
    pub vcpus_only: bool,
    /// What they get together.
    pub contract: Contract,
    /// Their order.
    pub order: Order,
    /// CPU time that each used in the last period of observation, for a split by use.
    pub used: Vec<(u32, Duration)>,
}

/// What holds contracts, and what was set last. Dropping it puts everything back.
pub struct ScopedContracts<'a> {
    session: Session,
    probe: Probe,
    backend: Backend,
    progress: &'a dyn Progress,
}

impl<'a> ScopedContracts<'a> {
    /// For this mechanism. The session must not be that of settings that are to stay:
    /// [`ScopedContracts::release`] puts back whatever is in its journal.
    pub fn new(session: Session, probe: Probe, backend: Backend, progress: &'a dyn Progress) -> Self {
        Self { session, probe, backend, progress }
    }

    /// The mechanism.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// What this kernel has, as it was when the contracts were opened.
    pub fn probe(&self) -> &Probe {
        &self.probe
    }

    /// Sets these in place of what was set before.
    ///
    /// # Errors
    /// [`Kind::Infeasible`](crate::Kind::Infeasible) when they are more than the kernel grants.
    pub fn set(&self, all: &[VmContract<'_>]) -> Result<()> {
        self.release()?;
        let found = choose(&self.probe, Some(self.backend), false).context("the mechanism is gone")?;
        admit(&found.grant, &all.iter().map(|w| (w.vm.to_owned(), w.contract)).collect::<Vec<_>>())?;
        let root = Root::default();
        let mut writes = Vec::new();
        let levels = levels(&all.iter().map(|w| (self.backend, w.order, w.contract)).collect::<Vec<_>>());
        for (w, level) in all.iter().zip(levels) {
            let mut found =
                discover(&root, &w.handle).with_context(|| format!("{}: is it still running?", w.vm))?;
            found.retain(|t| !w.vcpus_only || matches!(t.role, Role::Vcpu(_)));
            let (vm, threads, used) = (w.vm, &found, &w.used);
            let ask = Ask { vm, threads, contract: w.contract, order: w.order, level, used };
            append(&mut writes, settings(&root, &self.probe, self.backend, &ask)?.writes);
        }
        self.session.apply(&writes, &Machine::new(&root, &NoGuests), &mut Silent)?;
        Ok(())
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
