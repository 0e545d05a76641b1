//! State of an I/O domain that changes while it runs.

use rtvirtio_domain_config::{Disk, File};
use rtvirtio_domain_resources::disk_lock::{DiskLock, DiskUse};
use rtvirtio_sched::{IndexVec, VmId};

use crate::disk::{Member, Part};
use crate::network::RunningNetwork;
use crate::refusal::ReloadError;
use crate::reload::Membership;

/// State that reloads change.
#[derive(Debug)]
pub(crate) struct State {
    /// The configuration in force.
    pub(crate) file: File,
    /// The disks of each device, by place.
    pub(crate) places: Vec<IndexVec<VmId, Option<Member>>>,
    pub(crate) locks: Vec<DiskLock>,
    /// The networks, in the order of the file.
    pub(crate) networks: Vec<RunningNetwork>,
}

impl State {
    pub(crate) fn parts(&self) -> impl Iterator<Item = &Part> {
        self.places.iter().flatten().flatten().map(|m| &m.part)
    }

    pub(crate) fn member(&self, name: &str) -> Option<&Member> {
        self.places.iter().flatten().flatten().find(|m| m.part.name == name)
    }

    pub(crate) fn is_connected(&self, name: &str) -> bool {
        self.member(name).is_some_and(|m| m.server.is_connected())
    }

    /// Whether a guest uses a disk.
    pub(crate) fn is_in_use(&self, name: &str) -> bool {
        self.member(name).is_some_and(|m| m.server.is_in_use())
    }

    /// Whether a place is vacant after `membership.detach`.
    pub(crate) fn is_free(&self, device: usize, place: VmId, membership: &Membership) -> bool {
        let goes = |m: &Member| membership.detach.iter().any(|(_, name)| *name == m.part.name);
        self.places[device].get(place).is_none_or(|m| m.as_ref().is_none_or(goes))
    }

    /// Refuses a disk whose file is locked for less than all of its disks need.
    pub(crate) fn require_lock<'a>(
        &'a self,
        disk: &Disk,
        on_file: &[&Part],
        passed: Option<&'a DiskLock>,
        ready: impl Iterator<Item = &'a DiskLock>,
    ) -> Result<(), ReloadError> {
        let needed = DiskUse {
            read_only: on_file.iter().all(|p| p.read_only),
            shared: on_file.iter().all(|p| p.shared),
        };
        let Some(identity) = on_file.first().map(|part| part.identity) else { return Ok(()) };
        let known = self.locks.iter().chain(ready);
        let held = known.chain(passed).find(|lock| lock.identity == identity).and_then(DiskLock::held);
        let refused = |held| Err(ReloadError::Lock { disk: disk.name.clone(), held });
        match held {
            None => refused("are not locked"),
            Some(held) if held.read_only && !needed.read_only => refused("are all read-only"),
            Some(held) if held.shared && !needed.shared => refused("are all shared"),
            Some(_) => Ok(()),
        }
    }
}
