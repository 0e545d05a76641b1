//! Block size for which the contents of a disk were made, by its partition table or boot sector.

use std::fs::File;
use std::io;

use crate::image_format;

/// Block sizes of disks that have partitions, in bytes.
const SIZES: [u32; 2] = [512, 4_096];
/// Bytes at a disk's start that are looked at.
const HEAD: usize = 8_192;
/// Bytes at a partition's start that are looked at: ext4's superblock begins at 1024.
const PARTITION: usize = 2_048;
/// Type of the one partition that protects a GPT (UEFI 2.10, 5.2.3).
const PROTECTIVE: u8 = 0xee;

/// Block size of the disk that begins at `start`; `None` where the contents do not tell.
pub(crate) fn block_size(file: &File, start: u64) -> io::Result<Option<u32>> {
    let head: [u8; HEAD] = read(file, start)?;
    // The header of a GPT is in the second block (UEFI 2.10, 5.3.2). One may be left from before.
    let headers: Vec<u32> =
        SIZES.into_iter().filter(|size| has(&head, *size as usize, b"EFI PART")).collect();
    match headers[..] {
        [] => {}
        [size] => return Ok(Some(size)),
        _ => return Ok(None),
    }
    if !has(&head, 510, &[0x55, 0xaa]) {
        return Ok(None);
    }
    // A jump, then bytes per sector: the boot sector of FAT and NTFS.
    let per_sector = u16::from_le_bytes([head[11], head[12]]);
    if matches!(head[0], 0xeb | 0xe9) && SIZES.contains(&per_sector.into()) {
        return Ok(Some(per_sector.into()));
    }
    for entry in head[446..510].chunks_exact(16) {
        let (kind, first) = (entry[4], u32::from_le_bytes([entry[8], entry[9], entry[10], entry[11]]));
        if kind == 0 || kind == PROTECTIVE || first == 0 {
            continue;
        }
        for size in SIZES {
            let at = start.saturating_add(u64::from(first) * u64::from(size));
            if has_file_system(&read::<PARTITION>(file, at)?) {
                return Ok(Some(size));
            }
        }
    }
    Ok(None)
}

/// Whether the start of a partition is that of a known file system or volume: ext2 to ext4, FAT and
/// NTFS, XFS, LUKS, LVM.
fn has_file_system(start: &[u8]) -> bool {
    let known: [(usize, &[u8]); 5] = [
        (1_080, &[0x53, 0xef]),
        (510, &[0x55, 0xaa]),
        (0, b"XFSB"),
        (0, b"LUKS\xba\xbe"),
        (512, b"LABELONE"),
    ];
    known.into_iter().any(|(at, bytes)| has(start, at, bytes))
}

fn has(bytes: &[u8], at: usize, expected: &[u8]) -> bool {
    bytes.get(at..).is_some_and(|rest| rest.starts_with(expected))
}

/// Bytes at an offset; zeroes beyond the end.
fn read<const LEN: usize>(file: &File, at: u64) -> io::Result<[u8; LEN]> {
    let mut bytes = [0; LEN];
    image_format::read(file, &mut bytes, at)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    fn of(parts: &[(usize, &[u8])]) -> Option<u32> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(1 << 26).unwrap();
        for start in [0, 1 << 20] {
            for (at, bytes) in parts {
                file.write_all_at(bytes, start + *at as u64).unwrap();
            }
        }
        let found = block_size(&file, 1 << 20).unwrap();
        assert_eq!(found, block_size(&file, 0).unwrap());
        found
    }

    /// A partition of Linux that begins with this block.
    fn entry(first: u32) -> [u8; 16] {
        let mut entry = [0; 16];
        entry[4] = 0x83;
        entry[8..12].copy_from_slice(&first.to_le_bytes());
        entry
    }

    const MBR: (usize, &[u8]) = (510, &[0x55, 0xaa]);

    #[test]
    fn tables_and_boot_sectors_tell_the_block_size() {
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[(512, b"EFI PART"), MBR]), Some(512));
        assert_eq!(of(&[(4_096, b"EFI PART"), MBR]), Some(4_096));
        assert_eq!(of(&[(512, b"EFI PART"), (4_096, b"EFI PART"), MBR]), None, "one is old");
        assert_eq!(of(&[(0, &[0xeb, 0x3c]), (11, &[0, 2]), MBR]), Some(512));
        assert_eq!(of(&[(0, &[0xe9]), (11, &[0, 16]), MBR]), Some(4_096));
        assert_eq!(of(&[(11, &[0, 2]), MBR]), None, "no boot sector");
    }

    #[test]
    fn partitions_of_a_master_boot_record_are_where_their_file_systems_are() {
        let ext4 = &[0x53, 0xef][..];
        let second = entry(64);
        let table = |file_system: usize| of(&[(462, &second), MBR, (file_system, ext4)]);
        assert_eq!(table(64 * 512 + 1_080), Some(512));
        assert_eq!(table(64 * 4_096 + 1_080), Some(4_096));
        assert_eq!(table(64 * 1_024), None, "an empty partition");
        // The end of the disk is no error.
        assert_eq!(of(&[(446, &entry(u32::MAX)), MBR]), None);
    }
}
