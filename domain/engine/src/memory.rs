//! Guest memory that a front end shares: mapped, and checked for anything that could block or end
//! this process later.

mod dirty_log;
mod fault;
mod mapping;
mod pin;
mod region;

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::{Arc, OnceLock};

use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{GuestAddress, GuestMemoryBackend as _, GuestMemoryRegion as _, GuestRegionCollection};

pub use self::dirty_log::{DirtyLog, LogError, LogMemory};
use self::mapping::{Claims, Extent, SharedBytes, SharedMapping};
pub use self::pin::{BUFFERS_UPDATE, CLONE_BUFFERS, PinError, Pinner, Pins};
pub use self::region::Region;

/// `TMPFS_MAGIC` of `linux/magic.h`; memfds are on tmpfs.
pub(crate) const TMPFS: i64 = 0x0102_1994;
/// `HUGETLBFS_MAGIC` of `linux/magic.h`.
const HUGETLBFS: i64 = 0x9584_58f6;

/// Size of ordinary pages, in bytes.
const PAGE: u64 = 4_096;

/// Regions of one connection, as `vhost` of the kernel can be told to take, and QEMU's own back
/// ends take.
pub const MEMORY_SLOTS: usize = 509;

/// Regions that each connection may have, whatever the others have.
const OWN_SLOTS: usize = 32;
/// Bytes of each VM's memory that are mapped whatever others have.
const OWN_BYTES: u64 = 1 << 40;

/// Largest region that is left out, in bytes: devices such as `ivshmem` have memory of this size,
/// and a guest's RAM does not.
const LARGEST_LEFT_OUT: u64 = 4 << 20;

/// Log line for a queue whose memory is lost.
pub(crate) const LOST: &str = "its front end took memory away that is in use (by truncating the file, or freeing huge pages): the queue is given up";

/// Mapped memory, by guest address.
pub type Memory = GuestRegionCollection<Region>;

/// Trust in a front end, as to the memory that it shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// Sealed memfds of ordinary pages only.
    #[default]
    None,
    /// Sealed memfds of huge pages too, which can be freed under this process.
    HugePages,
    /// Any memfd, and files on tmpfs and hugetlbfs, which can be truncated under this process;
    /// regions that do not begin or end on a page; sockets and pipes as kick and call.
    Full,
}

impl Trust {
    /// The trust that a disk or port of the configuration states.
    #[must_use]
    pub fn new(trust: bool, hugepages: bool) -> Self {
        match (trust, hugepages) {
            (true, _) => Self::Full,
            (false, true) => Self::HugePages,
            (false, false) => Self::None,
        }
    }
}

/// Memory of one guest.
pub struct GuestMem {
    /// Buffers that are registered with the kernel. Dropped before the mappings.
    pins: OnceLock<Pins>,
    /// The mappings, by guest address.
    pub mem: Memory,
    /// Front end's address, size and guest address of each region: vhost-user passes ring addresses
    /// as the front end's.
    table: Vec<(u64, u64, u64)>,
    /// Regions that are not mapped.
    left_out: Vec<LeftOut>,
    /// Whether regions can be taken away.
    is_watched: bool,
    /// Log in which writes to it are marked.
    log: Arc<DirtyLog>,
}

/// The outcome of pinning a guest's memory.
#[derive(Debug)]
pub struct PinReport {
    /// Bytes that are pinned.
    pub pinned: u64,
    /// Bytes that are not, and the reason for the first of them.
    pub left: Option<(u64, Arc<PinError>)>,
}

/// A region that cannot be used: requests that point into it fail.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "{size} bytes at {base:#x} of the guest's memory are left out, and requests for them are refused: {why}"
)]
pub struct LeftOut {
    base: u64,
    size: u64,
    user: u64,
    why: Arc<MemoryError>,
}

impl std::fmt::Debug for GuestMem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuestMem").field("regions", &self.table.len()).finish_non_exhaustive()
    }
}

