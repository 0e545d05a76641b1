use rtvirtio_units::Bytes;

use super::*;
use crate::image::GuestImage;

fn image() -> GuestImage {
    GuestImage { kernel: "/nonexistent/k".into(), initrd: "/nonexistent/i".into(), release: "r".into() }
}

fn config(name: &str, disk: &Path, size: u64) -> QemuConfig {
    let disk = DiskRegion { path: disk.to_path_buf(), offset: Bytes(4096), size: Bytes(size) };
    QemuConfig::new(name, image(), disk, Path::new("/run/rtvirtio-test"))
}

/// On a real file system: tmpfs may not do direct I/O.
fn disk_file() -> tempfile::NamedTempFile {
    let file = tempfile::Builder::new()
        .prefix(&format!("rtvirtio-{}-", rtvirtio_testkit::unique("disk")))
        .tempfile_in("/var/tmp")
        .unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    file
}

#[test]
fn bad_requests_are_told_before_anything_starts() {
    let file = disk_file();
    for name in ["", "-x", "a,b", "a/b", "a b", &"x".repeat(41)] {
        let error = args::check(&config(name, file.path(), 4096)).unwrap_err();
        assert!(matches!(error, QemuError::Name { .. }), "{error}");
    }
    args::check(&config("vm-1_a.b", file.path(), (1 << 20) - 4096)).unwrap();
    let detail = |error: QemuError| match error {
        QemuError::Disk { detail, .. } => detail,
        other => panic!("{other}"),
    };
    let error = |disk: &Path, size| detail(args::check(&config("vm", disk, size)).unwrap_err());
    assert!(error(file.path(), 1 << 20).contains("beyond its end at 1048576"));
    assert!(error(file.path(), u64::MAX - 4095).contains("beyond its end"));
    assert!(error(file.path(), 0).contains("not zero"));
    assert!(error(file.path(), 1000).contains("multiples of 4096"));
    assert!(error(Path::new("/nonexistent/disk"), 4096).contains("must exist"));
    let mut long = config("vm", file.path(), 4096);
    long.run_dir = PathBuf::from(format!("/run/{}", "x".repeat(110)));
    assert!(args::check(&long).unwrap_err().to_string().contains("shorter run directory"));
}

#[test]
fn handle_survives_json() {
    let process = ProcessId::find(std::process::id()).unwrap().unwrap();
    let handle = QemuHandle { name: "vm1".into(), process, run_dir: "/run/x".into() };
    let text = serde_json::to_string(&handle).unwrap();
    assert_eq!(serde_json::from_str::<QemuHandle>(&text).unwrap(), handle);
    assert!(handle.is_alive());
}

#[test]
fn handle_of_a_gone_process_is_refused_and_killing_it_touches_nobody() {
    let me = ProcessId::find(std::process::id()).unwrap().unwrap();
    // Our own id with another start time: a reused process id.
    let process = ProcessId { pid: me.pid, start_time: me.start_time - 1 };
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let handle = QemuHandle { name: "vm1".into(), process, run_dir: dir.path().join("run") };
    assert!(matches!(QemuGuest::attach(&handle), Err(QemuError::Gone { .. })));
    handle.kill().unwrap();
}

#[test]
fn vanished_cgroup_is_named_and_nothing_is_left() {
    let file = disk_file();
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let mut config = config("vm1", file.path(), 4096);
    config.run_dir = dir.path().join("run");
    config.cgroup_procs = vec!["/sys/fs/cgroup/rtvirtio-none/cgroup.procs".into()];
    let error = QemuGuest::start(&config).unwrap_err();
    assert!(error.to_string().contains("/sys/fs/cgroup/rtvirtio-none/cgroup.procs"), "{error}");
    assert!(!dir.path().join("run").exists());
}

#[test]
fn qemu_that_ends_at_once_is_told_with_its_words() {
    if crate::image::find_program(rtvirtio_vmm::probe::QEMU).is_none() {
        return rtvirtio_testkit::skip("qemu_that_ends_at_once_is_told_with_its_words", "no QEMU");
    }
    let file = disk_file();
    let dir = rtvirtio_testkit::tempdir().unwrap();
    let mut config = config("vm1", file.path(), 4096);
    config.run_dir = dir.path().join("run");
    // The image does not exist, so QEMU ends with an error of its own.
    let error = QemuGuest::start(&config).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, QemuError::Gone { .. }) && text.contains("/nonexistent/"), "{text}");
    assert!(text.contains("exit status: 1"), "{text}");
    assert!(!dir.path().join("run").exists());
}
