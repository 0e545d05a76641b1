//! The host's side of the page.

use std::sync::atomic::{Ordering, fence};

use super::{
    BLOCK, LEAST_SIZE, MAGIC, MOST_VCPUS, Mode, NO_DOORBELL, RawReport, Region, VERSION, header, join, vcpu,
};
use crate::Level;

/// Memory that is accessed by copies.
pub trait Memory {
    /// Error of a copy.
    type Error;

    /// Copies from byte `at` of the memory.
    ///
    /// # Errors
    /// When the memory ends before, or has gone.
    fn read(&self, at: usize, into: &mut [u8]) -> Result<(), Self::Error>;

    /// Copies to byte `at` of the memory.
    fn write(&self, at: usize, from: &[u8]) -> Result<(), Self::Error>;
}

/// The host's side of a page in `M`.
#[derive(Clone, Debug)]
pub struct Host<M> {
    memory: M,
    vcpus: usize,
}

/// The blocks of vCPUs, in the region or in the guest's memory.
#[derive(Clone, Debug)]
pub struct Blocks<M> {
    memory: M,
    first: usize,
    /// Number of levels shown to each vCPU.
    changes: Vec<u32>,
}

fn word<M: Memory>(memory: &M, at: usize) -> Result<u32, M::Error> {
    let mut bytes = [0; 4];
    memory.read(at, &mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

impl<M: Memory> Host<M> {
    /// A page of so many bytes; `None` for less than [`LEAST_SIZE`].
    #[must_use]
    pub fn new(memory: M, size: usize) -> Option<Self> {
        (size >= LEAST_SIZE).then(|| Self { memory, vcpus: (size / BLOCK - 1).min(MOST_VCPUS) })
    }

    /// The memory that the page is in.
    #[must_use]
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Number of vCPUs that have a block.
    #[must_use]
    pub fn vcpus(&self) -> usize {
        self.vcpus
    }

    fn put(&self, word: usize, value: u32) -> Result<(), M::Error> {
        self.memory.write(word * 4, &value.to_le_bytes())
    }

    /// Offers the page to the guest. `doorbell` is the value that the guest writes to the device.
    /// The guest's half stays: the guest may report already, to a host process that has ended.
    pub fn serve(&self, doorbell: Option<u32>) -> Result<(), M::Error> {
        let generation = word(&self.memory, header::GENERATION * 4)?;
        self.put(header::VERSION, VERSION)?;
        self.put(header::VCPUS, u32::try_from(self.vcpus).unwrap_or(0))?;
        self.put(header::DOORBELL, doorbell.unwrap_or(NO_DOORBELL))?;
        self.put(header::GENERATION, generation.wrapping_add(1))?;
        self.put(header::SERVED, 1)?;
        fence(Ordering::SeqCst);
        self.put(header::MAGIC, MAGIC)
    }

    /// Marks the page as no longer served.
    pub fn leave(&self) -> Result<(), M::Error> {
        self.put(header::SERVED, 0)
    }

    /// Place of the guest's reports, and its beat.
    pub fn mode(&self) -> Result<(Mode, u32), M::Error> {
        let mut bytes = [0; 16];
        self.memory.read(header::MODE * 4, &mut bytes)?;
        let mut words = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let mut next = || words.next().unwrap_or(0);
        let (mode, beat) = (next(), next());
        let address = join(next(), next());
        let mode = match mode {
            1 => Mode::Region,
            2 => Mode::GuestMemory { address },
            _ => Mode::Off,
        };
        Ok((mode, beat))
    }
}

impl<M: Memory> Blocks<M> {
    /// Blocks of `vcpus` vCPUs, from byte `first` of the memory on.
    #[must_use]
    pub fn new(memory: M, first: usize, vcpus: usize) -> Self {
        Self { memory, first, changes: vec![0; vcpus] }
    }

    /// Report of a vCPU with its sequence number. `None` while the guest writes it, forever if it
    /// never finishes, and for a vCPU without a block.
    pub fn read(&self, vcpu: usize) -> Result<Option<(u32, RawReport)>, M::Error> {
        if vcpu >= self.changes.len() {
            return Ok(None);
        }
        let at = self.first + vcpu * BLOCK;
        let before = word(&self.memory, at)?;
        // Each copy is complete before the next one begins.
        fence(Ordering::SeqCst);
        let mut bytes = [0; vcpu::GUESTS * 4];
        self.memory.read(at, &mut bytes)?;
        fence(Ordering::SeqCst);
        let after = word(&self.memory, at)?;
        let mut words = [0; vcpu::GUESTS];
        for (word, b) in words.iter_mut().zip(bytes.chunks_exact(4)) {
            *word = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        }
        Ok(RawReport::of_copy(before, &words, after))
    }

    /// Shows the guest the level of a vCPU.
    pub fn show(&mut self, vcpu: usize, level: Level) -> Result<(), M::Error> {
        let Some(changes) = self.changes.get_mut(vcpu) else { return Ok(()) };
        *changes = changes.wrapping_add(1);
        let mut bytes = [0; 8];
        bytes[..4].copy_from_slice(&level.priority.to_le_bytes());
        bytes[4..].copy_from_slice(&changes.to_le_bytes());
        self.memory.write(self.first + vcpu * BLOCK + vcpu::LEVEL * 4, &bytes)
    }
}

/// For a host and a guest in one process, as in tests. Whole words only.
impl Memory for Region<'_> {
    type Error = std::convert::Infallible;

    fn read(&self, at: usize, into: &mut [u8]) -> Result<(), Self::Error> {
        for (i, bytes) in into.chunks_exact_mut(4).enumerate() {
            bytes.copy_from_slice(&self.load(at / 4 + i).to_le_bytes());
        }
        Ok(())
    }

    fn write(&self, at: usize, from: &[u8]) -> Result<(), Self::Error> {
        for (i, b) in from.chunks_exact(4).enumerate() {
            self.store(at / 4 + i, u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        }
        Ok(())
    }
}
