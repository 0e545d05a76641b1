//! Guest memory that QEMU shares: mapped, and checked for anything that could block or end this
//! process later.

use std::fs::File;
use std::os::fd::AsFd;

use vhost::vhost_user::message::VhostUserMemoryRegion;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

/// `TMPFS_MAGIC` of `linux/magic.h`; memfds are on tmpfs.
pub(crate) const TMPFS: i64 = 0x0102_1994;
/// `HUGETLBFS_MAGIC` of `linux/magic.h`.
const HUGETLBFS: i64 = 0x9584_58f6;

/// Alignment of regions, in bytes.
const PAGE: u64 = 4_096;

/// Memory of one guest.
pub struct GuestMem {
    /// The mappings, by guest address.
    pub mem: GuestMemoryMmap<()>,
    /// QEMU address, size and guest address of each region: vhost-user passes ring addresses as
    /// QEMU addresses.
    table: Vec<(u64, u64, u64)>,
    /// Regions that are not mapped.
    left_out: Vec<LeftOut>,
}

/// A region that cannot be used: requests that point into it fail.
#[derive(Debug, thiserror::Error)]
#[error(
    "{size} bytes at {base:#x} of the guest's memory are left out, and requests for them are refused: {why}"
)]
pub struct LeftOut {
    base: u64,
    size: u64,
    why: MemoryError,
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
        "guest memory lies on a file system of type {0:#x}, which may make the I/O domain wait: use memory-backend-memfd (libvirt's <source type='memfd'/>) for all memory, also what is added later"
    )]
    FileSystem(i64),
    /// A file that can be truncated, after which an access ends the process.
    #[error(
        "guest memory can be truncated while it is in use (no F_SEAL_SHRINK), as that of memory-backend-file can, on tmpfs and hugetlbfs too: use memory-backend-memfd with seal=on, its default (with hugetlb=on for huge pages; libvirt's <source type='memfd'/>)"
    )]
    Unsealed,
    /// Huge pages of an untrusted QEMU.
    #[error(
        "guest memory is made of huge pages, and a process that frees one can end this process; set `hugepages = true` for this disk if its QEMU is trusted"
    )]
    HugePages,
    /// The region cannot be mapped.
    #[error("guest memory region of {size} bytes: {source}")]
    Map {
        /// Size of the region, in bytes.
        size: u64,
        /// Error of the mapping.
        source: std::io::Error,
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
    /// Maps the regions. Memory of a device, such as that of `ivshmem`, may be of a file that
    /// cannot be used: such regions are left out as long as the usable ones are larger in sum.
    /// `huge` allows huge pages, of a QEMU that is trusted not to punch holes into them: touching
    /// an unavailable huge page ends the process.
    ///
    /// # Errors
    /// [`MemoryError`]; nothing stays mapped then.
    pub fn map(regions: &[VhostUserMemoryRegion], files: Vec<File>, huge: bool) -> Result<Self, MemoryError> {
        let mut mapped = Vec::with_capacity(regions.len());
        let mut table = Vec::with_capacity(regions.len());
        let mut left_out: Vec<LeftOut> = Vec::new();
        for (region, file) in regions.iter().zip(files) {
            // The message is packed, so its fields are copied.
            let (base, size, user, offset) =
                (region.guest_phys_addr, region.memory_size, region.user_addr, region.mmap_offset);
            let fail = |source: std::io::Error| MemoryError::Map { size, source };
            if let Err(why) = check_backing_file(&file, huge) {
                left_out.push(LeftOut { base, size, why });
                continue;
            }
            if base % PAGE != 0 || size % PAGE != 0 || size == 0 {
                return Err(fail(std::io::Error::other("it does not begin and end on a page")));
            }
            // A mapping may extend beyond the end of its file; touching it there would end the
            // process.
            let file_len = file.metadata().map_err(fail)?.len();
            if offset.checked_add(size).is_none_or(|end| end > file_len) {
                let text = format!("it ends beyond its file, which has {file_len} bytes");
                return Err(fail(std::io::Error::other(text)));
            }
            let length = usize::try_from(size).map_err(|e| fail(std::io::Error::other(e)))?;
            let mapping = MmapRegion::from_file(FileOffset::new(file, offset), length)
                .map_err(|e| fail(std::io::Error::other(e.to_string())))?;
            // A core file contains no guest memory, and is written without delaying the restart.
            // SAFETY: the whole of a mapping of ours; only what a dump contains changes.
            let _ = unsafe {
                rustix::mm::madvise(mapping.as_ptr().cast(), length, rustix::mm::Advice::LinuxDontDump)
            };
            let region = GuestRegionMmap::new(mapping, GuestAddress(base))
                .ok_or_else(|| fail(std::io::Error::other("the region ends beyond the address space")))?;
            mapped.push(region);
            if user.checked_add(size).is_none() {
                return Err(fail(std::io::Error::other("the region ends beyond QEMU's address space")));
            }
            table.push((user, size, base));
        }
        let sum = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0_u64, u64::saturating_add);
        let usable = sum(&mut table.iter().map(|(_, size, _)| *size));
        if sum(&mut left_out.iter().map(|of| of.size)) >= usable {
            if let Some(of) = left_out.into_iter().max_by_key(|of| of.size) {
                return Err(of.why);
            }
            left_out = Vec::new();
        }
        mapped.sort_by_key(|r| vm_memory::GuestMemoryRegion::start_addr(r).0);
        let mem = GuestMemoryMmap::from_regions(mapped).map_err(|e| MemoryError::Regions(e.to_string()))?;
        Ok(Self { mem, table, left_out })
    }

    /// Wraps memory that is already mapped, for tests.
    #[must_use]
    pub fn from_mapped(mem: GuestMemoryMmap<()>) -> Self {
        Self { mem, table: Vec::new(), left_out: Vec::new() }
    }

    /// Regions that are not mapped, with the reasons.
    #[must_use]
    pub fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }

    /// Translates a QEMU address into a guest address.
    #[must_use]
    pub fn translate(&self, user: u64) -> Option<GuestAddress> {
        let (start, _, base) =
            self.table.iter().find(|(start, size, _)| user.wrapping_sub(*start) < *size)?;
        Some(GuestAddress(base + (user - start)))
    }
}

