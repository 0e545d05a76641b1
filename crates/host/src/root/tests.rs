use super::*;

#[test]
fn reads_and_overwrites_whole_files_below_the_root() {
    let dir = tempfile::tempdir().unwrap();
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
    let dir = tempfile::tempdir().unwrap();
    let root = Root::new(dir.path());
    let error = root.write("/knob", "1").unwrap_err();
    assert!(error.is_gone(), "{error}");
    assert!(error.to_string().contains("cannot write `1` to /knob"), "{error}");
    assert!(!root.exists("/knob"));
    assert_eq!(root.read_optional("/knob").unwrap(), None);
    assert!(root.list("/none").unwrap_err().is_gone());
    assert!(root.inode("/none").unwrap_err().is_gone());
}
