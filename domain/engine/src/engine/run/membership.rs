//! Attach and detach of disks.

use rtvirtio_sched::{MembershipError, VmId};

use super::EventLoop;
use crate::engine::prepared::{AttachError, DetachedDisk, PreparedDisk, RefusedDisk};
use crate::engine::vm::Vm;

impl EventLoop {
    /// Adds a disk. Each place has a slot for a flush, which stays when the place gets vacant.
    pub(super) fn attach(&mut self, vm: VmId, disk: Box<PreparedDisk>) -> Result<(), Box<RefusedDisk>> {
        let (largest, room) = (disk.largest, self.largest);
        let refused = if largest > room {
            Some(AttachError::Piece { largest, room })
        } else if vm >= self.vms.next_idx()
            && disk.piece.as_ref().is_none_or(|p| (p.bounce.size() as u64) < room)
        {
            Some(AttachError::Slot)
        } else {
            None
        };
        if let Some(error) = refused {
            return Err(Box::new(RefusedDisk { error, _disk: Some(disk) }));
        }
        let PreparedDisk { vm: new, scheduler, piece, .. } = *disk;
        if let Err(e) = self.scheduler.attach(vm, scheduler) {
            return Err(Box::new(RefusedDisk { error: e.into(), _disk: None }));
        }
        let new = Vm { member: self.members, ..new };
        self.members = self.members.wrapping_add(1);
        match self.vms.get_mut(vm) {
            Some(place) => *place = new,
            None => {
                self.vms.push(new);
                self.free_pieces.push(self.pieces.len() as u32);
                self.pieces.extend(piece);
            }
        }
        Ok(())
    }

    /// Removes a disk of which nothing is in flight.
    pub(super) fn detach(&mut self, vm: VmId) -> Result<Box<DetachedDisk>, MembershipError> {
        let place = self.vms.get_mut(vm).ok_or(MembershipError::Vacant(vm))?;
        if place.slots.iter().any(|slot| slot.vring.is_some() || slot.draining.is_some()) {
            return Err(MembershipError::Busy(vm));
        }
        let scheduler = self.scheduler.detach(vm)?;
        let left = std::mem::replace(place, Vm::vacant());
        Ok(Box::new(DetachedDisk { _vm: left, _scheduler: scheduler }))
    }
}