/// Refuses file systems that may block at each access, and memory that can be truncated.
fn check_backing_file(file: &File, huge: bool) -> Result<(), MemoryError> {
    let io = |e: rustix::io::Errno| MemoryError::Map { size: 0, source: e.into() };
    let fs = rustix::fs::fstatfs(file.as_fd()).map_err(io)?;
    let kind = fs.f_type as i64;
    if kind == HUGETLBFS && !huge {
        return Err(MemoryError::HugePages);
    }
    if kind != TMPFS && kind != HUGETLBFS {
        return Err(MemoryError::FileSystem(kind));
    }
    match rustix::fs::fcntl_get_seals(file.as_fd()) {
        Ok(seals) if seals.contains(rustix::fs::SealFlags::SHRINK) => Ok(()),
        _ => Err(MemoryError::Unsealed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memfd(seal: bool) -> File {
        let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("test", flags).unwrap());
        file.set_len(1 << 20).unwrap();
        if seal {
            rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK).unwrap();
        }
        file
    }

    fn region(size: u64) -> VhostUserMemoryRegion {
        VhostUserMemoryRegion {
            guest_phys_addr: 0x1_0000,
            memory_size: size,
            user_addr: 0x7f00_0000_0000,
            mmap_offset: 0,
        }
    }

    #[test]
    fn sealed_memory_is_mapped_and_translated() {
        let mem = GuestMem::map(&[region(1 << 20)], vec![memfd(true)], false).unwrap();
        assert_eq!(mem.translate(0x7f00_0000_0010), Some(GuestAddress(0x1_0010)));
        assert_eq!(mem.translate(0x7f00_0010_0000), None);
        assert_eq!(mem.translate(0x7eff_ffff_ffff), None);
    }

    #[test]
    fn truncatable_and_blocking_memory_is_refused() {
        assert!(matches!(
            GuestMem::map(&[region(1 << 20)], vec![memfd(false)], false),
            Err(MemoryError::Unsealed)
        ));
        // Larger than the file.
        assert!(matches!(
            GuestMem::map(&[region(1 << 21)], vec![memfd(true)], false),
            Err(MemoryError::Map { .. })
        ));
        // Of no file system that holds a guest's memory.
        let disk = File::open("/proc/version").unwrap();
        assert!(matches!(GuestMem::map(&[region(4096)], vec![disk], false), Err(MemoryError::FileSystem(_))));
        assert!(matches!(GuestMem::map(&[], Vec::new(), false), Err(MemoryError::Regions(_))));
    }

    #[test]
    fn a_devices_memory_is_left_out_and_a_guests_is_not() {
        let of_device = VhostUserMemoryRegion {
            guest_phys_addr: 0xf000_0000,
            memory_size: 4_096,
            user_addr: 0x7e00_0000_0000,
            mmap_offset: 0,
        };
        let both = [region(1 << 20), of_device];
        let mem = GuestMem::map(&both, vec![memfd(true), memfd(false)], false).unwrap();
        let [left_out] = mem.left_out() else { panic!("{:?}", mem.left_out()) };
        assert!(left_out.to_string().contains("4096 bytes at 0xf0000000"), "{left_out}");
        let text = left_out.to_string();
        assert!(text.contains("seal=on") && text.contains("memory-backend-file"), "with the remedy: {text}");
        assert_eq!(mem.translate(0x7e00_0000_0000), None);
        assert!(mem.translate(0x7f00_0000_0000).is_some());
        // What is left would not be the guest's memory.
        let refused = GuestMem::map(&both, vec![memfd(false), memfd(true)], false);
        assert!(matches!(refused, Err(MemoryError::Unsealed)));
    }
}
