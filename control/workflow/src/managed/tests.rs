use rtvirtio_testkit::tempdir;

use super::*;
use crate::Kind;

/// A node with the files that Proxmox VE has for a VM, below a directory.
struct Node(tempfile::TempDir);

impl Node {
    fn new() -> Self {
        let node = Self(tempdir().unwrap());
        for dir in ["proc", "etc/pve/qemu-server", "var/run/qemu-server"] {
            fs::create_dir_all(node.0.path().join(dir)).unwrap();
        }
        node
    }

    fn write(&self, path: &str, text: &str) {
        crate::fixtures::put(&self.root(), path, text);
    }

    fn root(&self) -> Root {
        Root::new(self.0.path())
    }
}

#[test]
fn a_vm_of_proxmox_is_its_pid_files_process_and_no_other() {
    let node = Node::new();
    let missing = proxmox(&node.root(), 100).unwrap_err();
    assert_eq!(missing.kind(), Kind::File, "{missing}");
    assert!(missing.to_string().contains("qm list"), "{missing}");
    node.write("etc/pve/qemu-server/100.conf", "agent: 1\nscsi0: local-lvm:vm-100-disk-0,size=32G\n");
    let stopped = proxmox(&node.root(), 100).unwrap_err();
    assert_eq!(
        (stopped.kind(), stopped.to_string().as_str()),
        (Kind::NotRunning, "VM 100 is stopped: `qm start 100`")
    );
    node.write("var/run/qemu-server/100.pid", "4711\n");
    // The number is another process's by now.
    node.write("proc/4711/cmdline", "/usr/bin/kvm\0-id\x001000\0");
    assert_eq!(proxmox(&node.root(), 100).unwrap_err().kind(), Kind::NotRunning);
    node.write("proc/4711/cmdline", "/usr/bin/kvm\0-id\x00100\0-name\0plc,debug-threads=on\0");
    let exe = node.0.path().join("proc/4711/exe");
    // Neither another program with these words nor another user's QEMU.
    for (program, user) in [("/usr/bin/sleep", 0), ("/usr/bin/qemu-system-x86_64", 1000)] {
        let _ = fs::remove_file(&exe);
        std::os::unix::fs::symlink(program, &exe).unwrap();
        node.write("proc/4711/status", &format!("Uid:\t{user}\t{user}\t{user}\t{user}\n"));
        assert_eq!(proxmox(&node.root(), 100).unwrap_err().kind(), Kind::NotRunning, "{program}");
    }
    fs::remove_file(&exe).unwrap();
    std::os::unix::fs::symlink("/usr/bin/qemu-system-x86_64 (deleted)", &exe).unwrap();
    node.write("proc/4711/status", "Uid:\t0\t0\t0\t0\n");
    let vm = proxmox(&node.root(), 100).unwrap();
    assert_eq!((vm.pid, vm.agent), (4711, None));
    assert_eq!(vm.qmp, PathBuf::from("/var/run/qemu-server/100.qmp"));
    node.write("var/run/qemu-server/100.qga", "");
    assert_eq!(proxmox(&node.root(), 100).unwrap().agent, Some("/var/run/qemu-server/100.qga".into()));
    node.write("var/run/qemu-server/100.pid", "none");
    assert!(proxmox(&node.root(), 100).is_err());
}

#[test]
fn a_host_without_proxmox_is_said() {
    let dir = tempdir().unwrap();
    let e = proxmox(&Root::new(dir.path()), 100).unwrap_err();
    assert!(e.kind() == Kind::File && e.to_string().contains("no node of Proxmox VE"), "{e}");
}
