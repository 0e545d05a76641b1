//! Index of a queue, and the token of its completions.

use std::fmt;

use rtvirtio_sched::{Idx, VmId};

/// Index of a queue of a VM's disk or network port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueId(pub u16);

impl QueueId {
    /// Indices of the first `n` queues.
    pub fn first(n: usize) -> impl Iterator<Item = Self> {
        (0..n as u16).map(Self)
    }
}

impl Idx for QueueId {
    const MAX: usize = u16::MAX as usize;

    unsafe fn from_usize_unchecked(index: usize) -> Self {
        Self(index as u16)
    }

    fn index(self) -> usize {
        self.0.into()
    }
}

impl From<QueueId> for usize {
    fn from(queue: QueueId) -> Self {
        Self::from(queue.0)
    }
}

impl fmt::Display for QueueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Identity of one start of a queue, in a completion token: the generation tells its completions
/// from those of an earlier start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueToken {
    vm: VmId,
    queue: QueueId,
    generation: u16,
}

impl QueueToken {
    /// Token of a queue of the VM or port at this place, with the generation of its vring.
    pub fn new(vm: VmId, queue: QueueId, generation: u32) -> Self {
        Self { vm, queue, generation: generation as u16 }
    }

    /// Place of the VM or port.
    pub fn vm(self) -> VmId {
        self.vm
    }

    /// Index of the queue.
    pub fn queue(self) -> QueueId {
        self.queue
    }

    /// Whether a vring has this generation, of which a token holds the low bits.
    pub fn is_of(self, generation: u32) -> bool {
        self.generation == generation as u16
    }

    /// The low 48 bits of a completion token.
    pub fn to_bits(self) -> u64 {
        u64::from(self.vm.0) << 32 | u64::from(self.queue.0) << 16 | u64::from(self.generation)
    }

    /// Reads [`QueueToken::to_bits`]; higher bits are ignored.
    pub fn from_bits(bits: u64) -> Self {
        Self { vm: VmId((bits >> 32) as u16), queue: QueueId((bits >> 16) as u16), generation: bits as u16 }
    }
}
