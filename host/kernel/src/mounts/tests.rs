use super::*;
use crate::test_root::TestRoot;

fn root_with(text: &str) -> TestRoot {
    TestRoot::new(&[("/proc/self/mountinfo", text)])
}

#[test]
fn lines_with_and_without_optional_fields_and_with_escapes() {
    let root = root_with(
        "38 31 0:35 / /sys/fs/cgroup/blkio rw,relatime shared:5 master:1 - cgroup cgroup rw,blkio\n\
         40 1 8:1 / /mnt/a\\040b rw - ext4 /dev/sda1 rw,discard\n",
    );
    let m = mounts(&root).unwrap();
    assert_eq!(
        (m[0].fs.as_str(), m[0].options.as_slice()),
        ("cgroup", &["rw".to_owned(), "blkio".to_owned()][..])
    );
    assert_eq!(m[1].point, PathBuf::from("/mnt/a b"));
    assert_eq!((m[1].dev.as_str(), m[1].source.as_str()), ("8:1", "/dev/sda1"));
}

#[test]
fn a_broken_line_and_a_missing_file_are_errors() {
    let root = root_with("nonsense\n");
    assert!(mounts(&root).unwrap_err().to_string().contains("not a mountinfo line"));
    assert!(mounts(&Root::new("/nonexistent")).unwrap_err().is_gone());
}