/// Reasons for which memory is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// Pages of this file system may block the engine at each access.
    #[error(
        "guest memory lies on a file system of type {0:#x}, which may make the I/O domain wait: use memory-backend-memfd (libvirt's <source type='memfd'/>) for all memory, also what is added later; with `trust = true` for this disk or port, files on tmpfs and hugetlbfs are accepted too"
    )]
    FileSystem(i64),
    /// A file that can be truncated under this process.
    #[error(
        "guest memory can be truncated while it is in use (no F_SEAL_SHRINK), as that of memory-backend-file can, on tmpfs and hugetlbfs too: use memory-backend-memfd with seal=on, its default (with hugetlb=on for huge pages; libvirt's <source type='memfd'/>), or set `trust = true` for this disk or port"
    )]
    Unsealed,
    /// Huge pages of an untrusted front end.
    #[error(
        "guest memory is made of huge pages, which can be freed while they are in use; if its front end is trusted, set `hugepages = true` for this disk or port (for sealed memfds: memory-backend-memfd with hugetlb=on), or `trust = true` (for files on hugetlbfs too)"
    )]
    HugePages,
    /// Most of the memory cannot be used.
    #[error(transparent)]
    Unusable(Arc<MemoryError>),
    /// The region cannot be mapped.
    #[error("guest memory region of {size} bytes: {source}")]
    Map {
        size: u64,
        /// Error of the mapping.
        source: std::io::Error,
    },
    /// A region as large as RAM that would be left out.
    #[error(
        "{size} bytes at {base:#x} of the guest's memory cannot be used, and are too many to be left out ({LARGEST_LEFT_OUT} at most): {why}"
    )]
    TooLarge {
        /// Guest address of the region.
        base: u64,
        size: u64,
        /// Reason for which it cannot be used.
        why: Box<MemoryError>,
    },
    /// More regions than can be mapped.
    #[error("{0}")]
    Slots(String),
    /// A region that is not in the table.
    #[error("there is no region of {size} bytes at {base:#x}")]
    Unknown {
        /// Guest address of the region.
        base: u64,
        size: u64,
    },
    /// Regions overlap, or there is none.
    #[error("guest memory regions do not fit together: {0}")]
    Regions(String),
}

impl LeftOut {
    /// Size of the unusable region, in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }
}

impl GuestMem {
    /// No memory, to which regions are added.
    #[must_use]
    pub fn empty() -> Self {
        Self::from_mapped(Memory::new())
    }

    /// No memory, to which regions are added whose writes are marked in a log.
    #[must_use]
    pub fn logged(log: &Arc<DirtyLog>) -> Self {
        Self { log: Arc::clone(log), ..Self::empty() }
    }

    /// Maps the regions. Memory of a device, such as that of `ivshmem`, may be of a file that
    /// cannot be used: regions of 4 MiB at most are left out as long as the usable ones are larger
    /// in sum.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing stays mapped then.
    pub fn map(
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        trust: Trust,
    ) -> Result<Self, MemoryError> {
        Self::empty().with_table(regions, files, trust)
    }

    /// These regions and those of a table, as [`GuestMem::map`] maps them.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing of the table stays mapped then.
    pub fn with_table(
        mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        trust: Trust,
    ) -> Result<Self, MemoryError> {
        for (region, file) in regions.iter().zip(files) {
            self = self.joined_by(region, &file, trust)?;
        }
        self.check_left_out()?;
        Ok(self)
    }

    /// These regions and one more; they are shared and not mapped again. A region that cannot be
    /// used is left out under the same conditions.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing of the new region stays mapped then.
    pub fn with_region(
        &self,
        region: &VhostUserMemoryRegion,
        file: &File,
        trust: Trust,
    ) -> Result<Self, MemoryError> {
        let all = self.joined_by(region, file, trust)?;
        if all.left_out.len() > self.left_out.len() {
            all.check_left_out()?;
        }
        Ok(all)
    }

