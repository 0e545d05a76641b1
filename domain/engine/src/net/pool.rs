//! The frames of a port: a fixed number of buffers.

use rtvirtio_units::Nanos;

/// Buffers of one size, each with a frame and virtio-net's header before it.
#[derive(Debug)]
pub struct FramePool {
    data: Vec<u8>,
    size: usize,
    /// Length and arrival of each frame.
    frames: Vec<(usize, Nanos)>,
    free: Vec<u32>,
}

impl FramePool {
    /// `count` buffers of `size` bytes.
    #[must_use]
    pub fn new(count: u32, size: usize) -> Self {
        let buffers = count as usize;
        Self {
            data: vec![0; buffers * size],
            size,
            frames: vec![(0, Nanos(0)); buffers],
            free: (0..count).rev().collect(),
        }
    }

    /// A free buffer; it stays free until it is taken.
    pub fn first_free(&mut self) -> Option<&mut [u8]> {
        let at = *self.free.last()? as usize * self.size;
        self.data.get_mut(at..at + self.size)
    }

    /// Takes the buffer of [`FramePool::first_free`], with `len` bytes that arrived at `now`.
    pub fn take(&mut self, len: usize, now: Nanos) -> Option<u32> {
        let slot = self.free.pop()?;
        self.frames[slot as usize] = (len.min(self.size), now);
        Some(slot)
    }

    /// The bytes of a taken buffer.
    pub fn bytes(&mut self, slot: u32) -> &mut [u8] {
        let at = slot as usize * self.size;
        let len = self.frames.get(slot as usize).map_or(0, |(len, _)| *len);
        self.data.get_mut(at..at + len).unwrap_or_default()
    }

    /// Arrival of the frame in a taken buffer.
    #[must_use]
    pub fn arrival(&self, slot: u32) -> Nanos {
        self.frames.get(slot as usize).map_or(Nanos(0), |(_, at)| *at)
    }

    /// Frees a buffer that was taken.
    pub fn release(&mut self, slot: u32) {
        self.free.push(slot);
    }

    /// Whether a buffer is free.
    #[must_use]
    pub fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Number of taken buffers.
    #[must_use]
    pub fn taken(&self) -> usize {
        self.frames.len() - self.free.len()
    }
}
