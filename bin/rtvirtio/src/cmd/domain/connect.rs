//! QEMU options and libvirt XML for the disks and ports of the I/O domain, ready to be pasted.

use std::fmt::Write as _;

use rtvirtio_domain_config::{Disk, File, Port};
use rtvirtio_text::{qemu_value, shell_word, terminal, xml};

/// Options for each VM's QEMU or libvirt.
pub fn how_to_connect(file: &File) -> String {
    let mut s = String::from(
        "Each VM needs shared memory, and its disk and port, QEMU's way:\n  \
         -object memory-backend-memfd,id=mem,size=MEMORY,share=on -machine memory-backend=mem\n",
    );
    let disks: Vec<_> = file.devices.iter().flat_map(|d| &d.disks).collect();
    let ports: Vec<_> = file.networks.iter().flat_map(|n| &n.ports).collect();
    // Writing to a String cannot fail.
    for disk in &disks {
        let _ = writeln!(s, "  {}: {}", terminal(&disk.name, false), disk_options(disk));
    }
    for port in &ports {
        let _ = writeln!(s, "  {}: {}", terminal(&port.name, false), port_options(port));
    }
    s.push_str(
        "or libvirt's:\n  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>\n",
    );
    for disk in &disks {
        let _ = writeln!(s, "  {}: {}", terminal(&disk.name, false), disk_xml(disk));
    }
    for port in &ports {
        let _ = writeln!(s, "  {}: {}", terminal(&port.name, false), port_xml(port));
    }
    s
}

/// Without a number of queues QEMU asks for one per vCPU, and does not start where the disk has
/// fewer.
fn disk_options(disk: &Disk) -> String {
    let chardev = chardev("disk0", &disk.socket);
    format!("-chardev {chardev} -device vhost-user-blk-pci,chardev=disk0,num-queues={}", disk.queues)
}

fn port_options(port: &Port) -> String {
    let chardev = chardev("net0", &port.socket);
    format!(
        "-chardev {chardev} -netdev vhost-user,id=net0,chardev=net0 -device virtio-net-pci,netdev=net0,mac={}",
        port.mac
    )
}

fn disk_xml(disk: &Disk) -> String {
    format!(
        "<disk type='vhostuser' device='disk'><driver name='qemu' type='raw' queues='{}'/><source type='unix' path='{}'>\
         <reconnect enabled='yes' timeout='1'/></source><target dev='vda' bus='virtio'/></disk>",
        disk.queues,
        xml(&disk.socket.display().to_string())
    )
}

fn port_xml(port: &Port) -> String {
    format!(
        "<interface type='vhostuser'><mac address='{}'/><source type='unix' path='{}' mode='client'>\
         <reconnect enabled='yes' timeout='1'/></source><model type='virtio'/></interface>",
        port.mac,
        xml(&port.socket.display().to_string())
    )
}

/// Quotes an option of QEMU for a shell; QEMU requires commas in a value to be doubled.
fn chardev(id: &str, socket: &std::path::Path) -> String {
    let path = socket.display().to_string();
    terminal(&shell_word(&format!("socket,id={id},path={},reconnect=1", qemu_value(&path))), false)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn shown(name: &str, queues: u16) -> String {
        let text = format!(
            "[[device]]\nname = \"d\"\n[[device.disk]]\nname = \"plc\"\nsocket = \"/run/{name}\"\npath = \"/dev/x\"\nqueues = {queues}\n\
             [[network]]\nname = \"n\"\n[[network.port]]\nname = \"plc\"\nsocket = \"/net/{name}\"\ntap = \"t\"\nmac = \"52:54:00:00:00:01\"\n"
        );
        how_to_connect(&File::parse(Path::new("x"), &text).unwrap())
    }

    #[test]
    fn the_number_of_queues_is_the_files() {
        let text = shown("plc.sock", 4);
        let disk = "  plc: -chardev socket,id=disk0,path=/run/plc.sock,reconnect=1 -device vhost-user-blk-pci,chardev=disk0,num-queues=4\n";
        assert!(text.contains(disk), "{text}");
        assert!(text.contains("type='raw' queues='4'/>"), "{text}");
    }

    #[test]
    fn names_are_those_of_each_language() {
        let text = shown("a,b & it's <c>", 1);
        for (id, dir) in [("disk0", "run"), ("net0", "net")] {
            let option = format!("-chardev \"socket,id={id},path=/{dir}/a,,b & it's <c>,reconnect=1\"");
            assert!(text.contains(&option), "{text}");
            assert!(text.contains(&format!("path='/{dir}/a,b &amp; it&#39;s &lt;c&gt;'")), "{text}");
        }
        assert!(!shown("x\\u001b[31m", 1).contains('\u{1b}'));
    }
}
