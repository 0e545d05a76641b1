//! Disks that have grown since they were opened, or whose `size` is larger by now: their guests see
//! it while they run. A disk never shrinks under its guest.

use rtvirtio_domain_config::{Disk, File};
use rtvirtio_domain_resources::OpenError;
use rtvirtio_domain_resources::backing::BackingError;
use rtvirtio_sched::VmId;
use rtvirtio_units::Bytes;

use crate::disk::Part;
use crate::engine::{Command, EngineHandle, ReconfigureError};
use crate::refusal::{ReloadError, named};
use crate::reload::Membership;
use crate::running_state::State;

/// A disk that gets a larger size.
#[derive(Debug)]
pub(crate) struct Growth {
    device: usize,
    place: VmId,
    /// The disk's part of its file, with the new size.
    pub(crate) part: Part,
}

/// Disks that stay and grow by a new configuration. Changes nothing.
///
/// # Errors
/// A smaller `size`; one beyond the end of the file, or of parts of blocks; an overlap.
pub(crate) fn find(state: &State, new: &File, membership: &Membership) -> Result<Vec<Growth>, ReloadError> {
    let mut all = Vec::new();
    let goes = |part: &&Part| membership.detach.iter().any(|(_, gone)| *gone == part.name);
    let mut parts: Vec<Part> = state.parts().filter(|part| !goes(part)).cloned().collect();
    for (device, places) in state.places.iter().enumerate() {
        for (place, member) in places.iter_enumerated() {
            let Some(part) = member.as_ref().map(|member| &member.part) else { continue };
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
            all.push(Growth { device, place, part: grown });
        }
    }
    Ok(all)
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
    /// Carries it out. Returns the change, in words; `None` where the disk was detached.
    ///
    /// # Errors
    /// The engine has ended.
    pub(crate) fn carry_out(
        self,
        state: &mut State,
        engines: &[(String, EngineHandle)],
    ) -> Result<Option<String>, ReloadError> {
        let Self { device, place, part } = self;
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
