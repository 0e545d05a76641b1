//! Start and stop of a connection's queues.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rtvirtio_domain_resources::disk_lock::LOCK_TIMEOUT;
use vhost::vhost_user::Result;
use vhost::vhost_user::message::VhostUserVirtioFeatures;
use vm_memory::{Bytes as _, GuestAddress};

use super::{Connection, dirty_log, log_and_reject};
use crate::engine::{Kick, QueueCommand, QueueId, VringStart};
use crate::feature;
use crate::memory::GuestMem;

/// Requests before the index at which a queue goes on that its available ring does not have. No
/// guest takes requests back: the page with the ring's index is older than the front end's index.
fn missing_requests(mem: &GuestMem, avail: GuestAddress, size: u16, base: u16) -> u16 {
    let Some(at) = avail.0.checked_add(2).map(GuestAddress) else { return 0 };
    // The engine refuses a ring that cannot be read.
    let Ok(end) = mem.mem.load::<u16>(at, Ordering::Acquire) else { return 0 };
    let missing = base.wrapping_sub(u16::from_le(end));
    // Others are of a front end that begins at 0, where the memory of requests in flight decides.
    if missing < size { missing } else { 0 }
}

/// Says what has not come with the guest of a queue that was started: requests that get no answer,
/// and requests that its available ring lacks.
fn report_missing(name: &str, index: u32, lost: u16, missing: u16) {
    if lost > 0 {
        let what = "requests that were under way elsewhere have not come with the guest";
        crate::log::line(name, format_args!("{lost} {what}; it waits for their answers"));
    }
    if missing > 0 {
        let what = "requests before the index at which it goes on: its guest's memory is older than that";
        crate::log::line(name, format_args!("queue {index}: its available ring ends {missing} {what}"));
    }
}

impl<C: From<QueueCommand>> Connection<C> {
    /// Publishes whether a queue is served, before the front end has its reply.
    pub(super) fn publish_use(&self) {
        let is_used = self.queues.iter().any(|queue| queue.running);
        self.in_use.store(is_used, Ordering::Relaxed);
        if !is_used {
            self.release_disk();
        }
    }

    /// Takes the lock of a disk that may move, before a queue is served.
    fn take_disk(&self) -> Result<()> {
        let Some(lock) = &self.device.use_lock else { return Ok(()) };
        lock.acquire(LOCK_TIMEOUT).map_err(|e| log_and_reject(&self.device.name, "the disk", e))
    }

    /// Gives the lock back; nothing of the disk is in flight.
    pub(super) fn release_disk(&self) {
        if let Some(Err(e)) = self.device.use_lock.as_ref().map(|lock| lock.release()) {
            crate::log::line(&self.device.name, format_args!("the disk stays locked: {e}"));
        }
    }

