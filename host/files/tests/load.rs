//! Unreadable files, and errors without a line.

use std::io::{self, Write};

use rtvirtio_files::{load_spec, load_twin};
use rtvirtio_spec::MAX_FILE_BYTES;
use rtvirtio_twin::ProfileError;

#[test]
fn a_missing_file_is_one_clear_error() {
    let errors = load_spec("no/such/spec.toml").unwrap_err();
    let expected = "error: cannot read the spec file: No such file or directory (os error 2)\n \
                    --> no/such/spec.toml\n  = help: check the path; examples/ holds specs to start from";
    assert_eq!(errors.to_string(), expected);
    let json = serde_json::to_value(&errors).unwrap();
    assert_eq!(json[0]["file"], "no/such/spec.toml");
    assert!(json[0]["line"].is_null() && json[0]["column"].is_null());
}

#[test]
fn a_directory_is_no_spec() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let text = load_spec(dir.path()).unwrap_err().to_string();
    assert!(text.contains("Is a directory") && text.contains("give the path of a spec file in it"), "{text}");
}

#[test]
fn an_endless_file_is_not_read_to_its_end() {
    let text = load_spec("/dev/zero").unwrap_err().to_string();
    assert!(text.contains("no regular file"), "{text}");
    // A size of 0 that is not true.
    let text = load_spec("/proc/kallsyms").unwrap_err().to_string();
    assert!(text.contains("larger than 1 MiB"), "{text}");
}

/// Opening a FIFO would block a service for ever.
#[test]
fn a_fifo_is_not_waited_for() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let (fifo, link) = (dir.path().join("x.toml"), dir.path().join("link.toml"));
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    std::os::unix::fs::symlink(&fifo, &link).unwrap();
    for path in [&fifo, &link] {
        let text = load_spec(path).unwrap_err().to_string();
        assert!(text.contains("FIFO") && text.contains("regular file"), "{text}");
    }
    // A link to a file is followed.
    let file = dir.path().join("file.toml");
    std::fs::write(&file, include_str!("../../../examples/fig7.toml")).unwrap();
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    assert_eq!(load_spec(&link).unwrap().vms().len(), 3);
}

#[test]
fn the_largest_file_is_read_whole() {
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("largest.toml");
    let mut file = std::fs::File::create(&path).unwrap();
    let mut text = include_str!("../../../examples/fig7.toml").to_owned();
    text.push('#');
    text.push_str(&"x".repeat(MAX_FILE_BYTES - text.len()));
    file.write_all(text.as_bytes()).unwrap();
    assert_eq!(load_spec(&path).unwrap().vms().len(), 3);
    file.write_all(b"x").unwrap();
    assert!(load_spec(&path).unwrap_err().to_string().contains("larger than 1 MiB"));
}

#[test]
fn a_file_name_cannot_steer_the_terminal() {
    assert!(!load_spec("a\u{1b}[2J.toml").unwrap_err().to_string().contains('\u{1b}'));
}

#[test]
fn a_profile_is_a_built_in_name_or_a_regular_file() {
    for endless in ["/dev/zero", "/proc/kallsyms"] {
        let e = load_twin(endless).unwrap_err();
        assert!(
            matches!(&e, ProfileError::Unknown { source, .. } if source.kind() == io::ErrorKind::InvalidInput),
            "{e}"
        );
    }
    let e = load_twin("qlc").unwrap_err().to_string();
    assert!(e.contains("qlc-nvme") && e.ends_with("No such file or directory (os error 2)"), "{e}");
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let path = dir.path().join("own.toml");
    std::fs::write(&path, include_str!("../../../core/twin/profiles/emmc.toml")).unwrap();
    assert_eq!(load_twin(path.to_str().unwrap()).unwrap(), load_twin("emmc").unwrap());
}
