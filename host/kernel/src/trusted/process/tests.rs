use std::os::unix::fs::MetadataExt as _;
use std::ptr::null_mut;

use rtvirtio_testkit::{Need, has};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use super::*;

/// Maps a page of a file until the process ends.
fn map(file: &File, rights: ProtFlags, flags: MapFlags) {
    // SAFETY: a new mapping, which nothing points into.
    unsafe { mmap(null_mut(), 4096, rights, flags, file, 0) }.unwrap();
}

fn page(path: &Path) -> File {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
    file.set_len(4096).unwrap();
    file
}

#[test]
fn what_a_process_has_mapped_to_write_is_opened_without_its_path() {
    if !has("what_a_process_has_mapped_to_write_is_opened_without_its_path", &[Need::Root]) {
        return;
    }
    let own = std::process::id();
    for parent in ["/tmp", "/dev/shm"] {
        let dir = rtvirtio_testkit::tempdir_in(parent).unwrap();
        let at = |name: &str| dir.path().join(name);
        let (read, write) = (ProtFlags::READ, ProtFlags::READ | ProtFlags::WRITE);
        // Read-only and private mappings are left out.
        let only_read = page(&at("read"));
        map(&File::open(at("read")).unwrap(), read, MapFlags::SHARED);
        map(&only_read, read, MapFlags::SHARED);
        map(&page(&at("private")), write, MapFlags::PRIVATE);
        let mapped = page(&at("mapped"));
        map(&mapped, write, MapFlags::SHARED);
        let here = || {
            let all = shared_mappings(own).unwrap();
            all.into_iter().filter(|m| m.name.starts_with(dir.path())).collect::<Vec<_>>()
        };
        let found = here();
        assert_eq!(found.iter().map(|m| m.name.clone()).collect::<Vec<_>>(), [at("mapped")]);
        assert_eq!(found[0].length, 4096);

        // Another file in its place changes nothing.
        let inode = mapped.metadata().unwrap().ino();
        fs::remove_file(at("mapped")).unwrap();
        fs::write(at("mapped"), "another").unwrap();
        let found = here();
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].by_mapping().unwrap().metadata().unwrap().ino(), inode);
        let taken = found[0].by_descriptor().unwrap().unwrap();
        assert_eq!(taken.metadata().unwrap().ino(), inode);
        assert_eq!(found[0].open().unwrap().metadata().unwrap().ino(), inode);

        // A descriptor that may only append, or read, does not allow writing anywhere.
        drop((taken, mapped));
        let appending = OpenOptions::new()
            .append(true)
            .read(true)
            .open(format!("/proc/self/map_files/{:x}-{:x}", found[0].range.0, found[0].range.1));
        let appending = appending.unwrap();
        assert!(found[0].by_descriptor().unwrap().is_none());
        assert_eq!(found[0].by_mapping().unwrap().metadata().unwrap().ino(), inode);
        drop(appending);
    }
}

#[test]
fn memory_without_a_name_is_local() {
    let file = memfd_create("rtvirtio-test", MemfdFlags::CLOEXEC).unwrap();
    assert_eq!(file_system(std::process::id(), &file).unwrap().as_deref(), Some("tmpfs"));
    // A socket's file system is mounted nowhere.
    let (socket, _) = std::os::unix::net::UnixStream::pair().unwrap();
    assert_eq!(file_system(std::process::id(), &socket.into()).unwrap(), None);
    let line = "36 35 98:0 / /mnt rw,noatime master:1 - fuse.sshfs host: rw,user_id=0";
    assert_eq!(kind_of(line, "36").as_deref(), Some("fuse.sshfs"));
    assert_eq!(kind_of(line, "3"), None);
}

#[test]
fn a_file_is_picked_by_its_path_its_name_and_its_size() {
    let of = |line: &str| mapping(7, line.as_bytes());
    let lines = [
        "00400000-00402000 rw-s 00000000 00:19 12                         /dev/shm/rtvirtio plc",
        "7f0000000000-7f0000001000 rw-s 00000000 00:19 13                 /chroot/page (deleted)",
        "7f0000001000-7f0000002000 rw-s 00000000 00:01 13                 /memfd:m (deleted)",
        "7f0000002000-7f0000003000 rw-s 00000000 00:01 14                 /memfd:m (deleted)",
    ];
    let all: Vec<_> = lines.iter().map(|line| of(line).unwrap()).collect();
    assert_eq!(all[0].range, (0x40_0000, 0x40_2000));
    assert_eq!(of("7f00-7f01 r--s 00000000 00:19 12 /x"), None);
    assert_eq!(of("7f00-7f01 rw-p 00000000 00:19 12 /x"), None);
    assert_eq!(of("7f00-7f01 rw-s"), None);
    assert_eq!(of("7f00-7f01 rw-s 10000000 00:10 12 anon_inode:[io_uring]"), None, "rings are no file");
    let at = |path: Option<&str>, size| {
        pick(&all, path.map(Path::new), size).map(|m| all.iter().position(|other| other == m).unwrap())
    };
    assert_eq!(at(Some("/dev/shm/rtvirtio plc"), None), Some(0));
    assert_eq!(at(Some("/page"), None), Some(1));
    assert_eq!(at(None, Some(5000)), Some(0));
    assert_eq!(at(Some("/etc/shadow"), None), None);
    // Several matches give none.
    assert_eq!(at(None, Some(4096)), None);
    assert_eq!(at(Some("/memfd:m"), None), None);
    assert_eq!(at(None, Some(u64::MAX)), None);
}
