//! `docs/guide/libvirt.md` on cgroup v2, from its first step to its last: a real libvirtd with
//! systemd, systemd-machined and D-Bus, in the box, because the machine that runs the tests may
//! have cgroup v1.

use std::fs;
use std::path::{Path, PathBuf};

#[path = "boxed_systemd/container.rs"]
mod container;

/// Debian's packages dbus-daemon, systemd-container, libvirt-daemon, libvirt-clients and
/// libvirt-daemon-driver-qemu; modules of libvirtd come with their libraries, as programs do.
const PROGRAMS: [&str; 6] = [
    "/usr/bin/dbus-daemon",
    "/usr/lib/systemd/systemd-machined",
    "/usr/sbin/libvirtd",
    "/usr/bin/virsh",
    "/usr/lib/x86_64-linux-gnu/libvirt/connection-driver/libvirt_driver_qemu.so",
    "/usr/lib/x86_64-linux-gnu/libvirt/storage-file/libvirt_storage_file_fs.so",
];
/// libvirt's models of CPUs.
const CPU_MAP: &str = "/usr/share/libvirt/cpu_map";
const HERE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/boxed_libvirt");
const SERVICE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/systemd/rtvirtiod.service");

#[test]
#[ignore = "five minutes with both CPUs: --ignored"]
fn the_guide_of_libvirt_is_played_on_cgroup_v2() {
    let test = "the_guide_of_libvirt_is_played_on_cgroup_v2";
    let Ok(models) = fs::read_dir(CPU_MAP) else {
        return rtvirtio_testkit::skip(test, &format!("{CPU_MAP} cannot be read"));
    };
    let models = models.map(|entry| entry.unwrap().path()).filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("x86") || name == "index.xml"
    });
    let place = |dir: &str, path: &Path| format!("{dir}/{}", path.file_name().unwrap().to_string_lossy());
    let mut files: Vec<(String, PathBuf)> = models.map(|path| (place(CPU_MAP, &path), path)).collect();
    for entry in fs::read_dir(HERE).unwrap() {
        let path = entry.unwrap().path();
        files.push((place("/root", &path), path));
    }
    files.push(("/root/rtvirtiod.service".to_owned(), PathBuf::from(SERVICE)));
    let files: Vec<(&str, &Path)> =
        files.iter().map(|(place, path)| (place.as_str(), path.as_path())).collect();
    container::play(test, &PROGRAMS.map(PathBuf::from), &files);
}
