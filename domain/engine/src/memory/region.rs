//! A mapped region of guest memory.

use std::fs::File;
use std::io;
use std::sync::{Arc, OnceLock};

use vm_memory::bitmap::Bitmap as _;
use vm_memory::guest_memory::{Error, Result};
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryRegion, GuestMemoryRegionBytes, GuestUsize, MemoryRegionAddress,
    VolatileSlice,
};

use super::dirty_log::{DirtyLog, LogSlice, RegionLog};
use super::mapping::{Claims, Extent, Mapping};
use super::pin::{PinError, Pinned, Pinner};

type PinResult = std::result::Result<Arc<Pinned>, Arc<PinError>>;

/// A region of guest memory. The pages around it are mapped, and only the region can be reached.
#[derive(Debug)]
pub struct Region {
    /// Ends before the mapping does. A failure is kept: a second attempt would take as long.
    pinned: OnceLock<PinResult>,
    mapping: Mapping,
    base: GuestAddress,
    log: RegionLog,
}

impl Region {
    /// Maps a part of a file as [`Mapping::new`] does; writes are marked in the log.
    pub(super) fn map(
        file: Option<&File>,
        extent: Extent,
        watched: bool,
        claims: Claims,
        log: Arc<DirtyLog>,
    ) -> io::Result<Self> {
        let mapping = Mapping::new(file, extent, watched, claims)?;
        let base = extent.base;
        let log = RegionLog { log, base };
        Ok(Self { pinned: OnceLock::new(), mapping, base: GuestAddress(base), log })
    }

    /// Pins the memory, unless that was done, or has failed, already.
    pub(super) fn pin(&self, pinner: &Arc<Pinner>) -> PinResult {
        let pin = || {
            // SAFETY: the memory is mapped as long as `self`; what is pinned ends with it, or with
            // the table of pins, which is part of the same guest's memory and holds its regions.
            let pinned = unsafe { pinner.pin(self.mapping.start(), self.mapping.len()) };
            pinned.map(Arc::new).map_err(Arc::new)
        };
        self.pinned.get_or_init(pin).clone()
    }

    /// The memory, if it is pinned.
    pub(super) fn pinned(&self) -> Option<Arc<Pinned>> {
        self.pinned.get()?.as_ref().ok().map(Arc::clone)
    }

    /// Whether the memory was taken away, and reads as zeroes since.
    pub(super) fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }
}

impl GuestMemoryRegion for Region {
    type B = RegionLog;

    fn len(&self) -> GuestUsize {
        self.mapping.len() as u64
    }

    fn start_addr(&self) -> GuestAddress {
        self.base
    }

    fn bitmap(&self) -> LogSlice<'_> {
        LogSlice::new(&self.log.log, self.base.0)
    }

    fn get_host_address(&self, address: MemoryRegionAddress) -> Result<*mut u8> {
        let offset = self.check_address(address).ok_or(Error::InvalidBackendAddress)?;
        Ok(self.mapping.start().wrapping_add(offset.0 as usize))
    }

    fn file_offset(&self) -> Option<&FileOffset> {
        None
    }

    fn get_slice(
        &self,
        offset: MemoryRegionAddress,
        count: usize,
    ) -> Result<VolatileSlice<'_, LogSlice<'_>>> {
        let from = usize::try_from(offset.0).map_err(|_| Error::InvalidBackendAddress)?;
        if from.checked_add(count).is_none_or(|end| end > self.mapping.len()) {
            return Err(Error::InvalidBackendAddress);
        }
        let log = self.log.slice_at(from);
        // SAFETY: the slice lies in the region, which is mapped as long as `self`, and is reached
        // by volatile accesses only.
        Ok(unsafe { VolatileSlice::with_bitmap(self.mapping.start().add(from), count, log, None) })
    }
}

impl GuestMemoryRegionBytes for Region {}
