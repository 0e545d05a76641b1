//! QEMU options and libvirt XML for the disks and ports of the I/O domain, ready to be pasted.

use std::fmt::Write as _;

use rtvirtio_domain_config::{DEFAULT_QUEUES, Disk, File, Port};
use rtvirtio_text::{qemu_value, shell_word, terminal, xml};
use rtvirtio_vmm::Reconnect;

/// Options for each VM's QEMU or libvirt, with the key that this host's QEMU takes; with that of
/// new ones, and a word about the old key, where `reconnect` is `None`.
pub fn how_to_connect(file: &File, reconnect: Option<Reconnect>) -> String {
    let mut s = String::from("Each VM needs shared memory, and its disk and port, QEMU's way");
    if reconnect.is_none() {
        let (new, old) = (Reconnect::Milliseconds.option(), Reconnect::Seconds.option());
        // Writing to a String cannot fail.
        let _ = write!(s, " ({new} from QEMU 9.2 on, {old} before)");
    }
    s.push_str(":\n  -object memory-backend-memfd,id=mem,size=MEMORY,share=on -machine memory-backend=mem\n");
    let key = reconnect.unwrap_or(Reconnect::Milliseconds);
    let disks: Vec<_> = file.devices.iter().flat_map(|d| &d.disks).collect();
    let ports: Vec<_> = file.networks.iter().flat_map(|n| &n.ports).collect();
    for disk in &disks {
        let _ = writeln!(s, "  {}: {}", terminal(&disk.name, false), disk_options(disk, key));
    }
    for port in &ports {
        let _ = writeln!(s, "  {}: {}", terminal(&port.name, false), port_options(port, key));
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

/// Without a number of queues QEMU asks for one per vCPU. With one in the file QEMU has to know it:
/// it does not start where the disk has fewer than it asks for.
fn disk_options(disk: &Disk, key: Reconnect) -> String {
    let chardev = chardev("disk0", &disk.socket, key);
    let queues = declared_queues(disk).map(|queues| format!(",num-queues={queues}")).unwrap_or_default();
    format!("-chardev {chardev} -device vhost-user-blk-pci,chardev=disk0{queues}")
}

/// The number of queues where it is not the default.
fn declared_queues(disk: &Disk) -> Option<u16> {
    (disk.queues != DEFAULT_QUEUES).then_some(disk.queues)
}

fn port_options(port: &Port, key: Reconnect) -> String {
    let chardev = chardev("net0", &port.socket, key);
    format!(
        "-chardev {chardev} -netdev vhost-user,id=net0,chardev=net0 -device virtio-net-pci,netdev=net0,mac={}",
        port.mac
    )
}

fn disk_xml(disk: &Disk) -> String {
    let queues = declared_queues(disk).map(|queues| format!(" queues='{queues}'")).unwrap_or_default();
    format!(
        "<disk type='vhostuser' device='disk'><driver name='qemu' type='raw'{queues}/><source type='unix' path='{}'>\
         <reconnect enabled='yes' timeout='1'/></source><target dev='vda' bus='virtio'/></disk>",
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
fn chardev(id: &str, socket: &std::path::Path, key: Reconnect) -> String {
    let path = socket.display().to_string();
    terminal(&shell_word(&format!("socket,id={id},path={},{}", qemu_value(&path), key.option())), false)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn shown(name: &str, queues: u16) -> String {
        shown_to(Some(Reconnect::Seconds), name, queues)
    }

    fn shown_to(reconnect: Option<Reconnect>, name: &str, queues: u16) -> String {
        let text = format!(
            "[[device]]\nname = \"d\"\n[[device.disk]]\nname = \"plc\"\nsocket = \"/run/{name}\"\npath = \"/dev/x\"\nqueues = {queues}\n\
             [[network]]\nname = \"n\"\n[[network.port]]\nname = \"plc\"\nsocket = \"/net/{name}\"\ntap = \"t\"\nmac = \"52:54:00:00:00:01\"\n"
        );
        how_to_connect(&File::parse(Path::new("x"), &text).unwrap(), reconnect)
    }

    #[test]
    fn the_key_is_that_of_the_hosts_qemu() {
        let of = |qemu| shown_to(qemu, "plc.sock", 1);
        let (old, new) = (of(Some(Reconnect::Seconds)), of(Some(Reconnect::Milliseconds)));
        assert_eq!((old.matches(",reconnect=1 ").count(), old.contains("reconnect-ms")), (2, false));
        assert_eq!((new.matches(",reconnect-ms=20 ").count(), new.contains("reconnect=")), (2, false));
        // libvirt has whole seconds only.
        assert_eq!(new.matches("<reconnect enabled='yes' timeout='1'/>").count(), 2);
        let unknown = of(None);
        assert_eq!(unknown.matches(",reconnect-ms=20 ").count(), 2, "{unknown}");
        assert!(unknown.contains("(reconnect-ms=20 from QEMU 9.2 on, reconnect=1 before):"), "{unknown}");
    }

    #[test]
    fn the_number_of_queues_is_the_files() {
        let text = shown("plc.sock", 4);
        let disk = "  plc: -chardev socket,id=disk0,path=/run/plc.sock,reconnect=1 -device vhost-user-blk-pci,chardev=disk0,num-queues=4\n";
        assert!(text.contains(disk), "{text}");
        assert!(text.contains("type='raw' queues='4'/>"), "{text}");
        // As many as QEMU asks for.
        let text = shown("plc.sock", DEFAULT_QUEUES);
        assert!(text.contains(" -device vhost-user-blk-pci,chardev=disk0\n"), "{text}");
        assert!(text.contains("type='raw'/>"), "{text}");
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
