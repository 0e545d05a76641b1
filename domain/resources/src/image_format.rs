//! Disk image formats by their signatures. Serving such a file raw shows the guest the container,
//! and its first write damages it.
//!
//! The offsets are those of QEMU's probes (`block/*.c`, functions `*_probe`) and of the formats'
//! own specifications.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Bytes checked at a disk's start.
const HEAD: usize = 512;
/// Length of a trailer: the footer of VHD and of Apple's disk images.
const TAIL: u64 = 512;

/// A signature at an offset.
struct Magic {
    name: &'static str,
    at: usize,
    bytes: &'static [u8],
}

const fn magic(name: &'static str, at: usize, bytes: &'static [u8]) -> Magic {
    Magic { name, at, bytes }
}

/// Signatures at the start.
const HEADS: &[Magic] = &[
    magic("qcow", 0, b"QFI\xfb\x00\x00\x00\x01"),
    magic("qcow2", 0, b"QFI\xfb"),
    magic("qed", 0, b"QED\0"),
    magic("vmdk", 0, b"KDMV"),
    magic("vmdk", 0, b"COWD"),
    magic("vmdk", 0, b"# Disk DescriptorFile"),
    magic("vmdk", 0, b"version=1\n"),
    magic("vmdk", 0, b"version=2\n"),
    magic("vmdk", 0, b"version=3\n"),
    magic("vpc (VHD)", 0, b"conectix"),
    magic("vhdx", 0, b"vhdxfile"),
    magic("vdi", 0x40, b"\x7f\x10\xda\xbe"),
    magic("luks", 0, b"LUKS\xba\xbe\x00\x01"),
    magic("luks (version 2)", 0, b"LUKS\xba\xbe"),
    magic("parallels", 0, b"WithoutFreeSpace"),
    magic("parallels", 0, b"WithouFreSpacExt"),
    magic("bochs", 0, b"Bochs Virtual HD Image"),
    magic("cloop", 0, b"#!/bin/sh\n#V2.0 Format\n"),
    magic("dmg (sparse)", 0, b"sprs"),
    magic("EWF", 0, b"EVF\x09\x0d\x0a\xff\x00"),
    magic("WIM", 0, b"MSWIM\0\0\0"),
    magic("Android sparse", 0, b"\x3a\xff\x26\xed"),
    magic("gzip", 0, b"\x1f\x8b\x08"),
    magic("xz", 0, b"\xfd7zXZ\0"),
    magic("zstd", 0, b"\x28\xb5\x2f\xfd"),
    magic("bzip2", 0, b"BZh91AY&SY"),
];

/// Signatures in the last 512 bytes.
const TAILS: &[Magic] = &[magic("vpc (VHD)", 0, b"conectix"), magic("dmg", 0, b"koly")];

/// The format with a signature at `start`; `None` when none is known, so raw.
pub(crate) fn at_start(file: &File, start: u64) -> io::Result<Option<&'static str>> {
    let mut head = [0; HEAD];
    let len = read(file, &mut head, start)?;
    Ok(find(HEADS, &head[..len]))
}

/// The format with a trailer before `end`, the end of the file or device.
pub(crate) fn at_end(file: &File, end: u64) -> io::Result<Option<&'static str>> {
    let Some(start) = end.checked_sub(TAIL) else { return Ok(None) };
    let mut tail = [0; TAIL as usize];
    let len = read(file, &mut tail, start)?;
    Ok(find(TAILS, &tail[..len]))
}

fn find(known: &[Magic], bytes: &[u8]) -> Option<&'static str> {
    known.iter().find(|m| bytes.get(m.at..).is_some_and(|b| b.starts_with(m.bytes))).map(|m| m.name)
}

/// Reads until the buffer is full or the file ends.
pub(crate) fn read(file: &File, buffer: &mut [u8], start: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], start + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::Command;

    use super::*;

    /// Each signature, whole and with a wrong byte.
    #[test]
    fn signatures_are_found_at_their_offsets() {
        let found = |bytes: &[u8], start: u64| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(bytes).unwrap();
            (at_start(&file, start).unwrap(), at_end(&file, bytes.len() as u64).unwrap())
        };
        for m in HEADS {
            for start in [0, 4_096] {
                let mut bytes = vec![0; start + 8_192];
                bytes[start + m.at..][..m.bytes.len()].copy_from_slice(m.bytes);
                assert_eq!(found(&bytes, start as u64), (Some(m.name), None));
                if start > 0 {
                    assert_eq!(found(&bytes, 0), (None, None), "{} elsewhere", m.name);
                }
                // A byte that every signature of its kind contains.
                bytes[start + m.at + 1] ^= 0x80;
                assert_eq!(found(&bytes, start as u64), (None, None), "{}", m.name);
            }
        }
        for m in TAILS {
            let mut bytes = vec![0; 8_192];
            bytes[7_680..][..m.bytes.len()].copy_from_slice(m.bytes);
            assert_eq!(found(&bytes, 0), (None, Some(m.name)));
        }
        // A boot sector, a GPT, zeroes, and less than a header.
        let mut disk = vec![0; 1 << 20];
        disk[510..512].copy_from_slice(&[0x55, 0xaa]);
        disk[512..520].copy_from_slice(b"EFI PART");
        assert_eq!(found(&disk, 0), (None, None));
        assert_eq!(found(&[], 0), (None, None));
        assert_eq!(found(b"QFI", 0), (None, None));
    }

    /// All formats that `qemu-img` can create.
    #[test]
    fn images_of_qemu_are_found() {
        let test = "images_of_qemu_are_found";
        if Command::new("qemu-img").arg("--version").output().is_err() {
            return rtvirtio_testkit::skip(test, "qemu-img is not installed");
        }
        let dir = rtvirtio_testkit::tempdir().unwrap();
        let kinds: [(&str, &str, &str); 11] = [
            ("qcow", "", "qcow"),
            ("qcow2", "compat=0.10", "qcow2"),
            ("qcow2", "compat=1.1", "qcow2"),
            ("qed", "", "qed"),
            ("vmdk", "subformat=monolithicSparse", "vmdk"),
            ("vmdk", "subformat=monolithicFlat", "vmdk"),
            ("vpc", "subformat=dynamic", "vpc (VHD)"),
            ("vpc", "subformat=fixed", "vpc (VHD)"),
            ("vhdx", "", "vhdx"),
            ("vdi", "", "vdi"),
            ("parallels", "", "parallels"),
        ];
        for (i, (kind, options, name)) in kinds.into_iter().enumerate() {
            let path = dir.path().join(format!("{i}.{kind}"));
            let mut command = Command::new("qemu-img");
            command.args(["create", "-q", "-f", kind]);
            if !options.is_empty() {
                command.args(["-o", options]);
            }
            let out = command.arg(&path).arg("64M").output().unwrap();
            assert!(out.status.success(), "{kind}: {}", String::from_utf8_lossy(&out.stderr));
            let file = File::open(&path).unwrap();
            let end = file.metadata().unwrap().len();
            let found = at_start(&file, 0).unwrap().or(at_end(&file, end).unwrap());
            assert_eq!(found, Some(name), "{kind} {options}");
        }
        let raw = dir.path().join("raw");
        let out = Command::new("qemu-img").args(["create", "-q", "-f", "raw"]).arg(&raw).arg("64M").output();
        assert!(out.unwrap().status.success());
        assert_eq!(at_start(&File::open(&raw).unwrap(), 0).unwrap(), None);
    }
}