    /// Refuses a table of which less can be used than not.
    fn check_left_out(&self) -> Result<(), MemoryError> {
        let sum = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0_u64, u64::saturating_add);
        let usable = sum(&mut self.table.iter().map(|(_, size, _)| *size));
        let left_out = sum(&mut self.left_out.iter().map(|of| of.size));
        if usable == 0 && left_out == 0 {
            return Err(MemoryError::Regions("there is none".into()));
        }
        match self.left_out.iter().max_by_key(|of| of.size) {
            Some(largest) if left_out >= usable => Err(MemoryError::Unusable(Arc::clone(&largest.why))),
            _ => Ok(()),
        }
    }

    fn joined_by(
        &self,
        region: &VhostUserMemoryRegion,
        file: &File,
        trust: Trust,
    ) -> Result<Self, MemoryError> {
        // The message is packed, so its fields are copied.
        let (base, size, user, offset) =
            (region.guest_phys_addr, region.memory_size, region.user_addr, region.mmap_offset);
        let slots = self.table.len() + self.left_out.len();
        if slots >= MEMORY_SLOTS {
            return Err(MemoryError::Slots(format!("there are {MEMORY_SLOTS} memory regions at most")));
        }
        let (mut table, mut left_out) = (self.table.clone(), self.left_out.clone());
        let page = match check_backing_file(file, trust) {
            Ok(page) => page,
            Err(why) if size > LARGEST_LEFT_OUT => {
                return Err(MemoryError::TooLarge { base, size, why: Box::new(why) });
            }
            Err(why) => {
                left_out.push(LeftOut { base, size, user, why: Arc::new(why) });
                return Ok(self.replaced(self.mem.clone(), table, left_out));
            }
        };
        let fail = |source: std::io::Error| MemoryError::Map { size, source };
        check_extent(file, (base, size, user, offset), trust).map_err(fail)?;
        let claims = self.claims(size)?;
        let is_watched = trust != Trust::None;
        let extent = Extent { base, size, offset, page };
        let mapped =
            Region::map(Some(file), extent, is_watched, claims, Arc::clone(&self.log)).map_err(fail)?;
        let mem = self.mem.insert_region(Arc::new(mapped));
        let mem = mem.map_err(|e| MemoryError::Regions(e.to_string()))?;
        table.push((user, size, base));
        let joined = self.replaced(mem, table, left_out);
        Ok(Self { is_watched: self.is_watched | is_watched, ..joined })
    }

    /// Other regions, with the same log.
    fn replaced(&self, mem: Memory, table: Vec<(u64, u64, u64)>, left_out: Vec<LeftOut>) -> Self {
        let (is_watched, log) = (self.is_watched, Arc::clone(&self.log));
        Self { mem, table, left_out, is_watched, pins: OnceLock::new(), log }
    }

    /// Claims of one more region of this size, in bytes, on what all VMs share.
    fn claims(&self, size: u64) -> Result<Claims, MemoryError> {
        let mut claims = Claims::default();
        if self.table.len() + self.left_out.len() >= OWN_SLOTS {
            claims.mapping = Some(SharedMapping::take().ok_or_else(|| {
                let text = "the I/O domain has as many memory regions of all VMs as it may map";
                MemoryError::Slots(format!("{text}; each VM has {OWN_SLOTS} in any case"))
            })?);
        }
        let before = self.table.iter().fold(0, |sum: u64, (_, size, _)| sum.saturating_add(*size));
        let beyond = |sum: u64| sum.saturating_sub(OWN_BYTES);
        let bytes = beyond(before.saturating_add(size)) - beyond(before);
        if bytes > 0 {
            claims.bytes = Some(SharedBytes::take(bytes).ok_or_else(|| {
                let text = "the I/O domain has as much memory of all VMs as it may map";
                MemoryError::Slots(format!("{text}; each VM has 1 TiB in any case"))
            })?);
        }
        Ok(claims)
    }

    /// These regions without one of them.
    ///
    /// # Errors
    /// There is no such region.
    pub fn without_region(&self, region: &VhostUserMemoryRegion) -> Result<Self, MemoryError> {
        let (base, size, user) = (region.guest_phys_addr, region.memory_size, region.user_addr);
        let unknown = || MemoryError::Unknown { base, size };
        let (mut table, mut left_out) = (self.table.clone(), self.left_out.clone());
        if let Some(i) = left_out.iter().position(|of| (of.user, of.size, of.base) == (user, size, base)) {
            left_out.remove(i);
            return Ok(self.replaced(self.mem.clone(), table, left_out));
        }
        let i = table.iter().position(|entry| *entry == (user, size, base)).ok_or_else(unknown)?;
        table.remove(i);
        let (mem, _) = self.mem.remove_region(GuestAddress(base), size).map_err(|_| unknown())?;
        Ok(self.replaced(mem, table, left_out))
    }

    /// Wraps memory that is already mapped, for tests.
    #[must_use]
    pub fn from_mapped(mem: Memory) -> Self {
        let (table, left_out, pins) = (Vec::new(), Vec::new(), OnceLock::new());
        Self { mem, table, left_out, is_watched: false, pins, log: Arc::default() }
    }

    /// Memory of this process at the given guest addresses, with these lengths in bytes, for tests.
    pub fn anonymous(ranges: &[(GuestAddress, usize)]) -> Result<Memory, MemoryError> {
        let map = |(base, len): &(GuestAddress, usize)| {
            let size = *len as u64;
            let extent = Extent { base: base.0, size, offset: 0, page: PAGE };
            Region::map(None, extent, false, Claims::default(), Arc::default())
                .map_err(|source| MemoryError::Map { size, source })
        };
        let regions: Vec<Region> = ranges.iter().map(map).collect::<Result<_, _>>()?;
        Memory::from_regions(regions).map_err(|e| MemoryError::Regions(e.to_string()))
    }

    /// Pins all regions but small ones, which are in no report, and those that are pinned already.
    /// Requests for memory that is not pinned go as without it. With more memory than the
    /// configuration says none is touched, and what is pinned already stays so.
    pub fn pin(&self, pinner: &Arc<Pinner>) -> PinReport {
        let mut report = PinReport { pinned: 0, left: None };
        let mut parts = Vec::new();
        let regions = || self.mem.iter().filter(|region| region.len() >= pin::SMALLEST);
        let all = regions().fold(0_u64, |sum, region| sum.saturating_add(region.len()));
        let refused = pinner.refuse(all).map(Arc::new);
        for region in regions() {
            let done = match &refused {
                Some(why) => region.pinned().ok_or_else(|| Arc::clone(why)),
                None => region.pin(pinner),
            };
            match done {
                Ok(part) => {
                    report.pinned += part.len() as u64;
                    parts.push(part);
                }
                Err(why) => report.left.get_or_insert((0, why)).0 += region.len(),
            }
        }
        if !parts.is_empty() {
            self.pins.get_or_init(|| Pins::new(pinner, parts));
        }
        report
    }

    /// The buffers that are registered with the kernel; `None` for memory that is not pinned.
    #[must_use]
    pub fn pins(&self) -> Option<&Pins> {
        self.pins.get()
    }

    /// Regions that are not mapped, with the reasons.
    #[must_use]
    pub fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }

    /// Whether a part was taken away, and reads as zeroes since, or the log of writes was. Costs
    /// nothing for memory that is sealed.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        let is_lost = || self.mem.iter().any(Region::is_lost) || self.log.is_lost();
        self.is_watched && fault::has_losses() && is_lost()
    }

    /// Whether writes are logged: a live migration is under way.
    #[must_use]
    pub fn is_logged(&self) -> bool {
        self.log.is_on()
    }

    /// Marks bytes that the kernel has written for this process, in the log if there is one. Other
    /// writes are marked by the regions.
    pub fn mark_written(&self, at: GuestAddress, len: usize) {
        self.log.mark(at.0, len);
    }

    /// End of the last region, as a guest address; 0 without one.
    pub(crate) fn end(&self) -> u64 {
        self.mem.iter().map(|region| region.last_addr().0.saturating_add(1)).max().unwrap_or(0)
    }

    /// Translates an address of the front end into a guest address.
    #[must_use]
    pub fn translate(&self, user: u64) -> Option<GuestAddress> {
        let (start, _, base) =
            self.table.iter().find(|(start, size, _)| user.wrapping_sub(*start) < *size)?;
        Some(GuestAddress(base + (user - start)))
    }
}

