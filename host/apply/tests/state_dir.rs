//! Files and links that another user could plant in, or in place of, the state directory.

use std::fs::{self, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, lchown, symlink};
use std::path::Path;
use std::time::Duration;

use rtvirtio_apply::{ApplyError, JOURNAL_FILE, Machine, NoGuests, Session, StateDir, status};
use rtvirtio_kernel::Root;
use rtvirtio_testkit::skip;

const OTHER: u32 = 65_534;

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// Opens the directory in each way; returns the error text.
fn refused(dir: &Path) -> String {
    let root = Root::new(dir.join("root"));
    let errors = [
        StateDir::open(dir).unwrap_err(),
        StateDir::find(dir).unwrap_err(),
        StateDir::open_or_create(dir).unwrap_err(),
        Session::open(dir).unwrap_err(),
        status(dir, &Machine::new(&root, &NoGuests)).unwrap_err(),
    ];
    let mut texts: Vec<String> = errors
        .iter()
        .map(|e| {
            assert!(matches!(e, ApplyError::UntrustedState { .. }), "{e:?}");
            e.to_string()
        })
        .collect();
    texts.dedup();
    assert_eq!(texts.len(), 1, "{texts:?}");
    texts.remove(0)
}

#[test]
fn a_directory_that_others_can_write_to_is_refused() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    for mode in [0o777, 0o1777, 0o775, 0o720, 0o702] {
        chmod(dir.path(), mode);
        let why = refused(dir.path());
        assert!(why.contains(&format!("mode {mode:04o}")) && why.contains("chmod go-w"), "{why}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing was made in it");
    for mode in [0o755, 0o700, 0o711] {
        chmod(dir.path(), mode);
        StateDir::open_or_create(dir.path()).unwrap();
        assert_eq!(dir.path().metadata().unwrap().mode() & 0o7777, mode, "the mode is left");
    }
}

#[test]
fn a_directory_of_another_user_is_refused() {
    const NAME: &str = "a_directory_of_another_user_is_refused";
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let theirs = dir.path().join("theirs");
    fs::create_dir(&theirs).unwrap();
    if let Err(e) = chown(&theirs, Some(OTHER), None) {
        return skip(NAME, &format!("chown: {e}"));
    }
    assert!(refused(&theirs).contains("belongs to user 65534"));
    // A link of another user to a directory of ours.
    let ours = dir.path().join("ours");
    fs::create_dir(&ours).unwrap();
    let link = dir.path().join("link");
    symlink(&ours, &link).unwrap();
    StateDir::open(&link).unwrap();
    lchown(&link, Some(OTHER), None).unwrap();
    assert!(refused(&link).contains("symbolic link of user 65534"));
    assert_eq!(fs::read_dir(&ours).unwrap().count(), 0);
    // A file of another user in a directory of ours.
    let state = StateDir::open(&ours).unwrap();
    fs::write(ours.join(JOURNAL_FILE), "{}").unwrap();
    chown(ours.join(JOURNAL_FILE), Some(OTHER), None).unwrap();
    for error in [state.read(JOURNAL_FILE).unwrap_err(), state.open_file(JOURNAL_FILE, 0o600).unwrap_err()] {
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
    }
}

#[test]
fn a_symbolic_link_in_it_is_not_followed() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let target = dir.path().join("target");
    fs::write(&target, "precious").unwrap();
    let path = dir.path().join("state");
    let state = StateDir::open_or_create(&path).unwrap();
    // Removed and created anew: a new file that was left half written.
    symlink(&target, path.join("journal.json.new")).unwrap();
    state.replace("journal.json", 0o600, b"new").unwrap();
    assert_eq!(fs::read_to_string(path.join("journal.json")).unwrap(), "new");
    assert!(!state.exists("journal.json.new").unwrap());
    // A link is replaced.
    fs::remove_file(path.join("journal.json")).unwrap();
    symlink(&target, path.join("journal.json")).unwrap();
    let read = state.read("journal.json").unwrap_err();
    assert_eq!(read.kind(), io::ErrorKind::InvalidData, "{read}");
    state.replace("journal.json", 0o600, b"newer").unwrap();
    assert!(!path.join("journal.json").is_symlink());
    // Refused: a lock or a log, whose content is to stay.
    for to in [&target, &dir.path().join("nothing")] {
        symlink(to, path.join("log")).unwrap();
        let result = state.open_file("log", 0o600);
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert!(state.exists("log").unwrap(), "also one that leads nowhere");
        state.remove("log").unwrap();
        assert!(!state.exists("log").unwrap());
    }
    symlink(&target, path.join("lock")).unwrap();
    let refused = || match Session::open(&path) {
        Err(ApplyError::State { source, .. }) => source.kind() == io::ErrorKind::InvalidData,
        _ => false,
    };
    assert!(refused(), "a symbolic link");
    fs::remove_file(path.join("lock")).unwrap();
    fs::hard_link(&target, path.join("lock")).unwrap();
    assert!(refused(), "a hard link");
    assert_eq!(fs::read_to_string(&target).unwrap(), "precious");
    assert!(!dir.path().join("nothing").exists());
}

#[test]
fn only_regular_files_by_their_names_are_opened() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let state = StateDir::open_or_create(dir.path().join("state")).unwrap();
    assert!(!state.exists("a").unwrap());
    assert_eq!(state.read("a").unwrap_err().kind(), io::ErrorKind::NotFound);
    state.remove("a").unwrap();
    let fifo = state.path().join("fifo");
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    // The open does not wait for the other end of the FIFO.
    let (done, finished) = std::sync::mpsc::channel();
    let path = state.path().to_owned();
    std::thread::spawn(move || {
        let state = StateDir::open(path).unwrap();
        done.send((state.read("fifo").unwrap_err(), state.open_file("fifo", 0o600).unwrap_err())).unwrap();
    });
    let (read, open) = finished.recv_timeout(Duration::from_secs(60)).unwrap();
    assert_eq!((read.kind(), open.kind()), (io::ErrorKind::InvalidData, io::ErrorKind::InvalidData));
    for name in ["", ".", "..", "/etc/passwd", "a/b", "../a", "a/", "./a"] {
        assert_eq!(state.read(name).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name}");
        assert_eq!(state.create_file(name, 0o600).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name}");
        assert_eq!(state.remove(name).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{name}");
    }
    state.create_file("file", 0o600).unwrap().write_all(b"one").unwrap();
    state.open_file("file", 0o600).unwrap().write_all(b"two").unwrap();
    assert_eq!(state.read("file").unwrap(), b"two");
    assert_eq!(state.path().join("file").metadata().unwrap().mode() & 0o7777, 0o600);
    assert!(matches!(StateDir::find(dir.path().join("none")), Ok(None)));
}
