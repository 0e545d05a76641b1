//! The log of written pages, by which a front end migrates its guest while it runs.

use std::fs::File;
use std::sync::Arc;

use rtvirtio_domain_config::Mac;
use vhost::vhost_user::message::{VhostUserLog, VhostUserVirtioFeatures};
use vhost::vhost_user::{Error, Result};
use vm_memory::GuestAddress;

use super::{Connection, log_and_reject};
use crate::engine::QueueCommand;
use crate::memory::{DirtyLog, GuestMem, LogMemory};

/// The log of a connection.
#[derive(Debug, Default)]
pub(super) struct WriteLog {
    /// The log in use, which all memory of the connection marks.
    pub(super) in_use: Arc<DirtyLog>,
    /// The log that the front end has shared, in use or not.
    memory: Option<Arc<LogMemory>>,
    /// Whether it is in use.
    is_on: bool,
}

impl WriteLog {
    /// Whether the front end has shared a log.
    pub(super) fn has_memory(&self) -> bool {
        self.memory.is_some()
    }
}

/// A queue whose used ring would be logged as another part of the memory than it is.
#[derive(Debug, thiserror::Error)]
#[error("its used ring is at {used:#x}, and is to be logged as if it were at {log:#x}")]
pub(super) struct RingLogError {
    used: u64,
    log: u64,
}

/// Checks the guest address at which writes to a used ring are logged. They are marked where they
/// are made.
pub(super) fn check_ring(log: Option<u64>, used: GuestAddress) -> std::result::Result<(), RingLogError> {
    match log {
        Some(log) if log != used.0 => Err(RingLogError { used: used.0, log }),
        _ => Ok(()),
    }
}

impl<C: From<QueueCommand>> Connection<C> {
    /// Checks the log address of a queue that is served.
    pub(super) fn check_ring(&mut self, index: u32) -> Result<()> {
        let (mem, name) = (self.mem.clone(), self.device.name.clone());
        let setup = self.queue(index)?;
        let used = setup.addresses.and_then(|(_, _, used)| mem.as_ref()?.translate(used));
        let checked = used.map_or(Ok(()), |used| check_ring(setup.log_address, used));
        checked.map_err(|why| log_and_reject(&name, &format!("queue {index}"), why))
    }

    /// Takes a log. The message has a reply of its own, and none for a refusal: the connection
    /// ends with one, because its front end would wait for ever.
    pub(super) fn set_log(&mut self, log: &VhostUserLog, file: &File) -> Result<()> {
        // The message is packed, so its fields are copied.
        let (size, offset) = (log.mmap_size, log.mmap_offset);
        let accepted = LogMemory::map(file, size, offset, self.device.trust)
            .and_then(|log| self.mem.as_ref().map_or(Ok(()), |mem| log.check_covers(mem)).map(|()| log));
        match accepted {
            Ok(log) => self.log.memory = Some(Arc::new(log)),
            Err(why) => {
                let _ = log_and_reject(&self.device.name, "migration", why);
                return Err(Error::InvalidMessage);
            }
        }
        self.replace_log().map_err(|_| Error::InvalidMessage)?;
        // Queues that have waited for it; a refusal of one is in the log.
        let _ = self.start_all();
        self.publish_use();
        Ok(())
    }

    /// Announces a port in its network, where its guest has arrived.
    pub(in crate::vhost_user) fn announce(&mut self, mac: [u8; 6]) -> Result<()> {
        let (vm, mac) = (self.device.vm, Mac(mac));
        let refused = |e: &dyn std::fmt::Display| log_and_reject(&self.device.name, "announcement", e);
        let done = self.engine.ask(|reply| QueueCommand::Announce { vm, mac, reply });
        done.map_err(|e| refused(&e))?.map_err(|e| refused(&e))
    }

    /// Refuses the signal of each write that is logged, for which no front end waits.
    pub(in crate::vhost_user) fn refuse_log_signal(&self) -> bool {
        let _ = log_and_reject(&self.device.name, "migration", "writes to the log are not signalled");
        false
    }

    /// Refuses memory for which the log in use has no bits.
    pub(super) fn check_logged(&self, mem: &GuestMem) -> Result<()> {
        match self.log.memory.as_ref().filter(|_| self.log.is_on) {
            Some(log) => log
                .check_covers(mem)
                .map_err(|why| log_and_reject(&self.device.name, "memory during a migration", why)),
            None => Ok(()),
        }
    }

    /// Turns logging on or off, as features and queues ask for.
    pub(super) fn apply_log(&mut self) -> Result<()> {
        if self.wants_log() == self.log.is_on { Ok(()) } else { self.replace_log() }
    }

    /// Whether writes are to be logged: of requests and rings, or of rings alone, with which the
    /// others are logged too.
    fn wants_log(&self) -> bool {
        let is_asked = self.features & VhostUserVirtioFeatures::LOG_ALL.bits() != 0
            || self.queues.iter().any(|queue| queue.log_address.is_some());
        is_asked && self.log.memory.is_some()
    }

    /// Puts the log in place that is to be used. Every write before the reply is in the old one,
    /// and in the new one if there are both.
    fn replace_log(&mut self) -> Result<()> {
        let wants_log = self.wants_log();
        // The memory may have grown while the log was off.
        if let (true, Some(log), Some(mem)) = (wants_log, &self.log.memory, &self.mem) {
            log.check_covers(mem).map_err(|why| log_and_reject(&self.device.name, "migration", why))?;
        }
        self.log.is_on = wants_log;
        let memory = self.log.memory.clone().filter(|_| self.log.is_on);
        let old = self.log.in_use.replace(memory.clone());
        let vm = self.device.vm;
        let passed = self.engine.ask(|reply| QueueCommand::Barrier { vm, reply });
        if let (Some(new), Some(old)) = (&memory, &old) {
            new.add_marks_of(old);
        }
        // Unmapped by this thread, which serves one VM.
        drop(old);
        passed.map_err(|e| log_and_reject(&self.device.name, "engine", e))
    }
}
