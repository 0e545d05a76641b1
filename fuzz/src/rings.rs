//! The driver's side of a queue in guest memory: descriptor table, available ring and used ring, in
//! sequence from address 0 (virtio 1.2, section 2.7).

use virtio_queue::desc::RawDescriptor;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError};

/// The rings of a queue.
pub struct Rings<'a, M> {
    mem: &'a M,
    size: u16,
}

impl<'a, M: Bytes<GuestAddress, E = GuestMemoryError>> Rings<'a, M> {
    /// For `size` descriptors, a power of two. Memory is not changed.
    pub fn new(mem: &'a M, size: u16) -> Self {
        Self { mem, size }
    }

    fn available(&self) -> u64 {
        16 * u64::from(self.size)
    }

    fn used(&self) -> u64 {
        // Flags, index, ring and event index.
        (self.available() + 6 + 2 * u64::from(self.size)).next_multiple_of(4)
    }

    /// Writes a descriptor into the table.
    pub fn describe(&self, index: u16, descriptor: Descriptor) {
        let raw = RawDescriptor::from(descriptor);
        self.mem.write_obj(raw, GuestAddress(16 * u64::from(index))).expect("within the table");
    }

    /// Adds chains, by their heads, to the available ring.
    pub fn offer(&self, heads: &[u16]) {
        for (i, head) in heads.iter().enumerate() {
            let at = GuestAddress(self.available() + 4 + 2 * i as u64);
            self.mem.write_obj(head.to_le(), at).expect("within the ring");
        }
        let index = GuestAddress(self.available() + 2);
        self.mem.write_obj((heads.len() as u16).to_le(), index).expect("within memory");
    }

    /// The device's side of the queue.
    pub fn queue(&self) -> Queue {
        let mut queue = Queue::new(self.size).expect("a power of two");
        queue.try_set_desc_table_address(GuestAddress(0)).expect("aligned");
        queue.try_set_avail_ring_address(GuestAddress(self.available())).expect("aligned");
        queue.try_set_used_ring_address(GuestAddress(self.used())).expect("aligned");
        queue.set_ready(true);
        queue
    }
}
