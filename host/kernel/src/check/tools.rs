//! Devices and programs that the lab and the measurements use.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::Finding;
use crate::Root;

/// Directories where distributions put programs; `/usr/libexec` is where RHEL keeps `qemu-kvm`.
const BIN: [&str; 6] = ["/usr/local/bin", "/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/libexec"];

/// Names of QEMU's program, in the order in which they are looked for.
const QEMU: [&str; 3] = ["qemu-system-x86_64", "qemu-system-aarch64", "qemu-kvm"];

/// Path of the QEMU of this host; `None` where none is installed.
#[must_use]
pub fn qemu_program(root: &Root) -> Option<PathBuf> {
    installed(root, &QEMU)
}

pub(super) fn check(root: &Root, found: &mut Vec<Finding>) {
    device(root, found, "fuse", "/dev/fuse", "the lab's twin device is a FUSE file", "modprobe fuse");
    device(
        root,
        found,
        "loop",
        "/dev/loop-control",
        "the lab's twin device is a loop device",
        "modprobe loop",
    );
    program(
        root,
        found,
        "fio",
        &["fio"],
        "profile, verify and the lab run their workloads with it",
        "apt-get install fio",
    );
    program(root, found, "qemu", &QEMU, "the lab's VMs run on it", "apt-get install qemu-system-x86");
    program(
        root,
        found,
        "losetup",
        &["losetup"],
        "it makes the lab's loop device",
        "apt-get install util-linux",
    );
}

fn device(root: &Root, found: &mut Vec<Finding>, id: &str, path: &str, why: &str, remedy: &str) {
    found.push(match root.exists(path) {
        Ok(true) => Finding::ok(id, format!("{path} exists"), why),
        Ok(false) => Finding::warn(id, format!("no {path}"), why, remedy),
        Err(e) => Finding::unknown(id, &e, why),
    });
}

fn program(root: &Root, found: &mut Vec<Finding>, id: &str, names: &[&str], why: &str, remedy: &str) {
    found.push(match installed(root, names) {
        None => Finding::warn(id, format!("{} is not installed", names[0]), why, remedy),
        Some(path) => {
            let version = if root.is_real() { version(&path) } else { None };
            let what = version.unwrap_or_else(|| "installed".into());
            Finding::ok(id, format!("{}: {what}", path.display()), why)
        }
    });
}

/// Path of the first of these programs that is installed.
fn installed(root: &Root, names: &[&str]) -> Option<PathBuf> {
    names
        .iter()
        .find_map(|name| BIN.iter().map(|dir| Path::new(dir).join(name)).find(|path| root.at(path).is_file()))
}

/// First line that the program prints for `--version`.
fn version(path: &PathBuf) -> Option<String> {
    let output = Command::new(path).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().next().map(|l| l.trim().to_owned()).filter(|l| !l.is_empty())
}