/// Refuses regions that end beyond their file, and for a front end without trust such as are no
/// whole pages.
fn check_extent(
    file: &File,
    (base, size, user, offset): (u64, u64, u64, u64),
    trust: Trust,
) -> std::io::Result<()> {
    let other = |text: &str| Err(std::io::Error::other(text));
    let is_whole = base % PAGE == 0 && size % PAGE == 0 && offset % PAGE == 0;
    if size == 0 || (trust != Trust::Full && !is_whole) {
        let text = "it does not begin and end on a page, which `trust = true` for this disk or port allows";
        return other(if size == 0 { "it is empty" } else { text });
    }
    // A mapping may extend beyond the end of its file; touching it there would raise SIGBUS.
    let file_len = file.metadata()?.len();
    if offset.checked_add(size).is_none_or(|end| end > file_len) {
        return other(&format!("it ends beyond its file, which has {file_len} bytes"));
    }
    if user.checked_add(size).is_none() {
        return other("the region ends beyond the front end's address space");
    }
    Ok(())
}

/// Refuses file systems that may block at each access, and memory that can be truncated. Returns
/// the size of the file's pages, in bytes.
fn check_backing_file(file: &File, trust: Trust) -> Result<u64, MemoryError> {
    let io = |e: rustix::io::Errno| MemoryError::Map { size: 0, source: e.into() };
    let fs = rustix::fs::fstatfs(file.as_fd()).map_err(io)?;
    let kind = fs.f_type as i64;
    if kind == HUGETLBFS && trust == Trust::None {
        return Err(MemoryError::HugePages);
    }
    if kind != TMPFS && kind != HUGETLBFS {
        return Err(MemoryError::FileSystem(kind));
    }
    // Huge pages are mapped and unmapped as a whole; the file system's block is one.
    let huge = u64::try_from(fs.f_bsize).ok().filter(|size| size.is_power_of_two() && *size >= PAGE);
    let page = if kind == HUGETLBFS { huge.unwrap_or(PAGE) } else { PAGE };
    if trust == Trust::Full {
        return Ok(page);
    }
    match rustix::fs::fcntl_get_seals(file.as_fd()) {
        Ok(seals) if seals.contains(rustix::fs::SealFlags::SHRINK) => Ok(page),
        _ => Err(MemoryError::Unsealed),
    }
}

#[cfg(test)]
mod tests;
