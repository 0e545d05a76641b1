use super::*;

/// A small ELF64 file with the sections: null, `.shstrtab`, `.modinfo`.
fn elf(modinfo: &[u8]) -> Vec<u8> {
    let strings = b"\0.shstrtab\0.modinfo\0";
    let (strings_at, info_at) = (64, 64 + strings.len());
    let table_at = info_at + modinfo.len();
    let mut file = vec![0_u8; 64];
    file[..6].copy_from_slice(b"\x7fELF\x02\x01");
    file[0x28..0x30].copy_from_slice(&(table_at as u64).to_le_bytes());
    file[0x3a..0x3c].copy_from_slice(&64_u16.to_le_bytes());
    file[0x3c..0x3e].copy_from_slice(&3_u16.to_le_bytes());
    file[0x3e..0x40].copy_from_slice(&1_u16.to_le_bytes());
    file.extend_from_slice(strings);
    file.extend_from_slice(modinfo);
    for (name, at, len) in [(0_u32, 0, 0), (1, strings_at, strings.len()), (11, info_at, modinfo.len())] {
        let mut header = [0_u8; 64];
        header[..4].copy_from_slice(&name.to_le_bytes());
        header[0x18..0x20].copy_from_slice(&(at as u64).to_le_bytes());
        header[0x20..0x28].copy_from_slice(&(len as u64).to_le_bytes());
        file.extend_from_slice(&header);
    }
    file
}

#[test]
fn names_behind_depends() {
    let file = elf(b"license=GPL\0depends=virtio,virtio-ring\0name=virtio_blk\0");
    assert_eq!(depends(&file).unwrap(), ["virtio", "virtio_ring"]);
    assert_eq!(depends(&elf(b"depends=\0")).unwrap(), [""; 0]);
    assert_eq!(depends(&elf(b"license=GPL\0")), None);
}

#[test]
fn damaged_files_are_refused() {
    let file = elf(b"depends=virtio\0");
    for len in 0..file.len() {
        // Any cut is either refused or, past the headers in use, harmless; it never panics.
        let _ = depends(&file[..len]);
    }
    assert_eq!(depends(b"\x7fELF\x02\x01"), None);
    let mut far = file;
    far[0x28..0x30].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_eq!(depends(&far), None);
}

#[test]
fn file_names() {
    assert_eq!(module_name("kyber-iosched.ko").as_deref(), Some("kyber_iosched"));
    assert_eq!(module_name("bfq.ko.xz").as_deref(), Some("bfq"));
    assert_eq!(module_name("modules.builtin"), None);
}

/// The checksum of ext4 is a module that ext4 asks for (Linux 6.1), or a part of the kernel (7.2).
#[test]
fn a_kernel_without_a_module_for_the_checksum_needs_none() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let packages = Packages::new(dir.path(), &|_| {});
    let modules = dir.path().join(crate::image::apt::UNPACKED).join("usr/lib/modules/7.2.13");
    let put = |file: &str, bytes: &[u8]| fs::write(modules.join(file), bytes).unwrap();
    fs::create_dir_all(&modules).unwrap();
    put("vmlinuz", b"");
    put("modules.builtin", b"");
    let added = || {
        let mut tree = Tree::default();
        let names = ["crc32c_generic", "ext4"];
        add(&mut tree, &packages, Path::new("/nonexistent"), &names).map_err(|e| e.to_string())
    };
    put("ext4.ko", &elf(b"depends=\0name=ext4\0softdep=pre: crc32c\0"));
    assert!(added().unwrap_err().contains("no module crc32c_generic"));
    put("ext4.ko", &elf(b"depends=\0name=ext4\0"));
    added().unwrap();
    // Debian's cloud kernel 7.2 has ext4 built in.
    fs::remove_file(modules.join("ext4.ko")).unwrap();
    put("modules.builtin", b"kernel/fs/ext4/ext4.ko\n");
    added().unwrap();
    // No other module may be missing.
    let error = add(&mut Tree::default(), &packages, Path::new("/nonexistent"), &["bfq"]).unwrap_err();
    assert!(error.to_string().contains("no module bfq"), "{error}");
}
