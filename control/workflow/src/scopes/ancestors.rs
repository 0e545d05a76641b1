//! Groups above those of VMs with partitions: their cpuset controller and exclusive CPUs have one
//! journal, because the partitions of several VMs need them together.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use rtvirtio_apply::{
    Amended, Form, KnobState, KnobStatus, Machine, OnConflict, Session, Silent, Status, Write,
};
use rtvirtio_cpu::{Partition, ancestor_writes};
use rtvirtio_kernel::text::cpu_list;
use rtvirtio_kernel::{PartitionError, Root};

use super::{back_whole, put_back_on};
use crate::contracts;
use crate::dirs::Dirs;
use crate::error::{Error, Kind, Result, bail};
use crate::scope_files::{cpusets_dir, has_cpusets};

/// Gives the groups above these partitions what all of them need together, and takes from them what
/// none needs any more. With none all is put back.
///
/// # Errors
/// As [`Session::apply`] and [`Session::amend`], where a setting is refused or was changed by
/// another program, and next to partitions of `rtvirtio apply`;
/// [`Kind::NotPutBack`](crate::Kind::NotPutBack) when a setting remains.
pub(super) fn hold(dirs: &Dirs, wanted: &[&Partition], root: &Root, machine: &Machine<'_>) -> Result<()> {
    let dir = cpusets_dir(dirs);
    let status = rtvirtio_apply::status(&dir, machine)?;
    let is_whole = status.as_ref().is_some_and(Status::is_whole);
    if status.is_some() && (wanted.is_empty() || !is_whole) {
        back_whole(put_back_on(&dir, OnConflict::Accept, machine)?)?;
    }
    if wanted.is_empty() {
        return Ok(());
    }
    if !is_whole {
        refuse_next_to_applied(dirs)?;
    }
    let writes = || -> Result<Vec<Write>> {
        let before = before_us(&dir, machine)?;
        ancestor_writes(root, wanted, &before).map_err(|e| error(&e))
    };
    let mut all = writes()?;
    let is_controller = |write: &Write| write.target.form == Form::CpusetEnabled;
    // The files that it brings are journaled with the values that they come with.
    if all.iter().any(is_controller) {
        all.retain(is_controller);
        write(&dir, &all, machine)?;
        all = writes()?;
    }
    write(&dir, &all, machine)
}

fn error(error: &PartitionError) -> Error {
    let kind = match error {
        PartitionError::Cannot { .. } => Kind::Infeasible,
        PartitionError::Host(_) => Kind::System,
    };
    Error::new(kind, format!("the groups above partitions cannot be set: {error}"))
}

/// Refuses partitions of the service next to those that `rtvirtio apply` has made: of what both
/// need in the groups above, neither journal has the value from before.
fn refuse_next_to_applied(dirs: &Dirs) -> Result<()> {
    let state = &dirs.state;
    let in_force = if contracts::any_in_force(state)? { contracts::in_force(state)? } else { Vec::new() };
    if in_force.iter().any(|of| of.partition.is_some()) {
        bail!(
            InForce,
            "`rtvirtio apply` has made partitions: `rtvirtio revert` before rtvirtiod makes others"
        );
    }
    Ok(())
}

/// Refuses the partition that `rtvirtio apply` would make for the VM `vm` next to those of the
/// service.
pub(crate) fn refuse_next_to_service(vm: Option<&str>, dirs: &Dirs) -> Result<()> {
    match vm {
        Some(vm) if has_cpusets(dirs)? => bail!(
            InForce,
            "{vm}: rtvirtiod has made partitions, and `rtvirtio apply` makes none next to them: give rtvirtiod its contract too"
        ),
        _ => Ok(()),
    }
}

/// Exclusive CPUs that groups in the journal had before it, by their files; of groups that are
/// there.
fn before_us(dir: &Path, machine: &Machine<'_>) -> Result<BTreeMap<PathBuf, BTreeSet<u32>>> {
    let status = rtvirtio_apply::status(dir, machine)?.filter(Status::is_whole);
    let of = |knob: &KnobStatus| {
        let path = Path::new(&knob.path);
        let is_list = path.ends_with("cpuset.cpus.exclusive");
        let is_there = is_list && !matches!(knob.state, KnobState::Gone { .. });
        let old = knob.old.as_deref().filter(|_| is_there)?;
        Some((path.to_owned(), cpu_list(old)?))
    };
    Ok(status.map_or_else(BTreeMap::new, |status| status.knobs.iter().filter_map(of).collect()))
}

fn write(dir: &Path, writes: &[Write], machine: &Machine<'_>) -> Result<()> {
    if writes.is_empty() {
        return Ok(());
    }
    let session = Session::open(dir)?;
    if !session.in_force()? {
        session.apply(writes, machine, &mut Silent)?;
        return Ok(());
    }
    let done = session.amend(writes, machine, &mut Silent)?;
    if let Some((knob, why)) = done.failed.first() {
        bail!(System, "{knob} could not be set: {why}");
    }
    if let Some((knob, found)) = done.left.first() {
        bail!(System, "{knob} was set to `{found}` by another program");
    }
    Ok(())
}

/// Adds the settings of the groups above a VM's partition to the state of the VM's own.
pub(super) fn add_to(status: &mut Status, dirs: &Dirs, machine: &Machine<'_>) -> Result<()> {
    let is_kind = |knob: &&KnobStatus| Path::new(&knob.path).ends_with("cpuset.cpus.partition");
    let own = status.knobs.iter().find(is_kind).map(|knob| PathBuf::from(&knob.path));
    let Some(group) = own.as_deref().and_then(Path::parent) else { return Ok(()) };
    let above = rtvirtio_apply::status(&cpusets_dir(dirs), machine)?.filter(Status::is_whole);
    let is_above =
        |knob: &KnobStatus| Path::new(&knob.path).parent().is_some_and(|dir| group.starts_with(dir));
    status.knobs.extend(above.into_iter().flat_map(|above| above.knobs).filter(is_above));
    Ok(())
}

/// Sets what another program has changed of the chosen settings of groups above.
pub(super) fn restore(
    dirs: &Dirs,
    chosen: &dyn Fn(&str, &str) -> bool,
    machine: &Machine<'_>,
) -> Result<Amended> {
    match whole(dirs, machine)? {
        Some(session) => Ok(session.restore(chosen, machine)?),
        None => Ok(Amended::default()),
    }
}

/// Leaves the chosen settings of groups above to another program that has changed them.
pub(super) fn release(
    dirs: &Dirs,
    chosen: &dyn Fn(&str, &str) -> bool,
    machine: &Machine<'_>,
) -> Result<Vec<String>> {
    match whole(dirs, machine)? {
        Some(session) => Ok(session.release(chosen, machine)?),
        None => Ok(Vec::new()),
    }
}

/// The journal of the groups above, where it is in force.
fn whole(dirs: &Dirs, machine: &Machine<'_>) -> Result<Option<Session>> {
    let dir = cpusets_dir(dirs);
    let is_whole = rtvirtio_apply::status(&dir, machine)?.is_some_and(|status| status.is_whole());
    Ok(if is_whole { Some(Session::open(dir)?) } else { None })
}

#[cfg(test)]
mod tests;
