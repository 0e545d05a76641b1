use super::*;

/// Parses an archive by the format's specification: name, mode, data.
fn read(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
    let mut entries = Vec::new();
    loop {
        assert_eq!(&bytes[..6], b"070701");
        let field = |i: usize| {
            let at = 6 + 8 * i;
            u32::from_str_radix(std::str::from_utf8(&bytes[at..at + 8]).unwrap(), 16).unwrap()
        };
        let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
        let name = String::from_utf8(bytes[110..110 + name_size - 1].to_vec()).unwrap();
        assert_eq!(bytes[110 + name_size - 1], 0);
        let data_at = (110 + name_size).next_multiple_of(4);
        let data = bytes[data_at..data_at + size].to_vec();
        if name == "TRAILER!!!" {
            assert_eq!(data_at + size, bytes.len());
            return entries;
        }
        entries.push((name, mode, data));
        bytes = &bytes[(data_at + size).next_multiple_of(4)..];
    }
}

#[test]
fn directories_come_first_and_all_lengths_are_padded() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let host = dir.path().join("host");
    fs::write(&host, "from the host").unwrap();
    let mut tree = Tree::default();
    tree.file("usr/bin/tool", &host, 0o755);
    tree.symlink("bin/sh", "busybox");
    tree.dir("proc");
    for n in 0..5 {
        tree.data(&format!("usr/d{}", "x".repeat(n)), vec![b'a'; n], 0o644);
    }
    let path = dir.path().join("archive");
    tree.write(&path).unwrap();
    let entries = read(&fs::read(&path).unwrap());
    let names: Vec<&str> = entries.iter().map(|e| e.0.as_str()).collect();
    assert_eq!(
        names,
        [
            "bin",
            "bin/sh",
            "proc",
            "usr",
            "usr/bin",
            "usr/bin/tool",
            "usr/d",
            "usr/dx",
            "usr/dxx",
            "usr/dxxx",
            "usr/dxxxx"
        ]
    );
    assert_eq!(entries[1], ("bin/sh".into(), 0o120_777, b"busybox".to_vec()));
    assert_eq!(entries[2], ("proc".into(), 0o040_755, Vec::new()));
    assert_eq!(entries[5], ("usr/bin/tool".into(), 0o100_755, b"from the host".to_vec()));
    assert_eq!(entries[10].2, b"aaaa");
}

#[test]
fn same_files_give_the_same_bytes() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let write = |name: &str| {
        let mut tree = Tree::default();
        tree.data("b/x", b"1".to_vec(), 0o644);
        tree.data("a", b"2".to_vec(), 0o644);
        tree.write(&dir.path().join(name)).unwrap();
        fs::read(dir.path().join(name)).unwrap()
    };
    assert_eq!(write("one"), write("two"));
}

#[test]
fn missing_host_file_is_named() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let mut tree = Tree::default();
    tree.file("x", Path::new("/nonexistent/library.so"), 0o755);
    let error = tree.write(&dir.path().join("archive")).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/library.so"), "{error}");
}
