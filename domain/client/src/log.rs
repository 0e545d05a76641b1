//! The log of written pages that a front end shares to migrate its guest.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vhost::vhost_user::{Frontend, VhostUserVirtioFeatures};
use vhost::{VhostBackend as _, VhostUserDirtyLogRegion};

use crate::client::{Client, ring_addresses};
use crate::memory::SharedMemory;
use crate::net::NetClient;
use crate::queue::ClientQueue;

/// Bytes of a page.
const PAGE: u64 = 4_096;
/// Flag `VHOST_VRING_F_LOG` of a queue's addresses: the used ring is logged.
const LOG_RING: u32 = 1;

/// A log shared with a back end: a bit for each page of the guest's addresses, from 0 on.
#[derive(Debug)]
pub struct DirtyPages(SharedMemory);

impl DirtyPages {
    /// A log of so many bytes; `sealed` as by QEMU.
    pub fn new(bytes: usize, sealed: bool) -> io::Result<Self> {
        SharedMemory::new(bytes, sealed).map(Self)
    }

    /// A log for all of a client's memory.
    pub fn covering(mem: &SharedMemory) -> io::Result<Self> {
        let end = SharedMemory::BASE + mem.len() as u64;
        Self::new(end.div_ceil(8 * PAGE) as usize, true)
    }

    /// The log as a back end takes it.
    #[must_use]
    pub fn region(&self) -> VhostUserDirtyLogRegion {
        VhostUserDirtyLogRegion { mmap_size: self.0.len() as u64, mmap_offset: 0, mmap_handle: self.0.fd() }
    }

    /// Offsets in the client's memory of the pages that were written since the last call, which
    /// are taken out. Pages of other addresses are an error of the back end.
    ///
    /// # Panics
    /// A page before the memory.
    #[must_use]
    pub fn take(&self) -> Vec<usize> {
        let mut pages = Vec::new();
        for byte in 0..self.0.len() {
            let bits = self.0.shared_byte(byte).swap(0, Ordering::SeqCst);
            for bit in (0..8).filter(|bit| bits >> bit & 1 == 1) {
                let address = (byte as u64 * 8 + bit) * PAGE;
                let offset = address.checked_sub(SharedMemory::BASE);
                pages.push(offset.expect("a page of the memory") as usize);
            }
        }
        pages
    }

    /// Cuts the log off under the back end.
    ///
    /// # Errors
    /// The log is sealed.
    pub fn truncate(&self) -> io::Result<()> {
        self.0.truncate()
    }
}

/// Sets the feature of logging, and the flag of each queue.
fn set_logging<'a>(
    frontend: &mut Frontend,
    features: u64,
    mem: &SharedMemory,
    queues: impl Iterator<Item = (usize, &'a ClientQueue)>,
    on: bool,
) -> vhost::Result<()> {
    let all = VhostUserVirtioFeatures::LOG_ALL.bits();
    frontend.set_features(features & !all | if on { all } else { 0 })?;
    for (index, queue) in queues {
        let mut addresses = ring_addresses(mem, queue);
        if on {
            let (_, _, used) = queue.ring_offsets();
            addresses.flags = LOG_RING;
            addresses.log_addr = Some(SharedMemory::BASE + used as u64);
        }
        frontend.set_vring_addr(index, &addresses)?;
    }
    Ok(())
}

impl NetClient {
    /// Shares a log and begins to use it, as QEMU does before a migration.
    pub fn begin_log(&mut self, log: &DirtyPages) -> vhost::Result<()> {
        self.frontend.set_log_base(0, Some(log.region()))?;
        let (features, mem) = (self.features, Arc::clone(&self.mem));
        let queues = [&self.rx, &self.tx].into_iter().enumerate();
        set_logging(&mut self.frontend, features, &mem, queues, true)
    }
}

impl Client {
    /// Shares a log, as QEMU does before a migration.
    pub fn share_log(&mut self, log: &DirtyPages) -> vhost::Result<()> {
        self.raw().set_log_base(0, Some(log.region()))
    }

    /// Begins or ends logging while the queues are served, with QEMU's messages.
    pub fn set_logging(&mut self, on: bool) -> vhost::Result<()> {
        let (features, mem) = (self.features, Arc::clone(&self.mem));
        set_logging(&mut self.frontend, features, &mem, self.queues.iter().enumerate(), on)
    }

    /// Stops a queue, as QEMU does when its guest is stopped. Returns the index in the available
    /// ring at which it stopped.
    pub fn stop_queue(&mut self, index: usize) -> vhost::Result<u32> {
        self.raw().get_vring_base(index)
    }
}