    /// Starts a queue as soon as it is completely configured.
    pub(super) fn try_start(&mut self, index: u32) -> Result<()> {
        let name = self.device.name.clone();
        let gone = |e| log_and_reject(&name, "engine", e);
        let (mem, features, vm) = (self.mem.clone(), self.features, self.device.vm);
        let enabled_by_message = features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0;
        let inflight = self.inflight.as_ref().and_then(|r| r.queue(index as u16));
        let tracked = self.inflight.as_ref().map(|r| r.queue_size());
        let engine = self.engine.clone();
        let has_log = self.log.has_memory();
        let is_first = !self.queues.iter().any(|queue| queue.running);
        let lacks_log = features & VhostUserVirtioFeatures::LOG_ALL.bits() != 0 && !has_log;
        let setup = self.queue(index)?;
        if setup.running || setup.kick.is_none() || (enabled_by_message && !setup.enabled) {
            return Ok(());
        }
        let (Some(mem), Some((desc, avail, used))) = (mem, setup.addresses) else { return Ok(()) };
        // QEMU sends the log last: what is written before would be in none.
        if lacks_log || (setup.log_address.is_some() && !has_log) {
            return Ok(());
        }
        let base = setup.base;
        let Some(size) = setup.size else {
            let why = "no number of descriptors was accepted for it (SET_VRING_NUM)";
            return Err(log_and_reject(&name, &format!("queue {index} is not started"), why));
        };
        // Requests beyond the in-flight memory would be lost with this process.
        if let Some(tracked) = tracked.filter(|tracked| *tracked < size) {
            let why = format!("it has {size} descriptors, and the in-flight memory is for {tracked}");
            return Err(log_and_reject(&name, &format!("queue {index} is not started"), why));
        }
        let translate = |what, user| {
            mem.translate(user).ok_or_else(|| log_and_reject(&name, what, "not in the guest's memory"))
        };
        let (desc, avail, used): (GuestAddress, GuestAddress, GuestAddress) = (
            translate("descriptor table", desc)?,
            translate("available ring", avail)?,
            translate("used ring", used)?,
        );
        dirty_log::check_ring(setup.log_address, used)
            .map_err(|why| log_and_reject(&name, &format!("queue {index} is not started"), why))?;
        let kick = setup.kick.as_ref().map(Kick::try_clone).transpose();
        let fds = kick.and_then(|k| Ok((k, setup.call.as_ref().map(File::try_clone).transpose()?)));
        let (kick, call) = fds.map_err(|e| log_and_reject(&name, "descriptors", e))?;
        let Some(kick) = kick else { return Ok(()) };
        self.take_disk()?;
        let start = Box::new(VringStart {
            mem: Arc::clone(&mem),
            size,
            desc,
            avail,
            used,
            base,
            event_idx: features & feature::EVENT_IDX != 0,
            features,
            kick,
            call,
            inflight,
        });
        let done = engine
            .ask(|reply| QueueCommand::Start { vm, queue: QueueId(index as u16), start, reply })
            .map_err(gone)?;
        self.queue(index)?.running = done.is_ok();
        if let (true, Some(uses)) = (is_first && done.is_ok(), &self.device.first_uses) {
            uses.add(&name);
        }
        self.publish_use();
        let lost = done.map_err(|e| log_and_reject(&name, "queue", e))?;
        report_missing(&name, index, lost, missing_requests(&mem, avail, size, base));
        self.notify_unread();
        Ok(())
    }

    /// Stops a queue before a change; returns when its requests are completed.
    pub(super) fn stop(&mut self, index: u32) -> Result<()> {
        self.stop_queue(index, false)
    }

    fn stop_queue(&mut self, index: u32, for_good: bool) -> Result<()> {
        let (vm, engine, name) = (self.device.vm, self.engine.clone(), self.device.name.clone());
        let setup = self.queue(index)?;
        if std::mem::take(&mut setup.running) {
            setup.base = engine
                .ask(|reply| QueueCommand::Stop { vm, queue: QueueId(index as u16), for_good, reply })
                .map_err(|e| log_and_reject(&name, "engine", e))?;
        }
        Ok(())
    }

    /// Stops a queue at the front end's wish. A stop before a change, which a start follows, is not
    /// published: meanwhile the guest uses the device.
    pub(super) fn stop_for_good(&mut self, index: u32) -> Result<()> {
        self.stop_queue(index, true)?;
        self.publish_use();
        Ok(())
    }

    pub(super) fn stop_all(&mut self) -> Result<()> {
        (0..self.queues.len() as u32).try_for_each(|i| self.stop(i))
    }

    /// Starts all queues that can be started; returns the first error, which does not prevent the
    /// others. A queue without an accepted size was refused already.
    pub(super) fn start_all(&mut self) -> Result<()> {
        let sized: Vec<u32> =
            (0..).zip(&self.queues).filter(|(_, queue)| queue.size.is_some()).map(|(i, _)| i).collect();
        sized.into_iter().map(|i| self.try_start(i)).fold(Ok(()), Result::and)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_available_ring_that_is_older_than_its_index_lacks_requests() {
        let ring = GuestAddress(4_096);
        let mem = GuestMem::from_mapped(GuestMem::anonymous(&[(ring, 4_096)]).unwrap());
        let missing = |end: u16, base| {
            mem.mem.store(end.to_le(), GuestAddress(ring.0 + 2), Ordering::Release).unwrap();
            missing_requests(&mem, ring, 8, base)
        };
        assert_eq!((missing(5, 5), missing(13, 5), missing(3, u16::MAX)), (0, 0, 0));
        assert_eq!((missing(5, 6), missing(u16::MAX, 2)), (1, 3));
        // The front end's index is not used.
        assert_eq!(missing(1_000, 0), 0);
        // Beyond the memory.
        assert_eq!(missing_requests(&mem, GuestAddress(1 << 30), 8, 5), 0);
        assert_eq!(missing_requests(&mem, GuestAddress(u64::MAX), 8, 5), 0);
    }
}
