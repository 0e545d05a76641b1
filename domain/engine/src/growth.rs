//! Disks that have grown since they were opened, or whose `size` is larger by now: their guests see
//! it while they run. A disk never shrinks under its guest.

use std::io;
use std::path::PathBuf;

use rtvirtio_domain_config::{Disk, File};
use rtvirtio_domain_resources::OpenError;
use rtvirtio_domain_resources::backing::BackingError;
use rtvirtio_domain_resources::use_lock::UseLockError;
use rtvirtio_sched::VmId;
use rtvirtio_units::Bytes;

use crate::disk::{Member, Part};
use crate::engine::{Command, EngineHandle, ReconfigureError};
use crate::refusal::{ReloadError, named};
use crate::reload::Membership;
use crate::running_state::State;

/// A disk that gets a larger size.
#[derive(Debug)]
pub(crate) struct Growth {
    device: usize,
    place: VmId,
    path: PathBuf,
    /// The disk's part of its file, with the new size.
    pub(crate) part: Part,
}

/// Disks that stay and grow by a new configuration, of all or of `only` this name. Changes nothing.
///
/// # Errors
/// A smaller `size`; one beyond the end of the file, or of parts of blocks; an overlap.
pub(crate) fn find(
    state: &State,
    new: &File,
    membership: &Membership,
    only: Option<&str>,
) -> Result<Vec<Growth>, ReloadError> {
    let mut all = Vec::new();
    let goes = |part: &&Part| membership.detach.iter().any(|(_, gone)| *gone == part.name);
    let mut parts: Vec<Part> = state.parts().filter(|part| !goes(part)).cloned().collect();
    for (device, places) in state.places.iter().enumerate() {
        for (place, member) in places.iter_enumerated() {
            let Some(part) = member.as_ref().map(|member| &member.part) else { continue };
            if only.is_some_and(|only| only != part.name) {
                continue;
            }
            let disk = new.devices.get(device).and_then(|d| d.disks.iter().find(|d| d.name == part.name));
            let Some(disk) = disk else { continue };
            let Some(size) = new_size(disk, part)? else { continue };
            let grown = part.with_size(size);
            if let Some(other) = parts.iter().find(|other| other.name != grown.name && other.overlaps(&grown))
            {
                let (first, second) = (other.name.clone(), grown.name);
                return Err(OpenError::Overlap { first, second }.into());
            }
            parts.retain(|other| other.name != grown.name);
            parts.push(grown.clone());
            all.push(Growth { device, place, path: disk.path.clone(), part: grown });
        }
    }
    Ok(all)
}

/// Locks the new ends of disks that may move and that guests use, all of them or none: a disk of
/// another I/O domain may be there.
///
/// # Errors
/// A lock that cannot be had.
pub(crate) fn lock(state: &State, growths: &[Growth]) -> Result<(), ReloadError> {
    for (i, growth) in growths.iter().enumerate() {
        let Err(e) = growth.set_locked_size(state, growth.part.size()) else { continue };
        for before in growths.iter().take(i) {
            let old = before.member(state).map_or(0, |member| member.part.size());
            if let Err(e) = before.set_locked_size(state, old) {
                crate::log::line(&before.part.name, format_args!("its new end stays locked: {e}"));
            }
        }
        let (path, what, disk) = (growth.path.clone(), "cannot lock its new end", growth.part.name.clone());
        let source = BackingError::Io { path, what, source: io::Error::other(e) };
        return Err(OpenError::Disk { disk, source }.into());
    }
    Ok(())
}

/// Gives a disk that its guest has begun to use the size that it has by now. Returns the changes,
/// in words.
///
/// # Errors
/// Those of [`find`] and [`lock`], which change nothing, and an engine that has ended.
pub(crate) fn look_again(
    state: &mut State,
    name: &str,
    engines: &[(String, EngineHandle)],
) -> Result<Vec<String>, ReloadError> {
    let growths = find(state, &state.file, &Membership::default(), Some(name))?;
    lock(state, &growths)?;
    let mut changes = Vec::new();
    for growth in growths {
        changes.extend(growth.carry_out(state, engines)?);
    }
    Ok(changes)
}

/// Size to which a disk grows; `None` where it stays.
fn new_size(disk: &Disk, part: &Part) -> Result<Option<u64>, ReloadError> {
    let failed = |source| OpenError::Disk { disk: disk.name.clone(), source };
    let path = disk.path.clone();
    let room = match part.room() {
        Ok(room) => room,
        Err(source) => {
            return Err(failed(BackingError::Io { path, what: "cannot inspect it", source }).into());
        }
    };
    let size = disk.size.map_or(room, |size| size.0);
    let at = disk.offset.0;
    if size < part.size() && disk.size.is_some() {
        return Err(ReloadError::Restart { list: vec![format!("{}: size", named("disk", &disk.name))] });
    }
    // Of a file that was cut the requests beyond its end fail.
    if size <= part.size() {
        return Ok(None);
    }
    if size > room {
        return Err(failed(BackingError::Short { path, end: at.saturating_add(size), len: at + room }).into());
    }
    if size % u64::from(part.block) != 0 {
        let (what, value, block) = ("size", size, part.block);
        return Err(failed(BackingError::Alignment { path, what, value, block }).into());
    }
    Ok(Some(size))
}

impl Growth {
    fn member<'a>(&self, state: &'a State) -> Option<&'a Member> {
        state.places.get(self.device)?.get(self.place)?.as_ref()
    }

    fn set_locked_size(&self, state: &State, size: u64) -> Result<(), UseLockError> {
        let lock = self.member(state).and_then(|member| member.server.use_lock());
        lock.map_or(Ok(()), |lock| lock.set_size(size))
    }

    /// Carries it out. Returns the change, in words; `None` where the disk was detached.
    pub(crate) fn carry_out(
        self,
        state: &mut State,
        engines: &[(String, EngineHandle)],
    ) -> Result<Option<String>, ReloadError> {
        let Self { device, place, path: _, part } = self;
        let size = part.size();
        let (name, handle) = &engines[device];
        let Some(member) = state.places[device][place].as_mut() else { return Ok(None) };
        // Before the guest learns of it.
        let grown = handle.ask(|reply| Command::Grow { vm: place, size, reply });
        grown.map_err(|gone| ReloadError::Engine {
            device: name.clone(),
            source: ReconfigureError::Gone(gone),
        })?;
        let (old, is_connected) = (member.part.size(), member.server.is_connected());
        let unseen = match member.grow(size) {
            Ok(false) if is_connected => Some("its front end takes no notice of changes".to_owned()),
            Ok(_) => None,
            Err(e) => Some(format!("its front end does not take the notice: {e}")),
        };
        let seen = unseen.map_or_else(String::new, |why| {
            format!("; {why}: its guest sees it when the VM is started again")
        });
        Ok(Some(format!("{}: size {} -> {}{seen}", named("disk", member.name()), Bytes(old), Bytes(size))))
    }
}
