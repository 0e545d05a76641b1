//! Live migration by libvirt between two daemons, each with an I/O domain that serves the disk.

mod common;

use std::path::Path;

use common::{Iod, disk};
use rtvirtio_testkit::site::wait_for;
use rtvirtio_testkit::{Libvirt, has, unique};

/// An I/O domain and a libvirt daemon of one host.
struct Side {
    iod: Iod,
    libvirt: Libvirt,
    socket: String,
}

/// An I/O domain in this directory on a disk of another.
fn serve(dir: &Path, disk: &Path) -> Iod {
    std::fs::create_dir_all(dir).unwrap();
    let (at, disk) = (dir.display(), disk.display());
    let config = format!(
        "[[device]]\nname = \"d\"\nwindow = 4\n[[device.disk]]\nname = \"a\"\nsocket = \"{at}/a\"\n\
         path = \"{disk}\"\nmigrate = true\n"
    );
    Iod::start(dir, &config)
}

/// A VM without a system, with the lines that the guide gives for a disk of the I/O domain.
fn vm(name: &str, socket: &str) -> String {
    format!(
        "<domain type='qemu'><name>{name}</name><memory unit='MiB'>64</memory>\
         <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>\
         <vcpu>1</vcpu><os><type arch='x86_64' machine='q35'>hvm</type></os><cpu mode='maximum'/>\
         <devices><emulator>/usr/bin/qemu-system-x86_64</emulator>\
         <disk type='vhostuser' device='disk'><driver name='qemu' type='raw'/>\
         <source type='unix' path='{socket}'><reconnect enabled='yes' timeout='1'/></source>\
         <target dev='vda' bus='virtio'/></disk><memballoon model='none'/></devices></domain>"
    )
}

impl Side {
    fn is_running(&self, name: &str) -> bool {
        self.libvirt.ok(&["list", "--name"]).lines().any(|line| line.trim() == name)
    }

    fn reads(&self) -> u64 {
        self.iod.disk("a")["read"]["requests"].as_u64().unwrap()
    }

    /// Its firmware reads the disk, and keeps it.
    fn wait_for_firmware(&self, before: u64) {
        wait_for("the firmware's requests", || {
            self.iod.disk("a")["attached"] == true && self.reads() > before
        });
    }
}

#[test]
fn libvirt_moves_a_vm_between_two_io_domains() {
    let test = "libvirt_moves_a_vm_between_two_io_domains";
    if !has(test, &Libvirt::NEEDS) {
        return;
    }
    let dir = disk(16);
    let disk = dir.path().join("disk");
    let name = unique("moves");
    let dirs = ["0", "1"].map(|side| dir.path().join(side));
    let iods = dirs.each_ref().map(|dir| serve(dir, &disk));
    let first = Libvirt::start(&dirs[0]);
    let second = first.other(&dirs[1]);
    // Dropped in this order.
    let [one, two] = iods;
    let [here, there] = dirs.map(|dir| dir.join("a").display().to_string());
    let target = Side { iod: two, libvirt: second, socket: there };
    let source = Side { iod: one, libvirt: first, socket: here };
    let sides = [&source, &target];
    source.libvirt.start_domain(&name, &vm(&name, &source.socket));
    source.wait_for_firmware(0);
    for i in 0..4 {
        let (from, to) = (sides[i % 2], sides[(i + 1) % 2]);
        let before = to.reads();
        // Its own socket on each side.
        let xml = dir.path().join("there.xml");
        let now = from.libvirt.ok(&["dumpxml", "--migratable", &name]);
        std::fs::write(&xml, now.replace(&from.socket, &to.socket)).unwrap();
        let (xml, way) = (xml.display().to_string(), format!("unix://{}/way", dir.path().display()));
        let uri = to.libvirt.uri();
        from.libvirt.ok(&["migrate", "--live", "--xml", &xml, &name, &uri, "--migrateuri", &way]);
        assert!(!from.is_running(&name) && to.is_running(&name), "migration {i}");
        wait_for("the disk there", || to.iod.disk("a")["attached"] == true);
        assert_eq!(from.iod.disk("a")["connected"], false, "migration {i}");
        to.libvirt.ok(&["reset", &name]);
        to.wait_for_firmware(before);
    }
}
