//! Tracking of requests in flight, in shared memory that survives this process.
//!
//! QEMU keeps this memory and returns it when it reconnects, so that a restarted I/O domain finds
//! the requests that were fetched and not completed. Layout and order of the steps are those of the
//! vhost-user specification ("Inflight I/O tracking", split virtqueues). A guest cannot reach this
//! memory; its QEMU can, so all values are validated.

use std::fs::File;
use std::sync::atomic::{Ordering, fence};

use vhost::vhost_user::message::VhostUserInflight;
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory, VolatileSlice};

use crate::memory::TMPFS;

/// Bytes before the first descriptor: features, version, number of descriptors, head of the last
/// batch, used index.
const HEAD: usize = 16;
/// Bytes of a descriptor: in flight, padding, next, counter.
const DESC: usize = 16;
const VERSION: u16 = 1;
/// Largest queue of a disk, as of QEMU's: the engine's thread reads all of this memory whenever a
/// queue starts, and other VMs wait meanwhile.
pub(crate) const MAX_QUEUE_SIZE: u16 = 1_024;
/// Alignment of queues, by the specification.
const ALIGN: usize = 64;

/// Bytes of one queue, aligned.
fn queue_bytes(size: u16) -> usize {
    (HEAD + DESC * usize::from(size)).next_multiple_of(ALIGN)
}

/// The region of one disk, with all its queues.
#[derive(Debug)]
pub struct Region {
    map: MmapRegion<()>,
    queues: u16,
    size: u16,
}

/// Reasons for which an in-flight region is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InflightError {
    /// The region cannot be created or mapped.
    #[error("in-flight region: {0}")]
    Map(String),
    /// Size and dimensions of the region do not match.
    #[error("in-flight region of {bytes} bytes does not hold {queues} queues of {size}")]
    Shape {
        /// Size of the region in bytes.
        bytes: u64,
        queues: u16,
        /// Descriptors of each queue.
        size: u16,
    },
}

impl Region {
    /// Creates a region for `queues` queues of `size` descriptors; returns the file and its layout
    /// for QEMU.
    pub fn create(queues: u16, size: u16) -> Result<(File, VhostUserInflight), InflightError> {
        let bytes = queue_bytes(size) * usize::from(queues);
        let map = |e: std::io::Error| InflightError::Map(e.to_string());
        let flags = rustix::fs::MemfdFlags::ALLOW_SEALING | rustix::fs::MemfdFlags::CLOEXEC;
        let file =
            File::from(rustix::fs::memfd_create("rtvirtio-inflight", flags).map_err(|e| map(e.into()))?);
        file.set_len(bytes as u64).map_err(map)?;
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).map_err(|e| map(e.into()))?;
        Ok((file, VhostUserInflight::new(bytes as u64, 0, queues, size)))
    }

    /// Maps a region that QEMU returns.
    pub fn open(file: File, layout: &VhostUserInflight) -> Result<Self, InflightError> {
        let (bytes, offset, queues, size) =
            (layout.mmap_size, layout.mmap_offset, layout.num_queues, layout.queue_size);
        let shape = InflightError::Shape { bytes, queues, size };
        let needed = queue_bytes(size) * usize::from(queues);
        if queues == 0 || size == 0 || size > MAX_QUEUE_SIZE || (needed as u64) > bytes {
            return Err(shape);
        }
        // Ordinary pages only: touching an absent huge page would end the process.
        let ordinary = rustix::fs::fstatfs(&file).is_ok_and(|fs| fs.f_type == TMPFS);
        if !ordinary {
            return Err(InflightError::Map("the memory is no memfd of ordinary pages".into()));
        }
        let sealed = rustix::fs::fcntl_get_seals(&file);
        if !sealed.is_ok_and(|s| s.contains(rustix::fs::SealFlags::SHRINK)) {
            return Err(InflightError::Map("the memory can be truncated while it is in use".into()));
        }
        let file_len = file.metadata().map_err(|e| InflightError::Map(e.to_string()))?.len();
        if offset.checked_add(needed as u64).is_none_or(|end| end > file_len) {
            return Err(shape);
        }
        let map = MmapRegion::from_file(FileOffset::new(file, offset), needed)
            .map_err(|e| InflightError::Map(e.to_string()))?;
        Ok(Self { map, queues, size })
    }

    #[must_use]
    pub fn queues(&self) -> u16 {
        self.queues
    }

    /// Descriptors of each queue.
    #[must_use]
    pub fn queue_size(&self) -> u16 {
        self.size
    }

    /// Tracking of one queue; `None` beyond the last one.
    #[must_use]
    pub fn queue(self: &std::sync::Arc<Self>, index: u16) -> Option<Inflight> {
        (index < self.queues).then(|| Inflight { region: std::sync::Arc::clone(self), index, counter: 0 })
    }
}

/// Tracking of one queue.
#[derive(Debug)]
pub struct Inflight {
    region: std::sync::Arc<Region>,
    index: u16,
    counter: u64,
}

