use super::*;

#[test]
fn reads_and_overwrites_whole_files_below_the_root() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("sys")).unwrap();
    fs::write(dir.path().join("sys/knob"), "a long old value\n").unwrap();
    let root = Root::new(dir.path());
    root.write("/sys/knob", "new").unwrap();
    assert_eq!(root.read("/sys/knob").unwrap(), "new");
    assert_eq!(root.list("/sys").unwrap(), ["knob"]);
    assert_eq!(root.host_path(&dir.path().join("sys/knob")), Path::new("/sys/knob"));
    assert!(!root.is_real());
}

#[test]
fn a_missing_file_is_never_made() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::new(dir.path());
    let error = root.write("/knob", "1").unwrap_err();
    assert!(error.is_gone(), "{error}");
    assert!(
        matches!(&error, HostError::Write { path, value, .. } if path.ends_with("knob") && value == "1"),
        "{error}"
    );
    assert!(!root.exists("/knob").unwrap());
    assert_eq!(root.read_optional("/knob").unwrap(), None);
    assert!(root.list("/none").unwrap_err().is_gone());
    assert!(root.inode("/none").unwrap_err().is_gone());
}

#[test]
fn what_cannot_be_looked_at_is_not_absent() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let root = Root::new(dir.path());
    std::fs::write(root.at("/file"), "").unwrap();
    assert!(root.exists("/file").unwrap());
    assert!(!root.exists("/file/below").unwrap(), "there can be nothing below a file");
    // ELOOP and ENAMETOOLONG stand for all errors that show nothing about the file itself.
    std::os::unix::fs::symlink("loop", root.at("/loop")).unwrap();
    for path in ["/loop".to_owned(), format!("/{}", "x".repeat(300))] {
        let error = root.exists(&path).unwrap_err();
        assert!(!error.is_gone() && matches!(error, HostError::Read { .. }), "{error}");
    }
}

#[test]
fn only_three_error_numbers_mean_gone() {
    use rustix::io::Errno;
    for errno in [Errno::NOENT, Errno::NODEV, Errno::SRCH] {
        assert!(crate::is_gone(&errno.into()), "{errno}");
    }
    let others = [
        Errno::IO,
        Errno::ACCESS,
        Errno::PERM,
        Errno::MFILE,
        Errno::NFILE,
        Errno::NOMEM,
        Errno::INTR,
        Errno::NXIO,
        Errno::BUSY,
        Errno::INVAL,
        Errno::STALE,
        Errno::LOOP,
        Errno::TIMEDOUT,
        Errno::CONNRESET,
        Errno::PIPE,
        Errno::CONNREFUSED,
        Errno::AGAIN,
        Errno::NOTDIR,
    ];
    for errno in others {
        assert!(!crate::is_gone(&errno.into()), "{errno}");
    }
}
