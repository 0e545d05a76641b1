//! Files next to the journal: the plan and the contracts in force.

use std::io::ErrorKind;
use std::path::Path;

use rtvirtio_apply::{JOURNAL_FILE, Session, StateDir};
use rtvirtio_kernel::trusted::DATA_LIMIT;

use crate::contracts::IN_FORCE_FILE;
use crate::covered::COVERED_FILE;
use crate::dirs::{Dirs, is_there, write_state};
use crate::error::{Context as _, Result, bail};
use crate::plan_file::HostPlan;
use crate::started::VMS_FILE;

/// Name of the file with the plan in force.
const PLAN_FILE: &str = "plan.json";

/// Saves the plan that is about to be journaled. Without a journal it means nothing.
pub(crate) fn save(plan: &HostPlan, state_dir: &Path) -> Result<()> {
    write_state(state_dir, PLAN_FILE, &serde_json::to_vec_pretty(plan)?)
}

/// The plan whose journal is there; `None` without a journal, and for a journal without a plan, as
/// that of CPU contracts alone.
pub fn plan(state_dir: &Path) -> Result<Option<HostPlan>> {
    let Some(dir) = StateDir::find(state_dir)? else { return Ok(None) };
    let at = |name: &'static str| move || state_dir.join(name).display().to_string();
    if !dir.exists(JOURNAL_FILE).with_context(at(JOURNAL_FILE))? {
        return Ok(None);
    }
    match dir.read(PLAN_FILE) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(None),
        read => HostPlan::parse(&state_dir.join(PLAN_FILE), &read.with_context(at(PLAN_FILE))?).map(Some),
    }
}

/// Removes plan, contracts and VMs of a removed journal: they do not belong to the next one.
pub fn forget(state_dir: &Path) -> Result<()> {
    let Some(dir) = StateDir::find(state_dir)? else { return Ok(()) };
    for file in [PLAN_FILE, IN_FORCE_FILE, VMS_FILE, COVERED_FILE] {
        dir.remove(file).with_context(|| format!("cannot remove {}", state_dir.join(file).display()))?;
    }
    Ok(())
}

/// Fails while settings are in force, and while the service holds a plan.
///
/// # Errors
/// [`Kind::InForce`](crate::Kind::InForce).
pub fn refuse(dirs: &Dirs) -> Result<()> {
    refuse_held(dirs)?;
    let path = dirs.state.join(JOURNAL_FILE);
    if Session::open(&dirs.state)?.in_force()? {
        return Err(rtvirtio_apply::ApplyError::InForce { path }.into());
    }
    Ok(())
}

/// Fails while the service holds a plan.
pub(crate) fn refuse_held(dirs: &Dirs) -> Result<()> {
    if is_there(&dirs.held_plan().join(JOURNAL_FILE))? {
        bail!(
            InForce,
            "rtvirtiod holds a plan: take `[plan]` out of its configuration, or stop it and `rtvirtio revert`"
        );
    }
    Ok(())
}

/// The process that applied what is in force; `None` where nothing is.
pub fn applied_by(dirs: &Dirs) -> Result<Option<u32>> {
    if !is_there(&dirs.state)? {
        return Ok(None);
    }
    Ok(Session::open(&dirs.state)?.applied_by()?)
}

/// Reads a plan file.
///
/// # Errors
/// [`Kind::File`](crate::Kind::File) when it is not a plan of this form.
pub fn load_plan(path: &Path) -> Result<HostPlan> {
    HostPlan::parse(
        path,
        &rtvirtio_kernel::trusted::read_named(path, DATA_LIMIT)
            .with_context(|| format!("cannot read {}", path.display()))?,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_that_the_service_holds_is_refused_next_to() {
        let (_dir, dirs) = crate::fixtures::dirs();
        refuse_held(&dirs).unwrap();
        write_state(&dirs.held_plan(), JOURNAL_FILE, b"{}").unwrap();
        for refused in [refuse_held(&dirs), refuse(&dirs)] {
            let e = refused.unwrap_err();
            assert!(
                e.kind() == crate::Kind::InForce && e.to_string().contains("rtvirtiod holds a plan"),
                "{e}"
            );
        }
        // The plan's own directory is where the service sets it.
        refuse_held(&dirs.of_held_plan()).unwrap();
    }
}