impl Inflight {
    /// Heads that were fetched and not completed, in the order of their fetch. `used` is the
    /// guest's used index: when it is ahead of the recorded one, the last batch was completed.
    pub fn recover(&mut self, used: u16) -> Vec<u16> {
        let size = self.region.size;
        if self.u16_at(8) != VERSION || self.u16_at(10) != size {
            // Fresh memory.
            self.set_u16(8, VERSION);
            self.set_u16(10, size);
            self.set_u16(14, used);
            return Vec::new();
        }
        if self.u16_at(14) != used {
            // Killed between the used ring and the record: the last batch is completed. Bounded by
            // the number of descriptors, whatever the list contains.
            let mut head = self.u16_at(12);
            for _ in 0..used.wrapping_sub(self.u16_at(14)).min(size) {
                if head >= size {
                    break;
                }
                self.set_u8(desc(head), 0);
                head = self.u16_at(desc(head) + 6);
            }
            self.set_u16(14, used);
        }
        let mut open: Vec<(u64, u16)> =
            (0..size).filter(|d| self.u8_at(desc(*d)) == 1).map(|d| (self.u64_at(desc(d) + 8), d)).collect();
        open.sort_unstable();
        self.counter = open.last().map_or(0, |(c, _)| c.wrapping_add(1));
        open.into_iter().map(|(_, d)| d).collect()
    }

    /// Records that a head was fetched.
    pub fn mark_inflight(&mut self, head: u16) {
        if head < self.region.size {
            self.set_u64(desc(head) + 8, self.counter);
            self.counter = self.counter.wrapping_add(1);
            fence(Ordering::Release);
            self.set_u8(desc(head), 1);
        }
    }

    /// Records a head as the next to complete, before the used ring is written.
    pub fn pre_put(&mut self, head: u16) {
        if head < self.region.size {
            let last = self.u16_at(12);
            self.set_u16(desc(head) + 6, last);
            self.set_u16(12, head);
            fence(Ordering::Release);
        }
    }

    /// Records that the used ring is written, and its index is `used`.
    pub fn post_put(&mut self, head: u16, used: u16) {
        if head < self.region.size {
            fence(Ordering::Release);
            self.set_u8(desc(head), 0);
            fence(Ordering::Release);
            self.set_u16(14, used);
        }
    }

    fn slice(&self, at: usize, len: usize) -> Option<VolatileSlice<'_, ()>> {
        self.region.map.get_slice(usize::from(self.index) * queue_bytes(self.region.size) + at, len).ok()
    }

    fn u8_at(&self, at: usize) -> u8 {
        self.slice(at, 1).and_then(|s| s.read_obj(0).ok()).unwrap_or(0)
    }

    fn u16_at(&self, at: usize) -> u16 {
        self.slice(at, 2).and_then(|s| s.read_obj(0).ok()).unwrap_or(0)
    }

    fn u64_at(&self, at: usize) -> u64 {
        self.slice(at, 8).and_then(|s| s.read_obj(0).ok()).unwrap_or(0)
    }

    // Offsets are within the region by construction, so writes cannot fail.
    fn set_u8(&self, at: usize, v: u8) {
        let _ = self.slice(at, 1).map(|s| s.write_obj(v, 0));
    }

    fn set_u16(&self, at: usize, v: u16) {
        let _ = self.slice(at, 2).map(|s| s.write_obj(v, 0));
    }

    fn set_u64(&self, at: usize, v: u64) {
        let _ = self.slice(at, 8).map(|s| s.write_obj(v, 0));
    }
}

fn desc(head: u16) -> usize {
    HEAD + DESC * usize::from(head)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn region() -> Arc<Region> {
        let (file, layout) = Region::create(2, 8).unwrap();
        Arc::new(Region::open(file, &layout).unwrap())
    }

    #[test]
    fn incomplete_heads_are_recovered_in_order() {
        let region = region();
        let mut q = region.queue(1).unwrap();
        assert_eq!(q.recover(0), [0u16; 0]);
        for head in [5, 2, 7] {
            q.mark_inflight(head);
        }
        q.pre_put(2);
        q.post_put(2, 1);
        // A restarted I/O domain maps the same memory.
        let mut again = region.queue(1).unwrap();
        assert_eq!(again.recover(1), [5, 7]);
        assert_eq!(region.queue(0).unwrap().recover(0), [0u16; 0], "the other queue is untouched");
        // The order continues after a restart.
        again.mark_inflight(1);
        assert_eq!(region.queue(1).unwrap().recover(1), [5, 7, 1]);
    }

    #[test]
    fn killed_between_the_used_ring_and_the_record() {
        let region = region();
        let mut q = region.queue(0).unwrap();
        q.recover(0);
        q.mark_inflight(3);
        q.mark_inflight(4);
        q.pre_put(3);
        // The guest's used index is 1; the record is 0.
        assert_eq!(region.queue(0).unwrap().recover(1), [4]);
        // Before the used ring is written: not completed, so resubmitted.
        q.pre_put(4);
        assert_eq!(region.queue(0).unwrap().recover(1), [4]);
    }

    #[test]
    fn corrupt_memory_is_survived() {
        let region = region();
        let mut q = region.queue(0).unwrap();
        q.recover(0);
        // A list with a cycle, and out of bounds.
        q.set_u16(12, 3);
        q.set_u16(desc(3) + 6, 3);
        assert_eq!(region.queue(0).unwrap().recover(60_000), [0u16; 0]);
        q.set_u16(12, 9_999);
        assert_eq!(region.queue(0).unwrap().recover(1), [0u16; 0]);
        q.mark_inflight(9_999);
        let (file, layout) = Region::create(1, 8).unwrap();
        let layout = VhostUserInflight::new(layout.mmap_size, 0, 100, 1_024);
        assert!(matches!(Region::open(file, &layout), Err(InflightError::Shape { .. })));
        // A layout larger than the file.
        let (file, _) = Region::create(1, 8).unwrap();
        let layout = VhostUserInflight::new(1 << 20, 0, 1, 1_024);
        assert!(matches!(Region::open(file, &layout), Err(InflightError::Shape { .. })));
    }
}
