//! Attach and detach of ports.

use std::io;

use rtvirtio_sched::{MembershipError, VmId};

use super::NetLoop;
use crate::engine::now;
use crate::engine::uring::CompletionToken;
use crate::net::port::Port;
use crate::net::prepared::{DetachedPort, PreparedPort, VacantPort};
use crate::net::segment::Cutter;

impl NetLoop {
    /// Adds a port in a vacant place, or behind the last one. Other ports keep their frames,
    /// buckets and turns.
    pub(super) fn attach(&mut self, i: VmId, prepared: PreparedPort) -> Result<(), MembershipError> {
        let PreparedPort { mut port, tx, rx } = prepared;
        if i > self.ports.next_idx() || self.ports.get(i).is_some_and(|port| port.uplink.is_some()) {
            return Err(MembershipError::Taken(i));
        }
        self.tx.attach(i, tx)?;
        if let Err(e) = self.rx.attach(i, rx) {
            // Undone: nothing of the port is outstanding.
            drop(self.tx.detach(i));
            return Err(e);
        }
        port.member = self.members;
        self.members = self.members.wrapping_add(1);
        if let Some(spending) = &mut self.spending {
            spending.budget().attach(i, port.settings.cpu_weight);
        }
        match self.ports.get_mut(i) {
            Some(place) => *place = port,
            None => {
                self.ports.push(port);
            }
        }
        Ok(())
    }

    /// Drops the frames of a port without a guest, and cancels the poll of its uplink. Returns
    /// whether nothing of the port is in flight; it is called again until then.
    pub(super) fn drain(&mut self, i: VmId) -> io::Result<bool> {
        let time = now();
        let Some(port) = self.ports.get_mut(i) else { return Ok(true) };
        if port.slots.iter().any(|slot| slot.vring.is_some() || slot.draining.is_some()) {
            return Ok(false);
        }
        let Port { tx, rx, cutters, poll_armed, .. } = port;
        cutters.iter_mut().for_each(Cutter::clear);
        self.tx.cancel_backlog(time, i, |request| tx.release(request.tag as u32));
        self.rx.cancel_backlog(time, i, |request| rx.release(request.tag as u32));
        if *poll_armed {
            // The kernel keeps the uplink until its poll has ended.
            self.ring.cancel(CompletionToken::Uplink(i))?;
            return Ok(false);
        }
        Ok(self.tx.outstanding(i) == 0 && self.rx.outstanding(i) == 0)
    }

    /// Removes a port that is drained.
    pub(super) fn detach(
        &mut self,
        i: VmId,
        vacant: Box<VacantPort>,
    ) -> Result<Box<DetachedPort>, MembershipError> {
        let place = self.ports.get_mut(i).filter(|port| port.uplink.is_some());
        let place = place.ok_or(MembershipError::Vacant(i))?;
        let is_served = place.slots.iter().any(|slot| slot.vring.is_some() || slot.draining.is_some());
        if is_served || place.poll_armed {
            return Err(MembershipError::Busy(i));
        }
        let tx = self.tx.detach(i)?;
        let rx = match self.rx.detach(i) {
            Ok(rx) => rx,
            Err(e) => {
                self.tx.attach(i, tx)?;
                return Err(e);
            }
        };
        let left = std::mem::replace(place, vacant.0);
        if let Some(spending) = &mut self.spending {
            spending.budget().detach(i);
        }
        Ok(Box::new(DetachedPort { _port: left, _schedulers: [tx, rx] }))
    }
}
