use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use rtvirtio_testkit::{Need, has};
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(rtvirtio_testkit::tempdir().unwrap())
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn file(&self, name: &str, text: &str) -> PathBuf {
        fs::write(self.at(name), text).unwrap();
        self.at(name)
    }

    fn fifo(&self, name: &str) -> PathBuf {
        mknodat(CWD, self.at(name), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        self.at(name)
    }

    fn link(&self, name: &str, to: &Path) -> PathBuf {
        symlink(to, self.at(name)).unwrap();
        self.at(name)
    }
}

fn refusal<T: std::fmt::Debug>(result: io::Result<T>) -> Refusal {
    Refusal::find_in(&result.unwrap_err()).unwrap().clone()
}

/// Without the flags of `open_config` this waits forever.
#[test]
fn a_configuration_is_a_regular_file_of_a_bounded_size() {
    let place = Place::new();
    let file = place.file("x.toml", "12345");
    assert_eq!(read_config(&file, 5).unwrap(), b"12345");
    assert_eq!(read_config(place.link("link.toml", &file), 5).unwrap(), b"12345");
    assert_eq!(refusal(read_config(&file, 4)), Refusal::TooLarge { limit: 4 });
    let fifo = place.fifo("fifo.toml");
    for path in [&fifo, &place.link("to-fifo.toml", &fifo)] {
        assert_eq!(refusal(read_config(path, 5)), Refusal::NotRegular { kind: "FIFO" });
    }
    assert_eq!(refusal(read_config("/dev/zero", 5)), Refusal::NotRegular { kind: "device" });
    assert_eq!(refusal(read_config(place.0.path(), 5)), Refusal::NotRegular { kind: "directory" });
    assert_eq!(read_config(place.at("none"), 5).unwrap_err().kind(), io::ErrorKind::NotFound);
    let text = read_config_text(place.file("latin1", "x"), 5).unwrap();
    assert_eq!(text, "x");
    fs::write(place.at("latin1"), [0xe9]).unwrap();
    let error = read_config_text(place.at("latin1"), 5).unwrap_err();
    assert_eq!((error.kind(), Refusal::find_in(&error)), (io::ErrorKind::InvalidData, None));
    // The limit is not applied to the reported size.
    assert!(!read_config("/proc/self/status", CONFIG_LIMIT).unwrap().is_empty());
}

#[test]
fn the_user_of_a_command_may_name_a_pipe() {
    let place = Place::new();
    assert_eq!(read_named(place.file("x", "12345"), 5).unwrap(), b"12345");
    let fifo = place.fifo("fifo");
    std::thread::scope(|scope| {
        // Opened before a writer, or after: each waits for the other.
        let reading = scope.spawn(|| read_named(&fifo, 6));
        let mut writer = OpenOptions::new().write(true).open(&fifo).unwrap();
        writer.write_all(b"123").unwrap();
        writer.write_all(b"456").unwrap();
        drop(writer);
        assert_eq!(reading.join().unwrap().unwrap(), b"123456");
    });
    // An endless file is read up to the limit.
    assert_eq!(refusal(read_named("/dev/zero", 5)), Refusal::TooLarge { limit: 5 });
    assert_eq!(refusal(read_named(place.0.path(), 5)), Refusal::NotRegular { kind: "directory" });
    let (read, write) = rustix::pipe::pipe().unwrap();
    rustix::io::write(&write, b"12").unwrap();
    drop(write);
    let named = format!("/dev/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&read));
    assert_eq!(read_named_text(named, 5).unwrap(), "12");
}

#[test]
fn a_lock_is_for_its_user_alone() {
    let place = Place::new();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    drop(lock_file(place.at("new")).unwrap());
    assert_eq!(mode(&place.at("new")), 0o600);
    // As a different umask would have created it.
    let old = place.file("old", "4711");
    fs::set_permissions(&old, fs::Permissions::from_mode(0o666)).unwrap();
    drop(lock_file(&old).unwrap());
    assert_eq!((mode(&old), fs::read_to_string(&old).unwrap()), (0o600, "4711".to_owned()));

    assert_eq!(refusal(lock_file(place.link("link", &place.at("elsewhere")))), Refusal::Link);
    assert!(!place.at("elsewhere").exists());
    let fifo = place.fifo("fifo");
    assert_eq!(refusal(lock_file(&fifo)), Refusal::NotRegular { kind: "FIFO" });
    assert_eq!(refusal(append_own(&fifo, 0o640)), Refusal::NotRegular { kind: "FIFO" });
    fs::hard_link(&old, place.at("second")).unwrap();
    assert_eq!(refusal(lock_file(&old)), Refusal::HardLink);
    assert_eq!(refusal(open_lock(&old)), Refusal::HardLink);
    assert_eq!(open_lock(place.at("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    assert_eq!(refusal(read_own(place.at("link"), 5)), Refusal::Link);
    assert_eq!(read_own(place.file("own", "1"), 5).unwrap(), b"1");
}

#[test]
fn a_file_of_another_user_is_refused() {
    if !has("a_file_of_another_user_is_refused", &[Need::Root]) {
        return;
    }
    let place = Place::new();
    let theirs = place.file("theirs", "");
    std::os::unix::fs::chown(&theirs, Some(65534), None).unwrap();
    assert_eq!(refusal(lock_file(&theirs)), Refusal::Owner { uid: 65534 });
    assert_eq!(refusal(read_own(&theirs, 5)), Refusal::Owner { uid: 65534 });
    assert_eq!(read_config(&theirs, 5).unwrap(), b"");
}
