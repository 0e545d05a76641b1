//! Guest memory of a connection: as one table, or by slots that come and go.

use std::fs::File;
use std::sync::Arc;

use rtvirtio_units::Bytes;
use vhost::vhost_user::Result;
use vhost::vhost_user::message::{VhostUserMemoryRegion, VhostUserSingleMemoryRegion};

use super::{Connection, log_and_reject};
use crate::engine::QueueCommand;
use crate::memory::{GuestMem, MemoryError, PinReport};

/// Largest number of regions that one connection reports as left out.
const MOST_LEFT_OUT: usize = 16;

impl<C: From<QueueCommand>> Connection<C> {
    /// Replaces the whole table.
    pub(super) fn set_table(&mut self, regions: &[VhostUserMemoryRegion], files: Vec<File>) -> Result<()> {
        let mem =
            self.accepted(GuestMem::logged(&self.log.in_use).with_table(regions, files, self.device.trust))?;
        self.stop_all()?;
        self.replace_memory(&mem);
        let started = self.start_all();
        self.publish_use();
        started
    }

    pub(super) fn add_slot(&mut self, region: &VhostUserSingleMemoryRegion, file: &File) -> Result<()> {
        let changed = self.slots().with_region(region, file, self.device.trust);
        self.replace_slots(changed)
    }

    /// Removes a region. Afterwards nothing of it is in use.
    pub(super) fn remove_slot(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let changed = self.slots().without_region(region);
        self.replace_slots(changed)
    }

    fn slots(&self) -> Arc<GuestMem> {
        self.mem.clone().unwrap_or_else(|| Arc::new(GuestMem::logged(&self.log.in_use)))
    }

    /// Puts another table in place while no queue uses one: a queue never sees a part of a change.
    fn replace_slots(&mut self, changed: std::result::Result<GuestMem, MemoryError>) -> Result<()> {
        let mem = self.accepted(changed)?;
        self.stop_all()?;
        self.replace_memory(&mem);
        // A queue whose rings are in no slot goes on when they are: QEMU removes and adds regions
        // one by one when they change.
        let started = self.start_placed();
        self.publish_use();
        started
    }

    /// Puts other memory in the place of that which no queue uses, and pins it where the
    /// configuration says so. What both have stays pinned, and the rest is unpinned before more is
    /// pinned: the process has a limit. No queue is served meanwhile: a region is pinned once,
    /// or not at all.
    fn replace_memory(&mut self, mem: &Arc<GuestMem>) {
        self.mem = Some(Arc::clone(mem));
        let Some(pinner) = &self.device.pinner else { return };
        let PinReport { pinned, left } = mem.pin(pinner);
        let state = (pinned, left.as_ref().map_or(0, |(bytes, _)| *bytes));
        // Sent again whenever the guest's memory changes: what is known is not reported again.
        if std::mem::replace(&mut self.pinned, state) == state {
            return;
        }
        let name = &self.device.name;
        match left {
            None => {
                crate::log::notice(name, format_args!("{} of its guest's memory are pinned", Bytes(pinned)))
            }
            Some((left, why)) => crate::log::line(
                name,
                format_args!(
                    "{} of its guest's memory are pinned, and {} are not, whose requests go as without `pin`: {why}",
                    Bytes(pinned),
                    Bytes(left)
                ),
            ),
        }
    }

    /// Logs regions that are left out, or why there are none.
    fn accepted(&mut self, mem: std::result::Result<GuestMem, MemoryError>) -> Result<Arc<GuestMem>> {
        let mem = mem.map_err(|e| log_and_reject(&self.device.name, "memory", e))?;
        self.check_logged(&mem)?;
        // Sent again whenever the guest's memory changes: known regions are not reported again.
        for left_out in mem.left_out() {
            let size = left_out.size();
            if !self.left_out.contains(&size) && self.left_out.len() < MOST_LEFT_OUT {
                self.left_out.push(size);
                crate::log::line(&self.device.name, left_out);
            }
        }
        Ok(Arc::new(mem))
    }

    /// Starts all queues that can be started and whose rings are in the guest's memory.
    fn start_placed(&mut self) -> Result<()> {
        let Some(mem) = self.mem.clone() else { return Ok(()) };
        let is_placed = |(desc, avail, used): (u64, u64, u64)| {
            [desc, avail, used].into_iter().all(|ring| mem.translate(ring).is_some())
        };
        let placed =
            (0..).zip(&self.queues).filter(|(_, q)| q.size.is_some() && q.addresses.is_some_and(is_placed));
        let placed: Vec<u32> = placed.map(|(i, _)| i).collect();
        placed.into_iter().map(|i| self.try_start(i)).fold(Ok(()), Result::and)
    }
}
